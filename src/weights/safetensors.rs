//! Weights of a Hugging Face folder: `model.safetensors`, or `model.safetensors.index.json` and its shards.
//!
//! Enters: a folder and the [`Inventory`] its config implies. Leaves: a [`Checkpoint`] whose every byte is accounted for,
//! and from it [`LoadedWeights`]. The headers are read here, by size and position, and checked against the size of the file
//! before anything is allocated for a tensor. Tensor names come from the expected inventory.
//!
//! *Source* of the layout: the format page of the safetensors project (u64 header length, JSON header, then the data; no
//! holes, no overlap, header at most 100 MB).

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use half::{bf16, f16};

use super::loading::{LoadedWeights, SizedFile, WeightsError, is_plain_file_name, plain_dtype};
use super::stored_matrix::{PlainFloat, all_finite};
pub(crate) use hbmark_core::model::safetensors::StoredTensor;
use hbmark_core::model::safetensors::{
    MAX_HEADER_BYTES, MAX_SHARDS, SafetensorsError, parse_header, parse_index, shortened,
};
use hbmark_core::model::stored::{is_beside, language_model};
use hbmark_core::model::{Dtype, Inventory, Role, TensorInfo};
use hbmark_core::units::Bytes;

pub(crate) const SINGLE: &str = "model.safetensors";
pub(crate) const INDEX: &str = "model.safetensors.index.json";
const MAX_INDEX_BYTES: u64 = 64 << 20;
/// Bytes read at once: large enough for full disk speed, small compared with any model.
const CHUNK_BYTES: usize = 4 << 20;
/// Names listed in an error before "and N more".
const NAMES_SHOWN: usize = 5;

/// A folder of safetensors whose headers agree with the files and with the expected inventory.
#[derive(Debug)]
pub struct Checkpoint {
    shards: Vec<SizedFile>,
    /// Tensors to load: shard and place by name, in the expected order.
    wanted: Vec<(usize, StoredTensor)>,
    /// Which of them are codes or scales of quantised layers, whose shapes and types their readers check.
    quantised: Vec<bool>,
    on_disk: Inventory,
}

impl Checkpoint {
    /// Opens the weights of a folder and compares them with the inventory that its config implies. A model of several parts may put its name
    /// before those of its language model; tensors are called without it from here on.
    ///
    /// Layers that predict further tokens, encoders of images and sound, rotary tables (`rotary_emb.inv_freq`), and a stored `lm_head.weight`
    /// that the config ties to the embedding, are tolerated as [`Role::Unused`]; any other unknown tensor is refused by name.
    ///
    /// # Errors
    /// When the folder has no safetensors, when a header is inconsistent, when a shard's name or link leaves the folder,
    /// or when a tensor is missing, unknown or of another shape.
    pub fn open(folder: &Path, expected: &Inventory) -> Result<Self, WeightsError> {
        let (shards, stored) = read_headers(folder)?;
        let mut by_name: BTreeMap<String, (usize, StoredTensor)> = BTreeMap::new();
        for (shard, mut tensor) in stored {
            tensor.name = language_model(&tensor.name);
            if let Some((_, twice)) = by_name.insert(tensor.name.clone(), (shard, tensor)) {
                let problem = SafetensorsError::TwiceInModel { name: twice.name };
                return Err(bad_file(shards[shard].path(), problem));
            }
        }
        let mut wanted = Vec::with_capacity(expected.tensors.len());
        let mut quantised = Vec::with_capacity(expected.tensors.len());
        let mut on_disk = Inventory::default();
        let mut missing = Vec::new();
        for info in expected.tensors.iter().filter(|t| t.role != Role::Unused) {
            let Some((shard, tensor)) = by_name.remove(&info.name) else {
                if !is_input_scale(&info.name) {
                    missing.push(info);
                }
                continue;
            };
            let codes = is_quantised(info);
            let shape = info.shape_in_files();
            if tensor.shape != shape && !codes {
                return Err(WeightsError::WrongShape {
                    path: shards[shard].path().to_path_buf(),
                    name: info.name.clone(),
                    found: tensor.shape,
                    expected: shape,
                });
            }
            on_disk.tensors.push(listed(&tensor, info.role, info.layer));
            wanted.push((shard, tensor));
            quantised.push(codes);
        }
        if let Some(first) = missing.first() {
            return Err(WeightsError::Missing {
                path: folder.to_path_buf(),
                name: first.name.clone(),
                expected: first.shape_in_files(),
                others: missing.len() - 1,
            });
        }
        // What is left of the expected names is unused.
        let unused: HashSet<&str> = expected.tensors.iter().map(|t| t.name.as_str()).collect();
        let layers =
            expected.tensors.iter().filter_map(|tensor| tensor.layer).max().map_or(0, |last| last + 1);
        let (mut harmless, mut unknown) = (Vec::new(), Vec::new());
        for (shard, tensor) in by_name.into_values() {
            let read = || Source { shard: &shards[shard], stored: &tensor, scale: false, quantised: false };
            let name = tensor.name.as_str();
            let known = unused.contains(name) || is_harmless(name) || is_beside(name, layers);
            let known = known || (is_bias_of_gptq(&tensor.name, &unused) && read().is_zero()?);
            if known { &mut harmless } else { &mut unknown }.push(tensor);
        }
        if !unknown.is_empty() {
            return Err(WeightsError::Unknown {
                path: folder.to_path_buf(),
                names: unknown.iter().take(NAMES_SHOWN).map(|t| t.name.clone()).collect(),
                others: unknown.len().saturating_sub(NAMES_SHOWN),
            });
        }
        on_disk.tensors.extend(harmless.iter().map(|tensor| listed(tensor, Role::Unused, None)));
        Ok(Self { shards, wanted, quantised, on_disk })
    }

    /// The dtype that holds most of the bytes, when it is a plain float: loading in it copies without conversion.
    pub fn stored_dtype(&self) -> Option<Dtype> {
        float_of(most_bytes(self.wanted.iter().map(|(_, tensor)| tensor))?)
            .filter(|dtype| *dtype != Dtype::Fp8)
    }

    /// Reads the tensors onto a device, converted to `wanted` where the file stores another float.
    ///
    /// One tensor at a time passes through host memory, in chunks of 4 MiB; `progress` is called with its bytes when it is on the device.
    ///
    /// # Errors
    /// When `wanted` is not a plain float, when a tensor is stored in a format that is not one, when a file shrank since it
    /// was opened, or when memory runs out.
    pub fn load(
        &self,
        wanted: Dtype,
        device: &Device,
        progress: &mut dyn FnMut(Bytes),
    ) -> Result<LoadedWeights, WeightsError> {
        let dtype = plain_dtype(wanted, "loaded")?;
        self.check_storage(wanted)?;
        let mut tensors = HashMap::with_capacity(self.wanted.len());
        let mut loaded = Inventory::default();
        for (source, info) in self.sources().zip(&self.on_disk.tensors) {
            tensors.insert(source.stored.name.clone(), source.tensor(dtype, device)?);
            let bytes = Bytes(info.elements() * dtype.size_in_bytes() as u64);
            loaded.tensors.push(TensorInfo { storage: wanted.name().to_owned(), bytes, ..info.clone() });
            progress(bytes);
        }
        Ok(LoadedWeights { tensors, loaded })
    }

    /// Refuses tensors that are stored as something else than a plain float, but for those of quantised layers.
    pub(crate) fn check_storage(&self, wanted: Dtype) -> Result<(), WeightsError> {
        match self.sources().find(|source| !source.quantised && !source.is_float()) {
            None => Ok(()),
            Some(source) => Err(source.stored_otherwise(wanted)),
        }
    }

    /// Lets a tensor be stored otherwise.
    #[cfg(test)]
    pub(crate) fn store_as(&mut self, storage: &'static str, name: &str) {
        for (_, tensor) in self.wanted.iter_mut().filter(|(_, tensor)| tensor.name == name) {
            tensor.storage = storage;
        }
    }

    /// The tensors to load, in the order of the expected inventory, each read on demand.
    pub(crate) fn sources(&self) -> impl Iterator<Item = Source<'_>> {
        let tensors = self.wanted.iter().zip(&self.on_disk.tensors).zip(&self.quantised);
        tensors.map(|(((shard, stored), info), quantised)| Source {
            shard: &self.shards[*shard],
            stored,
            scale: is_scale(info.role),
            quantised: *quantised,
        })
    }
}

/// One file of tensors whose names are not known beforehand.
#[derive(Debug)]
pub(crate) struct TensorFile {
    shard: SizedFile,
    stored: Vec<StoredTensor>,
}

impl TensorFile {
    /// Opens a file of a folder; its header is checked against its size before it is used.
    pub(crate) fn open(folder: &Path, name: &str) -> Result<Self, WeightsError> {
        let shard = SizedFile::open_within(folder, name)?;
        let stored = read_shard(&shard)?;
        Ok(Self { shard, stored })
    }

    pub(crate) fn path(&self) -> &Path {
        self.shard.path()
    }

    /// Every tensor of the file.
    pub(crate) fn sources(&self) -> impl Iterator<Item = Source<'_>> {
        self.stored.iter().map(|stored| Source { shard: &self.shard, stored, scale: false, quantised: false })
    }
}

/// A stored tensor as an inventory lists it.
fn listed(stored: &StoredTensor, role: Role, layer: Option<usize>) -> TensorInfo {
    TensorInfo {
        name: stored.name.clone(),
        shape: stored.shape.clone(),
        storage: stored.storage.to_lowercase(),
        bytes: Bytes(stored.bytes),
        role,
        layer,
    }
}

fn is_scale(role: Role) -> bool {
    matches!(role, Role::Scale | Role::ExpertScale)
}

/// Whether a tensor is codes or scales of a quantised layer.
fn is_quantised(info: &TensorInfo) -> bool {
    is_scale(info.role) || !matches!(info.storage.as_str(), "f32" | "bf16" | "f16")
}

/// The bias that AutoGPTQ writes beside every layer, all zeros where the model has none.
fn is_bias_of_gptq(name: &str, expected: &HashSet<&str>) -> bool {
    name.strip_suffix(".bias").is_some_and(|module| expected.contains(format!("{module}.qweight").as_str()))
}

/// A fixed scale of the inputs of a layer: configs do not always say whether there is one, and no engine reads it.
fn is_input_scale(name: &str) -> bool {
    [".input_scale", ".input_global_scale", ".input_scale_ub"].iter().any(|ending| name.ends_with(ending))
}

/// Tensors that some exporters write and no forward reads: rotary tables, scales of inputs, and of a cache in 8 bits, where ours has 16.
fn is_harmless(name: &str) -> bool {
    // By the time this is asked, an `lm_head.weight` is left over only when the config ties it.
    let unread = ["rotary_emb.inv_freq", ".k_scale", ".v_scale"];
    unread.iter().any(|ending| name.ends_with(ending)) || is_input_scale(name) || name == "lm_head.weight"
}

/// The opened shards of a checkpoint, and each tensor with the position of the shard that holds it.
type Shards = (Vec<SizedFile>, Vec<(usize, StoredTensor)>);

/// Every tensor of a folder's headers; `None` where it has no weights.
pub(crate) fn stored_tensors(folder: &Path) -> Result<Option<Vec<StoredTensor>>, WeightsError> {
    match read_headers(folder) {
        Ok((_, tensors)) => Ok(Some(tensors.into_iter().map(|(_, tensor)| tensor).collect())),
        Err(WeightsError::NoWeights { hint: "", .. }) => Ok(None),
        Err(problem) => Err(problem),
    }
}

/// The word of safetensors for what most bytes are stored as.
pub(crate) fn most_bytes<'a>(tensors: impl IntoIterator<Item = &'a StoredTensor>) -> Option<&'static str> {
    let mut bytes: BTreeMap<&'static str, u64> = BTreeMap::new();
    for tensor in tensors {
        *bytes.entry(tensor.storage).or_default() += tensor.bytes;
    }
    Some(bytes.into_iter().max_by_key(|(_, bytes)| *bytes)?.0)
}

/// A float of safetensors that this program has.
pub(crate) fn float_of(storage: &str) -> Option<Dtype> {
    match storage {
        "F32" => Some(Dtype::F32),
        "BF16" => Some(Dtype::Bf16),
        "F16" => Some(Dtype::F16),
        "F8_E4M3" => Some(Dtype::Fp8),
        _ => None,
    }
}

fn read_headers(folder: &Path) -> Result<Shards, WeightsError> {
    if exists(&folder.join(SINGLE)) {
        let shard = SizedFile::open_within(folder, SINGLE)?;
        let tensors = read_shard(&shard)?.into_iter().map(|t| (0, t)).collect();
        return Ok((vec![shard], tensors));
    }
    if !exists(&folder.join(INDEX)) {
        let pytorch = ["pytorch_model.bin", "pytorch_model.bin.index.json"];
        let hint = if pytorch.iter().any(|name| exists(&folder.join(name))) {
            "; pickled PyTorch weights can run code and are not read, convert them to safetensors"
        } else {
            ""
        };
        let looked_for = "model.safetensors and model.safetensors.index.json";
        return Err(WeightsError::NoWeights { folder: folder.to_path_buf(), looked_for, hint });
    }
    let index = ShardIndex::read(folder)?;
    let mut shards = Vec::new();
    let mut tensors = Vec::new();
    let mut holder: HashMap<String, &str> = HashMap::new();
    for (position, shard_name) in index.shards().into_iter().enumerate() {
        let shard = SizedFile::open_within(folder, shard_name)?;
        for tensor in read_shard(&shard)? {
            if let Some(other) = holder.insert(tensor.name.clone(), shard_name) {
                let problem = SafetensorsError::TwiceInShards { name: tensor.name, other: other.to_owned() };
                return Err(bad_file(shard.path(), problem));
            }
            tensors.push((position, tensor));
        }
        shards.push(shard);
    }
    for (name, shard) in &index.weight_map {
        if holder.get(name) != Some(&shard.as_str()) {
            let problem = SafetensorsError::NotInShard { name: name.clone(), shard: shard.clone() };
            return Err(bad_file(&index.path, problem));
        }
        holder.remove(name);
    }
    // In order of name, so that the same file gives the same message.
    if let Some((name, shard)) = holder.into_iter().filter(|(name, _)| !is_harmless(name)).min() {
        return Err(bad_file(&index.path, SafetensorsError::NotInIndex { name, shard: shard.to_owned() }));
    }
    Ok((shards, tensors))
}

/// `model.safetensors.index.json`: which shard holds which tensor.
pub(crate) struct ShardIndex {
    path: PathBuf,
    weight_map: Vec<(String, String)>,
}

impl ShardIndex {
    /// Reads the index of a folder; every shard it names is a plain file name.
    pub(crate) fn read(folder: &Path) -> Result<Self, WeightsError> {
        let file = SizedFile::open_within(folder, INDEX)?;
        let path = file.path().to_path_buf();
        let bad = |problem| bad_file(&path, problem);
        let weight_map = parse_index(&file.read_all(MAX_INDEX_BYTES)?).map_err(bad)?;
        let index = Self { path: path.clone(), weight_map };
        let shards = index.shards();
        if let Some(name) = shards.iter().find(|name| !is_plain_file_name(name)) {
            return Err(WeightsError::ShardName { index: path.clone(), name: shortened(name) });
        }
        if shards.len() > MAX_SHARDS {
            return Err(bad(SafetensorsError::TooManyShards { shards: shards.len() }));
        }
        Ok(index)
    }

    /// The names of the shards, each once.
    pub(crate) fn shards(&self) -> BTreeSet<&str> {
        self.weight_map.iter().map(|(_, shard)| shard.as_str()).collect()
    }
}

fn bad_file(path: &Path, problem: SafetensorsError) -> WeightsError {
    WeightsError::Safetensors { path: path.to_path_buf(), problem: Box::new(problem) }
}

/// Whether the path exists, even as a broken link.
fn exists(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

fn read_shard(shard: &SizedFile) -> Result<Vec<StoredTensor>, WeightsError> {
    let bad = |problem| bad_file(shard.path(), problem);
    let Some(available) = shard.size().checked_sub(8) else {
        return Err(bad(SafetensorsError::TooShort { size: shard.size() }));
    };
    let mut length = [0; 8];
    shard.read_at(&mut length, 0)?;
    let claimed = u64::from_le_bytes(length);
    if claimed > MAX_HEADER_BYTES {
        return Err(bad(SafetensorsError::HeaderTooLong { claimed }));
    }
    if claimed > available {
        return Err(bad(SafetensorsError::HeaderBeyondFile { claimed, available }));
    }
    let mut header = vec![0; usize::try_from(claimed).expect("a header of at most 100 MB fits in memory")];
    shard.read_at(&mut header, 8)?;
    parse_header(&header, 8 + claimed, available - claimed).map_err(bad)
}

/// One tensor of a checkpoint, still in its file.
pub(crate) struct Source<'a> {
    shard: &'a SizedFile,
    stored: &'a StoredTensor,
    /// Scales or zeros of the layer before it.
    scale: bool,
    quantised: bool,
}

impl Source<'_> {
    pub(crate) fn name(&self) -> &str {
        &self.stored.name
    }

    pub(crate) fn shape(&self) -> &[usize] {
        &self.stored.shape
    }

    /// Whether it holds scales or zeros of the layer before it.
    pub(crate) fn is_scale(&self) -> bool {
        self.scale
    }

    /// Whether it is codes or scales of a quantised layer.
    pub(crate) fn is_quantised(&self) -> bool {
        self.quantised
    }

    fn is_float(&self) -> bool {
        matches!(self.storage(), "F32" | "BF16" | "F16")
    }

    /// Whether all of its elements are zeros.
    fn is_zero(&self) -> Result<bool, WeightsError> {
        Ok(self.values::<f32>()?.iter().all(|value| value.abs() <= 0.0))
    }

    fn stored_otherwise(&self, wanted: Dtype) -> WeightsError {
        WeightsError::StoredDtype {
            path: self.path().to_path_buf(),
            name: self.name().to_owned(),
            storage: self.storage().to_owned(),
            wanted,
        }
    }

    fn wrong_shape(&self, expected: &[usize]) -> WeightsError {
        WeightsError::WrongShape {
            path: self.path().to_path_buf(),
            name: self.name().to_owned(),
            found: self.shape().to_vec(),
            expected: expected.to_vec(),
        }
    }

    pub(crate) fn expect_shape(&self, wanted: &[usize]) -> Result<(), WeightsError> {
        if self.shape() == wanted { Ok(()) } else { Err(self.wrong_shape(wanted)) }
    }

    pub(crate) fn expect_elements(&self, wanted: usize) -> Result<(), WeightsError> {
        let elements = self.shape().iter().try_fold(1_usize, |all, side| all.checked_mul(*side));
        if elements == Some(wanted) { Ok(()) } else { Err(self.wrong_shape(&[wanted])) }
    }

    /// The name of its storage in the file.
    pub(crate) fn storage(&self) -> &'static str {
        self.stored.storage
    }

    /// The plain dtype it is stored in; f32 stands for what [`Checkpoint::check_storage`] refuses.
    pub(crate) fn dtype(&self) -> DType {
        match self.stored.storage {
            "BF16" => DType::BF16,
            "F16" => DType::F16,
            _ => DType::F32,
        }
    }

    fn tensor(&self, dtype: DType, device: &Device) -> Result<Tensor, WeightsError> {
        let shape = self.stored.shape.as_slice();
        match dtype {
            DType::F32 => Tensor::from_vec(self.values::<f32>()?, shape, device),
            DType::BF16 => Tensor::from_vec(self.values::<bf16>()?, shape, device),
            _ => Tensor::from_vec(self.values::<f16>()?, shape, device),
        }
        .map_err(|error| WeightsError::Device { name: self.stored.name.clone(), error })
    }

    /// Reads the elements and converts them on the way, so that no second copy of them exists on the host.
    pub(crate) fn values<T: PlainFloat>(&self) -> Result<Vec<T>, WeightsError> {
        if !self.is_float() {
            return Err(self.stored_otherwise(Dtype::F32));
        }
        match self.dtype() {
            DType::F32 => self.read(|bytes| T::narrow(f32::from_le_bytes(bytes))),
            DType::BF16 => self.read(|bytes| T::of_bf16(bf16::from_le_bytes(bytes))),
            _ => self.read(|bytes| T::of_f16(f16::from_le_bytes(bytes))),
        }
    }

    /// The bytes of a tensor that is stored in one of some types.
    pub(crate) fn bytes(&self, types: &[&str], wanted: Dtype) -> Result<Vec<u8>, WeightsError> {
        let StoredTensor { name, offset, bytes, storage, .. } = self.stored;
        if !types.contains(storage) {
            return Err(self.stored_otherwise(wanted));
        }
        let out_of_memory = || WeightsError::OutOfMemory { name: name.clone(), bytes: *bytes };
        let total = usize::try_from(*bytes).map_err(|_| out_of_memory())?;
        let mut all = Vec::new();
        all.try_reserve_exact(total).map_err(|_| out_of_memory())?;
        all.resize(total, 0);
        self.shard.read_at(&mut all, *offset)?;
        Ok(all)
    }

    /// The file it is in.
    pub(crate) fn path(&self) -> &Path {
        self.shard.path()
    }

    /// The elements of the tensor, each decoded from its `N` little-endian bytes.
    fn read<const N: usize, T: PlainFloat>(
        &self,
        decode: impl Fn([u8; N]) -> T,
    ) -> Result<Vec<T>, WeightsError> {
        let StoredTensor { name, offset, bytes, .. } = self.stored;
        let out_of_memory = || WeightsError::OutOfMemory { name: name.clone(), bytes: *bytes };
        let total = usize::try_from(*bytes).map_err(|_| out_of_memory())?;
        let mut elements = Vec::new();
        elements.try_reserve_exact(total / N).map_err(|_| out_of_memory())?;
        let mut buffer = vec![0; total.min(CHUNK_BYTES)];
        let mut done = 0;
        while done < total {
            let chunk = buffer.len().min(total - done);
            self.shard.read_at(&mut buffer[..chunk], offset + done as u64)?;
            let (words, _) = buffer[..chunk].as_chunks::<N>();
            let first = elements.len();
            elements.extend(words.iter().map(|word| decode(*word)));
            if !all_finite(&elements[first..]) {
                return Err(WeightsError::not_finite(self.shard.path(), name));
            }
            done += chunk;
        }
        Ok(elements)
    }
}

#[cfg(test)]
mod tests;
