//! Bounds on dimensions from untrusted files.
//!
//! Enters: an [`Architecture`] of a config or a saved result. Leaves: nothing, or the dimension out of bounds. Each bound is several times
//! the largest published dimension; together they keep the list of tensors within megabytes and every product far from overflow.

use super::config::limits;
use super::{Architecture, Experts};

/// A dimension out of bounds.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} is {found}; want {wanted}")]
pub struct OutOfBounds {
    pub what: &'static str,
    pub found: String,
    pub wanted: &'static str,
}

impl Architecture {
    /// Checks every dimension, and their products, against the bounds.
    ///
    /// # Errors
    /// [`OutOfBounds`] with the first that is not.
    pub fn check(&self) -> Result<(), OutOfBounds> {
        let dimensions = [
            ("hidden_size", self.hidden_size, limits::HIDDEN),
            ("layers", self.layers, limits::LAYERS),
            ("heads", self.heads, limits::HEADS),
            ("kv_heads", self.kv_heads, limits::HEADS),
            ("head_dim", self.head_dim, 2 * limits::HEAD_DIM),
            ("ffn_size", self.ffn_size, limits::FFN),
            ("vocab_size", self.vocab_size, limits::VOCAB),
            ("max_positions", self.max_positions, limits::POSITIONS),
        ];
        for (what, found, most) in dimensions {
            within(what, found, most)?;
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(out("kv_heads", &self.kv_heads, "a divisor of heads"));
        }
        if !(self.windows.is_empty() || self.windows.len() == self.layers) {
            return Err(out("windows", &self.windows.len(), "one for each layer, or none"));
        }
        if self.eos_tokens.len() > limits::EOS_TOKENS {
            return Err(out("eos_tokens", &self.eos_tokens.len(), "at most a thousand"));
        }
        if let Some(latent) = self.latent {
            within("kv_rank", latent.kv_rank, limits::HIDDEN)?;
            within("q_rank", latent.q_rank.unwrap_or(1), limits::HIDDEN)?;
            for width in [latent.qk_nope_head_dim, latent.qk_rope_head_dim, latent.v_head_dim] {
                within("the width of a latent head", width, limits::HEAD_DIM)?;
            }
        }
        if let Some(experts) = &self.experts {
            check_experts(experts, self.layers)?;
        }
        if let Some(stack) = &self.stack {
            stack.check(self.layers, self.experts.as_ref())?;
        }
        if let Some(quantization) = &self.quantization {
            quantization.storage()?;
        }
        let group = self.quantization.as_ref().and_then(|q| q.group_size).unwrap_or(1);
        within("group_size", group, limits::FFN)?;
        match self.tensors_at_most() {
            tensors if tensors <= limits::TENSORS => {}
            tensors => return Err(out("the number of tensors", &tensors, "at most 100000")),
        }
        match self.parameters_at_least() {
            Some(parameters) if parameters <= limits::PARAMETERS => Ok(()),
            Some(parameters) => Err(out("the number of parameters", &parameters, "at most 2^46")),
            None => Err(out("the number of parameters", &"beyond 64 bits", "at most 2^46")),
        }
    }

    /// Weights and biases, without scales.
    pub(super) fn tensors_at_most(&self) -> usize {
        // Attention has up to twelve, a dense feed-forward and the norms eight, and each expert three.
        const OF_A_LAYER: usize = 20;
        let routed = self.experts.as_ref().map_or(0, |experts| {
            let layers = self.layers.saturating_sub(experts.dense_layers.len());
            experts.count.saturating_mul(3).saturating_mul(layers)
        });
        self.layers.saturating_mul(OF_A_LAYER).saturating_add(routed)
    }

    /// Parameters of the large matrices, or `None` on overflow; attention of latent models is left out.
    pub(super) fn parameters_at_least(&self) -> Option<u64> {
        let product = |factors: &[usize]| factors.iter().try_fold(1_u64, |n, &f| n.checked_mul(f as u64));
        let attention = product(&[2, self.layers, self.hidden_size, self.heads, self.head_dim])?;
        let embedding = product(&[if self.tied_head { 1 } else { 2 }, self.vocab_size, self.hidden_size])?;
        let feed_forward = match &self.experts {
            None => product(&[3, self.layers, self.hidden_size, self.ffn_size])?,
            Some(e) => {
                let dense = product(&[3, e.dense_layers.len(), self.hidden_size, self.ffn_size])?;
                let routed_layers = self.layers.checked_sub(e.dense_layers.len())?;
                let width = e.count.checked_mul(e.ffn_size)?.checked_add(e.shared_ffn_size)?;
                dense.checked_add(product(&[3, routed_layers, self.hidden_size, width])?)?
            }
        };
        attention.checked_add(embedding)?.checked_add(feed_forward)
    }
}

fn check_experts(experts: &Experts, layers: usize) -> Result<(), OutOfBounds> {
    within("the number of experts", experts.count, limits::EXPERTS)?;
    within("experts per token", experts.per_token, experts.count)?;
    within("the width of an expert", experts.ffn_size, limits::FFN)?;
    if experts.shared_count > limits::EXPERTS {
        return Err(out("shared experts", &experts.shared_count, "at most 65536"));
    }
    if experts.shared_ffn_size > limits::EXPERTS.saturating_mul(limits::FFN) {
        return Err(out("the width of the shared experts", &experts.shared_ffn_size, "at most 2^36"));
    }
    if experts.dense_layers.len() > layers || experts.dense_layers.iter().any(|layer| *layer >= layers) {
        return Err(out("the dense layers", &experts.dense_layers.len(), "layers that the model has"));
    }
    Ok(())
}

fn within(what: &'static str, found: usize, most: usize) -> Result<(), OutOfBounds> {
    if (1..=most).contains(&found) { Ok(()) } else { Err(out(what, &found, "at least 1, and far less")) }
}

fn out(what: &'static str, found: &dyn std::fmt::Display, wanted: &'static str) -> OutOfBounds {
    OutOfBounds { what, found: found.to_string(), wanted }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::presets;

    #[test]
    fn every_shipped_shape_is_within_bounds() {
        for name in presets::names() {
            presets::find(name).unwrap().architecture.check().unwrap();
        }
    }

    #[test]
    fn dimensions_that_are_small_alone_and_many_together_are_refused() {
        let mut deepseek = presets::find("DeepSeek-V3").unwrap().architecture;
        deepseek.stack = None;
        deepseek.experts.as_mut().unwrap().count = 1 << 16;
        deepseek.hidden_size = 2;
        deepseek.experts.as_mut().unwrap().ffn_size = 1;
        let error = deepseek.check().unwrap_err().to_string();
        assert!(error.starts_with("the number of tensors is 114"), "{error}");
    }

    #[test]
    fn what_would_be_divided_by_is_not_zero() {
        let llama = || presets::find("Llama-3.2-1B").unwrap().architecture;
        for change in [
            |a: &mut Architecture| a.kv_heads = 0,
            |a: &mut Architecture| a.head_dim = 0,
            |a: &mut Architecture| a.vocab_size = 0,
            |a: &mut Architecture| a.layers = 0,
            |a: &mut Architecture| a.windows = vec![None],
        ] {
            let mut changed = llama();
            change(&mut changed);
            assert!(changed.check().is_err(), "{changed:?}");
        }
    }
}
