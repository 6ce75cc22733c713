//! Checks of the native engine on the CPU: operations, steps, whole models, and the bytes they move.
//!
//! Enters: a way to make operations. Leaves: checks in four areas. Operations and steps of random small models are held against the oracle
//! ([`operations`], [`steps`]), small models of every family against the stock engine and the byte ledger ([`models`]). `cargo test`
//! compares the same things over more seeds; here they are compared on the machine that will be timed.

mod models;
mod operations;
mod steps;

use super::{Check, Record};
use crate::engine::EngineError;
use crate::engine::native::cpu::{CpuOperations, InstructionSet};

/// Threads where nothing depends on their number: enough to share work.
const THREADS: usize = 2;

/// Makes operations on so many threads.
type Make<'a, O> = dyn Fn(usize) -> Result<O, EngineError> + 'a;

/// Everything, with the kernels of this processor.
pub fn on_the_cpu(record: &mut Record<'_>) {
    let sets = InstructionSet::available();
    let makers: Vec<_> =
        sets.iter().map(|&set| (set.name(), move |threads| CpuOperations::with_set(threads, set))).collect();
    let makers: Vec<(&str, &Make<'_, CpuOperations>)> =
        makers.iter().map(|(name, make)| (*name, make as &Make<'_, _>)).collect();
    operations::against_the_oracle(&makers, operations::SEEDS, record);
    steps::against_the_oracle(&CpuOperations::new, record);
    steps::however_they_are_cut(&CpuOperations::new, record);
    models::against_stock(&CpuOperations::new, record);
    models::bytes(&CpuOperations::new, record);
}

/// Of all that a check compares, what comes nearest to its bound or goes furthest beyond it.
#[derive(Debug, Clone, Default)]
struct Nearest {
    compared: usize,
    /// Of the bound; above one it is broken.
    share: f64,
    found: f64,
    bound: f64,
    of: String,
}

impl Nearest {
    /// Compares one more; `of` says what it was.
    fn see(&mut self, found: f64, bound: f64, of: impl FnOnce() -> String) {
        self.compared += 1;
        let share = match (bound > 0.0, found > 0.0) {
            (true, _) => found / bound,
            (false, true) => f64::INFINITY,
            (false, false) => 0.0,
        };
        if self.compared == 1 || share > self.share {
            (self.share, self.found, self.bound, self.of) = (share, found, bound, of());
        }
    }

    fn check(self, area: &'static str, name: impl Into<String>, wanted: &str) -> Check {
        let Self { compared, share, found, bound, of } = self;
        let passed = compared > 0 && share <= 1.0;
        let at = if passed { String::new() } else { format!(" ({of})") };
        let detail = format!(
            "wanted {wanted}, {compared} compared; nearest to its bound: found {} off, may differ by {}{at}",
            scientific(found, 1),
            scientific(bound, 0)
        );
        Check::new(area, name, passed, detail)
    }
}

/// A relative error with so many decimals; nothing is plainly 0.
fn scientific(error: f64, decimals: usize) -> String {
    if error == 0.0 { "0".to_owned() } else { format!("{error:.decimals$e}") }
}

/// A check from what was compared, or from why it could not be.
fn checked(
    area: &'static str,
    name: impl Into<String>,
    wanted: &str,
    compared: Result<Nearest, EngineError>,
) -> Check {
    match compared {
        Ok(nearest) => nearest.check(area, name, wanted),
        Err(error) => Check::failed(area, name, error.to_string()),
    }
}

#[cfg(test)]
mod tests;
