//! Where the time of a step goes: floors and engines in one column.

use serde::{Deserialize, Serialize};

use super::EngineKind;
use super::cell::{Phase, Status};
use crate::model::Dtype;
use crate::units::Bytes;

/// The kind of a rung, in the order of the ladder, from the floor up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum RungKind {
    /// The floor by the data sheet's bandwidth and peak.
    Datasheet,
    /// The floor by the bandwidth and peak measured in this run.
    Ceiling,
    /// The floor by the rate at which memory was read beside the blocks, where that is not the ceiling's.
    ReadBeside,
    /// Our own kernels.
    Native,
    /// Candle's own kernels, replayed from a recording.
    StockGraph,
    /// Candle's own forward, its memory pool kept.
    StockPool,
    /// Candle's own forward.
    Stock,
    /// Any other engine, by its name.
    Other,
    /// An imported result of another program: its scheduler, server and client are in it.
    External,
}

impl RungKind {
    /// The rung of an engine.
    pub fn of_engine(engine: &str) -> Self {
        match EngineKind::of(engine) {
            Some(EngineKind::Native) => Self::Native,
            Some(EngineKind::Stock) => Self::Stock,
            Some(EngineKind::StockGraph) => Self::StockGraph,
            Some(EngineKind::StockPool) => Self::StockPool,
            None => Self::Other,
        }
    }
}

/// One time on the ladder.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Rung {
    pub kind: RungKind,
    /// The engine that was measured; null for a floor.
    pub engine: Option<String>,
    pub dtype: Dtype,
    /// Decode: time per output token. Prefill: the step.
    pub time_ns: f64,
    /// What this rung adds to those above it: all of them together are the time of the last. A floor at a second dtype adds what
    /// it is over the first floor.
    pub step_ns: f64,
    /// `step_ns` over the slowest measured time.
    pub share: f64,
    /// What must move for a floor; what the engine really moves for a measured rung, where that is known.
    pub bytes: Option<Bytes>,
    pub status: Status,
    /// `b1 c1006` where that is not the ladder's own batch and context.
    #[serde(default)]
    pub place: Option<String>,
}

/// The rungs of one phase, batch and context.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Ladder {
    pub phase: Phase,
    pub batch: usize,
    pub context: usize,
    pub rungs: Vec<Rung>,
    /// Where candle's own forward was measured both eagerly and replayed.
    #[serde(default)]
    pub launches: Option<LaunchCost>,
    /// One line: where the time went.
    pub story: String,
}

/// What launching kernels one by one costs: the same kernels timed eagerly and replayed.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct LaunchCost {
    pub eager_ns: f64,
    pub replayed_ns: f64,
    /// Eager less replayed; below zero where the replay was the slower.
    pub cost_ns: f64,
    /// Of the eager time.
    pub share: f64,
}

impl Ladder {
    /// The name of a rung: `data sheet`, `ceiling`, `read beside`, an engine, or for a floor that is not the first `ceiling at f32`, or
    /// `ceiling of 1.31 GB` where one of its dtype stands above.
    pub fn name(&self, rung: usize) -> String {
        let this = &self.rungs[rung];
        let word = match (&this.engine, this.kind) {
            (Some(engine), RungKind::External) => {
                let place = this.place.as_ref().map_or_else(String::new, |place| format!(", {place}"));
                return format!("{engine} (external{place})");
            }
            (Some(engine), _) => return engine.clone(),
            (None, RungKind::Datasheet) => "data sheet",
            (None, RungKind::ReadBeside) => "read beside",
            (None, _) => "ceiling",
        };
        let above = || self.rungs[..rung].iter().filter(|above| above.kind == this.kind);
        let of_its_dtype = above().any(|above| above.dtype == this.dtype);
        match (&this.place, this.bytes) {
            (Some(place), _) => format!("{word} at {} {place}", this.dtype),
            // Floors of one dtype differ where engines meet other experts.
            (None, Some(bytes)) if of_its_dtype => format!("{word} of {bytes}"),
            (None, _) if above().next().is_some() => format!("{word} at {}", this.dtype),
            (None, _) => word.to_owned(),
        }
    }

    /// The unit in which this ladder's times can be compared at a glance.
    pub fn scale(&self) -> TimeScale {
        TimeScale::for_longest(self.rungs.iter().map(|rung| rung.time_ns).fold(0.0, f64::max))
    }
}

/// One unit and one number of decimals for times shown together.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TimeScale {
    nanoseconds: f64,
    unit: &'static str,
    decimals: usize,
}

impl TimeScale {
    /// The scale that shows the longest of them in four digits or a few more.
    pub fn for_longest(nanoseconds: f64) -> Self {
        let of = |nanoseconds, unit, decimals| Self { nanoseconds, unit, decimals };
        match nanoseconds {
            t if t >= 99.95e6 => of(1e6, "ms", 1),
            t if t >= 9.995e6 => of(1e6, "ms", 2),
            t if t >= 999.5e3 => of(1e3, "µs", 0),
            t if t >= 99.95e3 => of(1e3, "µs", 1),
            _ => of(1e3, "µs", 2),
        }
    }

    /// A time in this scale.
    pub fn show(self, nanoseconds: f64) -> String {
        let shown = format!("{:.*}", self.decimals, nanoseconds / self.nanoseconds);
        // A difference that rounds to nothing has no sign.
        let shown = match shown.strip_prefix('-') {
            Some(digits) if digits.chars().all(|c| matches!(c, '0' | '.')) => digits.to_owned(),
            _ => shown,
        };
        format!("{shown} {}", self.unit)
    }
}
