//! The tensors of a GGUF file, block by block, under the names and in the row order of the Hugging Face checkpoint.
//!
//! Enters: a checked file. Leaves: matrices in a [`Packing`] that the native engine streams, read a few megabytes at a time.
//! `q8_0`, `q4_0`, `q4_k`, `q5_k`, `q6_k`, mxfp4 and plain floats keep their bits; every other block is dequantised by candle and packed as `q8_0`.
//!
//! *Source* of the order of rows: `LlamaModel.permute` of llama.cpp's
//! converter, `w.reshape(heads, 2, head_dim / 2, columns).swapaxes(1, 2)`.

use std::borrow::Cow;
use std::collections::HashMap;

use candle_core::Device;
use candle_core::quantized::{GgmlDType, QStorage, QTensor};
use half::{bf16, f16};

use super::header::{FileTensor, GgufError, file_shape, file_tensor};
use super::{GgufModel, Header, bad_file};
use crate::weights::loading::{SizedFile, WeightsError};
use crate::weights::stored_matrix::{BLOCK, Packing, StoredData, StoredMatrix, SuperBlock};
use hbmark_core::model::{Family, TensorInfo};
use hbmark_cpu_kernels::e8m0;

/// Bytes read at once: large enough for full disk speed, small compared with any model.
const BAND_BYTES: usize = 4 << 20;

/// The one block format that the engine multiplies and candle does not read, and bytes of its blocks of 32.
pub(super) const MXFP4: &str = "mxfp4";
const MXFP4_BYTES: usize = 17;

/// Where the tensors of a model are, by the names of its files.
#[derive(Debug, Default)]
pub(super) struct TensorLocations(HashMap<String, TensorLocation>);

#[derive(Debug, Clone)]
struct TensorLocation {
    /// Which of the files.
    file: usize,
    storage: &'static str,
    shape: Vec<usize>,
    /// Offset in the file.
    offset: u64,
    bytes: u64,
}

impl TensorLocations {
    /// Adds the tensors of a file.
    pub(super) fn add(&mut self, file: usize, header: &Header) {
        let place = |tensor: &super::header::TensorEntry| TensorLocation {
            file,
            storage: tensor.storage,
            shape: tensor.shape.clone(),
            offset: header.data_start + tensor.offset,
            bytes: tensor.bytes,
        };
        self.0.extend(header.tensors.iter().map(|tensor| (tensor.name.clone(), place(tensor))));
    }
}

/// How the rows of Q and K lie in a file.
#[derive(Debug, Clone, Copy)]
enum RowOrder {
    AsInCheckpoint,
    /// The two halves of each head are interleaved: rotary pairs are neighbours.
    Interleaved {
        head_dim: usize,
    },
}

impl RowOrder {
    /// The checkpoint's row of a file's row.
    fn checkpoint_row(self, row: usize) -> usize {
        match self {
            Self::AsInCheckpoint => row,
            Self::Interleaved { head_dim } => {
                let (head, within) = (row / head_dim, row % head_dim);
                let (pair, half) = (within / 2, within % 2);
                head * head_dim + half * (head_dim / 2) + pair
            }
        }
    }
}

impl GgufModel {
    /// Reads a matrix by its name in the checkpoint.
    pub(crate) fn matrix(&self, info: &TensorInfo) -> Result<StoredMatrix, WeightsError> {
        let place = self.place(info)?;
        let (rows, columns) = (info.shape[0], info.shape[1]);
        let order = self.row_order(&info.name);
        let mut matrix = StoredMatrix::blank(rows, columns, packing(place.storage));
        place.bands(&self.files, &info.name, rows, |first, bytes| {
            let band = self.band(info, place.storage, bytes, columns)?;
            for row in 0..band.rows {
                matrix.copy_row(order.checkpoint_row(first + row), &band, row);
            }
            Ok(())
        })?;
        Ok(matrix)
    }

    /// Reads a norm or a bias by its name in the checkpoint.
    pub(crate) fn vector(&self, info: &TensorInfo) -> Result<Vec<f32>, WeightsError> {
        let place = self.place(info)?;
        let order = self.row_order(&info.name);
        let mut vector = vec![0.0; info.shape[0]];
        place.bands(&self.files, &info.name, 1, |_, bytes| {
            let values = self.dequantised(&info.name, place.storage, bytes, &[vector.len()])?;
            for (row, value) in values.into_iter().enumerate() {
                vector[order.checkpoint_row(row)] = value;
            }
            Ok(())
        })?;
        Ok(vector)
    }

    /// Reads every tensor, and keeps nothing of it: for a reader that does not look at values.
    pub(super) fn check_values(&self) -> Result<(), WeightsError> {
        self.places.0.iter().try_for_each(|(name, place)| {
            let rows = place.shape.split_last().map_or(1, |(_, above)| above.iter().product());
            place.bands(&self.files, name, rows, |_, _| Ok(()))
        })
    }

    /// Where the tensor of a checkpoint lies: of one that the file has for all experts, the expert's part.
    fn place(&self, info: &TensorInfo) -> Result<TensorLocation, WeightsError> {
        let own = || FileTensor { name: info.name.clone(), expert: None };
        let FileTensor { name, expert } =
            file_tensor(self.architecture.family, &info.name).unwrap_or_else(own);
        let path = || self.path().to_path_buf();
        let Some(place) = self.places.0.get(&name) else {
            return Err(WeightsError::Missing {
                path: path(),
                name,
                expected: info.shape.clone(),
                others: 0,
            });
        };
        let (part, parts) = match (expert, place.shape.split_first()) {
            (Some(expert), Some((&experts, shape))) if expert < experts && shape == info.shape => {
                (expert as u64, experts as u64)
            }
            (None, _) if file_shape(&place.shape) == file_shape(&info.shape) => (0, 1),
            _ => {
                let (found, expected) = (place.shape.clone(), info.shape.clone());
                return Err(WeightsError::WrongShape { path: path(), name, found, expected });
            }
        };
        // Rows are whole blocks, and so are experts.
        let bytes = place.bytes / parts;
        let offset = place.offset + part * bytes;
        Ok(TensorLocation { shape: info.shape.clone(), offset, bytes, ..*place })
    }

    /// Files of the llama family, its mixtures among them, have Q and K, weights and biases, in the order that ggml rotates; the others do not.
    fn row_order(&self, name: &str) -> RowOrder {
        let rotated = name.contains(".q_proj.") || name.contains(".k_proj.");
        if rotated && matches!(self.architecture.family, Family::Llama | Family::Mixtral) {
            RowOrder::Interleaved { head_dim: self.architecture.head_dim }
        } else {
            RowOrder::AsInCheckpoint
        }
    }

    /// Whole rows of a matrix from their bytes.
    fn band(
        &self,
        info: &TensorInfo,
        storage: &'static str,
        bytes: &[u8],
        columns: usize,
    ) -> Result<StoredMatrix, WeightsError> {
        let data = match storage {
            "f32" => StoredData::F32(words(bytes, f32::from_le_bytes)),
            "f16" => StoredData::F16(words(bytes, f16::from_le_bytes)),
            "bf16" => StoredData::Bf16(words(bytes, bf16::from_le_bytes)),
            "q8_0" => q8_0(bytes),
            "q4_0" => q4_0(bytes),
            MXFP4 => mxfp4(bytes),
            _ => {
                if let Packing::Super(format) = packing(storage) {
                    StoredData::Super { format, blocks: bytes.to_vec() }
                } else {
                    let rows = bytes.len() / row_bytes(storage, columns);
                    let floats = self.dequantised(&info.name, storage, bytes, &[rows, columns])?;
                    return Ok(StoredMatrix::from_f32_rows(rows, columns, &floats, Packing::Q8_0));
                }
            }
        };
        Ok(StoredMatrix { rows: bytes.len() / row_bytes(storage, columns), columns, data })
    }

    /// The values of blocks as candle reads them.
    fn dequantised(
        &self,
        name: &str,
        storage: &'static str,
        bytes: &[u8],
        shape: &[usize],
    ) -> Result<Vec<f32>, WeightsError> {
        let Some(dtype) = ggml_dtype(storage) else {
            return Err(bad_file(self.path(), GgufError::Unsupported { name: name.to_owned(), storage }));
        };
        QStorage::from_data(Cow::Borrowed(bytes), &Device::Cpu, dtype)
            .and_then(|blocks| QTensor::new(blocks, shape))
            .and_then(|tensor| tensor.dequantize(&Device::Cpu)?.flatten_all()?.to_vec1())
            .map_err(|error| bad_file(self.path(), GgufError::Reader { problem: error.to_string() }))
    }
}

impl TensorLocation {
    /// Reads the tensor in bands of whole rows; `take` gets the first row of each and its bytes.
    fn bands(
        &self,
        files: &[SizedFile],
        name: &str,
        rows: usize,
        mut take: impl FnMut(usize, &[u8]) -> Result<(), WeightsError>,
    ) -> Result<(), WeightsError> {
        let out_of_memory = || WeightsError::OutOfMemory { name: name.to_owned(), bytes: self.bytes };
        // The header's shape times its block size is the tensor's bytes, so rows divide them.
        let row = usize::try_from(self.bytes).map_err(|_| out_of_memory())? / rows;
        let band_rows = (BAND_BYTES / row).clamp(1, rows);
        let file = &files[self.file];
        let mut buffer = Vec::new();
        buffer.try_reserve_exact(band_rows * row).map_err(|_| out_of_memory())?;
        buffer.resize(band_rows * row, 0);
        for first in (0..rows).step_by(band_rows) {
            let bytes = &mut buffer[..band_rows.min(rows - first) * row];
            file.read_at(bytes, self.offset + (first * row) as u64)?;
            if !is_finite(self.storage, bytes) {
                return Err(WeightsError::not_finite(file.path(), name));
            }
            take(first, bytes)?;
        }
        Ok(())
    }
}

/// Whether no float in blocks is NaN or infinite: everything beside them is whole numbers.
fn is_finite(storage: &str, bytes: &[u8]) -> bool {
    // All bits of the exponent are set in what is not a number.
    let f16 = |word: &[u8]| u16::from_le_bytes([word[0], word[1]]) & 0x7c00 != 0x7c00;
    let bf16 = |word: &[u8]| u16::from_le_bytes([word[0], word[1]]) & 0x7f80 != 0x7f80;
    let f32 = |word: &[u8]| bf16(&word[2..]);
    // Where the scales of a block are, by the structs of ggml-common.h.
    let scales = match storage {
        "f32" => return bytes.chunks_exact(4).all(f32),
        "bf16" => return bytes.chunks_exact(2).all(bf16),
        MXFP4 => return bytes.chunks_exact(MXFP4_BYTES).all(|block| block[0] != e8m0::NAN),
        "f16" | "q4_0" | "q5_0" | "q8_0" => 0..2,
        "q4_1" | "q5_1" | "q4_k" | "q5_k" => 0..4,
        "q2_k" => 80..84,
        "q3_k" => 108..110,
        "q6_k" => 208..210,
        _ => return true,
    };
    let block = ggml_dtype(storage).map_or(1, |dtype| dtype.type_size());
    bytes.chunks_exact(block).all(|block| block[scales.clone()].chunks_exact(2).all(f16))
}

/// What a block format is kept in.
pub fn packing(storage: &str) -> Packing {
    match storage {
        "f32" => Packing::F32,
        "f16" => Packing::F16,
        "bf16" => Packing::Bf16,
        "q4_0" => Packing::Q4_0,
        MXFP4 => Packing::Mxfp4,
        _ => SuperBlock::ALL
            .into_iter()
            .find(|format| format.name() == storage)
            .map_or(Packing::Q8_0, Packing::Super),
    }
}

/// candle's type of a block format's name.
fn ggml_dtype(storage: &str) -> Option<GgmlDType> {
    Some(match storage {
        "f32" => GgmlDType::F32,
        "f16" => GgmlDType::F16,
        "bf16" => GgmlDType::BF16,
        "q4_0" => GgmlDType::Q4_0,
        "q4_1" => GgmlDType::Q4_1,
        "q5_0" => GgmlDType::Q5_0,
        "q5_1" => GgmlDType::Q5_1,
        "q8_0" => GgmlDType::Q8_0,
        "q2_k" => GgmlDType::Q2K,
        "q3_k" => GgmlDType::Q3K,
        "q4_k" => GgmlDType::Q4K,
        "q5_k" => GgmlDType::Q5K,
        "q6_k" => GgmlDType::Q6K,
        _ => return None,
    })
}

/// Bytes of a row of whole blocks.
fn row_bytes(storage: &str, columns: usize) -> usize {
    if storage == MXFP4 {
        return columns / BLOCK * MXFP4_BYTES;
    }
    ggml_dtype(storage).map_or(1, |dtype| columns / dtype.block_size() * dtype.type_size())
}

fn words<const N: usize, T>(bytes: &[u8], decode: impl Fn([u8; N]) -> T) -> Vec<T> {
    bytes.as_chunks::<N>().0.iter().map(|word| decode(*word)).collect()
}

/// ggml's `block_q8_0`: an f16 scale, then 32 signed bytes.
fn q8_0(bytes: &[u8]) -> StoredData {
    let blocks = bytes.as_chunks::<34>().0;
    let scales = blocks.iter().map(|block| f16::from_le_bytes([block[0], block[1]])).collect();
    let quants = blocks.iter().flat_map(|block| &block[2..]).map(|byte| byte.cast_signed()).collect();
    StoredData::Q8_0 { quants, scales }
}

/// ggml's `block_q4_0`: an f16 scale, then 16 bytes of which byte j holds column j low and column j + 16 high.
fn q4_0(bytes: &[u8]) -> StoredData {
    let blocks = bytes.as_chunks::<18>().0;
    let scales = blocks.iter().map(|block| f16::from_le_bytes([block[0], block[1]])).collect();
    StoredData::Q4_0 { nibbles: neighbours(blocks.iter().map(|block| &block[2..])), scales }
}

/// ggml's `block_mxfp4`: the power of two, then 16 bytes as in `q4_0`.
fn mxfp4(bytes: &[u8]) -> StoredData {
    let blocks = bytes.as_chunks::<MXFP4_BYTES>().0;
    let scales = blocks.iter().map(|block| block[0]).collect();
    StoredData::Mxfp4 { nibbles: neighbours(blocks.iter().map(|block| &block[1..])), scales }
}

/// Nibbles with neighbouring columns in a byte, of blocks that keep columns j and j + 16 together.
fn neighbours<'a>(blocks: impl ExactSizeIterator<Item = &'a [u8]>) -> Vec<u8> {
    let mut nibbles = Vec::with_capacity(blocks.len() * (BLOCK / 2));
    for block in blocks {
        // Columns 0..16 are the low halves of all bytes, columns 16..32 the high ones.
        for shift in [0, 4] {
            for [even, odd] in block.as_chunks::<2>().0 {
                nibbles.push(((even >> shift) & 0xF) | (((odd >> shift) & 0xF) << 4));
            }
        }
    }
    nibbles
}

#[cfg(test)]
mod tests;
