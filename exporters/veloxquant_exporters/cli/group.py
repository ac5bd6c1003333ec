"""The click group of `vqmon`: loads the one command that is asked for, and ends it in one way."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from io import TextIOWrapper
from typing import Any

import click

from veloxquant_exporters import __version__
from veloxquant_exporters.cli.commands import COMMANDS
from veloxquant_exporters.interrupts import Interrupts
from veloxquant_exporters.missing import explain

__all__ = ["CLOSED_PIPE", "INTERRUPTED", "run", "vqmon"]

# What shells report of a command that Ctrl-C ended, or the end of the pipe that it wrote to.
INTERRUPTED = 130
CLOSED_PIPE = 141


class MissingLibraryError(click.ClickException):
    """A library that an extra would bring is missing."""

    exit_code = 2


class ClosedPipeError(Exception):
    """What reads the output went away. No OSError: click would take it for code 1."""


class LazyGroup(click.Group):
    """Knows its commands from the table `COMMANDS`, and loads the one that runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The loaded command, or None when there is none of this name."""
        if cmd_name not in COMMANDS:
            return None
        with _explained(cmd_name):
            command: click.Command = import_module(COMMANDS[cmd_name].module).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without loading one."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.help) for name, entry in COMMANDS.items()])

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        """Parse the command line, which prints the help if it asks for it."""
        with _pipe_told():
            return super().make_context(*args, **options)

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; a library that it cannot import ends in one line."""
        try:
            with _pipe_told():
                return super().invoke(ctx)
        except ImportError as error:
            with _explained(ctx.invoked_subcommand):
                raise error  # noqa: TRY201 - by name: raised anew inside the block


@contextmanager
def _pipe_told() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as error:
        raise ClosedPipeError from error


@contextmanager
def _explained(name: str | None) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        entry = COMMANDS.get(name or "")
        line = explain(error, f"vqmon {name}", entry.extras) if entry else None
        if line is None:
            raise
        raise MissingLibraryError(line) from error


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="vqmon")
def vqmon() -> None:
    """Watch the KV-cache block pools of MLX model servers.

    \b
    Example: vqmon demo --once              what it looks like
    Example: vqmon doctor                   is all as it should be, and if not, what to do
    Example: vqmon COMMAND --help           options and examples of a command
    Example: eval "$(vqmon completion bash)"
    """  # noqa: D301 - \b is click's mark for lines that stay as they are


def run(args: Sequence[str] | None) -> int:
    """Run the command line and return the exit code, as `veloxquant_exporters.cli` lists them.

    A command's return value, if an int, is its exit code. A function is called at the end, outside
    of all that is done here: what it raises and writes is its own.
    """
    try:
        with _any_text(), Interrupts() as interrupts, _kept(interrupts):
            code = _run(args, interrupts)
    except KeyboardInterrupt:  # before click, or after it
        return INTERRUPTED
    if callable(code):
        code = code()
    return code if isinstance(code, int) else 0


@contextmanager
def _kept(interrupts: Interrupts) -> Iterator[None]:
    """An exception after Ctrl-C is what a library made of that."""
    try:
        yield
    except Exception as error:
        if interrupts.came:
            raise KeyboardInterrupt from error
        raise


@contextmanager
def _any_text() -> Iterator[None]:
    """Names of files and pools need not be fit for the terminal's encoding: escape what is not."""
    before: list[tuple[TextIOWrapper, str]] = []
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # not what a caller put there
            before.append((stream, stream.errors or "strict"))
            stream.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        for stream, errors in before:
            with suppress(ValueError, OSError):  # closed meanwhile, or what it holds goes nowhere
                stream.reconfigure(errors=errors)


def _run(args: Sequence[str] | None, interrupts: Interrupts) -> object:
    """What the command returned, or the exit code of how it ended; a fault of ours is raised."""
    color = False if os.environ.get("NO_COLOR") else None
    try:
        value = vqmon.main(args, prog_name="vqmon", standalone_mode=False, color=color)
        if sys.stdout is not None:
            sys.stdout.flush()  # while a failure can still be told
    except click.ClickException as error:
        if interrupts.came:
            raise
        _settle_output()
        error.show()
        return error.exit_code
    except click.Abort:
        return INTERRUPTED
    except (ClosedPipeError, BrokenPipeError):
        _settle_output()
        return CLOSED_PIPE
    except OSError as error:
        _settle_output()
        click.echo(f"Error: {_said(error)}", err=True)
        return 1
    return value


def _settle_output() -> None:
    """Write what is buffered; what cannot be written goes, or the interpreter tries it again."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)


def _said(error: OSError) -> str:
    """The fault of the system in one line, with the file it is about."""
    text = error.strerror or str(error) or type(error).__name__
    if error.filename is None:
        return text
    name = os.fsdecode(error.filename) if isinstance(error.filename, bytes) else error.filename
    return f"{name}: {text}"
