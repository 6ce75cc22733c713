//! The floor of a decode step without a device: bytes of a model over the bandwidth of a GPU of the table.
//!
//! `cargo run --example predict`

use hbmark_core::ledger::{Floor, Ledger, Roof, devices};
use hbmark_core::model::{Dtype, presets};

#[expect(clippy::print_stdout, reason = "an example prints")]
fn main() -> anyhow::Result<()> {
    let preset = presets::find("Llama-3.1-8B").expect("a shipped shape");
    let gpu = devices::find("h200")?;
    let inventory = preset.architecture.inventory(Dtype::Bf16);
    let ledger = Ledger::new(&preset.architecture, &inventory, Dtype::Bf16);
    for batch in [1, 8, 64] {
        let cost = ledger.decode(batch, 4096);
        let floor = Floor::new(&cost, &Roof::datasheet(gpu, Dtype::Bf16));
        println!("batch {batch}: {} to move, {} at least", cost.bytes.ideal(), floor.time());
    }
    Ok(())
}
