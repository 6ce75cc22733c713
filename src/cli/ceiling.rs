//! `hbmark ceiling`.

use clap::Args as ClapArgs;
use serde::Serialize;

use super::shared_args::DeviceArgs;
use super::{Outcome, print, print_json};
use crate::machine::environment;
use crate::measure::ceilings;
use crate::measure::protocol::ProtocolPreset;
use hbmark_core::ledger::{devices, links};
use hbmark_core::result::{Ceilings, DeviceSpec, Environment, LinkCeilings, Spread};
use hbmark_core::units::{BytesPerSecond, FlopsPerSecond, Nanos};
use hbmark_report::output::copy_above_read;

#[derive(Debug, ClapArgs)]
#[command(after_help = "Example:\n  hbmark ceiling --format json")]
pub struct Args {
    #[command(flatten)]
    device: DeviceArgs,
    /// Fewer repetitions and a smaller sweep.
    #[arg(long)]
    quick: bool,
    /// Probe the links between so many GPUs from --device on, too: reads and writes of each other's memory, all-reduces from 8 KiB to 1 MiB.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(2..=16))]
    gpus: Option<u16>,
    /// table or json.
    #[arg(long, default_value = "table", value_parser = ["table", "json"])]
    format: String,
}

#[derive(Debug, Serialize)]
struct Output {
    device: String,
    #[serde(flatten)]
    ceilings: Ceilings,
    #[serde(skip_serializing_if = "Option::is_none")]
    links: Option<LinkCeilings>,
    datasheet: Option<DeviceSpec>,
    environment: Environment,
}

pub fn execute(args: &Args) -> anyhow::Result<Outcome> {
    let threads = args.device.threads.map(|t| t as usize);
    crate::engine::threads::limit(threads);
    let device = args.device.choice()?;
    let preset = if args.quick { ProtocolPreset::Quick } else { ProtocolPreset::Full };
    let environment = environment::collect(device.gpu());
    let links = match args.gpus {
        Some(gpus) => Some(ceilings::links(device, gpus.into(), preset)?.ok_or_else(|| {
            anyhow::anyhow!("--gpus {gpus}: links are between GPUs, and --device is {device}")
        })?),
        None => None,
    };
    let Some(ceilings) = ceilings::measure(device, preset, threads)? else {
        anyhow::bail!("{device} has no probe in this build");
    };
    let name = environment.gpu.as_ref().and_then(|gpu| gpu.name.clone());
    let datasheet = name.and_then(|name| devices::find(&name).ok()).cloned();
    let output = Output { device: device.to_string(), ceilings, links, datasheet, environment };
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
    let product = output.environment.product(true);
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
    let gpu = c.gpu.clone().unwrap_or_default();
    if let Some(write) = &gpu.write_bytes_per_s {
        row("write", write, &bandwidth, promised);
    }
    row("copy", &c.copy_bytes_per_s, &bandwidth, promised);
    row("triad", &c.triad_bytes_per_s, &bandwidth, promised);
    if let Some(cached) = &gpu.cache_read_bytes_per_s {
        row("read, L2", cached, &bandwidth, None);
    }
    for (dtype, spread) in &c.gemm_flops_per_s {
        let promised = sheet.and_then(|s| s.dense_flops_per_s.get(dtype)).copied();
        let rate = |v: f64| FlopsPerSecond(v).to_string();
        row(&format!("gemm {dtype}"), spread, &rate, promised);
        if let Some(sustained) = gpu.sustained_gemm_flops_per_s.get(dtype) {
            row("  sustained", sustained, &rate, promised);
        }
    }
    let time = |v: f64| Nanos(v).to_string();
    for (name, found) in [("launch", &c.launch_ns), ("graph node", &gpu.graph_node_ns)] {
        if let Some(found) = found {
            row(name, found, &time, None);
        }
    }
    for (name, found) in
        [("host to GPU", &gpu.host_to_device_bytes_per_s), ("GPU to host", &gpu.device_to_host_bytes_per_s)]
    {
        if let Some(found) = found {
            row(name, found, &bandwidth, None);
        }
    }
    let _ = write!(text, "\nread: {}; bandwidth over {}", c.read_configuration, c.working_set_bytes);
    if let Some(cache) = c.last_cache_bytes {
        let _ = write!(text, " (last cache {cache})");
    }
    text.push_str("; copy counts both directions, triad three streams\n");
    if let Some(cause) = c.doubt() {
        let _ = writeln!(text, "disturbed: {cause}; nothing should rest on these ceilings");
    }
    if let Some(note) = copy_above_read(c) {
        let _ = writeln!(text, "{note}");
    }
    if let Some(links) = &output.links {
        text.push_str(&table_of_links(links, sheet));
    }
    text
}

/// Medians of each pair of GPUs, and times of sums beside those that others have published.
fn table_of_links(found: &LinkCeilings, sheet: Option<&DeviceSpec>) -> String {
    use std::fmt::Write;
    let gpus = found.read_bytes_per_s.len();
    let link = sheet.and_then(|sheet| links::between(&sheet.name, gpus));
    let mut text = String::new();
    for (what, rates) in [("reads", &found.read_bytes_per_s), ("writes", &found.write_bytes_per_s)] {
        let promised = link.map_or_else(String::new, |link| {
            format!("; {} promises {} from one", link.name, BytesPerSecond(link.bytes_per_s))
        });
        let _ = writeln!(text, "\nGPU {what} in memory of GPU, one pair at a time{promised}");
        let columns: Vec<String> = (0..gpus).map(|gpu| format!("{gpu:>11}")).collect();
        let _ = writeln!(text, "{:<4}{}", "", columns.concat());
        for (gpu, row) in rates.iter().enumerate() {
            let show = |rate: &Option<Spread>| {
                rate.map_or_else(|| "-".to_owned(), |rate| BytesPerSecond(rate.median).to_string())
            };
            let cells: Vec<String> = row.iter().map(|rate| format!("{:>11}", show(rate))).collect();
            let _ = writeln!(text, "{gpu:<4}{}", cells.concat());
        }
    }
    let published = sheet.map_or_else(Vec::new, |sheet| links::measured(&sheet.name, gpus));
    let mut names = String::new();
    for by in &published {
        let _ = write!(names, " {:>24}", by.by);
    }
    let _ = writeln!(
        text,
        "\nall-reduce over {gpus} GPUs, in a graph; beside it what others measured, of as many bytes"
    );
    let _ =
        writeln!(text, "{:<10} {:<12} {:>10} {:>10} {:>10}{names}", "bytes", "by", "median", "low", "high");
    for row in &found.all_reduce {
        let [median, low, high] =
            [row.time_ns.median, row.time_ns.low, row.time_ns.high].map(|time| Nanos(time).to_string());
        let _ =
            write!(text, "{:<10} {:<12} {median:>10} {low:>10} {high:>10}", row.bytes.to_string(), row.by);
        for by in &published {
            let time = by.time(row.bytes).map_or_else(|| "-".to_owned(), |time| time.to_string());
            let _ = write!(text, " {time:>24}");
        }
        text.push('\n');
    }
    for by in &published {
        let _ = writeln!(text, "{}: {}", by.by, by.source);
    }
    for note in &found.notes {
        let _ = writeln!(text, "{note}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use hbmark_core::result::GpuCeilings;
    use hbmark_report::samples;

    #[test]
    fn a_gpu_has_its_own_rows_and_a_cpu_has_not() {
        let report = samples::report();
        let spread = |median: f64| Spread { median, low: median * 0.9, high: median * 1.1 };
        let mut output = Output {
            device: "cuda:0".into(),
            ceilings: report.ceilings.unwrap(),
            links: None,
            datasheet: None,
            environment: report.environment,
        };
        let plain = table(&output);
        output.ceilings.launch_ns = Some(spread(2_500.0));
        output.ceilings.gpu = Some(GpuCeilings {
            write_bytes_per_s: Some(spread(3e12)),
            cache_read_bytes_per_s: Some(spread(9e12)),
            sustained_gemm_flops_per_s: [("bf16".to_owned(), spread(6e14))].into(),
            graph_node_ns: Some(spread(1_300.0)),
            host_to_device_bytes_per_s: Some(spread(5e10)),
            device_to_host_bytes_per_s: Some(spread(4e10)),
        });
        let rows = |text: &str| -> Vec<String> {
            let names = text.lines().map(|line| line.get(..12).unwrap_or("").trim_end().to_owned());
            names.skip(3).take_while(|name| !name.is_empty()).collect()
        };
        assert_eq!(rows(&plain), ["read", "copy", "triad", "gemm bf16", "gemm f32"]);
        assert_eq!(
            rows(&table(&output)),
            [
                "read",
                "write",
                "copy",
                "triad",
                "read, L2",
                "gemm bf16",
                "  sustained",
                "gemm f32",
                "launch",
                "graph node",
                "host to GPU",
                "GPU to host"
            ]
        );
    }
}
