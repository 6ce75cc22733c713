//! What a page answers first: its title, and a few figures with the verdict.
//!
//! Enters: a result. Leaves: the title of its page and [`Figure`]s, the verdict the first of them.

use crate::analysis::capacity::number;
use crate::analysis::distinct;
use crate::analysis::import::{ForeignFormat, Imported, RooflinePlacement, objections};
use crate::analysis::words::counted;
use crate::output::document::{Figure, Tone, Value};
use crate::output::kinds::run::status_word;
use crate::output::kinds::serving::{held, mean_wait, met_objectives, range_over_seeds};
use crate::output::metrics::Unit;
use crate::output::text::{alone, single};
use hbmark_core::result::comparison::{Comparison, ComparisonVerdict, Method};
use hbmark_core::result::serving::{
    Offered, Point, Quantiles, Quantity, RowVerdict, ServeKind, ServeReport, Validity,
};
use hbmark_core::result::{Cause, CellResult, Phase, ProtocolSummary, Report, ReportKind, Status};
use hbmark_core::units::PerSecond;

/// The title of a run's or a prediction's page.
pub fn run_title(report: &Report) -> String {
    let kind = if report.kind == ReportKind::Predict { "roofline prediction" } else { "step benchmark" };
    format!("{}: {kind}", report.model.name)
}

/// The title of a serving page.
pub fn serving_title(report: &ServeReport) -> String {
    let kind = if report.cold_start.is_some() {
        "cold start"
    } else if report.search.is_some() {
        "highest rate"
    } else if !report.matrix.is_empty() {
        "workload matrix"
    } else if report.swept.is_some() {
        "serving sweep"
    } else {
        "serving benchmark"
    };
    let clock = match report.kind {
        ServeKind::ServeVirtual => " on a virtual clock",
        ServeKind::ServeLive => " of a live server",
        _ => "",
    };
    format!("{}: {kind}{clock}", report.model_name())
}

fn figure(name: &str, value: String, note: String) -> Figure {
    Figure { name: name.to_owned(), value, note, tone: Tone::Plain }
}

/// How many of all count, as the verdict.
fn verdict(good: usize, all: usize, what: &str, note: String) -> Figure {
    let tone = match good {
        n if n == all => Tone::Good,
        0 => Tone::Bad,
        _ => Tone::Warning,
    };
    Figure { name: "valid".to_owned(), value: format!("{good} of {}", counted(all, what)), note, tone }
}

/// The figures of a run or of a prediction.
pub fn run(report: &Report) -> Vec<Figure> {
    if report.kind == ReportKind::Predict { predicted(report) } else { measured(report) }
}

fn place(cell: &CellResult) -> String {
    format!("{} {}, batch {}, context {}", cell.engine, cell.dtype, cell.batch, cell.context)
}

fn tokens_per_s(rate: f64) -> String {
    format!("{} tok/s", single(Unit::Count, rate.round()))
}

/// The cell with the largest value.
fn most(cells: &[&CellResult], of: impl Fn(&CellResult) -> Option<f64>) -> Option<(String, f64)> {
    let known = cells.iter().filter_map(|cell| Some((place(cell), of(cell)?)));
    known.max_by(|a, b| a.1.total_cmp(&b.1))
}

fn decodes<'a>(cells: &[&'a CellResult]) -> Vec<&'a CellResult> {
    cells.iter().copied().filter(|cell| cell.phase == Phase::Decode).collect()
}

/// Cells that can stand for themselves; where there are none, the first that was timed, in brackets.
fn measured(report: &Report) -> Vec<Figure> {
    let run: Vec<&CellResult> = report.cells.iter().filter(|cell| cell.status != Status::Skipped).collect();
    let good: Vec<&CellResult> = run.iter().copied().filter(|cell| cell.status == Status::Ok).collect();
    let mut notes = Vec::new();
    let noisy = run.iter().filter(|cell| cell.status == Status::Noisy).count();
    if noisy > 0 {
        notes.push(format!("{noisy} noisy and counted, as --allow-noise asks"));
    }
    let doubtful = run.iter().filter(|cell| cell.status.is_doubtful()).count() - noisy;
    if doubtful > 0 {
        notes.push(format!("{doubtful} in brackets: their blocks cannot stand for them"));
    }
    let skipped = report.cells.len() - run.len();
    if skipped > 0 {
        notes.push(format!("skipped: {skipped} more"));
    }
    let mut figures = if report.protocol.as_ref().is_some_and(ProtocolSummary::is_smoke) {
        // That none of them is valid is what was asked for.
        let ran = run.iter().filter(|cell| matches!(cell.status, Status::Smoke | Status::Simulated)).count();
        let value = format!("{ran} of {} ran", counted(run.len(), "cell"));
        let tone = if ran == run.len() { Tone::Plain } else { Tone::Bad };
        vec![Figure {
            name: "smoke".to_owned(),
            value,
            note: "once each: their times mean nothing".to_owned(),
            tone,
        }]
    } else {
        vec![verdict(good.len(), run.len(), "cell", notes.join("; "))]
    };
    let decoded = decodes(&good);
    if let Some((cell, ns)) = decoded.iter().find_map(|cell| Some((cell, cell.tpot_ns?))) {
        figures.push(figure("TPOT", single(Unit::Nanoseconds, ns), place(cell)));
    } else if let Some((cell, tpot)) =
        decodes(&run).iter().find_map(|cell| Some((*cell, cell.all_blocks.as_ref()?.tpot_ns?)))
    {
        let name = format!("TPOT, {}", status_word(cell.status));
        let value = alone(Unit::Nanoseconds, Value::Doubtful(tpot));
        figures.push(Figure { name, value, note: place(cell), tone: Tone::Warning });
    }
    if let Some((place, rate)) = most(&decoded, |cell| cell.tokens_per_s) {
        figures.push(figure("output throughput, at most", tokens_per_s(rate), place));
    }
    if let Some((place, share)) =
        most(&decoded, |cell| cell.fraction_of_read_beside.or(cell.fraction_of_ceiling))
    {
        figures.push(figure("of the memory bandwidth, at most", single(Unit::Fraction, share), place));
    }
    figures
}

/// What the device could do at the best, in cells that fit its memory.
fn predicted(report: &Report) -> Vec<Figure> {
    let decodes =
        || report.cells.iter().filter(|cell| cell.phase == Phase::Decode && cell.predicted_ns.is_some());
    let too_large = |cell: &CellResult| {
        cell.flags.iter().find(|flag| matches!(flag, Cause::DoesNotFit { .. })).map(ToString::to_string)
    };
    let fitting: Vec<&CellResult> = decodes().filter(|cell| too_large(cell).is_none()).collect();
    let mut figures = Vec::new();
    let (all, fit) = (decodes().count(), fitting.len());
    if fit < all {
        let note = decodes().find_map(too_large).unwrap_or_default();
        let tone = if fit == 0 { Tone::Bad } else { Tone::Warning };
        let value = format!("{fit} of {}", counted(all, "decode cell"));
        figures.push(Figure { name: "fit in memory".to_owned(), value, note, tone });
    }
    // The engine of a prediction is none.
    let place = |cell: &CellResult| format!("{}, batch {}, context {}", cell.dtype, cell.batch, cell.context);
    let time = |cell: &&CellResult| cell.predicted_ns.unwrap_or(f64::INFINITY);
    // Stages work on batches of their own: the slowest sets the interval.
    let interval = |cell: &&CellResult| cell.group.as_ref().map_or(time(cell), |step| step.interval_ns);
    let rate = |cell: &&CellResult| cell.batch as f64 * 1e9 / interval(cell);
    if let Some(cell) = fitting.iter().copied().min_by(|a, b| time(a).total_cmp(&time(b))) {
        figures.push(figure("lowest possible TPOT", single(Unit::Nanoseconds, time(&cell)), place(cell)));
    }
    if let Some(cell) = fitting.iter().copied().max_by(|a, b| rate(a).total_cmp(&rate(b))) {
        figures.push(figure("highest possible output throughput", tokens_per_s(rate(&cell)), place(cell)));
    }
    figures
}

/// The figures of a comparison: what was decided, and by how much.
pub fn comparison(found: &Comparison) -> Vec<Figure> {
    use ComparisonVerdict::{Equivalent, Faster, Inconclusive, Slower};
    let count = |verdict| found.cells.iter().filter(|cell| cell.effect.verdict == verdict).count();
    let tone = |verdict| match verdict {
        ComparisonVerdict::Faster => Tone::Good,
        ComparisonVerdict::Slower => Tone::Bad,
        ComparisonVerdict::Equivalent => Tone::Plain,
        ComparisonVerdict::Inconclusive => Tone::Warning,
    };
    let words = [Faster, Slower, Equivalent, Inconclusive];
    let each = words.into_iter().map(|verdict| (verdict, count(verdict))).filter(|(_, cells)| *cells > 0);
    let counts: Vec<String> =
        each.clone().map(|(verdict, cells)| format!("{cells} {}", verdict.word())).collect();
    let disagree = count(Faster) > 0 && count(Slower) > 0;
    let only = found.overall.as_ref().filter(|_| !disagree).or(match found.cells.as_slice() {
        [one] => Some(&one.effect),
        _ => None,
    });
    // Cells that say different things have no verdict together.
    let (value, told) = match (only, each.clone().next(), counts.len()) {
        (Some(effect), ..) => (format!("B is {}", effect.verdict.word()), tone(effect.verdict)),
        (None, Some((verdict, _)), 1) => (format!("B is {}", verdict.word()), tone(verdict)),
        (None, ..) => (counts.join(", "), Tone::Warning),
    };
    let compared = if found.is_served() { "metric" } else { "cell" };
    let note = format!("{}: {}", counted(found.cells.len(), compared), counts.join(", "));
    let mut figures = vec![Figure { name: "verdict".to_owned(), value, note, tone: told }];
    if let Some((ratio, effect)) = only.and_then(|effect| Some((effect.ratio?, effect))) {
        let note =
            effect.low.zip(effect.high).map(|(low, high)| format!("{low:.4} to {high:.4}, 95 % interval"));
        figures.push(figure("time of B over A", format!("{ratio:.4}"), note.unwrap_or_default()));
    }
    let usable = found.cells.iter().map(|cell| cell.effect.rounds).max().unwrap_or(0);
    let (name, count) = match found.rounds {
        None if found.method == Method::SavedProcesses => ("processes a side", usable.to_string()),
        None => ("rounds", "two saved results".to_owned()),
        Some(rounds) if usable < rounds => ("rounds", format!("{usable} of {rounds} usable")),
        Some(rounds) => ("rounds", rounds.to_string()),
    };
    figures.push(figure(name, count, String::new()));
    figures
}

/// The title of a comparison's page.
pub fn comparison_title(found: &Comparison) -> String {
    // One model is named with its source, two with the side of each.
    let one = found.model.split_once(" · ").filter(|(name, _)| !name.starts_with("A "));
    format!("{}: comparison", one.map_or(found.model.as_str(), |(name, _)| name))
}

/// The figures of results of other programs: how many of their rows can be believed and were rated.
pub fn imported(results: &[Imported]) -> Vec<Figure> {
    let rows: usize = results.iter().map(|one| one.result.rows.len()).sum();
    let first = results.iter().flat_map(Imported::objections).next();
    let first = first.map(|(row, cause)| format!("{}: {cause}", row.label));
    let pairs = results.iter().flat_map(|one| one.result.rows.iter().zip(&one.places));
    let bad = pairs.filter(|(row, place)| !objections(row, place).is_empty()).count();
    let rated: Vec<&CellResult> = results
        .iter()
        .flat_map(|one| &one.places)
        .filter_map(|place| match place {
            RooflinePlacement::Placed(found) if found.cell.status == Status::Ok => Some(&found.cell),
            _ => None,
        })
        .collect();
    let figures_read = results.iter().flat_map(|one| &one.result.rows).any(|row| !row.values.is_empty());
    let flags_compared = results.iter().any(|one| !one.compared.is_empty());
    let (value, tone) = match bad {
        0 if !figures_read && !flags_compared => ("nothing to check".to_owned(), Tone::Warning),
        0 => ("none found".to_owned(), Tone::Plain),
        _ => (format!("{bad} of {}", counted(rows, "row")), Tone::Bad),
    };
    let note = first.unwrap_or_else(|| checked(results));
    let mut figures = vec![Figure { name: "contradictions".to_owned(), value, note, tone }];
    figures.push(figure(
        "on the roofline",
        format!("{} of {}", rated.len(), counted(rows, "row")),
        devices(results),
    ));
    if let Some((place, share)) = most(&rated, |cell| cell.fraction_of_datasheet) {
        figures.push(figure("of the data sheet's bandwidth, at most", single(Unit::Fraction, share), place));
    }
    figures
}

/// What was looked at for contradictions.
fn checked(results: &[Imported]) -> String {
    let flags = distinct(results.iter().flat_map(|one| &one.compared).map(String::as_str));
    // Our own figures come out of one list of requests and are judged where it is read.
    let foreign = results.iter().any(|one| one.result.format != ForeignFormat::HbmarkServe);
    let figures = if foreign { "figures of a row with one another; " } else { "" };
    match flags.as_slice() {
        [] => format!("{figures}no flags to check against the file"),
        flags => format!("{figures}{} with the file", flags.join(", ")),
    }
}

/// The data sheets that rows were held against, and whether a file or a person named the GPU.
fn devices(results: &[Imported]) -> String {
    let rows = results.iter().flat_map(|one| one.result.rows.iter().zip(&one.places));
    let devices = rows.filter_map(|(row, place)| {
        let RooflinePlacement::Placed(placed) = place else { return None };
        let by = if row.setup.gpu.is_some() { "the file" } else { "hand" };
        Some(format!("of {} × {}, named by {by}", placed.gpus, placed.device))
    });
    distinct(devices).join("; ")
}

/// The title of the page of imported results.
pub fn imported_title(results: &[Imported]) -> String {
    match results {
        [one] => format!("{}: result of {}", one.result.source, one.result.format.name()),
        many => format!("{} results of other programs", many.len()),
    }
}

/// A percentile of a latency; in brackets where the machine was disturbed.
fn latency(name: &str, quantiles: Option<&Quantiles>, disturbed: bool) -> Option<Figure> {
    let q = quantiles?;
    let (level, value) =
        [("p95", q.p95), ("p50", q.p50)].into_iter().find_map(|(level, v)| Some((level, v?)))?;
    let Quantity::Finite(ns) = value else { return None };
    let median = q.p50.map(Quantity::value).filter(|ns| ns.is_finite() && level != "p50");
    let note = median.map_or_else(String::new, |ns| format!("median {}", single(Unit::Nanoseconds, ns)));
    Some(if disturbed {
        let value = alone(Unit::Nanoseconds, Value::Disturbed(ns));
        Figure { name: format!("{name} {level}, disturbed"), value, note, tone: Tone::Warning }
    } else {
        figure(&format!("{name} {level}"), single(Unit::Nanoseconds, ns), note)
    })
}

fn point(point: &Point) -> Vec<Figure> {
    let Some(result) = &point.result else { return Vec::new() };
    let disturbances = point.disturbances();
    let open = result.validity == Validity::Valid && point.keeps_up().is_none();
    let (value, tone) = match (result.validity, result.slo_met) {
        (Validity::Invalid, _) => ("INVALID", Tone::Bad),
        (Validity::Saturated, _) => ("SATURATED", Tone::Bad),
        _ if !disturbances.is_empty() => ("disturbed", Tone::Bad),
        (_, Some(true)) if open => ("objectives met, run too short to show stability", Tone::Warning),
        (_, Some(true)) => ("objectives met", Tone::Good),
        (_, Some(false)) => ("objectives NOT met", Tone::Bad),
        (_, None) if !result.slo.is_empty() => ("objectives undetermined", Tone::Warning),
        _ if open => ("not judged whether it keeps up", Tone::Warning),
        _ => ("valid", Tone::Good),
    };
    let mut notes: Vec<String> = result
        .offered_per_s
        .map(|rate| format!("{} requests/s offered", PerSecond(rate)))
        .into_iter()
        .collect();
    if open {
        notes.push(mean_wait(point, result));
    }
    let disturbed = !disturbances.is_empty();
    notes.extend(disturbances);
    let verdict =
        Figure { name: "verdict".to_owned(), value: value.to_owned(), note: notes.join("; "), tone };
    let tokens = single(Unit::Count, result.output_tokens_per_s.round());
    let served = format!("{} requests/s served", PerSecond(result.served_per_s));
    let throughput = figure("output throughput", format!("{tokens} tok/s"), served);
    let times = [("TTFT", result.ttft_ns.as_ref()), ("TPOT", result.tpot_ns.as_ref())];
    let times = times.into_iter().filter_map(|(name, quantiles)| latency(name, quantiles, disturbed));
    [verdict].into_iter().chain(times).chain([throughput]).collect()
}

/// The figures of a serving result.
pub fn serving(report: &ServeReport) -> Vec<Figure> {
    if let Some(cold) = &report.cold_start {
        let first = &cold.to_first_token;
        let range = format!(
            "{} to {}",
            single(Unit::Nanoseconds, first.min_ns),
            single(Unit::Nanoseconds, first.max_ns)
        );
        return vec![figure(
            "launch to first token, median",
            single(Unit::Nanoseconds, first.median_ns),
            range,
        )];
    }
    let results = || report.points.iter().filter_map(|point| Some((point, point.result.as_ref()?)));
    let most = |of: &dyn Fn(&Point) -> Option<f64>| {
        let known = report.points.iter().filter_map(|point| Some((point, of(point)?)));
        known.max_by(|a, b| a.1.total_cmp(&b.1))
    };
    // Throughput that missed the objectives, or of a system that falls behind, is none that can be had.
    let throughput = |of: &dyn Fn(&Point) -> bool| {
        let (point, most) =
            most(&|p| Some(p.result.as_ref().filter(|_| held(p) && of(p))?.output_tokens_per_s))?;
        let value = format!("{} tok/s", single(Unit::Count, most.round()));
        Some(figure("output throughput that held", value, point.label.clone()))
    };
    if let Some(search) = &report.search {
        let (value, tone) = search.max_rate.map_or_else(
            || ("none found".to_owned(), Tone::Bad),
            |rate| {
                let (sign, tone) =
                    if search.is_lower_bound() { ("≥ ", Tone::Warning) } else { ("", Tone::Good) };
                (format!("{sign}{} requests/s", PerSecond(rate)), tone)
            },
        );
        let note = if search.is_lower_bound() {
            "no higher rate failed, and none could be decided".to_owned()
        } else {
            range_over_seeds(search)
        };
        let found = Figure { name: "highest rate".to_owned(), value, note, tone };
        let objectives: Vec<String> = search.slo.clauses.iter().map(ToString::to_string).collect();
        let objectives = figure("objectives", objectives.join(", "), String::new());
        let at = |point: &Point| match (point.offered, search.max_rate) {
            (Offered::Rate(rate), Some(found)) => rate <= found * (1.0 + 1e-9),
            _ => false,
        };
        return [found, objectives].into_iter().chain(throughput(&at)).collect();
    }
    if let [only] = report.points.as_slice() {
        return point(only);
    }
    let disturbed = results().filter(|(point, _)| !point.disturbances().is_empty()).count();
    let valid = results()
        .filter(|(point, result)| result.validity == Validity::Valid && point.disturbances().is_empty());
    // Points above the one that ended a sweep were left out on purpose, others were lost.
    let ended = |point: &&Point| matches!(point.not_run, Some(Cause::SweepEnded { .. }));
    let wanted = report.points.iter().filter(|point| point.result.is_some() || !ended(point)).count();
    let lost = wanted - results().count();
    let notes = [(disturbed, "in brackets: disturbed"), (lost, "not run")];
    let notes =
        notes.into_iter().filter(|(count, _)| *count > 0).map(|(count, why)| format!("{count} {why}"));
    let notes = notes.collect::<Vec<_>>().join("; ");
    let mut figures = vec![verdict(valid.count(), wanted, "point", notes)];
    if !report.matrix.is_empty() {
        // Its rows are different workloads at rates of their own: none of them is a highest one.
        figures.push(hypotheses(&report.matrix));
        return figures;
    }
    figures.extend(highest_rate(report));
    figures.extend(throughput(&|_| true));
    figures
}

/// The highest of several rates that was shown to hold; none where all points have one rate.
pub fn highest_rate(report: &ServeReport) -> Option<Figure> {
    let rates = || {
        report.points.iter().filter_map(|point| match point.offered {
            Offered::Rate(rate) => Some(rate),
            _ => None,
        })
    };
    if report.points.len() > 1 && rates().all(|rate| Some(rate) == rates().next()) {
        return None;
    }
    let highest = |of: &dyn Fn(&Point) -> bool| {
        let rates = report.points.iter().filter_map(|point| match point.offered {
            Offered::Rate(rate) if of(point) => Some((point, rate)),
            _ => None,
        });
        rates.max_by(|a, b| a.1.total_cmp(&b.1))
    };
    let (shown, met) = (highest(&held), highest(&met_objectives));
    let open = met.filter(|(_, met)| shown.is_none_or(|(_, shown)| *met > shown));
    let open = open.map(|(point, rate)| {
        let judged = point.result.as_ref().is_some_and(|result| !result.slo.is_empty());
        let what = if judged { "met the objectives" } else { "were served" };
        format!("{} requests/s {what} ({}), run too short to show stability", number(rate), point.label)
    });
    match (shown, open) {
        (Some((point, rate)), open) => {
            let note = [Some(point.label.clone()), open].into_iter().flatten().collect::<Vec<_>>().join("; ");
            let ended_early = report.search.as_ref().is_some_and(|search| !search.confirmed);
            let name =
                if ended_early { "highest rate that held, NOT confirmed" } else { "highest rate that held" };
            Some(figure(name, format!("{} requests/s", number(rate)), note))
        }
        (None, Some(open)) => {
            let (name, value) = ("highest rate that held".to_owned(), "none shown".to_owned());
            Some(Figure { name, value, note: open, tone: Tone::Warning })
        }
        (None, None) => None,
    }
}

/// How many hypotheses of a matrix held.
fn hypotheses(rows: &[RowVerdict]) -> Figure {
    let count = |held| rows.iter().filter(|row| row.held == held).count();
    let (held, refuted, open) = (count(Some(true)), count(Some(false)), count(None));
    let tone = if refuted > 0 || open > 0 { Tone::Warning } else { Tone::Good };
    let mut notes = Vec::new();
    if refuted > 0 {
        notes.push(format!("{refuted} refuted"));
    }
    if open > 0 {
        notes.push(format!("{open} not known"));
    }
    let value = format!("{held} of {} held", rows.len());
    Figure { name: "hypotheses".to_owned(), value, note: notes.join(", "), tone }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::{Format, Kind, render};
    use crate::samples;

    fn shown(figures: &[Figure]) -> Vec<String> {
        figures.iter().map(Figure::text).collect()
    }

    #[test]
    fn a_prediction_leads_with_the_best_cell_that_fits_and_names_its_storage() {
        let mut report: Report = samples::saved("predict-h100");
        let before = shown(&run(&report));
        // int8 is the second of the two.
        assert!(
            before[0].starts_with("lowest possible TPOT: 2.42 ms (int8, batch 1, context 512)"),
            "{before:?}"
        );
        for cell in report.cells.iter_mut().filter(|cell| cell.dtype == hbmark_core::model::Dtype::Int8) {
            cell.flags.push(Cause::DoesNotFit {
                needed_bytes: hbmark_core::units::Bytes(2),
                device_bytes: hbmark_core::units::Bytes(1),
                usable_share: 0.9,
            });
        }
        let after = shown(&run(&report));
        assert!(after[0].starts_with("fit in memory: 4 of 8 decode cells"), "{after:?}");
        assert!(
            after[1].starts_with("lowest possible TPOT: 4.50 ms (bf16, batch 1, context 512)"),
            "{after:?}"
        );
        assert!(after[2].ends_with("(bf16, batch 8, context 512)"), "{after:?}");
    }

    #[test]
    fn a_run_without_a_good_cell_says_so_first_and_shows_times_in_brackets() {
        let mut report: Report = samples::saved("run-scripted");
        report.cells.iter_mut().filter(|cell| cell.status == Status::Ok).for_each(|cell| {
            cell.status = Status::Disturbed;
        });
        crate::analysis::judge::recompute(&mut report);
        let figures = run(&report);
        let lines = shown(&figures);
        assert!(lines[0].starts_with("valid: 0 of 5 cells (3 in brackets"), "{lines:?}");
        assert_eq!(figures[0].tone, Tone::Bad);
        assert!(lines[1].starts_with("TPOT, disturbed: [9.50 ms] "), "{lines:?}");
        assert_eq!(lines.len(), 2, "nothing is claimed of what was disturbed: {lines:?}");
    }

    #[test]
    fn a_smoke_run_counts_what_ran_and_calls_none_of_it_invalid() {
        let mut report = samples::measured();
        report.protocol = Some(samples::protocol_named("smoke"));
        report.cells.iter_mut().for_each(|cell| cell.status = Status::Smoke);
        let lines = shown(&run(&report));
        assert_eq!(lines[0], "smoke: 24 of 24 cells ran (once each: their times mean nothing)");
        report.cells[0].status = Status::Failed;
        assert_eq!(run(&report)[0].tone, Tone::Bad, "one did not run");
    }

    #[test]
    fn a_point_too_short_to_judge_shows_how_short_its_waiting_line_was() {
        let report = samples::single();
        assert!(
            report.points[0].result.as_ref().unwrap().steadiness_open().is_some(),
            "the fixture is short"
        );
        let lines = shown(&serving(&report));
        assert!(lines[0].ends_with("requests/s offered; 0.11 requests waited on average)"), "{lines:?}");
    }

    #[test]
    fn pages_of_comparisons_and_imports_begin_with_what_they_are_and_their_verdict() {
        let found: Comparison = samples::saved("comparison");
        let page = found.page();
        assert_eq!(page.title, "SmolLM2-135M: comparison");
        let crate::output::document::Block::Figures(figures) = &page.blocks[0] else { panic!("no figures") };
        assert_eq!(figures[0].text(), "verdict: B is INCONCLUSIVE (3 cells: 3 INCONCLUSIVE)");
        let html = render(&found, Format::Html, false).unwrap();
        let head = html.split("</header>").next().unwrap();
        assert!(
            head.contains("B is INCONCLUSIVE") && !head.contains("<table"),
            "the table is below the header"
        );
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/foreign/vllm-serve-0.25.json");
        let results = crate::analysis::import::read(std::path::Path::new(file)).unwrap();
        let given = crate::analysis::import::UserOverrides::default();
        let mut imported: Vec<Imported> = results.into_iter().map(|r| Imported::new(r, &given)).collect();
        let lines = |imported: &[Imported]| shown(&super::imported(imported));
        assert_eq!(imported.as_slice().page().title, "vllm-serve-0.25.json: result of vLLM bench serve");
        assert_eq!(
            lines(&imported)[0],
            "contradictions: none found (figures of a row with one another; no flags to check against the file)"
        );
        imported[0].compared = vec!["--model".to_owned(), "--batch".to_owned()];
        assert!(lines(&imported)[0].ends_with("; --model, --batch with the file)"), "{imported:?}");
        // Where neither figures nor flags could be held against anything, nothing was found out.
        let empty = |mut one: Imported| {
            one.compared.clear();
            one.result.rows[0].values.clear();
            one
        };
        let nothing: Vec<Imported> = imported.iter().cloned().map(empty).collect();
        assert!(lines(&nothing)[0].starts_with("contradictions: nothing to check"), "{nothing:?}");
        imported[0].result.rows[0].problems.push(Cause::other("p99 is below the median"));
        assert!(
            lines(&imported)[0].starts_with("contradictions: 1 of 1 row (c2: p99 is below"),
            "{imported:?}"
        );
    }

    /// A point as a gate that passed, failed or stayed open leaves it.
    fn judged(mut point: Point, rate: f64, passed: Option<bool>) -> Point {
        point.offered = Offered::Rate(rate);
        let result = samples::keeps_up(&mut point, passed);
        result.slo.iter_mut().for_each(|clause| clause.met = Some(true));
        result.slo_met = (!result.slo.is_empty()).then_some(true);
        point
    }

    #[test]
    fn the_highest_rate_that_held_is_one_whose_queue_was_judged() {
        let mut report = samples::sweep();
        let any = report.points.iter().find(|point| point.result.is_some()).unwrap().clone();
        let rates = [(63.001_932_303_586_71, Some(true)), (93.358, None)];
        report.points = rates.map(|(rate, passed)| judged(any.clone(), rate, passed)).into();
        let lines = shown(&serving(&report));
        assert!(lines[1].starts_with("highest rate that held: 63.00 requests/s ("), "{lines:?}");
        assert!(lines[1].contains("; 93.36 requests/s met the objectives"), "{lines:?}");
        for point in &mut report.points {
            point.result.as_mut().unwrap().slo.clear();
        }
        let without = shown(&serving(&report));
        assert!(without[1].contains("; 93.36 requests/s were served ("), "{without:?}");
        report.points.remove(0);
        report.points.push(judged(any, 120.0, None));
        let figures = serving(&report);
        assert!(
            figures[1].text().starts_with("highest rate that held: none shown (120 requests/s met"),
            "{figures:?}"
        );
        assert!(figures.iter().all(|figure| !figure.name.contains("throughput that held")), "{figures:?}");
    }

    #[test]
    fn a_sweep_that_lost_points_is_not_all_valid() {
        let mut report = samples::sweep();
        let any = report.points.iter().find(|point| point.result.is_some()).unwrap().clone();
        let ended = report.points.iter().find(|point| point.not_run.is_some()).unwrap().clone();
        report.points = [1.0, 2.0].map(|rate| judged(any.clone(), rate, Some(true))).into();
        report.points.push(ended.clone());
        let first = |report: &ServeReport| (serving(report)[0].text(), serving(report)[0].tone);
        assert_eq!(first(&report), ("valid: 2 of 2 points".to_owned(), Tone::Good));
        let lost = Some(Cause::other("the worker was lost"));
        report.points.push(Point { not_run: lost, ..ended });
        assert_eq!(first(&report), ("valid: 2 of 3 points (1 not run)".to_owned(), Tone::Warning));
    }

    #[test]
    fn a_matrix_leads_with_its_hypotheses_and_names_no_highest_rate() {
        let mut report = samples::sweep();
        let any = report.points.iter().find(|point| point.result.is_some()).unwrap().clone();
        report.points =
            [105.294_135_016_696_5, 12.0].map(|rate| judged(any.clone(), rate, Some(true))).into();
        report.matrix = samples::matrix();
        (report.matrix[1].held, report.matrix[2].held) = (Some(false), None);
        let lines = shown(&serving(&report));
        assert_eq!(lines[1..], ["hypotheses: 5 of 7 held (1 refuted, 1 not known)"]);
    }

    #[test]
    fn a_point_that_nobody_judged_is_not_called_valid_and_a_disturbed_one_is_in_brackets() {
        let mut report = samples::single();
        let mut point = judged(report.points[0].clone(), 1.0, None);
        point.result.as_mut().unwrap().slo.clear();
        point.result.as_mut().unwrap().slo_met = None;
        report.points = vec![point];
        let first = |report: &ServeReport| serving(report).remove(0);
        assert_eq!(
            (first(&report).value.as_str(), first(&report).tone),
            ("not judged whether it keeps up", Tone::Warning)
        );
        report.points[0] = judged(report.points[0].clone(), 1.0, Some(true));
        assert_eq!((first(&report).value.as_str(), first(&report).tone), ("valid", Tone::Good));
        report.points[0].result.as_mut().unwrap().foreign_cores = Some(1.5);
        let figures = serving(&report);
        assert_eq!((figures[0].value.as_str(), figures[0].tone), ("disturbed", Tone::Bad));
        assert!(figures[0].note.ends_with("other processes kept 1.5 cores busy over the run"), "{figures:?}");
        assert!(
            figures[1].name.starts_with("TTFT p") && figures[1].name.ends_with(", disturbed"),
            "{figures:?}"
        );
        assert!(figures[1].value.starts_with('[') && figures[1].value.ends_with(']'), "{figures:?}");
        let table = render(&report, Format::Table, false).unwrap();
        let row = table.lines().find(|line| line.starts_with("TTFT ")).unwrap();
        assert_eq!(row.matches('[').count(), 5, "every time is in brackets: {row}");
    }
}
