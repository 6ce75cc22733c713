//! The flags of a live server.

use clap::Args;

use super::flags::within;
use crate::cli::shared_args::AccessArgs;
use crate::serve::ServerConfig;
use hbmark_client::dialect::Backend;
use hbmark_client::header::HeaderError;
use hbmark_core::result::serving::parse_span;
use hbmark_core::units::Nanos;

/// A server that is measured over HTTP.
#[derive(Debug, Args)]
#[command(next_help_heading = "Live server")]
#[group(requires = "url")]
pub(super) struct ServerArgs {
    /// Measure the OpenAI-compatible server at this base URL (http://localhost:8000), instead of an engine in this process.
    #[arg(long, visible_alias = "base-url", conflicts_with = "simulate")]
    pub url: Option<String>,
    /// Kind of server: openai, vllm, sglang, tensorrt-llm, tgi or llama.cpp, with -chat for chat completions [default: as it answers].
    #[arg(long, value_name = "KIND")]
    backend: Option<Backend>,
    /// Name of the model in requests [default: the first one that the server lists].
    #[arg(long, value_name = "NAME")]
    served_model_name: Option<String>,
    /// Path of requests behind the base URL [default: the API's]; of chat completions where it ends in /chat/completions.
    #[arg(long, value_name = "PATH", value_parser = path)]
    endpoint: Option<String>,
    #[command(flatten)]
    access: AccessArgs,
    /// JSON object whose fields are added to every request.
    #[arg(long, value_name = "JSON", value_parser = object)]
    extra_body: Option<String>,
    /// Keep the server's prefix cache of these requests apart from that of others (`cache_salt`; turned off where there is no such field).
    #[arg(long, value_name = "TEXT")]
    cache_salt: Option<String>,
    /// A request that takes longer has failed (30s, 10m) [default: 1h, and 10m without a token].
    #[arg(long, value_name = "TIME", value_parser = parse_span)]
    request_timeout: Option<Nanos>,
    /// Seconds between two readings of the server's /metrics; 0 for none.
    #[arg(long, default_value = "1", value_name = "SECONDS", value_parser = within(0.0..=3600.0))]
    metrics_interval: f64,
    /// Settings of the server to keep with the result and in the file of --save-result, as in tp=8.
    #[arg(long, value_name = "KEY=VALUE", num_args = 1.., value_parser = pair)]
    metadata: Vec<(String, String)>,
}

fn path(given: &str) -> Result<String, String> {
    let is_path =
        given.starts_with('/') && given.bytes().all(|byte| byte.is_ascii_graphic() && !b"?#".contains(&byte));
    is_path.then(|| given.to_owned()).ok_or_else(|| {
        "it is not a path such as /v1/completions, without blanks and without parameters".to_owned()
    })
}

fn pair(given: &str) -> Result<(String, String), String> {
    let pair = given.split_once('=').map(|(key, value)| (key.trim(), value.trim()));
    let (key, value) = pair.filter(|(key, _)| !key.is_empty()).ok_or("it is not KEY=VALUE, as in tp=8")?;
    Ok((key.to_owned(), value.to_owned()))
}

fn object(given: &str) -> Result<String, String> {
    let fields: serde_json::Map<String, serde_json::Value> = serde_json::from_str(given)
        .map_err(|error| format!("it is not a JSON object ({error}); write it as '{{\"top_p\": 0.9}}'"))?;
    for field in ["n", "best_of"] {
        if let Some(count) = fields.get(field).and_then(serde_json::Value::as_u64).filter(|count| *count > 1)
        {
            return Err(format!(
                "it sets {field} to {count}, but latency and tokens are those of one completion per request; leave it out, and raise the load instead"
            ));
        }
    }
    Ok(given.to_owned())
}

impl ServerArgs {
    /// The server, where one is asked for, and the model as it was given.
    ///
    /// # Errors
    /// When a header cannot be sent.
    pub fn config(&self, model: Option<&str>) -> Result<Option<ServerConfig>, HeaderError> {
        let Some(url) = self.url.clone() else { return Ok(None) };
        Ok(Some(ServerConfig {
            url,
            backend: self.backend,
            served_model: self.served_model_name.clone(),
            model: model.map(str::to_owned),
            access: self.access.access()?,
            endpoint: self.endpoint.clone(),
            extra_body: self.extra_body.clone(),
            ignore_eos: false,
            request_timeout_s: self.request_timeout.map(Nanos::seconds),
            metrics_interval_s: self.metrics_interval,
            cap: None,
            cache_salt: self.cache_salt.clone(),
            metadata: self.metadata.iter().cloned().collect(),
        }))
    }
}
