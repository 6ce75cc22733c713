//! Adapters against merged weights, against the oracle, and mixed against one at a time.

use crate::engine::native::cpu::CpuOperations;
use crate::engine::native::operations::Operations;
use crate::engine::native::oracle::Oracle;
use crate::engine::native::ragged_batch::Rows;
use crate::engine::native::reorders_heads;
use crate::engine::native::testing::{Runner, Sample, Scenario, scenario, step_tolerance, worst};
use crate::weights::{Adapter, Packing, StoredMatrix, StoredTensor};
use hbmark_core::model::{Dtype, Target};

/// Five sequences that all bring something to both steps: prompts, chunks behind a cache, decodes.
fn steps(sample: &Sample) -> Scenario {
    let script = |cached, brings: [usize; 2]| scenario::Script { cached, brings: brings.to_vec() };
    let scripts =
        [script(0, [17, 1]), script(5, [1, 1]), script(0, [33, 1]), script(16, [1, 5]), script(0, [3, 1])];
    Scenario::new(&scripts, 16, sample.architecture.vocab_size, sample.seed)
}

/// Ranks that are not a multiple of a panel, a whole one and more, and targets of some layers.
fn adapters(sample: &Sample) -> [Adapter; 3] {
    let of = |rank, targets: &[Target], seed| {
        let mut adapter = Adapter::synthetic(&sample.architecture, "x", rank, targets, seed);
        adapter.scale = 2.0;
        adapter
    };
    [
        of(4, &Target::ALL, 1),
        of(16, &[Target::QProj, Target::VProj], 2),
        of(20, &[Target::KProj, Target::UpProj, Target::DownProj], 3),
    ]
}

/// Adapters of the five sequences: two of one, one of each other, one without.
const MIXED: [Option<usize>; 5] = [Some(0), Some(2), None, Some(0), Some(1)];

fn with(rows: &Rows, adapters: &[Option<usize>]) -> Rows {
    let mut rows = rows.clone();
    rows.set_adapters(adapters.iter().copied());
    rows
}

fn runner<O: Operations>(operations: O, sample: &Sample, scenario: &Scenario) -> Runner<O> {
    let mut runner = Runner::new(operations, sample, scenario).unwrap();
    for (number, adapter) in adapters(sample).iter().enumerate() {
        assert_eq!(runner.take_adapter(sample, adapter).unwrap(), number);
    }
    runner
}

fn cpu() -> CpuOperations {
    CpuOperations::new(3).unwrap()
}

/// The tensors of a sample with an adapter added to them.
fn merged(sample: &Sample, adapter: &Adapter) -> Vec<(String, StoredTensor)> {
    let place = |name: &str| {
        let (layer, module) = name.strip_prefix("model.layers.")?.split_once('.')?;
        let module = module.strip_suffix(".weight")?.rsplit_once('.')?.1;
        Some((layer.parse::<usize>().ok()?, Target::ALL.into_iter().find(|t| t.name() == module)?))
    };
    let add = |(name, tensor): (String, StoredTensor)| match (place(&name), tensor) {
        (Some((layer, target)), StoredTensor::Matrix(matrix)) => {
            let mut values = vec![0.0; matrix.rows * matrix.columns];
            for (row, out) in values.chunks_exact_mut(matrix.columns).enumerate() {
                matrix.row(row, out);
            }
            adapter.merge(layer, target, &mut values);
            let matrix = StoredMatrix::from_f32_rows(matrix.rows, matrix.columns, &values, Packing::F32);
            (name, StoredTensor::Matrix(matrix))
        }
        (_, tensor) => (name, tensor),
    };
    sample.tensors().map(add).collect()
}

/// Samples with the layers of other families, but for those whose heads are reordered.
fn varied(dtype: Option<Dtype>) -> impl Iterator<Item = Sample> {
    let samples = (0..24).step_by(2).map(move |seed| Sample::varied(dtype, seed));
    samples.filter(|sample| !reorders_heads(&sample.architecture)).take(4)
}

#[test]
fn an_adapter_beside_the_weights_equals_one_merged_into_them() {
    let dtype = Dtype::F32;
    for sample in (0..8).map(|seed| Sample::of_dtype(dtype, seed)).chain(varied(Some(dtype))) {
        let sample = Sample { kv_dtype: dtype, ..sample };
        let scenario = steps(&sample);
        let mut beside = runner(cpu(), &sample, &scenario);
        for (number, adapter) in adapters(&sample).iter().enumerate() {
            let tensors = merged(&sample, adapter);
            let mut within = Runner::with_tensors(cpu(), &sample, &scenario, tensors).unwrap();
            let mut plain = Runner::new(cpu(), &sample, &scenario).unwrap();
            for rows in &scenario.steps {
                let found = beside.step(&with(rows, &[Some(number); 5])).unwrap();
                let greedy = beside.next_tokens().unwrap().to_vec();
                let error = worst(&found, &within.step(rows).unwrap());
                assert!(error < 5e-5, "adapter {number}: {error}, {}", sample.label());
                assert_eq!(greedy, within.next_tokens().unwrap(), "{}", sample.label());
                assert!(worst(&found, &plain.step(rows).unwrap()) > 1e-3, "an addition that is felt");
            }
        }
    }
}

#[test]
fn the_cpu_adds_what_the_oracle_adds_in_every_format() {
    for sample in (0..14).map(Sample::random).chain(varied(None)) {
        let scenario = steps(&sample);
        let (mut fast, mut plain) =
            (runner(cpu(), &sample, &scenario), runner(Oracle::new(), &sample, &scenario));
        for rows in &scenario.steps {
            let rows = with(rows, &MIXED);
            let error = worst(&fast.step(&rows).unwrap(), &plain.step(&rows).unwrap());
            assert!(error < step_tolerance(&sample), "{error}, {}", sample.label());
        }
    }
}

#[test]
fn a_mixed_batch_gives_what_each_sequence_gets_by_itself() {
    for seed in 0..7 {
        let sample = Sample::random(seed);
        let scenario = steps(&sample);
        let (mut together, mut apart) =
            (runner(cpu(), &sample, &scenario), runner(cpu(), &sample, &scenario));
        let (mut oracle, mut alone) =
            (runner(Oracle::new(), &sample, &scenario), runner(Oracle::new(), &sample, &scenario));
        for rows in &scenario.steps {
            let mixed = with(rows, &MIXED);
            let each: Vec<Rows> = rows
                .sequences
                .iter()
                .zip(MIXED)
                .map(|(sequence, adapter)| with(&scenario::pieces(rows, sequence, usize::MAX)[0], &[adapter]))
                .collect();
            let one: Vec<Vec<f32>> = each.iter().flat_map(|rows| apart.step(rows).unwrap()).collect();
            let error = worst(&together.step(&mixed).unwrap(), &one);
            assert!(error < step_tolerance(&sample), "{error}, {}", sample.label());
            let one: Vec<Vec<f32>> = each.iter().flat_map(|rows| alone.step(rows).unwrap()).collect();
            assert_eq!(oracle.step(&mixed).unwrap(), one, "{}", sample.label());
        }
    }
}

#[test]
fn the_order_of_loading_and_the_threads_change_no_bit() {
    let sample = Sample::of_dtype(Dtype::Bf16, 3);
    let scenario = steps(&sample);
    let mut one = runner(CpuOperations::new(1).unwrap(), &sample, &scenario);
    let mut four = Runner::new(CpuOperations::new(4).unwrap(), &sample, &scenario).unwrap();
    for adapter in adapters(&sample).iter().rev() {
        four.take_adapter(&sample, adapter).unwrap();
    }
    for rows in &scenario.steps {
        let turned = MIXED.map(|adapter| adapter.map(|number| 2 - number));
        assert_eq!(one.step(&with(rows, &MIXED)).unwrap(), four.step(&with(rows, &turned)).unwrap());
    }
}

#[test]
fn bytes_moved_are_those_of_the_adapters_in_the_batch_once_each() {
    let sample = Sample::of_dtype(Dtype::F32, 1);
    let scenario = steps(&sample);
    let mut runner = runner(Oracle::new(), &sample, &scenario);
    let mut moved = |adapters: &[Option<usize>]| {
        runner.step(&with(&scenario.steps[0], adapters)).unwrap();
        runner.operations().take_bytes_moved().0
    };
    let without = moved(&[None; 5]);
    let [first, second, _] = adapters(&sample).map(|adapter| adapter.bytes(32).0);
    assert_eq!(moved(&[Some(0); 5]) - without, first);
    assert_eq!(moved(&[Some(0), Some(1), Some(0), None, Some(1)]) - without, first + second);
}

#[test]
fn operations_without_low_rank_products_refuse_by_name() {
    use crate::engine::{EngineError, Session};
    let mut session = crate::engine::scripted::ScriptedSession::new(
        hbmark_core::model::test_shapes::smollm2_135m(),
        hbmark_core::model::test_shapes::smollm2_135m().inventory(Dtype::Bf16),
        &hbmark_traffic::clock::VirtualClock::default(),
        Box::new(|_| unreachable!("nothing is run")),
    );
    assert!(session.lora().is_none());
    let refused = crate::engine::lora(&mut session).map(|_| ()).unwrap_err();
    assert!(matches!(refused, EngineError::Unsupported { .. }));
    assert!(refused.to_string().contains("choose --engine native --device cpu"), "{refused}");
}
