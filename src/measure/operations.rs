//! A step of a cell, broken down per operation.
//!
//! Enters: a session and a cell that was measured. Leaves: the median time of each operation over a few steps, with its calls
//! and bytes. It runs after the measurement: timing operations one by one adds time, which must not enter a block.

use super::block::CellInput;
use crate::engine::{EngineError, OperationTime, Session};
use hbmark_core::result::{Cell, OperationRow};
use hbmark_core::stats;
use hbmark_core::units::Nanos;

/// Profiled steps over which the median is taken.
const PROFILES: usize = 5;

/// Fills the cell's context, profiles its step and frees its KV. Empty where the engine cannot time its operations one by one.
///
/// `index` and `seed` are the cell's own in the run, so that the tokens are those that were timed.
pub fn of_cell(
    session: &mut dyn Session,
    cell: &Cell,
    index: usize,
    seed: u64,
) -> Result<Vec<OperationRow>, EngineError> {
    let mut input = CellInput::new(cell, index, seed, session.architecture().vocab_size);
    let profiled = profiles(session, &mut input);
    input.release(session);
    Ok(medians(&profiled?))
}

fn profiles(
    session: &mut dyn Session,
    input: &mut CellInput,
) -> Result<Vec<Vec<OperationTime>>, EngineError> {
    if session.profiler().is_none() {
        return Ok(Vec::new());
    }
    input.fill(session)?;
    // One whole step first, so that the profiled steps are warm.
    session.step(input.step())?;
    session.greedy_tokens()?;
    let mut profiles = Vec::with_capacity(PROFILES);
    for _ in 0..PROFILES {
        let Some(timer) = session.profiler() else { break };
        profiles.push(joined(timer.profile(input.step())?));
    }
    Ok(profiles)
}

/// Every operation once, in the order of its first call.
fn joined(profile: Vec<OperationTime>) -> Vec<OperationTime> {
    let mut operations: Vec<OperationTime> = Vec::new();
    for one in profile {
        match operations.iter_mut().find(|known| known.operation == one.operation) {
            Some(known) => {
                known.calls += one.calls;
                known.time = Nanos(known.time.0 + one.time.0);
                known.bytes = known.bytes + one.bytes;
            }
            None => operations.push(one),
        }
    }
    operations
}

fn medians(profiles: &[Vec<OperationTime>]) -> Vec<OperationRow> {
    let Some(last) = profiles.last() else { return Vec::new() };
    last.iter()
        .map(|row| {
            let same = |profile: &Vec<OperationTime>| {
                profile.iter().find(|o| o.operation == row.operation).map(|o| o.time.0)
            };
            let times: Vec<f64> = profiles.iter().filter_map(same).collect();
            OperationRow {
                operation: row.operation.to_owned(),
                calls: row.calls,
                time_ns: stats::median(&times),
                bytes: row.bytes,
                fraction_of_ceiling: None,
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::scripted::{ScriptedSession, StepOutcome};
    use hbmark_core::model::{Dtype, test_shapes};
    use hbmark_core::result::Phase;
    use hbmark_core::units::Bytes;
    use hbmark_traffic::clock::VirtualClock;

    fn session() -> ScriptedSession {
        let architecture = test_shapes::smollm2_135m();
        let inventory = architecture.inventory(Dtype::Bf16);
        let takes = |_| StepOutcome::Takes { device: Nanos(1e6), host: Nanos(0.0) };
        ScriptedSession::new(architecture, inventory, &VirtualClock::default(), Box::new(takes))
    }

    fn cell() -> Cell {
        Cell { phase: Phase::Decode, engine: "scripted".into(), dtype: Dtype::Bf16, batch: 2, context: 16 }
    }

    fn took(operation: &'static str, nanoseconds: f64) -> OperationTime {
        OperationTime { operation, calls: 1, time: Nanos(nanoseconds), bytes: Bytes(1000) }
    }

    #[test]
    fn each_operation_has_its_median_and_the_sum_of_its_calls() {
        // The first profile is slow, as first ones are.
        let mut session = session().with_profiler(|index| {
            let slow = if index == 0 { 10.0 } else { 1.0 };
            vec![took("attention", 300.0 * slow), took("head", 50.0), took("attention", 100.0 + index as f64)]
        });
        let rows = of_cell(&mut session, &cell(), 0, 7).unwrap();
        let names: Vec<&str> = rows.iter().map(|r| r.operation.as_str()).collect();
        assert_eq!(names, ["attention", "head"]);
        assert_eq!((rows[0].calls, rows[0].bytes), (2, Bytes(2000)));
        // 3100, 401, 402, 403, 404: the median is 403.
        assert_eq!(rows[0].time_ns.to_bits(), 403.0f64.to_bits());
        assert_eq!(session.held_sequences(), 0, "the KV of the pass is freed");
    }

    #[test]
    fn an_engine_that_cannot_tell_its_operations_apart_has_no_rows() {
        assert_eq!(of_cell(&mut session(), &cell(), 0, 7).unwrap(), []);
    }

    #[test]
    fn a_failing_step_frees_the_cell_too() {
        let architecture = test_shapes::smollm2_135m();
        let inventory = architecture.inventory(Dtype::Bf16);
        let fails = |_| {
            StepOutcome::Fails(EngineError::Device { device: "scripted".into(), detail: "it broke".into() })
        };
        let mut session =
            ScriptedSession::new(architecture, inventory, &VirtualClock::default(), Box::new(fails));
        assert!(of_cell(&mut session, &cell(), 0, 7).is_err());
        assert_eq!(session.held_sequences(), 0);
    }
}
