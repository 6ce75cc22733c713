//! The native engine gives what Hugging Face transformers and the stock engine give, however a step is cut.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::path::{Path, PathBuf};

use hbmark::engine::{self, DeviceChoice, DeviceOptions, SequenceId, Session, StepBatch};
use hbmark::measure::quality::relative_error;
use hbmark::model::{self, Dtype};
use serde::Deserialize;

/// f32 against f32: only the order of sums differs.
const F32_TOLERANCE: f64 = 1e-4;

#[derive(Deserialize)]
struct Reference {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    tokens: Vec<u32>,
    logits: Vec<f32>,
    greedy: Vec<u32>,
}

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models")
}

fn open(path: &Path, dtype: Dtype) -> Box<dyn Session> {
    let model = model::open(path.to_str().unwrap(), None, 0).unwrap();
    engine::open("native", &model, dtype, DeviceChoice::Cpu, DeviceOptions::default(), &mut |_, _| {})
        .unwrap()
}

#[test]
fn every_fixture_model_equals_transformers() {
    let mut folders = 0;
    for entry in std::fs::read_dir(fixtures()).unwrap() {
        let folder = entry.unwrap().path();
        if !folder.is_dir() {
            continue;
        }
        let reference: Reference =
            serde_json::from_str(&std::fs::read_to_string(folder.join("reference.json")).unwrap()).unwrap();
        let mut session = open(&folder, Dtype::F32);
        for case in &reference.cases {
            let sequence = SequenceId(case.tokens.len() as u64);
            session.step(&StepBatch::uniform(sequence, std::slice::from_ref(&case.tokens), 0)).unwrap();
            let error = relative_error(&session.logits().unwrap()[0], &case.logits);
            assert!(
                error <= F32_TOLERANCE,
                "{}: {} tokens: {error:.1e} off",
                folder.display(),
                case.tokens.len()
            );
            let mut generated = vec![session.next_tokens().unwrap()[0]];
            while generated.len() < case.greedy.len() {
                let position = case.tokens.len() + generated.len() - 1;
                let last = generated[generated.len() - 1];
                session.step(&StepBatch::uniform(sequence, &[vec![last]], position)).unwrap();
                generated.push(session.next_tokens().unwrap()[0]);
            }
            assert_eq!(generated, case.greedy, "{}", folder.display());
        }
        folders += 1;
    }
    assert_eq!(folders, 13);
}
