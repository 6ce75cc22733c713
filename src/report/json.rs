//! Reports as JSON: written whole, read back with suspicion.

use std::path::Path;

use super::{Report, ReportError, SCHEMA_VERSION};

/// A saved result larger than this is not one of ours.
const MAX_BYTES: u64 = 256 << 20;

/// Writes a report.
///
/// # Errors
/// Never for a report made by this program.
pub fn write(report: &Report) -> Result<String, ReportError> {
    Ok(serde_json::to_string_pretty(report)?)
}

/// Reads a saved result.
///
/// # Errors
/// When the file cannot be read, is too large, is no JSON, is of another schema version, or lacks a field.
pub fn read(path: &Path) -> Result<Report, ReportError> {
    parse(&read_text(path)?).map_err(|error| match error {
        ReportError::Json(source) => ReportError::Malformed { path: path.to_path_buf(), source },
        other => other,
    })
}

/// The text of a saved result, of a size that one of ours can have.
pub(super) fn read_text(path: &Path) -> Result<String, ReportError> {
    let unreadable = |source| ReportError::Read { path: path.to_path_buf(), source };
    let size = std::fs::metadata(path).map_err(unreadable)?.len();
    if size > MAX_BYTES {
        return Err(ReportError::TooLarge { path: path.to_path_buf(), size, limit: MAX_BYTES });
    }
    std::fs::read_to_string(path).map_err(unreadable)
}

/// Reads a report from text.
///
/// # Errors
/// As [`read`].
pub fn parse(text: &str) -> Result<Report, ReportError> {
    #[derive(serde::Deserialize)]
    struct Version {
        schema_version: Option<u32>,
    }
    // The version first: a newer schema may lack fields, and the version is the better message.
    let version: Version = serde_json::from_str(text)?;
    match version.schema_version {
        Some(SCHEMA_VERSION) => Ok(serde_json::from_str(text)?),
        found => Err(ReportError::Version { found, supported: SCHEMA_VERSION }),
    }
}

/// The JSON Schema of a report.
#[must_use]
pub fn schema() -> serde_json::Value {
    schemars::schema_for!(Report).to_value()
}
