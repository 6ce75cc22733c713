//! A live server as the engine of a serving benchmark: found out what it is, and asked in its own words.
//!
//! Enters: a [`ServerConfig`]. Leaves: a [`Server`] of the client, ready for points. What is sent and how it is timed is the client's.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use hbmark_client::dialect::{Api, Backend, RequestField};
use hbmark_client::header::{Header, HeaderError};
use hbmark_client::point::{Isolation, Prompts, Server};
use hbmark_client::probe::probe;
use hbmark_client::run::Limits;
use hbmark_client::target::{Endpoint, Target, TargetError};
use hbmark_core::result::serving::{
    AdapterSummary, Dialect, FetchFailure, LoraSummary, Outcome, Probe, Question, ServerIdentity,
    StructuredSummary,
};
use hbmark_core::units::{Bytes, Nanos};
use hbmark_traffic::adapters::AdapterMix;
use serde::Serialize;

use super::adapters_and_grammar::{self, LoraConfig, traffic};
use super::structured_output::Grammar;
use super::{ServeConfig, ServeError};
use crate::weights::OpenModel;
use crate::weights::tokenizer::Tokenizer;

/// Words below which prompts would be too much alike.
const MIN_WORDS: usize = 32;
/// The vocabulary of a model that nothing is known of: smaller than any that is in use.
const VOCABULARY: usize = 30_000;

/// A server, as it is asked for.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ServerConfig {
    pub url: String,
    /// None: as the server says.
    pub backend: Option<Backend>,
    pub served_model: Option<String>,
    /// What --model says; the name to ask for where the server lists it.
    pub model: Option<String>,
    pub access: ServerAccess,
    /// The path of requests; none: as the API has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// A JSON object.
    pub extra_body: Option<String>,
    /// Outputs go on after the end of the sequence where the API has no word for it, too.
    pub ignore_eos: bool,
    /// None: an hour, ten minutes of them without a token.
    pub request_timeout_s: Option<f64>,
    /// Between two readings of its counters; 0 for none.
    pub metrics_interval_s: f64,
    /// Most requests in flight, in an open loop.
    pub cap: Option<usize>,
    /// Keeps the prefix cache of these requests apart from that of others.
    pub cache_salt: Option<String>,
    /// What else a person wants to find in the result.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
}

/// How a server is reached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ServerAccess {
    /// The environment variable with the key. The key itself is nowhere but in the requests.
    pub key_variable: String,
    /// Certificates that are trusted instead of Mozilla's.
    pub ca_cert: Option<PathBuf>,
    /// Sent with every request.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub headers: Vec<Header>,
}

impl ServerAccess {
    /// The target, with the key and other secrets of the environment.
    ///
    /// # Errors
    /// When the URL, the key, a header or the certificates cannot be used.
    pub fn target(&self, url: &str) -> Result<Target, ServerError> {
        let environment = |name: &str| std::env::var(name).ok();
        let key = environment(&self.key_variable).filter(|key| !key.trim().is_empty());
        let mut target = Target::new(url, key.as_deref().map(str::trim))?;
        for header in &self.headers {
            target = target.with_header(header.look_up(environment)?);
        }
        Ok(match self.ca_cert.as_deref().filter(|_| target.is_encrypted()) {
            Some(path) => target.with_certificates(path)?,
            None => target,
        })
    }
}

/// Why a server cannot be measured.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    #[error(transparent)]
    Target(#[from] TargetError),
    #[error(transparent)]
    Header(#[from] HeaderError),
    #[error("nothing answers at {url}; start the server, or name the URL at which it listens (--url)")]
    NothingThere { url: String },
    #[error(
        "{url}/health answers 503: the model may still be loading; wait until `hbmark doctor --url {url}` says that it is ready"
    )]
    NotReady { url: String },
    #[error("{url} has no address; check the spelling of its name, and that its port is between 1 and 65535")]
    NoAddress { url: String },
    #[error("{url} lists no model; name the one to ask for (--served-model-name)")]
    NoModel { url: String },
    #[error("{0}")]
    NoModels(String),
    #[error(
        "{url} does not list {asked}, and no shape has that name; it lists {listed}; --served-model-name asks for one that is not listed"
    )]
    OtherModel { url: String, asked: String, listed: String },
    #[error("the extra body is not a JSON object: {0}")]
    ExtraBody(#[from] serde_json::Error),
}

impl ServerConfig {
    /// The path of requests below the root of the target, which has no `/v1`.
    fn path(&self, backend: Backend) -> String {
        match &self.endpoint {
            None => backend.endpoint().path.to_owned(),
            Some(path) if self.url.trim_end_matches('/').ends_with("/v1") && !path.starts_with("/v1/") => {
                format!("/v1{path}")
            }
            Some(path) => path.clone(),
        }
    }

    /// The model to ask for: as it was named, listed, or the first that is listed where what was named is a shape.
    fn name(&self, found: &Probe, is_shape: bool) -> Result<String, ServerError> {
        if let Some(name) = &self.served_model {
            return Ok(name.clone());
        }
        let listed: Vec<&str> = found.models.iter().map(|model| model.id.as_str()).collect();
        let url = found.root.clone();
        match (&self.model, listed.first()) {
            (Some(name), None) if !found.is_no_server() => Ok(name.clone()),
            (_, None) => {
                Err(found.models_problem().map_or(ServerError::NoModel { url }, ServerError::NoModels))
            }
            (Some(name), _) if listed.contains(&name.as_str()) => Ok(name.clone()),
            (Some(name), _) if !is_shape => {
                let listed = listed[..listed.len().min(8)].join(", ");
                Err(ServerError::OtherModel { url, asked: name.clone(), listed })
            }
            (_, Some(first)) => Ok((*first).to_owned()),
        }
    }

    /// Asks the server what it is.
    pub(super) fn open(
        &self,
        config: &ServeConfig,
        model: Option<&OpenModel>,
    ) -> Result<OpenServer, ServeError> {
        let target = self.access.target(&self.url)?;
        let found = probe(&target, None);
        if found.addresses.is_empty() {
            return Err(ServerError::NoAddress { url: found.root }.into());
        }
        if !found.connects() {
            return Err(ServerError::NothingThere { url: found.root }.into());
        }
        let loading = Outcome::Failed(FetchFailure::Status(503));
        if found.asked.iter().any(|asked| asked.question == Question::Health && asked.outcome == loading) {
            return Err(ServerError::NotReady { url: found.root }.into());
        }
        let is_chat = self.endpoint.as_ref().is_some_and(|path| path.ends_with("/chat/completions"));
        let api = if is_chat { Api::Chat } else { Api::Completions };
        let backend = self.backend.unwrap_or(Backend { dialect: found.dialect, api });
        let name = self.name(&found, model.is_some())?;
        let listed = found.models.iter().find(|model| model.id == name);
        // What a server says of its first model holds for no other.
        let other = listed.filter(|listed| found.models.first().is_some_and(|first| first.id != listed.id));
        let longest = other.map_or(found.max_model_len, |model| model.max_model_len);
        let identity = ServerIdentity {
            url: found.root.clone(),
            dialect: backend.dialect,
            path: self.path(backend),
            model: name,
            version: found.version.clone(),
            max_model_len: longest.and_then(|most| usize::try_from(most).ok()),
        };
        let vocabulary = listed.or(found.models.first()).and_then(|model| model.vocab_size);
        let (prompts, mut warnings) = prompts(config, model, backend, vocabulary)?;
        if let Some(shape) =
            self.model.as_ref().filter(|given| self.served_model.is_none() && **given != identity.model)
        {
            warnings.push(format!(
                "the server does not list {shape}, which gives the shape alone: {} is asked for, the first that it lists (--served-model-name)",
                identity.model
            ));
        }
        if self.backend.is_none() && found.dialect == Dialect::OpenAi && !self.ignore_eos {
            warnings.push(
                "the server does not say what it is: only OpenAI's own fields are sent, and outputs may end early (--backend names it)".into(),
            );
        }
        let mut extra: Option<serde_json::Map<String, serde_json::Value>> =
            self.extra_body.as_deref().map(serde_json::from_str).transpose().map_err(ServerError::from)?;
        // A grammar ends an output where it is complete.
        if self.ignore_eos
            && !backend.endpoint().has(RequestField::ForcedLength)
            && config.asked_structure().is_none()
        {
            extra.get_or_insert_default().entry("ignore_eos").or_insert(true.into());
        }
        let page = found.metrics.as_ref().map(|metrics| metrics.page.clone());
        let interval = Duration::from_secs_f64(self.metrics_interval_s);
        let structured = config.asked_structure();
        let grammar = structured.map(|asked| asked.grammar.parse::<Grammar>()).transpose()?;
        let lora = config.lora.as_ref().map(|asked| adapters(asked, config)).transpose()?;
        let server = Server {
            constraint: grammar.as_ref().map(Grammar::constraint).transpose()?,
            adapters: lora
                .iter()
                .flat_map(|(summary, _)| &summary.adapters)
                .map(|a| a.name.clone())
                .collect(),
            endpoint: Endpoint::resolve(target).map_err(ServerError::from)?,
            backend,
            identity,
            limits: self
                .request_timeout_s
                .map_or_else(Limits::default, |total| Limits::whole(Duration::from_secs_f64(total))),
            cap: self.cap,
            prompts,
            salt: self.cache_salt.clone(),
            extra,
            metrics: page.filter(|_| !interval.is_zero()).map(|page| (page, interval)),
        };
        warnings.extend(server.endpoint.several_addresses());
        if self.cache_salt.is_some() {
            warnings.extend(isolation_warning(server.isolation()));
        }
        let structured = structured.zip(grammar).map(|(asked, grammar)| StructuredSummary {
            grammar: grammar.to_string(),
            share: asked.share,
            vocabulary_ns: None,
            compile_ns: None,
        });
        Ok(OpenServer { server, lora, structured, warnings })
    }
}

/// A server, ready for points.
pub(super) struct OpenServer {
    pub server: Server,
    pub lora: Option<(LoraSummary, AdapterMix)>,
    pub structured: Option<StructuredSummary>,
    /// What a person should know.
    pub warnings: Vec<String>,
}

/// The adapters that the server has: of these only the names are known.
fn adapters(asked: &LoraConfig, config: &ServeConfig) -> Result<(LoraSummary, AdapterMix), ServeError> {
    if asked.synthetic > 0 || asked.modules.is_empty() {
        return Err(ServeError::Needs {
            what: "adapters on a live server",
            needs: "the names under which it has them: --lora-modules a b",
        });
    }
    let adapters = asked.modules.iter().map(|(name, _)| AdapterSummary {
        name: name.clone(),
        source: "the server".to_owned(),
        rank: 0,
        targets: Vec::new(),
        parameters: 0,
        bytes: Bytes(0),
        disk_ns: None,
        memory_ns: None,
    });
    let summary = LoraSummary {
        adapters: adapters.collect(),
        max_loras: config.scheduler.max_loras,
        max_lora_rank: asked.max_lora_rank,
    };
    let mix = traffic(asked, &summary, Bytes(0), Nanos(0.0));
    Ok((summary, mix))
}

/// What a salt does not do here.
fn isolation_warning(isolation: Isolation) -> Option<String> {
    let warning = match isolation {
        Isolation::Salt => return None,
        Isolation::Off => "this server knows no salts: its prefix cache is turned off for these requests",
        Isolation::None => {
            "this server cannot keep prefix caches apart (--cache-salt): requests may find the prompts of another run"
        }
    };
    Some(warning.to_owned())
}

/// What prompts are made of: ids where the server takes them, text otherwise, of an exact length where there is a tokenizer.
fn prompts(
    config: &ServeConfig,
    model: Option<&OpenModel>,
    backend: Backend,
    vocabulary: Option<u64>,
) -> Result<(Prompts, Vec<String>), ServeError> {
    let endpoint = backend.endpoint();
    // OpenAI's API has ids, and many servers that speak it do not.
    let takes_ids = endpoint.has(RequestField::Ids) && backend.dialect != Dialect::OpenAi;
    let tokenizer = match model {
        Some(model) => adapters_and_grammar::tokenizer(config.tokenizer.as_ref(), model)?,
        None => config.tokenizer.as_deref().map(Tokenizer::open_path).transpose()?.map(Box::new),
    };
    if takes_ids {
        let said = vocabulary.and_then(|size| usize::try_from(size).ok());
        let given = model.map(|model| model.architecture.vocab_size);
        return Ok((Prompts::ids(said.or(given).unwrap_or(VOCABULARY)), Vec::new()));
    }
    let words = tokenizer.as_ref().map(|tokenizer| tokenizer.words()).unwrap_or_default();
    let Some(tokenizer) = tokenizer.filter(|_| words.len() >= MIN_WORDS) else {
        let warning = "prompts are common words, one for each token that was planned: the server's own count, where it gives one, is shown beside it \
                       (--tokenizer PATH makes prompts of an exact length)";
        return Ok((Prompts::words(), vec![warning.to_owned()]));
    };
    let tokenizer: Rc<Tokenizer> = Rc::from(tokenizer);
    let decode = move |ids: &[u32]| tokenizer.decode(ids).unwrap_or_default();
    Ok((Prompts { vocabulary: words, decode: Some(Rc::new(decode)) }, Vec::new()))
}
