//! The CUDA kernels compiled as C++, and launches of them on the host. `kernels/emulation/` documents what is emulated.
//!
//! Enters: a kernel's name, a grid, arguments by address with their kinds, a seed. Leaves: what the kernel wrote, or why it could not run.
//! A release build holds no kernels.
#![cfg(compiled)]
#![expect(unsafe_code, reason = "calls the emulation, which is C++, and hands it addresses")]

use std::ffi::{CStr, CString, c_char, c_int, c_void};

unsafe extern "C" {
    fn hbmark_emulated_launch(
        name: *const c_char,
        grid: *const u32,
        threads: u32,
        shared_bytes: usize,
        arguments: *const *const c_void,
        kinds: *const *const c_char,
        count: u32,
        seed: u64,
        error: *mut c_char,
        error_bytes: usize,
    ) -> c_int;
    fn hbmark_emulated_without_barrier(file: *const c_char, line: c_int);
    fn hbmark_emulated_barrier(index: usize, file: *mut c_char, file_bytes: usize) -> c_int;
}

/// One launch of a kernel with a block of one dimension.
#[derive(Debug)]
pub struct Launch<'a> {
    pub kernel: &'a CStr,
    /// Blocks in x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of a block in bytes.
    pub shared_bytes: usize,
    /// Where each argument lies.
    pub arguments: &'a [*const c_void],
    /// What each argument is: `p` pointer, `f` float, `u` integer, and its size in bytes, as in `p8`.
    pub kinds: &'a [&'a CStr],
    /// Draws the order of threads and blocks.
    pub seed: u64,
}

impl Launch<'_> {
    /// Runs the kernel to its end.
    ///
    /// # Errors
    /// No such kernel, arguments of other kinds than its own, a deadlock, a failed assertion: as text.
    ///
    /// # Safety
    /// Arguments lie where it is said, and what they point to is as large as the kernel expects and used by nobody else.
    ///
    /// # Panics
    /// Where there are more arguments than kinds.
    pub unsafe fn run(&self) -> Result<(), String> {
        assert_eq!(self.arguments.len(), self.kinds.len(), "an argument has one kind");
        let kinds: Vec<*const c_char> = self.kinds.iter().map(|kind| kind.as_ptr()).collect();
        let mut error = [0u8; 256];
        // SAFETY: the emulation checks number and kinds of the arguments against the kernel's signature; strings are zero-terminated; the rest
        // is what the caller promises.
        let status = unsafe {
            hbmark_emulated_launch(
                self.kernel.as_ptr(),
                self.grid.as_ptr(),
                self.threads,
                self.shared_bytes,
                self.arguments.as_ptr(),
                kinds.as_ptr(),
                u32::try_from(kinds.len()).expect("a kernel has few arguments"),
                self.seed,
                error.as_mut_ptr().cast(),
                error.len(),
            )
        };
        if status == 0 {
            return Ok(());
        }
        Err(CStr::from_bytes_until_nul(&error).map(CStr::to_string_lossy).unwrap_or_default().into_owned())
    }
}

/// A `__syncthreads()` of the sources.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Barrier {
    file: CString,
    line: c_int,
}

impl std::fmt::Display for Barrier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let file = self.file.to_string_lossy();
        write!(f, "{}:{}", file.rsplit('/').next().unwrap_or_default(), self.line)
    }
}

impl Barrier {
    /// Those that launches of this host thread have met so far.
    pub fn met() -> Vec<Self> {
        let mut met = Vec::new();
        loop {
            let mut file = [0u8; 1024];
            // SAFETY: the emulation writes a zero-terminated string of at most the length passed.
            let line = unsafe { hbmark_emulated_barrier(met.len(), file.as_mut_ptr().cast(), file.len()) };
            let Some(file) = CStr::from_bytes_until_nul(&file).ok().filter(|_| line > 0) else { return met };
            met.push(Self { file: file.to_owned(), line });
        }
    }

    /// Runs something on this host thread as if the barrier were not in the sources.
    pub fn without<T>(&self, run: impl FnOnce() -> T) -> T {
        // SAFETY: a zero-terminated string, copied by the callee; both calls.
        unsafe { hbmark_emulated_without_barrier(self.file.as_ptr(), self.line) };
        let result = run();
        // SAFETY: as above.
        unsafe { hbmark_emulated_without_barrier(c"".as_ptr(), 0) };
        result
    }
}
