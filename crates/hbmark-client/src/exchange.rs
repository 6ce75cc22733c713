//! What a client sees of one request.
//!
//! Enters: nothing but times and counts. Leaves: an [`Exchange`] per request, beside the record that every run has.

use hbmark_core::result::serving::{Failure, TokenEvidence};

use crate::event::Finish;

/// One request, as its client saw it. Times are nanoseconds since the start of the run.
#[derive(Debug, Clone, Default)]
pub struct Exchange {
    /// Handed to a connection.
    pub dispatched: Option<f64>,
    /// What opening its connection took; `None` for one that was kept.
    pub connect: Option<f64>,
    /// The head of the response.
    pub headers: Option<f64>,
    /// The first event that holds output of any kind, and the first that holds text of the answer itself.
    pub first_token: Option<f64>,
    pub first_content: Option<f64>,
    pub last_token: Option<f64>,
    pub failure: Option<Failure>,
    pub finish: Option<Finish>,
    pub evidence: Option<TokenEvidence>,
    pub events: u32,
    pub output_tokens: u32,
    /// As the server counts them.
    pub prompt_tokens: Option<u32>,
    pub cached_tokens: Option<u32>,
    /// The server's final count is another than that of its events.
    pub disagrees: bool,
    /// Sent again, on a new connection.
    pub retried: bool,
}
