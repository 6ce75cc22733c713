//! What a serving benchmark has beside weights: a tokenizer, a grammar, adapters.
//!
//! Enters: what was asked for. Leaves: the things themselves and, for the report, what they are and how long each took to make. All
//! of it is checked before weights are loaded, so that a wrong path costs a moment and not minutes.

use std::path::PathBuf;
use std::time::Instant;

use serde::Serialize;

use super::ServeError;
use crate::engine::{self, DeviceChoice, Session};
use crate::serve::structured_output::{CompiledGrammar, Grammar, GrammarCompiler};
use crate::weights::OpenModel;
use crate::weights::adapter::Adapter;
use crate::weights::tokenizer::Tokenizer;
use hbmark_core::model::{Architecture, Target};
use hbmark_core::result::serving::{AdapterSummary, Assignment, LoraSummary, StructuredSummary};
use hbmark_core::units::{Bytes, Nanos};
use hbmark_traffic::adapters::AdapterMix;
use hbmark_traffic::workload::Structured;

/// The adapters that were asked for.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LoraConfig {
    /// Names and PEFT folders.
    pub modules: Vec<(String, PathBuf)>,
    /// Random adapters beside them, their rank and what they add to.
    pub synthetic: usize,
    pub rank: usize,
    pub targets: Vec<Target>,
    pub max_lora_rank: usize,
    pub share: f64,
    pub assignment: Assignment,
}

fn timed<T>(work: impl FnOnce() -> T) -> (T, f64) {
    let begin = Instant::now();
    let made = work();
    (made, begin.elapsed().as_nanos() as f64)
}

/// The tokenizer that was named, or the one beside the weights. A name that is given must be right.
pub(super) fn tokenizer(
    path: Option<&PathBuf>,
    model: &OpenModel,
) -> Result<Option<Box<Tokenizer>>, ServeError> {
    let Some(path) = path else { return Ok(model.tokenizer().ok().map(Box::new)) };
    let mut tokenizer = Tokenizer::open_path(path)?;
    tokenizer.check_vocab(model.architecture.vocab_size)?;
    Ok(Some(Box::new(tokenizer)))
}

/// Compiles the grammar that was asked for.
pub(super) fn grammar(
    asked: &Structured,
    tokenizer: Option<&Tokenizer>,
    architecture: &Architecture,
) -> Result<(Box<CompiledGrammar>, StructuredSummary), ServeError> {
    let grammar: Grammar = asked.grammar.parse()?;
    let tokenizer = tokenizer.ok_or(ServeError::Needs {
        what: "structured output",
        needs: "the model's vocabulary: give --tokenizer PATH, a tokenizer.json or its folder",
    })?;
    let (masks, vocabulary_ns) =
        timed(|| GrammarCompiler::new(tokenizer, architecture.vocab_size, &architecture.eos_tokens));
    let masks = masks?;
    let (compiled, compile_ns) = timed(|| masks.compile(&grammar));
    let summary = StructuredSummary {
        grammar: grammar.to_string(),
        share: asked.share,
        vocabulary_ns: Some(vocabulary_ns),
        compile_ns: Some(compile_ns),
    };
    Ok((Box::new(compiled?), summary))
}

/// Adapters in the host's memory, and what is known of each so far. On a virtual clock random ones are never made: their size is known.
pub(super) struct Adapters {
    loaded: Vec<Adapter>,
    pub summary: LoraSummary,
}

impl Adapters {
    /// Reads the folders and makes the random ones.
    pub(super) fn open(
        asked: &LoraConfig,
        architecture: &Architecture,
        max_loras: Option<usize>,
        seed: u64,
        is_virtual: bool,
    ) -> Result<Self, ServeError> {
        let (mut loaded, mut adapters) = (Vec::new(), Vec::new());
        for (name, folder) in &asked.modules {
            let (adapter, disk_ns) = timed(|| Adapter::open(folder, name, architecture, asked.max_lora_rank));
            let adapter = adapter?;
            adapters.push(AdapterSummary {
                name: name.clone(),
                source: folder.display().to_string(),
                rank: adapter.rank,
                targets: adapter.targets(),
                parameters: adapter.elements(),
                bytes: bytes_at_16_bits(adapter.elements()),
                disk_ns: Some(disk_ns),
                memory_ns: None,
            });
            loaded.push(adapter);
        }
        for index in 0..asked.synthetic {
            let own = hbmark_traffic::workload::splitmix64(seed, 1_000 + index as u64);
            let name = format!("synthetic-{index}");
            let parameters = Adapter::parameters(architecture, asked.rank, &asked.targets);
            if !is_virtual {
                loaded.push(Adapter::synthetic(architecture, &name, asked.rank, &asked.targets, own));
            }
            adapters.push(AdapterSummary {
                name,
                source: format!("random, seed {own}"),
                rank: asked.rank,
                targets: asked.targets.clone(),
                parameters,
                bytes: bytes_at_16_bits(parameters),
                disk_ns: None,
                memory_ns: None,
            });
        }
        let summary = LoraSummary { adapters, max_loras, max_lora_rank: asked.max_lora_rank };
        Ok(Self { loaded, summary })
    }

    /// Takes them into a session, one after the other.
    pub(super) fn load(mut self, session: &mut dyn Session) -> Result<LoraSummary, ServeError> {
        for (adapter, summary) in self.loaded.iter().zip(&mut self.summary.adapters) {
            let (taken, memory_ns) = timed(|| engine::lora(session)?.load_adapter(adapter));
            summary.bytes = taken?.1;
            summary.memory_ns = Some(memory_ns);
        }
        Ok(self.summary)
    }
}

/// What an engine is assumed to store until one has said.
fn bytes_at_16_bits(parameters: u64) -> Bytes {
    Bytes(2 * parameters)
}

/// Refuses, before anything is loaded, adapters on an engine that adds none.
pub(super) fn check_engine(
    asked: Option<&LoraConfig>,
    engine: &str,
    device: DeviceChoice,
) -> Result<(), ServeError> {
    if asked.is_some() {
        engine::check_adapters(engine, device)?;
    }
    Ok(())
}

/// The adapters as traffic.
pub(super) fn traffic(
    asked: &LoraConfig,
    summary: &LoraSummary,
    weight_bytes: Bytes,
    time_each: Nanos,
) -> AdapterMix {
    let count = summary.adapters.len();
    let all: u64 = summary.adapters.iter().map(|adapter| adapter.bytes.0).sum();
    AdapterMix {
        count,
        assignment: asked.assignment,
        share: asked.share,
        bytes_each: Bytes(all / count.max(1) as u64),
        weight_bytes,
        time_each,
    }
}
