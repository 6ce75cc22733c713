//! Any result in a file, as what it is: the one door that every command opens files through.
//!
//! Enters: a path. Leaves: a run or prediction, a serving result or a comparison, each judged again from its own samples, or the results of
//! another program. A file is told by its content.

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use super::import::{self, ForeignResult, ImportError};
use super::recheck::recheck_serving;
use super::{compare::recheck_comparison, judge, recheck};
use hbmark_core::result::comparison::{self, Comparison};
use hbmark_core::result::serving::{self, ServeReport};
use hbmark_core::result::{Report, ReportError, ReportKind, saved};

/// What a file holds.
#[derive(Debug, Clone, PartialEq)]
pub enum Opened {
    /// Of `run` or `predict`.
    Report(Box<Report>),
    Serving(Box<ServeReport>),
    Comparison(Box<Comparison>),
    /// Of another program.
    Foreign(Vec<ForeignResult>),
}

/// Why a file is not a result.
#[derive(Debug, thiserror::Error)]
pub enum OpenedError {
    #[error(transparent)]
    Own(#[from] ReportError),
    #[error(transparent)]
    Foreign(#[from] ImportError),
}

impl Opened {
    /// What a person calls it.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Report(report) if report.kind == ReportKind::Predict => "a prediction",
            Self::Report(_) => "a run",
            Self::Serving(_) => "a serving result",
            Self::Comparison(_) => "a comparison",
            Self::Foreign(_) => "a result of another program",
        }
    }
}

/// What `--out` writes.
const RESULT_FILES: [&str; 3] = ["result.json", "serve.json", "comparison.json"];

/// The result that a folder holds.
pub fn result_in(folder: &Path) -> Option<PathBuf> {
    RESULT_FILES.iter().map(|name| folder.join(name)).find(|file| file.is_file())
}

/// A file, or that of the folder.
fn file_of(path: &Path) -> Cow<'_, Path> {
    result_in(path).map_or(Cow::Borrowed(path), Cow::Owned)
}

/// What a saved run or prediction can show its reader, and what not.
pub fn unsigned(kind: ReportKind) -> &'static str {
    match kind {
        ReportKind::Run => {
            "read from a file: every number is recomputed from its raw samples, and their origin is not verified"
        }
        ReportKind::Predict => {
            "read from a file: a prediction has no samples, so its floors are the file's own; hbmark predict computes them again"
        }
    }
}

/// Reads a run or a prediction, from its file or the folder of that, judged again from its raw blocks.
///
/// # Errors
/// As [`saved::read`].
pub fn report(path: &Path) -> Result<Report, ReportError> {
    let mut report = saved::read(&file_of(path))?;
    judge::recompute(&mut report);
    recheck(&mut report);
    judge::relate(&mut report);
    Ok(report)
}

/// Reads a serving result, judged again from its requests; `None` where the file is of another kind.
///
/// # Errors
/// As [`serving::read`].
pub fn serving(path: &Path) -> Result<Option<ServeReport>, ReportError> {
    let mut report = serving::read(&file_of(path))?;
    report.iter_mut().for_each(recheck_serving);
    Ok(report)
}

/// Reads what can stand on the roofline beside our cells: rows of other programs, or of a serving result of ours.
///
/// # Errors
/// As [`import::read`].
pub fn rows(path: &Path) -> Result<Vec<ForeignResult>, ImportError> {
    match serving(path) {
        Ok(Some(report)) => Ok(vec![import::of_serving(&report, &import::source_name(path))]),
        _ => import::read(path),
    }
}

/// Reads a comparison, decided again from its rounds; `None` where the file is of another kind.
fn comparison(path: &Path) -> Result<Option<Comparison>, ReportError> {
    let mut found = comparison::read(&file_of(path))?;
    found.iter_mut().for_each(recheck_comparison);
    Ok(found)
}

/// Reads a result of any kind.
///
/// # Errors
/// When the file cannot be read, is of a version of ours that is not known, holds impossible values, or is no result at all.
pub fn open(path: &Path) -> Result<Opened, OpenedError> {
    if let Some(report) = serving(path)? {
        return Ok(Opened::Serving(Box::new(report)));
    }
    if let Some(found) = comparison(path)? {
        return Ok(Opened::Comparison(Box::new(found)));
    }
    match report(path) {
        Ok(report) => Ok(Opened::Report(Box::new(report))),
        // No schema version of ours, or no JSON at all: another program's.
        Err(
            ours @ (ReportError::NotOurs { .. }
            | ReportError::UnknownKind { .. }
            | ReportError::Malformed { .. }
            | ReportError::Json(_)),
        ) => {
            // An object with our version, and a field that is none of ours.
            let broken = match &ours {
                ReportError::Malformed { json, .. } => json.is_data(),
                other => matches!(other, ReportError::UnknownKind { .. }),
            };
            match import::read(path) {
                Ok(results) => Ok(Opened::Foreign(results)),
                Err(ImportError::Unrecognised { object: true, .. } | ImportError::OwnResult { .. })
                    if broken =>
                {
                    Err(ours.into())
                }
                Err(theirs) => Err(theirs.into()),
            }
        }
        Err(other) => Err(other.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fixture(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(name)
    }

    #[test]
    fn every_kind_of_file_is_what_it_is() {
        for (name, kind) in [
            ("results/run-scripted.json", "a run"),
            ("results/predict-h200.json", "a prediction"),
            ("results/serve-single.json", "a serving result"),
            ("results/serve-sweep.json", "a serving result"),
            ("results/comparison.json", "a comparison"),
            ("foreign/vllm-serve-0.25.json", "a result of another program"),
            ("foreign/llama-bench.md", "a result of another program"),
        ] {
            let opened = open(&fixture(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
            assert_eq!(opened.kind(), kind, "{name}");
        }
        let folder = tempfile::tempdir().unwrap();
        std::fs::copy(fixture("results/serve-single.json"), folder.path().join("serve.json")).unwrap();
        assert_eq!(open(folder.path()).unwrap().kind(), "a serving result", "the folder of one");
    }

    #[test]
    fn what_is_no_result_is_refused_by_what_it_is() {
        let refused = open(&fixture("configs/llama-3.1-8b.json")).unwrap_err().to_string();
        assert!(refused.contains("is a model's config.json, not a result"), "{refused}");
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("result.json");
        let mut report: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(fixture("results/run-scripted.json")).unwrap())
                .unwrap();
        report["cells"] = 3.into();
        std::fs::write(&path, report.to_string()).unwrap();
        let broken = open(&path).unwrap_err();
        assert!(matches!(broken, OpenedError::Own(ReportError::Malformed { .. })), "{broken}");
        // Of a kind that nobody knows, or one that is not wanted here: said without the words of a parser.
        report["kind"] = "walk".into();
        std::fs::write(&path, report.to_string()).unwrap();
        let unknown = open(&path).unwrap_err().to_string();
        assert!(unknown.contains("its kind is `walk`") && !unknown.contains("variant"), "{unknown}");
        assert!(unsigned(ReportKind::Run).contains("raw samples"));
        let predicted = unsigned(ReportKind::Predict);
        assert!(predicted.contains("no samples") && !predicted.contains("recomputed"), "{predicted}");
        let other = super::report(&fixture("results/serve-single.json")).unwrap_err().to_string();
        assert!(other.contains("of the kind `serve_virtual`") && !other.contains("variant"), "{other}");
    }
}
