//! The time of day.

use hbmark_core::units::rfc3339;

/// The time of day, UTC, RFC 3339, to the second.
#[must_use]
pub fn now_utc() -> String {
    let since_epoch = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    rfc3339(since_epoch.as_secs())
}
