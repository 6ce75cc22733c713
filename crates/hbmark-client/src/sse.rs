//! Server-sent events out of bytes that arrive in any pieces.
//!
//! Enters: the body of an answer, as it is read. Leaves: the name and the data of each event, the same ones however the bytes were cut.
//! What the data means is left to [`crate::event`], and what time it is to whoever read the bytes.
//!
//! An event that lies whole in the bytes given is passed on where it lies. Only what is cut is copied, into buffers that are kept: nothing
//! is allocated per event, and each byte is searched once and copied twice at most.

use hbmark_core::result::serving::Failure;
use memchr::{memchr, memchr2};

/// Bytes of a line, or of an event, above which an answer is refused.
pub const EVENT_LIMIT: usize = 4 << 20;
/// Bytes of a buffer that are kept for the next answer.
const KEPT: usize = 16 << 10;
const BYTE_ORDER_MARK: &[u8] = b"\xEF\xBB\xBF";

/// One event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event<'a> {
    /// Of its `event:` line; mostly empty.
    pub name: &'a [u8],
    /// Its `data:` lines, joined by LF.
    pub data: &'a [u8],
}

/// The parser of one answer.
#[derive(Debug)]
pub struct Events {
    limit: usize,
    /// The beginning of a line whose end has not arrived.
    line: Vec<u8>,
    /// Data lines of the present event that came with earlier bytes, or that are several.
    data: Vec<u8>,
    /// Whether there is a data line in `data`, if only an empty one.
    has_data: bool,
    name: Vec<u8>,
    /// The last byte was a CR that ended a line: an LF right after it belongs to it.
    after_cr: bool,
    /// No line has been read yet: the first one may begin with a byte order mark.
    at_start: bool,
}

impl Default for Events {
    fn default() -> Self {
        Self::new(EVENT_LIMIT)
    }
}

impl Events {
    /// A parser that refuses lines and events of more than `limit` bytes.
    pub fn new(limit: usize) -> Self {
        Self {
            limit,
            line: Vec::new(),
            data: Vec::new(),
            has_data: false,
            name: Vec::new(),
            after_cr: false,
            at_start: true,
        }
    }

    /// Forgets the answer, for the next one. The buffers are kept, unless one huge event made them large.
    pub fn reset(&mut self) {
        for buffer in [&mut self.line, &mut self.data, &mut self.name] {
            buffer.clear();
            buffer.shrink_to(KEPT);
        }
        (self.has_data, self.after_cr, self.at_start) = (false, false, true);
    }

    /// Reads the next bytes of the answer and calls `on_event` for every event that they complete. Where it fails, the bytes after that
    /// event are dropped: the answer is over for the caller.
    ///
    /// # Errors
    /// [`Failure::TooLarge`] for a line or an event above the limit, and what `on_event` says. The events before it have been passed on.
    pub fn feed(
        &mut self,
        mut bytes: &[u8],
        mut on_event: impl FnMut(Event<'_>) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        if self.after_cr && !bytes.is_empty() {
            self.after_cr = false;
            bytes = bytes.strip_prefix(b"\n").unwrap_or(bytes);
        }
        // The only data line so far of the present event, where it lies in these bytes.
        let mut whole: Option<&[u8]> = None;
        while let Some(end) = memchr2(b'\n', b'\r', bytes) {
            let line = &bytes[..end];
            let is_cr = bytes[end] == b'\r';
            bytes = &bytes[end + 1..];
            if is_cr {
                self.after_cr = bytes.is_empty();
                bytes = bytes.strip_prefix(b"\n").unwrap_or(bytes);
            }
            let is_blank = if self.line.is_empty() {
                self.read_line(line, &mut whole)?
            } else {
                self.carry(line)?;
                let line = std::mem::take(&mut self.line);
                let read = self.read_cut_line(&line, &mut whole);
                self.line = line;
                self.line.clear();
                read?
            };
            if is_blank {
                self.dispatch(whole.take(), &mut on_event)?;
            }
        }
        if let Some(value) = whole {
            self.add_data(value)?;
        }
        self.carry(bytes)
    }

    /// The answer is over: passes on an event whose last line, or whose blank line, did not come. Whether it is whole is for its reader.
    ///
    /// # Errors
    /// As [`Self::feed`].
    pub fn finish(
        &mut self,
        mut on_event: impl FnMut(Event<'_>) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let line = std::mem::take(&mut self.line);
        if !line.is_empty() {
            self.read_cut_line(&line, &mut None)?;
        }
        self.dispatch(None, &mut on_event)
    }

    /// Keeps the beginning of a line.
    fn carry(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.check(self.line.len() + bytes.len())?;
        self.line.extend_from_slice(bytes);
        Ok(())
    }

    fn check(&self, bytes: usize) -> Result<(), Failure> {
        if bytes > self.limit { Err(Failure::TooLarge) } else { Ok(()) }
    }

    /// Reads a line that does not outlive this call.
    fn read_cut_line(&mut self, line: &[u8], whole: &mut Option<&[u8]>) -> Result<bool, Failure> {
        let mut value = None;
        if let Some(before) = whole.take() {
            self.add_data(before)?;
        }
        let is_blank = self.read_line(line, &mut value)?;
        if let Some(value) = value {
            self.add_data(value)?;
        }
        Ok(is_blank)
    }

    /// Reads one line without its end; true if it is blank. The first data line of an event goes to `whole`.
    fn read_line<'b>(&mut self, line: &'b [u8], whole: &mut Option<&'b [u8]>) -> Result<bool, Failure> {
        self.check(line.len())?;
        let mut line = line;
        if self.at_start {
            self.at_start = false;
            line = line.strip_prefix(BYTE_ORDER_MARK).unwrap_or(line);
        }
        if line.is_empty() {
            return Ok(true);
        }
        let (field, value) = match line.strip_prefix(b"data:") {
            Some(value) => (&b"data"[..], value),
            None => match memchr(b':', line) {
                // A line that begins with a colon is a comment: its field has no name.
                Some(colon) => (&line[..colon], &line[colon + 1..]),
                None => (line, &[][..]),
            },
        };
        let value = value.strip_prefix(b" ").unwrap_or(value);
        match field {
            b"data" => self.add_line(value, whole)?,
            b"event" => {
                self.name.clear();
                self.name.extend_from_slice(value);
            }
            // No field of the standard: older llama.cpp servers send their errors so.
            b"error" => {
                self.name.clear();
                self.name.extend_from_slice(b"error");
                self.add_line(value, whole)?;
            }
            _ => {}
        }
        Ok(false)
    }

    fn add_line<'b>(&mut self, value: &'b [u8], whole: &mut Option<&'b [u8]>) -> Result<(), Failure> {
        if let Some(before) = whole.take() {
            self.add_data(before)?;
        }
        if self.has_data {
            return self.add_data(value);
        }
        *whole = Some(value);
        Ok(())
    }

    fn add_data(&mut self, value: &[u8]) -> Result<(), Failure> {
        self.check(self.data.len() + usize::from(self.has_data) + value.len())?;
        if self.has_data {
            self.data.push(b'\n');
        }
        self.data.extend_from_slice(value);
        self.has_data = true;
        Ok(())
    }

    /// A blank line ends the event; one without data is none.
    fn dispatch(
        &mut self,
        whole: Option<&[u8]>,
        on_event: &mut impl FnMut(Event<'_>) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let data = whole.or_else(|| self.has_data.then_some(self.data.as_slice()));
        let read = data.map_or(Ok(()), |data| on_event(Event { name: &self.name, data }));
        self.data.clear();
        self.name.clear();
        self.has_data = false;
        read
    }
}

#[cfg(test)]
mod tests;
