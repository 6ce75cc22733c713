//! Two saved results beside each other.

use crate::analysis::{FigurePair, SideBySide};
use crate::output::Kind;
use crate::output::document::{Document, measured, numbers, words};
use crate::output::kinds::comparison::differing;
use crate::output::metrics::Unit;

impl Kind for SideBySide {
    fn document(&self) -> Document {
        let mut document = Document::new(format!("{} beside another", self.kind));
        let differing = match self.differences.as_slice() {
            [] => "nothing that the results report differs between them".to_owned(),
            differences => differing(differences, "not reported"),
        };
        document.list([format!("A: {}", self.a), format!("B: {}", self.b), differing]);
        let (times, rates): (Vec<&FigurePair>, Vec<&FigurePair>) =
            self.figures.iter().partition(|pair| pair.is_time);
        for (figures, unit) in [(times, Unit::Nanoseconds), (rates, Unit::PerSecond)] {
            if figures.is_empty() {
                continue;
            }
            let ratio = |pair: &&FigurePair| match pair.ratio() {
                Some(ratio) => format!("{ratio:.4}"),
                None if !pair.comparable => "not comparable".to_owned(),
                None => "-".to_owned(),
            };
            document.table(vec![
                words("of", figures.iter().map(|pair| pair.of.clone())),
                words("figure", figures.iter().map(|pair| pair.figure.clone())),
                measured("A", unit, figures.iter().map(|pair| pair.a)),
                measured("B", unit, figures.iter().map(|pair| pair.b)),
                numbers("B/A", figures.iter().map(ratio)),
            ]);
        }
        document.section("what this cannot prove", self.limits.iter().cloned());
        document.sheet = Some(vec![
            words("of", self.figures.iter().map(|pair| pair.of.clone())),
            words("figure", self.figures.iter().map(|pair| pair.figure.clone())),
            words("unit", self.figures.iter().map(|pair| if pair.is_time { "ns" } else { "1/s" }.to_owned())),
            measured("a", Unit::Count, self.figures.iter().map(|pair| pair.a)),
            measured("b", Unit::Count, self.figures.iter().map(|pair| pair.b)),
            measured("ratio", Unit::Count, self.figures.iter().map(FigurePair::ratio)),
        ]);
        document
    }

    fn json(&self) -> serde_json::Result<String> {
        serde_json::to_string_pretty(self)
    }
}
