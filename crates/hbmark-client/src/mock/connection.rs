//! A connection: bytes that wait in either direction, and how far its answer is.

use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::sync::Arc;

use mio::net::TcpStream;

use super::answer::Step;
use super::http::Reader;
use super::stream::Streaming;
use crate::connection::receive;

const MOST_PIPELINED_BYTES: usize = 128 << 20;

#[derive(Debug)]
pub(super) enum Work {
    /// Waits for a request.
    Idle,
    Steps(Following),
    Stream(Box<Streaming>),
}

/// How far a list of steps has been followed.
#[derive(Debug)]
pub(super) struct Following {
    pub(super) steps: Arc<[Step]>,
    pub(super) next: usize,
    /// Within a step of pieces.
    pub(super) offset: usize,
    pub(super) until_ns: u64,
    /// Of the log.
    pub(super) request: usize,
}

impl Following {
    pub(super) fn new(steps: Arc<[Step]>, request: usize) -> Self {
        Self { steps, next: 0, offset: 0, until_ns: 0, request }
    }
}

#[derive(Debug)]
pub(super) struct Connection {
    pub(super) stream: TcpStream,
    pub(super) reader: Reader,
    /// Bytes may be there to read.
    pub(super) readable: bool,
    /// When the kernel received what was read last, by its real-time clock.
    pub(super) received: Option<u64>,
    pub(super) unsent: Vec<u8>,
    flushed: usize,
    pub(super) work: Work,
    pub(super) keep_alive: bool,
}

/// Why a connection is given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    Close,
    Reset,
}

impl Connection {
    pub(super) fn new(stream: TcpStream) -> Self {
        Self {
            stream,
            reader: Reader::default(),
            readable: false,
            received: None,
            unsent: Vec::new(),
            flushed: 0,
            work: Work::Idle,
            keep_alive: true,
        }
    }
    /// Hands these bytes to the kernel; what it does not take goes with the next [`Self::flush`].
    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<(), End> {
        self.unsent.extend_from_slice(bytes);
        self.flush().map(|_| ())
    }
    /// Whether nothing is left to send.
    pub(super) fn flush(&mut self) -> Result<bool, End> {
        while self.flushed < self.unsent.len() {
            match self.stream.write(&self.unsent[self.flushed..]) {
                Ok(written) => self.flushed += written,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(_) => return Err(End::Close),
            }
        }
        self.unsent.clear();
        self.flushed = 0;
        Ok(true)
    }
    /// Reads what is there.
    pub(super) fn fill(&mut self, scratch: &mut [u8]) -> Result<(), End> {
        while self.readable {
            match receive(self.stream.as_raw_fd(), scratch) {
                Ok((0, _)) => return Err(End::Close),
                Ok((read, stamp)) => {
                    self.reader.input.extend_from_slice(&scratch[..read]);
                    self.received = stamp;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.readable = false,
                Err(_) => return Err(End::Close),
            }
            if self.reader.input.len() > MOST_PIPELINED_BYTES {
                return Err(End::Reset);
            }
        }
        Ok(())
    }
}
