//! The data of a step on the device: tokens, positions, block tables.
//!
//! Enters: [`Rows`], the angles of their positions, the places of blocks. Leaves: addresses that stay the same while sizes do, so that one
//! recorded graph serves every step of as many rows. Only differences from the previous step are copied: a pinned step copies nothing.

use super::device::Device;
use super::device_matrix::floats;
use crate::engine::EngineError;
use crate::engine::native::ragged_batch::Rows;
use crate::engine::native::rope::RopeTables;
use crate::engine::native::shapes::PoolShape;

/// Bytes of blocks that are allocated together, at least.
const SLAB_BYTES: u64 = 64 << 20;

/// K and V of all layers, in blocks: see `kernels/cache.cuh`.
#[derive(Debug)]
pub struct Pool<D: Device> {
    pub shape: PoolShape,
    blocks_per_slab: usize,
    slabs: Vec<D::Memory>,
    /// Where all blocks lie, of a pool whose blocks are taken in order.
    in_order: Scratch<D>,
}

impl<D: Device> Pool<D> {
    /// A pool without blocks.
    pub fn new(shape: PoolShape) -> Self {
        let blocks = usize::try_from(SLAB_BYTES / shape.block_bytes().0.max(1)).unwrap_or(1).clamp(1, 256);
        Self { shape, blocks_per_slab: blocks, slabs: Vec::new(), in_order: Scratch::default() }
    }

    /// Sees to it that blocks `0..blocks` exist.
    pub fn reserve(&mut self, device: &mut D, blocks: usize) -> Result<(), EngineError> {
        while self.slabs.len() * self.blocks_per_slab < blocks {
            let bytes = self.blocks_per_slab * self.block_bytes();
            self.slabs.push(device.allocate(bytes)?);
            if self.shape.consecutive {
                let blocks = (0..).take(self.slabs.len() * self.blocks_per_slab);
                let addresses: Vec<u8> = blocks.flat_map(|block| self.address(block).to_le_bytes()).collect();
                self.in_order.grow(device, addresses.len(), &[])?;
                if let Some(memory) = self.in_order.memory() {
                    device.upload(memory, 0, &addresses)?;
                }
            }
        }
        Ok(())
    }

    /// Where the addresses of the blocks of a step lie.
    pub fn tables(&self, step: &StepState<D>) -> u64 {
        if self.shape.consecutive { self.in_order.address() } else { step.tables() }
    }

    /// Bytes of a block over all layers.
    fn block_bytes(&self) -> usize {
        self.shape.layers * self.layer_bytes()
    }

    /// Bytes of K and V of a block in one layer.
    pub fn layer_bytes(&self) -> usize {
        self.shape.block_size * self.shape.position_bytes()
    }

    /// Whether an element is one byte, which no product writes itself.
    pub fn has_narrow_elements(&self) -> bool {
        self.shape.element_bytes() == 1
    }

    /// log2 of the positions in a block.
    pub fn block_shift(&self) -> u32 {
        self.shape.block_size.trailing_zeros()
    }

    /// Where a block lies on the device.
    pub fn address(&self, block: u32) -> u64 {
        let (slab, offset) = self.place(block, 0);
        D::address(slab) + offset as u64
    }

    /// The memory and the offset of a layer of a block.
    pub fn place(&self, block: u32, layer: usize) -> (&D::Memory, usize) {
        let block = block as usize;
        let offset = block % self.blocks_per_slab * self.block_bytes() + layer * self.layer_bytes();
        (&self.slabs[block / self.blocks_per_slab], offset)
    }
}

/// Memory that grows and forgets what it held.
#[derive(Debug)]
pub struct Scratch<D: Device> {
    memory: Option<D::Memory>,
}

impl<D: Device> Default for Scratch<D> {
    fn default() -> Self {
        Self { memory: None }
    }
}

impl<D: Device> Scratch<D> {
    /// Whether it had to grow, and so has moved, to have so many bytes, filled by `fill` where it is new.
    pub fn grow(&mut self, device: &mut D, bytes: usize, fill: &[u8]) -> Result<bool, EngineError> {
        if self.memory.as_ref().is_some_and(|memory| D::bytes(memory) >= bytes) {
            return Ok(false);
        }
        let bytes = bytes.next_power_of_two().max(256);
        self.memory = None;
        let memory = device.allocate(bytes)?;
        if !fill.is_empty() {
            device.upload(&memory, 0, &fill.repeat(bytes / fill.len()))?;
        }
        self.memory = Some(memory);
        Ok(true)
    }

    /// Where it lies; 0 before it ever grew.
    pub fn address(&self) -> u64 {
        self.memory.as_ref().map_or(0, D::address)
    }

    /// The memory itself.
    pub fn memory(&self) -> Option<&D::Memory> {
        self.memory.as_ref()
    }
}

/// A step on the device.
#[derive(Debug)]
pub struct StepState<D: Device> {
    /// Rows there is room for.
    capacity: usize,
    /// Tokens, positions, first blocks, last rows of sequences, and rows of outputs: `capacity` words of each; then the number of rows without
    /// padding.
    words: Scratch<D>,
    words_there: Vec<u32>,
    words_next: Vec<u32>,
    addresses: Scratch<D>,
    addresses_there: Vec<u64>,
    addresses_next: Vec<u64>,
    /// Cosines and sines of each table.
    angles: Vec<(D::Memory, D::Memory)>,
    angle_positions: usize,
    bytes: Vec<u8>,
    /// Copies to the device so far.
    pub uploads: usize,
}

impl<D: Device> Default for StepState<D> {
    fn default() -> Self {
        Self {
            capacity: 0,
            words: Scratch::default(),
            words_there: Vec::new(),
            words_next: Vec::new(),
            addresses: Scratch::default(),
            addresses_there: Vec::new(),
            addresses_next: Vec::new(),
            angles: Vec::new(),
            angle_positions: 0,
            bytes: Vec::new(),
            uploads: 0,
        }
    }
}

impl<D: Device> StepState<D> {
    /// Takes a step to the device. Says whether something has moved there, so that what was recorded before is void.
    pub fn set(
        &mut self,
        device: &mut D,
        rows: &Rows,
        ropes: &RopeTables,
        pool: &Pool<D>,
    ) -> Result<bool, EngineError> {
        let mut moved = false;
        if rows.len() > self.capacity {
            self.capacity = rows.len().next_power_of_two();
        }
        self.words_next.clear();
        self.words_next.resize(5 * self.capacity + 1, 0);
        let (tokens, rest) = self.words_next.split_at_mut(self.capacity);
        let (positions, rest) = rest.split_at_mut(self.capacity);
        let (starts, rest) = rest.split_at_mut(self.capacity);
        let (last_rows, rest) = rest.split_at_mut(self.capacity);
        let (output_rows, real_rows) = rest.split_at_mut(self.capacity);
        // A sequence of padding is one row.
        real_rows.fill(word(rows.len() - rows.padding));
        tokens[..rows.len()].copy_from_slice(&rows.tokens);
        positions[..rows.len()].copy_from_slice(&rows.positions);
        for (start, owner) in starts.iter_mut().zip(&rows.owners) {
            *start = word(rows.sequences[*owner as usize].blocks.start);
        }
        // Behind the last sequence are some without rows.
        last_rows.fill(word(rows.len().saturating_sub(1)));
        for (last, sequence) in last_rows.iter_mut().zip(&rows.sequences) {
            *last = word(sequence.rows.end - 1);
        }
        output_rows[..rows.outputs.len()].copy_from_slice(&rows.outputs);
        self.addresses_next.clear();
        self.addresses_next.extend(rows.tables.iter().map(|block| pool.address(*block)));

        if self.words.grow(device, 4 * self.words_next.len(), &[])? {
            (moved, self.words_there) = (true, Vec::new());
        }
        if self.addresses.grow(device, 8 * self.addresses_next.len(), &[])? {
            (moved, self.addresses_there) = (true, Vec::new());
        }
        if self.words_there != self.words_next {
            self.bytes.clear();
            self.bytes.extend(self.words_next.iter().flat_map(|word| word.to_le_bytes()));
            if let Some(memory) = self.words.memory() {
                device.upload(memory, 0, &self.bytes)?;
            }
            std::mem::swap(&mut self.words_there, &mut self.words_next);
            self.uploads += 1;
        }
        if self.addresses_there != self.addresses_next {
            self.bytes.clear();
            self.bytes.extend(self.addresses_next.iter().flat_map(|address| address.to_le_bytes()));
            if let Some(memory) = self.addresses.memory() {
                device.upload(memory, 0, &self.bytes)?;
            }
            std::mem::swap(&mut self.addresses_there, &mut self.addresses_next);
            self.uploads += 1;
        }
        if ropes.positions() > self.angle_positions {
            self.angles.clear();
            self.angle_positions = 0;
            for table in ropes.tables() {
                let (cosines, sines) = table.all();
                self.angles.push((floats(device, cosines)?, floats(device, sines)?));
            }
            self.angle_positions = ropes.positions();
            moved = true;
        }
        Ok(moved)
    }

    fn word_address(&self, array: usize) -> u64 {
        self.words.address() + (4 * array * self.capacity) as u64
    }

    /// `[rows]`.
    pub fn tokens(&self) -> u64 {
        self.word_address(0)
    }

    /// `[rows]`.
    pub fn positions(&self) -> u64 {
        self.word_address(1)
    }

    /// `[rows]`: where the table of a row's sequence begins.
    pub fn starts(&self) -> u64 {
        self.word_address(2)
    }

    /// `[sequences]`: the last row of each.
    pub fn last_rows(&self) -> u64 {
        self.word_address(3)
    }

    /// `[outputs]`: the row of each.
    pub fn output_rows(&self) -> u64 {
        self.word_address(4)
    }

    /// A word: rows without padding, which are the first.
    pub fn real_rows(&self) -> u64 {
        self.word_address(5)
    }

    /// Addresses of blocks.
    pub fn tables(&self) -> u64 {
        self.addresses.address()
    }

    /// Cosines and sines of a table, `[positions, head_dim / 2]` each; 0 where nothing turns.
    pub fn angles(&self, table: Option<usize>) -> (u64, u64) {
        let table = table.and_then(|table| self.angles.get(table));
        table.map_or((0, 0), |(cosines, sines)| (D::address(cosines), D::address(sines)))
    }
}

/// Rows and tables are far below 2^32: memory ends first.
fn word(value: usize) -> u32 {
    u32::try_from(value).expect("an index of rows or blocks fits 32 bits")
}
