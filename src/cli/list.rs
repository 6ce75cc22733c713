//! `hbmark models` and `hbmark devices`.

use clap::Args as ClapArgs;
use comfy_table::{CellAlignment, Table, presets as looks};
use serde::Serialize;

use super::{Outcome, print, print_json};
use crate::engine::{self, DeviceChoice, native};
use crate::weights::OpenModel;
use hbmark_core::ledger::{Ledger, devices};
use hbmark_core::model::{Dtype, presets};
use hbmark_core::result::EngineKind;
use hbmark_core::units::{Bytes, BytesPerSecond, FlopsPerSecond};

#[derive(Debug, ClapArgs)]
#[command(after_help = "Example:\n  hbmark models")]
pub struct ModelsArgs {
    /// table or json.
    #[arg(long, default_value = "table", value_parser = ["table", "json"])]
    format: String,
}

#[derive(Debug, ClapArgs)]
#[command(after_help = "Example:\n  hbmark devices --format json")]
pub struct DevicesArgs {
    /// table or json.
    #[arg(long, default_value = "table", value_parser = ["table", "json"])]
    format: String,
}

#[derive(Debug, Serialize)]
struct ModelRow {
    name: String,
    hub_id: String,
    family: hbmark_core::model::Family,
    parameters: u64,
    layers: usize,
    hidden_size: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    max_positions: usize,
    bf16_bytes: Bytes,
    kv_bf16_bytes_per_token: Bytes,
    /// What the layers are, where they are not all alike: `62 × (5 window 1024 : 1 full)`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pattern: Option<String>,
    /// The engines that run it; a model without one is for `predict`.
    engines: Vec<&'static str>,
}

pub fn models(args: &ModelsArgs) -> anyhow::Result<Outcome> {
    let rows: Vec<ModelRow> =
        presets::names().filter_map(presets::find).map(|preset| model_row(&preset)).collect();
    if args.format == "json" {
        print_json(&rows)?;
        return Ok(Outcome::Complete);
    }
    let mut table = table(&[
        "name",
        "family",
        "parameters",
        "layers",
        "hidden",
        "heads/kv",
        "head_dim",
        "positions",
        "bf16 weights",
        "KV per token",
        "engines",
    ]);
    for row in rows {
        table.add_row(vec![
            row.name,
            format!("{:?}", row.family).to_lowercase(),
            format!("{:.3} B", row.parameters as f64 / 1e9),
            row.layers.to_string(),
            row.hidden_size.to_string(),
            format!("{}/{}", row.heads, row.kv_heads),
            row.head_dim.to_string(),
            row.max_positions.to_string(),
            row.bf16_bytes.to_string(),
            row.kv_bf16_bytes_per_token.to_string(),
            if row.engines.is_empty() { "predict only".to_owned() } else { row.engines.join(", ") },
        ]);
    }
    right_align(&mut table, 2..10);
    print(&table.to_string())?;
    Ok(Outcome::Complete)
}

fn model_row(preset: &presets::Preset) -> ModelRow {
    let a = &preset.architecture;
    let inventory = a.inventory(Dtype::Bf16);
    ModelRow {
        family: a.family,
        parameters: inventory.parameters(),
        layers: a.layers,
        hidden_size: a.hidden_size,
        heads: a.heads,
        kv_heads: a.kv_heads,
        head_dim: a.head_dim,
        max_positions: a.max_positions,
        bf16_bytes: inventory.total_bytes(),
        kv_bf16_bytes_per_token: Ledger::new(a, &inventory, Dtype::Bf16).kv_bytes_per_token(),
        pattern: a.stack.as_ref().map(ToString::to_string),
        engines: engines_of(preset),
        name: preset.name.to_owned(),
        hub_id: preset.hub_id.clone(),
    }
}

/// The engines that run a shape, each asked itself, in the dtype it would choose on a CPU.
fn engines_of(preset: &presets::Preset) -> Vec<&'static str> {
    let model = OpenModel::synthetic(preset.name, preset.architecture.clone(), 0);
    let runs = |engine: &&str| {
        let dtype = engine::default_dtype(engine, &model, DeviceChoice::Cpu);
        engine::capabilities(engine, &model, dtype, DeviceChoice::Cpu).is_ok()
    };
    [EngineKind::Stock.name(), native::NAME].into_iter().filter(runs).collect()
}

pub fn devices(args: &DevicesArgs) -> anyhow::Result<Outcome> {
    let table_of_devices = devices::all();
    if args.format == "json" {
        print_json(&table_of_devices)?;
        return Ok(Outcome::Complete);
    }
    let mut table = table(&["name", "product", "bandwidth", "memory", "L2", "bf16 dense"]);
    for device in table_of_devices {
        let peak = device.dense_flops_per_s.get("bf16");
        table.add_row(vec![
            device.name.clone(),
            device.product.clone(),
            BytesPerSecond(device.bandwidth_bytes_per_s).to_string(),
            device.memory_bytes.capacity(),
            device.l2_bytes.map_or("-".into(), |b| format!("{:.0} MiB", b.as_f64() / f64::from(1 << 20))),
            peak.map_or("-".into(), |&p| FlopsPerSecond(p).to_string()),
        ]);
    }
    right_align(&mut table, 2..6);
    print(&format!("{table}\n\nwhere each row is from: hbmark devices --format json"))?;
    Ok(Outcome::Complete)
}

fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(looks::NOTHING).set_header(header.to_vec());
    table
}

fn right_align(table: &mut Table, columns: std::ops::Range<usize>) {
    for index in columns {
        if let Some(column) = table.column_mut(index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_listed_with_the_engines_that_run_it() {
        let of = |name: &str| engines_of(&presets::find(name).unwrap());
        assert_eq!(of("Llama-3.1-8B"), ["stock", "native"]);
        // candle runs this one in f32 on a CPU.
        assert_eq!(of("Mixtral-8x7B"), ["stock", "native"]);
        assert_eq!(of("GLM-4.7"), ["native"]);
        assert_eq!(of("DeepSeek-V3"), ["native"]);
        assert_eq!(of("DeepSeek-V3.2"), [""; 0]);
        for name in presets::names() {
            let model = OpenModel::synthetic(name, presets::find(name).unwrap().architecture, 0);
            let native = engine::capabilities("native", &model, Dtype::Bf16, DeviceChoice::Cpu).is_ok();
            assert_eq!(of(name).contains(&"native"), native, "{name}");
        }
    }
}
