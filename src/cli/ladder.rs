//! `hbmark ladder`.

use std::path::PathBuf;

use anyhow::{Context, bail, ensure};
use clap::Args as ClapArgs;

use super::benchmark::command_line;
use super::import::OverrideArgs;
use super::{Outcome, print_result};
use crate::weights;
use hbmark_core::ledger::devices;
use hbmark_core::model::presets;
use hbmark_core::result::{CellName, CellResult, DeviceSpec, Report};
use hbmark_report::analysis::import::{self, Placement, UserOverrides};
use hbmark_report::analysis::{opened, with_external};
use hbmark_report::output::Format;

#[derive(Debug, ClapArgs)]
#[command(
    after_help = "Examples:\n  hbmark ladder --cell decode/native/bf16/b1/c1024 --result results/8b/result.json --external vllm.json --row c1\n  hbmark ladder --cell decode/ideal/bf16/b1/c1024 --model Llama-3.1-8B --gpu h100-pcie --dtype bf16 --external vllm.json\n\nWithout --result the ladder stands on the data sheet alone."
)]
pub struct Args {
    /// The cell: `decode/ENGINE/DTYPE/bBATCH/cCONTEXT`, as results name it.
    #[arg(long)]
    cell: String,
    /// A result.json of `hbmark run` that has the cell.
    #[arg(long)]
    result: Option<PathBuf>,
    /// A result of another program.
    #[arg(long, required = true)]
    external: PathBuf,
    /// Which of its rows: part of the row's name, as `hbmark import` prints it.
    #[arg(long)]
    row: Option<String>,
    /// The external result ran the same model on the same device as --result: you say so. What --model and --gpu say goes before it.
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
    let ladder = if let Some(path) = &args.result {
        let report = opened::report(path)?;
        let device = device_of(&report);
        let opened = args.said.model()?;
        let mut given = args.said.given(opened.as_ref())?;
        if args.same {
            if given.model.is_none() {
                given.model = Some(&report.model.architecture);
                given.model_name = Some(&report.model.name);
            }
            given.gpu = given.gpu.or(device.as_ref());
            ensure!(given.gpu.is_some(), "{} has neither a data sheet nor measured ceilings", path.display());
        }
        let external = one_row(args, &cell, &given)?;
        if !args.same {
            same_machine(&report, &external)?;
        }
        with_external(&report, &args.cell, &[external.cell])?
    } else {
        let opened = args.said.model()?;
        let external = one_row(args, &cell, &args.said.given(opened.as_ref())?)?;
        let report = predicted(args, &cell, &external)?;
        let id = report.cells.first().map(|c| c.id.clone()).unwrap_or_default();
        with_external(&report, &id, &[external.cell])?
    };
    print_result(&ladder, args.format)?;
    Ok(Outcome::Complete)
}

/// The one row of the external file that is meant.
fn one_row(args: &Args, cell: &CellName, given: &UserOverrides<'_>) -> anyhow::Result<Placement> {
    let file = args.external.display();
    let mut placed: Vec<(String, Placement)> = Vec::new();
    let mut refused: Vec<String> = Vec::new();
    let wanted = |label: &str| args.row.as_ref().is_none_or(|part| label.contains(part.as_str()));
    for result in import::read(&args.external)? {
        for row in result.rows.iter().filter(|row| wanted(&row.label)) {
            match import::place(row, result.format, given).placed() {
                Ok(placement) => placed.push((row.label.clone(), *placement)),
                Err(why) => refused.push(format!("{}: {why}", row.label)),
            }
        }
    }
    // Of several rows the one of the cell's batch is meant, if there is one of it alone.
    let alike = |p: &Placement| p.cell.batch == cell.batch;
    if placed.len() > 1 && placed.iter().filter(|(_, p)| alike(p)).count() == 1 {
        placed.retain(|(_, p)| alike(p));
    }
    match placed.len() {
        1 => Ok(placed.swap_remove(0).1),
        0 if refused.is_empty() => {
            bail!("{file} has no row with `{}`", args.row.as_deref().unwrap_or_default())
        }
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
fn predicted(args: &Args, cell: &CellName, external: &Placement) -> anyhow::Result<Report> {
    let named = match &args.said.model {
        Some(name) => name.clone(),
        // The row was placed without the flag, so its own name is that of a shape.
        None => import::read(&args.external)?
            .iter()
            .flat_map(|result| &result.rows)
            .find_map(|row| Some(presets::find(row.setup.model.as_deref()?)?.name.to_owned()))
            .context("say which model with --model")?,
    };
    let question = crate::run::predict::Question {
        device: import::placement::times(devices::find(&external.device)?, external.gpus),
        dtypes: vec![cell.dtype],
        kv_dtype: args.said.kv_dtype.or(Some(external.cell.kv_dtype)),
        phases: vec![cell.phase],
        batches: vec![cell.batch],
        contexts: vec![cell.context],
    };
    let model = weights::open_shape(&named, None)?;
    let report = crate::run::predict::report(&model, &question, &command_line())?;
    let skipped = |c: &CellResult| c.reason.clone().filter(|_| c.predicted_ns.is_none());
    if let Some(reason) = report.cells.first().and_then(skipped) {
        bail!("{} cannot be predicted: {reason}", args.cell);
    }
    Ok(report)
}
