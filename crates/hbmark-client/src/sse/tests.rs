use super::*;
use proptest::prelude::*;

type Owned = (String, String);

/// What a parser says of these pieces: its events, and whether it found one too large.
fn read(pieces: &[&[u8]], limit: usize) -> (Vec<Owned>, bool) {
    let mut events = Vec::new();
    let mut parser = Events::new(limit);
    let mut keep = |event: Event<'_>| {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        events.push((text(event.name), text(event.data)));
        Ok(())
    };
    for piece in pieces {
        if parser.feed(piece, &mut keep).is_err() {
            return (events, true);
        }
    }
    let failed = parser.finish(&mut keep).is_err();
    (events, failed)
}

fn data_of(text: &str) -> Vec<String> {
    read(&[text.as_bytes()], EVENT_LIMIT).0.into_iter().map(|(_, data)| data).collect()
}

/// Cuts the bytes at the given places.
fn cut<'a>(bytes: &'a [u8], places: &[usize]) -> Vec<&'a [u8]> {
    let mut places: Vec<usize> = places.iter().map(|at| at % (bytes.len() + 1)).collect();
    places.sort_unstable();
    let mut pieces = Vec::new();
    let mut from = 0;
    for at in places {
        pieces.push(&bytes[from..at]);
        from = at;
    }
    pieces.push(&bytes[from..]);
    pieces
}

/// The rules of the standard over a whole text, in the plainest way.
fn reference(bytes: &[u8]) -> Vec<Owned> {
    let text: Vec<u8> = bytes.strip_prefix(BYTE_ORDER_MARK).unwrap_or(bytes).to_vec();
    let mut lines: Vec<Vec<u8>> = vec![Vec::new()];
    let mut at = 0;
    while at < text.len() {
        match text[at] {
            b'\r' => {
                lines.push(Vec::new());
                at += usize::from(text.get(at + 1) == Some(&b'\n'));
            }
            b'\n' => lines.push(Vec::new()),
            byte => lines.last_mut().unwrap().push(byte),
        }
        at += 1;
    }
    // An event without its blank line still counts here.
    lines.push(Vec::new());
    let mut events = Vec::new();
    let (mut name, mut data): (String, Option<String>) = (String::new(), None);
    for line in lines {
        let line = String::from_utf8_lossy(&line).into_owned();
        if line.is_empty() {
            if let Some(data) = data.take() {
                events.push((name.clone(), data));
            }
            name.clear();
            continue;
        }
        let (field, value) = line.split_once(':').unwrap_or((&line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        if field == "event" {
            value.clone_into(&mut name);
        }
        if field == "error" {
            "error".clone_into(&mut name);
        }
        if field == "data" || field == "error" {
            data = Some(data.map_or_else(|| value.to_owned(), |before| format!("{before}\n{value}")));
        }
    }
    events
}

const AWKWARD: &str = "\u{feff}data: one\n\n: ping\n\ndata:two\r\n\r\nevent: error\rid: 7\rdata: three\r\rretry: 10\ndata: a\r\ndata:b\ndata:  c\n\n\
    data\n\nevent: lonely\n\ndata: grüße 🦀\r\n\rerror: {\"code\":500}\n\ndatum: no\n\ndata: last";

#[test]
fn every_way_to_end_a_line_gives_the_same_events() {
    for end in ["\n", "\r\n", "\r"] {
        let text = format!("data: one{end}{end}data: two{end}data: lines{end}{end}");
        assert_eq!(data_of(&text), ["one", "two\nlines"], "{end:?}");
    }
}

#[test]
fn the_awkward_stream_reads_as_the_standard_says() {
    let expected = [
        ("", "one"),
        ("", "two"),
        ("error", "three"),
        ("", "a\nb\n c"),
        ("", ""),
        ("", "grüße 🦀"),
        ("error", "{\"code\":500}"),
        ("", "last"),
    ];
    let events = read(&[AWKWARD.as_bytes()], EVENT_LIMIT).0;
    assert_eq!(events, expected.map(|(name, data)| (name.to_owned(), data.to_owned())));
    assert_eq!(events, reference(AWKWARD.as_bytes()));
}

#[test]
fn every_cut_in_two_and_every_byte_alone_give_the_same_events() {
    let bytes = AWKWARD.as_bytes();
    let expected = reference(bytes);
    for at in 0..=bytes.len() {
        assert_eq!(read(&cut(bytes, &[at]), EVENT_LIMIT).0, expected, "cut at {at}");
    }
    let single: Vec<&[u8]> = bytes.chunks(1).collect();
    assert_eq!(read(&single, EVENT_LIMIT).0, expected);
}

#[test]
fn a_byte_order_mark_counts_only_at_the_start() {
    assert_eq!(data_of("\u{feff}data: a\n\n\u{feff}data: b\n\ndata: c\n\n"), ["a", "c"]);
}

#[test]
fn a_comment_or_a_name_alone_is_no_event() {
    assert_eq!(data_of(": ping\n\n:\n\nevent: x\n\nretry: 5\n\n\n\n"), Vec::<String>::new());
}

#[test]
fn an_event_that_lies_whole_in_the_bytes_is_passed_without_a_copy() {
    let bytes = b"data: {\"a\":1}\n\ndata: {\"b\":2}\r\n\r\n";
    let range = bytes.as_ptr_range();
    let mut parser = Events::default();
    let mut seen = 0;
    let read = parser.feed(bytes, |event| {
        assert!(range.contains(&event.data.as_ptr()));
        seen += 1;
        Ok(())
    });
    assert_eq!((read, seen), (Ok(()), 2));
    assert_eq!(parser.line.capacity() + parser.data.capacity() + parser.name.capacity(), 0);
}

#[test]
fn a_failure_ends_the_reading_at_that_event() {
    let mut parser = Events::default();
    let mut seen = Vec::new();
    let read = parser.feed(b"data: 1\n\ndata: [DONE]\n\ndata: 3\n\n", |event| {
        seen.push(event.data.to_vec());
        if event.data == b"[DONE]" { Err(Failure::NoOutput) } else { Ok(()) }
    });
    assert_eq!(read, Err(Failure::NoOutput));
    assert_eq!(seen, [b"1".to_vec(), b"[DONE]".to_vec()]);
}

#[test]
fn an_event_above_the_limit_is_refused_however_it_comes() {
    let limit = 64;
    let one_line = format!("data: ok\n\ndata: {}\n\n", "x".repeat(80));
    let no_end = format!("data: ok\n\ndata: {}", "x".repeat(80));
    let many_lines = format!("data: ok\n\n{}\n", "data: xxxxxxxx\n".repeat(9));
    let many_empty = format!("data: ok\n\n{}\n", "data\n".repeat(80));
    for text in [one_line, no_end, many_lines, many_empty] {
        for step in [1, 3, 7, 50, 1000] {
            let pieces: Vec<&[u8]> = text.as_bytes().chunks(step).collect();
            let (events, failed) = read(&pieces, limit);
            assert!(failed, "{step} of {text:?}");
            assert_eq!(events, [(String::new(), "ok".to_owned())]);
        }
    }
    let just_fits = format!("data: {}\n\n", "x".repeat(limit - 6));
    assert!(!read(&[just_fits.as_bytes()], limit).1);
}

#[test]
fn a_reset_forgets_the_rest_and_a_huge_buffer() {
    let mut parser = Events::default();
    let mut seen = Vec::new();
    let huge = vec![b'x'; 1 << 20];
    for piece in [&b"\xEF\xBB\xBFevent: old\ndata: "[..], &huge] {
        let _ = parser.feed(piece, |_| Ok(()));
    }
    parser.reset();
    assert!(parser.line.capacity() <= KEPT);
    let _ = parser.feed(b"\xEF\xBB\xBFdata: new\n\n", |event| {
        seen.push((event.name.to_vec(), event.data.to_vec()));
        Ok(())
    });
    assert_eq!(seen, [(Vec::new(), b"new".to_vec())]);
}

/// Pieces of streams, so that generated texts hit the rules.
fn stream() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        Just(b"data:".to_vec()),
        Just(b"data: ".to_vec()),
        Just(b"event: error".to_vec()),
        Just(b"error: e".to_vec()),
        Just(b": c".to_vec()),
        Just(b"id: 1".to_vec()),
        Just(b"\n".to_vec()),
        Just(b"\n\n".to_vec()),
        Just(b"\r".to_vec()),
        Just(b"\r\n".to_vec()),
        Just(b"\r\n\r\n".to_vec()),
        Just("\u{feff}".as_bytes().to_vec()),
        Just("é🦀".as_bytes().to_vec()),
        proptest::collection::vec(any::<u8>(), 0..6),
    ];
    proptest::collection::vec(piece, 0..40).prop_map(|pieces| pieces.concat())
}

proptest! {
    #[test]
    fn any_cuts_give_what_the_whole_gives(bytes in stream(), places in proptest::collection::vec(any::<usize>(), 0..12)) {
        let expected = reference(&bytes);
        prop_assert_eq!(&read(&[&bytes], EVENT_LIMIT).0, &expected);
        prop_assert_eq!(&read(&cut(&bytes, &places), EVENT_LIMIT).0, &expected);
    }

    #[test]
    fn any_cuts_meet_the_limit_at_the_same_event(bytes in stream(), places in proptest::collection::vec(any::<usize>(), 0..12), limit in 1_usize..20) {
        prop_assert_eq!(read(&[&bytes], limit), read(&cut(&bytes, &places), limit));
    }
}
