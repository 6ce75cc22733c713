//! The JSON parts of a checkpoint: a shard's header and the index of shards, parsed and checked.
//!
//! Enters: untrusted bytes, and the number of data bytes that follow them. Leaves: tensors whose ranges cover the data exactly, or
//! a [`SafetensorsError`]. No allocation is sized by a number from the file.

use std::collections::HashSet;
use std::fmt;

use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

/// Well below the usual limit of 1,024 open files; DeepSeek-V3 has 163 shards.
pub const MAX_SHARDS: usize = 512;

/// The format's own limit.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;
/// The largest public checkpoints list each matrix of 60 layers of 384 experts with two or three more tensors: 207,360 of experts in Kimi-K2.5
/// (int4: packed, scale, shape), 276,480 in its copies in nvfp4 (two scales of the weights and one of the inputs).
pub const MAX_TENSORS: usize = 400_000;
const MAX_DIMENSIONS: usize = 8;
/// Names in use are under 150 bytes; ggml ends them at 64.
const MAX_NAME_BYTES: usize = 1_024;
/// Names in use have up to twelve. Rules of a quantisation are asked for each run of parts between dots, which grow with their square.
const MAX_NAME_DOTS: usize = 32;
/// Characters of untrusted text that an error repeats.
const TEXT_SHOWN: usize = 200;

/// Why a safetensors header or index is invalid.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum SafetensorsError {
    #[error("the file is {size} bytes, too short for a safetensors header")]
    TooShort { size: u64 },
    #[error("the header claims {claimed} bytes, above the format's limit of {MAX_HEADER_BYTES}")]
    HeaderTooLong { claimed: u64 },
    #[error(
        "the header claims {claimed} bytes, but only {available} follow; the file is truncated or corrupt"
    )]
    HeaderBeyondFile { claimed: u64, available: u64 },
    #[error("the header is not valid: {problem}")]
    BadJson { problem: String },
    #[error("tensor {name} has the unknown dtype {dtype:?}")]
    UnknownDtype { name: String, dtype: String },
    #[error("tensor {name} has shape {shape:?}, whose size in bytes overflows")]
    SizeOverflow { name: String, shape: Vec<u64> },
    #[error("tensor {name} lies at {begin}..{end}, which is not a range")]
    BackwardRange { name: String, begin: u64, end: u64 },
    #[error("tensor {name} of shape {shape:?} needs {needed} bytes, but its range holds {held}")]
    WrongSize { name: String, shape: Vec<u64>, needed: u64, held: u64 },
    #[error("tensor {name} begins at {begin}, inside the tensor that ends at {previous_end}")]
    Overlap { name: String, begin: u64, previous_end: u64 },
    #[error("tensor {name} begins at {begin}, but the tensor before it ends at {previous_end}: a hole")]
    Hole { name: String, begin: u64, previous_end: u64 },
    #[error("the tensors end at byte {tensors} of the data, but the file holds {data}; truncated or corrupt")]
    DataSize { tensors: u64, data: u64 },
    #[error("the index names {shards} shards, above the limit of {MAX_SHARDS}")]
    TooManyShards { shards: usize },
    #[error("the index puts tensor {name} in {shard}, which does not hold it")]
    NotInShard { name: String, shard: String },
    #[error(
        "the index does not name tensor {name}, which {shard} holds; one of the two is of another model or version"
    )]
    NotInIndex { name: String, shard: String },
    #[error("tensor {name} is also in {other}")]
    TwiceInShards { name: String, other: String },
    #[error("tensor {name} is there with and without the name of the language model before it")]
    TwiceInModel { name: String },
}

/// Stored dtypes of the format: name, bits of an element.
const DTYPES: [(&str, u64); 19] = [
    ("BOOL", 8),
    ("F4", 4),
    ("F6_E2M3", 6),
    ("F6_E3M2", 6),
    ("U8", 8),
    ("I8", 8),
    ("F8_E5M2", 8),
    ("F8_E4M3", 8),
    ("F8_E8M0", 8),
    ("I16", 16),
    ("U16", 16),
    ("F16", 16),
    ("BF16", 16),
    ("I32", 32),
    ("U32", 32),
    ("F32", 32),
    ("F64", 64),
    ("I64", 64),
    ("U64", 64),
];

/// One tensor of a shard, after its header was found consistent.
#[derive(Debug, Clone)]
pub struct StoredTensor {
    pub name: String,
    pub storage: &'static str,
    pub shape: Vec<usize>,
    /// Offset in the file, not in the data section.
    pub offset: u64,
    pub bytes: u64,
}

/// Parses a header and checks it against the number of data bytes behind it.
///
/// # Errors
/// [`SafetensorsError`], with what cannot be trusted.
pub fn parse_header(
    header: &[u8],
    data_start: u64,
    data: u64,
) -> Result<Vec<StoredTensor>, SafetensorsError> {
    let entries = parse_json::<UniqueMap<Entry>>(header)?.0;
    let mut tensors = Vec::with_capacity(entries.len());
    for (name, entry) in entries {
        if let Entry::Tensor(described) = entry {
            tensors.push(described.check(name, data_start)?);
        }
    }
    // Empty tensors share their place with the next one, so they sort before it.
    tensors.sort_by_key(|t| (t.offset, t.bytes));
    let mut previous_end = 0;
    for tensor in &tensors {
        let begin = tensor.offset - data_start;
        let name = || tensor.name.clone();
        if begin < previous_end {
            return Err(SafetensorsError::Overlap { name: name(), begin, previous_end });
        }
        if begin > previous_end {
            return Err(SafetensorsError::Hole { name: name(), begin, previous_end });
        }
        previous_end = begin + tensor.bytes;
    }
    if previous_end != data {
        return Err(SafetensorsError::DataSize { tensors: previous_end, data });
    }
    Ok(tensors)
}

/// Parses an index of shards: the file of every tensor.
///
/// # Errors
/// [`SafetensorsError`], with what cannot be trusted.
pub fn parse_index(bytes: &[u8]) -> Result<Vec<(String, String)>, SafetensorsError> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: UniqueMap<String>,
    }
    Ok(parse_json::<Index>(bytes)?.weight_map.0)
}

fn parse_json<'de, T: Deserialize<'de>>(bytes: &'de [u8]) -> Result<T, SafetensorsError> {
    serde_json::from_slice(bytes)
        .map_err(|error| SafetensorsError::BadJson { problem: shortened(&error.to_string()) })
}

/// The beginning of an untrusted text.
pub fn shortened(text: &str) -> String {
    text.chars().take(TEXT_SHOWN).collect()
}

/// A JSON object that refuses a repeated key and stops growing at [`MAX_TENSORS`].
struct UniqueMap<V>(Vec<(String, V)>);

impl<'de, V: KeyedValue<'de>> Deserialize<'de> for UniqueMap<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct MapVisitor<V>(std::marker::PhantomData<V>);
        impl<'de, V: KeyedValue<'de>> Visitor<'de> for MapVisitor<V> {
            type Value = UniqueMap<V>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object with one entry for each tensor")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut entries = Vec::new();
                let mut seen = HashSet::new();
                while let Some(key) = map.next_key::<String>()? {
                    if entries.len() == MAX_TENSORS {
                        return Err(de::Error::custom(format_args!("more than {MAX_TENSORS} entries")));
                    }
                    let (bytes, dots, shown) = (key.len(), key.matches('.').count(), || shortened(&key));
                    if bytes > MAX_NAME_BYTES || key.contains(char::is_control) {
                        return Err(de::Error::custom(format_args!(
                            "a name of {bytes} bytes, {:?}",
                            shown()
                        )));
                    }
                    if dots > MAX_NAME_DOTS {
                        return Err(de::Error::custom(format_args!("a name of {dots} dots, {:?}", shown())));
                    }
                    if !seen.insert(key.clone()) {
                        return Err(de::Error::custom(format_args!("{key:?} appears twice")));
                    }
                    let value = V::next(&key, &mut map)?;
                    entries.push((key, value));
                }
                Ok(UniqueMap(entries))
            }
        }
        deserializer.deserialize_map(MapVisitor(std::marker::PhantomData))
    }
}

/// A value whose form may depend on its key.
trait KeyedValue<'de>: Sized {
    fn next<A: MapAccess<'de>>(key: &str, map: &mut A) -> Result<Self, A::Error>;
}

impl<'de> KeyedValue<'de> for String {
    fn next<A: MapAccess<'de>>(_key: &str, map: &mut A) -> Result<Self, A::Error> {
        map.next_value()
    }
}

/// A value of the header: a tensor, or the free-form `__metadata__`, which is passed over.
enum Entry {
    Metadata,
    Tensor(Described),
}

impl<'de> KeyedValue<'de> for Entry {
    fn next<A: MapAccess<'de>>(key: &str, map: &mut A) -> Result<Self, A::Error> {
        if key == "__metadata__" {
            map.next_value::<de::IgnoredAny>()?;
            return Ok(Self::Metadata);
        }
        map.next_value().map(Self::Tensor)
    }
}

/// A tensor as the header describes it, not yet checked.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Described {
    dtype: String,
    shape: Dimensions,
    data_offsets: (u64, u64),
}

impl Described {
    fn check(self, name: String, data_start: u64) -> Result<StoredTensor, SafetensorsError> {
        let (begin, end) = self.data_offsets;
        let shape = self.shape.0;
        let Some(&(storage, bits)) = DTYPES.iter().find(|(known, _)| *known == self.dtype) else {
            return Err(SafetensorsError::UnknownDtype { name, dtype: shortened(&self.dtype) });
        };
        let product = shape.iter().try_fold(bits, |product, &d| product.checked_mul(d));
        let dimensions = shape.iter().map(|&d| usize::try_from(d).ok()).collect::<Option<Vec<_>>>();
        let (Some(total_bits), Some(dimensions), Some(offset)) =
            (product, dimensions, data_start.checked_add(begin))
        else {
            return Err(SafetensorsError::SizeOverflow { name, shape });
        };
        let Some(held) = end.checked_sub(begin) else {
            return Err(SafetensorsError::BackwardRange { name, begin, end });
        };
        if !total_bits.is_multiple_of(8) || total_bits / 8 != held || data_start.checked_add(end).is_none() {
            return Err(SafetensorsError::WrongSize { name, shape, needed: total_bits.div_ceil(8), held });
        }
        Ok(StoredTensor { name, storage, shape: dimensions, offset, bytes: held })
    }
}

/// A shape that stops growing at [`MAX_DIMENSIONS`].
struct Dimensions(Vec<u64>);

impl<'de> Deserialize<'de> for Dimensions {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ShapeVisitor;
        impl<'de> Visitor<'de> for ShapeVisitor {
            type Value = Dimensions;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a shape of at most {MAX_DIMENSIONS} dimensions")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
                let mut shape = Vec::new();
                while let Some(dimension) = seq.next_element()? {
                    if shape.len() == MAX_DIMENSIONS {
                        return Err(de::Error::invalid_length(MAX_DIMENSIONS + 1, &self));
                    }
                    shape.push(dimension);
                }
                Ok(Dimensions(shape))
            }
        }
        deserializer.deserialize_seq(ShapeVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_of_many_parts_is_refused() {
        let named = |dots: usize| {
            let name = "a.".repeat(dots);
            parse_index(format!(r#"{{"weight_map":{{"{name}":"x"}}}}"#).as_bytes())
        };
        assert_eq!(named(MAX_NAME_DOTS).unwrap().len(), 1);
        let error = named(MAX_NAME_DOTS + 1).unwrap_err().to_string();
        assert!(error.contains("a name of 33 dots"), "{error}");
    }

    #[test]
    fn the_index_of_the_largest_published_checkpoints_is_read() {
        let parts = ["weight", "weight_scale", "weight_scale_2", "input_scale"];
        let modules = ["gate_proj", "up_proj", "down_proj"];
        let mut entries = Vec::new();
        for (layer, expert) in (1..61).flat_map(|layer| (0..384).map(move |expert| (layer, expert))) {
            for (module, part) in modules.into_iter().flat_map(|module| parts.map(|part| (module, part))) {
                let name =
                    format!("language_model.model.layers.{layer}.mlp.experts.{expert}.{module}.{part}");
                entries.push(format!(r#""{name}":"model-000{layer:02}-of-000061.safetensors""#));
            }
        }
        let index = format!(r#"{{"weight_map":{{{}}}}}"#, entries.join(","));
        assert_eq!(parse_index(index.as_bytes()).expect("an index").len(), 276_480);
    }
}
