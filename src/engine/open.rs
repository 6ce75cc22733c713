//! From an engine's name to a session.
//!
//! Enters: a name, an opened model, a dtype and a device. Leaves: a [`Session`], or what the engine cannot do. One arm per engine.

use super::stock::{self, StockSession};
use super::{Backend, DeviceChoice, DeviceOptions, EngineError, Session, error_mapping, native};
use crate::weights::{OpenModel, Weights};
use hbmark_core::model::Dtype;
use hbmark_core::result::{Capabilities, EngineKind};
use hbmark_core::units::Bytes;

/// Loads a model's weights and opens an engine over them; `loaded` is called after each tensor with the bytes loaded so far and in
/// total.
///
/// # Errors
/// When the engine does not run the model, the device cannot be opened, or the weights cannot be read.
pub fn open(
    engine: &str,
    model: &OpenModel,
    dtype: Dtype,
    device: DeviceChoice,
    options: DeviceOptions,
    loaded: &mut dyn FnMut(Bytes, Bytes),
) -> Result<Box<dyn Session>, EngineError> {
    let kind = known(engine)?;
    // Refused before anything is loaded.
    capabilities(engine, model, dtype, device)?;
    check_kv_dtype(engine, model, dtype, device, options.kv_dtype)?;
    let mut tensor_loaded = counted(model, dtype, loaded);
    if kind == EngineKind::Native {
        let ranks = EngineKind::ranks(engine);
        return native::open(model, dtype, (device, ranks), options, &mut tensor_loaded);
    }
    let keep_memory_pool = options.keep_memory_pool || kind == EngineKind::StockPool;
    let backend = Backend::open(device, DeviceOptions { keep_memory_pool, ..options })?;
    let weights = model.load(dtype, &backend.device, &mut tensor_loaded);
    let session = match weights.map_err(|error| error_mapping::of_loading(&backend.name, error))? {
        Weights::Tensors { tensors, inventory } => {
            StockSession::new(model.architecture.clone(), tensors, inventory, dtype, backend)?
        }
        Weights::Gguf { content, mut file, inventory } => {
            StockSession::from_gguf(model.architecture.clone(), *content, &mut file, inventory, backend)?
        }
    };
    #[cfg(feature = "cuda")]
    if kind == EngineKind::StockGraph {
        return Ok(Box::new(super::replay::Replayed::new(session, kind.name())));
    }
    Ok(Box::new(session.named(kind)))
}

/// Adds up the bytes of tensors as they are loaded.
fn counted(model: &OpenModel, dtype: Dtype, loaded: &mut dyn FnMut(Bytes, Bytes)) -> impl FnMut(Bytes) {
    let (mut done, total) = (Bytes(0), model.inventory(dtype).total_bytes());
    move |bytes| {
        done = done + bytes;
        loaded(done, total);
    }
}

/// What an engine could do with a model, without loading it.
///
/// # Errors
/// When the engine does not run the model or the dtype.
pub fn capabilities(
    engine: &str,
    model: &OpenModel,
    dtype: Dtype,
    device: DeviceChoice,
) -> Result<Capabilities, EngineError> {
    let own = capabilities_of(known(engine)?, model, dtype, device)?;
    let ranks = EngineKind::ranks(engine);
    if ranks > 1 {
        native::check_ranks(model, dtype, device, ranks)?;
    }
    Ok(Capabilities { engine: engine.to_owned(), ..own })
}

fn capabilities_of(
    kind: EngineKind,
    model: &OpenModel,
    dtype: Dtype,
    device: DeviceChoice,
) -> Result<Capabilities, EngineError> {
    let on_host = device == DeviceChoice::Cpu;
    if kind == EngineKind::Native {
        native::check(&model.architecture, dtype)?;
        native::check_model_on_device(model, dtype, device)?;
        return Ok(native::capabilities(&model.architecture, &device.to_string(), on_host));
    }
    stock::check_device(kind, device)?;
    if !model.is_gguf() {
        stock::candle_dtype(dtype)?;
    }
    if model.architecture.experts.is_some() && !on_host {
        return Err(EngineError::unsupported(
            kind.name(),
            format!("mixtures of experts on {device}"),
            "candle routes them on the host, with copies to it in every layer; choose --device cpu, or the native engine",
        ));
    }
    if model.gguf_files() > 1 {
        return Err(EngineError::unsupported(
            kind.name(),
            format!("a GGUF model in {} files", model.gguf_files()),
            "candle's own reader takes one; choose the native engine, or merge them with `llama-gguf-split --merge`",
        ));
    }
    let limits = stock::limits(&model.architecture, dtype, model.is_gguf())?;
    Ok(stock::capabilities(kind, limits, &device.to_string(), on_host))
}

fn known(engine: &str) -> Result<EngineKind, EngineError> {
    EngineKind::of(engine)
        .ok_or_else(|| EngineError::unsupported(engine, "anything", "it is not in this build"))
}

/// The dtype that is sensible for an engine where none is asked for: the native engine streams bf16 on a CPU, where candle's
/// products are fastest in f32.
pub fn default_dtype(engine: &str, model: &OpenModel, device: DeviceChoice) -> Dtype {
    match (EngineKind::of(engine), device, model.default_dtype(device)) {
        (Some(EngineKind::Native), DeviceChoice::Cpu, Dtype::F32) => Dtype::Bf16,
        (_, _, dtype) => dtype,
    }
}

/// The storage of the KV cache in an engine: what is asked for, otherwise what goes with a dtype of weights.
pub fn kv_dtype(engine: &str, model: &OpenModel, dtype: Dtype, asked: Option<Dtype>) -> Dtype {
    let own = || {
        if EngineKind::of(engine) == Some(EngineKind::Native) {
            native::kv_dtype(dtype)
        } else {
            model.kv_dtype(dtype)
        }
    };
    asked.unwrap_or_else(own)
}

/// Checks that an engine can keep the KV cache as it is asked for.
///
/// # Errors
/// [`EngineError::Unsupported`] with the dtypes that it can.
pub fn check_kv_dtype(
    engine: &str,
    model: &OpenModel,
    dtype: Dtype,
    device: DeviceChoice,
    asked: Option<Dtype>,
) -> Result<(), EngineError> {
    let own = kv_dtype(engine, model, dtype, None);
    match asked {
        Some(asked) if asked != own && EngineKind::of(engine) == Some(EngineKind::Native) => {
            native::check_kv_dtype(&model.architecture, dtype, device, asked)
        }
        Some(asked) if asked != own => Err(EngineError::unsupported(
            engine,
            format!("a KV cache in {asked}"),
            format!("candle keeps it in {own} beside weights in {dtype}; the native engine has others"),
        )),
        _ => Ok(()),
    }
}

/// What the reference of an engine's outputs is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReferenceKind {
    /// candle in f32, on the engine's own device.
    Stock,
    /// The native forward in f32 over the dequantised weights, which is always on the host.
    Dequantised,
}

fn reference_kind(
    engine: &str,
    model: &OpenModel,
    dtype: Dtype,
    device: DeviceChoice,
) -> Result<Option<ReferenceKind>, EngineError> {
    let kind = known(engine)?;
    match dtype {
        Dtype::F32 if kind.is_stock() => Ok(None),
        // Which experts rows meet may hang by a rounding error: engines are compared under a script of their choices, which candle cannot follow.
        _ if model.architecture.experts.is_some() => {
            Ok((kind == EngineKind::Native && dtype != Dtype::F32).then_some(ReferenceKind::Dequantised))
        }
        Dtype::F32 | Dtype::Bf16 | Dtype::F16 if !model.is_gguf() => {
            match capabilities_of(EngineKind::Stock, model, Dtype::F32, device) {
                Ok(_) => Ok(Some(ReferenceKind::Stock)),
                // A model that candle does not run as published is not a reference.
                Err(EngineError::Unsupported { .. }) => Ok(None),
                Err(other) => Err(other),
            }
        }
        _ => Ok((kind == EngineKind::Native).then_some(ReferenceKind::Dequantised)),
    }
}

/// Where the f32 copy of the weights lies that an engine's outputs are compared with; `None` where there is no reference.
pub fn reference_device(
    engine: &str,
    model: &OpenModel,
    dtype: Dtype,
    device: DeviceChoice,
) -> Result<Option<DeviceChoice>, EngineError> {
    Ok(reference_kind(engine, model, dtype, device)?.map(|kind| match kind {
        ReferenceKind::Stock => device,
        ReferenceKind::Dequantised => DeviceChoice::Cpu,
    }))
}

/// Opens the reference of an engine's outputs: the same weights multiplied in f32. `None` where there is none.
///
/// Plain floats are compared with candle. Quantised weights, and 16-bit ones of mixtures, are compared with the native
/// forward in f32 over the dequantised weights, so that only the kernels and the rounding of activations differ.
pub fn open_reference(
    engine: &str,
    model: &OpenModel,
    dtype: Dtype,
    device: DeviceChoice,
    options: DeviceOptions,
    loaded: &mut dyn FnMut(Bytes, Bytes),
) -> Result<Option<Box<dyn Session>>, EngineError> {
    match reference_kind(engine, model, dtype, device)? {
        None => Ok(None),
        Some(ReferenceKind::Stock) => {
            open(EngineKind::Stock.name(), model, Dtype::F32, device, options, loaded).map(Some)
        }
        Some(ReferenceKind::Dequantised) => {
            let mut tensor_loaded = counted(model, dtype, loaded);
            Ok(Some(Box::new(native::open_dequantised(model, dtype, options, &mut tensor_loaded)?)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn fixture(name: &str) -> OpenModel {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models").join(name);
        crate::weights::open(path.to_str().unwrap(), None, 0).unwrap()
    }

    #[test]
    fn the_reference_lies_where_its_copy_is_made() {
        let model = fixture("llama-gqa");
        let place = |engine, dtype, device| reference_device(engine, &model, dtype, device).unwrap();
        let (cpu, gpu) = (DeviceChoice::Cpu, DeviceChoice::Cuda(0));
        for dtype in [Dtype::Fp8, Dtype::Int8] {
            assert_eq!(place("native", dtype, gpu), Some(cpu), "dequantised on the host");
        }
        assert_eq!(place("native", Dtype::Bf16, gpu), Some(gpu));
        assert_eq!(place("native", Dtype::Bf16, cpu), Some(cpu));
        assert_eq!(place("stock", Dtype::F32, gpu), None);
        let mixture = fixture("qwen2-moe");
        assert_eq!(reference_device("native", &mixture, Dtype::Bf16, cpu).unwrap(), Some(cpu));
        assert_eq!(reference_device("native", &mixture, Dtype::F32, cpu).unwrap(), None);
    }

    #[test]
    fn every_tensor_of_a_reference_is_told_of_as_it_is_loaded() {
        let model = fixture("qwen2");
        for dtype in [Dtype::Bf16, Dtype::Int8] {
            let mut told = Vec::new();
            let (device, options) = (DeviceChoice::Cpu, DeviceOptions::default());
            let reference = open_reference("native", &model, dtype, device, options, &mut |done, total| {
                told.push((done, total));
            });
            assert!(reference.unwrap().is_some());
            assert!(told.len() > 10 && told.is_sorted(), "{dtype}: {told:?}");
            // Of packed weights the scales that are padded are counted by the loader alone.
            let (done, total) = told[told.len() - 1];
            assert!((0.98..1.02).contains(&(done.as_f64() / total.as_f64())), "{dtype}: {done} of {total}");
        }
    }

    /// A generator of the device's own once gave candle other weights there than the engine that it was the reference of.
    #[test]
    fn an_engine_and_its_reference_have_the_same_synthetic_weights() {
        let model = OpenModel::synthetic("small", fixture("qwen2").architecture, 9);
        let device = DeviceChoice::Cpu;
        let prompt = crate::engine::StepBatch::uniform(crate::engine::SequenceId(0), &[vec![5, 9, 2]], 0);
        let logits = |session: &mut dyn Session| {
            session.step(&prompt).unwrap();
            session.logits().unwrap().remove(0)
        };
        let options = DeviceOptions::default();
        let mut native = open("native", &model, Dtype::F32, device, options, &mut |_, _| {}).unwrap();
        let mut reference =
            open_reference("native", &model, Dtype::F32, device, options, &mut |_, _| {}).unwrap().unwrap();
        let (found, wanted) = (logits(native.as_mut()), logits(reference.as_mut()));
        assert!(crate::engine::relative_error(&found, &wanted) < 1e-4);
    }
}
