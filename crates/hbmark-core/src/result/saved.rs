//! Reports as JSON files, untrusted when they are read back.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::{OLDEST_SCHEMA_VERSION, Report, ReportError, SCHEMA_VERSION, validation};
use crate::input::{self, InputError};

/// The largest saved result that is read.
const MAX_BYTES: u64 = 256 << 20;
/// Memory for the values of a result, beside the size of its file.
pub(super) const BUDGET: usize = 48 << 20;

/// The kinds of results of this program beside runs and predictions.
const OTHER_KINDS: [&str; 5] = ["serve", "serve_virtual", "serve_cold", "serve_live", "comparison"];

/// Writes a report.
///
/// # Errors
/// Never for a report made by this program.
pub fn write(report: &Report) -> Result<String, serde_json::Error> {
    serde_json::to_string_pretty(report)
}

/// Reads a saved result.
///
/// # Errors
/// When the file is not a regular file, cannot be read, is too large, is not JSON, is of another schema version, lacks a field, or holds
/// impossible values.
pub fn read(path: &Path) -> Result<Report, ReportError> {
    #[derive(Deserialize)]
    struct Head {
        kind: Option<String>,
    }
    let malformed = |json| ReportError::Malformed { path: path.to_path_buf(), json };
    let file = Saved::open(path)?;
    // Told before the fields are read, whose names mean nothing to a reader.
    if let Ok(Head { kind: Some(kind) }) = file.read::<Head>()
        && file.read::<Version>().is_ok_and(|version| version.schema_version.is_some())
        && !matches!(kind.as_str(), "run" | "predict")
    {
        let (path, found) = (path.to_path_buf(), input::plain(&kind));
        let known = OTHER_KINDS.contains(&kind.as_str());
        return Err(if known {
            ReportError::OtherKind { path, found }
        } else {
            ReportError::UnknownKind { path, found }
        });
    }
    of_this_version(file.read().map_err(malformed)?).map_err(|error| match error {
        // Every result of ours has a version: this is another program's.
        ReportError::Version { found: None, .. } => ReportError::NotOurs { path: path.to_path_buf() },
        other => other,
    })?;
    let report: Report = file.read().map_err(malformed)?;
    validation::check(&report)?;
    Ok(report)
}

/// The file of a saved result, at most [`MAX_BYTES`] long. It is read as a stream, so that memory holds its values alone.
pub(super) struct Saved {
    file: File,
    size: u64,
}

impl Saved {
    pub(super) fn open(path: &Path) -> Result<Self, ReportError> {
        let (file, size) = input::open(path).map_err(|refused| match refused {
            InputError::NotRegular { found } => ReportError::NotRegular { path: path.to_path_buf(), found },
            InputError::Io(source) => ReportError::Read { path: path.to_path_buf(), source },
            other => ReportError::Read { path: path.to_path_buf(), source: std::io::Error::other(other) },
        })?;
        if size > MAX_BYTES {
            return Err(ReportError::TooLarge { path: path.to_path_buf(), size, limit: MAX_BYTES });
        }
        Ok(Self { file, size })
    }

    /// The file as a value, from its beginning.
    pub(super) fn read<T: DeserializeOwned>(&self) -> Result<T, serde_json::Error> {
        let budget = BUDGET.saturating_add(usize::try_from(self.size).unwrap_or(usize::MAX));
        let from_start = Beginning { file: &self.file, at: 0 };
        input::json::from_reader(&mut from_start.take(self.size), budget)
    }
}

/// Reads a file by position, so that it can be read again.
struct Beginning<'a> {
    file: &'a File,
    at: u64,
}

impl std::io::Read for Beginning<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let read = std::os::unix::fs::FileExt::read_at(self.file, buffer, self.at)?;
        self.at += read as u64;
        Ok(read)
    }
}

#[derive(Clone, Copy, Deserialize)]
struct Version {
    schema_version: Option<u32>,
}

/// The version is checked first: a newer schema may lack fields, and the version is the better error.
fn of_this_version(version: Version) -> Result<(), ReportError> {
    match version.schema_version {
        Some(OLDEST_SCHEMA_VERSION..=SCHEMA_VERSION) => Ok(()),
        found => Err(ReportError::Version { found, supported: SCHEMA_VERSION }),
    }
}

/// Reads a report from text.
///
/// # Errors
/// As [`read`].
pub fn parse(text: &str) -> Result<Report, ReportError> {
    let budget = BUDGET.saturating_add(text.len());
    of_this_version(input::json::from_str(text, budget)?)?;
    let report: Report = input::json::from_reader(&mut text.as_bytes(), budget)?;
    validation::check(&report)?;
    Ok(report)
}
