use crate::header::Header;
use crate::target::TargetError;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use super::*;

/// What a scripted server does with a request.
pub(crate) enum Reply {
    Bytes(Vec<u8>),
    /// Nothing, until the server goes.
    Hang,
}

/// A whole answer.
pub(crate) fn reply(status: &str, kind: &str, body: impl AsRef<[u8]>) -> Reply {
    let body = body.as_ref();
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    Reply::Bytes([head.as_bytes(), body].concat())
}

pub(crate) fn json(body: &str) -> Reply {
    reply("200 OK", "application/json", body)
}

pub(crate) fn not_found() -> Reply {
    reply("404 Not Found", "application/json", r#"{"detail":"Not Found"}"#)
}

/// A server that answers each path as a script says, one connection after the other.
pub(crate) struct Server {
    pub address: SocketAddr,
    /// The heads of all requests.
    heads: Arc<Mutex<Vec<String>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    pub fn start(script: impl Fn(&str) -> Reply + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (heads, stop) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicBool::new(false)));
        let (kept, stopped) = (Arc::clone(&heads), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            let mut hanging = Vec::new();
            for stream in listener.incoming() {
                if stopped.load(Ordering::SeqCst) {
                    break;
                }
                let mut stream = stream.unwrap();
                let Some(head) = head(&mut stream) else { continue };
                let path = head.split(' ').nth(1).unwrap_or_default().to_owned();
                kept.lock().unwrap().push(head);
                match script(&path) {
                    // The client may have turned away.
                    Reply::Bytes(bytes) => drop(stream.write_all(&bytes)),
                    Reply::Hang => hanging.push(stream),
                }
            }
        });
        Self { address, heads, stop, thread: Some(thread) }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn heads(&self) -> Vec<String> {
        self.heads.lock().unwrap().clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        drop(TcpStream::connect(self.address));
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

/// The head of a request; none where the connection says nothing.
fn head(stream: &mut TcpStream) -> Option<String> {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") {
        if stream.read(&mut byte).ok()? == 0 {
            return None;
        }
        head.push(byte[0]);
    }
    Some(String::from_utf8(head).unwrap())
}

const SHORT: Duration = Duration::from_millis(300);
/// For answers that come: far beyond what they take.
const LONG: Duration = Duration::from_secs(20);

fn fetcher(server: &Server, key: Option<&str>, timeout: Duration) -> Fetcher {
    Fetcher::new(&Target::new(&server.url(), key).unwrap(), timeout, 10_000)
}

#[test]
fn a_base_url_is_taken_with_and_without_its_version_and_slashes() {
    for (url, root) in [
        ("http://h:8000", "http://h:8000"),
        ("http://h:8000/", "http://h:8000"),
        ("http://h:8000/v1", "http://h:8000"),
        ("http://h:8000/v1/", "http://h:8000"),
        ("https://h/gateway/v1", "https://h/gateway"),
        ("https://h/gateway//", "https://h/gateway"),
        ("http://[::1]:9/v1", "http://[::1]:9"),
        ("http://h/openai-v1", "http://h/openai-v1"),
    ] {
        assert_eq!(Target::new(url, None).unwrap().root(), root, "{url}");
    }
    let target = Target::new("http://[::1]/v1", None).unwrap();
    assert_eq!((target.host(), target.port()), ("::1", 80));
    assert_eq!(Target::new("https://h", None).unwrap().port(), 443);
}

#[test]
fn an_address_that_is_none_is_named_unless_it_may_hold_a_password() {
    for url in ["h:8000", "localhost", "ftp://h", "http://", "/v1", "", "http:// h"] {
        let error = Target::new(url, None).unwrap_err();
        assert_eq!(error, TargetError::NotAnAddress { url: url.to_owned() }, "{url}");
    }
    assert!(matches!(Target::new("http://h/v1?a=b", None), Err(TargetError::Query { .. })));
    for url in ["http://user:secret@h/v1", "user:secret@h", "ftp://user:secret@h"] {
        let error = Target::new(url, None).unwrap_err();
        assert_eq!(error, TargetError::Credentials);
        assert!(!error.to_string().contains("secret") && !format!("{error:?}").contains("secret"));
    }
}

#[test]
fn a_key_is_sent_and_never_shown() {
    let server = Server::start(|_| json("{}"));
    let target = Target::new(&server.url(), Some("sk-secret")).unwrap();
    let fetcher = Fetcher::new(&target, LONG, 100);
    fetcher.get("/a").unwrap();
    assert!(server.heads()[0].to_ascii_lowercase().contains("authorization: bearer sk-secret\r\n"));
    assert!(!format!("{target:?} {fetcher:?}").contains("secret"));
    let error = Target::new("http://h", Some("sk-secret\n")).unwrap_err();
    assert!(!format!("{error} {error:?}").contains("secret"));
}

#[test]
fn a_key_and_other_headers_go_to_no_other_host_or_port() {
    let other = Server::start(|_| json("{}"));
    let elsewhere = other.url();
    let server = Server::start(move |_| {
        Reply::Bytes(
            format!(
                "HTTP/1.1 307 T\r\nLocation: {elsewhere}/b\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            )
            .into_bytes(),
        )
    });
    let header: Header = "x-team=$TEAM".parse().unwrap();
    let header = header.look_up(|_| Some("team-secret".to_owned())).unwrap();
    let target = Target::new(&server.url(), Some("sk-secret")).unwrap().with_header(header);
    assert_eq!(target.redact("sk-secret of team-secret"), "*** of ***");
    let fetcher = Fetcher::new(&target, LONG, 10_000);
    assert_eq!(fetcher.get("/a"), Err(FetchFailure::Redirect(307)));
    assert_eq!(other.heads().len(), 0);
    fetcher.get(&format!("{}/metrics", other.url())).unwrap();
    let head = other.heads()[0].to_ascii_lowercase();
    assert!(!head.contains("authorization") && !head.contains("x-team"));
    // Its own origin spelled out is the same place.
    assert!(fetcher.get(&format!("{}/a", server.url())).is_err());
    assert!(server.heads()[1].contains("sk-secret") && server.heads()[1].contains("x-team: team-secret"));
}

#[test]
fn failures_are_told_apart() {
    let server = Server::start(|path| match path {
        "/hang" => Reply::Hang,
        "/late" => Reply::Bytes(b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nshort".to_vec()),
        "/large" => reply("200 OK", "text/plain", vec![b'x'; 10_001]),
        "/header" => reply("200 OK", &"x".repeat(200_000), ""),
        "/noise" => Reply::Bytes(b"SSH-2.0-OpenSSH_9.2\r\n".to_vec()),
        "/close" => Reply::Bytes(Vec::new()),
        "/key" => reply("401 Unauthorized", "application/json", "{}"),
        _ => reply("200 OK", "text/plain", "fine"),
    });
    let get = |path: &str, timeout| fetcher(&server, None, timeout).get(path);
    assert_eq!(get("/", LONG), Ok(b"fine".to_vec()));
    assert_eq!(get("/hang", SHORT), Err(FetchFailure::Timeout));
    assert_eq!(get("/large", LONG), Err(FetchFailure::TooLarge));
    assert_eq!(get("/header", LONG), Err(FetchFailure::TooLarge));
    assert_eq!(get("/noise", LONG), Err(FetchFailure::MalformedHttp));
    assert_eq!(get("/key", LONG), Err(FetchFailure::Status(401)));
    for path in ["/late", "/close"] {
        let failure = get(path, LONG).unwrap_err();
        assert!(
            matches!(failure, FetchFailure::Unreachable | FetchFailure::MalformedHttp),
            "{path} {failure:?}"
        );
    }
    let gone = Target::new("http://127.0.0.1:1", None).unwrap();
    assert_eq!(Fetcher::new(&gone, LONG, 100).get("/"), Err(FetchFailure::Refused));
}

#[test]
fn a_server_without_tls_is_no_https() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let thread = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
        // Until the client goes: a reset would take the answer back.
        drop(std::io::copy(&mut stream, &mut std::io::sink()));
    });
    let target = Target::new(&format!("https://{address}"), None).unwrap();
    assert_eq!(Fetcher::new(&target, LONG, 100).get("/"), Err(FetchFailure::Tls));
    thread.join().unwrap();
}
