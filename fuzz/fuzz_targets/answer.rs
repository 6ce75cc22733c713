//! `just fuzz answer`
#![cfg_attr(fuzzing, no_main)]

hbmark_fuzz::target!("answer");
