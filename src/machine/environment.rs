//! The machine a result was made on, as plain data.
//!
//! Enters: /proc, /sys, NVML. Leaves: [`Environment`], stored in every report. A fact that is not known is null, never 0.

use std::collections::BTreeMap;

use super::cgroup::Cgroup;
use super::processors;
use super::system_files::Root;
use hbmark_core::result::{BuildEnvironment, CpuEnvironment, Environment};
use hbmark_core::units::{Bytes, whole_count};

/// The candle release that is linked; a test holds it against the manifest.
const CANDLE_VERSION: &str = "0.11.1";

/// Instruction sets that decide how fast a CPU multiplies, as /proc/cpuinfo spells them and as we print them.
const FEATURES: [(&str, &str); 15] = [
    ("avx2", "avx2"),
    ("fma", "fma"),
    ("f16c", "f16c"),
    ("avx512f", "avx512f"),
    ("avx512_bf16", "avx512_bf16"),
    ("avx512_vnni", "avx512_vnni"),
    ("avx512_fp16", "avx512_fp16"),
    ("avx_vnni", "avx_vnni"),
    ("amx_bf16", "amx_bf16"),
    ("amx_int8", "amx_int8"),
    ("asimd", "neon"),
    ("asimddp", "neon_dotprod"),
    ("bf16", "bf16"),
    ("sve", "sve"),
    ("sve2", "sve2"),
];

/// Looks at this machine, and at the GPU that CUDA calls by the ordinal `gpu`, if one is asked for.
///
/// Never fails: what cannot be read is `None`.
pub fn collect(gpu: Option<u32>) -> Environment {
    let root = Root::system();
    let placement = super::placement::of_this_process();
    Environment { gpu: gpu.and_then(super::nvml::describe), placement, ..from_root(&root) }
}

/// The same without a GPU, from a file tree that looks like `/`.
pub fn from_root(root: &Root) -> Environment {
    let os = root.read("etc/os-release").and_then(|text| os_name(&text));
    Environment {
        hostname: root.line("proc/sys/kernel/hostname"),
        os: os.or_else(|| Some(std::env::consts::OS.to_owned())),
        kernel: root.line("proc/sys/kernel/osrelease"),
        container: container(root),
        cpu: cpu_from_root(root),
        gpu: None,
        build: this_binary(),
        placement: None,
    }
}

/// A number that this machine drew when it was started.
pub fn boot_id() -> Option<String> {
    Root::system().line("proc/sys/kernel/random/boot_id")
}

/// The cores that this process may run on, whatever quota it has of them.
pub fn cores() -> usize {
    let root = Root::system();
    match processors::allowed(&root).len() {
        0 => logical_cores(&root.read("proc/cpuinfo").unwrap_or_default()),
        allowed => allowed,
    }
}

fn logical_cores(cpuinfo: &str) -> usize {
    match cpuinfo.lines().filter(|line| key(line) == "processor").count() {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        processors => processors,
    }
}

fn cpu_from_root(root: &Root) -> CpuEnvironment {
    let cpuinfo = root.read("proc/cpuinfo").unwrap_or_default();
    let meminfo = root.read("proc/meminfo").unwrap_or_default();
    let cgroup = Cgroup::of_this_process(root);

    let logical_cores = logical_cores(&cpuinfo);
    let allowed = processors::allowed(root);
    let usable = if allowed.is_empty() { logical_cores } else { allowed.len() };
    let quota_cores = cgroup.cpu_quota_cores(root);
    CpuEnvironment {
        model: cpu_model(&cpuinfo),
        logical_cores,
        usable_cores: usable_cores(usable, quota_cores),
        quota_cores,
        features: cpu_features(&cpuinfo),
        governor: governor(root),
        frequency_mhz: frequency_mhz(root, &allowed),
        last_cache_bytes: last_cache_of(root),
        memory_bytes: kibibytes(&meminfo, "MemTotal"),
        memory_available_bytes: kibibytes(&meminfo, "MemAvailable"),
        memory_limit_bytes: cgroup.memory_limit(root),
        transparent_huge_pages: root
            .line("sys/kernel/mm/transparent_hugepage/enabled")
            .and_then(|line| chosen(&line)),
        numa_nodes: match root.numbered("sys/devices/system/node", "node").len() {
            0 => None,
            nodes => Some(nodes),
        },
        load_1m: root.line("proc/loadavg").and_then(|line| line.split_whitespace().next()?.parse().ok()),
        hypervisor: hypervisor(root, &cpuinfo),
    }
}

/// How this very binary was built.
pub fn this_binary() -> BuildEnvironment {
    BuildEnvironment {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        git_revision: option_env!("HBMARK_GIT_REVISION").filter(|text| !text.is_empty()).map(str::to_owned),
        profile: if cfg!(debug_assertions) { "debug" } else { "release" }.to_owned(),
        cuda: cfg!(feature = "cuda"),
        candle: CANDLE_VERSION.to_owned(),
        rustc: option_env!("HBMARK_RUSTC").filter(|text| !text.is_empty()).map(str::to_owned),
    }
}

/// Mean clock of these processors in MHz, of all where none are given: cpufreq where there is one, else what /proc/cpuinfo says.
pub(crate) fn frequency_mhz(root: &Root, processors: &[usize]) -> Option<f64> {
    let folders = match processors {
        [] => root.numbered("sys/devices/system/cpu", "cpu"),
        some => some.iter().map(|processor| processors::folder(*processor)).collect(),
    };
    let scaling: Vec<f64> = folders
        .iter()
        .filter_map(|cpu| root.line(&format!("{cpu}/cpufreq/scaling_cur_freq"))?.parse::<f64>().ok())
        .map(|kilohertz| kilohertz / 1e3)
        .collect();
    mean(&scaling).or_else(|| {
        let cpuinfo = root.read("proc/cpuinfo")?;
        let mut processor = None;
        let clock = |line| {
            if key(line) == "processor" {
                processor = value(line).parse().ok();
            }
            let wanted =
                processors.is_empty() || processor.is_some_and(|number| processors.contains(&number));
            (wanted && key(line) == "cpu MHz").then(|| value(line).parse().ok())?
        };
        mean(&cpuinfo.lines().filter_map(clock).collect::<Vec<f64>>())
    })
}

fn mean(values: &[f64]) -> Option<f64> {
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    (mean.is_finite() && mean > 0.0).then_some(mean)
}

/// How many of so many cores the CPU quota of this process keeps busy.
pub(crate) fn within_quota(root: &Root, allowed: usize) -> usize {
    usable_cores(allowed, Cgroup::of_this_process(root).cpu_quota_cores(root))
}

fn usable_cores(allowed: usize, quota: Option<f64>) -> usize {
    // Half a core still runs one thread; 3.5 cores run four threads, one of which waits half of the time: count three.
    let quota = quota.map_or(usize::MAX, whole_count);
    allowed.min(quota).max(1)
}

fn key(line: &str) -> &str {
    line.split_once(':').map_or("", |(key, _)| key.trim())
}

fn value(line: &str) -> &str {
    line.split_once(':').map_or("", |(_, value)| value.trim())
}

/// The value of the first `key: value` line.
pub(crate) fn field<'a>(text: &'a str, wanted: &str) -> Option<&'a str> {
    text.lines().find(|line| key(line) == wanted).map(value).filter(|value| !value.is_empty())
}

/// The value of a `key:  123 kB` line.
pub(crate) fn kibibytes(text: &str, wanted: &str) -> Option<Bytes> {
    let count: u64 = field(text, wanted)?.strip_suffix("kB")?.trim().parse().ok()?;
    count.checked_mul(1024).map(Bytes)
}

/// The word in brackets: `always [madvise] never` is `madvise`.
fn chosen(line: &str) -> Option<String> {
    let (_, rest) = line.split_once('[')?;
    rest.split_once(']').map(|(word, _)| word.to_owned())
}

fn os_name(os_release: &str) -> Option<String> {
    let line = os_release.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="))?;
    Some(line.trim().trim_matches('"').to_owned()).filter(|name| !name.is_empty())
}

fn cpu_model(cpuinfo: &str) -> Option<String> {
    // Arm kernels print numbers instead of a name.
    field(cpuinfo, "model name").map(str::to_owned).or_else(|| {
        let (implementer, part) = (field(cpuinfo, "CPU implementer")?, field(cpuinfo, "CPU part")?);
        Some(format!("Arm implementer {implementer} part {part}"))
    })
}

fn cpu_features(cpuinfo: &str) -> Vec<String> {
    let flags = field(cpuinfo, "flags").or_else(|| field(cpuinfo, "Features")).unwrap_or_default();
    let flags: Vec<&str> = flags.split_whitespace().collect();
    FEATURES.iter().filter(|(flag, _)| flags.contains(flag)).map(|(_, name)| (*name).to_owned()).collect()
}

/// The governors in use, each once.
fn governor(root: &Root) -> Option<String> {
    let mut governors: Vec<String> = root
        .numbered("sys/devices/system/cpu", "cpu")
        .iter()
        .filter_map(|cpu| root.line(&format!("{cpu}/cpufreq/scaling_governor")))
        .collect();
    governors.sort_unstable();
    governors.dedup();
    (!governors.is_empty()).then(|| governors.join(", "))
}

/// The last-level cache of this machine.
pub fn last_cache() -> Option<Bytes> {
    last_cache_of(&Root::system())
}

/// The highest cache level, summed over its instances, because a working set is spread over all of them.
fn last_cache_of(root: &Root) -> Option<Bytes> {
    let mut instances: BTreeMap<(u32, String), u64> = BTreeMap::new();
    for cpu in root.numbered("sys/devices/system/cpu", "cpu") {
        for index in root.numbered(&format!("{cpu}/cache"), "index") {
            let line = |name: &str| root.line(&format!("{index}/{name}"));
            let (Some(level), Some(size)) = (line("level"), line("size")) else { continue };
            let (Ok(level), Some(size)) = (level.parse(), cache_size(&size)) else { continue };
            if line("type").as_deref() == Some("Instruction") {
                continue;
            }
            instances.insert((level, line("shared_cpu_list").unwrap_or_else(|| cpu.clone())), size);
        }
    }
    let highest = instances.keys().map(|(level, _)| *level).max()?;
    let total: u64 =
        instances.iter().filter(|((level, _), _)| *level == highest).map(|(_, size)| *size).sum();
    (total > 0).then_some(Bytes(total))
}

fn cache_size(text: &str) -> Option<u64> {
    let (digits, scale) = match text.strip_suffix('K') {
        Some(digits) => (digits, 1 << 10),
        None => text.strip_suffix('M').map_or((text, 1), |digits| (digits, 1 << 20)),
    };
    // No cache is anywhere near 2^40 bytes; the bound keeps the sum over cores from overflowing.
    digits.parse::<u64>().ok()?.checked_mul(scale).filter(|size| *size < 1 << 40)
}

/// What runs this machine as a guest: named by DMI or Xen where they tell, else known only to exist by the CPU flag.
fn hypervisor(root: &Root, cpuinfo: &str) -> Option<String> {
    const VENDORS: [&str; 10] =
        ["qemu", "kvm", "vmware", "virtualbox", "innotek", "xen", "amazon", "google", "alibaba", "openstack"];
    if let Some(kind) = root.line("sys/hypervisor/type") {
        return Some(kind);
    }
    let dmi = |name: &str| root.line(&format!("sys/class/dmi/id/{name}"));
    let (vendor, product) = (dmi("sys_vendor"), dmi("product_name"));
    let machine = [vendor, product].into_iter().flatten().collect::<Vec<_>>().join(" ");
    let flag =
        field(cpuinfo, "flags").is_some_and(|flags| flags.split_whitespace().any(|f| f == "hypervisor"));
    let lower = machine.to_lowercase();
    // x86 guests carry the flag, and a host's DMI may name a cloud although it is bare metal. Arm has no such flag.
    let arm_guest = field(cpuinfo, "flags").is_none()
        && !lower.contains("metal")
        && VENDORS.iter().any(|vendor| lower.contains(vendor));
    match (flag || arm_guest, machine.is_empty()) {
        (false, _) => None,
        (true, true) => Some("unnamed".to_owned()),
        (true, false) => Some(machine),
    }
}

fn container(root: &Root) -> Option<String> {
    if let Some(name) = root.line("run/systemd/container") {
        return Some(name);
    }
    let cgroup = root.read("proc/1/cgroup").or_else(|| root.read("proc/self/cgroup")).unwrap_or_default();
    let mount = root.read("proc/self/mountinfo").unwrap_or_default();
    let kubernetes = cgroup.contains("kubepods") || mount.contains("/kubelet/pods/");
    if kubernetes {
        return Some("kubernetes".to_owned());
    }
    let marks = [(".dockerenv", "docker"), ("run/.containerenv", "podman"), ("singularity.d", "singularity")];
    if let Some((_, name)) = marks.iter().find(|(path, _)| root.exists(path)) {
        return Some((*name).to_owned());
    }
    ["docker", "containerd", "podman", "libpod", "lxc"]
        .into_iter()
        .find(|name| cgroup.contains(&format!("/{name}")))
        .map(|name| if name == "libpod" { "podman" } else { name }.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::system_files::fake_root;

    const CPUINFO: &str = "processor\t: 0\nmodel name\t: AMD EPYC 9B45\ncpu MHz\t\t: 2600.0\n\
        flags\t\t: fpu sse2 avx2 f16c hypervisor avx512f avx512_bf16 avx512_vnni\n\n\
        processor\t: 1\nmodel name\t: AMD EPYC 9B45\ncpu MHz\t\t: 2800.0\nflags\t\t: fpu sse2\n";

    fn machine() -> (tempfile::TempDir, Root) {
        let cpu = "sys/devices/system/cpu";
        fake_root(&[
            ("proc/cpuinfo", CPUINFO),
            ("proc/meminfo", "MemTotal:       16384 kB\nMemFree: 1 kB\nMemAvailable:    8192 kB\n"),
            ("proc/self/status", "Name:\thbmark\nCpus_allowed_list:\t0-1\n"),
            ("proc/self/cgroup", "0::/job/inner\n"),
            ("sys/fs/cgroup/job/cpu.max", "150000 100000\n"),
            ("sys/fs/cgroup/job/inner/cpu.max", "max 100000\n"),
            ("sys/fs/cgroup/job/memory.max", "4194304\n"),
            ("proc/loadavg", "0.52 0.58 0.59 1/388 12345\n"),
            ("proc/sys/kernel/hostname", "bench7\n"),
            ("proc/sys/kernel/osrelease", "6.8.0\n"),
            ("etc/os-release", "ID=debian\nPRETTY_NAME=\"Debian GNU/Linux 12\"\n"),
            ("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n"),
            ("sys/devices/system/node/node0/cpulist", "0\n"),
            ("sys/devices/system/node/node1/cpulist", "1\n"),
            (&format!("{cpu}/cpu0/cpufreq/scaling_governor"), "powersave\n"),
            (&format!("{cpu}/cpu1/cpufreq/scaling_governor"), "powersave\n"),
            (&format!("{cpu}/cpu0/cache/index0/level"), "1\n"),
            (&format!("{cpu}/cpu0/cache/index0/size"), "48K\n"),
            (&format!("{cpu}/cpu0/cache/index3/level"), "3\n"),
            (&format!("{cpu}/cpu0/cache/index3/size"), "32768K\n"),
            (&format!("{cpu}/cpu0/cache/index3/shared_cpu_list"), "0-1\n"),
            (&format!("{cpu}/cpu1/cache/index3/level"), "3\n"),
            (&format!("{cpu}/cpu1/cache/index3/size"), "32768K\n"),
            (&format!("{cpu}/cpu1/cache/index3/shared_cpu_list"), "0-1\n"),
            ("sys/class/dmi/id/sys_vendor", "QEMU\n"),
            ("sys/class/dmi/id/product_name", "Standard PC\n"),
            (".dockerenv", ""),
        ])
    }

    #[test]
    fn every_planted_fact_is_found() {
        let (_keep, root) = machine();
        let environment = from_root(&root);
        assert_eq!(environment.hostname.as_deref(), Some("bench7"));
        assert_eq!(environment.os.as_deref(), Some("Debian GNU/Linux 12"));
        assert_eq!(environment.kernel.as_deref(), Some("6.8.0"));
        assert_eq!(environment.container.as_deref(), Some("docker"));
        let cpu = environment.cpu;
        assert_eq!(cpu.model.as_deref(), Some("AMD EPYC 9B45"));
        assert_eq!((cpu.logical_cores, cpu.usable_cores, cpu.quota_cores), (2, 1, Some(1.5)));
        assert_eq!(cpu.features, ["avx2", "f16c", "avx512f", "avx512_bf16", "avx512_vnni"]);
        assert_eq!(cpu.governor.as_deref(), Some("powersave"));
        assert_eq!(cpu.frequency_mhz, Some(2700.0));
        assert_eq!(cpu.last_cache_bytes, Some(Bytes(32 << 20)), "a cache shared by two cores counts once");
        assert_eq!(cpu.memory_bytes, Some(Bytes(16 << 20)));
        assert_eq!(cpu.memory_available_bytes, Some(Bytes(8 << 20)));
        assert_eq!(cpu.memory_limit_bytes, Some(Bytes(4 << 20)));
        assert_eq!(cpu.transparent_huge_pages.as_deref(), Some("madvise"));
        assert_eq!(cpu.numa_nodes, Some(2));
        assert_eq!(cpu.load_1m, Some(0.52));
        assert_eq!(cpu.hypervisor.as_deref(), Some("QEMU Standard PC"));
    }

    #[test]
    fn what_cannot_be_read_is_none_and_never_zero() {
        let (_keep, root) = fake_root(&[]);
        let environment = from_root(&root);
        let cpu = environment.cpu;
        assert!(cpu.logical_cores >= 1 && cpu.usable_cores >= 1);
        let nothing = CpuEnvironment {
            logical_cores: cpu.logical_cores,
            usable_cores: cpu.usable_cores,
            ..CpuEnvironment::default()
        };
        assert_eq!(cpu, nothing);
        assert_eq!((environment.hostname, environment.kernel, environment.container), (None, None, None));
    }

    #[test]
    fn garbage_in_proc_is_none_and_does_not_panic() {
        let (_keep, root) = fake_root(&[
            ("proc/cpuinfo", "::::\nprocessor\ncpu MHz : NaN\nflags\t:\n"),
            ("proc/meminfo", "MemTotal: 99999999999999999999999 kB\nMemAvailable: -1 kB\n"),
            ("proc/self/status", "Cpus_allowed_list:\t9-2\n"),
            ("proc/loadavg", "\n"),
            ("sys/devices/system/cpu/cpu0/cache/index0/level", "3\n"),
            ("sys/devices/system/cpu/cpu0/cache/index0/size", "18446744073709551615M\n"),
        ]);
        let cpu = from_root(&root).cpu;
        assert_eq!((cpu.memory_bytes, cpu.memory_available_bytes, cpu.load_1m), (None, None, None));
        assert_eq!((cpu.last_cache_bytes, cpu.frequency_mhz), (None, None));
        assert!(cpu.usable_cores >= 1);
    }

    #[test]
    fn the_clock_is_that_of_the_processors_in_use() {
        let (_keep, root) = machine();
        assert_eq!(frequency_mhz(&root, &[1]), Some(2800.0));
        assert_eq!(frequency_mhz(&root, &[]), Some(2700.0));
        let scaling = |n| format!("{}/cpufreq/scaling_cur_freq", processors::folder(n));
        let (_keep, root) = fake_root(&[(&scaling(0), "800000\n"), (&scaling(1), "3100000\n")]);
        assert_eq!(frequency_mhz(&root, &[1]), Some(3100.0));
        assert_eq!(frequency_mhz(&root, &[]), Some(1950.0));
    }

    #[test]
    fn a_quota_rounds_down_to_whole_cores_but_never_to_none() {
        assert_eq!(usable_cores(8, None), 8);
        assert_eq!(usable_cores(8, Some(3.5)), 3);
        assert_eq!(usable_cores(8, Some(0.5)), 1);
        assert_eq!(usable_cores(2, Some(64.0)), 2);
    }

    #[test]
    fn an_arm_core_is_named_by_its_numbers_and_its_neon() {
        let cpuinfo = "processor\t: 0\nFeatures\t: fp asimd asimddp bf16 sve\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n";
        assert_eq!(cpu_model(cpuinfo).as_deref(), Some("Arm implementer 0x41 part 0xd4f"));
        assert_eq!(cpu_features(cpuinfo), ["neon", "neon_dotprod", "bf16", "sve"]);
    }

    #[test]
    fn bare_metal_in_a_cloud_is_no_guest() {
        let (_keep, root) = fake_root(&[("sys/class/dmi/id/sys_vendor", "Amazon EC2\n")]);
        assert_eq!(hypervisor(&root, "flags : fpu avx2\n"), None);
        assert_eq!(hypervisor(&root, "flags : fpu hypervisor\n").as_deref(), Some("Amazon EC2"));
        let (_keep, bare) = fake_root(&[]);
        assert_eq!(hypervisor(&bare, "flags : hypervisor\n").as_deref(), Some("unnamed"));
    }

    #[test]
    fn containers_are_known_by_their_marks() {
        let named = |files: &[(&str, &str)]| container(&fake_root(files).1);
        let (_keep, root) =
            fake_root(&[("proc/1/cgroup", "0::/kubepods/besteffort/pod1\n"), (".dockerenv", "")]);
        assert_eq!(container(&root).as_deref(), Some("kubernetes"));
        let (_keep, root) = fake_root(&[("proc/self/cgroup", "4:memory:/docker/abc\n")]);
        assert_eq!(container(&root).as_deref(), Some("docker"));
        assert_eq!(named(&[]), None);
    }

    #[test]
    fn the_candle_version_is_the_one_in_the_manifest() {
        let manifest = include_str!("../../Cargo.toml");
        assert!(manifest.contains(&format!("candle-core = \"={CANDLE_VERSION}\"")));
    }

    #[test]
    fn this_machine_has_at_least_one_core() {
        let environment = collect(None);
        assert!(environment.cpu.logical_cores >= 1 && environment.cpu.usable_cores >= 1);
        assert!(environment.gpu.is_none());
        assert!(!environment.build.version.is_empty());
        #[cfg(target_os = "linux")]
        assert!(environment.cpu.model.is_some());
    }
}
