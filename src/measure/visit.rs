//! One visit of one cell: fill, warm up, take blocks.
//!
//! Enters: a session, a monitor and a [`Visit`]: which cell, and how many blocks. Leaves: a [`Visited`], plain data that can be sent
//! between processes or saved. The order of cells and the stopping rule are in [`protocol`](super::protocol).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::block::{BlockError, CellInput, WarmupResult, take_block, warm_up};
use super::protocol::{Monitor, Protocol};
use crate::engine::{EngineError, Session};
use crate::machine::memory;
use hbmark_core::result::{Block, Cause, Cell, Phase, Status, judged_times};
use hbmark_core::units::{Bytes, whole_count};

/// A request for a visit.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Visit {
    /// The cell's index in the run; it seeds its tokens.
    pub index: usize,
    pub cell: Cell,
    pub round: usize,
    /// Accepted blocks to take.
    pub wanted: usize,
    /// Steps in a block; none before the first visit has determined them.
    pub steps: Option<usize>,
    /// The cell's greedy tokens; empty before its first block. Another process may have found others: a library that times its algorithms
    /// takes one there that sums in another order.
    pub tokens: Vec<u32>,
    /// The roofline's time of a step, from which the supervisor's timeout follows.
    pub predicted_ns: Option<f64>,
    /// A canary further off than this rejects a block.
    pub canary_tolerance: f64,
    /// Keep the cell's KV for the next visit.
    pub keep: bool,
}

/// The result of a visit.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Visited {
    pub blocks: Vec<Block>,
    pub steps: Option<usize>,
    pub tokens: Vec<u32>,
    pub moved: Option<Bytes>,
    pub peak_memory: Option<Bytes>,
    /// Why blocks were kept that would have been rejected, where noise is allowed.
    #[serde(default)]
    pub noisy: Option<Cause>,
    /// Relative drift of a warm-up that never became steady.
    pub unsteady: Option<f64>,
    /// Why the cell ended early.
    pub end: Option<CellEnd>,
}

impl Visited {
    /// A visit whose process was lost.
    pub fn lost(reason: Cause) -> Self {
        Self {
            end: Some(CellEnd { status: Status::Failed, reason, fault: Some(VisitFault::Lost) }),
            ..Self::default()
        }
    }

    /// Whether the session must be replaced before the next visit.
    pub fn is_sticky(&self) -> bool {
        self.end.as_ref().is_some_and(|end| end.fault.is_some())
    }
}

/// How a cell ended before it had all its blocks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CellEnd {
    pub status: Status,
    pub reason: Cause,
    /// What may have damaged the session.
    pub fault: Option<VisitFault>,
}

/// A fault that may affect later cells of the session, or came of earlier ones: the same cell may succeed in a fresh process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VisitFault {
    /// An allocation failed. What earlier cells made an engine allocate it keeps, so that cells that fit one by one may not fit one after another.
    OutOfMemory,
    /// The device failed. After most of CUDA's errors every later call of the process fails too.
    Device,
    /// The process that held the session ended or does not respond.
    Lost,
}

/// A block of the reference cell, without a monitor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Reference {
    pub index: usize,
    pub cell: Cell,
    pub steps: usize,
    pub predicted_ns: Option<f64>,
    pub keep: bool,
}

/// What is said of a visit while it lasts, outside of the timed part.
#[derive(Debug, Clone, Copy)]
pub enum VisitEvent<'a> {
    /// The next event comes within so many seconds as predicted, for the supervisor's timeout; `None` where nothing predicts it.
    Busy(Option<f64>),
    /// A block was rejected.
    Rejected(&'a Cause),
}

/// Receives the events of a visit.
pub type OnVisitEvent<'a> = &'a mut dyn FnMut(VisitEvent<'_>);

/// The inputs of a session's cells, and which of them were warmed up.
#[derive(Debug, Default)]
pub struct CellInputs {
    inputs: BTreeMap<usize, CellInput>,
    warmed: std::collections::BTreeSet<usize>,
}

impl CellInputs {
    /// The input of a cell, made on first use.
    pub fn of(
        &mut self,
        session: &dyn Session,
        protocol: &Protocol,
        index: usize,
        cell: &Cell,
    ) -> &mut CellInput {
        self.inputs.entry(index).or_insert_with(|| {
            let vocab = session.architecture().vocab_size;
            CellInput::new(cell, index, protocol.seed, vocab).filled_by(protocol.kv)
        })
    }

    /// Frees the KV of a cell.
    pub fn release(&mut self, session: &mut dyn Session, index: usize) {
        if let Some(input) = self.inputs.get_mut(&index) {
            input.release(session);
        }
    }

    /// Visits a cell.
    pub fn visit(
        &mut self,
        session: &mut dyn Session,
        monitor: &mut dyn Monitor,
        protocol: &Protocol,
        visit: &Visit,
        on_event: OnVisitEvent<'_>,
    ) -> Visited {
        peak_memory(session, monitor);
        let whole = self.warmed.insert(visit.index);
        let tokens = if whole { Vec::new() } else { visit.tokens.clone() };
        let mut visited = Visited { steps: visit.steps, tokens, ..Visited::default() };
        let input = self.of(session, protocol, visit.index, &visit.cell);
        if let Err(error) = sample(session, monitor, protocol, visit, input, whole, &mut visited, on_event) {
            input.release(session);
            visited.end = Some(end_of(&error));
        }
        // Where the visit ended early; the next one has a window of its own.
        if let Some(load) = monitor.after_visit() {
            load.apply_to(&mut visited.blocks);
        }
        visited.peak_memory = visited.peak_memory.max(peak_memory(session, monitor));
        if !visit.keep {
            self.release(session, visit.index);
        }
        visited
    }

    /// The mean step of one unmonitored block, in nanoseconds; `None` when it fails.
    pub fn measure_reference(
        &mut self,
        session: &mut dyn Session,
        protocol: &Protocol,
        reference: &Reference,
        on_event: OnVisitEvent<'_>,
    ) -> Option<f64> {
        let input = self.of(session, protocol, reference.index, &reference.cell);
        let block = reference_block(session, input, reference, on_event);
        if block.is_err() || !reference.keep {
            input.release(session);
        }
        let block = block.ok()?;
        let times = judged_times(Phase::Decode, &block);
        Some(times.iter().sum::<f64>() / times.len() as f64)
    }
}

/// Fills the reference cell and takes its block, behind a few steps that do not count.
fn reference_block(
    session: &mut dyn Session,
    input: &mut CellInput,
    reference: &Reference,
    on_event: OnVisitEvent<'_>,
) -> Result<Block, BlockError> {
    let expected = seconds(reference.predicted_ns);
    on_event(VisitEvent::Busy(until_stepped(session, input, expected)));
    input.fill(session)?;
    on_event(VisitEvent::Busy(expected.map(|step| step * (2 * reference.steps) as f64)));
    let mut tokens = Vec::new();
    take_block(session, input, reference.steps.min(5), &mut tokens)?;
    take_block(session, input, reference.steps, &mut tokens)
}

/// Fills a cell, steps it twice (an engine that replays records the second step) and frees it. The error, if any.
pub fn trial_step(session: &mut dyn Session, cell: &Cell, protocol: &Protocol) -> Option<CellEnd> {
    // Not from the run's inputs: the cell may not be part of the run.
    let vocab = session.architecture().vocab_size;
    let mut input = CellInput::new(cell, 0, protocol.seed, vocab).filled_by(protocol.kv);
    let twice = input.fill(session).and_then(|()| {
        session.step(input.step())?;
        session.step(input.step())
    });
    input.release(session);
    twice.err().map(|error| end_of(&error.into()))
}

fn seconds(predicted_ns: Option<f64>) -> Option<f64> {
    predicted_ns.map(|nanoseconds| nanoseconds / 1e9)
}

/// The seconds of a fill and of the first step behind it, where a step is expected to take so long.
fn until_stepped(session: &mut dyn Session, input: &CellInput, expected: Option<f64>) -> Option<f64> {
    Some(expected? * (input.steps_to_fill(session)? + 1) as f64)
}

/// Fills, warms up and takes blocks until the visit has enough of them or must stop.
#[expect(clippy::too_many_arguments, reason = "the parts of a session, which are borrowed apart")]
fn sample(
    session: &mut dyn Session,
    monitor: &mut dyn Monitor,
    protocol: &Protocol,
    visit: &Visit,
    input: &mut CellInput,
    whole: bool,
    visited: &mut Visited,
    on_event: OnVisitEvent<'_>,
) -> Result<(), BlockError> {
    let expected = seconds(visit.predicted_ns);
    on_event(VisitEvent::Busy(until_stepped(session, input, expected)));
    input.fill(session)?;
    let warm = warm_up(session, input, protocol, whole, &mut || on_event(VisitEvent::Busy(expected)))?;
    let steps = *visited.steps.get_or_insert_with(|| steps_of(visit.cell.phase, &warm, protocol));
    visited.unsteady = (!warm.steady).then_some(warm.drift);
    let (mut taken, mut rejections) = (0, Rejections::default());
    loop {
        let shared = if taken < visit.wanted {
            let step = expected.unwrap_or(0.0).max(warm.step_seconds);
            on_event(VisitEvent::Busy(Some(step * steps as f64)));
            session.threads_away();
            monitor.before_block();
            let block = take_block(session, input, steps, &mut visited.tokens)?;
            let context = monitor.after_block(block.wall_ns / 1e9);
            let mut context = context.without_threads(session.threads_away());
            visited.moved = session.bytes_moved();
            let memory_bytes = memory_in_use(session, monitor, &mut visited.peak_memory);
            let mut block = Block { visit: visit.round, memory_bytes, ..block };
            let shared = context.load.take();
            context.apply_to(&mut block, visit.canary_tolerance);
            match &block.rejected {
                Some(cause) => on_event(VisitEvent::Rejected(cause)),
                None => taken += 1,
            }
            visited.blocks.push(block);
            shared
        } else {
            // The load over the last blocks may still reject them.
            match monitor.after_visit() {
                Some(shared) => Some(shared),
                None => return Ok(()),
            }
        };
        if let Some(shared) = shared {
            let lost = shared.apply_to(&mut visited.blocks);
            taken -= lost;
            (0..lost)
                .for_each(|_| shared.reject.iter().for_each(|cause| on_event(VisitEvent::Rejected(cause))));
        }
        let (blocks, in_a_row) = rejections.in_a_row(&visited.blocks);
        let retries = if visited.noisy.is_some() { 0 } else { protocol.max_retries };
        if in_a_row > retries
            && let Some(last) = visited.blocks.last().and_then(|block| block.rejected.clone())
        {
            let reason = Cause::RejectedInARow { blocks, last: Box::new(last) };
            if !protocol.allow_noise {
                visited.end = Some(CellEnd { status: Status::Disturbed, reason, fault: None });
                return Ok(());
            }
            let begin = visited.blocks.len() - blocks;
            for block in &mut visited.blocks[begin..] {
                block.conditions.extend(block.rejected.take());
            }
            taken += blocks;
            visited.noisy.get_or_insert(reason);
        }
    }
}

/// The rejections of a visit's blocks. The blocks that one look at the load of other processes rejects are one rejection.
#[derive(Default)]
struct Rejections {
    looks: usize,
    /// The look that rejected each block, 0 for a block that counts.
    by: Vec<usize>,
}

impl Rejections {
    /// Looks at the blocks as they are now: blocks and rejections since the last one that counts.
    fn in_a_row(&mut self, blocks: &[Block]) -> (usize, usize) {
        self.looks += 1;
        self.by.resize(blocks.len(), 0);
        for (block, by) in blocks.iter().zip(&mut self.by) {
            *by = if block.rejected.is_none() {
                0
            } else if *by == 0 {
                self.looks
            } else {
                *by
            };
        }
        let mut run: Vec<usize> = self.by.iter().rev().copied().take_while(|by| *by > 0).collect();
        let blocks = run.len();
        run.dedup();
        (blocks, run.len())
    }
}

/// Steps in a block, from the first warm-up on.
fn steps_of(phase: Phase, warm: &WarmupResult, protocol: &Protocol) -> usize {
    // Slightly less, so that 100 ms of 0.5 ms steps are 200 and not 201.
    let by_time = (protocol.block_min_seconds / warm.step_seconds.max(1e-9) - 1e-6).ceil();
    let by_time = whole_count(by_time.clamp(1.0, 100_000.0));
    match phase {
        Phase::Decode | Phase::Verify { .. } => by_time.max(protocol.block_min_steps),
        Phase::Prefill => by_time,
    }
}

/// The status of a cell after an error, and the fault of its session.
fn end_of(error: &BlockError) -> CellEnd {
    let (status, fault) = match error {
        BlockError::Engine(EngineError::OutOfMemory { .. }) => (Status::Oom, Some(VisitFault::OutOfMemory)),
        BlockError::Engine(EngineError::NotReplayed { .. }) => (Status::Skipped, None),
        BlockError::Engine(EngineError::Device { .. } | EngineError::RankLost { .. }) => {
            (Status::Failed, Some(VisitFault::Device))
        }
        BlockError::Engine(_) => (Status::Failed, None),
        BlockError::Untrusted(_) => (Status::Invalid, None),
    };
    let reason = match error {
        BlockError::Engine(error) => error.cause(),
        BlockError::Untrusted(cause) => cause.clone(),
    };
    CellEnd { status, reason, fault }
}

/// Memory in use now; on a device the peak since the last reading, which resets it and is also counted in the visit's peak.
fn memory_in_use(
    session: &mut dyn Session,
    monitor: &dyn Monitor,
    peak: &mut Option<Bytes>,
) -> Option<Bytes> {
    if session.capabilities().host_memory {
        let now = memory::resident().now?;
        return Some(Bytes(now.0.saturating_sub(monitor.resident_overhead().0)));
    }
    let in_use = session.peak_memory();
    *peak = (*peak).max(in_use);
    in_use
}

/// The most memory in use since the last call: the device's own count, or on a CPU the resident set of this process less what the
/// monitor holds of it, where the system lets its high-water mark be reset.
fn peak_memory(session: &mut dyn Session, monitor: &dyn Monitor) -> Option<Bytes> {
    if !session.capabilities().host_memory {
        return session.peak_memory();
    }
    let resident = memory::resident();
    memory::reset_peak().then(|| resident.peak_without(monitor.resident_overhead())).flatten()
}
