//! Where a scheduler put this process, from the environment that it set.
//!
//! Enters: environment variables. Leaves: [`Placement`]; nothing where no scheduler is known.

use hbmark_core::result::{FleetTask, Placement};

/// The task of `hbmark fleet node`, as JSON.
pub const FLEET_TASK: &str = "HBMARK_FLEET_TASK";

/// The node's name, as `hbmark fleet node` was told.
pub const FLEET_NODE: &str = "HBMARK_FLEET_NODE";

/// A value longer than this is none of a scheduler's.
const MAX_VALUE: usize = 4096;

/// The placement of this process.
pub fn of_this_process() -> Option<Placement> {
    from_variables(&|name| std::env::var(name).ok())
}

/// The placement that a set of variables means.
fn from_variables(variable: &dyn Fn(&str) -> Option<String>) -> Option<Placement> {
    let text = |name: &str| variable(name).filter(|value| !value.is_empty() && value.len() <= MAX_VALUE);
    let first = |names: &[&str]| names.iter().find_map(|name| text(name));
    let number = |names: &[&str]| first(names).and_then(|value| value.parse().ok());
    let slurm = text("SLURM_JOB_ID").is_some();
    let kubernetes = text("KUBERNETES_SERVICE_HOST").is_some();
    let scheduler =
        if slurm { Some("slurm".to_owned()) } else { kubernetes.then(|| "kubernetes".to_owned()) };
    let placement = Placement {
        scheduler,
        // Names that a pod is given by the downward API have no standard; these are the usual ones.
        node: first(&[FLEET_NODE, "SLURMD_NODENAME", "NODE_NAME", "K8S_NODE_NAME"]),
        job_id: first(&["SLURM_JOB_ID"]),
        task: number(&["SLURM_PROCID", "JOB_COMPLETION_INDEX"]),
        local_task: number(&["SLURM_LOCALID"]),
        topology: first(&["SLURM_TOPOLOGY_ADDR"]),
        partition: first(&["SLURM_JOB_PARTITION"]),
        restarts: number(&["SLURM_RESTART_COUNT"]),
        pod: first(&["POD_NAME"]),
        namespace: first(&["POD_NAMESPACE"]),
        fleet: text(FLEET_TASK).and_then(|task| serde_json::from_str::<FleetTask>(&task).ok()),
    };
    (placement != Placement::default()).then_some(placement)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn placed(variables: &[(&str, &str)]) -> Option<Placement> {
        let variable = |name: &str| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        };
        from_variables(&variable)
    }

    #[test]
    fn without_a_scheduler_there_is_no_placement() {
        assert_eq!(placed(&[("PATH", "/bin")]), None);
        assert_eq!(placed(&[("NODE_NAME", "")]), None);
    }

    #[test]
    fn slurm_and_kubernetes_say_node_job_and_task() {
        let slurm = placed(&[
            ("SLURM_JOB_ID", "42"),
            ("SLURMD_NODENAME", "node3"),
            ("SLURM_PROCID", "7"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_TOPOLOGY_ADDR", "root.rack2.node3"),
            ("SLURM_RESTART_COUNT", "1"),
        ])
        .unwrap();
        assert_eq!((slurm.scheduler.as_deref(), slurm.node.as_deref()), (Some("slurm"), Some("node3")));
        assert_eq!((slurm.task, slurm.local_task, slurm.restarts), (Some(7), Some(1), Some(1)));
        let pod =
            placed(&[("KUBERNETES_SERVICE_HOST", "10.0.0.1"), ("NODE_NAME", "gpu-a"), ("POD_NAME", "p-1")]);
        let pod = pod.unwrap();
        assert_eq!((pod.scheduler.as_deref(), pod.node.as_deref()), (Some("kubernetes"), Some("gpu-a")));
    }

    #[test]
    fn the_task_of_a_fleet_is_read_and_its_node_goes_before_the_schedulers() {
        let task = FleetTask { plan: "p".into(), device: "GPU-1".into(), process: 2, ..FleetTask::default() };
        let text = serde_json::to_string(&task).unwrap();
        let found = placed(&[(FLEET_TASK, &text), (FLEET_NODE, "a"), ("SLURMD_NODENAME", "b")]).unwrap();
        assert_eq!((found.fleet, found.node.as_deref()), (Some(task), Some("a")));
        assert_eq!(placed(&[(FLEET_TASK, "{")]), None);
    }
}
