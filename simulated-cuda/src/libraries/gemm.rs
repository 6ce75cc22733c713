//! Products of matrices as cuBLAS defines them.
//!
//! Enters: column-major matrices by their addresses, types and sizes. Leaves: `D = alpha · op(A) · op(B) + beta · C (+ bias)`, summed in
//! f32, or the status with which the library refuses.

use half::{bf16, f16};

use crate::clock::Demand;

/// `cublasStatus_t`.
pub type Status = i32;
pub const SUCCESS: Status = 0;
pub const NOT_INITIALIZED: Status = 1;
pub const INVALID_VALUE: Status = 7;
pub const EXECUTION_FAILED: Status = 13;
pub const NOT_SUPPORTED: Status = 15;

/// `cudaDataType_t`.
pub const R_32F: i32 = 0;
pub const R_16F: i32 = 2;
pub const R_16BF: i32 = 14;

/// `cublasComputeType_t`.
pub const COMPUTE_16F: i32 = 64;
pub const COMPUTE_16F_PEDANTIC: i32 = 65;
pub const COMPUTE_32F: i32 = 68;
pub const COMPUTE_32F_PEDANTIC: i32 = 69;
pub const COMPUTE_32F_FAST_16F: i32 = 74;
pub const COMPUTE_32F_FAST_16BF: i32 = 75;
pub const COMPUTE_32F_FAST_TF32: i32 = 77;
pub const COMPUTE_32F_EMULATED_16BFX9: i32 = 78;

/// The values of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Type {
    F16,
    Bf16,
    F32,
}

impl Type {
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }

    /// From a `cudaDataType_t`. The library knows numbers up to 33 and multiplies only some.
    ///
    /// # Errors
    ///
    /// Another number, or a type that is not multiplied here.
    pub fn from_cuda(number: i32) -> Result<Self, Status> {
        match number {
            R_16F => Ok(Self::F16),
            R_16BF => Ok(Self::Bf16),
            R_32F => Ok(Self::F32),
            1 | 3..=13 | 15..=33 => Err(NOT_SUPPORTED),
            _ => Err(INVALID_VALUE),
        }
    }

    /// # Safety
    ///
    /// A value of the type is at the address.
    unsafe fn read(self, from: *const u8) -> f64 {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Self::F16 => from.cast::<f16>().read_unaligned().to_f64(),
                Self::Bf16 => from.cast::<bf16>().read_unaligned().to_f64(),
                Self::F32 => f64::from(from.cast::<f32>().read_unaligned()),
            }
        }
    }

    /// # Safety
    ///
    /// There is room for a value of the type at the address.
    unsafe fn write(self, to: *mut u8, value: f64) {
        // The sum is one of f32 before it is rounded to less.
        let single = value as f32;
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Self::F16 => to.cast::<f16>().write_unaligned(f16::from_f32(single)),
                Self::Bf16 => to.cast::<bf16>().write_unaligned(bf16::from_f32(single)),
                Self::F32 => to.cast::<f32>().write_unaligned(single),
            }
        }
    }
}

/// The type of alpha and beta for values of these types, or that the library has no such product.
///
/// *Source*: cuBLAS documentation 13.0, the table of `cublasGemmEx`.
///
/// # Errors
///
/// `CUBLAS_STATUS_NOT_SUPPORTED`, or `CUBLAS_STATUS_INVALID_VALUE` for a number that is not a compute type.
pub fn scale_type(compute: i32, a: Type, b: Type, c: Type) -> Result<Type, Status> {
    use Type::{Bf16, F16, F32};
    match (compute, a, b, c) {
        (COMPUTE_16F | COMPUTE_16F_PEDANTIC, F16, F16, F16) => Ok(F16),
        (COMPUTE_32F | COMPUTE_32F_PEDANTIC, F16, F16, F16 | F32) => Ok(F32),
        (COMPUTE_32F | COMPUTE_32F_PEDANTIC, Bf16, Bf16, Bf16 | F32) => Ok(F32),
        (COMPUTE_32F | COMPUTE_32F_PEDANTIC, F32, F32, F32) => Ok(F32),
        (
            COMPUTE_32F_FAST_16F
            | COMPUTE_32F_FAST_16BF
            | COMPUTE_32F_FAST_TF32
            | COMPUTE_32F_EMULATED_16BFX9,
            F32,
            F32,
            F32,
        ) => Ok(F32),
        // Among them sums in f64 and in i32, which the library knows and this does not multiply.
        (64 | 65 | 68..=75 | 77..=79, ..) => Err(NOT_SUPPORTED),
        _ => Err(INVALID_VALUE),
    }
}

/// A scalar as callers give it, on the host.
///
/// # Errors
///
/// `CUBLAS_STATUS_INVALID_VALUE` for null.
///
/// # Safety
///
/// Null, or the address of a value of the type.
pub unsafe fn scalar(scale: Type, from: *const std::ffi::c_void) -> Result<f64, Status> {
    if from.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller's promise.
    Ok(unsafe { scale.read(from.cast()) })
}

/// Where the matrices of a batch lie. Columns are `leading` values apart, matrices of a batch `stride` values.
#[derive(Debug, Clone, Copy)]
pub struct Matrix {
    /// The address of the first value on the device, which is the host.
    pub address: usize,
    pub values: Type,
    pub leading: i64,
    pub stride: i64,
}

impl Matrix {
    /// Whether the address is that of a value, and not null.
    #[must_use]
    pub fn is_aligned(&self, bytes: usize) -> bool {
        self.address != 0 && self.address.is_multiple_of(bytes)
    }

    fn at(&self, batch: i64, row: i64, column: i64) -> usize {
        let values = batch * self.stride + column * self.leading + row;
        self.address.wrapping_add_signed(values as isize * self.values.bytes() as isize)
    }
}

/// A product, checked.
#[derive(Debug, Clone, Copy)]
pub struct Gemm {
    /// Rows and columns of D, and the length of the sums.
    pub m: i64,
    pub n: i64,
    pub k: i64,
    pub transpose_a: bool,
    pub transpose_b: bool,
    pub alpha: f64,
    pub beta: f64,
    pub a: Matrix,
    pub b: Matrix,
    pub c: Matrix,
    pub d: Matrix,
    /// Values, of D's type, that are added to each column.
    pub bias: Option<usize>,
    pub batch: i64,
    pub compute: i32,
    /// Parts into which sums are split, each added up by itself: what distinguishes algorithms.
    pub parts: usize,
}

impl Gemm {
    /// Whether sizes and leading dimensions agree, and nothing that is read or written is null or lies between two values.
    ///
    /// # Errors
    ///
    /// `CUBLAS_STATUS_INVALID_VALUE`.
    pub fn check(&self) -> Result<(), Status> {
        let rows = |transposed, plain: i64, other: i64| if transposed { other } else { plain }.max(1);
        let sizes = [self.m, self.n, self.k, self.batch];
        let fits = sizes.iter().all(|size| *size >= 0)
            && self.a.leading >= rows(self.transpose_a, self.m, self.k)
            && self.b.leading >= rows(self.transpose_b, self.k, self.n)
            && self.c.leading >= self.m.max(1)
            && self.d.leading >= self.m.max(1);
        if !fits {
            return Err(INVALID_VALUE);
        }
        if self.is_empty() {
            return Ok(());
        }
        let there = |matrix: &Matrix| matrix.is_aligned(matrix.values.bytes());
        let inputs = self.k == 0 || self.alpha == 0.0 || (there(&self.a) && there(&self.b));
        let bias = self.bias.is_none_or(|bias| bias != 0 && bias.is_multiple_of(self.d.values.bytes()));
        if inputs && bias && there(&self.d) && (self.beta == 0.0 || there(&self.c)) {
            Ok(())
        } else {
            Err(INVALID_VALUE)
        }
    }

    /// Whether there is nothing to write.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.m == 0 || self.n == 0 || self.batch == 0
    }

    #[must_use]
    pub fn flops(&self) -> u64 {
        2 * [self.m, self.n, self.k, self.batch].iter().map(|size| size.unsigned_abs()).product::<u64>()
    }

    /// Bytes that have to be moved: inputs once, what is added to, and what is written.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let matrix =
            |rows: i64, columns: i64, values: Type| (rows * columns).unsigned_abs() * values.bytes() as u64;
        // A matrix that all of a batch share is moved once.
        let input = |rows, columns, side: &Matrix| {
            matrix(rows, columns, side.values) * if side.stride == 0 { 1 } else { self.batch.unsigned_abs() }
        };
        let added = if self.beta == 0.0 {
            0
        } else {
            matrix(self.m, self.n, self.c.values) * self.batch.unsigned_abs()
        };
        let out = matrix(self.m, self.n, self.d.values) * self.batch.unsigned_abs();
        input(self.m, self.k, &self.a) + input(self.k, self.n, &self.b) + added + out
    }

    /// What it asks of a device.
    #[must_use]
    pub fn demand(&self) -> Demand {
        let (bytes, flops) = (self.bytes(), self.flops());
        match self.a.values {
            Type::F16 | Type::Bf16 => Demand { bytes, tensor_flops: flops, ..Demand::default() },
            Type::F32 => Demand { bytes, f32_flops: flops, ..Demand::default() },
        }
    }

    /// Multiplies.
    ///
    /// # Errors
    ///
    /// Products of a batch that are written to the same place, which the library does not refuse and whose result it does not define.
    ///
    /// # Safety
    ///
    /// The product was checked, and the matrices are memory of the sizes that they have in it; D overlaps neither A nor B.
    pub unsafe fn run(&self) -> Result<(), String> {
        if self.is_empty() {
            return Ok(());
        }
        if self.batch > 1 && self.d.stride.abs() < (self.n - 1) * self.d.leading + self.m {
            return Err(format!(
                "a batch of {} products of {} by {} overlaps, {} values apart",
                self.batch, self.m, self.n, self.d.stride
            ));
        }
        for batch in 0..self.batch {
            // SAFETY: the caller's promise.
            unsafe { self.run_one(batch) };
        }
        Ok(())
    }

    /// # Safety
    ///
    /// As for [`Self::run`].
    unsafe fn run_one(&self, batch: i64) {
        let k = if self.alpha == 0.0 { 0 } else { self.k };
        let length = k as usize;
        // SAFETY: the caller's promise, for both.
        let rows = unsafe { self.lines(&self.a, batch, self.m, k, self.transpose_a) };
        // SAFETY: as above.
        let columns = unsafe { self.lines(&self.b, batch, self.n, k, !self.transpose_b) };
        let sums = products(&rows, &columns, length, self.parts);
        for column in 0..self.n {
            for row in 0..self.m {
                // Nothing is summed where the matrices have no columns.
                let sum = if length == 0 { 0.0 } else { f64::from(sums[(column * self.m + row) as usize]) };
                let mut value = self.alpha * sum;
                // SAFETY: within C, within the bias, and within D, by the caller's promise. C is not read where nothing is added.
                unsafe {
                    if self.beta != 0.0 {
                        value += self.beta * self.c.values.read(self.c.at(batch, row, column) as *const u8);
                    }
                    if let Some(bias) = self.bias {
                        value +=
                            self.d.values.read((bias + row as usize * self.d.values.bytes()) as *const u8);
                    }
                    self.d.values.write(self.d.at(batch, row, column) as *mut u8, value);
                }
            }
        }
    }

    /// The rows of a side whose columns are summed over, each in one piece. `across` tells that a line is a column in memory.
    ///
    /// # Safety
    ///
    /// As for [`Self::run`].
    unsafe fn lines(&self, side: &Matrix, batch: i64, lines: i64, k: i64, across: bool) -> Vec<f32> {
        let mut values = Vec::with_capacity((lines * k) as usize);
        for line in 0..lines {
            for i in 0..k {
                let (row, column) = if across { (i, line) } else { (line, i) };
                // SAFETY: within the matrix, by the caller's promise.
                let value = unsafe { side.values.read(side.at(batch, row, column) as *const u8) };
                values.push(rounded(value, self.compute) as f32);
            }
        }
        values
    }
}

/// An input as the tensor cores take it.
fn rounded(value: f64, compute: i32) -> f64 {
    match compute {
        COMPUTE_32F_FAST_16F => f16::from_f64(value).to_f64(),
        COMPUTE_32F_FAST_16BF => bf16::from_f64(value).to_f64(),
        COMPUTE_32F_FAST_TF32 if value.is_finite() => {
            // To 10 bits, halves away from zero. *Source*: PTX ISA, `cvt.rna.tf32.f32`.
            f64::from(f32::from_bits((value as f32).to_bits().wrapping_add(0x1000) & !0x1fff))
        }
        _ => value,
    }
}

/// The sums of products of all lines of both sides, each of so many parts: `[line of right][line of left]`.
fn products(left: &[f32], right: &[f32], length: usize, parts: usize) -> Vec<f32> {
    if length == 0 {
        return Vec::new();
    }
    let (m, n) = (right.len() / length, left.len() / length);
    let mut sums = vec![0.0; m * n];
    let part = length.div_ceil(parts.max(1));
    let stride = length as isize;
    for start in (0..length).step_by(part) {
        let values = part.min(length - start);
        // SAFETY: there are m and n lines of so many values, and each part ends before its line does; the sums are m × n.
        unsafe {
            let (right, left) = (right[start..].as_ptr(), left[start..].as_ptr());
            let sums = sums.as_mut_ptr();
            matrixmultiply::sgemm(
                m, values, n, 1.0, right, stride, 1, left, 1, stride, 1.0, sums, n as isize, 1,
            );
        }
    }
    sums
}
