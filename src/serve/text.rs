//! Text in and out: the tokenizer inside the path of a request.
//!
//! Enters: token ids. Leaves: prompts as text to encode before a request is queued, and words as soon as they are whole. Only models
//! that come with a tokenizer have it; without one these phases take no time, and the report says so.

use std::collections::HashMap;

use crate::model::tokenizer::Tokenizer;
use crate::model::tokenizer::TokenizerError;

/// A tokenizer at work.
#[derive(Debug)]
pub struct Text<'a> {
    tokenizer: &'a Tokenizer,
    prompts: Vec<String>,
    streams: HashMap<usize, Stream>,
    /// Bytes of text that came out.
    pub emitted_bytes: usize,
}

/// The end of an output: tokens whose text is not whole, behind some whose text is.
#[derive(Debug, Default)]
struct Stream {
    tokens: Vec<u32>,
    /// Leading tokens whose text has been given out; kept because a word may look different after another.
    given: usize,
}

impl<'a> Text<'a> {
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
        // A character in the middle decodes to the replacement character; its tokens wait for the rest.
        let whole = finished || !now.ends_with('\u{fffd}');
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
