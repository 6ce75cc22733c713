//! The LoRA adapters of running requests and of a batch.
//!
//! Enters: the adapters of requests that start, end and are scheduled. Leaves: whether one more fits `max_loras`, and the number of
//! distinct ones. It allocates nothing once every adapter is registered.

/// Counts of running requests per adapter.
#[derive(Debug, Default)]
pub(super) struct AdapterUse {
    /// Running requests of each.
    running: Vec<usize>,
    /// Adapters with running requests.
    distinct: usize,
    /// The last batch with each adapter, and the number of the current batch.
    seen: Vec<u64>,
    batch: u64,
}

impl AdapterUse {
    /// Begins the next batch.
    pub(super) fn next_batch(&mut self) {
        self.batch += 1;
    }

    /// Allocates the entry of an adapter, so that no step does.
    pub(super) fn register(&mut self, adapter: Option<u32>) {
        let count = adapter.map_or(0, |adapter| adapter as usize + 1);
        self.running.resize(self.running.len().max(count), 0);
        self.seen.resize(self.seen.len().max(count), 0);
    }

    /// Whether a request may start beside the running ones.
    pub(super) fn fits(&self, adapter: Option<u32>, most: Option<usize>) -> bool {
        let (Some(adapter), Some(most)) = (adapter, most) else { return true };
        self.running[adapter as usize] > 0 || self.distinct < most
    }

    pub(super) fn start(&mut self, adapter: Option<u32>) {
        if let Some(adapter) = adapter {
            let running = &mut self.running[adapter as usize];
            self.distinct += usize::from(*running == 0);
            *running += 1;
        }
    }

    pub(super) fn end(&mut self, adapter: Option<u32>) {
        if let Some(adapter) = adapter {
            let running = &mut self.running[adapter as usize];
            *running -= 1;
            self.distinct -= usize::from(*running == 0);
        }
    }

    /// Whether the adapter is new to the batch.
    pub(super) fn is_new(&mut self, adapter: Option<u32>) -> bool {
        adapter.is_some_and(|a| std::mem::replace(&mut self.seen[a as usize], self.batch) != self.batch)
    }
}
