//! Multi-head latent attention as typed launches: what a layer does between its norm and its output projection.
//!
//! Enters: hidden states, a step, a cache of one vector for each position. Leaves: launches of `latent.cu`, `latent_attention.cu` and, for plain products,
//! `norm_qkv.cu`, and the bytes that they read and write. A layer is [`LatentDown`], [`FinishLatent`], [`LatentDown`] once more where queries have a rank of
//! their own; absorbed [`HeadProduct`] and [`TurnQueries`], [`LatentAttention`], [`HeadProduct`]; expanded [`TurnQueries`], [`ExpandLatents`] and the
//! attention of heads with K and V of their own.

use Argument::{Address, F32, I32, U64};

use super::attention::{
    PrefillAttention, QUERIES, SequenceRun, SplitSpace, row_address, row_bytes, splits, tile_bytes,
};
use super::device::{Argument, Device, KernelLaunch, MAX_GRID_YZ};
use super::device_matrix::{KernelFormat, Matrix};
use super::kernels::{
    BLOCKS_PER_MULTIPROCESSOR, DeviceTensor, THREADS, Tuning, enqueue, launch_mismatch, norm_bytes,
    norm_width, optional, rows_at_once, size, staged_inputs, stream, word,
};
use super::step::{Pool, StepState};
use super::tensor_core_linear::{self, Prepare, RowParts, TiledWorkspace};
use crate::engine::EngineError;
use crate::engine::native::ragged_batch::Rows;
use crate::engine::native::shapes::{AttentionShape, LatentForm, LatentShape, PoolShape};
use hbmark_core::model::Dtype;

/// The widest vector of a position, the most of it that is a value, and heads that share a load (`latent_attention.cu`).
pub const MAX_WIDTH: usize = 576;
pub const MAX_LATENT: usize = 512;
const SHARED_HEADS: usize = 16;
/// Bytes of tiles of positions for each element of a vector: three tiles of 32 bytes of it.
const STAGED_BYTES: usize = 3 * 32;
/// On tensor cores: positions of a tile, and shared memory of queries, two tiles and scores.
const POSITIONS: usize = 32;
const TILED_BYTES: usize = (QUERIES + 2 * POSITIONS) * MAX_WIDTH * 2 + (16 << 10);
/// Static shared memory of a block that merges splits.
const STATIC_BYTES: usize = 16;
/// K and V that are made of latents at a time, at the most: of longer prompts attention is over latents.
const MAX_EXPANDED_BYTES: usize = 2 << 30;

/// Rows of f32 on the device, so many elements each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceRows {
    pub address: u64,
    pub width: usize,
}

impl DeviceRows {
    /// Those of a tensor.
    pub fn of<D: Device>(tensor: &DeviceTensor<D>) -> Self {
        Self { address: D::address(&tensor.memory), width: tensor.width }
    }
}

/// Whether a pool keeps one vector of so many elements for each position.
fn keeps<D: Device>(pool: &Pool<D>, width: usize) -> bool {
    let PoolShape { kv_heads, head_dim, value_dim, .. } = pool.shape;
    (kv_heads, head_dim, value_dim) == (1, width, 0)
}

/// `sums = W · norm(input) + b`: the sums of a fused projection as they are, for [`FinishLatent`] and for queries behind their norm.
#[derive(Debug)]
pub struct LatentDown<'a, D: Device> {
    pub rows: usize,
    pub input: &'a DeviceTensor<D>,
    pub norm: Option<(&'a DeviceTensor<D>, f32)>,
    pub weights: &'a Matrix<D>,
    /// Room for the sums, `[rows, outputs]` f32.
    pub sums: u64,
    /// Room for a product on tensor cores; `None` streams.
    pub workspace: Option<TiledWorkspace>,
}

impl<D: Device> LatentDown<'_, D> {
    /// Enqueues it; bytes of weights and norm.
    pub fn launch(&self, device: &mut D, tuning: Tuning) -> Result<u64, EngineError> {
        let Self { rows, input, norm, weights, sums, workspace } = self;
        let widths = (input.width, norm_width(input, *norm));
        if widths != (weights.columns, weights.columns)
            || input.rows < *rows
            || !weights.outputs.is_multiple_of(2)
        {
            let what = format!("{rows} rows of {}, {} × {}", input.width, weights.outputs, weights.columns);
            return launch_mismatch(device, "latent_down", what);
        }
        let input = D::address(&input.memory);
        let eps = F32(norm.map_or(0.0, |(_, eps)| eps));
        let (data, sums) = (D::address(&weights.data), *sums);
        // Heads with norms that nobody waits for: the kernel leaves their sums, and reads nothing of heads or of a cache.
        let head_norm = Address(data);
        let nowhere = Address(0);
        let (layer_bytes, layer, [heads, kv_heads, head_dim], block_shift) =
            (U64(0), I32(0), [I32(1), I32(1), I32(2)], I32(0));
        if let Some(workspace) = *workspace {
            let inputs = Prepare { rows: *rows, input, row_of: 0, norm: *norm, parts: None };
            let ours = || {
                let mut arguments = vec![head_norm, nowhere, eps];
                arguments.extend([nowhere; 6]);
                arguments.extend([Address(sums), layer_bytes, layer, heads, kv_heads, head_dim, block_shift]);
                arguments
            };
            let bytes = inputs.multiply(device, "qkv", weights, workspace, sums, ours)?;
            return Ok(bytes + norm_bytes(*norm));
        }
        let mut arguments = vec![
            Address(input),
            optional::<D>(norm.map(|(norm, _)| &norm.memory)),
            eps,
            Address(data),
            optional::<D>(weights.scales.as_ref()),
            optional::<D>(weights.bias.as_ref()),
            head_norm,
        ];
        arguments.extend([nowhere; 7]);
        arguments.extend([
            Address(sums),
            nowhere,
            layer_bytes,
            layer,
            heads,
            kv_heads,
            head_dim,
            block_shift,
            size(weights.outputs),
        ]);
        Ok(stream(device, "norm_qkv", weights, *rows, tuning, arguments)? + norm_bytes(*norm))
    }
}

/// What [`LatentDown`] left of a position goes to the cache, and the query part behind its norm to the next product.
#[derive(Debug)]
pub struct FinishLatent<'a, D: Device> {
    pub rows: usize,
    pub attention: &'a AttentionShape,
    pub shape: LatentShape,
    /// The query part, the latent and what turns, of each row.
    pub sums: u64,
    pub latent_norm: &'a DeviceTensor<D>,
    /// The norm of the query part and where that goes, `[rows, q_rank]`, where the shape has a rank.
    pub query: Option<(&'a DeviceTensor<D>, &'a DeviceTensor<D>)>,
    pub step: &'a StepState<D>,
    pub pool: &'a Pool<D>,
    pub layer: usize,
}

impl<D: Device> FinishLatent<'_, D> {
    /// Enqueues it; bytes of norms, and of the cache written.
    pub fn launch(&self, device: &mut D) -> Result<u64, EngineError> {
        let Self { rows, attention, shape, sums, latent_norm, query, step, pool, layer } = self;
        let part = shape.query_part();
        let query_fits = match (shape.q_rank, query) {
            (Some(rank), Some((norm, to))) => (norm.width, to.width) == (rank, rank) && to.rows >= *rows,
            (None, None) => true,
            _ => false,
        };
        let whole =
            part.is_multiple_of(4) && shape.kv_rank.is_multiple_of(4) && shape.rope_dim.is_multiple_of(2);
        if latent_norm.width != shape.kv_rank || !query_fits || !whole || !keeps(pool, shape.cached()) {
            let what = format!("{rows} rows of {part} and {} + {}", shape.kv_rank, shape.rope_dim);
            return launch_mismatch(device, "latent_finish", what);
        }
        let (cosines, sines) = step.angles(attention.rope);
        device.launch(&KernelLaunch {
            kernel: format!("latent_finish_{}", pool.shape.dtype),
            grid: [word(*rows), 1, 1],
            threads: 64,
            shared_bytes: 0,
            arguments: vec![
                Address(*sums),
                Address(D::address(&latent_norm.memory)),
                optional::<D>(query.map(|(norm, _)| &norm.memory)),
                F32(attention.norm_eps),
                Address(cosines),
                Address(sines),
                Address(step.positions()),
                Address(step.tables()),
                Address(step.starts()),
                U64(pool.layer_bytes() as u64),
                size(*layer),
                size(shape.cached()),
                size(pool.block_shift() as usize),
                optional::<D>(query.map(|(_, to)| &to.memory)),
                size(part),
                size(shape.kv_rank),
                size(part + shape.cached()),
            ],
        })?;
        let norms = latent_norm.width + query.map_or(0, |(norm, _)| norm.width);
        Ok((4 * norms + rows * shape.cached() * pool.shape.element_bytes()) as u64)
    }
}

/// `out[row][h] = M[h] · input[row][h]`.
#[derive(Debug)]
pub struct HeadProduct<'a, D: Device> {
    pub rows: usize,
    pub heads: usize,
    /// Matrices of all heads, one after another.
    pub weights: &'a Matrix<D>,
    /// Rows that begin with the input of the first head; that of the next is so many columns behind.
    pub input: DeviceRows,
    pub input_apart: usize,
    /// The same of outputs.
    pub out: &'a DeviceTensor<D>,
    pub out_apart: usize,
    /// Room for a product on tensor cores, which take each head of a row as one; `None` streams.
    pub workspace: Option<TiledWorkspace>,
}

impl<D: Device> HeadProduct<'_, D> {
    /// Whether there are kernels for a format.
    pub fn has(format: KernelFormat) -> bool {
        // Others have scales for parts of rows, which the turned half of an expansion would need anew.
        format.words_beside() == 0 || format == KernelFormat::Fp8Block
    }

    /// Enqueues it; bytes of weights.
    pub fn launch(&self, device: &mut D, tuning: Tuning) -> Result<u64, EngineError> {
        let Self { rows, heads, weights, input, input_apart, out, out_apart, workspace } = self;
        let outputs = weights.outputs / heads.max(&1);
        // Outputs of a head are whole pairs, and with scales of blocks the sixteen that share them.
        let whole = if weights.format == KernelFormat::Fp8Block { 16 } else { 2 };
        let reach = |apart: usize, columns: usize| heads.saturating_sub(1) * apart + columns;
        if outputs * heads != weights.outputs
            || !outputs.is_multiple_of(whole)
            || reach(*input_apart, weights.columns) > input.width
            || reach(*out_apart, outputs) > out.width
            || out.rows < *rows
        {
            let what = format!(
                "{rows} rows of {} to {}, {heads} heads of {} × {}",
                input.width, out.width, weights.outputs, weights.columns
            );
            return launch_mismatch(device, "latent_product", what);
        }
        if !Self::has(weights.format) || weights.bias.is_some() {
            let what = format!("{}, bias: {}", weights.format.name(), weights.bias.is_some());
            return launch_mismatch(device, "latent_product", what);
        }
        let (from, to) = (input.address, Address(D::address(&out.memory)));
        let out_places = [size(out.width), size(*out_apart)];
        if let Some(TiledWorkspace { prepared, .. }) = *workspace {
            let parts = RowParts { count: *heads, apart: *input_apart, stride: input.width };
            Prepare { rows: rows * heads, input: from, row_of: 0, norm: None, parts: Some(parts) }
                .launch(device, weights, prepared)?;
            let mut arguments = vec![to];
            arguments.extend(out_places);
            let rows = (*rows, *heads);
            return tensor_core_linear::multiply_heads(device, "product", rows, weights, prepared, arguments);
        }
        let at_once = rows_at_once(weights.format, *rows);
        let passes = rows.div_ceil(at_once);
        if passes > MAX_GRID_YZ {
            return launch_mismatch(device, "latent_product", format!("{rows} rows"));
        }
        let (chunk, shared_bytes) = staged_inputs(weights.format, weights.vectors, at_once, tuning);
        let blocks = device.multiprocessors() as usize * BLOCKS_PER_MULTIPROCESSOR;
        let blocks = blocks.div_ceil(heads * passes.max(1)).min(outputs / 2);
        let mut arguments = vec![
            Address(from),
            Address(D::address(&weights.data)),
            optional::<D>(weights.scales.as_ref()),
            to,
            size(input.width),
            size(*input_apart),
        ];
        arguments.extend(out_places);
        let shift = weights.shift as usize;
        arguments.extend([*rows, weights.columns, outputs, weights.vectors, shift, chunk].map(size));
        device.launch(&KernelLaunch {
            kernel: format!("latent_product_{}_m{at_once}", weights.format.name()),
            grid: [word(blocks), word(*heads), word(passes)],
            threads: THREADS,
            shared_bytes,
            arguments,
        })?;
        Ok(passes as u64 * weights.bytes())
    }
}

/// The parts of queries that turn go behind what [`HeadProduct`] made of the others, or behind the others as they are.
#[derive(Debug)]
pub struct TurnQueries<'a, D: Device> {
    pub rows: usize,
    pub attention: &'a AttentionShape,
    pub shape: LatentShape,
    /// Rows that begin with `heads · (nope_dim + rope_dim)` elements.
    pub queries: DeviceRows,
    pub step: &'a StepState<D>,
    pub form: LatentForm,
    /// `[rows, heads · (kv_rank + rope_dim)]`, or expanded as wide as the queries.
    pub out: &'a DeviceTensor<D>,
}

impl<D: Device> TurnQueries<'_, D> {
    /// Enqueues it.
    pub fn launch(&self, device: &mut D) -> Result<(), EngineError> {
        let Self { rows, attention, shape, queries, step, form, out } = self;
        if queries.width < shape.query_width()
            || out.width != shape.query_width_of(*form)
            || out.rows < *rows
            || !shape.rope_dim.is_multiple_of(2)
        {
            let what = format!("{rows} rows of {} to {}", queries.width, out.width);
            return launch_mismatch(device, "latent_turn", what);
        }
        let (cosines, sines) = step.angles(attention.rope);
        let (before, copied) = match form {
            LatentForm::Absorbed => (shape.kv_rank, 0),
            LatentForm::Expanded => (shape.nope_dim, shape.nope_dim),
        };
        let pairs = shape.heads * shape.rope_dim / 2;
        let arguments = vec![
            Address(queries.address),
            Address(cosines),
            Address(sines),
            Address(step.positions()),
            Address(D::address(&out.memory)),
            size(shape.heads),
            size(shape.nope_dim),
            size(shape.rope_dim),
            size(before),
            size(copied),
            size(queries.width),
        ];
        enqueue(device, "latent_turn", [word(*rows), word(pairs.div_ceil(THREADS as usize)), 1], arguments)
    }
}

/// K and V of each head, made of the latents of all positions in the blocks of a step; what is behind the last position of a sequence is made of whatever
/// is there, and never read.
#[derive(Debug)]
pub struct ExpandLatents<'a, D: Device> {
    /// Blocks in the tables of the step.
    pub blocks: usize,
    pub shape: LatentShape,
    /// Matrices of all heads, `[heads · nope_dim, kv_rank]` and `[heads · value_dim, kv_rank]`.
    pub key: &'a Matrix<D>,
    pub value: &'a Matrix<D>,
    pub step: &'a StepState<D>,
    pub pool: &'a Pool<D>,
    pub layer: usize,
    pub expanded: &'a Pool<D>,
    /// Room for `[positions, kv_rank]` f32.
    pub latents: u64,
    /// Room for the same as tensor cores take it.
    pub prepared: u64,
}

impl<D: Device> ExpandLatents<'_, D> {
    /// Whether there are kernels for it, and room for K and V.
    pub fn fits(
        rows: &Rows,
        shape: &LatentShape,
        [key, value]: [&Matrix<D>; 2],
        pool: &PoolShape,
        tuning: Tuning,
    ) -> bool {
        let expanded = shape.expanded_pool(pool);
        let positions = rows.tables.len() * pool.block_size;
        let tiled = |matrix: &Matrix<D>| {
            HeadProduct::<D>::has(matrix.format) && tensor_core_linear::fits(matrix.format)
        };
        tiled(key)
            && tiled(value)
            && positions >= tuning.min_tiled_rows
            && positions * expanded.position_bytes() <= MAX_EXPANDED_BYTES
            && PrefillAttention::<D>::fits(&SequenceRun::whole(rows), &expanded, tuning)
    }

    /// Enqueues it; bytes of weights, of the cache read, and of K and V written.
    pub fn launch(&self, device: &mut D) -> Result<u64, EngineError> {
        let Self { blocks, shape, key, value, step, pool, layer, expanded, latents, prepared } = self;
        let LatentShape { heads, kv_rank, nope_dim, value_dim, .. } = *shape;
        let positions = blocks << pool.block_shift();
        let inputs =
            |matrix: &Matrix<D>| (matrix.columns, matrix.vectors, matrix.format, matrix.bias.is_some());
        let wanted = shape.expanded_pool(&pool.shape);
        if (key.outputs, value.outputs) != (heads * nope_dim, heads * value_dim)
            || inputs(key) != inputs(value)
            || (key.columns, key.bias.is_some()) != (kv_rank, false)
            || !keeps(pool, shape.cached())
            || expanded.shape != wanted
            || !nope_dim.is_multiple_of(2)
            || !value_dim.is_multiple_of(2)
        {
            let what = format!("{heads} heads of {nope_dim} and {value_dim} of latents of {kv_rank}");
            return launch_mismatch(device, "latent_expand", what);
        }
        let tables = Address(expanded.tables(step));
        let arguments = vec![
            Address(step.tables()),
            U64(pool.layer_bytes() as u64),
            size(*layer),
            size(shape.cached()),
            size(kv_rank),
            size(pool.block_shift() as usize),
            Address(*latents),
            tables,
            size(heads),
            size(shape.query_dim()),
        ];
        enqueue(device, format!("latent_gather_{}", pool.shape.dtype), [word(positions), 1, 1], arguments)?;
        Prepare { rows: positions, input: *latents, row_of: 0, norm: None, parts: None }
            .launch(device, key, *prepared)?;
        let values_begin = heads * shape.query_dim() * pool.shape.block_size;
        let mut bytes = (positions * (pool.shape.position_bytes() + wanted.position_bytes())) as u64;
        for (weights, before, width) in [(key, 0, shape.query_dim()), (value, values_begin, value_dim)] {
            let arguments = vec![
                tables,
                U64(before as u64),
                size(width),
                size(pool.block_shift() as usize),
                I32(i32::from(pool.shape.dtype == Dtype::Bf16)),
            ];
            let sizes = (positions, heads);
            bytes +=
                tensor_core_linear::multiply_heads(device, "expand", sizes, weights, *prepared, arguments)?;
        }
        Ok(bytes)
    }
}

/// How attention over latents is cut, by rows and shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LatentCut {
    /// Rows by themselves, each in blocks of so many heads that share a load.
    Rows { heads: usize, splits: usize },
    /// Rows of each sequence together, on tensor cores.
    Tiles { heads: usize, splits: usize },
}

impl LatentCut {
    /// Tensor cores where the cache allows and a sequence has as many queries as the tuning says, in blocks of heads; as few splits as come near to
    /// filling the device evenly. `longest` positions are the most that a row sees.
    pub fn new<D: Device>(
        device: &D,
        run: &SequenceRun<'_>,
        heads: usize,
        dtype: Dtype,
        longest: usize,
        tuning: Tuning,
    ) -> Self {
        let multiprocessors = device.multiprocessors() as usize;
        let kernel = dtype != Dtype::F32 && TILED_BYTES + STATIC_BYTES <= device.shared_bytes();
        let most = |least: usize| longest.div_ceil(tuning.min_split.max(least)).max(1);
        let launched = run.tiles();
        if !kernel || launched.most_rows * heads < tuning.min_prefill_rows.saturating_mul(SHARED_HEADS) {
            let ways = run.rows().len() * heads.div_ceil(SHARED_HEADS);
            return Self::Rows { heads, splits: splits(ways, multiprocessors, 1, most(1)) };
        }
        let ways = run.busy_tiles(heads);
        // A part of a tile is many bytes: no more of them than two rounds of blocks.
        let most = most(POSITIONS).min((2 * multiprocessors).div_ceil(ways));
        let splits = splits(ways, multiprocessors, 1, most);
        Self::Tiles { heads, splits }
    }

    /// Blocks that share positions.
    pub fn splits(self) -> usize {
        match self {
            Self::Rows { splits, .. } | Self::Tiles { splits, .. } => splits,
        }
    }

    /// Words that splits meet at.
    pub fn words(self, run: &SequenceRun<'_>) -> usize {
        match self {
            Self::Rows { heads, .. } => run.rows().len() * heads.div_ceil(SHARED_HEADS),
            Self::Tiles { heads, .. } => run.tiles().tiles(heads),
        }
    }

    /// Bytes of the cache that the rows of a run read, of so many for each position.
    pub fn bytes(self, run: &SequenceRun<'_>, position_bytes: usize) -> u64 {
        match self {
            Self::Rows { heads, .. } => row_bytes(run, heads.div_ceil(SHARED_HEADS), None, position_bytes),
            Self::Tiles { heads, .. } => tile_bytes(run, heads, None, position_bytes),
        }
    }
}

/// Attention of the rows of a run over latents.
#[derive(Debug)]
pub struct LatentAttention<'a, D: Device> {
    pub run: &'a SequenceRun<'a>,
    pub shape: AttentionShape,
    pub cut: LatentCut,
    pub query: &'a DeviceTensor<D>,
    pub step: &'a StepState<D>,
    pub pool: &'a Pool<D>,
    pub layer: usize,
    pub out: &'a DeviceTensor<D>,
    /// With [`LatentCut::words`], where there are several.
    pub space: SplitSpace,
}

impl<D: Device> LatentAttention<'_, D> {
    /// Enqueues it.
    pub fn launch(&self, device: &mut D, tuning: Tuning) -> Result<(), EngineError> {
        let Self { run, shape, cut, query, step, pool, layer, out, space } = self;
        let (heads, width, latent) = (shape.heads, shape.head_dim, shape.value_dim);
        let rows = run.rows();
        if (query.width, out.width) != (shape.query_width(), shape.attended_width())
            || query.rows.min(out.rows) < rows.end
        {
            let what = format!("rows {rows:?} of {} to {}", query.width, out.width);
            return launch_mismatch(device, "latent_attention", what);
        }
        let whole = width.is_multiple_of(8) && latent.is_multiple_of(8);
        if !whole || width > MAX_WIDTH || latent > MAX_LATENT || !keeps(pool, width) {
            return launch_mismatch(device, "latent_attention", format!("{latent} of {width} elements"));
        }
        let (kind, grid, shared, least) = match *cut {
            LatentCut::Rows { splits, .. } => {
                let grid = [rows.len(), heads.div_ceil(SHARED_HEADS), splits];
                let shared = (STAGED_BYTES * width).max(4 * SHARED_HEADS * splits);
                ("", grid, shared, tuning.min_split)
            }
            LatentCut::Tiles { splits, .. } => {
                let shared = TILED_BYTES.max(4 * QUERIES * splits);
                let grid = [run.tiles().tiles(heads) * splits, 1, 1];
                ("tiled_", grid, shared, tuning.min_split.div_ceil(POSITIONS))
            }
        };
        let of_row = |address, bytes: usize| row_address(address, rows.start, bytes);
        device.launch(&KernelLaunch {
            kernel: format!("latent_attention_{kind}{}", pool.shape.dtype),
            grid: grid.map(word),
            threads: THREADS,
            shared_bytes: word(shared),
            arguments: vec![
                of_row(D::address(&query.memory), 4 * query.width),
                of_row(step.positions(), 4),
                row_address(step.last_rows(), run.sequences().start, 4),
                Address(step.tables()),
                of_row(step.starts(), 4),
                of_row(D::address(&out.memory), 4 * out.width),
                Address(space.partial),
                Address(space.statistics),
                Address(space.arrived),
                U64(pool.layer_bytes() as u64),
                size(*layer),
                size(heads),
                size(width),
                size(latent),
                size(pool.block_shift() as usize),
                size(cut.splits()),
                size(least),
                F32(shape.scale),
                size(rows.start),
                size(run.tiles().places()),
            ],
        })
    }
}
