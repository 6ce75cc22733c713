//! SIGINT and SIGTERM: the first asks to stop, the second ends at once.
//!
//! Enters: signals. Leaves: the first signal, polled or by a callback.

use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

type Callback = Box<dyn Fn(i32) + Send>;

/// Makes a write beyond the limit on file sizes (`ulimit -f`) an error of that write, for the rest of the process; by default it ends the
/// process without a word.
pub fn survive_file_size_limit() {
    // With any handler installed, the write itself returns the error. Without one the limit is deadly, as it was before.
    let _ = signal_hook::flag::register(libc::SIGXFSZ, Arc::new(AtomicBool::new(false)));
}

/// Leaves SIGINT and SIGTERM to the supervisor, for the rest of the process. Who stops a job or a container sends them to every process of it,
/// and the end of a worker that got one first would pass for a loss. A worker ends with its supervisor, however that ends.
pub fn leave_to_supervisor() {
    for signal in [SIGINT, SIGTERM] {
        // A handler, and not "ignore", which programs that a worker starts would inherit. Without one the signal ends it, as before.
        let _ = signal_hook::flag::register(signal, Arc::new(AtomicBool::new(false)));
    }
}

/// The signals of this process.
#[derive(Clone, Default)]
pub struct Interrupts {
    signal: Arc<AtomicI32>,
    callback: Arc<Mutex<Option<Callback>>>,
}

impl std::fmt::Debug for Interrupts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Interrupts").field(&self.signal()).finish()
    }
}

impl Interrupts {
    /// Handles signals from now on, for the rest of the process.
    ///
    /// # Errors
    /// When the system refuses a handler.
    pub fn listen() -> std::io::Result<Self> {
        let mut signals = Signals::new([SIGINT, SIGTERM])?;
        let interrupts = Self::default();
        let on_signal = interrupts.clone();
        std::thread::Builder::new().name("signals".into()).spawn(move || {
            for signal in signals.forever() {
                on_signal.on_signal(signal);
            }
        })?;
        Ok(interrupts)
    }

    fn on_signal(&self, signal: i32) {
        if self.signal.swap(signal, Ordering::SeqCst) != 0 {
            crate::machine::atomic_file::remove_unfinished();
            // Without destructors: what delayed the first signal must not delay the second.
            signal_hook::low_level::exit(128 + signal);
        }
        if let Some(callback) = self.callback.lock().unwrap_or_else(PoisonError::into_inner).as_ref() {
            callback(signal);
        }
    }

    /// The signal that asked to stop, if one did.
    pub fn signal(&self) -> Option<i32> {
        Some(self.signal.load(Ordering::SeqCst)).filter(|signal| *signal != 0)
    }

    /// Calls back when the first signal comes.
    pub(crate) fn on_first(&self, callback: impl Fn(i32) + Send + 'static) {
        *self.callback.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(callback));
    }
}
