//! The quality gate: checks outputs before anything is timed.
//!
//! Enters: a session, and where there is one a second session with the same weights in f32. Leaves: a [`Quality`], or the
//! reason why the timings of this session must not be ranked.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use sha2::{Digest, Sha256};

use crate::engine::{EngineError, ScriptedRouting, SequenceId, Session, StepBatch, relative_error};
use hbmark_core::ledger::ExpertRouting;
use hbmark_core::model::Dtype;
use hbmark_core::result::Quality;

/// Sequence ids of the gate lie above those of every cell.
const GATE_SEQUENCE: SequenceId = SequenceId(u64::MAX / 2);

/// Tokens of the gate's prompt: past a block edge of 16, cheap on a CPU.
const PROMPT_TOKENS: usize = 21;

/// Tokens of it that a verify step has: on both sides of that edge.
const VERIFIED_TOKENS: usize = 6;

/// Largest allowed difference of logits, relative to the largest logit, between a dtype and f32.
///
/// *Source*: f32 reorders sums only. bf16 keeps 8 bits and f16 11 bits of mantissa; a few tens of layers accumulate a few units
/// in the last place. Block formats hold 4 to 8 bits, and the reference is computed from the same rounded weights.
pub fn tolerance(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F32 => 1e-4,
        Dtype::F16 => 1e-2,
        Dtype::Bf16 => 6e-2,
        _ => 1e-1,
    }
}

/// A short hash over greedy tokens, for results.
pub fn token_hash(tokens: &[u32]) -> String {
    let mut hasher = Sha256::new();
    for token in tokens {
        hasher.update(token.to_le_bytes());
    }
    format!("{:.12x}", hasher.finalize())
}

/// Checks that logits are numbers, that a decode on top of a cache gives what one prefill gives, and, where there is a
/// reference, that both give what f32 gives.
///
/// # Errors
/// When an engine fails; wrong outputs are a [`Quality`] that did not pass.
pub fn gate(
    session: &mut dyn Session,
    dtype: Dtype,
    seed: u64,
    reference: Option<&mut dyn Session>,
) -> Result<Quality, EngineError> {
    let vocab = u32::try_from(session.architecture().vocab_size).unwrap_or(u32::MAX);
    let positions = session.capabilities().max_positions.min(PROMPT_TOKENS);
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let prompt: Vec<u32> = (0..positions).map(|_| random.random_range(0..vocab)).collect();
    let whole = prefill_logits(session, &prompt)?;
    let stepped = stepped_logits(session, &prompt)?;
    let bound = tolerance(dtype).max(tolerance(session.kv_dtype()));
    let mut quality = Quality {
        passed: true,
        check: "finite logits; decode over a cache = one prefill".into(),
        max_relative_error: Some(relative_error(&stepped, &whole)),
        token_hash: None,
    };
    let verified = verify_error(session, &prompt, seed)?;
    if let Some(error) = verified {
        quality.check += "; verify step = decode steps";
        quality.max_relative_error = quality.max_relative_error.map(|largest| largest.max(error));
    }
    if let Some(reference) = reference {
        quality.check += "; logits = f32 reference";
        // Rounding decides between experts that are nearly equal to a router, so both follow one script, and shares are the routers' own.
        let mixture = session.architecture().experts.is_some();
        let found = if mixture {
            quality.check += ", experts picked by a script";
            let script = Some(ScriptedRouting { routing: ExpertRouting::Uniform, seed });
            let before = (session.script_experts(script), reference.script_experts(script));
            let found = prefill_logits(session, &prompt)?;
            let right = prefill_logits(reference, &prompt)?;
            session.script_experts(before.0);
            reference.script_experts(before.1);
            relative_error(&found, &right)
        } else {
            relative_error(&whole, &prefill_logits(reference, &prompt)?)
        };
        quality.max_relative_error = quality.max_relative_error.map(|largest| largest.max(found));
    }
    let finite = whole.iter().chain(&stepped).all(|x| x.is_finite());
    quality.passed = finite && quality.max_relative_error.is_some_and(|e| e <= bound);
    if !finite {
        quality.check = "logits are not finite numbers".into();
        quality.max_relative_error = None;
    }
    Ok(quality)
}

fn prefill_logits(session: &mut dyn Session, prompt: &[u32]) -> Result<Vec<f32>, EngineError> {
    session.step(&StepBatch::uniform(GATE_SEQUENCE, &[prompt.to_vec()], 0))?;
    let logits = session.logits()?.into_iter().next().ok_or(EngineError::NoStepRun)?;
    session.release(GATE_SEQUENCE);
    Ok(logits)
}

fn stepped_logits(session: &mut dyn Session, prompt: &[u32]) -> Result<Vec<f32>, EngineError> {
    let (last, first) = prompt.split_last().expect("the gate's prompt is not empty");
    if !first.is_empty() {
        session.step(&StepBatch::uniform(GATE_SEQUENCE, &[first.to_vec()], 0))?;
    }
    session.step(&StepBatch::uniform(GATE_SEQUENCE, &[vec![*last]], first.len()))?;
    let logits = session.logits()?.into_iter().next().ok_or(EngineError::NoStepRun)?;
    session.release(GATE_SEQUENCE);
    Ok(logits)
}

/// The largest difference between the logits of a verify step and those of as many decode steps; `None` of an engine without verify steps. A
/// script picks the experts of a mixture: between experts that are nearly equal rounding decides.
fn verify_error(session: &mut dyn Session, prompt: &[u32], seed: u64) -> Result<Option<f64>, EngineError> {
    if !session.capabilities().every_token_logits {
        return Ok(None);
    }
    let mixture = session.architecture().experts.is_some();
    let script = ScriptedRouting { routing: ExpertRouting::Uniform, seed };
    let before = session.script_experts(if mixture { Some(script) } else { None });
    let (first, verified) = prompt.split_at(prompt.len().saturating_sub(VERIFIED_TOKENS));
    if !first.is_empty() {
        session.step(&StepBatch::uniform(GATE_SEQUENCE, &[first.to_vec()], 0))?;
    }
    let mut error: f64 = 0.0;
    let mut stepped = Vec::with_capacity(verified.len());
    for (token, position) in verified.iter().zip(first.len()..) {
        session.step(&StepBatch::uniform(GATE_SEQUENCE, &[vec![*token]], position))?;
        stepped.extend(session.logits()?);
    }
    session.step(&StepBatch::uniform(GATE_SEQUENCE, &[verified.to_vec()], first.len()).as_verify_step())?;
    let found = session.logits()?;
    if found.len() != stepped.len() {
        error = f64::INFINITY;
    }
    for (found, stepped) in found.iter().zip(&stepped) {
        error = error.max(relative_error(found, stepped));
    }
    session.release(GATE_SEQUENCE);
    session.script_experts(before);
    Ok(Some(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_relative_to_the_largest_logit() {
        assert!((relative_error(&[1.0, -4.0], &[1.2, -4.0]) - 0.05).abs() < 1e-6);
        assert!(relative_error(&[f32::NAN], &[1.0]).is_infinite());
    }

    #[test]
    fn a_hash_tells_tokens_apart() {
        assert_eq!(token_hash(&[1, 2, 3]).len(), 12);
        assert_ne!(token_hash(&[1, 2, 3]), token_hash(&[1, 3, 2]));
    }
}
