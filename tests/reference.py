"""The `transformers` model, asked in exactly the ways that ours is."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM


class Reference:
    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self.cache = None

    @torch.inference_mode()
    def logits(self, ids: Tensor) -> Tensor:
        """All positions, no cache."""
        return self.model(ids, use_cache=False).logits

    @torch.inference_mode()
    def feed(self, ids: Tensor, last_only: bool = False) -> Tensor:
        """Continue on the warm cache."""
        out = self.model(ids, cache=self.cache, use_cache=True, logits_to_keep=1 if last_only else 0)
        self.cache = out.cache
        return out.logits

    def generate(self, ids: list[int], new: int) -> list[int]:
        """Greedy, by the reference's own loop; the new ids only."""
        prompt = torch.tensor([ids])
        out = self.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, do_sample=False, pad_token_id=0
        )
        return out[0, len(ids) :].tolist()
