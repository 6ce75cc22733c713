//! `hbmark ladder`.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use clap::Args as ClapArgs;

use super::benchmark::command_line;
use super::import::OverrideArgs;
use super::progress::Progress;
use super::{Outcome, print_result, say_doubt, serve};
use crate::serve::LocalEngine;
use crate::weights;
use crate::worker::InProcess;
use hbmark_core::ledger::devices;
use hbmark_core::model::{Dtype, presets};
use hbmark_core::result::serving::ServeReport;
use hbmark_core::result::{CellName, CellResult, DeviceSpec, Report};
use hbmark_report::analysis::import::{self, ForeignFormat, ForeignResult, Placement, UserOverrides};
use hbmark_report::analysis::{opened, with_external};
use hbmark_report::output::Format;

#[derive(Debug, ClapArgs)]
#[command(
    after_help = "Examples:\n  hbmark ladder --cell decode/native/bf16/b1/c1024 --result results/8b/result.json --external vllm.json --model Llama-3.1-8B --gpu h200 --dtype bf16 --row c1\n  hbmark ladder --cell decode/ideal/bf16/b1/c1024 --model Llama-3.1-8B --gpu h100-pcie --dtype bf16 --external vllm.json\n\n  hbmark ladder --cell decode/native/bf16/b8/c1024 --model Llama-3.1-8B --gpu h200 --dtype bf16 --url http://localhost:8000\n\nWithout --result the ladder stands on the data sheet alone."
)]
pub struct Args {
    /// The cell: `decode/ENGINE/DTYPE/bBATCH/cCONTEXT`, as results name it.
    #[arg(long)]
    cell: String,
    /// A result.json of `hbmark run` that has the cell.
    #[arg(long)]
    result: Option<PathBuf>,
    /// A result of another program, or of `hbmark serve`; each is a rung.
    #[arg(long, required_unless_present = "url")]
    external: Vec<PathBuf>,
    /// Measure the live server at this URL now: as many requests at a time as the cell's batch, around its context.
    #[arg(long)]
    url: Option<String>,
    /// Which row of a file with several: part of the row's name, as `hbmark import` prints it.
    #[arg(long)]
    row: Option<String>,
    /// Assert that the external result ran the model and the device of --result; --model and --gpu take precedence.
    #[arg(long, requires = "result")]
    same: bool,
    #[command(flatten)]
    said: OverrideArgs,
    /// What to print on stdout.
    #[arg(long, value_enum, default_value = "table")]
    format: Format,
}

pub fn execute(args: &Args) -> anyhow::Result<Outcome> {
    let cell: CellName = args.cell.parse()?;
    // What is wrong with the flags is said before a server is measured.
    let own = args.result.as_ref().map(|path| opened::report(path)).transpose()?;
    let opened = args.said.model()?;
    let mut given = args.said.given(opened.as_ref())?;
    let sources = sources(args, &cell)?;
    let ladder = if let Some((path, report)) = args.result.as_ref().zip(own) {
        let device = device_of(&report);
        if args.same {
            assert_same(&mut given, &report, device.as_ref(), path)?;
        }
        let mut externals = placements(args, &sources, &cell, &given)?;
        if args.same {
            for external in &mut externals {
                bytes_of_the_file(&mut external.cell, &report);
            }
        } else {
            externals.iter().try_for_each(|external| same_machine(&report, external))?;
        }
        with_external(&report, &args.cell, &cells(externals))?
    } else {
        let externals = placements(args, &sources, &cell, &given)?;
        let report = predicted(args, &cell, &sources, &externals)?;
        let id = report.cells.first().map(|c| c.id.clone()).unwrap_or_default();
        with_external(&report, &id, &cells(externals))?
    };
    print_result(&ladder, args.format)?;
    Ok(Outcome::Complete)
}

/// Of a GGUF file's own mixture only a run of it knows the bytes: a row of the same model at the same load moves those of its cell.
fn bytes_of_the_file(external: &mut CellResult, report: &Report) {
    let load = |cell: &CellResult| (cell.phase, cell.batch, cell.context, cell.dtype);
    let own = report.cells.iter().find(|own| own.dtype == Dtype::Gguf && load(own) == load(external));
    if let Some(own) = own {
        (external.bytes, external.flops) = (own.bytes, own.flops);
    }
}

fn cells(externals: Vec<Placement>) -> Vec<CellResult> {
    externals.into_iter().map(|external| external.cell).collect()
}

/// A file, or a server that was just measured.
struct Source {
    name: String,
    results: Vec<ForeignResult>,
}

fn sources(args: &Args, cell: &CellName) -> anyhow::Result<Vec<Source>> {
    let files = args.external.iter().map(|path| -> anyhow::Result<Source> {
        Ok(Source { name: path.display().to_string(), results: opened::rows(path)? })
    });
    let mut sources: Vec<Source> = files.collect::<anyhow::Result<_>>()?;
    if let Some(url) = &args.url {
        let report = measured(url, cell)?;
        sources.push(Source { name: url.clone(), results: vec![import::of_serving(&report, url)] });
    }
    Ok(sources)
}

/// Tokens of an output of a measured server, and requests for each one in flight.
const OUTPUT_TOKENS: usize = 128;
const REQUESTS_EACH: usize = 8;

/// The server under a closed loop that holds the cell's batch, at contexts whose mean is the cell's.
fn measured(url: &str, cell: &CellName) -> anyhow::Result<ServeReport> {
    ensure!(cell.context >= 4, "a context of {} leaves no room for a prompt and an output", cell.context);
    let output = OUTPUT_TOKENS.min(cell.context / 2);
    let input = cell.context - output / 2;
    let arguments = [
        format!("--url={url}"),
        format!("--concurrency={}", cell.batch),
        format!("--input-len={input}"),
        format!("--output-len={output}"),
        format!("--requests={}", (REQUESTS_EACH * cell.batch).max(32)),
        "--metrics-interval=0.1".to_owned(),
    ];
    let config = serve::point_config(&arguments)?;
    let mut worker = InProcess::new(LocalEngine::new(&config, None));
    let mut progress = Progress::new();
    let finished = crate::serve::benchmark(&mut worker, &config, None, &command_line(), &mut progress);
    progress.finish();
    Ok(finished?.report)
}

/// The rows that are meant, of every source.
fn placements(
    args: &Args,
    sources: &[Source],
    cell: &CellName,
    given: &UserOverrides<'_>,
) -> anyhow::Result<Vec<Placement>> {
    let mut all = Vec::new();
    for source in sources {
        all.extend(rows_of(args.row.as_deref(), source, cell, given)?);
    }
    Ok(all)
}

/// The one row of a file that is meant; of one of ours also that of the server's steps, which goes before it.
fn rows_of(
    part: Option<&str>,
    source: &Source,
    cell: &CellName,
    given: &UserOverrides<'_>,
) -> anyhow::Result<Vec<Placement>> {
    let file = &source.name;
    let mut placed: Vec<(String, Placement)> = Vec::new();
    let mut refused: Vec<String> = Vec::new();
    let wanted = |label: &str| part.is_none_or(|part| label.contains(part));
    let ours = source.results.iter().all(|result| result.format == ForeignFormat::HbmarkServe);
    for result in &source.results {
        for row in result.rows.iter().filter(|row| wanted(&row.label)) {
            match import::place(row, result.format, given).placed() {
                Ok(placement) => placed.push((row.label.clone(), *placement)),
                Err(why) => refused.push(format!("{}: {why}", row.label)),
            }
        }
    }
    // Of several rows the one of the cell's batch is meant, if there is one of it alone.
    let alike = |p: &Placement| p.cell.batch == cell.batch;
    if !ours && placed.len() > 1 && placed.iter().filter(|(_, p)| alike(p)).count() == 1 {
        placed.retain(|(_, p)| alike(p));
    }
    // A point and the steps of its server.
    let one_point = ours && placed.len() == 2 && placed[1].0.starts_with(&placed[0].0);
    match placed.len() {
        1 => Ok(vec![placed.swap_remove(0).1]),
        2 if one_point => Ok(placed.into_iter().rev().map(|(_, placement)| placement).collect()),
        0 if refused.is_empty() => bail!("{file} has no row with `{}`", part.unwrap_or_default()),
        0 => {
            bail!(
                "no row of {file} can be compared on the ladder: {}",
                refused[..refused.len().min(3)].join("; ")
            )
        }
        _ => {
            let names: Vec<&str> = placed.iter().map(|(label, _)| label.as_str()).take(12).collect();
            bail!("{file} has several rows; name one with --row: {}", names.join(", "))
        }
    }
}

/// What a result's cells were held against, as a data sheet: the real one, or the ceilings of the run.
pub(super) fn device_of(report: &Report) -> Option<DeviceSpec> {
    report.datasheet.clone().or_else(|| {
        let ceilings = report.ceilings.as_ref()?;
        let name = report.environment.cpu.model.clone().unwrap_or_else(|| "this device".to_owned());
        Some(DeviceSpec {
            product: name.clone(),
            name,
            bandwidth_bytes_per_s: ceilings.read_bytes_per_s.median,
            memory_bytes: report.environment.device_memory().unwrap_or_default(),
            l2_bytes: ceilings.last_cache_bytes,
            dense_flops_per_s: ceilings.gemm_flops_per_s.iter().map(|(k, v)| (k.clone(), v.median)).collect(),
            source: "measured in the run".to_owned(),
        })
    })
}

/// Takes the model and the device of a result where none are given.
pub(super) fn assert_same<'a>(
    given: &mut UserOverrides<'a>,
    report: &'a Report,
    device: Option<&'a DeviceSpec>,
    path: &Path,
) -> anyhow::Result<()> {
    if given.model.is_none() {
        given.model = Some(&report.model.architecture);
        given.model_name = Some(&report.model.name);
    }
    given.gpu = given.gpu.or(device);
    ensure!(given.gpu.is_some(), "{} has neither a data sheet nor measured ceilings", path.display());
    Ok(())
}

/// Refuses to stack times of different machines or models on one ladder.
pub(super) fn same_machine(report: &Report, external: &Placement) -> anyhow::Result<()> {
    let ours = report.datasheet.as_ref().map_or("a device without a data sheet", |d| d.name.as_str());
    ensure!(
        ours == external.device && external.gpus == 1,
        "the cell ran on {ours} and the external result on {} x {}: a ladder needs one device (--same if it was)",
        external.gpus,
        external.device
    );
    Ok(())
}

/// The cell as a data sheet predicts it.
fn predicted(
    args: &Args,
    cell: &CellName,
    sources: &[Source],
    externals: &[Placement],
) -> anyhow::Result<Report> {
    let external = externals.first().context("no rung was found")?;
    let named = match &args.said.model {
        Some(name) => name.clone(),
        // The row was placed without the flag, so its own name is that of a shape.
        None => sources
            .iter()
            .flat_map(|source| &source.results)
            .flat_map(|result| &result.rows)
            .find_map(|row| Some(presets::find(row.setup.model.as_deref()?)?.name.to_owned()))
            .context("say which model with --model")?,
    };
    let device = match &args.said.gpu {
        Some(said) => said,
        None => devices::find(&external.device)?,
    };
    let question = crate::run::predict::Question {
        device: import::placement::times(device, external.gpus),
        dtypes: vec![cell.dtype],
        kv_dtype: args.said.kv_dtype.or(Some(external.cell.kv_dtype)),
        phases: vec![cell.phase],
        batches: vec![cell.batch],
        contexts: vec![cell.context],
        routing: hbmark_core::ledger::ExpertRouting::Uniform,
        group: None,
    };
    let model = weights::open_shape(&named, None)?;
    say_doubt(&model);
    let report = crate::run::predict::report(&model, &question, &command_line())?;
    let skipped = |c: &CellResult| c.reason.clone().filter(|_| c.predicted_ns.is_none());
    if let Some(reason) = report.cells.first().and_then(skipped) {
        bail!("{} cannot be predicted: {reason}", args.cell);
    }
    Ok(report)
}
