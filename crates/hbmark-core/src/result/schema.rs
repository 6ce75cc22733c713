//! The JSON Schemas that are published are those of the types. Schemas are derived in tests alone: nothing else needs that code.

use std::path::Path;

use super::Report;
use super::serving::ServeReport;

#[track_caller]
fn is_published(file: &str, schema: &schemars::Schema) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(file);
    let wanted = serde_json::to_string_pretty(schema).unwrap() + "\n";
    if std::env::var_os("INSTA_UPDATE").is_some_and(|v| v == "always") {
        std::fs::write(&path, &wanted).unwrap();
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(found, wanted, "run the tests with INSTA_UPDATE=always");
}

#[test]
fn the_published_schemas_are_those_of_the_types() {
    is_published("result.schema.json", &schemars::schema_for!(Report));
    is_published("serve.schema.json", &schemars::schema_for!(ServeReport));
}
