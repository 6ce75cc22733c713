//! A journal is complete, or its damage is detected. Runs are those of the scripted worker, whose times are exact.

use super::*;
use crate::run::config::RunConfig;
use crate::run::device_worker::tests::{Scripted, config, model, steady};
use crate::run::device_worker::{DeviceJob, DeviceRequest};
use crate::run::{Finished, RunError};
use crate::worker::job::Job;
use crate::worker::journal::*;
use crate::worker::journaled::{EntryOf, same_machine};
use crate::worker::{JournaledWorker, NoopObserver, Worker};
use hbmark_core::result::{CellResult, Report, Status};
use std::path::Path;

fn settings() -> RunConfig {
    config("native", &[1, 2], &[64])
}

fn header() -> Header<RunPlan> {
    Header::new("hbmark run", RunPlan::of(&settings(), &model())).unwrap()
}

fn reopen(folder: &Path) -> Result<ReopenedJournal<RunPlan, EntryOf<DeviceJob>>, JournalError> {
    Journal::reopen(folder)
}

fn scripted() -> Scripted {
    Scripted::new(&settings(), steady(10.0))
}

fn run(worker: &mut dyn Worker<DeviceJob>) -> Result<Finished, RunError> {
    crate::run::benchmark(worker, &settings(), &model(), "hbmark run", &mut NoopObserver)
}

/// The bytes of a run's whole journal, and its result.
fn whole() -> (Vec<u8>, Report) {
    let folder = tempfile::tempdir().unwrap();
    let journal = Journal::create(folder.path(), &header()).unwrap();
    let finished = run(&mut JournaledWorker::new(Box::new(scripted()), journal, Vec::new())).unwrap();
    (std::fs::read(folder.path().join(FILE)).unwrap(), finished.report)
}

/// A folder with a journal of these bytes.
fn folder(bytes: &[u8]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join(FILE), bytes).unwrap();
    folder
}

/// Everything of a cell but when its blocks were taken.
fn without_clock(cell: &CellResult) -> CellResult {
    let mut cell = cell.clone();
    for block in &mut cell.blocks {
        block.at_ns = 0.0;
    }
    CellResult { memory_peak_bytes: None, ..cell }
}

fn cells(report: &Report) -> Vec<CellResult> {
    report.cells.iter().map(without_clock).collect()
}

fn ends(bytes: &[u8]) -> Vec<usize> {
    (1..=bytes.len()).filter(|&end| bytes[end - 1] == b'\n').collect()
}

#[test]
fn a_run_killed_at_any_line_goes_on_to_the_same_result() {
    let (bytes, uninterrupted) = whole();
    let ends = ends(&bytes);
    assert!(ends.len() > 8, "{} lines", ends.len());
    for (lines, &end) in ends.iter().enumerate() {
        let folder = folder(&bytes[..end]);
        let found = reopen(folder.path()).unwrap();
        assert_eq!((found.entries.len(), found.notice), (lines, None));
        let mut journaled = JournaledWorker::new(Box::new(scripted()), found.journal, found.entries);
        journaled.check_machine(&mut NoopObserver).unwrap();
        let finished = run(&mut journaled).unwrap();
        assert_eq!(cells(&finished.report), cells(&uninterrupted), "after {lines} lines");
        assert_eq!(finished.report.warnings, uninterrupted.warnings);
        // What was measured after that is in the journal as well.
        let again = std::fs::read(folder.path().join(FILE)).unwrap();
        assert_eq!(crate::worker::journal::lines(&again).unwrap().whole.len(), ends.len());
        assert_eq!(again[..end], bytes[..end]);
    }
}

#[test]
fn a_whole_journal_is_a_whole_result_without_measuring() {
    let (bytes, uninterrupted) = whole();
    let folder = folder(&bytes);
    let found = reopen(folder.path()).unwrap();
    let idle =
        scripted().losing(|_, request| panic!("{} was measured again", DeviceJob::description(request)));
    let finished = run(&mut JournaledWorker::new(Box::new(idle), found.journal, found.entries)).unwrap();
    assert_eq!(cells(&finished.report), cells(&uninterrupted));
    assert_eq!(finished.report.cells[0].blocks, uninterrupted.cells[0].blocks, "to the nanosecond");
}

#[test]
fn a_line_cut_anywhere_is_dropped_with_a_notice() {
    let (bytes, _) = whole();
    let ends = ends(&bytes);
    let (before, last) = (ends[ends.len() - 2], ends[ends.len() - 1]);
    for cut in before + 1..last {
        let lines = lines(&bytes[..cut]).unwrap();
        assert_eq!((lines.whole.len(), lines.torn), (ends.len() - 1, cut - before));
    }
    for cut in [before + 1, last - 1] {
        let folder = folder(&bytes[..cut]);
        let found = reopen(folder.path()).unwrap();
        assert_eq!(found.entries.len(), ends.len() - 2);
        let notice = found.notice.unwrap();
        assert!(
            notice.contains(&format!("{} bytes at the end are an unfinished line", cut - before)),
            "{notice}"
        );
        drop(found.journal);
        assert_eq!(std::fs::read(folder.path().join(FILE)).unwrap(), bytes[..before]);
    }
}

#[test]
fn a_flipped_byte_anywhere_is_found_or_shortens_the_journal_with_a_notice() {
    let (bytes, _) = whole();
    // Three lines hold every kind of byte: hash, space, text, line end; and the beginning of the middle of a chain.
    let bytes = &bytes[..ends(&bytes)[2]];
    let truth: Vec<&[u8]> = lines(bytes).unwrap().whole.into_iter().map(|line| line.json).collect();
    for at in 0..bytes.len() {
        for bit in [0x01, 0x20, 0x80] {
            let mut flipped = bytes.to_vec();
            flipped[at] ^= bit;
            match lines(&flipped) {
                Err(line) => assert!(line <= truth.len()),
                // Only the last line's end can become something else: then the line is dropped, and said so.
                Ok(lines) => {
                    assert_eq!(at, bytes.len() - 1, "byte {at}");
                    assert!(lines.torn > 0);
                    let found: Vec<&[u8]> = lines.whole.into_iter().map(|line| line.json).collect();
                    assert_eq!(found, truth[..truth.len() - 1]);
                }
            }
        }
    }
}

#[test]
fn lines_cannot_be_left_out_or_exchanged() {
    let (bytes, _) = whole();
    let ends = ends(&bytes);
    let line = |n: usize| &bytes[ends[n - 1]..ends[n]];
    let first = &bytes[..ends[0]];
    assert_eq!(lines(&[first, line(2)].concat()).err(), Some(2), "one is missing");
    assert_eq!(lines(&[first, line(2), line(1)].concat()).err(), Some(2), "two are exchanged");
    assert_eq!(lines(&[first, line(1), line(1)].concat()).err(), Some(3), "one is there twice");
    assert_eq!(lines(line(1)).err(), Some(1), "the header is missing");
}

#[test]
fn a_stopped_run_goes_on_and_a_finished_one_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let journal = Journal::create(folder.path(), &header()).unwrap();
    let stopping = scripted().losing(|asked, _| (asked == 5).then_some(Err(2)));
    let mut journaled = JournaledWorker::new(Box::new(stopping), journal, Vec::new());
    let stopped = run(&mut journaled).unwrap();
    assert_eq!(stopped.stopped, Some(2));
    assert!(stopped.report.cells.iter().any(|cell| cell.status == Status::Incomplete));
    drop(journaled);
    let found = reopen(folder.path()).unwrap();
    assert_eq!(found.entries.len(), 4);
    let mut journaled = JournaledWorker::new(Box::new(scripted()), found.journal, found.entries);
    assert_eq!(cells(&run(&mut journaled).unwrap().report), cells(&whole().1));
    journaled.into_journal().finish().unwrap();
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    let error = reopen(folder.path()).unwrap_err().to_string();
    assert!(error.contains("holds no unfinished run"), "{error}");
}

#[test]
fn a_loss_is_remembered_across_runs() {
    let second_cell = |request: &DeviceRequest| matches!(request, DeviceRequest::Visit { visit, .. } if visit.cell.batch == 2);
    let losing = move || scripted().losing(move |_, request| second_cell(request).then(|| Ok("gone".into())));
    let folder = tempfile::tempdir().unwrap();
    let journal = Journal::create(folder.path(), &header()).unwrap();
    let mut journaled = JournaledWorker::new(Box::new(losing()), journal, Vec::new());
    let lost = run(&mut journaled).unwrap().report;
    assert_eq!(lost.cells[1].status, Status::Failed);
    drop(journaled);
    let bytes = std::fs::read(folder.path().join(FILE)).unwrap();
    for end in ends(&bytes) {
        let folder = self::folder(&bytes[..end]);
        let found = reopen(folder.path()).unwrap();
        let report =
            run(&mut JournaledWorker::new(Box::new(losing()), found.journal, found.entries)).unwrap().report;
        assert_eq!(cells(&report), cells(&lost));
    }
}

#[test]
fn a_run_that_measured_no_cell_is_started_over() {
    let (bytes, _) = whole();
    let folder = self::folder(&bytes[..ends(&bytes)[2]]);
    let journal = Journal::create(folder.path(), &header()).unwrap();
    assert!(!journal.has_measurements());
    drop(journal);
    assert_eq!(ends(&std::fs::read(folder.path().join(FILE)).unwrap()).len(), 1, "a header again");
}

#[test]
fn a_run_that_was_killed_in_its_first_line_says_so_and_is_started_over() {
    let (bytes, _) = whole();
    for length in [0, 1, ends(&bytes)[0] - 1] {
        let folder = self::folder(&bytes[..length]);
        let error = reopen(folder.path()).map(drop).unwrap_err().to_string();
        assert!(error.contains("ended before it wrote what it was to do: start it again"), "{error}");
        drop(Journal::create(folder.path(), &header()).unwrap());
        assert_eq!(ends(&std::fs::read(folder.path().join(FILE)).unwrap()).len(), 1, "a header");
    }
}

#[test]
fn another_machine_is_refused_with_both_values() {
    let folder = Path::new("results");
    let here = hbmark_report::samples::report().environment;
    let mut there = here.clone();
    there.cpu.logical_cores += 1;
    let error = same_machine(folder, &here, &there).unwrap_err().to_string();
    assert!(error.contains("the number of cores differs: the run had"), "{error}");
    same_machine(folder, &here, &here).unwrap();
}

#[test]
fn another_node_of_the_same_hardware_is_refused_and_a_container_is_no_machine() {
    use hbmark_core::result::{Environment, Placement};
    let on = |hostname: &str, container: Option<&str>, node: Option<&str>| Environment {
        hostname: Some(hostname.into()),
        container: container.map(str::to_owned),
        placement: node.map(|node| Placement { node: Some(node.into()), ..Placement::default() }),
        ..hbmark_report::samples::report().environment
    };
    let refused = |was: &Environment, is: &Environment| {
        same_machine(Path::new("results"), was, is).map_err(|error| error.to_string())
    };
    let error = refused(&on("a", None, None), &on("b", None, None)).unwrap_err();
    assert!(error.contains("the node differs: the run had a, this is b"), "{error}");
    let pod = |hostname: &str, node: Option<&str>| on(hostname, Some("kubernetes"), node);
    assert!(refused(&pod("pod-1", Some("a")), &pod("pod-2", Some("b"))).is_err());
    assert_eq!(refused(&pod("pod-1", Some("a")), &pod("pod-2", Some("a"))), Ok(()), "started again");
    assert_eq!(refused(&pod("pod-1", None), &pod("pod-2", None)), Ok(()), "nothing names the node");
}

#[test]
fn a_journal_of_another_plan_is_not_gone_on_with() {
    let (bytes, _) = whole();
    let folder = folder(&bytes);
    let found = reopen(folder.path()).unwrap();
    let other = RunConfig { preset: crate::measure::protocol::ProtocolPreset::Quick, ..settings() };
    let mut worker =
        JournaledWorker::new(Box::new(Scripted::new(&other, steady(10.0))), found.journal, found.entries);
    let error = crate::run::benchmark(&mut worker, &other, &model(), "hbmark run", &mut NoopObserver)
        .unwrap_err()
        .to_string();
    assert!(error.contains("does not belong to this plan"), "{error}");
}

#[test]
fn what_is_no_journal_is_refused_and_left_as_it_is() {
    let secret = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(secret.path(), "something else").unwrap();
    let refused = |folder: &Path, found: &str| {
        for error in [Journal::create(folder, &header()).err(), reopen(folder).err()] {
            let error = error.unwrap().to_string();
            assert!(error.contains(found) && error.contains("journal.jsonl is "), "{error}");
        }
    };
    for bytes in [&b"something else"[..], &[b'a'; 64 + 2], &[0; 10], b"{\"a\": 1}\n"] {
        let folder = self::folder(bytes);
        refused(folder.path(), "is another file and no journal");
        assert_eq!(std::fs::read(folder.path().join(FILE)).unwrap(), bytes);
    }
    for target in [secret.path(), Path::new("/dev/zero"), Path::new("nowhere")] {
        let folder = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(target, folder.path().join(FILE)).unwrap();
        refused(folder.path(), "is a link and no journal");
    }
    assert_eq!(std::fs::read(secret.path()).unwrap(), b"something else");
    let folder = tempfile::tempdir().unwrap();
    let pipe = std::process::Command::new("mkfifo").arg(folder.path().join(FILE)).status().unwrap();
    assert!(pipe.success());
    refused(folder.path(), "is a pipe, socket or device and no journal");
}

#[test]
fn a_line_of_millions_of_numbers_is_refused_before_they_take_memory() {
    let json = format!("[{}0]", "0,".repeat(16 << 20));
    let error = parse::<Vec<f64>>(json.as_bytes()).unwrap_err().to_string();
    assert!(error.contains("would take more than"), "{error}");
    // As they are written, there may be as many as there are.
    let json = format!("[{}0]", "41234.0,".repeat(4 << 20));
    assert_eq!(parse::<Vec<f64>>(json.as_bytes()).unwrap().len(), (4 << 20) + 1);
}

#[test]
fn a_forged_block_without_steps_is_refused_and_nothing_is_divided_by_it() {
    let folder = self::folder(&whole().0);
    let mut found = reopen(folder.path()).unwrap();
    let visited = found.entries.iter_mut().find_map(|step| match &mut step.response {
        crate::run::device_worker::DeviceResponse::Visited(visited) if !visited.blocks.is_empty() => {
            Some(visited)
        }
        _ => None,
    });
    visited.unwrap().blocks[0].step_ns.clear();
    let error = run(&mut JournaledWorker::new(Box::new(scripted()), found.journal, found.entries))
        .unwrap_err()
        .to_string();
    assert!(error.contains("journal.jsonl holds what no run measures"), "{error}");
    assert!(error.contains("the length of a block that counts of "), "{error}");
}

#[test]
fn a_claimed_folder_is_nobody_elses_until_it_is_given_back_and_an_unfinished_run_is_not_claimed() {
    let folder = tempfile::tempdir().unwrap();
    let claim = FolderLock::take(folder.path()).unwrap();
    for second in [FolderLock::take(folder.path()).err(), Journal::create(folder.path(), &header()).err()] {
        let error = second.unwrap().to_string();
        assert!(error.contains("another run is writing into this folder"), "{error}");
    }
    drop(claim);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    let error = FolderLock::take(self::folder(&whole().0).path()).unwrap_err().to_string();
    assert!(error.contains("holds an unfinished run") && error.contains("--resume"), "{error}");
}
