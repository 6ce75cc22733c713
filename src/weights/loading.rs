//! What every source of weights shares: the result, the errors, and the guarded way to open and read a file.
//!
//! Enters: untrusted paths and a dtype. Leaves: [`LoadedWeights`], or a [`WeightsError`] with the file,
//! the tensor and the numbers in it. Model files are hostile input: a file is opened only when it is a regular file inside
//! the folder it was asked from, read by position and length, and never mapped, so one that shrinks while it is read is an
//! error and not a signal.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Component, Path, PathBuf};

use candle_core::{DType, Tensor};

use super::hub::HubError;
use hbmark_core::input::{self, InputError};
use hbmark_core::model::gguf::GgufError;
use hbmark_core::model::safetensors::SafetensorsError;
use hbmark_core::model::{Dtype, Inventory};

/// A model's tensors on a device, with the inventory that accounts for their bytes there.
#[derive(Debug)]
pub struct LoadedWeights {
    /// The tensors that a forward reads, by checkpoint name.
    pub tensors: HashMap<String, Tensor>,
    /// The tensors above, as they lie on the device: what the byte ledger counts.
    pub loaded: Inventory,
}

/// Why weights could not be found, validated or loaded.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    #[error("cannot read {}: {error}", path.display())]
    Io { path: PathBuf, error: io::Error },
    #[error("{} is {found}, not a regular file", path.display())]
    NotRegular { path: PathBuf, found: &'static str },
    #[error(
        "{} ended while it was read: wanted {wanted} bytes at offset {offset}; it was truncated or replaced, \
         so fetch it again",
        path.display()
    )]
    Truncated { path: PathBuf, offset: u64, wanted: usize },
    #[error("{} is {size} bytes, above the limit of {limit} for this kind of file", path.display())]
    TooLarge { path: PathBuf, size: u64, limit: u64 },
    #[error(
        "{name:?}, named in {}, is not a plain file name; a shard must lie beside its index",
        index.display()
    )]
    ShardName { index: PathBuf, name: String },
    #[error(
        "{} leads to {}, outside the model's folder {}; copy the file there instead of linking it",
        path.display(), target.display(), folder.display()
    )]
    LeavesFolder { path: PathBuf, target: PathBuf, folder: PathBuf },
    #[error("no weights in {}: looked for {looked_for}{hint}", folder.display())]
    NoWeights { folder: PathBuf, looked_for: &'static str, hint: &'static str },
    #[error("{}: {problem}", path.display())]
    Safetensors { path: PathBuf, problem: Box<SafetensorsError> },
    #[error("{}: {problem}", path.display())]
    Gguf { path: PathBuf, problem: Box<GgufError> },
    #[error(transparent)]
    Hub(Box<HubError>),
    #[error(
        "{} has no tensor {name} of shape {expected:?}{}; the checkpoint does not fit its config",
        path.display(), and_more(*others)
    )]
    Missing { path: PathBuf, name: String, expected: Vec<usize>, others: usize },
    #[error(
        "tensor {name} in {} has shape {found:?}, but the config implies {expected:?}",
        path.display()
    )]
    WrongShape { path: PathBuf, name: String, found: Vec<usize>, expected: Vec<usize> },
    #[error(
        "{} holds tensors this architecture does not have: {}{}; is the config of another model?",
        path.display(), names.join(", "), and_more(*others)
    )]
    Unknown { path: PathBuf, names: Vec<String>, others: usize },
    #[error(
        "tensor {name} in {} is stored as {storage}, which this loader does not turn into {wanted}; \
         use a checkpoint in f32, f16 or bf16, one in a layout that `quantization_config` names, or a GGUF file",
        path.display()
    )]
    StoredDtype { path: PathBuf, name: String, storage: String, wanted: Dtype },
    #[error(
        "tensor {name} in {} has a value that is NaN or infinite as it is loaded: the file is damaged (fetch it again), or the \
         value is too large for the dtype (choose bf16 or f32)",
        path.display()
    )]
    NotFinite { path: PathBuf, name: String },
    #[error("weights cannot be {what} as {wanted}: choose f32, bf16 or f16")]
    WantedDtype { what: &'static str, wanted: Dtype },
    #[error(
        "weights cannot be streamed as {wanted}: choose f32, bf16, f16, int8, fp8, q8_0, q4_0, q4_k, q5_k, q6_k, mxfp8, mxfp4, nvfp4 or int4"
    )]
    StreamedDtype { wanted: Dtype },
    #[error(
        "tensor {name} has rows of {columns}, which the blocks of 256 of {wanted} do not divide, and ggml splits none; choose q8_0 or q4_0"
    )]
    RowsOfBlocks { name: String, columns: usize, wanted: Dtype },
    #[error(
        "tensor {name} has {rows} rows of {columns}, which are not whole groups of {group}: codes of 4 bits are read in whole groups, and of AWQ in eights of rows"
    )]
    PartialGroup { name: String, rows: usize, columns: usize, group: usize },
    #[error("tensor {name} in {} has a scale of {scale}, which f16 cannot hold: no published one is beyond 65504", path.display())]
    ScaleRange { path: PathBuf, name: String, scale: f32 },
    #[error("out of memory for tensor {name}: {bytes} bytes on the host")]
    OutOfMemory { name: String, bytes: u64 },
    #[error("tensor {name} cannot be made from a seed: a {role} needs the weights it scales")]
    NoDistribution { name: String, role: &'static str },
    #[error("the device refused tensor {name}: {error}")]
    Device { name: String, error: candle_core::Error },
}

impl WeightsError {
    /// A tensor with a value that is not a number.
    pub(crate) fn not_finite(path: &Path, name: &str) -> Self {
        Self::NotFinite { path: path.to_path_buf(), name: name.to_owned() }
    }
}

/// Matrices `[input, out]` one after another as `[out, input]`, on all cores.
pub(super) fn transposed<T: Copy + Send + Sync>(
    values: &[T],
    matrices: usize,
    input: usize,
    out: usize,
) -> Vec<T> {
    // Rows and columns that are turned together: what they touch stays in the first cache.
    const TILE: usize = 32;
    let turn = |from: &[T], to: &mut [T]| {
        for (first_row, first_column) in
            (0..out).step_by(TILE).flat_map(|row| (0..input).step_by(TILE).map(move |column| (row, column)))
        {
            for row in first_row..out.min(first_row + TILE) {
                for column in first_column..input.min(first_column + TILE) {
                    to[row * input + column] = from[column * out + row];
                }
            }
        }
    };
    let mut turned = values.to_vec();
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get);
    let (matrix, share) = ((input * out).max(1), matrices.div_ceil(cores).max(1));
    std::thread::scope(|scope| {
        for (from, to) in values.chunks(share * matrix).zip(turned.chunks_mut(share * matrix)) {
            scope.spawn(move || {
                from.chunks_exact(matrix)
                    .zip(to.chunks_exact_mut(matrix))
                    .for_each(|(from, to)| turn(from, to));
            });
        }
    });
    turned
}

/// Checks that rows are whole blocks in a dtype whose blocks are of 256.
pub(crate) fn check_blocks(inventory: &Inventory, wanted: Dtype) -> Result<(), WeightsError> {
    inventory.rows_that_blocks_do_not_divide().map_or(Ok(()), |tensor| {
        let columns = tensor.shape.last().copied().unwrap_or(0);
        Err(WeightsError::RowsOfBlocks { name: tensor.name.clone(), columns, wanted })
    })
}

impl From<HubError> for WeightsError {
    fn from(error: HubError) -> Self {
        Self::Hub(Box::new(error))
    }
}

fn and_more(others: usize) -> String {
    if others == 0 { String::new() } else { format!(" (and {others} more)") }
}

/// The candle type of a plain float dtype.
///
/// # Errors
/// When `wanted` is a quantised format; `what` is the verb of the message (`loaded`, `generated`).
pub(crate) fn plain_dtype(wanted: Dtype, what: &'static str) -> Result<DType, WeightsError> {
    match wanted {
        Dtype::F32 => Ok(DType::F32),
        Dtype::Bf16 => Ok(DType::BF16),
        Dtype::F16 => Ok(DType::F16),
        _ => Err(WeightsError::WantedDtype { what, wanted }),
    }
}

/// A regular file of known size that is only read by position.
#[derive(Debug)]
pub(crate) struct SizedFile {
    path: PathBuf,
    file: File,
    size: u64,
}

impl SizedFile {
    /// Opens a regular file and notes its size. Pipes, devices and folders are refused before anything can block.
    pub(crate) fn open(path: &Path) -> Result<Self, WeightsError> {
        let path = path.to_path_buf();
        match input::open(&path) {
            Ok((file, size)) => Ok(Self { path, file, size }),
            Err(InputError::NotRegular { found }) => Err(WeightsError::NotRegular { path, found }),
            Err(InputError::Io(error)) => Err(WeightsError::Io { path, error }),
            Err(other) => Err(WeightsError::Io { path, error: io::Error::other(other) }),
        }
    }

    /// Opens `name` inside `folder`, following a link only as far as the model's own folder or hub cache entry.
    pub(crate) fn open_within(folder: &Path, name: &str) -> Result<Self, WeightsError> {
        let path = folder.join(name);
        let canonical =
            |p: &Path| p.canonicalize().map_err(|error| WeightsError::Io { path: p.to_path_buf(), error });
        let root = model_root(&canonical(folder)?);
        let target = canonical(&path)?;
        if !target.starts_with(&root) {
            return Err(WeightsError::LeavesFolder { path, target, folder: root });
        }
        Self::open(&target).map(|opened| Self { path, ..opened })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    pub(crate) fn into_file(self) -> File {
        self.file
    }

    /// Fills `buffer` from `offset`.
    pub(crate) fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<(), WeightsError> {
        self.file.read_exact_at(buffer, offset).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => {
                WeightsError::Truncated { path: self.path.clone(), offset, wanted: buffer.len() }
            }
            _ => WeightsError::Io { path: self.path.clone(), error },
        })
    }

    /// The whole file, refused above `limit` bytes.
    pub(crate) fn read_all(&self, limit: u64) -> Result<Vec<u8>, WeightsError> {
        let too_large = || WeightsError::TooLarge { path: self.path.clone(), size: self.size, limit };
        if self.size > limit {
            return Err(too_large());
        }
        let mut bytes = vec![0; usize::try_from(self.size).map_err(|_| too_large())?];
        self.read_at(&mut bytes, 0)?;
        Ok(bytes)
    }
}

/// The folder that links of a model may lead into: the model's folder, or, for a snapshot of a hub cache
/// (`models--org--name/snapshots/<commit>`, whose files are links into `blobs`), the whole cache entry.
fn model_root(folder: &Path) -> PathBuf {
    let entry = folder.parent().filter(|p| p.ends_with("snapshots")).and_then(Path::parent);
    match entry {
        Some(entry) if entry.join("blobs").is_dir() => entry.to_path_buf(),
        _ => folder.to_path_buf(),
    }
}

/// The longest name that file systems take.
const MAX_FILE_NAME: usize = 255;

/// Whether a name is one plain path component.
pub(crate) fn is_plain_file_name(name: &str) -> bool {
    let mut components = Path::new(name).components();
    let plain = matches!(components.next(), Some(Component::Normal(part)) if part == name);
    plain && name.len() <= MAX_FILE_NAME && components.next().is_none() && !name.contains(['\\', '\0', '/'])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_plain_component_is_a_file_name() {
        assert!(is_plain_file_name("model-00001-of-00002.safetensors"));
        for name in ["", ".", "..", "/etc/passwd", "../x", "a/b", "a/", "./a", "a\\b", "a\0b"] {
            assert!(!is_plain_file_name(name), "{name:?}");
        }
        assert!(!is_plain_file_name(&"n".repeat(256)));
    }

    #[test]
    fn pipes_and_folders_are_refused_without_waiting() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("model.safetensors");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let error = SizedFile::open(&pipe).unwrap_err().to_string();
        assert!(error.ends_with("is a pipe, socket or device, not a regular file"), "{error}");
        let error = SizedFile::open(folder.path()).unwrap_err().to_string();
        assert!(error.ends_with("is a folder, not a regular file"), "{error}");
    }

    #[test]
    fn links_of_a_hub_snapshot_may_lead_to_its_blobs_and_nowhere_else() {
        let cache = tempfile::tempdir().unwrap();
        let entry = cache.path().join("models--org--name");
        let snapshot = entry.join("snapshots").join("abc");
        std::fs::create_dir_all(&snapshot).unwrap();
        std::fs::create_dir_all(entry.join("blobs")).unwrap();
        std::fs::write(entry.join("blobs/hash"), b"weights").unwrap();
        std::fs::write(cache.path().join("secret"), b"secret").unwrap();
        std::os::unix::fs::symlink("../../blobs/hash", snapshot.join("good")).unwrap();
        std::os::unix::fs::symlink("../../../secret", snapshot.join("bad")).unwrap();
        assert_eq!(SizedFile::open_within(&snapshot, "good").unwrap().read_all(100).unwrap(), b"weights");
        let error = SizedFile::open_within(&snapshot, "bad").unwrap_err().to_string();
        assert!(error.contains("outside the model's folder"), "{error}");
    }

    #[test]
    fn links_out_of_a_plain_folder_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let model = folder.path().join("model");
        std::fs::create_dir(&model).unwrap();
        std::fs::write(folder.path().join("elsewhere"), b"x").unwrap();
        std::os::unix::fs::symlink("../elsewhere", model.join("model.safetensors")).unwrap();
        assert!(matches!(
            SizedFile::open_within(&model, "model.safetensors"),
            Err(WeightsError::LeavesFolder { .. })
        ));
    }
}
