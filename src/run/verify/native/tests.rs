//! A planted fault fails the check that is there for it, and the check says where.

use super::operations::against_the_oracle;
use super::*;
use crate::engine::native::operations::{
    AttentionShape, AttentionWeights, Embedding, FusedLayout, LinearPart, Operations, PoolShape, StepLaunch,
};
use crate::engine::native::oracle::{Oracle, PlainBuffer, PlainPool};
use crate::engine::native::ragged_batch::Rows;
use crate::engine::native::rope::RopeTable;
use crate::run::verify::outputs::{FAMILIES, small_model};
use crate::weights::{OpenModel, StoredMatrix};
use hbmark_core::model::Dtype;
use hbmark_core::units::Bytes;

/// What is wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Nothing,
    /// The next token of the vocabulary is embedded.
    Embed,
    /// The first norm of a layer has an ε that is too large.
    NormQkv,
    /// A row sees its own position alone.
    Attention,
    /// The residual is added twice.
    Residual,
    GateUp,
    Head,
    /// Every fiftieth byte is counted twice, from the first picked step on.
    Bytes,
}

/// The oracle with a fault in the steps that `when` picks.
#[derive(Debug)]
struct Faulty {
    oracle: Oracle,
    fault: Fault,
    when: fn(&Rows) -> bool,
    /// A step that `when` picks has begun since the operations were made.
    begun: bool,
}

impl Faulty {
    fn with(fault: Fault) -> impl Fn(usize) -> Result<Self, EngineError> {
        Self::when(fault, |_| true)
    }

    fn when(fault: Fault, when: fn(&Rows) -> bool) -> impl Fn(usize) -> Result<Self, EngineError> {
        move |_| Ok(Self { oracle: Oracle::new(), fault, when, begun: false })
    }

    fn has(&self, fault: Fault, rows: &Rows) -> bool {
        self.fault == fault && (self.when)(rows)
    }

    fn eps(&self, fault: Fault, rows: &Rows, eps: f32) -> f32 {
        if self.has(fault, rows) { 0.1 } else { eps }
    }
}

impl Operations for Faulty {
    type Linear = Vec<LinearPart>;
    type Vector = Vec<f32>;
    type Table = StoredMatrix;
    type Buffer = PlainBuffer;
    type Pool = PlainPool;

    fn linear(
        &mut self,
        parts: Vec<LinearPart>,
        layout: FusedLayout,
    ) -> Result<Vec<LinearPart>, EngineError> {
        self.oracle.linear(parts, layout)
    }
    fn vector(&mut self, values: Vec<f32>) -> Result<Vec<f32>, EngineError> {
        self.oracle.vector(values)
    }
    fn table(&mut self, matrix: StoredMatrix) -> Result<StoredMatrix, EngineError> {
        self.oracle.table(matrix)
    }
    fn buffer(&mut self, rows: usize, width: usize) -> Result<PlainBuffer, EngineError> {
        self.oracle.buffer(rows, width)
    }
    fn pool(&mut self, shape: PoolShape) -> Result<PlainPool, EngineError> {
        self.oracle.pool(shape)
    }
    fn reserve(&mut self, pool: &mut PlainPool, blocks: usize) -> Result<(), EngineError> {
        self.oracle.reserve(pool, blocks)
    }
    fn fill_blocks(&mut self, pool: &mut PlainPool, blocks: &[u32], seed: u64) -> Result<(), EngineError> {
        self.oracle.fill_blocks(pool, blocks, seed)
    }
    fn begin(&mut self, rows: &Rows, rope: &RopeTable, pool: &PlainPool) -> Result<StepLaunch, EngineError> {
        self.begun |= (self.when)(rows);
        self.oracle.begin(rows, rope, pool)
    }

    fn embed(
        &mut self,
        rows: &Rows,
        embedding: Embedding<'_, Self>,
        hidden: &mut PlainBuffer,
    ) -> Result<(), EngineError> {
        let (embedding, vocab) = match embedding {
            Embedding::Table(table) => (Embedding::Table(table), table.rows),
            Embedding::Head(head) => (Embedding::Head(head), head[0].matrix.rows),
        };
        let mut rows = rows.clone();
        if self.has(Fault::Embed, &rows) {
            let vocab = u32::try_from(vocab).unwrap();
            rows.tokens.iter_mut().for_each(|token| *token = (*token + 1) % vocab);
        }
        self.oracle.embed(&rows, embedding, hidden)
    }

    fn norm_qkv(
        &mut self,
        rows: &Rows,
        shape: &AttentionShape,
        weights: &AttentionWeights<Self>,
        rope: &RopeTable,
        layer: usize,
        hidden: &PlainBuffer,
        pool: &mut PlainPool,
        query: &mut PlainBuffer,
    ) -> Result<(), EngineError> {
        let shape = AttentionShape { norm_eps: self.eps(Fault::NormQkv, rows, shape.norm_eps), ..*shape };
        let weights = AttentionWeights {
            norm: weights.norm.clone(),
            qkv: weights.qkv.clone(),
            head_norms: weights.head_norms.clone(),
        };
        self.oracle.norm_qkv(rows, &shape, &weights, rope, layer, hidden, pool, query)
    }

    fn attention(
        &mut self,
        rows: &Rows,
        shape: &AttentionShape,
        window: Option<usize>,
        layer: usize,
        query: &PlainBuffer,
        pool: &PlainPool,
        out: &mut PlainBuffer,
    ) -> Result<(), EngineError> {
        let window = if self.has(Fault::Attention, rows) { Some(1) } else { window };
        self.oracle.attention(rows, shape, window, layer, query, pool, out)
    }

    fn project_add(
        &mut self,
        rows: &Rows,
        weights: &Vec<LinearPart>,
        input: &PlainBuffer,
        hidden: &mut PlainBuffer,
    ) -> Result<(), EngineError> {
        if self.has(Fault::Residual, rows) {
            self.oracle.project_add(rows, weights, input, hidden)?;
        }
        self.oracle.project_add(rows, weights, input, hidden)
    }

    fn norm_gate_up(
        &mut self,
        rows: &Rows,
        norm: &Vec<f32>,
        norm_eps: f32,
        weights: &Vec<LinearPart>,
        hidden: &PlainBuffer,
        out: &mut PlainBuffer,
    ) -> Result<(), EngineError> {
        let eps = self.eps(Fault::GateUp, rows, norm_eps);
        self.oracle.norm_gate_up(rows, norm, eps, weights, hidden, out)
    }

    fn head(
        &mut self,
        rows: &Rows,
        norm: &Vec<f32>,
        norm_eps: f32,
        head: &Vec<LinearPart>,
        hidden: &PlainBuffer,
        logits: &mut PlainBuffer,
        next: &mut Vec<u32>,
    ) -> Result<(), EngineError> {
        let eps = self.eps(Fault::Head, rows, norm_eps);
        self.oracle.head(rows, norm, eps, head, hidden, logits, next)
    }

    fn read(&mut self, buffer: &PlainBuffer, rows: usize) -> Result<Vec<Vec<f32>>, EngineError> {
        self.oracle.read(buffer, rows)
    }

    fn take_bytes_moved(&mut self) -> Bytes {
        let Bytes(moved) = self.oracle.take_bytes_moved();
        Bytes(if self.fault == Fault::Bytes && self.begun { moved + moved / 50 } else { moved })
    }
}

/// Two seeds of everything.
const FEW: Extent = Extent { operations: 0..2, cut: 0..2, ..WHOLE };

fn side<'a>(make: &'a Make<'a, Faulty>) -> Side<'a, Faulty> {
    Side { name: "faulty", make, bounds: PLAIN }
}

/// Names of the operations whose checks fail.
fn failing_operations(fault: Fault) -> Vec<String> {
    let make = Faulty::with(fault);
    let mut failing = Vec::new();
    against_the_oracle(&CPU, &[side(&make)], &FEW, &mut |check| {
        assert_eq!(check.area, operations::AREA);
        if !check.passed {
            assert!(check.detail.contains("(seed "), "it names the sample: {}", check.detail);
            failing.push(check.name.trim_end_matches(", faulty").to_owned());
        }
    });
    failing
}

#[test]
fn a_fault_of_one_operation_fails_the_check_of_that_operation() {
    assert!(failing_operations(Fault::Nothing).is_empty());
    assert_eq!(failing_operations(Fault::GateUp), ["gate_up"]);
    assert_eq!(failing_operations(Fault::Head), ["head"]);
    assert_eq!(failing_operations(Fault::NormQkv), ["norm_qkv"]);
    assert_eq!(failing_operations(Fault::Residual), ["output", "down"], "both add to the residual");
    assert_eq!(
        failing_operations(Fault::Attention),
        ["norm_qkv", "attention"],
        "K and V are seen through it"
    );
    // Inputs of all operations are embedded.
    assert!(failing_operations(Fault::Embed).contains(&"embed".to_owned()));
}

#[test]
fn a_result_that_depends_on_the_cut_fails_the_check_of_that_cut() {
    let right = Faulty::with(Fault::Nothing);
    let batched = Faulty::when(Fault::Attention, |rows| rows.sequences.len() > 1);
    let looped = |make: &Make<'_, Faulty>| steps::in_pieces("looped", "", &CPU, side(make), usize::MAX, &FEW);
    assert!(looped(&right).passed);
    assert!(!looped(&batched).passed);

    let short = Faulty::when(Fault::Attention, |rows| rows.len() < 5);
    assert!(!steps::in_pieces("chunked", "", &CPU, side(&short), 3, &FEW).passed);

    let small_blocks = Faulty::when(Fault::Attention, |rows| rows.block_size == 16);
    assert!(steps::paged(&CPU, side(&right), &FEW).passed);
    assert!(!steps::paged(&CPU, side(&small_blocks), &FEW).passed);

    let crowded = |threads| Faulty::with(if threads > 2 { Fault::Head } else { Fault::Nothing })(threads);
    assert!(steps::threads(&CPU, side(&right), &FEW).passed);
    assert!(!steps::threads(&CPU, side(&crowded), &FEW).passed);
}

#[test]
fn a_model_that_is_wrong_fails_against_stock_and_names_what_differs() {
    let model = OpenModel::synthetic("small", small_model(FAMILIES[0].1), 7);
    let (right, wrong) = (Faulty::with(Fault::Nothing), Faulty::with(Fault::Residual));
    for dtype in [Dtype::F32, Dtype::Bf16, Dtype::Q8_0] {
        assert!(models::logits(&CPU, &right, &model, dtype).unwrap().0, "{dtype}");
        let (passed, detail) = models::logits(&CPU, &wrong, &model, dtype).unwrap();
        assert!(!passed, "{dtype}: {detail}");
    }
    assert!(models::greedy(&right, &model, 128).unwrap().0);
    let (passed, detail) = models::greedy(&wrong, &model, 128).unwrap();
    assert!(!passed && detail.contains("at step"), "{detail}");
}

#[test]
fn bytes_beyond_the_ledger_fail() {
    let (right, wrong) = (Faulty::with(Fault::Nothing), Faulty::with(Fault::Bytes));
    let (passed, detail) = models::against_the_ledger(&right, Dtype::Q8_0, WHOLE.depths).unwrap();
    assert!(passed, "{detail}");
    let (passed, detail) = models::against_the_ledger(&wrong, Dtype::Q8_0, WHOLE.depths).unwrap();
    assert!(!passed && detail.contains("found +2"), "{detail}");
}

#[test]
fn bytes_that_depend_on_how_a_cache_was_filled_fail() {
    let prompt = |rows: &Rows| rows.len() > 1;
    let (right, wrong) = (Faulty::with(Fault::Nothing), Faulty::when(Fault::Bytes, prompt));
    assert!(models::filled_as_prefilled(&right, &[17]).unwrap().0);
    let (passed, detail) = models::filled_as_prefilled(&wrong, &[17]).unwrap();
    assert!(!passed && detail.contains("at depth 17"), "{detail}");
}

#[test]
fn nothing_compared_is_no_pass_and_what_is_nearest_is_told() {
    assert!(!Nearest::default().check("area", "nothing", "anything").passed);
    let mut nearest = Nearest::default();
    nearest.see(1e-6, 1e-5, || "a tenth".into());
    nearest.see(4e-3, 1e-2, || "two fifths".into());
    nearest.see(0.0, 0.0, || "the same".into());
    let check = nearest.clone().check("area", "name", "the oracle's");
    let expected =
        "wanted the oracle's, 3 compared; nearest to its bound: found 4.0e-3 off, may differ by 1e-2";
    assert_eq!((check.passed, check.detail.as_str()), (true, expected));
    nearest.see(f64::MIN_POSITIVE, 0.0, || "a bit".into());
    let check = nearest.check("area", "name", "the oracle's");
    assert!(!check.passed && check.detail.ends_with("(a bit)"), "{}", check.detail);
}

#[test]
fn this_processor_passes_what_the_oracle_does() {
    let mut checks = Vec::new();
    let best = Side { name: "best", make: &CpuOperations::new, bounds: PLAIN };
    against_the_oracle(&CPU, &[best], &FEW, &mut |check| checks.push(check));
    steps::however_they_are_cut(&CPU, best, &WHOLE, &mut |check| checks.push(check));
    checks.push(steps::threads(&CPU, best, &WHOLE));
    models::against_stock(&CPU, best.make, WHOLE.greedy, &mut |check| checks.push(check));
    models::bytes(&CPU, best.make, WHOLE.depths, &mut |check| checks.push(check));
    for check in &checks {
        assert!(check.passed, "{}: {}: {}", check.area, check.name, check.detail);
    }
    let count = |area| checks.iter().filter(|check| check.area == area).count();
    assert_eq!([operations::AREA, steps::AREA, models::OUTPUTS, models::BYTES].map(count), [7, 4, 24, 8]);
}
