//! What the cells of a report say together.
//!
//! Enters: a [`Report`](crate::report::Report) with judged cells. Leaves: [`Ladder`]s, which go back into the report as plain data. Pure:
//! it measures nothing, knows no engine but by name, and is computed anew from a saved file.

mod ladder;
mod story;

pub use ladder::{Ladder, Rung, RungKind, TimeScale, ladders};

#[cfg(test)]
mod tests;
