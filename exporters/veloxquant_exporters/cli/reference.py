"""Reference: docs/cli.md, written from the commands themselves.

python -m veloxquant_exporters.cli.reference docs/cli.md           # write it
python -m veloxquant_exporters.cli.reference --check docs/cli.md   # 1 if it would change
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from inspect import cleandoc
from typing import Final

import click

from veloxquant_exporters.cli.commands import COMMANDS
from veloxquant_exporters.cli.group import vqmon
from veloxquant_mlx.telemetry.generated_page import write_or_check

__all__ = ["main", "render", "walk"]

HEAD: Final = """\
<!-- Written by `python -m veloxquant_exporters.cli.reference docs/cli.md` from the commands
     (exporters/veloxquant_exporters/cli/). Change it there. -->

# The command `vqmon`

```sh
pip install 'veloxquant-mlx-monitor[cli]'   # a command that needs more says which extra
```

`vqmon COMMAND --help` shows what stands here. [doctor.md](doctor.md) tells what `vqmon doctor` and
`vqmon check` look at.

## Exit codes

| code | means |
| --- | --- |
| 0 | done, and nothing is wrong; warnings there may be |
| 1 | it could not be done, as one line on stderr says; or a command that judges found something wrong |
| 2 | wrong usage, or a library is missing that an extra brings, as the line says |
| 130 | ended by Ctrl-C before it was done |
| 141 | what reads its output went away, as in `vqmon check DIR \\| head -1` |

`vqmon run` ends with the code of the program that it runs.

## Common to all commands

- **Errors** are one line on stderr: what, why, and what to do. A traceback is a fault of vqmon itself.
- **`--json`**, on every command that reads something, prints one JSON document on stdout and nothing
  else; the exit code is the same.
- **Colours** are for terminals only; `NO_COLOR`, set to anything, takes them away there too.
- **Completion**: `eval "$(vqmon completion bash)"`, or zsh; for fish `vqmon completion fish | source`.

| variable | means |
| --- | --- |
| `VELOXQUANT_SNAPSHOT_DIR` | the folder of snapshot files, where no option names one |
| `NO_COLOR` | no colours |
"""


def render() -> str:
    """The whole page."""
    commands = list(walk())
    lines = [HEAD, "## Commands\n", "| command | |", "| --- | --- |"]
    lines += [
        f"| [`{path}`](#{_anchor(path)}) | {_first_line(found)} |" for path, found in commands
    ]
    for path, found in commands:
        lines += ["", *_section(path, found)]
    return "\n".join(lines) + "\n"


def walk() -> Iterator[tuple[str, click.Command]]:
    """Every command with what is typed for it, the commands of a group behind the group."""
    with click.Context(vqmon, info_name="vqmon") as context:
        for name in COMMANDS:
            command = vqmon.get_command(context, name)
            assert command is not None
            yield from _with_subcommands(f"vqmon {name}", command)


def _with_subcommands(path: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        for name, found in sorted(command.commands.items()):
            yield from _with_subcommands(f"{path} {name}", found)


def _anchor(path: str) -> str:
    return path.replace(" ", "-")


def _first_line(command: click.Command) -> str:
    return " ".join(_paragraphs(command)[0].split())


def _paragraphs(command: click.Command) -> list[str]:
    return cleandoc(command.help or "").split("\n\n")


def _section(path: str, command: click.Command) -> Iterator[str]:
    yield f"### {path}"
    yield ""
    yield f"```text\n{_usage(path, command)}\n```"
    for paragraph in _paragraphs(command):
        yield ""
        yield from _paragraph(paragraph)
    if options := [p for p in command.params if isinstance(p, click.Option) and not p.hidden]:
        yield ""
        yield "| option | default | |"
        yield "| --- | --- | --- |"
        yield from map(_option, options)


def _usage(path: str, command: click.Command) -> str:
    parts = [path]
    if any(isinstance(param, click.Option) for param in command.params):
        parts.append("[OPTIONS]")
    parts += [_metavar(p) for p in command.params if isinstance(p, click.Argument)]
    if isinstance(command, click.Group):
        parts.append("COMMAND ...")
    return " ".join(parts)


def _paragraph(text: str) -> Iterator[str]:
    """A paragraph as prose, or as it stands where click keeps its lines, and every example."""
    kept = text.startswith("\b")
    lines = text.removeprefix("\b").strip("\n").splitlines()
    if not kept:
        lines = [" ".join(line.strip() for line in lines)]
    while lines:
        if lines[0].strip() in ("Example:", "Examples:"):
            yield "```sh"
            yield from (line.strip() for line in lines[1:])
            yield "```"
            return
        examples = [line.startswith("Example:") for line in lines]
        n = examples.index(not examples[0]) if (not examples[0]) in examples else len(lines)
        block, lines = lines[:n], lines[n:]
        if examples[0]:
            yield "```sh"
            yield from (line.removeprefix("Example:").strip() for line in block)
            yield "```"
        elif kept and len(block) > 1:
            yield "```text"
            yield from block
            yield "```"
        else:
            yield from map(_escaped, block)
        if lines:
            yield ""


def _option(option: click.Option) -> str:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    metavar = _metavar(option)
    if metavar:
        names += f" `{metavar}`"
    return f"| {_cell(names)} | {_cell(_default(option))} | {_cell(_escaped(option.help or ''))} |"


def _metavar(param: click.Parameter) -> str:
    """What stands for the value, made here because versions of click differ in it."""
    if isinstance(param, click.Option) and (param.is_flag or param.count):
        return ""
    if isinstance(param, click.Argument):
        text = param.metavar or (param.name or "").upper()
        shown = text if param.required else f"[{text}]"
        return shown + ("..." if param.nargs != 1 and not text.endswith("...") else "")
    if param.metavar:
        return param.metavar
    if isinstance(param.type, click.Choice):
        return "|".join(map(str, param.type.choices))
    if isinstance(param.type, click.IntRange | click.FloatRange):
        return _range(param.type)
    return param.type.name.upper()


def _range(kind: click.IntRange | click.FloatRange) -> str:
    name = "INTEGER" if isinstance(kind, click.IntRange) else "NUMBER"
    if kind.max is None:
        return f"{name}>={kind.min:g}" if kind.min is not None else name
    return f"{kind.min:g}..{kind.max:g}" if kind.min is not None else f"{name}<={kind.max:g}"


def _default(option: click.Option) -> str:
    if isinstance(option.show_default, str):
        text = option.show_default
    elif option.required:
        text = "required"
    elif option.show_default and option.default is not None:
        value = f"{option.default:g}" if isinstance(option.default, float) else option.default
        text = f"`{value}`"
    else:
        text = ""
    variable = f"`{option.envvar}`" if option.show_envvar and option.envvar else ""
    return ", ".join(filter(None, (variable, text)))


def _escaped(text: str) -> str:
    """For Markdown: an angle bracket or an asterisk of ours means itself."""
    return text.replace("<", "&lt;").replace("*", "\\*")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, or compare it byte for byte; returns the exit status."""
    return write_or_check(
        render,
        arguments,
        description="Write docs/cli.md from the commands.",
        stale="{path} is not what the commands say; write it anew: "
        "python -m veloxquant_exporters.cli.reference {path}",
    )


if __name__ == "__main__":
    sys.exit(main())
