//! A processor for the client as soon as it has something to do.
//!
//! Enters: nothing. Leaves: a [`Priority`] that holds until it is dropped. Where a server on the same machine keeps every processor busy, the
//! ordinary scheduler lets this thread wait for milliseconds; it needs a few percent of one, and needs them at once.

#![expect(unsafe_code, reason = "no safe wrapper sets the scheduling policy of a thread")]

/// The policy of this thread before, to go back to.
struct Policy {
    policy: libc::c_int,
    parameters: libc::sched_param,
}

/// Real-time scheduling of this thread, if it was permitted (`CAP_SYS_NICE`, or a limit of `ulimit -r`).
pub(super) struct Priority(Option<Policy>);

impl Priority {
    /// Asks for it; without the permission everything stays as it is.
    pub fn raise() -> Self {
        let before = current();
        // What this thread starts is scheduled as before. Any real-time priority goes before all ordinary threads.
        let policy = libc::SCHED_RR | libc::SCHED_RESET_ON_FORK;
        let raised = Policy { policy, parameters: libc::sched_param { sched_priority: 1 } };
        Self(before.filter(|_| set(&raised)))
    }

    pub fn is_granted(&self) -> bool {
        self.0.is_some()
    }
}

impl Drop for Priority {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            set(before);
        }
    }
}

fn current() -> Option<Policy> {
    let mut parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: 0 is the calling thread; nothing is passed.
    let policy = unsafe { libc::sched_getscheduler(0) };
    // SAFETY: 0 is the calling thread; the parameters are written to a value that outlives the call.
    let status = unsafe { libc::sched_getparam(0, &raw mut parameters) };
    (policy >= 0 && status == 0).then_some(Policy { policy, parameters })
}

fn set(to: &Policy) -> bool {
    // SAFETY: 0 is the calling thread; the parameters are read from a value that outlives the call.
    unsafe { libc::sched_setscheduler(0, to.policy, &raw const to.parameters) == 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_policy_is_raised_where_it_may_be_and_goes_back() {
        let before = current().unwrap();
        let raised = Priority::raise();
        let during = current().unwrap();
        let is_real_time = during.policy & !libc::SCHED_RESET_ON_FORK == libc::SCHED_RR;
        assert_eq!(is_real_time, raised.is_granted());
        drop(raised);
        let after = current().unwrap();
        assert_eq!(
            (after.policy, after.parameters.sched_priority),
            (before.policy, before.parameters.sched_priority)
        );
    }
}
