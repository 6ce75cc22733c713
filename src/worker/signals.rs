//! Ctrl-C and its relatives: the first asks to stop, the second ends at once.
//!
//! Enters: SIGINT and SIGTERM. Leaves: the signal, to whoever asks or has asked to be told. It knows no run.

use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

type Callback = Box<dyn Fn(i32) + Send>;

/// The user's wish to stop.
#[derive(Clone, Default)]
pub struct Interrupts {
    signal: Arc<AtomicI32>,
    tell: Arc<Mutex<Option<Callback>>>,
}

impl std::fmt::Debug for Interrupts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Interrupts").field(&self.signal()).finish()
    }
}

impl Interrupts {
    /// Listens from now on, for the rest of the process. A write beyond a file size limit becomes an error of that write, too.
    ///
    /// # Errors
    /// When the system refuses a handler.
    pub fn listen() -> std::io::Result<Self> {
        // With any handler installed, the write itself fails and says so.
        signal_hook::flag::register(libc::SIGXFSZ, Arc::new(AtomicBool::new(false)))?;
        let mut signals = Signals::new([SIGINT, SIGTERM])?;
        let interrupts = Self::default();
        let heard = interrupts.clone();
        std::thread::Builder::new().name("signals".into()).spawn(move || {
            for signal in signals.forever() {
                heard.on_signal(signal);
            }
        })?;
        Ok(interrupts)
    }

    fn on_signal(&self, signal: i32) {
        if self.signal.swap(signal, Ordering::SeqCst) != 0 {
            crate::machine::atomic_file::remove_unfinished();
            // Without destructors: whatever made the first wish take long must not hold up the second.
            signal_hook::low_level::exit(128 + signal);
        }
        if let Some(tell) = self.tell.lock().unwrap_or_else(PoisonError::into_inner).as_ref() {
            tell(signal);
        }
    }

    /// The signal that asked to stop, if one did.
    #[must_use]
    pub fn signal(&self) -> Option<i32> {
        Some(self.signal.load(Ordering::SeqCst)).filter(|signal| *signal != 0)
    }

    /// Calls `tell` when the first signal comes.
    pub(crate) fn on_first(&self, tell: impl Fn(i32) + Send + 'static) {
        *self.tell.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(tell));
    }
}
