//! Recorded traffic: arrival times, lengths and prefix classes of real services.
//!
//! Enters: an untrusted file. Leaves: [`TraceRequest`]s in order of arrival, or an error with the line number. The first line decides
//! among five formats:
//!
//! | format | line |
//! |---|---|
//! | Azure LLM inference (2023, 2024) | `TIMESTAMP,ContextTokens,GeneratedTokens` · `2023-11-16 18:15:46.6805900,374,44` |
//! | BurstGPT | `Timestamp,Model,Request tokens,Response tokens,...` · `5,ChatGPT,472,18,...`, seconds |
//! | Vidur | `arrived_at,num_prefill_tokens,num_decode_tokens` · `0.35,374,44`, seconds |
//! | Mooncake | `{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, ...]}`, milliseconds, blocks of 512 tokens |
//! | hbmark | `{"arrival_s": 0.5, "input_tokens": 300, "output_tokens": 20, "prefix_ids": [7], "prefix_block": 256, "priority": 0}`, the last three optional |
//!
//! Only times, lengths and prefix classes are read; text is never kept. Rows with a length of 0 (BurstGPT's failed requests) are left out
//! and counted. Every number is checked against a bound.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use hbmark_core::input::{self, InputError};
use hbmark_core::units::Nanos;

/// A file larger than this is refused.
const MAX_BYTES: u64 = 1 << 30;
/// Rows kept at most.
const MAX_REQUESTS: usize = 5_000_000;
/// Memory that a trace may take beyond the size of its file.
const MEMORY: usize = 56 << 20;
/// Tokens of one request; ten times the longest context of any model.
const MAX_TOKENS: u64 = 10_000_000;
/// Bytes of one line.
const MAX_LINE: usize = 1 << 20;
/// Memory for the values of one line.
const LINE_BUDGET: usize = 8 << 20;
/// Tokens of one of Mooncake's hashed blocks, by its paper.
const MOONCAKE_BLOCK: usize = 512;
/// A trace spans a year at most.
const MAX_SECONDS: f64 = 366.0 * 86_400.0;

/// One recorded request.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct TraceRequest {
    /// Since the first request of the trace.
    pub arrival: Nanos,
    pub input_tokens: usize,
    pub output_tokens: usize,
    /// Classes of consecutive blocks of the prompt: the same class is the same text.
    pub prefix_ids: Vec<u64>,
    /// Tokens of a class's block; 0 without classes.
    pub prefix_block: usize,
    pub priority: i32,
}

/// A trace as read.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Trace {
    pub format: &'static str,
    pub requests: Vec<TraceRequest>,
    /// Rows with a length of 0.
    pub left_out: usize,
}

/// Why a trace cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    #[error("cannot read the trace {}: {source}", path.display())]
    Read { path: PathBuf, source: InputError },
    #[error("the trace {} has {bytes} bytes, above the limit of {MAX_BYTES}; cut a window out of it", path.display())]
    TooLarge { path: PathBuf, bytes: u64 },
    #[error("the trace {} is not text", path.display())]
    NotText { path: PathBuf },
    #[error(
        "the trace {} starts with `{start}`, which is none of Azure CSV, BurstGPT CSV, Vidur CSV, Mooncake JSONL or hbmark JSONL \
         (`hbmark serve --help` shows a line of each)",
        path.display()
    )]
    UnknownFormat { path: PathBuf, start: String },
    #[error("the trace {} has no requests", path.display())]
    Empty { path: PathBuf },
    #[error("line {line} of the trace {}: {problem}", path.display())]
    Line { path: PathBuf, line: usize, problem: String },
    #[error("the trace {} has more requests than can be kept, {kept} of them; cut a window out of it", path.display())]
    TooMany { path: PathBuf, kept: usize },
}

/// Reads a trace; at most `limit` requests of it.
///
/// # Errors
/// When the file cannot be read, or a line is invalid.
pub fn read(path: &Path, limit: Option<usize>) -> Result<Trace, TraceError> {
    let unreadable = |source| TraceError::Read { path: path.to_path_buf(), source };
    let (file, bytes) = input::open(path).map_err(unreadable)?;
    if bytes > MAX_BYTES {
        return Err(TraceError::TooLarge { path: path.to_path_buf(), bytes });
    }
    // A file that grows while it is read is cut at its first size.
    parse(BufReader::with_capacity(1 << 16, file.take(bytes)), bytes, path, limit)
}

/// Parses a line; its time is in nanoseconds on the trace's own scale.
#[derive(Clone, Copy)]
enum Reader {
    /// A table: where its columns of time, prompt and output tokens are.
    Columns(fn([&str; 3]) -> Result<TraceRequest, String>, [usize; 3]),
    /// A JSON object per line.
    Objects(fn(&str) -> Result<TraceRequest, String>),
}

impl Reader {
    fn read(self, line: &str) -> Result<TraceRequest, String> {
        let (row, columns) = match self {
            Self::Objects(object) => return object(line),
            Self::Columns(row, columns) => (row, columns),
        };
        let fields: Vec<&str> = line.split(',').collect();
        let needed = columns.map(|column| column + 1).into_iter().fold(0, usize::max);
        if fields.len() < needed {
            return Err(format!("it has fewer than {needed} fields"));
        }
        row(columns.map(|column| fields[column]))
    }
}

/// The format of a trace, its reader, and whether the first line is a heading. Columns of a table are found by name: their order and what else
/// there is differ between releases.
fn recognise(first: &str) -> Option<(&'static str, Reader, bool)> {
    let has = |name: &str| first.starts_with('{') && first.contains(name);
    if has("\"input_length\"") {
        return Some(("Mooncake", Reader::Objects(mooncake), false));
    }
    if has("\"arrival_s\"") {
        return Some(("hbmark", Reader::Objects(own), false));
    }
    let heading: Vec<&str> = first.split(',').map(|name| name.trim().trim_matches('"')).collect();
    let columns = |names: [&str; 3]| {
        let at = |name| heading.iter().position(|column| *column == name);
        Some([at(names[0])?, at(names[1])?, at(names[2])?])
    };
    let azure = columns(["TIMESTAMP", "ContextTokens", "GeneratedTokens"])
        .map(|columns| ("Azure", Reader::Columns(azure, columns), true));
    let burstgpt = || {
        let columns = columns(["Timestamp", "Request tokens", "Response tokens"])?;
        Some(("BurstGPT", Reader::Columns(burstgpt, columns), true))
    };
    let vidur = || {
        let columns = columns(["arrived_at", "num_prefill_tokens", "num_decode_tokens"])?;
        Some(("Vidur", Reader::Columns(vidur, columns), true))
    };
    azure.or_else(burstgpt).or_else(vidur)
}

/// Reads a trace of `bytes` bytes line by line; memory is at most a fixed amount beyond that size.
fn parse(input: impl BufRead, bytes: u64, path: &Path, limit: Option<usize>) -> Result<Trace, TraceError> {
    let path = || path.to_path_buf();
    let mut lines = Lines { input, number: 0, buffer: Vec::new() };
    let mut form: Option<(&'static str, Reader)> = None;
    let mut requests = TraceBuffer::new(bytes);
    let (mut left_out, mut origin, mut latest) = (0, None, 0.0_f64);
    while requests.kept.len() < limit.unwrap_or(usize::MAX)
        && let Some(line) = lines.next(&path)?
    {
        let number = lines.number;
        let fail = |problem: String| TraceError::Line { path: path(), line: number, problem };
        let line =
            std::str::from_utf8(&lines.buffer[line]).map_err(|_| TraceError::NotText { path: path() })?;
        let line = line.trim_start_matches('\u{feff}').trim();
        if line.is_empty() {
            continue;
        }
        let reader = if let Some((_, reader)) = form {
            reader
        } else {
            let Some((format, reader, heading)) = recognise(line) else {
                return Err(TraceError::UnknownFormat { path: path(), start: start_of(line) });
            };
            form = Some((format, reader));
            if heading {
                continue;
            }
            reader
        };
        let mut request = reader.read(line).map_err(fail)?;
        let arrival = request.arrival.0 - *origin.get_or_insert(request.arrival.0);
        if arrival < latest {
            return Err(fail("it is earlier than the line before; sort the trace by time".to_owned()));
        }
        if arrival > MAX_SECONDS * 1e9 {
            return Err(fail(format!("it is {:.0} days after the first", arrival / 86_400e9)));
        }
        latest = arrival;
        if request.input_tokens == 0 || request.output_tokens == 0 {
            left_out += 1;
            continue;
        }
        request.arrival = Nanos(arrival);
        if !requests.keep(request) {
            return Err(TraceError::TooMany { path: path(), kept: requests.kept.len() });
        }
    }
    let (Some((format, _)), Some(first)) = (form, requests.kept.first()) else {
        return Err(TraceError::Empty { path: path() });
    };
    // Times are relative to the first kept request.
    let start = first.arrival.0;
    for request in &mut requests.kept {
        request.arrival.0 -= start;
    }
    Ok(Trace { format, requests: requests.kept, left_out })
}

fn start_of(line: &str) -> String {
    line.chars().take(60).map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// The lines of a file, each of at most [`MAX_LINE`] bytes.
struct Lines<R> {
    input: R,
    /// Number of the last line read, from 1.
    number: usize,
    buffer: Vec<u8>,
}

impl<R: BufRead> Lines<R> {
    /// The next line as a range of the buffer, without its line end; none at the end of the file.
    fn next(&mut self, path: &dyn Fn() -> PathBuf) -> Result<Option<std::ops::Range<usize>>, TraceError> {
        self.buffer.clear();
        let most = MAX_LINE as u64 + 1;
        let read = (&mut self.input).take(most).read_until(b'\n', &mut self.buffer);
        match read {
            Ok(0) => Ok(None),
            Ok(_) => {
                self.number += 1;
                let end = self.buffer.len() - usize::from(self.buffer.ends_with(b"\n"));
                if end > MAX_LINE {
                    let problem = format!("it is longer than the limit of {MAX_LINE} bytes");
                    return Err(TraceError::Line { path: path(), line: self.number, problem });
                }
                Ok(Some(0..end))
            }
            Err(source) => Err(TraceError::Read { path: path(), source: source.into() }),
        }
    }
}

/// The requests of a trace, and the memory left for more.
struct TraceBuffer {
    kept: Vec<TraceRequest>,
    left: usize,
}

impl TraceBuffer {
    fn new(bytes: u64) -> Self {
        let whole = usize::try_from(bytes).unwrap_or(usize::MAX);
        Self { kept: Vec::new(), left: whole.saturating_add(MEMORY) }
    }

    /// Keeps a request if there is memory for it.
    fn keep(&mut self, request: TraceRequest) -> bool {
        let more = if self.kept.len() == self.kept.capacity() { self.kept.len() / 8 + 1024 } else { 0 };
        let cost = more * size_of::<TraceRequest>() + request.prefix_ids.capacity() * size_of::<u64>();
        let Some(left) = self.left.checked_sub(cost).filter(|_| self.kept.len() < MAX_REQUESTS) else {
            return false;
        };
        self.left = left;
        // Grows by an eighth: doubling would take twice the memory needed.
        self.kept.reserve_exact(more);
        self.kept.push(request);
        true
    }
}

fn plain(arrival: Nanos, input: u64, output: u64) -> TraceRequest {
    let tokens = |count: u64| usize::try_from(count).expect("bounded when read");
    let (input_tokens, output_tokens) = (tokens(input), tokens(output));
    TraceRequest { arrival, input_tokens, output_tokens, ..TraceRequest::default() }
}

fn tokens(what: &str, text: &str) -> Result<u64, String> {
    let text = text.trim();
    let count: u64 = text.parse().map_err(|_| format!("{what} `{}` is not a count", shown(text)))?;
    bounded(what, count)
}

fn bounded(what: &str, count: u64) -> Result<u64, String> {
    if count > MAX_TOKENS {
        return Err(format!("{what} of {count} tokens is above the limit of {MAX_TOKENS}"));
    }
    Ok(count)
}

/// Untrusted text, short and without control characters.
fn shown(text: &str) -> String {
    text.chars().take(40).map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

/// A number in few characters.
fn brief(value: f64) -> String {
    if value.abs() < 1e15 { value.to_string() } else { format!("{value:e}") }
}

fn seconds(value: f64) -> Result<Nanos, String> {
    if !(value.is_finite() && value >= 0.0) {
        return Err(format!("the time {} is not a time", brief(value)));
    }
    if value > 1e11 {
        return Err(format!("the time {} s is beyond any date", brief(value)));
    }
    Ok(Nanos(value * 1e9))
}

fn vidur([arrived, input, output]: [&str; 3]) -> Result<TraceRequest, String> {
    let arrived: f64 =
        arrived.trim().parse().map_err(|_| format!("arrived_at `{}` is not a time", shown(arrived)))?;
    // Whole numbers that passed through a table of floats are written `374.0`.
    let whole = |text: &'_ str| text.trim().trim_end_matches(".0").to_owned();
    let input = tokens("num_prefill_tokens", &whole(input))?;
    Ok(plain(seconds(arrived)?, input, tokens("num_decode_tokens", &whole(output))?))
}

fn azure([time, input, output]: [&str; 3]) -> Result<TraceRequest, String> {
    Ok(plain(civil_time(time)?, tokens("ContextTokens", input)?, tokens("GeneratedTokens", output)?))
}

/// `2023-11-16 18:15:46.6805900`, with or without a fraction or a zone of `+00:00`.
fn civil_time(text: &str) -> Result<Nanos, String> {
    let wrong = || format!("`{}` is not a time such as 2023-11-16 18:15:46.68", shown(text));
    let plain = text.trim().trim_end_matches("+00:00").trim_end_matches('Z');
    let (date, time) = plain.split_once([' ', 'T']).ok_or_else(wrong)?;
    let whole = |text: &str| -> Option<i64> {
        let digits = !text.is_empty() && text.len() <= 4 && text.bytes().all(|b| b.is_ascii_digit());
        digits.then(|| text.parse().ok()).flatten()
    };
    let mut date = date.split('-').map(whole);
    let mut next = || date.next().flatten().ok_or_else(wrong);
    let (year, month, day) = (next()?, next()?, next()?);
    let (clock, fraction) = time.split_once('.').unwrap_or((time, "0"));
    let mut clock = clock.split(':').map(whole);
    let mut next = || clock.next().flatten().ok_or_else(wrong);
    let (hour, minute, second) = (next()?, next()?, next()?);
    let valid =
        (1..=12).contains(&month) && (1..=31).contains(&day) && hour < 24 && minute < 60 && second < 61;
    if !valid || fraction.len() > 9 || !fraction.bytes().all(|b| b.is_ascii_digit()) {
        return Err(wrong());
    }
    // Days since the epoch: the year counted from March, so that the leap day is its last.
    let (y, m) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let (era, year_of_era) = (y.div_euclid(400), y.rem_euclid(400));
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + (153 * m + 2) / 5 + day - 1;
    let days = era * 146_097 + day_of_era - 719_468;
    let seconds = days * 86_400 + hour * 3_600 + minute * 60 + second;
    let fraction: f64 = format!("0.{fraction}").parse().map_err(|_| wrong())?;
    // Relative to 2020, so that nanoseconds stay well inside a float's whole numbers.
    Ok(Nanos(((seconds - 1_577_836_800) as f64).mul_add(1e9, fraction * 1e9)))
}

fn burstgpt([time, input, output]: [&str; 3]) -> Result<TraceRequest, String> {
    let value: f64 =
        time.trim().parse().map_err(|_| format!("Timestamp `{}` is not a number", shown(time)))?;
    Ok(plain(seconds(value)?, tokens("Request tokens", input)?, tokens("Response tokens", output)?))
}

#[derive(Deserialize)]
struct MooncakeTraceLine {
    timestamp: f64,
    input_length: u64,
    output_length: u64,
    #[serde(default)]
    hash_ids: Vec<u64>,
}

fn json<'a, T: Deserialize<'a>>(line: &'a str) -> Result<T, String> {
    input::json::from_str(line, LINE_BUDGET).map_err(|error| input::json::problem(&error))
}

fn mooncake(line: &str) -> Result<TraceRequest, String> {
    let row: MooncakeTraceLine = json(line)?;
    let input = bounded("input_length", row.input_length)?;
    let request = plain(seconds(row.timestamp / 1e3)?, input, bounded("output_length", row.output_length)?);
    with_prefix(request, row.hash_ids, MOONCAKE_BLOCK)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct HbmarkTraceLine {
    arrival_s: f64,
    input_tokens: u64,
    output_tokens: u64,
    #[serde(default)]
    prefix_ids: Vec<u64>,
    #[serde(default)]
    prefix_block: usize,
    #[serde(default)]
    priority: i32,
}

fn own(line: &str) -> Result<TraceRequest, String> {
    let row: HbmarkTraceLine = json(line)?;
    if row.prefix_block == 0 && !row.prefix_ids.is_empty() {
        return Err("prefix_ids without a prefix_block".into());
    }
    let input = bounded("input_tokens", row.input_tokens)?;
    let request = plain(seconds(row.arrival_s)?, input, bounded("output_tokens", row.output_tokens)?);
    let request = with_prefix(request, row.prefix_ids, row.prefix_block)?;
    Ok(TraceRequest { priority: row.priority, ..request })
}

/// Prefix classes cover the prompt's first blocks; the last may be cut by the end of the prompt.
fn with_prefix(mut request: TraceRequest, ids: Vec<u64>, block: usize) -> Result<TraceRequest, String> {
    if !ids.is_empty() && ids.len() > request.input_tokens.div_ceil(block) {
        return Err(format!(
            "{} prefix classes of {block} tokens are more than a prompt of {} tokens has",
            ids.len(),
            request.input_tokens
        ));
    }
    request.prefix_block = if ids.is_empty() { 0 } else { block };
    request.prefix_ids = ids;
    Ok(request)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parsed(text: &str) -> Result<Trace, TraceError> {
        parse(text.as_bytes(), text.len() as u64, Path::new("t"), None)
    }

    fn refused(text: &str, message: &str) {
        let error = parsed(text).unwrap_err().to_string();
        assert!(error.contains(message), "{text:?}: {error}");
    }

    const AZURE: &str = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n";

    fn fixture(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/traces").join(name)
    }

    #[test]
    fn an_azure_trace_is_times_and_lengths() {
        let trace = read(&fixture("azure-conv.csv"), None).unwrap();
        assert_eq!(trace.format, "Azure");
        assert_eq!(trace.requests.len(), 500);
        let second = &trace.requests[1];
        // 18:15:50.9951690 − 18:15:46.6805900.
        assert!((second.arrival.seconds() - 4.314_579).abs() < 1e-6, "{:?}", second.arrival);
        assert_eq!((second.input_tokens, second.output_tokens), (396, 109));
    }

    #[test]
    fn a_mooncake_trace_keeps_its_prefix_classes() {
        let trace = read(&fixture("mooncake-conversation.jsonl"), None).unwrap();
        assert_eq!((trace.format, trace.requests.len()), ("Mooncake", 60));
        let first = &trace.requests[0];
        assert_eq!((first.input_tokens, first.output_tokens, first.prefix_block), (6758, 500, 512));
        assert_eq!(first.prefix_ids, (0..14).collect::<Vec<u64>>());
        assert_eq!(trace.requests[1].prefix_ids[0], 0, "the first block is shared");
    }

    #[test]
    fn burstgpts_failed_requests_are_left_out_and_counted() {
        let trace = read(&fixture("burstgpt.csv"), None).unwrap();
        assert_eq!(trace.format, "BurstGPT");
        assert_eq!((trace.requests.len(), trace.left_out), (38, 4));
        assert!((trace.requests[1].arrival.seconds() - 40.0).abs() < 1e-9);
    }

    #[test]
    fn columns_are_found_by_name_whatever_a_release_puts_beside_them() {
        for (heading, row) in [
            (
                "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type",
                ["5,1,2.5,ChatGPT,472,18,490,Conversation log", "45,2,0.5,GPT-4,1087,230,1317,API log"],
            ),
            (
                "Log Type,Timestamp,Model,\"Request tokens\",\"Response tokens\"",
                ["API log,5,ChatGPT,472,18", "API log,45,GPT-4,1087,230"],
            ),
        ] {
            let trace = parsed(&format!("{heading}\n{}\n", row.join("\n"))).unwrap();
            let lengths: Vec<_> = trace.requests.iter().map(|r| (r.input_tokens, r.output_tokens)).collect();
            assert_eq!((trace.format, lengths), ("BurstGPT", vec![(472, 18), (1087, 230)]));
            assert!((trace.requests[1].arrival.seconds() - 40.0).abs() < 1e-9);
        }
        refused("Timestamp,Model,Request tokens,Tokens\n", "none of Azure CSV");
        refused("Timestamp,Session ID,Request tokens,Response tokens\n1,2,3\n", "fewer than 4 fields");
    }

    #[test]
    fn a_vidur_trace_is_seconds_and_lengths() {
        let heading = "arrived_at,num_prefill_tokens,num_decode_tokens\n";
        let trace = parsed(&format!("{heading}0.35,374,44\n1.1,396.0,109.0\n")).unwrap();
        assert_eq!(trace.format, "Vidur");
        assert!((trace.requests[1].arrival.seconds() - 0.75).abs() < 1e-9);
        assert_eq!((trace.requests[1].input_tokens, trace.requests[1].output_tokens), (396, 109));
        refused(&format!("{heading}soon,1,1\n"), "arrived_at `soon` is not a time");
        refused(&format!("{heading}1,1\n"), "fewer than 3 fields");
        refused(&format!("{heading}-1,1,1\n"), "is not a time");
    }

    #[test]
    fn our_own_format_reads_what_it_documents() {
        let line = r#"{"arrival_s": 0.5, "input_tokens": 300, "output_tokens": 20, "prefix_ids": [7], "prefix_block": 256, "priority": 2}"#;
        let trace = parsed(&format!("{line}\n\n{}\n", line.replace("0.5", "0.75"))).unwrap();
        assert_eq!(trace.format, "hbmark");
        assert_eq!(trace.requests[1].arrival, Nanos(0.25e9));
        assert_eq!((trace.requests[0].prefix_block, trace.requests[0].priority), (256, 2));
    }

    #[test]
    fn hostile_lines_are_refused_by_number() {
        refused("", "has no requests");
        refused(AZURE, "has no requests");
        refused("hello\u{7}\n", "starts with `hello ");
        let azure = |rows: &str| format!("{AZURE}2023-11-16 18:15:46.68,374,44\r\n{rows}");
        refused(
            &azure("2023-11-16 18:15:45.0,1,1"),
            "line 3 of the trace t: it is earlier than the line before",
        );
        refused(&azure("2023-11-16 18:15:47,-1,1"), "ContextTokens `-1` is not a count");
        refused(&azure("2023-11-16 18:15:47,1"), "it has fewer than 3 fields");
        refused(&azure("2023-13-16 18:15:47,1,1"), "is not a time such as");
        refused(&azure("2023-11-16 18:15:47.1234567890,1,1"), "is not a time such as");
        refused(&azure("2030-11-16 18:15:47,1,1"), "days after the first");
        refused(&azure("2023-11-16 18:15:47,99999999999999999999,1"), "is not a count");
        refused(&azure("2023-11-16 18:15:47,99999999,1"), "above the limit of 10000000");
        let json =
            |more: &str| format!("{{\"timestamp\": 0, \"input_length\": 10, \"output_length\": 1{more}}}");
        refused(&json(", \"hash_ids\": [1, 2]"), "2 prefix classes of 512 tokens are more than");
        refused(&json("").replace("10,", "1e400,"), "line 1 of the trace t: ");
        refused(&json("").replace("\"timestamp\": 0", "\"timestamp\": -5"), "the time -0.005 is not a time");
        refused(&json("").replace('}', ""), "line 1 of the trace t: ");
        let own = r#"{"arrival_s": 1, "input_tokens": 3, "output_tokens": 2, "#;
        refused(&format!("{own}\"prefix_ids\": [1]}}"), "prefix_ids without a prefix_block");
        refused(&format!("{own}\"text\": \"secret\"}}"), "unknown field `text`");
        refused(&format!("{AZURE}{}", "9".repeat(MAX_LINE + 1)), "longer than the limit of 1048576");
        refused("Timestamp,Model,Request tokens,Response tokens\nNaN,x,1,1", "the time NaN is not a time");
    }

    #[test]
    fn a_file_that_is_no_trace_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        assert!(matches!(read(folder.path(), None), Err(TraceError::Read { .. })));
        let path = folder.path().join("t");
        std::fs::write(&path, [0xff, 0xfe, 0x00]).unwrap();
        assert!(matches!(read(&path, None), Err(TraceError::NotText { .. })));
        std::fs::File::create(&path).unwrap().set_len(MAX_BYTES + 1).unwrap();
        assert!(matches!(read(&path, None), Err(TraceError::TooLarge { .. })));
    }

    #[test]
    fn short_lines_do_not_become_more_memory_than_the_file_and_a_fixed_amount() {
        // Seven bytes a line, 64 in memory and more with classes.
        let mut text = String::from("Timestamp,Model,Request tokens,Response tokens\n");
        text.push_str(&"0,,1,1\n".repeat(2_000_000));
        let error = parsed(&text).unwrap_err();
        let TraceError::TooMany { kept, .. } = error else { panic!("{error}") };
        assert!(kept * size_of::<TraceRequest>() <= text.len() + MEMORY, "{kept}");
        let window = parse(text.as_bytes(), text.len() as u64, Path::new("t"), Some(1_000)).unwrap();
        assert_eq!(window.requests.len(), 1_000, "a window of it can be read");
    }

    proptest! {
        #[test]
        fn no_text_makes_the_reader_panic(header in 0usize..4, rest in "\\PC{0,200}") {
            let header = [AZURE, "Timestamp,Model,Request tokens,Response tokens\n", "{\"input_length\"", "{\"arrival_s\""][header];
            let _ = parsed(&format!("{header}{rest}"));
            let _ = parsed(&rest);
        }

        #[test]
        fn civil_times_count_every_second(days in 0u64..20_000, second in 0u64..86_400) {
            let at = |days: u64| {
                let text = hbmark_core::units::rfc3339(days * 86_400 + second);
                civil_time(&text).unwrap()
            };
            prop_assert!((at(days + 1).0 - at(days).0 - 86_400e9).abs() < 1.0);
        }
    }
}
