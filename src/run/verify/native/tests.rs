//! Each planted fault fails the check that covers it, and the check names the sample.

use super::operations::against_the_oracle;
use super::*;
use crate::engine::native::oracle::{Oracle, OracleFault};
use crate::engine::native::ragged_batch::Rows;
use crate::run::verify::outputs::{FAMILIES, small_model};
use crate::weights::OpenModel;
use hbmark_core::model::Dtype;

fn right() -> impl Fn(usize) -> Result<Oracle, EngineError> {
    |_| Ok(Oracle::new())
}

fn faulty(fault: OracleFault) -> impl Fn(usize) -> Result<Oracle, EngineError> {
    faulty_when(fault, |_| true)
}

fn faulty_when(fault: OracleFault, when: fn(&Rows) -> bool) -> impl Fn(usize) -> Result<Oracle, EngineError> {
    move |_| Ok(Oracle::with_fault(fault, when))
}

/// Two seeds of everything.
const FEW: Extent = Extent { operations: 0..2, cut: 0..2, ..WHOLE };

fn side<'a>(make: &'a Make<'a, Oracle>) -> Side<'a, Oracle> {
    Side { name: "faulty", make, bounds: PLAIN }
}

/// Of each fault, the operations whose checks fail; `None` is not a fault.
fn failing_operations(faults: &[Option<OracleFault>]) -> Vec<Vec<String>> {
    let makers: Vec<_> = faults
        .iter()
        .map(|fault| {
            let fault = *fault;
            move |_: usize| Ok(fault.map_or_else(Oracle::new, |fault| Oracle::with_fault(fault, |_| true)))
        })
        .collect();
    let names: Vec<String> = (0..faults.len()).map(|index| index.to_string()).collect();
    let sides: Vec<Side<'_, Oracle>> = makers
        .iter()
        .zip(&names)
        .map(|(make, name)| Side { name, make: make as &Make<'_, Oracle>, bounds: PLAIN })
        .collect();
    let mut failing = vec![Vec::new(); faults.len()];
    // What is computed does not depend on how weights are stored, and wide ones are slow.
    let narrow = Kind { in_blocks: &[], ..CPU };
    against_the_oracle(&narrow, &sides, &FEW, &mut |check| {
        assert_eq!(check.area, operations::AREA);
        if !check.passed {
            assert!(check.detail.contains("(seed "), "it names the sample: {}", check.detail);
            let (operation, side) = check.name.rsplit_once(", ").unwrap();
            failing[side.parse::<usize>().unwrap()].push(operation.to_owned());
        }
    });
    failing
}

#[test]
fn a_fault_of_one_operation_fails_the_check_of_that_operation() {
    let faults = [
        OracleFault::GateUp,
        OracleFault::Head,
        OracleFault::NormQkv,
        OracleFault::LatentQuery,
        OracleFault::LatentExpand,
        OracleFault::LatentValue,
        OracleFault::DraftInput,
        OracleFault::Residual,
        OracleFault::Attention,
        OracleFault::Router,
        OracleFault::ExpertGateUp,
        OracleFault::ExpertDown,
        OracleFault::Embed,
    ];
    let with_none: Vec<Option<OracleFault>> = faults.into_iter().map(Some).chain([None]).collect();
    let failing = failing_operations(&with_none);
    assert!(failing.last().unwrap().is_empty());
    let failing_operations = |fault| failing[faults.iter().position(|own| *own == fault).unwrap()].clone();
    assert_eq!(failing_operations(OracleFault::GateUp), ["gate_up"]);
    assert_eq!(failing_operations(OracleFault::Head), ["head"]);
    assert_eq!(failing_operations(OracleFault::NormQkv), ["norm_qkv", "latent_down"]);
    assert_eq!(failing_operations(OracleFault::LatentQuery), ["latent_query"]);
    assert_eq!(failing_operations(OracleFault::LatentExpand), ["latent_expand"]);
    assert_eq!(failing_operations(OracleFault::LatentValue), ["latent_value"]);
    assert_eq!(failing_operations(OracleFault::DraftInput), ["draft_input"]);
    assert_eq!(
        failing_operations(OracleFault::Residual),
        ["output", "down", "router", "expert_down", "draft_input"],
        "four add to the residual, and a choice is seen through it"
    );
    assert_eq!(
        failing_operations(OracleFault::Attention),
        ["norm_qkv", "attention", "latent_down", "latent_expand"],
        "K and V are seen through it"
    );
    // What one of the three gives is seen through the next, and through nothing else.
    let experts = ["router", "expert_gate_up", "expert_down"];
    for (fault, own) in [
        (OracleFault::Router, experts[0]),
        (OracleFault::ExpertGateUp, experts[1]),
        (OracleFault::ExpertDown, experts[2]),
    ] {
        let failing = failing_operations(fault);
        assert!(failing.iter().any(|name| name == own), "{own}: {failing:?}");
        assert!(failing.iter().all(|name| experts.contains(&name.as_str())), "{own}: {failing:?}");
    }
    // Inputs of all operations are embedded.
    assert!(failing_operations(OracleFault::Embed).contains(&"embed".to_owned()));
}

#[test]
fn a_result_that_depends_on_the_cut_fails_the_check_of_that_cut() {
    let batched = faulty_when(OracleFault::Attention, |rows| rows.sequences.len() > 1);
    let looped = |make: &Make<'_, Oracle>| steps::in_pieces("looped", "", &CPU, side(make), usize::MAX, &FEW);
    assert!(looped(&right()).passed);
    assert!(!looped(&batched).passed);

    let short = faulty_when(OracleFault::Attention, |rows| rows.len() < 5);
    assert!(!steps::in_pieces("chunked", "", &CPU, side(&short), 3, &FEW).passed);

    let small_blocks = faulty_when(OracleFault::Attention, |rows| rows.block_size == 16);
    assert!(steps::paged(&CPU, side(&right()), &FEW).passed);
    assert!(!steps::paged(&CPU, side(&small_blocks), &FEW).passed);

    let crowded = |threads| if threads > 2 { faulty(OracleFault::Head)(threads) } else { right()(threads) };
    assert!(steps::threads(&CPU, side(&right()), &FEW).passed);
    assert!(!steps::threads(&CPU, side(&crowded), &FEW).passed);
}

#[test]
fn a_model_that_is_wrong_fails_against_stock_and_names_what_differs() {
    let model = OpenModel::synthetic("small", small_model(FAMILIES[0].1), 7);
    let wrong = faulty(OracleFault::Residual);
    for dtype in [Dtype::F32, Dtype::Bf16, Dtype::Q8_0] {
        assert!(models::logits(&CPU, &right(), &model, dtype).unwrap().0, "{dtype}");
        let (passed, detail) = models::logits(&CPU, &wrong, &model, dtype).unwrap();
        assert!(!passed, "{dtype}: {detail}");
    }
    assert!(models::greedy(&right(), &model, 128).unwrap().0);
    let (passed, detail) = models::greedy(&wrong, &model, 128).unwrap();
    assert!(!passed && detail.contains("at step"), "{detail}");
}

#[test]
fn experts_that_are_chosen_or_weighed_wrong_fail_against_the_oracle() {
    for (_, keys) in models::MIXTURES {
        let model = OpenModel::synthetic("small", small_model(keys), 7);
        assert!(models::as_the_oracle(&right(), &model).unwrap().0);
        for fault in [OracleFault::Router, OracleFault::ExpertGateUp, OracleFault::ExpertDown] {
            let (passed, detail) = models::as_the_oracle(&faulty(fault), &model).unwrap();
            assert!(!passed, "{fault:?}: {detail}");
        }
    }
    let (passed, detail) =
        models::experts_against_the_ledger(&faulty(OracleFault::Bytes), models::COUNTED_EXPERTS, Dtype::Q8_0)
            .unwrap();
    assert!(!passed && detail.contains("found +2"), "{detail}");
}

#[test]
fn bytes_beyond_the_ledger_fail() {
    let wrong = faulty(OracleFault::Bytes);
    let (passed, detail) = models::against_the_ledger(&right(), Dtype::Q8_0, WHOLE.depths).unwrap();
    assert!(passed, "{detail}");
    let (passed, detail) = models::against_the_ledger(&wrong, Dtype::Q8_0, WHOLE.depths).unwrap();
    assert!(!passed && detail.contains("found +2"), "{detail}");
}

#[test]
fn bytes_that_depend_on_how_a_cache_was_filled_fail() {
    let prompt = |rows: &Rows| rows.len() > 1;
    let wrong = faulty_when(OracleFault::Bytes, prompt);
    assert!(models::filled_as_prefilled(&right(), &[17]).unwrap().0);
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
fn every_check_passes_on_this_processor() {
    let mut checks = Vec::new();
    // Over all samples it takes minutes where the oracle is hardly optimised: `hbmark verify` does.
    on_the_cpu_over(&QUICK, &mut |check| checks.push(check));
    for check in &checks {
        assert!(check.passed, "{}: {}: {}", check.area, check.name, check.detail);
    }
    let count = |area| checks.iter().filter(|check| check.area == area).count();
    let per_set = (Operation::ALL.len() - 1) * InstructionSet::available().len();
    let counts = [operations::AREA, steps::AREA, models::OUTPUTS, models::BYTES].map(count);
    assert_eq!(counts, [per_set, 21, 49, 35]);
}
