//! Lists of nodes: one name a line, or Slurm's `node[001-016,020]`; a second word on a line is the rack.
//!
//! Enters: untrusted text. Leaves: names that are safe in a path, a shell and a manifest, each once, in the order of the list.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

/// More nodes than any cluster has.
const MAX_NODES: usize = 200_000;

/// A name longer than this is not a DNS name.
const MAX_NAME: usize = 253;

/// A node of the list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    pub name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rack: Option<String>,
}

/// Why a list of nodes was not understood.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NodesError {
    #[error(
        "line {line}: `{found}` is not a node: wanted a name, or names with ranges such as node[001-016,020]"
    )]
    Syntax { line: usize, found: String },
    #[error(
        "line {line}: `{name}` is not a name of a node: letters, digits, dots, dashes and underscores are"
    )]
    Name { line: usize, name: String },
    #[error("line {line}: {name} is in the list twice")]
    Twice { line: usize, name: String },
    #[error("line {line}: the list has more than {MAX_NODES} nodes")]
    TooMany { line: usize },
    #[error("the list has no node")]
    Empty,
}

/// Reads a list. `#` begins a comment.
///
/// # Errors
/// [`NodesError`], with the line.
pub fn parse(text: &str) -> Result<Vec<Node>, NodesError> {
    let (mut nodes, mut seen) = (Vec::new(), HashSet::new());
    for (index, line) in text.lines().enumerate() {
        let line_number = index + 1;
        let mut words = line.split('#').next().unwrap_or_default().split_whitespace();
        let Some(names) = words.next() else { continue };
        let syntax = |found: &str| NodesError::Syntax {
            line: line_number,
            found: hbmark_core::input::plain(&found.chars().take(80).collect::<String>()),
        };
        let rack = words.next();
        if let Some(extra) = words.next() {
            return Err(syntax(extra));
        }
        if let Some(rack) = rack.filter(|rack| !is_name(rack)) {
            return Err(syntax(rack));
        }
        for name in expand(names).map_err(|failed| match failed {
            Failed::Syntax => syntax(names),
            Failed::TooMany => NodesError::TooMany { line: line_number },
        })? {
            if !is_name(&name) {
                return Err(NodesError::Name { line: line_number, name: hbmark_core::input::plain(&name) });
            }
            if !seen.insert(name.clone()) {
                return Err(NodesError::Twice { line: line_number, name });
            }
            nodes.push(Node { name, rack: rack.map(str::to_owned) });
            if nodes.len() > MAX_NODES {
                return Err(NodesError::TooMany { line: line_number });
            }
        }
    }
    if nodes.is_empty() { Err(NodesError::Empty) } else { Ok(nodes) }
}

/// Whether a word can be a node's name: nothing that a shell, a path or YAML reads as something else.
pub fn is_name(word: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    word.len() <= MAX_NAME
        && word.starts_with(|c: char| c.is_ascii_alphanumeric())
        && word.chars().all(allowed)
        && !word.contains("..")
}

enum Failed {
    Syntax,
    TooMany,
}

/// Every name of a list such as `a,b[01-03]c[1,2]`.
fn expand(list: &str) -> Result<Vec<String>, Failed> {
    let mut names = Vec::new();
    for item in split_outside_brackets(list) {
        names.extend(expand_one(item)?);
        if names.len() > MAX_NODES {
            return Err(Failed::TooMany);
        }
    }
    Ok(names)
}

/// The items between commas that stand in no brackets.
fn split_outside_brackets(list: &str) -> Vec<&str> {
    let mut inside = false;
    list.split(|c: char| {
        inside = c == '[' || (inside && c != ']');
        c == ',' && !inside
    })
    .collect()
}

fn expand_one(item: &str) -> Result<Vec<String>, Failed> {
    let mut names = vec![String::new()];
    let mut rest = item;
    while let Some((before, after)) = rest.split_once('[') {
        let (ranges, after) = after.split_once(']').ok_or(Failed::Syntax)?;
        let numbers = numbers(ranges)?;
        if names.len().saturating_mul(numbers.len()) > MAX_NODES {
            return Err(Failed::TooMany);
        }
        names = names
            .iter()
            .flat_map(|name| numbers.iter().map(move |number| format!("{name}{before}{number}")))
            .collect();
        rest = after;
    }
    if rest.contains(']') {
        return Err(Failed::Syntax);
    }
    for name in &mut names {
        name.push_str(rest);
    }
    if names.iter().any(String::is_empty) { Err(Failed::Syntax) } else { Ok(names) }
}

/// The numbers of `001-016,020`, as wide as they are written.
fn numbers(ranges: &str) -> Result<Vec<String>, Failed> {
    let mut found = Vec::new();
    for range in ranges.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let number = |text: &str| {
            let digits = !text.is_empty() && text.len() <= 18 && text.chars().all(|c| c.is_ascii_digit());
            digits.then(|| text.parse::<u64>().ok()).flatten().ok_or(Failed::Syntax)
        };
        let (from, to) = (number(first)?, number(last)?);
        if to < from {
            return Err(Failed::Syntax);
        }
        if to - from >= MAX_NODES as u64 {
            return Err(Failed::TooMany);
        }
        found.extend((from..=to).map(|number| format!("{number:0width$}", width = first.len())));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn names(text: &str) -> Vec<String> {
        parse(text).unwrap().into_iter().map(|node| node.name).collect()
    }

    #[test]
    fn lines_ranges_and_both_are_read() {
        assert_eq!(names("a\n\n# all\nb # the second\n"), ["a", "b"]);
        assert_eq!(names("node[008-010,020]"), ["node008", "node009", "node010", "node020"]);
        assert_eq!(names("r[1-2]n[1,3],login"), ["r1n1", "r1n3", "r2n1", "r2n3", "login"]);
        let racks = parse("n[1-2] rack-a\nn3").unwrap();
        assert_eq!(racks[1].rack.as_deref(), Some("rack-a"));
        assert_eq!(racks[2].rack, None);
    }

    #[test]
    fn what_is_no_list_is_refused_with_its_line() {
        for (text, wanted) in [
            ("a\nb[1-", "line 2: `b[1-` is not a node"),
            ("b[3-1]", "`b[3-1]` is not a node"),
            ("b]", "is not a node"),
            ("a,,b", "is not a node"),
            ("$(reboot)", "is not a name of a node"),
            ("../etc", "is not a name"),
            ("-w", "is not a name"),
            ("a\na", "line 2: a is in the list twice"),
            ("a b c", "`c` is not a node"),
            ("n[0-99999999]", "more than 200000 nodes"),
            ("n[0-999]x[0-999]", "more than 200000 nodes"),
            ("# none", "the list has no node"),
        ] {
            let found = parse(text).unwrap_err().to_string();
            assert!(found.contains(wanted), "{text}: {found}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused_and_names_stay_safe(text in "[a-z0-9,\\[\\] \n./$-]{0,60}") {
            if let Ok(nodes) = parse(&text) {
                prop_assert!(nodes.iter().all(|node| is_name(&node.name)));
            }
        }
    }
}
