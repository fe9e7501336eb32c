#!/usr/bin/env python3
"""Are a checkpoint's logits equal to transformers', to the last bit? Prompt of 77 random tokens, then 8 decode steps.

    python scripts/compare_logits.py FOLDER [--dtype float32 bfloat16]

Exit code 1 where a single bit differs.
"""

import argparse
import sys
import time

import torch
import transformers

import qwen_scratch


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    equal = True
    for name in args.dtype:
        dtype = getattr(torch, name)
        start = time.perf_counter()
        ours = qwen_scratch.load_model(args.folder, device="cpu", dtype=dtype, exact=True)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(args.folder, dtype=dtype).eval()
        ids = torch.randint(0, ours.config.vocab_size, (1, 77), generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            prompt = torch.equal(ours(ids), theirs(ids, use_cache=False).logits)
            cache = qwen_scratch.KVCache(ours.config, 1, 85, dtype=dtype)
            logits = ours(ids, cache=cache, last_only=True)
            out = theirs(ids, use_cache=True, logits_to_keep=1)
            decode = [torch.equal(logits, out.logits)]
            for _ in range(8):
                token = logits.argmax(-1)
                logits = ours(token, cache=cache)
                out = theirs(token, cache=out.cache, use_cache=True)
                decode.append(torch.equal(logits, out.logits))
        print(
            f"{args.folder} {name}: all positions of the prompt equal: {prompt}; "
            f"equal decode steps: {sum(decode)} of {len(decode)} ({time.perf_counter() - start:.0f} s)"
        )
        equal = equal and prompt and all(decode)
        del ours, theirs
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
