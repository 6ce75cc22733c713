//! Who is named: faults that need no comparison, units that are slow, and what all GPUs have in common.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fmt::Write as _;

use super::{Fleet, Gpu, JudgedMetric};
use crate::folder::{Lack, NodeRecord, Run, SPEED_FACTS, Unmeasured};
use crate::judge::{self, Tested};
use crate::metric::Metric;
use crate::result::{Finding, FindingKind, State};
use hbmark_core::stats::{median, student_tail};

/// Controls of a confirming run without which the day's common shift stays unknown.
const LEAST_CONTROLS: usize = 3;

/// A group in which a GPU is named only if it is slower by more than so many margins is not called OK.
const BLIND_MARGINS: f64 = 5.0;

/// Metrics without enough values that one finding lists.
const MAX_SAID: usize = 3;

/// A unit that can be named.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Unit {
    Rack(usize),
    Node(usize),
    Gpu(usize),
}

/// A unit that is slow in a metric.
struct Candidate<'a> {
    unit: Unit,
    found: &'a JudgedMetric,
    tested: Tested,
    p_adjusted: f64,
}

/// What the confirming run says.
enum Confirmed {
    /// There is none of this unit and metric, or too few processes.
    No,
    /// The unit ran again, and of the GPUs beyond suspicion only so many: what the day changed is not known.
    NoControls(usize),
    Agrees {
        effect: f64,
        processes: usize,
    },
    Disagrees {
        effect: f64,
        processes: usize,
    },
}

/// Faults of single GPUs that need no comparison.
pub(super) fn faults(fleet: &Fleet<'_>, records: &[&NodeRecord], states: &mut [State]) -> Vec<Finding> {
    let mut findings = Vec::new();
    let usual: Vec<Vec<&Metric>> =
        fleet.groups.iter().map(|(_, numbers)| usual_metrics(fleet, numbers)).collect();
    for (number, gpu) in fleet.gpus.iter().enumerate() {
        let runs: Vec<_> = gpu.runs.iter().chain(&gpu.again).collect();
        let mut say = |kind, evidence: String| findings.push(fleet.about(kind, number, evidence));
        if let Some(remapped) = gpu.last().and_then(|run| run.remapped)
            && (remapped.failed || remapped.pending)
        {
            let what =
                if remapped.failed { "could not be replaced" } else { "are replaced at the next reset" };
            say(
                FindingKind::GpuMemoryFault,
                format!("rows of its memory {what} ({} uncorrectable so far)", remapped.uncorrectable),
            );
        }
        let wrong: Vec<&String> = runs.iter().flat_map(|run| &run.wrong).collect();
        if let Some(first) = wrong.first() {
            states[number] = State::WrongOutput;
            say(
                FindingKind::GpuWrongOutput,
                format!("{} of its cells are wrong, first {first}", wrong.len()),
            );
        }
        if let Some((kind, state, evidence)) = without_number(fleet, number, &usual[gpu.group], records) {
            states[number] = states[number].max_of(state);
            say(kind, evidence);
        }
        let disturbed = runs.iter().filter(|run| !run.disturbed.is_empty()).count();
        if disturbed * 2 > runs.len() {
            let first = runs.iter().flat_map(|run| &run.disturbed).next().map_or("", |w| w);
            say(
                FindingKind::GpuDisturbed,
                format!("{disturbed} of {} processes were disturbed: {first}", runs.len()),
            );
        }
    }
    findings
}

/// Metrics that at least half of some GPUs have from enough processes.
fn usual_metrics<'a>(fleet: &Fleet<'a>, numbers: &[usize]) -> Vec<&'a Metric> {
    let with_runs = numbers.iter().filter(|number| !fleet.gpus[**number].runs.is_empty()).count();
    let metrics = metrics_of(fleet, numbers, |run| run.values.iter().map(|(metric, _)| metric).collect());
    metrics.into_iter().filter(|metric| fleet.having(numbers, metric) * 2 >= with_runs).collect()
}

/// Metrics of the first runs of some GPUs.
fn metrics_of<'a>(
    fleet: &Fleet<'a>,
    numbers: &[usize],
    of: impl Fn(&'a Run) -> Vec<&'a Metric>,
) -> BTreeSet<&'a Metric> {
    numbers.iter().flat_map(|&number| &fleet.gpus[number].runs).flat_map(|run| of(run)).collect()
}

/// What a GPU's processes left no number of, although they should have: the finding, the GPU's state, and the evidence.
fn without_number(
    fleet: &Fleet<'_>,
    number: usize,
    usual: &[&Metric],
    records: &[&NodeRecord],
) -> Option<(FindingKind, State, String)> {
    let gpu = &fleet.gpus[number];
    let needed = fleet.settings.processes;
    let runs: Vec<&Run> = gpu.runs.iter().chain(&gpu.again).copied().collect();
    let first = |of: &dyn Fn(&Unmeasured) -> bool| {
        let why = runs.iter().flat_map(|run| &run.unmeasured).find(|unmeasured| of(unmeasured));
        why.map(|unmeasured| unmeasured.why.as_str())
    };
    let measured = gpu.runs.iter().filter(|run| !run.values.is_empty()).count();
    if measured == 0 && !gpu.runs.is_empty() {
        let why = first(&|_| true).unwrap_or_default();
        let evidence = format!("no number in {} results: {why}", runs.len());
        return Some((FindingKind::GpuFailed, State::Failed, evidence));
    }
    let failing = |run: &&&Run| run.unmeasured.iter().any(|unmeasured| unmeasured.lack == Lack::Failed);
    let failed = runs.iter().filter(failing).count();
    let why_failed = first(&|unmeasured| unmeasured.lack == Lack::Failed).unwrap_or_default();
    let of_failed = format!("cells failed in {failed} of {} processes, first {why_failed}", runs.len());
    if failed * 2 > runs.len() {
        return Some((FindingKind::GpuFailed, State::Failed, of_failed));
    }
    if measured < needed {
        let mut evidence = format!("{measured} fresh processes, and {needed} are needed");
        let record = records.iter().flat_map(|record| &record.tasks).find(|task| task.device == gpu.id);
        if let Some(failure) = record.and_then(|task| task.failures.first()) {
            let _ = write!(evidence, "; {failure}");
        }
        return Some((FindingKind::GpuTooFew, State::TooFew, evidence));
    }
    let mut said: Vec<String> = (failed > 0).then_some(of_failed).into_iter().collect();
    let mut state = State::Ok;
    // Wrong outputs are said already, and leave no value.
    let usual = if runs.iter().any(|run| !run.wrong.is_empty()) { &usual[..0] } else { usual };
    for &metric in usual {
        let found = Gpu::logs(&gpu.runs, metric).len();
        let of_it = |unmeasured: &Unmeasured| match &unmeasured.metric {
            Some(other) => other == metric,
            None => !metric.is_time(),
        };
        let why = first(&of_it);
        if found < needed {
            state = State::TooFew;
            let why = why.unwrap_or("it is not in its results");
            said.push(format!("{metric} in {found} processes, and {needed} are needed: {why}"));
        } else if let Some(why) = first(&|it| of_it(it) && it.lack == Lack::Invalid) {
            said.push(format!("{metric} in {found} of {} processes: {why}", gpu.runs.len()));
        }
    }
    if said.len() > MAX_SAID {
        let more = said.len() - MAX_SAID;
        said.truncate(MAX_SAID);
        said.push(format!("{more} more"));
    }
    (!said.is_empty()).then(|| (FindingKind::GpuTooFew, state, said.join("; ")))
}

impl State {
    /// A state that is not lost to a weaker one.
    fn max_of(self, other: Self) -> Self {
        if self == Self::WrongOutput || other == Self::Ok { self } else { other }
    }
}

/// Units that are slow: racks first, then nodes that are slower than their rack, then GPUs that are slower than their node.
pub(super) fn slow(fleet: &Fleet<'_>, states: &mut [State]) -> Vec<Finding> {
    let mut by_unit: BTreeMap<Unit, Vec<Candidate<'_>>> = BTreeMap::new();
    for found in &fleet.metrics {
        for candidate in candidates(fleet, found) {
            by_unit.entry(candidate.unit).or_default().push(candidate);
        }
    }
    let suspects: HashSet<usize> = by_unit.keys().flat_map(|unit| members_of(fleet, *unit)).collect();
    let tests_again: usize = by_unit.values().map(Vec::len).sum();
    let mut findings = Vec::new();
    for (unit, mut candidates) in by_unit {
        candidates.sort_by(|a, b| a.tested.effect.total_cmp(&b.tested.effect));
        let confirmed: Vec<Confirmed> =
            candidates.iter().map(|c| confirm(fleet, c, &suspects, tests_again)).collect();
        let agrees = confirmed.iter().position(|found| matches!(found, Confirmed::Agrees { .. }));
        let disagrees = confirmed.iter().position(|found| matches!(found, Confirmed::Disagrees { .. }));
        let (index, state) = match (agrees, disagrees) {
            (Some(index), _) => (index, State::Slow),
            // One metric that was not measured again keeps the suspicion.
            (None, Some(index)) if confirmed.iter().all(|c| matches!(c, Confirmed::Disagrees { .. })) => {
                (index, State::NotConfirmed)
            }
            _ => (0, State::Suspect),
        };
        mark(fleet, unit, &candidates[index], state, states);
        findings.push(finding(fleet, unit, &candidates, index, &confirmed[index], state));
    }
    findings.extend(unstable(fleet, states));
    findings
}

/// Effects at or below this exceed the margin.
fn limit(fleet: &Fleet<'_>) -> f64 {
    (1.0 - fleet.settings.margin).ln()
}

/// The units of one metric that exceed the margin and pass the test, without those that their node or rack explains.
fn candidates<'a>(fleet: &Fleet<'_>, found: &'a JudgedMetric) -> Vec<Candidate<'a>> {
    let limit = limit(fleet);
    let passes =
        |tested: &Tested, p: f64| tested.effect <= limit && tested.shared && p <= fleet.settings.alpha;
    let units = |tested: &[Option<Tested>], adjusted: &[Option<f64>]| -> BTreeMap<usize, (Tested, f64)> {
        let pairs = tested.iter().zip(adjusted).enumerate();
        pairs
            .filter_map(|(number, (tested, p))| Some((number, ((*tested)?, (*p)?))))
            .filter(|(_, (tested, p))| passes(tested, *p))
            .collect()
    };
    let racks = units(&found.judged.racks, &found.adjusted.racks);
    let mut nodes = units(&found.judged.nodes, &found.adjusted.nodes);
    for (node, p) in named_by_gpus(fleet, found, &passes) {
        if let Some(tested) = found.judged.nodes[node].filter(|t| t.shared && t.effect <= limit) {
            nodes.entry(node).or_insert((tested, p));
        }
    }
    let rack_effect = |node: usize| {
        fleet.rack_of.get(&node).and_then(|rack| racks.get(rack)).map_or(0.0, |(tested, _)| tested.effect)
    };
    let of = |unit, (tested, p_adjusted)| Candidate { unit, found, tested, p_adjusted };
    let mut named: Vec<Candidate<'a>> = racks.iter().map(|(rack, t)| of(Unit::Rack(*rack), *t)).collect();
    named.extend(
        nodes
            .iter()
            .filter(|(node, (tested, _))| tested.effect - rack_effect(**node) <= limit)
            .map(|(node, t)| of(Unit::Node(*node), *t)),
    );
    for ((&number, tested), &p) in found.members.iter().zip(&found.judged.gpus).zip(&found.adjusted.gpus) {
        let node = fleet.gpus[number].node;
        let explained = nodes.get(&node).map_or_else(|| rack_effect(node), |(tested, _)| tested.effect);
        if passes(tested, p) && tested.effect - explained <= limit {
            named.push(of(Unit::Gpu(number), (*tested, p)));
        }
    }
    named
}

/// Nodes of whose GPUs at least half would be named, with the largest p of these: one name for what they share. A small fleet has few nodes
/// to tell their spread from, and many GPUs.
fn named_by_gpus(
    fleet: &Fleet<'_>,
    found: &JudgedMetric,
    passes: &impl Fn(&Tested, f64) -> bool,
) -> Vec<(usize, f64)> {
    let mut nodes: BTreeMap<usize, (usize, usize, f64)> = BTreeMap::new();
    for ((&number, tested), &p) in found.members.iter().zip(&found.judged.gpus).zip(&found.adjusted.gpus) {
        let (gpus, named, highest) = nodes.entry(fleet.gpus[number].node).or_default();
        *gpus += 1;
        if passes(tested, p) {
            *named += 1;
            *highest = highest.max(p);
        }
    }
    let whole = nodes.into_iter().filter(|(_, (gpus, named, _))| *named >= 3 && named * 2 >= *gpus);
    whole.map(|(node, (.., p))| (node, p)).collect()
}

fn members_of(fleet: &Fleet<'_>, unit: Unit) -> Vec<usize> {
    let all = 0..fleet.gpus.len();
    match unit {
        Unit::Gpu(number) => vec![number],
        Unit::Node(node) => all.filter(|&number| fleet.gpus[number].node == node).collect(),
        Unit::Rack(rack) => all.filter(|&number| fleet.gpus[number].rack == Some(rack)).collect(),
    }
}

/// Holds the confirming run against the fleet's first, corrected by what GPUs beyond suspicion changed by.
fn confirm(
    fleet: &Fleet<'_>,
    candidate: &Candidate<'_>,
    suspects: &HashSet<usize>,
    tests: usize,
) -> Confirmed {
    let found = candidate.found;
    let again = |number: usize| {
        let logs = Gpu::logs(&fleet.gpus[number].again, &found.metric);
        (logs.len() >= fleet.settings.processes).then(|| (median(&logs), logs.len()))
    };
    let slot = |number: usize| {
        let slot = fleet.gpus[number].slot.and_then(|slot| found.slots.binary_search(&slot).ok());
        found.judged.slots.as_ref().zip(slot).map_or(0.0, |(slots, slot)| slots[slot])
    };
    let controls: Vec<f64> = found
        .members
        .iter()
        .filter(|number| !suspects.contains(number))
        .filter_map(|&number| {
            Some(again(number)?.0 - median(&Gpu::logs(&fleet.gpus[number].runs, &found.metric)))
        })
        .collect();
    let members: Vec<(f64, usize)> = members_of(fleet, candidate.unit)
        .into_iter()
        .filter_map(|number| {
            let (log, count) = again(number)?;
            Some((log - slot(number) - found.judged.center, count))
        })
        .collect();
    if members.is_empty() {
        return Confirmed::No;
    }
    if controls.len() < LEAST_CONTROLS {
        return Confirmed::NoControls(controls.len());
    }
    let shift = median(&controls);
    let effect = median(&members.iter().map(|(effect, _)| *effect).collect::<Vec<_>>()) - shift;
    let processes = members.iter().map(|(_, count)| *count).min().unwrap_or(0);
    let freedom = hbmark_core::stats::MAD_EFFICIENCY * (found.members.len() as f64 - 1.0);
    let p = student_tail(effect / candidate.tested.scale, freedom);
    if effect <= limit(fleet) && p <= fleet.settings.alpha / tests as f64 {
        Confirmed::Agrees { effect, processes }
    } else {
        Confirmed::Disagrees { effect, processes }
    }
}

/// Gives a state to the members that share an effect.
fn mark(fleet: &Fleet<'_>, unit: Unit, candidate: &Candidate<'_>, state: State, states: &mut [State]) {
    let effects: BTreeMap<usize, f64> = candidate
        .found
        .members
        .iter()
        .zip(&candidate.found.judged.gpus)
        .map(|(number, tested)| (*number, tested.effect))
        .collect();
    for number in members_of(fleet, unit) {
        let shares = effects.get(&number).is_some_and(|effect| *effect <= candidate.tested.effect / 2.0);
        let weaker = matches!(states[number], State::Ok | State::NotConfirmed | State::Suspect);
        // What one metric lacks does not hide that another is slow.
        let lacks = states[number] == State::TooFew && state != State::NotConfirmed;
        if shares && (weaker && states[number] < state || lacks) {
            states[number] = state;
        }
    }
}

fn finding(
    fleet: &Fleet<'_>,
    unit: Unit,
    candidates: &[Candidate<'_>],
    index: usize,
    confirmed: &Confirmed,
    state: State,
) -> Finding {
    let Candidate { found, tested, p_adjusted, .. } = &candidates[index];
    let kind = match (unit, state) {
        (_, State::NotConfirmed) => FindingKind::NotConfirmed,
        (Unit::Gpu(_), State::Slow) => FindingKind::GpuSlow,
        (Unit::Node(_), State::Slow) => FindingKind::NodeSlow,
        (Unit::Rack(_), State::Slow) => FindingKind::RackSlow,
        (Unit::Gpu(_), _) => FindingKind::GpuSuspect,
        (Unit::Node(_), _) => FindingKind::NodeSuspect,
        (Unit::Rack(_), _) => FindingKind::RackSuspect,
    };
    let evidence = evidence(fleet, unit, candidates, index, confirmed);
    let base = match unit {
        Unit::Gpu(number) => fleet.about(kind, number, evidence),
        Unit::Node(node) => Finding {
            rack: fleet.rack_of.get(&node).map(|rack| fleet.racks[*rack].clone()),
            node: Some(fleet.nodes[node].clone()),
            ..common(kind, evidence)
        },
        Unit::Rack(rack) => Finding { rack: Some(fleet.racks[rack].clone()), ..common(kind, evidence) },
    };
    Finding {
        metric: Some(found.metric.clone()),
        effect: Some(tested.effect.exp_m1()),
        p_adjusted: Some(*p_adjusted),
        ..base
    }
}

pub(super) fn common(kind: FindingKind, evidence: String) -> Finding {
    Finding {
        kind,
        rack: None,
        node: None,
        gpu: None,
        slot: None,
        metric: None,
        effect: None,
        p_adjusted: None,
        evidence,
    }
}

/// A share in percent, with its sign as a word.
pub(super) fn slower(effect: f64) -> String {
    let percent = effect.exp_m1() * 100.0;
    if percent < 0.0 { format!("{:.1} % slower", -percent) } else { format!("{percent:.1} % faster") }
}

fn evidence(
    fleet: &Fleet<'_>,
    unit: Unit,
    candidates: &[Candidate<'_>],
    index: usize,
    confirmed: &Confirmed,
) -> String {
    let Candidate { found, tested, p_adjusted, .. } = &candidates[index];
    let metric = &found.metric;
    let shown = metric.shown(metric.value(found.judged.center + tested.effect));
    let mut text = format!(
        "{metric} {shown}, {} than the fleet's {}",
        slower(tested.effect),
        metric.shown(metric.value(found.judged.center)),
    );
    match unit {
        Unit::Gpu(number) => {
            let processes = Gpu::logs(&fleet.gpus[number].runs, metric).len();
            let _ = write!(text, ", in {processes} processes");
        }
        Unit::Node(_) | Unit::Rack(_) => {
            let _ = write!(text, ", the median of {} GPUs that share it", members_of(fleet, unit).len());
        }
    }
    let _ = write!(text, "; p {} after Holm", probability(*p_adjusted));
    for other in candidates.iter().enumerate().filter(|(i, _)| *i != index).map(|(_, c)| c).take(3) {
        let _ = write!(text, "; {} {}", other.found.metric, slower(other.tested.effect));
    }
    match confirmed {
        Confirmed::No => text.push_str("; no confirming run yet"),
        Confirmed::NoControls(controls) => {
            let _ = write!(
                text,
                "; no confirming run yet: it was run again beside {controls} GPUs beyond suspicion, and {LEAST_CONTROLS} are needed to tell it \
                 from the day"
            );
        }
        Confirmed::Agrees { effect, processes } => {
            let _ = write!(text, "; confirmed by {processes} more: {}", slower(*effect));
        }
        Confirmed::Disagrees { effect, processes } => {
            let _ = write!(text, "; not confirmed by {processes} more: {}", slower(*effect));
        }
    }
    if let Unit::Gpu(number) = unit {
        for oddity in oddities(fleet, number) {
            let _ = write!(text, "; {oddity}");
        }
    }
    text
}

pub(super) fn probability(p: f64) -> String {
    if p < 1e-4 { format!("{p:.0e}") } else { format!("{p:.4}") }
}

/// In what a GPU differs from most of its group, and what it has suffered.
fn oddities(fleet: &Fleet<'_>, number: usize) -> Vec<String> {
    let gpu = &fleet.gpus[number];
    let Some(run) = gpu.last() else { return Vec::new() };
    let mut found = Vec::new();
    let peers = &fleet.groups[gpu.group].1;
    for (name, value) in &run.facts {
        let of = |number: &usize| {
            let facts = &fleet.gpus[*number].last()?.facts;
            facts.iter().find(|(other, _)| other == name).map(|(_, value)| value.as_str())
        };
        let same = peers.iter().filter(|number| of(number) == Some(value)).count();
        if same * 10 < peers.len() {
            found.push(format!("its {name} is {value}, as of {same} of {}", peers.len()));
        }
    }
    if !run.xids.is_empty() {
        let xids: Vec<String> = run.xids.iter().take(8).map(ToString::to_string).collect();
        found.push(format!("XID {} since the machine was started", xids.join(", ")));
    }
    if let Some(remapped) = run.remapped.filter(|r| r.correctable + r.uncorrectable > 0) {
        found.push(format!("{} rows of memory replaced", remapped.correctable + remapped.uncorrectable));
    }
    found
}

/// A metric in which the processes of a GPU differ more than those of the others.
struct Unsteady<'a> {
    found: &'a JudgedMetric,
    range: f64,
    p_adjusted: f64,
}

/// GPUs whose processes differ more than those of the others. Processes have heavier tails than the normal ones of the test, so that one metric
/// of one run is a note: a second metric or the confirming run makes it a finding.
fn unstable(fleet: &Fleet<'_>, states: &mut [State]) -> Vec<Finding> {
    let mut by_gpu: BTreeMap<usize, Vec<Unsteady<'_>>> = BTreeMap::new();
    for found in &fleet.metrics {
        let pairs = found.members.iter().zip(&found.judged.steadiness).zip(&found.adjusted.steadiness);
        for ((&number, steadiness), &p_adjusted) in pairs {
            if steadiness.range > 2.0 * fleet.settings.margin && p_adjusted <= fleet.settings.alpha {
                let range = steadiness.range;
                by_gpu.entry(number).or_default().push(Unsteady { found, range, p_adjusted });
            }
        }
    }
    let tests_again: usize = by_gpu.values().map(Vec::len).sum();
    let mut findings = Vec::new();
    for (number, mut metrics) in by_gpu {
        metrics.sort_by(|a, b| a.p_adjusted.total_cmp(&b.p_adjusted));
        let again: Vec<(f64, bool)> =
            metrics.iter().filter_map(|m| unsteady_again(fleet, number, m, tests_again)).collect();
        let agrees = again.iter().any(|(_, agrees)| *agrees);
        let (kind, state) = if agrees || metrics.len() > 1 {
            (FindingKind::GpuUnstable, State::Unstable)
        } else if again.is_empty() {
            (FindingKind::UnstableOnce, State::Ok)
        } else {
            (FindingKind::NotConfirmed, State::NotConfirmed)
        };
        if matches!(states[number], State::Ok | State::NotConfirmed) {
            states[number] = states[number].max(state);
        }
        let Unsteady { found, range, p_adjusted } = &metrics[0];
        let mut evidence = format!(
            "{} ranges over {:.1} % in {} processes, where {:.2} % is their usual standard deviation; p {} after Holm",
            found.metric,
            range.exp_m1() * 100.0,
            Gpu::logs(&fleet.gpus[number].runs, &found.metric).len(),
            found.judged.process_spread * 100.0,
            probability(*p_adjusted)
        );
        for other in metrics.iter().skip(1).take(3) {
            let _ = write!(evidence, "; {} over {:.1} %", other.found.metric, other.range.exp_m1() * 100.0);
        }
        match again.iter().find(|(_, it)| *it == agrees) {
            Some((range, _)) => {
                let word = if agrees { "confirmed" } else { "not confirmed" };
                let _ = write!(evidence, "; {word} by the second run: over {:.1} %", range.exp_m1() * 100.0);
            }
            None if metrics.len() > 1 => evidence.push_str("; no confirming run yet"),
            None => {
                evidence.push_str("; one metric of one run, which heavy tails give by chance: run it again");
            }
        }
        let mut finding = fleet.about(kind, number, evidence);
        (finding.metric, finding.p_adjusted) = (Some(found.metric.clone()), Some(*p_adjusted));
        findings.push(finding);
    }
    findings
}

/// Over what the processes of a confirming run range, and whether that is too much once more; `None` of too few.
fn unsteady_again(
    fleet: &Fleet<'_>,
    number: usize,
    metric: &Unsteady<'_>,
    tests: usize,
) -> Option<(f64, bool)> {
    let judged = &metric.found.judged;
    let logs = Gpu::logs(&fleet.gpus[number].again, &metric.found.metric);
    let again = (logs.len() >= fleet.settings.processes)
        .then(|| judge::steadiness(&logs, judged.process_spread, judged.process_freedom))?;
    let agrees = again.range > 2.0 * fleet.settings.margin && again.p <= fleet.settings.alpha / tests as f64;
    Some((again.range, agrees))
}

/// The data sheet, slots, and groups that are too small.
pub(super) fn fleet_wide(fleet: &Fleet<'_>, states: &mut [State]) -> Vec<Finding> {
    let mut findings = below_datasheet(fleet);
    for found in &fleet.metrics {
        let tests = found.slots.iter().zip(&found.judged.slot_tests).zip(&found.adjusted.slots);
        for ((slot, tested), &p) in tests {
            if tested.effect > limit(fleet) || p > fleet.settings.alpha {
                continue;
            }
            let evidence = format!(
                "{} in slot {slot} of every node of {}: {} than in the others; taken out of each GPU; p {} after Holm",
                found.metric,
                fleet.groups[found.group].0,
                slower(tested.effect),
                probability(p)
            );
            findings.push(Finding {
                slot: Some(*slot),
                metric: Some(found.metric.clone()),
                effect: Some(tested.effect.exp_m1()),
                p_adjusted: Some(p),
                ..common(FindingKind::SlotSlow, evidence)
            });
        }
    }
    for group in 0..fleet.groups.len() {
        findings.extend(too_few_peers(fleet, group, states));
        findings.extend(unjudged_metrics(fleet, group));
    }
    findings.extend(facts_differ(fleet));
    findings
}

/// Facts in which GPUs of one product differ, also where they are judged apart for it.
fn facts_differ(fleet: &Fleet<'_>) -> Vec<Finding> {
    let mut products: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (number, gpu) in fleet.gpus.iter().enumerate() {
        products.entry(gpu.device).or_default().push(number);
    }
    let mut findings = Vec::new();
    for (device, numbers) in products {
        for (name, values) in fleet.facts(&numbers).into_iter().filter(|(_, values)| values.len() > 1) {
            let each: Vec<String> =
                values.iter().take(6).map(|(value, count)| format!("{value} on {count}")).collect();
            let apart = if SPEED_FACTS.contains(&name.as_str()) { "; judged apart" } else { "" };
            let evidence = format!("{device}: the {name} is {}{apart}", each.join(", "));
            findings.push(common(FindingKind::FactsDiffer, evidence));
        }
    }
    findings
}

/// Metrics of a group that is judged in others, which too few of its GPUs have.
fn unjudged_metrics(fleet: &Fleet<'_>, group: usize) -> Option<Finding> {
    let (device, numbers) = &fleet.groups[group];
    let judged: Vec<&Metric> =
        fleet.metrics.iter().filter(|found| found.group == group).map(|found| &found.metric).collect();
    if judged.is_empty() {
        return None;
    }
    let metrics = metrics_of(fleet, numbers, |run| {
        let values = run.values.iter().map(|(metric, _)| metric);
        let invalid = run.unmeasured.iter().filter(|unmeasured| unmeasured.lack == Lack::Invalid);
        values.chain(invalid.filter_map(|unmeasured| unmeasured.metric.as_ref())).collect()
    });
    let left: Vec<&Metric> = metrics.into_iter().filter(|metric| !judged.contains(metric)).collect();
    let mut said: Vec<String> = left
        .iter()
        .take(MAX_SAID)
        .map(|metric| {
            let mut text = format!("{metric} on {}", fleet.having(numbers, metric));
            let runs = numbers.iter().flat_map(|&number| &fleet.gpus[number].runs);
            let why = runs
                .flat_map(|run| &run.unmeasured)
                .find(|unmeasured| unmeasured.metric.as_ref() == Some(metric));
            if let Some(unmeasured) = why {
                let _ = write!(text, " ({})", unmeasured.why);
            }
            text
        })
        .collect();
    if left.len() > said.len() {
        said.push(format!("{} more", left.len() - said.len()));
    }
    let evidence = format!(
        "of {} GPUs that are {device}, fewer than {} have enough processes with a value, so that it is not judged: {}",
        numbers.len(),
        judge::LEAST_PEERS,
        said.join("; ")
    );
    (!left.is_empty()).then(|| common(FindingKind::TooFewPeers, evidence))
}

/// The first of some GPUs, with their nodes.
fn listed(fleet: &Fleet<'_>, numbers: &[usize]) -> String {
    let place = |&number: &usize| {
        let gpu = &fleet.gpus[number];
        format!("{} in {}", gpu.id, fleet.nodes[gpu.node])
    };
    let mut shown: Vec<String> = numbers.iter().take(4).map(place).collect();
    if numbers.len() > shown.len() {
        shown.push(format!("{} more", numbers.len() - shown.len()));
    }
    shown.join(", ")
}

/// A group that cannot be judged, or in which nothing but a gross fault would be named: that its GPUs are not named says nothing.
fn too_few_peers(fleet: &Fleet<'_>, group: usize, states: &mut [State]) -> Option<Finding> {
    let (device, numbers) = &fleet.groups[group];
    let judged = fleet.metrics.iter().filter(|found| found.group == group);
    let best = judged
        .map(|found| (fleet.detectable(found), found))
        .min_by(|a, b| a.0.total_cmp(&b.0).then(a.1.metric.cmp(&b.1.metric)));
    let evidence = match best {
        Some((share, _)) if share <= BLIND_MARGINS * fleet.settings.margin => return None,
        Some((share, found)) => format!(
            "{} GPUs are {device}: too few, or too unlike, to tell one from the others; it would have to be {:.0} % slower, in {}, and the \
             margin is {:.1} %",
            numbers.len(),
            share * 100.0,
            found.metric,
            fleet.settings.margin * 100.0
        ),
        None => format!(
            "{} GPUs are {device}: fewer than {} with enough processes are not a group to compare in; {}",
            numbers.len(),
            judge::LEAST_PEERS,
            listed(fleet, numbers)
        ),
    };
    let unjudged: Vec<usize> =
        numbers.iter().copied().filter(|number| states[*number] == State::Ok).collect();
    for &number in &unjudged {
        states[number] = State::NoPeers;
    }
    (!unjudged.is_empty()).then(|| common(FindingKind::TooFewPeers, evidence))
}

/// GPUs, or the whole fleet, that read too little whatever their neighbours do.
fn below_datasheet(fleet: &Fleet<'_>) -> Vec<Finding> {
    let least = fleet.settings.datasheet_share;
    let mut findings = Vec::new();
    for (device, numbers) in &fleet.groups {
        let mut below = Vec::new();
        let mut known = 0;
        for &number in numbers {
            let gpu = &fleet.gpus[number];
            let logs = Gpu::logs(&gpu.runs, &Metric::Read);
            let sheet = gpu.last().and_then(|run| run.datasheet_bytes_per_s).filter(|_| !logs.is_empty());
            let Some(sheet) = sheet else { continue };
            known += 1;
            let value = Metric::Read.value(median(&logs));
            if value < least * sheet {
                below.push((number, value, sheet));
            }
        }
        let text = |value: f64, sheet: f64| {
            format!(
                "reads {}, {:.1} % of the data sheet's {}; {:.0} % is the least",
                Metric::Read.shown(value),
                value / sheet * 100.0,
                Metric::Read.shown(sheet),
                least * 100.0
            )
        };
        if below.len() * 2 > known && known >= judge::LEAST_PEERS {
            let values: Vec<f64> = below.iter().map(|(_, value, _)| *value).collect();
            let evidence = format!(
                "{} of {known} {device}: the median of them {}",
                below.len(),
                text(median(&values), below[0].2)
            );
            findings.push(common(FindingKind::FleetBelowDatasheet, evidence));
            continue;
        }
        for (number, value, sheet) in below {
            findings.push(fleet.about(FindingKind::GpuBelowDatasheet, number, text(value, sheet)));
        }
    }
    findings
}
