//! The libraries' calls: products against a plain f64 computation, refusals, generators, and launches of registered kernels.
//!
//! What reaches a stream is done by whoever waits for it; here the computing functions are called, too, where nobody waits.

use std::ffi::{c_int, c_void};
use std::ptr::{null, null_mut};

use half::{bf16, f16};
use simulated_cuda::driver::{cuCtxSetCurrent, cuDevicePrimaryCtxRetain, cuInit};
use simulated_cuda::libraries::gemm::{
    self, Gemm, INVALID_VALUE, Matrix, NOT_INITIALIZED, NOT_SUPPORTED, SUCCESS, Type,
};
use simulated_cuda::libraries::{blas, blas_lt, random, runtime};

/// Makes the first device this thread's, as every caller of the libraries has done.
fn use_a_device() {
    let mut context = 0;
    // SAFETY: the address of a value of the type.
    unsafe {
        assert_eq!(
            (cuInit(0), cuDevicePrimaryCtxRetain(&raw mut context, 0), cuCtxSetCurrent(context)),
            (0, 0, 0)
        );
    }
}

/// Numbers between -1 and 1, the same in every run.
fn numbers(seed: u64, count: usize) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// Values in memory, of any type.
#[derive(Clone)]
struct Memory {
    values: Type,
    // Aligned for every value, and for products that want 16 bytes.
    words: Vec<u128>,
}

impl Memory {
    fn new(values: Type, from: &[f64]) -> Self {
        let mut memory = Self { values, words: vec![0; (from.len() * values.bytes()).div_ceil(16)] };
        for (i, value) in from.iter().enumerate() {
            // SAFETY: there is room for as many, aligned.
            unsafe {
                match values {
                    Type::F16 => memory.address().cast::<f16>().add(i).write(f16::from_f64(*value)),
                    Type::Bf16 => memory.address().cast::<bf16>().add(i).write(bf16::from_f64(*value)),
                    Type::F32 => memory.address().cast::<f32>().add(i).write(*value as f32),
                }
            }
        }
        memory
    }

    fn address(&mut self) -> *mut c_void {
        self.words.as_mut_ptr().cast()
    }

    fn get(&self, i: usize) -> f64 {
        let address: *const c_void = self.words.as_ptr().cast();
        // SAFETY: callers stay within what was made.
        unsafe {
            match self.values {
                Type::F16 => address.cast::<f16>().add(i).read().to_f64(),
                Type::Bf16 => address.cast::<bf16>().add(i).read().to_f64(),
                Type::F32 => f64::from(address.cast::<f32>().add(i).read()),
            }
        }
    }

    fn matrix(&mut self, leading: usize, stride: usize) -> Matrix {
        let address = self.address().expose_provenance();
        Matrix { address, values: self.values, leading: leading as i64, stride: stride as i64 }
    }
}

/// A product of a batch of 3 with gaps between columns and between matrices, against sums in f64; gaps stay as they are.
fn check_product(
    types: [Type; 3],
    compute: i32,
    [m, n, k]: [usize; 3],
    turned: [bool; 2],
    scalars: [f64; 2],
    parts: usize,
    within: f64,
) {
    let batch = 3;
    let leading = |rows: usize| rows + 3;
    let size = |rows: usize, columns: usize| leading(rows) * columns + 5;
    let (a_rows, a_columns) = if turned[0] { (k, m) } else { (m, k) };
    let (b_rows, b_columns) = if turned[1] { (n, k) } else { (k, n) };
    let mut a = Memory::new(types[0], &numbers(1, batch * size(a_rows, a_columns)));
    let mut b = Memory::new(types[1], &numbers(2, batch * size(b_rows, b_columns)));
    let before = Memory::new(types[2], &numbers(3, batch * size(m, n)));
    let mut c = before.clone();
    let product = Gemm {
        m: m as i64,
        n: n as i64,
        k: k as i64,
        transpose_a: turned[0],
        transpose_b: turned[1],
        alpha: scalars[0],
        beta: scalars[1],
        a: a.matrix(leading(a_rows), size(a_rows, a_columns)),
        b: b.matrix(leading(b_rows), size(b_rows, b_columns)),
        c: c.matrix(leading(m), size(m, n)),
        d: c.matrix(leading(m), size(m, n)),
        bias: None,
        batch: batch as i64,
        compute,
        parts,
    };
    product.check().unwrap();
    // SAFETY: checked, and the memory has these sizes.
    unsafe { product.run() }.unwrap();
    let mut written = vec![false; batch * size(m, n)];
    for i in 0..batch {
        for row in 0..m {
            for column in 0..n {
                let mut wanted = 0.0;
                for l in 0..k {
                    let of_a = if turned[0] { l + leading(k) * row } else { row + leading(m) * l };
                    let of_b = if turned[1] { column + leading(n) * l } else { l + leading(k) * column };
                    wanted +=
                        a.get(i * size(a_rows, a_columns) + of_a) * b.get(i * size(b_rows, b_columns) + of_b);
                }
                let place = i * size(m, n) + leading(m) * column + row;
                let wanted = scalars[0] * wanted + scalars[1] * before.get(place);
                let found = c.get(place);
                assert!(
                    (wanted - found).abs() <= within * (1.0 + wanted.abs()),
                    "{wanted} {found} {product:?}"
                );
                written[place] = true;
            }
        }
    }
    for (place, written) in written.iter().enumerate() {
        assert!(*written || before.get(place) == c.get(place), "{place} was written: {product:?}");
    }
}

#[test]
fn products_are_those_of_f64() {
    use Type::{Bf16, F16, F32};
    let kinds = [
        ([F32; 3], gemm::COMPUTE_32F, 1e-5),
        ([F32; 3], gemm::COMPUTE_32F_FAST_TF32, 5e-3),
        ([F16; 3], gemm::COMPUTE_32F, 2e-3),
        ([F16; 3], gemm::COMPUTE_16F, 2e-3),
        ([F16, F16, F32], gemm::COMPUTE_32F, 1e-5),
        ([Bf16; 3], gemm::COMPUTE_32F, 1e-2),
        ([Bf16, Bf16, F32], gemm::COMPUTE_32F, 1e-5),
    ];
    for (types, compute, within) in kinds {
        for sizes in [[1, 1, 1], [7, 5, 9], [3, 17, 33], [13, 1, 70]] {
            for turned in [[false, false], [true, false], [false, true], [true, true]] {
                check_product(types, compute, sizes, turned, [1.0, 0.0], 1, within);
                check_product(types, compute, sizes, turned, [-0.5, 2.0], 4, within);
            }
        }
    }
    check_product([F32; 3], gemm::COMPUTE_32F, [4, 3, 0], [false, false], [1.0, 0.5], 1, 1e-6);
}

#[test]
fn what_is_not_added_is_not_read() {
    let (mut a, mut c) = (Memory::new(Type::F32, &[2.0]), Memory::new(Type::F32, &[f64::NAN]));
    let (side, out) = (a.matrix(1, 0), c.matrix(1, 0));
    let (alpha, beta, bias, compute) = (1.0, 0.0, None, gemm::COMPUTE_32F);
    let mut product = Gemm {
        m: 1,
        n: 1,
        k: 1,
        transpose_a: false,
        transpose_b: false,
        alpha,
        beta,
        a: side,
        b: side,
        c: out,
        d: out,
        bias,
        batch: 1,
        compute,
        parts: 1,
    };
    // SAFETY: matrices of one value.
    unsafe { product.run() }.unwrap();
    assert_eq!(c.get(0), 4.0);
    // Nothing is read where alpha is nothing.
    product.alpha = 0.0;
    product.a.address = 0;
    assert_eq!(product.check(), Ok(()));
    // SAFETY: as above.
    unsafe { product.run() }.unwrap();
    assert_eq!(c.get(0), 0.0);
    // A batch that writes to one place is a fault of the caller's, which only running it can tell.
    product.batch = 2;
    // SAFETY: refused before anything is read.
    assert!(unsafe { product.run() }.is_err());
}

struct Call {
    handle: *mut c_void,
    operations: [c_int; 2],
    sizes: [c_int; 3],
    alpha: *const c_void,
    sides: [*mut c_void; 3],
    types: [c_int; 3],
    leading: [c_int; 3],
    batch: c_int,
    compute: c_int,
    algorithm: c_int,
}

impl Call {
    fn status(&self) -> c_int {
        let one = 1.0_f32;
        // SAFETY: scalars of the type, or null; nothing runs here that has no memory.
        unsafe {
            blas::gemm_strided_batched_ex(
                self.handle,
                self.operations[0],
                self.operations[1],
                self.sizes[0],
                self.sizes[1],
                self.sizes[2],
                self.alpha,
                self.sides[0],
                self.types[0],
                self.leading[0],
                64,
                self.sides[1],
                self.types[1],
                self.leading[1],
                64,
                (&raw const one).cast(),
                self.sides[2],
                self.types[2],
                self.leading[2],
                64,
                self.batch,
                self.compute,
                self.algorithm,
            )
        }
    }
}

#[test]
fn products_that_make_no_sense_are_refused() {
    use_a_device();
    // What is accepted may run whenever somebody waits, so its memory stays.
    let memory = vec![0.0_f64; 1024].leak().as_mut_ptr();
    let at = |i: usize| memory.wrapping_add(i).cast::<c_void>();
    let mut handle = null_mut();
    // SAFETY: room for a handle.
    assert_eq!(unsafe { blas::create(&raw mut handle) }, SUCCESS);
    let one = 1.0_f32;
    let good = || Call {
        handle,
        operations: [0, 1],
        sizes: [3, 4, 5],
        alpha: (&raw const one).cast(),
        sides: [at(0), at(256), at(512)],
        types: [gemm::R_32F; 3],
        leading: [3, 4, 3],
        batch: 2,
        compute: gemm::COMPUTE_32F,
        algorithm: 99,
    };
    assert_eq!(good().status(), SUCCESS);
    let refused = |change: &dyn Fn(&mut Call)| {
        let mut call = good();
        change(&mut call);
        call.status()
    };
    assert_eq!(refused(&|call| call.handle = null_mut()), NOT_INITIALIZED);
    assert_eq!(refused(&|call| call.operations[0] = 4), INVALID_VALUE);
    assert_eq!(refused(&|call| call.algorithm = 50), INVALID_VALUE);
    for i in 0..3 {
        assert_eq!(refused(&|call| call.sizes[i] = -1), INVALID_VALUE, "size {i}");
        assert_eq!(refused(&|call| call.leading[i] -= 1), INVALID_VALUE, "leading dimension {i}");
    }
    // Turned round, other sizes are those of columns.
    assert_eq!(refused(&|call| call.operations[0] = 1), INVALID_VALUE);
    assert_eq!(refused(&|call| call.batch = -1), INVALID_VALUE);
    assert_eq!(refused(&|call| call.alpha = null()), INVALID_VALUE);
    assert_eq!(refused(&|call| call.sides[2] = null_mut()), INVALID_VALUE);
    assert_eq!(refused(&|call| call.sides[2] = call.sides[2].wrapping_byte_add(2)), INVALID_VALUE);
    assert_eq!(refused(&|call| call.compute = 67), INVALID_VALUE);
    assert_eq!(refused(&|call| call.types[1] = 99), INVALID_VALUE);
    assert_eq!(refused(&|call| call.types[1] = gemm::R_16F), NOT_SUPPORTED);
    assert_eq!(refused(&|call| call.types = [gemm::R_16BF; 3]), SUCCESS);
    assert_eq!(
        refused(&|call| (call.types, call.compute) = ([gemm::R_16BF; 3], gemm::COMPUTE_16F)),
        NOT_SUPPORTED
    );
    // f64.
    assert_eq!(refused(&|call| call.compute = 70), NOT_SUPPORTED);
    assert_eq!(refused(&|call| call.types = [1; 3]), NOT_SUPPORTED);
    // Nothing to do needs nothing.
    assert_eq!(refused(&|call| (call.batch, call.sides) = (0, [null_mut(); 3])), SUCCESS);
    // SAFETY: a handle, which is not followed.
    assert_eq!(unsafe { [blas::destroy(handle), blas::destroy(handle)] }, [SUCCESS, NOT_INITIALIZED]);
    assert_eq!(good().status(), NOT_INITIALIZED);
}

/// A product as the program describes its own: weights turned round, f32 sums of 16-bit floats.
struct Described {
    handle: *mut c_void,
    desc: *mut c_void,
    layouts: [*mut c_void; 3],
    preference: *mut c_void,
}

impl Described {
    fn new(rows: u64, columns: u64, outputs: u64, bias: bool) -> Self {
        let mut made = [null_mut(); 6];
        // SAFETY: room for each handle; attributes of their sizes.
        unsafe {
            assert_eq!(blas_lt::create(&raw mut made[0]), SUCCESS);
            assert_eq!(blas_lt::desc_create(&raw mut made[1], gemm::COMPUTE_32F, gemm::R_32F), SUCCESS);
            let (yes, epilogue) = (1_i32, blas_lt::EPILOGUE_BIAS);
            assert_eq!(
                blas_lt::desc_set_attribute(made[1], blas_lt::DESC_TRANSA, (&raw const yes).cast(), 4),
                SUCCESS
            );
            if bias {
                assert_eq!(
                    blas_lt::desc_set_attribute(
                        made[1],
                        blas_lt::DESC_EPILOGUE,
                        (&raw const epilogue).cast(),
                        4
                    ),
                    SUCCESS
                );
            }
            let layouts = [
                (gemm::R_16BF, columns, outputs),
                (gemm::R_16BF, columns, rows),
                (gemm::R_32F, outputs, rows),
            ];
            for (i, (values, rows, columns)) in layouts.into_iter().enumerate() {
                assert_eq!(
                    blas_lt::layout_create(&raw mut made[2 + i], values, rows, columns, rows as i64),
                    SUCCESS
                );
            }
            assert_eq!(blas_lt::preference_create(&raw mut made[5]), SUCCESS);
        }
        Self { handle: made[0], desc: made[1], layouts: [made[2], made[3], made[4]], preference: made[5] }
    }

    fn suggested(&self, workspace_bytes: usize) -> Vec<blas_lt::HeuristicResult> {
        let nothing = blas_lt::HeuristicResult {
            algorithm: blas_lt::Algorithm { data: [0; 8] },
            workspace_bytes: 0,
            state: -1,
            waves: 0.0,
            reserved: [0; 4],
        };
        let (mut results, mut count) = ([nothing; 8], 0);
        let [a, b, d] = self.layouts;
        // SAFETY: the attribute has that size, and there is room for eight results.
        unsafe {
            let kind = blas_lt::PREF_MAX_WORKSPACE_BYTES;
            let set = blas_lt::preference_set_attribute(
                self.preference,
                kind,
                (&raw const workspace_bytes).cast(),
                8,
            );
            assert_eq!(set, SUCCESS);
            let status = blas_lt::algo_get_heuristic(
                self.handle,
                self.desc,
                a,
                b,
                d,
                d,
                self.preference,
                8,
                results.as_mut_ptr(),
                &raw mut count,
            );
            assert_eq!(status, SUCCESS);
        }
        results[..count as usize].to_vec()
    }

    fn checked(&self, algorithm: &blas_lt::Algorithm) -> c_int {
        let mut result = std::mem::MaybeUninit::uninit();
        let [a, b, d] = self.layouts;
        // SAFETY: an algorithm, and room for a result.
        unsafe { blas_lt::algo_check(self.handle, self.desc, a, b, d, d, algorithm, result.as_mut_ptr()) }
    }

    fn multiplied(
        &self,
        memory: [*mut c_void; 3],
        algorithm: &blas_lt::Algorithm,
        workspace: *mut c_void,
        bytes: usize,
    ) -> c_int {
        let (one, zero) = (1.0_f32, 0.0_f32);
        let [a, b, d] = self.layouts;
        // SAFETY: scalars of the type, an algorithm, and memory that callers give in the sizes of the layouts.
        unsafe {
            blas_lt::matmul(
                self.handle,
                self.desc,
                (&raw const one).cast(),
                memory[0],
                a,
                memory[1],
                b,
                (&raw const zero).cast(),
                memory[2],
                d,
                memory[2],
                d,
                algorithm,
                workspace,
                bytes,
                null_mut(),
            )
        }
    }
}

#[test]
fn algorithms_keep_to_the_workspace_and_come_from_the_heuristics() {
    use_a_device();
    let product = Described::new(8, 64, 32, false);
    let all = product.suggested(32 << 20);
    assert_eq!(all.len(), 4);
    assert!(all.iter().all(|result| result.state == SUCCESS && result.workspace_bytes <= 32 << 20));
    assert!(product.suggested(0).iter().all(|result| result.workspace_bytes == 0));
    assert!(product.suggested(usize::MAX).len() > all.len());
    // Columns that start anywhere leave the one algorithm that takes everything.
    assert_eq!(Described::new(8, 63, 32, false).suggested(32 << 20).len(), 1);

    // What is accepted may run whenever somebody waits, so its memory stays.
    let sides = [(Type::Bf16, 64 * 32), (Type::Bf16, 64 * 8), (Type::F32, 32 * 8)];
    let addresses =
        sides.map(|(values, count)| Box::leak(Box::new(Memory::new(values, &numbers(5, count)))).address());
    let workspace = vec![0_u8; (32 << 20) + 512].leak();
    let start = workspace.as_mut_ptr();
    let workspace: *mut c_void = start.wrapping_add(start.align_offset(256)).cast();
    for result in &all {
        assert_eq!(product.checked(&result.algorithm), SUCCESS);
        assert_eq!(product.multiplied(addresses, &result.algorithm, workspace, 32 << 20), SUCCESS);
    }
    let large = all.iter().find(|result| result.workspace_bytes > 0).unwrap();
    assert_eq!(
        product.multiplied(addresses, &large.algorithm, workspace, large.workspace_bytes - 1),
        INVALID_VALUE
    );
    assert_eq!(product.multiplied(addresses, &large.algorithm, null_mut(), 32 << 20), INVALID_VALUE);
    assert_eq!(
        product.multiplied(addresses, &large.algorithm, workspace.wrapping_byte_add(16), 16 << 20),
        INVALID_VALUE
    );
    // Four bytes are enough for an f32, and not for this algorithm.
    let moved = [addresses[0], addresses[1], addresses[2].wrapping_byte_add(4)];
    assert_eq!(product.multiplied(moved, &all[0].algorithm, workspace, 32 << 20), NOT_SUPPORTED);
    assert_eq!(
        product.multiplied([null_mut(), addresses[1], addresses[2]], &all[0].algorithm, workspace, 32 << 20),
        INVALID_VALUE
    );

    let mut forged = all[0].algorithm;
    forged.data[1] ^= 1;
    let empty = blas_lt::Algorithm { data: [0; 8] };
    for algorithm in [forged, empty] {
        assert_eq!(product.checked(&algorithm), INVALID_VALUE);
        assert_eq!(product.multiplied(addresses, &algorithm, workspace, 32 << 20), INVALID_VALUE);
    }
    // That of another shape will do, that of another kind will not.
    assert_eq!(Described::new(16, 128, 32, false).checked(&all[0].algorithm), SUCCESS);
    assert_eq!(Described::new(8, 64, 32, true).checked(&all[0].algorithm), NOT_SUPPORTED);
}

#[test]
fn descriptions_that_make_no_sense_are_refused() {
    let product = Described::new(8, 64, 32, false);
    let (number, wide) = (7_i32, 1_u64);
    // SAFETY: attributes of the sizes that are told, room for a handle.
    unsafe {
        let set = |kind, value, bytes| blas_lt::desc_set_attribute(product.desc, kind, value, bytes);
        assert_eq!(set(blas_lt::DESC_TRANSA, (&raw const number).cast(), 4), INVALID_VALUE);
        assert_eq!(set(blas_lt::DESC_TRANSA, (&raw const wide).cast(), 8), INVALID_VALUE);
        assert_eq!(set(blas_lt::DESC_TRANSA, null(), 4), INVALID_VALUE);
        assert_eq!(set(99, (&raw const number).cast(), 4), INVALID_VALUE);
        let mut layout = null_mut();
        assert_eq!(blas_lt::layout_create(&raw mut layout, 99, 1, 1, 1), INVALID_VALUE);
    }
    // An algorithm of its own, but depths that differ.
    let algorithm = product.suggested(0)[0].algorithm;
    let other = Described::new(8, 63, 32, false);
    let mixed = Described { layouts: [product.layouts[0], other.layouts[1], product.layouts[2]], ..product };
    assert_eq!(mixed.checked(&algorithm), INVALID_VALUE);
    // SAFETY: handles, here and below, which are not followed.
    let destroyed = unsafe { [blas_lt::desc_destroy(mixed.desc), blas_lt::desc_destroy(mixed.desc)] };
    assert_eq!(destroyed, [SUCCESS, INVALID_VALUE]);
    assert_eq!(mixed.checked(&algorithm), INVALID_VALUE);
    // SAFETY: as above.
    assert_eq!(unsafe { blas_lt::destroy(mixed.handle) }, SUCCESS);
    assert_eq!(mixed.checked(&algorithm), NOT_INITIALIZED);
}

/// The parts of a sum that algorithms differ by change only its last bits.
#[test]
fn algorithms_agree_but_for_rounding() {
    for parts in [1, 2, 4, 16, 64] {
        check_product(
            [Type::Bf16, Type::Bf16, Type::F32],
            gemm::COMPUTE_32F,
            [5, 3, 257],
            [true, false],
            [1.0, 0.0],
            parts,
            1e-5,
        );
    }
}

fn mean_and_deviation(values: &[f64]) -> (f64, f64) {
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / values.len() as f64;
    (mean, variance.sqrt())
}

#[test]
fn normal_numbers_have_their_mean_and_deviation() {
    let values: Vec<f64> = (0..100_000).map(|i| random::normal(7, i)).collect();
    let (mean, deviation) = mean_and_deviation(&values);
    assert!(mean.abs() < 0.015 && (deviation - 1.0).abs() < 0.01, "{mean} {deviation}");
    // As many lie within one and two deviations as should.
    for (limit, share) in [(1.0, 0.6827), (2.0, 0.9545)] {
        let within = values.iter().filter(|value| value.abs() < limit).count() as f64 / values.len() as f64;
        assert!((within - share).abs() < 0.01, "{within}");
    }
    // Neighbours, which come of the same pair, have nothing to do with each other.
    let together: f64 = values.as_chunks::<2>().0.iter().map(|[a, b]| a * b).sum::<f64>() / 50_000.0;
    assert!(together.abs() < 0.02, "{together}");
}

#[test]
fn uniform_numbers_are_more_than_nothing_and_at_most_one() {
    let values: Vec<f64> = (0..100_000).map(|i| random::uniform(3, i)).collect();
    let (mean, deviation) = mean_and_deviation(&values);
    assert!(values.iter().all(|value| *value > 0.0 && *value <= 1.0));
    assert!(
        (mean - 0.5).abs() < 0.005 && (deviation - 12.0_f64.powf(-0.5)).abs() < 0.005,
        "{mean} {deviation}"
    );
}

#[test]
fn seeds_decide_numbers() {
    let of = |seed| (0..100).map(|i| random::normal(seed, i).to_bits()).collect::<Vec<_>>();
    assert_eq!(of(1), of(1));
    assert_ne!(of(1), of(2));
    assert_ne!(of(0)[..50], of(0)[50..]);
}

#[test]
fn generators_refuse_what_the_library_refuses() {
    let (mut generator, mut out) = (null_mut(), [0.0_f32; 4]);
    // SAFETY: room for a handle, and for the numbers.
    unsafe {
        assert_eq!(random::create_generator(&raw mut generator, 99), random::TYPE_ERROR);
        assert_eq!(random::create_generator(&raw mut generator, 100), random::SUCCESS);
        assert_eq!(
            random::generate_normal(generator, out.as_mut_ptr(), 3, 0.0, 1.0),
            random::LENGTH_NOT_MULTIPLE
        );
        assert_eq!(
            random::generate_normal(null_mut(), out.as_mut_ptr(), 4, 0.0, 1.0),
            random::NOT_INITIALIZED
        );
        assert_eq!(random::generate_normal(generator, null_mut(), 4, 0.0, 1.0), random::LAUNCH_FAILURE);
        assert_eq!(random::generate_normal(generator, null_mut(), 0, 0.0, 1.0), random::SUCCESS);
        assert_eq!(random::set_seed(generator, 5), random::SUCCESS);
        assert_eq!(random::destroy_generator(generator), random::SUCCESS);
        assert_eq!(random::set_seed(generator, 5), random::NOT_INITIALIZED);
    }
}

#[test]
fn kernels_are_launched_as_the_compiler_writes_it() {
    use_a_device();
    let (launcher, size) = (0_u8, |x| runtime::Dim3 { x, y: 1, z: 1 });
    let function: *const c_void = (&raw const launcher).cast();
    // What is accepted may run whenever somebody waits, so its memory stays.
    let out = vec![0.0_f32; 5].leak();
    let (mut address, mut value, mut elements) = (out.as_mut_ptr().cast::<c_void>(), 3.0_f32, 5_usize);
    let mut arguments: [*mut c_void; 3] =
        [(&raw mut address).cast(), (&raw mut value).cast(), (&raw mut elements).cast()];
    // SAFETY: a name, room for handles and configurations, and the arguments of that kernel, whose memory outlives the stream's work.
    unsafe {
        let binary = runtime::register_fat_binary(null_mut());
        runtime::register_function(
            binary,
            function,
            null_mut(),
            c"fill_f32".as_ptr(),
            -1,
            null_mut(),
            null_mut(),
            null_mut(),
            null_mut(),
            null_mut(),
        );
        runtime::register_fat_binary_end(binary);
        let mut kernel = null();
        assert_eq!(runtime::get_kernel(&raw mut kernel, null()), runtime::INVALID_DEVICE_FUNCTION);
        assert_eq!(runtime::get_kernel(&raw mut kernel, function), runtime::SUCCESS);

        assert_eq!(runtime::push_call_configuration(size(2), size(3), 4, null_mut()), 0);
        let (mut grid, mut block, mut shared, mut stream) = (size(0), size(0), 0, null_mut());
        let mut pop = || {
            runtime::pop_call_configuration(&raw mut grid, &raw mut block, &raw mut shared, &raw mut stream)
        };
        assert_eq!((pop(), pop()), (runtime::SUCCESS, runtime::MISSING_CONFIGURATION));
        assert_eq!((grid, block, shared, stream.is_null()), (size(2), size(3), 4, true));

        let mut launch = |grid, block, shared| {
            runtime::launch_kernel_handle(kernel, grid, block, arguments.as_mut_ptr(), shared, null_mut())
        };
        assert_eq!(launch(size(1), size(32), 0), runtime::SUCCESS);
        assert_eq!(launch(size(1), size(1025), 0), runtime::INVALID_CONFIGURATION);
        assert_eq!(
            launch(runtime::Dim3 { x: 1, y: 65_536, z: 1 }, size(1), 0),
            runtime::INVALID_CONFIGURATION
        );
        assert_eq!(launch(size(1), size(32), 50_000), runtime::INVALID_VALUE);
        assert_eq!(runtime::func_set_attribute(function, 8, 232_448), runtime::INVALID_VALUE);
        assert_eq!(runtime::func_set_attribute(function, 8, 231_936), runtime::SUCCESS);
        assert_eq!(launch(size(1), size(32), 50_000), runtime::SUCCESS);
        assert_eq!(runtime::get_last_error(), runtime::INVALID_VALUE);
        assert_eq!(runtime::get_last_error(), runtime::SUCCESS);
        runtime::unregister_fat_binary(binary);
        assert_eq!(launch(size(1), size(32), 0), runtime::INVALID_DEVICE_FUNCTION);
    }
}

/// What another process of this program calls is told at its end, by each name once.
#[test]
fn calls_are_counted_and_told_at_the_end() {
    let file = std::env::temp_dir().join(format!("simulated-cuda-calls-{}.jsonl", std::process::id()));
    for _ in 0..2 {
        let mut again = std::process::Command::new(std::env::current_exe().unwrap());
        again
            .args(["--exact", "generators_refuse_what_the_library_refuses"])
            .env("HBMARK_SIMULATED_CALLS", &file);
        assert!(again.output().unwrap().status.success());
    }
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    assert_eq!(text.lines().count(), 2, "{text}");
    for line in text.lines() {
        assert!(line.starts_with("{\"process\":") && line.ends_with("},\"kernels\":{}}"), "{line}");
        assert!(line.contains("\"curandCreateGenerator\":2,\"curandDestroyGenerator\":1,"), "{line}");
    }
}
