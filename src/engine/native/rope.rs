//! Rotary position embeddings as a table of angles.
//!
//! Enters: the rotary embeddings of an [`Architecture`]'s layers. Leaves: cosines and sines per position, f32, computed in f64; the same
//! tables serve every device, so that none differs in how it rounds an angle. Pairs of a head that do not turn have an angle of zero.
//!
//! *Source*: Su et al., RoFormer (arXiv 2104.09864), equation 34, in the half-split order of Hugging Face checkpoints; llama3 scaling as
//! in the Llama 3.1 model card's reference (`low_freq_factor`, `high_freq_factor`, `original_max_position_embeddings`); Peng et al., `YaRN`
//! (arXiv 2309.00071), sections 3.2 to 3.4, with the ends of the ramp as `transformers` rounds them; Ding et al., `LongRoPE` (arXiv 2402.13753).

use std::f64::consts::TAU;

use super::refuse;
use crate::engine::EngineError;
use hbmark_core::model::{Architecture, Mixer, RopeScaling, Rotary, YarnShape};

/// The rotary embeddings of a model's layers, each once, in the order of their first layers.
pub fn distinct_ropes(architecture: &Architecture) -> impl Iterator<Item = Rotary> {
    let mut seen: Vec<Rotary> = Vec::new();
    for layer in 0..architecture.layers {
        let rope = match architecture.layer(layer).mixer {
            Mixer::Attention(attention) => attention.rope,
            Mixer::Latent { latent, .. } => Some(rotary_of_latents(architecture, latent.qk_rope_head_dim)),
            _ => None,
        };
        if let Some(rope) = rope
            && !seen.contains(&rope)
        {
            seen.push(rope);
        }
    }
    seen.into_iter()
}

/// That of latent attention, over a vector of its own: neighbours turn together.
pub fn rotary_of_latents(architecture: &Architecture, dims: usize) -> Rotary {
    Rotary { rope: architecture.rope, dims, interleaved: true }
}

/// The tables of a model: one for each of `distinct_ropes`.
#[derive(Debug, Clone)]
pub struct RopeTables {
    tables: Vec<RopeTable>,
}

impl RopeTables {
    /// The frequencies of an architecture, for no position yet.
    ///
    /// # Errors
    /// When longrope has no factor for each frequency.
    pub fn new(architecture: &Architecture) -> Result<Self, EngineError> {
        // Of latent attention, what turns is a vector of its own.
        let width = architecture.latent.map_or(architecture.head_dim, |latent| latent.qk_rope_head_dim);
        let table = |rope| RopeTable::new(rope, width, &architecture.rope_factors);
        Ok(Self { tables: distinct_ropes(architecture).map(table).collect::<Result<_, _>>()? })
    }

    /// Sees to it that positions `0..positions` are in every table.
    pub fn extend_to(&mut self, positions: usize) {
        self.tables.iter_mut().for_each(|table| table.extend_to(positions));
    }

    /// Positions in every table.
    pub fn positions(&self) -> usize {
        self.tables.iter().map(RopeTable::positions).min().unwrap_or(0)
    }

    /// The tables.
    pub fn tables(&self) -> &[RopeTable] {
        &self.tables
    }

    /// Cosines and sines of a position in a table, where there is one.
    pub fn at(&self, table: Option<usize>, position: usize) -> Option<(&[f32], &[f32])> {
        table.map(|table| self.tables[table].at(position))
    }

    /// Rotates a head by the angles of a position; without a table there are none.
    pub fn rotate(&self, table: Option<usize>, position: usize, head: &mut [f32]) {
        if let Some((cosines, sines)) = self.at(table, position) {
            rotate(head, cosines, sines);
        }
    }
}

/// Cosines and sines of the positions seen so far.
#[derive(Debug, Clone)]
pub struct RopeTable {
    /// Radians per position, one per pair of elements.
    frequencies: Vec<f64>,
    /// What cosines and sines of the pairs that turn are multiplied with.
    magnitude: f64,
    /// Pairs that turn: the first so many.
    turning: usize,
    /// `[positions, head_dim / 2]` each.
    cosines: Vec<f32>,
    sines: Vec<f32>,
}

impl RopeTable {
    /// The frequencies of a rotary embedding over heads of so many elements, for no position yet; `factors` divide them under longrope.
    pub fn new(rotary: Rotary, head_dim: usize, factors: &[f64]) -> Result<Self, EngineError> {
        let Rotary { rope, dims, .. } = rotary;
        let half = dims / 2;
        let theta = rope.theta;
        let mut magnitude = 1.0;
        let plain = |i: usize| theta.powf(-((2 * i) as f64) / dims as f64);
        let mut frequencies: Vec<f64> = match rope.scaling {
            RopeScaling::None => (0..half).map(plain).collect(),
            RopeScaling::Linear { factor } => (0..half).map(|i| plain(i) / factor).collect(),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_positions } => {
                let bounds = (low_freq_factor, high_freq_factor);
                let divisor = |frequency| {
                    RopeScaling::llama3_divisor(frequency, factor, bounds, original_max_positions)
                };
                (0..half).map(|i| plain(i) / divisor(plain(i))).collect()
            }
            RopeScaling::Yarn { factor, original_max_positions, shape } => {
                magnitude = shape.attention_factor.unwrap_or_else(|| 0.1 * factor.max(1.0).ln() + 1.0);
                let (low, high) = yarn_ramp(shape, original_max_positions, theta, dims);
                let scale = |i: usize| {
                    let divided = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                    plain(i) * (1.0 - divided + divided / factor)
                };
                (0..half).map(scale).collect()
            }
            RopeScaling::LongRope { attention_factor, .. } if factors.len() == half => {
                magnitude = attention_factor;
                factors.iter().enumerate().map(|(i, factor)| plain(i) / factor).collect()
            }
            RopeScaling::LongRope { .. } => {
                return refuse(
                    format!("longrope with {} factors for {half} frequencies", factors.len()),
                    "each frequency has one",
                );
            }
        };
        frequencies.resize(head_dim / 2, 0.0);
        Ok(Self { frequencies, magnitude, turning: half, cosines: Vec::new(), sines: Vec::new() })
    }

    /// Pairs of elements that turn together.
    pub fn half(&self) -> usize {
        self.frequencies.len()
    }

    /// Sees to it that positions `0..positions` are in the table.
    pub fn extend_to(&mut self, positions: usize) {
        let have = self.positions();
        if positions <= have {
            return;
        }
        // Doubling, so that a running decode extends rarely.
        let wanted = positions.max(2 * have);
        for position in have..wanted {
            for (pair, frequency) in self.frequencies.iter().enumerate() {
                let magnitude = if pair < self.turning { self.magnitude } else { 1.0 };
                let (sine, cosine) = (position as f64 * frequency).sin_cos();
                self.cosines.push(to_f32(cosine * magnitude));
                self.sines.push(to_f32(sine * magnitude));
            }
        }
    }

    /// Positions in the table.
    pub fn positions(&self) -> usize {
        self.cosines.len() / self.half().max(1)
    }

    /// Cosines and sines of all positions, `[positions, half]` each.
    pub fn all(&self) -> (&[f32], &[f32]) {
        (&self.cosines, &self.sines)
    }

    /// Cosines and sines of a position.
    pub fn at(&self, position: usize) -> (&[f32], &[f32]) {
        let range = position * self.half()..(position + 1) * self.half();
        (&self.cosines[range.clone()], &self.sines[range])
    }
}

/// The pairs between which frequencies go over from kept to divided.
fn yarn_ramp(shape: YarnShape, original: usize, theta: f64, dims: usize) -> (f64, f64) {
    // The pair that turns so often within the original context.
    let pair = |turns: f64| dims as f64 * (original as f64 / (turns * TAU)).ln() / (2.0 * theta.ln());
    let (mut low, mut high) = (pair(shape.beta_fast), pair(shape.beta_slow));
    if shape.truncate {
        (low, high) = (low.floor(), high.ceil());
    }
    let (low, high) = (low.max(0.0), high.min(dims as f64 - 1.0));
    (low, if high > low { high } else { low + 0.001 })
}

/// The precision of norms, embeddings, rotations and activations.
#[expect(clippy::cast_possible_truncation, reason = "f32 is the precision here")]
pub(super) fn to_f32(value: f64) -> f32 {
    value as f32
}

/// Turns the head at `head[..2 · half]`: element i with element i + half.
pub fn rotate(head: &mut [f32], cosines: &[f32], sines: &[f32]) {
    let (first, second) = head.split_at_mut(cosines.len());
    for (((a, b), cosine), sine) in first.iter_mut().zip(second).zip(cosines).zip(sines) {
        let (x, y) = (*a, *b);
        *a = x * cosine - y * sine;
        *b = y * cosine + x * sine;
    }
}
