"""What is no checkpoint for this package, recognised by its looks, each kind with its remedy."""

import json
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

# By the first bytes of a file that should be JSON or safetensors.
STARTS = {
    b"version https://git-lfs": "a git-lfs pointer, not the file itself; run `git lfs pull`, or download it again",
    b"GGUF": "a GGUF file under another name; take the checkpoint in safetensors",
    b"PK\x03\x04": "a pickle of torch.save under another name; take the checkpoint in safetensors",
    b"\x80": "a pickle under another name; take the checkpoint in safetensors",
    b"<": "a web page saved under that name; download it again",
}
# By the names of a folder's files, where it lacks the right ones.
FOLDERS = {
    "adapter_config.json": "an adapter{base}; merge it into that model first (peft: merge_and_unload), and save the result",
    "*.gguf": "GGUF weights, made for llama.cpp; take the checkpoint that they were made from, in safetensors",
    "*.onnx": "an ONNX export; take the checkpoint that it was made from, in safetensors",
    "*.npz": "MLX weights; take the checkpoint that they were made from, in safetensors",
    "*.msgpack": "Flax weights; save the model as safetensors (transformers: from_pretrained, save_pretrained)",
    "*.h5": "TensorFlow weights; save the model as safetensors (transformers: from_pretrained, save_pretrained)",
    **dict.fromkeys(
        ("*.bin", "*.pth", "*.pt", "*.pkl"),
        "pickles, which can run any program when they are opened and so never are; "
        "save the model as safetensors (transformers: from_pretrained, save_pretrained)",
    ),
}
# By config.json's model_type.
MODELS = {
    "moe": "a mixture of experts; take a dense one, such as Qwen3-8B",
    "vl": "a vision model; take a text one, such as Qwen3-8B",
    "omni": "a model of sound and vision; take a text one, such as Qwen3-8B",
    "audio": "an audio model; take a text one, such as Qwen3-8B",
    "asr": "an audio model; take a text one, such as Qwen3-8B",
    "next": "a hybrid with linear attention; take a plain one, such as Qwen3-8B",
    "5": "a hybrid with linear attention; take a plain one, such as Qwen3-8B",
}


def file_looks(file: Path) -> str:
    """What a file is that cannot be read as what it should be."""
    try:
        start = file.read_bytes()[:64].lstrip() if file.stat().st_size < 1 << 20 else file.open("rb").read(64)
    except OSError as error:
        return f"unreadable: {error.strerror}"
    if not start:
        return "empty; download it again"
    return next(
        (kind for mark, kind in STARTS.items() if start.startswith(mark)), "damaged or cut off; download it again"
    )


def folder_looks(folder: Path, names: list[str]) -> str | None:
    """What a folder with these files is, where it is of a known kind; None: it is not."""
    for pattern, kind in FOLDERS.items():
        found = [name for name in sorted(names) if fnmatch(name, pattern)]
        if found:
            return (
                f"{found[0]}: {kind.format(base=adapter_base(folder))}" if "{base}" in kind else f"{found[0]} is {kind}"
            )
    return None


def adapter_base(folder: Path) -> str:
    """` for Qwen/Qwen3-8B`, where the adapter says it."""
    try:
        return f" for {json.loads((folder / 'adapter_config.json').read_text())['base_model_name_or_path']}"
    except (OSError, ValueError, LookupError, TypeError):
        return ""


def model_looks(config: dict[str, Any]) -> str | None:
    """What kind of model another model_type is, where its name tells."""
    if "text_config" in config or "thinker_config" in config:
        return "a model of more than text; take a text one, such as Qwen3-8B"
    words = str(config.get("model_type")).split("_")
    return next((kind for word, kind in MODELS.items() if word in words), None)
