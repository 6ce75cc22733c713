//! Runs that end early and are resumed; and folders that cannot be written, or are written by another process.

use std::path::Path;
use std::process::{Command, Output};

use crate::runs::{
    RESULTS, cells, clean, copy_of, essence, fixture, hanging, hbmark, hung, journal_lines, names, path,
    program, refused, report, run, signal, statuses, stderr,
};

/// A folder with a run that was killed with its worker.
fn killed() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let (mut child, ..) = hanging(folder.path(), &["--format", "json"]);
    signal(child.id(), "KILL");
    child.wait().unwrap();
    folder
}

fn resume(folder: &Path) -> Command {
    let mut command = hbmark();
    command.args(["run", "--format", "json", "--resume", path(folder)]);
    command
}

#[test]
fn a_killed_run_goes_on_to_what_an_uninterrupted_one_gives() {
    let folder = killed();
    assert_eq!(names(folder.path()), ["journal.jsonl"], "no result, and nothing that looks like one");
    // What a killed writer leaves.
    std::fs::write(folder.path().join(".hbmark-x.unfinished"), "half a res").unwrap();
    let mut journal =
        std::fs::File::options().append(true).open(folder.path().join("journal.jsonl")).unwrap();
    std::io::Write::write_all(&mut journal, b"half a line").unwrap();
    drop(journal);
    let output = resume(folder.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    for said in ["11 bytes at the end are an unfinished line and were dropped", "resuming `"] {
        assert!(stderr(&output).contains(said), "{}", stderr(&output));
    }
    assert_eq!(essence(&report(&output)), essence(&report(&run().output().unwrap())));
    assert!(statuses(&report(&output)).iter().all(|(_, status, _)| status == "smoke"));
    assert_eq!(names(folder.path()), RESULTS, "a whole result needs no journal");
    refused(&resume(folder.path()).output().unwrap(), &["holds no unfinished run", "journal.jsonl"]);
}

#[test]
fn a_changed_byte_is_refused_with_its_line() {
    let folder = killed();
    let journal = folder.path().join("journal.jsonl");
    let mut bytes = std::fs::read(&journal).unwrap();
    let second = bytes.iter().position(|byte| *byte == b'\n').unwrap() + 80;
    bytes[second] ^= 1;
    std::fs::write(&journal, &bytes).unwrap();
    refused(
        &resume(folder.path()).output().unwrap(),
        &["journal.jsonl, line 2", "the checksum does not match"],
    );
    assert_eq!(std::fs::read(&journal).unwrap(), bytes, "and nothing is repaired");
}

#[test]
fn other_settings_are_refused_with_both_values_and_the_same_ones_are_not() {
    let folder = killed();
    let other = resume(folder.path()).args(["--batch", "1,9"]).output().unwrap();
    refused(&other, &["--batch differs", "the run had [1,2]", "this is [1,9]"]);
    let other = resume(folder.path()).env("HBMARK_ENGINE", "native").output().unwrap();
    refused(&other, &["--engine differs", "stock", "native"]);
    let other = resume(folder.path()).env("HBMARK_CPU_KERNELS", "portable").output().unwrap();
    refused(&other, &["HBMARK_CPU_KERNELS differs: the run had unset, this is portable"]);
    let same = resume(folder.path()).args(["--batch", "1,2", "--smoke"]).output().unwrap();
    assert_eq!(same.status.code(), Some(0), "{}", stderr(&same));
}

#[test]
fn weights_that_changed_meanwhile_are_refused() {
    let (folder, model) = (tempfile::tempdir().unwrap(), copy_of("qwen3"));
    let mut arguments = cells();
    *arguments.last_mut().unwrap() = path(model.path()).to_owned();
    let mut command = hbmark();
    command.args(arguments).args(["--hang-after", "100000", "--out", path(folder.path())]);
    let (mut child, ..) = hung(command.env("HBMARK_PLANT_FAULT", "hang@decode/stock/f32/b2/c8"));
    signal(child.id(), "KILL");
    child.wait().unwrap();
    let weights = std::fs::File::options().append(true).open(model.path().join("model.safetensors")).unwrap();
    weights.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
    refused(&resume(folder.path()).output().unwrap(), &["the model differs: the run had ", ", weights "]);
}

#[test]
fn another_program_is_refused_with_both_hashes() {
    let folder = killed();
    let elsewhere = tempfile::tempdir().unwrap();
    let other = elsewhere.path().join("hbmark");
    std::fs::copy(program(), &other).unwrap();
    let mut file = std::fs::File::options().append(true).open(&other).unwrap();
    std::io::Write::write_all(&mut file, b"one byte more").unwrap();
    drop(file);
    let output = clean(&other).args(["run", "--resume", path(folder.path())]).output().unwrap();
    refused(&output, &["the executable (sha256) differs: the run had ", "this is "]);
}

#[test]
fn a_folder_has_one_run_at_a_time_and_an_unfinished_one_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let (mut child, ..) = hanging(folder.path(), &["--format", "json"]);
    let second = run().args(["--out", path(folder.path())]).output().unwrap();
    refused(&second, &["another run is writing into this folder"]);
    refused(&resume(folder.path()).output().unwrap(), &["another run is writing into this folder"]);
    signal(child.id(), "KILL");
    child.wait().unwrap();
    let second = run().args(["--out", path(folder.path())]).output().unwrap();
    refused(&second, &["holds an unfinished run", "hbmark run --resume"]);
}

#[test]
fn a_refused_run_leaves_no_journal_and_a_finished_one_may_be_repeated() {
    let folder = tempfile::tempdir().unwrap();
    let arguments: Vec<String> =
        cells().into_iter().map(|a| if a == "f32" { "q4_0".into() } else { a }).collect();
    let refusal = hbmark().args(arguments).args(["--out", path(folder.path())]).output().unwrap();
    assert_eq!(refusal.status.code(), Some(2), "{}", stderr(&refusal));
    assert!(names(folder.path()).is_empty(), "{:?}", names(folder.path()));
    for _ in 0..2 {
        let output = run().args(["--out", path(folder.path())]).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        assert_eq!(names(folder.path()), RESULTS);
    }
}

#[test]
fn a_full_disk_ends_the_run_and_what_is_in_the_journal_is_safe() {
    let whole = tempfile::tempdir().unwrap();
    // How much a run writes before its last measurement is there.
    let (mut child, ..) = hanging(whole.path(), &["--format", "json"]);
    let needs = std::fs::metadata(whole.path().join("journal.jsonl")).unwrap().len();
    signal(child.id(), "KILL");
    child.wait().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let mut command = clean("bash");
    command.args(["-c", &format!("ulimit -f {}; exec \"$0\" \"$@\"", needs / 1024)]).arg(program());
    let output =
        command.args(cells()).args(["--format", "json", "--out", path(folder.path())]).output().unwrap();
    refused(&output, &["journal.jsonl: File too large", "what is in it is safe", "hbmark run --resume"]);
    assert_eq!(names(folder.path()), ["journal.jsonl"]);
    assert!(journal_lines(folder.path()) >= 2);
    let output = resume(folder.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(
        !stderr(&output).contains("unfinished line"),
        "the half line was taken back: {}",
        stderr(&output)
    );
    assert_eq!(essence(&report(&output)), essence(&report(&run().output().unwrap())));
}

/// On a disk of a megabyte, which needs a namespace of mounts of its own; where none is to be had, `check_free_space` alone is tested, beside it.
#[cfg(target_os = "linux")]
#[test]
fn a_disk_without_room_is_said_before_anything_is_measured() {
    let disk = tempfile::tempdir().unwrap();
    let mounted = "mount -t tmpfs -o size=1m none \"$0\" || exit 77; exec \"$@\"";
    let mut command = clean("unshare");
    command.args(["--user", "--map-root-user", "--mount", "bash", "-c", mounted, path(disk.path())]);
    let output = command.arg(program()).args(cells()).args(["--out", path(disk.path())]).output();
    match output {
        Ok(output) if stderr(&output).starts_with("unshare:") || output.status.code() == Some(77) => {
            eprintln!("not tried: {}", stderr(&output));
        }
        Err(error) => eprintln!("not tried: {error}"),
        Ok(output) => {
            refused(&output, &["the disk of ", " has 1", " left, and the results may take ", "make room"]);
        }
    }
}

#[test]
fn a_folder_that_cannot_be_written_is_said_before_anything_is_measured() {
    let output = run().args(["--out", "/proc/hbmark"]).output().unwrap();
    refused(&output, &["cannot create the output folder /proc/hbmark"]);
}

/// A stream that takes nothing.
fn full() -> std::process::Stdio {
    std::fs::File::options().write(true).open("/dev/full").unwrap().into()
}

/// The arguments of a benchmark on a virtual clock.
fn virtually() -> Command {
    let mut command = hbmark();
    command.args(["serve", "--virtual", "--gpu", "h100-sxm", "--requests", "5", "--input-len", "4"]);
    command.args(["--output-len", "4", "--rate", "inf", "--model", path(&fixture("qwen3"))]);
    command
}

#[test]
fn a_result_that_cannot_be_printed_is_saved_and_complete() {
    for (mut command, kept) in [(run(), "result.json"), (virtually(), "serve.json")] {
        let folder = tempfile::tempdir().unwrap();
        let output = command.args(["--out", path(folder.path())]).stdout(full()).output().unwrap();
        refused(&output, &["error: saved ", kept, "but not printed: cannot write to stdout: No space left"]);
        assert!(folder.path().join(kept).is_file());
        assert!(!folder.path().join("journal.jsonl").exists(), "a whole result needs no journal");
    }
    refused(&run().stdout(full()).output().unwrap(), &["error: cannot write to stdout: No space left"]);
}

#[test]
fn a_run_that_nobody_hears_complain_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let status = run().args(["--out", path(folder.path())]).stdout(full()).stderr(full()).status().unwrap();
    assert_eq!(status.code(), Some(2), "stdout is gone, too");
    assert_eq!(names(folder.path()), RESULTS);
    let output = run().args(["--out", path(folder.path())]).stderr(full()).output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(statuses(&report(&output)).len(), 4);
}

#[test]
fn what_strangers_wrote_does_nothing_to_a_terminal() {
    const ACTS: &str = "\u{1b}]0;PWN\u{7}\u{1b}[2J";
    let harmless = |output: &Output, said: &str| {
        let stderr = stderr(output);
        assert!(stderr.contains(said), "{stderr:?}");
        assert!(!stderr.contains(|c: char| c.is_control() && c != '\n'), "{stderr:?}");
    };
    let output = hbmark().args(["run", "--phase", ACTS]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    harmless(&output, "invalid value");
    let folder = tempfile::tempdir().unwrap();
    harmless(&run().arg("--out").arg(folder.path().join(ACTS)).output().unwrap(), "saved ");
    let folder = tempfile::tempdir().unwrap();
    let (mut child, ..) = hanging(folder.path(), &["--format", "json", "--note", ACTS]);
    signal(child.id(), "KILL");
    child.wait().unwrap();
    harmless(&resume(folder.path()).output().unwrap(), "resuming `");
}

#[test]
fn a_launcher_that_is_gone_is_said() {
    let mut gone = Command::new("true").spawn().unwrap();
    gone.wait().unwrap();
    let output = run().env("HBMARK_LAUNCHED_BY", gone.id().to_string()).output().unwrap();
    refused(&output, &["the process that launched this one is gone; unset HBMARK_LAUNCHED_BY"]);
}

#[test]
fn a_folder_in_which_a_run_writes_is_no_other_subcommands() {
    let folder = tempfile::tempdir().unwrap();
    let (mut child, ..) = hanging(folder.path(), &["--format", "json"]);
    let out = ["--out", path(folder.path())];
    let model = cells().pop().unwrap();
    let mut compare = hbmark();
    compare.args(["compare", "threads=1", "threads=2", "--protocol", "smoke", "--both"]);
    compare.arg(format!("model={model} device=cpu engine=native batch=1 context=8 phase=decode"));
    let mut cold = hbmark();
    cold.args([
        "serve",
        "cold",
        "--launches",
        "2",
        "--engine",
        "native",
        "--device",
        "cpu",
        "--model",
        &model,
    ]);
    let mut commands = [virtually(), compare, cold];
    for command in &mut commands {
        refused(&command.args(out).output().unwrap(), &["another run is writing into this folder"]);
    }
    signal(child.id(), "KILL");
    child.wait().unwrap();
    for command in &mut commands {
        refused(&command.output().unwrap(), &["holds an unfinished run", "hbmark run --resume"]);
    }
    assert_eq!(names(folder.path()), ["journal.jsonl"]);
}
