//! A worker over scripted sessions, for tests of plans.

use std::collections::BTreeMap;

use crate::engine::scripted::{Script, ScriptedSession};
use crate::engine::{DeviceChoice, DeviceOptions};
use crate::measure::protocol::{NoopMonitor, ProtocolPreset};
use crate::run::RunError;
use crate::run::config::RunConfig;
use crate::run::device_worker::{DeviceJob, DeviceRequest, DeviceResponse, MachineInfo};
use crate::run::in_process::LoadedEngine;
use crate::weights::OpenModel;
use crate::worker::job::{Job, OpenRequests, StateChange};
use crate::worker::spawn::WorkerError;
use crate::worker::{NoopObserver, Observer, Worker};
use hbmark_core::model::{Dtype, test_shapes};
use hbmark_core::result::{Cause, Environment, KvFill, Phase, Quality};
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
        prompts: None,
        seed: 7,
        threads: None,
        preset: ProtocolPreset::Full,
        stopping: crate::measure::protocol::Stopping::default(),
        fresh_ceilings: true,
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

/// Of a request and its number among those that measure: how its worker is lost, or by which signal the run is stopped.
type Lose = Box<dyn FnMut(usize, &DeviceRequest) -> Option<Result<String, i32>>>;

/// A worker over sessions of a test; it can lose some requests, and is then restarted.
pub(crate) struct Scripted {
    config: RunConfig,
    make: Box<dyn Fn() -> ScriptedSession>,
    live: BTreeMap<usize, LoadedEngine>,
    open: OpenRequests<DeviceJob>,
    lose: Lose,
    asked: usize,
}

impl Scripted {
    pub(crate) fn new(config: &RunConfig, make: impl Fn() -> ScriptedSession + 'static) -> Self {
        Self {
            config: config.clone(),
            make: Box::new(make),
            live: BTreeMap::new(),
            open: OpenRequests::default(),
            lose: Box::new(|_, _| None),
            asked: 0,
        }
    }

    pub(crate) fn losing(
        self,
        lose: impl FnMut(usize, &DeviceRequest) -> Option<Result<String, i32>> + 'static,
    ) -> Self {
        Self { lose: Box::new(lose), ..self }
    }

    fn open(&mut self, request: &DeviceRequest) -> DeviceResponse {
        let DeviceRequest::Open { series, engine, dtype, .. } = request else { return DeviceResponse::Done };
        let live = LoadedEngine::new(Box::new((self.make)()), Box::new(NoopMonitor), self.config.protocol());
        let quality =
            Quality { passed: true, check: "none".into(), max_relative_error: None, token_hash: None };
        let opened = live.opened(&self.config, (engine, *dtype), quality, Vec::new(), None);
        self.live.insert(*series, live);
        DeviceResponse::Opened(Box::new(opened))
    }

    fn handle(&mut self, request: &DeviceRequest, observer: &mut dyn Observer) -> DeviceResponse {
        for reopen in self.open.missing(&OpenRequests::default()) {
            if let DeviceRequest::Open { series, .. } = &reopen
                && !self.live.contains_key(series)
            {
                self.open(&reopen);
            }
        }
        match request {
            DeviceRequest::Identify => DeviceResponse::Identified(Box::new(environment())),
            DeviceRequest::Probe => DeviceResponse::Probed(Box::new(MachineInfo {
                started_at: "2026-01-01T00:00:00Z".into(),
                environment: environment(),
                ceilings: None,
                warnings: Vec::new(),
            })),
            DeviceRequest::Open { .. } => self.open(request),
            DeviceRequest::Close { series } => {
                self.live.remove(series);
                DeviceResponse::Done
            }
            DeviceRequest::Visit { series, .. }
            | DeviceRequest::MeasureReference { series, .. }
            | DeviceRequest::Profile { series, .. }
            | DeviceRequest::TrialStep { series, .. }
            | DeviceRequest::Sample { series, .. }
            | DeviceRequest::Release { series, .. } => {
                self.live.get_mut(series).map_or(DeviceResponse::Done, |live| live.handle(request, observer))
            }
        }
    }
}

impl Worker<DeviceJob> for Scripted {
    fn execute(
        &mut self,
        request: &DeviceRequest,
        observer: &mut dyn Observer,
    ) -> Result<DeviceResponse, RunError> {
        if DeviceJob::kind(request).is_recorded() {
            self.asked += 1;
            match (self.lose)(self.asked, request) {
                None => {}
                Some(Ok(detail)) => {
                    self.live.clear();
                    return Ok(DeviceResponse::Lost { reason: Cause::WorkerLost { detail } });
                }
                Some(Err(signal)) => return Err(WorkerError::Interrupted { signal, executing: true }.into()),
            }
        }
        let response = self.handle(request, observer);
        self.open.note(request, &response);
        if DeviceJob::is_sticky(&response) {
            self.live.clear();
        }
        Ok(response)
    }

    fn restore(&mut self, request: &DeviceRequest, response: &DeviceResponse) {
        self.open.note(request, response);
    }

    fn can_restart(&self) -> bool {
        true
    }
}

/// Sessions whose steps all take the same time a sequence.
pub(crate) fn steady(milliseconds: f64) -> impl Fn() -> ScriptedSession {
    use crate::engine::scripted::StepOutcome;
    use hbmark_core::units::Nanos;
    move || {
        let takes = move |info: crate::engine::scripted::StepInfo| {
            let device = Nanos(milliseconds * 1e6 * info.batch as f64);
            StepOutcome::Takes { device, host: Nanos(0.0) }
        };
        session(&VirtualClock::default(), Box::new(takes))
    }
}

fn run(worker: &mut dyn Worker<DeviceJob>, config: &RunConfig) -> crate::run::Finished {
    crate::run::benchmark(worker, config, &model(), "hbmark run", &mut NoopObserver).unwrap()
}

mod claims {
    use super::*;
    use hbmark_core::result::Status;

    fn of_cell(request: &DeviceRequest, batch: usize) -> bool {
        matches!(request, DeviceRequest::Visit { visit, .. } if visit.cell.batch == batch)
    }

    #[test]
    fn a_worker_lost_once_costs_a_repeated_visit_and_no_cell() {
        let config = config("native", &[1, 2, 4], &[64]);
        let mut lost = 0;
        let mut worker = Scripted::new(&config, steady(10.0)).losing(move |_, request| {
            let strike = of_cell(request, 2) && lost < 1;
            lost += usize::from(strike);
            strike.then(|| Ok("the worker was killed by signal 9".into()))
        });
        let finished = run(&mut worker, &config);
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
    fn a_series_is_opened_again_with_the_kernels_that_its_first_worker_timed() {
        let config = config("native", &[1], &[64]);
        let (engine, dtype) = ("native".to_owned(), Dtype::Bf16);
        let request = DeviceRequest::Open { series: 0, engine, dtype, reopen: None };
        let mut response = Scripted::new(&config, steady(1.0)).open(&request);
        let DeviceResponse::Opened(opened) = &mut response else { panic!("{response:?}") };
        opened.timed = serde_json::from_str(r#"[{"format":"bf16","sets":null,"past_caches":true}]"#).unwrap();
        let timed = Some(opened.timed.clone());
        match DeviceJob::state_change(&request, &response) {
            Some(StateChange::Opened { reopen: DeviceRequest::Open { reopen, .. }, .. }) => {
                assert_eq!(reopen, timed);
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_cell_that_loses_two_workers_fails_with_the_reason_and_the_others_go_on() {
        let config = config("native", &[1, 2, 4], &[64]);
        let mut worker = Scripted::new(&config, steady(10.0))
            .losing(|_, request| of_cell(request, 2).then(|| Ok("the worker exited with code 3".into())));
        let report = run(&mut worker, &config).report;
        let statuses: Vec<Status> = report.cells.iter().map(|cell| cell.status).collect();
        assert_eq!(statuses, [Status::Ok, Status::Failed, Status::Ok]);
        let lost = Cause::WorkerLost { detail: "the worker exited with code 3".into() };
        assert_eq!(report.cells[1].reason, Some(lost));
    }

    #[test]
    fn a_sticky_device_error_is_retried_in_a_fresh_session_and_then_costs_its_cell() {
        use crate::engine::EngineError;
        use crate::engine::scripted::StepOutcome;
        use hbmark_core::units::Nanos;
        let config = config("native", &[1, 2], &[64]);
        let make = || {
            let mut broken = false;
            let script = move |info: crate::engine::scripted::StepInfo| {
                broken |= info.batch == 2;
                if broken {
                    let (device, detail) = ("cuda:0".into(), "illegal address".into());
                    StepOutcome::Fails(EngineError::Device { device, detail })
                } else {
                    StepOutcome::Takes { device: Nanos(1e7), host: Nanos(0.0) }
                }
            };
            session(&VirtualClock::default(), Box::new(script))
        };
        let report = run(&mut Scripted::new(&config, make), &config).report;
        assert_eq!(report.cells[0].status, Status::Ok, "{:?}", report.cells[0].reason);
        assert_eq!(report.cells[1].status, Status::Failed);
        let failed = Cause::DeviceFailed { device: "cuda:0".into(), detail: "illegal address".into() };
        assert_eq!(report.cells[1].reason, Some(failed));
    }

    #[test]
    fn a_cell_that_fits_a_fresh_process_is_measured_there_and_one_that_fits_none_is_out_of_memory() {
        use crate::engine::EngineError;
        use crate::engine::scripted::StepOutcome;
        use hbmark_core::units::Nanos;
        let config = config("native", &[1, 2, 4, 8], &[64]);
        // Batches of 2 and 4 leave room for no other but 1, in whatever order they come; 8 is too large for any process.
        let make = || {
            let mut held = None;
            let script = move |info: crate::engine::scripted::StepInfo| {
                if info.batch > 1 && (info.batch == 8 || *held.get_or_insert(info.batch) != info.batch) {
                    let (device, detail) = ("cuda:0".into(), "2.00 GB free".into());
                    return StepOutcome::Fails(EngineError::OutOfMemory { device, detail });
                }
                StepOutcome::Takes { device: Nanos(1e7), host: Nanos(0.0) }
            };
            session(&VirtualClock::default(), Box::new(script))
        };
        let report = run(&mut Scripted::new(&config, make), &config).report;
        let statuses: Vec<Status> = report.cells.iter().map(|cell| cell.status).collect();
        assert_eq!(statuses, [Status::Ok, Status::Ok, Status::Ok, Status::Oom], "{:?}", report.cells);
        let detail = "2.00 GB free".to_owned();
        let out_of_memory = Cause::OutOfMemory { device: "cuda:0".into(), detail, during: None };
        assert_eq!(report.cells[3].reason, Some(out_of_memory));
    }

    #[test]
    fn a_series_that_cannot_be_opened_twice_is_failed_and_the_next_one_runs() {
        let config =
            RunConfig { engines: vec!["stock".into(), "native".into()], ..config("native", &[1], &[64]) };
        let mut worker = Scripted::new(&config, steady(10.0)).losing(|_, request| {
            let stock = matches!(request, DeviceRequest::Open { engine, .. } if engine == "stock");
            stock.then(|| Ok("the worker was killed by signal 9".into()))
        });
        let report = run(&mut worker, &config).report;
        let statuses: Vec<Status> = report.cells.iter().map(|cell| cell.status).collect();
        assert_eq!(statuses, [Status::Failed, Status::Ok]);
    }

    #[test]
    fn a_stopped_run_keeps_what_it_has_and_says_what_is_incomplete() {
        let config =
            RunConfig { engines: vec!["stock".into(), "native".into()], ..config("native", &[1, 2], &[64]) };
        let mut worker =
            Scripted::new(&config, steady(10.0)).losing(|asked, _| (asked == 6).then_some(Err(2)));
        let finished = run(&mut worker, &config);
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
        use crate::engine::scripted::StepOutcome;
        use crate::run::engine_run;
        use hbmark_core::units::Nanos;
        let (config, model) = (config("native", &[1, 2, 4], &[64]), model());
        let make = || {
            let script = |info: crate::engine::scripted::StepInfo| match info.batch {
                2 => StepOutcome::Fails(EngineError::NotReplayed {
                    engine: "native".into(),
                    why: "it copies".into(),
                }),
                _ => StepOutcome::Takes { device: Nanos(1e7), host: Nanos(0.0) },
            };
            session(&VirtualClock::default(), Box::new(script))
        };
        // The worker dies in the last cell whenever it is tried there.
        let mut worker = Scripted::new(&config, make).losing(|_, request| {
            let last = matches!(request, DeviceRequest::TrialStep { cell, .. } if cell.batch == 4);
            last.then(|| Ok("the worker was killed by signal 9".into()))
        });
        let mut report =
            crate::run::begin(&mut worker, &config, &model, "hbmark run", &mut NoopObserver).unwrap();
        let series = &engine_run::all(&config, &model)[0];
        let opened = engine_run::open(&mut worker, &config, &model, series, &mut report, &mut NoopObserver);
        let opened = opened.unwrap().unwrap();
        let cells = opened.skip_unsupported(&mut report);
        let possible = opened.skip_unreplayable(&mut worker, series, cells, &mut report).unwrap();
        assert_eq!(possible.iter().map(|planned| planned.cell.batch).collect::<Vec<_>>(), [1]);
        let lost = |index: usize| (report.cells[index].status, report.cells[index].reason.clone().unwrap());
        let copies = Cause::NotReplayed { engine: "native".into(), why: "it copies".into() };
        assert_eq!(lost(0), (Status::Skipped, copies));
        let killed = Cause::WorkerLost { detail: "the worker was killed by signal 9".into() };
        assert_eq!(lost(1), (Status::Failed, killed));
    }
}
