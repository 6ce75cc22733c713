//! Attention over latents on the emulated device: each kernel against sums in f64, and a layer against multi-head attention as it is published.

use super::super::device::Device;
use super::super::device_matrix::{Matrix, floats};
use super::super::emulator::Emulated;
use super::super::kernels::{DeviceTensor, Tuning};
use super::super::latent::{
    FinishLatent, HeadProduct, LatentAttention, LatentCache, LatentCut, LatentDown, LatentShape, TurnQueries,
};
use super::super::operations::narrow_into;
use super::super::step::{Pool, StepState};
use super::super::tensor_core_linear::{TiledWorkspace, prepared_bytes};
use super::SMALL;
use crate::engine::native::operations::{FusedLayout, LinearPart, PoolShape};
use crate::engine::native::ragged_batch::Rows;
use crate::engine::native::random_kv;
use crate::engine::native::rope::RopeTables;
use crate::engine::native::testing::{Sample, worst};
use crate::weights::{Packing, StoredMatrix};
use hbmark_core::model::Dtype;

type Tensor = DeviceTensor<Emulated>;

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
const NORM: usize = 2;
const BIAS: usize = 3;
const QUERY_NORM: usize = 4;
const CACHE: usize = 5;

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

fn normed(values: &[f32], norm: &[f32], eps: f32) -> Vec<f32> {
    let factor = (dot(values, values) / values.len() as f64 + f64::from(eps)).sqrt().recip();
    narrowed(values.iter().zip(norm).map(|(x, g)| f64::from(*x) * factor * f64::from(*g)))
}

/// A step over a cache of one vector for each position.
struct Steps {
    device: Emulated,
    rows: Rows,
    ropes: RopeTables,
    pool: Pool<Emulated>,
    step: StepState<Emulated>,
    shape: LatentShape,
}

impl Steps {
    /// Sequences by the positions that are cached and that the step brings.
    fn new(
        seed: u64,
        shape: LatentShape,
        dtype: Dtype,
        block_size: usize,
        lengths: &[(usize, usize)],
    ) -> Self {
        let mut device = Emulated::new(seed);
        device.multiprocessors = 100;
        // One vector is as large as K and V of half its width.
        let pool_shape =
            PoolShape { layers: LAYERS, kv_heads: 1, head_dim: shape.width() / 2, block_size, dtype };
        let mut pool = Pool::new(pool_shape);
        let mut rows = Rows::new(block_size);
        let mut blocks = 0;
        for &(cached, brings) in lengths {
            let count = u32::try_from((cached + brings).div_ceil(block_size)).unwrap();
            let table: Vec<u32> = (blocks..blocks + count).rev().collect();
            rows.push_with_outputs(&vec![0; brings], cached, &table, brings);
            blocks += count;
        }
        pool.reserve(&mut device, blocks as usize).unwrap();
        let mut architecture = Sample::of_dtype(Dtype::F32, 0).architecture;
        architecture.head_dim = shape.rope;
        let mut ropes = RopeTables::new(&architecture).unwrap();
        ropes.extend_to(200);
        let mut step = StepState::default();
        step.set(&mut device, &rows, &ropes, &pool).unwrap();
        Self { device, rows, ropes, pool, step, shape }
    }

    fn cache(&self) -> LatentCache {
        LatentCache {
            dtype: self.pool.shape.dtype,
            layer_bytes: self.pool.layer_bytes() as u64,
            layer: LAYER,
            block_shift: self.pool.block_shift(),
        }
    }

    fn tensor(&mut self, width: usize, values: &[f32]) -> Tensor {
        let memory = floats(&mut self.device, values).unwrap();
        DeviceTensor { memory, rows: values.len() / width, width }
    }

    fn empty(&mut self, width: usize) -> Tensor {
        self.tensor(width, &vec![f32::NAN; self.rows.len() * width])
    }

    fn read(&mut self, tensor: &Tensor) -> Vec<Vec<f32>> {
        let mut bytes = vec![0; 4 * tensor.rows * tensor.width];
        self.device.download(&tensor.memory, 0, &mut bytes).unwrap();
        let values: Vec<f32> = bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        values.chunks_exact(tensor.width).map(<[f32]>::to_vec).collect()
    }

    fn matrix(&mut self, matrix: StoredMatrix, bias: Option<Vec<f32>>) -> Matrix<Emulated> {
        Matrix::new(&mut self.device, &[LinearPart { matrix, bias }], FusedLayout::Stacked).unwrap()
    }

    /// Room for so many rows of a product on tensor cores; it must live as long as its address.
    fn room(&mut self, weights: &Matrix<Emulated>, rows: usize) -> (Tensor, TiledWorkspace) {
        let room = self.tensor(1, &vec![f32::NAN; prepared_bytes(weights, rows) / 4]);
        let prepared = Emulated::address(&room.memory);
        (room, TiledWorkspace { prepared, ready: false, by_library: false })
    }

    /// Memory and offset of a position of a sequence in the cache.
    fn place(&self, sequence: usize, position: usize) -> (u32, usize) {
        let PoolShape { block_size, .. } = self.pool.shape;
        let of_sequence = &self.rows.tables[self.rows.sequences[sequence].blocks.clone()];
        let vector = self.shape.width() * self.pool.shape.element_bytes();
        (of_sequence[position / block_size], position % block_size * vector)
    }

    /// Writes noise to all positions, and returns it as it is there: `[sequence][position]`.
    fn fill_cache(&mut self) -> Vec<Vec<Vec<f32>>> {
        let (width, dtype) = (self.shape.width(), self.pool.shape.dtype);
        let mut all = Vec::new();
        for sequence in 0..self.rows.sequences.len() {
            let positions = self.rows.sequences[sequence].positions_after();
            let values = noise(CACHE + sequence, positions * width);
            let mut own = Vec::new();
            for (position, vector) in values.chunks_exact(width).enumerate() {
                let mut bytes = Vec::new();
                narrow_into(vector, dtype, &mut bytes);
                let (block, at) = self.place(sequence, position);
                let (memory, offset) = self.pool.place(block, LAYER);
                self.device.upload(memory, offset + at, &bytes).unwrap();
                own.push(vector.iter().map(|value| narrow(*value, dtype)).collect());
            }
            all.push(own);
        }
        all
    }

    /// What is in the cache of a row's own position.
    fn cached(&mut self, row: usize) -> Vec<f32> {
        let dtype = self.pool.shape.dtype;
        let (block, at) = self.place(self.rows.owners[row] as usize, self.rows.positions[row] as usize);
        let mut bytes = vec![0; self.shape.width() * self.pool.shape.element_bytes()];
        let (memory, offset) = self.pool.place(block, LAYER);
        self.device.download(memory, offset + at, &mut bytes).unwrap();
        let half = |bytes: &[u8; 2]| match dtype {
            Dtype::F16 => half::f16::from_le_bytes(*bytes).to_f32(),
            _ => half::bf16::from_le_bytes(*bytes).to_f32(),
        };
        match dtype {
            Dtype::F32 => bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect(),
            _ => bytes.as_chunks().0.iter().map(half).collect(),
        }
    }

    /// A rotary part at a row's position.
    fn turned(&self, row: usize, values: &[f32]) -> Vec<f32> {
        let (cosines, sines) = self.ropes.at(Some(0), self.rows.positions[row] as usize).unwrap();
        let half = values.len() / 2;
        let pair = |i: usize| {
            let [a, b, c, s] = [values[i], values[i + half], cosines[i], sines[i]].map(f64::from);
            (a * c - b * s, b * c + a * s)
        };
        narrowed((0..half).map(|i| pair(i).0).chain((0..half).map(|i| pair(i).1)))
    }

    /// Attention of all rows, launched as often as it says.
    fn attend(&mut self, query: &Tensor, tuning: Tuning, times: usize) -> (LatentCut, Vec<Vec<Vec<f32>>>) {
        let (shape, dtype) = (self.shape, self.pool.shape.dtype);
        let longest = self.rows.positions.iter().max().map_or(0, |position| *position as usize + 1);
        let cut = LatentCut::new(&self.device, &self.rows, &shape, dtype, longest, tuning);
        let parts = self.rows.len() * shape.heads * cut.splits();
        let out = self.empty(shape.heads * shape.latent);
        let partial = self.tensor(1, &vec![f32::NAN; parts * shape.latent]);
        let statistics = self.tensor(1, &vec![f32::NAN; 2 * parts]);
        let arrived = self.tensor(1, &vec![0.0; cut.words(&self.rows)]);
        let mut results = Vec::new();
        for _ in 0..times {
            LatentAttention {
                rows: &self.rows,
                shape,
                cut,
                query,
                step: &self.step,
                cache: self.cache(),
                out: &out,
                partial: Emulated::address(&partial.memory),
                statistics: Emulated::address(&statistics.memory),
                arrived: Emulated::address(&arrived.memory),
            }
            .launch(&mut self.device, tuning)
            .unwrap();
            results.push(self.read(&out));
        }
        (cut, results)
    }
}

fn shape(heads: usize, latent: usize, rope: usize) -> LatentShape {
    LatentShape {
        heads,
        plain: 24,
        rope,
        latent,
        query_rank: None,
        norm_eps: 1e-6,
        angles: Some(0),
        scale: ((latent + rope) as f32).powf(-0.5),
    }
}

/// What each row sees of a cache, in f64; `sees` says which positions.
fn attended(
    steps: &Steps,
    query: &[Vec<f32>],
    cache: &[Vec<Vec<f32>>],
    sees: impl Fn(usize, usize) -> bool,
) -> Vec<Vec<f32>> {
    let LatentShape { latent, scale, .. } = steps.shape;
    let of_row = |(row, query): (usize, &Vec<f32>)| {
        let own = steps.rows.positions[row] as usize;
        let vectors = &cache[steps.rows.owners[row] as usize];
        let seen: Vec<&Vec<f32>> =
            (0..vectors.len()).filter(|p| sees(*p, own)).map(|p| &vectors[p]).collect();
        let of_head = |query: &[f32]| {
            let scores: Vec<f64> = seen.iter().map(|k| f64::from(scale) * dot(query, k)).collect();
            let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
            let sum: f64 = weights.iter().sum();
            let value =
                |e: usize| weights.iter().zip(&seen).map(|(w, k)| w * f64::from(k[e])).sum::<f64>() / sum;
            narrowed((0..latent).map(value))
        };
        query.chunks_exact(steps.shape.width()).flat_map(of_head).collect()
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
    query: Vec<Vec<f32>>,
    cache: Vec<Vec<Vec<f32>>>,
    /// Of each launch.
    found: Vec<Vec<Vec<f32>>>,
}

impl Attended {
    fn new(
        seed: u64,
        shape: LatentShape,
        dtype: Dtype,
        block_size: usize,
        lengths: &[(usize, usize)],
        tuning: Tuning,
        times: usize,
    ) -> Self {
        let mut steps = Steps::new(seed, shape, dtype, block_size, lengths);
        let cache = steps.fill_cache();
        let width = shape.heads * shape.width();
        let query = steps.tensor(width, &noise(INPUT, steps.rows.len() * width));
        let (cut, found) = steps.attend(&query, tuning, times);
        let query = steps.read(&query);
        Self { steps, cut, query, cache, found }
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
                let case = Attended::new(number, shape, dtype, block_size, lengths, tuning, 3);
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
fn a_position_too_many_or_too_few_would_be_noticed() {
    for tuning in [SINGLE, TILED] {
        let shape = shape(3, 40, 8);
        let lengths: &[(usize, usize)] = &[(60, 1), (130, 4), (0, 9)];
        let case = Attended::new(3, shape, Dtype::Bf16, 16, lengths, tuning, 1);
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
    let shape = LatentShape { heads: 128, ..shape(128, 512, 64) };
    let steps = Steps::new(1, shape, Dtype::Bf16, 64, &[(99, 1)]);
    let tuning = Tuning::default();
    let cut = |dtype, heads| {
        LatentCut::new(&steps.device, &steps.rows, &LatentShape { heads, ..shape }, dtype, 100, tuning)
    };
    // Heads that fill half a tile go to the tensor cores: 128 of them are two tiles, 16 share a load.
    assert!(matches!(cut(Dtype::Bf16, 128), LatentCut::Tiles { .. }));
    assert!(matches!(cut(Dtype::Bf16, 16), LatentCut::Rows { .. }));
    assert!(matches!(cut(Dtype::F32, 128), LatentCut::Rows { .. }));
    assert_eq!(cut(Dtype::Bf16, 128).bytes(&steps.rows, 1152), 2 * 100 * 1152);
    assert_eq!(cut(Dtype::F32, 128).bytes(&steps.rows, 2304), 8 * 100 * 2304);
    assert_eq!((cut(Dtype::Bf16, 128).words(&steps.rows), cut(Dtype::F32, 128).words(&steps.rows)), (2, 8));
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
                    input: &input,
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
fn a_fused_projection_leaves_its_sums_as_they_are() {
    for packing in [Packing::Bf16, Packing::F32, Packing::Int8, Packing::Mxfp4] {
        for (rows, tiled) in [(1, false), (7, false), (7, true)] {
            if tiled && packing == Packing::F32 {
                continue;
            }
            for with_norm in [false, true] {
                let (columns, outputs) = (72, 46);
                let mut steps = Steps::new(7, shape(1, 16, 8), Dtype::Bf16, 16, &[(0, rows)]);
                let values = noise(WEIGHTS, outputs * columns);
                let matrix = StoredMatrix::from_f32_rows(outputs, columns, &values, packing);
                let (values, bias, norm) = (values_of(&matrix), noise(BIAS, outputs), noise(NORM, columns));
                let weights = steps.matrix(matrix, Some(bias.clone()));
                let input = steps.tensor(columns, &noise(INPUT, rows * columns));
                let norm_tensor = steps.tensor(columns, &norm);
                let sums = steps.empty(outputs);
                let (_room, workspace) = steps.room(&weights, rows);
                LatentDown {
                    rows,
                    input: &input,
                    norm: with_norm.then_some((&norm_tensor, 1e-6)),
                    weights: &weights,
                    sums: &sums,
                    workspace: tiled.then_some(workspace),
                }
                .launch(&mut steps.device, SMALL)
                .unwrap();
                let packing = if packing == Packing::Mxfp4 { Packing::Int8 } else { packing };
                let inputs = steps.read(&input);
                let wanted = inputs.iter().map(|row| {
                    let row = if with_norm { normed(row, &norm, 1e-6) } else { row.clone() };
                    let sums = product(&values, columns, &as_met(&row, packing, tiled));
                    sums.iter().zip(&bias).map(|(sum, bias)| sum + bias).collect()
                });
                let error = worst(&steps.read(&sums), &wanted.collect::<Vec<_>>());
                // A norm that differs in its last place can round an input the other way.
                let allowed = if with_norm && packing != Packing::F32 { ROUNDED } else { F32 };
                assert!(error <= allowed, "{error:.1e}: {packing:?}, {rows} rows, tiled: {tiled}");
            }
        }
    }
}

#[test]
fn a_position_goes_to_the_cache_normed_and_turned() {
    let lengths: &[(usize, usize)] = &[(0, 1), (37, 5), (120, 2)];
    for (dtype, allowed) in [(Dtype::F32, F32), (Dtype::F16, 1e-3), (Dtype::Bf16, 4e-3)] {
        for (latent, rope, rank) in [(40, 8, None), (512, 64, Some(1536)), (16, 64, Some(20))] {
            let shape = LatentShape { query_rank: rank, ..shape(2, latent, rope) };
            let mut steps = Steps::new(5, shape, dtype, 16, lengths);
            let part = shape.query_part();
            let width = part + shape.width();
            let sums = steps.tensor(width, &noise(INPUT, steps.rows.len() * width));
            let (norm, query_norm) = (noise(NORM, latent), noise(QUERY_NORM, part));
            let latent_norm = steps.tensor(latent, &norm);
            let query = (steps.tensor(part, &query_norm), steps.empty(part));
            FinishLatent {
                rows: steps.rows.len(),
                shape,
                sums: &sums,
                latent_norm: &latent_norm,
                query: rank.map(|_| (&query.0, &query.1)),
                step: &steps.step,
                cache: steps.cache(),
            }
            .launch(&mut steps.device)
            .unwrap();
            let all = steps.read(&sums);
            let mut wanted = Vec::new();
            for (row, sums) in all.iter().enumerate() {
                let mut vector = normed(&sums[part..part + latent], &norm, shape.norm_eps);
                vector.extend(steps.turned(row, &sums[part + latent..]));
                wanted.push(vector);
            }
            let found: Vec<Vec<f32>> = (0..all.len()).map(|row| steps.cached(row)).collect();
            let error = worst(&found, &wanted);
            assert!(error <= allowed, "{error:.1e}: {dtype}, {shape:?}");
            let queries: Vec<Vec<f32>> =
                all.iter().map(|sums| normed(&sums[..part], &query_norm, shape.norm_eps)).collect();
            let found = steps.read(&query.1);
            if rank.is_some() {
                let error = worst(&found, &queries);
                assert!(error <= F32, "{error:.1e}: queries of {shape:?}");
            } else {
                assert!(found.iter().flatten().all(|x| x.is_nan()), "no norm, and something was written");
            }
        }
    }
}

/// A layer in f32, as the engine will launch it, and what multi-head attention over keys and values of each head makes of the same hidden states.
fn layer(seed: u64, rank: Option<usize>, tuning: Tuning) -> (Vec<Vec<f32>>, Vec<Vec<f32>>) {
    let (hidden, value) = (56, 12);
    let shape = LatentShape { query_rank: rank, ..shape(3, 40, 8) };
    let LatentShape { heads, plain, rope, latent, scale, .. } = shape;
    // The whole of each sequence at once, so that keys and values can be made of it.
    let mut steps = Steps::new(seed, shape, Dtype::F32, 16, &[(0, 50), (0, 1), (0, 33)]);
    let rows = steps.rows.len();
    let part = shape.query_part();
    let width = part + shape.width();
    let f32s = |stream: usize, rows: usize, columns: usize| {
        let values = noise(stream, rows * columns);
        let scaled = values.iter().map(|x| x * (columns as f32).powf(-0.5)).collect::<Vec<_>>();
        (StoredMatrix::from_f32_rows(rows, columns, &scaled, Packing::F32), scaled)
    };
    let (down, down_values) = f32s(10, width, hidden);
    let (up, up_values) = f32s(11, shape.query_width(), rank.unwrap_or(1));
    // Of a head: [latent, plain] and [value, latent].
    let (keys, key_values) = f32s(12, heads * latent, plain);
    let (values, value_values) = f32s(13, heads * value, latent);
    let norms = [hidden, latent, part].map(|width| noise(14 + width, width));
    let [norm, latent_norm, query_norm] = &norms;
    let [down, up, keys, values] = [down, up, keys, values].map(|matrix| steps.matrix(matrix, None));
    let input = steps.tensor(hidden, &noise(INPUT, rows * hidden));
    let norm_tensors =
        [steps.tensor(hidden, norm), steps.tensor(latent, latent_norm), steps.tensor(part, query_norm)];
    let sums = steps.empty(width);
    let (normed_query, projected) = (steps.empty(part), steps.empty(shape.query_width()));
    let (query, out) = (steps.empty(heads * shape.width()), steps.empty(heads * value));

    let device = &mut steps.device;
    let norm_of_hidden = Some((&norm_tensors[0], shape.norm_eps));
    LatentDown { rows, input: &input, norm: norm_of_hidden, weights: &down, sums: &sums, workspace: None }
        .launch(device, tuning)
        .unwrap();
    let to_query = rank.map(|_| (&norm_tensors[2], &normed_query));
    let cache = LatentCache {
        dtype: Dtype::F32,
        layer_bytes: steps.pool.layer_bytes() as u64,
        layer: LAYER,
        block_shift: steps.pool.block_shift(),
    };
    FinishLatent {
        rows,
        shape,
        sums: &sums,
        latent_norm: &norm_tensors[1],
        query: to_query,
        step: &steps.step,
        cache,
    }
    .launch(device)
    .unwrap();
    if rank.is_some() {
        LatentDown {
            rows,
            input: &normed_query,
            norm: None,
            weights: &up,
            sums: &projected,
            workspace: None,
        }
        .launch(device, tuning)
        .unwrap();
    }
    let queries = if rank.is_some() { &projected } else { &sums };
    HeadProduct {
        rows,
        heads,
        weights: &keys,
        input: queries,
        input_apart: plain + rope,
        out: &query,
        out_apart: shape.width(),
        workspace: None,
    }
    .launch(device, tuning)
    .unwrap();
    TurnQueries { rows, shape, queries, step: &steps.step, out: &query }.launch(device).unwrap();
    let (_, attended) = steps.attend(&query, tuning, 1);
    let attended = steps.tensor(heads * latent, &attended[0].concat());
    HeadProduct {
        rows,
        heads,
        weights: &values,
        input: &attended,
        input_apart: latent,
        out: &out,
        out_apart: value,
        workspace: None,
    }
    .launch(&mut steps.device, tuning)
    .unwrap();
    let found = steps.read(&out);

    // Keys and values of each head, by each row.
    let mut of_rows = Vec::new();
    for (row, hidden_state) in steps.read(&input).iter().enumerate() {
        let sums = product(&down_values, hidden, &normed(hidden_state, norm, shape.norm_eps));
        let compressed = normed(&sums[part..part + latent], latent_norm, shape.norm_eps);
        let key_rope = steps.turned(row, &sums[part + latent..]);
        let queries = match rank {
            Some(rank) => product(&up_values, rank, &normed(&sums[..part], query_norm, shape.norm_eps)),
            None => sums[..part].to_vec(),
        };
        let of_heads: Vec<_> = (0..heads)
            .map(|head| {
                let query = &queries[head * (plain + rope)..][..plain + rope];
                let mut query_whole = query[..plain].to_vec();
                query_whole.extend(steps.turned(row, &query[plain..]));
                let matrix = &key_values[head * latent * plain..][..latent * plain];
                let term = |c: usize, p: usize| f64::from(matrix[c * plain + p]) * f64::from(compressed[c]);
                let mut key = narrowed((0..plain).map(|p| (0..latent).map(|c| term(c, p)).sum()));
                key.extend(&key_rope);
                let matrix = &value_values[head * value * latent..][..value * latent];
                (query_whole, key, product(matrix, latent, &compressed))
            })
            .collect();
        of_rows.push(of_heads);
    }
    let mut wanted = Vec::new();
    for (row, of_heads) in of_rows.iter().enumerate() {
        let first = steps.rows.sequences[steps.rows.owners[row] as usize].rows.start;
        let of_head = |head: usize| {
            let scores: Vec<f64> = (first..=row)
                .map(|p| f64::from(scale) * dot(&of_heads[head].0, &of_rows[p][head].1))
                .collect();
            let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = scores.iter().map(|score| (score - most).exp()).sum();
            let at = |e: usize| {
                let parts = scores.iter().zip(first..);
                parts.map(|(score, p)| (score - most).exp() * f64::from(of_rows[p][head].2[e])).sum::<f64>()
                    / sum
            };
            narrowed((0..value).map(at))
        };
        wanted.push((0..heads).flat_map(of_head).collect());
    }
    (found, wanted)
}

#[test]
fn a_layer_equals_multi_head_attention_over_keys_and_values_of_each_head() {
    for rank in [None, Some(20)] {
        let (found, wanted) = layer(11, rank, SMALL);
        let error = worst(&found, &wanted);
        assert!(error <= F32, "{error:.1e}, rank {rank:?}");
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
        input: &narrow,
        input_apart: 0,
        out: &narrow,
        out_apart: 0,
        workspace: None,
    };
    for heads in [1, 2, 3] {
        let refused = product(heads).launch(&mut steps.device, SMALL).unwrap_err().to_string();
        assert!(refused.contains("latent_product"), "{refused}");
    }
    let down =
        LatentDown { rows: 2, input: &narrow, norm: None, weights: &weights, sums: &narrow, workspace: None };
    assert!(down.launch(&mut steps.device, SMALL).is_err());
    let turn = TurnQueries { rows: 2, shape: steps.shape, queries: &narrow, step: &steps.step, out: &narrow };
    assert!(turn.launch(&mut steps.device).is_err());
    let other = LatentCache { layer_bytes: 1, ..steps.cache() };
    let (query, out) = (steps.empty(3 * 48), steps.empty(3 * 40));
    let attention = LatentAttention {
        rows: &steps.rows,
        shape: steps.shape,
        cut: LatentCut::Rows { heads: 3, splits: 1 },
        query: &query,
        step: &steps.step,
        cache: other,
        out: &out,
        partial: 0,
        statistics: 0,
        arrived: 0,
    };
    assert!(attention.launch(&mut steps.device, SMALL).is_err());
    assert_eq!(steps.device.launches, 0);
}

/// Whether attention of a few rows is right under a seed, on CUDA cores or on tensor cores, split or not: for the test that takes barriers away.
pub fn attention_is_right(seed: u64, tiled: bool, split: bool) -> bool {
    let tuning = if tiled { TILED } else { SINGLE };
    let tuning = Tuning { min_split: if split { 32 } else { 4096 }, ..tuning };
    let case = Attended::new(seed, shape(3, 40, 8), Dtype::Bf16, 16, &[(130, 2)], tuning, 1);
    case.error(causal) <= tolerance(case.cut)
}
