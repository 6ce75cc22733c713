//! What is shown while traffic is served.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::serve::ServeObserver;
use hbmark_core::input::plain;
use hbmark_traffic::serving_loop::Progress;

/// Elapsed, running, waiting, tokens per second and KV use, on stderr; nothing when piped.
pub(super) struct LiveProgress {
    bar: ProgressBar,
    stage: String,
    shown: Instant,
    /// Elapsed seconds and tokens when last shown.
    before: (f64, usize),
}

impl LiveProgress {
    pub(super) fn new() -> Self {
        let bar = ProgressBar::with_draw_target(Some(1), ProgressDrawTarget::stderr());
        let style = ProgressStyle::with_template("{elapsed_precise} {bar:24} {pos:>4}/{len} {msg}")
            .expect("the template is a constant")
            .progress_chars("━╸ ");
        bar.set_style(style);
        Self { bar, stage: String::new(), shown: Instant::now(), before: (0.0, 0) }
    }

    /// Clears the line.
    pub(super) fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

/// A terminal is told so often: drawing takes time that the loop would lack.
const REFRESH: Duration = Duration::from_millis(250);

impl ServeObserver for LiveProgress {
    fn stage(&mut self, what: &str) {
        self.stage = plain(what);
        self.before = (0.0, 0);
        self.bar.set_position(0);
        self.bar.set_message(self.stage.clone());
    }

    fn progress(&mut self, progress: Progress) {
        if self.shown.elapsed() < REFRESH || self.bar.is_hidden() {
            return;
        }
        self.shown = Instant::now();
        let now = progress.elapsed.seconds();
        let (then, tokens) = self.before;
        let rate = if now > then {
            (progress.output_tokens.saturating_sub(tokens)) as f64 / (now - then)
        } else {
            0.0
        };
        self.before = (now, progress.output_tokens);
        let load = progress.load;
        self.bar.set_length(progress.total as u64);
        self.bar.set_position(progress.done as u64);
        self.bar.set_message(format!(
            "{} · {now:.1} s · running {} · waiting {} · {rate:.1} tok/s · KV {:.0} %",
            self.stage,
            load.running,
            load.waiting,
            load.used_blocks as f64 / load.total_blocks.max(1) as f64 * 100.0
        ));
    }
}
