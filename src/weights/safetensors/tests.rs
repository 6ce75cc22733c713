//! Claims about [`Checkpoint`]: what is read is exactly what is stored, and what is not consistent is refused by name.

use std::fmt::Write as _;
use std::fs;

use ::safetensors::tensor::{Dtype as StDtype, TensorView, serialize_to_file};
use proptest::prelude::*;
use tempfile::TempDir;

use super::*;
use hbmark_core::model::safetensors::MAX_TENSORS;

fn expect(name: &str, shape: &[usize], role: Role) -> TensorInfo {
    let (name, shape) = (name.to_owned(), shape.to_vec());
    TensorInfo { name, shape, storage: "bf16".to_owned(), bytes: Bytes(0), role, layer: None }
}

fn expected() -> Inventory {
    Inventory {
        tensors: vec![
            expect("model.embed_tokens.weight", &[4, 2], Role::Embedding),
            expect("model.norm.weight", &[2], Role::Norm),
        ],
    }
}

const EMBEDDING: [f32; 8] = [0.5, -1.0, 2.0, 3.5, -0.25, 8.0, 0.0, 1.5];

fn bf16_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect()
}

fn write_file(path: &Path, tensors: &[(&str, StDtype, &[usize], Vec<u8>)]) {
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, data)| (*name, TensorView::new(*dtype, shape.to_vec(), data).unwrap()));
    serialize_to_file(views.collect::<Vec<_>>(), None, path).unwrap();
}

fn good(folder: &TempDir) {
    write_file(
        &folder.path().join(SINGLE),
        &[
            ("model.embed_tokens.weight", StDtype::BF16, &[4, 2], bf16_bytes(&EMBEDDING)),
            ("model.norm.weight", StDtype::BF16, &[2], bf16_bytes(&[1.0, 2.0])),
        ],
    );
}

fn folder() -> TempDir {
    tempfile::tempdir().unwrap()
}

fn refused(folder: &TempDir) -> String {
    let error = Checkpoint::open(folder.path(), &expected()).unwrap_err().to_string();
    error.replace(&folder.path().display().to_string(), "DIR")
}

/// The error of a single file made of a raw header and a number of data bytes.
fn refused_header(header: &str, data: usize) -> String {
    let folder = folder();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(vec![0; data]);
    fs::write(folder.path().join(SINGLE), bytes).unwrap();
    refused(&folder).replace("DIR/model.safetensors: ", "")
}

#[test]
fn a_checkpoint_loads_bit_exactly_and_its_bytes_are_those_on_disk() {
    let folder = folder();
    good(&folder);
    let checkpoint = Checkpoint::open(folder.path(), &expected()).unwrap();
    assert_eq!(checkpoint.stored_dtype(), Some(Dtype::Bf16));
    let weights = checkpoint.load(Dtype::Bf16, &Device::Cpu, &mut |_| {}).unwrap();
    assert_eq!(checkpoint.on_disk.total_bytes(), Bytes(20));
    assert_eq!(weights.loaded, checkpoint.on_disk);
    let embedding = weights.tensors["model.embed_tokens.weight"].to_vec2::<bf16>().unwrap();
    assert_eq!(embedding.concat(), EMBEDDING.map(bf16::from_f32));
}

#[test]
fn conversion_changes_the_loaded_inventory_and_not_the_stored_one() {
    let folder = folder();
    good(&folder);
    let checkpoint = Checkpoint::open(folder.path(), &expected()).unwrap();
    for wanted in [Dtype::F32, Dtype::F16] {
        let weights = checkpoint.load(wanted, &Device::Cpu, &mut |_| {}).unwrap();
        assert_eq!(checkpoint.on_disk.total_bytes(), Bytes(20));
        assert_eq!(weights.loaded.total_bytes(), Bytes(if wanted == Dtype::F32 { 40 } else { 20 }));
        assert!(weights.loaded.tensors.iter().all(|t| t.storage == wanted.name()));
        let embedding = weights.tensors["model.embed_tokens.weight"].to_dtype(DType::F32).unwrap();
        assert_eq!(embedding.to_vec2::<f32>().unwrap().concat(), EMBEDDING);
    }
}

#[test]
fn every_pair_of_float_dtypes_converts() {
    let f32_bytes: Vec<u8> = EMBEDDING.iter().flat_map(|v| v.to_le_bytes()).collect();
    let f16_bytes: Vec<u8> = EMBEDDING.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect();
    for (stored, bytes) in
        [(StDtype::F32, f32_bytes), (StDtype::F16, f16_bytes), (StDtype::BF16, bf16_bytes(&EMBEDDING))]
    {
        let folder = folder();
        write_file(&folder.path().join(SINGLE), &[("w", stored, &[8], bytes)]);
        let expected = Inventory { tensors: vec![expect("w", &[8], Role::Matrix)] };
        let checkpoint = Checkpoint::open(folder.path(), &expected).unwrap();
        for wanted in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
            let tensor = &checkpoint.load(wanted, &Device::Cpu, &mut |_| {}).unwrap().tensors["w"];
            assert_eq!(tensor.dtype(), plain_dtype(wanted, "").unwrap());
            let values = tensor.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap();
            assert_eq!(values, EMBEDDING, "{stored:?} -> {wanted}");
        }
    }
}

#[test]
fn a_tensor_longer_than_one_chunk_is_read_whole() {
    let folder = folder();
    let count = CHUNK_BYTES / 4 + 3;
    let values: Vec<f32> = (0..count).map(|i| i as f32).collect();
    let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    write_file(&folder.path().join(SINGLE), &[("w", StDtype::F32, &[count], bytes)]);
    let expected = Inventory { tensors: vec![expect("w", &[count], Role::Matrix)] };
    let checkpoint = Checkpoint::open(folder.path(), &expected).unwrap();
    let weights = checkpoint.load(Dtype::F32, &Device::Cpu, &mut |_| {}).unwrap();
    assert_eq!(weights.tensors["w"].to_vec1::<f32>().unwrap(), values);
}

#[test]
fn a_missing_tensor_and_a_wrong_shape_are_named() {
    let folder = folder();
    let norm = ("model.norm.weight", StDtype::BF16, [2].as_slice(), bf16_bytes(&[1.0, 2.0]));
    write_file(&folder.path().join(SINGLE), std::slice::from_ref(&norm));
    let message =
        "DIR has no tensor model.embed_tokens.weight of shape [4, 2]; the checkpoint does not fit its config";
    assert_eq!(refused(&folder), message);
    let transposed = ("model.embed_tokens.weight", StDtype::BF16, [2, 4].as_slice(), bf16_bytes(&EMBEDDING));
    write_file(&folder.path().join(SINGLE), &[transposed, norm]);
    assert_eq!(
        refused(&folder),
        "tensor model.embed_tokens.weight in DIR/model.safetensors has shape [2, 4], but the config implies [4, 2]"
    );
}

#[test]
fn harmless_extras_are_unused_and_unknown_ones_are_refused_by_name() {
    let folder = folder();
    let mut tensors = vec![
        ("model.embed_tokens.weight", StDtype::BF16, [4, 2].as_slice(), bf16_bytes(&EMBEDDING)),
        ("model.norm.weight", StDtype::BF16, [2].as_slice(), bf16_bytes(&[1.0, 2.0])),
        ("lm_head.weight", StDtype::BF16, [4, 2].as_slice(), bf16_bytes(&EMBEDDING)),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", StDtype::F32, [1].as_slice(), vec![0; 4]),
        ("visual.patch_embed.weight", StDtype::BF16, [1].as_slice(), vec![0; 2]),
    ];
    write_file(&folder.path().join(SINGLE), &tensors);
    let checkpoint = Checkpoint::open(folder.path(), &expected()).unwrap();
    assert_eq!(checkpoint.on_disk.bytes_of(Role::Unused), Bytes(22));
    let weights = checkpoint.load(Dtype::Bf16, &Device::Cpu, &mut |_| {}).unwrap();
    assert_eq!((weights.tensors.len(), weights.loaded.total_bytes()), (2, Bytes(20)));

    tensors.push(("model.patch_embed.weight", StDtype::BF16, &[1], bf16_bytes(&[1.0])));
    write_file(&folder.path().join(SINGLE), &tensors);
    assert_eq!(
        refused(&folder),
        "DIR holds tensors this architecture does not have: model.patch_embed.weight; is the config of another model?"
    );
}

/// Gemma 3 from 4b on, as it is published and as `transformers` 5 writes it.
#[test]
fn a_language_model_among_other_parts_is_read_without_their_names() {
    for (embedding, norm, projector) in [
        (
            "language_model.model.embed_tokens.weight",
            "language_model.model.norm.weight",
            "multi_modal_projector.w",
        ),
        (
            "model.language_model.embed_tokens.weight",
            "model.language_model.norm.weight",
            "model.multi_modal_projector.w",
        ),
    ] {
        let folder = folder();
        let mut tensors = vec![
            (embedding, StDtype::BF16, [4, 2].as_slice(), bf16_bytes(&EMBEDDING)),
            (norm, StDtype::BF16, [2].as_slice(), bf16_bytes(&[1.0, 2.0])),
            (projector, StDtype::BF16, [1].as_slice(), bf16_bytes(&[1.0])),
            ("vision_tower.vision_model.w", StDtype::BF16, [1].as_slice(), bf16_bytes(&[1.0])),
        ];
        write_file(&folder.path().join(SINGLE), &tensors);
        let checkpoint = Checkpoint::open(folder.path(), &expected()).unwrap();
        assert_eq!(checkpoint.on_disk.bytes_of(Role::Unused), Bytes(4));
        let weights = checkpoint.load(Dtype::F32, &Device::Cpu, &mut |_| {}).unwrap();
        let found = weights.tensors["model.embed_tokens.weight"].to_vec2::<f32>().unwrap();
        assert_eq!(found.concat(), EMBEDDING);
        tensors.push(("model.norm.weight", StDtype::BF16, &[2], bf16_bytes(&[1.0, 2.0])));
        write_file(&folder.path().join(SINGLE), &tensors);
        let error = refused(&folder);
        assert!(error.contains("tensor model.norm.weight is there with and without"), "{error}");
    }
}

/// DeepSeek-V3 has 61 layers and a 62nd that predicts a further token; others keep such layers apart.
#[test]
fn layers_that_predict_further_tokens_are_unused_and_a_module_within_the_layers_is_not() {
    let folder = folder();
    let one = |name| (name, StDtype::BF16, [1].as_slice(), bf16_bytes(&[1.0]));
    let mut tensors =
        vec![one("model.layers.0.mlp.w"), one("model.layers.1.eh_proj.weight"), one("mtp.layers.0.mlp.w")];
    write_file(&folder.path().join(SINGLE), &tensors);
    let layer = TensorInfo { layer: Some(0), ..expect("model.layers.0.mlp.w", &[1], Role::Matrix) };
    let expected = Inventory { tensors: vec![layer] };
    let checkpoint = Checkpoint::open(folder.path(), &expected).unwrap();
    assert_eq!(checkpoint.on_disk.bytes_of(Role::Unused), Bytes(4));
    assert_eq!(checkpoint.load(Dtype::F32, &Device::Cpu, &mut |_| {}).unwrap().tensors.len(), 1);
    tensors.push(one("model.layers.0.eh_proj.weight"));
    write_file(&folder.path().join(SINGLE), &tensors);
    let error = Checkpoint::open(folder.path(), &expected).unwrap_err().to_string();
    assert!(error.contains("does not have: model.layers.0.eh_proj.weight"), "{error}");
}

#[test]
fn quantised_storage_and_quantised_wishes_are_refused() {
    let folder = folder();
    write_file(&folder.path().join(SINGLE), &[("w", StDtype::F8_E4M3, &[8], vec![0; 8])]);
    let expected = Inventory { tensors: vec![expect("w", &[8], Role::Matrix)] };
    let checkpoint = Checkpoint::open(folder.path(), &expected).unwrap();
    let error = checkpoint.load(Dtype::Bf16, &Device::Cpu, &mut |_| {}).unwrap_err().to_string();
    assert!(error.contains("is stored as F8_E4M3, which this loader does not turn into bf16"), "{error}");
    let error = checkpoint.load(Dtype::Int8, &Device::Cpu, &mut |_| {}).unwrap_err().to_string();
    assert_eq!(error, "weights cannot be loaded as int8: choose f32, bf16 or f16");
}

#[test]
fn headers_that_lie_are_refused_before_anything_is_allocated() {
    let folder = folder();
    let file = folder.path().join(SINGLE);
    fs::write(&file, [1, 2, 3]).unwrap();
    assert_eq!(
        refused(&folder),
        "DIR/model.safetensors: the file is 3 bytes, too short for a safetensors header"
    );
    fs::write(&file, u64::MAX.to_le_bytes()).unwrap();
    assert!(refused(&folder).contains("claims 18446744073709551615 bytes, above the format's limit"));
    fs::write(&file, 90_000_000u64.to_le_bytes()).unwrap();
    assert!(refused(&folder).contains("claims 90000000 bytes, but only 0 follow"));
}

#[test]
fn inconsistent_tensors_are_refused_with_their_numbers() {
    let one = |dtype: &str, shape: &str, offsets: &str| {
        format!(r#"{{"w":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#)
    };
    let two = |first: &str, second: &str| {
        let tensor =
            |name: &str, at: &str| format!(r#""{name}":{{"dtype":"U8","shape":[4],"data_offsets":{at}}}"#);
        format!("{{{},{}}}", tensor("a", first), tensor("b", second))
    };
    let cases = [
        (one("Q4_0", "[2]", "[0,2]"), 2, r#"tensor w has the unknown dtype "Q4_0""#),
        (one("F32", "[4294967296,4294967296]", "[0,8]"), 8, "whose size in bytes overflows"),
        (one("F32", "[2]", "[8,0]"), 8, "tensor w lies at 8..0, which is not a range"),
        (one("F32", "[2]", "[0,4]"), 4, "tensor w of shape [2] needs 8 bytes, but its range holds 4"),
        (one("F32", "[2]", "[0,8]"), 7, "the tensors end at byte 8 of the data, but the file holds 7"),
        (one("F32", "[2]", "[0,8]"), 9, "the tensors end at byte 8 of the data, but the file holds 9"),
        (one("U8", "[1]", "[18446744073709551614,18446744073709551615]"), 1, "whose size in bytes overflows"),
        (one("F32", "[1,1,1,1,1,1,1,1,1]", "[0,4]"), 4, "a shape of at most 8 dimensions"),
        (one("F32", "[-1]", "[0,4]"), 4, "the header is not valid: invalid value: integer `-1`"),
        (two("[0,4]", "[2,6]"), 6, "tensor b begins at 2, inside the tensor that ends at 4"),
        (two("[0,4]", "[5,9]"), 9, "tensor b begins at 5, but the tensor before it ends at 4: a hole"),
        (two("[0,4]", "[4,8]").replace("\"b\"", "\"a\""), 8, r#""a" appears twice"#),
        (
            one("U8", "[1]", "[0,1]").replace("\"w\"", r#""\u001b[2J""#),
            1,
            r#"a name of 4 bytes, "\u{1b}[2J""#,
        ),
        (one("U8", "[1]", "[0,1]").replace('w', &"w".repeat(2_000)), 1, "a name of 2000 bytes"),
        (one("U8", "[1]", "[0,1]").replace("dtype", &"d".repeat(90_000)), 1, "unknown field `ddd"),
        ("{".to_owned(), 0, "the header is not valid: EOF"),
        ("[1]".to_owned(), 0, "the header is not valid: invalid type: sequence"),
        ("[".repeat(100_000), 0, "the header is not valid"),
    ];
    for (header, data, message) in cases {
        let error = refused_header(&header, data);
        assert!(error.len() < 400, "an error repeats {} bytes of the file", error.len());
        let shown = &header[..header.len().min(100)];
        assert!(error.contains(message), "{shown}\n  gave: {error}\n  want: {message}");
    }
}

#[test]
fn a_header_of_a_million_tensors_stops_at_the_limit() {
    let mut header = String::from("{");
    for i in 0..=MAX_TENSORS {
        let comma = if i == 0 { "" } else { "," };
        write!(header, r#"{comma}"{i}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}"#).unwrap();
    }
    let error = refused_header(&(header + "}"), 0);
    assert!(error.contains("more than 400000 entries"), "{error}");
}

fn write_sharded(folder: &TempDir, index: &str) {
    fs::write(folder.path().join(INDEX), index).unwrap();
    let embedding = ("model.embed_tokens.weight", StDtype::BF16, [4, 2].as_slice(), bf16_bytes(&EMBEDDING));
    let norm = ("model.norm.weight", StDtype::BF16, [2].as_slice(), bf16_bytes(&[1.0, 2.0]));
    write_file(&folder.path().join("a.safetensors"), &[embedding]);
    write_file(&folder.path().join("b.safetensors"), &[norm]);
}

#[test]
fn shards_are_found_through_their_index() {
    let folder = folder();
    write_sharded(
        &folder,
        r#"{"metadata":{"total_size":20},
            "weight_map":{"model.embed_tokens.weight":"a.safetensors","model.norm.weight":"b.safetensors"}}"#,
    );
    let checkpoint = Checkpoint::open(folder.path(), &expected()).unwrap();
    let weights = checkpoint.load(Dtype::Bf16, &Device::Cpu, &mut |_| {}).unwrap();
    assert_eq!(
        weights.tensors["model.norm.weight"].to_vec1::<bf16>().unwrap(),
        [1.0, 2.0].map(bf16::from_f32)
    );
    assert_eq!(checkpoint.on_disk.total_bytes(), Bytes(20));
}

#[test]
fn an_index_cannot_lead_out_of_its_folder_or_lie_about_a_shard() {
    let index = |first: &str, second: &str| {
        format!(
            r#"{{"weight_map":{{"model.embed_tokens.weight":"{first}","model.norm.weight":"{second}"}}}}"#
        )
    };
    let cases = [
        (
            index("a.safetensors", "../b.safetensors"),
            r#""../b.safetensors", named in DIR/model.safetensors.index"#,
        ),
        (index("a.safetensors", "/etc/passwd"), r#""/etc/passwd", named in"#),
        (
            index("a.safetensors", "a.safetensors"),
            "puts tensor model.norm.weight in a.safetensors, which does not",
        ),
        (index("a.safetensors", "c.safetensors"), "cannot read DIR/c.safetensors"),
        (index("a.safetensors", "sub"), "DIR/sub is a folder, not a regular file"),
        (index("a.safetensors", "pipe"), "DIR/pipe is a pipe, socket or device, not a regular file"),
        (index("a.safetensors", "out"), "outside the model's folder"),
        (r#"{"weight_map":{"a":"a","a":"b"}}"#.to_owned(), r#""a" appears twice"#),
        ("{}".to_owned(), "missing field `weight_map`"),
    ];
    for (text, message) in cases {
        let (folder, outside) = (folder(), folder());
        write_sharded(&folder, &text);
        fs::create_dir(folder.path().join("sub")).unwrap();
        let pipe = folder.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(pipe).status().unwrap().success());
        fs::write(outside.path().join("x"), b"x").unwrap();
        std::os::unix::fs::symlink(outside.path().join("x"), folder.path().join("out")).unwrap();
        let error = refused(&folder);
        // A canonical path may differ from the one asked, so only the tail is compared.
        assert!(error.contains(message), "{text}\n  gave: {error}\n  want: {message}");
    }
}

#[test]
fn a_tensor_that_the_index_leaves_out_is_refused_with_its_shard() {
    let folder = folder();
    write_sharded(&folder, r#"{"weight_map":{"model.norm.weight":"b.safetensors"}}"#);
    // Only shards that the index names are looked into.
    assert!(refused(&folder).contains("has no tensor model.embed_tokens.weight"), "{}", refused(&folder));
    let both = [
        ("model.embed_tokens.weight", StDtype::BF16, [4, 2].as_slice(), bf16_bytes(&EMBEDDING)),
        ("model.norm.weight", StDtype::BF16, [2].as_slice(), bf16_bytes(&[1.0, 2.0])),
    ];
    write_file(&folder.path().join("b.safetensors"), &both);
    assert_eq!(
        refused(&folder),
        "DIR/model.safetensors.index.json: the index does not name tensor model.embed_tokens.weight, which b.safetensors holds; \
         one of the two is of another model or version"
    );
}

#[test]
fn a_value_that_is_no_number_is_refused_with_its_tensor() {
    for (value, loads_as) in
        [(f32::NAN, Dtype::F32), (f32::INFINITY, Dtype::Bf16), (f32::NEG_INFINITY, Dtype::F16)]
    {
        let folder = folder();
        let mut embedding = EMBEDDING;
        embedding[5] = value;
        let tensors = [
            ("model.embed_tokens.weight", StDtype::BF16, [4, 2].as_slice(), bf16_bytes(&embedding)),
            ("model.norm.weight", StDtype::BF16, [2].as_slice(), bf16_bytes(&[1.0, 2.0])),
        ];
        write_file(&folder.path().join(SINGLE), &tensors);
        let checkpoint = Checkpoint::open(folder.path(), &expected()).unwrap();
        let error = checkpoint.load(loads_as, &Device::Cpu, &mut |_| {}).unwrap_err().to_string();
        assert!(error.starts_with("tensor model.embed_tokens.weight in "), "{error}");
        assert!(error.contains("has a value that is NaN or infinite"), "{error}");
    }
}

#[test]
fn a_value_beyond_the_dtype_is_refused_and_the_dtype_is_blamed() {
    let folder = folder();
    let tensors = [
        ("model.embed_tokens.weight", StDtype::BF16, [4, 2].as_slice(), bf16_bytes(&EMBEDDING)),
        ("model.norm.weight", StDtype::BF16, [2].as_slice(), bf16_bytes(&[1.0, 1e30])),
    ];
    write_file(&folder.path().join(SINGLE), &tensors);
    let checkpoint = Checkpoint::open(folder.path(), &expected()).unwrap();
    checkpoint.load(Dtype::F32, &Device::Cpu, &mut |_| {}).unwrap();
    let error = checkpoint.load(Dtype::F16, &Device::Cpu, &mut |_| {}).unwrap_err().to_string();
    assert!(error.contains("too large for the dtype (choose bf16 or f32)"), "{error}");
}

#[test]
fn a_tensor_in_two_shards_is_refused() {
    let folder = folder();
    write_sharded(
        &folder,
        r#"{"weight_map":{"model.embed_tokens.weight":"a.safetensors","model.norm.weight":"b.safetensors"}}"#,
    );
    fs::copy(folder.path().join("a.safetensors"), folder.path().join("b.safetensors")).unwrap();
    assert_eq!(
        refused(&folder),
        "DIR/b.safetensors: tensor model.embed_tokens.weight is also in a.safetensors"
    );
}

#[test]
fn a_folder_without_safetensors_says_what_was_looked_for() {
    let folder = folder();
    assert_eq!(
        refused(&folder),
        "no weights in DIR: looked for model.safetensors and model.safetensors.index.json"
    );
    fs::write(folder.path().join("pytorch_model.bin"), b"").unwrap();
    assert!(refused(&folder).ends_with("are not read, convert them to safetensors"));
}

proptest! {
    #[test]
    fn no_corruption_of_a_file_panics(flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
                                      cut in prop::option::of(any::<prop::sample::Index>())) {
        let folder = folder();
        good(&folder);
        let path = folder.path().join(SINGLE);
        let mut bytes = fs::read(&path).unwrap();
        for (place, value) in flips {
            let at = place.index(bytes.len());
            bytes[at] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        fs::write(&path, bytes).unwrap();
        if let Ok(checkpoint) = Checkpoint::open(folder.path(), &expected()) {
            let _ = checkpoint.load(Dtype::F32, &Device::Cpu, &mut |_| {});
        }
    }
}
