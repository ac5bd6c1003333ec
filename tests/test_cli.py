"""The command `vqmon`: what it loads, what it says when a library is missing, its exit codes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("click", reason="click comes with the extra cli")

import click

from veloxquant_exporters.cli.commands import COMMANDS, Entry
from veloxquant_exporters.missing import LIBRARIES, backend_extra, explain

ROOT = Path(__file__).resolve().parent.parent


def vqmon(
    *args: str, without: tuple[str, ...] = (), path: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `vqmon` in a process of its own, in which some libraries cannot be imported."""
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({without!r}));"
        f"from veloxquant_exporters.cli import main; main({list(args)!r})"
    )
    folders = [ROOT, ROOT / "exporters", *([path] if path else [])]
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))},
        check=False,
    )


def one_line(text: str) -> str:
    """The only line of a text."""
    (line,) = text.splitlines()
    return line


@pytest.fixture
def extra_command(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A command added as its author would: a module and a row."""
    module = ModuleType("tests_extra_command")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(COMMANDS, "extra", Entry(module.__name__, "Do a little more.", ("otel",)))
    return module


def run(*args: str) -> int:
    """Run the group in this process and return the exit code."""
    from veloxquant_exporters.cli.group import run as run_group

    return run_group(args)


def test_help_needs_no_library_but_click() -> None:
    """Help names every command with its line, where nothing else is installed."""
    done = vqmon("--help", without=tuple(name for name in LIBRARIES if name != "click"))
    assert (done.returncode, done.stderr) == (0, "")
    for name, entry in COMMANDS.items():
        assert f"  {name} " in done.stdout
        assert entry.help in " ".join(done.stdout.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_needs_no_library_but_click(name: str) -> None:
    """A command's module imports click alone, and its help starts with the line of the table."""
    done = vqmon(name, "--help", without=tuple(lib for lib in LIBRARIES if lib != "click"))
    assert (done.returncode, done.stderr) == (0, "")
    assert COMMANDS[name].help in " ".join(done.stdout.split())
    command = import_module(COMMANDS[name].module).command
    assert command.name == name
    assert " ".join(command.help.split("\n\n")[0].split()) == COMMANDS[name].help
    options = [param for param in command.params if param.param_type_name == "option"]
    assert [option.name for option in options if not option.help] == []


def test_the_version_is_the_packages() -> None:
    """`--version` prints what `__version__` says."""
    from veloxquant_exporters import __version__

    assert one_line(vqmon("--version").stdout) == f"vqmon, version {__version__}"


@pytest.mark.parametrize("args", [["nonsense"], ["--nonsense"], ["demo", "--nonsense"], []])
def test_wrong_usage_is_told_and_exits_with_2(args: list[str]) -> None:
    """An unknown command or option, or none at all, is no success and no traceback."""
    done = vqmon(*args)
    assert done.returncode == 2
    assert "Usage:" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_without_click_one_line_names_the_extra() -> None:
    """A bare installation has the command; it says what to install."""
    done = vqmon("--help", without=("click",))
    assert done.returncode == 2
    assert "pip install 'veloxquant-mlx-monitor[cli]'" in one_line(done.stderr)
    assert done.stdout == ""


@pytest.mark.parametrize("library", ["rich", "prometheus_client", "mlx", "mlx_lm"])
def test_demo_without_a_library_names_all_extras_it_needs(library: str) -> None:
    """One line, exit code 2; who follows it is not told of the next missing library after that."""
    done = vqmon("demo", "--once", "--port", "0", without=(library,))
    assert done.returncode == 2
    line = one_line(done.stderr)
    assert line.startswith(f"Error: vqmon demo needs {LIBRARIES[library]}, ")
    assert f"'veloxquant-mlx-monitor[cli,prometheus,{backend_extra()}]'" in line
    assert done.stdout == ""


def test_an_extension_that_does_not_load_says_so() -> None:
    """MLX without a backend is installed and yet fails; its error names the module alone."""
    error = ImportError("libmlx.so: no such file", name="core", path="lib/mlx/core.so")
    line = explain(error, "vqmon demo", ("cli", "mlx"))
    assert line is not None
    assert "MLX, which fails: libmlx.so: no such file" in line


def test_the_cause_of_an_import_error_is_what_counts() -> None:
    """A package may catch the error and raise its own; the line says it once."""
    error = ImportError("exporters need h11. Try: pip install it", name="h11")
    error.__cause__ = ModuleNotFoundError("No module named 'h11'", name="h11")
    line = explain(error, "vqmon serve", ("cli",))
    assert line is not None
    assert line.startswith("vqmon serve needs h11, which is not installed. Try: ")
    assert line.count("Try:") == 1


def test_the_package_of_our_import_name_is_named(tmp_path: Path) -> None:
    """Whatever its files miss first: the cause is that it overwrote ours."""
    info = tmp_path / "veloxquant_mlx-0.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: veloxquant-mlx\nVersion: 0.9\n")
    done = vqmon("serve", "--snapshot-dir", "x", without=("h11",), path=tmp_path)
    assert done.returncode == 2
    assert one_line(done.stderr) == (
        "Error: vqmon serve needs veloxquant_mlx, which the package veloxquant-mlx has overwritten. "
        "Try: vqmon doctor"
    )


def test_what_no_extra_brings_is_not_explained_away() -> None:
    """A fault in our own imports keeps its traceback."""
    assert explain(ModuleNotFoundError("x", name="veloxquant_exporters.nope"), "x", ()) is None
    assert explain(ImportError("x"), "x", ()) is None


def test_a_command_is_added_by_a_module_and_a_row(
    extra_command: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is listed without being loaded, runs, and its return value is the exit code."""
    assert run("--help") == 0  # the module has no command yet
    assert "Do a little more." in capsys.readouterr().out

    @click.command("extra")
    @click.argument("code", type=int)
    def command(code: int) -> int:
        return code

    extra_command.command = command  # type: ignore[attr-defined]
    assert [run("extra", "0"), run("extra", "7")] == [0, 7]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), 130),
        (click.ClickException("cannot"), 1),
        (click.UsageError("wrong"), 2),
        (ModuleNotFoundError("gone", name="opentelemetry.sdk"), 2),
    ],
)
def test_how_a_command_ends_is_the_exit_code(
    extra_command: ModuleType,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
) -> None:
    """Ctrl-C, a failure, wrong usage and a missing library each have their own, and no traceback."""

    @click.command("extra")
    def command() -> None:
        raise error

    extra_command.command = command  # type: ignore[attr-defined]
    assert run("extra") == code
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert ("veloxquant-mlx-monitor[otel]" in said) == isinstance(error, ModuleNotFoundError)


@pytest.mark.parametrize(
    "error",
    [
        ImportError("Encountered an error while initializing the extension."),  # MLX's words
        ImportError("numpy._core.multiarray failed to import", name="numpy"),
        RuntimeError("stopped"),
    ],
)
def test_what_a_library_makes_of_ctrl_c_is_ctrl_c(
    extra_command: ModuleType, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    """Code in C that is loading turns it into an error of its own: no traceback, no advice to install."""

    @click.command("extra")
    def command() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise error from None

    extra_command.command = command  # type: ignore[attr-defined]
    assert run("extra") == 130
    assert capsys.readouterr() == ("", "")


def test_a_fault_in_a_command_keeps_its_traceback(extra_command: ModuleType) -> None:
    """An import that fails for another reason than a missing extra is not hidden."""

    @click.command("extra")
    def command() -> None:
        raise ModuleNotFoundError("No module named 'typo'", name="typo")

    extra_command.command = command  # type: ignore[attr-defined]
    with pytest.raises(ModuleNotFoundError, match="typo"):
        run("extra")
