"""Would it load? `python -m qwen_scratch.check REF` reads only headers and small files, also of a checkpoint on the hub."""

import argparse
import json
import sys
import warnings
from typing import Any

from qwen_scratch import cli
from qwen_scratch.checkpoint import FLOATS, Checkpoint, has_second_head, open_checkpoint, refuse_misfits
from qwen_scratch.completion import eos_ids
from qwen_scratch.config import DTYPES
from qwen_scratch.files import present
from qwen_scratch.loading import shapes_only
from qwen_scratch.sampling import Sampler, SamplingParams
from qwen_scratch.source import Source, find, remote_headers
from qwen_scratch.text import Tokenizer


def build_parser() -> argparse.ArgumentParser:
    parser = cli.Parser(
        prog="python -m qwen_scratch.check",
        description="Say whether a checkpoint would load, and what it is and needs; no weights are read or downloaded. "
        "A weight file on the hub that is cut off shows only once it is here.",
        epilog="Exit codes: 0 it would load, 1 the hub cannot be reached, 2 it would not load.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "ref", nargs="?", metavar="REF", help="a checkpoint folder or a hub id; default: the bundled demo"
    )
    parser.add_argument("--revision", metavar="R", help="a branch, tag or commit on the hub")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    return parser


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    source = find(args.ref, args.revision, weights=False)
    checkpoint = open_checkpoint(source.folder, remote_headers(source))
    if has_second_head(checkpoint):
        warnings.warn(
            "a head is stored beside the embedding that it is tied to; if it is no copy, it is not tied", stacklevel=1
        )
        del checkpoint.tensors["lm_head.weight"]
    model = shapes_only(checkpoint.config)
    refuse_misfits(checkpoint, model)
    model.generation_config = checkpoint.generation_config
    Sampler(SamplingParams(), model.generation_config)  # refuse what a run would refuse
    eos_ids(model)
    report = describe(source, checkpoint)
    print(json.dumps(report) if args.json else table(report))
    return cli.ANSWERED


def describe(source: Source, checkpoint: Checkpoint) -> dict[str, Any]:
    """What there is to know without the weights. Memory is in MiB."""
    config = checkpoint.config
    places = [place for places in checkpoint.tensors.values() for place in places]
    text = "no tokenizer.json, so only token ids (load_model)"
    if present(source.folder / "tokenizer.json"):
        tokenizer = Tokenizer(source.folder)
        tokenizer.check_template()
        text = "a tokenizer" + (
            " and a chat template" if tokenizer.template else ", but no chat template: generate --raw"
        )
    return {
        "model": source.ref,
        "revision": source.revision,
        "model_type": config.model_type,
        "layers": config.num_hidden_layers,
        "parameters": config.num_parameters,
        "context_length": config.context_length,
        "files": len({place.file for place in places}),
        "stored_dtypes": sorted({str(FLOATS[place.dtype]).removeprefix("torch.") for place in places}),
        "dtype": str(checkpoint.dtype).removeprefix("torch."),
        "text": text,
        "weights_mib": {name: config.num_parameters * dtype.itemsize / 2**20 for name, dtype in DTYPES.items()},
        "kv_cache_mib_per_1000_tokens": config.kv_bytes_per_token(checkpoint.dtype) * 1000 / 2**20,
        "kv_cache_mib_at_full_context": config.kv_bytes_per_token(checkpoint.dtype) * config.context_length / 2**20,
    }


def table(report: dict[str, Any]) -> str:
    revision = f" (hub, commit {report['revision'][:8]})" if report["revision"] else ""
    weights = ", ".join(f"{size:,.0f} MiB in {name}" for name, size in report["weights_mib"].items())
    return f"""\
{report["model"]}{revision} would load
  model     {report["model_type"]}, {report["layers"]} layers, {report["parameters"]:,} parameters
  stored    {", ".join(report["stored_dtypes"])} in {report["files"]} file{"s" * (report["files"] > 1)}; runs in {report["dtype"]}
  text      {report["text"]}
  memory    weights {weights};
            KV cache in {report["dtype"]}: {report["kv_cache_mib_per_1000_tokens"]:,.1f} MiB per 1,000 tokens, \
{report["kv_cache_mib_at_full_context"]:,.0f} MiB at the full context of {report["context_length"]:,}"""


if __name__ == "__main__":
    sys.exit(cli.run_command("check", main))
