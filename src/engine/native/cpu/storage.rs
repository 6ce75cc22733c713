//! What the CPU's operations keep: packed weights, activations, the blocks of the cache.
//!
//! Enters: stored matrices, shapes, numbers of blocks. Leaves: the same in memory that the members of the team have touched, each its own part.
#![expect(unsafe_code, reason = "members write shared buffers at places that do not overlap")]

use hbmark_core::model::Dtype;

use super::super::checks::refuse_mixed_experts;
use super::super::operations::{ExpertMlp, FusedLayout, LinearPart, Storage};
use super::super::random_kv;
use super::super::refuse;
use super::super::shapes::{LatentShape, PoolShape};
use super::cache::with_element;
use super::packed_matrix::PackedMatrix;
use super::thread_team::{DisjointSlice, Worker, owned};
use super::{CachePool, CpuBuffer, CpuOperations, FusedMatrix, PREPARE};
use crate::engine::EngineError;
use crate::weights::StoredMatrix;

impl Storage for CpuOperations {
    type Linear = FusedMatrix;
    type Vector = Vec<f32>;
    type Table = StoredMatrix;
    type Buffer = CpuBuffer;
    type Pool = CachePool;
    type ExpertTable = ();

    fn linear(&mut self, parts: Vec<LinearPart>, layout: FusedLayout) -> Result<FusedMatrix, EngineError> {
        let interleaved = layout == FusedLayout::Interleaved;
        let (mut packed_parts, mut biases) = (Vec::<PackedMatrix>::new(), Vec::new());
        for part in parts {
            let team = &mut self.team;
            let packed = PackedMatrix::new(&mut self.arena, &part.matrix, |bytes, panel_bytes| {
                let panels = bytes.len() / panel_bytes.max(1);
                let bytes = DisjointSlice::new(bytes);
                team.run_on_all(&|worker: &Worker<'_>| {
                    let own = owned(worker.index, worker.count, panels);
                    // SAFETY: members own different panels.
                    unsafe { bytes.part(own.start * panel_bytes..own.end * panel_bytes) }.fill(0);
                });
            })?;
            if let Some(first) = packed_parts.first() {
                let same = |a: &PackedMatrix| a.format.precision() == packed.format.precision();
                if !same(first) || (interleaved && first.rows != packed.rows) {
                    return refuse(
                        format!("{:?} beside {:?} in one fused layer", first.format, packed.format),
                        "the matrices of a fused layer must meet activations of one precision",
                    );
                }
            }
            self.kernels.meet(&packed);
            packed_parts.push(packed);
            biases.push(part.bias);
        }
        Ok(FusedMatrix::new(packed_parts, biases, interleaved))
    }

    fn vector(&mut self, values: Vec<f32>) -> Result<Vec<f32>, EngineError> {
        Ok(values)
    }

    fn table(&mut self, matrix: StoredMatrix) -> Result<StoredMatrix, EngineError> {
        Ok(matrix)
    }

    fn expert_table(
        &mut self,
        routed: &[ExpertMlp<Self>],
        shared: Option<&ExpertMlp<Self>>,
    ) -> Result<(), EngineError> {
        // Rows are packed once for all experts.
        let inputs = |matrix: &FusedMatrix| {
            let part = &matrix.parts[0];
            (part.format.precision(), part.padded_columns())
        };
        let alike =
            |experts: Vec<&FusedMatrix>| experts.windows(2).all(|two| inputs(two[0]) == inputs(two[1]));
        let gate_up = routed.iter().chain(shared).map(|expert| &expert.gate_up).collect();
        let down = routed.iter().map(|expert| &expert.down).collect();
        if alike(gate_up) && alike(down) { Ok(()) } else { refuse_mixed_experts() }
    }

    fn buffer(&mut self, rows: usize, width: usize) -> Result<CpuBuffer, EngineError> {
        let mut values = Vec::new();
        values.try_reserve_exact(rows * width).map_err(|_| EngineError::OutOfMemory {
            device: "cpu".into(),
            detail: format!("activations of {rows} × {width}"),
        })?;
        values.resize(rows * width, 0.0);
        Ok(CpuBuffer { width, values })
    }

    fn pool(&mut self, shape: PoolShape) -> Result<CachePool, EngineError> {
        CachePool::new(shape)
    }

    fn expanded_pool(&mut self, shape: &LatentShape, latents: &CachePool) -> Result<CachePool, EngineError> {
        // Nothing is rounded that the absorbed form does not round.
        CachePool::new(PoolShape { dtype: Dtype::F32, ..shape.expanded_pool(&latents.shape) })
    }

    fn set_width(buffer: &mut CpuBuffer, width: usize) {
        buffer.width = width;
    }

    fn reserve(&mut self, pool: &mut CachePool, blocks: usize) -> Result<(), EngineError> {
        let new = pool.reserve(blocks)?;
        if !new.is_empty() {
            // Each member touches its own part, so that the memory is local to it.
            let pool = &*pool;
            self.team.run_on_all(&|worker: &Worker<'_>| {
                worker.parallel_for(PREPARE, pool.regions(&new), |region| pool.touch(&new, region));
            });
        }
        Ok(())
    }

    fn fill_blocks(&mut self, pool: &mut CachePool, blocks: &[u32], seed: u64) -> Result<(), EngineError> {
        let shape = pool.shape;
        let pool = &*pool;
        let scales = [random_kv::int8_scale(); 2];
        self.team.run(&|worker: &Worker<'_>| {
            let [mut keys, mut values] = shape.block_parts().map(|elements| vec![0.0; elements]);
            worker.parallel_for(PREPARE, blocks.len() * shape.layers, |unit| {
                let (number, layer) = (unit / shape.layers, unit % shape.layers);
                let block = blocks[number];
                random_kv::fill(seed, layer, number, false, &mut keys);
                if pool.is_latent() {
                    for (slot, latent) in keys.chunks_exact(shape.head_dim).enumerate() {
                        with_element!(shape.dtype, E => {
                            // SAFETY: members have different blocks or layers, and `E` is the pool's dtype.
                            unsafe { pool.write_latent::<E>(layer, (block as usize, slot), latent) };
                        });
                    }
                    return;
                }
                random_kv::fill(seed, layer, number, true, &mut values);
                let rows = keys.chunks_exact(shape.head_dim).zip(values.chunks_exact(shape.head_dim));
                for (index, (key, value)) in rows.enumerate() {
                    let (head, slot) = (index / shape.block_size, index % shape.block_size);
                    with_element!(shape.dtype, E => {
                        // SAFETY: members have different blocks or layers, and `E` is the pool's dtype.
                        unsafe { pool.write::<E>(layer, (block as usize, slot), head, [key, value], scales) };
                    });
                }
            });
        });
        Ok(())
    }

    fn read_into(
        &mut self,
        buffer: &CpuBuffer,
        rows: usize,
        values: &mut Vec<f32>,
    ) -> Result<(), EngineError> {
        values.clear();
        values.extend_from_slice(&buffer.values[..rows * buffer.width]);
        Ok(())
    }
}
