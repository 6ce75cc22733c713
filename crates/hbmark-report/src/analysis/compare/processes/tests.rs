use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};

use super::super::recheck_comparison;
use super::super::tests::share_different;
use super::*;
use hbmark_core::result::comparison::{CellComparison, Comparison, Method};

fn settings() -> Settings {
    Settings::new(0.01, 42)
}

/// What a machine does to processes, in every cell.
#[derive(Clone, Copy, Debug)]
enum Machine {
    Independent,
    /// Most of what happens to a process happens to all of its cells.
    SharedByCells,
    /// Student's t of two degrees of freedom: some processes are far off.
    HeavyTails,
}

/// Processes of four cells, in which B takes `effect` more: `sides` of A and of B; and the time in which the probe of each read a gigabyte, on a
/// machine that is `drift` slower while B's are run.
fn processes(
    machine: Machine,
    (effect, drift): (f64, f64),
    sides: [usize; 2],
    random: &mut ChaCha8Rng,
) -> (Vec<Vec<Pair>>, Vec<Pair>) {
    let rounds = sides[0].max(sides[1]);
    let mut cells = vec![vec![Pair::default(); rounds]; 4];
    let mut read = vec![Pair::default(); rounds];
    for (is_b, count) in [false, true].into_iter().zip(sides) {
        let slower = if is_b { drift.ln_1p() } else { 0.0 };
        let put = |pair: &mut Pair, time: f64| {
            *(if is_b { &mut pair.b_ns } else { &mut pair.a_ns }) = Some(time);
        };
        for at in 0..count {
            let mut normal = || -> f64 { StandardNormal.sample(random) };
            let shared = normal();
            for cell in &mut cells {
                let noise = match machine {
                    Machine::SharedByCells => 0.01 * shared + 0.002 * normal(),
                    Machine::HeavyTails => {
                        let chi = f64::midpoint(normal().powi(2), normal().powi(2));
                        0.01 * normal() / chi.sqrt().max(1e-3)
                    }
                    Machine::Independent => 0.01 * normal(),
                };
                let of_b = if is_b { effect.ln_1p() } else { 0.0 };
                put(&mut cell[at], 1e7 * (noise + slower + of_b).exp());
            }
            put(&mut read[at], 2e7 * (0.01 * normal() + slower).exp());
        }
    }
    (cells, read)
}

fn called_of_processes(machine: Machine, moved: (f64, f64), sides: [usize; 2], trials: usize) -> (f64, f64) {
    let mut random = ChaCha8Rng::seed_from_u64(6);
    share_different(trials, || {
        let (times, read) = processes(machine, moved, sides, &mut random);
        judge(&times, &read, &settings())
    })
}

#[test]
fn processes_of_one_thing_are_called_different_in_no_more_than_one_comparison_of_twenty() {
    for machine in [Machine::Independent, Machine::SharedByCells, Machine::HeavyTails] {
        for sides in [[4, 4], [5, 5], [8, 5]] {
            let (wrong, _) = called_of_processes(machine, (0.0, 0.0), sides, 2_000);
            assert!(wrong <= 0.05 + 0.015, "{machine:?} {sides:?}: {wrong}");
        }
    }
}

#[test]
fn five_percent_between_saved_processes_is_found_in_nearly_every_cell() {
    for (machine, sides, least) in [
        (Machine::Independent, [4, 4], 0.75),
        (Machine::Independent, [5, 5], 0.9),
        (Machine::Independent, [8, 5], 0.9),
        (Machine::SharedByCells, [5, 5], 0.9),
        (Machine::HeavyTails, [8, 8], 0.6),
    ] {
        let (_, found) = called_of_processes(machine, (0.05, 0.0), sides, 400);
        assert!(found >= least, "{machine:?} {sides:?}: {found}");
    }
}

#[test]
fn a_machine_that_was_slower_on_the_other_day_decides_nothing() {
    for drift in [0.005, 0.01, 0.02, 0.03, 0.1, -0.1] {
        let (any, _) = called_of_processes(Machine::Independent, (0.0, drift), [6, 6], 400);
        assert!(any <= 0.05, "{drift}: {any}");
    }
    let mut random = ChaCha8Rng::seed_from_u64(7);
    let (times, read) = processes(Machine::Independent, (0.0, 0.1), [6, 6], &mut random);
    let told = judge(&times, &read, &settings());
    assert!(
        told.cells[0].reason.starts_with("the machine may be the cause: the memory of B's machine took 1.1"),
        "{told:?}"
    );
    // What the machine cannot explain is told all the same.
    let (times, read) = processes(Machine::Independent, (0.5, 0.1), [6, 6], &mut random);
    let told = judge(&times, &read, &settings());
    assert!(told.cells.iter().all(|effect| effect.verdict == ComparisonVerdict::Slower), "{told:?}");
    let (times, read) = processes(Machine::Independent, (0.0, 0.1), [6, 6], &mut random);
    // Without what the memory did nothing is called.
    for read in [Vec::new(), read.iter().map(|pair| Pair { b_ns: None, ..*pair }).collect()] {
        let blind = judge(&times, &read, &settings());
        assert!(blind.cells.iter().all(|effect| effect.reason.contains("is not known")), "{blind:?}");
    }
    // A memory that was faster is no cause of times that are longer.
    let (times, read) = processes(Machine::Independent, (0.2, -0.1), [6, 6], &mut random);
    let told = judge(&times, &read, &settings());
    assert!(told.cells.iter().all(|effect| effect.verdict == ComparisonVerdict::Slower), "{told:?}");
}

#[test]
fn too_few_processes_decide_nothing_and_say_how_many_are_needed() {
    let mut random = ChaCha8Rng::seed_from_u64(8);
    // However alike, or however different, and however many the other side has.
    for (sides, effect) in [([3, 3], 1.0), ([2, 2], 0.0), ([19, 1], 1.0), ([4, 3], 1.0), ([1, 1], 0.0)] {
        let (times, read) = processes(Machine::Independent, (effect, 0.0), sides, &mut random);
        for found in judge(&times, &read, &settings()).cells {
            assert_eq!(found.verdict, ComparisonVerdict::Inconclusive);
            assert!(found.reason.contains("with a time; at least 4 a side are needed"), "{}", found.reason);
        }
    }
    // A cell that one side has no time of has no ratio, and neither have all cells together.
    let (mut times, read) = processes(Machine::Independent, (0.5, 0.0), [5, 5], &mut random);
    times[1].iter_mut().for_each(|pair| pair.b_ns = None);
    let found = judge(&times, &read, &settings());
    assert!(found.cells[1].ratio.is_none() && found.cells[1].a_ns.is_some() && found.overall.is_none());
    assert_eq!(found.cells[0].verdict, ComparisonVerdict::Slower);
    // A process without a time in one cell is left out of that cell alone.
    let (mut times, read) = processes(Machine::Independent, (0.5, 0.0), [6, 5], &mut random);
    times[0][1].a_ns = None;
    times[1][2].b_ns = Some(f64::INFINITY);
    let found = judge(&times, &read, &settings());
    assert_eq!(found.cells.iter().map(|effect| effect.rounds).collect::<Vec<_>>(), [5, 4, 5, 5]);
    assert!(found.cells.iter().all(|effect| effect.verdict == ComparisonVerdict::Slower), "{found:?}");
    let one = &found.cells[2];
    assert!((one.b_ns.unwrap() / one.a_ns.unwrap() - one.ratio.unwrap()).abs() < 1e-9);
}

#[test]
fn a_verdict_on_saved_processes_is_decided_again_from_their_times() {
    let mut random = ChaCha8Rng::seed_from_u64(9);
    let mut honest: Comparison = crate::samples::saved("comparison");
    let (times, read) = processes(Machine::Independent, (0.2, 0.0), [6, 5], &mut random);
    (honest.method, honest.read) = (Method::SavedProcesses, read);
    honest.cells.truncate(times.len());
    for (cell, pairs) in honest.cells.iter_mut().zip(times) {
        cell.pairs = pairs;
    }
    recheck_comparison(&mut honest);
    honest.remarks.clear();
    let is_slower = |cell: &CellComparison| cell.effect.verdict == ComparisonVerdict::Slower;
    assert!(honest.cells.iter().all(is_slower), "{:?}", honest.cells);
    let mut edited = honest.clone();
    edited.cells[0].effect.verdict = ComparisonVerdict::Faster;
    recheck_comparison(&mut edited);
    assert_eq!(edited.remarks.len(), 1, "{:?}", edited.remarks);
    edited.remarks.clear();
    assert_eq!(edited, honest);
}
