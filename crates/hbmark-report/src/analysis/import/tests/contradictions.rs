//! Flags against files in rows without a decode step, and the marks of our own points.

use super::*;
use crate::samples;
use hbmark_core::result::serving::{ServeKind, Validity};

#[test]
fn a_row_without_a_decode_step_is_held_against_the_flags_too() {
    let architecture = test_shapes::llama_3_1_8b();
    let given = UserOverrides {
        model_name: Some("Llama-3.1-70B"),
        gpus: Some(4),
        kv_dtype: Some(Dtype::Bf16),
        ..on(&architecture, "h100-sxm", Some(Dtype::Bf16))
    };
    // Not streamed, so that nothing is rated; stored as FP8 with an FP8 cache on one GPU.
    let row = one("trtllm-bench-fp8.json").rows.remove(0);
    assert_eq!(row.center(Metric::Tpot), None);
    assert_eq!(fields(&row, &given), ["model (size)", "number of GPUs", "dtype", "KV dtype"]);
    let speculative = one("vllm-serve-speculative.json").rows.remove(0);
    assert_eq!(fields(&speculative, &given)[0], "model (family)");
    // The rows of a llama-bench file are of one run: a prompt's row says no less than a token's.
    let bench = one("llama-bench-q8_0.json");
    let said: Vec<_> = bench.rows.iter().map(|row| fields(row, &given)).collect();
    assert!(said.len() == 2 && said[0] == said[1] && !said[0].is_empty(), "{said:?}");
}

#[test]
fn what_was_compared_is_kept_and_nothing_compared_is_nothing_found() {
    let architecture = test_shapes::llama_3_1_8b();
    let given = UserOverrides { batch: Some(1), ..on(&architecture, "h100-sxm", Some(Dtype::Bf16)) };
    let compared =
        |given: &UserOverrides<'_>| Imported::new(one("vllm-serve-2025-03-detailed.json"), given).compared;
    // The file names a model and a limit, and neither GPU nor storage.
    assert_eq!(compared(&given), ["--model", "--batch"]);
    assert_eq!(compared(&UserOverrides::default()), [""; 0]);
}

#[test]
fn every_contradiction_says_which_flag_to_change() {
    let architecture = test_shapes::llama_3_1_8b();
    let given = UserOverrides {
        model_name: Some("Llama-3.1-70B"),
        gpus: Some(4),
        batch: Some(4000),
        kv_dtype: Some(Dtype::Bf16),
        ..on(&architecture, "h100-sxm", Some(Dtype::Bf16))
    };
    let mut row = one("trtllm-bench-fp8.json").rows.remove(0);
    row.setup.gpu = Some("NVIDIA A100-SXM4-80GB".to_owned());
    row.setup.max_concurrency = Some(128);
    let RooflinePlacement::Contradicts(causes) = place(&row, ForeignFormat::TrtllmBench, &given) else {
        panic!("not held against the flags")
    };
    let flags: Vec<String> = causes.iter().map(|cause| remedy(cause).unwrap()).collect();
    let wanted = ["--model", "--gpus", "--gpu", "--dtype", "--batch", "--kv-dtype"];
    assert_eq!(flags.len(), wanted.len(), "{flags:?}");
    for (flag, wanted) in flags.iter().zip(wanted) {
        assert_eq!(*flag, format!("change {wanted} to what ran, or leave it out"));
    }
    assert_eq!(remedy(&Cause::other("anything else")), None);
}

#[test]
fn our_own_points_keep_their_verdict() {
    let mut report = samples::sweep();
    report.kind = ServeKind::Serve;
    let mut verdicts = [Validity::Valid, Validity::Saturated, Validity::Invalid].into_iter();
    for point in &mut report.points {
        if let Some(result) = &mut point.result {
            result.validity = verdicts.next().unwrap_or(Validity::Valid);
        }
    }
    let architecture = test_shapes::llama_3_1_8b();
    let given = on(&architecture, "h100-sxm", None);
    let imported = Imported::new(of_serving(&report, "serve.json"), &given);
    let places: Vec<_> = imported.places.iter().take(3).collect();
    let RooflinePlacement::Placed(valid) = places[0] else { panic!("{places:?}") };
    assert_eq!(valid.cell.status, hbmark_core::result::Status::Ok);
    let assumed = valid.assumptions.join("; ");
    assert!(!assumed.contains("by the model's name"), "the result says its own storage: {assumed}");
    assert!(
        matches!(places[1], RooflinePlacement::NoDecode(why) if why.starts_with("saturated")),
        "{:?}",
        places[1]
    );
    let objections: Vec<&str> = imported.objections().map(|(row, _)| row.label.as_str()).collect();
    assert_eq!(objections, [imported.result.rows[2].label.as_str()], "a saturated point is not a fault");
    let table = crate::output::render(&[imported][..], crate::output::Format::Table, false).unwrap();
    let line = |label: &str| table.lines().find(|line| line.starts_with(label)).unwrap().to_owned();
    let label = |at: usize| report.points[at].label.as_str();
    assert!(line(label(1)).contains("SATURATED") && line(label(2)).contains("INVALID"), "{table}");
    assert!(!line(label(0)).contains("SATURATED"), "{table}");
}

#[test]
fn computed_times_are_not_rated_as_measured_ones() {
    let report = samples::sweep();
    assert_eq!(report.kind, ServeKind::ServeVirtual);
    let architecture = test_shapes::llama_3_1_8b();
    let imported = Imported::new(of_serving(&report, "serve.json"), &on(&architecture, "h100-sxm", None));
    assert!(!imported.result.rows.is_empty());
    for row in &imported.result.rows {
        assert!(
            row.problems.iter().any(|why| why.to_string().contains("virtual clock")),
            "{:?}",
            row.problems
        );
    }
    assert_eq!(imported.objections().count(), imported.result.rows.len());
}
