//! The number of threads candle uses, which it reads from the environment.

#![expect(unsafe_code, reason = "candle takes its thread count from an environment variable only")]

/// Limits candle's thread pool; to be called before any thread is started.
pub fn limit(threads: Option<usize>) {
    let Some(threads) = threads else { return };
    // SAFETY: subcommands call this first, while the process has one thread, so nothing reads the environment meanwhile.
    unsafe { std::env::set_var("RAYON_NUM_THREADS", threads.to_string()) };
}
