//! Experts that a script picks instead of the router.
//!
//! Enters: an assumption about the routing, and a seed. Leaves: the experts of each row of a step. Random weights have a random router,
//! whose choices are those of no trained model; a script gives a step the spread that is asked for, and the router's product is
//! still computed. A row's experts depend on the seed, the layer, the row's sequence by its number in the step, and its position: the same
//! step has the same outputs each time, as a measurement demands, and a prompt has the same however it is cut. Tokens are drawn beforehand
//! and looked up in a step, so that it costs the same whatever the spread.

use super::ragged_batch::Rows;
use hbmark_core::ledger::{ExpertRouting, LayerRouting};
use hbmark_core::stats::splitmix64;

/// Tokens that are drawn beforehand.
const DRAWN: u32 = 4096;

/// A script for the layers of a model, which have as many experts each.
#[derive(Debug, Clone)]
pub struct RoutingScript {
    turns: bool,
    count: u64,
    per_row: usize,
    seed: u64,
    /// The experts of [`DRAWN`] tokens.
    drawn: Vec<u32>,
    chosen: Vec<u32>,
}

impl RoutingScript {
    /// A script for layers of `count` experts of which a row takes `per_row`.
    pub fn new(routing: ExpertRouting, seed: u64, count: usize, per_row: usize) -> Self {
        Self {
            turns: routing == ExpertRouting::Balanced,
            count: count as u64,
            per_row,
            seed,
            drawn: LayerRouting::new(routing, count, per_row).draw(DRAWN as usize, seed),
            chosen: Vec::new(),
        }
    }

    /// The experts of the rows of a step in some layers: one layer after the other, and in each one row.
    pub fn choose(&mut self, layers: impl IntoIterator<Item = usize>, rows: &Rows) -> &[u32] {
        self.chosen.clear();
        for layer in layers {
            self.choose_in(layer, rows);
        }
        &self.chosen
    }

    fn choose_in(&mut self, layer: usize, rows: &Rows) {
        let of_layer = splitmix64(self.seed ^ splitmix64(layer as u64));
        for (&owner, &position) in rows.owners.iter().zip(&rows.positions) {
            if self.turns {
                // Sequences at one position take turns, and so do the positions of one sequence.
                let turn =
                    of_layer % self.count + (u64::from(owner) + u64::from(position)) * self.per_row as u64;
                let expert = |place| u32::try_from((turn + place) % self.count).unwrap_or(u32::MAX);
                self.chosen.extend((0..self.per_row as u64).map(expert));
            } else {
                let row = u64::from(owner) << 32 | u64::from(position);
                let token =
                    usize::try_from(splitmix64(of_layer ^ splitmix64(row)) % u64::from(DRAWN)).unwrap_or(0);
                let own = token * self.per_row..(token + 1) * self.per_row;
                self.chosen.extend_from_slice(&self.drawn[own]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// A decode of so many sequences at a position.
    fn decode(sequences: usize, position: usize) -> Rows {
        let mut rows = Rows::new(1024);
        (0..sequences).for_each(|_| rows.push(&[0], position, &[0]));
        rows
    }

    /// Different experts of a layer in a decode, on average over layers and positions.
    fn met(routing: ExpertRouting, sequences: usize) -> f64 {
        let mut script = RoutingScript::new(routing, 5, 64, 6);
        let (layers, positions) = (24, 25);
        let mut sum = 0;
        for layer in 0..layers {
            for position in 0..positions {
                let chosen = script.choose([layer], &decode(sequences, position));
                assert_eq!(chosen.len(), sequences * 6);
                assert!(chosen.chunks(6).all(|row| row.iter().collect::<HashSet<_>>().len() == 6));
                sum += chosen.iter().collect::<HashSet<_>>().len();
            }
        }
        sum as f64 / (layers * positions) as f64
    }

    #[test]
    fn a_step_meets_what_the_ledger_expects_of_the_routing() {
        for routing in
            [ExpertRouting::Uniform, ExpertRouting::Balanced, ExpertRouting::Zipf { exponent: 1.2 }]
        {
            for sequences in [1, 4, 16] {
                let wanted = LayerRouting::new(routing, 64, 6).distinct(sequences).mean;
                let found = met(routing, sequences);
                assert!((found / wanted - 1.0).abs() < 0.03, "{routing}, {sequences}: {found} for {wanted}");
            }
        }
    }

    #[test]
    fn a_step_chooses_the_same_each_time_and_however_a_prompt_is_cut() {
        for routing in [ExpertRouting::Uniform, ExpertRouting::Balanced] {
            let of = |seed, layer, rows: &Rows| {
                RoutingScript::new(routing, seed, 64, 6).choose([layer], rows).to_vec()
            };
            let mut whole = Rows::new(1024);
            whole.push(&[0; 9], 4, &[0]);
            let mut part = Rows::new(1024);
            part.push(&[0; 4], 9, &[0]);
            assert_eq!(of(1, 0, &whole), of(1, 0, &whole));
            assert_eq!(of(1, 0, &whole)[5 * 6..], of(1, 0, &part));
            assert_ne!(of(1, 0, &whole), of(1, 1, &whole), "another layer");
            assert_ne!(of(1, 0, &whole), of(2, 0, &whole), "another seed");
        }
    }
}
