//! The rules of the protocol, each with the fault it is for planted on the scripted device.

use super::*;
use crate::engine::replay::Replayed;
use crate::engine::scripted::{Script, ScriptedSession, StepInfo, StepOutcome};
use crate::measure::visit::VisitEvent;
use hbmark_core::model::{Architecture, Dtype, test_shapes};
use hbmark_core::result::Cause;
use hbmark_core::units::Nanos;
use hbmark_traffic::clock::VirtualClock;

fn decode(batch: usize, context: usize) -> Cell {
    Cell { phase: Phase::Decode, engine: "scripted".into(), dtype: Dtype::Bf16, batch, context }
}

fn prefill(context: usize) -> Cell {
    Cell { phase: Phase::Prefill, ..decode(1, context) }
}

fn session(clock: &VirtualClock, script: impl FnMut(StepInfo) -> StepOutcome + 'static) -> ScriptedSession {
    let architecture = test_shapes::smollm2_135m();
    let inventory = architecture.inventory(Dtype::Bf16);
    ScriptedSession::new(architecture, inventory, clock, Box::new(script) as Script)
}

fn takes(milliseconds: f64) -> StepOutcome {
    StepOutcome::Takes { device: Nanos(milliseconds * 1e6), host: Nanos(0.0) }
}

/// Small, seeded, symmetric noise.
fn noise(random: &mut ChaCha8Rng, relative: f64) -> f64 {
    use rand::Rng;
    1.0 + relative * (random.random::<f64>() * 2.0 - 1.0)
}

fn measure(
    session: &mut ScriptedSession,
    cells: &[Cell],
    protocol: &Protocol,
    monitor: &mut dyn Monitor,
) -> Vec<Measured> {
    run(session, cells, protocol, monitor, true, &mut |_| {}).0
}

#[test]
fn a_steady_device_ends_at_the_first_look() {
    let clock = VirtualClock::default();
    let mut random = ChaCha8Rng::seed_from_u64(1);
    let mut session = session(&clock, move |_| takes(10.0 * noise(&mut random, 0.001)));
    let measured =
        measure(&mut session, &[decode(1, 64), decode(4, 64)], &Protocol::full(7), &mut NoopMonitor);
    for cell in &measured {
        assert_eq!(cell.status, Status::Ok, "{:?}", cell.reason);
        assert!(cell.blocks.len() >= 10 && cell.blocks.len() <= 40, "{}", cell.blocks.len());
        let block = &cell.blocks[0];
        assert_eq!(block.step_ns.len(), 20, "20 steps of 10 ms are 200 ms");
        assert_eq!(block.step_ns.len(), block.interval_ns.len());
        assert!(cell.blocks.iter().map(|b| b.visit).max() >= Some(2), "blocks lie in at least three visits");
    }
    assert_eq!(session.held_sequences(), 0, "every sequence is released");
}

#[test]
fn a_block_is_at_least_100_ms_and_a_prefill_block_may_be_one_step() {
    let clock = VirtualClock::default();
    let mut session = session(&clock, |info| takes(if info.tokens > 1 { 400.0 } else { 0.5 }));
    let measured = measure(&mut session, &[decode(1, 1), prefill(256)], &Protocol::full(7), &mut NoopMonitor);
    assert_eq!(measured[0].blocks[0].step_ns.len(), 200);
    assert_eq!(measured[1].blocks[0].step_ns.len(), 1);
}

#[test]
fn the_interval_holds_the_host_time_that_the_device_span_does_not() {
    let clock = VirtualClock::default();
    let mut session = session(&clock, |_| StepOutcome::Takes { device: Nanos(8e6), host: Nanos(2e6) });
    let measured = measure(&mut session, &[decode(1, 16)], &Protocol::full(7), &mut NoopMonitor);
    let block = &measured[0].blocks[0];
    assert!(block.step_ns.iter().all(|d| (d - 8e6).abs() < 1.0));
    assert!(block.interval_ns.iter().all(|i| (i - 1e7).abs() < 1.0));
    assert!((block.wall_ns - 1e7 * block.step_ns.len() as f64).abs() < 10.0);
}

#[test]
fn a_noisy_device_is_said_not_to_have_converged() {
    let clock = VirtualClock::default();
    let mut random = ChaCha8Rng::seed_from_u64(3);
    // Blocks differ by up to 30 %, steps inside a block do not: the mean of a block is no better than a step.
    let mut level = 1.0;
    let mut session = session(&clock, move |info| {
        if info.index % 20 == 0 {
            level = noise(&mut random, 0.3);
        }
        takes(10.0 * level)
    });
    let measured = measure(&mut session, &[decode(1, 16)], &Protocol::full(7), &mut NoopMonitor);
    assert_eq!(measured[0].status, Status::NotConverged, "{:?}", measured[0].reason);
    let reason = &measured[0].reason;
    assert!(
        matches!(reason, Some(Cause::IntervalTooWide { half_width, wanted: 0.01, .. }) if *half_width > 0.01),
        "{reason:?}"
    );
}

#[test]
fn a_trend_that_never_ends_is_no_steady_state() {
    let clock = VirtualClock::default();
    let mut session = session(&clock, |info| takes(5.0 * (1.0 + info.index as f64 * 0.01)));
    let measured = measure(&mut session, &[decode(1, 16)], &Protocol::full(7), &mut NoopMonitor);
    assert_eq!(measured[0].status, Status::NoSteadyState);
    assert!(
        matches!(measured[0].reason, Some(Cause::StillDrifting { drift, .. }) if drift > 0.0),
        "{:?}",
        measured[0].reason
    );
}

/// Rejects the blocks a test asks for.
struct Planted<F: FnMut(usize) -> BlockContext>(F, usize);

impl<F: FnMut(usize) -> BlockContext> Monitor for Planted<F> {
    fn before_block(&mut self) {}
    fn after_block(&mut self, _wall_seconds: f64) -> BlockContext {
        self.1 += 1;
        (self.0)(self.1 - 1)
    }
}

fn throttled() -> Cause {
    Cause::Throttled { reasons: vec!["hw_thermal".to_owned()] }
}

#[test]
fn a_throttled_block_is_kept_with_its_cause_and_retried() {
    let clock = VirtualClock::default();
    let mut session = session(&clock, |_| takes(10.0));
    let mut monitor =
        Planted(|block| BlockContext { reject: (block == 4).then(throttled), ..BlockContext::default() }, 0);
    let measured = measure(&mut session, &[decode(1, 16)], &Protocol::full(7), &mut monitor);
    assert_eq!(measured[0].status, Status::Ok);
    let rejected: Vec<&Block> = measured[0].blocks.iter().filter(|b| b.rejected.is_some()).collect();
    assert_eq!(rejected.len(), 1);
    assert_eq!(rejected[0].rejected, Some(throttled()));
    assert_eq!(accepted(&measured[0].blocks).count(), 10);
}

#[test]
fn a_block_whose_canary_is_off_is_rejected_and_says_by_how_much() {
    let clock = VirtualClock::default();
    let mut session = session(&clock, |_| takes(10.0));
    let mut monitor = Planted(
        |block| BlockContext {
            canary_ratio: Some(if block == 2 { 1.023 } else { 1.004 }),
            ..BlockContext::default()
        },
        0,
    );
    let measured = measure(&mut session, &[decode(1, 16)], &Protocol::full(7), &mut monitor);
    let causes: Vec<Cause> = measured[0].blocks.iter().filter_map(|b| b.rejected.clone()).collect();
    assert_eq!(causes, [Cause::Canary { ratio: 1.023 }]);
}

#[test]
fn a_cell_that_stays_disturbed_is_given_up_and_the_others_go_on() {
    let clock = VirtualClock::default();
    let mut session = session(&clock, |_| takes(10.0));
    let cells = [decode(1, 16), decode(2, 16)];
    let mut monitor = Planted(
        |block| BlockContext {
            reject: (block < 4).then_some(Cause::ForeignLoad { cores: 0.8 }),
            ..BlockContext::default()
        },
        0,
    );
    let measured = measure(&mut session, &cells, &Protocol::full(7), &mut monitor);
    let statuses: Vec<Status> = measured.iter().map(|m| m.status).collect();
    assert!(statuses.contains(&Status::Disturbed) && statuses.contains(&Status::Ok), "{statuses:?}");
    let given_up = measured.iter().find(|m| m.status == Status::Disturbed).unwrap();
    assert_eq!(
        given_up.reason,
        Some(Cause::RejectedInARow { blocks: 4, last: Box::new(Cause::ForeignLoad { cores: 0.8 }) })
    );
}

/// Tells load of so many blocks together, and at the end of a visit of those that are left.
struct Together {
    each: usize,
    open: usize,
    busy: fn(usize) -> bool,
    told: usize,
}

impl Together {
    fn tell(&mut self) -> WindowLoad {
        let (blocks, busy) = (std::mem::take(&mut self.open), (self.busy)(self.told));
        self.told += 1;
        let load = CpuLoad { blocks, foreign_cores: Some(if busy { 1.0 } else { 0.0 }), steal_cores: None };
        WindowLoad { load, reject: busy.then_some(Cause::ForeignLoad { cores: 1.0 }) }
    }
}

impl Monitor for Together {
    fn before_block(&mut self) {}
    fn after_block(&mut self, _wall_seconds: f64) -> BlockContext {
        self.open += 1;
        let load = (self.open == self.each).then(|| self.tell());
        BlockContext { load, ..BlockContext::default() }
    }
    fn after_visit(&mut self) -> Option<WindowLoad> {
        (self.open > 0).then(|| self.tell())
    }
}

#[test]
fn blocks_that_are_judged_together_fall_together() {
    let clock = VirtualClock::default();
    let measured = |each, busy: fn(usize) -> bool| {
        let mut session = session(&clock, |_| takes(10.0));
        let mut monitor = Together { each, open: 0, busy, told: 0 };
        let protocol = Protocol { visits: 1, ..Protocol::full(7) };
        measure(&mut session, &[decode(1, 16)], &protocol, &mut monitor).remove(0)
    };
    let rejected = |measured: &Measured| -> Vec<usize> {
        let fell = |(index, block): (usize, &Block)| block.rejected.is_some().then_some(index);
        measured.blocks.iter().enumerate().filter_map(fell).collect()
    };
    let second = measured(3, |told| told == 1);
    assert_eq!((second.status, rejected(&second)), (Status::Ok, vec![3, 4, 5]));
    assert_eq!(accepted(&second.blocks).count(), 10);
    let foreign = |block: &Block| block.telemetry.as_ref().and_then(|t| t.foreign_cores);
    assert!(second.blocks.iter().all(|block| foreign(block).is_some()), "every block knows its load");
    // Ten blocks are three windows and one block, of which the visit's end tells.
    let last = measured(3, |told| told == 3);
    assert_eq!((last.status, rejected(&last)), (Status::Ok, vec![9]));
    assert_eq!(accepted(&last.blocks).count(), 10);
    let always = measured(3, |_| true);
    // Each look takes three blocks, and is one rejection of the four that are too many.
    assert_eq!((always.status, rejected(&always)), (Status::Disturbed, (0..12).collect()));
    let last = Box::new(Cause::ForeignLoad { cores: 1.0 });
    assert_eq!(always.reason, Some(Cause::RejectedInARow { blocks: 12, last }));
}

#[test]
fn a_visit_that_ends_early_leaves_no_load_to_the_next() {
    let clock = VirtualClock::default();
    let mut session = session(&clock, |info| {
        if info.index < 330 { takes(10.0) } else { StepOutcome::Fails(EngineError::NoStepRun) }
    });
    let mut monitor = Together { each: 1_000, open: 0, busy: |_| false, told: 0 };
    let protocol = Protocol { visits: 1, ..Protocol::full(7) };
    let measured = measure(&mut session, &[decode(1, 16)], &protocol, &mut monitor).remove(0);
    assert_eq!((measured.status, monitor.open), (Status::Failed, 0));
    let told = measured.blocks.iter().all(|block| block.telemetry.is_some());
    assert!(!measured.blocks.is_empty() && told, "its blocks have the load beside them");
}

#[test]
fn a_block_that_threads_were_away_from_is_rejected_where_the_machine_is_watched() {
    let rejected = |telemetry: Option<BlockTelemetry>, away| {
        let mut block = Block::default();
        let context = BlockContext { telemetry, ..BlockContext::default() };
        context.without_threads(away).apply_to(&mut block, 0.1);
        (block.rejected, block.telemetry.and_then(|telemetry| telemetry.threads_away))
    };
    let watched = || Some(BlockTelemetry::default());
    assert_eq!(rejected(watched(), Some(1.0)), (Some(Cause::ThreadsAway { threads: 1.0 }), Some(1.0)));
    assert_eq!(rejected(watched(), Some(0.1)), (None, Some(0.1)), "as much as foreign load may be");
    assert_eq!(rejected(watched(), None), (None, None));
    assert_eq!(rejected(None, Some(1.0)), (None, None), "nothing is judged in a smoke run");
}

/// Says of each reference whether its KV was to be kept.
struct References<'a> {
    visits: InProcess<'a>,
    kept: Vec<bool>,
}

impl Visitor for References<'_> {
    type Halt = std::convert::Infallible;
    fn visit(&mut self, visit: &Visit) -> Result<Visited, Self::Halt> {
        self.visits.visit(visit)
    }
    fn measure_reference(&mut self, reference: &Reference) -> Result<Result<Option<f64>, Cause>, Self::Halt> {
        self.kept.push(reference.keep);
        self.visits.measure_reference(reference)
    }
    fn release(&mut self, index: usize) -> Result<(), Self::Halt> {
        self.visits.release(index)
    }
}

#[test]
fn the_reference_cell_stays_resident_only_where_all_cells_do() {
    let kept = |keep_resident| {
        let clock = VirtualClock::default();
        let mut session = session(&clock, |_| takes(10.0));
        let (protocol, mut monitor) = (Protocol::full(7), NoopMonitor);
        let (session, monitor): (&mut dyn Session, &mut dyn Monitor) = (&mut session, &mut monitor);
        let visits = InProcess { session, monitor, protocol: &protocol, inputs: CellInputs::default() };
        let mut visitor = References { visits, kept: Vec::new() };
        let cells = [decode(1, 16), decode(2, 16)];
        assert!(schedule(&mut visitor, &cells, &protocol, keep_resident, &mut |_| {}).1.is_none());
        visitor.kept
    };
    assert!(kept(true).contains(&true));
    let freed = kept(false);
    assert!(!freed.is_empty() && !freed.contains(&true), "{freed:?}");
}

#[test]
fn a_slow_block_without_a_cause_is_never_dropped() {
    let clock = VirtualClock::default();
    let mut session =
        session(&clock, |info| takes(if (300..320).contains(&info.index) { 100.0 } else { 10.0 }));
    let measured = measure(&mut session, &[decode(1, 16)], &Protocol::full(7), &mut NoopMonitor);
    let slowest = accepted(&measured[0].blocks).flat_map(|b| &b.step_ns).fold(0.0f64, |m, &x| m.max(x));
    assert!((slowest - 1e8).abs() < 1.0, "the 100 ms steps are among the accepted ones");
}

#[test]
fn out_of_memory_ends_one_cell_as_oom() {
    let clock = VirtualClock::default();
    let mut session = session(&clock, |info| {
        if info.batch == 8 {
            StepOutcome::Fails(EngineError::OutOfMemory {
                device: "cuda:0".into(),
                detail: "wanted 9 GB, 2 GB free".into(),
            })
        } else {
            takes(10.0)
        }
    });
    let measured =
        measure(&mut session, &[decode(8, 16), decode(1, 16)], &Protocol::full(7), &mut NoopMonitor);
    assert_eq!(measured[0].status, Status::Oom);
    let said = measured[0].reason.as_ref().map(ToString::to_string);
    assert_eq!(said.as_deref(), Some("out of memory on cuda:0: wanted 9 GB, 2 GB free"));
    assert_eq!(measured[1].status, Status::Ok);
}

#[test]
fn a_fault_in_the_middle_keeps_the_blocks_before_it() {
    let clock = VirtualClock::default();
    let mut session = session(&clock, |info| {
        if info.index >= 400 {
            StepOutcome::Fails(EngineError::Device {
                device: "cuda:0".into(),
                detail: "illegal address".into(),
            })
        } else {
            takes(10.0)
        }
    });
    let measured = measure(&mut session, &[decode(1, 16)], &Protocol::full(7), &mut NoopMonitor);
    assert_eq!(measured[0].status, Status::Failed);
    assert!(!measured[0].blocks.is_empty());
}

#[test]
fn identical_steps_with_other_tokens_are_invalid() {
    let clock = VirtualClock::default();
    let mut session = session(&clock, |info| {
        if info.index == 350 { StepOutcome::WrongTokens { device: Nanos(1e7) } } else { takes(10.0) }
    });
    let measured = measure(&mut session, &[decode(1, 16)], &Protocol::full(7), &mut NoopMonitor);
    assert_eq!(measured[0].status, Status::Invalid);
    assert!(matches!(measured[0].reason, Some(Cause::TokensChanged { .. })), "{:?}", measured[0].reason);
}

/// A library that times its algorithms may take one in another process that sums in another order.
#[test]
fn tokens_are_compared_within_one_process() {
    let visited = |inputs: &mut CellInputs, vocab_size: usize, tokens: &[u32]| {
        // Answers depend on the vocabulary.
        let architecture = Architecture { vocab_size, ..test_shapes::smollm2_135m() };
        let inventory = architecture.inventory(Dtype::Bf16);
        let script = Box::new(|_| takes(10.0)) as Script;
        let mut session = ScriptedSession::new(architecture, inventory, &VirtualClock::default(), script);
        let visit = Visit {
            index: 0,
            cell: decode(2, 16),
            round: 0,
            wanted: 1,
            steps: None,
            tokens: tokens.to_vec(),
            predicted_ns: None,
            canary_tolerance: 0.01,
            keep: false,
        };
        inputs.visit(&mut session, &mut NoopMonitor, &Protocol::smoke(7), &visit, &mut |_| {})
    };
    let first = visited(&mut CellInputs::default(), 49_152, &[]);
    let mut next_process = CellInputs::default();
    let next = visited(&mut next_process, 1000, &first.tokens);
    assert_eq!(next.end, None);
    assert_ne!(next.tokens, first.tokens);
    let changed = visited(&mut next_process, 49_152, &next.tokens).end.unwrap();
    assert!(matches!(changed.reason, Cause::TokensChanged { .. }), "{changed:?}");
}

#[test]
fn a_device_clock_that_runs_fast_is_invalid() {
    let clock = VirtualClock::default();
    let mut session = session(&clock, |_| takes(10.0)).with_clock_rate(1.03);
    let measured = measure(&mut session, &[decode(1, 16)], &Protocol::full(7), &mut NoopMonitor);
    assert_eq!(measured[0].status, Status::Invalid);
    assert!(matches!(measured[0].reason, Some(Cause::ClocksDisagree { .. })), "{:?}", measured[0].reason);
}

#[test]
fn a_device_clock_that_runs_slow_is_invalid_and_one_a_little_off_is_not() {
    let with_rate = |rate: f64| {
        let clock = VirtualClock::default();
        let mut session = session(&clock, |_| takes(10.0)).with_clock_rate(rate);
        measure(&mut session, &[decode(1, 16)], &Protocol::full(7), &mut NoopMonitor).remove(0)
    };
    let slow = with_rate(0.95);
    assert_eq!(slow.status, Status::Invalid);
    assert!(matches!(slow.reason, Some(Cause::ClocksDisagree { .. })), "{:?}", slow.reason);
    let near = with_rate(0.998);
    assert_eq!(near.status, Status::Ok, "{:?}", near.reason);
    let block = &near.blocks[0];
    assert!((block.timeline_ns.unwrap() / block.wall_ns - 0.998).abs() < 1e-9, "the second clock is kept");
}

#[test]
fn host_time_behind_the_last_mark_is_no_disagreement_of_clocks() {
    let clock = VirtualClock::default();
    let mut session = session(&clock, |_| StepOutcome::Takes { device: Nanos(1e6), host: Nanos(9e6) });
    let measured = measure(&mut session, &[decode(1, 16)], &Protocol::full(7), &mut NoopMonitor);
    assert_eq!(measured[0].status, Status::Ok, "{:?}", measured[0].reason);
}

#[test]
fn an_engine_that_answers_for_fewer_sequences_is_invalid() {
    let clock = VirtualClock::default();
    let mut session = session(&clock, |_| takes(10.0)).with_lost_token();
    let measured = measure(&mut session, &[decode(4, 16)], &Protocol::full(7), &mut NoopMonitor);
    assert_eq!(measured[0].status, Status::Invalid);
    assert_eq!(measured[0].reason, Some(Cause::TokenCount { wanted: 4, found: 3 }));
}

#[test]
fn correlated_blocks_are_merged_before_an_interval_is_believed() {
    let clock = VirtualClock::default();
    // The level wanders slowly: neighbouring blocks resemble each other.
    let mut session = session(&clock, |info| takes(10.0 * (1.0 + 0.02 * (info.index as f64 / 120.0).sin())));
    let measured = measure(&mut session, &[decode(1, 16)], &Protocol::full(7), &mut NoopMonitor);
    assert!(measured[0].merge > 1, "merge {}", measured[0].merge);
}

#[test]
fn the_order_of_cells_is_random_but_seeded() {
    let order = |seed: u64| {
        let clock = VirtualClock::default();
        let mut session = session(&clock, |_| takes(10.0));
        let cells: Vec<Cell> = (1..=8).map(|b| decode(b, 16)).collect();
        let mut seen = Vec::new();
        run(&mut session, &cells, &Protocol::full(seed), &mut NoopMonitor, true, &mut |event| {
            if let Event::Visiting { cell, .. } = event {
                seen.push(cell.batch);
            }
        });
        seen
    };
    assert_eq!(order(1), order(1));
    assert_ne!(order(1), order(2));
    assert_ne!(order(1)[..8], [1, 2, 3, 4, 5, 6, 7, 8]);
}

#[test]
fn the_reference_cell_sees_the_machine_drift() {
    let clock = VirtualClock::default();
    let mut session = session(&clock, |info| takes(10.0 * (1.0 + info.index as f64 * 2e-5)));
    let (_, reference) = run(
        &mut session,
        &[decode(1, 16), decode(2, 16)],
        &Protocol::full(7),
        &mut NoopMonitor,
        true,
        &mut |_| {},
    );
    assert!(reference.len() >= 3);
    assert!(reference.windows(2).all(|pair| pair[1] > pair[0]), "{reference:?}");
}

#[test]
fn cells_that_do_not_fit_together_are_filled_anew_for_each_visit() {
    let clock = VirtualClock::default();
    let mut session = session(&clock, |_| takes(10.0));
    let cells = [decode(1, 64), decode(2, 64)];
    let (measured, _) = run(&mut session, &cells, &Protocol::full(7), &mut NoopMonitor, false, &mut |_| {});
    assert!(measured.iter().all(|m| m.status == Status::Ok), "{measured:?}");
    assert_eq!(session.held_sequences(), 0);
}

#[test]
fn a_smoke_run_takes_every_cell_once() {
    let clock = VirtualClock::default();
    let mut session = session(&clock, |_| takes(10.0));
    let measured =
        measure(&mut session, &[decode(1, 16), prefill(16)], &Protocol::smoke(7), &mut NoopMonitor);
    for cell in measured {
        assert_eq!(cell.status, Status::Ok, "{:?}", cell.reason);
        assert_eq!(cell.blocks.len(), 1);
    }
}

#[test]
fn merged_block_means_weigh_every_step_alike_and_leave_rejected_blocks_out() {
    let block = |steps: &[f64]| Block { step_ns: steps.to_vec(), ..Block::default() };
    let rejected = Block { rejected: Some(Cause::Canary { ratio: 1.1 }), ..block(&[100.0]) };
    let blocks = [block(&[1.0, 1.0, 1.0]), rejected, block(&[5.0]), block(&[7.0])];
    assert_eq!(block_means(&blocks, 1, |b| &b.step_ns), [1.0, 5.0, 7.0]);
    assert_eq!(
        block_means(&blocks, 2, |b| &b.step_ns),
        [2.0],
        "two blocks of four steps, and a third left out"
    );
}

#[test]
fn the_same_protocol_measures_a_session_and_its_replay() {
    let median = |replayed: bool| {
        let clock = VirtualClock::default();
        let scripted = session(&clock, |_| takes(9.0)).with_replay(|| takes(4.0));
        let mut session: Box<dyn Session> =
            if replayed { Box::new(Replayed::new(scripted, "stock-graph")) } else { Box::new(scripted) };
        let cells = [decode(1, 64), decode(2, 64)];
        let (measured, _) =
            run(session.as_mut(), &cells, &Protocol::quick(7), &mut NoopMonitor, true, &mut |_| {});
        assert!(measured.iter().all(|m| m.status == Status::Ok), "{measured:?}");
        hbmark_core::stats::median(&measured[1].blocks[0].step_ns)
    };
    assert_eq!([median(false), median(true)].map(f64::to_bits), [9e6f64, 4e6].map(f64::to_bits));
}

#[test]
fn a_cell_whose_step_cannot_be_replayed_says_why_and_the_others_go_on() {
    let clock = VirtualClock::default();
    let mut replays = 0;
    // The second cell that is recorded gives other tokens.
    let scripted = session(&clock, |_| takes(9.0)).with_replay(move || {
        replays += 1;
        if replays == 2 { StepOutcome::WrongTokens { device: Nanos(4e6) } } else { takes(4.0) }
    });
    let mut session = Replayed::new(scripted, "stock-graph");
    let cells = [decode(1, 64), decode(2, 64)];
    let (measured, _) = run(&mut session, &cells, &Protocol::smoke(7), &mut NoopMonitor, true, &mut |_| {});
    let statuses: Vec<Status> = measured.iter().map(|m| m.status).collect();
    assert!(statuses.contains(&Status::Ok) && statuses.contains(&Status::Skipped), "{measured:?}");
    let reason = measured.iter().find_map(|m| m.reason.clone()).unwrap();
    assert!(matches!(&reason, Cause::NotReplayed { engine, .. } if engine == "stock-graph"), "{reason}");
}

/// Everything is disturbed from a block on.
struct Load {
    from: usize,
    block: usize,
}

impl Monitor for Load {
    fn before_block(&mut self) {}
    fn after_block(&mut self, _wall_seconds: f64) -> BlockContext {
        self.block += 1;
        let reject = (self.block > self.from).then_some(Cause::ForeignLoad { cores: 1.5 });
        BlockContext { reject, ..BlockContext::default() }
    }
}

#[test]
fn noise_that_is_allowed_is_counted_and_named() {
    for from in [0, 2, 7] {
        let clock = VirtualClock::default();
        let protocol =
            |allow_noise| Protocol::full(7).stopped_by(&Stopping { allow_noise, ..Stopping::default() });
        let measured = |allow_noise: bool| {
            let mut session = session(&clock, |_| takes(10.0));
            measure(&mut session, &[decode(1, 16)], &protocol(allow_noise), &mut Load { from, block: 0 })
                .remove(0)
        };
        let refused = measured(false);
        assert_eq!(refused.status, Status::Disturbed);
        let allowed = measured(true);
        assert_eq!(allowed.status, Status::Noisy, "{:?}", allowed.reason);
        assert!(matches!(&allowed.reason, Some(Cause::RejectedInARow { .. })), "{:?}", allowed.reason);
        assert!(accepted(&allowed.blocks).count() >= 10, "as many blocks as the protocol wants");
        // Each knows what disturbed it.
        let noisy = allowed.blocks.iter().filter(|block| !block.conditions.is_empty()).count();
        assert!(noisy >= 10 - from && allowed.blocks.iter().all(|b| b.conditions.len() <= 1), "{noisy}");
    }
    // Without noise the word is ok, whatever was allowed.
    let clock = VirtualClock::default();
    let allowed = Protocol::full(7).stopped_by(&Stopping { allow_noise: true, ..Stopping::default() });
    let calm = measure(&mut session(&clock, |_| takes(10.0)), &[decode(1, 16)], &allowed, &mut NoopMonitor);
    assert_eq!((calm[0].status, allowed.name), (Status::Ok, "full"));
    let mut random = ChaCha8Rng::seed_from_u64(4);
    let mut wide = session(&clock, move |_| takes(10.0 * noise(&mut random, 0.9)));
    let wide = measure(&mut wide, &[decode(1, 16)], &allowed, &mut NoopMonitor).remove(0);
    assert_eq!(wide.status, Status::Noisy);
    assert!(matches!(wide.reason, Some(Cause::IntervalTooWide { .. })), "{:?}", wide.reason);
}

#[test]
fn sampling_ends_as_the_user_says() {
    let measured = |stopping: Stopping, relative: f64| {
        let clock = VirtualClock::default();
        let mut random = ChaCha8Rng::seed_from_u64(2);
        let mut session = session(&clock, move |_| takes(10.0 * noise(&mut random, relative)));
        let protocol = Protocol::full(7).stopped_by(&stopping);
        assert_eq!(protocol.name, "custom");
        measure(&mut session, &[decode(1, 16)], &protocol, &mut NoopMonitor).remove(0)
    };
    for blocks in [1, 2, 6, 50] {
        let cell = measured(Stopping { repetitions: Some(blocks), ..Stopping::default() }, 0.001);
        assert_eq!(cell.blocks.len(), blocks);
        assert_eq!(cell.status, if blocks == 1 { Status::NotConverged } else { Status::Ok }, "{blocks}");
    }
    let long = measured(Stopping { min_seconds: Some(30.0), ..Stopping::default() }, 0.0);
    let sampled: f64 = long.blocks.iter().map(|block| block.wall_ns / 1e9).sum();
    assert!((29.9..40.0).contains(&sampled), "{sampled} s");
    let loose = measured(Stopping { max_noise: Some(0.1), ..Stopping::default() }, 0.3);
    let strict = measured(Stopping { max_noise: Some(0.002), ..Stopping::default() }, 0.3);
    assert_eq!((loose.status, strict.status), (Status::Ok, Status::NotConverged));
    assert!(loose.blocks.len() < strict.blocks.len());
}

#[test]
fn rejected_blocks_are_told_as_they_come() {
    let clock = VirtualClock::default();
    let mut session = session(&clock, |_| takes(10.0));
    let (cell, protocol) = (decode(1, 16), Protocol::full(7));
    let visit = Visit {
        index: 0,
        cell,
        round: 0,
        wanted: 3,
        steps: None,
        tokens: Vec::new(),
        predicted_ns: None,
        canary_tolerance: 0.01,
        keep: false,
    };
    let mut told = Vec::new();
    let mut monitor = Load { from: 1, block: 0 };
    let visited = CellInputs::default().visit(&mut session, &mut monitor, &protocol, &visit, &mut |event| {
        if let VisitEvent::Rejected(cause) = event {
            told.push(cause.clone());
        }
    });
    assert_eq!(visited.blocks.len(), 5);
    assert_eq!(told, vec![Cause::ForeignLoad { cores: 1.5 }; 4]);
}

/// What is announced of a visit and of the reference cell: seconds, or none.
fn announced(kv: KvFill, phase: Phase, predicted_ns: Option<f64>) -> [Vec<Option<f64>>; 2] {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/models/qwen3");
    let model = crate::weights::open(folder, None, 0).unwrap();
    let options = crate::engine::DeviceOptions { threads: Some(1), ..Default::default() };
    let cpu = crate::engine::DeviceChoice::Cpu;
    let opened = crate::engine::open("native", &model, Dtype::F32, cpu, options, &mut |_, _| {});
    let mut session = opened.unwrap();
    let protocol = Protocol { kv, ..Protocol::smoke(7) };
    let cell = Cell { phase, dtype: Dtype::F32, ..decode(1, 16) };
    let visit = Visit {
        index: 0,
        cell: cell.clone(),
        round: 0,
        wanted: 1,
        steps: None,
        tokens: Vec::new(),
        predicted_ns,
        canary_tolerance: 0.01,
        keep: false,
    };
    let mut told = Vec::new();
    let mut tell =
        |event: VisitEvent<'_>| told.extend(if let VisitEvent::Busy(s) = event { Some(s) } else { None });
    let mut inputs = CellInputs::default();
    let visited = inputs.visit(session.as_mut(), &mut NoopMonitor, &protocol, &visit, &mut tell);
    assert_eq!(visited.end, None);
    let of_visit = std::mem::take(&mut told);
    let reference = Reference { index: 0, cell, steps: 5, predicted_ns, keep: false };
    let mut tell =
        |event: VisitEvent<'_>| told.extend(if let VisitEvent::Busy(s) = event { Some(s) } else { None });
    assert!(inputs.measure_reference(session.as_mut(), &protocol, &reference, &mut tell).is_some());
    [of_visit, told]
}

#[test]
fn without_a_prediction_none_is_announced_before_a_step_was_timed() {
    let [visit, reference] = announced(KvFill::Prefill, Phase::Decode, None);
    assert_eq!(visit[..2], [None, None], "the fill and the warm-up");
    assert!(visit[2].is_some_and(|block| block > 0.0), "a block takes what the warm-up took: {visit:?}");
    assert_eq!((visit.len(), reference), (3, vec![None, None]));
}

#[test]
fn a_fill_is_predicted_by_its_positions_where_it_is_a_prefill() {
    let first = |kv, phase| announced(kv, phase, Some(1e9)).map(|told| told[0]);
    assert_eq!(first(KvFill::Prefill, Phase::Decode), [Some(17.0), Some(17.0)]);
    assert_eq!(first(KvFill::Synthetic, Phase::Decode), [None, None], "no step writes random values");
    assert_eq!(first(KvFill::Synthetic, Phase::Prefill)[0], Some(1.0), "nothing is filled");
}

#[test]
fn a_reference_cell_that_fails_leaves_no_kv() {
    for failing in [0, 3, 12] {
        let clock = VirtualClock::default();
        let mut session = session(&clock, move |info| {
            if info.index < failing {
                return takes(10.0);
            }
            StepOutcome::Fails(EngineError::Device { device: "scripted".into(), detail: "planted".into() })
        });
        let reference =
            Reference { index: 0, cell: decode(2, 16), steps: 20, predicted_ns: None, keep: true };
        let mut inputs = CellInputs::default();
        let mean = inputs.measure_reference(&mut session, &Protocol::full(7), &reference, &mut |_| {});
        assert_eq!((mean, session.held_sequences()), (None, 0), "after {failing} steps");
    }
}

#[test]
fn work_that_is_left_is_right_within_a_factor_of_two_where_its_bounds_are_near() {
    let mut all = 0;
    for (relative, seed) in [(0.001, 1), (0.08, 2), (0.2, 3), (0.9, 4)] {
        let clock = VirtualClock::default();
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let mut session =
            session(&clock, move |info| takes(5.0 * info.batch as f64 * noise(&mut random, relative)));
        let cells: Vec<Cell> = (1..=6).map(|batch| decode(batch, 64)).collect();
        let mut told = Vec::new();
        run(&mut session, &cells, &Protocol::full(7), &mut NoopMonitor, true, &mut |event| {
            if let Event::Left { done, least, most } = event {
                told.push((clock.now().seconds(), done, least, most));
            }
        });
        let end = clock.now().seconds();
        let mut said = 0;
        for &(now, done, least, most) in &told {
            assert!(least <= most, "{least} {most}");
            if most > 2.2 * least || done < 0.08 * (done + most) || end - now < 1.0 {
                continue;
            }
            said += 1;
            let (found, left) = ((least * most).sqrt() * now / done, end - now);
            assert!(
                (left / 2.0..=left * 2.0).contains(&found),
                "noise {relative} at {now:.1} s: {found:.1} s for {left:.1} s"
            );
        }
        all += said;
    }
    assert!(all > 10, "said {all} times");
}
