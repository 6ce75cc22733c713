//! A model that is split over several GGUF files: `NAME-00001-of-00003.gguf` and those that follow it.
//!
//! Enters: checked headers, and the name of the first file. Leaves: the names of the others, and one [`Header`] with the tensors of all.
//! Files are not opened here.
//!
//! *Source* of names and keys: `llama_split_path` and `gguf-split` of llama.cpp.

use std::collections::HashSet;

use super::dimensions::{count, missing};
use super::header::{GgufError, Header};

/// Well below the usual limit of 1,024 open files; the largest published models have some fifty.
const MAX_FILES: usize = 512;
/// As many as one file may describe.
const MAX_TENSORS: usize = 200_000;

const AT: &str = "split.no";
const FILES: &str = "split.count";
const TENSORS: &str = "split.tensors.count";

impl Header {
    /// The names of the files that follow, from the name of this one.
    ///
    /// # Errors
    /// When the model is split over several files, and this is not the first or is not named as such.
    pub fn further_files(&self, name: &str) -> Result<Vec<String>, GgufError> {
        let files = count(self, FILES, 0, MAX_FILES)?.unwrap_or(1);
        if files <= 1 {
            return Ok(Vec::new());
        }
        let stem = name.strip_suffix(&format!("-00001-of-{files:05}.gguf"));
        match (stem, count(self, AT, 0, MAX_FILES)?) {
            (Some(stem), Some(0)) => {
                Ok((2..=files).map(|at| format!("{stem}-{at:05}-of-{files:05}.gguf")).collect())
            }
            _ => Err(GgufError::NotFirstFile { files }),
        }
    }

    /// Takes the tensors of the file at an index, which is not the first, to its own.
    ///
    /// # Errors
    /// When the file is at another index or of another model.
    pub fn join(&mut self, at: usize, other: Self) -> Result<(), GgufError> {
        let files = count(self, FILES, 0, MAX_FILES)?.unwrap_or(1);
        for (key, wanted) in [(AT, at), (FILES, files)] {
            let found = count(&other, key, 0, MAX_FILES)?.ok_or_else(|| missing(key))?;
            if found != wanted {
                return Err(GgufError::OtherSplit { key, found, wanted });
            }
        }
        self.tensors.extend(other.tensors);
        let (stated, found) = (self.stated()?, self.tensors.len());
        if found > stated {
            Err(GgufError::OtherSplit { key: TENSORS, found: stated, wanted: found })
        } else {
            Ok(())
        }
    }

    /// Checks that all files together have the tensors that the first one says, each once.
    ///
    /// # Errors
    /// When there are more or fewer, or one of them is in two files.
    pub fn check_joined(&self) -> Result<(), GgufError> {
        let (stated, found) = (self.stated()?, self.tensors.len());
        if found != stated {
            return Err(GgufError::OtherSplit { key: TENSORS, found: stated, wanted: found });
        }
        let mut names = HashSet::new();
        match self.tensors.iter().find(|tensor| !names.insert(&tensor.name)) {
            None => Ok(()),
            Some(twice) => Err(GgufError::TwiceTensor { name: twice.name.clone() }),
        }
    }

    /// Tensors of all files together.
    fn stated(&self) -> Result<usize, GgufError> {
        count(self, TENSORS, 0, MAX_TENSORS)?.ok_or_else(|| missing(TENSORS))
    }
}

#[cfg(test)]
mod tests {
    use super::super::header::{TensorEntry, Value};
    use super::*;

    fn file(at: u64, files: u64, tensors: u64, names: &[&str]) -> Header {
        let keys = [(AT, at), (FILES, files), (TENSORS, tensors)];
        let tensor = |name: &&str| TensorEntry {
            name: (*name).to_owned(),
            shape: vec![1],
            storage: "f32",
            offset: 0,
            bytes: 4,
        };
        Header {
            metadata: keys.map(|(key, value)| (key.to_owned(), Value::Unsigned(value))).into(),
            tensors: names.iter().map(tensor).collect(),
            data_start: 0,
        }
    }

    #[test]
    fn the_first_file_names_the_others() {
        let names =
            |header: &Header, name: &str| header.further_files(name).map_err(|error| error.to_string());
        let first = file(0, 3, 2, &[]);
        let others = ["x-00002-of-00003.gguf", "x-00003-of-00003.gguf"].map(str::to_owned).to_vec();
        assert_eq!(names(&first, "x-00001-of-00003.gguf"), Ok(others));
        assert_eq!(names(&file(0, 1, 2, &[]), "x.gguf"), Ok(Vec::new()));
        for (header, name) in [
            (&first, "x.gguf"),
            (&first, "x-00002-of-00003.gguf"),
            (&file(1, 3, 2, &[]), "x-00001-of-00003.gguf"),
        ] {
            let error = names(header, name).unwrap_err();
            assert!(error.contains("NAME-00001-of-00003.gguf") && error.contains("--merge"), "{error}");
        }
        let many = names(&file(0, 1 << 40, 2, &[]), "x-00001-of-00003.gguf").unwrap_err();
        assert!(many.contains("split.count is 1099511627776"), "{many}");
    }

    #[test]
    fn files_of_one_model_are_joined_and_those_of_two_are_not() {
        let joined = |other: Header| {
            let mut whole = file(0, 2, 2, &["a"]);
            whole.join(1, other)?;
            whole.check_joined().map(|()| whole.tensors.len())
        };
        assert_eq!(joined(file(1, 2, 2, &["b"])).unwrap(), 2);
        for (other, wanted) in [
            (file(0, 2, 2, &["b"]), "split.no is 0, not 1"),
            (file(1, 3, 2, &["b"]), "split.count is 3, not 2"),
            (file(1, 2, 2, &[]), "split.tensors.count is 2, not 1"),
            (file(1, 2, 2, &["b", "c"]), "split.tensors.count is 2, not 3"),
            (file(1, 2, 2, &["a"]), "tensor a appears twice"),
            (
                Header { metadata: std::collections::BTreeMap::new(), ..file(1, 2, 2, &["b"]) },
                "split.no is missing",
            ),
        ] {
            let error = joined(other).unwrap_err().to_string();
            assert!(error.contains(wanted), "{error}");
        }
    }
}
