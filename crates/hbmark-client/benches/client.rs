//! How far the client's stamps are off, at rising loads: `cargo bench --bench client`.
//!
//! Server and client are two threads; on a machine with two processors each has one of them, if nothing else runs. Where fewer files may be open
//! than the streams need, there are fewer streams.

use std::io::Write;

use hbmark_client::accuracy::{Load, measure};
use hbmark_core::result::serving::Quantiles;
use hbmark_core::units::Nanos;
use rustix::process::{Resource, getrlimit};

fn main() -> std::io::Result<()> {
    let mut out = std::io::stdout();
    // Cargo passes flags of its own, and names to run; a number is the largest count of streams.
    let most = std::env::args().filter_map(|argument| argument.parse().ok()).next_back().unwrap_or(1_000);
    writeln!(
        out,
        "streams  events/s  received  stamp error p50 p99  TTFT error p99  dispatch p99  delay p99  server late p99  client CPU"
    )?;
    // Client and server are one process: a stream has a file at each end.
    let files = getrlimit(Resource::Nofile).maximum.and_then(|limit| usize::try_from(limit).ok());
    let room = files.map_or(usize::MAX, |limit| limit.saturating_sub(100) / 2);
    for (streams, tokens_per_s) in [(1, 100), (100, 100), (1_000, 100), (10_000, 25)] {
        if streams > most {
            continue;
        }
        let streams = streams.min(room);
        let seen = measure(Load { streams, tokens_per_s, seconds: 5 })?;
        let at = |q: &Quantiles, high: bool| {
            let value = if high { q.p99.or(q.max) } else { q.p50 };
            value.map_or_else(|| "-".to_owned(), |v| Nanos(v.value()).to_string())
        };
        writeln!(
            out,
            "{streams:>7}  {:>8}  {:>7.2} %  {:>11} {:>8}  {:>14}  {:>12}  {:>9}  {:>15}  {:>8.0} %",
            streams * tokens_per_s as usize,
            100.0 * seen.received as f64 / seen.sent.max(1) as f64,
            at(&seen.stamp_error, false),
            at(&seen.stamp_error, true),
            at(&seen.ttft_error, true),
            at(&seen.dispatch_lag, true),
            at(&seen.client_delay, true),
            at(&seen.server_lateness, true),
            seen.processor.unwrap_or(f64::NAN) * 100.0
        )?;
    }
    Ok(())
}
