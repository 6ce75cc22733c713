//! Which adapters run, and which of them a batch has met already.
//!
//! Enters: the adapters of requests that start, end and become part of a batch. Leaves: whether one more fits, and how many different ones
//! there are. It knows no block and no request, and once every adapter has been seen it allocates nothing.

/// Which adapters run, by their numbers.
#[derive(Debug, Default)]
pub(super) struct AdapterUse {
    /// Running requests of each.
    running: Vec<usize>,
    /// How many have any.
    distinct: usize,
    /// The last batch that each was part of, and the number of this one.
    seen: Vec<u64>,
    batch: u64,
}

impl AdapterUse {
    /// The next batch begins.
    pub(super) fn next_batch(&mut self) {
        self.batch += 1;
    }

    /// Makes room for an adapter, so that no step does.
    pub(super) fn register(&mut self, adapter: Option<u32>) {
        let count = adapter.map_or(0, |adapter| adapter as usize + 1);
        self.running.resize(self.running.len().max(count), 0);
        self.seen.resize(self.seen.len().max(count), 0);
    }

    /// Whether a request may start beside those that run.
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

    /// Whether the batch has not had the adapter yet.
    pub(super) fn is_new(&mut self, adapter: Option<u32>) -> bool {
        adapter.is_some_and(|a| std::mem::replace(&mut self.seen[a as usize], self.batch) != self.batch)
    }
}
