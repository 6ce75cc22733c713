//! `just fuzz config`
#![cfg_attr(fuzzing, no_main)]

hbmark_fuzz::target!("config");
