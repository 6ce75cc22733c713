//! The processors that this process may use.
//!
//! Enters: /proc and /sys. Leaves: their numbers, and the order in which threads should take them.

use super::environment::field;
use super::system_files::Root;

/// No machine has a processor with such a number; a list that names one is not read.
const TOO_HIGH: usize = 1 << 16;

/// The folders of the processors.
const FOLDER: &str = "sys/devices/system/cpu";

/// The processors that this process may run on and that are running, by number; none where the system does not say.
pub fn allowed(root: &Root) -> Vec<usize> {
    allowed_by(root, "proc/self/status")
}

/// The same for this thread, which may be bound to some of them.
pub fn allowed_to_thread(root: &Root) -> Vec<usize> {
    allowed_by(root, "proc/thread-self/status")
}

fn allowed_by(root: &Root, status: &str) -> Vec<usize> {
    let status = root.read(status).unwrap_or_default();
    let mut processors = field(&status, "Cpus_allowed_list").and_then(list).unwrap_or_default();
    // The mask may have those that could be plugged in.
    if let Some(online) = root.line(&format!("{FOLDER}/online")).as_deref().and_then(list) {
        processors.retain(|processor| online.binary_search(processor).is_ok());
    }
    processors
}

/// The folder of a processor.
pub fn folder(processor: usize) -> String {
    format!("{FOLDER}/cpu{processor}")
}

/// The same processors with one of each core before the second ones, which share a core's units with the first.
pub fn cores_first(root: &Root, mut processors: Vec<usize>) -> Vec<usize> {
    let known = processors.clone();
    let place = |processor: &usize| {
        let siblings = root.line(&format!("{}/topology/thread_siblings_list", folder(*processor)));
        let siblings = siblings.as_deref().and_then(list).unwrap_or_default();
        siblings.iter().filter(|sibling| *sibling < processor && known.contains(sibling)).count()
    };
    processors.sort_by_cached_key(|processor| (place(processor), *processor));
    processors
}

/// The numbers of a kernel list such as `0-3,8`.
fn list(text: &str) -> Option<Vec<usize>> {
    let mut numbers = Vec::new();
    for range in text.trim().split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (usize, usize) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        if first > last || last >= TOO_HIGH {
            return None;
        }
        numbers.extend(first..=last);
    }
    Some(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::system_files::fake_root;

    #[test]
    fn kernel_lists_are_read() {
        assert_eq!(list("0-3,8\n"), Some(vec![0, 1, 2, 3, 8]));
        assert_eq!(list("7"), Some(vec![7]));
        for wrong in ["3-0", "", "0-99999999999", "x"] {
            assert_eq!(list(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn processors_that_are_not_running_are_not_allowed() {
        let status = ("proc/self/status", "Cpus_allowed:\tff\nCpus_allowed_list:\t2-127\n");
        let (_keep, root) = fake_root(&[status, ("sys/devices/system/cpu/online", "0-3\n")]);
        assert_eq!(allowed(&root), [2, 3]);
        let (_keep, root) = fake_root(&[status]);
        assert_eq!(allowed(&root).len(), 126);
        assert!(allowed_to_thread(&root).is_empty());
    }

    #[test]
    fn threads_have_cores_of_their_own_before_they_share_one() {
        let siblings = |numbers: [&'static str; 4]| -> Vec<(String, &'static str)> {
            (0..4).map(|n| (format!("{}/topology/thread_siblings_list", folder(n)), numbers[n])).collect()
        };
        let ordered = |files: &[(String, &'static str)], processors: &[usize]| {
            let files: Vec<(&str, &str)> = files.iter().map(|(path, text)| (path.as_str(), *text)).collect();
            let (_keep, root) = fake_root(&files);
            cores_first(&root, processors.to_vec())
        };
        let neighbours = siblings(["0-1", "0-1", "2-3", "2-3"]);
        assert_eq!(ordered(&neighbours, &[0, 1, 2, 3]), [0, 2, 1, 3]);
        assert_eq!(ordered(&neighbours, &[1, 2, 3]), [1, 2, 3], "the first of its core is another's");
        assert_eq!(ordered(&siblings(["0,2", "1,3", "0,2", "1,3"]), &[0, 1, 2, 3]), [0, 1, 2, 3]);
        assert_eq!(ordered(&[], &[4, 5]), [4, 5], "nothing is known");
    }
}
