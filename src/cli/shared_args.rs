//! Flags that several subcommands share.

pub use crate::run::config::parse_dtypes;

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};

use crate::engine::DeviceChoice;
use crate::machine::device::UnknownDevice;
use crate::run::config;
use crate::serve::ServerAccess;
use hbmark_client::header::HeaderError;
use hbmark_core::model::Dtype;
use hbmark_report::output::Format;

/// Which model, on which device.
#[derive(Debug, Clone, Args)]
pub struct ModelArgs {
    /// A name (`hbmark models`), a Hugging Face folder, a hub id (org/name) or a GGUF file. MODEL+mtp or MODEL+eagle is the draft layer (MTP or
    /// EAGLE) of that model, with random weights.
    #[arg(short, long, env = "HBMARK_MODEL", default_value = config::DEFAULT_MODEL)]
    pub model: String,
    /// Revision of a hub id: a branch, tag or commit.
    #[arg(long)]
    pub revision: Option<String>,
    /// Seed of synthetic weights, prompts and cell order.
    #[arg(long, env = "HBMARK_SEED", default_value_t = 42)]
    pub seed: u64,
}

impl ModelArgs {
    /// No model was named.
    pub fn is_default(&self) -> bool {
        self.model == config::DEFAULT_MODEL
    }

    /// The model, where one was named.
    pub fn given(&self) -> Option<&str> {
        (!self.is_default()).then_some(self.model.as_str())
    }
}

/// How a live server is reached.
#[derive(Debug, Clone, Args)]
#[group(requires = "url")]
pub struct AccessArgs {
    /// Environment variable with the API key.
    #[arg(long, value_name = "NAME", default_value = "OPENAI_API_KEY")]
    pub api_key_env: String,
    /// PEM file of certificates to trust for https, instead of Mozilla's.
    #[arg(long, value_name = "FILE")]
    pub ca_cert: Option<PathBuf>,
    /// Headers of every request, also of those beside the measured ones. '$VARIABLE' at the end of a value is taken from the environment,
    /// and must be where a name suggests a secret: the command line is part of results.
    // Read later: an error of the parser would show the value.
    #[arg(long, value_name = "NAME=VALUE", num_args = 1..)]
    pub header: Vec<String>,
}

impl AccessArgs {
    /// # Errors
    /// When a header cannot be sent.
    pub fn access(&self) -> Result<ServerAccess, HeaderError> {
        Ok(ServerAccess {
            key_variable: self.api_key_env.clone(),
            ca_cert: self.ca_cert.clone(),
            headers: self.header.iter().map(|given| given.parse()).collect::<Result<_, _>>()?,
        })
    }
}

/// The storages of a KV cache that can be counted: all dtypes but the blocks of 256, which are of weights alone, and a file's own.
pub fn kv_dtype() -> impl TypedValueParser<Value = Dtype> {
    dtypes(|dtype| !matches!(dtype, Dtype::Gguf | Dtype::Q4K | Dtype::Q5K | Dtype::Q6K))
}

/// The storages of a KV cache that an engine has.
pub fn engine_kv_dtype() -> impl TypedValueParser<Value = Dtype> {
    dtypes(|dtype| matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::Bf16 | Dtype::Fp8 | Dtype::Int8))
}

fn dtypes(is_one: fn(&Dtype) -> bool) -> impl TypedValueParser<Value = Dtype> {
    let caches = Dtype::value_variants().iter().filter(|dtype| is_one(dtype));
    // Without the words on how weights are stored.
    let names = caches.filter_map(Dtype::to_possible_value);
    PossibleValuesParser::new(names.map(|name| name.help(None::<&str>)))
        .map(|name| Dtype::from_str(&name, false).expect("one of the names above"))
}

/// Which device, and how many threads of it.
#[derive(Debug, Clone, Args)]
pub struct DeviceArgs {
    /// cpu, cuda or cuda:N [default: cuda in a CUDA build, cpu otherwise].
    #[arg(long, env = "HBMARK_DEVICE")]
    pub device: Option<String>,
    /// Threads of a CPU engine [default: every core this process may use].
    #[arg(short, long, env = "HBMARK_THREADS", value_parser = threads)]
    pub threads: Option<u32>,
}

/// Reads a number within bounds, both of them allowed.
pub fn within<T>(
    bounds: RangeInclusive<T>,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static
where
    T: FromStr<Err: Display> + PartialOrd + Display + Clone + Send + Sync + 'static,
{
    move |given| {
        let (least, most) = (bounds.start(), bounds.end());
        let value: T = given.parse().map_err(|problem: T::Err| {
            format!("{given} is not a number between {least} and {most}: {problem}")
        })?;
        if bounds.contains(&value) {
            return Ok(value);
        }
        Err(format!("{given} is not between {least} and {most}; give a number in that range"))
    }
}

/// Reads a length within bounds, such as 4096 or 4k.
pub fn length_within(
    bounds: RangeInclusive<usize>,
) -> impl Fn(&str) -> Result<usize, String> + Clone + Send + Sync + 'static {
    let within = within(bounds);
    move |given| within(&config::parse_length(given)?.to_string())
}

/// Reads a number of threads that this process has CPUs for: more of them only wait for each other.
fn threads(given: &str) -> Result<u32, String> {
    let cpus = crate::measure::probe::usable_cores().map_or(4096, |cores| cores.len());
    threads_of(given, cpus)
}

fn threads_of(given: &str, cpus: usize) -> Result<u32, String> {
    let wanted: u32 = given.parse().map_err(|_| format!("wanted a number from 1 to {cpus}"))?;
    if wanted == 0 || wanted as usize > cpus {
        return Err(format!(
            "this process may use {cpus} CPUs; ask for 1 to {cpus}, or leave it out to use all"
        ));
    }
    Ok(wanted)
}

impl DeviceArgs {
    /// The device asked for, or the best of this build.
    pub fn choice(&self) -> Result<DeviceChoice, UnknownDevice> {
        self.device.as_deref().map_or_else(|| Ok(DeviceChoice::default_of_build()), str::parse)
    }
}

/// What becomes of the result.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = None)]
pub struct OutputArgs {
    /// Write the result as JSON, CSV, Markdown and HTML into this folder; until then a journal of what was measured.
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// What to print on stdout.
    #[arg(short = 'o', long, value_enum, default_value = "table")]
    pub format: Format,
    /// A note to keep with the result.
    #[arg(long)]
    pub note: Option<String>,
    /// What you expect to see; kept with the result.
    #[arg(long)]
    pub hypothesis: Option<String>,
}

/// The first line of clap's error: usage and hints are those of another command.
pub fn first_line(error: &clap::Error) -> anyhow::Error {
    let text = error.to_string();
    anyhow::anyhow!(text.lines().next().unwrap_or_default().trim_start_matches("error: ").to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_threads_than_cpus_are_refused_with_the_number_there_is() {
        assert_eq!(threads_of("2", 2), Ok(2));
        for given in ["999", "3", "0"] {
            assert!(threads_of(given, 2).unwrap_err().contains("may use 2 CPUs"), "{given}");
        }
        assert!(threads_of("two", 2).unwrap_err().contains("1 to 2"));
    }
}
