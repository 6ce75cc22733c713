//! What is printed of verify steps.

use super::*;
use crate::analysis::speculation::{Drafting, speculation};
use crate::output::{Format, render};
use crate::samples;

#[test]
fn verify_steps_are_printed_with_their_break_even_and_the_speed_up_over_acceptance() {
    let report = samples::verified();
    let acceptance = Some(Acceptance::Rate(0.8));
    let found = speculation(&report, Drafting::Time(2e6), acceptance);
    insta::assert_snapshot!(render(&found, Format::Table, false).unwrap());
    insta::assert_snapshot!("csv", render(&found, Format::Csv, false).unwrap());
}

#[test]
fn a_run_shows_them_below_its_cells_and_their_own_columns_have_no_rate_of_tokens() {
    insta::assert_snapshot!(render(&samples::verified(), Format::Table, false).unwrap());
}

#[test]
fn the_page_has_a_line_for_each_number_of_draft_tokens() {
    let found = speculation(&samples::verified(), Drafting::Free, None);
    let Block::Plot(plot) = plot(&found.rows, &[]) else { panic!("no plot") };
    assert_eq!(plot.drawings.len(), 2);
    let Drawing::Chart(chart) = &plot.drawings[0] else { panic!("no chart") };
    let legend: Vec<&str> = chart.legend.iter().map(|key| key.text.as_str()).collect();
    assert_eq!(legend, ["plain decode", "1 draft token", "3 draft tokens", "7 draft tokens"]);
    let page = render(&samples::verified(), Format::Html, false).unwrap();
    assert!(page.contains("Speculative decoding"));
    assert!(!render(&samples::measured(), Format::Html, false).unwrap().contains("Speculative decoding"));
}
