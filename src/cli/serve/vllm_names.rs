//! Flags as users of `vllm bench serve` type them, where they are no mere other name of one of ours.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::Args;

use super::flags::within;
use crate::serve::ServeConfig;
use crate::weights::tokenizer::Tokenizer;
use hbmark_core::result::serving::{Arrivals, Clause, ServeReport, Slo, SloMetric};
use hbmark_core::units::whole_count;
use hbmark_report::output::vllm_schema::{METRICS, Selection, bench_serve};
use hbmark_traffic::dataset::{self, Dataset, Format};
use hbmark_traffic::workload::{Lengths, Workload};

/// The share of requests that must be within the limits of --goodput.
const GOODPUT_PERCENTILE: f64 = 0.9;
/// Lengths of vLLM's `random` dataset where none are given.
const RANDOM_LENGTHS: (usize, usize) = (1024, 128);

/// Other names of an arrival process, objectives and lengths.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "As in vllm bench serve")]
pub(super) struct VllmNames {
    /// Shape of gamma-distributed arrivals: 1 is Poisson, below 1 burstier; the same as --arrivals gamma:CV with CV = 1/sqrt(B).
    #[arg(long, value_name = "B", conflicts_with_all = ["arrivals", "burst", "trace"], value_parser = within(0.0025..=400.0))]
    burstiness: Option<f64>,
    /// random: prompts of drawn tokens, 1024 and 128 long where no lengths are given; sharegpt, custom: those of --dataset-path.
    #[arg(long, value_name = "NAME", value_parser = ["random", "sharegpt", "custom"], group = "source")]
    dataset_name: Option<String>,
    /// ShareGPT's JSON, or lines of {"prompt": "...", "output_tokens": 128}; --tokenizer counts their tokens.
    #[arg(long, value_name = "FILE", requires = "dataset_name")]
    dataset_path: Option<PathBuf>,
    /// Draw lengths evenly from L(1-R) to L(1+R).
    #[arg(long, value_name = "R", value_parser = within(0.0..=0.99))]
    random_range_ratio: Option<f64>,
    /// Limits in milliseconds, as in ttft:200 tpot:50 e2el:5000: goodput counts requests within all of them. Here they are objectives, too, at p90.
    #[arg(long, value_name = "METRIC:MS", num_args = 1.., value_parser = limit, conflicts_with = "slo")]
    goodput: Vec<Clause>,
    /// Outputs of exactly the planned length: always so here, unless --stop-at-eos is given, or --backend names OpenAI's API alone, which has no word
    /// for it. With this flag `ignore_eos` is sent there, too.
    #[arg(long, conflicts_with = "stop_at_eos")]
    pub ignore_eos: bool,
    #[command(flatten)]
    saved: SavedResultArgs,
}

/// A result for scripts that read vLLM's.
#[derive(Debug, Clone, Args)]
pub(super) struct SavedResultArgs {
    /// Write a JSON file in vLLM's schema for every measured point. TTFT and E2E in it count from sending, as vLLM's do.
    #[arg(long)]
    save_result: bool,
    /// The folder of --save-result.
    #[arg(long, value_name = "DIR", requires = "save_result")]
    result_dir: Option<PathBuf>,
    /// The name of the file of --save-result; of several points with a number before its ending.
    #[arg(long, value_name = "FILE", requires = "save_result")]
    result_filename: Option<String>,
    /// Latencies in the file of --save-result: ttft, tpot, itl, e2el. Tables have all of them.
    #[arg(long, value_delimiter = ',', value_parser = METRICS, default_value = "ttft,tpot,itl")]
    percentile_metrics: Vec<String>,
    /// Percentiles in the file of --save-result.
    #[arg(long, value_delimiter = ',', default_value = "99", value_parser = within(0.0..=100.0))]
    metric_percentiles: Vec<f64>,
}

fn limit(given: &str) -> Result<Clause, String> {
    let wanted =
        || format!("`{given}` is not a limit such as ttft:200 (ttft, tpot or e2el, in milliseconds)");
    let (metric, ms) = given.split_once(':').ok_or_else(wanted)?;
    let metric = match metric {
        "ttft" => SloMetric::Ttft,
        "tpot" => SloMetric::Tpot,
        "e2el" => SloMetric::E2e,
        _ => return Err(wanted()),
    };
    let ms: f64 = ms.parse().ok().filter(|ms: &f64| ms.is_finite() && *ms > 0.0).ok_or_else(wanted)?;
    Ok(Clause { metric, percentile: GOODPUT_PERCENTILE, limit_ns: ms * 1e6 })
}

impl VllmNames {
    /// The lengths of the `random` dataset, where it is named.
    pub fn random(&self) -> Option<(usize, usize)> {
        self.dataset_name.as_ref().filter(|name| *name == "random").map(|_| RANDOM_LENGTHS)
    }

    /// The prompts of a dataset, where one is named.
    pub fn dataset(
        &self,
        config: &ServeConfig,
        output_len: Option<usize>,
    ) -> anyhow::Result<Option<Dataset>> {
        let format = match self.dataset_name.as_deref() {
            Some("sharegpt") => Format::ShareGpt,
            Some("custom") => Format::Custom,
            other => {
                let other = other.unwrap_or_default();
                anyhow::ensure!(
                    self.dataset_path.is_none(),
                    "--dataset-name {other} has no file; leave out --dataset-path"
                );
                return Ok(None);
            }
        };
        let path =
            self.dataset_path.as_deref().context("give the file of the dataset: --dataset-path FILE")?;
        let tokenizer = config.tokenizer.as_deref().context(
            "the tokens of a dataset's texts are counted with a tokenizer: --tokenizer PATH, a tokenizer.json or its folder",
        )?;
        let tokenizer = Tokenizer::open_path(tokenizer)?;
        // As many as warm up, are measured, and keep the server loaded behind them; beyond, they repeat.
        let prompts = 2 * config.max_requests.max(config.requests) + 1_000;
        let selection = dataset::Selection { prompts, output_len, seed: config.seed };
        Ok(Some(dataset::read(path, format, selection, |text| tokenizer.encode(text))?))
    }

    /// The file of a dataset.
    pub fn dataset_path(&self) -> Option<&Path> {
        self.dataset_path.as_deref()
    }

    /// The objectives of --goodput, where they are given.
    pub fn objectives(&self) -> Option<Slo> {
        (!self.goodput.is_empty()).then(|| Slo { clauses: self.goodput.clone() })
    }

    /// The arrival process of --burstiness.
    pub fn arrivals(&self) -> Option<Arrivals> {
        let shape = self.burstiness?;
        Some(if (shape - 1.0).abs() < 1e-9 { Arrivals::Poisson } else { Arrivals::Gamma(1.0 / shape.sqrt()) })
    }

    /// Lengths around those of a workload of one length.
    pub fn spread(&self, workload: Workload) -> anyhow::Result<Workload> {
        let Some(ratio) = self.random_range_ratio.filter(|ratio| *ratio > 0.0) else { return Ok(workload) };
        let around = |lengths: &Lengths| -> anyhow::Result<Lengths> {
            let Lengths::Fixed { tokens } = *lengths else {
                anyhow::bail!("--random-range-ratio spreads --input-len and --output-len; give them")
            };
            let at = |factor: f64| whole_count(tokens as f64 * factor).max(1);
            Ok(Lengths::Histogram { buckets: vec![(at(1.0 - ratio), at(1.0 + ratio), 1.0)] })
        };
        let (input, output) = (around(&workload.input)?, around(&workload.output)?);
        Ok(Workload { input, output, ..workload }.checked()?)
    }

    pub fn saved(&self) -> &SavedResultArgs {
        &self.saved
    }
}

impl SavedResultArgs {
    /// Whether a file is to be written.
    pub fn is_asked(&self) -> bool {
        self.save_result
    }

    fn folder(&self, config: &ServeConfig) -> PathBuf {
        self.result_dir.clone().or_else(|| config.out.clone()).unwrap_or_else(|| ".".into())
    }

    /// Makes the folder, before anything is measured for it.
    pub fn prepare(&self, config: &ServeConfig) -> anyhow::Result<()> {
        if !self.save_result {
            return Ok(());
        }
        let folder = self.folder(config);
        std::fs::create_dir_all(&folder)
            .and_then(|()| tempfile::tempfile_in(&folder).map(drop))
            .with_context(|| format!("--save-result: {} cannot be written to", folder.display()))
    }

    /// Writes what was asked for; the paths of the files.
    pub fn write(&self, report: &ServeReport, config: &ServeConfig) -> anyhow::Result<Vec<PathBuf>> {
        if !self.save_result {
            return Ok(Vec::new());
        }
        let folder = self.folder(config);
        let selection = Selection {
            metrics: self.percentile_metrics.clone(),
            percentiles: self.metric_percentiles.clone(),
        };
        let results: Vec<_> = report
            .points
            .iter()
            .filter_map(|point| Some((point, bench_serve(report, point, &selection)?)))
            .map(|(point, mut result)| {
                // As keys of their own, where vLLM puts them; what was measured keeps its name.
                for (key, value) in config.server.iter().flat_map(|server| &server.metadata) {
                    let fields = result.as_object_mut().into_iter();
                    fields.for_each(|all| _ = all.entry(key).or_insert_with(|| value.clone().into()));
                }
                (point, result)
            })
            .collect();
        let mut written = Vec::new();
        for (index, (point, result)) in results.iter().enumerate() {
            let path = folder.join(self.name(report, &point.label, (index, results.len())));
            let text = serde_json::to_string_pretty(result)?;
            crate::machine::atomic_file::write_atomic(&path, &text)?;
            written.push(path);
        }
        Ok(written)
    }

    fn name(&self, report: &ServeReport, label: &str, (index, count): (usize, usize)) -> String {
        let plain = |text: &str| -> String {
            text.chars()
                .map(|c| if c.is_ascii_alphanumeric() || matches!(c, '.' | '-') { c } else { '-' })
                .collect()
        };
        match &self.result_filename {
            None => {
                let started = report.started_at.as_deref().unwrap_or("undated");
                plain(&format!("hbmark-{label}-{}-{started}", report.model_name())) + ".json"
            }
            Some(name) if count == 1 => name.clone(),
            Some(name) => match name.rsplit_once('.') {
                Some((stem, ending)) => format!("{stem}-{}.{ending}", index + 1),
                None => format!("{name}-{}", index + 1),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_in_milliseconds() {
        let found = limit("ttft:200").unwrap();
        assert_eq!((found.metric, found.limit_ns), (SloMetric::Ttft, 2e8));
        for wrong in ["ttft", "ttft:0", "itl:5", "tpot:x", "tpot:-1"] {
            assert!(limit(wrong).unwrap_err().contains("ttft:200"), "{wrong}");
        }
    }
}
