//! `just fuzz gguf`
#![cfg_attr(fuzzing, no_main)]

hbmark_fuzz::target!("gguf");
