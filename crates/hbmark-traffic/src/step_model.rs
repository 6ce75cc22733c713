//! Models of step times, for a virtual clock.
//!
//! Enters: new tokens and cached positions of each sequence. Leaves: a time. Three models, from the least to the most informed:
//!
//! - *floor*: the ledger's bytes and FLOPs under a roof, a lower bound.
//! - *fitted*: a saved run's decode fit (fixed + KV bytes / bandwidth + per sequence) and the FLOP rate its prefills reached.
//! - *calibrated*: a few steps of this very engine, timed before the run; interpolated over tokens, linear in cached positions.

use serde::{Deserialize, Serialize};

use hbmark_core::ledger::{Floor, Ledger, RaggedPart, Roof};
use hbmark_core::units::Nanos;

/// Steps of a model that was read from a file lie between these: a nanosecond and a day.
const SHORTEST_NS: f64 = 1.0;
const LONGEST_NS: f64 = 8.64e13;

/// A model of step times.
#[derive(Debug, Clone)]
pub enum StepModel {
    Floor { ledger: Box<Ledger>, roof: Roof },
    Fitted { ledger: Box<Ledger>, fit: Fitted },
    Calibrated(Calibration),
}

/// Step times fitted to a saved run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fitted {
    pub fixed_ns: f64,
    /// Inverse of the effective KV bandwidth.
    pub ns_per_kv_byte: f64,
    pub ns_per_sequence: f64,
    /// FLOPs per nanosecond of a prefill.
    pub prefill_flops_per_ns: f64,
}

/// Timed steps of this engine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Calibration {
    /// One sequence after the other: the times of a step's parts add.
    pub looped: bool,
    /// Time of a prefill of so many tokens from position 0, ascending: (tokens, ns).
    pub prefill: Vec<(f64, f64)>,
    /// Time of a decode of so many sequences at `base_context`, ascending: (sequences, ns).
    pub decode: Vec<(f64, f64)>,
    /// Cached positions of each sequence while `decode` was timed.
    pub base_context: f64,
    /// Time of one more cached position that a decode reads.
    pub ns_per_decode_position: f64,
    /// Time of one more pair of a prompt's token and a position that it attends to.
    pub ns_per_prefill_pair: f64,
    /// Time of a step that decodes and prefills over the sum predicted above: kernels behave differently on mixed shapes.
    #[serde(default = "one")]
    pub mixed: f64,
}

fn one() -> f64 {
    1.0
}

/// The properties of a step that its time depends on.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Mixture {
    /// Tokens of sequences that decode, one of each and their draft tokens, and the sum of the sequences' cached positions.
    pub decodes: f64,
    pub positions: f64,
    /// Tokens of prompts, and the pairs of one with a position that it attends to.
    pub queries: f64,
    pub pairs: f64,
}

impl Mixture {
    pub fn of(parts: impl Iterator<Item = RaggedPart>) -> Self {
        let mut shape = Self::default();
        parts.for_each(|part| shape.add(part));
        shape
    }

    pub fn add(&mut self, part: RaggedPart) {
        if part.is_over_cache() {
            // Tokens of a verify step weigh as so many sequences, which read the cache of one.
            self.decodes += part.tokens as f64;
            self.positions += part.cached as f64;
        } else {
            self.queries += part.tokens as f64;
            // A prompt's own positions are, on average, half of them before a token.
            self.pairs += part.tokens as f64 * (part.cached as f64 + part.tokens as f64 / 2.0);
        }
    }
}

/// Linear interpolation, extrapolated by the first and last piece; never below zero.
fn interpolate(points: &[(f64, f64)], x: f64) -> f64 {
    match points {
        [] => 0.0,
        [(_, y)] => *y,
        _ => {
            let at = points.partition_point(|p| p.0 < x).clamp(1, points.len() - 1);
            let ((x0, y0), (x1, y1)) = (points[at - 1], points[at]);
            (y0 + (y1 - y0) * (x - x0) / (x1 - x0)).max(0.0)
        }
    }
}

impl Calibration {
    /// One in which neither positions nor mixtures cost anything more.
    pub fn of(prefill: Vec<(f64, f64)>, decode: Vec<(f64, f64)>) -> Self {
        Self {
            looped: false,
            prefill,
            decode,
            base_context: 0.0,
            ns_per_decode_position: 0.0,
            ns_per_prefill_pair: 0.0,
            mixed: 1.0,
        }
    }

    /// Halfway between this and a later one: for a run between the two.
    pub fn halfway(&self, after: &Self) -> Self {
        let line = |before: &[(f64, f64)], after: &[(f64, f64)]| {
            after.iter().map(|(x, y)| (*x, f64::midpoint(interpolate(before, *x), *y))).collect()
        };
        Self {
            looped: after.looped,
            prefill: line(&self.prefill, &after.prefill),
            decode: line(&self.decode, &after.decode),
            base_context: after.base_context,
            ns_per_decode_position: f64::midpoint(self.ns_per_decode_position, after.ns_per_decode_position),
            ns_per_prefill_pair: f64::midpoint(self.ns_per_prefill_pair, after.ns_per_prefill_pair),
            mixed: f64::midpoint(self.mixed, after.mixed),
        }
    }

    /// The ratio of step times in a later one: the geometric mean over its shapes.
    pub fn drift(&self, after: &Self) -> Option<f64> {
        let lines = [(&self.prefill, &after.prefill), (&self.decode, &after.decode)];
        let logs: Vec<f64> = lines
            .into_iter()
            .flat_map(|(before, after)| after.iter().map(|(x, y)| (y / interpolate(before, *x)).ln()))
            .filter(|log| log.is_finite())
            .collect();
        (!logs.is_empty()).then(|| (logs.iter().sum::<f64>() / logs.len() as f64).exp())
    }

    /// The time of a step, in nanoseconds.
    /// The time of a step, in nanoseconds.
    pub fn step(&self, parts: impl Iterator<Item = RaggedPart>) -> f64 {
        if self.looped {
            return parts.map(|part| self.fused(&Mixture::of(std::iter::once(part)))).sum();
        }
        self.fused(&Mixture::of(parts))
    }

    /// The time of a step whose sequences run in one pass, in nanoseconds.
    pub fn fused(&self, shape: &Mixture) -> f64 {
        let Mixture { decodes, positions, queries, pairs } = *shape;
        let context = self.ns_per_decode_position * (positions - decodes * self.base_context);
        let time = if queries == 0.0 {
            interpolate(&self.decode, decodes) + context
        } else {
            // Those that were timed are one prompt each: several short ones attend to far fewer positions than one as long as all of them.
            let without_attention =
                |(tokens, ns): &(f64, f64)| (*tokens, ns - self.ns_per_prefill_pair * tokens * tokens / 2.0);
            let prefill: Vec<(f64, f64)> = self.prefill.iter().map(without_attention).collect();
            let rows = |rows: f64| interpolate(&prefill, rows);
            // Matrix products see only rows, of prefill and decode alike; a decode's further cost (its head, its cache at the base context)
            // is its step's time over that of a prefill of as many tokens.
            let extra = (interpolate(&self.decode, decodes) - rows(decodes)).max(0.0);
            let extra = if decodes > 0.0 { extra } else { 0.0 };
            let mixed = if decodes > 0.0 { self.mixed } else { 1.0 };
            (rows(queries + decodes) + self.ns_per_prefill_pair * pairs + extra + context) * mixed
        };
        time.max(1.0)
    }
}

impl StepModel {
    /// The time of a step.
    pub fn step(&self, parts: impl Iterator<Item = RaggedPart> + Clone) -> Nanos {
        match self {
            Self::Floor { ledger, roof } => Floor::new(&ledger.ragged(parts), roof).time(),
            Self::Fitted { ledger, fit } => {
                let decoding = parts.clone().filter(|p| p.is_over_cache());
                let sequences = decoding.map(|p| p.tokens).sum::<usize>() as f64;
                let kv = ledger.ragged(parts.clone()).bytes.kv_read.as_f64();
                let flops = ledger.ragged(parts.filter(|p| !p.is_over_cache())).flops.0;
                let arithmetic = flops / fit.prefill_flops_per_ns;
                // Weights are read once for both, while the products of a prefill run.
                let fixed = fit.fixed_ns.max(arithmetic);
                let time = fixed + fit.ns_per_kv_byte * kv + fit.ns_per_sequence * sequences;
                // The run is an untrusted file: a clock that stands still or runs backwards would never end, and a NaN is neither.
                #[expect(clippy::manual_clamp, reason = "clamp keeps a NaN, and this makes it the shortest")]
                let bounded = time.max(SHORTEST_NS).min(LONGEST_NS);
                Nanos(bounded)
            }
            Self::Calibrated(calibration) => Nanos(calibration.step(parts)),
        }
    }

    /// The time of reading more bytes in a step, by the bandwidth of the model; 0 where it has none.
    pub fn read_time(&self, bytes: hbmark_core::units::Bytes) -> Nanos {
        match self {
            Self::Floor { roof, .. } => Nanos(bytes.as_f64() * 1e9 / roof.bandwidth.0),
            Self::Fitted { fit, .. } => Nanos(fit.ns_per_kv_byte * bytes.as_f64()),
            Self::Calibrated(_) => Nanos(0.0),
        }
    }

    /// A description for reports.
    pub fn describe(&self) -> String {
        match self {
            Self::Floor { roof, .. } => format!(
                "every step at its floor: ideal bytes at {}, FLOPs at {}",
                roof.bandwidth,
                roof.peak
                    .as_ref()
                    .map_or("no known peak".into(), |peak| format!("{} ({})", peak.rate, peak.dtype))
            ),
            Self::Fitted { fit, .. } => format!(
                "steps as a saved run measured them: {} fixed, {:.3} ns per KB of KV, {} per sequence, prefill at {:.0} GFLOP/s",
                Nanos(fit.fixed_ns),
                fit.ns_per_kv_byte * 1e3,
                Nanos(fit.ns_per_sequence),
                fit.prefill_flops_per_ns
            ),
            Self::Calibrated(c) => format!(
                "steps as this engine took them just before: {} prefill and {} decode shapes, {} per cached position",
                c.prefill.len(),
                c.decode.len(),
                Nanos(c.ns_per_decode_position)
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hbmark_core::ledger::devices;
    use hbmark_core::model::{Dtype, test_shapes};

    fn parts(decodes: usize, cached: usize, prefill: &[usize]) -> impl Iterator<Item = RaggedPart> + Clone {
        let decode = std::iter::repeat_n(RaggedPart::new(cached, 1), decodes);
        decode.chain(prefill.iter().copied().map(|tokens| RaggedPart::new(0, tokens)))
    }

    #[test]
    fn the_floor_of_a_decode_is_the_ledgers() {
        let architecture = test_shapes::llama_3_1_8b();
        let ledger = Box::new(Ledger::new(&architecture, &architecture.inventory(Dtype::Bf16), Dtype::Bf16));
        let roof = Roof::datasheet(devices::find("h100-sxm").unwrap(), Dtype::Bf16);
        let wanted = Floor::new(&ledger.decode(8, 1024), &roof).time();
        let model = StepModel::Floor { ledger, roof };
        assert!((model.step(parts(8, 1024, &[])).0 - wanted.0).abs() < 1e-6);
    }

    #[test]
    fn halfway_between_two_calibrations_is_their_mean_and_drift_their_ratio() {
        let at = |scale: f64| Calibration {
            looped: false,
            prefill: vec![(1.0, 100.0 * scale), (64.0, 730.0 * scale)],
            decode: vec![(1.0, 105.0 * scale), (4.0, 150.0 * scale)],
            base_context: 8.0,
            ns_per_decode_position: 0.5 * scale,
            ns_per_prefill_pair: 0.1 * scale,
            mixed: 1.0,
        };
        let (before, after) = (at(1.0), at(1.5));
        assert!((before.drift(&after).unwrap() - 1.5).abs() < 1e-12);
        assert_eq!(before.halfway(&after), at(1.25));
        // Shapes that only the later one timed are read off the earlier one's line.
        let wider = Calibration { decode: vec![(1.0, 105.0), (4.0, 150.0), (8.0, 210.0)], ..at(1.0) };
        assert_eq!(before.halfway(&wider), wider);
        assert!((before.drift(&wider).unwrap() - 1.0).abs() < 1e-12);
        let none = Calibration { prefill: Vec::new(), decode: Vec::new(), ..at(1.0) };
        assert_eq!(before.drift(&none), None);
    }

    #[test]
    fn a_calibration_gives_back_what_it_was_made_of() {
        let calibration = Calibration {
            looped: false,
            prefill: vec![(1.0, 100.0), (2.0, 110.0), (4.0, 130.0), (64.0, 730.0)],
            decode: vec![(1.0, 105.0), (4.0, 150.0)],
            base_context: 8.0,
            ns_per_decode_position: 0.5,
            ns_per_prefill_pair: 0.1,
            mixed: 1.0,
        };
        let model = StepModel::Calibrated(calibration);
        let time = |p: Vec<RaggedPart>| model.step(p.into_iter()).0;
        assert!((time(parts(4, 8, &[]).collect()) - 150.0).abs() < 1e-9);
        assert!((time(parts(4, 108, &[]).collect()) - 350.0).abs() < 1e-9);
        assert!((time(parts(0, 0, &[64]).collect()) - 730.0).abs() < 1e-9);
        // Halfway between 4 and 64 rows without their attention, 129.2 and 525.2 ns, and 578 pairs.
        assert!((time(parts(0, 0, &[34]).collect()) - 385.0).abs() < 1e-9);
        // Two prompts have as many rows as one of both lengths, and half of its pairs.
        assert!((time(parts(0, 0, &[32, 32]).collect()) - (730.0 - 0.1 * 32.0 * 32.0)).abs() < 1e-9);
        // 60 prefill tokens beside four decodes: 64 rows, 1,800 pairs, and the 20.8 ns a decode of four takes over four rows.
        assert!((time(parts(4, 8, &[60]).collect()) - 726.0).abs() < 1e-9);
        // A step that mixes both and took a tenth more than its parts, and no other, is corrected by it.
        let StepModel::Calibrated(calibration) = &model else { unreachable!("made so above") };
        let slower = StepModel::Calibrated(Calibration { mixed: 1.1, ..calibration.clone() });
        assert!((slower.step(parts(4, 8, &[60])).0 - 726.0 * 1.1).abs() < 1e-9);
        assert!((slower.step(parts(4, 8, &[])).0 - 150.0).abs() < 1e-9);
        assert!((slower.step(parts(0, 0, &[34])).0 - 385.0).abs() < 1e-9);
        // Beyond the last point the last piece goes on, 6.6 ns a row, and 8,192 pairs.
        assert!((time(parts(0, 0, &[128]).collect()) - (525.2 + 64.0 * 6.6 + 819.2)).abs() < 1e-9);
        let later = vec![RaggedPart::new(100, 4)];
        assert!((time(later) - 170.0).abs() < 1e-9);
    }
}
