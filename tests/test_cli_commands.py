"""Every command of `vqmon`: what its help must have, and how it ends, whatever is done to it."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("click", reason="click comes with the extra cli")

import click

from tests.sidecar_help import ROOT, a_file, environment, put, wait_for
from veloxquant_exporters.cli.commands import COMMANDS
from veloxquant_exporters.cli.group import run, vqmon
from veloxquant_exporters.cli.reference import main as write_reference
from veloxquant_exporters.cli.reference import walk

pytestmark = pytest.mark.timeout(60)

DOCS = ROOT / "docs" / "cli.md"
VQMON = [sys.executable, "-W", "error", "-m", "veloxquant_exporters.cli"]
FOUND = dict(walk())

each_command = pytest.mark.parametrize("path", FOUND)


def help_of(path: str) -> str:
    """The help text as it is written, an example a line."""
    return (FOUND[path].help or "").replace("\b\n", "")


def examples(path: str) -> list[list[str]]:
    """The arguments of each `vqmon ...` that stands in a command's help."""
    lines = [line for line in help_of(path).splitlines() if re.match(r"\s*(Example:|vqmon )", line)]
    parts = [part for line in lines for part in re.split(r"[;|>]", line.replace("Example:", ""))]
    words = [shlex.split(part) for part in parts if part.strip().startswith("vqmon ")]
    return [line[1:] for line in words]


@contextmanager
def started(*args: str, **options: object) -> Iterator[subprocess.Popen[str]]:
    """A real `vqmon`, ended in any case."""
    process = subprocess.Popen(
        [*VQMON, *args],
        text=True,
        env={**environment(), **options.pop("env", {})},  # type: ignore[dict-item]
        **options,  # type: ignore[call-overload]
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


# -- what help and docs must have -----------------------------------------------------------------


@each_command
def test_help_says_what_and_shows_an_example(path: str) -> None:
    """One sentence first, and at least one line that can be copied."""
    first = help_of(path).split("\n\n")[0]
    assert first.strip().endswith("."), f"{path}: the help begins with one sentence"
    assert examples(path), f"{path}: its docstring needs a line 'Example: {path} ...'"


@each_command
def test_examples_can_be_typed(path: str) -> None:
    """Each names a command that there is, and options and values that it takes."""
    for words in examples(path):
        command: click.Command = vqmon
        while isinstance(command, click.Group):
            with click.Context(command) as context:
                found = command.get_command(context, words[0])
            assert found is not None, f"{path}: no command {words[0]!r}"
            command = found
            del words[0]
        command.make_context(command.name, words)  # raises UsageError


@each_command
def test_options_and_arguments_are_explained(path: str) -> None:
    """Help for each option; an argument is named in the text or says itself what it is."""
    for param in FOUND[path].params:
        if isinstance(param, click.Option):
            assert param.help, f"{path}: option {param.opts[0]} needs a help"
            text = re.sub(r"\s*\[default: .*\]$", "", param.help)
            assert text.endswith((".", "?")), f"{path}: {param.opts[0]}: help ends in a dot"


@each_command
def test_what_reads_has_json(path: str) -> None:
    """A flag, the same one everywhere."""
    name = path.split()[1]
    if not COMMANDS[name].reads or isinstance(FOUND[path], click.Group):
        return
    flags = [p for p in FOUND[path].params if "--json" in p.opts]
    assert flags, f"{path} reads: give it --json, or say reads=False in cli/commands.py"
    assert isinstance(flags[0], click.Option) and flags[0].is_flag, f"{path}: --json is a flag"


def test_one_thing_has_one_name() -> None:
    """An option that several commands have takes the same there, and a time is one everywhere."""
    forms: dict[str, set[tuple[object, ...]]] = {}
    for path, command in FOUND.items():
        for param in command.params:
            if isinstance(param, click.Option) and path != "vqmon simulate":  # takes many of each
                for name in param.opts:
                    form = (param.type.name, param.metavar, param.is_flag)
                    forms.setdefault(name, set()).add(form)
    assert {name: form for name, form in forms.items() if len(form) > 1} == {}
    assert forms["--otlp-interval"] == forms["--interval"] == forms["--watch"]
    assert forms["--host"] == forms["--addr"]
    assert forms["-o"] == forms["--output"] == {("file", "FILE", False)}


def test_how_a_command_ends_is_told_in_the_same_words() -> None:
    """By the words of docs/cli.md."""
    for path in FOUND:
        assert "exit status" not in help_of(path).lower(), path


def test_the_reference_is_what_the_commands_say(capsys: pytest.CaptureFixture[str]) -> None:
    """Byte for byte."""
    code = write_reference(["--check", str(DOCS)])
    assert code == 0, (
        "docs/cli.md is old. Write it anew: "
        "python -m veloxquant_exporters.cli.reference docs/cli.md\n" + capsys.readouterr().err
    )


def test_a_reference_of_another_command_line_is_noticed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One changed byte, or no file at all; and the message says what to do."""
    page = tmp_path / "cli.md"
    assert write_reference(["--check", str(page)]) == 1
    assert write_reference([str(page)]) == 0
    assert write_reference(["--check", str(page)]) == 0
    page.write_text(page.read_text("utf-8") + " ", "utf-8")
    capsys.readouterr()
    assert write_reference(["--check", str(page)]) == 1
    assert f"python -m veloxquant_exporters.cli.reference {page}" in capsys.readouterr().err


def test_the_reference_lists_exit_codes_and_commands() -> None:
    """Every code that the program gives, and every command with its own section."""
    text = DOCS.read_text("utf-8")
    section = text.split("## Exit codes")[1].split("\n## ")[0]
    assert re.findall(r"(?m)^\| (\d+) \|", section) == ["0", "1", "2", "130", "141"]
    for path in FOUND:
        assert f"\n### {path}\n" in text


# -- completion -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_of_that_shell(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It asks vqmon by the variable that vqmon listens to; a shell that is here takes it."""
    if shell == "bash" and shutil.which("bash") is None:
        pytest.skip("bash is not here, and click asks it for its version")
    assert run(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert f"_VQMON_COMPLETE={shell}_complete" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True, timeout=20)


def test_the_shell_gets_commands_and_options() -> None:
    """What click answers to the script, through our lazy group."""
    for words, wanted in (("vqmon che", "plain,check"), ("vqmon check --wat", "plain,--watch")):
        asked = {
            "_VQMON_COMPLETE": "bash_complete",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split()) - 1),
        }
        done = subprocess.run(
            VQMON, env={**environment(), **asked}, capture_output=True, text=True, check=False
        )
        assert done.stdout.splitlines() == [wanted], done.stderr


def test_the_shell_is_asked_for_files_where_a_file_is_wanted() -> None:
    """And for folders alone where one is: click by itself offers nothing for what may be a URL, too."""
    wanted = {"FILE": "file", "TRACE": "file", "URL|FILE|DIR": "file", "DIR|URL|TRACE": "file"}
    wanted |= {"DIR": "dir", "PATH_OR_ID": "dir", "PROGRAM": "file"}
    seen = set()
    for path, command in FOUND.items():
        for param in command.params:
            shown = param.metavar or (param.human_readable_name or "").upper()
            if shown in wanted:
                with click.Context(command) as context:
                    kinds = {item.type for item in param.shell_complete(context, "x")}
                assert kinds == {wanted[shown]}, f"{path}: {param.opts[0]}"
                seen.add(shown)
    assert seen == set(wanted)


# -- how a command ends ---------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A snapshot folder with one dead process."""
    put(tmp_path / "snapshots", a_file())
    return tmp_path / "snapshots"


READERS = sorted(
    path
    for path, command in FOUND.items()
    if COMMANDS[path.split()[1]].reads
    and not isinstance(command, click.Group)
    and any(isinstance(param, click.Argument) for param in command.params)
    and not path.startswith("vqmon export ")  # these name where to write
)


@pytest.mark.parametrize("path", READERS)
@pytest.mark.parametrize("what", ["missing", "loop", "garbage", "nothing"])
def test_a_path_that_is_not_what_is_read_is_one_line(
    path: str, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Code 1, the name in it, and no traceback, in each command that reads something."""
    target = tmp_path / what
    if what == "loop":
        target.symlink_to(target)
    elif what in ("garbage", "nothing"):
        target.write_bytes(b"\x1b\0garbage" if what == "garbage" else b"")
    flags = ["--once"] if "--once" in {o for p in FOUND[path].params for o in p.opts} else []
    assert run([*path.split()[1:], str(target), *flags]) == 1
    said = capsys.readouterr()
    (line,) = (said.err or said.out).splitlines()
    assert what in line or what in ("garbage", "nothing")
    assert "Errno" not in line
    assert "\x1b" not in line


def test_a_folder_to_write_into_that_is_none_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file, a link in a circle, and below a file."""
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for kind in ("dashboards", "rules"):
        for target in ("file", "loop", "file/below"):
            assert run(["export", kind, str(tmp_path / target)]) == 1
            (line,) = capsys.readouterr().err.splitlines()
            assert line.startswith(f"Error: {tmp_path / target}")


@pytest.mark.parametrize(
    "args", [["--help"], ["--version"], ["check", "FOLDER"], ["completion", "zsh"]]
)
def test_a_closed_pipe_ends_it_quietly(args: Sequence[str], folder: Path) -> None:
    """As `| head` does: no traceback, no complaint at the interpreter's end, code 141."""
    read, write = os.pipe()
    os.close(read)
    words = [str(folder) if word == "FOLDER" else word for word in args]
    try:
        done = subprocess.run(
            [*VQMON, *words], stdout=write, stderr=subprocess.PIPE, env=environment(), check=False
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
def test_a_full_disk_is_one_line(folder: Path) -> None:
    """Code 1, with what the system said."""
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*VQMON, "check", str(folder)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["Error: No space left on device"]


def test_no_output_at_all_is_no_fault(folder: Path) -> None:
    """A stdout that is closed from the start."""
    line = f"{shlex.join(VQMON)} check {shlex.quote(str(folder))} >&-"
    done = subprocess.run(
        ["sh", "-c", line], stderr=subprocess.PIPE, text=True, env=environment(), check=False
    )
    assert (done.returncode, done.stderr) == (1, "")  # a dead process is a problem


def test_ctrl_c_ends_a_command_that_waits() -> None:
    """While it reads what nobody sends: code 130, and no traceback."""
    with started("check", "-", stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        status = Path(f"/proc/{process.pid}/wchan")
        if status.exists():  # it waits in the pipe, and no longer loads modules
            wait_for(lambda: "pipe" in status.read_text(), "the command waits for its input")
        else:
            threading.Event().wait(1.0)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize("colour", [True, False])
def test_colours_are_for_terminals_that_want_them(folder: Path, *, colour: bool) -> None:
    """On a terminal there are some, with NO_COLOR there are none."""
    ours, theirs = pty.openpty()
    extra = {"NO_COLOR": "" if colour else "1", "TERM": "xterm"}
    try:
        done = subprocess.run(
            [*VQMON, "check", str(folder)],
            stdout=theirs,
            env={**environment(), **extra},
            check=False,
        )
        said = os.read(ours, 4096)
    finally:
        os.close(ours)
        os.close(theirs)
    assert done.returncode == 1
    assert b"problem" in said
    assert (b"\x1b[" in said) == colour


def test_a_system_error_is_one_line_with_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that cannot be written, in a command that never thought of it."""
    (tmp_path / "file").touch()
    args = ["bench", "--only", "n_free", "--quick", "--rounds", "2", "--out"]
    assert run([*args, str(tmp_path / "file" / "below")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"Error: {tmp_path}")
    assert line.endswith(": File exists")


def test_names_of_strangers_do_not_reach_the_terminal(folder: Path) -> None:
    """A file's name in no encoding, and one that would paint the screen."""
    (folder / os.fsdecode(b"\xff\x1b[31m.snapshot.json")).write_bytes(b"{}")
    done = subprocess.run(
        [*VQMON, "check", str(folder)],
        capture_output=True,
        env={**environment(), "PYTHONIOENCODING": "ascii"},
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, b"")
    assert b"\\udcff\\x1b[31m.snapshot.json: cannot be read" in done.stdout
    assert b"\x1b" not in done.stdout


def test_version_and_json_are_for_programs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing but the document stands on stdout, and the code is that of the text."""
    assert run(["check", str(folder), "--json"]) == 1
    said = capsys.readouterr()
    assert json.loads(said.out)["ok"] is False
    assert said.err == ""
