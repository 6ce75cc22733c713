//! GenAI-Perf's `analyze`: a sweep as CSV, with a second table for the GPUs.
//!
//! Enters: a document. Leaves: one row a configuration. It keeps one percentile of each latency and means of the rates; the GPUs have numbers
//! and no names.

use super::document::Document;
use super::fields::Fields;
use super::{ForeignFormat, ForeignResult, ForeignRow, ImportError, Setup};

const FORMAT: ForeignFormat = ForeignFormat::GenaiPerfAnalyze;
const REQUESTS: &[&str] = &["Config Name", "Request Throughput (requests/sec)"];
const GPUS: &[&str] = &["Config Name", "GPU"];
/// Columns about the GPUs, by the end of the title.
const POWER: &str = "GPU Power Usage (W)";

pub(super) fn read(document: &Document) -> Option<Result<Vec<ForeignResult>, ImportError>> {
    let table = document.tables_with(REQUESTS).next()?;
    Some(document.result(FORMAT, &table.rows, |fields| row(document, fields)))
}

fn row(document: &Document, fields: &Fields<'_>) -> Result<ForeignRow, ImportError> {
    let (values, mut remarks) = fields.values(FORMAT)?;
    let label = fields.text("Config Name")?.unwrap_or_else(|| format!("configuration {}", fields.record));
    let mut gpus = 0;
    for (index, map) in document.tables_with(GPUS).flat_map(|t| &t.rows).enumerate() {
        let gpu = Fields::new(&document.file, index, map);
        if gpu.text("Config Name")?.as_deref() != Some(label.as_str()) {
            continue;
        }
        gpus += 1;
        for title in map.keys().filter(|title| title.ends_with(POWER)) {
            if let Some(watts) = gpu.number(title)? {
                remarks.push(format!(
                    "{} of {}: {watts:.1} W",
                    title.trim_end_matches(" (W)"),
                    gpu.text("GPU")?.unwrap_or_default()
                ));
            }
        }
    }
    let setup = Setup {
        max_concurrency: fields.count("Concurrency")?,
        input_tokens: match fields.number("ISL")? {
            Some(tokens) => Some(tokens),
            None => fields.number("Input Sequence Length")?,
        },
        requests: fields.count("Num Prompts")?,
        gpus: (gpus > 0).then_some(gpus),
        ..Setup::default()
    };
    Ok(ForeignRow { label, setup, values, remarks, ..ForeignRow::default() })
}
