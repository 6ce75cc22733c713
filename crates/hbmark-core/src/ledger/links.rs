//! How equal devices reach each other, by data sheets and by other people's measurements.
//!
//! Enters: the `[[link]]` rows of `models/devices.toml` and `models/all_reduce.toml`, built into the program. Leaves: the [`Link`] between so
//! many of a device, and the time of an all-reduce as it was measured there.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use serde::Deserialize;

use super::devices;
use crate::result::Link;
use crate::units::{Bytes, BytesPerSecond, Nanos};

static ALL_REDUCES: &str = include_str!("../../models/all_reduce.toml");

/// A row of the table: a link, and the devices that have it.
#[derive(Debug, Deserialize)]
pub(super) struct LinkRow {
    pub devices: Vec<String>,
    #[serde(flatten)]
    pub link: Link,
}

/// The link between `gpus` of a device; `None` where the table has none, or it reaches fewer.
pub fn between(device: &str, gpus: usize) -> Option<&'static Link> {
    let row = devices::links().iter().find(|row| row.devices.iter().any(|name| name == device))?;
    (row.link.gpus >= gpus).then_some(&row.link)
}

impl Link {
    /// What one of `gpus` sends to the others together, in one direction.
    pub fn of_group(&self, gpus: usize) -> BytesPerSecond {
        let peers = gpus.saturating_sub(1) as f64;
        BytesPerSecond(
            self.per_peer_bytes_per_s.map_or(self.bytes_per_s, |one| (one * peers).min(self.bytes_per_s)),
        )
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AllReduces {
    bytes: Vec<u64>,
    table: Vec<AllReduceRow>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct AllReduceRow {
    device: String,
    /// The product as the source names it.
    measured: String,
    by: String,
    source: String,
    /// By the number of GPUs.
    microseconds: BTreeMap<String, Vec<f64>>,
}

/// Measured times of an all-reduce between so many of a device, by its size.
#[derive(Debug, Clone)]
pub struct MeasuredAllReduce {
    pub by: &'static str,
    pub source: String,
    points: Vec<(u64, f64)>,
}

impl MeasuredAllReduce {
    /// The time of one of so many bytes: between two sizes that were measured in proportion, and of a smaller one that of the smallest. `None`
    /// beyond the largest.
    pub fn time(&self, bytes: Bytes) -> Option<Nanos> {
        let above = self.points.iter().position(|(size, _)| *size >= bytes.0)?;
        let (size, time) = self.points[above];
        let Some((less, before)) = above.checked_sub(1).map(|below| self.points[below]) else {
            return Some(Nanos(time * 1e3));
        };
        let share = (bytes.0 - less) as f64 / (size - less) as f64;
        Some(Nanos((before + share * (time - before)) * 1e3))
    }
}

fn all_reduces() -> &'static AllReduces {
    static PARSED: OnceLock<AllReduces> = OnceLock::new();
    PARSED.get_or_init(|| {
        toml::from_str(ALL_REDUCES).expect("models/all_reduce.toml is part of the program and parses")
    })
}

/// What was measured between `gpus` of a device.
///
/// # Panics
/// If the table built into the program does not parse; a test reads it.
pub fn measured(device: &str, gpus: usize) -> Vec<MeasuredAllReduce> {
    let tables = all_reduces();
    let of = |row: &'static AllReduceRow| {
        let times = row.microseconds.get(&gpus.to_string())?;
        Some(MeasuredAllReduce {
            by: &row.by,
            source: format!("{} in ai-dynamo/aiconfigurator, {}", row.measured, row.source),
            points: tables.bytes.iter().copied().zip(times.iter().copied()).collect(),
        })
    };
    tables.table.iter().filter(|row| row.device == device).filter_map(of).collect()
}

/// Every measured time: device, GPUs, bytes, and nanoseconds.
#[cfg(test)]
pub(super) fn every_time() -> Vec<(&'static str, usize, u64, f64)> {
    let tables = all_reduces();
    let of = |row: &'static AllReduceRow| {
        row.microseconds.iter().flat_map(move |(gpus, times)| {
            let gpus = gpus.parse().expect("a number of GPUs");
            tables
                .bytes
                .iter()
                .zip(times)
                .map(move |(bytes, time)| (row.device.as_str(), gpus, *bytes, time * 1e3))
        })
    };
    tables.table.iter().flat_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_of_a_device_and_sane() {
        let mut seen = std::collections::HashSet::new();
        for row in devices::links() {
            let link = &row.link;
            assert!((1e10..2e12).contains(&link.bytes_per_s) && link.source.len() > 20, "{}", link.name);
            assert!((2..=72).contains(&link.gpus), "{}", link.name);
            for name in &row.devices {
                assert_eq!(&devices::find(name).expect("a row").name, name);
                assert!(seen.insert(name.clone()), "{name} has two links");
            }
            let peers = link.per_peer_bytes_per_s.map(|one| one * (link.gpus - 1) as f64);
            assert!(peers.is_none_or(|all| (all / link.bytes_per_s - 1.0).abs() < 1e-9), "{}", link.name);
        }
        let tables = all_reduces();
        assert!(tables.bytes.is_sorted());
        for row in &tables.table {
            assert_eq!(devices::find(&row.measured).expect("a row").name, row.device, "{}", row.by);
            assert!(row.source.ends_with(".parquet"));
            for (gpus, times) in &row.microseconds {
                assert_eq!(times.len(), tables.bytes.len(), "{} {}", row.device, row.by);
                let gpus: usize = gpus.parse().expect("a number of GPUs");
                assert!(between(&row.device, gpus).is_some(), "{} has no link", row.device);
            }
        }
    }

    #[test]
    fn links_are_those_of_the_data_sheets_and_end_where_they_end() {
        let h200 = between("h200-sxm", 8).expect("NVLink 4");
        assert!((h200.of_group(8).0 - 4.5e11).abs() < 1.0 && h200.reduces);
        assert!(between("h200-sxm", 16).is_none() && between("gb200", 16).is_some());
        assert!(between("rtx-4090", 2).is_none(), "no source at hand");
        // Seven links, of which a pair has one.
        let mi300x = between("mi300x", 2).expect("Infinity Fabric");
        assert!((mi300x.of_group(2).0 - 6.4e10).abs() < 1.0 && (mi300x.of_group(8).0 - 4.48e11).abs() < 1.0);
    }

    #[test]
    fn a_measured_time_is_interpolated_and_not_extrapolated() {
        let tables = measured("h200-sxm", 8);
        let nccl = tables.iter().find(|table| table.by == "NCCL 2.29.2").expect("a table");
        let at = |bytes| nccl.time(Bytes(bytes)).map(|time| time.0.round());
        assert_eq!((at(16_384), at(2), at(24_576)), (Some(18_300.0), Some(16_000.0), Some(18_350.0)));
        assert_eq!(at(1 << 29), None);
        assert!(measured("h200-sxm", 3).is_empty() && measured("l4", 2).is_empty());
    }
}
