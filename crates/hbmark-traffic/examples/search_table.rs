//! How near the rate that a search finds comes to the rate that a run of 200,000 requests holds.
//!
//! `cargo run --release -p hbmark-traffic --example search_table [SEEDS [REQUESTS,... [QUEUE]]]` searches four workloads on the virtual clock, with
//! the seeds, the numbers of requests and the part of a queue's name that are given, and prints a row for each workload and number: of all seeds how many found a
//! rate, its ratio to that of the long run, and how often the objectives fail in a long run at 1.1 times the rate, or are left open by it.

use std::convert::Infallible;
use std::process::ExitCode;

use hbmark_core::result::serving::{Arrivals, Offered, Point, SchedulerConfig, Search, ServeResult, Slo};
use hbmark_core::stats::median;
use hbmark_traffic::latency::summarise;
use hbmark_traffic::point::{PlanError, PointSpec, TrafficSource, simulate};
use hbmark_traffic::sampler::Sampling;
use hbmark_traffic::search::{SearchConfig, Trial, find_max_rate};
use hbmark_traffic::step_model::{Calibration, StepModel};
use hbmark_traffic::workload::{Lengths, Workload};

/// As `hbmark serve search` has them.
const PRECISION: f64 = 0.03;
const SEEDS_OF_A_SEARCH: usize = 3;
const MAX_REQUESTS: usize = 65_536;
/// Of the run that the rates found are held against.
const LONG_RUN: usize = 200_000;

/// A server, what is asked of it, and what it must keep.
struct Queue {
    name: &'static str,
    workload: Workload,
    max_num_seqs: usize,
    slo: Slo,
}

/// A prefill takes a millisecond a token, a decode 10 ms and another for each sequence.
fn model() -> StepModel {
    StepModel::Calibrated(Calibration::of(
        vec![(1.0, 1e6), (1001.0, 1001e6)],
        vec![(1.0, 11e6), (101.0, 111e6)],
    ))
}

fn queues() -> [Queue; 4] {
    let slo = |text: &str| text.parse::<Slo>().expect("objectives");
    let fixed = |input, output| Workload::fixed(input, output).expect("lengths");
    let spread = |mean: f64, cv, most| Lengths::Lognormal { mean, cv, min: 1, max: most };
    let spread_prompts = Workload { input: spread(40.0, 1.4, 600), ..fixed(1, 1) };
    let chat = Workload { input: spread(40.0, 1.0, 200), output: spread(8.0, 1.0, 60), ..fixed(1, 1) };
    [
        Queue {
            name: "one at a time, equal",
            workload: fixed(40, 1),
            max_num_seqs: 1,
            slo: slo("ttft_p95=400ms"),
        },
        Queue {
            name: "one at a time, spread",
            workload: spread_prompts,
            max_num_seqs: 1,
            slo: slo("e2e_p95=600ms"),
        },
        Queue {
            name: "batches of 16, equal",
            workload: fixed(20, 8),
            max_num_seqs: 16,
            slo: slo("ttft_p95=500ms"),
        },
        Queue {
            name: "batches of 8, spread",
            workload: chat,
            max_num_seqs: 8,
            slo: slo("ttft_p95=1s,tpot_p95=90ms"),
        },
    ]
}

impl Queue {
    fn spec(&self, offered: Offered, seed: u64, requests: usize, max_requests: usize) -> PointSpec {
        PointSpec {
            label: self.name.to_owned(),
            source: TrafficSource::Workload(self.workload.clone()),
            offered,
            arrivals: Arrivals::Poisson,
            burst: None,
            requests,
            max_requests,
            warmup: (requests / 10).clamp(4, 100),
            settles: false,
            scheduler: SchedulerConfig {
                max_num_seqs: self.max_num_seqs,
                max_num_batched_tokens: 1024,
                num_blocks: 4096,
                max_model_len: 1024,
                enable_prefix_caching: false,
                ..SchedulerConfig::UNLIMITED
            },
            sampling: Sampling::GREEDY,
            stop_at_eos: false,
            seed,
            prompt_set: 0,
            cold: false,
            slo: self.slo.clone(),
            time_limit: None,
            adapters: None,
            constrained: None,
            is_remote: false,
        }
    }

    fn measure(spec: &PointSpec) -> Result<Point, PlanError> {
        let (plan, measured) = spec.plan()?;
        let traffic = spec.traffic(&plan, measured.clone(), 1000, &[]);
        let run = simulate(&model(), spec, &traffic, &mut |_| {}).expect("no text, no error");
        let result = ServeResult { requests: None, timeline: None, ..summarise(&run, &traffic, &spec.slo) };
        Ok(Point { result: Some(result), ..spec.without_result(&plan, &measured) })
    }

    fn at(&self, rate: f64, seed: u64, requests: usize, most: usize) -> Point {
        Self::measure(&self.spec(Offered::Rate(rate), seed, requests, most)).expect("a workload has no end")
    }

    /// Requests per second where all are there at once.
    fn capacity(&self) -> f64 {
        let spec = PointSpec { slo: Slo::default(), ..self.spec(Offered::AtOnce, 1, 20_000, 0) };
        let point = Self::measure(&spec).expect("a workload has no end");
        point.result.expect("it was simulated").served_per_s
    }

    fn met(point: &Point) -> Option<bool> {
        point.result.as_ref().and_then(|result| result.held().0)
    }

    /// The rate that a run of 200,000 requests holds.
    fn reference(&self, capacity: f64) -> f64 {
        let (mut low, mut high) = (0.1 * capacity, 1.1 * capacity);
        while high / low > 1.002 {
            let middle = (low * high).sqrt();
            let holds = Self::met(&self.at(middle, 99, LONG_RUN, 0)) == Some(true);
            (low, high) = if holds { (middle, high) } else { (low, middle) };
        }
        low
    }

    fn search(&self, capacity: f64, requests: usize, seed: u64) -> Search {
        let start = capacity / 2.0;
        let config = SearchConfig {
            recorded: None,
            start,
            lowest: start / 65_536.0,
            highest: start * 256.0,
            precision: PRECISION,
            seeds: SEEDS_OF_A_SEARCH,
        };
        let found = find_max_rate(&config, &self.slo, seed * 1000, &mut Vec::new(), |trial, seed| {
            let at = |rate, times| self.at(rate, seed, times * requests, times * MAX_REQUESTS.max(requests));
            Ok::<_, Infallible>(match trial {
                Trial::Rate(rate) => at(rate, 1),
                Trial::Sustained(rate) => at(rate, 3),
                Trial::Alone(alone) => {
                    let spec = self.spec(Offered::Concurrency(1), seed, alone, alone);
                    Self::measure(&PointSpec { slo: Slo::default(), ..spec }).expect("a workload has no end")
                }
            })
        });
        match found {
            Ok(found) => found,
            Err(never) => match never {},
        }
    }
}

#[expect(clippy::print_stdout, reason = "a table for a person")]
fn main() -> ExitCode {
    let given: Vec<String> = std::env::args().skip(1).collect();
    let sizes = given.get(1).map_or("1000,2000,5000,10000,20000", String::as_str);
    let sizes: Result<Vec<usize>, _> = sizes.split(',').map(str::parse).collect();
    let (Ok(seeds), Ok(sizes)) = (given.first().map_or(Ok(20), |seeds| seeds.parse::<u64>()), sizes) else {
        println!(
            "usage: search_table [SEEDS [REQUESTS,... [QUEUE]]], as in search_table 20 1000,5000 'batches of 8'"
        );
        return ExitCode::FAILURE;
    };
    println!(
        "workload               capacity/s  long run/s  requests  seeds  missing    min  median    max  1.1x fails  open"
    );
    let named = given.get(2).map_or("", String::as_str);
    for queue in queues().iter().filter(|queue| queue.name.contains(named)) {
        let capacity = queue.capacity();
        let held = queue.reference(capacity);
        for requests in &sizes {
            let found = (0..seeds).map(|seed| (seed, queue.search(capacity, *requests, seed)));
            let rates: Vec<(u64, f64)> =
                found.filter_map(|(seed, search)| Some((seed, search.max_rate?))).collect();
            let ratios: Vec<f64> = rates.iter().map(|(_, rate)| rate / held).collect();
            let beyond =
                |(seed, rate): &(u64, f64)| Queue::met(&queue.at(1.1 * rate, seed + 7_777, LONG_RUN, 0));
            let beyond: Vec<Option<bool>> = rates.iter().map(beyond).collect();
            let count = |met| beyond.iter().filter(|found| **found == met).count();
            println!(
                "{:21}  {capacity:10.3}  {held:10.3}  {requests:8}  {seeds:5}  {:7}  {:5.3}  {:6.3}  {:5.3}  {:4} of {:2}  {:4}",
                queue.name,
                seeds - rates.len() as u64,
                ratios.iter().copied().fold(f64::INFINITY, f64::min),
                if ratios.is_empty() { f64::NAN } else { median(&ratios) },
                ratios.iter().copied().fold(0.0, f64::max),
                count(Some(false)),
                rates.len(),
                count(None),
            );
        }
    }
    ExitCode::SUCCESS
}
