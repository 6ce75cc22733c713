//! Kernels by their names, run on the host.
//!
//! Enters: the name that a program launches by, the addresses of the arguments, and sizes. Leaves: what the kernel wrote, or a text that says why it
//! could not run: no such kernel, a deadlock, a failed assertion, an instruction that is not emulated. `kernels/emulation/` documents what is
//! emulated.

use std::cell::Cell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::Once;

use crate::clock::Demand;

unsafe extern "C" {
    fn hbmark_emulated_launch_raw(
        name: *const c_char,
        grid: *const u32,
        block: *const u32,
        shared_bytes: usize,
        arguments: *const *mut c_void,
        resident_blocks: u32,
        seed: u64,
        slot: u32,
        previous_ended: c_int,
        error: *mut c_char,
        error_bytes: usize,
    ) -> c_int;
    fn hbmark_emulated_parameters(name: *const c_char, count: *mut u32) -> *const *const c_char;
    fn hbmark_emulated_name(index: usize) -> *const c_char;
    fn hbmark_emulated_finish(slot: u32, error: *mut c_char, error_bytes: usize) -> c_int;
    fn hbmark_emulated_fail(text: *const c_char) -> !;
    fn hbmark_emulated_asked(
        slot: u32,
        tensor_flops: *mut u64,
        l2_bytes: *mut u64,
        clock_ns: *mut u64,
        meets: *mut u64,
    );
    fn hbmark_accesses_device(index: u32, base: usize, bytes: usize);
    fn hbmark_accesses_watch(index: u32, peers: u32, slot: u32);
    fn hbmark_accesses_take(slot: u32, read: *mut u64, written: *mut u64, of_peers: *mut u64);
}

thread_local! {
    /// Whether this thread runs a kernel.
    static IN_KERNEL: Cell<bool> = const { Cell::new(false) };
}

/// A kernel that touches what it may not ends with an error, as on a device. The rest of the process dies of it as ever.
extern "C" fn on_illegal_address(signal: c_int, information: *mut libc::siginfo_t, _: *mut c_void) {
    if !IN_KERNEL.get() {
        // SAFETY: the default action is put back; the access is made again when this returns.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
        return;
    }
    // SAFETY: the kernel gives this with SA_SIGINFO.
    let address = unsafe { (*information).si_addr() } as usize;
    let mut text = *b"illegal address 0x0000000000000000\0";
    for (digit, at) in (0..16).zip((18..34).rev()) {
        text[at] = b"0123456789abcdef"[address >> (4 * digit) & 15];
    }
    // SAFETY: zero-terminated. The signal came from the access itself, so that no lock or allocation is half done; the thread of the
    // kernel is left where it is.
    unsafe { hbmark_emulated_fail(text.as_ptr().cast()) }
}

fn watch_addresses() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: all zero is a valid action; the handler is one for SA_SIGINFO. The handler does not return to the access, so its signal must
        // not stay blocked.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_illegal_address as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER;
            libc::sigaction(libc::SIGSEGV, &raw const action, std::ptr::null_mut());
            libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut());
        }
    });
}

/// Takes note of the addresses of a device.
pub fn add_device(index: usize, base: usize, bytes: usize) {
    // SAFETY: the addresses are only compared.
    unsafe { hbmark_accesses_device(index as u32, base, bytes) }
}

/// From now on counts, for a slot, what kernels of a device touch of its memory and of that of its peers, a bit for each; other devices' is not theirs.
pub fn watch(device: usize, peers: u32, slot: u32) {
    // SAFETY: the addresses are only compared.
    unsafe { hbmark_accesses_watch(device as u32, peers, slot) }
}

/// What the kernel of a slot asked of the device that is watched, since the last call; nothing where none ran.
#[must_use]
pub fn demand(slot: u32) -> Demand {
    let (mut read, mut written, mut meets) = (0, 0, 0);
    let mut demand = Demand::default();
    // SAFETY: places for numbers.
    unsafe {
        hbmark_accesses_take(slot, &raw mut read, &raw mut written, &raw mut demand.peer_bytes);
        hbmark_emulated_asked(
            slot,
            &raw mut demand.tensor_flops,
            &raw mut demand.l2_bytes,
            &raw mut demand.clock_ns,
            &raw mut meets,
        );
    }
    Demand { bytes: read + written, meets: meets > 0, ..demand }
}

/// What a kernel takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parameter {
    /// `p` an address, `f` a float, `u` an integer, `s` a structure or a float of 16 or 8 bits.
    pub kind: u8,
    pub bytes: usize,
}

/// The parameters of a kernel, whose name may be a mangled one, or none where there is no such kernel.
#[must_use]
pub fn parameters(name: &CStr) -> Option<Vec<Parameter>> {
    let mut count = 0;
    // SAFETY: a zero-terminated string; the count is written where there is a kernel.
    let kinds = unsafe { hbmark_emulated_parameters(name.as_ptr(), &raw mut count) };
    if kinds.is_null() {
        return None;
    }
    // SAFETY: as many strings, which live as long as the program.
    let kinds = unsafe { std::slice::from_raw_parts(kinds, count as usize) };
    let parse = |kind: &*const c_char| {
        // SAFETY: as above, zero-terminated.
        let text = unsafe { CStr::from_ptr(*kind) }.to_str().expect("a letter and a number");
        Parameter { kind: text.as_bytes()[0], bytes: text[1..].parse().expect("a letter and a number") }
    };
    Some(kinds.iter().map(parse).collect())
}

/// The names of all kernels.
#[must_use]
pub fn names() -> Vec<String> {
    // SAFETY: null or a zero-terminated string that lives as long as the program.
    let name = |index| unsafe {
        let name = hbmark_emulated_name(index);
        (!name.is_null()).then(|| CStr::from_ptr(name).to_string_lossy().into_owned())
    };
    (0..).map_while(name).collect()
}

/// How a kernel is launched.
#[derive(Debug, Clone, Copy)]
pub struct Launch {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    /// Bytes of shared memory beside what the kernel declares.
    pub shared_bytes: usize,
    /// Blocks whose threads take turns, at most 3.
    pub resident_blocks: u32,
    /// Draws which thread runs next.
    pub seed: u64,
}

/// A kernel that was begun, and waits for the one before or for another device.
#[derive(Debug)]
pub struct Waiting {
    name: CString,
    slot: u32,
}

impl Waiting {
    /// Runs it on: the kernel before has ended. Whether it is at its end; it waits for another device otherwise.
    ///
    /// # Errors
    /// As [`begin`].
    pub fn go_on(&self) -> Result<bool, String> {
        // SAFETY: the slot has a kernel that waits, whose arguments the caller of `begin` keeps.
        answer(&self.name, |text, bytes| unsafe { hbmark_emulated_finish(self.slot, text, bytes) })
            .map(|waits| !waits)
    }
}

/// Calls the emulation, which writes a text where it fails; whether a kernel waits.
fn answer(name: &CStr, call: impl FnOnce(*mut c_char, usize) -> c_int) -> Result<bool, String> {
    let mut error = [0u8; 256];
    watch_addresses();
    IN_KERNEL.set(true);
    let status = call(error.as_mut_ptr().cast(), error.len());
    IN_KERNEL.set(false);
    if status != 1 {
        return Ok(status > 1);
    }
    let text = CStr::from_bytes_until_nul(&error).map(CStr::to_string_lossy).unwrap_or_default();
    Err(format!("{}: {text}", name.to_string_lossy()))
}

/// Begins a kernel in a slot of its own; none where it is at its end.
///
/// # Errors
/// A text that says why it could not run.
///
/// # Safety
///
/// There are as many arguments as the kernel has parameters, and each address is that of a value of the parameter's size, which lives until the kernel
/// is at its end. Addresses among the values are those of memory that holds what the kernel reads and writes.
pub unsafe fn begin(
    name: &CStr,
    launch: &Launch,
    arguments: &[*mut c_void],
    slot: u32,
    previous_ended: bool,
) -> Result<Option<Waiting>, String> {
    // SAFETY: the caller's promise; the strings are zero-terminated, and the error's length is given.
    let waits = answer(name, |text, bytes| unsafe {
        hbmark_emulated_launch_raw(
            name.as_ptr(),
            launch.grid.as_ptr(),
            launch.block.as_ptr(),
            launch.shared_bytes,
            arguments.as_ptr(),
            launch.resident_blocks,
            launch.seed,
            slot,
            previous_ended.into(),
            text,
            bytes,
        )
    })?;
    Ok(waits.then(|| Waiting { name: name.to_owned(), slot }))
}

/// Runs a kernel to its end, which waits for nothing.
///
/// # Errors
/// As [`begin`].
///
/// # Safety
///
/// As for [`begin`].
pub unsafe fn launch(name: &CStr, launch: &Launch, arguments: &[*mut c_void]) -> Result<(), String> {
    // SAFETY: the caller's promise.
    match unsafe { begin(name, launch, arguments, 0, true) }? {
        None => Ok(()),
        Some(_) => Err(format!("{}: waits for another device", name.to_string_lossy())),
    }
}

/// A name as the functions here take it.
///
/// # Panics
///
/// On a zero in it.
#[must_use]
pub fn name(text: &str) -> CString {
    CString::new(text).expect("a symbol has no zero")
}
