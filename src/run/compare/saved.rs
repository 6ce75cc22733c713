//! Saved results: two beside each other, or several processes a side decided, and what they cannot prove.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::matching::{self, NoTime, places, steps_of};
use super::{CompareError, Side, SideResult, failed};
use hbmark_core::result::comparison::{
    COMPARISON_VERSION, CellComparison, ComparedCell, ComparedItem, Comparison, ComparisonKind, Effect,
    Method, Pair, Settings,
};
use hbmark_core::result::{Block, CellResult, Report, ReportKind};
use hbmark_core::stats;
use hbmark_report::analysis::compare::{ONE_PROCESS, OTHER_DEVICES, RAN_ONCE, processes};
use hbmark_report::analysis::opened;

/// Compares results that were saved before: one a side, or several of processes of their own.
///
/// # Errors
/// When a file is not a measured result, the models or the grids differ, it is open which series stand against each other, or a process is
/// given twice.
pub fn saved(
    given: [&Path; 2],
    [a, b]: [&[PathBuf]; 2],
    command: &str,
    settings: Settings,
) -> Result<Comparison, CompareError> {
    let given = given.map(|path| path.display().to_string());
    let load = |paths: &[PathBuf]| -> Result<Vec<SideResult>, CompareError> {
        paths.iter().map(|path| Ok(SideResult::Steps(Box::new(read(path)?)))).collect()
    };
    let sides = [load(a)?, load(b)?];
    let reports = sides.each_ref().map(|side| side.iter().filter_map(SideResult::steps).collect::<Vec<_>>());
    let (Some(first_a), Some(first_b), [of_a, ..], [of_b, ..]) =
        (sides[0].first(), sides[1].first(), &reports[0][..], &reports[1][..])
    else {
        return Err(CompareError::NoRounds);
    };
    first_a.check_against(first_b)?;
    let found = places(&steps_of(of_a), &steps_of(of_b))?;
    let several = a.len() > 1 || b.len() > 1;
    let mut comparison = Comparison {
        schema_version: COMPARISON_VERSION,
        kind: ComparisonKind::Comparison,
        method: if several { Method::SavedProcesses } else { Method::SavedResults },
        command: command.to_owned(),
        started_at: None,
        model: first_a.model_line(first_b),
        machine: first_a.machine_line(),
        protocol: first_a.protocol().map(str::to_owned),
        differences: first_a.differences(first_b),
        a: first_a.arm(&given[0]),
        b: first_b.arm(&given[1]),
        rounds: None,
        seed: None,
        order: Vec::new(),
        settings,
        floor: None,
        overall: None,
        cells: Vec::with_capacity(found.len()),
        read: Vec::new(),
        other_devices: false,
        remarks: Vec::new(),
        limits: Vec::new(),
    };
    if several {
        for (paths, side) in [(a, &sides[0]), (b, &sides[1])] {
            one_configuration(paths, side)?;
        }
        of_processes(&mut comparison, found, [(a, &reports[0]), (b, &reports[1])])?;
    } else {
        for place in found {
            let of_a = cell_of('A', of_a, place.id_of_a())?;
            let of_b = cell_of('B', of_b, place.id_of_b())?;
            comparison.cells.push(compare(place, of_a, of_b, &settings, &mut comparison.remarks));
        }
        comparison.limits = limits(of_a, of_b);
    }
    Ok(comparison)
}

fn cell_of(side: char, report: &Report, id: String) -> Result<&CellResult, CompareError> {
    report.cells.iter().find(|cell| cell.id == id).ok_or(CompareError::CellMissing { side, id })
}

/// The files of a side and what is in them.
type Loaded<'a> = (&'a [PathBuf], &'a [&'a Report]);

/// Decides by processes that were run at other times, and not in pairs.
fn of_processes(
    comparison: &mut Comparison,
    found: Vec<ComparedCell>,
    sides: [Loaded<'_>; 2],
) -> Result<(), CompareError> {
    distinct_processes(&sides)?;
    let reports = sides.map(|(_, reports)| reports);
    let longest = reports[0].len().max(reports[1].len());
    let mut of_cells = Vec::with_capacity(found.len());
    for place in &found {
        let mut pairs = vec![Pair::default(); longest];
        for (side, id) in [(Side::A, place.id_of_a()), (Side::B, place.id_of_b())] {
            let (paths, reports) = sides[usize::from(side == Side::B)];
            for (at, (path, report)) in paths.iter().zip(reports).enumerate() {
                match matching::typical(cell_of(side.letter(), report, id.clone())?) {
                    Ok(time) if side == Side::A => pairs[at].a_ns = Some(time),
                    Ok(time) => pairs[at].b_ns = Some(time),
                    Err(NoTime { reason, own }) => {
                        comparison.remarks.push(format!("{}: {id}: {reason}", path.display()));
                        *failed(&mut pairs[at], side == Side::B) |= own;
                    }
                }
            }
        }
        of_cells.push(pairs);
    }
    let read = |report: &Report| {
        let rates: Vec<f64> = report.cells.iter().filter_map(|cell| cell.read_beside_bytes_per_s).collect();
        (!rates.is_empty()).then(|| 1e18 / stats::geometric_mean(&rates))
    };
    let of = |side: usize, at: usize| reports[side].get(at).copied().and_then(read);
    comparison.read =
        (0..longest).map(|at| Pair { a_ns: of(0, at), b_ns: of(1, at), ..Pair::default() }).collect();
    let mut judged = processes::judge(&of_cells, &comparison.read, &comparison.settings);
    if reports.into_iter().flatten().any(|report| protocol(report).as_deref() == Some("smoke")) {
        comparison.protocol = Some("smoke".to_owned());
        judged.decides_nothing(RAN_ONCE);
    }
    comparison.other_devices = on_other_devices(reports, comparison.settings.alpha);
    if comparison.other_devices {
        judged.decides_nothing(OTHER_DEVICES);
    }
    comparison.overall = judged.overall;
    let decided = found.into_iter().zip(of_cells).zip(judged.cells);
    comparison.cells.extend(decided.map(|((place, pairs), effect)| CellComparison {
        place: ComparedItem::Cell(place),
        pairs,
        effect,
    }));
    comparison.limits = limits_of_processes(reports);
    Ok(())
}

/// Whether no process of one side ran where one of the other did, on fewer devices a side than a test of processes needs: a difference of the devices
/// is then no smaller in one process than in all.
fn on_other_devices(sides: [&[&Report]; 2], alpha: f64) -> bool {
    let devices = sides.map(|reports| {
        let of = |report: &&Report| gpu(report).or(report.environment.hostname.as_ref()).cloned();
        reports.iter().map(of).collect::<Option<BTreeSet<String>>>()
    });
    let [Some(a), Some(b)] = devices else { return false };
    let few = |devices: &BTreeSet<String>| devices.len() < stats::least_a_side(alpha);
    a.is_disjoint(&b) && (few(&a) || few(&b))
}

/// Refuses a side whose processes did not all run the same: they would be taken for the spread of one.
fn one_configuration(paths: &[PathBuf], side: &[SideResult]) -> Result<(), CompareError> {
    for (path, other) in paths.iter().zip(side).skip(1) {
        side[0].check_against(other)?;
        let mut differing = side[0].differences(other);
        differing.retain(|found| !matches!(found.key.as_str(), "note" | "hypothesis"));
        let key = differing.into_iter().next().map(|found| found.key);
        let protocols = side[0].protocol() != other.protocol();
        if let Some(what) = key.or_else(|| protocols.then(|| "protocol".to_owned())) {
            return Err(CompareError::Mixed { first: paths[0].clone(), second: path.clone(), what });
        }
    }
    Ok(())
}

/// Refuses a process that is given twice: it would count as two.
fn distinct_processes(sides: &[Loaded<'_>; 2]) -> Result<(), CompareError> {
    fn blocks(report: &Report) -> impl Iterator<Item = &Block> {
        report.cells.iter().flat_map(|cell| &cell.blocks)
    }
    let all: Vec<(&PathBuf, &Report)> =
        sides.iter().flat_map(|(paths, reports)| paths.iter().zip(reports.iter().copied())).collect();
    for (at, (second, report)) in all.iter().enumerate() {
        let same = |(_, earlier): &&(&PathBuf, &Report)| blocks(earlier).eq(blocks(report));
        if blocks(report).next().is_some()
            && let Some((first, _)) = all[..at].iter().find(same)
        {
            return Err(CompareError::SameProcess { first: (*first).clone(), second: (*second).clone() });
        }
    }
    Ok(())
}

fn read(path: &Path) -> Result<Report, CompareError> {
    let report = opened::report(path)?;
    if report.kind == ReportKind::Predict {
        return Err(CompareError::NotMeasured { path: path.to_path_buf() });
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
    let mut time = |side: char, cell: &CellResult| match matching::typical(cell) {
        Ok(time) => Some(time),
        Err(NoTime { reason, .. }) => {
            remarks.push(format!("{side}: {}: {reason}", cell.id));
            None
        }
    };
    let pair = Pair { a_ns: time('A', a), b_ns: time('B', b), ..Pair::default() };
    let ratio = pair.a_ns.zip(pair.b_ns).filter(|(a, _)| *a > 0.0).map(|(a, b)| b / a);
    let within = ratio
        .and_then(|_| stats::unpaired_ratio(&matching::means(a), &matching::means(b), settings.confidence));
    let effect = Effect {
        rounds: usize::from(ratio.is_some()),
        a_ns: pair.a_ns,
        b_ns: pair.b_ns,
        ratio,
        low: within.map(|i| i.low),
        high: within.map(|i| i.high),
        reason: ONE_PROCESS.into(),
        ..Effect::unknown()
    };
    CellComparison { place: ComparedItem::Cell(place), pairs: vec![pair], effect }
}

fn gpu(report: &Report) -> Option<&String> {
    report.environment.gpu.as_ref().and_then(|gpu| gpu.uuid.as_ref())
}

fn protocol(report: &Report) -> Option<String> {
    report.protocol.as_ref().map(|protocol| protocol.name.clone())
}

fn when(report: &Report) -> String {
    report.started_at.clone().unwrap_or_else(|| "an unknown time".into())
}

/// What two saved results leave open, said plainly.
fn limits(a: &Report, b: &Report) -> Vec<String> {
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
    limits.extend(of_different(&[a, b]));
    limits
}

/// What processes leave open that were not run in pairs.
fn limits_of_processes(sides: [&[&Report]; 2]) -> Vec<String> {
    let span = |reports: &[&Report]| {
        let mut times: Vec<String> = reports.iter().copied().map(when).collect();
        times.sort();
        format!("{} to {}", times[0], times[times.len() - 1])
    };
    let mut limits = vec![
        format!(
            "not in pairs: whatever changed on the machine between the processes of A ({}) and of B ({}) is in the ratio. A verdict \
             lies beyond what the read bandwidth beside the steps leaves open; a clock that changed alone is not seen in it",
            span(sides[0]),
            span(sides[1])
        ),
        "`hbmark compare` with two configurations runs them in paired rounds, which a drift of the machine does not reach".to_owned(),
    ];
    limits.extend(of_different(&sides.concat()));
    limits
}

fn of_different(reports: &[&Report]) -> Vec<String> {
    let differ =
        |same: &dyn Fn(&Report, &Report) -> bool| reports.iter().any(|other| !same(reports[0], other));
    let checks: [(bool, &str); 5] = [
        (differ(&|a, b| a.environment.hostname == b.environment.hostname), "machines"),
        (differ(&|a, b| a.environment.cpu.model == b.environment.cpu.model), "CPU models"),
        (differ(&|a, b| gpu(a) == gpu(b)), "GPUs: identical products alone differ by 8 % on average"),
        (differ(&|a, b| a.environment.build == b.environment.build), "builds of hbmark"),
        (differ(&|a, b| protocol(a) == protocol(b)), "protocols"),
    ];
    let found = checks.into_iter().filter(|(differs, _)| *differs);
    found.map(|(_, what)| format!("the results are from different {what}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use hbmark_core::result::GpuEnvironment;
    use hbmark_core::result::comparison::ComparisonVerdict;
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
    fn saved_processes_are_decided_by_their_times_and_the_memory_beside_them() {
        let template = saved::parse(include_str!("../../../fuzz/seeds/result.json")).unwrap();
        let folder = tempfile::tempdir().unwrap();
        // `time` and `read`: of the template's, in each process a little more.
        let side = |name: &str, time: f64, read: f64| -> Vec<PathBuf> {
            let process = |at: u32| {
                let mut report = template.clone();
                if let Some(protocol) = &mut report.protocol {
                    protocol.name = "quick".to_owned();
                }
                let factor = time * (1.0 + 0.001 * f64::from(at * at));
                for block in report.cells.iter_mut().flat_map(|cell| &mut cell.blocks) {
                    block.step_ns.iter_mut().chain(&mut block.interval_ns).for_each(|time| *time *= factor);
                    block.read_bytes_per_s = Some(1e10 * read * (1.0 + 0.001 * f64::from(at)));
                }
                let path = folder.path().join(format!("{name}-{at}.json"));
                std::fs::write(&path, saved::write(&report).unwrap()).unwrap();
                path
            };
            (1..=5).map(process).collect()
        };
        let decide = |a: &[PathBuf], b: &[PathBuf]| {
            let given = [Path::new("a"), Path::new("b")];
            super::saved(given, [a, b], "hbmark compare a b", Settings::new(0.01, 1))
        };
        let verdicts = |found: &Comparison| -> Vec<ComparisonVerdict> {
            let timed = found.cells.iter().filter(|cell| cell.effect.ratio.is_some());
            timed.map(|cell| cell.effect.verdict).collect()
        };
        let old = side("old", 1.0, 1.0);
        for (name, time, read, wanted) in [
            ("slower", 1.2, 1.0, ComparisonVerdict::Slower),
            ("faster", 0.8, 1.0, ComparisonVerdict::Faster),
            ("machine", 1.2, 0.8, ComparisonVerdict::Inconclusive),
        ] {
            let found = decide(&old, &side(name, time, read)).unwrap();
            let given = verdicts(&found);
            assert!(!given.is_empty() && given.iter().all(|verdict| *verdict == wanted), "{name}: {found:?}");
            assert_eq!((found.method, found.read.len()), (Method::SavedProcesses, 5));
        }
        let error = decide(&old, &old).unwrap_err().to_string();
        assert!(error.ends_with("are one process, which would count as two"), "{error}");
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
