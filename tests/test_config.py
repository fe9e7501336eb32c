import json

import pytest
import torch
from builders import save_tiny, tiny_config

from qwen_scratch import InputError, QwenConfig
from qwen_scratch.checkpoint import open_checkpoint
from qwen_scratch.reference import Reference

QWEN25_05B = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "sliding_window": 32768,
    "max_window_layers": 21,
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
}
QWEN3_06B = QWEN25_05B | {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": False,
    "max_position_embeddings": 40960,
}


def test_published_sizes():
    small = QwenConfig.from_dict(QWEN25_05B)
    assert small.num_parameters == 494_032_768
    assert small.head_dim == 64
    assert small.qkv_bias and not small.o_bias and not small.qk_norm
    assert small.kv_bytes_per_token(torch.bfloat16) == 12 * 1024
    third = QwenConfig.from_dict(QWEN3_06B)
    assert third.num_parameters == 596_049_920
    assert third.head_dim == 128
    assert third.qk_norm and not third.qkv_bias and not third.o_bias
    big = QWEN25_05B | {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
    }  # fmt: skip
    assert QwenConfig.from_dict(big).num_parameters == 7_615_616_512
    assert QwenConfig.from_dict(big).kv_bytes_per_token(torch.bfloat16) == 56 * 1024


def test_old_and_new_spellings_mean_the_same():
    old = dict(QWEN3_06B)
    new = {key: value for key, value in old.items() if key not in ("torch_dtype", "rope_theta")}
    new |= {"dtype": "bfloat16", "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}
    new |= {"layer_types": ["full_attention"] * 28, "sliding_window": None}
    assert QwenConfig.from_dict(new) == QwenConfig.from_dict(old)


def test_absent_keys_take_the_reference_defaults():
    for data in (QWEN25_05B, QWEN3_06B):
        bare = {key: data[key] for key in ("model_type", "vocab_size", "hidden_size", "intermediate_size",
                "num_hidden_layers", "num_attention_heads", "num_key_value_heads")}  # fmt: skip
        config = QwenConfig.from_dict(bare)
        reference = tiny_config(data["model_type"]).__class__(**{k: v for k, v in bare.items() if k != "model_type"})
        assert config.rms_norm_eps == reference.rms_norm_eps
        assert config.max_position_embeddings == reference.max_position_embeddings
        assert config.tie_word_embeddings == reference.tie_word_embeddings
        assert config.rope_theta == reference.rope_parameters["rope_theta"]
        assert config.qkv_bias is (data["model_type"] == "qwen2")
    assert QwenConfig.from_dict({**bare, "hidden_size": 100}).head_dim == reference.head_dim  # a Qwen3 without head_dim


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"torch_dtype": "float16"}, torch.float16),
        ({"dtype": "torch.float32"}, torch.float32),
        ({"dtype": "bfloat16", "torch_dtype": "float32"}, torch.bfloat16),  # dtype, the newer key, comes first
        ({}, None),
    ],
)
def test_dtype_spellings(spelling, expected):
    data = {key: value for key, value in QWEN3_06B.items() if key != "torch_dtype"} | spelling
    assert QwenConfig.from_dict(data).dtype == expected


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": name}, name)
        for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5", "llama")
    ]
    + [
        ({"model_type": None}, "None"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "Qwen3ForSequenceClassification"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"torch_dtype": "int8"}, "int8"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, "multiple"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": "28"}, "num_hidden_layers"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"head_dim": 33}, "head_dim"),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 21}, "sliding_attention"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"quantization": {"bits": 4}}, "quantization"),
    ]
    + [
        ({"rope_scaling": {"rope_type": name, "factor": 4.0}}, name)
        for name in ("linear", "dynamic", "llama3", "longrope", "mrope")
    ]
    + [({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear")],
)
def test_what_is_not_implemented_is_refused_by_name(changes, named):
    with pytest.raises(InputError, match=named) as caught:
        QwenConfig.from_dict(QWEN3_06B | changes)
    assert len(str(caught.value).splitlines()) <= 2


def test_another_model_type_is_refused_before_any_weight_file(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}')
    with pytest.raises(InputError, match="qwen3_moe"):
        open_checkpoint(tmp_path)


def test_a_nested_text_config_does_not_count(tmp_path):
    with pytest.raises(InputError, match="qwen3_vl"):
        QwenConfig.from_dict({"model_type": "qwen3_vl", "text_config": QWEN3_06B})


@pytest.mark.parametrize("window", [{"sliding_window": 8}, {"sliding_window": None}, {}])
def test_a_window_that_is_switched_off_does_nothing(family, tmp_path, window):
    from qwen_scratch import load_model

    folder = save_tiny(tmp_path / "model", family, use_sliding_window=False, **window)
    ids = torch.arange(20)[None] * 7 % 160
    full = Reference(save_tiny(tmp_path / "full", family)).logits(ids)
    assert torch.equal(load_model(folder, device="cpu", exact=True)(ids), full)


def test_windows_above_the_last_layer_are_full_attention():
    on = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 28}
    assert QwenConfig.from_dict(QWEN3_06B | on) == QwenConfig.from_dict(QWEN3_06B)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "changes",
    [{"architectures": value} for value in (5, True, {"a": 1}, [1])]
    + [{"layer_types": value} for value in (5, True, [None])]
    + [{"model_type": value} for value in ([], {}, 3)]
    + [{key: value} for key in ("hidden_size", "num_attention_heads") for value in ("9", [], {}, "", 0, False, 2.0)]
    + [{"vocab_size": 10**19}, {"head_dim": 5 * 10**18}, {"intermediate_size": 10**18}, {"head_dim": [8]}]
    + [{"rope_theta": value} for value in (10**400, -1, "1e6", float("inf"))]
    + [{"rms_norm_eps": 10**400}, {"rms_norm_eps": "1e-6"}, {"torch_dtype": ["bfloat16"]}, {"dtype": "auto"}]
    + [{"tie_word_embeddings": "false"}, {"attention_bias": "no"}, {"use_sliding_window": 2}]
    + [{"use_sliding_window": True, "sliding_window": 8, "max_window_layers": "x"}]
    + [{"rope_scaling": value} for value in (5, "yarn", {"full_attention": YARN}, {"rope_type": ["yarn"]})]
    + [{"rope_scaling": YARN | {"factor": value}} for value in (float("nan"), float("inf"), -1, "4", True)]
    + [{"rope_scaling": YARN | {"original_max_position_embeddings": value}} for value in (float("nan"), -1, "64", 0.5)]
    + [
        {"rope_scaling": YARN | {key: value}}
        for key in ("beta_fast", "beta_slow")
        for value in ("32", [1], -1, float("nan"))
    ]
    + [{"rope_scaling": YARN | {"attention_factor": value}} for value in ("1.1", [1], {}, float("nan"), -1)]
    + [{"rope_scaling": YARN | {"mscale": value, "mscale_all_dim": 1}} for value in ("1", [1], float("nan"))],
    ids=str,
)
def test_values_of_the_wrong_kind_are_wrong_input(tmp_path, changes):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_06B | changes))
    with pytest.raises(InputError, match=r"config\.json"):
        open_checkpoint(tmp_path)


def test_window_without_a_size_is_the_references_default():
    on = {key: value for key, value in QWEN3_06B.items() if key != "sliding_window"} | {"use_sliding_window": True}
    with pytest.raises(InputError, match="sliding_attention"):
        QwenConfig.from_dict(on)
    QwenConfig.from_dict(on | {"sliding_window": None})
