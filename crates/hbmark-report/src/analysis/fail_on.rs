//! What makes a command fail although it has a result: conditions that a pipeline names, judged from any kind of result.
//!
//! Enters: an [`Opened`] result and conditions. Leaves: each that holds, in words. Comparisons have conditions of their own with a size
//! (`hbmark compare --fail-on slower:2%`).

use super::checklist::{CheckOutcome, of_comparison};
use super::import::{Imported, UserOverrides};
use super::opened::Opened;
use hbmark_core::result::serving::{ServeReport, Validity};
use hbmark_core::result::{Cause, Status};

/// A condition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum FailOn {
    /// A point missed an objective, or it is not known whether it met it.
    Slo,
    /// A point was saturated, or it is not known whether it was.
    Saturated,
    /// A search found no rate.
    NoRate,
    /// A cell or point is invalid, or figures of another program contradict one another.
    Invalid,
    /// A cell or a point is not `ok`: disturbed, not converged or not run.
    NotOk,
    /// A predicted cell does not fit the device.
    DoesNotFit,
}

impl FailOn {
    /// Whether a result of this kind can meet or miss the condition.
    pub fn applies_to(self, opened: &Opened) -> bool {
        match self {
            Self::Invalid | Self::NotOk => true,
            Self::Saturated => matches!(opened, Opened::Serving(_)),
            Self::NoRate => matches!(opened, Opened::Serving(report) if report.search.is_some()),
            Self::Slo => matches!(opened, Opened::Serving(report) if has_objectives(report)),
            Self::DoesNotFit => matches!(opened, Opened::Report(_)),
        }
    }
}

fn has_objectives(report: &ServeReport) -> bool {
    let of_points = report.points.iter().filter_map(|point| point.result.as_ref()).any(|r| !r.slo.is_empty());
    // Where no point was run, the flags alone have them.
    let asked = || report.config.get("slo").and_then(|slo| slo.as_array()).is_some_and(|slo| !slo.is_empty());
    of_points || report.search.is_some() || asked()
}

/// The conditions that hold, one line each. What a file of another program does not say of itself is `given`.
pub fn failures(opened: &Opened, conditions: &[FailOn], given: &UserOverrides<'_>) -> Vec<String> {
    conditions.iter().filter_map(|condition| holds(opened, *condition, given)).collect()
}

fn holds(opened: &Opened, condition: FailOn, given: &UserOverrides<'_>) -> Option<String> {
    match opened {
        Opened::Serving(report) => of_serving(report, condition),
        Opened::Report(report) => report.cells.iter().find_map(|cell| {
            let hit = match condition {
                FailOn::Invalid => cell.status == Status::Invalid,
                FailOn::NotOk => !matches!(cell.status, Status::Ok | Status::Predicted),
                FailOn::DoesNotFit => cell.flags.iter().any(|flag| matches!(flag, Cause::DoesNotFit { .. })),
                FailOn::Slo | FailOn::Saturated | FailOn::NoRate => false,
            };
            let why = cell
                .reason
                .iter()
                .chain(&cell.flags)
                .next()
                .map_or_else(String::new, |why| format!(": {why}"));
            hit.then(|| format!("{}{why}", cell.id))
        }),
        Opened::Foreign(results) => {
            let asked = matches!(condition, FailOn::Invalid | FailOn::NotOk);
            results.iter().filter(|_| asked).find_map(|result| {
                let imported = Imported::new(result.clone(), given);
                let (row, cause) = imported.objections().next()?;
                Some(format!("{}: {cause}", row.label))
            })
        }
        Opened::Comparison(found) => {
            let asked = matches!(condition, FailOn::Invalid | FailOn::NotOk);
            let list = asked.then(|| of_comparison(found))?;
            let failed = list.reasons().find(|check| check.outcome == CheckOutcome::Failed)?;
            Some(format!("{}: {}", failed.question, failed.evidence))
        }
    }
}

/// As [`failures`], of a serving result that is not in a file yet.
pub fn serving_failures(report: &ServeReport, conditions: &[FailOn]) -> Vec<String> {
    conditions.iter().filter_map(|condition| of_serving(report, *condition)).collect()
}

fn of_serving(report: &ServeReport, condition: FailOn) -> Option<String> {
    // Points of a search are tried to find out what holds: its answer is what counts.
    if let Some(search) = &report.search
        && matches!(condition, FailOn::Slo | FailOn::Saturated | FailOn::NoRate)
    {
        return (search.max_rate.is_none()).then(|| format!("no rate was found: {}", search.note));
    }
    report.points.iter().find_map(|point| {
        let (result, disturbed) = (point.result.as_ref(), point.disturbances());
        let hit = match condition {
            FailOn::Slo => match result {
                Some(result) => {
                    let known = result.validity != Validity::Invalid;
                    !result.slo.is_empty() && (!known || result.slo_met != Some(true))
                }
                // Points above the one that ended a sweep would have failed as that one did.
                None => !matches!(point.not_run, Some(Cause::SweepEnded { .. })) && has_objectives(report),
            },
            FailOn::Saturated => result.is_some_and(|result| match result.validity {
                Validity::Saturated => true,
                Validity::Valid => point.keeps_up().is_none(),
                Validity::Invalid => false,
            }),
            FailOn::Invalid => result.is_some_and(|result| result.validity == Validity::Invalid),
            FailOn::NotOk => {
                result.is_none_or(|result| result.validity != Validity::Valid) || !disturbed.is_empty()
            }
            FailOn::NoRate | FailOn::DoesNotFit => false,
        };
        let what = match condition {
            FailOn::Slo => "an objective is not met, or not known to be",
            FailOn::Saturated if result.is_some_and(|result| result.validity == Validity::Valid) => {
                "not known to keep up"
            }
            FailOn::Saturated => "saturated",
            FailOn::NotOk if !disturbed.is_empty() => "disturbed",
            FailOn::Invalid => "invalid",
            _ => "no valid result",
        };
        let why = result.filter(|_| condition == FailOn::Invalid).and_then(|result| result.reasons.first());
        let why = why.map_or_else(String::new, |why| format!(": {why}"));
        hit.then(|| format!("{}: {what}{why}", point.label))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples;

    /// As beside other processes.
    fn open_machine(report: &mut ServeReport) {
        report.points[0].result.as_mut().unwrap().foreign_cores = Some(1.5);
    }

    #[test]
    fn a_serving_result_fails_on_what_was_named_and_on_nothing_else() {
        let mut report = samples::single();
        let all = [FailOn::Slo, FailOn::Saturated, FailOn::NoRate, FailOn::Invalid];
        samples::keeps_up(&mut report.points[0], Some(true)).slo_met = Some(true);
        report.search = None;
        assert_eq!(serving_failures(&report, &all), [""; 0]);
        report.points[0].result.as_mut().unwrap().validity = Validity::Saturated;
        assert_eq!(serving_failures(&report, &all).len(), 1);
        assert_eq!(serving_failures(&report, &[FailOn::Slo, FailOn::Invalid]), [""; 0]);
        // What is not judged is not known to keep up.
        samples::keeps_up(&mut report.points[0], None);
        let found = serving_failures(&report, &[FailOn::Saturated]);
        assert!(found.len() == 1 && found[0].ends_with(": not known to keep up"), "{found:?}");
        assert_eq!(serving_failures(&report, &[FailOn::NotOk]), [""; 0]);
        open_machine(&mut report);
        let found = serving_failures(&report, &[FailOn::NotOk]);
        assert!(found.len() == 1 && found[0].ends_with(": disturbed"), "{found:?}");
    }

    #[test]
    fn objectives_of_a_point_that_is_invalid_or_was_not_run_are_not_known_to_be_met() {
        let slo = |report: &ServeReport| serving_failures(report, &[FailOn::Slo]);
        let mut report = samples::decided(samples::sweep());
        report
            .points
            .retain(|point| point.result.as_ref().is_none_or(|result| result.validity == Validity::Valid));
        assert!(report.points.iter().any(|point| point.not_run.is_some()), "the sweep ended");
        assert_eq!(slo(&report), [""; 0]);
        let mut invalid = report.clone();
        invalid.points[0].result.as_mut().unwrap().validity = Validity::Invalid;
        assert_eq!(slo(&invalid).len(), 1);
        for point in &mut report.points {
            (point.result, point.not_run) = (None, Some(Cause::other("the worker was lost")));
        }
        let found = slo(&report);
        assert!(found.len() == 1 && found[0].ends_with("or not known to be"), "{found:?}");
        assert!(FailOn::Slo.applies_to(&Opened::Serving(Box::new(report.clone()))));
        report.config.clear();
        assert_eq!(slo(&report), [""; 0], "none were asked for");
    }

    #[test]
    fn a_file_in_which_no_request_completed_is_invalid() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/foreign/");
        let of = |name: &str| {
            let opened =
                super::super::opened::open(std::path::Path::new(&format!("{folder}{name}"))).unwrap();
            failures(&opened, &[FailOn::Invalid], &UserOverrides::default())
        };
        assert_eq!(of("vllm-serve-all-failed.json"), ["run 1: no request of 8 completed"]);
        assert_eq!(of("vllm-serve-0.25.json"), [""; 0]);
    }

    #[test]
    fn a_prediction_fails_on_what_does_not_fit() {
        let report = samples::saved("predict-h100");
        let opened = Opened::Report(Box::new(report));
        let none = UserOverrides::default();
        assert_eq!(failures(&opened, &[FailOn::Invalid, FailOn::Slo], &none), [""; 0]);
        let Opened::Report(mut report) = opened else { unreachable!() };
        report.cells[0].flags.push(Cause::DoesNotFit {
            needed_bytes: hbmark_core::units::Bytes(2),
            device_bytes: hbmark_core::units::Bytes(1),
            usable_share: 0.9,
        });
        assert_eq!(failures(&Opened::Report(report), &[FailOn::DoesNotFit], &none).len(), 1);
    }
}
