//! Tensor parallel groups of threads: what one device gives, from parts of its weights.

use std::path::PathBuf;

use hbmark::engine::{self, DeviceChoice, SequenceId, Session, StepBatch, relative_error};
use hbmark::measure::quality::tolerance;
use hbmark::weights::OpenModel;
use hbmark_core::ledger::{Ledger, StepShape};
use hbmark_core::model::{Architecture, Dtype, parse_config, presets};

use crate::models::{self, fixtures, opened};
use crate::runs::{self, words};

fn session(
    engine: &str,
    model: &OpenModel,
    dtype: Dtype,
    threads: usize,
) -> Result<Box<dyn Session>, String> {
    let options = models::threads(threads);
    engine::open(engine, model, dtype, DeviceChoice::Cpu, options, &mut |_, _| {})
        .map_err(|error| error.to_string())
}

/// Prompts of several lengths at once, then three decode steps of all of them: logits of each step, and the greedy tokens behind the last.
fn ran(session: &mut dyn Session) -> (Vec<Vec<f32>>, Vec<u32>) {
    let vocabulary = u32::try_from(session.architecture().vocab_size).unwrap();
    let lengths = [1usize, 5, 17];
    let tokens = |count: usize, seed: usize| -> Vec<u32> {
        (0..count).map(|i| u32::try_from(i * 37 + seed * 11 + 3).unwrap() % vocabulary).collect()
    };
    let mut batch = StepBatch::default();
    for (sequence, length) in lengths.into_iter().enumerate() {
        let id = SequenceId(sequence as u64);
        batch.sequences.extend(StepBatch::uniform(id, &[tokens(length, sequence)], 0).sequences);
    }
    session.step(&batch).unwrap();
    let mut logits = session.logits().unwrap();
    for step in 0..3 {
        for (index, sequence) in batch.sequences.iter_mut().enumerate() {
            (sequence.tokens, sequence.start_position) = (tokens(1, 5 + index + step), lengths[index] + step);
        }
        session.step(&batch).unwrap();
        logits.extend(session.logits().unwrap());
    }
    (logits, session.greedy_tokens().unwrap())
}

/// The largest relative error of any row.
fn worst(found: &[Vec<f32>], wanted: &[Vec<f32>]) -> f64 {
    assert_eq!(found.len(), wanted.len());
    let errors = found.iter().zip(wanted).map(|(found, wanted)| relative_error(found, wanted));
    errors.fold(0.0, f64::max)
}

#[test]
fn every_model_that_can_be_split_gives_what_one_device_gives() {
    let mut split = Vec::new();
    let mut refused = Vec::new();
    let mut names: Vec<String> = std::fs::read_dir(fixtures())
        .unwrap()
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.path().is_dir())
        .map(|entry| entry.file_name().into_string().unwrap())
        .collect();
    names.sort();
    for name in names {
        let model = opened(&fixtures().join(&name));
        let mut ranks = match session("native-tp2", &model, Dtype::F32, 2) {
            Ok(session) => session,
            Err(error) => {
                assert!(error.contains("tensor parallel"), "{name}: {error}");
                println!("{name}: {error}");
                refused.push(name);
                continue;
            }
        };
        let (wanted, greedy) = ran(session("native", &model, Dtype::F32, 2).unwrap().as_mut());
        let (found, tokens) = ran(ranks.as_mut());
        let error = worst(&found, &wanted);
        assert!(error <= 2e-5, "{name}: {error:.1e}");
        assert_eq!(tokens, greedy, "{name}");
        assert_eq!(ranks.capabilities().engine, "native-tp2");
        split.push(name);
    }
    let rest = ["llama-sharded", "minimax-m2", "olmo2", "qwen2"];
    assert_eq!(refused, rest, "norms over all heads, and three heads");
    assert!(split.len() >= 20, "{split:?}");
    for kind in [
        "llama-tied",
        "qwen2-tied",
        "qwen3-moe",
        "qwen2-moe",
        "mixtral",
        "deepseek-v3",
        "glm4-moe",
        "granite",
        "gemma2",
        "gemma3",
        "glm4",
        "gpt-oss",
        "phi3-longrope",
    ] {
        assert!(split.iter().any(|name| name == kind), "{kind}: {split:?}");
    }
}

#[test]
fn checkpoints_that_are_quantised_are_split_as_they_are_stored() {
    let quantised = fixtures().join("../quantised");
    let mut paths: Vec<PathBuf> =
        std::fs::read_dir(quantised).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.extend(["llama-q8_0.gguf", "qwen3-q8_0.gguf"].map(|file| fixtures().join(file)));
    paths.sort();
    let mut split = Vec::new();
    for path in paths {
        let model = opened(&path);
        let dtype = model.stored_dtype();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        match session("native-tp2", &model, dtype, 2) {
            Ok(mut ranks) => {
                let (wanted, _) = ran(session("native", &model, dtype, 2).unwrap().as_mut());
                let (found, _) = ran(ranks.as_mut());
                let error = worst(&found, &wanted);
                assert!(error <= tolerance(dtype), "{name}, {dtype}: {error:.1e}");
                split.push(name);
            }
            // These models are too small: their matrices have one or three groups of inputs.
            Err(error) => assert!(
                ["blocks", "share a scale", "GGUF", "would have none"].iter().any(|why| error.contains(why)),
                "{name}: {error}"
            ),
        }
    }
    assert_eq!(split, ["llama-fp8-channel", "llama-fp8-tensor", "llama-int8-channel", "llama-nvfp4"]);
}

#[test]
fn experts_that_are_stored_as_one_are_dealt_out_in_unequal_parts() {
    let path = fixtures().join("../quantised/gpt-oss-mxfp4/config.json");
    let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    // Three blocks of 32 channels: two ranks have two and one of them.
    config["intermediate_size"] = 96.into();
    let shape = parse_config(&config.to_string(), &path).unwrap();
    let model = OpenModel::synthetic("oss", shape, 5);
    let (wanted, _) = ran(session("native", &model, Dtype::Mxfp4, 2).unwrap().as_mut());
    let (found, _) = ran(session("native-tp2", &model, Dtype::Mxfp4, 2).unwrap().as_mut());
    let error = worst(&found, &wanted);
    assert!(error <= tolerance(Dtype::Mxfp4), "{error:.1e}");
}

/// Widths that eight ranks can share in whole groups of 32 columns.
fn wide(kv_heads: usize) -> OpenModel {
    let small = presets::find("SmolLM2-135M").unwrap().architecture;
    let shape = Architecture {
        hidden_size: 512,
        layers: 2,
        heads: 16,
        kv_heads,
        head_dim: 32,
        ffn_size: 1024,
        vocab_size: 1003,
        ..small
    };
    OpenModel::synthetic("wide", shape, 3)
}

#[test]
fn weights_of_every_format_are_split_without_a_group_being_cut() {
    let model = wide(8);
    for dtype in [Dtype::F16, Dtype::Bf16, Dtype::Int8, Dtype::Fp8, Dtype::Q8_0, Dtype::Q4_0, Dtype::Mxfp4] {
        let (wanted, _) = ran(session("native", &model, dtype, 2).unwrap().as_mut());
        for ranks in [2, 8] {
            let (found, _) =
                ran(session(&format!("native-tp{ranks}"), &model, dtype, ranks).unwrap().as_mut());
            let error = worst(&found, &wanted);
            assert!(error <= tolerance(dtype), "{dtype}, {ranks}: {error:.1e}");
        }
    }
    let error = session("native-tp8", &model, Dtype::Q4K, 8).err().unwrap();
    assert!(error.contains("2 blocks of quantised weights cannot be shared by 8"), "{error}");
}

#[test]
fn fewer_heads_of_k_and_v_than_ranks_are_on_several_of_them() {
    let model = wide(2);
    let (wanted, greedy) = ran(session("native", &model, Dtype::F32, 2).unwrap().as_mut());
    let (found, tokens) = ran(session("native-tp4", &model, Dtype::F32, 4).unwrap().as_mut());
    assert!(worst(&found, &wanted) <= 2e-5);
    assert_eq!(tokens, greedy);
}

#[test]
fn ranks_move_the_bytes_of_the_ledger_together() {
    let model = wide(8);
    for dtype in [Dtype::Bf16, Dtype::Q8_0] {
        for engine in ["native", "native-tp2", "native-tp4"] {
            let mut session = session(engine, &model, dtype, 4).unwrap();
            session.synthetic_kv().unwrap().fill_kv(SequenceId(0), 300, 1).unwrap();
            session.step(&StepBatch::uniform(SequenceId(0), &[vec![7]], 300)).unwrap();
            let counted = session.bytes_moved().unwrap().as_f64();
            let ledger = Ledger::new(session.architecture(), session.inventory(), session.kv_dtype());
            let ideal = ledger.step(StepShape::decode(1, 300)).bytes.ideal().as_f64();
            // Norms are on every rank.
            assert!((counted / ideal - 1.0).abs() <= 1e-2, "{engine}, {dtype}: {counted} of {ideal}");
        }
    }
}

#[test]
fn a_profile_has_the_sums_of_ranks() {
    let model = wide(8);
    let mut session = session("native-tp2", &model, Dtype::F32, 2).unwrap();
    let profile =
        session.profiler().unwrap().profile(&StepBatch::uniform(SequenceId(0), &[vec![7]], 0)).unwrap();
    let calls = |name: &str| profile.iter().find(|row| row.operation == name).map(|row| row.calls);
    assert_eq!([calls("all_reduce"), calls("output"), calls("down")], [Some(4), Some(2), Some(2)]);
}

#[test]
fn groups_that_no_model_or_machine_has_are_refused_with_what_there_is() {
    let model = wide(8);
    let error = session("native-tp3", &model, Dtype::F32, 4).err().unwrap();
    assert!(
        error.contains("16 attention heads cannot be shared by 3") && error.contains("2, 4, 8"),
        "{error}"
    );
    let error = session("native-tp8", &model, Dtype::F32, 2).err().unwrap();
    assert!(error.contains("on 2 threads"), "{error}");
    let on_gpus = |ranks: &str| {
        let engine = format!("native-tp{ranks}");
        engine::capabilities(&engine, &model, Dtype::F32, DeviceChoice::Cuda(0))
            .map_err(|error| error.to_string())
    };
    assert!(on_gpus("2").unwrap().graphs);
    assert!(on_gpus("3").unwrap_err().contains("16 attention heads cannot be shared by 3"));
    // What a step cannot do is not a fault of a rank: the next one runs.
    let mut session = session("native-tp2", &model, Dtype::F32, 2).unwrap();
    assert!(session.step(&StepBatch::default()).is_err());
    assert!(session.step(&StepBatch::uniform(SequenceId(0), &[vec![5000]], 0)).is_err());
    session.step(&StepBatch::uniform(SequenceId(0), &[vec![5]], 0)).unwrap();
}

#[test]
fn a_run_has_a_series_for_each_size_and_says_which_cannot_be() {
    let model = fixtures().join("llama-gqa");
    let run = |sizes: &str| {
        let mut command = runs::hbmark();
        command.args(words("run --smoke --engine native --dtype f32 --phase prefill,decode --batch 1,2"));
        command.args(words("--context 8 --threads 2 --format json"));
        command.args(["--tensor-parallel-size", sizes, "--model"]);
        command.arg(&model).output().unwrap()
    };
    let report = runs::report(&run("1,2"));
    let found: Vec<(String, String)> =
        runs::statuses(&report).into_iter().map(|(cell, status, _)| (cell, status)).collect();
    let cell = |phase: &str, engine: &str, batch: usize| {
        (format!("{phase}/{engine}/f32/b{batch}/c8"), "smoke".to_owned())
    };
    for engine in ["native", "native-tp2"] {
        for phase in ["prefill", "decode"] {
            assert!([1, 2].iter().all(|batch| found.contains(&cell(phase, engine, *batch))), "{found:?}");
        }
    }
    runs::refused(&run("0"), &["--tensor-parallel-size"]);
    runs::refused(&run("65"), &["--tensor-parallel-size `65`", "64 ranks"]);
    let said = runs::stderr(&run("3"));
    assert!(said.contains("cannot be shared by 3"), "{said}");
}
