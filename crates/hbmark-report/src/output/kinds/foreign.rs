//! Imported results: the mapped rows, their places on the roofline, and what was not reported; and the aliases they were mapped by.

use super::run::{bound_word, status_word};
use crate::analysis::capacity::number;
use crate::analysis::distinct;
use crate::analysis::import::metric_keys::{self, Alias, Shape};
use crate::analysis::import::{
    ForeignFormat, ForeignResult, ForeignRow, Imported, Metric, Placement, Rate, RooflinePlacement, Setup,
    Statistic, Value, remedy,
};
use crate::analysis::words::counted;
use crate::output::Kind;
use crate::output::document::{
    Block, Column, Document, facts, grouped, measured, numbers, split_constants, words,
};
use crate::output::kinds::headline;
use crate::output::metrics::Unit;
use clap::ValueEnum;
use hbmark_core::result::{Cause, CellResult, Status};
use serde::{Serialize, Serializer};

/// Metrics that a table shows, each by its middle, which the heading names; files for machines have every statistic.
const SHOWN: &[Metric] = &[
    Metric::PrefillStep,
    Metric::Ttft,
    Metric::DecodeStep,
    Metric::Tpot,
    Metric::TpotWithFirst,
    Metric::Itl,
    Metric::E2e,
    Metric::InputThroughput,
    Metric::OutputThroughput,
    Metric::TotalThroughput,
    Metric::RequestThroughput,
];

/// Those that stand before the place on the roofline: a reader wants them, and a narrow screen ends soon.
const FIRST: &[Metric] =
    &[Metric::Ttft, Metric::Tpot, Metric::PrefillStep, Metric::DecodeStep, Metric::RequestThroughput];

/// Metrics whose tail a table shows beside the middle.
const TAILS: &[Metric] = &[Metric::Ttft, Metric::Tpot, Metric::Itl];
const P99: Statistic = Statistic::Percentile(9900);
/// The headings of a row's lower bound, and of how much of the data sheet's bandwidth it reached.
const FLOOR: &str = "floor";
const SHARE: &str = "% sheet";
/// The heading of what the programs mean by their metrics.
const DIFFERING: &str = "metric definitions that differ";

impl Kind for [Imported] {
    fn page(&self) -> Document {
        let mut page = self.document();
        page.title = headline::imported_title(self);
        page.blocks.insert(0, Block::Figures(headline::imported(self)));
        page
    }

    fn document(&self) -> Document {
        let mut document = Document::default();
        let lines: Vec<Line<'_>> = self.iter().flat_map(lines_of).collect();
        if self.len() > 1 {
            document.heading(format!("{} results · {}", self.len(), counted(lines.len(), "row")));
            let (constants, columns) = columns(&lines);
            document.list(
                (!constants.is_empty()).then(|| format!("reported in every file: {}", facts(&constants))),
            );
            document.table(columns);
        }
        for one in self {
            section(&mut document, one, self.len() == 1);
        }
        if self.len() > 1 {
            document.section(DIFFERING, caveats_of_programs(self));
        }
        document.sheet = Some(sheet(self));
        document
    }

    fn json(&self) -> serde_json::Result<String> {
        serde_json::to_string_pretty(self)
    }
}

/// The table of foreign keys, of all formats or one.
#[derive(Debug, Clone, Copy)]
pub struct Aliases(pub Option<ForeignFormat>);

impl Aliases {
    fn lines(self) -> Vec<&'static Alias> {
        let formats =
            ForeignFormat::value_variants().iter().filter(|f| self.0.is_none_or(|only| only == **f));
        formats.flat_map(|format| metric_keys::of(*format)).collect()
    }
}

impl Kind for Aliases {
    fn document(&self) -> Document {
        let lines = self.lines();
        let text =
            |title: &str, of: &dyn Fn(&Alias) -> String| words(title, lines.iter().map(|line| of(line)));
        let mut document = Document::default();
        document.table(vec![
            text("format", &|a| a.format.name().to_owned()),
            text("foreign key", &|a| {
                if a.shape == Shape::Group { format!("{}.{{stat}}", a.key) } else { a.key.to_owned() }
            }),
            text("is our", &|a| a.metric.title().to_owned()),
            text("unit", &|a| a.unit.word().to_owned()),
            text("computed as", &|a| a.conversion.to_owned()),
            text("caveats", &|a| a.caveat.to_owned()),
        ]);
        document
    }

    fn json(&self) -> serde_json::Result<String> {
        serde_json::to_string(self)
    }
}

impl Serialize for Aliases {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.lines().into_iter().map(|a| {
            serde_json::json!({
                "format": a.format, "key": a.key, "metric": a.metric, "unit": a.unit.word(),
                "conversion": a.conversion, "caveat": a.caveat,
            })
        }))
    }
}

/// A row with the file it is from and its place.
#[derive(Clone, Copy)]
struct Line<'a> {
    result: &'a ForeignResult,
    row: &'a ForeignRow,
    place: &'a RooflinePlacement,
}

fn lines_of(one: &Imported) -> impl Iterator<Item = Line<'_>> {
    one.result.rows.iter().zip(&one.places).map(|(row, place)| Line { result: &one.result, row, place })
}

/// What is said of one result; the table where it stands alone.
fn section(document: &mut Document, imported: &Imported, alone: bool) {
    let result = &imported.result;
    document.heading(format!(
        "{} · {} · {}",
        result.source,
        result.format.name(),
        counted(result.rows.len(), "row")
    ));
    let (constants, columns) = columns(&lines_of(imported).collect::<Vec<_>>());
    let reported =
        (alone && !constants.is_empty()).then(|| format!("reported in file: {}", facts(&constants)));
    document.list(reported.into_iter().chain(missing_fields(&result.rows)));
    if alone {
        document.table(columns);
    }
    document.section("about these rows", row_remarks(imported));
    if alone {
        document.section(DIFFERING, caveats(imported));
    }
    document.section(
        "assumptions",
        shared(imported, |_, place| match place {
            RooflinePlacement::Placed(p) => p.assumptions.clone(),
            _ => Vec::new(),
        }),
    );
    let missing = imported.missing();
    if !missing.is_empty() {
        document.heading("to compare decode rows with the roofline, add");
        let asked = missing.iter().map(|m| (m.flag.clone(), m.hint.clone()));
        document.blocks.push(Block::KeyValues(asked.collect()));
    }
}

fn row_remarks(imported: &Imported) -> Vec<String> {
    let mut lines = shared(imported, |row, _| row.remarks.clone());
    lines.extend(shared(imported, |row, place| {
        let told = |p: &Placement| p.cell.reason.as_ref().is_some_and(|reason| row.problems.contains(reason));
        let first = usize::from(matches!(place, RooflinePlacement::Placed(p) if told(p)));
        row.problems.iter().skip(first).map(|problem| format!("INVALID: {problem}")).collect()
    }));
    lines.extend(shared(imported, |_, place| match place {
        RooflinePlacement::NoDecode(why) => vec![format!("not on the roofline: {why}")],
        RooflinePlacement::Placed(p) => p
            .cell
            .reason
            .iter()
            .map(|r| format!("INVALID: {r}"))
            .chain(p.cell.flags.iter().map(ToString::to_string))
            .collect(),
        RooflinePlacement::Contradicts(causes) => {
            let told = |cause: &Cause| {
                let remedy = remedy(cause).map_or_else(String::new, |what| format!("; {what}"));
                format!("CONTRADICTS, not rated: {cause}{remedy}")
            };
            causes.iter().map(told).collect()
        }
        RooflinePlacement::Asks(_) => Vec::new(),
    }));
    lines
}

/// A line that several rows share, once.
fn shared(imported: &Imported, of: impl Fn(&ForeignRow, &RooflinePlacement) -> Vec<String>) -> Vec<String> {
    let rows = &imported.result.rows;
    let lines = rows.iter().zip(&imported.places).map(|(row, place)| (row.label.as_str(), of(row, place)));
    let named = |(line, labels): (String, Vec<&str>)| match labels.as_slice() {
        all if all.len() == rows.len() => line,
        [one] => format!("{one}: {line}"),
        many => format!("{} rows ({} ...): {line}", many.len(), many[0]),
    };
    grouped(lines).into_iter().map(named).collect()
}

/// The caveats of the aliases that were used.
fn caveats(imported: &Imported) -> Vec<String> {
    let used = |alias: &&metric_keys::Alias| {
        !alias.caveat.is_empty()
            && imported
                .result
                .rows
                .iter()
                .flat_map(|r| &r.values)
                .any(|v| v.metric == alias.metric && reads(alias, &v.key))
    };
    let line = |alias: &metric_keys::Alias| {
        let key = alias.key.trim_start_matches("{stat}").trim_start_matches(['_', ' ']);
        format!("{key} is our {}: {}", alias.metric.title(), alias.caveat)
    };
    metric_keys::of(imported.result.format).filter(used).map(line).collect()
}

/// The caveats of several results, each once, with the programs it is of.
fn caveats_of_programs(results: &[Imported]) -> Vec<String> {
    let lines = grouped(results.iter().map(|one| (one.result.format.name(), caveats(one))));
    let named = |(line, programs): (String, Vec<&str>)| format!("{}: {line}", distinct(programs).join(", "));
    lines.into_iter().map(named).collect()
}

/// Whether a value's key is one that an alias reads.
fn reads(alias: &metric_keys::Alias, key: &str) -> bool {
    let stem = alias.key.trim_start_matches("{stat}");
    let stem = stem.split(' ').next().filter(|_| alias.shape == Shape::Computed).unwrap_or(stem);
    match alias.shape {
        Shape::Suffix => key.ends_with(stem),
        _ => key.starts_with(stem),
    }
}

/// What no row reports.
fn missing_fields(rows: &[ForeignRow]) -> Option<String> {
    type Reported = fn(&ForeignRow) -> bool;
    let wanted: [(&str, Reported); 9] = [
        ("model", |r| r.setup.model.is_some()),
        ("storage of the weights", |r| r.setup.stored_as.is_some()),
        ("GPU", |r| r.setup.gpu.is_some() || r.setup.cpu.is_some()),
        ("number of GPUs", |r| r.setup.gpus.is_some()),
        ("batch or concurrency", |r| {
            r.setup.batch.is_some() || r.setup.max_concurrency.is_some() || r.setup.concurrency.is_some()
        }),
        ("lengths", |r| r.setup.input_tokens.is_some()),
        ("engine version", |r| r.setup.engine_version.is_some()),
        ("warm-up", |r| r.setup.warmup.is_some()),
        ("seed", |r| r.setup.seed.is_some()),
    ];
    let missing: Vec<&str> =
        wanted.into_iter().filter(|(_, reported)| !rows.iter().any(reported)).map(|(name, _)| name).collect();
    (!missing.is_empty()).then(|| format!("not reported in file: {}", missing.join(", ")))
}

/// What is the same in every row, by title, and the columns that vary.
fn columns(lines: &[Line<'_>]) -> (Vec<(String, String)>, Vec<Column>) {
    type Said<'a> = &'a dyn Fn(&ForeignRow) -> Option<String>;
    let rows: Vec<&ForeignRow> = lines.iter().map(|line| line.row).collect();
    let files = rows.len() > 1 && lines.iter().any(|line| line.result != lines[0].result);
    let cells =
        |of: Said<'_>| rows.iter().map(|row| of(row).unwrap_or_else(|| "-".to_owned())).collect::<Vec<_>>();
    let text = |title: &str, of: Said<'_>| words(title, cells(of));
    let count = |title: &str, of: Said<'_>| numbers(title, cells(of));
    let tokens =
        |n: Option<f64>| n.map(|n| if n.fract() == 0.0 { format!("{n:.0}") } else { format!("{n:.1}") });
    let setup = vec![
        text("engine", &|r| r.setup.engine.clone()),
        text("version", &|r| r.setup.engine_version.clone()),
        text("model", &|r| r.setup.model.clone()),
        text("stored as", &|r| r.setup.stored_as.clone()),
        text("KV", &|r| r.setup.kv_dtype.map(|d| d.to_string())),
        text("GPU", &|r| r.setup.gpu.clone()),
        text("CPU", &|r| r.setup.cpu.clone()),
        count("GPUs", &|r| r.setup.gpus.map(|n| n.to_string())),
        count("batch", &|r| r.setup.batch.map(|n| n.to_string())),
        count("limit", &|r| r.setup.max_concurrency.map(|n| n.to_string())),
        count("offered", &|r| offered(&r.setup)),
        count("concurrency", &|r| tokens(r.setup.concurrency)),
        count("depth", &|r| r.setup.depth.map(|n| n.to_string())),
        count("in", &|r| tokens(r.setup.input_tokens)),
        count("out", &|r| tokens(r.setup.output_tokens)),
    ];
    let long =
        |c: &Column| matches!(c.title.as_str(), "engine" | "version" | "model" | "stored as" | "GPU" | "CPU");
    // With one row only long words go above the table; numbers stay beside those they explain.
    let (constants, varying) = split_constants(setup, |c| rows.len() > 1 || long(c) || c.is_empty());
    let of_file =
        |title: &str, of: fn(&ForeignResult) -> String| words(title, lines.iter().map(|l| of(l.result)));
    // Which row it is and whether it can be believed, what was measured, how far that is from the floor; then what ran.
    let mut columns = Vec::new();
    if files {
        columns.push(of_file("file", |result| result.source.clone()).key());
    }
    columns.push(text("row", &|r| Some(r.label.clone())).key());
    columns.push(words("validity", lines.iter().map(validity)));
    let placed = placed_columns(lines);
    let mut rest: Vec<Metric> = SHOWN.iter().copied().filter(|metric| !FIRST.contains(metric)).collect();
    rest.sort_by_key(|metric| *metric != Metric::OutputThroughput);
    let of_metrics = |metrics: &[Metric]| -> Vec<Column> {
        metrics.iter().flat_map(|metric| metric_columns(*metric, &rows)).collect()
    };
    columns.extend(of_metrics(FIRST));
    columns.extend(placed);
    columns.extend(of_metrics(&rest));
    if files {
        columns.push(of_file("program", |result| result.format.name().to_owned()));
    }
    columns.extend(varying);
    columns.retain(|c| c.title == "row" || !c.is_empty());
    let main = main_columns(lines, &rows);
    let minor = |column: Column| {
        let minor = !main.contains(&column.title);
        column.minor(minor)
    };
    let columns = columns.into_iter().map(minor).collect();
    (constants, columns)
}

/// The middle of a metric, and its tail where that is shown.
fn metric_columns(metric: Metric, rows: &[&ForeignRow]) -> Vec<Column> {
    let unit = if metric.is_time() { Unit::Nanoseconds } else { Unit::PerSecond };
    let middles = rows.iter().map(|row| row.center(metric).map(|value| value.value));
    let mut columns = vec![measured(headed(metric, rows), unit, middles)];
    if TAILS.contains(&metric) {
        let tails = rows.iter().map(|row| row.value(metric, P99));
        columns.push(measured(format!("{} {P99}", metric.title()), unit, tails));
    }
    columns
}

/// The columns that say which row it is, what was measured and how far that is from the floor; where no row was rated, the usual metrics.
fn main_columns(lines: &[Line<'_>], rows: &[&ForeignRow]) -> Vec<String> {
    let mut metrics: Vec<Metric> = lines
        .iter()
        .filter_map(|line| match line.place {
            RooflinePlacement::Placed(placed) => Some(placed.time.metric),
            _ => None,
        })
        .collect();
    metrics.sort_by_key(|metric| SHOWN.iter().position(|shown| shown == metric));
    metrics.dedup();
    if metrics.is_empty() {
        metrics = vec![Metric::Ttft, Metric::DecodeStep, Metric::Tpot, Metric::OutputThroughput];
    }
    // Of several times the share says what their floors would, and names need the room.
    let floor = (metrics.len() == 1).then_some(FLOOR);
    let known = ["file", "row", "validity", SHARE].into_iter().chain(floor).map(str::to_owned);
    known.chain(metrics.into_iter().map(|metric| headed(metric, rows))).collect()
}

/// The heading of a metric's middle, with the statistics that it is in these rows; a single value has none.
fn headed(metric: Metric, rows: &[&ForeignRow]) -> String {
    let statistics = rows.iter().filter_map(|row| row.center(metric)).map(|value| value.statistic);
    let named = statistics.filter(|statistic| *statistic != Statistic::Single);
    let words = distinct(named.map(|statistic| statistic.to_string()));
    if words.is_empty() {
        metric.title().to_owned()
    } else {
        format!("{} {}", metric.title(), words.join("/"))
    }
}

fn offered(setup: &Setup) -> Option<String> {
    Some(match (setup.request_rate?, setup.max_concurrency) {
        (Rate::PerSecond(rate), _) => format!("{}/s", number(rate)),
        // The column beside it has the limit.
        (Rate::Unlimited, Some(_)) => "inf".to_owned(),
        (Rate::Unlimited, None) => "inf (all at time 0)".to_owned(),
    })
}

fn placed_columns(lines: &[Line<'_>]) -> Vec<Column> {
    let decode = |place: &RooflinePlacement| match place {
        RooflinePlacement::Placed(placement) => Some(placement.cell.clone()),
        _ => None,
    };
    let cells: Vec<Option<CellResult>> = lines.iter().map(|line| decode(line.place)).collect();
    let number = |title: &str, unit, of: &dyn Fn(&CellResult) -> Option<f64>| {
        measured(title, unit, cells.iter().map(|cell| of(cell.as_ref()?)))
    };
    let word = |title: &str, of: &dyn Fn(&CellResult) -> String| {
        words(title, cells.iter().map(|cell| cell.as_ref().map_or_else(|| "-".to_owned(), of)))
    };
    vec![
        number(SHARE, Unit::Fraction, &|cell| cell.fraction_of_datasheet),
        word("at", &|cell| format!("b{} c{}", cell.batch, cell.context)),
        number(FLOOR, Unit::Nanoseconds, &|cell| cell.predicted_datasheet_ns),
        number("achieved", Unit::BytesPerSecond, &|cell| cell.achieved_bytes_per_s),
        word("bound", &|cell| cell.bound.map_or("-", bound_word).to_owned()),
    ]
}

fn validity(line: &Line<'_>) -> String {
    match line.place {
        RooflinePlacement::Contradicts(_) => "CONTRADICTS".to_owned(),
        RooflinePlacement::Placed(p) if p.cell.status != Status::Ok => status_word(p.cell.status).to_owned(),
        _ if !line.row.problems.is_empty() => status_word(Status::Invalid).to_owned(),
        _ if line.row.saturated => "SATURATED".to_owned(),
        _ => "-".to_owned(),
    }
}

/// One row a number, which is what a spreadsheet can pivot.
fn sheet(imported: &[Imported]) -> Vec<Column> {
    struct Number<'a>(&'a Imported, &'a ForeignRow, &'a RooflinePlacement, &'a Value);
    let mut all = Vec::new();
    for one in imported {
        for (row, place) in one.result.rows.iter().zip(&one.places) {
            all.extend(row.values.iter().map(|value| Number(one, row, place, value)));
        }
    }
    let text = |title: &str, of: &dyn Fn(&Number<'_>) -> String| words(title, all.iter().map(of));
    let setup = |title: &str, of: &dyn Fn(&ForeignRow) -> Option<String>| {
        words(title, all.iter().map(|number| of(number.1).unwrap_or_default()))
    };
    let placed = |title: &str, unit: Unit, of: &dyn Fn(&CellResult) -> Option<f64>| {
        let cell = |number: &Number<'_>| match number.2 {
            RooflinePlacement::Placed(p) if p.time == *number.3 => of(&p.cell),
            _ => None,
        };
        measured(title, unit, all.iter().map(cell))
    };
    vec![
        text("source", &|n| n.0.result.source.clone()),
        text("format", &|n| n.0.result.format.name().to_owned()),
        text("row", &|n| n.1.label.clone()),
        setup("engine", &|r| r.setup.engine.clone()),
        setup("model", &|r| r.setup.model.clone()),
        setup("stored_as", &|r| r.setup.stored_as.clone()),
        setup("gpu", &|r| r.setup.gpu.clone()),
        setup("gpus", &|r| r.setup.gpus.map(|n| n.to_string())),
        setup("batch", &|r| r.setup.batch.map(|n| n.to_string())),
        setup("max_concurrency", &|r| r.setup.max_concurrency.map(|n| n.to_string())),
        setup("depth", &|r| r.setup.depth.map(|n| n.to_string())),
        setup("input_tokens", &|r| r.setup.input_tokens.map(|n| n.to_string())),
        setup("output_tokens", &|r| r.setup.output_tokens.map(|n| n.to_string())),
        text("metric", &|n| n.3.metric.title().to_owned()),
        text("statistic", &|n| n.3.statistic.to_string()),
        measured("value", Unit::Count, all.iter().map(|n| n.3.value)),
        text("unit", &|n| if n.3.metric.is_time() { "ns" } else { "1/s" }.to_owned()),
        text("key", &|n| n.3.key.clone()),
        placed("placed_batch", Unit::Count, &|cell| Some(cell.batch as f64)),
        placed("placed_context", Unit::Count, &|cell| Some(cell.context as f64)),
        text("validity", &|n| {
            let word = validity(&Line { result: &n.0.result, row: n.1, place: n.2 });
            if word == "-" { String::new() } else { word }
        }),
        placed("floor", Unit::Nanoseconds, &|cell| cell.predicted_datasheet_ns),
        placed("achieved", Unit::BytesPerSecond, &|cell| cell.achieved_bytes_per_s),
        placed("fraction_of_datasheet", Unit::Fraction, &|cell| cell.fraction_of_datasheet),
    ]
}

#[cfg(test)]
mod tests;
