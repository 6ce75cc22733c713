//! Small tables under the cells: the ladder of a place on the grid, the operations of a step.
//!
//! Enters: a [`Report`] or a [`Ladder`]. Leaves: tables.

use super::run::status_word;
use crate::output::Kind;
use crate::output::document::{Block, Cells, Column, Document, Table, measured, numbers, words};
use crate::output::metrics::Unit;
use hbmark_core::result::{CellResult, Ladder, OperationRow, Phase, Report, Rung, Status, TimeScale};
use hbmark_core::units::{Bytes, Nanos, whole_count};

/// Characters of a bar that spans the slowest time.
const BAR: usize = 30;

impl Kind for Ladder {
    fn document(&self) -> Document {
        let mut table = of_ladder(self);
        let title = table.title.take().unwrap_or_default();
        let mut sheet = table.columns.clone();
        sheet.retain(|column| !column.is_drawing());
        // Raw times in the place of those in the ladder's scale, which are the third column and the fourth.
        let times: [fn(&Rung) -> f64; 2] = [|rung| rung.time_ns, |rung| rung.step_ns];
        for (column, of) in sheet[2..4].iter_mut().zip(times) {
            column.cells = measured("", Unit::Nanoseconds, self.rungs.iter().map(of)).cells;
        }
        Document { blocks: vec![Block::Table(table)], sheet: Some(sheet), ..Document::new(title) }
    }

    fn json(&self) -> serde_json::Result<String> {
        serde_json::to_string_pretty(self)
    }
}

/// The ladders of a report that compares engines; with one engine the cells' own columns have the same numbers.
pub fn ladders(report: &Report) -> Vec<Table> {
    let compares = report.cells.iter().any(|cell| cell.engine != report.cells[0].engine);
    report.ladders.iter().filter(|_| compares).map(of_ladder).collect()
}

/// The steps that were broken down per operation.
pub fn operations(report: &Report) -> Vec<Table> {
    report.cells.iter().filter(|cell| !cell.operations.is_empty()).map(of_operations).collect()
}

pub fn of_ladder(ladder: &Ladder) -> Table {
    let (scale, rungs) = (ladder.scale(), &ladder.rungs);
    let time = match ladder.phase {
        Phase::Prefill | Phase::Verify { .. } => "step",
        Phase::Decode => "TPOT",
    };
    let name = |index: usize| {
        let name = ladder.name(index);
        match rungs[index].status {
            Status::Ok | Status::Predicted => name,
            status => format!("{name} ({})", status_word(status)),
        }
    };
    let columns = vec![
        words("rung", (0..rungs.len()).map(name)),
        words("dtype", rungs.iter().map(|r| r.dtype.to_string())),
        numbers(time, rungs.iter().map(|r| scale.show(r.time_ns))),
        numbers("incremental", rungs.iter().map(|r| scale.show(r.step_ns))),
        measured("share", Unit::Fraction, rungs.iter().map(|r| r.share)),
        measured("bytes", Unit::Bytes, rungs.iter().map(|r| r.bytes.map(Bytes::as_f64))),
        Column { title: String::new(), cells: Cells::Bars(bars(ladder)), minor: false, key: false },
    ];
    let title = format!("{}, batch {}, context {}", ladder.phase, ladder.batch, ladder.context);
    Table { title: Some(title), columns, closing: Some(ladder.story.clone()), ..Table::default() }
}

/// What each rung adds, drawn where the rungs above it end; what takes away is drawn lighter.
fn bars(ladder: &Ladder) -> Vec<String> {
    let place = |share: f64| whole_count((share * BAR as f64).round()).min(2 * BAR);
    let mut level = 0.0;
    ladder
        .rungs
        .iter()
        .map(|rung| {
            let (from, to) = (place(level), place(level + rung.share));
            level += rung.share;
            let (start, mark) = if to < from { (to, "░") } else { (from, "█") };
            " ".repeat(start) + &mark.repeat(from.abs_diff(to))
        })
        .collect()
}

fn of_operations(cell: &CellResult) -> Table {
    let rows = &cell.operations;
    let sum: f64 = rows.iter().map(|row| row.time_ns).sum();
    let longest = rows.iter().map(|row| row.time_ns).fold(0.0, f64::max);
    let scale = TimeScale::for_longest(longest);
    // Sizes span from an embedding row to the largest matrix, so each has its own unit; rates are to be compared.
    let rate = |row: &OperationRow| {
        if row.time_ns > 0.0 { format!("{:.1}", row.bytes.as_f64() / row.time_ns) } else { "-".to_owned() }
    };
    let columns = vec![
        words("operation", rows.iter().map(|row| row.operation.clone())),
        numbers("calls", rows.iter().map(|row| row.calls.to_string())),
        numbers("time", rows.iter().map(|row| scale.show(row.time_ns))),
        measured("share", Unit::Fraction, rows.iter().map(|row| (sum > 0.0).then(|| row.time_ns / sum))),
        numbers("bytes", rows.iter().map(|row| row.bytes.to_string())),
        numbers("GB/s", rows.iter().map(rate)),
        measured("% ceiling", Unit::Fraction, rows.iter().map(|row| row.fraction_of_ceiling)),
    ];
    let title = Some(format!("{}, operations of a step", cell.id));
    Table { title, columns, closing: Some(against_the_step(cell, sum)), ..Table::default() }
}

/// The operations together beside the step that was timed whole.
fn against_the_step(cell: &CellResult, sum: f64) -> String {
    let timed = match cell.phase {
        Phase::Prefill => cell.step_ns.as_ref().map(|step| step.median),
        Phase::Decode | Phase::Verify { .. } => cell.tpot_ns,
    };
    let Some(timed) = timed else { return format!("together {}; no whole step was timed", Nanos(sum)) };
    let apart = sum / timed - 1.0;
    format!(
        "together {}, in steps timed operation by operation; a whole step takes {} ({:+.1} %)",
        Nanos(sum),
        Nanos(timed),
        // A difference that rounds to nothing has no sign of its own.
        if apart.abs() < 5e-4 { 0.0 } else { apart * 100.0 }
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::judge;
    use crate::output::{Format, render};
    use crate::samples;
    use hbmark_core::model::Dtype;
    use hbmark_core::result::{Cause, StepBytes, TimeSummary};

    fn cell(phase: Phase, engine: &str, dtype: Dtype, milliseconds: f64) -> CellResult {
        let size = if dtype == Dtype::F32 { 2 } else { 1 };
        let bytes = StepBytes {
            weights: Bytes(size * 500_000_000),
            kv_read: Bytes(size * 13_000_000),
            as_implemented: (engine == "stock" && phase == Phase::Decode).then_some(Bytes(1_090_000_000)),
            ..StepBytes::default()
        };
        let time = milliseconds * 1e6;
        CellResult {
            status: Status::Ok,
            step_ns: Some(TimeSummary { median: time, ..TimeSummary::default() }),
            tpot_ns: (phase == Phase::Decode).then_some(time),
            bytes,
            flops: if phase == Phase::Prefill { 8e10 } else { 1e9 },
            ..CellResult::blank(phase, engine, dtype, 1, 128)
        }
    }

    fn row(operation: &str, calls: usize, microseconds: f64, bytes: u64) -> OperationRow {
        OperationRow {
            operation: operation.into(),
            calls,
            time_ns: microseconds * 1e3,
            bytes: Bytes(bytes),
            fraction_of_ceiling: None,
        }
    }

    fn report() -> Report {
        let decode = CellResult {
            operations: vec![
                row("embed", 1, 12.0, 4_096),
                row("norm_qkv", 16, 9_100.0, 88_000_000),
                row("attention", 16, 1_500.0, 13_000_000),
                row("output", 16, 5_300.0, 50_000_000),
                row("gate_up", 16, 20_300.0, 200_000_000),
                row("down", 16, 10_400.0, 100_000_000),
                row("head", 1, 7_300.0, 62_000_000),
            ],
            ..cell(Phase::Decode, "native", Dtype::Bf16, 52.8)
        };
        let lost = CellResult {
            status: Status::Invalid,
            reason: Some(Cause::WrongOutputs {
                check: "logits against f32 reference".into(),
                max_relative_error: Some(0.2),
            }),
            ..cell(Phase::Prefill, "native", Dtype::Bf16, 1.0)
        };
        let noisy = CellResult {
            status: Status::NotConverged,
            reason: Some(Cause::IntervalTooWide {
                half_width: 0.031,
                wanted: 0.01,
                blocks: 40,
                sampled_s: 12.0,
            }),
            ..cell(Phase::Decode, "stock", Dtype::F32, 163.0)
        };
        let cells = vec![cell(Phase::Prefill, "stock", Dtype::F32, 310.0), noisy, lost, decode];
        let mut report = Report { cells, ..samples::report() };
        judge::recompute(&mut report);
        report
    }

    #[test]
    fn engines_side_by_side_print_their_ladders_and_a_profiled_step_its_operations() {
        insta::assert_snapshot!(render(&report(), Format::Table, false).unwrap());
    }

    #[test]
    fn markdown_has_the_same_ladders_and_operations() {
        insta::assert_snapshot!(render(&report(), Format::Md, false).unwrap());
    }

    #[test]
    fn a_ladder_of_its_own_has_raw_numbers_in_a_spreadsheet() {
        let mut ladder = report().ladders.remove(1);
        let rung = ladder.rungs.last_mut().unwrap();
        (rung.time_ns, rung.step_ns, rung.bytes) = (51.6e6, -1.2e6, None);
        let csv = render(&ladder, Format::Csv, false).unwrap();
        assert!(csv.starts_with("rung,dtype,TPOT_ns,incremental_ns,share,bytes_bytes\n"), "{csv}");
        let last = csv.lines().last().unwrap();
        assert!(last.contains(",51600000,-1200000,") && last.ends_with(','), "{last}");
    }

    #[test]
    fn one_engine_alone_prints_no_ladder_and_keeps_it_in_the_data() {
        let mut report = report();
        report.cells.retain(|cell| cell.engine == "stock");
        judge::recompute(&mut report);
        assert_eq!(report.ladders.len(), 2);
        assert!(ladders(&report).is_empty());
    }

    #[test]
    fn an_operation_is_held_against_the_read_ceiling() {
        let report = report();
        // 200 MB in 20.3 ms are 9.85 GB/s of 10.
        let gate_up = &report.cells[3].operations[4];
        assert!((gate_up.fraction_of_ceiling.unwrap() - 0.985_22).abs() < 1e-4);
        let mut blind = Report { ceilings: None, ..report };
        judge::recompute(&mut blind);
        assert_eq!(blind.cells[3].operations[4].fraction_of_ceiling, None);
    }

    #[test]
    fn a_result_saved_before_there_were_ladders_reads_and_gains_them() {
        let report = report();
        let mut saved = serde_json::to_value(&report).unwrap();
        saved.as_object_mut().unwrap().remove("ladders");
        for cell in saved["cells"].as_array_mut().unwrap() {
            cell.as_object_mut().unwrap().remove("operations");
        }
        let mut old = hbmark_core::result::saved::parse(&saved.to_string()).unwrap();
        assert!(old.ladders.is_empty());
        judge::recompute(&mut old);
        assert_eq!(old.ladders, report.ladders);
    }

    #[test]
    fn bars_follow_each_other_and_end_where_the_last_rung_does() {
        let bars = bars(&report().ladders[1]);
        let last = bars.last().unwrap();
        assert_eq!(last.chars().count(), BAR);
        let drawn: usize = bars.iter().map(|bar| bar.chars().filter(|c| *c == '█').count()).sum();
        assert_eq!(drawn, BAR);
    }
}
