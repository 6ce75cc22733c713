//! The operations of layers with experts.

use super::CudaOperations;
use super::workspace::Part;
use crate::engine::EngineError;
use crate::engine::native::cuda::device::Device;
use crate::engine::native::cuda::experts::{COUNTED_LAYERS, ExpertDown, ExpertGateUp, ExpertPlan, Route};
use crate::engine::native::cuda::kernels::DeviceTensor;
use crate::engine::native::operations::{ExpertOperations, ExpertWeights};
use crate::engine::native::ragged_batch::Rows;
use crate::engine::native::shapes::ExpertsMet;
use hbmark_core::units::Bytes;

impl<D: Device> CudaOperations<D> {
    /// How the rows of a step meet experts, and where what routing leaves lies.
    fn expert_plan(
        &mut self,
        rows: usize,
        experts: &ExpertWeights<Self>,
    ) -> Result<(ExpertPlan, u64), EngineError> {
        let format = experts.routed[0].gate_up.format;
        let plan = ExpertPlan::new(self.device.shared_bytes(), rows, &experts.shape, format, self.tuning);
        self.grow(Part::ExpertWork, plan.work_bytes(&experts.shape), &[])?;
        self.grow(Part::Prepared, plan.prepared_bytes(experts), &[])?;
        Ok((plan, self.workspace.address(Part::ExpertWork)))
    }
}

impl<D: Device> ExpertOperations for CudaOperations<D> {
    fn take_script(&mut self, chosen: Option<&[u32]>) -> Result<(), EngineError> {
        let moved = self.script.set(&mut self.device, chosen);
        if !matches!(moved, Ok(false)) {
            self.known.clear();
        }
        moved.map(drop)
    }

    fn route(
        &mut self,
        rows: &Rows,
        norm: (&DeviceTensor<D>, f32),
        experts: &ExpertWeights<Self>,
        scripted: Option<&[u32]>,
        hidden: &DeviceTensor<D>,
    ) -> Result<(), EngineError> {
        let (plan, work) = self.expert_plan(rows.len(), experts)?;
        let workspace = self.router_workspace(rows.len(), &experts.router)?;
        let layer = self.routed.len();
        self.grow(Part::RoutersArrived, 4 * plan.arrivals(), &[0])?;
        self.grow(Part::ExpertsMet, 8, &[0])?;
        self.grow(Part::TilesMet, 4 * (layer + 1).max(COUNTED_LAYERS), &[0])?;
        let logits = self.sums_workspace(rows.len(), experts.router.outputs)?;
        let space = &self.workspace;
        let kernel = Route {
            plan,
            hidden,
            norm,
            experts,
            scripted: scripted.map_or(0, |chosen| self.script.take(chosen.len())),
            real_rows: self.step.real_rows(),
            logits,
            work,
            arrived: space.address(Part::RoutersArrived),
            met: space.address(Part::ExpertsMet),
            tiles_met: space.address(Part::TilesMet) + 4 * layer as u64,
            workspace,
        };
        self.moved += kernel.launch(&mut self.device, self.tuning)?;
        let [first, ..] = experts.routed.as_slice() else { return Ok(()) };
        self.routed.push([first.gate_up.bytes(), first.down.bytes()]);
        Ok(())
    }

    fn expert_gate_up(
        &mut self,
        rows: &Rows,
        norm: (&DeviceTensor<D>, f32),
        experts: &ExpertWeights<Self>,
        hidden: &DeviceTensor<D>,
        inner: &mut DeviceTensor<D>,
    ) -> Result<(), EngineError> {
        let (plan, work) = self.expert_plan(rows.len(), experts)?;
        let router = &experts.router;
        let is_prepared = router.format == experts.routed[0].gate_up.format
            && self.router_workspace(rows.len(), router)?.is_some();
        let prepared = self.workspace.address(Part::Prepared);
        let kernel = ExpertGateUp { plan, hidden, norm, experts, work, inner, prepared, is_prepared };
        self.moved += kernel.launch(&mut self.device, self.tuning)?;
        Ok(())
    }

    fn expert_down(
        &mut self,
        rows: &Rows,
        experts: &ExpertWeights<Self>,
        inner: &DeviceTensor<D>,
        hidden: &mut DeviceTensor<D>,
    ) -> Result<(), EngineError> {
        let (plan, work) = self.expert_plan(rows.len(), experts)?;
        let parts = rows.len() * (experts.shape.per_row + 1);
        self.grow(Part::ExpertParts, 4 * parts * hidden.width, &[])?;
        let kernel = ExpertDown {
            plan,
            inner,
            experts,
            work,
            real_rows: self.step.real_rows(),
            parts: self.workspace.address(Part::ExpertParts),
            hidden,
            into: self.peer_buffer.take_begun().unwrap_or_else(|| D::address(&hidden.memory)),
            prepared: self.workspace.address(Part::Prepared),
        };
        self.moved += kernel.launch(&mut self.device, self.tuning)?;
        Ok(())
    }

    fn take_experts_met(&mut self) -> ExpertsMet {
        let layers = std::mem::take(&mut self.routed_layers);
        let mut bytes = [0; 8];
        let Some(memory) = self.workspace.memory(Part::ExpertsMet).filter(|_| layers > 0) else {
            return ExpertsMet::default();
        };
        if self.device.download(memory, 0, &mut bytes).is_err() {
            return ExpertsMet::default();
        }
        let before = std::mem::replace(&mut self.experts_told, u64::from_le_bytes(bytes));
        ExpertsMet { experts: self.experts_told - before, layers }
    }

    fn await_expert_bytes(&mut self) -> Result<[Bytes; 2], EngineError> {
        let mut sums = [0; 2];
        if let Some(memory) = self.workspace.memory(Part::TilesMet).filter(|_| !self.routed.is_empty()) {
            let mut tiles = vec![0; 4 * self.routed.len()];
            self.device.download(memory, 0, &mut tiles)?;
            for (word, [gate_up, down]) in tiles.as_chunks().0.iter().zip(&self.routed) {
                let tiles = u64::from(u32::from_le_bytes(*word));
                sums = [sums[0] + tiles * gate_up, sums[1] + tiles * down];
            }
        }
        Ok(sums.map(Bytes))
    }
}
