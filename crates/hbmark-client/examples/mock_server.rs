//! A scripted server to try `hbmark serve --url` on: `cargo run -p hbmark-client --example mock_server`.
//!
//! It batches as an engine does: 16 sequences at a time, a step of 5 ms and 0.5 ms more for each of them.

use std::time::Duration;

use hbmark_client::mock::{Answer, BatchModel, Mock, Script, Stream};

fn main() -> std::io::Result<()> {
    let model = BatchModel {
        max_running: 16,
        step: Duration::from_millis(5),
        per_sequence: Duration::from_micros(500),
    };
    let mock = Mock::start(Script::new(Answer::Stream(Stream::default())).in_batches(model))?;
    // The first line is the URL, for scripts.
    let mut out = std::io::stdout();
    std::io::Write::write_all(&mut out, format!("{}\n", mock.url()).as_bytes())?;
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    Ok(())
}
