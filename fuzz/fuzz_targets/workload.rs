//! `just fuzz workload`
#![cfg_attr(fuzzing, no_main)]

hbmark_fuzz::target!("workload");
