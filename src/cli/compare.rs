//! `hbmark compare`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::{Args as ClapArgs, FromArgMatches};

use super::benchmark::command_line;
use super::progress::Progress;
use super::shared_args::first_line;
use super::{Outcome, conclude, lock_folder, prepare_folder, print_result, save, say, say_replaced};
use super::{run, serve};
use crate::run::compare::PlacedStep;
use crate::run::compare::{
    self, CompareError, Compared, ComparisonPlan, DEFAULT_ROUNDS, Launched, Launcher, Processes,
};
use crate::run::config::RunConfig;
use crate::run::engine_run::{self, EngineRun};
use crate::serve::ServeConfig;
use crate::weights::OpenModel;
use crate::worker::journal::FolderLock;
use crate::worker::signals::Interrupts;
use hbmark_core::result::ReportKind;
use hbmark_core::result::comparison::{
    ComparedItem, Comparison, ComparisonVerdict, Effect, EngineVariant, Settings,
};
use hbmark_core::units::counted;
use hbmark_report::analysis::compare::can_decide;
use hbmark_report::analysis::compare::processes::MAX_A_SIDE;
use hbmark_report::analysis::opened::result_in;
use hbmark_report::analysis::{Opened, SideBySide, open, side_by_side};
use hbmark_report::output::Format;

/// The settings a side may have: flags of `hbmark run`, by the same names.
const KEYS: &[&str] = &[
    "model",
    "revision",
    "engine",
    "device",
    "threads",
    "dtype",
    "phase",
    "draft-tokens",
    "batch",
    "context",
    "kv",
    "kv-dtype",
    "expert-routing",
    "tensor-parallel-size",
];

/// The largest number of rounds; beyond it a typing error is likelier than a wish.
const MAX_ROUNDS: u64 = 10_000;

#[derive(Debug, ClapArgs)]
#[command(
    after_help = "Examples:\n  hbmark compare threads=1 threads=2 --both 'engine=native phase=decode batch=1'\n  hbmark compare 'engine=native dtype=bf16' 'engine=native dtype=int8' --aa --fail-on slower:2%\n  hbmark compare base.toml 'base.toml threads=2' --rounds 20\n  hbmark compare results/old/result.json results/new/result.json\n  hbmark compare baseline new --fail-on slower:5%\n  hbmark compare url=http://a:8000 url=http://b:8000 --both 'workload=chat rate=4 requests=200' --aa\n\nA side is a list of settings (key=value), a TOML file of them, or both, the later winning: model, revision, engine, device, threads, dtype, phase, draft-tokens, batch, context, kv, kv-dtype, expert-routing, tensor-parallel-size. With settings of `hbmark serve` (url, rate, workload, max-num-seqs, ...) each process serves the same requests, others in every round, and latencies are compared; prefix caches are kept apart where the server can. Two saved results are put side by side, and what that cannot prove is said; folders with several of them, each of a run of its own, are decided."
)]
pub struct Args {
    /// The side that is compared against: settings, a TOML file of settings, a saved result, or a folder of several.
    a: String,
    /// The candidate: FASTER and SLOWER say how B compares with A.
    b: String,
    /// Settings of both sides; those of a side win.
    #[arg(long, value_name = "SETTINGS")]
    both: Option<String>,
    /// Pairs of fresh processes, at least 7; fixed in advance [default: 12].
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=MAX_ROUNDS))]
    rounds: Option<u64>,
    /// Measure A against A first: an effect below this noise floor is INCONCLUSIVE.
    #[arg(long)]
    aa: bool,
    /// Differences that do not matter: both ends of an interval within it are EQUIVALENT.
    #[arg(long, value_name = "PERCENT", default_value = "1%", value_parser = parse_percent)]
    margin: f64,
    /// End with 1 when a cell, or all together, is `slower`, `faster` (each with a least size: `slower:2%`), or `inconclusive`;
    /// comma-separated.
    #[arg(long, value_name = "WHAT", value_delimiter = ',', value_parser = parse_gate)]
    fail_on: Vec<Gate>,
    /// The protocol of each process of `hbmark run` [default: quick].
    #[arg(long, value_enum)]
    protocol: Option<PresetName>,
    /// Seed of the order within rounds, and of weights and prompts of both sides.
    #[arg(long, env = "HBMARK_SEED", default_value_t = 42)]
    seed: u64,
    /// Keep comparison.json, comparison.csv, comparison.md, report.html and the result of every process in this folder.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// What to print on stdout.
    #[arg(long, value_enum, default_value = "table")]
    format: Format,
}

/// How much of the protocol each process runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum PresetName {
    /// As `hbmark run`.
    Full,
    /// As `hbmark run --quick`.
    Quick,
    /// As `hbmark run --smoke`: times mean nothing.
    Smoke,
}

/// What makes a comparison fail.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Gate {
    ruling: ComparisonVerdict,
    /// Differences smaller than this pass.
    least: f64,
}

impl Gate {
    fn closes(self, effect: &Effect) -> bool {
        let size = effect.ratio.map_or(0.0, |ratio| ratio.ln().abs().exp_m1());
        effect.verdict == self.ruling && (self.least == 0.0 || size >= self.least)
    }
}

/// Reads `2%` or `2`, in percent, below 100. `0.75` may be meant for a share, and is refused without its sign.
pub(super) fn parse_percent(given: &str) -> Result<f64, String> {
    let number = given.trim().trim_end_matches('%').trim_end();
    let bare = number.len() == given.trim().len();
    match number.parse::<f64>() {
        Ok(share) if bare && share > 0.0 && share < 1.0 => {
            Err(format!("may be a share or a percentage: write {share}% or {}%", share * 100.0))
        }
        Ok(percent) if percent.is_finite() && (0.0..100.0).contains(&percent) => Ok(percent / 100.0),
        Ok(_) => Err("wanted a percentage from 0 to below 100".into()),
        Err(_) => Err("wanted a percentage such as 2%".into()),
    }
}

fn parse_gate(given: &str) -> Result<Gate, String> {
    let (word, least) = match given.split_once(':') {
        Some((word, least)) => (word, parse_percent(least)?),
        None => (given, 0.0),
    };
    let ruling = match word.trim() {
        "slower" => ComparisonVerdict::Slower,
        "faster" => ComparisonVerdict::Faster,
        "inconclusive" if least == 0.0 => ComparisonVerdict::Inconclusive,
        _ => return Err("wanted slower, slower:2%, faster, faster:2% or inconclusive".into()),
    };
    Ok(Gate { ruling, least })
}

/// What is to be printed and saved.
struct Ran {
    comparison: Comparison,
    /// The signal that ended it early.
    stopped: Option<i32>,
    /// Of the output folder, until everything is in it.
    _claim: Option<FolderLock>,
}

pub fn execute(args: &Args) -> anyhow::Result<Outcome> {
    let settings = Settings::new(args.margin, args.seed);
    let ran = match (saved_path(&args.a), saved_path(&args.b)) {
        (Some(a), Some(b)) => {
            for (given, flag) in
                [(args.aa, "--aa"), (args.rounds.is_some(), "--rounds"), (args.both.is_some(), "--both")]
            {
                anyhow::ensure!(!given, "{flag} needs two configurations: saved results were run already");
            }
            let processes = [processes(a)?, processes(b)?];
            let several = processes.iter().any(|of_side| of_side.len() > 1);
            let least = hbmark_core::stats::least_a_side(settings.alpha);
            anyhow::ensure!(
                args.fail_on.is_empty() || processes.iter().all(|of_side| of_side.len() >= least),
                "--fail-on: {} and {} saved results decide nothing; give folders with {least} or more each, every one of a run of its own, or two configurations",
                processes[0].len(),
                processes[1].len()
            );
            let claim = args.out.as_deref().map(lock_folder).transpose()?;
            if !several && let Some(beside) = beside(&processes[0][0], &processes[1][0])? {
                let saved = args.out.as_ref().map(|folder| save(&beside, "comparison", folder));
                conclude(print_result(&beside, args.format), saved)??;
                return Ok(Outcome::Complete);
            }
            let comparison =
                compare::saved([a, b], [&processes[0], &processes[1]], &command_line(), settings)?;
            Ran { comparison, stopped: None, _claim: claim }
        }
        (None, None) => match live(args, settings)? {
            Ok(ran) => ran,
            Err(signal) => return Ok(Outcome::Stopped(signal)),
        },
        (Some(saved), None) | (None, Some(saved)) => anyhow::bail!(
            "{} is a saved result, and {} is no file or folder; give two of one kind",
            saved.display(),
            if saved_path(&args.a).is_some() { &args.b } else { &args.a }
        ),
    };
    let saved = args.out.as_ref().map(|folder| save(&ran.comparison, "comparison", folder));
    conclude(print_result(&ran.comparison, args.format), saved)??;
    Ok(ran.stopped.map_or_else(|| outcome(&ran.comparison, &args.fail_on), Outcome::Stopped))
}

/// 1 where a gate closes, or a cell has no time to compare.
fn outcome(comparison: &Comparison, gates: &[Gate]) -> Outcome {
    let effects = || comparison.cells.iter().map(|cell| &cell.effect).chain(&comparison.overall);
    // A gate must not hold because nothing could have closed it.
    let undecided = |effect: &Effect| !gates.is_empty() && !can_decide(comparison, effect);
    let lost = comparison.cells.iter().any(|cell| cell.effect.ratio.is_none() || undecided(&cell.effect));
    let closed = effects().any(|effect| gates.iter().any(|gate| gate.closes(effect)));
    if lost || closed { Outcome::SomeCellsFailed } else { Outcome::Complete }
}

/// A side that is a saved result: a file, or a folder with a result in it. A TOML file is settings.
fn saved_path(given: &str) -> Option<&Path> {
    let path = Path::new(given);
    let ending = |wanted: &str| path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case(wanted));
    (ending("json") || path.is_dir() || (path.is_file() && !ending("toml"))).then_some(path)
}

/// The results of a side: a file, that of a folder, or those of the folders in it.
fn processes(path: &Path) -> anyhow::Result<Vec<PathBuf>> {
    if !path.is_dir() {
        return Ok(vec![path.to_path_buf()]);
    }
    if let Some(file) = result_in(path) {
        return Ok(vec![file]);
    }
    let entries = || path.read_dir()?.collect::<std::io::Result<Vec<_>>>();
    let folders = entries().with_context(|| format!("cannot read {}", path.display()))?;
    let mut found: Vec<PathBuf> = folders.iter().filter_map(|entry| result_in(&entry.path())).collect();
    found.sort();
    anyhow::ensure!(
        (1..=MAX_A_SIDE).contains(&found.len()),
        "{} has {} with a result: wanted one to {MAX_A_SIDE}, as `hbmark run --out {}/1` writes them",
        path.display(),
        counted(found.len(), "folder"),
        path.display()
    );
    Ok(found)
}

/// Two results of a kind that has no cells timed in blocks: traffic, predictions, other programs.
fn beside(a: &Path, b: &Path) -> anyhow::Result<Option<SideBySide>> {
    let (first, second) = (open(a)?, open(b)?);
    let timed = |opened: &Opened| matches!(opened, Opened::Report(report) if report.kind == ReportKind::Run);
    if timed(&first) && timed(&second) {
        return Ok(None);
    }
    let names =
        [a.display().to_string(), b.display().to_string()].map(|name| hbmark_core::input::plain(&name));
    anyhow::ensure!(
        !matches!((&first, &second), (Opened::Comparison(_), Opened::Comparison(_))),
        "two comparisons have no common sides; `hbmark report FILE` prints each"
    );
    let found = side_by_side([&names[0], &names[1]], &first, &second);
    found.map(Some).with_context(|| format!("{} cannot stand beside {}", names[0], names[1]))
}

/// Runs the rounds; the signal that ended them where too few are complete to judge.
fn live(args: &Args, settings: Settings) -> anyhow::Result<Result<Ran, i32>> {
    let both =
        args.both.as_deref().map_or_else(|| Ok(BTreeMap::new()), |given| overrides("--both", given))?;
    let side = |letter: char, given: &str| -> anyhow::Result<BTreeMap<String, String>> {
        let mut side = both.clone();
        side.extend(overrides(&format!("side {letter}"), given)?);
        Ok(side)
    };
    let (a, b) = (side('A', &args.a)?, side('B', &args.b)?);
    let serves = |side: &BTreeMap<String, String>| side.keys().any(|key| !KEYS.contains(&key.as_str()));
    let sides =
        if serves(&a) || serves(&b) { serving_sides(&a, &b, args)? } else { run_sides(&a, &b, args)? };
    let rounds = usize::try_from(args.rounds.unwrap_or(DEFAULT_ROUNDS as u64))?;
    let least = hbmark_core::stats::least_pairs(settings.alpha);
    anyhow::ensure!(
        rounds >= least || args.protocol == Some(PresetName::Smoke),
        "--rounds {rounds}: fewer than {least} rounds cannot show a difference at the {:.0} % level, however large; ask for {least} or more",
        settings.alpha * 100.0
    );
    let interrupts = Interrupts::listen().context("cannot listen for Ctrl-C")?;
    let claim = args.out.as_deref().map(lock_folder).transpose()?;
    if let Some(out) = &args.out {
        say_replaced(out);
    }
    let folder = args.out.as_ref().map(|out| out.join("processes"));
    if let Some(folder) = &folder {
        prepare_folder(folder, 0)?;
        compare::clear(folder).with_context(|| format!("cannot clear {}", folder.display()))?;
    }
    let launcher = Launcher {
        program: std::env::current_exe().context("cannot find this very program")?,
        command: sides.command,
        a: sides.a,
        b: sides.b,
        folder,
    };
    let mut processes = Processes::new(launcher, interrupts);
    let plan = ComparisonPlan {
        a: described(&args.a, args.both.as_deref()),
        b: described(&args.b, args.both.as_deref()),
        command: command_line(),
        items: sides.items,
        rounds,
        seed: args.seed,
        aa: args.aa,
        settings,
    };
    let mut progress = Progress::new();
    let compared = compare::live(&plan, &mut processes, &mut progress);
    progress.finish();
    match compared {
        Ok(Compared { comparison, stopped }) => Ok(Ok(Ran { comparison, stopped, _claim: claim })),
        Err(error @ CompareError::Stopped { signal, .. }) => {
            say(&error.to_string());
            Ok(Err(signal))
        }
        Err(error) => Err(error.into()),
    }
}

/// Both sides, checked: what is launched, with which arguments, and what of it is compared.
struct Sides {
    command: Launched,
    a: Vec<String>,
    b: Vec<String>,
    items: Vec<ComparedItem>,
}

/// Steps of engines.
fn run_sides(
    a: &BTreeMap<String, String>,
    b: &BTreeMap<String, String>,
    args: &Args,
) -> anyhow::Result<Sides> {
    let a = Configured::new('A', a, args)?;
    let b = Configured::new('B', b, args)?;
    if a.model.architecture != b.model.architecture {
        let line = |side: &Configured| format!("{} ({})", side.model.name, side.model.source_label());
        return Err(CompareError::Models { a: line(&a), b: line(&b) }.into());
    }
    let places = compare::places(&a.steps(), &b.steps())?;
    Ok(Sides {
        command: Launched::Run,
        a: a.arguments,
        b: b.arguments,
        items: places.into_iter().map(ComparedItem::Cell).collect(),
    })
}

/// Served requests.
fn serving_sides(
    a: &BTreeMap<String, String>,
    b: &BTreeMap<String, String>,
    args: &Args,
) -> anyhow::Result<Sides> {
    anyhow::ensure!(
        args.protocol.is_none(),
        "--protocol is of `hbmark run`; of served requests `requests=N` says how many a process measures"
    );
    let arguments = |side: &BTreeMap<String, String>| -> Vec<String> {
        side.iter().map(|(key, value)| format!("--{key}={value}")).collect()
    };
    let (mut of_a, mut of_b) = (arguments(a), arguments(b));
    let config = |letter: char, arguments: &[String]| -> anyhow::Result<ServeConfig> {
        serve::point_config(arguments).with_context(|| format!("side {letter}"))
    };
    let (config_a, config_b) = (config('A', &of_a)?, config('B', &of_b)?);
    let [items, other] = [&config_a, &config_b].map(|config| compare::served_times(config.offered));
    anyhow::ensure!(
        items == other,
        "one side has a rate and the other a closed loop; give both the same load"
    );
    // Each side would go on until it shows something, and they would measure different requests.
    for (config, arguments) in [(&config_a, &mut of_a), (&config_b, &mut of_b)] {
        if config.max_requests > config.requests
            && !arguments.iter().any(|given| given.starts_with("--max-requests="))
        {
            arguments.push(format!("--max-requests={}", config.requests));
        }
    }
    let salted = [&config_a, &config_b].iter().all(|config| config.server.is_some());
    Ok(Sides { command: Launched::Serve { seed: args.seed, salted }, a: of_a, b: of_b, items })
}

/// A side as given, with what both sides share.
fn described(given: &str, both: Option<&str>) -> String {
    match both {
        Some(both) => format!("{given} (both: {both})"),
        None => given.to_owned(),
    }
}

/// A side, checked as `hbmark run` would check it.
struct Configured {
    arguments: Vec<String>,
    config: RunConfig,
    model: OpenModel,
}

impl Configured {
    fn new(side: char, settings: &BTreeMap<String, String>, args: &Args) -> anyhow::Result<Self> {
        let mut arguments = vec!["--seed".to_owned(), args.seed.to_string()];
        match args.protocol.unwrap_or(PresetName::Quick) {
            PresetName::Full => {}
            PresetName::Quick => arguments.push("--quick".into()),
            PresetName::Smoke => arguments.push("--smoke".into()),
        }
        // One argument each: a value that begins with a dash stays a value.
        arguments.extend(settings.iter().map(|(key, value)| format!("--{key}={value}")));
        let config = parse_run(&arguments).with_context(|| format!("side {side}"))?;
        let model = crate::weights::open(&config.model, config.revision.as_deref(), config.seed)
            .with_context(|| format!("side {side}"))?;
        for series in engine_run::all(&config, &model) {
            crate::engine::capabilities(&series.engine, &model, series.dtype, config.device)
                .with_context(|| format!("side {side}"))?;
            let (dtype, asked) = (series.dtype, config.device_options.kv_dtype);
            crate::engine::check_kv_dtype(&series.engine, &model, dtype, config.device, asked)
                .with_context(|| format!("side {side}"))?;
        }
        Ok(Self { arguments, config, model })
    }

    /// The cells that `hbmark run` would measure.
    fn steps(&self) -> Vec<PlacedStep> {
        let of = |run: EngineRun| {
            let cells = run.cells(&self.config).into_iter();
            let series = EngineVariant { engine: run.engine, dtype: run.dtype };
            cells.map(move |cell| (series.clone(), (cell.phase, cell.batch, cell.context)))
        };
        engine_run::all(&self.config, &self.model).into_iter().flat_map(of).collect()
    }
}

/// The configuration that `hbmark run` makes of the same arguments.
fn parse_run(arguments: &[String]) -> anyhow::Result<RunConfig> {
    let command = <run::Args as ClapArgs>::augment_args(clap::Command::new("run").no_binary_name(true));
    let matches = command.try_get_matches_from(arguments).map_err(|error| first_line(&error))?;
    run::Args::from_arg_matches(&matches).map_err(|error| first_line(&error))?.config()
}

/// The settings of a side: TOML files and `key=value`, separated by blanks, the later winning.
fn overrides(whose: &str, given: &str) -> anyhow::Result<BTreeMap<String, String>> {
    let mut settings = BTreeMap::new();
    for word in given.split_whitespace() {
        let is_file = Path::new(word).extension().is_some_and(|ending| ending.eq_ignore_ascii_case("toml"));
        match word.split_once('=') {
            Some((key, value)) => {
                settings.insert(known_key(whose, key)?, value.to_owned());
            }
            None if is_file => settings.extend(file(whose, Path::new(word))?),
            None => anyhow::bail!(
                "{whose}: `{word}` is neither key=value, nor a .toml file, nor a saved result (.json or a folder)"
            ),
        }
    }
    Ok(settings)
}

fn known_key(whose: &str, key: &str) -> anyhow::Result<String> {
    let key = key.trim_start_matches("--").replace('_', "-");
    anyhow::ensure!(
        KEYS.contains(&key.as_str()) || serve::is_setting(&key),
        "{whose}: `{key}` is not a setting of a side; there are: {}; and the flags of `hbmark serve`",
        KEYS.join(", ")
    );
    Ok(key)
}

/// A page of settings.
const MAX_SIDE_BYTES: u64 = 256 << 10;

/// The settings in a TOML file: strings, numbers, or lists of them.
fn file(whose: &str, path: &Path) -> anyhow::Result<BTreeMap<String, String>> {
    let text = hbmark_core::input::read_text(path, MAX_SIDE_BYTES)
        .with_context(|| format!("{whose}: cannot read {}", path.display()))?;
    let table: toml::Table =
        text.parse().with_context(|| format!("{whose}: {} is not TOML", path.display()))?;
    let scalar = |value: &toml::Value| match value {
        toml::Value::String(text) => Some(text.clone()),
        toml::Value::Integer(number) => Some(number.to_string()),
        _ => None,
    };
    let mut settings = BTreeMap::new();
    for (key, value) in &table {
        let text = match value {
            toml::Value::Array(values) => {
                values.iter().map(scalar).collect::<Option<Vec<_>>>().map(|values| values.join(","))
            }
            other => scalar(other),
        };
        let text = text.with_context(|| {
            format!("{whose}: `{key}` in {}: wanted text, a number or a list of them", path.display())
        })?;
        settings.insert(known_key(whose, key)?, text);
    }
    Ok(settings)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_side_is_settings_and_files_and_the_later_wins() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("base.toml");
        std::fs::write(&path, "engine = \"native\"\nbatch = [1, 4]\nthreads = 2\n").unwrap();
        let found = overrides("side A", &format!("threads=4 {} dtype=int8", path.display())).unwrap();
        let pairs: Vec<(&str, &str)> = found.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
        assert_eq!(pairs, [("batch", "1,4"), ("dtype", "int8"), ("engine", "native"), ("threads", "2")]);
    }

    #[test]
    fn gates_close_on_their_verdict_from_their_size_on() {
        let found = |verdict, ratio| Effect { rounds: 12, ratio: Some(ratio), verdict, ..Effect::unknown() };
        let gate = parse_gate("slower:2%").unwrap();
        assert!(gate.closes(&found(ComparisonVerdict::Slower, 1.03)));
        assert!(!gate.closes(&found(ComparisonVerdict::Slower, 1.01)));
        assert!(!gate.closes(&found(ComparisonVerdict::Inconclusive, 1.5)));
        assert!(!gate.closes(&found(ComparisonVerdict::Faster, 0.5)));
        assert!(parse_gate("faster").unwrap().closes(&found(ComparisonVerdict::Faster, 0.999)));
        assert!(parse_gate("inconclusive").unwrap().closes(&found(ComparisonVerdict::Inconclusive, 1.0)));
        assert_eq!(parse_percent("0.5%"), Ok(0.005));
        assert!(parse_percent("0.75").unwrap_err().contains("write 0.75% or 75%"));
        for wrong in ["slow", "slower:", "slower:x", "slower:-1%", "inconclusive:2%", "slower:NaN"] {
            assert!(parse_gate(wrong).is_err(), "{wrong}");
        }
    }
}
