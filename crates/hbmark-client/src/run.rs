//! The loop: requests go out when they are due, and everything that comes back is stamped.
//!
//! Enters: a [`Job`]: a target, planned requests and their bodies. Leaves: a [`LiveRun`]: a [`Run`] as of a run in this process, and what
//! only a client sees. One thread, no task per stream, no allocation per event.
//!
//! Arrivals are absolute moments, fixed before the start; a timer of the kernel wakes the loop shortly before, and the last
//! microseconds are spun. Where requests in flight are capped, a request at the cap waits from its arrival on.
//! A request is sent again only where a kept connection was closed before any byte of an answer came: its time goes on, and it is counted.
//! The run is given up where none of its first requests is served, and load is not the cause: the others would fail as those did.

mod cost;
mod descriptors;
mod prepared;
mod priority;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token};
use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};

use crate::answer::{Answer, Step};
use crate::clock::{self, Moment, RealTime};
use crate::connection::{Connection, Piece};
use crate::exchange::Exchange;
use crate::target::Endpoint;
use crate::thinned::Thinned;
pub use cost::Cost;
pub use descriptors::TooFewFiles;
pub(crate) use descriptors::check_open_files;
use hbmark_core::result::serving::Failure;
use hbmark_core::units::{Nanos, whole};
use hbmark_traffic::order::Order;
use hbmark_traffic::scheduler::SchedulerLoad;
use hbmark_traffic::serving_loop::{LoadMode, Progress, Record, RemoteTokens, RequestOutcome, Run, Traffic};
use prepared::Prepared;
use priority::Priority;

/// The loop wakes so long before an arrival, and spins from then on.
const SPIN: Moment = 60_000;
/// How often time limits are looked at, and progress is told.
const SWEEP: Moment = 20_000_000;
/// So long one connection is read at a time: a server that sends faster than it is read delays neither the others nor its own limits.
const TURN: Moment = 1_000_000;
/// How long the end of a response may be missing behind the end of its stream.
const OVER: Duration = Duration::from_millis(200);
/// Largest piece that is read at a time.
const BUFFER: usize = 64 << 10;
/// A run is given up when as many requests as these, the first ones, have failed.
pub(crate) const FIRST_REQUESTS: usize = 8;
/// Connections of one run.
const MAX_STREAMS: usize = 65_536;

const TIMER: Token = Token(usize::MAX);

/// How long a request may take, by stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    pub connect: Duration,
    /// From the request to the head of the response.
    pub headers: Duration,
    /// From the request to the first token.
    pub first_token: Duration,
    /// Between two pieces of an answer.
    pub event: Duration,
    pub total: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        let silence = seconds(600);
        Self {
            connect: seconds(30),
            headers: silence,
            first_token: silence,
            event: silence,
            total: seconds(3600),
        }
    }
}

impl Limits {
    /// One limit for the whole request, however long a part of it takes.
    pub fn whole(total: Duration) -> Self {
        Self { headers: total, first_token: total, event: total, total, ..Self::default() }
    }
}

/// What to send, and where.
#[expect(missing_debug_implementations, reason = "bodies are made by whatever the caller has")]
pub struct Job<'a> {
    pub endpoint: &'a Endpoint,
    /// The path of the request, as in `/v1/completions`.
    pub path: &'a str,
    pub traffic: &'a Traffic<'a>,
    /// Most requests in flight, in an open loop.
    pub cap: Option<usize>,
    pub limits: Limits,
    /// Begins the id of every request.
    pub id: &'a str,
    /// Keep the time of every event with output.
    pub keep_events: bool,
    /// Appends the body of a request; they are asked for in their order, each once.
    pub bodies: &'a mut dyn FnMut(usize, &mut Vec<u8>),
}

/// Everything that happened.
#[derive(Debug)]
pub struct LiveRun {
    pub run: Run,
    pub exchanges: Vec<Exchange>,
    /// Gaps between events that hold output, in nanoseconds, from the first measured request on.
    pub event_gaps: Thinned,
    /// From the kernel's receipt of a piece until this program saw it; empty where there are no stamps.
    pub delays: Thinned,
    /// Pieces without a stamp of the kernel.
    pub unstamped: u64,
    /// Pieces with output, and those whose stamp is that of the one before in the same answer.
    pub outputs: u64,
    pub shared_stamps: u64,
    /// Connections that were opened, and requests that were sent on one that was kept.
    pub opened: usize,
    pub reused: usize,
    /// Steps of the real-time clock, whose stamps were not used.
    pub clock_steps: usize,
    pub cost: Cost,
    /// This thread went before all ordinary ones.
    pub realtime: bool,
    /// None of the first requests was served, and the others were not sent.
    pub gave_up: bool,
    /// The first words of each kind of failure: what the server said.
    pub messages: Vec<(Failure, String)>,
    /// The start of the run, on both clocks that are asked for it.
    pub origin: Moment,
    pub started: std::time::Instant,
    /// Of each request, the time and the tokens of every event with output, where they are kept.
    pub events: Vec<Vec<(f64, u32)>>,
}

/// Sends the requests and reads the answers.
///
/// # Errors
/// When this system lacks what the loop needs: an event queue, a timer.
pub fn run(job: Job<'_>, observe: &mut dyn FnMut(Progress)) -> io::Result<LiveRun> {
    let mut client = Client::new(job)?;
    client.serve(observe)?;
    Ok(client.stop())
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Phase {
    /// Without a connection.
    #[default]
    Free,
    Idle,
    Connecting,
    Sending,
    Answering,
}

/// A connection and the request on it.
#[derive(Debug, Default)]
struct Stream {
    connection: Option<Connection>,
    phase: Phase,
    key: usize,
    answer: Answer,
    /// Of the target's addresses.
    address: usize,
    /// Addresses that were tried for this request.
    tried: usize,
    /// When the connection was begun, when the request was dispatched, and when something came last.
    begun: Moment,
    dispatched: Moment,
    heard: Moment,
    /// The kernel's stamp of the newest piece with output.
    stamp: Option<u64>,
    kept: bool,
    /// It stands in the list of connections with more to read, and whether the server closed this one.
    unread: Option<bool>,
}

impl Stream {
    fn is_busy(&self) -> bool {
        !matches!(self.phase, Phase::Free | Phase::Idle)
    }
}

struct Client<'a> {
    job: Job<'a>,
    poll: Poll,
    timer: TimerFd,
    streams: Vec<Stream>,
    free: Vec<usize>,
    idle: Vec<usize>,
    /// The address that answered last.
    address: usize,
    prepared: Prepared,
    order: Order,
    /// Connections on which more had come than was read in one turn, each once.
    unread: Vec<usize>,
    /// Requests that are due and wait at the cap.
    waiting: VecDeque<usize>,
    /// When slots of a closed loop, or places under the cap, became free.
    openings: VecDeque<f64>,
    /// Most requests in flight.
    places: usize,
    busy: usize,
    in_system: usize,
    /// Measured requests without an outcome.
    left: usize,
    /// Of the first requests those that failed for something else than load.
    first_failed: usize,
    origin: Moment,
    real: RealTime,
    output_tokens: usize,
    /// Gaps between tokens, from the first measured request on.
    token_gaps: Thinned,
    swept: Moment,
    started: Cost,
    live: LiveRun,
}

impl<'a> Client<'a> {
    fn new(job: Job<'a>) -> io::Result<Self> {
        let traffic = job.traffic;
        let poll = Poll::new()?;
        let timer =
            TimerFd::new(ClockId::CLOCK_MONOTONIC, TimerFlags::TFD_NONBLOCK | TimerFlags::TFD_CLOEXEC)?;
        poll.registry().register(&mut SourceFd(&timer.as_fd().as_raw_fd()), TIMER, Interest::READABLE)?;
        let live = LiveRun {
            run: Run {
                records: traffic.plan.iter().map(Record::planned).collect(),
                measured: traffic.measured.clone(),
                remote: Some(RemoteTokens::default()),
                ..Run::default()
            },
            exchanges: vec![Exchange::default(); traffic.plan.len()],
            event_gaps: Thinned::default(),
            delays: Thinned::default(),
            unstamped: 0,
            outputs: 0,
            shared_stamps: 0,
            opened: 0,
            reused: 0,
            clock_steps: 0,
            cost: Cost::default(),
            realtime: false,
            gave_up: false,
            messages: Vec::new(),
            origin: clock::now(),
            started: std::time::Instant::now(),
            events: vec![Vec::new(); if job.keep_events { traffic.plan.len() } else { 0 }],
        };
        let places = match (traffic.kind, job.cap) {
            (LoadMode::Closed { concurrency }, _) => concurrency,
            (LoadMode::Open, cap) => cap.unwrap_or(MAX_STREAMS),
        };
        Ok(Self {
            poll,
            timer,
            streams: Vec::new(),
            free: Vec::new(),
            idle: Vec::new(),
            address: 0,
            prepared: Prepared::new(&job),
            order: Order::new(traffic),
            unread: Vec::new(),
            waiting: VecDeque::new(),
            openings: vec![0.0; if matches!(traffic.kind, LoadMode::Closed { .. }) { places } else { 0 }]
                .into(),
            places,
            busy: 0,
            in_system: 0,
            left: traffic.measured.len(),
            first_failed: 0,
            origin: clock::now(),
            real: RealTime::default(),
            output_tokens: 0,
            token_gaps: Thinned::default(),
            swept: 0,
            started: Cost::default(),
            live,
            job,
        })
    }

    /// Since the start of the run.
    fn since(&self, moment: Moment) -> f64 {
        moment.cast_signed().wrapping_sub(self.origin.cast_signed()) as f64
    }

    fn moment(&self, since: f64) -> Moment {
        self.origin + whole(since)
    }

    fn serve(&mut self, observe: &mut dyn FnMut(Progress)) -> io::Result<()> {
        let mut events = Events::with_capacity(1024);
        let mut buffer = vec![0_u8; BUFFER];
        self.prepared.ahead(&mut self.job, Moment::MAX);
        descriptors::reserve(&self.timer, self.places.min(self.job.traffic.plan.len()));
        let priority = Priority::raise();
        self.live.realtime = priority.is_granted();
        // Time begins when everything is ready.
        self.started = Cost::now();
        self.origin = clock::now();
        (self.live.origin, self.live.started) = (self.origin, std::time::Instant::now());
        loop {
            self.dispatch_due();
            let present = clock::now();
            let now = self.since(present);
            if present - self.swept > SWEEP {
                self.swept = present;
                self.expire(present);
                observe(self.progress(now));
            }
            if self.job.traffic.time_limit.is_some_and(|limit| now > limit.0)
                || self.left == 0 && !self.extend(now)
                || self.gives_up()
                || self.busy == 0 && self.waiting.is_empty() && self.next_due().is_none()
            {
                break;
            }
            let due = present + self.until_due(present);
            self.prepared.ahead(&mut self.job, due);
            self.sleep(&mut events)?;
            let unread = self.unread.len();
            for at in 0..unread {
                let slot = self.unread[at];
                let closing = self.streams[slot].unread.take().unwrap_or(false);
                self.ready(slot, closing, &mut buffer);
                self.dispatch_due();
            }
            self.unread.drain(..unread);
            for event in &events {
                if event.token() == TIMER {
                    let _ = self.timer.wait();
                } else {
                    let closing = event.is_read_closed() || event.is_error();
                    self.ready(event.token().0, closing, &mut buffer);
                }
                // Many events may be there at once. They have their stamps; the next request does not wait for their reading.
                self.dispatch_due();
            }
        }
        self.live.gave_up = self.gives_up();
        self.live.run.end = self.since(clock::now());
        observe(self.progress(self.live.run.end));
        Ok(())
    }

    /// Goes on with more measured requests where those so far decide nothing and more are allowed.
    fn extend(&mut self, now: f64) -> bool {
        match self.live.run.extend(self.job.traffic, now) {
            Some(left) => {
                self.left = left;
                true
            }
            None => false,
        }
    }

    /// Whether the first requests show that no other will be served either.
    fn gives_up(&self) -> bool {
        self.first_failed >= FIRST_REQUESTS
    }

    /// When the next request is due, since the start.
    fn next_due(&self) -> Option<f64> {
        self.order.next_due(self.job.traffic, &self.openings).filter(|_| !self.gives_up())
    }

    fn until_due(&self, present: Moment) -> Moment {
        self.next_due().map_or(SWEEP, |due| self.moment(due).saturating_sub(present))
    }

    /// Waits for events, no longer than until shortly before the next arrival.
    fn sleep(&mut self, events: &mut Events) -> io::Result<()> {
        let present = clock::now();
        let wait = self.until_due(present).min(SWEEP);
        let timeout = if wait <= SPIN || !self.unread.is_empty() {
            Duration::ZERO
        } else {
            let wake = present + wait - SPIN;
            let at =
                TimeSpec::new((wake / 1_000_000_000).cast_signed(), (wake % 1_000_000_000).cast_signed());
            self.timer.set(Expiration::OneShot(at), TimerSetTimeFlags::TFD_TIMER_ABSTIME)?;
            // The timer is what wakes; this is for the case that it does not.
            Duration::from_millis(100)
        };
        match self.poll.poll(events, Some(timeout)) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
            result => result,
        }
    }

    /// Sends every request that is due and has a place.
    fn dispatch_due(&mut self) {
        loop {
            let now = self.since(clock::now());
            let Some(due) = self.next_due().filter(|due| *due <= now) else { break };
            let Some(key) = self.order.take() else { break };
            if matches!(self.job.traffic.kind, LoadMode::Closed { .. }) {
                self.openings.pop_front();
            }
            let record = &mut self.live.run.records[key];
            record.arrival = Nanos(due);
            record.enqueued = Some(Nanos(now));
            record.lag = Nanos(now - due);
            self.in_system += 1;
            self.live.run.population.push((now, self.in_system));
            self.waiting.push_back(key);
            self.dispatch_waiting();
        }
        let run = &mut self.live.run;
        run.loaded_until = run.loaded_until.or_else(|| self.order.used_up(self.job.traffic, &self.openings));
        self.dispatch_waiting();
    }

    fn dispatch_waiting(&mut self) {
        while self.busy < self.places {
            let Some(key) = self.waiting.pop_front() else { break };
            let slot = self.place(key);
            self.busy += 1;
            let present = clock::now();
            self.streams[slot].dispatched = present;
            let dispatched = self.since(present);
            self.live.exchanges[key].dispatched = Some(dispatched);
            // Lag beyond the wait at the cap: since the place was free.
            let record = &mut self.live.run.records[key];
            if self.places == MAX_STREAMS {
                record.lag = Nanos(dispatched - record.arrival.0);
            }
            self.begin(slot, present);
        }
    }

    /// A stream for a request: one whose connection was kept, if there is any.
    fn place(&mut self, key: usize) -> usize {
        let slot = loop {
            let Some(slot) = self.idle.pop() else {
                break self.free.pop().unwrap_or_else(|| {
                    self.streams.push(Stream::default());
                    self.streams.len() - 1
                });
            };
            let stream = &mut self.streams[slot];
            if stream.phase == Phase::Idle && stream.connection.as_mut().is_some_and(Connection::is_idle) {
                break slot;
            }
            self.close(slot);
            self.free.push(slot);
        };
        let stream = &mut self.streams[slot];
        stream.key = key;
        stream.answer.reset(self.job.traffic.plan[key].output_len);
        slot
    }

    /// Puts a request onto the connection of a stream, or onto a new one.
    fn begin(&mut self, slot: usize, present: Moment) {
        let stream = &mut self.streams[slot];
        let request = self.prepared.take(&mut self.job, stream.key);
        stream.kept = stream.connection.is_some();
        if let Some(connection) = &mut stream.connection {
            self.live.reused += 1;
            self.prepared.spare.push(connection.give(request));
            stream.phase = Phase::Sending;
            self.send(slot);
        } else {
            stream.address = self.address;
            stream.tried = 0;
            self.connect(slot, request, present);
        }
    }

    fn connect(&mut self, slot: usize, request: Vec<u8>, present: Moment) {
        let stream = &mut self.streams[slot];
        (stream.begun, stream.kept, stream.phase) = (present, false, Phase::Connecting);
        stream.tried += 1;
        let address = self.job.endpoint.addresses[stream.address];
        self.live.opened += 1;
        match Connection::open(self.job.endpoint, address, self.poll.registry(), Token(slot)) {
            Ok(mut connection) => {
                self.prepared.spare.push(connection.give(request));
                stream.connection = Some(connection);
                // To a server on this machine it stands at once.
                self.connecting(slot);
            }
            Err(error) => self.connect_failed(slot, Some(request), &error),
        }
    }

    /// Sends the request where the connection stands by now.
    fn connecting(&mut self, slot: usize) {
        let stream = &mut self.streams[slot];
        let Some(connection) = &mut stream.connection else { return };
        match connection.is_connected() {
            Ok(true) => {
                let present = clock::now();
                self.address = stream.address;
                stream.phase = Phase::Sending;
                self.live.exchanges[stream.key].connect = Some((present - stream.begun) as f64);
                self.send(slot);
            }
            Ok(false) => {}
            Err(error) => self.connect_failed(slot, None, &error),
        }
    }

    /// Tries the next address of the name, until there is none.
    fn connect_failed(&mut self, slot: usize, request: Option<Vec<u8>>, error: &io::Error) {
        let addresses = self.job.endpoint.addresses.len();
        let stream = &mut self.streams[slot];
        let request = request.or_else(|| stream.connection.as_mut().map(Connection::take));
        if let Some(request) = request.filter(|_| stream.tried < addresses && !is_tls(error)) {
            stream.address = (stream.address + 1) % addresses;
            self.close(slot);
            return self.connect(slot, request, clock::now());
        }
        let failure = match error.kind() {
            io::ErrorKind::ConnectionRefused => Failure::Refused,
            io::ErrorKind::TimedOut => Failure::ConnectTimeout,
            io::ErrorKind::ConnectionReset | io::ErrorKind::UnexpectedEof => Failure::Reset,
            _ if is_tls(error) => Failure::Tls,
            _ => Failure::Unreachable,
        };
        let advice = match error.raw_os_error() {
            Some(libc::EMFILE) => {
                "; raise the limit (ulimit -n), or cap the requests in flight (--max-concurrency)"
            }
            _ => "",
        };
        self.note(failure, &format!("{error}{advice}"));
        self.finish(slot, Some(failure));
    }

    /// Sends what can be sent.
    fn send(&mut self, slot: usize) {
        let Some(connection) = &mut self.streams[slot].connection else { return };
        match connection.send() {
            Ok(true) => {
                let present = clock::now();
                self.streams[slot].phase = Phase::Answering;
                self.streams[slot].heard = present;
                self.streams[slot].stamp = None;
            }
            Ok(false) => {}
            // A server that takes no more may have said why.
            Err(_) if connection.has_unread() => self.read(slot, true, &mut [0; 4096]),
            Err(error) => self.broken(slot, &error),
        }
    }

    /// Something happened on a connection.
    fn ready(&mut self, slot: usize, closing: bool, buffer: &mut [u8]) {
        let Some(stream) = self.streams.get_mut(slot) else { return };
        match stream.phase {
            // One that is closed while nothing was asked is found out when it is taken.
            Phase::Free | Phase::Idle => return,
            Phase::Connecting => self.connecting(slot),
            Phase::Sending => self.send(slot),
            Phase::Answering => {}
        }
        // A server may answer before it has read everything.
        if matches!(self.streams[slot].phase, Phase::Sending | Phase::Answering) {
            self.read(slot, closing, buffer);
        }
    }

    /// Reads what came, event by event.
    fn read(&mut self, slot: usize, closing: bool, buffer: &mut [u8]) {
        let begun = clock::now();
        loop {
            let stream = &mut self.streams[slot];
            let Some(connection) = &mut stream.connection else { return };
            let piece = match connection.read(buffer) {
                Ok(piece) => piece,
                Err(error) => return self.broken(slot, &error),
            };
            let present = clock::now();
            match piece {
                Piece::Nothing => return,
                Piece::Closed => {
                    match stream.answer.closed((present.cast_signed() - self.origin.cast_signed()) as f64) {
                        Step::Done => self.finish(slot, None),
                        Step::Failed(Failure::ClosedEarly) if stream.answer.is_untouched() => {
                            self.broken(slot, &io::ErrorKind::UnexpectedEof.into());
                        }
                        Step::Failed(failure) => self.failed(slot, failure),
                        Step::More => self.failed(slot, Failure::ClosedEarly),
                    }
                    return;
                }
                Piece::Bytes { len, received, more } => {
                    let stamp = received;
                    let received = stamp.and_then(|stamp| self.real.moment(stamp, present));
                    match received {
                        Some(received) => self.live.delays.push((present - received) as f64, stream.key),
                        None => self.live.unstamped += 1,
                    }
                    let at = (received.unwrap_or(present).cast_signed() - self.origin.cast_signed()) as f64;
                    let before = stream.answer.progress();
                    let step = stream.answer.take(&buffer[..len], at);
                    if stream.answer.progress() > before {
                        // What holds no output does not keep a request alive.
                        stream.heard = present;
                        self.live.outputs += 1;
                        self.live.shared_stamps += u64::from(stamp.is_some() && stamp == stream.stamp);
                        stream.stamp = stamp;
                    }
                    self.output_tokens += stream.answer.progress() - before;
                    match step {
                        Step::More if !more && !closing => return,
                        // It may not be announced again.
                        Step::More if present - begun > TURN => {
                            if stream.unread.is_none() {
                                self.unread.push(slot);
                            }
                            stream.unread = Some(closing || stream.unread == Some(true));
                            return;
                        }
                        Step::More => {}
                        Step::Done => return self.finish(slot, None),
                        Step::Failed(failure) => return self.failed(slot, failure),
                    }
                }
            }
        }
    }

    /// A connection broke: sent again where it was a kept one on which nothing had come, and no failure where all was said.
    fn broken(&mut self, slot: usize, error: &io::Error) {
        let stream = &mut self.streams[slot];
        if stream.answer.is_over() {
            return self.finish(slot, None);
        }
        let exchange = &mut self.live.exchanges[stream.key];
        if stream.kept && stream.answer.is_untouched() && !exchange.retried {
            exchange.retried = true;
            if let Some(request) = stream.connection.as_mut().map(Connection::take) {
                stream.tried = 0;
                self.close(slot);
                return self.connect(slot, request, clock::now());
            }
        }
        let failure = match error.kind() {
            io::ErrorKind::UnexpectedEof => Failure::ClosedEarly,
            _ if is_tls(error) => Failure::Tls,
            _ => Failure::Reset,
        };
        self.note(failure, &error.to_string());
        self.finish(slot, Some(failure));
    }

    /// An answer failed in itself.
    fn failed(&mut self, slot: usize, failure: Failure) {
        let words = self.streams[slot].answer.words();
        self.note(failure, &words);
        self.finish(slot, Some(failure));
    }

    /// Keeps the words of the first failure of each kind.
    fn note(&mut self, failure: Failure, words: &str) {
        if self.live.messages.iter().all(|(other, _)| *other != failure) {
            self.live.messages.push((failure, self.job.endpoint.target.redact(words)));
        }
    }

    /// Ends requests that took too long.
    fn expire(&mut self, present: Moment) {
        let limits = self.job.limits;
        let over =
            |since: Moment, limit: Duration| u128::from(present.saturating_sub(since)) > limit.as_nanos();
        for slot in 0..self.streams.len() {
            let stream = &self.streams[slot];
            if stream.phase == Phase::Answering && stream.answer.is_over() && over(stream.heard, OVER) {
                // All was said; only the end of the response is missing.
                self.finish(slot, None);
                continue;
            }
            let failure = match stream.phase {
                Phase::Free | Phase::Idle => continue,
                Phase::Connecting if over(stream.begun, limits.connect) => {
                    let words = format!("no connection within {} s", limits.connect.as_secs_f64());
                    self.connect_failed(slot, None, &io::Error::new(io::ErrorKind::TimedOut, words));
                    continue;
                }
                _ if over(stream.dispatched, limits.total) => Failure::TotalTimeout,
                Phase::Connecting => continue,
                _ if !stream.answer.has_head() && over(stream.dispatched, limits.headers) => {
                    Failure::HeadersTimeout
                }
                _ if stream.answer.has_head()
                    && !stream.answer.has_output()
                    && over(stream.dispatched, limits.first_token) =>
                {
                    Failure::FirstTokenTimeout
                }
                _ if stream.answer.has_output() && over(stream.heard, limits.event) => Failure::EventTimeout,
                _ => continue,
            };
            self.finish(slot, Some(failure));
        }
    }

    /// The end of a request.
    fn finish(&mut self, slot: usize, failure: Option<Failure>) {
        let now = self.since(clock::now());
        let stream = &mut self.streams[slot];
        let key = stream.key;
        let exchange = &mut self.live.exchanges[key];
        stream.answer.settle(exchange);
        exchange.failure = failure;
        self.record(slot, failure);
        self.live.run.records[key].departed = Some(Nanos(now));
        // A server that says no in good order can be asked again.
        let orderly = matches!(failure, None | Some(Failure::Status(_)));
        // Of a request that is answered before it is sent the rest would have to follow.
        let stream = &self.streams[slot];
        let keep = orderly && stream.phase == Phase::Answering && stream.answer.keeps_connection();
        if keep {
            self.streams[slot].phase = Phase::Idle;
            self.idle.push(slot);
        } else {
            self.close(slot);
            self.free.push(slot);
        }
        // Later ones may fail sooner than the first are served.
        let no_load = failure.is_some_and(|failure| !failure.may_be_overload());
        self.first_failed += usize::from(no_load && key < FIRST_REQUESTS);
        self.busy -= 1;
        self.in_system -= 1;
        self.live.run.population.push((now, self.in_system));
        if self.live.run.measured.contains(&key) {
            self.left -= 1;
        }
        if matches!(self.job.traffic.kind, LoadMode::Closed { .. }) {
            self.openings.push_back(now);
            self.order.done(key);
        }
    }

    /// Takes what an answer showed into the record of its request.
    fn record(&mut self, slot: usize, failure: Option<Failure>) {
        let stream = &self.streams[slot];
        let key = stream.key;
        let exchange = &self.live.exchanges[key];
        let record = &mut self.live.run.records[key];
        record.first_token = exchange.first_token.map(Nanos);
        record.last_token = exchange.last_token.map(Nanos);
        record.output_tokens = exchange.output_tokens as usize;
        if let Some(counted) = exchange.prompt_tokens {
            record.prompt_tokens = counted as usize;
        }
        record.cached_tokens = exchange.cached_tokens.unwrap_or(0) as usize;
        record.outcome = match failure {
            None => RequestOutcome::Served,
            Some(Failure::Aborted) => RequestOutcome::Unfinished,
            Some(failure) => RequestOutcome::Failed(failure),
        };
        // Whether it counts is known when the run is over: it may go on with more measured requests.
        let may_count = key >= self.live.run.measured.start;
        if self.job.keep_events {
            self.live.events[key] = stream.answer.outputs().collect();
        }
        let mut first_tokens = None;
        let mut last = None;
        for (at, tokens) in stream.answer.outputs() {
            if let Some(remote) = &mut self.live.run.remote {
                remote.count(at, tokens);
            }
            // A piece of text without a token of its own.
            if tokens == 0 {
                continue;
            }
            match last.replace(at) {
                None => first_tokens = Some(tokens as usize),
                Some(before) if may_count && failure.is_none() => {
                    let gap: f64 = at - before;
                    self.live.event_gaps.push(gap, key);
                    for _ in 0..tokens {
                        self.token_gaps.push(gap / f64::from(tokens), key);
                    }
                }
                Some(_) => {}
            }
        }
        if let Some(tokens) = first_tokens {
            self.live.run.records[key].first_tokens = tokens;
        }
    }

    /// Closes the connection of a stream.
    fn close(&mut self, slot: usize) {
        let stream = &mut self.streams[slot];
        stream.phase = Phase::Free;
        // The next connection in its place is another.
        stream.unread = stream.unread.map(|_| false);
        if let Some(connection) = stream.connection.take() {
            connection.close(self.poll.registry());
        }
    }

    fn progress(&self, now: f64) -> Progress {
        Progress {
            elapsed: Nanos(now),
            done: self.live.run.measured.len() - self.left,
            total: self.live.run.measured.len(),
            load: SchedulerLoad {
                running: self.busy,
                waiting: self.waiting.len(),
                ..SchedulerLoad::default()
            },
            output_tokens: self.output_tokens,
        }
    }

    /// Ends what is still under way.
    fn stop(mut self) -> LiveRun {
        for slot in 0..self.streams.len() {
            if self.streams[slot].is_busy() {
                let stream = &mut self.streams[slot];
                let exchange = &mut self.live.exchanges[stream.key];
                stream.answer.settle(exchange);
                exchange.failure = Some(Failure::Aborted);
                self.record(slot, Some(Failure::Aborted));
            }
        }
        (self.live.run.gaps, self.live.run.gap_request) = self.token_gaps.values().iter().copied().unzip();
        self.live.clock_steps = self.real.steps();
        self.live.cost = Cost::now().since(self.started);
        self.live
    }
}

/// Whether TLS is at fault.
fn is_tls(error: &io::Error) -> bool {
    error.get_ref().is_some_and(<dyn std::error::Error + Send + Sync>::is::<rustls::Error>)
}
