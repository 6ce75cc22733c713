//! A step of candle's own forward as a CUDA graph.
//!
//! Enters: a step that ran, whose shapes are those of its context. Leaves: the same kernels as one graph, with the tensors they read and write. candle's
//! part is a guard under which the small uploads of its kernels are kept on the device: a run under the guard fills that store, so that the
//! recording needs no copy from the host. Logits and tokens are copied to tensors of our own at the end of the graph; everything else that it
//! allocates it frees.

use std::sync::Arc;

use candle_core::{Device, Tensor};
use cudarc::driver::{CudaGraph, CudaStream, sys};

use super::{StockModel, StockSession, greedy};
use crate::engine::error_mapping::of_candle;
use crate::engine::replay::CapturableSession;
use crate::engine::{EngineError, StepBatch, cuda};

/// A recorded step.
pub struct CapturedStep {
    /// `None` only while it is dropped.
    graph: Option<CudaGraph>,
    stream: Arc<CudaStream>,
    /// What the graph reads.
    _input: Tensor,
    _cache: StockModel,
    /// What it leaves.
    logits: Tensor,
    greedy: Tensor,
}

impl std::fmt::Debug for CapturedStep {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Recording").field("logits", &self.logits.shape()).finish_non_exhaustive()
    }
}

impl Drop for CapturedStep {
    fn drop(&mut self) {
        // A graph and its memory must not go while it runs. A device that failed has nothing left to wait for.
        let _ = self.stream.synchronize();
        self.graph = None;
        // What the graph allocated stays with the device until then, and the next cell would find less room. An error is the next call's, too.
        let _ = cuda::trim_graph_memory(self.stream.context());
    }
}

impl CapturableSession for StockSession {
    type CapturedStep = CapturedStep;

    fn record(&mut self, batch: &StepBatch) -> Result<CapturedStep, EngineError> {
        let (tokens, position) = self.check(batch)?;
        let name = self.backend.name.clone();
        let failed = |error: candle_core::Error| of_candle(&name, &error);
        let Device::Cuda(device) = self.backend.device.clone() else {
            return Self::refuse("recorded steps".into(), format!("{name} has no graphs"));
        };
        let cache = match self.groups.get(&batch.sequences[0].sequence) {
            Some(group) if group.before.0 == position => group.before.1.clone(),
            _ => return Self::refuse("a recording".into(), "the step did not run before".into()),
        };
        let stream = device.cuda_stream();
        let flat: Vec<u32> = batch.sequences.iter().flat_map(|s| s.tokens.iter().copied()).collect();
        let input = Tensor::from_vec(flat, (batch.sequences.len(), tokens), &self.backend.device);
        let input = input.map_err(failed)?;

        let kept_uploads = device.enable_cuda_graph_htod_cache();
        let shapes = greedy(&mut cache.clone(), &input, position).map_err(failed)?;
        let outputs = (shapes.0.zeros_like().map_err(failed)?, shapes.1.zeros_like().map_err(failed)?);
        drop(shapes);
        stream.synchronize().map_err(|error| cuda::failed(&name, error))?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        stream.begin_capture(mode).map_err(|error| cuda::failed(&name, error))?;
        let captured = (|| {
            let (logits, greedy) = greedy(&mut cache.clone(), &input, position)?;
            outputs.0.slice_set(&logits.contiguous()?, 0, 0)?;
            outputs.1.slice_set(&greedy.contiguous()?, 0, 0)
        })();
        // The stream must come out of the capture whatever happened in it.
        let free_on_launch = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        let ended = stream.end_capture(free_on_launch);
        drop(kept_uploads);
        if captured.is_err() || ended.is_err() {
            // Tensors that were freed inside a void capture left an error behind, which is not the next step's.
            let _ = stream.context().check_err();
        }
        // What candle says is nearer to the cause than that the capture is void.
        captured.map_err(failed)?;
        let graph = ended.map_err(|error| cuda::failed(&name, error))?;
        let graph = graph.ok_or_else(|| EngineError::Device {
            device: name.clone(),
            detail: "the recording is void".into(),
        })?;
        graph.upload().map_err(|error| cuda::failed(&name, error))?;
        let (logits, greedy) = outputs;
        Ok(CapturedStep { graph: Some(graph), stream, _input: input, _cache: cache, logits, greedy })
    }

    fn replay(&mut self, recording: &CapturedStep) -> Result<(), EngineError> {
        let graph = recording.graph.as_ref().expect("a recorded step has its graph until it is dropped");
        graph.launch().map_err(|error| cuda::failed(&self.backend.name, error))?;
        self.last = Some((recording.logits.clone(), recording.greedy.clone()));
        Ok(())
    }
}
