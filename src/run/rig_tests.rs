//! A rig over scripted sessions, for whoever stands on this side of the waist.

use std::collections::BTreeMap;

use crate::engine::scripted::{Script, ScriptedSession};
use crate::engine::{DeviceChoice, DeviceOptions};
use crate::measure::protocol::{Depth, NoWitness};
use crate::run::config::RunConfig;
use crate::run::local::Live;
use crate::run::rig::{Answer, Begun, OpenSeries, Order, Rig};
use crate::run::{Observer, RunError};
use crate::weights::OpenModel;
use hbmark_core::model::{Dtype, test_shapes};
use hbmark_core::result::{Environment, KvFill, Phase, Quality};
use hbmark_traffic::clock::VirtualClock;

/// A small model by its name.
pub(crate) fn model() -> OpenModel {
    crate::weights::open("SmolLM2-135M", None, 42).unwrap()
}

/// Decode cells of one engine.
pub(crate) fn config(engine: &str, batches: &[usize], contexts: &[usize]) -> RunConfig {
    RunConfig {
        model: "SmolLM2-135M".into(),
        revision: None,
        engines: vec![engine.into()],
        device: DeviceChoice::Cpu,
        dtypes: vec![Dtype::Bf16],
        phases: vec![Phase::Decode],
        batches: batches.to_vec(),
        contexts: contexts.to_vec(),
        seed: 7,
        threads: None,
        depth: Depth::Full,
        device_options: DeviceOptions::default(),
        kv: KvFill::Prefill,
        show_ops: false,
        note: None,
        hypothesis: None,
        out: None,
    }
}

/// A scripted session of that model.
pub(crate) fn session(clock: &VirtualClock, script: Script) -> ScriptedSession {
    let architecture = test_shapes::smollm2_135m();
    let inventory = architecture.inventory(Dtype::Bf16);
    ScriptedSession::new(architecture, inventory, clock, script)
}

fn environment() -> Environment {
    hbmark_report::samples::report().environment
}

/// Told the number of a measuring order and the order: how its worker is lost, or by which signal the run is stopped.
type Lose = Box<dyn FnMut(usize, &Order) -> Option<Result<String, i32>>>;

/// A rig whose sessions a test makes; it can be told to lose some orders, and comes back fresh from that.
pub(crate) struct Scripted {
    config: RunConfig,
    make: Box<dyn Fn() -> ScriptedSession>,
    live: BTreeMap<usize, Live>,
    open: OpenSeries,
    lose: Lose,
    asked: usize,
}

impl Scripted {
    pub(crate) fn new(config: &RunConfig, make: impl Fn() -> ScriptedSession + 'static) -> Self {
        Self {
            config: config.clone(),
            make: Box::new(make),
            live: BTreeMap::new(),
            open: OpenSeries::default(),
            lose: Box::new(|_, _| None),
            asked: 0,
        }
    }

    pub(crate) fn losing(
        self,
        lose: impl FnMut(usize, &Order) -> Option<Result<String, i32>> + 'static,
    ) -> Self {
        Self { lose: Box::new(lose), ..self }
    }

    fn open(&mut self, order: &Order) -> Answer {
        let Order::Open { series, engine, dtype, .. } = order else { return Answer::Done };
        let live = Live::new(Box::new((self.make)()), Box::new(NoWitness), self.config.protocol());
        let quality =
            Quality { passed: true, check: "none".into(), max_relative_error: None, token_hash: None };
        let opened = live.opened(&self.config, (engine, *dtype), quality, Vec::new(), None);
        self.live.insert(*series, live);
        Answer::Opened(Box::new(opened))
    }

    fn carry_out(&mut self, order: &Order, observer: &mut dyn Observer) -> Answer {
        for again in self.open.again() {
            if let Order::Open { series, .. } = &again
                && !self.live.contains_key(series)
            {
                self.open(&again);
            }
        }
        match order {
            Order::Look => Answer::Looked(Box::new(environment())),
            Order::Begin => Answer::Begun(Box::new(Begun {
                started_at: "2026-01-01T00:00:00Z".into(),
                environment: environment(),
                ceilings: None,
                warnings: Vec::new(),
            })),
            Order::Open { .. } => self.open(order),
            Order::Close { series } => {
                self.live.remove(series);
                Answer::Done
            }
            Order::Visit { series, .. }
            | Order::Refer { series, .. }
            | Order::BreakDown { series, .. }
            | Order::Rehearse { series, .. }
            | Order::Sample { series, .. }
            | Order::Release { series, .. } => {
                self.live.get_mut(series).map_or(Answer::Done, |live| live.carry_out(order, observer))
            }
        }
    }
}

impl Rig for Scripted {
    fn ask(&mut self, order: &Order, observer: &mut dyn Observer) -> Result<Answer, RunError> {
        if order.measures() {
            self.asked += 1;
            match (self.lose)(self.asked, order) {
                None => {}
                Some(Ok(reason)) => {
                    self.live.clear();
                    return Ok(Answer::Lost { reason });
                }
                Some(Err(signal)) => return Err(RunError::Interrupted { signal }),
            }
        }
        let answer = self.carry_out(order, observer);
        self.open.note(order, &answer);
        if answer.taints() {
            self.live.clear();
        }
        Ok(answer)
    }

    fn assume(&mut self, order: &Order, answer: &Answer) {
        self.open.note(order, answer);
    }

    fn renews(&self) -> bool {
        true
    }
}

/// Sessions whose steps all take the same time a sequence.
pub(crate) fn steady(milliseconds: f64) -> impl Fn() -> ScriptedSession {
    use crate::engine::scripted::Outcome;
    use hbmark_core::units::Nanos;
    move || {
        let takes = move |info: crate::engine::scripted::StepInfo| {
            let device = Nanos(milliseconds * 1e6 * info.batch as f64);
            Outcome::Takes { device, host: Nanos(0.0) }
        };
        session(&VirtualClock::default(), Box::new(takes))
    }
}

fn run(rig: &mut dyn Rig, config: &RunConfig) -> crate::run::Finished {
    crate::run::benchmark(rig, config, &model(), "hbmark run", &mut crate::run::Silent).unwrap()
}

mod claims {
    use super::*;
    use hbmark_core::result::Status;

    fn of_cell(order: &Order, batch: usize) -> bool {
        matches!(order, Order::Visit { visit, .. } if visit.cell.batch == batch)
    }

    #[test]
    fn a_worker_lost_once_costs_a_repeated_visit_and_no_cell() {
        let config = config("native", &[1, 2, 4], &[64]);
        let mut lost = 0;
        let mut rig = Scripted::new(&config, steady(10.0)).losing(move |_, order| {
            let strike = of_cell(order, 2) && lost < 1;
            lost += usize::from(strike);
            strike.then(|| Ok("the worker was killed by signal 9".into()))
        });
        let finished = run(&mut rig, &config);
        assert_eq!(finished.stopped, None);
        assert!(finished.report.cells.iter().all(|cell| cell.status == Status::Ok));
        let cell = "decode/native/bf16/b2/c64";
        assert_eq!(
            finished.report.warnings,
            [format!("{cell}: the worker was killed by signal 9; the visit was repeated")]
        );
        let whole = run(&mut Scripted::new(&config, steady(10.0)), &config).report;
        for (a, b) in finished.report.cells.iter().zip(&whole.cells) {
            assert_eq!((a.tpot_ns, a.blocks.len()), (b.tpot_ns, b.blocks.len()), "{}", a.id);
        }
    }

    #[test]
    fn a_cell_that_loses_two_workers_fails_with_the_reason_and_the_others_go_on() {
        let config = config("native", &[1, 2, 4], &[64]);
        let mut rig = Scripted::new(&config, steady(10.0))
            .losing(|_, order| of_cell(order, 2).then(|| Ok("the worker exited with code 3".into())));
        let report = run(&mut rig, &config).report;
        let statuses: Vec<Status> = report.cells.iter().map(|cell| cell.status).collect();
        assert_eq!(statuses, [Status::Ok, Status::Failed, Status::Ok]);
        assert_eq!(report.cells[1].reason.as_deref(), Some("the worker exited with code 3"));
    }

    #[test]
    fn a_sticky_device_error_is_retried_in_a_fresh_session_and_then_costs_its_cell() {
        use crate::engine::EngineError;
        use crate::engine::scripted::Outcome;
        use hbmark_core::units::Nanos;
        let config = config("native", &[1, 2], &[64]);
        let make = || {
            let mut broken = false;
            let script = move |info: crate::engine::scripted::StepInfo| {
                broken |= info.batch == 2;
                if broken {
                    let (device, detail) = ("cuda:0".into(), "illegal address".into());
                    Outcome::Fails(EngineError::Device { device, detail })
                } else {
                    Outcome::Takes { device: Nanos(1e7), host: Nanos(0.0) }
                }
            };
            session(&VirtualClock::default(), Box::new(script))
        };
        let report = run(&mut Scripted::new(&config, make), &config).report;
        assert_eq!(report.cells[0].status, Status::Ok, "{:?}", report.cells[0].reason);
        assert_eq!(report.cells[1].status, Status::Failed);
        assert_eq!(report.cells[1].reason.as_deref(), Some("cuda:0 failed: illegal address"));
    }

    #[test]
    fn a_series_that_cannot_be_opened_twice_is_failed_and_the_next_one_runs() {
        let config =
            RunConfig { engines: vec!["stock".into(), "native".into()], ..config("native", &[1], &[64]) };
        let mut rig = Scripted::new(&config, steady(10.0)).losing(|_, order| {
            let stock = matches!(order, Order::Open { engine, .. } if engine == "stock");
            stock.then(|| Ok("the worker was killed by signal 9".into()))
        });
        let report = run(&mut rig, &config).report;
        let statuses: Vec<Status> = report.cells.iter().map(|cell| cell.status).collect();
        assert_eq!(statuses, [Status::Failed, Status::Ok]);
    }

    #[test]
    fn a_stopped_run_keeps_what_it_has_and_says_what_is_incomplete() {
        let config =
            RunConfig { engines: vec!["stock".into(), "native".into()], ..config("native", &[1, 2], &[64]) };
        let mut rig = Scripted::new(&config, steady(10.0)).losing(|asked, _| (asked == 6).then_some(Err(2)));
        let finished = run(&mut rig, &config);
        assert_eq!(finished.stopped, Some(2));
        let report = finished.report;
        assert_eq!(report.cells.len(), 4);
        assert!(report.cells.iter().all(|cell| cell.status == Status::Incomplete));
        assert!(report.cells[0].tpot_ns.is_some(), "blocks that were taken are kept");
        assert_eq!(report.warnings[0], "the run was stopped: 4 of 4 cells are incomplete");
    }

    #[test]
    fn a_cell_whose_step_cannot_be_replayed_is_left_out_before_anything_is_timed() {
        use crate::engine::EngineError;
        use crate::engine::scripted::Outcome;
        use crate::run::series;
        use hbmark_core::units::Nanos;
        let (config, model) = (config("native", &[1, 2, 4], &[64]), model());
        let make = || {
            let script = |info: crate::engine::scripted::StepInfo| match info.batch {
                2 => Outcome::Fails(EngineError::NotReplayed {
                    engine: "native".into(),
                    why: "it copies".into(),
                }),
                _ => Outcome::Takes { device: Nanos(1e7), host: Nanos(0.0) },
            };
            session(&VirtualClock::default(), Box::new(script))
        };
        // The worker dies in the last cell whenever it is tried there.
        let mut rig = Scripted::new(&config, make).losing(|_, order| {
            let last = matches!(order, Order::Rehearse { cell, .. } if cell.batch == 4);
            last.then(|| Ok("the worker was killed by signal 9".into()))
        });
        let mut report =
            crate::run::begin(&mut rig, &config, &model, "hbmark run", &mut crate::run::Silent).unwrap();
        let series = &series::all(&config, &model)[0];
        let opened = series::open(&mut rig, &config, &model, series, &mut report, &mut crate::run::Silent);
        let opened = opened.unwrap().unwrap();
        let cells = opened.split_off_impossible(&mut report);
        let possible = opened.split_off_unreplayable(&mut rig, series, cells, &mut report).unwrap();
        assert_eq!(possible.iter().map(|planned| planned.cell.batch).collect::<Vec<_>>(), [1]);
        let lost = |index: usize| (report.cells[index].status, report.cells[index].reason.clone().unwrap());
        assert_eq!(lost(0), (Status::Skipped, "native cannot replay this step: it copies".into()));
        assert_eq!(lost(1), (Status::Failed, "the worker was killed by signal 9".into()));
    }
}
