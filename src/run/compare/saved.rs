//! Two saved results beside each other, and what they cannot prove.

use std::path::Path;

use super::matching::{self, places, steps_of};
use super::{CompareError, SideResult};
use hbmark_core::result::comparison::{
    COMPARISON_VERSION, CellComparison, ComparedCell, ComparedItem, Comparison, ComparisonKind,
    ComparisonVerdict, Effect, Method, Pair, Settings,
};
use hbmark_core::result::{CellResult, Report, ReportKind, block_means, judged_times};
use hbmark_core::stats;
use hbmark_report::analysis::compare::ONE_PROCESS;
use hbmark_report::analysis::opened;

/// Compares two results that were saved before.
///
/// # Errors
/// When a file is not a measured result, the models or the grids differ, or it is open which series stand against each other.
pub fn saved(a: &Path, b: &Path, command: &str, settings: Settings) -> Result<Comparison, CompareError> {
    let (given_a, given_b) = (a.display().to_string(), b.display().to_string());
    let (a, b) = (read(a)?, read(b)?);
    let sides = [&a, &b].map(|report| SideResult::Steps(Box::new(report.clone())));
    sides[0].check_against(&sides[1])?;
    let found = places(&steps_of(&a), &steps_of(&b))?;
    let mut remarks = Vec::new();
    let mut cells = Vec::with_capacity(found.len());
    for place in found {
        let cell = |side: char, report: &'_ Report, id: String| -> Result<CellResult, CompareError> {
            let found = report.cells.iter().find(|cell| cell.id == id).cloned();
            found.ok_or(CompareError::CellMissing { side, id })
        };
        let of_a = cell('A', &a, place.id_of_a())?;
        let of_b = cell('B', &b, place.id_of_b())?;
        cells.push(compare(place, &of_a, &of_b, &settings, &mut remarks));
    }
    Ok(Comparison {
        schema_version: COMPARISON_VERSION,
        kind: ComparisonKind::Comparison,
        method: Method::SavedResults,
        command: command.to_owned(),
        started_at: None,
        model: sides[0].model_line(&sides[1]),
        machine: sides[0].machine_line(),
        protocol: sides[0].protocol().map(str::to_owned),
        differences: sides[0].differences(&sides[1]),
        a: sides[0].arm(&given_a),
        b: sides[1].arm(&given_b),
        rounds: None,
        seed: None,
        order: Vec::new(),
        settings,
        floor: None,
        overall: None,
        cells,
        remarks,
        limits: limits(&a, &b),
    })
}

/// A result, from its file or from the folder that `run --out` wrote.
fn read(path: &Path) -> Result<Report, CompareError> {
    let file = if path.is_dir() { path.join("result.json") } else { path.to_path_buf() };
    let report = opened::report(&file)?;
    if report.kind == ReportKind::Predict {
        return Err(CompareError::NotMeasured { path: file });
    }
    Ok(report)
}

/// One process a side is one unit a side: there is a ratio, and the spread within each process, but no test.
fn compare(
    place: ComparedCell,
    a: &CellResult,
    b: &CellResult,
    settings: &Settings,
    remarks: &mut Vec<String>,
) -> CellComparison {
    let means = |cell: &CellResult| {
        block_means(&cell.blocks, cell.block_merge, |block| judged_times(cell.phase, block))
    };
    // The time that the cell itself stands for, of which the interval below is the spread.
    let mut time = |side: char, cell: &CellResult| match matching::typical(cell) {
        Ok(_) => Some(stats::geometric_mean(&means(cell))),
        Err(reason) => {
            remarks.push(format!("{side}: {}: {reason}", cell.id));
            None
        }
    };
    let pair = Pair { a_ns: time('A', a), b_ns: time('B', b) };
    let ratio = pair.a_ns.zip(pair.b_ns).filter(|(a, _)| *a > 0.0).map(|(a, b)| b / a);
    let within = ratio.and_then(|_| stats::unpaired_ratio(&means(a), &means(b), settings.confidence));
    let effect = Effect {
        rounds: usize::from(ratio.is_some()),
        a_ns: pair.a_ns,
        b_ns: pair.b_ns,
        ratio,
        low: within.map(|i| i.low),
        high: within.map(|i| i.high),
        p: None,
        p_exact: None,
        p_adjusted: None,
        minimum_detectable: None,
        floor: None,
        verdict: ComparisonVerdict::Inconclusive,
        reason: ONE_PROCESS.into(),
    };
    CellComparison { place: ComparedItem::Cell(place), pairs: vec![pair], effect }
}

/// What two saved results leave open, said plainly.
fn limits(a: &Report, b: &Report) -> Vec<String> {
    let when = |report: &Report| report.started_at.clone().unwrap_or_else(|| "an unknown time".into());
    let mut limits = vec![
        "one process a side: what each happened to get (its place in memory, its order of allocation) is in the ratio, and the \
         interval is of the spread within these two processes alone"
            .to_owned(),
        format!(
            "not paired: whatever changed on the machine between {} and {} is in the ratio",
            when(a),
            when(b)
        ),
        "no random order: an effect of going first or second cannot be told from one of the configuration".to_owned(),
        "hence no p and no verdict; `hbmark compare` with two configurations runs them in paired rounds".to_owned(),
    ];
    let (here, there) = (&a.environment, &b.environment);
    let gpu = |report: &Report| report.environment.gpu.as_ref().and_then(|gpu| gpu.uuid.clone());
    let protocol = |report: &Report| report.protocol.as_ref().map(|p| p.name.clone());
    for (differs, what) in [
        (here.hostname != there.hostname, "machines"),
        (here.cpu.model != there.cpu.model, "CPU models"),
        (gpu(a) != gpu(b), "GPUs: identical products alone differ by 8 % on average"),
        (here.build != there.build, "builds of hbmark"),
        (protocol(a) != protocol(b), "protocols"),
    ] {
        if differs {
            limits.push(format!("the results are from different {what}"));
        }
    }
    limits
}

#[cfg(test)]
mod tests {
    use super::*;
    use hbmark_core::result::Block;
    use hbmark_core::result::GpuEnvironment;
    use hbmark_core::result::saved;

    #[test]
    fn a_ratio_lies_in_its_own_interval() {
        let mut a = saved::parse(include_str!("../../../fuzz/seeds/result.json")).unwrap();
        let scaled = |block: &Block, factor: f64| {
            let mut block = block.clone();
            block.step_ns.iter_mut().chain(&mut block.interval_ns).for_each(|time| *time *= factor);
            block
        };
        for cell in &mut a.cells {
            let Some(one) = cell.blocks.first().cloned() else { continue };
            cell.blocks = (0..6).map(|turn| scaled(&one, 1.0 + 0.01 * f64::from(turn))).collect();
        }
        let mut b = a.clone();
        for (turn, block) in b.cells.iter_mut().flat_map(|cell| &mut cell.blocks).enumerate() {
            // Every third block of B was hit by something: its mean and its median part.
            *block = scaled(block, if turn % 3 == 0 { 3.0 } else { 1.0 });
        }
        hbmark_report::analysis::judge::recompute(&mut a);
        hbmark_report::analysis::judge::recompute(&mut b);
        let found = places(&steps_of(&a), &steps_of(&b)).unwrap();
        let mut intervals = 0;
        for place in found {
            let of = |report: &Report, id: String| {
                report.cells.iter().find(|cell| cell.id == id).cloned().unwrap()
            };
            let (old, new) = (&of(&a, place.id_of_a()), &of(&b, place.id_of_b()));
            let effect = compare(place, old, new, &Settings::new(0.02, 1), &mut Vec::new()).effect;
            if let (Some(ratio), Some(low), Some(high)) = (effect.ratio, effect.low, effect.high) {
                assert!(low <= ratio && ratio <= high, "{ratio} of {low} to {high}");
                let time =
                    |cell: &CellResult| cell.tpot_ns.or(cell.step_ns.as_ref().unwrap().typical).unwrap();
                assert!(
                    (effect.a_ns.unwrap() / time(old) - 1.0).abs() < 1e-9,
                    "the time that the cell stands for"
                );
                intervals += 1;
            }
        }
        assert!(intervals > 0);
    }

    #[test]
    fn results_of_two_gpus_are_compared_with_a_warning() {
        let on = |uuid: &str| {
            let mut report = saved::parse(include_str!("../../../fuzz/seeds/result.json")).unwrap();
            report.environment.gpu =
                Some(GpuEnvironment { uuid: Some(uuid.into()), ..GpuEnvironment::default() });
            report
        };
        let of_gpus = |limits: &[String]| limits.iter().any(|limit| limit.contains("different GPUs"));
        assert!(of_gpus(&limits(&on("GPU-1"), &on("GPU-2"))));
        assert!(!of_gpus(&limits(&on("GPU-1"), &on("GPU-1"))));
    }
}
