//! `just fuzz fleet`
#![cfg_attr(fuzzing, no_main)]

hbmark_fuzz::target!("fleet");
