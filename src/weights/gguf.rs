//! Models in GGUF files: dimensions from the metadata, tensors in ggml's block formats.
//!
//! Enters: a path, of several files that of the first. Leaves: a [`GgufModel`] whose header was checked against the file and
//! whose tensors were checked against its own dimensions; only then is the file passed to candle, whose reader checks less.
//! Tensors have their GGUF names here, not those of Hugging Face.

mod blocks;

use std::fs::File;
use std::io::{BufReader, Seek};
use std::path::{Path, PathBuf};

pub use blocks::packing;
use blocks::{MXFP4, TensorLocations};
use candle_core::quantized::gguf_file::Content;

use super::loading::{SizedFile, WeightsError};
use hbmark_core::model::gguf::{self as header, GgufError, Header};
use hbmark_core::model::{Architecture, Inventory, Role, RopeScaling, TensorInfo};

/// What Llama 3's rotary scaling divides each frequency by: llama.cpp's files have this table in place of the scaling's parameters.
const ROPE_FREQS: &str = "rope_freqs.weight";
const NAMES_SHOWN: usize = 5;

/// A validated GGUF file.
#[derive(Debug)]
pub struct GgufModel {
    pub architecture: Architecture,
    /// Every tensor by its GGUF name, with the bytes of its blocks.
    pub inventory: Inventory,
    /// Where each tensor lies in the files.
    places: TensorLocations,
    files: Vec<SizedFile>,
}

/// The files of a model, the header of all, and where the tensors lie.
struct Opened {
    files: Vec<SizedFile>,
    header: Header,
    places: TensorLocations,
}

impl Opened {
    fn open(path: &Path) -> Result<Self, WeightsError> {
        let bad = |problem| bad_file(path, problem);
        let (file, mut header) = read_file(path)?;
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let further = header.further_files(name).map_err(bad)?;
        let (mut files, mut places) = (vec![file], TensorLocations::default());
        places.add(0, &header);
        for (at, name) in (1..).zip(&further) {
            let path = path.with_file_name(name);
            let (file, other) = read_file(&path)?;
            places.add(at, &other);
            header.join(at, other).map_err(|problem| bad_file(&path, problem))?;
            files.push(file);
        }
        if !further.is_empty() {
            header.check_joined().map_err(bad)?;
        }
        Ok(Self { files, header, places })
    }
}

fn read_file(path: &Path) -> Result<(SizedFile, Header), WeightsError> {
    let file = SizedFile::open(path)?;
    let header = header::read(BufReader::new(file.file()), file.size());
    header.map(|header| (file, header)).map_err(|problem| bad_file(path, problem))
}

impl GgufModel {
    /// Opens a file and checks all of its header.
    ///
    /// # Errors
    /// When the file is not a regular file, when any length in it is inconsistent, when the architecture is not supported,
    /// or when its tensors do not fit its metadata.
    pub fn open(path: &Path) -> Result<Self, WeightsError> {
        let bad = |problem| bad_file(path, problem);
        let Opened { files, header, places } = Opened::open(path)?;
        header.check_computable().map_err(bad)?;
        let architecture = header::architecture(&header).map_err(bad)?;
        let inventory = check_tensors(path, &header.tensors, &architecture)?;
        let mut model = Self { architecture, inventory, places, files };
        if let Some(table) = model.inventory.tensors.iter().find(|tensor| tensor.name == ROPE_FREQS) {
            model.architecture.rope.scaling = model.scaling_of(table)?;
        }
        Ok(model)
    }

    /// The rotary scaling that a table of divisors stands for.
    fn scaling_of(&self, table: &TensorInfo) -> Result<RopeScaling, WeightsError> {
        let (expected, rope) = (vec![self.architecture.head_dim / 2], &self.architecture.rope);
        if table.shape != expected {
            let (path, name, found) = (self.path().to_path_buf(), table.name.clone(), table.shape.clone());
            return Err(WeightsError::WrongShape { path, name, found, expected });
        }
        let scaling = RopeScaling::of_divisors(&self.vector(table)?, rope.theta);
        scaling.filter(|_| rope.scaling == RopeScaling::None).ok_or_else(|| {
            let found = "a table of frequencies that are not scaled as Llama 3's".to_owned();
            bad_file(self.path(), GgufError::UnsupportedModel { what: ROPE_FREQS.to_owned(), found })
        })
    }

    /// Dimensions, tensors and paths of a model that will not be run: more architectures and all of ggml's block formats.
    ///
    /// # Errors
    /// When the file is not a regular file, when any length in it is inconsistent, or when it is not a decoder that is known.
    pub fn open_shape(path: &Path) -> Result<(Architecture, Inventory, Vec<PathBuf>), WeightsError> {
        let Opened { files, header, .. } = Opened::open(path)?;
        let (architecture, inventory) = header::shape(&header).map_err(|problem| bad_file(path, problem))?;
        Ok((architecture, inventory, paths(&files)))
    }

    /// The file as candle reads it.
    ///
    /// # Errors
    /// When there are several, a value is NaN or infinite, candle lacks a block format or refuses what passed here, or the file changed since.
    pub fn into_candle(mut self) -> Result<(Content, File), WeightsError> {
        if let Some(tensor) = self.inventory.tensors.iter().find(|tensor| tensor.storage == MXFP4) {
            let (name, storage) = (tensor.name.clone(), MXFP4);
            return Err(bad_file(self.path(), GgufError::Unsupported { name, storage }));
        }
        let path = self.path().to_path_buf();
        if self.files.len() > 1 {
            return Err(bad_file(&path, GgufError::ManyFiles { files: self.files.len() }));
        }
        self.check_values()?;
        let mut file = self.files.swap_remove(0).into_file();
        let refused =
            |error: candle_core::Error| bad_file(&path, GgufError::Reader { problem: error.to_string() });
        file.rewind().map_err(|error| WeightsError::Io { path: path.clone(), error })?;
        let content = Content::read(&mut BufReader::new(&mut file)).map_err(refused)?;
        Ok((content, file))
    }

    /// Where the file is, of several the first.
    pub fn path(&self) -> &Path {
        self.files[0].path()
    }

    /// Where all files are.
    pub fn paths(&self) -> Vec<PathBuf> {
        paths(&self.files)
    }
}

fn paths(files: &[SizedFile]) -> Vec<PathBuf> {
    files.iter().map(|file| file.path().to_path_buf()).collect()
}

fn bad_file(path: &Path, problem: GgufError) -> WeightsError {
    WeightsError::Gguf { path: path.to_path_buf(), problem: Box::new(problem) }
}

/// Compares the tensors of the file with those that its dimensions imply.
fn check_tensors(
    path: &Path,
    tensors: &[header::TensorEntry],
    architecture: &Architecture,
) -> Result<Inventory, WeightsError> {
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
    Ok(inventory)
}

#[cfg(test)]
mod tests;
