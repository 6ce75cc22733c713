//! Speculative decoding: what verify steps cost beside the decode step, and which acceptance of draft tokens pays for them.
//!
//! Enters: the decode and verify cells of a [`Report`], the time of drafting, and an acceptance where one is assumed. Leaves: a
//! [`Speculation`]. What is accepted is never measured: it is a property of text, model and draft, which random tokens lack. So
//! a speed-up is a curve over acceptance.
//!
//! A verify step of k draft tokens brings L tokens of each sequence: those accepted, and one more. Where each is accepted with
//! probability p if all before it were, `L = 1 + p + p² + … + p^k`. The step costs `T_verify + k · T_draft`, so that the effective time per
//! output token is that over L, and the speed-up is `T_decode` over the effective time. It is above 1 where L is above the
//! break-even length `(T_verify + k · T_draft) / T_decode`.

use serde::Serialize;

use super::ladder::is_trusted;
use hbmark_core::model::Dtype;
use hbmark_core::result::{Capabilities, CellResult, Phase, Report, ReportKind, Status};

/// Acceptance rates of a curve.
pub const CURVE: [f64; 11] = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0];

/// How many draft tokens are accepted.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Acceptance {
    /// The probability of each draft token where all before it were accepted.
    Rate(f64),
    /// The share of steps that accept the draft token at each position; it never rises from one to the next.
    RatePerPosition(Vec<f64>),
    /// Tokens of a sequence that a step brings on average, the one that is not a draft token among them.
    Length(f64),
}

/// Why no acceptance is like that.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum AcceptanceError {
    #[error("an acceptance rate of {0} is not between 0 and 1")]
    Rate(f64),
    #[error(
        "the acceptance rate rises from {before} to {after}: a draft token is accepted only where all before it are"
    )]
    Rises { before: f64, after: f64 },
    #[error("an acceptance length of {0} is below 1: a verify step always brings one token")]
    Length(f64),
}

impl Acceptance {
    /// Checks that there can be such an acceptance.
    ///
    /// # Errors
    /// [`AcceptanceError`], with the number.
    pub fn checked(self) -> Result<Self, AcceptanceError> {
        let rates: &[f64] = match &self {
            Self::Rate(rate) => std::slice::from_ref(rate),
            Self::RatePerPosition(rates) => rates,
            Self::Length(length) if length.is_finite() && *length >= 1.0 => &[],
            Self::Length(length) => return Err(AcceptanceError::Length(*length)),
        };
        if let Some(rate) = rates.iter().find(|rate| !(0.0..=1.0).contains(*rate)) {
            return Err(AcceptanceError::Rate(*rate));
        }
        match rates.windows(2).find(|pair| pair[1] > pair[0]) {
            Some(pair) => Err(AcceptanceError::Rises { before: pair[0], after: pair[1] }),
            None => Ok(self),
        }
    }

    /// Tokens of a sequence that a step of so many draft tokens brings on average; `None` where the acceptance says nothing of so many, or more
    /// than they can bring.
    pub fn tokens_per_step(&self, draft_tokens: usize) -> Option<f64> {
        match self {
            Self::Rate(rate) => Some(tokens_at(*rate, draft_tokens)),
            Self::RatePerPosition(rates) => {
                rates.get(..draft_tokens).map(|rates| 1.0 + rates.iter().sum::<f64>())
            }
            Self::Length(length) => Some(*length).filter(|length| *length <= draft_tokens as f64 + 1.0),
        }
    }
}

/// `1 + p + p² + … + p^k`.
fn tokens_at(rate: f64, draft_tokens: usize) -> f64 {
    (0..draft_tokens).fold(1.0, |so_far, _| 1.0 + rate * so_far)
}

/// The acceptance rate at which a step of so many draft tokens brings `length` tokens; `None` where it never brings as many.
fn rate_at(length: f64, draft_tokens: usize) -> Option<f64> {
    if length <= 1.0 {
        return Some(0.0);
    }
    if length > draft_tokens as f64 + 1.0 {
        return None;
    }
    let (mut low, mut high) = (0.0, 1.0);
    for _ in 0..60 {
        let middle = f64::midpoint(low, high);
        if tokens_at(middle, draft_tokens) < length { low = middle } else { high = middle }
    }
    Some(high)
}

/// What drafting costs.
#[derive(Debug, Clone, Copy, Default)]
pub enum Drafting<'a> {
    /// Nothing: tokens are looked up in the prompt, say.
    #[default]
    Free,
    /// So many nanoseconds for each draft token.
    Time(f64),
    /// The decode steps of a draft model, at the same batch and context.
    Model(&'a Report),
}

/// The time of a draft token.
struct DraftTime {
    ns: f64,
    status: Status,
    /// The engine and storage of a draft model.
    series: Option<String>,
}

impl Drafting<'_> {
    /// The time of a draft token beside a verify step; `None` where the draft model was not timed at that batch and context. Of several times that of
    /// the same engine and storage counts, otherwise of the same engine, otherwise the shortest.
    fn time(self, target: &CellResult) -> Option<DraftTime> {
        let plain = |ns| Some(DraftTime { ns, status: Status::Ok, series: None });
        let report = match self {
            Self::Free => return plain(0.0),
            Self::Time(time) => return plain(time),
            Self::Model(report) => report,
        };
        let here = |cell: &&CellResult| {
            cell.phase == Phase::Decode && (cell.batch, cell.context) == (target.batch, target.context)
        };
        let other = |cell: &CellResult| (cell.engine != target.engine, cell.dtype != target.dtype);
        let cells = report.cells.iter().filter(here).filter_map(|cell| Some((cell, timed(cell)?.ns)));
        let (cell, ns) = cells.min_by(|a, b| other(a.0).cmp(&other(b.0)).then(a.1.total_cmp(&b.1)))?;
        Some(DraftTime { ns, status: cell.status, series: Some(format!("{} {}", cell.engine, cell.dtype)) })
    }
}

/// The device of a result: its row of the table of data sheets, otherwise its product.
fn device(report: &Report) -> String {
    let on_gpu = report.capabilities.iter().any(Capabilities::on_gpu);
    let product = || report.environment.product(on_gpu);
    report.datasheet.as_ref().map_or_else(product, |sheet| &sheet.name).to_owned()
}

/// The devices of a model and its draft, where they are not the same: their times do not go together.
pub fn other_device(target: &Report, draft: &Report) -> Option<(String, String)> {
    Some((device(target), device(draft))).filter(|(target, draft)| target != draft)
}

/// How far a status is from `ok`, of those whose times are read.
fn doubt(status: Status) -> u8 {
    match status {
        Status::Ok => 0,
        Status::Predicted => 1,
        Status::NotConverged => 2,
        Status::Noisy => 3,
        _ => 4,
    }
}

/// One place of the curve.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct SpeedupPoint {
    /// The acceptance rate, where the acceptance is one.
    pub rate: Option<f64>,
    pub tokens_per_step: f64,
    /// Effective time per output token.
    pub tpot_ns: f64,
    pub speedup: f64,
}

/// A verify step beside the decode step of the same engine, batch and context.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct VerifyRow {
    pub engine: String,
    pub dtype: Dtype,
    pub batch: usize,
    pub context: usize,
    pub draft_tokens: usize,
    /// Of the worst of its cells, that of the draft among them.
    pub status: Status,
    pub verify_ns: f64,
    pub decode_ns: f64,
    /// For each draft token; null where the draft model was not timed at this batch and context.
    pub draft_ns: Option<f64>,
    /// The engine and storage of the draft model.
    pub draft_series: Option<String>,
    /// Verify step over decode step, and its interval: of 95 %, but where blocks of a cell cannot stand for it the range over them.
    pub ratio: f64,
    pub ratio_low: Option<f64>,
    pub ratio_high: Option<f64>,
    /// The same of their floors; null of a prediction, whose times are floors.
    pub floor_ratio: Option<f64>,
    /// Different experts of a layer, of mixtures: in the verify step and in the decode step.
    pub verify_experts: Option<f64>,
    pub decode_experts: Option<f64>,
    /// Tokens that a step must bring on average for speculation to gain nothing and lose nothing.
    pub break_even_length: Option<f64>,
    /// The acceptance rate at which it brings them; null where not even all of the draft tokens are enough.
    pub break_even_rate: Option<f64>,
    /// Over acceptance rates from 0 to 1.
    pub curve: Vec<SpeedupPoint>,
    /// At the acceptance that was assumed.
    pub assumed: Option<SpeedupPoint>,
}

impl VerifyRow {
    fn point(&self, rate: Option<f64>, tokens_per_step: f64) -> Option<SpeedupPoint> {
        let tpot_ns = (self.verify_ns + self.draft_tokens as f64 * self.draft_ns?) / tokens_per_step;
        Some(SpeedupPoint { rate, tokens_per_step, tpot_ns, speedup: self.decode_ns / tpot_ns })
    }

    /// The speed-up at an acceptance rate.
    pub fn speedup_at(&self, rate: f64) -> Option<f64> {
        self.point(Some(rate), tokens_at(rate, self.draft_tokens)).map(|point| point.speedup)
    }
}

/// What verify steps cost, and what they may gain.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Speculation {
    pub model: String,
    /// Some of its times were computed from a data sheet, and not measured.
    pub predicted: bool,
    /// The draft model, where it was timed.
    pub draft_model: Option<String>,
    pub acceptance: Option<Acceptance>,
    pub rows: Vec<VerifyRow>,
}

/// A time as a reader is shown it, with its interval.
struct Timed {
    ns: f64,
    interval: Option<(f64, f64)>,
}

/// The time of a step over a cache that can be trusted; of a prediction its floor.
fn timed(cell: &CellResult) -> Option<Timed> {
    let (ns, interval) = cell.time_or_floor()?;
    (cell.status == Status::Predicted || is_trusted(cell.status)).then_some(Timed { ns, interval })
}

/// Every verify step that has a decode step beside it: those of an engine, storage, batch and context together.
pub fn speculation(report: &Report, drafting: Drafting<'_>, acceptance: Option<Acceptance>) -> Speculation {
    let rows = report.cells.iter().filter_map(|cell| row(report, cell, drafting, acceptance.as_ref()));
    let mut rows: Vec<VerifyRow> = rows.collect();
    let place = |row: &VerifyRow| (row.batch, row.context, row.draft_tokens);
    rows.sort_by(|a, b| (&a.engine, a.dtype.name(), place(a)).cmp(&(&b.engine, b.dtype.name(), place(b))));
    Speculation {
        model: report.model.name.clone(),
        predicted: report.kind == ReportKind::Predict
            || matches!(drafting, Drafting::Model(draft) if draft.kind == ReportKind::Predict),
        draft_model: match drafting {
            Drafting::Model(draft) => Some(draft.model.name.clone()),
            Drafting::Free | Drafting::Time(_) => None,
        },
        rows,
        acceptance,
    }
}

fn row(
    report: &Report,
    verify: &CellResult,
    drafting: Drafting<'_>,
    acceptance: Option<&Acceptance>,
) -> Option<VerifyRow> {
    let Phase::Verify { draft_tokens } = verify.phase else { return None };
    let same = |cell: &&CellResult| {
        cell.phase == Phase::Decode
            && (&cell.engine, cell.dtype, cell.batch, cell.context)
                == (&verify.engine, verify.dtype, verify.batch, verify.context)
    };
    let decode = report.cells.iter().find(same)?;
    let (step, base) = (timed(verify)?, timed(decode)?);
    let ratio = step.ns / base.ns;
    // Relative half-widths of independent times add up as squares.
    let width = step.interval.zip(base.interval).map(|(step, base)| {
        let squared = |(low, high): (f64, f64)| ((high / low).ln() / 2.0).powi(2);
        (squared(step) + squared(base)).sqrt().exp()
    });
    // Of a prediction the times themselves are floors.
    let measured = verify.status != Status::Predicted;
    let floor = |cell: &CellResult| cell.predicted_ns.or(cell.predicted_datasheet_ns);
    let draft = drafting.time(verify);
    let draft_ns = draft.as_ref().map(|draft| draft.ns);
    let statuses = [verify.status, decode.status, draft.as_ref().map_or(Status::Ok, |draft| draft.status)];
    let break_even_length = draft_ns.map(|draft| (step.ns + draft_tokens as f64 * draft) / base.ns);
    let mut row = VerifyRow {
        engine: verify.engine.clone(),
        dtype: verify.dtype,
        batch: verify.batch,
        context: verify.context,
        draft_tokens,
        status: statuses.into_iter().max_by_key(|status| doubt(*status)).unwrap_or(verify.status),
        verify_ns: step.ns,
        decode_ns: base.ns,
        draft_ns,
        draft_series: draft.and_then(|draft| draft.series),
        ratio,
        ratio_low: width.map(|width| ratio / width),
        ratio_high: width.map(|width| ratio * width),
        floor_ratio: floor(verify)
            .zip(floor(decode))
            .filter(|_| measured)
            .map(|(verify, decode)| verify / decode),
        verify_experts: verify.distinct_experts,
        decode_experts: decode.distinct_experts,
        break_even_length,
        break_even_rate: break_even_length.and_then(|length| rate_at(length, draft_tokens)),
        curve: Vec::new(),
        assumed: None,
    };
    row.curve =
        CURVE.iter().filter_map(|rate| row.point(Some(*rate), tokens_at(*rate, draft_tokens))).collect();
    let rate = match acceptance {
        Some(Acceptance::Rate(rate)) => Some(*rate),
        _ => None,
    };
    row.assumed = acceptance
        .and_then(|acceptance| acceptance.tokens_per_step(draft_tokens))
        .and_then(|tokens| row.point(rate, tokens));
    Some(row)
}

#[cfg(test)]
mod tests;
