//! Compiles the kernels for the host.

#[path = "build/kernels.rs"]
mod kernels;

fn main() {
    kernels::build(&[]);
}
