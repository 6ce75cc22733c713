//! Answers as data: a truthful stream, or a list of steps.
//!
//! Enters: nothing. Leaves: bytes and pauses for the server to follow.

use std::sync::Arc;
use std::time::Duration;

use super::http::reply;
use super::stream::Stream;

/// What is sent in answer to a request.
#[derive(Debug, Clone)]
pub enum Answer {
    /// Tokens on time.
    Stream(Stream),
    /// These steps, whatever was asked for.
    Steps(Arc<[Step]>),
    /// The first request gets the first, and so on; the last is for all that follow.
    InTurn(Vec<Answer>),
}

impl Default for Answer {
    fn default() -> Self {
        Self::Stream(Stream::default())
    }
}

/// After its last step a connection waits for the next request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// One write, as far as the client's window lets it be one.
    Send(Vec<u8>),
    /// The same, and its moment is logged, as an event of no tokens.
    Event(Vec<u8>),
    /// A write for every so many bytes, each some time after the one before.
    Pieces {
        bytes: Vec<u8>,
        size: usize,
        pause: Duration,
    },
    /// A write of this again and again, until the client goes.
    Repeat(Vec<u8>),
    Wait(Duration),
    /// Nothing more, and the connection stays.
    Silence,
    /// FIN.
    Close,
    /// RST.
    Reset,
}

impl Answer {
    /// A status, with header lines and a body.
    pub fn status(status: u16, content_type: &str, fields: &str, body: &str) -> Self {
        Self::Steps([Step::Send(reply(status, content_type, fields, body))].into())
    }
    /// What this is for one request; `served` requests had this answer before.
    pub(super) fn pick(&self, served: usize) -> Picked {
        match self {
            Self::Stream(stream) => Picked::Stream(*stream),
            Self::Steps(steps) => Picked::Steps(Arc::clone(steps)),
            Self::InTurn(answers) => match answers.get(served.min(answers.len().saturating_sub(1))) {
                Some(answer) => answer.pick(served),
                None => Picked::Steps(Arc::from([Step::Silence])),
            },
        }
    }
}

/// What an [`Answer`] is for one request.
#[derive(Debug)]
pub(super) enum Picked {
    Stream(Stream),
    Steps(Arc<[Step]>),
}
