//! How requests arrive.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The shape of the gaps between arrivals.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Arrivals {
    /// Independent users: exponential gaps, coefficient of variation 1.
    #[default]
    Poisson,
    /// Gamma gaps with this coefficient of variation; above 1 is burstier than Poisson.
    Gamma(f64),
    /// Equal gaps.
    Constant,
}

/// An arrival process that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ArrivalsError {
    #[error("--arrivals `{given}`: wanted poisson, gamma:CV (as gamma:2) or constant")]
    Process { given: String },
    #[error("--arrivals `{given}`: a coefficient of variation lies between 0.05 and 20")]
    Variation { given: String },
    #[error(
        "--burst `{given}`: {problem}; write FACTORxON/PERIOD, as in 4x10s/60s: four times the rate for 10 s of every 60 s"
    )]
    Burst { given: String, problem: String },
}

impl FromStr for Arrivals {
    type Err = ArrivalsError;

    fn from_str(given: &str) -> Result<Self, ArrivalsError> {
        match given.split_once(':') {
            None if given == "poisson" => Ok(Self::Poisson),
            None if given == "constant" => Ok(Self::Constant),
            Some(("gamma", cv)) => {
                let cv: f64 = cv.parse().map_err(|_| ArrivalsError::Process { given: given.into() })?;
                if (0.05..=20.0).contains(&cv) {
                    Ok(Self::Gamma(cv))
                } else {
                    Err(ArrivalsError::Variation { given: given.into() })
                }
            }
            _ => Err(ArrivalsError::Process { given: given.into() }),
        }
    }
}

impl std::fmt::Display for Arrivals {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Poisson => f.write_str("poisson"),
            Self::Gamma(cv) => write!(f, "gamma:{cv}"),
            Self::Constant => f.write_str("constant"),
        }
    }
}
