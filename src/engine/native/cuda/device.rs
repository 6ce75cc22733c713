//! What the native engine needs of a GPU.
//!
//! Enters: addresses, kernels by name, arguments. Leaves: work in order on one stream. Two things are devices: a GPU through its driver,
//! and [`super::emulator`], which runs the same kernels on the host.

use super::device_matrix::KernelFormat;
use crate::engine::{EngineError, Timeline};

/// Blocks that a grid may have along y and along z; x may have 2^31 less one. *Source*: CUDA programming guide, compute capabilities.
pub const MAX_GRID_YZ: usize = 65_535;

/// What the sides of a product are aligned to, in bytes: algorithms that the library suggests may ask for as much. *Source*: cuBLAS documentation,
/// `CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES` and its like, which are 256 where they are not set.
pub const GEMM_ALIGNMENT: usize = 256;

/// One argument of a kernel, by value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Argument {
    /// Device memory.
    Address(u64),
    U64(u64),
    I32(i32),
    F32(f32),
}

/// A kernel with its arguments.
#[derive(Debug, Clone, PartialEq)]
pub struct KernelLaunch {
    /// The symbol, as in `kernels/*.cu`.
    pub kernel: String,
    pub grid: [u32; 3],
    pub threads: u32,
    /// Dynamic shared memory.
    pub shared_bytes: u32,
    pub arguments: Vec<Argument>,
}

/// A product of rows with a matrix, of 16-bit floats with f32 sums: `out[row][o] = Σ_k weights[o][k] · inputs[row][k] + bias[o]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Gemm {
    /// Of inputs and weights: bf16 or f16.
    pub format: KernelFormat,
    pub rows: usize,
    pub outputs: usize,
    /// Of a row of inputs and a row of weights as they lie in memory, padding included.
    pub columns: usize,
    /// Whether there is a bias, f32.
    pub bias: bool,
    /// Whether the sums are added to what is there.
    pub accumulate: bool,
}

/// Where the sides of a product lie, each row behind the last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GemmOperands {
    pub inputs: u64,
    pub weights: u64,
    /// 0 for none.
    pub bias: u64,
    pub out: u64,
}

impl GemmOperands {
    /// The side that is not aligned as the library may assume it to be, by its name and address.
    pub fn misaligned(&self) -> Option<(&'static str, u64)> {
        let sides = [("inputs", self.inputs), ("weights", self.weights), ("sums", self.out)];
        sides.into_iter().find(|(_, address)| !address.is_multiple_of(GEMM_ALIGNMENT as u64))
    }
}

/// A GPU, or what passes for one. Everything is enqueued in order; only [`download`](Self::download) and
/// [`synchronise`](Self::synchronise) wait.
pub trait Device: std::fmt::Debug + Send {
    /// An allocation, aligned to at least 256 bytes and freed when dropped, behind the work that uses it.
    type Memory: std::fmt::Debug + Send;
    /// A recorded sequence of launches.
    type Graph: std::fmt::Debug + Send;

    /// As in results: `cuda:0`.
    fn name(&self) -> &str;
    /// How many blocks can run beside each other is a multiple of this.
    fn multiprocessors(&self) -> u32;
    /// Shared memory that a block can have if it asks.
    fn shared_bytes(&self) -> usize;
    /// Marks on the stream of this device.
    fn timeline(&self) -> Box<dyn Timeline + Send>;

    /// Memory with undefined contents.
    fn allocate(&mut self, bytes: usize) -> Result<Self::Memory, EngineError>;
    /// Memory with undefined contents that the other devices of a group reach by its address.
    fn allocate_shared(&mut self, bytes: usize) -> Result<Self::Memory, EngineError> {
        self.allocate(bytes)
    }
    /// Where kernels find it.
    fn address(memory: &Self::Memory) -> u64;
    /// Its size.
    fn bytes(memory: &Self::Memory) -> usize;
    /// Copies to the device, from a place in the memory on. The source may change when this returns.
    fn upload(&mut self, to: &Self::Memory, offset: usize, source: &[u8]) -> Result<(), EngineError>;
    /// Waits, and copies from the device.
    fn download(&mut self, from: &Self::Memory, offset: usize, target: &mut [u8]) -> Result<(), EngineError>;

    /// Enqueues a kernel, or records it.
    fn launch(&mut self, launch: &KernelLaunch) -> Result<(), EngineError>;
    /// Enqueues a product as the library of the device makes it, or records it.
    fn multiply(&mut self, product: &Gemm, operands: &GemmOperands) -> Result<(), EngineError>;
    /// From here on launches are recorded and not run.
    fn begin_capture(&mut self) -> Result<(), EngineError>;
    /// What was recorded.
    fn end_capture(&mut self) -> Result<Self::Graph, EngineError>;
    /// Enqueues what was recorded.
    fn replay(&mut self, graph: &Self::Graph) -> Result<(), EngineError>;
    /// Waits for everything enqueued.
    fn synchronise(&mut self) -> Result<(), EngineError>;
}
