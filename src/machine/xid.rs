//! XID errors of NVIDIA's driver in the kernel's log.
//!
//! Enters: /dev/kmsg, which many systems let only root read. Leaves: the numbers of one GPU since the machine was started, or as far back as the
//! log reaches; `None` where it cannot be read.

use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;

/// A record of the kernel's log is at most this long. *Source*: `CONSOLE_EXT_LOG_MAX` of Linux.
const MAX_RECORD: usize = 8192;
/// Records after which reading stops: a log of 16 MiB of the shortest ones has fewer.
const MAX_RECORDS: usize = 1_000_000;
/// XIDs that are kept of a GPU.
const MAX_KEPT: usize = 64;

/// The XIDs of the GPU at this address, the same one again and again once.
pub fn since_boot(pci_bus_id: &str) -> Option<Vec<u32>> {
    let mut log =
        std::fs::File::options().read(true).custom_flags(libc::O_NONBLOCK).open("/dev/kmsg").ok()?;
    let mut record = vec![0; MAX_RECORD];
    let mut found = Vec::new();
    for _ in 0..MAX_RECORDS {
        match log.read(&mut record) {
            Ok(0) => break,
            Ok(length) => collect(&String::from_utf8_lossy(&record[..length]), pci_bus_id, &mut found),
            // Records were overwritten while they were read: the next one is there.
            Err(error) if error.raw_os_error() == Some(libc::EPIPE) => {}
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => break,
            Err(_) => return None,
        }
    }
    Some(found)
}

/// Adds the XID of a line such as `NVRM: Xid (PCI:0000:65:00): 79, pid=1234, GPU has fallen off the bus.`
fn collect(line: &str, pci_bus_id: &str, found: &mut Vec<u32>) {
    let Some((_, rest)) = line.split_once("Xid (PCI:") else { return };
    let Some((address, rest)) = rest.split_once("):") else { return };
    let digits = rest.trim_start().split(|c: char| !c.is_ascii_digit()).next().unwrap_or_default();
    let (Ok(xid), true) = (digits.parse(), same_device(address, pci_bus_id)) else { return };
    if !found.contains(&xid) && found.len() < MAX_KEPT {
        found.push(xid);
    }
}

/// The kernel writes `0000:65:00`, NVML `00000000:65:00.0`.
fn same_device(kernel: &str, nvml: &str) -> bool {
    let parts = |address: &str| -> Option<(u64, u64, u64)> {
        let address = address.split('.').next()?;
        let mut numbers = address.split(':').map(|part| u64::from_str_radix(part, 16).ok());
        Some((numbers.next()??, numbers.next()??, numbers.next()??))
    };
    parts(kernel).is_some_and(|kernel| parts(nvml) == Some(kernel))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn xids_are_those_of_the_gpu_alone_and_once_each() {
        let mut found = Vec::new();
        for line in [
            "4,1234,5678,-;NVRM: Xid (PCI:0000:65:00): 79, pid='<unknown>', GPU has fallen off the bus.",
            "4,1235,5679,-;NVRM: Xid (PCI:0000:65:00): 79, again",
            "4,1236,5680,-;NVRM: Xid (PCI:0000:ca:00): 63, of another",
            "4,1237,5681,-;NVRM: Xid (PCI:0000:65:00): 94, Contained",
            "4,1238,5682,-;NVRM: Xid (PCI:0000:65:00): none",
            "6,1,1,-;usb 1-1: Xid",
        ] {
            collect(line, "00000000:65:00.0", &mut found);
        }
        assert_eq!(found, [79, 94]);
    }
}
