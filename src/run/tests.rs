//! The results that the tests of `hbmark-report` read: this program still makes them, to the byte.

use serde::Serialize;

use crate::engine::EngineError;
use crate::engine::scripted::{Script, ScriptedSession, StepInfo, StepOutcome};
use crate::machine::device::DeviceChoice;
use crate::measure::protocol::{self, BlockContext, Monitor, Protocol};
use crate::serve::serving_job::ServeJob;
use crate::serve::{LocalEngine, Mode, SchedulerOptions, ServeConfig, VirtualSource, benchmark};
use crate::weights::OpenModel;
use crate::worker::{InProcess, NoopObserver, Worker};
use hbmark_core::ledger::{Ledger, StepShape};
use hbmark_core::model::Dtype;
use hbmark_core::result::comparison::Comparison;
use hbmark_core::result::serving::{Arrivals, Offered, ServeReport, SweepVariable};
use hbmark_core::result::{
    BlockTelemetry, Cause, Ceilings, Cell, CellResult, ColdRow, Environment, ModelSummary, Phase, Report,
    ReportKind, Spread, Status,
};
use hbmark_core::units::{Bytes, BytesPerSecond, Nanos, rfc3339};
use hbmark_report::analysis::judge;
use hbmark_traffic::clock::VirtualClock;
use hbmark_traffic::point::TrafficSource;
use hbmark_traffic::sampler::Sampling;
use hbmark_traffic::workload::Workload;

/// Rejects every block of the batch-2 cell and the third of the others.
struct Planted {
    block: usize,
}

impl Monitor for Planted {
    fn before_block(&mut self) {}
    fn after_block(&mut self, wall_seconds: f64) -> BlockContext {
        self.block += 1;
        let disturbed = wall_seconds > 0.3;
        BlockContext {
            telemetry: Some(BlockTelemetry { energy_joules: Some(2.0), ..BlockTelemetry::default() }),
            canary_ratio: Some(1.0),
            read_rate: Some(BytesPerSecond(1e10)),
            reject: disturbed.then_some(Cause::ForeignLoad { cores: 0.8 }),
            conditions: vec![Cause::PowerCapped],
            load: None,
        }
    }
}

fn script(info: StepInfo) -> StepOutcome {
    match (info.batch, info.tokens) {
        (8, _) => StepOutcome::Fails(EngineError::OutOfMemory {
            device: "cuda:0".into(),
            detail: "CUDA_ERROR_OUT_OF_MEMORY".into(),
        }),
        (1, 1) => StepOutcome::Takes { device: Nanos(9.0e6), host: Nanos(0.5e6) },
        (2, 2) => StepOutcome::Takes { device: Nanos(19.0e6), host: Nanos(0.0) },
        // Faster than the memory allows.
        (4, 4) => StepOutcome::Takes { device: Nanos(0.05e6), host: Nanos(0.0) },
        _ => StepOutcome::Takes { device: Nanos(210e6), host: Nanos(0.0) },
    }
}

fn scripted() -> Report {
    let architecture = hbmark_core::model::test_shapes::smollm2_135m();
    let inventory = architecture.inventory(Dtype::Bf16);
    let ledger = Ledger::new(&architecture, &inventory, Dtype::Bf16);
    let cell =
        |phase, batch, context| Cell { phase, engine: "scripted".into(), dtype: Dtype::Bf16, batch, context };
    let cells = [
        cell(Phase::Prefill, 1, 512),
        cell(Phase::Decode, 1, 512),
        cell(Phase::Decode, 2, 512),
        cell(Phase::Decode, 4, 512),
        cell(Phase::Decode, 8, 512),
    ];
    let clock = VirtualClock::default();
    let mut session =
        ScriptedSession::new(architecture.clone(), inventory.clone(), &clock, Box::new(script) as Script);
    let protocol = Protocol::full(7);
    let mut monitor = Planted { block: 0 };
    let (measured, _) = protocol::run(&mut session, &cells, &protocol, &mut monitor, true, &mut |_| {});
    let spread = |median: f64| Spread { median, low: median * 0.98, high: median * 1.01 };
    let ceilings = Ceilings {
        read_bytes_per_s: spread(40e9),
        copy_bytes_per_s: spread(38e9),
        triad_bytes_per_s: spread(37e9),
        gemm_flops_per_s: [("bf16".to_owned(), spread(1e12))].into(),
        launch_ns: Some(spread(5e3)),
        working_set_bytes: Bytes(1 << 30),
        last_cache_bytes: Some(Bytes(32 << 20)),
        read_configuration: "2 threads, avx512".into(),
        gpu: None,
        disturbed: Vec::new(),
        age_s: None,
    };
    let mut results: Vec<CellResult> = measured
        .into_iter()
        .map(|m| {
            let cost =
                ledger.step(StepShape { phase: m.cell.phase, batch: m.cell.batch, context: m.cell.context });
            judge::measured(m, Dtype::Bf16, &cost, &architecture, Some(&ceilings), None)
        })
        .collect();
    let beyond = cell(Phase::Decode, 1, 9000);
    let cost = ledger.decode(1, 9000);
    let reason = Some(Cause::ExceedsContext {
        positions: 9001,
        limit: 8192,
        limited_by: Some("the model's limit".to_owned()),
    });
    results.push(judge::unmeasured(&beyond, Dtype::Bf16, &cost, Status::Skipped, reason));
    let model = ModelSummary::new("SmolLM2-135M", "synthetic, seed 7", &architecture, &inventory);
    let model = ModelSummary { hash: "0".into(), ..model };
    let mut report = Report {
        started_at: Some(rfc3339(1_750_000_000)),
        note: Some("a \u{1b}[31mred\u{1b}[0m | note".into()),
        hypothesis: Some("=memory bound".into()),
        protocol: Some(protocol.summary()),
        ceilings: Some(ceilings),
        cells: results,
        cold: vec![ColdRow {
            what: "first decode step".into(),
            engine: "scripted".into(),
            dtype: Dtype::Bf16,
            time_ns: 48.0e6,
        }],
        warnings: vec!["other load: load average 1.15 over the last minute".into()],
        ..Report::new(ReportKind::Run, "hbmark run --batch 1,2,4,8", model)
    };
    judge::recompute(&mut report);
    report
}

fn prediction(gpu: &str, dtypes: &[Dtype], batches: &[usize], contexts: &[usize]) -> Report {
    predicted("Llama-3.1-8B", gpu, None, (dtypes, batches, contexts))
}

fn predicted(
    model: &str,
    gpu: &str,
    group: Option<hbmark_core::ledger::Group>,
    (dtypes, batches, contexts): (&[Dtype], &[usize], &[usize]),
) -> Report {
    let model = crate::weights::open_shape(model, None).unwrap();
    let question = crate::run::predict::Question {
        device: hbmark_core::ledger::devices::find(gpu).unwrap().clone(),
        dtypes: dtypes.to_vec(),
        kv_dtype: None,
        phases: vec![Phase::Prefill, Phase::Decode],
        batches: batches.to_vec(),
        contexts: contexts.to_vec(),
        routing: hbmark_core::ledger::ExpertRouting::Uniform,
        group,
    };
    let report = crate::run::predict::report(&model, &question, "hbmark predict").unwrap();
    Report { environment: Environment::default(), ..report }
}

fn comparison() -> Comparison {
    let mut a = scripted();
    a.cells.retain(|cell| cell.context == 512 && cell.batch < 4);
    let mut b = a.clone();
    b.config.insert("threads".into(), 2.into());
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, report: &Report| {
        let path = folder.path().join(name);
        std::fs::write(&path, hbmark_core::result::saved::write(report).unwrap()).unwrap();
        path
    };
    let settings = hbmark_core::result::comparison::Settings::new(0.01, 1);
    let (a, b) = (write("a.json", &a), write("b.json", &b));
    let (given, command) = ([a.as_path(), b.as_path()], "hbmark compare a.json b.json");
    let files = [std::slice::from_ref(&a), std::slice::from_ref(&b)];
    let mut found = crate::run::compare::saved(given, files, command, settings).unwrap();
    (found.a.given, found.b.given) = ("a.json".into(), "b.json".into());
    found.started_at = None;
    found
}

/// Holds a result against its fixture; `INSTA_UPDATE=always` writes it.
fn current(name: &str, result: &impl Serialize) {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/results");
    let path = format!("{folder}/{name}.json");
    let text = serde_json::to_string_pretty(result).unwrap() + "\n";
    if std::env::var_os("INSTA_UPDATE").is_some_and(|v| v == "always") {
        std::fs::create_dir_all(folder).unwrap();
        std::fs::write(&path, &text).unwrap();
    }
    let saved = std::fs::read_to_string(&path).unwrap();
    assert!(
        saved == text,
        "{path} is not what the program makes: run the test with INSTA_UPDATE=always and read the diff"
    );
}

#[test]
fn the_saved_results_are_what_the_program_makes() {
    current("run-scripted", &scripted());
    current("predict-h200", &prediction("h200", &[Dtype::Bf16], &[1, 32], &[4096]));
    let h100 = prediction("h100-sxm", &[Dtype::Bf16, Dtype::Int8], &[1, 8], &[512, 4096, 1 << 20]);
    current("predict-h100", &h100);
    let group = hbmark_core::ledger::Group { tensor: 4, pipeline: 2, experts: false };
    let grid: (&[Dtype], &[usize], &[usize]) = (&[Dtype::Bf16], &[1, 32], &[4096]);
    current("predict-70b-8-h200", &predicted("Llama-3.1-70B", "h200", Some(group), grid));
    current("serve-single", &report(Mode::Single, 4.0));
    current("serve-sweep", &sweep());
    current("comparison", &comparison());
}

pub(crate) fn report(mode: Mode, rate: f64) -> ServeReport {
    report_of(&ServeConfig { mode, offered: Offered::Rate(rate), ..config() })
}

/// A point of retrieval-augmented traffic on a virtual clock.
pub(crate) fn config() -> ServeConfig {
    ServeConfig {
        engine: "native".into(),
        device: DeviceChoice::Cpu,
        dtype: Some(Dtype::Bf16),
        kv_dtype: None,
        threads: None,
        server: None,
        virtual_source: Some(VirtualSource::Datasheet(Box::new(
            hbmark_core::ledger::devices::find("h100-sxm").unwrap().clone(),
        ))),
        source: TrafficSource::Workload(Workload::named("rag").unwrap()),
        offered: Offered::Rate(1.0),
        arrivals: Arrivals::Poisson,
        burst: None,
        requests: 200,
        duration: None,
        max_requests: 0,
        warmup: None,
        cold_baseline: false,
        scheduler: SchedulerOptions::default(),
        sampling: Sampling::GREEDY,
        stop_at_eos: false,
        slo: "ttft_p95=500ms,tpot_p95=20ms".parse().unwrap(),
        time_limit_s: None,
        mode: Mode::Single,
        predict: false,
        tokenizer: None,
        lora: None,
        structured: None,
        seed: 7,
        note: Some("=1+1 | \u{1b}[31m".into()),
        hypothesis: None,
        out: None,
    }
}

pub(crate) fn model() -> OpenModel {
    crate::weights::open("Llama-3.1-8B", None, 7).unwrap()
}

/// The virtual clock of a configuration.
pub(crate) fn worker(config: &ServeConfig) -> InProcess<LocalEngine> {
    InProcess::new(LocalEngine::new(config, Some(model().into())))
}

pub(crate) fn report_of(config: &ServeConfig) -> ServeReport {
    report_by(config, &mut worker(config))
}

pub(crate) fn report_by(config: &ServeConfig, worker: &mut dyn Worker<ServeJob>) -> ServeReport {
    let command = "hbmark serve --virtual";
    let mut report = benchmark(worker, config, Some(&model()), command, &mut NoopObserver).unwrap().report;
    report.environment = Environment::default();
    report
}

fn sweep() -> ServeReport {
    report(Mode::Sweep { variable: SweepVariable::Rate, values: vec![2.0, 8.0, 64.0, 128.0] }, 1.0)
}
