//! Models by hub id: from the local cache, and from the network only when they are not there.
//!
//! Enters: an id (`org/name`), a revision and a [`HubConfig`]. Leaves: the folder of a snapshot in the hub cache that holds
//! `config.json` and safetensors, where other tools find it too. A complete snapshot is used as it is, without asking
//! whether the hub has a newer one, but for an `hf_quant_config.json` that was never asked for. Paths from a server are
//! not trusted: commits, tags and file names are checked before they become part of one. The files are not read.

mod http;

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::{fmt, fs, io};

use http::{HttpError, Hub, Metadata};

use super::loading::{WeightsError, is_plain_file_name};
use super::safetensors::{INDEX, SINGLE, ShardIndex};
use hbmark_core::input;

const CONFIG: &str = "config.json";
/// Where ModelOpt says how weights are stored.
const QUANTIZATION: &str = "hf_quant_config.json";
const TOKENIZER: &str = "tokenizer.json";
/// The branch that an id without a revision means.
pub const DEFAULT_REVISION: &str = "main";
/// The hub's own limit on a repository name.
const MAX_ID_BYTES: usize = 96;
/// Git refuses longer reference names on most file systems.
const MAX_REVISION_BYTES: usize = 255;
/// A reference file holds one commit hash of 40 characters.
const MAX_REF_BYTES: u64 = 256;
/// A token has some 40 characters.
const MAX_TOKEN_BYTES: u64 = 4 << 10;

/// Why a model could not be fetched from the hub.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    #[error(
        "{id:?} is neither a path that exists nor a hub id (`name` or `org/name`, of letters, digits, `-`, `_` and `.`)"
    )]
    BadId { id: String },
    #[error("{revision:?} is not a branch, tag or commit")]
    BadRevision { revision: String },
    #[error(
        "{id} at {revision} is not complete in {} ({missing}), and HF_HUB_OFFLINE forbids the network; \
         unset it, or fetch the model on another machine and copy the cache",
        cache.display()
    )]
    Offline { id: String, revision: String, cache: PathBuf, missing: String },
    #[error("no home folder to keep the hub cache in; set HF_HOME")]
    NoHome,
    #[error("the hub does not have {file} of {id} at {revision}; check the spelling")]
    NotFound { id: String, revision: String, file: String },
    #[error(
        "the hub refused {file} of {id} (status {status}): the model is gated, private or does not exist; \
         accept its terms and set HF_TOKEN"
    )]
    Denied { id: String, file: String, status: u16 },
    #[error("{id} at {revision} has no safetensors; it holds {found}")]
    NoSafetensors { id: String, revision: String, found: String },
    #[error("cannot fetch {file} of {id}: {problem}")]
    Fetch { id: String, file: String, problem: String },
    #[error(
        "{file} of {id} arrived with {received} bytes of {expected}; it was removed, run again to resume"
    )]
    Incomplete { id: String, file: String, received: u64, expected: u64 },
    #[error("the hub answered with {what} {value:?} for {file} of {id}, which cannot be part of a path")]
    UnsafeAnswer { id: String, file: String, what: &'static str, value: String },
    #[error("{id} changed from {first} to {then} while it was fetched; run again")]
    Moved { id: String, first: String, then: String },
    #[error("cannot use the hub cache {}: {error}", path.display())]
    Cache { path: PathBuf, error: io::Error },
}

/// Where the hub is, where its cache is, and whether the network may be used.
#[derive(Clone, PartialEq, Eq)]
pub struct HubConfig {
    /// `None` is the public hub.
    pub endpoint: Option<String>,
    /// The folder of `models--org--name` entries.
    pub cache: PathBuf,
    pub token: Option<String>,
    pub offline: bool,
}

/// Which files of a model to fetch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Parts {
    Config,
    All,
}

impl fmt::Debug for HubConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HubConfig")
            .field("endpoint", &self.endpoint)
            .field("cache", &self.cache)
            .field("token", &self.token.as_ref().map(|_| "hidden"))
            .field("offline", &self.offline)
            .finish()
    }
}

impl HubConfig {
    /// Reads `HF_ENDPOINT`, `HF_HUB_CACHE`, `HF_HOME`, `XDG_CACHE_HOME`, `HF_TOKEN`, `HF_TOKEN_PATH` and `HF_HUB_OFFLINE`,
    /// with the meanings and defaults they have in the hub's Python client.
    pub fn from_env() -> Result<Self, HubError> {
        Self::from_variables(|name| std::env::var_os(name))
    }

    fn from_variables(variable: impl Fn(&str) -> Option<OsString>) -> Result<Self, HubError> {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        let text = |name: &str| set(name).and_then(|value| value.into_string().ok());
        let home = set("HF_HOME")
            .map(PathBuf::from)
            .or_else(|| set("XDG_CACHE_HOME").map(|cache| PathBuf::from(cache).join("huggingface")))
            .or_else(|| set("HOME").map(|home| PathBuf::from(home).join(".cache/huggingface")));
        let cache = set("HF_HUB_CACHE")
            .map(PathBuf::from)
            .or_else(|| home.as_ref().map(|home| home.join("hub")))
            .ok_or(HubError::NoHome)?;
        let token_file =
            set("HF_TOKEN_PATH").map(PathBuf::from).or_else(|| home.map(|home| home.join("token")));
        let token = text("HF_TOKEN")
            .or_else(|| input::read_text(&token_file?, MAX_TOKEN_BYTES).ok())
            .map(|token| token.trim().to_owned())
            .filter(|token| !token.is_empty());
        let offline = text("HF_HUB_OFFLINE")
            .is_some_and(|value| matches!(value.to_lowercase().as_str(), "1" | "true" | "yes" | "on"));
        let endpoint = text("HF_ENDPOINT").map(|endpoint| endpoint.trim_end_matches('/').to_owned());
        Ok(Self { endpoint, cache, token, offline })
    }

    /// Returns the snapshot folder of a model, fetching what is not in the cache.
    ///
    /// Progress goes to stderr when `progress` is set and stderr is a terminal. A connection that stalls is not timed out.
    ///
    /// # Errors
    /// When the id or revision has no valid form, when the model is not cached and the network is forbidden, or when
    /// fetching fails.
    pub fn resolve(&self, id: &str, revision: Option<&str>, progress: bool) -> Result<PathBuf, WeightsError> {
        self.resolve_parts(id, revision, progress, Parts::All)
    }

    /// Returns the snapshot folder of a model, fetching no more than its configs where they are not in the cache.
    pub fn resolve_config(&self, id: &str, revision: Option<&str>) -> Result<PathBuf, WeightsError> {
        self.resolve_parts(id, revision, false, Parts::Config)
    }

    fn resolve_parts(
        &self,
        id: &str,
        revision: Option<&str>,
        progress: bool,
        parts: Parts,
    ) -> Result<PathBuf, WeightsError> {
        let revision = revision.unwrap_or(DEFAULT_REVISION);
        check_id(id)?;
        check_revision(revision)?;
        let missing = match self.cached(id, revision, parts) {
            Ok(snapshot) if self.offline || knows_quantization(&snapshot) => return Ok(snapshot),
            Ok(snapshot) => {
                let commit = snapshot.file_name().and_then(OsStr::to_str).unwrap_or(revision);
                return match self.fetch(id, commit, false)?.quantization(&snapshot) {
                    // The headers of weights say how they are stored, a config alone does not.
                    Err(error) if first_missing(&snapshot, Parts::All).is_some() => Err(error.into()),
                    _ => Ok(snapshot),
                };
            }
            Err(missing) => missing,
        };
        if self.offline {
            let (id, revision, cache) = (id.to_owned(), revision.to_owned(), self.cache.clone());
            return Err(HubError::Offline { id, revision, cache, missing }.into());
        }
        self.download(id, revision, progress, parts)
    }

    /// The snapshot of a revision if it is complete; else a message about what is missing.
    fn cached(&self, id: &str, revision: &str, parts: Parts) -> Result<PathBuf, String> {
        let entry = self.cache.join(entry_name(id));
        let snapshots = entry.join("snapshots");
        let reference = entry.join("refs").join(revision);
        let commit = match fs::metadata(&reference) {
            Ok(metadata) if metadata.is_file() && metadata.len() <= MAX_REF_BYTES => {
                fs::read_to_string(&reference).unwrap_or_default().trim().to_owned()
            }
            _ => revision.to_owned(),
        };
        if !is_plain_file_name(&commit) || !snapshots.join(&commit).is_dir() {
            return Err("no snapshot".to_owned());
        }
        let snapshot = snapshots.join(commit);
        match first_missing(&snapshot, parts) {
            Some(file) => Err(format!("no {file}")),
            None => Ok(snapshot),
        }
    }

    fn download(
        &self,
        id: &str,
        revision: &str,
        progress: bool,
        parts: Parts,
    ) -> Result<PathBuf, WeightsError> {
        let mut fetch = self.fetch(id, revision, progress)?;
        if parts == Parts::Config {
            let snapshot = fetch.file(CONFIG)?;
            fetch.quantization(&snapshot)?;
            return Ok(snapshot);
        }

        let listed = fetch.hub.files(id, revision);
        let files = listed.map_err(|error| failed(id, revision, "the files", &error))?;
        let has = |name: &str| files.iter().any(|file| file == name);
        if !has(SINGLE) && !has(INDEX) {
            let shown: Vec<&str> = files.iter().take(8).map(String::as_str).collect();
            return Err(HubError::NoSafetensors {
                id: id.to_owned(),
                revision: revision.to_owned(),
                found: if shown.is_empty() { "nothing".to_owned() } else { shown.join(", ") },
            }
            .into());
        }
        let snapshot = fetch.file(CONFIG)?;
        fetch.quantization(&snapshot)?;
        if has(TOKENIZER) {
            fetch.file(TOKENIZER)?;
        }
        if has(SINGLE) {
            fetch.file(SINGLE)?;
        } else {
            fetch.file(INDEX)?;
            for shard in ShardIndex::read(&snapshot)?.shards() {
                fetch.file(shard)?;
            }
        }
        Ok(snapshot)
    }

    fn fetch<'a>(&self, id: &'a str, revision: &'a str, progress: bool) -> Result<Fetch<'a>, HubError> {
        let refused = |error| HubError::Cache { path: self.cache.clone(), error };
        fs::create_dir_all(&self.cache).map_err(refused)?;
        // Links in the cache are made relative, which needs an absolute path to begin with.
        let entry = self.cache.canonicalize().map_err(refused)?.join(entry_name(id));
        let hub = Hub::new(self.endpoint.as_deref(), self.token.as_deref());
        Ok(Fetch { id, revision, hub, progress, entry, commit: None })
    }
}

/// The folder of a model in the cache.
fn entry_name(id: &str) -> String {
    format!("models--{}", id.replace('/', "--"))
}

/// The first file that a snapshot lacks, if any.
fn first_missing(snapshot: &Path, parts: Parts) -> Option<String> {
    let lacks = |name: &str| !snapshot.join(name).is_file();
    if lacks(CONFIG) {
        return Some(CONFIG.to_owned());
    }
    if parts == Parts::Config || !lacks(SINGLE) {
        return None;
    }
    if lacks(INDEX) {
        return Some(format!("{SINGLE} or {INDEX}"));
    }
    // An index that cannot be read counts as complete: opening the checkpoint says what is wrong with it.
    let index = ShardIndex::read(snapshot).ok()?;
    index.shards().into_iter().find(|shard| lacks(shard)).map(str::to_owned)
}

/// The mark that a snapshot's commit has no `hf_quant_config.json`, where the hub's Python client makes it, too.
fn absent_quantization(snapshot: &Path) -> Option<PathBuf> {
    let (entry, commit) = (snapshot.parent()?.parent()?, snapshot.file_name()?);
    Some(entry.join(".no_exist").join(commit).join(QUANTIZATION))
}

/// Whether a snapshot has `hf_quant_config.json`, or the hub was asked and does not.
fn knows_quantization(snapshot: &Path) -> bool {
    snapshot.join(QUANTIZATION).is_file() || absent_quantization(snapshot).is_some_and(|mark| mark.is_file())
}

/// One model being fetched, at one commit.
struct Fetch<'a> {
    id: &'a str,
    revision: &'a str,
    hub: Hub,
    progress: bool,
    /// The model's folder in the cache.
    entry: PathBuf,
    commit: Option<String>,
}

impl Fetch<'_> {
    /// Fetches `hf_quant_config.json` where there is one, and marks where there is none.
    fn quantization(&mut self, snapshot: &Path) -> Result<(), HubError> {
        match self.file(QUANTIZATION) {
            Err(HubError::NotFound { .. }) => {}
            other => return other.map(drop),
        }
        if let Some(mark) = absent_quantization(snapshot) {
            // In a cache that cannot be written to, the hub is asked again.
            let _ = fs::create_dir_all(mark.parent().unwrap_or(&mark)).and_then(|()| fs::write(&mark, ""));
        }
        Ok(())
    }

    /// Fetches a file unless the snapshot has it, and returns the snapshot's folder.
    fn file(&mut self, name: &str) -> Result<PathBuf, HubError> {
        let failed = |error: &HttpError| failed(self.id, self.revision, name, error);
        let Metadata { commit, tag, size } =
            self.hub.metadata(self.id, self.revision, name).map_err(|error| failed(&error))?;
        // Both become parts of paths.
        for (what, value) in [("the tag", &tag), ("the commit", &commit)] {
            if !is_safe_part(value) {
                let (id, file, value) = (self.id.to_owned(), name.to_owned(), value.to_owned());
                return Err(HubError::UnsafeAnswer { id, file, what, value });
            }
        }
        let first = self.commit.get_or_insert_with(|| commit.clone());
        if *first != commit {
            let (id, first) = (self.id.to_owned(), first.clone());
            return Err(HubError::Moved { id, first, then: commit });
        }
        let snapshot = self.entry.join("snapshots").join(&commit);
        let path = snapshot.join(name);
        if fs::metadata(&path).is_ok_and(|found| found.len() == size) {
            return Ok(snapshot);
        }
        let cache = |path: &Path| {
            let path = path.to_path_buf();
            move |error| HubError::Cache { path, error }
        };
        let blobs = self.entry.join("blobs");
        for folder in [&blobs, &snapshot] {
            fs::create_dir_all(folder).map_err(cache(folder))?;
        }
        let (blob, part) = (blobs.join(&tag), blobs.join(format!("{tag}.incomplete")));
        if !fs::metadata(&blob).is_ok_and(|found| found.len() == size) {
            let wanted = (self.id, self.revision, name);
            self.hub.download(wanted, &part, size, self.progress).map_err(|error| failed(&error))?;
            let received = fs::metadata(&part).map_err(cache(&part))?.len();
            if received != size {
                fs::remove_file(&part).map_err(cache(&part))?;
                let (id, file) = (self.id.to_owned(), name.to_owned());
                return Err(HubError::Incomplete { id, file, received, expected: size });
            }
            fs::rename(&part, &blob).map_err(cache(&blob))?;
        }
        // The name may be there as a link to an older blob.
        let _ = fs::remove_file(&path);
        std::os::unix::fs::symlink(Path::new("../../blobs").join(&tag), &path).map_err(cache(&path))?;
        if self.revision != commit {
            let reference = self.entry.join("refs").join(self.revision);
            let folder = reference.parent().unwrap_or(&self.entry);
            fs::create_dir_all(folder).map_err(cache(folder))?;
            fs::write(&reference, &commit).map_err(cache(&reference))?;
        }
        Ok(snapshot)
    }
}

/// The error as a user of the model needs it.
fn failed(id: &str, revision: &str, file: &str, error: &HttpError) -> HubError {
    let (id, file) = (id.to_owned(), file.to_owned());
    match error {
        HttpError::Status(404) => HubError::NotFound { id, revision: revision.to_owned(), file },
        HttpError::Status(status @ (401 | 403)) => HubError::Denied { id, file, status: *status },
        _ => HubError::Fetch { id, file, problem: error.to_string() },
    }
}

fn check_id(id: &str) -> Result<(), HubError> {
    let parts: Vec<&str> = id.split('/').collect();
    let valid = parts.len() <= 2
        && id.len() <= MAX_ID_BYTES
        && parts.iter().all(|part| is_safe_part(part))
        && !id.contains("--")
        && !id.contains("..");
    if valid { Ok(()) } else { Err(HubError::BadId { id: id.chars().take(MAX_ID_BYTES).collect() }) }
}

fn check_revision(revision: &str) -> Result<(), HubError> {
    let valid = revision.len() <= MAX_REVISION_BYTES
        && revision.split('/').all(is_safe_part)
        && !revision.contains("..");
    if valid {
        Ok(())
    } else {
        Err(HubError::BadRevision { revision: revision.chars().take(MAX_REVISION_BYTES).collect() })
    }
}

/// Whether a text can be one component of a path or an URL as it is.
fn is_safe_part(part: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    (1..=MAX_REVISION_BYTES).contains(&part.len())
        && !part.starts_with(['.', '-'])
        && part.chars().all(allowed)
}

#[cfg(test)]
mod tests;
