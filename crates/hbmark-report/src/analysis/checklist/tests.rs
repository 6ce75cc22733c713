//! Questions that pass, fail and go unanswered.

use super::*;
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
    assert_eq!(with(&|r| r.cells[1].status = Status::Disturbed), ["every cell undisturbed"]);
    assert_eq!(with(&|r| r.cells[1].status = Status::NotConverged), ["enough samples, with their spread"]);
    assert_eq!(with(&|r| r.environment.cpu.model = None), ["hardware named"]);
    assert_eq!(with(&|r| r.environment.build.version = String::new()), ["software named"]);
    assert_eq!(with(&|r| r.cells.iter_mut().for_each(|c| c.quality = None)), ["outputs checked"]);
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

fn foreign(result: &ForeignResult) -> Checklist {
    of_foreign(result, &UserOverrides::default(), None)
}

fn serving(setup: Setup, p99: bool) -> ForeignResult {
    let statistic = if p99 { Statistic::Percentile(990) } else { Statistic::Mean };
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
