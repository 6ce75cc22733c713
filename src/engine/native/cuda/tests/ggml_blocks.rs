//! ggml's blocks on the emulated device: products against the oracle, and files that mix formats against the CPU.

use super::super::emulator::{Emulated, SMALL};
use super::super::kernels::Tuning;
use super::super::operations::CudaOperations;
use super::engine::{ROUNDED_TOLERANCE, assert_equal, assert_equal_scripted, fixtures, on_cpu, tokens};
use super::operations::{OUTPUTS, emulated, every_operation_equals, noise, projection, projection_by};
use crate::engine::native::cpu::CpuOperations;
use crate::engine::native::operations::Operations;
use crate::engine::native::oracle::Oracle;
use crate::engine::native::testing::sample::Sample;
use crate::engine::native::testing::worst;
use crate::engine::native::{NativeSession, check_device, kv_dtype};
use crate::engine::{DeviceChoice, SequenceId, Session, StepBatch};
use crate::weights::stored_matrix::{SUPER_BLOCK, SuperBlock};
use crate::weights::{OpenModel, Packing, StoredMatrix, StoredTensor};
use hbmark_core::ledger::{Ledger, StepShape};
use hbmark_core::model::{Dtype, parse_config};

const FORMATS: [Dtype; 5] = [Dtype::Q8_0, Dtype::Q4_0, Dtype::Q4K, Dtype::Q5K, Dtype::Q6K];

#[test]
fn products_equal_the_oracle_at_every_width_and_number_of_rows() {
    for dtype in FORMATS {
        let block = if matches!(dtype, Dtype::Q8_0 | Dtype::Q4_0) { 1 } else { SUPER_BLOCK };
        // One block, an odd number of them, more than shared memory has at a time; parts of a block where the format pads.
        for columns in [SUPER_BLOCK, 700_usize.next_multiple_of(block), 4_500_usize.next_multiple_of(block)] {
            for rows in [1, 2, 3, 4, 5, 9] {
                let found = projection(&mut emulated(7, SMALL), dtype, rows, columns);
                let error = worst(&found, &projection(&mut Oracle::new(), dtype, rows, columns));
                assert!(error <= 1e-5, "{rows} rows of {columns} in {dtype}: {error:.1e}");
            }
        }
    }
}

#[test]
fn products_of_the_library_are_of_weights_and_inputs_in_bf16() {
    let by_library = Tuning { min_tiled_rows: 1, min_widened_rows: 1, ..SMALL };
    for (packing, dtype) in [
        (Packing::Q8_0, Dtype::Q8_0),
        (Packing::Q4_0, Dtype::Q4_0),
        (Packing::Super(SuperBlock::Q4K), Dtype::Q4K),
        (Packing::Super(SuperBlock::Q5K), Dtype::Q5K),
        (Packing::Super(SuperBlock::Q6K), Dtype::Q6K),
    ] {
        let columns = 3 * SUPER_BLOCK;
        let matrix = StoredMatrix::from_f32_rows(OUTPUTS, columns, &noise(0, OUTPUTS * columns), packing);
        let widened = StoredMatrix::quantize(&matrix, Packing::Bf16);
        for rows in [1, 5, 40] {
            let found = projection_by(&mut emulated(7, by_library), dtype, &matrix, rows);
            let wanted = projection_by(&mut Oracle::new(), Dtype::Bf16, &widened, rows);
            let error = worst(&found, &wanted);
            assert!(error <= 1e-5, "{rows} rows of {dtype}: {error:.1e}");
        }
    }
}

#[test]
fn every_operation_equals_the_oracle() {
    let runs =
        |sample: &Sample| check_device(&sample.architecture, sample.dtype, DeviceChoice::Cuda(0)).is_ok();
    let first = |draw: fn(Dtype, u64) -> Sample, dtype, from: u64| {
        (from..from + 100).map(|seed| draw(dtype, seed).with_cache(seed)).find(runs)
    };
    // Formats differ in their products alone: each operation once with each, and experts with two.
    let dense = (0..).zip(FORMATS).filter_map(|(nth, dtype)| first(Sample::of_dtype, dtype, 5 * nth));
    let with_experts = |dtype, seed| Sample::mixture(Some(dtype), seed);
    let mixtures = [Dtype::Q8_0, Dtype::Q4K].into_iter().filter_map(|dtype| first(with_experts, dtype, 0));
    let samples: Vec<Sample> = dense.chain(mixtures).collect();
    assert_eq!(samples.len(), FORMATS.len() + 2);
    every_operation_equals(samples);
}

/// As llama.cpp mixes formats: matrices of 256 outputs, which are K, V and what is added to hidden states, in q6_k among others in q4_k.
fn mixed(tensor: StoredTensor) -> StoredTensor {
    match tensor {
        StoredTensor::Matrix(matrix) if matrix.rows == SUPER_BLOCK => {
            StoredTensor::Matrix(StoredMatrix::quantize(&matrix, Packing::Super(SuperBlock::Q6K)))
        }
        other => other,
    }
}

/// A synthetic model in whole blocks, with 256 outputs of K and of V, and more of Q, gate and up.
fn in_blocks(hidden: usize, keys: &str) -> OpenModel {
    let config = format!(
        r#"{{"hidden_size": {hidden}, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
            "intermediate_size": 512, "vocab_size": 300, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0, "tie_word_embeddings": false, {keys}}}"#
    );
    let architecture = parse_config(&config, std::path::Path::new("config.json")).unwrap();
    OpenModel::synthetic("in blocks", architecture, 11)
}

fn session<O: Operations>(operations: O, model: &OpenModel) -> NativeSession<O> {
    let dtypes = (Dtype::Q4K, kv_dtype(Dtype::Q4K));
    NativeSession::assemble(operations, model, dtypes, 16, mixed, &mut |_| {}).unwrap()
}

/// Plain, with norms of heads, with biases of Q, K and V.
const DENSE: [&str; 3] = [r#""model_type": "llama""#, r#""model_type": "qwen3""#, r#""model_type": "qwen2""#];
const MIXTURE: &str = r#""model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 512, "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": []"#;

#[test]
fn formats_within_a_layer_are_mixed_as_on_the_cpu() {
    // Streamed, and by the library from 9 rows on: prompts, and no decodes.
    for (keys, min_widened_rows) in
        [(DENSE[0], usize::MAX), (DENSE[1], usize::MAX), (DENSE[0], 9), (DENSE[2], 9)]
    {
        let model = in_blocks(SUPER_BLOCK, keys);
        let tuning = Tuning { min_widened_rows, ..SMALL };
        let mut found = session(CudaOperations::with_tuning(Emulated::new(3), tuning), &model);
        let mut wanted = session(CpuOperations::new(1).unwrap(), &model);
        assert_equal(&mut found, &mut wanted, &[tokens(18, 1), tokens(3, 2)], 3, ROUNDED_TOLERANCE);
    }
    let model = in_blocks(SUPER_BLOCK, MIXTURE);
    let mut found = session(CudaOperations::with_tuning(Emulated::new(4), SMALL), &model);
    let mut wanted = session(CpuOperations::new(1).unwrap(), &model);
    assert_equal_scripted(&mut found, &mut wanted, tokens(18, 1));
}

#[test]
fn files_generate_what_they_do_on_the_cpu() {
    for (seed, name) in [(1, "llama-q8_0.gguf"), (2, "qwen3-q8_0.gguf")] {
        let model = crate::weights::open(fixtures().join(name).to_str().unwrap(), None, 0).unwrap();
        let mut found =
            NativeSession::load(emulated(seed, SMALL), &model, Dtype::Gguf, 16, &mut |_| {}).unwrap();
        let mut wanted = on_cpu(&model, Dtype::Gguf);
        assert_equal(&mut found, &mut wanted, &[tokens(21, 3)], 4, ROUNDED_TOLERANCE);
    }
}

#[test]
fn a_step_moves_the_bytes_of_the_ledger() {
    for dtype in FORMATS {
        // An even number of blocks in each row: none is padded.
        let model = in_blocks(2 * SUPER_BLOCK, DENSE[0]);
        let mut session = NativeSession::load(emulated(5, SMALL), &model, dtype, 16, &mut |_| {}).unwrap();
        session.step(&StepBatch::uniform(SequenceId(0), &[tokens(20, 1)], 0)).unwrap();
        session.step(&StepBatch::uniform(SequenceId(0), &[vec![5]], 20)).unwrap();
        let ledger = Ledger::new(session.architecture(), session.inventory(), session.kv_dtype());
        let moved = session.bytes_moved().unwrap().as_f64();
        let wanted = ledger.step(StepShape::decode(1, 20)).bytes.ideal().as_f64();
        assert!((moved / wanted - 1.0).abs() < 5e-3, "{dtype}: {moved} B moved, {wanted} B in the ledger");
    }
}
