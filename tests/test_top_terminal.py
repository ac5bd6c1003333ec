"""vqmon top in a real terminal, through tmux: numbers move, it resizes, and leaves all as it was."""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Self

import pytest

pytest.importorskip("textual", reason="the extra top")

from tests.sidecar_help import ROOT, Sidecar, Worker, environment, wait_for

TMUX = shutil.which("tmux")
pytestmark = [
    pytest.mark.timeout(90),
    pytest.mark.skipif(TMUX is None, reason="tmux is missing (Debian package tmux)"),
]

COLOUR = re.compile(r"\x1b\[[0-9;]*(?:3[0-7]|4[0-7]|38|48|9[0-7]|10[0-7])[;m]")

# Allocates and frees some hundred times a second, on a thread.
LOAD = (
    "stop = threading.Event(); threading.Thread(target=lambda: [(pool.allocate('kv', 160, 7), pool.free_all(7), "
    "threading.Event().wait(0.005)) for _ in iter(stop.is_set, True)], daemon=True).start()"
)


class Terminal:
    """A terminal of 80 x 24 with a shell in it, which runs `vqmon top`.

    Args:
        folder: For its files.
    """

    def __init__(self, folder: Path, **env: str) -> None:
        self._socket = f"vqmon-test-{secrets.token_hex(4)}"
        self._pid_file = folder / "pid"
        self._stty = folder / "stty"
        # As some shells export them: they must not fix the size.
        size = {"COLUMNS": "80", "LINES": "24"}
        kept = {
            **environment(),
            **size,
            "TERM": "xterm-256color",
            "LC_ALL": "C.UTF-8",
            "PS1": "$ ",
            **env,
        }
        kept.pop("TMUX", None)
        if "NO_COLOR" not in env:
            kept.pop("NO_COLOR", None)
        self._env = kept
        self.tmux("-f", os.devnull, "new-session", "-d", "-x", "80", "-y", "24", "sh")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Take the terminal away."""
        self.tmux("kill-server", check=False)

    def tmux(self, *args: str, check: bool = True) -> str:
        """Run a command of tmux; what it printed."""
        assert TMUX is not None
        done = subprocess.run(
            [TMUX, "-L", self._socket, *args],
            capture_output=True,
            text=True,
            env=self._env,
            check=check,
        )
        return done.stdout

    def type(self, *keys: str) -> None:
        """Press keys, by tmux' names."""
        self.tmux("send-keys", *keys)

    def start(self, *args: str) -> None:
        """Run `vqmon top` in the shell, which says its exit code after it."""
        top = shlex.join([sys.executable, "-W", "error", "-m", "veloxquant_exporters.cli", "top"])
        inner = f"echo $$ >{self._pid_file}; exec {top} {shlex.join(args)}"
        script = self._pid_file.with_name("go")
        script.write_text(
            f"stty -a >{self._stty}\nsh -c {shlex.quote(inner)}\n"
            f'echo "ended with $?"\nstty -a >{self._stty}.after\n'
        )
        self.type(f". {script}", "Enter")

    @property
    def pid(self) -> int:
        """Of the command."""
        return int(self._pid_file.read_text())

    def screen(self) -> str:
        """What is seen."""
        return self.tmux("capture-pane", "-p")

    def until(self, *texts: str) -> str:
        """The screen once it shows all of them."""
        return self.until_true(lambda seen: all(text in seen for text in texts), f"{texts}")

    def until_true(self, condition: Callable[[str], bool], what: str) -> str:
        """The screen once `condition` is true of it."""
        seen = [""]

        def shows() -> bool:
            seen[0] = self.screen()
            return condition(seen[0])

        try:
            wait_for(shows, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{seen[0]}") from None
        return seen[0]

    def value(self, name: str) -> str:
        """A variable of tmux."""
        return self.tmux("display-message", "-p", f"#{{{name}}}").strip()

    def check_left_as_it_was(self) -> None:
        """The command ended with 0, and the terminal is as before."""
        self.until("ended with 0")
        after = self._stty.with_name("stty.after")
        wait_for(lambda: after.exists() and after.read_text().count("\n") > 3, "stty")
        assert after.read_text() == self._stty.read_text()
        assert self.value("alternate_on") == "0"
        assert self.value("cursor_flag") == "1"
        assert self.value("mouse_any_flag") == "0"
        assert "Traceback" not in self.screen()


def test_numbers_move_it_resizes_and_leaves_no_trace(tmp_path: Path) -> None:
    """Over a folder that a real process writes; ended by q."""
    with Worker(tmp_path / "snapshots", "api") as worker, Terminal(tmp_path) as terminal:
        worker.do(LOAD)
        terminal.start(str(tmp_path / "snapshots"), "--interval", "0.2")
        first = terminal.until("▸ main", "api", "alloc/s", "? Help")
        assert terminal.value("alternate_on") == "1"
        assert len(first.rstrip("\n").splitlines()) == 24

        def rate(text: str) -> str:
            (line,) = (line for line in text.splitlines() if "▸ main" in line)
            return line.split()[-4]

        before = rate(terminal.until_true(lambda seen: rate(seen) not in ("0", "-"), "a rate"))
        worker.do("stop.set()")  # a steady load shows the same rate for as long as it lasts
        terminal.until_true(lambda seen: rate(seen) != before, "numbers that move")
        terminal.tmux("resize-window", "-x", "150", "-y", "36")
        terminal.until_true(lambda seen: max(map(len, seen.splitlines())) > 100, "150 columns")
        terminal.until("pools", "owners", "lock wait", "? Help")
        terminal.tmux("resize-window", "-x", "80", "-y", "24")
        terminal.until_true(lambda seen: max(map(len, seen.splitlines())) <= 80, "80 columns")
        terminal.type("Enter")
        terminal.until("top holders", "esc Back")
        terminal.type("Escape")
        terminal.until("▸ main")
        terminal.type("q")
        terminal.check_left_as_it_was()


def test_the_page_of_a_sidecar_shows_a_death(tmp_path: Path) -> None:
    """Over the URL of a real `vqmon serve`; the dead worker is an alert, and Ctrl-C ends it."""
    folder = tmp_path / "snapshots"
    with Worker(folder, "api") as worker, Worker(folder, "batch") as other:
        worker.do("pool.allocate('kv', 1600, 1) and beats()")
        with Sidecar(folder) as sidecar, Terminal(tmp_path, NO_COLOR="1") as terminal:
            terminal.start(f"http://127.0.0.1:{sidecar.port}", "--interval", "0.2")
            terminal.until("2 up", "100/4,096", "batch")
            assert not COLOUR.search(terminal.tmux("capture-pane", "-p", "-e"))
            other.kill()
            terminal.until("1 up, 1 down", "WorkerDown batch")
            sidecar.stop()
            terminal.until("last seen", "nothing listens")
            terminal.type("C-c")
            terminal.check_left_as_it_was()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_the_terminal_as_it_was(tmp_path: Path, number: signal.Signals) -> None:
    """In colour, with exit code 0."""
    (tmp_path / "snapshots").mkdir()
    with Terminal(tmp_path) as terminal:
        terminal.start(str(tmp_path / "snapshots"))
        terminal.until("no process publishes here yet", "? Help")
        assert COLOUR.search(terminal.tmux("capture-pane", "-p", "-e"))
        os.kill(terminal.pid, number)
        terminal.check_left_as_it_was()


def test_it_does_not_outlive_its_terminal(tmp_path: Path) -> None:
    """A window that is closed leaves no process behind."""
    (tmp_path / "snapshots").mkdir()
    with Terminal(tmp_path) as terminal:
        terminal.start(str(tmp_path / "snapshots"))
        terminal.until("no process publishes here yet")
        pid = terminal.pid
        terminal.kill()

        def gone() -> bool:
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return True
            return "Z (zombie)" in Path(f"/proc/{pid}/status").read_text()

        wait_for(gone, "its end")


# -- without a terminal --------------------------------------------------------------------------


def vqmon(*args: str) -> subprocess.CompletedProcess[str]:
    """Run `vqmon top` with its output in a pipe."""
    command = [sys.executable, "-W", "error", "-m", "veloxquant_exporters.cli", "top", *args]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**environment(), "COLUMNS": "80", "PYTHONIOENCODING": "utf-8"},
        cwd=ROOT,
        check=False,
    )


def test_one_frame_goes_nowhere_where_stdout_is_closed() -> None:
    """No fault of anybody."""
    command = [sys.executable, "-m", "veloxquant_exporters.cli", "top", "--once"]
    line = f"{shlex.join(command)} benchmarks/traces/chat.vqtrace >&-"
    done = subprocess.run(
        ["sh", "-c", line],
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        cwd=ROOT,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_once_and_json_are_of_two_readings(tmp_path: Path) -> None:
    """A frame without escape codes, and the same as JSON, with rates; of a folder and a page."""
    folder = tmp_path / "snapshots"
    with Worker(folder, "api") as worker, Sidecar(folder) as sidecar:
        worker.do(LOAD)
        worker.do("beats()")
        frame = vqmon(str(folder), "--once", "--interval", "0.3")
        assert (frame.returncode, frame.stderr) == (0, "")
        assert "\x1b" not in frame.stdout
        for text in ("vqmon top", "main", "alloc/s", "free_all", "memory of api", "alerts"):
            assert text in frame.stdout
        assert max(map(len, frame.stdout.splitlines())) <= 80
        page = vqmon(f"http://127.0.0.1:{sidecar.port}/metrics", "--json", "--interval", "0.3")
        assert (page.returncode, page.stderr) == (0, "")
    board = json.loads(page.stdout)
    (pool,) = board["pools"]
    assert (pool["process"], pool["name"], pool["n_blocks"]) == ("api", "main", 4096)
    assert pool["rates"]["allocations"] > 0
    assert pool["streams"][0]["name"] == "kv"
    assert board["processes"][0]["up"] is True
    assert "VeloxQuantMlxMemoryDrift" in board["alerts_not_judged"]


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        ((), 2, "say what to watch: a snapshot folder, the URL of a metrics page, or a trace"),
        (("nowhere", "--once"), 1, "'nowhere' is neither a folder or file that is there, nor"),
        (("http://127.0.0.1:1", "--json"), 1, "nothing listens at http://127.0.0.1:1/metrics"),
        (("README.md", "--once"), 1, "README.md"),
        ((".", "--once", "--at", "3"), 1, "--at is for a trace"),
        ((".", "--once", "--json"), 2, "take one"),
        ((".",), 2, "the screens need a terminal"),
        ((".", "--once", "--tls-key", "k.pem"), 2, "--tls-key needs --tls-cert"),
    ],
)
def test_what_cannot_be_shown_is_told_in_a_line(
    args: tuple[str, ...], code: int, said: str
) -> None:
    """With exit code 1, or 2 where the usage is wrong; no traceback."""
    done = vqmon(*args)
    assert done.returncode == code
    assert said in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
