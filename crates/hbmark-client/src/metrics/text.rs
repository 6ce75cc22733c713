//! The Prometheus text format, and OpenMetrics.
//!
//! Enters: the bytes of a page. Leaves: its samples, one call each, in their order. Every byte is looked at a fixed number of times, nothing is
//! kept of a line when the next one is read, and a line that is not a sample is counted and skipped.

use std::borrow::Cow;

/// Labels of one sample beyond which its line is broken: servers have a dozen.
const MAX_LABELS: usize = 64;

/// One line: a name, labels, a value.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample<'a> {
    pub name: &'a str,
    pub labels: Vec<(&'a str, Cow<'a, str>)>,
    pub value: f64,
}

impl Sample<'_> {
    /// The value of a label.
    pub fn label(&self, name: &str) -> Option<&str> {
        self.labels.iter().find(|(label, _)| *label == name).map(|(_, value)| value.as_ref())
    }
}

/// Calls `each` with every sample of a page. What follows `# EOF` is not read. Leaves how many lines are broken.
pub fn parse<'a>(page: &'a [u8], mut each: impl FnMut(Sample<'a>)) -> u64 {
    let mut broken = 0;
    for line in page.split(|byte| *byte == b'\n') {
        let line = line.trim_ascii();
        if line.is_empty() {
            continue;
        }
        if line[0] == b'#' {
            if line == b"# EOF" {
                break;
            }
            continue;
        }
        match std::str::from_utf8(line).ok().and_then(sample) {
            Some(sample) => each(sample),
            None => broken += 1,
        }
    }
    broken
}

/// The sample of a line without blanks around it.
fn sample(line: &str) -> Option<Sample<'_>> {
    let (name, rest) = name(line)?;
    let rest = rest.trim_start();
    let (labels, rest) = match rest.strip_prefix('{') {
        Some(rest) => labels(rest)?,
        // Without labels, a blank must end the name.
        None if rest.len() + name.len() < line.len() => (Vec::new(), rest),
        None => return None,
    };
    // An exemplar is a set of labels and values of its own.
    let mut words = rest.split_ascii_whitespace();
    let value = words.next()?.parse().ok()?;
    match words.next() {
        None => {}
        Some(word) if word.starts_with('#') => {}
        Some(time) => {
            time.parse::<f64>().ok()?;
            if words.next().is_some_and(|word| !word.starts_with('#')) {
                return None;
            }
        }
    }
    Some(Sample { name, labels, value })
}

/// The name at the beginning, and what follows.
fn name(text: &str) -> Option<(&str, &str)> {
    let end = text
        .bytes()
        .position(|byte| !(byte.is_ascii_alphanumeric() || byte == b'_' || byte == b':'))
        .unwrap_or(text.len());
    (end > 0 && !text.as_bytes()[0].is_ascii_digit()).then(|| text.split_at(end))
}

type Labels<'a> = Vec<(&'a str, Cow<'a, str>)>;

/// The labels behind an opening brace, and what follows the closing one.
fn labels(mut text: &str) -> Option<(Labels<'_>, &str)> {
    let mut labels = Vec::new();
    loop {
        text = text.trim_start();
        if let Some(rest) = text.strip_prefix('}') {
            return Some((labels, rest));
        }
        if labels.len() == MAX_LABELS {
            return None;
        }
        let (label, rest) = name(text)?;
        let rest = rest.trim_start().strip_prefix('=')?.trim_start().strip_prefix('"')?;
        let (value, rest) = quoted(rest)?;
        labels.push((label, value));
        text = rest.trim_start();
        match text.strip_prefix(',') {
            Some(rest) => text = rest,
            None if text.starts_with('}') => {}
            None => return None,
        }
    }
}

/// The text up to the closing quote, without its escapes, and what follows.
fn quoted(text: &str) -> Option<(Cow<'_, str>, &str)> {
    let end = memchr::memchr2(b'"', b'\\', text.as_bytes())?;
    if text.as_bytes()[end] == b'"' {
        return Some((Cow::Borrowed(&text[..end]), &text[end + 1..]));
    }
    let mut value = text[..end].to_owned();
    let mut characters = text[end..].char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return Some((Cow::Owned(value), &text[end + at + 1..])),
            '\\' => match characters.next()?.1 {
                'n' => value.push('\n'),
                escaped @ ('\\' | '"') => value.push(escaped),
                // No escape of the format: kept as it stands.
                other => value.extend(['\\', other]),
            },
            other => value.push(other),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn samples(page: &[u8]) -> (Vec<Sample<'_>>, u64) {
        let mut samples = Vec::new();
        let broken = parse(page, |sample| samples.push(sample));
        (samples, broken)
    }

    fn one(line: &str) -> Option<Sample<'_>> {
        let (samples, broken) = samples(line.as_bytes());
        assert_eq!(samples.len() as u64 + broken, 1, "{line}");
        samples.into_iter().next()
    }

    #[test]
    fn numbers_are_read_in_every_spelling() {
        for (text, value) in [
            ("3", 3.0),
            ("-1.5", -1.5),
            ("1.0e+06", 1e6),
            ("1E-3", 1e-3),
            ("+Inf", f64::INFINITY),
            ("-Inf", f64::NEG_INFINITY),
            ("inf", f64::INFINITY),
        ] {
            let line = format!("vllm:a {text}");
            assert_eq!(one(&line).unwrap().value.to_bits(), value.to_bits(), "{text}");
        }
        assert!(one("a NaN").unwrap().value.is_nan());
        assert!(one("a nan").unwrap().value.is_nan());
    }

    #[test]
    fn labels_lose_their_escapes_and_keep_braces_commas_and_hashes() {
        let sample = one(r#"x:y_1{ a = "1,2} # {" , le="+Inf",c="q\"\\\n\d",} 7 1700000000000"#).unwrap();
        assert_eq!(sample.name, "x:y_1");
        assert_eq!(sample.label("a"), Some("1,2} # {"));
        assert_eq!(sample.label("le"), Some("+Inf"));
        assert_eq!(sample.label("c"), Some("q\"\\\n\\d"));
        assert_eq!(sample.label("d"), None);
        assert!((sample.value - 7.0).abs() < f64::EPSILON);
        assert_eq!(one("a{} 1").unwrap().labels, []);
        assert_eq!(one("a{l=\"\"} 1").unwrap().label("l"), Some(""));
        assert_eq!(one("a{l=\"ü\"}1").unwrap().label("l"), Some("ü"));
    }

    #[test]
    fn exemplars_and_timestamps_are_passed_over() {
        assert!(one(r#"a_bucket{le="1"} 8 # {trace_id="1"} 0.5 1.5"#).is_some());
        assert!(one(r#"a_bucket{le="1"} 8 1700.5 # {trace_id="1"} 0.5"#).is_some());
        assert!(one("a 1 -5").is_some());
    }

    #[test]
    fn a_broken_line_is_counted_and_the_next_one_read() {
        for line in [
            "a",
            "a{",
            "a{b} 1",
            "a{b=c} 1",
            "a{b=\"c} 1",
            "a{b=\"c\\",
            "a{b=\"c\"d=\"e\"} 1",
            "a{,} 1",
            "a 1 2 3",
            "a 1 x",
            "a x",
            "1a 1",
            "a-b 1",
            "{\"a\"} 1",
            "<html>",
            "{\"error\":{\"code\":501}}",
        ] {
            let page = format!("{line}\nb 2\n");
            let (samples, broken) = samples(page.as_bytes());
            assert_eq!((samples.len(), broken), (1, 1), "{line}");
            assert_eq!(samples[0].name, "b");
        }
        let (samples, broken) = samples(b"a{l=\"\xff\"} 1\nb 2");
        assert_eq!((samples.len(), broken), (1, 1));
        let many = format!("a{{{}}} 1", "l=\"\",".repeat(MAX_LABELS + 1));
        assert!(one(&many).is_none());
    }

    #[test]
    fn comments_and_empty_lines_are_no_samples_and_the_page_ends_at_its_mark() {
        let page = b"# HELP a {broken\n# TYPE a counter\n\n\t \r\na 1\r\n#\n# EOF\nb 2\n";
        let (samples, broken) = samples(page);
        assert_eq!((samples.len(), broken), (1, 0));
        assert_eq!(samples[0].name, "a");
    }

    proptest! {
        #[test]
        fn any_bytes_are_read(page: Vec<u8>) {
            let (samples, broken) = samples(&page);
            let rows = page.split(|byte| *byte == b'\n').count() as u64;
            prop_assert!(samples.len() as u64 + broken <= rows);
        }

        #[test]
        fn bytes_of_the_format_in_any_order_are_read(page in "[a:{}=\"\\\\,# 1.eE+\n]{0,200}") {
            let (samples, broken) = samples(page.as_bytes());
            prop_assert!(samples.iter().all(|sample| !sample.name.is_empty()));
            prop_assert!(samples.len() as u64 + broken <= page.split('\n').count() as u64);
        }

        #[test]
        fn what_is_written_is_read(
            name in "[a-z_:][a-z0-9_:]{0,20}",
            labels in proptest::collection::vec(("[a-z_][a-z0-9_]{0,9}", "\\PC{0,20}"), 0..5),
            value: f64,
        ) {
            let escaped: Vec<String> = labels
                .iter()
                .map(|(label, text)| {
                    format!("{label}=\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
                })
                .collect();
            let line = format!("{name}{{{}}} {value:?}", escaped.join(","));
            let sample = one(&line).unwrap();
            prop_assert_eq!(sample.name, name);
            let read: Vec<_> =
                sample.labels.iter().map(|(label, text)| ((*label).to_owned(), text.to_string())).collect();
            prop_assert_eq!(read, labels);
            prop_assert!(sample.value.to_bits() == value.to_bits() || value.is_nan() && sample.value.is_nan());
        }
    }
}
