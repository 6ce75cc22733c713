//! Checks of the HTTP client: its stamps against the moments at which a scripted server sent.
//!
//! Enters: nothing. Leaves: a [`Check`] for each quantity at each load.

use super::Check;
use hbmark_client::accuracy::{Accuracy, Load, measure};
use hbmark_core::result::serving::{Quantiles, Quantity};
use hbmark_core::units::Nanos;
use hbmark_report::analysis::words::counted;

/// Streams at a time, each of 100 tokens a second for two seconds.
const STREAMS: [usize; 3] = [1, 100, 1_000];
const TOKENS_PER_S: u32 = 100;
const SECONDS: u32 = 2;
/// What the p99 of each may be.
const STAMP: Nanos = Nanos(200e3);
const DISPATCH: Nanos = Nanos(200e3);
const TTFT: Nanos = Nanos(1e6);

/// Runs the checks; `each` is told of them as they end.
pub fn verify(each: &mut dyn FnMut(&Check)) -> Vec<Check> {
    let mut all = Vec::new();
    for streams in STREAMS {
        let load = Load { streams, tokens_per_s: TOKENS_PER_S, seconds: SECONDS };
        let checks = match measure(load) {
            Ok(seen) => checks(&seen),
            Err(error) => vec![check(&load, "runs", false, error.to_string())],
        };
        checks.iter().for_each(&mut *each);
        all.extend(checks);
    }
    all
}

fn check(load: &Load, what: &str, passed: bool, detail: String) -> Check {
    let name = format!("{what}, {} of {} tokens/s", counted(load.streams, "stream"), load.tokens_per_s);
    Check::new("client", name, passed, detail)
}

fn checks(seen: &Accuracy) -> Vec<Check> {
    let load = &seen.load;
    let whole = seen.received == seen.sent && seen.failed == 0;
    let counted = format!("{} of {} sent, {} requests failed", seen.received, seen.sent, seen.failed);
    let bounded = |what: &str, quantiles: &Quantiles, limit: Nanos| {
        let high = quantiles.p99.or(quantiles.max).map_or(f64::INFINITY, Quantity::value);
        let middle = quantiles.p50.map_or(f64::NAN, Quantity::value);
        let detail = format!("p50 {}, p99 {}; {limit} is allowed", Nanos(middle), Nanos(high));
        check(load, what, high <= limit.0, detail)
    };
    vec![
        check(load, "events received", whole, counted),
        bounded("stamp error", &seen.stamp_error, STAMP),
        bounded("TTFT error", &seen.ttft_error, TTFT),
        bounded("dispatch lateness", &seen.dispatch_lag, DISPATCH),
    ]
}
