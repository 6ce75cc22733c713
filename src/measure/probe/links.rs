//! Probes of the links between GPUs: reads and writes of each other's memory, and sums over all of them.
//!
//! Enters: devices that reach each other's memory. Leaves: [`LinkCeilings`], after what was read of other devices was checked. Sums are those of a tensor parallel step
//! ([`PeerBuffer`]), replayed from a graph as they are there. Times of emulated devices mean nothing.

use super::ProbeError;
use super::device::{DeviceProbe, Extent, memory_of, write};
use crate::engine::native::cuda::device::Device;
use crate::engine::native::cuda::kernels::{DeviceTensor, Tuning};
use crate::engine::native::cuda::peers::PeerBuffer;
use crate::engine::native::ranks::Rank;
use crate::engine::{EngineError, Timeline};
use hbmark_core::result::{AllReduceTime, LinkCeilings, Spread};
use hbmark_core::units::Bytes;

/// Sums of a graph, of which a replay has so many; an even number, since two sums take turns.
const SUMS: usize = 20;
/// Floats of a row of a sum.
const WIDTH: usize = 64;

/// How much to move, and how often.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkExtent {
    /// Bytes of another device's memory that are read and written.
    pub bytes: usize,
    /// Bytes of sums.
    pub sums: &'static [usize],
    pub runs: usize,
}

/// Measures the links between devices, which it gives back.
pub fn links<D: Device>(
    devices: Vec<D>,
    extent: &LinkExtent,
    tuning: Tuning,
) -> Result<(LinkCeilings, Vec<D>), ProbeError> {
    let count = devices.len();
    let mut probes: Vec<DeviceProbe<D>> = devices.into_iter().map(DeviceProbe::new).collect();
    let mut buffers = Vec::with_capacity(count);
    for probe in &mut probes {
        buffers.push(probe.shared_pattern(extent.bytes)?);
    }
    let walk = Extent {
        working_set: extent.bytes,
        cached: 0,
        cached_passes: 0,
        blocks_per_multiprocessor: &[4, 8],
        runs: extent.runs,
    };
    let mut found = LinkCeilings::default();
    for (from, probe) in probes.iter_mut().enumerate() {
        let (mut reads, mut writes) = (Vec::with_capacity(count), Vec::with_capacity(count));
        for (to, buffer) in buffers.iter().enumerate() {
            let memory = memory_of::<D>(buffer);
            let mut of_pair = || -> Result<[Option<Spread>; 2], ProbeError> {
                if from == to {
                    return Ok([None, None]);
                }
                let (read, _) = probe.best_read(&walk, "read_u4", &memory, 1)?;
                let (written, _) = probe.best(&walk, extent.bytes as f64, |blocks| write(&memory, blocks))?;
                Ok([Some(read), Some(written)])
            };
            let [read, written] = of_pair()?;
            reads.push(read);
            writes.push(written);
        }
        found.read_bytes_per_s.push(reads);
        found.write_bytes_per_s.push(writes);
    }
    let devices: Vec<D> = probes.into_iter().map(DeviceProbe::into_device).collect();
    let (times, devices) = our_sums(devices, extent, tuning)?;
    found.all_reduce = times;
    Ok((found, devices))
}

/// Sums by our own kernels, as the first of the devices sees them.
fn our_sums<D: Device>(
    devices: Vec<D>,
    extent: &LinkExtent,
    tuning: Tuning,
) -> Result<(Vec<AllReduceTime>, Vec<D>), EngineError> {
    all_reduces(devices, |rank, device, peer_buffer: &mut PeerBuffer<D>| {
        let times = of_sizes(rank, device, extent, |rank, device, hidden| {
            let floats = hidden.rows * hidden.width;
            peer_buffer.begin(device, rank, floats, 1)?;
            peer_buffer.all_reduce(
                device,
                rank,
                tuning,
                (hidden.rows, hidden.width),
                D::address(&hidden.memory),
            )?;
            let is_one_shot = PeerBuffer::<D>::is_one_shot(rank.size(), floats, tuning);
            Ok(if is_one_shot { "one-shot" } else { "two-shot" })
        })?;
        peer_buffer.check(device, rank.size())?;
        Ok(times)
    })
}

/// The times that ranks on threads of their own find, of which the first rank's are the result, and the devices. Each rank has something of its own that
/// the others may be at until all devices are done.
pub(super) fn all_reduces<D: Device, O: Default + Send>(
    devices: Vec<D>,
    of_rank: impl Fn(&mut Rank, &mut D, &mut O) -> Result<Vec<AllReduceTime>, EngineError> + Sync,
) -> Result<(Vec<AllReduceTime>, Vec<D>), EngineError> {
    let ranks = Rank::group(devices.len()).into_iter().zip(devices);
    let found: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = ranks
            .map(|(mut rank, mut device)| {
                let of_rank = &of_rank;
                scope.spawn(move || {
                    let mut own = O::default();
                    let times = of_rank(&mut rank, &mut device, &mut own);
                    if times.is_err() {
                        rank.leave();
                    }
                    (times, (device, own))
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("a probe does not panic")).collect()
    });
    let (times, devices): (Vec<_>, Vec<_>) = found.into_iter().unzip();
    let (mut devices, own): (Vec<D>, Vec<O>) = devices.into_iter().unzip();
    for device in &mut devices {
        // A device that failed has no kernels that run.
        let _ = device.synchronise();
    }
    drop(own);
    let (good, mut failed): (Vec<_>, Vec<_>) = times.into_iter().partition(Result::is_ok);
    // The reason of the one that failed before that others missed it.
    failed.sort_by_key(|times| matches!(times, Err(EngineError::RankLost { .. })));
    let first = failed.into_iter().chain(good).next();
    Ok((first.unwrap_or_else(|| Ok(Vec::new()))?, devices))
}

/// Times of sums of all sizes by a rank; `sum` enqueues one, and says what made it.
pub(super) fn of_sizes<D: Device>(
    rank: &mut Rank,
    device: &mut D,
    extent: &LinkExtent,
    mut sum: impl FnMut(&mut Rank, &mut D, &DeviceTensor<D>) -> Result<&'static str, EngineError>,
) -> Result<Vec<AllReduceTime>, EngineError> {
    let mut timeline: Box<dyn Timeline> = device.timeline();
    let mut found = Vec::with_capacity(extent.sums.len());
    for bytes in extent.sums {
        // A library may reach for the memory of other ranks.
        let memory = device.allocate_shared(*bytes)?;
        device.upload(&memory, 0, &vec![0; *bytes])?;
        let hidden = DeviceTensor { memory, rows: bytes / (4 * WIDTH), width: WIDTH };
        // Nobody waits on a device for a rank that failed here, or below.
        rank.bring(std::iter::empty())?;
        // Kernels are loaded, and memory is there, before anything is recorded.
        let by = sum(rank, device, &hidden)?;
        device.synchronise()?;
        device.begin_capture()?;
        for _ in 0..SUMS {
            sum(rank, device, &hidden)?;
        }
        let graph = device.end_capture()?;
        rank.bring(std::iter::empty())?;
        device.replay(&graph)?;
        timeline.drain()?;
        for _ in 0..extent.runs {
            timeline.mark()?;
            device.replay(&graph)?;
            timeline.mark()?;
        }
        let marks = timeline.drain()?;
        let times: Vec<f64> =
            marks.chunks_exact(2).map(|pair| (pair[1].0 - pair[0].0) / SUMS as f64).collect();
        // A clock that does not advance gives no time.
        let time_ns = Spread::of(&times).unwrap_or_default();
        found.push(AllReduceTime { bytes: Bytes(*bytes as u64), by: by.into(), time_ns });
    }
    Ok(found)
}

#[cfg(all(test, debug_assertions))]
mod tests {
    use super::*;
    use crate::engine::native::cuda::emulator::Emulated;

    #[test]
    fn every_pair_has_a_rate_and_every_size_a_time() {
        let extent = LinkExtent { bytes: 64 << 10, sums: &[8 << 10, 64 << 10], runs: 3 };
        let tuning = Tuning { max_one_shot_bytes: 16 << 10, ..Tuning::default() };
        let (found, _) = links(Emulated::group(3), &extent, tuning).unwrap();
        for rates in [&found.read_bytes_per_s, &found.write_bytes_per_s] {
            for (gpu, row) in rates.iter().enumerate() {
                let measured: Vec<bool> = row.iter().map(Option::is_some).collect();
                assert_eq!(measured, (0..3).map(|other| other != gpu).collect::<Vec<_>>());
            }
        }
        let kinds: Vec<(u64, &str)> =
            found.all_reduce.iter().map(|row| (row.bytes.0, row.by.as_str())).collect();
        assert_eq!(kinds, [(8 << 10, "one-shot"), (64 << 10, "two-shot")]);
        assert!(found.all_reduce.iter().all(|row| row.time_ns.median > 0.0));
    }

    #[test]
    fn a_device_that_fails_is_named_and_the_others_do_not_wait() {
        let extent = LinkExtent { bytes: 4 << 10, sums: &[8 << 10], runs: 3 };
        let tuning = Tuning { rank_timeout: std::time::Duration::from_millis(200), ..Tuning::default() };
        let mut devices = Emulated::group(3);
        // Behind the launches of reads and writes.
        devices[1].fails_in = Some(40);
        let error = links(devices, &extent, tuning).unwrap_err();
        assert!(error.to_string().contains("a planted fault"), "{error}");
    }
}
