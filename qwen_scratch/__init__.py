"""Qwen2.5 and Qwen3 from scratch in plain PyTorch. The README shows the way in; the model is in model.py.

Names are imported when they are first used: the commands answer `--help` and wrong options without waiting for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from qwen_scratch.errors import InputError

if TYPE_CHECKING:
    from qwen_scratch.cache import KVCache
    from qwen_scratch.completion import Completion, Event, Stream, complete, complete_batch, stream
    from qwen_scratch.config import QwenConfig
    from qwen_scratch.conversation import Conversation
    from qwen_scratch.loading import load, load_model
    from qwen_scratch.model import Qwen
    from qwen_scratch.sampling import SamplingParams
    from qwen_scratch.text import Tokenizer

__all__ = [
    "Completion", "Conversation", "Event", "InputError", "KVCache", "Qwen", "QwenConfig", "SamplingParams", "Stream", "Tokenizer",
    "complete", "complete_batch", "load", "load_model", "stream",
]  # fmt: skip

_ROOMS = {
    "cache": ["KVCache"],
    "completion": ["Completion", "Event", "Stream", "complete", "complete_batch", "stream"],
    "config": ["QwenConfig"],
    "conversation": ["Conversation"],
    "loading": ["load", "load_model"],
    "model": ["Qwen"],
    "sampling": ["SamplingParams"],
    "text": ["Tokenizer"],
}


def __getattr__(name: str) -> Any:
    for room, names in _ROOMS.items():
        if name in names:
            value = getattr(import_module(f"qwen_scratch.{room}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'qwen_scratch' has no attribute {name!r}")
