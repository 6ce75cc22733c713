//! A report made by hand, for tests of what is said about cells: a machine of round numbers, and no cells yet.

use super::*;
use crate::model::test_shapes;
use crate::roofline::Spread;

/// A run on a machine that reads 10 GB/s, multiplies 1 TFLOP/s in bf16 and half of that in f32, and has 32 MB of cache.
pub fn report() -> Report {
    let spread = |median: f64| Spread { median, low: median * 0.99, high: median * 1.01 };
    let architecture = test_shapes::llama_3_2_1b();
    let inventory = architecture.inventory(Dtype::Bf16);
    Report {
        schema_version: SCHEMA_VERSION,
        kind: ReportKind::Run,
        command: "hbmark run --engine stock,native".into(),
        started_at: None,
        note: None,
        hypothesis: None,
        environment: Environment::default(),
        config: BTreeMap::new(),
        model: ModelSummary {
            name: "Llama-3.2-1B".into(),
            source: "synthetic, seed 7".into(),
            hash: "0".into(),
            parameters: inventory.parameters(),
            weight_bytes: inventory.total_bytes(),
            architecture,
        },
        capabilities: Vec::new(),
        protocol: Some(crate::measure::protocol::Protocol::full(7).summary()),
        ceilings: Some(Ceilings {
            read_bytes_per_s: spread(10e9),
            copy_bytes_per_s: spread(9e9),
            triad_bytes_per_s: spread(9e9),
            gemm_flops_per_s: [("bf16".to_owned(), spread(1e12)), ("f32".to_owned(), spread(5e11))].into(),
            launch_ns: None,
            working_set_bytes: Bytes(1 << 30),
            last_cache_bytes: Some(Bytes(32_000_000)),
            read_configuration: "2 threads, avx512".into(),
        }),
        datasheet: None,
        cells: Vec::new(),
        cold: Vec::new(),
        ladders: Vec::new(),
        fits: Vec::new(),
        crossovers: Vec::new(),
        warnings: Vec::new(),
    }
}
