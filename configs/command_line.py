"""Command line of train.py and of the scripts: every mistake is one line with the likely remedy."""

import argparse
import difflib
import functools
import importlib
import math
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from exit_codes import EXIT_BAD_INPUT, EXIT_FAILED

Main = Callable[..., int]
"""The main function of a script: it takes the command line, and returns the exit code."""


def at_least_one(text: str) -> int:
    """Parse a count of at least one.

    Raises:
        argparse.ArgumentTypeError: It is smaller, or not a whole number.
    """
    if not text.isdecimal() or (count := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text}: use a whole number of at least 1")
    return count


def above_zero(text: str) -> float:
    """Parse a number above zero.

    Raises:
        argparse.ArgumentTypeError: It is zero, negative, infinite or no number.
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: use a number above 0")
    return number


def on_disk(text: str) -> Path:
    """Parse a path of an output that is written to a disk.

    Raises:
        argparse.ArgumentTypeError: It is in a bucket.
    """
    if "://" in text:
        raise argparse.ArgumentTypeError(
            f"{text} is in a bucket; give a path on a disk, and copy the result"
        )
    return Path(text)


def one_line_errors(*failures: type[Exception]) -> Callable[[Main], Main]:
    """Return a decorator that prints known errors of a main function as one line.

    A ValueError is bad input. For errors of the types `failures` the function returns their
    `exit_code`, or EXIT_FAILED if they have none. Any other OSError is bad input too, except a
    BrokenPipeError, which `run_script` handles.
    """
    known: tuple[type[Exception], ...] = (*failures, ValueError, OSError)

    def decorate(main: Main) -> Main:
        @functools.wraps(main)
        def decorated(argv: Sequence[str] | None = None) -> int:
            try:
                return main(argv)
            except known as error:
                is_failure = isinstance(error, failures) and not isinstance(error, ValueError)
                if isinstance(error, BrokenPipeError) and not is_failure:
                    raise
                print(f"error: {error}", file=sys.stderr)
                return getattr(error, "exit_code", EXIT_FAILED) if is_failure else EXIT_BAD_INPUT

        return decorated

    return decorate


def run_script(main: Main, *, interrupted: str = "interrupted") -> NoReturn:
    """Run a script, and exit with its code.

    If the reader of stdout goes away, as with `| head`, the script ends at once and silently.
    Ctrl-C prints the line `interrupted`, and waits for no thread, such as one that compiles.
    """
    if hasattr(signal, "SIGPIPE"):  # not on Windows
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # libtpu ignores the signal
        os._exit(128 + signal.SIGPIPE)
    except KeyboardInterrupt:
        sys.stdout.flush()
        print(interrupted, file=sys.stderr, flush=True)
        os._exit(128 + signal.SIGINT)
    sys.exit(code)


class CommandLine(argparse.ArgumentParser):
    """A parser of options that takes no abbreviations; exits with code 2 for bad input.

    Options begin with `--`; `section.key=value` changes the configuration and has no dashes. With
    the library argcomplete, a shell completes options, their choices and file names.
    """

    def __init__(self, **settings: Any):
        super().__init__(**{"allow_abbrev": False, **settings})
        self._given: list[str] = []

    def add_overrides(
        self, example: str, what: str = "values that replace those of the file"
    ) -> None:
        """Add the positional arguments `overrides`, and say what they are, with an example.

        An example `data.key=value` says that only the section `data` is taken.
        """
        section = "data" if example.startswith("data.") else "section"
        text = f"{what}, such as {example}"
        self.add_argument("overrides", nargs="*", metavar=f"{section}.key=value", help=text)

    def parse_args(  # type: ignore[override]  # the overloads of the base class
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> argparse.Namespace:
        """Parse, or answer a shell that asks for completions."""
        self._complete()
        return super().parse_args(args, namespace)

    def parse_intermixed_args(  # type: ignore[override]  # the overloads of the base class
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> argparse.Namespace:
        """Parse options and positional arguments in any order, or answer a shell."""
        self._complete()
        return super().parse_intermixed_args(args, namespace)

    def parse_commands(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse a command line with subcommands, some of which take `overrides`, or answer a shell.

        Overrides may follow options, too: argparse leaves them over.
        """
        self._complete()
        args, rest = self.parse_known_args(argv)
        if rest and ("overrides" not in args or any(text.startswith("-") for text in rest)):
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        if rest:
            args.overrides += rest
        return args

    def _complete(self) -> None:
        """Write the completions and exit, if a shell has started the program to ask for them."""
        if "_ARGCOMPLETE" in os.environ:
            importlib.import_module("argcomplete").autocomplete(self)

    def parse_known_args(  # type: ignore[override]  # the overloads of the base class
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse; an unknown option is reported before one that is missing because of it."""
        self._given = given = list(sys.argv[1:] if args is None else args)
        if self._subparsers is None:  # otherwise the options are those of a command
            self._check_options(given)
        return super().parse_known_args(given, namespace)

    def _check_options(self, given: Sequence[str]) -> None:
        for text in given:
            if text == "--":
                return
            name = text.partition("=")[0]
            if not name.startswith("--") or name in self._option_string_actions or " " in name:
                continue  # argparse takes a text with spaces as a value
            if "." in name:
                key = text if "=" in text else f"{text}=VALUE"
                self.error(f"{name}: a key of the configuration has no dashes; write {key[2:]}")
            options = [option for option in self._option_string_actions if option[:2] == "--"]
            near = difflib.get_close_matches(name, options, n=1, cutoff=0.7)
            hint = f"did you mean {near[0]}?" if near else f"options: {', '.join(sorted(options))}"
            if not near and any(action.dest == "overrides" for action in self._actions):
                hint += "; keys of the configuration have no dashes, as training.steps=10"
            self.error(f"{name}: unknown option; {hint}")

    def error(self, message: str) -> NoReturn:
        """Print one line on stderr, and exit with code 2."""
        files = [text for text in self._given if text.endswith((".yaml", ".yml"))]
        if message.endswith("required: --config") and files:
            message += f"; write --config {files[0]}"
        self.exit(EXIT_BAD_INPUT, f"error: {message}; {self.prog} --help explains all options\n")
