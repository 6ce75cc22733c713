//! inference-perf: the lifecycle report of a stage or of all stages, and the report from the server's own Prometheus metrics.
//!
//! Enters: a document. Leaves: one row a file. Its `time_per_output_token` is our TPOT, `normalized_time_per_output_token` spreads the whole
//! request over its tokens, and `inter_token_latency` are the gaps.

use super::document::Document;
use super::fields::Fields;
use super::{ForeignFormat, ForeignResult, ForeignRow, ImportError, Setup};

const FORMAT: ForeignFormat = ForeignFormat::InferencePerf;
/// A schedule that slips by more than this hides queueing, in seconds.
const LATE_S: f64 = 0.1;

pub(super) fn read(document: &Document) -> Option<Result<Vec<ForeignResult>, ImportError>> {
    let records = document.objects_with(&["load_summary", "successes", "failures"])?;
    Some(document.result(FORMAT, records, row))
}

fn row(fields: &Fields<'_>) -> Result<ForeignRow, ImportError> {
    let (values, mut remarks) = fields.values(FORMAT)?;
    let failed = fields.count("failures.count")?;
    remarks.extend(super::failures(failed));
    if let Some(late) = fields.late("load_summary.schedule_delay.p99", LATE_S) {
        remarks.push(format!(
            "1 % of the requests were sent {late:.2} s late or more: times count from sending, so waiting before it is hidden"
        ));
    }
    let rate = fields.rate("load_summary.requested_rate")?;
    let server = fields.get("successes.latency").is_none();
    // It comes after the latencies, and truncated YAML still parses.
    if !server && fields.get("successes.throughput").is_none() {
        return Err(fields.missing("successes.throughput", FORMAT));
    }
    if server {
        remarks.push("from the server's own metrics, client and network not in it".to_owned());
    }
    let label = match &rate {
        Some(super::Rate::PerSecond(rate)) => format!("{rate:.2} req/s"),
        _ if server => "server metrics".to_owned(),
        _ => "all stages".to_owned(),
    };
    let setup = Setup {
        request_rate: rate,
        input_tokens: fields.number("successes.prompt_len.mean")?,
        output_tokens: fields.number("successes.output_len.mean")?,
        completed: fields.count("successes.count")?,
        failed,
        duration_s: fields.number("load_summary.send_duration")?,
        ..Setup::default()
    };
    Ok(ForeignRow { label, setup, values, remarks, ..ForeignRow::default() })
}
