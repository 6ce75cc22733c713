//! Why a comparison cannot be made.

use std::path::PathBuf;

use super::EngineVariant;
use hbmark_core::result::ReportError;

/// A comparison that cannot be made, with what to do.
#[derive(Debug, thiserror::Error)]
pub enum CompareError {
    #[error(
        "{side} has the cell {id} and {other} has no such step; compare the same phases, batches and contexts"
    )]
    Grid { side: char, other: char, id: String },
    #[error(
        "A runs {a} and B runs {b}: it is open which to hold against which; name one engine and dtype a side"
    )]
    EngineMismatch { a: String, b: String },
    #[error("A is {a} and B is {b}: times of different models cannot be compared")]
    Models { a: String, b: String },
    #[error("{path} is a prediction; nothing in it was measured")]
    NotMeasured { path: PathBuf },
    #[error(transparent)]
    Unreadable(#[from] ReportError),
    #[error("{side} in `{launch}` ended with {ended}: {message}")]
    Launch { side: char, launch: String, ended: String, message: String },
    #[error("cannot start {program}: {source}")]
    Start { program: PathBuf, source: std::io::Error },
    #[error("{side}'s result lacks the cell {id}")]
    CellMissing { side: char, id: String },
    /// Said by a runner that was asked to stop.
    #[error("stopped by signal {signal}")]
    Interrupted { signal: i32 },
    #[error(
        "stopped by signal {signal} after {rounds} of {wanted} rounds: {least} at least are needed to say anything"
    )]
    Stopped { signal: i32, rounds: usize, wanted: usize, least: usize },
    #[error(
        "{first} and {second} are not runs of one configuration: {what} differs; keep those of a side alike"
    )]
    Mixed { first: PathBuf, second: PathBuf, what: String },
    #[error("{first} and {second} are one process, which would count as two")]
    SameProcess { first: PathBuf, second: PathBuf },
    #[error("a comparison needs at least one round")]
    NoRounds,
}

impl CompareError {
    pub(super) fn series(a: &[EngineVariant], b: &[EngineVariant]) -> Self {
        let list = |series: &[EngineVariant]| {
            series.iter().map(EngineVariant::to_string).collect::<Vec<_>>().join(" and ")
        };
        Self::EngineMismatch { a: list(a), b: list(b) }
    }
}
