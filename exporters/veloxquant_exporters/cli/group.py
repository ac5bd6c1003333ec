"""The click group of `vqmon`: loads the one command that is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module

import click

from veloxquant_exporters import __version__
from veloxquant_exporters.cli.commands import COMMANDS
from veloxquant_exporters.cli.missing import explain

__all__ = ["run", "vqmon"]

INTERRUPTED = 130  # what shells report of a command that Ctrl-C ended


class MissingLibraryError(click.ClickException):
    """A library that an extra would bring is missing."""

    exit_code = 2


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

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; a library that it cannot import ends in one line."""
        try:
            return super().invoke(ctx)
        except ImportError as error:
            with _explained(ctx.invoked_subcommand):
                raise error  # noqa: TRY201 - by name: raised anew inside the block


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
    """Watch the KV-cache block pools of MLX model servers."""


def run(args: Sequence[str] | None) -> int:
    """Run the command line and return the exit code, as `veloxquant_exporters.cli` lists them.

    A command's return value, if an int, is its exit code. A function is called first: what it raises
    is not for click to catch.
    """
    try:
        code = vqmon.main(args, prog_name="vqmon", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return INTERRUPTED
    if callable(code):
        code = code()
    return code if isinstance(code, int) else 0
