//! Files that are written whole or not at all.
//!
//! Enters: a path and its text. Leaves: the file, synced, under its name; or the old one untouched. It knows no format.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::units::Bytes;

/// Unfinished files begin and end like this, so that what a killed process left is recognised.
const PREFIX: &str = ".hbmark-";
const SUFFIX: &str = ".unfinished";

/// The unfinished file of this process.
static UNFINISHED: Mutex<Option<PathBuf>> = Mutex::new(None);

/// A file that could not be written.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    #[error("cannot write into {folder}: {source}")]
    Folder { folder: PathBuf, source: std::io::Error },
    #[error("cannot write {path}: {source}")]
    Write { path: PathBuf, source: std::io::Error },
    #[error(
        "the disk of {folder} has {free} left, and the results may take {needed}: choose another folder, or make room"
    )]
    Full { folder: PathBuf, free: Bytes, needed: Bytes },
}

/// Refuses a folder whose disk has less room than that. A disk that does not say how much it has passes.
///
/// # Errors
/// When there is less.
pub fn check_room(folder: &Path, needed: Bytes) -> Result<(), FileError> {
    match room(folder) {
        Some(free) if free.0 < needed.0 => Err(FileError::Full { folder: folder.to_owned(), free, needed }),
        _ => Ok(()),
    }
}

/// Bytes that this user may still write on the disk of a folder.
#[cfg(unix)]
fn room(folder: &Path) -> Option<Bytes> {
    let disk = rustix::fs::statvfs(folder).ok()?;
    // Some network and user-space file systems count nothing.
    (disk.f_blocks > 0).then(|| Bytes(disk.f_bavail.saturating_mul(disk.f_frsize)))
}
#[cfg(not(unix))]
fn room(_: &Path) -> Option<Bytes> {
    None
}

/// A file as others may read it, where the user's mask allows: temporary files are their owner's alone.
fn readable(builder: &mut tempfile::Builder<'_, '_>) {
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
}

/// The folder a path lies in.
fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Writes a file whole or not at all: into a file beside it, synced, then renamed, and the folder synced.
///
/// # Errors
/// When the folder or the disk refuses; the old file is then as it was.
pub fn write_whole(path: &Path, text: &str) -> Result<(), FileError> {
    let folder = folder_of(path);
    let refused = |source| FileError::Folder { folder: folder.to_owned(), source };
    let failed = |source| FileError::Write { path: path.to_owned(), source };
    let mut builder = tempfile::Builder::new();
    readable(builder.prefix(PREFIX).suffix(SUFFIX));
    let mut file = builder.tempfile_in(folder).map_err(refused)?;
    remember(Some(file.path().to_owned()));
    let written = file.write_all(text.as_bytes()).and_then(|()| file.as_file().sync_all());
    let persisted = written.and_then(|()| file.persist(path).map_err(|error| error.error));
    remember(None);
    persisted.map_err(failed)?;
    sync_folder(folder);
    Ok(())
}

/// Syncs a folder's entries, where the file system can.
pub fn sync_folder(folder: &Path) {
    // A file system that cannot has nothing to be told.
    let _ = std::fs::File::open(folder).and_then(|folder| folder.sync_all());
}

fn remember(path: Option<PathBuf>) {
    *UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner) = path;
}

/// Removes the unfinished file of this process, for an exit without destructors.
pub fn abandon() {
    // Held by a writer that will never come back: then there is nothing to be done.
    if let Ok(mut unfinished) = UNFINISHED.try_lock()
        && let Some(path) = unfinished.take()
    {
        let _ = std::fs::remove_file(path);
    }
}

/// Removes what killed processes left in a folder that nobody else writes into.
pub fn sweep(folder: &Path) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let ours = name.to_str().is_some_and(|name| name.starts_with(PREFIX) && name.ends_with(SUFFIX));
        if ours && entry.file_type().is_ok_and(|kind| kind.is_file()) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_whole_and_nothing_is_left_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("result.json");
        write_whole(&path, "old").unwrap();
        write_whole(&path, "new").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "new");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[cfg(unix)]
    #[test]
    fn a_result_can_be_read_by_whom_the_mask_allows() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let (ours, plain) = (folder.path().join("result.json"), folder.path().join("plain"));
        write_whole(&ours, "x").unwrap();
        std::fs::write(&plain, "x").unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&ours), mode(&plain));
    }

    #[cfg(unix)]
    #[test]
    fn a_disk_with_less_room_than_needed_is_refused_with_both() {
        let folder = tempfile::tempdir().unwrap();
        check_room(folder.path(), Bytes(1)).unwrap();
        let error = check_room(folder.path(), Bytes(u64::MAX)).unwrap_err().to_string();
        assert!(
            error.contains(" left, and the results may take ") && error.contains("another folder"),
            "{error}"
        );
    }

    #[test]
    fn only_what_a_killed_process_left_is_swept() {
        let folder = tempfile::tempdir().unwrap();
        for name in [".hbmark-a.unfinished", "result.json", ".hbmark", "x.unfinished"] {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        sweep(folder.path());
        assert!(!folder.path().join(".hbmark-a.unfinished").exists());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 3);
    }

    #[test]
    fn a_folder_that_is_none_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = write_whole(&file.path().join("x"), "").unwrap_err().to_string();
        assert!(error.starts_with("cannot write into "), "{error}");
    }
}
