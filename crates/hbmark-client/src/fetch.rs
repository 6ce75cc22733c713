//! Questions to a server beside the measured requests: small, bounded, one at a time.
//!
//! Enters: a base URL, a key and other headers, paths. Leaves: bodies, or how it failed. The headers go to the scheme, host and port of the base URL and to no other:
//! redirects are not followed, no proxy is asked, and no error holds the key.

use std::io;
use std::time::Duration;

use hbmark_core::result::serving::FetchFailure;
use ureq::http::Uri;
use ureq::tls::{Certificate, RootCerts, TlsConfig};

use crate::target::Target;

/// A target that is asked.
#[derive(Debug, Clone)]
pub(crate) struct Fetcher {
    agent: ureq::Agent,
    target: Target,
    max_bytes: u64,
}

impl Fetcher {
    /// Each question takes `timeout` at most, name lookup and body included, and its body has `max_bytes` at most.
    pub fn new(target: &Target, timeout: Duration, max_bytes: u64) -> Self {
        let own: Vec<_> =
            target.certificates().iter().map(|der| Certificate::from_der(der).to_owned()).collect();
        let roots = if own.is_empty() { RootCerts::WebPki } else { RootCerts::from(own) };
        let agent = ureq::Agent::config_builder()
            .tls_config(TlsConfig::builder().root_certs(roots).build())
            .max_redirects(0)
            .max_redirects_will_error(false)
            .http_status_as_error(false)
            // The measured requests go straight to the server, so these do.
            .proxy(None)
            .timeout_global(Some(timeout))
            // Servers in Python close an idle connection after five seconds.
            .max_idle_age(Duration::from_secs(4))
            .user_agent(concat!("hbmark/", env!("CARGO_PKG_VERSION")))
            .build()
            .into();
        Self { agent, target: target.clone(), max_bytes }
    }

    /// Asks for a path below the root of the target, or for a whole URL; the key is sent to the target's origin only. The body of a success.
    pub fn get(&self, path_or_url: &str) -> Result<Vec<u8>, FetchFailure> {
        let url = if path_or_url.starts_with('/') {
            format!("{}{path_or_url}", self.target.root())
        } else {
            path_or_url.to_owned()
        };
        let uri: Uri = url.parse().map_err(|_| FetchFailure::MalformedHttp)?;
        let mut request = self.agent.get(&uri);
        if self.target.is_origin_of(&uri) {
            for header in self.target.headers() {
                request = request.header(&header.name, &header.value);
            }
        }
        let mut answer = request.call().map_err(|error| failure(&error))?;
        let body = answer
            .body_mut()
            .with_config()
            .limit(self.max_bytes)
            .read_to_vec()
            .map_err(|error| failure(&error))?;
        match answer.status().as_u16() {
            200..300 => Ok(body),
            status @ 300..400 => Err(FetchFailure::Redirect(status)),
            status => Err(FetchFailure::Status(status)),
        }
    }
}

fn failure(error: &ureq::Error) -> FetchFailure {
    match error {
        ureq::Error::Timeout(_) => FetchFailure::Timeout,
        ureq::Error::HostNotFound => FetchFailure::NoSuchName,
        ureq::Error::BodyExceedsLimit(_) | ureq::Error::LargeResponseHeader(..) => FetchFailure::TooLarge,
        ureq::Error::Tls(_) | ureq::Error::Rustls(_) | ureq::Error::TlsRequired => FetchFailure::Tls,
        ureq::Error::Io(error) => io_failure(error),
        ureq::Error::Protocol(_) | ureq::Error::Http(_) | ureq::Error::BadUri(_) => {
            FetchFailure::MalformedHttp
        }
        _ => FetchFailure::Unreachable,
    }
}

pub(crate) fn io_failure(error: &io::Error) -> FetchFailure {
    match error.kind() {
        io::ErrorKind::ConnectionRefused => FetchFailure::Refused,
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => FetchFailure::Timeout,
        // rustls reports through I/O.
        io::ErrorKind::InvalidData => FetchFailure::Tls,
        _ => FetchFailure::Unreachable,
    }
}

#[cfg(test)]
pub(crate) mod tests;
