//! Text in and out: the tokenizer inside the path of a request.
//!
//! Enters: token ids. Leaves: prompts as text to encode before a request is queued, and text as soon as it is complete. A model
//! without a tokenizer has none of it: these phases then take no time, and the report carries a warning.

use std::collections::HashMap;

use crate::weights::tokenizer::{Tokenizer, TokenizerError};
use hbmark_traffic::serving_loop::{TextError, TextPath};

/// A tokenizer at work.
#[derive(Debug)]
pub struct TextPipeline<'a> {
    tokenizer: &'a Tokenizer,
    prompts: Vec<String>,
    streams: HashMap<usize, IncrementalDetokenizer>,
    /// Bytes of text that came out.
    pub emitted_bytes: usize,
}

/// The end of an output: tokens whose text is not whole, behind some whose text is.
#[derive(Debug, Default)]
struct IncrementalDetokenizer {
    tokens: Vec<u32>,
    /// Leading tokens whose text was emitted; kept because the text of a token depends on the ones before.
    given: usize,
}

/// The most tokens of one character: as many as it has bytes, and some in front that a tokenizer may hold back.
const MAX_WAITING: usize = 8;

impl<'a> TextPipeline<'a> {
    /// Prepares the text of every prompt before the clock starts.
    ///
    /// # Errors
    /// When the tokenizer cannot decode a prompt.
    pub fn new(
        tokenizer: &'a Tokenizer,
        prompts: impl Iterator<Item = Vec<u32>>,
    ) -> Result<Self, TokenizerError> {
        let prompts = prompts.map(|tokens| tokenizer.decode(&tokens)).collect::<Result<_, _>>()?;
        Ok(Self { tokenizer, prompts, streams: HashMap::new(), emitted_bytes: 0 })
    }

    /// Encodes a prompt as a server would on arrival. The planned tokens are what is run, so that lengths stay as asked.
    ///
    /// # Errors
    /// When the tokenizer cannot encode it.
    pub fn encode(&self, request: usize) -> Result<usize, TokenizerError> {
        self.prompts.get(request).map_or(Ok(0), |text| self.tokenizer.encode(text).map(|tokens| tokens.len()))
    }

    /// Takes in a token and gives out the text that is whole by now.
    ///
    /// # Errors
    /// When the tokenizer cannot decode.
    pub fn push(&mut self, request: usize, token: u32, finished: bool) -> Result<String, TokenizerError> {
        let stream = self.streams.entry(request).or_default();
        stream.tokens.push(token);
        let before = self.tokenizer.decode(&stream.tokens[..stream.given])?;
        let now = self.tokenizer.decode(&stream.tokens)?;
        // A character in the middle decodes to the replacement character; its tokens wait for the rest. What no rest completes is no
        // text, and does not keep the others waiting.
        let waiting = stream.tokens.len() - stream.given;
        let whole = finished || waiting > MAX_WAITING || !now.ends_with('\u{fffd}');
        let fresh =
            if whole { now.strip_prefix(before.as_str()).unwrap_or(&now).to_owned() } else { String::new() };
        if whole {
            // One token of context is enough for what follows.
            let drop = stream.given;
            stream.tokens.drain(..drop);
            stream.given = stream.tokens.len();
        }
        if finished {
            self.streams.remove(&request);
        }
        self.emitted_bytes += fresh.len();
        Ok(fresh)
    }
}

impl TextPath for TextPipeline<'_> {
    fn encode(&self, request: usize) -> Result<usize, TextError> {
        Ok(Self::encode(self, request)?)
    }
    fn push(&mut self, request: usize, token: u32, finished: bool) -> Result<(), TextError> {
        Self::push(self, request, token, finished)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn fixture(name: &str) -> Tokenizer {
        Tokenizer::open_path(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name))
            .unwrap()
    }

    #[test]
    fn prompts_of_words_encode_to_the_tokens_they_were_made_of() {
        let tokenizer = fixture("models/llama-gqa");
        let words = tokenizer.words();
        assert!(words.len() > 30, "{}", words.len());
        let prompt = |seed: u64, length: u64| -> Vec<u32> {
            let at =
                |i| usize::try_from(hbmark_traffic::workload::splitmix64(seed, i)).unwrap() % words.len();
            (0..length).map(|i| words[at(i)]).collect()
        };
        let prompts: Vec<Vec<u32>> = (1..40).map(|length| prompt(length, length)).collect();
        let text = TextPipeline::new(&tokenizer, prompts.clone().into_iter()).unwrap();
        for (index, prompt) in prompts.iter().enumerate() {
            assert_eq!(text.encode(index).unwrap(), prompt.len());
            assert_eq!(tokenizer.encode(&tokenizer.decode(prompt).unwrap()).unwrap(), *prompt);
        }
    }

    #[test]
    fn text_comes_out_as_soon_as_it_is_whole_and_all_of_it() {
        let tokenizer = fixture("tokenizers/bytes.json");
        let mut text = TextPipeline::new(&tokenizer, std::iter::empty()).unwrap();
        let tokens = tokenizer.encode("a \u{e9}\u{1f980}!").unwrap();
        let pushed: Vec<String> = tokens
            .iter()
            .enumerate()
            .map(|(i, token)| text.push(0, *token, i + 1 == tokens.len()).unwrap())
            .collect();
        assert_eq!(pushed.concat(), "a \u{e9}\u{1f980}!");
        assert_eq!(pushed[2..4], ["", "\u{e9}"], "half a character waits");
    }

    #[test]
    fn bytes_that_are_no_text_do_not_pile_up() {
        let tokenizer = fixture("tokenizers/bytes.json");
        let mut text = TextPipeline::new(&tokenizer, std::iter::empty()).unwrap();
        let half = tokenizer.encode("\u{1f980}").unwrap()[0];
        for _ in 0..100 {
            text.push(0, half, false).unwrap();
            assert!(text.streams[&0].tokens.len() <= 2 * (MAX_WAITING + 1));
        }
        assert!(text.emitted_bytes > 90);
    }
}
