//! A foreign decode on the same roofline as ours.
//!
//! Enters: a row, and what a person added by flag. Leaves: a judged [`CellResult`] at the row's batch and context, or what is missing and
//! the flag that says it, or what the flags and the file contradict each other in. The floor is that of [`hbmark_core::ledger`]; what had to be
//! taken for granted stands beside the number. Nothing is guessed: a model whose name is not a known shape's, or a GPU that could be two
//! products, is asked for.

mod notes;

use serde::{Deserialize, Serialize};

use super::decoding::AtOnce;
use super::llama_cpp;
use super::model_name::{self, NamedStorage};
use super::sglang;
use super::{ForeignFormat, ForeignResult, ForeignRow, Metric, Setup, Statistic, Value};
use hbmark_core::ledger::{Ledger, Verdict};
use hbmark_core::model::{Architecture, Dtype};
use hbmark_core::result::cause::joined;
use hbmark_core::result::{Cause, CellResult, DeviceSpec, Phase, Status};
use hbmark_core::units::{Bytes, Nanos};

use notes::{Costs, PlacementNotes};

/// Mean ITL over mean TPOT from which chunks hold several tokens. One token a chunk gives 0.3 to 1.0 in files of eight runs: long answers
/// weigh more in ITL, and short ones in TPOT.
const SEVERAL_AT_ONCE: f64 = 1.5;

/// What the user gives beyond the file. Where the file says another thing, the row is not rated.
#[derive(Debug, Clone, Default)]
pub struct UserOverrides<'a> {
    pub model: Option<&'a Architecture>,
    /// As it was given, and as a person knows it.
    pub model_name: Option<&'a str>,
    /// The storage that the given model's own files state, where they are quantised.
    pub model_dtype: Option<Dtype>,
    pub gpu: Option<&'a DeviceSpec>,
    pub gpus: Option<u64>,
    pub dtype: Option<Dtype>,
    pub kv_dtype: Option<Dtype>,
    pub batch: Option<u64>,
    pub context: Option<u64>,
}

/// One thing the roofline needs and the file does not report.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Missing {
    /// With its dashes.
    pub flag: String,
    /// What the file has instead, and what to write.
    pub hint: String,
}

/// A row placed on the roofline.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Placement {
    /// Judged against the data sheet, as one of our own cells would be.
    pub cell: CellResult,
    /// The short name of its data sheet.
    pub device: String,
    pub gpus: u64,
    /// The number that was taken for the time of a step.
    pub time: Value,
    /// What was taken for granted or computed from other figures.
    pub assumptions: Vec<String>,
}

/// Where a row is on the roofline, or why it is not.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RooflinePlacement {
    Placed(Box<Placement>),
    /// Something has to be given first.
    Asks(Vec<Missing>),
    /// What was given is not what the file says.
    Contradicts(Vec<Cause>),
    /// No decode step was timed, or none that a roofline has; nothing that was given contradicts the file.
    NoDecode(String),
}

/// A result with the place of each of its rows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Imported {
    pub result: ForeignResult,
    /// One a row.
    pub places: Vec<RooflinePlacement>,
    /// The flags that some row could be held against.
    #[serde(default)]
    pub compared: Vec<String>,
}

impl RooflinePlacement {
    /// The place, or why there is none.
    ///
    /// # Errors
    /// What is missing or contradicts the file, in words.
    pub fn placed(self) -> Result<Box<Placement>, String> {
        match self {
            Self::Placed(placement) => Ok(placement),
            Self::Asks(missing) => {
                let asked: Vec<String> = missing.iter().map(|m| format!("{} ({})", m.flag, m.hint)).collect();
                Err(format!("say {}", asked.join(", ")))
            }
            Self::Contradicts(causes) => Err(joined(&causes)),
            Self::NoDecode(why) => Err(why),
        }
    }
}

/// What speaks against a row: figures that contradict one another, flags that contradict the file, a time that is impossible. The one
/// judgement behind the exit code of `import`, the checklist and `--fail-on invalid`.
pub fn objections(row: &ForeignRow, place: &RooflinePlacement) -> Vec<Cause> {
    let impossible = match place {
        RooflinePlacement::Contradicts(causes) => causes.as_slice(),
        // The reason of a placed row is its first problem, if it has any.
        RooflinePlacement::Placed(placed) if placed.cell.status != Status::Ok && row.problems.is_empty() => {
            placed.cell.reason.as_slice()
        }
        RooflinePlacement::Placed(_) | RooflinePlacement::Asks(_) | RooflinePlacement::NoDecode(_) => &[],
    };
    row.problems.iter().chain(impossible).cloned().collect()
}

impl Imported {
    /// Places every row of a result.
    pub fn new(result: ForeignResult, given: &UserOverrides<'_>) -> Self {
        let places = result.rows.iter().map(|row| place(row, result.format, given)).collect();
        let mut compared: Vec<String> = Vec::new();
        for flag in result.rows.iter().flat_map(|row| compared_with(row, result.format, given)) {
            if !compared.iter().any(|known| known == flag) {
                compared.push(flag.to_owned());
            }
        }
        Self { result, places, compared }
    }

    /// What speaks against its rows, each with the row.
    pub fn objections(&self) -> impl Iterator<Item = (&ForeignRow, Cause)> {
        let rows = self.result.rows.iter().zip(&self.places);
        rows.flat_map(|(row, place)| objections(row, place).into_iter().map(move |cause| (row, cause)))
    }

    /// What is missing, each flag once.
    pub fn missing(&self) -> Vec<&Missing> {
        let mut asked: Vec<&Missing> = Vec::new();
        for place in &self.places {
            let RooflinePlacement::Asks(missing) = place else { continue };
            asked.extend(
                missing
                    .iter()
                    .filter(|m| !asked.iter().any(|known| known.flag == m.flag))
                    .collect::<Vec<_>>(),
            );
        }
        asked
    }
}

/// The flags that say something of which the row speaks, too.
fn compared_with(row: &ForeignRow, format: ForeignFormat, given: &UserOverrides<'_>) -> Vec<&'static str> {
    let setup = &row.setup;
    let implies_batch = || setup.batch.or(setup.max_concurrency).or(setup.requests).or(setup.completed);
    let both = [
        ("--model", given.model.is_some() && setup.model.is_some()),
        ("--gpu", given.gpu.is_some() && (setup.gpu.is_some() || setup.cpu.is_some())),
        ("--gpus", given.gpus.is_some() && setup.gpus.is_some()),
        ("--dtype", given.dtype.is_some() && (setup.stored_as.is_some() || stated_storage(setup).is_some())),
        ("--kv-dtype", given.kv_dtype.is_some() && setup.kv_dtype.is_some()),
        (
            "--batch",
            given.batch.is_some() && (implies_batch().is_some() || AtOnce::of(row, format).is_some()),
        ),
    ];
    both.into_iter().filter_map(|(flag, compared)| compared.then_some(flag)).collect()
}

/// What to do about a flag that contradicts the file; `None` of any other cause.
pub fn remedy(cause: &Cause) -> Option<String> {
    let Cause::FileContradicts { field, .. } = cause else { return None };
    let flag = match field.as_str() {
        "GPU" => "--gpu",
        "number of GPUs" => "--gpus",
        "dtype" => "--dtype",
        "KV dtype" => "--kv-dtype",
        "size of the weights" => "--model or --dtype",
        model if model.starts_with("model") => "--model",
        _ => "--batch",
    };
    Some(format!("change {flag} to what ran, or leave it out"))
}

/// Holds what was given against the file, and a row's decode step against the floor of its batch and context.
pub fn place(row: &ForeignRow, format: ForeignFormat, given: &UserOverrides<'_>) -> RooflinePlacement {
    let time = decode_time(row, format);
    let mut notes = PlacementNotes::default();
    if time.as_ref().is_ok_and(|time| time.metric == Metric::Itl) {
        notes.assume("the gap between tokens (ITL) is taken for TPOT, which the file lacks".to_owned());
    }
    let setup = &row.setup;
    let model = notes.model(setup, given);
    let device = notes.device(setup, given);
    let storage = notes.storage(setup, given);
    let batch = notes.batch(row, format, given);
    let context = notes.context(setup, given);
    let kv = notes.cache(setup, given, storage);
    let ledger = model.as_deref().zip(storage).map(|(model, dtype)| {
        // Of a mixture of block formats the shape gives the share of the bytes a step reads, and the file how many there are.
        let shares = if dtype == Dtype::Gguf { Dtype::Q4_0 } else { dtype };
        (Ledger::new(model, &model.inventory(shares), kv), dtype)
    });
    if let Some((ledger, dtype)) = &ledger
        && notes.contradictions.is_empty()
    {
        notes.size(setup, ledger, *dtype);
    }
    if !notes.contradictions.is_empty() {
        return RooflinePlacement::Contradicts(notes.contradictions);
    }
    let time = match time {
        Ok(time) => time,
        Err(why) => return RooflinePlacement::NoDecode(why),
    };
    if let Some(why) = llama_cpp::beside_the_gpu(setup, model.map(|model| model.layers)) {
        return RooflinePlacement::NoDecode(why);
    }
    let (Some((ledger, dtype)), Some((device, gpus)), Some(batch), Some(context)) =
        (ledger, device, batch, context)
    else {
        return RooflinePlacement::Asks(notes.missing);
    };
    let Costs { expected: cost, least } = notes.cost(setup, &ledger, dtype, batch, context);
    let engine = setup.engine.as_deref().or(format.engine()).unwrap_or("external");
    let mut cell = CellResult {
        kv_dtype: kv,
        status: Status::Ok,
        tpot_ns: Some(time.value),
        tokens_per_s: Some(batch as f64 / time.value * 1e9),
        bytes: cost.bytes,
        flops: cost.flops.0,
        distinct_experts: cost.distinct_experts,
        ..CellResult::blank(Phase::Decode, engine, dtype, batch, context)
    };
    let judged =
        |cost| Verdict::new(cost, Nanos(time.value), dtype, ledger.architecture(), None, Some(&device));
    let mut verdict = judged(&cost);
    // A time is impossible where no choice of experts explains it.
    if verdict.invalid.take().is_some() {
        verdict.invalid = judged(&least).invalid;
        if verdict.invalid.is_none() {
            notes.assume(
                "faster than the experts of that expectation can be read: its tokens agreed on fewer"
                    .to_owned(),
            );
        }
    }
    verdict.record(&mut cell);
    cell.reason = cell.reason.map(|reason| Cause::ImportMismatch { impossible: Box::new(reason) });
    if let Some(problem) = row.problems.first() {
        cell.status = Status::Invalid;
        cell.reason = Some(problem.clone());
    }
    let device = device.name.clone();
    RooflinePlacement::Placed(Box::new(Placement {
        cell,
        device,
        gpus,
        time: time.clone(),
        assumptions: notes.assumptions,
    }))
}

/// The data sheet of several GPUs together.
pub fn times(one: &DeviceSpec, gpus: u64) -> DeviceSpec {
    let gpus = gpus.max(1);
    let mut all = one.clone();
    all.bandwidth_bytes_per_s *= gpus as f64;
    all.memory_bytes = Bytes(all.memory_bytes.0.saturating_mul(gpus));
    all.l2_bytes = all.l2_bytes.map(|cache| Bytes(cache.0.saturating_mul(gpus)));
    all.dense_flops_per_s.values_mut().for_each(|peak| *peak *= gpus as f64);
    all
}

/// The number that is the time of a decode step.
fn decode_time(row: &ForeignRow, format: ForeignFormat) -> Result<&Value, String> {
    if row.saturated {
        return Err("saturated: its latencies grow with the length of the run".to_owned());
    }
    if let Some(tokens) = row.setup.accept_length.filter(|tokens| *tokens > 1.0) {
        return Err(format!(
            "speculative decoding: {tokens:.2} tokens a step, so that TPOT is not the time of a step"
        ));
    }
    // Their gaps are between chunks; vLLM's older versions, and AIPerf, do not say how many tokens are in one.
    let by_chunks =
        matches!(format, ForeignFormat::VllmServe | ForeignFormat::Aiperf | ForeignFormat::AiperfRecords);
    let mean = |metric| row.value(metric, Statistic::Mean).filter(|_| by_chunks);
    if let (Some(gap), Some(tpot)) = (mean(Metric::Itl), mean(Metric::Tpot))
        && gap >= SEVERAL_AT_ONCE * tpot
    {
        return Err(format!(
            "several tokens arrive at once: speculative decoding or multi-step scheduling (mean ITL is {:.1} x mean TPOT)",
            gap / tpot
        ));
    }
    if let Some(why) = sglang::replicas(&row.setup) {
        return Err(why);
    }
    [Metric::DecodeStep, Metric::Tpot, Metric::Itl]
        .into_iter()
        .find_map(|metric| row.center(metric))
        .ok_or_else(|| "no decode step was timed".to_owned())
}

/// How the file says the weights are stored: its own word, or the end of the model's name. A quantised name goes before the dtype of
/// the activations, which some programs call the dtype.
pub(crate) fn stated_storage(setup: &Setup) -> Option<Dtype> {
    let named = setup.model.as_deref().and_then(model_name::storage);
    match (setup.dtype, named) {
        (Some(Dtype::F32 | Dtype::Bf16 | Dtype::F16) | None, Some(NamedStorage::Known(named))) => Some(named),
        (own, _) => own,
    }
}
