//! Where requests go: a URL, its addresses, and what is needed to speak to it.
//!
//! Enters: a base URL and a key. Leaves: a [`Target`], and with its name looked up an [`Endpoint`]. The key is in no message.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use ureq::http::Uri;
use ureq::http::header::AUTHORIZATION;
use ureq::http::uri::{Authority, Scheme};

use crate::header::SentHeader;

/// Where a server is, and how it is asked.
#[derive(Debug, Clone)]
pub struct Target {
    scheme: Scheme,
    authority: Authority,
    /// Path before the paths of the interface, without a slash at its end: empty for most servers.
    prefix: String,
    /// Sent to this scheme, host and port beside the client's own: the key, and what was asked for.
    headers: Vec<SentHeader>,
    /// Trusted instead of Mozilla's root certificates, where there are any.
    certificates: Arc<Vec<CertificateDer<'static>>>,
}

/// Why an address or a key cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TargetError {
    #[error("{url:?} is not an address of a server; give one such as http://127.0.0.1:8000")]
    NotAnAddress { url: String },
    /// The address is not shown: it may hold a password.
    #[error("the address holds a user name or a password; give a key apart from it")]
    Credentials,
    #[error("{url:?} has a question mark; give the address without parameters")]
    Query { url: String },
    #[error("the key holds a character that no header can hold, perhaps the end of a line")]
    Key,
    #[error("the name `{host}` cannot be resolved: {reason}")]
    Unresolved { host: String, reason: String },
    #[error("certificates cannot be checked: {0}")]
    Tls(String),
    #[error("no certificates can be read from {}: {problem}", path.display())]
    Certificates { path: PathBuf, problem: String },
}

impl Target {
    /// A server, by its base URL with or without `/v1`, and the key to send to it.
    ///
    /// # Errors
    ///
    /// When `url` is not `http://` or `https://` and a host, or the key cannot be a header.
    pub fn new(url: &str, key: Option<&str>) -> Result<Self, TargetError> {
        let not_an_address = || {
            if url.contains('@') {
                TargetError::Credentials
            } else {
                TargetError::NotAnAddress { url: url.to_owned() }
            }
        };
        let uri: Uri = url.parse().map_err(|_| not_an_address())?;
        let parts = uri.into_parts();
        let scheme = parts.scheme.ok_or_else(not_an_address)?;
        if scheme != Scheme::HTTP && scheme != Scheme::HTTPS {
            return Err(not_an_address());
        }
        let authority =
            parts.authority.filter(|found| !found.host().is_empty()).ok_or_else(not_an_address)?;
        if authority.as_str().contains('@') {
            return Err(TargetError::Credentials);
        }
        let path = parts.path_and_query;
        if path.as_ref().is_some_and(|path| path.query().is_some()) {
            return Err(TargetError::Query { url: url.to_owned() });
        }
        let path = path.as_ref().map_or("", |path| path.path()).trim_end_matches('/');
        let prefix = path.strip_suffix("/v1").unwrap_or(path).trim_end_matches('/').to_owned();
        let bearer = "Bearer ";
        let header = |key: &str| SentHeader::new(AUTHORIZATION, format!("{bearer}{key}"), Some(bearer.len()));
        let key = key.map(|key| header(key).ok_or(TargetError::Key)).transpose()?;
        Ok(Self {
            scheme,
            authority,
            prefix,
            headers: key.into_iter().collect(),
            certificates: Arc::default(),
        })
    }

    /// Sends a header, too, in place of another one of its name.
    #[must_use]
    pub fn with_header(mut self, header: SentHeader) -> Self {
        self.headers.retain(|other| other.name != header.name);
        self.headers.push(header);
        self
    }

    /// Trusts the certificates of a PEM file instead of Mozilla's root certificates.
    ///
    /// # Errors
    /// When the file cannot be read, or has no certificate.
    pub fn with_certificates(self, path: &Path) -> Result<Self, TargetError> {
        let wrong = |problem: String| TargetError::Certificates { path: path.to_path_buf(), problem };
        let read = CertificateDer::pem_file_iter(path).map_err(|error| wrong(error.to_string()))?;
        let found: Vec<_> = read.collect::<Result<_, _>>().map_err(|error| wrong(error.to_string()))?;
        if found.is_empty() {
            return Err(wrong("it has none; give PEM, text between BEGIN and END CERTIFICATE".to_owned()));
        }
        Ok(Self { certificates: Arc::new(found), ..self })
    }

    /// What is trusted instead of Mozilla's root certificates.
    pub(crate) fn certificates(&self) -> &[CertificateDer<'static>] {
        &self.certificates
    }

    /// Scheme, host, port and prefix: what paths such as `/v1/models` are added to.
    pub fn root(&self) -> String {
        format!("{}://{}{}", self.scheme, self.authority, self.prefix)
    }

    /// Host and port, as in the `Host` header.
    pub fn authority(&self) -> &str {
        self.authority.as_str()
    }

    /// The path before the paths of the interface; empty, or with a slash in front.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    pub fn is_encrypted(&self) -> bool {
        self.scheme == Scheme::HTTPS
    }

    /// Whether a key is sent.
    pub fn has_key(&self) -> bool {
        self.headers.iter().any(|header| header.secret().is_some())
    }

    /// What is sent beside the client's own headers.
    pub(crate) fn headers(&self) -> &[SentHeader] {
        &self.headers
    }

    /// A text without the key and other secrets, which a server may have repeated.
    pub fn redact(&self, text: &str) -> String {
        let secrets = self.headers.iter().filter_map(SentHeader::secret).filter(|secret| !secret.is_empty());
        secrets.fold(text.to_owned(), |text, secret| text.replace(secret, "***"))
    }

    /// The host, without the brackets of an IPv6 address.
    pub(crate) fn host(&self) -> &str {
        self.authority.host().trim_start_matches('[').trim_end_matches(']')
    }

    /// The port, or the scheme's.
    pub(crate) fn port(&self) -> u16 {
        self.authority.port_u16().unwrap_or(if self.scheme == Scheme::HTTPS { 443 } else { 80 })
    }

    /// Whether a whole URL is on the same scheme, host and port.
    pub(crate) fn is_origin_of(&self, url: &Uri) -> bool {
        let Some(authority) = url.authority() else { return false };
        let port =
            authority.port_u16().unwrap_or(if url.scheme() == Some(&Scheme::HTTPS) { 443 } else { 80 });
        url.scheme() == Some(&self.scheme)
            && authority.host().eq_ignore_ascii_case(self.authority.host())
            && port == self.port()
    }
}

/// A target whose name was looked up, once for a whole run.
#[derive(Debug, Clone)]
pub struct Endpoint {
    pub target: Target,
    pub addresses: Vec<SocketAddr>,
    pub(crate) tls: Option<Tls>,
}

/// How a connection is encrypted.
#[derive(Clone)]
pub(crate) struct Tls {
    pub config: Arc<ClientConfig>,
    pub name: ServerName<'static>,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Tls").field(&self.name).finish()
    }
}

impl Endpoint {
    /// Looks the name up.
    ///
    /// # Errors
    /// When there is no such name.
    pub fn resolve(target: Target) -> Result<Self, TargetError> {
        let unresolved = |reason: String| TargetError::Unresolved { host: target.host().to_owned(), reason };
        let found =
            (target.host(), target.port()).to_socket_addrs().map_err(|e| unresolved(e.to_string()))?;
        let addresses: Vec<SocketAddr> = found.collect();
        if addresses.is_empty() {
            return Err(unresolved("it has no address".to_owned()));
        }
        let tls = if target.is_encrypted() {
            let name = ServerName::try_from(target.host().to_owned())
                .map_err(|e| TargetError::Tls(e.to_string()))?;
            Some(Tls { config: tls_config(&target).map_err(|e| TargetError::Tls(e.to_string()))?, name })
        } else {
            None
        };
        Ok(Self { target, addresses, tls })
    }

    /// That a name stands for several machines, of which one is measured; `None` where it does not.
    pub fn several_addresses(&self) -> Option<String> {
        let beyond = self.addresses.iter().filter(|address| !address.ip().is_loopback());
        let (of_v4, of_v6): (Vec<&SocketAddr>, Vec<&SocketAddr>) =
            beyond.partition(|address| address.is_ipv4());
        let count = of_v4.len().max(of_v6.len());
        (count > 1).then(|| {
            format!(
                "{} has {count} addresses; all requests go to the first that answers, {} before the others",
                self.target.host(),
                self.addresses[0].ip()
            )
        })
    }

    /// Whether the server, or what forwards to it, is on this machine: its address is where packets to it would come from. None is sent.
    pub fn is_local(&self) -> bool {
        self.addresses.iter().any(|address| {
            let any: IpAddr = match address {
                SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
                SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
            };
            let route = UdpSocket::bind((any, 0)).and_then(|socket| {
                socket.connect(address)?;
                socket.local_addr()
            });
            route.is_ok_and(|own| own.ip() == address.ip())
        })
    }
}

fn tls_config(target: &Target) -> Result<Arc<ClientConfig>, rustls::Error> {
    let mut roots = RootCertStore::empty();
    if target.certificates().is_empty() {
        roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned());
    }
    for certificate in target.certificates() {
        roots.add(certificate.clone())?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    Ok(Arc::new(config.with_root_certificates(roots).with_no_client_auth()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_several_addresses_of_one_family_is_said() {
        let mut endpoint = Endpoint::resolve(Target::new("http://127.0.0.1:8000", None).unwrap()).unwrap();
        let mut with = |addresses: &[&str]| {
            endpoint.addresses = addresses.iter().map(|address| address.parse().unwrap()).collect();
            endpoint.several_addresses()
        };
        let four = with(&["10.0.1.7:80", "10.0.1.8:80", "10.0.1.9:80", "10.0.2.1:80", "[fd00::1]:80"]);
        assert_eq!(
            four.unwrap(),
            "127.0.0.1 has 4 addresses; all requests go to the first that answers, 10.0.1.7 before the others"
        );
        assert_eq!(with(&["10.0.1.7:80", "[fd00::1]:80"]), None, "one machine with an address of each kind");
        assert_eq!(with(&["127.0.0.1:80", "127.0.1.1:80", "[::1]:80"]), None);
    }

    #[test]
    fn a_server_on_this_machine_is_told_from_one_elsewhere() {
        let is_local = |url: &str| Endpoint::resolve(Target::new(url, None).unwrap()).unwrap().is_local();
        assert!(is_local("http://127.0.0.1:8000"));
        // An address that is reserved for documents.
        assert!(!is_local("http://192.0.2.1:8000"));
    }
}
