//! The steps of a run over time, in a bounded number of spans, for plots.
//!
//! Enters: a [`Run`] and the window over which its rates are taken. Leaves: a [`Timeline`] of at most [`SPANS`] equal
//! spans. Loads are averages over the span's time, idle time included, so that their mean over the window is that of the result; tokens and
//! steps count where the step ends.

use super::occupancy::{occupancy, overlap};
use super::serving_loop::Run;
use hbmark_core::result::serving::{SPANS, Span, Timeline};
use hbmark_core::units::whole_count;

/// Thousandths: more digits are noise, and take space.
fn short(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

/// The timeline of a run; `None` where it had no length.
pub fn timeline(run: &Run, window: (f64, f64)) -> Option<Timeline> {
    let end = run.end;
    if !(end.is_finite() && end > 0.0) || run.steps.is_empty() && run.remote.is_none() {
        return None;
    }
    let span_ns = end / SPANS as f64;
    let mut spans = vec![Span::default(); SPANS];
    for load in occupancy(run) {
        during(&mut spans, span_ns, (load.from, load.until), |span, share| {
            span.running += share * load.running as f64;
            span.waiting += share * load.waiting as f64;
        });
    }
    for step in &run.steps {
        let kv_use = step.load.used_blocks as f64 / step.load.total_blocks.max(1) as f64;
        during(&mut spans, span_ns, (step.begin, step.end), |span, share| {
            span.kv_use += share * kv_use;
            span.max_kv_use = span.max_kv_use.max(kv_use);
        });
        let span = &mut spans[place(step.end, span_ns, SPANS)];
        span.steps += 1;
        span.prompt_tokens += step.prompt_tokens;
        span.output_tokens += step.output_tokens;
        let longest = span.longest_step_ns.unwrap_or(0.0).max(step.end - step.begin);
        span.longest_step_ns = Some(longest);
    }
    if let Some(tokens) = &run.remote {
        for (index, span) in spans.iter_mut().enumerate() {
            let counted = tokens.between(index as f64 * span_ns, (index + 1) as f64 * span_ns);
            span.output_tokens = usize::try_from(counted).unwrap_or(usize::MAX);
        }
    }
    for span in &mut spans {
        for value in [&mut span.running, &mut span.waiting, &mut span.kv_use, &mut span.max_kv_use] {
            *value = short(*value);
        }
        span.longest_step_ns = span.longest_step_ns.map(f64::round);
    }
    Some(Timeline {
        window_from_ns: window.0.round(),
        window_to_ns: window.1.round(),
        span_ns: span_ns.round(),
        spans,
    })
}

/// Visits the spans from a moment until another, each with the share of it that lies between.
pub(super) fn during<T>(
    spans: &mut [T],
    span_ns: f64,
    (from, until): (f64, f64),
    mut visit: impl FnMut(&mut T, f64),
) {
    let place = |moment| place(moment, span_ns, spans.len());
    let (first, last) = (place(from), place(until));
    for (index, span) in (first..).zip(&mut spans[first..=last]) {
        let whole = (index as f64 * span_ns, (index + 1) as f64 * span_ns);
        visit(span, overlap((from, until), whole) / span_ns);
    }
}

/// The span that contains a moment.
fn place(moment: f64, span_ns: f64, spans: usize) -> usize {
    whole_count(moment / span_ns).min(spans - 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scheduler::SchedulerLoad;
    use crate::serving_loop::StepLog;

    fn step(begin: f64, end: f64, running: usize, waiting: usize) -> StepLog {
        let load = SchedulerLoad { running, waiting, used_blocks: 5, held_blocks: 5, total_blocks: 10 };
        // All of them are done: nothing runs until the next step.
        let finished = running;
        StepLog { begin, end, prompt_tokens: 3, output_tokens: running, finished, load, ..StepLog::default() }
    }

    fn run(steps: &[StepLog], end: f64) -> Run {
        Run { steps: steps.to_vec(), end, ..Run::default() }
    }

    #[test]
    fn loads_are_averages_over_time_and_tokens_count_where_a_step_ends() {
        // Spans of 10: a step over half of the first, then one over the second half of the third and all of the fourth.
        let end = 10.0 * SPANS as f64;
        let line = timeline(&run(&[step(0.0, 5.0, 4, 0), step(25.0, 39.0, 8, 0)], end), (5.0, 40.0)).unwrap();
        assert_eq!((line.spans.len(), line.span_ns), (SPANS, 10.0));
        let first = line.spans[0];
        assert_eq!((first.running, first.waiting, first.kv_use, first.max_kv_use), (2.0, 0.0, 0.25, 0.5));
        assert_eq!((first.steps, first.prompt_tokens, first.output_tokens), (1, 3, 4));
        assert_eq!((first.step_tokens(), first.longest_step_ns), (Some(7.0), Some(5.0)));
        assert_eq!(line.spans[1], Span::default(), "idle time is idle");
        assert_eq!((line.spans[2].running, line.spans[2].steps, line.spans[2].step_tokens()), (4.0, 0, None));
        assert_eq!((line.spans[3].running, line.spans[3].longest_step_ns), (7.2, Some(14.0)));
    }

    #[test]
    fn a_timeline_is_bounded_however_long_the_run() {
        let steps: Vec<StepLog> =
            (0..50_000).map(|i| step(f64::from(i) * 3.0, f64::from(i) * 3.0 + 2.0, 1, 0)).collect();
        let line = timeline(&run(&steps, 150_000.0), (0.0, 150_000.0)).unwrap();
        assert_eq!(line.spans.len(), SPANS);
        assert_eq!(line.spans.iter().map(|s| s.steps).sum::<usize>(), 50_000);
        assert!(line.spans.iter().all(|s| (s.running - 2.0 / 3.0).abs() < 0.01));
        assert_eq!(timeline(&run(&[], 5.0), (0.0, 5.0)), None);
        assert_eq!(timeline(&run(&steps, 0.0), (0.0, 0.0)), None);
    }
}
