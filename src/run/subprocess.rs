//! The rig that is another process, started anew when it is lost.
//!
//! Enters: requests. Leaves: the worker's answers, or [`DeviceResponse::Lost`] with how the worker ended: a signal, an exit code, a silence longer
//! than what it does may take. It opens no device and waits without using the CPU.

use std::time::{Duration, Instant};

use serde::Serialize;

use crate::run::config::RunConfig;
use crate::run::device_worker::{DeviceRequest, DeviceResponse, DeviceWorker, OpenEngines};
use crate::run::{Observer, RunError};
use crate::worker::messages::{SupervisorMessage, WorkerMessage};
use crate::worker::signals::Interrupts;
use crate::worker::spawn::{WorkerCommand, WorkerError, WorkerEvent, Workers, check_same_version};
use hbmark_core::result::Cause;
use hbmark_core::units::Bytes;

/// A step may take so many times what is predicted before its worker is given up: candle's slowest products are about fifty times above
/// their floor.
const STEP_TIMEOUT_FACTOR: f64 = 100.0;

/// Loading, probing and checking announce no prediction and may be silent so many times longer than a step.
const STAGE_TIMEOUT_FACTOR: u32 = 10;

/// Workers that die one after another before anything is open; then the series is given up.
const MAX_CONSECUTIVE_FAILURES: usize = 3;

/// The device, in a child process.
pub struct SubprocessWorker {
    launch: WorkerCommand,
    config: RunConfig,
    interrupts: Interrupts,
    workers: Workers<DeviceResponse>,
    /// The series that the worker has open.
    held: OpenEngines,
    /// Workers lost in a row before their series were open again.
    consecutive_failures: usize,
    open: OpenEngines,
}

impl std::fmt::Debug for SubprocessWorker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Supervised").field("launch", &self.launch).finish_non_exhaustive()
    }
}

impl SubprocessWorker {
    /// A rig whose worker is started with the first order.
    #[must_use]
    pub fn new(launch: WorkerCommand, config: &RunConfig, interrupts: Interrupts) -> Self {
        let workers = Workers::new(launch.program.clone(), None);
        interrupts.on_first(workers.interrupt_sender());
        Self {
            launch,
            config: config.clone(),
            interrupts,
            workers,
            held: OpenEngines::default(),
            consecutive_failures: 0,
            open: OpenEngines::default(),
        }
    }

    /// Starts a worker where there is none, and opens again what it does not hold; `Some` says how that was lost.
    fn ready(&mut self, observer: &mut dyn Observer) -> Result<Option<String>, RunError> {
        if !self.workers.is_running() {
            self.workers.start()?;
            self.held = OpenEngines::default();
            if let Some(lost) = self.handshake(observer)? {
                return Ok(Some(lost));
            }
        }
        for request in self.open.reopen() {
            if self.held.holds(&request) {
                continue;
            }
            match self.exchange(&request, observer)? {
                response @ DeviceResponse::Opened(_) => self.note(&request, &response),
                DeviceResponse::Refused { reason } => {
                    return Ok(Some(format!("{reason} (a new worker for the cells that are left)")));
                }
                DeviceResponse::Lost { reason } | DeviceResponse::Unavailable { reason, .. } => {
                    return Ok(Some(format!("{reason} (a new worker for the cells that are left)")));
                }
                _ => return Err(WorkerError::UnexpectedResponse { doing: request.description() }.into()),
            }
        }
        Ok(None)
    }

    /// Remembers what is open, in this worker and for the next one.
    fn note(&mut self, request: &DeviceRequest, response: &DeviceResponse) {
        self.open.note(request, response);
        self.held.note(request, response);
    }

    fn handshake(&mut self, observer: &mut dyn Observer) -> Result<Option<String>, RunError> {
        let hello = self.workers.hello(self.config.clone());
        match self.round_trip(&hello, "starting", observer)? {
            Ok(word) => Ok(check_same_version(&word).map(|()| None)?),
            Err(lost) => Ok(Some(lost)),
        }
    }

    fn exchange(
        &mut self,
        request: &DeviceRequest,
        observer: &mut dyn Observer,
    ) -> Result<DeviceResponse, RunError> {
        match self.round_trip(
            &SupervisorMessage::<(), _>::Request(Box::new(request.clone())),
            &request.description(),
            observer,
        )? {
            Ok(WorkerMessage::Response(response)) => Ok(*response),
            Ok(_) => Err(WorkerError::UnexpectedResponse { doing: request.description() }.into()),
            Err(detail) => Ok(DeviceResponse::Lost { reason: Cause::WorkerLost { detail } }),
        }
    }

    /// Sends a call and waits for its last word; the inner error says how the worker was lost meanwhile.
    fn round_trip(
        &mut self,
        call: &impl Serialize,
        doing: &str,
        observer: &mut dyn Observer,
    ) -> Result<Result<WorkerMessage<DeviceResponse>, String>, RunError> {
        let timeout = self.launch.timeout;
        let stages = timeout * STAGE_TIMEOUT_FACTOR;
        self.workers.send(call);
        let (mut stage, mut predicted) = (None::<String>, None::<f64>);
        let mut deadline = Instant::now() + stages;
        loop {
            match self.workers.next_event(deadline) {
                WorkerEvent::Message(WorkerMessage::Stage { what }) => {
                    observer.stage(&what);
                    (stage, predicted) = (Some(what), None);
                    deadline = Instant::now() + stages;
                }
                WorkerEvent::Message(WorkerMessage::Loaded { done, total }) => {
                    observer.loaded(Bytes(done), Bytes(total));
                    deadline = Instant::now() + stages;
                }
                WorkerEvent::Message(WorkerMessage::Busy { seconds }) => {
                    predicted = Some(seconds);
                    deadline = Instant::now() + timeout + beyond(seconds);
                }
                WorkerEvent::Message(last @ (WorkerMessage::Hello { .. } | WorkerMessage::Response(_))) => {
                    return Ok(Ok(last));
                }
                WorkerEvent::Ended { how, broken } => {
                    let stage = stage.map_or_else(String::new, |stage| format!(" ({stage})"));
                    return Ok(Err(format!("the worker {how} while {doing}{stage}{broken}")));
                }
                WorkerEvent::Interrupted(signal) => {
                    self.workers.kill();
                    return Err(RunError::Interrupted { signal });
                }
                WorkerEvent::Nothing => {
                    self.workers.kill();
                    let allowed = silence(timeout, stages, predicted);
                    let stage = stage.map_or_else(String::new, |stage| format!(" ({stage})"));
                    return Ok(Err(format!(
                        "no answer while {doing}{stage}: {allowed}; the worker was killed"
                    )));
                }
            }
        }
    }
}

impl DeviceWorker for SubprocessWorker {
    fn execute(
        &mut self,
        request: &DeviceRequest,
        observer: &mut dyn Observer,
    ) -> Result<DeviceResponse, RunError> {
        if let Some(signal) = self.interrupts.signal() {
            self.workers.kill();
            return Err(RunError::Interrupted { signal });
        }
        if matches!(request, DeviceRequest::Release { .. } | DeviceRequest::Close { .. })
            && !self.workers.is_running()
        {
            self.note(request, &DeviceResponse::Done);
            self.consecutive_failures = 0;
            return Ok(DeviceResponse::Done);
        }
        if self.consecutive_failures >= MAX_CONSECUTIVE_FAILURES {
            let detail = format!(
                "{} workers in a row were lost before anything was loaded again",
                self.consecutive_failures
            );
            return Ok(DeviceResponse::Lost { reason: Cause::WorkerLost { detail } });
        }
        if let Some(detail) = self.ready(observer)? {
            self.consecutive_failures += 1;
            self.workers.kill();
            return Ok(DeviceResponse::Lost { reason: Cause::WorkerLost { detail } });
        }
        self.consecutive_failures = 0;
        let response = self.exchange(request, observer)?;
        self.note(request, &response);
        if matches!(response, DeviceResponse::Lost { .. }) || response.is_sticky() {
            self.workers.kill();
        }
        Ok(response)
    }

    fn restore(&mut self, request: &DeviceRequest, response: &DeviceResponse) {
        self.open.note(request, response);
    }

    fn can_restart(&self) -> bool {
        true
    }
}

impl Drop for SubprocessWorker {
    fn drop(&mut self) {
        self.workers.shut_down();
    }
}

/// What a prediction adds to the timeout.
fn beyond(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds * STEP_TIMEOUT_FACTOR).unwrap_or(Duration::from_hours(24))
}

/// A silence that was too long, in words.
fn silence(timeout: Duration, stages: Duration, predicted: Option<f64>) -> String {
    match predicted {
        Some(seconds) => format!(
            "silent for {:.1} s, where {seconds:.3} s are predicted and {:.1} s more than {STEP_TIMEOUT_FACTOR} times that are allowed",
            (timeout + beyond(seconds)).as_secs_f64(),
            timeout.as_secs_f64()
        ),
        None => format!("silent for {:.1} s", stages.as_secs_f64()),
    }
}
