//! Unknown numbers are null in files, never 0.
//!
//! Enters and leaves: a value whose default means "unknown" in memory, because no machine has 0 cores and no step moves 0 bytes.
//! For `#[serde(with = "null_as_default")]`. A 0 in files of earlier versions means the same.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Writes a value, or null for the default.
///
/// # Errors
/// Those of the serializer.
pub fn serialize<T, S>(value: &T, serializer: S) -> Result<S::Ok, S::Error>
where
    T: Serialize + Default + PartialEq,
    S: Serializer,
{
    Some(value).filter(|value| **value != T::default()).serialize(serializer)
}

/// Reads a value, or null as the default.
///
/// # Errors
/// Those of the deserializer.
pub fn deserialize<'de, T, D>(deserializer: D) -> Result<T, D::Error>
where
    T: Deserialize<'de> + Default,
    D: Deserializer<'de>,
{
    Option::<T>::deserialize(deserializer).map(Option::unwrap_or_default)
}

#[cfg(test)]
mod tests {
    use crate::result::CpuEnvironment;

    #[test]
    fn cores_that_nobody_counted_are_null_in_a_file_and_not_0() {
        let unknown = serde_json::to_value(CpuEnvironment::default()).unwrap();
        assert_eq!((&unknown["logical_cores"], &unknown["usable_cores"]), (&().into(), &().into()));
        assert_eq!(serde_json::from_value::<CpuEnvironment>(unknown).unwrap(), CpuEnvironment::default());
        let known = CpuEnvironment { logical_cores: 8, usable_cores: 4, ..CpuEnvironment::default() };
        let written = serde_json::to_value(&known).unwrap();
        assert_eq!(written["usable_cores"], 4);
        assert_eq!(serde_json::from_value::<CpuEnvironment>(written).unwrap(), known);
    }
}
