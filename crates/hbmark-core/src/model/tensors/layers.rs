//! The tensors of one layer, under the names of the published checkpoints of its family.
//!
//! Enters: a [`Layer`]. Leaves: entries of the growing list. Names are those of the language model: what a model of several parts puts before
//! them (`model.language_model`, `language_model.model`) is left out here and in the patterns of a config.

use super::{Float, List};
use crate::model::layer::{
    Activation, Attention, DeltaNet, Dense, FeedForward, Indexer, Layer, Mamba, Mixer, Mixture, Norms,
    QkNorm, Routing,
};
use crate::model::{Family, LatentAttention, Role};

/// Names outside the layers.
pub(super) struct Names {
    pub embedding: &'static str,
    pub layers: &'static str,
    pub last_norm: &'static str,
}

impl Names {
    pub fn of(family: Family) -> Self {
        if family == Family::NemotronH {
            return Self {
                embedding: "backbone.embeddings.weight",
                layers: "backbone.layers",
                last_norm: "backbone.norm_f.weight",
            };
        }
        Self {
            embedding: "model.embed_tokens.weight",
            layers: "model.layers",
            last_norm: "model.norm.weight",
        }
    }
}

/// Names of a layer's norms over the hidden size, behind the layer's own; `None` where it has no such norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NormNames {
    pub before_mixer: Option<&'static str>,
    pub after_mixer: Option<&'static str>,
    pub before_feed_forward: Option<&'static str>,
    pub after_feed_forward: Option<&'static str>,
}

impl NormNames {
    /// Those of a family's checkpoints.
    pub fn of(family: Family, norms: Norms) -> Self {
        const MIXED: &str = "post_attention_layernorm";
        const FED: &str = "post_feedforward_layernorm";
        let (before, after) = match (norms, family) {
            (Norms::Before, _) => ([Some("input_layernorm"), Some(MIXED)], [None; 2]),
            (Norms::After, _) => ([None; 2], [Some(MIXED), Some(FED)]),
            (Norms::BeforeAndAfter, Family::Glm4) => (
                [Some("input_layernorm"), Some(MIXED)],
                [Some("post_self_attn_layernorm"), Some("post_mlp_layernorm")],
            ),
            (Norms::BeforeAndAfter, _) => {
                ([Some("input_layernorm"), Some("pre_feedforward_layernorm")], [Some(MIXED), Some(FED)])
            }
        };
        let ([before_mixer, before_feed_forward], [after_mixer, after_feed_forward]) = (before, after);
        Self { before_mixer, after_mixer, before_feed_forward, after_feed_forward }
    }
}

/// The name of a layer's sinks, behind that of its attention.
pub fn sinks_name(family: Family) -> &'static str {
    if family == Family::GptOss { "sinks" } else { "attention_sink_bias" }
}

/// Names of a layer's experts, behind the layer's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MixtureNames {
    /// What holds them all.
    pub block: &'static str,
    pub router: &'static str,
    /// Gate, up and down of an expert.
    pub matrices: [&'static str; 3],
    /// Gate with up, and down, of all experts, where a layer stores them as one.
    pub stacked: [&'static str; 2],
    /// The expert every token passes, whose matrices are those of a dense layer, and its gate.
    pub shared: &'static str,
    pub shared_gate: &'static str,
    /// What is added to scores where experts are chosen.
    pub correction: &'static str,
}

impl MixtureNames {
    /// Gate, up and down of a dense layer, and of a shared expert.
    pub const DENSE: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

    /// Those of a family's checkpoints.
    pub fn of(family: Family) -> Self {
        Self {
            block: match family {
                Family::NemotronH => "mixer",
                Family::Llama4 => "feed_forward",
                Family::Mixtral | Family::MinimaxM2 => "block_sparse_moe",
                _ => "mlp",
            },
            router: match family {
                Family::Gemma4 => "router.proj",
                Family::GptOss | Family::Llama4 => "router",
                _ => "gate",
            },
            matrices: match family {
                // w1 gates, w3 goes up, w2 comes down.
                Family::Mixtral | Family::MinimaxM2 => ["w1", "w3", "w2"],
                _ => Self::DENSE,
            },
            stacked: ["gate_up_proj", "down_proj"],
            shared: match family {
                Family::Qwen2Moe | Family::Qwen3_5 | Family::Qwen3Next | Family::Llama4 => "shared_expert",
                _ => "shared_experts",
            },
            shared_gate: "shared_expert_gate",
            correction: match family {
                Family::MinimaxM2 => "e_score_correction_bias",
                _ => "gate.e_score_correction_bias",
            },
        }
    }
}

/// Lists the tensors of one model's layers.
pub(super) struct Lister<'a> {
    pub family: Family,
    pub hidden: usize,
    pub list: &'a mut List,
}

impl Lister<'_> {
    pub fn layer(&mut self, prefix: &str, layer: &Layer) {
        if self.family == Family::NemotronH {
            self.norm(&format!("{prefix}.norm"), self.hidden);
            self.mixer(&format!("{prefix}.mixer"), &layer.mixer);
            self.feed_forward(prefix, &layer.feed_forward);
            return;
        }
        let norms = NormNames::of(self.family, layer.norms);
        self.norms(prefix, [norms.before_mixer]);
        let name = if matches!(layer.mixer, Mixer::DeltaNet(_)) { "linear_attn" } else { "self_attn" };
        self.mixer(&format!("{prefix}.{name}"), &layer.mixer);
        self.norms(prefix, [norms.after_mixer, norms.before_feed_forward, norms.after_feed_forward]);
        if self.family == Family::Gemma4 {
            self.list.float(&format!("{prefix}.layer_scalar"), &[1], Role::Norm);
        }
        self.feed_forward(prefix, &layer.feed_forward);
    }

    /// Those of some norms over the hidden size that the layer has.
    fn norms<const COUNT: usize>(&mut self, prefix: &str, names: [Option<&str>; COUNT]) {
        for name in names.into_iter().flatten() {
            self.norm(&format!("{prefix}.{name}"), self.hidden);
        }
    }

    fn norm(&mut self, name: &str, width: usize) {
        self.list.norm(&format!("{name}.weight"), width);
    }

    fn matrix(&mut self, name: &str, out: usize, input: usize) {
        self.list.linear(name, out, input, Role::Matrix, false);
    }

    /// What a tensor is stored in that the published folders of these families keep at f32, and others as all else that is not a matrix.
    fn f32_in(&self, families: &[Family]) -> Float {
        if families.contains(&self.family) { Float::F32 } else { self.list.format.float }
    }

    fn mixer(&mut self, prefix: &str, mixer: &Mixer) {
        match mixer {
            Mixer::Attention(attention) => self.attention(prefix, attention),
            Mixer::Latent { heads, latent, indexer } => {
                self.latent(prefix, *heads, latent);
                if let (Some(indexer), Some(rank)) = (indexer, latent.q_rank) {
                    self.indexer(&format!("{prefix}.indexer"), *indexer, rank);
                }
            }
            Mixer::DeltaNet(delta) => self.delta_net(prefix, *delta),
            Mixer::Mamba(mamba) => self.mamba(prefix, *mamba),
            Mixer::None => {}
        }
    }

    fn attention(&mut self, prefix: &str, a: &Attention) {
        let hidden = self.hidden;
        let (query, key, value) = (a.heads * a.key_dim, a.kv_heads * a.key_dim, a.kv_heads * a.value_dim);
        let mut linear = |name: &str, out, input, bias| {
            self.list.linear(&format!("{prefix}.{name}"), out, input, Role::Matrix, bias);
        };
        if a.fused {
            linear("qkv_proj", query + key + value, hidden, a.biases.qkv);
        } else {
            linear("q_proj", if a.output_gate { 2 * query } else { query }, hidden, a.biases.qkv);
            linear("k_proj", key, hidden, a.biases.qkv);
            if !a.shares_key {
                linear("v_proj", value, hidden, a.biases.qkv);
            }
        }
        linear("o_proj", hidden, a.heads * a.value_dim, a.biases.o);
        let norms = match a.qk_norm {
            QkNorm::PerHead => Some((a.key_dim, a.key_dim)),
            QkNorm::FullWidth => Some((query, key)),
            QkNorm::None | QkNorm::Unweighted => None,
        };
        if let Some((query, key)) = norms {
            self.norm(&format!("{prefix}.q_norm"), query);
            self.norm(&format!("{prefix}.k_norm"), key);
        }
        if a.sinks {
            let name = sinks_name(self.family);
            self.list.float(&format!("{prefix}.{name}"), &[a.heads], Role::Bias);
        }
    }

    fn latent(&mut self, prefix: &str, heads: usize, latent: &LatentAttention) {
        let hidden = self.hidden;
        let biases = self.list.latent_biases;
        let query = heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim);
        let linear = |list: &mut List, name: &str, out, input, bias| {
            list.linear(&format!("{prefix}.{name}"), out, input, Role::Matrix, bias);
        };
        if let Some(rank) = latent.q_rank {
            linear(self.list, "q_a_proj", rank, hidden, biases.qkv);
            self.norm(&format!("{prefix}.q_a_layernorm"), rank);
            linear(self.list, "q_b_proj", query, rank, false);
        } else {
            linear(self.list, "q_proj", query, hidden, false);
        }
        let cached = latent.kv_rank + latent.qk_rope_head_dim;
        linear(self.list, "kv_a_proj_with_mqa", cached, hidden, biases.qkv);
        self.norm(&format!("{prefix}.kv_a_layernorm"), latent.kv_rank);
        let expanded = heads * (latent.qk_nope_head_dim + latent.v_head_dim);
        self.list.expansion(&format!("{prefix}.kv_b_proj"), expanded, latent.kv_rank);
        linear(self.list, "o_proj", hidden, heads * latent.v_head_dim, biases.o);
    }

    fn indexer(&mut self, prefix: &str, indexer: Indexer, rank: usize) {
        let hidden = self.hidden;
        self.matrix(&format!("{prefix}.wq_b"), indexer.heads * indexer.head_dim, rank);
        self.matrix(&format!("{prefix}.wk"), indexer.head_dim, hidden);
        self.norm(&format!("{prefix}.k_norm"), indexer.head_dim);
        self.list.float(&format!("{prefix}.k_norm.bias"), &[indexer.head_dim], Role::Bias);
        self.list.float(&format!("{prefix}.weights_proj.weight"), &[indexer.heads, hidden], Role::Matrix);
    }

    fn delta_net(&mut self, prefix: &str, delta: DeltaNet) {
        let hidden = self.hidden;
        let values = delta.value_heads * delta.value_dim;
        if self.family == Family::Qwen3Next {
            self.matrix(&format!("{prefix}.in_proj_qkvz"), delta.channels() + values, hidden);
            self.matrix(&format!("{prefix}.in_proj_ba"), 2 * delta.value_heads, hidden);
        } else {
            self.matrix(&format!("{prefix}.in_proj_qkv"), delta.channels(), hidden);
            self.matrix(&format!("{prefix}.in_proj_z"), values, hidden);
            self.matrix(&format!("{prefix}.in_proj_b"), delta.value_heads, hidden);
            self.matrix(&format!("{prefix}.in_proj_a"), delta.value_heads, hidden);
        }
        self.list.float(
            &format!("{prefix}.conv1d.weight"),
            &[delta.channels(), 1, delta.conv_kernel],
            Role::Matrix,
        );
        // Qwen3.5's folders hold the decay and this norm at f32, Qwen3-Next's in bf16.
        let float = self.f32_in(&[Family::Qwen3_5]);
        self.list.push(format!("{prefix}.A_log"), &[delta.value_heads], float, Role::Bias);
        self.list.float(&format!("{prefix}.dt_bias"), &[delta.value_heads], Role::Bias);
        self.list.push(format!("{prefix}.norm.weight"), &[delta.value_dim], float, Role::Norm);
        self.matrix(&format!("{prefix}.out_proj"), hidden, values);
    }

    fn mamba(&mut self, prefix: &str, mamba: Mamba) {
        let (hidden, inner) = (self.hidden, mamba.inner());
        self.matrix(&format!("{prefix}.in_proj"), inner + mamba.channels() + mamba.heads, hidden);
        self.list.float(
            &format!("{prefix}.conv1d.weight"),
            &[mamba.channels(), 1, mamba.conv_kernel],
            Role::Matrix,
        );
        if mamba.conv_bias {
            self.list.float(&format!("{prefix}.conv1d.bias"), &[mamba.channels()], Role::Bias);
        }
        for name in ["A_log", "D", "dt_bias"] {
            self.list.float(&format!("{prefix}.{name}"), &[mamba.heads], Role::Bias);
        }
        self.norm(&format!("{prefix}.norm"), inner);
        self.matrix(&format!("{prefix}.out_proj"), hidden, inner);
    }

    fn feed_forward(&mut self, layer: &str, feed_forward: &FeedForward) {
        let prefix = format!("{layer}.{}", MixtureNames::of(self.family).block);
        match feed_forward {
            FeedForward::Dense(dense) => self.dense(&prefix, dense),
            FeedForward::Mixture(mixture) => self.mixture(&prefix, mixture),
            FeedForward::DenseBesideMixture { dense, mixture } => {
                self.dense(&prefix, dense);
                for name in [
                    "pre_feedforward_layernorm_2",
                    "post_feedforward_layernorm_1",
                    "post_feedforward_layernorm_2",
                ] {
                    self.norm(&format!("{layer}.{name}"), self.hidden);
                }
                self.mixture(layer, mixture);
            }
            FeedForward::None => {}
        }
    }

    fn dense(&mut self, prefix: &str, dense: &Dense) {
        if dense.fused {
            self.list.linear(
                &format!("{prefix}.gate_up_proj"),
                2 * dense.width,
                self.hidden,
                Role::Matrix,
                dense.bias,
            );
            self.list.linear(
                &format!("{prefix}.down_proj"),
                self.hidden,
                dense.width,
                Role::Matrix,
                dense.bias,
            );
            return;
        }
        self.three(prefix, dense.width, self.hidden, dense.activation, Role::Matrix, dense.bias);
    }

    /// Gate, where there is one, up and down.
    fn three(
        &mut self,
        prefix: &str,
        width: usize,
        hidden: usize,
        activation: Activation,
        role: Role,
        bias: bool,
    ) {
        if activation.gated() {
            self.list.linear(&format!("{prefix}.gate_proj"), width, hidden, role, bias);
        }
        self.list.linear(&format!("{prefix}.up_proj"), width, hidden, role, bias);
        self.list.linear(&format!("{prefix}.down_proj"), hidden, width, role, bias);
    }

    fn mixture(&mut self, prefix: &str, m: &Mixture) {
        self.router(prefix, m);
        let hidden = m.latent.unwrap_or(self.hidden);
        if let Some(latent) = m.latent {
            self.matrix(&format!("{prefix}.fc1_latent_proj"), latent, self.hidden);
            self.matrix(&format!("{prefix}.fc2_latent_proj"), self.hidden, latent);
        }
        self.experts(&format!("{prefix}.experts"), m, hidden);
        if m.shared_width > 0 {
            let names = MixtureNames::of(self.family);
            let shared = format!("{prefix}.{}", names.shared);
            self.three(&shared, m.shared_width, self.hidden, m.activation, Role::SharedExpert, false);
            if m.shared_gate {
                let gate = format!("{prefix}.{}.weight", names.shared_gate);
                self.list.float(&gate, &[1, self.hidden], Role::Router);
            }
        }
    }

    fn router(&mut self, prefix: &str, m: &Mixture) {
        let shape = [m.count, self.hidden];
        let MixtureNames { router: name, correction, .. } = MixtureNames::of(self.family);
        // The folders of these two hold it at f32 beside their fp8; the other families' in bf16.
        let float = self.f32_in(&[Family::MinimaxM2, Family::MimoV2]);
        self.list.push(format!("{prefix}.{name}.weight"), &shape, float, Role::Router);
        if m.bias {
            self.list.float(&format!("{prefix}.{name}.bias"), &[m.count], Role::Router);
        }
        if self.family == Family::Gemma4 {
            self.list.float(&format!("{prefix}.router.scale"), &[self.hidden], Role::Router);
            self.list.float(&format!("{prefix}.router.per_expert_scale"), &[m.count], Role::Router);
        }
        if let Routing::Sigmoid { correction: true, .. } = m.routing {
            // Kept at f32 in the published checkpoints, whatever the rest is stored as.
            self.list.single(format!("{prefix}.{correction}"), &[m.count], Role::Router);
        }
    }

    fn experts(&mut self, prefix: &str, m: &Mixture, hidden: usize) {
        let fused = matches!(self.family, Family::GptOss | Family::Gemma4 | Family::Llama4 | Family::Qwen3_5);
        if fused && self.list.stacks_experts(prefix, self.family) {
            let (count, width) = (m.count, m.width);
            let by_input = self.family.stores_experts_by_input();
            let [gate_up, down] =
                MixtureNames::of(self.family).stacked.map(|name| format!("{prefix}.{name}"));
            self.list.stacked(&gate_up, [count, 2 * width, hidden], by_input, m.bias);
            self.list.stacked(&down, [count, hidden, width], by_input, m.bias);
            return;
        }
        for expert in 0..m.count {
            let prefix = format!("{prefix}.{expert}");
            if matches!(self.family, Family::Mixtral | Family::MinimaxM2) {
                self.list.linear(&format!("{prefix}.w1"), m.width, hidden, Role::Expert, false);
                self.list.linear(&format!("{prefix}.w2"), hidden, m.width, Role::Expert, false);
                self.list.linear(&format!("{prefix}.w3"), m.width, hidden, Role::Expert, false);
            } else {
                self.three(&prefix, m.width, hidden, m.activation, Role::Expert, m.bias);
            }
        }
    }
}
