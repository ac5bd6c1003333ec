"""The command behind `vqmon run --`: which program it means, as Python itself would read it."""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["CommandError", "Program", "parse_command"]

_PYTHON = re.compile(r"python(3(\.\d+)?)?(\.exe)?")
# What this process can do for a program after Python has started; the rest it cannot. Python takes
# several in one word, the last of them with its value: -um MODULE.
_OPTIONS = re.compile(r"-([uBq]*)(?:([mcW])(.*))?", re.DOTALL)


class CommandError(ValueError):
    """The command cannot be run in this process; the text says why, in one line."""


@dataclass(frozen=True, slots=True)
class Program:
    """What to run.

    Attributes:
        kind: "module" (-m), "script" (a file, a folder or a zip file with a __main__) or "code" (-c).
        target: The module's name, the path, or the code.
        arguments: Those of the program itself: `sys.argv[1:]`.
        flags: Python's own short options that can be honoured, as in "uB".
        warnings: Values of -W.
    """

    kind: Literal["module", "script", "code"]
    target: str
    arguments: tuple[str, ...] = ()
    flags: str = ""
    warnings: tuple[str, ...] = ()


def parse_command(command: Sequence[str]) -> Program:
    """The program that `command` means.

    `python ...` means this interpreter, whatever is first on PATH; any other word is a script of
    the environment's, or a path of one.

    Raises:
        CommandError: It names no Python program, one of another environment, or asks Python for
            something that can only be had when Python starts.
    """
    if not command:
        raise CommandError("say what to run, as in: vqmon run -- python -m mlx_lm server --model M")
    first, *rest = command
    if _PYTHON.fullmatch(Path(first).name):
        _check_interpreter(first)
        return _parse_python(rest)
    return Program("script", _find_script(first), tuple(rest))


def _parse_python(words: list[str]) -> Program:
    flags = ""
    warnings: list[str] = []
    while words:
        word, *words = words
        if word == "-":
            raise CommandError("a program from standard input cannot be run; name a file")
        if not word.startswith("-") or (word == "--" and words):
            path, *words = words if word == "--" else [word, *words]
            return Program("script", path, tuple(words), flags, tuple(warnings))
        found = _OPTIONS.fullmatch(word)
        if found is None:
            raise CommandError(_unsupported(word))
        flags += found[1]
        option, value = found[2], found[3]
        if option and not value:
            value, words = _value(f"-{option}", words)
        if option == "W":
            warnings.append(value)
        elif option:
            kind: Literal["module", "code"] = "module" if option == "m" else "code"
            return Program(kind, value, tuple(words), flags, tuple(warnings))
    raise CommandError("python needs a program: -m MODULE, -c CODE or a file")


def _value(option: str, words: list[str]) -> tuple[str, list[str]]:
    if not words:
        raise CommandError(f"{option} needs an argument")
    return words[0], words[1:]


def _unsupported(option: str) -> str:
    return (
        f"Python takes {option} only when it starts, and the program runs in this process: "
        f"leave it out, set its PYTHON... variable, or start with python {option} -m "
        "veloxquant_exporters.cli run ..."
    )


def _check_interpreter(word: str) -> None:
    """Refuse an interpreter that is not this one, where the word is so precise as to tell."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    asked = re.sub(r"^python|\.exe$", "", Path(word).name)
    if "." in asked and asked != version:
        raise CommandError(f"vqmon runs on Python {version}, so it cannot run {word}")
    if os.sep in word:
        _check_environment(word, word)


def _check_environment(interpreter: str, what: str) -> None:
    """Refuse what belongs to another environment: its packages are not here."""
    here = Path(sys.prefix).resolve()
    there = Path(interpreter).parent.parent.resolve()
    same = there == here or os.path.realpath(interpreter) == os.path.realpath(sys.executable)
    if not same or (there != here and _is_environment(there)):
        raise CommandError(
            f"{what} belongs to the environment {there}, vqmon runs in {here}: "
            "install veloxquant-mlx-monitor there, and use the vqmon of that environment"
        )


def _is_environment(folder: Path) -> bool:
    return (folder / "pyvenv.cfg").exists()


def _find_script(word: str) -> str:
    """The path of a Python script: as it stands, of this environment, or on PATH."""
    if os.sep in word or Path(word).suffix in (".py", ".pyc", ".pyz"):
        return word
    found = shutil.which(word, path=sysconfig.get_path("scripts")) or shutil.which(word)
    if found is None:
        raise CommandError(f"there is no program {word!r} in this environment or on PATH")
    line = _first_line(found)
    shebang = re.match(rb"#!\s*(\S+)(?:\s+(\S+))?", line)
    names = [
        part.decode("utf-8", "replace") for part in (shebang.groups() if shebang else ()) if part
    ]
    if not any("python" in Path(name).name for name in names):
        # Long paths are put behind a shell: the line after it has the interpreter.
        if b"/bin/sh" in line and _is_python_behind_sh(found):
            return found
        raise CommandError(f"{found} is no Python script, and only Python programs can be watched")
    if os.sep in names[0] and Path(names[0]).name != "env":
        _check_environment(names[0], found)
    return found


def _first_line(path: str) -> bytes:
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - a path of the user's, as it stands
            return file.readline(4096)
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}") from None


def _is_python_behind_sh(path: str) -> bool:
    with open(path, "rb") as file:  # noqa: PTH123
        file.readline(4096)
        return b"exec" in (line := file.readline(4096)) and b"python" in line
