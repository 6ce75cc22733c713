//! The floor of a step on a device, and the verdict on a measured step.
//!
//! Enters: a [`StepCost`], and a [`Roof`] made from measured ceilings or from a data sheet; for a verdict also the time that
//! was measured. Leaves: a floor with its bound, fractions of the ceilings, and the causes that make a time invalid.

use super::step::StepCost;
use crate::model::{Architecture, Dtype, Quantization};
use crate::result::{Bound, Cause, Ceilings, CellResult, DeviceSpec, Status};
use crate::units::{Bytes, BytesPerSecond, FlopsPerSecond, Nanos};

/// Below this share of the time, the higher floor does not explain a step, and the bound is [`Bound::Overhead`].
pub const EXPLAINED_SHARE: f64 = 0.5;
/// A working set under this many last-level caches is partly served by the cache, and the model of bytes breaks.
pub const CACHE_MARGIN: u64 = 3;
/// How far above the measured ceiling a step may be before that is flagged: the ceiling's own spread.
pub const CEILING_TOLERANCE: f64 = 1.02;
/// A step this far above the fastest repetition of a steady probe, of a read or of a copy, is impossible: one of the two is wrong. Our own probes
/// and steps of one run stay within a few percent of each other.
pub const CEILING_IMPOSSIBLE: f64 = 1.1;
/// The same where the probe was disturbed, or a cache may hold a part of the step's bytes: a slow moment explains no more.
const DOUBTFUL_IMPOSSIBLE: f64 = 2.0;

/// A matrix-product peak and the dtype it is for.
#[derive(Debug, Clone, PartialEq)]
pub struct Peak {
    pub dtype: &'static str,
    pub rate: FlopsPerSecond,
}

/// The two denominators of a roofline.
#[derive(Debug, Clone, PartialEq)]
pub struct Roof {
    pub bandwidth: BytesPerSecond,
    /// `None` when no peak is known for the dtype: then only the memory floor is.
    pub peak: Option<Peak>,
}

impl Roof {
    /// The roof measured in this session.
    pub fn measured(ceilings: &Ceilings, weights: Dtype) -> Self {
        Self {
            bandwidth: BytesPerSecond(ceilings.read_bytes_per_s.median),
            // A probe multiplies in the very format, if an engine does; a data sheet's int8 is for int8 activations.
            peak: probed(ceilings, weights).or_else(|| {
                peaks(product_dtypes(weights), |name| Some(ceilings.gemm_flops_per_s.get(name)?.median))
                    .next()
            }),
        }
    }

    /// The roof of the data sheet at the highest peak that any engine reaches with a weight dtype.
    pub fn datasheet(spec: &DeviceSpec, weights: Dtype) -> Self {
        let bandwidth = BytesPerSecond(spec.bandwidth_bytes_per_s);
        Self { bandwidth, peak: highest_peak(spec, weights) }
    }

    /// The roof of the data sheet for a step that an engine ran: where the model's config does not say what activations are rounded to, any engine's.
    pub fn of_any_engine(spec: &DeviceSpec, weights: Dtype, architecture: &Architecture) -> Self {
        let stored = architecture.quantization.as_ref().and_then(Quantization::dtype);
        if stored == Some(weights) {
            Self::of_model(spec, weights, architecture)
        } else {
            Self::datasheet(spec, weights)
        }
    }

    /// The roof of the data sheet for a model as its files ask for it: where it is stored as its config says, products are in what that says activations are rounded to.
    pub fn of_model(spec: &DeviceSpec, weights: Dtype, architecture: &Architecture) -> Self {
        let own = architecture.quantization.as_ref().filter(|own| own.dtype() == Some(weights));
        // This method is of weights alone, and engines round activations to no fewer than 8 bits beside it: vLLM to mxfp8 on Blackwell.
        let of_method = own.filter(|own| own.method == "mxfp4").map(|_| Dtype::Fp8);
        let products = match own.and_then(|own| own.activations).or(of_method) {
            Some(Dtype::Int8) => &["int8", "bf16", "f16"],
            activations => product_dtypes(activations.unwrap_or(weights)),
        };
        let peak = peaks(products, |name| spec.dense_flops_per_s.get(name).copied()).next();
        Self { bandwidth: BytesPerSecond(spec.bandwidth_bytes_per_s), peak }
    }
}

/// Which peaks the products of a weight dtype run at, best first. Weight-only formats are unpacked to 16 bits and
/// multiplied there; fp8 has products of its own where the device does.
fn product_dtypes(weights: Dtype) -> &'static [&'static str] {
    match weights {
        Dtype::F32 => &["f32"],
        Dtype::Bf16 => &["bf16"],
        Dtype::F16 => &["f16"],
        Dtype::Fp8 | Dtype::Mxfp8 => &["fp8", "bf16", "f16"],
        Dtype::Mxfp4 | Dtype::Nvfp4 => &["fp4", "bf16", "f16"],
        Dtype::Int8
        | Dtype::Int4
        | Dtype::Q8_0
        | Dtype::Q4_0
        | Dtype::Q4K
        | Dtype::Q5K
        | Dtype::Q6K
        | Dtype::Gguf => &["bf16", "f16"],
    }
}

/// Which peaks an engine may reach with a weight dtype, whatever it rounds activations to. int8 and 4 bits times int8: W8A8, `QServe`'s W4A8,
/// llama.cpp's products of every block format, and the native engine's; 4 bits times fp8: TensorRT-LLM's W4A8 and `W4A8_MXFP4_FP8`.
fn reachable_dtypes(weights: Dtype) -> &'static [&'static str] {
    match weights {
        Dtype::F32 | Dtype::Bf16 | Dtype::F16 | Dtype::Fp8 | Dtype::Mxfp8 => product_dtypes(weights),
        Dtype::Mxfp4 | Dtype::Nvfp4 => &["fp4", "fp8", "int8", "bf16", "f16"],
        Dtype::Int4 => &["fp8", "int8", "bf16", "f16"],
        Dtype::Int8 | Dtype::Q8_0 | Dtype::Q4_0 | Dtype::Q4K | Dtype::Q5K | Dtype::Q6K | Dtype::Gguf => {
            &["int8", "bf16", "f16"]
        }
    }
}

/// The data sheet's highest peak of those: no step of the dtype can beat it.
fn highest_peak(spec: &DeviceSpec, weights: Dtype) -> Option<Peak> {
    peaks(reachable_dtypes(weights), |name| spec.dense_flops_per_s.get(name).copied())
        .max_by(|one, other| one.rate.0.total_cmp(&other.rate.0))
}

/// Block formats that a GGUF file mixes.
const GGUF_FORMATS: [Dtype; 5] = [Dtype::Q8_0, Dtype::Q4_0, Dtype::Q4K, Dtype::Q5K, Dtype::Q6K];

/// The rate of products in the format itself; of a mixture the fastest of its formats', so that a floor stays one.
fn probed(ceilings: &Ceilings, weights: Dtype) -> Option<Peak> {
    let formats: &[Dtype] = if weights == Dtype::Gguf { &GGUF_FORMATS } else { &[weights] };
    formats
        .iter()
        .map(|format| format.name())
        .filter_map(|dtype| Some((dtype, ceilings.gemm_flops_per_s.get(dtype)?.median)))
        .max_by(|(_, one), (_, other)| one.total_cmp(other))
        .map(|(dtype, rate)| Peak { dtype, rate: FlopsPerSecond(rate) })
}

/// The peaks that are known, in the order of the names.
fn peaks(names: &[&'static str], rate: impl Fn(&str) -> Option<f64>) -> impl Iterator<Item = Peak> {
    names.iter().filter_map(move |&dtype| Some(Peak { dtype, rate: FlopsPerSecond(rate(dtype)?) }))
}

/// The least time a step can take under a roof.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Floor {
    pub memory: Nanos,
    pub compute: Option<Nanos>,
}

impl Floor {
    /// The floor of a step: its ideal bytes at the bandwidth, its FLOPs at the peak.
    pub fn new(cost: &StepCost, roof: &Roof) -> Self {
        Self {
            memory: cost.bytes.ideal().at(roof.bandwidth),
            compute: roof.peak.as_ref().map(|peak| cost.flops.at(peak.rate)),
        }
    }

    /// The higher of the two: the prediction.
    pub fn time(&self) -> Nanos {
        Nanos(self.memory.0.max(self.compute.map_or(0.0, |compute| compute.0)))
    }

    /// Which of the two is higher; memory when no peak is known.
    pub fn bound(&self) -> Bound {
        match self.compute {
            Some(compute) if compute.0 > self.memory.0 => Bound::Compute,
            _ => Bound::Memory,
        }
    }
}

/// The verdict on a measured step.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Verdict {
    pub predicted: Option<Nanos>,
    pub predicted_datasheet: Option<Nanos>,
    pub achieved_bytes_per_s: f64,
    pub fraction_of_ceiling: Option<f64>,
    pub fraction_of_datasheet: Option<f64>,
    pub mfu: Option<f64>,
    /// The peak behind `mfu` and where it is from: `bf16 (data sheet)`.
    pub mfu_dtype: Option<String>,
    pub bound: Option<Bound>,
    /// Why the time is invalid, if it is.
    pub invalid: Option<Cause>,
    /// What limits the reading of the fractions without making the time wrong.
    pub flags: Vec<Cause>,
}

impl Verdict {
    /// Judges a measured step of a model stored as `weights` against the roofs of its device.
    ///
    /// The bound is judged against the measured ceilings where there are any, otherwise the data sheet. MFU is against the highest of
    /// the data sheet's dense peaks that the dtype can be multiplied at, where it names one, otherwise the measured one.
    pub fn new(
        cost: &StepCost,
        measured: Nanos,
        weights: Dtype,
        architecture: &Architecture,
        ceilings: Option<&Ceilings>,
        datasheet: Option<&DeviceSpec>,
    ) -> Self {
        let ideal = cost.bytes.ideal();
        let measured_roof = ceilings.map(|ceilings| Roof::measured(ceilings, weights));
        let sheet_roof = datasheet.map(|spec| Roof::of_any_engine(spec, weights, architecture));
        let mut verdict = Self { achieved_bytes_per_s: ideal.per(measured).0, ..Self::default() };
        if let Some(roof) = &measured_roof {
            let floor = Floor::new(cost, roof);
            verdict.predicted = Some(floor.time());
            verdict.fraction_of_ceiling = Some(floor.memory.0 / measured.0);
        }
        if let Some(roof) = &sheet_roof {
            let floor = Floor::new(cost, roof);
            verdict.predicted_datasheet = Some(floor.time());
            verdict.fraction_of_datasheet = Some(floor.memory.0 / measured.0);
        }
        let promised = datasheet.and_then(|spec| highest_peak(spec, weights));
        let peak_promised = promised.is_some();
        verdict.use_peak(cost, measured, promised, measured_roof.as_ref());
        if let Some(roof) = measured_roof.as_ref().or(sheet_roof.as_ref()) {
            verdict.name_bound(cost, measured, roof, weights);
        }
        let cache = ceilings
            .and_then(|ceilings| ceilings.last_cache_bytes)
            .or_else(|| datasheet.and_then(|spec| spec.l2_bytes));
        let impossible = ceilings.map_or(f64::INFINITY, |ceilings| impossible_share(ceilings, ideal));
        verdict.check_belief(ideal, cache, peak_promised, impossible);
        verdict
    }

    /// Writes the verdict into the cell it is about. A good cell becomes invalid when its time is.
    pub fn record(self, cell: &mut CellResult) {
        cell.predicted_ns = self.predicted.map(|time| time.0);
        cell.predicted_datasheet_ns = self.predicted_datasheet.map(|time| time.0);
        cell.achieved_bytes_per_s = Some(self.achieved_bytes_per_s);
        cell.fraction_of_ceiling = self.fraction_of_ceiling;
        cell.fraction_of_datasheet = self.fraction_of_datasheet;
        cell.mfu = self.mfu;
        cell.mfu_dtype = self.mfu_dtype;
        cell.bound = self.bound;
        cell.flags.extend(self.flags);
        if let Some(reason) = self.invalid
            && matches!(cell.status, Status::Ok | Status::NotConverged | Status::Noisy)
        {
            cell.status = Status::Invalid;
            cell.reason = Some(reason);
        }
    }

    fn use_peak(&mut self, cost: &StepCost, measured: Nanos, promised: Option<Peak>, ceiling: Option<&Roof>) {
        let probed = || Some((ceiling?.peak.clone()?, "measured"));
        let Some((peak, source)) = promised.map(|peak| (peak, "data sheet")).or_else(probed) else { return };
        self.mfu = Some(cost.flops.per(measured).0 / peak.rate.0);
        self.mfu_dtype = Some(format!("{} ({source})", peak.dtype));
    }

    fn name_bound(&mut self, cost: &StepCost, measured: Nanos, roof: &Roof, weights: Dtype) {
        let floor = Floor::new(cost, roof);
        let explained = floor.time().0 / measured.0;
        self.bound = Some(if explained < EXPLAINED_SHARE { Bound::Overhead } else { floor.bound() });
        if floor.compute.is_none() {
            self.flags.push(Cause::PeakUnknown { dtype: weights });
        }
        if let Some(moved) = cost.bytes.as_implemented
            && explained < EXPLAINED_SHARE
        {
            let share = moved.at(roof.bandwidth).0 / measured.0;
            if share >= EXPLAINED_SHARE {
                let ideal_share = floor.memory.0 / measured.0;
                self.flags.push(Cause::EngineTraffic { moved_share: share, ideal_share });
            }
        }
    }

    fn check_belief(&mut self, ideal: Bytes, cache: Option<Bytes>, peak_promised: bool, impossible: f64) {
        let fits_cache = cache.is_some_and(|cache| ideal <= cache);
        if let Some(cache) = cache
            && ideal.0 < CACHE_MARGIN.saturating_mul(cache.0)
        {
            let margin = CACHE_MARGIN;
            self.flags.push(Cause::WorkingSetInCache { bytes: ideal, cache_bytes: cache, margin });
        }
        match self.fraction_of_datasheet {
            Some(share) if share > 1.0 && fits_cache => self.flags.push(Cause::CacheBandwidth { share }),
            Some(share) if share > 1.0 => {
                self.invalid = Some(Cause::AboveDatasheetBandwidth { share, bytes: ideal });
            }
            _ => {}
        }
        if let Some(share) = self.mfu.filter(|&mfu| mfu > 1.0 && peak_promised)
            && self.invalid.is_none()
        {
            self.invalid = Some(Cause::AboveDatasheetPeak { share });
        }
        if let Some(share) = self.fraction_of_ceiling.filter(|&share| share > CEILING_TOLERANCE)
            && !fits_cache
        {
            if share > impossible && self.invalid.is_none() {
                self.invalid = Some(Cause::AboveReadCeiling { share });
            } else {
                self.flags.push(Cause::ReadCeilingLow { share });
            }
        }
    }
}

/// The share of the read ceiling that a step of so many bytes cannot reach.
fn impossible_share(ceilings: &Ceilings, ideal: Bytes) -> f64 {
    let read = &ceilings.read_bytes_per_s;
    // Where a copy moved more than every read, reads are not all that the memory gives: up to twice as much, both directions being full.
    let copy = ceilings.copy_bytes_per_s.high.min(2.0 * read.high);
    let most = if ceilings.copy_exceeds_read() { copy } else { read.high };
    let fastest = (most / read.median).max(1.0);
    let cached = ceilings.last_cache_bytes.is_some_and(|c| ideal.0 < CACHE_MARGIN.saturating_mul(c.0));
    let steady = CEILING_IMPOSSIBLE * fastest;
    if cached || ceilings.doubt().is_some() { steady.max(DOUBTFUL_IMPOSSIBLE) } else { steady }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::model::test_shapes;
    use crate::result::Spread;
    use crate::result::StepBytes;
    use crate::units::Flops;

    fn cost(gigabytes: u64, teraflops: f64) -> StepCost {
        StepCost {
            bytes: StepBytes { weights: Bytes(gigabytes * 1_000_000_000), ..StepBytes::default() },
            flops: Flops(teraflops * 1e12),
            distinct_experts: None,
        }
    }

    /// 1 TB/s promised, 100 TFLOP/s in bf16, 50 MB of cache.
    fn sheet() -> DeviceSpec {
        DeviceSpec {
            name: "paper".into(),
            product: "Paper".into(),
            bandwidth_bytes_per_s: 1e12,
            memory_bytes: Bytes(80_000_000_000),
            l2_bytes: Some(Bytes(50_000_000)),
            dense_flops_per_s: BTreeMap::from([("bf16".to_owned(), 1e14)]),
            source: "none".into(),
        }
    }

    /// 0.8 TB/s and 80 TFLOP/s measured.
    fn ceilings() -> Ceilings {
        let spread = |median: f64| Spread { median, low: median * 0.99, high: median * 1.01 };
        Ceilings {
            read_bytes_per_s: spread(8e11),
            copy_bytes_per_s: spread(7e11),
            triad_bytes_per_s: spread(7.5e11),
            gemm_flops_per_s: BTreeMap::from([("bf16".to_owned(), spread(8e13))]),
            launch_ns: None,
            working_set_bytes: Bytes(4_000_000_000),
            last_cache_bytes: Some(Bytes(50_000_000)),
            read_configuration: String::new(),
            gpu: None,
            disturbed: Vec::new(),
            age_s: None,
        }
    }

    /// The verdict on a step of a model whose config says nothing of its storage.
    fn judged(
        cost: &StepCost,
        measured: Nanos,
        weights: Dtype,
        ceilings: Option<&Ceilings>,
        datasheet: Option<&DeviceSpec>,
    ) -> Verdict {
        Verdict::new(cost, measured, weights, &test_shapes::llama_3_1_8b(), ceilings, datasheet)
    }

    #[test]
    fn the_higher_floor_is_the_prediction_and_names_the_bound() {
        let roof = Roof::datasheet(&sheet(), Dtype::Bf16);
        // 10 GB at 1 TB/s = 10 ms; 0.1 TFLOP at 100 TFLOP/s = 1 ms.
        let floor = Floor::new(&cost(10, 0.1), &roof);
        assert!((floor.time().0 - 1e7).abs() < 1e-3 && floor.bound() == Bound::Memory);
        // 2 TFLOP = 20 ms.
        let floor = Floor::new(&cost(10, 2.0), &roof);
        assert!((floor.time().0 - 2e7).abs() < 1e-3 && floor.bound() == Bound::Compute);
    }

    #[test]
    fn a_dtype_without_a_peak_has_no_compute_floor() {
        let roof = Roof::datasheet(&sheet(), Dtype::F16);
        assert_eq!(roof.peak, None);
        assert_eq!(Floor::new(&cost(10, 1e9), &roof).bound(), Bound::Memory);
        let verdict = judged(&cost(10, 0.1), Nanos(2e7), Dtype::F16, None, Some(&sheet()));
        assert_eq!((verdict.mfu, verdict.bound), (None, Some(Bound::Memory)));
        assert_eq!(verdict.flags, [Cause::PeakUnknown { dtype: Dtype::F16 }]);
        // Weight-only formats multiply at 16 bits, and fp8 falls back to it.
        for weights in
            [Dtype::Int4, Dtype::Int8, Dtype::Q8_0, Dtype::Q4_0, Dtype::Q4K, Dtype::Gguf, Dtype::Fp8]
        {
            assert_eq!(Roof::datasheet(&sheet(), weights).peak.map(|p| p.dtype), Some("bf16"));
        }
    }

    #[test]
    fn a_gguf_file_is_held_against_products_of_its_formats() {
        let mut ceilings = ceilings();
        for (dtype, rate) in [("q4_k", 2e14), ("q8_0", 1e14)] {
            let rate = Spread { median: rate, low: rate, high: rate };
            ceilings.gemm_flops_per_s.insert(dtype.to_owned(), rate);
        }
        let peak = |weights| Roof::measured(&ceilings, weights).peak.unwrap();
        assert_eq!(peak(Dtype::Gguf), Peak { dtype: "q4_k", rate: FlopsPerSecond(2e14) });
        assert_eq!(peak(Dtype::Q8_0), Peak { dtype: "q8_0", rate: FlopsPerSecond(1e14) });
        assert_eq!(peak(Dtype::Q6K).dtype, "bf16", "no probe of it");
    }

    #[test]
    fn fractions_are_of_ideal_bytes_over_time_and_bandwidth() {
        // 10 GB in 15.625 ms is 640 GB/s: 80 % of 800 and 64 % of 1000.
        let verdict =
            judged(&cost(10, 0.5), Nanos(15_625_000.0), Dtype::Bf16, Some(&ceilings()), Some(&sheet()));
        assert!((verdict.achieved_bytes_per_s - 6.4e11).abs() < 1.0);
        assert!((verdict.fraction_of_ceiling.unwrap() - 0.8).abs() < 1e-12);
        assert!((verdict.fraction_of_datasheet.unwrap() - 0.64).abs() < 1e-12);
        // 0.5 TFLOP in 15.625 ms is 32 TFLOP/s of 100.
        assert!((verdict.mfu.unwrap() - 0.32).abs() < 1e-12);
        assert_eq!(verdict.mfu_dtype.as_deref(), Some("bf16 (data sheet)"));
        assert_eq!((verdict.bound, verdict.invalid), (Some(Bound::Memory), None));
        assert!(verdict.flags.is_empty(), "{:?}", verdict.flags);
    }

    #[test]
    fn a_step_that_neither_floor_explains_is_overhead() {
        // Floor 12.5 ms: at 26 ms it is 48 %.
        let judge = |ns| judged(&cost(10, 0.1), Nanos(ns), Dtype::Bf16, Some(&ceilings()), None);
        assert_eq!(judge(2.6e7).bound, Some(Bound::Overhead));
        assert_eq!(judge(2.4e7).bound, Some(Bound::Memory));
        // The engine really moved 20 GB, 25 ms: that explains 96 %.
        let mut moved = cost(10, 0.1);
        moved.bytes.as_implemented = Some(Bytes(20_000_000_000));
        let verdict = judged(&moved, Nanos(2.6e7), Dtype::Bf16, Some(&ceilings()), None);
        assert_eq!(verdict.bound, Some(Bound::Overhead));
        assert!(
            matches!(verdict.flags[0], Cause::EngineTraffic { moved_share, .. } if (moved_share - 0.96).abs() < 0.005),
            "{:?}",
            verdict.flags
        );
    }

    #[test]
    fn faster_than_the_data_sheet_is_invalid_unless_the_set_fits_the_cache() {
        let verdict = judged(&cost(10, 0.1), Nanos(9e6), Dtype::Bf16, Some(&ceilings()), Some(&sheet()));
        let invalid = verdict.invalid.expect("too fast");
        assert!(matches!(invalid, Cause::AboveDatasheetBandwidth { share, .. } if share > 1.1), "{invalid}");
        let small = StepCost {
            bytes: StepBytes { weights: Bytes(40_000_000), ..StepBytes::default() },
            flops: Flops(1e6),
            distinct_experts: None,
        };
        let verdict = judged(&small, Nanos(2e4), Dtype::Bf16, Some(&ceilings()), Some(&sheet()));
        assert_eq!(verdict.invalid, None);
        let flags = verdict.flags.as_slice();
        assert!(
            matches!(flags, [Cause::WorkingSetInCache { .. }, Cause::CacheBandwidth { .. }, ..]),
            "{flags:?}"
        );
    }

    #[test]
    fn faster_than_a_steady_ceiling_is_invalid_and_than_a_disturbed_one_is_flagged() {
        // The floor is 12.5 ms, and 12.38 ms by the fastest repetition of the probe.
        let judge = |ns: f64, ceilings: &Ceilings| {
            judged(&cost(10, 0.1), Nanos(ns), Dtype::Bf16, Some(ceilings), None)
        };
        let half = judge(8e6, &ceilings());
        assert!(matches!(half.invalid, Some(Cause::AboveReadCeiling { share }) if share > 1.5), "{half:?}");
        let near = judge(11.5e6, &ceilings());
        assert_eq!(near.invalid, None);
        assert!(matches!(near.flags[..], [Cause::ReadCeilingLow { .. }]), "{:?}", near.flags);
        // A probe under load reads too slowly, and so it may be passed by more, but not by any.
        let disturbed = Ceilings { disturbed: vec![Cause::ForeignLoad { cores: 0.9 }], ..ceilings() };
        assert_eq!(judge(8e6, &disturbed).invalid, None);
        assert!(judge(6e6, &disturbed).invalid.is_some());
        // So may a probe whose copies moved more than its reads: the step may do what a copy did.
        let copies = Spread { median: 1.4e12, low: 1.3e12, high: 1.5e12 };
        let faster_copy = Ceilings { copy_bytes_per_s: copies, ..ceilings() };
        assert_eq!(judge(8e6, &faster_copy).invalid, None);
        assert!(judge(5e6, &faster_copy).invalid.is_some());
        // So may a step that is partly in the cache.
        let cached = Ceilings { last_cache_bytes: Some(Bytes(4_000_000_000)), ..ceilings() };
        assert_eq!(judge(8e6, &cached).invalid, None);
    }

    #[test]
    fn more_arithmetic_than_the_dense_peak_is_invalid() {
        let verdict = judged(&cost(1, 10.0), Nanos(9e7), Dtype::Bf16, None, Some(&sheet()));
        assert!(matches!(verdict.invalid, Some(Cause::AboveDatasheetPeak { .. })), "{:?}", verdict.invalid);
    }

    #[test]
    fn a_step_is_impossible_only_above_the_highest_peak_its_weights_can_be_multiplied_at() {
        let mut sheet = sheet();
        sheet.dense_flops_per_s.insert("int8".to_owned(), 4e14);
        // 10 TFLOP in 50 ms: twice the bf16 peak, half the int8 one.
        let verdict = |weights| judged(&cost(1, 10.0), Nanos(5e7), weights, None, Some(&sheet));
        for weights in
            [Dtype::Int8, Dtype::Int4, Dtype::Q8_0, Dtype::Q4K, Dtype::Gguf, Dtype::Mxfp4, Dtype::Nvfp4]
        {
            let verdict = verdict(weights);
            assert_eq!(verdict.invalid, None, "{weights}");
            assert_eq!((verdict.mfu, verdict.mfu_dtype.as_deref()), (Some(0.5), Some("int8 (data sheet)")));
        }
        for weights in [Dtype::Bf16, Dtype::Fp8] {
            assert!(matches!(verdict(weights).invalid, Some(Cause::AboveDatasheetPeak { .. })), "{weights}");
        }
    }

    /// 10 TFLOP at 400 TFLOP/s of int8, and at 100 TFLOP/s of bf16.
    #[test]
    fn the_floor_of_a_measured_step_is_at_a_peak_that_its_engine_may_have_reached() {
        let mut sheet = sheet();
        sheet.dense_flops_per_s.insert("int8".to_owned(), 4e14);
        let plain = test_shapes::llama_3_1_8b();
        let int8 = |activations| Architecture {
            quantization: Some(Quantization { bits: 8, activations, ..Quantization::default() }),
            ..plain.clone()
        };
        for (architecture, weights, floor) in [
            // As it was stored when it was loaded: the engine's choice is not known.
            (&plain, Dtype::Int8, 2.5e7),
            (&plain, Dtype::Q8_0, 2.5e7),
            (&plain, Dtype::Bf16, 1e8),
            (&int8(Some(Dtype::Int8)), Dtype::Int8, 2.5e7),
            (&int8(None), Dtype::Int8, 1e8),
        ] {
            let verdict = Verdict::new(&cost(1, 10.0), Nanos(2e8), weights, architecture, None, Some(&sheet));
            assert_eq!(verdict.predicted_datasheet, Some(Nanos(floor)), "{weights}");
        }
        // gpt-oss has weights in mxfp4, which no engine multiplies in fp4.
        let gpt_oss = crate::model::presets::find("gpt-oss-120b").expect("it ships").architecture;
        let b200 = crate::ledger::devices::find("b200").expect("a row");
        let peak = Roof::of_any_engine(b200, Dtype::Mxfp4, &gpt_oss).peak;
        assert_eq!(peak, Some(Peak { dtype: "fp8", rate: FlopsPerSecond(4.5e15) }));
        // A prediction is of what the files ask for.
        assert_eq!(Roof::of_model(&sheet, Dtype::Int8, &plain).peak.map(|peak| peak.dtype), Some("bf16"));
    }

    #[test]
    fn without_any_roof_only_the_achieved_rate_is_said() {
        let verdict = judged(&cost(10, 0.1), Nanos(1e7), Dtype::Bf16, None, None);
        assert!((verdict.achieved_bytes_per_s - 1e12).abs() < 1.0);
        assert_eq!(
            verdict,
            Verdict { achieved_bytes_per_s: verdict.achieved_bytes_per_s, ..Verdict::default() }
        );
    }
}
