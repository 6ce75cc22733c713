//! `hbmark predict` as data: the roofline of a model on a GPU of the table, as a report without measurements.
//!
//! Enters: an opened model (only its dimensions and the sizes of its tensors are used) and a question. Leaves: a [`Report`] with the same cells as a run.

use crate::machine::environment;
use crate::weights::{OpenError, OpenModel};
use hbmark_core::ledger::{ExpertRouting, Group, GroupError, Prediction, Request, predict, predict_group};
use hbmark_core::model::Dtype;
use hbmark_core::result::{Crossover, DeviceSpec, Environment, GroupSummary, Phase, Report, ReportKind};

/// What to predict.
#[derive(Debug, Clone)]
pub struct Question {
    pub device: DeviceSpec,
    pub dtypes: Vec<Dtype>,
    pub kv_dtype: Option<Dtype>,
    pub phases: Vec<Phase>,
    pub batches: Vec<usize>,
    pub contexts: Vec<usize>,
    /// How tokens are assumed to be spread over experts.
    pub routing: ExpertRouting,
    /// The GPUs that hold the model together; `None` for one.
    pub group: Option<Group>,
}

/// Why there is no prediction.
#[derive(Debug, thiserror::Error)]
pub enum PredictError {
    #[error(transparent)]
    Open(#[from] OpenError),
    /// No engine would start the model so.
    #[error("{model} with {group}: {problem}")]
    Group { model: String, group: Group, problem: Box<GroupError> },
}

/// Predicts every cell of the question.
///
/// # Errors
/// When a dtype contradicts the model's files, or no engine would start the model on such a group.
///
/// # Panics
/// Never: a question has at least one dtype.
pub fn report(model: &OpenModel, question: &Question, command: &str) -> Result<Report, PredictError> {
    let mut group: Option<GroupSummary> = None;
    let mut predictions = Vec::new();
    for weights in &question.dtypes {
        let (prediction, placed) = predicted(model, question, *weights)?;
        predictions.push(prediction);
        match (&mut group, placed) {
            (Some(known), Some(placed)) => known.stages.extend(placed.stages),
            (known, placed) => *known = placed,
        }
    }
    let first = predictions.first().expect("a question has at least one dtype");
    let mut report = Report {
        // A prediction does not depend on the machine it was computed on.
        environment: Environment { build: environment::this_binary(), ..Environment::default() },
        datasheet: Some(question.device.clone()),
        warnings: model.doubt().into_iter().collect(),
        group,
        ..Report::new(ReportKind::Predict, command, first.model.clone())
    };
    let several = predictions.len() > 1;
    for (dtype, prediction) in question.dtypes.iter().zip(predictions) {
        report.cells.extend(prediction.cells);
        report.crossovers.extend(if several {
            of_one(*dtype, &prediction.crossovers)
        } else {
            prediction.crossovers
        });
        report.warnings.extend(prediction.warnings);
    }
    Ok(report)
}

fn predicted(
    model: &OpenModel,
    question: &Question,
    weights: Dtype,
) -> Result<(Prediction, Option<GroupSummary>), PredictError> {
    let weights = model.storage(Some(weights))?;
    let request = Request {
        architecture: &model.architecture,
        inventory: &model.inventory(weights),
        name: &model.name,
        weights,
        kv: question.kv_dtype.unwrap_or_else(|| model.architecture.cache_of(weights)),
        device: &question.device,
        batches: &question.batches,
        contexts: &question.contexts,
        phases: &question.phases,
        routing: question.routing,
    };
    let Some(group) = question.group else { return Ok((predict(&request), None)) };
    let refused =
        |problem| PredictError::Group { model: model.name.clone(), group, problem: Box::new(problem) };
    let (prediction, placed) = predict_group(&request, group).map_err(refused)?;
    Ok((prediction, Some(placed)))
}

/// The crossovers of one dtype among several: labelled, and of each kind the first and the last.
fn of_one(dtype: Dtype, all: &[Crossover]) -> Vec<Crossover> {
    let kind = |row: &Crossover| row.what;
    let edge = |at: usize| {
        let same = |other: &Crossover| kind(other) == kind(&all[at]);
        !all[..at].iter().any(same) || !all[at + 1..].iter().any(same)
    };
    let label =
        |row: &Crossover| Crossover { explanation: format!("{dtype}: {}", row.explanation), ..row.clone() };
    (0..all.len()).filter(|&at| edge(at)).map(|at| label(&all[at])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use hbmark_core::ledger::devices;

    use hbmark_core::result::Status;
    use hbmark_core::units::Bytes;

    fn question(dtypes: &[Dtype]) -> Question {
        Question {
            device: devices::find("h100-sxm").unwrap().clone(),
            dtypes: dtypes.to_vec(),
            kv_dtype: None,
            phases: vec![Phase::Decode],
            batches: vec![1],
            contexts: vec![64],
            routing: ExpertRouting::Uniform,
            group: None,
        }
    }

    #[test]
    fn a_gguf_file_is_predicted_by_its_own_blocks_with_its_cache_in_bf16() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/models/llama-q8_0.gguf");
        let opened = crate::weights::open_shape(path, None).unwrap();
        let told = report(&opened, &question(&[Dtype::Gguf]), "predict").unwrap();
        let cell = &told.cells[0];
        assert_eq!((cell.dtype, cell.kv_dtype, cell.status), (Dtype::Gguf, Dtype::Bf16, Status::Predicted));
        assert_eq!(told.model.weight_bytes, opened.inventory(Dtype::Gguf).total_bytes());
        let stood_for = opened.architecture.inventory(Dtype::Q8_0);
        assert_ne!(
            told.model.hash,
            hbmark_core::model::model_hash(&opened.architecture, &stood_for),
            "the file's tensors"
        );
        assert!(cell.bytes.weights > Bytes(0) && cell.bytes.weights < told.model.weight_bytes);
    }

    #[test]
    fn crossovers_of_several_dtypes_are_labelled_and_few() {
        let opened = crate::weights::open_shape("Llama-3.1-8B", None).unwrap();
        let dtypes = [Dtype::Bf16, Dtype::Fp8, Dtype::Int4];
        let question =
            Question { batches: vec![1, 4, 16, 64], contexts: vec![512, 2048, 8192], ..question(&dtypes) };
        let told = report(&opened, &question, "predict").unwrap();
        assert!(told.crossovers.len() <= dtypes.len() * 11, "{}", told.crossovers.len());
        for row in &told.crossovers {
            assert!(dtypes.iter().any(|dtype| row.explanation.starts_with(&format!("{dtype}: "))), "{row:?}");
        }
    }

    #[test]
    fn a_shape_without_a_file_has_no_gguf_formats() {
        let opened = crate::weights::open_shape("Llama-3.1-8B", None).unwrap();
        let error = report(&opened, &question(&[Dtype::Bf16, Dtype::Gguf]), "predict").unwrap_err();
        assert!(error.to_string().starts_with("Llama-3.1-8B is not a GGUF file"), "{error}");
    }
}
