//! All results in a folder: one row for each cell and each point of load.
//!
//! Enters: a path to a folder. Leaves: a [`Collection`], in which a cell stands beside the same cell of other runs, oldest first. Every result is
//! judged again as when it is opened alone; its samples do not stay in memory. Links are not followed, and files that are not results of this
//! program are named.

use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::opened::{Opened, open};
use super::words::counted;
use hbmark_core::result::serving::{Point, ServeKind, ServeReport};
use hbmark_core::result::{Capabilities, CellResult, Report, ReportKind, UNKNOWN_PRODUCT};

/// Folders deeper than this are not entered.
const MAX_DEPTH: usize = 16;
/// Entries after which a tree is not a folder of results.
const MAX_ENTRIES: usize = 1_000_000;

/// A result of the folder.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Source {
    /// Its file, from the folder on.
    pub file: String,
    pub kind: &'static str,
    /// UTC, RFC 3339.
    pub started_at: Option<String>,
    pub revision: Option<String>,
    pub model: String,
    /// The GPU or the CPU it was measured on; a data sheet for a prediction.
    pub device: String,
    /// How thoroughly a run sampled: `full`, `quick` or `smoke`.
    pub protocol: Option<String>,
    /// Of a serving result.
    pub workload: Option<String>,
    pub note: Option<String>,
}

/// A cell or a point, and which of the [`Source`]s it is from.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Sourced<T> {
    pub source: usize,
    /// Of a cell that was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub block_counts: Option<BlockCounts>,
    #[serde(flatten)]
    pub row: T,
}

/// The blocks of a cell, whose samples do not stay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct BlockCounts {
    pub taken: usize,
    pub rejected: usize,
}

impl BlockCounts {
    fn of(cell: &CellResult) -> Option<Self> {
        let rejected = cell.blocks.iter().filter(|block| block.rejected.is_some()).count();
        (!cell.blocks.is_empty()).then_some(Self { taken: cell.blocks.len(), rejected })
    }
}

/// A file that is not used.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Unused {
    pub file: String,
    pub why: String,
}

/// What a folder holds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Collection {
    pub folder: String,
    pub sources: Vec<Source>,
    pub cells: Vec<Sourced<CellResult>>,
    pub points: Vec<Sourced<Point>>,
    pub unused: Vec<Unused>,
}

/// Why a folder cannot be reported.
#[derive(Debug, thiserror::Error)]
pub enum CollectionError {
    #[error("cannot read {}: {error}", path.display())]
    Io { path: PathBuf, error: io::Error },
    #[error("{} has more than {MAX_ENTRIES} entries: name a folder of results within it", path.display())]
    TooLarge { path: PathBuf },
    #[error("no result of `run`, `predict` or `serve` lies in {}{}", path.display(), found(*json))]
    Empty { path: PathBuf, json: usize },
}

fn found(json: usize) -> String {
    if json == 0 {
        " or a folder below it".to_owned()
    } else {
        format!(": {} of something else", counted(json, "JSON file"))
    }
}

impl Collection {
    /// Reads every result in a folder and below it.
    ///
    /// # Errors
    /// When the folder cannot be read, is far too large, or holds no result of this program.
    pub fn read(folder: &Path) -> Result<Self, CollectionError> {
        let mut files = Vec::new();
        let mut entries = 0;
        walk(folder, 0, &mut entries, &mut files)?;
        files.sort();
        let mut all = Self {
            folder: folder.display().to_string(),
            sources: Vec::new(),
            cells: Vec::new(),
            points: Vec::new(),
            unused: Vec::new(),
        };
        for path in &files {
            let file = path.strip_prefix(folder).unwrap_or(path).display().to_string();
            match open(path) {
                Ok(Opened::Report(report)) => all.add_report(file, *report),
                Ok(Opened::Serving(report)) => all.add_serving(file, *report),
                Ok(other) => all.unused.push(Unused { file, why: format!("it is {}", other.kind()) }),
                Err(error) => all.unused.push(Unused { file, why: error.to_string() }),
            }
        }
        if all.sources.is_empty() {
            return Err(CollectionError::Empty { path: folder.to_path_buf(), json: files.len() });
        }
        let Self { sources, cells, points, .. } = &mut all;
        let order = |source: usize, name: &str| {
            let Source { model, device, started_at, file, .. } = &sources[source];
            (model.clone(), device.clone(), natural(name), started_at.clone(), file.clone())
        };
        cells.sort_by_cached_key(|cell| order(cell.source, &cell.row.id));
        points.sort_by_cached_key(|point| order(point.source, &point.row.label));
        Ok(all)
    }

    fn add_report(&mut self, file: String, report: Report) {
        let source = self.sources.len();
        let on_gpu = report.capabilities.first().is_some_and(Capabilities::on_gpu);
        let product = report.datasheet.as_ref().map_or(UNKNOWN_PRODUCT, |sheet| &sheet.product);
        let (kind, device) = match (report.kind, &report.group) {
            (ReportKind::Predict, Some(group)) => ("predict", format!("{} x {product}", group.gpus)),
            (ReportKind::Predict, None) => ("predict", product.to_owned()),
            (ReportKind::Run, _) => ("run", report.environment.product(on_gpu).to_owned()),
        };
        self.sources.push(Source {
            file,
            kind,
            started_at: report.started_at,
            revision: report.environment.build.git_revision,
            model: report.model.name,
            device,
            protocol: report.protocol.map(|protocol| protocol.name),
            workload: None,
            note: report.note,
        });
        let light = |cell| CellResult { blocks: Vec::new(), operations: Vec::new(), ..cell };
        self.cells.extend(report.cells.into_iter().map(|cell| Sourced {
            source,
            block_counts: BlockCounts::of(&cell),
            row: light(cell),
        }));
    }

    fn add_serving(&mut self, file: String, report: ServeReport) {
        let source = self.sources.len();
        let on_gpu = report.capabilities.as_ref().is_some_and(Capabilities::on_gpu);
        let product = || report.datasheet.as_ref().map_or(UNKNOWN_PRODUCT, |sheet| &sheet.product);
        let device = match (report.kind, &report.server) {
            (ServeKind::ServeVirtual, _) => format!("{}, virtual clock", product()),
            (_, Some(server)) => server.url.clone(),
            (_, None) => report.environment.product(on_gpu).to_owned(),
        };
        self.sources.push(Source {
            file,
            kind: "serve",
            model: report.model_name().to_owned(),
            started_at: report.started_at,
            revision: report.environment.build.git_revision,
            device,
            protocol: None,
            // Every row of a matrix has its own, which its label names.
            workload: Some(if report.matrix.is_empty() { report.workload.name } else { "matrix".to_owned() }),
            note: report.note,
        });
        let light = |mut point: Point| {
            for result in [&mut point.result, &mut point.predicted].into_iter().flatten() {
                (result.requests, result.timeline, result.evidence) = (None, None, None);
            }
            point
        };
        self.points.extend(report.points.into_iter().map(|point| Sourced {
            source,
            block_counts: None,
            row: light(point),
        }));
    }
}

/// A name whose whole numbers sort by their size: `rate 25` before `rate 100`.
fn natural(name: &str) -> String {
    let (mut key, mut digits, mut in_fraction) = (String::new(), String::new(), false);
    for c in name.chars().chain(['\0']) {
        if c.is_ascii_digit() {
            digits.push(c);
            continue;
        }
        let width = if in_fraction || digits.is_empty() { 0 } else { 20 };
        let _ = write!(key, "{digits:0>width$}{c}");
        in_fraction = c == '.' && !digits.is_empty();
        digits.clear();
    }
    key
}

fn walk(
    folder: &Path,
    depth: usize,
    entries: &mut usize,
    files: &mut Vec<PathBuf>,
) -> Result<(), CollectionError> {
    let failed = |error| CollectionError::Io { path: folder.to_path_buf(), error };
    for entry in fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        *entries += 1;
        if *entries > MAX_ENTRIES {
            return Err(CollectionError::TooLarge { path: folder.to_path_buf() });
        }
        let (path, kind) = (entry.path(), entry.file_type().map_err(failed)?);
        if kind.is_dir() && depth < MAX_DEPTH {
            walk(&path, depth + 1, entries, files)?;
        } else if kind.is_file() && path.extension().is_some_and(|extension| extension == "json") {
            files.push(path);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples;
    use hbmark_core::result::saved;

    /// Two runs of one model by two revisions, the newer one in the first folder, and a serving result.
    fn folder() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, day, revision) in [("a", "02", "222222222222"), ("b/c", "01", "111111111111")] {
            let mut report = samples::measured();
            report.started_at = Some(format!("2026-01-{day}T00:00:00Z"));
            report.environment.build.git_revision = Some(revision.to_owned());
            let path = folder.path().join(name);
            fs::create_dir_all(&path).unwrap();
            fs::write(path.join("result.json"), saved::write(&report).unwrap()).unwrap();
        }
        let serving = serde_json::to_string(&samples::sweep()).unwrap();
        fs::write(folder.path().join("serve.json"), serving).unwrap();
        folder
    }

    #[test]
    fn the_same_cell_of_two_revisions_stands_together_oldest_first() {
        let folder = folder();
        fs::write(folder.path().join("config.json"), "{\"hidden_size\": 64}").unwrap();
        fs::write(folder.path().join("notes.txt"), "no result").unwrap();
        let found = Collection::read(folder.path()).unwrap();
        assert_eq!(found.sources.len(), 3);
        let rows: Vec<(&str, &str)> = found
            .cells
            .iter()
            .map(|cell| (cell.row.id.as_str(), found.sources[cell.source].revision.as_deref().unwrap()))
            .collect();
        assert_eq!(rows.len(), 2 * samples::measured().cells.len());
        for pair in rows.chunks(2) {
            assert_eq!(pair[0].0, pair[1].0);
            assert_eq!((pair[0].1, pair[1].1), ("111111111111", "222222222222"));
        }
        assert_eq!(found.points.len(), samples::sweep().points.len());
        let simulated = &found.sources[found.points[0].source];
        assert!(simulated.device.ends_with(", virtual clock"), "{}", simulated.device);
        let [unused] = found.unused.as_slice() else { panic!("{:?}", found.unused) };
        assert_eq!(unused.file, "config.json");
    }

    #[test]
    fn what_stays_of_a_result_are_its_numbers() {
        let found = Collection::read(folder().path()).unwrap();
        assert!(found.cells.iter().all(|cell| cell.row.blocks.is_empty()));
        let alone = samples::measured();
        let times = |cells: &mut dyn Iterator<Item = &CellResult>| {
            cells
                .filter_map(|cell| Some((cell.id.clone(), cell.step_ns.as_ref()?.median)))
                .collect::<Vec<_>>()
        };
        let mut first = found.cells.iter().filter(|cell| found.sources[cell.source].file.starts_with('a'));
        let mut kept = times(&mut first.by_ref().map(|cell| &cell.row));
        let mut saved = times(&mut alone.cells.iter());
        kept.sort_by(|a, b| a.0.cmp(&b.0));
        saved.sort_by(|a, b| a.0.cmp(&b.0));
        assert_eq!(kept.len(), saved.len());
    }

    #[test]
    fn a_prediction_for_eight_gpus_is_not_one_of_one() {
        let folder = tempfile::tempdir().unwrap();
        let report: Report = samples::saved("predict-70b-8-h200");
        fs::write(folder.path().join("result.json"), saved::write(&report).unwrap()).unwrap();
        assert_eq!(Collection::read(folder.path()).unwrap().sources[0].device, "8 x NVIDIA H200");
    }

    #[test]
    fn numbers_in_names_sort_by_their_size() {
        let mut names =
            ["rate 100", "rate 8.5", "rate 25", "rate 8.25", "rate 8", "b1/c512", "b1/c4096", "rate 0.5"];
        names.sort_by_key(|name| natural(name));
        assert_eq!(
            names,
            ["b1/c512", "b1/c4096", "rate 0.5", "rate 8", "rate 8.25", "rate 8.5", "rate 25", "rate 100"]
        );
    }

    #[test]
    fn a_folder_without_results_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let error = Collection::read(folder.path()).unwrap_err().to_string();
        assert!(error.ends_with("or a folder below it"), "{error}");
        fs::write(folder.path().join("x.json"), "[").unwrap();
        let error = Collection::read(folder.path()).unwrap_err().to_string();
        assert!(error.ends_with(": 1 JSON file of something else"), "{error}");
        let error = Collection::read(&folder.path().join("none")).unwrap_err().to_string();
        assert!(error.starts_with("cannot read"), "{error}");
    }

    #[cfg(unix)]
    #[test]
    fn links_are_not_followed() {
        let folder = folder();
        std::os::unix::fs::symlink(folder.path(), folder.path().join("again")).unwrap();
        assert_eq!(Collection::read(folder.path()).unwrap().sources.len(), 3);
    }
}
