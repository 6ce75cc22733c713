//! Weights from a seed: every shape can be timed without a download, at the exact size of the real model.
//!
//! Enters: the expected [`Inventory`], a plain float dtype and a seed. Leaves: the tensors by name. Values are random
//! normal and never zeros, because zeros draw less power and let the clock rise. A value depends only on the seed, the
//! tensor's name and its position: not on the order of tensors or the number of threads.

use std::collections::HashMap;
use std::num::NonZeroUsize;

use candle_core::{DType, Device, Tensor, WithDType};
use half::{bf16, f16};
use rand::{RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;
use sha2::{Digest, Sha256};
use statrs::distribution::{ContinuousCDF, Normal};

use super::loading::{WeightsError, plain_dtype};
use super::stored_matrix::PlainFloat;
use hbmark_core::model::{Dtype, Inventory, Role, TensorInfo};
use hbmark_core::units::Bytes;

/// The usual initialisation of decoder-only transformers (`initializer_range` of their configs): activations stay
/// finite through any depth, because each block begins with a norm.
const STANDARD_DEVIATION: f32 = 0.02;
/// Elements drawn from one stream of the generator; the unit of work of a thread.
const CHUNK_ELEMENTS: usize = 1 << 16;
/// One for each value of 16 random bits.
const QUANTILES: u32 = 1 << 16;
/// Draws taken from the generator together: 4 KiB stay in the first cache.
const DRAWS_AT_ONCE: usize = 2_048;

/// Makes every tensor of the inventory that a step reads, and calls `progress` with the bytes of each.
///
/// Matrices, embeddings and biases are N(0, 0.02²), norms N(1, 0.02²). The values are made straight in `dtype` by all cores of the host
/// and copied to the device one tensor at a time: a device's own generator would give others, and an engine whose weights come from a
/// `stream` would not have those of its reference.
pub fn generate(
    expected: &Inventory,
    dtype: Dtype,
    seed: u64,
    device: &Device,
    progress: &mut dyn FnMut(Bytes),
) -> Result<HashMap<String, Tensor>, WeightsError> {
    let threads = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    generate_on(expected, dtype, seed, device, threads, progress)
}

fn generate_on(
    expected: &Inventory,
    dtype: Dtype,
    seed: u64,
    device: &Device,
    threads: usize,
    progress: &mut dyn FnMut(Bytes),
) -> Result<HashMap<String, Tensor>, WeightsError> {
    let dtype = plain_dtype(dtype, "generated")?;
    match dtype {
        DType::F32 => on_host::<f32>(expected, seed, device, threads, progress),
        DType::BF16 => on_host::<bf16>(expected, seed, device, threads, progress),
        _ => on_host::<f16>(expected, seed, device, threads, progress),
    }
}

/// What the values of a tensor scatter around.
fn mean(info: &TensorInfo) -> Result<f32, WeightsError> {
    match info.role {
        Role::Norm => Ok(1.0),
        Role::Scale | Role::ExpertScale => {
            Err(WeightsError::NoDistribution { name: info.name.clone(), role: "scale" })
        }
        Role::Embedding
        | Role::Head
        | Role::Matrix
        | Role::Expert
        | Role::SharedExpert
        | Role::Router
        | Role::Bias
        | Role::ExpertBias
        | Role::Unused => Ok(0.0),
    }
}

/// The key of a tensor's generator: a hash of seed and name.
fn tensor_key(seed: u64, name: &str) -> [u8; 32] {
    Sha256::new().chain_update(seed.to_le_bytes()).chain_update(name.as_bytes()).finalize().into()
}

/// The middle of one of [`QUANTILES`] equally likely parts of the standard normal distribution.
pub(crate) fn standard_quantile(index: u16) -> f32 {
    let quantile = Normal::standard().inverse_cdf((f64::from(index) + 0.5) / f64::from(QUANTILES));
    #[expect(clippy::cast_possible_truncation, reason = "quantiles lie within five deviations")]
    let quantile = quantile as f32;
    quantile
}

/// The normal distribution as [`QUANTILES`] equally likely values, the midpoints of its quantiles.
///
/// A draw is one look-up of 16 random bits, several times faster than rejection sampling and as fine as bf16 can tell
/// (256 values to an octave). The spread is short of normal by less than 0.01% and no value is zero.
struct NormalTable<T>(Vec<T>);

impl<T: WithDType> NormalTable<T> {
    fn new(mean: f32, convert: impl Fn(f32) -> T) -> Self {
        let draw = |index| convert(standard_quantile(index).mul_add(STANDARD_DEVIATION, mean));
        Self((0..=u16::MAX).map(draw).collect())
    }

    /// Fills one chunk of a tensor from the stream that belongs to it.
    fn fill(&self, key: [u8; 32], chunk_index: u64, chunk: &mut [T]) {
        let mut generator = ChaCha8Rng::from_seed(key);
        generator.set_stream(chunk_index);
        let mut bytes = [0; DRAWS_AT_ONCE * 2];
        for values in chunk.chunks_mut(DRAWS_AT_ONCE) {
            generator.fill_bytes(&mut bytes);
            let (draws, _) = bytes.as_chunks::<2>();
            for (value, draw) in values.iter_mut().zip(draws) {
                *value = self.0[usize::from(u16::from_le_bytes(*draw))];
            }
        }
    }
}

/// Makes tensors one at a time on the host, each with the values that [`generate`] gives it there.
pub(crate) struct HostGenerator<T> {
    around_zero: NormalTable<T>,
    around_one: NormalTable<T>,
    seed: u64,
    threads: usize,
}

impl<T: PlainFloat> HostGenerator<T> {
    /// A generator that works on every core.
    pub(crate) fn new(seed: u64) -> Self {
        Self::on_threads(seed, std::thread::available_parallelism().map_or(1, NonZeroUsize::get))
    }

    fn on_threads(seed: u64, threads: usize) -> Self {
        let table = |mean| NormalTable::new(mean, T::narrow);
        Self { around_zero: table(0.0), around_one: table(1.0), seed, threads }
    }

    /// The elements of a tensor.
    pub(crate) fn values(&self, info: &TensorInfo) -> Result<Vec<T>, WeightsError> {
        let table = if mean(info)? == 0.0 { &self.around_zero } else { &self.around_one };
        drawn(info, table, tensor_key(self.seed, &info.name), self.threads)
    }
}

/// The tensors that a step reads, one after another.
fn on_host<T: PlainFloat>(
    expected: &Inventory,
    seed: u64,
    device: &Device,
    threads: usize,
    progress: &mut dyn FnMut(Bytes),
) -> Result<HashMap<String, Tensor>, WeightsError> {
    let generator = HostGenerator::<T>::on_threads(seed, threads);
    let read = expected.tensors.iter().filter(|info| info.role != Role::Unused);
    read.map(|info| {
        let tensor = Tensor::from_vec(generator.values(info)?, info.shape.as_slice(), device)
            .map_err(|error| WeightsError::Device { name: info.name.clone(), error })?;
        progress(Bytes(info.elements() * size_of::<T>() as u64));
        Ok((info.name.clone(), tensor))
    })
    .collect()
}

/// Draws the values of a tensor, each thread a run of chunks.
fn drawn<T: WithDType>(
    info: &TensorInfo,
    table: &NormalTable<T>,
    key: [u8; 32],
    threads: usize,
) -> Result<Vec<T>, WeightsError> {
    let bytes = info.elements().saturating_mul(size_of::<T>() as u64);
    let out_of_memory = || WeightsError::OutOfMemory { name: info.name.clone(), bytes };
    let elements = usize::try_from(info.elements()).map_err(|_| out_of_memory())?;
    let mut values = Vec::new();
    values.try_reserve_exact(elements).map_err(|_| out_of_memory())?;
    values.resize(elements, T::zero());

    let chunks_per_thread = elements.div_ceil(CHUNK_ELEMENTS).div_ceil(threads.max(1)).max(1);
    std::thread::scope(|scope| {
        for (thread, run) in values.chunks_mut(chunks_per_thread * CHUNK_ELEMENTS).enumerate() {
            scope.spawn(move || {
                for (index, chunk) in run.chunks_mut(CHUNK_ELEMENTS).enumerate() {
                    table.fill(key, (thread * chunks_per_thread + index) as u64, chunk);
                }
            });
        }
    });
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(name: &str, shape: &[usize], role: Role) -> TensorInfo {
        let shape = shape.to_vec();
        TensorInfo {
            name: name.to_owned(),
            shape,
            storage: "f32".to_owned(),
            bytes: Bytes(0),
            role,
            layer: None,
        }
    }

    fn inventory() -> Inventory {
        Inventory {
            tensors: vec![
                tensor("model.embed_tokens.weight", &[1000, 300], Role::Embedding),
                tensor("model.layers.0.self_attn.q_proj.weight", &[300, 300], Role::Matrix),
                tensor("model.norm.weight", &[3001], Role::Norm),
                tensor("model.layers.0.self_attn.q_proj.bias", &[3000], Role::Bias),
                tensor("model.rotary_emb.inv_freq", &[32], Role::Unused),
            ],
        }
    }

    fn values(tensors: &HashMap<String, Tensor>, name: &str) -> Vec<f32> {
        tensors[name].flatten_all().unwrap().to_dtype(DType::F32).unwrap().to_vec1().unwrap()
    }

    #[test]
    fn values_depend_on_seed_and_name_but_not_on_threads_or_order() {
        let mut reversed = inventory();
        reversed.tensors.reverse();
        let one = generate_on(&inventory(), Dtype::Bf16, 7, &Device::Cpu, 1, &mut |_| {}).unwrap();
        let five = generate_on(&reversed, Dtype::Bf16, 7, &Device::Cpu, 5, &mut |_| {}).unwrap();
        let other_seed = generate_on(&inventory(), Dtype::Bf16, 8, &Device::Cpu, 1, &mut |_| {}).unwrap();
        assert_eq!(one.len(), 4, "the unused tensor is not made");
        for name in one.keys() {
            assert_eq!(values(&one, name), values(&five, name), "{name}");
            assert_ne!(values(&one, name), values(&other_seed, name), "{name}");
        }
        let matrix = values(&one, "model.layers.0.self_attn.q_proj.weight");
        assert_ne!(values(&one, "model.embed_tokens.weight")[..100], matrix[..100]);
    }

    #[test]
    fn values_are_normal_with_the_moments_of_their_role_in_every_dtype() {
        for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
            let tensors = generate(&inventory(), dtype, 1, &Device::Cpu, &mut |_| {}).unwrap();
            for (name, tensor) in &tensors {
                assert_eq!(tensor.dtype(), plain_dtype(dtype, "").unwrap());
                let values = values(&tensors, name);
                assert!(values.iter().all(|v| *v != 0.0), "{name} {dtype} has a zero");
                let count = values.len() as f64;
                let mean = values.iter().map(|&v| f64::from(v)).sum::<f64>() / count;
                let variance = values.iter().map(|&v| (f64::from(v) - mean).powi(2)).sum::<f64>() / count;
                let expected = if name == "model.norm.weight" { 1.0 } else { 0.0 };
                // Five standard errors of the mean; the deviation within 8% at the smallest size.
                assert!((mean - expected).abs() < 5.0 * 0.02 / count.sqrt() + 1e-4, "{name} {dtype}: {mean}");
                assert!((variance.sqrt() / 0.02 - 1.0).abs() < 0.08, "{name} {dtype}: {}", variance.sqrt());
            }
        }
    }

    #[test]
    fn progress_adds_up_to_the_bytes_that_were_made() {
        let mut told = Vec::new();
        let tensors =
            generate(&inventory(), Dtype::Bf16, 1, &Device::Cpu, &mut |bytes| told.push(bytes)).unwrap();
        let elements: usize = tensors.values().map(Tensor::elem_count).sum();
        assert_eq!(told.len(), tensors.len());
        assert_eq!(told.into_iter().sum::<Bytes>(), Bytes(2 * elements as u64));
    }

    #[test]
    fn chunks_of_a_tensor_do_not_repeat_each_other() {
        let large = Inventory { tensors: vec![tensor("w", &[3, CHUNK_ELEMENTS], Role::Matrix)] };
        let values = values(&generate(&large, Dtype::F32, 3, &Device::Cpu, &mut |_| {}).unwrap(), "w");
        assert_ne!(values[..CHUNK_ELEMENTS], values[CHUNK_ELEMENTS..2 * CHUNK_ELEMENTS]);
        assert!(values.iter().all(|v| *v != 0.0), "no draw is zero");
    }

    #[test]
    fn quantised_dtypes_and_scales_are_refused() {
        let error =
            generate(&inventory(), Dtype::Int4, 0, &Device::Cpu, &mut |_| {}).unwrap_err().to_string();
        assert_eq!(error, "weights cannot be generated as int4: choose f32, bf16 or f16");
        let scales = Inventory { tensors: vec![tensor("w.weight_scale", &[4], Role::Scale)] };
        let error = generate(&scales, Dtype::F32, 0, &Device::Cpu, &mut |_| {}).unwrap_err().to_string();
        assert_eq!(
            error,
            "tensor w.weight_scale cannot be made from a seed: a scale needs the weights it scales"
        );
    }
}
