//! Room for connections in the table of open files.
//!
//! The kernel doubles the table when it is full. Where threads share it, the one that opens a file waits until none of them can still be reading
//! the old one: ten milliseconds and more, at the 64th, 256th, 512th, 1024th file, in which no request goes out.
//!
//! Most systems allow a process 1,024 open files and let it ask for many more.

use std::os::fd::AsFd;

use hbmark_traffic::serving_loop::{LoadMode, Traffic};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Files that are open beside connections.
const OTHERS: usize = 256;

/// A load needs more connections at a time than this process may open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "this load has {connections} connections open at a time, and this process may open {limit} files, of which {used} are open already; \
     raise the limit (ulimit -n {}), or ask for fewer requests at a time",
    connections + OTHERS
)]
pub struct TooFewFiles {
    connections: usize,
    limit: usize,
    used: usize,
}

/// Raises the limit of open files to as many, as far as this process may. Leaves the limit.
fn raise(wanted: usize) -> usize {
    let number =
        |limit: Option<u64>| limit.map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX));
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let raised = wanted.min(number(maximum));
    if raised <= number(current) {
        return number(current);
    }
    // What is refused here shows in the limit.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(raised as u64), maximum });
    number(getrlimit(Resource::Nofile).current)
}

/// Connections that a load has open at a time whatever the server does: those of a closed loop, and of requests that arrive at once.
fn at_once(traffic: &Traffic<'_>, cap: Option<usize>) -> usize {
    let planned = traffic.plan.len();
    match traffic.kind {
        LoadMode::Closed { concurrency } => concurrency.min(planned),
        LoadMode::Open => {
            let at_start = traffic.plan.iter().take_while(|request| request.arrival.0 <= 0.0).count();
            at_start.min(cap.unwrap_or(usize::MAX))
        }
    }
    .min(super::MAX_STREAMS)
}

/// Raises the limit of open files where a load needs more, and checks that they suffice.
///
/// # Errors
/// When this process may not open as many.
pub(crate) fn check_open_files(traffic: &Traffic<'_>, cap: Option<usize>) -> Result<(), TooFewFiles> {
    let connections = at_once(traffic, cap);
    let limit = raise(2 * connections + OTHERS);
    let used = std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
    if connections.saturating_add(used) > limit {
        Err(TooFewFiles { connections, limit, used })
    } else {
        Ok(())
    }
}

/// Makes room for so many connections, and for as many of a server in this process.
pub(super) fn reserve(file: impl AsFd, connections: usize) {
    let wanted = 2 * connections + OTHERS;
    let last = wanted.min(raise(wanted)).saturating_sub(1);
    if let Ok(last) = i32::try_from(last) {
        // Closed at once; the table stays as it is. Without it there are pauses, which are seen and said.
        let _ = rustix::io::fcntl_dupfd_cloexec(file, last);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hbmark_traffic::workload::PlannedRequest;

    /// The size of the table, as the kernel tells it.
    fn size() -> usize {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("FDSize:")).unwrap();
        line.trim().parse().unwrap()
    }

    #[test]
    fn the_limit_of_open_files_is_raised_and_where_that_does_not_suffice_it_is_said() {
        let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
        let most = maximum.unwrap_or(1 << 20);
        let low = most.min(1024);
        setrlimit(Resource::Nofile, Rlimit { current: Some(low), maximum }).unwrap();
        assert_eq!(raise(1), usize::try_from(low).unwrap(), "never lowered");
        let plan = vec![PlannedRequest::default(); 4000];
        let closed = |concurrency| Traffic::new(&plan, LoadMode::Closed { concurrency }, 0..plan.len(), 1);
        let needed = 2 * 2000 + OTHERS;
        if most >= needed as u64 {
            assert_eq!(check_open_files(&closed(2000), None), Ok(()));
            assert_eq!(getrlimit(Resource::Nofile).current, Some(needed as u64));
        }
        assert_eq!(at_once(&closed(1 << 20), None), 4000);
        let open = Traffic::new(&plan, LoadMode::Open, 0..plan.len(), 1);
        assert_eq!((at_once(&open, None), at_once(&open, Some(64))), (4000, 64));
        let error = TooFewFiles { connections: 4000, limit: 1024, used: 12 }.to_string();
        assert!(error.contains("may open 1024 files") && error.contains("ulimit -n 4256"), "{error}");
    }

    #[test]
    fn the_table_has_room_and_nothing_stays_open() {
        let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let file = std::fs::File::open("/dev/null").unwrap();
        let limit = usize::try_from(getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX)).unwrap();
        let before = open();
        reserve(&file, 300);
        assert!(size() >= (2 * 300).min(limit), "{}", size());
        // Other tests open files, too.
        assert!(open() < before + 300);
        // As many as there may ever be, whatever the limit is.
        reserve(&file, super::super::MAX_STREAMS);
    }
}
