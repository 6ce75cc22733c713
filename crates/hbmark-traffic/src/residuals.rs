//! The steps of a run against the step-time model.
//!
//! Enters: the log of steps, and a [`Calibration`]. Leaves: the ratio of measured to predicted time, by kind of step. It tells errors of
//! the step-time model from errors of the queueing model.

use super::serving_loop::StepLog;
use super::step_model::Calibration;
use hbmark_core::result::serving::{Residual, Residuals};
use hbmark_core::stats::median;
use hbmark_core::units::Nanos;

/// Steps of a kind needed for a residual.
const MIN_STEPS: usize = 10;

/// Compares each step with the model; `None` for an engine that runs one sequence after the other, whose log has too little detail.
pub fn residuals(steps: &[StepLog], model: &Calibration, adapter: Nanos) -> Option<Residuals> {
    if model.looped {
        return None;
    }
    let of = |wanted: &dyn Fn(&StepLog, Option<&StepLog>) -> bool| {
        let before = std::iter::once(None).chain(steps.iter().map(Some));
        let pairs: Vec<(f64, f64)> = steps
            .iter()
            .zip(before)
            .filter(|(step, before)| wanted(step, *before))
            .map(|(step, _)| {
                let phases = step.phases;
                let took = phases.launch + phases.device + phases.sample;
                (took, model.fused(&step.mixture) + adapter.0 * step.adapters as f64)
            })
            .collect();
        let total = |of: fn(&(f64, f64)) -> f64| pairs.iter().map(of).sum::<f64>();
        let ratios: Vec<f64> = pairs.iter().map(|(took, expected)| took / expected).collect();
        (pairs.len() >= MIN_STEPS).then(|| Residual {
            steps: pairs.len(),
            median_ratio: median(&ratios),
            total_ratio: total(|pair| pair.0) / total(|pair| pair.1),
        })
    };
    let prefills = |step: &StepLog| step.mixture.queries > 0.0;
    let decodes = |step: &StepLog| step.mixture.decodes > 0.0;
    let behind = |before: Option<&StepLog>| before.is_some_and(prefills);
    Some(Residuals {
        decode: of(&|step, before| !prefills(step) && !behind(before)),
        decode_behind_prefill: of(&|step, before| !prefills(step) && behind(before)),
        prefill: of(&|step, _| prefills(step) && !decodes(step)),
        mixed: of(&|step, _| prefills(step) && decodes(step)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::executor::Phases;
    use crate::step_model::Mixture;

    fn model() -> Calibration {
        Calibration {
            ns_per_decode_position: 1.0,
            ..Calibration::of(vec![(1.0, 100.0), (101.0, 1100.0)], vec![(1.0, 100.0), (11.0, 200.0)])
        }
    }

    fn step(decodes: f64, positions: f64, queries: f64, took: f64) -> StepLog {
        StepLog {
            mixture: Mixture { decodes, positions, queries, pairs: 0.0 },
            phases: Phases { device: took, build: 1e9, ..Phases::default() },
            adapters: 2,
            ..StepLog::default()
        }
    }

    #[test]
    fn each_kind_of_step_is_held_against_the_model_by_itself() {
        // A prefill of 51 tokens is 600; a decode of one at 20 positions is 120; adapters add 10.
        let round =
            [step(0.0, 0.0, 51.0, 610.0 * 1.5), step(1.0, 20.0, 0.0, 260.0), step(1.0, 20.0, 0.0, 143.0)];
        let steps: Vec<StepLog> = round.iter().copied().cycle().take(60).collect();
        let residuals = residuals(&steps, &model(), Nanos(5.0)).unwrap();
        let kinds: Vec<_> = residuals.kinds().collect();
        let wanted = [("decode", 1.1), ("decode behind a prefill", 2.0), ("prefill", 1.5)];
        assert_eq!(kinds.len(), wanted.len());
        for ((kind, residual), (name, ratio)) in kinds.iter().zip(wanted) {
            assert_eq!((*kind, residual.steps), (name, 20));
            assert!(
                (residual.median_ratio - ratio).abs() < 1e-9 && (residual.total_ratio - ratio).abs() < 1e-9
            );
        }
    }

    #[test]
    fn one_slow_step_shows_in_the_total_and_not_in_the_median() {
        let mut steps = vec![step(4.0, 0.0, 21.0, 380.0); 20];
        let expected = model().fused(&steps[0].mixture);
        for step in &mut steps {
            step.phases.device = expected;
        }
        steps[7].phases.device = expected * 21.0;
        let mixed = residuals(&steps, &model(), Nanos(0.0)).unwrap().mixed.unwrap();
        assert!((mixed.median_ratio - 1.0).abs() < 1e-12 && (mixed.total_ratio - 2.0).abs() < 1e-12);
    }

    #[test]
    fn few_steps_and_engines_that_loop_give_nothing() {
        let steps = vec![step(1.0, 0.0, 0.0, 100.0); MIN_STEPS - 1];
        assert_eq!(residuals(&steps, &model(), Nanos(0.0)), Some(Residuals::default()));
        assert_eq!(residuals(&steps, &Calibration { looped: true, ..model() }, Nanos(0.0)), None);
    }
}
