//! The page in a real browser, where there is one: `chromium` on PATH, or the program that `HBMARK_CHROMIUM` names. Without one each test
//! writes on stderr that it was skipped; one that is named must start.
//!
//! The browser gets the page with one more script, admitted by its hash like the page's own, which looks at the page from inside and
//! writes what it saw where `--dump-dom` shows it. That script is in the test alone.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use scraper::{Html, Selector};
use sha2::{Digest, Sha256};

use super::serving::{hostile, hostile_findings, render_serving};
use crate::analysis::import::{self, Imported, UserOverrides};
use crate::output::page as render;
use crate::samples;
use hbmark_core::result::comparison::Comparison;

const PROBE: &str = include_str!("../browser_probe.js");

fn browser() -> Option<PathBuf> {
    let named = std::env::var_os("HBMARK_CHROMIUM").map(PathBuf::from);
    let is_named = named.is_some();
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found =
        || std::env::split_paths(&path).map(|folder| folder.join("chromium")).find(|file| file.is_file());
    let Some(browser) = named.or_else(found) else { return skipped("no chromium on PATH") };
    // One that cannot show a line of text here (no fonts, no shared memory) cannot test the page.
    let profile = tempfile::tempdir().unwrap();
    let shown = headless(&browser, profile.path()).arg("data:text/html,<p>it works").output();
    match shown {
        Ok(output) if String::from_utf8_lossy(&output.stdout).contains("it works") => Some(browser),
        seen if is_named => {
            panic!("{} is named by HBMARK_CHROMIUM and does not start: {seen:?}", browser.display())
        }
        _ => skipped("the chromium found does not start"),
    }
}

fn skipped(why: &str) -> Option<PathBuf> {
    // Past the test harness, which keeps what tests print to itself.
    let _ = writeln!(std::io::stderr(), "SKIPPED: {why}, so the HTML report was not opened in a browser");
    None
}

/// A browser that prints what a page became, and is killed when it hangs.
fn headless(browser: &Path, profile: &Path) -> Command {
    let mut command = Command::new("timeout");
    command
        .args(["--signal=KILL", "120"])
        .arg(browser)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"])
        .args(["--disable-background-networking", "--disable-component-update", "--disable-sync"])
        .args(["--enable-logging=stderr", "--virtual-time-budget=10000", "--window-size=1400,1000"])
        .arg("--dump-dom")
        .arg(format!("--user-data-dir={}", profile.display()));
    command
}

/// What the page looked like from inside, and what the browser had to complain of.
struct Seen {
    inside: serde_json::Value,
    complaints: Vec<String>,
}

impl Seen {
    fn number(&self, pointer: &str) -> f64 {
        self.inside
            .pointer(pointer)
            .and_then(serde_json::Value::as_f64)
            .unwrap_or_else(|| panic!("{pointer}: {}", self.inside))
    }
}

fn open(browser: &Path, page: &str, width: u32) -> Seen {
    let folder = tempfile::tempdir().unwrap();
    let hash = STANDARD.encode(Sha256::digest(PROBE.as_bytes()));
    let admitted = page.replacen("script-src ", &format!("script-src 'sha256-{hash}' "), 1);
    let page = admitted.replacen("</body>", &format!("<script>{PROBE}</script></body>"), 1);
    std::fs::write(folder.path().join("page.html"), page).unwrap();
    // A window has a least width; a frame may be as narrow as a phone.
    let frame = format!(
        "<!doctype html><meta charset=utf-8><body style='margin:0'><iframe src=page.html width={width} height=900 style='border:0'></iframe>\
         <pre></pre><script>onmessage = (e) => {{ document.querySelector('pre').textContent = e.data; }};</script>"
    );
    let shell = folder.path().join("shell.html");
    std::fs::write(&shell, frame).unwrap();
    let output = headless(browser, &folder.path().join("profile"))
        .arg(format!("file://{}", shell.display()))
        .output()
        .unwrap();
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    let dom = Html::parse_document(&String::from_utf8_lossy(&output.stdout));
    let written: String = dom.select(&Selector::parse("pre").unwrap()).flat_map(|e| e.text()).collect();
    let inside = serde_json::from_str(&written)
        .unwrap_or_else(|e| panic!("{e}: the page wrote {written:?}; the browser {log}"));
    let complaints = log.lines().filter(|line| line.contains("CONSOLE")).map(str::to_owned).collect();
    Seen { inside, complaints }
}

/// What holds for every page, whatever is in it.
fn harmless(seen: &Seen) {
    assert!(seen.complaints.is_empty(), "{:?}", seen.complaints);
    assert_eq!(seen.inside["errors"], serde_json::json!([]), "{}", seen.inside);
    assert_eq!(seen.inside["requests"], serde_json::json!([]), "nothing but the page itself was asked for");
    assert!(
        seen.number("/overflow") <= 0.0,
        "wider than its window by {}: {}",
        seen.number("/overflow"),
        seen.inside["wide"]
    );
}

#[test]
fn the_page_works_in_a_browser_on_a_desk_and_on_a_phone() {
    let Some(browser) = browser() else { return };
    let report = samples::measured();
    let cells = report.cells.len() as f64;
    for (width, seen_class) in [(1280, "wide"), (390, "narrow")] {
        let seen = open(&browser, &render(&report, &[]), width);
        harmless(&seen);
        assert!((seen.number("/width") - f64::from(width)).abs() < 1.0);
        assert_eq!(
            seen.inside["classes"],
            serde_json::json!([seen_class]),
            "one drawing of each plot is visible"
        );
        assert!((seen.number("/marks/roofline") - cells).abs() < 0.5);
        assert!((seen.number("/marks/blocks") - 5.0 * cells).abs() < 0.5);
        assert_eq!(seen.inside["hover"], "decode/native/bf16/b1/c128", "what a pointed-at mark says first");
        assert_eq!(seen.inside["saved"]["svg"], "hbmark-roofline.svg image/svg+xml");
        assert_eq!(seen.inside["saved"]["png"], "hbmark-roofline.png image/png");
        assert_eq!(seen.inside["overlaps"], serde_json::json!([]), "labels that cover each other");
    }
}

#[test]
fn a_hostile_result_runs_nothing_in_a_browser() {
    let Some(browser) = browser() else { return };
    let report = super::hostile();
    for width in [1280, 390] {
        let seen = open(&browser, &render(&report, &[]), width);
        harmless(&seen);
        assert_eq!((seen.number("/images"), seen.number("/alerts")), (0.0, 0.0));
    }
}

#[test]
fn the_page_of_a_sweep_works_in_a_browser_on_a_desk_and_on_a_phone() {
    let Some(browser) = browser() else { return };
    let report = crate::samples::sweep();
    let page = render_serving(&report, &[]);
    for (width, seen_class) in [(1280, "wide"), (390, "narrow")] {
        let seen = open(&browser, &page, width);
        harmless(&seen);
        assert_eq!(seen.inside["classes"], serde_json::json!([seen_class]));
        assert!(seen.number("/marks/timeline") > 300.0 && seen.number("/marks/latency") > 40.0);
        assert!(seen.inside["hover"].as_str().unwrap().starts_with("TTFT p50 "), "{}", seen.inside["hover"]);
        assert_eq!(seen.inside["saved"]["svg"], "hbmark-load-ttft.svg image/svg+xml");
        assert_eq!(seen.inside["saved"]["png"], "hbmark-load-ttft.png image/png");
        assert_eq!(seen.inside["overlaps"], serde_json::json!([]), "labels that cover each other");
    }
}

#[test]
fn a_page_of_imported_results_shows_names_times_and_share_on_a_phone() {
    let Some(browser) = browser() else { return };
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/foreign");
    let architecture = hbmark_core::model::test_shapes::llama_3_1_8b();
    let given = UserOverrides {
        model: Some(&architecture),
        model_name: Some("Llama-3.1-8B"),
        gpu: Some(hbmark_core::ledger::devices::find("h100-pcie").unwrap()),
        dtype: Some(hbmark_core::model::Dtype::Bf16),
        ..UserOverrides::default()
    };
    let files = ["vllm-serve-2025-03-detailed.json", "sglang-one-batch.jsonl"];
    let results = files.iter().flat_map(|name| import::read(&folder.join(name)).unwrap());
    let placed: Vec<Imported> = results.map(|result| Imported::new(result, &given)).collect();
    let page = crate::output::render(&*placed, crate::output::Format::Html, false).unwrap();
    let at = |width| {
        let seen = open(&browser, &page, width);
        harmless(&seen);
        seen
    };
    let (desk, phone) = (at(1280), at(390));
    assert!(desk.inside["columns"].as_array().unwrap().len() > 20, "{}", desk.inside["columns"]);
    assert_eq!(
        phone.inside["columns"],
        serde_json::json!(["file", "row", "TPOT median", "decode step median", "% sheet"])
    );
    assert!(phone.number("/hidden/0") <= 0.0, "wider than the phone by {}", phone.number("/hidden/0"));
}

#[test]
fn a_page_of_a_comparison_shows_its_verdict_and_ratio_on_a_phone() {
    let Some(browser) = browser() else { return };
    let found: Comparison = samples::saved("comparison");
    let page = crate::output::render(&found, crate::output::Format::Html, false).unwrap();
    let seen = open(&browser, &page, 390);
    harmless(&seen);
    assert_eq!(seen.inside["columns"], serde_json::json!(["cell", "verdict", "B/A", "95 % interval"]));
    assert!(seen.number("/hidden/0") <= 0.0, "wider than the phone by {}", seen.number("/hidden/0"));
}

#[test]
fn a_hostile_serving_result_runs_nothing_in_a_browser() {
    let Some(browser) = browser() else { return };
    let page = render_serving(&hostile(), &hostile_findings());
    for width in [1280, 390] {
        let seen = open(&browser, &page, width);
        harmless(&seen);
        assert_eq!((seen.number("/images"), seen.number("/alerts")), (0.0, 0.0));
    }
}
