//! Compiles the kernels for the host, and names the library that holds everything.

#[path = "build/kernels.rs"]
mod kernels;

fn main() {
    // What these call is in counting/; no library of a sanitizer is linked.
    kernels::build(&[
        "-fsanitize=thread",
        "--param=tsan-instrument-func-entry-exit=0",
        "-fsanitize=alignment",
        "-fno-sanitize-recover=alignment",
    ]);
    // What programs look for is the driver's library.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
}
