//! Whole models in sessions: against the stock engine, greedily over 128 steps, and their bytes against the ledger.

use std::path::Path;

use super::{Kind, Make, THREADS};
use crate::engine::native::operations::Operations;
use crate::engine::native::{DEFAULT_BLOCK_SIZE, NAME, NativeSession};
use crate::engine::{self, DeviceChoice, DeviceOptions, EngineError, SequenceId, Session, StepBatch};
use crate::measure::quality::{self, tolerance};
use crate::run::verify::outputs::{FAMILIES, small_model};
use crate::run::verify::{Check, Record};
use crate::weights::OpenModel;
use hbmark_core::ledger::{Ledger, StepShape};
use hbmark_core::model::{Architecture, Dtype, parse_config};
use hbmark_core::units::Bytes;

#[cfg(any(test, feature = "cuda"))]
use crate::engine::native::cpu::CpuOperations;

pub const OUTPUTS: &str = "native outputs";
pub const BYTES: &str = "native bytes";

/// Seed of weights and prompts.
const SEED: u64 = 7;
const PROMPT: [u32; 9] = [3, 141, 59, 26, 53, 58, 97, 93, 23];
/// As far as the bytes of a decode may lie from the ideal ledger: panels are padded, and a tile of the cache is read whole.
const LEDGER_SHARE: f64 = 0.01;
/// Wide enough for the padding of panels to be small, and multiples of nothing where a model may be.
const COUNTED: &str = r#"{"model_type":"llama","hidden_size":576,"num_hidden_layers":2,"num_attention_heads":9,
    "num_key_value_heads":3,"head_dim":64,"intermediate_size":1536,"vocab_size":4099,"max_position_embeddings":1024,
    "rms_norm_eps":1e-5,"rope_theta":10000.0,"hidden_act":"silu","tie_word_embeddings":false}"#;

fn model_of(architecture: Architecture) -> OpenModel {
    OpenModel::synthetic("small", architecture, SEED)
}

fn load<O: Operations>(
    make: &Make<'_, O>,
    model: &OpenModel,
    dtype: Dtype,
) -> Result<NativeSession<O>, EngineError> {
    NativeSession::load(make(THREADS)?, model, dtype, DEFAULT_BLOCK_SIZE, &mut |_| {})
}

/// Records what a check gave, or why it could not be done.
fn recorded(area: &'static str, name: String, result: Result<(bool, String), EngineError>) -> Check {
    match result {
        Ok((passed, detail)) => Check::new(area, name, passed, detail),
        Err(error) => Check::failed(area, name, error.to_string()),
    }
}

/// Logits of every family in plain floats against stock in f32, of quantised weights against the same dequantised; greedy tokens.
pub fn against_stock<O: Operations>(kind: &Kind, make: &Make<'_, O>, steps: usize, record: &mut Record<'_>) {
    for (index, (family, keys)) in FAMILIES.iter().enumerate() {
        let model = model_of(small_model(keys));
        let quantised = if index == 0 { kind.quantised } else { &[] };
        for &dtype in kind.plain.iter().chain(quantised) {
            record(recorded(OUTPUTS, format!("{family}, {dtype}"), logits(kind, make, &model, dtype)));
        }
        record(recorded(OUTPUTS, format!("{family}, greedy f32"), greedy(make, &model, steps)));
    }
}

/// Greedy tokens of every family in f32 as the kernels of this processor give them.
#[cfg(any(test, feature = "cuda"))]
pub fn against_the_cpu<O: Operations>(make: &Make<'_, O>, steps: usize, record: &mut Record<'_>) {
    let on_the_cpu: &Make<'_, CpuOperations> = &CpuOperations::new;
    for (family, keys) in FAMILIES {
        let model = model_of(small_model(keys));
        let result = (|| {
            let found = continued(&mut load(make, &model, Dtype::F32)?, steps)?;
            let wanted = continued(&mut load(on_the_cpu, &model, Dtype::F32)?, steps)?;
            Ok(same_tokens("the CPU", &found, &wanted))
        })();
        record(recorded(OUTPUTS, format!("{family}, greedy f32 as on the CPU"), result));
    }
}

/// Logits, and a decode over a cache against one prefill, within the bound of the dtype.
pub fn logits<O: Operations>(
    kind: &Kind,
    make: &Make<'_, O>,
    model: &OpenModel,
    dtype: Dtype,
) -> Result<(bool, String), EngineError> {
    let mut session = load(make, model, dtype)?;
    let options = DeviceOptions { threads: Some(THREADS), ..DeviceOptions::default() };
    let reference = engine::open_reference(NAME, model, dtype, DeviceChoice::Cpu, options, &mut |_, _| {})?;
    let Some(mut reference) = reference else {
        return Ok((false, "there is nothing to hold it against".to_owned()));
    };
    let gate = quality::gate(&mut session, dtype, SEED, Some(reference.as_mut()))?;
    let found = gate.max_relative_error.map_or("not a number".into(), |error| format!("{error:.1e} off"));
    let wanted = if kind.plain.contains(&dtype) { "stock's in f32" } else { "dequantised in f32" };
    Ok((gate.passed, format!("wanted {wanted}, found {found}, may differ by {:.0e}", tolerance(dtype))))
}

/// The first greedy tokens of both engines.
pub fn greedy<O: Operations>(
    make: &Make<'_, O>,
    model: &OpenModel,
    steps: usize,
) -> Result<(bool, String), EngineError> {
    let found = continued(&mut load(make, model, Dtype::F32)?, steps)?;
    let options = DeviceOptions { threads: Some(THREADS), ..DeviceOptions::default() };
    let mut stock = engine::open("stock", model, Dtype::F32, DeviceChoice::Cpu, options, &mut |_, _| {})?;
    Ok(same_tokens("stock", &found, &continued(stock.as_mut(), steps)?))
}

fn same_tokens(of: &str, found: &[u32], wanted: &[u32]) -> (bool, String) {
    let wanted_hash = quality::token_hash(wanted);
    let steps = wanted.len();
    match found.iter().zip(wanted).position(|(found, wanted)| found != wanted) {
        None => (true, format!("wanted {of}'s {steps} tokens ({wanted_hash}), found them")),
        Some(step) => (
            false,
            format!(
                "wanted {of}'s {steps} tokens ({wanted_hash}), found {} for {} at step {step}",
                found[step], wanted[step]
            ),
        ),
    }
}

/// Greedy tokens after the prompt.
fn continued(session: &mut dyn Session, steps: usize) -> Result<Vec<u32>, EngineError> {
    let (mut tokens, mut brings) = (Vec::with_capacity(steps), PROMPT.to_vec());
    let mut start = 0;
    while tokens.len() < steps {
        let count = brings.len();
        session.step(&StepBatch::uniform(SequenceId(0), &[brings], start))?;
        start += count;
        brings = session.greedy_tokens()?;
        tokens.push(brings[0]);
    }
    Ok(tokens)
}

/// Bytes of a decode against the ideal ledger in every dtype, and over a filled cache against a prefilled one.
pub fn bytes<O: Operations>(kind: &Kind, make: &Make<'_, O>, depths: &[usize], record: &mut Record<'_>) {
    for dtype in kind.dtypes() {
        let result = against_the_ledger(make, dtype, depths);
        record(recorded(BYTES, format!("decode of one sequence, {dtype}"), result));
    }
    record(recorded(
        BYTES,
        "over synthetic KV as over a prefill".to_owned(),
        filled_as_prefilled(make, depths),
    ));
}

fn counted_model() -> OpenModel {
    model_of(parse_config(COUNTED, Path::new("built in")).expect("the built-in config is valid"))
}

/// The bytes of one decode step at a depth.
fn decode_bytes(session: &mut dyn Session, depth: usize) -> Result<Bytes, EngineError> {
    session.step(&StepBatch::uniform(SequenceId(0), &[vec![1]], depth))?;
    let moved = session.bytes_moved().ok_or(EngineError::NoStepRun)?;
    session.release(SequenceId(0));
    Ok(moved)
}

/// Bytes counted where operations ran, against the ideal, at the depth where they lie furthest apart.
pub fn against_the_ledger<O: Operations>(
    make: &Make<'_, O>,
    dtype: Dtype,
    depths: &[usize],
) -> Result<(bool, String), EngineError> {
    let mut session = load(make, &counted_model(), dtype)?;
    let ledger = Ledger::new(session.architecture(), session.inventory(), session.kv_dtype());
    let (mut furthest, mut detail) = (-1.0, String::new());
    for &depth in depths {
        session.synthetic_kv().expect("the native engine fills its cache").fill_kv(
            SequenceId(0),
            depth,
            SEED,
        )?;
        let found = decode_bytes(&mut session, depth)?;
        let ideal = ledger.step(StepShape::decode(1, depth)).bytes.ideal();
        let off = found.as_f64() / ideal.as_f64() - 1.0;
        if off.abs() > furthest {
            furthest = off.abs();
            detail = format!(
                "at depth {depth} wanted {ideal} (ideal), found {:+.2} %, may differ by {:.0} %",
                off * 100.0,
                LEDGER_SHARE * 100.0
            );
        }
    }
    Ok((furthest <= LEDGER_SHARE, detail))
}

/// A step over noise moves what a step over a real prefill of the same depth moves.
pub fn filled_as_prefilled<O: Operations>(
    make: &Make<'_, O>,
    depths: &[usize],
) -> Result<(bool, String), EngineError> {
    // Apart, so that nothing a prefill leaves behind is there when a cache is filled.
    let mut prefilled = load(make, &counted_model(), Dtype::Bf16)?;
    let mut filled = load(make, &counted_model(), Dtype::Bf16)?;
    for &depth in depths {
        let prompt = (0..4099).cycle().take(depth).collect();
        prefilled.step(&StepBatch::uniform(SequenceId(0), &[prompt], 0))?;
        let wanted = decode_bytes(&mut prefilled, depth)?;
        filled.synthetic_kv().expect("the native engine fills its cache").fill_kv(
            SequenceId(0),
            depth,
            SEED,
        )?;
        let found = decode_bytes(&mut filled, depth)?;
        if found != wanted {
            return Ok((
                false,
                format!("at depth {depth} wanted {} B, found {} B, may differ by 0", wanted.0, found.0),
            ));
        }
    }
    Ok((true, format!("wanted the same bytes at depths {depths:?}, found them, may differ by 0")))
}
