//! Records the git revision and the compiler; with the `cuda` feature compiles `kernels/*.cu` with nvcc.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::{Path, PathBuf};
use std::process::{Command, exit};
use std::sync::Mutex;

/// Real code for A100 and for Hopper, and PTX for what comes after.
const ARCHITECTURES: &str = "80,90a,90-ptx";

/// Sources with hundreds of kernels.
const SLOW: [&str; 3] = ["experts.cu", "tiled_layers.cu", "decode_attention.cu"];

fn main() {
    record("HBMARK_GIT_REVISION", git_revision());
    record(
        "HBMARK_RUSTC",
        output(Command::new(std::env::var_os("RUSTC").unwrap_or("rustc".into())).arg("--version")),
    );
    println!("cargo::rerun-if-changed=kernels");
    if std::env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    // Cargo runs this once for lints, and once for what is built: lints need files, and no kernels.
    let wrapper = std::env::var_os("RUSTC_WORKSPACE_WRAPPER").unwrap_or_default();
    if wrapper.to_string_lossy().contains("clippy") { leave_kernels_out() } else { compile_kernels() }
}

fn out_dir() -> PathBuf {
    PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"))
}

/// An empty file for each fatbin.
fn leave_kernels_out() {
    for source in sources("cu") {
        let name = source.file_stem().expect("a source has a name");
        std::fs::write(out_dir().join(name).with_extension("fatbin"), "").expect("OUT_DIR can be written");
    }
}

/// The files of `kernels/` with this extension, in order.
fn sources(extension: &str) -> Vec<PathBuf> {
    let mut sources: Vec<PathBuf> = std::fs::read_dir("kernels")
        .expect("kernels/ is part of the crate")
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|e| e == extension))
        .collect();
    sources.sort();
    sources
}

/// A hash of the contents of the files and of how they are compiled. Times of files would not do: a fresh checkout has new ones.
fn fingerprint(files: &[PathBuf], settings: &str) -> String {
    let mut hasher = DefaultHasher::new();
    settings.hash(&mut hasher);
    for file in files {
        std::fs::read(file).expect("kernels/ can be read").hash(&mut hasher);
    }
    format!("{:016x}", hasher.finish())
}

fn record(name: &str, value: Option<String>) {
    if let Some(value) = value {
        println!("cargo::rustc-env={name}={value}");
    }
}

fn output(command: &mut Command) -> Option<String> {
    let output = command.output().ok().filter(|o| o.status.success())?;
    Some(String::from_utf8_lossy(&output.stdout).trim().to_owned()).filter(|text| !text.is_empty())
}

/// The short commit, marked when tracked files differ from it: of the repository whose root this is, or as `cargo package` wrote it down. A
/// repository further up is another project's.
fn git_revision() -> Option<String> {
    // Without the lock, `status` does not rewrite the index, which is watched below: the next build would start from nothing.
    let git = |arguments: &[&str]| output(Command::new("git").arg("--no-optional-locks").args(arguments));
    let told = git(&["rev-parse", "--show-toplevel", "--git-dir", "--short=12", "HEAD"]).unwrap_or_default();
    let [root, folder, commit] = told.lines().collect::<Vec<_>>()[..] else { return packaged_revision() };
    if Path::new(root).canonicalize().ok() != Path::new(".").canonicalize().ok() {
        return packaged_revision();
    }
    for name in ["HEAD", "index"] {
        println!("cargo::rerun-if-changed={}", Path::new(folder).join(name).display());
    }
    // An edit that is not staged changes none of git's files, and must still be told.
    for name in ["src", "crates", "kernels", "models", "Cargo.toml", "Cargo.lock"] {
        println!("cargo::rerun-if-changed={name}");
    }
    let dirty = git(&["status", "--porcelain", "--untracked-files=no"]).is_some();
    Some(if dirty { format!("{commit}-dirty") } else { commit.to_owned() })
}

fn packaged_revision() -> Option<String> {
    let text = std::fs::read_to_string(".cargo_vcs_info.json").ok()?;
    let commit = text.split('"').skip_while(|word| *word != "sha1").nth(2)?;
    let dirty = if text.contains("\"dirty\": true") { "-dirty" } else { "" };
    Some(format!("{}{dirty}", commit.get(..12)?))
}

/// Compiles each kernel file to a fatbin of the same name in the output folder.
fn compile_kernels() {
    println!("cargo::rerun-if-env-changed=HBMARK_CUDA_ARCHS");
    println!("cargo::rerun-if-env-changed=HBMARK_CUDA_LINE_INFO");
    let Some(nvcc) = find_nvcc() else {
        fail(
            "the `cuda` feature needs nvcc, and none was found in CUDA_HOME, CUDA_PATH or PATH.\n\
              Install the CUDA 13 toolkit, or make one from Python wheels: eval \"$(scripts/cuda-env.sh)\"",
        );
    };
    let out = out_dir();
    let architectures = std::env::var("HBMARK_CUDA_ARCHS").unwrap_or(ARCHITECTURES.into());
    let without = std::env::var("HBMARK_CUDA_LINE_INFO").is_ok_and(|wanted| wanted == "0");
    let line_info = if without { None } else { Some("-lineinfo") };
    let flags = flags(&architectures, line_info);
    let compiler = output(Command::new(&nvcc).arg("--version"));
    let settings = fingerprint(&sources("cuh"), &format!("{flags:?} {compiler:?}"));
    let mut stale = Vec::new();
    for source in sources("cu") {
        let wanted = fingerprint(std::slice::from_ref(&source), &settings);
        let stamp = out.join(source.file_stem().expect("a source has a name")).with_extension("inputs");
        if std::fs::read_to_string(&stamp).is_ok_and(|last| last == wanted) {
            continue;
        }
        stale.push((source, stamp, wanted));
    }
    // Several at a time. Those that take minutes come first.
    stale.sort_by_key(|(source, ..)| !SLOW.iter().any(|slow| source.ends_with(slow)));
    let jobs = std::env::var("NUM_JOBS").ok().and_then(|jobs| jobs.parse().ok()).unwrap_or(1);
    let queue = Mutex::new(stale.into_iter());
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                loop {
                    let next = queue.lock().expect("a failure ends the process").next();
                    let Some((source, stamp, inputs)) = next else { return };
                    // Half a product must not pass for one of the last time.
                    let _ = std::fs::remove_file(&stamp);
                    compile(&nvcc, &source, &out, &flags);
                    std::fs::write(stamp, inputs).expect("OUT_DIR can be written");
                }
            });
        }
    });
}

fn find_nvcc() -> Option<PathBuf> {
    for name in ["CUDA_HOME", "CUDA_PATH", "PATH"] {
        println!("cargo::rerun-if-env-changed={name}");
    }
    let toolkits = ["CUDA_HOME", "CUDA_PATH"]
        .into_iter()
        .filter_map(std::env::var_os)
        .map(|home| PathBuf::from(home).join("bin"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut folders = toolkits.chain(std::env::split_paths(&path));
    folders.find_map(|folder| Some(folder.join("nvcc")).filter(|nvcc| nvcc.is_file()))
}

/// How every file is compiled. Uncompressed, for `scripts/check_sass.py`: what travels is compressed as a whole.
fn flags(architectures: &str, line_info: Option<&str>) -> Vec<String> {
    let general = ["-fatbin", "-no-compress", "-O3", "-std=c++17", "-Xptxas", "-v,-warn-spills"];
    let targets =
        architectures.split(',').map(str::trim).map(|architecture| match architecture.strip_suffix("-ptx") {
            Some(number) => format!("-gencode=arch=compute_{number},code=compute_{number}"),
            None => format!("-gencode=arch=compute_{architecture},code=sm_{architecture}"),
        });
    general.into_iter().chain(line_info).map(str::to_owned).chain(targets).collect()
}

fn compile(nvcc: &Path, source: &Path, out: &Path, flags: &[String]) {
    let name = source.file_stem().expect("a source has a name");
    let mut command = Command::new(nvcc);
    // What is measured is compiled as it says here.
    command.env_remove("NVCC_APPEND_FLAGS").env_remove("NVCC_PREPEND_FLAGS");
    command.args(flags).arg("-o").arg(out.join(name).with_extension("fatbin")).arg(source);
    match command.output() {
        // What ptxas says of registers and spills is for `scripts/check_resources.py`.
        Ok(output) if output.status.success() => {
            std::fs::write(out.join(name).with_extension("ptxas"), output.stderr)
                .expect("OUT_DIR can be written");
        }
        Ok(output) => fail(&format!("{command:?} failed:\n{}", String::from_utf8_lossy(&output.stderr))),
        Err(error) => fail(&format!("cannot run {}: {error}", nvcc.display())),
    }
}

fn fail(message: &str) -> ! {
    for line in message.lines() {
        println!("cargo::error={line}");
    }
    exit(1)
}
