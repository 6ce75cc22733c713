//! Room for connections in the table of open files.
//!
//! The kernel doubles the table when it is full. Where threads share it, the one that opens a file waits until none of them can still be reading
//! the old one: ten milliseconds and more, at the 64th, 256th, 512th, 1024th file, in which no request goes out.

use std::os::fd::AsFd;

use rustix::process::{Resource, getrlimit};

/// Files that are open beside connections.
const OTHERS: usize = 256;

/// Makes room for so many connections, and for as many of a server in this process.
pub(super) fn reserve(file: impl AsFd, connections: usize) {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let last = (2 * connections + OTHERS).min(usize::try_from(limit).unwrap_or(usize::MAX)).saturating_sub(1);
    if let Ok(last) = i32::try_from(last) {
        // Closed at once; the table stays as it is. Without it there are pauses, which are seen and said.
        let _ = rustix::io::fcntl_dupfd_cloexec(file, last);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The size of the table, as the kernel tells it.
    fn size() -> usize {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("FDSize:")).unwrap();
        line.trim().parse().unwrap()
    }

    #[test]
    fn the_table_has_room_and_nothing_stays_open() {
        let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let file = std::fs::File::open("/dev/null").unwrap();
        let limit = usize::try_from(getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)).unwrap();
        let before = open();
        reserve(&file, 300);
        assert!(size() >= (2 * 300).min(limit), "{}", size());
        // Other tests open files, too.
        assert!(open() < before + 300);
        // As many as there may ever be, whatever the limit is.
        reserve(&file, super::super::MAX_STREAMS);
    }
}
