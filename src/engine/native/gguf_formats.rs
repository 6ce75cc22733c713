//! Which formats of a GGUF file's tensors the kernels of a GPU have where they stand.
//!
//! Enters: the tensors of a file, by its own names. Leaves: a refusal that names the first that no kernel takes.

use std::collections::HashMap;

use super::refuse;
use crate::engine::{DeviceChoice, EngineError};
use crate::weights::Packing;
use crate::weights::gguf::packing;
use hbmark_core::model::{Inventory, Role, TensorInfo};

/// Checks the tensors of a file.
pub(super) fn check(inventory: &Inventory, device: DeviceChoice) -> Result<(), EngineError> {
    // By layer, and whether it is down: the first format of its experts.
    let mut experts: HashMap<(Option<usize>, bool), Packing> = HashMap::new();
    for TensorInfo { name, storage, role, layer, .. } in &inventory.tensors {
        let packing = packing(storage);
        let attended = [".attn_q.", ".attn_k.", ".attn_v."].iter().any(|part| name.contains(part));
        match role {
            Role::Matrix if attended && matches!(packing, Packing::F16 | Packing::F32) => {
                return refuse(
                    format!("`{name}` in {storage} on {device}"),
                    "what makes queries, keys and values in a GGUF file must be bf16 or quantised there, as the cache beside it is bf16",
                );
            }
            Role::Embedding | Role::Head if packing == Packing::Mxfp4 => {
                return refuse(
                    format!("`{name}` in {storage} on {device}"),
                    "its kernels have tables and heads in bf16, f16, f32, q8_0, q6_k, q5_k, q4_k and q4_0",
                );
            }
            Role::Expert | Role::SharedExpert => {
                let is_down = name.contains("down");
                let alike = *experts.entry((*layer, is_down)).or_insert(packing) == packing;
                let other = experts.get(&(*layer, !is_down)).copied().unwrap_or(packing);
                if !alike || other != packing && !(is_of_ggml(other) && is_of_ggml(packing)) {
                    return refuse(
                        format!("`{name}` in {storage} beside other experts of its layer on {device}"),
                        "all of them, the shared one included, must have one format for gate and up and one for down, which may differ among q8_0, q6_k, q5_k, q4_k and q4_0",
                    );
                }
            }
            _ => {}
        }
    }
    Ok(())
}

fn is_of_ggml(packing: Packing) -> bool {
    matches!(packing, Packing::Q8_0 | Packing::Q4_0 | Packing::Super(_))
}
