//! The experts of a layer as formulas, one expert after another.

use super::super::operations::{ExpertMlp, ExpertOperations, ExpertWeights};
use super::super::ragged_batch::Rows;
use super::super::rope::to_f32;
use super::super::shapes::{ExpertScores, ExpertShape, ExpertsMet, SMALLEST_SUM};
use super::arithmetic::{gated, normed, sigmoid, softmax};
use super::{Oracle, OracleFault, PlainBuffer};
use crate::engine::EngineError;

impl ExpertOperations for Oracle {
    fn route(
        &mut self,
        rows: &Rows,
        (norm, norm_eps): (&Vec<f32>, f32),
        experts: &ExpertWeights<Self>,
        scripted: Option<&[u32]>,
        hidden: &PlainBuffer,
    ) -> Result<(), EngineError> {
        let inputs = self.norm(hidden, 0..rows.len(), Some((norm, norm_eps)));
        let (number, per_row) = (experts.shape.count, experts.shape.per_row);
        let shift = usize::from(self.is_faulty(OracleFault::Router));
        self.routed.clear();
        for (row, logits) in self.multiply(&experts.router, &inputs).iter().enumerate() {
            let (logits, gate) = logits.split_at(number);
            let bias = experts.router_bias.as_deref();
            let scores = scores(logits, &experts.shape, bias);
            let own: Vec<usize> = if let Some(experts) = scripted {
                experts[row * per_row..(row + 1) * per_row].iter().map(|&expert| expert as usize).collect()
            } else {
                let ranked = ranked(&scores, &experts.shape, bias);
                largest(&ranked, per_row).iter().map(|expert| (expert + shift) % number).collect()
            };
            let gate = gate.first().map_or(1.0, |gate| sigmoid(*gate));
            self.routed.push((weighed(&scores, own, &experts.shape), gate));
        }
        self.moved += 4 * experts.router_bias.as_ref().map_or(0, Vec::len) as u64;
        let met = (0..number).filter(|expert| !self.rows_of(*expert).is_empty()).count();
        self.met.experts += met as u64;
        self.met.layers += 1;
        Ok(())
    }

    fn expert_gate_up(
        &mut self,
        rows: &Rows,
        (norm, norm_eps): (&Vec<f32>, f32),
        experts: &ExpertWeights<Self>,
        hidden: &PlainBuffer,
        inner: &mut PlainBuffer,
    ) -> Result<(), EngineError> {
        let (shape, eps) = (&experts.shape, self.eps(OracleFault::ExpertGateUp, norm_eps));
        // The norm's weights are counted with the router.
        let input = |row: usize| normed(hidden.row(row), norm, eps);
        for (number, expert) in experts.routed.iter().enumerate() {
            let own = self.rows_of(number);
            if own.is_empty() {
                continue;
            }
            let inputs: Vec<Vec<f32>> = own.iter().map(|(row, _)| input(*row)).collect();
            for ((row, place), output) in own.iter().zip(self.gated(shape, expert, &inputs)) {
                inner.row_mut(*row)[place * shape.width..][..shape.width].copy_from_slice(&output);
            }
        }
        if let Some(shared) = &experts.shared {
            let inputs: Vec<Vec<f32>> = (0..rows.len()).map(input).collect();
            for (row, output) in self.gated(shape, shared, &inputs).iter().enumerate() {
                inner.row_mut(row)[shape.per_row * shape.width..].copy_from_slice(output);
            }
        }
        Ok(())
    }

    fn expert_down(
        &mut self,
        rows: &Rows,
        experts: &ExpertWeights<Self>,
        inner: &PlainBuffer,
        hidden: &mut PlainBuffer,
    ) -> Result<(), EngineError> {
        let (shape, times) =
            (&experts.shape, if self.is_faulty(OracleFault::ExpertDown) { 2.0 } else { 1.0 });
        let mut sums = vec![vec![0.0; hidden.width]; rows.len()];
        let mut add = |row: usize, share: f64, output: &[f64]| {
            sums[row].iter_mut().zip(output).for_each(|(sum, output)| *sum += share * output);
        };
        for (number, expert) in experts.routed.iter().enumerate() {
            let own = self.rows_of(number);
            if own.is_empty() {
                continue;
            }
            let of = |(row, place): &(usize, usize)| {
                inner.row(*row)[place * shape.width..][..shape.width].to_vec()
            };
            let inputs: Vec<Vec<f32>> = own.iter().map(of).collect();
            for ((row, place), output) in own.iter().zip(self.multiply(&expert.down, &inputs)) {
                add(*row, times * self.routed[*row].0[*place].1, &output);
            }
        }
        if let Some(shared) = &experts.shared {
            let of = |row: usize| inner.row(row)[shape.per_row * shape.width..].to_vec();
            let inputs: Vec<Vec<f32>> = (0..rows.len()).map(of).collect();
            for (row, output) in self.multiply(&shared.down, &inputs).iter().enumerate() {
                add(row, self.routed[row].1, output);
            }
        }
        for (row, sums) in sums.iter().enumerate() {
            for (hidden, sum) in hidden.row_mut(row).iter_mut().zip(sums) {
                *hidden = to_f32(f64::from(*hidden) + sum);
            }
        }
        Ok(())
    }

    fn take_experts_met(&mut self) -> ExpertsMet {
        std::mem::take(&mut self.met)
    }
}

impl Oracle {
    /// `gate(gate) ∘ up` of an expert for some inputs, as f32.
    fn gated(&mut self, shape: &ExpertShape, expert: &ExpertMlp<Self>, inputs: &[Vec<f32>]) -> Vec<Vec<f32>> {
        let split = expert.gate_up[0].matrix.rows;
        let meet = |output: Vec<f64>| {
            let (gates, ups) = output.split_at(split);
            gates.iter().zip(ups).map(|(x, up)| to_f32(gated(shape.gate, *x, *up))).collect()
        };
        self.multiply(&expert.gate_up, inputs).into_iter().map(meet).collect()
    }

    /// The rows that were routed to an expert, and its place among the experts of each.
    fn rows_of(&self, expert: usize) -> Vec<(usize, usize)> {
        let place = |choices: &[(usize, f64)]| choices.iter().position(|choice| choice.0 == expert);
        let rows = self.routed.iter().enumerate();
        rows.filter_map(|(row, (choices, _))| Some((row, place(choices)?))).collect()
    }
}

/// The numbers of the largest, the first of equal ones.
fn largest(logits: &[f64], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    // A stable sort: equal ones stay in their order.
    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
    order.truncate(count);
    order
}

/// The score of every expert, of its logit.
fn scores(logits: &[f64], shape: &ExpertShape, bias: Option<&[f32]>) -> Vec<f64> {
    match shape.scores {
        ExpertScores::Softmax => {
            let add = |expert: usize| bias.map_or(0.0, |bias| f64::from(bias[expert]));
            softmax(&logits.iter().enumerate().map(|(expert, logit)| logit + add(expert)).collect::<Vec<_>>())
        }
        ExpertScores::Sigmoid => logits.iter().map(|logit| sigmoid(*logit)).collect(),
    }
}

/// What experts are chosen by: scores, of sigmoids with their bias, and less than any outside of the best groups.
fn ranked(scores: &[f64], shape: &ExpertShape, bias: Option<&[f32]>) -> Vec<f64> {
    let mut ranked = scores.to_vec();
    if shape.scores == ExpertScores::Sigmoid {
        for (ranked, bias) in ranked.iter_mut().zip(bias.unwrap_or_default()) {
            *ranked += f64::from(*bias);
        }
    }
    let (of_group, summed) = (scores.len() / shape.groups.count, shape.scores.summed_of_a_group());
    let best = |group: &[f64]| largest(group, summed).iter().map(|expert| group[*expert]).sum();
    let sums: Vec<f64> = ranked.chunks(of_group).map(best).collect();
    let best = largest(&sums, shape.groups.chosen);
    for (expert, score) in ranked.iter_mut().enumerate() {
        if !best.contains(&(expert / of_group)) {
            *score = f64::NEG_INFINITY;
        }
    }
    ranked
}

/// Experts by number with their shares: of all, or of the chosen alone.
fn weighed(scores: &[f64], mut chosen: Vec<usize>, shape: &ExpertShape) -> Vec<(usize, f64)> {
    chosen.sort_unstable();
    let sum = match (shape.renormalised, shape.scores) {
        (false, _) => 1.0,
        (true, ExpertScores::Softmax) => chosen.iter().map(|expert| scores[*expert]).sum(),
        (true, ExpertScores::Sigmoid) => {
            chosen.iter().map(|expert| scores[*expert]).sum::<f64>() + f64::from(SMALLEST_SUM)
        }
    };
    chosen.into_iter().map(|expert| (expert, f64::from(shape.scale) * scores[expert] / sum)).collect()
}
