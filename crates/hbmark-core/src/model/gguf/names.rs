//! What a tensor of a checkpoint is called in a GGUF file.
//!
//! *Source*: `tensor_mapping.py` of the gguf project.

use crate::model::{Architecture, Dtype, Family, Role};

/// Tensors outside the layers: checkpoint's name, file's name.
const TOP: [(&str, &str); 3] = [
    ("model.embed_tokens.weight", "token_embd.weight"),
    ("model.norm.weight", "output_norm.weight"),
    ("lm_head.weight", "output.weight"),
];

/// Modules of a layer.
const IN_LAYER: [(&str, &str); 18] = [
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("mlp.gate", "ffn_gate_inp"),
    ("block_sparse_moe.gate", "ffn_gate_inp"),
    ("mlp.router", "ffn_gate_inp"),
    ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
    ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
    ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
];

/// Matrices of an expert, which a file has for all experts of a layer in one tensor.
const OF_EXPERT: [(&str, &str); 6] = [
    ("gate_proj", "ffn_gate_exps"),
    ("up_proj", "ffn_up_exps"),
    ("down_proj", "ffn_down_exps"),
    ("w1", "ffn_gate_exps"),
    ("w3", "ffn_up_exps"),
    ("w2", "ffn_down_exps"),
];

/// Where a file has a tensor of the checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileTensor {
    pub name: String,
    /// Which of the file's `[experts, out, in]`.
    pub expert: Option<usize>,
}

/// The file's tensor for a name in the checkpoint of a family, where GGUF has one.
pub fn file_tensor(family: Family, name: &str) -> Option<FileTensor> {
    let of = |table: &[(&'static str, &'static str)], module: &str| {
        table.iter().find(|(checkpoint, _)| *checkpoint == module).map(|(_, file)| *file)
    };
    if let Some(file) = of(&TOP, name) {
        return Some(FileTensor { name: file.to_owned(), expert: None });
    }
    let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
    let (module, kind) = match rest {
        "self_attn.sinks" => (rest, "weight"),
        _ => rest.rsplit_once('.')?,
    };
    let (file, expert) = match module.split_once(".experts.") {
        Some(("mlp" | "block_sparse_moe", expert)) => {
            let (expert, matrix) = expert.split_once('.')?;
            (of(&OF_EXPERT, matrix)?, Some(expert.parse().ok()?))
        }
        _ if module == "self_attn.sinks" => ("attn_sinks", None),
        _ if module == "post_attention_layernorm" && family == Family::GptOss => {
            ("post_attention_norm", None)
        }
        _ => (of(&IN_LAYER, module)?, None),
    };
    Some(FileTensor { name: format!("blk.{layer}.{file}.{kind}"), expert })
}

/// The shape that a file has for a tensor of its own: a matrix of one row is a vector.
pub fn file_shape(shape: &[usize]) -> &[usize] {
    match shape {
        [1, row @ ..] => row,
        _ => shape,
    }
}

/// Every tensor of a file of this architecture: name, shape, role, layer.
pub fn expected_tensors(architecture: &Architecture) -> Vec<(String, Vec<usize>, Role, Option<usize>)> {
    let experts = architecture.experts.as_ref().map_or(0, |experts| experts.count);
    let listed = architecture.inventory(Dtype::Gguf).tensors.into_iter().filter_map(|info| {
        // What has no name there is looked for by its own, and so is missed.
        let tensor = file_tensor(architecture.family, &info.name)
            .unwrap_or(FileTensor { name: info.name, expert: None });
        let shape = match tensor.expert {
            None => file_shape(&info.shape).to_vec(),
            Some(0) => [&[experts], info.shape.as_slice()].concat(),
            Some(_) => return None,
        };
        Some((tensor.name, shape, info.role, info.layer))
    });
    listed.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Biases, test_shapes as shapes};

    fn shape_of(architecture: &Architecture, name: &str) -> Option<Vec<usize>> {
        let found = expected_tensors(architecture).into_iter().find(|(found, ..)| found == name);
        found.map(|(_, shape, ..)| shape)
    }

    #[test]
    fn a_dense_file_has_the_names_that_converters_write() {
        let mut dense = shapes::qwen3_0_6b();
        (dense.layers, dense.tied_head) = (1, false);
        dense.biases = Biases { qkv: true, o: true, mlp: true };
        let mut names: Vec<String> = expected_tensors(&dense).into_iter().map(|(name, ..)| name).collect();
        names.sort();
        let matrices = ["attn_k", "attn_output", "attn_q", "attn_v", "ffn_down", "ffn_gate", "ffn_up"];
        let norms = ["attn_k_norm", "attn_norm", "attn_q_norm", "ffn_norm"];
        let mut wanted: Vec<String> = matrices.iter().map(|name| format!("blk.0.{name}.bias")).collect();
        wanted.extend(matrices.iter().chain(&norms).map(|name| format!("blk.0.{name}.weight")));
        wanted.extend(["output.weight", "output_norm.weight", "token_embd.weight"].map(str::to_owned));
        wanted.sort();
        assert_eq!(names, wanted);
        assert_eq!(shape_of(&dense, "blk.0.attn_output.weight"), Some(vec![1024, 2048]));
        assert_eq!(shape_of(&dense, "blk.0.attn_k.bias"), Some(vec![1024]));
    }

    #[test]
    fn experts_of_a_layer_are_one_tensor() {
        let qwen = shapes::qwen3_30b_a3b();
        assert_eq!(shape_of(&qwen, "blk.47.ffn_gate_exps.weight"), Some(vec![128, 768, 2048]));
        assert_eq!(shape_of(&qwen, "blk.47.ffn_down_exps.weight"), Some(vec![128, 2048, 768]));
        assert_eq!(shape_of(&qwen, "blk.0.ffn_gate_inp.weight"), Some(vec![128, 2048]));
        assert_eq!(expected_tensors(&qwen).len(), 48 * 12 + 3);
        let mixtral = shapes::mixtral_8x7b();
        assert_eq!(shape_of(&mixtral, "blk.0.ffn_down_exps.weight"), Some(vec![8, 4096, 14_336]));
        assert_eq!(
            file_tensor(Family::Mixtral, "model.layers.3.block_sparse_moe.experts.5.w3.weight"),
            Some(FileTensor { name: "blk.3.ffn_up_exps.weight".to_owned(), expert: Some(5) })
        );
    }

    #[test]
    fn gpt_oss_and_qwen2_moe_have_names_of_their_own() {
        let file = |family, name: &str| file_tensor(family, &format!("model.layers.1.{name}")).unwrap();
        for (name, wanted, expert) in [
            ("post_attention_layernorm.weight", "blk.1.post_attention_norm.weight", None),
            ("self_attn.sinks", "blk.1.attn_sinks.weight", None),
            ("mlp.router.bias", "blk.1.ffn_gate_inp.bias", None),
            ("mlp.experts.7.down_proj.bias", "blk.1.ffn_down_exps.bias", Some(7)),
        ] {
            assert_eq!(file(Family::GptOss, name), FileTensor { name: wanted.to_owned(), expert });
        }
        let gate = file(Family::Qwen2Moe, "mlp.shared_expert_gate.weight");
        assert_eq!(
            (gate.name.as_str(), file_shape(&[1, 2048])),
            ("blk.1.ffn_gate_inp_shexp.weight", &[2048][..])
        );
        let shared = file(Family::Qwen2Moe, "mlp.shared_expert.up_proj.weight");
        assert_eq!((shared.name.as_str(), shared.expert), ("blk.1.ffn_up_shexp.weight", None));
    }

    #[test]
    fn what_no_file_has_is_named_as_it_is() {
        for foreign in [
            "model.rotary_emb.inv_freq",
            "x",
            "model.layers.0.mlp.experts.x.up_proj.weight",
            "model.layers.0.other.experts.0.up_proj.weight",
        ] {
            assert_eq!(file_tensor(Family::Llama, foreign), None);
        }
    }
}
