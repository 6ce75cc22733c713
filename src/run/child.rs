//! The process that owns the device.
//!
//! Enters: calls on stdin. Leaves: words on what was stdout; whatever a library prints there goes to stderr instead. It does nothing
//! unasked and ends when its supervisor does: by the kernel's signal, or at the end of its stdin.

use std::io::Write;
use std::time::Instant;

use crate::measure::protocol::Event;
use crate::run::config::RunConfig;
use crate::run::device_worker::{DeviceRequest, DeviceResponse, DeviceWorker};
use crate::run::{InProcessWorker, Observer, RunError};
use crate::worker::child::{Handshake, WorkerExit, handshake};
use crate::worker::fault_injection::{FaultInjectingSession, FaultSite, InjectedFault};
use crate::worker::messages::{self, SupervisorMessage, WorkerMessage};
use hbmark_core::units::Bytes;

/// Words that only say that all is well are not sent more often than this.
const HEARTBEAT_SECONDS: f64 = 1.0;

/// Serves requests until stdin ends.
///
/// # Errors
/// When it was not started by a supervisor, or the pipes break.
pub fn serve() -> Result<(), WorkerExit> {
    let Some(Handshake { mut input, mut out, config, workers }) = handshake::<RunConfig>()? else {
        return Ok(());
    };
    crate::engine::threads::limit(config.threads);
    work(&mut input, &mut out, &config, workers)
}

fn work(
    input: &mut impl std::io::BufRead,
    out: &mut impl Write,
    config: &RunConfig,
    workers: usize,
) -> Result<(), WorkerExit> {
    let model = crate::weights::open(&config.model, config.revision.as_deref(), config.seed);
    let mut worker =
        model.map(|model| InProcessWorker::new(config, model.into())).map_err(|error| error.to_string());
    let planted = InjectedFault::from_environment();
    let now = FaultSite::default();
    let fault = planted.as_ref().ok().cloned().flatten().and_then(|fault| fault.for_worker(workers));
    if let (Ok(worker), Some(fault)) = (&mut worker, &fault) {
        worker.wrap({
            let (fault, now) = (fault.clone(), now.clone());
            Box::new(move |session| {
                Box::new(FaultInjectingSession { session, fault: fault.clone(), now: now.clone() })
            })
        });
    }
    while let Some(call) = messages::read(input)? {
        let SupervisorMessage::<(), _>::Request(request) = call else { return Err(WorkerExit::NotAWorker) };
        if let Some(fault) = &fault {
            trigger(fault, &request);
            if let DeviceRequest::Visit { visit, .. } = &*request {
                now.enter(&visit.cell.id());
            }
        }
        let mut told =
            ForwardingObserver { out: &mut *out, last: Instant::now(), promised: -1.0, broken: None };
        let response = match (&mut worker, &planted) {
            (_, Err(reason)) => DeviceResponse::Refused { reason: reason.clone() },
            (Err(reason), _) => DeviceResponse::Refused { reason: reason.clone() },
            (Ok(worker), Ok(_)) => response(worker, &request, &mut told),
        };
        if let Some(broken) = told.broken {
            return Err(broken.into());
        }
        let response = match (response, &planted) {
            (DeviceResponse::Probed(mut begun), Ok(Some(fault))) => {
                begun.warnings.push(fault.warning());
                DeviceResponse::Probed(begun)
            }
            (response, _) => response,
        };
        messages::write(out, &WorkerMessage::Response(Box::new(response)))?;
    }
    Ok(())
}

/// Lets a fault strike that is meant for an order as a whole.
fn trigger(fault: &InjectedFault, request: &DeviceRequest) {
    match request {
        DeviceRequest::Probe => fault.trigger_at("begin"),
        DeviceRequest::Open { .. } => fault.trigger_at("load"),
        _ => {}
    }
}

fn response(
    worker: &mut InProcessWorker,
    request: &DeviceRequest,
    told: &mut dyn Observer,
) -> DeviceResponse {
    worker
        .execute(request, told)
        .unwrap_or_else(|error: RunError| DeviceResponse::Refused { reason: error.to_string() })
}

/// Sends on what an observer is told.
struct ForwardingObserver<'a, W: Write> {
    out: &'a mut W,
    last: Instant,
    /// The longest silence that was announced last.
    promised: f64,
    broken: Option<std::io::Error>,
}

impl<W: Write> ForwardingObserver<'_, W> {
    fn send(&mut self, word: &WorkerMessage<DeviceResponse>) {
        if self.broken.is_none() {
            self.broken = messages::write(self.out, word).err();
        }
        self.last = Instant::now();
    }

    fn quiet(&self) -> bool {
        self.last.elapsed().as_secs_f64() < HEARTBEAT_SECONDS
    }
}

impl<W: Write> Observer for ForwardingObserver<'_, W> {
    fn stage(&mut self, what: &str) {
        self.send(&WorkerMessage::Stage { what: what.to_owned() });
    }
    fn loaded(&mut self, done: Bytes, total: Bytes) {
        // A bar wants a few words a second.
        if self.last.elapsed().as_secs_f64() >= HEARTBEAT_SECONDS / 10.0 || done >= total {
            self.send(&WorkerMessage::Loaded { done: done.0, total: total.0 });
        }
    }
    fn event(&mut self, _event: Event<'_>) {}
    fn busy(&mut self, seconds: f64) {
        // A prediction that is no number is none.
        let seconds = if seconds.is_finite() { seconds } else { 0.0 };
        if seconds > self.promised || !self.quiet() {
            self.promised = seconds;
            self.send(&WorkerMessage::Busy { seconds });
        }
    }
}
