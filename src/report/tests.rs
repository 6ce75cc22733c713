//! Every format over one report, made by the scripted engine on its virtual clock, so that it never changes.

use super::*;
use crate::engine::EngineError;
use crate::engine::scripted::{Outcome, Script, ScriptedSession, StepInfo, VirtualClock};
use crate::judge;
use crate::measure::protocol::{self, Protocol, Testimony, Witness};
use crate::model::test_shapes;
use crate::plan::Cell;
use crate::roofline::{Ledger, Spread, StepShape, devices};
use crate::units::Nanos;

/// Rejects every block of the batch-2 cell and the third of the others.
struct Planted {
    block: usize,
}

impl Witness for Planted {
    fn before_block(&mut self) {}
    fn after_block(&mut self, wall_seconds: f64) -> Testimony {
        self.block += 1;
        let disturbed = wall_seconds > 0.3;
        Testimony {
            telemetry: Some(BlockTelemetry { energy_joules: Some(2.0), ..BlockTelemetry::default() }),
            canary_ratio: Some(1.0),
            reject: disturbed.then(|| "foreign load: 0.8 cores busy with other processes".to_owned()),
            conditions: vec!["power capped".to_owned()],
            load: None,
        }
    }
}

fn script(info: StepInfo) -> Outcome {
    match (info.batch, info.tokens) {
        (8, _) => Outcome::Fails(EngineError::OutOfMemory {
            device: "cuda:0".into(),
            detail: "CUDA_ERROR_OUT_OF_MEMORY".into(),
        }),
        (1, 1) => Outcome::Takes { device: Nanos(9.0e6), host: Nanos(0.5e6) },
        (2, 2) => Outcome::Takes { device: Nanos(19.0e6), host: Nanos(0.0) },
        // Faster than the memory allows.
        (4, 4) => Outcome::Takes { device: Nanos(0.05e6), host: Nanos(0.0) },
        _ => Outcome::Takes { device: Nanos(210e6), host: Nanos(0.0) },
    }
}

fn report() -> Report {
    let architecture = test_shapes::smollm2_135m();
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
    let mut witness = Planted { block: 0 };
    let (measured, _) = protocol::run(&mut session, &cells, &protocol, &mut witness, true, &mut |_| {});
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
    };
    let mut results: Vec<CellResult> = measured
        .into_iter()
        .map(|m| {
            let cost =
                ledger.step(StepShape { phase: m.cell.phase, batch: m.cell.batch, context: m.cell.context });
            judge::measured(m, Dtype::Bf16, &cost, Some(&ceilings), None)
        })
        .collect();
    let beyond = cell(Phase::Decode, 1, 9000);
    let cost = ledger.decode(1, 9000);
    let reason = Some("needs 9001 positions, the limit is 8192 (the model's limit)".to_owned());
    results.push(judge::unmeasured(&beyond, Dtype::Bf16, &cost, Status::Skipped, reason));
    let mut report = Report {
        schema_version: SCHEMA_VERSION,
        kind: ReportKind::Run,
        command: "hbmark run --batch 1,2,4,8".into(),
        started_at: Some(rfc3339(1_750_000_000)),
        note: Some("a \u{1b}[31mred\u{1b}[0m | note".into()),
        hypothesis: Some("=memory bound".into()),
        environment: Environment::default(),
        config: BTreeMap::new(),
        model: ModelSummary {
            name: "SmolLM2-135M".into(),
            source: "synthetic, seed 7".into(),
            hash: "0".into(),
            parameters: inventory.parameters(),
            weight_bytes: inventory.total_bytes(),
            architecture,
        },
        capabilities: Vec::new(),
        protocol: Some(protocol.summary()),
        ceilings: Some(ceilings),
        datasheet: None,
        cells: results,
        cold: vec![ColdRow {
            what: "first decode step".into(),
            engine: "scripted".into(),
            dtype: Dtype::Bf16,
            time_ns: 48.0e6,
        }],
        ladders: Vec::new(),
        fits: Vec::new(),
        crossovers: Vec::new(),
        warnings: vec!["other load: load average 1.15 over the last minute".into()],
    };
    judge::recompute(&mut report);
    report
}

#[test]
fn the_table_shows_every_cell_with_its_validity_and_reason() {
    insta::assert_snapshot!(render(&report(), Format::Table, false).unwrap());
}

#[test]
fn markdown_escapes_what_strangers_wrote() {
    insta::assert_snapshot!(render(&report(), Format::Md, false).unwrap());
}

#[test]
fn csv_has_raw_numbers_with_units_in_the_heading_and_empty_fields_for_null() {
    insta::assert_snapshot!(render(&report(), Format::Csv, false).unwrap());
}

#[test]
fn csv_does_not_run_formulas() {
    let mut report = report();
    report.cells[0].reason = Some("=HYPERLINK(\"evil\")".into());
    let text = render(&report, Format::Csv, false).unwrap();
    assert!(text.contains("'=HYPERLINK"), "{text}");
}

#[test]
fn json_reads_back_to_the_same_report() {
    let report = report();
    assert!(json::parse(&render(&report, Format::Json, false).unwrap()).unwrap() == report);
}

#[test]
fn recomputing_a_report_changes_nothing() {
    let report = report();
    let mut again = report.clone();
    judge::recompute(&mut again);
    assert!(again == report);
}

#[test]
fn colour_is_only_colour() {
    let report = report();
    let colored = render(&report, Format::Table, true).unwrap();
    assert!(colored.contains('\u{1b}'));
    let mut plain = String::new();
    let mut characters = colored.chars();
    while let Some(c) = characters.next() {
        if c == '\u{1b}' {
            characters.by_ref().find(|&c| c == 'm');
        } else {
            plain.push(c);
        }
    }
    assert_eq!(plain, render(&report, Format::Table, false).unwrap());
}

#[test]
fn the_shipped_schema_is_current_and_a_report_follows_it() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/result.schema.json");
    let schema = json::schema();
    if std::env::var_os("UPDATE_SCHEMA").is_some() {
        std::fs::write(&path, serde_json::to_string_pretty(&schema).unwrap() + "\n").unwrap();
    }
    let shipped: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    assert_eq!(shipped, schema, "run the tests once with UPDATE_SCHEMA=1");
    let instance = serde_json::to_value(report()).unwrap();
    let validator = jsonschema::validator_for(&schema).unwrap();
    let problems: Vec<String> = validator.iter_errors(&instance).map(|e| e.to_string()).collect();
    assert!(problems.is_empty(), "{problems:?}");
}

#[test]
fn a_prediction_says_that_nothing_was_measured() {
    let model = crate::model::open("Llama-3.1-8B", None, 0).unwrap();
    let question = crate::predict::Question {
        device: devices::find("h200").unwrap().clone(),
        dtypes: vec![Dtype::Bf16],
        kv_dtype: None,
        phases: vec![Phase::Prefill, Phase::Decode],
        batches: vec![1, 32],
        contexts: vec![4096],
    };
    let report = crate::predict::report(&model, &question, "hbmark predict").unwrap();
    insta::assert_snapshot!(render(&report, Format::Table, false).unwrap());
}

#[test]
fn dates_are_those_of_the_calendar() {
    assert_eq!(rfc3339(0), "1970-01-01T00:00:00Z");
    assert_eq!(rfc3339(951_782_400), "2000-02-29T00:00:00Z");
    assert_eq!(rfc3339(1_750_000_000), "2025-06-15T15:06:40Z");
}
