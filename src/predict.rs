//! `hbmark predict` as data: the roofline of a model on a GPU of the table, as a report without measurements.
//!
//! Enters: an opened model (only its dimensions are used) and a question. Leaves: a [`Report`] with the same cells as a run.

use crate::measure::environment::{BuildEnvironment, Environment};
use crate::model::{Dtype, OpenModel};
use crate::report::{Phase, Report, ReportKind, SCHEMA_VERSION};
use crate::roofline::{DeviceSpec, Request, predict};

/// What to predict.
#[derive(Debug, Clone)]
pub struct Question {
    pub device: DeviceSpec,
    pub dtypes: Vec<Dtype>,
    pub kv_dtype: Option<Dtype>,
    pub phases: Vec<Phase>,
    pub batches: Vec<usize>,
    pub contexts: Vec<usize>,
}

/// Predicts every cell of the question.
///
/// # Panics
/// Never: a question has at least one dtype.
#[must_use]
pub fn report(model: &OpenModel, question: &Question, command: &str) -> Report {
    let predictions: Vec<_> = question
        .dtypes
        .iter()
        .map(|&weights| {
            predict(&Request {
                architecture: &model.architecture,
                name: &model.name,
                weights,
                kv: question.kv_dtype.unwrap_or_else(|| model.kv_dtype(weights)),
                device: &question.device,
                batches: &question.batches,
                contexts: &question.contexts,
                phases: &question.phases,
            })
        })
        .collect();
    let first = predictions.first().expect("a question has at least one dtype");
    let mut report = Report {
        schema_version: SCHEMA_VERSION,
        kind: ReportKind::Predict,
        command: command.to_owned(),
        started_at: None,
        note: None,
        hypothesis: None,
        // A prediction says nothing of the machine it was computed on.
        environment: Environment { build: BuildEnvironment::of_this_binary(), ..Environment::default() },
        config: std::collections::BTreeMap::new(),
        model: first.model.clone(),
        capabilities: Vec::new(),
        protocol: None,
        ceilings: None,
        datasheet: Some(question.device.clone()),
        cells: Vec::new(),
        cold: Vec::new(),
        ladders: Vec::new(),
        fits: Vec::new(),
        crossovers: Vec::new(),
        warnings: Vec::new(),
    };
    for prediction in predictions {
        report.cells.extend(prediction.cells);
        report.crossovers.extend(prediction.crossovers);
        report.warnings.extend(prediction.warnings);
    }
    report
}
