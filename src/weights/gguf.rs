//! Models in GGUF files: dimensions from the metadata, tensors in ggml's block formats.
//!
//! Enters: a path. Leaves: a [`GgufModel`] whose header was checked against the file and whose tensors were checked
//! against its own dimensions; only then is the file passed to candle, whose reader checks less.
//! Tensors have their GGUF names here, not those of Hugging Face.

mod blocks;

use std::fs::File;
use std::io::{BufReader, Seek};
use std::path::{Path, PathBuf};

pub use blocks::packing;
use blocks::{MXFP4, TensorLocations};
use candle_core::quantized::gguf_file::Content;

use super::loading::{SizedFile, WeightsError};
use hbmark_core::model::gguf::{self as header, GgufError};
use hbmark_core::model::{Architecture, Inventory, Role};

/// Frequencies of Llama 3's rotary scaling, stored as a tensor because the metadata has no key for them.
const ROPE_FREQS: &str = "rope_freqs.weight";
const NAMES_SHOWN: usize = 5;

/// A validated GGUF file.
#[derive(Debug)]
pub struct GgufModel {
    pub architecture: Architecture,
    /// Every tensor by its GGUF name, with the bytes of its blocks.
    pub inventory: Inventory,
    /// The file scales its rotary frequencies by a table (Llama 3.1 and later). The parameters of that scaling are not
    /// in the file, so `architecture.rope.scaling` is `None`, and a forward that ignores the table is wrong beyond
    /// the original context length.
    pub has_rope_freqs: bool,
    /// Where each tensor lies in the file.
    places: TensorLocations,
    file: SizedFile,
}

impl GgufModel {
    /// Opens a file and checks all of its header.
    ///
    /// # Errors
    /// When the file is not a regular file, when any length in it is inconsistent, when the architecture is not supported,
    /// or when its tensors do not fit its metadata.
    pub fn open(path: &Path) -> Result<Self, WeightsError> {
        let file = SizedFile::open(path)?;
        let bad = |problem| bad_file(path, problem);
        let header = header::read(BufReader::new(file.file()), file.size()).map_err(bad)?;
        header.check_computable().map_err(bad)?;
        let architecture = header::architecture(&header).map_err(bad)?;
        let (inventory, has_rope_freqs) = check_tensors(path, &header.tensors, &architecture)?;
        let places = TensorLocations::new(&header);
        Ok(Self { architecture, inventory, has_rope_freqs, places, file })
    }

    /// Dimensions and tensors of a file that will not be run: more architectures and all of ggml's block formats.
    ///
    /// # Errors
    /// When the file is not a regular file, when any length in it is inconsistent, or when it is not a decoder that is known.
    pub fn open_shape(path: &Path) -> Result<(Architecture, Inventory), WeightsError> {
        let file = SizedFile::open(path)?;
        let bad = |problem| bad_file(path, problem);
        let header = header::read(BufReader::new(file.file()), file.size()).map_err(bad)?;
        header::shape(&header).map_err(bad)
    }

    /// The file as candle reads it.
    ///
    /// # Errors
    /// When a value is NaN or infinite, candle lacks a block format or refuses what passed here, or the file changed since.
    pub fn into_candle(self) -> Result<(Content, File), WeightsError> {
        if let Some(tensor) = self.inventory.tensors.iter().find(|tensor| tensor.storage == MXFP4) {
            let (name, storage) = (tensor.name.clone(), MXFP4);
            return Err(bad_file(self.path(), GgufError::Unsupported { name, storage }));
        }
        self.check_values()?;
        let path = self.file.path().to_path_buf();
        let mut file = self.file.into_file();
        let refused =
            |error: candle_core::Error| bad_file(&path, GgufError::Reader { problem: error.to_string() });
        file.rewind().map_err(|error| WeightsError::Io { path: path.clone(), error })?;
        let content = Content::read(&mut BufReader::new(&mut file)).map_err(refused)?;
        Ok((content, file))
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        self.file.path()
    }
}

fn bad_file(path: &Path, problem: GgufError) -> WeightsError {
    WeightsError::Gguf { path: path.to_path_buf(), problem: Box::new(problem) }
}

/// Compares the tensors of the file with those that its dimensions imply.
fn check_tensors(
    path: &Path,
    tensors: &[header::TensorEntry],
    architecture: &Architecture,
) -> Result<(Inventory, bool), WeightsError> {
    let path = || -> PathBuf { path.to_path_buf() };
    let mut found: std::collections::BTreeMap<&str, &header::TensorEntry> =
        tensors.iter().map(|t| (t.name.as_str(), t)).collect();
    let mut inventory = Inventory::default();
    for (name, shape, role, layer) in header::expected_tensors(architecture) {
        let Some(tensor) = found.remove(name.as_str()) else {
            return Err(WeightsError::Missing { path: path(), name, expected: shape, others: 0 });
        };
        if header::file_shape(&tensor.shape) != header::file_shape(&shape) {
            let found = tensor.shape.clone();
            return Err(WeightsError::WrongShape { path: path(), name, found, expected: shape });
        }
        inventory.tensors.push(tensor.info(role, layer));
    }
    let rope_freqs = found.remove(ROPE_FREQS);
    inventory.tensors.extend(rope_freqs.map(|tensor| tensor.info(Role::Unused, None)));
    if !found.is_empty() {
        return Err(WeightsError::Unknown {
            path: path(),
            names: found.keys().take(NAMES_SHOWN).map(|&name| name.to_owned()).collect(),
            others: found.len().saturating_sub(NAMES_SHOWN),
        });
    }
    Ok((inventory, rope_freqs.is_some()))
}

#[cfg(test)]
mod tests;
