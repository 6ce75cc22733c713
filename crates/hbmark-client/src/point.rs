//! One point of load against a live server: from what was asked to a result.
//!
//! Enters: a [`Server`] and a [`PointSpec`]. Leaves: a [`Point`], with the client's own error in it. A sweep and a search are lists of points,
//! and know nothing of servers.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

pub use crate::body::{BodyError, Constraint};
use crate::body::{Cache, Prompt, RequestSpec, Sampling};
use crate::dialect::{Api, Backend, RequestField, server};
use crate::event::Finish;
use crate::exchange::Exchange;
use crate::metrics::scraper::{Scraper, Source};
use crate::run::{FIRST_REQUESTS, Job, Limits, LiveRun, TooFewFiles, check_open_files, run};
use crate::target::Endpoint;
use hbmark_core::result::serving::{
    Failure, GateName, LiveResult, Point, Quantiles, Quantity, ServeResult, ServerIdentity, StampSource,
};
use hbmark_core::units::{Nanos, rounded};
use hbmark_traffic::latency::summarise;
use hbmark_traffic::point::{PlanError, PointSpec};
use hbmark_traffic::serving_loop::{Progress, RequestOutcome, Run, Traffic};
use hbmark_traffic::workload::PlannedRequest;

/// Largest p99 of the client's delay: this, or a share of what the delay could change, whichever is more.
const DELAY_FLOOR_NS: f64 = 1e6;
/// Of the median gap between tokens, where a delay can be in a time stamp.
const DELAY_SHARE_OF_ITL: f64 = 0.1;
/// Of the median E2E, where it cannot: a request that waits for another's answer still starts that much later.
const DELAY_SHARE_OF_E2E: f64 = 0.05;
/// Largest share of events with another's stamp, for stamps that are as good as exact: what is left beyond a p99.
const SHARED_STAMPS: f64 = 0.01;
/// Largest share of a processor that the client may use and wait for: beyond it, it is the client that is measured.
const PROCESSOR_SHARE: f64 = 0.9;

/// A server and how it is asked.
#[derive(Debug, Clone)]
pub struct Server {
    pub endpoint: Endpoint,
    pub backend: Backend,
    pub identity: ServerIdentity,
    pub limits: Limits,
    /// Most requests in flight, in an open loop.
    pub cap: Option<usize>,
    pub prompts: Prompts,
    /// Keeps the prefix cache of these requests apart from that of others, as far as the server can: see [`Self::isolation`].
    pub salt: Option<String>,
    pub extra: Option<Map<String, Value>>,
    /// Of the requests whose outputs are constrained.
    pub constraint: Option<Constraint>,
    /// Names of adapters that the server has loaded, by the numbers of the plan.
    pub adapters: Vec<String>,
    /// Where the server's counters are, and how often they are read.
    pub metrics: Option<(String, Duration)>,
}

/// Makes a text of token ids.
pub type Decode = Rc<dyn Fn(&[u32]) -> String>;

/// What prompts are made of.
#[derive(Clone)]
pub struct Prompts {
    /// The ids that prompts are drawn from.
    pub vocabulary: Vec<u32>,
    /// Makes a text of them, for a server that takes no ids.
    pub decode: Option<Decode>,
}

impl std::fmt::Debug for Prompts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = if self.decode.is_some() { "text" } else { "ids" };
        write!(f, "Prompts({kind} of {} tokens)", self.vocabulary.len())
    }
}

/// Words that are one token in the vocabularies of most models.
const WORDS: [&str; 32] = [
    " time", " people", " water", " first", " world", " house", " small", " large", " point", " light",
    " number", " system", " group", " story", " night", " right", " place", " year", " work", " part",
    " school", " state", " family", " student", " country", " problem", " hand", " money", " book", " word",
    " game", " line",
];

impl Prompts {
    /// Token ids of a vocabulary of this size, without those at its beginning, many of which have a meaning of their own.
    pub fn ids(vocabulary: usize) -> Self {
        let first = if vocabulary > 4_000 { 1_000 } else { 8.min(vocabulary / 2) };
        let end = vocabulary.min(20_000);
        let ids = (first..end).filter_map(|id| u32::try_from(id).ok());
        Self { vocabulary: ids.collect(), decode: None }
    }

    /// Common words: about as many tokens as words, whatever the tokenizer is.
    pub fn words() -> Self {
        let text = |ids: &[u32]| ids.iter().map(|id| WORDS[*id as usize % WORDS.len()]).collect();
        Self { vocabulary: (0..32).collect(), decode: Some(Rc::new(text)) }
    }
}

/// Why a point could not be measured at all.
#[derive(Debug, thiserror::Error)]
pub enum MeasureError {
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(transparent)]
    Body(#[from] BodyError),
    #[error("cannot create the client's event queue, timer or thread: {0}")]
    System(#[from] io::Error),
    #[error(transparent)]
    OpenFiles(#[from] TooFewFiles),
    /// With what the server said of the first one.
    #[error(
        "none of the first {FIRST_REQUESTS} requests to {address} was served: {failure}{}{}",
        after(": ", words),
        after("; ", hint)
    )]
    NothingServed { address: String, failure: String, words: String, hint: String },
}

/// A text behind what joins it to the one before; nothing where there is none.
fn after(separator: &str, text: &str) -> String {
    if text.is_empty() { String::new() } else { format!("{separator}{text}") }
}

/// What to do about a server that serves no request; empty where its own words have to do.
fn hint(failure: Failure, words: &str, backend: Backend, model: &str, path: &str) -> String {
    let words = words.to_lowercase();
    let is_chat = backend.api == Api::Chat || path.ends_with("/chat/completions");
    let kind = server(backend.dialect).name;
    match failure {
        Failure::Status(400..=499) if !is_chat && words.contains("chat") => {
            format!("ask it for chat completions (--backend {kind}-chat)")
        }
        Failure::Status(404) if words.contains("model") => {
            format!("name a model that it has, in place of {model} (--served-model-name)")
        }
        Failure::Status(404 | 405) if !is_chat => {
            format!(
                "it may know chat completions alone (--backend {kind}-chat), or have another path (--endpoint /v1/chat/completions)"
            )
        }
        Failure::Status(404 | 405) => "name the path of its requests (--endpoint)".to_owned(),
        Failure::Status(401 | 403) => {
            "give it a key, in OPENAI_API_KEY or in the variable that --api-key-env names".to_owned()
        }
        Failure::NotAStream => "it did not stream; name a path at which it does (--endpoint)".to_owned(),
        _ => String::new(),
    }
}

/// The bodies of a plan.
struct PlannedBodies<'a> {
    server: &'a Server,
    traffic: &'a Traffic<'a>,
    sampling: Sampling,
    forced: bool,
    cache: Cache<'a>,
    scratch: Vec<u8>,
    /// Of the bodies without their salts, so that two sides with the same requests have the same.
    hash: Sha256,
    failure: Option<BodyError>,
}

impl PlannedBodies<'_> {
    fn body(&mut self, planned: &PlannedRequest, cache: Cache<'_>) -> Result<(), BodyError> {
        let server = self.server;
        let ids = self.traffic.prompt(planned);
        let text = server.prompts.decode.as_ref().map(|decode| match self.traffic.recorded(planned) {
            Some(recorded) => Cow::Borrowed(recorded.text.as_str()),
            None => Cow::Owned(decode(&ids)),
        });
        let prompt = text.as_deref().map_or(Prompt::Ids(&ids), Prompt::Text);
        let constraint = server.constraint.as_ref().filter(|_| planned.constrained);
        let adapter = planned.adapter.and_then(|number| server.adapters.get(number as usize));
        let spec = RequestSpec {
            model: &server.identity.model,
            prompt,
            max_tokens: u32::try_from(planned.output_len).unwrap_or(u32::MAX),
            // A grammar ends an output where it is complete.
            forced_length: self.forced && constraint.is_none(),
            sampling: self.sampling,
            cache,
            lora: adapter.map(String::as_str),
            constraint,
            extra: server.extra.as_ref(),
        };
        crate::body::write(server.backend, &spec, &mut self.scratch)
    }

    fn append(&mut self, key: usize, into: &mut Vec<u8>) -> Result<(), BodyError> {
        let planned = &self.traffic.plan[key];
        self.body(planned, Cache::Shared)?;
        // How many are sent behind the measured ones depends on how fast those are.
        if key < self.traffic.measured.end {
            self.hash.update(&self.scratch);
        }
        let cache = self.cache;
        if cache != Cache::Shared {
            self.body(planned, cache)?;
        }
        into.extend_from_slice(&self.scratch);
        Ok(())
    }
}

/// How far the prefix cache of some requests can be kept apart from that of others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isolation {
    /// Requests with a salt share prefixes with one another, and with no others.
    Salt,
    /// The cache can be turned off for a request.
    Off,
    None,
}

impl Server {
    /// What this server can.
    pub fn isolation(&self) -> Isolation {
        let endpoint = self.backend.endpoint();
        if endpoint.has(RequestField::CacheSalt) {
            Isolation::Salt
        } else if endpoint.has(RequestField::CacheOff) {
            Isolation::Off
        } else {
            Isolation::None
        }
    }

    /// What requests with a salt may take from the prefix cache.
    fn cache<'a>(&self, salt: Option<&'a str>) -> Cache<'a> {
        match (salt, self.isolation()) {
            (Some(salt), Isolation::Salt) => Cache::Salt(salt),
            (Some(_), Isolation::Off) => Cache::Off,
            (None, _) | (Some(_), Isolation::None) => Cache::Shared,
        }
    }

    /// Whether a request needs more positions than the server has for one.
    fn is_beyond_context(&self, planned: &PlannedRequest) -> bool {
        self.identity.max_model_len.is_some_and(|most| planned.prompt_len() + planned.output_len > most)
    }

    /// Why the first requests failed, as the server says it.
    fn nothing_served(&self, live: &LiveRun) -> MeasureError {
        let first = live.exchanges[..FIRST_REQUESTS].iter().find_map(|exchange| exchange.failure);
        let failure = first.unwrap_or(Failure::Aborted);
        let said = live.messages.iter().find(|(of, _)| *of == failure);
        let words = said.map(|(_, words)| plain(words)).unwrap_or_default();
        let ServerIdentity { path, model, .. } = &self.identity;
        MeasureError::NothingServed {
            address: format!("{}{path}", self.endpoint.target.root()),
            failure: failure.name(),
            hint: hint(failure, &words, self.backend, model, path),
            words,
        }
    }

    /// Measures a point.
    ///
    /// # Errors
    /// When the point cannot be asked for at all, and when none of its first requests is served. Other requests that fail are results.
    pub fn measure(
        &self,
        spec: &PointSpec,
        observe: &mut dyn FnMut(Progress),
    ) -> Result<Point, MeasureError> {
        let (plan, measured) = spec.plan()?;
        spec.check(&plan, &measured)?;
        let mut point = spec.without_result(&plan, &measured);
        let mut traffic = spec.traffic(&plan, measured, self.prompts.vocabulary.len().max(1), &[]);
        traffic.prompt_vocab.clone_from(&self.prompts.vocabulary);
        let endpoint = self.backend.endpoint();
        let forced = !spec.stop_at_eos && endpoint.has(RequestField::ForcedLength);
        let is_longer = |planned: &PlannedRequest| self.is_beyond_context(planned);
        if !forced || plan.iter().any(|planned| planned.constrained || is_longer(planned)) {
            // The server ends outputs where it will, or where its context ends.
            traffic.stop_tokens = vec![u32::MAX];
        }
        // Points share nothing with one another.
        let salt = self.salt.as_ref().map(|salt| format!("{salt}/{}", spec.prompt_set));
        let cache = self.cache(salt.as_deref());
        let mut bodies = PlannedBodies {
            server: self,
            cache,
            traffic: &traffic,
            sampling: Sampling {
                temperature: Some(f64::from(spec.sampling.temperature)),
                top_p: (spec.sampling.top_p < 1.0).then(|| f64::from(spec.sampling.top_p)),
                top_k: i32::try_from(spec.sampling.top_k).ok().filter(|k| *k > 0),
            },
            forced,
            scratch: Vec::new(),
            hash: Sha256::new(),
            failure: None,
        };
        // A request that cannot be written is found out before anything is sent.
        let odd = plan.iter().find(|planned| planned.constrained || planned.adapter.is_some());
        for planned in plan.first().into_iter().chain(odd) {
            bodies.body(planned, cache)?;
        }
        check_open_files(&traffic, self.cap)?;
        let scraper = self
            .metrics
            .as_ref()
            .map(|(page, interval)| Scraper::start(Source::new(&self.endpoint.target, page), *interval));
        let scraper = scraper.transpose()?;
        let job = Job {
            endpoint: &self.endpoint,
            path: &self.identity.path,
            traffic: &traffic,
            cap: self.cap,
            limits: self.limits,
            id: &format!("hbmark-{:x}", spec.seed),
            keep_events: false,
            bodies: &mut |key, into| {
                if let Err(error) = bodies.append(key, into) {
                    bodies.failure = Some(error);
                }
            },
        };
        let live = run(job, observe);
        let readings = scraper.map(Scraper::stop);
        let live = live?;
        let PlannedBodies { hash, failure, .. } = bodies;
        if let Some(failure) = failure {
            return Err(failure.into());
        }
        if live.gave_up {
            return Err(self.nothing_served(&live));
        }
        let mut result = summarise(&live.run, &traffic, &spec.slo);
        if let Some(requests) = &mut result.requests {
            let sent = live.exchanges[live.run.measured.clone()].iter().map(|exchange| exchange.dispatched);
            requests.sent_ns = sent.map(|at| Some(rounded(at?))).collect();
        }
        let mut seen = seen(&live, &traffic, format!("{:x}", hash.finalize()));
        gates(&mut result, &seen);
        let counted = &live.run.records[live.run.measured.clone()];
        let from = counted.first().map_or(0.0, |record| record.arrival.0);
        let to = counted.iter().filter_map(|record| record.last_token).fold(from, |to, at| to.max(at.0));
        let moment = |ns: f64| live.started + Duration::from_secs_f64(ns.max(0.0) / 1e9);
        seen.server = readings.and_then(|readings| readings.window(moment(from), moment(to)));
        seen.beyond_context =
            plan[live.run.measured.clone()].iter().filter(|planned| is_longer(planned)).count();
        if let Some(computed) = computed_per_s(&seen) {
            result.prompt_tokens_per_s = computed;
        }
        point.ideal_hit_rate = spec.ideal_hit_rate(&plan, &live.run);
        point.result = Some(result);
        point.live = Some(seen);
        Ok(point)
    }
}

/// Prompt tokens that the server computed, by its own counters, where its answers do not say how many of them were cached.
fn computed_per_s(live: &LiveResult) -> Option<f64> {
    let server = live.server.as_ref().filter(|_| live.cached_share.is_none())?;
    let seconds = server.window_ns / 1e9;
    server.computed_prompt_tokens.filter(|_| seconds > 0.0).map(|tokens| tokens as f64 / seconds)
}

/// From sending a request until a moment of its answer: infinite where it failed, as TTFT and E2E are, and `without` where its answer has no such moment.
fn from_dispatch(
    exchanges: &[Exchange],
    of: fn(&Exchange) -> Option<f64>,
    without: Option<f64>,
) -> Quantiles {
    Quantiles::of(exchanges.iter().filter_map(|exchange| {
        let from = exchange.dispatched?;
        let span = of(exchange).map(|at| at - from).or(without);
        Some(if exchange.failure.is_some() { Some(f64::INFINITY) } else { span })
    }))
}

/// What the client saw of the measured requests.
fn seen(live: &LiveRun, traffic: &Traffic<'_>, bodies_sha256: String) -> LiveResult {
    let Run { records, measured, .. } = &live.run;
    let records = &records[measured.clone()];
    let planned = &traffic.plan[measured.clone()];
    let exchanges = &live.exchanges[measured.clone()];
    let spans = |of: &dyn Fn(&Exchange) -> Option<f64>| Quantiles::of(exchanges.iter().map(of));
    let count = |is: &dyn Fn(&Exchange) -> bool| exchanges.iter().filter(|e| is(e)).count();
    let (mut evidence, mut finish_reasons) = (BTreeMap::new(), BTreeMap::new());
    for exchange in exchanges.iter().filter(|e| e.failure.is_none()) {
        if let Some(kind) = exchange.evidence {
            *evidence.entry(kind).or_insert(0) += 1;
        }
        *finish_reasons.entry(reason(exchange.finish).to_owned()).or_insert(0) += 1;
    }
    let lengths = |is: fn(usize, usize) -> bool| {
        let outputs = records.iter().zip(planned);
        outputs
            .filter(|(_, p)| !p.constrained)
            .filter(|(r, p)| r.outcome == RequestOutcome::Served && is(r.output_tokens, p.output_len))
            .count()
    };
    let events: u64 = exchanges.iter().map(|e| u64::from(e.events)).sum();
    let tokens: u64 = exchanges.iter().map(|e| u64::from(e.output_tokens)).sum();
    // Of the requests whose prompts the server counts: as planned, as it counts, and of these from its cache.
    let counted =
        || exchanges.iter().zip(planned).filter_map(|(e, p)| Some((e, e.prompt_tokens?, p.prompt_len())));
    let sent_tokens: f64 = counted().map(|(.., sent)| sent as f64).sum();
    let server_tokens: f64 = counted().map(|(_, count, _)| f64::from(count)).sum();
    let cached_tokens: Option<f64> = counted().map(|(e, ..)| e.cached_tokens.map(f64::from)).sum();
    let wall = live.run.end;
    let share = |ns: u64| (live.cost.known && wall > 0.0).then(|| ns as f64 / wall);
    LiveResult {
        stamps: match (live.unstamped, live.delays.seen()) {
            (0, _) => StampSource::Kernel,
            (_, 0) => StampSource::Client,
            _ => StampSource::Mixed,
        },
        evidence,
        ttft_from_dispatch_ns: from_dispatch(exchanges, |e| e.first_token, Some(f64::INFINITY)),
        e2e_from_dispatch_ns: from_dispatch(exchanges, |e| e.last_token, Some(f64::INFINITY)),
        client_queue_ns: Quantiles::of(
            exchanges.iter().zip(records).map(|(e, r)| e.dispatched.map(|at| at - r.arrival.0)),
        ),
        connect_ns: Quantiles::of(exchanges.iter().filter_map(|e| e.connect).map(Some)),
        headers_ns: spans(&|e| Some(e.headers? - e.dispatched?)),
        // An answer that only reasoned is served, and has no such time.
        ttft_content_ns: from_dispatch(exchanges, |e| e.first_content, None),
        event_gap_ns: live.event_gaps.quantiles(|request| measured.contains(&request)),
        events,
        tokens_per_event: (events > 0).then(|| tokens as f64 / events as f64),
        client_delay_ns: live.delays.quantiles(|_| true),
        shared_stamps: (live.outputs > 0 && live.delays.seen() > 0)
            .then(|| live.shared_stamps as f64 / live.outputs as f64),
        client_cpu: share(live.cost.processor),
        client_cpu_wait: share(live.cost.waited),
        client_realtime: live.realtime,
        connections_opened: live.opened,
        connections_reused: live.reused,
        retried: count(&|e| e.retried),
        clock_steps: live.clock_steps,
        messages: live.messages.iter().map(|(failure, words)| (failure.name(), plain(words))).collect(),
        finish_reasons,
        short_outputs: lengths(|made, asked| made < asked),
        long_outputs: lengths(|made, asked| made > asked),
        disagreeing_counts: count(&|e| e.disagrees),
        prompt_tokens_ratio: (sent_tokens > 0.0).then(|| server_tokens / sent_tokens),
        cached_share: cached_tokens.filter(|_| server_tokens > 0.0).map(|cached| cached / server_tokens),
        bodies_sha256,
        server: None,
        beyond_context: 0,
    }
}

/// A server's words, as they may be shown: short, and without control characters.
fn plain(words: &str) -> String {
    hbmark_core::input::plain(&words.chars().take(300).collect::<String>())
}

fn reason(finish: Option<Finish>) -> &'static str {
    match finish {
        Some(Finish::Stop) => "stop",
        Some(Finish::Length) => "length",
        Some(Finish::ToolCalls) => "tool calls",
        Some(Finish::ContentFilter) => "content filter",
        Some(Finish::Abort) => "abort",
        Some(Finish::Error) => "error",
        Some(Finish::Other) => "another reason",
        None => "no reason",
    }
}

/// How late a client was to read.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Delay {
    /// p99 of the time from the kernel's receipt to the reading, if it is known.
    pub p99: Option<Nanos>,
    /// The time stamps are those of the receipt, each event's own.
    pub exact_stamps: bool,
}

impl Delay {
    fn of(live: &LiveResult) -> Self {
        let p99 = live.client_delay_ns.p99.or(live.client_delay_ns.max);
        Self {
            p99: p99.map(|delay| Nanos(delay.value())),
            exact_stamps: live.stamps == StampSource::Kernel
                && live.shared_stamps.is_some_and(|share| share <= SHARED_STAMPS),
        }
    }

    /// How late events may be read, given the median ITL and E2E in nanoseconds.
    fn allowed(self, itl: f64, e2e: f64) -> Nanos {
        let share = if self.exact_stamps { DELAY_SHARE_OF_E2E * e2e } else { DELAY_SHARE_OF_ITL * itl };
        Nanos(share.max(DELAY_FLOOR_NS))
    }
}

/// Checks that what a server sent was read as soon as it came. A late reader falsifies its own time stamps; with stamps of the kernel it only
/// delays the requests that wait for an answer.
pub fn check_delay(result: &mut ServeResult, delay: Delay) {
    let ms = |ns: f64| format!("{:.3} ms", ns / 1e6);
    let median = |of: &Option<Quantiles>| of.as_ref().and_then(|q| q.p50).map_or(0.0, Quantity::value);
    let allowed = delay.allowed(median(&result.itl_ns), median(&result.e2e_ns));
    let detail = delay.p99.map_or_else(
        || "the kernel stamped nothing: how long events waited to be read is unknown".to_owned(),
        |p99| {
            format!(
                "99 % of the events were read within {} of their receipt; {} is allowed, {}",
                ms(p99.0),
                ms(allowed.0),
                if delay.exact_stamps {
                    "with a time stamp of the receipt for each"
                } else {
                    "as the time stamps may be late by as much"
                }
            )
        },
    );
    result.gate(GateName::ClientDelay, delay.p99.map(|p99| p99 <= allowed), detail);
}

/// Whether it was the server that was measured, and not this client.
fn gates(result: &mut ServeResult, live: &LiveResult) {
    check_delay(result, Delay::of(live));
    if let (Some(used), Some(waited)) = (live.client_cpu, live.client_cpu_wait) {
        let detail = format!(
            "the client used {:.1} % of a processor and waited for one {:.1} % of the time; {:.0} % together is allowed",
            used * 100.0,
            waited * 100.0,
            PROCESSOR_SHARE * 100.0
        );
        result.gate(GateName::ClientProcessor, Some(used + waited <= PROCESSOR_SHARE), detail);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mock::{Answer, Mock, Script, Stream};
    use crate::target::Target;
    use hbmark_core::result::serving::{
        Arrivals, Dialect, Offered, SchedulerConfig, ServerMetrics, Slo, Validity,
    };
    use hbmark_traffic::point::TrafficSource;
    use hbmark_traffic::sampler::Sampling as Greedy;
    use hbmark_traffic::workload::Workload;

    const VLLM: Backend = Backend { dialect: Dialect::Vllm, api: Api::Completions };

    /// A scripted server as a point asks it.
    fn asked(mock: &Mock, max_model_len: Option<usize>) -> Server {
        Server {
            endpoint: Endpoint::resolve(Target::new(&mock.url(), None).unwrap()).unwrap(),
            backend: VLLM,
            identity: ServerIdentity {
                url: mock.url(),
                dialect: VLLM.dialect,
                path: VLLM.endpoint().path.to_owned(),
                model: "mock".to_owned(),
                version: None,
                max_model_len,
            },
            limits: Limits::default(),
            cap: None,
            prompts: Prompts::ids(30_000),
            salt: None,
            extra: None,
            constraint: None,
            adapters: Vec::new(),
            metrics: Some(("/metrics".to_owned(), Duration::from_millis(20))),
        }
    }

    /// Requests of 30 prompt tokens, and outputs of so many.
    fn spec(requests: usize, output: usize) -> PointSpec {
        PointSpec {
            label: "rate 500".to_owned(),
            source: TrafficSource::Workload(Workload::fixed(30, output).unwrap()),
            offered: Offered::Rate(500.0),
            arrivals: Arrivals::Poisson,
            burst: None,
            requests,
            max_requests: 0,
            warmup: 0,
            settles: false,
            scheduler: SchedulerConfig::UNLIMITED,
            sampling: Greedy::GREEDY,
            stop_at_eos: false,
            seed: 3,
            prompt_set: 0,
            cold: false,
            slo: Slo::default(),
            time_limit: None,
            adapters: None,
            constrained: None,
            is_remote: true,
        }
    }

    fn measured(mock: &Mock, max_model_len: Option<usize>, spec: &PointSpec) -> Result<Point, MeasureError> {
        asked(mock, max_model_len).measure(spec, &mut |_| {})
    }

    #[test]
    fn a_server_that_serves_none_of_the_first_requests_is_an_error_with_its_words_and_what_to_do() {
        let words = r#"{"detail":"Not Found"}"#;
        let mock = Mock::start(Script::new(Answer::status(404, "application/json", "", words))).unwrap();
        let error = measured(&mock, None, &spec(200, 4)).unwrap_err().to_string();
        assert_eq!(
            error,
            format!(
                "none of the first 8 requests to {}/v1/completions was served: status_404: {words}; it may know chat completions alone \
                 (--backend vllm-chat), or have another path (--endpoint /v1/chat/completions)",
                mock.url()
            )
        );
        assert!(mock.requests().len() < 100, "it was given up early");
        // Too few to tell are a result.
        let few = measured(&mock, None, &spec(4, 4)).unwrap();
        assert_eq!(few.result.unwrap().validity, Validity::Invalid);
        let busy = Mock::start(Script::new(Answer::status(429, "application/json", "", "{}"))).unwrap();
        assert!(measured(&busy, None, &spec(40, 4)).is_ok(), "load is a result");
    }

    #[test]
    fn what_is_wrong_decides_the_hint() {
        let chat = Backend { api: Api::Chat, ..VLLM };
        let of = |status, words: &str, backend: Backend| {
            hint(Failure::Status(status), words, backend, "llama", backend.endpoint().path)
        };
        for (given, flag) in [
            (of(404, "This is a chat model, not in v1/completions", VLLM), "--backend vllm-chat)"),
            (of(404, "The model `llama` does not exist.", VLLM), "in place of llama (--served-model-name)"),
            (of(404, "Not Found", VLLM), "--endpoint /v1/chat/completions"),
            (of(405, "Method Not Allowed", VLLM), "--backend vllm-chat"),
            (of(404, "no route /v1/chat/completions", chat), "(--endpoint)"),
            (of(401, "no key", VLLM), "--api-key-env"),
            (of(403, "", chat), "--api-key-env"),
            (hint(Failure::NotAStream, "<html>", VLLM, "llama", "/x"), "it did not stream"),
        ] {
            assert!(given.contains(flag), "{given} has no {flag}");
        }
        assert_eq!(of(500, "chat", VLLM) + &hint(Failure::Refused, "", VLLM, "llama", "/x"), "");
    }

    #[test]
    fn requests_beyond_the_context_of_the_server_are_counted_and_may_end_early() {
        // Of four tokens asked for the server makes three.
        let mock = Mock::start(Script::new(Answer::plain())).unwrap();
        let failed = |point: &Point| {
            let gates = &point.result.as_ref().unwrap().gates;
            gates.iter().any(|gate| gate.name == GateName::TokenCount && gate.passed == Some(false))
        };
        let cut = measured(&mock, Some(33), &spec(20, 4)).unwrap();
        assert_eq!((cut.live.as_ref().unwrap().beyond_context, failed(&cut)), (20, false));
        for context in [Some(34), None] {
            let fits = measured(&mock, context, &spec(20, 4)).unwrap();
            assert_eq!((fits.live.as_ref().unwrap().beyond_context, failed(&fits)), (0, true));
        }
    }

    #[test]
    fn prompt_tokens_whose_cached_share_is_unknown_are_those_that_the_server_computed() {
        let mock = Mock::start(Script::new(Answer::Stream(Stream::default()))).unwrap();
        let mut live = measured(&mock, None, &spec(20, 4)).unwrap().live.unwrap();
        let server = live.server.take().unwrap();
        let counted = |computed| {
            Some(ServerMetrics { window_ns: 2e9, computed_prompt_tokens: computed, ..server.clone() })
        };
        let with = |cached_share, server| LiveResult { cached_share, server, ..live.clone() };
        assert_eq!(computed_per_s(&with(None, counted(Some(300)))), Some(150.0));
        assert_eq!(computed_per_s(&with(None, counted(None))), None);
        assert_eq!(
            computed_per_s(&with(Some(0.5), counted(Some(300)))),
            None,
            "its answers say it themselves"
        );
        assert_eq!(computed_per_s(&with(None, None)), None);
    }

    #[test]
    fn an_answer_that_only_reasons_has_no_time_of_its_content() {
        let sent = Exchange { dispatched: Some(1e6), first_token: Some(3e6), ..Exchange::default() };
        let exchanges = [
            Exchange { first_content: Some(5e6), ..sent.clone() },
            sent.clone(),
            Exchange { failure: Some(hbmark_core::result::serving::Failure::Reset), ..sent },
            Exchange::default(),
        ];
        let content = from_dispatch(&exchanges, |e| e.first_content, None);
        assert_eq!((content.n, content.infinite, content.missing), (2, 1, 1));
        let tokens = from_dispatch(&exchanges, |e| e.first_token, Some(f64::INFINITY));
        assert_eq!((tokens.n, tokens.infinite, tokens.missing), (3, 1, 0));
    }

    #[test]
    fn a_late_reader_is_allowed_what_its_time_stamps_do_not_hold() {
        let late = Delay { p99: Some(Nanos(5e6)), exact_stamps: false };
        let (itl, e2e) = (20e6, 400e6);
        assert_eq!(late.allowed(itl, e2e), Nanos(2e6), "a tenth of the gap between tokens");
        assert_eq!(Delay { exact_stamps: true, ..late }.allowed(itl, e2e), Nanos(20e6), "5 % of a request");
        for exact_stamps in [false, true] {
            assert_eq!(Delay { exact_stamps, ..late }.allowed(0.0, 0.0), Nanos(DELAY_FLOOR_NS));
        }
    }
}
