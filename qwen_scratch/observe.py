"""Every intermediate tensor of a forward, by name, without a line of it in the model itself.

Module outputs are taken with forward hooks, and Attention's two methods are wrapped; both are undone at the end.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from qwen_scratch.model import Attention, Qwen

# In the order in which a forward makes them. Those between "input_norm" and "residual_2" come once per layer.
OPS = {
    "embedding": "[B, T, D] of the token ids",
    "input_norm": "[B, T, D] what attention reads",
    "q": "[B, T, H * hd] query projection, with its bias where there is one",
    "k": "[B, T, K * hd] key projection",
    "v": "[B, T, K * hd] value projection",
    "q_norm": "[B, T, H, hd] queries after their norm (Qwen3)",
    "k_norm": "[B, T, K, hd] keys after their norm (Qwen3)",
    "q_rope": "[B, H, T, hd] queries turned to their positions",
    "k_rope": "[B, K, T, hd] keys turned to their positions, as they are cached",
    "attention": "[B, T, H * hd] the mix of values",
    "o": "[B, T, D] output projection",
    "residual_1": "[B, T, D] the stream after attention",
    "post_norm": "[B, T, D] what the MLP reads",
    "gate": "[B, T, F] gate projection, before SiLU",
    "up": "[B, T, F] up projection",
    "gate_up": "[B, T, F] SiLU(gate) * up",
    "down": "[B, T, D] down projection",
    "residual_2": "[B, T, D] the stream after the MLP: the layer's output",
    "final_norm": "[B, T, D]",
    "logits": "[B, T, V] or [B, 1, V]",
}

Observer = Callable[[str, int | None, Tensor], None]  # (op, layer or None, tensor)


@contextmanager
def observe(model: Qwen, fn: Observer) -> Iterator[None]:
    """While open, call `fn(op, layer, tensor)` for each op of each forward, in the order of `OPS`."""
    with observe_modules(model, fn), ExitStack() as undo:
        for layer, block in enumerate(model.model.layers):
            attention: Any = block.self_attn
            for name in ("project", "attend"):
                setattr(attention, name, watched(attention, name, layer, fn))
                undo.callback(delattr, attention, name)  # the class's own method shows again
        yield


def watched(attention: Attention, name: str, layer: int, fn: Observer) -> Callable[..., Any]:
    """Attention.project or .attend, telling `fn` what it returned."""
    method = getattr(attention, name)

    def project(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = method(*args)
        fn("q_rope", layer, q)
        fn("k_rope", layer, k)
        return q, k, v

    def attend(*args: Any) -> Tensor:
        mix: Tensor = method(*args)
        fn("attention", layer, mix)
        return mix

    return project if name == "project" else attend


@contextmanager
def observe_modules(model: nn.Module, fn: Observer) -> Iterator[None]:
    """The ops that are some module's input or output. Works on any model with the checkpoint's module names."""
    with ExitStack() as undo:

        def output(module: Any, op: str, layer: int | None = None) -> None:
            def hook(module: Any, args: Any, out: Tensor) -> None:  # what a hook returns would replace the tensor
                fn(op, layer, out)

            undo.callback(module.register_forward_hook(hook).remove)

        def entry(module: Any, op: str, layer: int | None = None) -> None:
            def hook(module: Any, args: Any) -> None:
                fn(op, layer, args[0])

            undo.callback(module.register_forward_pre_hook(hook).remove)

        root: Any = model
        output(root.model.embed_tokens, "embedding")
        for layer, block in enumerate(root.model.layers):
            output(block.input_layernorm, "input_norm", layer)
            for name in ("q", "k", "v", "o"):
                output(getattr(block.self_attn, f"{name}_proj"), name, layer)
            for name in ("q_norm", "k_norm"):
                norm = getattr(block.self_attn, name, None)
                if norm is not None and not isinstance(norm, nn.Identity):
                    output(norm, name, layer)
            entry(block.post_attention_layernorm, "residual_1", layer)
            output(block.post_attention_layernorm, "post_norm", layer)
            output(block.mlp.gate_proj, "gate", layer)
            output(block.mlp.up_proj, "up", layer)
            entry(block.mlp.down_proj, "gate_up", layer)
            output(block.mlp.down_proj, "down", layer)
            output(block, "residual_2", layer)
        output(root.model.norm, "final_norm")
        output(root.lm_head, "logits")
        yield
