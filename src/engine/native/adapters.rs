//! LoRA adapters, packed by layer and by the fused linear layer they add to.
//!
//! Enters: [`Adapter`]s. Leaves: [`LoraWeights`] matrices of a device, and in a step what they add. An adapter of rank r costs a step r numbers
//! per input and output of each layer it adds to, once for all its rows; rows of several adapters in one step each get their own. The
//! scale is multiplied into `B` when it is packed.

use super::forward::ModelWidths;
use super::operations::{FusedLayout, LinearPart, Operations, Storage};
use super::ragged_batch::Rows;
use crate::engine::EngineError;
use crate::weights::{Adapter, Packing, StoredMatrix};
use hbmark_core::model::Target;
use hbmark_core::units::Bytes;

/// A fused linear layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoraSite {
    Qkv,
    Output,
    GateUp,
    Down,
}

impl LoraSite {
    /// All of them, in the order of a layer.
    pub const ALL: [Self; 4] = [Self::Qkv, Self::Output, Self::GateUp, Self::Down];

    /// Its parts, and where the outputs of each begin.
    fn parts(self, widths: &ModelWidths) -> impl Iterator<Item = (Target, usize)> {
        let (query, kv) = (widths.attention.query_width(), widths.attention.kv_width());
        let parts: &[(Target, usize)] = match self {
            Self::Qkv => &[(Target::QProj, 0), (Target::KProj, query), (Target::VProj, query + kv)],
            Self::Output => &[(Target::OProj, 0)],
            Self::GateUp => &[(Target::GateProj, 0), (Target::UpProj, widths.ffn)],
            Self::Down => &[(Target::DownProj, 0)],
        };
        let mut places = [(Target::QProj, 0); 3];
        places[..parts.len()].copy_from_slice(parts);
        places.into_iter().take(parts.len())
    }

    /// Outputs of all parts.
    fn width(self, widths: &ModelWidths) -> usize {
        match self {
            Self::Qkv => widths.attention.query_width() + 2 * widths.attention.kv_width(),
            Self::Output | Self::Down => widths.hidden,
            Self::GateUp => 2 * widths.ffn,
        }
    }
}

/// What one adapter adds to one fused layer.
#[derive(Debug)]
pub struct LoraWeights<O: Storage + ?Sized> {
    /// `A` of each part, `[rank, inputs]`.
    pub a: O::Linear,
    /// `B` of each part with the scale in it, `[outputs, rank]`.
    pub b: O::Linear,
    /// Where the outputs of each part begin.
    pub outputs: Vec<usize>,
    pub rank: usize,
}

/// The adapters of a layer, per site in order of loading; `None` where an adapter adds nothing.
type LayerAdapters<O> = [Vec<Option<LoraWeights<O>>>; 4];

/// All adapters of a model.
#[derive(Debug)]
pub struct Adapters<O: Operations> {
    layers: Vec<LayerAdapters<O>>,
    bytes: Vec<Bytes>,
}

impl<O: Operations> Adapters<O> {
    /// No adapters, of a model of so many layers.
    pub fn new(layers: usize) -> Self {
        Self { layers: (0..layers).map(|_| Default::default()).collect(), bytes: Vec::new() }
    }

    /// Number of adapters.
    pub fn count(&self) -> usize {
        self.bytes.len()
    }

    /// Packs an adapter and returns its number and the bytes of its matrices as stored.
    pub fn take(
        &mut self,
        operations: &mut O,
        widths: &ModelWidths,
        adapter: &Adapter,
        packing: Packing,
    ) -> Result<(usize, Bytes), EngineError> {
        let mut bytes = Bytes(0);
        let mut packed = Vec::with_capacity(self.layers.len());
        for layer in 0..self.layers.len() {
            let mut sites: [Option<LoraWeights<O>>; 4] = Default::default();
            for site in LoraSite::ALL {
                let (mut a, mut b, mut outputs) = (Vec::new(), Vec::new(), Vec::new());
                for (target, first) in site.parts(widths) {
                    let Some(low) = adapter.at(layer, target) else { continue };
                    let scaled: Vec<f32> = low.b.iter().map(|b| b * adapter.scale).collect();
                    let matrix = |rows, values: &[f32]| {
                        StoredMatrix::from_f32_rows(rows, values.len() / rows, values, packing)
                    };
                    let (down, up) =
                        (matrix(adapter.rank, &low.a), matrix(scaled.len() / adapter.rank, &scaled));
                    bytes = bytes + down.bytes() + up.bytes();
                    a.push(LinearPart { matrix: down, bias: None });
                    b.push(LinearPart { matrix: up, bias: None });
                    outputs.push(first);
                }
                if !outputs.is_empty() {
                    sites[site as usize] = Some(LoraWeights {
                        a: operations.linear(a, FusedLayout::Stacked)?,
                        b: operations.linear(b, FusedLayout::Stacked)?,
                        outputs,
                        rank: adapter.rank,
                    });
                }
            }
            packed.push(sites);
        }
        // An adapter is kept only when all of it was packed.
        for (layer, sites) in self.layers.iter_mut().zip(packed) {
            for (all, one) in layer.iter_mut().zip(sites) {
                all.push(one);
            }
        }
        self.bytes.push(bytes);
        Ok((self.bytes.len() - 1, bytes))
    }

    /// Before a linear layer: computes what the adapters of the step add to it.
    pub fn add(
        &self,
        operations: &mut O,
        rows: &Rows,
        (layer, site): (usize, LoraSite),
        widths: &ModelWidths,
        norm: Option<(&O::Vector, f32)>,
        input: &O::Buffer,
    ) -> Result<(), EngineError> {
        if rows.adapters.is_empty() {
            return Ok(());
        }
        operations.lora(rows, &self.layers[layer][site as usize], site.width(widths), norm, input)
    }
}

#[cfg(test)]
mod tests;
