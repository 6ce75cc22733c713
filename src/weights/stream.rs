//! Tensors handed over one at a time, so that an engine can lay a model out without a second copy of it in memory.
//!
//! Enters: an [`Architecture`], a storage [`Dtype`] and where the weights are. Leaves: each tensor through a sink, in the order
//! of the architecture's inventory, and the inventory of what was handed over.

use std::path::Path;

use candle_core::DType;
use half::{bf16, f16};

use super::gguf::GgufModel;
use super::loading::{WeightsError, check_blocks, plain_dtype, transposed};
use super::quantised::Layer;
use super::safetensors::{Checkpoint, Source};
use super::stored_matrix::{Packing, PlainFloat, StoredMatrix, StoredTensor};
use super::synthetic::HostGenerator;
use crate::weights::OpenError;
use hbmark_core::model::{Architecture, Dtype, Inventory, ModuleStorage, Quantization, Role, TensorInfo};
use hbmark_core::units::Bytes;

/// What takes the tensors.
pub(super) type Sink<'a> = dyn FnMut(&str, StoredTensor) -> Result<(), OpenError> + 'a;

/// Streams random weights: the values of [`generate`](super::synthetic::generate), packed afterwards where `dtype` is quantised.
pub(super) fn from_seed(
    architecture: &Architecture,
    dtype: Dtype,
    seed: u64,
    sink: &mut Sink<'_>,
) -> Result<Inventory, OpenError> {
    match dtype {
        Dtype::F32 => seeded::<f32>(architecture, dtype, seed, sink),
        Dtype::F16 => seeded::<f16>(architecture, dtype, seed, sink),
        _ => seeded::<bf16>(architecture, dtype, seed, sink),
    }
}

fn seeded<T: PlainFloat>(
    architecture: &Architecture,
    dtype: Dtype,
    seed: u64,
    sink: &mut Sink<'_>,
) -> Result<Inventory, OpenError> {
    let plan = TensorPlan::new(architecture, dtype)?;
    let generator = HostGenerator::<T>::new(seed);
    plan.deliver(|info| Ok(plan.tensor(info, generator.values(info)?)), sink)
}

/// Streams a checkpoint, each tensor read when it is passed on.
pub(super) fn from_folder(
    architecture: &Architecture,
    dtype: Dtype,
    folder: &Path,
    sink: &mut Sink<'_>,
) -> Result<Inventory, OpenError> {
    let plan = TensorPlan::new(architecture, dtype)?;
    let own = architecture.quantization.as_ref();
    let stored = own.and_then(Quantization::dtype).unwrap_or(Dtype::Bf16);
    let checkpoint = Checkpoint::open(folder, &architecture.inventory(stored))?;
    checkpoint.check_storage(dtype)?;
    // A plain dtype is rounded to here, as loading does; a quantised one from the values as stored, without a step between.
    let rounded = plain_dtype(dtype, "streamed").ok();
    let mut sources = checkpoint.sources().peekable();
    plan.deliver(
        |info| {
            // Both follow the architecture's order; scales are not asked for, and come behind their matrix.
            let missing = || WeightsError::Missing {
                path: folder.to_path_buf(),
                name: info.name.clone(),
                expected: info.shape_in_files(),
                others: 0,
            };
            let source = sources.next().filter(|source| source.name() == info.name).ok_or_else(missing)?;
            let scales = std::iter::from_fn(|| sources.next_if(Source::is_scale)).collect();
            match &plan.formats {
                Some(storage) if source.is_quantised() => {
                    let (rows, columns) = info.rows_and_columns(plan.experts_by_input).ok_or_else(missing)?;
                    let layer = Layer { rows, columns, weights: source, scales };
                    Ok(StoredTensor::Matrix(layer.matrix(storage)?))
                }
                _ => read(&plan, info, &source, rounded),
            }
        },
        sink,
    )
}

fn read(
    plan: &TensorPlan,
    info: &TensorInfo,
    source: &Source<'_>,
    rounded: Option<DType>,
) -> Result<StoredTensor, WeightsError> {
    // A vector that checkpoints keep at f32 whatever the rest is stored as.
    let single = !is_matrix(info) && info.storage == "f32";
    Ok(match rounded.filter(|_| !single).unwrap_or(source.dtype()) {
        DType::BF16 => plan.tensor(info, plan.by_output(source.values::<bf16>()?, source)),
        DType::F16 => plan.tensor(info, plan.by_output(source.values::<f16>()?, source)),
        _ => plan.tensor(info, plan.by_output(source.values::<f32>()?, source)),
    })
}

/// Streams a GGUF file in its own block formats.
pub(super) fn from_gguf(path: &Path, sink: &mut Sink<'_>) -> Result<Inventory, OpenError> {
    let model = GgufModel::open(path)?;
    let inventory = model.architecture.inventory(Dtype::Gguf);
    let plan =
        TensorPlan { inventory, int4_group: 1, formats: None, experts_by_input: false, scales_inside: true };
    plan.deliver(
        |info| {
            Ok(if is_matrix(info) {
                StoredTensor::Matrix(model.matrix(info)?)
            } else {
                StoredTensor::Vector(model.vector(info)?)
            })
        },
        sink,
    )
}

fn is_matrix(info: &TensorInfo) -> bool {
    info.rows_and_columns(false).is_some()
}

/// What is to be handed over.
struct TensorPlan {
    inventory: Inventory,
    int4_group: usize,
    /// What the config says of each module, where its own storage is asked for.
    formats: Option<ModuleStorage>,
    /// Matrices of all experts of a layer are `[experts, input, out]`.
    experts_by_input: bool,
    /// Whatever the format, its scales are in the blocks of a file.
    scales_inside: bool,
}

impl TensorPlan {
    fn new(architecture: &Architecture, dtype: Dtype) -> Result<Self, WeightsError> {
        let int4_group = architecture.int4_group();
        if Packing::of(dtype, int4_group).is_none() {
            return Err(WeightsError::StreamedDtype { wanted: dtype });
        }
        let inventory = architecture.inventory(dtype);
        check_blocks(&inventory, dtype)?;
        let own = architecture.quantization.as_ref().filter(|own| own.dtype() == Some(dtype));
        // Rules that cannot be used make no inventory, either.
        let formats = own.and_then(|own| own.storage().ok());
        let experts_by_input = architecture.family.stores_experts_by_input();
        Ok(Self { inventory, int4_group, formats, experts_by_input, scales_inside: false })
    }

    /// The values of a stored tensor, those of experts output by output.
    fn by_output<T: Copy + Send + Sync>(&self, values: Vec<T>, source: &Source<'_>) -> Vec<T> {
        match *source.shape() {
            [experts, input, out] if self.experts_by_input => transposed(&values, experts, input, out),
            _ => values,
        }
    }

    /// A tensor in the storage that the plan has for it.
    fn tensor<T: PlainFloat>(&self, info: &TensorInfo, values: Vec<T>) -> StoredTensor {
        let Some((rows, columns)) = info.rows_and_columns(self.experts_by_input) else {
            return StoredTensor::Vector(values.into_iter().map(T::widen).collect());
        };
        let matrix = StoredMatrix { rows, columns, data: T::data(values) };
        let packing = Packing::of_tensor(info, self.int4_group, self.formats.as_ref())
            .expect("a dtype that streams has packings");
        StoredTensor::Matrix(if matrix.packing() == packing {
            matrix
        } else {
            StoredMatrix::quantize(&matrix, packing)
        })
    }

    /// Fetches each tensor and passes it on. Scales come with their matrix and are entries of the inventory only.
    fn deliver(
        &self,
        mut fetch: impl FnMut(&TensorInfo) -> Result<StoredTensor, WeightsError>,
        sink: &mut Sink<'_>,
    ) -> Result<Inventory, OpenError> {
        let mut delivered = Inventory::default();
        for info in &self.inventory.tensors {
            let (storage, bytes) = match info.role {
                Role::Unused => continue,
                Role::Scale | Role::ExpertScale => (info.storage.clone(), info.bytes),
                _ => {
                    let tensor = fetch(info)?;
                    let account = self.account(&tensor);
                    sink(&name_of_weights(info), tensor)?;
                    account
                }
            };
            delivered.tensors.push(TensorInfo { storage, bytes, ..info.clone() });
        }
        Ok(delivered)
    }

    /// Storage and bytes of a tensor's entry. Scales have entries of their own, but those inside blocks of ggml.
    fn account(&self, tensor: &StoredTensor) -> (String, Bytes) {
        match tensor {
            StoredTensor::Vector(values) => ("f32".to_owned(), Bytes(size_of_val(values.as_slice()) as u64)),
            StoredTensor::Matrix(matrix) => {
                let inside = self.scales_inside || matches!(matrix.packing(), Packing::Q8_0 | Packing::Q4_0);
                let bytes = if inside { matrix.bytes() } else { matrix.value_bytes() };
                (matrix.storage().to_owned(), bytes)
            }
        }
    }
}

/// The name that a tensor has where it is not quantised, but for blocks of all experts.
pub(crate) fn name_of_weights(info: &TensorInfo) -> String {
    match info.name.strip_suffix(".weight_packed").or_else(|| info.name.strip_suffix(".qweight")) {
        Some(module) => format!("{module}.weight"),
        None => info.name.clone(),
    }
}

#[cfg(test)]
mod tests;
