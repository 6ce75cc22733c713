//! JSON read within a memory budget, and without duplicate keys.
//!
//! Enters: a text, or a reader, and a budget in bytes. Leaves: any [`Deserialize`] type, or an error of serde_json. A cap on the file
//! alone is not enough: `[0,0,0...` is two bytes a value in the file and 72 in a [`serde_json::Value`]. So the deserializer is wrapped, and
//! every list, map and string is charged with its size in memory (serde gives the type) before it grows. Depth is limited to 128 by
//! serde_json.

use std::cell::Cell;
use std::collections::HashSet;
use std::fmt;
use std::io::{BufReader, Read};
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::{
    DeserializeOwned, DeserializeSeed, Deserializer, EnumAccess, Error, IntoDeserializer as _, MapAccess,
    SeqAccess, VariantAccess, Visitor,
};

/// Elements that a collection allocates room for at first. *Source*: `RawVec` of the standard library, for elements of up to 1 KiB.
const FIRST_CAPACITY: usize = 4;
/// Bookkeeping of an entry in a map beside key and value: its hash, its place in the index.
const ENTRY_BYTES: usize = 24;
/// Bookkeeping of an allocation.
const ALLOCATION_BYTES: usize = 16;
/// A struct's keys are read as field numbers, a map's as strings: only those of at least this size are kept.
const KEPT_KEY_BYTES: usize = size_of::<String>();

/// Memory that may still be taken.
#[derive(Debug)]
pub struct Budget {
    whole: usize,
    left: Cell<usize>,
}

impl Budget {
    /// A budget of so many bytes.
    pub fn new(bytes: usize) -> Self {
        Self { whole: bytes, left: Cell::new(bytes) }
    }

    /// Charges memory before it is allocated.
    ///
    /// # Errors
    /// When less than that is left.
    pub fn charge(&self, bytes: usize) -> Result<(), Exhausted> {
        let left = self.left.get().checked_sub(bytes).ok_or(Exhausted { budget: self.whole })?;
        self.left.set(left);
        Ok(())
    }

    fn charge_text<E: Error>(&self, text: &str) -> Result<(), E> {
        self.charge(text.len() + ALLOCATION_BYTES).map_err(E::custom)
    }
}

/// What is wrong with a text, for a person who did not write it.
pub fn problem(error: &serde_json::Error) -> String {
    let (line, column) = (error.line(), error.column());
    let place = if line > 1 { format!("line {line}, column {column}") } else { format!("column {column}") };
    if error.is_eof() {
        return "it ends in the middle; was it cut off?".to_owned();
    }
    if error.is_syntax() {
        return format!("it is not JSON from {place} on");
    }
    let all = error.to_string();
    let what = all.strip_suffix(&format!(" at line {line} column {column}"));
    what.map_or_else(|| all.clone(), |what| format!("{what} ({place})"))
}

/// More values than the budget has memory for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("its values would take more than {} MiB of memory", budget >> 20)]
pub struct Exhausted {
    budget: usize,
}

/// Reads one JSON document, to its end.
///
/// # Errors
/// When it is not JSON of this type, repeats a key, or takes more than `budget` bytes in memory.
pub fn from_str<'de, T: Deserialize<'de>>(text: &'de str, budget: usize) -> Result<T, serde_json::Error> {
    document(serde_json::Deserializer::from_str(text), budget)
}

/// As [`from_str`], without the text in memory. Takes a reader as a trait object, so that the code for a large type is compiled once, and not for
/// each kind of reader.
///
/// # Errors
/// As [`from_str`], and when reading fails.
pub fn from_reader<T: DeserializeOwned>(
    reader: &mut dyn Read,
    budget: usize,
) -> Result<T, serde_json::Error> {
    document(serde_json::Deserializer::from_reader(BufReader::with_capacity(1 << 16, reader)), budget)
}

fn document<'de, R: serde_json::de::Read<'de>, T: Deserialize<'de>>(
    mut inner: serde_json::Deserializer<R>,
    budget: usize,
) -> Result<T, serde_json::Error> {
    let value = T::deserialize(Metered { inner: &mut inner, budget: &Budget::new(budget) })?;
    inner.end()?;
    Ok(value)
}

/// Reads the documents of a text one after the other; `take` gets each.
///
/// # Errors
/// As [`from_str`].
pub fn each<'de, T: Deserialize<'de>>(
    text: &'de str,
    budget: usize,
    mut take: impl FnMut(T),
) -> Result<(), serde_json::Error> {
    let budget = Budget::new(budget);
    let mut inner = serde_json::Deserializer::from_str(text);
    while inner.end().is_err() {
        take(T::deserialize(Metered { inner: &mut inner, budget: &budget })?);
        // The elements of a list are charged with it; the document is an element of the caller's list.
        budget.charge(2 * size_of::<T>()).map_err(serde_json::Error::custom)?;
    }
    Ok(())
}

/// A deserializer, visitor, seed or enum of serde that charges a budget.
struct Metered<'b, T> {
    inner: T,
    budget: &'b Budget,
}

macro_rules! forward {
    ($($method:ident($($argument:ident: $kind:ty),*);)*) => {$(
        fn $method<V: Visitor<'de>>(self $(, $argument: $kind)*, visitor: V) -> Result<V::Value, D::Error> {
            self.inner.$method($($argument,)* Metered { inner: visitor, budget: self.budget })
        }
    )*};
}

impl<'de, D: Deserializer<'de>> Deserializer<'de> for Metered<'_, D> {
    type Error = D::Error;

    forward! {
        deserialize_any(); deserialize_bool(); deserialize_i8(); deserialize_i16(); deserialize_i32(); deserialize_i64();
        deserialize_i128(); deserialize_u8(); deserialize_u16(); deserialize_u32(); deserialize_u64(); deserialize_u128();
        deserialize_f32(); deserialize_f64(); deserialize_char(); deserialize_str(); deserialize_string(); deserialize_bytes();
        deserialize_byte_buf(); deserialize_option(); deserialize_unit(); deserialize_unit_struct(name: &'static str);
        deserialize_newtype_struct(name: &'static str); deserialize_seq(); deserialize_tuple(len: usize);
        deserialize_tuple_struct(name: &'static str, len: usize); deserialize_map();
        deserialize_struct(name: &'static str, fields: &'static [&'static str]);
        deserialize_enum(name: &'static str, variants: &'static [&'static str]); deserialize_identifier();
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        // Nothing of it is kept.
        self.inner.deserialize_ignored_any(visitor)
    }

    fn is_human_readable(&self) -> bool {
        self.inner.is_human_readable()
    }
}

macro_rules! visit {
    ($($method:ident($kind:ty);)*) => {$(
        fn $method<E: Error>(self, value: $kind) -> Result<V::Value, E> {
            self.inner.$method(value)
        }
    )*};
}

impl<'de, V: Visitor<'de>> Visitor<'de> for Metered<'_, V> {
    type Value = V::Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.expecting(f)
    }

    visit! {
        visit_bool(bool); visit_i64(i64); visit_i128(i128); visit_u64(u64); visit_u128(u128); visit_f64(f64);
        visit_bytes(&[u8]); visit_borrowed_bytes(&'de [u8]);
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<V::Value, E> {
        self.budget.charge_text(text)?;
        self.inner.visit_str(text)
    }

    fn visit_borrowed_str<E: Error>(self, text: &'de str) -> Result<V::Value, E> {
        self.budget.charge_text(text)?;
        self.inner.visit_borrowed_str(text)
    }

    fn visit_none<E: Error>(self) -> Result<V::Value, E> {
        self.inner.visit_none()
    }

    fn visit_unit<E: Error>(self) -> Result<V::Value, E> {
        self.inner.visit_unit()
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<V::Value, D::Error> {
        self.inner.visit_some(Metered { inner: deserializer, budget: self.budget })
    }

    fn visit_newtype_struct<D: Deserializer<'de>>(self, deserializer: D) -> Result<V::Value, D::Error> {
        self.inner.visit_newtype_struct(Metered { inner: deserializer, budget: self.budget })
    }

    fn visit_seq<A: SeqAccess<'de>>(self, access: A) -> Result<V::Value, A::Error> {
        self.inner.visit_seq(Collection::new(access, self.budget))
    }

    fn visit_map<A: MapAccess<'de>>(self, access: A) -> Result<V::Value, A::Error> {
        self.inner.visit_map(Collection::new(access, self.budget))
    }

    fn visit_enum<A: EnumAccess<'de>>(self, access: A) -> Result<V::Value, A::Error> {
        self.inner.visit_enum(Metered { inner: access, budget: self.budget })
    }
}

impl<'de, S: DeserializeSeed<'de>> DeserializeSeed<'de> for Metered<'_, S> {
    type Value = S::Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<S::Value, D::Error> {
        self.inner.deserialize(Metered { inner: deserializer, budget: self.budget })
    }
}

impl<'de, 'b, A: EnumAccess<'de>> EnumAccess<'de> for Metered<'b, A> {
    type Error = A::Error;
    type Variant = Metered<'b, A::Variant>;

    fn variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<(S::Value, Self::Variant), A::Error> {
        let (value, inner) = self.inner.variant_seed(seed)?;
        Ok((value, Metered { inner, budget: self.budget }))
    }
}

impl<'de, A: VariantAccess<'de>> VariantAccess<'de> for Metered<'_, A> {
    type Error = A::Error;

    fn unit_variant(self) -> Result<(), A::Error> {
        self.inner.unit_variant()
    }

    fn newtype_variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<S::Value, A::Error> {
        self.inner.newtype_variant_seed(Metered { inner: seed, budget: self.budget })
    }

    fn tuple_variant<V: Visitor<'de>>(self, len: usize, visitor: V) -> Result<V::Value, A::Error> {
        self.inner.tuple_variant(len, Metered { inner: visitor, budget: self.budget })
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, A::Error> {
        self.inner.struct_variant(fields, Metered { inner: visitor, budget: self.budget })
    }
}

/// A list or an object, whose growth is charged.
struct Collection<'b, A> {
    inner: A,
    budget: &'b Budget,
    held: usize,
    capacity: usize,
    /// Size of the last key in memory.
    key_bytes: usize,
    /// The keys so far, and what they cost: refunded at the end.
    keys: HashSet<String>,
    keys_charged: usize,
}

impl<'b, A> Collection<'b, A> {
    fn new(inner: A, budget: &'b Budget) -> Self {
        Self { inner, budget, held: 0, capacity: 0, key_bytes: 0, keys: HashSet::new(), keys_charged: 0 }
    }

    /// Charges one more element; the capacity doubles when it is full.
    fn grow<E: Error>(&mut self, element_bytes: usize) -> Result<(), E> {
        if self.held == self.capacity {
            let capacity = (2 * self.capacity).max(FIRST_CAPACITY);
            let grown = (capacity - self.capacity).saturating_mul(element_bytes);
            let fixed = if self.capacity == 0 && element_bytes > 0 { ALLOCATION_BYTES } else { 0 };
            self.budget.charge(grown.saturating_add(fixed)).map_err(E::custom)?;
            self.capacity = capacity;
        }
        self.held += 1;
        Ok(())
    }

    fn insert_key<E: Error>(&mut self, key: &str) -> Result<(), E> {
        let cost = key.len() + 2 * size_of::<String>() + ALLOCATION_BYTES;
        self.budget.charge(cost).map_err(E::custom)?;
        self.keys_charged += cost;
        if self.keys.insert(key.to_owned()) {
            return Ok(());
        }
        let shown: String = key.chars().take(80).collect();
        Err(E::custom(format_args!("the key {shown:?} appears twice in one object")))
    }
}

impl<A> Drop for Collection<'_, A> {
    fn drop(&mut self) {
        self.budget.left.set(self.budget.left.get().saturating_add(self.keys_charged));
    }
}

impl<'de, A: SeqAccess<'de>> SeqAccess<'de> for Collection<'_, A> {
    type Error = A::Error;

    fn next_element_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, A::Error> {
        let element = self.inner.next_element_seed(Metered { inner: seed, budget: self.budget })?;
        if element.is_some() {
            self.grow(size_of::<S::Value>())?;
        }
        Ok(element)
    }
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for Collection<'_, A> {
    type Error = A::Error;

    fn next_key_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, A::Error> {
        self.key_bytes = size_of::<S::Value>();
        if self.key_bytes < KEPT_KEY_BYTES {
            return self.inner.next_key_seed(seed);
        }
        let text = Metered { inner: PhantomData::<String>, budget: self.budget };
        let Some(key) = self.inner.next_key_seed(text)? else { return Ok(None) };
        self.insert_key(&key)?;
        seed.deserialize(key.into_deserializer()).map(Some)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, A::Error> {
        if self.key_bytes >= KEPT_KEY_BYTES {
            self.grow(self.key_bytes + size_of::<S::Value>() + ENTRY_BYTES)?;
        }
        self.inner.next_value_seed(Metered { inner: seed, budget: self.budget })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    const MIB: usize = 1 << 20;

    #[test]
    fn a_problem_is_said_without_the_words_of_the_parser() {
        let of = |text: &str| problem(&from_str::<Vec<u32>>(text, MIB).unwrap_err());
        assert_eq!(of("[1, 2"), "it ends in the middle; was it cut off?");
        assert_eq!(of("[1 2]"), "it is not JSON from column 4 on");
        assert_eq!(of("[1,\n\"a\"]"), "invalid type: string \"a\", expected u32 (line 2, column 3)");
    }

    fn refused<T: for<'de> Deserialize<'de> + fmt::Debug>(text: &str, message: &str) {
        let error = from_str::<T>(text, MIB).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
        let error = from_reader::<T>(&mut text.as_bytes(), MIB).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }

    #[test]
    fn a_document_within_its_budget_is_what_serde_json_reads() {
        #[derive(Debug, PartialEq, serde::Serialize, Deserialize)]
        #[serde(tag = "kind", rename_all = "snake_case")]
        enum Tagged {
            Unit,
            Named { x: Option<f64> },
        }
        #[derive(Debug, PartialEq, serde::Serialize, Deserialize)]
        enum Plain {
            Unit,
            New(String),
            Tuple(u8, i64),
            Named { x: Vec<u8> },
        }
        let value = (
            vec![Tagged::Unit, Tagged::Named { x: Some(0.1) }],
            vec![
                Plain::Unit,
                Plain::New("\u{1f}é".into()),
                Plain::Tuple(1, -2),
                Plain::Named { x: vec![1, 2] },
            ],
            std::collections::BTreeMap::from([(3_u32, 'x'), (4, 'y')]),
        );
        let text = serde_json::to_string(&value).unwrap();
        assert_eq!(from_str::<(Vec<Tagged>, Vec<Plain>, _)>(&text, MIB).unwrap(), value);
        let tree: Value = from_reader(&mut text.as_bytes(), MIB).unwrap();
        assert_eq!(tree, serde_json::from_str::<Value>(&text).unwrap());
    }

    #[test]
    fn small_text_that_becomes_large_values_is_refused() {
        // A hundred kilobytes each, and several megabytes in memory.
        let too_much = "would take more than 1 MiB of memory";
        refused::<Value>(&format!("[{}0]", "0,".repeat(50_000)), too_much);
        refused::<Value>(&format!("[{}0]", "[0],".repeat(25_000)), too_much);
        refused::<Value>(&format!("[{}0]", "{\"\":0},".repeat(14_000)), too_much);
        refused::<Vec<Vec<String>>>(&format!("[{}[]]", "[\"\"],".repeat(25_000)), too_much);
        refused::<Vec<[f64; 8]>>(&format!("[{}[]]", "[0,0,0,0,0,0,0,0],".repeat(25_000)), too_much);
        let keys: Vec<String> = (0..20_000).map(|i| format!("\"{i:x}\":0")).collect();
        refused::<Value>(&format!("{{{}}}", keys.join(",")), too_much);
    }

    #[test]
    fn ignored_values_cost_nothing() {
        #[derive(Debug, Deserialize)]
        struct Head {
            version: u32,
        }
        let text = format!("{{\"long\": [{}0], \"version\": 7}}", "[0],".repeat(500_000));
        assert_eq!(from_str::<Head>(&text, 1 << 10).unwrap().version, 7);
    }

    #[test]
    fn a_key_appears_once_in_an_object_and_may_appear_again_in_the_next() {
        refused::<Value>(r#"{"a": 1, "b": {"c": 1, "c": 2}}"#, "the key \"c\" appears twice in one object");
        refused::<Value>(r#"{"a": 1, "\u0061": 1}"#, "the key \"a\" appears twice");
        assert!(from_str::<Value>(r#"[{"a": 1}, {"a": {"a": 2}}]"#, MIB).is_ok());
    }

    #[test]
    fn depth_has_an_end_and_so_has_the_text() {
        refused::<Value>(&"[".repeat(100_000), "recursion limit exceeded");
        refused::<Value>("{} {}", "trailing characters");
        let mut documents: Vec<Value> = Vec::new();
        each("{} [1]\n2", MIB, |document| documents.push(document)).unwrap();
        assert_eq!(documents.len(), 3);
        assert!(each("{} ]", MIB, |_: Value| ()).is_err());
        let many = "0 ".repeat(100_000);
        assert!(each(&many, MIB, |_: Value| ()).unwrap_err().to_string().contains("more than 1 MiB"));
    }
}
