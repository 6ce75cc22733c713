//! `scripts/gpu-day.sh` with a program in hbmark's place: its parts run in order and are packed as they end, one that fails, is late or is skipped is a
//! line and no end, and a later call goes on where the last one stopped.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A stand-in program: prints its arguments, writes given files, and fails on request.
const STAND_IN: &str = r#"#!/usr/bin/env bash
echo "asked: $*"
out='' previous=''
for word in "$@"; do
    case $previous in --out) out=$word ;; --output) echo '{}' >"$word" ;; esac
    previous=$word
done
if [ -n "$out" ]; then mkdir -p "$out" && echo "the table of: $*" >"$out/result.md"; fi
case "$1" in
"$STAND_IN_FAILS") echo "it broke" >&2 && exit 1 ;;
esac
"#;

fn executable(path: &Path, text: &str) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::write(path, text).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
}

/// A call of the script in a folder, and where its results are.
fn day(folder: &Path, arguments: &[&str], fails: &str) -> (Output, PathBuf) {
    let (hbmark, python) = (folder.join("hbmark"), folder.join("python"));
    executable(&hbmark, STAND_IN);
    executable(&python, "#!/usr/bin/env bash\necho 'no PyTorch here' >&2\nexit 77\n");
    let out = folder.join("out");
    let output = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/gpu-day.sh"))
        .args(["--hbmark", hbmark.to_str().unwrap(), "--out", out.to_str().unwrap()])
        .args(arguments)
        .env("HBMARK_PYTHON", &python)
        .env("STAND_IN_FAILS", fails)
        .output()
        .unwrap();
    (output, out)
}

/// Name and status of each part that ended.
fn parts(out: &Path) -> Vec<(String, String)> {
    let text = std::fs::read_to_string(out.join("parts.tsv")).unwrap();
    let row = |line: &str| {
        let fields: Vec<&str> = line.split('\t').collect();
        (fields[0].to_owned(), fields[2].to_owned())
    };
    text.lines().skip(1).map(row).collect()
}

fn names(out: &Path) -> Vec<String> {
    parts(out).into_iter().map(|(name, _)| name).collect()
}

/// A file of what a part left.
fn packed(out: &Path, part: &str, file: &str) -> String {
    let output = Command::new("tar")
        .arg("-xOzf")
        .arg(out.join(format!("{part}.tar.gz")))
        .arg(format!("{part}/{file}"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{part}/{file}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

const PARTS: [&str; 17] = [
    "machine",
    "ceiling",
    "verify",
    "smoke",
    "memcheck",
    "native-1b",
    "native-8b",
    "operations-1b",
    "operations-8b",
    "batches-8b",
    "profile",
    "stock-1b",
    "stock-8b",
    "prefill-8b",
    "torch-1b",
    "torch-8b",
    "llama",
];
/// Those that need a program that no test machine has.
const MAY_BE_SKIPPED: [&str; 5] = ["memcheck", "profile", "torch-1b", "torch-8b", "llama"];

#[test]
fn every_part_runs_and_what_it_left_is_packed() {
    let folder = tempfile::tempdir().unwrap();
    let (output, out) = day(folder.path(), &["--limit", "10000"], "");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(names(&out), PARTS);
    for (name, status) in parts(&out) {
        let skipped = status.starts_with("skipped: no ") && MAY_BE_SKIPPED.contains(&name.as_str());
        assert!(status == "ok" || skipped, "{name}: {status}");
    }
    assert_eq!(parts(&out)[14].1, "skipped: no PyTorch here");
    let asked = |part: &str| packed(&out, part, "stdout.txt");
    assert!(asked("verify").starts_with("asked: verify --device cuda --output "), "{}", asked("verify"));
    assert!(asked("native-8b").contains("--model Llama-3.1-8B --dtype bf16 --engine native --phase decode --batch 1 --context 512,8192 --quick"));
    assert!(asked("operations-8b").contains("--batch 1 --context 8192 --quick --show-ops"));
    assert!(packed(&out, "native-1b", "run/result.md").contains("Llama-3.2-1B"));
    let files: Vec<_> = std::fs::read_dir(&out).unwrap().collect();
    assert_eq!(files.len(), PARTS.len() + 2, "{files:?}");
    let summary = std::fs::read_to_string(out.join("summary.md")).unwrap();
    for expected in [
        "| native-8b | ",
        "the table of: run ",
        "skipped: no PyTorch here",
        "asked: ceiling --device cuda --quick",
    ] {
        assert!(summary.contains(expected), "{expected}: {summary}");
    }
    assert!(!summary.contains("Not run yet"), "{summary}");
}

#[test]
fn a_call_begins_no_part_beyond_its_limit_and_a_later_one_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let (output, out) = day(folder.path(), &["--limit", "70"], "");
    assert_eq!(output.status.code(), Some(3));
    // The third part may take three minutes; the shorter ones behind it wait as well.
    assert_eq!(names(&out), PARTS[..2]);
    let summary = std::fs::read_to_string(out.join("summary.md")).unwrap();
    assert!(summary.contains("Not run yet: verify smoke memcheck "), "{summary}");
    let first = std::fs::read(out.join("machine.tar.gz")).unwrap();

    let (output, out) = day(folder.path(), &["--limit", "10000"], "");
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(names(&out), PARTS);
    assert_eq!(std::fs::read(out.join("machine.tar.gz")).unwrap(), first, "an ended part ran again");
}

#[test]
fn a_part_that_fails_is_said_the_rest_goes_on_and_it_runs_again_when_it_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let (output, out) = day(folder.path(), &["--limit", "10000", "--device", "cuda:1"], "verify");
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(names(&out), PARTS);
    assert_eq!(parts(&out)[2], ("verify".to_owned(), "exit status 1: it broke".to_owned()));
    assert_eq!(parts(&out)[3].1, "ok");
    assert!(packed(&out, "verify", "stderr.txt").contains("it broke"));
    assert!(packed(&out, "ceiling", "stdout.txt").contains("--device cuda:1"));

    let (output, out) = day(folder.path(), &["verify"], "");
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(parts(&out).last().unwrap(), &("verify".to_owned(), "ok".to_owned()));
    assert_eq!(parts(&out).len(), PARTS.len());
}

#[test]
fn a_rehearsal_runs_the_same_parts_over_a_tiny_model_and_says_that_it_is_one() {
    let folder = tempfile::tempdir().unwrap();
    let (_, out) = day(folder.path(), &["--rehearse", "--limit", "10000"], "");
    assert_eq!(names(&out), PARTS);
    let run = packed(&out, "native-8b", "stdout.txt");
    assert!(run.contains("--device cpu") && run.contains("--smoke") && run.contains("qwen3-tied"), "{run}");
    assert!(std::fs::read_to_string(out.join("summary.md")).unwrap().contains("A rehearsal"));
}

#[test]
fn what_it_does_not_know_ends_it_before_anything_runs() {
    let folder = tempfile::tempdir().unwrap();
    for (argument, problem) in
        [("--fast", "unknown argument --fast"), ("verfy", "no part verfy; there are machine ")]
    {
        let (output, out) = day(folder.path(), &[argument], "");
        assert_eq!(output.status.code(), Some(2));
        assert!(String::from_utf8_lossy(&output.stderr).contains(problem), "{argument}");
        assert!(!out.exists());
    }
}
