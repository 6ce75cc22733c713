//! From dimensions to the list of tensors: what a checkpoint of this architecture holds, and in how many bytes.
//!
//! Enters: an [`Architecture`] and a storage [`Dtype`]. Leaves: an [`Inventory`] whose names and `[out, in]` shapes are those
//! of the published checkpoints of the family, so that synthetic weights, file validation and the byte ledger agree with a
//! downloaded folder.
//!
//! What each dtype stores:
//!
//! | dtype | linear layers | scales | embedding, head, router, norms, biases |
//! |---|---|---|---|
//! | f32, bf16, f16 | as named | none | as named |
//! | int8 | 1 B | one f32 per output channel | bf16 |
//! | fp8 | 1 B (e4m3) | one f32 per output channel | bf16 |
//! | int4 | ½ B | one f16 scale and one f16 zero per group of 128 (32 where a width is not a multiple): +¼ bit per weight | bf16 |
//! | mxfp8, mxfp4 | 1 B, ½ B | one byte (e8m0) per 32 inputs | bf16 |
//! | nvfp4 | ½ B | one byte (e4m3) per 16 inputs, one f32 for the tensor | bf16 |
//! | `q8_0`, gguf | 34 B per 32 weights | inside the block | `q8_0` tables, f32 router, norms and biases |
//! | `q4_0` | 18 B per 32 weights | inside the block | as for `q8_0` |
//!
//! That is how this program would store plain weights. A model whose config has a `quantization_config` is listed as that says, module by
//! module ([`super::format`]), where its own storage is asked for. Quantised checkpoints leave embedding and head at 16 bits unless their
//! config says otherwise, and so does this list. The mixture of formats of a real GGUF file is known only from its header;
//! a generated list uses `q8_0` throughout. A multi-token-prediction layer (`DeepSeek`-V3's layer 61) is
//! left out: a plain decode step never reads it.

mod layers;

use sha2::{Digest, Sha256};

use layers::{Lister, Names};

pub use layers::{MixtureNames, NormNames, sinks_name};

use super::architecture::{Architecture, Biases, Dtype, Family};
use super::config::limits;
use super::format::{Format, Layout, Part, Scales};
use super::gguf::BlockType;
use super::inventory::{Inventory, Role, TensorInfo};
use super::quantization::ModuleStorage;
use crate::units::Bytes;

/// Side of the square block that shares one fp8 scale: `weight_block_size` of `DeepSeek`-V3's `config.json`.
const FP8_BLOCK: usize = 128;
/// Weights that share an int4 scale and zero when the config names no group size: that of most AWQ and GPTQ checkpoints, and a smaller one
/// where rows do not divide by it.
const INT4_GROUPS: [usize; 2] = [128, 32];

impl Architecture {
    /// Every tensor of a checkpoint of this architecture, stored as `dtype`.
    ///
    /// *Shapes*: linear layers are `[out, in]`; an int4 tensor keeps its logical shape while its bytes are the packed ones.
    pub fn inventory(&self, dtype: Dtype) -> Inventory {
        let format = StorageFormat::new(self, dtype);
        // At once: a list that grows by doubling takes twice its memory.
        let most = self.tensors_at_most().min(limits::TENSORS) * format.tensors_of_a_matrix();
        let tensors = Vec::with_capacity(most);
        let mut list = List { format, layer: None, latent_biases: self.biases, tensors };
        let names = Names::of(self.family);
        list.table(names.embedding, &[self.vocab_size, self.hidden_size], Role::Embedding);
        if let Some(draft) = self.draft {
            let module = |name| format!("model.{name}");
            for norm in draft.norms().into_iter().flatten() {
                list.norm(&format!("{}.weight", module(norm)), self.hidden_size);
            }
            list.in_16_bits(&module(draft.projection()), self.hidden_size, 2 * self.hidden_size);
        }
        for layer in 0..self.layers {
            list.layer = Some(layer);
            let prefix = format!("{}.{layer}", names.layers);
            Lister { family: self.family, hidden: self.hidden_size, list: &mut list }
                .layer(&prefix, &self.layer(layer));
        }
        list.layer = None;
        list.norm(names.last_norm, self.hidden_size);
        if !self.tied_head {
            list.head("lm_head", self.vocab_size, self.hidden_size);
        }
        Inventory { tensors: list.tensors }
    }

    /// Columns that share one int4 scale and zero: the config's `group_size`, or a whole row, where it quantises to four bits; else 128, or 32
    /// where a layer's width is not a multiple of 128.
    pub fn int4_group(&self) -> usize {
        if let Some(own) = self.quantization.as_ref().filter(|quantization| quantization.bits == 4) {
            return own.group_size.filter(|&group| group > 0).unwrap_or(limits::FFN);
        }
        let expert = self.experts.as_ref().map_or(0, |experts| experts.ffn_size);
        let widths = [self.hidden_size, self.heads * self.head_dim, self.ffn_size, expert];
        let [large, small] = INT4_GROUPS;
        if widths.iter().all(|width| width.is_multiple_of(large)) { large } else { small }
    }
}

/// The name of a model's content: sha256 over its dimensions and its tensors' names, shapes and storage, in hex.
///
/// Two folders with the same hash have the same bytes to move; the values of the weights are not part of it.
///
/// # Panics
/// Never in practice: both arguments are plain data, which always serialises.
pub fn model_hash(architecture: &Architecture, inventory: &Inventory) -> String {
    let mut hasher = Sha256::new();
    hasher.update(serde_json::to_vec(architecture).expect("an architecture is plain data"));
    for tensor in &inventory.tensors {
        hasher.update(format!("\n{} {:?} {}", tensor.name, tensor.shape, tensor.storage));
    }
    format!("{:x}", hasher.finalize())
}

/// A plain floating-point format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Float {
    F32,
    Bf16,
    F16,
}

impl Float {
    fn bytes(self, elements: u64) -> u64 {
        elements * if self == Self::F32 { 4 } else { 2 }
    }

    fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        }
    }
}

/// How linear layers are stored.
#[derive(Debug, Clone)]
enum Matrices {
    Plain,
    /// As this program quantises a row itself: an f32 scale for each.
    Int8,
    Fp8PerChannel,
    /// As this program packs it: a scale and a zero, f16 both.
    Int4 {
        group: usize,
    },
    /// One of the published formats throughout.
    Uniform(Format),
    /// Module by module, as the config says.
    Own(ModuleStorage),
    /// One of ggml's block formats, and that of the embedding and the head.
    Ggml {
        linear: BlockType,
        tables: BlockType,
    },
}

/// How a whole checkpoint is stored.
#[derive(Debug, Clone)]
struct StorageFormat {
    matrices: Matrices,
    /// Everything that is not a linear layer.
    float: Float,
    /// As a GGUF file has it.
    own_file: bool,
}

impl StorageFormat {
    fn new(architecture: &Architecture, dtype: Dtype) -> Self {
        let own = architecture.quantization.as_ref().filter(|own| own.dtype() == Some(dtype));
        if let Some(own) = own.filter(|own| !own.rules.is_empty())
            && let Ok(storage) = own.storage()
        {
            let float = if architecture.native_dtype == Some(Dtype::F16) { Float::F16 } else { Float::Bf16 };
            return Self { matrices: Matrices::Own(storage), float, own_file: false };
        }
        let block = |dtype: Dtype| BlockType::named(dtype.name()).expect("one of ggml's formats");
        let ggml = |linear, tables| Matrices::Ggml { linear: block(linear), tables: block(tables) };
        let (matrices, float) = match dtype {
            Dtype::F32 => (Matrices::Plain, Float::F32),
            Dtype::Bf16 => (Matrices::Plain, Float::Bf16),
            Dtype::F16 => (Matrices::Plain, Float::F16),
            Dtype::Int8 => (Matrices::Int8, Float::Bf16),
            // A result of a version without rules.
            Dtype::Fp8 if own.is_some_and(|own| own.method == "fp8" && own.group_size.is_some()) => {
                let scales = Scales::Block { rows: FP8_BLOCK, columns: FP8_BLOCK };
                (Matrices::Uniform(Format::Fp8 { scales, input_scale: false }), Float::Bf16)
            }
            Dtype::Fp8 => (Matrices::Fp8PerChannel, Float::Bf16),
            Dtype::Int4 => (Matrices::Int4 { group: architecture.int4_group() }, Float::Bf16),
            Dtype::Mxfp8 => (Matrices::Uniform(Format::Mxfp8), Float::Bf16),
            Dtype::Mxfp4 => (Matrices::Uniform(Format::Mxfp4), Float::Bf16),
            Dtype::Nvfp4 => (Matrices::Uniform(Format::Nvfp4 { input_scale: false }), Float::Bf16),
            Dtype::Q8_0 | Dtype::Gguf => (ggml(Dtype::Q8_0, Dtype::Q8_0), Float::F32),
            Dtype::Q4_0 => (ggml(Dtype::Q4_0, Dtype::Q8_0), Float::F32),
            Dtype::Q4K => (ggml(Dtype::Q4K, Dtype::Q6K), Float::F32),
            Dtype::Q5K => (ggml(Dtype::Q5K, Dtype::Q6K), Float::F32),
            Dtype::Q6K => (ggml(Dtype::Q6K, Dtype::Q6K), Float::F32),
        };
        Self { matrices, float, own_file: dtype == Dtype::Gguf }
    }

    /// The published format of a module, where it has one.
    fn published(&self, module: &str) -> Option<(Format, Layout)> {
        match &self.matrices {
            Matrices::Uniform(format) => Some((*format, Layout::Hub)),
            Matrices::Own(storage) => storage.format(module).map(|format| (format, storage.layout())),
            _ => None,
        }
    }

    /// A linear layer and its scales.
    fn tensors_of_a_matrix(&self) -> usize {
        match &self.matrices {
            Matrices::Plain | Matrices::Ggml { .. } => 1,
            Matrices::Int8 | Matrices::Fp8PerChannel => 2,
            Matrices::Int4 { .. } | Matrices::Uniform(_) => 3,
            Matrices::Own(storage) => storage.tensors_of_a_matrix(),
        }
    }
}

/// The growing list, and the layer it is in.
struct List {
    format: StorageFormat,
    layer: Option<usize>,
    latent_biases: Biases,
    tensors: Vec<TensorInfo>,
}

impl List {
    fn push_stored(&mut self, name: String, shape: &[usize], storage: &str, bytes: u64, role: Role) {
        self.tensors.push(TensorInfo {
            name,
            shape: shape.to_vec(),
            storage: storage.to_owned(),
            bytes: Bytes(bytes),
            role,
            layer: self.layer,
        });
    }

    fn blocks(&mut self, name: String, shape: &[usize; 2], format: BlockType, role: Role) {
        // Rows are padded to whole blocks.
        let bytes = shape[0] as u64 * (shape[1] as u64).div_ceil(format.elements) * format.bytes;
        self.push_stored(name, shape, format.name, bytes, role);
    }

    fn push(&mut self, name: String, shape: &[usize], float: Float, role: Role) {
        self.push_stored(name, shape, float.name(), float.bytes(elements(shape)), role);
    }

    /// A tensor that stays a plain float whatever the linear layers are.
    fn float(&mut self, name: &str, shape: &[usize], role: Role) {
        self.push(name.to_owned(), shape, self.format.float, role);
    }

    fn norm(&mut self, name: &str, width: usize) {
        self.float(name, &[width], Role::Norm);
    }

    /// The embedding table or the head: 16 bits when the linear layers are quantised, except in ggml's formats.
    fn table(&mut self, name: &str, shape: &[usize; 2], role: Role) {
        match self.format.matrices {
            Matrices::Ggml { tables, .. } => self.blocks(name.to_owned(), shape, tables, role),
            _ => self.float(name, shape, role),
        }
    }

    /// A tensor that is f32 in every checkpoint.
    fn single(&mut self, name: String, shape: &[usize], role: Role) {
        self.push(name, shape, Float::F32, role);
    }

    /// Whether the experts of a layer are one tensor: as published, and split by writers of quantised checkpoints but gpt-oss's own.
    fn stacks_experts(&self, experts: &str, family: Family) -> bool {
        // A file has gate and up of all experts apart, and readers take each expert by itself.
        if self.format.own_file {
            return false;
        }
        family == Family::GptOss || self.format.published(&format!("{experts}.0.up_proj")).is_none()
    }

    /// A matrix of all experts of a layer, `[experts, out, input]`; plain ones are `[experts, input, out]` where a family has them `by_input`.
    fn stacked(&mut self, name: &str, shape: [usize; 3], by_input: bool, bias: bool) {
        let [count, out, input] = shape;
        let own = matches!(self.format.matrices, Matrices::Plain | Matrices::Own(_) | Matrices::Uniform(_));
        match self.format.published(name) {
            Some((format, layout)) => {
                let first = self.tensors.len();
                self.published(name, &format.parts(layout, count * out, input), Role::Expert);
                self.tensors[first].shape = shape.to_vec();
                if let [_, scales, ..] = &mut self.tensors[first..]
                    && let Some(groups) = scales.shape.last().copied()
                {
                    scales.shape = vec![count, out, groups];
                }
                // As published, or as this program stores plain ones.
                let own = matches!(self.format.matrices, Matrices::Own(_));
                let suffixes = if own { ["_blocks", "_scales"] } else { ["", "_scale"] };
                for (tensor, suffix) in self.tensors[first..].iter_mut().zip(suffixes) {
                    tensor.name = format!("{name}{suffix}");
                }
            }
            None if own && by_input => self.float(name, &[count, input, out], Role::Expert),
            None if own => self.float(name, &shape, Role::Expert),
            None => self.packed_here(name, count * out, input, Role::Expert),
        }
        if bias {
            self.float(&format!("{name}_bias"), &[count, out], Role::ExpertBias);
        }
    }

    /// The head is a linear layer where the rules of a checkpoint name it, and a table everywhere else.
    fn head(&mut self, name: &str, out: usize, input: usize) {
        match &self.format.matrices {
            Matrices::Own(storage) if storage.format(name).is_some() => {
                self.linear(name, out, input, Role::Head, false);
            }
            _ => self.table(&format!("{name}.weight"), &[out, input], Role::Head),
        }
    }

    /// A linear layer `[out, input]`, its scales, and its bias where it has one.
    fn linear(&mut self, name: &str, out: usize, input: usize, role: Role, bias: bool) {
        match self.format.published(name) {
            Some((format, layout)) => self.published(name, &format.parts(layout, out, input), role),
            None => self.packed_here(&format!("{name}.weight"), out, input, role),
        }
        if bias {
            let role = if role == Role::Expert { Role::ExpertBias } else { Role::Bias };
            self.float(&format!("{name}.bias"), &[out], role);
        }
    }

    /// What expands latents to keys and values. Engines multiply with its transpose, whose rows would need other scales, so it stays in 16 bits
    /// unless a checkpoint has it otherwise.
    fn expansion(&mut self, name: &str, out: usize, input: usize) {
        match self.format.matrices {
            Matrices::Own(_) => self.linear(name, out, input, Role::Matrix, false),
            _ => self.in_16_bits(name, out, input),
        }
    }

    /// A linear layer that no quantised checkpoint has in fewer bits.
    fn in_16_bits(&mut self, name: &str, out: usize, input: usize) {
        match self.format.matrices {
            Matrices::Plain => self.linear(name, out, input, Role::Matrix, false),
            _ => self.push(format!("{name}.weight"), &[out, input], Float::Bf16, Role::Matrix),
        }
    }

    fn published(&mut self, name: &str, parts: &[Part], role: Role) {
        for (at, part) in parts.iter().enumerate() {
            let role = match (at, part.read) {
                (0, _) => role,
                (_, true) => scale_role(role),
                (_, false) => Role::Unused,
            };
            self.push_stored(format!("{name}{}", part.suffix), &part.shape, part.storage, part.bytes, role);
        }
    }

    /// A matrix as this program would store it.
    fn packed_here(&mut self, name: &str, out: usize, input: usize, role: Role) {
        let shape = [out, input];
        let count = elements(&shape);
        let weight = name.to_owned();
        match self.format.matrices {
            Matrices::Plain | Matrices::Uniform(_) | Matrices::Own(_) => {
                self.push(weight, &shape, self.format.float, role);
            }
            Matrices::Int8 | Matrices::Fp8PerChannel => {
                let storage = if matches!(self.format.matrices, Matrices::Int8) { "int8" } else { "fp8" };
                self.push_stored(weight, &shape, storage, count, role);
                self.push(format!("{name}_scale"), &[out, 1], Float::F32, scale_role(role));
            }
            Matrices::Int4 { group } => {
                self.push_stored(weight, &shape, "int4", count.div_ceil(2), role);
                let groups = [out, input.div_ceil(group)];
                self.push(format!("{name}_scale"), &groups, Float::F16, scale_role(role));
                self.push(format!("{name}_zero_point"), &groups, Float::F16, scale_role(role));
            }
            Matrices::Ggml { linear, .. } => self.blocks(weight, &shape, linear, role),
        }
    }
}

fn scale_role(of: Role) -> Role {
    if of == Role::Expert { Role::ExpertScale } else { Role::Scale }
}

fn elements(shape: &[usize]) -> u64 {
    shape.iter().map(|&dimension| dimension as u64).product()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::model::Quantization;
    use crate::model::test_shapes as shapes;

    fn find<'a>(inventory: &'a Inventory, name: &str) -> &'a TensorInfo {
        inventory.tensors.iter().find(|t| t.name == name).unwrap_or_else(|| panic!("no tensor {name}"))
    }

    /// The published parameter counts (`safetensors` index of each repository; tied heads counted once).
    #[test]
    fn parameter_counts_are_the_published_ones() {
        let published = [
            (shapes::smollm2_135m(), 134_515_008),
            (shapes::llama_3_2_1b(), 1_235_814_400),
            (shapes::llama_3_1_8b(), 8_030_261_248),
            (shapes::llama_2_7b(), 6_738_415_616),
            (shapes::llama_3_1_70b(), 70_553_706_496),
            (shapes::mistral_7b(), 7_241_732_096),
            (shapes::qwen2_5_7b(), 7_615_616_512),
            (shapes::qwen3_0_6b(), 596_049_920),
            (shapes::qwen3_8b(), 8_190_735_360),
            (shapes::qwen3_32b(), 32_762_123_264),
            (shapes::qwen3_30b_a3b(), 30_532_122_624),
            (shapes::mixtral_8x7b(), 46_702_792_704),
            // Without the multi-token-prediction layer, with 58 × 256 correction biases.
            (shapes::deepseek_v3(), 671_026_419_200),
        ];
        for (architecture, parameters) in published {
            for dtype in [
                Dtype::Bf16,
                Dtype::Fp8,
                Dtype::Int8,
                Dtype::Int4,
                Dtype::Gguf,
                Dtype::Q8_0,
                Dtype::Q4_0,
                Dtype::Q4K,
            ] {
                let inventory = architecture.inventory(dtype);
                assert_eq!(inventory.parameters(), parameters, "{:?} as {dtype}", architecture.family);
            }
        }
    }

    #[test]
    fn a_bf16_checkpoint_is_two_bytes_per_parameter() {
        let inventory = shapes::llama_3_1_8b().inventory(Dtype::Bf16);
        assert_eq!(inventory.total_bytes(), Bytes(2 * 8_030_261_248));
        let inventory = shapes::llama_3_1_8b().inventory(Dtype::F32);
        assert_eq!(inventory.total_bytes(), Bytes(4 * 8_030_261_248));
    }

    #[test]
    fn names_and_shapes_are_those_of_the_published_checkpoints() {
        let llama = shapes::llama_3_1_8b().inventory(Dtype::Bf16);
        assert_eq!(find(&llama, "model.layers.31.self_attn.k_proj.weight").shape, [1024, 4096]);
        assert_eq!(find(&llama, "model.layers.0.mlp.down_proj.weight").shape, [4096, 14336]);
        assert_eq!(find(&llama, "lm_head.weight").role, Role::Head);
        // 9 tensors a layer, and the table, the last norm and the head: the 291 of the published index.
        assert_eq!(llama.tensors.len(), 291);

        let qwen2 = shapes::qwen2_5_7b().inventory(Dtype::Bf16);
        assert_eq!(find(&qwen2, "model.layers.3.self_attn.v_proj.bias").shape, [512]);
        assert_eq!(qwen2.tensors.len(), 339);

        let qwen3 = shapes::qwen3_0_6b().inventory(Dtype::Bf16);
        assert_eq!(find(&qwen3, "model.layers.3.self_attn.q_norm.weight").shape, [128]);
        assert!(qwen3.tensors.iter().all(|t| t.name != "lm_head.weight"));

        let moe = shapes::qwen3_30b_a3b().inventory(Dtype::Bf16);
        assert_eq!(find(&moe, "model.layers.47.mlp.experts.127.gate_proj.weight").shape, [768, 2048]);
        assert_eq!(find(&moe, "model.layers.0.mlp.gate.weight").role, Role::Router);
        assert_eq!(moe.tensors.len(), 18_867);

        let mixtral = shapes::mixtral_8x7b().inventory(Dtype::Bf16);
        let down = find(&mixtral, "model.layers.9.block_sparse_moe.experts.7.w2.weight");
        assert_eq!((down.shape.as_slice(), down.role), (&[4096, 14336][..], Role::Expert));
        assert_eq!(mixtral.tensors.len(), 995);
    }

    #[test]
    fn deepseek_v3_lists_latent_attention_and_shared_experts() {
        let inventory = shapes::deepseek_v3().inventory(Dtype::Fp8);
        let layer = "model.layers.3";
        for (name, shape) in [
            ("self_attn.q_a_proj.weight", vec![1536, 7168]),
            ("self_attn.q_a_layernorm.weight", vec![1536]),
            ("self_attn.q_b_proj.weight", vec![24_576, 1536]),
            ("self_attn.kv_a_proj_with_mqa.weight", vec![576, 7168]),
            ("self_attn.kv_a_proj_with_mqa.weight_scale_inv", vec![5, 56]),
            ("self_attn.kv_a_layernorm.weight", vec![512]),
            ("self_attn.kv_b_proj.weight", vec![32_768, 512]),
            ("self_attn.o_proj.weight", vec![7168, 16_384]),
            ("mlp.gate.e_score_correction_bias", vec![256]),
            ("mlp.shared_experts.down_proj.weight", vec![7168, 2048]),
            ("mlp.experts.255.up_proj.weight_scale_inv", vec![16, 56]),
        ] {
            assert_eq!(find(&inventory, &format!("{layer}.{name}")).shape, shape, "{name}");
        }
        assert_eq!(find(&inventory, "model.layers.2.mlp.gate_proj.weight").shape, [18_432, 7168]);
        assert!(inventory.tensors.iter().all(|t| !t.name.contains("layers.61")));
        // The published fp8 folder is 688.6 GB with its 11.6 B-parameter prediction layer; without it, about 672.6 GB.
        let gigabytes = inventory.total_bytes().as_f64() / 1e9;
        assert!((672.0..674.0).contains(&gigabytes), "{gigabytes}");
    }

    #[test]
    fn int4_adds_a_quarter_bit_per_weight_at_group_128_and_one_at_32() {
        let mut architecture = shapes::llama_3_1_8b();
        // Linear parameters of the 32 layers: 8,030,261,248 − 2 × 128,256 × 4096 − 65 × 4096.
        let linear = 6_979_321_856_u64;
        let bytes = |architecture: &Architecture| {
            let inventory = architecture.inventory(Dtype::Int4);
            (inventory.bytes_of(Role::Matrix).0, inventory.bytes_of(Role::Scale).0)
        };
        assert_eq!(bytes(&architecture), (linear / 2, linear / 32));
        architecture.quantization = Some(Quantization {
            method: "gptq".into(),
            bits: 4,
            group_size: Some(32),
            ..Quantization::default()
        });
        assert_eq!(bytes(&architecture), (linear / 2, linear / 8));
        architecture.quantization = None;
        architecture.ffn_size += 32;
        assert_eq!(architecture.int4_group(), 32);
    }

    #[test]
    fn quantised_checkpoints_keep_tables_and_norms_at_16_bits() {
        for dtype in [Dtype::Int8, Dtype::Fp8, Dtype::Int4] {
            let inventory = shapes::qwen3_30b_a3b().inventory(dtype);
            for tensor in &inventory.tensors {
                let linear = matches!(tensor.role, Role::Matrix | Role::Expert);
                assert_eq!(tensor.storage == dtype.name(), linear, "{} is {}", tensor.name, tensor.storage);
            }
        }
    }

    #[test]
    fn gguf_stands_for_eight_and_a_half_bits_per_weight() {
        let inventory = shapes::llama_3_1_8b().inventory(Dtype::Gguf);
        // 8.5 bits for 8,029,995,008 matrix and table weights, f32 for 65 × 4096 norm weights.
        assert_eq!(inventory.total_bytes(), Bytes(8_029_995_008 / 32 * 34 + 65 * 4096 * 4));
    }

    #[test]
    fn q4_0_keeps_tables_at_eight_bits_and_q8_0_is_what_gguf_stands_for() {
        let architecture = shapes::llama_3_1_8b();
        assert_eq!(architecture.inventory(Dtype::Q8_0), architecture.inventory(Dtype::Gguf));
        let (linear, table) = (6_979_321_856_u64, 128_256 * 4096_u64);
        let inventory = architecture.inventory(Dtype::Q4_0);
        assert_eq!(inventory.bytes_of(Role::Matrix), Bytes(linear / 32 * 18));
        assert_eq!(inventory.bytes_of(Role::Head), Bytes(table / 32 * 34));
        assert_eq!(inventory.total_bytes(), Bytes(linear / 32 * 18 + 2 * table / 32 * 34 + 65 * 4096 * 4));
    }

    #[test]
    fn blocks_of_256_keep_tables_at_six_bits() {
        let architecture = shapes::llama_3_1_8b();
        let (linear, table) = (6_979_321_856_u64, 128_256 * 4096_u64);
        for (dtype, bytes) in [(Dtype::Q4K, 144), (Dtype::Q5K, 176), (Dtype::Q6K, 210)] {
            let inventory = architecture.inventory(dtype);
            assert_eq!(inventory.bytes_of(Role::Matrix), Bytes(linear / 256 * bytes), "{dtype}");
            assert_eq!(inventory.bytes_of(Role::Head), Bytes(table / 256 * 210), "{dtype}");
            assert_eq!(find(&inventory, "model.embed_tokens.weight").storage, "q6_k");
            assert_eq!(find(&inventory, "model.layers.0.mlp.up_proj.weight").storage, dtype.name());
        }
    }

    #[test]
    fn no_name_is_listed_twice() {
        let inventory = shapes::deepseek_v3().inventory(Dtype::Fp8);
        let names: HashSet<_> = inventory.tensors.iter().map(|t| t.name.as_str()).collect();
        assert_eq!(names.len(), inventory.tensors.len());
    }

    #[test]
    fn the_hash_changes_with_the_shape_and_with_the_storage() {
        let architecture = shapes::smollm2_135m();
        let bf16 = model_hash(&architecture, &architecture.inventory(Dtype::Bf16));
        assert_eq!(bf16.len(), 64);
        assert_eq!(bf16, model_hash(&architecture, &architecture.inventory(Dtype::Bf16)));
        assert_ne!(bf16, model_hash(&architecture, &architecture.inventory(Dtype::F16)));
        let wider = Architecture { ffn_size: 1540, ..architecture };
        assert_ne!(bf16, model_hash(&wider, &wider.inventory(Dtype::Bf16)));
    }
}
