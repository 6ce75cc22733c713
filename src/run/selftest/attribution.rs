//! Random plants: over many seeds, severities and pairs of faults, is the cause that is named first the one that was planted?
//!
//! Enters: nothing. Leaves: one check a kind, with the counts of right, unexplained and wrong labels, and the confusions by name. A fault too
//! weak to matter may leave the healthy word standing, as long as that word is still true; what may never happen is another fault's
//! name.

use std::collections::BTreeMap;
use std::fmt::Write;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::faults::grid;
use super::serve::{self, ServeScenario};
use super::step::{self, RunScenario, decode};
use super::{Check, Record, label};
use hbmark_core::model::Dtype;
use hbmark_core::result::Cause;
use hbmark_core::units::{Bytes, Nanos};

/// Plants of each sort.
const RUNS: usize = 1_300;
const SERVED: usize = 200;
const PAIRS: usize = 300;
/// Wrong labels that may be, of one.
const ALLOWED: f64 = 0.01;

const US: f64 = 1e3;
const MS: f64 = 1e6;

/// A plant and the words that are true of it.
struct Truth {
    planted: &'static str,
    /// Any of these is right.
    right: Vec<&'static str>,
}

/// Labels counted by what they were for.
#[derive(Default)]
struct Confusion {
    right: usize,
    unexplained: usize,
    wrong: BTreeMap<(String, String), usize>,
}

impl Confusion {
    fn enter(&mut self, truth: &Truth, named: &str) {
        if truth.right.contains(&named) {
            self.right += 1;
        } else if named == "unexplained" {
            self.unexplained += 1;
        } else {
            *self.wrong.entry((truth.planted.to_owned(), named.to_owned())).or_insert(0) += 1;
        }
    }

    fn check(&self, name: &str) -> Check {
        let wrong: usize = self.wrong.values().sum();
        let all = self.right + self.unexplained + wrong;
        let share = wrong as f64 / all.max(1) as f64;
        let mut detail = format!(
            "{all} plants: {} right, {} unexplained, {wrong} wrong ({:.2} %, at most {:.0} %)",
            self.right,
            self.unexplained,
            share * 100.0,
            ALLOWED * 100.0
        );
        for ((planted, named), count) in &self.wrong {
            let _ = write!(detail, "; {planted} called {named}: {count}");
        }
        Check::new("attribution", name, all > 0 && share <= ALLOWED, detail)
    }
}

/// A random number between two, evenly on a log scale: severities span decades.
fn severity(random: &mut ChaCha8Rng, low: f64, high: f64) -> f64 {
    (random.random_range(low.ln()..high.ln())).exp()
}

/// What stands for a device without a fault of its own.
const HEALTHY: &str = "memory_bound_decode";

/// One random fault of a run, with the words that are true of it.
#[expect(clippy::too_many_lines, reason = "a table: one entry a plant")]
fn step_fault(random: &mut ChaCha8Rng) -> (RunScenario, Truth) {
    use step::StepFault as Fault;
    let seed = random.random();
    let noise = severity(random, 0.001, 0.02);
    let on = |faults: Vec<Fault>| RunScenario::new(seed, faults).with_noise(noise);
    let truth = |planted, right: &[&'static str]| Truth { planted, right: right.to_vec() };
    // A healthy word stays true where the fault leaves bytes most of the step.
    let with = |planted, named, mild: bool| {
        let right = if mild { vec![named, HEALTHY] } else { vec![named] };
        Truth { planted, right }
    };
    match random.random_range(0..21) {
        0 => (on(vec![]), truth("nothing", &[HEALTHY])),
        1 => {
            let delay = severity(random, 5.0, 2_000.0);
            (on(vec![Fault::HostDelay(Nanos(delay * US))]), with("host delay", "host_bound", delay < 30.0))
        }
        2 => {
            let delay = severity(random, 5.0, 60.0);
            (on(vec![Fault::HiddenDelay(Nanos(delay * US))]), truth("hidden delay", &[HEALTHY]))
        }
        3 => {
            let spin = severity(random, 0.05, 100.0);
            (on(vec![Fault::Spin(Nanos(spin * US))]).profiled(), with("spin", "extra_kernel", spin < 1.5))
        }
        4 => {
            let loss = severity(random, 0.002, 0.4);
            // Between noise and a loss the canary rejects blocks without a name for the cause.
            let named: &[&str] =
                if loss < 0.06 { &["degraded", "noisy_machine", HEALTHY] } else { &["degraded"] };
            (on(vec![Fault::Hog(loss)]), truth("hog", named))
        }
        5 => {
            let times = random.random_range(1.0..4.0);
            let world = on(vec![Fault::KvTimes(times)]).with_cells(grid());
            (world, with("KV read again", "kv_costs_more", times < 2.2))
        }
        6 => {
            let (times, counted) = (random.random_range(1.0..6.0), random.random());
            let world = on(vec![Fault::Copies { times, counted }]);
            (world, with("copies", "engine_moves_more", times < 1.6))
        }
        7 => (on(vec![Fault::WeightsAs(Dtype::F32)]), truth("f32 weights", &["wrong_size_weights"])),
        8 => (on(vec![Fault::WeightsAs(Dtype::F16)]), truth("f16 weights", &["wrong_storage"])),
        9 => {
            let (share, time) = (random.random_range(0.02..0.3), severity(random, 2.0, 200.0));
            let fault = Fault::HostTail { share, time: Nanos(time * US) };
            // Rare or short, it hardly touches the mean; long, it keeps the interval from closing.
            let mut right = vec!["host_jitter", "not_converged"];
            if share * time < 20.0 {
                right.push(HEALTHY);
            }
            (on(vec![fault]), Truth { planted: "CPU stress", right })
        }
        10 => {
            let leak = severity(random, 2_048.0, 16e6);
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a size")]
            let bytes = Bytes(leak as u64);
            (on(vec![Fault::Leak(bytes)]), with("leak", "memory_leak", leak < 80_000.0))
        }
        11 => (on(vec![Fault::KvLeak]).with_cells(vec![decode(4, 512)]), truth("KV leak", &["kv_leak"])),
        12 => (on(vec![Fault::MarksElsewhere]), truth("wrong stream", &["marks_elsewhere"])),
        13 => {
            let rate =
                if random.random() { random.random_range(1.02..1.2) } else { random.random_range(0.8..0.98) };
            (on(vec![Fault::ClockRate(rate)]).with_blocks_of(0.05), truth("clock rate", &["clocks_disagree"]))
        }
        14 => (
            on(vec![Fault::OtherTokens(random.random_range(40..150))]),
            truth("other tokens", &["wrong_outputs"]),
        ),
        15 => {
            let share = severity(random, 0.01, 0.4);
            (on(vec![Fault::Skips(share)]), truth("skipped steps", &["impossible_time"]))
        }
        16 => {
            let deviation = severity(random, 0.003, 0.3);
            // Blocks that differ by a tenth are noise by any name.
            let mut right = vec!["not_converged"];
            if deviation > 0.06 {
                right.push("noisy_machine");
            }
            if deviation < 0.06 {
                right.push(HEALTHY);
            }
            (on(vec![Fault::Wanders(deviation)]), Truth { planted: "wandering blocks", right })
        }
        17 => {
            let share = random.random_range(0.02..0.9);
            let cause = Cause::Throttled { reasons: vec!["hw_power_brake".into()] };
            (on(vec![Fault::Rejected { cause, share }]), with("throttled", "throttled", share < 0.5))
        }
        18 => {
            let share = random.random_range(0.02..0.9);
            let cause = Cause::ForeignLoad { cores: 1.2 };
            (on(vec![Fault::Rejected { cause, share }]), with("foreign load", "foreign_load", share < 0.5))
        }
        19 => {
            let share = random.random_range(0.05..1.0);
            (on(vec![Fault::PowerCap(share)]), with("power cap", "power_capped", share < 0.7))
        }
        _ => {
            let time = random.random_range(300.0..3_000.0);
            let world =
                on(vec![Fault::Flat(Nanos(time * US))]).with_cells(vec![decode(1, 4096), decode(4, 4096)]);
            // The larger batch may be explained by its bytes where the flat time is short.
            (world, with("flat step", "launch_bound", time < 400.0))
        }
    }
}

/// Random faults of a step benchmark.
pub fn of_runs(record: &mut Record<'_>) {
    let mut random = ChaCha8Rng::seed_from_u64(7_001);
    let mut confusion = Confusion::default();
    for _ in 0..RUNS {
        let (world, truth) = step_fault(&mut random);
        match world.explain() {
            Ok(findings) => confusion.enter(&truth, label(&findings)),
            Err(error) => confusion.enter(&truth, &error.to_string()),
        }
    }
    record(confusion.check("random faults of a step"));
}

/// One random fault of a serving system, with the words that are true of it.
fn serving_fault(random: &mut ChaCha8Rng) -> (ServeScenario, Truth) {
    use serve::ServeFault as Fault;
    let seed = random.random_range(1..1_u64 << 30);
    let rate = random.random_range(40.0..110.0);
    let on = |faults: Vec<Fault>| {
        let mut load = ServeScenario::new(seed, faults).at(rate).of(300);
        load.noise = 0.03;
        load
    };
    let well = ["keeps_up", "queueing"];
    let truth = |planted, named: &[&'static str], mild: bool| {
        let mut right = named.to_vec();
        if mild {
            right.extend(well);
        }
        Truth { planted, right }
    };
    match random.random_range(0..11) {
        0 => (on(vec![]), truth("nothing", &[], true)),
        1 => {
            let host = severity(random, 0.05, 4.0);
            // A host that doubles the step can cost the system its capacity.
            (on(vec![Fault::Host(Nanos(host * MS))]), truth("host work", &["host_bound_step"], host < 0.4))
        }
        2 => {
            let pool = random.random_range(24..60);
            (on(vec![Fault::Pool(pool)]), truth("small pool", &["kv_pressure"], true))
        }
        3 => {
            let pool = random.random_range(200..1_200);
            let faults = vec![Fault::Prefixes { groups: 40, tokens: 256 }, Fault::Pool(pool)];
            (on(faults), truth("evicted prefixes", &["prefix_evicted", "kv_pressure"], true))
        }
        4 => {
            let size = random.random_range(8..16);
            let faults = vec![Fault::Bursts { size, tokens: 256 }, Fault::Pool(32_768)];
            (on(faults), truth("bursts of one prefix", &["prefix_not_hit"], false))
        }
        5 => {
            let times = random.random_range(1.0..4.0);
            let until = Nanos(0.15 * 300.0 / rate * 1e9);
            (
                on(vec![Fault::Cold { until, times }]),
                truth("cold start", &["cold_cache_artefact"], times < 2.5),
            )
        }
        6 => {
            let time = Nanos(severity(random, 2.0, 200.0) * MS);
            let at = Nanos(random.random_range(2.0..3.5) * 1e9);
            (on(vec![Fault::Stall { at, time }]), truth("stall", &["tail_failure"], true))
        }
        7 => {
            let tokens = random.random_range(200..8_000);
            let faults = vec![Fault::Unchunked, Fault::LongPrompts { every: 25, tokens }];
            (on(faults), truth("long prompts", &["long_prompts_block"], true))
        }
        8 => {
            let (faults, rate) = (vec![], random.random_range(320.0..900.0));
            (on(faults).at(rate), truth("too high a rate", &["scheduler_saturation"], false))
        }
        9 => {
            let late = severity(random, 0.05, 30.0);
            // A loop that never sleeps cannot wake late.
            let load = on(vec![Fault::LateInjector(Nanos(late * MS))]).at(random.random_range(20.0..60.0));
            (load, truth("late injector", &["injector_late"], late < 1.2))
        }
        _ => {
            let at = random.random_range(50..600);
            (on(vec![Fault::Breaks { at, times: 1 }]), truth("engine failure", &["engine_failed"], false))
        }
    }
}

/// Random faults of a serving system.
pub fn of_serving(record: &mut Record<'_>) {
    let mut random = ChaCha8Rng::seed_from_u64(7_002);
    let mut confusion = Confusion::default();
    for _ in 0..SERVED {
        let (load, truth) = serving_fault(&mut random);
        confusion.enter(&truth, label(&load.explain()));
    }
    record(confusion.check("random faults of serving"));
}

/// Pairs of faults that both speak: either name is right, no third one is.
pub fn of_pairs(record: &mut Record<'_>) {
    use step::StepFault as Fault;
    let mut random = ChaCha8Rng::seed_from_u64(7_003);
    let mut confusion = Confusion::default();
    for _ in 0..PAIRS {
        let seed = random.random();
        let kinds: [(&'static str, Fault); 6] = [
            ("host_bound", Fault::HostDelay(Nanos(severity(&mut random, 60.0, 1_000.0) * US))),
            ("memory_leak", Fault::Leak(Bytes(1 << 20))),
            (
                "throttled",
                Fault::Rejected {
                    cause: Cause::Throttled { reasons: vec!["hw_thermal".into()] },
                    share: 0.4,
                },
            ),
            ("engine_moves_more", Fault::Copies { times: severity(&mut random, 2.0, 5.0), counted: true }),
            ("extra_kernel", Fault::Spin(Nanos(severity(&mut random, 3.0, 50.0) * US))),
            ("power_capped", Fault::PowerCap(1.0)),
        ];
        let first = random.random_range(0..kinds.len());
        let second = (first + random.random_range(1..kinds.len())) % kinds.len();
        let world = RunScenario::new(seed, vec![kinds[first].1.clone(), kinds[second].1.clone()]).profiled();
        let truth = Truth { planted: "a pair", right: vec![kinds[first].0, kinds[second].0] };
        match world.explain() {
            Ok(findings) => confusion.enter(&truth, label(&findings)),
            Err(error) => confusion.enter(&truth, &error.to_string()),
        }
    }
    record(confusion.check("pairs of faults"));
}
