//! Each operation, and whole ragged steps, on the emulated device against the oracle, over random models of odd shapes.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::rc::Rc;

use hbmark_emulated_kernels::Barrier;

use super::super::device::Device;
use super::super::emulator::{Emulated, SMALL};
use super::super::kernels::Tuning;
use super::super::operations::{CudaOperations, narrow_into};
use super::latent;
use crate::engine::DeviceChoice;
use crate::engine::native::cpu::CpuOperations;
use crate::engine::native::operations::{Embedding, FusedLayout, LinearPart, Operation, Operations, Storage};
use crate::engine::native::oracle::Oracle;
use crate::engine::native::ragged_batch::Rows;
use crate::engine::native::rope::RopeTables;
use crate::engine::native::shapes::PoolShape;
use crate::engine::native::testing::sample::STREAMED;
use crate::engine::native::testing::scenario::{Script, ragged};
use crate::engine::native::testing::{
    OperationError, Sample, Scenario, operation_errors, operation_tolerance, same_scenario, step_tolerance,
    worst,
};
use crate::engine::native::{check_device, kv_dtype, random_kv};
use crate::weights::{Packing, StoredData, StoredMatrix};
use hbmark_core::model::Dtype;

/// A sample that the kernels run, K and V as its weights say, or in one byte an element.
fn runnable(nth: u64, draw: impl FnOnce(Dtype) -> Sample) -> Option<Sample> {
    let dtype = STREAMED[usize::try_from(nth).unwrap() % STREAMED.len()];
    let sample = draw(dtype).with_cache(nth);
    check_device(&sample.architecture, dtype, DeviceChoice::Cuda(0)).is_ok().then_some(sample)
}

fn sample(seed: u64) -> Option<Sample> {
    runnable(seed, |dtype| Sample::of_dtype(dtype, seed))
}

/// Nine seeds in a row have all dtypes, each with another of seven families than the nine before.
fn mixture(seed: u64) -> Option<Sample> {
    runnable(seed, |dtype| Sample::mixture(Some(dtype), seed))
}

/// The same of every second seed, with the layers of other families.
fn varied(seed: u64) -> Option<Sample> {
    runnable(seed / 2, |dtype| Sample::varied(Some(dtype), seed)).filter(|_| seed.is_multiple_of(2))
}

pub(super) fn emulated(seed: u64, tuning: Tuning) -> CudaOperations<Emulated> {
    CudaOperations::with_tuning(Emulated::new(seed), tuning)
}

fn scenario_of(sample: &Sample, scripts: &[Script]) -> Scenario {
    Scenario::new(scripts, 16, sample.architecture.vocab_size, sample.seed)
}

/// Some of the sequences, for what is emulated twice.
fn few(scripts: &[Script]) -> &[Script] {
    &scripts[..scripts.len().min(3)]
}

/// Tensor cores take rows rounded to f16; the oracle, as the streaming product, takes them as they are.
const F16_ROWS_TOLERANCE: f64 = 3e-3;

#[test]
fn every_operation_equals_the_oracle() {
    let samples: Vec<Sample> = (0..12).filter_map(sample).chain((0..16).filter_map(varied)).collect();
    assert!(samples.len() >= 16);
    every_operation_equals(samples);
}

#[test]
fn every_operation_of_a_mixture_equals_the_oracle() {
    let samples: Vec<Sample> = (0..18).filter_map(mixture).collect();
    assert!(samples.len() >= 12);
    every_operation_equals(samples);
}

pub(super) fn every_operation_equals(samples: Vec<Sample>) {
    for sample in samples {
        let scenario = scenario_of(&sample, &ragged(sample.seed));
        let errors_with = |tuning: Tuning| {
            let mut device = emulated(sample.seed, tuning);
            operation_errors(&mut device, &mut Oracle::new(), &sample, &scenario).unwrap()
        };
        let mut tuning = SMALL;
        if sample.dtype == Dtype::F16 {
            for error in errors_with(tuning) {
                let mut allowed = F16_ROWS_TOLERANCE;
                if error.operation == Operation::NormQkv && sample.kv_dtype != Dtype::F16 {
                    allowed = operation_tolerance(error.operation, &sample);
                }
                assert!(error.worst <= allowed, "{error:?}, {}", sample.label());
            }
            tuning.min_tiled_rows = usize::MAX;
        }
        for error in errors_with(tuning) {
            assert!(error.passed(&sample), "{error:?}, {}", sample.label());
        }
    }
}

#[test]
fn whole_steps_equal_the_oracle_under_every_schedule() {
    let drawn =
        (30..38).filter_map(sample).chain((30..42).filter_map(varied)).chain((40..48).filter_map(mixture));
    for sample in drawn {
        let scenario = scenario_of(&sample, &ragged(sample.seed));
        let error = same_scenario(emulated(sample.seed, SMALL), Oracle::new(), &sample, &scenario).unwrap();
        assert!(error <= step_tolerance(&sample), "{error:.1e} off, {}", sample.label());
    }
}

/// Rounding queries and weights of a softmax to bf16 or f16 is an error of half a step in each of many terms.
const PREFILL_TOLERANCE: f64 = 8e-3;

#[test]
fn attention_on_tensor_cores_equals_attention_over_single_rows() {
    let fits = |s: &Sample| s.architecture.head_dim <= 128 && s.dtype != Dtype::F32;
    let samples = (0..40).filter_map(sample).filter(fits).take(7);
    let mut compared = 0;
    for sample in samples.chain((0..40).filter_map(varied).filter(fits).take(7)) {
        let scenario = scenario_of(&sample, few(&ragged(sample.seed)));
        let mut tiled = emulated(sample.seed, Tuning { min_prefill_rows: 1, ..SMALL });
        let mut single = emulated(sample.seed, SMALL);
        let errors = operation_errors(&mut tiled, &mut single, &sample, &scenario).unwrap();
        for error in errors.into_iter().filter(|error| error.operation == Operation::Attention) {
            assert!(error.worst <= PREFILL_TOLERANCE, "{error:?}, {}", sample.label());
            compared += 1;
        }
    }
    assert!(compared >= 14, "{compared}");
}

/// A decode step of others beside prompts, between them and behind them: each in launches of its own, or all of them in one.
#[test]
fn attention_of_single_rows_beside_prompts_equals_attention_over_single_rows() {
    let lengths: [(usize, usize); 7] = [(130, 1), (40, 1), (0, 70), (33, 1), (64, 9), (127, 1), (0, 1)];
    let scripts = lengths.map(|(cached, brings)| Script { cached, brings: vec![brings] });
    let cases = [
        (Dtype::Bf16, Dtype::Bf16, 16, 1),
        (Dtype::Bf16, Dtype::Bf16, 16, 2),
        (Dtype::F16, Dtype::F16, 1024, 2),
        (Dtype::Bf16, Dtype::Int8, 16, 2),
    ];
    for (seed, (dtype, cache, min_split, min_prefill_rows)) in (0..).zip(cases) {
        let mut sample = Sample::of_dtype(dtype, 2);
        (sample.kv_dtype, sample.architecture.head_dim) = (cache, 64);
        let scenario = scenario_of(&sample, &scripts);
        let tuning = Tuning { min_split, min_prefill_rows, ..SMALL };
        let (mut tiled, mut single) = (emulated(seed, tuning), emulated(seed, SMALL));
        tiled.device_mut().multiprocessors = 100;
        let errors = operation_errors(&mut tiled, &mut single, &sample, &scenario).unwrap();
        let attention = errors.iter().find(|error| error.operation == Operation::Attention).unwrap();
        assert!(attention.worst <= PREFILL_TOLERANCE, "{attention:?}, {cache}, {tuning:?}");
    }
}

#[test]
fn products_on_tensor_cores_equal_the_oracle_at_every_tiling() {
    let tolerances = [
        (Dtype::Bf16, 1e-5),
        (Dtype::F16, 1e-3),
        (Dtype::Int8, 1e-5),
        (Dtype::Fp8, 1e-5),
        (Dtype::Mxfp8, 1e-5),
        (Dtype::Mxfp4, 1e-5),
        (Dtype::Nvfp4, 1e-5),
        (Dtype::Int4, 1e-5),
    ];
    for (dtype, tolerance) in tolerances {
        for rows in [1, 5, 16, 17, 33, 65, 130] {
            let tuning = Tuning { min_tiled_rows: 1, ..SMALL };
            let error = off(&mut emulated(7, tuning), dtype, rows, 700);
            assert!(error <= tolerance, "{rows} rows of {dtype}: {error:.1e}");
        }
    }
}

#[test]
fn products_on_tensor_cores_fit_a_device_with_little_shared_memory() {
    for dtype in [Dtype::Int8, Dtype::Fp8, Dtype::Mxfp8, Dtype::Mxfp4, Dtype::Nvfp4, Dtype::Int4] {
        let mut device = Emulated::new(7);
        device.shared_bytes = 99 << 10;
        let mut device = CudaOperations::with_tuning(device, Tuning { min_tiled_rows: 1, ..SMALL });
        let error = off(&mut device, dtype, 130, 700);
        assert!(error <= 1e-5, "{dtype}: {error:.1e}");
    }
}

#[test]
fn products_of_the_library_equal_the_oracle() {
    for (dtype, tolerance) in [(Dtype::Bf16, 1e-5), (Dtype::F16, 1e-3)] {
        for rows in [1, 7, 70] {
            let tuning = Tuning { min_tiled_rows: 1, min_library_rows: 1, ..SMALL };
            let error = off(&mut emulated(7, tuning), dtype, rows, 700);
            assert!(error <= tolerance, "{rows} rows of {dtype}: {error:.1e}");
        }
    }
}

#[test]
fn operations_around_products_of_the_library_equal_those_with_kernels_of_our_own() {
    let has = |s: &Sample| matches!(s.dtype, Dtype::Bf16 | Dtype::F16);
    let samples = (0..40).filter_map(sample).filter(has).take(8);
    let mut compared = 0;
    for sample in samples.chain((0..40).filter_map(varied).filter(has).take(6)) {
        let scenario = scenario_of(&sample, few(&ragged(sample.seed)));
        let ours = Tuning { min_tiled_rows: 1, ..SMALL };
        let mut library = emulated(sample.seed, Tuning { min_library_rows: 1, ..ours });
        let errors = operation_errors(&mut library, &mut emulated(sample.seed, ours), &sample, &scenario);
        // Their sums are added up in another order; K and V are rounded behind them.
        for error in errors.unwrap() {
            assert!(
                error.worst <= operation_tolerance(error.operation, &sample).max(1e-5),
                "{error:?}, {}",
                sample.label()
            );
            compared += 1;
        }
    }
    assert!(compared >= 8, "{compared}");
}

#[test]
fn int4_in_groups_of_every_size_with_every_zero_equals_the_oracle() {
    for group in [32, 64, 128, 256, 512, 1024] {
        let mut matrix =
            StoredMatrix::from_f32_rows(OUTPUTS, 700, &noise(0, OUTPUTS * 700), Packing::Int4 { group });
        let StoredData::Int4 { zeros, .. } = &mut matrix.data else { panic!("{matrix:?}") };
        for (zero, published) in zeros.iter_mut().zip((0..=16u8).cycle()) {
            *zero = half::f16::from(published);
        }
        for (rows, min_tiled_rows) in [(1, usize::MAX), (3, usize::MAX), (5, 1), (40, 1)] {
            let tuning = Tuning { min_tiled_rows, ..SMALL };
            let error = off_by(&mut emulated(7, tuning), Dtype::Int4, &matrix, rows);
            assert!(error <= 1e-5, "{rows} rows, groups of {group}: {error:.1e}");
        }
    }
}

#[test]
fn fp8_in_blocks_of_every_size_equals_the_oracle() {
    for block in [[16, 16], [32, 32], [16, 64], [128, 128], [16, 512], [64, 1024]] {
        let packing = Packing::Fp8 { block: Some(block) };
        // Neighbouring blocks have scales of their own.
        let mut values = noise(0, OUTPUTS * 700);
        for (index, value) in values.iter_mut().enumerate() {
            *value *= 1.0 + (index / 700 / block[0] + index % 700 / block[1]) as f32;
        }
        let matrix = StoredMatrix::from_f32_rows(OUTPUTS, 700, &values, packing);
        for (rows, min_tiled_rows) in [(1, usize::MAX), (3, usize::MAX), (5, 1), (40, 1)] {
            let tuning = Tuning { min_tiled_rows, ..SMALL };
            let error = off_by(&mut emulated(7, tuning), Dtype::Fp8, &matrix, rows);
            assert!(error <= 1e-5, "{rows} rows, blocks of {block:?}: {error:.1e}");
            let error = off_by(&mut CpuOperations::new(1).unwrap(), Dtype::Fp8, &matrix, rows);
            assert!(error <= 1e-5, "{rows} rows on the CPU, blocks of {block:?}: {error:.1e}");
        }
    }
}

#[test]
fn groups_and_blocks_that_no_kernel_has_are_refused_by_their_size() {
    for (packing, said) in [
        (Packing::Int4 { group: 96 }, "int4 in groups of 96"),
        (Packing::Fp8 { block: Some([16, 48]) }, "fp8 in groups of 48"),
        (Packing::Fp8 { block: Some([4, 128]) }, "differ within 16 outputs"),
    ] {
        let matrix = StoredMatrix::from_f32_rows(OUTPUTS, 704, &noise(0, OUTPUTS * 704), packing);
        let part = LinearPart { matrix, bias: None };
        let refused = emulated(7, SMALL).linear(vec![part], FusedLayout::Stacked).unwrap_err().to_string();
        assert!(refused.contains(said), "{refused}");
    }
}

pub(super) const OUTPUTS: usize = 37;

pub(super) fn noise(stream: usize, count: usize) -> Vec<f32> {
    let mut values = vec![0.0; count];
    random_kv::fill(3, stream, 0, false, &mut values);
    values
}

/// `hidden += W · input + b` of so many columns, with inputs made of noise.
pub(super) fn projection<O: Operations>(
    operations: &mut O,
    dtype: Dtype,
    rows: usize,
    columns: usize,
) -> Vec<Vec<f32>> {
    let packing = Packing::of(dtype, 32).unwrap();
    let matrix = StoredMatrix::from_f32_rows(OUTPUTS, columns, &noise(0, OUTPUTS * columns), packing);
    projection_by(operations, dtype, &matrix, rows)
}

pub(super) fn projection_by<O: Operations>(
    operations: &mut O,
    dtype: Dtype,
    matrix: &StoredMatrix,
    rows: usize,
) -> Vec<Vec<f32>> {
    let (matrix, columns) = (matrix.clone(), matrix.columns);
    let sample = Sample::of_dtype(dtype, 0);
    let shape = PoolShape {
        layers: 1,
        kv_heads: 1,
        head_dim: 16,
        value_dim: 16,
        block_size: 16,
        dtype: kv_dtype(dtype),
        consecutive: false,
    };
    let ropes = RopeTables::new(&sample.architecture).unwrap();
    let mut pool = operations.pool(shape).unwrap();
    operations.reserve(&mut pool, rows).unwrap();
    let mut step = Rows::new(16);
    for row in (0..).take(rows) {
        step.push(&[row], 0, &[row]);
    }
    let weights = operations
        .linear(vec![LinearPart { matrix, bias: Some(noise(1, OUTPUTS)) }], FusedLayout::Stacked)
        .unwrap();
    operations.begin(&step, &ropes, &pool).unwrap();
    let mut filled = |stream: usize, width: usize| {
        let values = noise(stream, rows * width);
        let table = StoredMatrix::from_f32_rows(rows, width, &values, Packing::F32);
        let table = operations.table(table).unwrap();
        let mut buffer = operations.buffer(rows, width).unwrap();
        operations.embed(&step, Embedding::Table(&table), 1.0, &mut buffer).unwrap();
        buffer
    };
    let (input, mut hidden) = (filled(2, columns), filled(3, OUTPUTS));
    operations.project_add(&step, &weights, None, &input, &mut hidden).unwrap();
    operations.read(&hidden, rows).unwrap()
}

/// How far a projection is from the oracle's.
fn off<O: Operations>(operations: &mut O, dtype: Dtype, rows: usize, columns: usize) -> f64 {
    let wanted = projection(&mut Oracle::new(), dtype, rows, columns);
    worst(&projection(operations, dtype, rows, columns), &wanted)
}

/// The same with a matrix that is given.
fn off_by<O: Operations>(operations: &mut O, dtype: Dtype, matrix: &StoredMatrix, rows: usize) -> f64 {
    let wanted = projection_by(&mut Oracle::new(), dtype, matrix, rows);
    worst(&projection_by(operations, dtype, matrix, rows), &wanted)
}

/// Rows wider than the shared memory of [`SMALL`].
fn wide_error(seed: u64, dtype: Dtype, rows: usize) -> f64 {
    off(&mut emulated(seed, SMALL), dtype, rows, 4_500)
}

#[test]
fn rows_wider_than_shared_memory_are_multiplied_in_chunks() {
    for dtype in STREAMED {
        for rows in [1, 2, 3, 4] {
            let error = wide_error(7, dtype, rows);
            assert!(error <= 1e-5, "{rows} rows of {dtype}: {error:.1e}");
        }
    }
}

/// A barrier of the sources, by its file and line.
fn barriers_of_the_sources() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for entry in std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels")).unwrap() {
        let path = entry.unwrap().path();
        if !path.is_file() {
            continue;
        }
        let text = std::fs::read_to_string(&path).unwrap();
        for (line, _) in text.lines().enumerate().filter(|(_, line)| line.contains("__syncthreads()")) {
            found.insert(format!("{}:{}", path.file_name().unwrap().display(), line + 1));
        }
    }
    found
}

/// What is wrong with each operation in a few steps as cheap as can be, on a model that has every kind of layer.
fn small_errors(
    seed: u64,
    sample: &Sample,
    tuning: Tuning,
    lengths: &[(usize, usize)],
) -> Option<Vec<OperationError>> {
    let script = |&(cached, brings): &(usize, usize)| Script { cached, brings: vec![brings] };
    let scripts: Vec<Script> = lengths.iter().map(script).collect();
    let mut device = Emulated::new(seed);
    device.multiprocessors = 100;
    let mut device = CudaOperations::with_tuning(device, tuning);
    operation_errors(&mut device, &mut Oracle::new(), sample, &scenario_of(sample, &scripts)).ok()
}

/// A way to use the kernels: whether all is right with it under a seed.
type Right = Box<dyn Fn(u64) -> bool>;

fn ways_to_use_the_kernels() -> Vec<Right> {
    let of_cache =
        |dtype: Dtype, cache: Dtype, tuning: Tuning, lengths: &'static [(usize, usize)]| -> Right {
            let mut sample = Sample::of_dtype(dtype, 2);
            sample.kv_dtype = cache;
            sample.architecture.qk_norm = true;
            sample.architecture.windows.clear();
            // Heads that more than one warp stores.
            sample.architecture.head_dim = 128;
            // Rows that more than one warp takes to shared memory, and whose last tile lies where the sums go.
            sample.architecture.hidden_size = 440;
            if let [_] = lengths {
                sample.architecture.kv_heads = 1;
            }
            Box::new(move |seed| {
                let errors = small_errors(seed, &sample, tuning, lengths);
                errors.is_some_and(|errors| {
                    errors.iter().all(|error| {
                        let on_tensor_cores =
                            error.operation == Operation::Attention && tuning.min_prefill_rows == 1;
                        let allowed = operation_tolerance(error.operation, &sample);
                        error.worst <= if on_tensor_cores { PREFILL_TOLERANCE } else { allowed }
                    })
                })
            })
        };
    let small = |dtype: Dtype, tuning: Tuning, lengths: &'static [(usize, usize)]| {
        of_cache(dtype, kv_dtype(dtype), tuning, lengths)
    };
    let little = Tuning { input_bytes: 64, ..SMALL };
    let ragged: &[(usize, usize)] = &[(40, 1), (130, 4)];
    vec![
        Box::new(|seed| wide_error(seed, Dtype::Bf16, 2) <= 1e-5),
        small(Dtype::F32, little, ragged),
        small(Dtype::Int8, little, ragged),
        small(Dtype::Bf16, little, ragged),
        small(Dtype::Bf16, Tuning { min_prefill_rows: 1, min_tiled_rows: 1, ..little }, ragged),
        // Without splits a block passes over more tiles of positions than it has room for.
        small(Dtype::Bf16, Tuning { min_prefill_rows: 1, min_split: 1024, ..little }, ragged),
        // One row and one head of K and V: blocks that run together are splits that are merged.
        small(Dtype::Bf16, Tuning { min_prefill_rows: 1, min_tiled_rows: 1, ..little }, &[(230, 1)]),
        small(Dtype::F32, little, &[(130, 1)]),
        // Tiles that are widened.
        of_cache(Dtype::Bf16, Dtype::Int8, Tuning { min_prefill_rows: 1, ..little }, ragged),
        Box::new(|seed| latent::attention_is_right(seed, false, false)),
        Box::new(|seed| latent::attention_is_right(seed, true, false)),
        Box::new(|seed| latent::attention_is_right(seed, true, true)),
    ]
}

/// The same of experts. Without a barrier they follow places that nobody wrote: the process ends there, and no test notices.
fn ways_to_use_experts() -> Vec<Right> {
    let experts = |tuning: Tuning| -> Right {
        let mut sample = Sample::mixture(Some(Dtype::Bf16), 2);
        sample.kv_dtype = Dtype::Bf16;
        sample.architecture.layers = 1;
        sample.architecture.head_dim = 16;
        Box::new(move |seed| {
            let errors = small_errors(seed, &sample, tuning, &[(3, 1), (0, 9)]);
            let mixture = [Operation::Router, Operation::ExpertGateUp, Operation::ExpertDown];
            errors.is_some_and(|errors| {
                let mut own = errors.iter().filter(|error| mixture.contains(&error.operation));
                own.all(|error| error.worst <= operation_tolerance(error.operation, &sample).max(1e-5))
            })
        })
    };
    vec![experts(Tuning { min_tiled_rows: usize::MAX, ..SMALL }), experts(SMALL)]
}

#[test]
fn without_any_one_of_its_barriers_an_operation_is_wrong() {
    // Each barrier with the ways that meet it; the last are the quickest to notice.
    let mut barriers: BTreeMap<Barrier, Vec<Rc<Right>>> = BTreeMap::new();
    for way in ways_to_use_the_kernels().into_iter().map(Rc::new) {
        assert!(way(1));
        for barrier in Barrier::met() {
            barriers.entry(barrier).or_default().push(Rc::clone(&way));
        }
    }
    // All that were met so far are told: theirs come last.
    for way in ways_to_use_experts() {
        assert!(way(1));
        for barrier in Barrier::met() {
            barriers.entry(barrier).or_default();
        }
    }
    // So are those of ranks, which other host threads would have to notice.
    super::ranks::launch_every_kernel();
    for barrier in Barrier::met() {
        barriers.entry(barrier).or_default();
    }
    let met: BTreeSet<String> = barriers.keys().map(Barrier::to_string).collect();
    assert_eq!(met, barriers_of_the_sources(), "a barrier that no test meets");
    let unnoticed: Vec<String> = barriers
        .into_iter()
        .filter(|(_, ways)| !ways.is_empty())
        .filter(|(barrier, ways)| {
            (1..20).all(|seed| ways.iter().rev().all(|way| barrier.without(|| way(seed))))
        })
        .map(|(barrier, _)| barrier.to_string())
        .collect();
    assert!(unnoticed.is_empty(), "nothing is wrong without the barriers at {unnoticed:?}");
}

#[test]
fn a_device_fills_k_and_v_as_the_host_does_to_the_bit() {
    let dtypes = [Dtype::Bf16, Dtype::F16, Dtype::F32, Dtype::Fp8, Dtype::Int8];
    for (dtype, seed) in dtypes.into_iter().zip([3, u64::MAX - 5, 1 << 40, 7, 8]) {
        // A block of threads draws 8,192 elements.
        for (kv_heads, head_dim) in [(3, 40), (5, 160)] {
            let shape = PoolShape {
                layers: 3,
                kv_heads,
                head_dim,
                value_dim: head_dim,
                block_size: 16,
                dtype,
                consecutive: false,
            };
            let mut device = emulated(seed, SMALL);
            let mut pool = device.pool(shape).unwrap();
            device.reserve(&mut pool, 6).unwrap();
            device.fill_blocks(&mut pool, &[4, 0], seed).unwrap();
            for (number, block) in [4, 0].into_iter().enumerate() {
                for layer in 0..shape.layers {
                    let mut wanted = Vec::new();
                    for values in [false, true] {
                        let mut elements = vec![0.0; shape.block_parts()[0]];
                        random_kv::fill(seed, layer, number, values, &mut elements);
                        narrow_into(&elements, dtype, random_kv::int8_scale(), &mut wanted);
                    }
                    if dtype == Dtype::Int8 {
                        let scales = random_kv::int8_scale().to_le_bytes().repeat(2 * kv_heads * 16);
                        wanted.extend(scales);
                    }
                    let (memory, offset) = pool.place(block, layer);
                    let mut found = vec![0; wanted.len()];
                    device.device_mut().download(memory, offset, &mut found).unwrap();
                    assert!(found == wanted, "{dtype}, heads of {head_dim}, block {block}, layer {layer}");
                }
            }
        }
    }
}
