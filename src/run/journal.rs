//! A run that goes on where another ended.
//!
//! Enters: a rig, and what its journal holds. Leaves: answers, out of the journal for as long as it lasts. A run draws up its schedule
//! from the seed and from the answers so far alone: to go on, it is run again from the start.

use std::collections::VecDeque;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::run::config::RunConfig;
use crate::run::rig::{Answer, Order, Rig};
use crate::run::{Observer, RunError};
use crate::worker::journal::{Journal, JournalError, Plan, same};
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

impl Plan for RunPlan {
    const SUBCOMMAND: &'static str = "run";
}

/// An order that measured something, and its answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Step {
    pub order: Order,
    pub answer: Answer,
}

/// Holds the machine of a journal against this one.
///
/// # Errors
/// [`JournalError::Differs`], with both.
pub(super) fn same_machine(folder: &Path, was: &Environment, is: &Environment) -> Result<(), JournalError> {
    was.difference(is).map_or(Ok(()), |(what, was, is)| same(folder, what, &was, &is))
}

/// A rig that answers out of a journal for as long as it lasts, and writes down what another one answers after that.
#[derive(Debug)]
pub struct Journaled<R> {
    rig: R,
    journal: Journal,
    replay: VecDeque<Step>,
}

impl<R: Rig> Journaled<R> {
    /// A rig whose answers are written into a journal, after those that are there.
    pub fn new(rig: R, journal: Journal, steps: Vec<Step>) -> Self {
        Self { rig, journal, replay: steps.into() }
    }

    /// Asks whether this is the machine of the answers that are there.
    ///
    /// # Errors
    /// [`JournalError::Differs`], with both; and when the machine cannot be looked at.
    pub fn check_machine(&mut self, observer: &mut dyn Observer) -> Result<(), RunError> {
        let begun = self.replay.iter().find_map(|step| match &step.answer {
            Answer::Begun(begun) => Some(begun.environment.clone()),
            _ => None,
        });
        let Some(was) = begun else { return Ok(()) };
        match self.rig.ask(&Order::Look, observer)? {
            Answer::Looked(is) => Ok(same_machine(self.journal.folder(), &was, &is)?),
            Answer::Refused { reason } | Answer::Lost { reason } => Err(RunError::Refused { reason }),
            _ => Ok(()),
        }
    }

    /// Holds the blocks of a visit to what later arithmetic takes for granted: hashes are no signature.
    fn believe(&self, step: &Step) -> Result<(), JournalError> {
        let (Order::Visit { visit, .. }, Answer::Visited(visited)) = (&step.order, &step.answer) else {
            return Ok(());
        };
        check_blocks(&visited.blocks, visit.cell.phase, &visit.cell.id()).map_err(|source| {
            let path = self.journal.folder().join(crate::worker::journal::FILE);
            JournalError::Unbelievable { path, source: Box::new(source) }
        })
    }

    /// The journal, when the run is over.
    #[must_use]
    pub fn into_journal(self) -> Journal {
        self.journal
    }
}

impl<R: Rig> Rig for Journaled<R> {
    fn ask(&mut self, order: &Order, observer: &mut dyn Observer) -> Result<Answer, RunError> {
        if !order.measures() {
            if self.replay.is_empty() {
                return self.rig.ask(order, observer);
            }
            self.rig.assume(order, &Answer::Done);
            return Ok(Answer::Done);
        }
        if let Some(step) = self.replay.pop_front() {
            if step.order != *order {
                let (was, is) = (step.order.doing(), order.doing());
                let path = self.journal.folder().join(crate::worker::journal::FILE);
                return Err(JournalError::AnotherPlan { path, was, is }.into());
            }
            self.believe(&step)?;
            self.rig.assume(order, &step.answer);
            return Ok(step.answer);
        }
        let answer = self.rig.ask(order, observer)?;
        // What nobody can do is no measurement: a run that goes on asks again.
        if !matches!(answer, Answer::Refused { .. }) {
            self.journal.write(&StepRef { order, answer: &answer }, order.is_visit())?;
        }
        Ok(answer)
    }

    fn assume(&mut self, order: &Order, answer: &Answer) {
        self.rig.assume(order, answer);
    }

    fn renews(&self) -> bool {
        self.rig.renews()
    }
}

/// A [`Step`] as it is written.
#[derive(Serialize)]
struct StepRef<'a> {
    order: &'a Order,
    answer: &'a Answer,
}

#[cfg(test)]
#[path = "journal_tests.rs"]
mod tests;
