//! Random plants: over many seeds, severities and pairs of faults, is the cause that is named first the one that was planted?
//!
//! Enters: nothing. Leaves: one check a kind, with the counts of labels that name the plant, that are true as well, unexplained and
//! wrong, and the confusions by name. Severities reach down to faults too weak to change a measurement, so another label can be
//! true as well: the healthy one, or that of a related fault. Such labels are listed with each plant and counted apart; any other label is wrong.

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
use hbmark_core::units::{Bytes, Nanos, whole};

/// Plants of each kind.
const RUNS: usize = 1_300;
const SERVED: usize = 200;
const PAIRS: usize = 300;
/// The largest share of wrong labels.
const ALLOWED: f64 = 0.01;

const US: f64 = 1e3;
const MS: f64 = 1e6;

/// A plant and the labels that are true of it.
struct Truth {
    planted: &'static str,
    /// Any of these names the plant.
    named: Vec<&'static str>,
    /// True as well at this severity.
    also: Vec<&'static str>,
}

impl Truth {
    fn of(planted: &'static str, named: &'static str) -> Self {
        Self { planted, named: vec![named], also: Vec::new() }
    }

    /// With labels that are true as well where the fault is weak.
    fn or(mut self, labels: &[&'static str], weak: bool) -> Self {
        self.also.extend(labels.iter().filter(|_| weak));
        self
    }
}

/// Labels counted by what they were for.
#[derive(Default)]
struct Confusion {
    named: usize,
    also: usize,
    unexplained: usize,
    wrong: BTreeMap<(String, String), usize>,
}

impl Confusion {
    fn enter(&mut self, truth: &Truth, label: &str) {
        if truth.named.contains(&label) {
            self.named += 1;
        } else if truth.also.contains(&label) {
            self.also += 1;
        } else if label == "unexplained" {
            self.unexplained += 1;
        } else {
            *self.wrong.entry((truth.planted.to_owned(), label.to_owned())).or_insert(0) += 1;
        }
    }

    fn enter_run(&mut self, truth: &Truth, world: &RunScenario) {
        match world.explain() {
            Ok(findings) => self.enter(truth, label(&findings)),
            Err(error) => self.enter(truth, &error.to_string()),
        }
    }

    fn check(&self, name: &str) -> Check {
        let wrong: usize = self.wrong.values().sum();
        let all = self.named + self.also + self.unexplained + wrong;
        let share = wrong as f64 / all.max(1) as f64;
        let mut detail = format!(
            "{all} plants: {} named, {} called by another true label, {} unexplained, {wrong} wrong ({:.2} %, at most {:.0} %)",
            self.named,
            self.also,
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

/// The label of a device without a fault; true of a fault that leaves bytes most of the step.
const HEALTHY: &str = "memory_bound_decode";

/// One random fault of a run, with the labels that are true of it.
fn step_fault(random: &mut ChaCha8Rng) -> (RunScenario, Truth) {
    use step::StepFault as Fault;
    let seed = random.random();
    let noise = severity(random, 0.001, 0.02);
    let on = |fault: Fault| RunScenario::new(seed, vec![fault]).with_noise(noise);
    let us = |time: f64| Nanos(time * US);
    match random.random_range(0..21) {
        0 => (RunScenario::new(seed, vec![]).with_noise(noise), Truth::of("nothing", HEALTHY)),
        1 => {
            let delay = severity(random, 5.0, 2_000.0);
            let truth = Truth::of("host delay", "host_bound").or(&[HEALTHY], delay < 30.0);
            (on(Fault::HostDelay(us(delay))), truth)
        }
        2 => {
            let delay = severity(random, 5.0, 60.0);
            (on(Fault::HiddenDelay(us(delay))), Truth::of("hidden delay", HEALTHY))
        }
        3 => {
            let spin = severity(random, 0.05, 100.0);
            let truth = Truth::of("spin", "extra_kernel").or(&[HEALTHY], spin < 1.5);
            (on(Fault::Spin(us(spin))).profiled(), truth)
        }
        4 => {
            let loss = severity(random, 0.002, 0.4);
            // Between noise and a loss the canary rejects blocks without a name for the cause.
            (on(Fault::Hog(loss)), Truth::of("hog", "degraded").or(&["noisy_machine", HEALTHY], loss < 0.06))
        }
        5 => {
            let times = random.random_range(1.0..4.0);
            let truth = Truth::of("KV read again", "kv_costs_more").or(&[HEALTHY], times < 2.2);
            (on(Fault::KvTimes(times)).with_cells(grid()), truth)
        }
        6 => {
            let (times, counted) = (random.random_range(1.0..6.0), random.random());
            let truth = Truth::of("copies", "engine_moves_more").or(&[HEALTHY], times < 1.6);
            (on(Fault::Copies { times, counted }), truth)
        }
        7 => (on(Fault::WeightsAs(Dtype::F32)), Truth::of("f32 weights", "wrong_size_weights")),
        8 => (on(Fault::WeightsAs(Dtype::F16)), Truth::of("f16 weights", "wrong_storage")),
        9 => {
            let (share, time) = (random.random_range(0.02..0.3), severity(random, 2.0, 200.0));
            // Long, it keeps the interval from closing; rare or short, it hardly changes the mean.
            let truth = Truth::of("CPU stress", "host_jitter").or(&["not_converged"], true);
            (on(Fault::HostTail { share, time: us(time) }), truth.or(&[HEALTHY], share * time < 20.0))
        }
        10 => {
            let leak = severity(random, 2_048.0, 16e6);
            let bytes = Bytes(whole(leak));
            (on(Fault::Leak(bytes)), Truth::of("leak", "memory_leak").or(&[HEALTHY], leak < 80_000.0))
        }
        11 => (on(Fault::KvLeak).with_cells(vec![decode(4, 512)]), Truth::of("KV leak", "kv_leak")),
        12 => (on(Fault::MarksElsewhere), Truth::of("wrong stream", "marks_elsewhere")),
        13 => {
            let rate =
                if random.random() { random.random_range(1.02..1.2) } else { random.random_range(0.8..0.98) };
            (on(Fault::ClockRate(rate)).with_blocks_of(0.05), Truth::of("clock rate", "clocks_disagree"))
        }
        14 => {
            let from = random.random_range(40..150);
            (on(Fault::OtherTokens(from)), Truth::of("other tokens", "wrong_outputs"))
        }
        15 => {
            let share = severity(random, 0.01, 0.4);
            (on(Fault::Skips(share)), Truth::of("skipped steps", "impossible_time"))
        }
        16 => {
            let deviation = severity(random, 0.003, 0.3);
            // Blocks that differ by a tenth are a noisy machine as well.
            let truth = Truth::of("wandering blocks", "not_converged");
            let truth = truth.or(&["noisy_machine"], deviation > 0.06).or(&[HEALTHY], deviation < 0.06);
            (on(Fault::Wanders(deviation)), truth)
        }
        17 => {
            let share = random.random_range(0.02..0.9);
            let cause = Cause::Throttled { reasons: vec!["hw_power_brake".into()] };
            let truth = Truth::of("throttled", "throttled").or(&[HEALTHY], share < 0.5);
            (on(Fault::Rejected { cause, share }), truth)
        }
        18 => {
            let share = random.random_range(0.02..0.9);
            let cause = Cause::ForeignLoad { cores: 1.2 };
            let truth = Truth::of("foreign load", "foreign_load").or(&[HEALTHY], share < 0.5);
            (on(Fault::Rejected { cause, share }), truth)
        }
        19 => {
            let share = random.random_range(0.05..1.0);
            let truth = Truth::of("power cap", "power_capped").or(&[HEALTHY], share < 0.7);
            (on(Fault::PowerCap(share)), truth)
        }
        _ => {
            let time = random.random_range(300.0..3_000.0);
            // The larger batch may be explained by its bytes where the flat time is short.
            let truth = Truth::of("flat step", "launch_bound").or(&[HEALTHY], time < 400.0);
            (on(Fault::Flat(us(time))).with_cells(vec![decode(1, 4096), decode(4, 4096)]), truth)
        }
    }
}

/// Random faults of a step benchmark.
pub fn of_runs(record: &mut Record<'_>) {
    let mut random = ChaCha8Rng::seed_from_u64(7_001);
    let mut confusion = Confusion::default();
    for _ in 0..RUNS {
        let (world, truth) = step_fault(&mut random);
        confusion.enter_run(&truth, &world);
    }
    record(confusion.check("random faults of a step"));
}

/// The labels of a serving system without a fault.
const WELL: [&str; 2] = ["keeps_up", "queueing"];

/// One random fault of a serving system, with the labels that are true of it.
fn serving_fault(random: &mut ChaCha8Rng) -> (ServeScenario, Truth) {
    use serve::ServeFault as Fault;
    let seed = random.random_range(1..1_u64 << 30);
    let rate = random.random_range(40.0..110.0);
    let on = |faults: Vec<Fault>| {
        let mut load = ServeScenario::new(seed, faults).at(rate).of(300);
        load.noise = 0.03;
        load
    };
    let ms = |time: f64| Nanos(time * MS);
    match random.random_range(0..11) {
        0 => (on(vec![]), Truth { planted: "nothing", named: WELL.to_vec(), also: Vec::new() }),
        1 => {
            let host = severity(random, 0.05, 4.0);
            (on(vec![Fault::Host(ms(host))]), Truth::of("host work", "host_bound_step").or(&WELL, host < 0.4))
        }
        // Whether a pool, a prefix, a stall or a long prompt costs anything depends on the requests around it.
        2 => {
            let pool = random.random_range(24..60);
            (on(vec![Fault::Pool(pool)]), Truth::of("small pool", "kv_pressure").or(&WELL, true))
        }
        3 => {
            let pool = random.random_range(200..1_200);
            let truth = Truth::of("evicted prefixes", "prefix_evicted").or(&["kv_pressure"], true);
            (on(vec![Fault::Prefixes { groups: 40, tokens: 256 }, Fault::Pool(pool)]), truth.or(&WELL, true))
        }
        4 => {
            let size = random.random_range(8..16);
            let faults = vec![Fault::Bursts { size, tokens: 256 }, Fault::Pool(32_768)];
            (on(faults), Truth::of("bursts of one prefix", "prefix_not_hit"))
        }
        5 => {
            let times = random.random_range(1.0..4.0);
            let until = Nanos(0.15 * 300.0 / rate * 1e9);
            let truth = Truth::of("cold start", "cold_start").or(&WELL, times < 2.5);
            (on(vec![Fault::Cold { until, times }]), truth)
        }
        6 => {
            let time = ms(severity(random, 2.0, 200.0));
            let at = Nanos(random.random_range(2.0..3.5) * 1e9);
            (on(vec![Fault::Stall { at, time }]), Truth::of("stall", "tail_failure").or(&WELL, true))
        }
        7 => {
            let tokens = random.random_range(200..8_000);
            let faults = vec![Fault::Unchunked, Fault::LongPrompts { every: 25, tokens }];
            (on(faults), Truth::of("long prompts", "long_prompts_block").or(&WELL, true))
        }
        8 => {
            let rate = random.random_range(320.0..900.0);
            (on(vec![]).at(rate), Truth::of("too high a rate", "scheduler_saturation"))
        }
        9 => {
            let late = severity(random, 0.05, 30.0);
            // A loop that never sleeps cannot wake late.
            let load = on(vec![Fault::LateInjector(ms(late))]).at(random.random_range(20.0..60.0));
            (load, Truth::of("late injector", "injector_late").or(&WELL, late < 1.2))
        }
        _ => {
            let at = random.random_range(50..600);
            (on(vec![Fault::Breaks { at, times: 1 }]), Truth::of("engine failure", "engine_failed"))
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

/// Pairs of faults that are both strong: either label is right, a third one is wrong.
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
        let named = vec![kinds[first].0, kinds[second].0];
        let truth = Truth { planted: "a pair", named, also: Vec::new() };
        confusion.enter_run(&truth, &world);
    }
    record(confusion.check("pairs of faults"));
}
