//! Day against day, GPU by GPU: what all changed by, apart from what one did. A UUID stays with its board, a slot with its chassis: a GPU that
//! moved says which of them is slow.

use std::collections::HashMap;

use super::names::{common, probability, slower};
use super::{Fleet, Gpu};
use crate::metric::Metric;
use crate::result::{Day, DayShift, Finding, FindingKind, FleetReport};
use hbmark_core::stats::{MAD_EFFICIENCY, holm, mad_sd, median, median_error, student_tail};

/// GPUs of both days without which there is no common shift.
const LEAST_PAIRS: usize = 4;

/// Past days in their order, and what changed since the latest.
pub(super) fn compare(
    fleet: &Fleet<'_>,
    past: &[FleetReport],
    named: &[Finding],
) -> (Vec<Day>, Vec<Finding>) {
    let mut past: Vec<&FleetReport> = past.iter().collect();
    past.sort_by(|a, b| a.at.cmp(&b.at));
    let named: Vec<&str> = named.iter().filter_map(|finding| finding.gpu.as_deref()).collect();
    let mut findings = Vec::new();
    let mut days = Vec::new();
    for (index, day) in past.iter().enumerate() {
        let (shifts, changed) = shifts(fleet, day);
        if index + 1 == past.len() {
            findings
                .extend(changed.into_iter().filter(|f| f.gpu.as_deref().is_none_or(|g| !named.contains(&g))));
            findings.extend(moved(fleet, day));
        }
        let effects = day
            .gpus
            .iter()
            .filter(|row| named.contains(&row.gpu.as_str()))
            .flat_map(|row| {
                row.values.iter().filter_map(|v| Some((row.gpu.clone(), v.metric.clone(), v.effect?)))
            })
            .collect();
        days.push(Day { at: day.at.clone(), shifts, effects });
    }
    (days, findings)
}

/// Log speeds of a day by GPU and metric.
fn speeds(day: &FleetReport) -> HashMap<(&str, &Metric), f64> {
    let each = day.gpus.iter().flat_map(|row| {
        row.values.iter().map(|v| ((row.gpu.as_str(), &v.metric), v.metric.log_speed(v.value)))
    });
    each.filter(|(_, log)| log.is_finite()).collect()
}

fn shifts(fleet: &Fleet<'_>, day: &FleetReport) -> (Vec<DayShift>, Vec<Finding>) {
    let then = speeds(day);
    let limit = (1.0 - fleet.settings.margin).ln();
    let (mut shifts, mut tests, mut findings) = (Vec::new(), Vec::new(), Vec::new());
    for found in &fleet.metrics {
        let pairs: Vec<(usize, f64)> = found
            .members
            .iter()
            .filter_map(|&number| {
                let gpu = &fleet.gpus[number];
                let was = then.get(&(gpu.id, &found.metric))?;
                Some((number, median(&Gpu::logs(&gpu.runs, &found.metric)) - was))
            })
            .collect();
        if pairs.len() < LEAST_PAIRS {
            continue;
        }
        let changes: Vec<f64> = pairs.iter().map(|(_, change)| *change).collect();
        let (shift, spread) = (median(&changes), mad_sd(&changes));
        let device = fleet.groups[found.group].0;
        if shift <= limit {
            let evidence = format!(
                "{} of {} {device} is {} than on {}, all together",
                found.metric,
                pairs.len(),
                slower(shift),
                day.at
            );
            findings.push(Finding {
                metric: Some(found.metric.clone()),
                effect: Some(shift.exp_m1()),
                ..common(FindingKind::FleetChanged, evidence)
            });
        }
        let freedom = MAD_EFFICIENCY * (pairs.len() as f64 - 1.0);
        for (number, change) in &pairs {
            let count = Gpu::logs(&fleet.gpus[*number].runs, &found.metric).len();
            // Two medians of processes differ.
            let floor = found.judged.process_spread * median_error(count) * std::f64::consts::SQRT_2;
            let scale = spread.max(floor);
            let p = if scale > 0.0 { student_tail((change - shift) / scale, freedom) } else { 1.0 };
            tests.push((*number, &found.metric, change - shift, p));
        }
        shifts.push(DayShift {
            device: device.to_owned(),
            metric: found.metric.clone(),
            gpus: pairs.len(),
            shift: shift.exp_m1(),
            spread,
        });
    }
    let adjusted = holm(&tests.iter().map(|(.., p)| *p).collect::<Vec<_>>());
    let mut seen = std::collections::HashSet::new();
    for ((number, metric, effect, _), p) in tests.iter().zip(adjusted) {
        if *effect <= limit && p <= fleet.settings.alpha && seen.insert(*number) {
            let evidence = format!(
                "{metric} is {} than on {}, beside what all changed by; p {} after Holm",
                slower(*effect),
                day.at,
                probability(p)
            );
            let base = fleet.about(FindingKind::GpuChanged, *number, evidence);
            let metric = Some((*metric).clone());
            findings.push(Finding { metric, effect: Some(effect.exp_m1()), p_adjusted: Some(p), ..base });
        }
    }
    (shifts, findings)
}

/// GPUs that are in another place than they were, and those that are gone from a node which still reports.
fn moved(fleet: &Fleet<'_>, day: &FleetReport) -> Vec<Finding> {
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
