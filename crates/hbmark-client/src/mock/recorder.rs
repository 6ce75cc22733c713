//! What came in and what went out.
//!
//! Enters: requests and the moments of writes. Leaves: both, by request. Bodies are kept up to [`MOST_BYTES`] in all.

use std::collections::HashMap;

use super::http::Request;
use super::{ReceivedRequest, Sent};

const MOST_BYTES: usize = 256 << 20;

#[derive(Debug, Default)]
pub(super) struct Recorder {
    pub(super) requests: Vec<(ReceivedRequest, Vec<Sent>)>,
    newest: HashMap<String, usize>,
    bytes: usize,
}

impl Recorder {
    pub(super) fn sent(&self, id: &str) -> Vec<Sent> {
        self.newest.get(id).map_or_else(Vec::new, |&index| self.requests[index].1.clone())
    }
    pub(super) fn received(&self) -> Vec<ReceivedRequest> {
        self.requests.iter().map(|(request, _)| request.clone()).collect()
    }
    /// Takes a request's bytes into the log; says which request it is.
    pub(super) fn add(&mut self, request: &mut Request, (arrived_ns, received_ns): (u64, u64)) -> usize {
        let index = self.requests.len();
        let id = request.id.take().unwrap_or_else(|| format!("mock-{index}"));
        self.bytes += request.head.len() + request.body.len();
        let fits = self.bytes <= MOST_BYTES;
        let keep = |bytes: &mut Vec<u8>| if fits { std::mem::take(bytes) } else { Vec::new() };
        let (head, body) = (keep(&mut request.head), keep(&mut request.body));
        let (method, target) = (request.method.clone(), request.target.clone());
        self.newest.insert(id.clone(), index);
        let received = ReceivedRequest { id, method, target, head, body, arrived_ns, received_ns };
        self.requests.push((received, Vec::new()));
        index
    }
}
