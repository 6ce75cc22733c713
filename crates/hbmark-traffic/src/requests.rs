//! The raw samples of a point: every measured request, column by column.
//!
//! Enters: the records of a run. Leaves: plain columns, from which percentiles of TTFT, TPOT, E2E and queue time can be recomputed, and
//! other objectives judged.

use super::serving_loop::{Record, RequestOutcome};
use hbmark_core::result::serving::Requests;
use hbmark_core::units::{Nanos, rounded};

/// A point with more requests keeps no columns: a result should open in an editor.
const MAX_REQUESTS: usize = 100_000;

/// Columns of records; `None` for more than a result should hold.
pub fn columns(records: &[Record]) -> Option<Requests> {
    if records.len() > MAX_REQUESTS {
        return None;
    }
    let times = |of: fn(&Record) -> Option<Nanos>| records.iter().map(|r| Some(rounded(of(r)?.0))).collect();
    let counts = |of: fn(&Record) -> usize| records.iter().map(of).collect();
    Some(Requests {
        arrival_ns: records.iter().map(|r| rounded(r.arrival.0)).collect(),
        sent_ns: Vec::new(),
        started_ns: times(|r| r.started),
        first_token_ns: times(|r| r.first_token),
        last_token_ns: times(|r| r.last_token),
        prompt_tokens: counts(|r| r.prompt_tokens),
        output_tokens: counts(|r| r.output_tokens),
        cached_tokens: counts(|r| r.cached_tokens),
        outcome: records.iter().map(|r| r.outcome.name().into()).collect(),
    })
}

impl RequestOutcome {
    /// As results name it.
    pub fn name(self) -> String {
        match self {
            Self::Unfinished => "unfinished".into(),
            Self::Served => "served".into(),
            Self::Rejected(reason) => {
                let name =
                    serde_json::to_value(reason).ok().and_then(|value| value.as_str().map(str::to_owned));
                name.unwrap_or_default()
            }
            Self::Failed(failure) => failure.name(),
        }
    }
}
