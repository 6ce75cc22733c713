use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;

use candle_core::{Device, Tensor};

use super::*;
use crate::machine::device::DeviceChoice;
use crate::weights::{OpenModel, StoredData, Weights, open};
use hbmark_core::model::test_shapes;

fn folder(name: &str) -> PathBuf {
    let fixtures = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let plain = fixtures.join("models").join(name);
    if plain.exists() { plain } else { fixtures.join("quantised").join(name) }
}

fn fixture(name: &str) -> OpenModel {
    open(folder(name).to_str().unwrap(), None, 0).unwrap()
}

fn streamed(model: &OpenModel, dtype: Dtype) -> (HashMap<String, StoredTensor>, Inventory) {
    let mut tensors = HashMap::new();
    let mut keep = |name: &str, tensor| {
        assert!(tensors.insert(name.to_owned(), tensor).is_none(), "{name} came twice");
        Ok(())
    };
    let inventory = model.stream(dtype, &mut keep).unwrap();
    (tensors, inventory)
}

fn loaded(model: &OpenModel, dtype: Dtype) -> HashMap<String, Tensor> {
    match model.load(dtype, &Device::Cpu, &mut |_| {}).unwrap() {
        Weights::Tensors { tensors, .. } => tensors,
        Weights::Gguf { .. } => panic!("a folder or a seed"),
    }
}

/// A shape small enough to make in a test, with every kind of tensor a dense model has.
fn small() -> Architecture {
    let mut architecture = test_shapes::dense(hbmark_core::model::Family::Qwen2, [48, 2, 4, 2, 12, 80, 101]);
    architecture.qk_norm = true;
    architecture
}

fn keep_in(
    into: &mut HashMap<String, StoredTensor>,
) -> impl FnMut(&str, StoredTensor) -> Result<(), OpenError> {
    |name, tensor| {
        into.insert(name.to_owned(), tensor);
        Ok(())
    }
}

#[test]
fn a_folder_streams_what_it_loads() {
    for name in ["llama-gqa", "llama-sharded", "llama-bf16", "llama-tied", "qwen2", "qwen3"] {
        let model = fixture(name);
        for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
            let (streamed, inventory) = streamed(&model, dtype);
            let loaded = loaded(&model, dtype);
            assert_eq!(streamed.len(), loaded.len(), "{name}");
            for (tensor_name, tensor) in &loaded {
                let wanted: Vec<f32> =
                    tensor.flatten_all().unwrap().to_dtype(DType::F32).unwrap().to_vec1().unwrap();
                assert_eq!(streamed[tensor_name].values(), wanted, "{name} {tensor_name} {dtype}");
                if let StoredTensor::Matrix(matrix) = &streamed[tensor_name] {
                    assert_eq!(
                        (matrix.storage(), tensor.dims()),
                        (dtype.name(), [matrix.rows, matrix.columns].as_slice())
                    );
                }
            }
            for (ours, planned) in inventory.tensors.iter().zip(&model.inventory(dtype).tensors) {
                let vector = ours.shape.len() == 1;
                assert_eq!(
                    (&ours.name, &ours.shape, ours.role, ours.layer),
                    (&planned.name, &planned.shape, planned.role, planned.layer)
                );
                assert_eq!(ours.storage, if vector { "f32" } else { dtype.name() });
                assert_eq!(ours.bytes.0, if vector { ours.elements() * 4 } else { planned.bytes.0 });
            }
        }
    }
}

/// Gemma 3 from 4b on: the fixture of its text model among other parts.
#[test]
fn the_language_model_of_several_parts_is_the_model_of_text_alone() {
    let text = folder("gemma3");
    let nested = tempfile::tempdir().unwrap();
    let read = |name: &str| std::fs::read(text.join(name)).unwrap();
    let config: serde_json::Value = serde_json::from_slice(&read("config.json")).unwrap();
    let config = serde_json::json!({
        "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": config, "vision_config": {},
    });
    std::fs::write(nested.path().join("config.json"), config.to_string()).unwrap();
    let weights = read("model.safetensors");
    let tensors = safetensors::SafeTensors::deserialize(&weights).unwrap().tensors().into_iter();
    let renamed = tensors.map(|(name, tensor)| (format!("language_model.{name}"), tensor));
    safetensors::serialize_to_file(renamed, None, &nested.path().join("model.safetensors")).unwrap();
    let nested = open(nested.path().to_str().unwrap(), None, 0).unwrap();
    let dtype = Dtype::F32;
    assert!(streamed(&nested, dtype).0 == streamed(&fixture("gemma3"), dtype).0);
}

#[test]
fn a_seed_streams_what_it_generates() {
    let architecture = small();
    for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
        let generated = crate::weights::synthetic::generate(
            &architecture.inventory(dtype),
            dtype,
            5,
            &Device::Cpu,
            &mut |_| {},
        )
        .unwrap();
        let mut streamed = HashMap::new();
        from_seed(&architecture, dtype, 5, &mut keep_in(&mut streamed)).unwrap();
        assert_eq!(streamed.len(), generated.len());
        for (name, tensor) in &generated {
            let wanted: Vec<f32> =
                tensor.flatten_all().unwrap().to_dtype(DType::F32).unwrap().to_vec1().unwrap();
            assert_eq!(streamed[name].values(), wanted, "{name} {dtype}");
        }
    }
}

#[test]
fn quantised_weights_are_packed_from_bf16_and_their_inventory_is_the_planned_one_but_for_vectors() {
    let architecture = small();
    let mut plain = HashMap::new();
    from_seed(&architecture, Dtype::Bf16, 5, &mut keep_in(&mut plain)).unwrap();
    let scaled = [Dtype::Int8, Dtype::Fp8, Dtype::Int4, Dtype::Mxfp8, Dtype::Mxfp4, Dtype::Nvfp4];
    for dtype in scaled.into_iter().chain([Dtype::Q8_0, Dtype::Q4_0]) {
        let mut packed = HashMap::new();
        let inventory = from_seed(&architecture, dtype, 5, &mut keep_in(&mut packed)).unwrap();
        let planned = architecture.inventory(dtype);
        assert_eq!(inventory.tensors.len(), planned.tensors.len());
        let mut accounted = 0;
        for (ours, planned) in inventory.tensors.iter().zip(&planned.tensors) {
            assert_eq!(
                (&ours.name, &ours.shape, ours.role, ours.layer),
                (&planned.name, &planned.shape, planned.role, planned.layer)
            );
            accounted += ours.bytes.0;
            if ours.shape.len() == 1 {
                assert_eq!((ours.storage.as_str(), ours.bytes.0), ("f32", ours.elements() * 4));
                continue;
            }
            assert_eq!(ours.storage, planned.storage, "{}", ours.name);
            let Some(StoredTensor::Matrix(matrix)) = packed.get(&ours.name) else { continue };
            let StoredTensor::Matrix(from) = &plain[&ours.name] else { panic!("{}", ours.name) };
            assert_eq!(matrix, &StoredMatrix::quantize(from, matrix.packing()), "{}", ours.name);
        }
        let held: u64 = packed
            .values()
            .map(|tensor| match tensor {
                StoredTensor::Matrix(matrix) => matrix.bytes().0,
                StoredTensor::Vector(values) => values.len() as u64 * 4,
            })
            .sum();
        assert_eq!(accounted, held, "{dtype}: every byte has one entry");
    }
}

#[test]
fn tables_of_int8_and_int4_stay_at_16_bits_and_those_of_q4_0_at_eight() {
    let architecture = small();
    let storages = |dtype| {
        let mut tensors = HashMap::new();
        from_seed(&architecture, dtype, 1, &mut keep_in(&mut tensors)).unwrap();
        ["model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.down_proj.weight"].map(|name| {
            match &tensors[name] {
                StoredTensor::Matrix(matrix) => matrix.storage(),
                StoredTensor::Vector(_) => "a vector",
            }
        })
    };
    assert_eq!(storages(Dtype::Int8), ["bf16", "bf16", "int8"]);
    assert_eq!(storages(Dtype::Int4), ["bf16", "bf16", "int4"]);
    assert_eq!(storages(Dtype::Q8_0), ["q8_0", "q8_0", "q8_0"]);
    assert_eq!(storages(Dtype::Q4_0), ["q8_0", "q8_0", "q4_0"]);
}

#[test]
fn a_folder_is_quantised_from_the_values_it_stores() {
    let model = fixture("llama-gqa");
    let (plain, _) = streamed(&model, Dtype::F32);
    let (packed, _) = streamed(&model, Dtype::Int8);
    let name = "model.layers.0.mlp.up_proj.weight";
    let (StoredTensor::Matrix(plain), StoredTensor::Matrix(packed)) = (&plain[name], &packed[name]) else {
        panic!("{name} is a matrix")
    };
    assert_eq!(packed, &StoredMatrix::quantize(plain, Packing::Int8));
}

#[test]
fn experts_that_are_stored_by_input_are_handed_over_by_output() {
    let model = fixture("gpt-oss");
    let checkpoint = Checkpoint::open(&folder("gpt-oss"), &model.architecture.inventory(Dtype::F32)).unwrap();
    let name = "model.layers.1.mlp.experts.gate_up_proj";
    let source = checkpoint.sources().find(|source| source.name() == name).unwrap();
    let &[count, input, out] = source.shape() else { panic!("{:?}", source.shape()) };
    assert_ne!(input, out);
    let stored = source.values::<f32>().unwrap();
    let (plain, _) = streamed(&model, Dtype::F32);
    let StoredTensor::Matrix(matrix) = &plain[name] else { panic!("{name}") };
    assert_eq!((matrix.rows, matrix.columns), (count * out, input));
    let values = plain[name].values();
    for (expert, row, column) in [(0, 0, 0), (0, 1, 0), (1, 5, 7), (count - 1, out - 1, input - 1)] {
        let wanted = stored[(expert * input + column) * out + row];
        assert_eq!(values[(expert * out + row) * input + column].to_bits(), wanted.to_bits());
    }
    for (dtype, packing) in [
        (Dtype::Q4_0, Packing::Q4_0),
        (Dtype::Mxfp4, Packing::Mxfp4),
        (Dtype::Nvfp4, Packing::Nvfp4),
        (Dtype::Mxfp8, Packing::Mxfp8),
    ] {
        let (packed, inventory) = streamed(&model, dtype);
        let StoredTensor::Matrix(packed) = &packed[name] else { panic!("{name}") };
        assert_eq!(packed, &StoredMatrix::quantize(matrix, packing));
        assert_eq!(inventory.tensors.len(), model.architecture.inventory(dtype).tensors.len());
    }
    assert!(
        matches!(&plain[&format!("{name}_bias")], StoredTensor::Vector(bias) if bias.len() == count * out)
    );
}

#[test]
fn blocks_of_mxfp4_are_read_as_they_are_stored() {
    let model = fixture("gpt-oss-mxfp4");
    assert_eq!((model.stored_dtype(), model.default_dtype(DeviceChoice::Cpu)), (Dtype::Mxfp4, Dtype::Mxfp4));
    let (tensors, inventory) = streamed(&model, Dtype::Mxfp4);
    let planned = model.architecture.inventory(Dtype::Mxfp4);
    for (ours, planned) in inventory.tensors.iter().zip(&planned.tensors) {
        assert_eq!((&ours.name, &ours.shape, ours.role), (&planned.name, &planned.shape, planned.role));
        let matrix = matches!(ours.role, Role::Expert | Role::ExpertScale);
        assert!(!matrix || ours.bytes == planned.bytes, "{}", ours.name);
    }
    let bytes = std::fs::read(folder("gpt-oss-mxfp4").join("model.safetensors")).unwrap();
    for (name, shape) in [("gate_up_proj", (4 * 64, 64)), ("down_proj", (4 * 64, 32))] {
        let name = format!("model.layers.0.mlp.experts.{name}_blocks");
        let StoredTensor::Matrix(matrix) = &tensors[&name] else { panic!("{name}") };
        assert_eq!((matrix.rows, matrix.columns), shape);
        let StoredData::Mxfp4 { nibbles, scales } = &matrix.data else { panic!("{matrix:?}") };
        for part in [nibbles, scales] {
            assert!(bytes.windows(part.len()).any(|window| window == part), "{name}");
        }
    }
}

#[test]
fn a_scale_that_is_no_number_and_blocks_of_another_type_are_refused() {
    const SCALES: &[u8] = b"model.layers.1.mlp.experts.down_proj_scales";
    let tampered = |change: &dyn Fn(&mut Vec<u8>)| {
        let copy = tempfile::tempdir().unwrap();
        let source = folder("gpt-oss-mxfp4");
        std::fs::copy(source.join("config.json"), copy.path().join("config.json")).unwrap();
        let mut bytes = std::fs::read(source.join("model.safetensors")).unwrap();
        change(&mut bytes);
        std::fs::write(copy.path().join("model.safetensors"), bytes).unwrap();
        let opened = open(copy.path().to_str().unwrap(), None, 0);
        let streamed = opened.and_then(|model| model.stream(Dtype::Mxfp4, &mut |_, _| Ok(())));
        streamed.unwrap_err().to_string()
    };
    let text = |bytes: &[u8], from: usize, text: &[u8]| {
        from + bytes[from..].windows(text.len()).position(|window| window == text).unwrap()
    };
    let error = tampered(&|bytes| {
        let at = text(bytes, text(bytes, 0, SCALES), b"data_offsets\":[") + "data_offsets\":[".len();
        let digits: String =
            bytes[at..].iter().map(|byte| char::from(*byte)).take_while(char::is_ascii_digit).collect();
        let header = usize::try_from(u64::from_le_bytes(*bytes.first_chunk().unwrap())).unwrap();
        bytes[8 + header + digits.parse::<usize>().unwrap() + 3] = 255;
    });
    assert!(error.contains("down_proj_scales") && error.contains("NaN"), "{error}");
    let error = tampered(&|bytes| {
        let at = text(bytes, text(bytes, 0, SCALES), b"\"U8\"");
        bytes[at + 1..at + 3].copy_from_slice(b"I8");
    });
    assert!(error.contains("down_proj_scales") && error.contains("I8"), "{error}");
    // As many bytes as floats would be numbers.
    let model = fixture("gpt-oss");
    let expected = model.architecture.inventory(Dtype::Bf16);
    let mut checkpoint = Checkpoint::open(&folder("gpt-oss"), &expected).unwrap();
    assert!(checkpoint.check_storage(Dtype::Mxfp4).is_ok());
    checkpoint.store_as("U8", "model.layers.0.mlp.experts.down_proj");
    let error = checkpoint.check_storage(Dtype::Mxfp4).unwrap_err().to_string();
    assert!(error.contains("experts.down_proj") && error.contains("U8"), "{error}");
}

/// The folders of quantised weights.
fn quantised_folders() -> Vec<PathBuf> {
    let all = std::fs::read_dir(folder("gpt-oss-mxfp4").parent().unwrap()).unwrap();
    all.map(|entry| entry.unwrap().path()).collect()
}

#[test]
fn every_quantised_layout_is_streamed_in_the_bytes_of_its_files() {
    for path in quantised_folders() {
        let spec = path.to_str().unwrap();
        let model = open(spec, None, 0).unwrap();
        let (tensors, inventory) = streamed(&model, model.stored_dtype());
        let in_files = crate::weights::open_shape(spec, None).unwrap().inventory(model.stored_dtype());
        for role in [Role::Matrix, Role::Expert, Role::Scale, Role::ExpertScale] {
            let bytes = |inventory: &Inventory| {
                let own = inventory.tensors.iter().filter(|tensor| tensor.role == role);
                own.map(|tensor| tensor.bytes.0).sum::<u64>()
            };
            assert_eq!(bytes(&inventory), bytes(&in_files), "{spec}: {role:?}");
        }
        let quantised = tensors.values().filter(|tensor| {
            matches!(tensor, StoredTensor::Matrix(matrix) if !matches!(matrix.storage(), "bf16" | "f16" | "f32"))
        });
        assert!(quantised.count() >= 4, "{spec}");
    }
}

/// Type, shape and bytes.
type Part = (safetensors::Dtype, Vec<usize>, Vec<u8>);
type Tensors = BTreeMap<String, Part>;

/// What streaming a copy of a quantised folder says whose tensors were changed.
fn changed(name: &str, change: impl Fn(&mut Tensors)) -> String {
    let copy = tempfile::tempdir().unwrap();
    let source = folder(name);
    std::fs::copy(source.join("config.json"), copy.path().join("config.json")).unwrap();
    let bytes = std::fs::read(source.join("model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors: Tensors = file
        .iter()
        .map(|(name, view)| (name.to_owned(), (view.dtype(), view.shape().to_vec(), view.data().to_vec())))
        .collect();
    change(&mut tensors);
    let views = tensors.iter().map(|(name, (dtype, shape, data))| {
        (name.clone(), safetensors::tensor::TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    let bytes = safetensors::serialize(views, None).unwrap();
    std::fs::write(copy.path().join("model.safetensors"), bytes).unwrap();
    let opened = open(copy.path().to_str().unwrap(), None, 0);
    let streamed = opened.and_then(|model| {
        let dtype = model.stored_dtype();
        model.stream(dtype, &mut |_, _| Ok(()))
    });
    streamed.map_or_else(|error| error.to_string(), |_| "streamed".to_owned())
}

#[test]
fn a_fixed_scale_of_inputs_may_be_there_or_not() {
    let layer = "model.layers.1.self_attn.o_proj";
    let more = changed("llama-nvfp4", |tensors| {
        let scale = (safetensors::Dtype::F32, vec![1], 1.0_f32.to_le_bytes().to_vec());
        tensors.insert(format!("{layer}.input_global_scale"), scale);
    });
    assert_eq!(more, "streamed");
    for name in ["qwen3-moe-nvfp4", "llama-fp8-tensor"] {
        let less =
            changed(name, |tensors| assert!(tensors.remove(&format!("{layer}.input_scale")).is_some()));
        assert_eq!(less, "streamed", "{name}");
    }
}

#[test]
fn parts_of_quantised_layers_that_do_not_fit_are_refused_by_name() {
    use safetensors::Dtype as Stored;
    const LAYER: &str = "model.layers.1.self_attn.o_proj";
    let part = |suffix: &str| format!("{LAYER}.{suffix}");
    let edit = |name: &str, suffix: &str, edit: &dyn Fn(&mut Part)| {
        let found = changed(name, |tensors| edit(tensors.get_mut(&part(suffix)).unwrap()));
        assert!(found.contains(&part(suffix)), "{name}, {suffix}: {found}");
        found
    };
    for (name, weights, scales) in [
        ("qwen3-fp8-block", "weight", "weight_scale_inv"),
        ("llama-fp8-tensor", "weight", "weight_scale"),
        ("llama-fp8-channel", "weight", "weight_scale"),
        ("llama-int8-channel", "weight", "weight_scale"),
        ("llama-int4-symmetric", "weight_packed", "weight_scale"),
        ("llama-int4-zeros", "weight_packed", "weight_zero_point"),
        ("qwen2-awq", "qweight", "qzeros"),
        ("qwen2-awq", "qweight", "scales"),
        ("llama-gptq", "qweight", "scales"),
        ("llama-mxfp4", "weight_packed", "weight_scale"),
        ("llama-nvfp4", "weight_packed", "weight_scale"),
        ("llama-nvfp4", "weight_packed", "weight_global_scale"),
        ("qwen3-moe-nvfp4", "weight", "weight_scale"),
        ("qwen3-moe-nvfp4", "weight", "weight_scale_2"),
        ("llama-mxfp8", "weight", "weight_scale"),
    ] {
        assert_eq!(changed(name, |_| ()), "streamed", "{name}");
        let missing = changed(name, |tensors| drop(tensors.remove(&part(scales))));
        assert!(missing.contains(&part(scales)) && missing.contains("has no tensor"), "{missing}");
        for suffix in [weights, scales] {
            // As many bytes in another type, and half of them in another shape.
            let other = edit(name, suffix, &|(dtype, shape, data)| {
                (*dtype, *shape) = (Stored::U16, vec![1, data.len() / 2]);
                data.truncate(data.len() / 2 * 2);
                if data.is_empty() {
                    (*shape, *data) = (vec![1], vec![0; 2]);
                }
            });
            assert!(other.contains("U16") || other.contains("shape"), "{name}, {suffix}: {other}");
            // Another type of the same size, and no more.
            let typed = edit(name, suffix, &|(dtype, ..)| {
                *dtype = match dtype {
                    Stored::F32 => Stored::U32,
                    Stored::I32 => Stored::F32,
                    Stored::BF16 | Stored::F16 => Stored::I16,
                    Stored::I8 => Stored::U8,
                    _ => Stored::I8,
                };
            });
            assert!(typed.contains("is stored as"), "{name}, {suffix}: {typed}");
            let shorter = edit(name, suffix, &|(_, shape, data)| {
                shape.insert(0, 2);
                data.extend_from_within(..);
            });
            assert!(shorter.contains("shape"), "{name}, {suffix}: {shorter}");
        }
    }
    for (name, suffix) in [
        ("qwen3-fp8-block", "weight"),
        ("llama-fp8-tensor", "weight"),
        ("llama-mxfp8", "weight"),
        ("llama-mxfp8", "weight_scale"),
        ("llama-mxfp4", "weight_scale"),
        ("llama-nvfp4", "weight_scale"),
    ] {
        let error = edit(name, suffix, &|(_, _, data)| data[77] = 0xff);
        assert!(error.contains("NaN"), "{error}");
    }
    let error = edit("qwen3-fp8-block", "weight_scale_inv", &|(_, _, data)| {
        data[..4].copy_from_slice(&f32::INFINITY.to_le_bytes());
    });
    assert!(error.contains("NaN or infinite"), "{error}");
    let error = edit("llama-int4-symmetric", "weight_scale", &|(_, _, data)| {
        data[..2].copy_from_slice(&bf16::from_f32(1e30).to_le_bytes());
    });
    assert!(error.contains("f16 cannot hold"), "{error}");
    let error = edit("llama-fp8-channel", "weight_scale", &|(_, _, data)| {
        data[..2].copy_from_slice(&bf16::from_f32(1e38).to_le_bytes());
    });
    assert!(error.contains("beyond 65504"), "{error}");
    // 2^16; and what is divided by, which files of other writers multiply with.
    let error = edit("llama-mxfp8", "weight_scale", &|(_, _, data)| data[1] = 143);
    assert!(error.contains("65536") && error.contains("beyond 65504"), "{error}");
    let error = edit("llama-nvfp4", "weight_global_scale", &|(_, _, data)| data.fill(0));
    assert!(error.contains("beyond 65504"), "{error}");
    let error = edit("qwen3-moe-nvfp4", "weight_scale_2", &|(_, _, data)| {
        data.copy_from_slice(&f32::NAN.to_le_bytes());
    });
    assert!(error.contains("NaN or infinite"), "{error}");
    // The dead inputs of a layer have scales below the least of f16.
    let dead = changed("llama-int4-symmetric", |tensors| {
        let (_, _, data) = tensors.get_mut(&part("weight_scale")).unwrap();
        data[..2].copy_from_slice(&bf16::from_f32(1e-9).to_le_bytes());
    });
    assert_eq!(dead, "streamed");
}

#[test]
fn scales_of_mxfp8_have_a_name_of_each_writer() {
    let own = streamed(&fixture("llama-mxfp8"), Dtype::Mxfp8).0;
    let copy = tempfile::tempdir().unwrap();
    let text = std::fs::read_to_string(folder("llama-mxfp8").join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
    config["quantization_config"] =
        serde_json::json!({"quant_method": "mxfp8", "ignored_layers": ["lm_head"]});
    std::fs::write(copy.path().join("config.json"), config.to_string()).unwrap();
    let bytes = std::fs::read(folder("llama-mxfp8").join("model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let renamed = file.iter().map(|(name, view)| (name.replace("weight_scale", "weight_scale_inv"), view));
    std::fs::write(copy.path().join("model.safetensors"), safetensors::serialize(renamed, None).unwrap())
        .unwrap();
    let model = open(copy.path().to_str().unwrap(), None, 0).unwrap();
    assert_eq!(streamed(&model, Dtype::Mxfp8).0, own);
}

#[test]
fn a_bias_of_gptq_that_the_model_lacks_is_zero_or_refused() {
    const BIAS: &str = "model.layers.0.mlp.down_proj.bias";
    let with = |name: &str, value: f32| {
        changed(name, |tensors| {
            let data = half::f16::from_f32(value).to_le_bytes().repeat(64);
            tensors.insert(BIAS.to_owned(), (safetensors::Dtype::F16, vec![64], data));
        })
    };
    assert_eq!(with("llama-gptq", 0.0), "streamed");
    for error in [with("llama-gptq", 0.5), with("llama-int4-zeros", 0.0)] {
        assert!(error.contains(BIAS) && error.contains("another layout"), "{error}");
    }
}

#[test]
fn rows_that_are_no_whole_groups_are_refused() {
    for (name, suffix, width) in [
        ("llama-mxfp4", "weight_packed", 80),
        ("llama-int4-symmetric", "weight_packed", 80),
        ("llama-nvfp4", "weight_packed", 72),
    ] {
        let copy = tempfile::tempdir().unwrap();
        std::fs::copy(folder(name).join("model.safetensors"), copy.path().join("model.safetensors")).unwrap();
        let text = std::fs::read_to_string(folder(name).join("config.json")).unwrap();
        let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
        // Rows of so many in one of the layers.
        config["intermediate_size"] = serde_json::json!(width);
        std::fs::write(copy.path().join("config.json"), config.to_string()).unwrap();
        let opened = open(copy.path().to_str().unwrap(), None, 0).unwrap();
        let error = opened.stream(opened.stored_dtype(), &mut |_, _| Ok(())).unwrap_err().to_string();
        assert!(error.contains(suffix), "{error}");
    }
}

#[test]
fn layouts_that_no_engine_has_are_refused_by_what_they_are() {
    use serde_json::json;
    let refused = |name: &str, keys: &[(&str, serde_json::Value)]| {
        let copy = tempfile::tempdir().unwrap();
        let text = std::fs::read_to_string(folder(name).join("config.json")).unwrap();
        let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
        for (key, value) in keys {
            config["quantization_config"][*key] = value.clone();
        }
        std::fs::write(copy.path().join("config.json"), config.to_string()).unwrap();
        std::fs::copy(folder(name).join("model.safetensors"), copy.path().join("model.safetensors")).unwrap();
        open(copy.path().to_str().unwrap(), None, 0).unwrap_err().to_string()
    };
    let quark = json!({"weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32}});
    for (name, keys, wanted) in [
        ("llama-gptq", &[("desc_act", json!(true))][..], "GPTQ with reordered inputs"),
        ("llama-gptq", &[("sym", json!(false))], "GPTQ with zeros"),
        ("llama-gptq", &[("group_size", json!(48))], "not a multiple of 32 inputs"),
        ("llama-gptq", &[("bits", json!(8))], "int8 of Gptq"),
        ("qwen2-awq", &[("zero_point", json!(false))], "int4 of Awq"),
        (
            "llama-nvfp4",
            &[("quant_method", json!("quark")), ("global_quant_config", quark)],
            "mxfp4 of Quark",
        ),
    ] {
        let error = refused(name, keys);
        assert!(error.contains(wanted) && error.contains("no engine"), "{name}: {error}");
    }
}

#[test]
fn gguf_streams_the_names_shapes_and_bytes_of_its_architecture() {
    for name in ["llama-q8_0.gguf", "qwen3-q8_0.gguf"] {
        let model = fixture(name);
        let (tensors, inventory) = streamed(&model, Dtype::Gguf);
        assert_eq!(inventory, model.architecture.inventory(Dtype::Gguf), "{name}");
        let shapes: BTreeMap<_, _> = tensors
            .iter()
            .map(|(name, tensor)| match tensor {
                StoredTensor::Matrix(m) => (name.as_str(), vec![m.rows, m.columns]),
                StoredTensor::Vector(v) => (name.as_str(), vec![v.len()]),
            })
            .collect();
        let expected: BTreeMap<_, _> =
            inventory.tensors.iter().map(|t| (t.name.as_str(), t.shape.clone())).collect();
        assert_eq!(shapes, expected, "{name}");
        assert!(matches!(
            &tensors["model.embed_tokens.weight"],
            StoredTensor::Matrix(StoredMatrix { data: StoredData::Q8_0 { .. }, .. })
        ));
    }
}

#[test]
fn what_cannot_be_streamed_is_refused_before_anything_is_handed_over() {
    let mut sink = |name: &str, _| panic!("{name} was handed over");
    let error = fixture("llama-gqa").stream(Dtype::Gguf, &mut sink).unwrap_err();
    assert!(matches!(error, OpenError::NotGguf { .. }), "{error}");
    let error = fixture("gpt-oss-mxfp4").stream(Dtype::F32, &mut sink).unwrap_err().to_string();
    assert!(error.contains("mxfp4"), "{error}");
    let error = fixture("llama-q8_0.gguf").stream(Dtype::Bf16, &mut sink).unwrap_err();
    assert!(matches!(error, OpenError::GgufDtype { .. }), "{error}");
}

#[test]
fn a_sink_that_fails_ends_the_stream_with_its_error() {
    let mut taken = 0;
    let mut sink = |_: &str, _| {
        taken += 1;
        if taken == 3 { Err(OpenError::NoTokenizer { name: "third".into() }) } else { Ok(()) }
    };
    let error = fixture("qwen3").stream(Dtype::Q4_0, &mut sink).unwrap_err().to_string();
    assert!(error.starts_with("third has no tokenizer"), "{error}");
    assert_eq!(taken, 3);
}

#[test]
fn matrices_are_turned_one_by_one() {
    for (matrices, input, out) in [(1, 1, 1), (5, 33, 65), (3, 64, 7), (2, 0, 4)] {
        let values: Vec<usize> = (0..matrices * input * out).collect();
        let turned = super::transposed(&values, matrices, input, out);
        assert_eq!(turned.len(), values.len());
        for (at, value) in turned.into_iter().enumerate() {
            let (matrix, row, column) = (at / (input * out), at / input % out, at % input);
            assert_eq!(value, matrix * input * out + column * out + row);
        }
    }
}
