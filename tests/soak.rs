//! Runs and serves over and over, with settings drawn by lot and kills at random moments: nothing may be lost, left behind or grow.
//!
//! Two loops in one: *processes* that are killed and, where they can, go on; and the same work *in this process*, whose memory is weighed
//! after every turn. A few turns are a test; hours are `just soak SECONDS SEED`.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

#[path = "it/runs.rs"]
mod runs;

use std::path::Path;
use std::process::Command;
use std::rc::Rc;
use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use runs::{RESULTS, children, clean, names, program, report, runs as is_alive, start, stderr};

use hbmark::engine::{DeviceChoice, DeviceOptions};
use hbmark::measure::protocol::ProtocolPreset;
use hbmark::run::config::RunConfig;
use hbmark::run::{LocalDevice, benchmark};
use hbmark::serve::{LocalEngine, Mode, SchedulerOptions, ServeConfig};
use hbmark::weights::OpenModel;
use hbmark::worker::{InProcess, NoopObserver};
use hbmark_core::model::Dtype;
use hbmark_core::result::serving::{Arrivals, Offered, Policy, Slo};
use hbmark_core::result::{KvFill, Phase};
use hbmark_core::stats;
use hbmark_traffic::point::TrafficSource;
use hbmark_traffic::sampler::Sampling;
use hbmark_traffic::workload::Workload;

/// By which processes of a turn are known, wherever they went.
const MARK: &str = "SOAK_TURN";

/// What was done, for the notes.
#[derive(Debug, Default)]
struct Counts {
    runs: usize,
    serves: usize,
    cells: usize,
    /// Signals that reached a process before it had ended.
    killed: usize,
    killed_workers: usize,
    interrupted: usize,
    resumed: usize,
    /// Cells that a run gave up because its worker was killed in them, each with its reason.
    given_up: usize,
}

struct Soak {
    lot: SmallRng,
    turn: usize,
    counts: Counts,
    model: String,
}

/// What hits a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Blow {
    Nothing,
    Kill,
    KillWorker,
    Interrupt,
}

impl Soak {
    fn new(seed: u64) -> Self {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models/qwen3");
        let model = model.to_str().unwrap().to_owned();
        Self { lot: SmallRng::seed_from_u64(seed), turn: 0, counts: Counts::default(), model }
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        *of.choose(&mut self.lot).unwrap()
    }

    /// The program in a world of its own: marked, with a temporary folder that only it writes to.
    fn program(&self, arguments: &[String], temporary: &Path) -> Command {
        let mut command = clean(program());
        command.args(arguments).env(MARK, self.mark()).env("TMPDIR", temporary);
        command
    }

    fn mark(&self) -> String {
        format!("{}-{}", std::process::id(), self.turn)
    }

    /// Lets a command run, hits it at a random moment, and waits for its end.
    fn strike(&mut self, command: &mut Command, blow: Blow) -> std::process::Output {
        let delay = Duration::from_millis(self.lot.random_range(0..400));
        let child = start(command);
        if blow != Blow::Nothing {
            let hit = Instant::now() + delay;
            let pid = child.id();
            while Instant::now() < hit && is_alive(pid) {
                std::thread::sleep(Duration::from_millis(5));
            }
            let target = if blow == Blow::KillWorker { children(pid).first().copied() } else { Some(pid) };
            // Nobody has waited for it yet: its number is still its own.
            if let Some(target) = target.filter(|_| is_alive(pid)) {
                match blow {
                    Blow::Kill => self.counts.killed += 1,
                    Blow::KillWorker => self.counts.killed_workers += 1,
                    Blow::Interrupt => self.counts.interrupted += 1,
                    Blow::Nothing => {}
                }
                // The worker may be gone by now.
                let name = if blow == Blow::Interrupt { "INT" } else { "KILL" };
                let _ = Command::new("kill").args([format!("-{name}"), target.to_string()]).output();
            }
        }
        child.wait_with_output().unwrap()
    }

    /// No process of this turn is left, and nothing lies in its temporary folder.
    fn nothing_stays(&self, temporary: &Path) {
        let mark = format!("{MARK}={}", self.mark());
        let left = || {
            let processes = std::fs::read_dir("/proc").unwrap().filter_map(|entry| {
                let path = entry.ok()?.path();
                let pid: u32 = path.file_name()?.to_str()?.parse().ok()?;
                let environment = std::fs::read(path.join("environ")).ok()?;
                let marked = environment.split(|byte| *byte == 0).any(|entry| entry == mark.as_bytes());
                (marked && is_alive(pid)).then_some(pid)
            });
            processes.collect::<Vec<_>>()
        };
        // A worker whose supervisor was killed learns of it by a signal, and needs a moment.
        runs::until("no process of a turn is left", || left().is_empty().then_some(()));
        assert_eq!(names(temporary), [""; 0], "temporary files stay");
    }

    fn run(&mut self) {
        let (folder, temporary) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let batches = self.pick(&["1", "1,2", "1,3,2"]);
        let contexts = self.pick(&["4", "4,8", "3,9,16"]);
        let engine = self.pick(&["stock", "native", "stock,native"]);
        let dtype = self.pick(&["f32", "bf16"]);
        let phase = self.pick(&["decode", "prefill", "prefill,decode"]);
        let seed = self.lot.random_range(0..1000_u32).to_string();
        let out = folder.path().to_str().unwrap();
        let arguments: Vec<String> = [
            "run",
            "--smoke",
            "--device",
            "cpu",
            "--model",
            &self.model.clone(),
            "--engine",
            engine,
            "--dtype",
            dtype,
            "--phase",
            phase,
            "--batch",
            batches,
            "--context",
            contexts,
            "--seed",
            &seed,
            "--out",
            out,
            "--format",
            "json",
        ]
        .map(str::to_owned)
        .to_vec();
        let wanted: usize =
            [engine, phase, batches, contexts].iter().map(|list| list.split(',').count()).product();
        let output = self.drive_to_end(&arguments, folder.path(), temporary.path(), &RESULTS);
        let result = std::fs::read(folder.path().join("result.json")).unwrap();
        let result = report(&std::process::Output { stdout: result, ..output });
        let cells = result["cells"].as_array().unwrap();
        assert_eq!(cells.len(), wanted, "a cell is lost: {cells:?}");
        for cell in cells {
            let (status, reason) = (&cell["status"], &cell["reason"]);
            let measured = status == "ok" || status == "smoke";
            let named = match reason["code"].as_str() {
                Some("run_stopped" | "not_reached") => true,
                // No other signal was sent.
                Some("worker_lost") => reason["message"].as_str().unwrap().contains("killed by signal 9"),
                _ => false,
            };
            assert!(measured || named, "{}: {status}: {reason}", cell["id"]);
            self.counts.given_up += usize::from(!measured);
        }
        self.counts.cells += wanted;
        self.counts.runs += 1;
        self.nothing_stays(temporary.path());
    }

    fn serve(&mut self) {
        let (folder, temporary) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (load, points) =
            self.pick(&[(["--rate", "inf"], 1), (["--rate", "200"], 1), (["sweep", "rate=50,400"], 2)]);
        let engine = self.pick(&["stock", "native"]);
        let caching = self.pick(&["true", "false"]);
        let scheduling = self.pick(&["fcfs", "priority"]);
        let (input, output) = (self.pick(&["1", "17", "40"]), self.pick(&["1", "8"]));
        let seed = self.lot.random_range(0..1000_u32).to_string();
        let arguments: Vec<String> = [
            "serve",
            load[0],
            load[1],
            "--model",
            &self.model.clone(),
            "--engine",
            engine,
            "--device",
            "cpu",
            "--dtype",
            "f32",
            "--requests",
            "40",
            "--input-len",
            input,
            "--output-len",
            output,
            "--enable-prefix-caching",
            caching,
            "--scheduling",
            scheduling,
            "--num-gpu-blocks-override",
            "64",
            "--no-predict",
            "--seed",
            &seed,
            "--out",
            folder.path().to_str().unwrap(),
            "--format",
            "json",
        ]
        .map(str::to_owned)
        .to_vec();
        // Under load the gates may find it invalid, and so end with 1; whole it is all the same.
        self.drive_to_end(
            &arguments,
            folder.path(),
            temporary.path(),
            &["report.html", "serve.csv", "serve.json", "serve.md"],
        );
        let result: serde_json::Value =
            serde_json::from_slice(&std::fs::read(folder.path().join("serve.json")).unwrap()).unwrap();
        let served: Vec<u64> = result["points"]
            .as_array()
            .unwrap()
            .iter()
            .map(|p| p["result"]["served"].as_u64().unwrap_or(0))
            .collect();
        assert_eq!(served, vec![40; points], "a point or a request is lost: {}", result["warnings"]);
        self.counts.serves += 1;
        self.nothing_stays(temporary.path());
    }

    /// Starts a benchmark, hits it, and lets it go on (or start again) until its results are all there is.
    fn drive_to_end(
        &mut self,
        arguments: &[String],
        folder: &Path,
        temporary: &Path,
        results: &[&str],
    ) -> std::process::Output {
        let mut blow = self.pick(&[Blow::Nothing, Blow::Kill, Blow::KillWorker, Blow::Interrupt]);
        let mut command = self.program(arguments, temporary);
        let mut output = self.strike(&mut command, blow);
        for _ in 0..50 {
            if names(folder) == results {
                break;
            }
            let there = names(folder);
            assert_ne!(blow, Blow::Nothing, "nobody hit it, and there is {there:?}: {}", stderr(&output));
            // Killed before its first line was whole, it begins anew; else it goes on.
            let written = std::fs::read(folder.join("journal.jsonl")).unwrap_or_default();
            let journal = written.contains(&b'\n');
            self.counts.resumed += usize::from(journal);
            let out = folder.to_str().unwrap();
            let resume = [&arguments[0], "--resume", out, "--format", "json"].map(str::to_owned);
            let mut command = self.program(if journal { &resume } else { arguments }, temporary);
            blow = self.pick(&[Blow::Nothing, Blow::Nothing, Blow::Kill, Blow::KillWorker, Blow::Interrupt]);
            output = self.strike(&mut command, blow);
        }
        assert_eq!(names(folder), results, "{}", stderr(&output));
        output
    }

    fn inside(&self, model: &Rc<OpenModel>) {
        let config = RunConfig {
            model: self.model.clone(),
            revision: None,
            engines: vec!["stock".into(), "native".into()],
            device: DeviceChoice::Cpu,
            dtypes: vec![Dtype::F32],
            phases: vec![Phase::Prefill, Phase::Decode],
            batches: vec![1, 2],
            contexts: vec![8],
            prompts: None,
            seed: 1,
            threads: Some(2),
            preset: ProtocolPreset::Smoke,
            stopping: hbmark::measure::protocol::Stopping::default(),
            fresh_ceilings: true,
            device_options: DeviceOptions::default(),
            kv: KvFill::Prefill,
            show_ops: false,
            note: None,
            hypothesis: None,
            out: None,
        };
        let mut worker = InProcess::new(LocalDevice::new(&config, Rc::clone(model)));
        let finished = benchmark(&mut worker, &config, model, "soak", &mut NoopObserver).unwrap();
        assert_eq!(finished.report.cells.len(), 8);
        let config = ServeConfig {
            engine: "native".into(),
            device: DeviceChoice::Cpu,
            dtype: Some(Dtype::F32),
            kv_dtype: None,
            threads: Some(2),
            server: None,
            virtual_source: None,
            source: TrafficSource::Workload(Workload::fixed(17, 4).unwrap()),
            offered: Offered::AtOnce,
            arrivals: Arrivals::Poisson,
            burst: None,
            requests: 30,
            duration: None,
            max_requests: 0,
            warmup: None,
            cold_baseline: false,
            scheduler: SchedulerOptions {
                num_gpu_blocks_override: Some(64),
                scheduling: Policy::Fcfs,
                ..SchedulerOptions::default()
            },
            sampling: Sampling::GREEDY,
            stop_at_eos: false,
            slo: Slo::default(),
            time_limit_s: None,
            mode: Mode::Single,
            predict: false,
            tokenizer: None,
            lora: None,
            structured: None,
            seed: 1,
            note: None,
            hypothesis: None,
            out: None,
        };
        let mut worker = InProcess::new(LocalEngine::new(&config, Some(Rc::clone(model))));
        let report = hbmark::serve::benchmark(&mut worker, &config, Some(model), "soak", &mut NoopObserver)
            .unwrap()
            .report;
        assert_eq!(report.points[0].result.as_ref().unwrap().served, 30);
    }
}

/// Resident memory of this process.
fn resident() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<f64>().unwrap() * 1024.0
}

/// Means of so many equal stretches: neighbours resemble each other, and an interval over single values would be too narrow.
const STRETCHES: usize = 20;

/// Relative growth of memory over the turns after the first quarter, in which pools fill, and whether its 95 % interval leaves out zero.
fn growth(weights: &[f64]) -> Option<stats::Trend> {
    let settled = &weights[weights.len() / 4..];
    let length = settled.len() / STRETCHES;
    let means: Vec<f64> = settled.chunks_exact(length.max(1)).take(STRETCHES).map(stats::mean).collect();
    (means.len() == STRETCHES).then(|| stats::trend(&means)).flatten()
}

fn soak(seed: u64, mut more: impl FnMut(usize, &Counts) -> bool) -> (Counts, Vec<f64>) {
    let mut soak = Soak::new(seed);
    let model = Rc::new(hbmark::weights::open(&soak.model, None, 1).unwrap());
    let mut weights = Vec::new();
    while more(soak.turn, &soak.counts) {
        soak.turn += 1;
        if soak.turn.is_multiple_of(3) {
            soak.serve();
        } else {
            soak.run();
        }
        soak.inside(&model);
        weights.push(resident());
    }
    (soak.counts, weights)
}

#[test]
fn a_few_turns_lose_nothing_and_leave_nothing() {
    let (counts, weights) = soak(3, |turn, _| turn < 6);
    assert_eq!((counts.runs, counts.serves, weights.len()), (4, 2, 6));
}

#[test]
fn memory_that_grows_is_seen_and_memory_that_wavers_is_not() {
    let waver = |turn: u32| f64::from(turn * 7919 % 101) * 1e4;
    let flat: Vec<f64> = (0..400).map(|turn| 1e8 + waver(turn)).collect();
    let leaking: Vec<f64> = (0..400).map(|turn| 1e8 + waver(turn) + f64::from(turn) * 4096.0).collect();
    assert!(!growth(&flat).unwrap().significant);
    assert!(growth(&leaking).unwrap().significant);
    assert_eq!(growth(&flat[..10]).map(|trend| trend.significant), None);
}

/// `SOAK_SECONDS` and `SOAK_SEED`; prints its figures.
#[test]
#[ignore = "hours: just soak"]
fn hours_lose_nothing_leave_nothing_and_do_not_grow() {
    let number = |name: &str, default: u64| std::env::var(name).map_or(default, |text| text.parse().unwrap());
    let (seconds, seed) = (number("SOAK_SECONDS", 7200), number("SOAK_SEED", 1));
    let (begin, mut said) = (Instant::now(), Instant::now());
    let (counts, weights) = soak(seed, |turn, counts| {
        if said.elapsed() > Duration::from_mins(5) {
            said = Instant::now();
            println!("{} s, {turn} turns, {:.1} MB: {counts:?}", begin.elapsed().as_secs(), resident() / 1e6);
        }
        begin.elapsed() < Duration::from_secs(seconds)
    });
    println!("seed {seed}, {} s, {} turns: {counts:?}", begin.elapsed().as_secs(), weights.len());
    let trend = growth(&weights);
    let [quarter, last] = [weights.len() / 4, weights.len() - 1].map(|turn| weights[turn] / 1e6);
    println!("memory {quarter:.2} MB after a quarter, {last:.2} MB at the end: {trend:?}");
    // Flat memory that moved once by a page has a trend, too.
    let grows = trend.is_some_and(|trend| trend.significant && trend.relative_change > 0.01);
    assert!(!grows, "memory grows");
}
