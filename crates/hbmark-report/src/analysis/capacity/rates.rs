//! The rates that were tried: whether every objective held at each, and which rate is accepted.

use super::{CapacityError, Question, TriedRate, number};
use hbmark_core::result::cause::joined;
use hbmark_core::result::serving::{
    Clause, ClauseResult, LEVELS, Offered, Point, Quantity, Search, ServeReport, ServeResult, Slo, SloMetric,
    SweepVariable, Validity,
};
use hbmark_core::units::{Nanos, counted};

pub(super) fn objectives(report: &ServeReport, question: &Question) -> Result<Slo, CapacityError> {
    if report.cold_start.is_some() {
        return Err(CapacityError::ColdStart);
    }
    if !report.matrix.is_empty() {
        return Err(CapacityError::Matrix);
    }
    if let Some(variable) = report.swept.as_ref().filter(|_| report.variable() != Some(SweepVariable::Rate)) {
        return Err(CapacityError::OtherSweep { variable: variable.clone() });
    }
    let asked = question.slo.clone().filter(|slo| !slo.clauses.is_empty());
    let slo = asked.unwrap_or_else(|| {
        let first = report.points.iter().find_map(|p| p.result.as_ref());
        Slo { clauses: first.map(|r| r.slo.iter().map(|c| c.clause).collect()).unwrap_or_default() }
    });
    if slo.clauses.is_empty() {
        return Err(CapacityError::NoObjectives);
    }
    Ok(slo)
}

/// What a result has of the percentile of a clause.
pub(super) enum ObservedPercentile {
    Value(f64),
    /// The sample cannot carry it.
    TooFew,
    /// It was neither judged nor kept.
    NotKept,
}

impl From<Option<Quantity>> for ObservedPercentile {
    fn from(quantity: Option<Quantity>) -> Self {
        quantity.map_or(Self::TooFew, |q| Self::Value(q.value()))
    }
}

pub(super) fn observed(result: &ServeResult, clause: &Clause) -> ObservedPercentile {
    let near = |p: f64| (p - clause.percentile).abs() < 1e-9;
    if let Some(judged) = result.slo.iter().find(|judged| is_of(judged, clause)) {
        return judged.observed.into();
    }
    let quantiles = match clause.metric {
        SloMetric::Ttft => &result.ttft_ns,
        SloMetric::Tpot => &result.tpot_ns,
        SloMetric::E2e => &result.e2e_ns,
        SloMetric::Queue => &result.queue_ns,
    };
    let known = LEVELS.into_iter().find(|(p, _)| near(*p));
    known.map_or(ObservedPercentile::NotKept, |(_, of)| quantiles.as_ref().and_then(of).into())
}

/// An objective by the interval of its percentile, where the run judged that percentile or keeps what it is of.
fn judged(point: &Point, result: &ServeResult, clause: &Clause) -> Option<ClauseResult> {
    let own = |is: &dyn Fn(&&ClauseResult) -> bool| result.slo.iter().find(is).cloned();
    let same = own(&|judged| judged.clause == *clause);
    let another_limit = || own(&|judged| judged.low.is_some() && is_of(judged, clause));
    if let Some(own) = same.or_else(|| Some(another_limit()?.with_limit(clause.limit_ns))) {
        return Some(own);
    }
    // A live run keeps neither gaps between tokens nor the server's queue one by one.
    let is_kept = point.live.is_none() || !matches!(clause.metric, SloMetric::Tpot | SloMetric::Queue);
    let kept = result.requests.as_ref().filter(|_| is_kept)?;
    let values = (0..kept.arrival_ns.len()).filter_map(|i| kept.latency(i, clause.metric));
    Some(ClauseResult::of(&values.collect::<Vec<_>>(), *clause)).filter(|found| found.observed.is_some())
}

/// Whether a judged objective is of the same percentile.
fn is_of(judged: &ClauseResult, clause: &Clause) -> bool {
    let Clause { metric, percentile, .. } = judged.clause;
    metric == clause.metric && (percentile - clause.percentile).abs() < 1e-9
}

/// Whether a run held its rate, `None` where it cannot tell, and what decided: every objective was met, on a machine that nothing disturbed, and the
/// system keeps up. Intervals decide where the requests are kept or the objective was the run's own, otherwise what was observed.
pub(super) fn judge(
    point: &Point,
    result: &ServeResult,
    slo: &Slo,
) -> Result<(Option<bool>, String), CapacityError> {
    match result.validity {
        Validity::Saturated => return Ok((Some(false), format!("saturated: {}", joined(&result.reasons)))),
        Validity::Invalid => return Ok((None, format!("invalid: {}", joined(&result.reasons)))),
        Validity::Valid => {}
    }
    let mut open = point.disturbances().into_iter().next().map(|cause| format!("disturbed: {cause}"));
    for clause in &slo.clauses {
        if let Some(judged) = judged(point, result, clause) {
            match judged.met {
                Some(true) => {}
                Some(false) => return Ok((Some(false), judged.to_string())),
                None => open = open.or_else(|| Some(format!("{judged}: the interval holds the limit"))),
            }
            continue;
        }
        match observed(result, clause) {
            ObservedPercentile::NotKept => {
                return Err(CapacityError::UnknownPercentile { clause: clause.to_string() });
            }
            ObservedPercentile::Value(value) if value <= clause.limit_ns => {}
            ObservedPercentile::Value(value) if value.is_infinite() => {
                return Ok((
                    Some(false),
                    format!("{clause}: infinite, requests that never finished are among them"),
                ));
            }
            ObservedPercentile::Value(value) => {
                return Ok((Some(false), format!("{clause}: {}", Nanos(value))));
            }
            ObservedPercentile::TooFew => {
                let few = format!(
                    "{clause}: {} measured, too few for that percentile",
                    counted(result.measured, "request")
                );
                open = open.or(Some(few));
            }
        }
    }
    let short =
        || result.steadiness_open().map(|gate| format!("it was not shown to keep up: {}", gate.detail));
    let open = open.or_else(short);
    Ok(open.map_or_else(|| (Some(true), "every objective was met".to_owned()), |why| (None, why)))
}

impl TriedRate {
    /// Another run at it: one that fails decides, then one that cannot tell.
    fn add(&mut self, held: Option<bool>, why: String) {
        self.runs += 1;
        self.runs_held += usize::from(held == Some(true));
        let worse = match (self.held, held) {
            (Some(false), _) | (_, Some(true)) | (None, None) => false,
            (_, Some(false)) | (Some(true), None) => true,
        };
        if worse {
            (self.held, self.why) = (held, why);
        }
    }
}

/// The runs at one rate.
pub(super) struct Group<'a> {
    pub(super) tried: TriedRate,
    pub(super) runs: Vec<(&'a Point, &'a ServeResult)>,
}

pub(super) struct Rates<'a> {
    /// Ascending.
    pub(super) groups: Vec<Group<'a>>,
    /// The answer of a search under the same objectives, which goes before single runs: its rate, or why there is none.
    pub(super) search: Option<Result<f64, String>>,
    /// The lowest rate of which nothing is known, and why.
    unknown: Option<(f64, String)>,
}

/// The runs of the rate that is accepted.
pub(super) struct Accepted<'a> {
    pub(super) rate: f64,
    pub(super) runs: Vec<(&'a Point, &'a ServeResult)>,
}

pub(super) fn rates<'a>(report: &'a ServeReport, slo: &Slo) -> Result<Rates<'a>, CapacityError> {
    let mut groups: Vec<Group<'a>> = Vec::new();
    // Of a pair the warm point is the service; the cold one is the baseline without its cache.
    let warm = report.points.iter().filter(|p| !p.cold);
    for point in warm {
        let (Offered::Rate(rate), Some(result)) = (point.offered, &point.result) else { continue };
        let (held, why) = judge(point, result, slo)?;
        let same = |g: &&mut Group<'_>| (g.tried.rate / rate - 1.0).abs() < 1e-9;
        if let Some(group) = groups.iter_mut().find(same) {
            group.tried.add(held, why);
            group.runs.push((point, result));
        } else {
            let tried = TriedRate { rate, runs: 1, runs_held: usize::from(held == Some(true)), held, why };
            groups.push(Group { tried, runs: vec![(point, result)] });
        }
    }
    if groups.is_empty() {
        return Err(CapacityError::NoRate);
    }
    groups.sort_by(|a, b| a.tried.rate.total_cmp(&b.tried.rate));
    let same = |search: &&Search| search.slo == *slo;
    let answer = |search: &Search| search.max_rate.ok_or_else(|| search.note.clone());
    let search = report.search.as_ref().filter(same).map(answer);
    if let Some(Ok(rate)) = search {
        // Fresh seeds were run there; a single run of the bracket or the bisection no longer decides.
        for group in groups.iter_mut().filter(|g| g.tried.rate <= rate * (1.0 + 1e-9)) {
            if group.tried.held != Some(true) {
                group.tried.held = Some(true);
                group.tried.why =
                    format!("one run did not ({}); the search confirmed a higher rate", group.tried.why);
            }
        }
    }
    let tried = |rate: f64| groups.iter().any(|g| (g.tried.rate / rate - 1.0).abs() < 1e-9);
    let unknown = report.points.iter().filter_map(|point| match (point.offered, &point.not_run) {
        (Offered::Rate(rate), Some(reason)) if !point.cold && !tried(rate) => {
            Some((rate, reason.to_string()))
        }
        _ => None,
    });
    let unknown = unknown.min_by(|a, b| a.0.total_cmp(&b.0));
    Ok(Rates { groups, search, unknown })
}

impl<'a> Rates<'a> {
    /// The rate that a search found; without one the highest that held, where no lower one failed.
    pub(super) fn accepted(&self) -> Result<Accepted<'a>, CapacityError> {
        match &self.search {
            Some(Err(note)) => {
                return Err(CapacityError::NothingHolds {
                    reasons: vec![format!("the search found no rate: {note}")],
                });
            }
            Some(Ok(rate)) => {
                let up_to = self.groups.iter().rfind(|g| g.tried.rate <= rate * (1.0 + 1e-9));
                let group = up_to.ok_or(CapacityError::NoRate)?;
                return Ok(Accepted { rate: *rate, runs: group.runs.clone() });
            }
            None => {}
        }
        let known = |rate: f64| self.unknown.as_ref().is_none_or(|(unknown, _)| rate < *unknown);
        // A lower rate that could not tell is answered by a higher one that held.
        let below = self.groups.iter().take_while(|g| g.tried.held != Some(false) && known(g.tried.rate));
        let Some(group) = below.filter(|g| g.tried.held == Some(true)).last() else {
            let reasons = self.groups.iter().map(|g| format!("{}/s {}", number(g.tried.rate), g.tried.why));
            let unknown =
                self.unknown.iter().map(|(rate, why)| format!("{}/s not run: {why}", number(*rate)));
            return Err(CapacityError::NothingHolds { reasons: reasons.chain(unknown).collect() });
        };
        Ok(Accepted { rate: group.tried.rate, runs: group.runs.clone() })
    }
}

impl<'a> Accepted<'a> {
    /// The run with the most requests.
    pub(super) fn longest(&self) -> (&'a Point, &'a ServeResult) {
        let longest = self.runs.iter().max_by_key(|(_, r)| r.measured);
        *longest.unwrap_or(&self.runs[0])
    }

    pub(super) fn mean(&self, of: impl Fn(&ServeResult) -> Option<f64>) -> Option<f64> {
        let values: Option<Vec<f64>> = self.runs.iter().map(|(_, r)| of(r)).collect();
        values.filter(|v| !v.is_empty()).map(|v| hbmark_core::stats::mean(&v))
    }
}
