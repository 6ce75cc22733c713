//! The experts of a layer: a router picks some for each row, and only those are read.
//!
//! Enters: activations, the packed matrices of all experts, perhaps the experts that a script picks. Leaves: activations, in three jobs of the
//! team. Routing multiplies the router and groups the rows by expert. Gate and up take units of (expert, a few panels): one token with eight
//! experts keeps every member busy, and the rows of a prompt meet each expert's weights once. They go through the units panel by panel and
//! not expert by expert, so that a member does the panels whose memory it touched first. Down takes units of a few panels of the
//! output, each over all experts in the order of their numbers: an output has one writer, and neither the number of threads nor the
//! other rows of a step change a sum. The shared expert is one more that every row has. Buffers have room for the rows whatever they
//! choose, so a steady decode allocates nothing.
#![expect(unsafe_code, reason = "members write shared buffers at places that do not overlap")]

use std::ops::Range;

use hbmark_cpu_kernels::simd::LANES;

use super::super::operations::{ExpertMlp, ExpertOperations, ExpertWeights};
use super::super::ragged_batch::Rows;
use super::super::shapes::{
    ExpertGroups, ExpertScores, ExpertShape, ExpertsMet, MAX_EXPERT_GROUPS, SMALLEST_SUM,
};
use super::gates::{GatedRow, store_activated};
use super::linear::{FusedMatrix, multiply_picked};
use super::lora::Added;
use super::packed_activations::PackedActivations;
use super::thread_team::{DisjointSlice, Worker};
use super::{CpuBuffer, CpuOperations, FINISH, MULTIPLY, PREPARE, bias_of, store_sums, valid_rows};
use crate::engine::EngineError;

/// An expert of a row, and its share in the sum.
#[derive(Debug, Clone, Copy, Default)]
struct Choice {
    expert: u32,
    share: f32,
}

/// The rows of a step by expert, made by the router for the two operations that follow.
#[derive(Debug, Default)]
pub(super) struct RoutedRows {
    /// `[rows, experts]`, and one more where the shared expert has a gate.
    logits: Vec<f32>,
    /// `[rows, per row]`, each row's by number.
    chosen: Vec<Choice>,
    /// What the output of the shared expert is multiplied with.
    shared_share: Vec<f32>,
    /// Experts that have rows, by number.
    met: Vec<u32>,
    /// Where the choices of each expert begin in `choices`, and their end.
    starts: Vec<u32>,
    /// Places in `chosen`, grouped by expert, and the row of each.
    choices: Vec<u32>,
    rows: Vec<u32>,
    /// Every row.
    all: Vec<u32>,
    /// Inputs of the shared expert's last matrix, whose width is its own.
    shared_inputs: PackedActivations,
}

impl RoutedRows {
    /// Groups the choices of so many rows by expert.
    fn group(&mut self, rows: usize, shape: &ExpertShape) {
        let number = |value: usize| u32::try_from(value).expect("choices of a step fit 32 bits");
        let Self { chosen, met, starts, choices, rows: row_of, all, .. } = self;
        let chosen = &chosen[..rows * shape.per_row];
        // Behind its own start each expert first keeps its count, then where its next choice goes.
        starts.clear();
        starts.resize(shape.count + 2, 0);
        for choice in chosen {
            starts[choice.expert as usize + 2] += 1;
        }
        met.clear();
        met.reserve(shape.count);
        met.extend((0..number(shape.count)).filter(|expert| starts[*expert as usize + 2] > 0));
        for at in 2..starts.len() {
            starts[at] += starts[at - 1];
        }
        choices.clear();
        choices.resize(chosen.len(), 0);
        row_of.clear();
        row_of.resize(chosen.len(), 0);
        for (place, choice) in chosen.iter().enumerate() {
            let next = &mut starts[choice.expert as usize + 1];
            choices[*next as usize] = number(place);
            row_of[*next as usize] = number(place / shape.per_row);
            *next += 1;
        }
        all.clear();
        all.extend(0..number(rows));
    }

    /// Where the choices of an expert stand.
    fn of(&self, expert: u32) -> Range<usize> {
        let at = expert as usize;
        self.starts[at] as usize..self.starts[at + 1] as usize
    }
}

/// Picks the experts of a row by their logits, which have the bias of a softmax already, or takes those of a script, and weighs them.
fn choose(
    logits: &[f32],
    shape: &ExpertShape,
    bias: Option<&[f32]>,
    scripted: Option<&[u32]>,
    chosen: &mut [Choice],
) {
    match (scripted, shape.scores) {
        (Some(experts), _) => {
            for (choice, &expert) in chosen.iter_mut().zip(experts) {
                choice.expert = expert;
            }
        }
        // The larger a logit, the larger its softmax.
        (None, ExpertScores::Softmax) => choose_in_groups(shape, |expert| logits[expert], chosen),
        (None, ExpertScores::Sigmoid) => {
            let biased = |expert: usize| sigmoid(logits[expert]) + bias.map_or(0.0, |bias| bias[expert]);
            choose_in_groups(shape, biased, chosen);
        }
    }
    for choice in chosen.iter_mut() {
        choice.share = logits[choice.expert as usize];
    }
    match shape.scores {
        ExpertScores::Softmax => weigh_by_softmax(logits, shape.renormalised, chosen),
        ExpertScores::Sigmoid => {
            let mut sum = 0.0;
            for choice in chosen.iter_mut() {
                choice.share = sigmoid(choice.share);
                sum += choice.share;
            }
            if shape.renormalised {
                for choice in chosen.iter_mut() {
                    choice.share /= sum + SMALLEST_SUM;
                }
            }
        }
    }
    for choice in chosen.iter_mut() {
        choice.share *= shape.scale;
    }
    chosen.sort_unstable_by_key(|choice| choice.expert);
}

/// The largest scores of the best groups.
fn choose_in_groups(shape: &ExpertShape, score: impl Fn(usize) -> f32, chosen: &mut [Choice]) {
    let (of_group, best) = (shape.count / shape.groups.count, best_groups(shape, &score));
    let in_best = |expert: usize| best >> (expert / of_group) & 1 == 1;
    let score = |expert| if in_best(expert) { score(expert) } else { f32::NEG_INFINITY };
    largest((0..shape.count).map(score), chosen);
}

/// The groups of experts whose largest score, or the sum of the two largest, is largest, as bits, the first of equal ones.
fn best_groups(shape: &ExpertShape, score: impl Fn(usize) -> f32) -> u32 {
    let ExpertGroups { count: groups, chosen } = shape.groups;
    if groups == chosen {
        return u32::MAX;
    }
    let of_group = shape.count / groups;
    let sums_two = of_group > 1 && shape.scores.summed_of_a_group() > 1;
    let mut sums = [f32::NEG_INFINITY; MAX_EXPERT_GROUPS];
    for (group, sum) in sums[..groups].iter_mut().enumerate() {
        let (mut first, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
        for expert in group * of_group..(group + 1) * of_group {
            let score = score(expert);
            second = second.max(first.min(score));
            first = first.max(score);
        }
        *sum = if sums_two { first + second } else { first };
    }
    let mut best = [Choice::default(); MAX_EXPERT_GROUPS];
    largest(sums[..groups].iter().copied(), &mut best[..chosen]);
    best[..chosen].iter().fold(0, |bits, group| bits | 1 << group.expert)
}

/// Turns the logits of the chosen experts into their shares by softmax.
fn weigh_by_softmax(logits: &[f32], renormalised: bool, chosen: &mut [Choice]) {
    // Numerically as a softmax should: nothing is beyond e⁰. Of shares that are renormalised, all others cancel.
    let most = |largest: f32, logit: f32| if logit > largest { logit } else { largest };
    let mut sum = 0.0f32;
    let largest = if renormalised {
        let largest = chosen.iter().map(|choice| choice.share).fold(f32::NEG_INFINITY, most);
        for choice in chosen.iter() {
            sum += (choice.share - largest).exp();
        }
        largest
    } else {
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, most);
        for logit in logits {
            sum += (logit - largest).exp();
        }
        largest
    };
    for choice in chosen.iter_mut() {
        choice.share = (choice.share - largest).exp() / sum;
    }
}

/// The largest scores with their numbers, largest first, the first of equal ones. What is not a number is none of them while there are others.
fn largest(scores: impl Iterator<Item = f32>, chosen: &mut [Choice]) {
    let mut found = 0;
    for (expert, score) in (0u32..).zip(scores) {
        let score = if score.is_nan() { f32::NEG_INFINITY } else { score };
        if found == chosen.len() && !chosen.last().is_some_and(|last| score > last.share) {
            continue;
        }
        found = (found + 1).min(chosen.len());
        let mut at = found - 1;
        while at > 0 && score > chosen[at - 1].share {
            chosen[at] = chosen[at - 1];
            at -= 1;
        }
        chosen[at] = Choice { expert, share: score };
    }
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// Matrices of the routed experts that have rows, and of the shared one, as they are counted.
fn bytes_of(
    routed: &RoutedRows,
    experts: &ExpertWeights<CpuOperations>,
    matrix: fn(&ExpertMlp<CpuOperations>) -> &FusedMatrix,
) -> u64 {
    let met = routed.met.iter().map(|expert| &experts.routed[*expert as usize]);
    met.chain(&experts.shared).map(|expert| matrix(expert).bytes() as u64).sum()
}

impl ExpertOperations for CpuOperations {
    fn route(
        &mut self,
        rows: &Rows,
        (norm, norm_eps): (&Vec<f32>, f32),
        experts: &ExpertWeights<Self>,
        scripted: Option<&[u32]>,
        hidden: &CpuBuffer,
    ) -> Result<(), EngineError> {
        let (router, shape, count) = (&experts.router, &experts.shape, rows.len());
        let bias = experts.router_bias.as_deref();
        let by_softmax = bias.filter(|_| shape.scores == ExpertScores::Softmax);
        let per_row = shape.per_row;
        let width = shape.count + usize::from(shape.shared_gate);
        let product = self.product(router, count);
        let RoutedRows { logits, chosen, shared_share, .. } = &mut self.routed;
        // Buffers only grow, so a steady decode finds them there.
        logits.resize(logits.len().max(count * width), 0.0);
        chosen.resize(chosen.len().max(count * per_row), Choice::default());
        shared_share.resize(shared_share.len().max(count), 0.0);
        let logits = DisjointSlice::new(logits);
        let chosen = DisjointSlice::new(chosen);
        let shared_share = DisjointSlice::new(shared_share);
        self.team.run(&|worker: &Worker<'_>| {
            let norm = Some((norm.as_slice(), norm_eps));
            let store = |first: usize, row: usize, sums: &[[f32; LANES]]| {
                // SAFETY: members have different panels.
                unsafe { store_sums(router, logits, width, &Added::NONE, (first, row), sums) };
            };
            // SAFETY: room was made for this matrix; the set is this processor's.
            unsafe { product.run(worker, |row| hidden.row(row), norm, store) };
            worker.barrier();
            worker.parallel_for(FINISH, count, |row| {
                let scripted = scripted.map(|experts| &experts[row * per_row..(row + 1) * per_row]);
                // SAFETY: behind the barrier members have different rows.
                unsafe {
                    let logits = logits.part(row * width..(row + 1) * width);
                    let (own, gate) = logits.split_at_mut(shape.count);
                    for (logit, bias) in own.iter_mut().zip(by_softmax.unwrap_or_default()) {
                        *logit += bias;
                    }
                    choose(own, shape, bias, scripted, chosen.part(row * per_row..(row + 1) * per_row));
                    shared_share.part(row..row + 1)[0] = gate.first().map_or(1.0, |gate| sigmoid(*gate));
                }
            });
        });
        self.routed.group(count, shape);
        self.met.experts += self.routed.met.len() as u64;
        self.met.layers += 1;
        self.moved += (router.bytes() + 4 * norm.len() + 4 * bias.map_or(0, <[f32]>::len)) as u64;
        Ok(())
    }

    fn expert_gate_up(
        &mut self,
        rows: &Rows,
        (norm, norm_eps): (&Vec<f32>, f32),
        experts: &ExpertWeights<Self>,
        hidden: &CpuBuffer,
        inner: &mut CpuBuffer,
    ) -> Result<(), EngineError> {
        let (kernels, shape, count, width) = (self.kernels, &experts.shape, rows.len(), inner.width);
        let routed = &self.routed;
        let writer = self.inputs.writer(Self::input_shape(&experts.routed[0].gate_up, count));
        let out = DisjointSlice::new(&mut inner.values);
        let panels = experts.routed[0].gate_up.panels();
        let shared = experts.shared.as_ref().map(|shared| &shared.gate_up);
        let shared_panels = shared.map_or(0, FusedMatrix::panels);
        let all = routed.met.len() * panels + shared_panels;
        let per_unit = experts.routed[0].gate_up.panels_per_unit(all, self.team.members());
        let of_routed = routed.met.len() * panels.div_ceil(per_unit);
        self.team.run(&|worker: &Worker<'_>| {
            worker.parallel_for(PREPARE, count, |row| {
                // SAFETY: members have different rows; the set is this processor's.
                unsafe { writer.pack(kernels.general, row, hidden.row(row), Some((norm, norm_eps))) };
            });
            worker.barrier();
            // Columns of a row from `at` on.
            let store = |matrix: &FusedMatrix, first: usize, at: usize, sums: &[[f32; LANES]]| {
                let row = GatedRow { out, at, added: &Added::NONE, row: 0, width: 0 };
                // SAFETY: members have different experts or panels, which write different columns; the set is this processor's.
                unsafe { store_activated(kernels.general, shape.gate, matrix, first, sums, &row) };
            };
            worker.parallel_for(MULTIPLY, of_routed + shared_panels.div_ceil(per_unit), |unit| {
                let unit_of =
                    |index: usize, panels: usize| index * per_unit..((index + 1) * per_unit).min(panels);
                if let (Some(shared), Some(index)) = (shared, unit.checked_sub(of_routed)) {
                    let at = shape.per_row * shape.width;
                    let keep = |first: usize, row: usize, sums: &[[f32; LANES]]| {
                        store(shared, first, row * width + at, sums);
                    };
                    let panels = unit_of(index, shared_panels);
                    // SAFETY: the rows were packed before the barrier, for matrices of this width and precision.
                    unsafe { multiply_picked(&kernels, shared, panels, &writer, &routed.all, keep) };
                    return;
                }
                let expert = routed.met[unit % routed.met.len()];
                let (matrix, own) = (&experts.routed[expert as usize].gate_up, routed.of(expert));
                let (rows, choices) = (&routed.rows[own.clone()], &routed.choices[own]);
                let keep = |first: usize, i: usize, sums: &[[f32; LANES]]| {
                    let (row, slot) = (rows[i] as usize, choices[i] as usize % shape.per_row);
                    store(matrix, first, row * width + slot * shape.width, sums);
                };
                let panels = unit_of(unit / routed.met.len(), panels);
                // SAFETY: the rows were packed before the barrier, for matrices of this width and precision.
                unsafe { multiply_picked(&kernels, matrix, panels, &writer, rows, keep) };
            });
        });
        self.moved += bytes_of(&self.routed, experts, |expert| &expert.gate_up);
        Ok(())
    }

    fn expert_down(
        &mut self,
        rows: &Rows,
        experts: &ExpertWeights<Self>,
        inner: &CpuBuffer,
        hidden: &mut CpuBuffer,
    ) -> Result<(), EngineError> {
        let (kernels, shape, count, width) = (self.kernels, &experts.shape, rows.len(), hidden.width);
        let per_row = shape.per_row;
        let choices = count * per_row;
        let writer = self.inputs.writer(Self::input_shape(&experts.routed[0].down, choices));
        let mut shared_inputs = std::mem::take(&mut self.routed.shared_inputs);
        let shared = experts
            .shared
            .as_ref()
            .map(|shared| (&shared.down, shared_inputs.writer(Self::input_shape(&shared.down, count))));
        let routed = &self.routed;
        let out = DisjointSlice::new(&mut hidden.values);
        let panels = experts.routed[0].down.panels();
        let per_unit = experts.routed[0].down.panels_per_unit(panels, self.team.members());
        self.team.run(&|worker: &Worker<'_>| {
            worker.parallel_for(PREPARE, choices + count, |unit| {
                // SAFETY: members have different units, each a packed row of its own; the set is this processor's.
                unsafe {
                    if let Some(row) = unit.checked_sub(choices) {
                        if let Some((_, writer)) = &shared {
                            let own = per_row * shape.width..shape.inner_width();
                            writer.pack(kernels.general, row, &inner.row(row)[own], None);
                        }
                        return;
                    }
                    let (row, slot) = (unit / per_row, unit % per_row);
                    let own = slot * shape.width..(slot + 1) * shape.width;
                    writer.pack(kernels.general, unit, &inner.row(row)[own], None);
                }
            });
            worker.barrier();
            let add = |matrix: &FusedMatrix, first: usize, row: usize, share: f32, sums: &[[f32; LANES]]| {
                for (i, sums) in sums.iter().enumerate() {
                    let place = matrix.place(first + i);
                    let at = row * width + place.panel * LANES;
                    // SAFETY: members have different panels.
                    let out = unsafe { out.part(at..at + valid_rows(matrix, place)) };
                    out.iter_mut().zip(sums).for_each(|(out, sum)| *out += share * sum);
                    out.iter_mut().zip(bias_of(matrix, place)).for_each(|(out, bias)| *out += share * bias);
                }
            };
            worker.parallel_for(MULTIPLY, panels.div_ceil(per_unit), |unit| {
                let panels = unit * per_unit..((unit + 1) * per_unit).min(panels);
                for &expert in &routed.met {
                    let (matrix, own) = (&experts.routed[expert as usize].down, routed.of(expert));
                    let (rows, choices) = (&routed.rows[own.clone()], &routed.choices[own]);
                    let keep = |first: usize, i: usize, sums: &[[f32; LANES]]| {
                        let weight = routed.chosen[choices[i] as usize].share;
                        add(matrix, first, rows[i] as usize, weight, sums);
                    };
                    // SAFETY: the rows were packed before the barrier, for matrices of this width and precision.
                    unsafe { multiply_picked(&kernels, matrix, panels.clone(), &writer, choices, keep) };
                }
                if let Some((matrix, writer)) = &shared {
                    let keep = |first: usize, row: usize, sums: &[[f32; LANES]]| {
                        add(matrix, first, row, routed.shared_share[row], sums);
                    };
                    // SAFETY: as above.
                    unsafe { multiply_picked(&kernels, matrix, panels, writer, &routed.all, keep) };
                }
            });
        });
        self.routed.shared_inputs = shared_inputs;
        self.moved += bytes_of(&self.routed, experts, |expert| &expert.down);
        Ok(())
    }

    fn take_experts_met(&mut self) -> ExpertsMet {
        std::mem::take(&mut self.met)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::native::shapes::Gate;

    fn shape(count: usize, per_row: usize, renormalised: bool) -> ExpertShape {
        ExpertShape {
            count,
            per_row,
            width: 1,
            shared_width: 0,
            shared_gate: false,
            gate: Gate::Silu,
            scores: ExpertScores::Softmax,
            groups: ExpertGroups::ONE,
            renormalised,
            scale: 1.0,
        }
    }

    fn chosen(
        logits: &[f32],
        per_row: usize,
        renormalised: bool,
        scripted: Option<&[u32]>,
    ) -> Vec<(u32, f32)> {
        let mut chosen = vec![Choice::default(); per_row];
        choose(logits, &shape(logits.len(), per_row, renormalised), None, scripted, &mut chosen);
        chosen.iter().map(|choice| (choice.expert, choice.share)).collect()
    }

    fn assert_close(found: &[(u32, f32)], wanted: &[(u32, f32)]) {
        assert_eq!(found.len(), wanted.len());
        for (found, wanted) in found.iter().zip(wanted) {
            assert!(found.0 == wanted.0 && (found.1 - wanted.1).abs() < 1e-6, "{found:?} is not {wanted:?}");
        }
    }

    #[test]
    fn the_largest_are_chosen_with_their_shares_among_all_or_among_themselves() {
        // e^logit is 1, 4, 2, 3.
        let logits = [0.0, 4f32.ln(), 2f32.ln(), 3f32.ln()];
        assert_close(&chosen(&logits, 2, false, None), &[(1, 0.4), (3, 0.3)]);
        assert_close(&chosen(&logits, 2, true, None), &[(1, 4.0 / 7.0), (3, 3.0 / 7.0)]);
        assert_close(&chosen(&logits, 4, true, None), &[(0, 0.1), (1, 0.4), (2, 0.2), (3, 0.3)]);
        assert_close(&chosen(&logits, 2, true, Some(&[2, 0])), &[(0, 1.0 / 3.0), (2, 2.0 / 3.0)]);
    }

    #[test]
    fn the_first_of_equal_experts_wins_and_no_number_chooses_itself() {
        let experts = |logits: &[f32]| -> Vec<u32> {
            chosen(logits, 2, true, None).iter().map(|choice| choice.0).collect()
        };
        assert_eq!(experts(&[1.0, 1.0, 1.0]), [0, 1]);
        assert_eq!(experts(&[0.0, 1.0, 2.0, 2.0, 2.0]), [2, 3]);
        assert_eq!(experts(&[f32::NAN, 1.0, 0.5]), [1, 2]);
        assert_eq!(
            experts(&[f32::NAN; 3]),
            [0, 1],
            "whatever the logits are, the choice is of experts that exist"
        );
        // Far below the others, where e^x is 0: the shares are still numbers.
        let scripted = chosen(&[0.0, -400.0, -401.0], 2, true, Some(&[2, 1]));
        assert!((scripted.iter().map(|choice| choice.1).sum::<f32>() - 1.0).abs() < 1e-6, "{scripted:?}");
    }

    #[test]
    fn sigmoids_are_chosen_after_a_correction_within_the_best_groups_and_weighed_without_it() {
        // The logits of these sigmoids.
        let logits = [0.5f32, 0.85, 0.9, 0.2, 0.6, 0.7].map(|score: f32| (score / (1.0 - score)).ln());
        let chosen = |groups, chosen_groups, renormalised, correction: Option<&[f32]>, scripted| {
            let groups = ExpertGroups { count: groups, chosen: chosen_groups };
            let shape = ExpertShape {
                scores: ExpertScores::Sigmoid,
                groups,
                scale: 2.0,
                ..shape(6, 2, renormalised)
            };
            let mut chosen = vec![Choice::default(); 2];
            choose(&logits, &shape, correction, scripted, &mut chosen);
            chosen.iter().map(|choice| (choice.expert, choice.share)).collect::<Vec<_>>()
        };
        assert_close(&chosen(1, 1, true, None, None), &[(1, 1.7 / 1.75), (2, 1.8 / 1.75)]);
        assert_close(&chosen(1, 1, false, None, None), &[(1, 1.7), (2, 1.8)]);
        let correction = [0.45, 0.0, 0.0, 0.75, 0.0, 0.0];
        assert_close(&chosen(1, 1, false, Some(&correction), None), &[(0, 1.0), (3, 0.4)]);
        // The groups' two best sum to 1.35, 1.1 and 1.3; with the correction to 1.8, 1.85 and 1.3.
        assert_close(&chosen(3, 1, false, None, None), &[(0, 1.0), (1, 1.7)]);
        assert_close(&chosen(3, 2, false, None, None), &[(1, 1.7), (5, 1.4)]);
        assert_close(&chosen(3, 1, false, Some(&correction), None), &[(2, 1.8), (3, 0.4)]);
        assert_close(
            &chosen(3, 1, true, Some(&correction), Some(&[5, 1])),
            &[(1, 1.7 / 1.55), (5, 1.4 / 1.55)],
        );
    }

    #[test]
    fn groups_of_a_softmax_are_chosen_by_their_best_alone_and_shares_are_of_all_experts() {
        // e^logit is 5, 5, 1, 6, 2, 1: the two best of a group would sum to 10, 7 and 3.
        let logits = [5.0f32, 5.0, 1.0, 6.0, 2.0, 1.0].map(f32::ln);
        let groups = ExpertGroups { count: 3, chosen: 1 };
        let mut chosen = vec![Choice::default(); 2];
        choose(&logits, &ExpertShape { groups, ..shape(6, 2, false) }, None, None, &mut chosen);
        let chosen: Vec<_> = chosen.iter().map(|choice| (choice.expert, choice.share)).collect();
        assert_close(&chosen, &[(2, 0.05), (3, 0.3)]);
    }

    #[test]
    fn rows_are_grouped_by_expert_in_their_own_order() {
        let choice = |expert| Choice { expert, share: 0.0 };
        let mut routed =
            RoutedRows { chosen: [1, 3, 0, 3, 3, 4, 9, 9].map(choice).to_vec(), ..Default::default() };
        routed.group(3, &shape(5, 2, true));
        assert_eq!(routed.met, [0, 1, 3, 4]);
        let of = |expert| (&routed.rows[routed.of(expert)], &routed.choices[routed.of(expert)]);
        assert_eq!(of(0), (&[1][..], &[2][..]));
        assert_eq!(of(1), (&[0][..], &[0][..]));
        assert_eq!(of(2), (&[][..], &[][..]));
        assert_eq!(of(3), (&[0, 1, 2][..], &[1, 3, 4][..]));
        assert_eq!(of(4), (&[2][..], &[5][..]));
        assert_eq!(routed.all, [0, 1, 2]);
    }
}
