//! Progress on stderr: a bar on a terminal, nothing when piped.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::measure::protocol::Event;
use hbmark_core::input::plain;
use hbmark_core::units::Bytes;

/// What is shown while a run goes on.
#[derive(Debug)]
pub struct Progress {
    bar: ProgressBar,
    /// Whether the bar counts bytes of weights now, and not visits of cells.
    loading: bool,
}

const CELLS: &str = "{elapsed_precise} {bar:24} {pos:>3}/{len} {msg}";
const LOADING: &str = "{elapsed_precise} {bar:24} {decimal_bytes}/{decimal_total_bytes} {msg}";

impl Progress {
    /// A bar on stderr, hidden unless that is a terminal.
    pub fn new() -> Self {
        let bar = ProgressBar::with_draw_target(Some(1), ProgressDrawTarget::stderr());
        bar.set_style(style(CELLS));
        bar.enable_steady_tick(std::time::Duration::from_millis(250));
        Self { bar, loading: false }
    }

    /// Clears the bar.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }

    /// Lets the bar count from 0 again.
    fn count(&mut self, loading: bool, length: u64) {
        self.bar.set_style(style(if loading { LOADING } else { CELLS }));
        self.bar.set_length(length);
        self.bar.set_position(0);
        self.loading = loading;
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).expect("the templates are constants").progress_chars("━╸ ")
}

impl crate::run::Observer for Progress {
    fn stage(&mut self, what: &str) {
        if self.loading {
            self.count(false, 1);
        }
        self.bar.set_message(plain(what));
    }

    // indicatif draws at most twenty times a second, however often it is told.
    fn loaded(&mut self, done: Bytes, total: Bytes) {
        if !self.loading {
            self.count(true, total.0);
        }
        self.bar.set_position(done.0.min(total.0));
    }

    fn event(&mut self, event: Event<'_>) {
        match event {
            Event::Round { round, rounds, open } => {
                self.bar.set_length((open * (rounds - round)) as u64);
                self.bar.set_position(0);
            }
            Event::Visiting { cell, accepted, wanted } => {
                let id = plain(&cell.id());
                self.bar.set_message(format!("{id} ({accepted} of {wanted} blocks)"));
                self.bar.inc(1);
            }
            Event::Finished { .. } => {}
        }
    }
}
