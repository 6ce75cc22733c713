//! Checks of the stock engine's outputs: small models of every family, in every dtype, against f32 on the host.

use std::path::Path;

use candle_core::{DType, Device, Tensor};

use super::{Check, Record};
use crate::engine::relative_error;
use crate::engine::stock::StockSession;
use crate::engine::{Backend, DeviceChoice, DeviceOptions, EngineError, SequenceId, Session, StepBatch};
use crate::measure::quality::{self, tolerance};
use crate::weights::{OpenModel, synthetic};
use hbmark_core::model::{Architecture, Dtype, parse_config};

/// Small models of every family the stock engine runs: config keys on top of the shared ones.
pub const FAMILIES: &[(&str, &str)] = &[
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
    ("phi3, fused matrices", r#""model_type":"phi3","sliding_window":null,"tie_word_embeddings":false"#),
];

const SHARED: &str = r#""hidden_size":96,"num_hidden_layers":3,"num_attention_heads":6,"num_key_value_heads":2,
    "head_dim":16,"intermediate_size":160,"vocab_size":331,"max_position_embeddings":256,"rms_norm_eps":1e-5,
    "rope_theta":10000.0,"hidden_act":"silu","torch_dtype":"float32""#;

pub fn small_model(keys: &str) -> Architecture {
    let text = format!("{{{keys},{SHARED}}}");
    parse_config(&text, Path::new("built in")).expect("the built-in configs are valid")
}

/// A session over weights that are the same on every device: made on the host, then moved.
pub fn small_session(
    architecture: &Architecture,
    dtype: Dtype,
    device: DeviceChoice,
) -> Result<StockSession, EngineError> {
    let backend = Backend::open(device, DeviceOptions::default())?;
    let inventory = architecture.inventory(dtype);
    // Rounded from one set of f32 weights, so that dtypes can be compared.
    let weights =
        synthetic::generate(&architecture.inventory(Dtype::F32), Dtype::F32, 7, &Device::Cpu, &mut |_| {})
            .map_err(crate::weights::OpenError::from)?;
    let wanted = crate::engine::stock::candle_dtype(dtype)?;
    let moved = weights
        .into_iter()
        .map(|(name, tensor)| Ok((name, tensor.to_device(&backend.device)?.to_dtype(wanted)?)))
        .collect::<candle_core::Result<_>>()
        .map_err(|e| EngineError::Device { device: backend.name.clone(), detail: e.to_string() })?;
    StockSession::new(architecture.clone(), moved, inventory, dtype, backend)
}

/// Weights from a seed on a device against those that other engines stream from the same seed: a reference must have the weights of its session.
pub fn synthetic_weights(device: DeviceChoice, record: &mut Record<'_>) {
    for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
        let name = format!("synthetic weights, {dtype}");
        record(match differing_weights(dtype, device) {
            Ok((differing, all)) => {
                let detail = format!("{differing} of {all} tensors differ from those of the host");
                Check::new("outputs", name, differing == 0 && all > 0, detail)
            }
            Err(error) => Check::failed("outputs", name, error.to_string()),
        });
    }
}

/// Tensors that a device has otherwise than they are streamed, of all.
fn differing_weights(dtype: Dtype, device: DeviceChoice) -> Result<(usize, usize), EngineError> {
    const SEED: u64 = 11;
    let architecture = small_model(FAMILIES[3].1);
    let backend = Backend::open(device, DeviceOptions::default())?;
    let inventory = architecture.inventory(dtype);
    let loaded = synthetic::generate(&inventory, dtype, SEED, &backend.device, &mut |_| {})
        .map_err(crate::weights::OpenError::from)?;
    let mut streamed = Vec::new();
    OpenModel::synthetic("small", architecture, SEED).stream(dtype, &mut |name, tensor| {
        streamed.push((name.to_owned(), tensor));
        Ok(())
    })?;
    let values = |tensor: &Tensor| {
        tensor.flatten_all()?.to_dtype(DType::F32)?.to_device(&Device::Cpu)?.to_vec1::<f32>()
    };
    let failed = |error: candle_core::Error| EngineError::Device {
        device: backend.name.clone(),
        detail: error.to_string(),
    };
    let mut differing = 0;
    for (name, tensor) in &streamed {
        let here = loaded.get(name).map(values).transpose().map_err(failed)?;
        differing += usize::from(here.as_ref() != Some(&tensor.values()));
    }
    Ok((differing, streamed.len()))
}

/// Logits of each family: decode over a cache against prefill, batched against alone, each dtype against f32 on the host.
pub fn families(device: DeviceChoice, record: &mut Record<'_>) {
    for (family, keys) in FAMILIES {
        let architecture = small_model(keys);
        for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
            let name = format!("{family}, {dtype}");
            match compare(&architecture, dtype, device) {
                Ok((passed, detail)) => record(Check::new("outputs", name, passed, detail)),
                Err(error) => record(Check::failed("outputs", name, error.to_string())),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_from_a_seed_are_those_that_are_streamed() {
        let mut checks = Vec::new();
        synthetic_weights(DeviceChoice::Cpu, &mut |check| checks.push(check));
        assert!(checks.len() == 3 && checks.iter().all(|check| check.passed), "{checks:?}");
    }

    #[test]
    fn every_family_and_dtype_passes_on_the_cpu() {
        let mut checks = Vec::new();
        families(DeviceChoice::Cpu, &mut |check| checks.push(check));
        assert_eq!(checks.len(), FAMILIES.len() * 3);
        for check in checks {
            assert!(check.passed, "{}: {}", check.name, check.detail);
        }
    }
}
