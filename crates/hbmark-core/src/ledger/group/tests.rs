use std::collections::BTreeMap;
use std::ops::Range;

use super::*;
use crate::ledger::{ExpertRouting, Ledger, Prediction, Request, devices, links, predict};
use crate::model::test_shapes as shapes;
use crate::model::{Dtype, QkNorm, Role, TensorInfo, presets};
use crate::result::{Bound, CellResult, CollectiveKind, GroupStep, GroupSummary, Phase, Status};
use crate::units::Bytes;

fn tensor(tensor: usize) -> Group {
    Group { tensor, ..Group::ONE }
}

fn pipeline(pipeline: usize) -> Group {
    Group { pipeline, ..Group::ONE }
}

fn experts(tensor: usize) -> Group {
    Group { tensor, experts: true, ..Group::ONE }
}

fn preset(name: &str) -> Architecture {
    presets::find(name).unwrap_or_else(|| panic!("no shape {name}")).architecture
}

fn dtype_of(architecture: &Architecture) -> Dtype {
    architecture.quantization.as_ref().and_then(crate::model::Quantization::dtype).unwrap_or(Dtype::Bf16)
}

fn request<'a>(architecture: &'a Architecture, inventory: &'a Inventory, device: &str) -> Request<'a> {
    let weights = dtype_of(architecture);
    Request {
        architecture,
        inventory,
        name: "test",
        weights,
        kv: weights.of_cache(),
        device: devices::find(device).expect("a row"),
        batches: &[1, 32],
        contexts: &[4096],
        phases: &[Phase::Prefill, Phase::Decode],
        routing: ExpertRouting::Uniform,
    }
}

fn predicted(architecture: &Architecture, device: &str, group: Group) -> (Prediction, GroupSummary) {
    let inventory = architecture.inventory(dtype_of(architecture));
    predict_group(&request(architecture, &inventory, device), group).expect("a group")
}

fn cell(prediction: &Prediction, phase: Phase, batch: usize) -> &CellResult {
    let found = |cell: &&CellResult| (cell.phase, cell.batch) == (phase, batch);
    prediction.cells.iter().find(found).expect("a cell")
}

fn step(cell: &CellResult) -> &GroupStep {
    cell.group.as_ref().expect("the parts of a group")
}

fn close(found: f64, wanted: f64) -> bool {
    (found / wanted - 1.0).abs() < 1e-9
}

/// Eight GPUs over PCIe: a prompt's all-reduces take three times as long as its products, and a decode step's far less than its weights.
#[test]
fn a_step_whose_exchanges_take_longer_than_its_work_is_bound_by_them() {
    let (prediction, _) = predicted(&preset("Llama-3.1-70B"), "l40s", tensor(8));
    let prefill = cell(&prediction, Phase::Prefill, 1);
    let own: f64 = step(prefill).stages_ns.iter().sum();
    assert!(step(prefill).collectives_ns.unwrap() > 2.0 * own, "{:?}", step(prefill));
    assert_eq!(prefill.bound, Some(Bound::Collectives));
    assert!(prefill.tokens_per_s.is_some());
    assert_eq!(cell(&prediction, Phase::Decode, 1).bound, Some(Bound::Memory));
    let (prediction, _) = predicted(&preset("Llama-3.1-70B"), "h100-sxm", tensor(8));
    assert_eq!(cell(&prediction, Phase::Prefill, 1).bound, Some(Bound::Compute));
}

/// Bytes over all GPUs of a group, those that a step reads and all.
fn sums(architecture: &Architecture, inventory: &Inventory, group: Group) -> (u64, u64) {
    let (mut read, mut resident) = (0, 0);
    for rank in 0..group.tensor {
        for stage in stages(architecture, inventory, group, rank).expect("a group") {
            resident += stage.inventory.total_bytes().0;
            read += stage.inventory.total_bytes().0 - unread(&stage.inventory);
        }
    }
    (read, resident)
}

/// Dimensions divided by hand list the same tensors in the same bytes as the tensors divided one by one: two ways to one number.
#[test]
fn a_part_has_the_bytes_of_a_model_with_its_heads_and_widths() {
    let mut compared = BTreeMap::new();
    for name in presets::names() {
        let architecture = preset(name);
        let stored = dtype_of(&architecture);
        // Experts make long lists.
        let (dtypes, sizes) = match architecture.experts {
            Some(_) => (vec![stored, Dtype::Fp8], vec![2, 8]),
            None => (vec![stored, Dtype::Bf16, Dtype::Fp8, Dtype::Q8_0], vec![2, 4, 8, 16]),
        };
        for dtype in dtypes {
            let inventory = architecture.inventory(dtype);
            for gpus in sizes.clone() {
                let Ok(parts) = stages(&architecture, &inventory, tensor(gpus), 0) else { continue };
                let [part] = parts.as_slice() else { panic!("one stage") };
                let inner = |inventory: &Inventory| -> BTreeMap<String, u64> {
                    let read = |tensor: &&TensorInfo| tensor.layer.is_some() && tensor.role != Role::Unused;
                    let layers = inventory.tensors.iter().filter(read);
                    layers.map(|tensor| (tensor.name.clone(), tensor.bytes.0)).collect()
                };
                let (split, listed) = (inner(&part.inventory), inner(&part.architecture.inventory(dtype)));
                for (tensor, bytes) in &listed {
                    assert_eq!(split.get(tensor), Some(bytes), "{name} as {dtype} over {gpus}: {tensor}");
                }
                assert_eq!(split.len(), listed.len(), "{name} as {dtype} over {gpus}");
                *compared.entry(name).or_insert(0) += 1;
            }
        }
    }
    // SmolLM2 has nine heads.
    let missing: Vec<&str> = presets::names().filter(|name| !compared.contains_key(name)).collect();
    assert_eq!(missing, ["SmolLM2-135M"]);
}

#[test]
fn the_parts_add_up_to_the_whole_and_what_is_repeated() {
    for name in presets::names() {
        let architecture = preset(name);
        let inventory = architecture.inventory(dtype_of(&architecture));
        let whole = inventory.total_bytes().0 - unread(&inventory);
        // Lists of many experts are long.
        let groups = match inventory.tensors.len() {
            60_000.. => vec![],
            5_000.. => vec![tensor(2), experts(4)],
            _ => vec![tensor(2), tensor(8), experts(8)],
        };
        for group in groups {
            let Ok(parts) = stages(&architecture, &inventory, group, 0) else { continue };
            let repeats_heads = (0..architecture.layers).any(|index| {
                matches!(architecture.layer(index).mixer, Mixer::Attention(a) if a.kv_heads < group.tensor)
            });
            if repeats_heads {
                continue;
            }
            let (_, resident) = sums(&architecture, &inventory, group);
            let again = (group.tensor as u64 - 1) * parts[0].replicated.0;
            assert_eq!(resident, whole + again, "{name} over {group}");
        }
    }
}

/// 2 x 80 layers of 8 heads of 128 rows of 8192 columns in bf16 are 2,684,354,560 B of keys and values: over 16 GPUs twice. 161 norms of 8192.
#[test]
fn heads_of_keys_and_values_that_are_too_few_are_repeated_to_the_byte() {
    let architecture = shapes::llama_3_1_70b();
    let inventory = architecture.inventory(Dtype::Bf16);
    let (whole, norms, kv) = (2 * 70_553_706_496_u64, 161 * 8192 * 2, 2_684_354_560);
    assert_eq!(sums(&architecture, &inventory, tensor(8)).1, whole + 7 * norms);
    assert_eq!(sums(&architecture, &inventory, tensor(16)).1, whole + 15 * norms + kv);
    let part = &stages(&architecture, &inventory, tensor(16), 0).unwrap()[0];
    assert_eq!(part.replicated, Bytes(norms + kv / 8));
    let kv = |gpus| {
        let part = &stages(&architecture, &inventory, tensor(gpus), 0).unwrap()[0];
        Ledger::part(&part.architecture, &part.inventory, Dtype::Bf16, false).kv_bytes_per_token()
    };
    assert_eq!([kv(1), kv(2), kv(8), kv(16)].map(|bytes| bytes.0), [327_680, 163_840, 40_960, 40_960]);
}

/// gpt-oss-20b: 24 layers with biases of 2880 after the attention and of 32 x 2880 after the experts: on every GPU, and read once.
#[test]
fn biases_of_sums_are_stored_everywhere_and_read_once() {
    let architecture = preset("gpt-oss-20b");
    let inventory = architecture.inventory(Dtype::Mxfp4);
    let group = tensor(2);
    let whole = inventory.total_bytes().0;
    let parts = stages(&architecture, &inventory, group, 0).unwrap();
    let added_once = 24 * (2880 + 32 * 2880) * 2_u64;
    let (read, resident) = sums(&architecture, &inventory, group);
    assert_eq!(resident, whole + parts[0].replicated.0);
    assert_eq!(read, resident - added_once);
    // Routers of 32 x 2880 and 32 biases, 49 norms of 2880.
    assert_eq!(parts[0].replicated.0, added_once + 24 * (32 * 2880 + 32) * 2 + 49 * 2880 * 2);
}

/// What this program packs itself has its scales and zeros split with its matrices.
#[test]
fn experts_that_are_one_tensor_are_split_in_every_storage() {
    for name in ["gpt-oss-20b", "Llama-4-Scout-17B-16E"] {
        let architecture = preset(name);
        for dtype in [Dtype::Bf16, Dtype::Int8, Dtype::Int4, Dtype::Q4_0] {
            let inventory = architecture.inventory(dtype);
            let parts = stages(&architecture, &inventory, tensor(2), 0).unwrap();
            let [whole, part] = [&inventory, &parts[0].inventory].map(|all| all.bytes_of(Role::Expert).0);
            assert_eq!(part, whole / 2, "{name}, {dtype}");
        }
    }
}

/// 2880 channels are 90 blocks of mxfp4: over 8 GPUs 12 each and 6 for the last, as loaders deal them out.
#[test]
fn blocks_that_do_not_divide_are_dealt_out_in_gpt_oss_and_refused_elsewhere() {
    let architecture = preset("gpt-oss-120b");
    let inventory = architecture.inventory(Dtype::Mxfp4);
    let width = |rank: usize| {
        let parts = stages(&architecture, &inventory, tensor(8), rank).unwrap();
        parts[0].architecture.experts.as_ref().unwrap().ffn_size
    };
    assert_eq!([width(0), width(6), width(7)], [384, 384, 192]);
    let qwen = shapes::qwen3_30b_a3b();
    let blocks = Architecture { quantization: shapes::deepseek_v3().quantization, ..qwen.clone() };
    // 768 channels are six blocks of 128.
    let refused = stages(&blocks, &blocks.inventory(Dtype::Fp8), tensor(4), 0).unwrap_err();
    let GroupError::Blocks { blocks, gpus, sizes, .. } = &refused else { panic!("{refused}") };
    assert_eq!((*blocks, *gpus, sizes.as_slice()), (6, 4, &[1, 2][..]), "{refused}");
    assert!(
        refused.to_string().ends_with("1 or 2, or keep experts whole with --enable-expert-parallel"),
        "{refused}"
    );
    assert!(stages(&qwen, &qwen.inventory(Dtype::Bf16), tensor(4), 0).is_ok());
    // In blocks of 256 they are three, in blocks of 32 twenty-four.
    for (storage, is_cut) in [("q3_k", true), ("iq4_xs", true), ("q5_0", false), ("iq4_nl", false)] {
        let mut inventory = qwen.inventory(Dtype::Q4_0);
        for tensor in inventory.tensors.iter_mut().filter(|tensor| tensor.role == Role::Expert) {
            tensor.storage = storage.to_owned();
        }
        let parts = stages(&qwen, &inventory, tensor(2), 0);
        assert_eq!(matches!(parts, Err(GroupError::Blocks { .. })), is_cut, "{storage}");
    }
}

/// Heads of 192 rows are one and a half blocks of 128, of which a GPU needs both scales; four heads of full layers over eight GPUs are repeated.
#[test]
fn heads_that_are_no_whole_blocks_have_the_scales_of_their_parts() {
    let architecture = preset("MiMo-V2-Flash");
    let inventory = architecture.inventory(Dtype::Fp8);
    let scales = |gpus, layer: usize| {
        let part = &stages(&architecture, &inventory, tensor(gpus), 0).expect("a group")[0];
        let name = format!("model.layers.{layer}.self_attn.k_proj.weight_scale_inv");
        part.inventory.tensors.iter().find(|tensor| tensor.name == name).expect("a scale").bytes.0 / (32 * 4)
    };
    // Layer 0 is full, layer 1 has eight heads in a window.
    assert_eq!([1, 2, 4, 8].map(|gpus| scales(gpus, 0)), [6, 3, 2, 2]);
    assert_eq!([1, 2, 4, 8].map(|gpus| scales(gpus, 1)), [12, 6, 3, 2]);
    // Over 16 GPUs a feed-forward of 2048 channels would be parts of a block, and what is offered is not refused.
    let refused = stages(&architecture, &inventory, tensor(32), 0).unwrap_err();
    let GroupError::Blocks { sizes, .. } = &refused else { panic!("{refused}") };
    assert_eq!(sizes.last(), Some(&16), "{refused}");
    assert!(
        sizes.iter().all(|gpus| stages(&architecture, &inventory, tensor(*gpus), 0).is_ok()),
        "{sizes:?}"
    );
}

#[test]
fn latent_attention_keeps_its_cache_on_every_gpu() {
    let architecture = shapes::deepseek_v3();
    let (_, summary) = predicted(&architecture, "h200-sxm", tensor(8));
    // 61 layers of 576 elements in 16 bits, however many GPUs.
    assert_eq!(summary.stages[0].kv_bytes_per_token, Bytes(61 * 576 * 2));
    let inventory = architecture.inventory(Dtype::Fp8);
    let part = &stages(&architecture, &inventory, tensor(8), 0).unwrap()[0];
    let bytes = |name: &str| {
        let of = |inventory: &Inventory| {
            inventory.tensors.iter().find(|tensor| tensor.name.ends_with(name)).expect("a tensor").bytes.0
        };
        (of(&part.inventory), of(&inventory))
    };
    let (here, whole) = bytes("3.self_attn.kv_a_proj_with_mqa.weight");
    assert_eq!(here, whole);
    for module in ["q_b_proj.weight", "kv_b_proj.weight_scale_inv", "o_proj.weight_scale_inv"] {
        let (here, whole) = bytes(&format!("3.self_attn.{module}"));
        assert_eq!(here * 8, whole, "{module}");
    }
}

/// Per GPU (80 x 855,638,016 + 128,256 x 8192) / 8 + 161 x 8192 weights of 2 B read, 40,960 B of KV a position, 2,048 B of the embedding.
#[test]
fn llama_70b_over_eight_h200_is_its_bytes_and_its_collectives() {
    let architecture = shapes::llama_3_1_70b();
    let (prediction, summary) = predicted(&architecture, "h200-sxm", tensor(8));
    let decode = cell(&prediction, Phase::Decode, 1);
    assert_eq!(decode.bytes.weights, Bytes(17_378_066_432));
    assert_eq!(decode.bytes.kv_read, Bytes(4096 * 40_960));
    assert_eq!((decode.bytes.kv_write, decode.bytes.other), (Bytes(40_960), Bytes(2048)));
    // The embedding stays in memory beside them: 128,256 x 8192 / 8 x 2 B.
    assert_eq!(summary.stages[0].weight_bytes, Bytes(17_378_066_432 + 262_668_288));
    let parts = step(decode);
    assert!(close(parts.stages_ns[0], 17_545_881_600.0 / 4800.0), "{parts:?}");
    let told: Vec<_> = parts.collectives.iter().map(|row| (row.kind, row.count, row.bytes.0)).collect();
    assert_eq!(
        told,
        [
            (CollectiveKind::AllReduce, 160, 16_384),
            (CollectiveKind::AllReduce, 1, 16_384),
            (CollectiveKind::AllGather, 1, 256_512)
        ]
    );
    // The switch adds up: 16,384 B a reduce at 450 GB/s; 7/8 of the logits.
    let link = (161.0 * 16_384.0 + 224_448.0) / 450.0;
    assert!(close(parts.collectives_ns.unwrap(), link), "{parts:?}");
    assert!(close(decode.predicted_ns.unwrap(), 17_545_881_600.0 / 4800.0 + link));
    let measured = |by: &str| parts.measured.iter().find(|row| row.by == by).expect("a table").step_ns / 1e6;
    // 161 all-reduces of 18.3, 5.2 and 3.5 us.
    for (by, time) in [("NCCL 2.29.2", 18.3), ("vLLM 0.24.0", 5.2), ("TensorRT-LLM 1.3.0rc20", 3.5)] {
        let wanted = (17_545_881_600.0 / 4800.0 + 161.0 * time * 1e3 + 224_448.0 / 450.0) / 1e6;
        assert!(close(measured(by), wanted), "{by}: {} for {wanted}", measured(by));
    }
    // Nothing of a matrix is done twice.
    let alone = Ledger::new(&architecture, &architecture.inventory(Dtype::Bf16), Dtype::Bf16);
    assert!(close(decode.flops * 8.0, alone.decode(1, 4096).flops.0));
}

#[test]
fn a_verify_step_gathers_the_logits_of_every_token() {
    let architecture = shapes::llama_3_1_70b();
    let inventory = architecture.inventory(Dtype::Bf16);
    let phases = [Phase::Decode, Phase::Verify { draft_tokens: 3 }];
    let request = Request { phases: &phases, ..request(&architecture, &inventory, "h200-sxm") };
    let (prediction, _) = predict_group(&request, tensor(8)).expect("a group");
    let gathered = |phase| {
        let rows = &step(cell(&prediction, phase, 32)).collectives;
        rows.iter().find(|row| row.kind == CollectiveKind::AllGather).expect("logits").bytes
    };
    assert_eq!(gathered(phases[0]), Bytes(32 * 128_256 * 2));
    assert_eq!(gathered(phases[1]), Bytes(32 * 4 * 128_256 * 2));
}

#[test]
fn a_group_of_one_is_a_device() {
    for name in presets::names() {
        let architecture = preset(name);
        let inventory = architecture.inventory(dtype_of(&architecture));
        let request = request(&architecture, &inventory, "h200-sxm");
        let (alone, (group, _)) = (predict(&request), predict_group(&request, Group::ONE).unwrap());
        // What no step reads is in the memory of a device, and not of a group's.
        let apart = unread(&inventory);
        for (alone, group) in alone.cells.iter().zip(&group.cells) {
            let memory = |cell: &CellResult| cell.memory_predicted_bytes.map(|bytes| bytes.0);
            assert_eq!(memory(alone), memory(group).map(|bytes| bytes + apart), "{name}");
            let plain = |cell: &CellResult| CellResult {
                group: None,
                memory_predicted_bytes: None,
                flags: Vec::new(),
                ..cell.clone()
            };
            assert_eq!(plain(group), plain(alone), "{name}");
        }
        assert!(apart > 0 || alone.crossovers == group.crossovers, "{name}");
    }
}

#[test]
fn stages_take_their_layers_and_a_step_takes_all_of_them() {
    let of = |stages, layers| pipeline(stages).layers_of_stages(layers);
    assert_eq!(of(4, 61), [15, 15, 16, 15]);
    assert_eq!(of(4, 63), [16, 16, 16, 15]);
    assert_eq!((of(1, 7), of(2, 7), of(8, 80)), (vec![7], vec![4, 3], vec![10; 8]));
    let architecture = shapes::llama_3_1_8b();
    let inventory = architecture.inventory(Dtype::Bf16);
    assert_eq!(sums(&architecture, &inventory, pipeline(4)).1, inventory.total_bytes().0);
    let (prediction, summary) = predicted(&architecture, "h200-sxm", pipeline(2));
    let alone = predict(&request(&architecture, &inventory, "h200-sxm"));
    let (two, one) = (cell(&prediction, Phase::Decode, 32), cell(&alone, Phase::Decode, 32));
    assert_eq!((two.bytes, two.flops), (one.bytes, one.flops), "every byte once");
    let parts = step(two);
    // One send of 32 x 4096 x 2 B at 450 GB/s.
    assert!(close(parts.collectives_ns.unwrap(), 262_144.0 / 450.0));
    assert!(close(two.predicted_ns.unwrap(), one.predicted_ns.unwrap() + 262_144.0 / 450.0));
    // The stage with the head is slower, and batches follow at its pace.
    assert!(parts.stages_ns[1] > parts.stages_ns[0] && close(parts.interval_ns, parts.stages_ns[1]));
    assert!(close(two.tokens_per_s.unwrap(), 32e9 / parts.stages_ns[1]));
    assert_eq!(summary.stages.iter().map(|stage| stage.layers).sum::<usize>(), 32);
    // 16 layers with the head; 2 x 32 sequences of 4097 positions of 65,536 B; 32 x 128,256 logits of 4 B.
    let head = inventory.bytes_of(Role::Head).0;
    let layers = 16 * (2 * 218_103_808 + 4 * 4096) + 8192_u64;
    let memory = head + layers + 64 * 4097 * 65_536 + 32 * 128_256 * 4;
    assert_eq!(two.memory_predicted_bytes, Some(Bytes(memory)));
}

#[test]
fn a_table_that_is_the_head_too_is_with_the_first_stage_and_the_last() {
    let architecture = shapes::llama_3_2_1b();
    let inventory = architecture.inventory(Dtype::Bf16);
    let table = inventory.bytes_of(Role::Embedding).0;
    assert_eq!(sums(&architecture, &inventory, pipeline(2)).1, inventory.total_bytes().0 + table);
    let (prediction, _) = predicted(&architecture, "h200-sxm", pipeline(2));
    let alone = predict(&request(&architecture, &inventory, "h200-sxm"));
    let (two, one) = (cell(&prediction, Phase::Decode, 1), cell(&alone, Phase::Decode, 1));
    assert_eq!(two.bytes.weights, one.bytes.weights);
    // The first stage looks one row of it up.
    assert_eq!(two.bytes.other, Bytes(2048 * 2));
}

#[test]
fn whole_experts_are_dealt_out_and_the_fullest_gpu_sets_the_pace() {
    let architecture = shapes::qwen3_30b_a3b();
    let inventory = architecture.inventory(Dtype::Bf16);
    let request =
        Request { routing: ExpertRouting::Balanced, ..request(&architecture, &inventory, "h200-sxm") };
    let weights = |group| {
        let (prediction, _) = predict_group(&request, group).unwrap();
        [1, 32].map(|batch| cell(&prediction, Phase::Decode, batch).bytes.weights.0)
    };
    // Eight experts a token, one on each of eight GPUs or an eighth of each: 48 layers of 3 x 768 x 2048 x 2 B either way; all 16 at batch 32.
    let (sliced, whole) = (weights(tensor(8)), weights(experts(8)));
    assert_eq!((sliced[0], sliced[1]), (whole[0], whole[1]));
    let expert = 48 * 3 * 768 * 2048 * 2_u64;
    assert_eq!(whole[1] - whole[0], 15 * expert);
    let uniform = Request { routing: ExpertRouting::Uniform, ..request };
    let (prediction, _) = predict_group(&uniform, experts(8)).unwrap();
    let fullest = cell(&prediction, Phase::Decode, 1).bytes.weights.0 - (whole[0] - expert);
    assert!((2 * expert..4 * expert).contains(&fullest), "{} experts", fullest / expert);
    assert!(
        prediction.warnings.iter().any(|note| note.contains("the GPU with the most active experts")),
        "{:?}",
        prediction.warnings
    );
    assert_eq!(cell(&prediction, Phase::Decode, 1).distinct_experts, Some(8.0), "of the layer, on all GPUs");
}

#[test]
fn collectives_follow_the_layers() {
    let counts = |name: &str| {
        let (prediction, _) = predicted(&preset(name), "h200-sxm", tensor(4));
        let rows = step(cell(&prediction, Phase::Decode, 1)).collectives.clone();
        rows.into_iter().map(|row| (row.count, row.bytes.0)).collect::<Vec<_>>()
    };
    // 62 norms over all heads of queries and keys: two f32 sums a token.
    assert_eq!(counts("MiniMax-M2.5")[2], (62, 8));
    // 30 layers with a dense feed-forward beside the experts, each normed by itself.
    assert_eq!(counts("Gemma-4-26B-A4B")[0].0, 30 * 3);
    // 52 layers that are a mixer or a feed-forward each.
    assert_eq!(counts("Nemotron-3-Super-120B-A12B")[0].0, preset("Nemotron-3-Super-120B-A12B").layers);
    let full = |name: &str| match preset(name).layer(0).mixer {
        Mixer::Attention(attention) => attention.qk_norm == QkNorm::FullWidth,
        _ => false,
    };
    assert!(full("MiniMax-M2.5") && !full("Qwen3-8B"));
}

#[test]
fn a_link_that_is_not_known_prices_nothing_and_says_so() {
    for (device, group) in [("rtx-4090", tensor(2)), ("h200-sxm", tensor(16)), ("h100-pcie", tensor(4))] {
        let (prediction, summary) = predicted(&shapes::llama_3_1_70b(), device, group);
        let decode = cell(&prediction, Phase::Decode, 1);
        let parts = step(decode);
        assert_eq!((summary.link, parts.collectives_ns), (None, None));
        assert!(parts.collectives.iter().all(|row| row.link_ns.is_none() && row.bytes.0 > 0));
        assert_eq!(decode.predicted_ns, Some(parts.stages_ns[0]));
        let note =
            prediction.warnings.iter().find(|note| note.starts_with("communication time not modelled"));
        assert!(
            note.is_some_and(|note| note.contains(&format!("{} × ", group.gpus()))),
            "{:?}",
            prediction.warnings
        );
    }
}

#[test]
fn a_stage_sends_over_the_one_link_to_the_next() {
    let (prediction, _) = predicted(&preset("Llama-3.1-405B"), "mi300x", pipeline(8));
    // Seven sends of 4,096 x 16,384 x 2 B at 64 GB/s, of the seven links that a GPU has.
    let parts = step(cell(&prediction, Phase::Prefill, 1));
    assert!(close(parts.collectives_ns.unwrap(), 7.0 * 134_217_728.0 / 64.0), "{parts:?}");
}

#[test]
fn stages_in_two_machines_have_their_all_reduces_and_no_sends() {
    let group = |tensor| Group { tensor, pipeline: 2, experts: false };
    let (sixteen, summary) = predicted(&shapes::llama_3_1_70b(), "h200-sxm", group(8));
    let parts = step(cell(&sixteen, Phase::Decode, 1));
    assert_eq!(summary.link.map(|link| link.gpus), Some(8));
    // As many all-reduces, and one gather of logits, as eight GPUs have with one stage.
    let (eight, _) = predicted(&shapes::llama_3_1_70b(), "h200-sxm", tensor(8));
    let of_one_stage = step(cell(&eight, Phase::Decode, 1)).collectives_ns;
    assert!(close(parts.collectives_ns.unwrap(), of_one_stage.unwrap()), "{parts:?}");
    for row in &parts.collectives {
        assert_eq!(row.link_ns.is_none(), row.kind == CollectiveKind::Send, "{row:?}");
    }
    let note =
        |prediction: &Prediction| prediction.warnings.iter().any(|note| note.contains("16 × NVIDIA H200"));
    let (within, _) = predicted(&shapes::llama_3_1_70b(), "h200-sxm", group(4));
    assert!(note(&sixteen) && !note(&within), "{:?}", sixteen.warnings);
    let sent = step(cell(&within, Phase::Decode, 1)).collectives.iter().all(|row| row.link_ns.is_some());
    assert!(sent, "eight GPUs are in one machine");
}

#[test]
fn no_measured_all_reduce_is_faster_than_the_floor_of_its_link() {
    let times = links::every_time();
    assert!(times.len() > 400);
    for (device, gpus, bytes, time) in times {
        let link = links::between(device, gpus).expect("a link");
        let sent = super::exchange::sent(CollectiveKind::AllReduce, bytes, gpus, Some(link));
        let floor = Bytes(sent).at(link.of_group(gpus)).0;
        assert!(floor < time, "{device} over {gpus}, {bytes} B: floor {floor} ns, measured {time} ns");
    }
}

#[test]
fn what_an_engine_refuses_is_refused_with_the_value_the_limit_and_the_remedy() {
    let llama = shapes::llama_3_1_8b();
    let qwen = shapes::qwen3_30b_a3b();
    let told = |architecture: &Architecture, group| {
        stages(architecture, &architecture.inventory(Dtype::Bf16), group, 0).unwrap_err().to_string()
    };
    assert_eq!(
        told(&llama, tensor(5)),
        "32 attention heads cannot be shared by 5 GPUs; --tensor-parallel-size may be 1, 2, 4, 8, 16 or 32"
    );
    let twelve = Architecture { heads: 48, kv_heads: 8, ..llama.clone() };
    assert!(told(&twelve, tensor(12)).starts_with("8 heads of keys and values cannot be shared by 12 GPUs"));
    assert_eq!(
        told(&llama, experts(2)),
        "the model has no routed experts; leave out --enable-expert-parallel"
    );
    assert!(told(&qwen, experts(256)).starts_with("128 experts are fewer than 256 GPUs"));
    assert_eq!(
        told(&llama, pipeline(33)),
        "32 layers cannot be split into 33 stages; --pipeline-parallel-size may be 1 to 32"
    );
    let narrow = Architecture { ffn_size: 11_009, ..llama.clone() };
    assert_eq!(
        told(&narrow, tensor(2)),
        "11009 channels of a feed-forward cannot be shared by 2 GPUs; --tensor-parallel-size may be 1"
    );
    let mut inventory = llama.inventory(Dtype::Bf16);
    inventory.tensors[5].name = "blk.0.attn_q.weight".to_owned();
    let refused = stages(&llama, &inventory, tensor(2), 0).unwrap_err().to_string();
    assert!(refused.starts_with("how GGUF weights are split"), "{refused}");
    assert!(stages(&llama, &inventory, pipeline(2), 0).is_ok(), "layers can be dealt out whatever they hold");
    let mut inventory = llama.inventory(Dtype::Bf16);
    inventory.tensors[5].name = "model.layers.0.self_attn.r_proj.weight".to_owned();
    let refused = stages(&llama, &inventory, tensor(2), 0).unwrap_err();
    let unknown = "model.layers.0.self_attn.r_proj.weight".to_owned();
    assert_eq!(refused, GroupError::Tensor { tensor: unknown });
}

#[test]
fn what_does_not_fit_on_a_gpu_says_so() {
    let architecture = shapes::llama_3_1_70b();
    let (one, _) = predicted(&architecture, "h100-sxm", tensor(2));
    let flagged = |prediction: &Prediction| !cell(prediction, Phase::Decode, 32).flags.is_empty();
    // 70.6 GB of weights and 32 x 671 MB of KV on each; with four 35.3 GB and 32 x 336 MB.
    assert!(flagged(&one) && !flagged(&predicted(&architecture, "h100-sxm", tensor(4)).0));
    let (none, _) = predicted(&architecture, "l4", tensor(4));
    assert!(
        none.warnings.iter().any(|note| note.starts_with("the weights take 32.9 GiB of a GPU")),
        "{:?}",
        none.warnings
    );
    assert!(none.cells.iter().all(|cell| cell.status == Status::Predicted));
}

/// A folder's tensors have the words of their files: inputs first in AWQ and GPTQ, scales of three dimensions in a stack.
#[test]
fn stored_scales_are_split_along_their_own_axes() {
    use crate::model::Quantization;
    let architecture = Architecture {
        layers: 1,
        quantization: Some(Quantization {
            method: "gptq".into(),
            bits: 4,
            group_size: Some(128),
            ..Quantization::default()
        }),
        ..shapes::llama_3_1_8b()
    };
    let listed = |name: &str, shape: &[usize], bytes: u64, role| TensorInfo {
        name: format!("model.layers.0.{name}"),
        shape: shape.to_vec(),
        storage: "x".to_owned(),
        bytes: Bytes(bytes),
        role,
        layer: Some(0),
    };
    let split = |stored: TensorInfo| {
        let inventory = Inventory { tensors: vec![stored] };
        let parts = stages(&architecture, &inventory, tensor(4), 0)?;
        Ok::<_, GroupError>(parts[0].inventory.tensors[0].bytes.0)
    };
    // down_proj of 14,336 inputs: 112 groups along the first axis, 28 a GPU.
    assert_eq!(
        split(listed("mlp.down_proj.scales", &[112, 4096], 112 * 4096 * 2, Role::Scale)),
        Ok(28 * 4096 * 2)
    );
    // up_proj: its outputs along the second.
    assert_eq!(
        split(listed("mlp.up_proj.scales", &[32, 14_336], 32 * 14_336 * 2, Role::Scale)),
        Ok(32 * 3584 * 2)
    );
    // One group for a whole column is needed by all.
    assert_eq!(split(listed("mlp.down_proj.scales", &[1, 4096], 8192, Role::Scale)), Ok(8192));
    assert_eq!(split(listed("mlp.up_proj.g_idx", &[4096], 16_384, Role::Scale)), Ok(16_384));
    assert_eq!(split(listed("mlp.down_proj.g_idx", &[14_336], 57_344, Role::Scale)), Ok(14_336));
    // A scale an output: with the rows, and whole beside columns; one of a matrix is on every GPU.
    assert_eq!(split(listed("self_attn.q_proj.weight_scale", &[4096, 1], 8192, Role::Scale)), Ok(2048));
    assert_eq!(split(listed("self_attn.o_proj.weight_scale", &[4096, 1], 8192, Role::Scale)), Ok(8192));
    assert_eq!(split(listed("self_attn.o_proj.weight_scale_2", &[], 4, Role::Scale)), Ok(4));
    let refused =
        split(listed("mlp.down_proj.scales", &[110, 4096], 110 * 4096 * 2, Role::Scale)).unwrap_err();
    assert!(
        refused.to_string().contains("110 blocks of quantised weights cannot be shared by 4 GPUs"),
        "{refused}"
    );
}

#[test]
fn parts_of_all_gpus_are_the_tensor_and_as_many_bytes_as_a_stage_counts() {
    let models =
        [shapes::llama_3_1_8b(), shapes::qwen3_0_6b(), shapes::qwen3_30b_a3b(), shapes::mixtral_8x7b()];
    let groups = models.iter().flat_map(|model| [1, 2, 4, 8].map(|ranks| (model, ranks)));
    for (architecture, ranks) in groups.filter(|(model, ranks)| *ranks <= model.kv_heads) {
        let inventory = architecture.inventory(Dtype::Bf16);
        let parts: Vec<Vec<TensorPart>> =
            (0..ranks).map(|rank| tensor_parts(architecture, &inventory, ranks, rank).unwrap()).collect();
        for (index, tensor) in inventory.tensors.iter().enumerate() {
            let mut next = 0;
            for (rank, parts) in parts.iter().enumerate() {
                match &parts[index] {
                    TensorPart::Rows(blocks) => {
                        let [rows] = &TensorPart::ranges(blocks, tensor.shape[0])[..] else {
                            panic!("{blocks:?}")
                        };
                        assert_eq!(rows.start, next, "{} of {ranks}: {}", rank, tensor.name);
                        next = rows.end;
                    }
                    TensorPart::Columns(share) => {
                        assert_eq!(share.range_of(ranks), rank..rank + 1, "{}", tensor.name);
                    }
                    TensorPart::Whole | TensorPart::OnFirst => {}
                }
            }
            assert!(next == 0 || next == tensor.shape[0], "{}: {next}", tensor.name);
        }
        let stage = &stages(architecture, &inventory, tensor(ranks), ranks - 1).unwrap()[0];
        let held: u64 = inventory
            .tensors
            .iter()
            .zip(&parts[ranks - 1])
            .map(|(tensor, part)| match part {
                TensorPart::Rows(blocks) => {
                    let rows: usize =
                        TensorPart::ranges(blocks, tensor.shape[0]).iter().map(ExactSizeIterator::len).sum();
                    tensor.bytes.0 * rows as u64 / tensor.shape[0] as u64
                }
                TensorPart::Columns(_) => tensor.bytes.0 / ranks as u64,
                TensorPart::Whole | TensorPart::OnFirst => tensor.bytes.0,
            })
            .sum();
        assert_eq!(held, stage.inventory.total_bytes().0, "{ranks}");
    }
    // Fewer heads of K and V than GPUs: each is on two of them.
    let few = Architecture { kv_heads: 4, ..shapes::llama_3_1_8b() };
    let inventory = few.inventory(Dtype::Bf16);
    let keys = inventory.tensors.iter().position(|tensor| tensor.name.contains("k_proj")).unwrap();
    let of = |rank| rows_of(&few, &inventory, 8, rank, keys);
    assert_eq!([0, 1, 6, 7].map(of), [0..128, 0..128, 384..512, 384..512].map(|rows| vec![rows]));
}

fn rows_of(
    architecture: &Architecture,
    inventory: &Inventory,
    ranks: usize,
    rank: usize,
    tensor: usize,
) -> Vec<Range<usize>> {
    match &tensor_parts(architecture, inventory, ranks, rank).unwrap()[tensor] {
        TensorPart::Rows(blocks) => TensorPart::ranges(blocks, inventory.tensors[tensor].shape[0]),
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_is_stored_as_one_is_split_block_by_block() {
    let position = |inventory: &Inventory, part: &str| {
        inventory.tensors.iter().position(|tensor| tensor.name.contains(part)).unwrap()
    };
    // 40 heads of 128 for queries, 10 for keys and values; gate and up have 17,920 channels.
    let phi = preset("Phi-4");
    let inventory = phi.inventory(Dtype::Bf16);
    let of = |rank, part| rows_of(&phi, &inventory, 2, rank, position(&inventory, part));
    assert_eq!(of(0, "qkv_proj"), [0..2560, 5120..5760, 6400..7040]);
    assert_eq!(of(1, "qkv_proj"), [2560..5120, 5760..6400, 7040..7680]);
    assert_eq!(of(0, "gate_up_proj"), [0..8960, 17_920..26_880]);
    assert_eq!(of(1, "gate_up_proj"), [8960..17_920, 26_880..35_840]);
    // 90 blocks of 32 channels on four GPUs: 23, 23, 23 and 21.
    let oss = preset("gpt-oss-20b");
    let inventory = oss.inventory(Dtype::Mxfp4);
    let part = |name| tensor_parts(&oss, &inventory, 4, 3).unwrap()[position(&inventory, name)].clone();
    let TensorPart::Rows(blocks) = part("experts.gate_up_proj") else { panic!("rows") };
    let rows = TensorPart::ranges(&blocks, 32 * 5760);
    assert_eq!((rows.len(), rows[0].clone(), rows[1].clone()), (32, 4416..5760, 10_176..11_520));
    let TensorPart::Columns(share) = part("experts.down_proj") else { panic!("columns") };
    assert_eq!(share.range_of(2880), 2208..2880);
}
