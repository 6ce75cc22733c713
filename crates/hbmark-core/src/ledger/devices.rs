//! The data-sheet table.
//!
//! Enters: `models/devices.toml`, built into the program. Leaves: the [`DeviceSpec`] for a name as a user types it or as NVML
//! reports it.

use std::sync::OnceLock;

use serde::Deserialize;

use super::links::LinkRow;
use crate::result::DeviceSpec;

static TABLE: &str = include_str!("../../models/devices.toml");

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    device: Vec<DeviceSpec>,
    link: Vec<LinkRow>,
}

/// Why a device has no data sheet.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    #[error("no data sheet for device `{asked}`; known devices: {known}")]
    Unknown { asked: String, known: String },
    #[error("`{asked}` could be {candidates}; name one of them")]
    Ambiguous { asked: String, candidates: String },
}

fn table() -> &'static Table {
    static PARSED: OnceLock<Table> = OnceLock::new();
    PARSED
        .get_or_init(|| toml::from_str(TABLE).expect("models/devices.toml is part of the program and parses"))
}

/// Every row, in the order of the file.
///
/// # Panics
/// If the table built into the program does not parse; a test reads it.
pub fn all() -> &'static [DeviceSpec] {
    &table().device
}

/// The links between devices, in the order of the file.
pub(super) fn links() -> &'static [LinkRow] {
    &table().link
}

/// The data sheet of a device, by its short name (`h100-sxm`) or a product name (`NVIDIA H100 80GB HBM3`), whatever the
/// case, spaces, dashes and the vendor. Whole words of a name are enough where only one row has them (`4090`, `A100 PCIe 80GB`).
///
/// # Errors
/// When no row matches, or more than one does; both list the names.
pub fn find(name: &str) -> Result<&'static DeviceSpec, DeviceError> {
    let asked = plain(name);
    let exact = |spec: &&DeviceSpec| {
        let product = plain(&spec.product);
        // "H200" is the whole product name of a row, and "H100" is part of three.
        plain(&spec.name) == asked
            || product == asked
            || product.strip_prefix("nvidia") == Some(asked.as_str())
    };
    if let Some(spec) = all().iter().find(exact) {
        return Ok(spec);
    }
    if let Some(spec) = by_alias(&asked) {
        return Ok(spec);
    }
    let part = Part::of(name);
    let candidates: Vec<_> = all().iter().filter(|spec| asked.len() > 1 && part.fits(spec)).collect();
    match candidates.as_slice() {
        [spec] => Ok(spec),
        [] => Err(DeviceError::Unknown { asked: name.to_owned(), known: names(all()) }),
        _ => Err(DeviceError::Ambiguous { asked: name.to_owned(), candidates: names(candidates) }),
    }
}

/// A part of a name: the chip, and in what form or with how much memory.
struct Part {
    chip: String,
    forms: Vec<String>,
}

impl Part {
    fn of(name: &str) -> Self {
        let (forms, chip): (Vec<_>, Vec<_>) = words(name).partition(|word| {
            let gigabytes = word.strip_suffix("gb").is_some_and(|size| size.parse::<u32>().is_ok());
            gigabytes || ["sxm", "pcie", "nvl"].iter().any(|form| word.starts_with(form))
        });
        Self { chip: chip.concat(), forms }
    }

    /// Whether a row has the chip, which may not end within a word: an L40 is no L40S. Every row has its memory among its words.
    fn fits(&self, spec: &DeviceSpec) -> bool {
        let names = [&spec.name, &spec.product];
        let memory = format!("{}gb", spec.memory_bytes.0 >> 30);
        let form = |form: &String| {
            let same = |word: String| word == *form || (word.starts_with("sxm") && form.starts_with("sxm"));
            *form == memory || names.iter().flat_map(|name| words(name)).any(same)
        };
        names.iter().any(|name| has_words(name, &self.chip)) && self.forms.iter().all(form)
    }
}

/// Whether words of a name in a row are the ones asked for, written without spaces.
fn has_words(name: &str, asked: &str) -> bool {
    let words: Vec<String> = words(name).collect();
    (0..words.len()).any(|first| {
        let mut row = String::new();
        words[first..].iter().any(|word| {
            row.push_str(word);
            row == asked
        })
    })
}

/// Runs of letters and digits, lower case.
fn words(name: &str) -> impl Iterator<Item = String> {
    name.split(|c: char| !c.is_ascii_alphanumeric())
        .filter(|word| !word.is_empty())
        .map(str::to_ascii_lowercase)
}

/// Whether a name that has no data sheet mentions a row's chip (`8x H100`): `None` where it mentions no GPU at all.
pub fn mentions(name: &str, spec: &DeviceSpec) -> Option<bool> {
    let words: Vec<String> = name
        .split(|c: char| !c.is_ascii_alphanumeric())
        .map(|word| {
            word.trim_start_matches(|c: char| c.is_ascii_digit()).trim_start_matches('x').to_ascii_lowercase()
        })
        .collect();
    let chip = |spec: &DeviceSpec| {
        spec.name
            .trim_start_matches("rtx-")
            .trim_start_matches("pro-")
            .split('-')
            .next()
            .unwrap_or_default()
            .to_owned()
    };
    let says = |chip: &str| !chip.is_empty() && words.iter().any(|word| word == chip || plain(name) == chip);
    if says(&chip(spec)) {
        return Some(true);
    }
    let makers = [
        "apple", "radeon", "geforce", "instinct", "gaudi", "epyc", "ryzen", "xeon", "intel", "nvidia", "amd",
    ];
    let other = all().iter().any(|row| says(&chip(row))) || makers.iter().any(|maker| says(maker));
    other.then_some(false)
}

/// Other product names of a row, as drivers and users write them.
fn by_alias(asked: &str) -> Option<&'static DeviceSpec> {
    let row = match asked {
        "h100sxm5" | "nvidiah100sxm5" | "h100sxm580gb" => "h100-sxm",
        "h200sxm5" | "nvidiah200sxm" => "h200-sxm",
        // The driver names the board by its LPDDR: 480 GB goes with 96 GB of HBM3, 144G with HBM3e.
        "gh200480gb" | "nvidiagh200480gb" => "gh200-96",
        "gh200144g" | "nvidiagh200144ghbm3e" => "gh200-144",
        "a100sxm80gb" | "a10080gbsxm" => "a100-80-sxm",
        "a100sxm40gb" | "a10040gbsxm" => "a100-40-sxm",
        "nvidiaa100pcie80gb" => "a100-80-pcie",
        "mi300x" | "amdinstinctmi300xoam" => "mi300x",
        "nvidiab300sxm6ac" | "b300sxm" => "b300",
        "nvidiartxpro6000blackwellserveredition" | "rtxpro6000blackwell" => "rtx-pro-6000",
        _ => return None,
    };
    all().iter().find(|spec| spec.name == row)
}

/// Letters and digits only, lower case.
fn plain(name: &str) -> String {
    name.chars().filter(char::is_ascii_alphanumeric).map(|c| c.to_ascii_lowercase()).collect()
}

fn names<'a>(specs: impl IntoIterator<Item = &'a DeviceSpec>) -> String {
    specs.into_iter().map(|spec| spec.name.as_str()).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn name_of(asked: &str) -> &'static str {
        &find(asked).unwrap_or_else(|error| panic!("{error}")).name
    }

    #[test]
    fn names_are_found_as_typed_and_as_the_driver_reports_them() {
        for (asked, row) in [
            ("h100-sxm", "h100-sxm"),
            ("H100 SXM", "h100-sxm"),
            ("NVIDIA H100 80GB HBM3", "h100-sxm"),
            ("NVIDIA H100 PCIe", "h100-pcie"),
            ("NVIDIA H200", "h200-sxm"),
            ("h200", "h200-sxm"),
            ("NVIDIA H200 NVL", "h200-nvl"),
            ("NVIDIA GH200 480GB", "gh200-96"),
            ("NVIDIA A100-SXM4-80GB", "a100-80-sxm"),
            ("NVIDIA A100 80GB PCIe", "a100-80-pcie"),
            ("NVIDIA GeForce RTX 4090", "rtx-4090"),
            ("4090", "rtx-4090"),
            ("L4", "l4"),
            ("A10", "a10"),
            ("NVIDIA L40S", "l40s"),
            ("B300", "b300"),
            ("gb300", "gb300"),
            ("h20", "h20"),
            ("RTX 5090", "rtx-5090"),
            ("RTX PRO 6000", "rtx-pro-6000"),
            ("GB10", "gb10"),
            ("MI355X", "mi355x"),
            ("RTX4090", "rtx-4090"),
            ("A100 PCIe 80GB", "a100-80-pcie"),
            ("A100 SXM5 80GB", "a100-80-sxm"),
            ("H100 NVL 94GB", "h100-nvl"),
            ("L40S 48GB", "l40s"),
        ] {
            assert_eq!(name_of(asked), row, "{asked}");
        }
    }

    #[test]
    fn a_part_of_a_word_is_another_device() {
        for asked in ["L40", "NVIDIA L40", "rtx-509", "A1", "H10", "RTX 6000", "MI300", "80GB", "SXM"] {
            let error = find(asked).expect_err(asked);
            assert!(matches!(error, DeviceError::Unknown { .. }), "{asked}: {error}");
        }
    }

    #[test]
    fn a_name_without_a_data_sheet_may_still_mention_a_chip() {
        let h100 = find("h100-sxm").expect("a row");
        assert_eq!(mentions("8xH100 node", h100), Some(true));
        assert_eq!(mentions("Apple M4", h100), Some(false));
        assert_eq!(mentions("AMD EPYC 9654", h100), Some(false));
        assert_eq!(mentions("1xStandard_ND96asr_v4 x 1", h100), None);
    }

    #[test]
    fn an_unknown_device_lists_the_known_ones() {
        let error = find("Radeon VII").expect_err("no such row").to_string();
        assert!(
            error.starts_with("no data sheet for device `Radeon VII`; known devices: h100-sxm, "),
            "{error}"
        );
        assert!(find("").is_err());
    }

    #[test]
    fn a_name_that_fits_several_rows_asks_which() {
        let error = find("a100").expect_err("four rows").to_string();
        for (asked, candidates) in [
            ("H100", "h100-sxm, h100-pcie, h100-nvl"),
            ("H100 80GB", "h100-sxm, h100-pcie"),
            ("GH200", "gh200-96, gh200-144"),
            ("A100 80GB", "a100-80-sxm, a100-80-pcie"),
            ("a100-80gb", "a100-80-sxm, a100-80-pcie"),
            ("A100 SXM", "a100-40-sxm, a100-80-sxm"),
        ] {
            let error = find(asked).expect_err("several rows").to_string();
            assert_eq!(error, format!("`{asked}` could be {candidates}; name one of them"));
        }
        assert_eq!(
            error,
            "`a100` could be a100-40-sxm, a100-40-pcie, a100-80-sxm, a100-80-pcie; name one of them"
        );
    }

    #[test]
    fn every_row_is_sane() {
        let mut seen = HashSet::new();
        for spec in all() {
            let name = &spec.name;
            assert!(seen.insert(plain(name)) && seen.insert(plain(&spec.product)), "{name} twice");
            assert!((2e11..2e13).contains(&spec.bandwidth_bytes_per_s), "bandwidth of {name}");
            assert!((16 << 30..400 << 30).contains(&spec.memory_bytes.0), "memory of {name}");
            assert!(spec.memory_bytes.0.is_multiple_of(1 << 30), "memory of {name} is not whole GiB");
            if let Some(l2) = spec.l2_bytes {
                assert!((4 << 20..=256 << 20).contains(&l2.0), "cache of {name}");
            }
            assert!(spec.source.len() > 20, "{name} has no source");
            let peak = |dtype: &str| spec.dense_flops_per_s.get(dtype).copied();
            for dtype in spec.dense_flops_per_s.keys() {
                assert!(
                    ["f32", "bf16", "f16", "fp8", "int8", "fp4"].contains(&dtype.as_str()),
                    "{name}: {dtype}"
                );
            }
            assert!(!spec.dense_flops_per_s.is_empty(), "{name} has no peak");
            assert_eq!(peak("bf16"), peak("f16"), "bf16 against f16 of {name}");
            // A vendor may publish a peak or two alone.
            let Some(bf16) = peak("bf16") else { continue };
            assert!(peak("f32").is_none_or(|f32_peak| f32_peak < bf16), "f32 against bf16 of {name}");
            for narrow in ["fp8", "int8"].into_iter().filter_map(peak) {
                // Consumer cards run 16-bit products with f32 accumulation at half rate: 4x there, 2x elsewhere.
                assert!((1.9..4.1).contains(&(narrow / bf16)), "8-bit against bf16 of {name}");
            }
            assert!(
                peak("fp4").is_none_or(|fp4| (3.9..8.1).contains(&(fp4 / bf16))),
                "4-bit against bf16 of {name}"
            );
            // Between a card with fast memory and one with fast products: 35 to 430 bf16 FLOPs per byte.
            let balance = bf16 / spec.bandwidth_bytes_per_s;
            assert!((35.0..430.0).contains(&balance), "{name}: {balance} FLOPs per byte");
        }
    }
}
