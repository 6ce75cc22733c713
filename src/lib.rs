//! tmp
pub mod config;
pub mod engine;
pub mod measure;
pub mod model;
pub mod plan;
pub mod report;
pub mod roofline;
pub mod stats;
pub mod units;
