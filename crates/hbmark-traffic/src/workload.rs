//! Workloads: lengths, shared prefixes, conversations, tenants.
//!
//! Enters: a name, a file, lengths, or a trace, and the seed. Leaves: [`PlannedRequest`]s with absolute arrival times, all planned before
//! the clock starts. A prompt is kept as a few [`PromptSegment`]s of seeded tokens, so that equal prefixes are equal by construction,
//! different requests differ, and an hour of traffic fits in memory.
//!
//! The prompt length drawn is the prompt length sent, in tokens. Tokens depend on the seed, so that another seed or another point of a
//! sweep never hits the prefix cache of the last one.

use std::path::{Path, PathBuf};

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, Exp1, LogNormal};
use serde::{Deserialize, Serialize};

use super::arrivals::{Burst, deadlines};
use super::trace::Trace;
use hbmark_core::input::{self, InputError};
use hbmark_core::result::serving::{Arrivals, ArrivalsError};
use hbmark_core::units::{Nanos, whole_count};

pub use hbmark_core::stats::splitmix64_of_two as splitmix64;

/// Part of a prompt: the first `tokens` tokens of an infinite seeded text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PromptSegment {
    pub source: u64,
    pub tokens: u32,
}

/// One planned request.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PlannedRequest {
    /// Scheduled arrival since the start; 0 in a closed loop, whose arrivals are completions.
    pub arrival: Nanos,
    pub prompt: Vec<PromptSegment>,
    pub output_len: usize,
    /// Lower is served first under the priority policy.
    pub priority: i32,
    pub tenant: u16,
    /// Its LoRA adapter.
    pub adapter: Option<u32>,
    /// Its output is constrained by a grammar.
    pub constrained: bool,
    /// The row of a dataset whose text it has.
    pub recorded: Option<u32>,
    /// In a closed loop: the turn of its conversation that must be done before.
    pub after: Option<u32>,
}

impl PlannedRequest {
    /// Tokens of the prompt.
    pub fn prompt_len(&self) -> usize {
        self.prompt.iter().map(|segment| segment.tokens as usize).sum()
    }

    /// The prompt as token ids below `vocab`.
    ///
    /// # Panics
    /// When the vocabulary is empty or beyond 32 bits.
    pub fn tokens(&self, vocab: usize) -> Vec<u32> {
        let vocab = u64::try_from(vocab).expect("a count");
        let mut tokens = Vec::with_capacity(self.prompt_len());
        for segment in &self.prompt {
            let token =
                |position| u32::try_from(splitmix64(segment.source, position) % vocab).expect("below 2^32");
            tokens.extend((0..u64::from(segment.tokens)).map(token));
        }
        tokens
    }
}

/// How lengths are distributed, in tokens.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
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

/// `Ok` where a condition holds, otherwise the problem.
fn require<P: Into<String>>(holds: bool, problem: impl FnOnce() -> P) -> Result<(), String> {
    if holds { Ok(()) } else { Err(problem().into()) }
}

impl Lengths {
    fn check(&self) -> Result<(), String> {
        let within = |tokens: usize| (1..=MAX_TOKENS).contains(&tokens);
        match self {
            Self::Fixed { tokens } => {
                require(within(*tokens), || format!("a length of {tokens} is not between 1 and {MAX_TOKENS}"))
            }
            Self::Lognormal { mean, cv, min, max } => {
                require(within(*min) && within(*max) && min <= max, || {
                    format!("lengths from {min} to {max} are not a range between 1 and {MAX_TOKENS}")
                })?;
                require(*mean >= *min as f64 && *mean <= *max as f64, || {
                    format!("a mean of {mean} is not between {min} and {max}")
                })?;
                require(*cv > 0.0 && *cv <= 10.0, || {
                    format!("a coefficient of variation of {cv} is not above 0 and at most 10")
                })
            }
            Self::Histogram { buckets } => {
                let good = |(from, to, weight): &(usize, usize, f64)| {
                    within(*from) && within(*to) && from <= to && (0.0..=MAX_SHARE).contains(weight)
                };
                require(
                    buckets.len() <= 10_000 && buckets.iter().all(good),
                    || "a bucket is [from, to, weight] with 1 ≤ from ≤ to and a weight of at least 0",
                )?;
                require(buckets.iter().any(|b| b.2 > 0.0), || "a histogram needs a bucket with weight")
            }
            Self::Empirical { tokens } => {
                require(!tokens.is_empty() && tokens.iter().all(|t| within(*t)), || {
                    format!("empirical lengths are a list of numbers between 1 and {MAX_TOKENS}")
                })
            }
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
                whole_count(drawn).clamp(*min, *max)
            }
            Self::Histogram { buckets } => {
                let bucket = buckets[draw_weighted(buckets.iter().map(|b| b.2), random)];
                random.random_range(bucket.0..=bucket.1)
            }
            Self::Empirical { tokens } => tokens[random.random_range(0..tokens.len())],
        }
    }
}

/// Draws an index with a probability proportional to its weight.
fn draw_weighted(weights: impl Iterator<Item = f64> + Clone, random: &mut ChaCha8Rng) -> usize {
    let mut at = random.random_range(0.0..weights.clone().sum());
    let mut chosen = 0;
    for (index, weight) in weights.enumerate().filter(|(_, weight)| *weight > 0.0) {
        chosen = index;
        if at < weight {
            break;
        }
        at -= weight;
    }
    chosen
}

/// A prefix that some requests share, in front of their own prompt.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
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

/// A level of a tree below a shared prefix: each node has `ways` children, and a request takes one of them.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Branch {
    pub tokens: usize,
    pub ways: usize,
}

/// Contexts that requests use in rotation. Once they are together larger than the KV pool, each has been evicted before it is used again:
/// the worst case of an LRU prefix cache.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ContextRotation {
    pub contexts: usize,
    pub tokens: usize,
}

/// Outputs that are constrained by a grammar.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Structured {
    /// As on the command line: `json-schema:FILE`, `regex:RE` or `grammar:FILE`.
    pub grammar: String,
    /// Share of the requests.
    #[serde(default = "whole")]
    pub share: f64,
}

fn whole() -> f64 {
    1.0
}

/// Conversations: each turn's prompt is all earlier prompts and outputs, and something new.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Conversation {
    pub turns: usize,
    /// Mean of the exponential gap between the arrivals of two turns, seconds.
    pub think_s: f64,
}

/// How a session begins in a plan.
struct Start {
    at: Nanos,
    tenant: Option<usize>,
    /// The first turn that is planned; above 0 where the session began before the plan does.
    turn: usize,
}

/// A source of a share of the requests.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tenant {
    pub name: String,
    pub share: f64,
    #[serde(default)]
    pub priority: i32,
    /// Bursts of this tenant alone: `4x10s/60s`, as in `--burst`. Its requests then have an arrival process of their own.
    #[serde(default)]
    pub burst: Option<String>,
}

impl Tenant {
    fn burst(&self) -> Option<Result<Burst, ArrivalsError>> {
        Some(self.burst.as_ref()?.parse())
    }
}

/// A workload: everything about requests except their arrival times.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Workload {
    pub name: String,
    /// The source of its figures.
    #[serde(default)]
    pub source: String,
    pub input: Lengths,
    pub output: Lengths,
    #[serde(default)]
    pub prefix: Option<SharedPrefix>,
    #[serde(default)]
    pub session: Option<Conversation>,
    #[serde(default)]
    pub tenants: Vec<Tenant>,
    /// The tree that follows a shared prefix, from the root down.
    #[serde(default)]
    pub branches: Vec<Branch>,
    #[serde(default)]
    pub tiling: Option<ContextRotation>,
    #[serde(default)]
    pub structured: Option<Structured>,
}

/// Why a workload cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum WorkloadError {
    #[error("--workload `{given}` is neither a .toml file nor one of {}", NAMES.join(", "))]
    Unknown { given: String },
    #[error("cannot read the workload {}: {source}", path.display())]
    Read { path: PathBuf, source: InputError },
    #[error("the workload {} has {bytes} bytes, above the limit of {MAX_FILE}", path.display())]
    TooLarge { path: PathBuf, bytes: u64 },
    #[error("the workload {} does not parse: {problem}", path.display())]
    Parse { path: PathBuf, problem: String },
    #[error("the workload {name}: {problem}")]
    Invalid { name: String, problem: String },
}

/// A workload file is a page of text.
const MAX_FILE: u64 = 512 << 10;
/// Weights and shares are relative; above this their sum may overflow.
const MAX_SHARE: f64 = 1e12;

/// The named workloads.
pub const NAMES: &[&str] = &["chat", "code", "long-context-qa", "summarization", "rag", "agents", "batch"];

impl Workload {
    /// A named workload. Means are those in common use for these classes; the spread (coefficient of variation 1, as in production traces of
    /// chat) and the limits are ours.
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
            ..Self::plain()
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
                session: Some(Conversation { turns: 6, think_s: 5.0 }),
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
        let text = input::read_text(path, MAX_FILE).map_err(|refused| {
            let path = path.to_path_buf();
            match refused {
                InputError::TooLarge { size, .. } => WorkloadError::TooLarge { path, bytes: size },
                source => WorkloadError::Read { path, source },
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
            ..Self::plain()
        }
        .checked()
    }

    /// Prompts of one token, and nothing that is shared.
    fn plain() -> Self {
        Self {
            name: String::new(),
            source: String::new(),
            input: Lengths::Fixed { tokens: 1 },
            output: Lengths::Fixed { tokens: 1 },
            prefix: None,
            session: None,
            tenants: Vec::new(),
            branches: Vec::new(),
            tiling: None,
            structured: None,
        }
    }

    /// The workload, if every number in it is valid.
    ///
    /// # Errors
    /// [`WorkloadError::Invalid`], with the problem.
    pub fn checked(self) -> Result<Self, WorkloadError> {
        match self.check() {
            Ok(()) => Ok(self),
            Err(problem) => Err(WorkloadError::Invalid { name: self.name, problem }),
        }
    }

    fn check(&self) -> Result<(), String> {
        let counts = |tokens: usize, ways: usize| {
            (1..=MAX_TOKENS).contains(&tokens) && (1..=1_000_000).contains(&ways)
        };
        let is_share = |share: f64| (0.0..=1.0).contains(&share);
        self.input.check().map_err(|problem| format!("input: {problem}"))?;
        self.output.check().map_err(|problem| format!("output: {problem}"))?;
        require(
            self.prefix.is_none_or(|p| counts(p.tokens, p.groups) && is_share(p.share)),
            || "prefix: tokens and groups are at least 1, and the share lies between 0 and 1",
        )?;
        let session =
            |s: Conversation| (1..=1_000).contains(&s.turns) && (0.0..=86_400.0).contains(&s.think_s);
        require(self.session.is_none_or(session), || "session: 1 to 1000 turns, thinking of 0 to 86400 s")?;
        let shares = self.tenants.iter().all(|t| t.share > 0.0 && t.share <= MAX_SHARE);
        require(
            shares && self.tenants.len() <= 1_000,
            || "tenants: at most 1000, each with a share above 0",
        )?;
        for tenant in &self.tenants {
            tenant.burst().transpose().map_err(|error| format!("tenant {}: {error}", tenant.name))?;
        }
        let branches = self.branches.len() <= 16 && self.branches.iter().all(|b| counts(b.tokens, b.ways));
        require(branches, || "branches: at most 16 levels, each with at least 1 token and 1 way")?;
        require(
            self.branches.is_empty() || self.prefix.is_some(),
            || "branches: they follow a [prefix], and there is none",
        )?;
        require(
            self.tiling.is_none_or(|t| counts(t.tokens, t.contexts)),
            || "tiling: at least 1 context of at least 1 token",
        )?;
        require(
            self.tiling.is_none() || (self.prefix.is_none() && self.session.is_none()),
            || "tiling: contexts come in turn, so it goes with no prefix and no session",
        )?;
        let share = self.structured.as_ref().map_or(1.0, |structured| structured.share);
        require(is_share(share), || format!("structured: a share of {share} is not between 0 and 1"))
    }

    /// Plans `count` requests at a mean rate per second; without a rate all at once (or, in a closed loop, one per completion).
    pub fn plan(
        &self,
        rate: Option<f64>,
        process: Arrivals,
        burst: Option<Burst>,
        count: usize,
        seed: u64,
    ) -> Vec<PlannedRequest> {
        let turns = self.session.map_or(1, |session| session.turns);
        let under_way = rate.map_or_else(Vec::new, |rate| self.under_way(rate, count, seed));
        // As many starts as `count` requests need, and more: how many turns sessions have had by then varies.
        let spare = if under_way.is_empty() { 0 } else { 4 * (count + under_way.len()).isqrt() };
        let sessions = count.div_ceil(turns) + spare;
        let timed = rate.map(|rate| self.starts(rate / turns as f64, process, burst, sessions, seed));
        let starts = timed.unwrap_or_else(|| vec![(Nanos(0.0), None); sessions]);
        let sessions = starts.into_iter().map(|(at, tenant)| Start { at, tenant, turn: 0 });
        let mut random = ChaCha8Rng::seed_from_u64(splitmix64(seed, 1));
        let mut requests: Vec<PlannedRequest> = Vec::with_capacity(count);
        for (index, start) in sessions.chain(under_way).enumerate() {
            self.plan_session(index as u64, &start, rate.is_some(), seed, &mut random, &mut requests);
        }
        // Turns of different sessions interleave.
        requests.sort_by(|a, b| a.arrival.0.total_cmp(&b.arrival.0));
        requests.truncate(count);
        requests
    }

    /// Sessions that began before the plan does, each with one of its later turns next, in order of that turn's arrival. Without them the plan
    /// would begin with first turns alone, at a fraction of the rate. Gaps between turns are exponential, so what is left of one is, too.
    fn under_way(&self, rate: f64, count: usize, seed: u64) -> Vec<Start> {
        let Some(Conversation { turns, think_s }) = self.session else { return Vec::new() };
        let mean = rate / turns as f64 * (turns - 1) as f64 * think_s;
        let mut random = ChaCha8Rng::seed_from_u64(splitmix64(seed, 11));
        let mut at = 0.0;
        let sessions = (mean + random.random::<f64>()).floor();
        (0..count)
            .map(|index| sessions - index as f64)
            .take_while(|left| *left >= 1.0)
            .map(|left| {
                let gap: f64 = Exp1.sample(&mut random);
                at += gap * think_s / left;
                Start { at: Nanos::from_seconds(at), tenant: None, turn: random.random_range(1..turns) }
            })
            .collect()
    }

    fn plan_session(
        &self,
        index: u64,
        start: &Start,
        timed: bool,
        seed: u64,
        random: &mut ChaCha8Rng,
        requests: &mut Vec<PlannedRequest>,
    ) {
        let mut history = Vec::new();
        if let Some(prefix) = self.prefix
            && random.random_bool(prefix.share)
        {
            let group = random.random_range(0..prefix.groups) as u64;
            let mut node = splitmix64(splitmix64(seed, 2), group);
            history.push(segment(node, prefix.tokens));
            for branch in &self.branches {
                // The seed of a child depends on all nodes above it.
                node = splitmix64(splitmix64(node, 1), random.random_range(0..branch.ways) as u64);
                history.push(segment(node, branch.tokens));
            }
        }
        if let Some(tiling) = self.tiling {
            history.push(segment(
                splitmix64(splitmix64(seed, 8), index % tiling.contexts as u64),
                tiling.tokens,
            ));
        }
        let weights = self.tenants.iter().map(|tenant| tenant.share);
        let tenant =
            start.tenant.or_else(|| (!self.tenants.is_empty()).then(|| draw_weighted(weights, random)));
        let priority = tenant.map_or(0, |tenant| self.tenants[tenant].priority);
        let tenant = u16::try_from(tenant.unwrap_or(0)).expect("at most 1000 tenants");
        let mut arrival = start.at;
        for turn in 0..self.session.map_or(1, |session| session.turns) {
            let own = splitmix64(splitmix64(splitmix64(seed, 3), index), turn as u64);
            history.push(segment(own, self.input.draw(random)));
            let output_len = self.output.draw(random);
            let is_planned = turn >= start.turn;
            if is_planned {
                let before = (turn > start.turn && !timed).then(|| requests.len() - 1);
                requests.push(PlannedRequest {
                    arrival,
                    prompt: history.clone(),
                    output_len,
                    priority,
                    tenant,
                    after: before.map(|before| u32::try_from(before).expect("a number of requests")),
                    ..PlannedRequest::default()
                });
            }
            // The real output is not known yet; a text of the same length stands in for it.
            history.push(segment(splitmix64(own, 1), output_len));
            let gap: f64 = Exp1.sample(random);
            if let Some(session) = self.session
                && timed
                && is_planned
            {
                arrival = Nanos(arrival.0 + gap * session.think_s * 1e9);
            }
        }
    }

    /// Start times of sessions, with their tenant where a tenant has bursts of its own: then each tenant has its own arrival process, at its
    /// share of the mean rate.
    fn starts(
        &self,
        rate: f64,
        process: Arrivals,
        burst: Option<Burst>,
        sessions: usize,
        seed: u64,
    ) -> Vec<(Nanos, Option<usize>)> {
        if self.tenants.iter().all(|tenant| tenant.burst.is_none()) {
            let all = deadlines(process, burst, rate, sessions, splitmix64(seed, 0));
            return all.into_iter().map(|start| (start, None)).collect();
        }
        let total: f64 = self.tenants.iter().map(|t| t.share).sum();
        let mut starts: Vec<(Nanos, Option<usize>)> = Vec::new();
        for (index, tenant) in self.tenants.iter().enumerate() {
            let own = tenant.burst().map(|burst| burst.expect("checked when it was read"));
            // Any tenant could have all sessions; surplus ones are dropped below.
            let times = deadlines(
                process,
                own.or(burst),
                rate * tenant.share / total,
                sessions,
                splitmix64(splitmix64(seed, 9), index as u64),
            );
            starts.extend(times.into_iter().map(|start| (start, Some(index))));
        }
        starts.sort_by(|a, b| a.0.0.total_cmp(&b.0.0));
        starts.truncate(sessions);
        starts
    }
}

fn segment(source: u64, tokens: usize) -> PromptSegment {
    PromptSegment { source, tokens: u32::try_from(tokens).expect("lengths are bounded") }
}

/// Plans the requests of a trace. Times are multiplied by `time_scale`: 0.5 is twice the recorded rate.
pub fn plan_trace(trace: &Trace, time_scale: f64, seed: u64) -> Vec<PlannedRequest> {
    let own = |index: usize| splitmix64(splitmix64(seed, 4), index as u64);
    trace
        .requests
        .iter()
        .enumerate()
        .map(|(index, request)| {
            let mut left = request.input_tokens;
            let mut prompt = Vec::with_capacity(request.prefix_ids.len() + 1);
            for id in &request.prefix_ids {
                let tokens = left.min(request.prefix_block);
                prompt.push(segment(splitmix64(splitmix64(seed, 5), *id), tokens));
                left -= tokens;
            }
            if left > 0 {
                prompt.push(segment(own(index), left));
            }
            PlannedRequest {
                arrival: Nanos(request.arrival.0 * time_scale),
                prompt,
                output_len: request.output_tokens,
                priority: request.priority,
                ..PlannedRequest::default()
            }
        })
        .collect()
}

/// The baseline without prefix reuse: the same arrivals and lengths, and no segment that two requests share.
pub fn without_sharing(plan: &[PlannedRequest], seed: u64) -> Vec<PlannedRequest> {
    let mut plan = plan.to_vec();
    for (index, request) in plan.iter_mut().enumerate() {
        for (part, segment) in request.prompt.iter_mut().enumerate() {
            segment.source = splitmix64(splitmix64(splitmix64(seed, 6), index as u64), part as u64);
        }
    }
    plan
}

/// Share of the prompt tokens that hit an infinite prefix cache, in whole blocks and in order of arrival. Each request comes with whether it
/// counts: the others fill the cache only.
///
/// # Panics
/// When a block has no positions.
pub fn ideal_hit_rate<'a>(
    plan: impl IntoIterator<Item = (&'a PlannedRequest, bool)>,
    block_size: usize,
) -> Option<f64> {
    let mut seen = std::collections::HashSet::new();
    let (mut found, mut all) = (0_usize, 0_usize);
    for (request, counts) in plan {
        // Equal segments have equal sources, so a block is identified by the parts of segments it holds.
        let length = request.prompt_len();
        all += if counts { length } else { 0 };
        // Adapters share no prefixes.
        let mut chain = request.adapter.map_or(0, |adapter| splitmix64(u64::from(adapter), 10));
        let mut still_found = true;
        let mut segments = request.prompt.iter();
        let (mut current, mut offset) = (segments.next().copied(), 0_usize);
        // The last token is always computed.
        for block in 0..length / block_size {
            let mut left = block_size;
            while left > 0 {
                let part = current.expect("a block lies within the prompt");
                let here = left.min(part.tokens as usize - offset);
                chain = splitmix64(splitmix64(splitmix64(chain, part.source), offset as u64), here as u64);
                left -= here;
                offset += here;
                if offset == part.tokens as usize {
                    (current, offset) = (segments.next().copied(), 0);
                }
            }
            still_found &= !seen.insert(chain);
            if counts && still_found && (block + 1) * block_size < length {
                found += block_size;
            }
        }
    }
    (all > 0).then(|| found as f64 / all as f64)
}

#[cfg(test)]
mod tests;
