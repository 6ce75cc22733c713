//! From a quantity to a place along an axis, and the ticks that name places.
//!
//! Enters: the values to be shown and what they are measured in. Leaves: places between 0 and 1, and ticks with their unit. It has no
//! pixels, only the number of ticks there is room for.

/// What an axis measures; decides how its ticks are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Measure {
    /// Nanoseconds.
    Time,
    FlopsPerSecond,
    FlopsPerByte,
    TokensPerSecond,
    RequestsPerSecond,
    /// How far a percentile is from the largest value: 1 / (1 − p), so that 100 is p99.
    Tail,
    /// Of one, shown in percent.
    Share,
    Count,
    Megahertz,
    Watts,
    Celsius,
    Cores,
}

/// Powers of a thousand and their letters, largest first.
const SI: &[(f64, &str)] = &[(1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, "")];

impl Measure {
    /// Factor and unit in which a value of this size reads well.
    fn unit(self, size: f64) -> (f64, String) {
        let si = |name: &str| {
            let fits = |step: &&(f64, &str)| size >= step.0 * 0.9995;
            let (factor, letter) = SI.iter().find(fits).copied().unwrap_or((1.0, ""));
            (factor, format!(" {letter}{name}"))
        };
        match self {
            Self::Time => {
                let steps = [(1e9, " s"), (1e6, " ms"), (1e3, " µs")];
                let fits = |step: &&(f64, &str)| size >= step.0 * 0.9995;
                let (factor, unit) = steps.iter().find(fits).copied().unwrap_or((1.0, " ns"));
                (factor, unit.to_owned())
            }
            Self::FlopsPerSecond => si("FLOP/s"),
            Self::FlopsPerByte => (1.0, " FLOP/B".to_owned()),
            Self::TokensPerSecond => (1.0, " tok/s".to_owned()),
            Self::RequestsPerSecond => (1.0, " /s".to_owned()),
            Self::Share => (0.01, " %".to_owned()),
            Self::Count | Self::Tail => (1.0, String::new()),
            Self::Megahertz => (1.0, " MHz".to_owned()),
            Self::Watts => (1.0, " W".to_owned()),
            Self::Celsius => (1.0, " °C".to_owned()),
            Self::Cores => (1.0, " cores".to_owned()),
        }
    }

    /// One value with three digits and its unit.
    pub fn show(self, value: f64) -> String {
        if self == Self::Tail {
            let percent = format!("{:.3}", (1.0 - 1.0 / value) * 100.0);
            return format!("p{}", percent.trim_end_matches('0').trim_end_matches('.'));
        }
        let (factor, unit) = self.unit(value.abs());
        let scaled = value / factor;
        let decimals = match scaled.abs() {
            _ if self == Self::Count && value.fract() == 0.0 => 0,
            s if s < 9.995 => 2,
            s if s < 99.95 => 1,
            _ => 0,
        };
        format!("{scaled:.decimals$}{unit}")
    }
}

/// A named place on an axis.
#[derive(Debug, Clone, PartialEq)]
pub struct Tick {
    /// From 0, the low end, to 1.
    pub place: f64,
    pub label: String,
}

#[derive(Debug, Clone, PartialEq)]
enum Spacing {
    Linear,
    Log,
    /// Logarithmic, with ticks at these values only.
    LogAt(Vec<f64>),
}

/// One axis of a plot.
#[derive(Debug, Clone, PartialEq)]
pub struct Axis {
    pub label: String,
    pub measure: Measure,
    spacing: Spacing,
    low: f64,
    high: f64,
}

/// Fewer ticks than this do not show what kind of axis it is.
const FEWEST: usize = 3;

/// Smallest and largest of the values that can be shown.
fn range(values: impl IntoIterator<Item = f64>, positive: bool) -> Option<(f64, f64)> {
    // Values beyond this are not measurements, and their differences would not be finite.
    let known = |v: &f64| v.is_finite() && v.abs() < 1e100 && (!positive || *v > 1e-100);
    values.into_iter().filter(known).fold(None, |range, v| {
        range.map_or(Some((v, v)), |(low, high): (f64, f64)| Some((low.min(v), high.max(v))))
    })
}

impl Axis {
    /// From zero to a little over the largest value. `None` when nothing can be shown.
    pub fn from_zero(label: &str, measure: Measure, values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let (low, high) = range(values, false)?;
        let high = if high > 0.0 { high * 1.06 } else { 1.0 };
        let low = if low < 0.0 { low * 1.06 } else { 0.0 };
        Some(Self { label: label.to_owned(), measure, spacing: Spacing::Linear, low, high })
    }

    /// Just around the values.
    pub fn around(label: &str, measure: Measure, values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let (low, high) = range(values, false)?;
        let room = (high - low) * 0.08 + high.abs() * 0.01 + f64::MIN_POSITIVE;
        // A quantity that is never negative has no room below zero.
        let floor = if low >= 0.0 { 0.0 } else { f64::NEG_INFINITY };
        let (low, high) = ((low - room).max(floor), high + room);
        Some(Self { label: label.to_owned(), measure, spacing: Spacing::Linear, low, high })
    }

    /// Logarithmic, `room` being the factor left free at both ends.
    pub fn log(
        label: &str,
        measure: Measure,
        values: impl IntoIterator<Item = f64>,
        room: f64,
    ) -> Option<Self> {
        let (low, high) = range(values, true)?;
        Some(Self {
            label: label.to_owned(),
            measure,
            spacing: Spacing::Log,
            low: low / room,
            high: high * room,
        })
    }

    /// Logarithmic, with a tick at each of the values and nowhere else: batches of 1, 2, 4, 8.
    pub fn log_at(label: &str, measure: Measure, values: &[f64]) -> Option<Self> {
        let (low, high) = range(values.iter().copied(), true)?;
        let mut ticks: Vec<f64> = values.iter().copied().filter(|v| v.is_finite() && *v > 0.0).collect();
        ticks.sort_by(f64::total_cmp);
        ticks.dedup();
        let room = 1.25;
        Some(Self {
            label: label.to_owned(),
            measure,
            spacing: Spacing::LogAt(ticks),
            low: low / room,
            high: high * room,
        })
    }

    pub fn low(&self) -> f64 {
        self.low
    }

    pub fn high(&self) -> f64 {
        self.high
    }

    /// The place of a value, from 0 to 1; `None` where it is not on the axis.
    pub fn place(&self, value: f64) -> Option<f64> {
        let place = match self.spacing {
            Spacing::Linear => (value - self.low) / (self.high - self.low),
            _ => (value / self.low).ln() / (self.high / self.low).ln(),
        };
        (-1e-6..=1.0 + 1e-6).contains(&place).then(|| place.clamp(0.0, 1.0))
    }

    /// At most about `count` ticks.
    pub fn ticks(&self, count: usize) -> Vec<Tick> {
        match &self.spacing {
            Spacing::Linear => self.enough_linear_ticks(count),
            Spacing::LogAt(values) => self.apart(values, count),
            Spacing::Log => {
                // Powers of ten; of a range that holds few of them 2 and 5, too; where even these are few, as in less than a decade, round
                // steps, which are read better there, if not evenly spaced; at last finer ones, of which as many are left as have room.
                let steps = |finer: usize| evenly(&self.linear_ticks(finer * count), count);
                let between = self.between_powers();
                let between: Vec<Tick> = between.iter().filter_map(|value| self.log_tick(*value)).collect();
                let candidates = [
                    self.apart(&self.log_values(count), count),
                    evenly(&between, count),
                    spaced(self.enough_linear_ticks(count), count),
                    steps(3),
                    steps(6),
                ];
                let mut fewer: Vec<Tick> = Vec::new();
                for ticks in candidates {
                    if ticks.len() >= FEWEST {
                        return ticks;
                    }
                    if ticks.len() > fewer.len() {
                        fewer = ticks;
                    }
                }
                fewer
            }
        }
    }

    /// Those of ascending values that leave room for each other.
    fn apart(&self, values: &[f64], count: usize) -> Vec<Tick> {
        spaced(values.iter().filter_map(|value| self.log_tick(*value)), count)
    }

    fn log_tick(&self, value: f64) -> Option<Tick> {
        Some(Tick { place: self.place(value)?, label: self.log_label(value) })
    }

    fn log_label(&self, value: f64) -> String {
        if self.measure == Measure::Tail {
            return self.measure.show(value);
        }
        let (factor, unit) = self.measure.unit(value);
        let scaled = value / factor;
        // Powers of ten below one have no prefix of their own here.
        let decimals =
            if scaled < 0.9995 { short_decimals(scaled) } else { usize::from(scaled.fract().abs() > 1e-9) };
        format!("{scaled:.decimals$}{unit}")
    }

    /// Round steps; finer ones where the range falls between two and holds hardly any.
    fn enough_linear_ticks(&self, count: usize) -> Vec<Tick> {
        let enough = |ticks: &Vec<Tick>| ticks.len() >= FEWEST;
        let mut finer = [count, 2 * count].into_iter().map(|count| self.linear_ticks(count));
        finer.find(enough).unwrap_or_else(|| self.linear_ticks(count))
    }

    fn linear_ticks(&self, count: usize) -> Vec<Tick> {
        let step = round_step((self.high - self.low) / count.max(1) as f64);
        let (factor, unit) = self.measure.unit(self.high.abs().max(self.low.abs()));
        let decimals = short_decimals(step / factor);
        let first = (self.low / step).ceil();
        (0..=2 * count)
            .map(|i| (first + i as f64) * step)
            .filter_map(|value| {
                let shown = format!("{:.decimals$}", value / factor);
                let label = if value == 0.0 { "0".to_owned() } else { format!("{shown}{unit}") };
                Some(Tick { place: self.place(value)?, label })
            })
            .collect()
    }

    /// Every power of ten, with 2 and 5 between them.
    fn between_powers(&self) -> Vec<f64> {
        let (low, high) = (self.low.log10().floor(), self.high.log10().ceil());
        let exponents = (0..200).map(|i| low + f64::from(i)).take_while(|exponent| *exponent <= high);
        exponents.flat_map(|exponent| [1.0, 2.0, 5.0].map(|digit| digit * 10f64.powf(exponent))).collect()
    }

    /// Powers of ten, with 2 and 5 between them where there is room.
    fn log_values(&self, count: usize) -> Vec<f64> {
        let (low, high) = (self.low.log10().floor(), self.high.log10().ceil());
        let decades = high - low;
        let dense = (self.high / self.low).log10() * 2.5 <= count as f64;
        let every = (decades / count.max(1) as f64).ceil().max(1.0);
        let mut values = Vec::new();
        let mut exponent = low;
        while exponent <= high && values.len() < 200 {
            let power = 10f64.powf(exponent);
            values.push(power);
            if dense {
                values.extend([2.0 * power, 5.0 * power]);
            }
            exponent += every;
        }
        values
    }
}

/// Ascending ticks without those too near to the one before.
fn spaced(all: impl IntoIterator<Item = Tick>, count: usize) -> Vec<Tick> {
    let nearest = 0.7 / count.max(1) as f64;
    let mut ticks: Vec<Tick> = Vec::new();
    for tick in all {
        if ticks.last().is_none_or(|last| tick.place - last.place >= nearest) {
            ticks.push(tick);
        }
    }
    ticks
}

/// As [`spaced`], where no more than a few have room: the first, the last, and the one nearest the middle.
fn evenly(all: &[Tick], count: usize) -> Vec<Tick> {
    let ticks = spaced(all.iter().cloned(), count);
    let (Some(first), Some(last)) = (all.first(), all.last()) else { return ticks };
    if ticks.len() < FEWEST || (FEWEST + 1..=count).contains(&ticks.len()) {
        return ticks;
    }
    let middle = f64::midpoint(first.place, last.place);
    let off = |tick: &&Tick| (tick.place - middle).abs();
    let nearest = all.iter().min_by(|a, b| off(a).total_cmp(&off(b))).unwrap_or(first);
    let even = spaced([first, nearest, last].map(Tick::clone), count);
    if even.len() == FEWEST { even } else { ticks }
}

/// The next of 1, 2, 2.5, 5 × a power of ten.
fn round_step(step: f64) -> f64 {
    let power = 10f64.powf(step.log10().floor());
    let rounds = [1.0, 2.0, 2.5, 5.0, 10.0];
    rounds.iter().map(|r| r * power).find(|r| *r >= step * 0.999).unwrap_or(power * 10.0)
}

/// Decimals that show a step exactly: none for 20, one for 2.5 or 0.5, two for 0.25.
fn short_decimals(step: f64) -> usize {
    (0..9)
        .find(|&d| {
            let scaled = step * 10f64.powi(d);
            (scaled - scaled.round()).abs() < 1e-6 * scaled.max(1e-9)
        })
        .map_or(2, |d| usize::try_from(d).unwrap_or(2))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(axis: &Axis, count: usize) -> Vec<String> {
        axis.ticks(count).into_iter().map(|t| t.label).collect()
    }

    #[test]
    fn an_axis_of_round_steps_has_at_least_three_ticks() {
        for number in 1..2_000 {
            let low = f64::from(number) * 1e4;
            for factor in [1.0, 1.001, 1.1, 1.7, 3.0] {
                for count in 4..8 {
                    let around = Axis::around("TPOT", Measure::Time, [low, low * factor]).unwrap();
                    let zero = Axis::from_zero("TPOT", Measure::Time, [low, low * factor]).unwrap();
                    for axis in [around, zero] {
                        let ticks = labels(&axis, count);
                        assert!((FEWEST..=2 * count + 1).contains(&ticks.len()), "{ticks:?} of {count}");
                    }
                }
            }
        }
    }

    #[test]
    fn linear_ticks_are_round_and_share_a_unit() {
        let axis = Axis::from_zero("TPOT", Measure::Time, [3e6, 9e6]).unwrap();
        assert_eq!(labels(&axis, 5), ["0", "2 ms", "4 ms", "6 ms", "8 ms"]);
        let axis = Axis::around("", Measure::Share, [0.99, 1.02]).unwrap();
        assert_eq!(labels(&axis, 4), ["98 %", "100 %", "102 %"]);
    }

    #[test]
    fn logarithmic_ticks_each_have_their_unit() {
        let axis = Axis::log("", Measure::FlopsPerSecond, [2e9, 5e11], 2.0).unwrap();
        assert_eq!(labels(&axis, 5), ["1 GFLOP/s", "10 GFLOP/s", "100 GFLOP/s", "1 TFLOP/s"]);
        let axis = Axis::log("", Measure::Time, [6e6, 30e6], 1.2).unwrap();
        assert_eq!(labels(&axis, 6), ["5 ms", "10 ms", "20 ms"]);
        let axis = Axis::log("", Measure::FlopsPerByte, [0.2, 3.0], 1.0).unwrap();
        assert_eq!(
            labels(&axis, 6),
            ["0.20 FLOP/B".replace("0.20", "0.2"), "0.5 FLOP/B".into(), "1 FLOP/B".into(), "2 FLOP/B".into()]
        );
    }

    #[test]
    fn a_logarithmic_axis_has_at_least_three_ticks_that_reach_down_to_its_small_values() {
        for (low, factor) in (0..200).map(|i| (1e5 * 1.13_f64.powi(i % 40), 1.05 + 0.35 * f64::from(i))) {
            // A phone has room for three and a desk for twelve.
            for count in [3, 4, 6, 12] {
                let axis = Axis::log("", Measure::Time, [low, low * factor], 1.1).unwrap();
                let shown = labels(&axis, count);
                assert!(
                    (FEWEST..=2 * count + 4).contains(&shown.len()),
                    "{low} × {factor}, {count}: {shown:?}"
                );
            }
        }
        // From 0.6 s to 30 s, and what a batch gives in tokens.
        let axis = Axis::log("", Measure::Time, [0.6e9, 30e9], 1.5).unwrap();
        let lowest = axis.ticks(4).remove(0);
        assert!(lowest.place < 0.35, "{lowest:?}");
        let axis = Axis::log("", Measure::TokensPerSecond, [400.0, 22e3], 1.2).unwrap();
        assert!(labels(&axis, 5).len() >= 3, "{:?}", labels(&axis, 5));
    }

    #[test]
    fn a_short_logarithmic_range_has_round_steps() {
        for (low, high) in [(6e6, 8e6), (21e6, 29e6), (1.1e6, 1.9e6), (52e6, 98e6)] {
            let axis = Axis::log("", Measure::Time, [low, high], 1.1).unwrap();
            let shown = labels(&axis, 6);
            assert!((3..=9).contains(&shown.len()), "{low} to {high}: {shown:?}");
            let places: Vec<f64> = axis.ticks(6).iter().map(|tick| tick.place).collect();
            assert!(places.windows(2).all(|pair| pair[0] < pair[1]));
        }
    }

    #[test]
    fn percentiles_stand_as_far_apart_as_their_tails_are_rare() {
        let axis = Axis::log_at("", Measure::Tail, &[2.0, 10.0, 20.0, 100.0, 1000.0]).unwrap();
        assert_eq!(labels(&axis, 12), ["p50", "p90", "p95", "p99", "p99.9"]);
        let place = |v: f64| axis.place(v).unwrap();
        assert!((place(1000.0) - place(100.0) - (place(100.0) - place(10.0))).abs() < 1e-9);
    }

    #[test]
    fn ticks_at_values_keep_their_distance() {
        let axis = Axis::log_at("", Measure::Count, &[8.0, 1.0, 2.0, 2.05, 4.0]).unwrap();
        assert_eq!(labels(&axis, 8), ["1", "2", "4", "8"]);
    }

    #[test]
    fn what_cannot_be_shown_makes_no_axis_and_no_endless_loop() {
        assert!(Axis::log("", Measure::Count, [0.0, -1.0, f64::NAN], 1.1).is_none());
        assert!(Axis::from_zero("", Measure::Count, []).is_none());
        for value in [1e-90, 1e90, 5.0, -3.0, 0.0] {
            for axis in [
                Axis::from_zero("", Measure::Time, [value]),
                Axis::around("", Measure::Time, [value]),
                Axis::log("", Measure::Time, [value, 1.0], 1.1),
            ]
            .into_iter()
            .flatten()
            {
                let ticks = axis.ticks(6);
                assert!(ticks.len() < 40 && ticks.iter().all(|t| t.place.is_finite()), "{value} {ticks:?}");
            }
        }
    }

    #[test]
    fn values_off_the_axis_have_no_place() {
        let axis = Axis::from_zero("", Measure::Count, [10.0]).unwrap();
        assert_eq!((axis.place(-1.0), axis.place(0.0), axis.place(20.0)), (None, Some(0.0), None));
    }
}
