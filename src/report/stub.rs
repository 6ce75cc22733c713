use super::*;
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    Table,
    Json,
    Csv,
    Md,
}
#[derive(Debug, Clone)]
pub struct RenderOptions {
    pub color: bool,
    pub width: Option<usize>,
}
impl RenderOptions {
    pub fn plain() -> Self {
        Self { color: false, width: None }
    }
}
pub fn render(r: &Report, _f: Format, _o: &RenderOptions) -> anyhow::Result<String> {
    Ok(serde_json::to_string_pretty(r)?)
}
pub mod json {
    pub fn read(p: &std::path::Path) -> anyhow::Result<super::Report> {
        Ok(serde_json::from_str(&std::fs::read_to_string(p)?)?)
    }
}
pub mod glossary {
    pub fn entries() -> Vec<u8> {
        vec![]
    }
    pub fn markdown() -> String {
        String::new()
    }
    pub fn text() -> String {
        String::new()
    }
}
