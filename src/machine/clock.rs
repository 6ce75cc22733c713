//! The time of day, and a clock without time synchronisation.

use hbmark_core::units::{Nanos, rfc3339};

/// The time of day, UTC, RFC 3339, to the second.
pub fn now_utc() -> String {
    let since_epoch = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    rfc3339(since_epoch.as_secs())
}

/// `CLOCK_MONOTONIC_RAW`: the same crystal as `Instant`, without the slewing of time synchronisation.
pub fn raw_monotonic() -> Nanos {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::MonotonicRaw);
    Nanos(time.tv_sec as f64 * 1e9 + time.tv_nsec as f64)
}
