//! Whole models in sessions: against the stock engine, greedily over 128 steps, and their bytes against the ledger.

use std::path::Path;

use super::{Kind, Make, THREADS};
use crate::engine::native::operations::Operations;
use crate::engine::native::oracle::Oracle;
use crate::engine::native::testing::sample::in_blocks_of_256;
use crate::engine::native::{DEFAULT_BLOCK_SIZE, NAME, NativeSession};
use crate::engine::relative_error;
use crate::engine::{self, DeviceChoice, DeviceOptions, EngineError, SequenceId, Session, StepBatch};
use crate::measure::quality::{self, tolerance};
use crate::run::verify::outputs::{FAMILIES, small_model};
use crate::run::verify::{Check, Record};
use crate::weights::OpenModel;
use hbmark_core::ledger::{Ledger, StepShape};
use hbmark_core::model::{Architecture, Dtype, parse_config};
use hbmark_core::units::Bytes;

#[cfg(any(test, feature = "cuda"))]
use crate::engine::native::cpu::CpuOperations;

pub const OUTPUTS: &str = "native outputs";
pub const BYTES: &str = "native bytes";

/// Seed of weights and prompts.
const SEED: u64 = 7;
const PROMPT: [u32; 9] = [3, 141, 59, 26, 53, 58, 97, 93, 23];
/// As far as the bytes of a decode may lie from the ideal ledger: panels are padded, and a tile of the cache is read whole.
const LEDGER_SHARE: f64 = 0.01;
/// Wide enough for the padding of panels to be small, and multiples of nothing where a model may be.
const COUNTED: &str = r#"{"model_type":"llama","hidden_size":576,"num_hidden_layers":2,"num_attention_heads":9,
    "num_key_value_heads":3,"head_dim":64,"intermediate_size":1536,"vocab_size":4099,"max_position_embeddings":1024,
    "rms_norm_eps":1e-5,"rope_theta":10000.0,"hidden_act":"silu","tie_word_embeddings":false}"#;

/// Small models with experts, which candle does not run as they are published: config keys on top of the shared ones.
pub const MIXTURES: &[(&str, &str)] = &[
    (
        "qwen3_moe, a dense layer between",
        r#""model_type":"qwen3_moe","num_experts":9,"num_experts_per_tok":3,"moe_intermediate_size":44,
        "norm_topk_prob":true,"mlp_only_layers":[1],"tie_word_embeddings":false"#,
    ),
    (
        "mixtral",
        r#""model_type":"mixtral","num_local_experts":5,"num_experts_per_tok":2,"sliding_window":null,
        "tie_word_embeddings":false"#,
    ),
    (
        "qwen2_moe, a shared expert",
        r#""model_type":"qwen2_moe","num_experts":8,"num_experts_per_tok":4,"moe_intermediate_size":37,
        "shared_expert_intermediate_size":75,"norm_topk_prob":false,"tie_word_embeddings":true"#,
    ),
    (
        "glm4_moe, sigmoids in groups",
        r#""model_type":"glm4_moe","n_routed_experts":12,"num_experts_per_tok":3,"moe_intermediate_size":41,"n_shared_experts":1,
        "n_group":4,"topk_group":2,"first_k_dense_replace":1,"routed_scaling_factor":1.5,"partial_rotary_factor":0.5,
        "attention_bias":true,"use_qk_norm":true,"tie_word_embeddings":false"#,
    ),
    (
        "minimax_m2, corrected sigmoids",
        r#""model_type":"minimax_m2","num_local_experts":7,"num_experts_per_tok":2,"tie_word_embeddings":false"#,
    ),
    (
        "gpt_oss, sinks and clamped gates",
        r#""model_type":"gpt_oss","num_local_experts":6,"num_experts_per_tok":2,"sliding_window":5,"swiglu_limit":0.2,
        "layer_types":["sliding_attention","full_attention","sliding_attention"],"tie_word_embeddings":false"#,
    ),
    (
        "deepseek_v3, latent attention",
        r#""model_type":"deepseek_v3","n_routed_experts":8,"num_experts_per_tok":3,"moe_intermediate_size":41,"n_shared_experts":1,
        "n_group":4,"topk_group":2,"first_k_dense_replace":1,"routed_scaling_factor":1.5,"q_lora_rank":24,"kv_lora_rank":40,
        "qk_nope_head_dim":12,"qk_rope_head_dim":8,"v_head_dim":14,"tie_word_embeddings":false"#,
    ),
];

/// As [`COUNTED`], with experts and a shared one; with its gate the router fills a panel.
pub const COUNTED_EXPERTS: &str = r#"{"model_type":"qwen2_moe","hidden_size":576,"num_hidden_layers":3,"num_attention_heads":9,
    "num_key_value_heads":3,"head_dim":64,"intermediate_size":1536,"vocab_size":4099,"max_position_embeddings":1024,
    "num_experts":15,"num_experts_per_tok":3,"moe_intermediate_size":320,"shared_expert_intermediate_size":640,
    "mlp_only_layers":[1],"rms_norm_eps":1e-5,"rope_theta":10000.0,"hidden_act":"silu","tie_word_embeddings":false}"#;
/// The same with latent attention, whose vectors are whole registers.
pub const COUNTED_LATENTS: &str = r#"{"model_type":"deepseek_v3","hidden_size":576,"num_hidden_layers":3,"num_attention_heads":9,
    "num_key_value_heads":9,"q_lora_rank":192,"kv_lora_rank":192,"qk_nope_head_dim":64,"qk_rope_head_dim":32,"v_head_dim":64,
    "intermediate_size":1536,"vocab_size":4099,"max_position_embeddings":1024,"n_routed_experts":16,"num_experts_per_tok":3,
    "n_group":1,"topk_group":1,"moe_intermediate_size":320,"n_shared_experts":2,"first_k_dense_replace":1,"rms_norm_eps":1e-5,
    "rope_theta":10000.0,"hidden_act":"silu","tie_word_embeddings":false}"#;
/// Sequences of the decodes of both whose bytes are counted.
const COUNTED_BATCHES: [usize; 3] = [1, 3, 16];
/// As far as its bytes may lie from the ledger's for as many experts as it met.
const EXPERTS_SHARE: f64 = 0.005;

fn model_of(architecture: Architecture) -> OpenModel {
    OpenModel::synthetic("small", architecture, SEED)
}

fn load<O: Operations>(
    make: &Make<'_, O>,
    model: &OpenModel,
    dtype: Dtype,
) -> Result<NativeSession<O>, EngineError> {
    NativeSession::load(make(THREADS)?, model, dtype, DEFAULT_BLOCK_SIZE, &mut |_| {})
}

/// Records what a check gave, or why it could not be done.
fn recorded(area: &'static str, name: String, result: Result<(bool, String), EngineError>) -> Check {
    match result {
        Ok((passed, detail)) => Check::new(area, name, passed, detail),
        Err(error) => Check::failed(area, name, error.to_string()),
    }
}

/// Logits of every family in plain floats against stock in f32, of quantised weights against the same dequantised; greedy tokens.
pub fn against_stock<O: Operations>(kind: &Kind, make: &Make<'_, O>, steps: usize, record: &mut Record<'_>) {
    for (index, (family, keys)) in FAMILIES.iter().enumerate() {
        let model = model_of(small_model(keys));
        let (quantised, in_blocks) =
            if index == 0 { (kind.quantised, kind.in_blocks) } else { (&[][..], &[][..]) };
        for &dtype in kind.plain.iter().chain(quantised) {
            record(recorded(OUTPUTS, format!("{family}, {dtype}"), logits(kind, make, &model, dtype)));
        }
        for &dtype in in_blocks {
            let wide = model_of(in_blocks_of_256(small_model(keys)));
            record(recorded(OUTPUTS, format!("{family}, {dtype}"), logits(kind, make, &wide, dtype)));
        }
        record(recorded(OUTPUTS, format!("{family}, greedy f32"), greedy(make, &model, steps)));
    }
}

/// Models with experts: logits and greedy tokens in f32 against the oracle's, and the bytes of decodes against the ledger's for the experts that
/// they met.
pub fn mixtures<O: Operations>(make: &Make<'_, O>, steps: usize, counted: &[Dtype], record: &mut Record<'_>) {
    for (family, keys) in MIXTURES {
        let model = model_of(small_model(keys));
        record(recorded(OUTPUTS, format!("{family}, f32"), as_the_oracle(make, &model)));
        record(recorded(OUTPUTS, format!("{family}, greedy f32"), greedy_as_the_oracle(make, &model, steps)));
    }
    for (what, config) in [("experts", COUNTED_EXPERTS), ("latent attention", COUNTED_LATENTS)] {
        for dtype in counted {
            let name = format!("decodes with {what}, {dtype}");
            record(recorded(BYTES, name, experts_against_the_ledger(make, config, *dtype)));
        }
    }
}

/// Logits, and a decode over a cache against one prefill.
pub fn as_the_oracle<O: Operations>(
    make: &Make<'_, O>,
    model: &OpenModel,
) -> Result<(bool, String), EngineError> {
    let mut session = load(make, model, Dtype::F32)?;
    let mut reference = load(&|_| Ok(Oracle::new()), model, Dtype::F32)?;
    let gate = quality::gate(&mut session, Dtype::F32, SEED, Some(&mut reference))?;
    // The gate has a script pick the experts; here the routers do.
    let prompt = StepBatch::uniform(SequenceId(0), &[PROMPT.to_vec()], 0);
    session.step(&prompt)?;
    reference.step(&prompt)?;
    let own = relative_error(&session.logits()?[0], &reference.logits()?[0]);
    let error = gate.max_relative_error.map_or(f64::INFINITY, |error| error.max(own));
    let bound = tolerance(Dtype::F32);
    let detail = format!("wanted the oracle's, found {error:.1e} off, may differ by {bound:.0e}");
    Ok((gate.passed && error <= bound, detail))
}

/// The first greedy tokens of both.
pub fn greedy_as_the_oracle<O: Operations>(
    make: &Make<'_, O>,
    model: &OpenModel,
    steps: usize,
) -> Result<(bool, String), EngineError> {
    let found = continued(&mut load(make, model, Dtype::F32)?, steps)?;
    let wanted = continued(&mut load(&|_| Ok(Oracle::new()), model, Dtype::F32)?, steps)?;
    Ok(same_tokens("the oracle", &found, &wanted))
}

/// Bytes of decodes, counted where operations ran, against those of as many different experts as these counted.
pub fn experts_against_the_ledger<O: Operations>(
    make: &Make<'_, O>,
    config: &str,
    dtype: Dtype,
) -> Result<(bool, String), EngineError> {
    let model = model_of(parse_config(config, Path::new("built in")).expect("the built-in config is valid"));
    let mut session = load(make, &model, dtype)?;
    let ledger = Ledger::new(session.architecture(), session.inventory(), session.kv_dtype());
    let mut furthest = Furthest::within(EXPERTS_SHARE);
    for batch in COUNTED_BATCHES {
        let tokens: Vec<Vec<u32>> = (0..batch).map(|i| vec![u32::try_from(97 * i).unwrap_or(0)]).collect();
        // With the token's own position a whole block, so that no tile is read in part.
        let depth = DEFAULT_BLOCK_SIZE - 1;
        for sequence in 0..batch as u64 {
            let filled = session.synthetic_kv().expect("the native engine fills its cache");
            filled.fill_kv(SequenceId(sequence), depth, SEED)?;
        }
        session.experts_met();
        session.step(&StepBatch::uniform(SequenceId(0), &tokens, depth))?;
        let met = session.experts_met().ok_or(EngineError::NoStepRun)?;
        let found = session.bytes_moved().ok_or(EngineError::NoStepRun)?;
        (0..batch as u64).for_each(|sequence| session.release(SequenceId(sequence)));
        let ideal =
            ledger.step(StepShape::decode(batch, depth)).meeting(met, ledger.expert_bytes()).bytes.ideal();
        furthest.add(&format!("{batch} sequences that met {met} experts"), found, ideal);
    }
    Ok(furthest.verdict())
}

/// Of several counts of bytes, the one that lies furthest from the ledger's.
struct Furthest {
    bound: f64,
    off: f64,
    detail: String,
}

impl Furthest {
    fn within(bound: f64) -> Self {
        Self { bound, off: -1.0, detail: "nothing was counted".to_owned() }
    }

    fn add(&mut self, at: &str, found: Bytes, ideal: Bytes) {
        let off = found.as_f64() / ideal.as_f64() - 1.0;
        if off.abs() > self.off {
            self.off = off.abs();
            self.detail = format!(
                "{at}: wanted {ideal} (ideal), found {:+.2} %, may differ by {:.1} %",
                off * 100.0,
                self.bound * 100.0
            );
        }
    }

    fn verdict(self) -> (bool, String) {
        ((0.0..=self.bound).contains(&self.off), self.detail)
    }
}

/// Greedy tokens of every family in f32 as the kernels of this processor give them.
#[cfg(any(test, feature = "cuda"))]
pub fn against_the_cpu<O: Operations>(make: &Make<'_, O>, steps: usize, record: &mut Record<'_>) {
    let on_the_cpu: &Make<'_, CpuOperations> = &CpuOperations::new;
    for (family, keys) in FAMILIES {
        let model = model_of(small_model(keys));
        let result = (|| {
            let found = continued(&mut load(make, &model, Dtype::F32)?, steps)?;
            let wanted = continued(&mut load(on_the_cpu, &model, Dtype::F32)?, steps)?;
            Ok(same_tokens("the CPU", &found, &wanted))
        })();
        record(recorded(OUTPUTS, format!("{family}, greedy f32 as on the CPU"), result));
    }
}

/// Logits, and a decode over a cache against one prefill, within the bound of the dtype.
pub fn logits<O: Operations>(
    kind: &Kind,
    make: &Make<'_, O>,
    model: &OpenModel,
    dtype: Dtype,
) -> Result<(bool, String), EngineError> {
    let mut session = load(make, model, dtype)?;
    let options = DeviceOptions { threads: Some(THREADS), ..DeviceOptions::default() };
    let reference = engine::open_reference(NAME, model, dtype, DeviceChoice::Cpu, options, &mut |_, _| {})?;
    let Some(mut reference) = reference else {
        return Ok((false, "there is nothing to hold it against".to_owned()));
    };
    let gate = quality::gate(&mut session, dtype, SEED, Some(reference.as_mut()))?;
    let found = gate.max_relative_error.map_or("not a number".into(), |error| format!("{error:.1e} off"));
    let wanted = if kind.plain.contains(&dtype) { "stock's in f32" } else { "dequantised in f32" };
    Ok((gate.passed, format!("wanted {wanted}, found {found}, may differ by {:.0e}", tolerance(dtype))))
}

/// The first greedy tokens of both engines.
pub fn greedy<O: Operations>(
    make: &Make<'_, O>,
    model: &OpenModel,
    steps: usize,
) -> Result<(bool, String), EngineError> {
    let found = continued(&mut load(make, model, Dtype::F32)?, steps)?;
    let options = DeviceOptions { threads: Some(THREADS), ..DeviceOptions::default() };
    let mut stock = engine::open("stock", model, Dtype::F32, DeviceChoice::Cpu, options, &mut |_, _| {})?;
    Ok(same_tokens("stock", &found, &continued(stock.as_mut(), steps)?))
}

fn same_tokens(of: &str, found: &[u32], wanted: &[u32]) -> (bool, String) {
    let wanted_hash = quality::token_hash(wanted);
    let steps = wanted.len();
    match found.iter().zip(wanted).position(|(found, wanted)| found != wanted) {
        None => (true, format!("wanted {of}'s {steps} tokens ({wanted_hash}), found them")),
        Some(step) => (
            false,
            format!(
                "wanted {of}'s {steps} tokens ({wanted_hash}), found {} for {} at step {step}",
                found[step], wanted[step]
            ),
        ),
    }
}

/// Greedy tokens after the prompt.
fn continued(session: &mut dyn Session, steps: usize) -> Result<Vec<u32>, EngineError> {
    let (mut tokens, mut brings) = (Vec::with_capacity(steps), PROMPT.to_vec());
    let mut start = 0;
    while tokens.len() < steps {
        let count = brings.len();
        session.step(&StepBatch::uniform(SequenceId(0), &[brings], start))?;
        start += count;
        brings = session.greedy_tokens()?;
        tokens.push(brings[0]);
    }
    Ok(tokens)
}

/// Bytes of a decode against the ideal ledger in every dtype, and over a filled cache against a prefilled one.
pub fn bytes<O: Operations>(kind: &Kind, make: &Make<'_, O>, depths: &[usize], record: &mut Record<'_>) {
    for dtype in kind.dtypes() {
        let result = against_the_ledger(make, dtype, depths);
        record(recorded(BYTES, format!("decode of one sequence, {dtype}"), result));
    }
    record(recorded(
        BYTES,
        "over synthetic KV as over a prefill".to_owned(),
        filled_as_prefilled(make, depths),
    ));
}

fn counted_model(dtype: Dtype) -> OpenModel {
    let architecture = parse_config(COUNTED, Path::new("built in")).expect("the built-in config is valid");
    let in_blocks = matches!(dtype, Dtype::Q4K | Dtype::Q5K | Dtype::Q6K);
    model_of(if in_blocks { in_blocks_of_256(architecture) } else { architecture })
}

/// The bytes of one decode step at a depth.
fn decode_bytes(session: &mut dyn Session, depth: usize) -> Result<Bytes, EngineError> {
    session.step(&StepBatch::uniform(SequenceId(0), &[vec![1]], depth))?;
    let moved = session.bytes_moved().ok_or(EngineError::NoStepRun)?;
    session.release(SequenceId(0));
    Ok(moved)
}

/// Bytes counted where operations ran, against the ideal, at the depth where they lie furthest apart.
pub fn against_the_ledger<O: Operations>(
    make: &Make<'_, O>,
    dtype: Dtype,
    depths: &[usize],
) -> Result<(bool, String), EngineError> {
    let mut session = load(make, &counted_model(dtype), dtype)?;
    let ledger = Ledger::new(session.architecture(), session.inventory(), session.kv_dtype());
    let mut furthest = Furthest::within(LEDGER_SHARE);
    for &depth in depths {
        session.synthetic_kv().expect("the native engine fills its cache").fill_kv(
            SequenceId(0),
            depth,
            SEED,
        )?;
        let found = decode_bytes(&mut session, depth)?;
        let ideal = ledger.step(StepShape::decode(1, depth)).bytes.ideal();
        furthest.add(&format!("at depth {depth}"), found, ideal);
    }
    Ok(furthest.verdict())
}

/// A step over noise moves what a step over a real prefill of the same depth moves.
pub fn filled_as_prefilled<O: Operations>(
    make: &Make<'_, O>,
    depths: &[usize],
) -> Result<(bool, String), EngineError> {
    // Apart, so that nothing a prefill leaves behind is there when a cache is filled.
    let model = counted_model(Dtype::Bf16);
    let mut prefilled = load(make, &model, Dtype::Bf16)?;
    let mut filled = load(make, &model, Dtype::Bf16)?;
    for &depth in depths {
        let prompt = (0..4099).cycle().take(depth).collect();
        prefilled.step(&StepBatch::uniform(SequenceId(0), &[prompt], 0))?;
        let wanted = decode_bytes(&mut prefilled, depth)?;
        filled.synthetic_kv().expect("the native engine fills its cache").fill_kv(
            SequenceId(0),
            depth,
            SEED,
        )?;
        let found = decode_bytes(&mut filled, depth)?;
        if found != wanted {
            return Ok((
                false,
                format!("at depth {depth} wanted {} B, found {} B, may differ by 0", wanted.0, found.0),
            ));
        }
    }
    Ok((true, format!("wanted the same bytes at depths {depths:?}, found them, may differ by 0")))
}
