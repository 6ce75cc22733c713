//! What the client itself takes of the machine.
//!
//! Enters: `/proc/thread-self/schedstat`. Leaves: processor time of this thread, and how long it was ready and had no processor.

/// Processor time and waiting of a thread, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cost {
    pub processor: u64,
    /// Ready to run, and not running.
    pub waited: u64,
    /// The system says so; zero is not a measurement.
    pub known: bool,
}

impl Cost {
    /// Of this thread, so far.
    pub fn now() -> Self {
        let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
        let mut numbers = text.split_ascii_whitespace().map_while(|number| number.parse().ok());
        match (numbers.next(), numbers.next()) {
            (Some(processor), Some(waited)) => Self { processor, waited, known: true },
            _ => Self::default(),
        }
    }

    /// Since a moment before.
    pub fn since(self, before: Self) -> Self {
        Self {
            processor: self.processor.saturating_sub(before.processor),
            waited: self.waited.saturating_sub(before.waited),
            known: self.known && before.known,
        }
    }
}
