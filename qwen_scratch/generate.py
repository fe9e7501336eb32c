"""Answer one prompt: `python -m qwen_scratch.generate "..." --model FOLDER`."""

import argparse
import sys
from time import perf_counter

from qwen_scratch import cli
from qwen_scratch.errors import InputError


def build_parser() -> argparse.ArgumentParser:
    parser = cli.Parser(
        prog="python -m qwen_scratch.generate",
        description="Answer a prompt. The answer goes to stdout; thinking, model and speeds go to stderr.",
        epilog="Exit codes: 0 answered, 1 the run failed, 2 wrong input or options, 130 interrupted.",
        allow_abbrev=False,
    )
    cli.add_prompt_options(parser)
    cli.add_template_options(parser)
    cli.add_model_options(parser)
    cli.add_sampling_options(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--hide-thinking", action="store_true", help="do not show the thinking (it stays in the JSON)")
    group.add_argument("--json", action="store_true", help="one JSON object instead of the stream")
    group.add_argument(
        "--logprobs", type=int, metavar="N", help="with --json: each token's log probability and the N likeliest"
    )
    group.add_argument("--quiet", action="store_true", help="nothing but the answer and errors")
    return parser


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    prompt = cli.read_prompt(args)
    tools = cli.read_tools(args.tools)
    if args.logprobs is not None and not args.json:
        raise InputError("--logprobs shows only with --json; give both")
    params = cli.sampling_params(args, args.logprobs)

    start = perf_counter()
    model, tokenizer, source = cli.load_from_options(args)
    load_s = perf_counter() - start

    from qwen_scratch import output
    from qwen_scratch.completion import stream

    if not args.raw:
        tokenizer.require_template()  # where there is none, a command must not guess what was meant
    running = stream(
        model,
        tokenizer,
        prompt,
        params,
        raw=args.raw,
        system=args.system,
        thinking=args.thinking,
        tools=tools,
        literal_specials=args.literal_specials,
        max_context=args.max_context,
        truncate=args.truncate,
    )
    running.progress = sys.stderr.isatty() and not args.quiet
    result = running.result
    if not args.quiet:
        for line in (
            output.model_line(source, model, result.kv_cache_bytes),
            output.sampling_line(result.sampling),
            *result.notices,
        ):
            print(line, file=sys.stderr)
    code = (
        output.drain(running)
        if args.json
        else output.print_stream(running, show_thinking=not (args.quiet or args.hide_thinking))
    )
    if args.json:
        print(output.result_json(source, prompt, model, tokenizer, result, load_s))
    if not args.quiet:
        print(output.speed_line(result), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(cli.run_command("generate", main))
