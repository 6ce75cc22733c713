//! Progress on stderr: a bar on a terminal, nothing when piped.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::measure::protocol::Event;

/// What is shown while a run goes on.
#[derive(Debug)]
pub struct Progress {
    bar: ProgressBar,
}

impl Progress {
    /// A bar on stderr, hidden unless that is a terminal.
    pub fn new() -> Self {
        let bar = ProgressBar::with_draw_target(Some(1), ProgressDrawTarget::stderr());
        let style = ProgressStyle::with_template("{elapsed_precise} {bar:24} {pos:>3}/{len} {msg}")
            .expect("the template is a constant")
            .progress_chars("━╸ ");
        bar.set_style(style);
        bar.enable_steady_tick(std::time::Duration::from_millis(250));
        Self { bar }
    }

    /// Clears the bar.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

impl crate::Observer for Progress {
    fn stage(&mut self, what: &str) {
        self.bar.set_message(what.to_owned());
    }

    fn event(&mut self, event: Event<'_>) {
        match event {
            Event::Round { round, rounds, open } => {
                self.bar.set_length((open * (rounds - round)) as u64);
                self.bar.set_position(0);
            }
            Event::Visiting { cell, accepted, wanted } => {
                self.bar.set_message(format!("{} ({accepted} of {wanted} blocks)", cell.id()));
                self.bar.inc(1);
            }
            Event::Finished { .. } => {}
        }
    }
}
