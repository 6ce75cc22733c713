//! A run that goes on where another ended.
//!
//! Enters: a rig, and what its journal holds. Leaves: answers, out of the journal for as long as it lasts. A run draws up its schedule
//! from the seed and from the answers so far alone: to go on, it is run again from the start.

use std::collections::VecDeque;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::run::config::RunConfig;
use crate::run::device_worker::{DeviceRequest, DeviceResponse, DeviceWorker};
use crate::run::{Observer, RunError};
use crate::worker::journal::{Journal, JournalError, JournaledPlan, same};
use hbmark_core::result::Environment;
use hbmark_core::result::limits::check_blocks;

/// What a run is to do.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunPlan {
    pub config: RunConfig,
    /// Of the model's dimensions and tensors.
    pub model_hash: String,
    /// The cells of the plan, in order.
    pub cells: Vec<String>,
}

impl JournaledPlan for RunPlan {
    const SUBCOMMAND: &'static str = "run";
}

/// An order that measured something, and its answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RecordedExchange {
    pub request: DeviceRequest,
    pub response: DeviceResponse,
}

/// Holds the machine of a journal against this one.
///
/// # Errors
/// [`JournalError::Mismatch`], with both.
pub(super) fn same_machine(folder: &Path, was: &Environment, is: &Environment) -> Result<(), JournalError> {
    was.difference(is).map_or(Ok(()), |(what, was, is)| same(folder, what, &was, &is))
}

/// A rig that answers out of a journal for as long as it lasts, and writes down what another one answers after that.
#[derive(Debug)]
pub struct JournaledWorker<R> {
    worker: R,
    journal: Journal,
    replay: VecDeque<RecordedExchange>,
}

impl<R: DeviceWorker> JournaledWorker<R> {
    /// A rig whose answers are written into a journal, after those that are there.
    pub fn new(worker: R, journal: Journal, steps: Vec<RecordedExchange>) -> Self {
        Self { worker, journal, replay: steps.into() }
    }

    /// Asks whether this is the machine of the answers that are there.
    ///
    /// # Errors
    /// [`JournalError::Mismatch`], with both; and when the machine cannot be looked at.
    pub fn check_machine(&mut self, observer: &mut dyn Observer) -> Result<(), RunError> {
        let begun = self.replay.iter().find_map(|step| match &step.response {
            DeviceResponse::Probed(begun) => Some(begun.environment.clone()),
            _ => None,
        });
        let Some(was) = begun else { return Ok(()) };
        match self.worker.execute(&DeviceRequest::Identify, observer)? {
            DeviceResponse::Identified(is) => Ok(same_machine(self.journal.folder(), &was, &is)?),
            DeviceResponse::Refused { reason } => Err(RunError::Refused { reason }),
            DeviceResponse::Lost { reason } => Err(RunError::Refused { reason: reason.to_string() }),
            _ => Ok(()),
        }
    }

    /// Holds the blocks of a visit to what later arithmetic takes for granted: hashes are no signature.
    fn validate(&self, step: &RecordedExchange) -> Result<(), JournalError> {
        let (DeviceRequest::Visit { visit, .. }, DeviceResponse::Visited(visited)) =
            (&step.request, &step.response)
        else {
            return Ok(());
        };
        check_blocks(&visited.blocks, visit.cell.phase, &visit.cell.id()).map_err(|source| {
            let path = self.journal.folder().join(crate::worker::journal::FILE);
            JournalError::ImpossibleValue { path, source: Box::new(source) }
        })
    }

    /// The journal, when the run is over.
    #[must_use]
    pub fn into_journal(self) -> Journal {
        self.journal
    }
}

impl<R: DeviceWorker> DeviceWorker for JournaledWorker<R> {
    fn execute(
        &mut self,
        request: &DeviceRequest,
        observer: &mut dyn Observer,
    ) -> Result<DeviceResponse, RunError> {
        if !request.measures() {
            if self.replay.is_empty() {
                return self.worker.execute(request, observer);
            }
            self.worker.restore(request, &DeviceResponse::Done);
            return Ok(DeviceResponse::Done);
        }
        if let Some(step) = self.replay.pop_front() {
            if step.request != *request {
                let (was, is) = (step.request.description(), request.description());
                let path = self.journal.folder().join(crate::worker::journal::FILE);
                return Err(JournalError::PlanMismatch { path, was, is }.into());
            }
            self.validate(&step)?;
            self.worker.restore(request, &step.response);
            return Ok(step.response);
        }
        let response = self.worker.execute(request, observer)?;
        // What nobody can do is no measurement: a run that goes on asks again.
        if !matches!(response, DeviceResponse::Refused { .. }) {
            self.journal
                .write(&RecordedExchangeRef { request, response: &response }, request.is_cell_visit())?;
        }
        Ok(response)
    }

    fn restore(&mut self, request: &DeviceRequest, response: &DeviceResponse) {
        self.worker.restore(request, response);
    }

    fn can_restart(&self) -> bool {
        self.worker.can_restart()
    }
}

/// A [`RecordedExchange`] as it is written.
#[derive(Serialize)]
struct RecordedExchangeRef<'a> {
    request: &'a DeviceRequest,
    response: &'a DeviceResponse,
}

#[cfg(test)]
mod tests;
