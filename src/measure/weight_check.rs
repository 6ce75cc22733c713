//! Whether the weights that were loaded are those that were asked for, checked before anything is timed.
//!
//! Enters: the tensors as a session reports them, and as the model lists them in the dtype asked for. Leaves: nothing, or the first
//! difference. The time of f32 weights labelled bf16 is twice too long, and f16 labelled bf16 has the same bytes and other
//! arithmetic: neither shows in the time alone. No weights are read.

use hbmark_core::model::{Inventory, Role};
use hbmark_core::result::Cause;
use hbmark_core::units::Bytes;

/// How far the bytes of matrices may be from those listed: padding and scales stay far below.
const SIZE_TOLERANCE: f64 = 0.05;
/// Share of the matrices' bytes that may be stored in another dtype.
const MAX_OTHER_STORAGE_SHARE: f64 = 0.05;

/// Compares the loaded tensors with the listed ones.
pub fn weights(found: &Inventory, wanted: &Inventory) -> Result<(), Cause> {
    let matrices = |inventory: &Inventory| -> Bytes {
        inventory.tensors.iter().filter(|t| is_matrix(t.role)).map(|t| t.bytes).sum()
    };
    let (have, want) = (matrices(found), matrices(wanted));
    if want.0 == 0 {
        return Ok(());
    }
    let ratio = have.as_f64() / want.as_f64();
    if (ratio - 1.0).abs() > SIZE_TOLERANCE {
        return Err(Cause::WeightsSize { found_bytes: have, wanted_bytes: want });
    }
    let storage = |inventory: &Inventory| -> Vec<String> {
        let mut names: Vec<String> =
            inventory.tensors.iter().filter(|t| is_matrix(t.role)).map(|t| t.storage.clone()).collect();
        names.sort();
        names.dedup();
        names
    };
    let asked = storage(wanted);
    let stray = || found.tensors.iter().filter(|t| is_matrix(t.role) && !asked.contains(&t.storage));
    let bytes: Bytes = stray().map(|t| t.bytes).sum();
    match stray().next() {
        Some(first) if bytes.as_f64() > MAX_OTHER_STORAGE_SHARE * have.as_f64() => {
            Err(Cause::WeightsStorage { bytes, found: first.storage.clone(), wanted: asked.join(" or ") })
        }
        _ => Ok(()),
    }
}

fn is_matrix(role: Role) -> bool {
    matches!(role, Role::Embedding | Role::Head | Role::Matrix | Role::Expert | Role::SharedExpert)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hbmark_core::model::{Dtype, test_shapes};

    fn stored(dtype: Dtype) -> Inventory {
        test_shapes::smollm2_135m().inventory(dtype)
    }

    #[test]
    fn weights_as_asked_for_pass_in_every_dtype() {
        for dtype in [
            Dtype::F32,
            Dtype::Bf16,
            Dtype::F16,
            Dtype::Int8,
            Dtype::Int4,
            Dtype::Q8_0,
            Dtype::Q4_0,
            Dtype::Q4K,
        ] {
            assert_eq!(weights(&stored(dtype), &stored(dtype)), Ok(()), "{dtype}");
        }
    }

    #[test]
    fn f32_for_bf16_is_named_by_its_size() {
        let fault = weights(&stored(Dtype::F32), &stored(Dtype::Bf16)).unwrap_err();
        assert!(
            matches!(fault, Cause::WeightsSize { found_bytes, wanted_bytes } if found_bytes.0 == 2 * wanted_bytes.0),
            "{fault}"
        );
    }

    #[test]
    fn f16_for_bf16_is_named_by_its_storage_though_no_byte_is_out_of_place() {
        let fault = weights(&stored(Dtype::F16), &stored(Dtype::Bf16)).unwrap_err();
        assert!(
            matches!(&fault, Cause::WeightsStorage { found, wanted, .. } if found == "f16" && wanted == "bf16")
        );
    }

    #[test]
    fn padding_and_one_small_tensor_in_another_storage_are_nothing() {
        let wanted = stored(Dtype::Bf16);
        let mut found = wanted.clone();
        let small = found.tensors.iter_mut().find(|t| t.role == Role::Matrix).unwrap();
        small.storage = "f32".into();
        small.bytes = Bytes(small.bytes.0 * 2);
        assert_eq!(weights(&found, &wanted), Ok(()));
        let layer = found.tensors.iter().position(|t| t.role == Role::Embedding).unwrap();
        found.tensors.remove(layer);
        assert!(weights(&found, &wanted).is_err(), "a table that is missing is not a padding");
    }
}
