//! `just fuzz tokenizer`
#![cfg_attr(fuzzing, no_main)]

hbmark_fuzz::target!("tokenizer");
