//! K and V in blocks, laid out for the lanes.
//!
//! Enters: rows of K and V with their block and slot. Leaves: a [`CachePool`] whose tiles of sixteen positions can be streamed: K with a
//! position per lane, so that scores are never summed across lanes; V with an element per lane, so that neither are values.
//!
//! Within a block of one layer: per head of K, tiles of sixteen positions, `[tile][head_dim][16]`; then per head of V,
//! `[position][head_dim padded to 16]`; then, where vectors have scales, those of K and of V of each head, a position after another. Of latent
//! attention there is K alone, laid out as V is: its first elements are also the value.
#![expect(unsafe_code, reason = "members write slots of shared blocks through pointers")]

use std::ops::Range;

use hbmark_cpu_kernels::element::Element;
use hbmark_cpu_kernels::simd::LANES;

use super::huge_pages::Pages;
use crate::engine::EngineError;
use crate::engine::native::shapes::PoolShape;
use crate::engine::native::{kv_format, refuse};

/// Bytes of blocks that are mapped together.
const SLAB_BYTES: usize = 32 << 20;

/// What is touched at a time: the smallest page.
const PAGE: usize = 4096;
/// Bytes that one thread touches at a time.
const REGION: usize = 2 << 20;

/// Blocks of all layers.
#[derive(Debug)]
pub struct CachePool {
    pub shape: PoolShape,
    /// Elements of one row of V: its width, padded to whole lanes; of latent attention those of K.
    pub value_stride: usize,
    blocks_per_slab: usize,
    slabs: Vec<Pages>,
}

impl CachePool {
    /// A pool without blocks.
    pub fn new(shape: PoolShape) -> Result<Self, EngineError> {
        if shape.block_size == 0 || !shape.block_size.is_multiple_of(LANES) {
            return refuse(format!("blocks of {} positions", shape.block_size), "a multiple of 16 is needed");
        }
        kv_format::check(shape.dtype, shape.value_dim == 0)?;
        let mut pool = Self {
            shape,
            value_stride: match shape.value_dim {
                0 => shape.head_dim,
                dim => dim,
            }
            .next_multiple_of(LANES),
            blocks_per_slab: 1,
            slabs: Vec::new(),
        };
        pool.blocks_per_slab = (SLAB_BYTES / pool.block_bytes()).max(1);
        Ok(pool)
    }

    /// Whether values are the first elements of keys.
    pub fn is_latent(&self) -> bool {
        self.shape.value_dim == 0
    }

    /// Elements of K of one head in one block, where it does not stand for V.
    fn key_elements(&self) -> usize {
        if self.is_latent() { 0 } else { self.shape.block_size * self.shape.head_dim }
    }

    /// Elements of V of one head in one block.
    fn value_elements(&self) -> usize {
        self.shape.block_size * self.value_stride
    }

    /// Bytes of K and V of one block of one layer.
    fn element_bytes(&self) -> usize {
        self.shape.kv_heads * (self.key_elements() + self.value_elements()) * self.shape.element_bytes()
    }

    /// Bytes of one block of one layer.
    fn layer_bytes(&self) -> usize {
        self.element_bytes() + self.shape.block_size * self.shape.scale_bytes()
    }

    /// Bytes of one block over all layers, padding included.
    pub fn block_bytes(&self) -> usize {
        (self.shape.layers * self.layer_bytes()).max(1)
    }

    /// Sees to it that blocks `0..blocks` exist; the slabs that came for it, to be [touched](Self::touch).
    pub fn reserve(&mut self, blocks: usize) -> Result<Range<usize>, EngineError> {
        let before = self.slabs.len();
        while self.slabs.len() * self.blocks_per_slab < blocks {
            let bytes = self.blocks_per_slab * self.block_bytes();
            let slab = Pages::new(bytes).map_err(|error| EngineError::OutOfMemory {
                device: "cpu".into(),
                detail: format!("{bytes} bytes of KV blocks: {error}"),
            })?;
            self.slabs.push(slab);
        }
        Ok(before..self.slabs.len())
    }

    fn slab_bytes(&self) -> usize {
        self.blocks_per_slab * self.block_bytes()
    }

    /// Regions of some slabs.
    pub fn regions(&self, slabs: &Range<usize>) -> usize {
        slabs.len() * self.slab_bytes().div_ceil(REGION)
    }

    /// Writes to all pages of one region of new slabs, so that the system gives them now and not in the middle of a step.
    ///
    /// # Panics
    /// When there is no such region.
    pub fn touch(&self, slabs: &Range<usize>, region: usize) {
        let per_slab = self.slab_bytes().div_ceil(REGION);
        let slab = &self.slabs[slabs.start + region / per_slab];
        let first = region % per_slab * REGION;
        for offset in (first..(first + REGION).min(self.slab_bytes())).step_by(PAGE) {
            // SAFETY: the offset lies within the slab, whose bytes are zero and in no block that is read or written yet.
            unsafe { slab.as_ptr().cast_mut().add(offset).write_volatile(0) };
        }
    }

    /// The first element of K of a head in a block: `[block_size / 16][head_dim][16]`.
    ///
    /// # Panics
    /// When the block was never reserved.
    pub fn keys<E: Element>(&self, layer: usize, block: usize, head: usize) -> *mut E {
        self.at(layer, block, head * self.key_elements())
    }

    /// The first element of V of a head in a block, or of K that stands for it: `[block_size][value_stride]`.
    ///
    /// # Panics
    /// When the block was never reserved.
    pub fn values<E: Element>(&self, layer: usize, block: usize, head: usize) -> *mut E {
        self.at(layer, block, self.shape.kv_heads * self.key_elements() + head * self.value_elements())
    }

    /// The first scale of K (or, with `values`, of V) of a head in a block: `[block_size]`. Null where vectors have none.
    ///
    /// # Panics
    /// When the block was never reserved.
    pub fn scales(&self, layer: usize, block: usize, head: usize, values: bool) -> *mut f32 {
        if self.shape.scale_bytes() == 0 {
            return std::ptr::null_mut();
        }
        let vector = 2 * head + usize::from(values);
        self.at::<f32>(layer, block, self.element_bytes() / size_of::<f32>() + vector * self.shape.block_size)
    }

    fn at<E>(&self, layer: usize, block: usize, element: usize) -> *mut E {
        let slab = &self.slabs[block / self.blocks_per_slab];
        let offset = block % self.blocks_per_slab * self.block_bytes() + layer * self.layer_bytes();
        // SAFETY: the slab has `blocks_per_slab` blocks of `block_bytes`, and the element lies within its layer's part.
        unsafe { slab.as_ptr().cast_mut().add(offset + element * size_of::<E>()).cast() }
    }

    /// Writes K and V of one head at a slot; `scales` are those of both, where vectors have any.
    ///
    /// # Safety
    /// `E` is the pool's dtype, nothing else reads or writes this slot and head meanwhile.
    ///
    /// # Panics
    /// When the slices are not as long as a head, or the block was never reserved.
    pub unsafe fn write<E: Element>(
        &self,
        layer: usize,
        (block, slot): (usize, usize),
        head: usize,
        [key, value]: [&[f32]; 2],
        scales: [f32; 2],
    ) {
        let dim = self.shape.head_dim;
        assert!(
            key.len() == dim && value.len() == dim && slot < self.shape.block_size,
            "one head at one slot"
        );
        let keys = self.keys::<E>(layer, block, head);
        let values = self.values::<E>(layer, block, head);
        let tile = slot / LANES * dim * LANES + slot % LANES;
        let mut factors = [1.0; 2];
        if E::SCALED {
            factors = scales.map(kv_format::inverse);
            for (scale, values) in scales.into_iter().zip([false, true]) {
                // SAFETY: as below.
                unsafe { self.scales(layer, block, head, values).add(slot).write(scale) };
            }
        }
        for (d, (key, value)) in key.iter().zip(value).enumerate() {
            // SAFETY: within the head's part of the block, which nothing else touches.
            unsafe {
                keys.add(tile + d * LANES).write(E::narrow(*key * factors[0]));
                values.add(slot * self.value_stride + d).write(E::narrow(*value * factors[1]));
            }
        }
    }
}

impl CachePool {
    /// Writes the vector of a slot of latent attention.
    ///
    /// # Safety
    /// As [`write`](Self::write).
    ///
    /// # Panics
    /// When the slice is longer than a row, or the block was never reserved.
    pub unsafe fn write_latent<E: Element>(
        &self,
        layer: usize,
        (block, slot): (usize, usize),
        latent: &[f32],
    ) {
        assert!(latent.len() <= self.value_stride && slot < self.shape.block_size, "one vector at one slot");
        let row = self.values::<E>(layer, block, 0).wrapping_add(slot * self.value_stride);
        for (d, value) in latent.iter().enumerate() {
            // SAFETY: within the row, which nothing else touches.
            unsafe { row.add(d).write(E::narrow(*value)) };
        }
    }
}

/// Runs an expression with the element type of a cache.
macro_rules! with_element {
    ($dtype:expr, $element:ident => $body:expr) => {
        match $dtype {
            hbmark_core::model::Dtype::F32 => {
                type $element = f32;
                $body
            }
            hbmark_core::model::Dtype::F16 => {
                type $element = half::f16;
                $body
            }
            hbmark_core::model::Dtype::Fp8 => {
                type $element = hbmark_cpu_kernels::element::E4m3;
                $body
            }
            hbmark_core::model::Dtype::Int8 => {
                type $element = i8;
                $body
            }
            _ => {
                type $element = half::bf16;
                $body
            }
        }
    };
}
pub(super) use with_element;
