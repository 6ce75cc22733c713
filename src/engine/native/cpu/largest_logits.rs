//! The greedy next token of each sequence, found while the head's logits are made.
//!
//! Enters: logits of neighbouring tokens, from any member in any order. Leaves: the token of the largest, the first where several are.
#![expect(unsafe_code, reason = "members write shared buffers at places that do not overlap")]

use super::thread_team::DisjointSlice;

/// Entries between those of two members, 128 bytes: no cache line has parts of both.
const APART: usize = 8;

/// A logit and its token.
type Logit = (f32, usize);

const NONE: Logit = (f32::NEG_INFINITY, 0);

/// The largest logit that each member has met of each sequence.
#[derive(Debug, Default)]
pub(super) struct LargestLogits {
    /// `[members, stride]`.
    met: Vec<Logit>,
    stride: usize,
}

/// Where members keep what they meet.
#[derive(Debug, Clone, Copy)]
pub(super) struct LargestOfMembers {
    met: DisjointSlice<Logit>,
    stride: usize,
}

impl LargestLogits {
    /// Forgets all, and lends room for so many sequences to a team.
    pub(super) fn begin(&mut self, members: usize, sequences: usize) -> LargestOfMembers {
        self.stride = sequences + APART;
        self.met.clear();
        self.met.resize(members * self.stride, NONE);
        LargestOfMembers { met: DisjointSlice::new(&mut self.met), stride: self.stride }
    }

    /// The token of each sequence.
    pub(super) fn tokens(&self, sequences: usize, next: &mut Vec<u32>) {
        next.clear();
        next.extend((0..sequences).map(|sequence| {
            let of_members = self.met.iter().skip(sequence).step_by(self.stride);
            let (_, token) =
                of_members.fold(NONE, |best, met| if precedes(*met, best) { *met } else { best });
            u32::try_from(token).expect("a vocabulary fits 32 bits")
        }));
    }
}

impl LargestOfMembers {
    /// A member meets logits of a sequence, those of tokens from `first` on.
    ///
    /// # Safety
    /// The buffer is still borrowed, the sequence and the member are of those it is for, and no two threads are one member.
    ///
    /// # Panics
    /// Where the buffer ends before such a member.
    pub(super) unsafe fn meet(&self, member: usize, sequence: usize, first: usize, logits: &[f32]) {
        let largest = largest(logits);
        let at = member * self.stride + sequence;
        // SAFETY: the caller's promise.
        let best = unsafe { &mut self.met.part(at..at + 1)[0] };
        // Most are smaller, and need no search.
        if largest >= best.0 {
            let index = logits.iter().position(|logit| *logit >= largest).unwrap_or(0);
            if precedes((largest, first + index), *best) {
                *best = (largest, first + index);
            }
        }
    }
}

/// Whether a logit is taken instead of another.
fn precedes(one: Logit, other: Logit) -> bool {
    one.0 > other.0 || (one.0 >= other.0 && one.1 < other.1)
}

/// The largest. NaN is passed over; −∞ where there is nothing else.
fn largest(logits: &[f32]) -> f32 {
    let above = |most: f32, logit: f32| if logit > most { logit } else { most };
    let (chunks, rest) = logits.as_chunks::<4>();
    let mut most = [f32::NEG_INFINITY; 4];
    for chunk in chunks {
        for (most, logit) in most.iter_mut().zip(chunk) {
            *most = above(*most, *logit);
        }
    }
    most.into_iter().chain(rest.iter().copied()).fold(f32::NEG_INFINITY, above)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(met: &[(usize, usize, &[f32])]) -> u32 {
        let mut largest = LargestLogits::default();
        let members = largest.begin(2, 3);
        for (member, first, logits) in met {
            // SAFETY: one thread is all members.
            unsafe { members.meet(*member, 2, *first, logits) };
        }
        let mut next = Vec::new();
        largest.tokens(3, &mut next);
        assert_eq!(next[..2], [0, 0], "the other sequences met nothing");
        next[2]
    }

    #[test]
    fn the_first_of_the_largest_is_taken_whoever_meets_it() {
        let logits = [1.0, 7.0, 3.0, 7.0, -2.0, 7.0];
        assert_eq!(token(&[(0, 40, &logits)]), 41);
        assert_eq!(token(&[(0, 40, &logits), (1, 20, &logits)]), 21);
        assert_eq!(token(&[(1, 40, &logits), (1, 20, &logits)]), 21);
        assert_eq!(token(&[(0, 40, &logits), (1, 20, &[6.0; 5])]), 41);
    }

    #[test]
    fn nan_is_not_taken() {
        assert_eq!(token(&[(0, 8, &[f32::NAN, 1.0, f32::NAN]), (1, 16, &[f32::NAN; 17])]), 9);
        assert_eq!(token(&[(0, 8, &[f32::NAN; 3]), (1, 16, &[f32::NEG_INFINITY; 2])]), 0);
    }
}
