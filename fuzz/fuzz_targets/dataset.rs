//! `just fuzz dataset`
#![cfg_attr(fuzzing, no_main)]

hbmark_fuzz::target!("dataset");
