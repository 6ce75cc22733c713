//! What on this machine disturbs a measurement.
//!
//! Enters: an [`Environment`] and a few [`Probes`]. Leaves: findings with their severity and advice, as data, as lines,
//! as JSON. [`examine`] is pure, so every finding is tested by planting its cause. It repairs nothing.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::thread;

use owo_colors::OwoColorize;
use serde::{Deserialize, Serialize};

use super::nvml::{self, Throttle};
use super::system_files::Root;
use super::telemetry::{HostTelemetry, LOAD_WINDOW, Telemetry};
use hbmark_core::input::plain;
use hbmark_core::result::{CpuEnvironment, Environment, GpuEnvironment, GpuMatch, Limits, Severity};
use hbmark_core::units::{Bytes, counted};

/// One thing found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    pub severity: Severity,
    /// `governor`, `gpu throttle`...: stable.
    pub what: String,
    pub detail: String,
    pub advice: Option<String>,
}

/// What the doctor reads beside the environment.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Probes {
    /// GPUs that NVML counts; `None` when NVML cannot be opened.
    pub nvml_gpus: Option<u32>,
    /// The driver's device node exists, so a kernel driver is loaded.
    pub nvidia_device_node: bool,
    /// Cores busy with other processes just now.
    pub foreign_cores: Option<f64>,
    /// Cores stolen by the hypervisor just now.
    pub steal_cores: Option<f64>,
    /// Where downloaded models are kept.
    pub hub_cache: Option<PathBuf>,
    pub hub_cache_exists: bool,
    /// HF_HUB_OFFLINE forbids downloads.
    pub hub_offline: bool,
}

impl Probes {
    /// Looks at this machine; takes a little over [`LOAD_WINDOW`].
    pub fn collect() -> Self {
        let mut host = HostTelemetry::new();
        host.before_block();
        thread::sleep(LOAD_WINDOW + LOAD_WINDOW / 4);
        host.after_block();
        let load = host.load(true).unwrap_or_default();
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let hub_cache = hub_cache(variable("HF_HOME"), variable("HOME"));
        Self {
            nvml_gpus: nvml::gpu_count(),
            nvidia_device_node: Root::system().exists("dev/nvidiactl"),
            foreign_cores: load.foreign_cores,
            steal_cores: load.steal_cores,
            hub_cache_exists: hub_cache.as_ref().is_some_and(|path| path.is_dir()),
            hub_cache,
            hub_offline: variable("HF_HUB_OFFLINE").is_some_and(|value| is_true(&value)),
        }
    }
}

/// The hub's cache folder, by its documented rule: `$HF_HOME/hub`, else `~/.cache/huggingface/hub`.
fn hub_cache(hf_home: Option<String>, home: Option<String>) -> Option<PathBuf> {
    hf_home
        .map(PathBuf::from)
        .or_else(|| Some(PathBuf::from(home?).join(".cache/huggingface")))
        .map(|folder| folder.join("hub"))
}

/// Truth as the hub's own client reads it from the environment.
fn is_true(value: &str) -> bool {
    matches!(value.to_ascii_lowercase().as_str(), "1" | "true" | "yes" | "on")
}

/// All findings about a machine, in a fixed order.
pub fn examine(environment: &Environment, probes: &Probes) -> Vec<Finding> {
    let mut findings = Findings::default();
    findings.build(environment);
    findings.processor(&environment.cpu);
    findings.neighbours(environment, probes);
    findings.host_memory(&environment.cpu);
    findings.driver(environment, probes);
    if let Some(gpu) = &environment.gpu {
        findings.gpu_identity(gpu, environment.build.cuda);
        findings.gpu_clocks(gpu);
        findings.gpu_sharing(gpu);
    }
    findings.hub(probes);
    findings.0
}

/// What would distort a measurement on this machine, as sentences for a report: the findings about processor, neighbours and GPU
/// that are at least a warning.
pub fn distortions(environment: &Environment) -> Vec<String> {
    let mut findings = Findings::default();
    findings.processor(&environment.cpu);
    findings.neighbours(environment, &Probes::collect());
    if let Some(gpu) = &environment.gpu {
        findings.gpu_identity(gpu, environment.build.cuda);
        findings.gpu_clocks(gpu);
        findings.gpu_sharing(gpu);
    }
    let serious = findings.0.into_iter().filter(|f| f.severity >= Severity::Warn);
    serious.map(|f| format!("{}: {}", f.what, f.detail)).collect()
}

#[derive(Debug, Default)]
struct Findings(Vec<Finding>);

impl Findings {
    fn ok(&mut self, what: &str, detail: impl Into<String>) {
        self.push(Severity::Ok, what, detail, None);
    }

    fn note(&mut self, what: &str, detail: impl Into<String>, advice: &str) {
        self.push(Severity::Note, what, detail, Some(advice));
    }

    fn warn(&mut self, what: &str, detail: impl Into<String>, advice: &str) {
        self.push(Severity::Warn, what, detail, Some(advice));
    }

    fn problem(&mut self, what: &str, detail: impl Into<String>, advice: &str) {
        self.push(Severity::Problem, what, detail, Some(advice));
    }

    fn push(&mut self, severity: Severity, what: &str, detail: impl Into<String>, advice: Option<&str>) {
        self.0.push(Finding {
            severity,
            what: what.to_owned(),
            detail: detail.into(),
            advice: advice.map(str::to_owned),
        });
    }

    fn build(&mut self, environment: &Environment) {
        let build = &environment.build;
        if build.profile == "debug" {
            let advice = "build with `cargo build --release` before trusting any time";
            self.warn("build", format!("hbmark {} is a debug build", build.version), advice);
        } else {
            let cuda = if build.cuda { "with CUDA" } else { "without CUDA" };
            self.ok("build", format!("hbmark {}, {} build {cuda}", build.version, build.profile));
        }
    }

    fn processor(&mut self, cpu: &CpuEnvironment) {
        let model = cpu.model.as_deref().unwrap_or("unknown model");
        let cores = format!("{model}, {} of {} usable", cpu.usable_cores, counted(cpu.logical_cores, "core"));
        if cpu.usable_cores <= 2 {
            let advice =
                "keep everything else off this machine: any background task lands on a measured core";
            self.note("cores", cores, advice);
        } else {
            self.ok("cores", cores);
        }

        if cpu.features.iter().any(|feature| feature == "avx2" || feature == "neon") {
            self.ok("simd", cpu.features.join(" "));
        } else {
            let advice = "CPU times will be bound by arithmetic, not by memory; use another machine";
            self.warn("simd", "neither avx2 nor neon was found", advice);
        }

        match cpu.governor.as_deref() {
            Some("performance") => self.ok("governor", "performance"),
            Some(governor) => {
                let advice = "`cpupower frequency-set -g performance`, as root on the host";
                self.warn("governor", format!("{governor}: the clock follows the load"), advice);
            }
            None => {
                let advice =
                    "inside a guest the host decides; ask its owner, and compare only runs of one machine";
                self.note("governor", "not visible here", advice);
            }
        }

        if let Some(quota) = cpu.quota_cores.filter(|quota| *quota < cpu.logical_cores as f64) {
            let detail =
                format!("the control group allows {quota:.1} of {}", counted(cpu.logical_cores, "core"));
            let advice =
                "use no more threads than that, or steps stall until the next period; better, lift the quota";
            self.warn("cpu quota", detail, advice);
        }
        if let Some(nodes) = cpu.numa_nodes.filter(|nodes| *nodes > 1) {
            let advice = "`numactl --cpunodebind=0 --membind=0` holds threads and weights on one node";
            self.note("numa", format!("{nodes} memory nodes"), advice);
        }
    }

    fn neighbours(&mut self, environment: &Environment, probes: &Probes) {
        let limits = Limits::of(environment);
        // The load average covers a minute; the probe shows what is running now.
        match (probes.foreign_cores, environment.cpu.load_1m) {
            (Some(cores), _) if cores > limits.foreign_cores => {
                let detail = format!("{cores:.1} cores busy with other processes");
                self.warn("other load", detail, "stop them: blocks measured beside them are rejected");
            }
            (_, Some(load)) if load > limits.foreign_cores.max(0.3) => {
                let detail = format!("load average {load:.2} over the last minute");
                self.warn("other load", detail, "wait for it to fall, or find what runs");
            }
            (None, None) => {
                self.note("other load", "cannot be read", "make sure that nothing else runs");
            }
            _ => self.ok("other load", "nothing else is busy"),
        }

        let stolen = probes.steal_cores.filter(|cores| *cores > limits.steal_cores);
        match (&environment.cpu.hypervisor, stolen) {
            (_, Some(cores)) => {
                let advice = "other guests take this host's time; use a dedicated host";
                self.warn("steal", format!("the hypervisor took {cores:.1} cores"), advice);
            }
            (Some(name), None) => {
                let advice =
                    "neighbours can share caches and memory bandwidth unseen; repeat at another hour";
                self.note("hypervisor", format!("guest of a hypervisor ({name})"), advice);
            }
            (None, None) => self.ok("hypervisor", "none seen"),
        }
        if let Some(container) = &environment.container {
            let advice = "processes outside of the container are not listed, but disturb all the same";
            self.note("container", container.clone(), advice);
        }
    }

    fn host_memory(&mut self, cpu: &CpuEnvironment) {
        let size =
            |bytes: Option<Bytes>| bytes.map_or_else(|| "unknown".to_owned(), |bytes| bytes.to_string());
        let detail = format!("{} available of {}", size(cpu.memory_available_bytes), size(cpu.memory_bytes));
        self.ok("memory", detail);
        if let Some(limit) =
            cpu.memory_limit_bytes.filter(|limit| cpu.memory_bytes.is_none_or(|all| *limit < all))
        {
            let advice = "a cell beyond it is killed by the kernel, so such cells are skipped";
            self.note("memory limit", format!("the control group allows {limit}"), advice);
        }
        if cpu.transparent_huge_pages.as_deref() == Some("never") {
            let advice = "`echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`, as root";
            let detail = "never: small pages cost bandwidth on large weights";
            self.note("huge pages", detail, advice);
        }
    }

    fn driver(&mut self, environment: &Environment, probes: &Probes) {
        let built = environment.build.cuda;
        match (probes.nvml_gpus, probes.nvidia_device_node) {
            (None, true) => {
                let detail = "the NVIDIA driver is loaded, but NVML cannot be opened";
                let advice = "install the libnvidia-ml that matches the driver; in a container ask for the `utility` \
                              capability (NVIDIA_DRIVER_CAPABILITIES)";
                self.problem("nvml", detail, advice);
            }
            (None | Some(0), _) if built => {
                let advice = "load the NVIDIA driver (`nvidia-smi` must list a GPU) or use `--device cpu`";
                self.problem("gpu", "built with CUDA, but no NVIDIA GPU was found", advice);
            }
            (None | Some(0), _) => self.ok("gpu", "none; this build measures the CPU"),
            (Some(gpus), _) if !built => {
                let advice = "rebuild with `--features cuda` to measure it";
                self.warn("gpu", format!("{gpus} found, but this build has no CUDA"), advice);
            }
            (Some(gpus), _) => self.chosen_gpu(environment.gpu.as_ref(), gpus),
        }
    }

    fn chosen_gpu(&mut self, gpu: Option<&GpuEnvironment>, gpus: u32) {
        if let Some(gpu) = gpu {
            let name = gpu.name.as_deref().unwrap_or("unnamed GPU");
            let driver = gpu.driver.as_deref().unwrap_or("unknown");
            self.ok("gpu", format!("{name}, index {} of {gpus}, driver {driver}", gpu.index));
        } else {
            let advice = "look at CUDA_VISIBLE_DEVICES and at the number in `--device cuda:N`";
            let detail = format!("NVML counts {gpus}, but not the one asked for");
            self.problem("gpu", detail, advice);
        }
    }

    /// A build without CUDA measures no GPU, so there is nothing to confuse.
    fn gpu_identity(&mut self, gpu: &GpuEnvironment, built_for_cuda: bool) {
        if built_for_cuda && gpu.matched_by == Some(GpuMatch::Number) {
            let detail =
                "CUDA and NVML were matched by number alone: name, memory and clocks may be another GPU's";
            let advice = "set CUDA_DEVICE_ORDER=PCI_BUS_ID, which makes both number alike";
            self.warn("gpu identity", detail, advice);
        }
    }

    fn gpu_clocks(&mut self, gpu: &GpuEnvironment) {
        let mut held = false;
        for name in &gpu.throttle_reasons {
            let (severity, advice) = match Throttle::parse(name) {
                // Nothing runs yet, so idle is as it should be.
                Some(Throttle::GpuIdle) => continue,
                Some(
                    Throttle::HwSlowdown
                    | Throttle::HwThermal
                    | Throttle::SwThermal
                    | Throttle::ThermalViolation,
                ) => {
                    (Severity::Problem, "let it cool and check the airflow; blocks measured now are rejected")
                }
                Some(Throttle::HwPowerBrake) => (Severity::Problem, "check the power supply of the machine"),
                Some(Throttle::ApplicationClocks) => {
                    (Severity::Note, "pinned clocks repeat well; compare only with runs at the same clocks")
                }
                Some(Throttle::SwPowerCap) => {
                    (Severity::Note, "the power limit decides the clocks; it is reported")
                }
                _ => (Severity::Note, "compare only with runs under the same condition"),
            };
            held = true;
            self.push(severity, "gpu throttle", name.clone(), Some(advice));
        }
        if !held {
            self.ok("gpu throttle", "nothing holds the clocks down");
        }
        // Data-center parts slow down from about 85 °C; at 80 before the first step there is no room left.
        if let Some(degrees) = gpu.temperature_celsius.filter(|degrees| *degrees >= 80.0) {
            let advice = "let it cool before measuring";
            self.warn("gpu temperature", format!("{degrees:.0} °C before any work"), advice);
        }
    }

    fn gpu_sharing(&mut self, gpu: &GpuEnvironment) {
        match gpu.ecc {
            Some(true) => self.ok("gpu ecc", "on"),
            Some(false) => {
                let advice =
                    "bandwidth is a little higher without; compare only with runs that have it off too";
                self.note("gpu ecc", "off", advice);
            }
            None => {}
        }
        if gpu.mig == Some(true) {
            let advice = "a slice has a part of the bandwidth; data-sheet numbers are those of the whole GPU";
            self.warn("gpu mig", "on", advice);
        }
        if gpu.mps == Some(true) {
            let advice = "stop the MPS clients, or measure elsewhere";
            self.warn("gpu mps", "other clients share the GPU through MPS", advice);
        }
        if gpu.persistence == Some(false) {
            let advice =
                "`nvidia-smi -pm 1`, as root: otherwise the driver unloads between runs and cold rows suffer";
            self.note("gpu persistence", "off", advice);
        }
        if let Some(others) = gpu.other_processes.filter(|others| *others > 0) {
            let advice = "stop them; `nvidia-smi` lists them";
            self.warn("gpu processes", format!("{others} with a context on this GPU"), advice);
        }
        // An idle driver keeps up to about 1 GB for itself on large parts.
        if let Some(used) = gpu.memory_used_bytes.filter(|used| used.0 > 2_000_000_000) {
            let advice = "another process holds memory, perhaps outside this container";
            self.warn("gpu memory", format!("{used} in use before any work"), advice);
        }
    }

    fn hub(&mut self, probes: &Probes) {
        let Some(cache) = &probes.hub_cache else {
            let advice = "set HF_HOME to a folder with room for the weights";
            self.note("hub cache", "neither HF_HOME nor HOME is set", advice);
            return;
        };
        let place = cache.display();
        match (probes.hub_cache_exists, probes.hub_offline) {
            (true, true) => self.ok("hub cache", format!("{place}; offline, so only models already there")),
            (true, false) => self.ok("hub cache", place.to_string()),
            (false, false) => self.ok("hub cache", format!("{place}; made at the first download")),
            (false, true) => {
                let advice = "unset HF_HUB_OFFLINE, or name a local folder as the model";
                self.warn("hub cache", format!("{place} does not exist, and HF_HUB_OFFLINE is set"), advice);
            }
        }
    }
}

/// The findings as lines, with the advice below each.
pub fn render(findings: &[Finding], color: bool) -> String {
    let width = findings.iter().map(|finding| finding.what.chars().count()).max().unwrap_or(0);
    let mut text = String::new();
    for finding in findings {
        let label = format!("{:<7}", label(finding.severity));
        let label = match (color, finding.severity) {
            (false, _) => label,
            (true, Severity::Ok) => label.green().to_string(),
            (true, Severity::Note) => label.cyan().to_string(),
            (true, Severity::Warn) => label.yellow().to_string(),
            (true, Severity::Problem) => label.red().bold().to_string(),
        };
        // Writing to a String cannot fail. Names come from firmware and from environment variables: no control byte may reach a
        // terminal.
        let _ = writeln!(text, "{label}  {:<width$}  {}", finding.what, plain(&finding.detail));
        if let Some(advice) = &finding.advice {
            let _ = writeln!(text, "{:7}  {:width$}  → {}", "", "", plain(advice));
        }
    }
    text
}

fn label(severity: Severity) -> &'static str {
    match severity {
        Severity::Ok => "ok",
        Severity::Note => "note",
        Severity::Warn => "warn",
        Severity::Problem => "problem",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hbmark_core::result::BuildEnvironment;

    /// The worst severity among findings; [`Severity::Ok`] when there are none.
    fn worst(findings: &[Finding]) -> Severity {
        findings.iter().map(|finding| finding.severity).max().unwrap_or(Severity::Ok)
    }

    /// A machine with nothing to complain about.
    fn good() -> (Environment, Probes) {
        let environment = Environment {
            cpu: CpuEnvironment {
                model: Some("Test CPU".to_owned()),
                logical_cores: 16,
                usable_cores: 16,
                features: vec!["avx2".to_owned()],
                governor: Some("performance".to_owned()),
                memory_bytes: Some(Bytes(64_000_000_000)),
                memory_available_bytes: Some(Bytes(60_000_000_000)),
                transparent_huge_pages: Some("madvise".to_owned()),
                numa_nodes: Some(1),
                load_1m: Some(0.1),
                ..CpuEnvironment::default()
            },
            gpu: Some(GpuEnvironment {
                name: Some("NVIDIA H200".to_owned()),
                driver: Some("570.1".to_owned()),
                memory_used_bytes: Some(Bytes(500_000_000)),
                temperature_celsius: Some(35.0),
                throttle_reasons: vec!["gpu_idle".to_owned()],
                ecc: Some(true),
                mig: Some(false),
                mps: Some(false),
                persistence: Some(true),
                other_processes: Some(0),
                ..GpuEnvironment::default()
            }),
            build: BuildEnvironment {
                version: "0.1.0".to_owned(),
                profile: "release".to_owned(),
                cuda: true,
                ..BuildEnvironment::default()
            },
            ..Environment::default()
        };
        let probes = Probes {
            nvml_gpus: Some(1),
            nvidia_device_node: true,
            foreign_cores: Some(0.0),
            steal_cores: Some(0.0),
            hub_cache: Some(PathBuf::from("/models/hub")),
            hub_cache_exists: true,
            hub_offline: false,
        };
        (environment, probes)
    }

    /// The one finding that is not Ok after a single change.
    fn planted(change: impl FnOnce(&mut Environment, &mut Probes)) -> (Severity, String) {
        let (mut environment, mut probes) = good();
        change(&mut environment, &mut probes);
        let mut found: Vec<Finding> =
            examine(&environment, &probes).into_iter().filter(|f| f.severity != Severity::Ok).collect();
        assert_eq!(found.len(), 1, "{found:?}");
        let finding = found.remove(0);
        assert!(finding.advice.is_some());
        (finding.severity, finding.what)
    }

    fn gpu(environment: &mut Environment) -> &mut GpuEnvironment {
        environment.gpu.as_mut().unwrap()
    }

    #[test]
    fn a_good_machine_is_all_ok() {
        let (environment, probes) = good();
        assert_eq!(worst(&examine(&environment, &probes)), Severity::Ok);
    }

    #[test]
    fn every_fault_of_the_host_is_found_alone() {
        use Severity::{Note, Warn};
        let is = |severity, what: &str| (severity, what.to_owned());
        assert_eq!(planted(|e, _| e.build.profile = "debug".to_owned()), is(Warn, "build"));
        assert_eq!(planted(|e, _| e.cpu.usable_cores = 2), is(Note, "cores"));
        assert_eq!(planted(|e, _| e.cpu.features.clear()), is(Warn, "simd"));
        assert_eq!(planted(|e, _| e.cpu.governor = Some("powersave".to_owned())), is(Warn, "governor"));
        assert_eq!(planted(|e, _| e.cpu.governor = None), is(Note, "governor"));
        assert_eq!(planted(|e, _| e.cpu.quota_cores = Some(1.5)), is(Warn, "cpu quota"));
        assert_eq!(planted(|e, _| e.cpu.numa_nodes = Some(2)), is(Note, "numa"));
        assert_eq!(planted(|e, _| e.cpu.load_1m = Some(7.9)), is(Warn, "other load"));
        assert_eq!(planted(|_, p| p.foreign_cores = Some(7.7)), is(Warn, "other load"));
        assert_eq!(planted(|e, _| e.cpu.hypervisor = Some("KVM".to_owned())), is(Note, "hypervisor"));
        assert_eq!(planted(|_, p| p.steal_cores = Some(0.5)), is(Warn, "steal"));
        assert_eq!(planted(|e, _| e.container = Some("docker".to_owned())), is(Note, "container"));
        assert_eq!(planted(|e, _| e.cpu.memory_limit_bytes = Some(Bytes(1_000))), is(Note, "memory limit"));
        assert_eq!(
            planted(|e, _| e.cpu.transparent_huge_pages = Some("never".to_owned())),
            is(Note, "huge pages")
        );
        assert_eq!(planted(|_, p| p.hub_cache = None), is(Note, "hub cache"));
        let offline_without_cache = planted(|_, p| (p.hub_offline, p.hub_cache_exists) = (true, false));
        assert_eq!(offline_without_cache, is(Warn, "hub cache"));
    }

    #[test]
    fn a_gpu_bears_the_load_of_cores_that_it_does_not_need_and_a_cpu_does_not() {
        let (mut environment, mut probes) = good();
        (environment.cpu.load_1m, probes.foreign_cores) = (Some(3.0), Some(3.0));
        assert_eq!(worst(&examine(&environment, &probes)), Severity::Ok);
        environment.gpu = None;
        let found = examine(&environment, &probes);
        let load = found.iter().find(|finding| finding.what == "other load").unwrap();
        assert_eq!(
            (load.severity, load.detail.as_str()),
            (Severity::Warn, "3.0 cores busy with other processes")
        );
    }

    #[test]
    fn every_fault_of_the_gpu_is_found_alone() {
        use Severity::{Note, Problem, Warn};
        let is = |severity, what: &str| (severity, what.to_owned());
        let throttled = |name: &str| planted(|e, _| gpu(e).throttle_reasons = vec![name.to_owned()]);
        assert_eq!(throttled("hw_thermal"), is(Problem, "gpu throttle"));
        assert_eq!(throttled("hw_power_brake"), is(Problem, "gpu throttle"));
        assert_eq!(throttled("sw_power_cap"), is(Note, "gpu throttle"));
        assert_eq!(throttled("application_clocks"), is(Note, "gpu throttle"));
        assert_eq!(throttled("unknown_0x4000"), is(Note, "gpu throttle"));
        let by_number = planted(|e, _| gpu(e).matched_by = Some(GpuMatch::Number));
        assert_eq!(by_number, is(Warn, "gpu identity"));
        assert_eq!(planted(|e, _| gpu(e).temperature_celsius = Some(84.0)), is(Warn, "gpu temperature"));
        assert_eq!(planted(|e, _| gpu(e).ecc = Some(false)), is(Note, "gpu ecc"));
        assert_eq!(planted(|e, _| gpu(e).mig = Some(true)), is(Warn, "gpu mig"));
        assert_eq!(planted(|e, _| gpu(e).mps = Some(true)), is(Warn, "gpu mps"));
        assert_eq!(planted(|e, _| gpu(e).persistence = Some(false)), is(Note, "gpu persistence"));
        assert_eq!(planted(|e, _| gpu(e).other_processes = Some(2)), is(Warn, "gpu processes"));
        assert_eq!(
            planted(|e, _| gpu(e).memory_used_bytes = Some(Bytes(9_000_000_000))),
            is(Warn, "gpu memory")
        );
        assert_eq!(planted(|_, p| p.nvml_gpus = None), is(Problem, "nvml"));
        assert_eq!(planted(|e, p| (e.gpu, p.nvml_gpus) = (None, Some(0))), is(Problem, "gpu"));
        assert_eq!(planted(|e, _| e.gpu = None), is(Problem, "gpu"));
        assert_eq!(planted(|e, _| e.build.cuda = false), is(Warn, "gpu"));
    }

    #[test]
    fn a_cpu_build_on_a_machine_without_a_gpu_is_fine() {
        let (mut environment, mut probes) = good();
        environment.build.cuda = false;
        environment.gpu = None;
        (probes.nvml_gpus, probes.nvidia_device_node) = (None, false);
        assert_eq!(worst(&examine(&environment, &probes)), Severity::Ok);
    }

    #[test]
    fn nothing_known_is_no_problem() {
        let found = examine(&Environment::default(), &Probes::default());
        assert!(worst(&found) < Severity::Problem);
    }

    #[test]
    fn lines_are_plain_without_color_and_carry_no_control_bytes() {
        let (mut environment, probes) = good();
        environment.cpu.model = Some("Evil\u{1b}[2J CPU".to_owned());
        environment.cpu.governor = Some("powersave".to_owned());
        let findings = examine(&environment, &probes);
        let plain = render(&findings, false);
        assert!(!plain.contains('\u{1b}'));
        insta::assert_snapshot!(plain);
        assert!(render(&findings, true).contains('\u{1b}'));
    }

    #[test]
    fn findings_survive_json() {
        let (environment, probes) = good();
        let findings = examine(&environment, &probes);
        let json = serde_json::to_string(&findings).unwrap();
        assert!(json.contains(r#""severity":"ok""#));
        assert_eq!(serde_json::from_str::<Vec<Finding>>(&json).unwrap(), findings);
    }

    #[test]
    fn the_hub_cache_follows_its_variables() {
        let of =
            |hf: Option<&str>, home: Option<&str>| hub_cache(hf.map(str::to_owned), home.map(str::to_owned));
        assert_eq!(of(Some("/hf"), Some("/root")), Some(PathBuf::from("/hf/hub")));
        assert_eq!(of(None, Some("/root")), Some(PathBuf::from("/root/.cache/huggingface/hub")));
        assert_eq!(of(None, None), None);
        assert!(is_true("TRUE") && !is_true("0"));
    }

    #[test]
    fn this_machine_can_be_examined() {
        let findings = examine(&crate::machine::environment::collect(None), &Probes::collect());
        assert!(findings.iter().any(|finding| finding.what == "cores"));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_load_of_other_processes_is_looked_at() {
        let probes = Probes::collect();
        assert!(probes.foreign_cores.is_some() && probes.steal_cores.is_some(), "{probes:?}");
    }
}
