//! Headers that requests carry beside the client's own.
//!
//! Enters: `NAME=VALUE`, in which `$VARIABLE` at the end stands for an environment variable. Leaves: a [`Header`] as it was asked for, which results
//! and journals may hold, and with its variable looked up a [`SentHeader`], which they may not. What looks like a secret is accepted from a variable
//! only: the command line is part of a result. No error holds a value.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};
use ureq::http::{HeaderName, HeaderValue};

/// What the client writes itself, or what would change how a message is framed or encoded.
const RESERVED: [&str; 16] = [
    "accept",
    "accept-encoding",
    "connection",
    "content-encoding",
    "content-length",
    "content-type",
    "expect",
    "host",
    "keep-alive",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "user-agent",
    "x-request-id",
];

/// Parts of the names of headers that hold secrets.
const SECRET: [&str; 10] =
    ["auth", "cookie", "credential", "jwt", "key", "password", "secret", "session", "signature", "token"];

/// A header as it was asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    name: HeaderName,
    /// Up to what comes from the environment.
    value: String,
    variable: Option<String>,
}

/// A header as it is sent.
#[derive(Debug, Clone)]
pub struct SentHeader {
    pub(crate) name: HeaderName,
    /// Marked as sensitive where it holds a secret: it does not show in `Debug`.
    pub(crate) value: HeaderValue,
    /// Where the secret begins.
    hidden: Option<usize>,
}

/// Why a header cannot be sent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    #[error("a header is a name and a value, as in x-priority=high")]
    NotAHeader,
    #[error("the header {name} is set by the client itself, or says how a message is framed; leave it out")]
    Reserved { name: String },
    #[error(
        "the header {name} may hold a secret, and the command line is part of results; put the value in an environment variable, as in \
         '{name}=$VARIABLE' in single quotes"
    )]
    Secret { name: String },
    #[error(
        "a dollar sign in the header {name} begins the name of an environment variable, which ends the value, as in '{name}=$VARIABLE'"
    )]
    NotAVariable { name: String },
    #[error("the environment variable {variable} for the header {name} is not set")]
    Unset { name: String, variable: String },
    #[error("the header {name} has a character that no header can have, perhaps the end of a line")]
    BadValue { name: String },
}

impl FromStr for Header {
    type Err = HeaderError;

    fn from_str(given: &str) -> Result<Self, HeaderError> {
        let (name, value) = given.split_once('=').ok_or(HeaderError::NotAHeader)?;
        let header = HeaderName::try_from(name.trim_matches(' ')).map_err(|_| HeaderError::NotAHeader)?;
        let name = header.as_str().to_owned();
        if RESERVED.contains(&name.as_str()) {
            return Err(HeaderError::Reserved { name });
        }
        let (value, variable) = match value.split_once('$') {
            Some((value, variable)) => (value, Some(variable.to_owned())),
            None => (value, None),
        };
        let is_variable = |text: &String| {
            text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
                && text.starts_with(|first: char| !first.is_ascii_digit())
        };
        match &variable {
            None if SECRET.iter().any(|part| name.contains(part)) => Err(HeaderError::Secret { name }),
            Some(variable) if !is_variable(variable) => Err(HeaderError::NotAVariable { name }),
            _ if HeaderValue::from_str(value).is_err() => Err(HeaderError::BadValue { name }),
            _ => Ok(Self { name: header, value: value.to_owned(), variable }),
        }
    }
}

impl Header {
    /// The header with its value, given what the environment holds.
    ///
    /// # Errors
    /// When its variable is not set, or holds what no header can.
    pub fn look_up(&self, environment: impl Fn(&str) -> Option<String>) -> Result<SentHeader, HeaderError> {
        let name = || self.name.to_string();
        let mut value = self.value.clone();
        let secret = self.variable.as_ref().map(|_| value.len());
        if let Some(variable) = &self.variable {
            let found = environment(variable).filter(|found| !found.trim().is_empty());
            let unset = || HeaderError::Unset { name: name(), variable: variable.clone() };
            value.push_str(found.ok_or_else(unset)?.trim());
        }
        SentHeader::new(self.name.clone(), value, secret)
            .ok_or_else(|| HeaderError::BadValue { name: name() })
    }
}

impl SentHeader {
    /// None where the value has a character that no header can have.
    pub(crate) fn new(name: HeaderName, value: String, secret: Option<usize>) -> Option<Self> {
        let mut value = HeaderValue::try_from(value).ok()?;
        value.set_sensitive(secret.is_some());
        Some(Self { name, value, hidden: secret })
    }

    /// What no result may hold.
    pub(crate) fn secret(&self) -> Option<&str> {
        self.hidden.and_then(|from| std::str::from_utf8(&self.value.as_bytes()[from..]).ok())
    }
}

impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.name, self.value)?;
        self.variable.iter().try_for_each(|variable| write!(f, "${variable}"))
    }
}

impl Serialize for Header {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(given: &str) -> HeaderError {
        given.parse::<Header>().unwrap_err()
    }

    #[test]
    fn a_header_is_sent_as_it_was_given() {
        let header: Header = "X-Priority=a=b; c".parse().unwrap();
        assert_eq!(header.to_string(), "x-priority=a=b; c");
        let sent = header.look_up(|_| None).unwrap();
        assert_eq!((sent.name.as_str(), sent.value.to_str().unwrap()), ("x-priority", "a=b; c"));
        assert!(sent.secret().is_none());
    }

    #[test]
    fn a_variable_ends_a_value_and_is_shown_by_its_name_alone() {
        let header: Header = "Authorization=Basic $LOGIN".parse().unwrap();
        let sent = header.look_up(|name| Some(format!(" {name}-abc\n"))).unwrap();
        assert_eq!((sent.value.to_str().unwrap(), sent.secret()), ("Basic LOGIN-abc", Some("LOGIN-abc")));
        assert!(!format!("{sent:?} {header:?} {header}").contains("abc"));
        let unset = HeaderError::Unset { name: "authorization".into(), variable: "LOGIN".into() };
        assert_eq!(header.look_up(|_| None).unwrap_err(), unset);
        assert_eq!(header.look_up(|_| Some(" ".into())).unwrap_err(), unset);
        let broken = header.look_up(|_| Some("a\r\nx: y".into())).unwrap_err();
        assert_eq!(broken, HeaderError::BadValue { name: "authorization".into() });
    }

    #[test]
    fn what_cannot_be_sent_is_refused_without_its_value() {
        for given in ["", "x", "=v", "a b=v", "Authorization: Bearer sk-secret==", "x\r\n=v", "ü=v"] {
            assert_eq!(error(given), HeaderError::NotAHeader, "{given:?}");
        }
        for given in
            ["content-length=1", "Host=a", "Transfer-Encoding=chunked", "X-Request-Id=1", "Accept=*/*"]
        {
            assert!(matches!(error(given), HeaderError::Reserved { .. }), "{given}");
        }
        for given in
            ["Authorization=Bearer sk-secret", "x-api-key=sk-secret", "Cookie=a", "x-amz-security-token=b"]
        {
            let error = error(given);
            assert!(matches!(error, HeaderError::Secret { .. }), "{given}");
            assert!(!format!("{error} {error:?}").contains("sk-secret"));
        }
        for given in ["x-a=b\r\nx-c: d", "x-a=\n", "x-a=\0"] {
            assert!(matches!(error(given), HeaderError::BadValue { .. }), "{given:?}");
        }
        for given in ["x-a=$", "x-a=$1A", "x-a=$A-B", "x-a=5$ off", "x-a=${A}"] {
            assert!(matches!(error(given), HeaderError::NotAVariable { .. }), "{given}");
        }
    }
}
