//! A scripted server to try `hbmark serve --url` on: `cargo run -p hbmark-client --example mock_server [TOKENS_PER_SECOND]`.
//!
//! It batches as an engine does: 16 sequences at a time, a step of 5 ms and 0.5 ms more for each of them. With a number it does not: every stream
//! has so many tokens a second, however many there are.

use std::time::Duration;

use hbmark_client::mock::{Answer, BatchModel, Mock, Script, Stream};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let script = match std::env::args().nth(1) {
        Some(rate) => {
            let token_gap = Duration::try_from_secs_f64(1.0 / rate.parse::<f64>()?)?;
            Script::new(Answer::Stream(Stream { token_gap, ..Stream::default() }))
        }
        None => Script::new(Answer::Stream(Stream::default())).in_batches(BatchModel {
            max_running: 16,
            step: Duration::from_millis(5),
            per_sequence: Duration::from_micros(500),
        }),
    };
    let mock = Mock::start(script)?;
    // The first line is the URL, for scripts.
    let mut out = std::io::stdout();
    std::io::Write::write_all(&mut out, format!("{}\n", mock.url()).as_bytes())?;
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    Ok(())
}
