//! Who answers at an address: asked once before a run, and for a diagnosis.
//!
//! Enters: a [`Target`]. Leaves: a [`Probe`]: addresses and the time of a connection, what the server says of itself, the dialect and what it was
//! concluded from. Each question is bounded in time and size, and so are all of them together.

mod answers;
mod clock;

use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use hbmark_core::result::serving::{
    Asked, Clue, Dialect, DialectEvidence, FetchFailure, Outcome, Probe, ProbedAddress, ProbedMetrics,
    Question, Signal,
};
use serde_json::Value;

use crate::fetch::{Fetcher, io_failure};
use crate::metrics::{MAX_PAGE_BYTES, Snapshot};
use crate::target::Target;

/// Of one question, and of one connection.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Of all questions: those that would begin later are not asked.
const ALL_QUESTIONS: Duration = Duration::from_secs(10);
/// The median of so many connections.
const CONNECTIONS: usize = 5;
/// Addresses beyond which the rest of them is not tried.
const MAX_ADDRESSES: usize = 8;
/// How long the clocks are watched, while the questions are asked.
const CLOCK_SPAN: Duration = Duration::from_secs(1);

/// Asks a server who it is. `metrics_page` is a path or a URL, where the page is not at its usual place.
///
/// Nothing here fails: a server that does not answer is a result.
pub fn probe(target: &Target, metrics_page: Option<&str>) -> Probe {
    std::thread::scope(|scope| {
        let clock = scope.spawn(|| clock::watch(CLOCK_SPAN));
        let (resolve_ns, addresses) = connect(target);
        let mut interview = Interview {
            fetcher: Fetcher::new(target, TIMEOUT, MAX_PAGE_BYTES),
            begin: Instant::now(),
            asked: Vec::new(),
        };
        let findings = interview.findings(metrics_page);
        Probe {
            root: target.root(),
            key_sent: target.has_key(),
            resolve_ns,
            addresses,
            asked: interview.asked,
            dialect: conclude(&findings.evidence),
            evidence: findings.evidence,
            healthy: findings.healthy,
            version: findings.version,
            model_count: findings.model_count,
            max_model_len: findings
                .models
                .first()
                .and_then(|model| model.max_model_len)
                .or(findings.max_model_len),
            models: findings.models,
            slots: findings.slots,
            kv_tokens: findings.kv_tokens,
            prefix_caching: findings.prefix_caching,
            metrics: findings.metrics,
            clock: clock.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
        }
    })
}

/// The dialect most clues point to; of equals the one whose clue came first.
fn conclude(evidence: &[DialectEvidence]) -> Dialect {
    let count = |dialect| evidence.iter().filter(|clue| clue.dialect == dialect).count();
    evidence
        .iter()
        .rev()
        .map(|clue| clue.dialect)
        .max_by_key(|dialect| count(*dialect))
        .unwrap_or(Dialect::OpenAi)
}

/// What the answers say.
#[derive(Debug, Default)]
struct Findings {
    evidence: Vec<DialectEvidence>,
    healthy: Option<bool>,
    version: Option<String>,
    models: Vec<hbmark_core::result::serving::ServedModel>,
    model_count: usize,
    max_model_len: Option<u64>,
    slots: Option<u64>,
    kv_tokens: Option<u64>,
    prefix_caching: Option<bool>,
    metrics: Option<ProbedMetrics>,
}

impl Findings {
    fn clue(&mut self, dialect: Dialect, clue: Clue) {
        self.evidence.push(DialectEvidence { dialect, clue });
    }
}

/// Questions and their outcomes.
struct Interview {
    fetcher: Fetcher,
    begin: Instant,
    asked: Vec<Asked>,
}

impl Interview {
    fn findings(&mut self, metrics_page: Option<&str>) -> Findings {
        let mut findings = Findings::default();
        if let Some(models) = self.json(Question::Models, "/v1/models") {
            answers::models(&models, &mut findings);
        }
        let health = self.body(Question::Health, "/health");
        findings.healthy = match self.asked.last().map(|asked| asked.outcome) {
            _ if health.is_some() => Some(true),
            // A server that is still loading says 503; one without such a path says 404.
            Some(Outcome::Failed(FetchFailure::Status(500..600))) => Some(false),
            _ => None,
        };
        if let Some(version) = self.json(Question::Version, "/version") {
            answers::version(&version, &mut findings);
        }
        if let Some(props) = self.json(Question::Props, "/props") {
            answers::props(&props, &mut findings);
        }
        let info = self
            .json(Question::ServerInfo, "/server_info")
            .or_else(|| self.json(Question::GetServerInfo, "/get_server_info"));
        if let Some(info) = info {
            answers::server_info(&info, &mut findings);
        }
        if let Some(info) = self.json(Question::ModelInfo, "/model_info") {
            answers::model_info(&info, &mut findings);
        }
        if let Some(info) = self.json(Question::Info, "/info") {
            answers::router_info(&info, &mut findings);
        }
        let pages = match metrics_page {
            Some(page) => vec![(Question::Metrics, page)],
            None => vec![
                (Question::Metrics, "/metrics"),
                // Of TensorRT-LLM.
                (Question::PrometheusMetrics, "/prometheus/metrics"),
            ],
        };
        for (question, page) in pages {
            if findings.metrics.is_none() {
                self.metrics(question, page, &mut findings);
            }
        }
        findings
    }

    fn metrics(&mut self, question: Question, page: &str, findings: &mut Findings) {
        let Some(body) = self.body(question, page) else { return };
        let snapshot = Snapshot::read(&body);
        let Some(dialect) = snapshot.dialect() else {
            self.not_understood();
            return;
        };
        findings.clue(dialect, Clue::MetricNames);
        let signals: Vec<Signal> = snapshot.signals().collect();
        findings.metrics = Some(ProbedMetrics { page: page.to_owned(), signals });
    }

    fn json(&mut self, question: Question, path: &str) -> Option<Value> {
        let body = self.body(question, path)?;
        let value: Option<Value> = serde_json::from_slice(&body).ok().filter(Value::is_object);
        if value.is_none() {
            self.not_understood();
        }
        value
    }

    /// The body of a success.
    fn body(&mut self, question: Question, path: &str) -> Option<Vec<u8>> {
        let (outcome, body) = if self.begin.elapsed() > ALL_QUESTIONS {
            (Outcome::NotAsked, None)
        } else {
            match self.fetcher.get(path) {
                Ok(body) => (Outcome::Answered, Some(body)),
                Err(failure) => (Outcome::Failed(failure), None),
            }
        };
        self.asked.push(Asked { question, outcome });
        body
    }

    fn not_understood(&mut self) {
        if let Some(last) = self.asked.last_mut() {
            last.outcome = Outcome::Failed(FetchFailure::NotUnderstood);
        }
    }
}

/// Looks the name up and connects to its addresses; the time of the look-up.
fn connect(target: &Target) -> (Option<f64>, Vec<ProbedAddress>) {
    let (host, port) = (target.host().to_owned(), target.port());
    if let Ok(address) = host.parse::<IpAddr>() {
        return (None, vec![handshakes(SocketAddr::new(address, port))]);
    }
    let begin = Instant::now();
    let (sender, receiver) = channel();
    // The system's resolver has no time limit that we set: its thread is left behind.
    let resolver = std::thread::Builder::new().name("resolve".to_owned());
    let started = resolver.spawn(move || {
        let _ = sender
            .send((host.as_str(), port).to_socket_addrs().map(|found| found.take(MAX_ADDRESSES).collect()));
    });
    let found: Option<Vec<SocketAddr>> =
        started.ok().and_then(|_| receiver.recv_timeout(TIMEOUT).ok()).and_then(Result::ok);
    let Some(mut found) = found else { return (None, Vec::new()) };
    let resolve_ns = begin.elapsed().as_nanos() as f64;
    found.dedup();
    (Some(resolve_ns), found.into_iter().map(handshakes).collect())
}

fn handshakes(address: SocketAddr) -> ProbedAddress {
    let mut times = Vec::with_capacity(CONNECTIONS);
    let mut failure = None;
    for _ in 0..CONNECTIONS {
        let begin = Instant::now();
        match TcpStream::connect_timeout(&address, TIMEOUT) {
            Ok(_) => times.push(begin.elapsed().as_nanos() as f64),
            Err(error) => {
                failure = Some(io_failure(&error));
                break;
            }
        }
    }
    times.sort_by(f64::total_cmp);
    ProbedAddress {
        address: address.to_string(),
        connect_ns: times.get(times.len() / 2).copied(),
        connections: times.len(),
        failure,
    }
}

#[cfg(test)]
mod tests;
