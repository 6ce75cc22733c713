//! Progress on stderr: a bar on a terminal, nothing when piped.

mod eta;

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::worker::Observer;
use eta::Eta;
use hbmark_core::input::plain;
use hbmark_core::result::Cause;
use hbmark_core::units::Bytes;
use hbmark_report::analysis::words::counted;

/// What is shown while a benchmark runs.
#[derive(Debug)]
pub struct Progress {
    bar: ProgressBar,
    loading: bool,
    stage: String,
    details: String,
    /// When the details behind the stage were formatted last.
    detailed: Instant,
    begun: Instant,
    eta: Option<Eta>,
    /// Whether work that is left is said apart, and not counted from what is done.
    planned: bool,
    /// Blocks that were rejected, and why the last of them was.
    rejected: Option<(usize, String)>,
}

// The message is cut where the terminal ends.
const COUNTING: &str = "{elapsed_precise} {bar:12} {pos}/{len} {wide_msg}";
const LOADING: &str = "{elapsed_precise} {bar:12} {decimal_bytes}/{decimal_total_bytes} {wide_msg}";

/// Details are formatted no more often than this: without a worker, the measured loop does it.
const REFRESH: Duration = Duration::from_millis(200);

impl Progress {
    /// A bar on stderr, hidden unless that is a terminal.
    pub fn new() -> Self {
        let bar = ProgressBar::with_draw_target(Some(1), ProgressDrawTarget::stderr());
        bar.set_style(style(COUNTING));
        bar.enable_steady_tick(Duration::from_millis(250));
        let now = Instant::now();
        Self {
            bar,
            loading: false,
            stage: String::new(),
            details: String::new(),
            detailed: now,
            begun: now,
            eta: None,
            planned: false,
            rejected: None,
        }
    }

    /// Clears the bar.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }

    /// Lets the bar count from 0 again.
    fn count(&mut self, loading: bool, length: u64) {
        // In this order: the bar may be drawn in between.
        self.bar.set_position(0);
        self.bar.set_length(length);
        self.bar.set_style(style(if loading { LOADING } else { COUNTING }));
        self.loading = loading;
    }

    fn seconds(&self) -> f64 {
        self.begun.elapsed().as_secs_f64()
    }

    fn left(&self) -> Option<f64> {
        self.eta.as_ref()?.left(self.seconds())
    }

    fn show(&self) {
        self.bar.set_message(line(&self.stage, self.left(), self.rejected.as_ref(), &self.details));
    }
}

/// What is done, how long is left, what was rejected; what matters most comes first, for the end may be cut.
fn line(stage: &str, left: Option<f64>, rejected: Option<&(usize, String)>, details: &str) -> String {
    let mut parts = vec![stage.to_owned()];
    parts.extend(left.map(|seconds| format!("about {} left", eta::rounded(seconds))));
    parts.extend(rejected.map(|(count, why)| format!("{} rejected ({why})", counted(*count, "block"))));
    parts.push(details.to_owned());
    parts.retain(|part| !part.is_empty());
    parts.join(" · ")
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
        self.details.clear();
        self.show();
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
        let second = self.seconds();
        // Where it counts from the beginning again, something else is counted.
        if done == 0 || self.eta.is_none() {
            self.eta = Some(Eta::from(second));
        }
        if let (Some(eta), false) = (&mut self.eta, self.planned) {
            let left = total.saturating_sub(done) as f64;
            eta.update(second, done as f64, left, left);
        }
        if self.detailed.elapsed() >= REFRESH || done == 0 {
            self.detailed = Instant::now();
            self.details = plain(&details());
        }
        self.show();
    }

    fn remaining(&mut self, done: f64, least: f64, most: f64) {
        self.planned = true;
        let second = self.seconds();
        self.eta.get_or_insert_with(|| Eta::from(second)).update(second, done, least, most);
        self.show();
    }

    fn rejected(&mut self, cause: &Cause) {
        let count = self.rejected.as_ref().map_or(0, |(count, _)| *count) + 1;
        self.rejected = Some((count, plain(&cause.to_string())));
        self.show();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_what_is_left_and_what_was_rejected_before_the_details() {
        let rejected = (3, "foreign load: 0.9 cores busy with other processes".to_owned());
        assert_eq!(
            line(
                "timing native bf16",
                Some(75.0),
                Some(&rejected),
                "decode/native/bf16/b1/c128 (2 of 5 blocks)"
            ),
            "timing native bf16 · about 75 s left · 3 blocks rejected (foreign load: 0.9 cores busy with other \
             processes) · decode/native/bf16/b1/c128 (2 of 5 blocks)"
        );
        assert_eq!(line("loading", None, None, ""), "loading");
    }
}
