#!/usr/bin/env python3
"""Write a random-weight Qwen checkpoint with a published model's true shapes.

    python make_checkpoint.py qwen3-0.6b OUT_DIR [--dtype bfloat16] [--layers N] [--vocab N] [--shard-mb 600] [--seed 0]

The folder looks like a hub snapshot: config.json, generation_config.json, (sharded) safetensors, and where
--tokenizer names a folder that has them, its tokenizer files.
Every parameter is random, norm weights and q/k/v biases included, so that a
swapped norm or a dropped bias shows. Needs torch and transformers.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

# hidden, intermediate, layers, heads, kv heads, head_dim, tied, vocab, max positions
SHAPES = {
    "qwen2.5-0.5b": (896, 4864, 24, 14, 2, 64, True, 151936, 32768),
    "qwen2.5-1.5b": (1536, 8960, 28, 12, 2, 128, True, 151936, 32768),
    "qwen2.5-3b": (2048, 11008, 36, 16, 2, 128, True, 151936, 32768),
    "qwen2.5-7b": (3584, 18944, 28, 28, 4, 128, False, 152064, 32768),
    "qwen3-0.6b": (1024, 3072, 28, 16, 8, 128, True, 151936, 40960),
    "qwen3-1.7b": (2048, 6144, 28, 16, 8, 128, True, 151936, 40960),
    "qwen3-4b": (2560, 9728, 36, 32, 8, 128, True, 151936, 40960),
    "qwen3-8b": (4096, 12288, 36, 32, 8, 128, False, 151936, 40960),
}


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("name", choices=SHAPES)
    ap.add_argument("out", type=Path)
    ap.add_argument("--dtype", default="bfloat16")
    ap.add_argument("--layers", type=int)
    ap.add_argument("--vocab", type=int)
    ap.add_argument("--shard-mb", type=int, default=5000)
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--tokenizer", type=Path, help="a folder with tokenizer.json and tokenizer_config.json to copy")
    a = ap.parse_args()
    hidden, inter, layers, heads, kv, hd, tied, vocab, maxpos = SHAPES[a.name]
    common = {
        "vocab_size": a.vocab or vocab,
        "hidden_size": hidden,
        "intermediate_size": inter,
        "num_hidden_layers": a.layers or layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "max_position_embeddings": maxpos,
        "rope_theta": 1e6,
        "tie_word_embeddings": tied,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "rms_norm_eps": 1e-6,
    }
    torch.manual_seed(a.seed)
    torch.set_default_dtype(getattr(torch, a.dtype))
    if a.name.startswith("qwen3"):
        model = Qwen3ForCausalLM(Qwen3Config(head_dim=hd, **common))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**common))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.copy_(1 + 0.2 * torch.randn_like(p))
            elif name.endswith("bias"):
                p.copy_(0.5 * torch.randn_like(p))
    model.generation_config.eos_token_id = None
    model.save_pretrained(a.out, max_shard_size=f"{a.shard_mb}MB")
    (a.out / "generation_config.json").write_text(
        json.dumps(
            {
                "bos_token_id": 151643,
                "eos_token_id": [151645, 151643],
                "pad_token_id": 151643,
                "do_sample": True,
                "temperature": 0.6,
                "top_k": 20,
                "top_p": 0.95,
            },
            indent=2,
        )
        + "\n"
    )
    if a.tokenizer:
        for f in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(a.tokenizer / f, a.out / f)
    print(a.out, sum(p.numel() for p in model.parameters()), "parameters")


if __name__ == "__main__":
    main()
