//! Executes requests in a child process, which is started again when it is lost.
//!
//! Enters: requests. Leaves: the child's responses, or a loss with how the child ended: a signal, an exit code, a silence longer than what
//! it does may take. It opens no device and waits without using the CPU.

use std::time::{Duration, Instant};

use serde::Serialize;

use super::job::{Job, OpenRequests, RequestKind, Worker};
use super::messages::{SupervisorMessage, WorkerMessage};
use super::observer::Observer;
use super::signals::Interrupts;
use super::spawn::{WorkerCommand, WorkerError, WorkerEvent, Workers, check_same_version};
use hbmark_core::result::Cause;
use hbmark_core::units::Bytes;

/// Loading, probing and checking announce no prediction and may be silent so many times longer than a step.
const STAGE_TIMEOUT_FACTOR: u32 = 10;

/// Workers that die one after another before anything is open; then requests are lost without a try, until memory is freed.
const MAX_CONSECUTIVE_FAILURES: usize = 3;

/// A job in a child process.
pub struct Supervisor<J: Job> {
    launch: WorkerCommand,
    config: J::Config,
    interrupts: Interrupts,
    workers: Workers<J::Response>,
    /// What the worker has open.
    held: OpenRequests<J>,
    open: OpenRequests<J>,
    /// Workers lost in a row before all was open again.
    consecutive_failures: usize,
    /// Whether the worker executes what was asked for, and is not only made ready.
    executing: bool,
}

impl<J: Job> std::fmt::Debug for Supervisor<J> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Supervisor").field("launch", &self.launch).finish_non_exhaustive()
    }
}

impl<J: Job> Supervisor<J> {
    /// A supervisor whose worker is started with the first request.
    pub fn new(launch: WorkerCommand, config: J::Config, interrupts: Interrupts) -> Self {
        let workers = Workers::new(launch.program.clone(), J::KIND);
        interrupts.on_first(workers.interrupt_sender());
        Self {
            launch,
            config,
            interrupts,
            workers,
            held: OpenRequests::default(),
            open: OpenRequests::default(),
            consecutive_failures: 0,
            executing: false,
        }
    }

    /// Starts a worker where there is none, and opens again what it does not hold; the inner error says how it was lost.
    fn ready(&mut self, observer: &mut dyn Observer) -> Result<Result<(), String>, J::Error> {
        if !self.workers.is_running() {
            self.workers.start()?;
            self.held = OpenRequests::default();
            let hello = self.workers.hello(self.config.clone());
            match self.round_trip(&hello, "starting", observer)? {
                Ok(hello) => check_same_version(&hello)?,
                Err(lost) => return Ok(Err(lost)),
            }
        }
        for request in self.open.missing(&self.held) {
            let lost = match self.exchange(&request, observer)? {
                Ok(response) => {
                    self.note(&request, &response);
                    J::failure(&response)
                }
                Err(lost) => Some(lost),
            };
            if let Some(lost) = lost {
                return Ok(Err(format!("{lost} (in a new worker, for what was left)")));
            }
        }
        Ok(Ok(()))
    }

    /// Remembers what is open, in this worker and for the next one.
    fn note(&mut self, request: &J::Request, response: &J::Response) {
        self.open.note(request, response);
        self.held.note(request, response);
    }

    /// The response to a request; the inner error says how the worker was lost meanwhile.
    fn exchange(
        &mut self,
        request: &J::Request,
        observer: &mut dyn Observer,
    ) -> Result<Result<J::Response, String>, J::Error> {
        let doing = J::description(request);
        match self.round_trip(&SupervisorMessage::<(), _>::Request(request), &doing, observer)? {
            Ok(WorkerMessage::Response(response)) => Ok(Ok(*response)),
            Ok(_) => Err(WorkerError::UnexpectedResponse { doing }.into()),
            Err(lost) => Ok(Err(lost)),
        }
    }

    /// Sends a message and waits for the last one that comes back.
    fn round_trip(
        &mut self,
        message: &impl Serialize,
        doing: &str,
        observer: &mut dyn Observer,
    ) -> Result<Result<WorkerMessage<J::Response>, String>, WorkerError> {
        self.workers.send(message);
        let (mut stage, mut predicted) = (String::new(), None::<f64>);
        loop {
            match self.workers.next_event(Instant::now() + self.patience(predicted)) {
                WorkerEvent::Message(WorkerMessage::Stage { what }) => {
                    observer.stage(&what);
                    (stage, predicted) = (format!(" ({what})"), None);
                }
                WorkerEvent::Message(WorkerMessage::Loaded { done, total }) => {
                    observer.loaded(Bytes(done), Bytes(total));
                }
                WorkerEvent::Message(WorkerMessage::Progress { done, total, message }) => {
                    observer.progress(done, total, &mut || message.clone());
                }
                WorkerEvent::Message(WorkerMessage::Rejected { cause }) => observer.rejected(&cause),
                WorkerEvent::Message(WorkerMessage::Busy { seconds }) => predicted = seconds,
                WorkerEvent::Message(last @ (WorkerMessage::Hello { .. } | WorkerMessage::Response(_))) => {
                    return Ok(Ok(last));
                }
                WorkerEvent::Ended { how, broken } => {
                    return Ok(Err(format!("the worker {how} while {doing}{stage}{broken}")));
                }
                WorkerEvent::Interrupted(signal) => {
                    self.workers.kill();
                    return Err(WorkerError::Interrupted { signal, executing: self.executing });
                }
                WorkerEvent::Nothing => {
                    self.workers.kill();
                    let silence = self.patience(predicted).as_secs_f64();
                    let allowed = predicted.map_or_else(String::new, |seconds| {
                        format!(
                            ", where {seconds:.3} s are predicted and {:.1} s more than {} times that are allowed",
                            self.launch.timeout.as_secs_f64(),
                            J::STEP_TIMEOUT_FACTOR
                        )
                    });
                    return Ok(Err(format!(
                        "no answer while {doing}{stage}: silent for {silence:.1} s{allowed}; the worker was killed"
                    )));
                }
            }
        }
    }

    /// The longest silence that is not a loss.
    fn patience(&self, predicted: Option<f64>) -> Duration {
        let steps = |seconds: f64| {
            Duration::try_from_secs_f64(seconds * J::STEP_TIMEOUT_FACTOR).unwrap_or(Duration::from_hours(24))
        };
        let timeout = self.launch.timeout;
        predicted.map_or(timeout * STAGE_TIMEOUT_FACTOR, |seconds| timeout + steps(seconds))
    }
}

impl<J: Job> Worker<J> for Supervisor<J> {
    fn execute(
        &mut self,
        request: &J::Request,
        observer: &mut dyn Observer,
    ) -> Result<J::Response, J::Error> {
        if let Some(signal) = self.interrupts.signal() {
            self.workers.kill();
            return Err(WorkerError::Interrupted { signal, executing: false }.into());
        }
        if J::kind(request) == RequestKind::Free && !self.workers.is_running() {
            self.note(request, &J::DONE);
            self.consecutive_failures = 0;
            return Ok(J::DONE);
        }
        let lost = |detail| Cause::WorkerLost { detail };
        if self.consecutive_failures >= MAX_CONSECUTIVE_FAILURES {
            let failures = self.consecutive_failures;
            let detail = format!("{failures} workers in a row were lost before anything was loaded again");
            return Ok(J::lost(lost(detail), false));
        }
        if let Err(detail) = self.ready(observer)? {
            self.consecutive_failures += 1;
            self.workers.kill();
            return Ok(J::lost(lost(detail), false));
        }
        self.consecutive_failures = 0;
        self.executing = true;
        let response = self.exchange(request, observer);
        self.executing = false;
        let response = response?.unwrap_or_else(|detail| J::lost(lost(detail), true));
        self.note(request, &response);
        if J::is_sticky(&response) {
            self.workers.kill();
        }
        Ok(response)
    }

    fn restore(&mut self, request: &J::Request, response: &J::Response) {
        self.open.note(request, response);
    }

    fn can_restart(&self) -> bool {
        true
    }

    fn reopened_after(&self) -> Option<&'static str> {
        (self.workers.started() > 1).then_some("a lost worker")
    }
}

impl<J: Job> Drop for Supervisor<J> {
    fn drop(&mut self) {
        self.workers.shut_down();
    }
}
