"""`vqmon run`: the program runs as Python would run it, and what cannot be is said in one line."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.serving_help import vqmon
from veloxquant_exporters.run import CommandError, Program, parse_command

pytestmark = pytest.mark.timeout(60)
_Done = subprocess.CompletedProcess[str]

# What a program can see of how it was started.
FACTS = '''
"""A docstring."""
import json, os, pickle, sys, threading

class Mine:
    pass

me = sys.modules["__main__"]
print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": globals().get("__file__"),
    "doc": __doc__, "package": __package__, "same": vars(me) is globals(),
    "spec": __spec__ and __spec__.name, "loader": type(__loader__).__name__,
    "stdin": sys.stdin.read(), "module": Mine.__module__,
    "pickled": type(pickle.loads(pickle.dumps(Mine()))) is Mine,
    "main thread": threading.current_thread() is threading.main_thread(),
    "flags": sys.flags.optimize, "cwd": os.getcwd(),
    "annotation": (lambda x: x).__code__.co_flags & 0x1000000,
}))
'''


def run(
    command: Sequence[str], *, bare: bool = False, cwd: Path | None = None, stdin: str = ""
) -> _Done:
    """The command by itself, or under `vqmon run`."""
    words = [sys.executable, *command[1:]] if bare else vqmon("run", "--port", "0", "--", *command)
    return subprocess.run(
        words, capture_output=True, text=True, cwd=cwd, input=stdin, check=False, timeout=60
    )


def both(command: Sequence[str], folder: Path, stdin: str = "") -> tuple[_Done, _Done]:
    """What the command does under `vqmon run` and what it does by itself."""
    with ThreadPoolExecutor(2) as threads:
        mine = threads.submit(run, command, cwd=folder, stdin=stdin)
        plain = threads.submit(run, command, cwd=folder, stdin=stdin, bare=True)
        return mine.result(), plain.result()


def complaint(done: _Done) -> str:
    """What was written to stderr, but for the line that tells where the metrics are."""
    lines = done.stderr.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("vqmon: metrics at"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A script, a module, a package and a zip file that tell the facts."""
    (tmp_path / "facts.py").write_text(FACTS)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "pack" / "__main__.py").write_text(FACTS)
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "__main__.py").write_text(FACTS)
    with zipfile.ZipFile(tmp_path / "facts.pyz", "w") as file:
        file.writestr("__main__.py", FACTS)
    (tmp_path / "facts-app").write_bytes(
        b"#!/usr/bin/env python3\n" + (tmp_path / "facts.pyz").read_bytes()
    )
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        ["python", "./facts.py", "a b", "--port", "7"],
        ["python", "-m", "facts", "--", "-m"],
        ["python", "-m", "pack", "x"],
        ["python", "inner", "x"],
        ["python", "facts.pyz"],
        ["python", "-B", "./inner/../facts-app", "x"],
        ["python", "-c", FACTS, "x"],
    ],
    ids=["script", "module", "package", "folder", "zip", "zip by another name", "code"],
)
def test_a_program_sees_what_it_would_see_without_us(folder: Path, command: list[str]) -> None:
    """Arguments, path, `__main__` and all that hangs on it; input and output are its own."""
    mine, plain = both(command, folder, "some\ninput")
    assert mine.returncode == plain.returncode == 0, mine.stderr
    assert json.loads(mine.stdout) == json.loads(plain.stdout)
    assert complaint(mine) == plain.stderr == ""


ENDINGS = {
    "exception": "def f():\n    1 / 0\nf()\n",
    "exit code": "import sys; sys.exit(7)\n",
    "exit text": "import sys; sys.exit('gone')\n",
    "chained": "try:\n    {}['a']\nexcept KeyError as e:\n    raise ValueError('b') from e\n",
    "syntax": "def f(:\n",
    "os._exit": "import os; os._exit(3)\n",
    "atexit": "import atexit\natexit.register(print, 'one')\natexit.register(print, 'two')\n",
    "hook": "import sys\nsys.excepthook = lambda *a: print('hook', a[0].__name__)\n1 / 0\n",
    "thread": (
        "import threading\ndone = threading.Event()\n"
        "threading.Thread(target=lambda: (done.wait(), print('last', __name__))).start()\n"
        "print('first')\ndone.set()\n"
    ),
    "interrupted": "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n",
    "terminated": "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n",
    "handled": (
        "import os, signal\nsignal.signal(signal.SIGTERM, lambda *_: print('bye'))\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
    ),
    "click": "import click\nraise click.ClickException('not for vqmon')\n",
}


@pytest.mark.parametrize("text", ENDINGS.values(), ids=ENDINGS)
def test_a_program_ends_as_it_would_without_us(tmp_path: Path, text: str) -> None:
    """The exit code, or the signal; the traceback, line by line; what it printed, in order."""
    (tmp_path / "end.py").write_text(text)
    mine, plain = both(["python", "end.py"], tmp_path)
    assert (mine.returncode, mine.stdout) == (plain.returncode, plain.stdout)
    assert complaint(mine) == plain.stderr


def test_ctrl_c_reaches_the_program(tmp_path: Path) -> None:
    """It may catch it, and end as it likes."""
    (tmp_path / "wait.py").write_text(
        "import time\n"
        "try:\n    print('ready', flush=True)\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    raise SystemExit(5)\n"
    )
    words = vqmon("run", "--port", "0", "--quiet", "--", "python", "wait.py")
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 5


def test_what_python_cannot_find_it_says_in_its_own_words(tmp_path: Path) -> None:
    """Modules, packages without `__main__`, files; with the exit code of Python."""
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "__init__.py").write_text("")
    (tmp_path / "breaks.py").write_text("import nothing_of_this_name\n")
    missing = ("no_such", "no.such", "breaks.py", ".bare", "bare", "breaks")
    for command in (["no_such.py"], *(["-m", name] for name in missing)):
        mine, plain = both(["python", *command], tmp_path)
        assert mine.returncode == plain.returncode != 0
        assert complaint(mine).splitlines()[-1] == plain.stderr.splitlines()[-1]


def test_options_of_python_that_can_be_had_are(tmp_path: Path) -> None:
    """-u, -B and -W; in any order and spelling."""
    (tmp_path / "o.py").write_text(
        "import sys, warnings\nprint(sys.dont_write_bytecode, sys.stdout.write_through)\n"
        "warnings.warn('told', UserWarning)\n"
    )
    done = run(["python", "-uB", "-W", "error::UserWarning", "o.py"], cwd=tmp_path)
    assert done.stdout == "True True\n" and done.returncode == 1
    assert complaint(done).endswith("UserWarning: told\n")


def test_an_option_that_is_none_is_said_as_python_says_it(tmp_path: Path) -> None:
    """A filter of warnings that makes no sense is passed over."""
    mine, plain = both(["python", "-W", "nonsense", "-c", "print('ran')"], tmp_path)
    assert (mine.returncode, mine.stdout) == (0, "ran\n")
    assert "nonsense" in plain.stderr and complaint(mine) == plain.stderr


# -- what the command means ------------------------------------------------------------------------


def test_commands_are_read_as_python_reads_them() -> None:
    """What stands behind the program is the program's."""
    assert parse_command(["python", "-m", "a.b", "-u", "x"]) == Program(
        "module", "a.b", ("-u", "x")
    )
    assert parse_command(["python3", "-ma.b"]) == Program("module", "a.b")
    assert parse_command(["python", "-c", "1", "2"]) == Program("code", "1", ("2",))
    assert parse_command(["python", "-Wignore", "-u", "s.py", "-c"]) == Program(
        "script", "s.py", ("-c",), "u", ("ignore",)
    )
    assert parse_command(["python", "-um", "a.b", "-B"]) == Program("module", "a.b", ("-B",), "u")
    assert parse_command(["python", "-qBc1"]) == Program("code", "1", (), "qB")
    assert parse_command(["python", "-BWignore", "--", "-s.py"]) == Program(
        "script", "-s.py", (), "B", ("ignore",)
    )
    assert parse_command([sys.executable, "s.py"]).target == "s.py"
    assert parse_command(["./s.py", "x"]) == Program("script", "./s.py", ("x",))


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ([], "say what to run"),
        (["python"], "needs a program"),
        (["python", "-m"], "needs an argument"),
        (["python", "-"], "standard input"),
        (["python", "-O", "s.py"], "-O only when it starts"),
        (["python", "-X", "dev", "s.py"], "-X only when it starts"),
        (["python", "--version"], "--version only when it starts"),
        (["python3.4", "s.py"], "cannot run python3.4"),
        (["no-such-program-anywhere"], "no program 'no-such-program-anywhere'"),
        (["ls"], "no Python script"),
    ],
)
def test_what_cannot_be_run_here_is_said(command: list[str], text: str) -> None:
    """In one line that says why."""
    with pytest.raises(CommandError, match=text) as raised:
        parse_command(command)
    assert "\n" not in str(raised.value)


def test_a_script_of_the_environment_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the environment is not active: its scripts stand beside its Python."""
    monkeypatch.setenv("PATH", "/nowhere")
    script = Path(sysconfig.get_path("scripts")) / "vqmon"
    if not script.exists():
        pytest.skip("this environment has no installed scripts")
    assert parse_command(["vqmon", "x"]) == Program("script", str(script), ("x",))


def test_another_environment_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its packages are not here: neither its Python nor its scripts can be run."""
    scripts = tmp_path / "other" / "bin"
    scripts.mkdir(parents=True)
    (tmp_path / "other" / "pyvenv.cfg").write_text("")
    (scripts / "python").symlink_to(Path(sys.executable).resolve())
    (scripts / "their-server").write_text(f"#!{scripts / 'python'}\nprint()\n")
    (scripts / "their-server").chmod(0o755)
    monkeypatch.setenv("PATH", str(scripts))
    for command in ([str(scripts / "python"), "s.py"], ["their-server"]):
        with pytest.raises(CommandError, match=r"belongs to the environment .*other"):
            parse_command(command)


# -- outputs ---------------------------------------------------------------------------------------


def started(*options: str, **environment: str) -> _Done:
    """`vqmon run` with these options, of a program that tells that it ran."""
    words = vqmon("run", *options, "--", "python", "-c", "print('ran')")
    kept: dict[str, Any] = {k: v for k, v in os.environ.items() if not k.startswith("VELOX")}
    kept |= environment
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=60, env=kept)


def test_a_busy_port_ends_it_before_the_program(tmp_path: Path) -> None:
    """One line, exit code 1, and the program did not run."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = started("--port", str(taken.getsockname()[1]))
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1 and "is taken by" in done.stderr


def test_a_folder_that_cannot_be_written_ends_it_too(tmp_path: Path) -> None:
    """Here it is a file."""
    (tmp_path / "file").write_text("")
    done = started("--snapshot-dir", str(tmp_path / "file"))
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1 and "cannot publish into" in done.stderr


def test_wrong_usage_is_said(tmp_path: Path) -> None:
    """Of vqmon, of the command behind it, and a bad endpoint."""
    assert started("--prot", "1").returncode == 2
    done = subprocess.run(
        vqmon("run", "--", "ls"), capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2 and "no Python script" in done.stderr
    done = started("--otlp-endpoint", "nonsense")
    assert done.returncode == 1 and "endpoint" in done.stderr


def test_where_it_pushes_is_said_without_the_password() -> None:
    """On stderr, which ends in somebody's log."""
    pytest.importorskip("opentelemetry.sdk", reason="the extra otel")
    from veloxquant_exporters.run.outputs import OutputSettings, start_outputs

    settings = OutputSettings(otlp_endpoint="http://user:secret@127.0.0.1:1", otlp_interval_s=3600)
    outputs = start_outputs(settings)
    outputs.close()
    assert outputs.places == ("http://127.0.0.1:1",)


@pytest.mark.parametrize("how", ["option", "variable"])
def test_snapshots_go_into_a_folder_and_no_port_is_taken(tmp_path: Path, how: str) -> None:
    """The last one is of a program that ended; a sidecar would see which hooks it had."""
    from veloxquant_mlx.telemetry.snapshot_json import FILE_SUFFIX, parse_file

    directory = tmp_path / "snapshots"
    if how == "option":
        done = started("--snapshot-dir", str(directory))
    else:
        done = started(VELOXQUANT_SNAPSHOT_DIR=str(directory))
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert done.stderr == f"vqmon: metrics at {directory}\n"
    (file,) = directory.glob(f"[!.]*{FILE_SUFFIX}")
    parsed = parse_file(file.read_bytes())
    assert parsed.header.state == "stopped"
    assert parsed.snapshot.program is not None and parsed.snapshot.program.mlx_lm == ""
    assert parsed.snapshot.program.hooks == {}


def test_it_needs_no_stderr(tmp_path: Path) -> None:
    """Closed, or a pipe that nobody reads: the program's output and exit code are its own."""
    words = vqmon("run", "--port", "0", "--", "python", "-c", "print('mine')")
    closed = subprocess.run(
        ["sh", "-c", 'exec "$@" 2>&-', "sh", *words], stdout=subprocess.PIPE, text=True, check=False
    )
    assert (closed.returncode, closed.stdout) == (0, "mine\n")
    reading, writing = os.pipe()
    os.close(reading)
    try:
        broken = subprocess.run(
            words, stdout=subprocess.PIPE, stderr=writing, text=True, check=False
        )
    finally:
        os.close(writing)
    assert (broken.returncode, broken.stdout) == (0, "mine\n")


def test_a_module_that_we_use_too_is_run_without_a_warning(tmp_path: Path) -> None:
    """Python warns of one that is imported before it is run; that was not the program's doing."""
    mine, plain = both(["python", "-W", "error", "-m", "http.server", "--help"], tmp_path)
    assert (mine.returncode, mine.stdout) == (plain.returncode, plain.stdout) == (0, plain.stdout)
    assert complaint(mine) == plain.stderr


def test_an_import_that_fails_shows_no_frames_of_ours(tmp_path: Path) -> None:
    """A module that is watched may be broken: the traceback is the program's, line by line."""
    package = tmp_path / "mlx_lm"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "generate.py").write_text("def f():\n    1 / 0\nf()\n")
    (tmp_path / "go.py").write_text("import mlx_lm.generate\n")
    mine, plain = both(["python", "go.py"], tmp_path)
    assert "ZeroDivisionError" in plain.stderr
    assert complaint(mine) == plain.stderr
