//! A run as the program saves it passes; doctored in any way it does not.

use super::*;
use crate::analysis::{judge, of_report};
use crate::samples;
use hbmark_core::result::{BlockTelemetry, saved};

/// A thousandth of noise: what a live run accepts.
fn wobble(step: usize) -> f64 {
    // Golden-ratio steps: no two alike, and no trend.
    1.0 + 0.002 * ((step as f64 * 0.618_033_988_75).fract() - 0.5)
}

/// The saved run of the scripted device, its `ok` cells, with times that vary as measured ones do.
fn run() -> Report {
    let mut report: Report = samples::saved("run-scripted");
    report.cells.retain(|cell| cell.status == Status::Ok);
    assert!(report.cells.len() >= 2);
    let mut step = 0;
    for cell in &mut report.cells {
        let mut at = 0.0;
        for block in &mut cell.blocks {
            for (span, interval) in block.step_ns.iter_mut().zip(&mut block.interval_ns) {
                step += 1;
                *span *= wobble(step);
                *interval = *span;
            }
            block.wall_ns = block.interval_ns.iter().sum();
            block.timeline_ns = Some(block.wall_ns);
            block.at_ns = at;
            at += block.wall_ns * 1.5;
        }
    }
    report
}

/// What becomes of the decode cell of a run that was changed and saved.
fn doctored(change: impl Fn(&mut CellResult)) -> (Status, Option<Cause>) {
    let mut report = run();
    let decode = |report: &Report| report.cells.iter().position(|cell| cell.phase == Phase::Decode).unwrap();
    let at = decode(&report);
    change(&mut report.cells[at]);
    let mut report = saved::parse(&saved::write(&report).unwrap()).unwrap();
    judge::recompute(&mut report);
    recheck(&mut report);
    let cell = &report.cells[decode(&report)];
    assert!(cell.status != Status::Ok && !of_report(&report).valid, "{:?}", cell.status);
    (cell.status, cell.reason.clone())
}

fn rule(change: impl Fn(&mut CellResult)) -> Rule {
    match doctored(change) {
        (Status::Invalid, Some(Cause::Inconsistent { rule, .. })) => rule,
        other => panic!("{other:?}"),
    }
}

fn each_block(change: impl Fn(&mut Block)) -> impl Fn(&mut CellResult) {
    move |cell| cell.blocks.iter_mut().for_each(&change)
}

/// Every time of a block, which stays one by its own clocks.
fn slower(block: &mut Block, factor: f64) {
    block.step_ns.iter_mut().chain(&mut block.interval_ns).for_each(|time| *time *= factor);
    block.wall_ns *= factor;
    block.timeline_ns = block.timeline_ns.map(|ns| ns * factor);
}

#[test]
fn runs_as_they_were_saved_pass() {
    for mut report in [run(), samples::saved("run-scripted")] {
        let before: Vec<Status> = report.cells.iter().map(|cell| cell.status).collect();
        judge::recompute(&mut report);
        recheck(&mut report);
        for (cell, before) in report.cells.iter().zip(before) {
            assert_eq!(cell.status, before, "{}: {:?}", cell.id, cell.reason);
        }
    }
}

#[test]
fn times_beyond_the_ceilings_are_invalid() {
    let (status, reason) = doctored(each_block(|block| slower(block, 1e-4)));
    assert_eq!(status, Status::Invalid);
    assert!(reason.is_some(), "{reason:?}");
}

#[test]
fn times_cut_in_half_by_hand_are_invalid_wherever_the_file_is_opened() {
    let mut report = run();
    // The honest run reaches 80 % of its ceiling.
    for cell in report.cells.iter_mut().filter(|cell| cell.phase == Phase::Decode) {
        let share = cell.fraction_of_ceiling.unwrap();
        cell.blocks.iter_mut().for_each(|block| slower(block, share / 0.8));
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("result.json");
    let saved = |report: &Report| {
        std::fs::write(&path, saved::write(report).unwrap()).unwrap();
        let report = crate::analysis::opened::report(&path).unwrap();
        let cell = report.cells.iter().find(|cell| cell.phase == Phase::Decode).unwrap();
        (cell.status, cell.reason.clone(), of_report(&report).verdict())
    };
    let (honest, reason, _) = saved(&report);
    assert_eq!(honest, Status::Ok, "{reason:?}");
    for cell in &mut report.cells {
        cell.blocks.iter_mut().for_each(|block| slower(block, 0.5));
        // Longer blocks of the same steps, so that no other rule has a part in it.
        for block in &mut cell.blocks {
            for times in [&mut block.step_ns, &mut block.interval_ns] {
                let more: Vec<f64> = times.iter().map(|time| time * 1.000_1).collect();
                times.extend(more);
            }
            block.wall_ns = block.interval_ns.iter().sum();
            block.timeline_ns = Some(block.wall_ns);
        }
    }
    let (status, reason, verdict) = saved(&report);
    assert_eq!((status, verdict), (Status::Invalid, crate::analysis::ChecklistVerdict::Invalid));
    assert!(matches!(reason, Some(Cause::AboveReadCeiling { share }) if share > 1.5), "{reason:?}");
}

#[test]
fn bytes_cut_in_half_with_the_times_are_those_of_no_such_model() {
    let (status, reason) = doctored(|cell| {
        cell.bytes.weights.0 /= 2;
        cell.blocks.iter_mut().for_each(|block| slower(block, 0.6));
    });
    assert_eq!(status, Status::Invalid);
    assert!(matches!(reason, Some(Cause::WeightsSize { .. })), "{reason:?}");
}

#[test]
fn a_gpu_of_a_group_reads_its_part_and_the_ranks_of_a_host_read_all() {
    let report = run();
    let mut cell = report.cells.into_iter().find(|cell| cell.phase == Phase::Decode).unwrap();
    cell.engine = "native-tp3".into();
    cell.bytes.weights.0 /= 3;
    let found = |on_host| lighter(&cell, &report.model.architecture, on_host, &mut Ledgers::new());
    assert!(matches!(found(true), Some(Cause::WeightsSize { .. })), "{:?}", found(true));
    assert_eq!(found(false), None);
}

#[test]
fn a_protocol_is_what_its_parameters_say_and_not_its_name() {
    let smoke = ProtocolSummary {
        min_blocks: 1,
        max_blocks: 1,
        block_min_steps: 1,
        block_min_seconds: 0.0,
        target_half_width: f64::MAX,
        ..samples::protocol_named("full")
    };
    let mut report = run();
    report.protocol = Some(smoke);
    for cell in &mut report.cells {
        cell.blocks.truncate(1);
    }
    judge::recompute(&mut report);
    recheck(&mut report);
    assert!(report.cells.iter().all(|cell| cell.status == Status::Smoke), "{:?}", report.cells[0].status);
    // One block shows no interval, whatever width is asked for; and without a protocol the full one is asked for.
    for protocol in [Some(ProtocolSummary { min_blocks: 1, ..samples::protocol_named("full") }), None] {
        let mut report = run();
        report.protocol = protocol;
        report.cells.iter_mut().for_each(|cell| cell.blocks.truncate(1));
        judge::recompute(&mut report);
        recheck(&mut report);
        assert!(report.cells.iter().all(|cell| cell.status == Status::NotConverged));
    }
}

#[test]
fn intervals_hold_their_device_spans_and_make_up_the_block() {
    let shorter = each_block(|block| block.interval_ns.iter_mut().for_each(|time| *time *= 0.9));
    assert_eq!(rule(shorter), Rule::IntervalsAndSpans);
    // A span of half the time is below the floor, too: its marks are not where the work is.
    let (status, reason) = doctored(each_block(|block| block.step_ns.iter_mut().for_each(|t| *t *= 0.5)));
    assert!(status == Status::Invalid && matches!(reason, Some(Cause::WorkUnseen { .. })), "{reason:?}");
    let mut shorter = run();
    let ceilings = shorter.ceilings.as_mut().unwrap();
    ceilings.read_bytes_per_s.median *= 4.0;
    ceilings.read_bytes_per_s.high *= 4.0;
    ceilings.read_bytes_per_s.low *= 4.0;
    let cell = shorter.cells.iter_mut().find(|cell| cell.phase == Phase::Decode).unwrap();
    cell.blocks.iter_mut().flat_map(|block| &mut block.step_ns).for_each(|time| *time *= 0.5);
    judge::recompute(&mut shorter);
    recheck(&mut shorter);
    let cell = shorter.cells.iter().find(|cell| cell.phase == Phase::Decode).unwrap();
    assert!(
        matches!(&cell.reason, Some(Cause::Inconsistent { rule: Rule::IntervalsAndSpans, .. })),
        "{:?}",
        cell.reason
    );
    assert_eq!(
        rule(each_block(|block| block.step_ns.truncate(block.step_ns.len() - 1))),
        Rule::IntervalsAndSpans
    );
    for longer in [1.02, 1.3] {
        assert_eq!(rule(each_block(|block| block.wall_ns *= longer)), Rule::IntervalsAndWall, "{longer}");
        let host = |block: &mut Block| {
            block.wall_ns *= longer;
            block.interval_ns.iter_mut().for_each(|time| *time *= longer);
            // The wait is not between two steps but spread over all of them.
            block.step_ns.iter_mut().for_each(|time| *time *= longer);
        };
        assert_eq!(rule(each_block(host)), Rule::IntervalsAndWall, "{longer}");
    }
}

#[test]
fn what_was_rejected_or_should_have_been_does_not_count() {
    let all = each_block(|block| block.rejected = Some(Cause::ForeignLoad { cores: 0.9 }));
    assert_eq!(rule(all), Rule::AcceptedBlocks);
    assert_eq!(rule(|cell| cell.blocks.clear()), Rule::AcceptedBlocks);
    let record =
        |telemetry: BlockTelemetry| rule(move |cell| cell.blocks[3].telemetry = Some(telemetry.clone()));
    let load = BlockTelemetry { foreign_cores: Some(0.9), ..BlockTelemetry::default() };
    let throttle =
        BlockTelemetry { throttle_reasons: vec!["hw_thermal".to_owned()], ..BlockTelemetry::default() };
    assert_eq!([record(load), record(throttle)], [Rule::AcceptedBlocks; 2]);
    assert_eq!(rule(|cell| cell.blocks[3].canary_ratio = Some(1.4)), Rule::AcceptedBlocks);
}

#[test]
fn load_on_cores_that_the_worker_of_a_gpu_does_not_need_rejects_nothing() {
    let status = |cores: f64, gpu: bool| {
        let mut report = run();
        report.environment.gpu = gpu.then(Default::default);
        report.environment.cpu.logical_cores = 16;
        for block in report.cells.iter_mut().flat_map(|cell| &mut cell.blocks) {
            let load = BlockTelemetry { foreign_cores: Some(cores), ..BlockTelemetry::default() };
            block.telemetry = Some(load);
        }
        recheck(&mut report);
        report.cells[0].status
    };
    assert_eq!([status(0.9, true), status(7.1, true)], [Status::Ok, Status::Invalid]);
    assert_eq!(status(0.9, false), Status::Invalid);
}

#[test]
fn few_noisy_or_drifting_blocks_are_not_converged() {
    let few = doctored(|cell| cell.blocks.truncate(3));
    assert_eq!(few, (Status::NotConverged, Some(Cause::TooFewBlocks { blocks: 3 })));
    let noisy = doctored(|cell| {
        for (number, block) in cell.blocks.iter_mut().enumerate() {
            slower(block, if number % 2 == 0 { 1.25 } else { 1.0 });
        }
    });
    let drifting = doctored(|cell| {
        let blocks = cell.blocks.len() as f64;
        for (number, block) in cell.blocks.iter_mut().enumerate() {
            slower(block, 1.0 + 0.33 * number as f64 / blocks);
        }
    });
    for (status, reason) in [noisy, drifting] {
        assert_eq!(status, Status::NotConverged);
        assert!(matches!(reason, Some(Cause::IntervalTooWide { .. })), "{reason:?}");
    }
}

#[test]
fn one_block_many_times_is_one_block() {
    let copies = |cell: &mut CellResult| {
        let first = cell.blocks[0].clone();
        cell.blocks = (0..12).map(|n| Block { at_ns: f64::from(n) * 1e12, ..first.clone() }).collect();
    };
    assert_eq!(rule(copies), Rule::RepeatedBlocks);
    assert_eq!(rule(|cell| cell.blocks[1].at_ns = cell.blocks[0].at_ns), Rule::RepeatedBlocks);
}

#[test]
fn cells_that_are_noisy_or_not_converged_are_held_against_their_blocks_too() {
    let status = |status: Status, change: &dyn Fn(&mut CellResult)| {
        let mut report = run();
        let cell = report.cells.iter_mut().find(|cell| cell.phase == Phase::Decode).unwrap();
        cell.status = status;
        change(cell);
        judge::recompute(&mut report);
        recheck(&mut report);
        report.cells.iter().find(|cell| cell.phase == Phase::Decode).unwrap().status
    };
    // As --allow-noise leaves a block that other work had rejected.
    let allowed = |cell: &mut CellResult| {
        let load = BlockTelemetry { foreign_cores: Some(0.9), ..BlockTelemetry::default() };
        cell.blocks[3].telemetry = Some(load);
        cell.blocks[3].conditions.push(Cause::ForeignLoad { cores: 0.9 });
    };
    let copied = |cell: &mut CellResult| cell.blocks[1].at_ns = cell.blocks[0].at_ns;
    for known in [Status::Noisy, Status::NotConverged] {
        assert_eq!(status(known, &|_| ()), known);
        assert_eq!(status(known, &copied), Status::Invalid);
    }
    assert_eq!(status(Status::Noisy, &allowed), Status::Noisy);
    assert_eq!(status(Status::NotConverged, &allowed), Status::Invalid);
}

#[test]
fn a_block_of_one_step_is_none() {
    let one = |block: &mut Block| {
        block.step_ns.truncate(1);
        block.interval_ns.truncate(1);
        block.wall_ns = block.interval_ns[0];
        block.timeline_ns = Some(block.wall_ns);
    };
    assert_eq!(rule(each_block(one)), Rule::BlockLength);
}

#[test]
fn a_decode_that_waits_for_the_host_longer_than_its_prefill_takes_is_none() {
    let mut report = run();
    let prefill = report.cells[0].step_ns.as_ref().unwrap().median;
    report.environment.gpu = Some(hbmark_core::result::GpuEnvironment::default());
    for block in &mut report.cells[1].blocks {
        block.interval_ns.iter_mut().for_each(|interval| *interval += 3.0 * prefill);
        block.wall_ns = block.interval_ns.iter().sum();
        block.timeline_ns = Some(block.wall_ns);
    }
    judge::recompute(&mut report);
    recheck(&mut report);
    let phases = |cause: &Cause| matches!(cause, Cause::Inconsistent { rule: Rule::Phases, .. });
    assert!(!report.cells[1].reason.as_ref().is_some_and(phases), "{:?}", report.cells[1].reason);
}

#[test]
fn ladders_and_fits_are_of_the_cells_as_they_are_called_after_the_check() {
    let mut report = run();
    report.cells[1].blocks.truncate(2);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("result.json");
    std::fs::write(&path, saved::write(&report).unwrap()).unwrap();
    let opened = crate::analysis::opened::report(&path).unwrap();
    assert_eq!(opened.cells[1].status, Status::NotConverged);
    assert!(opened.cells[1].all_blocks.is_some());
}

#[test]
fn prefill_and_decode_cannot_be_exchanged() {
    let mut report = run();
    let [prefill, decode] = &mut report.cells[..2] else { panic!("two cells") };
    assert_eq!((prefill.phase, decode.phase), (Phase::Prefill, Phase::Decode));
    std::mem::swap(&mut prefill.blocks, &mut decode.blocks);
    judge::recompute(&mut report);
    recheck(&mut report);
    assert!(report.cells.iter().any(|cell| cell.status == Status::Invalid), "{:?}", report.cells[1].status);
    // With blocks as long as they should be, the times alone show it.
    let mut report = run();
    let slow = report.cells[0].step_ns.as_ref().unwrap().median * 3.0;
    let decode = report.cells[1].tpot_ns.unwrap();
    report.cells[1].blocks.iter_mut().for_each(|block| slower(block, slow / decode));
    let mut at = 0.0;
    for block in &mut report.cells[1].blocks {
        block.at_ns = at;
        at += block.wall_ns * 1.5;
    }
    judge::recompute(&mut report);
    recheck(&mut report);
    assert!(
        matches!(&report.cells[1].reason, Some(Cause::Inconsistent { rule: Rule::Phases, .. })),
        "{:?}",
        report.cells[1].reason
    );
}
