//! Fleets made up from seeds: what the verdict finds, what it names falsely, and what reading many results costs.
//!
//! ```text
//! cargo run -p hbmark-fleet --example simulate -- table 200
//! cargo run -p hbmark-fleet --example simulate -- write FOLDER 10000
//! cargo run -p hbmark-fleet --example simulate -- read FOLDER
//! ```
//!
//! The first prints a table of faults and fleet sizes in Markdown; the others write so many result files and read them back, with the time
//! and the largest resident set.

use std::io::{Error, Result, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use hbmark_fleet::confirm::confirming;
use hbmark_fleet::folder::{self, Reading};
use hbmark_fleet::nodes::Node;
use hbmark_fleet::plan::{Manifest, Plan};
use hbmark_fleet::result::{Finding, FindingKind, FleetReport, Settings, State};
use hbmark_fleet::simulation::{Fault, GPUS_PER_NODE, Simulated, Tails, gpu_name, node_name, rack_name};
use hbmark_fleet::verdict::verdict;
use hbmark_report::output::{Format, render};

const SIZES: [usize; 4] = [64, 512, 4_096, 10_000];

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        ["table", seeds] => table(seeds.parse().map_err(Error::other)?),
        ["write", folder, files] => write(Path::new(folder), files.parse().map_err(Error::other)?),
        ["read", folder] => read(Path::new(folder)),
        _ => Err(Error::other("wanted `table SEEDS`, `write FOLDER FILES` or `read FOLDER`")),
    }
}

fn say(line: &str) -> Result<()> {
    writeln!(std::io::stdout(), "{line}")
}

/// What is planted, and how it is called.
fn faults() -> Vec<(&'static str, Option<Fault>, Tails)> {
    vec![
        ("none", None, Tails::Normal),
        ("none, GPUs with heavy tails (t, 4 degrees)", None, Tails::Heavy),
        ("none, processes with heavy tails (t, 4 degrees)", None, Tails::HeavyProcesses),
        ("one GPU 3 % slower", Some(Fault::SlowGpu(0.03)), Tails::Normal),
        ("one GPU 5 % slower", Some(Fault::SlowGpu(0.05)), Tails::Normal),
        ("one GPU 10 % slower", Some(Fault::SlowGpu(0.10)), Tails::Normal),
        ("one GPU throttled in 70 % of its processes", Some(Fault::Throttling), Tails::Normal),
        ("one GPU dead", Some(Fault::Dead), Tails::Normal),
        ("one node 3 % slower", Some(Fault::SlowNode(0.03)), Tails::Normal),
        ("one rack 3 % slower", Some(Fault::SlowRack(0.03)), Tails::Normal),
    ]
}

fn table(seeds: u64) -> Result<()> {
    say(
        "| planted | GPUs | fleets | found | of these confirmed | false names a fleet | false names confirmed | promised |",
    )?;
    say("|---|---|---|---|---|---|---|---|")?;
    for (name, fault, tails) in faults() {
        for gpus in SIZES {
            // Large fleets take longer, and each holds more tests.
            let fleets = if gpus > 1000 { seeds.div_ceil(5) } else { seeds };
            let mut seen = Seen::default();
            for seed in 0..fleets {
                seen.add(&Simulated { tails, ..Simulated::new(gpus, seed * 7919 + gpus as u64, fault) });
            }
            let share = |count: u64, of: u64| {
                if of == 0 { "-".to_owned() } else { format!("{:.0} %", 100.0 * count as f64 / of as f64) }
            };
            let found = if fault.is_some() { share(seen.found, fleets) } else { "-".into() };
            say(&format!(
                "| {name} | {gpus} | {fleets} | {found} | {} | {:.3} | {:.3} | ≤ {:.3} |",
                share(seen.confirmed, if fault == Some(Fault::Dead) { 0 } else { seen.found }),
                seen.false_names as f64 / fleets as f64,
                seen.false_confirmed as f64 / fleets as f64,
                seen.promised,
            ))?;
        }
    }
    Ok(())
}

#[derive(Default)]
struct Seen {
    found: u64,
    confirmed: u64,
    false_names: u64,
    false_confirmed: u64,
    promised: f64,
}

/// Findings that name somebody slow or unsteady, also as a note.
const NAMES: [FindingKind; 8] = [
    FindingKind::GpuSuspect,
    FindingKind::NodeSuspect,
    FindingKind::RackSuspect,
    FindingKind::GpuUnstable,
    FindingKind::UnstableOnce,
    FindingKind::GpuSlow,
    FindingKind::NodeSlow,
    FindingKind::RackSlow,
];
const CONFIRMED: [FindingKind; 4] =
    [FindingKind::GpuSlow, FindingKind::NodeSlow, FindingKind::RackSlow, FindingKind::GpuUnstable];

impl Seen {
    fn add(&mut self, simulated: &Simulated) {
        let plan = Plan::open("quick-ceiling").expect("a plan of this program");
        let nodes = |n: usize| Node { name: node_name(n), rack: Some(rack_name(n)) };
        let manifest =
            Manifest::new(plan.clone(), (0..simulated.gpus.div_ceil(GPUS_PER_NODE)).map(nodes).collect());
        let mut runs = simulated.runs();
        for run in &mut runs {
            run.plan = Some(manifest.digest.clone());
        }
        let settings = Settings::default();
        let manifests = vec![(PathBuf::from("fleet.json"), manifest)];
        let reading = Reading { manifests, runs, ..Reading::default() };
        let first = verdict(reading.clone(), &settings, &[]);
        self.promised = first.expected_false_names;
        let is_victim = |finding: &Finding| is_victim(simulated, finding);
        // A GPU of a slow node is slow, whether it is named alone or with its node.
        let is_part = |finding: &Finding| is_part(simulated, finding);
        self.false_names += first.findings_of(&NAMES).filter(|f| !is_part(f)).count() as u64;
        if simulated.fault == Some(Fault::Dead) {
            // The last node may have fewer GPUs than the manifest expects.
            let surplus = simulated.gpus.div_ceil(GPUS_PER_NODE) * GPUS_PER_NODE - simulated.gpus;
            self.found += u64::from(first.count(State::Missing) == 1 + surplus);
        }
        self.found += u64::from(first.findings_of(&NAMES).any(is_victim));
        let second = again(simulated, reading, &first, plan, &settings);
        self.confirmed +=
            u64::from(second.as_ref().is_some_and(|s| s.findings_of(&CONFIRMED).any(is_victim)));
        self.false_confirmed +=
            second.map_or(0, |second| second.findings_of(&CONFIRMED).filter(|f| !is_part(f)).count() as u64);
    }
}

/// Whether a finding names what was planted.
fn is_victim(simulated: &Simulated, finding: &Finding) -> bool {
    let victim = simulated.victim();
    let node = victim / GPUS_PER_NODE;
    match simulated.fault {
        None | Some(Fault::Dead) => false,
        Some(Fault::SlowGpu(_) | Fault::Throttling) => finding.gpu == Some(gpu_name(victim)),
        Some(Fault::SlowNode(_)) => finding.gpu.is_none() && finding.node == Some(node_name(node)),
        Some(Fault::SlowRack(_)) => {
            finding.gpu.is_none() && finding.node.is_none() && finding.rack == Some(rack_name(node))
        }
    }
}

/// Whether a finding names something that is slow by what was planted.
fn is_part(simulated: &Simulated, finding: &Finding) -> bool {
    let node = simulated.victim() / GPUS_PER_NODE;
    let within = match simulated.fault {
        Some(Fault::SlowNode(_)) => finding.node == Some(node_name(node)),
        Some(Fault::SlowRack(_)) => finding.rack == Some(rack_name(node)),
        _ => false,
    };
    within || is_victim(simulated, finding)
}

/// The report with the suspects' confirming run; `None` without a suspect.
fn again(
    simulated: &Simulated,
    mut reading: Reading,
    first: &FleetReport,
    plan: Plan,
    settings: &Settings,
) -> Option<FleetReport> {
    let (plan, nodes) = confirming(first, plan)?;
    let manifest = Manifest::new(plan, nodes);
    let names: std::collections::HashSet<&str> =
        manifest.nodes.iter().map(|expected| expected.node.name.as_str()).collect();
    for mut run in (Simulated { again: true, ..*simulated }).runs() {
        if names.contains(run.node.as_str()) {
            run.plan = Some(manifest.digest.clone());
            reading.runs.push(run);
        }
    }
    reading.manifests.push((PathBuf::from("again/fleet.json"), manifest));
    Some(verdict(reading, settings, &[]))
}

/// Writes results as `hbmark fleet node` leaves them: three processes a GPU, with a cell of real size.
fn write(folder: &Path, files: usize) -> Result<()> {
    let simulated = Simulated::new(files.div_ceil(3), 1, Some(Fault::SlowGpu(0.08)));
    let plan = Plan::open("quick-ceiling").expect("a plan of this program");
    let list = (0..simulated.gpus.div_ceil(GPUS_PER_NODE))
        .map(|n| Node { name: node_name(n), rack: Some(rack_name(n)) });
    let manifest = Manifest::new(plan, list.collect());
    std::fs::create_dir_all(folder)?;
    std::fs::write(folder.join("fleet.json"), serde_json::to_string(&manifest)?)?;
    let bytes = simulated.write(folder, files, &manifest.digest)?;
    say(&format!("{files} files, {:.1} KB each", bytes as f64 / files as f64 / 1e3))
}

/// Reads them and makes every format.
fn read(folder: &Path) -> Result<()> {
    let begin = Instant::now();
    let reading = folder::read(&[folder.to_owned()]).map_err(Error::other)?;
    let (files, read) = (reading.files, begin.elapsed());
    let report = verdict(reading, &Settings::default(), &[]);
    let judged = begin.elapsed();
    let mut sizes = Vec::new();
    for format in [Format::Table, Format::Json, Format::Html] {
        sizes.push(render(&report, format, false).map_err(Error::other)?.len());
    }
    let status = std::fs::read_to_string("/proc/self/status")?;
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap_or("unknown").trim();
    say(&hbmark_fleet::headline(&report))?;
    say(&format!(
        "{files} files read in {read:.1?}, judged in {:.1?}, printed in {:.1?}; page of {:.1} MB; peak resident set {peak}",
        judged.saturating_sub(read),
        begin.elapsed().saturating_sub(judged),
        sizes[2] as f64 / 1e6
    ))
}
