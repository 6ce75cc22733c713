//! Every operation of the native engine by itself, on a CPU, over the shape of one layer.
//!
//! Every call uses other weights (or another part of the KV cache), rotating over copies that together are three times the last cache,
//! because in a step nothing of a layer is still cached when it runs. The throughput is the
//! bytes the operation counted itself.
//!
//! `HBMARK_MODEL` names the shape, `HBMARK_BATCH` the rows, `HBMARK_CONTEXT` the positions attended to, `HBMARK_DTYPE` the formats. The blocks of 256
//! of `q4_k`, `q5_k` and `q6_k` want a shape whose rows they divide, as Qwen3-0.6B's.

#![expect(clippy::unwrap_used, reason = "a bench that cannot go on panics")]

use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput};

use hbmark::engine::native::operations::{
    AttentionWeights, Embedding, FusedLayout, LinearPart, Operation, Operations, Storage,
};
use hbmark::engine::native::{
    AttentionShape, CpuOperations, DEFAULT_BLOCK_SIZE, Gate, PoolShape, RopeTables, Rows, kv_dtype, random_kv,
};
use hbmark::machine::environment::last_cache;
use hbmark::run::config::parse_axis;
use hbmark::weights::{self, Packing, StoredMatrix};
use hbmark_core::model::{Architecture, Dtype};

/// All copies together are at least this many times the last cache.
const CACHE_FACTOR: u64 = 3;

type Linear = <CpuOperations as Storage>::Linear;
type Buffer = <CpuOperations as Storage>::Buffer;
type Pool = <CpuOperations as Storage>::Pool;

fn variable(key: &str, default: &str) -> String {
    std::env::var(key).ok().filter(|v| !v.is_empty()).unwrap_or_else(|| default.to_owned())
}

/// Whether rows of all matrices are whole blocks of a dtype.
fn has_whole_blocks(architecture: &Architecture, dtype: Dtype) -> bool {
    let uneven = architecture.inventory(dtype);
    let uneven = uneven.rows_that_blocks_do_not_divide();
    if let Some(tensor) = uneven {
        eprintln!(
            "{dtype} left out: {} has rows of {:?}, no whole blocks of 256",
            tensor.name,
            tensor.shape.last()
        );
    }
    uneven.is_none()
}

/// Random weights of one part; copies are the same values at different places.
fn part(rows: usize, columns: usize, packing: Packing) -> LinearPart {
    let mut values = vec![0.0; rows * columns];
    random_kv::fill(1, rows, 0, false, &mut values);
    for value in &mut values {
        *value *= 0.02;
    }
    LinearPart { matrix: StoredMatrix::from_f32_rows(rows, columns, &values, packing), bias: None }
}

/// One layer's shape, and the other arguments of the operations.
struct Layer {
    operations: CpuOperations,
    architecture: Architecture,
    shape: AttentionShape,
    packing: Packing,
    dtype: Dtype,
    rows: Rows,
    ropes: RopeTables,
    hidden: Buffer,
    query: Buffer,
    inner: Buffer,
    logits: Buffer,
}

impl Layer {
    /// Rows of sequences at `context`, in blocks from `first_block` on.
    fn new(architecture: &Architecture, dtype: Dtype, batch: usize, context: usize) -> Self {
        let a = architecture;
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let mut operations = CpuOperations::new(threads).unwrap();
        let shape = AttentionShape::of(a, 0);
        let mut ropes = RopeTables::new(a).unwrap();
        ropes.extend_to(context + 1);
        let rows = rows_at(batch, context, 0);
        let hidden = operations.buffer(batch, a.hidden_size).unwrap();
        let query = operations.buffer(batch, shape.query_width()).unwrap();
        let inner = operations.buffer(batch, a.ffn_size).unwrap();
        let logits = operations.buffer(batch, a.vocab_size).unwrap();
        let packing = Packing::of(dtype, a.int4_group()).unwrap();
        Self {
            operations,
            architecture: a.clone(),
            shape,
            packing,
            dtype,
            rows,
            ropes,
            hidden,
            query,
            inner,
            logits,
        }
    }

    /// As many copies of a fused layer as make up the working set.
    fn copies(&mut self, parts: &[[usize; 2]], layout: FusedLayout) -> Vec<Linear> {
        let bytes: u64 = parts.iter().map(|[r, c]| part(*r, *c, self.packing).matrix.bytes().0).sum();
        (0..copies_of(bytes))
            .map(|_| {
                let parts = parts.iter().map(|[rows, columns]| part(*rows, *columns, self.packing)).collect();
                self.operations.linear(parts, layout).unwrap()
            })
            .collect()
    }

    fn pool(&mut self, blocks: usize) -> Pool {
        let a = &self.architecture;
        let shape = PoolShape {
            layers: 1,
            kv_heads: a.kv_heads,
            head_dim: a.head_dim,
            value_dim: a.head_dim,
            block_size: DEFAULT_BLOCK_SIZE,
            dtype: kv_dtype(self.dtype),
            consecutive: false,
        };
        let mut pool = self.operations.pool(shape).unwrap();
        self.operations.reserve(&mut pool, blocks).unwrap();
        let all: Vec<u32> = (0..u32::try_from(blocks).unwrap()).collect();
        self.operations.fill_blocks(&mut pool, &all, 1).unwrap();
        pool
    }
}

fn rows_at(batch: usize, context: usize, first_block: usize) -> Rows {
    let mut rows = Rows::new(DEFAULT_BLOCK_SIZE);
    let blocks = (context + 1).div_ceil(DEFAULT_BLOCK_SIZE);
    for sequence in 0..batch {
        let first = first_block + sequence * blocks;
        let table: Vec<u32> = (first..first + blocks).map(|b| u32::try_from(b).unwrap()).collect();
        rows.push(&[1], context, &table);
    }
    rows
}

/// Copies of so many bytes that together are beyond the last cache.
fn copies_of(bytes: u64) -> usize {
    let cache = last_cache().map_or(32 << 20, |cache| cache.0);
    usize::try_from((CACHE_FACTOR * cache).div_ceil(bytes.max(1)).max(2)).unwrap()
}

/// Times a call over rotating copies; the bytes are those it counted the first time.
fn time(
    criterion: &mut Criterion,
    operation: Operation,
    name: &str,
    layer: &mut Layer,
    copies: usize,
    mut call: impl FnMut(&mut Layer, usize),
) {
    layer.operations.take_bytes_moved();
    call(layer, 0);
    let bytes = layer.operations.take_bytes_moved();
    let mut group = criterion.benchmark_group(operation.name());
    group.throughput(Throughput::Bytes(bytes.0));
    let mut next = 0;
    group.bench_function(BenchmarkId::from_parameter(name), |bencher| {
        bencher.iter(|| {
            next = (next + 1) % copies;
            call(layer, next);
        });
    });
    group.finish();
}

fn linear_operations(criterion: &mut Criterion, name: &str, layer: &mut Layer) {
    let a = layer.architecture.clone();
    let (query, kv) = (layer.shape.query_width(), layer.shape.kv_width());
    let norm = vec![1.0; a.hidden_size];

    let qkv = [[query, a.hidden_size], [kv, a.hidden_size], [kv, a.hidden_size]];
    let weights: Vec<_> = layer
        .copies(&qkv, FusedLayout::Stacked)
        .into_iter()
        .map(|qkv| AttentionWeights { norm: Some(norm.clone()), qkv, head_norms: None })
        .collect();
    let mut pool = layer.pool(layer.rows.tables.len());
    time(criterion, Operation::NormQkv, name, layer, weights.len(), |l, i| {
        let (shape, weights) = (l.shape, &weights[i]);
        l.operations
            .norm_qkv(&l.rows, &shape, weights, &l.ropes, 0, &l.hidden, &mut pool, &mut l.query)
            .unwrap();
    });

    let output = layer.copies(&[[a.hidden_size, query]], FusedLayout::Stacked);
    time(criterion, Operation::Output, name, layer, output.len(), |l, i| {
        l.operations.project_add(&l.rows, &output[i], None, &l.query, &mut l.hidden).unwrap();
    });

    let gate_up = layer.copies(&[[a.ffn_size, a.hidden_size]; 2], FusedLayout::Interleaved);
    time(criterion, Operation::GateUp, name, layer, gate_up.len(), |l, i| {
        let norm = Some((&norm, l.shape.norm_eps));
        l.operations.norm_gate_up(&l.rows, norm, Gate::Silu, &gate_up[i], &l.hidden, &mut l.inner).unwrap();
    });

    let down = layer.copies(&[[a.hidden_size, a.ffn_size]], FusedLayout::Stacked);
    time(criterion, Operation::Down, name, layer, down.len(), |l, i| {
        l.operations.project_add(&l.rows, &down[i], None, &l.inner, &mut l.hidden).unwrap();
    });

    let head = layer.copies(&[[a.vocab_size, a.hidden_size]], FusedLayout::Stacked);
    time(criterion, Operation::Embed, name, layer, head.len(), |l, i| {
        l.operations.embed(&l.rows, Embedding::Head(&head[i]), 1.0, &mut l.hidden).unwrap();
    });
    let mut next = Vec::new();
    time(criterion, Operation::Head, name, layer, head.len(), |l, i| {
        let eps = l.shape.norm_eps;
        l.operations.head(&l.rows, &norm, eps, &head[i], None, &l.hidden, &mut l.logits, &mut next).unwrap();
    });
}

fn attention(criterion: &mut Criterion, name: &str, layer: &mut Layer, batch: usize, context: usize) {
    let blocks = layer.rows.tables.len();
    let kv_bytes = 2 * blocks * DEFAULT_BLOCK_SIZE * layer.shape.kv_width() * 2;
    let copies = copies_of(kv_bytes as u64);
    let pool = layer.pool(copies * blocks);
    let stretches: Vec<Rows> = (0..copies).map(|copy| rows_at(batch, context, copy * blocks)).collect();
    let mut out = layer.operations.buffer(batch, layer.shape.query_width()).unwrap();
    time(criterion, Operation::Attention, name, layer, copies, |l, i| {
        let shape = l.shape;
        l.operations.attention(&stretches[i], &shape, None, None, 0, &l.query, &pool, &mut out).unwrap();
    });
}

fn main() {
    let mut criterion = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1))
        .without_plots()
        .configure_from_args();
    let model = weights::open(&variable("HBMARK_MODEL", "SmolLM2-135M"), None, 42).unwrap();
    let batches = parse_axis("batch", &variable("HBMARK_BATCH", "1,8")).unwrap();
    let contexts = parse_axis("context", &variable("HBMARK_CONTEXT", "1024")).unwrap();
    let formats = variable("HBMARK_DTYPE", "bf16,q8_0,q6_k,q5_k,q4_k,q4_0");
    for format in formats.split(',') {
        let dtype = <Dtype as clap::ValueEnum>::from_str(format.trim(), true).unwrap();
        if !has_whole_blocks(&model.architecture, dtype) {
            continue;
        }
        for &batch in &batches {
            for &context in &contexts {
                let mut layer = Layer::new(&model.architecture, dtype, batch, context);
                let name = format!("{dtype}/b{batch}/c{context}");
                linear_operations(&mut criterion, &name, &mut layer);
                attention(&mut criterion, &name, &mut layer, batch, context);
            }
        }
    }
    criterion.final_summary();
}
