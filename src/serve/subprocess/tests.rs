//! What a supervisor makes of its workers, played by a script that says what a test wants and keeps what it was told.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::sync::LazyLock;

use super::*;
use crate::run::tests::report;
use crate::serve::Mode;
use crate::serve::checkpoint::ServePlan;
use crate::worker::journal::{Header, Journal};
use crate::worker::messages::Program;
use hbmark_core::result::Cause;
use hbmark_traffic::serving_loop::Progress;

struct Unheard;

impl ServeObserver for Unheard {
    fn stage(&mut self, _what: &str) {}
    fn progress(&mut self, _progress: Progress) {}
}

/// A sweep of three rates, computed once.
fn whole() -> ServeReport {
    static WHOLE: LazyLock<ServeReport> = LazyLock::new(|| {
        let values = vec![2.0, 4.0, 8.0];
        report(Mode::Sweep { variable: "rate".into(), values }, 1.0)
    });
    WHOLE.clone()
}

fn asked(ordinal: usize) -> PointKey {
    PointKey { ordinal, label: format!("rate {}", 2 << ordinal), seed: 7, hash: format!("hash {ordinal}") }
}

fn measuring(ordinal: usize) -> ServeUpdate {
    let blank = Point { result: None, ..whole().points[ordinal].clone() };
    ServeUpdate::Measuring { asked: asked(ordinal), blank: Box::new(blank), longest_s: Some(0.001) }
}

fn measured(ordinal: usize) -> ServeUpdate {
    let point = whole().points[ordinal].clone();
    ServeUpdate::Measured(Box::new(RecordedPoint { asked: asked(ordinal), point, lost: false }))
}

fn begun() -> ServeUpdate {
    let started_at = Some("2026-01-01T00:00:00Z".to_owned());
    ServeUpdate::Begun(Box::new(ServeReport { points: Vec::new(), started_at, ..whole() }))
}

/// Workers, each with what it tells and the shell's words for its end.
struct Played(tempfile::TempDir);

impl Played {
    fn new(workers: &[(Vec<ServeUpdate>, &str)]) -> Self {
        Self::with_hello(workers, &WorkerMessage::<ServeUpdate>::Hello { program: Program::this() })
    }

    fn with_hello(workers: &[(Vec<ServeUpdate>, &str)], hello: &impl Serialize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("hello"), line(hello)).unwrap();
        for (number, (tells, end)) in workers.iter().enumerate() {
            let words = tells.iter().map(|told| WorkerMessage::Response(Box::new(told.clone())));
            let words: String = words.map(|word| line(&word)).collect();
            std::fs::write(folder.path().join(format!("words-{number}")), words).unwrap();
            std::fs::write(folder.path().join(format!("end-{number}")), end).unwrap();
        }
        let script = format!(
            "#!/bin/sh\ncd '{}'\nn=$(ls | grep -c '^told-')\n: > told-$n\ncat hello\n\
             while read -r line; do echo \"$line\" >> told-$n; [ \"$line\" = '{{\"request\":\"begin\"}}' ] && break; done\n\
             cat words-$n\n. ./end-$n\n",
            folder.path().display()
        );
        std::fs::write(folder.path().join("script"), script).unwrap();
        // By another process: a file that this one has open for writing cannot be run, and other threads start processes, too.
        let mut install = Command::new("install");
        let done = install.args(["-m", "755", "script", "program"]).current_dir(folder.path()).status();
        assert!(done.unwrap().success());
        Self(folder)
    }

    fn serve(&self) -> Result<Finished, ServeError> {
        self.serve_on(&mut ServeCheckpoint::default())
    }

    fn serve_on(&self, checkpoint: &mut ServeCheckpoint) -> Result<Finished, ServeError> {
        let launch =
            WorkerCommand { program: self.0.path().join("program"), timeout: Duration::from_millis(500) };
        let job = Job { arguments: vec!["serve".into()], command: "hbmark serve".into() };
        serve(&launch, &job, &Interrupts::default(), checkpoint, &mut Unheard)
    }

    fn refused(&self) -> String {
        self.serve().unwrap_err().to_string()
    }

    /// The points that a worker was told of.
    fn told(&self, worker: usize) -> Vec<RecordedPoint> {
        let text = std::fs::read_to_string(Path::join(self.0.path(), format!("told-{worker}"))).unwrap();
        let calls = text
            .lines()
            .map(|line| serde_json::from_str::<SupervisorMessage<Job, WorkerInput>>(line).unwrap());
        let points = calls.filter_map(|call| match call {
            SupervisorMessage::Request(handed) => match *handed {
                WorkerInput::Point(point) => Some(*point),
                _ => None,
            },
            SupervisorMessage::Hello { .. } => None,
        });
        points.collect()
    }
}

/// A message as a line.
fn line(message: &impl Serialize) -> String {
    serde_json::to_string(message).unwrap() + "\n"
}

#[test]
fn a_point_that_costs_two_workers_is_given_up_and_every_worker_knows_what_was_answered() {
    let played = Played::new(&[
        (vec![begun(), measuring(0), measured(0), measuring(1)], "kill -9 $$"),
        (vec![begun(), measuring(1)], "exit 3"),
        (vec![begun(), measuring(2), measured(2), ServeUpdate::Report(Box::new(whole()))], "exit 0"),
    ]);
    let Finished { report, lost, ending } = played.serve().unwrap();
    assert_eq!((lost, ending), (1, Completion::Whole));
    assert_eq!(report.started_at.as_deref(), Some("2026-01-01T00:00:00Z"), "it began with the first worker");
    assert!(report.warnings[0].starts_with("rate 4: the worker was killed by signal 9"));
    assert!(report.warnings[0].ends_with("while measuring rate 4; the point was repeated"));
    assert_eq!(played.told(0), []);
    let ServeUpdate::Measured(first) = measured(0) else { unreachable!("made so") };
    assert_eq!(played.told(1), [*first.clone()]);
    let told = played.told(2);
    assert_eq!((told.len(), &told[0]), (2, &*first));
    assert_eq!((&told[1].asked, &told[1].point.result), (&asked(1), &None));
    let reason = "the worker exited with code 3 while measuring rate 4";
    assert_eq!(told[1].point.not_run, Some(Cause::WorkerLost { detail: reason.into() }));
}

#[test]
fn a_fault_of_the_device_is_tried_again_and_then_kept_as_what_it_gave() {
    let point = whole().points[0].clone();
    let faulty = || ServeUpdate::Faulty {
        asked: asked(0),
        point: Some(Box::new(point.clone())),
        reason: "cuda:0 failed".into(),
    };
    let played = Played::new(&[
        (vec![begun(), measuring(0), faulty()], "exec sleep 100"),
        (vec![begun(), measuring(0), faulty()], "exec sleep 100"),
        (vec![begun(), ServeUpdate::Report(Box::new(whole()))], "exit 0"),
    ]);
    assert_eq!(played.serve().unwrap().lost, 1);
    assert_eq!(played.told(2), [RecordedPoint { asked: asked(0), point, lost: true }]);
}

#[test]
fn two_workers_lost_before_a_point_end_it_with_what_was_measured() {
    let played = Played::new(&[
        (vec![begun(), measuring(0), measured(0)], "exit 4"),
        (vec![begun()], "exit 5"),
        (vec![], "exit 0"),
    ]);
    let Finished { report, lost, ending } = played.serve().unwrap();
    assert_eq!((report.points.len(), lost, ending), (1, 0, Completion::Early));
    let [first, last] = &report.warnings[..2] else { panic!("{:?}", report.warnings) };
    assert_eq!(
        first,
        "the worker exited with code 4 while preparing what follows rate 2; another worker went on"
    );
    assert!(
        last.starts_with("the benchmark ended early: the worker exited with code 5 while starting"),
        "{last}"
    );
}

#[test]
fn two_workers_lost_before_anything_was_measured_are_an_error() {
    let played = Played::new(&[
        (vec![begun(), measuring(0)], "exit 4"),
        (vec![begun()], "exit 5"),
        (vec![], "exit 6"),
    ]);
    assert_eq!(
        played.refused(),
        "the worker exited with code 6 while starting, and so was lost the one before it"
    );
}

#[test]
fn what_the_benchmark_refuses_is_an_error_and_no_loss() {
    let refused = ServeUpdate::Refused { reason: "the KV pool is too small".into() };
    let played = Played::new(&[(vec![begun(), measuring(0), refused], "exit 0")]);
    assert_eq!(played.refused(), "the KV pool is too small");
}

#[test]
fn silence_while_steps_run_is_measured_by_them_and_elsewhere_allowed_for_longer() {
    let load = hbmark_traffic::scheduler::SchedulerLoad::default();
    let at = |done| {
        let elapsed = hbmark_core::units::Nanos(1.0);
        ServeUpdate::Progress(Progress { elapsed, done, total: 10, load, output_tokens: 0 })
    };
    let hangs = || (vec![begun(), measuring(0), at(3)], "exec sleep 100");
    // Behind the last request a second of silence is none.
    let slow = (vec![begun(), measuring(0), at(10)], "sleep 1; cat last");
    let played = Played::new(&[hangs(), hangs(), slow]);
    let last = WorkerMessage::Response(Box::new(ServeUpdate::Report(Box::new(whole()))));
    std::fs::write(played.0.path().join("last"), line(&last)).unwrap();
    assert_eq!(played.serve().unwrap().lost, 1);
    let reason = "no answer while measuring rate 2: silent for 0.5 s, where the longest step should take 0.001 s; the worker was killed";
    assert_eq!(played.told(2)[0].point.not_run, Some(Cause::WorkerLost { detail: reason.into() }));
}

#[test]
fn a_message_without_an_end_is_a_loss_and_another_program_an_error() {
    let played =
        Played::new(&[(vec![begun()], "printf '{\"answ'; exit 0"), (vec![], "exit 0"), (vec![], "")]);
    assert!(
        played.refused().contains("the worker exited with code 0 while starting"),
        "{}",
        played.refused()
    );
    let hello = serde_json::json!({"hello": {"program": {"wire": 0, "version": "0.0.1", "revision": null}}});
    let other = Played::with_hello(&[(vec![], "exit 0")], &hello).refused();
    assert!(other.contains("the worker is hbmark 0.0.1") && other.contains("the program changed"), "{other}");
}

#[test]
fn what_one_process_measured_another_one_hands_on() {
    let folder = tempfile::tempdir().unwrap();
    let plan =
        || ServePlan { arguments: vec!["serve".into()], config: BTreeMap::new(), model_hash: "m".into() };
    let journal = Journal::create(folder.path(), &Header::new("hbmark serve", plan()).unwrap()).unwrap();
    let mut checkpoint = ServeCheckpoint::journaled(journal, Vec::new());
    let first = Played::new(&[
        (vec![begun(), measuring(0), measured(0), measuring(1)], "kill -9 $$"),
        (vec![begun()], "exit 5"),
        (vec![begun()], "exit 6"),
    ]);
    let early = first.serve_on(&mut checkpoint).unwrap();
    assert_eq!((early.report.points.len(), early.ending), (1, Completion::Early));
    drop(checkpoint);

    let later = Some("2026-02-02T00:00:00Z".to_owned());
    let again =
        ServeUpdate::Begun(Box::new(ServeReport { points: Vec::new(), started_at: later, ..whole() }));
    let whole_report = ServeUpdate::Report(Box::new(whole()));
    let second = Played::new(&[(vec![again, measuring(1), measured(1), whole_report], "exit 0")]);
    let found = Journal::reopen::<ServePlan, _>(folder.path()).unwrap();
    assert_eq!(found.header.plan, plan());
    let mut checkpoint = ServeCheckpoint::journaled(found.journal, found.entries);
    assert_eq!(checkpoint.points(), 1);
    let Finished { report, lost, ending } = second.serve_on(&mut checkpoint).unwrap();
    assert_eq!((lost, ending), (0, Completion::Whole));
    let ServeUpdate::Measured(known) = measured(0) else { unreachable!("made so") };
    assert_eq!(second.told(0), [*known]);
    assert_eq!(report.started_at.as_deref(), Some("2026-01-01T00:00:00Z"), "it began with the first process");
    assert!(
        report.warnings[0].ends_with("while measuring rate 4; the point was repeated"),
        "{:?}",
        report.warnings
    );
    assert_eq!(checkpoint.points(), 2);
}
