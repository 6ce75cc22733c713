//! Values of JSON as servers write them: read whatever stands there, kept if it is what it should be.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::Finish;

/// Visits of plain values that are not expected.
macro_rules! otherwise {
    ($value:ty => $otherwise:expr) => {
        fn visit_bool<E>(self, _: bool) -> Result<$value, E> {
            Ok($otherwise)
        }
        fn visit_u64<E>(self, _: u64) -> Result<$value, E> {
            Ok($otherwise)
        }
        fn visit_i64<E>(self, _: i64) -> Result<$value, E> {
            Ok($otherwise)
        }
        fn visit_f64<E>(self, _: f64) -> Result<$value, E> {
            Ok($otherwise)
        }
        fn visit_str<E>(self, _: &str) -> Result<$value, E> {
            Ok($otherwise)
        }
    };
}

/// A text, or null. Anything else is an error.
#[derive(Default)]
pub(super) struct Text<'a>(pub Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for Text<'a> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct TextVisitor<'a>(PhantomData<&'a ()>);
        impl<'de: 'a, 'a> Visitor<'de> for TextVisitor<'a> {
            type Value = Text<'a>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text or null")
            }
            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Text<'a>, E> {
                Ok(Text(Cow::Borrowed(text)))
            }
            fn visit_str<E>(self, text: &str) -> Result<Text<'a>, E> {
                Ok(Text(Cow::Owned(text.to_owned())))
            }
            fn visit_unit<E>(self) -> Result<Text<'a>, E> {
                Ok(Text::default())
            }
        }
        from.deserialize_any(TextVisitor(PhantomData))
    }
}

/// The length of a list, or nothing where there is no list.
#[derive(Default)]
pub(super) struct Length(pub Option<u32>);

impl<'de> Deserialize<'de> for Length {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct LengthVisitor;
        impl<'de> Visitor<'de> for LengthVisitor {
            type Value = Length;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("any value")
            }
            otherwise!(Length => Length(None));
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Length, A::Error> {
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(Length(None))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Length, A::Error> {
                let mut length = 0_u32;
                while list.next_element::<IgnoredAny>()?.is_some() {
                    length = length.saturating_add(1);
                }
                Ok(Length(Some(length)))
            }
            fn visit_unit<E>(self) -> Result<Length, E> {
                Ok(Length(None))
            }
        }
        from.deserialize_any(LengthVisitor)
    }
}

/// A count; none where something else stands there, or more than anyone counts.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Number(pub Option<u32>);

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        Ok(Self(match Scalar::deserialize(from)? {
            Scalar::Count(count) => Some(count),
            _ => None,
        }))
    }
}

/// A value of any type, of which texts, counts and the fields of an error matter.
#[derive(Default)]
pub(super) enum Scalar<'a> {
    Text(Cow<'a, str>),
    Count(u32),
    True,
    Map(Box<Fields<'a>>),
    #[default]
    Other,
}

/// The fields of an error, or of a reason of the end.
#[derive(Default)]
pub(super) struct Fields<'a> {
    pub message: Option<Cow<'a, str>>,
    pub detail: Option<Cow<'a, str>>,
    kind: Option<Cow<'a, str>>,
}

impl<'a> Scalar<'a> {
    pub fn text(self) -> Option<Cow<'a, str>> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    pub fn is_true(&self) -> bool {
        matches!(self, Self::True)
    }

    pub fn is(&self, text: &str) -> bool {
        matches!(self, Self::Text(found) if found == text)
    }

    /// A reason of the end: a name, or SGLang's `{"type": name}`.
    pub fn finish(&self) -> Option<Finish> {
        match self {
            Self::Text(name) => Some(Finish::named(name)),
            Self::Map(fields) => Some(fields.kind.as_deref().map_or(Finish::Other, Finish::named)),
            _ => None,
        }
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Scalar<'a> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct ScalarVisitor<'a>(PhantomData<&'a ()>);
        impl<'de: 'a, 'a> Visitor<'de> for ScalarVisitor<'a> {
            type Value = Scalar<'a>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("any value")
            }
            fn visit_unit<E>(self) -> Result<Scalar<'a>, E> {
                Ok(Scalar::Other)
            }
            fn visit_bool<E>(self, value: bool) -> Result<Scalar<'a>, E> {
                Ok(if value { Scalar::True } else { Scalar::Other })
            }
            fn visit_u64<E>(self, number: u64) -> Result<Scalar<'a>, E> {
                Ok(u32::try_from(number).map_or(Scalar::Other, Scalar::Count))
            }
            fn visit_i64<E>(self, _: i64) -> Result<Scalar<'a>, E> {
                Ok(Scalar::Other)
            }
            fn visit_f64<E>(self, _: f64) -> Result<Scalar<'a>, E> {
                Ok(Scalar::Other)
            }
            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Scalar<'a>, E> {
                Ok(Scalar::Text(Cow::Borrowed(text)))
            }
            fn visit_str<E>(self, text: &str) -> Result<Scalar<'a>, E> {
                Ok(Scalar::Text(Cow::Owned(text.to_owned())))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Scalar<'a>, A::Error> {
                while list.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Scalar::Other)
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Scalar<'a>, A::Error> {
                let mut fields = Box::<Fields<'a>>::default();
                while let Some(key) = map.next_key::<Text<'a>>()? {
                    match &*key.0 {
                        "message" => fields.message = map.next_value::<Scalar<'a>>()?.text(),
                        "detail" => fields.detail = map.next_value::<Scalar<'a>>()?.text(),
                        "type" => fields.kind = map.next_value::<Scalar<'a>>()?.text(),
                        _ => drop(map.next_value::<IgnoredAny>()?),
                    }
                }
                Ok(Scalar::Map(fields))
            }
        }
        from.deserialize_any(ScalarVisitor(PhantomData))
    }
}

/// A map of known fields. Anything else in its place is noted, not an error.
#[derive(Default)]
pub(super) enum Lenient<T> {
    #[default]
    Absent,
    Wrong,
    Map(T),
}

impl<T> Lenient<T> {
    pub fn map(self) -> Option<T> {
        match self {
            Self::Map(map) => Some(map),
            Self::Absent | Self::Wrong => None,
        }
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Lenient<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct LenientVisitor<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for LenientVisitor<T> {
            type Value = Lenient<T>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("any value")
            }
            fn visit_unit<E>(self) -> Result<Lenient<T>, E> {
                Ok(Lenient::Absent)
            }
            otherwise!(Lenient<T> => Lenient::Wrong);
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Lenient<T>, A::Error> {
                while list.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Lenient::Wrong)
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Lenient<T>, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map)).map(Lenient::Map)
            }
        }
        from.deserialize_any(LenientVisitor(PhantomData))
    }
}
