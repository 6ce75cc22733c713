//! Every case of a ladder, from cells made by hand: 51.4 ms is what the bytes of bf16 take at the ceiling.

use proptest::prelude::*;

use super::*;
use crate::analysis::judge;
use crate::samples;
use hbmark_core::model::Dtype;
use hbmark_core::result::RungKind::{self, Ceiling, Native, Stock};
use hbmark_core::result::{
    Cause, CellResult, Ladder, Phase, Report, Status, StepBytes, TimeScale, TimeSummary,
};
use hbmark_core::units::{Bytes, whole};

const MS: f64 = 1e6;

/// Bytes that take so many milliseconds at the hand-made ceiling of 10 GB/s.
fn lasting(milliseconds: f64) -> StepBytes {
    StepBytes { weights: Bytes(whole(milliseconds * 1e7)), ..StepBytes::default() }
}

/// A decode cell as judged: its interval is ±0.5 %.
fn cell(engine: &str, dtype: Dtype, floor_ms: f64, time_ms: f64) -> CellResult {
    CellResult {
        status: Status::Ok,
        step_ns: Some(TimeSummary { median: time_ms * MS, ..TimeSummary::default() }),
        tpot_ns: Some(time_ms * MS),
        tpot_ci_low_ns: Some(time_ms * MS * 0.995),
        tpot_ci_high_ns: Some(time_ms * MS * 1.005),
        bytes: lasting(floor_ms),
        ..CellResult::blank(Phase::Decode, engine, dtype, 1, 128)
    }
}

fn native(time_ms: f64) -> CellResult {
    cell("native", Dtype::Bf16, 51.4, time_ms)
}

fn stock(time_ms: f64) -> CellResult {
    cell("stock", Dtype::F32, 103.5, time_ms)
}

fn report(cells: Vec<CellResult>) -> Report {
    let mut report = Report { cells, ..samples::report() };
    report.ladders = ladders(&report);
    report
}

fn only(cells: Vec<CellResult>) -> Ladder {
    let mut ladders = report(cells).ladders;
    assert_eq!(ladders.len(), 1);
    ladders.remove(0)
}

/// Name and what it adds, in tenths of a millisecond.
fn adds(ladder: &Ladder) -> Vec<(String, i64)> {
    #[expect(clippy::cast_possible_truncation, reason = "times of milliseconds")]
    let tenths = |ns: f64| (ns / MS * 10.0).round() as i64;
    ladder.rungs.iter().enumerate().map(|(i, r)| (ladder.name(i), tenths(r.step_ns))).collect()
}

fn named(pairs: &[(&str, i64)]) -> Vec<(String, i64)> {
    pairs.iter().map(|&(name, tenths)| (name.to_owned(), tenths)).collect()
}

#[test]
fn a_second_dtype_splits_the_step_into_its_bytes_and_the_rest() {
    // Cells come in the order of the run, rungs in that of the ladder.
    let ladder = only(vec![stock(163.0), native(54.4)]);
    let wanted = [("ceiling", 514), ("native", 30), ("ceiling at f32", 521), ("stock", 565)];
    assert_eq!(adds(&ladder), named(&wanted));
    assert_eq!(
        ladder.story,
        "decode b1 c128: of stock's 163.0 ms, 51.4 ms is the memory floor of bf16, 52.1 ms its f32 weights and KV, \
         3.0 ms native kernel overhead, 56.5 ms candle's kernels and copies"
    );
    assert_eq!(ladder.rungs[2].bytes, Some(Bytes(1_035_000_000)), "a floor has the bytes that must move");
    assert_eq!(ladder.rungs[3].bytes, None, "bytes that were not counted are null");
}

/// A cell beside whose blocks memory was read at so many GB/s; the ceiling is 10 GB/s.
fn beside(cell: CellResult, gigabytes_per_s: f64) -> CellResult {
    CellResult {
        read_beside_bytes_per_s: Some(gigabytes_per_s * 1e9),
        fraction_of_read_beside: Some(0.9),
        ..cell
    }
}

/// A step at 90 % of what the memory gave then has no kernels that lost half of it.
#[test]
fn memory_that_is_slower_than_the_ceiling_is_no_overhead_of_kernels() {
    let ladder = only(vec![beside(native(110.0), 5.0)]);
    assert_eq!(adds(&ladder), named(&[("ceiling", 514), ("read beside", 514), ("native", 72)]));
    assert!((ladder.rungs[1].time_ns - 102.8 * MS).abs() < 1.0);
    assert_eq!(
        ladder.story,
        "decode b1 c128: of native's 110.0 ms, 51.4 ms is the memory floor of bf16, 51.4 ms the memory's other rate \
         (5.00 GB/s read beside native), 7.2 ms native kernel overhead"
    );
    // Nearly the ceiling's rate is the ceiling's.
    let near = only(vec![beside(native(54.4), 9.9)]);
    assert_eq!(adds(&near), named(&[("ceiling", 514), ("native", 30)]));
    // A rate that the steps beat says nothing.
    let beaten = CellResult { fraction_of_read_beside: None, ..beside(native(54.4), 5.0) };
    assert_eq!(adds(&only(vec![beaten])), named(&[("ceiling", 514), ("native", 30)]));
}

/// Each engine stands on the memory of its own minutes; what it adds stays its own.
#[test]
fn each_engine_of_a_ladder_has_the_memory_of_its_own_blocks() {
    let ladder = only(vec![beside(native(110.0), 5.0), beside(stock(200.0), 10.0)]);
    let wanted = [
        ("ceiling", 514),
        ("read beside", 514),
        ("native", 72),
        ("ceiling at f32", 521),
        ("read beside at f32", -514),
        ("stock", 893),
    ];
    assert_eq!(adds(&ladder), named(&wanted));
    let sum: f64 = ladder.rungs.iter().map(|rung| rung.step_ns).sum();
    assert!((sum - 200.0 * MS).abs() < 1.0, "{sum}");
    assert!(
        ladder.story.contains("-51.4 ms the memory's other rate (the ceiling again)"),
        "{}",
        ladder.story
    );
    // An engine whose rate is not known keeps its floor, and no rate is named for it.
    let unknown = CellResult { fraction_of_read_beside: None, ..beside(native(54.4), 5.0) };
    let story = only(vec![unknown, beside(stock(50.0), 10.0)]).story;
    assert!(!story.contains("read beside native"), "{story}");
    // Compute does not wait for memory.
    let prefill = |cell: CellResult| CellResult { flops: 1e12, phase: Phase::Prefill, ..cell };
    let at_peak = only(vec![prefill(beside(native(5_000.0), 5.0))]);
    assert!(!at_peak.rungs.iter().any(|rung| rung.kind == RungKind::ReadBeside), "{:?}", at_peak.rungs);
}

/// Of a mixture, where each engine has the experts that its own steps met.
#[test]
fn floors_of_one_dtype_are_told_apart_by_their_bytes() {
    let ladder = only(vec![native(54.4), cell("stock", Dtype::Bf16, 60.0, 120.0)]);
    let wanted = [("ceiling", 514), ("native", 30), ("ceiling of 600 MB", 86), ("stock", 570)];
    assert_eq!(adds(&ladder), named(&wanted));
}

#[test]
fn engines_of_one_dtype_share_one_floor() {
    let ladder = only(vec![native(54.4), cell("stock", Dtype::Bf16, 51.4, 120.0)]);
    assert_eq!(adds(&ladder), named(&[("ceiling", 514), ("native", 30), ("stock", 656)]));
    assert_eq!(
        ladder.story,
        "decode b1 c128: of stock's 120.0 ms, 51.4 ms is the memory floor of bf16, 3.0 ms native kernel overhead, 65.6 ms \
         candle's kernels and copies"
    );
}

#[test]
fn the_data_sheet_stands_above_the_ceiling() {
    let mut report = report(vec![native(54.4), stock(163.0)]);
    // An H200 reads 480 times as fast as the ceiling of these cells.
    report.datasheet = Some(hbmark_core::ledger::devices::find("h200").unwrap().clone());
    let ladder = ladders(&report).remove(0);
    assert_eq!(ladder.rungs[0].kind, RungKind::Datasheet);
    assert_eq!(adds(&ladder)[..2], named(&[("data sheet", 1), ("ceiling", 513)]));
    assert!(ladder.story.contains("51.4 ms is the memory floor of bf16"), "{}", ladder.story);
}

#[test]
fn one_engine_has_a_ladder_of_its_own() {
    assert_eq!(
        only(vec![stock(163.0)]).story,
        "decode b1 c128: of stock's 163.0 ms, 103.5 ms is the memory floor of f32, 59.5 ms candle's kernels and copies"
    );
    assert_eq!(
        only(vec![native(54.4)]).story,
        "decode b1 c128: of native's 54.40 ms, 51.40 ms is the memory floor of bf16, 3.00 ms native kernel overhead"
    );
}

#[test]
fn a_native_slower_than_stock_is_said() {
    let ladder = only(vec![native(120.0), stock(110.0)]);
    assert_eq!(
        ladder.story,
        "decode b1 c128: native takes 120.0 ms, 68.6 ms over the memory floor of bf16; stock takes 110.0 ms, 6.5 ms over the \
         memory floor of f32; native is 9.1 % slower than stock"
    );
    assert!((ladder.rungs[0].share - 51.4 / 120.0).abs() < 1e-9, "shares are of the slowest time");
    let level = only(vec![native(110.2), stock(110.0)]).story;
    assert!(level.ends_with("0.2 % slower than stock, which is within their intervals"), "{level}");
}

#[test]
fn a_native_that_wins_by_its_dtype_alone_is_not_praised_for_its_kernels() {
    let story = only(vec![native(100.0), stock(110.0)]).story;
    assert!(
        story.ends_with("native is faster by its bf16 alone: over its own floor it loses more than stock"),
        "{story}"
    );
}

#[test]
fn a_step_under_its_floor_beyond_noise_blames_the_ceiling() {
    let ladder = only(vec![native(45.0), stock(163.0)]);
    assert_eq!(
        ladder.story,
        "decode b1 c128: native takes 45.0 ms, 6.4 ms under the memory floor of bf16; stock takes 163.0 ms, 59.5 ms over the \
         memory floor of f32; native is 12.5 % under its floor: the ceiling was measured low"
    );
    assert!(ladder.rungs[1].step_ns < 0.0, "and is shown");
}

#[test]
fn a_step_under_its_floor_within_noise_is_at_its_floor() {
    assert_eq!(
        only(vec![native(51.2)]).story,
        "decode b1 c128: of native's 51.20 ms, 51.40 ms is the memory floor of bf16, -0.20 ms native kernel overhead (within the \
         noise of the ceiling)"
    );
}

#[test]
fn a_step_served_by_the_cache_does_not_blame_the_ceiling() {
    // The hand-made machine has 32 MB of cache; these are 50 MB.
    let story = only(vec![cell("native", Dtype::Bf16, 5.0, 4.0)]).story;
    assert!(
        story.ends_with("native is 20.0 % under its floor: part of what it reads comes from the cache"),
        "{story}"
    );
}

#[test]
fn without_a_ceiling_the_times_stand_alone() {
    let mut report = report(vec![native(54.4), stock(163.0)]);
    report.ceilings = None;
    let ladder = ladders(&report).remove(0);
    assert_eq!(adds(&ladder), named(&[("native", 544), ("stock", 1086)]));
    assert_eq!(
        ladder.story,
        "decode b1 c128: native takes 54.4 ms; stock takes 163.0 ms; no ceiling was measured, so no floor is known"
    );
}

#[test]
fn a_cell_that_cannot_be_trusted_has_no_rung_and_is_named() {
    let broken = |engine: &str, status| CellResult { status, ..cell(engine, Dtype::Bf16, 51.4, 1.0) };
    let ladder = only(vec![broken("native", Status::Invalid), stock(163.0), broken("warp", Status::Failed)]);
    assert_eq!(adds(&ladder), named(&[("ceiling", 1035), ("stock", 595)]));
    assert_eq!(
        ladder.story,
        "decode b1 c128: of stock's 163.0 ms, 103.5 ms is the memory floor of f32, 59.5 ms candle's kernels and copies; \
         decode/native/bf16/b1/c128 is INVALID and has no rung; decode/warp/bf16/b1/c128 failed and has no rung"
    );
    assert!(
        report(vec![broken("native", Status::Invalid)]).ladders.is_empty(),
        "nothing measured, no ladder"
    );
}

/// Candle's forward, its replay and our kernels in one dtype, as on a GPU.
fn whole_ladder(stock_ms: f64, replayed_ms: f64) -> Vec<CellResult> {
    let bf16 = |engine, time_ms| cell(engine, Dtype::Bf16, 51.4, time_ms);
    vec![bf16("stock", stock_ms), bf16("stock-graph", replayed_ms), bf16("native", 54.4)]
}

#[test]
fn candles_step_is_split_into_its_kernels_and_its_launches() {
    let ladder = only(whole_ladder(163.0, 90.0));
    let wanted = [("ceiling", 514), ("native", 30), ("stock-graph", 356), ("stock", 730)];
    assert_eq!(adds(&ladder), named(&wanted));
    let launches = ladder.launches.unwrap();
    assert!((launches.cost_ns - 73.0 * MS).abs() < 1.0 && (launches.share - 73.0 / 163.0).abs() < 1e-12);
    assert_eq!(
        ladder.story,
        "decode b1 c128: of stock's 163.0 ms, 51.4 ms is the memory floor of bf16, 3.0 ms native kernel overhead, \
         35.6 ms candle's kernels and copies, 73.0 ms launches, kernel by kernel; \
         44.8 % of stock is launches (163.0 ms eager less 90.0 ms replayed)"
    );
}

#[test]
fn a_kept_memory_pool_stands_between_the_replay_and_the_forward_as_it_is() {
    let mut cells = whole_ladder(163.0, 90.0);
    cells.push(cell("stock-pool", Dtype::Bf16, 51.4, 150.0));
    let ladder = only(cells);
    let wanted =
        [("ceiling", 514), ("native", 30), ("stock-graph", 356), ("stock-pool", 600), ("stock", 130)];
    assert_eq!(adds(&ladder), named(&wanted));
    assert!(ladder.story.contains("13.0 ms what its memory pool gives back and takes"), "{}", ladder.story);
}

#[test]
fn a_replay_that_is_no_faster_shows_no_launch_cost_and_hides_nothing() {
    let ladder = only(whole_ladder(163.0, 165.0));
    assert!(ladder.launches.unwrap().cost_ns < 0.0);
    assert!(ladder.story.contains("so no launch cost is seen"), "{}", ladder.story);
}

#[test]
fn there_is_no_launch_cost_without_both_at_one_dtype_and_place() {
    let without = |change: fn(&mut CellResult)| {
        let mut cells = whole_ladder(163.0, 90.0);
        change(&mut cells[1]);
        let mut report = Report { cells, ..samples::report() };
        judge::recompute(&mut report);
        (report.ladders[0].launches, report.cells[0].launch_share)
    };
    assert!(without(|_| {}).1.is_some(), "the stock cell has it too");
    assert_eq!(without(|cell| cell.dtype = Dtype::F16), (None, None));
    assert_eq!(without(|cell| cell.context = 256), (None, None));
    assert_eq!(without(|cell| cell.status = Status::Invalid), (None, None));
    let lost = without(|cell| {
        cell.status = Status::Skipped;
        cell.reason = Some(Cause::NotReplayed { engine: "stock-graph".into(), why: "a copy".into() });
        cell.tpot_ns = None;
    });
    assert_eq!(lost, (None, None));
}

#[test]
fn a_disturbed_cell_keeps_its_rung_and_its_status() {
    let ladder = only(vec![CellResult { status: Status::Disturbed, ..native(54.4) }]);
    assert_eq!(ladder.rungs[1].status, Status::Disturbed);
}

#[test]
fn another_engine_stands_after_those_with_a_name() {
    let ladder = only(vec![cell("warp", Dtype::Bf16, 51.4, 200.0), native(54.4)]);
    assert_eq!(
        ladder.rungs.iter().map(|r| r.kind).collect::<Vec<_>>()[1..],
        [RungKind::Native, RungKind::Other]
    );
    assert!(ladder.story.ends_with("145.6 ms what warp adds"), "{}", ladder.story);
}

#[test]
fn several_dtypes_of_an_engine_stand_on_several_ladders() {
    let cells = vec![native(54.4), cell("native", Dtype::F32, 103.5, 107.0), stock(163.0)];
    let ladders = report(cells).ladders;
    let first: Vec<(RungKind, Dtype)> = ladders[0].rungs.iter().map(|r| (r.kind, r.dtype)).collect();
    assert_eq!(
        first,
        [(Ceiling, Dtype::Bf16), (Native, Dtype::Bf16), (Ceiling, Dtype::F32), (Stock, Dtype::F32)]
    );
    let second: Vec<(RungKind, Dtype)> = ladders[1].rungs.iter().map(|r| (r.kind, r.dtype)).collect();
    assert_eq!(second, [(Ceiling, Dtype::F32), (Native, Dtype::F32), (Stock, Dtype::F32)]);
    assert_eq!(ladders.len(), 2);
}

#[test]
fn a_prefill_is_told_by_its_step_and_its_compute_floor() {
    let prefill = |engine: &str, dtype, time_ms: f64| CellResult {
        tpot_ns: None,
        // 5e10 FLOP at the hand-made 1 TFLOP/s of bf16 and 0.5 of f32.
        flops: 5e10,
        ..CellResult { phase: Phase::Prefill, ..cell(engine, dtype, 2.0, time_ms) }
    };
    let ladder = only(vec![prefill("native", Dtype::Bf16, 60.0), prefill("stock", Dtype::F32, 130.0)]);
    assert_eq!(
        ladder.story,
        "prefill b1 c128: of stock's 130.0 ms, 50.0 ms is the compute floor of bf16, 50.0 ms its f32 arithmetic, 10.0 ms \
         native kernel overhead, 20.0 ms candle's kernels and copies"
    );
}

#[test]
fn places_keep_the_order_of_the_cells() {
    let at = |context, engine: &str| CellResult { context, ..cell(engine, Dtype::Bf16, 51.4, 60.0) };
    let ladders =
        report(vec![at(512, "native"), at(64, "native"), at(512, "stock"), at(64, "stock")]).ladders;
    assert_eq!(ladders.iter().map(|l| (l.context, l.rungs.len())).collect::<Vec<_>>(), [(512, 3), (64, 3)]);
}

#[test]
fn a_saved_report_has_its_ladders_computed_anew() {
    let mut old = report(vec![native(54.4), stock(163.0)]);
    let wanted = std::mem::take(&mut old.ladders);
    judge::recompute(&mut old);
    assert_eq!(old.ladders, wanted);
}

#[test]
fn times_beside_each_other_have_one_unit() {
    let show = |longest: f64, time: f64| TimeScale::for_longest(longest).show(time);
    assert_eq!(show(163.0 * MS, 3.04 * MS), "3.0 ms");
    assert_eq!(show(54.4 * MS, 3.04 * MS), "3.04 ms");
    assert_eq!(show(5.4 * MS, 0.021 * MS), "21 µs");
    assert_eq!(show(0.5 * MS, 0.021 * MS), "21.0 µs");
    assert_eq!(show(163.0 * MS, -0.01 * MS), "0.0 ms", "what rounds to nothing has no sign");
}

proptest! {
    #[test]
    fn what_the_rungs_add_is_the_time_of_the_last(
        (native_floor, stock_floor) in (1.0..100.0f64, 1.0..100.0f64),
        (native_ms, stock_ms) in (1.0..200.0f64, 1.0..200.0f64),
    ) {
        let cells =
            vec![cell("native", Dtype::Bf16, native_floor, native_ms), cell("stock", Dtype::F32, stock_floor, stock_ms)];
        let ladder = only(cells);
        let sum: f64 = ladder.rungs.iter().map(|r| r.step_ns).sum();
        prop_assert!((sum / MS - stock_ms).abs() < 1e-6);
        let shares: f64 = ladder.rungs.iter().map(|r| r.share).sum();
        prop_assert!((shares - stock_ms / stock_ms.max(native_ms)).abs() < 1e-9);
        prop_assert!(!ladder.story.contains("NaN"));
    }
}

/// An imported decode of the same step, or of another place with other bytes.
fn external(context: usize, floor_ms: f64, time_ms: f64) -> CellResult {
    CellResult { context, ..cell("vllm", Dtype::Bf16, floor_ms, time_ms) }
}

#[test]
fn an_external_result_is_the_last_rung() {
    let report = report(vec![native(54.4), stock(163.0)]);
    let ladder = with_external(&report, "decode/native/bf16/b1/c128", &[external(128, 51.4, 170.0)]).unwrap();
    let last = ladder.rungs.last().unwrap();
    assert_eq!((last.kind, last.place.as_deref()), (RungKind::External, None));
    assert_eq!(ladder.name(ladder.rungs.len() - 1), "vllm (external)");
    let sum: f64 = ladder.rungs.iter().map(|rung| rung.step_ns).sum();
    assert!((sum - 170.0 * MS).abs() < 1.0, "what the rungs add is the time of the last");
}

#[test]
fn an_external_result_of_another_context_has_a_floor_of_its_own() {
    let report = report(vec![native(54.4)]);
    let far = external(1024, 53.4, 60.4);
    let ladder = with_external(&report, "decode/native/bf16/b1/c128", &[far]).unwrap();
    let wanted = [
        ("ceiling", 514),
        ("native", 30),
        ("ceiling at bf16 b1 c1024", 20),
        ("vllm (external, b1 c1024)", 40),
    ];
    assert_eq!(adds(&ladder), named(&wanted));
    assert_eq!(
        ladder.story,
        "decode b1 c128: of vllm's 60.40 ms, 51.40 ms is the memory floor of bf16, 2.00 ms what a step at b1 c1024 needs \
         beyond that, 3.00 ms native kernel overhead, 4.00 ms the rest of vllm; vllm ran at b1 c1024, not at this place"
    );
}

#[test]
fn contexts_that_differ_slightly_stand_on_one_floor() {
    let mut promised =
        report(vec![CellResult { status: Status::Predicted, predicted_ns: Some(51.4 * MS), ..native(51.4) }]);
    promised.ceilings = None;
    promised.datasheet = Some(hbmark_core::ledger::devices::find("h100-pcie").unwrap().clone());
    let ladder =
        with_external(&promised, "decode/native/bf16/b1/c128", &[external(127, 51.3, 60.0)]).unwrap();
    let floors = ladder.rungs.iter().filter(|r| r.kind == RungKind::Datasheet).count();
    assert_eq!((floors, ladder.rungs.len()), (1, 2), "{:?}", adds(&ladder));
    // A context that is really another is a rung of its own, once, whether longer or shorter.
    for (context, floor_ms) in [(1024, 80.0), (16, 30.0)] {
        let ladder =
            with_external(&promised, "decode/native/bf16/b1/c128", &[external(context, floor_ms, 90.0)])
                .unwrap();
        let floors = ladder.rungs.iter().filter(|r| r.kind == RungKind::Datasheet).count();
        assert_eq!((floors, ladder.rungs.len()), (2, 3), "{:?}", adds(&ladder));
        assert_eq!(ladder.rungs[0].place, None, "the cell's own floor comes first");
    }
}

#[test]
fn an_external_result_under_its_floor_is_doubted() {
    let report = report(vec![native(54.4)]);
    let ladder = with_external(&report, "decode/native/bf16/b1/c128", &[external(128, 51.4, 30.0)]).unwrap();
    assert!(
        ladder.story.contains("its model, storage, batch or device is not what was said"),
        "{}",
        ladder.story
    );
}

#[test]
fn a_ladder_of_a_cell_that_is_not_there_names_those_that_are() {
    let report = report(vec![native(54.4)]);
    let error = with_external(&report, "decode/native/bf16/b9/c128", &[]).unwrap_err().to_string();
    assert_eq!(
        error,
        "the result has no cell `decode/native/bf16/b9/c128`; it has decode/native/bf16/b1/c128"
    );
}

#[test]
fn a_cell_whose_bytes_a_file_does_not_have_has_no_floor() {
    let mut skipped = native(60.0);
    (skipped.status, skipped.bytes) = (Status::Skipped, StepBytes::default());
    let mut report = Report { cells: vec![native(60.0), skipped], ..samples::report() };
    judge::recompute(&mut report);
    assert!(report.cells[0].predicted_ns.is_some_and(|floor| floor > 0.0));
    assert_eq!((report.cells[1].predicted_ns, report.cells[1].predicted_datasheet_ns), (None, None));
}
