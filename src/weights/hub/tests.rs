//! Claims about the hub, against a server on the loopback: no test touches the network or the process's environment.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use super::*;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// A hub with one model, `org/tiny`, on a port of the loopback.
struct Hub {
    endpoint: String,
    /// Requests so far.
    requests: Arc<Mutex<Vec<Seen>>>,
}

/// A request as the server saw it.
#[derive(Debug, Clone)]
struct Seen {
    path: String,
    host: String,
    range: Option<String>,
    /// Whether the token came along.
    token: bool,
}

/// How the server misbehaves.
#[derive(Clone, Copy, PartialEq)]
enum Mischief {
    None,
    /// Announces more bytes than it sends.
    Short,
    /// Names blobs with a path.
    TagTraversal,
    Status(u16),
    /// Sends every request for a file to another address: the name of the port's host, or a path on the same host.
    Redirect(&'static str),
    /// Sends every request to this.
    RedirectTo(&'static str),
}

impl Hub {
    fn serve(files: &[(&'static str, &'static str)], mischief: Mischief) -> Self {
        let files: HashMap<_, _> = files.iter().copied().collect();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let requests = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&requests);
        // The thread ends with the process; a closed connection is the client's business.
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let _ = answer(stream, &files, mischief, &seen);
            }
        });
        Self { endpoint, requests }
    }

    fn paths(&self) -> Vec<String> {
        self.requests.lock().unwrap().iter().map(|seen| seen.path.clone()).collect()
    }
}

fn answer(
    mut stream: TcpStream,
    files: &HashMap<&str, &str>,
    mischief: Mischief,
    seen: &Mutex<Vec<Seen>>,
) -> io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        if line.trim().is_empty() {
            break;
        }
        lines.push(line.trim().to_owned());
    }
    let path = lines[0].split(' ').nth(1).unwrap_or_default().to_owned();
    let header = |name: &str| {
        lines.iter().filter_map(|line| line.split_once(": ")).find(|(k, _)| k.eq_ignore_ascii_case(name))
    };
    let token = header("authorization").is_some_and(|(_, value)| value == "Bearer secret");
    let value = |name: &str| header(name).map(|(_, value)| value.to_owned());
    let host = value("host").unwrap_or_default();
    seen.lock().unwrap().push(Seen { path: path.clone(), host: host.clone(), range: value("range"), token });

    let reply = |stream: &mut TcpStream, status: u16, headers: &str, body: &str| {
        let length = body.len();
        let head =
            format!("HTTP/1.1 {status} X\r\nConnection: close\r\nContent-Length: {length}\r\n{headers}\r\n");
        stream.write_all(format!("{head}{body}").as_bytes())
    };
    if let Mischief::Status(status) = mischief {
        return reply(&mut stream, status, "", "");
    }
    if let Mischief::RedirectTo(to) = mischief {
        return reply(&mut stream, 302, &format!("Location: {to}\r\n"), "");
    }
    if path == "/api/models/org/tiny/revision/main" {
        let siblings: Vec<_> = files.keys().map(|name| format!(r#"{{"rfilename":"{name}"}}"#)).collect();
        let body = format!(r#"{{"sha":"{COMMIT}","siblings":[{}]}}"#, siblings.join(","));
        return reply(&mut stream, 200, "Content-Type: application/json\r\n", &body);
    }
    if let (Mischief::Redirect(host), Some(name)) = (mischief, path.strip_prefix("/org/tiny/resolve/main/")) {
        let port = stream.local_addr()?.port();
        let to = if host.is_empty() { String::new() } else { format!("http://{host}:{port}") };
        let headers = format!(
            "Location: {to}/elsewhere/{name}\r\nX-Linked-ETag: \"{name}\"\r\nX-Repo-Commit: {COMMIT}\r\n"
        );
        return reply(&mut stream, 302, &headers, "");
    }
    let at = |revision: &str| path.strip_prefix(&format!("/org/tiny/resolve/{revision}/"));
    let name = at("main").or_else(|| at(COMMIT)).or_else(|| path.strip_prefix("/elsewhere/"));
    let Some((name, body)) = name.and_then(|name| files.get_key_value(name)) else {
        return reply(&mut stream, 404, "", "");
    };
    let range = header("range").and_then(|(_, value)| value.strip_prefix("bytes=")?.split_once('-'));
    let (start, end) = range.unwrap_or(("0", ""));
    let start: usize = start.parse().unwrap_or(0).min(body.len());
    let end = end.parse::<usize>().map_or(body.len(), |end| (end + 1).min(body.len()));
    let announced = body.len() + if mischief == Mischief::Short { 3 } else { 0 };
    let tag = if mischief == Mischief::TagTraversal { "../../../../escaped" } else { name };
    let headers = format!(
        "ETag: \"{tag}\"\r\nX-Repo-Commit: {COMMIT}\r\nContent-Range: bytes {start}-{end}/{announced}\r\n"
    );
    reply(&mut stream, 206, &headers, &body[start..end])
}

fn config(cache: &Path, endpoint: Option<String>) -> HubConfig {
    HubConfig { endpoint, cache: cache.to_path_buf(), token: Some("secret".to_owned()), offline: false }
}

const SINGLE_FILES: [(&str, &str); 3] =
    [("config.json", "{}"), ("model.safetensors", "weights"), ("README.md", "text")];

#[test]
fn a_model_is_fetched_once_and_then_found_without_the_network() {
    let hub = Hub::serve(&SINGLE_FILES, Mischief::None);
    let cache = tempfile::tempdir().unwrap();
    let online = config(&cache.path().join("hub"), Some(hub.endpoint.clone()));
    let snapshot = online.resolve("org/tiny", None, false).unwrap();
    assert!(snapshot.ends_with(format!("models--org--tiny/snapshots/{COMMIT}")), "{}", snapshot.display());
    assert_eq!(fs::read_to_string(snapshot.join("model.safetensors")).unwrap(), "weights");
    assert!(!snapshot.join("README.md").exists(), "only what a run needs is fetched");
    assert!(hub.requests.lock().unwrap().iter().all(|seen| seen.token), "the token goes with each request");

    let before = hub.paths().len();
    assert_eq!(online.resolve("org/tiny", None, false).unwrap().canonicalize().unwrap(), snapshot);
    assert_eq!(hub.paths().len(), before, "a complete snapshot asks the hub nothing");
    let offline = HubConfig { offline: true, ..online };
    offline.resolve("org/tiny", None, false).unwrap();
    offline.resolve("org/tiny", Some(COMMIT), false).unwrap();
}

#[test]
fn shards_and_tokenizer_come_with_their_index() {
    let index = r#"{"weight_map":{"a":"one.safetensors","b":"two.safetensors"}}"#;
    let files = [
        ("config.json", "{}"),
        ("tokenizer.json", "{}"),
        ("model.safetensors.index.json", index),
        ("one.safetensors", "1"),
        ("two.safetensors", "22"),
    ];
    let hub = Hub::serve(&files, Mischief::None);
    let cache = tempfile::tempdir().unwrap();
    let config = config(cache.path(), Some(hub.endpoint));
    let snapshot = config.resolve("org/tiny", None, false).unwrap();
    for (name, body) in files {
        assert_eq!(fs::read_to_string(snapshot.join(name)).unwrap(), body);
    }
    // A snapshot that lost a shard is not complete.
    fs::remove_file(snapshot.join("two.safetensors")).unwrap();
    let offline = HubConfig { offline: true, ..config };
    let error = offline.resolve("org/tiny", None, false).unwrap_err().to_string();
    assert!(error.contains("(no two.safetensors), and HF_HUB_OFFLINE forbids the network"), "{error}");
}

#[test]
fn how_modelopt_stores_weights_comes_with_the_config() {
    let quantised =
        [("config.json", "{}"), ("hf_quant_config.json", "{ }"), ("model.safetensors", "weights")];
    for files in [&quantised[..], &SINGLE_FILES] {
        let hub = Hub::serve(files, Mischief::None);
        let cache = tempfile::tempdir().unwrap();
        let config = config(cache.path(), Some(hub.endpoint.clone()));
        let snapshot = config.resolve_config("org/tiny", None).unwrap();
        let is_there = || snapshot.join("hf_quant_config.json").is_file();
        assert_eq!(is_there(), files == quantised);
        let before = hub.paths().len();
        assert_eq!(config.resolve_config("org/tiny", None).unwrap().canonicalize().unwrap(), snapshot);
        assert_eq!(hub.paths().len(), before, "what the hub does not have is not asked for again");

        // A snapshot that was fetched without it is not complete, with weights or not.
        let whole = config.resolve("org/tiny", None, false).unwrap();
        let _ = fs::remove_file(snapshot.join("hf_quant_config.json"));
        let _ = fs::remove_dir_all(cache.path().join("models--org--tiny/.no_exist"));
        config.resolve("org/tiny", None, false).unwrap();
        assert_eq!((is_there(), &whole), (files == quantised, &snapshot));
        assert!(knows_quantization(&snapshot));
    }
}

#[test]
fn a_hub_that_does_not_answer_is_an_error_where_the_config_alone_says_the_storage() {
    let hub = Hub::serve(&SINGLE_FILES, Mischief::None);
    let cache = tempfile::tempdir().unwrap();
    let online = config(cache.path(), Some(hub.endpoint));
    let snapshot = online.resolve("org/tiny", None, false).unwrap();
    fs::remove_dir_all(cache.path().join("models--org--tiny/.no_exist")).unwrap();
    let nobody = HubConfig { endpoint: Some("http://127.0.0.1:1".to_owned()), ..online.clone() };
    nobody.resolve_config("org/tiny", None).expect("the weights are there");
    fs::remove_file(snapshot.join("model.safetensors")).unwrap();
    let error = nobody.resolve_config("org/tiny", None).unwrap_err().to_string();
    assert!(error.starts_with("cannot fetch hf_quant_config.json of org/tiny: "), "{error}");
    HubConfig { offline: true, ..nobody }.resolve_config("org/tiny", None).expect("nobody is asked");
}

#[test]
fn an_index_from_the_hub_cannot_name_a_path() {
    let index = r#"{"weight_map":{"a":"../../../../etc/passwd"}}"#;
    let hub = Hub::serve(&[("config.json", "{}"), (INDEX, index)], Mischief::None);
    let cache = tempfile::tempdir().unwrap();
    let error =
        config(cache.path(), Some(hub.endpoint.clone())).resolve("org/tiny", None, false).unwrap_err();
    assert!(matches!(error, WeightsError::ShardName { .. }), "{error}");
    assert!(hub.paths().iter().all(|path| !path.contains("passwd")));
}

#[test]
fn offline_says_what_is_missing_and_asks_nobody() {
    let hub = Hub::serve(&SINGLE_FILES, Mischief::None);
    let cache = tempfile::tempdir().unwrap();
    let offline = HubConfig { offline: true, ..config(cache.path(), Some(hub.endpoint.clone())) };
    let error = offline.resolve("org/tiny", Some("v2"), false).unwrap_err().to_string();
    assert!(error.starts_with("org/tiny at v2 is not complete in "), "{error}");
    assert!(error.contains("(no snapshot)"), "{error}");
    assert!(hub.paths().is_empty());
}

#[test]
fn statuses_are_told_in_words() {
    let cases = [
        (404, "the hub does not have the files of org/tiny at main"),
        (401, "(status 401): the model is gated, private or does not exist"),
        (403, "(status 403): the model is gated, private or does not exist"),
        (500, "cannot fetch the files of org/tiny: the answer has status 500"),
    ];
    for (status, message) in cases {
        let hub = Hub::serve(&[], Mischief::Status(status));
        let cache = tempfile::tempdir().unwrap();
        let error = config(cache.path(), Some(hub.endpoint)).resolve("org/tiny", None, false).unwrap_err();
        assert!(error.to_string().contains(message), "{error}");
    }
}

#[test]
fn a_model_without_safetensors_says_what_it_holds() {
    let hub = Hub::serve(&[("pytorch_model.bin", "x")], Mischief::None);
    let cache = tempfile::tempdir().unwrap();
    let error = config(cache.path(), Some(hub.endpoint)).resolve("org/tiny", None, false).unwrap_err();
    assert_eq!(error.to_string(), "org/tiny at main has no safetensors; it holds pytorch_model.bin");
}

#[test]
fn a_short_download_is_removed_again() {
    let hub = Hub::serve(&SINGLE_FILES, Mischief::Short);
    let cache = tempfile::tempdir().unwrap();
    let error = config(cache.path(), Some(hub.endpoint)).resolve("org/tiny", None, false).unwrap_err();
    let message = "config.json of org/tiny arrived with 2 bytes of 5; it was removed, run again";
    assert!(error.to_string().starts_with(message), "{error}");
    assert!(!cache.path().join("models--org--tiny/blobs/config.json").exists());
}

#[test]
fn a_tag_that_is_a_path_is_refused_before_it_is_used() {
    let hub = Hub::serve(&SINGLE_FILES, Mischief::TagTraversal);
    let cache = tempfile::tempdir().unwrap();
    let nested = cache.path().join("a/b/c/d");
    let error = config(&nested, Some(hub.endpoint)).resolve("org/tiny", None, false).unwrap_err();
    assert!(
        error.to_string().starts_with("the hub answered with the tag \"../../../../escaped\""),
        "{error}"
    );
    assert!(!cache.path().join("a/b/escaped").exists());
}

#[test]
fn the_token_goes_to_the_hub_and_to_no_host_that_it_redirects_to() {
    // The same port by another name is another host.
    for (to, elsewhere, keeps) in [("localhost", "localhost:", false), ("", "127.0.0.1:", true)] {
        let hub = Hub::serve(&SINGLE_FILES, Mischief::Redirect(to));
        let cache = tempfile::tempdir().unwrap();
        let snapshot =
            config(cache.path(), Some(hub.endpoint.clone())).resolve("org/tiny", None, false).unwrap();
        assert_eq!(fs::read_to_string(snapshot.join("model.safetensors")).unwrap(), "weights");
        let seen = hub.requests.lock().unwrap().clone();
        let (away, home): (Vec<&Seen>, Vec<&Seen>) =
            seen.iter().partition(|request| request.path.starts_with("/elsewhere/"));
        assert!(
            home.iter().all(|request| request.token && request.host.starts_with("127.0.0.1:")),
            "{seen:?}"
        );
        assert!(
            away.iter().all(|request| request.token == keeps && request.host.starts_with(elsewhere)),
            "{seen:?}"
        );
        // What a file is, and its bytes, of two files; between them one that there is not.
        let ranges: Vec<&str> = away.iter().filter_map(|request| request.range.as_deref()).collect();
        assert_eq!(ranges, ["bytes=0-0", "bytes=0-", "bytes=0-0", "bytes=0-0", "bytes=0-"]);
    }
}

#[test]
fn an_address_that_is_none_is_named() {
    let cache = tempfile::tempdir().unwrap();
    let error =
        config(cache.path(), Some("not an address".into())).resolve_config("org/tiny", None).unwrap_err();
    let wanted = r#"cannot fetch config.json of org/tiny: "not an address/org/tiny/resolve/main/config.json" is not an address; check HF_ENDPOINT"#;
    assert_eq!(error.to_string(), wanted);
    // The first leads to another host, the others nowhere.
    for to in ["//elsewhere", "elsewhere", "file://x", "http://[x"] {
        let hub = Hub::serve(&SINGLE_FILES, Mischief::RedirectTo(to));
        let error = config(cache.path(), Some(hub.endpoint)).resolve_config("org/tiny", None).unwrap_err();
        assert!(
            error.to_string().contains("it is redirected to ")
                && error.to_string().contains("not an address"),
            "{error}"
        );
    }
}

#[test]
fn a_download_goes_on_where_an_earlier_one_ended() {
    let hub = Hub::serve(&SINGLE_FILES, Mischief::None);
    let cache = tempfile::tempdir().unwrap();
    let blobs = cache.path().join("models--org--tiny/blobs");
    fs::create_dir_all(&blobs).unwrap();
    fs::write(blobs.join("model.safetensors.incomplete"), "weig").unwrap();
    let snapshot = config(cache.path(), Some(hub.endpoint.clone())).resolve("org/tiny", None, false).unwrap();
    assert_eq!(fs::read_to_string(snapshot.join("model.safetensors")).unwrap(), "weights");
    let seen = hub.requests.lock().unwrap().clone();
    assert!(seen.iter().any(|request| request.range.as_deref() == Some("bytes=4-")), "{seen:?}");
    assert!(!blobs.join("model.safetensors.incomplete").exists());
}

#[test]
fn ids_and_revisions_of_another_form_are_refused() {
    let config = HubConfig { offline: true, ..config(Path::new("/nonexistent"), None) };
    for id in
        ["", "a/b/c", "../x", "a/..", "a b", "/a", "a/", "a--b", "-a/b", "a\\b", "a\nb", &"x".repeat(97)]
    {
        let error = config.resolve(id, None, false).unwrap_err();
        assert!(error.to_string().contains("is neither a path that exists nor a hub id"), "{id:?}: {error}");
    }
    for revision in ["", "..", "a/../b", "/a", "a//b", "a b", "a?b"] {
        let error = config.resolve("org/tiny", Some(revision), false).unwrap_err();
        assert!(error.to_string().contains("is not a branch, tag or commit"), "{revision:?}: {error}");
    }
    check_id("gpt2").unwrap();
    check_id("Qwen/Qwen2.5-0.5B-Instruct").unwrap();
    check_revision("refs/pr/1").unwrap();
}

#[test]
fn the_environment_means_what_it_means_to_other_hub_clients() {
    let from = |pairs: &[(&str, &str)]| {
        let map: HashMap<String, OsString> = pairs.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect();
        HubConfig::from_variables(|name| map.get(name).cloned())
    };
    let home = from(&[("HOME", "/home/u")]).unwrap();
    assert_eq!(home.cache, Path::new("/home/u/.cache/huggingface/hub"));
    assert_eq!((home.offline, home.token, home.endpoint), (false, None, None));
    assert_eq!(
        from(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]).unwrap().cache,
        Path::new("/x/huggingface/hub")
    );
    assert_eq!(from(&[("HOME", "/h"), ("HF_HOME", "/hf")]).unwrap().cache, Path::new("/hf/hub"));
    let all = [("HF_HUB_CACHE", "/c"), ("HF_HOME", "/hf"), ("HF_TOKEN", " t\n"), ("HF_HUB_OFFLINE", "True")];
    let all = from(&[&all[..], &[("HF_ENDPOINT", "http://127.0.0.1:1/")]].concat()).unwrap();
    assert_eq!((all.cache.as_path(), all.offline), (Path::new("/c"), true));
    assert_eq!(all.endpoint.as_deref(), Some("http://127.0.0.1:1"));
    assert_eq!(all.token.as_deref(), Some("t"));
    assert!(matches!(from(&[]), Err(HubError::NoHome)));
}

#[test]
fn a_token_file_that_is_a_pipe_is_no_token() {
    let home = tempfile::tempdir().unwrap();
    let pipe = home.path().join("token");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let path = home.path().as_os_str().to_owned();
    let config = HubConfig::from_variables(|name| (name == "HF_HOME").then(|| path.clone())).unwrap();
    assert_eq!(config.token, None);
}

#[test]
fn the_token_is_read_from_its_file_and_never_printed() {
    let home = tempfile::tempdir().unwrap();
    fs::write(home.path().join("token"), "secret\n").unwrap();
    let path = home.path().as_os_str().to_owned();
    let config = HubConfig::from_variables(|name| (name == "HF_HOME").then(|| path.clone())).unwrap();
    assert_eq!(config.token.as_deref(), Some("secret"));
    assert!(!format!("{config:?}").contains("secret"));
}
