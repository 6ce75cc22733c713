"""Makes tests/fixtures/tokenizers/bytes.json: a byte-level tokenizer of all 256 bytes, a few longer tokens and an end.

Small enough for random models of a few hundred logits, whole enough that any text can be generated. Needs nothing but Python 3.
"""

import json
import pathlib

FILE = pathlib.Path(__file__).resolve().parent.parent / "tests/fixtures/tokenizers/bytes.json"


def main():
    # Byte-level tokenizers write bytes that cannot be seen as characters from 256 on.
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = {byte: chr(0x100 + i) for i, byte in enumerate(b for b in range(256) if b not in seen)}
    names = [moved.get(byte, chr(byte)) for byte in range(256)]
    names += ['{"', '":', "true", "null", "10", "ab"]
    options = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    end = {"id": len(names), "content": "<|endoftext|>", "special": True}
    end |= {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end],
        "normalizer": None,
        "pre_tokenizer": options,
        "post_processor": None,
        "decoder": options,
        "model": {"type": "BPE", "vocab": {name: i for i, name in enumerate(names)}, "merges": []},
    }
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text(json.dumps(document, ensure_ascii=True, indent=0) + "\n")


if __name__ == "__main__":
    main()
