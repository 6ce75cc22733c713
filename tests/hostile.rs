//! Untrusted files: whatever is in them, nothing panics, nothing hangs, and memory stays within 64 MiB and the file's size.
//!
//! Each fuzz target runs on real files, on hand-made hostile inputs, on every truncation and every flipped byte of the small ones, and on
//! seeded mutations: a short, repeatable form of `just fuzz` with the same functions. A file of its own, because the counting allocator is
//! the whole process's.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

#[path = "../fuzz/src/allocator.rs"]
mod allocator;
#[path = "../fuzz/src/inputs.rs"]
mod inputs;
#[path = "../fuzz/src/mutate.rs"]
mod mutate;
#[path = "../fuzz/src/targets.rs"]
mod targets;
#[path = "../fuzz/src/weights.rs"]
mod weights;

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use allocator::{CountingAllocator, peak_of};
use mutate::{Random, mutate};
use targets::{ALLOWANCE, FuzzTarget, fixture, harmless, harmless_csv, seed_file};

use hbmark::weights::tokenizer::Tokenizer;
use hbmark_core::model::Dtype;
use hbmark_report::analysis::import;
use hbmark_report::output::{Format, render};
use hbmark_traffic::trace;
use hbmark_traffic::workload::Workload;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// A watchdog, not a measurement: nothing here takes a hundredth of it.
const TIMEOUT: Duration = Duration::from_mins(2);

/// The allocator counts for the whole process: one measured test at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ends the process when an input takes too long, and says which.
fn watched(target: &'static str) -> Sender<String> {
    let (sender, receiver) = channel::<String>();
    std::thread::spawn(move || {
        let mut last = String::from("the start");
        loop {
            match receiver.recv_timeout(TIMEOUT) {
                Ok(next) => last = next,
                Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => return,
                Err(std::sync::mpsc::RecvTimeoutError::Timeout) => {
                    eprintln!("{target}: `{last}` hangs");
                    std::process::abort();
                }
            }
        }
    });
    sender
}

struct Trial {
    target: &'static FuzzTarget,
    scratch: tempfile::TempDir,
    watch: Sender<String>,
}

impl Trial {
    fn new(name: &str) -> Self {
        let target =
            targets::TARGETS.iter().chain(weights::TARGETS).find(|target| target.name == name).unwrap();
        let trial = Self { target, scratch: tempfile::tempdir().unwrap(), watch: watched(target.name) };
        // What is read once for all inputs, such as the shards beside an index, is not counted.
        let _ = (target.run)(b"", trial.scratch.path());
        trial
    }

    fn attempt(&self, name: &str, bytes: &[u8]) -> bool {
        self.watch.send(name.to_owned()).unwrap();
        let (accepted, peak) = peak_of(|| (self.target.run)(bytes, self.scratch.path()));
        let limit = ALLOWANCE + self.target.per_byte * bytes.len();
        assert!(
            peak <= limit,
            "{} `{name}`: {peak} bytes of memory for {} bytes",
            self.target.name,
            bytes.len()
        );
        accepted
    }
}

/// Every test of one target; `mutations` are counted, not timed, so that the run is the same everywhere.
fn withstands(name: &str, mutations: usize, steps: usize) {
    let _alone = alone();
    let trial = Trial::new(name);
    let seeds = (trial.target.seeds)();
    for seed in &seeds {
        assert!(trial.attempt(&seed.name, &seed.bytes), "the real file {} is refused", seed.name);
    }
    let hostile = inputs::of(name);
    for input in &hostile {
        trial.attempt(&input.name, &input.bytes);
    }
    // The smallest real file, cut everywhere and with every byte flipped; long ones in steps.
    let smallest = seeds.iter().min_by_key(|seed| seed.bytes.len()).unwrap();
    let reach = smallest.bytes.len().min(trial.target.head);
    for at in (0..reach).step_by(reach.div_ceil(steps)) {
        trial.attempt(&format!("{} cut at {at}", smallest.name), &smallest.bytes[..at]);
        let mut flipped = smallest.bytes.clone();
        flipped[at] ^= 0xff;
        trial.attempt(&format!("{} flipped at {at}", smallest.name), &flipped);
    }
    let small = |bytes: &&[u8]| bytes.len() < 1 << 17;
    let mut corpus: Vec<&[u8]> = hostile.iter().map(|s| s.bytes.as_slice()).filter(small).collect();
    corpus.extend(seeds.iter().cycle().take(2 * corpus.len()).map(|s| s.bytes.as_slice()).filter(small));
    let mut random = Random::new(0x0b5e_55ed);
    for index in 0..mutations {
        let input = corpus[random.below(corpus.len())];
        let mutated = mutate(input, &corpus, trial.target.head, &mut random);
        trial.attempt(&format!("mutation {index}"), &mutated);
    }
}

#[test]
fn a_malicious_safetensors_header_is_refused_in_bounded_memory() {
    withstands("safetensors", 1_500, 500);
}

#[test]
fn quantised_layers_whose_parts_do_not_fit_are_refused_in_bounded_memory() {
    withstands("quantised", 1_500, 300);
}

#[test]
fn a_malicious_index_is_refused_in_bounded_memory() {
    withstands("index", 1_500, 500);
}

#[test]
fn a_malicious_gguf_header_is_refused_in_bounded_memory() {
    withstands("gguf", 1_500, 500);
}

#[test]
fn a_config_with_absurd_numbers_is_refused_before_they_are_multiplied() {
    withstands("config", 1_500, 300);
}

#[test]
fn a_tokenizer_that_would_run_or_grow_for_ever_is_refused_or_ends() {
    withstands("tokenizer", 1_000, 300);
}

#[test]
fn a_trace_is_read_in_bounded_memory_or_its_line_is_named() {
    withstands("trace", 3_000, 800);
}

#[test]
fn a_workload_that_cannot_be_drawn_is_refused() {
    withstands("workload", 2_000, 800);
}

#[test]
fn a_foreign_result_is_imported_in_bounded_memory_or_refused() {
    withstands("foreign", 1_500, 300);
}

#[test]
fn an_edited_result_is_judged_and_printed_or_refused() {
    withstands("result", 800, 200);
}

#[test]
fn an_edited_serving_result_is_printed_or_refused() {
    withstands("serve_result", 1_500, 300);
}

#[test]
fn an_edited_file_of_a_fleet_is_printed_or_refused() {
    withstands("fleet", 1_500, 300);
}

fn copy_of(name: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(fixture("models").join(name)).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    folder
}

fn opened(path: &Path) -> Result<hbmark::weights::OpenModel, String> {
    hbmark::weights::open(path.to_str().unwrap(), None, 0)
        .map_err(|error| hbmark::cli::one_line(&anyhow::Error::new(error)))
}

#[test]
fn weights_that_shrink_while_they_are_read_are_an_error_and_no_signal() {
    let folder = copy_of("llama-bf16");
    let weights = folder.path().join("model.safetensors");
    let whole = std::fs::read(&weights).unwrap();
    let file = std::fs::File::options().write(true).open(&weights).unwrap();
    let model = opened(folder.path()).unwrap();
    // The loader opens and checks the file again; then the file shrinks while it is read, at each tensor in turn.
    for tensor in 0..20 {
        std::fs::write(&weights, &whole).unwrap();
        let mut seen = 0;
        let loaded = model.load(Dtype::F32, &candle_core::Device::Cpu, &mut |_| {
            if seen == tensor {
                file.set_len(16).unwrap();
            }
            seen += 1;
        });
        let error = loaded.unwrap_err().to_string();
        assert!(error.contains("ended while it was read"), "{error}");
    }
    std::fs::write(&weights, &whole).unwrap();
    assert!(model.load(Dtype::F32, &candle_core::Device::Cpu, &mut |_| {}).is_ok());
}

#[test]
fn a_gguf_file_that_shrinks_while_it_is_read_is_an_error_and_no_signal() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let whole = std::fs::read(fixture("models/llama-q8_0.gguf")).unwrap();
    std::fs::write(&path, &whole).unwrap();
    let model = opened(&path).unwrap();
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    let mut first = true;
    let streamed = model.stream(Dtype::Gguf, &mut |_, _| {
        if std::mem::take(&mut first) {
            file.set_len(whole.len() as u64 / 8).unwrap();
        }
        Ok(())
    });
    let error = streamed.unwrap_err().to_string();
    assert!(error.contains("ended while it was read"), "{error}");
    assert!(opened(&path).unwrap_err().contains("the file holds"), "and it is refused when opened again");
}

#[test]
fn a_shard_that_leaves_its_folder_is_refused() {
    let _alone = alone();
    let secret = tempfile::tempdir().unwrap();
    std::fs::copy(fixture("models/llama-bf16/model.safetensors"), secret.path().join("model.safetensors"))
        .unwrap();
    let outside = secret.path().join("model.safetensors");
    for name in ["../secret", "/etc/passwd", "a/../../secret", "..", "", "a\\b", outside.to_str().unwrap()] {
        let folder = copy_of("llama-sharded");
        let index = folder.path().join("model.safetensors.index.json");
        let text = std::fs::read_to_string(&index).unwrap();
        let name = serde_json::to_string(name).unwrap();
        std::fs::write(&index, text.replace("\"model-00003-of-00003.safetensors\"", &name)).unwrap();
        let error = opened(folder.path()).unwrap_err();
        assert!(error.contains("is not a plain file name"), "{error}");
    }
    let folder = copy_of("llama-bf16");
    let link = folder.path().join("model.safetensors");
    std::fs::remove_file(&link).unwrap();
    std::os::unix::fs::symlink(&outside, &link).unwrap();
    let error = opened(folder.path()).unwrap_err();
    assert!(error.contains("outside the model's folder"), "{error}");
}

/// A pipe without a writer.
fn pipe(path: &Path) {
    let _ = std::fs::remove_file(path);
    assert!(std::process::Command::new("mkfifo").arg(path).status().unwrap().success());
}

#[test]
fn a_pipe_in_the_place_of_any_file_is_refused_without_waiting() {
    let watch = watched("pipes");
    let named = |folder: &tempfile::TempDir, name: &str| -> PathBuf {
        let path = folder.path().join(name);
        pipe(&path);
        path
    };
    for name in ["config.json", "model.safetensors", "tokenizer.json"] {
        watch.send(name.to_owned()).unwrap();
        let folder = copy_of("llama-bf16");
        named(&folder, name);
        let error = opened(folder.path()).unwrap_err();
        assert!(error.contains("not a regular file"), "{error}");
    }
    for name in ["model.safetensors.index.json", "model-00002-of-00003.safetensors"] {
        watch.send(name.to_owned()).unwrap();
        let folder = copy_of("llama-sharded");
        named(&folder, name);
        let error = opened(folder.path()).unwrap_err();
        assert!(error.contains("not a regular file"), "{error}");
    }
    let folder = tempfile::tempdir().unwrap();
    watch.send("the others".to_owned()).unwrap();
    let refused = |error: String| assert!(error.contains("regular file"), "{error}");
    refused(opened(&named(&folder, "m.gguf")).unwrap_err());
    let path = named(&folder, "file.toml");
    refused(trace::read(&path, None).unwrap_err().to_string());
    refused(Workload::open(path.to_str().unwrap()).unwrap_err().to_string());
    refused(hbmark_core::result::saved::read(&path).unwrap_err().to_string());
    refused(hbmark_core::result::serving::read(&path).unwrap_err().to_string());
    refused(import::read(&path).unwrap_err().to_string());
    // A device may be endless, or act when it is opened.
    let zero = Path::new("/dev/zero");
    refused(hbmark_core::result::saved::read(zero).unwrap_err().to_string());
    refused(trace::read(zero, None).unwrap_err().to_string());
    refused(import::read(zero).unwrap_err().to_string());
}

#[test]
fn a_pathological_regex_of_a_tokenizer_does_not_hang() {
    let folder = tempfile::tempdir().unwrap();
    let watch = watched("tokenizer");
    for pattern in ["(a+)+(?=!!)", "(?:a|a)*(?=b)", "a*a*a*a*a*a*a*(?=b)", "(?=(a+))\\1\\1b|(?<=x)a"] {
        watch.send(pattern.to_owned()).unwrap();
        std::fs::write(folder.path().join("tokenizer.json"), inputs::split_by(pattern)).unwrap();
        let tokenizer = Tokenizer::open(folder.path()).unwrap();
        // A result or an error: the regex engine has a limit of a million steps.
        let _ = tokenizer.encode(&"a".repeat(200));
    }
}

/// Text that a terminal, a spreadsheet or a browser would act on.
const HOSTILE: &str =
    "=cmd()|'</script><img src=x onerror=alert(1)>\u{1b}[2J\u{9b}31m\u{202e}\u{7}\r\n`*_[a](b)";

/// The document with each of its strings replaced in turn.
fn with_each_text_hostile(document: &serde_json::Value) -> Vec<(String, String)> {
    fn texts(value: &serde_json::Value, at: &str, found: &mut Vec<String>) {
        match value {
            serde_json::Value::String(_) => found.push(at.to_owned()),
            serde_json::Value::Array(items) => {
                // The first few of a list stand for all.
                items
                    .iter()
                    .take(3)
                    .enumerate()
                    .for_each(|(index, item)| texts(item, &format!("{at}/{index}"), found));
            }
            serde_json::Value::Object(map) => {
                map.iter()
                    .for_each(|(key, item)| texts(item, &format!("{at}/{}", key.replace('/', "~1")), found));
            }
            _ => {}
        }
    }
    let mut places = Vec::new();
    texts(document, "", &mut places);
    let changed = |place: &String| {
        let mut changed = document.clone();
        *changed.pointer_mut(place)? = HOSTILE.into();
        Some((place.clone(), changed.to_string()))
    };
    places.iter().filter_map(changed).collect()
}

#[test]
fn every_text_of_a_result_is_harmless_in_every_format() {
    let _alone = alone();
    for (name, least) in [("result", 40), ("serve_result", 10)] {
        let trial = Trial::new(name);
        let mut tried = 0;
        for seed in (trial.target.seeds)() {
            let document = serde_json::from_slice(&seed.bytes).unwrap();
            for (place, text) in with_each_text_hostile(&document) {
                // The target itself asserts that the output is harmless; see `targets::harmless`.
                tried += usize::from(trial.attempt(&place, text.as_bytes()));
            }
        }
        assert!(tried >= least, "{name}: only {tried} strings were accepted");
    }
}

#[test]
fn every_text_of_a_foreign_result_is_harmless_in_every_format() {
    let _alone = alone();
    let trial = Trial::new("foreign");
    let mut tried = 0;
    for seed in (trial.target.seeds)() {
        let Ok(document) = serde_json::from_slice(&seed.bytes) else { continue };
        for (place, text) in with_each_text_hostile(&document) {
            tried += usize::from(trial.attempt(&format!("{} {place}", seed.name), text.as_bytes()));
        }
    }
    assert!(tried >= 30, "only {tried} strings were accepted");
}

#[test]
fn a_hostile_name_is_harmless_where_a_file_or_a_model_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let name = "\u{1b}[31m=x\u{202e}<img src=x onerror=alert(1)>";
    let model = folder.path().join(name);
    std::fs::create_dir(&model).unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(fixture("models/llama-bf16").join(file), model.join(file)).unwrap();
    }
    // The name of its folder is in the report's header, source and command.
    let opened = opened(&model).unwrap();
    let gpu = hbmark_core::ledger::devices::find("l4").unwrap().clone();
    let question = hbmark::run::predict::Question {
        device: gpu,
        dtypes: vec![Dtype::Bf16],
        kv_dtype: None,
        phases: vec![hbmark_core::result::Phase::Decode],
        batches: vec![1],
        contexts: vec![128],
        routing: hbmark_core::ledger::ExpertRouting::Uniform,
        group: None,
    };
    let result =
        hbmark::run::predict::report(&opened, &question, &format!("hbmark predict --model {name}")).unwrap();
    for format in [Format::Table, Format::Csv, Format::Md, Format::Html] {
        let text = render(&result, format, false).unwrap();
        harmless(&text);
        assert!(!text.contains("<img") || format != Format::Html);
        if format == Format::Csv {
            harmless_csv(&text);
        }
    }
    // And in the error when a file of that name is refused.
    std::fs::write(model.join("config.json"), "{").unwrap();
    harmless(&hbmark::cli::one_line(&anyhow::Error::new(
        hbmark::weights::open(model.to_str().unwrap(), None, 0).unwrap_err(),
    )));
}

#[test]
fn an_edited_number_is_recomputed_from_the_raw_samples() {
    let seed = seed_file("result-full.json");
    let text = String::from_utf8(seed.bytes).unwrap();
    let judged = |text: &str| {
        let mut report = hbmark_core::result::saved::parse(text).unwrap();
        hbmark_report::analysis::judge::recompute(&mut report);
        report
    };
    let honest = judged(&text);
    let mut document: serde_json::Value = serde_json::from_str(&text).unwrap();
    for cell in document["cells"].as_array_mut().unwrap() {
        for number in
            ["tpot_ns", "tokens_per_s", "fraction_of_ceiling", "fraction_of_datasheet", "predicted_ns"]
        {
            cell[number] = 1.0.into();
        }
        cell["step_ns"] = serde_json::Value::Null;
    }
    document["ladders"] = serde_json::json!([]);
    let edited = judged(&document.to_string());
    assert_eq!(edited.cells, honest.cells);
    assert_eq!(edited.ladders, honest.ladders);
}

#[test]
fn findings_of_a_mixture_of_many_experts_are_said_without_listing_its_tensors_for_each_cell() {
    let seed = seed_file("result-full.json");
    let mut report = hbmark_core::result::saved::parse(std::str::from_utf8(&seed.bytes).unwrap()).unwrap();
    report.model.architecture = hbmark_core::model::presets::find("DeepSeek-V3").unwrap().architecture;
    let cell = report.cells[2].clone();
    report.cells = vec![cell; 2_000];
    let watch = watched("findings");
    watch.send("two thousand cells".to_owned()).unwrap();
    let found = hbmark_report::analysis::explain(&report);
    harmless(&render(found.as_slice(), Format::Table, false).unwrap());
}

#[test]
fn a_serving_result_with_numbers_that_no_run_has_is_not_believed() {
    let _alone = alone();
    let seed = seed_file("serve-sweep.json");
    let whole: serde_json::Value = serde_json::from_slice(&seed.bytes).unwrap();
    let file = tempfile::NamedTempFile::new().unwrap();
    let mut places = vec![("/model/architecture/layers".to_owned(), 30_000_000)];
    for name in ["hidden_size", "heads", "kv_heads", "head_dim", "ffn_size", "vocab_size"] {
        places.extend([u64::MAX, u64::MAX >> 1].map(|most| (format!("/model/architecture/{name}"), most)));
    }
    for name in ["steps", "prompt_tokens", "output_tokens"] {
        places.push((format!("/points/0/result/timeline/spans/0/{name}"), u64::MAX));
    }
    for (place, most) in places {
        let mut changed = whole.clone();
        *changed.pointer_mut(&place).unwrap_or_else(|| panic!("the seed has no {place}")) = most.into();
        std::fs::write(file.path(), changed.to_string()).unwrap();
        let (read, peak) = peak_of(|| hbmark_core::result::serving::read(file.path()));
        let error = read.unwrap_err().to_string();
        assert!(error.contains(&format!("{most}, and no run has that")), "{place}: {error}");
        assert!(peak < ALLOWANCE, "{place}: {peak} bytes");
    }
}

#[test]
fn a_pool_of_more_blocks_than_any_device_has_takes_memory_for_those_in_use_alone() {
    use hbmark_traffic::block_pool::{BlockPool, PrefixId};
    let _alone = alone();
    let ((), peak) = peak_of(|| {
        let mut pool = BlockPool::new(1 << 28, 16, true);
        for token in 0..1_000 {
            let block = pool.allocate().unwrap();
            pool.cache_block(block, PrefixId::ROOT, &[token; 16]);
        }
        assert_eq!((pool.num_blocks(), pool.num_used_blocks()), (1 << 28, 1_000));
    });
    assert!(peak < ALLOWANCE, "{peak} bytes");
}
