//! Latent attention as formulas: what is kept of a token, and the queries that meet it.

use super::{Fault, Oracle, PlainBuffer, PlainPool, as_multiplied, bytes_of, dot, normed, to_f32};
use crate::engine::native::kv_format;
use crate::engine::native::operations::{AttentionShape, LatentShape, LatentWeights, LinearPart};
use crate::engine::native::ragged_batch::Rows;
use crate::engine::native::rope::{RopeTables, rotate};

impl Oracle {
    #[expect(clippy::too_many_arguments, reason = "one fused operation")]
    pub(super) fn latents(
        &mut self,
        rows: &Rows,
        shape: &AttentionShape,
        weights: &LatentWeights<Self>,
        ropes: &RopeTables,
        (layer, pool): (usize, &mut PlainPool),
        hidden: &PlainBuffer,
        compressed: &mut PlainBuffer,
    ) {
        let LatentShape { kv_rank, .. } = weights.shape;
        let eps = self.eps(Fault::NormQkv, shape.norm_eps);
        let inputs = self.norm(hidden, 0..rows.len(), Some((&weights.norm, eps)));
        let projected = self.multiply(&weights.down, &inputs);
        for (row, projected) in projected.iter().enumerate() {
            let projected: Vec<f32> = projected.iter().map(|&x| to_f32(x)).collect();
            let (queries, kept) = projected.split_at(weights.shape.query_part());
            match &weights.query {
                Some((norm, _)) => {
                    compressed.row_mut(row).copy_from_slice(&normed(queries, norm, shape.norm_eps));
                }
                None => compressed.row_mut(row).copy_from_slice(&projected),
            }
            let mut kept =
                [&normed(&kept[..kv_rank], &weights.latent_norm, shape.norm_eps), &kept[kv_rank..]].concat();
            if let Some((cosines, sines)) = ropes.at(shape.rope, rows.positions[row] as usize) {
                rotate(&mut kept[kv_rank..], cosines, sines);
            }
            let place = pool.place(rows.slot(row), 0);
            let cache = &mut pool.layers[layer][0][place];
            cache.copy_from_slice(&kept);
            kv_format::keep(cache, pool.shape.dtype, kv_format::scale_of(&kept));
        }
        let written = rows.len() * pool.shape.position_bytes();
        let norms = weights.latent_norm.len() + weights.query.as_ref().map_or(0, |(norm, _)| norm.len());
        self.moved += (4 * norms + written) as u64;
    }

    pub(super) fn queries_of_latents(
        &mut self,
        rows: &Rows,
        shape: &AttentionShape,
        weights: &LatentWeights<Self>,
        ropes: &RopeTables,
        compressed: &PlainBuffer,
        query: &mut PlainBuffer,
    ) {
        let own @ LatentShape { kv_rank, nope_dim, .. } = weights.shape;
        let inputs = self.norm(compressed, 0..rows.len(), None);
        let projected = match &weights.query {
            Some((_, queries)) => {
                let projected = self.multiply(queries, &inputs);
                projected.iter().map(|row| row.iter().map(|&x| to_f32(x)).collect()).collect()
            }
            None => inputs,
        };
        for (row, projected) in projected.iter().enumerate() {
            let out = query.row_mut(row).chunks_exact_mut(own.cached());
            let (latents, keys): (Vec<_>, Vec<_>) = out.map(|head| head.split_at_mut(kv_rank)).unzip();
            let of_heads = || projected.chunks_exact(own.query_dim());
            by_head(&weights.key_up, of_heads().map(|head| &head[..nope_dim]), latents);
            let turned = shape.rope.filter(|_| !self.is_faulty(Fault::LatentQuery));
            let angles = ropes.at(turned, rows.positions[row] as usize);
            for (key, head) in keys.into_iter().zip(of_heads()) {
                key.copy_from_slice(&head[nope_dim..]);
                if let Some((cosines, sines)) = angles {
                    rotate(key, cosines, sines);
                }
            }
        }
        self.moved += bytes_of(&weights.key_up);
    }
}

/// The product of each head with its own part.
pub(super) fn by_head<'a>(
    parts: &[LinearPart],
    inputs: impl IntoIterator<Item = &'a [f32]>,
    outputs: impl IntoIterator<Item = &'a mut [f32]>,
) {
    for ((part, input), outputs) in parts.iter().zip(inputs).zip(outputs) {
        let input = as_multiplied(input, &part.matrix);
        let mut weights = vec![0.0; part.matrix.columns];
        for (row, out) in outputs.iter_mut().enumerate() {
            part.matrix.row(row, &mut weights);
            *out = to_f32(dot(&weights, &input));
        }
    }
}
