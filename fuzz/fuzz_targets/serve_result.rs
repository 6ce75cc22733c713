//! `just fuzz serve_result`
#![cfg_attr(fuzzing, no_main)]

hbmark_fuzz::target!("serve_result");
