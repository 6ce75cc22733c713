//! What a benchmark makes of its workers, played by a shell script that replies as a test says and keeps the requests.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::sync::LazyLock;
use std::time::Duration;

use serde::Serialize;

use super::*;
use crate::run::tests::{config as serving_config, model};
use crate::serve::serving_job::ServePlan;
use crate::serve::tests::resumed;
use crate::serve::{Completion, Finished, Mode, benchmark};
use crate::worker::job::Job;
use crate::worker::journal::{Header, Journal};
use crate::worker::messages::{Program, SupervisorMessage, WorkerMessage};
use crate::worker::signals::Interrupts;
use crate::worker::spawn::WorkerCommand;
use crate::worker::{JournaledWorker, NoopObserver, Supervisor};
use hbmark_core::result::serving::SweepVariable;

type Message = WorkerMessage<ServeResponse>;

/// A sweep of three rates.
fn config() -> ServeConfig {
    let values = vec![2.0, 4.0, 8.0];
    ServeConfig { mode: Mode::Sweep { variable: SweepVariable::Rate, values }, ..serving_config() }
}

/// The responses of an undisturbed worker, computed once: an engine and three points.
fn whole(response: usize) -> ServeResponse {
    static WHOLE: LazyLock<Vec<ServeResponse>> = LazyLock::new(|| {
        resumed(&config(), Vec::new()).1.into_iter().map(|exchange| exchange.response).collect()
    });
    WHOLE[response].clone()
}

fn opened_in(year: usize) -> (Vec<Message>, &'static str) {
    let ServeResponse::Opened(mut engine) = whole(0) else { unreachable!("the first response") };
    engine.started_at = Some(format!("{year}-01-01T00:00:00Z"));
    (vec![Message::Response(Box::new(ServeResponse::Opened(engine)))], "")
}

fn opened() -> (Vec<Message>, &'static str) {
    opened_in(2026)
}

fn measured(ordinal: usize) -> (Vec<Message>, &'static str) {
    (vec![Message::Response(Box::new(whole(ordinal + 1)))], "")
}

fn ends(how: &'static str) -> (Vec<Message>, &'static str) {
    (Vec::new(), how)
}

/// Workers, each with what it replies to its requests, and shell commands after each reply.
struct Played(tempfile::TempDir);

impl Played {
    fn new(workers: &[Vec<(Vec<Message>, &str)>]) -> Self {
        Self::with_hello(workers, &Message::Hello { program: Program::this() })
    }

    fn with_hello(workers: &[Vec<(Vec<Message>, &str)>], hello: &impl Serialize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: String, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        write("hello".into(), &line(hello));
        for (worker, replies) in workers.iter().enumerate() {
            for (request, (messages, then)) in replies.iter().enumerate() {
                let messages: String = messages.iter().map(line).collect();
                write(format!("reply-{worker}-{request}"), &messages);
                write(format!("then-{worker}-{request}"), then);
            }
        }
        let script = format!(
            "#!/bin/sh\ncd '{}'\nn=$(ls | grep -c '^asked-')\n: > asked-$n\nread -r line\ncat hello\ni=0\n\
             while read -r line; do echo \"$line\" >> asked-$n; cat reply-$n-$i; . ./then-$n-$i; i=$((i + 1)); done\n",
            folder.path().display()
        );
        write("script".into(), &script);
        // By another process: a file that this one has open for writing cannot be run, and other threads start processes, too.
        let mut install = Command::new("install");
        let done = install.args(["-m", "755", "script", "program"]).current_dir(folder.path()).status();
        assert!(done.unwrap().success());
        Self(folder)
    }

    fn worker(&self) -> Supervisor<ServeJob> {
        let program = self.0.path().join("program");
        let launch = WorkerCommand { program, timeout: Duration::from_millis(500) };
        Supervisor::new(launch, vec!["serve".into()], Interrupts::default())
    }

    fn serve(&self) -> Result<Finished, ServeError> {
        serve_by(&mut self.worker())
    }

    fn refused(&self) -> String {
        self.serve().unwrap_err().to_string()
    }

    /// The labels of the points that a worker was asked for, after it was asked for an engine.
    fn asked(&self, worker: usize) -> Vec<String> {
        let text = std::fs::read_to_string(Path::join(self.0.path(), format!("asked-{worker}"))).unwrap();
        let requests = text.lines().map(|line| {
            match serde_json::from_str::<SupervisorMessage<(), ServeRequest>>(line).unwrap() {
                SupervisorMessage::Request(ServeRequest::Measure(asked)) => asked.key.label,
                SupervisorMessage::Request(other) => ServeJob::description(&other),
                SupervisorMessage::Hello { .. } => unreachable!("read before"),
            }
        });
        let mut requests: Vec<String> = requests.collect();
        assert_eq!(requests.remove(0), "loading weights and timing steps");
        requests
    }
}

fn serve_by(worker: &mut dyn Worker<ServeJob>) -> Result<Finished, ServeError> {
    benchmark(worker, &config(), Some(&model()), "hbmark serve", &mut NoopObserver)
}

/// A message as a line.
fn line(message: &impl Serialize) -> String {
    serde_json::to_string(message).unwrap() + "\n"
}

#[test]
fn a_point_that_costs_two_workers_is_given_up_and_the_others_are_measured_once() {
    let played = Played::new(&[
        vec![opened(), measured(0), ends("kill -9 $$")],
        vec![opened_in(2027), ends("exit 3")],
        vec![opened_in(2028), measured(2)],
    ]);
    let Finished { report, lost, ending } = played.serve().unwrap();
    assert_eq!((lost, ending), (1, Completion::Whole));
    assert_eq!(report.started_at.as_deref(), Some("2026-01-01T00:00:00Z"), "it began with the first worker");
    assert!(report.warnings[0].starts_with("rate 4: the worker was killed by signal 9"));
    assert!(report.warnings[0].ends_with("while measuring rate 4; the point was repeated"));
    let asked: Vec<Vec<String>> = (0..3).map(|worker| played.asked(worker)).collect();
    assert_eq!(asked, [vec!["rate 2", "rate 4"], vec!["rate 4"], vec!["rate 8"]]);
    let [first, given_up, last] = &report.points[..] else { panic!("{:?}", report.points) };
    assert!(first.result.is_some() && given_up.result.is_none() && last.result.is_some());
    let reason = "the worker exited with code 3 while measuring rate 4";
    assert_eq!(given_up.not_run, Some(Cause::WorkerLost { detail: reason.into() }));
}

#[test]
fn a_fault_of_the_device_is_tried_again_and_then_kept_as_what_it_gave() {
    let faulty = || {
        let ServeResponse::Measured { point, .. } = whole(1) else { unreachable!("the second response") };
        let response = ServeResponse::Measured { point, fault: Some("cuda:0 failed".into()) };
        (vec![Message::Response(Box::new(response))], "exec sleep 100")
    };
    let played = Played::new(&[
        vec![opened(), faulty()],
        vec![opened(), faulty()],
        vec![opened(), measured(1), measured(2)],
    ]);
    let Finished { report, lost, .. } = played.serve().unwrap();
    assert_eq!((lost, &report.points[0].not_run), (1, &None));
    assert!(report.points[0].result.is_some());
    assert_eq!(report.warnings[0], "rate 2: cuda:0 failed (while measuring rate 2); the point was repeated");
}

#[test]
fn two_workers_lost_before_a_point_end_it_with_what_was_measured() {
    let played = Played::new(&[
        vec![opened(), measured(0), ends("exit 4")],
        vec![ends("exit 5")],
        vec![ends("exit 6")],
    ]);
    let Finished { report, lost, ending } = played.serve().unwrap();
    assert_eq!((report.points.len(), lost, ending), (1, 0, Completion::Early));
    let [point, first, last] = &report.warnings[..3] else { panic!("{:?}", report.warnings) };
    assert_eq!(point, "rate 4: the worker exited with code 4 while measuring rate 4; the point was repeated");
    assert!(first.starts_with("the worker exited with code 5 while loading weights"), "{first}");
    assert!(first.ends_with("; another worker went on"), "{first}");
    assert!(
        last.starts_with("the benchmark ended early: the worker exited with code 6 while loading"),
        "{last}"
    );
}

#[test]
fn what_the_benchmark_refuses_is_an_error_and_no_loss() {
    let reason = "the KV pool is too small".to_owned();
    let refused = (vec![Message::Response(Box::new(ServeResponse::Refused { reason }))], "");
    assert_eq!(Played::new(&[vec![opened(), refused]]).refused(), "the KV pool is too small");
}

#[test]
fn silence_while_steps_run_is_measured_by_them_and_elsewhere_allowed_for_longer() {
    let busy = |seconds| Message::Busy { seconds };
    let hangs = || vec![opened(), (vec![busy(Some(0.001))], "exec sleep 100")];
    // After the last request a second of silence is none.
    let slow = (vec![busy(Some(0.001)), busy(None)], "sleep 1; cat late");
    let played = Played::new(&[hangs(), hangs(), vec![opened(), slow, measured(2)]]);
    std::fs::write(played.0.path().join("late"), line(&measured(1).0[0])).unwrap();
    let Finished { report, lost, .. } = played.serve().unwrap();
    assert_eq!(lost, 1);
    let reason = "no answer while measuring rate 2: silent for 0.5 s, where 0.001 s are predicted and 0.5 s more than 10 times \
                  that are allowed; the worker was killed";
    assert_eq!(report.points[0].not_run, Some(Cause::WorkerLost { detail: reason.into() }));
    assert!(report.points[1].result.is_some());
}

#[test]
fn a_message_without_an_end_is_a_loss_and_another_program_an_error() {
    let played = Played::new(&[vec![ends("printf '{\"resp'; exit 0")], vec![ends("exit 0")]]);
    let refused = played.refused();
    assert!(refused.contains("the worker exited with code 0 while loading"), "{refused}");
    let hello = serde_json::json!({"hello": {"program": {"wire": 0, "version": "0.0.1", "revision": null}}});
    let other = Played::with_hello(&[], &hello).refused();
    assert!(other.contains("the worker is hbmark 0.0.1") && other.contains("the program changed"), "{other}");
}

#[test]
fn what_one_process_measured_another_one_goes_on_with() {
    let folder = tempfile::tempdir().unwrap();
    let plan = || ServePlan { arguments: vec!["serve".into()], config: BTreeMap::new(), model: "m".into() };
    let journal = Journal::create(folder.path(), &Header::new("hbmark serve", plan()).unwrap()).unwrap();
    let first = Played::new(&[
        vec![opened(), measured(0), ends("kill -9 $$")],
        vec![ends("exit 5")],
        vec![ends("exit 6")],
    ]);
    let mut worker = JournaledWorker::new(Box::new(first.worker()), journal, Vec::new());
    let early = serve_by(&mut worker).unwrap();
    assert_eq!((early.report.points.len(), early.ending), (1, Completion::Early));
    drop(worker);

    let second = Played::new(&[vec![opened_in(2027), measured(1), measured(2)]]);
    let found = Journal::reopen::<ServePlan, _>(folder.path()).unwrap();
    assert_eq!(found.header.plan, plan());
    let mut worker = JournaledWorker::new(Box::new(second.worker()), found.journal, found.entries);
    let Finished { report, lost, ending } = serve_by(&mut worker).unwrap();
    assert_eq!((report.points.len(), lost, ending), (3, 0, Completion::Whole));
    assert_eq!(second.asked(0), ["rate 4", "rate 8"]);
    assert_eq!(report.started_at.as_deref(), Some("2026-01-01T00:00:00Z"), "it began with the first process");
    assert!(
        report.warnings[0].ends_with("while measuring rate 4; the point was repeated"),
        "{:?}",
        report.warnings
    );
}
