//! Which request of a plan is sent next.
//!
//! Enters: the plan, and which requests are done. Leaves: the number of the next one, and when it is due.
//!
//! An open loop sends in the order of the plan, each request at its arrival. A closed loop sends in the order of the plan when a place is
//! free, but a turn of a conversation only when the turn before it is done, and before conversations that have not begun: as many places, as
//! many conversations.

use std::collections::{BTreeSet, VecDeque};

use crate::serving_loop::{LoadMode, Traffic};
use crate::workload::PlannedRequest;

/// The order of a plan's requests.
#[derive(Debug)]
pub struct Order {
    /// The next request that waits for no other.
    next: usize,
    /// Of each request, the turn that waits for it; empty where none does.
    turns: Vec<Option<usize>>,
    /// Of each request, whether it waits for another.
    waits: Vec<bool>,
    /// Turns whose turn before is done.
    ready: BTreeSet<usize>,
}

impl Order {
    pub fn new(traffic: &Traffic<'_>) -> Self {
        let closed = matches!(traffic.kind, LoadMode::Closed { .. });
        let before =
            |planned: &PlannedRequest| planned.after.filter(|_| closed).map(|before| before as usize);
        let mut turns = vec![None; traffic.plan.len()];
        for (key, planned) in traffic.plan.iter().enumerate() {
            if let Some(before) = before(planned) {
                turns[before] = Some(key);
            }
        }
        let waits = traffic.plan.iter().map(|planned| before(planned).is_some()).collect();
        Self { next: 0, turns, waits, ready: BTreeSet::new() }
    }

    /// The next request, where one may be sent.
    fn peek(&self) -> Option<usize> {
        self.ready.first().copied().or_else(|| (self.next < self.waits.len()).then_some(self.next))
    }

    /// Takes the next request.
    pub fn take(&mut self) -> Option<usize> {
        let key = self.ready.pop_first().or_else(|| self.peek())?;
        if key == self.next {
            let first = self.waits[key + 1..].iter().position(|waits| !waits);
            self.next = first.map_or(self.waits.len(), |more| key + 1 + more);
        }
        Some(key)
    }

    /// A request is done, or failed: the turn behind it may be sent.
    pub fn done(&mut self, key: usize) {
        self.ready.extend(self.turns[key]);
    }

    /// When the next request is due: at its arrival, or when the first place became free.
    pub fn next_due(&self, traffic: &Traffic<'_>, openings: &VecDeque<f64>) -> Option<f64> {
        let next = self.peek()?;
        match traffic.kind {
            LoadMode::Open => Some(traffic.plan[next].arrival.0),
            LoadMode::Closed { .. } => openings.front().copied(),
        }
    }

    /// Since when there is less load than was asked for, once no request is left to send.
    pub fn used_up(&self, traffic: &Traffic<'_>, openings: &VecDeque<f64>) -> Option<f64> {
        match traffic.kind {
            _ if self.peek().is_some() => None,
            LoadMode::Open => traffic.plan.last().map(|last| last.arrival.0),
            LoadMode::Closed { .. } => openings.front().copied(),
        }
    }
}
