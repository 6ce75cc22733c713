//! Reads the page beside a run, on a thread of its own.
//!
//! Enters: where the page is, and how often to read it. Leaves: [`Readings`]. The thread gives way to the measured ones, each reading is bounded in
//! time and size, and a failure is counted, never waited out.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hbmark_core::result::serving::FetchFailure;

use super::{MAX_PAGE_BYTES, Readings, Scrape, Snapshot};
use crate::fetch::Fetcher;
use crate::target::Target;

/// Of one reading.
const TIMEOUT: Duration = Duration::from_secs(1);

/// Nice value of the thread: it reads when there is nothing else to do, and the moment it read at is known anyway.
const NICE: i32 = 10;

/// Where a page is.
#[derive(Debug, Clone)]
pub struct Source {
    fetcher: Fetcher,
    /// A path below the target's root, or a URL.
    page: String,
}

impl Source {
    /// The page of a target: a path below its root, or a whole URL, to which the key goes only if it is the target's own host and port.
    pub fn new(target: &Target, page: &str) -> Self {
        Self { fetcher: Fetcher::new(target, TIMEOUT, MAX_PAGE_BYTES), page: page.to_owned() }
    }

    /// One reading.
    ///
    /// # Errors
    ///
    /// When there is no answer, or none of its series is known.
    pub fn read(&self) -> Result<Scrape, FetchFailure> {
        let begin = Instant::now();
        let answer = self.fetcher.get(&self.page);
        let took = begin.elapsed();
        let snapshot = Snapshot::read(&answer?);
        snapshot.dialect().ok_or(FetchFailure::NotUnderstood)?;
        Ok(Scrape { at: begin + took / 2, took, snapshot })
    }
}

/// Reads a page until it is stopped.
#[derive(Debug)]
pub struct Scraper {
    /// Dropped to stop.
    stop: Sender<()>,
    thread: JoinHandle<Readings>,
}

impl Scraper {
    /// Reads the page once, then goes on reading beside the caller.
    ///
    /// # Errors
    ///
    /// When the system gives no thread.
    pub fn start(source: Source, interval: Duration) -> std::io::Result<Self> {
        let mut readings = Readings::default();
        readings.take(&source);
        let (stop, stopped) = channel();
        let thread = std::thread::Builder::new()
            .name("metrics".to_owned())
            .spawn(move || read_until(&stopped, &source, interval, readings))?;
        Ok(Self { stop, thread })
    }

    /// Reads the page a last time and ends; takes two timeouts at most.
    pub fn stop(self) -> Readings {
        drop(self.stop);
        self.thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

impl Readings {
    fn take(&mut self, source: &Source) {
        match source.read() {
            Ok(scrape) => self.scrapes.push(scrape),
            Err(failure) => *self.failures.entry(failure).or_default() += 1,
        }
    }
}

fn read_until(
    stopped: &Receiver<()>,
    source: &Source,
    interval: Duration,
    mut readings: Readings,
) -> Readings {
    // Best effort. On other systems it would slow the whole process.
    if cfg!(target_os = "linux") {
        let _ = rustix::process::nice(NICE);
    }
    let mut due = Instant::now() + interval;
    let wait = |due: Instant| stopped.recv_timeout(due.saturating_duration_since(Instant::now()));
    while wait(due) == Err(RecvTimeoutError::Timeout) {
        readings.take(source);
        due += interval;
        let now = Instant::now();
        if due < now {
            // Readings that were missed are not made up for.
            due = now + interval;
        }
    }
    readings.take(source);
    readings
}
