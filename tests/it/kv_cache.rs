//! A KV cache in one byte an element: its outputs, its bytes, and who has none.

use hbmark::engine::relative_error;
use hbmark::engine::{self, DeviceChoice, DeviceOptions, SequenceId, Session, StepBatch};
use hbmark::weights::OpenModel;
use hbmark_core::ledger::{Ledger, StepShape};
use hbmark_core::model::Dtype;

use crate::models::{opened, session, threads};
use crate::native::in_steps;
use crate::runs::{fixture, hbmark, refused, report};

/// Largest difference from the logits of an f32 cache: an element is off by a sixteenth, or by a 254th of the largest of its vector.
const TOLERANCES: [(Dtype, f64); 2] = [(Dtype::Fp8, 0.1), (Dtype::Int8, 0.04)];

fn open(model: &OpenModel, dtype: Dtype, kv_dtype: Option<Dtype>) -> Box<dyn Session> {
    session("native", model, dtype, DeviceOptions { kv_dtype, ..threads(2) })
}

#[test]
fn logits_are_near_those_of_an_f32_cache_however_a_prompt_is_cut() {
    let tokens: Vec<u32> = (0..50).map(|i| (i * 7 + 3) % 180).collect();
    for name in ["llama-llama3-rope", "qwen3-tied", "gemma2", "gpt-oss", "minimax-m2"] {
        let model = opened(&fixture(name));
        let plain = in_steps(open(&model, Dtype::F32, None).as_mut(), 0, &tokens, &[50]);
        for (kv_dtype, tolerance) in TOLERANCES {
            let mut session = open(&model, Dtype::F32, Some(kv_dtype));
            assert_eq!(session.kv_dtype(), kv_dtype);
            let whole = in_steps(session.as_mut(), 0, &tokens, &[50]);
            let error = relative_error(&whole, &plain);
            assert!(error > 1e-6 && error <= tolerance, "{name}, {kv_dtype}: {error:.1e}");
            assert_eq!(whole, in_steps(session.as_mut(), 0, &tokens, &[17, 32, 1]), "{name}, {kv_dtype}");
        }
    }
}

/// Of a step that ends in a whole block, so that no tile is read in part, what 64 positions more of each sequence add.
#[test]
fn bytes_of_the_cache_are_those_of_the_ledger() {
    let model = opened(&fixture("llama-gqa"));
    for kv_dtype in [Dtype::F32, Dtype::Bf16, Dtype::Fp8, Dtype::Int8] {
        let mut session = open(&model, Dtype::Bf16, Some(kv_dtype));
        let ledger = Ledger::new(session.architecture(), session.inventory(), kv_dtype);
        for batch in [1, 3] {
            let mut bytes = |depth: usize| {
                for sequence in 0..batch as u64 {
                    session.synthetic_kv().unwrap().fill_kv(SequenceId(sequence), depth, 1).unwrap();
                }
                session.step(&StepBatch::uniform(SequenceId(0), &vec![vec![5]; batch], depth)).unwrap();
                (0..batch as u64).for_each(|sequence| session.release(SequenceId(sequence)));
                let ideal = ledger.step(StepShape::decode(batch, depth)).bytes.ideal();
                (session.bytes_moved().unwrap().0, ideal.0)
            };
            let (short, long) = (bytes(63), bytes(127));
            assert_eq!(long.0 - short.0, long.1 - short.1, "{kv_dtype}, batch {batch}");
        }
    }
}

#[test]
fn caches_that_an_engine_has_not_are_refused_with_those_it_has() {
    let llama = opened(&fixture("llama-llama3-rope"));
    let latent = opened(&fixture("deepseek-v3"));
    let cuda = DeviceChoice::Cuda(0);
    for (engine, model, dtype, device, asked, said) in [
        ("stock", &llama, Dtype::F32, DeviceChoice::Cpu, Dtype::Fp8, "candle keeps it in f32"),
        ("native", &llama, Dtype::F32, DeviceChoice::Cpu, Dtype::Q8_0, "f32, f16, bf16, fp8 or int8"),
        ("native", &latent, Dtype::Bf16, DeviceChoice::Cpu, Dtype::Fp8, "latents in a fp8 KV cache"),
        ("native", &llama, Dtype::Bf16, cuda, Dtype::F32, "bf16, fp8 or int8"),
    ] {
        let error = engine::check_kv_dtype(engine, model, dtype, device, Some(asked)).unwrap_err();
        assert!(error.to_string().contains(said), "{engine}, {asked}: {error}");
    }
    for (engine, dtype, device, asked) in [
        ("stock", Dtype::F32, DeviceChoice::Cpu, Dtype::F32),
        ("native", Dtype::F32, DeviceChoice::Cpu, Dtype::Bf16),
        ("native", Dtype::Int4, cuda, Dtype::Int8),
    ] {
        engine::check_kv_dtype(engine, &llama, dtype, device, Some(asked)).unwrap();
    }
}

#[test]
fn a_run_measures_the_engine_that_has_the_cache_and_skips_the_other() {
    let folder = fixture("llama-llama3-rope");
    let run = |engines: &str, kv_dtype: &str| {
        let mut command = hbmark();
        command.args(["run", "--smoke", "--device", "cpu", "--threads", "1", "--format", "json"]);
        command.args(["--batch", "1", "--context", "16", "--kv-dtype", kv_dtype, "--engine", engines]);
        command.arg("--model").arg(&folder).output().unwrap()
    };
    let output = run("stock,native", "int8");
    let report = report(&output);
    for cell in report["cells"].as_array().unwrap() {
        let native = cell["engine"] == "native";
        assert_eq!(cell["status"], if native { "smoke" } else { "skipped" }, "{cell}");
        assert_eq!(cell["kv_dtype"], "int8");
    }
    for (engines, kv_dtype, said) in [("stock", "fp8", "candle keeps it in f32"), ("native", "int4", "int4")]
    {
        refused(&run(engines, kv_dtype), &[said]);
    }
}
