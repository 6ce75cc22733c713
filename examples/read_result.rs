//! A saved result as data: every cell with its time and what it is worth. Links no engine.
//!
//! `cargo run --example read_result -- results/qwen/result.json`

use hbmark_core::result::saved;

#[expect(clippy::print_stdout, reason = "an example prints")]
fn main() -> anyhow::Result<()> {
    let path = std::env::args().nth(1).unwrap_or("fuzz/seeds/result.json".into());
    for cell in saved::read(path.as_ref())?.cells {
        let time = cell.step_ns.and_then(|summary| summary.typical);
        println!(
            "{}: {:?} ns, {:?}, {:?} of the ceiling",
            cell.id, time, cell.status, cell.fraction_of_ceiling
        );
    }
    Ok(())
}
