//! The arithmetic of acceptance by hand and by its properties, and the interval of a ratio on planted times.

use proptest::prelude::*;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, Normal};

use super::*;
use crate::samples;
use hbmark_core::stats;

fn near(found: f64, wanted: f64) -> bool {
    (found - wanted).abs() < 1e-9
}

#[test]
fn tokens_of_a_step_are_the_accepted_ones_and_one_more() {
    // 1 + 0.5 + 0.25 + 0.125.
    assert!(near(tokens_at(0.5, 3), 1.875));
    assert!(near(tokens_at(0.0, 7), 1.0));
    assert!(near(tokens_at(1.0, 7), 8.0));
    let per_position = Acceptance::RatePerPosition(vec![0.9, 0.6, 0.3]);
    assert_eq!([1, 3, 4].map(|k| per_position.tokens_per_step(k)), [Some(1.9), Some(2.8), None]);
    let length = Acceptance::Length(2.5);
    assert_eq!([1, 2, 7].map(|k| length.tokens_per_step(k)), [None, Some(2.5), Some(2.5)]);
}

#[test]
fn what_cannot_be_accepted_is_named() {
    let problem = |acceptance: Acceptance| acceptance.checked().unwrap_err().to_string();
    assert_eq!(problem(Acceptance::Rate(1.2)), "an acceptance rate of 1.2 is not between 0 and 1");
    assert!(problem(Acceptance::Rate(f64::NAN)).contains("NaN"));
    assert!(problem(Acceptance::RatePerPosition(vec![0.5, 0.6])).contains("rises from 0.5 to 0.6"));
    assert!(problem(Acceptance::Length(0.5)).contains("below 1"));
    assert!(problem(Acceptance::Length(f64::INFINITY)).contains("inf"));
    assert!(Acceptance::RatePerPosition(vec![0.9, 0.9, 0.0]).checked().is_ok());
}

/// Decode of 10 ms and a verify step of three draft tokens of 15 ms, drafted at 1 ms each.
fn planted() -> Report {
    let mut report = samples::verified();
    report
        .cells
        .retain(|cell| cell.batch == 1 && cell.phase.new_tokens(0) != 2 && cell.phase.new_tokens(0) != 8);
    for cell in &mut report.cells {
        let time = if cell.phase == Phase::Decode { 10e6 } else { 15e6 };
        cell.tpot_ns = Some(time);
        (cell.tpot_ci_low_ns, cell.tpot_ci_high_ns) = (Some(time / 1.03), Some(time * 1.03));
    }
    report
}

#[test]
fn a_step_pays_from_its_break_even_on() {
    let acceptance = Some(Acceptance::Rate(0.7));
    let found = speculation(&planted(), Drafting::Time(1e6), acceptance);
    let [row] = found.rows.as_slice() else { panic!("one verify step, not {}", found.rows.len()) };
    assert!(near(row.ratio, 1.5));
    // Both are known to 3 %: √2 · ln 1.03.
    let width = (2.0_f64.sqrt() * 1.03_f64.ln()).exp();
    assert!(near(row.ratio_high.unwrap(), 1.5 * width) && near(row.ratio_low.unwrap(), 1.5 / width));
    // (15 + 3 · 1) / 10.
    assert!(near(row.break_even_length.unwrap(), 1.8));
    let rate = row.break_even_rate.unwrap();
    assert!(near(tokens_at(rate, 3), 1.8) && near(row.speedup_at(rate).unwrap(), 1.0));
    assert!(near(row.speedup_at(1.0).unwrap(), 4.0 / 1.8) && near(row.speedup_at(0.0).unwrap(), 1.0 / 1.8));
    // 1 + 0.7 + 0.49 + 0.343 tokens in 18 ms.
    let assumed = row.assumed.unwrap();
    assert!(near(assumed.tokens_per_step, 2.533) && near(assumed.tpot_ns, 18e6 / 2.533));
    // No acceptance pays for drafts of 10 ms.
    let slow = speculation(&planted(), Drafting::Time(10e6), None);
    assert_eq!((slow.rows[0].break_even_length, slow.rows[0].break_even_rate), (Some(4.5), None));
}

#[test]
fn a_draft_model_is_timed_at_the_same_batch_and_context() {
    let target = samples::verified();
    let mut draft = samples::verified();
    draft.model.name = "Llama-3.2-1B-draft".into();
    draft.cells.retain(|cell| cell.batch == 4);
    let found = speculation(&target, Drafting::Model(&draft), None);
    assert_eq!(found.draft_model.as_deref(), Some("Llama-3.2-1B-draft"));
    let of_draft = draft.cells.iter().find(|cell| cell.phase == Phase::Decode).unwrap().tpot_ns;
    for row in &found.rows {
        assert_eq!(row.draft_ns, if row.batch == 4 { of_draft } else { None });
        assert_eq!(row.draft_series.is_some(), row.batch == 4);
        assert_eq!(row.curve.len(), if row.batch == 4 { CURVE.len() } else { 0 });
    }
}

#[test]
fn of_several_drafts_that_of_the_same_engine_and_storage_counts_and_its_doubt_is_the_rows() {
    let target = samples::verified();
    let mut draft = samples::verified();
    draft.cells.retain(|cell| cell.phase == Phase::Decode);
    let mut faster = draft.cells[0].clone();
    (faster.engine, faster.tpot_ns) = ("stock".into(), faster.tpot_ns.map(|time| time / 2.0));
    draft.cells.insert(0, faster);
    draft.cells[1].status = Status::Noisy;
    let found = speculation(&target, Drafting::Model(&draft), None);
    let row = found.rows.iter().find(|row| row.batch == 1).unwrap();
    assert_eq!((row.draft_series.as_deref(), row.status), (Some("native bf16"), Status::Noisy));
    assert!(!found.predicted);
    draft.kind = ReportKind::Predict;
    assert!(speculation(&target, Drafting::Model(&draft), None).predicted);
    assert_eq!(other_device(&target, &draft), None);
    draft.environment.cpu.model = Some("another".into());
    assert_eq!(other_device(&target, &draft), Some(("unknown product".into(), "another".into())));
}

#[test]
fn times_that_mean_nothing_and_steps_without_a_decode_have_no_row() {
    let rows = |change: fn(&mut Report)| {
        let mut report = samples::verified();
        change(&mut report);
        speculation(&report, Drafting::Free, None).rows.len()
    };
    assert_eq!(rows(|_| ()), 6);
    assert_eq!(rows(|report| report.cells.retain(|cell| cell.phase != Phase::Decode)), 0);
    for status in [Status::Smoke, Status::Invalid, Status::Simulated, Status::Failed] {
        let mut report = samples::verified();
        report.cells.iter_mut().for_each(|cell| cell.status = status);
        assert_eq!(speculation(&report, Drafting::Free, None).rows, [], "{status:?}");
    }
}

proptest! {
    #[test]
    fn the_rate_of_a_length_gives_that_length(rate in 0.0_f64..=1.0, draft_tokens in 1_usize..=64) {
        let found = rate_at(tokens_at(rate, draft_tokens), draft_tokens).unwrap();
        prop_assert!((tokens_at(found, draft_tokens) - tokens_at(rate, draft_tokens)).abs() < 1e-9);
    }

    #[test]
    fn more_acceptance_is_never_slower(slow in 0.5_f64..20.0, draft_tokens in 1_usize..=64) {
        let mut last = 0.0;
        for rate in CURVE {
            let speedup = tokens_at(rate, draft_tokens) / slow;
            prop_assert!(speedup >= last);
            last = speedup;
        }
    }
}

/// Ten blocks of each, noise of 2 %: the interval holds the ratio that was planted in 95 of 100 runs, or a little more.
#[test]
fn the_interval_of_the_ratio_holds_what_was_planted() {
    let (noise, seeds) = (Normal::new(0.0, 0.02).unwrap(), 2000);
    let mut held = 0;
    for seed in 0..seeds {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let mut report = planted();
        for cell in &mut report.cells {
            let time = if cell.phase == Phase::Decode { 10e6 } else { 15e6 };
            let blocks: Vec<f64> = (0..10).map(|_| time * f64::exp(noise.sample(&mut random))).collect();
            let interval = stats::t_interval_log(&blocks, stats::CONFIDENCE).unwrap();
            cell.tpot_ns = Some(stats::geometric_mean(&blocks));
            (cell.tpot_ci_low_ns, cell.tpot_ci_high_ns) = (Some(interval.low), Some(interval.high));
        }
        let found = speculation(&report, Drafting::Free, None);
        let row = &found.rows[0];
        held += u32::from(row.ratio_low.unwrap() <= 1.5 && 1.5 <= row.ratio_high.unwrap());
    }
    let share = f64::from(held) / seeds as f64;
    assert!((0.945..0.985).contains(&share), "{share}");
}
