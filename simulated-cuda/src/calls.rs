//! Counts of what was called and launched.
//!
//! Enters: the name of each entry point, as it is called, and each run of a kernel. Leaves: at the end of the process one line of JSON,
//! appended to the file that `HBMARK_SIMULATED_CALLS` names, if it is set.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Calls of one entry point.
#[derive(Debug)]
pub struct Counter {
    name: &'static str,
    calls: AtomicU64,
    listed: AtomicBool,
    next: AtomicPtr<Counter>,
}

/// Counters that have counted, the youngest first.
static FIRST: AtomicPtr<Counter> = AtomicPtr::new(std::ptr::null_mut());
/// Runs of each kernel.
static LAUNCHES: Mutex<BTreeMap<String, u64>> = Mutex::new(BTreeMap::new());

impl Counter {
    #[must_use]
    pub const fn new(name: &'static str) -> Self {
        let next = AtomicPtr::new(std::ptr::null_mut());
        Self { name, calls: AtomicU64::new(0), listed: AtomicBool::new(false), next }
    }

    pub fn count(&'static self) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        if !self.listed.swap(true, Ordering::AcqRel) {
            let this = (&raw const *self).cast_mut();
            let mut first = FIRST.load(Ordering::Acquire);
            loop {
                self.next.store(first, Ordering::Release);
                match FIRST.compare_exchange_weak(first, this, Ordering::AcqRel, Ordering::Acquire) {
                    Ok(_) => return,
                    Err(other) => first = other,
                }
            }
        }
    }
}

/// Counts a call of the entry point of this name.
#[macro_export]
macro_rules! count {
    ($name:expr) => {{
        static COUNTER: $crate::calls::Counter = $crate::calls::Counter::new($name);
        COUNTER.count();
    }};
}
pub use crate::count;

/// Counts a run of a kernel.
pub fn launched(name: &str) {
    let mut launches = LAUNCHES.lock().unwrap_or_else(PoisonError::into_inner);
    match launches.get_mut(name) {
        Some(runs) => *runs += 1,
        None => drop(launches.insert(name.to_owned(), 1)),
    }
}

/// Calls of each entry point so far; one that several places count is there once.
#[must_use]
pub fn counts() -> BTreeMap<&'static str, u64> {
    let mut counts = BTreeMap::new();
    let mut at = FIRST.load(Ordering::Acquire);
    // SAFETY: null or a counter, which is static; nobody has more than a shared reference.
    while let Some(counter) = unsafe { at.as_ref() } {
        *counts.entry(counter.name).or_insert(0) += counter.calls.load(Ordering::Relaxed);
        at = counter.next.load(Ordering::Acquire);
    }
    counts
}

/// Runs of each kernel so far, by the names that they were launched by.
#[must_use]
pub fn launches() -> BTreeMap<String, u64> {
    LAUNCHES.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// The line that is written at the end.
#[must_use]
pub fn line() -> String {
    let calls = object(counts().iter().map(|(name, count)| (*name, *count)));
    let launches = launches();
    let kernels = object(launches.iter().map(|(name, count)| (name.as_str(), *count)));
    format!("{{\"process\":{},\"calls\":{calls},\"kernels\":{kernels}}}\n", std::process::id())
}

fn object<'a>(counts: impl Iterator<Item = (&'a str, u64)>) -> String {
    // Names of C and C++ have neither quotation marks nor backslashes.
    let fields: Vec<String> = counts.map(|(name, count)| format!("\"{name}\":{count}")).collect();
    format!("{{{}}}", fields.join(","))
}

/// Runs when the library is taken down, at the end of the process.
extern "C" fn write_line() {
    let Some(path) = std::env::var_os("HBMARK_SIMULATED_CALLS") else { return };
    let file = std::fs::OpenOptions::new().create(true).append(true).open(&path);
    // One write, so that lines of several processes do not mix.
    if let Err(error) = file.and_then(|mut file| file.write_all(line().as_bytes())) {
        // Nobody is left to take an error.
        let _ = writeln!(std::io::stderr(), "simulated CUDA: cannot write {}: {error}", path.display());
    }
}

// SAFETY: the section holds addresses of functions that take nothing, which is what this is.
#[used]
#[unsafe(link_section = ".fini_array")]
static AT_EXIT: extern "C" fn() = write_line;
