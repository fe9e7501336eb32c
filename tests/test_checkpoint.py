"""Loading: every number lands where it belongs, or the checkpoint is refused whole, in one line."""

import json
import subprocess
import sys

import pytest
import torch
from builders import edit_json, save_tiny, save_tokenizer
from conftest import ROOT
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import qwen_scratch.checkpoint
from qwen_scratch import InputError, SamplingParams, Tokenizer, complete, load, load_model
from qwen_scratch.checkpoint import Rows, head_rows, open_checkpoint
from qwen_scratch.loading import choose_dtype, cpu_has_bfloat16
from qwen_scratch.reference import Reference

IDS = torch.tensor([[3, 141, 59, 26, 53]])


def rewrite(folder, change):
    """Let `change` edit the tensors of a single-file checkpoint."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def refused(folder, *words):
    with pytest.raises(InputError) as caught:
        load_model(folder, device="cpu", exact=True)
    text = str(caught.value)
    assert len(text.splitlines()) <= 2
    for word in words:
        assert word in text
    return text


def test_every_parameter_equals_the_file(tiny):
    stored = load_file(tiny / "model.safetensors")
    model = load_model(tiny, device="cpu", exact=True)
    ours = dict(model.named_parameters())
    assert ours.keys() == stored.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in stored.items())


def test_load_gives_model_and_tokenizer(tiny):
    model, tokenizer = load(tiny, device="cpu")
    assert not model.training
    assert tokenizer.decode(tokenizer.encode("the cat")) == "the cat"


def test_tied_head_is_the_embedding(tiny):
    assert "lm_head.weight" not in load_file(tiny / "model.safetensors")
    model = load_model(tiny, device="cpu", exact=True)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert model.config.num_parameters == sum(p.numel() for p in model.parameters())


def test_tied_head_stored_a_second_time(tiny_copy):
    rewrite(tiny_copy, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    model = load_model(tiny_copy, device="cpu", exact=True)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    rewrite(tiny_copy, lambda t: t.update({"lm_head.weight": t["lm_head.weight"].double()}))  # and in another dtype
    assert load_model(tiny_copy, device="cpu", exact=True).config.tie_word_embeddings


def test_tied_head_that_differs_is_used_as_in_the_reference(tiny_copy):
    rewrite(tiny_copy, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 0.5}))
    with pytest.warns(UserWarning, match="ties the head.*is not tied"):
        model = load_model(tiny_copy, device="cpu", exact=True)
    stored = load_file(tiny_copy / "model.safetensors")
    assert torch.equal(model.lm_head.weight, stored["lm_head.weight"])
    assert torch.equal(model.model.embed_tokens.weight, stored["model.embed_tokens.weight"])
    assert model.config.num_parameters == sum(p.numel() for p in model.parameters())
    assert torch.equal(model(IDS), Reference(tiny_copy).logits(IDS))


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight"])
def test_tied_head_stored_a_second_time_quantised(tiny_copy, name):
    def spoil(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[name] = tensors[name].to(torch.int8)

    rewrite(tiny_copy, spoil)
    refused(tiny_copy, "quantised", name)


@pytest.mark.parametrize(
    "name", ["qweight", "qzeros", "scales", "g_idx", "weight_scale_inv", "weight_scale", "weight.absmax"]
)
def test_quantised_weights_are_known_by_their_names(tiny_copy, name):
    """Also where the config has lost its quantization_config."""
    key = f"model.layers.0.mlp.up_proj.{name}"
    rewrite(tiny_copy, lambda t: t.update({key: torch.ones(4)}))
    refused(tiny_copy, "are quantised (1 tensors", key, "unquantised checkpoint")


def test_untied_without_a_head(tiny_copy):
    edit_json(tiny_copy / "config.json", tie_word_embeddings=False)
    refused(tiny_copy, "lm_head.weight", "embedding or backbone checkpoint")


def test_names_without_the_prefix_load_alike(tiny, tiny_copy):
    def strip(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    rewrite(tiny_copy, strip)
    a, b = load_model(tiny, device="cpu", exact=True), load_model(tiny_copy, device="cpu", exact=True)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    rewrite(tiny_copy, lambda t: t.update({"model.norm.weight": t["norm.weight"].clone()}))
    refused(tiny_copy, "1 stored twice: model.norm.weight")


def test_all_misfits_are_reported_together(tiny_copy):
    def spoil(tensors):
        del tensors["model.norm.weight"]
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.self_attn.o_proj.bias"] = torch.zeros(48)
        tensors["model.layers.2.mlp.gate_proj.weight"] = torch.zeros(80, 47)

    rewrite(tiny_copy, spoil)
    refused(
        tiny_copy,
        str(tiny_copy),
        "2 missing: model.layers.1.mlp.up_proj.weight, model.norm.weight",
        "1 unexpected: model.layers.0.self_attn.o_proj.bias",
        "1 of the wrong shape: model.layers.2.mlp.gate_proj.weight [80, 47] instead of [80, 48]",
    )


def test_qwen2_without_one_bias(tmp_path):
    folder = save_tiny(tmp_path / "model", "qwen2")
    rewrite(folder, lambda t: t.pop("model.layers.1.self_attn.k_proj.bias"))
    refused(folder, "1 missing: model.layers.1.self_attn.k_proj.bias")


def test_harmless_leftovers_are_known_by_name(tiny_copy):
    for dtype in (torch.float32, torch.int32):
        leftover = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4, dtype=dtype)}
        rewrite(tiny_copy, lambda t, leftover=leftover: t.update(leftover))
        load_model(tiny_copy, device="cpu", exact=True)


def test_embedding_rows_that_differ_from_the_config(tiny_copy):
    edit_json(tiny_copy / "config.json", vocab_size=328)
    refused(tiny_copy, "model.embed_tokens.weight", "320", "328")


def test_mixed_dtypes_end_in_one(tiny_copy, family):
    def mix(tensors):
        for name in tensors:
            if "norm" not in name:
                tensors[name] = tensors[name].bfloat16()

    rewrite(tiny_copy, mix)
    for wanted in (torch.bfloat16, torch.float32):
        model = load_model(tiny_copy, device="cpu", exact=True, dtype=wanted)
        assert {p.dtype for p in model.parameters()} == {wanted}
        assert torch.equal(model(IDS), Reference(tiny_copy, wanted).logits(IDS))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.float8_e4m3fn], ids=str)
def test_tensors_of_a_type_that_has_no_place(tiny_copy, dtype):
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(tiny_copy, lambda t: t.update({name: torch.zeros(80, 48).to(dtype)}))
    refused(tiny_copy, name, "quantised")


@pytest.mark.parametrize(
    ("config", "stored", "asked", "expected"),
    [
        ({"dtype": "bfloat16"}, torch.float32, "auto", torch.bfloat16),
        ({"torch_dtype": "float16"}, torch.float32, "auto", torch.float16),
        ({"dtype": "float32", "torch_dtype": "float16"}, torch.bfloat16, "auto", torch.float32),
        ({}, torch.float16, "auto", torch.float16),
        ({"dtype": "bfloat16"}, torch.bfloat16, "float32", torch.float32),
        ({"dtype": "float32"}, torch.float32, torch.bfloat16, torch.bfloat16),
    ],
)
def test_dtype_of_the_loaded_weights(tmp_path, monkeypatch, config, stored, asked, expected):
    monkeypatch.setattr("qwen_scratch.loading.cpu_has_bfloat16", lambda: True)
    folder = save_tiny(tmp_path / "model", "qwen3", dtype=stored)
    edit_json(folder / "config.json", dtype=None, torch_dtype=None)
    edit_json(folder / "config.json", **config)
    assert load_model(folder, device="cpu", exact=True, dtype=asked).model.norm.weight.dtype == expected


def test_auto_dtype_avoids_emulated_bfloat16():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")

    def auto(stored, device, native):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("qwen_scratch.loading.cpu_has_bfloat16", lambda: native)
            return choose_dtype("auto", stored, device)

    assert auto(torch.bfloat16, cpu, native=True) == torch.bfloat16
    assert auto(torch.bfloat16, cpu, native=False) == torch.float32
    assert auto(torch.bfloat16, gpu, native=False) == torch.bfloat16
    assert auto(torch.float16, cpu, native=False) == torch.float16


def test_bfloat16_is_found_in_the_cpu_flags(monkeypatch):
    for flags, native in (({"avx2": True}, False), ({"avx512_bf16": True}, True), ({"bf16": True}, True)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda flags=flags: flags)
        assert cpu_has_bfloat16() is native


def test_wanted_dtype_is_used_memory_mapped(tiny):
    """No copy: the parameter's bytes lie in the file's mapping."""
    file = str((tiny / "model.safetensors").resolve())
    model = load_model(tiny, device="cpu", exact=True)
    address = model.model.layers[1].mlp.up_proj.weight.data_ptr()
    with open("/proc/self/maps") as maps:
        for line in maps:
            low, high = (int(x, 16) for x in line.split()[0].split("-"))
            if low <= address < high:
                assert line.rstrip().endswith(file)
                return
    pytest.fail("address not mapped")


MEASURE = """
import sys, torch
from qwen_scratch import load_model

def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

torch.set_num_threads(1)
torch.nn.functional.linear(torch.ones(1, 8), torch.ones(8, 8)).sum()
peak, anonymous = status("VmHWM"), status("RssAnon")
model = load_model(sys.argv[1], device="cpu", exact=True, dtype=sys.argv[2])
model(torch.tensor([[1, 2, 3]]), last_only=True)
print(status("VmHWM") - peak, status("RssAnon") - anonymous)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_peak_memory_is_once_the_model(tmp_path_factory, dtype):
    folder = tmp_path_factory.getbasetemp() / "200mb"
    if not folder.exists():
        sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6, "vocab_size": 24576}
        save_tiny(folder, "qwen3", dtype=torch.bfloat16, shard="50MB", **sizes)
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert stored > 190e6
    assert len(list(folder.glob("*.safetensors"))) >= 4
    out = subprocess.run([sys.executable, "-c", MEASURE, folder, dtype], check=True, capture_output=True, text=True)
    peak, anonymous = map(int, out.stdout.split())
    if dtype == "bfloat16":  # mapped: nothing of it is a copy
        assert anonymous < 0.2 * stored
        assert peak < 1.2 * stored
    else:  # cast one by one: the float32 model, and little more
        assert peak < 1.3 * 2 * stored


# --- folders and files that are not as they should be


def test_no_folder_file_instead_no_config(tmp_path):
    refused(tmp_path / "nowhere", "nowhere", "not there")
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", "is a file")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "no config.json")


def test_names_that_cannot_be_folders(tiny):
    for name in ("~nosuchuser/x", "x" * 300, "a" + chr(0) + "b"):
        with pytest.raises(InputError, match=r"not there|cannot be"):
            load_model(name)
    with pytest.raises(InputError, match="dtype"):
        load_model(tiny, dtype=None)
    with pytest.raises(InputError, match="device"):
        load_model(tiny, device=None)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
)
def test_link_to_a_file_that_is_gone(tiny_copy, name):
    """A cache with a hole in it. Without generation_config.json, say, it would load, and not know where to stop."""
    (tiny_copy / name).unlink()
    (tiny_copy / name).symlink_to(tiny_copy / "blob")
    with pytest.raises(InputError, match=f"{name} is a link to a file that is gone"):
        load(tiny_copy, device="cpu")


def test_absurd_numbers_of_layers_are_refused_at_once(tiny_copy):
    edit_json(tiny_copy / "config.json", num_hidden_layers=1_000_000)
    refused(tiny_copy, "1000000 layers cannot be meant")


def test_an_empty_template_is_none(tiny_copy):
    (tiny_copy / "chat_template.jinja").write_text("")
    assert Tokenizer(tiny_copy).template is None


def test_config_that_is_not_json(tiny_copy):
    (tiny_copy / "config.json").write_text('{"model_type": "qwen2",')
    refused(tiny_copy, "config.json", "JSON")
    (tiny_copy / "config.json").write_text("[" * 100_000)
    refused(tiny_copy, "config.json", "JSON")
    (tiny_copy / "config.json").write_text("[]")
    refused(tiny_copy, "config.json", "object")


@pytest.fixture
def sharded(family, tmp_path):
    folder = save_tiny(tmp_path / "sharded", family, shard="60KB")
    assert len(list(folder.glob("model-*.safetensors"))) >= 3
    return folder


def test_shards_load_as_one_file(sharded, family, tmp_path):
    whole = save_tiny(tmp_path / "whole", family)
    a, b = load_model(sharded, device="cpu", exact=True), load_model(whole, device="cpu", exact=True)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("emptied", [False, True])
def test_missing_shard_is_named_before_any_tensor_is_read(sharded, monkeypatch, emptied):
    lost = sorted(sharded.glob("model-*.safetensors"))[1]
    lost.unlink()
    if emptied:
        lost.touch()
    monkeypatch.setattr(qwen_scratch.checkpoint, "safe_open", lambda *a, **k: pytest.fail("a shard was opened"))
    text = refused(sharded, lost.name, "interrupted download")
    assert text.count("safetensors") == 1


def test_index_without_map_or_with_a_path_out(sharded):
    index = sharded / "model.safetensors.index.json"
    for name in ("../elsewhere.safetensors", "pytorch_model.bin", "*", "", "..", "x" * 300 + ".safetensors", 7, None):
        edit_json(index, weight_map={"model.norm.weight": name})
        refused(sharded, "none of its folder's .safetensors", str(name))
    edit_json(index, weight_map=None)
    refused(sharded, "weight_map")


def test_tensor_in_two_shards(sharded):
    first, second = sorted(sharded.glob("model-*.safetensors"))[:2]
    tensors = load_file(first)
    name = next(iter(tensors))
    save_file(load_file(second) | {name: tensors[name]}, second)
    refused(sharded, "1 stored twice", name)


def test_single_file_beside_an_index(sharded):
    """The files that the index names count, and it is said: the other one may be anything, of fewer bits say."""
    (sharded / "model.safetensors").write_bytes(b"junk")
    with pytest.warns(UserWarning, match="has both"):
        load_model(sharded, device="cpu")


def test_index_and_shards_of_different_checkpoints(sharded):
    """The index is held against the shards' headers before any tensor is read."""
    file = sharded / "model.safetensors.index.json"
    index = json.loads(file.read_text())["weight_map"]
    name, shard = next(iter(index.items()))
    other = next(shard for shard in index.values() if shard != index[name])
    edit_json(file, weight_map=index | {name: other})
    refused(sharded, "different checkpoints", f"1 tensors are not in the file that it names for them: {name} ({other})")
    edit_json(file, weight_map=index | {"model.extra.weight": shard})
    refused(sharded, "different checkpoints", "model.extra.weight")
    file.write_text(
        json.dumps({"weight_map": index}).replace('{"weight_map": {', f'{{"weight_map": {{"{name}": "{other}", ')
    )
    refused(sharded, file.name, f"{name} stands there twice")
    edit_json(sharded / "config.json", num_hidden_layers=2)
    file.write_text(json.dumps({"weight_map": index}))
    refused(sharded, "unexpected", "model.layers.2.")


def test_shards_in_each_others_place(sharded):
    first, second = sorted(sharded.glob("model-*.safetensors"))[:2]
    first.rename(sharded / "x")
    second.rename(first)
    (sharded / "x").rename(second)
    refused(sharded, "different checkpoints")


def test_only_the_indexed_files_are_opened(sharded):
    (sharded / "extra.safetensors").write_bytes(b"junk")
    load_model(sharded, device="cpu", exact=True)


def test_pickles_are_never_read(tiny_copy):
    (tiny_copy / "model.safetensors").rename(tiny_copy / "pytorch_model.bin")
    refused(tiny_copy, "pytorch_model.bin", "neither model.safetensors", "pickles", "save_pretrained")
    (tiny_copy / "pytorch_model.bin").unlink()
    refused(tiny_copy, "no weight files at all")


@pytest.mark.parametrize(
    ("content", "looks"),
    [
        (b"", "empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git-lfs pointer"),
        (b"<html></html>", "web page"),
        (b"\n<!DOCTYPE html>", "web page"),
        (b"GGUF\x03\0\0\0" + bytes(100), "GGUF"),
        (b"PK\x03\x04" + bytes(100), "pickle"),
        (b"\x80\x02}" + bytes(100), "pickle"),
        (bytes(100), "damaged or cut off"),
    ],
)
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "generation_config.json"])
def test_file_that_is_something_else(tiny_copy, name, content, looks):
    (tiny_copy / name).write_bytes(content)
    with pytest.raises(InputError) as caught:
        load(tiny_copy, device="cpu")
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    assert str(tiny_copy / name) in text
    assert looks in text
    assert name != "model.safetensors" or f"({len(content)} bytes)" in text


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["model-q4_k_m.gguf"], ["GGUF", "llama.cpp"]),
        (["adapter_config.json", "adapter_model.safetensors"], ["adapter for Qwen/Qwen3-8B", "merge"]),
        (["pytorch_model.bin", "training_args.bin"], ["pickles", "save_pretrained"]),
        (["consolidated.00.pth"], ["pickles"]),
        (["model.onnx", "model.onnx_data"], ["ONNX"]),
        (["weights.00.npz"], ["MLX"]),
        (["flax_model.msgpack"], ["Flax"]),
        (["tf_model.h5"], ["TensorFlow"]),
        (["README.md"], ["give the folder"]),
    ],
    ids=lambda value: value[0],
)
def test_folders_of_another_kind(tmp_path, tiny_copy, files, words):
    """Without config.json, and, where the weights are what is wrong, with one."""
    for folder in (tmp_path / "alone", tiny_copy):
        folder.mkdir(exist_ok=True)
        (folder / "model.safetensors").unlink(missing_ok=True)
        for name in files:
            (folder / name).write_text('{"base_model_name_or_path": "Qwen/Qwen3-8B"}')
    refused(tmp_path / "alone", "config.json", *words)
    if "README.md" not in files and "adapter_model.safetensors" not in files:
        refused(tiny_copy, "neither model.safetensors", *words)


def test_adapter_beside_its_base(tiny_copy):
    (tiny_copy / "adapter_config.json").write_text("{}")
    with pytest.warns(UserWarning, match="adapter, which is ignored"):
        load_model(tiny_copy, device="cpu", exact=True)


@pytest.mark.parametrize(
    ("model_type", "looks"),
    [
        ("qwen3_moe", "mixture of experts"), ("qwen2_moe", "mixture of experts"), ("qwen2_5_vl", "vision model"),
        ("qwen3_vl", "vision model"), ("qwen2_audio", "audio model"), ("qwen3_next", "hybrid"), ("qwen3_5", "hybrid"),
        ("qwen2_5_omni", "sound and vision"), ("llama", "qwen2 and qwen3"),
    ],
)  # fmt: skip
def test_models_of_another_kind(tmp_path, model_type, looks):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    refused(tmp_path, repr(model_type), looks)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "text_config": {}}))
    refused(tmp_path, repr(model_type), "more than text")


@pytest.mark.parametrize("stage", ["weights", "cache", "forward"])
def test_out_of_memory_names_sizes_and_ways_out(tiny, monkeypatch, stage):
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB") if stage != "cache" else None

    def fail(*_, **__):
        if error is None:
            return torch.zeros(2**50)  # what the CPU's allocator says to that
        raise error

    if stage == "weights":
        monkeypatch.setattr(torch.Tensor, "to", fail)
        with pytest.raises(RuntimeError, match=r"out of memory on cpu: the weights need 0 MiB in float32.*--dtype"):
            load_model(tiny, device="cpu", exact=True)
        return
    model = load_model(tiny, device="cpu", exact=True)
    if stage == "cache":
        monkeypatch.setattr("qwen_scratch.engine.KVCache", fail)
    else:
        monkeypatch.setattr(type(model), "forward", fail)
    with pytest.raises(RuntimeError, match=r"out of memory on cpu: .* the KV cache 0 MiB for 8 positions"):
        complete(model, None, [1, 2, 3], SamplingParams(max_new_tokens=5))


def test_spoiled_at_random():
    """The script's 1,000 runs in short: refused in a line, or loaded right."""
    script = ROOT / "scripts" / "fuzz_checkpoint.py"
    done = subprocess.run([sys.executable, script, "--runs", "150"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "0 otherwise" in done.stdout


def test_the_random_spoiler_would_find_a_fault(tmp_path):
    """A loader that fills one parameter with something else is found out."""
    source = (ROOT / "scripts" / "fuzz_checkpoint.py").read_text()
    careless = """
import qwen_scratch.loading
real = qwen_scratch.loading.load_weights
def load_weights(model, *others, **options):
    real(model, *others, **options)
    model.model.layers[1].input_layernorm.weight.zero_()
qwen_scratch.loading.load_weights = load_weights
"""
    (tmp_path / "fuzz.py").write_text(
        source.replace("from qwen_scratch import", careless + "from qwen_scratch import", 1)
    )
    done = subprocess.run([sys.executable, tmp_path / "fuzz.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "is not the file's" in done.stderr, done.stderr


def test_truncated_file(tiny_copy):
    file = tiny_copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    refused(tiny_copy, "model.safetensors", "cut off")


def test_no_half_loaded_model(tiny_copy, monkeypatch):
    """A shard that fails after the headers were fine must not leave a model behind."""
    real = safe_open

    def failing(file, **options):
        if options.get("device"):
            raise OSError("disk gone")
        return real(file, **options)

    monkeypatch.setattr(qwen_scratch.checkpoint, "safe_open", failing)
    with pytest.raises(OSError, match="disk gone"):
        load_model(tiny_copy, device="cpu", exact=True)


def test_device_and_dtype_that_do_not_exist(tiny):
    for device in ("gpu", "cuda:77", "xpu", "meta"):
        with pytest.raises(InputError, match=device):
            load_model(tiny, device=device)
    for dtype in ("float8", "int8", torch.int64):
        with pytest.raises(InputError, match=str(dtype)):
            load_model(tiny, device="cpu", exact=True, dtype=dtype)


def test_tokenizer_is_needed_only_by_load(tmp_path):
    folder = save_tiny(tmp_path / "model", "qwen3")
    load_model(folder, device="cpu", exact=True)
    with pytest.raises(InputError, match=r"no tokenizer\.json"):
        load(folder, device="cpu")
    save_tokenizer(folder)
    data = json.loads((folder / "tokenizer.json").read_text())
    data["decoder"] = {"type": "Fuse"}
    (folder / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(InputError, match="byte-level"):
        load(folder, device="cpu")


def test_rows_are_read_in_parts_that_are_let_go(tiny, monkeypatch):
    checkpoint = open_checkpoint(tiny)
    whole = load_model(tiny, device="cpu", exact=True).lm_head.weight
    rows = head_rows(checkpoint)
    assert rows.shape == whole.shape
    assert torch.equal(rows[:], whole)
    assert torch.equal(rows[7:99], whole[7:99])
    assert rows.shard is not None  # one mapping serves many small parts
    monkeypatch.setattr(Rows, "FRESH", whole[:50].nbytes)
    rows = head_rows(checkpoint)
    seen = []
    for start in range(0, 90, 30):
        assert torch.equal(rows[start : start + 30], whole[start : start + 30])
        seen.append(rows.shard is None)
    assert seen == [False, True, False]
