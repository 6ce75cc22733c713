//! A cold start: from launching a process to its first tokens, by phases.
//!
//! Enters: a model, and how to launch this program again. Leaves: one [`Launch`] per process. The child prints a line at the end of each phase;
//! the parent holds the clock, which starts before the launch, so that the time of the loader and of the
//! system is in it. Launches follow each other: the system's page cache is as the one before left it, and only the first may find it
//! cold. Their unit is a process, so nothing is averaged within one.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use serde::Serialize;

use crate::engine::{self, DeviceChoice, DeviceOptions, SequenceId, StepBatch};
use crate::machine::clock::now_utc;
use crate::machine::{doctor, environment};
use crate::weights::OpenModel;
use crate::worker::Observer;
use crate::worker::child::LAUNCHED_BY;
use hbmark_core::model::Dtype;
use hbmark_core::result::as_map;
use hbmark_core::result::serving::{ColdPhase, ColdStart, Launch, ServeKind, ServeReport, WorkloadSummary};
use hbmark_core::stats::percentile;
use hbmark_core::units::Nanos;
use hbmark_traffic::workload::{PlannedRequest, PromptSegment, splitmix64};

/// The phases, in their order, and what each one holds.
const PHASES: &[(&str, &str)] = &[
    ("process", "launch until the program runs"),
    ("model", "its shape and files found and checked"),
    ("tokenizer", "read, where the model has one"),
    ("weights", "read or generated, and on the device"),
    ("first token", "the whole prompt in one step, on caches and threads that have done nothing yet"),
    ("second token", "the first step of a decode"),
];

/// What to launch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ColdConfig {
    pub engine: String,
    pub device: DeviceChoice,
    /// `None`: the engine's default for the device.
    pub dtype: Option<Dtype>,
    pub kv_dtype: Option<Dtype>,
    pub threads: Option<usize>,
    pub prompt_tokens: usize,
    pub launches: usize,
    pub seed: u64,
    pub note: Option<String>,
    pub hypothesis: Option<String>,
}

/// Why a cold start was not measured.
#[derive(Debug, thiserror::Error)]
pub enum ColdError {
    #[error(transparent)]
    Engine(#[from] engine::EngineError),
    #[error("cannot launch this program again: {0}")]
    Launch(#[source] std::io::Error),
    #[error("launch {index} ended after {reached} of {all} phases ({status}): {said}")]
    Ended { index: usize, reached: usize, all: usize, status: std::process::ExitStatus, said: String },
    #[error("launch {index} said `{found}` where the end of the phase `{wanted}` was due")]
    UnexpectedOutput { index: usize, found: String, wanted: &'static str },
    #[error("a prompt of {prompt} tokens and a second token do not fit the model's context of {context}")]
    PromptTooLong { prompt: usize, context: usize },
    #[error("cannot say that a phase is over: {0}")]
    Pipe(#[source] std::io::Error),
}

/// The child: runs the phases and prints to `out` when each is over. The model is opened by `open`, inside its phase.
pub fn child<E: From<ColdError>>(
    config: &ColdConfig,
    open: impl FnOnce() -> Result<OpenModel, E>,
    out: &mut dyn Write,
) -> Result<(), E> {
    let mut over = |phase: usize| {
        let line = writeln!(out, "{}", PHASES[phase].0).and_then(|()| out.flush());
        line.map_err(ColdError::Pipe)
    };
    over(0)?;
    let model = open()?;
    over(1)?;
    // A model without a tokenizer starts without one.
    let tokenizer = model.tokenizer().ok();
    over(2)?;
    let (threads, kv_dtype) = (config.threads, config.kv_dtype);
    let options = DeviceOptions { threads, kv_dtype, ..DeviceOptions::default() };
    let mut session =
        engine::open(&config.engine, &model, dtype(config, &model), config.device, options, &mut |_, _| {})
            .map_err(ColdError::from)?;
    over(3)?;
    let prompt = PlannedRequest {
        arrival: Nanos(0.0),
        prompt: vec![PromptSegment {
            source: splitmix64(config.seed, 0),
            tokens: u32::try_from(config.prompt_tokens).unwrap_or(u32::MAX),
        }],
        output_len: 2,
        ..PlannedRequest::default()
    };
    let prompt = prompt.tokens(session.architecture().vocab_size);
    let mut step = |tokens: Vec<u32>, at: usize| {
        session.step(&StepBatch::uniform(SequenceId(0), &[tokens], at))?;
        session.greedy_tokens()
    };
    let first = step(prompt, 0).map_err(ColdError::from)?;
    over(4)?;
    step(first, config.prompt_tokens).map_err(ColdError::from)?;
    over(5)?;
    drop(tokenizer);
    Ok(())
}

fn dtype(config: &ColdConfig, model: &OpenModel) -> Dtype {
    config.dtype.unwrap_or_else(|| engine::default_dtype(&config.engine, model, config.device))
}

/// The parent: launches `program` with `arguments` so many times and times its phases.
pub fn measure(
    config: &ColdConfig,
    model: &OpenModel,
    command: &str,
    (program, arguments): (&Path, &[std::ffi::OsString]),
    observer: &mut dyn Observer,
) -> Result<ServeReport, ColdError> {
    let context = model.architecture.max_positions;
    if config.prompt_tokens >= context {
        return Err(ColdError::PromptTooLong { prompt: config.prompt_tokens, context });
    }
    let environment = environment::collect(config.device.gpu());
    let mut launches = Vec::with_capacity(config.launches);
    for index in 1..=config.launches {
        observer.stage(&format!("launch {index} of {}", config.launches));
        launches.push(launch(index, program, arguments)?);
    }
    let dtype = dtype(config, model);
    let workload = WorkloadSummary {
        name: "cold start".into(),
        source: format!(
            "launches of a process on the {} engine: {}; tokens of a prompt: {}",
            config.engine, config.launches, config.prompt_tokens
        ),
    };
    Ok(ServeReport {
        started_at: Some(now_utc()),
        note: config.note.clone(),
        hypothesis: config.hypothesis.clone(),
        warnings: doctor::distortions(&environment),
        environment,
        config: as_map(config),
        model: Some(model.summary(dtype)),
        dtype: Some(dtype),
        cold_start: Some(cold_start(config.prompt_tokens, launches)),
        ..ServeReport::new(ServeKind::ServeCold, command, workload)
    })
}

fn launch(index: usize, program: &Path, arguments: &[std::ffi::OsString]) -> Result<Launch, ColdError> {
    // The clock starts before the launch.
    let begin = Instant::now();
    let mut child = Command::new(program)
        .args(arguments)
        .env(LAUNCHED_BY, std::process::id().to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(ColdError::Launch)?;
    let mut ends = Vec::with_capacity(PHASES.len());
    let mut fault = None;
    if let Some(output) = child.stdout.take() {
        for line in BufReader::new(output.take(MAX_CHILD_OUTPUT)).lines() {
            let now = begin.elapsed();
            let line = line.map_err(ColdError::Pipe)?;
            let wanted = PHASES.get(ends.len()).map_or("the end", |phase| phase.0);
            if line != wanted {
                fault = Some(ColdError::UnexpectedOutput { index, found: line, wanted });
                break;
            }
            ends.push(now.as_secs_f64() * 1e9);
        }
    }
    let mut said = String::new();
    if let Some(errors) = child.stderr.take() {
        // What cannot be read cannot be shown.
        let _ = errors.take(MAX_CHILD_OUTPUT).read_to_string(&mut said);
    }
    let status = child.wait().map_err(ColdError::Launch)?;
    if let Some(fault) = fault.filter(|_| status.success()) {
        return Err(fault);
    }
    if !status.success() || ends.len() < PHASES.len() {
        let said = said.trim().trim_start_matches("error: ").to_owned();
        return Err(ColdError::Ended { index, reached: ends.len(), all: PHASES.len(), status, said });
    }
    let begins = std::iter::once(0.0).chain(ends.iter().copied());
    Ok(Launch {
        phases_ns: begins.zip(&ends).map(|(from, to)| to - from).collect(),
        to_first_token_ns: ends[FIRST_TOKEN],
    })
}

/// The index of the first token among the phases.
const FIRST_TOKEN: usize = 4;
/// Bytes that a child may print; it has a line per phase, and one where it fails.
const MAX_CHILD_OUTPUT: u64 = 64 * 1024;

/// Medians and extremes of launches, phase by phase.
fn cold_start(prompt_tokens: usize, launches: Vec<Launch>) -> ColdStart {
    let over = |name: &str, holds: &str, of: &dyn Fn(&Launch) -> f64| {
        let mut sorted: Vec<f64> = launches.iter().map(of).collect();
        let first_launch_ns = sorted.first().copied().unwrap_or(0.0);
        sorted.sort_by(f64::total_cmp);
        ColdPhase {
            name: name.to_owned(),
            holds: holds.to_owned(),
            median_ns: percentile(&sorted, 0.5),
            min_ns: sorted.first().copied().unwrap_or(0.0),
            max_ns: sorted.last().copied().unwrap_or(0.0),
            first_launch_ns,
        }
    };
    let phases = PHASES.iter().enumerate();
    ColdStart {
        prompt_tokens,
        phases: phases.map(|(i, (name, holds))| over(name, holds, &|l| l.phases_ns[i])).collect(),
        to_first_token: over("launch to first token", "all of the above but the second token", &|l| {
            l.to_first_token_ns
        }),
        launches,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Result<Launch, ColdError> {
        launch(3, Path::new("/bin/sh"), &["-c".into(), script.into()])
    }

    #[test]
    fn phases_are_the_times_between_the_lines_of_a_child() {
        let script: Vec<String> = PHASES.iter().map(|p| format!("echo '{}'", p.0)).collect();
        let launch = shell(&script.join("; ")).unwrap();
        assert_eq!(launch.phases_ns.len(), PHASES.len());
        assert!(launch.phases_ns.iter().all(|ns| *ns >= 0.0));
        let first: f64 = launch.phases_ns[..=FIRST_TOKEN].iter().sum();
        assert!((first - launch.to_first_token_ns).abs() < 1.0);
    }

    #[test]
    fn a_child_that_fails_is_an_error_with_what_it_said() {
        let told = |script: &str| shell(script).unwrap_err().to_string();
        let failed = told("echo process; echo 'error: no such model' >&2; exit 2");
        assert!(
            failed.contains("launch 3 ended after 1 of 6 phases") && failed.ends_with("no such model"),
            "{failed}"
        );
        assert!(told("echo process").contains("after 1 of 6"), "success without all phases is none");
        assert!(told("echo weights").contains("`weights` where the end of the phase `process`"));
    }

    #[test]
    fn the_summary_keeps_the_first_launch_apart() {
        let one = |ns: f64| Launch { phases_ns: vec![ns; PHASES.len()], to_first_token_ns: 5.0 * ns };
        let cold = cold_start(8, vec![one(9.0), one(1.0), one(2.0)]);
        let all = &cold.to_first_token;
        assert_eq!(
            [all.first_launch_ns, all.median_ns, all.min_ns, all.max_ns].map(|ns| format!("{ns}")),
            ["45", "10", "5", "45"]
        );
    }
}
