//! One layer of a decoder as data, and the list of them.
//!
//! Enters: what a family file reads of a config. Leaves: [`Layer`]s that say everything about a layer that changes its bytes or FLOPs, and a
//! [`Stack`] that keeps equal layers once.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::config::limits;
use super::{Biases, Experts, LatentAttention, OutOfBounds, Rope};

/// What mixes the tokens of a layer, and what follows it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Layer {
    pub mixer: Mixer,
    pub feed_forward: FeedForward,
    #[serde(default)]
    pub norms: Norms,
}

impl Layer {
    /// Every width, and the most it may be.
    fn widths(&self) -> Vec<(usize, usize)> {
        use limits::{FFN, HEAD_DIM, HEADS, HIDDEN, POSITIONS};
        let mut widths = match self.mixer {
            Mixer::Attention(a) => {
                let reach = match a.reach {
                    Reach::Full => 1,
                    Reach::Window { tokens } | Reach::Chunk { tokens } => tokens,
                };
                vec![
                    (reach, POSITIONS),
                    (a.heads, HEADS),
                    (a.kv_heads, a.heads),
                    (a.key_dim, HEAD_DIM),
                    (a.value_dim, HEAD_DIM),
                ]
            }
            Mixer::Latent { heads, latent, indexer } => {
                let (index_heads, index_dim, top_k) =
                    indexer.map_or((1, 1, 1), |indexer| (indexer.heads, indexer.head_dim, indexer.top_k));
                vec![
                    (heads, HEADS),
                    (latent.kv_rank, HIDDEN),
                    (latent.q_rank.unwrap_or(1), HIDDEN),
                    (latent.qk_nope_head_dim, HEAD_DIM),
                    (latent.qk_rope_head_dim, HEAD_DIM),
                    (latent.v_head_dim, HEAD_DIM),
                    (index_heads, HEADS),
                    (index_dim, HEAD_DIM),
                    (top_k, POSITIONS),
                ]
            }
            Mixer::DeltaNet(d) => vec![
                (d.key_heads, HEADS),
                (d.value_heads, HEADS),
                (d.key_dim, HEAD_DIM),
                (d.value_dim, HEAD_DIM),
                (d.conv_kernel, 64),
                (d.state_bytes, 8),
            ],
            Mixer::Mamba(m) => vec![
                (m.heads, HEADS),
                (m.head_dim, HEAD_DIM),
                (m.groups, HEADS),
                (m.state_size, HEAD_DIM),
                (m.conv_kernel, 64),
                (m.state_bytes, 8),
            ],
            Mixer::None => Vec::new(),
        };
        if let Some(dense) = self.feed_forward.dense() {
            widths.push((dense.width, FFN));
        }
        if let Some(mixture) = self.feed_forward.mixture() {
            widths.push((mixture.latent.unwrap_or(1), HIDDEN));
        }
        widths
    }
}

/// Where a layer normalises.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Norms {
    /// Before the mixer and before the feed-forward.
    #[default]
    Before,
    /// Before and after each (Gemma, GLM-4).
    BeforeAndAfter,
    /// After each alone (OLMo 2).
    After,
}

/// What mixes the tokens of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Mixer {
    /// Keys and values per head.
    Attention(Attention),
    /// One latent vector per token (`DeepSeek`).
    Latent { heads: usize, latent: LatentAttention, indexer: Option<Indexer> },
    /// A gated delta rule over a matrix per value head (Qwen3-Next, Qwen3.5).
    DeltaNet(DeltaNet),
    /// Mamba 2.
    Mamba(Mamba),
    /// The layer is a feed-forward alone.
    None,
}

/// Softmax attention with keys and values per head.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own about the layer")]
pub struct Attention {
    pub reach: Reach,
    pub heads: usize,
    pub kv_heads: usize,
    pub key_dim: usize,
    pub value_dim: usize,
    /// `None`: no positions.
    pub rope: Option<Rotary>,
    pub qk_norm: QkNorm,
    #[serde(default)]
    pub biases: Biases,
    /// The value is the key's projection: there is no `v_proj`.
    #[serde(default)]
    pub shares_key: bool,
    /// The query's projection has a gate for the output beside it.
    #[serde(default)]
    pub output_gate: bool,
    /// A learnt logit per head.
    #[serde(default)]
    pub sinks: bool,
    /// What scores are multiplied with [default: 1 / √`key_dim`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale: Option<f64>,
    /// Scores are bent towards this.
    #[serde(default)]
    pub softcap: Option<f64>,
    /// Q, K and V are one matrix in the checkpoint.
    #[serde(default)]
    pub fused: bool,
}

/// The rotary embedding of a layer, over the first `dims` of each head.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Rotary {
    pub rope: Rope,
    pub dims: usize,
    /// Neighbours turn together; otherwise the two halves of those dims.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub interleaved: bool,
}

/// Which positions a token looks at.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(tag = "of", rename_all = "snake_case")]
pub enum Reach {
    #[default]
    Full,
    Window {
        tokens: usize,
    },
    /// Those of its own chunk (Llama 4).
    Chunk {
        tokens: usize,
    },
}

impl Reach {
    /// Cached positions that a token at position `context` reads.
    pub fn read(self, context: usize) -> usize {
        match self {
            Self::Full => context,
            Self::Window { tokens } => context.min(tokens),
            Self::Chunk { tokens } => context % tokens.max(1),
        }
    }

    /// Positions that a cache keeps of so many.
    pub fn kept(self, positions: usize) -> usize {
        match self {
            Self::Full => positions,
            Self::Window { tokens } | Self::Chunk { tokens } => positions.min(tokens),
        }
    }

    /// (query, position) pairs of the first `tokens` tokens, each with itself.
    pub fn pairs(self, tokens: usize) -> f64 {
        let triangle = |n: usize| n as f64 * (n as f64 + 1.0) / 2.0;
        match self {
            Self::Window { tokens: window } if window < tokens => {
                triangle(window) + (tokens - window) as f64 * window as f64
            }
            Self::Chunk { tokens: chunk } if chunk > 0 => {
                (tokens / chunk) as f64 * triangle(chunk) + triangle(tokens % chunk)
            }
            _ => triangle(tokens),
        }
    }
}

/// Norms of queries and keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum QkNorm {
    None,
    /// Weights of one head's width, shared by the heads.
    PerHead,
    /// Weights of the width of all heads together.
    FullWidth,
    /// No weights.
    Unweighted,
}

/// Picks the positions of a latent attention (`DeepSeek` sparse attention).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Indexer {
    pub heads: usize,
    pub head_dim: usize,
    /// Positions that it picks.
    pub top_k: usize,
}

impl Indexer {
    /// Bytes that it keeps of a token: fp8 with one f32 scale.
    pub fn bytes_per_token(self) -> u64 {
        self.head_dim as u64 + 4
    }
}

/// A gated delta rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct DeltaNet {
    pub key_heads: usize,
    pub value_heads: usize,
    pub key_dim: usize,
    pub value_dim: usize,
    pub conv_kernel: usize,
    /// Bytes of an element of the state.
    pub state_bytes: usize,
}

impl DeltaNet {
    /// Channels of the convolution: queries, keys and values.
    pub fn channels(self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
    }

    /// Elements of the recurrent state of a sequence.
    pub fn state(self) -> usize {
        self.value_heads * self.key_dim * self.value_dim
    }
}

/// A Mamba 2 mixer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Mamba {
    pub heads: usize,
    pub head_dim: usize,
    pub groups: usize,
    pub state_size: usize,
    pub conv_kernel: usize,
    pub conv_bias: bool,
    /// Bytes of an element of the state.
    pub state_bytes: usize,
}

impl Mamba {
    /// Width of what passes the state.
    pub fn inner(self) -> usize {
        self.heads * self.head_dim
    }

    /// Channels of the convolution: the input, B and C.
    pub fn channels(self) -> usize {
        self.inner() + 2 * self.groups * self.state_size
    }

    /// Elements of the recurrent state of a sequence.
    pub fn state(self) -> usize {
        self.inner() * self.state_size
    }
}

/// What follows the mixer.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum FeedForward {
    Dense(Dense),
    Mixture(Mixture),
    /// Both, added (Gemma 4).
    DenseBesideMixture {
        dense: Dense,
        mixture: Mixture,
    },
    None,
}

impl FeedForward {
    /// The part every token passes, if it has one.
    pub fn dense(&self) -> Option<&Dense> {
        match self {
            Self::Dense(dense) | Self::DenseBesideMixture { dense, .. } => Some(dense),
            Self::Mixture(_) | Self::None => None,
        }
    }

    /// The routed part, if it has one.
    pub fn mixture(&self) -> Option<&Mixture> {
        match self {
            Self::Mixture(mixture) | Self::DenseBesideMixture { mixture, .. } => Some(mixture),
            Self::Dense(_) | Self::None => None,
        }
    }
}

/// A feed-forward every token passes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Dense {
    pub width: usize,
    pub activation: Activation,
    #[serde(default)]
    pub bias: bool,
    /// Gate and up are one matrix in the checkpoint.
    #[serde(default)]
    pub fused: bool,
}

/// Routed experts, and those every token passes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Mixture {
    pub count: usize,
    pub per_token: usize,
    pub width: usize,
    pub routing: Routing,
    pub activation: Activation,
    /// Inner width of all shared experts together; 0 without.
    pub shared_width: usize,
    /// The shared expert has a gate of its own.
    #[serde(default)]
    pub shared_gate: bool,
    /// Router and experts have biases.
    #[serde(default)]
    pub bias: bool,
    /// Routed experts work on a projection of this width instead of the hidden size.
    #[serde(default)]
    pub latent: Option<usize>,
    /// What the shares of the routed experts are multiplied with.
    #[serde(default = "one")]
    pub routed_scaling_factor: f64,
}

fn one() -> f64 {
    1.0
}

impl Mixture {
    /// Experts with a SiLU gate, and nothing beside them.
    pub(super) fn new(count: usize, per_token: usize, width: usize, routing: Routing) -> Self {
        Self {
            count,
            per_token,
            width,
            routing,
            activation: Activation::Silu,
            shared_width: 0,
            shared_gate: false,
            bias: false,
            latent: None,
            routed_scaling_factor: 1.0,
        }
    }
}

/// How the experts of a token are chosen and weighed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(tag = "score", rename_all = "snake_case")]
pub enum Routing {
    /// Over all experts, then the best.
    Softmax { renormalised: bool },
    /// Over all experts, then the best within the groups whose best are largest.
    GroupedSoftmax { groups: usize, chosen_groups: usize, renormalised: bool },
    /// Over the best.
    SoftmaxOfChosen,
    /// Each by itself; with a correction that only chooses, and within the best groups where there are several.
    Sigmoid {
        correction: bool,
        groups: usize,
        chosen_groups: usize,
        /// The shares of a token's experts sum to one.
        #[serde(default = "yes")]
        renormalised: bool,
    },
}

fn yes() -> bool {
    true
}

/// The function between the matrices of a feed-forward.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(tag = "function", rename_all = "snake_case")]
pub enum Activation {
    /// silu(gate) · up.
    Silu,
    /// gelu(gate) · up, by tanh.
    GeluTanh,
    /// (up + 1) · gate · sigmoid(1.702 gate), clamped (gpt-oss).
    ClampedSwiglu { limit: f64 },
    /// relu(up)², without a gate (Nemotron).
    SquaredRelu,
}

impl Activation {
    /// Whether there is a gate matrix beside the one that goes up.
    pub fn gated(self) -> bool {
        !matches!(self, Self::SquaredRelu)
    }
}

/// The layers of a model, equal ones kept once.
///
/// ```
/// use hbmark_core::model::parse_config;
///
/// let config = include_str!("../../models/gpt-oss-20b.json");
/// let stack = parse_config(config, "config.json".as_ref()).unwrap().stack.unwrap();
/// assert_eq!(stack.to_string(), "24 × (1 window 128 : 1 full), 32 experts");
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Stack {
    pub kinds: Vec<Layer>,
    /// Which of `kinds` each layer is.
    pub order: Vec<u16>,
}

impl Stack {
    /// Keeps equal layers once.
    pub fn new(layers: impl IntoIterator<Item = Layer>) -> Self {
        let mut kinds: Vec<Layer> = Vec::new();
        let of = |layer: Layer| {
            let at = kinds.iter().position(|kind| *kind == layer).unwrap_or_else(|| {
                kinds.push(layer);
                kinds.len() - 1
            });
            u16::try_from(at).unwrap_or(u16::MAX)
        };
        let order = layers.into_iter().map(of).collect();
        Self { kinds, order }
    }

    /// The layer at an index.
    ///
    /// # Panics
    /// When there is no such layer.
    pub fn layer(&self, index: usize) -> &Layer {
        &self.kinds[usize::from(self.order[index])]
    }

    /// Checks every width against the bounds, and the experts against those of the model.
    pub(super) fn check(&self, layers: usize, experts: Option<&Experts>) -> Result<(), OutOfBounds> {
        let out = |what, found: String, wanted| Err(OutOfBounds { what, found, wanted });
        if self.order.len() != layers || self.order.iter().any(|at| usize::from(*at) >= self.kinds.len()) {
            return out(
                "the list of layers",
                format!("{} of {layers}", self.order.len()),
                "a kind for each layer",
            );
        }
        if self.kinds.len() > layers {
            return out("the kinds of layers", self.kinds.len().to_string(), "no more than layers");
        }
        for kind in &self.kinds {
            if let Some((found, most)) =
                kind.widths().into_iter().find(|(width, most)| !(1..=*most).contains(width))
            {
                return out(
                    "a width of a layer",
                    format!("{found} of at most {most}"),
                    "at least 1, and far less",
                );
            }
            if let Mixer::Attention(Attention { rope: Some(rope), key_dim, .. }) = kind.mixer
                && (rope.dims > key_dim || !rope.dims.is_multiple_of(2))
            {
                let found = format!("{} of {key_dim}", rope.dims);
                return out("the part of a head that is rotated", found, "an even number of its elements");
            }
            let own = kind.feed_forward.mixture().map(|mixture| Experts::of(mixture, Vec::new()));
            let known = experts.map(|experts| Experts { dense_layers: Vec::new(), ..experts.clone() });
            if own.is_some_and(|own| {
                known
                    .as_ref()
                    .is_none_or(|known| Experts { shared_count: known.shared_count, ..own } != *known)
            }) {
                return out(
                    "the experts of a layer",
                    "others than the model's".to_owned(),
                    "one kind of experts",
                );
            }
        }
        Ok(())
    }

    /// The words for each layer's mixer.
    fn words(&self) -> Vec<String> {
        (0..self.order.len())
            .map(|index| self.layer(index))
            .map(|layer| match (word(&layer.mixer), &layer.feed_forward) {
                (word, _) if !word.is_empty() => word,
                (_, FeedForward::None) => "empty".to_owned(),
                _ => "feed-forward".to_owned(),
            })
            .collect()
    }
}

fn word(mixer: &Mixer) -> String {
    match mixer {
        Mixer::Attention(attention) => match attention.reach {
            Reach::Full => "full".to_owned(),
            Reach::Window { tokens } => format!("window {tokens}"),
            Reach::Chunk { tokens } => format!("chunk {tokens}"),
        },
        Mixer::Latent { indexer: None, .. } => "latent".to_owned(),
        Mixer::Latent { indexer: Some(indexer), .. } => format!("latent, best {}", indexer.top_k),
        Mixer::DeltaNet(_) => "delta net".to_owned(),
        Mixer::Mamba(_) => "mamba".to_owned(),
        Mixer::None => String::new(),
    }
}

impl fmt::Display for Stack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = self.words();
        write!(f, "{} × ({})", self.order.len(), pattern(&words))?;
        let feed_forwards = || self.order.iter().map(|at| &self.kinds[usize::from(*at)].feed_forward);
        if let Some(mixture) = feed_forwards().find_map(FeedForward::mixture) {
            write!(f, ", {} experts", mixture.count)?;
            let routed = feed_forwards().filter(|each| each.mixture().is_some()).count();
            if routed < self.order.len() {
                write!(f, " in {routed}")?;
            }
        }
        Ok(())
    }
}

/// The shortest run of words that repeats to the end, or how many there are of each.
fn pattern(words: &[String]) -> String {
    const LONGEST: usize = 16;
    let repeats = |period: usize| (period..words.len()).all(|at| words[at] == words[at % period]);
    let told = |runs: &[(usize, &String)]| {
        let each: Vec<String> = runs.iter().map(|(count, word)| format!("{count} {word}")).collect();
        each.join(" : ")
    };
    match (1..=words.len().min(LONGEST)).find(|period| repeats(*period)) {
        Some(1) => words[0].clone(),
        Some(period) => {
            let mut runs: Vec<(usize, &String)> = Vec::new();
            for word in &words[..period] {
                match runs.last_mut() {
                    Some((count, last)) if *last == word => *count += 1,
                    _ => runs.push((1, word)),
                }
            }
            told(&runs)
        }
        None => {
            let mut counts: Vec<(usize, &String)> = Vec::new();
            for word in words {
                match counts.iter_mut().find(|(_, known)| *known == word) {
                    Some((count, _)) => *count += 1,
                    None => counts.push((1, word)),
                }
            }
            told(&counts).replace(" : ", ", ")
        }
    }
}
