//! `hbmark verify` as data: is the ruler straight on this machine, and are the outputs right?
//!
//! Enters: a device. Leaves: named checks that passed or failed, each with what was wanted and what was found. It is what a person runs
//! before trusting a number, so it shares its code with the run: the same sessions, the same timeline, the same probes.

use std::path::Path;

use candle_core::Device;
use serde::Serialize;

use crate::config::Depth;
use crate::engine::stock::StockSession;
use crate::engine::{Backend, DeviceChoice, DeviceOptions, EngineError, SequenceId, Session, StepBatch};
use crate::measure::block::{CellInput, take_block};
use crate::measure::quality::{self, relative_error, tolerance};
use crate::measure::{ceilings, known_answers};
use crate::model::{Architecture, Dtype, parse_config, synthetic};
use crate::plan::Cell;
use crate::report::Phase;
use crate::roofline::Ceilings;
use crate::units::{BytesPerSecond, FlopsPerSecond, Nanos};

/// A bandwidth probe must walk at least this many times the last cache.
const CACHE_FACTOR: f64 = 3.0;

/// One line of the result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    pub area: &'static str,
    pub name: String,
    pub passed: bool,
    pub detail: String,
}

/// Runs every check; `tell` hears of each as it is done.
pub fn verify(device: DeviceChoice, tell: &mut dyn FnMut(&Check)) -> Vec<Check> {
    let mut checks = Vec::new();
    let mut record = |check: Check| {
        tell(&check);
        checks.push(check);
    };
    timer(device, &mut record);
    outputs(device, &mut record);
    block(device, &mut record);
    match ceilings::measure(device, Depth::Quick, None) {
        Ok(Some(found)) => sane_ceilings(&found, &mut record),
        Ok(None) => record(failed("ceilings", "measured", format!("{device} has no probe in this build"))),
        Err(error) => record(failed("ceilings", "measured", error.to_string())),
    }
    checks
}

fn check(area: &'static str, name: impl Into<String>, passed: bool, detail: String) -> Check {
    Check { area, name: name.into(), passed, detail }
}

fn failed(area: &'static str, name: impl Into<String>, detail: String) -> Check {
    check(area, name, false, detail)
}

/// Known answers of the host's clock, and on a GPU of CUDA events around spin kernels.
fn timer(device: DeviceChoice, record: &mut dyn FnMut(Check)) {
    let mut known = |result: Result<Vec<known_answers::Check>, String>| match result {
        Ok(answers) => {
            for answer in answers {
                let show = |value: f64| match answer.name.strip_suffix("(ns)") {
                    Some(_) => Nanos(value).to_string(),
                    None => value.to_string(),
                };
                let (wanted, found, bound) = (show(answer.wanted), show(answer.found), show(answer.bound));
                let detail = format!("wanted {wanted}, found {found}, may differ by {bound}");
                record(check("timer", answer.name, answer.passed, detail));
            }
        }
        Err(error) => record(failed("timer", "known answers", error)),
    };
    known(known_answers::check_clocks().map_err(|e| e.to_string()));
    #[cfg(feature = "cuda")]
    if let DeviceChoice::Cuda(index) = device {
        known(crate::measure::probe::cuda::check_spins(index).map_err(|e| e.to_string()));
    }
    #[cfg(not(feature = "cuda"))]
    let _ = device;
}

/// Small models of every family the stock engine runs: config keys on top of the shared ones.
const FAMILIES: &[(&str, &str)] = &[
    ("llama, grouped queries", r#""model_type":"llama","tie_word_embeddings":false"#),
    (
        "llama, tied, llama3 rope",
        r#""model_type":"llama","tie_word_embeddings":true,"rope_scaling":{"rope_type":"llama3","factor":8.0,"low_freq_factor":1.0,"high_freq_factor":4.0,"original_max_position_embeddings":16}"#,
    ),
    ("mistral", r#""model_type":"mistral","sliding_window":null,"tie_word_embeddings":false"#),
    ("qwen2, biases", r#""model_type":"qwen2","use_sliding_window":false,"tie_word_embeddings":true"#),
    (
        "qwen3, qk-norm",
        r#""model_type":"qwen3","use_sliding_window":false,"attention_bias":false,"tie_word_embeddings":false"#,
    ),
];

const SHARED: &str = r#""hidden_size":96,"num_hidden_layers":3,"num_attention_heads":6,"num_key_value_heads":2,
    "head_dim":16,"intermediate_size":160,"vocab_size":331,"max_position_embeddings":256,"rms_norm_eps":1e-5,
    "rope_theta":10000.0,"hidden_act":"silu","torch_dtype":"float32""#;

fn small_model(keys: &str) -> Architecture {
    let text = format!("{{{keys},{SHARED}}}");
    parse_config(&text, Path::new("built in")).expect("the built-in configs are valid")
}

/// A session over weights that are the same on every device: made on the host, then moved.
fn small_session(
    architecture: &Architecture,
    dtype: Dtype,
    device: DeviceChoice,
) -> Result<StockSession, EngineError> {
    let backend = Backend::open(device, DeviceOptions::default())?;
    let inventory = architecture.inventory(dtype);
    // Rounded from one set of f32 weights, so that dtypes can be compared.
    let weights =
        synthetic::generate(&architecture.inventory(Dtype::F32), Dtype::F32, 7, &Device::Cpu, &mut |_| {})
            .map_err(crate::model::ModelError::from)?;
    let wanted = crate::engine::stock::candle_dtype(dtype)?;
    let moved = weights
        .into_iter()
        .map(|(name, tensor)| Ok((name, tensor.to_device(&backend.device)?.to_dtype(wanted)?)))
        .collect::<candle_core::Result<_>>()
        .map_err(|e| EngineError::Device { device: backend.name.clone(), detail: e.to_string() })?;
    StockSession::new(architecture.clone(), moved, inventory, dtype, backend)
}

/// Logits of each family: decode over a cache against prefill, batched against alone, each dtype against f32 on the host.
fn outputs(device: DeviceChoice, record: &mut dyn FnMut(Check)) {
    for (family, keys) in FAMILIES {
        let architecture = small_model(keys);
        for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
            let name = format!("{family}, {dtype}");
            match compare(&architecture, dtype, device) {
                Ok((passed, detail)) => record(check("outputs", name, passed, detail)),
                Err(error) => record(failed("outputs", name, error.to_string())),
            }
        }
    }
}

fn compare(
    architecture: &Architecture,
    dtype: Dtype,
    device: DeviceChoice,
) -> Result<(bool, String), EngineError> {
    let mut oracle = small_session(architecture, Dtype::F32, DeviceChoice::Cpu)?;
    let mut session = small_session(architecture, dtype, device)?;
    let gate = quality::gate(&mut session, dtype, 1, Some(&mut oracle))?;
    let batched = batched_error(&mut session)?;
    let passed = gate.passed && batched <= tolerance(dtype);
    let error = gate.max_relative_error.map_or("not a number".into(), |e| format!("{e:.1e}"));
    Ok((
        passed,
        format!(
            "{}: {error}; batched against alone: {batched:.1e}; bound {:.0e}",
            gate.check,
            tolerance(dtype)
        ),
    ))
}

/// Largest relative difference between a sequence in a batch of three and the same sequence alone.
fn batched_error(session: &mut dyn Session) -> Result<f64, EngineError> {
    let prompts: Vec<Vec<u32>> =
        (0..3u32).map(|s| (0..19).map(|t| (t * 37 + s * 101) % 331).collect()).collect();
    session.step(&StepBatch::uniform(SequenceId(0), &prompts, 0))?;
    let together = session.logits()?;
    let mut worst = 0.0f64;
    for (prompt, together) in prompts.iter().zip(&together) {
        session.step(&StepBatch::uniform(SequenceId(9), std::slice::from_ref(prompt), 0))?;
        worst = worst.max(relative_error(together, &session.logits()?[0]));
    }
    Ok(worst)
}

/// One timed block: intervals add up to the host's wall time, and identical steps give identical tokens.
fn block(device: DeviceChoice, record: &mut dyn FnMut(Check)) {
    let name = "a block of 50 decode steps";
    let taken = (|| {
        let architecture = small_model(FAMILIES[0].1);
        let mut session = small_session(&architecture, Dtype::F32, device)?;
        let cell =
            Cell { phase: Phase::Decode, engine: "stock".into(), dtype: Dtype::F32, batch: 2, context: 33 };
        let mut input = CellInput::new(&cell, 0, 1, architecture.vocab_size);
        input.fill(&mut session)?;
        take_block(&mut session, &input, 50, &mut Vec::new())
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
            record(check("block", name, passed, detail));
        }
        Err(error) => record(failed("block", name, error.to_string())),
    }
}

fn sane_ceilings(found: &Ceilings, record: &mut dyn FnMut(Check)) {
    let read = found.read_bytes_per_s;
    record(check(
        "ceilings",
        "read bandwidth is ordered and repeatable",
        read.low > 0.0 && read.low <= read.median && read.median <= read.high && read.high < 3.0 * read.low,
        format!(
            "{} to {}, median {}",
            BytesPerSecond(read.low),
            BytesPerSecond(read.high),
            BytesPerSecond(read.median)
        ),
    ));
    if let Some(cache) = found.last_cache_bytes {
        record(check(
            "ceilings",
            "the working set lies beyond the last cache",
            found.working_set_bytes.as_f64() >= CACHE_FACTOR * cache.as_f64(),
            format!("{} over a cache of {cache}", found.working_set_bytes),
        ));
    }
    for (dtype, peak) in &found.gemm_flops_per_s {
        record(check(
            "ceilings",
            format!("matrix products in {dtype} have a peak"),
            peak.median.is_finite() && peak.median > 0.0,
            FlopsPerSecond(peak.median).to_string(),
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_family_and_dtype_passes_on_the_cpu() {
        let mut checks = Vec::new();
        outputs(DeviceChoice::Cpu, &mut |check| checks.push(check));
        block(DeviceChoice::Cpu, &mut |check| checks.push(check));
        assert_eq!(checks.len(), FAMILIES.len() * 3 + 1);
        for check in checks {
            assert!(check.passed, "{}: {}", check.name, check.detail);
        }
    }

    #[test]
    fn a_probe_that_stays_in_the_cache_fails() {
        let spread = |median: f64| crate::roofline::Spread { median, low: median * 0.9, high: median * 1.1 };
        let found = Ceilings {
            read_bytes_per_s: spread(4e10),
            copy_bytes_per_s: spread(4e10),
            triad_bytes_per_s: spread(4e10),
            gemm_flops_per_s: [("f32".to_owned(), spread(1e11))].into(),
            launch_ns: None,
            working_set_bytes: crate::units::Bytes(32 << 20),
            last_cache_bytes: Some(crate::units::Bytes(32 << 20)),
            read_configuration: String::new(),
        };
        let mut checks = Vec::new();
        sane_ceilings(&found, &mut |check| checks.push(check));
        let failed: Vec<&str> = checks.iter().filter(|c| !c.passed).map(|c| c.name.as_str()).collect();
        assert_eq!(failed, ["the working set lies beyond the last cache"]);
    }
}
