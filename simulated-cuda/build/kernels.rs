//! Compiles the kernels that the program launches as C++, for the emulation in `kernels/emulation`.
//!
//! Enters: `kernels/*.cu`, and the sources of candle's kernels where cargo has unpacked them, of the version in the program's Cargo.lock.
//! Leaves: one static library, in which every kernel is registered by the name by which it is launched. Nothing of candle's is kept here.
//! Kernels of mixtures (`moe/`) are left out: no model that the program runs by candle calls them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::time::SystemTime;

#[path = "source.rs"]
mod source;

const LIBRARY: &str = "simulated_cuda_kernels";

/// What candle loads as PTX, and what it links and launches by names with C linkage.
const BY_NAME: [&str; 12] = [
    "affine",
    "binary",
    "cast",
    "conv",
    "fill",
    "indexing",
    "quantized",
    "reduce",
    "sort",
    "ternary",
    "unary",
    "mmvq_gguf",
];

/// Formats of the tiled products, with their numbers in candle's enumeration.
const TILED: [(&str, u32); 10] = [
    ("Q4_0", 2),
    ("Q4_1", 3),
    ("Q5_0", 6),
    ("Q5_1", 7),
    ("Q8_0", 8),
    ("Q2_K", 10),
    ("Q3_K", 11),
    ("Q4_K", 12),
    ("Q5_K", 13),
    ("Q6_K", 14),
];

/// Columns of a tile, those that a launcher can choose for a device with tensor cores.
const TILE_COLUMNS: [u32; 11] = [8, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128];

/// What `__global__` is while names are looked for.
const MARKER: &str = "HBMARK_GLOBAL";

/// A file to compile.
struct Unit {
    name: String,
    text: String,
    /// Whether it is part of the device: compiled with the caller's flags.
    kernels: bool,
    /// Whether it is compiled as for a device of this architecture, with the stand-ins for CUDA's headers.
    candle: bool,
}

/// Compiles all of it with further flags for what runs on the device, and tells cargo to link it.
pub fn build(flags: &[&str]) {
    let here = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets it"));
    let root = here.parent().expect("this folder lies in the program's");
    for watched in ["build.rs", "build", "candle", "counting", "../kernels", "../Cargo.lock"] {
        println!("cargo::rerun-if-changed={}", here.join(watched).display());
    }
    let copy = out.join("candle");
    // Cargo runs this once for lints, which link nothing, and once for what is built.
    let wrapper = std::env::var_os("RUSTC_WORKSPACE_WRAPPER").unwrap_or_default();
    if wrapper.to_string_lossy().contains("clippy") {
        return;
    }
    let candle = candle_sources(root);
    translate(&candle, &copy, &here);

    let compilers = Compilers::new(&here, root, &copy, flags);
    let mut units = own_kernels(root);
    for module in BY_NAME {
        units.push(by_name(module, &compilers, &out));
    }
    units.push(quantising());
    units.extend(TILED.map(|(format, number)| tiled(format, number)));
    units.push(emulation(root, &here, &units));

    // What this script makes of its inputs is in the text of each unit, which is compared.
    let headers = [here.join("candle"), copy.clone(), root.join("kernels/emulation/emulation.h")];
    let candle = headers.iter().map(|path| newest(path)).max().expect("there are inputs");
    let own = candle.max(newest(&root.join("kernels"))).max(newest(&here.join("counting")));
    let objects = compilers.compile(&units, &out, |unit| if unit.candle { candle } else { own });
    cc::Build::new().cargo_metadata(false).objects(&objects).compile(LIBRARY);
    println!("cargo::rustc-link-search=native={}", out.display());
    println!("cargo::rustc-link-lib=static={LIBRARY}");
    println!("cargo::rustc-link-lib=stdc++");
}

/// Where cargo has unpacked the sources of candle's kernels.
fn candle_sources(root: &Path) -> PathBuf {
    let lock = fs::read_to_string(root.join("Cargo.lock")).expect("the program has a Cargo.lock");
    let (_, entry) =
        lock.split_once("name = \"candle-kernels\"\nversion = \"").expect("the program uses candle");
    let version = entry.split('"').next().expect("a version ends");
    let home = std::env::var_os("CARGO_HOME")
        .map(PathBuf::from)
        .or_else(|| Some(std::env::home_dir()?.join(".cargo")));
    let registries = fs::read_dir(home.expect("there is a home folder").join("registry/src"));
    let mut folders = registries.into_iter().flatten().flatten().map(|registry| registry.path());
    folders
        .find_map(|registry| {
            Some(registry.join(format!("candle-kernels-{version}/src"))).filter(|p| p.is_dir())
        })
        .unwrap_or_else(|| {
            panic!("cargo has not unpacked candle-kernels {version}: run `cargo fetch` in {}", root.display())
        })
}

/// Writes candle's sources as C++; files that stay the same keep their age.
fn translate(from: &Path, to: &Path, here: &Path) {
    let instructions =
        fs::read_to_string(here.join("candle/include/ptx.h")).expect("the instructions are declared there");
    for folder in ["", "mmq_gguf"] {
        fs::create_dir_all(to.join(folder)).expect("OUT_DIR can be written");
        for entry in fs::read_dir(from.join(folder)).expect("candle's sources can be read").flatten() {
            let path = entry.path();
            if path.extension().is_none_or(|e| e != "cu" && e != "cuh") {
                continue;
            }
            let text = fs::read_to_string(&path).expect("a source is text");
            write(&to.join(folder).join(entry.file_name()), &source::translate(&text, &instructions));
        }
    }
}

fn write(path: &Path, text: &str) {
    if fs::read_to_string(path).is_ok_and(|old| old == text) {
        return;
    }
    fs::write(path, text).expect("OUT_DIR can be written");
}

fn newest(path: &Path) -> SystemTime {
    let own = fs::metadata(path).and_then(|metadata| metadata.modified()).expect("an input can be looked at");
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    entries.map(|entry| newest(&entry.path())).chain([own]).max().expect("at least itself")
}

/// Ours, a file each.
fn own_kernels(root: &Path) -> Vec<Unit> {
    let mut files: Vec<PathBuf> = fs::read_dir(root.join("kernels"))
        .expect("the program has kernels")
        .flatten()
        .map(|e| e.path())
        .collect();
    files.retain(|path| path.extension().is_some_and(|e| e == "cu"));
    files.sort();
    let unit = |path: PathBuf| {
        let stem = path.file_stem().expect("it has an extension").to_string_lossy();
        let text = format!("#include \"{}\"", path.display());
        Unit { name: format!("own_{stem}"), text, kernels: true, candle: false }
    };
    files.into_iter().map(unit).collect()
}

/// A unit of candle's: sources in a namespace of their own, since several files define the same, and registrations.
fn unit(name: &str, include: &str, registered: &[(String, String)]) -> Unit {
    // What the sources include from inside the namespace is there before it.
    let mut text = String::from(
        "#include \"cuda_bf16.h\"\n#include \"cuda_fp16.h\"\n#include \"cuda_fp8.h\"\n#include \"ptx.h\"\n",
    );
    text += "#include \"cuda/std/limits\"\n#include <cmath>\n#include <cstdio>\n#include <vector>\n";
    text += &format!("namespace candle_{name} {{\n#include \"{include}\"\n");
    for (i, (function, kernel)) in registered.iter().enumerate() {
        text += &format!(
            "static const hbmark::emulation::Registration<&{function}> registration_{i}(\"{kernel}\");\n"
        );
    }
    text += "}\n";
    Unit { name: name.into(), text, kernels: true, candle: true }
}

fn by_name(module: &str, compilers: &Compilers, out: &Path) -> Unit {
    let include = format!("{module}.cu");
    let found = compilers.preprocess(&unit(module, &include, &[]), out);
    let names = source::kernels(&found, MARKER);
    assert!(!names.is_empty(), "no kernel in {include}");
    let registered: Vec<_> = names.into_iter().map(|name| (name.clone(), name)).collect();
    unit(module, &include, &registered)
}

/// What the products of many rows multiply with.
fn quantising() -> Unit {
    let kernels = [0, 1, 2].map(|layout| {
        (
            format!("quantize_mmq_q8_1<(mmq_q8_1_ds_layout){layout}>"),
            format!("quantize_mmq_q8_1<(mmq_q8_1_ds_layout){layout}>"),
        )
    });
    unit("mmq_quantize", "mmq_gguf/mmq_quantize.cu", &kernels)
}

fn tiled(format: &str, number: u32) -> Unit {
    let mut kernels = Vec::new();
    for function in ["mul_mat_q", "mul_mat_q_stream_k_fixup"] {
        for columns in TILE_COLUMNS {
            for checked in [false, true] {
                kernels.push((
                    format!("{function}<GGML_TYPE_{format}, {columns}, {checked}>"),
                    format!("{function}<(ggml_type){number}, {columns}, {checked}>"),
                ));
            }
        }
    }
    unit(&format!("mmq_{}", format.to_lowercase()), "mmq_gguf/mmq_gguf.cuh", &kernels)
}

/// What runs the kernels. It refers to all other units, so that a linker takes them.
fn emulation(root: &Path, here: &Path, others: &[Unit]) -> Unit {
    let mut text = String::new();
    for source in [root.join("kernels/emulation/emulation.cpp"), here.join("counting/accesses.cpp")] {
        text += &format!("#include \"{}\"\n", source.display());
    }
    text += "extern \"C\" {\n";
    for unit in others {
        text += &format!("extern const int hbmark_part_{};\n", unit.name);
    }
    let parts: Vec<String> = others.iter().map(|unit| format!("&hbmark_part_{}", unit.name)).collect();
    text += &format!(
        "extern const int* const hbmark_parts[];\nconst int* const hbmark_parts[] = {{{}}};\n}}\n",
        parts.join(", ")
    );
    Unit { name: "emulation".into(), text, kernels: false, candle: false }
}

/// The compiler, for each sort of unit.
struct Compilers {
    tool: [cc::Tool; 3],
    flags: Vec<String>,
}

impl Compilers {
    fn new(here: &Path, root: &Path, copy: &Path, flags: &[&str]) -> Self {
        let plain = || {
            let mut build = cc::Build::new();
            build
                .cpp(true)
                .std("c++17")
                .opt_level(1)
                .debug(false)
                .pic(true)
                .warnings(false)
                .cargo_metadata(false);
            // Vectors are read from bytes, as on the device; pragmas are for unrolling there.
            build.flags(["-fno-strict-aliasing", "-w"]).include(root.join("kernels"));
            build
        };
        let own = plain().define("HBMARK_EMULATED", None).get_compiler();
        let mut candle = plain();
        candle.define("__CUDA_ARCH__", "900").define("__CUDA_ARCH_LIST__", "900");
        candle.include(here.join("candle/include")).include(copy).include(copy.join("mmq_gguf"));
        Self {
            tool: [plain().get_compiler(), own, candle.get_compiler()],
            flags: flags.iter().map(|flag| (*flag).to_owned()).collect(),
        }
    }

    fn command(&self, unit: &Unit) -> Command {
        let tool = &self.tool[usize::from(unit.kernels) + usize::from(unit.candle)];
        let mut command = tool.to_command();
        if unit.kernels {
            command.args(&self.flags);
        }
        command
    }

    fn preprocess(&self, unit: &Unit, out: &Path) -> String {
        let file = out.join(format!("{}_names.cpp", unit.name));
        write(&file, &unit.text);
        let output =
            self.command(unit).args(["-E", "-P", &format!("-D__global__={MARKER}")]).arg(&file).output();
        let output = output.expect("the compiler runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("sources are text")
    }

    /// Compiles what is older than the newest input or than its flags, several at a time.
    fn compile(
        &self,
        units: &[Unit],
        out: &Path,
        newest_input: impl Fn(&Unit) -> SystemTime + Sync,
    ) -> Vec<PathBuf> {
        let queue = Mutex::new(units.iter());
        let jobs = std::env::var("NUM_JOBS").ok().and_then(|jobs| jobs.parse().ok()).unwrap_or(1);
        std::thread::scope(|scope| {
            for _ in 0..jobs {
                scope.spawn(|| {
                    loop {
                        let next = queue.lock().expect("no other failed").next();
                        let Some(unit) = next else { return };
                        self.compile_unit(unit, out, newest_input(unit));
                    }
                });
            }
        });
        units.iter().map(|unit| out.join(&unit.name).with_extension("o")).collect()
    }

    fn compile_unit(&self, unit: &Unit, out: &Path, newest_input: SystemTime) {
        let file = out.join(&unit.name).with_extension("cpp");
        let object = file.with_extension("o");
        let part = match unit.name.as_str() {
            "emulation" => String::new(),
            name => format!(
                "\nextern \"C\" {{\nextern const int hbmark_part_{name};\nconst int hbmark_part_{name} = 0;\n}}\n"
            ),
        };
        write(&file, &format!("// Compiled with {:?}\n{}{part}", self.flags, unit.text));
        let age = |path: &Path| fs::metadata(path).and_then(|metadata| metadata.modified()).ok();
        if age(&object).is_some_and(|made| made > newest_input && Some(made) > age(&file)) {
            return;
        }
        let began = std::time::Instant::now();
        let output = self
            .command(unit)
            .arg("-c")
            .arg(&file)
            .arg("-o")
            .arg(&object)
            .output()
            .expect("the compiler runs");
        assert!(output.status.success(), "{}: {}", unit.name, String::from_utf8_lossy(&output.stderr));
        println!("{}: {:.1} s", unit.name, began.elapsed().as_secs_f32());
    }
}
