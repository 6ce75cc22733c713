//! `just fuzz foreign`
#![cfg_attr(fuzzing, no_main)]

hbmark_fuzz::target!("foreign");
