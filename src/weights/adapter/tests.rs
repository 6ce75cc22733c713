//! PEFT folders, good and hostile.

use super::*;
use hbmark_core::model::test_shapes;

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/adapters/llama-gqa-r4")
}

fn llama() -> Architecture {
    let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models/llama-gqa/config.json");
    hbmark_core::model::read_config(&config).unwrap()
}

/// A copy of the fixture whose config was changed.
fn with_config(change: impl Fn(&mut Value)) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let mut config: Value = serde_json::from_slice(&std::fs::read(fixture().join(CONFIG)).unwrap()).unwrap();
    change(&mut config);
    std::fs::write(folder.path().join(CONFIG), config.to_string()).unwrap();
    std::fs::copy(fixture().join(WEIGHTS), folder.path().join(WEIGHTS)).unwrap();
    folder
}

fn refused(change: impl Fn(&mut Value), message: &str) {
    let folder = with_config(change);
    let error = Adapter::open(folder.path(), "x", &llama(), 64).unwrap_err().to_string();
    assert!(error.contains(message), "{error}");
}

#[test]
fn a_peft_folder_is_its_matrices_and_its_scale() {
    let adapter = Adapter::open(&fixture(), "x", &llama(), 16).unwrap();
    // lora_alpha 8 over r 4.
    assert_eq!((adapter.rank, adapter.scale.to_bits()), (4, 2.0_f32.to_bits()));
    assert_eq!(adapter.targets(), Target::ALL);
    let low = adapter.at(1, Target::DownProj).unwrap();
    assert_eq!((low.a.len(), low.b.len()), (4 * 112, 64 * 4));
    assert!(adapter.at(2, Target::QProj).is_none());
    let (hidden, query, kv, ffn) = (64, 64, 32, 112);
    let each = (hidden + query) + 2 * (hidden + kv) + (query + hidden) + 2 * (hidden + ffn) + (ffn + hidden);
    assert_eq!(adapter.bytes(16), Bytes(2 * 4 * each * 2));
}

#[test]
fn rslora_divides_by_the_root_of_the_rank() {
    let folder = with_config(|config| config["use_rslora"] = true.into());
    let adapter = Adapter::open(folder.path(), "x", &llama(), 16).unwrap();
    assert!((adapter.scale - 4.0).abs() < 1e-6);
}

#[test]
fn what_would_be_computed_otherwise_is_refused_by_name() {
    refused(|c| c["peft_type"] = "IA3".into(), "`peft_type` is IA3");
    refused(|c| c["use_dora"] = true.into(), "`use_dora` is true");
    refused(|c| c["bias"] = "all".into(), "`bias` is \"all\"");
    refused(|c| c["rank_pattern"] = serde_json::json!({"q_proj": 8}), "`rank_pattern` is {\"q_proj\":8}");
    refused(|c| c["modules_to_save"] = serde_json::json!(["lm_head"]), "`modules_to_save` is [\"lm_head\"]");
    refused(|c| c["lora_alpha"] = 0.into(), "make no scale");
    refused(|c| c["r"] = (-4).into(), "is not an adapter's config");
    refused(|c| c["r"] = 128.into(), "has rank 128, and the most is 64; raise --max-lora-rank");
    // The tensors are of rank 4.
    refused(|c| c["r"] = 8.into(), "but the model and the rank imply [8, 64]");
}

#[test]
fn an_adapter_of_another_model_is_refused_with_the_tensor() {
    let error = Adapter::open(&fixture(), "x", &test_shapes::llama_3_1_8b(), 16).unwrap_err().to_string();
    assert!(error.contains("but the model and the rank imply [4, 4096]"), "{error}");
    let one_layer = Architecture { layers: 1, ..llama() };
    let error = Adapter::open(&fixture(), "x", &one_layer, 16).unwrap_err().to_string();
    assert!(error.contains("is none of layers.N.") && error.contains("1 layers"), "{error}");
}

#[test]
fn a_broken_or_absent_file_is_refused_with_its_path() {
    let folder = with_config(|_| {});
    std::fs::write(folder.path().join(WEIGHTS), [0xff; 100]).unwrap();
    let error = Adapter::open(folder.path(), "x", &llama(), 16).unwrap_err().to_string();
    assert!(error.contains("adapter_model.safetensors: the header claims"), "{error}");
    std::fs::remove_file(folder.path().join(WEIGHTS)).unwrap();
    let error = Adapter::open(folder.path(), "x", &llama(), 16).unwrap_err().to_string();
    assert!(error.contains("cannot read"), "{error}");
    std::fs::write(folder.path().join(CONFIG), "[").unwrap();
    let error = Adapter::open(folder.path(), "x", &llama(), 16).unwrap_err().to_string();
    assert!(error.contains("is not an adapter's config"), "{error}");
}

#[test]
fn the_size_of_a_random_adapter_is_known_before_it_is_made() {
    for targets in [&Target::ALL[..], &[Target::KProj, Target::DownProj], &[]] {
        let made = Adapter::synthetic(&llama(), "x", 3, targets, 1);
        assert_eq!(Adapter::parameters(&llama(), 3, targets), made.elements());
        assert_eq!(made.targets(), targets);
    }
}

#[test]
fn names_have_one_spelling() {
    let name = |layer: &str, module: &str| format!("{PREFIX}{layer}.{module}.lora_A.weight");
    assert_eq!(place(&name("1", "mlp.up_proj"), 2), Some((1, Target::UpProj, 0)));
    for (layer, module) in [
        ("2", "mlp.up_proj"),
        ("01", "mlp.up_proj"),
        ("0", "mlp.q_proj"),
        ("0", "lm_head"),
        ("-1", "mlp.up_proj"),
    ] {
        assert_eq!(place(&name(layer, module), 2), None, "{layer} {module}");
    }
}

#[test]
fn merging_adds_the_scaled_product() {
    let architecture = llama();
    let mut adapter = Adapter::synthetic(&architecture, "x", 1, &[Target::OProj], 3);
    adapter.scale = 2.0;
    let low = adapter.at(0, Target::OProj).unwrap();
    let wanted = 1.0 + 2.0 * low.b[5] * low.a[7];
    let mut weights = vec![1.0; 64 * 64];
    adapter.merge(0, Target::OProj, &mut weights);
    assert!((weights[5 * 64 + 7] - wanted).abs() < 1e-6);
    adapter.merge(0, Target::QProj, &mut weights);
    assert!((weights[5 * 64 + 7] - wanted).abs() < 1e-6, "a target it does not have");
}
