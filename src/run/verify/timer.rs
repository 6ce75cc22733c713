//! Checks of time: clocks against intervals of known length, and a timed block against the host's wall time.

use super::outputs::{FAMILIES, small_model, small_session};
use super::{Check, Record};
use crate::engine::{DeviceChoice, EngineError, Session};
use crate::measure::block::{CellInput, take_block};
use crate::measure::timer_checks;
use hbmark_core::model::Dtype;
use hbmark_core::result::{Cell, Phase};
use hbmark_core::units::Nanos;

/// The host's clock, and on a GPU CUDA events around spin kernels of known length.
pub fn clocks(device: DeviceChoice, record: &mut Record<'_>) {
    let mut known = |result: Result<Vec<timer_checks::Check>, String>| match result {
        Ok(answers) => {
            for answer in answers {
                let show = |value: f64| match answer.name.strip_suffix("(ns)") {
                    Some(_) => Nanos(value).to_string(),
                    None => value.to_string(),
                };
                let (wanted, found, bound) = (show(answer.wanted), show(answer.found), show(answer.bound));
                let detail = format!("wanted {wanted}, found {found}, may differ by {bound}");
                record(Check::new("timer", answer.name, answer.passed, detail));
            }
        }
        Err(error) => record(Check::failed("timer", "known answers", error)),
    };
    known(timer_checks::check_clocks().map_err(|e| e.to_string()));
    #[cfg(feature = "cuda")]
    if let DeviceChoice::Cuda(index) = device {
        known(crate::measure::probe::cuda::check_spins(index).map_err(|e| e.to_string()));
    }
    #[cfg(not(feature = "cuda"))]
    let _ = device;
}

/// One timed block of the stock engine.
pub fn block(device: DeviceChoice, record: &mut Record<'_>) {
    record(block_of("stock, a block of 50 decode steps", 50, || {
        Ok(Box::new(small_session(&small_model(FAMILIES[0].1), Dtype::F32, device)?))
    }));
}

/// One timed block: intervals add up to the host's wall time, and identical steps give identical tokens.
pub fn block_of(
    name: &str,
    steps: usize,
    open: impl FnOnce() -> Result<Box<dyn Session>, EngineError>,
) -> Check {
    let taken = (|| {
        let mut session = open()?;
        let cell =
            Cell { phase: Phase::Decode, engine: "small".into(), dtype: Dtype::F32, batch: 2, context: 33 };
        let mut input = CellInput::new(&cell, 0, 1, session.architecture().vocab_size);
        input.fill(session.as_mut())?;
        // A step is recorded when it comes again, which takes the host a while.
        take_block(session.as_mut(), &input, 2, &mut Vec::new())?;
        take_block(session.as_mut(), &input, steps, &mut Vec::new())
    })();
    match taken {
        Ok(block) => {
            let intervals: f64 = block.interval_ns.iter().sum();
            let spans: f64 = block.step_ns.iter().sum();
            let passed = (intervals / block.wall_ns - 1.0).abs() < 0.01 && spans <= block.wall_ns * 1.01;
            let detail = format!(
                "wall {}, intervals {}, device spans {}",
                Nanos(block.wall_ns),
                Nanos(intervals),
                Nanos(spans)
            );
            Check::new("block", name, passed, detail)
        }
        Err(error) => Check::failed("block", name, error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timed_block_on_the_cpu_adds_up() {
        let mut checks = Vec::new();
        block(DeviceChoice::Cpu, &mut |check| checks.push(check));
        assert!(checks[0].passed, "{}", checks[0].detail);
    }
}
