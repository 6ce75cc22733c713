//! Ceilings kept from a run of the last minutes, in a file in the user's cache folder.
//!
//! Enters: the machine and how it is probed. Leaves: ceilings that were measured under the same conditions a short while ago, with their age;
//! or nothing, whatever the reason. Ceilings that something disturbed are not kept.

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::engine::native::cpu::kernel_choice::FORCED;
use crate::machine::atomic_file::write_atomic;
use crate::machine::environment::boot_id;
use crate::machine::memory::nodes_and_policy;
use crate::machine::system_files::Root;
use crate::measure::protocol::ProtocolPreset;
use hbmark_core::input;
use hbmark_core::result::{Ceilings, Environment};

/// Clocks, heat and neighbours change; ceilings older than this are measured again.
const MAX_AGE_S: u64 = 600;

/// Ceilings are a page of numbers.
const MAX_BYTES: u64 = 64 << 10;
/// Memory for what it holds.
const BUDGET: usize = 16 << 20;

/// Variables that choose the native engine's kernels, and candle's threads.
const VARIABLES: [&str; 2] = [FORCED, "RAYON_NUM_THREADS"];

/// What ceilings depend on. Any difference, and they are measured again.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Conditions {
    version: String,
    revision: Option<String>,
    /// Machines of one kind may share a home.
    hostname: Option<String>,
    boot: Option<String>,
    memory: Option<u64>,
    kernel: Option<String>,
    cpu: Option<String>,
    cores: Vec<usize>,
    quota_cores: Option<f64>,
    governor: Option<String>,
    huge_pages: Option<String>,
    memory_limit: Option<u64>,
    memory_nodes: Option<String>,
    memory_policy: Option<String>,
    gpu: Option<String>,
    driver: Option<String>,
    power_limit_watts: Option<f64>,
    mig: Option<bool>,
    mps: Option<bool>,
    threads: Option<usize>,
    variables: [Option<String>; VARIABLES.len()],
    full: bool,
}

impl Conditions {
    /// Those of a machine and of this process; `cores` are those that it may use.
    pub fn of(
        environment: &Environment,
        cores: Vec<usize>,
        threads: Option<usize>,
        preset: ProtocolPreset,
    ) -> Self {
        let variable = |name: &str| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
        Self::with(&variable, environment, cores, threads, preset)
    }

    fn with(
        variable: &dyn Fn(&str) -> Option<String>,
        environment: &Environment,
        cores: Vec<usize>,
        threads: Option<usize>,
        preset: ProtocolPreset,
    ) -> Self {
        let Environment { hostname, cpu, gpu, build, kernel, .. } = environment;
        let [memory_nodes, memory_policy] = nodes_and_policy(&Root::system());
        let gpu = gpu.as_ref();
        Self {
            version: build.version.clone(),
            revision: build.git_revision.clone(),
            hostname: hostname.clone(),
            boot: boot_id(),
            memory: cpu.memory_bytes.map(|bytes| bytes.0),
            kernel: kernel.clone(),
            cpu: cpu.model.clone(),
            cores,
            quota_cores: cpu.quota_cores,
            governor: cpu.governor.clone(),
            huge_pages: cpu.transparent_huge_pages.clone(),
            memory_limit: cpu.memory_limit_bytes.map(|bytes| bytes.0),
            memory_nodes,
            memory_policy,
            gpu: gpu.and_then(|gpu| gpu.uuid.clone()),
            driver: gpu.and_then(|gpu| gpu.driver.clone()),
            power_limit_watts: gpu.and_then(|gpu| gpu.power_limit_watts),
            mig: gpu.and_then(|gpu| gpu.mig),
            mps: gpu.and_then(|gpu| gpu.mps),
            threads,
            variables: VARIABLES.map(variable),
            full: preset == ProtocolPreset::Full,
        }
    }
}

#[derive(Serialize, Deserialize)]
struct Kept {
    measured_at_s: u64,
    conditions: Conditions,
    ceilings: Ceilings,
}

/// The user's cache folder of this program, by the rules of XDG.
pub fn folder() -> Option<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = variable("XDG_CACHE_HOME").or_else(|| variable("HOME").map(|home| home.join(".cache")))?;
    Some(cache.join("hbmark"))
}

/// Seconds since 1970.
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

fn file(folder: &Path, conditions: &Conditions) -> Option<PathBuf> {
    let digest = Sha256::digest(serde_json::to_vec(conditions).ok()?);
    Some(folder.join(format!("ceilings-{digest:.12x}.json")))
}

/// What was kept under these conditions, and is young enough.
pub fn read(folder: &Path, conditions: &Conditions, now: u64) -> Option<Ceilings> {
    let text = input::read_text(&file(folder, conditions)?, MAX_BYTES).ok()?;
    let kept: Kept = input::json::from_str(&text, BUDGET).ok()?;
    let age = now.checked_sub(kept.measured_at_s).filter(|age| *age <= MAX_AGE_S)?;
    let usable = kept.conditions == *conditions && kept.ceilings.doubt().is_none();
    usable.then_some(Ceilings { age_s: Some(age as f64), ..kept.ceilings })
}

/// Keeps ceilings that nothing disturbed; that they cannot be kept is not an error.
pub fn write(folder: &Path, conditions: &Conditions, ceilings: &Ceilings, now: u64) {
    if ceilings.doubt().is_some() || std::fs::create_dir_all(folder).is_err() {
        return;
    }
    let kept = Kept {
        measured_at_s: now,
        conditions: conditions.clone(),
        ceilings: Ceilings { age_s: None, ..ceilings.clone() },
    };
    if let (Some(file), Ok(text)) = (file(folder, conditions), serde_json::to_string(&kept)) {
        // The next run measures them again.
        let _ = write_atomic(&file, &text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hbmark_core::result::Cause;
    use hbmark_report::samples;

    fn conditions(threads: Option<usize>, preset: ProtocolPreset) -> Conditions {
        Conditions::of(&samples::report().environment, vec![0, 1], threads, preset)
    }

    #[test]
    fn ceilings_are_kept_for_some_minutes_under_the_same_conditions_only() {
        let folder = tempfile::tempdir().unwrap();
        let (at, ceilings) = (folder.path().join("new"), samples::report().ceilings.unwrap());
        let same = conditions(None, ProtocolPreset::Full);
        assert_eq!(read(&at, &same, 1_000), None);
        write(&at, &same, &ceilings, 1_000);
        let kept = read(&at, &same, 1_240).unwrap();
        assert_eq!(kept, Ceilings { age_s: Some(240.0), ..ceilings.clone() });
        assert_eq!(read(&at, &same, 1_000 + MAX_AGE_S + 1), None, "too old");
        assert_eq!(read(&at, &same, 900), None, "the clock ran backwards");
        for other in [conditions(Some(1), ProtocolPreset::Full), conditions(None, ProtocolPreset::Quick)] {
            assert_eq!(read(&at, &other, 1_100), None, "{other:?}");
        }
        let mut rebuilt = samples::report().environment;
        rebuilt.build.git_revision = Some("another".into());
        assert_eq!(read(&at, &Conditions::of(&rebuilt, vec![0, 1], None, ProtocolPreset::Full), 1_100), None);
    }

    #[test]
    fn ceilings_of_another_machine_of_the_same_kind_are_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let here = conditions(None, ProtocolPreset::Full);
        write(folder.path(), &here, &samples::report().ceilings.unwrap(), 1_000);
        let mut there = samples::report().environment;
        there.hostname = Some("another".into());
        let neighbour = Conditions::of(&there, vec![0, 1], None, ProtocolPreset::Full);
        let another = || Some("another".to_owned());
        // A container may have the hostname of one on another machine.
        for other in [
            neighbour,
            Conditions { boot: another(), ..here.clone() },
            Conditions { memory: Some(1), ..here },
        ] {
            assert_eq!(read(folder.path(), &other, 1_000), None, "{other:?}");
        }
    }

    #[test]
    fn ceilings_of_other_kernels_threads_or_memory_nodes_are_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let under = |given: &'static str| {
            let variable = |name: &str| (name == given).then(|| "portable".to_owned());
            let environment = samples::report().environment;
            Conditions::with(&variable, &environment, vec![0, 1], None, ProtocolPreset::Full)
        };
        let usual = under("");
        write(folder.path(), &usual, &samples::report().ceilings.unwrap(), 1_000);
        assert!(read(folder.path(), &usual, 1_000).is_some());
        let bound = || Some("bind:8".to_owned());
        for other in [
            under("HBMARK_CPU_KERNELS"),
            under("RAYON_NUM_THREADS"),
            Conditions { memory_policy: bound(), ..usual.clone() },
            Conditions { memory_nodes: bound(), ..usual },
        ] {
            assert_eq!(read(folder.path(), &other, 1_000), None, "{other:?}");
        }
    }

    #[test]
    fn disturbed_ceilings_are_neither_kept_nor_used() {
        let folder = tempfile::tempdir().unwrap();
        let same = conditions(None, ProtocolPreset::Full);
        let calm = samples::report().ceilings.unwrap();
        let disturbed = Ceilings { disturbed: vec![Cause::ForeignLoad { cores: 1.2 }], ..calm.clone() };
        write(folder.path(), &same, &disturbed, 1_000);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        write(folder.path(), &same, &calm, 1_000);
        let file = file(folder.path(), &same).unwrap();
        let text = std::fs::read_to_string(&file).unwrap();
        for broken in [
            text.replace("\"disturbed\":[]", "\"disturbed\":[{\"code\":\"power_capped\"}]"),
            text[..40].to_owned(),
        ] {
            assert_ne!(broken, text);
            std::fs::write(&file, broken).unwrap();
            assert_eq!(read(folder.path(), &same, 1_000), None);
        }
    }
}
