//! When requests arrive: absolute deadlines, drawn from the seed before the clock starts.
//!
//! Enters: a process, a mean rate, a count. Leaves: ascending times since the start. Sleeping *until* a deadline instead of *for* a gap
//! keeps the offered rate when the loop is late; nothing here waits.

use std::str::FromStr;

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, Exp1, Gamma};
use serde::{Deserialize, Serialize};

use hbmark_core::result::serving::{Arrivals, ArrivalsError, parse_span};
use hbmark_core::units::Nanos;

/// A rate that is `factor` times the mean for `on` of every `period`, and lower between, so that the mean stays.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Burst {
    pub factor: f64,
    pub on_ns: f64,
    pub period_ns: f64,
}

impl FromStr for Burst {
    type Err = ArrivalsError;

    fn from_str(given: &str) -> Result<Self, ArrivalsError> {
        let fail = |problem: &str| ArrivalsError::Burst { given: given.into(), problem: problem.into() };
        let (factor, rest) = given.split_once('x').ok_or_else(|| fail("there is no `x`"))?;
        let (on, period) = rest.split_once('/').ok_or_else(|| fail("there is no `/`"))?;
        let factor: f64 = factor.trim().parse().map_err(|_| fail("the factor is not a number"))?;
        let on = parse_span(on).map_err(|problem| fail(&problem))?;
        let period = parse_span(period).map_err(|problem| fail(&problem))?;
        if !(factor.is_finite() && factor >= 1.0) {
            return Err(fail("the factor is below 1"));
        }
        if on.0 >= period.0 {
            return Err(fail("the burst is as long as its period"));
        }
        if factor * on.0 > period.0 {
            return Err(fail("the bursts alone are more than the mean rate"));
        }
        Ok(Self { factor, on_ns: on.0, period_ns: period.0 })
    }
}

impl Burst {
    /// The time at which the modulated process has as many arrivals as the steady one at `steady`.
    fn warp(&self, steady: f64) -> f64 {
        let (periods, rest) = ((steady / self.period_ns).floor(), steady % self.period_ns);
        let in_burst = self.factor * self.on_ns;
        let within = if rest < in_burst {
            rest / self.factor
        } else {
            // Between bursts the rate makes up for them, so that the mean holds.
            let off = (self.period_ns - in_burst) / (self.period_ns - self.on_ns);
            self.on_ns + (rest - in_burst) / off
        };
        periods * self.period_ns + within
    }
}

/// The first `count` arrivals of a process at a mean rate per second, since the start.
///
/// # Panics
/// When the rate is not above zero, or the process was not checked when it was read.
pub fn deadlines(process: Arrivals, burst: Option<Burst>, rate: f64, count: usize, seed: u64) -> Vec<Nanos> {
    assert!(rate.is_finite() && rate > 0.0, "a rate is above zero");
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let gap = 1e9 / rate;
    let gamma = match process {
        Arrivals::Gamma(cv) => Some(Gamma::new(1.0 / (cv * cv), cv * cv).expect("checked when it was read")),
        Arrivals::Poisson | Arrivals::Constant => None,
    };
    let mut at = 0.0;
    (0..count)
        .map(|_| {
            at += gap
                * match (process, &gamma) {
                    (Arrivals::Gamma(_), Some(gamma)) => gamma.sample(&mut random),
                    (Arrivals::Constant, _) => 1.0,
                    _ => Exp1.sample(&mut random),
                };
            Nanos(burst.map_or(at, |burst| burst.warp(at)))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use hbmark_core::stats::{mean, sd};

    fn gaps(deadlines: &[Nanos]) -> Vec<f64> {
        deadlines.windows(2).map(|pair| pair[1].0 - pair[0].0).collect()
    }

    #[test]
    fn processes_have_their_rate_and_their_variation() {
        for (process, cv) in [
            (Arrivals::Poisson, 1.0),
            (Arrivals::Gamma(2.0), 2.0),
            (Arrivals::Gamma(0.5), 0.5),
            (Arrivals::Constant, 0.0),
        ] {
            let gaps = gaps(&deadlines(process, None, 10.0, 200_000, 3));
            let mean = mean(&gaps);
            assert!((mean / 1e8 - 1.0).abs() < 0.02, "{process}: mean gap {mean}");
            assert!((sd(&gaps).unwrap() / mean - cv).abs() < 0.03, "{process}");
        }
    }

    #[test]
    fn the_same_seed_gives_the_same_arrivals_and_another_seed_others() {
        let of = |seed| deadlines(Arrivals::Poisson, None, 5.0, 100, seed);
        assert_eq!(of(1), of(1));
        assert_ne!(of(1), of(2));
    }

    #[test]
    fn a_burst_keeps_the_mean_and_packs_its_share() {
        let burst: Burst = "4x10s/60s".parse().unwrap();
        let times = deadlines(Arrivals::Constant, Some(burst), 10.0, 60_000, 0);
        assert!((times.last().unwrap().seconds() - 6_000.0).abs() < 1.0);
        let inside = times.iter().filter(|t| t.seconds() % 60.0 < 10.0).count();
        // 4 · 10 s of 60 s at the mean rate.
        assert!((inside as f64 / 60_000.0 - 40.0 / 60.0).abs() < 0.01, "{inside}");
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        for given in ["", "uniform", "gamma", "gamma:x", "poisson:1"] {
            assert_eq!(given.parse::<Arrivals>(), Err(ArrivalsError::Process { given: given.into() }));
        }
        for given in ["gamma:0", "gamma:-1", "gamma:NaN", "gamma:1000"] {
            assert_eq!(given.parse::<Arrivals>(), Err(ArrivalsError::Variation { given: given.into() }));
        }
        for (given, problem) in [
            ("4", "there is no `x`"),
            ("4x10s", "there is no `/`"),
            ("ax10s/60s", "the factor is not a number"),
            ("0.5x10s/60s", "the factor is below 1"),
            ("2x60s/60s", "the burst is as long as its period"),
            ("8x10s/60s", "the bursts alone are more than the mean rate"),
            ("2x10/60s", "`10` has no unit (us, ms, s)"),
        ] {
            let error = given.parse::<Burst>().unwrap_err();
            assert_eq!(error, ArrivalsError::Burst { given: given.into(), problem: problem.into() });
        }
    }

    proptest! {
        #[test]
        fn deadlines_ascend(rate in 0.01f64..1e5, cv in 0.05f64..20.0, seed in any::<u64>(), factor in 1.0f64..5.9) {
            let burst = Burst { factor, on_ns: 1e9, period_ns: 6e9 };
            let times = deadlines(Arrivals::Gamma(cv), Some(burst), rate, 50, seed);
            prop_assert!(times.windows(2).all(|pair| pair[0].0 <= pair[1].0));
            prop_assert!(times.iter().all(|t| t.0.is_finite() && t.0 >= 0.0));
        }
    }
}
