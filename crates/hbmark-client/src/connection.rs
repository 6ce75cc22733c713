//! A connection to a server: bytes out, and bytes in with the time at which the kernel received them.
//!
//! Enters: an [`Endpoint`] and requests. Leaves: pieces of responses. A piece never holds more than one event of a stream, so that events that
//! waited to be read have stamps of their own, unless the kernel has merged their segments: then all have the newest stamp. So a stamp is
//! never too early, and too late by no more than the piece waited to be read, which is measured. Under TLS records are read and decrypted as
//! they come, and no stamp is the kernel's.

use std::io::{self, IoSliceMut, Read, Write};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, RawFd};

use mio::net::TcpStream;
use mio::{Interest, Registry, Token};
use nix::sys::socket::{ControlMessageOwned, MsgFlags, cmsg_space, recv, recvmsg, setsockopt, sockopt};
use nix::sys::time::TimeSpec;
use rustls::ClientConnection;

use crate::target::{Endpoint, Tls};

/// Room for one control message: a time stamp.
const CONTROL: usize = cmsg_space::<TimeSpec>();

/// A piece of what came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Piece {
    /// So many bytes, received by the kernel at this time of `CLOCK_REALTIME`.
    Bytes { len: usize, received: Option<u64>, more: bool },
    /// Nothing is there now.
    Nothing,
    /// The server has closed its side.
    Closed,
}

/// An open or opening connection.
#[derive(Debug)]
pub struct Connection {
    socket: TcpStream,
    tls: Option<Box<ClientConnection>>,
    /// The request that is being sent, and how much of it was.
    out: Vec<u8>,
    sent: usize,
}

impl Connection {
    /// Begins to connect.
    ///
    /// # Errors
    /// When the system has no socket for it, or refuses at once.
    pub fn open(
        target: &Endpoint,
        address: SocketAddr,
        registry: &Registry,
        token: Token,
    ) -> io::Result<Self> {
        let mut socket = TcpStream::connect(address)?;
        socket.set_nodelay(true)?;
        if target.tls.is_none() {
            ask_for_stamps(&socket);
        }
        registry.register(&mut socket, token, Interest::READABLE | Interest::WRITABLE)?;
        let tls = target.tls.as_ref().map(|Tls { config, name }| {
            let tls = ClientConnection::new(config.clone(), name.clone()).map_err(io::Error::other)?;
            Ok::<_, io::Error>(Box::new(tls))
        });
        Ok(Self { socket, tls: tls.transpose()?, out: Vec::new(), sent: 0 })
    }

    /// Whether the connection stands; an error when it was refused.
    ///
    /// # Errors
    /// Why there is none.
    pub fn is_connected(&mut self) -> io::Result<bool> {
        if let Some(error) = self.socket.take_error()? {
            return Err(error);
        }
        match self.socket.peer_addr() {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotConnected => return Ok(false),
            Err(error) => return Err(error),
        }
        let Some(tls) = &mut self.tls else { return Ok(true) };
        while tls.is_handshaking() {
            let mut went_on = false;
            if tls.wants_write() {
                went_on |= would_block(tls.write_tls(&mut self.socket))?.is_some();
            }
            if tls.wants_read() {
                match would_block(tls.read_tls(&mut self.socket))? {
                    Some(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                    Some(_) => {
                        tls.process_new_packets()
                            .map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))?;
                        went_on = true;
                    }
                    None => {}
                }
            }
            if !went_on {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Gives the request that is sent next; the buffer of the one before is returned.
    pub fn give(&mut self, request: Vec<u8>) -> Vec<u8> {
        self.sent = 0;
        std::mem::replace(&mut self.out, request)
    }

    /// Takes the request back, to send it elsewhere.
    pub fn take(&mut self) -> Vec<u8> {
        self.give(Vec::new())
    }

    /// Sends what the socket takes; whether all is sent.
    ///
    /// # Errors
    /// When the connection is broken.
    pub fn send(&mut self) -> io::Result<bool> {
        if let Some(tls) = &mut self.tls {
            if self.sent < self.out.len() {
                // Buffered whole: a request is bounded by the caller.
                tls.set_buffer_limit(None);
                tls.writer().write_all(&self.out)?;
                self.sent = self.out.len();
            }
            while tls.wants_write() {
                if would_block(tls.write_tls(&mut self.socket))?.is_none() {
                    return Ok(false);
                }
            }
            return Ok(true);
        }
        while self.sent < self.out.len() {
            match would_block(self.socket.write(&self.out[self.sent..]))? {
                None => return Ok(false),
                Some(0) => return Err(io::ErrorKind::WriteZero.into()),
                Some(count) => self.sent += count,
            }
        }
        Ok(true)
    }

    /// Reads up to the end of the first event.
    ///
    /// # Errors
    /// When the connection is broken.
    pub fn read(&mut self, buffer: &mut [u8]) -> io::Result<Piece> {
        if self.tls.is_some() {
            return self.read_tls(buffer);
        }
        let socket = self.socket.as_raw_fd();
        let there = match would_block(
            recv(socket, buffer, MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT).map_err(Into::into),
        )? {
            None => return Ok(Piece::Nothing),
            Some(0) => return Ok(Piece::Closed),
            Some(there) => there,
        };
        let take = end_of_event(&buffer[..there]);
        // A short peek has seen all there is.
        let more = take < there || there == buffer.len();
        let (len, received) = receive(socket, &mut buffer[..take])?;
        Ok(Piece::Bytes { len, received, more })
    }

    fn read_tls(&mut self, buffer: &mut [u8]) -> io::Result<Piece> {
        let Some(tls) = &mut self.tls else { return Ok(Piece::Nothing) };
        loop {
            match would_block(tls.reader().read(buffer))? {
                Some(0) => return Ok(Piece::Closed),
                Some(len) => return Ok(Piece::Bytes { len, received: None, more: true }),
                None => {}
            }
            match would_block(tls.read_tls(&mut self.socket))? {
                None => return Ok(Piece::Nothing),
                Some(0) => return Ok(Piece::Closed),
                Some(_) => {
                    tls.process_new_packets().map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))?;
                }
            }
        }
    }

    /// Whether something came that was not read.
    pub fn has_unread(&self) -> bool {
        let mut one = [0_u8; 1];
        let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
        matches!(recv(self.socket.as_raw_fd(), &mut one, flags), Ok(1..))
    }

    /// Whether an idle connection can take another request: nothing came on it, least of all its end.
    pub fn is_idle(&mut self) -> bool {
        let mut one = [0_u8; 1];
        let peeked = recv(self.socket.as_raw_fd(), &mut one, MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT);
        // Under TLS a session ticket may come late; it is read with the next response.
        matches!(peeked, Err(nix::errno::Errno::EAGAIN)) || self.tls.is_some() && matches!(peeked, Ok(1..))
    }

    /// Takes the socket out of the loop.
    pub fn close(mut self, registry: &Registry) {
        // Closing the socket takes it out in any case.
        let _ = registry.deregister(&mut self.socket);
    }
}

/// Asks for the kernel's time of receipt with every read. A system without them has none: the caller sees it by their absence.
pub(crate) fn ask_for_stamps(socket: &impl AsFd) {
    let _ = setsockopt(socket, sockopt::ReceiveTimestampns, &true);
}

/// Reads what is there: how many bytes, and when the kernel received the last of them, by `CLOCK_REALTIME`.
///
/// # Errors
/// As of `recvmsg`; it does not wait.
pub(crate) fn receive(socket: RawFd, buffer: &mut [u8]) -> io::Result<(usize, Option<u64>)> {
    let mut control = [0_u8; CONTROL];
    let mut pieces = [IoSliceMut::new(buffer)];
    let message = recvmsg::<()>(socket, &mut pieces, Some(&mut control), MsgFlags::MSG_DONTWAIT)?;
    let stamp = |message: ControlMessageOwned| match message {
        ControlMessageOwned::ScmTimestampns(time) => {
            let seconds = u64::try_from(time.tv_sec()).ok()?;
            Some(seconds * 1_000_000_000 + u64::try_from(time.tv_nsec()).ok()?)
        }
        _ => None,
    };
    let received = message.cmsgs().ok().and_then(|mut all| all.find_map(stamp));
    Ok((message.bytes, received))
}

/// `None` where the call would have to wait.
fn would_block<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Where the first event ends, with the line break of its chunk; all of the bytes where none does.
fn end_of_event(bytes: &[u8]) -> usize {
    let blank = memchr::memchr_iter(b'\n', bytes).find_map(|at| match &bytes[at + 1..] {
        [b'\n', ..] => Some(at + 2),
        [b'\r', b'\n', ..] => Some(at + 3),
        _ => None,
    });
    match blank {
        Some(end) if bytes[end..].starts_with(b"\r\n") => end + 2,
        Some(end) => end,
        None => bytes.len(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock;
    use crate::target::Target;
    use std::net::TcpListener;
    use std::time::Duration;

    #[test]
    fn a_piece_ends_with_its_event() {
        for (bytes, end) in [
            (&b"data: 1\n\ndata: 2\n\n"[..], 9),
            (b"d\r\n\r\nrest", 5),
            (b"9\r\ndata: 1\n\n\r\n9\r\ndata: 2\n\n\r\n", 14),
            (b"data: 1\n", 8),
            (b"", 0),
        ] {
            assert_eq!(end_of_event(bytes), end, "{}", bytes.escape_ascii());
        }
    }

    /// A connection to a listener of this test, connected, with the other end.
    fn pair() -> (Connection, std::net::TcpStream, mio::Poll) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let target = Target::new(&format!("http://{address}"), None).unwrap();
        let target = Endpoint::resolve(target).unwrap();
        let mut poll = mio::Poll::new().unwrap();
        let mut connection = Connection::open(&target, address, poll.registry(), Token(0)).unwrap();
        let (peer, _) = listener.accept().unwrap();
        peer.set_nodelay(true).unwrap();
        let mut events = mio::Events::with_capacity(8);
        while !connection.is_connected().unwrap() {
            poll.poll(&mut events, Some(Duration::from_millis(10))).unwrap();
        }
        (connection, peer, poll)
    }

    #[test]
    fn stamps_are_of_the_receipt_and_not_of_the_reading() {
        let (mut connection, mut peer, _poll) = pair();
        let mut real = clock::RealTime::default();
        let mut sent = Vec::new();
        for event in [&b"data: 1\n\n"[..], b"data: 22\n\n", b"data: 333\n\n"] {
            sent.push(clock::now());
            peer.write_all(event).unwrap();
            std::thread::sleep(Duration::from_millis(20));
        }
        let mut buffer = [0_u8; 4096];
        let (mut lengths, mut stamps) = (Vec::new(), Vec::new());
        let read_from = clock::now();
        for _ in &sent {
            let Piece::Bytes { len, received, .. } = connection.read(&mut buffer).unwrap() else {
                panic!("no piece")
            };
            lengths.push(len);
            stamps.push(real.moment(received.expect("a stamp of the kernel"), clock::now()).unwrap());
        }
        assert_eq!(lengths, [9, 10, 11], "a piece for each event");
        assert!(stamps.is_sorted() && stamps.iter().zip(&sent).all(|(stamp, sent)| stamp >= sent));
        assert!(stamps[2] < read_from, "the last one came 20 ms before it was read");
        assert_eq!(connection.read(&mut buffer).unwrap(), Piece::Nothing);
        assert!(connection.is_idle());
        drop(peer);
        while connection.read(&mut buffer).unwrap() == Piece::Nothing {}
        assert_eq!(connection.read(&mut buffer).unwrap(), Piece::Closed);
        assert!(!connection.is_idle());
    }

    #[test]
    fn a_request_is_sent_whole_in_any_number_of_writes() {
        let (mut connection, mut peer, mut poll) = pair();
        let request: Vec<u8> = (0..16_000_000_u32).map(|i| (i % 251) as u8).collect();
        connection.give(request.clone());
        assert!(!connection.send().unwrap(), "larger than the socket's buffer, and nobody reads yet");
        let reader = std::thread::spawn(move || {
            let mut all = vec![0; 16_000_000];
            peer.read_exact(&mut all).unwrap();
            all
        });
        let mut events = mio::Events::with_capacity(8);
        while !connection.send().unwrap() {
            poll.poll(&mut events, Some(Duration::from_millis(50))).unwrap();
        }
        assert!(reader.join().unwrap() == request);
    }

    #[test]
    fn a_refused_connection_is_an_error_of_its_kind() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        drop(listener);
        let target = Target::new(&format!("http://{address}"), None).unwrap();
        let target = Endpoint::resolve(target).unwrap();
        let mut poll = mio::Poll::new().unwrap();
        let mut events = mio::Events::with_capacity(8);
        let mut connection = Connection::open(&target, address, poll.registry(), Token(0)).unwrap();
        let error = loop {
            match connection.is_connected() {
                Ok(true) => panic!("nothing listens there"),
                Ok(false) => poll.poll(&mut events, Some(Duration::from_millis(10))).unwrap(),
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    }
}
