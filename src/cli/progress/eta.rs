//! How long is left, once there is evidence for it.
//!
//! Enters: work done and work left with the seconds at which that was so, on any clock. Leaves: the seconds that are left, or nothing
//! where an answer could be off by more than a factor of two.

/// Work that must be done before anything is said: this share of all of it, and so many seconds.
const SHARE: f64 = 0.08;
const SECONDS: f64 = 2.0;

/// How far the pace of the last half may lie from that of the whole, and the most work left over the least.
const STEADY: f64 = 1.4;
const OPEN: f64 = 2.2;

/// Work and time so far.
#[derive(Debug, Clone, Default)]
pub struct Eta {
    /// Seconds and work done, in order; the first is the beginning.
    seen: Vec<(f64, f64)>,
    least: f64,
    most: f64,
}

impl Eta {
    /// Work begins at this second.
    pub fn from(second: f64) -> Self {
        Self { seen: vec![(second, 0.0)], ..Self::default() }
    }

    /// So much work is done at this second, and at least and at most so much is left.
    pub fn update(&mut self, second: f64, done: f64, least: f64, most: f64) {
        match self.seen.last() {
            Some((_, before)) if done > *before => self.seen.push((second, done)),
            // Something else is counted.
            Some((_, before)) if done < *before => *self = Self::from(second),
            _ => {}
        }
        (self.least, self.most) = (least, most);
    }

    /// The seconds that are left at this second.
    pub fn left(&self, second: f64) -> Option<f64> {
        let ((begin, _), (now, done)) = (*self.seen.first()?, *self.seen.last()?);
        let (spent, wanted) = (now - begin, (self.least * self.most).sqrt());
        if self.seen.len() < 3
            || spent < SECONDS
            || done < SHARE * (done + wanted)
            || self.most > OPEN * self.least
        {
            return None;
        }
        // The pace since half of the work was done, beside that of all of it: a machine that changes its pace has none.
        let (then, half) = *self.seen.iter().rev().find(|(_, work)| *work <= done / 2.0)?;
        let (whole, recent) = (spent / done, (now - then) / (done - half));
        if whole.max(recent) > STEADY * whole.min(recent) {
            return None;
        }
        let left = recent * wanted - (second - now);
        // What should be over already is not known any more.
        (left > 0.0).then_some(left)
    }
}

/// A time for a person: `40 s`, `12 min`, `3.5 h`.
pub fn rounded(seconds: f64) -> String {
    match seconds {
        s if s < 100.0 => format!("{s:.0} s"),
        s if s < 100.0 * 60.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is said during a run whose pieces take `seconds`, beside what is then really left.
    fn said(seconds: &[f64]) -> Vec<(Option<f64>, f64)> {
        let total: f64 = seconds.iter().sum();
        let (mut eta, mut now) = (Eta::from(0.0), 0.0);
        let mut said = Vec::new();
        for (index, taken) in seconds.iter().enumerate() {
            // Asked in the middle of a piece too.
            said.push((eta.left(now + taken / 2.0), total - now - taken / 2.0));
            now += taken;
            let left = (seconds.len() - index - 1) as f64;
            eta.update(now, (index + 1) as f64, left, left);
            said.push((eta.left(now), total - now));
        }
        said
    }

    fn right(said: &[(Option<f64>, f64)]) -> bool {
        said.iter().all(|(said, left)| said.is_none_or(|said| (left / 2.0..=left * 2.0).contains(&said)))
    }

    #[test]
    fn what_is_left_is_right_within_a_factor_of_two_or_not_said() {
        let even = said(&[5.0; 24]);
        assert!(right(&even), "{even:?}");
        // From the third launch on it is said, to the last but one.
        assert!(even[6..46].iter().all(|(said, _)| said.is_some()), "{even:?}");
        let uneven: Vec<f64> = (0..24).map(|i| if i % 2 == 0 { 4.0 } else { 7.0 }).collect();
        assert!(right(&said(&uneven)) && said(&uneven).iter().filter(|(s, _)| s.is_some()).count() > 30);
        // A slow beginning, such as ceilings and loading, is not a pace.
        let slow_start: Vec<f64> = std::iter::once(60.0).chain([2.0; 30]).collect();
        assert!(right(&said(&slow_start)), "{:?}", said(&slow_start));
        let slower: Vec<f64> = (0..30).map(|i| if i < 15 { 1.0 } else { 1.5 }).collect();
        assert!(right(&said(&slower)), "{:?}", said(&slower));
    }

    #[test]
    fn nothing_is_said_without_evidence() {
        let mut eta = Eta::from(0.0);
        assert_eq!(eta.left(10.0), None);
        eta.update(1.0, 10.0, 1.0, 1.0);
        eta.update(1.5, 20.0, 1.0, 1.0);
        assert_eq!(eta.left(1.5), None, "half a second is not evidence");
        eta.update(10.0, 200.0, 100.0, 400.0);
        assert_eq!(eta.left(10.0), None, "the end is open");
        eta.update(11.0, 220.0, 100.0, 100.0);
        assert!(eta.left(11.0).is_some());
        assert_eq!(eta.left(1_000.0), None, "it should be over");
    }

    #[test]
    fn a_time_for_a_person_has_two_digits() {
        assert_eq!(
            [12.4, 99.0, 150.0, 5_000.0, 9_000.0].map(rounded),
            ["12 s", "99 s", "2 min", "83 min", "2.5 h"]
        );
    }
}
