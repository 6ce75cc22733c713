//! Why a saved result cannot be read back.

use std::path::PathBuf;

use crate::input::json::problem;

/// Why a report could not be printed or read back.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    #[error("cannot read {path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path} is {found}, not a regular file; give the result.json itself")]
    NotRegular { path: PathBuf, found: &'static str },
    #[error(
        "the result says {what} is {found}, and no run has that ({wanted}); it was not written by hbmark, or edited since"
    )]
    ImpossibleValue { what: String, found: String, wanted: &'static str },
    #[error("{path} holds {size} bytes, and a result is at most {limit}; is it a result of hbmark?")]
    TooLarge { path: PathBuf, size: u64, limit: u64 },
    #[error("{} is not a whole result of hbmark: {}", path.display(), problem(json))]
    Malformed { path: PathBuf, json: serde_json::Error },
    #[error("{} is not a result of hbmark; results of other programs are read by `hbmark import {}`", path.display(), path.display())]
    NotOurs { path: PathBuf },
    #[error("{} says that its kind is `{found}`, and no result of hbmark is of that kind; was it edited?", path.display())]
    UnknownKind { path: PathBuf, found: String },
    #[error("{} is a result of the kind `{found}`; one of `hbmark run` or `hbmark predict` is needed here", path.display())]
    OtherKind { path: PathBuf, found: String },
    #[error("the result has schema version {}, this program reads {supported}; use the hbmark that wrote it", found.map_or("none".into(), |v| v.to_string()))]
    Version { found: Option<u32>, supported: u32 },
    #[error(transparent)]
    Json(#[from] serde_json::Error),
}
