"""`python -m qwen_scratch.trace`: one inference, stage by stage, with its real numbers; or the anatomy of a model alone."""

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from qwen_scratch import cli
from qwen_scratch.errors import InputError


def build_parser() -> argparse.ArgumentParser:
    parser = cli.Parser(
        prog="python -m qwen_scratch.trace",
        description="Walk one inference through the code that is read, and show every stage's real numbers.",
        allow_abbrev=False,
    )
    cli.add_prompt_options(parser)
    cli.add_template_options(parser)
    cli.add_model_options(parser)
    group = parser.add_argument_group("trace")
    group.add_argument("--layer", type=int, metavar="N", default=0, help="the one to look into, from 0; -1 is the last")
    group.add_argument("--steps", type=int, metavar="N", default=8, help="tokens to make; default: 8")
    group.add_argument(
        "--html", metavar="FILE", type=Path, help="write a page with all numbers and maps of them; needs plotly"
    )
    group.add_argument(
        "--json", metavar="FILE", type=Path, help="write all numbers here as JSON, also those of the page"
    )
    group.add_argument("--quiet", action="store_true", help="nothing on the terminal but errors")
    group = parser.add_argument_group("anatomy, without weights or a prompt")
    group.add_argument(
        "--config-only",
        metavar="REF",
        help="a checkpoint folder, a hub id or a published size, qwen2.5-0.5b to qwen2.5-72b and qwen3-0.6b to qwen3-32b",
    )
    group.add_argument("--device-memory", metavar="SIZE", help="24GiB, say: the longest context that fits in it")
    return parser


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    check_files(args)
    if args.config_only is not None:
        return show_anatomy(args)
    if args.device_memory is not None:
        raise InputError("--device-memory belongs to --config-only")
    if not 1 <= args.steps <= 10_000:
        raise InputError(f"--steps must be from 1 to 10,000, not {args.steps}")
    if args.quantize:
        raise InputError("a trace shows the model as it is read; it cannot be quantised")
    args.exact = True
    prompt = cli.read_prompt(args)
    tools = cli.read_tools(args.tools)
    model, tokenizer, source = cli.load_from_options(args)
    L = model.config.num_hidden_layers
    if not -L <= args.layer < L:
        raise InputError(f"--layer must be from 0 to {L - 1}, or from -1 down to -{L}; this model has {L} layers")

    from qwen_scratch import output
    from qwen_scratch.completion import stream
    from qwen_scratch.maps import maps
    from qwen_scratch.sampling import SamplingParams
    from qwen_scratch.transcript import as_json, page, transcript
    from qwen_scratch.walk import walk

    if not args.raw:
        tokenizer.require_template()
    prepared = stream(
        model, tokenizer, prompt, SamplingParams(max_new_tokens=args.steps), raw=args.raw, system=args.system,
        thinking=args.thinking, tools=tools, literal_specials=args.literal_specials, max_context=args.max_context,
        truncate=args.truncate,
    ).result  # fmt: skip
    steps = prepared.request.max_new_tokens
    about = {"model": str(source), "dtype": str(model.dtype).removeprefix("torch."), "device": str(model.device)}
    numbers = about | walk(model, tokenizer, prepared, args.layer, steps)
    if importlib.util.find_spec("transformers"):
        numbers["checks"] |= ask_reference(source.folder, model, prepared.prompt_ids, numbers["decode"]["steps"])
    if args.html or args.json:
        numbers["maps"] = maps(model, tokenizer, prepared.prompt_ids)
    if not args.quiet:
        print(output.model_line(source, model), *prepared.notices, sep="\n", file=sys.stderr)
        print(transcript(numbers))
    if args.html:
        args.html.write_text(page(numbers), encoding="utf-8")
    if args.json:
        args.json.write_text(as_json(numbers) + "\n", encoding="utf-8")
    return cli.ANSWERED


def check_files(args: argparse.Namespace) -> None:
    """What would fail at the end of the work fails before it."""
    for file in (args.html, args.json):
        if file is not None and (file.is_dir() or not file.parent.is_dir()):
            raise InputError(f"{file} cannot be written: {'it is a' if file.is_dir() else 'there is no such'} folder")
    if args.html is not None and args.html == args.json:
        raise InputError("--html and --json name the same file")
    if args.html is not None and args.config_only is not None:
        raise InputError("--html shows an inference, which --config-only does not make")
    if args.html is not None and importlib.util.find_spec("plotly") is None:
        raise InputError("--html draws with plotly, which is not installed: pip install plotly")


def ask_reference(folder: Path, model: Any, ids: list[int], steps: list[dict[str, Any]]) -> dict[str, bool]:
    """Whether transformers makes the same tokens."""
    from qwen_scratch.reference import Reference

    made = [step["token_id"] for step in steps]
    return {
        "equal_to_reference": Reference(folder, model.dtype, str(model.device)).generate(ids, len(made))[: len(made)]
        == made
    }


def show_anatomy(args: argparse.Namespace) -> int:
    from qwen_scratch import anatomy
    from qwen_scratch.config import read_dtype
    from qwen_scratch.files import read_config
    from qwen_scratch.source import find

    config = anatomy.published(args.config_only)
    if config is None:
        config = read_config(find(args.config_only, args.revision, weights=False).folder)
    dtype = read_dtype(args.dtype) if args.dtype != "auto" else config.dtype
    memory = anatomy.read_size(args.device_memory) if args.device_memory is not None else None
    report = anatomy.anatomy(config, dtype or read_dtype("bfloat16"), memory)  # type: ignore[arg-type]
    if not args.quiet:
        print(anatomy.table(args.config_only, report))
    if args.json:
        args.json.write_text(json.dumps(report) + "\n", encoding="utf-8")
    return cli.ANSWERED


if __name__ == "__main__":
    sys.exit(cli.run_command("trace", main))
