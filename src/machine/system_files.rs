//! The file tree that /proc and /sys are read from.
//!
//! Enters: a folder that looks like `/`. Leaves: the text of its files, or nothing. Tests plant a machine in a temporary
//! folder and pass that instead.

use std::fs;
use std::path::{Path, PathBuf};

/// A place to look for `proc/...` and `sys/...`.
#[derive(Debug, Clone)]
pub struct Root(PathBuf);

impl Root {
    /// The machine itself.
    pub fn system() -> Self {
        Self(PathBuf::from("/"))
    }

    /// Another tree with the same layout.
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    /// A file's text; `None` when it is missing, unreadable or not UTF-8.
    pub fn read(&self, path: &str) -> Option<String> {
        fs::read_to_string(self.0.join(path)).ok()
    }

    /// A one-line file without its end of line; `None` when empty.
    pub fn line(&self, path: &str) -> Option<String> {
        let text = self.read(path)?;
        Some(text.lines().next()?.trim().to_owned()).filter(|line| !line.is_empty())
    }

    /// A file that holds one number.
    pub fn number(&self, path: &str) -> Option<u64> {
        self.line(path)?.parse().ok()
    }

    pub(crate) fn exists(&self, path: &str) -> bool {
        self.0.join(path).exists()
    }

    pub(crate) fn write(&self, path: &str, text: &str) -> std::io::Result<()> {
        fs::write(self.0.join(path), text)
    }

    /// The entries `prefix<number>` of a folder as paths below the root, by number.
    pub(crate) fn numbered(&self, folder: &str, prefix: &str) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.0.join(Path::new(folder))) else { return Vec::new() };
        let mut numbers: Vec<u64> = entries
            .flatten()
            .filter_map(|entry| entry.file_name().to_str()?.strip_prefix(prefix)?.parse().ok())
            .collect();
        numbers.sort_unstable();
        numbers.iter().map(|number| format!("{folder}/{prefix}{number}")).collect()
    }
}

/// A temporary tree with the given files; it goes away with the first of the pair.
#[cfg(test)]
pub(crate) fn fake_root(files: &[(&str, &str)]) -> (tempfile::TempDir, Root) {
    let folder = tempfile::tempdir().unwrap();
    for (path, text) in files {
        let path = folder.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    let root = Root::at(folder.path());
    (folder, root)
}
