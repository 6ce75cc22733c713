//! Measurements, written to disk as they are made, for another process to resume from.
//!
//! Enters: a [`Header`] (program, command, and a [`JournaledPlan`]) and then every entry when it is known. Leaves: a file of lines, each
//! `HASH JSON`, where HASH is the sha256 over the hash of the line before and the JSON: a changed byte or a line missing from the middle
//! is detected. A line is synced before the next request. What a killed process leaves is therefore a prefix: whole lines, and at most
//! the beginning of one more, which is dropped with a notice. The hashes are not a signature: a journal can be forged.

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::machine::{atomic_file, environment};
use hbmark_core::input::{self, InputError};
use hbmark_core::result::ReportError;

/// The journal's name in a run's folder.
pub const FILE: &str = "journal.jsonl";

/// Raised when a line changes its meaning.
const FORMAT: u32 = 2;

/// A journal larger than this is not one of ours.
const MAX_BYTES: u64 = 4 << 30;

/// The hash before the first line.
const BEGIN: &[u8] = b"hbmark journal";

/// Hexadecimal digits of a line's hash.
const HASH_DIGITS: usize = 64;

/// Why a journal cannot be written or resumed.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    #[error("cannot open {path}: {source}")]
    Open { path: PathBuf, source: std::io::Error },
    #[error("cannot read {path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path} is {found} and no journal of hbmark: choose another folder, or remove it")]
    NotAJournal { path: PathBuf, found: &'static str },
    #[error(
        "cannot write {path}: {source}{}; what is in it is safe: go on with `hbmark {subcommand} --resume {}`",
        atomic_file::remedy(source),
        folder_of(path)
    )]
    Write { path: PathBuf, subcommand: &'static str, source: std::io::Error },
    #[error("{folder}: another run is writing into this folder; wait for it or choose another one")]
    Locked { folder: PathBuf },
    #[error(
        "{folder} holds an unfinished run of {lines} lines: go on with `hbmark {subcommand} --resume {folder}`, or remove {path}"
    )]
    Unfinished { folder: PathBuf, path: PathBuf, subcommand: String, lines: usize },
    #[error(
        "{folder} holds an unfinished `hbmark {subcommand}`: go on with `hbmark {subcommand} --resume {folder}`"
    )]
    OtherSubcommand { folder: PathBuf, subcommand: String },
    #[error(
        "{folder} holds no unfinished run: there is no {FILE}; a run removes it when its result is complete, and one without `--out` has none"
    )]
    NoJournal { folder: PathBuf },
    #[error(
        "the run in {folder} ended before it wrote what it was to do: start it again, with its settings and `--out {folder}`"
    )]
    EmptyJournal { folder: PathBuf },
    #[error(
        "{path}, line {line}: the checksum does not match: the file was changed or damaged after it was written, and nothing of it is used"
    )]
    Damaged { path: PathBuf, line: usize },
    #[error("{path}, line {line}: written by another version of hbmark: {source}")]
    Foreign { path: PathBuf, line: usize, source: serde_json::Error },
    #[error("{path} holds {size} bytes, and a journal is at most {MAX_BYTES}")]
    TooLarge { path: PathBuf, size: u64 },
    #[error("cannot go on with {folder}: {what} differs: the run had {was}, this is {is}")]
    Mismatch { folder: PathBuf, what: String, was: String, is: String },
    #[error("{path} does not belong to this plan: it goes on with {was}, the plan with {is}")]
    PlanMismatch { path: PathBuf, was: String, is: String },
    #[error("{path} holds what no run measures: {source}")]
    ImpossibleValue { path: PathBuf, source: Box<ReportError> },
    #[error("cannot read this program to identify it: {0}")]
    Program(std::io::Error),
}

fn folder_of(path: &Path) -> std::path::Display<'_> {
    path.parent().unwrap_or(path).display()
}

/// The plan of a benchmark, as far as it must be the same to resume it.
pub trait JournaledPlan: Serialize + DeserializeOwned {
    /// The subcommand that executes it.
    const SUBCOMMAND: &'static str;
}

/// The first line.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Header<P> {
    pub format: u32,
    pub subcommand: String,
    pub program: Program,
    /// The command line, for people.
    pub command: String,
    pub plan: P,
}

/// Which program measured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Program {
    pub version: String,
    pub revision: Option<String>,
    /// sha256 of the executable.
    pub executable: String,
}

impl Program {
    /// This one.
    pub fn this() -> Result<Self, JournalError> {
        static THIS: std::sync::OnceLock<Program> = std::sync::OnceLock::new();
        match THIS.get() {
            Some(known) => Ok(known.clone()),
            None => Self::read().map(|read| THIS.get_or_init(|| read).clone()),
        }
    }

    fn read() -> Result<Self, JournalError> {
        let mut file = std::env::current_exe().and_then(File::open).map_err(JournalError::Program)?;
        let mut hasher = Sha256::new();
        std::io::copy(&mut file, &mut hasher).map_err(JournalError::Program)?;
        let build = environment::this_binary();
        Ok(Self {
            version: build.version,
            revision: build.git_revision,
            executable: format!("{:x}", hasher.finalize()),
        })
    }

    /// Holds the program that wrote a journal against another.
    pub(crate) fn same(&self, folder: &Path, other: &Self) -> Result<(), JournalError> {
        let revision = |program: &Self| program.revision.clone().unwrap_or_else(|| "unknown".into());
        same(folder, "the version of hbmark", &self.version, &other.version)?;
        same(folder, "the git revision of hbmark", &revision(self), &revision(other))?;
        same(folder, "the executable (sha256)", &self.executable, &other.executable)
    }
}

impl<P: JournaledPlan> Header<P> {
    /// The header of a plan that this program carries out.
    pub fn new(command: &str, plan: P) -> Result<Self, JournalError> {
        let (program, command) = (Program::this()?, command.to_owned());
        Ok(Self { format: FORMAT, subcommand: P::SUBCOMMAND.to_owned(), program, command, plan })
    }
}

/// Whether two identities are the same.
pub fn same(folder: &Path, what: &str, was: &str, is: &str) -> Result<(), JournalError> {
    if was == is {
        return Ok(());
    }
    let (folder, what) = (folder.to_owned(), what.to_owned());
    Err(JournalError::Mismatch { folder, what, was: was.to_owned(), is: is.to_owned() })
}

/// A journal that is being written, with a lock on its folder.
#[derive(Debug)]
pub struct Journal {
    folder: PathBuf,
    path: PathBuf,
    /// Holds the lock for as long as it is open.
    file: File,
    hash: String,
    length: u64,
    /// Whether it holds what took time to measure.
    measured: bool,
    subcommand: &'static str,
}

/// A journal as it was found.
#[derive(Debug)]
pub struct ReopenedJournal<P, E> {
    pub journal: Journal,
    pub header: Header<P>,
    pub entries: Vec<E>,
    /// What was dropped from its end.
    pub notice: Option<String>,
}

impl Journal {
    /// Begins a journal in a folder.
    pub fn create<P: JournaledPlan>(folder: &Path, header: &Header<P>) -> Result<Self, JournalError> {
        let mut journal = Self::create_empty(folder, P::SUBCOMMAND)?;
        journal.append(header)?;
        atomic_file::sync_folder(folder);
        Ok(journal)
    }

    /// An empty journal in a folder without an unfinished run.
    fn create_empty(folder: &Path, subcommand: &'static str) -> Result<Self, JournalError> {
        let mut journal = Self::lock(folder, subcommand, true)?;
        let bytes = journal.bytes()?;
        let whole = journal.lines(&bytes)?.whole;
        // One that was refused or killed before it measured anything has nothing worth going on with.
        if whole.iter().any(Line::is_measured) {
            let subcommand = whole.first().and_then(Line::subcommand).unwrap_or_else(|| subcommand.into());
            let (folder, path, lines) = (journal.folder, journal.path, whole.len());
            return Err(JournalError::Unfinished { folder, path, subcommand, lines });
        }
        journal.cut(0)?;
        atomic_file::sweep(folder);
        Ok(journal)
    }

    /// Opens the journal that an ended run left.
    ///
    /// # Errors
    /// When there is none, when it is being written, when it is damaged, or when another program or subcommand wrote it.
    pub fn reopen<P: JournaledPlan, E: DeserializeOwned>(
        folder: &Path,
    ) -> Result<ReopenedJournal<P, E>, JournalError> {
        let mut journal = Self::lock(folder, P::SUBCOMMAND, false)?;
        let bytes = journal.bytes()?;
        let Lines { whole, torn } = journal.lines(&bytes)?;
        let path = journal.path.clone();
        let mut whole = whole.into_iter().enumerate().map(|(index, line)| (index + 1, line));
        let Some((_, first)) = whole.next() else {
            return Err(JournalError::EmptyJournal { folder: folder.to_owned() });
        };
        let foreign = |line, source| JournalError::Foreign { path: path.clone(), line, source };
        // The program first: another one may have written the rest in another way.
        let wrote: ProgramOnly = parse(first.json).map_err(|source| foreign(1, source))?;
        wrote.program.same(folder, &Program::this()?)?;
        if let Some(subcommand) = first.subcommand().filter(|wrote| wrote != P::SUBCOMMAND) {
            return Err(JournalError::OtherSubcommand { folder: folder.to_owned(), subcommand });
        }
        let header: Header<P> = parse(first.json).map_err(|source| foreign(1, source))?;
        (journal.hash, journal.length) = (first.hash, first.end);
        let mut entries = Vec::new();
        for (number, line) in whole {
            let written: EntryLine<E> = parse(line.json).map_err(|source| foreign(number, source))?;
            journal.measured |= written.measured;
            entries.push(written.entry);
            (journal.hash, journal.length) = (line.hash, line.end);
        }
        let notice = (torn > 0).then(|| {
            format!("{}: {torn} bytes at the end are an unfinished line and were dropped", path.display())
        });
        journal.cut(journal.length)?;
        atomic_file::sweep(folder);
        Ok(ReopenedJournal { journal, header, entries, notice })
    }

    /// The folder that it is about.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Writes an entry; `measured`: it took time to measure and is worth resuming from.
    pub fn write(&mut self, entry: &impl Serialize, measured: bool) -> Result<(), JournalError> {
        self.append(&EntryLine { measured, entry })?;
        self.measured |= measured;
        Ok(())
    }

    /// Opens and locks the journal's file.
    fn lock(folder: &Path, subcommand: &'static str, create: bool) -> Result<Self, JournalError> {
        let path = folder.join(FILE);
        let opened = |source: std::io::Error| JournalError::Open { path: path.clone(), source };
        loop {
            let file = input::open_own(&path, create).map_err(|refused| match refused {
                InputError::NotRegular { found } => JournalError::NotAJournal { path: path.clone(), found },
                InputError::Io(error) if error.kind() == std::io::ErrorKind::NotFound && !create => {
                    JournalError::NoJournal { folder: folder.to_owned() }
                }
                InputError::Io(error) => opened(error),
                other => opened(std::io::Error::other(other)),
            })?;
            match file.try_lock() {
                Ok(()) => {}
                Err(std::fs::TryLockError::WouldBlock) => {
                    return Err(JournalError::Locked { folder: folder.to_owned() });
                }
                Err(std::fs::TryLockError::Error(error)) => return Err(opened(error)),
            }
            // A run that ended between the two removed the file that is locked now.
            if is_at(&file, &path) {
                let (folder, hash) = (folder.to_owned(), format!("{:x}", Sha256::digest(BEGIN)));
                return Ok(Self { folder, path, file, hash, length: 0, measured: false, subcommand });
            }
        }
    }

    /// The journal as it is; at most as much of it as there is now.
    fn bytes(&self) -> Result<Vec<u8>, JournalError> {
        let unreadable = |source| JournalError::Read { path: self.path.clone(), source };
        let size = self.file.metadata().map_err(unreadable)?.len();
        if size > MAX_BYTES {
            return Err(JournalError::TooLarge { path: self.path.clone(), size });
        }
        let mut bytes = Vec::new();
        (&self.file).take(size).read_to_end(&mut bytes).map_err(unreadable)?;
        Ok(bytes)
    }

    /// Its lines; what is not a journal is left as it is.
    fn lines<'a>(&self, bytes: &'a [u8]) -> Result<Lines<'a>, JournalError> {
        if !has_journal_prefix(bytes) {
            return Err(JournalError::NotAJournal { path: self.path.clone(), found: "another file" });
        }
        lines(bytes).map_err(|line| JournalError::Damaged { path: self.path.clone(), line })
    }

    /// Forgets everything behind a place.
    fn cut(&mut self, length: u64) -> Result<(), JournalError> {
        use std::io::{Seek, SeekFrom};
        let cut = self.file.set_len(length).and_then(|()| self.file.seek(SeekFrom::Start(length)));
        cut.map_err(|source| self.write_error(source))?;
        Ok(())
    }

    /// Appends a line and waits until it is on the disk.
    fn append(&mut self, entry: &impl Serialize) -> Result<(), JournalError> {
        let json = serde_json::to_vec(entry).map_err(|error| self.write_error(error.into()))?;
        let hash = next_hash(&self.hash, &json);
        let line = [hash.as_bytes(), b" ", &json, b"\n"].concat();
        if let Err(source) = self.file.write_all(&line).and_then(|()| self.file.sync_data()) {
            // Half a line would be dropped later; without it nothing has to be.
            let _ = self.cut(self.length);
            return Err(self.write_error(source));
        }
        self.length += line.len() as u64;
        self.hash = hash;
        Ok(())
    }

    fn write_error(&self, source: std::io::Error) -> JournalError {
        JournalError::Write { path: self.path.clone(), subcommand: self.subcommand, source }
    }

    /// Whether a run can go on from it.
    pub fn has_measurements(&self) -> bool {
        self.measured
    }

    /// Removes the journal of a run whose result is complete and on the disk, or that has none.
    pub fn finish(self) -> Result<(), JournalError> {
        std::fs::remove_file(&self.path).map_err(|source| self.write_error(source))?;
        atomic_file::sync_folder(&self.folder);
        Ok(())
    }
}

/// A lock on a folder for results that are quickly made again and need no journal. It is released when this is dropped.
#[derive(Debug)]
pub struct FolderLock(Journal);

impl FolderLock {
    /// Claims a folder.
    pub fn take(folder: &Path) -> Result<Self, JournalError> {
        Journal::create_empty(folder, "run").map(Self)
    }
}

impl Drop for FolderLock {
    fn drop(&mut self) {
        // Left behind it is an empty journal, and does no harm.
        let _ = std::fs::remove_file(&self.0.path);
    }
}

/// Only the part of a header that says whether the rest can be read.
#[derive(Deserialize)]
struct ProgramOnly {
    program: Program,
}

/// An entry as a line.
#[derive(Serialize, Deserialize)]
struct EntryLine<E> {
    measured: bool,
    entry: E,
}

/// A whole line: its JSON, its hash, and where it ends.
pub(crate) struct Line<'a> {
    pub json: &'a [u8],
    hash: String,
    end: u64,
}

impl Line<'_> {
    /// Whether it took time to measure; a header did not.
    fn is_measured(&self) -> bool {
        #[derive(Deserialize)]
        struct MeasuredOnly {
            measured: bool,
        }
        parse::<MeasuredOnly>(self.json).is_ok_and(|line| line.measured)
    }

    /// Of a header: which subcommand wrote it.
    fn subcommand(&self) -> Option<String> {
        #[derive(Deserialize)]
        struct SubcommandOnly {
            subcommand: String,
        }
        parse::<SubcommandOnly>(self.json).ok().map(|header| header.subcommand)
    }
}

pub(crate) struct Lines<'a> {
    pub whole: Vec<Line<'a>>,
    /// Bytes behind the last whole line.
    pub torn: usize,
}

/// Whether these bytes are a journal's, or as much of its first line as was written.
fn has_journal_prefix(bytes: &[u8]) -> bool {
    let (hash, rest) = bytes.split_at(bytes.len().min(HASH_DIGITS));
    hash.iter().all(u8::is_ascii_hexdigit) && b" {".starts_with(&rest[..rest.len().min(2)])
}

/// Parses a line, in memory bounded by its length: the shortest number that an entry keeps many of takes four bytes and more.
pub(crate) fn parse<T: DeserializeOwned>(json: &[u8]) -> Result<T, serde_json::Error> {
    const BUDGET: usize = 16 << 20;
    let text = std::str::from_utf8(json).map_err(serde::de::Error::custom)?;
    input::json::from_str(text, json.len().saturating_mul(4).saturating_add(BUDGET))
}

/// Takes a journal apart; the error is the number of the first line that is not what was written.
pub(crate) fn lines(bytes: &[u8]) -> Result<Lines<'_>, usize> {
    let (mut whole, mut hash, mut at) = (Vec::new(), format!("{:x}", Sha256::digest(BEGIN)), 0);
    while let Some(length) = bytes[at..].iter().position(|byte| *byte == b'\n') {
        let line = &bytes[at..at + length];
        at += length + 1;
        let damaged = whole.len() + 1;
        let (said, rest) = line.split_at_checked(HASH_DIGITS).ok_or(damaged)?;
        let json = rest.strip_prefix(b" ").ok_or(damaged)?;
        hash = next_hash(&hash, json);
        if said != hash.as_bytes() {
            return Err(damaged);
        }
        whole.push(Line { json, hash: hash.clone(), end: at as u64 });
    }
    Ok(Lines { whole, torn: bytes.len() - at })
}

fn next_hash(before: &str, json: &[u8]) -> String {
    format!("{:x}", Sha256::new().chain_update(before).chain_update(json).finalize())
}

/// Whether a file is the one that a path leads to.
fn is_at(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let same = |a: &std::fs::Metadata, b: &std::fs::Metadata| (a.dev(), a.ino()) == (b.dev(), b.ino());
    matches!((file.metadata(), path.metadata()), (Ok(a), Ok(b)) if same(&a, &b))
}
