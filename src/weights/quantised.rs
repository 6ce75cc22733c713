//! Linear layers of quantised checkpoints, as their writers store them: fp8, mxfp8, integers of 8 and 4 bits, mxfp4, nvfp4.
//!
//! Enters: the tensors of one layer, still in their files, and the [`Format`] that the config states for it. Leaves: a [`StoredMatrix`] of the
//! same codes and scales. Nothing is rounded but the scales of 4-bit integers, which become f16, as they are in most files. Everything is checked
//! against the layer's shape before it is used: shapes and types of the parts, scales and codes that are not numbers.
//!
//! *Source* of the layouts: `DeepSeek`-V3's `weight_scale_inv`; `compressed-tensors`' `pack_quantized`; `AutoAWQ`'s GEMM order of columns;
//! `AutoGPTQ`'s packing along inputs; `ModelOpt`'s `weight_scale_2`, which is one by `weight_global_scale` in `compressed-tensors`.

use half::f16;

use super::loading::{WeightsError, transposed};
use super::safetensors::Source;
use hbmark_cpu_kernels::{e4m3, e8m0};

use super::stored_matrix::{StoredData, StoredMatrix};
use hbmark_core::model::{
    Architecture, Dtype, Family, Format, Layout, ModuleStorage, NVFP4_GROUP, Quantization, Scales,
};

/// Codes of 4 bits in a word.
const PER_WORD: usize = 8;

/// Which output each 4 bits of a word of `AutoAWQ` belongs to, from the lowest on.
const AWQ_ORDER: [usize; PER_WORD] = [0, 2, 4, 6, 1, 3, 5, 7];

/// What stands for zero in symmetric codes of 4 bits.
const MIDDLE: f32 = 8.0;

/// Inputs that share a scale of the activations, of which groups of weights are multiples.
const GROUP: usize = 32;

/// The storage in which a quantised checkpoint is streamed as it is stored.
pub fn streamed_as(architecture: &Architecture, own: &Quantization) -> Result<Dtype, String> {
    let dtype = own.dtype().ok_or("a format without a name")?;
    if own.rules.is_empty() {
        return Err("a result of an earlier version does not say which modules are quantised".into());
    }
    let layout = own.layout();
    for format in own.rules.iter().filter_map(|rule| rule.format) {
        check(architecture.family, layout, format)?;
    }
    Ok(dtype)
}

fn check(family: Family, layout: Layout, format: Format) -> Result<(), String> {
    let grouped = |scales: Scales| match scales {
        Scales::Group { size } => size.is_multiple_of(GROUP),
        Scales::Channel => true,
        Scales::Tensor | Scales::Block { .. } => false,
    };
    let by_row = |scales| matches!(scales, Scales::Tensor | Scales::Channel);
    let known = match format {
        Format::Fp8 { scales, .. } => !matches!(scales, Scales::Group { .. }),
        Format::Mxfp4 => {
            layout == Layout::CompressedTensors || (layout == Layout::Hub && family == Family::GptOss)
        }
        Format::Int { bits: 8, scales, zeros } => {
            layout == Layout::CompressedTensors && by_row(scales) && !zeros
        }
        Format::Int { scales, zeros, .. } => match layout {
            Layout::CompressedTensors | Layout::Awq | Layout::Gptq { .. } if !grouped(scales) => {
                return Err(format!(
                    "4-bit integers whose scales are of {scales:?}, which is not a multiple of {GROUP} inputs"
                ));
            }
            Layout::Gptq { reordered: true } => return Err("GPTQ with reordered inputs (desc_act)".into()),
            Layout::Gptq { .. } if zeros => {
                return Err("GPTQ with zeros (sym false), which its versions store in two ways".into());
            }
            Layout::CompressedTensors | Layout::Gptq { .. } => true,
            Layout::Awq => zeros,
            _ => false,
        },
        Format::Mxfp8 => matches!(layout, Layout::Hub | Layout::ModelOpt | Layout::CompressedTensors),
        Format::Nvfp4 { .. } => matches!(layout, Layout::ModelOpt | Layout::CompressedTensors),
        Format::Nf4 { .. } => false,
    };
    if known { Ok(()) } else { Err(format!("{} of {layout:?}", format.dtype())) }
}

/// The module of a tensor of weights, by its name in a quantised checkpoint.
pub(super) fn module(name: &str) -> &str {
    let suffixes = [".weight_packed", ".qweight", ".weight", "_blocks"];
    suffixes.iter().find_map(|suffix| name.strip_suffix(suffix)).unwrap_or(name)
}

/// One linear layer in its files.
pub(super) struct Layer<'a> {
    pub rows: usize,
    pub columns: usize,
    pub weights: Source<'a>,
    /// Its scales and zeros.
    pub scales: Vec<Source<'a>>,
}

impl Layer<'_> {
    /// The layer as it is stored.
    pub(super) fn matrix(&self, storage: &ModuleStorage) -> Result<StoredMatrix, WeightsError> {
        let Self { rows, columns, .. } = *self;
        let format = storage.format(module(self.weights.name()));
        let data = match (format, storage.layout()) {
            (Some(Format::Fp8 { scales, .. }), _) => self.fp8(scales)?,
            (Some(Format::Int { bits: 8, scales, .. }), _) => {
                let codes = self.weights.bytes(&["I8"], Dtype::Int8)?;
                self.weights.expect_shape(&[rows, columns])?;
                let quants = codes.into_iter().map(u8::cast_signed).collect();
                StoredData::Int8 { quants, scales: self.row_scales(scales)? }
            }
            (Some(Format::Mxfp8), _) => self.mxfp8()?,
            (Some(Format::Nvfp4 { .. }), layout) => self.nvfp4(layout)?,
            (Some(Format::Int { scales, zeros, .. }), layout) => self.int4(layout, scales, zeros)?,
            _ => self.mxfp4()?,
        };
        Ok(StoredMatrix { rows, columns, data })
    }

    /// Refuses rows that are not whole groups, which files and kernels have alone.
    fn expect_groups(&self, group: usize) -> Result<(), WeightsError> {
        let whole = self.columns.is_multiple_of(group) && self.columns.is_multiple_of(GROUP);
        if whole { Ok(()) } else { Err(self.not_whole(group)) }
    }

    fn not_whole(&self, group: usize) -> WeightsError {
        let Self { rows, columns, .. } = *self;
        WeightsError::PartialGroup { name: self.weights.name().to_owned(), rows, columns, group }
    }

    fn scale(&self, suffixes: &[&str]) -> Result<&Source<'_>, WeightsError> {
        let wanted = |source: &&Source<'_>| suffixes.iter().any(|suffix| source.name().ends_with(suffix));
        self.scales.iter().find(wanted).ok_or_else(|| {
            let name = format!("{}{}", module(self.weights.name()), suffixes[0]);
            WeightsError::Missing {
                path: self.weights.path().to_path_buf(),
                name,
                expected: Vec::new(),
                others: 0,
            }
        })
    }

    fn fp8(&self, scales: Scales) -> Result<StoredData, WeightsError> {
        let Self { rows, columns, .. } = *self;
        let codes = e4m3_bytes(&self.weights, [rows, columns], Dtype::Fp8)?;
        let Scales::Block { rows: block_rows, columns: block_columns } = scales else {
            return Ok(StoredData::Fp8 { codes, scales: self.row_scales(scales)?, block: None });
        };
        let source = self.scale(&[".weight_scale_inv", ".weight_scale"])?;
        let groups = columns.div_ceil(block_columns);
        source.expect_shape(&[rows.div_ceil(block_rows), groups])?;
        let of_blocks = scale_values(source)?;
        let scales = (0..rows).flat_map(|row| {
            let first = row / block_rows * groups;
            &of_blocks[first..first + groups]
        });
        Ok(StoredData::Fp8 {
            codes,
            scales: scales.copied().collect(),
            block: Some([block_rows, block_columns]),
        })
    }

    /// A scale for each row, of which there may be one for all.
    fn row_scales(&self, scales: Scales) -> Result<Vec<f32>, WeightsError> {
        let source = self.scale(&[".weight_scale"])?;
        if scales == Scales::Tensor {
            source.expect_elements(1)?;
            return Ok(vec![scale_values(source)?[0]; self.rows]);
        }
        source.expect_elements(self.rows)?;
        scale_values(source)
    }

    fn mxfp4(&self) -> Result<StoredData, WeightsError> {
        let Self { rows, columns, .. } = *self;
        self.expect_groups(GROUP)?;
        let nibbles = self.weights.bytes(&["U8"], Dtype::Mxfp4)?;
        let source = self.scale(&["_scales", ".weight_scale"])?;
        let scales = source.bytes(&["U8", "F8_E8M0"], Dtype::Mxfp4)?;
        // Those of all experts have a side more.
        let stacked = self.weights.shape().len() > 2;
        if stacked {
            self.weights.expect_elements(rows * columns / 2)?;
            source.expect_elements(rows * columns / GROUP)?;
        } else {
            self.weights.expect_shape(&[rows, columns / 2])?;
            source.expect_shape(&[rows, columns / GROUP])?;
        }
        if scales.contains(&e8m0::NAN) {
            return Err(WeightsError::not_finite(source.path(), source.name()));
        }
        Ok(StoredData::Mxfp4 { nibbles, scales })
    }

    fn mxfp8(&self) -> Result<StoredData, WeightsError> {
        let Self { rows, columns, .. } = *self;
        let codes = e4m3_bytes(&self.weights, [rows, columns], Dtype::Mxfp8)?;
        let source = self.scale(&[".weight_scale", ".weight_scale_inv"])?;
        let scales = source.bytes(&["U8", "F8_E8M0"], Dtype::Mxfp8)?;
        source.expect_shape(&[rows, columns.div_ceil(GROUP)])?;
        match scales.iter().max() {
            Some(&e8m0::NAN) => Err(WeightsError::not_finite(source.path(), source.name())),
            Some(&largest) => {
                in_range(source, e8m0::power(largest)).map(|()| StoredData::Mxfp8 { codes, scales })
            }
            None => Ok(StoredData::Mxfp8 { codes, scales }),
        }
    }

    fn nvfp4(&self, layout: Layout) -> Result<StoredData, WeightsError> {
        let Self { rows, columns, .. } = *self;
        if !columns.is_multiple_of(NVFP4_GROUP) {
            return Err(self.not_whole(NVFP4_GROUP));
        }
        let nibbles = self.weights.bytes(&["U8"], Dtype::Nvfp4)?;
        self.weights.expect_shape(&[rows, columns / 2])?;
        let source = self.scale(&[".weight_scale"])?;
        let scales = e4m3_bytes(source, [rows, columns / NVFP4_GROUP], Dtype::Nvfp4)?;
        let of_tensor = self.scale(&[".weight_scale_2", ".weight_global_scale"])?;
        of_tensor.expect_elements(1)?;
        let stored = of_tensor.values::<f32>()?[0];
        // One writer multiplies what the other one divides by.
        let tensor_scale = if layout == Layout::CompressedTensors { 1.0 / stored } else { stored };
        in_range(of_tensor, tensor_scale)?;
        Ok(StoredData::Nvfp4 { nibbles, scales, tensor_scale })
    }

    fn int4(&self, layout: Layout, scales: Scales, asymmetric: bool) -> Result<StoredData, WeightsError> {
        let Self { rows, columns, .. } = *self;
        let group = if let Scales::Group { size } = scales { size } else { columns };
        let groups = columns.div_ceil(group);
        self.expect_groups(group)?;
        if layout == Layout::Awq && !rows.is_multiple_of(PER_WORD) {
            return Err(self.not_whole(group));
        }
        let words = self.weights.bytes(&["I32", "U32"], Dtype::Int4)?;
        let nibbles = match layout {
            Layout::Awq => {
                self.weights.expect_shape(&[columns, rows / PER_WORD])?;
                awq_nibbles(&words, rows, columns)
            }
            Layout::Gptq { .. } => {
                self.weights.expect_shape(&[columns / PER_WORD, rows])?;
                transposed(words.as_chunks::<4>().0, 1, columns / PER_WORD, rows).concat()
            }
            // Words along the inputs, the lowest bits first: the order of bytes that is wanted.
            _ => {
                self.weights.expect_shape(&[rows, columns / PER_WORD])?;
                words
            }
        };
        let by_row = matches!(layout, Layout::CompressedTensors);
        let source = self.scale(&[".scales", ".weight_scale"])?;
        source.expect_shape(&if by_row { [rows, groups] } else { [groups, rows] })?;
        let scales = scale_values(source)?;
        let scales = if by_row { scales } else { transposed(&scales, 1, groups, rows) };
        let zeros = if asymmetric { self.zeros(layout, groups)? } else { vec![MIDDLE; rows * groups] };
        let scales = scales.into_iter().map(f16::from_f32).collect();
        Ok(StoredData::Int4 { nibbles, scales, zeros: zeros.into_iter().map(f16::from_f32).collect(), group })
    }

    /// The zero of each row and group.
    fn zeros(&self, layout: Layout, groups: usize) -> Result<Vec<f32>, WeightsError> {
        let source = self.scale(&[".qzeros", ".weight_zero_point"])?;
        let rows = self.rows;
        let words = source.bytes(&["I32", "U32"], Dtype::Int4)?;
        let words: Vec<u32> = words.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
        let packed = rows.div_ceil(PER_WORD);
        let place = |row: usize, group: usize| match layout {
            Layout::Awq => {
                let shift = AWQ_ORDER.iter().position(|output| *output == row % PER_WORD).unwrap_or(0);
                (group * packed + row / PER_WORD, shift)
            }
            _ => (row / PER_WORD * groups + group, row % PER_WORD),
        };
        source.expect_shape(&if layout == Layout::Awq { [groups, packed] } else { [packed, groups] })?;
        let places = (0..rows).flat_map(|row| (0..groups).map(move |group| (row, group)));
        Ok(places
            .map(|(row, group)| {
                let (word, shift) = place(row, group);
                (words[word] >> (4 * shift) & 15) as u8
            })
            .map(f32::from)
            .collect())
    }
}

/// Scales, none of which turns a code into what is not a number, and all of which f16 can hold.
fn scale_values(source: &Source<'_>) -> Result<Vec<f32>, WeightsError> {
    let values = source.values::<f32>()?;
    values.iter().try_for_each(|scale| in_range(source, *scale))?;
    Ok(values)
}

fn in_range(source: &Source<'_>, scale: f32) -> Result<(), WeightsError> {
    if scale.abs() <= f16::MAX.to_f32() {
        return Ok(());
    }
    Err(WeightsError::ScaleRange { path: source.path().to_path_buf(), name: source.name().to_owned(), scale })
}

/// Codes of e4m3, none of which is NaN.
fn e4m3_bytes(source: &Source<'_>, shape: [usize; 2], wanted: Dtype) -> Result<Vec<u8>, WeightsError> {
    let codes = source.bytes(&["F8_E4M3"], wanted)?;
    source.expect_shape(&shape)?;
    if codes.iter().any(|code| e4m3::is_nan(*code)) {
        return Err(WeightsError::not_finite(source.path(), source.name()));
    }
    Ok(codes)
}

/// Words of eight outputs for each input as bytes of two inputs for each output.
fn awq_nibbles(words: &[u8], rows: usize, columns: usize) -> Vec<u8> {
    // Sixteen words are a line of what is read.
    const BAND: usize = 16;
    let mut nibbles = vec![0; rows * columns / 2];
    let per_input = rows / PER_WORD;
    let word = |input: usize, at: usize| {
        let first = 4 * (input * per_input + at);
        u32::from_le_bytes(std::array::from_fn(|byte| words[first + byte]))
    };
    for first in (0..per_input).step_by(BAND) {
        for pair in 0..columns / 2 {
            for at in first..per_input.min(first + BAND) {
                let (even, odd) = (word(2 * pair, at), word(2 * pair + 1, at));
                for (place, output) in AWQ_ORDER.into_iter().enumerate() {
                    let code = |word: u32| (word >> (4 * place) & 15) as u8;
                    nibbles[(at * PER_WORD + output) * columns / 2 + pair] = code(even) | code(odd) << 4;
                }
            }
        }
    }
    nibbles
}
