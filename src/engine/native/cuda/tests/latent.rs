//! Attention over latents on the emulated device, and products with a matrix for each head, against sums in f64 over every cut and tiling; the operations around
//! them are compared with the oracle.

use std::path::Path;

use super::super::attention::{SequenceRun, SplitSpace};
use super::super::device::Device;
use super::super::device_matrix::{Matrix, floats};
use super::super::emulator::{Emulated, SMALL};
use super::super::kernels::{DeviceTensor, Tuning};
use super::super::latent::{DeviceRows, ExpandLatents, HeadProduct, LatentAttention, LatentCut};
use super::super::operations::{CudaOperations, narrow_into};
use super::super::step::{Pool, StepState};
use super::super::tensor_core_linear::{TiledWorkspace, prepared_bytes};
use super::emulation::words;
use crate::engine::EngineError;
use crate::engine::native::operations::{FusedLayout, LinearPart, Operation};
use crate::engine::native::oracle::Oracle;
use crate::engine::native::ragged_batch::Rows;
use crate::engine::native::random_kv;
use crate::engine::native::rope::RopeTables;
use crate::engine::native::shapes::{AttentionShape, LatentForm, LatentShape, PoolShape};
use crate::engine::native::testing::scenario::Script;
use crate::engine::native::testing::{
    Sample, Scenario, compare_operations, operations_alone, same_scenario, worst,
};
use crate::weights::{Packing, StoredMatrix};
use hbmark_core::model::{Dtype, parse_config};

type Tensor = DeviceTensor<Emulated>;
/// Rows on the host.
type Values = Vec<Vec<f32>>;

const LAYERS: usize = 2;
const LAYER: usize = 1;
/// Sums in f32, and what tensor cores take rounded.
const F32: f64 = 1e-5;
const ROUNDED: f64 = 8e-3;

fn noise(stream: usize, count: usize) -> Vec<f32> {
    let mut values = vec![0.0; count];
    random_kv::fill(5, stream, 0, false, &mut values);
    values
}

/// Streams of [`noise`].
const WEIGHTS: usize = 0;
const INPUT: usize = 1;
const CACHE: usize = 2;

fn narrow(value: f32, dtype: Dtype) -> f32 {
    match dtype {
        Dtype::F32 => value,
        Dtype::F16 => half::f16::from_f32(value).to_f32(),
        _ => half::bf16::from_f32(value).to_f32(),
    }
}

#[expect(clippy::cast_possible_truncation, reason = "as results are")]
fn narrowed(values: impl IntoIterator<Item = f64>) -> Vec<f32> {
    values.into_iter().map(|value| value as f32).collect()
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

fn values_of(matrix: &StoredMatrix) -> Vec<f32> {
    let mut values = vec![0.0; matrix.rows * matrix.columns];
    for (row, values) in values.chunks_exact_mut(matrix.columns).enumerate() {
        matrix.row(row, values);
    }
    values
}

fn product(matrix: &[f32], columns: usize, input: &[f32]) -> Vec<f32> {
    narrowed(matrix.chunks_exact(columns).map(|row| dot(row, input)))
}

/// A step over a cache of one vector for each position.
struct Steps {
    device: Emulated,
    rows: Rows,
    pool: Pool<Emulated>,
    step: StepState<Emulated>,
    shape: AttentionShape,
}

impl Steps {
    /// Sequences by the positions that are cached and that the step brings.
    fn new(
        seed: u64,
        shape: AttentionShape,
        dtype: Dtype,
        block_size: usize,
        lengths: &[(usize, usize)],
    ) -> Self {
        let mut device = Emulated::new(seed);
        device.multiprocessors = 100;
        let (head_dim, value_dim) = (shape.head_dim, 0);
        let mut pool = Pool::new(PoolShape {
            layers: LAYERS,
            kv_heads: 1,
            head_dim,
            value_dim,
            block_size,
            dtype,
            consecutive: false,
        });
        let mut rows = Rows::new(block_size);
        let mut blocks = 0;
        for &(cached, brings) in lengths {
            let count = u32::try_from((cached + brings).div_ceil(block_size)).unwrap();
            let table: Vec<u32> = (blocks..blocks + count).rev().collect();
            rows.push_with_outputs(&vec![0; brings], cached, &table, brings);
            blocks += count;
        }
        pool.reserve(&mut device, blocks as usize).unwrap();
        let mut ropes = RopeTables::new(&Sample::of_dtype(Dtype::F32, 0).architecture).unwrap();
        ropes.extend_to(200);
        let mut step = StepState::default();
        step.set(&mut device, &rows, &ropes, &pool).unwrap();
        Self { device, rows, pool, step, shape }
    }

    fn tensor(&mut self, width: usize, values: &[f32]) -> Tensor {
        let memory = floats(&mut self.device, values).unwrap();
        DeviceTensor { memory, rows: values.len() / width, width }
    }

    fn empty(&mut self, width: usize) -> Tensor {
        self.tensor(width, &vec![f32::NAN; self.rows.len() * width])
    }

    fn read(&mut self, tensor: &Tensor) -> Values {
        let values = words(&mut self.device, &tensor.memory, tensor.rows * tensor.width);
        let values: Vec<f32> = values.into_iter().map(f32::from_bits).collect();
        values.chunks_exact(tensor.width).map(<[f32]>::to_vec).collect()
    }

    fn matrix(&mut self, matrix: StoredMatrix, bias: Option<Vec<f32>>) -> Matrix<Emulated> {
        Matrix::new(&mut self.device, &[LinearPart { matrix, bias }], FusedLayout::Stacked).unwrap()
    }

    /// Room for so many rows of a product on tensor cores; it must live as long as its address.
    fn room(&mut self, weights: &Matrix<Emulated>, rows: usize) -> (Tensor, TiledWorkspace) {
        let room = self.tensor(1, &vec![f32::NAN; prepared_bytes(weights, rows) / 4]);
        let prepared = Emulated::address(&room.memory);
        (room, TiledWorkspace { prepared, ready: false, by_library: false, widened: 0 })
    }

    /// Memory and offset of a position of a sequence in the cache.
    fn place(&self, sequence: usize, position: usize) -> (u32, usize) {
        let PoolShape { block_size, .. } = self.pool.shape;
        let of_sequence = &self.rows.tables[self.rows.sequences[sequence].blocks.clone()];
        let vector = self.shape.head_dim * self.pool.shape.element_bytes();
        (of_sequence[position / block_size], position % block_size * vector)
    }

    /// Writes noise to all positions, and returns it as it is there: `[sequence][position]`.
    fn fill_cache(&mut self) -> Vec<Values> {
        let (width, dtype) = (self.shape.head_dim, self.pool.shape.dtype);
        let mut all = Vec::new();
        for sequence in 0..self.rows.sequences.len() {
            let positions = self.rows.sequences[sequence].positions_after();
            let values = noise(CACHE + sequence, positions * width);
            let mut own = Vec::new();
            for (position, vector) in values.chunks_exact(width).enumerate() {
                let mut bytes = Vec::new();
                narrow_into(vector, dtype, 0.0, &mut bytes);
                let (block, at) = self.place(sequence, position);
                let (memory, offset) = self.pool.place(block, LAYER);
                self.device.upload(memory, offset + at, &bytes).unwrap();
                own.push(vector.iter().map(|value| narrow(*value, dtype)).collect());
            }
            all.push(own);
        }
        all
    }

    /// Attention of all rows, launched as often as it says; how the first run of them was cut.
    fn attend(
        &mut self,
        query: &Tensor,
        tuning: Tuning,
        times: usize,
    ) -> Result<(LatentCut, Vec<Values>), EngineError> {
        let (shape, dtype, rows) = (self.shape, self.pool.shape.dtype, self.rows.clone());
        let cut_of = |run: SequenceRun<'_>| {
            LatentCut::new(&self.device, &run, shape.heads, dtype, run.longest(), tuning)
        };
        let runs = || SequenceRun::with_single_rows_apart(&rows);
        let cuts: Vec<LatentCut> = runs().map(cut_of).collect();
        let parts = runs().zip(&cuts).map(|(run, cut)| run.rows().len() * shape.heads * cut.splits());
        let words = runs().zip(&cuts).map(|(run, cut)| cut.words(&run));
        let (parts, words) = (parts.max().unwrap(), words.max().unwrap());
        let out = self.empty(shape.attended_width());
        let tensors = [
            self.tensor(1, &vec![f32::NAN; parts * shape.value_dim]),
            self.tensor(1, &vec![f32::NAN; 2 * parts]),
            self.tensor(1, &vec![0.0; words]),
        ];
        let [partial, statistics, arrived] =
            tensors.each_ref().map(|tensor| Emulated::address(&tensor.memory));
        let space = SplitSpace { partial, statistics, arrived };
        let mut results = Vec::new();
        for _ in 0..times {
            for (run, cut) in runs().zip(&cuts) {
                LatentAttention {
                    run: &run,
                    shape,
                    cut: *cut,
                    query,
                    step: &self.step,
                    pool: &self.pool,
                    layer: LAYER,
                    out: &out,
                    space,
                }
                .launch(&mut self.device, tuning)?;
            }
            results.push(self.read(&out));
        }
        Ok((cuts[0], results))
    }
}

fn shape(heads: usize, latent: usize, rope: usize) -> AttentionShape {
    AttentionShape {
        heads,
        kv_heads: 1,
        head_dim: latent + rope,
        value_dim: latent,
        norm_eps: 1e-6,
        joint_norms: false,
        rope: Some(0),
        scale: ((latent + rope) as f32).powf(-0.5),
        softcap: None,
    }
}

/// What each row sees of a cache, in f64; `sees` says which positions.
fn attended(
    steps: &Steps,
    query: &[Vec<f32>],
    cache: &[Values],
    sees: impl Fn(usize, usize) -> bool,
) -> Values {
    let AttentionShape { value_dim, scale, .. } = steps.shape;
    let of_row = |(row, query): (usize, &Vec<f32>)| {
        let own = steps.rows.positions[row] as usize;
        let vectors = &cache[steps.rows.owners[row] as usize];
        let keys: Vec<&Vec<f32>> =
            (0..vectors.len()).filter(|p| sees(*p, own)).map(|p| &vectors[p]).collect();
        let of_head = |query: &[f32]| {
            let scores: Vec<f64> = keys.iter().map(|k| f64::from(scale) * dot(query, k)).collect();
            let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
            let sum: f64 = weights.iter().sum();
            let value =
                |e: usize| weights.iter().zip(&keys).map(|(w, k)| w * f64::from(k[e])).sum::<f64>() / sum;
            narrowed((0..value_dim).map(value))
        };
        query.chunks_exact(steps.shape.head_dim).flat_map(of_head).collect()
    };
    query.iter().enumerate().map(of_row).collect()
}

/// Whether a row sees a position.
fn causal(position: usize, own: usize) -> bool {
    position <= own
}

/// Single rows only, and tensor cores only.
const SINGLE: Tuning = SMALL;
const TILED: Tuning = Tuning { min_prefill_rows: 0, ..SMALL };

struct Attended {
    steps: Steps,
    cut: LatentCut,
    query: Values,
    cache: Vec<Values>,
    /// Of each launch.
    found: Vec<Values>,
}

impl Attended {
    fn new(
        seed: u64,
        shape: AttentionShape,
        dtype: Dtype,
        block_size: usize,
        lengths: &[(usize, usize)],
        tuning: Tuning,
        times: usize,
    ) -> Result<Self, EngineError> {
        Self::of(Steps::new(seed, shape, dtype, block_size, lengths), tuning, times)
    }

    fn of(mut steps: Steps, tuning: Tuning, times: usize) -> Result<Self, EngineError> {
        let (shape, cache) = (steps.shape, steps.fill_cache());
        let width = shape.query_width();
        let query = steps.tensor(width, &noise(INPUT, steps.rows.len() * width));
        let (cut, found) = steps.attend(&query, tuning, times)?;
        let query = steps.read(&query);
        Ok(Self { steps, cut, query, cache, found })
    }

    fn error(&self, sees: impl Fn(usize, usize) -> bool) -> f64 {
        worst(&self.found[0], &attended(&self.steps, &self.query, &self.cache, sees))
    }
}

/// Heads, latent, rope; positions of a block; sequences.
type Case = (usize, usize, usize, usize, &'static [(usize, usize)]);
const CASES: [Case; 7] = [
    (1, 16, 8, 16, &[(0, 1), (37, 1)]),
    (3, 40, 8, 16, &[(40, 1), (130, 4), (0, 7)]),
    (16, 512, 64, 64, &[(149, 1), (20, 3)]),
    (20, 512, 64, 16, &[(70, 5), (3, 1)]),
    (3, 40, 8, 64, &[(0, 149)]),
    (20, 56, 8, 16, &[(100, 2), (149, 1)]),
    (1, 16, 64, 64, &[(127, 2), (0, 64), (15, 1)]),
];

fn tolerance(cut: LatentCut) -> f64 {
    if matches!(cut, LatentCut::Tiles { .. }) { ROUNDED } else { F32 }
}

#[test]
fn attention_over_latents_equals_sums_in_f64_however_it_is_cut() {
    let mut cuts = Vec::new();
    for (number, &(heads, latent, rope, block_size, lengths)) in (0..).zip(&CASES) {
        for dtype in [Dtype::Bf16, Dtype::F16, Dtype::F32] {
            for tuning in
                [SINGLE, TILED, Tuning { min_split: 4096, ..SINGLE }, Tuning { min_split: 4096, ..TILED }]
            {
                let shape = shape(heads, latent, rope);
                let case = Attended::new(number, shape, dtype, block_size, lengths, tuning, 3).unwrap();
                let error = case.error(causal);
                assert!(error <= tolerance(case.cut), "{error:.1e}, {shape:?}, {dtype}, {:?}", case.cut);
                // Splits are merged in one order, and words at which they meet are as before.
                assert!(case.found.iter().all(|found| *found == case.found[0]), "{shape:?}, {:?}", case.cut);
                cuts.push(case.cut);
            }
        }
    }
    let split = |cut: &LatentCut| cut.splits() > 1;
    let tiled = |cut: &LatentCut| matches!(cut, LatentCut::Tiles { .. });
    for (is_split, is_tiled) in [(false, false), (false, true), (true, false), (true, true)] {
        let count = cuts.iter().filter(|cut| (split(cut), tiled(cut)) == (is_split, is_tiled)).count();
        assert!(count >= 5, "{count} of split {is_split}, tiled {is_tiled}");
    }
}

#[test]
fn single_rows_beside_prompts_attend_to_latents_in_launches_of_their_own() {
    let lengths: &[(usize, usize)] = &[(60, 1), (149, 1), (130, 4), (20, 1), (0, 9), (100, 1)];
    for tuning in [SINGLE, TILED] {
        for dtype in [Dtype::Bf16, Dtype::F16] {
            let mut steps = Steps::new(3, shape(20, 56, 8), dtype, 16, lengths);
            // With logits of the last rows alone the step does not come again.
            steps.rows.outputs.truncate(lengths.len());
            let runs = SequenceRun::with_single_rows_apart(&steps.rows).map(|run| run.rows());
            assert_eq!(runs.collect::<Vec<_>>(), [0..2, 2..16, 16..17]);
            let case = Attended::of(steps, tuning, 3).unwrap();
            let error = case.error(causal);
            assert!(error <= tolerance(case.cut), "{error:.1e}, {dtype}, {:?}", case.cut);
            assert!(case.cut.splits() > 1 && case.found.iter().all(|found| *found == case.found[0]));
        }
    }
}

#[test]
fn a_position_too_many_or_too_few_would_be_noticed() {
    for tuning in [SINGLE, TILED] {
        let shape = shape(3, 40, 8);
        let lengths: &[(usize, usize)] = &[(60, 1), (130, 4), (0, 9)];
        let case = Attended::new(3, shape, Dtype::Bf16, 16, lengths, tuning, 1).unwrap();
        assert!(case.cut.splits() > 1);
        let allowed = tolerance(case.cut);
        assert!(case.error(causal) <= allowed);
        for (what, error) in [
            ("the rows behind", case.error(|_, _| true)),
            ("the next position", case.error(|position, own| position <= own + 1)),
            (
                "no first position",
                case.error(|position, own| causal(position, own) && (position > 0 || own == 0)),
            ),
            ("no own position", case.error(|position, own| position < own.max(1))),
            (
                "no second split",
                case.error(|position, own| causal(position, own) && !(32..64).contains(&position)),
            ),
        ] {
            assert!(error > 2.0 * allowed, "{what}: {error:.1e}, {:?}", case.cut);
        }
    }
}

#[test]
fn a_cut_counts_the_bytes_that_its_blocks_read() {
    let steps = Steps::new(1, shape(128, 512, 64), Dtype::Bf16, 64, &[(99, 1)]);
    let tuning = Tuning::default();
    let mut small = Emulated::new(1);
    small.shared_bytes = 99 << 10;
    let run = SequenceRun::whole(&steps.rows);
    let fallback = LatentCut::new(&small, &run, 128, Dtype::Bf16, 100, tuning);
    assert!(matches!(fallback, LatentCut::Rows { .. }), "tiles do not fit the shared memory");
    let cut = |dtype, heads| LatentCut::new(&steps.device, &run, heads, dtype, 100, tuning);
    // Heads that fill half a tile go to the tensor cores: 128 of them are two tiles, 16 share a load.
    assert!(matches!(cut(Dtype::Bf16, 128), LatentCut::Tiles { .. }));
    assert!(matches!(cut(Dtype::Bf16, 16), LatentCut::Rows { .. }));
    assert!(matches!(cut(Dtype::F32, 128), LatentCut::Rows { .. }));
    assert_eq!(cut(Dtype::Bf16, 128).bytes(&run, 1152), 2 * 100 * 1152);
    assert_eq!(cut(Dtype::F32, 128).bytes(&run, 2304), 8 * 100 * 2304);
    assert_eq!((cut(Dtype::Bf16, 128).words(&run), cut(Dtype::F32, 128).words(&run)), (2, 8));
}

/// A row as a product of a format meets it: rounded, and for 8-bit integers in groups with a scale each.
fn as_met(row: &[f32], packing: Packing, tiled: bool) -> Vec<f32> {
    match packing {
        Packing::F32 => row.to_vec(),
        Packing::F16 if !tiled => row.to_vec(),
        Packing::F16 => row.iter().map(|x| narrow(*x, Dtype::F16)).collect(),
        Packing::Int8 => row
            .chunks(32)
            .flat_map(|group| {
                let scale = group.iter().fold(0.0_f32, |most, x| most.max(x.abs())) / 127.0;
                group.iter().map(move |x| (x * scale.recip()).round_ties_even() * scale)
            })
            .collect(),
        _ => row.iter().map(|x| narrow(*x, Dtype::Bf16)).collect(),
    }
}

#[test]
fn products_with_a_matrix_for_each_head_equal_sums_in_f64() {
    let packings = [
        Packing::Bf16,
        Packing::F16,
        Packing::F32,
        Packing::Int8,
        Packing::Fp8 { block: None },
        Packing::Fp8 { block: Some([16, 16]) },
    ];
    for packing in packings {
        for (rows, heads, columns, outputs) in
            [(1, 3, 24, 48), (3, 5, 40, 16), (21, 1, 128, 80), (70, 2, 512, 32)]
        {
            for tiled in [false, true] {
                if tiled && packing == Packing::F32 {
                    continue;
                }
                let (in_apart, out_apart) = (columns + 8, outputs + 8);
                let shape = shape(heads, 16, 8);
                let mut steps = Steps::new(7, shape, Dtype::Bf16, 16, &[(0, rows)]);
                let values = noise(WEIGHTS, heads * outputs * columns);
                let matrix = StoredMatrix::from_f32_rows(heads * outputs, columns, &values, packing);
                let values = values_of(&matrix);
                let weights = steps.matrix(matrix, None);
                // Rows that go on behind the last head.
                let (in_width, out_width) = (heads * in_apart + 4, heads * out_apart + 4);
                let input = steps.tensor(in_width, &noise(INPUT, rows * in_width));
                let out = steps.empty(out_width);
                let (_room, workspace) = steps.room(&weights, rows * heads);
                HeadProduct {
                    rows,
                    heads,
                    weights: &weights,
                    input: DeviceRows::of(&input),
                    input_apart: in_apart,
                    out: &out,
                    out_apart,
                    workspace: tiled.then_some(workspace),
                }
                .launch(&mut steps.device, SMALL)
                .unwrap();
                let (mut found, mut wanted) = (Vec::new(), Vec::new());
                for (input, out) in steps.read(&input).iter().zip(steps.read(&out)) {
                    for head in 0..heads {
                        let met = as_met(&input[head * in_apart..][..columns], packing, tiled);
                        wanted.push(product(
                            &values[head * outputs * columns..][..outputs * columns],
                            columns,
                            &met,
                        ));
                        found.push(out[head * out_apart..][..outputs].to_vec());
                        assert!(out[head * out_apart..][outputs..out_apart].iter().all(|x| x.is_nan()));
                    }
                }
                let error = worst(&found, &wanted);
                assert!(error <= F32, "{error:.1e}: {packing:?}, {rows} rows, {heads} heads, tiled: {tiled}");
            }
        }
    }
}

#[test]
fn launches_that_do_not_fit_are_refused() {
    let mut steps = Steps::new(1, shape(3, 40, 8), Dtype::Bf16, 16, &[(0, 2)]);
    let narrow = steps.empty(7);
    let matrix = StoredMatrix::from_f32_rows(9, 24, &noise(WEIGHTS, 9 * 24), Packing::F32);
    let weights = steps.matrix(matrix, None);
    let product = |heads| HeadProduct {
        rows: 2,
        heads,
        weights: &weights,
        input: DeviceRows::of(&narrow),
        input_apart: 0,
        out: &narrow,
        out_apart: 0,
        workspace: None,
    };
    for heads in [1, 2, 3] {
        let refused = product(heads).launch(&mut steps.device, SMALL).unwrap_err().to_string();
        assert!(refused.contains("latent_product"), "{refused}");
    }
    // As wide as these, and of K and V.
    let other = PoolShape { value_dim: 48, ..steps.pool.shape };
    let (query, out) = (steps.empty(3 * 48), steps.empty(3 * 40));
    let attention = LatentAttention {
        run: &SequenceRun::whole(&steps.rows),
        shape: steps.shape,
        cut: LatentCut::Rows { heads: 3, splits: 1 },
        query: &query,
        step: &steps.step,
        pool: &Pool::new(other),
        layer: LAYER,
        out: &out,
        space: SplitSpace::default(),
    };
    assert!(attention.launch(&mut steps.device, SMALL).is_err());
    assert_eq!(steps.device.launches, 0);
}

/// Whether attention of a few rows is right under a seed, on CUDA cores or on tensor cores, split or not: for the test that takes barriers away.
pub fn attention_is_right(seed: u64, tiled: bool, split: bool) -> bool {
    let tuning = if tiled { TILED } else { SINGLE };
    let tuning = Tuning { min_split: if split { 32 } else { 4096 }, ..tuning };
    let case = Attended::new(seed, shape(3, 40, 8), Dtype::Bf16, 16, &[(130, 2)], tuning, 1);
    case.is_ok_and(|case| case.error(causal) <= tolerance(case.cut))
}

/// Attention as wide as `DeepSeek`'s, over latents wide enough that prompts meet keys and values of their own.
const WIDE_HEADS: &str = r#"{"model_type":"deepseek_v3","hidden_size":64,"num_hidden_layers":2,"num_attention_heads":3,"num_key_value_heads":3,
    "q_lora_rank":24,"kv_lora_rank":160,"qk_nope_head_dim":128,"qk_rope_head_dim":64,"v_head_dim":128,"intermediate_size":96,"vocab_size":199,
    "max_position_embeddings":256,"first_k_dense_replace":2,"n_routed_experts":4,"num_experts_per_tok":1,"moe_intermediate_size":32,
    "n_shared_experts":1,"n_group":1,"topk_group":1,"rms_norm_eps":1e-5,"rope_theta":10000.0,"hidden_act":"silu","tie_word_embeddings":false}"#;

#[test]
fn prompts_over_latents_are_expanded_to_heads_of_their_own() {
    // V narrower than K, and wider.
    let wider_values = WIDE_HEADS
        .replace("\"qk_nope_head_dim\":128", "\"qk_nope_head_dim\":64")
        .replace("\"qk_rope_head_dim\":64", "\"qk_rope_head_dim\":32");
    // A prompt of two tiles of queries beside the beginning of another; the rest of that; a few more tokens of the first, which meet latents; decode.
    let scripts = [vec![70, 0, 9, 1], vec![2, 60, 1, 1]].map(|brings| Script { cached: 0, brings });
    let tuning = Tuning { min_prefill_rows: 2, ..SMALL };
    let cases = [
        (WIDE_HEADS, Dtype::Bf16),
        (WIDE_HEADS, Dtype::F16),
        (WIDE_HEADS, Dtype::Int8),
        (&wider_values, Dtype::Bf16),
    ];
    for (seed, (config, dtype)) in (0..).zip(cases) {
        let architecture = parse_config(config, Path::new("written here")).unwrap();
        let kv_dtype = if dtype == Dtype::F16 { Dtype::F16 } else { Dtype::Bf16 };
        let sample = Sample { architecture, dtype, kv_dtype, seed };
        let scenario = Scenario::new(&scripts, 16, 199, seed);
        let operations = || CudaOperations::with_tuning(Emulated::new(seed), tuning);
        let forms: Vec<LatentForm> = scenario
            .steps
            .iter()
            .map(|rows| LatentShape::of(&sample.architecture, 0).unwrap().form(rows))
            .collect();
        let (expanded, absorbed) = (LatentForm::Expanded, LatentForm::Absorbed);
        assert_eq!(forms, [expanded, expanded, absorbed, absorbed]);

        let error = same_scenario(operations(), Oracle::new(), &sample, &scenario).unwrap();
        assert!(error <= 2e-2, "{dtype}: {error:.1e}");
        let found = operations_alone(&mut operations(), &sample, &scenario).unwrap();
        let wanted = operations_alone(&mut Oracle::new(), &sample, &scenario).unwrap();
        let errors = compare_operations(&found, &wanted);
        let expanded = errors.iter().find(|error| error.operation == Operation::LatentExpand);
        let expanded = expanded.expect("the device expands");
        assert!(expanded.worst <= ROUNDED && expanded.median > 0.0, "{dtype}: {expanded:?}");
    }
}

#[test]
fn what_has_no_kernel_or_no_room_is_not_expanded() {
    let architecture = parse_config(WIDE_HEADS, Path::new("written here")).unwrap();
    let shape = LatentShape::of(&architecture, 0).unwrap();
    let tuning = Tuning { min_prefill_rows: 2, ..SMALL };
    let mut device = Emulated::new(1);
    let mut matrix = |packing, rows| {
        let stored =
            StoredMatrix::from_f32_rows(rows, shape.kv_rank, &vec![0.0; rows * shape.kv_rank], packing);
        Matrix::new(&mut device, &[LinearPart { matrix: stored, bias: None }], FusedLayout::Stacked).unwrap()
    };
    let [bf16, f32] =
        [Packing::Bf16, Packing::F32].map(|packing| matrix(packing, shape.heads * shape.nope_dim));
    let prompt = |tokens: usize| {
        let mut rows = Rows::new(16);
        let table: Vec<u32> = (0..).take(tokens.div_ceil(16)).collect();
        rows.push(&vec![0; tokens], 0, &table);
        rows
    };
    let fits = |rows: &Rows, weights: &Matrix<Emulated>, shape: &LatentShape, dtype| {
        let pool = PoolShape::of(&architecture, 16, dtype);
        ExpandLatents::fits(rows, shape, [weights, weights], &pool, tuning)
    };
    assert!(fits(&prompt(64), &bf16, &shape, Dtype::Bf16));
    assert!(!fits(&prompt(64), &bf16, &shape, Dtype::F32), "a cache in f32");
    assert!(!fits(&prompt(64), &f32, &shape, Dtype::Bf16), "weights in f32");
    assert!(!fits(&prompt(1), &bf16, &shape, Dtype::Bf16), "one token");
    let wide = LatentShape { value_dim: 136, ..shape };
    assert!(!fits(&prompt(64), &bf16, &wide, Dtype::Bf16), "wider heads than there are kernels for");
    // 128 heads of 320 elements of 16 bits: 26,214 positions are 2 GiB.
    let large = LatentShape { heads: 128, ..shape };
    assert!(fits(&prompt(26_208), &bf16, &large, Dtype::Bf16));
    assert!(!fits(&prompt(26_224), &bf16, &large, Dtype::Bf16));
}
