//! How many output tokens each event holds, and by what evidence.
//!
//! Enters: the deltas of one answer, in order. Leaves: at once, whether an event holds output; at the end, the evidence that covered the
//! whole answer, the tokens of each output event by it, and whether something disagrees.
//!
//! # What counts
//! - **Output** is text, reasoning, a fragment of a tool call, a token id, an entry of log probabilities, or a running count that grew: a
//!   token whose text is held back (half a character, the end of the sequence) is a token all the same. A role, an empty delta, a comment
//!   and a usage alone are none. Reasoning is output like text; the first event with *text* or a tool call is marked apart
//!   ([`Output::Content`]), for time to first token and time to first content are both asked for.
//! - **Evidence** is, best first: the running count, the ids, the entries of log probabilities, the final count, the events.
//!   One of the first three *covers* an answer if each output event has it; where one does not, the next better one is used for the
//!   whole answer. Levels are never mixed.
//! - **The running count** of an event is what it grew by since the last event with one; before the first event it is zero. So a first
//!   event with three tokens holds three, and a speculative burst or a merged event what it holds. It is a running count if it
//!   is beside a choice, from the first output event on: one that comes later, or without a choice, is the final count. A running count that
//!   shrinks, or that is zero all along, covers nothing.
//! - **Two levels that disagree on one event**: the better one counts, unless it has shown nothing so far. The other one is out, and
//!   [`Tally::conflict`] says so.
//! - **The final count** is the last usable one of the answer. Where it is the only evidence, nothing says that the first event held more
//!   than one token: it gets one, and the others share the rest evenly, the remainder from the second event on. So TPOT divides by N − 1, as
//!   other clients do. An answer in one event has all its tokens there, and no TPOT.
//! - Where the final count differs from the sum over the events, [`Tally::counted`] and [`Tally::output_tokens`] differ: rates are of the
//!   latter, the times between tokens of the former.
//!
//! The counts of the events are the caller's list, four bytes each. No text is kept.

use hbmark_core::result::serving::TokenEvidence;

use super::event::{Counts, Delta, Usage};

/// Levels that count within one event, best first.
const LEVELS: [TokenEvidence; 3] =
    [TokenEvidence::ContinuousUsage, TokenEvidence::TokenIds, TokenEvidence::Logprobs];

/// What an event with output holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Output {
    /// Text or a tool call.
    Content,
    /// Only reasoning, or a token without text.
    Other,
}

/// The tokens of one answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tally {
    pub evidence: TokenEvidence,
    /// The final count of the server, else the sum over the events.
    pub output_tokens: u64,
    /// The sum over the events.
    pub counted: u64,
    pub prompt_tokens: Option<u32>,
    pub cached_tokens: Option<u32>,
    /// Two kinds of evidence counted differently in one event.
    pub conflict: bool,
}

impl Tally {
    /// Whether the final count and the sum over the events differ. One token more at the end is no difference: the end of the sequence, or
    /// half a character, that no event was sent for.
    pub fn disagrees(&self) -> bool {
        self.output_tokens != self.counted && self.output_tokens != self.counted + 1
    }
}

/// One kind of evidence within events.
#[derive(Debug, Clone, Copy, Default)]
struct Level {
    /// An output event lacked it, or it was wrong in one: it does not cover the answer.
    lost: bool,
    sum: u64,
}

/// Counts the tokens of one answer.
#[derive(Debug, Default)]
pub struct TokenCounter {
    levels: [Level; 3],
    /// The last running count, once there is one.
    running: Option<u32>,
    last: Option<Counts>,
    conflict: bool,
    shrank: bool,
}

impl TokenCounter {
    /// Takes the next event. If it holds output, adds an entry to `tokens`, the list of this answer's output events.
    pub fn event(&mut self, delta: &Delta<'_>, tokens: &mut Vec<u32>) -> Option<Output> {
        self.note_usage(delta);
        let grown = self.grown(delta, tokens.is_empty());
        let counts = [grown, delta.ids, delta.logprobs];
        let has_content = !delta.text.is_empty() || !delta.tool_calls.is_empty();
        // A text that is repeated whole in each event is no sign of a new token.
        let has_text = !delta.cumulative && (has_content || !delta.reasoning.is_empty());
        if !has_text && counts.iter().all(|count| count.unwrap_or(0) == 0) {
            return None;
        }
        tokens.push(self.agree(counts).unwrap_or(0));
        Some(if has_content { Output::Content } else { Output::Other })
    }

    /// The answer is over. Leaves in `tokens` the tokens of each output event.
    pub fn finish(&self, tokens: &mut [u32]) -> Tally {
        let reported = self.last.map(|counts| u64::from(counts.output));
        // A server that reports no tokens for an answer with output reports nothing, which is a contradiction.
        let is_believed = reported != Some(0) || tokens.is_empty();
        let reported = reported.filter(|_| is_believed);
        let covering = self.levels.iter().position(|level| !level.lost && level.sum > 0);
        let evidence = if tokens.is_empty() {
            if reported.is_some() { TokenEvidence::FinalUsage } else { TokenEvidence::Events }
        } else if let Some(level) = covering {
            LEVELS[level]
        } else if let Some(total) = reported {
            spread(total, tokens);
            TokenEvidence::FinalUsage
        } else {
            tokens.fill(1);
            TokenEvidence::Events
        };
        let counted = tokens.iter().map(|&count| u64::from(count)).sum();
        Tally {
            evidence,
            output_tokens: reported.unwrap_or(counted),
            counted,
            prompt_tokens: self.last.and_then(|counts| counts.prompt),
            cached_tokens: self.last.and_then(|counts| counts.cached),
            conflict: self.conflict || !is_believed,
        }
    }

    fn note_usage(&mut self, delta: &Delta<'_>) {
        let counts = match delta.usage {
            Usage::Known(counts) => counts,
            Usage::Unusable => return,
            Usage::Absent => match delta.timings.output.0 {
                Some(output) => Counts { output, prompt: None, cached: None },
                None => return,
            },
        };
        let before = self.last.unwrap_or_default();
        // What only one of several usages says is kept.
        self.last = Some(Counts {
            output: counts.output,
            prompt: counts.prompt.or(before.prompt),
            cached: counts.cached.or(delta.timings.cached.0).or(before.cached),
        });
    }

    /// What the running count grew by in this event.
    fn grown(&mut self, delta: &Delta<'_>, is_first: bool) -> Option<u32> {
        let now = delta.running?;
        let before = match self.running {
            Some(before) => before,
            None if is_first => 0,
            // The total, not a running count.
            None => return None,
        };
        self.running = Some(now);
        if now < before {
            self.shrank = true;
            self.levels[0].lost = true;
        }
        (!self.shrank).then(|| now - before)
    }

    /// The tokens of an output event, by the best evidence that has covered everything so far. By construction such levels agreed on all
    /// events before, so that the entries made before stay right when a better level is lost.
    fn agree(&mut self, counts: [Option<u32>; 3]) -> Option<u32> {
        for (level, count) in self.levels.iter_mut().zip(counts) {
            match count {
                Some(count) => level.sum += u64::from(count),
                None => level.lost = true,
            }
        }
        for (level, count) in counts.iter().enumerate() {
            let Some(count) = count.filter(|_| !self.levels[level].lost) else { continue };
            let (upto, worse) = self.levels.split_at_mut(level + 1);
            let mut differing = worse
                .iter_mut()
                .zip(&counts[level + 1..])
                .filter(|(other, theirs)| !other.lost && **theirs != Some(count))
                .map(|(other, _)| other)
                .peekable();
            if differing.peek().is_none() {
                return Some(count);
            }
            self.conflict = true;
            if upto[level].sum > 0 {
                differing.for_each(|other| other.lost = true);
                return Some(count);
            }
            upto[level].lost = true;
        }
        None
    }
}

/// Spreads a total, at least one, over the events: one token to the first, the rest in equal parts over the others.
///
/// *Source*: TPOT is (E2E − TTFT) ÷ (N − 1) in `vllm bench serve`; GuideLLM and AIPerf define their inter-token latency so.
fn spread(total: u64, tokens: &mut [u32]) {
    let count = |share: u64| u32::try_from(share).unwrap_or(u32::MAX);
    match tokens {
        [] => {}
        [only] => *only = count(total),
        [first, others @ ..] => {
            *first = 1;
            let (rest, events) = (total.saturating_sub(1), others.len() as u64);
            for (event, tokens) in (0_u64..).zip(others) {
                *tokens = count(rest / events + u64::from(event < rest % events));
            }
        }
    }
}

#[cfg(test)]
mod tests;
