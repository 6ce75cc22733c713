//! A persistent team of pinned threads.
//!
//! Enters: a job, a function of the worker that runs it. Leaves: nothing, when all members are done with it. No thread is spawned per operation: members
//! spin for the next job for a while and park when none comes. The caller is a member too. Work of a job is divided into
//! units: each member has a contiguous range of its own (whose memory it touched first), and takes units of others when that is
//! done, so that a slow core does not delay the step. Results do not depend on which member does a unit.
#![expect(unsafe_code, reason = "a job borrowed from the caller is shared with the members")]

use std::cell::UnsafeCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;

#[cfg(target_os = "linux")]
use rustix::thread::CpuSet;

/// Phases of one job with shared work; each has its own counters.
pub const PHASES: usize = 4;

/// Turns of a spinning member before it parks: some hundred microseconds, well beyond the time between two operations.
const SPINS_BEFORE_PARKING: u32 = 20_000;

/// Turns of a waiting member before it yields: the member it waits for may have lost its core.
const SPINS_BEFORE_YIELDING: u32 = 4_000;

/// A counter on a cache line of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Counter(AtomicUsize);

type Job<'a> = dyn Fn(&Worker<'_>) + Sync + 'a;

/// State shared by the members.
struct Shared {
    members: usize,
    /// Number of the current job; a change starts it.
    epoch: Counter,
    /// Members still at the current job.
    busy: Counter,
    parked: Counter,
    barrier: Barrier,
    /// Units taken so far from each member's range, per phase.
    taken: Vec<[Counter; PHASES]>,
    stop: AtomicBool,
    job: UnsafeCell<Option<&'static Job<'static>>>,
}

// SAFETY: `job` is written only by the caller while no member runs (`busy` is 0), before the release store of `epoch` that
// members acquire; everything else is atomic.
unsafe impl Sync for Shared {}
// SAFETY: the reference in `job` is only used while `Team::run` keeps its referent alive.
unsafe impl Send for Shared {}

/// A barrier for members that are all running: it spins.
#[derive(Debug, Default)]
struct Barrier {
    arrived: Counter,
    generation: Counter,
}

impl Barrier {
    fn wait(&self, members: usize) {
        let generation = self.generation.0.load(Ordering::Acquire);
        if self.arrived.0.fetch_add(1, Ordering::AcqRel) + 1 == members {
            self.arrived.0.store(0, Ordering::Relaxed);
            self.generation.0.store(generation.wrapping_add(1), Ordering::Release);
            return;
        }
        spin_until(|| self.generation.0.load(Ordering::Acquire) != generation);
    }
}

/// Waits for what another thread does.
pub(in crate::engine::native) fn spin_until(ready: impl Fn() -> bool) {
    let mut spins = 0u32;
    while !ready() {
        spins += 1;
        if spins.is_multiple_of(SPINS_BEFORE_YIELDING) {
            std::thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
    }
}

/// One member within a job.
#[derive(Clone, Copy)]
pub struct Worker<'a> {
    pub index: usize,
    pub count: usize,
    shared: &'a Shared,
}

impl std::fmt::Debug for Worker<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Worker({} of {})", self.index, self.count)
    }
}

impl Worker<'_> {
    /// Waits for all members.
    pub fn barrier(&self) {
        if self.count > 1 {
            self.shared.barrier.wait(self.count);
        }
    }

    /// Does units `0..units` together with the other members, each once.
    pub fn parallel_for(&self, phase: usize, units: usize, mut unit: impl FnMut(usize)) {
        for offset in 0..self.count {
            let owner = (self.index + offset) % self.count;
            let range = owned(owner, self.count, units);
            let taken = &self.shared.taken[owner][phase].0;
            // Read before it is added to, so that members do not write the counter of a finished range again.
            while taken.load(Ordering::Relaxed) < range.len() {
                let next = taken.fetch_add(1, Ordering::Relaxed);
                if next >= range.len() {
                    break;
                }
                unit(range.start + next);
            }
        }
    }
}

/// The units that a member does first: those whose memory it touched first.
#[must_use]
pub fn owned(member: usize, members: usize, units: usize) -> std::ops::Range<usize> {
    units * member / members..units * (member + 1) / members
}

/// A team of threads, the caller included.
pub struct Team {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl std::fmt::Debug for Team {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Team").field("members", &self.shared.members).finish_non_exhaustive()
    }
}

impl Team {
    /// Starts a team of so many members, the caller being the first.
    ///
    /// The others are pinned to processors of their own among those this process may use, leaving the first to the caller, who is
    /// not pinned: threads that it starts later would inherit that.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub fn new(members: usize) -> std::io::Result<Self> {
        Self::on_processors(members, 0, 1)
    }

    /// As [`Self::new`], wherever the system runs them.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn unpinned(members: usize) -> std::io::Result<Self> {
        Self::start(members, |_| None)
    }

    /// As [`Self::new`], on every `apart`-th processor from the `first` on of those that this process may use.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn on_processors(members: usize, first: usize, apart: usize) -> std::io::Result<Self> {
        let members = members.max(1);
        let processors = allowed_processors().unwrap_or_default();
        let fits = first + (members - 1) * apart < processors.len();
        Self::start(members, |index| fits.then(|| processors[first + index * apart]))
    }

    fn start(members: usize, processor: impl Fn(usize) -> Option<usize>) -> std::io::Result<Self> {
        let members = members.max(1);
        let shared = Arc::new(Shared {
            members,
            epoch: Counter::default(),
            busy: Counter::default(),
            parked: Counter::default(),
            barrier: Barrier::default(),
            taken: (0..members).map(|_| Default::default()).collect(),
            stop: AtomicBool::new(false),
            job: UnsafeCell::new(None),
        });
        let mut team = Self { shared, threads: Vec::with_capacity(members - 1) };
        for index in 1..members {
            let shared = Arc::clone(&team.shared);
            let processor = processor(index);
            let thread = std::thread::Builder::new()
                .name(format!("cpu-{index}"))
                .spawn(move || member(&shared, index, processor))?;
            team.threads.push(thread);
        }
        Ok(team)
    }

    /// Members, the caller included.
    #[must_use]
    pub fn members(&self) -> usize {
        self.shared.members
    }

    /// Runs a job on all members and returns when all are done.
    ///
    /// A job that panics ends the process: the other members may wait at a barrier for the one that panicked.
    pub fn run(&mut self, job: &Job<'_>) {
        let shared = &*self.shared;
        for taken in &shared.taken {
            for counter in taken {
                counter.0.store(0, Ordering::Relaxed);
            }
        }
        let count = shared.members;
        if count == 1 {
            job(&Worker { index: 0, count, shared });
            return;
        }
        // SAFETY: only the lifetime changes. Members use the reference between the store of `epoch` and their decrement of
        // `busy`, and this function returns after `busy` has reached 0, so the borrow outlives every use.
        let pointer = unsafe { std::mem::transmute::<&Job<'_>, &'static Job<'static>>(job) };
        // SAFETY: no member runs: `busy` is 0 at the end of every job, and `&mut self` excludes a second caller.
        unsafe { *shared.job.get() = Some(pointer) };
        shared.busy.0.store(count - 1, Ordering::Relaxed);
        // Sequentially consistent with the member's `parked` increment and its last load of `epoch`: either it reads the new epoch, or
        // this reads it as parked.
        shared.epoch.0.fetch_add(1, Ordering::SeqCst);
        if shared.parked.0.load(Ordering::SeqCst) > 0 {
            self.threads.iter().for_each(|thread| thread.thread().unpark());
        }
        let own = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            job(&Worker { index: 0, count, shared });
        }));
        if own.is_err() {
            // The others may wait at a barrier for this one: nothing can continue.
            std::process::abort();
        }
        spin_until(|| shared.busy.0.load(Ordering::Acquire) == 0);
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.epoch.0.fetch_add(1, Ordering::SeqCst);
        for thread in self.threads.drain(..) {
            thread.thread().unpark();
            // A member that panicked has printed its message.
            let _ = thread.join();
        }
    }
}

/// The loop of a member that is not the caller.
fn member(shared: &Shared, index: usize, processor: Option<usize>) {
    if let Some(processor) = processor {
        // A system that refuses leaves it unbound: slower, not wrong.
        let _ = pin(processor);
    }
    let mut seen = 0;
    loop {
        seen = next_epoch(shared, seen);
        if shared.stop.load(Ordering::SeqCst) {
            return;
        }
        // SAFETY: the caller wrote the job before the epoch that was just acquired, and keeps it alive until `busy` is 0.
        let job = unsafe { *shared.job.get() };
        let worker = Worker { index, count: shared.members, shared };
        if let Some(job) = job {
            let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| job(&worker)));
            if done.is_err() {
                // As in `run`: others may wait for this one at a barrier.
                std::process::abort();
            }
        }
        shared.busy.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Waits for an epoch after `seen`: spinning at first, then parked.
fn next_epoch(shared: &Shared, seen: usize) -> usize {
    let mut spins = 0u32;
    loop {
        let epoch = shared.epoch.0.load(Ordering::Acquire);
        if epoch != seen {
            return epoch;
        }
        spins += 1;
        if spins < SPINS_BEFORE_PARKING {
            std::hint::spin_loop();
            continue;
        }
        shared.parked.0.fetch_add(1, Ordering::SeqCst);
        if shared.epoch.0.load(Ordering::SeqCst) == seen {
            std::thread::park();
        }
        shared.parked.0.fetch_sub(1, Ordering::SeqCst);
        spins = 0;
    }
}

/// The processors this process may run on, in order; none where the system has no such list.
///
/// # Errors
/// What the system said.
pub fn allowed_processors() -> std::io::Result<Vec<usize>> {
    #[cfg(target_os = "linux")]
    {
        let set = rustix::thread::sched_getaffinity(None)?;
        Ok((0..CpuSet::MAX_CPU).filter(|processor| set.is_set(*processor)).collect())
    }
    #[cfg(not(target_os = "linux"))]
    Ok(Vec::new())
}

/// Binds this thread to a processor.
///
/// # Errors
/// What the system said.
pub fn pin(processor: usize) -> std::io::Result<()> {
    #[cfg(target_os = "linux")]
    {
        if processor >= CpuSet::MAX_CPU {
            return Err(std::io::ErrorKind::InvalidInput.into());
        }
        let mut set = CpuSet::new();
        set.set(processor);
        rustix::thread::sched_setaffinity(None, &set)?;
    }
    #[cfg(not(target_os = "linux"))]
    let _ = processor;
    Ok(())
}

/// A slice that members write at places that do not overlap.
#[derive(Debug)]
pub struct DisjointSlice<T> {
    start: *mut T,
    len: usize,
}

// Copies are further handles under the same contract, whatever the elements are.
impl<T> Clone for DisjointSlice<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for DisjointSlice<T> {}

// SAFETY: by the contract of `part`, no two members touch the same element.
unsafe impl<T: Send> Send for DisjointSlice<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for DisjointSlice<T> {}

impl<T> DisjointSlice<T> {
    /// Wraps a slice for the duration of a job.
    pub fn new(slice: &mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len() }
    }

    /// A part of the slice.
    ///
    /// # Safety
    /// The slice must still be borrowed by the job's caller, and no other live part may overlap this one.
    ///
    /// # Panics
    /// When the part is not within the slice.
    #[expect(clippy::mut_from_ref, reason = "the caller promises that parts do not overlap")]
    #[must_use]
    pub unsafe fn part(&self, range: std::ops::Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "a part lies within its slice");
        // SAFETY: within the slice as asserted; exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }

    /// The whole slice, after a barrier after which it is not written.
    ///
    /// # Safety
    /// No part may be written while this is alive.
    #[must_use]
    pub unsafe fn whole(&self) -> &[T] {
        // SAFETY: the slice lives as long as the job; it is not written, by the caller's promise.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    #[test]
    fn every_unit_is_done_once_in_every_phase() {
        for members in [1, 2, 3, 5] {
            let mut team = Team::new(members).unwrap();
            for units in [0, 1, 7, 100] {
                let first: Vec<AtomicU64> = (0..units).map(|_| AtomicU64::new(0)).collect();
                let second: Vec<AtomicU64> = (0..units).map(|_| AtomicU64::new(0)).collect();
                team.run(&|worker| {
                    worker.parallel_for(0, units, |unit| {
                        first[unit].fetch_add(1, Ordering::Relaxed);
                    });
                    worker.barrier();
                    // After the barrier all of the first phase is visible.
                    worker.parallel_for(1, units, |unit| {
                        let all: u64 = first.iter().map(|f| f.load(Ordering::Relaxed)).sum();
                        second[unit].fetch_add(all, Ordering::Relaxed);
                    });
                });
                assert!(first.iter().all(|f| f.load(Ordering::Relaxed) == 1));
                assert!(second.iter().all(|s| s.load(Ordering::Relaxed) == units as u64));
            }
        }
    }

    #[test]
    fn a_team_works_after_it_has_parked_and_leaves_no_thread_behind() {
        let total = AtomicU64::new(0);
        let mut team = Team::new(3).unwrap();
        let shared = Arc::downgrade(&team.shared);
        for _ in 0..3 {
            team.run(&|_| {
                total.fetch_add(1, Ordering::Relaxed);
            });
            spin_until(|| team.shared.parked.0.load(Ordering::SeqCst) == 2);
        }
        assert_eq!(total.load(Ordering::Relaxed), 9);
        drop(team);
        assert_eq!(shared.strong_count(), 0, "every member has returned and dropped its share");
    }

    #[test]
    fn a_processor_beyond_the_set_is_refused() {
        assert!(pin(usize::MAX).is_err());
        assert!(!allowed_processors().unwrap().is_empty());
    }

    #[test]
    fn ranges_of_members_cover_all_units() {
        let ranges: Vec<_> = (0..5).map(|m| owned(m, 5, 17)).collect();
        assert_eq!(ranges.iter().map(ExactSizeIterator::len).sum::<usize>(), 17);
        assert!(ranges.windows(2).all(|w| w[0].end == w[1].start));
    }
}
