//! Records of each kind of result, as a reader gets them.

use super::*;
use crate::analysis::capacity::{Prices, Question, capacity};
use crate::output::markdown;
use crate::samples::{self, decided, single, sweep};
use hbmark_core::result::Cause;

fn question() -> Question {
    Question {
        target_rate: 100.0,
        mean_rate: None,
        slo: None,
        headroom: 0.2,
        gpus_per_instance: 1,
        prices: Some(Prices {
            currency: "$".into(),
            gpu_hour: 2.5,
            input_per_million: None,
            output_per_million: None,
        }),
        context: None,
        concurrency: None,
    }
}

#[test]
fn a_sweep_is_recorded_with_what_held_what_failed_and_what_it_costs() {
    let mut sweep = decided(sweep());
    // What a build writes of itself changes with every commit.
    sweep.config.clear();
    let planned = capacity(&sweep, &question()).unwrap();
    insta::assert_snapshot!(markdown(&of_serving(&sweep, Some(&planned))));
}

#[test]
fn the_point_that_is_accepted_is_the_one_that_the_plan_counts_on() {
    use hbmark_core::result::serving::Offered;
    let mut sweep = decided(sweep());
    let any = sweep.points.iter().find(|point| point.result.is_some()).unwrap().clone();
    // A rate that could not tell is answered by a higher one that held.
    let rates = [(1.0, Some(true)), (2.0, None), (4.0, Some(true)), (8.0, Some(false))];
    let at = |(rate, passed): (f64, Option<bool>)| {
        let mut point = any.clone();
        (point.label, point.offered) = (format!("rate {rate}"), Offered::Rate(rate));
        let result = samples::keeps_up(&mut point, passed);
        result.offered_per_s = Some(rate);
        for clause in &mut result.slo {
            clause.met = Some(true);
        }
        point
    };
    sweep.points = rates.map(at).into();
    let planned = capacity(&sweep, &question()).unwrap();
    assert!((planned.rate_per_instance - 4.0).abs() < 1e-9, "{}", planned.rate_per_instance);
    let text = markdown(&of_serving(&sweep, Some(&planned)));
    assert!(text.contains("## Percentiles of rate 4\n"), "{text}");
}

#[test]
fn a_single_load_is_recorded_without_a_plan() {
    let mut single = decided(single());
    single.config.clear();
    let text = markdown(&of_serving(&single, None));
    for part in [
        "# Decision record: serving Llama-3.1-8B",
        "PREDICTED on a virtual clock",
        "## Percentiles of rate 4",
        "hbmark serve --virtual",
        "seeds: 7",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!text.contains("## Cost"));
}

#[test]
fn a_record_of_a_virtual_sweep_names_the_gpu_and_no_device_that_did_not_run() {
    let sweep = decided(sweep());
    assert_eq!(sweep.config["device"], "cpu", "what the flags of a virtual run leave at their default");
    let product = sweep.datasheet.as_ref().unwrap().product.clone();
    let text = markdown(&of_serving(&sweep, None));
    assert!(text.contains(&format!("GPU: {product}, by its data sheet")), "{text}");
    let configuration = text.lines().find(|line| line.contains("configuration:")).unwrap();
    for absent in ["device=cpu", "engine=native", "offered="] {
        assert!(!configuration.contains(absent), "{absent}: {configuration}");
    }
    assert!(configuration.contains("seed=7"), "{configuration}");
}

#[test]
fn a_run_is_recorded_with_its_cells_and_why_it_ended() {
    let mut run = samples::measured();
    run.cells.truncate(4);
    run.cells[1].status = Status::NotConverged;
    run.cells[1].reason = Some(Cause::other("±3.0 % after 40 blocks"));
    run.ladders.truncate(1);
    insta::assert_snapshot!(markdown(&of_run(&run)));
}

#[test]
fn a_comparison_is_recorded_with_what_was_decided() {
    let mut found: Comparison = crate::samples::saved("comparison");
    (found.a.given, found.b.given) = ("a.json".into(), "b.json".into());
    found.started_at = None;
    found.machine = "cpu".into();
    insta::assert_snapshot!(markdown(&of_comparison(&found)));
}

#[test]
fn what_strangers_wrote_stays_text() {
    let mut hostile = sweep();
    hostile.model.as_mut().unwrap().name = "# <img src=x> | `x`\n\n## fake".into();
    hostile.command = "hbmark\n~~~~~~\n# fake".into();
    let text = markdown(&of_serving(&hostile, None));
    assert!(
        !text.replace("\\<", "").contains('<') && !text.contains("\n# fake") && !text.contains("\n## fake"),
        "{text}"
    );
    assert_eq!(text.lines().filter(|l| l.starts_with("~~~")).count(), 2);
}

#[test]
fn results_of_other_programs_are_recorded_with_what_is_accepted_and_what_is_not() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/foreign/vllm-serve-0.25.json");
    let results = crate::analysis::import::read(std::path::Path::new(file)).unwrap();
    let place = |result| Imported::new(result, &crate::analysis::import::UserOverrides::default());
    let mut imported: Vec<Imported> = results.into_iter().map(place).collect();
    let text = markdown(&of_foreign(&imported));
    assert!(text.starts_with("# Decision record: ") && text.contains("- c2: nothing"), "{text}");
    assert!(
        text.contains("## Target") && text.contains("55.7 ms") && !text.contains("## Rejected"),
        "{text}"
    );
    imported[0].result.rows[0].problems.push(Cause::other("p99 is below the median"));
    let text = markdown(&of_foreign(&imported));
    assert!(text.contains("## Rejected\n\n- c2: p99 is below") && !text.contains("## Accepted"), "{text}");
}
