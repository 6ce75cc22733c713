//! `just fuzz trace`
#![cfg_attr(fuzzing, no_main)]

hbmark_fuzz::target!("trace");
