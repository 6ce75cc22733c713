//! CUDA sources as C++.
//!
//! Enters: a source file's text. Leaves: the same text, in which what no header can give a meaning is C++: `__shared__` variables come from the
//! emulation, an `asm` is a call of a function in `candle/include/ptx.h`, and launches are gone.

/// Turns a CUDA source into C++. `instructions` is the text that declares what is emulated of PTX.
pub fn translate(source: &str, instructions: &str) -> String {
    let source = replace_shared(source);
    let source = replace_asm(&source, instructions);
    remove_launches(&source)
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// The places of a word that is not part of a longer one.
fn find_word(text: &str, word: &str, from: usize) -> Option<usize> {
    let mut at = from;
    while let Some(found) = text[at..].find(word) {
        let start = at + found;
        at = start + word.len();
        if !text[..start].ends_with(is_word) && !text[at..].starts_with(is_word) {
            return Some(start);
        }
    }
    None
}

/// The place behind the bracket that closes the one at `open`; strings are skipped.
fn closing(text: &str, open: usize) -> usize {
    let (mut depth, mut quoted, mut escaped) = (0, false, false);
    for (at, c) in text[open..].char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' if quoted => escaped = true,
            '"' => quoted = !quoted,
            '(' if !quoted => depth += 1,
            ')' if !quoted => depth -= 1,
            _ => {}
        }
        if depth == 0 && !quoted && c == ')' {
            return open + at + 1;
        }
    }
    panic!("a bracket that is not closed: {}", &text[open..text.len().min(open + 80)]);
}

/// Splits at a character that is in no string and no bracket.
fn split(text: &str, at: char) -> Vec<&str> {
    let (mut parts, mut start, mut depth, mut quoted) = (Vec::new(), 0, 0, false);
    for (i, c) in text.char_indices() {
        match c {
            '"' => quoted = !quoted,
            '(' | '[' | '{' if !quoted => depth += 1,
            ')' | ']' | '}' if !quoted => depth -= 1,
            _ if c == at && !quoted && depth == 0 => {
                parts.push(&text[start..i]);
                start = i + c.len_utf8();
            }
            _ => {}
        }
    }
    parts.push(&text[start..]);
    parts.into_iter().map(str::trim).filter(|part| !part.is_empty()).collect()
}

fn replace_shared(source: &str) -> String {
    let (mut out, mut done) = (String::new(), 0);
    while let Some(word) = find_word(source, "__shared__", done) {
        let before = source[done..word].trim_end();
        let external = before.ends_with("extern");
        out += before.strip_suffix("extern").unwrap_or(&source[done..word]);
        let end = word + source[word..].find(';').expect("a declaration ends");
        let declared = source[word + "__shared__".len()..end].trim();
        let (head, sizes) = declared.split_at(declared.find('[').unwrap_or(declared.len()));
        let head = head.trim_end();
        let (kind, name) = head.split_at(head.rfind(|c| !is_word(c)).expect("a type and a name") + 1);
        if external {
            out += &format!("{kind}* {name} = static_cast<{kind}*>(hbmark::emulation::shared_dynamic());");
        } else {
            out += &format!(
                "typedef {kind} {name}_shared {sizes}; static const char {name}_site = 0; {name}_shared& {name} = \
                 *static_cast<{name}_shared*>(hbmark::emulation::shared_static(&{name}_site, sizeof({name}_shared)));"
            );
        }
        done = end + 1;
    }
    out + &source[done..]
}

fn replace_asm(source: &str, instructions: &str) -> String {
    let (mut out, mut done, mut from) = (String::new(), 0, 0);
    while let Some(word) = find_word(source, "asm", from) {
        from = word + "asm".len();
        let rest = source[from..].trim_start();
        let rest = rest.strip_prefix("volatile").unwrap_or(rest).trim_start();
        if !rest.starts_with('(') {
            continue;
        }
        let open = source.len() - rest.len();
        let end = closing(source, open);
        let parts = split(&source[open + 1..end - 1], ':');
        let instruction: String = parts[0]
            .trim_start_matches('"')
            .chars()
            .take_while(|c| !c.is_whitespace() && *c != '"')
            .collect();
        let name: String = instruction.chars().map(|c| if is_word(c) { c } else { '_' }).collect();
        out += &source[done..word];
        if instructions.contains(&format!(" {name}(")) {
            // An operand is a string and an expression in brackets.
            let operands = parts[1..].iter().flat_map(|part| split(part, ','));
            let operands: Vec<&str> =
                operands.map(|operand| &operand[operand.find('(').expect("an expression")..]).collect();
            out += &format!("hbmark::ptx::{name}({})", operands.join(", "));
        } else {
            out += &format!("hbmark::emulation::fail(\"no emulation of {instruction}\")");
        }
        (done, from) = (end, end);
    }
    out + &source[done..]
}

fn remove_launches(source: &str) -> String {
    let (mut out, mut done) = (String::new(), 0);
    while let Some(found) = source[done..].find("<<<") {
        let launch = done + found;
        let statement = done
            + source[done..launch]
                .char_indices()
                .filter(|(i, c)| {
                    let text = &source[done..launch];
                    match c {
                        ';' | '{' | '}' => true,
                        ':' => !text[..*i].ends_with(':') && !text[i + 1..].starts_with(':'),
                        _ => false,
                    }
                })
                .map(|(i, _)| i + 1)
                .next_back()
                .unwrap_or(0);
        let configured = launch + source[launch..].find(">>>").expect("a launch has its configuration") + 3;
        out += &source[done..statement];
        out += " (void)0";
        done = closing(source, configured + source[configured..].find('(').expect("a launch has arguments"));
    }
    out + &source[done..]
}

/// The names of the kernels with C linkage in what the preprocessor leaves, where `__global__` is left as `marker`.
pub fn kernels(preprocessed: &str, marker: &str) -> Vec<String> {
    let words: Vec<&str> = preprocessed.split_whitespace().collect();
    let starts = words.windows(5).filter(|w| w[..4] == ["extern", "\"C\"", marker, "void"]);
    starts.map(|w| w[4].split('(').next().unwrap_or_default().to_owned()).collect()
}
