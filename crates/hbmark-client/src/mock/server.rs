//! The loop: one poll, a heap of deadlines, and connections that each follow their answer.
//!
//! Enters: a script and the sockets. Leaves: bytes at their deadlines, and the log. A deadline less than [`SPIN_NS`] away is waited for by
//! polling without sleeping, so that requests are still read at once.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::time::Duration;

use mio::net::TcpListener;
use mio::{Events, Interest, Poll, Token, Waker};
use nix::libc;
use nix::sys::socket::{Backlog, listen, setsockopt, sockopt};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::alarm::Alarm;
use super::answer::{Answer, Picked, Step};
use super::batch::Batch;
use super::connection::{Connection, End, Following, Work};
use super::counters::Counters;
use super::http::{Asked, Request, refusal, reply};
use super::recorder::Recorder;
use super::stream::{Api, CREATED, STREAM_HEAD, Streaming};
use super::{ReceivedRequest, Script, Sent, nanos, now_ns};
use crate::clock::RealTime;
use crate::connection::ask_for_stamps;

const LISTENER: usize = 0;
const WAKER: usize = 1;
const ALARM: usize = 2;
const BATCH: usize = 3;
/// Tokens and timers of connections start here.
const CONNECTIONS: usize = 4;

const SPIN_NS: u64 = 50_000;
/// Deadlines served before requests are read again.
const TURN: usize = 16;
/// Writes of an endless answer in a row.
const REPEATS: usize = 64;
const ACCEPT_AGAIN_NS: u64 = 10_000_000;

/// What is asked of a running server.
#[derive(Debug)]
pub(super) enum Ask {
    Sent(String, Sender<Vec<Sent>>),
    Requests(Sender<Vec<ReceivedRequest>>),
    Stop,
}

#[derive(Debug)]
pub(super) struct Server {
    poll: Poll,
    alarm: Alarm,
    listener: TcpListener,
    asks: Receiver<Ask>,
    model: String,
    /// The answer, and how many requests had it.
    answer: Answer,
    served: usize,
    batch: Option<Batch>,
    connections: Vec<Option<Box<Connection>>>,
    free: Vec<usize>,
    /// When, and who is to look at what is due. Looking too often does no harm.
    timers: BinaryHeap<Reverse<(u64, usize)>>,
    streams: usize,
    recorder: Recorder,
    counters: Counters,
    real: RealTime,
    /// Whom a step of the batch served.
    running: Vec<usize>,
    scratch: Vec<u8>,
}

impl Server {
    pub(super) fn new(script: Script, asks: Receiver<Ask>) -> io::Result<(Self, SocketAddr, Waker)> {
        raise_file_limit();
        let mut listener = TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], 0)))?;
        // Again, with room for a burst of connections: the first call had the small default.
        listen(&listener, Backlog::MAXCONN)?;
        // Connections inherit it.
        ask_for_stamps(&listener);
        let poll = Poll::new()?;
        let waker = Waker::new(poll.registry(), Token(WAKER))?;
        poll.registry().register(&mut listener, Token(LISTENER), Interest::READABLE)?;
        let alarm = Alarm::new(&poll, Token(ALARM))?;
        let address = listener.local_addr()?;
        let server = Self {
            poll,
            alarm,
            listener,
            asks,
            model: script.model,
            answer: script.answer,
            served: 0,
            batch: script.batch.map(Batch::new),
            connections: Vec::with_capacity(1024),
            free: Vec::with_capacity(1024),
            timers: BinaryHeap::with_capacity(1 << 15),
            streams: 0,
            recorder: Recorder::default(),
            counters: Counters::default(),
            real: RealTime::default(),
            running: Vec::new(),
            scratch: vec![0; 1 << 16],
        };
        Ok((server, address, waker))
    }

    /// Serves until it is told to stop.
    pub(super) fn run(mut self) {
        let mut events = Events::with_capacity(1024);
        loop {
            self.serve_deadlines();
            let wait = match self.timers.peek() {
                Some(&Reverse((due, _))) if due <= now_ns() + SPIN_NS => Some(Duration::ZERO),
                Some(&Reverse((due, _))) => self.alarm.set(due - SPIN_NS),
                None => None,
            };
            match self.poll.poll(&mut events, wait) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => return,
            }
            for event in &events {
                match event.token().0 {
                    LISTENER => self.accept(),
                    WAKER => {
                        if self.answer_asks() {
                            return;
                        }
                    }
                    ALARM => self.alarm.rang(),
                    index => {
                        if let Some(Some(connection)) = self.connections.get_mut(index - CONNECTIONS) {
                            connection.readable |= event.is_readable() || event.is_error();
                        }
                        self.drive(index - CONNECTIONS);
                    }
                }
            }
        }
    }

    fn serve_deadlines(&mut self) {
        for _ in 0..TURN {
            match self.timers.peek() {
                Some(&Reverse((due, _))) if due <= now_ns() => {}
                _ => return,
            }
            match self.timers.pop() {
                Some(Reverse((due, BATCH))) => self.end_step(due),
                Some(Reverse((_, LISTENER))) => self.accept(),
                Some(Reverse((_, index))) => self.drive(index - CONNECTIONS),
                None => {}
            }
        }
    }

    /// Whether to stop.
    fn answer_asks(&mut self) -> bool {
        while let Ok(ask) = self.asks.try_recv() {
            // Who asked may have gone.
            match ask {
                Ask::Sent(id, reply) => _ = reply.send(self.recorder.sent(&id)),
                Ask::Requests(reply) => _ = reply.send(self.recorder.received()),
                Ask::Stop => return true,
            }
        }
        false
    }

    fn accept(&mut self) {
        loop {
            let mut stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(_) => {
                    // Out of files, most likely: the listener will not be announced again, so look once more later.
                    self.timers.push(Reverse((now_ns() + ACCEPT_AGAIN_NS, LISTENER)));
                    return;
                }
            };
            let index = self.free.pop().unwrap_or_else(|| {
                self.connections.push(None);
                self.connections.len() - 1
            });
            let both = Interest::READABLE | Interest::WRITABLE;
            let ready = stream.set_nodelay(true).is_ok()
                && self.poll.registry().register(&mut stream, Token(CONNECTIONS + index), both).is_ok();
            if !ready {
                self.free.push(index);
                continue;
            }
            self.connections[index] = Some(Box::new(Connection::new(stream)));
        }
    }

    /// Goes on with a connection as far as it can. Called for anything that may have changed; too often does no harm.
    fn drive(&mut self, index: usize) {
        let Some(mut connection) = self.connections.get_mut(index).and_then(Option::take) else { return };
        match self.go_on(index, &mut connection) {
            Ok(()) => self.connections[index] = Some(connection),
            Err(end) => self.end(index, *connection, end),
        }
    }

    fn end(&mut self, index: usize, mut connection: Connection, end: End) {
        if let Work::Stream(streaming) = &connection.work
            && !streaming.ended()
        {
            self.counters.aborted += 1;
            self.streams -= 1;
            if let Some(batch) = &mut self.batch {
                batch.leave(index);
            }
        }
        if end == End::Reset {
            let linger = libc::linger { l_onoff: 1, l_linger: 0 };
            // Without it the client sees a FIN instead, and the test of it fails.
            let _ = setsockopt(&connection.stream, sockopt::Linger, &linger);
        } else {
            // A FIN, and not the RST that closing over unread bytes would make of it.
            let _ = connection.flush();
            connection.readable = true;
            let _ = connection.fill(&mut self.scratch);
        }
        let _ = self.poll.registry().deregister(&mut connection.stream);
        self.free.push(index);
    }

    fn go_on(&mut self, index: usize, connection: &mut Connection) -> Result<(), End> {
        connection.fill(&mut self.scratch)?;
        while connection.flush()? {
            match std::mem::replace(&mut connection.work, Work::Idle) {
                Work::Idle => {
                    if !connection.keep_alive {
                        return Err(End::Close);
                    }
                    match connection.reader.take() {
                        Ok(None) => return Ok(()),
                        Ok(Some(request)) => connection.work = self.answer(index, connection, request)?,
                        Err(status) => {
                            connection.keep_alive = false;
                            connection.write(&refusal(
                                status,
                                "BadRequestError",
                                "this request cannot be read",
                            ))?;
                        }
                    }
                }
                Work::Steps(mut following) => {
                    let due = following.until_ns <= now_ns();
                    let waits = if due { self.step(index, connection, &mut following)? } else { Some(true) };
                    if let Some(waits) = waits {
                        connection.work = Work::Steps(following);
                        if waits {
                            return Ok(());
                        }
                    }
                }
                Work::Stream(mut streaming) => {
                    let due = streaming.due_ns().is_some_and(|due| due <= now_ns());
                    let written = if due { self.emit(connection, &mut streaming) } else { Ok(()) };
                    let next = streaming.due_ns().filter(|_| due);
                    if !streaming.ended() {
                        connection.work = Work::Stream(streaming);
                    }
                    written?;
                    if let Some(next) = next {
                        self.timers.push(Reverse((next, CONNECTIONS + index)));
                    }
                    if !due {
                        return Ok(());
                    }
                }
            }
        }
        Ok(())
    }

    /// The next step, if there is one, and whether to wait after it.
    fn step(
        &mut self,
        index: usize,
        connection: &mut Connection,
        at: &mut Following,
    ) -> Result<Option<bool>, End> {
        let Some(step) = at.steps.get(at.next) else { return Ok(None) };
        let mut wait = None;
        let mut next = at.next + 1;
        match step {
            Step::Send(bytes) => connection.write(bytes)?,
            Step::Event(bytes) => {
                self.recorder.requests[at.request].1.push(Sent { at_ns: now_ns(), late_ns: 0, tokens: 0 });
                connection.write(bytes)?;
            }
            Step::Pieces { bytes, size, pause } => {
                let end = (at.offset + size.max(&1)).min(bytes.len());
                connection.write(&bytes[at.offset..end])?;
                at.offset = end % bytes.len().max(1);
                if at.offset > 0 {
                    (next, wait) = (at.next, Some(nanos(*pause)));
                }
            }
            Step::Repeat(bytes) => {
                for _ in 0..REPEATS {
                    if connection.unsent.is_empty() {
                        connection.write(bytes)?;
                    }
                }
                // Others first.
                (next, wait) = (at.next, Some(0));
            }
            Step::Wait(time) => wait = Some(nanos(*time)),
            Step::Silence => (next, wait) = (at.next, Some(u64::MAX)),
            Step::Close => return Err(End::Close),
            Step::Reset => return Err(End::Reset),
        }
        at.next = next;
        if let Some(wait) = wait {
            at.until_ns = now_ns().saturating_add(wait);
            self.timers.push(Reverse((at.until_ns, CONNECTIONS + index)));
        }
        Ok(Some(wait.is_some()))
    }

    /// The next write of a stream.
    fn emit(&mut self, connection: &mut Connection, streaming: &mut Streaming) -> Result<(), End> {
        let [prompt, before] = streaming.tokens();
        let due = streaming.write_due_ns();
        let log = &mut self.recorder.requests[streaming.request].1;
        let events = streaming.write_next(&mut connection.unsent, log);
        let first = log.len() - events;
        // The stamp: after it only the log, then the write.
        let at_ns = now_ns();
        let late_ns = u32::try_from(at_ns.saturating_sub(due)).unwrap_or(u32::MAX);
        for sent in &mut log[first..] {
            (sent.at_ns, sent.late_ns) = (at_ns, late_ns);
        }
        let written = connection.flush();
        let tokens = streaming.tokens()[1] - before;
        if tokens > 0 {
            self.counters.tokens(tokens, prompt, &streaming.times, at_ns);
            streaming.times.last = at_ns;
            if streaming.times.first == 0 {
                streaming.times.first = at_ns;
            }
        }
        if streaming.ended() {
            self.counters.finish(&streaming.times);
            self.streams -= 1;
        }
        written.map(|_| ())
    }

    /// A step of the batch has ended: a token for each that runs, and the next step begins when this one ended, however late we are.
    fn end_step(&mut self, due: u64) {
        let Some(batch) = self.batch.as_mut().filter(|batch| batch.ends_ns() == Some(due)) else { return };
        let mut running = std::mem::take(&mut self.running);
        running.clear();
        running.extend_from_slice(batch.running());
        self.counters.steps += 1;
        for &index in &running {
            let connection = self.connections.get_mut(index).and_then(Option::as_mut);
            let Some(Work::Stream(streaming)) = connection.map(|connection| &mut connection.work) else {
                continue;
            };
            // Who is done leaves first: its connection may bring the next request at once.
            if streaming.step(due)
                && let Some(batch) = &mut self.batch
            {
                batch.leave(index);
            }
            self.drive(index);
        }
        self.running = running;
        self.begin_step(due);
    }

    /// Starts the next step of the batch.
    fn begin_step(&mut self, start: u64) {
        let Some(batch) = &mut self.batch else { return };
        let before = batch.running().len();
        batch.next_step(start);
        for &index in &batch.running()[before..] {
            if let Some(Some(connection)) = self.connections.get_mut(index)
                && let Work::Stream(streaming) = &mut connection.work
            {
                streaming.times.admitted = start;
            }
        }
        if let Some(ends) = batch.ends_ns() {
            self.timers.push(Reverse((ends, BATCH)));
        }
    }

    /// Finds the answer to a request.
    fn answer(
        &mut self,
        index: usize,
        connection: &mut Connection,
        mut request: Request,
    ) -> Result<Work, End> {
        let now = now_ns();
        connection.keep_alive = request.keep_alive;
        let asked = serde_json::from_slice::<Asked>(&request.body)
            .map_err(|error| refusal(400, "BadRequestError", &error.to_string()));
        let arrived = connection.received.and_then(|stamp| self.real.moment(stamp, now)).unwrap_or(now);
        let number = self.recorder.add(&mut request, (arrived, now));
        let id = self.recorder.requests[number].0.id.clone();
        let path = request.target.split('?').next().unwrap_or_default();
        let api = if path == "/v1/chat/completions" { Api::Chat } else { Api::Completions };
        let picked = if request.method == "POST" && matches!(path, "/v1/completions" | "/v1/chat/completions")
        {
            self.served += 1;
            self.answer.pick(self.served - 1)
        } else {
            Picked::Steps(Arc::from([Step::Send(self.built_in(&request.method, path))]))
        };
        let started = match picked {
            Picked::Steps(steps) => return Ok(Work::Steps(Following::new(steps, number))),
            Picked::Stream(stream) => asked.and_then(|asked| self.with_model(asked)).and_then(|asked| {
                Streaming::new(stream, api, &asked, &id, number, now, self.batch.is_some())
            }),
        };
        let streaming = match started {
            Ok(streaming) => streaming,
            Err(refusal) => return Ok(Work::Steps(Following::new(Arc::from([Step::Send(refusal)]), number))),
        };
        self.recorder.requests[number].1.reserve_exact(streaming.events());
        connection.write(STREAM_HEAD.as_bytes())?;
        self.streams += 1;
        if let Some(due) = streaming.due_ns() {
            self.timers.push(Reverse((due, CONNECTIONS + index)));
        }
        if let Some(batch) = &mut self.batch {
            batch.arrive(index);
            if batch.ends_ns().is_none() {
                self.begin_step(now);
            }
        }
        Ok(Work::Stream(Box::new(streaming)))
    }

    /// Fills in the model, or refuses another.
    fn with_model(&self, mut asked: Asked) -> Result<Asked, Vec<u8>> {
        let model = asked.model.get_or_insert_with(|| self.model.clone());
        if *model == self.model {
            return Ok(asked);
        }
        Err(refusal(404, "NotFoundError", &format!("The model `{model}` does not exist.")))
    }

    /// What any such server answers on its other paths.
    fn built_in(&self, method: &str, path: &str) -> Vec<u8> {
        let json = |value: serde_json::Value| reply(200, "application/json", "", &value.to_string());
        match (method, path) {
            ("GET", "/v1/models") => json(serde_json::json!({"object": "list", "data": [{
                "id": self.model, "object": "model", "created": CREATED, "owned_by": "vllm", "root": self.model, "parent": null,
                "max_model_len": 1 << 20, "permission": [],
            }]})),
            ("GET", "/version") => {
                json(serde_json::json!({"version": concat!("hbmark-mock ", env!("CARGO_PKG_VERSION"))}))
            }
            ("GET", "/health") => reply(200, "text/plain", "", ""),
            ("GET", "/metrics") => {
                let (running, waiting) = self
                    .batch
                    .as_ref()
                    .map_or((self.streams, 0), |batch| (batch.running().len(), batch.waiting()));
                let text = self.counters.render(&self.model, running, waiting, self.batch.is_some());
                reply(200, "text/plain; version=0.0.4; charset=utf-8", "", &text)
            }
            _ => reply(404, "application/json", "", r#"{"detail":"Not Found"}"#),
        }
    }
}

/// 10,000 streams are 10,000 files. Best effort: what is refused here shows when a connection is.
fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
    }
}
