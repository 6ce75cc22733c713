//! Untrusted input: regular files of limited size, and JSON within a memory budget.
//!
//! Enters: a path and a limit, or a text and a budget. Leaves: bytes of a regular file of known size, or values whose memory was charged
//! before it was allocated. Validation of the content is left to each reader.

pub mod json;

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

/// Why a file was not read. The path is left to the reader's own error.
#[derive(Debug, thiserror::Error)]
pub enum InputError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("it is {found}, not a regular file")]
    NotRegular { found: &'static str },
    #[error("it holds {size} bytes, above the limit of {limit}")]
    TooLarge { size: u64, limit: u64 },
    #[error("it is not UTF-8 text from byte {at} on")]
    NotText { at: usize },
}

/// Opens a regular file and notes its size. Pipes, devices and folders are refused before anything can block.
///
/// # Errors
/// When it cannot be opened, or is something else than a regular file.
pub fn open(path: &Path) -> Result<(File, u64), InputError> {
    // Checked before opening: opening a pipe would block until it has a writer, and opening a device may have effects.
    regular(&std::fs::metadata(path)?)?;
    // The path may be swapped for a pipe in between: do not block, and check again.
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC).open(path)?;
    let metadata = file.metadata()?;
    regular(&metadata)?;
    Ok((file, metadata.len()))
}

/// Opens one of our own files for writing, or creates it. Symbolic links are refused too: writes must not end up in another file.
///
/// # Errors
/// When it cannot be opened, or is something else than a regular file.
pub fn open_own(path: &Path, create: bool) -> Result<File, InputError> {
    match std::fs::symlink_metadata(path) {
        Ok(metadata) => regular(&metadata)?,
        Err(error) if create && error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error.into()),
    }
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC;
    let mut options = File::options();
    let file =
        options.read(true).write(true).create(create).truncate(false).custom_flags(flags).open(path)?;
    regular(&file.metadata()?)?;
    Ok(file)
}

fn regular(metadata: &std::fs::Metadata) -> Result<(), InputError> {
    let found = match metadata.file_type() {
        kind if kind.is_file() => return Ok(()),
        kind if kind.is_dir() => "a folder",
        kind if kind.is_symlink() => "a link",
        _ => "a pipe, socket or device",
    };
    Err(InputError::NotRegular { found })
}

/// The bytes of a regular file of at most `limit` bytes. One that grows while it is read is cut at its first size; one that shrinks is an error.
///
/// # Errors
/// [`InputError`], before memory is taken where the file is too large.
pub fn read(path: &Path, limit: u64) -> Result<Vec<u8>, InputError> {
    let (file, size) = open(path)?;
    let too_large = || InputError::TooLarge { size, limit };
    if size > limit {
        return Err(too_large());
    }
    let mut bytes = vec![0; usize::try_from(size).map_err(|_| too_large())?];
    file.read_exact_at(&mut bytes, 0)?;
    Ok(bytes)
}

/// The text of a regular file of at most `limit` bytes.
///
/// # Errors
/// As [`read`], and when it is not UTF-8.
pub fn read_text(path: &Path, limit: u64) -> Result<String, InputError> {
    String::from_utf8(read(path, limit)?)
        .map_err(|error| InputError::NotText { at: error.utf8_error().valid_up_to() })
}

/// Characters of an error that are shown. A parser may quote a name from an untrusted file, however long.
const LONGEST_ERROR: usize = 4_000;

/// An error and its causes on one line, without control characters; of a long one its beginning and its end.
pub fn one_line(error: &(dyn std::error::Error + 'static)) -> String {
    let mut parts: Vec<String> = Vec::new();
    let mut next = Some(error);
    while let Some(cause) = next {
        let text = cause.to_string();
        // Wrappers made with `transparent` repeat their cause, and some messages quote it.
        if parts.last().is_none_or(|last| !last.contains(&text)) {
            parts.push(text);
        }
        next = cause.source();
    }
    let line = parts.join(": ").replace(acts, " ");
    let count = line.chars().count();
    if count <= LONGEST_ERROR {
        return line;
    }
    // The failure is at the beginning, the advice at the end.
    let half = LONGEST_ERROR / 2;
    let (begin, end): (String, String) =
        (line.chars().take(half).collect(), line.chars().skip(count - half).collect());
    format!("{begin} [... {} characters ...] {end}", count - LONGEST_ERROR)
}

/// Untrusted text without characters that a terminal acts on: model names, notes and reasons may come from anywhere.
pub fn plain(text: &str) -> String {
    text.chars().map(|c| if acts(c) { '\u{fffd}' } else { c }).collect()
}

/// Whether a character affects the text around it: control characters, line separators, and bidirectional marks, which make one name look
/// like another.
pub fn acts(c: char) -> bool {
    c.is_control()
        || matches!(
            c,
            '\u{200e}' | '\u{200f}' | '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pipes_devices_and_folders_are_refused_without_waiting() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let found = |path: &Path| read_text(path, 1 << 20).unwrap_err().to_string();
        assert_eq!(found(&pipe), "it is a pipe, socket or device, not a regular file");
        assert_eq!(found(Path::new("/dev/zero")), "it is a pipe, socket or device, not a regular file");
        assert_eq!(found(folder.path()), "it is a folder, not a regular file");
    }

    #[test]
    fn a_file_above_the_limit_is_refused_before_memory_is_taken() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sparse");
        File::create(&path).unwrap().set_len(1 << 40).unwrap();
        let found = read(&path, 64).unwrap_err().to_string();
        assert_eq!(found, "it holds 1099511627776 bytes, above the limit of 64");
        std::fs::write(&path, b"ab\xffc").unwrap();
        assert_eq!(read_text(&path, 64).unwrap_err().to_string(), "it is not UTF-8 text from byte 2 on");
    }
}
