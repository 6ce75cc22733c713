//! What workloads promise: means, seeds, sharing, shares of tenants.

use std::collections::HashSet;

use super::*;
use hbmark_core::stats::mean;

fn plan(workload: &Workload, count: usize, seed: u64) -> Vec<PlannedRequest> {
    workload.plan(Some(10.0), Arrivals::Poisson, None, count, seed)
}

#[test]
fn named_workloads_have_the_means_they_claim() {
    for (name, input, output) in [
        ("chat", 500.0, 200.0),
        ("code", 1500.0, 500.0),
        ("long-context-qa", 16_000.0, 300.0),
        ("summarization", 4000.0, 150.0),
        ("rag", 4096.0, 256.0),
        ("batch", 1024.0, 1024.0),
    ] {
        let plan = plan(&Workload::named(name).unwrap(), 20_000, 1);
        let of = |f: &dyn Fn(&PlannedRequest) -> usize| {
            mean(&plan.iter().map(|p| f(p) as f64).collect::<Vec<_>>())
        };
        assert!(
            (of(&PlannedRequest::prompt_len) / input - 1.0).abs() < 0.03,
            "{name}: {}",
            of(&PlannedRequest::prompt_len)
        );
        assert!((of(&|p| p.output_len) / output - 1.0).abs() < 0.03, "{name}");
    }
    assert!(NAMES.iter().all(|name| Workload::named(name).is_some_and(|w| w.checked().is_ok())));
}

#[test]
fn the_length_planned_is_the_length_sent_and_prompts_differ() {
    let plan = plan(&Workload::named("chat").unwrap(), 200, 7);
    let mut seen = HashSet::new();
    for request in &plan {
        let tokens = request.tokens(1000);
        assert_eq!(tokens.len(), request.prompt_len());
        assert!(tokens.iter().all(|t| *t < 1000));
        assert!(seen.insert(tokens[..8.min(tokens.len())].to_vec()), "two requests begin alike");
    }
    assert_eq!(plan, self::plan(&Workload::named("chat").unwrap(), 200, 7));
}

#[test]
fn another_seed_shares_no_prefix_with_the_first() {
    const BLOCK: usize = 16;
    for name in NAMES {
        let workload = Workload::named(name).unwrap();
        let blocks = |seed| -> HashSet<Vec<u32>> {
            let prompts = plan(&workload, 20, seed).into_iter().map(|request| request.tokens(50_000));
            prompts
                .flat_map(|tokens| tokens.chunks_exact(BLOCK).map(<[u32]>::to_vec).collect::<Vec<_>>())
                .collect()
        };
        let first = blocks(1);
        assert_eq!(first, blocks(1), "{name}");
        assert!(!first.is_empty() && first.is_disjoint(&blocks(2)), "{name}");
    }
}

#[test]
fn a_turn_repeats_everything_before_it() {
    let plan = Workload::named("agents").unwrap().plan(None, Arrivals::Poisson, None, 6, 3);
    for pair in plan.windows(2) {
        let (before, after) = (pair[0].tokens(512), pair[1].tokens(512));
        assert_eq!(after[..before.len()], before);
        assert!(after.len() > before.len() + pair[0].output_len);
    }
}

/// Plans much shorter than a session, of about a session, and of many: their first quarter has as many requests as the second.
#[test]
fn turns_keep_the_rate_of_requests_from_the_first_second_on() {
    let agents = Workload::named("agents").unwrap();
    for (rate, count) in [(80.0, 100), (20.0, 500), (10.0, 6_000), (0.1, 40)] {
        let quarter = count as f64 / 4.0 / rate;
        let plans = 200_000 / count.max(500);
        let mut counts = [0, 0];
        for seed in 0..plans as u64 {
            let plan = agents.plan(Some(rate), Arrivals::Poisson, None, count, seed);
            assert!(plan.len() == count && plan.is_sorted_by(|a, b| a.arrival.0 <= b.arrival.0));
            let until = |end| plan.partition_point(|request| request.arrival.seconds() < end);
            counts[0] += until(quarter);
            counts[1] += until(2.0 * quarter) - until(quarter);
        }
        for found in counts {
            let found = found as f64 / plans as f64 / (count as f64 / 4.0);
            assert!((found - 1.0).abs() < 0.1, "{count} requests at {rate}/s: {found} of the rate");
        }
    }
}

/// All of a session that began before the plan is in the prompt of its next turn.
#[test]
fn a_session_under_way_has_its_history() {
    let turns = Conversation { turns: 5, think_s: 60.0 };
    let workload = Workload { session: Some(turns), ..Workload::fixed(10, 20).unwrap() };
    let plan = workload.plan(Some(4.0), Arrivals::Poisson, None, 200, 1);
    // Each earlier turn is a prompt of 10 and an output of 20 tokens; the mean is that of five turns.
    assert!(plan.iter().all(|request| request.prompt_len() % 30 == 10 && request.prompt_len() <= 130));
    let lengths: Vec<f64> = plan.iter().map(|request| request.prompt_len() as f64).collect();
    assert!((mean(&lengths) - 70.0).abs() < 10.0, "{}", mean(&lengths));
}

#[test]
fn tenants_have_their_shares() {
    let tenant = |name: &str, share, priority| Tenant { name: name.into(), share, priority, burst: None };
    let workload = Workload {
        tenants: vec![tenant("hot", 3.0, 1), tenant("cold", 1.0, 0)],
        ..Workload::fixed(8, 8).unwrap()
    };
    let plan = plan(&workload, 10_000, 2);
    let hot = plan.iter().filter(|p| p.tenant == 0).count();
    assert!((7_300..7_700).contains(&hot), "{hot}");
    assert!(plan.iter().all(|p| p.priority == i32::from(p.tenant == 0)));
}

#[test]
fn a_hot_tenant_bursts_alone_and_keeps_its_share() {
    let tenant = |burst: Option<&str>, share| Tenant {
        name: "t".into(),
        share,
        priority: 0,
        burst: burst.map(str::to_owned),
    };
    let workload = Workload {
        tenants: vec![tenant(Some("5x10s/60s"), 1.0), tenant(None, 3.0)],
        ..Workload::fixed(8, 8).unwrap()
    }
    .checked()
    .unwrap();
    let plan = plan(&workload, 24_000, 2);
    let share = |of: &dyn Fn(&&PlannedRequest) -> bool, within: u16| {
        let all = plan.iter().filter(|p| p.tenant == within).count();
        plan.iter().filter(|p| p.tenant == within).filter(of).count() as f64 / all as f64
    };
    let hot = |p: &&PlannedRequest| p.arrival.seconds() % 60.0 < 10.0;
    // Five times the rate for a sixth of the time is five sixths of the requests; of the other tenant's it is a sixth.
    assert!((share(&hot, 0) - 5.0 / 6.0).abs() < 0.03, "{}", share(&hot, 0));
    assert!((share(&hot, 1) - 1.0 / 6.0).abs() < 0.03, "{}", share(&hot, 1));
    let of_hot = plan.iter().filter(|p| p.tenant == 0).count() as f64 / 24_000.0;
    assert!((of_hot - 0.25).abs() < 0.03, "{of_hot}");
    assert!((plan.last().unwrap().arrival.seconds() / 2_400.0 - 1.0).abs() < 0.05);
    let bad = Workload { tenants: vec![tenant(Some("9x"), 1.0)], ..Workload::fixed(8, 8).unwrap() };
    assert!(bad.checked().unwrap_err().to_string().contains("tenant t: --burst `9x`"));
}

#[test]
fn a_tree_of_prefixes_is_shared_from_the_root_down() {
    let prefix = Some(SharedPrefix { tokens: 32, share: 1.0, groups: 2 });
    let branches = vec![Branch { tokens: 16, ways: 3 }, Branch { tokens: 8, ways: 2 }];
    let workload = Workload { prefix, branches, ..Workload::fixed(10, 8).unwrap() }.checked().unwrap();
    let plan = plan(&workload, 2_000, 4);
    let distinct = |tokens: usize| {
        plan.iter().map(|p| p.tokens(50_000)[..tokens].to_vec()).collect::<HashSet<_>>().len()
    };
    // Two roots, three children of each, two of each of these, and every request its own end.
    assert_eq!([distinct(32), distinct(48), distinct(56), distinct(66)], [2, 6, 12, 2_000]);
    let orphan = Workload { prefix: None, ..workload };
    assert!(orphan.checked().unwrap_err().to_string().contains("they follow a [prefix]"));
}

#[test]
fn tiled_contexts_come_again_only_after_all_others() {
    let tiling = Some(ContextRotation { contexts: 5, tokens: 64 });
    let workload = Workload { tiling, ..Workload::fixed(4, 1).unwrap() }.checked().unwrap();
    let plan = plan(&workload, 20, 1);
    for (index, request) in plan.iter().enumerate() {
        assert_eq!(request.prompt[0].source, plan[index % 5].prompt[0].source);
        assert_eq!(request.prompt_len(), 68);
    }
    let sources: HashSet<u64> = plan.iter().map(|p| p.prompt[0].source).collect();
    assert_eq!(sources.len(), 5);
}

#[test]
fn empirical_lengths_are_drawn_from_the_list_and_nothing_else() {
    let input = Lengths::Empirical { tokens: vec![3, 3, 3, 50] };
    let plan = plan(&Workload { input, ..Workload::fixed(1, 1).unwrap() }.checked().unwrap(), 4_000, 1);
    assert!(plan.iter().all(|p| [3, 50].contains(&p.prompt_len())));
    let long = plan.iter().filter(|p| p.prompt_len() == 50).count();
    assert!((900..1_100).contains(&long), "{long}");
}

fn hit_rate(plan: &[PlannedRequest], block_size: usize) -> Option<f64> {
    ideal_hit_rate(plan.iter().map(|request| (request, true)), block_size)
}

#[test]
fn an_adapter_hides_what_another_has_cached() {
    let request = |adapter| PlannedRequest {
        prompt: vec![PromptSegment { source: 1, tokens: 9 }],
        adapter,
        ..PlannedRequest::default()
    };
    assert_eq!(hit_rate(&[request(Some(0)), request(Some(0))], 4), Some(8.0 / 18.0));
    assert_eq!(hit_rate(&[request(Some(0)), request(Some(1)), request(None)], 4), Some(0.0));
}

#[test]
fn the_cold_twin_has_the_same_lengths_and_nothing_in_common() {
    let warm = plan(&Workload::named("rag").unwrap(), 50, 1);
    let cold = without_sharing(&warm, 1);
    let shape =
        |plan: &[PlannedRequest]| plan.iter().map(|p| (p.prompt_len(), p.output_len)).collect::<Vec<_>>();
    assert_eq!(shape(&warm), shape(&cold));
    assert!(hit_rate(&warm, 16).unwrap() > 0.05);
    assert_eq!(hit_rate(&cold, 16), Some(0.0));
}

#[test]
fn the_ideal_hit_rate_counts_whole_blocks_of_what_came_before() {
    let request = |segments: &[(u64, u32)]| PlannedRequest {
        arrival: Nanos(0.0),
        prompt: segments
            .iter()
            .map(|(source, tokens)| PromptSegment { source: *source, tokens: *tokens })
            .collect(),
        output_len: 1,
        ..PlannedRequest::default()
    };
    // 10 shared tokens are two whole blocks of 4; the third holds two of them and differs.
    let plan = [request(&[(1, 10), (2, 6)]), request(&[(1, 10), (3, 6)])];
    assert_eq!(hit_rate(&plan, 4), Some(8.0 / 32.0));
    // Of an identical prompt the last block is computed again.
    let plan = [request(&[(1, 8)]), request(&[(1, 8)])];
    assert_eq!(hit_rate(&plan, 4), Some(4.0 / 16.0));
    // One of the warm-up fills the cache and does not count.
    assert_eq!(ideal_hit_rate([(&plan[0], false), (&plan[1], true)], 4), Some(4.0 / 8.0));
    assert_eq!(hit_rate(&[], 4), None);
}

#[test]
fn a_workload_is_read_from_a_file_and_checked() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("w.toml");
    let open = |text: &str| {
        std::fs::write(&path, text).unwrap();
        Workload::open(path.to_str().unwrap())
    };
    let good = "name = \"support\"\n[input]\ndistribution = \"histogram\"\nbuckets = [[1, 100, 0.7], [200, 300, 0.3]]\n\
                [output]\ndistribution = \"fixed\"\ntokens = 20\n[prefix]\ntokens = 64\nshare = 0.5\n";
    let workload = open(good).unwrap();
    assert_eq!(workload.prefix, Some(SharedPrefix { tokens: 64, share: 0.5, groups: 1 }));
    let lengths: Vec<usize> =
        plan(&workload, 2_000, 1).iter().map(|p| p.prompt.last().unwrap().tokens as usize).collect();
    assert!(lengths.iter().all(|l| (1..=100).contains(l) || (200..=300).contains(l)));
    let short = lengths.iter().filter(|l| **l <= 100).count();
    assert!((1_300..1_500).contains(&short), "{short}");
    for (from, to, message) in [
        ("tokens = 20", "tokens = 0", "output: a length of 0"),
        ("0.7]", "-1.0]", "input: a bucket is [from, to, weight]"),
        ("share = 0.5", "share = 1.5", "prefix: tokens and groups are at least 1"),
        ("[prefix]", "[prefixes]", "does not parse: unknown field `prefixes`"),
        ("distribution = \"fixed\"", "distribution = \"zipf\"", "does not parse: unknown variant"),
    ] {
        let error = open(&good.replace(from, to)).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
    let error = Workload::open("chatty").unwrap_err().to_string();
    assert!(error.contains("neither a .toml file nor one of chat, code"), "{error}");
    assert!(matches!(Workload::open("/no/such.toml"), Err(WorkloadError::Read { .. })));
}

#[test]
fn the_workload_file_of_the_docs_is_one() {
    let docs =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/serving.md")).unwrap();
    let text = docs.split("```toml\n").nth(1).unwrap().split("```").next().unwrap();
    let file = tempfile::Builder::new().suffix(".toml").tempfile().unwrap();
    std::fs::write(file.path(), text).unwrap();
    let workload = Workload::open(file.path().to_str().unwrap()).unwrap();
    assert_eq!((workload.tenants.len(), workload.branches.len()), (2, 1));
    assert!(workload.session.is_some() && workload.structured.is_some());
    // Tenants that are hot, sessions and a tree go together.
    let plan = plan(&workload, 400, 1);
    assert_eq!(plan.len(), 400);
    assert!(plan.windows(2).all(|pair| pair[0].arrival.0 <= pair[1].arrival.0));
    let open = |tiling: &str| {
        std::fs::write(file.path(), format!("{text}\n{tiling}")).unwrap();
        Workload::open(file.path().to_str().unwrap()).unwrap_err().to_string()
    };
    let error = open("[tiling]\ncontexts = 4\ntokens = 100\n");
    assert!(
        error.contains("tiling: contexts come in turn, so it goes with no prefix and no session"),
        "{error}"
    );
}
