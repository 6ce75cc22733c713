//! A server that sends what a script says and logs when it sent it: for tests, and for checking the client's own error on a machine.
//!
//! Enters: a [`Script`]. Leaves: answers on 127.0.0.1, the moment before each event was written ([`Mock::sent`]), and the requests as
//! they came in ([`Mock::requests`]). Must not know the client: it is the ruler that the client is held against. It shares the clock with it,
//! and how the kernel's stamps are read.
//!
//! An [`Answer`] is either a [`Stream`] of tokens on time, as vLLM sends them, or a list of [`Step`]s for everything that servers do
//! wrong; [`behaviours`] names those. The token of this server is a word: a prompt counts its words (or ids), an answer is words.
//!
//! A client that closes its side of a connection is taken to have gone, as uvicorn does; a request in chunks is refused.
//!
//! One thread, one poll, timers in a heap. Within 50 µs of a deadline the thread polls without sleeping. Nothing is allocated per event
//! of a [`Stream`].

mod alarm;
mod answer;
mod batch;
mod connection;
mod counters;
mod http;
mod recorder;
mod server;
mod stream;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use mio::Waker;

pub use answer::{Answer, Step, Steps, behaviours};
pub use batch::BatchModel;
pub use stream::{Api, Stream};

// As every process on this machine reads it.
use crate::clock::now as now_ns;
use recorder::Recorder;
use server::{Ask, Server};

/// What the server does.
#[derive(Debug, Clone)]
pub struct Script {
    /// The only model it has; another name is answered by 404.
    pub model: String,
    /// The answer to `/v1/completions` and `/v1/chat/completions`.
    pub default: Answer,
    /// Answers by `X-Request-Id`, before those by path.
    pub by_request: HashMap<String, Answer>,
    /// Answers by path, also of `/v1/models` and `/metrics`.
    pub by_path: HashMap<String, Answer>,
    /// Streams share an engine that makes one token per running request and step, and no longer have times of their own.
    pub batch: Option<BatchModel>,
    /// Reads so many bytes of a request at a time, with this pause between.
    pub slow_reading: Option<(usize, Duration)>,
}

impl Default for Script {
    fn default() -> Self {
        Self::new(Answer::default())
    }
}

impl Script {
    /// A server that gives one answer to all requests for completions.
    #[must_use]
    pub fn new(default: Answer) -> Self {
        Self {
            model: "mock".to_owned(),
            default,
            by_request: HashMap::new(),
            by_path: HashMap::new(),
            batch: None,
            slow_reading: None,
        }
    }
    /// Another answer to the request of this `X-Request-Id`.
    #[must_use]
    pub fn on_request(mut self, id: impl Into<String>, answer: Answer) -> Self {
        self.by_request.insert(id.into(), answer);
        self
    }
    /// Another answer on a path.
    #[must_use]
    pub fn on_path(mut self, path: impl Into<String>, answer: Answer) -> Self {
        self.by_path.insert(path.into(), answer);
        self
    }
    /// Streams come out of a batch.
    #[must_use]
    pub fn in_batches(mut self, model: BatchModel) -> Self {
        self.batch = Some(model);
        self
    }
    /// Requests are read slowly, behind a small window.
    #[must_use]
    pub fn reading_slowly(mut self, bytes: usize, pause: Duration) -> Self {
        self.slow_reading = Some((bytes, pause));
        self
    }
}

/// A write of one event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sent {
    /// The monotonic clock just before the write. Events of one write share it.
    pub at_ns: u64,
    /// How long after its deadline; at most 4.2 s can be said.
    pub late_ns: u32,
    /// Output tokens in it: 0 for a role chunk, for usage and for `[DONE]`.
    pub tokens: u32,
}

/// A request as it came in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReceivedRequest {
    /// Its `X-Request-Id`, or `mock-N` for request number N.
    pub id: String,
    pub method: String,
    /// Path and query.
    pub target: String,
    /// From the request line to the empty line.
    pub head: Vec<u8>,
    /// Empty once this server has recorded 256 MB.
    pub body: Vec<u8>,
    pub body_bytes: usize,
    /// The monotonic clock when the kernel had received what was read last of it.
    pub arrived_ns: u64,
    /// The monotonic clock when its last byte had been read.
    pub received_ns: u64,
    /// Which accepted connection it came on, from 0.
    pub connection: u64,
}

impl ReceivedRequest {
    /// The value of a header, whatever its case.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<String> {
        let head = String::from_utf8_lossy(&self.head);
        let mut fields = head.lines().skip(1).filter_map(|line| line.split_once(':'));
        fields.find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim().to_owned())
    }
}

/// A running server; it ends when dropped.
#[derive(Debug)]
pub struct Mock {
    address: SocketAddr,
    asks: Sender<Ask>,
    waker: Waker,
    thread: Option<JoinHandle<Recorder>>,
    /// What it recorded, once it has ended.
    recorded: Recorder,
}

impl Mock {
    /// Starts a server on a free port of 127.0.0.1, on a thread of its own.
    ///
    /// # Errors
    /// The system gives no socket, timer or thread, or the script cannot be followed.
    pub fn start(script: Script) -> io::Result<Self> {
        if script.batch.is_some_and(|model| model.max_running == 0) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "a batch of at most 0 requests runs none; give it 1 or more",
            ));
        }
        let (asks, asked) = channel();
        let (server, address, waker) = Server::new(script, asked)?;
        let thread = std::thread::Builder::new().name("mock".to_owned()).spawn(move || server.run())?;
        Ok(Self { address, asks, waker, thread: Some(thread), recorded: Recorder::default() })
    }
    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
    /// `http://127.0.0.1:PORT`.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }
    /// The events written so far in answer to a request, in order; the newest request of that id.
    #[must_use]
    pub fn sent(&self, request_id: &str) -> Vec<Sent> {
        self.ask(|reply| Ask::Sent(request_id.to_owned(), reply))
            .unwrap_or_else(|| self.recorded.sent(request_id))
    }
    /// The requests received so far, in order.
    #[must_use]
    pub fn requests(&self) -> Vec<ReceivedRequest> {
        self.ask(Ask::Requests).unwrap_or_else(|| self.recorded.received())
    }
    /// Ends the server and all its connections. What it recorded can still be read.
    ///
    /// # Panics
    /// The server's thread has panicked.
    pub fn stop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        // A server that has ended by itself hears neither, and is joined all the same.
        let _ = self.asks.send(Ask::Stop);
        let _ = self.waker.wake();
        self.recorded = thread.join().expect("the server's thread does not panic");
    }
    /// Asks the server's thread, so that an event a client has seen is in the log. None when the thread has ended.
    fn ask<T>(&self, question: impl FnOnce(Sender<T>) -> Ask) -> Option<T> {
        let (reply, answer): (Sender<T>, Receiver<T>) = channel();
        self.asks.send(question(reply)).ok()?;
        self.waker.wake().ok()?;
        answer.recv().ok()
    }
}

impl Drop for Mock {
    fn drop(&mut self) {
        // A panic of the server's thread has been printed; a second one while dropping would abort.
        if !std::thread::panicking() {
            self.stop();
        }
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
