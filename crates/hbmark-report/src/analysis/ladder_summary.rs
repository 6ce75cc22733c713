//! The line below a ladder: where the time of a step went.
//!
//! Enters: the measured cells of a ladder with their floors, and the cells that have no rung. Leaves: a sentence, which also names
//! what contradicts the model (a step below its floor, kernels that lose more than candle's).

use std::fmt::Write;

use super::ladder::{Ground, KnownFloor, Measured, elsewhere};
use hbmark_core::ledger::{CACHE_MARGIN, CEILING_TOLERANCE};
use hbmark_core::result::{Bound, CellResult, LaunchCost, Report, RungKind, Status, TimeScale};
use hbmark_core::units::BytesPerSecond;

/// Summarizes a ladder. `lowest` is the cell whose floor is its lowest rung.
pub(super) fn summarize(
    selection: &[Measured<'_>],
    lowest: Option<&Measured<'_>>,
    missing: &[&CellResult],
    report: &Report,
    launches: Option<LaunchCost>,
    place: (usize, usize),
) -> String {
    let phase = selection[0].cell.phase;
    let mut story = format!("{phase} b{} c{}: ", place.0, place.1);
    let times = selection.iter().flat_map(|m| [m.time_ns, m.floor.map_or(0.0, |f| f.time_ns)]);
    let words = Words { scale: TimeScale::for_longest(times.fold(0.0, f64::max)) };
    story.push_str(&match lowest.and_then(|lowest| words.sum(selection, lowest)) {
        Some(sum) => sum,
        None => words.apart(selection),
    });
    if let Some(launches) = launches {
        story.push_str(&words.launches(launches));
    }
    let doubtful = selection.iter().filter(|m| m.cell.status.is_doubtful()).count();
    if doubtful > 0 {
        let _ = write!(story, "; {doubtful} of its {} times cannot be relied on", selection.len());
    }
    for low in selection.iter().filter(|m| below_floor(m)) {
        let _ = write!(story, "; {}", under_the_floor(low, report));
    }
    for far in selection.iter().filter(|m| m.kind == RungKind::External) {
        if let Some(where_it_ran) = elsewhere(far.cell, place) {
            let _ = write!(story, "; {} ran at {where_it_ran}, not at this place", far.cell.engine);
        }
    }
    for cell in missing {
        let _ = write!(story, "; {} {}", cell.id, no_rung(cell.status));
    }
    story
}

/// Whether a step is faster than its floor by more than the step's interval and the ceiling's own spread.
fn below_floor(measured: &Measured<'_>) -> bool {
    measured.floor_then_ns().is_some_and(|floor_ns| floor_ns > measured.high_ns * CEILING_TOLERANCE)
}

fn under_the_floor(measured: &Measured<'_>, report: &Report) -> String {
    let engine = &measured.cell.engine;
    let cache = report.ceilings.as_ref().and_then(|c| c.last_cache_bytes);
    let cached = cache.is_some_and(|c| measured.cell.bytes.ideal().0 < CACHE_MARGIN.saturating_mul(c.0));
    let share = measured.floor_then_ns().map_or(0.0, |floor_ns| (1.0 - measured.time_ns / floor_ns) * 100.0);
    let why = match measured.floor.map(|floor| floor.kind) {
        _ if measured.kind == RungKind::External => {
            "its model, storage, batch or device is not what was said"
        }
        _ if cached => "part of what it reads comes from the cache",
        Some(RungKind::Datasheet) => "the data sheet row or the timing is wrong",
        _ if measured.has_other_memory() => "memory was faster in its steps than beside them",
        _ => "the ceiling was measured low",
    };
    format!("{engine} is {share:.1} % under its floor: {why}")
}

fn no_rung(status: Status) -> &'static str {
    match status {
        Status::Invalid => "is INVALID and has no rung",
        Status::Oom => "ran out of memory and has no rung",
        Status::Skipped => "was skipped and has no rung",
        Status::Disturbed => "was disturbed throughout and has no rung",
        Status::Incomplete => "was not finished and has no rung",
        _ => "failed and has no rung",
    }
}

fn bound_word(bound: Bound) -> &'static str {
    match bound {
        Bound::Compute => "compute",
        Bound::Memory | Bound::Overhead | Bound::Collectives => "memory",
    }
}

/// What an engine adds to its floor, or to the same kernels run another way on a rung above.
fn loss_of(measured: &Measured<'_>, above: &[Measured<'_>]) -> String {
    let has = |kind| above.iter().any(|m| m.kind == kind && m.cell.dtype == measured.cell.dtype);
    match measured.kind {
        RungKind::Native => "native kernel overhead".to_owned(),
        RungKind::Stock if has(RungKind::StockPool) => "what its memory pool gives back and takes".to_owned(),
        RungKind::Stock | RungKind::StockPool if has(RungKind::StockGraph) => {
            "launches, kernel by kernel".to_owned()
        }
        RungKind::StockGraph | RungKind::StockPool | RungKind::Stock => {
            "candle's kernels and copies".to_owned()
        }
        RungKind::External => format!("the rest of {}", measured.cell.engine),
        _ => format!("what {} adds", measured.cell.engine),
    }
}

/// What the bytes or the arithmetic of another dtype add at the ceiling.
fn dtype_part(measured: &Measured<'_>, floor: KnownFloor, lowest: &CellResult) -> String {
    let dtype = measured.cell.dtype;
    match floor.bound {
        _ if (measured.cell.batch, measured.cell.context) != (lowest.batch, lowest.context) => {
            format!("what a step at b{} c{} needs beyond that", measured.cell.batch, measured.cell.context)
        }
        Bound::Compute => format!("its {dtype} arithmetic"),
        _ if measured.cell.kv_dtype == lowest.kv_dtype => format!("its {dtype} weights"),
        _ => format!("its {dtype} weights and KV"),
    }
}

/// The rate that memory had beside an engine's blocks, where it was not the ceiling's.
fn other_rate(measured: &Measured<'_>) -> Option<String> {
    let rate = measured.cell.read_beside_bytes_per_s.filter(|_| measured.has_other_memory());
    rate.map(|rate| format!("{} read beside {}", BytesPerSecond(rate), measured.cell.engine))
}

struct Words {
    scale: TimeScale,
}

impl Words {
    fn time(&self, nanoseconds: f64) -> String {
        self.scale.show(nanoseconds)
    }

    /// `the memory floor of bf16`, with its source where that is not this run's ceiling.
    fn floor(floor: KnownFloor, cell: &CellResult) -> String {
        let source = if floor.kind == RungKind::Datasheet { "data sheet's " } else { "" };
        format!("the {source}{} floor of {}", bound_word(floor.bound), cell.dtype)
    }

    /// The time of the last rung as a sum, where every rung adds something; `None` where one takes away.
    fn sum(&self, selection: &[Measured<'_>], lowest: &Measured<'_>) -> Option<String> {
        let (last, base) = (selection.last()?, lowest.floor?);
        let mut parts = vec![format!("{} is {}", self.time(base.time_ns), Self::floor(base, lowest.cell))];
        let (mut level, mut ground) = (base.time_ns, Ground::of(lowest)?);
        let mut losses = Vec::with_capacity(selection.len());
        for (index, measured) in selection.iter().enumerate() {
            let floor = measured.floor?;
            let (of_bytes, of_memory) = ground.move_to(measured);
            if let Some(extra) = of_bytes {
                if extra < 0.0 {
                    return None;
                }
                parts.push(format!("{} {}", self.time(extra), dtype_part(measured, floor, lowest.cell)));
            }
            if let Some(extra) = of_memory {
                let rate = other_rate(measured).unwrap_or_else(|| "the ceiling again".to_owned());
                parts.push(format!("{} the memory's other rate ({rate})", self.time(extra)));
            }
            level += of_bytes.unwrap_or(0.0) + of_memory.unwrap_or(0.0);
            if !measured.ran() {
                continue;
            }
            let loss = measured.time_ns - level;
            // A first engine may lie on its floor, or a hair under it.
            let on_floor = losses.is_empty() && !below_floor(measured);
            if loss < 0.0 && !on_floor {
                return None;
            }
            let noise = if loss < 0.0 { " (within the noise of the ceiling)" } else { "" };
            losses.push(format!("{} {}{noise}", self.time(loss), loss_of(measured, &selection[..index])));
            level = measured.time_ns;
        }
        parts.append(&mut losses);
        Some(format!("of {}'s {}, {}", last.cell.engine, self.time(last.time_ns), parts.join(", ")))
    }

    /// What of candle's step is launches.
    fn launches(&self, launches: LaunchCost) -> String {
        let (eager, replayed) = (self.time(launches.eager_ns), self.time(launches.replayed_ns));
        if launches.cost_ns < 0.0 {
            return format!("; stock takes {eager} eager and {replayed} replayed, so no launch cost is seen");
        }
        let share = launches.share * 100.0;
        format!("; {share:.1} % of stock is launches ({eager} eager less {replayed} replayed)")
    }

    /// Every engine over its own floor, and which is slower.
    fn apart(&self, selection: &[Measured<'_>]) -> String {
        let each: Vec<String> = selection
            .iter()
            .filter(|m| m.ran())
            .map(|m| {
                let takes = format!("{} takes {}", m.cell.engine, self.time(m.time_ns));
                let Some((floor, over)) = m.floor.zip(m.over_floor()) else { return takes };
                let side = if over < 0.0 { "under" } else { "over" };
                let rate = other_rate(m).map_or_else(String::new, |rate| format!(" at the {rate}"));
                format!("{takes}, {} {side} {}{rate}", self.time(over.abs()), Self::floor(floor, m.cell))
            })
            .collect();
        let mut text = each.join("; ");
        if selection.iter().any(|m| m.floor.is_none()) {
            text.push_str("; no ceiling was measured, so no floor is known");
        }
        for pair in selection.windows(2).filter(|pair| pair.iter().all(Measured::ran)) {
            if let Some(verdict) = compare(&pair[0], &pair[1]) {
                let _ = write!(text, "; {verdict}");
            }
        }
        text
    }
}

/// What is surprising about two neighbours on a ladder: the lower rung should be the faster one and lose less over its floor.
fn compare(lower: &Measured<'_>, upper: &Measured<'_>) -> Option<String> {
    let (name, other) = (&lower.cell.engine, &upper.cell.engine);
    if lower.time_ns > upper.time_ns {
        let percent = (lower.time_ns / upper.time_ns - 1.0) * 100.0;
        let noise = if lower.low_ns <= upper.high_ns { ", which is within their intervals" } else { "" };
        return Some(format!("{name} is {percent:.1} % slower than {other}{noise}"));
    }
    let known = |m: &Measured<'_>| m.memory_change_ns.is_some();
    let alike = known(lower) == known(upper);
    let (loses, other_loses) = lower.over_floor().zip(upper.over_floor()).filter(|_| alike)?;
    (loses > other_loses).then(|| {
        format!(
            "{name} is faster by its {} alone: over its own floor it loses more than {other}",
            lower.cell.dtype
        )
    })
}
