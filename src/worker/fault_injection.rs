//! Faults planted into a worker, to test the isolation of a run on a healthy machine.
//!
//! Enters: the environment variable [`VARIABLE`], read by workers only, as `KIND@WHERE[:STEPS[:WORKERS]]`. KIND is `abort`, `kill`, `exit=N`,
//! `hang`, `device` or `oom`; WHERE the name of a cell or a point, `begin` or `load`; STEPS how many of its steps go well before (0);
//! WORKERS in how many of the first workers it strikes (all). Leaves: the fault, and a warning in the result that it was planted.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use crate::engine::{
    EngineError, LoadedModel, LoraSession, ScriptedRouting, SequenceId, Session, StepBatch, StepProfiler,
    SyntheticKv, Timeline, forward,
};
use hbmark_core::units::Bytes;

/// Where a fault is asked for.
pub const VARIABLE: &str = "HBMARK_PLANT_FAULT";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FaultKind {
    Abort,
    Kill,
    Exit(i32),
    Hang,
    Device,
    OutOfMemory,
}

/// A fault and its place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InjectedFault {
    text: String,
    kind: FaultKind,
    place: String,
    steps: usize,
    workers: usize,
}

impl InjectedFault {
    /// The fault that the environment names; `Err` where that cannot be parsed.
    pub fn from_environment() -> Result<Option<Self>, String> {
        match std::env::var(VARIABLE) {
            Ok(text) if !text.is_empty() => Self::parse(&text)
                .map(Some)
                .ok_or_else(|| format!("{VARIABLE}={text} is not a fault to plant")),
            _ => Ok(None),
        }
    }

    fn parse(text: &str) -> Option<Self> {
        let (kind, place) = text.split_once('@')?;
        let kind = match kind.split_once('=') {
            Some(("exit", code)) => FaultKind::Exit(code.parse().ok()?),
            Some(_) => return None,
            None => match kind {
                "abort" => FaultKind::Abort,
                "kill" => FaultKind::Kill,
                "hang" => FaultKind::Hang,
                "device" => FaultKind::Device,
                "oom" => FaultKind::OutOfMemory,
                _ => return None,
            },
        };
        let mut parts = place.split(':');
        let place = parts.next()?.to_owned();
        let steps = parts.next().map_or(Some(0), |n| n.parse().ok())?;
        let workers = parts.next().map_or(Some(usize::MAX), |n| n.parse().ok())?;
        parts.next().is_none().then(|| Self { text: text.to_owned(), kind, place, steps, workers })
    }

    /// The fault, if it strikes in the worker after so many others.
    pub fn for_worker(self, before: usize) -> Option<Self> {
        (before < self.workers).then_some(self)
    }

    /// The warning in a result.
    pub fn warning(&self) -> String {
        format!("a fault was planted into the workers of this run: {VARIABLE}={}", self.text)
    }

    /// Strikes here, if this is its place.
    pub fn trigger_at(&self, place: &str) {
        if self.place == place {
            let _ = self.trigger();
        }
    }

    /// Strikes; returns only with an error that an engine could have.
    fn trigger(&self) -> EngineError {
        anstream::eprintln!("{}", self.warning());
        let device = "planted".to_owned();
        match self.kind {
            FaultKind::Abort => std::process::abort(),
            FaultKind::Exit(code) => std::process::exit(code),
            FaultKind::Kill => {
                let _ = signal_hook::low_level::raise(libc::SIGKILL);
                hang()
            }
            FaultKind::Hang => hang(),
            FaultKind::Device => EngineError::Device { device, detail: "an illegal memory access".into() },
            FaultKind::OutOfMemory => {
                EngineError::OutOfMemory { device, detail: "9.00 GB wanted, 2.00 GB free".into() }
            }
        }
    }
}

fn hang() -> ! {
    loop {
        std::thread::park();
    }
}

/// Which cell or point is being measured, and how many of its steps went by.
#[derive(Debug, Clone, Default)]
pub struct FaultSite {
    place: Rc<RefCell<String>>,
    steps: Rc<Cell<usize>>,
}

impl FaultSite {
    /// A visit of a cell or a point begins; an empty name for anything else.
    pub fn enter(&self, place: &str) {
        self.place.replace(place.to_owned());
        self.steps.set(0);
    }
}

/// Wraps a session when it is opened.
pub type SessionWrapper = Box<dyn Fn(Box<dyn Session>) -> Box<dyn Session>>;

/// A session with a planted fault.
pub struct FaultInjectingSession {
    pub session: Box<dyn Session>,
    pub fault: InjectedFault,
    pub now: FaultSite,
}

impl Session for FaultInjectingSession {
    fn step(&mut self, batch: &StepBatch) -> Result<(), EngineError> {
        if *self.now.place.borrow() == self.fault.place {
            let steps = self.now.steps.replace(self.now.steps.get() + 1);
            if steps >= self.fault.steps {
                return Err(self.fault.trigger());
            }
        }
        self.session.step(batch)
    }
    fn model(&self) -> &LoadedModel {
        self.session.model()
    }
    fn release(&mut self, sequence: SequenceId) {
        self.session.release(sequence);
    }
    forward! {
        read_logits(logits: &mut Vec<f32>) -> Result<(), EngineError>;
        next_tokens(tokens: &mut Vec<u32>) -> Result<(), EngineError>;
        timeline() -> &mut dyn Timeline;
        preallocate_blocks(blocks: usize) -> Result<(), EngineError>;
        peak_memory() -> Option<Bytes>;
        lora() -> Option<&mut dyn LoraSession>;
        synthetic_kv() -> Option<&mut dyn SyntheticKv>;
        profiler() -> Option<&mut dyn StepProfiler>;
        bytes_moved() -> Option<Bytes>;
        experts_met() -> Option<f64>;
        threads_away() -> Option<f64>;
        script_experts(script: Option<ScriptedRouting>) -> Option<ScriptedRouting>;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_is_a_kind_a_place_and_two_counts() {
        let fault = InjectedFault::parse("exit=3@decode/stock/f32/b1/c8:2:1").unwrap();
        assert_eq!((fault.kind, fault.place.as_str()), (FaultKind::Exit(3), "decode/stock/f32/b1/c8"));
        assert_eq!((fault.steps, fault.workers), (2, 1));
        assert!(fault.clone().for_worker(0).is_some() && fault.for_worker(1).is_none());
        assert!(InjectedFault::parse("kill@load").unwrap().for_worker(9).is_some());
        assert_eq!(InjectedFault::parse("kill@rate 4").unwrap().place, "rate 4");
        for none in ["kill", "burn@load", "exit=x@load", "kill@load:1:1:1", "kill@load:x"] {
            assert_eq!(InjectedFault::parse(none), None, "{none}");
        }
    }
}
