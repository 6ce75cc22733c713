//! Requests as bytes, made before they are due.
//!
//! Enters: a [`Job`]. Leaves: its requests in their order, in buffers that are used again.

use std::collections::VecDeque;
use std::io::Write as _;

use super::{Job, SPIN};
use crate::clock::{self, Moment};

/// Requests that are made before they are due, by number and bytes.
const AHEAD: (usize, usize) = (256, 64 << 20);

pub(super) struct Prepared {
    /// The head of every request, up to its id.
    head: Vec<u8>,
    /// The body that is being made.
    body: Vec<u8>,
    /// Requests with their numbers, in the order of the plan.
    queue: VecDeque<(usize, Vec<u8>)>,
    bytes: usize,
    /// Buffers of requests that were sent.
    pub spare: Vec<Vec<u8>>,
    /// The next request to be made.
    next: usize,
}

impl Prepared {
    pub fn new(job: &Job<'_>) -> Self {
        let mut head = format!(
            "POST {}{} HTTP/1.1\r\nHost: {}\r\nUser-Agent: hbmark/{}\r\nAccept: text/event-stream\r\nContent-Type: application/json\r\n",
            job.endpoint.target.prefix(),
            job.path,
            job.endpoint.target.authority(),
            env!("CARGO_PKG_VERSION")
        )
        .into_bytes();
        for header in job.endpoint.target.headers() {
            head.extend([header.name.as_str().as_bytes(), b": ", header.value.as_bytes(), b"\r\n"].concat());
        }
        head.extend_from_slice(format!("X-Request-Id: {}-", job.id).as_bytes());
        Self { head, body: Vec::new(), queue: VecDeque::new(), bytes: 0, spare: Vec::new(), next: 0 }
    }

    /// Makes requests ahead, as long as there is time for one more like the last until the next is due.
    pub fn ahead(&mut self, job: &mut Job<'_>, due: Moment) {
        let (mut begun, mut took) = (clock::now(), 0);
        while self.queue.len() < AHEAD.0
            && self.bytes < AHEAD.1
            && self.next < job.traffic.plan.len()
            && begun + took + SPIN < due
        {
            self.make(job);
            let done = clock::now();
            (took, begun) = (done - begun, done);
        }
    }

    fn make(&mut self, job: &mut Job<'_>) {
        let mut request = self.spare.pop().unwrap_or_default();
        request.clear();
        self.body.clear();
        (job.bodies)(self.next, &mut self.body);
        request.extend_from_slice(&self.head);
        let written = write!(request, "{}\r\nContent-Length: {}\r\n\r\n", self.next, self.body.len());
        debug_assert!(written.is_ok(), "memory takes every byte");
        request.extend_from_slice(&self.body);
        self.bytes += request.len();
        self.queue.push_back((self.next, request));
        self.next += 1;
    }

    /// The bytes of a request. Those before it in the plan, which wait for others, are kept.
    pub fn take(&mut self, job: &mut Job<'_>, key: usize) -> Vec<u8> {
        while self.next <= key {
            self.make(job);
        }
        let at = self.queue.iter().position(|(number, _)| *number == key);
        let (_, request) = at.and_then(|at| self.queue.remove(at)).unwrap_or_default();
        self.bytes -= request.len();
        request
    }
}
