//! ggml's blocks of 256 columns, whose scales have a scale of their own: what `Q4_K_M` and its kind are made of.
//!
//! Enters: the bytes of a block as a file has them, or 256 floats. Leaves: the other. Columns come in the order of the matrix,
//! whatever the order of the block.
//!
//! *Source* of the layouts: `block_q4_K`, `block_q5_K` and `block_q6_K` of ggml-common.h. The rounding is this program's: the smallest scale
//! that reaches every value of a group, and each value to the nearest step; llama.cpp searches for scales with a smaller
//! error, so files made by it are closer to their model, and as large.

use half::f16;

use super::pack::{inverse, stored_scale, to_code};

/// Columns of a block.
pub const SUPER_BLOCK: usize = 256;

/// Columns that share a 6-bit scale and minimum in `q4_k` and `q5_k`.
const GROUP: usize = 32;
/// Columns that share an 8-bit scale in `q6_k`.
const SIGNED_GROUP: usize = 16;
/// The largest 6-bit scale.
const MOST: f32 = 63.0;
/// The code of 0 in `q6_k`.
const ZERO: f32 = 32.0;

/// A format of blocks of 256 columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SuperBlock {
    /// `value = d · scale · code − d_min · min`: codes of 4 bits, a scale and a minimum of 6 bits per 32 columns.
    Q4K,
    /// As `Q4K` with codes of 5 bits.
    Q5K,
    /// `value = d · scale · (code − 32)`: codes of 6 bits, a signed scale of 8 bits per 16 columns.
    Q6K,
}

impl SuperBlock {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Q4K, Self::Q5K, Self::Q6K];

    /// The name in inventories.
    pub fn name(self) -> &'static str {
        match self {
            Self::Q4K => "q4_k",
            Self::Q5K => "q5_k",
            Self::Q6K => "q6_k",
        }
    }

    /// Bytes of a block.
    pub fn bytes(self) -> usize {
        match self {
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
        }
    }

    /// Where the low four bits, the bits above them and the scales are.
    fn parts(self) -> Parts {
        match self {
            Self::Q4K => Parts { low: 16, high: 16, scales: 4 },
            Self::Q5K => Parts { low: 48, high: 16, scales: 4 },
            Self::Q6K => Parts { low: 0, high: 128, scales: 192 },
        }
    }

    /// Where the bits of a column are: byte and shift of the low four, byte and shift of those above.
    fn place(self, column: usize) -> [(usize, usize); 2] {
        let Parts { low, high, .. } = self.parts();
        let within = column % GROUP;
        if self == Self::Q6K {
            // Each half of a block is 64 bytes of low bits: quarters 0 and 1 in the low halves, 2 and 3 in the high ones.
            let (half, quarter) = (column / 128, column / GROUP % 4);
            [
                (low + 64 * half + GROUP * (quarter % 2) + within, 4 * (quarter / 2)),
                (high + GROUP * half + within, 2 * quarter),
            ]
        } else {
            // 32 bytes are two groups, one in the low halves and one in the high; a group has one bit of each of 32 bytes.
            let group = column / GROUP;
            [(low + group / 2 * GROUP + within, 4 * (group % 2)), (high + within, group)]
        }
    }

    /// Bits above the low four.
    pub fn high_bits(self) -> usize {
        match self {
            Self::Q4K => 0,
            Self::Q5K => 1,
            Self::Q6K => 2,
        }
    }

    /// The whole number of each column.
    ///
    /// # Panics
    /// When `block` is not one block.
    pub fn codes(self, block: &[u8]) -> [u8; SUPER_BLOCK] {
        let mask = (1u8 << self.high_bits()) - 1;
        std::array::from_fn(|column| {
            let [low, high] = self.place(column);
            let above = if mask == 0 { 0 } else { block[high.0] >> high.1 & mask };
            (block[low.0] >> low.1 & 15) | above << 4
        })
    }

    /// The scale of the scales, and that of the minima or zero.
    ///
    /// # Panics
    /// When `block` is not one block.
    pub fn block_scales(self, block: &[u8]) -> [f16; 2] {
        let word = |at: usize| f16::from_le_bytes([block[at], block[at + 1]]);
        if self == Self::Q6K { [word(208), f16::ZERO] } else { [word(0), word(2)] }
    }

    /// The bytes of the scales: twelve of scales and minima in 6 bits each ([`scale_and_min`]), or sixteen signed ones.
    ///
    /// # Panics
    /// When `block` is not one block.
    pub fn scale_bytes(self, block: &[u8]) -> &[u8] {
        let Parts { scales, .. } = self.parts();
        let count = if self == Self::Q6K { SUPER_BLOCK / SIGNED_GROUP } else { 12 };
        &block[scales..scales + count]
    }

    /// Writes the values of one block, rounded as ggml rounds them.
    pub(super) fn values(self, block: &[u8], out: &mut [f32]) {
        let codes = self.codes(block);
        let [d, d_min] = self.block_scales(block).map(f16::to_f32);
        let scales = self.scale_bytes(block);
        for (column, (out, code)) in out.iter_mut().zip(codes).enumerate() {
            *out = if self == Self::Q6K {
                let scale = d * f32::from(scales[column / SIGNED_GROUP].cast_signed());
                scale * (f32::from(code) - ZERO)
            } else {
                let (scale, min) = scale_and_min(scales, column / GROUP);
                d * f32::from(scale) * f32::from(code) - d_min * f32::from(min)
            };
        }
    }

    /// Packs 256 values into a block of zeros.
    pub(super) fn pack(self, values: &[f32], block: &mut [u8]) {
        let codes =
            if self == Self::Q6K { pack_signed(values, block) } else { self.pack_ranges(values, block) };
        for (column, code) in codes.into_iter().enumerate() {
            let [low, high] = self.place(column);
            block[low.0] |= (code & 15) << low.1;
            if self.high_bits() > 0 {
                block[high.0] |= code >> 4 << high.1;
            }
        }
    }

    /// Scales and minima of `q4_k` and `q5_k`; the codes are returned.
    fn pack_ranges(self, values: &[f32], block: &mut [u8]) -> [u8; SUPER_BLOCK] {
        let most = if self == Self::Q4K { 15.0 } else { 31.0 };
        let groups = || values.chunks(GROUP);
        // A range that holds 0: minima are never below it.
        let lowest = |group: &[f32]| group.iter().fold(0.0_f32, |low, &value| low.min(value));
        let d_min = stored_scale(groups().map(|group| -lowest(group)).fold(0.0, f32::max) / MOST);
        let to_min = inverse(d_min.to_f32());
        let mins: [u8; 8] = std::array::from_fn(|group| {
            to_code((-lowest(&values[group * GROUP..(group + 1) * GROUP]) * to_min).ceil(), MOST)
        });
        let min = |group: usize| d_min.to_f32() * f32::from(mins[group]);
        let range = |group: usize| {
            let highest = values[group * GROUP..(group + 1) * GROUP].iter().fold(0.0_f32, |h, &v| h.max(v));
            highest / most + min(group) / most
        };
        let d = stored_scale((0..8).map(range).fold(0.0, f32::max) / MOST);
        let to_scale = inverse(d.to_f32());
        let scales: [u8; 8] = std::array::from_fn(|group| to_code((range(group) * to_scale).ceil(), MOST));
        block[..2].copy_from_slice(&d.to_le_bytes());
        block[2..4].copy_from_slice(&d_min.to_le_bytes());
        block[4..16].copy_from_slice(&scales_and_mins(scales, mins));
        std::array::from_fn(|column| {
            let group = column / GROUP;
            let inverse = inverse(d.to_f32() * f32::from(scales[group]));
            to_code((values[column] + min(group)) * inverse + 0.5, most)
        })
    }
}

/// Offsets in a block.
struct Parts {
    low: usize,
    high: usize,
    scales: usize,
}

/// Scales of `q6_k`; the codes are returned.
fn pack_signed(values: &[f32], block: &mut [u8]) -> [u8; SUPER_BLOCK] {
    // The value of the largest magnitude becomes −32, the one code without an opposite.
    let scales: [f32; SUPER_BLOCK / SIGNED_GROUP] = std::array::from_fn(|group| {
        let group = &values[group * SIGNED_GROUP..(group + 1) * SIGNED_GROUP];
        group.iter().fold(0.0_f32, |e, &value| if value.abs() > e.abs() { value } else { e }) / -ZERO
    });
    let d = stored_scale(scales.iter().fold(0.0, |most, scale| scale.abs().max(most)) / 127.0);
    let to_scale = inverse(d.to_f32());
    let bytes = scales.map(|scale| {
        let magnitude = to_code((scale.abs() * to_scale).ceil(), 127.0).cast_signed();
        if scale < 0.0 { -magnitude } else { magnitude }
    });
    block[192..208].copy_from_slice(&bytes.map(i8::cast_unsigned));
    block[208..210].copy_from_slice(&d.to_le_bytes());
    std::array::from_fn(|column| {
        let inverse = inverse(d.to_f32() * f32::from(bytes[column / SIGNED_GROUP]));
        to_code(values[column] * inverse + ZERO + 0.5, 2.0 * ZERO - 1.0)
    })
}

/// The 6-bit scale and minimum of a group.
///
/// *Source*: bytes 0 to 3 hold the scales of groups 0 to 3, bytes 4 to 7 their minima, six bits each; bytes 8 to 11 the low halves of the scales
/// and minima of groups 4 to 7, whose top two bits are the top two bits of bytes 0 to 7.
///
/// # Panics
/// When there are fewer than twelve bytes, or no such group.
pub fn scale_and_min(bytes: &[u8], group: usize) -> (u8, u8) {
    let (first, second) = (bytes[group % 4], bytes[group % 4 + 4]);
    if group < 4 {
        return (first & 63, second & 63);
    }
    let low = bytes[group + 4];
    ((low & 15) | first >> 6 << 4, low >> 4 | second >> 6 << 4)
}

/// The opposite of [`scale_and_min`].
fn scales_and_mins(scales: [u8; 8], mins: [u8; 8]) -> [u8; 12] {
    std::array::from_fn(|byte| match byte {
        0..4 => scales[byte] | scales[byte + 4] >> 4 << 6,
        4..8 => mins[byte - 4] | mins[byte] >> 4 << 6,
        _ => (scales[byte - 4] & 15) | (mins[byte - 4] & 15) << 4,
    })
}
