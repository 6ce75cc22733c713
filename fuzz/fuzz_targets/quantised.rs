//! `just fuzz quantised`
#![cfg_attr(fuzzing, no_main)]

hbmark_fuzz::target!("quantised");
