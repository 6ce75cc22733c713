//! The time of a device: what work costs on the product that is simulated, and the host's clock without the time that simulating takes.
//!
//! Enters: what work asked of the device. Leaves: seconds. A host that looks at its own clock sees how long simulating took, unless the script says that
//! both have one clock. Work takes as long as the slowest of memory, L2, matrix units and link needs for it,
//! and the gap in front of it. A kernel that looks at the clock takes as long as it looked. Not in it: the arithmetic of ordinary cores, too few bytes in
//! flight, and what L2 keeps from one kernel to the next.

use std::time::{Duration, Instant};

use crate::device::Device;
use crate::launch::mix;
use crate::script::Script;

/// What work asks of a device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Demand {
    /// To and from memory.
    pub bytes: u64,
    /// From L2, past the first.
    pub l2_bytes: u64,
    /// Of matrix units, on 16 bits; on bytes they count half.
    pub tensor_flops: u64,
    /// In f32.
    pub f32_flops: u64,
    /// Between host and device.
    pub link_bytes: u64,
    /// In memory of other devices.
    pub peer_bytes: u64,
    /// Whether it waits for kernels of other devices.
    pub meets: bool,
    /// For which a kernel looked at the clock.
    pub clock_ns: u64,
}

impl Demand {
    /// Bytes of memory alone.
    #[must_use]
    pub fn of_memory(bytes: usize) -> Self {
        Self { bytes: bytes as u64, ..Self::default() }
    }

    /// A copy between host and device.
    #[must_use]
    pub fn of_link(bytes: usize) -> Self {
        Self { link_bytes: bytes as u64, ..Self::default() }
    }

    /// Both together.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            bytes: self.bytes + other.bytes,
            l2_bytes: self.l2_bytes + other.l2_bytes,
            tensor_flops: self.tensor_flops + other.tensor_flops,
            f32_flops: self.f32_flops + other.f32_flops,
            link_bytes: self.link_bytes + other.link_bytes,
            peer_bytes: self.peer_bytes + other.peer_bytes,
            meets: self.meets || other.meets,
            clock_ns: self.clock_ns + other.clock_ns,
        }
    }
}

/// How work comes to a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gap {
    /// By itself.
    Launch,
    /// As a node of a graph.
    Node,
    /// Begun while the one before runs: programmatic dependent launch.
    Dependent,
}

impl Gap {
    /// *Source*: assumed, of the size that studies of launches on H100 give: 2 to 3 µs a launch, 1.1 to 1.5 µs a node, 1 µs overlapped.
    fn seconds(self) -> f64 {
        match self {
            Self::Launch => 2.5e-6,
            Self::Node => 1.3e-6,
            Self::Dependent => 1e-6,
        }
    }
}

/// Of a data sheet's bandwidth what a kernel reaches. *Source*: assumed; published reads of H100 and H200 are 0.88 to 0.93 of theirs.
const REACHED_BANDWIDTH: f64 = 0.9;
/// Of the peaks of matrix units. *Source*: assumed; published products of 8,192 on H100 reach 0.6 to 0.8.
const REACHED_PEAK: f64 = 0.7;
/// L2 over memory. *Source*: assumed; reads of it on H100 were published at 5.5 to 7 TB/s.
const L2_OVER_MEMORY: f64 = 1.5;
/// Bytes per second to the host. *Source*: PCIe 5.0 × 16 is 64 GB/s, of which copies reach about 55.
const LINK_BYTES_PER_S: f64 = 55e9;
/// Gaps become no more times slower: simulating a launch takes less than a millisecond.
const MOST_SLOWER_GAP: f64 = 500.0;
/// Equal work differs by so much, either way.
const NOISE: f64 = 2e-3;

/// Seconds of work on a device that does all of it so many times slower.
#[must_use]
pub fn seconds(device: &Device, demand: &Demand, gap: Gap, slower: f64) -> f64 {
    let peaks = device.dense_flops_per_s;
    let bandwidth = device.bandwidth_bytes_per_s * REACHED_BANDWIDTH;
    let needs = [
        demand.bytes as f64 / bandwidth,
        demand.l2_bytes as f64 / (bandwidth * L2_OVER_MEMORY),
        (demand.tensor_flops as f64 / peaks.f16 + demand.f32_flops as f64 / peaks.f32) / REACHED_PEAK,
        demand.link_bytes as f64 / LINK_BYTES_PER_S,
        demand.peer_bytes as f64 / device.link_bytes_per_s,
    ];
    gap.seconds() * slower.min(MOST_SLOWER_GAP) + needs.into_iter().fold(0.0, f64::max) * slower
}

/// The clocks of a machine. Times are in seconds since it was made.
#[derive(Debug)]
pub struct Clock {
    began: Instant,
    /// Devices have the host's clock.
    shared: bool,
    /// That work took here.
    simulating: Duration,
    /// That the host would have waited for devices.
    waited: f64,
    works: u64,
}

impl Clock {
    /// Clocks as the script has them.
    #[must_use]
    pub fn new(script: &Script) -> Self {
        Self {
            began: Instant::now(),
            shared: script.shared_time,
            simulating: Duration::ZERO,
            waited: 0.0,
            works: 0,
        }
    }

    /// The host's time: as if a device did its work by itself, unless they share the clock.
    #[must_use]
    pub fn host(&self) -> f64 {
        self.began.elapsed().saturating_sub(self.simulating).as_secs_f64() + self.waited
    }

    /// The host waits until then.
    pub fn wait_until(&mut self, then: f64) {
        let left = (then - self.host()).max(0.0);
        if self.shared {
            std::thread::sleep(Duration::from_secs_f64(left));
        } else {
            self.waited += left;
        }
    }

    /// When work is done that was simulated for so long just now, and would be done then.
    pub fn simulated(&mut self, time: Duration, done_at: f64) -> f64 {
        if self.shared {
            return done_at.max(self.host());
        }
        self.simulating += time;
        done_at
    }

    /// Seconds that work of this name takes, with the script's noise and slowness.
    pub fn cost(&mut self, script: &Script, name: &str, demand: &Demand, gap: Gap) -> f64 {
        let of_peers = (demand.peer_bytes as f64 * script.slow_link) as u64;
        let demand = &Demand { peer_bytes: of_peers, ..*demand };
        self.works += 1;
        let drawn = mix(script.seed ^ mix(self.works)) as f64 / u64::MAX as f64;
        let noise = 1.0 + NOISE * (2.0 * drawn - 1.0);
        let clock = demand.clock_ns as f64 * 1e-9;
        // Who looks at the clock sees real time, which no script makes slower.
        clock + seconds(script.device, demand, gap, script.slower) * noise * script.slowness(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::DEVICES;

    fn near(a: f64, b: f64) -> bool {
        (a / b - 1.0).abs() < 1e-9
    }

    fn clock(script: &str) -> (Script, Clock) {
        let script = Script::parse(script).unwrap();
        let clock = Clock::new(&script);
        (script, clock)
    }

    #[test]
    fn work_takes_what_its_slowest_need_does() {
        let of = |demand: &Demand, gap| seconds(&DEVICES[0], demand, gap, 1.0);
        let bytes = Demand::of_memory(4_320_000_000);
        assert!(near(of(&bytes, Gap::Node), 1e-3 + 1.3e-6));
        // A product whose matrices take less than its arithmetic.
        let product = Demand { tensor_flops: 692_650_000_000, ..bytes };
        assert!(near(of(&product, Gap::Launch), 1e-3 + 2.5e-6));
        let larger = Demand { tensor_flops: 2 * 692_650_000_000, ..bytes };
        assert!(near(of(&larger, Gap::Dependent), 2e-3 + 1e-6));
        assert!(near(of(&Demand::of_link(55_000_000), Gap::Launch), 1e-3 + 2.5e-6));
        let cached = Demand { l2_bytes: 6_480_000_000, ..Demand::default() };
        assert!(near(of(&cached, Gap::Node), 1e-3 + 1.3e-6));
        assert!(near(seconds(&DEVICES[0], &bytes, Gap::Node, 1000.0), 1.0 + 500.0 * 1.3e-6));
    }

    #[test]
    fn a_kernel_that_looks_at_the_clock_takes_that_long_whatever_the_script_says() {
        let (script, mut clock) = clock("slower=1000,slow-kernel=spin*4");
        let demand = Demand { clock_ns: 5_000_000_000, ..Demand::default() };
        let found = clock.cost(&script, "spin", &demand, Gap::Launch);
        assert!((5.0..5.0 + 2.5e-6 * 4000.0).contains(&found), "{found}");
    }

    #[test]
    fn equal_work_differs_a_little_and_not_from_run_to_run() {
        let demand = Demand::of_memory(1 << 30);
        let times = || {
            let (script, mut clock) = clock("seed=5");
            [(); 100].map(|()| clock.cost(&script, "x", &demand, Gap::Node))
        };
        let (first, again) = (times(), times());
        let exact = seconds(&DEVICES[0], &demand, Gap::Node, 1.0);
        assert_eq!(first, again);
        assert!(first.iter().all(|time| (time / exact - 1.0).abs() <= NOISE));
        assert!(first.iter().any(|time| (time / exact - 1.0).abs() > NOISE / 10.0));
    }

    #[test]
    fn the_host_s_clock_leaves_out_what_was_simulated_and_has_what_it_waited_for() {
        let (_, mut clock) = clock("");
        clock.wait_until(1e4);
        assert!(clock.host() >= 1e4);
        clock.wait_until(5.0);
        assert!(clock.host() < 2e4);
        assert!(near(clock.simulated(Duration::from_secs(1 << 30), 7.0), 7.0));
        assert!(near(clock.host(), clock.waited));
    }

    #[test]
    fn a_shared_clock_is_behind_neither_the_work_nor_its_simulation() {
        let (_, mut clock) = clock("time=shared");
        clock.wait_until(1e-3);
        assert!(clock.host() >= 1e-3);
        // What took longer here than there is done now; what takes longer there is done then.
        assert!(clock.simulated(Duration::from_millis(1), 1e-9) >= 1e-3);
        assert!(near(clock.simulated(Duration::from_millis(1), 1e4), 1e4));
    }
}
