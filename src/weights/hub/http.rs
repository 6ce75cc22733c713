//! Requests to a hub.
//!
//! Enters: paths below the hub's endpoint. Leaves: answers, redirects followed. The token goes to the hub's own scheme, host and port, and
//! to no other, whatever a redirect says.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use ureq::http::{Response, Uri, header};
use ureq::{Agent, Body};

/// The public hub.
const PUBLIC: &str = "https://huggingface.co";
const MAX_REDIRECTS: usize = 10;
/// A list of files is a few hundred kilobytes at most.
const MAX_JSON_BYTES: u64 = 16 << 20;
/// Attempts at the bytes of a file, each of which goes on where the last one ended.
const ATTEMPTS: usize = 4;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum HttpError {
    #[error("the answer has status {0}")]
    Status(u16),
    #[error("{}", request(.0))]
    Request(#[from] Box<ureq::Error>),
    #[error("{url:?} is not an address; check HF_ENDPOINT")]
    Address { url: String },
    #[error("it is redirected to {to:?}, {problem}")]
    Redirect { to: String, problem: &'static str },
    #[error("the answer has no {0}")]
    Missing(&'static str),
    #[error("the list of files cannot be read: {0}")]
    Json(#[from] serde_json::Error),
    #[error("{0}")]
    Io(#[from] io::Error),
}

fn request(error: &ureq::Error) -> String {
    match error {
        ureq::Error::Io(error) => {
            format!("no answer ({error}); check the network and HF_ENDPOINT, or give a folder or a GGUF file")
        }
        other => other.to_string(),
    }
}

/// A hub.
pub(super) struct Hub {
    agent: Agent,
    endpoint: String,
    authorization: Option<String>,
}

/// What a hub says of a file.
#[derive(Debug)]
pub(super) struct Metadata {
    pub commit: String,
    pub tag: String,
    pub size: u64,
}

/// An answer, and the headers of the hub's own answers on the way to it.
struct Answer {
    last: Response<Body>,
    commit: Option<String>,
    tag: Option<String>,
}

impl Hub {
    pub(super) fn new(endpoint: Option<&str>, token: Option<&str>) -> Self {
        let agent = Agent::config_builder()
            .max_redirects(0)
            .http_status_as_error(false)
            .timeout_connect(Some(Duration::from_secs(30)))
            .user_agent(concat!(env!("CARGO_PKG_NAME"), "/", env!("CARGO_PKG_VERSION")))
            .build();
        Self {
            agent: agent.into(),
            endpoint: endpoint.unwrap_or(PUBLIC).trim_end_matches('/').to_owned(),
            authorization: token.map(|token| format!("Bearer {token}")),
        }
    }

    /// The names of the files of a model.
    pub(super) fn files(&self, id: &str, revision: &str) -> Result<Vec<String>, HttpError> {
        #[derive(serde::Deserialize)]
        struct Info {
            siblings: Vec<Sibling>,
        }
        #[derive(serde::Deserialize)]
        struct Sibling {
            rfilename: String,
        }
        let url = format!("{}/api/models/{id}/revision/{}", self.endpoint, escaped(revision));
        let mut body = self.get(&url, None)?.last.into_body();
        let bytes = body.with_config().limit(MAX_JSON_BYTES).read_to_vec().map_err(Box::new)?;
        let info: Info = serde_json::from_slice(&bytes)?;
        Ok(info.siblings.into_iter().map(|file| file.rfilename).collect())
    }

    fn file_url(&self, id: &str, revision: &str, name: &str) -> String {
        format!("{}/{id}/resolve/{}/{name}", self.endpoint, escaped(revision))
    }

    /// Commit, tag and size of a file.
    pub(super) fn metadata(&self, id: &str, revision: &str, name: &str) -> Result<Metadata, HttpError> {
        let Answer { last, commit, tag } = self.get(&self.file_url(id, revision, name), Some("bytes=0-0"))?;
        Ok(Metadata {
            commit: commit.ok_or(HttpError::Missing("commit (x-repo-commit)"))?,
            tag: tag.ok_or(HttpError::Missing("tag (etag)"))?,
            size: size(&last).ok_or(HttpError::Missing("size (content-range)"))?,
        })
    }

    /// Brings a file to its size; what it holds already is not fetched again.
    pub(super) fn download(
        &self,
        (id, revision, name): (&str, &str, &str),
        path: &Path,
        size: u64,
        progress: bool,
    ) -> Result<(), HttpError> {
        let mut file = File::options().create(true).append(true).open(path)?;
        // Another process that fetches the same file is waited for.
        file.lock()?;
        if file.metadata()?.len() > size {
            file.set_len(0)?;
        }
        let bar = if progress { ProgressBar::new(size) } else { ProgressBar::hidden() };
        bar.set_style(
            ProgressStyle::with_template(
                "{elapsed_precise} {bar:24} {decimal_bytes}/{decimal_total_bytes} {msg}",
            )
            .expect("the template is a constant"),
        );
        bar.set_message(name.to_owned());
        let url = self.file_url(id, revision, name);
        for attempt in 1..=ATTEMPTS {
            let before = file.metadata()?.len();
            if before == size {
                break;
            }
            match self.append(&url, &mut file, size, &bar) {
                // A body that ends early ends early again.
                Ok(()) if file.metadata()?.len() == before => break,
                Err(error) if attempt == ATTEMPTS => return Err(error),
                _ => {}
            }
        }
        bar.finish_and_clear();
        file.sync_all()?;
        Ok(())
    }

    fn append(&self, url: &str, file: &mut File, size: u64, bar: &ProgressBar) -> Result<(), HttpError> {
        let mut have = file.metadata()?.len();
        let answer = self.get(url, Some(&format!("bytes={have}-")))?.last;
        if answer.status() == 200 && have > 0 {
            // The whole file comes, whatever was asked.
            file.set_len(0)?;
            have = 0;
        }
        file.seek(SeekFrom::End(0))?;
        bar.set_position(have);
        let body = answer.into_body().into_reader().take(size - have);
        io::copy(&mut bar.wrap_read(body), file)?;
        file.flush()?;
        Ok(())
    }

    /// Follows redirects; an answer that is not a success is an error.
    fn get(&self, url: &str, range: Option<&str>) -> Result<Answer, HttpError> {
        let address = |url: &str| url.parse().map_err(|_| HttpError::Address { url: shown(url) });
        let own = origin(&address(url)?);
        let mut url = url.to_owned();
        let (mut commit, mut tag) = (None, None);
        for _ in 0..=MAX_REDIRECTS {
            let uri: Uri = address(&url)?;
            let is_own = origin(&uri) == own;
            let mut request = self.agent.get(&url);
            if let (true, Some(authorization)) = (is_own, &self.authorization) {
                request = request.header(header::AUTHORIZATION, authorization);
            }
            if let Some(range) = range {
                request = request.header(header::RANGE, range);
            }
            let last = request.call().map_err(Box::new)?;
            if is_own {
                commit = text(&last, "x-repo-commit").or(commit);
                tag = text(&last, "x-linked-etag").or_else(|| text(&last, "etag")).or(tag);
            }
            let status = last.status();
            if status.is_success() {
                return Ok(Answer { last, commit, tag: tag.map(|tag| plain_tag(&tag)) });
            }
            if !status.is_redirection() {
                return Err(HttpError::Status(status.as_u16()));
            }
            url = redirected(&uri, &text(&last, "location").ok_or(HttpError::Missing("location"))?)?;
        }
        Err(HttpError::Redirect { to: shown(&url), problem: "and so on: that does not end" })
    }
}

/// Where a redirect leads.
fn redirected(from: &Uri, location: &str) -> Result<String, HttpError> {
    let fail = |problem| HttpError::Redirect { to: shown(location), problem };
    let to: Uri = location.parse().map_err(|_| fail("which is not an address"))?;
    if to.scheme().is_none() {
        // A path on the same host.
        let (scheme, authority) =
            from.scheme_str().zip(from.authority()).ok_or_else(|| fail("from nowhere"))?;
        if to.authority().is_some() || !location.starts_with('/') || location.starts_with("//") {
            return Err(fail("which is not an address"));
        }
        return Ok(format!("{scheme}://{authority}{location}"));
    }
    if !matches!(to.scheme_str(), Some("http" | "https")) {
        return Err(fail("which is not an address"));
    }
    if from.scheme_str() == Some("https") && to.scheme_str() != Some("https") {
        return Err(fail("which is not encrypted"));
    }
    Ok(location.to_owned())
}

/// Scheme, host and port.
fn origin(uri: &Uri) -> (Option<String>, Option<String>, Option<u16>) {
    let lower = |part: Option<&str>| part.map(str::to_ascii_lowercase);
    let usual = match uri.scheme_str() {
        Some("https") => Some(443),
        Some("http") => Some(80),
        _ => None,
    };
    (lower(uri.scheme_str()), lower(uri.host()), uri.port_u16().or(usual))
}

/// The size of a file, from an answer with a part of it.
fn size(answer: &Response<Body>) -> Option<u64> {
    match text(answer, "content-range") {
        Some(range) => range.rsplit_once('/')?.1.parse().ok(),
        None => text(answer, "content-length")?.parse().ok(),
    }
}

fn text(answer: &Response<Body>, name: &str) -> Option<String> {
    Some(answer.headers().get(name)?.to_str().ok()?.to_owned())
}

/// A tag without its quotes and its mark of weakness.
fn plain_tag(tag: &str) -> String {
    tag.trim_start_matches("W/").replace('"', "")
}

/// A revision as one component of an address: a branch may have slashes.
fn escaped(revision: &str) -> String {
    revision.replace('/', "%2F")
}

fn shown(url: &str) -> String {
    url.chars().take(200).collect()
}
