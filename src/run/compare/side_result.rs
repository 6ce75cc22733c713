//! What one launch of a side gave, whichever command it ran: times of cells, or latencies of served requests.

use std::collections::BTreeMap;

use serde_json::Value;

use super::matching::NoTime;
use super::{CompareError, ComparedItem, Side, matching, series_of};
use hbmark_core::result::comparison::{Arm, ComparedCell, Difference, ServedTime};
use hbmark_core::result::serving::{GateName, Offered, Point, ServeReport, Validity};
use hbmark_core::result::{Capabilities, Environment, Report};
use hbmark_core::units::counted;

/// The result of a launch.
#[derive(Debug, Clone, PartialEq)]
pub enum SideResult {
    /// Of `hbmark run`.
    Steps(Box<Report>),
    /// Of `hbmark serve`: one point of load.
    Served(Box<ServeReport>),
}

/// What is compared of a point of this load.
pub fn served_times(offered: Offered) -> Vec<ComparedItem> {
    let metrics: &[ServedTime] = match offered {
        Offered::Rate(_) | Offered::AsRecorded => &ServedTime::OPEN_LOOP,
        Offered::AtOnce | Offered::Concurrency(_) => &ServedTime::CLOSED_LOOP,
    };
    metrics.iter().map(|metric| ComparedItem::Served { metric: *metric }).collect()
}

/// The point in question: others before it are its baselines.
fn point(report: &ServeReport) -> Option<&Point> {
    report.points.last()
}

impl SideResult {
    /// The result of `hbmark run`, if it is one.
    pub(super) fn steps(&self) -> Option<&Report> {
        match self {
            Self::Steps(report) => Some(report),
            Self::Served(_) => None,
        }
    }

    /// The time of an item, or why there is none.
    pub(super) fn time(&self, item: &ComparedItem, side: Side) -> Result<Result<f64, NoTime>, CompareError> {
        match (self, item) {
            (Self::Steps(report), ComparedItem::Cell(place)) => {
                let id = if side == Side::A { place.id_of_a() } else { place.id_of_b() };
                let cell = report.cells.iter().find(|cell| cell.id == id);
                Ok(matching::typical(cell.ok_or(CompareError::CellMissing { side: side.letter(), id })?))
            }
            (Self::Served(report), ComparedItem::Served { metric }) => Ok(served_time(report, *metric)),
            _ => Err(CompareError::CellMissing { side: side.letter(), id: item.id() }),
        }
    }

    /// What a reader of this launch's times should know.
    pub(super) fn remark(&self) -> Option<String> {
        let Self::Served(report) = self else { return None };
        let result = point(report)?.result.as_ref()?;
        let failed = result.measured - result.served.min(result.measured);
        let mut remarks = Vec::new();
        if failed > 0 {
            remarks.push(format!("{failed} of {} not served", counted(result.measured, "request")));
        }
        if result.validity == Validity::Saturated {
            remarks.push("saturated: latencies grow with the length of the run".to_owned());
        }
        (!remarks.is_empty()).then(|| remarks.join("; "))
    }

    /// Refuses sides that do different work.
    pub(super) fn check_against(&self, other: &Self) -> Result<(), CompareError> {
        let architecture = |side: &Self| match side {
            Self::Steps(report) => Some(report.model.architecture.clone()),
            Self::Served(report) => report.model.as_ref().map(|model| model.architecture.clone()),
        };
        let line = |side: &Self| format!("{} ({})", side.model(), side.source());
        match (architecture(self), architecture(other)) {
            (Some(a), Some(b)) if a != b => Err(CompareError::Models { a: line(self), b: line(other) }),
            _ => Ok(()),
        }
    }

    fn model(&self) -> &str {
        match self {
            Self::Steps(report) => &report.model.name,
            Self::Served(report) => report.model_name(),
        }
    }

    /// Where the weights came from, or who served them.
    fn source(&self) -> String {
        match self {
            Self::Steps(report) => report.model.source.clone(),
            Self::Served(report) => match (&report.server, &report.model) {
                (Some(server), _) => {
                    let version = server.version.as_ref().map_or_else(String::new, |v| format!(" {v}"));
                    format!("{}{version}", server.dialect.name())
                }
                (None, Some(model)) => model.source.clone(),
                (None, None) => "unknown".to_owned(),
            },
        }
    }

    pub(super) fn model_line(&self, other: &Self) -> String {
        let line = |side: &Self| format!("{} · {}", side.model(), side.source());
        let (a, b) = (line(self), line(other));
        if a == b { a } else { format!("A {a} · B {b}") }
    }

    fn environment(&self) -> &Environment {
        match self {
            Self::Steps(report) => &report.environment,
            Self::Served(report) => &report.environment,
        }
    }

    /// The machine; of a live server it is the client's.
    pub(super) fn machine_line(&self) -> String {
        let environment = self.environment();
        let (on_gpu, client) = match self {
            Self::Steps(report) => (report.capabilities.iter().any(Capabilities::on_gpu), ""),
            Self::Served(report) => (
                report.capabilities.as_ref().is_some_and(Capabilities::on_gpu),
                if report.server.is_some() { "client on " } else { "" },
            ),
        };
        let product = environment.product(on_gpu);
        let revision =
            environment.build.git_revision.as_ref().map_or_else(String::new, |r| format!(" ({r})"));
        let cores = environment.cpu.usable_cores;
        format!("{client}{product} · {cores} cores · hbmark {}{revision}", environment.build.version)
    }

    pub(super) fn protocol(&self) -> Option<&str> {
        match self {
            Self::Steps(report) => report.protocol.as_ref().map(|protocol| protocol.name.as_str()),
            Self::Served(_) => None,
        }
    }

    fn config(&self) -> &BTreeMap<String, Value> {
        match self {
            Self::Steps(report) => &report.config,
            Self::Served(report) => &report.config,
        }
    }

    pub(super) fn arm(&self, given: &str) -> Arm {
        let (command, started_at, series) = match self {
            Self::Steps(report) => (&report.command, &report.started_at, series_of(report)),
            Self::Served(report) => (&report.command, &report.started_at, Vec::new()),
        };
        Arm {
            given: given.to_owned(),
            command: command.clone(),
            started_at: started_at.clone(),
            series,
            config: self.config().clone(),
        }
    }

    /// The keys in which two configurations differ.
    pub(super) fn differences(&self, other: &Self) -> Vec<Difference> {
        let (a, b) = (keys(self.config()), keys(other.config()));
        let mut names: Vec<&String> = a.keys().chain(b.keys()).collect();
        names.sort();
        names.dedup();
        let value = |of: &BTreeMap<String, Value>, key: &str| of.get(key).cloned().unwrap_or(Value::Null);
        let each = names.into_iter().map(|key| Difference {
            key: key.clone(),
            a: value(&a, key),
            b: value(&b, key),
        });
        each.filter(|found| found.a != found.b).collect()
    }

    /// What the first launches of both sides show only beside each other.
    pub(super) fn remarks_beside(&self, other: &Self, items: &[ComparedItem]) -> Option<String> {
        match (self, other) {
            (Self::Steps(a), Self::Steps(b)) => {
                let cells: Vec<&ComparedCell> = items.iter().filter_map(ComparedItem::cell).collect();
                tokens_differ(&cells, a, b)
            }
            (Self::Served(a), Self::Served(b)) => {
                let sent = |report: &ServeReport| Some(point(report)?.live.as_ref()?.bodies_sha256.clone());
                let (a, b) = sent(a).zip(sent(b))?;
                Some(if a == b {
                    format!(
                        "the first round sent the same bytes to both (SHA-256 {}...)",
                        &a[..a.len().min(12)]
                    )
                } else {
                    "the requests of the sides are not the same bytes: another name of the model, API, or field of the body".to_owned()
                })
            }
            _ => None,
        }
    }
}

fn served_time(report: &ServeReport, metric: ServedTime) -> Result<f64, NoTime> {
    let none = |reason: &str, own| Err(NoTime { reason: reason.to_owned(), own });
    let Some(point) = point(report) else { return none("no point was measured", false) };
    let Some(result) = &point.result else {
        let why = point.not_run.as_ref().map_or_else(|| "not run".to_owned(), ToString::to_string);
        return none(&why, false);
    };
    if result.validity == Validity::Invalid {
        let reasons: Vec<String> = result.reasons.iter().map(ToString::to_string).collect();
        return none(&format!("invalid: {}", reasons.join("; ")), result.served < result.measured);
    }
    match metric.of(result) {
        Some(time) if time.is_finite() => Ok(time),
        Some(_) => none("too many requests were not served: it is infinite", true),
        None if result.failed(GateName::KeepsUp) => none("saturated: the queue grew to the end", true),
        None => none("not measured: no request has it, or there are too few", false),
    }
}

/// A configuration by its keys; those of an object in it by both names.
fn keys(config: &BTreeMap<String, Value>) -> BTreeMap<String, Value> {
    let mut flat = BTreeMap::new();
    for (key, value) in config {
        match value {
            // Where results are written is not a difference, and the options of a device repeat its flags.
            _ if matches!(key.as_str(), "out" | "device_options") => {}
            Value::Object(inner) => {
                // A salt is drawn for every launch.
                let known = inner.iter().filter(|(name, _)| *name != "cache_salt");
                flat.extend(known.map(|(name, value)| (format!("{key}.{name}"), value.clone())));
            }
            _ => {
                flat.insert(key.clone(), value.clone());
            }
        }
    }
    flat
}

/// A remark where the sides generate different tokens at one dtype: they may then not do the same work.
fn tokens_differ(cells: &[&ComparedCell], a: &Report, b: &Report) -> Option<String> {
    let hash = |report: &Report, id: &str| -> Option<String> {
        report.cells.iter().find(|cell| cell.id == id)?.quality.as_ref()?.token_hash.clone()
    };
    let differ = |cell: &&&ComparedCell| {
        let hashes = hash(a, &cell.id_of_a()).zip(hash(b, &cell.id_of_b()));
        cell.a.dtype == cell.b.dtype && hashes.is_some_and(|(a, b)| a != b)
    };
    let count = cells.iter().filter(differ).count();
    (count > 0).then(|| format!("in {count} of {} cells the sides generate different tokens", cells.len()))
}
