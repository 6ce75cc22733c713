//! Folders as other programs write them: a step reads what is stored, to the byte.

use std::path::Path;

use serde_json::{Value, json};

use super::*;
use crate::ledger::Ledger;
use crate::model::safetensors::parse_header;
use crate::model::{parse_config, presets};

fn storage_word(storage: &str) -> (&'static str, u64) {
    match storage {
        "bf16" => ("BF16", 2),
        "f16" => ("F16", 2),
        "f32" => ("F32", 4),
        "fp8" => ("F8_E4M3", 1),
        "i32" => ("I32", 4),
        "i64" => ("I64", 8),
        _ => ("U8", 1),
    }
}

/// The headers of a folder that holds an inventory, each tensor under `rename`d names and flattened where it is packed.
fn headers(inventory: &Inventory, rename: impl Fn(&str) -> String) -> Vec<StoredTensor> {
    let mut header = serde_json::Map::new();
    let mut end = 0;
    for tensor in &inventory.tensors {
        let packed = matches!(tensor.storage.as_str(), "int4" | "int8" | "mxfp4" | "nvfp4");
        let (word, size) = match tensor.storage.as_str() {
            "mxfp8" => ("F8_E4M3", 1),
            "int4" if tensor.bytes.0.is_multiple_of(4) => ("I32", 4),
            other => storage_word(other),
        };
        let shape = if packed { json!([tensor.bytes.0 / size]) } else { json!(tensor.shape) };
        let (begin, bytes) = (end, tensor.bytes.0);
        end += bytes;
        header.insert(
            rename(&tensor.name),
            json!({"dtype": word, "shape": shape, "data_offsets": [begin, end]}),
        );
    }
    parse_header(Value::Object(header).to_string().as_bytes(), 8, end).unwrap()
}

/// A small model of a shipped family, with keys of its language model changed.
fn small(name: &str, changes: &[(&str, Value)]) -> Architecture {
    let document = crate::model::families_tests::changed(name, changes);
    parse_config(&document.to_string(), Path::new("config.json")).unwrap()
}

fn quantised(method: Value) -> Architecture {
    small("Llama-3.1-8B", &[("num_hidden_layers", json!(2)), ("quantization_config", method)])
}

#[test]
fn a_folder_of_every_method_is_read_to_the_byte() {
    let ct = |weights: Value| json!({"quant_method": "compressed-tensors", "ignore": ["lm_head", "re:.*self_attn.*"], "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}});
    for method in [
        json!({"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["self_attn"]}),
        json!({"quant_method": "fp8", "activation_scheme": "static"}),
        json!({"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["model.layers.0"]}),
        json!({"quant_method": "mxfp8", "ignored_layers": ["model.layers.0.mlp.down_proj"]}),
        json!({"quant_method": "gptq", "bits": 4, "group_size": 128}),
        json!({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": true, "sym": false}),
        json!({"quant_method": "gptq", "bits": 8, "group_size": 64}),
        json!({"quant_method": "awq", "bits": 4, "group_size": 128, "modules_to_not_convert": ["self_attn"]}),
        ct(json!({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32})),
        ct(json!({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": false})),
        ct(json!({"num_bits": 8, "type": "int", "strategy": "channel"})),
        ct(json!({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16})),
        ct(json!({"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32})),
        json!({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*.mlp.up_proj"]}),
        json!({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}),
        json!({"quant_method": "quark", "exclude": ["lm_head"], "global_quant_config": {"weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32}}}),
        json!({"quant_method": "bitsandbytes", "load_in_4bit": true, "bnb_4bit_use_double_quant": true}),
        json!({"quant_method": "bitsandbytes", "load_in_8bit": true}),
    ] {
        let a = quantised(method.clone());
        let predicted = a.inventory(a.quantization.as_ref().unwrap().dtype().unwrap());
        let stored = headers(&predicted, str::to_owned);
        let found = a.inventory_of(&stored).unwrap_or_else(|error| panic!("{method}: {error}"));
        assert_eq!(found.total_bytes(), predicted.total_bytes(), "{method}");
        assert_eq!(found.parameters(), predicted.parameters(), "{method}");
        // What a step reads, counted from the headers alone: all but the embedding's other rows, and what nobody reads.
        let unread = |name: &str| {
            let gptq = a.quantization.as_ref().is_some_and(|own| own.method == "gptq" && !own.reordered);
            name.starts_with("model.embed_tokens")
                || name.ends_with(".weight_shape")
                || (gptq && (name.ends_with(".g_idx") || name.ends_with(".qzeros")))
        };
        let read: u64 = stored.iter().filter(|tensor| !unread(&tensor.name)).map(|tensor| tensor.bytes).sum();
        let step = Ledger::new(&a, &found, Dtype::Bf16).decode(1, 1).bytes;
        assert_eq!(step.weights, Bytes(read), "{method}");
        assert_eq!(step.other, Bytes(4096 * 2), "{method}: one row of the embedding");
        assert_eq!(step, Ledger::new(&a, &predicted, Dtype::Bf16).decode(1, 1).bytes, "{method}");
    }
}

#[test]
fn one_tensor_in_another_format_changes_the_step_by_its_bytes() {
    let a = quantised(json!({"quant_method": "fp8", "weight_block_size": [128, 128]}));
    let step = |inventory: &Inventory| Ledger::new(&a, inventory, Dtype::Bf16).decode(1, 1).bytes.weights.0;
    let predicted = a.inventory(Dtype::Fp8);
    let mut mixed = predicted.clone();
    let at = mixed.tensors.iter().position(|t| t.name == "model.layers.1.mlp.down_proj.weight").unwrap();
    mixed.tensors[at].storage = "bf16".to_owned();
    mixed.tensors[at].bytes = Bytes(2 * 4096 * 14_336);
    let found = a.inventory_of(&headers(&mixed, str::to_owned)).unwrap();
    assert_eq!(step(&found) - step(&predicted), 4096 * 14_336);
}

#[test]
fn experts_in_one_tensor_or_many_are_the_same_and_only_the_routed_share_is_read() {
    let layers = [("num_hidden_layers", json!(4)), ("layer_types", Value::Null)];
    let a = small("Qwen3.5-35B-A3B", &layers);
    let stacked = a.inventory(Dtype::Bf16);
    let prefixed = |name: &str| name.replacen("model.", "model.language_model.", 1);
    let found = a.inventory_of(&headers(&stacked, prefixed)).unwrap();
    // Split, as the fp8 folder has them.
    let mut split = stacked.clone();
    split.tensors = Vec::new();
    for tensor in &stacked.tensors {
        if tensor.role != Role::Expert {
            split.tensors.push(tensor.clone());
            continue;
        }
        let (module, names) = match tensor.name.strip_suffix("gate_up_proj") {
            Some(module) => (module, &["gate_proj", "up_proj"][..]),
            None => (tensor.name.strip_suffix("down_proj").unwrap(), &["down_proj"][..]),
        };
        for expert in 0..256 {
            for name in names {
                let parts = 256 * names.len();
                split.tensors.push(TensorInfo {
                    name: format!("{module}{expert}.{name}.weight"),
                    shape: vec![usize::try_from(tensor.elements()).unwrap() / parts],
                    bytes: Bytes(tensor.bytes.0 / parts as u64),
                    ..tensor.clone()
                });
            }
        }
    }
    let other = a.inventory_of(&headers(&split, str::to_owned)).unwrap();
    let step = |inventory: &Inventory| Ledger::new(&a, inventory, Dtype::Bf16).decode(1, 1).bytes.weights;
    assert_eq!((step(&found), step(&other)), (step(&stacked), step(&stacked)));
    let experts: u64 = stacked.bytes_of(Role::Expert).0;
    let rest: u64 = stacked.total_bytes().0 - experts - stacked.bytes_of(Role::Embedding).0;
    assert_eq!(step(&found), Bytes(rest + experts * 8 / 256));
}

#[test]
fn gpt_oss_as_published_is_read_with_its_biases() {
    let kinds = json!(["sliding_attention", "full_attention"]);
    let a = small("gpt-oss-20b", &[("num_hidden_layers", json!(2)), ("layer_types", kinds)]);
    let predicted = a.inventory(Dtype::Mxfp4);
    let found = a.inventory_of(&headers(&predicted, str::to_owned)).unwrap();
    assert_eq!(found.parameters(), predicted.parameters());
    // 2 layers of 32 experts with 8640 biases of two bytes, of which 4 in 32 are read.
    assert_eq!(found.bytes_of(Role::ExpertBias), Bytes(2 * 32 * 8640 * 2));
    let step = |inventory: &Inventory| Ledger::new(&a, inventory, Dtype::Bf16).decode(1, 1).bytes.weights;
    assert_eq!(step(&found), step(&predicted));
}

#[test]
fn what_no_decode_step_reads_is_listed_and_not_read() {
    let a = small("Llama-3.1-8B", &[("num_hidden_layers", json!(1))]);
    let plain = a.inventory(Dtype::Bf16);
    let mut more = plain.clone();
    for name in [
        "model.layers.1.eh_proj.weight",
        "mtp.layers.0.mlp.up_proj.weight",
        "visual.blocks.0.attn.qkv.weight",
        "vision_tower.patch_embed.proj.bias",
        "model.multi_modal_projector.linear_1.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
    ] {
        more.tensors.push(TensorInfo {
            name: name.to_owned(),
            shape: vec![8],
            bytes: Bytes(16),
            ..plain.tensors[0].clone()
        });
    }
    let found = a.inventory_of(&headers(&more, str::to_owned)).unwrap();
    let step = |inventory: &Inventory| Ledger::new(&a, inventory, Dtype::Bf16).decode(1, 1).bytes;
    assert_eq!(step(&found), step(&plain));
    assert_eq!(found.parameters(), plain.parameters());
    assert_eq!(found.total_bytes(), plain.total_bytes() + Bytes(6 * 16));
}

#[test]
fn a_folder_of_another_model_is_refused_by_what_does_not_fit() {
    let a = small("Llama-3.1-8B", &[("num_hidden_layers", json!(2))]);
    let plain = a.inventory(Dtype::Bf16);
    let refused =
        |inventory: &Inventory| a.inventory_of(&headers(inventory, str::to_owned)).unwrap_err().to_string();
    let mut less = plain.clone();
    less.tensors.retain(|tensor| tensor.name != "model.layers.1.mlp.up_proj.weight");
    let message = refused(&less);
    assert!(
        message.starts_with("layer 1 has 159383552 matrix weights in the tensors and 218103808 by"),
        "{message}"
    );
    let mut more = plain.clone();
    more.tensors.push(TensorInfo {
        name: "model.layers.0.mlp.fourth_proj.weight".into(),
        ..plain.tensors[1].clone()
    });
    assert_eq!(refused(&more), "tensor model.layers.0.mlp.fourth_proj.weight is not one of the Llama family");
    // The config says 128 query heads, the tensors have 32.
    let other = Architecture { heads: 128, ..a.clone() };
    assert!(other.inventory_of(&headers(&plain, str::to_owned)).is_err());
}

#[test]
fn every_shipped_shape_is_found_in_its_own_tensors() {
    for name in presets::names() {
        let a = presets::find(name).unwrap().architecture;
        let dtype =
            a.quantization.as_ref().and_then(crate::model::Quantization::dtype).unwrap_or(Dtype::Bf16);
        let inventory = a.inventory(dtype);
        // Names and roles alone: headers of a terabyte are as long as those of a kilobyte.
        let reader_inventory = a.inventory(Dtype::F32);
        let reader = Reader::new(&a, &reader_inventory).unwrap();
        for tensor in &inventory.tensors {
            let stored = StoredTensor {
                name: tensor.name.clone(),
                storage: "BF16",
                shape: tensor.shape.clone(),
                offset: 0,
                bytes: tensor.bytes.0,
            };
            let listed = reader.listed(&stored).unwrap_or_else(|error| panic!("{name}: {error}"));
            assert_eq!((listed.role, listed.layer), (tensor.role, tensor.layer), "{name}: {}", tensor.name);
        }
    }
}
