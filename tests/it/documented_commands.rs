//! Every command in the documentation and in the help is one that the program takes: its flags exist, go together, and have values that can
//! be read. Nothing is run.

use std::path::{Path, PathBuf};

use clap::{CommandFactory, Parser};

use hbmark::cli::Cli;

/// Commands in blocks of `sh` in a page of Markdown, each with its line; lines that end in a backslash go on.
fn documented(page: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut shell = false;
    let mut lines = page.lines().enumerate();
    while let Some((number, line)) = lines.next() {
        if let Some(language) = line.trim_start().strip_prefix("```") {
            shell = ["sh", "bash", "console"].contains(&language);
            continue;
        }
        let mut whole = line.trim_start().trim_start_matches("$ ").to_owned();
        while let Some(begun) = whole.strip_suffix('\\') {
            whole = format!("{begun} {}", lines.next().map_or("", |(_, next)| next.trim()));
        }
        if shell && whole.starts_with("hbmark ") {
            found.push((number + 1, whole));
        }
    }
    found
}

/// Commands in the help of a command and of those below it.
fn in_help(command: &clap::Command) -> Vec<String> {
    let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    // Examples are indented by two; prose is not, and a table has more blanks behind the name.
    let example = |line: &str| line.strip_prefix("  hbmark ").is_some_and(|rest| !rest.starts_with(' '));
    let own = help.lines().filter(|line| example(line)).map(|line| line.trim().to_owned());
    own.chain(command.get_subcommands().flat_map(in_help)).collect()
}

/// Why the program would refuse a command, as far as its arguments tell.
fn problem(command: &str) -> Option<String> {
    let words = shlex::split(command).expect("quotes are closed");
    let ends = |word: &String| ["|", ">", "&&", "||"].contains(&word.as_str());
    let words: Vec<String> = words.into_iter().take_while(|word| !ends(word)).collect();
    let error = Cli::try_parse_from(&words).err()?;
    Some(error.to_string().lines().next().unwrap_or_default().to_owned())
}

fn pages() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let docs = std::fs::read_dir(root.join("docs")).unwrap().map(|entry| entry.unwrap().path());
    let mut pages: Vec<PathBuf> = docs.filter(|path| path.extension().is_some_and(|e| e == "md")).collect();
    pages.extend(["README.md", "CONTRIBUTING.md", "results/README.md"].map(|name| root.join(name)));
    pages.sort();
    pages
}

#[test]
fn every_documented_command_is_one_that_the_program_takes() {
    let mut seen = 0;
    let mut wrong = Vec::new();
    for page in pages() {
        for (line, command) in documented(&std::fs::read_to_string(&page).unwrap()) {
            seen += 1;
            wrong.extend(
                problem(&command).map(|why| format!("{}:{line}: {command}\n    {why}", page.display())),
            );
        }
    }
    for command in in_help(&Cli::command()) {
        seen += 1;
        wrong.extend(problem(&command).map(|why| format!("help: {command}\n    {why}")));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(seen > 100, "{seen} commands were found");
}

#[test]
fn a_flag_that_is_gone_is_found() {
    let page = "```sh\nhbmark run --batch 1 \\\n    --no-such-flag   # a comment\n```\n\n`hbmark nothing`\n";
    let found = documented(page);
    assert_eq!(found.len(), 1);
    assert!(problem(&found[0].1).unwrap().contains("--no-such-flag"));
    assert_eq!(problem("hbmark run --batch 1 | tee log # hbmark nothing"), None);
}
