"""`vqmon check`: what it says of a folder, a page and a trace, and with which exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("click", reason="the extra cli")

from veloxquant_exporters.cli.group import run
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig
from veloxquant_mlx.telemetry import (
    instrument,
    publish,
    registry,
    stop_publishing,
    uninstrument,
)

Said = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder into which this process has published once and ended: one pool, and no other test's."""
    for probe in list(registry._registry._table.probes.values()):
        if (left := probe.pool) is not None:
            uninstrument(left)
    pool = BlockPoolAllocator(PoolConfig(n_blocks=64))
    instrument(pool, name="checked")
    pool.allocate("k", 40, 1)
    publish(tmp_path / "snapshots", 0.05, worker="w")
    stop_publishing()  # writes a last time
    uninstrument(pool)
    return tmp_path / "snapshots"


def test_a_stopped_process_is_well(folder: Path, capsys: Said) -> None:
    """One line a file, with its pools."""
    assert run(["check", str(folder)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("ok ")
    assert "stopped; checked 3 of 64 blocks in use" in line


def test_a_file_that_cannot_be_read_is_named(folder: Path, capsys: Said) -> None:
    """With the reason, and code 1."""
    (folder / "x.snapshot.json").write_text("garbage")
    assert run(["check", str(folder)]) == 1
    assert "problem  x.snapshot.json: cannot be read (invalid)" in capsys.readouterr().out


def test_json_has_the_last_state_of_each_pool(folder: Path, capsys: Said) -> None:
    """For programs."""
    assert run(["check", str(folder), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["kind"]) == (True, "folder")
    (file,) = report["files"]
    (pool,) = file["snapshot"]["snapshot"]["pools"]
    assert (pool["name"], pool["n_blocks"]) == ("checked", 64)


def test_a_folder_that_is_not_there_is_told(tmp_path: Path, capsys: Said) -> None:
    """In one line."""
    assert run(["check", str(tmp_path / "nowhere")]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert "cannot be read" in line


def test_one_file_of_a_folder(folder: Path, capsys: Said) -> None:
    """Also through a link: the user named it."""
    (file,) = folder.glob("*.snapshot.json")
    link = folder.parent / "link"
    link.symlink_to(file)
    assert run(["check", str(link)]) == 0
    assert "stopped; checked 3 of 64 blocks in use" in capsys.readouterr().out
