use super::*;

/// A program in the place of hbmark: a shell script, with `$out` and `$task` set.
fn node(folder: &Path, script: &str, devices: u32) -> (PathBuf, Plan, Vec<NodeDevice>) {
    use std::os::unix::fs::PermissionsExt;
    let program = folder.join("program");
    let head = "#!/bin/sh\nfor word; do out=$word; done\ntask=$HBMARK_FLEET_TASK\n";
    std::fs::write(&program, format!("{head}{script}\n")).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    let plan = Plan {
        name: "test".into(),
        processes: 3,
        at_once: true,
        gpus_per_node: devices,
        time_limit_minutes: 5,
        arguments: vec!["--quick".into()],
        confirms: None,
    };
    let devices = (0..devices).map(|slot| NodeDevice { name: format!("GPU-{slot}"), slot }).collect();
    (program, plan, devices)
}

fn run(folder: &Path, script: &str) -> NodeRecord {
    let (program, plan, devices) = node(folder, script, 2);
    let interrupts = Interrupts::default();
    let task = NodeTask {
        program,
        folder: folder.join("n1"),
        node: "n1".into(),
        plan: &plan,
        devices,
        emulated: false,
        interrupts,
    };
    run_node(&task, &|_| ()).unwrap()
}

const WRITE: &str = "echo \"$CUDA_VISIBLE_DEVICES $task\" > \"$out/result.json\"";

#[test]
fn each_gpu_gets_its_processes_chosen_by_uuid() {
    let folder = tempfile::tempdir().unwrap();
    let record = run(folder.path(), WRITE);
    assert!(record.tasks.iter().all(|task| task.finished == 3 && task.failures.is_empty()), "{record:?}");
    let text = std::fs::read_to_string(folder.path().join("n1/GPU-1/run-2/result.json")).unwrap();
    assert!(text.starts_with("GPU-1 ") && text.contains("\"process\":2"), "{text}");
    assert!(!folder.path().join("n1/GPU-1/run-2.unfinished").exists());
    let saved: NodeRecord =
        serde_json::from_str(&std::fs::read_to_string(folder.path().join("n1/node.json")).unwrap()).unwrap();
    assert_eq!(saved, record);
}

#[test]
fn a_failed_run_costs_itself_alone_and_is_named_with_its_last_line() {
    let folder = tempfile::tempdir().unwrap();
    let script =
        format!("case $task in *GPU-0*'process\":2'*) echo 'error: no device' >&2; exit 2;; esac\n{WRITE}");
    let record = run(folder.path(), &script);
    assert_eq!((record.tasks[0].finished, record.tasks[1].finished), (2, 3));
    assert_eq!(record.tasks[0].failures, ["run 2: exit status: 2: error: no device"]);
}

#[test]
fn started_again_only_what_is_not_finished_is_run_and_a_journal_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    // What `hbmark run` leaves that is asked to stop.
    let script = "case $task in *'process\":3'*) touch \"$out/journal.jsonl\"; echo part > \"$out/result.json\"; exit 143;; esac\necho 1 > \"$out/result.json\"";
    let first = run(folder.path(), script);
    assert_eq!(first.tasks.iter().map(|task| task.finished).collect::<Vec<_>>(), [2, 2]);
    let script = "echo \"$*\" > \"$out/result.json\"; rm -f \"$out/journal.jsonl\"";
    let second = run(folder.path(), script);
    assert!(second.tasks.iter().all(|task| task.finished == 3), "{second:?}");
    let read = |name: &str| std::fs::read_to_string(folder.path().join("n1/GPU-0").join(name)).unwrap();
    assert_eq!(read("run-1/result.json"), "1\n", "it was left alone");
    assert!(read("run-3/result.json").starts_with("run --resume "), "{}", read("run-3/result.json"));
}

#[test]
fn what_cannot_go_on_is_kept_aside_and_begun_anew() {
    let folder = tempfile::tempdir().unwrap();
    run(folder.path(), "touch \"$out/journal.jsonl\"; exit 137");
    let script = format!("case $* in *--resume*) exit 2;; esac\n{WRITE}");
    let record = run(folder.path(), &script);
    assert!(record.tasks.iter().all(|task| task.finished == 3), "{record:?}");
    assert!(folder.path().join("n1/GPU-0/run-1.abandoned-1.unfinished/journal.jsonl").exists());
}

#[test]
fn a_run_that_time_was_up_for_keeps_its_journal_and_the_next_one_is_not_begun() {
    let folder = tempfile::tempdir().unwrap();
    let (program, plan, devices) = node(folder.path(), "exec sleep 600", 1);
    let (interrupts, at) = (Interrupts::default(), folder.path().join("n1"));
    let task = NodeTask {
        program,
        folder: at.clone(),
        node: "n1".into(),
        plan: &plan,
        devices,
        emulated: true,
        interrupts,
    };
    let state = NodeState { deadline: Instant::now(), ..NodeState::new(&task, &|_| ()) };
    let unfinished = at.join("GPU-0/run-1.unfinished");
    std::fs::create_dir_all(&unfinished).unwrap();
    std::fs::write(unfinished.join(JOURNAL), "").unwrap();
    let why = state.finish(0, 1, &at.join("GPU-0")).unwrap_err();
    assert!(why.contains("signal: 15"), "{why}");
    assert!(unfinished.join(JOURNAL).exists());
    assert_eq!(std::fs::read_dir(at.join("GPU-0")).unwrap().count(), 1, "nothing was abandoned");
    state.run(0, 2);
    assert!(!at.join("GPU-0/run-2.unfinished").exists());
    assert!(state.record().tasks[0].failures.is_empty(), "{:?}", state.record());
}

#[test]
fn two_tasks_of_one_node_do_not_work_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().join("n1");
    std::fs::create_dir_all(&at).unwrap();
    let held = std::fs::File::create(at.join(".hbmark.lock")).unwrap();
    held.lock().unwrap();
    let (program, plan, devices) = node(folder.path(), WRITE, 1);
    let interrupts = Interrupts::default();
    let task =
        NodeTask { program, folder: at, node: "n1".into(), plan: &plan, devices, emulated: true, interrupts };
    assert!(matches!(run_node(&task, &|_| ()), Err(FleetNodeError::Locked { .. })));
}
