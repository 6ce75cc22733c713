use super::*;
use crate::drain_commands;
use crate::folder::Reading;
use crate::result::{MissingRow, Settings};
use crate::simulation::{Fault, Simulated};
use crate::verdict::verdict;
use hbmark_report::output::{Format, Kind as _, render};

/// Two nodes of which one GPU lacks, one is slow and confirmed by hand, and one has a name to be escaped.
fn report() -> FleetReport {
    let mut runs = Simulated::new(64, 21, Some(Fault::SlowGpu(0.08))).runs();
    for run in runs.iter_mut().filter(|run| run.gpu == "GPU-00000002") {
        run.gpu = "GPU-\"<&>\\".into();
    }
    let list = crate::nodes::parse("node[0000-0008]").unwrap();
    let manifest = crate::plan::Manifest::new(crate::plan::Plan::open("quick-ceiling").unwrap(), list);
    for run in &mut runs {
        run.plan = Some(manifest.digest.clone());
    }
    let manifests = vec![(std::path::PathBuf::from("fleet.json"), manifest)];
    let mut report = verdict(Reading { manifests, runs, ..Reading::default() }, &Settings::default(), &[]);
    let suspect = report.findings.iter_mut().find(|f| f.kind == FindingKind::GpuSuspect).unwrap();
    suspect.kind = FindingKind::GpuSlow;
    let gpu = suspect.gpu.clone();
    report.gpus.iter_mut().find(|row| Some(&row.gpu) == gpu.as_ref()).unwrap().state = State::Slow;
    report
}

#[test]
fn nagios_gets_one_line_with_counts_and_the_worst_first() {
    let line = nagios(&report());
    assert!(
        line.starts_with("HBMARK FLEET CRITICAL: 8 MISSING, 1 SLOW, 63 of 72 GPUs ok; gpu_slow "),
        "{line}"
    );
    assert!(line.contains(" | ok=63 ") && line.lines().count() == 1, "{line}");
    assert_eq!([Level::Ok, Level::Warning, Level::Critical, Level::Unknown].map(Level::nagios), [0, 1, 2, 3]);
}

#[test]
fn prometheus_gets_no_timestamps_and_the_labels_of_dcgm_exporter() {
    let text = prometheus(&report(), 1_700_000_000);
    assert!(text.contains("hbmark_fleet_written_time_seconds 1700000000\n"));
    assert!(text.contains("hbmark_fleet_missing_gpus{Hostname=\"node0008\"} 8\n"));
    assert!(
        text.contains(r#"UUID="GPU-\"<&>\\",pci_bus_id="",modelName="NVIDIA H200",state="ok"} 1"#),
        "{text}"
    );
    let mut helped = std::collections::HashSet::new();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            assert!(helped.insert(rest.split(' ').next().unwrap().to_owned()), "twice: {line}");
        } else if !line.starts_with('#') {
            let (_, value) = line.rsplit_once(' ').unwrap();
            assert!(value.parse::<f64>().is_ok(), "a sample ends with its value: {line}");
            // After the labels one value and no timestamp.
            let after = line.rsplit_once('}').map_or(line, |(_, after)| after);
            assert!(after.split_whitespace().count() <= 2, "{line}");
        }
    }
}

#[test]
fn junit_has_a_case_for_each_gpu_and_check_where_missing_is_an_error_and_slow_a_failure() {
    let text = junit(&report());
    assert!(text.contains("tests=\"264\" failures=\"1\" errors=\"8\""), "{}", &text[..200]);
    assert_eq!(text.matches("<failure type=\"gpu_slow\"").count(), 1);
    assert_eq!(text.matches("<error type=\"gpu_missing\"").count(), 8);
    assert!(text.contains("name=\"GPU-&quot;&lt;&amp;&gt;\\ speed\""));
    let parsed = serde_json::to_string(&text).unwrap();
    assert!(!parsed.contains("\\u0000"));
}

#[test]
fn json_lines_are_one_object_a_finding_with_a_stable_code() {
    let report = report();
    let text = json_lines(&report);
    let lines: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), report.findings.len());
    assert_eq!(lines[0]["kind"], "gpu_slow");
    assert_eq!(lines[0]["level"], "critical");
}

#[test]
fn a_drain_is_printed_for_confirmed_nodes_alone_and_cannot_be_broken_out_of() {
    let mut report = report();
    let commands = drain_commands(&report);
    assert_eq!(commands.len(), 2, "{commands:?}");
    assert!(commands[0].starts_with("scontrol update NodeName=node") && commands[0].contains("State=DRAIN"));
    let finding = report.findings.iter_mut().find(|f| f.kind == FindingKind::GpuSlow).unwrap();
    finding.gpu = Some("\"; reboot $(x) `y` \n #".into());
    let hostile = drain_commands(&report);
    assert_eq!(hostile[0].matches('"').count(), 2, "{}", hostile[0]);
    assert!(!hostile[0].contains('$') && !hostile[0].contains('`') && !hostile[0].contains('\n'));
    report.findings.iter_mut().for_each(|f| f.node = Some("x; reboot".into()));
    assert_eq!(drain_commands(&report), Vec::<String>::new());
}

#[test]
fn every_format_prints_it_and_the_page_draws_every_gpu() {
    let report = report();
    insta::assert_snapshot!(render(&report, Format::Table, false).unwrap());
    let page = render(&report, Format::Html, false).unwrap();
    assert!(page.contains("rack × node × slot") && page.contains("rack000"));
    // A dot in the distribution and a square in the map.
    assert!(
        page.matches("class=\"mark\"").count() >= 2 * report.gpus.len(),
        "{}",
        page.matches("\"mark\"").count()
    );
    assert!(!page.contains("GPU-\"<&>"), "names are escaped");
    let saved: FleetReport = serde_json::from_str(&report.json().unwrap()).unwrap();
    assert_eq!(saved, report);
    assert!(render(&report, Format::Csv, false).unwrap().lines().count() > 64);
}

#[test]
fn a_spreadsheet_has_a_unit_for_each_value_and_the_gpus_that_are_missing() {
    let mut report = report();
    report.missing = vec![MissingRow {
        node: "node-lost".into(),
        rack: None,
        gpu: None,
        slot: None,
        count: 3,
        why: "no result".into(),
    }];
    let csv = render(&report, Format::Csv, false).unwrap();
    let mut lines = csv.lines();
    assert_eq!(
        lines.next().unwrap(),
        "node,rack,slot,gpu,gpus,device,state,metric,value,unit,effect,processes"
    );
    let values: usize = report.gpus.iter().map(|gpu| gpu.values.len().max(1)).sum();
    assert_eq!(lines.clone().count(), values + 1);
    let with = |unit: &str| csv.matches(&format!(",{unit},")).count();
    assert_eq!(with("bytes_per_s") + with("flop_per_s") + with("ns"), values);
    assert_eq!(lines.last().unwrap(), "node-lost,,,,3,,MISSING,,,,,");
}

#[test]
fn the_page_draws_named_gpus_over_days() {
    let settings = Settings::default();
    let runs = Simulated::new(64, 5, None).runs();
    let reading = |runs| Reading { runs, ..Reading::default() };
    let before = verdict(reading(runs.clone()), &settings, &[]);
    let mut slow = runs;
    slow.iter_mut().filter(|run| run.gpu == "GPU-00000007").for_each(|run| run.values[0].1 *= 0.9);
    let after = verdict(reading(slow), &settings, &[before]);
    let page = render(&after, Format::Html, false).unwrap();
    assert!(page.contains("day by day") && page.contains("fleet, over today"), "a trend");
}
