//! The tokenizer of a model: `tokenizer.json`, held against the model's vocabulary.
//!
//! Enters: a folder. Leaves: a [`Tokenizer`] that turns text into token ids and back. A token id is an index into the
//! embedding table, so one beyond its rows is an error here and not a read out of bounds on a device. It knows no weights.

use std::path::{Path, PathBuf};

use super::weights::{SizedFile, WeightsError};

const FILE: &str = "tokenizer.json";
/// The largest in use (vocabularies of 250,000 with merges) are near 35 MB.
const MAX_BYTES: u64 = 64 << 20;

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
    inner: tokenizers::Tokenizer,
}

impl Tokenizer {
    /// Reads `tokenizer.json` of a model's folder, of at most 64 MiB.
    ///
    /// # Errors
    /// When the file is not there, not a plain file of the folder, too large, or not a tokenizer.
    pub fn open(folder: &Path) -> Result<Self, TokenizerError> {
        let file = SizedFile::open_within(folder, FILE)?;
        let path = file.path().to_path_buf();
        let inner = tokenizers::Tokenizer::from_bytes(file.read_all(MAX_BYTES)?)
            .map_err(|error| TokenizerError::Invalid { path: path.clone(), problem: error.to_string() })?;
        Ok(Self { path, inner })
    }

    /// Checks that every id indexes a row of an embedding table of `vocab_size` rows. The table may have more rows than
    /// there are tokens: they are padding.
    ///
    /// # Errors
    /// When an id is `vocab_size` or above; the largest is named.
    pub fn check_vocab(&self, vocab_size: usize) -> Result<(), TokenizerError> {
        let largest = self.inner.get_vocab(true).into_iter().max_by_key(|(_, id)| *id);
        match largest {
            Some((token, id)) if id as usize >= vocab_size => {
                Err(TokenizerError::BeyondVocabulary { path: self.path.clone(), token, id, vocab_size })
            }
            _ => Ok(()),
        }
    }

    /// The token ids of a text, without special tokens around it.
    ///
    /// # Errors
    /// When the text has no tokens here, or a pattern of the tokenizer gives up on it.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        match self.inner.encode_fast(text, false) {
            Ok(encoding) => Ok(encoding.get_ids().to_vec()),
            Err(error) => {
                let (path, problem) = (self.path.clone(), error.to_string());
                Err(TokenizerError::Encode { path, bytes: text.len(), problem })
            }
        }
    }

    /// The text of token ids, special tokens left out.
    ///
    /// # Errors
    /// When the decoder of the tokenizer fails.
    pub fn decode(&self, tokens: &[u32]) -> Result<String, TokenizerError> {
        self.inner.decode(tokens, true).map_err(|error| {
            let (path, problem) = (self.path.clone(), error.to_string());
            TokenizerError::Decode { path, tokens: tokens.len(), problem }
        })
    }
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
    fn an_id_beyond_the_embedding_table_is_named() {
        let folder = folder_with(WORDS);
        let tokenizer = Tokenizer::open(folder.path()).unwrap();
        tokenizer.check_vocab(4).unwrap();
        let error = tokenizer.check_vocab(3).unwrap_err().to_string();
        let tail = "knows token \"<eos>\" with id 3, but the model's vocabulary ends at 3; \
                    the tokenizer is of another model";
        assert!(error.ends_with(tail), "{error}");
    }

    #[test]
    fn what_is_no_tokenizer_is_refused_with_its_path() {
        for text in ["", "{}", "[", &"[".repeat(100_000)] {
            let error = Tokenizer::open(folder_with(text).path()).unwrap_err().to_string();
            assert!(error.contains("tokenizer.json is not a tokenizer: "), "{error}");
        }
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
