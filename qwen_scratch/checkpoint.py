"""A checkpoint folder → its config, and its weights straight onto the device.

Only JSON and safetensors are read, never a pickle. Before the first tensor is read, the headers of all
shards are held against the model's parameters; a checkpoint that does not fit is refused whole.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from tqdm import tqdm

from qwen_scratch.config import DTYPES, QwenConfig
from qwen_scratch.errors import InputError
from qwen_scratch.model import Qwen

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Stored(NamedTuple):
    """One tensor as a shard's header describes it."""

    file: Path
    key: str  # its name in the file
    shape: list[int]
    dtype: str  # safetensors' name: "BF16", "F32", ...


@dataclass(frozen=True)
class Checkpoint:
    """What a folder holds, as far as small files and shard headers tell."""

    folder: Path
    config: QwenConfig
    generation_config: dict[str, Any]
    tensors: dict[str, list[Stored]]  # parameter name → every place that claims to hold it

    @property
    def dtype(self) -> torch.dtype:
        """What config.json says, or else what the embedding is stored in."""
        if self.config.dtype is not None:
            return self.config.dtype
        stored = self.tensors.get("model.embed_tokens.weight")
        dtype = FLOATS.get(stored[0].dtype, torch.float32) if stored else torch.float32
        return dtype if dtype in DTYPES.values() else torch.float32


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Read a checkpoint folder's small files and its shards' headers; no weights yet.

    Raises:
        InputError: no such folder, no or bad config.json, an unsupported model, a missing or broken shard.
    """
    try:
        folder = Path(folder).expanduser()
        found = "a folder" if folder.is_dir() else "a file, not a folder" if folder.exists() else "not there"
    except (OSError, RuntimeError) as error:  # no such user, a name that is too long
        raise InputError(f"{folder} cannot be a checkpoint folder: {error}") from None
    if found != "a folder":
        raise InputError(f"{folder} is {found}; give the folder that holds config.json and the .safetensors files")
    if not (folder / "config.json").exists():
        raise InputError(f"{folder} has no config.json; give the folder that holds it and the .safetensors files")
    data = read_json(folder / "config.json")
    try:
        config = QwenConfig.from_dict(data)  # first: refuses other models before their files
    except InputError as error:
        raise InputError(f"{folder}: {error}") from None
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise InputError(f"{folder}: config.json has a value of the wrong kind: {error}") from None
    generation = folder / "generation_config.json"
    generation_config = read_json(generation) if generation.exists() else {}
    return Checkpoint(folder, config, generation_config, read_headers(shard_files(folder)))


def read_json(file: Path) -> dict[str, Any]:
    """A JSON file that must hold an object."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(data, dict):
        raise InputError(f"{file} must hold a JSON object, not a {type(data).__name__}")
    return data


def shard_files(folder: Path) -> list[Path]:
    """The weight files: those the index names, or else the single model.safetensors. Never a blind glob."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        single = folder / "model.safetensors"
        if single.exists():
            return [single]
        if single.is_symlink():
            raise InputError(f"{single} is a link to a file that is gone; download the checkpoint again")
        found = sorted(p.name for p in folder.iterdir() if p.suffix in (".safetensors", ".bin", ".pth", ".pt", ".gguf"))
        hint = f"found only {shortlist(found)}" if found else "found no weight files at all"
        raise InputError(f"{folder} has neither model.safetensors nor model.safetensors.index.json; {hint}")

    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index} has no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise InputError(f"{index} names files outside its folder: {shortlist(outside)}")
    missing = [name for name in names if not (folder / name).is_file() or (folder / name).stat().st_size == 0]
    if missing:
        raise InputError(
            f"{folder} lacks {len(missing)} of {len(names)} shards: {shortlist(missing)}; "
            "they are missing or empty, as after an interrupted download"
        )
    return [folder / name for name in names]


def read_headers(files: list[Path]) -> dict[str, list[Stored]]:
    """Every tensor in these files, by the name of the parameter that it is for."""
    tensors = defaultdict(list)
    for file in files:
        try:
            with safe_open(file, framework="pt") as shard:
                for key in shard.keys():  # noqa: SIM118 (not a dict)
                    if key.endswith("rotary_emb.inv_freq"):
                        continue  # old files store the RoPE frequencies, which follow from the config
                    part = shard.get_slice(key)
                    tensors[parameter_name(key)].append(Stored(file, key, part.get_shape(), part.get_dtype()))
        except (SafetensorError, OSError) as error:
            size = file.stat().st_size
            raise InputError(
                f"{file} ({size:,} bytes) is not a whole safetensors file: {error}; "
                "perhaps a download that was cut off, or a git-lfs pointer"
            ) from None
    return tensors


def parameter_name(key: str) -> str:
    """Files of the bare backbone leave out `model.`; all others name our parameters as they are."""
    return f"model.{key}" if key.startswith(("embed_tokens.", "layers.", "norm.")) else key


def load_weights(
    model: Qwen, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, progress: bool = False
) -> None:
    """Fill a model that was built on the meta device, tensor by tensor, each exactly once.

    On the CPU a tensor that is stored in the wanted dtype is used memory-mapped: its pages are read when a
    product first touches them, and nothing is copied. Elsewhere, and when casting, the peak is the model
    plus one tensor.

    Raises:
        InputError: names, shapes or dtypes in the files do not fit the model; all of them are listed.
    """
    names_of: dict[Tensor, list[str]] = defaultdict(list)  # a tied head has two names for one parameter
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of[parameter].append(name)
    unfilled = {names[0]: names for names in names_of.values()}
    tensors = dict(checkpoint.tensors)
    if model.config.tie_word_embeddings:
        drop_head_copy(tensors)
    refuse_misfits(checkpoint.folder, tensors, {names[0]: list(p.shape) for p, names in names_of.items()})

    bar = tqdm(total=len(unfilled), desc="loading", unit="tensor", leave=False, delay=1, disable=not progress)
    for name, tensor in read_tensors(tensors, device, dtype):
        for alias in unfilled.pop(name):
            owner, _, attribute = alias.rpartition(".")
            setattr(model.get_submodule(owner), attribute, nn.Parameter(tensor.to(dtype), requires_grad=False))
        bar.update()
    bar.close()
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    if unfilled:
        raise RuntimeError(f"not loaded: {shortlist(unfilled)}")


def read_tensors(
    tensors: dict[str, list[Stored]], device: torch.device, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Walk the shards and put each tensor on its device, in the dtype it is stored in.

    A mapping keeps every page that was touched in memory until the last tensor cut from it is gone. Tensors that are
    used as they lie there share one; one that is about to be copied (to another device, or to `dtype`) gets its own,
    or the whole file would stay in memory beside the copies.
    """
    opened: Path | None = None
    shard: Any = None
    for name, (place, *_) in tensors.items():
        copied = device.type != "cpu" or dtype not in (None, FLOATS[place.dtype])
        if opened != place.file or copied:
            opened, shard = place.file, safe_open(place.file, framework="pt", device=str(device))
        yield name, shard.get_tensor(place.key)


def drop_head_copy(tensors: dict[str, list[Stored]]) -> None:
    """Some tools store a tied head a second time. An equal copy is harmless; another one is a contradiction."""
    head, embedding = tensors.get("lm_head.weight"), tensors.get("model.embed_tokens.weight")
    if not head or not embedding or not {head[0].dtype, embedding[0].dtype} <= FLOATS.keys():
        return
    (_, a), (_, b) = read_tensors({"embedding": embedding, "head": head}, torch.device("cpu"))
    if not torch.equal(a, b):
        raise InputError(
            f"config.json ties the head to the embedding, but {head[0].file} has an lm_head.weight that differs from it"
        )
    del tensors["lm_head.weight"]


def refuse_misfits(folder: Path, tensors: dict[str, list[Stored]], wanted: dict[str, list[int]]) -> None:
    """Hold what the files have against what the model needs, and report all that is wrong at once."""
    missing = [name for name in wanted if name not in tensors]
    if missing == ["lm_head.weight"]:
        raise InputError(
            f"{folder} has no lm_head.weight although config.json does not tie the head to the embedding; "
            "this looks like an embedding or backbone checkpoint, which cannot generate text"
        )
    unexpected = [name for name in tensors if name not in wanted]
    duplicate = [name for name, places in tensors.items() if len(places) > 1]
    misshapen = [
        f"{name} {places[0].shape} instead of {wanted[name]}"
        for name, places in tensors.items()
        if name in wanted and places[0].shape != wanted[name]
    ]
    not_float = [f"{name} {places[0].dtype}" for name, places in tensors.items() if places[0].dtype not in FLOATS]
    found = {
        "missing": missing,
        "unexpected": unexpected,
        "stored twice": duplicate,
        "of the wrong shape": misshapen,
        "of a quantised or other type without a place here": not_float,
    }
    report = "; ".join(f"{len(names)} {kind}: {shortlist(names)}" for kind, names in found.items() if names)
    if report:
        raise InputError(f"the weights in {folder} do not fit its config.json. {report}")


def shortlist(names: Any, most: int = 6) -> str:
    """`a, b, c and 17 more`: a readable part of a list that may be long."""
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
