//! `just fuzz metrics`
#![cfg_attr(fuzzing, no_main)]

hbmark_fuzz::target!("metrics");
