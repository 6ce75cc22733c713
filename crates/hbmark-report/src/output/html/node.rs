//! A tree of markup that escapes everything by construction.
//!
//! Enters: names of elements and attributes from this program, untrusted text. Leaves: HTML, or SVG inside it. Only a `&'static str`
//! can be written as it is, so nothing that came with a result can open an element, close a script or add an attribute.

use std::fmt::Write;

use hbmark_core::input::acts;

/// One element.
#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    tag: &'static str,
    attributes: Vec<(&'static str, String)>,
    children: Vec<Child>,
}

#[derive(Debug, Clone, PartialEq)]
enum Child {
    Element(Node),
    Text(String),
    /// Style sheets and scripts of this program.
    Verbatim(&'static str),
}

/// An element without attributes or children.
pub fn el(tag: &'static str) -> Node {
    Node { tag, attributes: Vec::new(), children: Vec::new() }
}

impl Node {
    pub fn attr(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.attributes.push((name, value.into()));
        self
    }

    pub fn class(self, value: impl Into<String>) -> Self {
        self.attr("class", value)
    }

    /// A coordinate, to a tenth of a pixel.
    pub fn at(self, name: &'static str, pixels: f64) -> Self {
        self.attr(name, pixel(pixels))
    }

    pub fn child(mut self, child: Node) -> Self {
        self.children.push(Child::Element(child));
        self
    }

    pub fn children(mut self, children: impl IntoIterator<Item = Node>) -> Self {
        self.children.extend(children.into_iter().map(Child::Element));
        self
    }

    pub fn text(mut self, text: impl Into<String>) -> Self {
        self.children.push(Child::Text(text.into()));
        self
    }

    pub fn verbatim(mut self, text: &'static str) -> Self {
        self.children.push(Child::Verbatim(text));
        self
    }

    /// The markup of the element and all below it.
    pub fn render(&self) -> String {
        let mut out = String::new();
        self.write(&mut out);
        out
    }

    fn write(&self, out: &mut String) {
        let _ = write!(out, "<{}", self.tag);
        for (name, value) in &self.attributes {
            let _ = write!(out, " {name}=\"");
            escape(out, value);
            out.push('"');
        }
        out.push('>');
        // The elements of HTML that have no end.
        if matches!(self.tag, "meta" | "br" | "hr" | "input") {
            return;
        }
        for child in &self.children {
            match child {
                Child::Element(node) => node.write(out),
                Child::Text(text) => escape(out, text),
                Child::Verbatim(text) => out.push_str(text),
            }
        }
        let _ = write!(out, "</{}>", self.tag);
        if matches!(self.tag, "p" | "li" | "tr" | "svg" | "figure" | "section" | "table" | "g" | "head") {
            out.push('\n');
        }
    }
}

/// A number of pixels as short as a tenth allows.
pub fn pixel(pixels: f64) -> String {
    let shown = format!("{pixels:.1}");
    shown.strip_suffix(".0").map_or_else(|| shown.clone(), str::to_owned)
}

/// Text that stays text, in an element or in a quoted attribute. What steers a terminal or turns the direction of writing is shown as a
/// replacement character.
fn escape(out: &mut String, text: &str) {
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            '\n' | '\t' => out.push(c),
            c if acts(c) => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_attributes_cannot_become_markup() {
        let hostile = "</script><img src=x onerror='a\"b'>&\u{202e}\u{0}";
        let shown = el("p").attr("title", hostile).text(hostile).render();
        let escaped = "&lt;/script&gt;&lt;img src=x onerror=&#39;a&quot;b&#39;&gt;&amp;\u{fffd}\u{fffd}";
        assert_eq!(shown, format!("<p title=\"{escaped}\">{escaped}</p>\n"));
    }

    #[test]
    fn coordinates_are_short() {
        assert_eq!((pixel(12.0), pixel(12.34), pixel(-0.26)), ("12".into(), "12.3".into(), "-0.3".into()));
    }
}
