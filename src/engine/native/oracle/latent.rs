//! Latent attention as formulas: what is kept of a token, and the queries that meet it.

use super::arithmetic::{as_multiplied, dot, normed};
use super::{Oracle, OracleFault, PlainBuffer, PlainPool, bytes_of, to_f32};
use crate::engine::EngineError;
use crate::engine::native::kv_format;
use crate::engine::native::operations::{LatentOperations, LatentWeights, LinearPart};
use crate::engine::native::ragged_batch::Rows;
use crate::engine::native::rope::{RopeTables, rotate};
use crate::engine::native::shapes::{AttentionShape, LatentForm, LatentShape};

impl LatentOperations for Oracle {
    fn latent_down(
        &mut self,
        rows: &Rows,
        shape: &AttentionShape,
        weights: &LatentWeights<Self>,
        ropes: &RopeTables,
        layer: usize,
        hidden: &PlainBuffer,
        pool: &mut PlainPool,
        compressed: &mut PlainBuffer,
    ) -> Result<(), EngineError> {
        let LatentShape { kv_rank, .. } = weights.shape;
        let eps = self.eps(OracleFault::NormQkv, shape.norm_eps);
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
            ropes.rotate(shape.rope, rows.positions[row] as usize, &mut kept[kv_rank..]);
            let [place, _] = pool.places(rows.slot(row), 0);
            let cache = &mut pool.layers[layer][0][place];
            cache.copy_from_slice(&kept);
            kv_format::keep(cache, pool.shape.dtype, kv_format::scale_of(&kept));
        }
        let written = rows.len() * pool.shape.position_bytes();
        let norms = weights.latent_norm.len() + weights.query.as_ref().map_or(0, |(norm, _)| norm.len());
        self.moved += (4 * norms + written) as u64;
        Ok(())
    }

    // What the other form is held against.
    fn latent_form(&self, _: &Rows, _: &LatentWeights<Self>, _: &PlainPool) -> LatentForm {
        LatentForm::Absorbed
    }

    fn latent_query(
        &mut self,
        rows: &Rows,
        shape: &AttentionShape,
        weights: &LatentWeights<Self>,
        ropes: &RopeTables,
        form: LatentForm,
        compressed: &PlainBuffer,
        query: &mut PlainBuffer,
    ) -> Result<(), EngineError> {
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
            // What meets the latent, and what meets the key.
            let (wide, dim) = match form {
                LatentForm::Absorbed => (kv_rank, own.cached()),
                LatentForm::Expanded => (nope_dim, own.query_dim()),
            };
            let out = query.row_mut(row).chunks_exact_mut(dim);
            let (unturned, keys): (Vec<_>, Vec<_>) = out.map(|head| head.split_at_mut(wide)).unzip();
            let of_heads = || projected.chunks_exact(own.query_dim());
            let parts = of_heads().map(|head| &head[..nope_dim]);
            match form {
                LatentForm::Absorbed => by_head(&weights.key_up, parts, unturned),
                LatentForm::Expanded => {
                    unturned.into_iter().zip(parts).for_each(|(out, part)| out.copy_from_slice(part));
                }
            }
            let turned = shape.rope.filter(|_| !self.is_faulty(OracleFault::LatentQuery));
            let angles = ropes.at(turned, rows.positions[row] as usize);
            for (key, head) in keys.into_iter().zip(of_heads()) {
                key.copy_from_slice(&head[nope_dim..]);
                if let Some((cosines, sines)) = angles {
                    rotate(key, cosines, sines);
                }
            }
        }
        if form == LatentForm::Absorbed {
            self.moved += bytes_of(&weights.key_up);
        }
        Ok(())
    }

    fn latent_expand(
        &mut self,
        rows: &Rows,
        weights: &LatentWeights<Self>,
        layer: usize,
        pool: &PlainPool,
        expanded: &mut PlainPool,
    ) -> Result<(), EngineError> {
        let LatentShape { heads, kv_rank, nope_dim, value_dim, .. } = weights.shape;
        let [kept, _] = &pool.layers[layer];
        for (block, slot) in rows.seen() {
            let [place, _] = pool.places((rows.tables[block] as usize, slot), 0);
            let (latent, turned) = kept[place].split_at(kv_rank);
            for head in 0..heads {
                let (mut key, mut value) = (vec![0.0; nope_dim], vec![0.0; value_dim]);
                let of_key = if self.is_faulty(OracleFault::LatentExpand) { 0 } else { head };
                by_head(&weights.key[of_key..=of_key], [latent], [key.as_mut_slice()]);
                by_head(&weights.value_up[head..=head], [latent], [value.as_mut_slice()]);
                key.extend_from_slice(turned);
                expanded.write(0, (block, slot), head, [&key, &value]);
            }
            self.moved += (pool.shape.position_bytes() + expanded.shape.position_bytes()) as u64;
        }
        self.moved += bytes_of(&weights.key) + bytes_of(&weights.value_up);
        Ok(())
    }

    fn latent_value(
        &mut self,
        rows: &Rows,
        weights: &LatentWeights<Self>,
        attended: &PlainBuffer,
        values: &mut PlainBuffer,
    ) -> Result<(), EngineError> {
        let LatentShape { heads, kv_rank, value_dim, .. } = weights.shape;
        let first =
            self.is_faulty(OracleFault::LatentValue).then(|| vec![weights.value_up[0].clone(); heads]);
        let parts = first.as_ref().unwrap_or(&weights.value_up);
        for row in 0..rows.len() {
            let of_heads = attended.row(row).chunks_exact(kv_rank);
            by_head(parts, of_heads, values.row_mut(row).chunks_exact_mut(value_dim));
        }
        self.moved += bytes_of(&weights.value_up);
        Ok(())
    }
}

/// The product of each head with its own part.
fn by_head<'a>(
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
