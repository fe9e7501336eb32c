"""Small real checkpoints for the tests: every parameter random, norms and biases included."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

FAMILIES = ("qwen2", "qwen3")

# A template with Qwen's turns and its thinking switch; Qwen2.5's default system turn is in the second one.
TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
TEMPLATE_WITH_DEFAULT_SYSTEM = (
    "{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{%- endif %}"
    + TEMPLATE
)

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
NOT_SPECIAL = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = [
    "the cat sat on the mat and the dog ran to the cat " * 20,
    "naïve 漢字 ไทย 12345 def f(x):\n    return x\n" * 20,
]


def tiny_config(family: str, **changes) -> Qwen2Config | Qwen3Config:
    sizes = {
        "vocab_size": 160,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": None,
    }
    if family == "qwen3":
        return Qwen3Config(**{"head_dim": 32} | sizes | changes)  # 4 * 32 != 48
    return Qwen2Config(**sizes | changes)


def randomize(model: PreTrainedModel, seed: int = 0, scale: float = 0.25) -> PreTrainedModel:
    """Every parameter random and of a size that matters, so that a swapped norm or a dropped bias shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                noise = 1 + 0.3 * noise
            elif name.endswith("bias"):
                noise = 0.7 * noise
            else:
                noise = scale * noise if parameter.shape[-1] < 512 else 0.03 * noise
            parameter.copy_(noise)
    return model


def save_tiny(
    folder: Path, family: str, dtype: torch.dtype = torch.float32, seed: int = 0, shard="5GB", **changes
) -> Path:
    cls = Qwen3ForCausalLM if family == "qwen3" else Qwen2ForCausalLM
    model = randomize(cls(tiny_config(family, **changes)), seed).to(dtype)
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


def save_tokenizer(folder: Path, template: str | None = TEMPLATE, vocab: int = 300, **settings) -> Tokenizer:
    """A byte-level BPE with Qwen's pattern and added tokens, trained on a few sentences."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(piece, special=True, normalized=False) for piece in SPECIAL])
    tokenizer.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in NOT_SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": None, **settings}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer


def save_scripted(
    folder: Path,
    after: list[str],
    template: str | None = TEMPLATE,
    loop: bool = False,
    circle: Sequence[str] = (),
    **changes,
) -> Path:
    """A real checkpoint that says a fixed sequence of distinct tokens: each token's only effect is to call the next.

    `loop` closes it to a circle; `circle` is a second sequence, without an end.

    Its layers add nothing to the residual stream, and the head row of each token in `after` (as tokenizer.json
    writes them) answers to the embedding of the token before it. The first is what the prompt must end with.
    """
    tokenizer = save_tokenizer(folder, template)
    ids, round_ids = ([tokenizer.token_to_id(piece) for piece in pieces] for pieces in (after, circle))
    assert None not in ids + round_ids, (after, circle)
    assert len(set(ids + round_ids)) == len(ids + round_ids), "each token can have only one successor"
    sizes = {"vocab_size": 320, "hidden_size": 256, "tie_word_embeddings": False, "num_hidden_layers": 2}
    sizes["max_position_embeddings"] = 4096
    model = randomize(Qwen3ForCausalLM(tiny_config("qwen3", **sizes | changes)), scale=1.0)
    pairs = [*pairwise(ids + ids[: int(loop)]), *pairwise(round_ids + round_ids[:1])]
    with torch.no_grad():
        model.model.norm.weight.fill_(1)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        for now, then in pairs:
            model.lm_head.weight[then] += model.model.embed_tokens.weight[now]
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.token_to_id("<|im_end|>")}))
    return folder


def edit_json(file: Path, **changes) -> None:
    """Set keys of a JSON file; None removes one."""
    data = json.loads(file.read_text())
    for key, value in changes.items():
        if value is None:
            data.pop(key, None)
        else:
            data[key] = value
    file.write_text(json.dumps(data))
