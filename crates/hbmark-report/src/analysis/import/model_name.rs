//! What the name of a model says: its families, its version, its size and how its weights are stored.
//!
//! Enters: the name that a file gives its model, and the model that a person named. Leaves: whether both can be the same run. Owner, case,
//! tuning (`-Instruct`, `-Chat`) and dates do not count; a distilled model has two families, of which one is enough.

use hbmark_core::model::{Architecture, Dtype, Family};

/// Words of names and nothing else: a name with none of them says no family.
const FAMILIES: &str = "llama tinyllama smollm mistral ministral codestral mixtral qwen qwq deepseek gemma phi opt gpt \
    falcon granite glm chatglm kimi minimax nemotron bloom mpt yi olmo olmoe starcoder command exaone \
    internlm baichuan dbrx grok jamba mamba pythia stablelm";
/// A size in a name over the parameters of a shape: names round, and count a mixture's shared layers once for each expert.
const SIZE_OVER_PARAMETERS: std::ops::RangeInclusive<f64> = 0.7..=1.35;

/// How a name says its weights are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NamedStorage {
    Known(Dtype),
    /// In a format whose bytes are not counted here.
    Unknown(&'static str),
}

/// The parts of a name.
#[derive(Debug, Default, PartialEq)]
struct ModelName {
    families: Vec<&'static str>,
    version: Option<f64>,
    /// Parameters as the name counts them.
    size: Option<f64>,
    /// Experts of a layer: `16E`, beside which Llama 4 counts the parameters of a token (`17B`).
    experts: Option<usize>,
}

/// How the model of a file and the one that was given go together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Agreement {
    Same,
    /// They may be one; with what that rests on.
    Taken(String),
    /// With what they differ in.
    Differs(&'static str),
}

/// Compares names first, and the shape where the name of what was given says nothing.
pub(super) fn compare(file: &str, given: &str, shape: &Architecture) -> Agreement {
    if plain(file) == plain(given) {
        return Agreement::Same;
    }
    let (theirs, ours) = (ModelName::parse(file), ModelName::parse(given));
    let families = if ours.families.is_empty() { families_of(shape.family) } else { &ours.families };
    if !theirs.families.is_empty() && !theirs.families.iter().any(|family| families.contains(family)) {
        return Agreement::Differs("family");
    }
    let of_shape = shape.experts.as_ref().map(|experts| experts.count);
    // Of a dense shape the letter is something else's, such as epochs'.
    let by_experts = theirs.experts.filter(|_| of_shape.is_some());
    if by_experts.is_some() && by_experts != of_shape {
        return Agreement::Differs("number of experts");
    }
    match (theirs.size, ours.size) {
        _ if by_experts.is_some() => {}
        (Some(theirs), Some(ours)) if (theirs / ours - 1.0).abs() > 1e-9 => {
            return Agreement::Differs("size");
        }
        (Some(theirs), None) => {
            let parameters = shape.inventory(Dtype::Bf16).parameters() as f64;
            if !SIZE_OVER_PARAMETERS.contains(&(theirs / parameters)) {
                return Agreement::Differs("size");
            }
        }
        _ => {}
    }
    if let (Some(theirs), Some(ours)) = (theirs.version, ours.version)
        && theirs.floor().total_cmp(&ours.floor()).is_ne()
    {
        return Agreement::Differs("version");
    }
    let compared = match (theirs.families.is_empty(), theirs.size) {
        (false, _) if by_experts.is_some() => "the same family and number of experts",
        (true, None) => "its name says neither family nor size",
        (true, Some(_)) => "compared by size; its name says no family",
        (false, None) => "compared by family; its name says no size",
        (false, Some(_)) => "the same family and size",
    };
    Agreement::Taken(format!("the file's model `{file}` is taken for {given}: {compared}"))
}

impl ModelName {
    fn parse(name: &str) -> Self {
        let mut parsed = Self::default();
        // A version is a number right after a family, or one with a v.
        let mut after_family = false;
        for token in tokens(name) {
            let digits = token.find(|c: char| c.is_ascii_digit()).unwrap_or(token.len());
            let (word, number) = token.split_at(digits);
            let known = FAMILIES.split(' ').find(|family| *family == word);
            if let Some(family) = known {
                parsed.families.push(family);
            }
            if let Some(size) = size_of(&token) {
                parsed.size = parsed.size.or(Some(size));
                after_family = false;
                continue;
            }
            // llama.cpp writes `17Bx16E`.
            let experts = token.strip_suffix('e').and_then(|rest| rest.rsplit('x').next());
            parsed.experts = parsed.experts.or(experts.and_then(|digits| digits.parse().ok()));
            let is_version = known.is_some() || word == "v" || (word.is_empty() && after_family);
            if let Ok(version) = number.parse::<f64>()
                && is_version
                && version < 100.0
            {
                parsed.version = parsed.version.or(Some(version));
            }
            after_family = known.is_some() && number.is_empty();
        }
        parsed
    }
}

/// `8b`, `0.5b`, `125m`, `8x7b`; of `30b.a3b` all of it, not the active part.
fn size_of(token: &str) -> Option<f64> {
    let token = token.split_once(".a").map_or(token, |(whole, _)| whole);
    let unit = match token.chars().last()? {
        'm' => 1e6,
        'b' => 1e9,
        't' => 1e12,
        _ => return None,
    };
    let number = &token[..token.len() - 1];
    let (experts, each) = number.split_once('x').unwrap_or(("1", number));
    let (experts, each): (f64, f64) = (experts.parse().ok()?, each.parse().ok()?);
    (experts > 0.0 && each > 0.0).then_some(experts * each * unit)
}

/// The storage that a name ends with, such as `-FP8`, `-AWQ`, `-GPTQ-Int4` or `.w4a16`.
pub(super) fn storage(name: &str) -> Option<NamedStorage> {
    use NamedStorage::{Known, Unknown};
    let words: Vec<String> =
        tokens(name).flat_map(|t| t.split('.').map(str::to_owned).collect::<Vec<_>>()).collect();
    let has = |wanted: &[&str]| words.iter().any(|word| wanted.contains(&word.as_str()));
    let follows =
        |first: &str, second: &str| words.windows(2).any(|pair| pair[0] == first && pair[1] == second);
    let eight_bits = has(&["int8", "8bit", "w8a16", "w8a8", "8bits"]);
    Some(match () {
        () if has(&["nvfp4"]) => Known(Dtype::Nvfp4),
        () if has(&["mxfp4"]) => Known(Dtype::Mxfp4),
        () if has(&["mxfp8"]) => Known(Dtype::Mxfp8),
        () if has(&["fp4"]) => Unknown("4-bit floats"),
        () if has(&["int3", "3bit", "int2", "2bit", "aqlm", "hqq"]) => {
            Unknown("fewer than four bits, or a codebook")
        }
        () if has(&["fp8", "float8", "f8"]) => Known(Dtype::Fp8),
        () if follows("q8", "0") => Known(Dtype::Q8_0),
        () if follows("q4", "0") => Known(Dtype::Q4_0),
        () if has(&["gguf", "q2", "q3", "q4", "q5", "q6", "q8", "iq1", "iq2", "iq3", "iq4"]) => {
            Known(Dtype::Gguf)
        }
        () if eight_bits => Known(Dtype::Int8),
        () if has(&["awq", "gptq", "int4", "4bit", "4bits", "w4a16", "w4a8", "bnb", "nf4"]) => {
            Known(Dtype::Int4)
        }
        () if has(&["bf16", "bfloat16"]) => Known(Dtype::Bf16),
        () if has(&["fp16", "f16", "float16"]) => Known(Dtype::F16),
        () => return None,
    })
}

/// The words of a name without its owner and its folder, in lower case.
fn tokens(name: &str) -> impl Iterator<Item = String> {
    let last = name.trim_end_matches('/').rsplit('/').next().unwrap_or(name).to_lowercase();
    let words: Vec<String> = last
        .split(['-', '_', ' ', ':', '(', ')', ','])
        .filter(|t| !t.is_empty())
        .map(str::to_owned)
        .collect();
    words.into_iter()
}

/// Words for what a model was trained further for: its shape stays.
const TUNINGS: [&str; 3] = ["instruct", "chat", "it"];

/// A name as its owner wrote it, without the tuning at its end: `Llama-3.1-8B` of `meta-llama/Llama-3.1-8B-Instruct`.
pub(super) fn without_tuning(name: &str) -> &str {
    let own = name.rsplit('/').next().unwrap_or(name);
    let tuned = |end: &str| TUNINGS.iter().any(|tuning| tuning.eq_ignore_ascii_case(end));
    own.rsplit_once('-').filter(|(_, end)| tuned(end)).map_or(own, |(shape, _)| shape)
}

/// Letters and digits without owner, tuning and storage.
fn plain(name: &str) -> Vec<String> {
    tokens(name)
        .filter(|t| !TUNINGS.contains(&t.as_str()) && !matches!(t.as_str(), "hf" | "base" | "meta"))
        .collect()
}

/// Names under which models of a family of shapes are published.
fn families_of(family: Family) -> &'static [&'static str] {
    match family {
        Family::Llama => &["llama", "tinyllama", "smollm", "yi", "deepseek", "granite"],
        Family::Smollm3 => &["smollm"],
        Family::Granite => &["granite"],
        Family::Olmo2 => &["olmo"],
        Family::Mistral => &["mistral", "ministral", "codestral"],
        Family::Qwen2
        | Family::Qwen2Moe
        | Family::Qwen3
        | Family::Qwen3Moe
        | Family::Qwen3_5
        | Family::Qwen3Next => &["qwen", "qwq"],
        Family::Mixtral => &["mixtral"],
        Family::DeepseekV3 => &["deepseek", "kimi", "glm"],
        Family::GptOss => &["gpt"],
        Family::Gemma2 | Family::Gemma3 | Family::Gemma4 => &["gemma"],
        Family::Glm4 | Family::Glm4Moe => &["glm"],
        Family::MinimaxM2 => &["minimax"],
        Family::NemotronH => &["nemotron"],
        Family::Llama4 => &["llama"],
        Family::Phi3 => &["phi"],
        Family::MimoV2 => &["mimo"],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hbmark_core::model::test_shapes as shapes;

    #[test]
    fn names_of_one_shape_agree_whatever_their_owner_tuning_and_release() {
        let shape = shapes::llama_3_1_8b();
        let with = |file: &str| compare(file, "Llama-3.1-8B", &shape);
        for same in ["meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Meta-Llama-3.1-8B", "llama-3.1-8b"] {
            assert_eq!(with(same), Agreement::Same, "{same}");
        }
        for taken in [
            "neuralmagic/Meta-Llama-3.1-8B-Instruct-FP8",
            "meta-llama/Meta-Llama-3-8B-Instruct",
            "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
            "llama 8B Q4_K - Medium",
            "my-finetune",
        ] {
            assert!(matches!(with(taken), Agreement::Taken(_)), "{taken}: {:?}", with(taken));
        }
    }

    #[test]
    fn another_family_size_or_version_is_another_model() {
        let shape = shapes::llama_3_1_8b();
        for (file, what) in [
            ("facebook/opt-125m", "family"),
            ("openai/gpt-oss-120b", "family"),
            ("deepseek-ai/DeepSeek-V2.5", "family"),
            ("Qwen/Qwen3-8B", "family"),
            ("meta-llama/Llama-3.3-70B-Instruct", "size"),
            ("meta-llama/Llama-2-7b-hf", "size"),
            ("custom-llama-2-8B", "version"),
        ] {
            assert_eq!(compare(file, "Llama-3.1-8B", &shape), Agreement::Differs(what), "{file}");
        }
        let deepseek = shapes::deepseek_v3();
        assert_eq!(
            compare("deepseek-ai/DeepSeek-V2.5", "DeepSeek-V3", &deepseek),
            Agreement::Differs("version")
        );
        assert!(matches!(compare("deepseek-ai/DeepSeek-R1", "DeepSeek-V3", &deepseek), Agreement::Taken(_)));
        assert!(matches!(
            compare("mistralai/Mixtral-8x7B-Instruct-v0.1", "Mixtral-8x7B", &shapes::mixtral_8x7b()),
            Agreement::Taken(_)
        ));
    }

    #[test]
    fn a_folder_without_a_telling_name_is_compared_by_its_shape() {
        let shape = shapes::llama_3_1_8b();
        let with = |file: &str| compare(file, "5206a32", &shape);
        assert_eq!(with("meta-llama/Llama-3.1-70B"), Agreement::Differs("size"));
        assert_eq!(with("Qwen/Qwen2.5-7B"), Agreement::Differs("family"));
        assert!(matches!(with("meta-llama/Llama-3.1-8B"), Agreement::Taken(_)));
        assert_eq!(ModelName::parse("qwen3moe 30B.A3B Q8_0").size, Some(30e9));
    }

    #[test]
    fn llama_4_is_told_by_its_experts_and_not_by_the_parameters_of_a_token() {
        let scout = hbmark_core::model::presets::find("Llama-4-Scout-17B-16E").unwrap().architecture;
        for given in ["5206a32", "Llama-4-Scout-17B-16E", "Llama-4-Scout-109B"] {
            let with = |file: &str| compare(file, given, &scout);
            for same in
                ["meta-llama/Llama-4-Scout-17B-16E-Instruct-FP8", "llama4 17Bx16E (Scout) Q4_K - Medium"]
            {
                assert!(matches!(with(same), Agreement::Taken(_)), "{given}: {:?}", with(same));
            }
            for other in
                ["meta-llama/Llama-4-Maverick-17B-128E-Instruct", "llama4 17Bx128E (Maverick) Q4_K - Medium"]
            {
                assert_eq!(with(other), Agreement::Differs("number of experts"), "{given}");
            }
        }
        // Three epochs.
        let dense = shapes::llama_3_1_8b();
        assert!(matches!(compare("my-llama-8b-3e", "Llama-3.1-8B", &dense), Agreement::Taken(_)));
        assert_eq!(compare("my-llama-70b-3e", "Llama-3.1-8B", &dense), Agreement::Differs("size"));
    }

    #[test]
    fn the_storage_is_read_from_the_end_of_a_name() {
        use NamedStorage::{Known, Unknown};
        for (name, wanted) in [
            ("neuralmagic/Meta-Llama-3.1-8B-Instruct-FP8", Some(Known(Dtype::Fp8))),
            ("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", Some(Known(Dtype::Fp8))),
            ("Qwen/Qwen2.5-7B-Instruct-AWQ", Some(Known(Dtype::Int4))),
            ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", Some(Known(Dtype::Int4))),
            ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8", Some(Known(Dtype::Int8))),
            ("neuralmagic/Meta-Llama-3.1-8B-Instruct-quantized.w4a16", Some(Known(Dtype::Int4))),
            ("neuralmagic/Meta-Llama-3.1-8B-Instruct-quantized.w8a8", Some(Known(Dtype::Int8))),
            ("nvidia/Llama-3.1-8B-Instruct-NVFP4", Some(Known(Dtype::Nvfp4))),
            ("amd/Llama-3.1-8B-Instruct-MXFP4", Some(Known(Dtype::Mxfp4))),
            ("Llama-3.1-8B-Instruct-FP4", Some(Unknown("4-bit floats"))),
            ("llama-3.2-3b-instruct-q8_0.gguf", Some(Known(Dtype::Q8_0))),
            ("meta-llama/Llama-3.1-8B-Instruct", None),
            ("openai/gpt-oss-120b", None),
        ] {
            assert_eq!(storage(name), wanted, "{name}");
        }
    }
}
