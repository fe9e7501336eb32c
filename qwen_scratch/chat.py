"""Talk with a model in the terminal: `python -m qwen_scratch.chat --model FOLDER`."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from qwen_scratch import cli
from qwen_scratch.errors import InputError

if TYPE_CHECKING:
    from qwen_scratch.completion import Stream
    from qwen_scratch.conversation import Conversation

COMMANDS = """\
/system [TEXT]  set the system turn; without TEXT back to the template's own
/think          let the model think first        /nothink  have it answer at once
/retry          answer the last question again   /reset    forget all turns
/save FILE      keep the conversation as JSON    /load FILE  go on with one
/help           show this                        /quit     leave, as Ctrl-D does
Ctrl-C stops an answer. A message that begins with / is sent with a second one: //"""


def build_parser() -> argparse.ArgumentParser:
    parser = cli.Parser(
        prog="python -m qwen_scratch.chat",
        description="A conversation in the terminal. Answers go to stdout; thinking, model and speeds go to stderr.",
        epilog=COMMANDS + "\n\nExit codes: 0 left, 1 a run failed, 2 wrong input or options, 130 interrupted.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    cli.add_template_options(parser)
    cli.add_model_options(parser)
    cli.add_sampling_options(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--hide-thinking", action="store_true", help="do not show the thinking")
    group.add_argument("--quiet", action="store_true", help="nothing but answers and errors")
    return parser


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    params = cli.sampling_params(args)
    if sys.stdin is None:
        raise InputError("standard input is closed; there is nobody to talk with")
    sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]  # bad bytes are an error like others
    model, tokenizer, source = cli.load_from_options(args)

    from qwen_scratch import output
    from qwen_scratch.conversation import Conversation

    conversation = Conversation(
        model,
        tokenizer,
        params,
        system=args.system,
        thinking=args.thinking,
        literal_specials=args.literal_specials,
        max_context=args.max_context,
    )
    chat = Chat(conversation, args.quiet, args.hide_thinking)
    chat.tell(output.model_line(source, model))
    chat.tell(output.sampling_line(conversation.sampling))
    with output.interrupts_raised():
        return chat.run()


class Chat:
    """Reads lines, runs commands, prints answers. The conversation itself knows nothing of terminals."""

    def __init__(self, conversation: "Conversation", quiet: bool, hide_thinking: bool) -> None:
        self.conversation = conversation
        self.quiet = quiet
        self.show_thinking = not (quiet or hide_thinking)
        self.somebody_is_there = sys.stdin.isatty()
        self.own_files: set[Path] = set()  # saved or loaded here: these may be written again
        self.commands: dict[str, Callable[[str], None]] = {
            "/system": self.set_system,
            "/think": lambda _: self.set_thinking(True),
            "/nothink": lambda _: self.set_thinking(False),
            "/retry": self.retry,
            "/reset": self.reset,
            "/save": self.save,
            "/load": self.load,
            "/help": lambda _: print(COMMANDS, file=sys.stderr),
        }

    def run(self) -> int:
        """Until /quit or the end of the input; returns the exit code."""
        if self.somebody_is_there:
            with contextlib.suppress(ImportError):  # gives `input` line editing and a history; not on every system
                import readline  # noqa: F401
            self.tell("/help lists the commands")
        while True:
            try:
                line = self.read()
                if line is None or line.split()[:1] == ["/quit"]:
                    return cli.ANSWERED
                self.take(line)
            except KeyboardInterrupt:
                if not self.somebody_is_there:
                    return cli.INTERRUPTED
                print("\n/quit or Ctrl-D leaves", file=sys.stderr)
            except BrokenPipeError:
                raise
            except (InputError, RuntimeError, MemoryError, OSError) as error:
                if not self.somebody_is_there:
                    raise
                print(f"error: {cli.one_line(error)}", file=sys.stderr)

    def read(self) -> str | None:
        """The next line of input; None at its end."""
        prompt = "> " if self.somebody_is_there else ""
        if not sys.stdout.isatty():  # `input` would put the prompt among the answers
            print(prompt, end="", file=sys.stderr, flush=True)
            prompt = ""
        try:
            return input(prompt).removeprefix("\ufeff")  # some editors begin a file with a byte-order mark
        except EOFError:
            if self.somebody_is_there:
                print(file=sys.stderr)
            return None

    def take(self, line: str) -> None:
        """One line of input: a command or a user turn."""
        if not line.startswith("/") or line.startswith("//"):
            if line.strip():
                self.show(self.conversation.ask(line.removeprefix("/")))
            return
        name, _, rest = line.partition(" ")
        if name not in self.commands:
            raise InputError(f"there is no command {name} (/help lists them; // sends a line that begins with /)")
        self.commands[name](rest.strip())

    def show(self, running: "Stream") -> None:
        from qwen_scratch import output

        for notice in running.result.notices:
            self.tell(notice)
        result = running.result
        running.progress = sys.stderr.isatty()
        try:
            code = output.print_stream(running, self.show_thinking)
        finally:
            if not result.token_ids:  # broken off or failed before anything was said
                self.conversation.withdraw()
        if code == cli.INTERRUPTED and not self.somebody_is_there:
            raise KeyboardInterrupt
        if not result.token_ids:
            self.tell("nothing was said yet; your question is taken back")
            return
        seed = f", seed {result.sampling['seed']}" if result.sampling["seed"] is not None else ""
        self.tell(f"[{output.speed_line(result)}{seed}]")

    def set_system(self, text: str) -> None:
        self.conversation.system = text or None
        self.tell("system turn set" if text else "system turn: the template's own")

    def set_thinking(self, on: bool) -> None:
        if "enable_thinking" not in (self.conversation.tokenizer.template or ""):
            raise InputError("this checkpoint's template has no switch for thinking")
        self.conversation.thinking = on
        self.tell(f"thinking {'on' if on else 'off'}")

    def retry(self, _: str) -> None:
        if self.conversation.sampling["temperature"] == 0:
            self.tell("greedy: the answer will be the same; --temperature 0.7, say, would vary it")
        self.show(self.conversation.retry())

    def reset(self, _: str) -> None:
        self.conversation.start([])
        self.tell("all turns forgotten")

    def save(self, name: str) -> None:
        """Write what --messages reads. A file that this conversation knows nothing of is not overwritten."""
        file = named_file(name)
        if file.exists() and file not in self.own_files:
            raise InputError(f"{file} exists; save under another name")
        messages = self.conversation.messages
        if not messages:
            raise InputError("nothing has been said that could be saved")
        part = file.with_name(f"{file.name}.{os.getpid()}.part")  # whole or not at all
        try:
            part.write_text(
                json.dumps(messages, ensure_ascii=False, indent=1) + "\n", encoding="utf-8", errors="replace"
            )
            part.replace(file)
        except OSError as error:
            raise InputError(f"{file} cannot be written: {error.strerror}") from None
        finally:
            with contextlib.suppress(OSError):
                part.unlink()
        self.own_files.add(file)
        self.tell(f"{len(messages)} messages saved to {file}")

    def load(self, name: str) -> None:
        file = named_file(name)
        self.conversation.start(cli.read_messages(str(file)))
        self.own_files.add(file)
        messages = self.conversation.messages
        system = "" if self.conversation.system is not None else ", without a system turn"
        hint = "; the last one is yours: /retry answers it" if messages[-1]["role"] == "user" else ""
        self.tell(f"{len(messages)} messages loaded from {file}{system}{hint}")

    def tell(self, text: str) -> None:
        from qwen_scratch import output

        if not self.quiet:
            print(output.dimmed(text), file=sys.stderr, flush=True)


def named_file(name: str) -> Path:
    if not name or "\0" in name:
        raise InputError("say which file")
    return Path(name).expanduser().absolute()


if __name__ == "__main__":
    sys.exit(cli.run_command("chat", main))
