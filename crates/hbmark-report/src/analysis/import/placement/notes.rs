//! What a row and the flags say together of the run: what contradicts, what is missing and what is taken for granted.
//!
//! Enters: the conditions of a row, and what a person gave. Leaves: model, devices, storage, batch, context and cost of the step, as far as
//! they are known, and notes on each. A flag is held against the file even where the row has no step to rate.

use std::borrow::Cow;

use super::super::decoding::{self, AtOnce};
use super::super::llama_cpp;
use super::super::model_name::{self, Agreement, NamedStorage};
use super::super::{ForeignFormat, ForeignRow, Setup, dtype_of};
use super::{Missing, UserOverrides, stated_storage, times};
use crate::analysis::words;
use hbmark_core::ledger::devices::{self, DeviceError};
use hbmark_core::ledger::{ExpertRouting, Ledger, StepCost, routing_note};
use hbmark_core::model::{Architecture, Dtype, ModelError, presets};
use hbmark_core::result::{Cause, DeviceSpec};
use hbmark_core::units::{Bytes, whole, whole_count};

/// Weights whose stated size is further off than this are not those of the shape and storage named.
const SIZE_TOLERANCE: f64 = 0.05;

/// What a step costs. Of a mixture, whose file does not say which experts its tokens took, also where all of them took the same.
pub(super) struct Costs {
    pub expected: StepCost,
    pub least: StepCost,
}

#[derive(Default)]
pub(super) struct PlacementNotes {
    pub missing: Vec<Missing>,
    pub contradictions: Vec<Cause>,
    pub assumptions: Vec<String>,
}

impl PlacementNotes {
    pub fn assume(&mut self, what: String) {
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

    pub fn model<'a>(&mut self, setup: &Setup, given: &UserOverrides<'a>) -> Option<Cow<'a, Architecture>> {
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
        if let Some(preset) = presets::find(model_name::without_tuning(named)) {
            self.assume(format!("`{named}` has the shape of {}", preset.name));
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
    pub fn device(&mut self, setup: &Setup, given: &UserOverrides<'_>) -> Option<(DeviceSpec, u64)> {
        if let (Some(given), Some(file)) = (given.gpus, setup.gpus)
            && given != file
        {
            self.contradict("number of GPUs", &file, &given);
        }
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
        let gpus = given.gpus.or(setup.gpus).unwrap_or_else(|| {
            self.assume("one GPU: the file does not say how many (--gpus)".to_owned());
            1
        });
        let gpus = gpus.max(1);
        if gpus > 1 {
            self.assume(format!(
                "the bandwidth of {gpus} GPUs ({}) together; what they send each other, and what each of them holds of K, V or latents that the \
                 others hold too, is not in the floor: `hbmark predict --tp {gpus}` has both",
                one.name
            ));
        }
        Some((times(one, gpus), gpus))
    }

    /// Notes that the file names another device than was given.
    fn other_device(&mut self, given: &DeviceSpec, named: Option<&str>, cpu: Option<&str>) {
        let Some(named) = named.or(cpu) else { return };
        // Of several unlike GPUs of one machine, any may be the one.
        if named.contains(", ")
            && named.split(", ").any(|one| devices::find(one).is_ok_and(|spec| spec.name == given.name))
        {
            return self.assume(format!("it ran on {} as given, one of the machine's: {named}", given.name));
        }
        // A device without a data sheet is its measured ceilings under the machine's own name.
        if named == given.name || named.eq_ignore_ascii_case(&given.product) {
            return;
        }
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
                "it ran on {} as given; the file's `{named}` is not a name of a GPU",
                given.name
            )),
        }
    }

    pub fn storage(&mut self, setup: &Setup, given: &UserOverrides<'_>) -> Option<Dtype> {
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
                // A file called by its main format is a mixture, which has the size it states.
                (Some(Dtype::Gguf), _, Some(word)) if dtype_of(word) == Some(wanted) => return stated,
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

    pub fn batch(
        &mut self,
        row: &ForeignRow,
        format: ForeignFormat,
        given: &UserOverrides<'_>,
    ) -> Option<usize> {
        let whole = |batch: u64| usize::try_from(batch).ok().filter(|b| *b >= 1);
        let implied = AtOnce::of(row, format);
        if let Some(given) = given.batch {
            if let Some((what, file)) = decoding::refutes(row, format, given) {
                self.contradict(what, &file, &given);
            }
            if row.setup.batch.is_none() {
                let file = implied.map_or_else(
                    || "the file does not say how many sequences decoded at once".to_owned(),
                    |found| format!("the file has {:.1} on average, {}", found.sequences, found.how),
                );
                self.assume(format!("batch {given} as given: {file} (--batch)"));
            }
            return whole(given);
        }
        if let Some(stated) = row.setup.batch {
            return whole(stated);
        }
        if row.setup.max_concurrency == Some(1) {
            return Some(1);
        }
        let Some(AtOnce { sequences, how, .. }) = implied else {
            let hint = match row.setup.max_concurrency {
                Some(limit) => {
                    format!("the file has only a limit of {} at once", words::counted(limit, "request"))
                }
                None => "the file does not say how many sequences decoded at once".to_owned(),
            };
            return self.ask("--batch", hint);
        };
        let batch = sequences.round().clamp(1.0, 1e6);
        self.assume(format!("batch {batch:.0}: {sequences:.1} sequences decoded at once, {how}"));
        Some(whole_count(batch))
    }

    pub fn context(&mut self, setup: &Setup, given: &UserOverrides<'_>) -> Option<usize> {
        if let Some(stated) = given.context {
            return usize::try_from(stated).ok();
        }
        let Some(context) = setup.decode_context() else {
            return self.ask("--context", "the file does not give input and output lengths".to_owned());
        };
        Some(whole_count(context.round().clamp(0.0, 1e8)))
    }

    /// The storage of the KV cache; of weights in no known storage it is held against the file, and no more.
    pub fn cache(&mut self, setup: &Setup, given: &UserOverrides<'_>, weights: Option<Dtype>) -> Dtype {
        if let (Some(given), Some(file)) = (given.kv_dtype, setup.kv_dtype)
            && given != file
        {
            self.contradict("KV dtype", &file, &given);
        }
        given.kv_dtype.or(setup.kv_dtype).unwrap_or_else(|| {
            let kv = weights.unwrap_or(Dtype::Bf16).of_cache();
            let file = llama_cpp::cache_words(setup)
                .map_or_else(|| "the file does not say".to_owned(), |words| format!("the file has {words}"));
            self.assume(format!("KV cache in {kv}: {file} (--kv-dtype)"));
            kv
        })
    }

    /// Holds the size of the weights that the file states against that of the shape and storage.
    pub fn size(&mut self, setup: &Setup, ledger: &Ledger, dtype: Dtype) {
        let Some(stated) = setup.weight_bytes.filter(|_| dtype != Dtype::Gguf) else { return };
        let ours = ledger.resident_weights();
        if (stated as f64 / ours.as_f64() - 1.0).abs() > SIZE_TOLERANCE {
            self.contradict("size of the weights", &Bytes(stated), &format!("a shape of {ours} in {dtype}"));
        }
    }

    pub fn cost(
        &mut self,
        setup: &Setup,
        ledger: &Ledger,
        dtype: Dtype,
        batch: usize,
        context: usize,
    ) -> Costs {
        let mut expected = ledger.decode(batch, context);
        let per_token =
            ledger.architecture().experts.as_ref().map_or(0.0, |experts| experts.per_token as f64);
        let mut least = expected.meeting(per_token, ledger.expert_bytes());
        if batch > 1 {
            self.assumptions.extend(routing_note(ledger, ExpertRouting::Uniform, batch));
        }
        if llama_cpp::shares_prompt(setup) {
            let own = whole_count((setup.output_tokens.unwrap_or(0.0) / 2.0).round());
            let others = ledger.decode(batch.saturating_sub(1), own).bytes.kv_read;
            let kv_read = ledger.decode(1, context).bytes.kv_read + others;
            (expected.bytes.kv_read, least.bytes.kv_read) = (kv_read, kv_read);
            self.assume("K and V of the prompt, which all sequences share, are read once".to_owned());
        }
        if let Some(stated) = setup.weight_bytes.filter(|_| dtype == Dtype::Gguf) {
            let ours = ledger.resident_weights().as_f64();
            for cost in [&mut expected, &mut least] {
                let read = cost.bytes.weights.as_f64() / ours * stated as f64;
                cost.bytes.weights = Bytes(whole(read));
            }
            self.assume(format!(
                "of the {} the file states, a step reads the share it would in q4_0",
                Bytes(stated)
            ));
        }
        Costs { expected, least }
    }
}
