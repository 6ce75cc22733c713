//! Reports made by hand, for tests: a machine of round numbers, with or without cells.

use hbmark_core::ledger::{Ledger, StepShape};
use hbmark_core::model::{Dtype, test_shapes};
use hbmark_core::result::serving::{
    Dialect, Gate, GateName, LiveResult, Point, Quantiles, ServeResult, ServerIdentity, StampSource, Validity,
};
use hbmark_core::result::{
    Block, BlockTelemetry, Cause, Ceilings, CellResult, Crossover, CrossoverKind, Finding, ModelSummary,
    Phase, ProtocolSummary, Report, ReportKind, Spread, Status,
};
use hbmark_core::units::Bytes;

/// A run on a machine that reads 10 GB/s, multiplies 1 TFLOP/s in bf16 and half of that in f32, and has 32 MB of cache.
pub fn report() -> Report {
    let spread = |median: f64| Spread { median, low: median * 0.99, high: median * 1.01 };
    let architecture = test_shapes::llama_3_2_1b();
    let inventory = architecture.inventory(Dtype::Bf16);
    let model = ModelSummary::new("Llama-3.2-1B", "synthetic, seed 7", &architecture, &inventory);
    let model = ModelSummary { hash: "0".into(), ..model };
    Report {
        protocol: Some(ProtocolSummary::full(7)),
        ceilings: Some(Ceilings {
            read_bytes_per_s: spread(10e9),
            copy_bytes_per_s: spread(9e9),
            triad_bytes_per_s: spread(9e9),
            gemm_flops_per_s: [("bf16".to_owned(), spread(1e12)), ("f32".to_owned(), spread(5e11))].into(),
            launch_ns: None,
            working_set_bytes: Bytes(1 << 30),
            last_cache_bytes: Some(Bytes(32_000_000)),
            read_configuration: "2 threads, avx512".into(),
            gpu: None,
            disturbed: Vec::new(),
            age_s: None,
        }),
        ..Report::new(ReportKind::Run, "hbmark run --engine stock,native", model)
    }
}

/// The same machine with a grid measured on it: both engines, both phases, two batches, three contexts, five blocks a cell. Native takes
/// 1.1 times its memory floor and stock three times; in each cell the second block was rejected.
pub fn measured() -> Report {
    let mut report = report();
    let grid = [1, 4].into_iter().flat_map(|batch| [128, 512, 1024].map(|context| (batch, context)));
    for (batch, context) in grid {
        for phase in [Phase::Prefill, Phase::Decode] {
            for (engine, dtype, slow) in [("native", Dtype::Bf16, 1.1), ("stock", Dtype::F32, 3.0)] {
                let cell = cell(&report, phase, engine, dtype, (batch, context), slow);
                report.cells.push(cell);
            }
        }
    }
    report.crossovers.push(Crossover {
        what: CrossoverKind::ComputeBoundBatch,
        value: Some(64.0),
        unit: "sequences".into(),
        explanation: "at context 128, batch 64 takes longer to compute than to read".into(),
    });
    report.warnings.push("other load: load average 1.15 over the last minute".into());
    crate::analysis::judge::recompute(&mut report);
    report
}

/// The same machine with verify steps of 1, 3 and 7 draft tokens beside the decode step, at two batches: native, at 1.1 times its floors.
pub fn verified() -> Report {
    let mut report = report();
    let drafts = [1, 3, 7].map(|draft_tokens| Phase::Verify { draft_tokens });
    for phase in std::iter::once(Phase::Decode).chain(drafts) {
        for batch in [1, 4] {
            let cell = cell(&report, phase, "native", Dtype::Bf16, (batch, 128), 1.1);
            report.cells.push(cell);
        }
    }
    crate::analysis::judge::recompute(&mut report);
    report
}

fn cell(
    report: &Report,
    phase: Phase,
    engine: &str,
    dtype: Dtype,
    (batch, context): (usize, usize),
    slow: f64,
) -> CellResult {
    let architecture = &report.model.architecture;
    let ledger = Ledger::new(architecture, &architecture.inventory(dtype), dtype);
    let cost = ledger.step(StepShape { phase, batch, context });
    // At 10 GB/s and 1 TFLOP/s.
    let floor = (cost.bytes.ideal().as_f64() / 10.0).max(cost.flops.0 / 1e3);
    let begin = report.cells.len() as f64 * 1e9;
    let block = |i: u32| {
        let time = floor * slow * (1.0 + 0.002 * f64::from(i % 3));
        Block {
            visit: (i / 2) as usize,
            at_ns: begin + f64::from(i) * 2e8,
            step_ns: vec![time; 3],
            interval_ns: vec![time; 3],
            wall_ns: time * 3.0,
            timeline_ns: Some(time * 3.0),
            memory_bytes: None,
            experts_met: None,
            canary_ratio: Some(1.0 + 0.01 * f64::from(i)),
            read_bytes_per_s: None,
            rejected: (i == 1).then_some(Cause::ForeignLoad { cores: 0.8 }),
            conditions: Vec::new(),
            telemetry: Some(BlockTelemetry {
                sm_clock_mhz: Some(1980.0),
                power_watts: Some(400.0 + f64::from(i)),
                temperature_celsius: Some(55.0),
                ..BlockTelemetry::default()
            }),
        }
    };
    CellResult {
        status: Status::Ok,
        bytes: cost.bytes,
        flops: cost.flops.0,
        blocks: (0..5).map(block).collect(),
        ..CellResult::blank(phase, engine, dtype, batch, context)
    }
}

/// The first line of a finding's evidence contains a text.
#[track_caller]
pub fn says(finding: &Finding, text: &str) {
    assert!(finding.evidence[0].contains(text), "{:?}", finding.evidence);
}

/// The first line of a finding's evidence ends with a text.
#[track_caller]
pub fn ends(finding: &Finding, text: &str) {
    assert!(finding.evidence[0].ends_with(text), "{:?}", finding.evidence);
}

/// A protocol by another name.
pub fn protocol_named(name: &str) -> ProtocolSummary {
    ProtocolSummary { name: name.into(), ..ProtocolSummary::full(7) }
}

/// A result as the program saves it: one of `tests/fixtures/results`, which a test of the program keeps current.
///
/// # Panics
/// When there is none of that name.
pub fn saved<T: serde::de::DeserializeOwned>(name: &str) -> T {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/results");
    let text = std::fs::read_to_string(format!("{folder}/{name}.json")).expect("a fixture of that name");
    serde_json::from_str(&text).expect("a result as the program saves it")
}

/// One point of load on the virtual clock.
pub fn single() -> hbmark_core::result::serving::ServeReport {
    saved("serve-single")
}

/// A sweep over the rate on the virtual clock.
pub fn sweep() -> hbmark_core::result::serving::ServeReport {
    saved("serve-sweep")
}

/// A live server.
pub fn server() -> ServerIdentity {
    ServerIdentity {
        url: "http://127.0.0.1:8000".to_owned(),
        dialect: Dialect::Vllm,
        path: "/v1/completions".to_owned(),
        model: "m".to_owned(),
        version: None,
        max_model_len: Some(2048),
    }
}

/// What a client saw of a run in which nothing is remarkable.
pub fn live() -> LiveResult {
    LiveResult {
        stamps: StampSource::Kernel,
        evidence: std::collections::BTreeMap::new(),
        ttft_from_dispatch_ns: Quantiles::default(),
        e2e_from_dispatch_ns: Quantiles::default(),
        client_queue_ns: Quantiles::default(),
        connect_ns: Quantiles::default(),
        headers_ns: Quantiles::default(),
        ttft_content_ns: Quantiles::default(),
        event_gap_ns: Quantiles::default(),
        events: 0,
        tokens_per_event: None,
        client_delay_ns: Quantiles::default(),
        shared_stamps: None,
        client_cpu: None,
        client_cpu_wait: None,
        client_realtime: false,
        connections_opened: 1,
        connections_reused: 0,
        retried: 0,
        clock_steps: 0,
        messages: std::collections::BTreeMap::new(),
        finish_reasons: std::collections::BTreeMap::new(),
        short_outputs: 0,
        long_outputs: 0,
        disagreeing_counts: 0,
        prompt_tokens_ratio: None,
        cached_share: None,
        bodies_sha256: String::new(),
        server: None,
        beyond_context: 0,
    }
}

/// A point's result with another judgement of whether it keeps up: that it does, does not, or that it is open.
pub fn keeps_up(point: &mut Point, passed: Option<bool>) -> &mut ServeResult {
    let result = point.result.as_mut().expect("a point that ran");
    result.gates.retain(|gate| gate.name != GateName::KeepsUp);
    result.gates.push(Gate { name: GateName::KeepsUp, passed, detail: "as planted".to_owned() });
    result.validity = if passed == Some(false) { Validity::Saturated } else { Validity::Valid };
    result
}

/// As after a longer run: what was observed decides every objective that was open, and a point that is not saturated keeps up.
pub fn decided(
    mut report: hbmark_core::result::serving::ServeReport,
) -> hbmark_core::result::serving::ServeReport {
    for result in report.points.iter_mut().filter_map(|point| point.result.as_mut()) {
        for clause in result.slo.iter_mut().filter(|clause| clause.met.is_none()) {
            clause.met = clause.observed.map(|observed| observed.value() <= clause.clause.limit_ns);
            (clause.low, clause.high) = (clause.observed, clause.observed);
        }
        result.slo_met = Some(result.slo.iter().all(|clause| clause.met == Some(true)));
        result
            .gates
            .iter_mut()
            .filter(|gate| gate.passed.is_none())
            .for_each(|gate| gate.passed = Some(true));
    }
    report
}

/// The verdicts of a matrix of which every hypothesis held.
pub fn matrix() -> Vec<hbmark_core::result::serving::RowVerdict> {
    use hbmark_core::result::serving::{Row, RowVerdict};
    let verdict = |row: Row| RowVerdict {
        row,
        title: row.title().to_owned(),
        hypothesis: row.hypothesis().to_owned(),
        held: Some(true),
        seen: "as planted".to_owned(),
    };
    Row::ALL.into_iter().map(verdict).collect()
}
