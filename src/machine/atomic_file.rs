//! Files that are written whole or not at all.
//!
//! Enters: a path and its text. Leaves: the file, synced, under its name; or the old one untouched. A link stays, and what it leads to
//! is written; a pipe or a terminal is written into, and never replaced.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use hbmark_core::units::Bytes;

/// Unfinished files begin and end like this, so that what a killed process left is recognised.
const PREFIX: &str = ".hbmark-";
const SUFFIX: &str = ".unfinished";

/// The unfinished file of this process.
static UNFINISHED: Mutex<Option<PathBuf>> = Mutex::new(None);

/// A file that could not be written.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    #[error("cannot write {path}: its folder takes no new file: {source}")]
    Folder { path: PathBuf, source: std::io::Error },
    #[error("cannot write {path}: {source}{}", remedy(source))]
    Write { path: PathBuf, source: std::io::Error },
    #[error(
        "cannot write {path}: it is {found}, and nothing that a file could be written over; name another file"
    )]
    NotAFile { path: PathBuf, found: &'static str },
    #[error(
        "the disk of {folder} has {free} left, and the results may take {needed}: choose another folder, or make room"
    )]
    Full { folder: PathBuf, free: Bytes, needed: Bytes },
}

/// What to do about an error of writing, where that is known.
pub fn remedy(error: &std::io::Error) -> &'static str {
    match error.kind() {
        std::io::ErrorKind::FileTooLarge => "; raise the limit on file sizes (ulimit -f)",
        std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => {
            "; make room there, or choose another folder"
        }
        _ => "",
    }
}

/// Refuses a folder whose disk has less room than that. A disk that does not say how much it has passes.
pub fn check_free_space(folder: &Path, needed: Bytes) -> Result<(), FileError> {
    match free_space(folder) {
        Some(free) if free.0 < needed.0 => Err(FileError::Full { folder: folder.to_owned(), free, needed }),
        _ => Ok(()),
    }
}

/// Bytes that this user may still write on the disk of a folder.
fn free_space(folder: &Path) -> Option<Bytes> {
    let disk = rustix::fs::statvfs(folder).ok()?;
    // Some network and user-space file systems count nothing.
    (disk.f_blocks > 0).then(|| Bytes(disk.f_bavail.saturating_mul(disk.f_frsize)))
}

/// The folder a path lies in.
fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Writes a file whole or not at all: into a file beside it, synced, then renamed, and the folder synced. What is not a file but takes bytes
/// (`/dev/stdout`, a pipe) is written as it is.
///
/// # Errors
/// When the folder or the disk refuses; the old file is then as it was. When the path is a folder, a socket or a disk.
pub fn write_atomic(path: &Path, text: &str) -> Result<(), FileError> {
    match target(path)? {
        WriteTarget::File(file) => replace(path, &file, text),
        WriteTarget::Stream => {
            // Without the power to create: what was there a moment ago is meant.
            let written =
                File::options().append(true).open(path).and_then(|mut f| f.write_all(text.as_bytes()));
            written.map_err(|source| FileError::Write { path: path.to_owned(), source })
        }
    }
}

/// Whether a path could be written, as far as that can be said without writing.
pub fn check_writable(path: &Path) -> Result<(), FileError> {
    if let WriteTarget::File(file) = target(path)? {
        let folder = folder_of(&file);
        // Without a name: a process that is killed here leaves nothing.
        let probe = std::fs::metadata(folder.join(".")).and_then(|_| tempfile::tempfile_in(folder));
        probe.map_err(|source| FileError::Folder {
            path: path.to_owned(),
            source: without_temp_path(source),
        })?;
    }
    Ok(())
}

/// What a path leads to.
enum WriteTarget {
    /// A file that may be replaced, or none yet; behind every link.
    File(PathBuf),
    /// Something that takes bytes one after the other.
    Stream,
}

/// Symbolic links are followed as often as Linux does (`path_resolution(7)`).
const MAX_SYMLINKS: usize = 40;

fn target(path: &Path) -> Result<WriteTarget, FileError> {
    let failed = |source| FileError::Write { path: path.to_owned(), source };
    let mut file = path.to_owned();
    for _ in 0..MAX_SYMLINKS {
        // Streams of this process: a file that output is redirected to is appended to, and not replaced.
        if ["/dev/fd", "/dev/stdout", "/dev/stderr", "/proc"].iter().any(|own| file.starts_with(own)) {
            return Ok(WriteTarget::Stream);
        }
        let kind = match std::fs::symlink_metadata(&file) {
            Ok(metadata) => metadata.file_type(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(WriteTarget::File(file)),
            Err(error) => return Err(failed(error)),
        };
        if !kind.is_symlink() {
            return of_kind(kind, file).map_err(|found| FileError::NotAFile { path: path.to_owned(), found });
        }
        let leads_to = std::fs::read_link(&file).map_err(failed)?;
        file = folder_of(&file).join(leads_to);
    }
    Err(FileError::NotAFile { path: path.to_owned(), found: "a link that leads to itself" })
}

fn of_kind(kind: std::fs::FileType, file: PathBuf) -> Result<WriteTarget, &'static str> {
    use std::os::unix::fs::FileTypeExt;
    match kind {
        kind if kind.is_file() => Ok(WriteTarget::File(file)),
        kind if kind.is_char_device() || kind.is_fifo() => Ok(WriteTarget::Stream),
        kind if kind.is_dir() => Err("a folder"),
        _ => Err("a socket or a disk"),
    }
}

/// Puts a new file in the place of `file`, which the user named `path`.
fn replace(path: &Path, file: &Path, text: &str) -> Result<(), FileError> {
    let folder = folder_of(file);
    let refused = |source| FileError::Folder { path: path.to_owned(), source: without_temp_path(source) };
    let failed = |source| FileError::Write { path: path.to_owned(), source: without_temp_path(source) };
    // Made like any other file, so that others may read it where the user's mask allows.
    let create = |path: &Path| File::options().write(true).create_new(true).open(path);
    let mut unfinished =
        tempfile::Builder::new().prefix(PREFIX).suffix(SUFFIX).make_in(folder, create).map_err(refused)?;
    remember(Some(unfinished.path().to_owned()));
    let written =
        unfinished.as_file_mut().write_all(text.as_bytes()).and_then(|()| unfinished.as_file().sync_all());
    let persisted = written.and_then(|()| unfinished.persist(file).map_err(|error| error.error));
    remember(None);
    persisted.map_err(failed)?;
    sync_folder(folder);
    Ok(())
}

/// An error without the path of the temporary file, which `tempfile` adds.
fn without_temp_path(error: std::io::Error) -> std::io::Error {
    if error.raw_os_error().is_some() { error } else { error.kind().into() }
}

/// Syncs a folder's entries, where the file system can.
pub fn sync_folder(folder: &Path) {
    // Some file systems cannot sync a folder.
    let _ = File::open(folder).and_then(|folder| folder.sync_all());
}

fn remember(path: Option<PathBuf>) {
    *UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner) = path;
}

/// Removes the unfinished file of this process, for an exit without destructors.
pub fn remove_unfinished() {
    // A writer that was interrupted may hold the lock: then the file stays.
    if let Ok(mut unfinished) = UNFINISHED.try_lock()
        && let Some(path) = unfinished.take()
    {
        let _ = std::fs::remove_file(path);
    }
}

/// Removes what killed processes left in a folder of this program.
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
        write_atomic(&path, "old").unwrap();
        write_atomic(&path, "new").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "new");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_result_can_be_read_by_whom_the_mask_allows() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let (ours, plain) = (folder.path().join("result.json"), folder.path().join("plain"));
        write_atomic(&ours, "x").unwrap();
        std::fs::write(&plain, "x").unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&ours), mode(&plain));
    }

    #[test]
    fn a_disk_with_less_room_than_needed_is_refused_with_both() {
        let folder = tempfile::tempdir().unwrap();
        check_free_space(folder.path(), Bytes(1)).unwrap();
        let error = check_free_space(folder.path(), Bytes(u64::MAX)).unwrap_err().to_string();
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
    fn a_folder_that_is_none_is_said_with_the_name_that_was_wanted() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let missing = tempfile::tempdir().unwrap().path().join("none");
        for path in [file.path().join("x"), missing.join("x")] {
            for error in [write_atomic(&path, "").unwrap_err(), check_writable(&path).unwrap_err()] {
                let error = error.to_string();
                assert!(error.starts_with(&format!("cannot write {}: ", path.display())), "{error}");
                assert!(!error.contains(PREFIX) && !error.contains(" at path "), "{error}");
            }
        }
    }

    mod not_files {
        use super::*;
        use std::os::unix::fs::{FileTypeExt, symlink};

        #[test]
        fn a_link_stays_and_what_it_leads_to_is_written() {
            let folder = tempfile::tempdir().unwrap();
            let (real, link) = (folder.path().join("real"), folder.path().join("link"));
            symlink("real", &link).unwrap();
            // The first time it leads to nothing yet.
            for text in ["new", "newer"] {
                write_atomic(&link, text).unwrap();
                assert_eq!(std::fs::read_to_string(&real).unwrap(), text);
                assert!(link.symlink_metadata().unwrap().file_type().is_symlink());
            }
            symlink("loop", folder.path().join("loop")).unwrap();
            let error = write_atomic(&folder.path().join("loop"), "").unwrap_err().to_string();
            assert!(error.contains("leads to itself"), "{error}");
        }

        #[test]
        fn a_device_is_written_into_and_stays_a_device() {
            let folder = tempfile::tempdir().unwrap();
            let link = folder.path().join("null");
            symlink("/dev/null", &link).unwrap();
            write_atomic(&link, "gone").unwrap();
            check_writable(&link).unwrap();
            assert!(std::fs::metadata("/dev/null").unwrap().file_type().is_char_device());
            assert!(link.symlink_metadata().unwrap().file_type().is_symlink());
            let error = write_atomic(Path::new("/dev/full"), "x").unwrap_err().to_string();
            assert!(error.starts_with("cannot write /dev/full: No space left"), "{error}");
        }

        #[test]
        fn a_pipe_is_written_into_and_stays_a_pipe() {
            let folder = tempfile::tempdir().unwrap();
            let pipe = folder.path().join("pipe");
            assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
            let reader = {
                let pipe = pipe.clone();
                std::thread::spawn(move || std::fs::read_to_string(pipe).unwrap())
            };
            write_atomic(&pipe, "through").unwrap();
            assert_eq!(reader.join().unwrap(), "through");
            assert!(std::fs::metadata(&pipe).unwrap().file_type().is_fifo());
        }

        #[test]
        fn a_folder_or_a_socket_is_refused_by_name() {
            let folder = tempfile::tempdir().unwrap();
            let socket = folder.path().join("socket");
            let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
            let error = write_atomic(&socket, "").unwrap_err().to_string();
            assert!(error.contains("it is a socket or a disk"), "{error}");
            let error = write_atomic(folder.path(), "").unwrap_err().to_string();
            assert!(error.contains("it is a folder"), "{error}");
        }
    }
}
