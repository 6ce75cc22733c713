//! One planted fault a rule, and its absence.

use super::*;
use crate::analysis::judge;
use crate::samples::{self, ends, says};
use hbmark_core::result::{BlockTelemetry, Cause, Quality, Spread, StepBytes};
use hbmark_core::units::Flops;

const MS: f64 = 1e6;

/// A decode of the hand-made report's model at batch 1: its real weights, timed at a share of the 10 GB/s ceiling.
fn decode(share: f64) -> CellResult {
    let report = samples::report();
    let architecture = &report.model.architecture;
    let ledger = Ledger::new(architecture, &architecture.inventory(Dtype::Bf16), Dtype::Bf16);
    let cost = ledger.decode(1, 128);
    let time = cost.bytes.ideal().as_f64() / 10e9 * 1e9 / share;
    with_blocks(
        CellResult {
            status: Status::Ok,
            bytes: cost.bytes,
            flops: cost.flops.0,
            ..CellResult::blank(Phase::Decode, "native", Dtype::Bf16, 1, 128)
        },
        time,
        time,
    )
}

/// Ten blocks of twenty steps, each a span within an interval.
fn with_blocks(mut cell: CellResult, span: f64, interval: f64) -> CellResult {
    cell.blocks = (0..10)
        .map(|visit| Block {
            visit,
            step_ns: vec![span; 20],
            interval_ns: vec![interval; 20],
            wall_ns: interval * 20.0,
            ..Block::default()
        })
        .collect();
    cell
}

fn judged(cells: Vec<CellResult>) -> Report {
    let mut report = Report { cells, ..samples::report() };
    judge::recompute(&mut report);
    report
}

fn found(report: &Report) -> Vec<String> {
    explain(report).into_iter().map(|finding| finding.rule).collect()
}

fn only(cell: CellResult) -> Finding {
    let report = judged(vec![cell]);
    let mut findings = explain(&report);
    assert_eq!(findings.len(), 1, "{findings:#?}");
    findings.remove(0)
}

#[test]
fn a_decode_near_its_bytes_is_memory_bound_and_says_the_share() {
    let finding = only(decode(0.9));
    assert_eq!((finding.rule.as_str(), finding.severity), ("memory_bound_decode", Severity::Ok));
    ends(&finding, "9.00 GB/s, 90 % of the measured read ceiling");
    assert_eq!(finding.cells, ["decode/native/bf16/b1/c128"]);
}

#[test]
fn half_a_ceiling_is_unexplained_and_not_given_a_word() {
    for share in [0.55, 0.3, 0.05] {
        let finding = only(decode(share));
        assert_eq!(finding.rule, "unexplained", "{share}");
        says(&finding, &format!("{:.0} % of it", share * 100.0));
    }
}

#[test]
fn an_unexplained_cell_names_the_nearest_limit_and_by_how_much_it_was_missed() {
    let finding = only(decode(0.59));
    ends(&finding, "the floor explains the step, from 60.0 %; here 59.0 %, missed by 1.0 points");
    // Waiting for a fifth of the interval is a name; 19 % is nearer to it than 30 % is to 60 %.
    let cell = decode(0.3);
    let time = cell.blocks[0].interval_ns[0];
    let finding = only(with_blocks(cell, time * 0.81, time));
    ends(&finding, "the device waits for the host, from 20.0 %; here 19.0 %, missed by 1.0 points");
}

#[test]
fn a_cell_that_was_not_timed_or_is_not_believed_is_not_explained() {
    let mut invalid = decode(0.9);
    invalid.status = Status::Invalid;
    assert!(found(&judged(vec![invalid])).is_empty());
    let predicted = CellResult { status: Status::Predicted, blocks: Vec::new(), ..decode(0.9) };
    assert!(found(&judged(vec![predicted])).is_empty());
}

#[test]
fn a_prefill_near_its_arithmetic_is_compute_bound() {
    let prefill = |milliseconds: f64| {
        let report = samples::report();
        let architecture = &report.model.architecture;
        let ledger = Ledger::new(architecture, &architecture.inventory(Dtype::Bf16), Dtype::Bf16);
        let cost = ledger.prefill(1, 512);
        let cell = CellResult {
            status: Status::Ok,
            bytes: cost.bytes,
            flops: 1e12,
            ..CellResult::blank(Phase::Prefill, "native", Dtype::Bf16, 1, 512)
        };
        with_blocks(cell, milliseconds * MS, milliseconds * MS)
    };
    // A tera-operation at one TFLOP/s.
    let finding = only(prefill(1250.0));
    assert_eq!(finding.rule, "compute_bound_prefill");
    says(&finding, "explains 80 % of 1.25 s");
    assert_eq!(only(prefill(5000.0)).rule, "unexplained");
}

#[test]
fn a_decode_past_the_crossover_is_compute_bound() {
    let mut cell = decode(0.9);
    let time = cell.bytes.ideal().as_f64() / 10e9 * 1e9 * 2.0;
    cell.flops = Flops(time / 1e9 * 1e12 * 0.9).0;
    assert_eq!(only(with_blocks(cell.clone(), time, time)).rule, "compute_bound_decode");
    // Half of the arithmetic explains nothing like the step, and its bytes do not either.
    cell.flops /= 2.0;
    assert_eq!(only(with_blocks(cell, time, time)).rule, "unexplained");
}

#[test]
fn outputs_and_weights_that_are_right_and_intervals_that_are_narrow_are_not_complained_of() {
    let mut cell = decode(0.9);
    cell.quality = Some(Quality {
        passed: true,
        check: "logits against f32 reference".to_owned(),
        max_relative_error: Some(0.01),
        token_hash: Some("0".to_owned()),
    });
    // Padding of a fiftieth is no other size, and the time follows the bytes.
    cell.bytes.weights = Bytes(cell.bytes.weights.0 * 51 / 50);
    assert_eq!(found(&judged(vec![cell])), ["memory_bound_decode"]);
}

#[test]
fn a_device_that_waits_is_host_bound() {
    let cell = decode(0.4);
    let time = cell.blocks[0].interval_ns[0];
    let finding = only(with_blocks(cell.clone(), time * 0.6, time));
    assert_eq!(finding.rule, "host_bound");
    says(&finding, "40 %; its floor explains 40 %");
    assert_eq!(
        only(with_blocks(cell, time * 0.9, time)).rule,
        "unexplained",
        "a tenth of waiting explains nothing"
    );
}

#[test]
fn a_step_that_does_not_grow_with_its_batch_is_launch_bound_where_it_does_not() {
    let small = decode(0.3);
    let time = small.blocks[0].interval_ns[0];
    let at = |batch, time| {
        // Half as many bytes more: a step that follows them cannot stay as it is.
        let mut bytes = small.bytes;
        bytes.kv_read = Bytes(bytes.kv_read.0 + bytes.weights.0 / 2);
        let cell = CellResult {
            bytes,
            flops: small.flops,
            status: Status::Ok,
            ..CellResult::blank(Phase::Decode, "native", Dtype::Bf16, batch, 128)
        };
        with_blocks(cell, time, time)
    };
    let findings = explain(&judged(vec![small.clone(), at(4, time * 1.05)]));
    let launch = findings.iter().find(|f| f.rule == "launch_bound").expect("a finding");
    assert_eq!(launch.cells, ["decode/native/bf16/b4/c128"]);
    assert_eq!(found(&judged(vec![small.clone(), at(4, time * 2.0)])), ["unexplained"]);
}

#[test]
fn bytes_an_engine_copies_are_blamed_on_the_engine() {
    let mut cell = decode(0.3);
    cell.bytes.as_implemented = Some(Bytes(cell.bytes.ideal().0 * 3));
    let finding = only(cell.clone());
    assert_eq!(finding.rule, "engine_moves_more");
    says(&finding, "explain 90 %");
    cell.bytes.as_implemented = Some(Bytes(cell.bytes.ideal().0 * 11 / 10));
    assert_eq!(only(cell).rule, "unexplained");
}

/// Plants a cause in some blocks of a good cell.
fn disturbed(blocks: usize, plant: impl Fn(&mut Block)) -> Vec<String> {
    let mut cell = decode(0.9);
    cell.blocks.iter_mut().take(blocks).for_each(plant);
    found(&judged(vec![cell]))
}

fn rejected(cause: Cause) -> impl Fn(&mut Block) {
    move |block| block.rejected = Some(cause.clone())
}

fn throttled(reason: &str) -> Cause {
    Cause::Throttled { reasons: vec![reason.to_owned()] }
}

#[test]
fn throttling_load_and_a_noisy_canary_are_told_apart() {
    let named = |rule: &str| vec![rule.to_owned(), "memory_bound_decode".to_owned()];
    assert_eq!(disturbed(3, rejected(throttled("hw_thermal"))), named("throttled"));
    assert_eq!(disturbed(1, rejected(throttled("hw_power_brake"))), named("throttled"));
    assert_eq!(disturbed(3, rejected(Cause::ForeignLoad { cores: 0.7 })), named("foreign_load"));
    assert_eq!(disturbed(3, rejected(Cause::CpuSteal { cores: 0.5 })), named("foreign_load"));
    let beside = |block: &mut Block| {
        block.telemetry = Some(BlockTelemetry { gpu_other_processes: Some(1), ..BlockTelemetry::default() });
    };
    assert_eq!(disturbed(10, beside), named("foreign_load"));
    assert_eq!(disturbed(4, rejected(Cause::Canary { ratio: 1.031 })), named("noisy_machine"));
    let slow = |block: &mut Block| {
        block.rejected = Some(Cause::Canary { ratio: 1.09 });
        block.canary_ratio = Some(1.09);
    };
    assert_eq!(disturbed(4, slow), named("degraded"));
    for once in [Cause::Canary { ratio: 1.031 }, Cause::ForeignLoad { cores: 0.7 }] {
        assert_eq!(disturbed(1, rejected(once)), ["memory_bound_decode"], "once in ten is chance");
    }
}

#[test]
fn what_blocks_of_a_noisy_cell_count_in_spite_of_is_named() {
    let healthy = decode(0.9);
    let span = healthy.blocks[0].step_ns[0];
    let mut cell = with_blocks(healthy, span, span * 1.5);
    cell.status = Status::Noisy;
    cell.blocks.iter_mut().for_each(|block| block.conditions.push(Cause::ForeignLoad { cores: 0.7 }));
    assert_eq!(found(&judged(vec![cell])), ["foreign_load", "host_bound"]);
}

#[test]
fn a_power_cap_that_holds_is_named_with_its_watts() {
    let capped = |block: &mut Block| {
        block.conditions = vec![Cause::PowerCapped];
        block.telemetry = Some(BlockTelemetry {
            power_watts: Some(350.0),
            sm_clock_mhz: Some(1410.0),
            ..BlockTelemetry::default()
        });
    };
    let mut cell = decode(0.9);
    cell.blocks.iter_mut().for_each(capped);
    let findings = explain(&judged(vec![cell]));
    let cap = findings.iter().find(|f| f.rule == "power_capped").expect("a finding");
    ends(cap, "10 of 10 blocks at the limit at 350 W, 1410 MHz");
    assert_eq!(disturbed(2, capped), ["memory_bound_decode"]);
}

#[test]
fn steps_that_vary_are_noise_and_a_ceiling_that_varied_is_said_beside_them() {
    let mut cell = decode(0.9);
    let time = cell.blocks[0].step_ns[0];
    for block in &mut cell.blocks {
        block.step_ns = (0..20).map(|step| if step % 2 == 0 { time * 0.7 } else { time * 1.3 }).collect();
    }
    let mut report = judged(vec![cell]);
    assert!(found(&report).contains(&"noisy_machine".to_owned()));
    report.ceilings.as_mut().unwrap().read_bytes_per_s = Spread { median: 10e9, low: 8e9, high: 11e9 };
    let noisy = explain(&report).into_iter().find(|f| f.rule == "noisy_machine").unwrap();
    ends(&noisy, "the read ceiling itself lay between 8.00 GB/s and 11.0 GB/s");
}

#[test]
fn a_small_working_set_is_a_cache_artefact_and_nothing_else() {
    let cell = CellResult {
        status: Status::Ok,
        bytes: StepBytes { weights: Bytes(40_000_000), ..StepBytes::default() },
        flops: 1e6,
        dtype: Dtype::Gguf,
        ..CellResult::blank(Phase::Decode, "native", Dtype::Gguf, 1, 128)
    };
    let finding = only(with_blocks(cell, 4.2 * MS, 4.2 * MS));
    assert_eq!(finding.rule, "cache_artefact");
    says(&finding, "40.0 MB beside a last cache of 32.0 MB");
}

#[test]
fn weights_of_another_size_are_a_problem_before_all_else() {
    let mut cell = decode(0.9);
    cell.bytes.weights = Bytes(cell.bytes.weights.0 / 2);
    let findings = explain(&judged(vec![cell]));
    assert_eq!((findings[0].rule.as_str(), findings[0].severity), ("wrong_size_weights", Severity::Problem));
    ends(&findings[0], "0.50 times");
}

#[test]
fn wrong_outputs_and_wide_intervals_are_said_with_their_reasons() {
    let mut cell = decode(0.9);
    cell.status = Status::NotConverged;
    cell.reason =
        Some(Cause::IntervalTooWide { half_width: 0.031, wanted: 0.01, blocks: 40, sampled_s: 12.0 });
    cell.quality = Some(Quality {
        passed: false,
        check: "logits against f32 reference".to_owned(),
        max_relative_error: Some(0.2),
        token_hash: None,
    });
    let findings = explain(&judged(vec![cell]));
    let rules: Vec<&str> = findings.iter().map(|f| f.rule.as_str()).collect();
    assert_eq!(rules, ["wrong_outputs", "not_converged", "memory_bound_decode"], "the worst first");
    assert!(findings[0].evidence[0].contains("2.0e-1") && findings[1].evidence[0].contains("±3.1 %"));
}

#[test]
fn findings_print_for_a_person() {
    let mut slow = decode(0.3);
    slow.id = "decode/native/bf16/b1/c256".to_owned();
    slow.context = 256;
    let mut hot = decode(0.9);
    hot.blocks.iter_mut().take(3).for_each(rejected(throttled("hw_thermal")));
    let findings = explain(&judged(vec![hot, slow]));
    let printed = |format| crate::output::render(&*findings, format, false).unwrap();
    insta::assert_snapshot!(printed(crate::output::Format::Table));
    assert!(printed(crate::output::Format::Md).contains("**throttled"));
    assert!(printed(crate::output::Format::Csv).starts_with("rule,severity"));
}

#[test]
fn every_rule_has_a_name_of_its_own_and_something_to_do() {
    for (index, rule) in RULES.iter().enumerate() {
        assert!(RULES[..index].iter().all(|other| other.name != rule.name), "{}", rule.name);
        assert!(!rule.next.is_empty() && !rule.response.is_empty() && !rule.symptom.is_empty());
    }
}
