//! The operations around latent attention, and attention over latents.

use super::CudaOperations;
use super::workspace::Part;
use crate::engine::EngineError;
use crate::engine::native::cuda::attention::{AttentionCut, SequenceRun};
use crate::engine::native::cuda::device::Device;
use crate::engine::native::cuda::device_matrix::Matrix;
use crate::engine::native::cuda::kernels::DeviceTensor;
use crate::engine::native::cuda::latent::{
    DeviceRows, ExpandLatents, FinishLatent, HeadProduct, LatentAttention, LatentCut, LatentDown, TurnQueries,
};
use crate::engine::native::cuda::step::Pool;
use crate::engine::native::cuda::tensor_core_linear::{self, TiledWorkspace};
use crate::engine::native::operations::{LatentOperations, LatentWeights};
use crate::engine::native::ragged_batch::Rows;
use crate::engine::native::rope::RopeTables;
use crate::engine::native::shapes::{AttentionShape, LatentForm};

impl<D: Device> CudaOperations<D> {
    /// The product of each head with its own part of a matrix; of rows and outputs, how far those of heads are apart.
    fn product_by_head(
        &mut self,
        rows: usize,
        heads: usize,
        weights: &Matrix<D>,
        (input, input_apart): (DeviceRows, usize),
        (out, out_apart): (&DeviceTensor<D>, usize),
    ) -> Result<(), EngineError> {
        let mut workspace = None;
        if rows >= self.tuning.min_tiled_rows && tensor_core_linear::fits(weights.format) {
            let bytes = tensor_core_linear::prepared_bytes(weights, rows * heads);
            self.grow(Part::Prepared, bytes, &[])?;
            let prepared = self.workspace.address(Part::Prepared);
            workspace = Some(TiledWorkspace { prepared, ready: false, by_library: false, widened: 0 });
        }
        let kernel = HeadProduct { rows, heads, weights, input, input_apart, out, out_apart, workspace };
        self.moved += kernel.launch(&mut self.device, self.tuning)?;
        Ok(())
    }

    /// Attention over latents.
    pub(super) fn attend_to_latents(
        &mut self,
        rows: &Rows,
        shape: &AttentionShape,
        layer: usize,
        query: &DeviceTensor<D>,
        pool: &Pool<D>,
        out: &DeviceTensor<D>,
    ) -> Result<(), EngineError> {
        // Of a single row over a long context the positions are split, of a long prompt they are not.
        for run in SequenceRun::with_single_rows_apart(rows) {
            let (longest, dtype) = (self.reach(&run), pool.shape.dtype);
            let cut = LatentCut::new(&self.device, &run, shape.heads, dtype, longest, self.tuning);
            if cut.splits() > 1 {
                let parts = run.rows().len() * shape.heads * cut.splits();
                self.splits_workspace(parts, shape.value_dim, cut.words(&run))?;
            }
            let kernel = LatentAttention {
                run: &run,
                shape: *shape,
                cut,
                query,
                step: &self.step,
                pool,
                layer,
                out,
                space: self.split_space(),
            };
            kernel.launch(&mut self.device, self.tuning)?;
            self.count_attention(AttentionCut::Latents(cut), &run, None, &pool.shape);
        }
        Ok(())
    }
}

impl<D: Device> LatentOperations for CudaOperations<D> {
    fn latent_down(
        &mut self,
        rows: &Rows,
        shape: &AttentionShape,
        weights: &LatentWeights<Self>,
        _ropes: &RopeTables,
        layer: usize,
        hidden: &DeviceTensor<D>,
        pool: &mut Pool<D>,
        compressed: &mut DeviceTensor<D>,
    ) -> Result<(), EngineError> {
        let count = rows.len();
        let workspace = self.tiled_workspace(count, &weights.down)?;
        // Where queries are made of what is normed, the sums are for nobody else.
        let sums = match weights.query {
            Some(_) => self.sums_workspace(count, weights.down.outputs)?,
            None => D::address(&compressed.memory),
        };
        let norm = Some((&weights.norm, shape.norm_eps));
        let down = LatentDown { rows: count, input: hidden, norm, weights: &weights.down, sums, workspace };
        self.moved += down.launch(&mut self.device, self.tuning)?;
        let finish = FinishLatent {
            rows: count,
            attention: shape,
            shape: weights.shape,
            sums,
            latent_norm: &weights.latent_norm,
            query: weights.query.as_ref().map(|(norm, _)| (norm, &*compressed)),
            step: &self.step,
            pool,
            layer,
        };
        self.moved += finish.launch(&mut self.device)?;
        Ok(())
    }

    fn latent_query(
        &mut self,
        rows: &Rows,
        shape: &AttentionShape,
        weights: &LatentWeights<Self>,
        _ropes: &RopeTables,
        form: LatentForm,
        compressed: &DeviceTensor<D>,
        query: &mut DeviceTensor<D>,
    ) -> Result<(), EngineError> {
        let own = weights.shape;
        let count = rows.len();
        let mut queries = DeviceRows::of(compressed);
        if let Some((_, projection)) = &weights.query {
            let workspace = self.tiled_workspace(count, projection)?;
            let sums = self.sums_workspace(count, projection.outputs)?;
            let (input, weights) = (compressed, projection);
            let up = LatentDown { rows: count, input, norm: None, weights, sums, workspace };
            self.moved += up.launch(&mut self.device, self.tuning)?;
            queries = DeviceRows { address: sums, width: projection.outputs };
        }
        if form == LatentForm::Absorbed {
            let (from, to) = ((queries, own.query_dim()), (&*query, own.cached()));
            self.product_by_head(count, own.heads, &weights.key_up, from, to)?;
        }
        let step = &self.step;
        TurnQueries { rows: count, attention: shape, shape: own, queries, step, form, out: query }
            .launch(&mut self.device)
    }

    fn can_expand(&self, rows: &Rows, weights: &LatentWeights<Self>, pool: &Pool<D>) -> bool {
        let matrices = [&weights.key, &weights.value_up];
        ExpandLatents::fits(rows, &weights.shape, matrices, &pool.shape, self.tuning)
    }

    fn latent_expand(
        &mut self,
        rows: &Rows,
        weights: &LatentWeights<Self>,
        layer: usize,
        pool: &Pool<D>,
        expanded: &mut Pool<D>,
    ) -> Result<(), EngineError> {
        let blocks = rows.tables.len();
        let positions = blocks * pool.shape.block_size;
        let latents = self.sums_workspace(positions, weights.shape.kv_rank)?;
        let room = tensor_core_linear::prepared_bytes(&weights.key, positions);
        self.grow(Part::Prepared, room, &[])?;
        let kernel = ExpandLatents {
            blocks,
            shape: weights.shape,
            key: &weights.key,
            value: &weights.value_up,
            step: &self.step,
            pool,
            layer,
            expanded,
            latents,
            prepared: self.workspace.address(Part::Prepared),
        };
        self.moved += kernel.launch(&mut self.device)?;
        Ok(())
    }

    fn latent_value(
        &mut self,
        rows: &Rows,
        weights: &LatentWeights<Self>,
        attended: &DeviceTensor<D>,
        values: &mut DeviceTensor<D>,
    ) -> Result<(), EngineError> {
        let own = weights.shape;
        let from = (DeviceRows::of(attended), own.kv_rank);
        self.product_by_head(rows.len(), own.heads, &weights.value_up, from, (values, own.value_dim))
    }
}
