//! `scripts/gpu-day.sh` with a program in hbmark's place: its parts run in order, and one that fails, is late or is skipped is a line and no end.

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
if [ -n "$out" ]; then mkdir -p "$out" && echo "the table of $out" >"$out/result.md"; fi
case "$1" in
"$STAND_IN_FAILS") echo "it broke" >&2 && exit 1 ;;
esac
"#;

fn executable(path: &Path, text: &str) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::write(path, text).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
}

/// A day in an empty folder, and where its results are.
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

/// Name and status of each part.
fn parts(out: &Path) -> Vec<(String, String)> {
    let text = std::fs::read_to_string(out.join("parts.tsv")).unwrap();
    let row = |line: &str| {
        let fields: Vec<&str> = line.split('\t').collect();
        (fields[0].to_owned(), fields[2].to_owned())
    };
    text.lines().skip(1).map(row).collect()
}

const PARTS: [&str; 9] =
    ["machine", "verify", "ceiling", "1b", "1b-operations", "8b", "8b-operations", "1b-peer", "8b-peer"];

#[test]
fn every_part_runs_and_a_missing_peer_is_skipped_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let (output, out) = day(folder.path(), &[], "");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let parts = parts(&out);
    assert_eq!(parts.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), PARTS);
    let (peers, others): (Vec<_>, Vec<_>) = parts.iter().partition(|(name, _)| name.ends_with("peer"));
    assert!(others.iter().all(|(_, status)| status == "ok"), "{others:?}");
    assert!(peers.iter().all(|(_, status)| status == "skipped: no PyTorch here"), "{peers:?}");
    let asked = |part: &str| std::fs::read_to_string(out.join(part).with_extension("txt")).unwrap();
    assert!(asked("verify").starts_with("asked: verify --device cuda --output "), "{}", asked("verify"));
    assert!(asked("8b").contains("--model Llama-3.1-8B --dtype bf16 --engine stock,native --phase decode --batch 1,8,32 --context 512,4096 --quick"));
    assert!(asked("1b-operations").contains("--batch 1 --context 4096 --quick --show-ops"));
    let summary = std::fs::read_to_string(out.join("summary.md")).unwrap();
    for expected in
        ["| 8b | ", "the table of ", "skipped: no PyTorch here", "asked: ceiling --device cuda --quick"]
    {
        assert!(summary.contains(expected), "{expected}: {summary}");
    }
}

#[test]
fn a_part_that_fails_is_said_and_the_rest_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let (output, out) = day(folder.path(), &["--device", "cuda:1"], "verify");
    assert_eq!(output.status.code(), Some(1));
    let parts = parts(&out);
    assert_eq!(parts.len(), PARTS.len());
    assert_eq!(parts[1], ("verify".to_owned(), "exit status 1: it broke".to_owned()));
    assert_eq!(parts[2].1, "ok");
    let ceiling = std::fs::read_to_string(out.join("ceiling.txt")).unwrap();
    assert!(ceiling.contains("--device cuda:1"), "{ceiling}");
}

#[test]
fn a_rehearsal_runs_the_same_parts_on_the_cpu_and_says_that_it_is_one() {
    let folder = tempfile::tempdir().unwrap();
    let (_, out) = day(folder.path(), &["--rehearse"], "");
    assert_eq!(parts(&out).len(), PARTS.len());
    let sweep = std::fs::read_to_string(out.join("1b.txt")).unwrap();
    assert!(sweep.contains("--device cpu") && sweep.contains("--smoke"), "{sweep}");
    assert!(std::fs::read_to_string(out.join("summary.md")).unwrap().contains("A rehearsal"));
}

#[test]
fn an_argument_that_it_does_not_know_ends_it_before_anything_runs() {
    let folder = tempfile::tempdir().unwrap();
    let (output, out) = day(folder.path(), &["--fast"], "");
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("unknown argument --fast"));
    assert!(!out.join("parts.tsv").exists());
}
