use super::*;
use crate::nodes;
use crate::plan::Plan;

fn manifest(list: &str) -> Manifest {
    Manifest::new(Plan::open("quick-ceiling").unwrap(), nodes::parse(list).unwrap())
}

fn site() -> Site {
    Site { folder: "/shared/fleet one".into(), ..Site::default() }
}

fn text(launcher: Launcher, name: &str) -> String {
    let files = files(launcher, &manifest("node[1-2]"), &site()).unwrap();
    files.into_iter().find(|file| file.name == name).unwrap().text
}

#[test]
fn slurm_gets_one_job_a_node_with_a_time_limit_and_no_kill_on_bad_exit() {
    insta::assert_snapshot!(text(Launcher::Slurm, "fleet.sbatch") + &text(Launcher::Slurm, "submit.sh"));
}

#[test]
fn kubernetes_gets_one_job_a_node_that_yields_to_everything() {
    insta::assert_snapshot!(text(Launcher::Kubernetes, "fleet.yaml"));
}

#[test]
fn ssh_gets_one_script_with_a_time_limit() {
    insta::assert_snapshot!(text(Launcher::Ssh, "ssh.sh"));
}

#[test]
fn the_shell_finds_no_fault_in_the_scripts_and_runs_what_is_meant() {
    let folder = tempfile::tempdir().unwrap();
    let bin = folder.path().join("bin");
    std::fs::create_dir(&bin).unwrap();
    let record =
        "#!/bin/sh\nfor word; do printf '<%s>' \"$word\"; done >> \"$RECORD\"\necho >> \"$RECORD\"\n";
    for program in ["ssh", "sbatch"] {
        write_executable(&bin.join(program), record);
    }
    let out = folder.path().join("out it's");
    std::fs::create_dir(&out).unwrap();
    let site = Site { folder: out.to_str().unwrap().into(), ..Site::default() };
    for (launcher, script) in [(Launcher::Slurm, "submit.sh"), (Launcher::Ssh, "ssh.sh")] {
        for file in files(launcher, &manifest("node[1-2]"), &site).unwrap() {
            write_executable(&out.join(file.name), &file.text);
        }
        let seen = folder.path().join("seen");
        let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
        let status = std::process::Command::new("sh")
            .arg(out.join(script))
            .env("PATH", path)
            .env("RECORD", &seen)
            .env("HBMARK_PARALLEL", "1")
            .status()
            .unwrap();
        assert!(status.success());
        // ssh's output goes to the log of its node, and so does what it would have recorded: it is read back from $RECORD.
        let seen = std::fs::read_to_string(&seen).unwrap();
        for node in ["node1", "node2"] {
            assert!(
                seen.contains(&format!("{node}>")) || seen.contains(&format!("<--nodelist={node}>")),
                "{seen}"
            );
        }
    }
    let seen = std::fs::read_to_string(folder.path().join("seen")).unwrap();
    assert_eq!(seen.lines().count(), 4, "{seen}");
    assert!(seen.contains("<hbmark fleet node --out "), "{seen}");
    assert!(out.join("logs/node2.out").exists());
}

fn write_executable(path: &std::path::Path, text: &str) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::write(path, text).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
}
