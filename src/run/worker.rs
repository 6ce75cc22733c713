//! The process that owns the device.
//!
//! Enters: calls on stdin. Leaves: words on what was stdout; whatever a library prints there goes to stderr instead. It does nothing
//! unasked and ends when its supervisor does: by the kernel's signal, or at the end of its stdin.

use std::io::Write;
use std::time::Instant;

use crate::measure::protocol::Event;
use crate::run::config::RunConfig;
use crate::run::rig::{Answer, Order, Rig};
use crate::run::{Local, Observer, RunError};
use crate::worker::child::{Greeted, WorkerEnd, greet};
use crate::worker::fault::{Now, Planted, Suffering};
use crate::worker::wire::{self, Call, Word};
use hbmark_core::units::Bytes;

/// Words that only say that all is well are not sent more often than this.
const QUIET_SECONDS: f64 = 1.0;

/// Serves orders until stdin ends.
///
/// # Errors
/// When it was not started by a supervisor, or the pipes break.
pub fn serve() -> Result<(), WorkerEnd> {
    let Some(Greeted { mut input, mut out, config, workers }) = greet::<RunConfig>()? else { return Ok(()) };
    crate::engine::threads::limit(config.threads);
    work(&mut input, &mut out, &config, workers)
}

fn work(
    input: &mut impl std::io::BufRead,
    out: &mut impl Write,
    config: &RunConfig,
    workers: usize,
) -> Result<(), WorkerEnd> {
    let model = crate::weights::open(&config.model, config.revision.as_deref(), config.seed);
    let mut rig = model.map(|model| Local::new(config, model.into())).map_err(|error| error.to_string());
    let planted = Planted::from_environment();
    let now = Now::default();
    let fault = planted.as_ref().ok().cloned().flatten().and_then(|fault| fault.of_worker(workers));
    if let (Ok(rig), Some(fault)) = (&mut rig, &fault) {
        rig.wrap({
            let (fault, now) = (fault.clone(), now.clone());
            Box::new(move |session| Box::new(Suffering { session, fault: fault.clone(), now: now.clone() }))
        });
    }
    while let Some(call) = wire::read(input)? {
        let Call::<(), _>::Order(order) = call else { return Err(WorkerEnd::NotAsked) };
        if let Some(fault) = &fault {
            strike(fault, &order);
            if let Order::Visit { visit, .. } = &*order {
                now.begins(&visit.cell.id());
            }
        }
        let mut told = Told { out: &mut *out, last: Instant::now(), promised: -1.0, broken: None };
        let answer = match (&mut rig, &planted) {
            (_, Err(reason)) => Answer::Refused { reason: reason.clone() },
            (Err(reason), _) => Answer::Refused { reason: reason.clone() },
            (Ok(rig), Ok(_)) => answer(rig, &order, &mut told),
        };
        if let Some(broken) = told.broken {
            return Err(broken.into());
        }
        let answer = match (answer, &planted) {
            (Answer::Begun(mut begun), Ok(Some(fault))) => {
                begun.warnings.push(fault.warning());
                Answer::Begun(begun)
            }
            (answer, _) => answer,
        };
        wire::write(out, &Word::Answer(Box::new(answer)))?;
    }
    Ok(())
}

/// Lets a fault strike that is meant for an order as a whole.
fn strike(fault: &Planted, order: &Order) {
    match order {
        Order::Begin => fault.strike_at("begin"),
        Order::Open { .. } => fault.strike_at("load"),
        _ => {}
    }
}

fn answer(rig: &mut Local, order: &Order, told: &mut dyn Observer) -> Answer {
    rig.ask(order, told).unwrap_or_else(|error: RunError| Answer::Refused { reason: error.to_string() })
}

/// Sends on what an observer is told.
struct Told<'a, W: Write> {
    out: &'a mut W,
    last: Instant,
    /// The longest silence that was announced last.
    promised: f64,
    broken: Option<std::io::Error>,
}

impl<W: Write> Told<'_, W> {
    fn say(&mut self, word: &Word<Answer>) {
        if self.broken.is_none() {
            self.broken = wire::write(self.out, word).err();
        }
        self.last = Instant::now();
    }

    fn quiet(&self) -> bool {
        self.last.elapsed().as_secs_f64() < QUIET_SECONDS
    }
}

impl<W: Write> Observer for Told<'_, W> {
    fn stage(&mut self, what: &str) {
        self.say(&Word::Stage { what: what.to_owned() });
    }
    fn loaded(&mut self, done: Bytes, total: Bytes) {
        // A bar wants a few words a second.
        if self.last.elapsed().as_secs_f64() >= QUIET_SECONDS / 10.0 || done >= total {
            self.say(&Word::Loaded { done: done.0, total: total.0 });
        }
    }
    fn event(&mut self, _event: Event<'_>) {}
    fn busy(&mut self, seconds: f64) {
        // A prediction that is no number is none.
        let seconds = if seconds.is_finite() { seconds } else { 0.0 };
        if seconds > self.promised || !self.quiet() {
            self.promised = seconds;
            self.say(&Word::Busy { seconds });
        }
    }
}
