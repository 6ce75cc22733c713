//! How much memory a device still has.
//!
//! Enters: /proc, the control groups, NVML. Leaves: bytes that can be allocated now, or `None` where unknown.
//! Planning uses it to skip cells that cannot fit; it is not a promise.

use super::cgroup::Cgroup;
use super::environment::{field, kibibytes};
use super::system_files::Root;
use hbmark_core::units::Bytes;

/// Where the memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryOf {
    Host,
    /// The GPU that CUDA calls by this ordinal.
    Gpu(u32),
}

/// The resident memory of this process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Resident {
    pub now: Option<Bytes>,
    /// The most since the process began, or since [`reset_peak`].
    pub peak: Option<Bytes>,
}

impl Resident {
    /// The peak less what the measurement itself held all the while.
    pub fn peak_without(self, held: Bytes) -> Option<Bytes> {
        self.peak.map(|peak| Bytes(peak.0.saturating_sub(held.0)))
    }
}

/// Bytes that can be allocated now.
pub fn available(device: MemoryOf) -> Option<Bytes> {
    match device {
        MemoryOf::Host => host_available(&Root::system()),
        MemoryOf::Gpu(ordinal) => super::nvml::free_memory(ordinal),
    }
}

/// The less of what the kernel calls available and what the control groups leave.
pub fn host_available(root: &Root) -> Option<Bytes> {
    let kernel = root.read("proc/meminfo").and_then(|text| kibibytes(&text, "MemAvailable"));
    let groups = Cgroup::of_this_process(root).memory_remaining(root);
    [kernel, groups].into_iter().flatten().min()
}

/// The memory nodes that this process may use, and its policy among them, as `numactl` sets it: that of its first mapping, which has no
/// other.
pub fn nodes_and_policy(root: &Root) -> [Option<String>; 2] {
    let status = root.read("proc/self/status").unwrap_or_default();
    // `address policy key=value ...` of each mapping.
    let first = root.line("proc/self/numa_maps").unwrap_or_default();
    [field(&status, "Mems_allowed_list"), first.split_whitespace().nth(1)]
        .map(|found| found.map(str::to_owned))
}

/// Current and peak resident memory of this process.
pub fn resident() -> Resident {
    resident_at(&Root::system())
}

fn resident_at(root: &Root) -> Resident {
    let status = root.read("proc/self/status").unwrap_or_default();
    Resident { now: kibibytes(&status, "VmRSS"), peak: kibibytes(&status, "VmHWM") }
}

/// Lets the peak begin again at the current resident size; false where the kernel does not allow it.
pub fn reset_peak() -> bool {
    reset_peak_at(&Root::system())
}

fn reset_peak_at(root: &Root) -> bool {
    // 5 is CLEAR_REFS_MM_HIWATER_RSS (Linux, Documentation/filesystems/proc.rst).
    root.exists("proc/self/clear_refs") && root.write("proc/self/clear_refs", "5").is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::system_files::fake_root;

    #[test]
    fn the_control_group_can_leave_less_than_the_kernel() {
        let meminfo = ("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable: 4000 kB\n");
        let (_keep, root) = fake_root(&[meminfo]);
        assert_eq!(host_available(&root), Some(Bytes(4000 * 1024)));
        let (_keep, root) = fake_root(&[
            meminfo,
            ("proc/self/cgroup", "0::/\n"),
            ("sys/fs/cgroup/memory.max", "2048000\n"),
            ("sys/fs/cgroup/memory.current", "1024000\n"),
        ]);
        assert_eq!(host_available(&root), Some(Bytes(1_024_000)));
        let (_keep, root) = fake_root(&[]);
        assert_eq!(host_available(&root), None);
    }

    #[test]
    fn what_the_measurement_holds_is_no_part_of_a_peak() {
        let resident = Resident { now: None, peak: Some(Bytes(300)) };
        assert_eq!(resident.peak_without(Bytes(256)), Some(Bytes(44)));
        assert_eq!(resident.peak_without(Bytes(400)), Some(Bytes(0)));
        assert_eq!(Resident::default().peak_without(Bytes(1)), None);
    }

    #[test]
    fn memory_nodes_and_their_policy_are_read() {
        let (_keep, root) = fake_root(&[
            ("proc/self/status", "Mems_allowed:\t3\nMems_allowed_list:\t0,8\n"),
            ("proc/self/numa_maps", "55f590b85000 bind:8 file=/usr/bin/cat mapped=2 N0=2\n"),
        ]);
        assert_eq!(nodes_and_policy(&root), [Some("0,8".to_owned()), Some("bind:8".to_owned())]);
        let (_keep, root) = fake_root(&[]);
        assert_eq!(nodes_and_policy(&root), [None, None]);
    }

    #[test]
    fn resident_memory_comes_from_the_status_file() {
        let (_keep, root) = fake_root(&[("proc/self/status", "VmHWM:\t   20 kB\nVmRSS:\t   10 kB\n")]);
        assert_eq!(resident_at(&root), Resident { now: Some(Bytes(10_240)), peak: Some(Bytes(20_480)) });
        assert!(!reset_peak_at(&root), "no clear_refs, no reset");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn this_process_has_a_peak_no_lower_than_its_present() {
        let resident = resident();
        assert!(resident.peak.unwrap() >= resident.now.unwrap());
    }
}
