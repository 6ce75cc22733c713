//! Models of the fixtures in sessions on the CPU.

use std::path::{Path, PathBuf};

use hbmark::engine::{self, DeviceChoice, DeviceOptions, SequenceId, Session, StepBatch};
use hbmark::weights::{self, OpenModel};
use hbmark_core::model::Dtype;

/// The folder of all models.
pub fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models")
}

pub fn opened(path: &Path) -> OpenModel {
    weights::open(path.to_str().unwrap(), None, 0).unwrap()
}

/// Options of so many threads.
pub fn threads(count: usize) -> DeviceOptions {
    DeviceOptions { threads: Some(count), ..DeviceOptions::default() }
}

pub fn session(engine: &str, model: &OpenModel, dtype: Dtype, options: DeviceOptions) -> Box<dyn Session> {
    engine::open(engine, model, dtype, DeviceChoice::Cpu, options, &mut |_, _| {}).unwrap()
}

/// The model at a path in a session with all threads.
pub fn open(engine: &str, path: &Path, dtype: Dtype) -> Box<dyn Session> {
    session(engine, &opened(path), dtype, DeviceOptions::default())
}

/// The logits behind these tokens of one sequence.
pub fn logits_of(session: &mut dyn Session, sequence: u64, tokens: &[u32], start: usize) -> Vec<f32> {
    session.step(&StepBatch::uniform(SequenceId(sequence), &[tokens.to_vec()], start)).unwrap();
    session.logits().unwrap().swap_remove(0)
}
