//! Imports point up the table of `ARCHITECTURE.md` only: a module uses the modules in the rows above its own.
//!
//! What the table calls `*` is a crate whose modules have no order among themselves. Tests may look anywhere: folders and files named
//! `tests` or `*_tests`, and what stands behind the first `mod tests` of a file, are not read.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use crate::runs::{root, sources};

/// The rows of the table, uppermost first: crate and module.
fn table(text: &str) -> Vec<(String, String)> {
    let rows = text.lines().skip_while(|line| !line.starts_with("| crate | module |")).skip(2);
    let cells = rows.take_while(|line| line.starts_with('|')).map(|line| {
        let mut cells = line.split('|').skip(1).map(|cell| cell.trim().to_owned());
        (cells.next().unwrap(), cells.next().unwrap())
    });
    cells.collect()
}

/// The folder of a crate's source.
fn source(name: &str) -> PathBuf {
    if name == "hbmark" { root().join("src") } else { root().join("crates").join(name).join("src") }
}

/// How imports of the workspace begin.
const PREFIXES: [&str; 9] = [
    "crate::",
    "hbmark_core::",
    "hbmark_cpu_kernels::",
    "hbmark_emulated_kernels::",
    "hbmark_traffic::",
    "hbmark_client::",
    "hbmark_report::",
    "hbmark_fleet::",
    "hbmark::",
];

/// What a program text imports of the workspace: crate and module, with the line. A use tree in braces is one import per first segment.
fn imports(text: &str, own: &str) -> Vec<(String, String, usize)> {
    let mut found = Vec::new();
    let lines: Vec<&str> = text.lines().map(|line| line.split("//").next().unwrap()).collect();
    for (index, line) in lines.iter().enumerate() {
        // A use tree may go on over several lines.
        let opened = line.trim_start().contains("use ") && line.contains("::{") && !line.contains('}');
        let last = if opened { lines[index..].iter().position(|line| line.contains(';')) } else { None };
        let code = lines[index..=index + last.unwrap_or(0)].concat();
        for (at, prefix) in PREFIXES.iter().flat_map(|prefix| code.match_indices(prefix)) {
            let before = code[..at].chars().next_back();
            if before.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == ':' || c == '$') {
                continue;
            }
            let name = prefix.trim_end_matches("::").replace('_', "-");
            let name = if name == "crate" { own.to_owned() } else { name };
            let rest = &code[at + prefix.len()..];
            let word = |text: &str| -> String {
                text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
            };
            match rest.strip_prefix('{') {
                // `use crate::{a::X, b}`: rustfmt keeps short trees on a line.
                Some(tree) => {
                    found.extend(tree.split(',').map(|item| (name.clone(), word(item.trim()), index + 1)));
                }
                None => found.push((name.clone(), word(rest), index + 1)),
            }
        }
    }
    found.retain(|(_, module, _)| !module.is_empty());
    found
}

/// What each module of a crate imports.
type Graph = BTreeMap<(String, String), BTreeSet<String>>;

/// Modules with what they import, and every import that points down the table.
fn read(rows: &[(String, String)]) -> (Graph, Vec<String>) {
    let rank =
        |name: &str, module: &str| rows.iter().position(|(c, r)| c == name && (r == module || r == "*"));
    let mut graph = Graph::new();
    let mut wrong = Vec::new();
    let crates: BTreeSet<&str> = rows.iter().map(|(name, _)| name.as_str()).collect();
    for name in crates {
        let folder = source(name);
        let mut found = Vec::new();
        sources(&folder, &mut found);
        for path in found {
            let relative = path.strip_prefix(&folder).unwrap().to_string_lossy().into_owned();
            let names = relative.trim_end_matches(".rs").split('/');
            let mut tests = names.filter(|name| *name == "tests" || name.ends_with("_tests"));
            if tests.next().is_some() || matches!(relative.as_str(), "lib.rs" | "main.rs") {
                continue;
            }
            let module = relative.split('/').next().unwrap().trim_end_matches(".rs").to_owned();
            let Some(here) = rank(name, &module) else {
                wrong.push(format!(
                    "{name}/src/{relative}: the module `{module}` is not in the table of ARCHITECTURE.md"
                ));
                continue;
            };
            let text = std::fs::read_to_string(&path).unwrap();
            let text = text.split("\nmod tests {").next().unwrap();
            for (other, target, line) in imports(text, name) {
                // What is not a module is an item of a crate's root.
                let Some(there) = rank(&other, &target) else { continue };
                let star = rows[here].1 == "*" && other == name;
                if (other.as_str(), &target) == (name, &module) || star {
                    continue;
                }
                graph
                    .entry((name.to_owned(), module.clone()))
                    .or_default()
                    .insert(format!("{other}::{target}"));
                if there > here {
                    wrong.push(format!(
                        "{name}/src/{relative}:{line}: `{module}` imports {other}::{target}, which is below it"
                    ));
                }
            }
        }
    }
    (graph, wrong)
}

#[test]
fn no_import_points_down_the_table() {
    let rows = table(&std::fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap());
    assert!(rows.len() > 15, "the table of ARCHITECTURE.md was not found");
    let (graph, wrong) = read(&rows);
    for ((name, module), imports) in &graph {
        println!(
            "{name:<15} {module:<16} {}",
            imports.iter().map(String::as_str).collect::<Vec<_>>().join(" ")
        );
    }
    assert!(graph.len() > 12, "hardly anything was read");
    assert!(wrong.is_empty(), "imports that point down the table:\n{}", wrong.join("\n"));
}

#[test]
fn every_module_of_the_table_exists_and_every_crate_is_in_it() {
    let rows = table(&std::fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap());
    for entry in std::fs::read_dir(root().join("crates")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(rows.iter().any(|(own, _)| *own == name), "{name} is not in the table");
    }
    for (name, module) in rows.iter().filter(|(_, module)| module != "*") {
        let folder = source(name);
        assert!(
            folder.join(module).is_dir() || folder.join(format!("{module}.rs")).is_file(),
            "{name} has no module {module}"
        );
    }
}

#[test]
fn an_import_is_found_in_every_form() {
    let text = "use crate::cli::axes;\nlet x = crate::run::plan();\nuse hbmark_core::{result::Cell, units::Nanos};\n// crate::serve\nuse other_crate::cli;\nuse crate::{\n    cli::{axes, // crate::run\n    },\n    worker,\n};";
    let found = imports(text, "hbmark");
    let names: Vec<String> =
        found.iter().map(|(name, module, line)| format!("{name}::{module}@{line}")).collect();
    assert_eq!(
        names,
        [
            "hbmark::cli@1",
            "hbmark::run@2",
            "hbmark-core::result@3",
            "hbmark-core::units@3",
            "hbmark::cli@6",
            "hbmark::worker@6"
        ]
    );
}
