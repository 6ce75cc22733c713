//! An HTTP/1.1 response out of bytes that arrive in any pieces.
//!
//! Enters: the bytes of a connection, in order. Leaves: the head, and the pieces of the body as slices of what came in; nothing of the body is
//! copied or kept. Interim responses (1xx) are skipped. What is not HTTP, or beyond a limit, is a [`Failure`].

use hbmark_core::result::serving::Failure;

/// Largest head of a response, interim ones included.
const MAX_HEAD: usize = 64 << 10;
const MAX_HEADERS: usize = 128;
/// Largest line of a chunk's size with its extensions, and all trailers together.
const MAX_CHUNK_LINE: usize = 4 << 10;
const MAX_TRAILERS: usize = 16 << 10;

/// What a client must know of a head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Head {
    pub status: u16,
    pub is_event_stream: bool,
    pub compressed: bool,
    pub keep_alive: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum State {
    #[default]
    Head,
    /// Bytes of the body that are to come.
    Length(u64),
    UntilClose,
    ChunkSize {
        size: u64,
        digits: u8,
        line: usize,
    },
    /// Behind the digits of a size, until the line ends.
    ChunkExtension {
        size: u64,
        line: usize,
    },
    ChunkData(u64),
    /// The line break behind the data of a chunk.
    ChunkEnd,
    /// Bytes of trailers so far, and of the line.
    Trailers {
        total: usize,
        line: usize,
    },
    Done,
}

/// Reads one response after another.
#[derive(Debug, Default)]
pub struct Response {
    state: State,
    /// A head that came in pieces.
    buffer: Vec<u8>,
    head: Option<Head>,
}

impl Response {
    /// Ready for the next response; keeps its memory.
    pub fn reset(&mut self) {
        self.state = State::Head;
        self.buffer.clear();
        self.head = None;
    }

    pub fn head(&self) -> Option<&Head> {
        self.head.as_ref()
    }

    /// The response is whole.
    pub fn is_done(&self) -> bool {
        self.state == State::Done
    }

    /// Nothing of a response has come.
    pub fn is_untouched(&self) -> bool {
        self.state == State::Head && self.buffer.is_empty()
    }

    /// Takes what came, up to the next piece of the body: the bytes it took, and that piece. Call again with the rest until all is taken;
    /// bytes behind the end of the response are not taken.
    ///
    /// # Errors
    /// When the bytes are not a response.
    pub fn take<'a>(&mut self, mut bytes: &'a [u8]) -> Result<(usize, &'a [u8]), Failure> {
        let all = bytes.len();
        let step = |bytes: &mut &'a [u8], count: usize| {
            let (taken, rest) = bytes.split_at(count);
            *bytes = rest;
            taken
        };
        while !bytes.is_empty() {
            match self.state {
                State::Done => break,
                State::Head => {
                    let count = self.take_head(bytes)?;
                    step(&mut bytes, count);
                }
                State::Length(left) | State::ChunkData(left) => {
                    let count = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len());
                    let piece = step(&mut bytes, count);
                    let left = left - count as u64;
                    self.state = match (self.state, left) {
                        (State::Length(_), 0) => State::Done,
                        (State::Length(_), _) => State::Length(left),
                        (_, 0) => State::ChunkEnd,
                        _ => State::ChunkData(left),
                    };
                    return Ok((all - bytes.len(), piece));
                }
                State::UntilClose => return Ok((all, bytes)),
                framing => {
                    self.state = next(framing, bytes[0])?;
                    step(&mut bytes, 1);
                }
            }
        }
        Ok((all - bytes.len(), &[]))
    }

    /// The connection was closed.
    ///
    /// # Errors
    /// When the response is not whole.
    pub fn closed(&mut self) -> Result<(), Failure> {
        match self.state {
            State::Done => Ok(()),
            State::UntilClose => {
                self.state = State::Done;
                Ok(())
            }
            _ => Err(Failure::ClosedEarly),
        }
    }

    fn take_head(&mut self, bytes: &[u8]) -> Result<usize, Failure> {
        let before = self.buffer.len();
        // The blank line may have begun in an earlier piece.
        let room = (MAX_HEAD + 1 - before).min(bytes.len());
        self.buffer.extend_from_slice(&bytes[..room]);
        let from = before.saturating_sub(3);
        let Some(end) = end_of_head(&self.buffer[from..]).map(|end| from + end) else {
            return if self.buffer.len() > MAX_HEAD { Err(Failure::TooLarge) } else { Ok(room) };
        };
        let (head, framing) = parse(&self.buffer[..end])?;
        self.buffer.clear();
        if !(100..200).contains(&head.status) {
            self.head = Some(head);
            self.state = framing;
        }
        Ok(end - before)
    }
}

/// Where a head ends: behind its blank line.
fn end_of_head(bytes: &[u8]) -> Option<usize> {
    memchr::memchr_iter(b'\n', bytes).find_map(|at| match &bytes[at + 1..] {
        [b'\n', ..] => Some(at + 2),
        [b'\r', b'\n', ..] => Some(at + 3),
        _ => None,
    })
}

fn parse(bytes: &[u8]) -> Result<(Head, State), Failure> {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut response = httparse::Response::new(&mut headers);
    let parsed = response.parse(bytes).map_err(|error| match error {
        httparse::Error::TooManyHeaders => Failure::TooLarge,
        _ => Failure::MalformedHttp,
    })?;
    let (true, Some(status), Some(minor)) = (parsed.is_complete(), response.code, response.version) else {
        return Err(Failure::MalformedHttp);
    };
    let mut head = Head { status, keep_alive: minor >= 1, ..Head::default() };
    let (mut length, mut chunked) = (None, false);
    for header in response.headers.iter() {
        let value = header.value.trim_ascii();
        let is = |name: &str| header.name.eq_ignore_ascii_case(name);
        if is("content-type") {
            head.is_event_stream = is_event_stream(value);
        } else if is("content-encoding") {
            head.compressed |= !value.eq_ignore_ascii_case(b"identity");
        } else if is("connection") {
            head.keep_alive &= !contains_token(value, b"close");
            head.keep_alive |= minor == 0 && contains_token(value, b"keep-alive");
        } else if is("transfer-encoding") {
            chunked = contains_token(value, b"chunked");
            head.compressed |= contains_token(value, b"gzip") || contains_token(value, b"deflate");
        } else if is("content-length") {
            // A plus sign, which a number may have elsewhere, is none of a length.
            let digits = std::str::from_utf8(value).ok().filter(|_| value.iter().all(u8::is_ascii_digit));
            let value: u64 = digits.and_then(|text| text.parse().ok()).ok_or(Failure::MalformedHttp)?;
            // Two lengths are how responses are smuggled.
            if length.replace(value).is_some_and(|other| other != value) {
                return Err(Failure::MalformedHttp);
            }
        }
    }
    let framing = match (status, chunked, length) {
        (204 | 304, ..) | (_, false, Some(0)) => State::Done,
        (_, true, _) => State::ChunkSize { size: 0, digits: 0, line: 0 },
        (_, false, Some(length)) => State::Length(length),
        (_, false, None) => {
            head.keep_alive = false;
            State::UntilClose
        }
    };
    Ok((head, framing))
}

fn is_event_stream(value: &[u8]) -> bool {
    let kind = value.split(|byte| *byte == b';').next().unwrap_or(value);
    kind.trim_ascii().eq_ignore_ascii_case(b"text/event-stream")
}

fn contains_token(value: &[u8], token: &[u8]) -> bool {
    value.split(|byte| *byte == b',').any(|part| part.trim_ascii().eq_ignore_ascii_case(token))
}

/// The state behind a byte of a chunked body's framing.
fn next(state: State, byte: u8) -> Result<State, Failure> {
    let bad = Err(Failure::MalformedHttp);
    let ended =
        |size: u64| if size == 0 { State::Trailers { total: 0, line: 0 } } else { State::ChunkData(size) };
    Ok(match (state, byte) {
        (State::ChunkSize { digits: 0, .. }, b'\r' | b'\n' | b';' | b' ' | b'\t') => return bad,
        (State::ChunkSize { size, .. } | State::ChunkExtension { size, .. }, b'\n') => ended(size),
        (State::ChunkSize { size, line, .. }, b'\r' | b';' | b' ' | b'\t') => {
            State::ChunkExtension { size, line: line + 1 }
        }
        (State::ChunkSize { size, digits, line }, _) => {
            let digit = char::from(byte).to_digit(16).ok_or(Failure::MalformedHttp)?;
            // 2^56 bytes are beyond any body; more digits would overflow.
            if digits >= 14 {
                return bad;
            }
            State::ChunkSize { size: size << 4 | u64::from(digit), digits: digits + 1, line: line + 1 }
        }
        (State::ChunkExtension { line, .. }, _) if line >= MAX_CHUNK_LINE => return bad,
        (State::ChunkExtension { size, line }, _) => State::ChunkExtension { size, line: line + 1 },
        (State::ChunkEnd, b'\r') => State::ChunkEnd,
        (State::ChunkEnd, b'\n') => State::ChunkSize { size: 0, digits: 0, line: 0 },
        (State::Trailers { line: 0, .. }, b'\n') => State::Done,
        (State::Trailers { total, .. }, b'\n') | (State::Trailers { total, line: 0 }, b'\r') => {
            State::Trailers { total: total + 1, line: 0 }
        }
        (State::Trailers { total, .. }, _) if total >= MAX_TRAILERS => return bad,
        (State::Trailers { total, line }, _) => State::Trailers { total: total + 1, line: line + 1 },
        _ => return bad,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Feeds pieces; the body, and how much of the last piece was left over.
    fn read(pieces: &[&[u8]]) -> Result<(Response, Vec<u8>, usize), Failure> {
        let (mut response, mut body, mut left) = (Response::default(), Vec::new(), 0);
        for piece in pieces {
            let mut rest = *piece;
            while !rest.is_empty() && !response.is_done() {
                let (taken, part) = response.take(rest)?;
                body.extend_from_slice(part);
                rest = &rest[taken..];
            }
            left = rest.len();
        }
        Ok((response, body, left))
    }

    const CHUNKED: &[u8] =
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n\
        Transfer-Encoding: chunked\r\n\r\n5;x=y\r\nhello\r\n7\r\n, world\r\n0\r\nTrailer: 1\r\n\r\nNEXT";

    #[test]
    fn a_chunked_body_is_whole_however_it_is_cut() {
        for at in 0..CHUNKED.len() {
            let (response, body, left) = read(&[&CHUNKED[..at], &CHUNKED[at..]]).unwrap();
            assert_eq!(body, b"hello, world", "cut at {at}");
            assert!(response.is_done() && left <= 4 && (at > CHUNKED.len() - 4 || left == 4));
            let head = response.head().unwrap();
            assert_eq!((head.status, head.is_event_stream, head.keep_alive), (200, true, true));
        }
        let bytes: Vec<&[u8]> = CHUNKED.chunks(1).collect();
        assert_eq!(read(&bytes).unwrap().1, b"hello, world");
    }

    #[test]
    fn lengths_and_closes_end_a_body() {
        let (response, body, left) =
            read(&[b"HTTP/1.1 429 Too Many\r\nContent-Length: 3\r\n\r\nabcd"]).unwrap();
        assert_eq!((body.as_slice(), left, response.is_done()), (b"abc".as_slice(), 1, true));
        assert_eq!(response.head().unwrap().status, 429);

        let (mut response, body, _) = read(&[b"HTTP/1.0 200 OK\r\n\r\nuntil the end"]).unwrap();
        assert!(!response.is_done() && !response.head().unwrap().keep_alive && body == b"until the end");
        assert_eq!(response.closed(), Ok(()));
        assert!(response.is_done());

        let (mut response, ..) = read(&[b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc"]).unwrap();
        assert_eq!(response.closed(), Err(Failure::ClosedEarly));
        assert_eq!(Response::default().closed(), Err(Failure::ClosedEarly));

        assert!(read(&[b"HTTP/1.1 204 No Content\r\n\r\n"]).unwrap().0.is_done());
    }

    #[test]
    fn a_connection_stays_or_closes_as_the_head_says() {
        let keeps = |head: &str| read(&[head.as_bytes()]).unwrap().0.head().unwrap().keep_alive;
        assert!(keeps("HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n"));
        assert!(!keeps("HTTP/1.1 200 OK\r\nContent-Length: 1\r\nConnection: Close\r\n\r\n"));
        assert!(!keeps("HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\n"));
        assert!(keeps("HTTP/1.0 200 OK\r\nContent-Length: 1\r\nConnection: keep-alive\r\n\r\n"));
        assert!(!keeps("HTTP/1.1 200 OK\r\n\r\n"), "only the close ends the body");
        assert!(
            read(&[b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 1\r\n\r\n"])
                .unwrap()
                .0
                .head()
                .unwrap()
                .compressed
        );
    }

    #[test]
    fn what_is_not_http_has_a_name() {
        let fails = |bytes: &[u8]| read(&[bytes]).err();
        assert_eq!(fails(b"SSH-2.0-OpenSSH\r\n\r\n"), Some(Failure::MalformedHttp));
        for length in ["-1", "+1", "1, 1", "", "1e1", "0x1", "18446744073709551616"] {
            let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n");
            assert_eq!(fails(head.as_bytes()), Some(Failure::MalformedHttp), "{length}");
        }
        assert_eq!(
            fails(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n"),
            Some(Failure::MalformedHttp)
        );
        let chunked = |rest: &str| {
            fails(format!("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{rest}").as_bytes())
        };
        assert_eq!(chunked("xyz\r\n"), Some(Failure::MalformedHttp));
        assert_eq!(chunked("\r\n"), Some(Failure::MalformedHttp));
        assert_eq!(chunked("fffffffffffffff\r\n"), Some(Failure::MalformedHttp));
        assert_eq!(chunked("2\r\nabc\r\n"), Some(Failure::MalformedHttp), "longer than it says");
        assert_eq!(chunked(&format!("1;{}", "x".repeat(5000))), Some(Failure::MalformedHttp));
        let endless = format!("HTTP/1.1 200 OK\r\n{}", "X: y\r\n".repeat(20_000));
        assert_eq!(fails(endless.as_bytes()), Some(Failure::TooLarge));
        let many = format!("HTTP/1.1 200 OK\r\n{}\r\n", "X: y\r\n".repeat(200));
        assert_eq!(fails(many.as_bytes()), Some(Failure::TooLarge));
    }

    proptest! {
        #[test]
        fn any_bytes_in_any_pieces_give_one_answer(bytes in proptest::collection::vec(any::<u8>(), 0..200), cut in 0_usize..200) {
            let mut all = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec();
            all.extend_from_slice(&bytes);
            let cut = cut.min(all.len());
            let whole = read(&[&all]).map(|(_, body, _)| body);
            let pieces = read(&[&all[..cut], &all[cut..]]).map(|(_, body, _)| body);
            prop_assert_eq!(whole, pieces);
        }
    }
}
