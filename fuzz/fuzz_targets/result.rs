//! `just fuzz result`
#![cfg_attr(fuzzing, no_main)]

hbmark_fuzz::target!("result");
