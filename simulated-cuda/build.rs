//! Compiles the kernels for the host, and names the library that holds everything.

#[path = "build/kernels.rs"]
mod kernels;

fn main() {
    kernels::build(&[]);
    // What programs look for is the driver's library.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
}
