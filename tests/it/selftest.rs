//! The harness's own check, run as a person runs it, and the page that lists what it promises.

use std::path::Path;

use assert_cmd::Command;

/// Rows of `hbmark selftest --format json`: (area and name, passed, detail).
fn rows() -> Vec<(String, bool, String)> {
    let output =
        Command::cargo_bin("hbmark").unwrap().args(["selftest", "--format", "json"]).output().unwrap();
    let rows: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let text = |row: &serde_json::Value, key: &str| row[key].as_str().unwrap().to_owned();
    let rows: Vec<_> = rows
        .as_array()
        .unwrap()
        .iter()
        .map(|row| {
            let name = format!("{}: {}", text(row, "area"), text(row, "name"));
            (name, row["passed"].as_bool().unwrap(), text(row, "detail"))
        })
        .collect();
    let failed = rows.iter().any(|row| !row.1);
    assert_eq!(output.status.code(), Some(i32::from(failed)), "the exit code says what the rows say");
    rows
}

fn page() -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/validity.md")).unwrap()
}

/// What stands between backticks and begins with a word.
fn named<'a>(page: &'a str, word: &str) -> Vec<&'a str> {
    page.split('`').skip(1).step_by(2).filter_map(|text| text.strip_prefix(word)).map(str::trim).collect()
}

/// Whether two details are of the same words, and their figures within 5 % or one of each other: another mathematical library may round otherwise.
fn is_alike(shown: &str, printed: &str) -> bool {
    let words = |text: &str| text.replace(|c: char| c.is_ascii_digit() || "+-.".contains(c), "");
    let figures = |text: &str| -> Vec<f64> {
        let parts = text.split(|c: char| !(c.is_ascii_digit() || c == '.'));
        parts.filter_map(|part| part.trim_matches('.').parse().ok()).collect()
    };
    let (ours, theirs) = (figures(shown), figures(printed));
    let near = |(a, b): (&f64, &f64)| (a - b).abs() <= (0.05 * a.max(*b)).max(1.0);
    words(shown) == words(printed) && ours.len() == theirs.len() && ours.iter().zip(&theirs).all(near)
}

#[test]
fn figures_of_the_page_may_differ_in_their_rounding_alone() {
    assert!(is_alike("157 named, D -0.00 %", "156 named, D +0.01 %"));
    assert!(!is_alike("157 named, 2 unexplained", "145 named, 30 unexplained"));
    assert!(!is_alike("4 named", "4 unexplained"));
}

#[test]
fn every_row_passes_and_stands_on_the_page_of_promises_and_the_page_names_no_other() {
    let rows = rows();
    let failed: Vec<_> = rows.iter().filter(|row| !row.1).collect();
    assert!(failed.is_empty(), "{failed:#?}");
    let page = page();
    let listed = named(&page, "selftest ");
    for (name, _, detail) in &rows {
        assert!(listed.contains(&name.as_str()), "docs/validity.md does not list `selftest {name}`");
        let cell = format!("`selftest {name}` | ");
        let (_, rest) = page.split_once(&cell).unwrap_or_else(|| panic!("{cell} is a row's middle"));
        let shown = rest.split(" |").next().unwrap_or_default();
        assert!(
            is_alike(shown, detail),
            "docs/validity.md: `selftest {name}` is {shown}, and prints {detail}"
        );
    }
    for name in listed {
        assert!(
            rows.iter().any(|row| row.0 == name),
            "docs/validity.md lists `selftest {name}`, which is not a row"
        );
    }
}

#[test]
fn every_test_that_the_page_names_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = page();
    let tests = named(&page, "test ");
    assert!(tests.len() > 10, "the page names its tests");
    for test in tests {
        let (file, function) =
            test.split_once(' ').unwrap_or_else(|| panic!("`test {test}` is not a file and name"));
        let text = std::fs::read_to_string(root.join(file)).unwrap_or_else(|e| panic!("{file}: {e}"));
        assert!(text.contains(&format!("fn {function}(")), "{file} has no test {function}");
    }
}
