//! Recorded prompts: the first turns of `ShareGPT` conversations, or a file of one's own.
//!
//! Enters: an untrusted file and a tokenizer. Leaves: a [`Dataset`] of prompts with their tokens and the lengths of their outputs, and
//! requests planned from it. What is kept and what is left out follows `vllm bench serve`: of a conversation the first text is the prompt, and
//! the output is as long as the second.

use std::fmt::Display;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Take};
use std::path::{Path, PathBuf};

use serde::de::{IgnoredAny, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use crate::arrivals::{Burst, deadlines};
use crate::workload::{PlannedRequest, PromptSegment, splitmix64};
use hbmark_core::input::{self, InputError, json};
use hbmark_core::result::serving::Arrivals;
use hbmark_core::units::Nanos;

/// A file larger than this is refused. The usual file of `ShareGPT` has 0.7 GB.
const MAX_BYTES: u64 = 2 << 30;
/// Memory for its texts.
const MEMORY: usize = 1 << 30;
/// Bytes of one line of a file of one's own, and memory for its values.
const MAX_LINE: u64 = 16 << 20;
/// Prompts that are kept at most.
const MAX_PROMPTS: usize = 1_000_000;
/// Conversations of fewer tokens in a turn, of longer prompts, and longer as a whole are left out. *Source*: `is_valid_sequence` of vLLM's
/// `benchmarks/datasets`.
const SHAREGPT_TOKENS: (usize, usize, usize) = (4, 1024, 2048);
/// Longest output that may be asked for.
const MAX_OUTPUT: usize = 10_000_000;

/// The kinds of files, by the names of vLLM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// A list of `{"conversations": [{"value": "prompt"}, {"value": "answer"}, ...]}`.
    ShareGpt,
    /// Lines of `{"prompt": "...", "output_tokens": 128}`, the second optional.
    Custom,
}

impl Format {
    pub fn name(self) -> &'static str {
        match self {
            Self::ShareGpt => "ShareGPT",
            Self::Custom => "custom",
        }
    }
}

/// A prompt as recorded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RecordedPrompt {
    pub text: String,
    pub tokens: Vec<u32>,
    pub output_len: usize,
}

/// Prompts in the order of a seed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Dataset {
    pub format: Format,
    pub prompts: Vec<RecordedPrompt>,
    /// Rows that were looked at and are too short or too long.
    pub left_out: usize,
}

/// Why a dataset cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DatasetError {
    #[error("cannot read the dataset {}: {source}", path.display())]
    Read { path: PathBuf, source: InputError },
    #[error("the dataset {} has {bytes} bytes, above the limit of {MAX_BYTES}; cut a part out of it", path.display())]
    TooLarge { path: PathBuf, bytes: u64 },
    #[error(
        "the dataset {} is not a list of ShareGPT conversations, such as [{{\"conversations\": [{{\"value\": \"...\"}}, {{\"value\": \"...\"}}]}}]: {source}",
        path.display()
    )]
    ShareGpt { path: PathBuf, source: serde_json::Error },
    #[error("line {line} of the dataset {} is not such as {{\"prompt\": \"...\", \"output_tokens\": 128}}: {problem}", path.display())]
    Line { path: PathBuf, line: usize, problem: String },
    #[error("row {row} of the dataset {} says nothing of the length of its output; give --output-len", path.display())]
    NoOutput { path: PathBuf, row: usize },
    #[error("a text of the dataset {} has no tokens: {problem}", path.display())]
    Tokens { path: PathBuf, problem: String },
    #[error(
        "the dataset {} has no prompt that can be used: {left_out} rows are too short or too long \
         (of ShareGPT, {SHAREGPT_TOKENS:?}: least tokens of a turn, most of a prompt, most of both)",
        path.display()
    )]
    Empty { path: PathBuf, left_out: usize },
}

/// A row before its tokens are counted.
struct Row {
    prompt: String,
    answer: Option<String>,
    output_tokens: Option<usize>,
}

/// What of a dataset is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Selection {
    /// As many prompts at most.
    pub prompts: usize,
    /// The length of every output, whatever the file says.
    pub output_len: Option<usize>,
    /// The order in which rows are taken.
    pub seed: u64,
}

/// Reads a dataset; `encode` makes tokens of a text.
///
/// # Errors
/// When the file cannot be read, is no such dataset, or has no prompt that can be used.
pub fn read<E: Display>(
    path: &Path,
    format: Format,
    selection: Selection,
    encode: impl Fn(&str) -> Result<Vec<u32>, E>,
) -> Result<Dataset, DatasetError> {
    let own = || path.to_path_buf();
    let (file, bytes) = input::open(path).map_err(|source| DatasetError::Read { path: own(), source })?;
    if bytes > MAX_BYTES {
        return Err(DatasetError::TooLarge { path: own(), bytes });
    }
    // A file that grows while it is read is cut at its first size.
    let mut rows = match format {
        Format::ShareGpt => conversations(path, file.take(bytes))?,
        Format::Custom => lines(path, file.take(bytes))?,
    };
    let mut order: Vec<usize> = (0..rows.len()).collect();
    order.sort_unstable_by_key(|row| splitmix64(splitmix64(selection.seed, 31), *row as u64));
    let mut dataset = Dataset { format, prompts: Vec::new(), left_out: 0 };
    for number in order {
        if dataset.prompts.len() == selection.prompts.min(MAX_PROMPTS) {
            break;
        }
        let row = &mut rows[number];
        let encode = |text: &str| {
            encode(text).map_err(|e| DatasetError::Tokens { path: own(), problem: e.to_string() })
        };
        let tokens = encode(&row.prompt)?;
        let recorded = match (&row.answer, row.output_tokens) {
            (Some(answer), _) if selection.output_len.is_none() => Some(encode(answer)?.len()),
            (_, recorded) => recorded,
        };
        let Some(output_len) = selection.output_len.or(recorded) else {
            return Err(DatasetError::NoOutput { path: own(), row: number + 1 });
        };
        let (least, longest, both) = SHAREGPT_TOKENS;
        let fits = match format {
            Format::ShareGpt => {
                tokens.len() >= least
                    && tokens.len() <= longest
                    && (output_len >= least || selection.output_len.is_some())
                    && tokens.len() + output_len <= both
            }
            Format::Custom => !tokens.is_empty() && (1..=MAX_OUTPUT).contains(&output_len),
        };
        if fits {
            let text = std::mem::take(&mut row.prompt);
            dataset.prompts.push(RecordedPrompt { text, tokens, output_len });
        } else {
            dataset.left_out += 1;
        }
    }
    if dataset.prompts.is_empty() {
        return Err(DatasetError::Empty { path: own(), left_out: dataset.left_out });
    }
    Ok(dataset)
}

#[derive(Deserialize)]
struct Conversation {
    #[serde(default)]
    conversations: FirstTurns,
}

/// The first two texts of a conversation; the rest is not kept.
#[derive(Default)]
struct FirstTurns(Vec<String>);

#[derive(Deserialize)]
struct Turn {
    #[serde(default)]
    value: String,
}

impl<'de> Deserialize<'de> for FirstTurns {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Turns;
        impl<'de> Visitor<'de> for Turns {
            type Value = FirstTurns;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a list of turns")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut turns: A) -> Result<FirstTurns, A::Error> {
                let mut texts = Vec::with_capacity(2);
                while texts.len() < 2 {
                    let Some(Turn { value }) = turns.next_element()? else { return Ok(FirstTurns(texts)) };
                    texts.push(value);
                }
                while turns.next_element::<IgnoredAny>()?.is_some() {}
                Ok(FirstTurns(texts))
            }
        }
        from.deserialize_seq(Turns)
    }
}

fn conversations(path: &Path, mut file: Take<File>) -> Result<Vec<Row>, DatasetError> {
    let all: Vec<Conversation> = json::from_reader(&mut file, MEMORY)
        .map_err(|source| DatasetError::ShareGpt { path: path.to_path_buf(), source })?;
    let of = |Conversation { conversations: FirstTurns(texts) }| {
        let [prompt, answer] = <[String; 2]>::try_from(texts).ok()?;
        Some(Row { prompt, answer: Some(answer), output_tokens: None })
    };
    Ok(all.into_iter().filter_map(of).collect())
}

#[derive(Deserialize)]
struct OwnRow {
    prompt: String,
    #[serde(default)]
    output_tokens: Option<usize>,
}

fn lines(path: &Path, file: Take<File>) -> Result<Vec<Row>, DatasetError> {
    let mut reader = BufReader::with_capacity(1 << 16, file);
    let (mut rows, mut line) = (Vec::new(), String::new());
    let mut taken = 0;
    for number in 1.. {
        let failed = |problem: String| DatasetError::Line { path: path.to_path_buf(), line: number, problem };
        line.clear();
        let read = (&mut reader).take(MAX_LINE).read_line(&mut line).map_err(|e| failed(e.to_string()))?;
        if read == 0 {
            break;
        }
        if read as u64 == MAX_LINE {
            return Err(failed(format!("it is longer than {MAX_LINE} bytes")));
        }
        if line.trim().is_empty() {
            continue;
        }
        let OwnRow { prompt, output_tokens } =
            json::from_str(&line, 4 * line.len() + (1 << 16)).map_err(|error| failed(error.to_string()))?;
        taken += prompt.len() + size_of::<Row>();
        if taken > MEMORY {
            return Err(failed(format!(
                "the texts before it take {} MiB; cut a part out of it",
                MEMORY >> 20
            )));
        }
        rows.push(Row { prompt, answer: None, output_tokens });
    }
    Ok(rows)
}

impl Dataset {
    /// Plans requests with these prompts, in an order drawn from the seed; from the first again where more are asked for than there are.
    pub fn plan(
        &self,
        rate: Option<f64>,
        process: Arrivals,
        burst: Option<Burst>,
        count: usize,
        seed: u64,
    ) -> Vec<PlannedRequest> {
        let mut order: Vec<usize> = (0..self.prompts.len()).collect();
        order.sort_unstable_by_key(|row| splitmix64(splitmix64(seed, 32), *row as u64));
        let arrivals = match rate {
            Some(rate) => deadlines(process, burst, rate, count, splitmix64(seed, 0)),
            None => vec![Nanos(0.0); count],
        };
        let request = |(arrival, row): (Nanos, &usize)| {
            let RecordedPrompt { tokens, output_len, .. } = &self.prompts[*row];
            PlannedRequest {
                arrival,
                // Equal prompts have equal sources, whatever the seed: a cache may know them.
                prompt: vec![PromptSegment {
                    source: splitmix64(33, *row as u64),
                    tokens: u32::try_from(tokens.len()).unwrap_or(u32::MAX),
                }],
                output_len: *output_len,
                recorded: u32::try_from(*row).ok(),
                ..PlannedRequest::default()
            }
        };
        arrivals.into_iter().zip(order.iter().cycle()).map(request).collect()
    }

    /// The recorded prompt of a request.
    pub fn prompt(&self, request: &PlannedRequest) -> Option<&RecordedPrompt> {
        self.prompts.get(request.recorded? as usize)
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    /// A token for each word.
    #[expect(clippy::unnecessary_wraps, reason = "the form of a tokenizer")]
    fn words(text: &str) -> Result<Vec<u32>, Infallible> {
        Ok(text.split_whitespace().map(|word| u32::try_from(word.len()).unwrap()).collect())
    }

    fn read_text(text: &str, format: Format, selection: Selection) -> Result<Dataset, DatasetError> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        read(file.path(), format, selection, words)
    }

    const ALL: Selection = Selection { prompts: 1000, output_len: None, seed: 0 };

    fn conversation(prompt: usize, answer: usize) -> String {
        let turn = |from: &str, n: usize| format!(r#"{{"from": "{from}", "value": "{}"}}"#, "a ".repeat(n));
        let turns = [turn("human", prompt), turn("gpt", answer), turn("human", 99_000)];
        format!(r#"{{"id": "x", "conversations": [{}]}}"#, turns.join(","))
    }

    #[test]
    fn a_conversation_gives_its_first_text_and_the_length_of_the_second() {
        let rows = [conversation(10, 20), conversation(1024, 1024)].join(",");
        let found = read_text(&format!("[{rows}]"), Format::ShareGpt, ALL).unwrap();
        let mut lengths: Vec<_> = found.prompts.iter().map(|p| (p.tokens.len(), p.output_len)).collect();
        lengths.sort_unstable();
        assert_eq!((lengths, found.left_out), (vec![(10, 20), (1024, 1024)], 0));
        assert!(found.prompts.iter().all(|p| p.text.split_whitespace().count() == p.tokens.len()));
    }

    #[test]
    fn too_short_and_too_long_conversations_are_left_out_as_vllm_leaves_them_out() {
        let rows = [(3, 20), (10, 3), (1025, 20), (1000, 1049), (4, 4)].map(|(p, a)| conversation(p, a));
        let alone = r#"{"conversations": [{"value": "a b c d e"}]}, {"id": "nothing"}"#;
        let text = format!("[{}, {alone}]", rows.join(","));
        let found = read_text(&text, Format::ShareGpt, ALL).unwrap();
        assert_eq!((found.prompts.len(), found.left_out), (1, 4));
        // With a length of one's own only prompts matter, and the whole.
        let own = Selection { output_len: Some(2), ..ALL };
        let found = read_text(&text, Format::ShareGpt, own).unwrap();
        assert_eq!((found.prompts.len(), found.left_out), (3, 2));
        assert!(found.prompts.iter().all(|p| p.output_len == 2));
    }

    #[test]
    fn lines_of_ones_own_have_a_length_or_are_given_one() {
        let text = "{\"prompt\": \"one two\", \"output_tokens\": 7}\n\n{\"prompt\": \"three\"}\n";
        let given = read_text(text, Format::Custom, Selection { output_len: Some(5), ..ALL }).unwrap();
        assert_eq!(given.prompts.iter().map(|p| p.output_len).collect::<Vec<_>>(), [5, 5]);
        let missing = read_text(text, Format::Custom, ALL).unwrap_err();
        assert!(
            missing.to_string().contains("row 2") && missing.to_string().contains("--output-len"),
            "{missing}"
        );
    }

    #[test]
    fn what_is_no_dataset_is_named() {
        let of = |text: &str, format| read_text(text, format, ALL).unwrap_err().to_string();
        assert!(of("{}", Format::ShareGpt).contains("not a list of ShareGPT conversations"));
        assert!(of("[]", Format::ShareGpt).contains("no prompt that can be used"));
        assert!(of("[{\"conversations\": 3}]", Format::ShareGpt).contains("not a list of ShareGPT"));
        assert!(of("{\"prompt\": 3}", Format::Custom).contains("line 1"));
        assert!(of("{\"prompt\": \"a\", \"output_tokens\": 0}", Format::Custom).contains("no prompt"));
        assert!(of("\u{0}", Format::Custom).contains("line 1"));
        let folder = tempfile::tempdir().unwrap();
        let error = read(folder.path(), Format::Custom, ALL, words).unwrap_err().to_string();
        assert!(error.contains("a folder"), "{error}");
    }

    #[test]
    fn a_seed_decides_which_rows_and_in_which_order() {
        let rows =
            (1..200).map(|n| format!("{{\"prompt\": \"{}\", \"output_tokens\": 1}}\n", "a ".repeat(n)));
        let text = rows.collect::<Vec<_>>().concat();
        let of = |seed| read_text(&text, Format::Custom, Selection { prompts: 20, seed, ..ALL }).unwrap();
        assert_eq!(of(1), of(1));
        assert_ne!(of(1), of(2));
        let dataset = of(1);
        let lengths = |seed| {
            let plan = dataset.plan(Some(10.0), Arrivals::Poisson, None, 30, seed);
            assert!(plan.is_sorted_by(|a, b| a.arrival.0 <= b.arrival.0));
            plan.iter().map(PlannedRequest::prompt_len).collect::<Vec<_>>()
        };
        assert_eq!(lengths(5), lengths(5));
        assert_ne!(lengths(5), lengths(6));
        assert_eq!(lengths(5)[..10], lengths(5)[20..], "from the first again");
        let plan = dataset.plan(None, Arrivals::Poisson, None, 3, 5);
        for request in &plan {
            assert_eq!(dataset.prompt(request).unwrap().tokens.len(), request.prompt_len());
        }
    }
}
