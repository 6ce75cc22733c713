//! An engine that decodes requests in batches, as a model of time alone.
//!
//! Enters: arrivals and departures. Leaves: when the step in progress ends, and who gets a token then. Knows no clock and no sockets.

use std::collections::VecDeque;
use std::time::Duration;

use super::nanos;

/// A step takes `step + per_sequence × running`; requests beyond `max_running` wait, first come first served, and join between steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchModel {
    pub max_running: usize,
    pub step: Duration,
    pub per_sequence: Duration,
}

impl BatchModel {
    fn step_ns(&self, running: usize) -> u64 {
        let sequences = nanos(self.per_sequence).saturating_mul(running as u64);
        // A step of no time would never let the clock pass it.
        nanos(self.step).saturating_add(sequences).max(1)
    }
}

#[derive(Debug)]
pub(super) struct Batch {
    model: BatchModel,
    running: Vec<usize>,
    waiting: VecDeque<usize>,
    /// When the step in progress ends; None while nothing runs.
    ends_ns: Option<u64>,
}

impl Batch {
    pub(super) fn new(model: BatchModel) -> Self {
        Self {
            model,
            running: Vec::with_capacity(model.max_running.min(1 << 16)),
            waiting: VecDeque::new(),
            ends_ns: None,
        }
    }
    pub(super) fn running(&self) -> &[usize] {
        &self.running
    }
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }
    pub(super) fn ends_ns(&self) -> Option<u64> {
        self.ends_ns
    }
    /// A request comes. It waits for the end of the step in progress; if there is none, the caller starts one.
    pub(super) fn arrive(&mut self, who: usize) {
        self.waiting.push_back(who);
    }
    /// A request has all its tokens, or its client has gone.
    pub(super) fn leave(&mut self, who: usize) {
        self.running.retain(|&other| other != who);
        self.waiting.retain(|&other| other != who);
    }
    /// Starts the step after the one that ended at `start`: the tokens are handed out and who is done has left.
    pub(super) fn next_step(&mut self, start: u64) {
        while self.running.len() < self.model.max_running
            && let Some(who) = self.waiting.pop_front()
        {
            self.running.push(who);
        }
        let busy = !self.running.is_empty();
        self.ends_ns = busy.then(|| start.saturating_add(self.model.step_ns(self.running.len())));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODEL: BatchModel = BatchModel {
        max_running: 4,
        step: Duration::from_millis(8),
        per_sequence: Duration::from_micros(500),
    };

    /// Requests arrive every `gap` ns and want `tokens` each, for `until` ns: tokens made, and the most that waited.
    fn drive(gap: u64, tokens: u32, until: u64) -> (u64, usize) {
        let (mut batch, mut left) = (Batch::new(MODEL), Vec::new());
        let (mut made, mut longest_queue) = (0, 0);
        loop {
            let arrival = left.len() as u64 * gap;
            let step = batch.ends_ns().unwrap_or(u64::MAX);
            if arrival.min(step) > until {
                return (made, longest_queue);
            }
            if arrival <= step {
                batch.arrive(left.len());
                left.push(tokens);
                if batch.ends_ns().is_none() {
                    batch.next_step(arrival);
                }
            } else {
                for who in batch.running().to_vec() {
                    made += 1;
                    left[who] -= 1;
                    if left[who] == 0 {
                        batch.leave(who);
                    }
                }
                batch.next_step(step);
            }
            longest_queue = longest_queue.max(batch.waiting());
        }
    }

    #[test]
    fn above_saturation_it_makes_the_tokens_that_the_model_says_and_the_queue_grows() {
        // 4 tokens per 8 + 4 × 0.5 = 10 ms: 400 tokens per second, 40 requests of 10 tokens.
        let (made, queue) = drive(20_000_000, 10, 10_000_000_000);
        assert!((3_950..=4_000).contains(&made), "{made}");
        assert!((95..=105).contains(&queue), "{queue}");
    }

    #[test]
    fn below_saturation_every_request_is_served_and_the_queue_stays_short() {
        let (made, queue) = drive(50_000_000, 10, 10_000_000_000);
        assert!((1_970..=2_010).contains(&made), "{made}");
        assert!(queue <= 1, "{queue}");
    }

    #[test]
    fn who_comes_during_a_step_joins_at_its_end_and_who_leaves_makes_room() {
        let mut batch = Batch::new(BatchModel { max_running: 1, ..MODEL });
        batch.arrive(7);
        batch.next_step(100);
        assert_eq!((batch.running(), batch.ends_ns()), (&[7][..], Some(8_500_100)));
        batch.arrive(8);
        batch.arrive(9);
        assert_eq!((batch.running(), batch.waiting()), (&[7][..], 2));
        batch.leave(8);
        batch.leave(7);
        batch.next_step(8_500_100);
        assert_eq!((batch.running(), batch.waiting(), batch.ends_ns()), (&[9][..], 0, Some(17_000_100)));
        batch.leave(9);
        batch.next_step(17_000_100);
        assert_eq!(batch.ends_ns(), None);
    }
}
