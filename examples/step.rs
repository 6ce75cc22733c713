//! The engine interface by itself: open an engine, prefill a prompt, decode greedily, and time a step.
//!
//! `cargo run --release --example step`

use hbmark::engine::{self, DeviceChoice, DeviceOptions, SequenceId, StepBatch};
use hbmark_core::model::Dtype;

#[expect(clippy::print_stdout, reason = "an example prints")]
fn main() -> anyhow::Result<()> {
    let model = hbmark::weights::open("SmolLM2-135M", None, 42)?;
    let options = DeviceOptions::default();
    let mut session =
        engine::open("native", &model, Dtype::Bf16, DeviceChoice::Cpu, options, &mut |_, _| {})?;

    let prompt: Vec<u32> = (1..=16).collect();
    session.step(&StepBatch::uniform(SequenceId(0), std::slice::from_ref(&prompt), 0))?;
    let mut token = session.greedy_tokens()?[0];
    for position in prompt.len()..prompt.len() + 8 {
        let batch = StepBatch::uniform(SequenceId(0), &[vec![token]], position);
        session.timeline().mark()?;
        session.step(&batch)?;
        session.timeline().mark()?;
        token = session.greedy_tokens()?[0];
        let marks = session.timeline().drain()?;
        println!("position {position}: token {token} in {}", marks[1]);
    }
    Ok(())
}
