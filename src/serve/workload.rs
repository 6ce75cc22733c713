//! What requests look like: lengths, shared prefixes, turns, tenants.
//!
//! Enters: a name, a file, lengths, or a trace, and the seed. Leaves: [`Planned`] requests with absolute arrival times, all of them made
//! before the clock starts. A prompt is kept as a few [`Stretch`]es of seeded tokens, so that equal prefixes are equal by construction,
//! different requests differ, and an hour of traffic fits in memory. It knows no engine and no clock.
//!
//! The prompt length drawn is the prompt length sent, in tokens. Seeds reach the tokens, so that another seed or another point of a sweep
//! never meets the cache of the last one.

use std::path::{Path, PathBuf};

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, Exp1, LogNormal};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::arrivals::{Arrivals, Burst, deadlines};
use super::trace::Trace;
use crate::intake::{self, Refused};
use crate::units::Nanos;

/// Part of a prompt: the first `tokens` tokens of an endless seeded text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Stretch {
    pub source: u64,
    pub tokens: u32,
}

/// One request, planned.
#[derive(Debug, Clone, PartialEq)]
pub struct Planned {
    /// Scheduled arrival since the start; 0 in a closed loop, whose arrivals are completions.
    pub arrival: Nanos,
    pub prompt: Vec<Stretch>,
    pub output_len: usize,
    /// Lower goes first where the scheduler looks at it.
    pub priority: i32,
    pub tenant: u16,
}

impl Planned {
    /// Tokens of the prompt.
    #[must_use]
    pub fn prompt_len(&self) -> usize {
        self.prompt.iter().map(|stretch| stretch.tokens as usize).sum()
    }

    /// The prompt as token ids below `vocab`.
    ///
    /// # Panics
    /// When the vocabulary is empty or beyond 32 bits.
    #[must_use]
    pub fn tokens(&self, vocab: usize) -> Vec<u32> {
        let vocab = u64::try_from(vocab).expect("a count");
        let mut tokens = Vec::with_capacity(self.prompt_len());
        for stretch in &self.prompt {
            let token = |position| u32::try_from(mix(stretch.source, position) % vocab).expect("below 2^32");
            tokens.extend((0..u64::from(stretch.tokens)).map(token));
        }
        tokens
    }
}

/// A 64-bit hash of two numbers. *Source*: the finaliser of SplitMix64 (Steele, Lea, Flood 2014).
#[must_use]
pub fn mix(a: u64, b: u64) -> u64 {
    let mut z = a ^ b.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// How lengths are distributed, in tokens.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "distribution", rename_all = "snake_case", deny_unknown_fields)]
pub enum Lengths {
    Fixed {
        tokens: usize,
    },
    /// A log-normal with this mean and coefficient of variation, cut at both ends.
    Lognormal {
        mean: f64,
        cv: f64,
        min: usize,
        max: usize,
    },
    /// Uniform within buckets `[from, to, weight]`.
    Histogram {
        buckets: Vec<(usize, usize, f64)>,
    },
    /// Drawn from these values.
    Empirical {
        tokens: Vec<usize>,
    },
}

/// The longest length a workload may draw.
const MAX_TOKENS: usize = 10_000_000;

impl Lengths {
    /// What is wrong with it, if anything.
    fn check(&self) -> Result<(), String> {
        let within = |tokens: usize| (1..=MAX_TOKENS).contains(&tokens);
        match self {
            Self::Fixed { tokens } if !within(*tokens) => {
                Err(format!("a length of {tokens} is not between 1 and {MAX_TOKENS}"))
            }
            Self::Lognormal { mean, cv, min, max } => {
                if !(within(*min) && within(*max) && min <= max) {
                    Err(format!("lengths from {min} to {max} are no range between 1 and {MAX_TOKENS}"))
                } else if !(*mean >= *min as f64 && *mean <= *max as f64) {
                    Err(format!("a mean of {mean} is not between {min} and {max}"))
                } else if !(*cv > 0.0 && *cv <= 10.0) {
                    Err(format!("a coefficient of variation of {cv} is not above 0 and at most 10"))
                } else {
                    Ok(())
                }
            }
            Self::Histogram { buckets } => {
                let good = |(from, to, weight): &(usize, usize, f64)| {
                    within(*from) && within(*to) && from <= to && (0.0..=MAX_SHARE).contains(weight)
                };
                if buckets.len() > 10_000 || !buckets.iter().all(good) {
                    Err("a bucket is [from, to, weight] with 1 ≤ from ≤ to and a weight of at least 0".into())
                } else if buckets.iter().map(|b| b.2).sum::<f64>() <= 0.0 {
                    Err("a histogram needs a bucket with weight".into())
                } else {
                    Ok(())
                }
            }
            Self::Empirical { tokens } => {
                if tokens.is_empty() || !tokens.iter().all(|t| within(*t)) {
                    Err(format!("empirical lengths are a list of numbers between 1 and {MAX_TOKENS}"))
                } else {
                    Ok(())
                }
            }
            Self::Fixed { .. } => Ok(()),
        }
    }

    /// Draws one length.
    fn draw(&self, random: &mut ChaCha8Rng) -> usize {
        match self {
            Self::Fixed { tokens } => *tokens,
            Self::Lognormal { mean, cv, min, max } => {
                let variance = (1.0 + cv * cv).ln();
                let normal = LogNormal::new(mean.ln() - variance / 2.0, variance.sqrt());
                let drawn: f64 = normal.expect("checked when it was read").sample(random).round();
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "between two counts, both far below 2^53"
                )]
                let tokens = drawn.clamp(*min as f64, *max as f64) as usize;
                tokens
            }
            Self::Histogram { buckets } => {
                let total: f64 = buckets.iter().map(|b| b.2).sum();
                let mut at = random.random_range(0.0..total);
                let mut chosen = buckets.iter().filter(|b| b.2 > 0.0);
                let mut bucket = chosen.next().expect("checked when it was read");
                for next in chosen {
                    if at < bucket.2 {
                        break;
                    }
                    at -= bucket.2;
                    bucket = next;
                }
                random.random_range(bucket.0..=bucket.1)
            }
            Self::Empirical { tokens } => tokens[random.random_range(0..tokens.len())],
        }
    }
}

/// A beginning that some requests share, in front of their own prompt.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SharedPrefix {
    pub tokens: usize,
    /// Share of the requests that have it.
    pub share: f64,
    /// Different prefixes, one drawn per request (or per session).
    #[serde(default = "one")]
    pub groups: usize,
}

fn one() -> usize {
    1
}

/// Conversations: each turn's prompt is everything before it, answers included, and something new.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Session {
    pub turns: usize,
    /// Mean of the exponential gap between the arrivals of two turns, seconds.
    pub think_s: f64,
}

/// Somebody who sends a share of the requests.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Tenant {
    pub name: String,
    pub share: f64,
    #[serde(default)]
    pub priority: i32,
}

/// A workload: everything about requests but when they come.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Workload {
    pub name: String,
    /// Where the figures are from.
    #[serde(default)]
    pub source: String,
    pub input: Lengths,
    pub output: Lengths,
    #[serde(default)]
    pub prefix: Option<SharedPrefix>,
    #[serde(default)]
    pub session: Option<Session>,
    #[serde(default)]
    pub tenants: Vec<Tenant>,
}

/// Why a workload cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum WorkloadError {
    #[error("--workload `{given}` is neither a file nor one of {}", NAMES.join(", "))]
    Unknown { given: String },
    #[error("cannot read the workload {}: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("the workload {} has {bytes} bytes, above the limit of {MAX_FILE}", path.display())]
    TooLarge { path: PathBuf, bytes: u64 },
    #[error("the workload {} does not parse: {problem}", path.display())]
    Parse { path: PathBuf, problem: String },
    #[error("the workload {name}: {problem}")]
    Invalid { name: String, problem: String },
}

/// A workload file is a page of text.
const MAX_FILE: u64 = 512 << 10;
/// Weights and shares are relative; beyond this their sum is no number.
const MAX_SHARE: f64 = 1e12;

/// The workloads with a name.
pub const NAMES: &[&str] = &["chat", "code", "long-context-qa", "summarization", "rag", "agents", "batch"];

impl Workload {
    /// A workload of a name. Means are those in common use for these classes; the spread (coefficient of variation 1, as wide as production
    /// traces of chat are) and the cuts are ours.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        let spread = |mean: usize, cv: f64| Lengths::Lognormal {
            mean: mean as f64,
            cv,
            min: (mean / 16).max(1),
            max: mean * 8,
        };
        let plain = |input: usize, output: usize, what: &str| Self {
            name: name.to_owned(),
            source: format!(
                "{what}: {input} in, {output} out on average, the means in common use for this class; log-normal with a coefficient \
                 of variation of 1, cut at 1/16 and 8 times the mean"
            ),
            input: spread(input, 1.0),
            output: spread(output, 1.0),
            prefix: None,
            session: None,
            tenants: Vec::new(),
        };
        Some(match name {
            "chat" => plain(500, 200, "short chat"),
            "code" => plain(1500, 500, "code assistance"),
            "long-context-qa" => plain(16_000, 300, "questions about a long document"),
            "summarization" => plain(4000, 150, "summaries"),
            "rag" => Self {
                prefix: Some(SharedPrefix { tokens: 256, share: 1.0, groups: 1 }),
                ..plain(3840, 256, "retrieved passages behind an instruction of 256 tokens that all share")
            },
            "agents" => Self {
                prefix: Some(SharedPrefix { tokens: 2048, share: 1.0, groups: 4 }),
                session: Some(Session { turns: 6, think_s: 5.0 }),
                ..plain(
                    400,
                    150,
                    "tool-using agents: four system prompts of 2048 tokens, six turns that each repeat all before",
                )
            },
            "batch" => plain(1024, 1024, "offline generation; meant for --rate inf"),
            _ => return None,
        })
    }

    /// A workload by name or from a TOML file.
    ///
    /// # Errors
    /// When there is no such name or file, or the file does not describe a workload.
    pub fn open(given: &str) -> Result<Self, WorkloadError> {
        if let Some(workload) = Self::named(given) {
            return Ok(workload);
        }
        let path = Path::new(given);
        if !path.extension().is_some_and(|e| e.eq_ignore_ascii_case("toml")) {
            return Err(WorkloadError::Unknown { given: given.to_owned() });
        }
        let text = intake::read_text(path, MAX_FILE).map_err(|refused| {
            let path = path.to_path_buf();
            match refused {
                Refused::TooLarge { size, .. } => WorkloadError::TooLarge { path, bytes: size },
                Refused::Io(source) => WorkloadError::Read { path, source },
                other => WorkloadError::Read { path, source: std::io::Error::other(other) },
            }
        })?;
        Self::parse(&text, path)
    }

    /// A workload from the text of a TOML file; `path` is only for messages.
    ///
    /// # Errors
    /// When the text does not describe a workload.
    pub fn parse(text: &str, path: &Path) -> Result<Self, WorkloadError> {
        let workload: Self = toml::from_str(text).map_err(|error| WorkloadError::Parse {
            path: path.to_path_buf(),
            problem: error.message().chars().take(200).collect(),
        })?;
        workload.checked()
    }

    /// Prompts and outputs of one length each.
    ///
    /// # Errors
    /// When a length is out of bounds.
    pub fn fixed(input: usize, output: usize) -> Result<Self, WorkloadError> {
        Self {
            name: format!("fixed {input}/{output}"),
            source: "lengths given on the command line".into(),
            input: Lengths::Fixed { tokens: input },
            output: Lengths::Fixed { tokens: output },
            prefix: None,
            session: None,
            tenants: Vec::new(),
        }
        .checked()
    }

    /// The workload, if every number in it is one that can be drawn.
    ///
    /// # Errors
    /// [`WorkloadError::Invalid`], saying which is not.
    pub fn checked(self) -> Result<Self, WorkloadError> {
        let problem = self
            .input
            .check()
            .err()
            .map(|p| format!("input: {p}"))
            .or_else(|| self.output.check().err().map(|p| format!("output: {p}")))
            .or_else(|| {
                let prefix = self.prefix?;
                let good = (1..=MAX_TOKENS).contains(&prefix.tokens)
                    && (0.0..=1.0).contains(&prefix.share)
                    && (1..=1_000_000).contains(&prefix.groups);
                (!good).then(|| {
                    "prefix: tokens and groups are at least 1, and the share lies between 0 and 1".to_owned()
                })
            })
            .or_else(|| {
                let session = self.session?;
                let good = (1..=1_000).contains(&session.turns)
                    && session.think_s.is_finite()
                    && (0.0..=86_400.0).contains(&session.think_s);
                (!good).then(|| "session: 1 to 1000 turns, thinking of 0 to 86400 s".to_owned())
            })
            .or_else(|| {
                let good = self.tenants.iter().all(|t| t.share > 0.0 && t.share <= MAX_SHARE);
                (!good || self.tenants.len() > 1_000)
                    .then(|| "tenants: at most 1000, each with a share above 0".to_owned())
            });
        match problem {
            Some(problem) => Err(WorkloadError::Invalid { name: self.name, problem }),
            None => Ok(self),
        }
    }

    /// Plans `count` requests at a mean rate per second; `None` sends all at once (or, in a closed loop, one per completion).
    #[must_use]
    pub fn plan(
        &self,
        rate: Option<f64>,
        process: Arrivals,
        burst: Option<Burst>,
        count: usize,
        seed: u64,
    ) -> Vec<Planned> {
        let turns = self.session.map_or(1, |session| session.turns);
        let sessions = count.div_ceil(turns);
        let starts = match rate {
            Some(rate) => deadlines(process, burst, rate / turns as f64, sessions, mix(seed, 0)),
            None => vec![Nanos(0.0); sessions],
        };
        let mut random = ChaCha8Rng::seed_from_u64(mix(seed, 1));
        let mut requests: Vec<Planned> = Vec::with_capacity(sessions * turns);
        for (index, start) in starts.into_iter().enumerate() {
            self.plan_session(index as u64, start, rate.is_some(), seed, &mut random, &mut requests);
        }
        // Turns of different sessions interleave.
        requests.sort_by(|a, b| a.arrival.0.total_cmp(&b.arrival.0));
        requests.truncate(count);
        requests
    }

    fn plan_session(
        &self,
        index: u64,
        start: Nanos,
        timed: bool,
        seed: u64,
        random: &mut ChaCha8Rng,
        requests: &mut Vec<Planned>,
    ) {
        let mut history = Vec::new();
        if let Some(prefix) = self.prefix
            && random.random_bool(prefix.share)
        {
            let group = random.random_range(0..prefix.groups) as u64;
            history.push(stretch(mix(mix(seed, 2), group), prefix.tokens));
        }
        let (tenant, priority) = self.draw_tenant(random);
        let mut arrival = start;
        for turn in 0..self.session.map_or(1, |session| session.turns) as u64 {
            let own = mix(mix(mix(seed, 3), index), turn);
            history.push(stretch(own, self.input.draw(random)));
            let output_len = self.output.draw(random);
            requests.push(Planned { arrival, prompt: history.clone(), output_len, priority, tenant });
            // What will really be generated is not known yet; a text of that length stands for it.
            history.push(stretch(mix(own, 1), output_len));
            let gap: f64 = Exp1.sample(random);
            if let Some(session) = self.session
                && timed
            {
                arrival = Nanos(arrival.0 + gap * session.think_s * 1e9);
            }
        }
    }

    fn draw_tenant(&self, random: &mut ChaCha8Rng) -> (u16, i32) {
        let total: f64 = self.tenants.iter().map(|t| t.share).sum();
        if total <= 0.0 {
            return (0, 0);
        }
        let mut at = random.random_range(0.0..total);
        let mut chosen = 0;
        for (index, tenant) in self.tenants.iter().enumerate() {
            chosen = index;
            if at < tenant.share {
                break;
            }
            at -= tenant.share;
        }
        (u16::try_from(chosen).expect("at most 1000 tenants"), self.tenants[chosen].priority)
    }
}

fn stretch(source: u64, tokens: usize) -> Stretch {
    Stretch { source, tokens: u32::try_from(tokens).expect("lengths are bounded") }
}

/// Plans the requests of a trace. Times are multiplied by `time_scale`: 0.5 is twice the recorded rate.
#[must_use]
pub fn plan_trace(trace: &Trace, time_scale: f64, seed: u64) -> Vec<Planned> {
    let own = |index: usize| mix(mix(seed, 4), index as u64);
    trace
        .requests
        .iter()
        .enumerate()
        .map(|(index, request)| {
            let mut left = request.input_tokens;
            let mut prompt = Vec::with_capacity(request.prefix_ids.len() + 1);
            for id in &request.prefix_ids {
                let tokens = left.min(request.prefix_block);
                prompt.push(stretch(mix(mix(seed, 5), *id), tokens));
                left -= tokens;
            }
            if left > 0 {
                prompt.push(stretch(own(index), left));
            }
            Planned {
                arrival: Nanos(request.arrival.0 * time_scale),
                prompt,
                output_len: request.output_tokens,
                priority: request.priority,
                tenant: 0,
            }
        })
        .collect()
}

/// The cold twin of a plan: the same arrivals and lengths, and no stretch that two requests share.
#[must_use]
pub fn without_sharing(plan: &[Planned], seed: u64) -> Vec<Planned> {
    let mut plan = plan.to_vec();
    for (index, request) in plan.iter_mut().enumerate() {
        for (part, stretch) in request.prompt.iter_mut().enumerate() {
            stretch.source = mix(mix(mix(seed, 6), index as u64), part as u64);
        }
    }
    plan
}

/// Share of the prompt tokens that a cache without an end would find, in whole blocks and in order of arrival.
///
/// # Panics
/// When a block has no positions.
#[must_use]
pub fn ideal_hit_rate(plan: &[Planned], block_size: usize) -> Option<f64> {
    let mut seen = std::collections::HashSet::new();
    let (mut found, mut all) = (0_usize, 0_usize);
    for request in plan {
        // Stretches are equal by construction, so a block is named by what of which stretches it holds.
        let length = request.prompt_len();
        all += length;
        let mut chain = 0;
        let mut still_found = true;
        let mut stretches = request.prompt.iter();
        let (mut current, mut offset) = (stretches.next().copied(), 0_usize);
        // The last token is always computed.
        for block in 0..length / block_size {
            let mut left = block_size;
            while left > 0 {
                let part = current.expect("a block lies within the prompt");
                let here = left.min(part.tokens as usize - offset);
                chain = mix(mix(mix(chain, part.source), offset as u64), here as u64);
                left -= here;
                offset += here;
                if offset == part.tokens as usize {
                    (current, offset) = (stretches.next().copied(), 0);
                }
            }
            still_found &= !seen.insert(chain);
            if still_found && (block + 1) * block_size < length {
                found += block_size;
            }
        }
    }
    (all > 0).then(|| found as f64 / all as f64)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::stats::mean;

    fn plan(workload: &Workload, count: usize, seed: u64) -> Vec<Planned> {
        workload.plan(Some(10.0), Arrivals::Poisson, None, count, seed)
    }

    #[test]
    fn named_workloads_have_the_means_they_claim() {
        for (name, input, output) in [
            ("chat", 500.0, 200.0),
            ("code", 1500.0, 500.0),
            ("long-context-qa", 16_000.0, 300.0),
            ("summarization", 4000.0, 150.0),
            ("rag", 4096.0, 256.0),
            ("batch", 1024.0, 1024.0),
        ] {
            let plan = plan(&Workload::named(name).unwrap(), 20_000, 1);
            let of =
                |f: &dyn Fn(&Planned) -> usize| mean(&plan.iter().map(|p| f(p) as f64).collect::<Vec<_>>());
            assert!(
                (of(&Planned::prompt_len) / input - 1.0).abs() < 0.03,
                "{name}: {}",
                of(&Planned::prompt_len)
            );
            assert!((of(&|p| p.output_len) / output - 1.0).abs() < 0.03, "{name}");
        }
        assert!(NAMES.iter().all(|name| Workload::named(name).is_some_and(|w| w.checked().is_ok())));
    }

    #[test]
    fn the_length_planned_is_the_length_sent_and_prompts_differ() {
        let plan = plan(&Workload::named("chat").unwrap(), 200, 7);
        let mut seen = HashSet::new();
        for request in &plan {
            let tokens = request.tokens(1000);
            assert_eq!(tokens.len(), request.prompt_len());
            assert!(tokens.iter().all(|t| *t < 1000));
            assert!(seen.insert(tokens[..8.min(tokens.len())].to_vec()), "two requests begin alike");
        }
        assert_eq!(plan, self::plan(&Workload::named("chat").unwrap(), 200, 7));
    }

    #[test]
    fn another_seed_shares_no_prefix_with_the_first() {
        let workload = Workload::named("rag").unwrap();
        let first = |seed| plan(&workload, 1, seed)[0].tokens(50_000)[..256].to_vec();
        assert_eq!(first(1), first(1));
        assert_ne!(first(1), first(2));
    }

    #[test]
    fn a_turn_repeats_everything_before_it() {
        let plan = Workload::named("agents").unwrap().plan(None, Arrivals::Poisson, None, 6, 3);
        for pair in plan.windows(2) {
            let (before, after) = (pair[0].tokens(512), pair[1].tokens(512));
            assert_eq!(after[..before.len()], before);
            assert!(after.len() > before.len() + pair[0].output_len);
        }
    }

    #[test]
    fn turns_keep_the_rate_of_requests() {
        let plan = plan(&Workload::named("agents").unwrap(), 6_000, 5);
        let seconds = plan.last().unwrap().arrival.seconds();
        assert!((seconds / 600.0 - 1.0).abs() < 0.1, "{seconds}");
        assert!(plan.windows(2).all(|pair| pair[0].arrival.0 <= pair[1].arrival.0));
    }

    #[test]
    fn tenants_have_their_shares() {
        let tenant = |name: &str, share, priority| Tenant { name: name.into(), share, priority };
        let workload = Workload {
            tenants: vec![tenant("hot", 3.0, 1), tenant("cold", 1.0, 0)],
            ..Workload::fixed(8, 8).unwrap()
        };
        let plan = plan(&workload, 10_000, 2);
        let hot = plan.iter().filter(|p| p.tenant == 0).count();
        assert!((7_300..7_700).contains(&hot), "{hot}");
        assert!(plan.iter().all(|p| p.priority == i32::from(p.tenant == 0)));
    }

    #[test]
    fn the_cold_twin_has_the_same_lengths_and_nothing_in_common() {
        let warm = plan(&Workload::named("rag").unwrap(), 50, 1);
        let cold = without_sharing(&warm, 1);
        let shape =
            |plan: &[Planned]| plan.iter().map(|p| (p.prompt_len(), p.output_len)).collect::<Vec<_>>();
        assert_eq!(shape(&warm), shape(&cold));
        assert!(ideal_hit_rate(&warm, 16).unwrap() > 0.05);
        assert_eq!(ideal_hit_rate(&cold, 16), Some(0.0));
    }

    #[test]
    fn the_ideal_hit_rate_counts_whole_blocks_of_what_came_before() {
        let request = |stretches: &[(u64, u32)]| Planned {
            arrival: Nanos(0.0),
            prompt: stretches
                .iter()
                .map(|(source, tokens)| Stretch { source: *source, tokens: *tokens })
                .collect(),
            output_len: 1,
            priority: 0,
            tenant: 0,
        };
        // 10 shared tokens are two whole blocks of 4; the third holds two of them and differs.
        let plan = [request(&[(1, 10), (2, 6)]), request(&[(1, 10), (3, 6)])];
        assert_eq!(ideal_hit_rate(&plan, 4), Some(8.0 / 32.0));
        // Of an identical prompt the last block is computed again.
        let plan = [request(&[(1, 8)]), request(&[(1, 8)])];
        assert_eq!(ideal_hit_rate(&plan, 4), Some(4.0 / 16.0));
        assert_eq!(ideal_hit_rate(&[], 4), None);
    }

    #[test]
    fn a_workload_is_read_from_a_file_and_checked() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("w.toml");
        let open = |text: &str| {
            std::fs::write(&path, text).unwrap();
            Workload::open(path.to_str().unwrap())
        };
        let good = "name = \"support\"\n[input]\ndistribution = \"histogram\"\nbuckets = [[1, 100, 0.7], [200, 300, 0.3]]\n\
                    [output]\ndistribution = \"fixed\"\ntokens = 20\n[prefix]\ntokens = 64\nshare = 0.5\n";
        let workload = open(good).unwrap();
        assert_eq!(workload.prefix, Some(SharedPrefix { tokens: 64, share: 0.5, groups: 1 }));
        let lengths: Vec<usize> =
            plan(&workload, 2_000, 1).iter().map(|p| p.prompt.last().unwrap().tokens as usize).collect();
        assert!(lengths.iter().all(|l| (1..=100).contains(l) || (200..=300).contains(l)));
        let short = lengths.iter().filter(|l| **l <= 100).count();
        assert!((1_300..1_500).contains(&short), "{short}");
        for (from, to, message) in [
            ("tokens = 20", "tokens = 0", "output: a length of 0"),
            ("0.7]", "-1.0]", "input: a bucket is [from, to, weight]"),
            ("share = 0.5", "share = 1.5", "prefix: tokens and groups are at least 1"),
            ("[prefix]", "[prefixes]", "does not parse: unknown field `prefixes`"),
            ("distribution = \"fixed\"", "distribution = \"zipf\"", "does not parse: unknown variant"),
        ] {
            let error = open(&good.replace(from, to)).unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        }
        let error = Workload::open("chatty").unwrap_err().to_string();
        assert!(error.contains("neither a file nor one of chat, code"), "{error}");
        assert!(matches!(Workload::open("/no/such.toml"), Err(WorkloadError::Read { .. })));
    }
}
