//! A fuzzer that needs no nightly compiler: blind mutations of the seeds, with a meter on memory and a watch on time.
//!
//! `cargo run --release --bin drive -- NAME|all SECONDS [SEED]`. An input that panics, takes too much memory or too long is saved under
//! `fuzz/found/` and ends the run with status 1. It stops as soon as the file named in `FUZZ_STOP_FILE` exists.
//! `drive corpus NAME DIR` writes what mutations begin from to a folder, for fuzzers that want one.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hbmark_fuzz::doors::{ALLOWANCE, FUZZ_TARGETS, FuzzTarget};
use hbmark_fuzz::meter::{Metered, peak_of};
use hbmark_fuzz::mutate::{Random, mutate};
use hbmark_fuzz::shapes;

#[global_allocator]
static ALLOCATOR: Metered = Metered;

/// One input may take so long: a hundred times what the slowest seed takes.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Inputs of one door before the next has its turn.
const TURN: Duration = Duration::from_secs(20);

/// What is being tried, for the watch.
static UNDER_WAY: Mutex<Option<(&'static str, Vec<u8>)>> = Mutex::new(None);
/// Inputs tried, for the watch to see progress.
static TRIED: AtomicU64 = AtomicU64::new(0);

#[derive(Debug, Default, Clone, Copy)]
struct Tally {
    tried: u64,
    let_in: u64,
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
    let doors: Vec<&'static FuzzTarget> = FUZZ_TARGETS.iter().filter(|door| name == "all" || door.name == name).collect();
    let (Ok(seconds), false) = (seconds.parse(), doors.is_empty()) else { usage() };
    let seed = rest.first().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    std::thread::spawn(watch);
    let scratch = tempfile::tempdir().expect("a folder for scratch");
    let stop = std::env::var_os("FUZZ_STOP_FILE").map(PathBuf::from);
    let end = Instant::now() + Duration::from_secs(seconds);
    let mut random = Random::new(seed);
    let mut tallies = vec![Tally::default(); doors.len()];
    let corpora: Vec<Vec<Vec<u8>>> = doors.iter().map(|door| corpus(door)).collect();
    let mut failed = false;
    'all: loop {
        for ((door, corpus), tally) in doors.iter().zip(&corpora).zip(&mut tallies) {
            let turn = end.min(Instant::now() + TURN);
            while Instant::now() < turn {
                if Instant::now() >= end || stop.as_ref().is_some_and(|file| file.exists()) {
                    break 'all;
                }
                let input = next(corpus, door, &mut random);
                failed |= !attempt(door, input, scratch.path(), tally);
            }
        }
        if Instant::now() >= end {
            break;
        }
    }
    println!("{:<14} {:>10} {:>10} {:>10} {:>10}", "door", "tried", "let in", "peak MiB", "slowest");
    for (door, tally) in doors.iter().zip(&tallies) {
        let Tally { tried, let_in, peak, slowest } = tally;
        println!(
            "{:<14} {tried:>10} {let_in:>10} {:>10} {:>8} ms",
            door.name,
            peak >> 20,
            slowest.as_millis()
        );
    }
    std::process::exit(i32::from(failed));
}

fn usage() -> ! {
    let names: Vec<&str> = FUZZ_TARGETS.iter().map(|door| door.name).collect();
    eprintln!(
        "drive NAME SECONDS [SEED] or drive corpus NAME DIR; NAME is all or one of {}",
        names.join(", ")
    );
    std::process::exit(2);
}

/// Each input once, in a file of its own.
fn write_corpus(name: &str, folder: &Path) {
    let Some(door) = FUZZ_TARGETS.iter().find(|door| door.name == name) else { usage() };
    let inputs: BTreeSet<Vec<u8>> = corpus(door).into_iter().collect();
    std::fs::create_dir_all(folder).expect("a folder for the corpus");
    for (index, input) in inputs.iter().enumerate() {
        std::fs::write(folder.join(format!("{index:05}")), input).expect("room for the corpus");
    }
    println!("{} inputs of {name} in {}", inputs.len(), folder.display());
}

/// What mutations begin from: seeds more often than shapes, which are refused early.
fn corpus(door: &FuzzTarget) -> Vec<Vec<u8>> {
    let seeds: Vec<Vec<u8>> = (door.seeds)().into_iter().map(|seed| seed.bytes).collect();
    let shapes =
        shapes::of(door.name).into_iter().map(|seed| seed.bytes).filter(|bytes| bytes.len() < 1 << 17);
    let mut corpus: Vec<Vec<u8>> = shapes.collect();
    let times = 1 + 3 * corpus.len() / seeds.len().max(1);
    corpus.extend(seeds.iter().cycle().take(seeds.len() * times).cloned());
    corpus
}

fn next(corpus: &[Vec<u8>], door: &FuzzTarget, random: &mut Random) -> Vec<u8> {
    let others: Vec<&[u8]> = corpus.iter().map(Vec::as_slice).collect();
    let input = &corpus[random.below(corpus.len())];
    mutate(input, &others, door.head, random)
}

/// Tries one input; false when it did harm.
fn attempt(door: &'static FuzzTarget, input: Vec<u8>, scratch: &Path, tally: &mut Tally) -> bool {
    *lock() = Some((door.name, input.clone()));
    let begin = Instant::now();
    let open = || std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| (door.open)(&input, scratch)));
    let (outcome, peak) = peak_of(open);
    let took = begin.elapsed();
    TRIED.fetch_add(1, Ordering::Relaxed);
    *lock() = None;
    tally.tried += 1;
    tally.slowest = tally.slowest.max(took);
    let limit = ALLOWANCE + input.len() * door.per_byte;
    match outcome {
        Ok(let_in) => {
            tally.let_in += u64::from(let_in);
            tally.peak = tally.peak.max(peak);
            if peak > limit {
                save(door.name, "memory", &input);
                eprintln!("{}: {} MiB for {} bytes", door.name, peak >> 20, input.len());
            }
            peak <= limit
        }
        Err(_) => {
            save(door.name, "panic", &input);
            false
        }
    }
}

fn lock() -> std::sync::MutexGuard<'static, Option<(&'static str, Vec<u8>)>> {
    UNDER_WAY.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn save(door: &str, what: &str, input: &[u8]) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("found");
    let name = input.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
    });
    let path = folder.join(format!("{door}-{what}-{name:016x}"));
    let saved = std::fs::create_dir_all(&folder).and_then(|()| std::fs::write(&path, input));
    eprintln!("{door}: {what}: {} ({saved:?})", path.display());
}

/// Ends the process when one input takes too long.
fn watch() {
    let mut last = (u64::MAX, Instant::now());
    loop {
        std::thread::sleep(Duration::from_secs(1));
        let tried = TRIED.load(Ordering::Relaxed);
        if tried != last.0 {
            last = (tried, Instant::now());
        } else if last.1.elapsed() > TIMEOUT
            && let Some((door, input)) = lock().as_ref()
        {
            save(door, "hang", input);
            std::process::exit(3);
        }
    }
}
