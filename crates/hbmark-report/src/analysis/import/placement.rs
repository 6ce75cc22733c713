//! A foreign decode on the same roofline as ours.
//!
//! Enters: a row, and what a person added by flag. Leaves: a judged [`CellResult`] at the row's batch and context, or what is missing and
//! the flag that says it, or what the flags and the file contradict each other in. The floor is that of [`hbmark_core::ledger`]; what had to be taken for granted stands beside the number. Nothing is
//! guessed: a model whose name is not a known shape's, or a GPU that could be two products, is asked for.

use std::borrow::Cow;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::model_name::{self, Agreement, NamedStorage};
use super::words;
use super::{ForeignFormat, ForeignResult, ForeignRow, Metric, Setup, Value};
use hbmark_core::ledger::devices::{self, DeviceError};
use hbmark_core::ledger::{Ledger, Verdict};
use hbmark_core::model::{Architecture, Dtype, ModelError, presets};
use hbmark_core::result::cause::joined;
use hbmark_core::result::{Cause, CellResult, DeviceSpec, Phase, Status};
use hbmark_core::units::{Bytes, Nanos};

/// Weights whose stated size is further off than this are not those of the shape and storage named.
const SIZE_TOLERANCE: f64 = 0.05;

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
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Missing {
    /// With its dashes.
    pub flag: String,
    /// What the file has instead, and what to write.
    pub hint: String,
}

/// A row placed on the roofline.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
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
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RooflinePlacement {
    Placed(Box<Placement>),
    /// Something has to be given first.
    Asks(Vec<Missing>),
    /// What was given is not what the file says.
    Contradicts(Vec<Cause>),
    /// No decode step was timed, or none that a roofline has.
    NoDecode(String),
}

/// A result with the place of each of its rows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Imported {
    pub result: ForeignResult,
    /// One a row.
    pub places: Vec<RooflinePlacement>,
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
#[must_use]
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
    #[must_use]
    pub fn new(result: ForeignResult, given: &UserOverrides<'_>) -> Self {
        let places = result.rows.iter().map(|row| place(row, result.format, given)).collect();
        Self { result, places }
    }

    /// What speaks against its rows, each with the row.
    pub fn objections(&self) -> impl Iterator<Item = (&ForeignRow, Cause)> {
        let rows = self.result.rows.iter().zip(&self.places);
        rows.flat_map(|(row, place)| objections(row, place).into_iter().map(move |cause| (row, cause)))
    }

    /// What is missing, each flag once.
    #[must_use]
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

/// Holds a row's decode step against the floor of its batch and context.
#[must_use]
pub fn place(row: &ForeignRow, format: ForeignFormat, given: &UserOverrides<'_>) -> RooflinePlacement {
    let time = match decode_time(row) {
        Ok(time) => time,
        Err(why) => return RooflinePlacement::NoDecode(why),
    };
    let mut notes = PlacementNotes::default();
    if time.metric == Metric::Itl {
        notes.assume("the gap between tokens (ITL) is taken for TPOT, which the file lacks".to_owned());
    }
    let setup = &row.setup;
    let model = notes.model(setup, given);
    let device = notes.device(setup, given);
    let storage = notes.storage(setup, given);
    let batch = notes.batch(row, given);
    let context = notes.context(setup, given);
    if !notes.contradictions.is_empty() {
        return RooflinePlacement::Contradicts(notes.contradictions);
    }
    let (Some(model), Some((device, gpus)), Some(dtype), Some(batch), Some(context)) =
        (model, device, storage, batch, context)
    else {
        return RooflinePlacement::Asks(notes.missing);
    };
    let kv = notes.cache(setup, given, dtype);
    let cost = notes.cost(setup, &model, dtype, kv, batch, context);
    if !notes.contradictions.is_empty() {
        return RooflinePlacement::Contradicts(notes.contradictions);
    }
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
    Verdict::new(&cost, Nanos(time.value), dtype, None, Some(&device)).record(&mut cell);
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
#[must_use]
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
fn decode_time(row: &ForeignRow) -> Result<&Value, String> {
    if let Some(tokens) = row.setup.accept_length.filter(|tokens| *tokens > 1.0) {
        return Err(format!(
            "speculative decoding: {tokens:.2} tokens a step, so that TPOT is not the time of a step"
        ));
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

#[derive(Default)]
struct PlacementNotes {
    missing: Vec<Missing>,
    contradictions: Vec<Cause>,
    assumptions: Vec<String>,
}

impl PlacementNotes {
    fn assume(&mut self, what: String) {
        self.assumptions.push(what);
    }

    fn contradict(&mut self, field: &str, file: &dyn ToString, given: &dyn ToString) {
        let (field, file, given) = (field.to_owned(), file.to_string(), given.to_string());
        self.contradictions.push(Cause::FileContradicts { field, file, given });
    }

    fn ask<T>(&mut self, flag: &str, hint: String) -> Option<T> {
        self.missing.push(Missing { flag: flag.to_owned(), hint });
        None
    }

    fn model<'a>(&mut self, setup: &Setup, given: &UserOverrides<'a>) -> Option<Cow<'a, Architecture>> {
        if let Some(architecture) = given.model {
            let ours = given.model_name.unwrap_or_default();
            match setup.model.as_deref().map(|file| (file, model_name::compare(file, ours, architecture))) {
                Some((file, Agreement::Differs(in_what))) => {
                    self.contradict(&format!("model ({in_what})"), &file, &ours);
                }
                Some((_, Agreement::Taken(how))) => self.assume(how),
                Some((_, Agreement::Same)) => {}
                None => self.assume(format!("it ran {ours} as given: the file names no model (--model)")),
            }
            return Some(Cow::Borrowed(architecture));
        }
        let Some(named) = setup.model.as_deref() else {
            return self.ask("--model", "the file names no model".to_owned());
        };
        if let Some(preset) = presets::find(named) {
            return Some(Cow::Owned(preset.architecture));
        }
        let near = match presets::unknown(named) {
            ModelError::UnknownModel { suggestions, .. } if !suggestions.is_empty() => {
                format!("; shapes of like names: {}", suggestions.join(", "))
            }
            _ => "; a name (`hbmark models`), a folder with config.json or a GGUF file".to_owned(),
        };
        self.ask(
            "--model",
            format!("`{named}` is not the name of a shape that ships with this program{near}"),
        )
    }

    /// The data sheet of all GPUs together.
    fn device(&mut self, setup: &Setup, given: &UserOverrides<'_>) -> Option<(DeviceSpec, u64)> {
        let one = match (given.gpu, setup.gpu.as_deref()) {
            (Some(spec), named) => {
                if named.or(setup.cpu.as_deref()).is_none() {
                    self.assume(format!("it ran on {} as given: the file names no GPU (--gpu)", spec.name));
                }
                self.other_device(spec, named, setup.cpu.as_deref());
                spec
            }
            (None, None) => return self.ask("--gpu", "the file names no GPU".to_owned()),
            (None, Some(named)) => match devices::find(named) {
                Ok(spec) => spec,
                Err(DeviceError::Ambiguous { candidates, .. }) => {
                    return self.ask("--gpu", format!("`{named}` could be {candidates}"));
                }
                Err(DeviceError::Unknown { .. }) => {
                    return self
                        .ask("--gpu", format!("no data sheet for `{named}`; known: `hbmark devices`"));
                }
            },
        };
        if let (Some(given), Some(file)) = (given.gpus, setup.gpus)
            && given != file
        {
            self.contradict("number of GPUs", &file, &given);
        }
        let gpus = given.gpus.or(setup.gpus).unwrap_or_else(|| {
            self.assume("one GPU: the file does not say how many (--gpus)".to_owned());
            1
        });
        let gpus = gpus.max(1);
        if gpus > 1 {
            self.assume(format!(
                "the bandwidth of {gpus} GPUs together; what they send each other is not in the floor"
            ));
        }
        Some((times(one, gpus), gpus))
    }

    /// Notes that the file names another device than was given.
    fn other_device(&mut self, given: &DeviceSpec, named: Option<&str>, cpu: Option<&str>) {
        let Some(named) = named.or(cpu) else { return };
        let same = match devices::find(named) {
            Ok(spec) => Some(spec.name == given.name),
            Err(DeviceError::Ambiguous { candidates, .. }) => {
                Some(candidates.split(", ").any(|one| one == given.name))
            }
            // A name without a data sheet may be that of a machine; one of a maker's products is another GPU, and so is a CPU.
            Err(DeviceError::Unknown { .. }) => devices::mentions(named, given),
        };
        match same {
            Some(true) => {}
            Some(false) => self.contradict("GPU", &named, &given.name),
            None => self.assume(format!(
                "it ran on {} as given; the file's `{named}` is no name of a GPU",
                given.name
            )),
        }
    }

    fn storage(&mut self, setup: &Setup, given: &UserOverrides<'_>) -> Option<Dtype> {
        let stated = stated_storage(setup);
        let unpriced = setup.model.as_deref().and_then(|name| match model_name::storage(name)? {
            NamedStorage::Unknown(what) => Some(what),
            NamedStorage::Known(_) => None,
        });
        // 16 bits are as many in both formats.
        let alike = |a: Dtype, b: Dtype| {
            let sixteen = |dtype| matches!(dtype, Dtype::Bf16 | Dtype::F16);
            a == b || (sixteen(a) && sixteen(b))
        };
        if let Some(wanted) = given.dtype {
            match (stated, unpriced, &setup.stored_as) {
                (Some(stated), ..) if alike(stated, wanted) => {}
                (Some(stated), _, word) => {
                    let word = word.clone().filter(|_| setup.dtype.is_none_or(|own| own == stated));
                    self.contradict("dtype", &word.unwrap_or_else(|| stated.to_string()), &wanted);
                }
                (None, Some(what), _) => self.contradict("dtype", &what, &wanted),
                (None, None, Some(word)) if wanted != Dtype::Gguf && setup.weight_bytes.is_some() => {
                    self.contradict("dtype", word, &wanted);
                }
                (None, None, Some(_)) => {}
                (None, None, None) => {
                    self.assume(format!("weights in {wanted} as given: the file does not say (--dtype)"));
                }
            }
            return Some(wanted);
        }
        if let Some(dtype) = stated.or(given.model_dtype).filter(|_| unpriced.is_none()) {
            if setup.stored_as.is_none() {
                let by = if stated.is_some() {
                    "the model's name in the file"
                } else {
                    "the files of the model given"
                };
                self.assume(format!("weights in {dtype}, by {by}"));
            }
            return Some(dtype);
        }
        match (&setup.stored_as, setup.weight_bytes) {
            (Some(_), Some(_)) => Some(Dtype::Gguf),
            (Some(stored), None) => {
                self.ask("--dtype", format!("the weights are `{stored}`, which this program has no size for"))
            }
            (None, _) => self.ask("--dtype", "the file does not say how the weights are stored".to_owned()),
        }
    }

    fn batch(&mut self, row: &ForeignRow, given: &UserOverrides<'_>) -> Option<usize> {
        let whole = |batch: u64| usize::try_from(batch).ok().filter(|b| *b >= 1);
        if let (Some(given), Some(file)) = (given.batch, row.setup.batch.or(row.setup.max_concurrency))
            && (given > file || row.setup.batch.is_some_and(|file| file != given))
        {
            let what = if row.setup.batch.is_some() { "batch" } else { "limit of requests at once" };
            self.contradict(what, &file, &given);
        }
        if let Some(stated) = given.batch.or(row.setup.batch) {
            return whole(stated);
        }
        if row.setup.max_concurrency == Some(1) {
            return Some(1);
        }
        let (found, how) = match (row.decoding_at_once(), row.setup.concurrency) {
            (Some(found), _) => (found, "by Little's law: request rate × (tokens − 1) × mean TPOT"),
            (None, Some(mean)) => (mean, "the mean concurrency, requests still in prefill included"),
            (None, None) => {
                let hint = match row.setup.max_concurrency {
                    Some(limit) => {
                        format!("the file has only a limit of {} at once", words::counted(limit, "request"))
                    }
                    None => "the file does not say how many sequences decoded at once".to_owned(),
                };
                return self.ask("--batch", hint);
            }
        };
        self.assume(format!(
            "batch {:.0}: {found:.1} sequences decoded at once, {how}",
            found.round().max(1.0)
        ));
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "capped just here")]
        Some(found.round().clamp(1.0, 1e6) as usize)
    }

    fn context(&mut self, setup: &Setup, given: &UserOverrides<'_>) -> Option<usize> {
        if let Some(stated) = given.context {
            return usize::try_from(stated).ok();
        }
        let Some(context) = setup.decode_context() else {
            return self.ask("--context", "the file does not give input and output lengths".to_owned());
        };
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "capped just here")]
        Some(context.round().clamp(0.0, 1e8) as usize)
    }

    fn cache(&mut self, setup: &Setup, given: &UserOverrides<'_>, weights: Dtype) -> Dtype {
        if let (Some(given), Some(file)) = (given.kv_dtype, setup.kv_dtype)
            && given != file
        {
            self.contradict("KV dtype", &file, &given);
        }
        given.kv_dtype.or(setup.kv_dtype).unwrap_or_else(|| {
            let kv = weights.of_cache();
            self.assume(format!("KV cache in {kv}: the file does not say (--kv-dtype)"));
            kv
        })
    }

    fn cost(
        &mut self,
        setup: &Setup,
        model: &Architecture,
        dtype: Dtype,
        kv: Dtype,
        batch: usize,
        context: usize,
    ) -> hbmark_core::ledger::StepCost {
        // Of a mixture of block formats the shape gives the share of the bytes a step reads, and the file how many there are.
        let shares = if dtype == Dtype::Gguf { Dtype::Q4_0 } else { dtype };
        let ledger = Ledger::new(model, &model.inventory(shares), kv);
        let mut cost = ledger.decode(batch, context);
        let Some(stated) = setup.weight_bytes else { return cost };
        let ours = ledger.resident_weights().as_f64();
        if dtype == Dtype::Gguf {
            let read = cost.bytes.weights.as_f64() / ours * stated as f64;
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a share of a u64")]
            let read = read as u64;
            cost.bytes.weights = Bytes(read);
            self.assume(format!(
                "of the {} the file states, a step reads the share it would in q4_0",
                Bytes(stated)
            ));
        } else if (stated as f64 / ours - 1.0).abs() > SIZE_TOLERANCE {
            let shape = format!("a shape of {} in {dtype}", ledger.resident_weights());
            self.contradict("size of the weights", &Bytes(stated), &shape);
        }
        cost
    }
}
