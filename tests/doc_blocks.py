"""The code blocks of a page, and how they are run.

A block is run as it stands. What has to differ is said in the page, in a comment on the line before:

    <!-- docs-test: skip: WHY -->          not run at all
    <!-- docs-test: shorter: COMMAND -->   this is run instead, with options that end sooner
    <!-- docs-test: file NAME -->          the block is saved under that name
    <!-- docs-test: needs NAME -->         left out where that program or variable is not there
    <!-- docs-test: retry -->              until it succeeds, as it asks a server that starts meanwhile
    <!-- docs-test: fails: CODE -->        it ends with this exit code

The shell blocks of a page are one bash script, in an empty folder, with an empty HOME and nothing of the
environment. Default ports are exchanged for free ones, so that pages run side by side.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["SHELL", "Block", "Marks", "blocks_of", "left_out", "run_python", "run_shell"]

SHELL: Final = ("sh", "console")
_MARK = re.compile(r"<!-- docs-test: (?P<verb>\w+)(?::? (?P<rest>.*?))? -->")
_VERBS: Final = {"skip", "shorter", "file", "needs", "retry", "fails"}
_PATH: Final = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"


@dataclass(frozen=True, slots=True)
class Marks:
    """What the comments before a block say.

    Attributes:
        said: By verb, what follows it.
    """

    said: dict[str, str]

    @classmethod
    def read(cls, lines: list[str], where: str) -> Marks:
        """Read comment lines.

        Raises:
            ValueError: A verb that nobody knows, or a skip without a reason.
        """
        said: dict[str, str] = {}
        for line in lines:
            match = _MARK.fullmatch(line)
            if match is None or match["verb"] not in _VERBS:
                raise ValueError(f"{where}: {line!r} is no mark; allowed are {sorted(_VERBS)}")
            said[match["verb"]] = match["rest"] or ""
        if len(said.get("skip", "a good reason")) < 12:
            raise ValueError(f"{where}: a skipped block needs a reason")
        return cls(said)


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block.

    Attributes:
        where: Page and line.
        language: What stands after the fence.
        text: Its lines.
        marks: What the page says about running it.
    """

    where: str
    language: str
    text: str
    marks: Marks

    @property
    def command(self) -> str:
        """What a shell runs: the text, of a console the lines after a prompt."""
        if "shorter" in self.marks.said:
            return self.marks.said["shorter"]
        if self.language != "console":
            return self.text
        lines = self.text.splitlines()
        return "\n".join(line.removeprefix("$ ") for line in lines if line.startswith("$ "))


def blocks_of(text: str, page: str) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    lines = iter(enumerate(text.splitlines(), 1))
    marks: list[str] = []
    for number, line in lines:
        if line.startswith("<!-- docs-test:"):
            marks.append(line)
        elif line.startswith("```"):
            body = []
            for _, inner in lines:
                if inner.rstrip() == "```":
                    break
                body.append(inner)
            where = f"{page}:{number}"
            yield Block(where, line[3:].strip(), "\n".join(body) + "\n", Marks.read(marks, where))
            marks = []
        elif line.strip():
            if marks:
                raise ValueError(f"{page}:{number}: a docs-test comment without a block below it")
            marks = []


def left_out(block: Block) -> str | None:
    """Why a block is not run here, or None."""
    if "skip" in block.marks.said:
        return block.marks.said["skip"]
    need = block.marks.said.get("needs")
    if need and not os.environ.get(need) and shutil.which(need, path=_PATH) is None:
        return f"{need} is not here"
    return None


def free_port() -> int:
    """A port of loopback that nobody has right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Ports:
    """Free ports in place of 9464, 9465 and mlx-lm's 8080, wherever a page names or means them."""

    def __init__(self) -> None:
        self.page, self.sidecar, self.model = free_port(), free_port(), free_port()

    def put(self, text: str) -> str:
        """The text with the ports exchanged."""
        text = text.replace("9464", str(self.page)).replace("9465", str(self.sidecar))
        text = text.replace("8080", str(self.model))
        text = text.replace("start_http_server()", f"start_http_server({self.page})")
        return text.replace("vqmon serve ", f"vqmon serve --port {self.sidecar} ")


def _environment(scratch: Path) -> dict[str, str]:
    home = scratch / "home"
    home.mkdir()
    given = {"HOME": str(home), "PATH": _PATH, "LANG": "C.UTF-8"}
    keep = ("VELOXQUANT_TEST_MODEL", "LD_LIBRARY_PATH")
    return given | {name: os.environ[name] for name in keep if name in os.environ}


def _script(blocks: list[Block]) -> str:
    parts = ["set -euo pipefail"]
    for block in blocks:
        command, said = block.command.rstrip(), block.marks.said
        parts.append(f"echo '@@ {block.where}'")
        if "retry" in said:
            command = (
                f"tries=0; until (\n{command}\n); do\n"
                "tries=$((tries + 1)); [ $tries -lt 150 ]; sleep 0.2; done"
            )
        elif "fails" in said:
            command = f"code=0; (\n{command}\n) || code=$?; [ $code = {said['fails']} ]"
        parts.append(command)
    return "\n".join(parts) + "\n"


def run_shell(blocks: list[Block], folder: Path, *, timeout_s: float) -> str:
    """Run the shell blocks of a page, and return what they print.

    Raises:
        AssertionError: One failed; the message has the block and all output.
    """
    work = folder / "work"
    work.mkdir()
    ports = Ports()
    for block in blocks:
        if "file" in block.marks.said:
            (work / block.marks.said["file"]).write_text(ports.put(block.text), "utf-8")
    todo = [block for block in blocks if block.language in SHELL and left_out(block) is None]
    # Into a file: what runs in the background would hold a pipe open.
    log = folder / "log"
    with log.open("w") as out:
        shell = subprocess.Popen(
            ["bash", "-c", ports.put(_script([b for b in todo if "file" not in b.marks.said]))],
            cwd=work,
            env=_environment(folder),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | str = shell.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = f"none after {timeout_s} s"
        finally:
            # What a failed page left in the background, and the shell itself if it hangs.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
    said = log.read_text("utf-8", "replace")
    last = re.findall(r"^@@ (.*)$", said, re.MULTILINE)[-1:]
    assert code == 0, f"exit code {code} in the block at {last}:\n{said[-4000:]}"
    return said


def run_python(blocks: list[Block], folder: Path, *, timeout_s: float) -> None:
    """Run the Python blocks of a page as one program, in a process of its own.

    Raises:
        AssertionError: It failed; the message has the traceback.
    """
    todo = [
        block
        for block in blocks
        if block.language == "python" and left_out(block) is None and "file" not in block.marks.said
    ]
    program = Ports().put("\n".join(block.text for block in todo))
    arguments = [os.environ.get("VELOXQUANT_TEST_MODEL", "")]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        check=False,
        cwd=folder,
        env=_environment(folder),
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr[-4000:]
