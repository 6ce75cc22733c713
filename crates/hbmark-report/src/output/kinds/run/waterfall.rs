//! The ladder of a cell as a waterfall: where the time of a step goes, floor by floor and engine by engine.

use super::palette::Palette;
use super::status_word;
use crate::output::document::{Block, Table};
use crate::output::kinds::breakdown::of_ladder;
use crate::output::plot::axis::{Axis, Measure};
use crate::output::plot::{Bar, Bars, Drawing, Plot};
use hbmark_core::result::{Ladder, Phase, Report, RungKind, Status};

/// Ladders that are not folded away.
const OPEN: usize = 4;

pub fn plot(report: &Report, palette: &Palette) -> Block {
    let mut ladders: Vec<&Ladder> = report.ladders.iter().collect();
    // Decode first: it is what the ladder is mostly read for.
    ladders.sort_by_key(|ladder| ladder.phase == Phase::Prefill);
    let drawings: Vec<Drawing> = ladders.iter().filter_map(|ladder| bars(ladder, palette)).collect();
    if drawings.is_empty() {
        let timed = report.cells.iter().any(|cell| cell.shown_time().is_some());
        return Block::absent(if timed {
            "No cell has a block that counts, so there is no ladder. Times in brackets are medians over all blocks, rejected ones included."
        } else {
            "No cell of this result was measured, so there is no ladder."
        });
    }
    let caption = "Each bar begins where the one above it ends; together they are the time of the slowest engine. Grey is what memory and \
                   arithmetic take at their ceilings, colour what an engine adds.";
    let tables = ladders.iter().map(|ladder| Table { closing: None, ..of_ladder(ladder) });
    Block::Plot(Plot { open: OPEN, ..Plot::new(drawings, vec![caption.into()], tables.collect()) })
}

fn bars(ladder: &Ladder, palette: &Palette) -> Option<Drawing> {
    let (phase, scale) = (ladder.phase, ladder.scale());
    let mut level = 0.0;
    let bar = |(index, rung): (usize, &hbmark_core::result::Rung)| {
        let from = level;
        level += rung.step_ns;
        let name = rung_name(ladder, index);
        let hover = format!(
            "{name}\nup to here {}\nadds {} ({:.1} %)",
            scale.show(rung.time_ns),
            scale.show(rung.step_ns),
            rung.share * 100.0
        );
        let style = match (&rung.engine, rung.kind) {
            (Some(engine), _) => palette.style(engine, rung.dtype),
            (None, RungKind::Datasheet) => "sheet".to_owned(),
            (None, _) => "floor".to_owned(),
        };
        Bar { name, style, from, to: level, value: scale.show(rung.step_ns), hover }
    };
    let bars: Vec<Bar> = ladder.rungs.iter().enumerate().map(bar).collect();
    let time = match ladder.phase {
        Phase::Decode => "time (TPOT)",
        Phase::Prefill | Phase::Verify { .. } => "time (step)",
    };
    let axis = Axis::from_zero(time, Measure::Time, bars.iter().map(|bar| bar.to).chain([0.0]))?;
    Some(Drawing::Bars(Bars {
        name: format!("ladder-{phase}-b{}-c{}", ladder.batch, ladder.context),
        title: format!("{phase}, batch {}, context {}", ladder.batch, ladder.context),
        axis,
        bars,
        closing: Some(ladder.story.clone()),
    }))
}

fn rung_name(ladder: &Ladder, index: usize) -> String {
    let rung = &ladder.rungs[index];
    let name = ladder.name(index);
    let dtype = rung.dtype.to_string();
    let name = if name.ends_with(&dtype) { name } else { format!("{name} {dtype}") };
    match rung.status {
        Status::Ok | Status::Predicted => name,
        status => format!("{name} ({})", status_word(status)),
    }
}
