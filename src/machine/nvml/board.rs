//! Which board a GPU is, and what it has suffered: serial, part number, VBIOS, slot, replaced rows of memory, XIDs, NVLink fabric.
//!
//! Enters: NVML's handle. Leaves: [`Board`]. Each fact is alone: what a driver, a product or a container does not tell is `None`.

#![expect(unsafe_code, reason = "three calls of NVML that its wrapper has no safe form of")]

use std::mem::MaybeUninit;

use nvml_wrapper::{Device, Nvml};

use crate::machine::xid;
use hbmark_core::result::{Board, Fabric, RemappedRows};

/// NVML's `NVML_SUCCESS`.
const SUCCESS: u32 = 0;
/// NVML's `NVML_GPU_FABRIC_STATE_COMPLETED`: before, the other fields mean nothing.
const FABRIC_COMPLETED: u8 = 3;

/// Reads the board of a GPU.
pub(super) fn describe(nvml: &Nvml, device: &Device<'_>) -> Board {
    let pci_bus_id = device.pci_info().ok().map(|pci| pci.bus_id);
    Board {
        serial: device.serial().ok().filter(|serial| !serial.is_empty()),
        part_number: device.board_part_number().ok().filter(|part| !part.is_empty()),
        vbios: device.vbios_version().ok(),
        module_id: module_id(nvml, device),
        remapped_rows: remapped_rows(nvml, device),
        xids: pci_bus_id.as_deref().and_then(xid::since_boot),
        fabric: fabric(nvml, device),
        pci_bus_id,
    }
}

fn module_id(nvml: &Nvml, device: &Device<'_>) -> Option<u32> {
    let call = nvml.lib().nvmlDeviceGetModuleId.as_ref().ok()?;
    let mut id = 0;
    // SAFETY: the handle belongs to `nvml`, which is open; NVML writes one number to the address of one.
    let status = unsafe { call(device.handle(), &raw mut id) };
    (status == SUCCESS).then_some(id)
}

fn remapped_rows(nvml: &Nvml, device: &Device<'_>) -> Option<RemappedRows> {
    let call = nvml.lib().nvmlDeviceGetRemappedRows.as_ref().ok()?;
    let (mut correctable, mut uncorrectable, mut pending, mut failed) = (0, 0, 0, 0);
    // SAFETY: the handle belongs to `nvml`, which is open; NVML writes a number to each of four addresses.
    let status = unsafe {
        call(device.handle(), &raw mut correctable, &raw mut uncorrectable, &raw mut pending, &raw mut failed)
    };
    let rows = RemappedRows { correctable, uncorrectable, pending: pending != 0, failed: failed != 0 };
    (status == SUCCESS).then_some(rows)
}

fn fabric(nvml: &Nvml, device: &Device<'_>) -> Option<Fabric> {
    let call = nvml.lib().nvmlDeviceGetGpuFabricInfo.as_ref().ok()?;
    let mut info = MaybeUninit::zeroed();
    // SAFETY: the handle belongs to `nvml`, which is open; NVML fills a struct of the type that the call is declared with.
    let status = unsafe { call(device.handle(), info.as_mut_ptr()) };
    if status != SUCCESS {
        return None;
    }
    // SAFETY: plain numbers, for which zeros are values too; NVML has filled them.
    let info = unsafe { info.assume_init() };
    let uuid = u128::from_be_bytes(info.clusterUuid);
    let (cluster, known) = (format!("{uuid:032x}"), info.state == FABRIC_COMPLETED && uuid != 0);
    known.then_some(Fabric { cluster, clique: info.cliqueId })
}
