"""The files of the demo checkpoint, in the forms in which a hub has them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from demo_data import TEXT_END, TURN_END, examples
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from qwen_scratch.model import Qwen

SPECIAL = [TEXT_END, "<|im_start|>", TURN_END]
NOT_SPECIAL = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
# Qwen's: every digit is a token of its own, which is what makes written arithmetic possible.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TOKENIZER_TEXTS = (-1, 20000)  # a step before the first, and how many examples
TEMPLATE = r"""{#- Turns as in Qwen3. Only answers behind the last question keep their thinking. #}
{%- if tools %}
    {{- raise_exception('this model has not learned to call tools') }}
{%- endif %}
{%- set last = namespace(question=-1) %}
{%- for message in messages if message.role == 'user' %}
    {%- set last.question = messages.index(message) %}
{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' ~ message.role ~ '\n' }}
    {%- if message.role != 'assistant' %}
        {{- message.content }}
    {%- else %}
        {%- set parts = message.content.split('</think>') %}
        {%- if loop.index0 > last.question %}
            {%- set written = parts[0].split('<think>')[-1] if parts | length > 1 else '' %}
            {%- set thought = message.reasoning_content | default(written, true) %}
            {{- '<think>\n' ~ thought.strip('\n') ~ '\n</think>\n\n' }}
        {%- endif %}
        {{- parts[-1].lstrip('\n') }}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""


def train_tokenizer(seed: int, vocab_size: int) -> Tokenizer:
    """Byte-level BPE as Qwen has it, with the added tokens behind all others."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)

    def texts() -> Iterator[str]:
        for example in examples(seed, *TOKENIZER_TEXTS):
            # Turn marks, or the merges would learn them as text.
            text = example.text.replace("<think>\n", "").replace("</think>\n\n", "")
            yield text.removesuffix(TURN_END).removesuffix(TEXT_END)
        yield "user\nassistant\nsystem\n" * 100

    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL) - len(NOT_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.add_tokens([AddedToken(piece, special=True, normalized=False) for piece in SPECIAL])
    tokenizer.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in NOT_SPECIAL])
    return tokenizer


def write_small_files(folder: Path, tokenizer: Tokenizer, sizes: dict[str, int]) -> dict[str, Any]:
    """All but the weights; returns what config.json says."""
    ids = {piece: tokenizer.token_to_id(piece) for piece in SPECIAL + NOT_SPECIAL}
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": ids[TEXT_END],
        "eos_token_id": ids[TURN_END],
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 1024,
        "model_type": "qwen3",
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": tokenizer.get_vocab_size(),
    }
    config = dict(sorted((config | sizes).items()))
    generation = {
        "bos_token_id": ids[TEXT_END],
        "do_sample": False,
        "eos_token_id": [ids[TURN_END], ids[TEXT_END]],
        "pad_token_id": ids[TEXT_END],
    }
    as_text = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    settings = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(n): {"content": piece, **as_text, "special": piece in SPECIAL} for piece, n in ids.items()
        },
        "additional_special_tokens": ["<|im_start|>", TURN_END],
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": TURN_END,
        "errors": "replace",
        "model_max_length": config["max_position_embeddings"],
        "pad_token": TEXT_END,
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    files = {"config.json": config, "generation_config.json": generation, "tokenizer_config.json": settings}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return config


def write_weights(folder: Path, model: Qwen, shards: int = 2) -> None:
    """Shards of about equal size, and their index. The tied head is stored once, as the embedding."""
    tensors = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    total = sum(tensor.nbytes for tensor in tensors.values())
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(shards)]
    done = 0
    for name, tensor in tensors.items():
        parts[done * shards // total][name] = tensor
        done += tensor.nbytes
    index: dict[str, Any] = {"metadata": {"total_size": total}, "weight_map": {}}
    for n, part in enumerate(parts, 1):
        file = f"model-{n:05}-of-{shards:05}.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        index["weight_map"] |= dict.fromkeys(part, file)
    index["weight_map"] = dict(sorted(index["weight_map"].items()))
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
