//! `hbmark ceiling`.

use clap::Args as ClapArgs;
use serde::Serialize;

use super::axes::DeviceArgs;
use super::{Outcome, print, print_json};
use crate::config::Depth;
use crate::measure::ceilings;
use crate::measure::environment::Environment;
use crate::roofline::{Ceilings, DeviceSpec, Spread, devices};
use crate::units::{BytesPerSecond, FlopsPerSecond, Nanos};

#[derive(Debug, ClapArgs)]
#[command(after_help = "Example:\n  hbmark ceiling --format json")]
pub struct Args {
    #[command(flatten)]
    device: DeviceArgs,
    /// Fewer repetitions and a smaller sweep.
    #[arg(long)]
    quick: bool,
    /// table or json.
    #[arg(long, default_value = "table", value_parser = ["table", "json"])]
    format: String,
}

#[derive(Debug, Serialize)]
struct Output {
    device: String,
    #[serde(flatten)]
    ceilings: Ceilings,
    datasheet: Option<DeviceSpec>,
    environment: Environment,
}

pub fn execute(args: &Args) -> anyhow::Result<Outcome> {
    let threads = args.device.threads.map(|t| t as usize);
    crate::threads::limit(threads);
    let device = args.device.choice()?;
    let depth = if args.quick { Depth::Quick } else { Depth::Full };
    let environment = Environment::collect(device.gpu());
    let Some(ceilings) = ceilings::measure(device, depth, threads)? else {
        anyhow::bail!("{device} has no probe in this build");
    };
    let name = environment.gpu.as_ref().and_then(|gpu| gpu.name.clone());
    let datasheet = name.and_then(|name| devices::find(&name).ok()).cloned();
    let output = Output { device: device.to_string(), ceilings, datasheet, environment };
    if args.format == "json" {
        print_json(&output)?;
    } else {
        print(&table(&output))?;
    }
    Ok(Outcome::Complete)
}

fn table(output: &Output) -> String {
    use std::fmt::Write;
    let c = &output.ceilings;
    let sheet = output.datasheet.as_ref();
    let product = output
        .environment
        .gpu
        .as_ref()
        .and_then(|gpu| gpu.name.clone())
        .or_else(|| output.environment.cpu.model.clone())
        .unwrap_or_else(|| "unknown product".into());
    let mut text = format!("{} · {product}\n\n", output.device);
    let _ = writeln!(text, "{:<12} {:>13} {:>13} {:>13} {:>13}", "", "median", "low", "high", "datasheet");
    let mut row = |name: &str, spread: &Spread, show: &dyn Fn(f64) -> String, promised: Option<f64>| {
        let promised = promised.map_or_else(|| "-".to_owned(), show);
        let _ = writeln!(
            text,
            "{name:<12} {:>13} {:>13} {:>13} {promised:>13}",
            show(spread.median),
            show(spread.low),
            show(spread.high)
        );
    };
    let bandwidth = |v: f64| BytesPerSecond(v).to_string();
    let promised = sheet.map(|s| s.bandwidth_bytes_per_s);
    row("read", &c.read_bytes_per_s, &bandwidth, promised);
    row("copy", &c.copy_bytes_per_s, &bandwidth, promised);
    row("triad", &c.triad_bytes_per_s, &bandwidth, promised);
    for (dtype, spread) in &c.gemm_flops_per_s {
        let promised = sheet.and_then(|s| s.dense_flops_per_s.get(dtype)).copied();
        row(&format!("gemm {dtype}"), spread, &|v| FlopsPerSecond(v).to_string(), promised);
    }
    if let Some(launch) = &c.launch_ns {
        row("launch", launch, &|v| Nanos(v).to_string(), None);
    }
    let _ = write!(text, "\nread: {}; bandwidth over {}", c.read_configuration, c.working_set_bytes);
    if let Some(cache) = c.last_cache_bytes {
        let _ = write!(text, " (last cache {cache})");
    }
    text.push_str("; copy counts both directions, triad three streams\n");
    text
}
