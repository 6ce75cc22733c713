//! What to run, validated; every list is an axis.
//!
//! Enters: strings from flags or environment. Leaves: [`RunConfig`], in which every number is in range and every list is
//! non-empty. It opens no file and no device.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::engine::{DeviceChoice, DeviceOptions};
use crate::measure::protocol::{ProtocolPreset, Stopping};
use hbmark_core::model::Dtype;
use hbmark_core::result::validation::AXIS_CAP;
use hbmark_core::result::{EngineKind, KvFill, MAX_DRAFT_TOKENS, Phase};
use hbmark_report::analysis::distinct;

/// The model that runs when none is named: small enough for a laptop, real enough to be worth timing.
pub const DEFAULT_MODEL: &str = "SmolLM2-135M";

/// The batches and contexts that run when none are named: a few minutes on a laptop, the usual corners on a GPU.
pub fn default_grid(device: DeviceChoice) -> (&'static str, &'static str) {
    match device {
        DeviceChoice::Cpu => ("1,4", "128"),
        DeviceChoice::Cuda(_) => ("1,8,32", "512,4096"),
    }
}

/// The engines that run when none is named: what people get, and beside it what the hardware could give.
pub fn default_engines() -> &'static str {
    "stock,native"
}

/// The engines of a run: on a GPU `stock` brings its replay, so that what it spends on launches is known.
pub fn with_replay(mut engines: Vec<String>, device: DeviceChoice) -> Vec<String> {
    let replay = EngineKind::StockGraph.name();
    let stock = engines.iter().position(|engine| engine == EngineKind::Stock.name());
    if let (Some(stock), DeviceChoice::Cuda(_)) = (stock, device)
        && !engines.iter().any(|engine| engine == replay)
    {
        engines.insert(stock + 1, replay.to_owned());
    }
    engines
}

/// The most values one axis may have.
const AXIS_LENGTH_CAP: usize = 256;

/// Why a configuration cannot be used.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ConfigError {
    #[error(
        "--{flag} `{given}`: {problem}; write numbers with commas (1,8,32 or 4k,128k) or ranges (1..64*2, 128..1024+128)"
    )]
    List { flag: String, given: String, problem: String },
    #[error(
        "--{flag} `{given}` is not one of f32, bf16, f16, int8, fp8, int4, mxfp8, mxfp4, nvfp4, q8_0, q4_0, q4_k, q5_k, q6_k, gguf"
    )]
    Dtype { flag: String, given: String },
    #[error("--engine `{given}` is unknown; engines: {known}")]
    Engine { given: String, known: String },
    #[error("none of the engines {engines} has {phase} steps: {why}")]
    NoEngine { engines: String, phase: Phase, why: String },
}

/// The engines of a run over tensor parallel groups: the native engine once for each size, in place of the one that was named.
pub fn with_ranks(engines: &[String], sizes: &[usize]) -> Vec<String> {
    let series_of = |engine: &String| -> Vec<String> {
        if engine == EngineKind::Native.name() {
            sizes.iter().map(|ranks| EngineKind::of_ranks(*ranks)).collect()
        } else {
            vec![engine.clone()]
        }
    };
    let mut all: Vec<String> = Vec::new();
    for engine in engines.iter().flat_map(series_of) {
        if !all.contains(&engine) {
            all.push(engine);
        }
    }
    all
}

/// Checks a list of engine names.
///
/// # Errors
/// [`ConfigError::Engine`], naming what there is.
pub fn parse_engines(given: &str) -> Result<Vec<String>, ConfigError> {
    let engines = given
        .split(',')
        .map(|name| {
            let name = name.trim();
            if EngineKind::of(name).is_some() {
                Ok(name.to_owned())
            } else {
                Err(ConfigError::Engine {
                    given: name.to_owned(),
                    known: EngineKind::ALL
                        .iter()
                        .map(|kind| kind.name())
                        .chain(["native-tp2 to native-tp64"])
                        .collect::<Vec<_>>()
                        .join(", "),
                })
            }
        })
        .collect::<Result<Vec<_>, _>>()?;
    Ok(distinct(engines))
}

/// Reads a number with an optional `k` (1,024) or `m` (1,048,576): `4k` is 4,096 tokens.
///
/// # Errors
/// A text for a person.
pub fn parse_length(given: &str) -> Result<usize, String> {
    let text = given.trim();
    let (digits, times) = match text.char_indices().next_back() {
        Some((end, 'k' | 'K')) => (&text[..end], 1 << 10),
        Some((end, 'm' | 'M')) => (&text[..end], 1 << 20),
        _ => (text, 1),
    };
    let value: usize = digits.parse().map_err(|_| format!("`{text}` is not a number"))?;
    value.checked_mul(times).ok_or_else(|| format!("{text} is above {AXIS_CAP}"))
}

/// Reads `1,8,32`, `4k,128k`, `1..64*2` (geometric), `128..1024+128` (arithmetic) or `1..4`; ascending order and duplicates are left alone
/// and removed, respectively.
///
/// # Errors
/// [`ConfigError::List`], with the part that cannot be read.
pub fn parse_axis(flag: &str, given: &str) -> Result<Vec<usize>, ConfigError> {
    let fail =
        |problem: String| ConfigError::List { flag: flag.to_owned(), given: given.to_owned(), problem };
    let number = |text: &str| -> Result<usize, ConfigError> {
        let value = parse_length(text).map_err(&fail)?;
        if value == 0 {
            return Err(fail("0 is not allowed".into()));
        }
        if value > AXIS_CAP {
            return Err(fail(format!("{value} is above {AXIS_CAP}")));
        }
        Ok(value)
    };
    let mut values = Vec::new();
    for part in given.split(',') {
        if part.trim().is_empty() {
            return Err(fail("there is an empty item".into()));
        }
        let Some((from, to)) = part.split_once("..") else {
            values.push(number(part)?);
            continue;
        };
        let from = number(from)?;
        let next: Box<dyn Fn(usize) -> usize>;
        let to = if let Some((to, factor)) = to.split_once('*') {
            let factor = number(factor)?;
            if factor < 2 {
                return Err(fail("a factor must be at least 2".into()));
            }
            next = Box::new(move |v| v * factor);
            number(to)?
        } else if let Some((to, step)) = to.split_once('+') {
            let step = number(step)?;
            next = Box::new(move |v| v + step);
            number(to)?
        } else {
            next = Box::new(|v| v + 1);
            number(to)?
        };
        if to < from {
            return Err(fail(format!("{from}..{to} runs backwards")));
        }
        let mut value = from;
        while value <= to {
            values.push(value);
            if values.len() > AXIS_LENGTH_CAP {
                return Err(fail(format!("more than {AXIS_LENGTH_CAP} values")));
            }
            value = next(value);
        }
    }
    let mut seen = std::collections::BTreeSet::new();
    values.retain(|v| seen.insert(*v));
    Ok(values)
}

/// A step benchmark, ready to be planned.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunConfig {
    pub model: String,
    pub revision: Option<String>,
    pub engines: Vec<String>,
    pub device: DeviceChoice,
    /// Empty: the engine's default for the device.
    pub dtypes: Vec<Dtype>,
    pub phases: Vec<Phase>,
    pub batches: Vec<usize>,
    pub contexts: Vec<usize>,
    /// Prompt lengths of prefills, where they are not the contexts.
    pub prompts: Option<Vec<usize>>,
    pub seed: u64,
    pub threads: Option<usize>,
    pub preset: ProtocolPreset,
    /// When to stop sampling a cell.
    pub stopping: Stopping,
    /// Measure the ceilings, also where some were kept of a run before.
    pub fresh_ceilings: bool,
    pub device_options: DeviceOptions,
    /// How decode contexts are filled.
    pub kv: KvFill,
    /// Break a step down per operation, in an untimed pass after the cells.
    pub show_ops: bool,
    pub note: Option<String>,
    pub hypothesis: Option<String>,
    pub out: Option<PathBuf>,
}

impl RunConfig {
    /// The contexts of a phase.
    pub fn contexts_of(&self, phase: Phase) -> &[usize] {
        match (phase, &self.prompts) {
            (Phase::Prefill, Some(prompts)) => prompts,
            _ => &self.contexts,
        }
    }
}

/// Names of phases on a command line; a verify step has draft tokens besides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum PhaseName {
    /// Whole prompts.
    Prefill,
    /// One token of each sequence.
    Decode,
    /// Speculative decoding: a token and --draft-tokens of each sequence.
    Verify,
}

/// Draft tokens of verify steps where none are given.
const DRAFT_TOKENS: &str = "1,3,7";

/// The phases of some names. Verify steps, which draft tokens ask for too, bring the decode step that they are held against.
///
/// # Errors
/// [`ConfigError::List`], where draft tokens cannot be read or are too many.
pub fn phases(names: &[PhaseName], draft_tokens: Option<&str>) -> Result<Vec<Phase>, ConfigError> {
    let verify = draft_tokens.is_some() || names.contains(&PhaseName::Verify);
    let mut phases = Vec::new();
    if names.contains(&PhaseName::Prefill) {
        phases.push(Phase::Prefill);
    }
    if verify || names.contains(&PhaseName::Decode) {
        phases.push(Phase::Decode);
    }
    if verify {
        let (flag, given) = ("draft-tokens", draft_tokens.unwrap_or(DRAFT_TOKENS));
        let mut tokens = parse_axis(flag, given)?;
        tokens.sort_unstable();
        tokens.dedup();
        if let Some(most) = tokens.last().filter(|most| **most > MAX_DRAFT_TOKENS) {
            let problem = format!("{most} is above {MAX_DRAFT_TOKENS}");
            return Err(ConfigError::List { flag: flag.to_owned(), given: given.to_owned(), problem });
        }
        phases.extend(tokens.into_iter().map(|draft_tokens| Phase::Verify { draft_tokens }));
    }
    Ok(phases)
}

/// Checks that some engine of a run times each of its phases; the others leave it out.
///
/// # Errors
/// [`ConfigError::NoEngine`], with the phase.
pub fn check_phases(engines: &[String], phases: &[Phase]) -> Result<(), ConfigError> {
    let timed = |phase: &Phase| engines.iter().any(|engine| super::plan::times(engine, *phase));
    match phases.iter().find(|phase| matches!(phase, Phase::Verify { .. }) && !timed(phase)) {
        None => Ok(()),
        Some(phase) => Err(ConfigError::NoEngine {
            engines: engines.join(", "),
            phase: *phase,
            why: crate::engine::no_verify_steps(&engines[0]).to_string(),
        }),
    }
}

/// The names of some phases, and the draft tokens of their verify steps as one would write them.
pub fn names_of(phases: &[Phase]) -> (Vec<PhaseName>, Option<String>) {
    let mut names: Vec<PhaseName> = phases
        .iter()
        .map(|phase| match phase {
            Phase::Prefill => PhaseName::Prefill,
            Phase::Decode => PhaseName::Decode,
            Phase::Verify { .. } => PhaseName::Verify,
        })
        .collect();
    names.dedup();
    let drafts: Vec<String> = phases
        .iter()
        .filter_map(|phase| match phase {
            Phase::Verify { draft_tokens } => Some(draft_tokens.to_string()),
            _ => None,
        })
        .collect();
    (names, (!drafts.is_empty()).then(|| drafts.join(",")))
}

/// Reads a comma-separated list of dtypes.
///
/// # Errors
/// [`ConfigError::Dtype`], naming the one that is none.
pub fn parse_dtypes(flag: &str, given: &str) -> Result<Vec<Dtype>, ConfigError> {
    let dtypes = given
        .split(',')
        .map(|name| {
            <Dtype as clap::ValueEnum>::from_str(name.trim(), true)
                .map_err(|_| ConfigError::Dtype { flag: flag.to_owned(), given: name.trim().to_owned() })
        })
        .collect::<Result<Vec<_>, _>>()?;
    Ok(distinct(dtypes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_take_commas_and_ranges() {
        assert_eq!(parse_axis("batch", "1,8,32").unwrap(), [1, 8, 32]);
        assert_eq!(parse_axis("batch", "1..64*2").unwrap(), [1, 2, 4, 8, 16, 32, 64]);
        assert_eq!(parse_axis("context", "128..512+128").unwrap(), [128, 256, 384, 512]);
        assert_eq!(parse_axis("batch", "1..3, 8,8").unwrap(), [1, 2, 3, 8]);
        assert_eq!(parse_axis("context", "4k,128K,1m").unwrap(), [4_096, 131_072, 1_048_576]);
        assert_eq!(parse_axis("context", "1k..4k*2").unwrap(), [1_024, 2_048, 4_096]);
    }

    #[test]
    fn a_malformed_list_names_the_flag_and_the_part() {
        for (given, problem) in [
            ("0", "0 is not allowed"),
            ("1,,2", "there is an empty item"),
            ("", "there is an empty item"),
            ("a", "`a` is not a number"),
            ("-1", "`-1` is not a number"),
            ("k", "`k` is not a number"),
            ("4kk", "`4kk` is not a number"),
            ("4é", "`4é` is not a number"),
            ("99999999999999999k", "99999999999999999k is above 134217728"),
            ("8..1", "8..1 runs backwards"),
            ("1..8*1", "a factor must be at least 2"),
            ("1..100000", "more than 256 values"),
            ("999999999999", "999999999999 is above 134217728"),
        ] {
            let error = parse_axis("batch", given).unwrap_err();
            assert_eq!(
                error,
                ConfigError::List { flag: "batch".into(), given: given.into(), problem: problem.into() }
            );
        }
    }

    #[test]
    fn a_dtype_that_does_not_exist_is_named_with_those_that_do() {
        let error = parse_dtypes("dtype", "bf16,fp4").unwrap_err().to_string();
        assert_eq!(
            error,
            "--dtype `fp4` is not one of f32, bf16, f16, int8, fp8, int4, mxfp8, mxfp4, nvfp4, q8_0, q4_0, q4_k, q5_k, q6_k, gguf"
        );
    }

    #[test]
    fn stock_brings_its_replay_on_a_gpu_and_only_there() {
        let given = || parse_engines("stock,native").unwrap();
        assert_eq!(with_replay(given(), DeviceChoice::Cuda(0)), ["stock", "stock-graph", "native"]);
        assert_eq!(with_replay(given(), DeviceChoice::Cpu), ["stock", "native"]);
        let twice = parse_engines("stock-graph,stock").unwrap();
        assert_eq!(with_replay(twice.clone(), DeviceChoice::Cuda(0)), twice);
        assert_eq!(with_replay(vec!["native".into()], DeviceChoice::Cuda(0)), ["native"]);
    }

    #[test]
    fn the_native_engine_runs_once_for_each_size() {
        let engines = |given: &str, sizes: &[usize]| with_ranks(&parse_engines(given).unwrap(), sizes);
        assert_eq!(engines("stock,native", &[1, 2]), ["stock", "native", "native-tp2"]);
        assert_eq!(engines("native,native-tp2", &[2, 4]), ["native-tp2", "native-tp4"]);
    }

    #[test]
    fn an_unknown_engine_is_named() {
        let error = parse_engines("stock,warp").unwrap_err().to_string();
        assert_eq!(
            error,
            "--engine `warp` is unknown; engines: stock, native, stock-graph, stock-pool, native-tp2 to native-tp64"
        );
    }

    #[test]
    fn verify_steps_bring_their_decode_step_and_are_read_back_as_they_were_asked_for() {
        use PhaseName::{Decode, Prefill, Verify};
        let verify = |draft_tokens| Phase::Verify { draft_tokens };
        assert_eq!(phases(&[Prefill, Decode], None).unwrap(), [Phase::Prefill, Phase::Decode]);
        assert_eq!(phases(&[Verify], None).unwrap(), [Phase::Decode, verify(1), verify(3), verify(7)]);
        let given = phases(&[Prefill], Some("5,2,5")).unwrap();
        assert_eq!(given, [Phase::Prefill, Phase::Decode, verify(2), verify(5)]);
        let (names, drafts) = names_of(&given);
        assert_eq!(phases(&names, drafts.as_deref()).unwrap(), given);
        for (tokens, problem) in [("0", "0 is not allowed"), ("65", "65 is above 64"), ("x", "`x`")] {
            let error = phases(&[Verify], Some(tokens)).unwrap_err().to_string();
            assert!(error.starts_with("--draft-tokens") && error.contains(problem), "{error}");
        }
        let engines = |names: &[&str]| names.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert!(check_phases(&engines(&["stock", "native"]), &given).is_ok());
        let error = check_phases(&engines(&["stock"]), &given).unwrap_err().to_string();
        assert!(error.contains("stock has verify-2 steps") && error.contains("--engine native"), "{error}");
    }
}
