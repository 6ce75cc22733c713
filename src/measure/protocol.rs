//! The measurement protocol: warm up, sample in blocks, interleave cells, stop by rule.
//!
//! Enters: cells, and a [`Visitor`] that measures one of them at a time, in this process or another. Leaves: the raw blocks and the
//! status of every cell. A block is rejected for a recorded cause only, never for its time, and rejected blocks stay in the
//! result with their cause. Statistics beyond the stopping rule are computed elsewhere.

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use super::visit::{CellEnd, CellInputs, Reference, Visit, VisitFault, Visited};
use crate::engine::Session;
use crate::machine::telemetry::CpuLoad;
use hbmark_core::result::{
    Block, BlockTelemetry, Cause, Cell, KvFill, Measured, Phase, ProtocolSummary, Status, accepted,
    block_interval, block_means, judged_times,
};
use hbmark_core::stats;
use hbmark_core::units::{Bytes, BytesPerSecond};

/// The parameters of the protocol. Results are published with [`Protocol::full`].
#[derive(Debug, Clone, PartialEq)]
pub struct Protocol {
    pub name: &'static str,
    pub seed: u64,
    pub warmup_min_seconds: f64,
    pub warmup_min_steps: usize,
    /// After this the cell is sampled without a steady state, with a status of its own.
    pub warmup_max_seconds: f64,
    /// Decode steps in a block. A prefill block has at least one step.
    pub block_min_steps: usize,
    pub block_min_seconds: f64,
    /// Numbers of accepted blocks at which the stopping rule is evaluated; sampling ends at the last.
    pub looks: Vec<usize>,
    /// Visits over which the blocks up to the first look are spread.
    pub visits: usize,
    pub target_half_width: f64,
    /// Sampling time after which the first look that follows is the cell's last: a slow cell then reports the interval it reached.
    pub cell_max_seconds: f64,
    /// Rejected blocks in a row after which the cell ends as disturbed.
    pub max_retries: usize,
    /// Lag-1 autocorrelation of block means above which the block is doubled.
    pub autocorrelation_limit: f64,
    /// A canary further off than this rejects the block.
    pub canary_tolerance: f64,
    /// How the context of a decode cell is filled.
    pub kv: KvFill,
    /// How a script spreads rows over experts, where one does.
    pub expert_routing: Option<String>,
    /// Count blocks whose retries ran out, with their causes as conditions, and call the cell noisy.
    pub allow_noise: bool,
}

/// When to stop sampling a cell, where the user says so.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Stopping {
    /// Blocks of a cell, no more and no fewer.
    pub repetitions: Option<usize>,
    /// Seconds of sampling a cell, at the least.
    pub min_seconds: Option<f64>,
    /// Half-width of the 95 % interval, relative.
    pub max_noise: Option<f64>,
    pub allow_noise: bool,
}

impl Protocol {
    /// The whole protocol.
    pub fn full(seed: u64) -> Self {
        let said = ProtocolSummary::full(seed);
        Self {
            name: "full",
            seed,
            warmup_min_seconds: said.warmup_min_seconds,
            warmup_min_steps: said.warmup_min_steps,
            warmup_max_seconds: 20.0,
            block_min_steps: said.block_min_steps,
            block_min_seconds: said.block_min_seconds,
            looks: vec![said.min_blocks, 15, 20, 30, said.max_blocks],
            visits: said.visits,
            target_half_width: said.target_half_width,
            cell_max_seconds: said.cell_max_seconds,
            max_retries: 3,
            autocorrelation_limit: 0.2,
            canary_tolerance: said.canary_tolerance,
            kv: said.kv,
            expert_routing: None,
            allow_noise: false,
        }
    }

    /// The same, stopped as the user wants.
    pub fn stopped_by(mut self, stopping: &Stopping) -> Self {
        let Stopping { repetitions, min_seconds, max_noise, allow_noise } = *stopping;
        self.allow_noise = allow_noise;
        if repetitions.is_none() && min_seconds.is_none() && max_noise.is_none() {
            return self;
        }
        self.name = "custom";
        if let Some(blocks) = repetitions {
            self.looks = vec![blocks];
            self.visits = self.visits.min(blocks);
        }
        if let Some(seconds) = min_seconds {
            // Longer blocks, so that the first look comes no earlier.
            self.block_min_seconds = self.block_min_seconds.max(seconds / self.looks[0] as f64);
            self.cell_max_seconds = self.cell_max_seconds.max(seconds);
        }
        self.target_half_width = max_noise.unwrap_or(self.target_half_width);
        self
    }

    /// Whether every cell is run exactly once.
    fn is_smoke(&self) -> bool {
        self.target_half_width.is_infinite()
    }

    /// A shortened protocol; its numbers are labelled as such wherever they appear.
    pub fn quick(seed: u64) -> Self {
        Self {
            name: "quick",
            warmup_min_seconds: 0.3,
            warmup_min_steps: 5,
            warmup_max_seconds: 2.0,
            block_min_steps: 5,
            block_min_seconds: 0.05,
            looks: vec![5, 10],
            visits: 2,
            target_half_width: 0.05,
            cell_max_seconds: 5.0,
            ..Self::full(seed)
        }
    }

    /// Every cell exactly once, to test that everything runs. Its times mean nothing.
    pub fn smoke(seed: u64) -> Self {
        Self {
            name: "smoke",
            warmup_min_seconds: 0.0,
            warmup_min_steps: 1,
            warmup_max_seconds: 0.0,
            block_min_steps: 1,
            block_min_seconds: 0.0,
            looks: vec![1],
            visits: 1,
            target_half_width: f64::INFINITY,
            ..Self::full(seed)
        }
    }

    /// The protocol as a report states it.
    pub fn summary(&self) -> ProtocolSummary {
        ProtocolSummary {
            name: self.name.into(),
            seed: self.seed,
            warmup_min_seconds: self.warmup_min_seconds,
            warmup_min_steps: self.warmup_min_steps,
            block_min_steps: self.block_min_steps,
            block_min_seconds: self.block_min_seconds,
            min_blocks: self.looks[0],
            max_blocks: self.looks[self.looks.len() - 1],
            visits: self.visits,
            target_half_width: self.target_half_width.min(f64::MAX),
            cell_max_seconds: self.cell_max_seconds,
            canary_tolerance: self.canary_tolerance,
            kv: self.kv,
            expert_routing: self.expert_routing.clone(),
        }
    }

    /// Accepted blocks each cell should have after each round: the first look spread over the visits, then the looks.
    fn targets(&self) -> Vec<usize> {
        let first = self.looks[0];
        let spread = (1..self.visits).map(|visit| (first * visit).div_ceil(self.visits));
        let mut targets: Vec<usize> = spread.chain(self.looks.iter().copied()).collect();
        targets.dedup();
        targets
    }
}

/// What the monitor measured around a block.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct BlockContext {
    pub telemetry: Option<BlockTelemetry>,
    /// The canary over the session's own canary; 1.02 is 2 % slow.
    pub canary_ratio: Option<f64>,
    /// The rate at which the canary read memory beside the block.
    pub read_rate: Option<BytesPerSecond>,
    /// The recorded cause for which the block does not count.
    pub reject: Option<Cause>,
    /// Conditions that are reported and do not reject.
    pub conditions: Vec<Cause>,
    /// The load over this block and some before it, where it became known.
    pub load: Option<WindowLoad>,
}

/// The load over the last blocks together, which are too short to be judged one by one.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct WindowLoad {
    pub load: CpuLoad,
    /// The cause that rejects all of them.
    pub reject: Option<Cause>,
}

impl WindowLoad {
    /// Writes it into its blocks; returns how many accepted ones it rejected.
    pub fn apply_to(&self, blocks: &mut [Block]) -> usize {
        let first = blocks.len().saturating_sub(self.load.blocks);
        let mut lost = 0;
        for block in &mut blocks[first..] {
            let telemetry = block.telemetry.get_or_insert_default();
            telemetry.foreign_cores = self.load.foreign_cores;
            telemetry.steal_cores = self.load.steal_cores;
            if block.rejected.is_none() && self.reject.is_some() {
                block.rejected.clone_from(&self.reject);
                lost += 1;
            }
        }
        lost
    }
}

impl BlockContext {
    /// The same of an engine whose jobs so many threads were away from, where the machine is watched.
    pub fn without_threads(mut self, away: Option<f64>) -> Self {
        if let Some(telemetry) = &mut self.telemetry {
            telemetry.threads_away = away;
            self.reject = self.reject.or_else(|| telemetry.short_of_threads());
        }
        self
    }

    /// Writes it into its block, and rejects the block where there is a cause.
    pub fn apply_to(self, block: &mut Block, canary_tolerance: f64) {
        block.canary_ratio = self.canary_ratio;
        block.read_bytes_per_s = self.read_rate.map(|rate| rate.0);
        block.rejected = self.reject.or_else(|| {
            let ratio = self.canary_ratio?;
            // A canary that failed is NaN, and vouches for nothing.
            let steady = (ratio - 1.0).abs() <= canary_tolerance;
            (!steady).then_some(Cause::Canary { ratio })
        });
        block.conditions = self.conditions;
        block.telemetry = self.telemetry;
    }
}

/// Observes the machine around each block.
pub trait Monitor {
    /// Called right before a block.
    fn before_block(&mut self);
    /// Called right after it; `wall_seconds` is how long the block took.
    fn after_block(&mut self, wall_seconds: f64) -> BlockContext;
    /// Called after the last block of a visit: the load over blocks that was not reported yet.
    fn after_visit(&mut self) -> Option<WindowLoad> {
        None
    }
    /// The tolerance of the canary here: the protocol's, or more where the canary itself is noisier.
    fn canary_tolerance(&self, wanted: f64) -> f64 {
        wanted
    }
    /// Resident memory of this process that the monitor itself holds.
    fn resident_overhead(&self) -> Bytes {
        Bytes(0)
    }
}

/// Observes nothing: for smoke runs and tests.
#[derive(Debug, Default)]
pub struct NoopMonitor;

impl Monitor for NoopMonitor {
    fn before_block(&mut self) {}
    fn after_block(&mut self, _wall_seconds: f64) -> BlockContext {
        BlockContext::default()
    }
}

/// Progress.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Event<'a> {
    /// A round begins, with so many cells still open.
    Round { round: usize, rounds: usize, open: usize },
    /// Seconds of work, as the protocol plans them: done, and left at the least and at the most.
    Left { done: f64, least: f64, most: f64 },
    /// A cell is being filled, warmed up or sampled.
    Visiting { cell: &'a Cell, accepted: usize, wanted: usize },
    /// A cell is finished.
    Finished { cell: &'a Cell, status: Status },
}

/// Makes visits: in this process, or in one that may be lost and replaced.
pub trait Visitor {
    /// An error that ends the whole schedule.
    type Halt;
    /// Visits a cell.
    ///
    /// # Errors
    /// When nothing more can be visited at all.
    fn visit(&mut self, visit: &Visit) -> Result<Visited, Self::Halt>;
    /// Times the reference cell; the inner error says why the session was lost over it.
    ///
    /// # Errors
    /// As [`visit`](Self::visit).
    fn measure_reference(&mut self, reference: &Reference) -> Result<Result<Option<f64>, Cause>, Self::Halt>;
    /// Frees the KV of a cell.
    ///
    /// # Errors
    /// As [`visit`](Self::visit).
    fn release(&mut self, index: usize) -> Result<(), Self::Halt>;
    /// The roofline's time of a step of a cell.
    fn predicted_ns(&self, _cell: &Cell) -> Option<f64> {
        None
    }
    /// Whether a visit after a fault gets a fresh session.
    fn can_restart(&self) -> bool {
        false
    }
}

/// The result of a schedule.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampled {
    pub measured: Vec<Measured>,
    /// The reference cell's mean step, in nanoseconds, once a round; its drift is the machine's.
    pub reference: Vec<f64>,
    /// Messages about visits that were lost and repeated.
    pub repeated: Vec<String>,
}

struct State {
    measured: Measured,
    /// Steps in a block, known after the first warm-up.
    steps: Option<usize>,
    finished: bool,
    /// A visit was lost before: the next loss ends the cell.
    retried: bool,
    /// The last visit ran out of memory: the next one has a fresh process, and ends the cell if it runs out there, too. A later one may come behind
    /// other cells again.
    out_of_memory: bool,
}

impl State {
    fn new(cell: &Cell) -> Self {
        let measured = Measured {
            cell: cell.clone(),
            status: Status::Ok,
            reason: None,
            blocks: Vec::new(),
            merge: 1,
            tokens: Vec::new(),
            peak_memory: None,
            moved: None,
        };
        Self { measured, steps: None, finished: false, retried: false, out_of_memory: false }
    }

    fn accepted(&self) -> usize {
        accepted(&self.measured.blocks).count()
    }

    /// Adds the result of a visit. `Some` with the reason when the visit was lost and must be repeated.
    fn absorb(&mut self, visited: Visited, protocol: &Protocol, can_restart: bool) -> Option<Cause> {
        if let Some(CellEnd { reason, fault: Some(fault), .. }) = &visited.end
            && can_restart
        {
            let before = match fault {
                VisitFault::OutOfMemory => &mut self.out_of_memory,
                VisitFault::Device | VisitFault::Lost => &mut self.retried,
            };
            if !std::mem::replace(before, true) {
                return Some(reason.clone());
            }
        }
        self.out_of_memory = false;
        let measured = &mut self.measured;
        measured.blocks.extend(visited.blocks);
        measured.peak_memory = measured.peak_memory.max(visited.peak_memory);
        measured.moved = visited.moved.or(measured.moved);
        if !visited.tokens.is_empty() {
            measured.tokens = visited.tokens;
        }
        self.steps = visited.steps.or(self.steps);
        if let (Some(drift), None) = (visited.unsteady, &measured.reason) {
            measured.status = if protocol.allow_noise { Status::Noisy } else { Status::NoSteadyState };
            measured.reason = Some(Cause::StillDrifting { drift, warmup_s: protocol.warmup_max_seconds });
        }
        if let (Some(reason), Status::Ok) = (visited.noisy, measured.status) {
            (measured.status, measured.reason) = (Status::Noisy, Some(reason));
        }
        if let Some(end) = visited.end {
            self.finish(end.status, end.reason);
        }
        None
    }

    /// Seconds that blocks and visits of this cell take: as long as its blocks took, or as the protocol wants them before it has any.
    fn work(&self, protocol: &Protocol, blocks: usize, first_visits: usize, later_visits: usize) -> f64 {
        let taken = &self.measured.blocks;
        let block = if taken.is_empty() {
            protocol.block_min_seconds
        } else {
            taken.iter().map(|block| block.wall_ns / 1e9).sum::<f64>() / taken.len() as f64
        };
        let warm_up = first_visits as f64 + 0.1 * later_visits as f64;
        blocks as f64 * block + warm_up * protocol.warmup_min_seconds
    }

    /// Seconds of work that are left, at the least and at the most. An interval narrows with the root of the number of blocks; before
    /// enough of them are known, the cell may end at any look.
    fn left(&self, protocol: &Protocol, targets: &[usize]) -> (f64, f64) {
        if self.finished {
            return (0.0, 0.0);
        }
        let measured = &self.measured;
        let means = block_means(&measured.blocks, measured.merge, |b| judged_times(measured.cell.phase, b));
        let (looks, have) = (&protocol.looks, means.len());
        let final_look = looks.last().copied().unwrap_or(1);
        // The first look with enough blocks, or enough time.
        let look =
            |wanted: f64| looks.iter().copied().find(|look| *look as f64 >= wanted).unwrap_or(final_look);
        let in_time =
            (protocol.cell_max_seconds / self.work(protocol, 1, 0, 0).max(1e-9)).min(final_look as f64);
        let interval =
            block_interval(&measured.blocks, measured.merge, |b| judged_times(measured.cell.phase, b));
        let width = interval.map(|i| i.relative_half_width());
        let (least, most) = match width.filter(|_| 2 * have >= looks[0]) {
            Some(width) => {
                let wanted = |width: f64| have as f64 * (width / protocol.target_half_width).powi(2);
                let end = |width: f64| look(wanted(width).max((have + 1) as f64).min(in_time));
                (end(0.8 * width), end(1.25 * width))
            }
            None => (looks[0], look(in_time)),
        };
        // A first look may find neighbours that resemble each other, and double the blocks up to the next.
        let most = match looks.get(1) {
            Some(next) if have < looks[0] && measured.merge < 4 => most.max(2 * next),
            _ => most,
        };
        let work = |end: usize| {
            let visits = targets.iter().filter(|target| **target > have && **target <= end).count();
            let first = usize::from(measured.blocks.is_empty() && visits > 0);
            self.work(protocol, (end * measured.merge).saturating_sub(self.accepted()), first, visits - first)
        };
        (work(least), work(most.max(least)))
    }

    fn finish(&mut self, status: Status, reason: Cause) {
        self.finished = true;
        self.measured.status = status;
        self.measured.reason = Some(reason);
    }

    /// Ends a cell whose schedule was cut short.
    fn cut_short(&mut self) {
        if !self.finished {
            let blocks = self.accepted();
            self.finish(Status::Incomplete, Cause::RunStopped { blocks });
        }
    }
}

/// Runs the protocol over the cells of one session, in this process.
///
/// With `keep_resident` the KV of all cells stays allocated; without, it is filled anew for each visit. The second result holds the
/// reference cell's mean step, in nanoseconds, once per round; its drift is the machine's.
pub fn run(
    session: &mut dyn Session,
    cells: &[Cell],
    protocol: &Protocol,
    monitor: &mut dyn Monitor,
    keep_resident: bool,
    observe: &mut dyn FnMut(Event<'_>),
) -> (Vec<Measured>, Vec<f64>) {
    let mut visitor = InProcess { session, monitor, protocol, inputs: CellInputs::default() };
    let (sampled, never) = schedule(&mut visitor, cells, protocol, keep_resident, observe);
    match never {
        None => (sampled.measured, sampled.reference),
        Some(never) => match never {},
    }
}

/// Visits of a session in this process.
struct InProcess<'a> {
    session: &'a mut dyn Session,
    monitor: &'a mut dyn Monitor,
    protocol: &'a Protocol,
    inputs: CellInputs,
}

impl Visitor for InProcess<'_> {
    type Halt = std::convert::Infallible;
    fn visit(&mut self, visit: &Visit) -> Result<Visited, Self::Halt> {
        Ok(self.inputs.visit(self.session, self.monitor, self.protocol, visit, &mut |_| {}))
    }
    fn measure_reference(&mut self, reference: &Reference) -> Result<Result<Option<f64>, Cause>, Self::Halt> {
        Ok(Ok(self.inputs.measure_reference(self.session, self.protocol, reference, &mut |_| {})))
    }
    fn release(&mut self, index: usize) -> Result<(), Self::Halt> {
        self.inputs.release(self.session, index);
        Ok(())
    }
}

/// The protocol over visits. The next visit depends only on the seed and on the results of the visits before, so that a run is resumed
/// from its saved visits.
///
/// A schedule that was cut short returns what it has, with the reason.
pub fn schedule<V: Visitor>(
    visitor: &mut V,
    cells: &[Cell],
    protocol: &Protocol,
    keep_resident: bool,
    observe: &mut dyn FnMut(Event<'_>),
) -> (Sampled, Option<V::Halt>) {
    let mut states: Vec<State> = cells.iter().map(State::new).collect();
    let mut sampled = Sampled { measured: Vec::new(), reference: Vec::new(), repeated: Vec::new() };
    let halt = rounds(visitor, &mut states, protocol, keep_resident, &mut sampled, observe).err();
    for state in &mut states {
        state.cut_short();
    }
    sampled.measured = states.into_iter().map(|state| state.measured).collect();
    (sampled, halt)
}

fn rounds<V: Visitor>(
    visitor: &mut V,
    states: &mut [State],
    protocol: &Protocol,
    keep_resident: bool,
    sampled: &mut Sampled,
    observe: &mut dyn FnMut(Event<'_>),
) -> Result<(), V::Halt> {
    let mut random = ChaCha8Rng::seed_from_u64(protocol.seed);
    let targets = protocol.targets();
    let mut done = 0.0;
    for (round, &target) in targets.iter().enumerate() {
        let mut order: Vec<usize> = (0..states.len()).filter(|&i| !states[i].finished).collect();
        if order.is_empty() {
            break;
        }
        observe(Event::Round { round, rounds: targets.len(), open: order.len() });
        order.shuffle(&mut random);
        for index in order {
            let state = &mut states[index];
            let (accepted, wanted) = (state.accepted(), target);
            let taken = state.measured.blocks.len();
            observe(Event::Visiting { cell: &state.measured.cell, accepted, wanted });
            while let Some(lost) = {
                let wanted = (target * state.measured.merge).saturating_sub(state.accepted());
                let visit = Visit {
                    index,
                    cell: state.measured.cell.clone(),
                    round,
                    wanted,
                    steps: state.steps,
                    tokens: state.measured.tokens.clone(),
                    predicted_ns: visitor.predicted_ns(&state.measured.cell),
                    canary_tolerance: protocol.canary_tolerance,
                    keep: keep_resident,
                };
                let visited = visitor.visit(&visit)?;
                state.absorb(visited, protocol, visitor.can_restart())
            } {
                sampled
                    .repeated
                    .push(format!("{}: {lost}; the visit was repeated", state.measured.cell.id()));
            }
            if !state.finished && protocol.looks.contains(&target) {
                look(state, protocol, target);
            }
            let first = taken == 0;
            done += state.work(
                protocol,
                state.measured.blocks.len() - taken,
                usize::from(first),
                usize::from(!first),
            );
            if state.finished {
                visitor.release(index)?;
                observe(Event::Finished { cell: &state.measured.cell, status: state.measured.status });
            }
            let left = states.iter().map(|state| state.left(protocol, &targets));
            let (least, most) = left.fold((0.0, 0.0), |sum, left| (sum.0 + left.0, sum.1 + left.1));
            observe(Event::Left { done, least, most });
        }
        sampled.reference.extend(visit_reference(visitor, states, protocol, keep_resident)?);
    }
    for (index, _) in states.iter().enumerate() {
        visitor.release(index)?;
    }
    Ok(())
}

/// The stopping rule, evaluated at the protocol's looks only.
fn look(state: &mut State, protocol: &Protocol, target: usize) {
    let measured = &mut state.measured;
    let phase = measured.cell.phase;
    let sampled: f64 = measured.blocks.iter().map(|b| b.wall_ns / 1e9).sum();
    let out_of_time = sampled > protocol.cell_max_seconds;
    let last = out_of_time || protocol.looks.last() == Some(&target);
    let means = block_means(&measured.blocks, measured.merge, |b| judged_times(phase, b));
    let correlated = stats::lag1_autocorrelation(&means).is_some_and(|r| r > protocol.autocorrelation_limit);
    if correlated && !last && measured.merge < 4 && protocol.looks.len() > 1 {
        measured.merge *= 2;
        return;
    }
    let interval = block_interval(&measured.blocks, measured.merge, |b| judged_times(phase, b));
    let half_width = interval.map(|i| i.relative_half_width());
    let reached = protocol.is_smoke() || half_width.is_some_and(|w| w <= protocol.target_half_width);
    if reached {
        state.finished = true;
    } else if last {
        state.finished = true;
        if measured.status == Status::Ok {
            measured.status = if protocol.allow_noise { Status::Noisy } else { Status::NotConverged };
            measured.reason = Some(match half_width {
                Some(half_width) => Cause::IntervalTooWide {
                    half_width,
                    wanted: protocol.target_half_width,
                    blocks: means.len(),
                    sampled_s: sampled,
                },
                None => Cause::TooFewBlocks { blocks: means.len() },
            });
        }
    }
}

/// One unmonitored block of the reference cell, the first decode cell that still works.
fn visit_reference<V: Visitor>(
    visitor: &mut V,
    states: &mut [State],
    protocol: &Protocol,
    keep_resident: bool,
) -> Result<Option<f64>, V::Halt> {
    if protocol.is_smoke() {
        return Ok(None);
    }
    let first = |s: &State| s.measured.cell.phase == Phase::Decode && s.steps.is_some();
    let Some(index) = states.iter().position(first) else { return Ok(None) };
    let state = &mut states[index];
    let Some(steps) = state.steps else { return Ok(None) };
    if matches!(state.measured.status, Status::Oom | Status::Failed | Status::Invalid | Status::Skipped) {
        return Ok(None);
    }
    let cell = state.measured.cell.clone();
    let predicted_ns = visitor.predicted_ns(&cell);
    let keep = keep_resident && !state.finished;
    let reference = Reference { index, cell, steps, predicted_ns, keep };
    match visitor.measure_reference(&reference)? {
        Ok(mean) => Ok(mean),
        Err(reason) if state.retried => {
            state.finish(Status::Failed, reason);
            Ok(None)
        }
        Err(_) => {
            state.retried = true;
            Ok(None)
        }
    }
}

#[cfg(test)]
use crate::engine::EngineError;
#[cfg(test)]
mod tests;

/// Which of the protocols runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProtocolPreset {
    Full,
    Quick,
    Smoke,
}
