//! The six standard workloads, each with a hypothesis stated before the run and checked after it.
//!
//! Enters: the model's context, and the capacity (requests per second) that the virtual clock finds for a row. Leaves: what to run, and
//! afterwards a [`RowVerdict`]. Lengths are cut to the model's context; rates are shares of the row's own capacity, so that rows compare
//! across a laptop and a data-centre GPU.

use std::collections::BTreeMap;

use super::workload::{SharedPrefix, Workload, WorkloadError};
use hbmark_core::result::cause::joined;
use hbmark_core::result::serving::{Gate, GateName, Quantiles, Row, RowVerdict, ServeResult, Validity};
use hbmark_core::units::whole_count;

/// Requests of the row; `scale` multiplies lengths.
///
/// # Errors
/// When the context leaves no room.
///
/// # Panics
/// Never: chat is a named workload.
pub fn workload(row: Row, context: usize, scale: f64) -> Result<Workload, WorkloadError> {
    let scaled = |tokens: usize| whole_count((tokens as f64 * scale).round()).max(2);
    let within = |context: usize, input: usize, output: usize| {
        // Proportions are kept when the context is short.
        let (input, output) = (scaled(input), scaled(output));
        let fit = (context as f64 / (input + output) as f64).min(1.0);
        let cut = |tokens: usize| whole_count(tokens as f64 * fit).max(1);
        Workload::fixed(cut(input), cut(output))
    };
    let fixed = |input, output| within(context, input, output);
    let named = |workload: Workload| Workload { name: row.title().to_owned(), ..workload };
    match row {
        Row::A => fixed(128, 64).map(named),
        Row::B => fixed(1536, 16).map(named),
        Row::C => fixed(32, 256).map(named),
        Row::D => fixed(256, 128).map(named),
        Row::E | Row::ECold => {
            let half = (context / 2).max(1);
            let prefix = SharedPrefix { tokens: scaled(512).min(half), share: 0.9, groups: 2 };
            named(Workload { prefix: Some(prefix), ..within(half, 64, 32)? }).checked()
        }
        Row::F => {
            let chat = Workload::named("chat").expect("a name of the list");
            let cut = |lengths: super::workload::Lengths, most: usize| match lengths {
                super::workload::Lengths::Lognormal { mean, cv, .. } => {
                    let mean = (mean * scale * 0.5).clamp(1.0, most as f64);
                    super::workload::Lengths::Lognormal { mean, cv, min: 1, max: most }
                }
                other => other,
            };
            let (input, output) =
                (cut(chat.input, (context / 2).max(1)), cut(chat.output, (context / 2).max(1)));
            named(Workload { input, output, ..Workload::fixed(1, 1)? }).checked()
        }
    }
}

/// Checks the hypothesis against the results.
pub fn check(row: Row, results: &BTreeMap<Row, (ServeResult, Option<f64>)>) -> RowVerdict {
    let (held, seen) = match results.get(&row) {
        None => (None, "not run".to_owned()),
        Some((result, ideal)) => judge(row, result, *ideal, results),
    };
    RowVerdict { row, title: row.title().into(), hypothesis: row.hypothesis().into(), held, seen }
}

fn judge(
    row: Row,
    result: &ServeResult,
    ideal: Option<f64>,
    results: &BTreeMap<Row, (ServeResult, Option<f64>)>,
) -> (Option<bool>, String) {
    let other = |row: Row| results.get(&row).map(|(r, _)| r);
    let p50 = |q: &Option<Quantiles>| Some(q.as_ref()?.p50?.value());
    let ms = |ns: f64| hbmark_core::units::Nanos(ns).to_string();
    let compare = |a: Option<f64>, b: Option<f64>, holds: &dyn Fn(f64, f64) -> bool, names: (&str, &str)| {
        let (Some(a), Some(b)) = (a, b) else {
            return (None, format!("{} or {} is not known", names.0, names.1));
        };
        (Some(holds(a, b)), format!("{} {}, {} {}", names.0, ms(a), names.1, ms(b)))
    };
    match row {
        Row::A => {
            compare(p50(&result.queue_ns), p50(&result.ttft_ns), &|q, t| q < 0.5 * t, ("queue", "TTFT"))
        }
        Row::B => {
            let base = other(Row::A).and_then(|a| p50(&a.ttft_ns));
            compare(p50(&result.ttft_ns), base, &|b, a| b >= 3.0 * a, ("TTFT", "the baseline's"))
        }
        Row::C => {
            let tokens = result.output_tokens_per_s > result.prompt_tokens_per_s;
            let (times, seen) =
                compare(p50(&result.ttft_ns), p50(&result.e2e_ns), &|t, e| t < 0.1 * e, ("TTFT", "E2E"));
            let rates = format!(
                "{seen}; {:.1} output and {:.1} prompt tokens per second",
                result.output_tokens_per_s, result.prompt_tokens_per_s
            );
            (times.map(|t| t && tokens), rates)
        }
        Row::D => match (result.validity, result.gates.iter().find(|gate| gate.name == GateName::KeepsUp)) {
            (Validity::Saturated, _) => (Some(true), joined(&result.reasons)),
            (_, Some(Gate { passed: Some(true), .. })) => (Some(false), "it kept up".to_owned()),
            (_, gate) => {
                (None, gate.map_or("it is not known whether it kept up".into(), |g| g.detail.clone()))
            }
        },
        Row::E => match (result.prefix_hit_rate, ideal) {
            (Some(seen), Some(ideal)) => (
                Some((seen - ideal).abs() <= 0.1),
                format!("hit rate {:.1} %, ideal {:.1} %", seen * 100.0, ideal * 100.0),
            ),
            _ => (None, "the engine shares no prefixes".to_owned()),
        },
        Row::ECold => {
            let warm = other(Row::E).and_then(|e| p50(&e.ttft_ns));
            compare(p50(&result.ttft_ns), warm, &|cold, warm| cold > warm, ("TTFT cold", "warm"))
        }
        Row::F => {
            let p90 =
                result.e2e_ns.as_ref().and_then(|q| q.p90).map(hbmark_core::result::serving::Quantity::value);
            compare(p90, p50(&result.e2e_ns), &|high, middle| high >= 2.0 * middle, ("p90 of E2E", "median"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hbmark_core::result::serving::{Arrivals, ServeReport};

    #[test]
    fn every_row_fits_every_context() {
        for context in [64, 512, 2048, 131_072] {
            for row in Row::ALL {
                let plan = workload(row, context, 1.0).unwrap().plan(None, Arrivals::Poisson, None, 50, 1);
                assert!(plan.iter().all(|p| p.prompt_len() + p.output_len <= context), "{row:?} {context}");
            }
        }
    }

    #[test]
    fn what_nobody_can_judge_refutes_nothing() {
        let gate = |passed| Gate { name: GateName::KeepsUp, passed, detail: "86 % were completed".into() };
        let report: ServeReport =
            serde_json::from_str(include_str!("../../../fuzz/seeds/serve.json")).unwrap();
        let any = report.points[0].result.clone().unwrap();
        let held = |validity, passed| {
            let result = ServeResult { validity, gates: vec![gate(passed)], ..any.clone() };
            check(Row::D, &[(Row::D, (result, None))].into()).held
        };
        assert_eq!(held(Validity::Valid, None), None);
        assert_eq!(held(Validity::Valid, Some(true)), Some(false));
        assert_eq!(held(Validity::Saturated, Some(false)), Some(true));
    }
}
