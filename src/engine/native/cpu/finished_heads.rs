//! What Q, K and V go through between their projection and attention.
//!
//! Enters: the projected heads of a row. Leaves: queries normed and rotated, K and V in the cache.
#![expect(unsafe_code, reason = "members write shared buffers at places that do not overlap")]

use super::CpuOperations;
use super::cache::{CachePool, with_element};
use crate::engine::native::kv_format;
use crate::engine::native::operations::AttentionWeights;
use crate::engine::native::ragged_batch::Rows;
use crate::engine::native::rope::{RopeTables, rotate};
use crate::engine::native::shapes::AttentionShape;
use hbmark_cpu_kernels::element::Element;

/// One head of K and V of one row, with the query heads that share it.
pub(super) struct FinishHead<'a> {
    pub rows: &'a Rows,
    pub shape: &'a AttentionShape,
    pub weights: &'a AttentionWeights<CpuOperations>,
    /// What Q and K of the row are multiplied with, where all heads are normed together.
    pub joint: Option<[f32; 2]>,
    pub ropes: &'a RopeTables,
    pub layer: usize,
    pub pool: &'a CachePool,
    pub row: usize,
    pub head: usize,
}

impl FinishHead<'_> {
    /// Norm, RoPE and store.
    ///
    /// # Safety
    /// No other member has this row and head.
    pub(super) unsafe fn run(&self, queries: &mut [f32], key: &mut [f32], value: &[f32], out: &mut [f32]) {
        let dim = self.shape.head_dim;
        let angles = self.ropes.at(self.shape.rope, self.rows.positions[self.row] as usize);
        let first_query = self.head * self.shape.group();
        let finish = |head: &mut [f32], index: usize, norm: Option<&Vec<f32>>, joint: Option<f32>| {
            if let Some(norm) = norm {
                let factor = joint.unwrap_or_else(|| norm_factor(head, self.shape.norm_eps));
                let norm = if joint.is_some() { &norm[index * dim..(index + 1) * dim] } else { norm };
                head.iter_mut().zip(norm).for_each(|(x, weight)| *x = *x * factor * weight);
            }
            if let Some((cosines, sines)) = angles {
                rotate(head, cosines, sines);
            }
        };
        let norms = self.weights.head_norms.as_ref();
        for (index, query) in queries.chunks_exact_mut(dim).enumerate() {
            finish(query, first_query + index, norms.map(|norms| &norms.0), self.joint.map(|joint| joint[0]));
        }
        out.copy_from_slice(queries);
        finish(key, self.head, norms.map(|norms| &norms.1), self.joint.map(|joint| joint[1]));
        let slot = self.rows.slot(self.row);
        let vectors = [&*key, value];
        with_element!(self.pool.shape.dtype, E => {
            let scales = if E::SCALED { vectors.map(kv_format::scale_of) } else { [1.0; 2] };
            // SAFETY: `E` is the pool's dtype; the slot and head are this unit's.
            unsafe { self.pool.write::<E>(self.layer, slot, self.head, vectors, scales) };
        });
    }
}

/// `1 / √(mean(x²) + ε)`.
pub(super) fn norm_factor(values: &[f32], eps: f32) -> f32 {
    let mean = values.iter().map(|x| x * x).sum::<f32>() / values.len() as f32;
    1.0 / (mean + eps).sqrt()
}
