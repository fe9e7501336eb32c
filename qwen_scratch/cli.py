"""What the commands share: options, one-line errors, exit codes. torch is imported only once options are read."""

import argparse
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from qwen_scratch.errors import InputError

if TYPE_CHECKING:
    from qwen_scratch.model import Qwen
    from qwen_scratch.sampling import SamplingParams
    from qwen_scratch.source import Source
    from qwen_scratch.text import Tokenizer

ANSWERED, FAILED, WRONG_INPUT, INTERRUPTED = 0, 1, 2, 130  # exit codes


def run_command(name: str, main: Callable[[list[str]], int]) -> int:
    """Run a command's main: every expected failure becomes one line on stderr and an exit code, without a traceback."""

    def leave(*_: Any) -> None:
        os.write(2, f"{name}: interrupted\n".encode())
        os._exit(INTERRUPTED)

    # Ctrl-C while importing or loading ends the process here and now: an exception could be swallowed by an import.
    # A process that was started deaf to it stays so.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, leave)
    for pipe in ("stdout", "stderr"):
        if getattr(sys, pipe) is None:  # closed by whoever started us
            setattr(sys, pipe, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (for as long as we live)
        getattr(sys, pipe).reconfigure(errors="replace")  # a console that cannot show a character gets a substitute
    # Worth knowing, but no failure: a head that is not tied, an adapter that is ignored.
    warnings.showwarning = lambda message, *_, **__: print(f"{name}: note: {message}", file=sys.stderr)
    try:
        return main(sys.argv[1:])
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it flushes at exit
        return ANSWERED
    except InputError as error:  # any other ValueError is a fault of ours, and its traceback wanted
        print(f"{name}: error: {one_line(error)}", file=sys.stderr)
        return WRONG_INPUT
    except (RuntimeError, MemoryError, OSError) as error:
        print(f"{name}: failed: {one_line(error)}", file=sys.stderr)
        return FAILED


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class Parser(argparse.ArgumentParser):
    """Wrong options are reported like any other wrong input, without the usage in front."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (see --help)")


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompt",
        nargs="?",
        metavar="PROMPT",
        help="a user turn where the checkpoint has a chat template; - reads stdin",
    )
    parser.add_argument("--prompt-file", metavar="F", help="read the prompt from a file")
    parser.add_argument("--messages", metavar="FILE.json", help="a whole conversation: a list of {role, content}")
    parser.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")
    parser.add_argument(
        "--truncate",
        action="store_true",
        help="cut the beginning of a prompt that does not fit, instead of refusing it",
    )
    parser.add_argument("--tools", metavar="FILE.json", help="functions the model may call, handed to the template")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model", metavar="REF", help="a checkpoint folder or a hub id, Qwen/Qwen3-0.6B say; default: the bundled demo"
    )
    group.add_argument("--revision", metavar="R", help="a branch, tag or commit on the hub")
    group.add_argument("--device", default="auto", help="cpu, cuda, cuda:N, mps; default: the best that is there")
    group.add_argument(
        "--dtype",
        default="auto",
        help="float32, bfloat16, float16; default: the checkpoint's, or float32 where the CPU lacks bfloat16",
    )
    group.add_argument(
        "--exact",
        action="store_true",
        help="the path that equals the reference bit for bit; the default is close to it and quicker",
    )
    group.add_argument(
        "--quantize", metavar="WIDTH", help="hold the weights as int8, int4 or int4-128 (groups of 64 or 128); on a CPU"
    )
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads; default: torch's choice")
    group.add_argument(
        "--max-context", type=int, metavar="N", help="fewer positions than the model has, to bound the cache"
    )


def add_template_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("chat template")
    group.add_argument(
        "--system", metavar="TEXT", help='system turn; "" is an empty one, left out is the template\'s own'
    )
    thinking = group.add_mutually_exclusive_group()
    thinking.add_argument(
        "--thinking", action="store_true", default=None, help="the template's switch, for models that have one"
    )
    thinking.add_argument(
        "--no-thinking", action="store_false", dest="thinking", help="have the template close thinking at once"
    )
    group.add_argument(
        "--literal-specials",
        action="store_true",
        help="what the prompt spells like a control token, <|im_end|> say, is plain text; default: that token",
    )


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling (what is not given comes from generation_config.json, else greedy)")
    group.add_argument("--max-new-tokens", type=int, metavar="N", help="default: 512")
    group.add_argument(
        "--greedy",
        action="store_true",
        help="always the most likely token; Qwen3's thinking tends to go round in circles with it",
    )
    group.add_argument("--temperature", type=float, metavar="X", help="0 is greedy, below 1 sharper, above 1 flatter")
    group.add_argument(
        "--top-k", type=int, metavar="N", help="only the N most likely tokens; 0: all; default when sampling: 50"
    )
    group.add_argument(
        "--top-p", type=float, metavar="X", help="only the likeliest tokens that make up this probability"
    )
    group.add_argument("--min-p", type=float, metavar="X", help="only tokens at least this share as likely as the best")
    group.add_argument(
        "--repetition-penalty", type=float, metavar="X", help="above 1 weakens tokens already in the text"
    )
    group.add_argument(
        "--presence-penalty", type=float, metavar="X", help="subtracted from tokens already in the answer"
    )
    group.add_argument("--seed", type=int, metavar="N", help="repeat a run; default: a fresh one, which is reported")
    group.add_argument(
        "--stop", metavar="TEXT", action="append", default=[], help="stop where the answer says this; repeatable"
    )
    group.add_argument(
        "--stop-token-id", type=int, metavar="N", action="append", default=[], help="stop here too; repeatable"
    )
    group.add_argument("--ignore-eos", action="store_true", help="run on past the model's own stop ids")


def sampling_params(args: argparse.Namespace, logprobs: int | None = None) -> "SamplingParams":
    from qwen_scratch.sampling import SamplingParams

    if args.greedy:
        for name in ("temperature", "top_k", "top_p", "min_p"):
            if getattr(args, name) is not None:
                raise InputError(f"--greedy and --{name.replace('_', '-')} contradict each other; give one")
        args.temperature = 0.0
    return SamplingParams(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        seed=args.seed,
        stop=tuple(args.stop),
        stop_token_ids=tuple(args.stop_token_id),
        ignore_eos=args.ignore_eos,
        logprobs=logprobs,
    )


def load_from_options(args: argparse.Namespace) -> "tuple[Qwen, Tokenizer, Source]":
    """Load what --model names, with a progress bar where somebody watches."""
    import torch

    from qwen_scratch.loading import load

    if args.threads is not None:
        if not 1 <= args.threads <= 1024:
            raise InputError(f"--threads must be from 1 to 1024, not {args.threads}")
        torch.set_num_threads(args.threads)
    source = find_from_options(args)
    model, tokenizer = load(
        source.folder,
        device=args.device,
        dtype=args.dtype,
        exact=args.exact,
        quantize=args.quantize,
        progress=sys.stderr.isatty() and not args.quiet,
    )
    if args.threads is None and model.config.num_parameters < 10_000_000:
        torch.set_num_threads(1)  # so small a model gains nothing from more, and beside other programs loses much
    return model, tokenizer, source


def find_from_options(args: argparse.Namespace) -> "Source":
    """Where the checkpoint lies that --model and --revision name, downloaded if need be."""
    from qwen_scratch.source import find

    if args.quiet:
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    if args.model is None and not args.quiet:
        print(
            "no --model given: this is the bundled demo, which calculates and tells small stories. "
            "For a real one: --model Qwen/Qwen3-0.6B",
            file=sys.stderr,
        )
    return find(args.model, args.revision)


def read_prompt(args: argparse.Namespace) -> Any:
    """The one prompt that the options give: text, or a list of messages."""
    given = [args.prompt is not None, args.prompt_file is not None, args.messages is not None]
    if sum(given) != 1:
        raise InputError(
            f"give {'one prompt only' if any(given) else 'a prompt'}: as text, as - for standard input, "
            "with --prompt-file or with --messages"
        )
    if args.messages is not None:
        return read_messages(args.messages)
    if args.prompt is not None and args.prompt != "-":
        return args.prompt
    text = read_file(args.prompt_file) if args.prompt_file is not None else read_stdin()
    # A text file ends in a line break that is nobody's question.
    return text if args.raw else text.removesuffix("\n").removesuffix("\r")


def read_messages(path: str) -> list[dict[str, Any]]:
    """A conversation from a JSON file: a list of messages, or an object around one."""
    messages = read_json_file(path)
    if isinstance(messages, dict):
        messages = messages.get("messages")
    if not isinstance(messages, list) or not messages or any(isinstance(turn, int) for turn in messages):
        raise InputError(f"{path} must hold a list of messages, each with role and content")
    return messages


def read_tools(path: str | None) -> list[dict[str, Any]] | None:
    """--tools: a list of JSON schemas, as chat templates take them."""
    if path is None:
        return None
    tools = read_json_file(path)
    if not isinstance(tools, list) or not tools or not all(isinstance(tool, dict) for tool in tools):
        raise InputError(f"{path} must hold a list of tools, each a JSON schema of a function")
    return tools


def read_json_file(path: str) -> Any:
    try:
        return json.loads(read_file(path))
    except RecursionError:
        raise InputError(f"{path} is not JSON: too deeply nested") from None
    except ValueError as error:  # a JSONDecodeError, or a number too long to be read
        raise InputError(f"{path} is not JSON: {error}") from None


def read_stdin() -> str:
    if sys.stdin is None:
        raise InputError("standard input is closed; give the prompt in another way")
    return decoded(sys.stdin.buffer.read(), "standard input")


def read_file(path: str) -> str:
    try:
        return decoded(Path(path).read_bytes(), path)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


def decoded(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8-sig")  # some editors put a byte-order mark in front
    except UnicodeDecodeError as error:
        raise InputError(f"{source} is not UTF-8 text (byte {error.start})") from None
