//! Our own serving results as rows beside those of other programs, and on the roofline.
//!
//! Enters: a serving result. Leaves: a row per measured point; of a live server whose counters show its steps, another one with their time.

use super::{ForeignFormat, ForeignResult, ForeignRow, Metric, Rate, Setup, Statistic, Value};
use hbmark_core::result::Cause;
use hbmark_core::result::serving::{
    LEVELS, Offered, Point, Quantiles, Quantity, ServeKind, ServeReport, ServeResult, Validity,
};
use hbmark_core::units::whole;

/// The points of a result that were measured.
pub fn of_serving(report: &ServeReport, source: &str) -> ForeignResult {
    let rows = report.points.iter().filter_map(|point| Some((point, point.result.as_ref()?)));
    ForeignResult {
        source: source.to_owned(),
        format: ForeignFormat::HbmarkServe,
        rows: rows.flat_map(|(point, result)| rows_of(report, point, result)).collect(),
    }
}

fn rows_of(report: &ServeReport, point: &Point, result: &ServeResult) -> Vec<ForeignRow> {
    let setup = setup(report, point, result);
    let mut values = Vec::new();
    for (metric, key, quantiles) in [
        (Metric::Tpot, "tpot_ns", &result.tpot_ns),
        (Metric::Itl, "itl_ns", &result.itl_ns),
        (Metric::Ttft, "ttft_ns", &result.ttft_ns),
        (Metric::E2e, "e2e_ns", &result.e2e_ns),
    ] {
        values.extend(quantiles.iter().flat_map(|quantiles| times(metric, key, quantiles)));
    }
    for (metric, key, value) in [
        (Metric::OutputThroughput, "output_tokens_per_s", result.output_tokens_per_s),
        (Metric::RequestThroughput, "served_per_s", result.served_per_s),
    ] {
        values.push(Value { metric, statistic: Statistic::Single, value, key: key.to_owned() });
    }
    let saturated = result.validity == Validity::Saturated;
    let mut problems = Vec::new();
    if report.kind == ServeKind::ServeVirtual {
        problems.push(Cause::other("its times are computed on a virtual clock, and none was measured"));
    }
    if result.validity == Validity::Invalid {
        problems.extend(result.reasons.first().cloned().or_else(|| Some(Cause::other("invalid"))));
    }
    let steps = server_steps(point, &setup, &problems);
    let label = point.label.clone();
    let row = ForeignRow { label, setup, values, problems, saturated, ..ForeignRow::default() };
    [row].into_iter().chain(steps).collect()
}

/// The steps of a live server, by its own counters.
fn server_steps(point: &Point, setup: &Setup, problems: &[Cause]) -> Option<ForeignRow> {
    let steps = point.live.as_ref()?.server.as_ref()?.busy_steps?;
    let engine = setup.engine.as_deref().unwrap_or("server");
    let batch = steps.mean_batch.map(|mean| whole(mean.round().max(1.0)));
    let value = Value {
        metric: Metric::DecodeStep,
        statistic: Statistic::Mean,
        value: steps.mean_step_ns,
        key: "busy_steps.mean_step_ns".to_owned(),
    };
    let mixed = steps.decode_steps == steps.steps;
    Some(ForeignRow {
        label: format!("{}, steps of the server", point.label),
        setup: Setup { engine: Some(format!("{engine} steps")), batch, ..setup.clone() },
        values: vec![value],
        remarks: mixed.then(|| "steps that prefill are in the mean".to_owned()).into_iter().collect(),
        problems: problems.to_vec(),
        ..ForeignRow::default()
    })
}

fn setup(report: &ServeReport, point: &Point, result: &ServeResult) -> Setup {
    let engine = match (&report.server, &report.capabilities) {
        (Some(server), _) => server.dialect.name().to_owned(),
        (None, Some(engine)) => format!("{} serve", engine.engine),
        (None, None) => "virtual clock".to_owned(),
    };
    // The machine of the client is not that of the server.
    let environment = report.server.is_none().then_some(&report.environment);
    let whole = |count: usize| u64::try_from(count).ok();
    Setup {
        engine: Some(engine),
        engine_version: report.server.as_ref().and_then(|server| server.version.clone()),
        model: Some(report.model_name().to_owned()),
        dtype: report.dtype,
        stored_as: report.dtype.map(|dtype| dtype.to_string()),
        kv_dtype: report.kv_dtype(),
        gpu: match &report.datasheet {
            Some(sheet) => Some(sheet.name.clone()),
            None => environment.and_then(|e| e.gpu.as_ref()?.name.clone()),
        },
        cpu: environment.and_then(|e| e.cpu.model.clone()),
        max_concurrency: match point.offered {
            Offered::Concurrency(most) => whole(most),
            Offered::Rate(_) | Offered::AtOnce | Offered::AsRecorded => None,
        },
        concurrency: (result.mean_running > 0.0).then_some(result.mean_running),
        request_rate: match point.offered {
            Offered::Rate(rate) => Some(Rate::PerSecond(rate)),
            Offered::AtOnce | Offered::Concurrency(_) => Some(Rate::Unlimited),
            Offered::AsRecorded => result.offered_per_s.map(Rate::PerSecond),
        },
        input_tokens: Some(point.prompt_tokens()),
        output_tokens: Some(point.output_tokens()),
        requests: whole(result.measured),
        completed: whole(result.served),
        failed: whole(result.measured - result.served.min(result.measured)),
        duration_s: Some(result.window_s),
        warmup: whole(result.warmup_requests),
        seed: Some(point.seed),
        date: report.started_at.clone(),
        ..Setup::default()
    }
}

/// The statistics of a time; those that failed requests made infinite are none.
fn times(metric: Metric, key: &str, quantiles: &Quantiles) -> Vec<Value> {
    let value = |statistic, of: Option<Quantity>, name: String| {
        let value = of.map(Quantity::value).filter(|value| value.is_finite())?;
        Some(Value { metric, statistic, value, key: format!("{key}.{name}") })
    };
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a percentile in hundredths of a percent"
    )]
    let levels = LEVELS.iter().map(|(share, of)| {
        let hundredths = (share * 1e4).round() as u16;
        let statistic =
            if hundredths == 5000 { Statistic::Median } else { Statistic::Percentile(hundredths) };
        value(statistic, of(quantiles), format!("p{}", share * 100.0))
    });
    let mean = value(Statistic::Mean, quantiles.mean, "mean".to_owned());
    levels.chain([mean, value(Statistic::Max, quantiles.max, "max".to_owned())]).flatten().collect()
}
