//! candle's kernels on the host, against the same computed plainly.

use std::ffi::c_void;

use half::{bf16, f16};
use simulated_cuda::kernels::{self, Launch};

/// A value that a kernel takes.
#[derive(Debug, Clone, Copy)]
enum Argument {
    Address(*mut c_void),
    Size(usize),
    Signed(i32),
    Unsigned(u32),
    Float(f32),
    Half(f16),
}
use Argument::{Address, Float, Half, Signed, Size, Unsigned};

fn of<T>(values: &[T]) -> Argument {
    Address(values.as_ptr().cast_mut().cast())
}
fn to<T>(values: &mut [T]) -> Argument {
    Address(values.as_mut_ptr().cast())
}

const NULL: Argument = Address(std::ptr::null_mut());

/// Launches with several seeds; kinds are checked against the kernel's.
fn launch(name: &str, grid: [u32; 3], block: [u32; 3], shared_bytes: usize, arguments: &[Argument]) {
    for seed in 0..3 {
        launch_with(name, grid, block, shared_bytes, seed, arguments).unwrap();
    }
}

fn launch_with(
    name: &str,
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: usize,
    seed: u64,
    arguments: &[Argument],
) -> Result<(), String> {
    let symbol = kernels::name(name);
    let parameters = kernels::parameters(&symbol).ok_or_else(|| format!("no kernel {name}"))?;
    let mut values = arguments.to_vec();
    let given: Vec<(u8, usize)> = values
        .iter()
        .map(|value| match value {
            Address(_) => (b'p', 8),
            Size(_) => (b'u', 8),
            Signed(_) | Unsigned(_) => (b'u', 4),
            Float(_) => (b'f', 4),
            Half(_) => (b's', 2),
        })
        .collect();
    let taken: Vec<(u8, usize)> = parameters.iter().map(|p| (p.kind, p.bytes)).collect();
    assert_eq!(given, taken, "{name}");
    let addresses: Vec<*mut c_void> = values
        .iter_mut()
        .map(|value| match value {
            Address(value) => (&raw mut *value).cast(),
            Size(value) => (&raw mut *value).cast(),
            Signed(value) => (&raw mut *value).cast(),
            Unsigned(value) => (&raw mut *value).cast(),
            Float(value) => (&raw mut *value).cast(),
            Half(value) => (&raw mut *value).cast(),
        })
        .collect();
    let launch = Launch { grid, block, shared_bytes, resident_blocks: 1 + (seed % 3) as u32, seed };
    // SAFETY: number and sizes of the arguments are those of the kernel; what they point to is the test's.
    unsafe { kernels::launch(&symbol, &launch, &addresses) }
}

/// As candle launches over so many elements.
fn launch_over(name: &str, elements: usize, arguments: &[Argument]) {
    launch(name, [elements.div_ceil(1024) as u32, 1, 1], [1024, 1, 1], 0, arguments);
}

/// Numbers between -1 and 1, the same in every run.
fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

fn brains(values: &[f32]) -> Vec<bf16> {
    values.iter().map(|v| bf16::from_f32(*v)).collect()
}

#[track_caller]
fn assert_close(found: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(found.len(), expected.len());
    for (i, (a, b)) in found.iter().zip(expected).enumerate() {
        assert!((a - b).abs() <= tolerance * (1.0 + b.abs()), "{i}: {a} instead of {b}");
    }
}

#[test]
fn every_module_is_there() {
    let names = kernels::names();
    let expected = [
        "affine_f32",
        "badd_bf16",
        "cast_f32_bf16",
        "im2col_f32",
        "fill_f16",
        "is_u32_bf16",
        "get_rows_q4_0",
        "softmax_f16",
        "asort_asc_f32",
        "where_u8_f16",
        "usilu_bf16",
        "mmvq_gguf_q4_k_bf16_plain_cuda8",
        "mmvq_gguf_quantize_q8_1_f16",
        "quantize_mmq_q8_1<(mmq_q8_1_ds_layout)2>",
        "mul_mat_q<(ggml_type)14, 128, true>",
    ];
    for name in expected {
        assert!(names.iter().any(|n| n == name), "{name} is missing");
    }
    assert_eq!(kernels::parameters(c"no_such_kernel"), None);
    let mut sorted = names.clone();
    sorted.sort();
    sorted.dedup();
    assert_eq!(sorted.len(), names.len(), "a name is there twice");
}

#[test]
fn additions_are_contiguous_or_not() {
    let (a, b) = (numbers(1003, 1), numbers(1003, 2));
    let mut sum = vec![0f32; 1003];
    launch_over("badd_f32", 1003, &[Size(1003), Size(1), NULL, of(&a), of(&b), to(&mut sum)]);
    let expected: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
    assert_eq!(sum, expected);
}

#[test]
fn products_follow_strides() {
    // Of 3 by 40, the left transposed and the right one row for all.
    let (a, b) = (brains(&numbers(120, 3)), brains(&numbers(40, 4)));
    let info: [usize; 6] = [3, 40, 1, 3, 0, 1];
    let mut product = vec![bf16::ZERO; 120];
    launch_over("bmul_bf16", 120, &[Size(120), Size(2), of(&info), of(&a), of(&b), to(&mut product)]);
    for (i, found) in product.iter().enumerate() {
        let (row, column) = (i / 40, i % 40);
        assert_eq!(*found, bf16::from_f32(a[column * 3 + row].to_f32() * b[column].to_f32()));
    }
    // Eight at a time where both are contiguous.
    let (a, b) = (brains(&numbers(1000, 5)), brains(&numbers(1000, 6)));
    let mut product = vec![bf16::ZERO; 1000];
    launch_over("bmul_bf16", 1000, &[Size(1000), Size(1), NULL, of(&a), of(&b), to(&mut product)]);
    let expected: Vec<bf16> =
        a.iter().zip(&b).map(|(a, b)| bf16::from_f32(a.to_f32() * b.to_f32())).collect();
    assert_eq!(product, expected);
}

#[test]
fn every_number_of_16_bits_widens() {
    let bits: Vec<u16> = (0..=u16::MAX).collect();
    let mut wide = vec![0f32; 65536];
    let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
    launch_over("cast_f16_f32", 65536, &[Size(65536), Size(1), NULL, of(&bits), to(&mut wide)]);
    for (bits, wide) in bits.iter().zip(&wide) {
        assert!(same(*wide, f16::from_bits(*bits).to_f32()), "{bits:#x}");
    }
    launch_over("cast_bf16_f32", 65536, &[Size(65536), Size(1), NULL, of(&bits), to(&mut wide)]);
    for (bits, wide) in bits.iter().zip(&wide) {
        assert!(same(*wide, bf16::from_bits(*bits).to_f32()), "{bits:#x}");
    }
}

#[test]
fn narrowing_rounds_to_the_nearest_and_ties_to_even() {
    // All sorts of bits, and every f16 with the places halfway to its neighbours.
    let mut inputs: Vec<f32> = (0..200_000u32).map(|i| f32::from_bits(i.wrapping_mul(0x9e37_79b9))).collect();
    for bits in 0..0x7c00u16 {
        let (low, high) = (f16::from_bits(bits).to_f32(), f16::from_bits(bits + 1).to_f32());
        let high = if high.is_finite() { high } else { 65536.0 };
        let middle = f32::midpoint(low, high);
        inputs.extend([middle, -middle, middle.next_up(), middle.next_down()]);
    }
    let count = inputs.len();
    let mut narrow = vec![0u16; count];
    launch_over("cast_f32_f16", count, &[Size(count), Size(1), NULL, of(&inputs), to(&mut narrow)]);
    for (x, bits) in inputs.iter().zip(&narrow) {
        let (found, expected) = (f16::from_bits(*bits), f16::from_f32(*x));
        assert!(
            found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan(),
            "{x:e}: {found:e}, {expected:e}"
        );
    }
    launch_over("cast_f32_bf16", count, &[Size(count), Size(1), NULL, of(&inputs), to(&mut narrow)]);
    for (x, bits) in inputs.iter().zip(&narrow) {
        let (found, expected) = (bf16::from_bits(*bits), bf16::from_f32(*x));
        assert!(
            found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan(),
            "{x:e}: {found:e}, {expected:e}"
        );
    }
    // From f64 once, not by way of an f32.
    let inputs =
        [1.0 + 2f64.powi(-11) + 2f64.powi(-40), 1.0 + 2f64.powi(-11), 1e-300, -1e300, 65520.0 - 1e-9];
    let mut narrow = [0u16; 5];
    launch_over("cast_f64_f16", 5, &[Size(5), Size(1), NULL, of(&inputs), to(&mut narrow)]);
    assert_eq!(narrow, [0x3c01, 0x3c00, 0, 0xfc00, 0x7bff]);
}

#[test]
fn numbers_of_8_bits_go_there_and_back() {
    let bits: Vec<u8> = (0..=u8::MAX).collect();
    let (mut wide, mut back) = (vec![0f32; 256], vec![0u8; 256]);
    launch_over("cast_f8_e4m3_f32", 256, &[Size(256), Size(1), NULL, of(&bits), to(&mut wide)]);
    assert_eq!(
        (wide[0x01], wide[0x08], wide[0x38], wide[0x7e], wide[0xfe]),
        (0.001_953_125, 0.015_625, 1.0, 448.0, -448.0)
    );
    launch_over("cast_f32_f8_e4m3", 256, &[Size(256), Size(1), NULL, of(&wide), to(&mut back)]);
    for (bits, back) in bits.iter().zip(&back) {
        assert!(bits == back || bits & 0x7f == 0x7f && back & 0x7f == 0x7f, "{bits:#x} {back:#x}");
    }
    let between = [1.0625f32, 1.1875, 1000.0, 0.000_976_562_5, 0.002_9];
    launch_over("cast_f32_f8_e4m3", 5, &[Size(5), Size(1), NULL, of(&between), to(&mut back)]);
    assert_eq!(back[..5], [0x38, 0x3a, 0x7e, 0, 1]);
}

#[test]
fn affine_and_activations() {
    let x = numbers(777, 7);
    let halves: Vec<f16> = x.iter().map(|v| f16::from_f32(*v)).collect();
    let mut out = vec![f16::ZERO; 777];
    let arguments = [
        Size(777),
        Size(1),
        NULL,
        of(&halves),
        to(&mut out),
        Half(f16::from_f32(0.5)),
        Half(f16::from_f32(3.0)),
    ];
    launch_over("affine_f16", 777, &arguments);
    for (x, found) in halves.iter().zip(&out) {
        assert_eq!(*found, f16::from_f32(f16::from_f32(x.to_f32() * 0.5).to_f32() + 3.0));
    }
    let mut out = vec![0f32; 777];
    launch_over("usilu_f32", 777, &[Size(777), Size(1), NULL, of(&x), to(&mut out)]);
    let expected: Vec<f32> = x.iter().map(|x| x / (1.0 + (-x).exp())).collect();
    assert_close(&out, &expected, 1e-6);
    let exact: Vec<bf16> = brains(&x);
    let mut out = vec![bf16::ZERO; 777];
    launch_over("usilu_bf16", 777, &[Size(777), Size(1), NULL, of(&exact), to(&mut out)]);
    let expected: Vec<f32> = exact.iter().map(|x| x.to_f32() / (1.0 + (-x.to_f32()).exp())).collect();
    assert_close(&out.iter().map(|v| v.to_f32()).collect::<Vec<_>>(), &expected, 4e-3);
    launch_over("ugelu_erf_bf16", 777, &[Size(777), Size(1), NULL, of(&exact), to(&mut out)]);
}

#[test]
fn copies_and_choices() {
    // A transposed copy.
    let x = brains(&numbers(60, 8));
    let info: [usize; 4] = [6, 10, 1, 6];
    let mut copy = vec![bf16::ZERO; 60];
    launch_over("ucopy_bf16", 60, &[Size(60), Size(2), of(&info), of(&x), to(&mut copy)]);
    for (i, found) in copy.iter().enumerate() {
        assert_eq!(*found, x[i % 10 * 6 + i / 10]);
    }
    let mut part = vec![0f32; 20];
    let from = numbers(50, 9);
    let sizes = [Unsigned(4), Unsigned(3), Unsigned(10), Unsigned(5)];
    launch_over("copy2d_f32", 12, &[of(&from), to(&mut part), sizes[0], sizes[1], sizes[2], sizes[3]]);
    for i in 0..12 {
        assert_eq!(part[i / 3 * 5 + i % 3], from[i / 3 * 10 + i % 3]);
    }
    // One value for all that are not chosen, as a mask does.
    let (mask, yes, no): (Vec<u8>, _, _) =
        ((0..60).map(|i| u8::from(i % 3 == 0)).collect(), numbers(60, 10), [f32::NEG_INFINITY]);
    let info: [usize; 8] = [6, 10, 10, 1, 10, 1, 0, 0];
    let mut out = vec![0f32; 60];
    launch_over(
        "where_u8_f32",
        60,
        &[Size(60), Size(2), of(&info), of(&mask), of(&yes), of(&no), to(&mut out)],
    );
    for i in 0..60 {
        assert_eq!(out[i], if i % 3 == 0 { yes[i] } else { f32::NEG_INFINITY });
    }
    let mut filled = vec![f16::ZERO; 33];
    launch_over("fill_f16", 33, &[to(&mut filled), Half(f16::from_f32(2.5)), Size(33)]);
    assert!(filled.iter().all(|v| v.to_f32() == 2.5));
}

#[test]
fn rows_are_found_by_index() {
    let table = brains(&numbers(50 * 12, 11));
    let ids: [u32; 4] = [7, 49, 0, 7];
    let info: [usize; 4] = [50, 12, 12, 1];
    let mut rows = vec![bf16::ZERO; 48];
    let sizes = [Size(1), Size(50), Size(4), Size(12)];
    let arguments = [
        Size(48),
        Size(2),
        of(&info),
        of(&ids),
        of(&table),
        to(&mut rows),
        sizes[0],
        sizes[1],
        sizes[2],
        sizes[3],
    ];
    launch_over("is_u32_bf16", 48, &arguments);
    for (i, found) in rows.iter().enumerate() {
        assert_eq!(*found, table[ids[i / 12] as usize * 12 + i % 12]);
    }
    let beyond: [u32; 4] = [7, 50, 0, 7];
    let mut wrong = arguments;
    wrong[3] = of(&beyond);
    let error = launch_with("is_u32_bf16", [1, 1, 1], [1024, 1, 1], 0, 1, &wrong).unwrap_err();
    assert!(error.contains("assertion"), "{error}");

    // Along the last dimension, of 3 by 5: two of each row.
    let (x, ids): (_, [u32; 6]) = (numbers(15, 12), [4, 0, 1, 1, 2, 3]);
    let mut found = vec![0f32; 6];
    launch_over(
        "gather_u32_f32",
        6,
        &[Size(6), of(&ids), of(&x), to(&mut found), Size(3), Size(5), Size(2), Size(1)],
    );
    for i in 0..6 {
        assert_eq!(found[i], x[i / 2 * 5 + ids[i] as usize]);
    }
}

#[test]
fn reductions_over_the_last_dimension() {
    let (rows, columns) = (5, 700);
    let x = numbers(rows * columns, 13);
    let info: [usize; 4] = [rows, columns, columns, 1];
    let arguments = |out: Argument| [Size(rows * columns), Size(columns), Size(2), of(&info), of(&x), out];
    let grid = [rows as u32, 1, 1];
    let mut sums = vec![0f32; rows];
    launch("fast_sum_f32", grid, [512, 1, 1], 0, &arguments(to(&mut sums)));
    let expected: Vec<f32> =
        x.chunks(columns).map(|row| row.iter().map(|v| f64::from(*v)).sum::<f64>() as f32).collect();
    assert_close(&sums, &expected, 1e-5);
    let mut best = vec![0u32; rows];
    launch("fast_argmax_f32", grid, [512, 1, 1], 0, &arguments(to(&mut best)));
    let mut largest = vec![0f32; rows];
    launch("fast_max_f32", grid, [512, 1, 1], 0, &arguments(to(&mut largest)));
    for (row, values) in x.chunks(columns).enumerate() {
        assert_eq!(values.iter().copied().fold(f32::MIN, f32::max), largest[row]);
        assert_eq!(values[best[row] as usize], largest[row]);
    }
    let halves: Vec<f16> = x.iter().map(|v| f16::from_f32(*v)).collect();
    let mut sums = vec![f16::ZERO; rows];
    let small = [Size(rows), Size(columns), Size(2), of(&info), of(&halves), to(&mut sums)];
    launch_over("fast_sum_small_f16", rows, &small);
    assert_close(&sums.iter().map(|v| v.to_f32()).collect::<Vec<_>>(), &expected, 2e-2);
    let brains = brains(&x);
    launch(
        "fast_argmax_bf16",
        grid,
        [512, 1, 1],
        0,
        &[Size(rows * columns), Size(columns), Size(2), of(&info), of(&brains), to(&mut best)],
    );
    for (row, values) in brains.chunks(columns).enumerate() {
        assert!(values.iter().all(|v| *v <= values[best[row] as usize]));
    }
}

#[test]
fn softmax_and_norms() {
    for columns in [45, 1500] {
        let rows = 4;
        let x = numbers(rows * columns, 14);
        let mut out = vec![0f32; rows * columns];
        launch(
            "softmax_f32",
            [rows as u32, 1, 1],
            [1, 32, 1],
            0,
            &[of(&x), to(&mut out), Signed(columns as i32)],
        );
        let softmax = |row: &[f32]| {
            let largest = row.iter().copied().fold(f32::MIN, f32::max);
            let powers: Vec<f32> = row.iter().map(|v| (v - largest).exp()).collect();
            let sum: f32 = powers.iter().sum();
            powers.into_iter().map(move |p| p / sum)
        };
        let expected: Vec<f32> = x.chunks(columns).flat_map(softmax).collect();
        assert_close(&out, &expected, 1e-6);

        let block = if columns < 1024 { 32 } else { 1024 };
        let weights = numbers(columns, 15);
        let arguments =
            [of(&x), to(&mut out), of(&weights), Signed(columns as i32), Signed(block as i32), Float(1e-5)];
        launch("rmsnorm_f32", [rows as u32, 1, 1], [block, 1, 1], 0, &arguments);
        let norm = |row: &[f32]| {
            let scale = 1.0 / (row.iter().map(|v| v * v).sum::<f32>() / columns as f32 + 1e-5).sqrt();
            row.iter().zip(&weights).map(|(v, w)| v * scale * w).collect::<Vec<_>>()
        };
        let expected: Vec<f32> = x.chunks(columns).flat_map(norm).collect();
        assert_close(&out, &expected, 1e-5);

        let (x, weights) = (brains(&x), brains(&weights));
        let mut out = vec![bf16::ZERO; rows * columns];
        let arguments =
            [of(&x), to(&mut out), of(&weights), Signed(columns as i32), Signed(block as i32), Float(1e-5)];
        launch("rmsnorm_bf16", [rows as u32, 1, 1], [block, 1, 1], 0, &arguments);
        assert_close(&out.iter().map(|v| v.to_f32()).collect::<Vec<_>>(), &expected, 2e-2);
        launch(
            "softmax_bf16",
            [rows as u32, 1, 1],
            [1, 32, 1],
            0,
            &[of(&x), to(&mut out), Signed(columns as i32)],
        );
        let sum: f32 = out[..columns].iter().map(|v| v.to_f32()).sum();
        assert!((sum - 1.0).abs() < 2e-2, "{sum}");
    }
}

#[test]
fn rotations() {
    let (heads, tokens, dimensions) = (3, 5, 8);
    let half = dimensions / 2;
    let x = numbers(heads * tokens * dimensions, 16);
    let (cos, sin) = (numbers(tokens * half, 17), numbers(tokens * half, 18));
    let mut out = vec![0f32; x.len()];
    let (bh, td, d) =
        (Unsigned(heads as u32), Unsigned((tokens * dimensions) as u32), Unsigned(dimensions as u32));
    launch_over("rope_f32", x.len() / 2, &[of(&x), of(&cos), of(&sin), to(&mut out), bh, td, d, Unsigned(0)]);
    for row in 0..heads * tokens {
        for i in 0..half {
            let (a, b) = (x[row * dimensions + i], x[row * dimensions + half + i]);
            let (c, s) = (cos[row % tokens * half + i], sin[row % tokens * half + i]);
            assert_eq!(out[row * dimensions + i], a * c - b * s);
            assert_eq!(out[row * dimensions + half + i], a * s + b * c);
        }
    }
    launch_over("rope_i_f32", x.len() / 2, &[of(&x), of(&cos), of(&sin), to(&mut out), bh, td, Unsigned(0)]);
    for row in 0..heads * tokens {
        for i in 0..half {
            let (a, b) = (x[row * dimensions + 2 * i], x[row * dimensions + 2 * i + 1]);
            let (c, s) = (cos[row % tokens * half + i], sin[row % tokens * half + i]);
            assert_eq!(out[row * dimensions + 2 * i], a * c - b * s);
            assert_eq!(out[row * dimensions + 2 * i + 1], a * s + b * c);
        }
    }
}

#[test]
fn sorting() {
    let x = numbers(3 * 100, 19);
    let mut order = vec![0u32; 300];
    launch(
        "asort_desc_f32",
        [3, 1, 1],
        [128, 1, 1],
        512,
        &[of(&x), to(&mut order), Signed(100), Signed(128)],
    );
    for (x, order) in x.chunks(100).zip(order.chunks(100)) {
        assert!(order.windows(2).all(|pair| x[pair[0] as usize] >= x[pair[1] as usize]));
    }
}

/// A weight matrix in a GGUF format: its bytes and what they mean.
struct Weights {
    bytes: Vec<u8>,
    values: Vec<f32>,
}

/// Blocks of 32: a scale and signed bytes.
fn q8_0(rows: usize, columns: usize) -> Weights {
    let mut weights = Weights { bytes: Vec::new(), values: Vec::new() };
    for block in numbers(rows * columns, 20).chunks(32) {
        let scale = f16::from_f32(block[0].abs() / 100.0 + 0.001);
        weights.bytes.extend(scale.to_bits().to_le_bytes());
        for v in block {
            let quant = (v * 127.0) as i8;
            weights.bytes.push(quant.cast_unsigned());
            weights.values.push(scale.to_f32() * f32::from(quant));
        }
    }
    weights
}

/// Blocks of 32: a scale and 4 bits each, from which 8 is taken; the second half is in the upper bits.
fn q4_0(rows: usize, columns: usize) -> Weights {
    let mut weights = Weights { bytes: Vec::new(), values: Vec::new() };
    for block in numbers(rows * columns, 21).chunks(32) {
        let scale = f16::from_f32(block[0].abs() / 10.0 + 0.001);
        let quants: Vec<u8> = block.iter().map(|v| (v * 8.0 + 8.0) as u8 & 15).collect();
        weights.bytes.extend(scale.to_bits().to_le_bytes());
        weights.bytes.extend((0..16).map(|i| quants[i] | quants[i + 16] << 4));
        weights.values.extend(quants.iter().map(|q| scale.to_f32() * (f32::from(*q) - 8.0)));
    }
    weights
}

/// Blocks of 256: two scales, eight scales and eight minima of 6 bits each, and 4 bits of each weight.
fn q4_k(rows: usize, columns: usize) -> Weights {
    let mut weights = Weights { bytes: Vec::new(), values: Vec::new() };
    for block in numbers(rows * columns, 22).chunks(256) {
        let (scale, least) =
            (f16::from_f32(block[0].abs() / 50.0 + 0.001), f16::from_f32(block[1].abs() / 50.0 + 0.001));
        let six: Vec<u8> = block[..16].iter().map(|v| ((v + 1.0) * 31.9) as u8).collect();
        let (scales, minima) = six.split_at(8);
        weights.bytes.extend(scale.to_bits().to_le_bytes());
        weights.bytes.extend(least.to_bits().to_le_bytes());
        weights.bytes.extend((0..4).map(|i| scales[i] | scales[i + 4] >> 4 << 6));
        weights.bytes.extend((0..4).map(|i| minima[i] | minima[i + 4] >> 4 << 6));
        weights.bytes.extend((0..4).map(|i| scales[i + 4] & 15 | (minima[i + 4] & 15) << 4));
        let quants: Vec<u8> = block.iter().map(|v| (v * 8.0 + 8.0) as u8 & 15).collect();
        for pair in quants.chunks(64) {
            weights.bytes.extend((0..32).map(|i| pair[i] | pair[i + 32] << 4));
        }
        weights.values.extend(quants.iter().enumerate().map(|(i, q)| {
            let part = i / 32;
            scale.to_f32() * f32::from(scales[part]) * f32::from(*q)
                - least.to_f32() * f32::from(minima[part])
        }));
    }
    weights
}

/// Products of rows by rows, one after another as candle has them: for each input all outputs.
fn product(weights: &[f32], inputs: &[f32], columns: usize) -> Vec<f32> {
    let outputs = |input: &[f32]| {
        weights
            .chunks(columns)
            .map(|row| row.iter().zip(input).map(|(a, b)| a * b).sum())
            .collect::<Vec<f32>>()
    };
    inputs.chunks(columns).flat_map(outputs).collect()
}

#[track_caller]
fn assert_product(found: &[f32], weights: &Weights, inputs: &[f32], columns: usize) {
    // Inputs are rounded to 8 bits.
    let expected = product(&weights.values, inputs, columns);
    let scale = expected.iter().fold(0f32, |largest, v| largest.max(v.abs()));
    for (i, (a, b)) in found.iter().zip(&expected).enumerate() {
        assert!((a - b).abs() <= 0.01 * scale, "{i}: {a} instead of {b}");
    }
}

type Format = fn(usize, usize) -> Weights;
const FORMATS: [(&str, u32, Format, usize); 3] =
    [("q8_0", 8, q8_0, 0), ("q4_0", 2, q4_0, 1), ("q4_k", 12, q4_k, 1)];

#[test]
fn weights_are_widened() {
    for (name, format, is_k) in [("q8_0", q8_0 as Format, false), ("q4_0", q4_0, false), ("q4_K", q4_k, true)]
    {
        let weights = format(3, 512);
        let mut wide = vec![0f32; 3 * 512];
        let mut arguments = vec![of(&weights.bytes), to(&mut wide)];
        if !is_k {
            arguments.push(Signed(3 * 512 / 32));
        }
        launch(&format!("dequantize_block_{name}_f32"), [6, 1, 1], [32, 1, 1], 0, &arguments);
        assert_close(&wide, &weights.values, 1e-6);
    }
}

/// Few rows: the path of decoding.
#[test]
fn quantised_products_of_few_rows() {
    let (outputs, columns) = (37, 768);
    let padded = 1024;
    for (name, _, format, _) in FORMATS {
        let weights = format(outputs, columns);
        for batch in [1, 2, 5] {
            let inputs = numbers(batch * columns, 23);
            let mut quantised = vec![0u8; batch * padded / 32 * 36];
            let arguments = [of(&inputs), to(&mut quantised), Signed(columns as i32), Signed(padded as i32)];
            launch("mmvq_gguf_quantize_q8_1_f32", [4, batch as u32, 1], [256, 1, 1], 0, &arguments);
            let mut out = vec![0f32; batch * outputs];
            let sizes = [columns, outputs, padded / 32, outputs].map(|size| Signed(size as i32));
            let arguments =
                [of(&weights.bytes), of(&quantised), to(&mut out), sizes[0], sizes[1], sizes[2], sizes[3]];
            let blocks = if batch == 1 { outputs } else { outputs.div_ceil(2) } as u32;
            let warps = if batch <= 4 { 4 } else { 2 };
            let kernel = format!("mmvq_gguf_{name}_f32_plain_cuda{batch}");
            launch(&kernel, [blocks, 1, 1], [32, warps, 1], 0, &arguments);
            assert_product(&out, &weights, &inputs, columns);
        }
    }
}

/// Many rows: the path of prefill, with tiles, tensor cores and a second launch for tiles that several blocks share.
#[test]
fn quantised_products_of_many_rows() {
    let (outputs, columns, multiprocessors) = (160, 768, 3u32);
    let padded = 1024;
    for (name, number, format, layout) in FORMATS {
        let weights = format(outputs, columns);
        for (batch, tile) in [(20, 24), (60, 64)] {
            let inputs = numbers(batch * columns, 24);
            let mut quantised = vec![0u8; (batch * padded / 128 + 128) * 144];
            let wide = |value: usize| Size(value);
            let arguments = [
                of(&inputs),
                NULL,
                to(&mut quantised),
                wide(columns),
                wide(columns),
                wide(0),
                wide(0),
                wide(padded),
                Signed(batch as i32),
                Signed(1),
            ];
            let kernel = format!("_Z17quantize_mmq_q8_1IL18mmq_q8_1_ds_layout{layout}EEvPKfPKiPvlllllii");
            launch(&kernel, [batch as u32, padded as u32 / 512, 1], [128, 1, 1], 0, &arguments);

            let mut out = vec![0f32; batch * outputs];
            let mut fixup = vec![0f32; multiprocessors as usize * tile * 128];
            let blocks_of_row = if name == "q4_k" { columns / 256 } else { columns / 32 };
            let sizes =
                [columns, outputs, batch, blocks_of_row, batch, outputs, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0, batch];
            let mut arguments =
                vec![of(&weights.bytes), of(&quantised), NULL, NULL, to(&mut out), to(&mut fixup)];
            arguments.extend(sizes.map(|size| Signed(size as i32)));
            let kernel =
                format!("_Z9mul_mat_qIL9ggml_type{number}ELi{tile}ELb1EEvPKcPKiS4_S4_PfS5_iiiiiiiiiiiiiiiii");
            let grid = [multiprocessors, 1, 1];
            let fixup_kernel = format!(
                "_Z24mul_mat_q_stream_k_fixupIL9ggml_type{number}ELi{tile}ELb1EEvPKiS2_PfPKfiiimimimi"
            );
            let fixup_arguments = [
                NULL,
                NULL,
                to(&mut out),
                of(&fixup),
                Signed(columns as i32),
                Signed(outputs as i32),
                Signed(batch as i32),
                wide(outputs),
                Signed(1),
                wide(0),
                Signed(1),
                wide(0),
                Signed(batch as i32),
            ];
            for seed in 0..2 {
                launch_with(&kernel, grid, [32, 8, 1], 96 << 10, seed, &arguments).unwrap();
                launch_with(&fixup_kernel, grid, [32, 8, 1], 0, seed, &fixup_arguments).unwrap();
                assert_product(&out, &weights, &inputs, columns);
            }
        }
    }
}
