//! Numbers, files and limits that nobody means: the program ends by itself, with an exit code and a message.

use std::collections::BTreeMap;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use clap::CommandFactory;

use crate::runs::{clean, fixture, hbmark, path, program, stderr};

/// A watchdog, not a measurement: nothing here takes a hundredth of it on an idle machine.
const TIMEOUT: Duration = Duration::from_mins(2);

/// Runs a command to its end, and ends the test where it has none.
fn ended(mut command: Command) -> Output {
    let said = format!("{command:?}");
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let id = child.id();
    // Both are small, or read elsewhere.
    let (begin, mut status) = (Instant::now(), None);
    while status.is_none() && begin.elapsed() < TIMEOUT {
        status = child.try_wait().unwrap();
        std::thread::sleep(Duration::from_millis(5));
    }
    if status.is_none() {
        let _ = child.kill();
        let _ = child.wait();
        panic!("{id} does not end: {said}");
    }
    child.wait_with_output().unwrap()
}

/// Holds an end against what ends are: a code of the program's own, and no panic.
fn ended_well(output: &Output, said: &str) -> i32 {
    let errors = stderr(output);
    assert!(!errors.contains("panicked"), "{said}: {errors}");
    let code = output.status.code().unwrap_or_else(|| panic!("{said}: {}: {errors}", output.status));
    assert!((0..=2).contains(&code), "{said}: {code}: {errors}");
    code
}

/// What another flag of a command needs beside it.
fn companions(command: &str, flag: &str) -> &'static [&'static str] {
    match flag {
        "draft-tokens" if command == "serve" => &["--acceptance-rate=0.5"],
        "acceptance-rate" => &["--draft-tokens=2"],
        "input-len" => &["--output-len=4"],
        "output-len" => &["--input-len=4"],
        "prefix-share" | "prefix-groups" => &["--prefix-tokens=16"],
        "max-loras" | "max-lora-rank" | "lora-assignment" | "lora-share" | "lora-adapters" | "lora-rank"
        | "lora-targets" | "lora-modules" => &["--enable-lora"],
        "structured-share" => &["--structured=regex:a"],
        "duration" => &["--rate=1"],
        "time-scale" => &["--trace=trace.csv"],
        "dataset-path" => &["--dataset-name=custom"],
        "price-input" => &["--gpu-hour-price=1", "--price-output=1"],
        "price-output" => &["--gpu-hour-price=1", "--price-input=1"],
        _ => &[],
    }
}

#[test]
fn no_number_of_any_flag_ends_in_a_panic_or_does_not_end() {
    let folder = tempfile::tempdir().unwrap();
    let rows: Vec<String> =
        (0..60).map(|second| format!("{second},ChatGPT,40,10,50,Conversation log\n")).collect();
    let heading = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n";
    std::fs::write(folder.path().join("trace.csv"), format!("{heading}{}", rows.concat())).unwrap();
    let sweep = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/results/serve-sweep.json");
    let model = fixture("qwen3");
    let small =
        ["--virtual", "--model", "SmolLM2-135M", "--requests", "20", "--input-len=40", "--output-len=4"];
    let from_trace = ["--virtual", "--model", "SmolLM2-135M", "--trace", "trace.csv", "--requests", "20"];
    let bases: Vec<Vec<&str>> = vec![
        [&["serve"], &small[..]].concat(),
        [&["serve"], &from_trace[..]].concat(),
        [&["serve", "sweep", "rate=1"], &small[..]].concat(),
        [&["serve", "search", "--slo", "ttft_p50=1s"], &small[..]].concat(),
        [&["serve", "matrix"], &small[..5]].concat(),
        vec!["serve", "cold", "--model", path(&model)],
        vec!["run", "--dry-run", "--model", path(&model)],
        vec!["predict", "--model", path(&model)],
        vec!["capacity", path(&sweep), "--target-rate", "1"],
        vec!["logits", "--model", path(&model), "--tokens", "1,2"],
        vec!["record", path(&sweep), "--target-rate", "1"],
    ];
    let mut commands = Vec::new();
    for (number, base) in bases.iter().enumerate() {
        let tree = hbmark::cli::Cli::command();
        let mut at = &tree;
        let names = base.iter().map_while(|word| {
            at = at.find_subcommand(word)?;
            Some(at)
        });
        let command = names.last().unwrap();
        for argument in command.get_arguments().filter(|argument| argument.get_action().takes_values()) {
            let Some(flag) = argument.get_long() else { continue };
            // Flags whose numbers are names of files, and those that start what is measured by the clock.
            if matches!(
                flag,
                "out" | "resume" | "note" | "hypothesis" | "launches" | "result-dir" | "result-filename"
            ) {
                continue;
            }
            let own = format!("--{flag}");
            let mut rest: Vec<String> = base.iter().map(|&word| word.to_owned()).collect();
            if let Some(place) = rest.iter().position(|word| *word == own) {
                rest.drain(place..place + 2);
            }
            rest.retain(|word| !word.starts_with(&format!("{own}=")));
            let has_lengths =
                rest.iter().any(|word| word.ends_with("put-len=4") || word.ends_with("put-len=40"));
            if flag == "workload" || (flag == "trace" && has_lengths) {
                rest.retain(|word| !word.contains("put-len="));
            }
            for more in companions(base[0], flag) {
                let name = more.split('=').next().unwrap();
                if !rest.iter().any(|word| word.starts_with(name)) {
                    rest.push((*more).to_owned());
                }
            }
            let values = ["0", "2147483648", "9223372036854775807", "18446744073709551615", "1e300s", "NaN"];
            for (at, value) in values.iter().enumerate() {
                // The modes of `serve` share most flags: each has half of the values for all of them.
                if base[0] != "serve" || at % 2 == number % 2 {
                    commands.push([&rest[..], &[format!("{own}={value}")]].concat());
                }
            }
        }
    }
    for variable in ["max-num-seqs", "max-num-batched-tokens", "block-size", "num-gpu-blocks-override"] {
        for value in ["65537", "16777217", "999999999"] {
            let sweep = format!("{variable}={value}");
            commands.push(
                [&["serve", "sweep", &sweep, "--rate=1"], &small[..]]
                    .concat()
                    .iter()
                    .map(|&w| w.into())
                    .collect(),
            );
        }
    }
    let (queue, codes) = (Mutex::new(commands), Mutex::new(BTreeMap::<i32, usize>::new()));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let Some(arguments) = queue.lock().unwrap().pop() else { break };
                    let mut command = hbmark();
                    command.args(&arguments).current_dir(folder.path()).env("HOME", folder.path());
                    let output = ended(command);
                    let said = arguments.join(" ");
                    assert!(!stderr(&output).contains("required arguments were not provided"), "{said}");
                    *codes.lock().unwrap().entry(ended_well(&output, &said)).or_default() += 1;
                }
            });
        }
    });
    let codes = codes.into_inner().unwrap();
    // Most are refused; some numbers are fine (a seed, the length of a queue).
    assert!(codes[&0] > 50 && codes[&2] > 500, "{codes:?}");
}

#[test]
fn a_setting_of_the_scheduler_is_refused_with_its_range() {
    for (flag, most) in [
        ("--max-num-seqs", 65_536),
        ("--block-size", 65_536),
        ("--max-num-batched-tokens", 16_777_216),
        ("--num-gpu-blocks-override", 268_435_456),
    ] {
        let output = hbmark()
            .args(["serve", "--virtual", "--requests", "20", flag, "9223372036854775807"])
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(2));
        let range = format!("9223372036854775807 is not between 1 and {most}; give a number in that range");
        assert!(stderr(&output).contains(&range), "{}", stderr(&output));
    }
    let output = hbmark()
        .args(["serve", "sweep", "block-size=16,70000", "--virtual", "--requests", "20"])
        .args(["--model", "SmolLM2-135M", "--rate", "1"])
        .output()
        .unwrap();
    assert!(stderr(&output).contains("block-size 70000 is not between 1 and 65536"), "{}", stderr(&output));
}

#[test]
fn a_special_file_is_refused_at_every_door_without_waiting() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| -> PathBuf { folder.path().join(name) };
    let mut places: Vec<PathBuf> = vec!["/dev/zero".into(), "/dev/full".into(), "/dev/tty".into()];
    for ending in ["", ".json", ".toml", ".csv", ".gguf"] {
        let pipe = at(&format!("pipe{ending}"));
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        places.push(pipe);
        let socket = at(&format!("socket{ending}"));
        drop(UnixListener::bind(&socket).unwrap());
        places.push(socket);
    }
    // A folder whose result is a pipe, and a link to one.
    std::fs::create_dir(at("results")).unwrap();
    for name in ["result.json", "serve.json", "config.json", "journal.jsonl", "tokenizer.json"] {
        assert!(Command::new("mkfifo").arg(at("results").join(name)).status().unwrap().success());
    }
    std::os::unix::fs::symlink(at("pipe.json"), at("link.json")).unwrap();
    places.extend([at("results"), at("link.json")]);
    let result = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/results/run-scripted.json");
    let model = fixture("qwen3");
    let doors: Vec<(Vec<&str>, &str)> = vec![
        (vec!["compare", path(&result)], ""),
        (vec!["compare"], "{} {}"),
        (vec!["compare", "engine=native", "--rounds", "2"], ""),
        (vec!["compare", "threads=1", "threads=2", "--both"], "model="),
        (vec!["report"], ""),
        (vec!["explain"], ""),
        (vec!["checklist"], ""),
        (vec!["record"], ""),
        (vec!["import"], ""),
        (vec!["capacity", "--target-rate", "1"], ""),
        (vec!["ladder", "--cell", "decode/ideal/bf16/b1/c1024", "--external"], ""),
        (vec!["ladder", "--cell", "decode/ideal/bf16/b1/c1024", "--external", path(&result), "--result"], ""),
        (vec!["serve", "--virtual", "--requests", "20", "--trace"], ""),
        (vec!["serve", "--virtual", "--requests", "20", "--workload"], ""),
        (vec!["serve", "--virtual", "--requests", "20", "--from"], ""),
        (vec!["serve", "--model", path(&model), "--requests", "20", "--tokenizer"], ""),
        (vec!["serve", "--model", path(&model), "--requests", "20", "--structured"], "json-schema:"),
        (vec!["serve", "--model", path(&model), "--requests", "20", "--enable-lora", "--lora-modules"], "a="),
        (vec!["serve", "--resume"], ""),
        (vec!["run", "--resume"], ""),
        (vec!["run", "--smoke", "--model"], ""),
        (vec!["predict", "--model"], ""),
        (vec!["logits", "--tokens", "1", "--model"], ""),
    ];
    for place in &places {
        for (door, prefix) in &doors {
            let mut command = hbmark();
            command.args(door).current_dir(folder.path());
            match *prefix {
                "{} {}" => command.args([place, place]),
                prefix => command.arg(format!("{prefix}{}", place.display())),
            };
            let said = format!("{} {prefix}{}", door.join(" "), place.display());
            assert_eq!(ended_well(&ended(command), &said), 2, "{said}");
        }
    }
}

/// Runs the program in a shell with a limit set before it.
fn limited(limit: &str, arguments: &[&str]) -> Output {
    let mut shell = clean("/bin/sh");
    shell.args(["-c", &format!("ulimit {limit} && exec \"$0\" \"$@\"")]).arg(program()).args(arguments);
    ended(shell)
}

#[test]
fn a_limit_on_file_sizes_is_a_message_and_leaves_nothing_unfinished() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let model = fixture("qwen3");
    let run =
        ["run", "--smoke", "--device", "cpu", "--engine", "native", "--phase", "decode", "--batch", "1"];
    // In blocks of 512 bytes: less than a journal's first line, and less than a result.
    for blocks in ["0", "1", "16"] {
        for more in [&[][..], &["--no-isolation"]] {
            let _ = std::fs::remove_dir_all(&out);
            let arguments = [&run[..], &["--model", path(&model), "--out", path(&out)], more].concat();
            let output = limited(&format!("-f {blocks}"), &arguments);
            let said = format!("{blocks} blocks: {}", stderr(&output));
            assert_eq!(ended_well(&output, &said), 2, "{said}");
            assert!(said.contains("ulimit -f"), "{said}");
            let left: Vec<_> =
                std::fs::read_dir(&out).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            assert!(left.iter().all(|name| !name.to_string_lossy().contains("unfinished")), "{left:?}");
        }
    }
}

#[test]
fn little_address_space_is_an_error_and_no_crash() {
    let model = fixture("qwen3");
    // In kilobytes, from what the program itself maps on; below that the system cannot start it.
    for kilobytes in ["400000", "600000", "800000", "1200000"] {
        let logits =
            ["logits", "--model", path(&model), "--tokens", "1,2", "--engine", "native", "--threads", "1"];
        let output = limited(&format!("-v {kilobytes}"), &logits);
        ended_well(&output, kilobytes);
    }
}

/// A checkpoint of the fixtures with a value of one of its tensors replaced.
fn planted(tensor: &str, value: f32) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(fixture("llama-bf16")).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    let weights = folder.path().join("model.safetensors");
    let mut bytes = std::fs::read(&weights).unwrap();
    let length = usize::try_from(u64::from_le_bytes(bytes[..8].try_into().unwrap())).unwrap();
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    assert_eq!(header[tensor]["dtype"], "BF16");
    let begin = usize::try_from(header[tensor]["data_offsets"][0].as_u64().unwrap()).unwrap();
    let place = 8 + length + begin + 2;
    bytes[place..place + 2].copy_from_slice(&half::bf16::from_f32(value).to_le_bytes());
    std::fs::write(&weights, bytes).unwrap();
    folder
}

#[test]
fn a_weight_that_is_no_number_is_refused_by_both_engines() {
    for (tensor, value) in [
        ("model.embed_tokens.weight", f32::NAN),
        ("model.layers.0.mlp.down_proj.weight", f32::INFINITY),
        ("model.norm.weight", f32::NEG_INFINITY),
    ] {
        let folder = planted(tensor, value);
        for engine in ["stock", "native"] {
            // Token 5 alone does not read the row of the embedding that is wrong.
            let logits = ["logits", "--tokens", "5", "--engine", engine, "--model", path(folder.path())];
            let output = hbmark().args(logits).output().unwrap();
            let said = stderr(&output);
            assert_eq!(output.status.code(), Some(2), "{said}");
            assert!(
                said.contains(&format!("tensor {tensor} in ")) && said.contains("NaN or infinite"),
                "{said}"
            );
            let run =
                ["run", "--smoke", "--device", "cpu", "--batch", "1", "--context", "8", "--engine", engine];
            let output = hbmark().args(run).args(["--model", path(folder.path())]).output().unwrap();
            let said = format!("{}{}", stderr(&output), String::from_utf8_lossy(&output.stdout));
            assert_ne!(output.status.code(), Some(0), "{said}");
            assert!(said.contains("NaN or infinite"), "{said}");
        }
    }
}
