use super::*;
use crate::event::{Decoded, Finish, decode};
use proptest::prelude::*;

/// What an event says at once.
#[derive(Debug, Clone, Copy, PartialEq)]
enum At {
    NoOutput,
    Now(u32),
    Later,
}
use At::{Later, NoOutput, Now};

/// The counts at once, the counts at the end, and the tally of a stream given as the data of its events.
fn count(events: &[&str]) -> (Vec<At>, Vec<u32>, Tally) {
    let mut counter = TokenCounter::default();
    let mut tokens = Vec::new();
    let mut at_once = Vec::new();
    for data in events {
        let Ok(Decoded::Delta(delta)) = decode(b"", data.as_bytes()) else { panic!("{data}") };
        let output = counter.event(&delta, &mut tokens);
        at_once.push(output.map_or(NoOutput, |_| match tokens.last() {
            Some(&count) if count > 0 => Now(count),
            _ => Later,
        }));
    }
    let tally = counter.finish(&mut tokens);
    (at_once, tokens, tally)
}

/// An event of a completion with a running count.
fn text(text: &str, running: Option<u32>, ids: Option<&[u32]>, finish: bool) -> String {
    let usage =
        running.map_or("null".to_owned(), |n| format!(r#"{{"prompt_tokens":7,"completion_tokens":{n}}}"#));
    let ids = ids.map_or("null".to_owned(), |ids| format!("{ids:?}"));
    let finish = if finish { "\"length\"" } else { "null" };
    format!(
        r#"{{"choices":[{{"index":0,"text":"{text}","token_ids":{ids},"finish_reason":{finish}}}],"usage":{usage}}}"#
    )
}

const ROLE: &str =
    r#"{"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}"#;

fn chat(content: &str) -> String {
    format!(r#"{{"choices":[{{"index":0,"delta":{{"content":"{content}"}},"finish_reason":null}}]}}"#)
}

fn usage(output: u32) -> String {
    format!(r#"{{"choices":[],"usage":{{"prompt_tokens":7,"completion_tokens":{output}}}}}"#)
}

fn all(events: &[String]) -> (Vec<At>, Vec<u32>, Tally) {
    count(&events.iter().map(String::as_str).collect::<Vec<_>>())
}

#[test]
fn a_running_count_tells_the_tokens_of_each_event_at_once() {
    // Three in the first event, a speculative burst of four, and a token whose text is held back.
    let (at_once, tokens, tally) = all(&[
        text("a b c", Some(3), None, false),
        text("d", Some(4), None, false),
        text("e f g h", Some(8), None, false),
        text("", Some(9), None, false),
        text("", Some(9), None, false),
        text("é", Some(10), None, true),
        usage(10),
    ]);
    assert_eq!(at_once, [Now(3), Now(1), Now(4), Now(1), NoOutput, Now(1), NoOutput]);
    assert_eq!(tokens, [3, 1, 4, 1, 1]);
    assert_eq!(
        (tally.evidence, tally.output_tokens, tally.counted),
        (TokenEvidence::ContinuousUsage, 10, 10)
    );
    assert_eq!((tally.prompt_tokens, tally.disagrees()), (Some(7), false));
}

#[test]
fn a_role_an_empty_delta_and_a_usage_alone_are_no_output() {
    let (at_once, tokens, tally) =
        all(&[ROLE.to_owned(), chat(""), chat("a"), chat("b"), "{}".to_owned(), usage(2)]);
    assert_eq!(at_once, [NoOutput, NoOutput, Later, Later, NoOutput, NoOutput]);
    assert_eq!((tokens, tally.evidence), (vec![1, 1], TokenEvidence::FinalUsage));
}

#[test]
fn a_final_count_gives_the_first_event_one_token_and_the_others_the_rest_evenly() {
    let of = |output| all(&[chat("a"), chat("b"), chat("c"), usage(output)]);
    for (output, expected) in [(12, [1, 6, 5]), (3, [1, 1, 1]), (2, [1, 1, 0]), (1, [1, 0, 0])] {
        let (_, tokens, tally) = of(output);
        assert_eq!(tokens, expected);
        assert_eq!((tally.counted, tally.output_tokens), (output.into(), output.into()));
    }
    let (_, tokens, tally) = all(&[chat("a b c"), usage(3)]);
    assert_eq!((tokens, tally.counted), (vec![3], 3), "an answer in one event");
    // One that counts no tokens of an answer with output is not believed.
    let (_, tokens, tally) = of(0);
    assert_eq!((tokens, tally.evidence), (vec![1, 1, 1], TokenEvidence::Events));
    assert_eq!((tally.output_tokens, tally.conflict), (3, true));
}

#[test]
fn a_count_that_only_comes_with_the_end_is_the_final_one() {
    // llama.cpp's last event: no text, the reason of the end and the whole count.
    let (at_once, tokens, tally) =
        all(&[text("a", None, None, false), text("b", None, None, false), text("", Some(6), None, true)]);
    assert_eq!(at_once, [Later, Later, NoOutput]);
    assert_eq!((tokens, tally.evidence), (vec![1, 5], TokenEvidence::FinalUsage));
}

#[test]
fn a_total_beside_an_empty_choice_is_no_output() {
    let total = r#"{"choices":[{"index":0,"delta":{}}],"usage":{"completion_tokens":9}}"#.to_owned();
    let (at_once, tokens, tally) = all(&[chat("a"), chat("b"), chat("c"), total]);
    assert_eq!(at_once, [Later, Later, Later, NoOutput]);
    assert_eq!((tokens, tally.evidence), (vec![1, 4, 4], TokenEvidence::FinalUsage));
}

#[test]
fn the_count_of_an_answer_in_one_event_is_that_events() {
    let (at_once, tokens, tally) = all(&[text("a b", Some(6), None, true), usage(6)]);
    assert_eq!((at_once, tokens), (vec![Now(6), NoOutput], vec![6]));
    assert_eq!(tally.evidence, TokenEvidence::ContinuousUsage);
    // Nothing but the end of the sequence: one token, without text.
    let (at_once, tokens, _) = all(&[text("", Some(1), None, true), usage(1)]);
    assert_eq!((at_once, tokens), (vec![Now(1), NoOutput], vec![1]));
}

#[test]
fn a_running_count_that_an_output_event_lacks_gives_way_to_the_next_better_evidence() {
    let with_ids = [
        text("a", Some(1), Some(&[5]), false),
        text("b c", None, Some(&[6, 7]), false),
        text("d", Some(4), Some(&[8]), false),
        usage(4),
    ];
    let (_, tokens, tally) = all(&with_ids);
    assert_eq!((tokens, tally.evidence, tally.conflict), (vec![1, 2, 1], TokenEvidence::TokenIds, false));
    let without = [
        text("a", Some(1), None, false),
        text("b c", None, None, false),
        text("d", Some(4), None, false),
        usage(4),
    ];
    let (_, tokens, tally) = all(&without);
    assert_eq!((tokens, tally.evidence), (vec![1, 2, 1], TokenEvidence::FinalUsage));
}

#[test]
fn a_running_count_that_shrinks_is_not_believed() {
    let (at_once, tokens, tally) = all(&[
        text("a", Some(5), None, false),
        text("b", Some(3), None, false),
        text("c", Some(9), None, false),
        usage(9),
    ]);
    assert_eq!(at_once, [Now(5), Later, Later, NoOutput]);
    assert_eq!((tokens, tally.evidence), (vec![1, 4, 4], TokenEvidence::FinalUsage));
}

#[test]
fn a_running_count_that_stays_zero_covers_nothing() {
    let (_, tokens, tally) =
        all(&[text("a", Some(0), None, false), text("b", Some(0), None, false), usage(4)]);
    assert_eq!((tokens, tally.evidence), (vec![1, 3], TokenEvidence::FinalUsage));
    let (_, tokens, tally) =
        all(&[text("a", Some(0), Some(&[1]), false), text("b c", Some(0), Some(&[1, 2]), false)]);
    assert_eq!((tokens, tally.evidence, tally.conflict), (vec![1, 2], TokenEvidence::TokenIds, true));
}

#[test]
fn of_two_that_disagree_the_better_one_counts_and_the_other_is_out() {
    let (_, tokens, tally) = all(&[
        text("a", Some(1), Some(&[5]), false),
        text("b", Some(3), Some(&[6]), false),
        text("c", None, Some(&[7]), false),
        usage(4),
    ]);
    // The running count is lost in the third event, and the ids were wrong in the second.
    assert_eq!((tokens, tally.evidence, tally.conflict), (vec![1, 2, 1], TokenEvidence::FinalUsage, true));
}

#[test]
fn a_final_count_that_disagrees_is_kept_beside_the_sum_of_the_events() {
    let (_, tokens, tally) =
        all(&[text("a", Some(1), None, false), text("b", Some(2), None, false), usage(5)]);
    assert_eq!((tokens, tally.evidence), (vec![1, 1], TokenEvidence::ContinuousUsage));
    assert_eq!((tally.output_tokens, tally.counted, tally.disagrees()), (5, 2, true));
}

#[test]
fn a_last_token_that_no_event_was_sent_for_is_no_disagreement() {
    let (_, tokens, tally) =
        all(&[text("a", Some(1), None, false), text("b", Some(2), None, true), usage(3)]);
    assert_eq!((tokens, tally.output_tokens, tally.counted), (vec![1, 1], 3, 2));
    assert!(!tally.disagrees());
    let (_, _, tally) = all(&[text("a", Some(1), None, false), text("b", Some(2), None, true), usage(1)]);
    assert!(tally.disagrees(), "{tally:?}");
}

#[test]
fn the_end_of_the_sequence_is_a_token_of_a_running_count() {
    let (at_once, tokens, tally) =
        all(&[text("a", Some(1), None, false), text("", Some(2), None, true), usage(2)]);
    assert_eq!(at_once, [Now(1), Now(1), NoOutput]);
    assert_eq!((tokens, tally.disagrees()), (vec![1, 1], false));
}

#[test]
fn log_probabilities_count_where_there_is_nothing_better() {
    let event = r#"{"choices":[{"text":"a b","logprobs":{"tokens":["a"," b"]}}]}"#;
    let (at_once, tokens, tally) = count(&[event, event]);
    assert_eq!((at_once, tokens), (vec![Now(2); 2], vec![2, 2]));
    assert_eq!((tally.evidence, tally.output_tokens), (TokenEvidence::Logprobs, 4));
}

#[test]
fn reasoning_is_output_but_no_content() {
    let events = [
        r#"{"choices":[{"delta":{"reasoning":"hm"}}]}"#,
        r#"{"choices":[{"delta":{"content":"a"}}]}"#,
        r#"{"choices":[{"delta":{"tool_calls":[{"function":{"arguments":"{"}}]}}]}"#,
    ];
    let mut counter = TokenCounter::default();
    let mut tokens = Vec::new();
    let outputs = events.map(|data| match decode(b"", data.as_bytes()) {
        Ok(Decoded::Delta(delta)) => counter.event(&delta, &mut tokens).unwrap(),
        other => panic!("{other:?}"),
    });
    assert_eq!(outputs, [Output::Other, Output::Content, Output::Content]);
}

#[test]
fn a_text_that_is_repeated_whole_counts_only_what_grew() {
    let event = |text: &str, n: u32| {
        format!(
            r#"{{"text":"{text}","meta_info":{{"completion_tokens":{n},"prompt_tokens":7,"finish_reason":null}}}}"#
        )
    };
    let (at_once, tokens, tally) = all(&[event("a", 1), event("a b c", 3), event("a b c", 3)]);
    assert_eq!((at_once, tokens), (vec![Now(1), Now(2), NoOutput], vec![1, 2]));
    assert_eq!(tally.evidence, TokenEvidence::ContinuousUsage);
}

#[test]
fn tgi_counts_by_the_ids_of_its_tokens() {
    let token =
        r#"{"index":1,"token":{"id":5,"text":"a","special":false},"generated_text":null,"details":null}"#;
    let last = r#"{"index":2,"token":{"id":2,"text":"</s>","special":true},"generated_text":"a","details":{"finish_reason":"eos_token","generated_tokens":2}}"#;
    let (at_once, _, tally) = count(&[token, last]);
    assert_eq!(at_once, [Now(1), Now(1)]);
    assert_eq!((tally.evidence, tally.disagrees()), (TokenEvidence::TokenIds, false));
}

#[test]
fn llama_cpp_counts_by_its_timings_where_they_come_with_each_event() {
    let event = |n: u32, finish: &str| {
        format!(
            r#"{{"choices":[{{"text":"a","finish_reason":{finish}}}],"timings":{{"cache_n":4,"predicted_n":{n}}}}}"#
        )
    };
    let (_, tokens, tally) = all(&[event(1, "null"), event(3, "null"), event(4, "\"length\"")]);
    assert_eq!((tokens, tally.evidence), (vec![1, 2, 1], TokenEvidence::ContinuousUsage));
    assert_eq!((tally.output_tokens, tally.cached_tokens), (4, Some(4)));
    // Without being asked for: in the last event only.
    let (_, tokens, tally) = all(&[chat("a"), chat("b"), event(4, "\"length\"")]);
    assert_eq!((tokens, tally.evidence, tally.output_tokens), (vec![1, 2, 1], TokenEvidence::FinalUsage, 4));
}

#[test]
fn without_a_count_that_can_be_used_the_events_decide() {
    let (_, tokens, tally) = all(&[chat("one two "), chat("three"), chat(" four five")]);
    assert_eq!((tokens, tally.evidence), (vec![1, 1, 1], TokenEvidence::Events));
    let bad = r#"{"choices":[],"usage":{"completion_tokens":-3}}"#.to_owned();
    let (_, tokens, tally) = all(&[chat("a"), bad.clone(), bad]);
    assert_eq!((tokens, tally.evidence), (vec![1], TokenEvidence::Events));
}

#[test]
fn an_answer_without_output_has_no_events_and_keeps_its_count() {
    let (_, tokens, tally) = all(&[ROLE.to_owned(), usage(1)]);
    assert_eq!((tokens, tally.evidence, tally.output_tokens), (vec![], TokenEvidence::FinalUsage, 1));
    let (_, _, tally) = all(&[]);
    assert_eq!((tally.evidence, tally.output_tokens), (TokenEvidence::Events, 0));
}

proptest! {
    /// Whatever comes, the counts have one entry per output event and sum to what the tally says.
    #[test]
    fn any_stream_gives_a_tally_that_adds_up(events in proptest::collection::vec(
        (0_u8..3, proptest::option::of(0_u32..20), proptest::option::of(0_u32..4), proptest::option::of(0_u32..4), any::<bool>(), any::<bool>()), 0..30,
    )) {
        let mut counter = TokenCounter::default();
        let mut tokens = Vec::new();
        let mut outputs = 0;
        for (letters, running, ids, logprobs, ends, has_usage) in events {
            let usage = running.filter(|_| has_usage).map_or(Usage::Absent, |output| Usage::Known(Counts { output, prompt: None, cached: None }));
            let delta = Delta {
                text: "x".repeat(letters.into()).into(),
                running,
                ids,
                logprobs,
                usage,
                finish: ends.then_some(Finish::Stop),
                ..Delta::default()
            };
            outputs += usize::from(counter.event(&delta, &mut tokens).is_some());
        }
        prop_assert_eq!(tokens.len(), outputs);
        let tally = counter.finish(&mut tokens);
        prop_assert_eq!(tokens.len(), outputs);
        prop_assert_eq!(tally.counted, tokens.iter().map(|&n| u64::from(n)).sum::<u64>());
        let reported = counter.last.map(|counts| u64::from(counts.output)).filter(|&n| n > 0 || tokens.is_empty());
        prop_assert_eq!(tally.output_tokens, reported.unwrap_or(tally.counted));
        prop_assert!(tokens.is_empty() || tally.counted > 0);
    }

    /// Of a final count alone none is lost, the first event has one token, and the others differ by one at most.
    #[test]
    fn a_final_count_adds_up_over_any_number_of_events(total in 1_u32..5_000, events in 1_usize..200) {
        let mut stream = vec![chat("x"); events];
        stream.push(usage(total));
        let (_, tokens, tally) = all(&stream);
        prop_assert_eq!(tally.evidence, TokenEvidence::FinalUsage);
        prop_assert_eq!((tally.counted, tally.output_tokens), (total.into(), total.into()));
        prop_assert_eq!(tokens.iter().sum::<u32>(), total);
        if let [first, others @ ..] = &tokens[..] && events > 1 {
            prop_assert_eq!(*first, 1);
            prop_assert!(others.is_sorted_by(|a, b| a >= b) && others[0] - others[events - 2] <= 1);
        }
    }

    /// A server that counts right is believed: the tokens of each event are those it sent.
    #[test]
    fn an_honest_running_count_gives_each_event_its_tokens(sent in proptest::collection::vec(1_u32..9, 1..40)) {
        let mut events = Vec::new();
        let mut total = 0;
        for &tokens in &sent {
            total += tokens;
            events.push(text("x", Some(total), None, false));
        }
        events.push(usage(total));
        let (at_once, tokens, tally) = all(&events);
        prop_assert_eq!(&tokens, &sent);
        prop_assert_eq!(tally.evidence, TokenEvidence::ContinuousUsage);
        prop_assert!(at_once[..sent.len()].iter().zip(&sent).all(|(at_once, sent)| *at_once == Now(*sent)));
    }
}
