//! Queues with known waiting times: the serving loop on scripted service times, against theory.

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, Exp1};

use super::serve::{ServeScenario, traffic};
use super::{Check, Record};
use hbmark_core::result::serving::{Arrivals, GateName, SchedulerConfig, ServeResult, Slo};
use hbmark_core::units::Nanos;
use hbmark_traffic::arrivals::deadlines;
use hbmark_traffic::clock::{Clock, VirtualClock};
use hbmark_traffic::executor::{Executor, Phases, StepFailure};
use hbmark_traffic::latency::summarise;
use hbmark_traffic::scheduler::Scheduler;
use hbmark_traffic::serving_loop::{Run, run};
use hbmark_traffic::workload::{PlannedRequest, PromptSegment};

const SECOND: f64 = 1e9;

/// One server whose service times are drawn: a request is one step.
struct Server<F: FnMut() -> f64> {
    service: F,
    clock: VirtualClock,
}

impl<F: FnMut() -> f64> Executor for Server<F> {
    fn run(
        &mut self,
        scheduler: &Scheduler,
        _clock: &mut dyn Clock,
        tokens: &mut Vec<u32>,
    ) -> Result<Phases, StepFailure> {
        let time = (self.service)();
        self.clock.advance(Nanos(time));
        tokens.extend(scheduler.batch().scheduled.iter().map(|_| 0));
        Ok(Phases { device: time, ..Phases::default() })
    }
}

/// Requests of one prompt and one output token.
pub(super) fn single_tokens(arrivals: Arrivals, rate: f64, count: usize, seed: u64) -> Vec<PlannedRequest> {
    deadlines(arrivals, None, rate, count, seed)
        .into_iter()
        .map(|arrival| PlannedRequest {
            arrival,
            prompt: vec![PromptSegment { source: 1, tokens: 1 }],
            output_len: 1,
            ..PlannedRequest::default()
        })
        .collect()
}

/// Serves so many requests of one token, one at a time, at a rate per second.
fn serve(rate: f64, count: usize, seed: u64, service: impl FnMut() -> f64) -> Option<(Run, ServeResult)> {
    let plan = single_tokens(Arrivals::Poisson, rate, count, seed);
    let traffic = traffic(&plan, 0..count);
    let config = SchedulerConfig { max_num_seqs: 1, ..ServeScenario::new(seed, Vec::new()).scheduler() };
    let clock = VirtualClock::default();
    let mut server = Server { service, clock: clock.clone() };
    let run = run(&traffic, config, &mut server, &mut clock.clone(), None, &mut |_| {}).ok()?;
    let result = summarise(&run, &traffic, &Slo::default());
    Some((run, result))
}

fn mean_wait(run: &Run) -> f64 {
    let waits = run.records.iter().filter_map(|r| Some(r.started?.0 - r.arrival.0));
    waits.sum::<f64>() / run.records.len() as f64 / SECOND
}

/// Mean waits of M/M/1 and M/D/1 within 2 %, the 99th percentile of M/M/1 within 3 %, and Little's law.
pub fn known(record: &mut Record<'_>) {
    for (rho, seed, count) in [(0.5, 1, 1_000_000), (0.8, 2, 1_000_000)] {
        let mut random = ChaCha8Rng::seed_from_u64(seed + 100);
        let exponential = move || {
            let draw: f64 = Exp1.sample(&mut random);
            draw * SECOND
        };
        let Some((run, result)) = serve(rho, count, seed, exponential) else { continue };
        let wanted = rho / (1.0 - rho);
        near(record, &format!("mean wait of M/M/1 at {rho}"), mean_wait(&run), wanted, 0.02);
        let p99 = result.e2e_ns.as_ref().and_then(|q| q.p99).map_or(f64::NAN, |q| q.value() / SECOND);
        near(record, &format!("p99 in the system of M/M/1 at {rho}"), p99, 100_f64.ln() / (1.0 - rho), 0.03);
        let gate = result.gates.iter().find(|gate| gate.name == GateName::LittlesLaw);
        let passed = gate.is_some_and(|gate| gate.passed == Some(true));
        let detail = gate.map_or("no gate".to_owned(), |gate| gate.detail.clone());
        record(Check::new("queue", format!("Little's law of M/M/1 at {rho}"), passed, detail));
    }
    for (rho, seed) in [(0.5, 4), (0.8, 5)] {
        let Some((run, _)) = serve(rho, 1_000_000, seed, || SECOND) else { continue };
        near(
            record,
            &format!("mean wait of M/D/1 at {rho}"),
            mean_wait(&run),
            rho / (2.0 * (1.0 - rho)),
            0.02,
        );
    }
}

fn near(record: &mut Record<'_>, name: &str, found: f64, wanted: f64, tolerance: f64) {
    let off = found / wanted - 1.0;
    let detail = format!(
        "{found:.4} service times, theory {wanted:.4}: {:+.2} %, may differ by {:.0} %",
        off * 100.0,
        tolerance * 100.0
    );
    record(Check::new("queue", name, off.abs() <= tolerance, detail));
}
