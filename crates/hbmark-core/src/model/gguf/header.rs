//! The header of a GGUF file; every length is checked before it is used.
//!
//! Enters: a reader and the size of its file. Leaves: a [`Header`] in which each tensor lies inside the file, or a
//! [`GgufError`]. Memory stays within a few megabytes of what is kept: arrays (the tokenizer's lists) are walked and counted,
//! not stored.
//!
//! *Source* of the layout and the type codes: the GGUF specification of the ggml project (`docs/gguf.md`, `ggml.h`).

use std::collections::{BTreeMap, HashSet};
use std::io::{self, Read};

use crate::model::{Role, TensorInfo};
use crate::units::Bytes;

/// `GGUF`, little-endian.
const MAGIC: [u8; 4] = *b"GGUF";
/// The specification's default of `general.alignment`.
const DEFAULT_ALIGNMENT: u64 = 32;
/// Far above any page size a writer would align to.
const MAX_ALIGNMENT: u64 = 1 << 20;
/// The largest public files describe a few thousand tensors; ggml caps far above.
const MAX_TENSORS: u64 = 200_000;
/// Real files carry under a hundred keys.
const MAX_KEYS: u64 = 65_536;
/// The specification's limit on keys is 2^16 − 1 bytes; tensor names end at 64.
const MAX_KEY_BYTES: u64 = 65_535;
const MAX_NAME_BYTES: u64 = 1_024;
/// Chat templates are the longest strings in use, at tens of kilobytes.
const MAX_STRING_BYTES: u64 = 16 << 20;
/// Four lists (tokens, scores, types, merges) of a vocabulary of a million.
const MAX_ARRAY_ELEMENTS: u64 = 8 << 20;
/// Everything before the tensor data; bounds what candle's own reader will hold.
const MAX_HEADER_BYTES: u64 = 256 << 20;
/// `GGML_MAX_DIMS`.
const MAX_DIMENSIONS: u32 = 4;

/// Why a GGUF file is invalid or not supported.
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    #[error("not a GGUF file: it begins with {magic:02x?}")]
    Magic { magic: [u8; 4] },
    #[error("GGUF version {version} is not supported, only 2 and 3; convert the file again")]
    Version { version: u32 },
    #[error("the file ends at byte {size}, inside {reading} at byte {at}; it is truncated or corrupt")]
    Truncated { reading: &'static str, at: u64, size: u64 },
    #[error("cannot read {reading}: {error}")]
    Io { reading: &'static str, error: io::Error },
    #[error("it claims {claimed} {what}, but the {available} bytes left hold at most {limit}")]
    TooMany { what: &'static str, claimed: u64, available: u64, limit: u64 },
    #[error("{what} at byte {at} claims {claimed} bytes, above the limit of {limit}")]
    TooLong { what: &'static str, at: u64, claimed: u64, limit: u64 },
    #[error("{what} at byte {at} is not plain UTF-8 text")]
    NotText { what: &'static str, at: u64 },
    #[error("metadata key {key} has the unknown value type {code}")]
    ValueType { key: String, code: u32 },
    #[error("metadata key {key} is an array of arrays, which no model file needs")]
    NestedArray { key: String },
    #[error("metadata key {key} is a boolean with the value {value}")]
    BadBool { key: String, value: u8 },
    #[error("metadata key {key} appears twice")]
    TwiceKey { key: String },
    #[error("tensor {name} appears twice")]
    TwiceTensor { name: String },
    #[error("general.alignment is {found}, not a power of two of at most {MAX_ALIGNMENT}")]
    Alignment { found: String },
    #[error("tensor {name} has {count} dimensions, not 1 to {MAX_DIMENSIONS}")]
    Dimensions { name: String, count: u32 },
    #[error("tensor {name} has a dimension of 0 in {shape:?}")]
    ZeroDimension { name: String, shape: Vec<u64> },
    #[error("tensor {name} has the unknown type {code}")]
    TensorType { name: String, code: u32 },
    #[error(
        "tensor {name} is stored as {storage}, which the engine has no kernels for; use a q4_k_m or q8_0 file"
    )]
    Unsupported { name: String, storage: &'static str },
    #[error("tensor {name} has rows of {row} elements, which blocks of {block} do not divide ({storage})")]
    Blocks { name: String, row: u64, block: u64, storage: &'static str },
    #[error("tensor {name} has shape {shape:?}, whose size in bytes overflows")]
    SizeOverflow { name: String, shape: Vec<u64> },
    #[error("tensor {name} lies at offset {offset}, which is not a multiple of the alignment {alignment}")]
    Misaligned { name: String, offset: u64, alignment: u64 },
    #[error("tensor {name} takes {bytes} bytes at offset {offset}, but the file holds {data} bytes of data")]
    OutsideFile { name: String, offset: u64, bytes: u64, data: u64 },
    #[error("tensor {name} at offset {offset} overlaps {other}, which ends at {end}")]
    Overlap { name: String, offset: u64, other: String, end: u64 },
    #[error("metadata key {key} is missing")]
    MissingKey { key: String },
    #[error("metadata key {key} is {found}, not {wanted}")]
    WrongKind { key: String, found: String, wanted: &'static str },
    #[error("metadata key {key} is {value}, outside {low}..={high}")]
    OutOfRange { key: String, value: f64, low: f64, high: f64 },
    #[error(
        "architecture {found:?} is not supported; llama, qwen2, qwen3 and qwen3moe are, and for `hbmark predict` gpt-oss, gemma3, deepseek2, glm4moe and minimax-m2"
    )]
    UnknownArchitecture { found: String },
    #[error("{what} is {found}, which is not supported in GGUF files")]
    UnsupportedModel { what: String, found: String },
    #[error("tensor {name} is missing")]
    MissingTensor { name: String },
    #[error(
        "the model is split over {files} files; give the first of them, whose name is NAME-00001-of-{files:05}.gguf, or merge them with `llama-gguf-split --merge`"
    )]
    NotFirstFile { files: usize },
    #[error(
        "{key} is {found}, not {wanted}; the files of the split model are not of one conversion, fetch them again"
    )]
    OtherSplit { key: &'static str, found: usize, wanted: usize },
    #[error(
        "the model is split over {files} files, and candle's own reader takes one; choose --engine native, or merge them with `llama-gguf-split --merge`"
    )]
    ManyFiles { files: usize },
    #[error("candle refuses this file, whose header passed every check here: {problem}")]
    Reader { problem: String },
}

/// A metadata value; arrays keep only their kind and length.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Bool(bool),
    Text(String),
    Array { len: u64 },
}

impl std::fmt::Display for Value {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unsigned(value) => write!(f, "{value}"),
            Self::Signed(value) => write!(f, "{value}"),
            Self::Float(value) => write!(f, "{value}"),
            Self::Bool(value) => write!(f, "{value}"),
            Self::Text(value) => write!(f, "{:?}", value.chars().take(80).collect::<String>()),
            Self::Array { len } => write!(f, "an array of {len}"),
        }
    }
}

/// A storage format: name, elements in a block, bytes of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockType {
    pub name: &'static str,
    pub elements: u64,
    pub bytes: u64,
}

/// Type codes of `ggml.h`: name, elements and bytes of a block, and whether an engine computes with it.
/// `q8_1` and `q8_k` are formats of activations: ggml packs them in memory and stores no weights in them.
const BLOCK_TYPES: [(u32, &str, u64, u64, bool); 33] = [
    (0, "f32", 1, 4, true),
    (1, "f16", 1, 2, true),
    (2, "q4_0", 32, 18, true),
    (3, "q4_1", 32, 20, true),
    (6, "q5_0", 32, 22, true),
    (7, "q5_1", 32, 24, true),
    (8, "q8_0", 32, 34, true),
    (9, "q8_1", 32, 36, false),
    (10, "q2_k", 256, 84, true),
    (11, "q3_k", 256, 110, true),
    (12, "q4_k", 256, 144, true),
    (13, "q5_k", 256, 176, true),
    (14, "q6_k", 256, 210, true),
    (15, "q8_k", 256, 292, false),
    (16, "iq2_xxs", 256, 66, false),
    (17, "iq2_xs", 256, 74, false),
    (18, "iq3_xxs", 256, 98, false),
    (19, "iq1_s", 256, 50, false),
    (20, "iq4_nl", 32, 18, false),
    (21, "iq3_s", 256, 110, false),
    (22, "iq2_s", 256, 82, false),
    (23, "iq4_xs", 256, 136, false),
    (24, "i8", 1, 1, false),
    (25, "i16", 1, 2, false),
    (26, "i32", 1, 4, false),
    (27, "i64", 1, 8, false),
    (28, "f64", 1, 8, false),
    (29, "iq1_m", 256, 56, false),
    (30, "bf16", 1, 2, true),
    (34, "tq1_0", 256, 54, false),
    (35, "tq2_0", 256, 66, false),
    (39, "mxfp4", 32, 17, true),
    (40, "nvfp4", 64, 36, false),
];

/// One tensor whose place and size were checked against the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorEntry {
    pub name: String,
    /// Slowest dimension first, as everywhere but in the file.
    pub shape: Vec<usize>,
    pub storage: &'static str,
    /// Offset in the data section.
    pub offset: u64,
    pub bytes: u64,
}

impl TensorEntry {
    /// The tensor in an inventory.
    pub fn info(&self, role: Role, layer: Option<usize>) -> TensorInfo {
        TensorInfo {
            name: self.name.clone(),
            shape: self.shape.clone(),
            storage: self.storage.to_owned(),
            bytes: Bytes(self.bytes),
            role,
            layer,
        }
    }
}

/// A checked header.
#[derive(Debug)]
pub struct Header {
    pub metadata: BTreeMap<String, Value>,
    pub tensors: Vec<TensorEntry>,
    /// Offset of the data section in the file.
    pub data_start: u64,
}

/// Reads and checks a header.
///
/// # Errors
/// Whenever a length, a type or a place does not fit the `size` bytes of the file.
pub fn read<R: Read>(reader: R, size: u64) -> Result<Header, GgufError> {
    let mut cursor = Cursor { reader, at: 0, size, array_elements: 0 };
    let magic = cursor.array::<4>("the magic")?;
    if magic != MAGIC {
        return Err(GgufError::Magic { magic });
    }
    let version = cursor.u32("the version")?;
    if !matches!(version, 2 | 3) {
        return Err(GgufError::Version { version });
    }
    let tensor_count = cursor.u64("the tensor count")?;
    let key_count = cursor.u64("the key count")?;
    // A key takes at least a length, a type and a byte; a tensor a length, a rank, a dimension, a type and an offset.
    cursor.check_count("metadata keys", key_count, 13, MAX_KEYS)?;
    cursor.check_count("tensors", tensor_count, 32, MAX_TENSORS)?;

    let mut metadata = BTreeMap::new();
    for _ in 0..key_count {
        let key = cursor.name("a metadata key", MAX_KEY_BYTES)?;
        let value = cursor.value(&key)?;
        if metadata.insert(key.clone(), value).is_some() {
            return Err(GgufError::TwiceKey { key });
        }
    }
    let alignment = alignment(&metadata)?;

    let mut names = HashSet::new();
    let mut described = Vec::new();
    for _ in 0..tensor_count {
        let tensor = cursor.tensor(alignment)?;
        if !names.insert(tensor.name.clone()) {
            return Err(GgufError::TwiceTensor { name: tensor.name });
        }
        described.push(tensor);
    }
    // `at` is at most `size`, and the alignment at most a megabyte: no overflow in a file that exists.
    let data_start = cursor.at.next_multiple_of(alignment);
    check_places(&described, size.saturating_sub(data_start))?;
    Ok(Header { metadata, tensors: described, data_start })
}

fn alignment(metadata: &BTreeMap<String, Value>) -> Result<u64, GgufError> {
    match metadata.get("general.alignment") {
        None => Ok(DEFAULT_ALIGNMENT),
        Some(Value::Unsigned(found)) if found.is_power_of_two() && *found <= MAX_ALIGNMENT => Ok(*found),
        Some(found) => Err(GgufError::Alignment { found: found.to_string() }),
    }
}

/// Every tensor inside the data, and none on top of another.
fn check_places(tensors: &[TensorEntry], data: u64) -> Result<(), GgufError> {
    let mut by_offset: Vec<&TensorEntry> = tensors.iter().collect();
    by_offset.sort_by_key(|t| t.offset);
    let mut previous: Option<(&TensorEntry, u64)> = None;
    for tensor in by_offset {
        let (name, offset, bytes) = (&tensor.name, tensor.offset, tensor.bytes);
        let Some(end) = offset.checked_add(bytes).filter(|end| *end <= data) else {
            return Err(GgufError::OutsideFile { name: name.clone(), offset, bytes, data });
        };
        if let Some((other, other_end)) = previous.filter(|(_, other_end)| *other_end > offset) {
            let (name, other) = (name.clone(), other.name.clone());
            return Err(GgufError::Overlap { name, offset, other, end: other_end });
        }
        previous = Some((tensor, end));
    }
    Ok(())
}

/// A reader that tracks its position and never reads beyond the end of the file.
struct Cursor<R> {
    reader: R,
    at: u64,
    size: u64,
    /// Array elements passed so far, over all keys.
    array_elements: u64,
}

impl<R: Read> Cursor<R> {
    fn available(&self) -> u64 {
        self.size.min(MAX_HEADER_BYTES).saturating_sub(self.at)
    }

    /// Checks that `count` bytes are left and counts them as read.
    fn advance(&mut self, reading: &'static str, count: u64) -> Result<(), GgufError> {
        if count > self.available() {
            return Err(if count <= self.size.saturating_sub(self.at) {
                let claimed = self.at.saturating_add(count);
                GgufError::TooLong { what: "the header", at: 0, claimed, limit: MAX_HEADER_BYTES }
            } else {
                GgufError::Truncated { reading, at: self.at, size: self.size }
            });
        }
        self.at += count;
        Ok(())
    }

    fn failed(&self, reading: &'static str, error: io::Error) -> GgufError {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => GgufError::Truncated { reading, at: self.at, size: self.size },
            _ => GgufError::Io { reading, error },
        }
    }

    fn array<const N: usize>(&mut self, reading: &'static str) -> Result<[u8; N], GgufError> {
        self.advance(reading, N as u64)?;
        let mut bytes = [0; N];
        self.reader.read_exact(&mut bytes).map_err(|error| self.failed(reading, error))?;
        Ok(bytes)
    }

    fn u32(&mut self, reading: &'static str) -> Result<u32, GgufError> {
        self.array(reading).map(u32::from_le_bytes)
    }

    fn u64(&mut self, reading: &'static str) -> Result<u64, GgufError> {
        self.array(reading).map(u64::from_le_bytes)
    }

    fn skip(&mut self, reading: &'static str, count: u64) -> Result<(), GgufError> {
        self.advance(reading, count)?;
        let skipped = io::copy(&mut (&mut self.reader).take(count), &mut io::sink())
            .map_err(|error| self.failed(reading, error))?;
        if skipped < count { Err(self.failed(reading, io::ErrorKind::UnexpectedEof.into())) } else { Ok(()) }
    }

    fn check_count(&self, what: &'static str, claimed: u64, each: u64, most: u64) -> Result<(), GgufError> {
        let available = self.available();
        let limit = most.min(available / each);
        if claimed > limit {
            return Err(GgufError::TooMany { what, claimed, available, limit });
        }
        Ok(())
    }

    /// A key or a tensor's name: it will be printed, and candle must see the same one.
    fn name(&mut self, what: &'static str, limit: u64) -> Result<String, GgufError> {
        let at = self.at;
        let name = self.string(what, limit)?;
        if name.contains(char::is_control) { Err(GgufError::NotText { what, at }) } else { Ok(name) }
    }

    fn string(&mut self, what: &'static str, limit: u64) -> Result<String, GgufError> {
        let at = self.at;
        let claimed = self.u64(what)?;
        if claimed > limit {
            return Err(GgufError::TooLong { what, at, claimed, limit });
        }
        self.advance(what, claimed)?;
        let mut bytes = vec![0; usize::try_from(claimed).expect("at most 16 MiB")];
        self.reader.read_exact(&mut bytes).map_err(|error| self.failed(what, error))?;
        // Some writers end strings with a NUL, which candle drops too.
        bytes.truncate(bytes.iter().rposition(|&byte| byte != 0).map_or(0, |last| last + 1));
        String::from_utf8(bytes).map_err(|_| GgufError::NotText { what, at })
    }

    fn value(&mut self, key: &str) -> Result<Value, GgufError> {
        let reading = "a metadata value";
        let code = self.u32("a value type")?;
        Ok(match code {
            0 => Value::Unsigned(u8::from_le_bytes(self.array(reading)?).into()),
            1 => Value::Signed(i8::from_le_bytes(self.array(reading)?).into()),
            2 => Value::Unsigned(u16::from_le_bytes(self.array(reading)?).into()),
            3 => Value::Signed(i16::from_le_bytes(self.array(reading)?).into()),
            4 => Value::Unsigned(self.u32(reading)?.into()),
            5 => Value::Signed(i32::from_le_bytes(self.array(reading)?).into()),
            6 => Value::Float(f32::from_le_bytes(self.array(reading)?).into()),
            7 => match self.array::<1>(reading)? {
                [0] => Value::Bool(false),
                [1] => Value::Bool(true),
                [value] => return Err(GgufError::BadBool { key: key.to_owned(), value }),
            },
            8 => Value::Text(self.string("a metadata string", MAX_STRING_BYTES)?),
            9 => Value::Array { len: self.skip_array(key)? },
            10 => Value::Unsigned(self.u64(reading)?),
            11 => Value::Signed(i64::from_le_bytes(self.array(reading)?)),
            12 => Value::Float(f64::from_le_bytes(self.array(reading)?)),
            code => return Err(GgufError::ValueType { key: key.to_owned(), code }),
        })
    }

    /// Walks past an array and returns its length.
    fn skip_array(&mut self, key: &str) -> Result<u64, GgufError> {
        let code = self.u32("an array's type")?;
        let len = self.u64("an array's length")?;
        // A string takes at least its length.
        let each = match code {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            8 | 10..=12 => 8,
            9 => return Err(GgufError::NestedArray { key: key.to_owned() }),
            code => return Err(GgufError::ValueType { key: key.to_owned(), code }),
        };
        self.check_count("array elements", len, each, MAX_ARRAY_ELEMENTS - self.array_elements)?;
        self.array_elements += len;
        if code == 8 {
            for _ in 0..len {
                let at = self.at;
                let claimed = self.u64("a string of an array")?;
                if claimed > MAX_STRING_BYTES {
                    let what = "a string of an array";
                    return Err(GgufError::TooLong { what, at, claimed, limit: MAX_STRING_BYTES });
                }
                self.skip("a string of an array", claimed)?;
            }
        } else {
            self.skip("an array", len * each)?;
        }
        Ok(len)
    }

    fn tensor(&mut self, alignment: u64) -> Result<TensorEntry, GgufError> {
        let name = self.name("a tensor name", MAX_NAME_BYTES)?;
        let count = self.u32("a tensor's rank")?;
        if !(1..=MAX_DIMENSIONS).contains(&count) {
            return Err(GgufError::Dimensions { name, count });
        }
        let mut shape = Vec::new();
        for _ in 0..count {
            shape.push(self.u64("a tensor's shape")?);
        }
        let row = shape[0];
        shape.reverse();
        let code = self.u32("a tensor's type")?;
        let offset = self.u64("a tensor's offset")?;
        if shape.contains(&0) {
            return Err(GgufError::ZeroDimension { name, shape });
        }
        let Some(block) = block_type(code) else { return Err(GgufError::TensorType { name, code }) };
        if !row.is_multiple_of(block.elements) {
            return Err(GgufError::Blocks { name, row, block: block.elements, storage: block.name });
        }
        let elements = shape.iter().try_fold(1u64, |product, &d| product.checked_mul(d));
        let bytes = elements.and_then(|elements| (elements / block.elements).checked_mul(block.bytes));
        let dimensions = shape.iter().map(|&d| usize::try_from(d).ok()).collect::<Option<Vec<_>>>();
        let (Some(bytes), Some(dimensions)) = (bytes, dimensions) else {
            return Err(GgufError::SizeOverflow { name, shape });
        };
        if !offset.is_multiple_of(alignment) {
            return Err(GgufError::Misaligned { name, offset, alignment });
        }
        Ok(TensorEntry { name, shape: dimensions, storage: block.name, offset, bytes })
    }
}

/// The block format of a type code.
pub fn block_type(code: u32) -> Option<BlockType> {
    let known = BLOCK_TYPES.iter().find(|(known, ..)| *known == code);
    known.map(|&(_, name, elements, bytes, _)| BlockType { name, elements, bytes })
}

impl BlockType {
    /// The format of a name that results have.
    pub(crate) fn named(name: &str) -> Option<Self> {
        let known = BLOCK_TYPES.iter().find(|(_, known, ..)| *known == name);
        known.map(|&(_, name, elements, bytes, _)| Self { name, elements, bytes })
    }
}

impl Header {
    /// Refuses block formats that no engine computes with.
    ///
    /// # Errors
    /// [`GgufError::Unsupported`] with the first such tensor.
    pub fn check_computable(&self) -> Result<(), GgufError> {
        let foreign = |storage: &str| BLOCK_TYPES.iter().any(|(_, name, .., runs)| *name == storage && !runs);
        match self.tensors.iter().find(|tensor| foreign(tensor.storage)) {
            None => Ok(()),
            Some(tensor) => {
                Err(GgufError::Unsupported { name: tensor.name.clone(), storage: tensor.storage })
            }
        }
    }
}
