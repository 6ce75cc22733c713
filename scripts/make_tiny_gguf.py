#!/usr/bin/env python3
"""Writes a tiny model of random weights that llama.cpp serves: llama architecture, 32-bit floats, a vocabulary of bytes and a few words.

    python make_tiny_gguf.py OUT.gguf [--layers 2] [--width 64] [--heads 4] [--kv-heads 2] [--context 4096] [--seed 1]

Needs numpy and gguf. The same arguments give the same weights. What it says means nothing; it says it at a steady pace.
"""

import argparse

import gguf
import numpy as np

SPECIAL = ["<unk>", "<s>", "</s>"]
# Enough words for text to be shorter than its bytes, as with a real vocabulary.
WORDS = "the of and to in is that for it with as was on are be this have from or at by not but what all were when we".split()


def vocabulary():
    """Pieces with their scores and types, in the manner of SentencePiece."""
    types = gguf.TokenType
    pieces = [(SPECIAL[0], 0.0, types.UNKNOWN), (SPECIAL[1], 0.0, types.CONTROL), (SPECIAL[2], 0.0, types.CONTROL)]
    pieces += [(f"<0x{byte:02X}>", 0.0, types.BYTE) for byte in range(256)]
    # A word is put together of pieces that are in the vocabulary too, the better ones first.
    normal = {"\u2581"}
    for word in WORDS:
        text = "\u2581" + word
        normal.update(text[:end] for end in range(1, len(text) + 1))
    normal.update("abcdefghijklmnopqrstuvwxyz")
    ordered = sorted(normal, key=lambda piece: (-len(piece), piece))
    pieces += [(piece, -float(rank), types.NORMAL) for rank, piece in enumerate(ordered)]
    return pieces


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    pieces = vocabulary()
    head_dim = args.width // args.heads
    hidden = 4 * args.width
    random = np.random.default_rng(args.seed)

    def weights(rows, columns):
        return (random.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    writer = gguf.GGUFWriter(args.out, "llama")
    writer.add_name("tiny random llama")
    writer.add_context_length(args.context)
    writer.add_embedding_length(args.width)
    writer.add_block_count(args.layers)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(args.heads)
    writer.add_head_count_kv(args.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(len(pieces))
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([piece for piece, _, _ in pieces])
    writer.add_token_scores([score for _, score, _ in pieces])
    writer.add_token_types([kind for _, _, kind in pieces])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_chat_template(
        "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"
    )

    writer.add_tensor("token_embd.weight", weights(len(pieces), args.width))
    for layer in range(args.layers):
        name = f"blk.{layer}"
        ones = np.ones(args.width, dtype=np.float32)
        writer.add_tensor(f"{name}.attn_norm.weight", ones)
        writer.add_tensor(f"{name}.attn_q.weight", weights(args.heads * head_dim, args.width))
        writer.add_tensor(f"{name}.attn_k.weight", weights(args.kv_heads * head_dim, args.width))
        writer.add_tensor(f"{name}.attn_v.weight", weights(args.kv_heads * head_dim, args.width))
        writer.add_tensor(f"{name}.attn_output.weight", weights(args.width, args.heads * head_dim))
        writer.add_tensor(f"{name}.ffn_norm.weight", ones)
        writer.add_tensor(f"{name}.ffn_gate.weight", weights(hidden, args.width))
        writer.add_tensor(f"{name}.ffn_up.weight", weights(hidden, args.width))
        writer.add_tensor(f"{name}.ffn_down.weight", weights(args.width, hidden))
    writer.add_tensor("output_norm.weight", np.ones(args.width, dtype=np.float32))
    writer.add_tensor("output.weight", weights(len(pieces), args.width))

    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    print(f"{args.out}: {len(pieces)} tokens, {args.layers} layers of width {args.width}")


if __name__ == "__main__":
    main()
