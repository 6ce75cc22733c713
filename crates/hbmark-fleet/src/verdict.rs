//! From everything that was read to a report: who is judged with whom, what is named, and what is missing.
//!
//! Enters: a [`Reading`], settings, and reports of other days. Leaves: a [`FleetReport`]. Names follow three rules that must hold together: the
//! effect exceeds the margin, the test says so after Holm's correction over all tests of the report, and a confirming run agrees; without one
//! the name is SUSPECT. Holm's and not Benjamini-Hochberg's, because every name costs a drained GPU: the promise is on any false name in a
//! report, not on their share.

mod days;
mod missing;
mod names;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Write as _;

use crate::folder::{NodeRecord, NoticeKind, Notices, Reading, Run, SPEED_FACTS};
use crate::judge::{self, Judged, Member};
use crate::metric::Metric;
use crate::plan::Manifest;
use crate::result::{
    Expected, Finding, FindingKind, FleetReport, GpuRow, GpuValue, Group, MetricSummary, REPORT_VERSION,
    ReportMark, Settings, State,
};
use hbmark_core::stats::{MAD_EFFICIENCY, holm, median, student_quantile};

/// A GPU with its runs.
struct Gpu<'a> {
    id: &'a str,
    node: usize,
    rack: Option<usize>,
    slot: Option<u32>,
    /// The product's name.
    device: &'a str,
    /// The number of its group.
    group: usize,
    runs: Vec<&'a Run>,
    /// Of a confirming plan.
    again: Vec<&'a Run>,
}

impl<'a> Gpu<'a> {
    /// A metric's log speeds over fresh processes.
    fn logs(runs: &[&Run], metric: &Metric) -> Vec<f64> {
        let of = |run: &&Run| run.values.iter().find(|(m, _)| m == metric).map(|(_, v)| metric.log_speed(*v));
        runs.iter().filter_map(of).filter(|log| log.is_finite()).collect()
    }

    fn last(&self) -> Option<&'a Run> {
        self.runs.last().or(self.again.last()).copied()
    }
}

/// One metric over a group, judged.
struct JudgedMetric {
    group: usize,
    metric: Metric,
    /// GPUs by number, in the order of `judged.gpus`.
    members: Vec<usize>,
    slots: Vec<u32>,
    judged: Judged,
    /// Corrected p values of GPUs, of their steadiness, of nodes, of racks and of slots.
    adjusted: Adjusted,
}

#[derive(Default)]
struct Adjusted {
    gpus: Vec<f64>,
    steadiness: Vec<f64>,
    nodes: Vec<Option<f64>>,
    racks: Vec<Option<f64>>,
    slots: Vec<f64>,
}

/// What is known before anything is named.
struct Fleet<'a> {
    settings: &'a Settings,
    gpus: Vec<Gpu<'a>>,
    nodes: Vec<String>,
    racks: Vec<String>,
    /// Rack of a node.
    rack_of: HashMap<usize, usize>,
    /// Equal GPUs, by their product's name and what of their settings other groups of it have not.
    groups: Vec<(String, Vec<usize>)>,
    metrics: Vec<JudgedMetric>,
    tests: usize,
}

/// Judges a fleet. `past` are reports of other days, in any order.
pub fn verdict(mut reading: Reading, settings: &Settings, past: &[FleetReport]) -> FleetReport {
    let plans = choose_plans(&mut reading);
    let Reading { runs, nodes: records, files, mut notices, .. } = reading;
    let mut used = Vec::with_capacity(runs.len());
    for run in &runs {
        match (&run.plan, &plans.first) {
            (Some(plan), _) if plans.confirming.contains(plan) => used.push((run, true)),
            (plan, Some(first)) if plan.as_ref() != Some(first) => {
                let of =
                    plan.as_ref().map_or_else(|| "of no plan".to_owned(), |plan| format!("of plan {plan}"));
                notices.add(NoticeKind::OtherPlan, run.path.clone(), of);
            }
            _ => used.push((run, false)),
        }
    }
    leave_out_other_settings(&mut used, &mut notices);
    let manifest = plans.manifest.as_ref();
    let mut fleet = Fleet::new(settings, &used, manifest);
    fleet.judge();
    let compared = days::compare(&fleet, plans.first.as_deref(), past, &mut notices);
    let changes = fleet.correct(&compared);
    let records: Vec<&NodeRecord> = records
        .iter()
        .filter(|record| plans.first.as_ref().is_none_or(|plan| *plan == record.plan))
        .collect();
    let mut states = vec![State::Ok; fleet.gpus.len()];
    let mut findings = names::faults(&fleet, &records, &mut states);
    findings.extend(names::slow(&fleet, &mut states));
    findings.extend(names::fleet_wide(&fleet, &mut states));
    let days = days::trend(&compared, &findings);
    findings.extend(days::changed(&fleet, &compared, &changes, &findings));
    findings.extend(days::moved(&fleet, past));
    let (missing, absent) = missing::find(&fleet, manifest, &records, past);
    findings.extend(absent.findings);
    let mut gpus = fleet.rows(&states);
    gpus.extend(absent.failed);
    gpus.sort_by(|a, b| (&a.node, a.slot, &a.gpu).cmp(&(&b.node, b.slot, &b.gpu)));
    findings.sort_by(|a, b| {
        let key =
            |f: &Finding| (std::cmp::Reverse(f.kind.level()), f.kind, f.node.clone(), f.slot, f.gpu.clone());
        key(a).cmp(&key(b)).then(a.evidence.cmp(&b.evidence))
    });
    notices.shown.sort();
    FleetReport {
        schema_version: REPORT_VERSION,
        kind: ReportMark::FleetReport,
        plan: plans.first,
        at: used.iter().map(|(run, _)| run.started_at.as_str()).max().unwrap_or_default().to_owned(),
        settings: settings.clone(),
        expected: manifest.map(|manifest| Expected {
            plan: manifest.plan.name.clone(),
            digest: manifest.digest.clone(),
            nodes: manifest.nodes.len(),
            gpus: manifest.gpus(),
            processes: manifest.plan.processes,
        }),
        emulated: used.iter().any(|(run, _)| run.emulated),
        runs: used.len(),
        files,
        groups: fleet.summaries(),
        findings,
        gpus,
        missing,
        notices,
        tests: fleet.tests,
        // Holm's steps beyond the first false name add α² and so on.
        expected_false_names: if fleet.tests > 0 { settings.alpha / (1.0 - settings.alpha) } else { 0.0 },
        days,
    }
}

/// Leaves out runs whose settings are not those of most runs of the GPU's first plan: they are measurements of another thing.
fn leave_out_other_settings(used: &mut Vec<(&Run, bool)>, notices: &mut Notices) {
    // How many runs have the settings, and the latest of them.
    let mut counts: HashMap<&str, Vec<(&Run, usize)>> = HashMap::new();
    for first in [true, false] {
        for (run, again) in used.iter().filter(|(_, again)| *again != first) {
            let known = counts.entry(&run.gpu).or_default();
            match known.iter_mut().find(|(other, _)| other.speed_facts() == run.speed_facts()) {
                Some(seen) => *seen = (*run, seen.1 + usize::from(!again)),
                None => known.push((*run, usize::from(!again))),
            }
        }
    }
    let usual: HashMap<&str, &Run> = counts
        .into_iter()
        .filter_map(|(gpu, known)| {
            let most =
                known.into_iter().max_by(|a, b| (a.1, &a.0.started_at).cmp(&(b.1, &b.0.started_at)))?;
            Some((gpu, most.0))
        })
        .collect();
    used.retain(|(run, _)| {
        let (here, usual) = (run.speed_facts(), usual[run.gpu.as_str()].speed_facts());
        let differs = SPEED_FACTS.iter().zip(here).zip(usual).find(|((_, here), usual)| here != usual);
        if let Some(((name, here), usual)) = differs {
            notices.add(
                NoticeKind::OtherSettings,
                run.path.clone(),
                format!("{name} {here}, and mostly {usual}"),
            );
        }
        differs.is_none()
    });
}

/// Which plan is judged, and which ones confirm it.
struct Plans {
    first: Option<String>,
    confirming: BTreeSet<String>,
    manifest: Option<Manifest>,
}

/// The plan of the manifest that most runs belong to, or of most runs where there is no manifest. Manifests of one plan are joined.
fn choose_plans(reading: &mut Reading) -> Plans {
    let mut runs_of: BTreeMap<&str, usize> = BTreeMap::new();
    for run in &reading.runs {
        *runs_of.entry(run.plan.as_deref().unwrap_or_default()).or_default() += 1;
    }
    let is_first = |manifest: &Manifest| manifest.plan.confirms.is_none();
    let any_first = reading.manifests.iter().any(|(_, manifest)| is_first(manifest));
    let candidates = reading.manifests.iter().filter(|(_, manifest)| is_first(manifest) || !any_first);
    let best = candidates.map(|(_, manifest)| manifest).max_by(|a, b| {
        let runs = |m: &Manifest| runs_of.get(m.digest.as_str()).copied().unwrap_or(0);
        runs(a).cmp(&runs(b)).then(b.digest.cmp(&a.digest))
    });
    let first = best.map(|manifest| manifest.digest.clone()).or_else(|| {
        let plans = runs_of.iter().filter(|(plan, _)| !plan.is_empty());
        plans.max_by(|a, b| a.1.cmp(b.1).then(b.0.cmp(a.0))).map(|(plan, _)| (*plan).to_owned())
    });
    let confirming = reading
        .manifests
        .iter()
        .filter(|(_, manifest)| any_first && !is_first(manifest))
        .map(|(_, manifest)| manifest.digest.clone())
        .collect();
    let mut joined: Option<Manifest> = None;
    for (path, manifest) in &reading.manifests {
        if Some(&manifest.digest) != first.as_ref() {
            if is_first(manifest) {
                let path = hbmark_core::input::plain(&path.to_string_lossy());
                reading.notices.add(NoticeKind::OtherManifest, path, format!("of plan {}", manifest.digest));
            }
            continue;
        }
        match &mut joined {
            None => joined = Some(manifest.clone()),
            Some(known) => {
                let names: BTreeSet<String> = known.nodes.iter().map(|n| n.node.name.clone()).collect();
                known.nodes.extend(manifest.nodes.iter().filter(|n| !names.contains(&n.node.name)).cloned());
            }
        }
    }
    Plans { first, confirming, manifest: joined }
}

impl<'a> Fleet<'a> {
    fn new(settings: &'a Settings, used: &[(&'a Run, bool)], manifest: Option<&Manifest>) -> Self {
        let mut fleet = Self {
            settings,
            gpus: Vec::new(),
            nodes: Vec::new(),
            racks: Vec::new(),
            rack_of: HashMap::new(),
            groups: Vec::new(),
            metrics: Vec::new(),
            tests: 0,
        };
        let mut by_gpu: BTreeMap<&str, (Vec<&Run>, Vec<&Run>)> = BTreeMap::new();
        for (run, again) in used {
            let (first, second) = by_gpu.entry(&run.gpu).or_default();
            if *again { second.push(run) } else { first.push(run) }
        }
        let racks: HashMap<&str, &str> = manifest
            .iter()
            .flat_map(|manifest| &manifest.nodes)
            .filter_map(|node| Some((node.node.name.as_str(), node.node.rack.as_deref()?)))
            .collect();
        let names: BTreeSet<&str> = used.iter().map(|(run, _)| run.node.as_str()).collect();
        fleet.nodes = names.into_iter().map(str::to_owned).collect();
        let node_number: HashMap<String, usize> =
            fleet.nodes.iter().enumerate().map(|(number, name)| (name.clone(), number)).collect();
        for (id, (runs, again)) in by_gpu {
            let Some(last) = runs.last().or(again.last()) else { continue };
            let node = node_number[&last.node];
            let rack =
                racks.get(last.node.as_str()).map(|rack| (*rack).to_owned()).or_else(|| last.rack.clone());
            let rack = rack.map(|rack| fleet.rack_number(&rack));
            if let Some(rack) = rack {
                fleet.rack_of.insert(node, rack);
            }
            let (device, slot) = (last.device.as_str(), last.slot);
            fleet.gpus.push(Gpu { id, node, rack, slot, device, group: 0, runs, again });
        }
        fleet.group();
        fleet
    }

    /// Puts GPUs together that are compared with each other: of one product, under equal settings, measured by one build.
    fn group(&mut self) {
        let mut groups: BTreeMap<(&str, [&str; SPEED_FACTS.len()]), Vec<usize>> = BTreeMap::new();
        for (number, gpu) in self.gpus.iter().enumerate() {
            let facts = gpu.last().map_or(["unknown"; SPEED_FACTS.len()], Run::speed_facts);
            groups.entry((gpu.device, facts)).or_default().push(number);
        }
        let keys: Vec<_> = groups.keys().copied().collect();
        for (group, ((device, facts), numbers)) in groups.into_iter().enumerate() {
            let mut shown = device.to_owned();
            for (fact, name) in SPEED_FACTS.iter().enumerate() {
                if keys.iter().any(|(other, theirs)| *other == device && theirs[fact] != facts[fact]) {
                    let _ = write!(shown, ", {name} {}", facts[fact]);
                }
            }
            for &number in &numbers {
                self.gpus[number].group = group;
            }
            self.groups.push((shown, numbers));
        }
    }

    fn rack_number(&mut self, name: &str) -> usize {
        self.racks.iter().position(|known| known == name).unwrap_or_else(|| {
            self.racks.push(name.to_owned());
            self.racks.len() - 1
        })
    }

    /// Judges each metric of each group.
    fn judge(&mut self) {
        let mut found = Vec::new();
        for (group, (_, numbers)) in self.groups.iter().enumerate() {
            let metrics: BTreeSet<&Metric> = numbers
                .iter()
                .flat_map(|&gpu| self.gpus[gpu].runs.iter().flat_map(|run| run.values.iter().map(|(m, _)| m)))
                .collect();
            for metric in metrics {
                found.extend(self.judge_metric(group, numbers, metric));
            }
        }
        self.metrics = found;
    }

    /// Corrects all tests of the report together; the corrected p values of what changed since the latest day that is compared.
    fn correct(&mut self, days: &[days::Compared<'_>]) -> Vec<f64> {
        let changes = days.last().map_or(&[][..], |day| &day.changes);
        let changes: Vec<f64> = changes.iter().map(|change| change.p).collect();
        let (tests, adjusted) = correct(&mut self.metrics, &changes);
        self.tests = tests;
        adjusted
    }

    fn judge_metric(&self, group: usize, numbers: &[usize], metric: &Metric) -> Option<JudgedMetric> {
        let with_logs = numbers.iter().map(|&gpu| (gpu, Gpu::logs(&self.gpus[gpu].runs, metric)));
        let enough: Vec<(usize, Vec<f64>)> =
            with_logs.filter(|(_, logs)| logs.len() >= self.settings.processes.max(2)).collect();
        let slots: BTreeSet<u32> = enough.iter().filter_map(|(gpu, _)| self.gpus[*gpu].slot).collect();
        let slots: Vec<u32> = slots.into_iter().collect();
        let (members, logs): (Vec<usize>, Vec<Vec<f64>>) = enough.into_iter().unzip();
        let given: Vec<Member> = members
            .iter()
            .zip(logs)
            .map(|(&number, logs)| {
                let gpu = &self.gpus[number];
                let slot = gpu.slot.and_then(|slot| slots.binary_search(&slot).ok());
                Member { node: gpu.node, rack: gpu.rack, slot, logs }
            })
            .collect();
        let judged = judge::judge(&given)?;
        let adjusted = Adjusted::default();
        Some(JudgedMetric { group, metric: metric.clone(), members, slots, judged, adjusted })
    }

    /// How many of these GPUs have a metric from enough processes.
    fn having(&self, numbers: &[usize], metric: &Metric) -> usize {
        let enough = |&&number: &&usize| {
            Gpu::logs(&self.gpus[number].runs, metric).len() >= self.settings.processes.max(2)
        };
        numbers.iter().filter(enough).count()
    }

    /// How many of these GPUs have each value of a fact, by the last run of each.
    fn facts(&self, numbers: &[usize]) -> Vec<(String, Vec<(String, usize)>)> {
        let mut facts: BTreeMap<&str, BTreeMap<&str, usize>> = BTreeMap::new();
        for (name, value) in
            numbers.iter().filter_map(|&gpu| self.gpus[gpu].last()).flat_map(|run| &run.facts)
        {
            *facts.entry(name).or_default().entry(value).or_default() += 1;
        }
        let counted = |values: BTreeMap<&str, usize>| {
            values.into_iter().map(|(value, count)| (value.to_owned(), count)).collect()
        };
        facts.into_iter().map(|(name, values)| (name.to_owned(), counted(values))).collect()
    }

    /// Groups with their metrics, for the report.
    fn summaries(&self) -> Vec<Group> {
        self.groups
            .iter()
            .enumerate()
            .map(|(group, (device, numbers))| Group {
                device: device.clone(),
                gpus: numbers.len(),
                metrics: self.metrics.iter().filter(|m| m.group == group).map(|m| self.summary(m)).collect(),
                facts: self.facts(numbers),
            })
            .collect()
    }

    fn summary(&self, found: &JudgedMetric) -> MetricSummary {
        let judged = &found.judged;
        let sheet = found.members.iter().find_map(|&gpu| self.gpus[gpu].last()?.datasheet_bytes_per_s);
        let center = found.metric.value(judged.center);
        MetricSummary {
            metric: found.metric.clone(),
            gpus: found.members.len(),
            center,
            spread: judged.spread,
            process_spread: judged.process_spread,
            detectable: self.detectable(found),
            datasheet_share: sheet.filter(|_| found.metric == Metric::Read).map(|sheet| center / sheet),
            slots: judged
                .slots
                .iter()
                .flatten()
                .zip(&found.slots)
                .map(|(e, slot)| (*slot, e.exp_m1()))
                .collect(),
        }
    }

    /// The least share that a single GPU is slower by when it is named with a chance of one half.
    fn detectable(&self, found: &JudgedMetric) -> f64 {
        let scale = median(&found.judged.gpus.iter().map(|gpu| gpu.scale).collect::<Vec<_>>());
        let freedom = MAD_EFFICIENCY * (found.members.len() as f64 - 1.0);
        let reach = student_quantile(self.settings.alpha / self.tests.max(1) as f64, freedom).abs() * scale;
        (1.0 - (-reach).exp()).max(self.settings.margin)
    }

    fn rows(&self, states: &[State]) -> Vec<GpuRow> {
        let mut effects: HashMap<(usize, &Metric), f64> = HashMap::new();
        for found in &self.metrics {
            for (&gpu, tested) in found.members.iter().zip(&found.judged.gpus) {
                effects.insert((gpu, &found.metric), tested.effect.exp_m1());
            }
        }
        self.gpus
            .iter()
            .enumerate()
            .map(|(number, gpu)| {
                let metrics: BTreeSet<&Metric> =
                    gpu.runs.iter().flat_map(|run| run.values.iter().map(|(metric, _)| metric)).collect();
                let values = metrics.into_iter().map(|metric| {
                    let logs = Gpu::logs(&gpu.runs, metric);
                    GpuValue {
                        metric: metric.clone(),
                        value: metric.value(median(&logs)),
                        effect: effects.get(&(number, metric)).copied(),
                        processes: logs.len(),
                    }
                });
                let last = gpu.last();
                GpuRow {
                    gpu: gpu.id.to_owned(),
                    state: states[number],
                    node: self.nodes[gpu.node].clone(),
                    rack: gpu.rack.map(|rack| self.racks[rack].clone()),
                    slot: gpu.slot,
                    serial: last.and_then(|run| run.serial.clone()),
                    pci_bus_id: last.and_then(|run| run.pci_bus_id.clone()),
                    device: self.groups[gpu.group].0.clone(),
                    processes: gpu.runs.len(),
                    confirming: gpu.again.len(),
                    values: values.collect(),
                }
            })
            .collect()
    }

    /// A finding about a GPU.
    fn about(&self, kind: FindingKind, number: usize, evidence: String) -> Finding {
        let gpu = &self.gpus[number];
        Finding {
            rack: gpu.rack.map(|rack| self.racks[rack].clone()),
            node: Some(self.nodes[gpu.node].clone()),
            gpu: Some(gpu.id.to_owned()),
            slot: gpu.slot,
            ..names::common(kind, evidence)
        }
    }
}

/// Corrects all tests together, with these others; how many there are, and the others' corrected p values.
fn correct(metrics: &mut [JudgedMetric], others: &[f64]) -> (usize, Vec<f64>) {
    let mut p = Vec::new();
    for found in metrics.iter() {
        let judged = &found.judged;
        p.extend(judged.gpus.iter().map(|tested| tested.p));
        p.extend(judged.steadiness.iter().map(|steadiness| steadiness.p));
        p.extend(judged.nodes.iter().chain(&judged.racks).flatten().map(|tested| tested.p));
        p.extend(judged.slot_tests.iter().map(|tested| tested.p));
    }
    p.extend(others);
    let mut adjusted = holm(&p).into_iter();
    for found in metrics {
        let mut take = |count: usize| -> Vec<f64> { adjusted.by_ref().take(count).collect() };
        let (gpus, steadiness) = (take(found.members.len()), take(found.members.len()));
        let mut units = |units: &[Option<judge::Tested>]| -> Vec<Option<f64>> {
            units.iter().map(|unit| unit.as_ref().and_then(|_| adjusted.next())).collect()
        };
        let nodes = units(&found.judged.nodes);
        let racks = units(&found.judged.racks);
        let slots = adjusted.by_ref().take(found.judged.slot_tests.len()).collect();
        found.adjusted = Adjusted { gpus, steadiness, nodes, racks, slots };
    }
    (p.len(), adjusted.collect())
}

#[cfg(test)]
mod tests;
