#!/usr/bin/env python3
"""Spoil a small checkpoint of two shards in random ways, again and again: it must load right, or be refused in a line or two.

    python scripts/fuzz_checkpoint.py [--runs 1000] [--seed 0]

Right means: every parameter filled, and bit for bit what the tensor of its name in the files says. Flipped bits inside the
tensors' own data are not tried: nothing in the format would show them. A crash, a hang of 20 s, any other exception or a
model with a wrong parameter ends the script with exit code 1 and the spoiled folder left for a look.
"""

import argparse
import contextlib
import faulthandler
import json
import random
import shutil
import struct
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from qwen_scratch import InputError, load_model
from qwen_scratch.config import QwenConfig
from qwen_scratch.files import INDEX
from qwen_scratch.model import Qwen

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
CONFIG = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 60, "hidden_size": 24, "intermediate_size": 40,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64, "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "float32",
    "eos_token_id": 1,
}  # fmt: skip


def make(folder: Path) -> None:
    """A random Qwen3 with a head of its own, in two shards."""
    torch.manual_seed(0)
    tensors = {name: torch.randn(p.shape) for name, p in Qwen(QwenConfig.from_dict(CONFIG)).named_parameters()}
    names = list(tensors)
    folder.mkdir()
    index = {}
    for shard, part in zip(SHARDS, (names[::2], names[1::2]), strict=True):
        save_file({name: tensors[name] for name in part}, folder / shard, metadata={"format": "pt"})
        index |= dict.fromkeys(part, shard)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2], "do_sample": True}))


def flip_header(folder: Path, chance: random.Random) -> None:
    file = folder / chance.choice(SHARDS)
    data = bytearray(file.read_bytes())
    end = 8 + struct.unpack("<Q", data[:8])[0]
    for _ in range(chance.randrange(1, 4)):
        data[chance.randrange(end)] ^= 1 << chance.randrange(8)
    file.write_bytes(data)


def flip_json(folder: Path, chance: random.Random) -> None:
    file = folder / chance.choice(["config.json", "generation_config.json", INDEX])
    data = bytearray(file.read_bytes())
    for _ in range(chance.randrange(1, 4)):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    file.write_bytes(data)


def truncate(folder: Path, chance: random.Random) -> None:
    file = chance.choice(sorted(folder.iterdir()))
    file.write_bytes(file.read_bytes()[: chance.randrange(file.stat().st_size)])


def edit_shard(folder: Path, change: Callable[[dict[str, torch.Tensor], str], None], chance: random.Random) -> None:
    file = folder / chance.choice(SHARDS)
    tensors = load_file(file)
    change(tensors, chance.choice(sorted(tensors)))
    save_file(tensors, file, metadata={"format": "pt"})


def rename(folder: Path, chance: random.Random) -> None:
    def change(tensors: dict[str, torch.Tensor], name: str) -> None:
        to = chance.choice(
            [f"{name}x", name.replace("0", "7"), f"model.{name}", name.removeprefix("model."), "", "norm.weight"]
        )
        tensors[to] = tensors.pop(name)

    edit_shard(folder, change, chance)


def drop(folder: Path, chance: random.Random) -> None:
    def change(tensors: dict[str, torch.Tensor], name: str) -> None:
        del tensors[name]

    edit_shard(folder, change, chance)


def edit_header(folder: Path, chance: random.Random) -> None:
    """Another dtype, shape or place for a tensor's bytes, or one key twice; all else of the file stays as it is."""
    file = folder / chance.choice(SHARDS)
    data = file.read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:end])
    one, other = chance.sample(sorted(header.keys() - {"__metadata__"}), 2)
    act = chance.randrange(5)
    if act == 0:
        header[one]["dtype"] = chance.choice(["I32", "U8", "F64", "F8_E4M3", "BF16", "Q4", 3])
    elif act == 1:
        header[one]["shape"] = chance.choice(
            [[2, 2], [], header[other]["shape"], [-1], header[one]["shape"][::-1], None]
        )
    elif act == 2:
        header[one]["data_offsets"] = header[other]["data_offsets"]
    elif act == 3:
        header[one], header[other] = header[other], header[one]
    text = json.dumps(header)
    if act == 4:
        text = text.replace(json.dumps(one), json.dumps(other), 1)
    file.write_bytes(struct.pack("<Q", len(text)) + text.encode() + data[end:])


def double(folder: Path, chance: random.Random) -> None:
    def change(tensors: dict[str, torch.Tensor], name: str) -> None:
        other = load_file(folder / chance.choice(SHARDS))
        key = chance.choice(sorted(other))
        tensors[chance.choice([key, name.removeprefix("model."), f"model.{name}"])] = tensors[name].clone()

    edit_shard(folder, change, chance)


def reshape(folder: Path, chance: random.Random) -> None:
    def change(tensors: dict[str, torch.Tensor], name: str) -> None:
        tensor = tensors[name]
        forms = [tensor[:-1], tensor.flatten(), tensor.mT if tensor.dim() == 2 else tensor[None], tensor[:0], tensor[0]]
        tensors[name] = chance.choice(forms).contiguous()

    edit_shard(folder, change, chance)


def retype(folder: Path, chance: random.Random) -> None:
    kinds = [torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn]

    def change(tensors: dict[str, torch.Tensor], name: str) -> None:
        tensors[name] = tensors[name].to(chance.choice(kinds))

    edit_shard(folder, change, chance)


def swap(folder: Path, chance: random.Random) -> None:
    one, other = chance.sample(sorted(folder.iterdir()), 2)
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)


def lose(folder: Path, chance: random.Random) -> None:
    chance.choice(sorted(folder.iterdir())).unlink()


def edit_index(folder: Path, chance: random.Random) -> None:
    file = folder / INDEX
    text = file.read_text()
    index = json.loads(text)["weight_map"]
    name = chance.choice(sorted(index))
    act = chance.randrange(5)
    if act == 0:
        index.pop(name)
    elif act == 1:
        index[name] = chance.choice([*SHARDS, "../x", "config.json", "nowhere.safetensors", 7, None, ["x"]])
    elif act == 2:
        index[f"{name}x"] = index[name]
    elif act == 3:
        index[f"{name}x"] = index.pop(name)
    new = json.dumps({"weight_map": index})
    if act == 4:  # one key twice, which only text can have
        new = new.replace('{"weight_map": {', f'{{"weight_map": {{"{name}": "{chance.choice(SHARDS)}", ')
    file.write_text(new)


def edit_config(folder: Path, chance: random.Random) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    values: list[Any] = [0, -1, 1, 3, 10**30, 1.5, "8", None, True, [], {}, "silu", float("nan")]
    config[chance.choice(sorted(config))] = chance.choice(values)
    file.write_text(json.dumps(config))


WAYS = [
    flip_header, flip_header, flip_json, truncate, rename, drop, edit_header, edit_header, double, reshape, retype, swap, lose,
    edit_index, edit_config,
]  # fmt: skip


def outcome(folder: Path) -> str:
    """ "loaded" or "refused"; raises whatever should not be."""
    try:
        model = load_model(folder, device="cpu", exact=True)
    except InputError as error:
        if not 0 < len(str(error)) < 2000 or len(str(error).splitlines()) > 2:
            raise RuntimeError(f"a message of {len(str(error))} characters: {error}") from None
        return "refused"
    stored: dict[str, list[torch.Tensor]] = {}
    for shard in folder.glob("*.safetensors"):
        try:
            tensors = load_file(shard)
        except SafetensorError:
            continue  # one that the index does not name
        for name, tensor in tensors.items():
            full = f"model.{name}" if name.startswith(("layers.", "norm.", "embed_tokens.")) else name
            stored.setdefault(full, []).append(tensor)
    for name, parameter in model.named_parameters():
        assert parameter.device.type == "cpu", f"{name} was not filled"
        assert any(torch.equal(parameter, tensor.to(parameter.dtype)) for tensor in stored.get(name, [])), (
            f"{name} is not the file's"
        )
    return "loaded"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # a head that is not tied is said aloud, and right
    root = Path(tempfile.mkdtemp())
    whole, spoiled = root / "whole", root / "spoiled"
    make(whole)
    assert outcome(whole) == "loaded"
    counts: Counter[str] = Counter()
    for run in tqdm(range(args.runs), disable=None, leave=False):
        chance = random.Random(f"{args.seed}/{run}")
        shutil.rmtree(spoiled, ignore_errors=True)
        shutil.copytree(whole, spoiled)
        chosen = chance.choices(WAYS, k=chance.choice([1, 1, 1, 2]))
        for way in chosen:
            with contextlib.suppress(Exception):  # spoiled too far already to be spoiled in this way
                way(spoiled, chance)
        faulthandler.dump_traceback_later(20, exit=True)
        try:
            result = outcome(spoiled)
        except BaseException as error:
            names = ", ".join(way.__name__ for way in chosen)
            print(f"run {run} ({names}): {type(error).__name__}: {error}\nleft in {spoiled}", file=sys.stderr)
            raise SystemExit(1) from error
        finally:
            faulthandler.cancel_dump_traceback_later()
        counts[f"{result} {chosen[0].__name__}" if len(chosen) == 1 else result] += 1
        counts[f"all {result}"] += 1
    shutil.rmtree(root)
    for name, count in sorted(counts.items()):
        print(f"{count:6} {name}")
    print(
        f"{args.runs} runs: {counts['all refused']} refused in a line, {counts['all loaded']} loaded right, 0 otherwise"
    )


if __name__ == "__main__":
    main()
