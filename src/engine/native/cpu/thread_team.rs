//! A persistent team of pinned threads.
//!
//! Enters: a job, a function of the worker that runs it. Leaves: nothing, when all members are done with it. No thread is spawned per operation: members
//! spin for the next job for a while and park when none comes. The caller is a member too. Work of a job is divided into
//! units: each member has a contiguous range of its own (whose memory it touched first), and takes units of others when that is
//! done, so that a slow core delays the step little. Results do not depend on which member does a unit, nor on how many do: a team that
//! may shrink leaves out members whose processor another program takes.
//!
//! A job of some microseconds is as long as some ten transfers of a cache line between two processors. So what one member writes and another
//! waits for is one line, and the counters of a job are not reset for the next: they carry its number.
#![expect(unsafe_code, reason = "a job borrowed from the caller is shared with the members")]

mod disjoint_slice;
mod preemption;

use std::cell::{Cell, UnsafeCell};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

#[cfg(target_os = "linux")]
use rustix::thread::CpuSet;

use crate::machine::environment::within_quota;
#[cfg(target_os = "linux")]
use crate::machine::processors::{allowed_to_thread, cores_first};
use crate::machine::system_files::Root;
use hbmark_cpu_kernels::tiles::release_matrices;
use preemption::{Attendance, RunDelay};

pub use disjoint_slice::DisjointSlice;

/// Phases of one job with shared work; each has its own counters.
pub const PHASES: usize = 4;

/// Turns of a spinning member before it parks: some hundred microseconds, well beyond the time between two operations.
const SPINS_BEFORE_PARKING: u32 = 20_000;

/// Turns of a waiting member before it yields: the member it waits for may have lost its core.
const SPINS_BEFORE_YIELDING: u32 = 4_000;

/// Time between two looks at who has lost a processor, for each member that is looked at, which takes some microseconds.
const LOOK_EVERY: Duration = Duration::from_micros(100);

/// The place of a member that is left out of a job.
const LEFT_OUT: usize = usize::MAX;

/// A counter on a cache line of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Counter(AtomicUsize);

/// The epoch of a job, or the number of a barrier, on a cache line that one member writes and another waits for.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Signal(AtomicU64);

/// Units taken of a member's range, and the job in which that was, in one number.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Tickets(AtomicU64);

/// Bits of a number behind that of the job: units of a range that were taken, or barriers so far.
const COUNT_BITS: u32 = 24;
const COUNTS: u64 = (1 << COUNT_BITS) - 1;

/// Jobs that a team runs.
const MOST_JOBS: u64 = 1 << (u64::BITS - COUNT_BITS);

impl Tickets {
    /// The next units of so many in a job: half of those that are left, and no more than `most`.
    fn take(&self, job: u64, units: usize, most: usize) -> Option<Range<usize>> {
        let mut last = self.0.load(Ordering::Relaxed);
        loop {
            // What was taken in an earlier job does not count.
            let taken = if last >> COUNT_BITS == job { (last & COUNTS) as usize } else { 0 };
            if taken >= units {
                return None;
            }
            let end = taken + (units - taken).div_ceil(2).min(most);
            let next = job << COUNT_BITS | end as u64;
            match self.0.compare_exchange_weak(last, next, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Some(taken..end),
                Err(changed) => last = changed,
            }
        }
    }
}

type Job<'a> = dyn Fn(&Worker<'_>) + Sync + 'a;

/// What the caller writes for the members, all on one cache line.
#[derive(Default)]
#[repr(align(128))]
struct Posted {
    /// Twice the number of the current job: a change to an even number starts one. Odd while `places` change.
    epoch: AtomicU64,
    /// Members of the current job.
    present: AtomicUsize,
    job: UnsafeCell<Option<&'static Job<'static>>>,
}

/// State shared by the members.
struct Shared {
    members: usize,
    posted: Posted,
    /// Each member's index within the current job, or [`LEFT_OUT`].
    places: Vec<Counter>,
    /// The system's number of each member's thread, 0 until it has started.
    threads: Vec<AtomicU32>,
    /// Waits so long that a member may have lost its processor.
    long_waits: Counter,
    /// The epoch of the last job that the member at each place is done with.
    done: Vec<Signal>,
    parked: Counter,
    /// Rounds of a barrier of all members.
    rounds: usize,
    /// The last barrier at which a member has heard of others, for each place and round.
    arrived: Vec<Signal>,
    /// For each place and phase.
    taken: Vec<[Tickets; PHASES]>,
    stop: AtomicBool,
}

impl Shared {
    /// Starts the next job. For the caller alone.
    fn next_epoch(&self) -> u64 {
        let next = (self.posted.epoch.load(Ordering::Relaxed) | 1) + 1;
        self.posted.epoch.store(next, Ordering::SeqCst);
        next
    }
}

// SAFETY: `job` is written only by the caller while no member runs (all are `done`), before the store of `epoch` that members acquire;
// everything else is atomic.
unsafe impl Sync for Shared {}
// SAFETY: the reference in `job` is only used while `Team::run` keeps its referent alive.
unsafe impl Send for Shared {}

/// Waits for what another thread does. Whether it took so long that this thread has yielded its processor.
pub(in crate::engine::native) fn spin_until(ready: impl Fn() -> bool) -> bool {
    let mut spins = 0u32;
    while !ready() {
        spins += 1;
        if spins.is_multiple_of(SPINS_BEFORE_YIELDING) {
            std::thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
    }
    spins >= SPINS_BEFORE_YIELDING
}

/// One member within a job.
pub struct Worker<'a> {
    pub index: usize,
    pub count: usize,
    shared: &'a Shared,
    job: u64,
    /// Barriers of this job so far.
    barriers: Cell<u64>,
}

impl Drop for Worker<'_> {
    fn drop(&mut self) {
        release_matrices();
    }
}

impl std::fmt::Debug for Worker<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Worker({} of {})", self.index, self.count)
    }
}

impl<'a> Worker<'a> {
    /// The member at a place in the job of an epoch.
    fn new(shared: &'a Shared, index: usize, count: usize, epoch: u64) -> Self {
        Self { index, count, shared, job: epoch / 2, barriers: Cell::new(0) }
    }

    /// Waits for all members.
    ///
    /// A dissemination barrier: in each round a member tells another, twice as far away as in the round before, that it is there and whom it has
    /// heard of. After log₂ rounds, rounded up, all have heard of all.
    ///
    /// # Panics
    /// After 2²⁴ barriers in one job.
    pub fn barrier(&self) {
        let count = self.barriers.get() + 1;
        assert!(count <= COUNTS, "a job has fewer barriers");
        self.barriers.set(count);
        let number = self.job << COUNT_BITS | count;
        let mut waited = false;
        let signal =
            |member: usize, round: usize| &self.shared.arrived[member * self.shared.rounds + round].0;
        for round in 0..rounds_of_barrier(self.count) {
            let other = (self.index + (1 << round)) % self.count;
            signal(other, round).store(number, Ordering::Release);
            // Whoever tells this one may be at the next barrier already.
            let heard = signal(self.index, round);
            waited |= spin_until(|| heard.load(Ordering::Acquire) >= number);
        }
        if waited {
            self.shared.long_waits.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Does units `0..units` together with the other members, each once. A phase is for one such loop of a job.
    ///
    /// # Panics
    /// When a member's range is of 2²⁴ units or more.
    pub fn parallel_for(&self, phase: usize, units: usize, unit: impl FnMut(usize)) {
        self.parallel_for_short(phase, units, 1, unit);
    }

    /// As [`Self::parallel_for`] for units so short that taking one costs a part of it: up to `most` are taken at a time. A locked instruction waits
    /// until this processor's store buffer is empty, and what it holds may go to lines that another processor has.
    pub fn parallel_for_short(&self, phase: usize, units: usize, most: usize, mut unit: impl FnMut(usize)) {
        for offset in 0..self.count {
            let owner = (self.index + offset) % self.count;
            let range = owned(owner, self.count, units);
            assert!(range.len() as u64 <= COUNTS, "a member's range has fewer units");
            let taken = &self.shared.taken[owner][phase];
            while let Some(next) = taken.take(self.job, range.len(), most) {
                next.for_each(|next| unit(range.start + next));
            }
        }
    }
}

/// Rounds of a barrier: log₂ of the members, rounded up.
fn rounds_of_barrier(members: usize) -> usize {
    members.next_power_of_two().ilog2() as usize
}

/// The units that a member does first: those whose memory it touched first.
pub fn owned(member: usize, members: usize, units: usize) -> Range<usize> {
    units * member / members..units * (member + 1) / members
}

/// A team of threads, the caller included.
pub struct Team {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// Of the members beside the caller, in a team that may shrink.
    attendance: Vec<Attendance>,
    looked: Instant,
    /// Members of the next job, the caller included.
    present: usize,
    /// Whether they are others than those of the last job.
    changed: bool,
    /// Jobs that were run, and the members that each did without, since that was last asked.
    jobs: u64,
    absences: u64,
}

impl std::fmt::Debug for Team {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Team").field("members", &self.shared.members).finish_non_exhaustive()
    }
}

impl Team {
    /// A team on the first processors.
    #[cfg(test)]
    pub fn new(members: usize) -> std::io::Result<Self> {
        Self::on_processors(members, 0, 1)
    }

    /// As [`Self::on_processors`], wherever the system runs them.
    pub fn unpinned(members: usize) -> std::io::Result<Self> {
        Self::start(members, |_| None)
    }

    /// Starts a team of so many members, the caller being the first.
    ///
    /// The others are pinned to every `apart`-th processor from the `first` on of those that this process may use, leaving the first of them to
    /// the caller, who is not pinned: threads that it starts later would inherit that. Nor are any where [`binds`] says no.
    pub fn on_processors(members: usize, first: usize, apart: usize) -> std::io::Result<Self> {
        let members = members.max(1);
        let processors = allowed_processors().unwrap_or_default();
        let fits = first + (members - 1) * apart < processors.len();
        let bound = fits && binds(&Root::system(), processors.len());
        Self::start(members, |index| bound.then(|| processors[first + index * apart]))
    }

    fn start(members: usize, processor: impl Fn(usize) -> Option<usize>) -> std::io::Result<Self> {
        let members = members.max(1);
        let shared = Arc::new(Shared {
            members,
            posted: Posted::default(),
            places: (0..members).map(|place| Counter(place.into())).collect(),
            threads: (0..members).map(|_| AtomicU32::new(0)).collect(),
            long_waits: Counter::default(),
            done: (0..members).map(|_| Signal::default()).collect(),
            parked: Counter::default(),
            rounds: rounds_of_barrier(members),
            arrived: (0..members * rounds_of_barrier(members)).map(|_| Signal::default()).collect(),
            taken: (0..members).map(|_| Default::default()).collect(),
            stop: AtomicBool::new(false),
        });
        let mut team = Self {
            shared,
            threads: Vec::with_capacity(members - 1),
            attendance: Vec::new(),
            looked: Instant::now(),
            present: members,
            changed: false,
            jobs: 0,
            absences: 0,
        };
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

    /// The same team for jobs that any number of members can do: while other programs take a member's processor, jobs are run without it.
    pub fn that_may_shrink(mut self) -> Self {
        let delay = |thread: &AtomicU32| {
            spin_until(|| thread.load(Ordering::Relaxed) != 0);
            Attendance::new(RunDelay::of_thread(thread.load(Ordering::Relaxed)))
        };
        self.attendance = self.shared.threads[1..].iter().map(delay).collect();
        self
    }

    /// Members, the caller included.
    pub fn members(&self) -> usize {
        self.shared.members
    }

    /// Members that were left out of a job, on average over the jobs since the last call; none where there were no jobs, or the team may not shrink.
    pub fn take_absence(&mut self) -> Option<f64> {
        let (jobs, absences) = (std::mem::take(&mut self.jobs), std::mem::take(&mut self.absences));
        (jobs > 0 && !self.attendance.is_empty()).then(|| absences as f64 / jobs as f64)
    }

    /// Runs a job on all members, or on all that have their processors in a team that may shrink, and returns when all are done.
    ///
    /// A job that panics ends the process: the other members may wait at a barrier for the one that panicked.
    ///
    /// # Panics
    /// After 2⁴⁰ jobs: years of the shortest ones.
    pub fn run(&mut self, job: &Job<'_>) {
        let last = self.shared.posted.epoch.load(Ordering::Relaxed) / 2;
        assert!(last + 1 < MOST_JOBS, "the number of a job fits beside a count");
        if self.present < self.shared.members {
            let now = Instant::now();
            self.changed |= self.attendance.iter_mut().fold(false, |any, member| member.returns(now) | any);
        }
        self.take_places();
        let shared = &*self.shared;
        let count = self.present;
        self.jobs += 1;
        self.absences += (shared.members - count) as u64;
        if count == 1 {
            // Nobody else has a place: whoever has just lost one goes to sleep.
            job(&Worker::new(shared, 0, count, shared.next_epoch()));
            return;
        }
        // SAFETY: only the lifetime changes. Members use the reference between the store of `epoch` and that of `done`, and this function
        // returns after all of them have stored it, so the borrow outlives every use.
        let pointer = unsafe { std::mem::transmute::<&Job<'_>, &'static Job<'static>>(job) };
        // SAFETY: no member runs: all were done at the end of the last job, and `&mut self` excludes a second caller.
        unsafe { *shared.posted.job.get() = Some(pointer) };
        shared.posted.present.store(count, Ordering::Relaxed);
        // Sequentially consistent with the member's `parked` increment and its last load of `epoch`: either it reads the new epoch, or
        // this reads it as parked.
        let epoch = shared.next_epoch();
        if shared.parked.0.load(Ordering::SeqCst) > 0 {
            for (thread, place) in self.threads.iter().zip(&shared.places[1..]) {
                if place.0.load(Ordering::Relaxed) != LEFT_OUT {
                    thread.thread().unpark();
                }
            }
        }
        let own = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            job(&Worker::new(shared, 0, count, epoch));
        }));
        if own.is_err() {
            // The others may wait at a barrier for this one: nothing can continue.
            std::process::abort();
        }
        let waited = shared.done[1..count]
            .iter()
            .fold(false, |waited, done| spin_until(|| done.0.load(Ordering::Acquire) == epoch) | waited);
        if waited || shared.long_waits.0.load(Ordering::Relaxed) > 0 {
            shared.long_waits.0.store(0, Ordering::Relaxed);
            self.look();
        }
    }

    /// As [`run`](Self::run), on all members of a team that may shrink too: for memory that lies where it is touched first.
    pub fn run_on_all(&mut self, job: &Job<'_>) {
        self.changed |= self.attendance.iter_mut().fold(false, |any, member| member.recall() | any);
        self.run(job);
    }

    /// Looks who has lost a processor.
    fn look(&mut self) {
        let now = Instant::now();
        if now - self.looked < LOOK_EVERY * u32::try_from(self.attendance.len()).unwrap_or(u32::MAX) {
            return;
        }
        self.looked = now;
        for member in self.attendance.iter_mut().filter(|member| member.is_present()) {
            self.changed |= member.leaves(now);
        }
    }

    /// Gives the members that take part in the next job their indices, where others took part in the last one.
    fn take_places(&mut self) {
        if !self.changed {
            return;
        }
        self.changed = false;
        self.present = 1;
        let shared = &*self.shared;
        // A member that reads its place between two equal even epochs has the place of that epoch's job: with a new place it acquires the odd
        // epoch before it, and with an even epoch the places before that.
        shared.posted.epoch.fetch_or(1, Ordering::SeqCst);
        for ((member, place), thread) in self.attendance.iter().zip(&shared.places[1..]).zip(&self.threads) {
            let new = if member.is_present() { self.present } else { LEFT_OUT };
            self.present += usize::from(member.is_present());
            let old = place.0.swap(new, Ordering::AcqRel);
            if (old == LEFT_OUT) != (new == LEFT_OUT) {
                thread.thread().unpark();
            }
        }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.next_epoch();
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
    shared.threads[index].store(thread_number(), Ordering::Relaxed);
    let mut seen = 0;
    loop {
        let place = next_job(shared, index, &mut seen);
        if shared.stop.load(Ordering::SeqCst) {
            return;
        }
        // SAFETY: the caller wrote the job before the epoch that was just acquired, and keeps it alive until this member is done.
        let job = unsafe { *shared.posted.job.get() };
        let worker = Worker::new(shared, place, shared.posted.present.load(Ordering::Relaxed), seen);
        if let Some(job) = job {
            let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| job(&worker)));
            if done.is_err() {
                // As in `run`: others may wait for this one at a barrier.
                std::process::abort();
            }
        }
        shared.done[place].0.store(seen, Ordering::Release);
    }
}

/// Waits for a job after that of the epoch `seen` in which this member has a place: spinning at first, then parked. Any place when the team stops.
fn next_job(shared: &Shared, member: usize, seen: &mut u64) -> usize {
    let mut spins = 0u32;
    loop {
        let epoch = shared.posted.epoch.load(Ordering::Acquire);
        if epoch != *seen && epoch.is_multiple_of(2) {
            let place = shared.places[member].0.load(Ordering::Acquire);
            if shared.posted.epoch.load(Ordering::Acquire) != epoch {
                continue;
            }
            *seen = epoch;
            if place != LEFT_OUT || shared.stop.load(Ordering::SeqCst) {
                return place;
            }
            // Not counted as parked: no job wakes it before it has a place again.
            std::thread::park();
            continue;
        }
        spins += 1;
        if spins < SPINS_BEFORE_PARKING {
            std::hint::spin_loop();
            continue;
        }
        shared.parked.0.fetch_add(1, Ordering::SeqCst);
        if shared.posted.epoch.load(Ordering::SeqCst) == *seen {
            std::thread::park();
        }
        shared.parked.0.fetch_sub(1, Ordering::SeqCst);
        spins = 0;
    }
}

/// The system's number of this thread; where it has none, one that no thread has.
fn thread_number() -> u32 {
    #[cfg(target_os = "linux")]
    return rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs();
    #[cfg(not(target_os = "linux"))]
    return u32::MAX;
}

/// Whether threads are bound to processors. A CPU quota that leaves some idle does not say which: every process under one would take the first.
pub fn binds(root: &Root, processors: usize) -> bool {
    within_quota(root, processors) >= processors
}

/// The processors this process may run on, one of each core before the second ones; none where the system has no such list.
pub fn allowed_processors() -> std::io::Result<Vec<usize>> {
    #[cfg(target_os = "linux")]
    {
        let root = Root::system();
        let allowed = match rustix::thread::sched_getaffinity(None) {
            Ok(set) => (0..CpuSet::MAX_CPU).filter(|processor| set.is_set(*processor)).collect(),
            Err(error) => listed_processors(&root).ok_or(error)?,
        };
        Ok(cores_first(&root, allowed))
    }
    #[cfg(not(target_os = "linux"))]
    Ok(Vec::new())
}

/// The same by the list of the kernel, where more processors could be plugged in than the set has: those that a thread can be bound to.
#[cfg(target_os = "linux")]
fn listed_processors(root: &Root) -> Option<Vec<usize>> {
    let mut listed = allowed_to_thread(root);
    listed.retain(|processor| *processor < CpuSet::MAX_CPU);
    (!listed.is_empty()).then_some(listed)
}

/// Binds this thread to a processor.
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;
    use crate::machine::system_files::fake_root;

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
    fn nobody_passes_a_barrier_before_all_have_come() {
        for members in [2, 3, 4, 5, 8, 9] {
            let mut team = Team::new(members).unwrap();
            let arrived: Vec<AtomicU64> = (0..members).map(|_| AtomicU64::new(0)).collect();
            for job in 0..20 {
                team.run(&|worker| {
                    for barrier in 0..50 {
                        // One comes later than the others, at each barrier another one.
                        if (worker.index + barrier) % members == 0 {
                            std::thread::yield_now();
                        }
                        let number = job * 50 + barrier as u64 + 1;
                        arrived[worker.index].store(number, Ordering::Relaxed);
                        worker.barrier();
                        assert!(arrived.iter().all(|other| other.load(Ordering::Relaxed) >= number));
                    }
                });
            }
        }
    }

    #[test]
    fn units_are_taken_once_in_each_job_and_fewer_at_the_end() {
        let tickets = Tickets::default();
        let all = |job, most| -> Vec<_> { std::iter::from_fn(|| tickets.take(job, 11, most)).collect() };
        for job in [1, 2, 900, MOST_JOBS - 1] {
            assert_eq!(all(job, 4), [0..4, 4..8, 8..10, 10..11]);
        }
        assert_eq!(all(1, usize::MAX), [0..6, 6..9, 9..10, 10..11]);
        assert_eq!(all(2, 1).len(), 11);
        assert_eq!(tickets.take(901, 0, 1), None);
        assert_eq!(tickets.take(901, 1, 1), Some(0..1));
    }

    #[test]
    #[should_panic(expected = "fits beside a count")]
    fn the_number_of_a_job_does_not_wrap() {
        let mut team = Team::new(1).unwrap();
        team.shared.posted.epoch.store(2 * MOST_JOBS - 2, Ordering::Relaxed);
        team.run(&|_| {});
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
    fn a_team_without_some_members_does_every_unit_and_has_them_back_later() {
        let mut team = Team::new(4).unwrap().that_may_shrink();
        let done: Vec<AtomicU64> = (0..40).map(|_| AtomicU64::new(0)).collect();
        let widest = AtomicUsize::new(0);
        let mut rounds = 0;
        // Each round leaves out another set of the three members beside the caller.
        for absent in [0b000_u32, 0b010, 0b101, 0b111, 0b100, 0b011] {
            for (member, attendance) in team.attendance.iter_mut().enumerate() {
                attendance.set_absent(absent >> member & 1 == 1);
            }
            team.changed = true;
            for _ in 0..50 {
                widest.store(0, Ordering::Relaxed);
                team.run(&|worker| {
                    widest.fetch_max(worker.count, Ordering::Relaxed);
                    assert!(worker.index < worker.count);
                    worker.parallel_for(0, done.len(), |unit| {
                        done[unit].fetch_add(1, Ordering::Relaxed);
                    });
                    worker.barrier();
                    worker.parallel_for(1, done.len(), |unit| {
                        done[unit].fetch_add(1, Ordering::Relaxed);
                    });
                });
                rounds += 1;
                assert!(done.iter().all(|count| count.load(Ordering::Relaxed) == 2 * rounds));
            }
            assert!(widest.load(Ordering::Relaxed) <= 4 - absent.count_ones() as usize, "{absent:b}");
            // Another program may have had the processor of a further one.
            assert!(team.take_absence().unwrap() >= f64::from(absent.count_ones()), "{absent:b}");
            assert_eq!(team.take_absence(), None, "no job since");
        }
        // Two are away.
        let widest = AtomicUsize::new(0);
        team.run_on_all(&|worker| {
            widest.fetch_max(worker.index + 1, Ordering::Relaxed);
        });
        assert_eq!((widest.into_inner(), team.members()), (4, 4));
        drop(team);
    }

    #[test]
    fn a_processor_beyond_the_set_is_refused() {
        assert!(pin(usize::MAX).is_err());
        assert!(!allowed_processors().unwrap().is_empty());
    }

    #[test]
    fn more_processors_than_the_set_has_are_read_from_the_list() {
        let status = |list: &str| format!("Name:\thbmark\nCpus_allowed_list:\t{list}\n");
        let listed = |list: &str| {
            let (_keep, root) = fake_root(&[("proc/thread-self/status", status(list).as_str())]);
            listed_processors(&root)
        };
        assert_eq!(listed("0-1,1022-1030"), Some(vec![0, 1, 1022, 1023]));
        assert_eq!(listed("1500"), None, "a thread cannot be bound to any");
        assert_eq!(listed_processors(&fake_root(&[]).1), None);
    }

    #[test]
    fn threads_are_bound_by_affinity_and_not_by_a_quota() {
        let quota = |max: &str| {
            let (_keep, root) = fake_root(&[("proc/self/cgroup", "0::/\n"), ("sys/fs/cgroup/cpu.max", max)]);
            binds(&root, 8)
        };
        assert!(quota("max 100000\n") && quota("800000 100000\n"));
        assert!(!quota("400000 100000\n"));
    }

    #[test]
    fn ranges_of_members_cover_all_units() {
        let ranges: Vec<_> = (0..5).map(|m| owned(m, 5, 17)).collect();
        assert_eq!(ranges.iter().map(ExactSizeIterator::len).sum::<usize>(), 17);
        assert!(ranges.windows(2).all(|w| w[0].end == w[1].start));
    }
}
