//! Small models of every kind from a seed.
//!
//! Enters: a seed. Leaves: a [`Sample`]: dimensions that are multiples of nothing, and weights of a size that keeps activations near
//! one through any layer, so that an error anywhere reaches the logits.

use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::engine::native::{kv_format, random_kv};
use crate::weights::{Packing, StoredMatrix, StoredTensor};
use hbmark_core::model::{
    Activation, Architecture, Attention, Biases, Dense, DraftLayer, Dtype, Family, FeedForward, Format,
    FormatRule, LatentAttention, Layer, Mixer, Mixture, Multipliers, Norms, QkNorm, Quantization, Reach,
    Role, Rope, RopeScaling, Rotary, Routing, Scales, Stack, TensorInfo, YarnShape,
};

/// The dtypes of weights that the native engine multiplies with, but for those in blocks of 256, whose models are wider.
pub const DTYPES: [Dtype; 10] = [
    Dtype::F32,
    Dtype::Bf16,
    Dtype::F16,
    Dtype::Int8,
    Dtype::Q8_0,
    Dtype::Q4_0,
    Dtype::Int4,
    Dtype::Mxfp4,
    Dtype::Nvfp4,
    Dtype::Mxfp8,
];
/// Dtypes of weights that the kernels for GPUs stream.
#[cfg(any(test, feature = "cuda"))]
pub const STREAMED: [Dtype; 9] = [
    Dtype::Bf16,
    Dtype::F16,
    Dtype::F32,
    Dtype::Int8,
    Dtype::Fp8,
    Dtype::Mxfp4,
    Dtype::Int4,
    Dtype::Nvfp4,
    Dtype::Mxfp8,
];
/// Storages of K and V.
const KV_DTYPES: [Dtype; 5] = [Dtype::F32, Dtype::Bf16, Dtype::F16, Dtype::Fp8, Dtype::Int8];
/// Widths of a head: those of published models, and small ones that are not a multiple of a register.
const HEAD_DIMS: [usize; 8] = [64, 128, 16, 80, 256, 20, 96, 32];
/// Query heads that share one head of K and V.
const GROUPS: [usize; 16] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16];
/// The width of the queries beyond which a sample has one head of K and V.
const WIDE_QUERIES: usize = 768;

/// A small random model.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    pub architecture: Architecture,
    /// Storage of the weights.
    pub dtype: Dtype,
    /// Storage of K and V.
    pub kv_dtype: Dtype,
    /// What the weights are made from.
    pub seed: u64,
}

impl Sample {
    /// The model of a seed. Eight seeds in a row have all widths of a head, sixteen all groups; dtypes of weights leave three out behind every eight
    /// seeds, so that each is paired with each width.
    pub fn random(seed: u64) -> Self {
        Self::of_dtype(nth(&DTYPES, seed + 3 * (seed / 8)), seed)
    }

    /// As [`Self::random`], with weights stored in `dtype`.
    pub fn of_dtype(dtype: Dtype, seed: u64) -> Self {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let mut architecture = architecture(seed, &mut random);
        if dtype == Dtype::Int4 {
            let group_size = Some(pick(&[32, 64, 128], &mut random));
            architecture.quantization = Some(Quantization {
                method: "random".to_owned(),
                bits: 4,
                group_size,
                ..Quantization::default()
            });
        }
        let alike = architecture.head_dim.is_multiple_of(16) && architecture.family != Family::GptOss;
        if dtype == Dtype::Fp8 && alike && seed.is_multiple_of(2) {
            architecture.quantization = Some(in_columns_of_fp8(&mut random));
        }
        if matches!(dtype, Dtype::Q4K | Dtype::Q5K | Dtype::Q6K) {
            architecture = in_blocks_of_256(architecture);
        }
        let kv_dtype = pick(&KV_DTYPES, &mut random);
        Self { architecture, dtype, kv_dtype, seed }
    }

    /// With K and V as the engine keeps them beside the weights; of two in three `nth` in fp8 or int8, where it can.
    #[cfg(any(test, feature = "cuda"))]
    pub fn with_cache(self, nth: u64) -> Self {
        let kv_dtype = match nth % 3 {
            1 if self.architecture.latent.is_none() => Dtype::Fp8,
            2 if self.architecture.latent.is_none() => Dtype::Int8,
            _ => crate::engine::native::kv_dtype(self.dtype),
        };
        Self { kv_dtype, ..self }
    }

    /// [`Self::random`], or [`Self::of_dtype`] where a dtype is given.
    pub fn dense(dtype: Option<Dtype>, seed: u64) -> Self {
        dtype.map_or_else(|| Self::random(seed), |dtype| Self::of_dtype(dtype, seed))
    }

    /// As [`Self::random`], with experts: those of seven families in turn, one of which has latent attention. The first layer has some experts,
    /// the second perhaps none.
    pub fn mixture(dtype: Option<Dtype>, seed: u64) -> Self {
        const FAMILIES: [Family; 7] = [
            Family::Qwen3Moe,
            Family::DeepseekV3,
            Family::Qwen2Moe,
            Family::Glm4Moe,
            Family::GptOss,
            Family::MinimaxM2,
            Family::Mixtral,
        ];
        let mut sample = Self::dense(dtype, seed);
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        random.set_stream(1);
        // In step with nothing that goes round with the seed.
        let family = nth(&FAMILIES, seed + 2 * (seed / 8));
        let block = if matches!(sample.dtype, Dtype::Q4K | Dtype::Q5K | Dtype::Q6K) { 256 } else { 1 };
        let (latent, gated) = (family == Family::DeepseekV3, family == Family::Qwen2Moe);
        let by_sigmoid = latent || matches!(family, Family::Glm4Moe | Family::MinimaxM2);
        let oss = family == Family::GptOss;
        if (oss || latent) && sample.dtype == Dtype::Fp8 {
            // Experts that are one tensor, for which no published fp8 exists, and expansions of latents whose rows share no block.
            sample.architecture.quantization = None;
        }
        let shared = gated || latent || family == Family::Glm4Moe;
        let groups = if oss { 1 } else { random.random_range(1..=3) };
        let count = random.random_range(3..=11_usize).div_ceil(groups) * groups;
        let chosen_groups = random.random_range(1..=groups);
        let per_token = random.random_range(1..=(count / groups * chosen_groups).min(5));
        let mixture = Mixture {
            count,
            per_token,
            width: random.random_range(17..=90_usize).next_multiple_of(block),
            routing: match (by_sigmoid, oss, groups) {
                (true, ..) => {
                    let (correction, renormalised) = (random.random_bool(0.7), random.random_bool(0.7));
                    Routing::Sigmoid { correction, groups, chosen_groups, renormalised }
                }
                (_, true, _) => Routing::SoftmaxOfChosen,
                (.., 1) => Routing::Softmax { renormalised: !gated },
                _ => Routing::GroupedSoftmax { groups, chosen_groups, renormalised: !gated },
            },
            // Low enough that some of the gates and of what goes up are beyond it.
            activation: if oss { Activation::ClampedSwiglu { limit: 1.5 } } else { Activation::Silu },
            shared_width: if shared {
                random.random_range(17..=130_usize).next_multiple_of(block)
            } else {
                0
            },
            shared_gate: gated,
            bias: oss,
            latent: None,
            routed_scaling_factor: if latent || family == Family::Glm4Moe { 2.5 } else { 1.0 },
        };
        let mut a = sample.architecture;
        a.family = family;
        a.qk_norm = matches!(family, Family::Qwen3Moe | Family::MinimaxM2);
        a.biases = Biases { qkv: shared || oss, o: oss || latent, mlp: oss };
        a.layers = random.random_range(1..=3);
        a.windows.clear();
        let everywhere =
            matches!(family, Family::Mixtral | Family::MinimaxM2 | Family::GptOss) || a.layers == 1;
        let dense = if everywhere { Vec::new() } else { vec![1] };
        sample.architecture = a.with_mixture(mixture, dense);
        if oss {
            let a = &mut sample.architecture;
            let windows = [Reach::Window { tokens: 5 }, Reach::Full];
            let layers: Vec<Layer> = (0..a.layers)
                .map(|layer| Layer {
                    mixer: Mixer::Attention(Attention {
                        reach: windows[layer % 2],
                        sinks: true,
                        ..a.attention()
                    }),
                    ..a.layer(layer)
                })
                .collect();
            a.stack = Some(Stack::new(layers));
        }
        if latent {
            sample.architecture = with_latents(sample.architecture, block, &mut random);
            if kv_format::element_bytes(sample.kv_dtype) == 1 {
                sample.kv_dtype = Dtype::Bf16;
            }
        } else if by_sigmoid {
            let a = &mut sample.architecture;
            let dims = pick(&[a.head_dim, a.head_dim / 4 * 2], &mut random);
            let joint = family == Family::MinimaxM2;
            let layers: Vec<Layer> = (0..a.layers)
                .map(|layer| Layer {
                    mixer: Mixer::Attention(Attention {
                        rope: Some(Rotary { rope: a.rope, dims, interleaved: false }),
                        qk_norm: if joint { QkNorm::FullWidth } else { QkNorm::None },
                        ..a.attention()
                    }),
                    ..a.layer(layer)
                })
                .collect();
            a.stack = Some(Stack::new(layers));
        }
        sample
    }

    /// As [`Self::random`], with what the layers of six other families have: norms before, after or both, and of Q and K over one head or all;
    /// gelu gates; scales and caps of scores and logits; rotary embeddings of a part of each head, of neighbours, by layer, or none; multipliers.
    pub fn varied(dtype: Option<Dtype>, seed: u64) -> Self {
        const FAMILIES: [(Family, Norms, QkNorm); 6] = [
            (Family::Gemma2, Norms::BeforeAndAfter, QkNorm::None),
            (Family::Olmo2, Norms::After, QkNorm::FullWidth),
            (Family::Glm4, Norms::BeforeAndAfter, QkNorm::None),
            (Family::Granite, Norms::Before, QkNorm::None),
            (Family::Gemma3, Norms::BeforeAndAfter, QkNorm::PerHead),
            (Family::Smollm3, Norms::Before, QkNorm::None),
        ];
        let mut sample = Self::dense(dtype, seed);
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        random.set_stream(2);
        let (family, norms, qk_norm) = nth(&FAMILIES, seed / 2);
        let mut a = sample.architecture;
        (a.family, a.qk_norm) = (family, qk_norm != QkNorm::None);
        a.biases = Biases { qkv: random.random_bool(0.5), o: random.random_bool(0.5), mlp: false };
        a.windows.clear();
        // Of the logits; a cap far below them would leave their signs, and magnify what rounding does to those near zero.
        let deviation = if a.tied_head { (a.hidden_size as f64).sqrt() } else { 1.0 };
        a.multipliers = Multipliers {
            embedding: pick(&[1.0, 0.3, 5.0], &mut random),
            // Of hidden states, whose norms see it; and not of what is normed after a projection.
            residual: if family == Family::Granite { pick(&[0.25, 0.7], &mut random) } else { 1.0 },
            logits: pick(&[1.0, 0.3], &mut random),
            logits_softcap: pick(&[None, Some(1.5 * deviation)], &mut random),
        };
        let turned = |random: &mut ChaCha8Rng, theta| {
            let dims = pick(&[a.head_dim, a.head_dim, a.head_dim / 4 * 2], random);
            let rotary =
                Rotary { rope: Rope { theta, ..a.rope }, dims, interleaved: random.random_bool(0.5) };
            pick(&[Some(rotary), Some(rotary), None], random)
        };
        let windows = [Reach::Full, Reach::Window { tokens: 5 }, Reach::Window { tokens: 33 }];
        let layers: Vec<Layer> = (0..a.layers)
            .map(|layer| Layer {
                mixer: Mixer::Attention(Attention {
                    reach: pick(&windows, &mut random),
                    rope: turned(&mut random, [1e4, 1e6][layer % 2]),
                    qk_norm,
                    scale: pick(&[None, Some(0.6 / (a.head_dim as f64).sqrt())], &mut random),
                    softcap: pick(&[None, Some(0.7), Some(3.0)], &mut random),
                    ..a.attention()
                }),
                feed_forward: FeedForward::Dense(Dense {
                    width: a.ffn_size,
                    activation: pick(
                        &[Activation::GeluTanh, Activation::GeluTanh, Activation::Silu],
                        &mut random,
                    ),
                    bias: false,
                    fused: false,
                }),
                norms,
            })
            .collect();
        a.stack = Some(Stack::new(layers));
        if family != Family::Granite {
            a.draft = nth(&[Some(DraftLayer::Mtp), None, Some(DraftLayer::Eagle), None], seed / 2);
        }
        sample.architecture = a;
        sample
    }

    /// The tensors by their Hugging Face names, in the order of the inventory.
    pub fn tensors(&self) -> impl Iterator<Item = (String, StoredTensor)> {
        let list = self.architecture.inventory(self.dtype).tensors;
        list.into_iter().enumerate().filter_map(|(index, info)| {
            let tensor = self.tensor(index, &info)?;
            Some((info.name, tensor))
        })
    }

    /// A tensor of the inventory; `None` for scales, which are made with the matrix they scale.
    fn tensor(&self, index: usize, info: &TensorInfo) -> Option<StoredTensor> {
        let around = |mean: f32, deviation: f32| {
            let mut values = vec![0.0; info.shape.iter().product()];
            random_kv::fill(self.seed, index, 0, false, &mut values);
            for value in &mut values {
                *value = value.mul_add(deviation, mean);
            }
            values
        };
        Some(match (info.role, info.shape.as_slice()) {
            (Role::Norm, _) => {
                let one = if self.architecture.family.stores_norms_less_one() { 0.0 } else { 1.0 };
                StoredTensor::Vector(around(one, 0.1))
            }
            (Role::Bias | Role::ExpertBias, _) => StoredTensor::Vector(around(0.0, 0.3)),
            // What is added to scores.
            (Role::Router, [_]) => StoredTensor::Vector(around(0.0, 0.2)),
            (
                role @ (Role::Embedding
                | Role::Head
                | Role::Matrix
                | Role::Expert
                | Role::SharedExpert
                | Role::Router),
                _,
            ) => {
                let by_input = self.architecture.family.stores_experts_by_input();
                let (rows, columns) = info.rows_and_columns(by_input)?;
                let deviation = if role == Role::Embedding { 1.0 } else { 1.0 / (columns as f32).sqrt() };
                let formats = self.architecture.quantization.as_ref().and_then(|own| own.storage().ok());
                let packing = Packing::of_tensor(info, self.architecture.int4_group(), formats.as_ref())?;
                let values = around(0.0, deviation);
                StoredTensor::Matrix(StoredMatrix::from_f32_rows(rows, columns, &values, packing))
            }
            _ => return None,
        })
    }

    /// What differs from sample to sample, in a line.
    pub fn label(&self) -> String {
        let a = &self.architecture;
        let experts = a.experts.as_ref().map_or_else(String::new, |e| {
            format!(
                ", {} of {} experts of {} and {} shared",
                e.per_token, e.count, e.ffn_size, e.shared_ffn_size
            )
        });
        let layers = a
            .stack
            .as_ref()
            .map_or_else(String::new, |stack| format!(", {:?}, {:?}", a.multipliers, stack.kinds));
        format!(
            "seed {}: {:?}, {} over {}, {} layers, hidden {}, {} heads over {} of {}, ffn {}, vocab {}, windows {:?}{experts}{layers}",
            self.seed,
            a.family,
            self.dtype,
            self.kv_dtype,
            a.layers,
            a.hidden_size,
            a.heads,
            a.kv_heads,
            a.head_dim,
            a.ffn_size,
            a.vocab_size,
            a.windows
        )
    }
}

/// Gives the layers latent attention, whose vectors are whole vectors of 8 elements.
fn with_latents(architecture: Architecture, block: usize, random: &mut ChaCha8Rng) -> Architecture {
    let mut a = architecture;
    a.heads = pick(&[1, 2, 3, 5, 16, 20], random);
    let latent = LatentAttention {
        q_rank: pick(&[None, Some((4 * random.random_range(3..=15_usize)).next_multiple_of(block))], random),
        kv_rank: pick(&[8, 16, 24, 40, 64, 104], random),
        qk_nope_head_dim: pick(&[8, 12, 16, 40], random),
        qk_rope_head_dim: pick(&[8, 16, 24], random),
        v_head_dim: pick(&[6, 16, 24], random),
        scale: None,
    };
    let latent = LatentAttention {
        v_head_dim: latent.v_head_dim.next_multiple_of(block),
        scale: pick(&[None, Some(1.3 / (latent.query_dim() as f64).sqrt())], random),
        ..latent
    };
    (a.kv_heads, a.head_dim, a.latent) = (a.heads, latent.query_dim(), Some(latent));
    let mixer = Mixer::Latent { heads: a.heads, latent, indexer: None };
    a.stack = Some(Stack::new((0..a.layers).map(|layer| Layer { mixer, ..a.layer(layer) })));
    a
}

/// A model widened until the rows of all its matrices are whole blocks of 256.
pub fn in_blocks_of_256(architecture: Architecture) -> Architecture {
    let mut a = architecture;
    (a.hidden_size, a.ffn_size) = (a.hidden_size.next_multiple_of(256), a.ffn_size.next_multiple_of(256));
    a.head_dim = a.head_dim.next_power_of_two();
    while !(a.heads * a.head_dim).is_multiple_of(256) {
        a.head_dim *= 2;
    }
    a
}

fn architecture(seed: u64, random: &mut ChaCha8Rng) -> Architecture {
    let family = pick(&[Family::Llama, Family::Mistral, Family::Qwen2, Family::Qwen3], random);
    let head_dim = nth(&HEAD_DIMS, seed);
    // A new order of groups every sixteen seeds, so that each is paired with each width of a head.
    let group = nth(&GROUPS, 5 * (seed % 16) + seed / 16);
    let kv_heads = random.random_range(1..=(WIDE_QUERIES / (group * head_dim)).clamp(1, 4));
    let layers = random.random_range(1..=3);
    let scaling = pick(
        &[
            RopeScaling::None,
            RopeScaling::Linear { factor: 4.0 },
            RopeScaling::Llama3 {
                factor: 8.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_max_positions: 64,
            },
            RopeScaling::Yarn { factor: 4.0, original_max_positions: 64, shape: YarnShape::default() },
        ],
        random,
    );
    let windows = [None, Some(1), Some(5), Some(16), Some(33), Some(64)];
    let windows = match family {
        Family::Mistral => vec![pick(&windows, random); layers],
        Family::Qwen2 | Family::Qwen3 => (0..layers).map(|_| pick(&windows, random)).collect(),
        _ => Vec::new(),
    };
    let mut coin = || random.random_bool(0.5);
    let biases = match family {
        Family::Llama => Biases { qkv: coin(), o: coin(), mlp: coin() },
        Family::Qwen2 => Biases { qkv: true, o: false, mlp: false },
        _ => Biases::default(),
    };
    let tied_head = coin();
    Architecture {
        family,
        hidden_size: random.random_range(17..=150),
        layers,
        heads: kv_heads * group,
        kv_heads,
        head_dim,
        ffn_size: random.random_range(19..=260),
        vocab_size: random.random_range(30..=400),
        max_positions: 4096,
        norm_eps: pick(&[1e-5, 1e-6], random),
        rope: Rope { theta: pick(&[1e4, 5e5, 1e6], random), scaling },
        qk_norm: family == Family::Qwen3,
        biases,
        tied_head,
        windows,
        experts: None,
        latent: None,
        quantization: None,
        native_dtype: None,
        eos_tokens: Vec::new(),
        multipliers: Multipliers::default(),
        stack: None,
        draft: None,
        rope_factors: Vec::new(),
    }
}

fn pick<T: Clone>(from: &[T], random: &mut ChaCha8Rng) -> T {
    from.choose(random).expect("there is something to pick from").clone()
}

/// fp8 of which so many columns of a matrix share a scale: alike in all rows, so that heads of any width may be reordered.
fn in_columns_of_fp8(random: &mut ChaCha8Rng) -> Quantization {
    let scales = Scales::Block { rows: 1 << 20, columns: pick(&[32, 64, 128], random) };
    let format = Some(Format::Fp8 { scales, input_scale: false });
    let head = FormatRule { modules: vec!["lm_head".to_owned()], format: None };
    let rules = vec![head, FormatRule { modules: Vec::new(), format }];
    Quantization { method: "fp8".to_owned(), bits: 8, float: true, rules, ..Quantization::default() }
}

/// The one of an index, round and round.
pub(crate) fn nth<T: Copy>(from: &[T], index: u64) -> T {
    let index = index % from.len() as u64;
    from[usize::try_from(index).expect("an index of a slice")]
}
