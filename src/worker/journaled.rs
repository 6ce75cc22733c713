//! Resuming: recorded responses first, then those of a worker, which are recorded in turn.
//!
//! Enters: a worker, and the entries of its journal. Leaves: responses. A plan depends on its seed and on the responses so far alone: to
//! resume it is to execute it again from the start.

use std::collections::VecDeque;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::job::{Job, RequestKind, Worker};
use super::journal::{FILE, Journal, JournalError, same};
use super::observer::Observer;
use super::spawn::WorkerError;
use hbmark_core::result::Environment;

/// A request and its response.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RecordedExchange<Q, R> {
    pub request: Q,
    pub response: R,
}

/// An entry of a job's journal.
pub type EntryOf<J> = RecordedExchange<<J as Job>::Request, <J as Job>::Response>;

/// Compares the machine of a journal with this one.
pub(crate) fn same_machine(folder: &Path, was: &Environment, is: &Environment) -> Result<(), JournalError> {
    was.difference(is).map_or(Ok(()), |(what, was, is)| same(folder, what, &was, &is))
}

/// A worker that replays a journal, and records what another worker responds after that.
pub struct JournaledWorker<J: Job> {
    worker: Box<dyn Worker<J>>,
    journal: Journal,
    replay: VecDeque<EntryOf<J>>,
    resumed: bool,
}

impl<J: Job> std::fmt::Debug for JournaledWorker<J> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("JournaledWorker").field("journal", &self.journal).finish_non_exhaustive()
    }
}

impl<J: Job> JournaledWorker<J> {
    /// Records into a journal, after the entries that are there.
    pub fn new(worker: Box<dyn Worker<J>>, journal: Journal, entries: Vec<EntryOf<J>>) -> Self {
        let resumed = entries.iter().any(|entry| J::kind(&entry.request) == RequestKind::Measure);
        Self { worker, journal, replay: entries.into(), resumed }
    }

    /// Checks that this is the machine of the recorded responses.
    ///
    /// # Errors
    /// `JournalError::Mismatch`, with both; and when the machine cannot be identified.
    pub fn check_machine(&mut self, observer: &mut dyn Observer) -> Result<(), J::Error> {
        let Some(was) = self.replay.iter().find_map(|entry| J::environment(&entry.response)) else {
            return Ok(());
        };
        let response = self.worker.execute(&J::IDENTIFY, observer)?;
        if let Some(reason) = J::failure(&response) {
            return Err(WorkerError::Refused { reason }.into());
        }
        J::environment(&response).map_or(Ok(()), |is| Ok(same_machine(self.journal.folder(), was, is)?))
    }

    /// The next recorded response, checked.
    fn replay(&mut self, request: &J::Request) -> Result<Option<J::Response>, JournalError> {
        let Some(entry) = self.replay.pop_front() else { return Ok(None) };
        let path = || self.journal.folder().join(FILE);
        if entry.request != *request {
            let (was, is) = (J::identity(&entry.request), J::identity(request));
            return Err(JournalError::PlanMismatch { path: path(), was, is });
        }
        J::validate(request, &entry.response)
            .map_err(|source| JournalError::ImpossibleValue { path: path(), source: Box::new(source) })?;
        self.worker.restore(request, &entry.response);
        Ok(Some(entry.response))
    }

    /// The journal, when the plan is done.
    pub fn into_journal(self) -> Journal {
        self.journal
    }
}

impl<J: Job> Worker<J> for JournaledWorker<J> {
    fn execute(
        &mut self,
        request: &J::Request,
        observer: &mut dyn Observer,
    ) -> Result<J::Response, J::Error> {
        let kind = J::kind(request);
        if !kind.is_recorded() {
            if self.replay.is_empty() {
                return self.worker.execute(request, observer);
            }
            self.worker.restore(request, &J::DONE);
            return Ok(J::DONE);
        }
        if let Some(response) = self.replay(request)? {
            return Ok(response);
        }
        let response = self.worker.execute(request, observer)?;
        if J::is_recorded(&response) {
            let entry = RecordedExchange { request, response: &response };
            self.journal.write(&entry, kind == RequestKind::Measure)?;
        }
        Ok(response)
    }

    fn restore(&mut self, request: &J::Request, response: &J::Response) {
        self.worker.restore(request, response);
    }

    fn can_restart(&self) -> bool {
        self.worker.can_restart()
    }

    fn reopened_after(&self) -> Option<&'static str> {
        if self.resumed { Some("the first start") } else { self.worker.reopened_after() }
    }
}
