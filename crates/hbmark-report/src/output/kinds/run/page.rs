//! The page of a run: the tables of its document with plots between them, and what it takes to run it again.

use super::palette::Palette;
use super::{batch, blocks, context, group, roofline, telemetry, waterfall};
use super::{
    ceiling_doubt, cold, copy_above_read, crossover_line, device_line, fit_line, notes, of_cells, parameters,
    protocol_line, read_ceiling, remarks, when_measured,
};
use crate::analysis::speculation::{Drafting, speculation as speculate};
use crate::analysis::words::counted;
use crate::output::External;
use crate::output::document::{Block, Document, Line, Tone, facts};
use crate::output::kinds::breakdown::operations;
use crate::output::kinds::provenance::{self, flat, pairs};
use crate::output::kinds::{headline, speculation};
use crate::output::metrics::Unit;
use crate::output::text::single;
use hbmark_core::result::{Ceilings, Phase, Report, ReportKind, Status};
use hbmark_core::units::{BytesPerSecond, FlopsPerSecond};

/// The page, with other programs' decodes on its roofline.
pub fn page(report: &Report, externals: &[External]) -> Document {
    let palette = Palette::of(report);
    let taken = blocks::taken(report);
    // A prediction has no measured steps to break down, no blocks and no telemetry.
    let measured = report.kind != ReportKind::Predict;
    let mut page = Document::new(headline::run_title(report));
    page.figures(headline::run(report));
    page.lines(header(report));
    findings(&mut page, report);
    page.anchored("roofline", "Roofline");
    page.blocks.push(roofline::plot(report, &palette, externals));
    if measured {
        page.anchored("ladder", "Where the time of a step goes");
        page.blocks.push(waterfall::plot(report, &palette));
    }
    page.anchored("context", "TPOT against context");
    page.blocks.push(context::plot(report, &palette));
    page.anchored("batch", "TPOT and throughput against batch");
    page.blocks.push(batch::plot(report, &palette));
    speculation::push_plot(&mut page, &speculate(report, Drafting::Free, None));
    all_cells(&mut page, report);
    group::push(&mut page, report);
    all_operations(&mut page, report);
    if measured {
        page.anchored("blocks", "Blocks over the run");
        page.blocks.push(blocks::plot(&palette, &taken));
        page.anchored("telemetry", "Clocks, power, temperature and load");
        page.blocks.push(telemetry::plot(&taken));
    }
    if !report.cold.is_empty() {
        page.anchored("cold", "Cold, once per process");
        page.table(cold(report));
    }
    let protocol = report.protocol.as_ref().map(|protocol| pairs("Protocol", flat(protocol)));
    provenance::rerun(
        &mut page,
        &report.command,
        &report.environment,
        &report.config,
        Some(&report.model),
        protocol,
    );
    provenance::environment(
        &mut page,
        &report.environment,
        report.ceilings.as_ref().map(ceilings),
        report.datasheet.as_ref(),
        &report.capabilities,
    );
    page
}

fn header(report: &Report) -> Vec<Line> {
    let model = &report.model;
    let mut lines = vec![format!(
        "{} · {} parameters · {} of weights",
        model.source,
        parameters(model.parameters),
        model.weight_bytes
    )];
    lines.extend(model.architecture.stack.as_ref().map(|stack| format!("layers: {stack}")));
    lines.extend(device_line(report));
    if let Some(c) = &report.ceilings {
        lines.push(format!("read ceiling measured {}: {}", when_measured(c), read_ceiling(c)));
    }
    lines.extend(report.datasheet.as_ref().map(|sheet| {
        format!("data sheet: {} · {}", sheet.product, BytesPerSecond(sheet.bandwidth_bytes_per_s))
    }));
    lines.extend(report.started_at.iter().map(|at| format!("started {at}")));
    lines.extend(report.ceilings.as_ref().and_then(copy_above_read));
    let doubt = report.ceilings.as_ref().and_then(ceiling_doubt);
    lines
        .into_iter()
        .map(Line::plain)
        .chain(doubt)
        .chain(notes(report))
        .chain(protocol_line(report))
        .collect()
}

/// What was found, the worst first.
fn findings(page: &mut Document, report: &Report) {
    page.anchored("findings", "Findings");
    let measured = report.cells.iter().filter(|c| c.shown_time().is_some()).count();
    let not_ok = report.cells.iter().filter(|c| !matches!(c.status, Status::Ok | Status::Predicted)).count();
    page.lines([Line::plain(match (report.kind, not_ok) {
        (ReportKind::Predict, 0) => {
            format!("{} predicted; nothing was measured.", counted(report.cells.len(), "cell"))
        }
        (ReportKind::Predict, skipped) => {
            let predicted = report.cells.len() - skipped;
            format!("{} predicted and {skipped} skipped; nothing was measured.", counted(predicted, "cell"))
        }
        (_, 0) => format!("{measured} of {} measured, all ok.", counted(report.cells.len(), "cell")),
        (_, bad) => {
            format!("{measured} of {} measured, {bad} not simply ok.", counted(report.cells.len(), "cell"))
        }
    })]);
    let stories = |decode: bool| report.ladders.iter().filter(move |l| (l.phase == Phase::Decode) == decode);
    page.titled_list("About this machine and this run", Tone::Warning, report.warnings.iter().cloned());
    page.titled_list("About these cells", Tone::Warning, remarks(&report.cells));
    let stories = stories(true).chain(stories(false)).map(|ladder| ladder.story.clone());
    page.titled_list("Where the time goes", Tone::Plain, stories);
    page.titled_list("Fitted over the grid", Tone::Plain, report.fits.iter().map(fit_line));
    page.titled_list("Crossovers", Tone::Plain, report.crossovers.iter().map(crossover_line));
}

fn all_cells(page: &mut Document, report: &Report) {
    page.anchored("cells", "Every cell");
    if report.cells.is_empty() {
        page.blocks.push(Block::absent("This result has no cells."));
        return;
    }
    let (constants, columns) = of_cells(&report.cells);
    let constant = || Line::plain(format!("In all cells: {}.", facts(&constants)));
    page.lines((!constants.is_empty()).then(constant));
    page.table(columns);
}

fn all_operations(page: &mut Document, report: &Report) {
    let tables: Vec<Block> = operations(report).into_iter().map(Block::Table).collect();
    let title = match tables.len() {
        0 => return,
        1 => "One step, operation by operation".to_owned(),
        many => format!("{many} steps, operation by operation"),
    };
    page.anchored("operations", "Operations of a step");
    page.lines([Line::plain("From a separate profiling pass, not in the step times.")]);
    page.blocks.push(Block::Fold { title, blocks: tables });
}

fn ceilings(c: &Ceilings) -> Block {
    let rate = |name: &str, rate: f64| (name.to_owned(), BytesPerSecond(rate).to_string());
    let mut rows = vec![
        rate("read", c.read_bytes_per_s.median),
        rate("copy", c.copy_bytes_per_s.median),
        rate("triad", c.triad_bytes_per_s.median),
    ];
    let gemm = c.gemm_flops_per_s.iter();
    rows.extend(gemm.map(|(dtype, peak)| (format!("GEMM {dtype}"), FlopsPerSecond(peak.median).to_string())));
    rows.extend(c.launch_ns.map(|l| ("launch".to_owned(), single(Unit::Nanoseconds, l.median))));
    rows.push(("working set".to_owned(), c.working_set_bytes.to_string()));
    rows.push(("read by".to_owned(), c.read_configuration.clone()));
    pairs(&format!("Ceilings measured {}", when_measured(c)), rows)
}
