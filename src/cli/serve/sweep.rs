//! `hbmark serve sweep`: one variable over its values.

use anyhow::{Context, ensure};
use clap::Args;

use super::flags::LoadArgs;
use crate::serve::{Mode, ServeConfig};
use hbmark_core::result::serving::SweepVariable;

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  hbmark serve sweep 'rate=2..16*1.5' --requests 150
  hbmark serve sweep max-num-seqs=8,64 --rate 4

Values take commas and ranges: 1,2,4   1..32*2   1..3+0.5")]
pub(super) struct SweepArgs {
    /// One variable and its values: rate=1..32*2, concurrency=1,8, max-num-seqs=8,64, max-num-batched-tokens, block-size,
    /// num-gpu-blocks-override, input-len, output-len, prefix-share. With --slo a sweep of the load ends where it is not met.
    #[arg(value_name = "VARIABLE=VALUES", value_parser = parse)]
    over: (String, Vec<f64>),
    #[command(flatten)]
    pub load: LoadArgs,
}

impl SweepArgs {
    pub fn config(&self) -> anyhow::Result<ServeConfig> {
        let (variable, values) = self.over.clone();
        let variable: SweepVariable = variable.parse()?;
        ensure!(
            !(variable.is_load() && (self.load.rate.is_some() || self.load.concurrency.is_some())),
            "a sweep over {variable} chooses the load itself; leave out --rate and --concurrency"
        );
        self.load.config(Mode::Sweep { variable, values })
    }
}

fn parse(given: &str) -> anyhow::Result<(String, Vec<f64>)> {
    let (variable, values) = given.split_once('=').context("it has no `=`; write it as rate=1..32*2")?;
    Ok((variable.trim().to_owned(), parse_values(values)?))
}

/// The most values of a sweep.
const MAX_VALUES: usize = 256;

/// Reads `0.5,1,2`, `1..50`, `0.5..8*2` or `1..3+0.5`.
fn parse_values(given: &str) -> anyhow::Result<Vec<f64>> {
    let number = |text: &str| -> anyhow::Result<f64> {
        let value = text.trim().parse().ok().with_context(|| format!("`{text}` is not a number"))?;
        ensure!(value > 0.0 && value < 1e9, "{value} is not above 0 and below 1e9");
        Ok(value)
    };
    let mut values = Vec::new();
    for part in given.split(',') {
        let Some((from, to)) = part.split_once("..") else {
            values.push(number(part)?);
            continue;
        };
        let (mut value, factor, step, to) = if let Some((to, factor)) = to.split_once('*') {
            (number(from)?, number(factor)?, 0.0, number(to)?)
        } else if let Some((to, step)) = to.split_once('+') {
            (number(from)?, 1.0, number(step)?, number(to)?)
        } else {
            (number(from)?, 1.0, 1.0, number(to)?)
        };
        ensure!(factor >= 1.0 && (factor > 1.0 || step > 0.0), "{part}: a factor must be above 1");
        ensure!(value <= to, "{from}..{to} runs backwards");
        while value <= to * (1.0 + 1e-9) {
            values.push(value);
            ensure!(values.len() <= MAX_VALUES, "{part}: more than {MAX_VALUES} values");
            value = value * factor + step;
        }
    }
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_a_sweep_are_lists_and_ranges() {
        assert_eq!(parse_values("0.5,1,2").unwrap(), [0.5, 1.0, 2.0]);
        assert_eq!(parse_values("1..3").unwrap(), [1.0, 2.0, 3.0]);
        assert_eq!(parse_values("0.5..4*2").unwrap(), [0.5, 1.0, 2.0, 4.0]);
        assert_eq!(parse_values("1..2+0.5").unwrap(), [1.0, 1.5, 2.0]);
        for wrong in ["", "a", "0", "-1", "3..1", "1..8*1", "1..1e9*1.00001", "NaN", "inf"] {
            assert!(parse_values(wrong).is_err(), "{wrong}");
        }
    }
}
