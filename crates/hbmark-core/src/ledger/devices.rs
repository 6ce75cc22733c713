//! The data-sheet table.
//!
//! Enters: `models/devices.toml`, built into the program, or a file of the user's with the keys of one row. Leaves: the [`DeviceSpec`] for a
//! name as a user types it or as NVML reports it.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use serde::Deserialize;

use super::links::LinkRow;
use crate::input;
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
    #[error(
        "no data sheet for device `{asked}`; known devices: {known}; of another GPU give a file, GPU.toml, with the keys of a row"
    )]
    Unknown { asked: String, known: String },
    #[error("`{asked}` could be {candidates}; name one of them")]
    Ambiguous { asked: String, candidates: String },
}

/// Why neither a device nor a file gave a data sheet.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DataSheetError {
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error("{} is no data sheet: {problem}", path.display())]
    File { path: PathBuf, problem: String },
}

/// Bytes of a file with one data sheet: far more than a row has.
const LARGEST_FILE: u64 = 64 << 10;

/// The dtypes of which data sheets have peaks.
const PEAKS: [&str; 6] = ["f32", "bf16", "f16", "fp8", "int8", "fp4"];

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

/// The data sheet in a file whose name ends with `.toml`, otherwise that of a device's name.
///
/// # Errors
/// As [`find`]; when the file cannot be read, or its keys or figures are not those of a device.
pub fn find_or_read(name: &str) -> Result<DeviceSpec, DataSheetError> {
    let path = Path::new(name);
    if path.extension().is_none_or(|extension| extension != "toml") {
        return Ok(find(name)?.clone());
    }
    let wrong = |problem: String| DataSheetError::File { path: path.to_path_buf(), problem };
    let text = input::read_text(path, LARGEST_FILE).map_err(|error| wrong(error.to_string()))?;
    let spec: DeviceSpec = toml::from_str(&text).map_err(|error| wrong(error.message().to_owned()))?;
    match problem_of(&spec) {
        None => Ok(spec),
        Some(problem) => Err(wrong(problem)),
    }
}

/// The first figure that no device has.
fn problem_of(spec: &DeviceSpec) -> Option<String> {
    let named = |key: &str, name: &str| name.trim().is_empty().then(|| format!("{key} is empty"));
    let rate = |key: &str, value: f64| {
        // A decimal point or a unit that was left out is a factor of a thousand.
        let plausible = (1e9..1e18).contains(&value);
        (!plausible).then(|| format!("{key} = {value:e} is not in 1e9 to 1e18, in units a second"))
    };
    let unknown = |dtype: &&String| !PEAKS.contains(&dtype.as_str());
    let peak = spec.dense_flops_per_s.iter().find_map(|(dtype, peak)| rate(dtype, *peak));
    named("name", &spec.name)
        .or_else(|| named("source", &spec.source))
        .or_else(|| rate("bandwidth_bytes_per_s", spec.bandwidth_bytes_per_s))
        .or_else(|| (spec.memory_bytes.0 < 1 << 20).then(|| format!("memory_bytes is {}", spec.memory_bytes)))
        .or_else(|| {
            let dtype = spec.dense_flops_per_s.keys().find(unknown)?;
            Some(format!("{dtype} has no peak in data sheets; they have {}", PEAKS.join(", ")))
        })
        .or(peak)
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

    /// Whether a row has the chip, which may not end within a word: an L40 is no L40S. Every row has the memory that it is sold with among its
    /// words, of which drivers report up to a tenth less.
    fn fits(&self, spec: &DeviceSpec) -> bool {
        let names = [&spec.name, &spec.product];
        let own = spec.memory_bytes.0 >> 30;
        let sold = |form: &String| {
            let asked = form.strip_suffix("gb").and_then(|size| size.parse().ok());
            asked.is_some_and(|asked: u64| (own..=own + own / 10).contains(&asked))
        };
        let form = |form: &String| {
            let same = |word: String| word == *form || (word.starts_with("sxm") && form.starts_with("sxm"));
            sold(form) || names.iter().flat_map(|name| words(name)).any(same)
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
        "rtxpro6000blackwell" => "rtx-pro-6000",
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
            ("L4 24GB", "l4"),
            ("A10 24GB", "a10"),
            ("GB10 128GB", "gb10"),
            ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
            ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000-server"),
        ] {
            assert_eq!(name_of(asked), row, "{asked}");
        }
    }

    #[test]
    fn memory_is_no_more_than_drivers_report() {
        // MiB that nvidia-smi reports with ECC, and of GB10 the system.
        for (name, mebibytes) in [("l4", 23_034), ("a10", 23_028), ("l40s", 46_068), ("gb10", 122_548)] {
            let memory = find(name).expect("a row").memory_bytes.0;
            assert!((memory..memory + (1 << 30)).contains(&(mebibytes << 20)), "{name}: {memory}");
        }
    }

    #[test]
    fn the_server_edition_has_its_own_bandwidth() {
        let server = find("NVIDIA RTX PRO 6000 Blackwell Server Edition").expect("a row");
        assert!((server.bandwidth_bytes_per_s - 1.597e12).abs() < 1.0);
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
        assert!(error.ends_with("of another GPU give a file, GPU.toml, with the keys of a row"), "{error}");
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
    fn a_file_with_the_keys_of_a_row_is_a_data_sheet_and_its_figures_are_checked() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("mine.toml");
        let read = |text: &str| {
            std::fs::write(&path, text).expect("it is writable");
            find_or_read(path.to_str().expect("UTF-8"))
        };
        let row = |bandwidth: &str, peaks: &str| {
            format!(
                "name = 'mine'\nproduct = 'Mine 48GB'\nbandwidth_bytes_per_s = {bandwidth}\nmemory_bytes = 51_539_607_552\n\
                 dense_flops_per_s = {{ {peaks} }}\nsource = 'a data sheet'\n"
            )
        };
        let mine = read(&row("0.96e12", "bf16 = 362e12")).expect("a data sheet");
        assert_eq!((mine.name.as_str(), mine.bandwidth_bytes_per_s, mine.l2_bytes), ("mine", 0.96e12, None));
        for (bandwidth, peaks, problem) in [
            ("960", "bf16 = 362e12", "bandwidth_bytes_per_s = 9.6e2 is not in 1e9 to 1e18"),
            ("nan", "bf16 = 362e12", "bandwidth_bytes_per_s"),
            ("0.96e12", "bf16 = 362", "bf16 = 3.62e2 is not in"),
            ("0.96e12", "tf32 = 362e12", "tf32 has no peak in data sheets; they have f32,"),
        ] {
            let error = read(&row(bandwidth, peaks)).expect_err(problem).to_string();
            assert!(error.contains("mine.toml is no data sheet: ") && error.contains(problem), "{error}");
        }
        let error = read("name = 'mine'").expect_err("keys are missing").to_string();
        assert!(error.contains("missing field"), "{error}");
        assert!(
            read("bandwidth = 1").expect_err("no such key").to_string().contains("unknown field `bandwidth`")
        );
        let absent = find_or_read("absent.toml").expect_err("no such file").to_string();
        assert!(absent.contains("absent.toml"), "{absent}");
        assert_eq!(find_or_read("h200").expect("a row").name, "h200-sxm");
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
                assert!(PEAKS.contains(&dtype.as_str()), "{name}: {dtype}");
            }
            assert_eq!(problem_of(spec), None, "{name}");
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
