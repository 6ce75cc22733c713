//! The statistics of one metric over GPUs: what is common, what belongs to a slot, and tests for each GPU, node and rack.
//!
//! Enters: log speeds of fresh processes by GPU, with node, rack and slot. Leaves: effects relative to the fleet and one p value a unit, not
//! yet corrected. It knows no files and no names.
//!
//! ```text
//! log speed of a GPU = median of its processes = centre + slot + (rack + node + GPU)
//! ```
//!
//! The centre is the fleet's median. What a slot has in common over nodes is taken out before anything is judged; what a node or a rack has
//! in common is not, so that a whole slow node is found. The spread is the median absolute deviation over GPUs, and never less than what
//! processes of one GPU differ by. Spreads are estimated, so tails are Student's.

use hbmark_core::stats::{
    MAD_EFFICIENCY, MEDIAN_ERROR, known_median, mad_sd, median, median_error, median_polish, pooled_sd,
    student_tail, variance_ratio_tail,
};

/// Nodes from which slots are told apart: with fewer, a slot's median takes part of a single GPU's fault with it.
pub const SLOT_NODES: usize = 8;
/// GPUs without which a group has no spread to judge by.
pub const LEAST_PEERS: usize = 4;
/// Members from which a node or a rack is judged as a whole.
const LEAST_MEMBERS: usize = 3;
/// Units from which the spread between them is estimated from them; with fewer it follows from that of their members.
const LEAST_UNITS: usize = 5;
/// The share of members that must have a part of the effect before it is the group's.
const SHARED: f64 = 0.75;

/// One GPU.
#[derive(Debug, Clone, PartialEq)]
pub struct Member {
    /// The number of its node, rack and slot.
    pub node: usize,
    pub rack: Option<usize>,
    pub slot: Option<usize>,
    /// Log speed of each process.
    pub logs: Vec<f64>,
}

/// What was found about a unit: a GPU, a node or a rack.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tested {
    /// On the log scale, relative to the fleet; below zero is slow.
    pub effect: f64,
    /// The spread it was held against.
    pub scale: f64,
    /// One-sided: as slow by chance.
    pub p: f64,
    /// Members share it; always, for a GPU.
    pub shared: bool,
}

/// What was found about the processes of a GPU.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Steadiness {
    /// Slowest to fastest, on the log scale.
    pub range: f64,
    /// A spread as large by chance.
    pub p: f64,
}

/// One metric over a group of equal GPUs.
#[derive(Debug, Clone, PartialEq)]
pub struct Judged {
    pub center: f64,
    /// Standard deviation over GPUs, robust.
    pub spread: f64,
    /// Standard deviation over the processes of one GPU, robust.
    pub process_spread: f64,
    /// Degrees of freedom that it was estimated from.
    pub process_freedom: f64,
    /// Taken out of each GPU; `None` with too few nodes.
    pub slots: Option<Vec<f64>>,
    /// One a slot, as above; empty with too few nodes.
    pub slot_tests: Vec<Tested>,
    /// One a member, in order.
    pub gpus: Vec<Tested>,
    pub steadiness: Vec<Steadiness>,
    /// By number; `None` where too few of its members were measured.
    pub nodes: Vec<Option<Tested>>,
    pub racks: Vec<Option<Tested>>,
}

/// Judges one metric. `None` with fewer than [`LEAST_PEERS`] GPUs, or no GPU with two processes.
pub fn judge(members: &[Member]) -> Option<Judged> {
    if members.len() < LEAST_PEERS {
        return None;
    }
    let process_spread = pooled_sd(members.iter().map(|member| member.logs.as_slice()))?;
    let medians: Vec<f64> = members.iter().map(|member| median(&member.logs)).collect();
    let count =
        |of: &dyn Fn(&Member) -> Option<usize>| members.iter().filter_map(of).max().map_or(0, |n| n + 1);
    let (nodes, racks) = (count(&|m| Some(m.node)), count(&|m| m.rack));
    let slots = slot_effects(members, &medians, nodes, count(&|m| m.slot));
    let less_slot = |member: &Member, median: f64| {
        let slot = slots.as_ref().zip(member.slot).map_or(0.0, |(slots, slot)| slots[slot]);
        median - slot
    };
    let adjusted: Vec<f64> = members.iter().zip(&medians).map(|(m, median)| less_slot(m, *median)).collect();
    let center = median(&adjusted);
    let effects: Vec<f64> = adjusted.iter().map(|value| value - center).collect();
    // Medians of slots follow the GPUs they were taken from.
    let free = (effects.len() - 1 - slots.as_ref().map_or(0, |slots| slots.len() - 1)).max(1) as f64;
    let spread = mad_sd(&effects) * ((effects.len() - 1) as f64 / free).sqrt();
    let process_freedom = members.iter().map(|member| member.logs.len() - 1).sum::<usize>() as f64;
    let gpus: Vec<Tested> = members
        .iter()
        .zip(&effects)
        .map(|(member, &effect)| {
            let floor = process_spread * median_error(member.logs.len());
            tested(effect, (spread, free), (floor, process_freedom), true)
        })
        .collect();
    let slot_tests = slots.as_deref().map_or_else(Vec::new, |slots| {
        test_slots(slots, members, (spread, free), (process_spread, process_freedom))
    });
    let steadiness =
        members.iter().map(|member| steadiness(&member.logs, process_spread, process_freedom)).collect();
    let by_node = groups(members.iter().map(|member| Some(member.node)), nodes);
    let tested_nodes = test_groups(&effects, &by_node);
    // A rack is judged by its nodes: one of them must not make it slow.
    let node_effects: Vec<Option<f64>> = by_node
        .iter()
        .map(|members| {
            let effects: Vec<f64> = members.iter().map(|&member| effects[member]).collect();
            known_median(&effects)
        })
        .collect();
    let rack_of = |node: usize| by_node[node].first().and_then(|&member| members[member].rack);
    let known: Vec<usize> = (0..nodes).filter(|&node| node_effects[node].is_some()).collect();
    let by_rack = groups(known.iter().map(|&node| rack_of(node)), racks);
    let node_values: Vec<f64> = known.iter().filter_map(|&node| node_effects[node]).collect();
    let racks = test_groups(&node_values, &by_rack);
    Some(Judged {
        center,
        spread,
        process_spread,
        process_freedom,
        slots,
        slot_tests,
        gpus,
        steadiness,
        nodes: tested_nodes,
        racks,
    })
}

/// What each slot has in common over nodes, where there are enough of them.
fn slot_effects(members: &[Member], medians: &[f64], nodes: usize, slots: usize) -> Option<Vec<f64>> {
    let cells: Vec<(usize, usize, f64)> = members
        .iter()
        .zip(medians)
        .filter_map(|(member, &median)| Some((member.node, member.slot?, median)))
        .collect();
    let mut seen = vec![false; nodes];
    for cell in &cells {
        seen[cell.0] = true;
    }
    let enough = seen.iter().filter(|seen| **seen).count() >= SLOT_NODES && slots >= 2;
    // As many slots as nodes are not slots that nodes have in common.
    (enough && slots * 2 <= cells.len()).then(|| median_polish(&cells, nodes, slots).columns)
}

/// Tests what each slot has in common: a median over nodes, less the usual one of slots.
fn test_slots(slots: &[f64], members: &[Member], own: (f64, f64), floor: (f64, f64)) -> Vec<Tested> {
    let usual = (1.0 + median_error(slots.len()).powi(2)).sqrt();
    let test = |(slot, &effect): (usize, &f64)| {
        let of_slot: Vec<&Member> = members.iter().filter(|member| member.slot == Some(slot)).collect();
        let error = usual * median_error(of_slot.len());
        let processes = of_slot.iter().map(|member| member.logs.len()).min().unwrap_or(1);
        tested(effect, (own.0 * error, own.1), (floor.0 * median_error(processes) * error, floor.1), true)
    };
    slots.iter().enumerate().map(test).collect()
}

/// Tests an effect against the larger of two spreads, each with what it was estimated from.
fn tested(effect: f64, own: (f64, f64), floor: (f64, f64), shared: bool) -> Tested {
    let (scale, freedom) = if own.0 > floor.0 { own } else { floor };
    let p = if scale > 0.0 {
        student_tail(effect / scale, MAD_EFFICIENCY * freedom)
    } else {
        // Values without any spread are made up; what differs from them differs.
        if effect < 0.0 { 0.0 } else { 1.0 }
    };
    Tested { effect, scale, p, shared }
}

/// Tests the variance of a GPU's processes against what is usual, which is estimated too: in a small fleet from few processes.
pub(crate) fn steadiness(logs: &[f64], process_spread: f64, process_freedom: f64) -> Steadiness {
    let (low, high) =
        logs.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(*v), high.max(*v)));
    let sd = hbmark_core::stats::sd(logs).unwrap_or(0.0);
    let freedom = logs.len().saturating_sub(1) as f64;
    let p = if process_spread > 0.0 && freedom > 0.0 {
        variance_ratio_tail((sd / process_spread).powi(2), (freedom, MAD_EFFICIENCY * process_freedom))
    } else {
        1.0
    };
    Steadiness { range: high - low, p }
}

/// The members of each group.
fn groups(of: impl Iterator<Item = Option<usize>>, count: usize) -> Vec<Vec<usize>> {
    let mut found = vec![Vec::new(); count];
    for (member, group) in of.enumerate() {
        if let Some(group) = group {
            found[group].push(member);
        }
    }
    found
}

/// Tests the medians of groups.
fn test_groups(effects: &[f64], groups: &[Vec<usize>]) -> Vec<Option<Tested>> {
    let of = |members: &Vec<usize>| -> Vec<f64> { members.iter().map(|&member| effects[member]).collect() };
    let judged: Vec<Option<f64>> =
        groups.iter().map(|members| (members.len() >= LEAST_MEMBERS).then(|| median(&of(members)))).collect();
    let known: Vec<f64> = judged.iter().flatten().copied().collect();
    if known.len() < 2 {
        return vec![None; groups.len()];
    }
    let mut within = Vec::new();
    for (members, center) in groups.iter().zip(&judged) {
        within.extend(center.iter().flat_map(|center| members.iter().map(move |&m| effects[m] - center)));
    }
    let freedom = (within.len() - known.len()).max(1) as f64;
    // A median lies on one of few members, so what is left is too small by as much.
    let inside = mad_sd(&within) * (within.len() as f64 / freedom).sqrt();
    let between = if known.len() >= LEAST_UNITS { mad_sd(&known) } else { 0.0 };
    let common = median(&known);
    groups
        .iter()
        .zip(&judged)
        .map(|(members, center)| {
            let effect = (*center)? - if known.len() >= LEAST_UNITS { common } else { 0.0 };
            let floor = inside * MEDIAN_ERROR / (members.len() as f64).sqrt();
            let sharing = members.iter().filter(|&&member| effects[member] < effect / 2.0).count();
            let shared = sharing as f64 >= SHARED * members.len() as f64;
            Some(tested(effect, (between, (known.len() - 1) as f64), (floor, freedom), shared))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;
    use rand_chacha::ChaCha8Rng;
    use rand_distr::{Distribution, Normal};

    /// Nodes of eight GPUs with three processes each; natural spread 0.5 %, between processes 0.3 %.
    fn fleet(nodes: usize, seed: u64, fault: impl Fn(usize, usize) -> f64) -> Vec<Member> {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let (gpu, process) = (Normal::new(0.0, 0.005).unwrap(), Normal::new(0.0, 0.003).unwrap());
        let mut members = Vec::new();
        for node in 0..nodes {
            for slot in 0..8 {
                let base = 29.0 + gpu.sample(&mut random) + (1.0 + fault(node, slot)).ln();
                let logs = (0..3).map(|_| base + process.sample(&mut random)).collect();
                members.push(Member { node, rack: Some(node / 4), slot: Some(slot), logs });
            }
        }
        members
    }

    #[test]
    fn a_single_slow_gpu_stands_out_and_its_node_does_not() {
        let judged = judge(&fleet(16, 1, |n, s| if (n, s) == (3, 5) { -0.05 } else { 0.0 })).unwrap();
        let slow = judged.gpus[3 * 8 + 5];
        assert!((slow.effect + 0.05).abs() < 0.02 && slow.p < 1e-5, "{slow:?}");
        assert!(judged.nodes.iter().flatten().all(|node| node.effect > -0.01));
        assert!((judged.process_spread - 0.003).abs() < 0.001, "{}", judged.process_spread);
    }

    #[test]
    fn a_whole_slow_node_is_slow_against_the_fleet_and_shared() {
        let judged = judge(&fleet(16, 2, |n, _| if n == 7 { -0.04 } else { 0.0 })).unwrap();
        let node = judged.nodes[7].unwrap();
        assert!(node.effect < -0.03 && node.p < 1e-5 && node.shared, "{node:?}");
        let rack = judged.racks[1].unwrap();
        assert!(rack.effect > -0.01, "one node of four is not a rack: {rack:?}");
    }

    #[test]
    fn one_slow_gpu_of_three_nodes_is_found_without_slots_to_hide_in() {
        let judged = judge(&fleet(3, 3, |n, s| if (n, s) == (1, 1) { -0.08 } else { 0.0 })).unwrap();
        assert!(judged.slots.is_none());
        assert!(judged.gpus[9].p < 1e-3 && judged.gpus[9].effect < -0.06);
    }

    #[test]
    fn a_hot_slot_is_taken_out_of_its_gpus() {
        let judged = judge(&fleet(16, 4, |_, s| if s == 6 { -0.03 } else { 0.0 })).unwrap();
        assert!((judged.slots.as_ref().unwrap()[6] + 0.03).abs() < 0.01);
        assert!(judged.gpus.iter().all(|gpu| gpu.effect > -0.02));
    }

    #[test]
    fn half_a_fleet_of_equal_faults_does_not_move_the_centre_beyond_the_healthy_half() {
        let judged = judge(&fleet(16, 5, |n, _| if n < 6 { -0.2 } else { 0.0 })).unwrap();
        assert!((judged.center - 29.0).abs() < 0.02, "{}", judged.center);
    }

    #[test]
    fn unsteady_processes_are_no_slow_gpu() {
        let mut members = fleet(16, 6, |_, _| 0.0);
        members[20].logs = vec![29.0, 28.8, 29.1];
        let judged = judge(&members).unwrap();
        assert!(judged.steadiness[20].p < 1e-6 && judged.steadiness[20].range > 0.2);
        assert!(judged.gpus[20].effect > -0.02);
    }

    #[test]
    fn too_few_peers_are_not_judged() {
        assert_eq!(judge(&fleet(1, 7, |_, _| 0.0)[..3]), None);
    }
}
