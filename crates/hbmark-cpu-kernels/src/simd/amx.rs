//! AMX: tile registers (`tmm0` to `tmm7`) of sixteen rows of 64 bytes, and products of the matrices in them.
//!
//! Enters: rows of activations, and lines of a panel of weights, which lie in memory as the instructions take them: a line has a pair of bf16 of
//! sixteen rows of weights. Leaves: sixteen sums of each row. Products of bytes are not made with it: of each group of 32 columns the sums would go
//! through memory to be scaled, which gains little over the dot products of AVX-512. The instructions are assembled here, since their intrinsics
//! are unstable in Rust; nothing else in the program touches these registers.
#![expect(unsafe_code, reason = "instructions that load and store through pointers")]

use std::arch::asm;
use std::cell::Cell;
use std::mem::MaybeUninit;
use std::sync::OnceLock;

use super::LANES;
use crate::rows::InputRow;
use crate::tiles::{LINE, MAX_ROWS, Sums};

/// Rows of a register. A product takes two registers of them, beside two of weights and four of sums.
const ROWS: usize = 16;

const _: () = assert!(MAX_ROWS == 2 * ROWS);

/// Columns of pairs that fill a line.
const PAIR_COLUMNS: usize = LINE / size_of::<u16>();

/// Whether the processor has products of bf16, and the system lets this process use the registers, which it is asked for once.
pub fn is_available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| {
        use std::arch::x86_64::{__cpuid, __cpuid_count};
        // Tiles and products of bf16: bits of EDX of leaf 7.
        const FEATURES: u32 = 1 << 24 | 1 << 22;
        if __cpuid(0).eax < 7 || __cpuid_count(7, 0).edx & FEATURES != FEATURES {
            return false;
        }
        may_use_registers()
    })
}

/// Asks Linux for the registers on behalf of all threads: their contents make what it saves of a thread larger.
#[cfg(target_os = "linux")]
fn may_use_registers() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_int = 0x1023;
    const TILE_DATA: libc::c_ulong = 18;
    // SAFETY: the call takes two numbers and touches no memory of ours.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn may_use_registers() -> bool {
    false
}

/// The tile configuration, as `ldtilecfg` reads it.
#[repr(C, align(64))]
struct TileConfig {
    palette: u8,
    first_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// Rows of two registers of activations, and words of each row that a step takes.
type Step = ([usize; 2], usize);

thread_local! {
    /// The step that this thread has configured the registers for: that takes as long as several steps.
    static CONFIGURED: Cell<Option<Step>> = const { Cell::new(None) };
}

/// Configures the registers for steps of so many words: four of sums, of which two are for either register of rows, two of rows and two of weights.
///
/// # Safety
/// AMX is available.
#[expect(clippy::cast_possible_truncation, reason = "no more than 16 rows of 16 words")]
unsafe fn configure(rows: [usize; 2], words: usize) {
    if CONFIGURED.get() == Some((rows, words)) {
        return;
    }
    assert!(
        rows.iter().all(|rows| *rows <= ROWS) && (1..=ROWS).contains(&words),
        "as many as registers have"
    );
    let mut config =
        TileConfig { palette: 1, first_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
    let ([first, second], line, of_row) = (rows.map(|rows| rows as u8), LINE as u16, 4 * words as u16);
    let registers =
        [(first, line), (first, line), (second, line), (second, line), (first, of_row), (second, of_row)];
    let of_weights = [(words as u8, line); 2];
    for (index, (rows, bytes)) in registers.into_iter().chain(of_weights).enumerate() {
        // What has no rows may have no bytes, either.
        (config.rows[index], config.row_bytes[index]) = (rows, if rows > 0 { bytes } else { 0 });
    }
    // SAFETY: AMX is available, and the configuration is one that it has.
    unsafe {
        asm!(
            "ldtilecfg [{}]",
            in(reg) &raw const config,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack, readonly, preserves_flags),
        );
    }
    CONFIGURED.set(Some((rows, words)));
}

/// Gives the registers of this thread back, where it has configured them, so that the system need not save them.
pub fn release() {
    if CONFIGURED.take().is_some() {
        // SAFETY: they were configured, so AMX is available.
        unsafe {
            asm!(
                "tilerelease",
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nomem, nostack, preserves_flags),
            );
        }
    }
}

/// The bytes from each row of activations to the next, where it is the same for all.
fn stride(rows: &[InputRow]) -> Option<usize> {
    let address = |row: &InputRow| row.words.addr();
    let stride = rows.get(1).map_or(0, |second| address(second).wrapping_sub(address(&rows[0])));
    rows.windows(2).all(|pair| address(&pair[1]).wrapping_sub(address(&pair[0])) == stride).then_some(stride)
}

/// Columns that are done for all panels before the next ones, so that those of the rows stay in L1.
const COLUMNS_TOGETHER: usize = 256;

/// One, two or four panels of pairs of bf16 × up to 32 rows over all columns, an even number of them.
///
/// # Safety
/// AMX is available; panels and rows have as many columns, and `out` room for the sums of an even number of panels of each row from `slot` on.
///
/// # Panics
/// When there are no columns, no rows, or more rows.
pub unsafe fn multiply_pairs(
    columns: usize,
    panels: &[*const u8],
    rows: &[InputRow],
    out: *mut Sums,
    slot: usize,
) {
    const WORDS: usize = COLUMNS_TOGETHER / 2;
    assert!(columns > 0 && (1..=MAX_ROWS).contains(&rows.len()), "as many rows as registers have");
    let stride = stride(rows);
    let at_once = stride.is_some() && (panels.len() <= 2 || rows.len() <= ROWS);
    let together = if at_once { columns } else { COLUMNS_TOGETHER };
    let mut copies = [const { MaybeUninit::<[u32; WORDS]>::uninit() }; MAX_ROWS];
    for first in (0..columns).step_by(together) {
        let count = together.min(columns - first);
        let (words, stride) = if let Some(stride) = stride {
            (rows[0].words.wrapping_add(first / 2), stride)
        } else {
            for (copy, row) in copies.iter_mut().zip(rows) {
                let to: *mut u32 = copy.as_mut_ptr().cast();
                // SAFETY: a row has a word for two columns.
                unsafe { to.copy_from_nonoverlapping(row.words.wrapping_add(first / 2), count / 2) };
            }
            (copies.as_ptr().cast(), 4 * WORDS)
        };
        for (index, pair) in panels.chunks(2).enumerate() {
            let pair = [pair[0], pair[pair.len() - 1]].map(|panel| panel.wrapping_add(first * 2 * LANES));
            let out = out.cast::<f32>().wrapping_add((slot + 2 * index) * LANES);
            // SAFETY: the caller's promise: the sums of the row have so many slots, and the panels and rows so many columns.
            unsafe {
                PairProduct { rows: rows.len(), out }.run(words.cast(), stride, pair, count, first == 0);
            };
        }
    }
}

/// A product of two panels of pairs.
#[derive(Clone, Copy)]
struct PairProduct {
    rows: usize,
    out: *mut f32,
}

impl PairProduct {
    /// Over some columns: whole lines of the rows, then what is left.
    unsafe fn run(self, rows: *const u8, stride: usize, panels: [*const u8; 2], columns: usize, fresh: bool) {
        let (steps, left) = (columns / PAIR_COLUMNS, columns % PAIR_COLUMNS);
        // SAFETY: the caller's promise.
        unsafe {
            if steps > 0 {
                self.steps(rows, stride, panels, steps, PAIR_COLUMNS, fresh);
            }
            if left > 0 {
                let panels = panels.map(|panel| panel.wrapping_add(steps * ROWS * LINE));
                self.steps(rows.wrapping_add(steps * LINE), stride, panels, 1, left, fresh && steps == 0);
            }
        }
    }

    /// Steps of so many columns each; `fresh` sums begin with zero.
    unsafe fn steps(
        self,
        rows: *const u8,
        stride: usize,
        panels: [*const u8; 2],
        steps: usize,
        columns: usize,
        fresh: bool,
    ) {
        // SAFETY: AMX is available.
        unsafe { configure([self.rows.min(ROWS), self.rows.saturating_sub(ROWS)], columns / 2) };
        // SAFETY: AMX is available; what the registers load and store lies within the panels, the rows and the room for sums by the caller's
        // promise.
        unsafe {
            if self.rows <= ROWS {
                asm!(
                    "test {fresh:e}, {fresh:e}",
                    "jz 2f",
                    "tilezero tmm0",
                    "tilezero tmm1",
                    "jmp 3f",
                    "2:",
                    "tileloadd tmm0, [{out} + {apart}]",
                    "tileloadd tmm1, [{out} + {apart} + 64]",
                    "3:",
                    "tileloadd tmm4, [{rows} + {stride}]",
                    "tileloadd tmm6, [{left} + {line}]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tileloadd tmm7, [{right} + {line}]",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "add {rows}, 64",
                    "add {left}, 1024",
                    "add {right}, 1024",
                    "dec {steps}",
                    "jnz 3b",
                    "tilestored [{out} + {apart}], tmm0",
                    "tilestored [{out} + {apart} + 64], tmm1",
                    fresh = in(reg) u32::from(fresh),
                    out = in(reg) self.out,
                    apart = in(reg) size_of::<Sums>(),
                    rows = inout(reg) rows => _,
                    stride = in(reg) stride,
                    left = inout(reg) panels[0] => _,
                    right = inout(reg) panels[1] => _,
                    line = in(reg) LINE,
                    steps = inout(reg) steps => _,
                    out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
                return;
            }
            asm!(
                "test {fresh:e}, {fresh:e}",
                "jz 2f",
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "jmp 3f",
                "2:",
                "tileloadd tmm0, [{out} + {apart}]",
                "tileloadd tmm1, [{out} + {apart} + 64]",
                "tileloadd tmm2, [{out} + {apart} + {below}]",
                "tileloadd tmm3, [{out} + {apart} + {below} + 64]",
                "3:",
                "tileloadd tmm4, [{rows} + {stride}]",
                "tileloadd tmm6, [{left} + {line}]",
                "tileloadd tmm5, [{lower} + {stride}]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tileloadd tmm7, [{right} + {line}]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {rows}, 64",
                "add {lower}, 64",
                "add {left}, 1024",
                "add {right}, 1024",
                "dec {steps}",
                "jnz 3b",
                "tilestored [{out} + {apart}], tmm0",
                "tilestored [{out} + {apart} + 64], tmm1",
                "tilestored [{out} + {apart} + {below}], tmm2",
                "tilestored [{out} + {apart} + {below} + 64], tmm3",
                below = const ROWS * size_of::<Sums>(),
                fresh = in(reg) u32::from(fresh),
                out = in(reg) self.out,
                apart = in(reg) size_of::<Sums>(),
                rows = inout(reg) rows => _,
                lower = inout(reg) rows.wrapping_add(ROWS.wrapping_mul(stride)) => _,
                stride = in(reg) stride,
                left = inout(reg) panels[0] => _,
                right = inout(reg) panels[1] => _,
                line = in(reg) LINE,
                steps = inout(reg) steps => _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use half::bf16;

    use super::*;
    use crate::rows::bf16_bits;
    use crate::tiles::SLOTS;

    /// A number that goes with a column and a row, of magnitudes so different that sums depend on their order.
    fn value(column: usize, row: usize) -> f32 {
        let magnitude = ((column * 7 + row) % 13) as f32 - 6.0;
        bf16::from_f32((((column * 37 + row * 101) % 127) as f32 / 32.0 - 2.0) * magnitude.exp2()).to_f32()
    }

    /// Rows of activations behind this one, in [`value`]; those before are of weights.
    const ACTIVATIONS: usize = 100;

    /// The sums of so many panels × rows of activations, which lie `apart` words from each other, or anywhere.
    fn sums(columns: usize, panels: usize, rows: Range<usize>, apart: Option<usize>) -> Vec<Vec<f32>> {
        let pair = |column: usize, row: usize| {
            bf16_bits(value(column, row)) | bf16_bits(value(column + 1, row)) << 16
        };
        let pairs = || (0..columns).step_by(2);
        let packed: Vec<Vec<u32>> = (0..panels)
            .map(|panel| {
                let line = |column| (0..LANES).map(move |lane| pair(column, panel * LANES + lane));
                pairs().flat_map(line).collect()
            })
            .collect();
        let stride = apart.unwrap_or(columns / 2 + 3);
        // Every place but the first and the last of 61 is another row's.
        let place = |row: usize| if apart.is_some() { row } else { row * 7 % 61 } * stride;
        let mut words = vec![0; 61 * stride];
        for row in rows.clone() {
            for column in pairs() {
                words[place(row) + column / 2] = pair(column, ACTIVATIONS + row);
            }
        }
        let none = std::ptr::null();
        let of_row = |row| InputRow { words: words[place(row)..].as_ptr(), scales: none, sums: none.cast() };
        let (inputs, count): (Vec<_>, _) = (rows.clone().map(of_row).collect(), rows.len());
        let mut out: [Sums; MAX_ROWS] = [[[f32::NAN; LANES]; SLOTS]; MAX_ROWS];
        let panels: Vec<*const u8> = packed.iter().map(|panel| panel.as_ptr().cast()).collect();
        // SAFETY: AMX is available; panels and rows have the columns, and all rows have room.
        unsafe { multiply_pairs(columns, &panels, &inputs, out.as_mut_ptr(), 3) };
        release();
        let written = 3..3 + panels.len().next_multiple_of(2);
        for (index, sums) in out.iter().flatten().enumerate() {
            let here = index / SLOTS < count && written.contains(&(index % SLOTS));
            assert!(here || sums.iter().all(|sum| sum.is_nan()), "{index}");
        }
        out[..count].iter().map(|sums| sums[3..3 + panels.len()].as_flattened().to_vec()).collect()
    }

    #[test]
    fn sums_are_those_of_each_row_alone_wherever_rows_lie() {
        if !is_available() {
            return;
        }
        for columns in [2, 30, 32, 34, 576, 1_030] {
            for panels in [1, 2, 4] {
                let alone: Vec<_> =
                    (0..MAX_ROWS).map(|row| sums(columns, panels, row..row + 1, None).remove(0)).collect();
                for (row, sums) in alone.iter().enumerate() {
                    for (index, sum) in sums.iter().enumerate() {
                        let products = (0..columns).map(|column| {
                            f64::from(value(column, index)) * f64::from(value(column, ACTIVATIONS + row))
                        });
                        let (exact, all) =
                            products.fold((0.0, 0.0), |(sum, all), x| (sum + x, all + x.abs()));
                        assert!((f64::from(*sum) - exact).abs() <= 1e-6 * all, "{columns} {row} {index}");
                    }
                }
                for rows in [1, 7, 15, 16, 17, 31, 32] {
                    for apart in [None, Some(columns / 2 + 16)] {
                        let together = sums(columns, panels, 0..rows, apart);
                        assert_eq!(together, alone[..rows], "{columns} {panels} {rows} {apart:?}");
                    }
                }
            }
        }
    }
}
