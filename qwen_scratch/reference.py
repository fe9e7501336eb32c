"""The `transformers` model, used in exactly the ways that ours is, and observed under the same op names.

The only file of the package that imports `transformers`, which comes with the extra `test`.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qwen_scratch.errors import InputError
from qwen_scratch.observe import Observer, observe_modules


class Reference:
    """One model with its default attention (sdpa), and one cache that `feed` continues."""

    def __init__(
        self, folder: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        try:
            transformers: Any = import_module("transformers")
        except ImportError:
            raise InputError("the reference is not installed; pip install 'qwen_scratch[test]'") from None
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.version = transformers.__version__
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device)
        self.cache: Any = None

    @torch.inference_mode()
    def logits(self, ids: Tensor) -> Tensor:
        """[B, T] → [B, T, V], without a cache."""
        return self.model(ids, use_cache=False).logits

    @torch.inference_mode()
    def feed(self, ids: Tensor, last_only: bool = False) -> Tensor:
        """Continue on the warm cache: [B, T] → [B, T, V], or [B, 1, V]."""
        out = self.model(ids, cache=self.cache, use_cache=True, logits_to_keep=1 if last_only else 0)
        self.cache = out.cache
        return out.logits

    def truncate(self, n: int) -> None:
        """Forget everything from position n on."""
        surplus = self.cache.get_seq_length() - n
        if surplus > 0:
            self.cache.crop(-surplus)

    def generate(self, ids: list[int], new: int) -> list[int]:
        """Greedy, by the reference's own loop; the new ids only."""
        prompt = torch.tensor([ids], device=self.model.device)
        options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, "repetition_penalty": 1.0}
        out = self.model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        return out[0, len(ids) :].tolist()

    @contextmanager
    def observe(self, fn: Observer) -> Iterator[None]:
        """As `observe.observe`, for this model; rotation is a function there, and attention's mix is what o reads."""
        home: Any = sys.modules[type(self.model).__module__]
        rotate = home.apply_rotary_pos_emb
        layer = 0

        def rotate_and_tell(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            q, k = rotate(*args, **kwargs)
            fn("q_rope", layer, q)
            fn("k_rope", layer, k)
            return q, k

        def watch(n: int, attention: Any) -> list[Any]:
            def now_here(module: Any, args: Any) -> None:
                nonlocal layer
                layer = n

            def mixed(module: Any, args: Any) -> None:
                fn("attention", n, args[0])

            return [attention.register_forward_pre_hook(now_here), attention.o_proj.register_forward_pre_hook(mixed)]

        with observe_modules(self.model, fn), ExitStack() as undo:
            for n, block in enumerate(self.model.model.layers):
                for handle in watch(n, block.self_attn):
                    undo.callback(handle.remove)
            home.apply_rotary_pos_emb = rotate_and_tell
            undo.callback(setattr, home, "apply_rotary_pos_emb", rotate)
            yield
