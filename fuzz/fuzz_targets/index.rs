//! `just fuzz index`
#![cfg_attr(fuzzing, no_main)]

hbmark_fuzz::target!("index");
