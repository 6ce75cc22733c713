//! `just fuzz safetensors`
#![cfg_attr(fuzzing, no_main)]

hbmark_fuzz::target!("safetensors");
