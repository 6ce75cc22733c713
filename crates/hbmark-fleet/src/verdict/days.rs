//! Day against day, GPU by GPU: what all changed by, apart from what one did. A UUID stays with its board, a slot with its chassis: a GPU that
//! moved says which of them is slow.

use std::collections::{HashMap, HashSet};

use super::names::{common, probability, slower};
use super::{Fleet, Gpu};
use crate::folder::{NoticeKind, Notices};
use crate::metric::Metric;
use crate::result::{Day, DayShift, Finding, FindingKind, FleetReport};
use hbmark_core::stats::{MAD_EFFICIENCY, mad_sd, median, median_error, student_tail};

/// GPUs of both days without which there is no common shift.
const LEAST_PAIRS: usize = 4;

/// Another day beside this one.
pub(super) struct Compared<'a> {
    day: &'a FleetReport,
    shifts: Vec<DayShift>,
    pub changes: Vec<Change>,
}

/// What a metric changed by since a day: of one GPU beside the others, or of all of them. Below zero is slower now.
pub(super) struct Change {
    gpu: Option<usize>,
    metric: Metric,
    /// GPUs of both days, and what they are.
    gpus: usize,
    device: String,
    effect: f64,
    /// One-sided, not yet corrected.
    pub p: f64,
}

/// Days of the same plan, in their order. Another plan measures other things: its days are left out, and a notice says so.
pub(super) fn compare<'a>(
    fleet: &Fleet<'_>,
    plan: Option<&str>,
    past: &'a [FleetReport],
    notices: &mut Notices,
) -> Vec<Compared<'a>> {
    let mut compared = Vec::new();
    for day in past {
        match (plan, day.plan_digest()) {
            (Some(plan), Some(other)) if plan != other => {
                let why = format!("of plan {other}, and this report of {plan}: not compared day by day");
                notices.add(NoticeKind::OtherPlan, format!("the report of {}", day.at), why);
            }
            _ => compared.push(since(fleet, day)),
        }
    }
    compared.sort_by(|a, b| a.day.at.cmp(&b.day.at));
    compared
}

/// Log speeds of a day by GPU and metric.
fn speeds(day: &FleetReport) -> HashMap<(&str, &Metric), f64> {
    let each = day.gpus.iter().flat_map(|row| {
        row.values.iter().map(|v| ((row.gpu.as_str(), &v.metric), v.metric.log_speed(v.value)))
    });
    each.filter(|(_, log)| log.is_finite()).collect()
}

fn since<'a>(fleet: &Fleet<'_>, day: &'a FleetReport) -> Compared<'a> {
    let then = speeds(day);
    let (mut shifts, mut changes) = (Vec::new(), Vec::new());
    for found in &fleet.metrics {
        // Of each GPU the change, and the least that two medians of its processes differ by.
        let pairs: Vec<(usize, f64, f64)> = found
            .members
            .iter()
            .filter_map(|&number| {
                let gpu = &fleet.gpus[number];
                let was = then.get(&(gpu.id, &found.metric))?;
                let logs = Gpu::logs(&gpu.runs, &found.metric);
                let floor = found.judged.process_spread * median_error(logs.len()) * std::f64::consts::SQRT_2;
                Some((number, median(&logs) - was, floor))
            })
            .collect();
        if pairs.len() < LEAST_PAIRS {
            continue;
        }
        let each: Vec<f64> = pairs.iter().map(|(_, change, _)| *change).collect();
        let (shift, spread) = (median(&each), mad_sd(&each));
        let freedom = MAD_EFFICIENCY * (pairs.len() as f64 - 1.0);
        let change = |gpu: Option<usize>, effect: f64, scale: f64| Change {
            gpu,
            metric: found.metric.clone(),
            gpus: pairs.len(),
            device: fleet.groups[found.group].0.clone(),
            effect,
            p: if scale > 0.0 { student_tail(effect / scale, freedom) } else { 1.0 },
        };
        let floors: Vec<f64> = pairs.iter().map(|(.., floor)| *floor).collect();
        changes.push(change(None, shift, spread.max(median(&floors)) * median_error(pairs.len())));
        for (number, changed, floor) in &pairs {
            changes.push(change(Some(*number), changed - shift, spread.max(*floor)));
        }
        shifts.push(DayShift {
            device: fleet.groups[found.group].0.clone(),
            metric: found.metric.clone(),
            gpus: pairs.len(),
            shift: shift.exp_m1(),
            spread,
        });
    }
    Compared { day, shifts, changes }
}

/// What became slower since the latest day, by more than the margin and the corrected test; without GPUs that are named already.
pub(super) fn changed(
    fleet: &Fleet<'_>,
    compared: &[Compared<'_>],
    adjusted: &[f64],
    named: &[Finding],
) -> Vec<Finding> {
    let Some(Compared { day, changes, .. }) = compared.last() else { return Vec::new() };
    let limit = (1.0 - fleet.settings.margin).ln();
    let mut seen: HashSet<&str> = named.iter().filter_map(|finding| finding.gpu.as_deref()).collect();
    let mut findings = Vec::new();
    for (change, &p) in changes.iter().zip(adjusted) {
        if change.effect > limit || p > fleet.settings.alpha {
            continue;
        }
        let (metric, effect) = (&change.metric, slower(change.effect));
        let base = match change.gpu {
            None => {
                let evidence = format!(
                    "{metric} of {} {} is {effect} than on {}, all together; p {} after Holm",
                    change.gpus,
                    change.device,
                    day.at,
                    probability(p)
                );
                common(FindingKind::FleetChanged, evidence)
            }
            Some(number) if seen.insert(fleet.gpus[number].id) => {
                let evidence = format!(
                    "{metric} is {effect} than on {}, beside what all changed by; p {} after Holm",
                    day.at,
                    probability(p)
                );
                fleet.about(FindingKind::GpuChanged, number, evidence)
            }
            Some(_) => continue,
        };
        let metric = Some(metric.clone());
        findings.push(Finding { metric, effect: Some(change.effect.exp_m1()), p_adjusted: Some(p), ..base });
    }
    findings
}

/// The days with what all changed by, and how GPUs that are named today did.
pub(super) fn trend(compared: &[Compared<'_>], named: &[Finding]) -> Vec<Day> {
    let named: HashSet<&str> = named.iter().filter_map(|finding| finding.gpu.as_deref()).collect();
    let day = |compared: &Compared<'_>| {
        let rows = compared.day.gpus.iter().filter(|row| named.contains(row.gpu.as_str()));
        let effects = rows
            .flat_map(|row| {
                row.values.iter().filter_map(|v| Some((row.gpu.clone(), v.metric.clone(), v.effect?)))
            })
            .collect();
        Day { at: compared.day.at.clone(), shifts: compared.shifts.clone(), effects }
    };
    compared.iter().map(day).collect()
}

/// GPUs that are in another place than on the latest day, of whatever plan, and those that are gone from a node which still reports.
pub(super) fn moved(fleet: &Fleet<'_>, past: &[FleetReport]) -> Vec<Finding> {
    let Some(day) = past.iter().max_by(|a, b| a.at.cmp(&b.at)) else { return Vec::new() };
    let now: HashMap<&str, usize> = fleet.gpus.iter().enumerate().map(|(n, gpu)| (gpu.id, n)).collect();
    let mut findings = Vec::new();
    for row in &day.gpus {
        match now.get(row.gpu.as_str()) {
            Some(&number) => {
                let gpu = &fleet.gpus[number];
                let node = &fleet.nodes[gpu.node];
                if (node, gpu.slot) != (&row.node, row.slot) {
                    let slot = row.slot.map_or_else(String::new, |slot| format!(" slot {slot}"));
                    let effect = row.values.iter().find_map(|v| v.effect.map(|effect| (&v.metric, effect)));
                    let was = effect.map_or_else(String::new, |(metric, effect)| {
                        format!("; {metric} was {:+.1} % from the fleet there", effect * 100.0)
                    });
                    let evidence = format!("was in {}{slot} on {}{was}", row.node, day.at);
                    findings.push(fleet.about(FindingKind::GpuMoved, number, evidence));
                }
            }
            None if fleet.nodes.contains(&row.node) => findings.push(Finding {
                node: Some(row.node.clone()),
                rack: row.rack.clone(),
                gpu: Some(row.gpu.clone()),
                slot: row.slot,
                ..common(
                    FindingKind::GpuGone,
                    format!("was there on {}, and its node reports without it", day.at),
                )
            }),
            None => {}
        }
    }
    findings
}
