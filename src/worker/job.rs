//! A kind of work that is done request by request, in this process or in a worker.
//!
//! Enters: a [`Job`], which says what its requests mean, and a [`Handler`], which executes them. Leaves: a [`Worker`] of them. The other
//! workers are [`Supervisor`](super::supervisor::Supervisor), which executes requests in a child process, and
//! [`JournaledWorker`](super::journaled::JournaledWorker), which replays recorded responses first:
//!
//! ```text
//! plan → JournaledWorker → Supervisor → pipes → child process → InProcess → Handler → sessions, probes
//!                        └────────────── `--no-isolation` ────┘
//! ```
//!
//! A child process does nothing between two requests, so that what the plan does meanwhile never runs beside timed steps.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::fault_injection::SessionWrapper;
use super::journal::JournalError;
use super::observer::Observer;
use super::signals::Interrupts;
use super::spawn::WorkerError;
use hbmark_core::result::{Cause, Environment, ReportError};

/// What a request is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestKind {
    /// Names the machine.
    Identify,
    /// Probes, loads or checks.
    Prepare,
    /// Measures what the plan asks for: worth resuming from.
    Measure,
    /// Frees memory.
    Free,
}

impl RequestKind {
    /// Whether the response holds something that a later process cannot know without executing the request.
    pub fn is_recorded(self) -> bool {
        matches!(self, Self::Prepare | Self::Measure)
    }
}

/// What a request left open in its worker.
#[derive(Debug, Clone, PartialEq)]
pub enum StateChange<Q> {
    /// Something that another worker must open again with `reopen` before it can go on.
    Opened {
        key: usize,
        reopen: Q,
    },
    Closed {
        key: usize,
    },
}

/// One kind of work: its requests and responses.
pub trait Job: Sized + 'static {
    /// What a child process is started with.
    type Config: Clone + Serialize + DeserializeOwned;
    type Request: Clone + std::fmt::Debug + PartialEq + Serialize + DeserializeOwned;
    type Response: Clone + std::fmt::Debug + Serialize + DeserializeOwned + Send + 'static;
    type Error: std::error::Error + From<WorkerError> + From<JournalError>;

    /// The argument of a child process.
    const KIND: &'static str;
    /// A step may take so many times its prediction before its worker is killed.
    const STEP_TIMEOUT_FACTOR: f64;
    /// Asks which machine this is.
    const IDENTIFY: Self::Request;
    /// The response to a request that frees memory.
    const DONE: Self::Response;

    fn kind(request: &Self::Request) -> RequestKind;
    /// The request as part of a sentence: "measuring decode/stock/f32/b1/c8".
    fn description(request: &Self::Request) -> String;
    /// The request with all that distinguishes it from others.
    fn identity(request: &Self::Request) -> String {
        Self::description(request)
    }
    fn state_change(request: &Self::Request, response: &Self::Response)
    -> Option<StateChange<Self::Request>>;

    /// The worker was lost: while it executed the request, or before it could.
    fn lost(reason: Cause, executing: bool) -> Self::Response;
    /// The request cannot be executed by any worker.
    fn refused(reason: String) -> Self::Response;
    /// Why there is no result, for responses that have none.
    fn failure(response: &Self::Response) -> Option<String>;
    /// Whether the response goes into the journal.
    fn is_recorded(response: &Self::Response) -> bool;
    /// Whether the device can no longer be trusted, although there is a response.
    fn is_sticky(response: &Self::Response) -> bool;
    /// The machine, in responses that name it.
    fn environment(response: &Self::Response) -> Option<&Environment>;
    /// Holds a response from a journal to what later arithmetic takes for granted: hashes are not a signature.
    fn validate(_request: &Self::Request, _response: &Self::Response) -> Result<(), ReportError> {
        Ok(())
    }

    /// Adds a warning, where a response has room for one.
    fn warn(response: &mut Self::Response, warning: String);
    /// Where a planted fault strikes before the request is executed: `begin`, `load`.
    fn fault_places(request: &Self::Request) -> &'static [&'static str];
    /// Where a planted fault strikes in the steps of the request.
    fn fault_site(request: &Self::Request) -> String;
}

/// Executes requests.
pub trait Worker<J: Job> {
    /// Executes a request; `observer` receives its progress.
    ///
    /// # Errors
    /// When nothing more can be executed: a signal came, no worker can be started, or the journal cannot be written.
    fn execute(&mut self, request: &J::Request, observer: &mut dyn Observer)
    -> Result<J::Response, J::Error>;

    /// Takes note of a request that an earlier process executed: what it opened is opened again when it is needed.
    fn restore(&mut self, request: &J::Request, response: &J::Response);

    /// Whether a loss or a fault leaves a fresh worker for the next request.
    fn can_restart(&self) -> bool {
        false
    }

    /// Why something was opened more than once for the same plan, if it was.
    fn reopened_after(&self) -> Option<&'static str> {
        None
    }
}

/// What is open, in the order in which it was opened.
#[derive(Debug, Clone)]
pub struct OpenRequests<J: Job>(Vec<(usize, J::Request)>);

impl<J: Job> Default for OpenRequests<J> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<J: Job> OpenRequests<J> {
    /// Takes note of what a request opened or closed.
    pub fn note(&mut self, request: &J::Request, response: &J::Response) {
        match J::state_change(request, response) {
            Some(StateChange::Opened { key, reopen }) => {
                self.0.retain(|(known, _)| *known != key);
                self.0.push((key, reopen));
            }
            Some(StateChange::Closed { key }) => self.0.retain(|(known, _)| *known != key),
            None => {}
        }
    }

    /// Requests that open what `held` lacks.
    pub fn missing(&self, held: &Self) -> Vec<J::Request> {
        let lacks = |key: &usize| held.0.iter().all(|(known, _)| known != key);
        self.0.iter().filter(|(key, _)| lacks(key)).map(|(_, reopen)| reopen.clone()).collect()
    }
}

/// Executes the requests of a job on the device itself.
pub trait Handler {
    type Job: Job;

    /// Executes a request.
    fn handle(
        &mut self,
        request: &<Self::Job as Job>::Request,
        observer: &mut dyn Observer,
    ) -> Result<<Self::Job as Job>::Response, <Self::Job as Job>::Error>;

    /// Wraps every session that is opened from now on.
    fn wrap_sessions(&mut self, wrap: SessionWrapper);
}

/// Executes requests in this process.
#[derive(Debug)]
pub struct InProcess<H: Handler> {
    pub(super) handler: H,
    open: OpenRequests<H::Job>,
    held: OpenRequests<H::Job>,
    interrupts: Interrupts,
}

impl<H: Handler> InProcess<H> {
    pub fn new(handler: H) -> Self {
        Self::interruptible(handler, Interrupts::default())
    }

    /// Ends between two requests after a signal.
    pub fn interruptible(handler: H, interrupts: Interrupts) -> Self {
        Self { handler, open: OpenRequests::default(), held: OpenRequests::default(), interrupts }
    }
}

impl<H: Handler> Worker<H::Job> for InProcess<H> {
    fn execute(
        &mut self,
        request: &<H::Job as Job>::Request,
        observer: &mut dyn Observer,
    ) -> Result<<H::Job as Job>::Response, <H::Job as Job>::Error> {
        if let Some(signal) = self.interrupts.signal() {
            return Err(WorkerError::Interrupted { signal, executing: false }.into());
        }
        // What an earlier process had open.
        if H::Job::kind(request).is_recorded() {
            for reopen in self.open.missing(&self.held) {
                let response = self.handler.handle(&reopen, observer)?;
                self.held.note(&reopen, &response);
            }
        }
        let response = self.handler.handle(request, observer)?;
        self.restore(request, &response);
        self.held.note(request, &response);
        Ok(response)
    }

    fn restore(&mut self, request: &<H::Job as Job>::Request, response: &<H::Job as Job>::Response) {
        self.open.note(request, response);
    }
}
