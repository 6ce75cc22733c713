//! What the control groups around this process allow it.
//!
//! Enters: /proc/self/cgroup and /sys/fs/cgroup, version 1, 2 or both. Leaves: CPU quota and memory limits, the tightest
//! over all enclosing groups. In a container the path in /proc/self/cgroup may not exist below the mount; the levels that
//! do exist are then the ones that count.

use super::system_files::Root;
use hbmark_core::units::Bytes;

/// Version 1 writes "no limit" as the largest page-aligned i64; anything near it means the same.
const UNLIMITED: u64 = 1 << 60;

/// The folders of the groups around this process, innermost first.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Cgroup {
    unified: Vec<String>,
    cpu: Vec<String>,
    memory: Vec<String>,
}

impl Cgroup {
    pub(crate) fn of_this_process(root: &Root) -> Self {
        Self::parse(&root.read("proc/self/cgroup").unwrap_or_default())
    }

    /// Reads lines `hierarchy:controllers:path`.
    fn parse(text: &str) -> Self {
        let mut groups = Self::default();
        for line in text.lines() {
            let mut parts = line.splitn(3, ':');
            let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next()) else {
                continue;
            };
            if controllers.is_empty() {
                groups.unified = levels("sys/fs/cgroup", path);
                continue;
            }
            for controller in controllers.split(',') {
                match controller {
                    "cpu" => groups.cpu = levels("sys/fs/cgroup/cpu", path),
                    "memory" => groups.memory = levels("sys/fs/cgroup/memory", path),
                    _ => {}
                }
            }
        }
        groups
    }

    /// The tightest CPU quota in cores.
    pub(crate) fn cpu_quota_cores(&self, root: &Root) -> Option<f64> {
        self.cpu_quotas(root).map(|(_, cores)| cores).min_by(f64::total_cmp)
    }

    /// Groups with a CPU quota, and what it is in cores.
    fn cpu_quotas<'a>(&'a self, root: &'a Root) -> impl Iterator<Item = (&'a String, f64)> {
        let unified = self.unified.iter().filter_map(|group| {
            let line = root.line(&format!("{group}/cpu.max"))?;
            let (quota, period) = line.split_once(' ')?;
            Some((group, cores(quota.parse().ok()?, period.trim().parse().ok()?)?))
        });
        let version1 = self.cpu.iter().filter_map(|group| {
            let line = |name: &str| root.line(&format!("{group}/cpu.{name}"))?.parse().ok();
            Some((group, cores(line("cfs_quota_us")?, line("cfs_period_us")?)?))
        });
        unified.chain(version1)
    }

    /// Microseconds for which CPU quotas held cores of these groups back so far; `None` where there is no quota.
    pub(crate) fn held_back_us(&self, root: &Root) -> Option<u64> {
        let held = self.cpu_quotas(root).filter_map(|(group, _)| {
            let stat = root.read(&format!("{group}/cpu.stat"))?;
            stat.lines().find_map(|line| match line.split_once(' ')? {
                ("throttled_usec", microseconds) => microseconds.trim().parse::<u64>().ok(),
                ("throttled_time", nanoseconds) => Some(nanoseconds.trim().parse::<u64>().ok()? / 1000),
                _ => None,
            })
        });
        held.reduce(u64::saturating_add)
    }

    /// The tightest memory limit.
    pub(crate) fn memory_limit(&self, root: &Root) -> Option<Bytes> {
        self.memory_levels(root).map(|level| Bytes(level.limit)).min()
    }

    /// What may still be allocated under every limit. Page cache is given back under pressure, so it counts as free: active or not, as in the
    /// kernel's own MemAvailable, since a file that was read twice is active.
    pub(crate) fn memory_remaining(&self, root: &Root) -> Option<Bytes> {
        self.memory_levels(root)
            .filter_map(|level| {
                Some(Bytes(level.limit.saturating_sub(level.used?.saturating_sub(level.reclaimable))))
            })
            .min()
    }

    fn memory_levels<'a>(&'a self, root: &'a Root) -> impl Iterator<Item = MemoryLevel> + 'a {
        let unified = self.unified.iter().map(|group| (group, "memory.max", "memory.current", ""));
        let version1 = self
            .memory
            .iter()
            .map(|group| (group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"));
        unified.chain(version1).filter_map(|(group, limit, used, prefix)| {
            let limit = root.number(&format!("{group}/{limit}")).filter(|limit| *limit < UNLIMITED)?;
            let stat = root.read(&format!("{group}/memory.stat")).unwrap_or_default();
            let pages = stat.lines().filter_map(|line| {
                let (name, bytes) = line.strip_prefix(prefix)?.split_once(' ')?;
                matches!(name, "active_file" | "inactive_file").then(|| bytes.trim().parse::<u64>().ok())?
            });
            let reclaimable = pages.fold(0, u64::saturating_add);
            Some(MemoryLevel { limit, used: root.number(&format!("{group}/{used}")), reclaimable })
        })
    }
}

struct MemoryLevel {
    limit: u64,
    used: Option<u64>,
    reclaimable: u64,
}

/// The group and its ancestors below a mount, innermost first, ending with the mount itself.
fn levels(mount: &str, path: &str) -> Vec<String> {
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty() && *part != "..").collect();
    let below = (1..=parts.len()).rev().map(|depth| format!("{mount}/{}", parts[..depth].join("/")));
    below.chain(std::iter::once(mount.to_owned())).collect()
}

/// Microseconds of CPU per period; a negative quota is not a quota.
fn cores(quota: i64, period: i64) -> Option<f64> {
    (quota > 0 && period > 0).then(|| quota as f64 / period as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::system_files::fake_root;

    #[test]
    fn version_1_limits_are_read_and_its_no_limit_is_none() {
        let (_keep, root) = fake_root(&[
            ("proc/self/cgroup", "4:memory:/box\n1:cpu,cpuacct:/box\n0::/\n"),
            ("sys/fs/cgroup/cpu/box/cpu.cfs_quota_us", "250000\n"),
            ("sys/fs/cgroup/cpu/box/cpu.cfs_period_us", "100000\n"),
            ("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n"),
            ("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n"),
            ("sys/fs/cgroup/memory/box/memory.limit_in_bytes", "9223372036854771712\n"),
        ]);
        let groups = Cgroup::of_this_process(&root);
        assert_eq!(groups.cpu_quota_cores(&root), Some(2.5));
        assert_eq!(groups.memory_limit(&root), None);
    }

    #[test]
    fn what_a_quota_held_back_is_read_of_both_versions_and_of_groups_with_a_quota_alone() {
        let (_keep, root) = fake_root(&[
            ("proc/self/cgroup", "0::/outer/inner\n"),
            ("sys/fs/cgroup/outer/cpu.max", "50000 100000\n"),
            (
                "sys/fs/cgroup/outer/cpu.stat",
                "usage_usec 9\nnr_periods 8\nnr_throttled 4\nthrottled_usec 2500\n",
            ),
            ("sys/fs/cgroup/outer/inner/cpu.max", "max 100000\n"),
            ("sys/fs/cgroup/outer/inner/cpu.stat", "throttled_usec 7\n"),
        ]);
        assert_eq!(Cgroup::of_this_process(&root).held_back_us(&root), Some(2500));
        let (_keep, root) = fake_root(&[
            ("proc/self/cgroup", "1:cpu,cpuacct:/box\n"),
            ("sys/fs/cgroup/cpu/box/cpu.cfs_quota_us", "50000\n"),
            ("sys/fs/cgroup/cpu/box/cpu.cfs_period_us", "100000\n"),
            ("sys/fs/cgroup/cpu/box/cpu.stat", "nr_periods 8\nnr_throttled 4\nthrottled_time 3500000\n"),
        ]);
        assert_eq!(Cgroup::of_this_process(&root).held_back_us(&root), Some(3500));
        let (_keep, root) =
            fake_root(&[("proc/self/cgroup", "0::/\n"), ("sys/fs/cgroup/cpu.stat", "throttled_usec 7\n")]);
        assert_eq!(Cgroup::of_this_process(&root).held_back_us(&root), None);
    }

    #[test]
    fn the_tightest_enclosing_group_counts() {
        let (_keep, root) = fake_root(&[
            ("proc/self/cgroup", "0::/outer/inner\n"),
            ("sys/fs/cgroup/outer/memory.max", "1000\n"),
            ("sys/fs/cgroup/outer/memory.current", "900\n"),
            ("sys/fs/cgroup/outer/memory.stat", "file 700\ninactive_file 400\nactive_file 200\n"),
            ("sys/fs/cgroup/outer/inner/memory.max", "5000\n"),
            ("sys/fs/cgroup/outer/inner/memory.current", "100\n"),
        ]);
        let groups = Cgroup::of_this_process(&root);
        assert_eq!(groups.memory_limit(&root), Some(Bytes(1000)));
        assert_eq!(groups.memory_remaining(&root), Some(Bytes(700)), "page cache can be given back");
        assert_eq!(groups.cpu_quota_cores(&root), None);
    }

    #[test]
    fn version_1_counts_the_page_cache_of_the_groups_below_too() {
        let (_keep, root) = fake_root(&[
            ("proc/self/cgroup", "4:memory:/box\n"),
            ("sys/fs/cgroup/memory/box/memory.limit_in_bytes", "1000\n"),
            ("sys/fs/cgroup/memory/box/memory.usage_in_bytes", "900\n"),
            (
                "sys/fs/cgroup/memory/box/memory.stat",
                "inactive_file 1\nactive_file 1\ntotal_inactive_file 100\ntotal_active_file 500\n",
            ),
        ]);
        assert_eq!(Cgroup::of_this_process(&root).memory_remaining(&root), Some(Bytes(700)));
    }

    #[test]
    fn a_path_outside_the_container_falls_back_to_the_mount() {
        let (_keep, root) = fake_root(&[
            ("proc/self/cgroup", "0::/../../host/slice\n"),
            ("sys/fs/cgroup/cpu.max", "50000 100000\n"),
        ]);
        assert_eq!(Cgroup::of_this_process(&root).cpu_quota_cores(&root), Some(0.5));
    }
}
