//! Events are read without allocating: ten times as many of them cost the client no more allocations.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]
#![expect(unsafe_code, reason = "a global allocator that counts is unsafe to declare")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::Duration;

use hbmark_client::mock::{Answer, Mock, Script, Stream};
use hbmark_client::run::{Job, Limits, run};
use hbmark_client::target::{Endpoint, Target};
use hbmark_core::units::Nanos;
use hbmark_traffic::serving_loop::{LoadMode, Traffic};
use hbmark_traffic::workload::PlannedRequest;

struct Counting;

thread_local! {
    /// Allocations of this thread: the scripted server has another.
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

fn count() {
    // A thread that ends has none left to count.
    let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
}

// SAFETY: every call is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(pointer, layout) }
    }
    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller's contract.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allocations of the client for requests one after the other, of so many tokens each and with such a gap between them, and how many
/// tokens came.
fn of_tokens(each: usize, token_gap: Duration) -> (usize, usize) {
    let stream = Stream { first_token: Duration::from_micros(200), token_gap, ..Stream::default() };
    let mock = Mock::start(Script::new(Answer::Stream(stream))).unwrap();
    let planned = PlannedRequest { arrival: Nanos(0.0), output_len: each, ..PlannedRequest::default() };
    let plan = vec![planned; 20];
    let traffic = Traffic::new(&plan, LoadMode::Closed { concurrency: 2 }, 0..plan.len(), 1);
    let endpoint = Endpoint::resolve(Target::new(&mock.url(), None).unwrap()).unwrap();
    let request = format!(r#"{{"model":"mock","prompt":[1],"max_tokens":{each},"stream":true}}"#);
    let job = Job {
        endpoint: &endpoint,
        path: "/v1/completions",
        traffic: &traffic,
        cap: None,
        limits: Limits::default(),
        id: "counted",
        keep_events: false,
        bodies: &mut |_, body| body.extend_from_slice(request.as_bytes()),
    };
    let before = ALLOCATIONS.get();
    let live = run(job, &mut |_| {}).unwrap();
    let counted = ALLOCATIONS.get() - before;
    (counted, live.run.records.iter().map(|record| record.output_tokens).sum())
}

#[test]
fn ten_times_the_events_allocate_no_more() {
    // Without a gap the server is faster than the client, which then finds more in a connection than it reads in one turn.
    for token_gap in [Duration::from_micros(20), Duration::ZERO] {
        let (few, tokens) = of_tokens(100, token_gap);
        assert_eq!(tokens, 2_000);
        let (many, tokens) = of_tokens(1_000, token_gap);
        assert_eq!(tokens, 20_000);
        // What grows doubles: a few allocations for each thing that is kept, and not one for each of 18,000 events, nor for each turn.
        assert!(
            many <= few + 100,
            "{few} allocations for 2,000 events, {many} for 20,000, {token_gap:?} apart"
        );
    }
}
