use std::borrow::Cow;

use candle_core::quantized::{GgmlDType, QStorage, QTensor};
use candle_core::{Device, Tensor};
use clap::ValueEnum;
use proptest::prelude::*;
use rand::{Rng, RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;

const QUANTISED: [Packing; 7] = [
    Packing::Int8,
    Packing::Q8_0,
    Packing::Q4_0,
    Packing::Mxfp4,
    Packing::Nvfp4,
    Packing::Int4 { group: 32 },
    Packing::Int4 { group: 7 },
];

fn all_rows(matrix: &StoredMatrix) -> Vec<f32> {
    let mut values = vec![0.0; matrix.rows * matrix.columns];
    for (row, out) in values.chunks_mut(matrix.columns).enumerate() {
        matrix.row(row, out);
    }
    values
}

/// The scale that belongs to a value.
fn scale(matrix: &StoredMatrix, row: usize, column: usize) -> f32 {
    let group = matrix.packing().group(matrix.columns);
    let groups = matrix.columns.div_ceil(group);
    match &matrix.data {
        StoredData::Int8 { scales, .. } => scales[row].abs(),
        StoredData::Q8_0 { scales, .. }
        | StoredData::Q4_0 { scales, .. }
        | StoredData::Int4 { scales, .. } => scales[row * groups + column / group].to_f32().abs(),
        StoredData::Mxfp4 { scales, .. } => e8m0::power(scales[row * groups + column / group]),
        // Below the least scale there is none, and all codes are zeros.
        StoredData::Nvfp4 { scales, tensor_scale, .. } => {
            e4m3::to_f32(scales[row * groups + column / group].max(1)) * tensor_scale
        }
        _ => panic!("no scales"),
    }
}

/// candle's type of a format in blocks of 256.
fn ggml(format: SuperBlock) -> GgmlDType {
    match format {
        SuperBlock::Q4K => GgmlDType::Q4K,
        SuperBlock::Q5K => GgmlDType::Q5K,
        SuperBlock::Q6K => GgmlDType::Q6K,
    }
}

/// Blocks of random bits whose scales are numbers: large, small, negative and denormal ones.
fn random_blocks(format: SuperBlock, count: usize, seed: u64) -> Vec<u8> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut blocks = vec![0; count * format.bytes()];
    random.fill_bytes(&mut blocks);
    for block in blocks.chunks_exact_mut(format.bytes()) {
        let scales = if format == SuperBlock::Q6K { 208..210 } else { 0..4 };
        for high in block[scales].iter_mut().skip(1).step_by(2) {
            // All bits of the exponent are set in what is not a number.
            if *high & 0x7c == 0x7c {
                *high ^= 0x40;
            }
        }
    }
    blocks
}

#[test]
fn blocks_of_256_are_read_as_candle_reads_them_to_the_bit() {
    for format in SuperBlock::ALL {
        let (rows, columns) = (100, 768);
        let blocks = random_blocks(format, rows * columns / SUPER_BLOCK, 5);
        let storage = QStorage::from_data(Cow::Borrowed(&blocks), &Device::Cpu, ggml(format)).unwrap();
        let theirs = QTensor::new(storage, (rows, columns)).unwrap();
        let theirs =
            theirs.dequantize(&Device::Cpu).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let matrix = StoredMatrix { rows, columns, data: StoredData::Super { format, blocks } };
        assert_eq!(matrix.bytes(), Bytes((rows * columns / SUPER_BLOCK * format.bytes()) as u64));
        let ours = all_rows(&matrix);
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&ours), bits(&theirs), "{format:?}");
        let mut again = StoredMatrix::blank(rows, columns, matrix.packing());
        (0..rows).for_each(|row| again.copy_row(row, &matrix, row));
        assert_eq!(again, matrix);
    }
}

#[test]
fn more_bits_in_blocks_of_256_are_nearer_to_normal_weights() {
    let (rows, columns) = (16, 1024);
    let mut weights = vec![0.0; rows * columns];
    let mut random = ChaCha8Rng::seed_from_u64(3);
    // Sums of twelve even draws are near enough to normal.
    let mut normal = || (0..12).map(|_| f32::from(random.random::<u16>()) / 65_536.0 - 0.5).sum::<f32>();
    for weight in &mut weights {
        *weight = 0.02 * normal();
    }
    let rms = |packing| {
        let found = all_rows(&StoredMatrix::from_f32_rows(rows, columns, &weights, packing));
        let squares = found.iter().zip(&weights).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>();
        (squares / weights.len() as f64).sqrt() / 0.02
    };
    let [q4, q5, q6] = SuperBlock::ALL.map(|format| rms(Packing::Super(format)));
    let (q4_0, mxfp4, q8_0) = (rms(Packing::Q4_0), rms(Packing::Mxfp4), rms(Packing::Q8_0));
    assert!(q4_0 < mxfp4 && mxfp4 < 1.5 * q4_0, "{mxfp4} for {q4_0}");
    let (nvfp4, mxfp8) = (rms(Packing::Nvfp4), rms(Packing::Mxfp8));
    assert!(
        nvfp4 < 0.9 * mxfp4 && mxfp8 < 0.4 * nvfp4 && q8_0 < mxfp8,
        "{nvfp4} for {mxfp4}, {mxfp8} for {q8_0}"
    );
    assert!(q4 < 1.1 * q4_0 && q5 < 0.55 * q4 && q6 < q5 && q8_0 < q6, "{q4_0} {q4} {q5} {q6} {q8_0}");
}

/// The step of each group of a packed row, and what rounding the scales to f16 moves its ends by.
fn super_steps(format: SuperBlock, matrix: &StoredMatrix) -> Vec<(f32, f32)> {
    let StoredData::Super { blocks, .. } = &matrix.data else { panic!("{matrix:?}") };
    let groups = blocks.chunks_exact(format.bytes()).flat_map(|block| {
        let [d, d_min] = format.block_scales(block).map(f16::to_f32);
        let bytes = format.scale_bytes(block);
        (0..SUPER_BLOCK).map(move |column| {
            if format == SuperBlock::Q6K {
                let step = d * f32::from(bytes[column / 16].cast_signed()).abs();
                return (step, 0.55 * step + 127.0 * d / 512.0);
            }
            let step = d * f32::from(scale_and_min(bytes, column / 32).0);
            (step, step / 32.0 + 63.0 * (d + d_min) / 1024.0)
        })
    });
    groups.collect()
}

proptest! {
    #[test]
    fn values_in_blocks_of_256_are_within_a_step((_, _, seed) in weights(), spread in prop_oneof![Just(1.0f32), Just(1e-3), Just(30.0)]) {
        let values: Vec<f32> = (0..512).map(|i| seed[(i * 7) % seed.len()] * spread * if i % 5 == 0 { -0.3 } else { 1.0 }).collect();
        for format in SuperBlock::ALL {
            let matrix = StoredMatrix::from_f32_rows(1, 512, &values, Packing::Super(format));
            let steps = super_steps(format, &matrix);
            for ((found, wanted), (step, ends)) in all_rows(&matrix).iter().zip(&values).zip(steps) {
                // Scales below the smallest normal f16 are absolute multiples of 2^-24, 63 codes and 63 steps of them.
                let bound = 0.51 * step + ends + 64.0 * 64.0 * 2.0_f32.powi(-25);
                prop_assert!((found - wanted).abs() <= bound, "{format:?}: {found} for {wanted}, step {step}");
            }
        }
    }
}

#[test]
fn scales_and_minima_of_six_bits_come_back_from_their_twelve_bytes() {
    let values: Vec<f32> =
        (0..256).map(|i: i16| f32::from(i % 32) * 0.01 * f32::from(1 + i / 32) - 0.1).collect();
    for format in [SuperBlock::Q4K, SuperBlock::Q5K] {
        let matrix = StoredMatrix::from_f32_rows(1, 256, &values, Packing::Super(format));
        let StoredData::Super { blocks, .. } = &matrix.data else { panic!("{matrix:?}") };
        let scales: Vec<u8> =
            (0..8).map(|group| scale_and_min(format.scale_bytes(blocks), group).0).collect();
        assert!(scales.is_sorted() && scales[7] == 63 && scales[0] < 20, "{scales:?}");
    }
}

/// Steps that a value may be off: half of one, and what rounding scale and zero to f16 moves the farthest code by.
fn steps(packing: Packing) -> f32 {
    match packing {
        Packing::Int8 => 0.5 + 127.0 / 2048.0,
        Packing::Q8_0 => 0.51 + 127.0 / 2048.0,
        // A value opposite to the extreme one and as large wants +8, and the codes end at +7.
        Packing::Q4_0 => 1.01 + 8.0 / 2048.0,
        Packing::Int4 { .. } => 0.5 + 16.0 / 1024.0,
        // The largest values are below 8, and the codes end at 6.
        Packing::Mxfp4 => 2.0,
        // So does a scale that is rounded to half as much below, which the least ones are.
        Packing::Nvfp4 => 3.01,
        _ => 0.0,
    }
}

/// Weights with the spread of a trained layer, its outliers, or zeros.
fn weights() -> impl Strategy<Value = (usize, usize, Vec<f32>)> {
    (1usize..5, 1usize..100, prop_oneof![Just(0.02f32), Just(1.0), Just(300.0)]).prop_flat_map(
        |(rows, columns, spread)| {
            let value = prop_oneof![9 => -spread..spread, 1 => Just(0.0), 1 => -20.0 * spread..20.0 * spread];
            (Just(rows), Just(columns), prop::collection::vec(value, rows * columns))
        },
    )
}

proptest! {
    #[test]
    fn every_value_is_within_half_a_step_of_its_weight((rows, columns, weights) in weights()) {
        for packing in QUANTISED {
            let matrix = StoredMatrix::from_f32_rows(rows, columns, &weights, packing);
            prop_assert_eq!(matrix.packing(), packing);
            for (index, (found, wanted)) in all_rows(&matrix).iter().zip(&weights).enumerate() {
                let scale = scale(&matrix, index / columns, index % columns);
                // Scales below the smallest normal f16 are absolute multiples of 2^-24.
                let bound = steps(packing) * scale + 127.0 * 2.0_f32.powi(-25);
                prop_assert!((found - wanted).abs() <= bound, "{packing:?}: {found} for {wanted}, step {scale}");
            }
        }
    }

    #[test]
    fn packing_what_was_packed_changes_no_value_by_more_than_the_scale_does((rows, columns, weights) in weights()) {
        for packing in QUANTISED {
            let once = StoredMatrix::from_f32_rows(rows, columns, &weights, packing);
            let twice = StoredMatrix::quantize(&once, packing);
            prop_assert_eq!(once.bytes(), twice.bytes());
            let values = all_rows(&once);
            for (index, (again, value)) in all_rows(&twice).iter().zip(&values).enumerate() {
                let scale = scale(&once, index / columns, index % columns);
                // A whole zero may cut half a step off a range, which is then divided anew.
                let steps = match &once.data {
                    StoredData::Int4 { .. } => 0.55,
                    // The least scales are so far apart that the largest value is none of the largest code.
                    StoredData::Nvfp4 { tensor_scale, .. } if scale < tensor_scale / 64.0 => 3.01,
                    _ => 0.1,
                };
                prop_assert!((again - value).abs() <= steps * scale + 1e-6 || packing == Packing::Q4_0);
            }
        }
    }

    #[test]
    fn blocks_of_32_are_those_of_ggml_to_the_bit(
        rows in 1usize..4,
        blocks in 1usize..4,
        seed in prop::collection::vec(-3.0f32..3.0, 4 * 4 * 32),
    ) {
        let columns = 32 * blocks;
        let weights = &seed[..rows * columns];
        for (packing, dtype) in [(Packing::Q8_0, GgmlDType::Q8_0), (Packing::Q4_0, GgmlDType::Q4_0)] {
            let tensor = Tensor::from_slice(weights, (rows, columns), &Device::Cpu).unwrap();
            let theirs = QTensor::quantize(&tensor, dtype).unwrap();
            let theirs = theirs.dequantize(&Device::Cpu).unwrap().flatten_all().unwrap();
            let ours = all_rows(&StoredMatrix::from_f32_rows(rows, columns, weights, packing));
            prop_assert_eq!(ours, theirs.to_vec1::<f32>().unwrap());
        }
    }
}

#[test]
fn values_that_a_format_can_hold_come_back_exactly() {
    let codes = |from: i16, to: i16, count: usize| -> Vec<f32> {
        (from..=to).cycle().take(count).map(|code| f32::from(code) * 0.25).collect()
    };
    let cases = [
        (Packing::F32, codes(-300, 300, 601)),
        (Packing::F16, codes(-300, 300, 601)),
        (Packing::Bf16, codes(-128, 128, 257)),
        (Packing::Int8, codes(-127, 127, 255)),
        // Each group sees its extreme code.
        (Packing::Q8_0, codes(-127, -96, 64)),
        (Packing::Q4_0, codes(-8, 7, 64)),
        (Packing::Mxfp4, [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.5, -6.0].repeat(7)),
        // The largest is 6 · 448, and the others have scales of their own.
        (Packing::Nvfp4, nvfp4_values()),
        (Packing::Mxfp8, [0.0, 2.0, 1.125, -0.015_625, 448.0, 0.25, -26.0].repeat(7)),
        (Packing::Int4 { group: 32 }, codes(-3, 12, 64)),
        (Packing::Int4 { group: 17 }, codes(-15, 0, 51)),
    ];
    for (packing, values) in cases {
        let matrix = StoredMatrix::from_f32_rows(1, values.len(), &values, packing);
        assert_eq!(all_rows(&matrix), values, "{packing:?}");
    }
}

/// Values of three groups of nvfp4 under a scale of 1.
fn nvfp4_values() -> Vec<f32> {
    let codes = [6.0, -4.0, 3.0, 2.0, 1.5, -1.0, 0.5, 0.0, -6.0, 4.0];
    let group =
        |scale: f32, count: usize| codes.into_iter().cycle().take(count).map(move |code| code * scale);
    group(448.0, 16).chain(group(0.5, 16)).chain(group(1.125, 5)).collect()
}

#[test]
fn bytes_of_nvfp4_and_mxfp8_are_those_of_published_files() {
    let matrix = StoredMatrix::from_f32_rows(1, 37, &nvfp4_values(), Packing::Nvfp4);
    let StoredData::Nvfp4 { nibbles, scales, tensor_scale } = &matrix.data else { panic!("{matrix:?}") };
    // The first of two columns is the low half.
    assert_eq!(nibbles[..5], [0xE7, 0x45, 0xA3, 0x01, 0x6F]);
    assert_eq!((scales.as_slice(), *tensor_scale), (&[0x7e, 0x30, 0x39][..], 1.0));
    let halved = matrix.slice_rows(0..1);
    assert_eq!(halved, matrix, "the scale of the matrix comes along");
    let values = [vec![448.0; 32], vec![-2.0; 8]].concat();
    let matrix = StoredMatrix::from_f32_rows(1, 40, &values, Packing::Mxfp8);
    let StoredData::Mxfp8 { codes, scales } = &matrix.data else { panic!("{matrix:?}") };
    assert_eq!((codes[31], codes[32], codes.len()), (0x7e, 0xf8, 40));
    assert_eq!(scales, &[127, 120]);
}

#[test]
fn mxfp8_keeps_three_places_of_each_weight_and_ends_at_the_largest_code() {
    let weights: Vec<f32> = (0..192u16).map(|i| (f32::from(i) - 90.0) * 0.37).collect();
    let matrix = StoredMatrix::from_f32_rows(4, 48, &weights, Packing::Mxfp8);
    for (found, wanted) in all_rows(&matrix).iter().zip(&weights) {
        // Half of the last of three places; and what is beyond 448 of the power of two of a group is that.
        assert!(
            (found - wanted).abs() <= wanted.abs() / 16.0 || found.abs() >= wanted.abs() * 0.875,
            "{found} for {wanted}"
        );
        assert!((found - wanted).abs() <= wanted.abs() / 8.0, "{found} for {wanted}");
    }
}

#[test]
fn nibbles_of_neighbouring_columns_share_a_byte() {
    let values: Vec<f32> = (0..32).map(|column: i16| f32::from(column % 16 - 8)).collect();
    let matrix = StoredMatrix::from_f32_rows(1, 32, &values, Packing::Q4_0);
    let StoredData::Q4_0 { nibbles, scales } = &matrix.data else { panic!("{matrix:?}") };
    assert_eq!(scales, &[f16::ONE]);
    assert_eq!(nibbles[..8], [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]);
}

#[test]
fn bytes_are_those_of_the_arrays_with_rows_padded_to_whole_groups() {
    let bytes = |packing, columns| StoredMatrix::blank(3, columns, packing).bytes().0;
    assert_eq!(bytes(Packing::F32, 33), 3 * 33 * 4);
    assert_eq!(bytes(Packing::F16, 33), 3 * 33 * 2);
    assert_eq!(bytes(Packing::Bf16, 33), 3 * 33 * 2);
    assert_eq!(bytes(Packing::Int8, 33), 3 * (33 + 4));
    assert_eq!(bytes(Packing::Q8_0, 33), 3 * 2 * 34);
    assert_eq!(bytes(Packing::Q4_0, 33), 3 * 2 * 18);
    assert_eq!(bytes(Packing::Mxfp4, 33), 3 * 2 * 17);
    assert_eq!(bytes(Packing::Mxfp8, 33), 3 * (33 + 2));
    // Rows are padded to groups of 16, and the matrix has a scale.
    assert_eq!(bytes(Packing::Nvfp4, 33), 3 * 3 * 9 + 4);
    assert_eq!(bytes(Packing::Int4 { group: 32 }, 33), 3 * 2 * (16 + 4));
    assert_eq!(bytes(Packing::Int4 { group: 7 }, 8), 3 * (7 + 2 * 4));
    assert_eq!(bytes(Packing::Super(SuperBlock::Q4K), 512), 3 * 2 * 144);
    assert_eq!(bytes(Packing::Super(SuperBlock::Q5K), 512), 3 * 2 * 176);
    assert_eq!(bytes(Packing::Super(SuperBlock::Q6K), 257), 3 * 2 * 210);
    assert_eq!(StoredMatrix::blank(3, 33, Packing::Q8_0).value_bytes().0, 3 * 64);
}

#[test]
fn padding_of_ggml_blocks_stands_for_zeros() {
    let weights: Vec<f32> = (0..33).map(|column: i16| f32::from(column) - 16.0).collect();
    let matrix = StoredMatrix::from_f32_rows(1, 33, &weights, Packing::Q4_0);
    let StoredData::Q4_0 { nibbles, .. } = &matrix.data else { panic!("{matrix:?}") };
    assert!((33..64).all(|column| nibble(nibbles, column) == 8));
    let matrix = StoredMatrix::from_f32_rows(1, 33, &weights, Packing::Q8_0);
    let StoredData::Q8_0 { quants, .. } = &matrix.data else { panic!("{matrix:?}") };
    assert!(quants[33..].iter().all(|quant| *quant == 0));
}

#[test]
fn many_threads_pack_what_one_does() {
    let (rows, columns) = (1031, 257);
    let weights: Vec<f32> =
        (0..rows * columns).map(|i| ((i * 2_654_435_761) % 1009) as f32 - 504.0).collect();
    let others = [Packing::Bf16, Packing::Mxfp8].into_iter().chain(SuperBlock::ALL.map(Packing::Super));
    for packing in QUANTISED.into_iter().chain(others) {
        let whole = StoredMatrix::from_f32_rows(rows, columns, &weights, packing);
        let mut by_row = StoredMatrix::blank(rows, columns, packing);
        // With the largest value of all, which a scale of the whole matrix comes from.
        let size = |row: &[f32]| row.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
        let largest = weights.chunks(columns).max_by(|a, b| size(a).total_cmp(&size(b))).unwrap();
        for (row, values) in weights.chunks(columns).enumerate() {
            let two = [values, largest].concat();
            by_row.copy_row(row, &StoredMatrix::from_f32_rows(2, columns, &two, packing), 0);
        }
        assert_eq!(whole, by_row, "{packing:?}");
    }
}

#[test]
fn zeros_and_what_is_no_number_stay_finite() {
    let weights =
        [vec![0.0; 32], vec![f32::NAN; 32], vec![f32::MIN_POSITIVE; 32], vec![f32::MAX; 32]].concat();
    for packing in QUANTISED.into_iter().chain([Packing::Mxfp8]).chain(SuperBlock::ALL.map(Packing::Super)) {
        let matrix = StoredMatrix::from_f32_rows(4, 32, &weights, packing);
        let values = all_rows(&matrix);
        assert!(values.iter().all(|value| value.is_finite()), "{packing:?}: {values:?}");
        assert!(values[..32].iter().all(|value| *value == 0.0), "{packing:?}");
    }
}

#[test]
fn fp8_keeps_three_places_of_each_weight_and_one_scale_per_row() {
    let weights: Vec<f32> = (0..99u16).map(|i| (f32::from(i) - 40.0) * 0.37).collect();
    let matrix = StoredMatrix::from_f32_rows(3, 33, &weights, Packing::Fp8 { block: None });
    assert_eq!((matrix.storage(), matrix.bytes()), ("fp8", Bytes(3 * (33 + 4))));
    for (row, (found, wanted)) in all_rows(&matrix).chunks(33).zip(weights.chunks(33)).enumerate() {
        let largest = wanted.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        for (found, wanted) in found.iter().zip(wanted) {
            // Half of the last of three places, and no less than half of the smallest step; the scale is rounded to f16.
            let bound = (wanted.abs() / 16.0).max(largest / 448.0 / 1024.0) + largest / 2048.0;
            assert!((found - wanted).abs() <= bound, "row {row}: {found} for {wanted}");
        }
    }
    let mut other = StoredMatrix::blank(1, 33, Packing::Fp8 { block: None });
    other.copy_row(0, &matrix, 2);
    assert_eq!(all_rows(&other), all_rows(&matrix)[66..]);
}

#[test]
fn every_dtype_but_that_of_a_file_has_a_packing_of_its_name() {
    for dtype in Dtype::value_variants() {
        let packing = Packing::of(*dtype, 64);
        assert_eq!(packing.map(Packing::name), (*dtype != Dtype::Gguf).then(|| dtype.name()));
    }
    assert_eq!(Packing::of(Dtype::Int4, 64), Some(Packing::Int4 { group: 64 }));
    assert_eq!(Packing::of(Dtype::Int4, 0), Some(Packing::Int4 { group: 1 }));
}
