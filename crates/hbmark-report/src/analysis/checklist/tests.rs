//! Questions that pass, fail and go unanswered.

use super::*;
use crate::analysis::recheck::recheck_serving;
use crate::output::{Format, render};
use crate::samples;
use hbmark_core::model::Dtype;
use hbmark_core::result::{Quality, StepBytes, TimeSummary};
use hbmark_core::units::Bytes;

fn cell(phase: Phase, batch: usize) -> CellResult {
    CellResult {
        status: Status::Ok,
        step_ns: Some(TimeSummary { median: 1e6, p99: Some(2e6), ..TimeSummary::default() }),
        bytes: StepBytes { weights: Bytes(2_000_000_000), ..StepBytes::default() },
        memory_peak_bytes: Some(Bytes(3_000_000_000)),
        quality: Some(Quality {
            passed: true,
            check: "logits against f32 reference".to_owned(),
            max_relative_error: Some(1e-3),
            token_hash: None,
        }),
        ..CellResult::blank(phase, "native", Dtype::Bf16, batch, 128)
    }
}

fn good() -> Report {
    let mut report = Report {
        cells: vec![cell(Phase::Prefill, 1), cell(Phase::Decode, 1), cell(Phase::Decode, 4)],
        ..samples::report()
    };
    report.environment.cpu.model = Some("a CPU".to_owned());
    report.environment.cpu.memory_bytes = Some(Bytes(16_000_000_000));
    report.environment.build.version = "0.1.0".to_owned();
    report
}

fn failed(report: &Report) -> Vec<String> {
    let list = of_report(report);
    assert!(!list.valid);
    list.reasons().map(|check| check.question.clone()).collect()
}

#[test]
fn a_full_run_that_says_everything_is_valid() {
    let list = of_report(&good());
    assert!(list.valid, "{list:#?}");
    assert!(list.checks.iter().all(|c| matches!(c.outcome, Passed | Inapplicable)), "{list:#?}");
    assert!(list.checks.iter().all(|c| c.next.is_empty()));
}

#[test]
fn each_essential_question_invalidates_by_itself() {
    let with = |change: &dyn Fn(&mut Report)| {
        let mut report = good();
        change(&mut report);
        failed(&report)
    };
    assert_eq!(with(&|r| r.kind = ReportKind::Predict), ["measured, not computed"]);
    for status in [Status::Disturbed, Status::Predicted, Status::Simulated] {
        assert_eq!(with(&|r| r.cells[1].status = status), ["every cell undisturbed"]);
    }
    assert_eq!(with(&|r| r.cells[1].status = Status::NotConverged), ["enough samples, with their spread"]);
    for absent in [None, Some(" ".to_owned())] {
        assert_eq!(with(&|r| r.environment.cpu.model.clone_from(&absent)), ["hardware named"]);
    }
    assert_eq!(with(&|r| r.model.name = String::new()), ["model named"]);
    assert_eq!(with(&|r| r.ceilings = None)[..1], ["held against measured ceilings"]);
    assert_eq!(with(&|r| r.environment.build.version = String::new()), ["software named"]);
    assert_eq!(with(&|r| r.cells.iter_mut().for_each(|c| c.quality = None)), ["outputs checked"]);
    assert_eq!(with(&|r| r.cells[2].quality = None), ["outputs checked"]);
    let smoke = |r: &mut Report| r.protocol = Some(crate::samples::protocol_named("smoke"));
    assert_eq!(with(&smoke), ["warm-up before the first sample", "enough samples, with their spread"]);
}

#[test]
fn lesser_questions_are_said_and_do_not_invalidate() {
    let mut report = good();
    report.cells.truncate(2);
    report.cells[1].memory_peak_bytes = Some(Bytes(15_900_000_000));
    report.cells[1].bytes.weights = Bytes(50_000_000);
    let list = of_report(&report);
    let said: Vec<&str> =
        list.checks.iter().filter(|c| c.outcome == Failed).map(|c| c.question.as_str()).collect();
    assert!(list.valid);
    assert_eq!(said, ["a sweep, not one point", "memory headroom", "working set beyond the caches"]);
    insta::assert_snapshot!(render([list].as_slice(), Format::Table, false).unwrap());
}

#[test]
fn a_spreadsheet_has_one_table_of_all_questions_with_what_they_are_about() {
    let lists = [of_report(&good()), of_report(&Report { protocol: None, ..good() })];
    let csv = render(lists.as_slice(), Format::Csv, false).unwrap();
    let mut lines = csv.lines();
    assert_eq!(lines.next().unwrap(), "subject,verdict,essential,outcome,question,answer,next");
    let rows: Vec<&str> = lines.collect();
    assert_eq!(rows.len(), lists.iter().map(|list| list.checks.len()).sum::<usize>());
    assert!(rows[0].contains(",VALID,true,ok,\"measured, not computed\","), "{}", rows[0]);
    assert!(rows.last().unwrap().contains(",INCOMPLETE,false,,open-loop load,"), "{csv}");
}

fn foreign(result: &ForeignResult) -> Checklist {
    of_foreign(result, &UserOverrides::default(), None)
}

fn serving(setup: Setup, p99: bool) -> ForeignResult {
    let statistic = if p99 { Statistic::Percentile(9900) } else { Statistic::Mean };
    let value =
        crate::analysis::import::Value { metric: Metric::Tpot, statistic, value: 1e7, key: "k".to_owned() };
    let row = ForeignRow { label: "run".to_owned(), setup, values: vec![value], ..ForeignRow::default() };
    ForeignResult { source: "f.json".to_owned(), format: ForeignFormat::VllmServe, rows: vec![row] }
}

fn outcome(list: &Checklist, question: &str) -> CheckOutcome {
    list.checks.iter().find(|c| c.question == question).unwrap_or_else(|| panic!("{question}")).outcome
}

#[test]
fn a_server_benchmark_is_judged_by_its_load() {
    let load = |setup| outcome(&foreign(&serving(setup, false)), "open-loop load");
    let rate =
        |rate, max_concurrency| Setup { request_rate: Some(rate), max_concurrency, ..Setup::default() };
    assert_eq!(load(rate(Rate::PerSecond(4.0), None)), Passed);
    assert_eq!(load(rate(Rate::PerSecond(4.0), Some(8))), Failed);
    assert_eq!(load(rate(Rate::Unlimited, None)), Failed);
    assert_eq!(load(Setup::default()), NotSaid);
}

#[test]
fn a_tail_of_a_hundred_requests_is_no_tail() {
    let few = Setup { completed: Some(100), ..Setup::default() };
    let samples = |p99| outcome(&foreign(&serving(few.clone(), p99)), "enough samples, with their spread");
    assert_eq!((samples(true), samples(false)), (Failed, Passed));
}

#[test]
fn failed_requests_invalidate() {
    let lost = Setup { requests: Some(320), completed: Some(238), ..Setup::default() };
    assert_eq!(outcome(&foreign(&serving(lost, false)), "every request completed"), Failed);
    let counted = Setup { requests: Some(8), completed: Some(8), failed: Some(0), ..Setup::default() };
    assert_eq!(outcome(&foreign(&serving(counted, false)), "every request completed"), Passed);
}

#[test]
fn a_protocol_by_the_name_of_another_is_what_its_parameters_are() {
    use hbmark_core::result::ProtocolSummary;
    let with = |protocol: ProtocolSummary| {
        let mut report = good();
        report.protocol = Some(protocol);
        of_report(&report)
    };
    let full = ProtocolSummary::full(1);
    // Stricter by another name is no less.
    let custom = ProtocolSummary { name: "custom".into(), min_blocks: 40, ..full.clone() };
    assert!(with(custom).valid);
    for short in [
        ProtocolSummary { min_blocks: 5, ..full.clone() },
        ProtocolSummary { visits: 1, ..full.clone() },
        ProtocolSummary { block_min_steps: 5, ..full.clone() },
        ProtocolSummary { block_min_seconds: 0.0, ..full.clone() },
        ProtocolSummary { target_half_width: 0.05, ..full.clone() },
        ProtocolSummary { canary_tolerance: 1.0, ..full.clone() },
        ProtocolSummary { warmup_min_seconds: f64::NAN, ..full.clone() },
    ] {
        let list = with(short.clone());
        assert_eq!(outcome(&list, "enough samples, with their spread"), Failed, "{short:?}");
    }
    let list = with(ProtocolSummary { target_half_width: 0.05, ..full });
    let evidence = &list.reasons().next().unwrap().evidence;
    assert!(evidence.ends_with("5 % as half-width (full: 1 %)"), "{evidence}");
}

#[test]
fn a_serving_result_is_what_its_kind_says() {
    let mut report = samples::single();
    let of = |report: &ServeReport, question: &str| outcome(&of_serving(report), question);
    assert_eq!(of(&report, "measured, not computed"), Failed);
    // A measured result keeps the model of its own step times, too.
    report.kind = ServeKind::Serve;
    report.environment.cpu.model = Some("a CPU".to_owned());
    report.datasheet = None;
    assert!(report.step_model.is_some());
    assert_eq!(of(&report, "measured, not computed"), Passed);
    assert_eq!(of(&report, "hardware named"), Passed);
    // The machine of a client is not the server's.
    report.kind = ServeKind::ServeLive;
    assert_eq!(of(&report, "measured, not computed"), Passed);
    assert_eq!(of(&report, "hardware named"), NotSaid);
    // Gates that were taken out leave a question.
    assert_eq!(of(&report, "every point valid"), Passed);
    report.points[0].result.as_mut().unwrap().gates.retain(|gate| gate.name != GateName::KeepsUp);
    assert_eq!(of(&report, "every point valid"), NotSaid);
    assert_eq!(of(&report, "figures follow from the requests"), Passed);
    let mut edited = samples::single();
    edited.points[0].result.as_mut().unwrap().served_per_s *= 2.0;
    recheck_serving(&mut edited);
    assert_eq!(of(&edited, "figures follow from the requests"), Failed);
    report.points[0].result.as_mut().unwrap().requests = None;
    assert_eq!(of(&report, "figures follow from the requests"), NotSaid);
}

#[test]
fn a_cold_start_is_judged_by_its_launches_and_by_no_load() {
    use hbmark_core::result::serving::{ColdPhase, ColdStart, Launch};
    let mut report = ServeReport { points: Vec::new(), kind: ServeKind::ServeCold, ..samples::single() };
    report.environment.cpu.model = Some("a CPU".to_owned());
    report.environment.build.version = "0.1.0".to_owned();
    let launch = Launch { phases_ns: vec![1e9], to_first_token_ns: 1e9 };
    let phase = ColdPhase {
        name: "first token".to_owned(),
        holds: "all of it".to_owned(),
        median_ns: 1e9,
        min_ns: 1e9,
        max_ns: 1e9,
        first_launch_ns: 1e9,
    };
    let cold = |launches| ColdStart {
        prompt_tokens: 16,
        launches,
        phases: vec![phase.clone()],
        to_first_token: phase.clone(),
    };
    report.cold_start = Some(cold(vec![launch; 5]));
    let list = of_serving(&report);
    assert_eq!(list.verdict(), ChecklistVerdict::Valid, "{list:#?}");
    assert!(list.valid && list.subject.ends_with(" · 5 starts"), "{}", list.subject);
    for question in ["a point that keeps up", "open-loop load", "every request completed"] {
        assert_eq!(outcome(&list, question), Inapplicable, "{question}");
    }
    report.cold_start = Some(cold(Vec::new()));
    assert_eq!(of_serving(&report).verdict(), ChecklistVerdict::Invalid);
}

#[test]
fn a_comparison_needs_rounds_that_can_decide() {
    use hbmark_core::result::comparison::Pair;
    let mut found: Comparison = samples::saved("comparison");
    let of = |found: &Comparison, question: &str| outcome(&of_comparison(found), question);
    assert_eq!(of(&found, "paired rounds"), Failed);
    found.method = Method::PairedRounds;
    for cell in &mut found.cells {
        cell.pairs = vec![Pair { a_ns: Some(1e6), b_ns: Some(1e6), ..Pair::default() }; 12];
        cell.effect.rounds = 12;
    }
    assert_eq!(of(&found, "paired rounds"), Passed);
    // Rounds are those of the cells, whatever the heading says.
    found.rounds = Some(100);
    found.cells[0].effect.rounds = 1;
    assert_eq!(of(&found, "paired rounds"), Failed);
    found.cells[0].effect.rounds = 12;
    found.settings.alpha = 0.5;
    assert_eq!(of(&found, "paired rounds"), Failed);
    assert_eq!(of(&found, "hardware named"), NotSaid, "{}", found.machine);
    found.machine = "a CPU · 2 cores · hbmark 0.1.0".to_owned();
    assert_eq!(of(&found, "hardware named"), Passed);
    found.protocol = Some("smoke".to_owned());
    assert_eq!(of(&found, "warm-up and samples of each process"), Failed);
}

#[test]
fn what_import_calls_impossible_fails_the_checklist_and_the_condition() {
    use crate::analysis::import::{Imported, parse};
    use crate::analysis::{FailOn, Opened, failures};
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/foreign");
    let text = std::fs::read_to_string(format!("{folder}/vllm-serve-0.25.json")).unwrap();
    let results = parse("vllm.json", text).unwrap();
    let gpu = hbmark_core::ledger::devices::find("h100-sxm").unwrap();
    let small = hbmark_core::model::presets::find("Llama-3.1-70B").unwrap();
    let asked = |time: f64| {
        let mut results = results.clone();
        for row in &mut results[0].rows {
            row.setup.model = None;
            row.setup.dtype = None;
            row.setup.stored_as = None;
            row.problems.clear();
            let times =
                row.values.iter_mut().filter(|value| matches!(value.metric, Metric::Tpot | Metric::Itl));
            times.for_each(|value| value.value = time);
        }
        results
    };
    let given = UserOverrides {
        model: Some(&small.architecture),
        model_name: Some("Llama-3.1-70B"),
        gpu: Some(gpu),
        gpus: Some(1),
        dtype: Some(Dtype::Bf16),
        batch: Some(1),
        context: Some(100),
        ..UserOverrides::default()
    };
    // 141 GB at 3.35 TB/s are 42 ms.
    for (time, passes) in [(6e7, true), (1e6, false)] {
        let results = asked(time);
        let imported = Imported::new(results[0].clone(), &given);
        assert_eq!(imported.objections().next().is_none(), passes, "{:?}", imported.places);
        let list = of_foreign(&results[0], &given, None);
        assert_eq!(outcome(&list, "figures agree") == Passed, passes);
        let opened = Opened::Foreign(results);
        assert_eq!(failures(&opened, &[FailOn::Invalid], &given).is_empty(), passes);
    }
}

#[test]
fn a_point_that_nobody_judged_leaves_the_list_incomplete() {
    let mut report = samples::single();
    report.kind = ServeKind::Serve;
    report.environment.cpu.model = Some("a CPU".to_owned());
    report.environment.build.version = "0.1.0".to_owned();
    let point = |report: &mut ServeReport, passed: Option<bool>, validity| {
        let result = samples::keeps_up(&mut report.points[0], passed);
        (result.validity, result.foreign_cores) = (validity, Some(0.0));
        of_serving(report)
    };
    let asked = |list: &Checklist| {
        let check = list.checks.iter().find(|check| check.question == "a point that keeps up").unwrap();
        (check.outcome, check.evidence.clone(), check.next.clone())
    };
    let good = point(&mut report, Some(true), Validity::Valid);
    assert_eq!(good.verdict(), ChecklistVerdict::Valid, "{good:#?}");
    let open = point(&mut report, None, Validity::Valid);
    assert_eq!(open.verdict(), ChecklistVerdict::Incomplete);
    let (outcome, evidence, _) = asked(&open);
    assert_eq!((outcome, evidence.as_str()), (NotSaid, "0 of 1 point; 0 saturated, 1 not judged"));
    // So few that a version of before kept no gate.
    let result = report.points[0].result.as_mut().unwrap();
    result.gates.retain(|gate| gate.name != GateName::KeepsUp);
    result.measured = 60;
    assert_eq!(of_serving(&report).verdict(), ChecklistVerdict::Incomplete);
    // A point that is invalid is not past saturation.
    let mut late = samples::single();
    let list = point(&mut late, Some(true), Validity::Invalid);
    let (outcome, evidence, next) = asked(&list);
    assert_eq!((outcome, evidence.as_str()), (NotSaid, "0 of 1 point; 0 saturated, 0 not judged, 1 invalid"));
    assert!(!next.contains("saturation"), "{next}");
    let past = point(&mut late, Some(false), Validity::Saturated);
    assert!(asked(&past).2.contains("past saturation"));
}

#[test]
fn a_point_beside_other_work_is_not_valid() {
    let mut report = samples::single();
    report.kind = ServeKind::Serve;
    let of = |report: &ServeReport| outcome(&of_serving(report), "every point undisturbed");
    assert_eq!(of(&report), NotSaid, "nobody looked");
    report.points[0].result.as_mut().unwrap().foreign_cores = Some(0.05);
    assert_eq!(of(&report), Passed);
    report.points[0].drift = Some(1.953);
    assert_eq!(of(&report), Failed);
    report.points[0].drift = Some(1.01);
    report.points[0].result.as_mut().unwrap().foreign_cores = Some(1.5);
    let list = of_serving(&report);
    assert_eq!(
        (list.verdict(), outcome(&list, "every point undisturbed")),
        (ChecklistVerdict::Invalid, Failed)
    );
    let failed = list.reasons().find(|check| check.question == "every point undisturbed").unwrap();
    assert!(failed.evidence.ends_with("other processes kept 1.5 cores busy over the run"), "{failed:?}");
    report.kind = ServeKind::ServeVirtual;
    assert_eq!(of(&report), Inapplicable);
}
