//! A server that sends what a script says and logs when it sent it: for tests, and for checking the client's own error on a machine.
//!
//! Enters: a [`Script`]. Leaves: answers on 127.0.0.1, the moment before each event was written ([`Mock::sent`]), and the requests as
//! they came in ([`Mock::requests`]). Must not know the client: it is the ruler that the client is held against. It shares the clock with it,
//! and how the kernel's stamps are read.
//!
//! An [`Answer`] is either a [`Stream`] of tokens on time, as vLLM sends them, or a list of [`Step`]s for everything that servers do
//! wrong. The token of this server is a word: a prompt counts its words (or ids), an answer is words. It streams whether asked to or not.
//!
//! A client that closes its side of a connection is taken to have gone, as uvicorn does; a request in chunks is refused.
//!
//! One thread, one poll, timers in a heap. Within 50 µs of a deadline the thread polls without sleeping. Nothing is allocated per event
//! of a [`Stream`].

mod alarm;
mod answer;
mod batch;
#[cfg(test)]
mod behaviours;
mod connection;
mod counters;
mod http;
mod recorder;
mod server;
mod stream;
#[cfg(test)]
mod tests;

use std::io;
use std::net::SocketAddr;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use mio::Waker;

pub use answer::{Answer, Step};
pub use batch::BatchModel;
#[cfg(test)]
pub(crate) use behaviours::behaviours;
pub use stream::Stream;

// As every process on this machine reads it.
use crate::clock::now as now_ns;
use server::{Ask, Server};

/// What the server does.
#[derive(Debug, Clone)]
pub struct Script {
    /// The only model it has; another name is answered by 404.
    pub model: String,
    /// The answer to `/v1/completions` and `/v1/chat/completions`.
    pub answer: Answer,
    /// Streams share an engine that makes one token per running request and step, and no longer have times of their own.
    pub batch: Option<BatchModel>,
}

impl Default for Script {
    fn default() -> Self {
        Self::new(Answer::default())
    }
}

impl Script {
    /// A server that gives one answer to all requests for completions.
    pub fn new(answer: Answer) -> Self {
        Self { model: "mock".to_owned(), answer, batch: None }
    }
    /// Streams come out of a batch.
    pub fn in_batches(mut self, model: BatchModel) -> Self {
        self.batch = Some(model);
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
    /// The monotonic clock when the kernel had received what was read last of it.
    pub arrived_ns: u64,
    /// The monotonic clock when its last byte had been read.
    pub received_ns: u64,
}

impl ReceivedRequest {
    /// The value of a header, whatever its case.
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
    thread: Option<JoinHandle<()>>,
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
        Ok(Self { address, asks, waker, thread: Some(thread) })
    }
    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
    /// `http://127.0.0.1:PORT`.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }
    /// The events written so far in answer to a request, in order; the newest request of that id.
    pub fn sent(&self, request_id: &str) -> Vec<Sent> {
        self.ask(|reply| Ask::Sent(request_id.to_owned(), reply))
    }
    /// The requests received so far, in order.
    pub fn requests(&self) -> Vec<ReceivedRequest> {
        self.ask(Ask::Requests)
    }
    /// Asks the server's thread, so that an event a client has seen is in the log. Nothing when the thread has ended.
    fn ask<T: Default>(&self, question: impl FnOnce(Sender<T>) -> Ask) -> T {
        let (reply, answer): (Sender<T>, Receiver<T>) = channel();
        // A server that has ended by itself hears neither.
        let _ = self.asks.send(question(reply));
        let _ = self.waker.wake();
        answer.recv().unwrap_or_default()
    }
}

impl Drop for Mock {
    fn drop(&mut self) {
        let _ = self.asks.send(Ask::Stop);
        let _ = self.waker.wake();
        let ended = self.thread.take().map(JoinHandle::join);
        // A panic of the server's thread has been printed; a second one while dropping would abort.
        assert!(
            std::thread::panicking() || !matches!(ended, Some(Err(_))),
            "the server's thread does not panic"
        );
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
