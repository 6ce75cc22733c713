//! Imported results for a person, a spreadsheet or a machine: the mapped rows, where they stand on the roofline, and what was not said.
//!
//! Enters: [`Imported`]s. Leaves: text. What the numbers mean was decided in [`crate::analysis::import`].

use super::TextFormat;
use super::metrics::Unit;
use super::table::{Column, bound_word, status_word};
use super::terminal::aligned;
use super::text::column;
use crate::analysis::import::alias::{self, Shape};
use crate::analysis::import::{
    ForeignFormat, ForeignRow, Imported, Metric, Placement, Rate, RooflinePlacement, Statistic,
};
use crate::output::OutputError;
use hbmark_core::input::plain;
use hbmark_core::result::Status;

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

/// Metrics whose tail a table shows beside the middle.
const TAILS: &[Metric] = &[Metric::Ttft, Metric::Tpot, Metric::Itl];
const P99: Statistic = Statistic::Percentile(990);

/// Prints imported results.
///
/// # Errors
/// When a format's writer fails.
pub fn render(imported: &[Imported], format: TextFormat) -> Result<String, OutputError> {
    match format {
        TextFormat::Json => Ok(serde_json::to_string_pretty(imported)?),
        TextFormat::Csv => csv(imported),
        TextFormat::Table => Ok(sections(imported, &Plain)),
        TextFormat::Md => Ok(sections(imported, &Markdown)),
    }
}

/// Prints the dictionary, of all formats or one.
#[must_use]
pub fn render_aliases(format: TextFormat, only: Option<ForeignFormat>) -> String {
    let formats = ForeignFormat::ALL.iter().filter(|f| only.is_none_or(|only| only == **f));
    let lines: Vec<_> = formats.flat_map(|format| alias::of(*format)).collect();
    let text = |title: &str, of: &dyn Fn(&alias::Alias) -> String| Column {
        title: title.to_owned(),
        right: false,
        cells: lines.iter().map(|line| of(line)).collect(),
    };
    let columns = [
        text("format", &|a| a.format.name().to_owned()),
        text("foreign key", &|a| {
            if a.shape == Shape::Group { format!("{}.{{stat}}", a.key) } else { a.key.to_owned() }
        }),
        text("is our", &|a| a.metric.title().to_owned()),
        text("unit", &|a| a.unit.word().to_owned()),
        text("computed as", &|a| a.conversion.to_owned()),
        text("mind", &|a| a.caveat.to_owned()),
    ];
    match format {
        TextFormat::Table => Plain.table(&columns),
        TextFormat::Md => Markdown.table(&columns),
        TextFormat::Csv => delimited(&columns),
        TextFormat::Json => {
            let row = |a: &&alias::Alias| {
                serde_json::json!({
                    "format": a.format, "key": a.key, "metric": a.metric, "unit": a.unit.word(),
                    "conversion": a.conversion, "caveat": a.caveat,
                })
            };
            serde_json::Value::Array(lines.iter().map(row).collect()).to_string()
        }
    }
}

/// Columns as CSV.
pub(super) fn delimited(columns: &[Column]) -> String {
    let mut writer = ::csv::Writer::from_writer(Vec::new());
    let rows = columns.first().map_or(0, |c| c.cells.len());
    let titles: Vec<&str> = columns.iter().map(|c| c.title.as_str()).collect();
    // Writing into memory does not fail.
    let _ = writer.write_record(titles);
    for row in 0..rows {
        let _ = writer.write_record(columns.iter().map(|c| super::csv::harmless(&c.cells[row])));
    }
    writer.into_inner().map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
}

/// How tables and lists are drawn.
pub(super) trait Draw {
    fn heading(&self, text: &str) -> String;
    fn table(&self, columns: &[Column]) -> String;
    fn item(&self, text: &str) -> String;
}

pub(super) struct Plain;
pub(super) struct Markdown;

impl Draw for Plain {
    fn heading(&self, text: &str) -> String {
        format!("{text}\n")
    }
    fn table(&self, columns: &[Column]) -> String {
        aligned(columns).into_iter().fold(String::new(), |text, line| text + &line + "\n")
    }
    fn item(&self, text: &str) -> String {
        format!("  {text}\n")
    }
}

impl Draw for Markdown {
    fn heading(&self, text: &str) -> String {
        format!("\n**{}**\n\n", super::markdown::escape(text))
    }
    fn table(&self, columns: &[Column]) -> String {
        let mut text = String::new();
        super::markdown::rows(&mut text, columns);
        text
    }
    fn item(&self, text: &str) -> String {
        format!("- {}\n", super::markdown::escape(text))
    }
}

fn sections(imported: &[Imported], draw: &dyn Draw) -> String {
    let mut text = String::new();
    for (index, one) in imported.iter().enumerate() {
        if index > 0 {
            text.push('\n');
        }
        section(&mut text, one, draw);
    }
    text
}

fn section(text: &mut String, imported: &Imported, draw: &dyn Draw) {
    let result = &imported.result;
    let rows = result.rows.len();
    let count = if rows == 1 { "1 row".to_owned() } else { format!("{rows} rows") };
    text.push_str(&draw.heading(&format!("{} · {} · {count}", plain(&result.source), result.format.name())));
    let (constants, columns) = columns(imported);
    if !constants.is_empty() {
        let said: Vec<String> = constants.iter().map(|(title, value)| format!("{title} {value}")).collect();
        text.push_str(&draw.item(&format!("the file says: {}", said.join(" · "))));
    }
    if let Some(line) = missing_fields(&result.rows) {
        text.push_str(&draw.item(&line));
    }
    text.push('\n');
    text.push_str(&draw.table(&columns));
    let mut list = |title: &str, lines: Vec<String>| {
        if !lines.is_empty() {
            text.push('\n');
            text.push_str(&draw.heading(title));
            for line in &lines {
                text.push_str(&draw.item(&plain(line)));
            }
        }
    };
    list("about these rows", row_remarks(imported));
    list("words that mean something else there", caveats(imported));
    list(
        "taken for granted on the roofline",
        grouped(imported, |_, place| match place {
            RooflinePlacement::Placed(p) => p.assumptions.clone(),
            _ => Vec::new(),
        }),
    );
    let missing = imported.missing();
    list(
        "to hold the decode rows against the roofline, say",
        missing.iter().map(|m| format!("{:<10} {}", m.flag, m.hint)).collect(),
    );
}

fn row_remarks(imported: &Imported) -> Vec<String> {
    let mut lines = grouped(imported, |row, _| row.remarks.clone());
    lines.extend(grouped(imported, |_, place| match place {
        RooflinePlacement::NoDecode(why) => vec![format!("not on the roofline: {why}")],
        RooflinePlacement::Placed(p) => p
            .cell
            .reason
            .iter()
            .map(|r| format!("INVALID: {r}"))
            .chain(p.cell.flags.iter().map(ToString::to_string))
            .collect(),
        RooflinePlacement::Asks(_) => Vec::new(),
    }));
    lines
}

/// A sentence that several rows share, once.
fn grouped(imported: &Imported, of: impl Fn(&ForeignRow, &RooflinePlacement) -> Vec<String>) -> Vec<String> {
    let rows = &imported.result.rows;
    let mut sentences: Vec<(String, Vec<&str>)> = Vec::new();
    for (row, place) in rows.iter().zip(&imported.places) {
        for sentence in of(row, place) {
            match sentences.iter_mut().find(|(known, _)| *known == sentence) {
                Some((_, labels)) => labels.push(&row.label),
                None => sentences.push((sentence, vec![&row.label])),
            }
        }
    }
    sentences
        .into_iter()
        .map(|(sentence, labels)| match labels.as_slice() {
            all if all.len() == rows.len() => sentence,
            [one] => format!("{one}: {sentence}"),
            many => format!("{} rows ({} ...): {sentence}", many.len(), many[0]),
        })
        .collect()
}

/// The caveats of the aliases that were used.
fn caveats(imported: &Imported) -> Vec<String> {
    let used = |alias: &&alias::Alias| {
        !alias.caveat.is_empty()
            && imported
                .result
                .rows
                .iter()
                .flat_map(|r| &r.values)
                .any(|v| v.metric == alias.metric && reads(alias, &v.key))
    };
    let line =
        |alias: &alias::Alias| format!("{} is our {}: {}", alias.key, alias.metric.title(), alias.caveat);
    alias::of(imported.result.format).filter(used).map(line).collect()
}

/// Whether a value's key is one that an alias reads.
fn reads(alias: &alias::Alias, key: &str) -> bool {
    let stem = alias.key.trim_start_matches("{stat}");
    let stem = stem.split(' ').next().filter(|_| alias.shape == Shape::Computed).unwrap_or(stem);
    match alias.shape {
        Shape::Suffix => key.ends_with(stem),
        _ => key.starts_with(stem),
    }
}

/// What a reader would want to know and no row says.
fn missing_fields(rows: &[ForeignRow]) -> Option<String> {
    type Said = fn(&ForeignRow) -> bool;
    let wanted: [(&str, Said); 9] = [
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
        wanted.into_iter().filter(|(_, said)| !rows.iter().any(said)).map(|(name, _)| name).collect();
    (!missing.is_empty()).then(|| format!("the file does not say: {}", missing.join(", ")))
}

/// What is the same in every row, by title, and the columns that vary.
fn columns(imported: &Imported) -> (Vec<(String, String)>, Vec<Column>) {
    let rows = &imported.result.rows;
    let text = |title: &str, right: bool, of: &dyn Fn(&ForeignRow) -> Option<String>| Column {
        title: title.to_owned(),
        right,
        cells: rows.iter().map(|row| of(row).map_or_else(|| "-".to_owned(), |t| plain(&t))).collect(),
    };
    let tokens =
        |n: Option<f64>| n.map(|n| if n.fract() == 0.0 { format!("{n:.0}") } else { format!("{n:.1}") });
    let said = vec![
        text("engine", false, &|r| r.setup.engine.clone()),
        text("version", false, &|r| r.setup.engine_version.clone()),
        text("model", false, &|r| r.setup.model.clone()),
        text("stored as", false, &|r| r.setup.stored_as.clone()),
        text("KV", false, &|r| r.setup.kv_dtype.map(|d| d.to_string())),
        text("GPU", false, &|r| r.setup.gpu.clone()),
        text("CPU", false, &|r| r.setup.cpu.clone()),
        text("GPUs", true, &|r| r.setup.gpus.map(|n| n.to_string())),
        text("batch", true, &|r| r.setup.batch.map(|n| n.to_string())),
        text("limit", true, &|r| r.setup.max_concurrency.map(|n| n.to_string())),
        text("offered", true, &|r| r.setup.request_rate.map(offered)),
        text("at once", true, &|r| tokens(r.setup.concurrency)),
        text("depth", true, &|r| r.setup.depth.map(|n| n.to_string())),
        text("in", true, &|r| tokens(r.setup.input_tokens)),
        text("out", true, &|r| tokens(r.setup.output_tokens)),
    ];
    let same = |c: &Column| c.cells.windows(2).all(|pair| pair[0] == pair[1]);
    let long =
        |c: &Column| matches!(c.title.as_str(), "engine" | "version" | "model" | "stored as" | "GPU" | "CPU");
    // With one row only long words go above the table; numbers stay beside those they explain.
    let (constant, varying): (Vec<Column>, Vec<Column>) = said
        .into_iter()
        .partition(|c| same(c) && (rows.len() > 1 || long(c) || c.cells.iter().all(|v| v == "-")));
    let constants = constant
        .into_iter()
        .filter_map(|mut c| Some((c.title, c.cells.pop()?)))
        .filter(|(_, v)| v != "-")
        .collect();
    let mut columns = vec![text("row", false, &|r| Some(r.label.clone()))];
    columns.extend(varying);
    for metric in SHOWN {
        let unit = if metric.is_time() { Unit::Nanoseconds } else { Unit::PerSecond };
        let mut push = |title: String, values: Vec<Option<f64>>| {
            columns.push(Column { title, right: true, cells: column(unit, &values) });
        };
        let middles = rows.iter().map(|r| r.center(*metric).map(|v| v.value)).collect();
        push(headed(*metric, rows), middles);
        if TAILS.contains(metric) {
            let tails = rows.iter().map(|r| r.value(*metric, P99)).collect();
            push(format!("{} {P99}", metric.title()), tails);
        }
    }
    columns.extend(placed_columns(&imported.places));
    columns.retain(|c| c.title == "row" || c.cells.iter().any(|v| v != "-"));
    (constants, columns)
}

/// The heading of a metric's middle, with the statistics that it is in these rows; a figure that stands alone in its file has no name.
fn headed(metric: Metric, rows: &[ForeignRow]) -> String {
    let mut words: Vec<String> = Vec::new();
    for value in rows.iter().filter_map(|row| row.center(metric)) {
        let word = value.statistic.to_string();
        if value.statistic != Statistic::Single && !words.contains(&word) {
            words.push(word);
        }
    }
    if words.is_empty() {
        metric.title().to_owned()
    } else {
        format!("{} {}", metric.title(), words.join("/"))
    }
}

fn offered(rate: Rate) -> String {
    match rate {
        Rate::PerSecond(rate) => format!("{rate}/s"),
        Rate::Unlimited => "all at once".to_owned(),
    }
}

fn placed_columns(places: &[RooflinePlacement]) -> Vec<Column> {
    let pick = |place: &RooflinePlacement, of: &dyn Fn(&Placement) -> Option<f64>| match place {
        RooflinePlacement::Placed(placement) => of(placement),
        _ => None,
    };
    let number = |title: &str, unit, of: &dyn Fn(&Placement) -> Option<f64>| Column {
        title: title.to_owned(),
        right: true,
        cells: column(unit, &places.iter().map(|p| pick(p, of)).collect::<Vec<_>>()),
    };
    let word = |title: &str, of: &dyn Fn(&Placement) -> String| Column {
        title: title.to_owned(),
        right: false,
        cells: places
            .iter()
            .map(|p| if let RooflinePlacement::Placed(p) = p { of(p) } else { "-".to_owned() })
            .collect(),
    };
    vec![
        word("at", &|p| format!("b{} c{}", p.cell.batch, p.cell.context)),
        number("floor", Unit::Nanoseconds, &|p| p.cell.predicted_datasheet_ns),
        number("achieved", Unit::BytesPerSecond, &|p| p.cell.achieved_bytes_per_s),
        number("% sheet", Unit::Fraction, &|p| p.cell.fraction_of_datasheet),
        word("bound", &|p| p.cell.bound.map_or("-", bound_word).to_owned()),
        word("validity", &|p| {
            if p.cell.status == Status::Ok { "-".to_owned() } else { status_word(p.cell.status).to_owned() }
        }),
    ]
}

/// One line a number, which is what a spreadsheet can pivot.
fn csv(imported: &[Imported]) -> Result<String, OutputError> {
    let mut writer = ::csv::Writer::from_writer(Vec::new());
    writer.write_record([
        "source",
        "format",
        "row",
        "engine",
        "model",
        "stored_as",
        "gpu",
        "gpus",
        "batch",
        "max_concurrency",
        "depth",
        "input_tokens",
        "output_tokens",
        "metric",
        "statistic",
        "value",
        "unit",
        "key",
        "placed_batch",
        "placed_context",
        "floor_ns",
        "achieved_bytes_per_s",
        "fraction_of_datasheet",
    ])?;
    let said = |text: &Option<String>| super::csv::harmless(text.as_deref().unwrap_or_default());
    for one in imported {
        for (row, place) in one.result.rows.iter().zip(&one.places) {
            for value in &row.values {
                let cell = match place {
                    RooflinePlacement::Placed(p) if p.time == *value => Some(&p.cell),
                    _ => None,
                };
                let s = &row.setup;
                writer.write_record([
                    super::csv::harmless(&one.result.source),
                    one.result.format.name().to_owned(),
                    super::csv::harmless(&row.label),
                    said(&s.engine),
                    said(&s.model),
                    said(&s.stored_as),
                    said(&s.gpu),
                    number(s.gpus),
                    number(s.batch),
                    number(s.max_concurrency),
                    number(s.depth),
                    number(s.input_tokens),
                    number(s.output_tokens),
                    value.metric.title().to_owned(),
                    value.statistic.to_string(),
                    value.value.to_string(),
                    if value.metric.is_time() { "ns" } else { "1/s" }.to_owned(),
                    super::csv::harmless(&value.key),
                    number(cell.map(|c| c.batch)),
                    number(cell.map(|c| c.context)),
                    number(cell.and_then(|c| c.predicted_datasheet_ns)),
                    number(cell.and_then(|c| c.achieved_bytes_per_s)),
                    number(cell.and_then(|c| c.fraction_of_datasheet)),
                ])?;
            }
        }
    }
    let bytes = writer.into_inner().map_err(|e| OutputError::Csv(e.into_error().into()))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// A number as a field; what is not known is empty and never 0.
fn number<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(String::new, |v| v.to_string())
}

#[cfg(test)]
mod tests;
