//! A fuzzer for stable Rust: blind mutations of the seeds, with limits on memory and time.
//!
//! `cargo run --bin drive -- NAME|all SECONDS [SEED]`. An input that panics, takes too much memory or too long is saved under
//! `fuzz/found/`, and the exit status is not 0. The run stops as soon as the file named in `FUZZ_STOP_FILE` exists.
//! `drive corpus NAME DIR` writes the initial corpus to a folder, for other fuzzers.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hbmark_fuzz::allocator::{CountingAllocator, peak_of};
use hbmark_fuzz::inputs;
use hbmark_fuzz::mutate::{Random, mutate};
use hbmark_fuzz::targets::{ALLOWANCE, FuzzTarget};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// The longest time of one input: a hundred times that of the slowest seed.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Time of one target before the next has its turn.
const TURN: Duration = Duration::from_secs(20);

/// The input under test, for the watchdog.
static CURRENT: Mutex<Option<(&'static str, Vec<u8>)>> = Mutex::new(None);
/// Inputs tried, so that the watchdog sees progress.
static TRIED: AtomicU64 = AtomicU64::new(0);

#[derive(Debug, Default, Clone, Copy)]
struct Tally {
    tried: u64,
    accepted: u64,
    peak: usize,
    slowest: Duration,
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [word, name, folder] = arguments.as_slice()
        && word == "corpus"
    {
        return write_corpus(name, Path::new(folder));
    }
    let [name, seconds, rest @ ..] = arguments.as_slice() else { usage() };
    let targets: Vec<&FuzzTarget> =
        hbmark_fuzz::all().filter(|target| name == "all" || target.name == name).collect();
    let (Ok(seconds), false) = (seconds.parse(), targets.is_empty()) else { usage() };
    let seed = rest.first().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    std::thread::spawn(watchdog);
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let stop = std::env::var_os("FUZZ_STOP_FILE").map(PathBuf::from);
    let end = Instant::now() + Duration::from_secs(seconds);
    let mut random = Random::new(seed);
    let mut tallies = vec![Tally::default(); targets.len()];
    let corpora: Vec<Vec<Vec<u8>>> = targets.iter().map(|target| corpus(target)).collect();
    let mut failed = false;
    'all: loop {
        for ((target, corpus), tally) in targets.iter().zip(&corpora).zip(&mut tallies) {
            let turn = end.min(Instant::now() + TURN);
            while Instant::now() < turn {
                if Instant::now() >= end || stop.as_ref().is_some_and(|file| file.exists()) {
                    break 'all;
                }
                let input = next(corpus, target, &mut random);
                failed |= !attempt(target, input, scratch.path(), tally);
            }
        }
        if Instant::now() >= end {
            break;
        }
    }
    println!("{:<14} {:>10} {:>10} {:>10} {:>10}", "target", "tried", "accepted", "peak MiB", "slowest");
    for (target, tally) in targets.iter().zip(&tallies) {
        let Tally { tried, accepted, peak, slowest } = tally;
        println!(
            "{:<14} {tried:>10} {accepted:>10} {:>10} {:>8} ms",
            target.name,
            peak >> 20,
            slowest.as_millis()
        );
    }
    std::process::exit(i32::from(failed));
}

fn usage() -> ! {
    let names: Vec<&str> = hbmark_fuzz::all().map(|target| target.name).collect();
    eprintln!(
        "drive NAME SECONDS [SEED] or drive corpus NAME DIR; NAME is all or one of {}",
        names.join(", ")
    );
    std::process::exit(2);
}

/// Each input once, in a file of its own.
fn write_corpus(name: &str, folder: &Path) {
    let Some(target) = hbmark_fuzz::all().find(|target| target.name == name) else { usage() };
    let inputs: BTreeSet<Vec<u8>> = corpus(target).into_iter().collect();
    std::fs::create_dir_all(folder).expect("a folder for the corpus");
    for (index, input) in inputs.iter().enumerate() {
        std::fs::write(folder.join(format!("{index:05}")), input).expect("room for the corpus");
    }
    println!("{} inputs of {name} in {}", inputs.len(), folder.display());
}

/// The inputs to mutate: seeds more often than hostile inputs, which are refused early.
fn corpus(target: &FuzzTarget) -> Vec<Vec<u8>> {
    let seeds: Vec<Vec<u8>> = (target.seeds)().into_iter().map(|seed| seed.bytes).collect();
    let hostile =
        inputs::of(target.name).into_iter().map(|input| input.bytes).filter(|bytes| bytes.len() < 1 << 17);
    let mut corpus: Vec<Vec<u8>> = hostile.collect();
    let times = 1 + 3 * corpus.len() / seeds.len().max(1);
    corpus.extend(seeds.iter().cycle().take(seeds.len() * times).cloned());
    corpus
}

fn next(corpus: &[Vec<u8>], target: &FuzzTarget, random: &mut Random) -> Vec<u8> {
    let others: Vec<&[u8]> = corpus.iter().map(Vec::as_slice).collect();
    let input = &corpus[random.below(corpus.len())];
    mutate(input, &others, target.head, random)
}

/// Tries one input; false when it failed.
fn attempt(target: &'static FuzzTarget, input: Vec<u8>, scratch: &Path, tally: &mut Tally) -> bool {
    *lock() = Some((target.name, input.clone()));
    let begin = Instant::now();
    let run = || std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| (target.run)(&input, scratch)));
    let (outcome, peak) = peak_of(run);
    let took = begin.elapsed();
    TRIED.fetch_add(1, Ordering::Relaxed);
    *lock() = None;
    tally.tried += 1;
    tally.slowest = tally.slowest.max(took);
    let limit = ALLOWANCE + input.len() * target.per_byte;
    match outcome {
        Ok(accepted) => {
            tally.accepted += u64::from(accepted);
            tally.peak = tally.peak.max(peak);
            if peak > limit {
                save(target.name, "memory", &input);
                eprintln!("{}: {} MiB for {} bytes", target.name, peak >> 20, input.len());
            }
            peak <= limit
        }
        Err(_) => {
            save(target.name, "panic", &input);
            false
        }
    }
}

fn lock() -> std::sync::MutexGuard<'static, Option<(&'static str, Vec<u8>)>> {
    CURRENT.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn save(target: &str, what: &str, input: &[u8]) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("found");
    let name = input.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
    });
    let path = folder.join(format!("{target}-{what}-{name:016x}"));
    let saved = std::fs::create_dir_all(&folder).and_then(|()| std::fs::write(&path, input));
    eprintln!("{target}: {what}: {} ({saved:?})", path.display());
}

/// Ends the process when one input takes too long.
fn watchdog() {
    let mut last = (u64::MAX, Instant::now());
    loop {
        std::thread::sleep(Duration::from_secs(1));
        let tried = TRIED.load(Ordering::Relaxed);
        if tried != last.0 {
            last = (tried, Instant::now());
        } else if last.1.elapsed() > TIMEOUT
            && let Some((target, input)) = lock().as_ref()
        {
            save(target, "hang", input);
            std::process::exit(3);
        }
    }
}
