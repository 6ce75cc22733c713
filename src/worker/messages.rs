//! What goes over the pipes between a supervisor and its worker.
//!
//! Enters: typed messages. Leaves: lines of JSON, one a message, of bounded length. Both ends are the same program; the first
//! message of each says which, so that a program that was rebuilt meanwhile is detected.

use std::io::{BufRead, Read, Write};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use hbmark_core::input;
use hbmark_core::result::Cause;

/// Raised when a message changes its meaning.
pub const VERSION: u32 = 5;

/// A longer line is not a message of ours: the blocks of one visit, or one point of a serving result, are a few megabytes at the most.
const MAX_LINE: u64 = 256 << 20;

/// From the supervisor to the worker: the configuration of the job, and requests.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SupervisorMessage<C, Q> {
    /// The first message. `parent` is the process that must be alive, `workers` how many there were before.
    Hello {
        program: Program,
        parent: u32,
        workers: usize,
        config: Box<C>,
    },
    Request(Q),
}

/// From the worker to the supervisor: progress, and responses.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkerMessage<R> {
    Hello {
        program: Program,
    },
    Stage {
        what: String,
    },
    Loaded {
        done: u64,
        total: u64,
    },
    Progress {
        done: usize,
        total: usize,
        message: String,
    },
    /// A block was rejected.
    Rejected {
        cause: Cause,
    },
    /// The next message is predicted within so many seconds, where that can be predicted.
    Busy {
        seconds: Option<f64>,
    },
    Response(Box<R>),
}

/// Which program sends a message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Program {
    wire: u32,
    version: String,
    revision: Option<String>,
}

impl Program {
    /// This one.
    pub fn this() -> Self {
        let build = crate::machine::environment::this_binary();
        Self { wire: VERSION, version: build.version, revision: build.git_revision }
    }
}

impl std::fmt::Display for Program {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let revision = self.revision.as_deref().unwrap_or("unknown revision");
        write!(f, "hbmark {} ({revision}, messages {})", self.version, self.wire)
    }
}

/// Writes a message and flushes it.
pub fn write(out: &mut impl Write, message: &impl Serialize) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    out.write_all(&line)?;
    out.flush()
}

/// Reads a message; `None` at the end of the pipe.
pub fn read<T: DeserializeOwned>(input: &mut impl BufRead) -> std::io::Result<Option<T>> {
    let mut line = Vec::new();
    input.by_ref().take(MAX_LINE).read_until(b'\n', &mut line)?;
    match line.last() {
        None => Ok(None),
        // By the reader of the journal, which holds the same types: what reads them is compiled once.
        Some(b'\n') => {
            let text = std::str::from_utf8(&line).map_err(std::io::Error::other)?;
            Ok(Some(input::json::from_str(text, usize::MAX)?))
        }
        Some(_) => Err(std::io::Error::new(std::io::ErrorKind::UnexpectedEof, "the message has no end")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type WorkerMessage = super::WorkerMessage<String>;

    #[test]
    fn a_message_arrives_as_it_was_sent_and_half_a_message_does_not() {
        let word = WorkerMessage::Response(Box::new("a \n line break".into()));
        let mut pipe = Vec::new();
        write(&mut pipe, &word).unwrap();
        write(&mut pipe, &WorkerMessage::Busy { seconds: Some(0.1 + 0.2) }).unwrap();
        let mut input = &pipe[..];
        assert_eq!(read::<WorkerMessage>(&mut input).unwrap(), Some(word));
        assert_eq!(
            read::<WorkerMessage>(&mut input).unwrap(),
            Some(WorkerMessage::Busy { seconds: Some(0.1 + 0.2) })
        );
        assert_eq!(read::<WorkerMessage>(&mut input).unwrap(), None);
        let mut half = &pipe[..pipe.len() - 1];
        read::<WorkerMessage>(&mut half).unwrap();
        assert!(read::<WorkerMessage>(&mut half).is_err());
    }
}
