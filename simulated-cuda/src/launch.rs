//! A launch as the driver and the runtime library take it.
//!
//! Enters: a kernel's name, sizes, and the addresses of the arguments. Leaves: work for a stream with the values of the arguments as they
//! are at the call, or the `CUresult` with which a device refuses the launch.

use std::ffi::{CString, c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

use crate::calls;
use crate::clock::Demand;
use crate::kernels::{self, Launch};
use crate::stream::{Begin, Finish, Work};

/// `CUDA_ERROR_INVALID_VALUE`.
pub const INVALID_VALUE: c_int = 1;
/// `CUDA_ERROR_NOT_FOUND`.
pub const NOT_FOUND: c_int = 500;

/// Bytes of static shared memory that each kernel has here: more than any of ours.
pub const STATIC_SHARED_BYTES: usize = 512;
/// Bytes of dynamic shared memory that a kernel may take without having asked for more.
pub const SHARED_BYTES: usize = (48 << 10) - STATIC_SHARED_BYTES;
/// Bytes that it may ask for. *Source*: CUDA C++ Programming Guide, technical specifications, compute capability 9.0.
pub const MOST_SHARED_BYTES: usize = (227 << 10) - STATIC_SHARED_BYTES;

/// Blocks along each side, and threads along each side and in all. *Source*: as above.
const MOST_BLOCKS: [u32; 3] = [i32::MAX as u32, 65_535, 65_535];
const MOST_THREADS: [u32; 3] = [1_024, 1_024, 64];
const MOST_THREADS_IN_ALL: u64 = 1_024;

/// Sizes of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory.
    pub shared_bytes: usize,
    /// As many as the kernel may have: [`SHARED_BYTES`] unless it was given more.
    pub shared_limit: usize,
}

impl Config {
    /// Whether a device can have such a grid of such blocks.
    #[must_use]
    pub fn grid_fits(&self) -> bool {
        let within = |sizes: [u32; 3], most: [u32; 3]| {
            sizes.iter().zip(most).all(|(size, most)| (1..=most).contains(size))
        };
        within(self.grid, MOST_BLOCKS)
            && within(self.block, MOST_THREADS)
            && self.block.iter().map(|side| u64::from(*side)).product::<u64>() <= MOST_THREADS_IN_ALL
    }

    /// Whether the kernel may have so much shared memory.
    #[must_use]
    pub fn shared_fits(&self) -> bool {
        self.shared_bytes <= self.shared_limit.min(MOST_SHARED_BYTES)
    }
}

/// Checks the sizes against those of a device of compute capability 9.0.
///
/// # Errors
///
/// `CUDA_ERROR_INVALID_VALUE`, as `cuLaunchKernel` has it.
pub fn check(config: &Config) -> Result<(), c_int> {
    if config.grid_fits() && config.shared_fits() { Ok(()) } else { Err(INVALID_VALUE) }
}

/// The launch as work of a stream. Each time the work runs, the kernel is counted, and its threads take turns by another seed. A dependent
/// launch may begin while the kernel before it runs.
///
/// # Errors
///
/// A `CUresult`: what [`check`] says, or that there is no such kernel, or no argument where there must be one.
///
/// # Safety
///
/// `arguments` is null or holds as many addresses as the kernel has parameters, each null or that of a value of the parameter's size.
/// Addresses among the values are those of memory that holds what the kernel reads and writes whenever the work runs.
pub unsafe fn work(
    name: &str,
    config: &Config,
    arguments: *const *mut c_void,
    dependent: bool,
) -> Result<Work, c_int> {
    check(config)?;
    let symbol = CString::new(name).map_err(|_| INVALID_VALUE)?;
    let parameters = kernels::parameters(&symbol).ok_or(NOT_FOUND)?;
    if arguments.is_null() && !parameters.is_empty() {
        return Err(INVALID_VALUE);
    }
    let mut values = Vec::with_capacity(parameters.len());
    for (i, parameter) in parameters.iter().enumerate() {
        // SAFETY: as many addresses as parameters, by the caller's promise.
        let address = unsafe { *arguments.add(i) };
        if address.is_null() {
            return Err(INVALID_VALUE);
        }
        // Words of 16 bytes are aligned for every value.
        let mut value = vec![0u128; parameter.bytes.div_ceil(size_of::<u128>())];
        // SAFETY: the value has as many bytes, by the caller's promise, and so has its copy.
        unsafe {
            std::ptr::copy_nonoverlapping(address.cast::<u8>(), value.as_mut_ptr().cast(), parameter.bytes)
        };
        values.push(value);
    }
    let kernel = Arc::new(Bound { name: symbol, text: name.to_owned(), config: *config, values });
    let begin: Begin = Arc::new(move |slot, previous_ended| {
        let (launch, addresses) = kernel.next_launch();
        // SAFETY: the values are copies of the parameters' sizes; the caller promised the memory that they point to. A kernel reads its
        // arguments and writes none of them. What is left of the kernel keeps the values and their addresses.
        let waiting = unsafe { kernels::begin(&kernel.name, &launch, &addresses, slot, previous_ended) }?;
        let kept = (kernel.clone(), Addresses(addresses));
        Ok(waiting.map(|waiting| -> Finish {
            Box::new(move || {
                let _ = &kept;
                waiting.go_on()
            })
        }))
    });
    let whole = begin.clone();
    let run = move || match whole(0, true)? {
        None => Ok(()),
        Some(_) => Err("waits for another device".into()),
    };
    Ok(Work { begin: Some(begin), dependent, ..Work::new(name, Demand::default(), Arc::new(run)) })
}

/// A kernel with its arguments.
struct Bound {
    name: CString,
    text: String,
    config: Config,
    values: Vec<Vec<u128>>,
}

/// Addresses of values that are kept beside them.
struct Addresses(#[expect(dead_code, reason = "kept for the kernel that reads them")] Vec<*mut c_void>);
// SAFETY: nobody reads through them but the kernel, which runs on one thread at a time.
unsafe impl Send for Addresses {}

impl Bound {
    fn next_launch(&self) -> (Launch, Vec<*mut c_void>) {
        calls::launched(&self.text);
        let seed = next_seed();
        let Config { grid, block, shared_bytes, .. } = self.config;
        let launch = Launch { grid, block, shared_bytes, resident_blocks: 1 + (seed % 3) as u32, seed };
        (launch, self.values.iter().map(|value| value.as_ptr().cast_mut().cast()).collect())
    }
}

/// Numbers that differ from launch to launch, and from one `HBMARK_SIMULATED_SEED` to the next.
fn next_seed() -> u64 {
    static BASE: LazyLock<u64> = LazyLock::new(|| {
        let text = std::env::var("HBMARK_SIMULATED_SEED").unwrap_or_default();
        text.trim().parse().unwrap_or(0)
    });
    static LAUNCHES: AtomicU64 = AtomicU64::new(0);
    mix(*BASE ^ mix(LAUNCHES.fetch_add(1, Ordering::Relaxed)))
}

/// One step of splitmix64. *Source*: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
pub(crate) fn mix(state: u64) -> u64 {
    let mut z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Config =
        Config { grid: [1, 1, 1], block: [1, 1, 1], shared_bytes: 0, shared_limit: SHARED_BYTES };

    #[test]
    fn grids_that_a_device_cannot_have_are_refused() {
        assert_eq!(check(&ONE), Ok(()));
        assert_eq!(
            check(&Config { grid: [i32::MAX as u32, 65_535, 65_535], block: [16, 1, 64], ..ONE }),
            Ok(())
        );
        for grid in [[0, 1, 1], [1 << 31, 1, 1], [1, 65_536, 1], [1, 1, 65_536], [1, 1, 0]] {
            assert_eq!(check(&Config { grid, ..ONE }), Err(INVALID_VALUE), "{grid:?}");
        }
        for block in [[0, 1, 1], [1_025, 1, 1], [33, 32, 1], [1, 1, 65]] {
            assert_eq!(check(&Config { block, ..ONE }), Err(INVALID_VALUE), "{block:?}");
        }
    }

    #[test]
    fn shared_memory_is_what_was_asked_for_and_no_more_than_there_is() {
        let with = |shared_bytes, shared_limit| check(&Config { shared_bytes, shared_limit, ..ONE });
        assert_eq!(with(SHARED_BYTES, SHARED_BYTES), Ok(()));
        assert_eq!(with(SHARED_BYTES + 1, SHARED_BYTES), Err(INVALID_VALUE));
        assert_eq!(with(MOST_SHARED_BYTES, MOST_SHARED_BYTES), Ok(()));
        assert_eq!(with(MOST_SHARED_BYTES + 1, usize::MAX), Err(INVALID_VALUE));
    }

    #[test]
    fn arguments_are_those_of_the_call() {
        // fill_f32(buf, value, numel)
        let (mut out, mut value, mut elements) = ([0.0_f32; 5], 3.0_f32, 5_usize);
        let mut address: *mut c_void = out.as_mut_ptr().cast();
        let arguments: [*mut c_void; 3] =
            [(&raw mut address).cast(), (&raw mut value).cast(), (&raw mut elements).cast()];
        let config = Config { block: [32, 1, 1], ..ONE };
        // SAFETY: three arguments of the kernel's sizes, and memory for as many elements.
        let work = unsafe { work("fill_f32", &config, arguments.as_ptr(), false) }.unwrap();
        value = 4.0;
        elements = 0;
        (work.run)().unwrap();
        assert_eq!((out, value, elements), ([3.0; 5], 4.0, 0));
    }

    #[test]
    fn only_a_dependent_launch_may_begin_before_the_kernel_in_front_of_it_has_ended() {
        let (mut address, mut value, mut elements) = (std::ptr::null_mut::<c_void>(), 3.0_f32, 0_usize);
        let arguments: [*mut c_void; 3] =
            [(&raw mut address).cast(), (&raw mut value).cast(), (&raw mut elements).cast()];
        for dependent in [false, true] {
            // SAFETY: three arguments of the kernel's sizes; it is not run.
            let work = unsafe { work("fill_f32", &ONE, arguments.as_ptr(), dependent) }.unwrap();
            assert_eq!(work.dependent, dependent);
        }
    }

    #[test]
    fn what_is_not_there_is_refused() {
        // SAFETY: nothing is read: there is no such kernel, and then no argument.
        let (kernel, arguments) = unsafe {
            (
                work("no_kernel", &ONE, std::ptr::null(), false),
                work("fill_f32", &ONE, std::ptr::null(), false),
            )
        };
        assert_eq!(kernel.unwrap_err(), NOT_FOUND);
        assert_eq!(arguments.unwrap_err(), INVALID_VALUE);
    }
}
