//! The tokenizer of a model: `tokenizer.json`, checked against the model's vocabulary.
//!
//! Enters: a folder. Leaves: a [`Tokenizer`] that turns text into token ids and back. A token id is an index into the
//! embedding table, so a text with one beyond its rows is an error here and not a read out of bounds on a device.
//!
//! A `tokenizer.json` carries regular expressions and replacements of its author's. They are looked over before the tokenizers crate sees
//! them: what could grow without bounds is refused, and what could run without bounds is run beside a clock.

mod validate;

use std::borrow::Borrow;
use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Once, mpsc};
use std::time::{Duration, Instant};

use super::loading::{SizedFile, WeightsError};
use hbmark_core::units::whole;
use validate::Vetted;

const FILE: &str = "tokenizer.json";
/// The largest in use (vocabularies of 250,000 with merges) are near 35 MB.
const MAX_BYTES: u64 = 64 << 20;
/// Far above the longest prompt.
const MAX_TEXT: usize = 16 << 20;
/// A text after all replacements, or one that is decoded: some thirty times that in memory.
const MAX_GROWN: f64 = (64 << 20) as f64;
/// The longest token in use has 256 bytes.
const MAX_TOKEN: usize = 4 << 10;
/// For reading a file; one of 64 MiB takes a few seconds.
const OPENING: Duration = Duration::from_mins(1);
/// For all that is run beside the clock together: so much, and for every call and byte as much again as a slow machine needs.
const SPARE: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 10 });
const PER_CALL: Duration = Duration::from_millis(1);
const PER_BYTE: Duration = Duration::from_micros(10);
/// Steps of a search that are run without a clock: a few seconds of them.
const MAX_UNTIMED: u64 = 10_000_000_000;

/// Words that are looked for: enough that prompts differ, few enough to be tried in a moment.
const MAX_WORDS: usize = 4096;

/// Why a tokenizer cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    #[error(transparent)]
    File(Box<WeightsError>),
    #[error("{} is not a tokenizer: {problem}", path.display())]
    Invalid { path: PathBuf, problem: String },
    #[error(
        "{} knows token {token:?} with id {id}, but the model's vocabulary ends at {vocab_size}; \
         the tokenizer is of another model",
        path.display()
    )]
    BeyondVocabulary { path: PathBuf, token: String, id: u32, vocab_size: usize },
    #[error(
        "the text has {token:?}, which {} encodes as id {id}, but the model's vocabulary ends at {vocab_size}; leave it out of the text",
        path.display()
    )]
    BeyondTable { path: PathBuf, token: String, id: u32, vocab_size: usize },
    #[error("{} cannot encode a text of {bytes} bytes: {problem}", path.display())]
    Encode { path: PathBuf, bytes: usize, problem: String },
    #[error("{} cannot decode {tokens} tokens: {problem}", path.display())]
    Decode { path: PathBuf, tokens: usize, problem: String },
}

impl From<WeightsError> for TokenizerError {
    fn from(error: WeightsError) -> Self {
        Self::File(Box::new(error))
    }
}

/// Text ↔ token ids.
#[derive(Debug)]
pub struct Tokenizer {
    path: PathBuf,
    inner: Arc<tokenizers::Tokenizer>,
    vetted: Vetted,
    /// Bytes of the longest token.
    longest: usize,
    /// Rows of the model's embedding table, where there is a model.
    rows: usize,
    /// Nanoseconds that may still be spent beside the clock.
    left: AtomicU64,
    /// A text took too long, and its thread may still be at it.
    stuck: AtomicBool,
}

impl Tokenizer {
    /// Reads a tokenizer that is given by itself: a file, or a folder with a `tokenizer.json`.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_path(path: &Path) -> Result<Self, TokenizerError> {
        if path.is_dir() { Self::open(path) } else { Self::read(&SizedFile::open(path)?) }
    }

    /// Reads `tokenizer.json` of a model's folder, of at most 64 MiB.
    ///
    /// # Errors
    /// When the file is not there, not a plain file of the folder, too large, not a tokenizer, or has a part that could run or grow
    /// without bounds.
    pub fn open(folder: &Path) -> Result<Self, TokenizerError> {
        Self::read(&SizedFile::open_within(folder, FILE)?)
    }

    fn read(file: &SizedFile) -> Result<Self, TokenizerError> {
        let path = file.path().to_path_buf();
        let bytes = file.read_all(MAX_BYTES)?;
        let invalid = |problem| TokenizerError::Invalid { path: path.clone(), problem };
        let (inner, vetted, longest) = in_time(OPENING, move || parse(&bytes))
            .unwrap_or_else(|| Err(format!("reading it takes longer than {} s", OPENING.as_secs())))
            .map_err(invalid)?;
        let left = AtomicU64::new(nanoseconds(SPARE));
        let (inner, rows) = (Arc::new(inner), usize::MAX);
        Ok(Self { path, inner, vetted, longest, rows, left, stuck: AtomicBool::new(false) })
    }

    /// Checks that every id indexes a row of an embedding table of `vocab_size` rows. The table may have more rows than
    /// there are tokens: they are padding. Special tokens may lie beyond it, such as Gemma 3's for images beside a model of text alone; a text
    /// that has one is not encoded from here on.
    ///
    /// # Errors
    /// When the id of another token is `vocab_size` or above; the largest is named.
    pub fn check_vocab(&mut self, vocab_size: usize) -> Result<(), TokenizerError> {
        self.rows = vocab_size;
        let added = self.inner.get_added_tokens_decoder();
        let is_special = |id: &u32| added.get(id).is_some_and(|token| token.special);
        let vocabulary = self.inner.get_vocab(true).into_iter();
        match vocabulary.filter(|(_, id)| !is_special(id)).max_by_key(|(_, id)| *id) {
            Some((token, id)) if id as usize >= vocab_size => {
                let (path, token) = (self.path.clone(), shortened(&token));
                Err(TokenizerError::BeyondVocabulary { path, token, id, vocab_size })
            }
            _ => Ok(()),
        }
    }

    /// One more than the largest token id.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab(true).into_values().max().map_or(0, |id| id as usize + 1)
    }

    /// Tokens of which texts can be made that encode to just these tokens again: whole words behind a space. Few or none where the
    /// tokenizer has no such words.
    pub fn words(&self) -> Vec<u32> {
        // GPT-2's and SentencePiece's way of writing a space.
        let word = |name: &str| {
            let rest = name.strip_prefix(['\u{120}', '\u{2581}']).unwrap_or_default();
            !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_lowercase())
        };
        let mut words: Vec<u32> = self
            .inner
            .get_vocab(false)
            .into_iter()
            .filter(|(name, _)| word(name))
            .map(|(_, id)| id)
            .collect();
        words.sort_unstable();
        words.truncate(MAX_WORDS);
        let comes_back = |id: &u32| {
            let text = self.decode(&[*id, *id]);
            text.and_then(|text| self.encode(&text)).is_ok_and(|again| again == [*id, *id])
        };
        words.retain(comes_back);
        words
    }

    /// The id of a token by its name.
    pub fn token_id(&self, name: &str) -> Option<u32> {
        self.inner.token_to_id(name)
    }

    /// The tokenizer as a document: not its file, whose ids of added tokens are not always those that are used.
    pub(crate) fn json(&self) -> Result<serde_json::Value, String> {
        let text = self.inner.to_string(false).map_err(|error| error.to_string())?;
        serde_json::from_str(&text).map_err(|error| error.to_string())
    }

    /// The token ids of a text, without special tokens around it.
    ///
    /// # Errors
    /// When the text is above 16 MiB, or 64 MiB after all replacements, when it has no tokens here, or when a pattern of the tokenizer gives
    /// up on it or takes longer than ten seconds, or when it has a token beyond the model's embedding table.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        let failed = |problem| {
            let path = self.path.clone();
            TokenizerError::Encode { path, bytes: text.len(), problem }
        };
        if text.len() > MAX_TEXT {
            return Err(failed(format!("a text is at most {MAX_TEXT} bytes")));
        }
        let grown = text.len() as f64 * self.vetted.growth;
        if grown > MAX_GROWN {
            return Err(failed(format!(
                "its replacements may make that {} times as long, and {} MiB are the limit; give a shorter text",
                self.vetted.growth,
                MAX_GROWN / f64::from(1 << 20)
            )));
        }
        let ids = self
            .guarded(text, whole(grown.ceil()), |inner, text: &str| {
                inner.encode_fast(text, false).map(|encoding| encoding.get_ids().to_vec())
            })
            .map_err(failed)?;
        match ids.iter().find(|id| **id as usize >= self.rows) {
            None => Ok(ids),
            Some(&id) => {
                let token = shortened(&self.inner.id_to_token(id).unwrap_or_default());
                Err(TokenizerError::BeyondTable { path: self.path.clone(), token, id, vocab_size: self.rows })
            }
        }
    }

    /// The text of token ids, special tokens left out.
    ///
    /// # Errors
    /// When the decoder of the tokenizer fails, or the text would be above 64 MiB.
    pub fn decode(&self, tokens: &[u32]) -> Result<String, TokenizerError> {
        let failed =
            |problem| TokenizerError::Decode { path: self.path.clone(), tokens: tokens.len(), problem };
        let grown = |bytes: usize| bytes as f64 * self.vetted.decoded_growth;
        let mut bytes = tokens.len().saturating_mul(self.longest);
        if grown(bytes) > MAX_GROWN {
            // Most tokens are not the longest.
            let length = |token: &u32| self.inner.id_to_token(*token).map_or(0, |name| name.len());
            bytes = tokens.iter().map(length).sum();
            if grown(bytes) > MAX_GROWN {
                return Err(failed(format!(
                    "their text may have {:.0} MiB, and {} are the limit; give fewer tokens",
                    grown(bytes) / f64::from(1 << 20),
                    MAX_GROWN / f64::from(1 << 20)
                )));
            }
        }
        // What most have.
        let usual = tokens.len().saturating_mul(16).min(bytes);
        self.guarded(tokens, whole(grown(usual).ceil()), |inner, tokens: &[u32]| inner.decode(tokens, true))
            .map_err(failed)
    }

    /// Runs the crate where its panics are errors, and beside a clock where it may take long. Rust has no way to end a thread: one that is
    /// late is left behind, and the tokenizer refuses everything from then on.
    fn guarded<I, T>(
        &self,
        input: &I,
        bytes: u64,
        run: fn(&tokenizers::Tokenizer, &I) -> tokenizers::Result<T>,
    ) -> Result<T, String>
    where
        I: ?Sized + ToOwned + 'static,
        I::Owned: Borrow<I> + Send + 'static,
        T: Send + 'static,
    {
        let plainly = |inner: &tokenizers::Tokenizer, input: &I| {
            unpanicked(|| run(inner, input).map_err(|error| shortened(&error.to_string())))
                .and_then(|done| done)
        };
        // A search may look at all that follows, from every place.
        let steps = self.vetted.cost.map(|cost| cost.saturating_mul(bytes).saturating_mul(bytes));
        if steps.is_some_and(|steps| steps <= MAX_UNTIMED) {
            return plainly(&self.inner, input);
        }
        if self.stuck.load(Ordering::Relaxed) {
            return Err(
                "an earlier text is still being worked on; a pattern of this tokenizer has no end".to_owned()
            );
        }
        let more = nanoseconds(PER_CALL).saturating_add(nanoseconds(PER_BYTE).saturating_mul(bytes));
        let left = self.left.fetch_add(more, Ordering::Relaxed).saturating_add(more);
        let begin = Instant::now();
        let (inner, owned) = (Arc::clone(&self.inner), input.to_owned());
        let work = move || {
            unpanicked(|| run(&inner, owned.borrow()).map_err(|error| shortened(&error.to_string())))
                .and_then(|done| done)
        };
        let done = in_time(Duration::from_nanos(left), work);
        let spent = nanoseconds(begin.elapsed());
        let _ = self
            .left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| Some(left.saturating_sub(spent)));
        done.unwrap_or_else(|| {
            self.stuck.store(true, Ordering::Relaxed);
            Err(format!("its patterns take longer than {:.0} s", Duration::from_nanos(left).as_secs_f64()))
        })
    }
}

/// The tokenizer of a file, what was found in it, and the bytes of its longest token.
fn parse(bytes: &[u8]) -> Result<(tokenizers::Tokenizer, Vetted, usize), String> {
    let vetted = validate::check_tokenizer(bytes).map_err(|problem| problem.to_string())?;
    // The crate asserts where it should refuse.
    // From text, not bytes: the crate itself then has the code that reads it, and it is not compiled here again.
    let text = std::str::from_utf8(bytes).map_err(|error| error.to_string())?;
    let read = || text.parse::<tokenizers::Tokenizer>().map_err(|error| shortened(&error.to_string()));
    let mut inner = unpanicked(read).and_then(|read| read)?;
    // Both are the file's wishes for training: a length in them would be filled up with memory.
    inner.with_padding(None);
    inner.with_truncation(None).map_err(|error| shortened(&error.to_string()))?;
    let longest = inner.get_vocab(true).keys().map(String::len).max().unwrap_or(0);
    if longest > MAX_TOKEN {
        return Err(format!("it has a token of {longest} bytes, above the limit of {MAX_TOKEN}"));
    }
    Ok((inner, vetted, longest))
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// The result of some work, or nothing where it takes longer; its thread is then left behind.
fn in_time<T: Send + 'static>(time: Duration, work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (sender, receiver) = mpsc::sync_channel(1);
    let work = move || {
        // The receiver is gone when this is late.
        let _ = sender.send(work());
    };
    std::thread::Builder::new().name("tokenizer".to_owned()).spawn(work).ok()?;
    receiver.recv_timeout(time).ok()
}

thread_local! {
    /// This thread is inside the crate.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Turns a panic of the crate into an error; what it was working on is thrown away. Its message is not printed: it may hold what the file
/// wants a terminal to do, and the error says enough.
fn unpanicked<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    static QUIET: Once = Once::new();
    QUIET.call_once(|| {
        let others = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if !INSIDE.get() {
                others(panic);
            }
        }));
    });
    INSIDE.set(true);
    let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
    INSIDE.set(false);
    done.map_err(|_| "it is not consistent: an assertion of the tokenizers crate failed".to_owned())
}

/// The beginning of a text of untrusted length.
fn shortened(text: &str) -> String {
    text.chars().take(200).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORDS: &str = r#"{"version":"1.0","truncation":null,"padding":null,"normalizer":null,
        "added_tokens":[{"id":3,"content":"<eos>","single_word":false,"lstrip":false,"rstrip":false,
                         "normalized":false,"special":true}],
        "pre_tokenizer":{"type":"Whitespace"},"post_processor":null,"decoder":null,
        "model":{"type":"WordLevel","vocab":{"memory":0,"wall":1,"[unk]":2},"unk_token":"[unk]"}}"#;

    fn folder_with(text: &str) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(FILE), text).unwrap();
        folder
    }

    #[test]
    fn text_becomes_ids_and_ids_become_text() {
        let tokenizer = Tokenizer::open(folder_with(WORDS).path()).unwrap();
        assert_eq!(tokenizer.encode("memory wall tower").unwrap(), [0, 1, 2]);
        assert_eq!(tokenizer.decode(&[1, 0, 3]).unwrap(), "wall memory");
    }

    #[test]
    fn a_tokenizer_is_given_as_a_file_or_its_folder() {
        let folder = folder_with(WORDS);
        let by_folder = Tokenizer::open_path(folder.path()).unwrap();
        let by_file = Tokenizer::open_path(&folder.path().join(FILE)).unwrap();
        assert_eq!((by_folder.vocab_size(), by_file.vocab_size()), (4, 4));
        assert_eq!((by_file.token_id("<eos>"), by_file.token_id("tower")), (Some(3), None));
    }

    #[test]
    fn an_id_beyond_the_embedding_table_is_named() {
        let folder = folder_with(WORDS);
        let mut tokenizer = Tokenizer::open(folder.path()).unwrap();
        tokenizer.check_vocab(4).unwrap();
        let error = tokenizer.check_vocab(2).unwrap_err().to_string();
        let tail = "knows token \"[unk]\" with id 2, but the model's vocabulary ends at 2; \
                    the tokenizer is of another model";
        assert!(error.ends_with(tail), "{error}");
        // A token that is added and not special is the tokenizer's own word for something.
        let plain = folder_with(&WORDS.replace(r#""special":true"#, r#""special":false"#));
        let error = Tokenizer::open(plain.path()).unwrap().check_vocab(3).unwrap_err().to_string();
        assert!(error.contains("knows token \"<eos>\" with id 3"), "{error}");
    }

    /// Gemma-3-1b has 262,144 rows, and its tokenizer `<image_soft_token>` with that id.
    #[test]
    fn a_special_token_beyond_the_table_is_an_error_in_a_text_alone() {
        let folder = folder_with(WORDS);
        let mut tokenizer = Tokenizer::open(folder.path()).unwrap();
        assert_eq!(tokenizer.encode("wall<eos>").unwrap(), [1, 3]);
        tokenizer.check_vocab(3).unwrap();
        assert_eq!(tokenizer.encode("memory wall").unwrap(), [0, 1]);
        let error = tokenizer.encode("wall<eos>").unwrap_err().to_string();
        assert!(error.starts_with("the text has \"<eos>\", which "), "{error}");
        assert!(error.contains("id 3, but the model's vocabulary ends at 3"), "{error}");
    }

    #[test]
    fn what_is_no_tokenizer_is_refused_with_its_path() {
        for text in ["", "{}", "[", &"[".repeat(100_000)] {
            let error = Tokenizer::open(folder_with(text).path()).unwrap_err().to_string();
            assert!(error.contains("tokenizer.json is not a tokenizer: "), "{error}");
        }
    }

    /// A pattern in front of the words above.
    fn with_pattern(pattern: &str) -> String {
        let split = serde_json::json!({
            "type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false
        });
        WORDS.replace(r#"{"type":"Whitespace"}"#, &split.to_string())
    }

    #[test]
    fn a_text_that_takes_too_long_is_refused_and_so_is_the_next() {
        let tokenizer = Tokenizer::open(folder_with(&with_pattern(r"(?=y)y")).path()).unwrap();
        let run = |_: &tokenizers::Tokenizer, _: &str| -> tokenizers::Result<()> {
            std::thread::sleep(SPARE * 2);
            Ok(())
        };
        assert_eq!(tokenizer.guarded("a", 1, run).unwrap_err(), "its patterns take longer than 1 s");
        let error = tokenizer.encode("a").unwrap_err().to_string();
        assert!(error.contains("an earlier text is still being worked on"), "{error}");
    }

    #[test]
    fn many_slow_texts_have_no_more_time_than_one() {
        let tokenizer = Tokenizer::open(folder_with(&with_pattern(r"(?=y)y")).path()).unwrap();
        let run = |_: &tokenizers::Tokenizer, _: &str| -> tokenizers::Result<()> {
            std::thread::sleep(SPARE / 5);
            Ok(())
        };
        let refused = (0..10).filter(|_| tokenizer.guarded("a", 1, run).is_err()).count();
        assert!(refused > 0, "ten times a fifth is more than there is");
        assert!(tokenizer.encode("a").is_err(), "and so is everything after it");
    }

    #[test]
    fn a_text_is_short_enough_for_what_the_replacements_make_of_it() {
        let replace = r#"{"type":"Replace","pattern":{"String":"x"},"content":"CONTENT"}"#;
        let with = |content: usize| {
            let replace = replace.replace("CONTENT", &"y".repeat(content));
            let text = WORDS.replace(r#""normalizer":null"#, &format!(r#""normalizer":{replace}"#));
            Tokenizer::open(folder_with(&text).path())
        };
        let tokenizer = with(100).unwrap();
        tokenizer.encode("x memory").unwrap();
        let error = tokenizer.encode(&" ".repeat(800_000)).unwrap_err().to_string();
        assert!(error.contains("may make that 100 times as long, and 64 MiB are the limit"), "{error}");
        let error = with(1_000_000).unwrap_err().to_string();
        assert!(error.contains("1.000e6 times as long, above the limit of 100"), "{error}");
    }

    #[test]
    fn tokens_are_short_and_few_enough_to_be_decoded() {
        let with = |length: usize| {
            Tokenizer::open(folder_with(&WORDS.replace("memory", &"m".repeat(length))).path())
        };
        let tokenizer = with(MAX_TOKEN).unwrap();
        assert_eq!(tokenizer.decode(&[0]).unwrap().len(), MAX_TOKEN);
        let error = tokenizer.decode(&vec![0; 20_000]).unwrap_err().to_string();
        assert!(error.contains("78 MiB, and 64 are the limit"), "{error}");
        // Short tokens beside a long one.
        tokenizer.decode(&vec![1; 20_000]).unwrap();
        let error = with(MAX_TOKEN + 1).unwrap_err().to_string();
        assert!(error.contains("a token of 4097 bytes, above the limit of 4096"), "{error}");
    }

    #[test]
    fn a_panic_inside_the_crate_is_an_error() {
        let tokenizer = Tokenizer::open(folder_with(WORDS).path()).unwrap();
        let run = |_: &tokenizers::Tokenizer, _: &str| -> tokenizers::Result<()> { panic!("planted") };
        assert!(tokenizer.guarded("a", 1, run).unwrap_err().contains("an assertion of the tokenizers crate"));
    }

    #[test]
    fn padding_to_exabytes_is_not_obeyed() {
        let padding = r#""padding":{"strategy":{"Fixed":1000000000000000000},"direction":"Right","pad_to_multiple_of":null,
            "pad_id":0,"pad_type_id":0,"pad_token":"memory"}"#;
        let folder = folder_with(&WORDS.replace(r#""padding":null"#, padding));
        assert_eq!(Tokenizer::open(folder.path()).unwrap().encode("wall").unwrap(), [1]);
    }

    #[test]
    fn a_tokenizer_above_the_limit_is_not_read() {
        let folder = folder_with("");
        let file = std::fs::File::options().write(true).open(folder.path().join(FILE)).unwrap();
        file.set_len(MAX_BYTES + 1).unwrap();
        let error = Tokenizer::open(folder.path()).unwrap_err().to_string();
        assert!(error.contains("is 67108865 bytes, above the limit of 67108864"), "{error}");
    }
}
