//! Progress on stderr: a bar on a terminal, nothing when piped.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::worker::Observer;
use hbmark_core::input::plain;
use hbmark_core::units::Bytes;

/// What is shown while a benchmark runs.
#[derive(Debug)]
pub struct Progress {
    bar: ProgressBar,
    /// The template of the bar, when it does not count bytes of weights.
    counting: &'static str,
    loading: bool,
    stage: String,
    /// When the details behind the stage were formatted last.
    detailed: Instant,
}

const COUNTING: &str = "{elapsed_precise} {bar:24} {pos:>4}/{len} {msg}";
const LAUNCHES: &str = "{elapsed_precise} {bar:24} {pos:>4}/{len} {msg} ({eta} left)";
const LOADING: &str = "{elapsed_precise} {bar:24} {decimal_bytes}/{decimal_total_bytes} {msg}";

/// Details are formatted no more often than this: without a worker, the measured loop does it.
const REFRESH: Duration = Duration::from_millis(200);

impl Progress {
    /// A bar on stderr, hidden unless that is a terminal.
    pub fn new() -> Self {
        Self::of(COUNTING)
    }

    /// The same with the time that is left.
    pub fn with_eta() -> Self {
        Self::of(LAUNCHES)
    }

    fn of(counting: &'static str) -> Self {
        let bar = ProgressBar::with_draw_target(Some(1), ProgressDrawTarget::stderr());
        bar.set_style(style(counting));
        bar.enable_steady_tick(Duration::from_millis(250));
        Self { bar, counting, loading: false, stage: String::new(), detailed: Instant::now() }
    }

    /// Clears the bar.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }

    /// Lets the bar count from 0 again.
    fn count(&mut self, loading: bool, length: u64) {
        self.bar.set_style(style(if loading { LOADING } else { self.counting }));
        self.bar.set_length(length);
        self.bar.set_position(0);
        self.loading = loading;
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).expect("the templates are constants").progress_chars("━╸ ")
}

impl Observer for Progress {
    fn stage(&mut self, what: &str) {
        if self.loading {
            self.count(false, 1);
        }
        self.stage = plain(what);
        self.bar.set_message(self.stage.clone());
    }

    // indicatif draws at most twenty times a second, however often it is called.
    fn loaded(&mut self, done: Bytes, total: Bytes) {
        if !self.loading {
            self.count(true, total.0);
        }
        self.bar.set_position(done.0.min(total.0));
    }

    fn progress(&mut self, done: usize, total: usize, details: &mut dyn FnMut() -> String) {
        if self.bar.is_hidden() {
            return;
        }
        self.bar.set_length(total as u64);
        self.bar.set_position(done as u64);
        if self.detailed.elapsed() >= REFRESH {
            self.detailed = Instant::now();
            let details = details();
            if !details.is_empty() {
                self.bar.set_message(format!("{} · {}", self.stage, plain(&details)));
            }
        }
    }
}
