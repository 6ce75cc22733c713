//! The rounds, over results made by hand.

use super::*;
use crate::worker::NoopObserver;
use hbmark_core::model::{Dtype, test_shapes};
use hbmark_core::result::comparison::ComparisonVerdict;
use hbmark_core::result::{Block, Cause, CellResult, Phase, Quality, Report, Status};
use hbmark_report::samples;
use rand::Rng;

const ROUNDS: usize = 12;

fn series(engine: &str, dtype: Dtype) -> EngineVariant {
    EngineVariant { engine: engine.into(), dtype }
}

/// A result of one decode cell a batch, whose steps take `ns` and a little more.
fn result(dtype: Dtype, ns: f64) -> Report {
    let cell = |batch: usize| {
        let time = ns * batch as f64;
        let block = Block {
            step_ns: vec![time * 0.9; 3],
            interval_ns: vec![time, time * 1.001, time * 3.0],
            ..Block::default()
        };
        let rejected = Block {
            interval_ns: vec![1.0; 9],
            rejected: Some(Cause::Canary { ratio: 1.1 }),
            ..block.clone()
        };
        CellResult {
            status: Status::Ok,
            blocks: vec![rejected, block],
            ..CellResult::blank(Phase::Decode, "native", dtype, batch, 64)
        }
    };
    Report { cells: vec![cell(1), cell(4)], ..samples::report() }
}

type Grid<'a> = (&'a [EngineVariant], &'a [matching::GridStep]);

/// Every step of every series.
fn placed((series, steps): Grid<'_>) -> Vec<matching::PlacedStep> {
    series.iter().flat_map(|series| steps.iter().map(|step| (series.clone(), *step))).collect()
}

fn cells(a: Grid<'_>, b: Grid<'_>) -> Vec<ComparedItem> {
    places(&placed(a), &placed(b)).unwrap().into_iter().map(ComparedItem::Cell).collect()
}

fn plan(aa: bool) -> ComparisonPlan {
    let steps = [(Phase::Decode, 1, 64), (Phase::Decode, 4, 64)];
    let sides = [[series("native", Dtype::Bf16)], [series("native", Dtype::Int8)]];
    ComparisonPlan {
        a: "dtype=bf16".into(),
        b: "dtype=int8".into(),
        command: "hbmark compare".into(),
        items: cells((&sides[0], &steps), (&sides[1], &steps)),
        rounds: ROUNDS,
        seed: 42,
        aa,
        settings: Settings::new(0.01, 42),
    }
}

/// A machine that slows down all the time, and on which a launch has its own luck.
struct Machine {
    launches: Vec<Side>,
    random: ChaCha8Rng,
    luck: f64,
    b_takes: f64,
    fails_at: Option<usize>,
    stopped_at: Option<usize>,
    breaks: fn(usize, &mut Report),
}

impl Machine {
    fn new(b_takes: f64) -> Self {
        Self {
            launches: Vec::new(),
            random: ChaCha8Rng::seed_from_u64(5),
            luck: 0.002,
            b_takes,
            fails_at: None,
            stopped_at: None,
            breaks: |_, _| {},
        }
    }
}

impl Runner for Machine {
    fn run(&mut self, launch: &Launch) -> Result<SideResult, CompareError> {
        let side = launch.side;
        self.launches.push(side);
        let count = self.launches.len();
        if self.fails_at == Some(count) {
            return Err(CompareError::NoRounds);
        }
        if self.stopped_at == Some(count) {
            return Err(CompareError::Interrupted { signal: 2 });
        }
        let drift = 1.0 + 0.001 * count as f64;
        let luck = 1.0 + self.luck * (self.random.random::<f64>() - 0.5);
        let (dtype, factor) = if side == Side::A { (Dtype::Bf16, 1.0) } else { (Dtype::Int8, self.b_takes) };
        let mut report = result(dtype, 1e7 * factor * drift * luck);
        (self.breaks)(count, &mut report);
        Ok(SideResult::Steps(Box::new(report)))
    }
}

#[derive(Default)]
struct Launches(String, Vec<String>);

impl Observer for Launches {
    fn stage(&mut self, what: &str) {
        what.clone_into(&mut self.0);
    }
    fn progress(&mut self, done: usize, total: usize, _message: &mut dyn FnMut() -> String) {
        self.1.push(format!("{done}/{total} {}", self.0));
    }
}

fn compare(plan: &ComparisonPlan, machine: &mut Machine) -> Result<Comparison, CompareError> {
    live(plan, machine, &mut NoopObserver).map(|compared| compared.comparison)
}

#[test]
fn a_faster_side_is_found_on_a_machine_that_drifts() {
    let mut machine = Machine::new(0.95);
    let found = compare(&plan(false), &mut machine).unwrap();
    for cell in &found.cells {
        assert_eq!(cell.effect.verdict, ComparisonVerdict::Faster, "{cell:?}");
        assert!((cell.effect.ratio.unwrap() - 0.95).abs() < 0.002, "{cell:?}");
        assert_eq!(cell.pairs.len(), ROUNDS);
    }
    assert_eq!(found.overall.as_ref().unwrap().verdict, ComparisonVerdict::Faster);
    assert_eq!(machine.launches.len(), 2 * ROUNDS);
    // The median of the accepted steps, and not of those rejected.
    assert!(found.cells[0].pairs[0].a_ns.unwrap() > 1e7);
}

#[test]
fn each_round_has_both_sides_in_an_order_that_the_seed_draws() {
    let mut machine = Machine::new(1.0);
    let found = compare(&plan(false), &mut machine).unwrap();
    let launched: Vec<String> =
        machine.launches.chunks(2).map(|pair| pair.iter().map(|side| side.letter()).collect()).collect();
    assert_eq!(launched, found.order);
    assert!(found.order.contains(&"AB".to_owned()) && found.order.contains(&"BA".to_owned()));
    let again = compare(&plan(false), &mut Machine::new(1.0)).unwrap();
    assert_eq!(again.order, found.order);
    let other = ComparisonPlan { seed: 43, ..plan(false) };
    assert_ne!(compare(&other, &mut Machine::new(1.0)).unwrap().order, found.order);
}

#[test]
fn the_same_thing_twice_is_equivalent_and_never_different() {
    let found = compare(&plan(false), &mut Machine::new(1.0)).unwrap();
    assert!(found.cells.iter().all(|cell| cell.effect.verdict == ComparisonVerdict::Equivalent), "{found:?}");
}

/// The longest step of each three takes three times as long on B.
#[test]
fn a_stall_that_the_median_step_does_not_see_is_in_the_time() {
    let mut machine = Machine::new(1.0);
    machine.breaks = |_, report| {
        for cell in report.cells.iter_mut().filter(|cell| cell.dtype == Dtype::Int8) {
            let steps = cell.blocks.iter_mut().flat_map(|block| &mut block.interval_ns);
            steps.enumerate().filter(|(step, _)| step % 3 == 2).for_each(|(_, time)| *time *= 3.0);
        }
    };
    let found = compare(&plan(false), &mut machine).unwrap();
    let verdicts: Vec<_> = found.cells.iter().map(|cell| cell.effect.verdict).collect();
    assert_eq!(verdicts, [ComparisonVerdict::Slower; 2]);
}

#[test]
fn a_against_itself_comes_first_and_its_floor_silences_smaller_effects() {
    let mut restless = Machine { luck: 0.12, ..Machine::new(1.0) };
    let mut launches = Launches::default();
    let found = live(&plan(true), &mut restless, &mut launches).unwrap().comparison;
    assert_eq!(restless.launches.len(), 4 * ROUNDS);
    assert!(restless.launches[..2 * ROUNDS].iter().all(|side| *side == Side::A));
    assert!(launches.1[0].starts_with("0/48 A against A, round 1"), "{}", launches.1[0]);
    let floor = found.floor.as_ref().unwrap();
    assert_eq!(floor.cells.len(), 2);
    let edge = found.cells[0].effect.floor.unwrap();
    assert!(edge > 0.0 && edge < 0.12, "{edge}");
    for cell in &found.cells {
        let size = cell.effect.ratio.unwrap().ln().abs().exp_m1();
        let called = matches!(cell.effect.verdict, ComparisonVerdict::Faster | ComparisonVerdict::Slower);
        assert!(!called || size > cell.effect.floor.unwrap(), "{cell:?}");
    }
    let clear = compare(&plan(true), &mut Machine::new(1.05)).unwrap();
    assert!(clear.cells.iter().all(|cell| cell.effect.verdict == ComparisonVerdict::Slower), "{clear:?}");
}

#[test]
fn a_failing_first_launch_ends_it_and_a_later_one_is_a_lost_round() {
    let mut machine = Machine { fails_at: Some(1), ..Machine::new(1.0) };
    assert!(compare(&plan(false), &mut machine).is_err());
    let mut machine = Machine { fails_at: Some(7), ..Machine::new(0.9) };
    let found = compare(&plan(false), &mut machine).unwrap();
    assert_eq!(found.cells[0].effect.rounds, ROUNDS - 1);
    assert_eq!(found.overall.as_ref().unwrap().rounds, ROUNDS - 1);
    assert!(found.remarks[0].contains("round 4"), "{:?}", found.remarks);
}

#[test]
fn a_comparison_that_can_no_longer_decide_ends_and_says_so() {
    let lost = |after: usize| {
        let breaks: fn(usize, &mut Report) = match after {
            0 => |_, report: &mut Report| report.cells.iter_mut().for_each(|c| c.status = Status::Invalid),
            // One cell goes on, and with it all rounds.
            _ => |_, report: &mut Report| report.cells[1].status = Status::Invalid,
        };
        let mut machine = Machine { breaks, ..Machine::new(0.9) };
        (compare(&plan(false), &mut machine).unwrap(), machine.launches.len())
    };
    let (found, launches) = lost(0);
    // Six rounds are left after the sixth, and seven are needed.
    assert_eq!((launches, found.rounds), (12, Some(6)));
    assert!(
        found.remarks.iter().any(|remark| remark.contains("ended after round 6 of 12")),
        "{:?}",
        found.remarks
    );
    let (found, launches) = lost(1);
    assert_eq!((launches, found.rounds), (24, Some(12)));
    assert_eq!(found.cells[0].effect.verdict, ComparisonVerdict::Faster);
}

#[test]
fn a_cell_with_wrong_outputs_has_no_time_and_says_why() {
    let breaks = |_: usize, report: &mut Report| {
        if report.cells[1].dtype == Dtype::Int8 {
            report.cells[1].status = Status::Invalid;
            report.cells[1].reason = Some(Cause::other("outputs are wrong"));
        }
    };
    let found = compare(&plan(false), &mut Machine { breaks, ..Machine::new(0.5) }).unwrap();
    assert_eq!(found.cells[0].effect.verdict, ComparisonVerdict::Faster);
    assert_eq!(
        (found.cells[1].effect.ratio, found.cells[1].effect.verdict),
        (None, ComparisonVerdict::Inconclusive)
    );
    assert_eq!(found.overall, None);
    assert!(found.remarks[0].contains("outputs are wrong"), "{:?}", found.remarks);
}

#[test]
fn different_tokens_at_one_dtype_are_said_and_at_two_they_are_expected() {
    let side = |dtype, hashes: [&str; 2]| {
        let mut report = result(dtype, 1e7);
        for (cell, hash) in report.cells.iter_mut().zip(hashes) {
            let (check, token_hash) = ("none".to_owned(), Some(hash.to_owned()));
            cell.quality = Some(Quality { passed: true, check, max_relative_error: None, token_hash });
        }
        SideResult::Steps(Box::new(report))
    };
    let remark = |b: &SideResult, dtype: Dtype| {
        let steps = [(Phase::Decode, 1, 64), (Phase::Decode, 4, 64)];
        let items = cells((&[series("native", Dtype::Bf16)], &steps), (&[series("native", dtype)], &steps));
        side(Dtype::Bf16, ["one", "two"]).remarks_beside(b, &items)
    };
    let says = "in 1 of 2 cells the sides generate different tokens";
    assert_eq!(remark(&side(Dtype::Bf16, ["one", "other"]), Dtype::Bf16).as_deref(), Some(says));
    assert_eq!(remark(&side(Dtype::Bf16, ["one", "two"]), Dtype::Bf16), None);
    assert_eq!(remark(&side(Dtype::Int8, ["one", "other"]), Dtype::Int8), None);
}

#[test]
fn sides_of_different_models_are_refused() {
    let breaks = |_: usize, report: &mut Report| {
        if report.cells[0].dtype == Dtype::Int8 {
            report.model.architecture = test_shapes::smollm2_135m();
        }
    };
    let error = compare(&plan(false), &mut Machine { breaks, ..Machine::new(1.0) }).unwrap_err();
    assert!(error.to_string().contains("different models"), "{error}");
}

#[test]
fn series_pair_up_where_it_is_clear_how() {
    let steps = [(Phase::Prefill, 1, 8)];
    let [stock, native, quantised] =
        [series("stock", Dtype::F32), series("native", Dtype::Bf16), series("native", Dtype::Int8)];
    let pairs = |a: &[EngineVariant], b: &[EngineVariant]| -> Option<Vec<(String, String)>> {
        let found = places(&placed((a, &steps)), &placed((b, &steps))).ok()?;
        Some(found.iter().map(|p| (p.a.to_string(), p.b.to_string())).collect())
    };
    let both = [stock.clone(), native.clone()];
    let text = |a: &str, b: &str| (a.to_owned(), b.to_owned());
    assert_eq!(
        pairs(std::slice::from_ref(&stock), std::slice::from_ref(&native)),
        Some(vec![text("stock f32", "native bf16")])
    );
    let turned = [native.clone(), stock.clone()];
    let same = vec![text("stock f32", "stock f32"), text("native bf16", "native bf16")];
    assert_eq!(pairs(&both, &turned), Some(same));
    let by_engine = vec![text("stock f32", "stock f32"), text("native bf16", "native int8")];
    assert_eq!(pairs(&both, &[stock.clone(), quantised.clone()]), Some(by_engine));
    assert_eq!(pairs(&both, std::slice::from_ref(&native)), None);
    assert_eq!(pairs(&[native.clone(), quantised.clone()], &[native, stock]), None);
    assert_eq!(pairs(&both, &[quantised, series("native", Dtype::F32)]), None);
}

#[test]
fn grids_that_differ_are_refused_with_the_step_that_is_missing() {
    let one = [series("native", Dtype::Bf16)];
    let (small, large) = ([(Phase::Decode, 1, 64)], [(Phase::Decode, 1, 64), (Phase::Decode, 4, 64)]);
    let error = places(&placed((&one, &small)), &placed((&one, &large))).unwrap_err().to_string();
    assert_eq!(
        error,
        "B has the cell decode b4 c64 and A has no such step; compare the same phases, batches and contexts"
    );
}

#[test]
fn an_engine_without_a_phase_is_compared_with_itself_in_the_others() {
    let [stock, native] = [series("stock", Dtype::F32), series("native", Dtype::Bf16)];
    let (decode, verify) = ((Phase::Decode, 1, 64), (Phase::Verify { draft_tokens: 3 }, 1, 64));
    let both = [(stock.clone(), decode), (native.clone(), decode), (native.clone(), verify)];
    let found = places(&both, &both).unwrap();
    let names: Vec<String> = found.iter().map(ComparedCell::id_of_a).collect();
    assert_eq!(
        names,
        ["decode/stock/f32/b1/c64", "decode/native/bf16/b1/c64", "verify-3/native/bf16/b1/c64"]
    );
    let error = places(&both[..1], &both[1..]).unwrap_err().to_string();
    assert!(error.starts_with("B has the cell verify-3 b1 c64 and A has no such step"), "{error}");
}

#[test]
fn every_format_prints_what_was_found() {
    use hbmark_report::output::{Format, render};
    let found = compare(&plan(true), &mut Machine::new(0.95)).unwrap();
    let mut found = Comparison { started_at: None, machine: "cpu".into(), ..found };
    found.remarks = vec!["a remark | with a bar".into()];
    insta::assert_snapshot!("comparison_table", render(&found, Format::Table, false).unwrap());
    let csv = render(&found, Format::Csv, false).unwrap();
    let rows: Vec<&str> = csv.lines().collect();
    assert!(
        rows[0]
            .starts_with("of,phase,batch,context,a_engine,a_dtype,b_engine,b_dtype,rounds,a_ns,b_ns,ratio")
    );
    assert!(rows[1].starts_with("a_against_a,decode,1,64,native,bf16,native,bf16,12,"), "{}", rows[1]);
    assert!(rows[4].starts_with("b_against_a,decode,1,64,native,bf16,native,int8,12,"), "{}", rows[4]);
    assert!(rows[6].starts_with("b_against_a,all,,,,,,,12,,,0.95") && rows.len() == 7, "{csv}");
    insta::assert_snapshot!("comparison_md", render(&found, Format::Md, false).unwrap());
    let json = render(&found, Format::Json, false).unwrap();
    let again: Comparison = serde_json::from_str(&json).unwrap();
    assert_eq!(again, found);
}

#[test]
fn what_was_stopped_is_judged_by_its_complete_rounds_and_says_so() {
    // The eleventh launch is the first of the sixth round, the twelfth the second.
    for launch in [11, 12] {
        let mut machine = Machine { stopped_at: Some(launch), ..Machine::new(0.95) };
        let Compared { comparison: found, stopped } =
            live(&plan(false), &mut machine, &mut NoopObserver).unwrap();
        assert_eq!((stopped, found.rounds, found.order.len()), (Some(2), Some(5), 5));
        assert!(found.cells.iter().all(|cell| cell.pairs.len() == 5 && cell.effect.rounds == 5));
        let said = found.remarks.iter().any(|remark| remark.contains("signal 2 after 5 of 12 rounds"));
        assert!(said, "{:?}", found.remarks);
        assert_eq!(machine.launches.len(), launch, "and nothing is launched after that");
    }
}

#[test]
fn what_was_stopped_before_two_rounds_says_how_far_it_came() {
    for (aa, launch, rounds) in [(false, 1, 0), (false, 4, 1), (true, 20, 0), (true, 24 + 4, 1)] {
        let mut machine = Machine { stopped_at: Some(launch), ..Machine::new(0.95) };
        let error = live(&plan(aa), &mut machine, &mut NoopObserver).unwrap_err();
        let wanted = CompareError::Stopped { signal: 2, rounds, wanted: ROUNDS, least: 2 };
        assert_eq!(error.to_string(), wanted.to_string());
        assert_eq!(machine.launches.len(), launch);
    }
}

#[test]
fn a_saved_comparison_with_numbers_that_no_run_has_is_not_believed() {
    let found = compare(&plan(false), &mut Machine::new(1.0)).unwrap();
    let whole = serde_json::to_value(&found).unwrap();
    let file = tempfile::NamedTempFile::new().unwrap();
    let read = |document: &serde_json::Value| {
        std::fs::write(file.path(), document.to_string()).unwrap();
        hbmark_core::result::comparison::read(file.path())
    };
    assert_eq!(read(&whole).unwrap(), Some(found));
    for place in ["/cells/0/batch", "/cells/1/context", "/rounds"] {
        let mut changed = whole.clone();
        *changed.pointer_mut(place).unwrap() = u64::MAX.into();
        let error = read(&changed).unwrap_err().to_string();
        assert!(error.contains("18446744073709551615, and no run has that"), "{error}");
    }
    for place in ["confidence", "alpha", "power", "margin"] {
        for number in [3.0, 1.0, -1.0] {
            let mut changed = whole.clone();
            changed["settings"][place] = number.into();
            assert!(read(&changed).is_err(), "{place} {number}");
        }
    }
}

/// Served requests whose TTFT grows with the launch, and where B takes another time.
struct Servers {
    launches: Vec<Launch>,
    b_takes: f64,
    breaks: fn(Side, &mut hbmark_core::result::serving::ServeResult),
}

impl Runner for Servers {
    fn run(&mut self, launch: &Launch) -> Result<SideResult, CompareError> {
        use hbmark_core::result::serving::Quantiles;
        self.launches.push(launch.clone());
        let mut report = samples::single();
        report.points.truncate(1);
        let result = report.points[0].result.as_mut().unwrap();
        let factor = if launch.side == Side::A { 1.0 } else { self.b_takes };
        let time = 5e6 * factor * (1.0 + 0.001 * self.launches.len() as f64);
        let spread = |time: f64| Quantiles::of((0..200).map(|i| Some(time * (1.0 + 0.001 * f64::from(i)))));
        result.validity = hbmark_core::result::serving::Validity::Valid;
        result.served = result.measured;
        (result.ttft_ns, result.tpot_ns, result.e2e_ns) =
            (Some(spread(time)), Some(spread(2e6)), Some(spread(9e7)));
        (self.breaks)(launch.side, result);
        Ok(SideResult::Served(Box::new(report)))
    }
}

fn served(b_takes: f64, breaks: fn(Side, &mut hbmark_core::result::serving::ServeResult)) -> Comparison {
    let offered = hbmark_core::result::serving::Offered::Rate(4.0);
    let plan = ComparisonPlan { items: served_times(offered), ..plan(false) };
    let mut servers = Servers { launches: Vec::new(), b_takes, breaks };
    let found = live(&plan, &mut servers, &mut NoopObserver).unwrap().comparison;
    // Both sides of a round are asked for the same requests.
    for pair in servers.launches.chunks(2) {
        assert_eq!(pair[0].round, pair[1].round);
    }
    assert_eq!(servers.launches.last().map(|launch| launch.round + 1), found.rounds);
    found
}

#[test]
fn of_two_servers_the_latency_that_differs_is_found_and_no_other() {
    let found = served(1.1, |_, _| ());
    let verdict = |metric: &str| {
        let cell = found.cells.iter().find(|cell| cell.place.id() == metric).unwrap();
        (cell.effect.verdict, cell.pairs.len())
    };
    assert_eq!(verdict("ttft_p50"), (ComparisonVerdict::Slower, ROUNDS));
    assert_eq!(verdict("ttft_p95"), (ComparisonVerdict::Slower, ROUNDS));
    for same in ["tpot_p50", "tpot_p95", "e2e_p50", "e2e_p95"] {
        assert_eq!(verdict(same).0, ComparisonVerdict::Equivalent, "{same}");
    }
    let json = serde_json::to_string(&found).unwrap();
    assert_eq!(serde_json::from_str::<Comparison>(&json).unwrap(), found);
}

#[test]
fn a_server_that_fails_requests_is_said_to_and_is_never_faster_for_it() {
    let found = served(0.5, |side, result| {
        if side == Side::B {
            result.served = result.measured - 1;
            result.ttft_ns.as_mut().unwrap().p95 = Some(f64::INFINITY.into());
        }
    });
    let p95 = found.cells.iter().find(|cell| cell.place.id() == "ttft_p95").unwrap();
    assert_eq!((p95.effect.ratio, p95.effect.verdict), (None, ComparisonVerdict::Inconclusive));
    let said = |what: &str| found.remarks.iter().any(|remark| remark.contains(what));
    assert!(said("requests not served") && said("infinite"), "{:?}", found.remarks);
}

#[test]
fn a_launch_whose_measurement_is_invalid_gives_no_times() {
    let found = served(0.5, |side, result| {
        if side == Side::B {
            result.validity = hbmark_core::result::serving::Validity::Invalid;
        }
    });
    assert!(found.cells.iter().all(|cell| cell.effect.ratio.is_none()));
}
