//! What the machine did while a block was measured.
//!
//! Enters: /proc and /sys, or NVML, read just before and just after a block, outside its timing. Leaves: a
//! [`BlockTelemetry`] and, from it alone, a [`TelemetryVerdict`]. It does not get the times measured in the block, so no block can be
//! rejected for being slow.
//!
//! Load is that of the processors that this process may use. The kernel counts CPU time in ticks, mostly of 10 ms, so load is measured over
//! windows of at least [`LOAD_WINDOW`]: short blocks are judged together when enough of them have passed; at the end of a visit a shorter
//! window must do. A tick may fall on either side of a window's edge on each core that this process keeps busy, so one tick per such core is
//! counted as our own: foreign load is understated by at most that, and never overstated. The more such cores, the longer is a window.

use std::time::{Duration, Instant};

use super::cgroup::Cgroup;
use super::environment::frequency_mhz;
use super::nvml::{Gpu, GpuSample, Throttle, ThrottleBits};
use super::processors;
use super::system_files::Root;
use hbmark_core::result::{BlockTelemetry, Cause, Limits, load_rejects};

/// The shortest time over which CPU load is judged: 20 ticks of 10 ms.
pub const LOAD_WINDOW: Duration = Duration::from_millis(200);

/// And where no more blocks follow: one foreign tick alone is not above the limit.
const LAST_WINDOW: Duration = Duration::from_millis(50);

/// A pause between blocks that no longer counts as time beside them.
const LONG_PAUSE: Duration = Duration::from_millis(500);

/// Observes the machine around the blocks.
pub trait Telemetry {
    /// Called before the clock of a block starts.
    fn before_block(&mut self);
    /// Called after the clock of a block has stopped.
    fn after_block(&mut self) -> BlockTelemetry;
    /// The load over the blocks since the last report, once they are long enough together. `last`: no more blocks follow.
    fn load(&mut self, _last: bool) -> Option<CpuLoad> {
        None
    }
}

/// Cores that other processes kept busy, over some blocks.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct CpuLoad {
    /// The last so many blocks.
    pub blocks: usize,
    pub foreign_cores: Option<f64>,
    pub steal_cores: Option<f64>,
}

/// Counters of the host at one moment.
#[derive(Debug, Clone, Default, PartialEq)]
struct HostReading {
    at: Duration,
    /// Ticks of the watched processors together that were neither idle, waiting nor stolen.
    busy: Option<u64>,
    steal: Option<u64>,
    /// Microseconds for which a CPU quota held cores back.
    held_back_us: Option<u64>,
    /// How often the watched processors slowed down for their heat.
    heat: Option<u64>,
    /// Ticks of all threads of this process.
    own: Option<u64>,
    minor_faults: Option<u64>,
    major_faults: Option<u64>,
    energy: Vec<EnergyCounter>,
}

/// A RAPL package counter in microjoules, and where it wraps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct EnergyCounter {
    count: u64,
    range: Option<u64>,
}

/// The CPU side: other processes, steal, quota, heat, faults, clock, package energy.
#[derive(Debug)]
pub struct HostTelemetry {
    root: Root,
    /// Those that this process may use; none where they are not known, and all are watched.
    processors: Vec<usize>,
    /// The groups that have a CPU quota, if any has.
    quota: Option<Cgroup>,
    /// Counters of slowdowns for heat.
    heat: Vec<String>,
    epoch: Instant,
    ticks_per_second: f64,
    block: Option<HostReading>,
    window: Option<Window>,
}

/// Blocks whose load was not reported yet.
#[derive(Debug)]
struct Window {
    /// What was counted up to the last long pause.
    before: Counted,
    from: HostReading,
    /// At the end of the last block.
    to: HostReading,
    blocks: usize,
}

impl Window {
    fn counted(&self, ticks_per_second: f64) -> Counted {
        let (before, now) = (self.before, Counted::between(&self.from, &self.to, ticks_per_second));
        let sum = |a: Option<f64>, b: Option<f64>| Some(a? + b?);
        Counted {
            wall: before.wall + now.wall,
            own: before.own + now.own,
            foreign: sum(before.foreign, now.foreign),
            steal: sum(before.steal, now.steal),
        }
    }
}

/// Ticks over blocks.
#[derive(Debug, Clone, Copy)]
struct Counted {
    wall: Duration,
    own: f64,
    /// Less what may be our own at the edges.
    foreign: Option<f64>,
    steal: Option<f64>,
}

impl Counted {
    const NOTHING: Self = Self { wall: Duration::ZERO, own: 0.0, foreign: Some(0.0), steal: Some(0.0) };

    fn between(from: &HostReading, to: &HostReading, ticks_per_second: f64) -> Self {
        let wall = to.at.saturating_sub(from.at);
        if wall.is_zero() {
            return Self::NOTHING;
        }
        let ticks = |before, after| advance(before, after).map(|ticks| ticks as f64);
        let own = ticks(from.own, to.own);
        let foreign = ticks(from.busy, to.busy).zip(own).map(|(busy, own)| {
            let edge_ticks = (own / (wall.as_secs_f64() * ticks_per_second)).ceil();
            busy - own - edge_ticks
        });
        Self { wall, own: own.unwrap_or(0.0), foreign, steal: ticks(from.steal, to.steal) }
    }

    /// The time over which a tick at the edge of each of our own cores hides no more load than a block bears.
    fn enough(&self, ticks_per_second: f64) -> Duration {
        let own_cores = self.own / (self.wall.as_secs_f64() * ticks_per_second);
        let seconds = own_cores / ticks_per_second / Limits::default().foreign_cores;
        Duration::try_from_secs_f64(seconds).map_or(LOAD_WINDOW, |long| long.max(LOAD_WINDOW))
    }
}

impl HostTelemetry {
    /// Watches this machine.
    pub fn new() -> Self {
        Self::at(Root::system())
    }

    /// Watches a machine planted in a folder.
    pub fn at(root: Root) -> Self {
        let processors = processors::allowed(&root);
        let groups = Cgroup::of_this_process(&root);
        let counters = |processor: &usize| {
            let folder = processors::folder(*processor);
            ["core", "package"].map(|of| format!("{folder}/thermal_throttle/{of}_throttle_count"))
        };
        Self {
            quota: groups.cpu_quota_cores(&root).map(|_| groups),
            heat: processors.iter().flat_map(counters).filter(|path| root.exists(path)).collect(),
            processors,
            root,
            epoch: Instant::now(),
            ticks_per_second: rustix::param::clock_ticks_per_second() as f64,
            block: None,
            window: None,
        }
    }

    fn begin(&mut self, now: HostReading) {
        let (from, to) = (now.clone(), now.clone());
        match &mut self.window {
            // What happened in a long pause does not describe the blocks on both sides of it.
            Some(window) if now.at.saturating_sub(window.to.at) > LONG_PAUSE => {
                let before = window.counted(self.ticks_per_second);
                *window = Window { before, from, to, blocks: window.blocks };
            }
            Some(_) => {}
            none => *none = Some(Window { before: Counted::NOTHING, from, to, blocks: 0 }),
        }
        self.block = Some(now);
    }

    fn end(&mut self, now: HostReading) -> BlockTelemetry {
        let Some(before) = self.block.take() else { return BlockTelemetry::default() };
        let heat = advance(before.heat, now.heat).filter(|slowdowns| *slowdowns > 0);
        let held_back = advance(before.held_back_us, now.held_back_us);
        let microseconds = now.at.saturating_sub(before.at).as_micros();
        let telemetry = BlockTelemetry {
            throttle_reasons: heat.map(|_| "cpu_thermal".to_owned()).into_iter().collect(),
            held_back_cores: held_back.map(|held| held as f64 / microseconds.max(1) as f64),
            energy_joules: joules(&before.energy, &now.energy),
            major_faults: advance(before.major_faults, now.major_faults),
            minor_faults: advance(before.minor_faults, now.minor_faults),
            cpu_frequency_mhz: frequency_mhz(&self.root, &self.processors),
            ..BlockTelemetry::default()
        };
        if let Some(window) = &mut self.window {
            window.blocks += 1;
            window.to = now;
        }
        telemetry
    }
}

impl Default for HostTelemetry {
    fn default() -> Self {
        Self::new()
    }
}

impl Telemetry for HostTelemetry {
    fn before_block(&mut self) {
        let now = self.reading(self.epoch.elapsed());
        self.begin(now);
    }
    fn after_block(&mut self) -> BlockTelemetry {
        let now = self.reading(self.epoch.elapsed());
        self.end(now)
    }
    fn load(&mut self, last: bool) -> Option<CpuLoad> {
        let window = self.window.as_ref()?;
        let (blocks, counted) = (window.blocks, window.counted(self.ticks_per_second));
        let enough = if last { LAST_WINDOW } else { counted.enough(self.ticks_per_second) };
        let long = blocks > 0 && counted.wall >= enough;
        if long || last {
            self.window = None;
        }
        long.then(|| CpuLoad::over(&counted, blocks, self.ticks_per_second))
    }
}

impl HostTelemetry {
    fn reading(&self, at: Duration) -> HostReading {
        let root = &self.root;
        let cpu = root.read("proc/stat").and_then(|text| cpu_ticks(&text, &self.processors));
        let own = root.read("proc/self/stat").and_then(|text| own_counters(&text));
        // Beside the packages there may be `psys`, the whole platform, which counts them again.
        let is_package = |zone: &String| {
            root.line(&format!("{zone}/name")).is_some_and(|name| name.starts_with("package"))
        };
        let zones = root.numbered("sys/class/powercap", "intel-rapl:");
        let energy = zones.into_iter().filter(is_package).map(|package| {
            let count = root.number(&format!("{package}/energy_uj"))?;
            Some(EnergyCounter { count, range: root.number(&format!("{package}/max_energy_range_uj")) })
        });
        HostReading {
            at,
            busy: cpu.map(|(busy, _)| busy),
            steal: cpu.map(|(_, steal)| steal),
            held_back_us: self.quota.as_ref().and_then(|groups| groups.held_back_us(root)),
            heat: self.heat.iter().filter_map(|path| root.number(path)).reduce(u64::saturating_add),
            own: own.map(|own| own.ticks),
            minor_faults: own.map(|own| own.minor_faults),
            major_faults: own.map(|own| own.major_faults),
            // A package that cannot be read makes the sum meaningless.
            energy: energy.collect::<Option<Vec<_>>>().unwrap_or_default(),
        }
    }
}

impl CpuLoad {
    fn over(counted: &Counted, blocks: usize, ticks_per_second: f64) -> Self {
        let wall_ticks = counted.wall.as_secs_f64() * ticks_per_second;
        let cores = |ticks: Option<f64>| {
            ticks.map(|ticks| ticks.max(0.0) / wall_ticks).filter(|cores| cores.is_finite())
        };
        Self { blocks, foreign_cores: cores(counted.foreign), steal_cores: cores(counted.steal) }
    }

    /// The cause for which its blocks are thrown away; of two the load, and the blocks' telemetry has both.
    pub fn reject(&self, limits: &Limits) -> Option<Cause> {
        load_rejects(self.foreign_cores, self.steal_cores, limits)
    }
}

/// The increase of a counter; `None` when it is unknown or ran backwards.
fn advance(before: Option<u64>, after: Option<u64>) -> Option<u64> {
    after?.checked_sub(before?)
}

/// Busy and stolen ticks of these processors in /proc/stat, of all where none is known.
fn cpu_ticks(stat: &str, processors: &[usize]) -> Option<(u64, u64)> {
    let lines = || stat.lines().map_while(|line| line.strip_prefix("cpu"));
    let is_ours = |line: &&str| {
        let number = line.split_whitespace().next().and_then(|number| number.parse().ok());
        number.is_some_and(|number: usize| processors.contains(&number))
    };
    // The first line is rounded to ticks once, and that of each processor by itself.
    if processors.is_empty() || lines().skip(1).all(|line| is_ours(&line)) {
        return ticks_of(lines().next().filter(|line| line.starts_with(' '))?);
    }
    lines().skip(1).filter(is_ours).map(ticks_of).reduce(|sum, line| {
        let ((busy, steal), (more_busy, more_steal)) = (sum?, line?);
        Some((busy.checked_add(more_busy)?, steal.checked_add(more_steal)?))
    })?
}

/// Of a line without its name: `user nice system idle iowait irq softirq steal ...`.
fn ticks_of(line: &str) -> Option<(u64, u64)> {
    let fields = line.trim_start_matches(|c: char| c.is_ascii_digit()).split_whitespace();
    let ticks: Vec<u64> = fields.map_while(|field| field.parse().ok()).collect();
    // Guest time is already inside user and nice.
    let &[user, nice, system, _idle, _iowait, irq, softirq, steal, ..] = ticks.as_slice() else {
        return None;
    };
    let busy =
        [user, nice, system, irq, softirq].iter().try_fold(0_u64, |sum, ticks| sum.checked_add(*ticks))?;
    Some((busy, steal))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct OwnCounters {
    ticks: u64,
    minor_faults: u64,
    major_faults: u64,
}

/// Of /proc/self/stat: `pid (name) state ppid pgrp session tty_nr tpgid flags minflt cminflt majflt cmajflt utime stime ...`.
fn own_counters(text: &str) -> Option<OwnCounters> {
    // A name may have spaces and brackets.
    let behind_name = text.rsplit_once(')')?.1;
    let numbers = behind_name.split_whitespace().skip(1).map_while(|field| field.parse::<i64>().ok());
    let numbers: Vec<i64> = numbers.collect();
    let &[_, _, _, _, _, _, minor, _, major, _, user, system, ..] = numbers.as_slice() else { return None };
    Some(OwnCounters {
        ticks: u64::try_from(user.checked_add(system)?).ok()?,
        minor_faults: u64::try_from(minor).ok()?,
        major_faults: u64::try_from(major).ok()?,
    })
}

/// Energy of all packages between two readings, across one wrap of a counter.
fn joules(before: &[EnergyCounter], after: &[EnergyCounter]) -> Option<f64> {
    if before.is_empty() || before.len() != after.len() {
        return None;
    }
    let mut microjoules = 0_u64;
    for (before, after) in before.iter().zip(after) {
        let spent = match after.count.checked_sub(before.count) {
            Some(spent) => spent,
            None => after.range?.checked_sub(before.count)?.checked_add(after.count)?,
        };
        microjoules = microjoules.checked_add(spent)?;
    }
    Some(microjoules as f64 / 1e6)
}

/// The side of the GPUs that a step runs on, and the host's beside it. Energy is that of the GPUs.
#[derive(Debug)]
pub struct NvmlTelemetry {
    gpus: Vec<Gpu>,
    /// GPUs of the step.
    count: usize,
    host: HostTelemetry,
    before: Option<(Instant, Vec<GpuSample>)>,
}

impl NvmlTelemetry {
    /// Watches the GPUs of a step, as many of them as NVML knows.
    pub fn new(gpus: Vec<Gpu>, count: usize, host: HostTelemetry) -> Self {
        Self { gpus, count, host, before: None }
    }
}

impl Telemetry for NvmlTelemetry {
    fn before_block(&mut self) {
        self.host.before_block();
        let begin = Instant::now();
        let mut before: Vec<GpuSample> = self.gpus.iter().map(Gpu::sample).collect();
        // Again, and last: what the device spends while the rest is read is not the block's.
        for (gpu, sample) in self.gpus.iter().zip(&mut before) {
            sample.energy_millijoules = gpu.energy_millijoules();
        }
        self.before = Some((begin, before));
    }
    fn after_block(&mut self) -> BlockTelemetry {
        // The GPUs first: their clocks fall soon after the last kernel.
        let after: Vec<GpuSample> = self.gpus.iter().map(Gpu::sample).collect();
        let host = self.host.after_block();
        let (begin, mut before) = self.before.take().unwrap_or_else(|| (Instant::now(), Vec::new()));
        before.resize_with(after.len(), GpuSample::default);
        let apart = begin.elapsed();
        let blocks = before.iter().zip(&after).map(|(before, after)| gpu_block(before, after, apart, &host));
        let block = blocks.reduce(of_both).unwrap_or(host);
        if self.gpus.len() == self.count {
            return block;
        }
        // Of some of them it would pass for that of all.
        BlockTelemetry { power_watts: None, energy_joules: None, ..block }
    }
    fn load(&mut self, last: bool) -> Option<CpuLoad> {
        self.host.load(last)
    }
}

/// The share of a block that a counter of violations must have advanced by. The counters are known to move by single nanoseconds where nothing
/// was held down, and a GPU that stood still for so long would have lengthened the block by a tenth of what a result is meant to be certain to.
const VIOLATION_SHARE: f64 = 1e-3;

/// The telemetry of a block from two samples of a GPU around it, so much time apart, added to the host's.
pub fn gpu_block(
    before: &GpuSample,
    after: &GpuSample,
    apart: Duration,
    host: &BlockTelemetry,
) -> BlockTelemetry {
    // Before a block the GPU may have been idle.
    let idle = ThrottleBits(1);
    let sampled = before.throttle.unwrap_or_default().0 & !idle.0 | after.throttle.unwrap_or_default().0;
    let mut reasons = ThrottleBits(sampled).reasons();
    // The counters catch what fell between the two samples.
    let violations = [
        (before.thermal_violation, after.thermal_violation, Throttle::ThermalViolation),
        (before.power_violation, after.power_violation, Throttle::SwPowerCap),
        (before.board_violation, after.board_violation, Throttle::BoardLimit),
    ];
    for (before, after, reason) in violations {
        let held = |nanoseconds| nanoseconds as f64 > VIOLATION_SHARE * apart.as_nanos() as f64;
        if advance(before, after).is_some_and(held) && !reasons.contains(&reason) {
            reasons.push(reason);
        }
    }
    BlockTelemetry {
        sm_clock_mhz: after.sm_clock_mhz.map(f64::from),
        memory_clock_mhz: after.memory_clock_mhz.map(f64::from),
        power_watts: after.power_watts,
        temperature_celsius: after.temperature_celsius,
        throttle_reasons: reasons.iter().map(ToString::to_string).collect(),
        energy_joules: advance(before.energy_millijoules, after.energy_millijoules)
            .map(|millijoules| millijoules as f64 / 1e3),
        // One of them is this process, under whatever id; an empty list means that the driver reports none.
        gpu_other_processes: after.processes.and_then(|processes| processes.checked_sub(1)),
        ..host.clone()
    }
}

/// The telemetry of a block of several GPUs: the lowest clocks and the highest temperature, the power and the energy of all, whatever held any of them
/// down.
fn of_both(mut one: BlockTelemetry, other: BlockTelemetry) -> BlockTelemetry {
    let join = |a: Option<f64>, b: Option<f64>, both: fn(f64, f64) -> f64| Some(both(a?, b?));
    let mut throttle_reasons = std::mem::take(&mut one.throttle_reasons);
    for reason in other.throttle_reasons {
        if !throttle_reasons.contains(&reason) {
            throttle_reasons.push(reason);
        }
    }
    BlockTelemetry {
        sm_clock_mhz: join(one.sm_clock_mhz, other.sm_clock_mhz, f64::min),
        memory_clock_mhz: join(one.memory_clock_mhz, other.memory_clock_mhz, f64::min),
        power_watts: join(one.power_watts, other.power_watts, |a, b| a + b),
        temperature_celsius: join(one.temperature_celsius, other.temperature_celsius, f64::max),
        throttle_reasons,
        energy_joules: join(one.energy_joules, other.energy_joules, |a, b| a + b),
        gpu_other_processes: one.gpu_other_processes.max(other.gpu_other_processes),
        ..one
    }
}

/// Whether a block counts, and what is to be known about it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TelemetryVerdict {
    /// The cause for which the block is thrown away and measured again.
    pub reject: Option<Cause>,
    /// What held during the block but does not invalidate it.
    pub conditions: Vec<Cause>,
}

/// Judges a block by its telemetry only; [`CpuLoad::reject`] judges several blocks together.
pub fn verdict(block: &BlockTelemetry, limits: &Limits) -> TelemetryVerdict {
    let slowed = block.slowed_by();
    let others = block.throttle_reasons.iter().filter(|name| !slowed.contains(name));
    let mut conditions: Vec<Cause> = others.cloned().map(condition).collect();
    if let Some(processes) = block.gpu_other_processes.filter(|others| *others > 0) {
        conditions.push(Cause::GpuShared { processes });
    }
    TelemetryVerdict { reject: block.rejects(limits), conditions }
}

fn condition(reason: String) -> Cause {
    match Throttle::parse(&reason) {
        Some(Throttle::SwPowerCap) => Cause::PowerCapped,
        _ => Cause::ClockEvent { reason },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::system_files::fake_root;

    /// The time between the samples of a block.
    const BLOCK: Duration = Duration::from_micros(200);

    fn throttled(bits: u64) -> BlockTelemetry {
        let sample = GpuSample { throttle: Some(ThrottleBits(bits)), ..GpuSample::default() };
        gpu_block(&GpuSample::default(), &sample, BLOCK, &BlockTelemetry::default())
    }

    fn verdict(block: &BlockTelemetry) -> (Option<Cause>, Vec<Cause>) {
        let judgement = super::verdict(block, &Limits::default());
        (judgement.reject, judgement.conditions)
    }

    #[test]
    fn thermal_and_hardware_slowdowns_reject_and_are_named() {
        let throttled_by = |reasons: &[&str]| {
            Some(Cause::Throttled { reasons: reasons.iter().map(ToString::to_string).collect() })
        };
        for (bit, reason) in
            [(0x8, "hw_slowdown"), (0x20, "sw_thermal"), (0x40, "hw_thermal"), (0x80, "hw_power_brake")]
        {
            assert_eq!(verdict(&throttled(bit)), (throttled_by(&[reason]), vec![]));
        }
        assert_eq!(verdict(&throttled(0x48)).0, throttled_by(&["hw_slowdown", "hw_thermal"]));
    }

    #[test]
    fn power_cap_idle_and_unknown_bits_are_conditions() {
        assert_eq!(verdict(&throttled(0x4)), (None, vec![Cause::PowerCapped]));
        assert_eq!(verdict(&throttled(0x1)), (None, vec![Cause::ClockEvent { reason: "gpu_idle".into() }]));
        assert_eq!(
            verdict(&throttled(0x4000)),
            (None, vec![Cause::ClockEvent { reason: "unknown_0x4000".into() }])
        );
        assert_eq!(verdict(&throttled(0)), (None, vec![]));
    }

    #[test]
    fn a_slowdown_between_two_samples_is_caught_by_its_counter() {
        let at = |thermal, power| GpuSample {
            thermal_violation: Some(thermal),
            power_violation: Some(power),
            energy_millijoules: Some(thermal),
            processes: Some(1),
            ..GpuSample::default()
        };
        let host = BlockTelemetry { minor_faults: Some(3), ..BlockTelemetry::default() };
        let block = gpu_block(&at(100, 5), &at(2600, 5), BLOCK, &host);
        assert_eq!(block.throttle_reasons, ["thermal_violation"]);
        assert_eq!(
            (block.energy_joules, block.minor_faults, block.gpu_other_processes),
            (Some(2.5), Some(3), Some(0))
        );
        assert_eq!(verdict(&block).0, Some(Cause::Throttled { reasons: vec!["thermal_violation".into()] }));
        let capped = gpu_block(&at(1, 5), &at(1, 206), BLOCK, &BlockTelemetry::default());
        assert_eq!(verdict(&capped), (None, vec![Cause::PowerCapped]));
    }

    #[test]
    fn a_counter_that_moves_by_nothing_to_speak_of_is_no_slowdown() {
        let at = |thermal| GpuSample { thermal_violation: Some(thermal), ..GpuSample::default() };
        let block = |held: u64, apart| gpu_block(&at(7), &at(7 + held), apart, &BlockTelemetry::default());
        let second = Duration::from_secs(1);
        for (held, apart) in [(1, BLOCK), (1, second), (999_999, second)] {
            assert_eq!(verdict(&block(held, apart)), (None, vec![]), "{held} ns of {apart:?}");
        }
        for (held, apart) in [(201, BLOCK), (1_000_001, second)] {
            assert!(verdict(&block(held, apart)).0.is_some(), "{held} ns of {apart:?}");
        }
    }

    #[test]
    fn an_idle_gpu_before_the_block_is_no_condition() {
        let idle = GpuSample { throttle: Some(ThrottleBits(1)), ..GpuSample::default() };
        let busy = GpuSample { throttle: Some(ThrottleBits(0)), ..GpuSample::default() };
        assert!(gpu_block(&idle, &busy, BLOCK, &BlockTelemetry::default()).throttle_reasons.is_empty());
    }

    #[test]
    fn foreign_load_and_steal_reject_above_their_limit_only() {
        let cause = |foreign_cores, steal_cores| {
            CpuLoad { blocks: 1, foreign_cores, steal_cores }.reject(&Limits::default())
        };
        assert_eq!(cause(Some(0.7), Some(0.5)), Some(Cause::ForeignLoad { cores: 0.7 }));
        assert_eq!(cause(Some(0.2), Some(0.1)), None);
        assert_eq!(cause(None, Some(0.5)), Some(Cause::CpuSteal { cores: 0.5 }));
        assert_eq!(cause(None, None), None, "what is unknown rejects nothing");
        let patient = Limits { foreign_cores: f64::INFINITY, steal_cores: 0.1 };
        assert_eq!(CpuLoad { foreign_cores: Some(3.0), ..CpuLoad::default() }.reject(&patient), None);
    }

    /// A reading at `ms` with the busy, own and stolen ticks so far.
    fn reading(ms: u64, busy: u64, own: u64, steal: u64) -> HostReading {
        HostReading {
            at: Duration::from_millis(ms),
            busy: Some(busy),
            own: Some(own),
            steal: Some(steal),
            ..HostReading::default()
        }
    }

    fn scripted_host() -> HostTelemetry {
        let (_keep, root) = fake_root(&[]);
        HostTelemetry { ticks_per_second: 100.0, ..HostTelemetry::at(root) }
    }

    /// Blocks from one reading to another; the load reported after each.
    fn told(host: &mut HostTelemetry, blocks: &[(HostReading, HostReading)]) -> Vec<Option<CpuLoad>> {
        let block = |(from, to): &(HostReading, HostReading)| {
            host.begin(from.clone());
            host.end(to.clone());
            host.load(false)
        };
        blocks.iter().map(block).collect()
    }

    #[test]
    fn foreign_load_is_what_this_process_did_not_do() {
        // One second: 171 ticks busy, 100 of them ours, one lost at the edge.
        let block = (reading(0, 1000, 500, 0), reading(1000, 1171, 600, 30));
        let load = told(&mut scripted_host(), &[block])[0].unwrap();
        assert!((load.foreign_cores.unwrap() - 0.7).abs() < 1e-9);
        assert!((load.steal_cores.unwrap() - 0.3).abs() < 1e-9);
    }

    #[test]
    fn a_tick_at_the_edge_is_not_foreign_load() {
        let block = (reading(0, 0, 0, 0), reading(200, 82, 78, 0));
        assert_eq!(told(&mut scripted_host(), &[block])[0].unwrap().foreign_cores, Some(0.0));
    }

    #[test]
    fn short_blocks_are_judged_together() {
        // Between two blocks the canary works as long as they do.
        let block = |i: u64| {
            let at = |ms: u64, ticks| reading(ms, 2 * ticks, ticks, 0);
            (at(i * 100, i * 10), at(i * 100 + 50, i * 10 + 5))
        };
        let told = told(&mut scripted_host(), &[block(0), block(1), block(2), block(3)]);
        assert_eq!((told[0], told[1], told[3]), (None, None, None));
        // 250 ms: 50 ticks busy, 25 of them ours, one at the edge.
        let load = told[2].unwrap();
        assert_eq!((load.blocks, load.steal_cores), (3, Some(0.0)));
        assert!((load.foreign_cores.unwrap() - 24.0 / 25.0).abs() < 1e-9);
    }

    #[test]
    fn the_last_blocks_of_a_visit_are_judged_over_the_time_there_is() {
        let last = |ms: u64, busy| {
            let mut host = scripted_host();
            assert_eq!(told(&mut host, &[(reading(0, 0, 0, 0), reading(ms, busy, 0, 0))]), [None]);
            let load = host.load(true);
            assert_eq!(host.load(true), None, "an answer is given once");
            load.map(|load| (load.blocks, load.reject(&Limits::default()).is_some()))
        };
        assert_eq!(last(60, 0), Some((1, false)));
        assert_eq!(last(60, 1), Some((1, false)), "one tick is nothing");
        assert_eq!(last(60, 6), Some((1, true)));
        assert_eq!(last(40, 8), None, "too short to tell");
        assert_eq!(scripted_host().load(true), None);
    }

    #[test]
    fn a_window_leaves_long_pauses_out_and_keeps_the_blocks_on_both_sides() {
        let first = (reading(0, 0, 0, 0), reading(50, 5, 5, 0));
        let second = (reading(5_000, 900, 5, 0), reading(5_050, 905, 10, 0));
        let mut host = scripted_host();
        assert_eq!(told(&mut host, &[first, second]), [None, None]);
        assert_eq!(
            host.load(true).unwrap(),
            CpuLoad { blocks: 2, foreign_cores: Some(0.0), steal_cores: Some(0.0) }
        );
        // A canary of a second between blocks of a tenth, beside which one core is another's.
        let block = |i: u64| {
            let ticks = i * 10;
            (
                reading(i * 1_100, 100 * i + 2 * ticks, ticks, 0),
                reading(i * 1_100 + 100, 100 * i + 2 * ticks + 20, ticks + 10, 0),
            )
        };
        let mut host = scripted_host();
        let told = told(&mut host, &[block(0), block(1), block(2)]);
        // Of 40 busy ticks 20 are ours, and one at the edges of each block.
        assert_eq!(
            told,
            [
                None,
                Some(CpuLoad { blocks: 2, foreign_cores: Some(18.0 / 20.0), steal_cores: Some(0.0) }),
                None
            ]
        );
    }

    #[test]
    fn many_cores_of_our_own_hide_no_foreign_load() {
        // 64 cores of our own with a tick of each at the edges, and half a core of another's, in blocks of 200 ms.
        let at = |block: u64| {
            let own = block * 64 * 20;
            reading(block * 200, own + if block > 0 { 64 } else { 0 } + block * 10, own, 0)
        };
        let mut host = scripted_host();
        let blocks: Vec<_> = (0..16).map(|block| (at(block), at(block + 1))).collect();
        let mut told = told(&mut host, &blocks);
        let last = told.pop().unwrap().expect("3.2 s are enough for 64 cores");
        assert!(told.iter().all(Option::is_none), "{told:?}");
        assert_eq!((last.blocks, last.foreign_cores), (16, Some(0.5)));
    }

    #[test]
    fn a_quota_that_holds_cores_back_and_heat_reject() {
        let after = |held_back_us, heat| {
            let mut host = scripted_host();
            let before = reading(0, 0, 0, 0);
            host.begin(HostReading { held_back_us: Some(7), heat: Some(3), ..before });
            host.end(HostReading { held_back_us, heat, ..reading(100, 10, 10, 0) })
        };
        assert_eq!(verdict(&after(Some(7), Some(3))), (None, vec![]));
        assert_eq!(verdict(&after(Some(5_007), Some(3))), (None, vec![]), "a twentieth of a core");
        assert_eq!(verdict(&after(Some(50_007), Some(3))).0, Some(Cause::CpuQuota { cores: 0.5 }));
        let hot = Cause::Throttled { reasons: vec!["cpu_thermal".into()] };
        assert_eq!(verdict(&after(None, Some(4))).0, Some(hot));
        assert_eq!(verdict(&after(None, None)), (None, vec![]));
    }

    #[test]
    fn energy_survives_a_wrap_and_needs_every_package() {
        let at = |count| EnergyCounter { count, range: Some(1_000_000) };
        assert_eq!(joules(&[at(900_000)], &[at(400_000)]), Some(0.5));
        assert_eq!(joules(&[at(0), at(0)], &[at(500_000), at(1_000_000)]), Some(1.5));
        assert_eq!(joules(&[at(0)], &[]), None);
        assert_eq!(joules(&[], &[]), None);
        let unbounded = EnergyCounter { count: 5, range: None };
        assert_eq!(joules(&[unbounded], &[EnergyCounter { count: 1, range: None }]), None);
    }

    #[test]
    fn planted_proc_files_are_read() {
        let own =
            format!("7 (hb (x) y) R 1 1 1 0 -1 0 11 0 22 0 30 12 0 0 20 0 1 0 9 8 7 {}", "0 ".repeat(28));
        let (_keep, root) = fake_root(&[
            ("proc/stat", "cpu  100 20 30 9999 50 6 7 40 3 0\ncpu0 1 2 3\n"),
            ("proc/self/stat", own.trim()),
            ("sys/class/powercap/intel-rapl:0/name", "package-0\n"),
            ("sys/class/powercap/intel-rapl:0/energy_uj", "77\n"),
            ("sys/class/powercap/intel-rapl:0/max_energy_range_uj", "100\n"),
            ("sys/class/powercap/intel-rapl:0:0/energy_uj", "33\n"),
            ("sys/class/powercap/intel-rapl:1/name", "psys\n"),
            ("sys/class/powercap/intel-rapl:1/energy_uj", "99\n"),
        ]);
        let reading = HostTelemetry::at(root).reading(Duration::ZERO);
        assert_eq!((reading.busy, reading.steal, reading.own), (Some(163), Some(40), Some(42)));
        assert_eq!((reading.minor_faults, reading.major_faults), (Some(11), Some(22)));
        assert_eq!(
            reading.energy,
            [EnergyCounter { count: 77, range: Some(100) }],
            "a core is inside its package, and that inside the platform"
        );
    }

    #[test]
    fn only_the_processors_that_this_process_may_use_are_read() {
        let (_keep, root) = fake_root(&[
            (
                "proc/stat",
                "cpu  160 0 0 0 0 0 0 9 0 0\ncpu0 100 0 0 0 0 0 0 5 0 0\ncpu1 20 0 0 0 0 0 0 1 0 0\ncpu10 40 0 0 0 0 0 0 3 0 0\nintr 1\n",
            ),
            ("proc/self/status", "Cpus_allowed_list:\t1,10\n"),
            ("proc/self/cgroup", "0::/\n"),
            ("sys/fs/cgroup/cpu.max", "50000 100000\n"),
            ("sys/fs/cgroup/cpu.stat", "throttled_usec 77\n"),
            ("sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count", "100\n"),
            ("sys/devices/system/cpu/cpu1/thermal_throttle/core_throttle_count", "2\n"),
            ("sys/devices/system/cpu/cpu1/thermal_throttle/package_throttle_count", "3\n"),
        ]);
        let reading = HostTelemetry::at(root.clone()).reading(Duration::ZERO);
        assert_eq!((reading.busy, reading.steal), (Some(60), Some(4)));
        assert_eq!((reading.held_back_us, reading.heat), (Some(77), Some(5)));
        let stat = root.read("proc/stat").unwrap();
        assert_eq!(cpu_ticks(&stat, &[0, 1, 10]), Some((160, 9)), "all of them");
        assert_eq!(cpu_ticks(&stat, &[]), Some((160, 9)));
        assert_eq!(cpu_ticks(&stat, &[2]), None);
    }

    #[test]
    fn a_machine_that_tells_nothing_gives_nothing() {
        let (_keep, root) = fake_root(&[("proc/stat", "intr 1 2 3\n"), ("proc/self/stat", "garbage")]);
        let mut host = HostTelemetry::at(root);
        host.before_block();
        assert_eq!(host.after_block(), BlockTelemetry::default());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn this_process_sees_its_own_faults() {
        let mut host = HostTelemetry::new();
        host.before_block();
        assert!(host.after_block().minor_faults.is_some());
    }
}
