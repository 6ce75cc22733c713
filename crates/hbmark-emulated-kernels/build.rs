//! Compiles `kernels/*.cu` as C++ with the emulation of a GPU in `kernels/emulation`. In a release build, which is for benches, nothing is
//! compiled.

use std::path::{Path, PathBuf};

fn main() {
    // Relative to the crate, where a build script runs: a target folder may be used by several checkouts.
    let kernels = Path::new("../../kernels");
    println!("cargo::rerun-if-changed={}", kernels.display());
    println!("cargo::rustc-check-cfg=cfg(compiled)");
    if std::env::var("PROFILE").is_ok_and(|profile| profile != "debug") {
        return;
    }
    // Cargo runs this once for lints, which link nothing, and once for what is built.
    let wrapper = std::env::var_os("RUSTC_WORKSPACE_WRAPPER").unwrap_or_default();
    if wrapper.to_string_lossy().contains("clippy") {
        println!("cargo::rustc-cfg=compiled");
        return;
    }
    let mut files: Vec<PathBuf> = std::fs::read_dir(kernels)
        .expect("kernels/ is part of the repository")
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|e| e == "cu"))
        .chain(["planted.cu", "emulation.cpp"].map(|name| kernels.join("emulation").join(name)))
        .collect();
    files.sort();
    let built = cc::Build::new()
        .cpp(true)
        .std("c++17")
        .opt_level(2)
        .debug(false)
        .define("HBMARK_EMULATED", None)
        // Vectors are read from bytes, as on the device; pragmas are for unrolling there.
        .flags(["-xc++", "-fno-strict-aliasing", "-Wno-unknown-pragmas", "-Wno-maybe-uninitialized"])
        .cargo_warnings(false)
        .files(files)
        // Kernels are found by their names only: no linker sees that they are used.
        .link_lib_modifier("+whole-archive")
        .try_compile("hbmark_emulated_kernels");
    match built {
        Ok(()) => println!("cargo::rustc-cfg=compiled"),
        Err(error) => {
            for line in
                format!("tests run the CUDA kernels on the host, which needs a C++17 compiler: {error}")
                    .lines()
            {
                println!("cargo::error={line}");
            }
            std::process::exit(1);
        }
    }
}
