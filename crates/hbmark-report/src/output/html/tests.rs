//! The page over results made by hand: well formed, the right values in the right plots, and no foreign text becomes markup.

mod browser;
mod serving;

use scraper::{Html, Selector};

use crate::output::{External, page as render};
use crate::samples;
use hbmark_core::model::Dtype;
use hbmark_core::result::{Cause, CellResult, Phase, Report, Status};

/// A name that would run a program in a page that does not escape.
pub(super) const HOSTILE: &str = "</script><img src=x onerror=alert(1)>";
/// The anchors of the plots.
const PLOTS: [&str; 6] = ["roofline", "ladder", "context", "batch", "blocks", "telemetry"];

fn parsed(report: &Report) -> Html {
    well_formed(&render(report, &[]))
}

pub(super) fn well_formed(text: &str) -> Html {
    let page = Html::parse_document(text);
    assert!(page.errors.is_empty(), "{:?}", page.errors);
    page
}

pub(super) fn texts(page: &Html, selector: &str) -> Vec<String> {
    page.select(&Selector::parse(selector).unwrap()).map(|e| e.text().collect()).collect()
}

pub(super) fn count(page: &Html, selector: &str) -> usize {
    page.select(&Selector::parse(selector).unwrap()).count()
}

/// A result in which every text a file can carry is hostile.
pub(super) fn hostile() -> Report {
    let mut report = samples::measured();
    let text = || HOSTILE.to_owned();
    report.model.name = text();
    report.model.source = text();
    report.model.hash = text();
    report.command = text();
    report.note = Some(text());
    report.hypothesis = Some(text());
    report.warnings = vec![text()];
    report.config.insert(text(), serde_json::Value::String(text()));
    report.environment.cpu.model = Some(text());
    for cell in &mut report.cells {
        cell.id = text();
        if cell.engine == "stock" {
            cell.engine = text();
        }
        cell.reason = Some(Cause::other(text()));
        cell.flags = vec![Cause::other(text())];
        cell.blocks[1].rejected = Some(Cause::other(text()));
        cell.blocks[2].conditions = vec![Cause::other(text())];
    }
    report.crossovers[0].explanation = text();
    for ladder in &mut report.ladders {
        ladder.story = text();
        ladder.rungs[0].engine = Some(text());
    }
    report
}

/// Each plot has a drawing for a desk and one for a phone, buttons to save it, and a table.
pub(super) fn every_plot_is_whole(page: &Html, plots: &[&str]) {
    for plot in plots {
        let (wide, narrow) =
            (count(page, &format!("#{plot} svg.wide")), count(page, &format!("#{plot} svg.narrow")));
        assert!(wide > 0 && wide == narrow, "{plot}: {wide} and {narrow}");
        assert!(count(page, &format!("#{plot} details table")) > 0, "{plot} has a table behind it");
        assert_eq!(count(page, &format!("#{plot} button[data-save=png]")), wide);
    }
}

#[test]
fn the_page_is_well_formed_and_has_every_plot_for_a_desk_and_a_phone() {
    let page = parsed(&samples::measured());
    every_plot_is_whole(&page, &PLOTS);
    assert_eq!(count(&page, "#ladder svg.wide"), 12, "a ladder for each of 2 phases, 2 batches, 3 contexts");
    assert_eq!(count(&page, "#batch svg.wide"), 2);
    assert_eq!(count(&page, "#context svg.wide"), 2, "one for each engine");
}

#[test]
fn plots_hold_the_values_of_the_result() {
    let report = samples::measured();
    let page = parsed(&report);
    let marks = |plot: &str| texts(&page, &format!("#{plot} svg.wide .mark > title"));
    assert_eq!(marks("roofline").len(), report.cells.len());
    assert_eq!(marks("blocks").len(), 5 * report.cells.len());
    assert_eq!(
        count(&page, "#blocks svg.wide .mark .cross"),
        report.cells.len(),
        "one rejected block a cell"
    );
    let decode = report.cells.iter().filter(|c| c.phase == Phase::Decode).count();
    assert_eq!(marks("context").len(), decode);
    assert_eq!(marks("batch").len(), 2 * decode);
    let first = report.cells.iter().find(|c| c.id == "decode/native/bf16/b1/c128").unwrap();
    let shown = format!("{:.0} ms", first.tpot_ns.unwrap() / 1e6);
    assert!(
        marks("context").iter().any(|m| m.contains(&first.id) && m.contains(&shown)),
        "{shown} {:?}",
        marks("context")
    );
    assert!(texts(&page, "#roofline svg.wide text").contains(&"read 10.0 GB/s".to_owned()));
    assert!(texts(&page, "#batch svg.wide text").contains(&"compute-bound from 64".to_owned()));
    // Native takes 1.1 times its floor, so its KV is read at a 1.1th of 10 GB/s.
    assert!(
        texts(&page, "#context svg text.title").contains(&"native bf16: KV read at 9.08 GB/s".to_owned()),
        "{:?}",
        texts(&page, "#context svg text.title")
    );
    assert!(
        texts(&page, "#telemetry figcaption").concat().contains("Not reported by this machine: memory clock")
    );
    let findings = texts(&page, "#findings").concat();
    assert!(
        findings.contains("load average 1.15") && findings.contains("native kernel overhead"),
        "{findings}"
    );
    assert!(texts(&page, "#reproduce pre")[0].contains("hbmark run --engine stock,native"));
}

#[test]
fn a_legend_says_each_thing_once() {
    let page = parsed(&samples::saved("run-scripted"));
    let mut keys = texts(&page, "#roofline svg.wide text.key");
    assert!(keys.contains(&"decode scripted bf16, disturbed".to_owned()), "{keys:?}");
    let all = keys.len();
    keys.sort();
    keys.dedup();
    assert_eq!(keys.len(), all, "{keys:?}");
}

#[test]
fn decodes_of_other_programs_stand_on_the_roofline() {
    let report = samples::measured();
    let mut cell = report.cells.iter().find(|c| c.id == "decode/native/bf16/b1/c128").unwrap().clone();
    cell.engine = "vllm".into();
    cell.tpot_ns = cell.tpot_ns.map(|t| t * 2.0);
    let external =
        |file: &str, label: &str| External { file: file.into(), label: label.into(), cell: cell.clone() };
    let externals = [external("one.json", HOSTILE), external("one.json", "c8"), external("two.json", "c8")];
    let page = well_formed(&render(&report, &externals));
    let marks = texts(&page, "#roofline svg.wide .mark > title");
    assert_eq!(marks.len(), report.cells.len() + 3);
    let theirs = marks.iter().find(|m| m.starts_with("vllm, imported")).unwrap();
    assert!(theirs.contains(HOSTILE) && theirs.contains("45.4 % of the roof"), "{theirs}");
    let keys = texts(&page, "#roofline svg.wide text.key");
    for file in ["one.json", "two.json"] {
        let own = format!("vllm (imported from {file})");
        assert_eq!(keys.iter().filter(|key| **key == own).count(), 1, "{keys:?}");
    }
    let triangles = |colour| count(&page, &format!("#roofline svg.wide .mark > path.{colour}"));
    assert_eq!((triangles("c5"), triangles("c4")), (2, 1), "a colour for each file");
    assert_eq!(count(&page, "img"), 0);
    let named = format!("one.json {HOSTILE}");
    assert!(texts(&page, "#roofline td").contains(&named), "and in the table behind it");
}

#[test]
fn nothing_that_strangers_wrote_becomes_markup() {
    let report = hostile();
    let page = parsed(&report);
    assert_eq!((count(&page, "img"), count(&page, "script")), (0, 1));
    assert_eq!(texts(&page, "h1"), [format!("{HOSTILE}: step benchmark")]);
    assert_eq!(texts(&page, "#reproduce pre"), [HOSTILE]);
    assert_eq!(render(&report, &[]).matches("</script").count(), 1);
}

#[test]
fn the_page_names_no_address_and_admits_only_itself() {
    let text = render(&samples::measured(), &[]);
    let elsewhere: Vec<&str> = text.split("http").skip(1).map(|rest| &rest[..20.min(rest.len())]).collect();
    let allowed = |rest: &&str| rest.starts_with("://www.w3.org/2000/s") || rest.starts_with("-equiv=");
    assert!(elsewhere.iter().all(allowed), "{elsewhere:?}");
    assert!(
        !text.contains("url(")
            && !text.contains("@import")
            && !text.contains(" src=")
            && !text.contains(" href=")
    );
    let page = Html::parse_document(&text);
    let policy =
        page.select(&Selector::parse("meta[http-equiv=Content-Security-Policy]").unwrap()).next().unwrap();
    let policy = policy.value().attr("content").unwrap();
    assert!(
        policy.starts_with("default-src 'none'; style-src 'sha256-") && !policy.contains("unsafe"),
        "{policy}"
    );
}

#[test]
fn a_result_without_data_says_so_in_the_place_of_each_plot() {
    let page = parsed(&samples::report());
    for plot in PLOTS {
        assert_eq!(
            (count(&page, &format!("#{plot} .absent")), count(&page, &format!("#{plot} svg"))),
            (1, 0),
            "{plot}"
        );
    }
    let mut skipped = samples::report();
    skipped.cells = vec![CellResult::blank(Phase::Decode, "stock", Dtype::F32, 1, 128)];
    assert_eq!(count(&parsed(&skipped), ".absent"), PLOTS.len());
}

#[test]
fn cells_whose_blocks_were_all_disturbed_were_measured_and_are_not_taken_apart() {
    let mut report = samples::measured();
    for cell in &mut report.cells {
        cell.status = Status::Disturbed;
        cell.blocks.iter_mut().for_each(|block| block.rejected = Some(Cause::ForeignLoad { cores: 0.8 }));
        (cell.step_ns, cell.tpot_ns) = (None, None);
    }
    crate::analysis::judge::recompute(&mut report);
    let page = parsed(&report);
    let told = texts(&page, "#ladder .absent").concat();
    assert!(
        told.contains("No cell has a block that counts") && told.contains("medians over all blocks"),
        "{told}"
    );
    assert!(texts(&page, "#cells td").iter().any(|cell| cell.starts_with('[')), "and the medians are shown");
    let findings = texts(&page, "#findings p").concat();
    assert!(findings.starts_with("24 of 24 cells measured, 24 not simply ok."), "{findings}");
}

#[test]
fn one_batch_and_one_context_are_told_what_they_lack() {
    let mut report = samples::measured();
    report.cells.retain(|c| c.batch == 1 && c.context == 128);
    crate::analysis::judge::recompute(&mut report);
    let page = parsed(&report);
    assert!(texts(&page, "#context .absent")[0].contains("Only context 128 was measured"));
    assert!(texts(&page, "#batch .absent")[0].contains("Only batch 1 was measured"));
    assert_eq!(count(&page, "#roofline svg"), 2);
}

#[test]
fn numbers_that_make_no_sense_draw_no_nonsense() {
    let mut report = samples::measured();
    for (i, cell) in report.cells.iter_mut().enumerate() {
        cell.flops = [0.0, -1.0, 1e300, f64::MIN_POSITIVE][i % 4];
        cell.tpot_ns = Some([0.0, -5.0, 1e308, 1e-300][i % 4]);
        cell.blocks[0].at_ns = [-1e18, 1e308][i % 2];
    }
    if let Some(ceilings) = &mut report.ceilings {
        ceilings.read_bytes_per_s.median = 0.0;
    }
    let text = render(&report, &[]);
    assert!(!text.contains("NaN") && !text.contains("=\"inf") && !text.contains(",inf"));
    parsed(&report);
}

#[test]
fn a_prediction_draws_what_it_has_and_leaves_out_what_it_cannot_have() {
    let report: Report = crate::samples::saved("predict-h100");
    let page = parsed(&report);
    assert_eq!(count(&page, ".absent, #ladder, #blocks, #telemetry"), 0);
    let marks = |plot: &str| count(&page, &format!("#{plot} svg.wide .mark"));
    // Two dtypes, batches and contexts; a context beyond the model has no time.
    assert_eq!((marks("roofline"), marks("context"), marks("batch")), (16, 8, 16));
    assert_eq!(count(&page, "#context svg.wide polyline"), 4, "a line for each dtype and batch");
    let captions = texts(&page, "figcaption").concat();
    assert!(captions.contains("nothing was measured") && !captions.contains("intervals"), "{captions}");
}

#[test]
fn a_doubtful_cell_has_its_range_and_its_rate_over_all_blocks_in_the_plots_over_batch() {
    let mut report = samples::measured();
    let cell = report.cells.iter_mut().find(|cell| cell.phase == Phase::Decode && cell.batch == 4).unwrap();
    cell.status = Status::Disturbed;
    // One block of a hundred times the others is far above every median.
    let block = &mut cell.blocks[4];
    block.step_ns.iter_mut().chain(&mut block.interval_ns).for_each(|time| *time *= 100.0);
    crate::analysis::judge::recompute(&mut report);
    let cell = report.cells.iter().find(|cell| cell.all_blocks.is_some()).unwrap();
    let page = parsed(&report);
    assert_eq!(count(&page, "#batch svg.wide[data-name=tpot-batch] .whisker.doubtful"), 1);
    let rate = cell.all_blocks.as_ref().unwrap().tokens_per_s.median;
    assert!((rate / cell.tokens_per_s.unwrap() - 1.0).abs() > 0.1, "the two differ");
    let hovers = texts(&page, "#batch svg.wide[data-name=throughput-batch] .mark > title");
    let shown = crate::output::plot::axis::Measure::TokensPerSecond.show(rate);
    assert!(hovers.contains(&format!("{}\n{shown}", cell.id)), "{shown}: {hovers:?}");
}

#[test]
fn a_predicted_step_of_a_group_lies_below_the_roof_by_what_is_exchanged() {
    let shares = |name: &str| {
        let page = parsed(&samples::saved(name));
        let caption = texts(&page, "#roofline figcaption").concat();
        let hovers = texts(&page, "#roofline svg.wide .mark > title");
        let share = |hover: &String| hover.lines().last().unwrap().replace(" of the roof", "");
        (caption, hovers.iter().map(share).collect::<Vec<_>>())
    };
    let (caption, of_one) = shares("predict-h200");
    assert!(caption.contains("lie on the roofline of their dtype"), "{caption}");
    assert!(of_one.iter().all(|share| share == "100 %"), "{of_one:?}");
    let (caption, of_group) = shares("predict-70b-8-h200");
    assert!(caption.contains("below the roofline of a GPU by what the GPUs exchange"), "{caption}");
    assert!(of_group.iter().all(|share| share != "100 %"), "{of_group:?}");
}

#[test]
fn ceilings_of_an_earlier_run_are_not_of_this_one() {
    let mut report = samples::measured();
    let said = |report: &Report| texts(&parsed(report), "body").concat();
    assert!(said(&report).contains("ceiling measured in this run"));
    report.ceilings.as_mut().unwrap().age_s = Some(600.0);
    let text = said(&report);
    assert!(!text.contains("measured in this run"), "{text}");
    for words in ["ceiling measured 10 min before this run", "Ceilings measured 10 min before this run"] {
        assert!(text.contains(words), "{words}");
    }
}

#[test]
fn a_setting_of_the_machine_is_no_disturbance_of_a_block() {
    let title = |conditions: &[(usize, Cause)]| {
        let mut report = samples::measured();
        for (block, cause) in conditions {
            report.cells[0].blocks[*block].conditions.push(cause.clone());
        }
        texts(&parsed(&report), "#blocks svg.wide text.title").concat()
    };
    let load = || Cause::ForeignLoad { cores: 0.9 };
    assert!(title(&[]).ends_with("24 rejected"), "{}", title(&[]));
    // The second block is rejected already.
    assert!(title(&[(1, load())]).ends_with("24 rejected"));
    let both = title(&[(0, load()), (2, Cause::other("pinned clocks")), (3, Cause::other("pinned clocks"))]);
    assert!(both.ends_with("24 rejected, 1 counted with a disturbance, 2 with a condition"), "{both}");
}
