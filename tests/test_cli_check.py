"""`vqmon check`: what it says of a folder, and with which exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("click", reason="the extra cli")

from click.testing import CliRunner

from veloxquant_exporters.cli.check import command
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig
from veloxquant_mlx.telemetry import instrument, publish, stop_publishing, uninstrument


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder into which this process has published once and ended."""
    pool = BlockPoolAllocator(PoolConfig(n_blocks=64))
    instrument(pool, name="checked")
    pool.allocate("k", 40, 1)
    publish(tmp_path / "snapshots", 0.05, worker="w")
    stop_publishing()  # writes a last time
    uninstrument(pool)
    return tmp_path / "snapshots"


def test_a_stopped_process_is_well(folder: Path) -> None:
    """One line a file, with its pools."""
    result = CliRunner().invoke(command, [str(folder)])
    assert result.exit_code == 0, result.output
    assert "stopped; checked 3 of 64 blocks in use" in result.output


def test_a_file_that_cannot_be_read_is_named(folder: Path) -> None:
    """With the reason, and status 1."""
    (folder / "x.snapshot.json").write_text("garbage")
    result = CliRunner().invoke(command, [str(folder)])
    assert result.exit_code == 1
    assert "x.snapshot.json: cannot be read" in result.output


def test_json_has_the_last_state_of_each_pool(folder: Path) -> None:
    """For programs."""
    result = CliRunner().invoke(command, [str(folder), "--json"])
    report = json.loads(result.output)
    assert report["ok"] is True
    (file,) = report["files"]
    (pool,) = file["snapshot"]["snapshot"]["pools"]
    assert (pool["name"], pool["n_blocks"]) == ("checked", 64)


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    """In one line."""
    result = CliRunner().invoke(command, [str(tmp_path / "nowhere")])
    assert result.exit_code == 1
    assert "cannot be read" in result.output
    assert result.output.count("\n") == 1
