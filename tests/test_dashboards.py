"""The Grafana boards: what the sources make is what is committed, and it keeps to the lint rules."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from veloxquant_mlx.telemetry import CATALOGUE

ROOT = Path(__file__).resolve().parent.parent
BOARDS = sorted((ROOT / "dashboards" / "grafana").glob("*.json"))
RUNBOOKS = ROOT / "docs" / "runbooks"

BUILDER = importlib.util.find_spec("grafana_dashboards") is not None
SDK = importlib.util.find_spec("grafana_foundation_sdk") is not None

# Panels of Grafana 12; the Angular ones (graph, singlestat, table-old) are gone.
PANEL_TYPES = {
    "bargauge",
    "gauge",
    "heatmap",
    "row",
    "stat",
    "state-timeline",
    "table",
    "text",
    "timeseries",
}
RANGES = {"$__rate_interval", "$__range", "$__interval"}
# Metrics that Prometheus makes itself.
OF_PROMETHEUS = {"scrape_samples_scraped", "up"}

each_board = pytest.mark.parametrize("file", BOARDS, ids=lambda file: file.stem)


def load(file: Path) -> dict[str, Any]:
    """Read a board."""
    board: dict[str, Any] = json.loads(file.read_text())
    return board


def panels(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every panel but the row headings."""
    return (panel for panel in board["panels"] if panel["type"] != "row")


def expressions(board: dict[str, Any]) -> Iterator[str]:
    """Every query of a board."""
    for panel in panels(board):
        for target in panel.get("targets", ()):
            yield target["expr"]
    for note in board["annotations"]["list"]:
        yield note["expr"]


@pytest.mark.skipif(not BUILDER, reason="grafana-dashboard-builder is not installed")
def test_committed_boards_are_what_the_sources_make() -> None:
    """Byte for byte."""
    check = [sys.executable, str(ROOT / "dashboards" / "build.py"), "--check"]
    result = subprocess.run(check, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.filterwarnings("ignore:the imp module:DeprecationWarning")  # the library's, on 3.11
@pytest.mark.skipif(not BUILDER, reason="grafana-dashboard-builder is not installed")
def test_a_board_edited_by_hand_is_noticed(tmp_path: Path) -> None:
    """One changed byte, a lost file, and one without a source."""
    spec = importlib.util.spec_from_file_location("build", ROOT / "dashboards" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    boards = build.build()
    for name, text in boards.items():
        (tmp_path / name).write_text(text)
    assert build.stale(boards, tmp_path) == []
    first, second, *_ = sorted(boards)
    (tmp_path / first).write_text(boards[first] + " ")
    (tmp_path / second).unlink()
    (tmp_path / "orphan.json").write_text("{}")
    assert build.stale(boards, tmp_path) == sorted([first, second, "orphan.json"])


# The SDK prefers schema 2 boards; ours are of the classic one, which every Grafana reads.
@pytest.mark.filterwarnings("ignore:Prefer using dashboardv2:DeprecationWarning")
@pytest.mark.skipif(not SDK, reason="grafana-foundation-sdk is not installed")
@each_board
def test_grafanas_own_models_read_the_board(file: Path) -> None:
    """And find the panels that were written."""
    from grafana_foundation_sdk.models.dashboard import Dashboard

    board = load(file)
    read = Dashboard.from_json(board)
    assert read.uid == board["uid"]
    assert read.schema_version == board["schemaVersion"]
    assert len(read.panels or []) == len(board["panels"])


def test_there_are_six_boards_with_uids_of_their_own() -> None:
    """A board with another's uid replaces it."""
    uids = {load(file)["uid"] for file in BOARDS}
    assert len(BOARDS) == len(uids) == 6


@each_board
def test_F01_provisioned_boards_need_no_import(file: Path) -> None:
    """No inputs, no fixed data source, an id that Grafana gives."""
    text, board = file.read_text(), load(file)
    assert "${DS_" not in text
    assert "__inputs" not in board
    assert "__requires" not in board
    assert board["id"] is None
    assert board["editable"] is False
    assert board["uid"]
    assert isinstance(board["schemaVersion"], int)
    for panel in panels(board):
        assert panel["datasource"]["uid"] == "${datasource}"
        assert all(t["datasource"]["uid"] == "${datasource}" for t in panel["targets"])


@each_board
def test_F04_panels_are_of_kinds_that_exist(file: Path) -> None:
    """And each has what a reader needs: title, description, unit, queries, a place."""
    board = load(file)
    assert "rows" not in board
    for panel in board["panels"]:
        assert not panel.get("panels"), "rows are open: a collapsed one would hide panels from here"
        assert panel["type"] in PANEL_TYPES
        assert set(panel["gridPos"]) == {"h", "w", "x", "y"}
    for panel in panels(board):
        assert panel["title"]
        assert len(panel["description"]) > 20, panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["targets"]
        letters = [target["refId"] for target in panel["targets"]]
        assert letters == sorted(set(letters))


@each_board
def test_panels_do_not_overlap(file: Path) -> None:
    """Nor stick out of the grid."""
    taken: set[tuple[int, int]] = set()
    for panel in load(file)["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert taken.isdisjoint(cells), panel.get("title")
        taken |= cells


@each_board
def test_F03_ranges_follow_the_scrape_interval(file: Path) -> None:
    """A fixed window is empty for who scrapes less often; rates never see fewer than four scrapes."""
    board = load(file)
    for expression in expressions(board):
        assert set(re.findall(r"\[([^\]]+)\]", expression)) <= RANGES, expression
    for panel in panels(board):
        for target in panel["targets"]:
            assert ("$__rate_interval" in target["expr"]) == (target.get("interval") == "1m")
    assert all(note["step"] == "60s" for note in board["annotations"]["list"])


def test_F03_windows_of_rules_hold_four_scrapes() -> None:
    """At the longest interval that docs/dashboards.md allows, a minute."""
    for file in sorted((ROOT / "dashboards" / "alerts").glob("[ar]*.yaml")):
        windows = re.findall(r"\[(\d+)([mh])(?::\d+[smh])?\]", file.read_text())
        assert windows, file.name
        for number, unit in windows:
            assert int(number) * {"m": 1, "h": 60}[unit] >= 4, f"[{number}{unit}]"


@each_board
def test_F05_heatmaps_read_buckets(file: Path) -> None:
    """As such, and by le alone."""
    for panel in panels(load(file)):
        if panel["type"] == "heatmap":
            assert panel["options"]["calculate"] is False
            for target in panel["targets"]:
                assert target["format"] == "heatmap"
                assert target["legendFormat"] == "{{le}}"
                assert target["expr"].startswith("sum by (le)(rate(")


@each_board
def test_every_selector_follows_the_variables(file: Path) -> None:
    """Job and instance; without them the choice above the board does nothing."""
    for expression in expressions(load(file)):
        selectors = re.findall(r"\{([^}]*)\}", expression)
        assert selectors, expression
        for selector in selectors:
            assert 'job=~"$job"' in selector
            assert 'instance=~"$instance"' in selector


@each_board
def test_variables_are_the_same_on_every_board(file: Path) -> None:
    """One data source; job and instance with All; fetched anew when the time range changes."""
    variables = {v["name"]: v for v in load(file)["templating"]["list"]}
    assert variables["datasource"]["label"] == "Data source"
    for name in ("job", "instance"):
        variable = variables[name]
        assert variable["multi"]
        assert variable["includeAll"]
        assert variable["refresh"] == 2


@each_board
def test_counters_are_rated_and_gauges_are_not(file: Path) -> None:
    """Names are those of the catalogue, and read by their kind."""
    kinds = {metric.name: metric.kind for metric in CATALOGUE}
    for expression in expressions(load(file)):
        for name in re.findall(r"(?<![:\w])(veloxquant_\w+|scrape_\w+|up)\{", expression):
            rated = re.search(rf"(?:rate|increase|resets)\({re.escape(name)}\{{", expression)
            if name in OF_PROMETHEUS:
                continue
            base = name.removesuffix("_bucket")
            assert base in kinds, name
            counts = kinds[base] == "counter" or name.endswith("_bucket")
            assert bool(rated) == counts, expression


@each_board
def test_panels_link_runbooks_that_exist(file: Path) -> None:
    """One each."""
    for panel in panels(load(file)):
        (link,) = panel["links"]
        name = link["url"].removeprefix("${runbooks}/")
        assert (RUNBOOKS / name).is_file(), link["url"]


def test_runbooks_name_panels_that_are_there() -> None:
    """On the board that they send the reader to."""
    boards = {load(file)["title"]: load(file) for file in BOARDS}
    named = 0
    for book in RUNBOOKS.glob("*.md"):
        sentence = re.search(r"Board \*(VeloxQuant / [^*]+)\*(.*)", book.read_text())
        if sentence is None:
            continue
        titles = {panel["title"] for panel in panels(boards[sentence[1]])}
        # Up to a colon: what follows are names of series and other emphasis.
        wanted = re.findall(r"\*([^*]+)\*", sentence[2].partition(": ")[0])
        assert set(wanted) <= titles, book.name
        named += len(wanted)
    assert named > 8


def test_every_pool_metric_is_on_a_board_or_in_a_rule() -> None:
    """What nobody looks at need not be measured; the exceptions say why."""
    exceptions = {
        "veloxquant_block_pool_blocks_total": "the contract's name of blocks_managed",
        "veloxquant_block_pool_double_frees_total": "the sum of two reasons that are shown",
        "veloxquant_block_pool_operations_total": "for ad-hoc questions: calls beside blocks",
        "veloxquant_block_pool_block_size_tokens": "for Kubernetes' model-server protocol",
        "veloxquant_block_pool_config_info": "a label carrier",
        "veloxquant_block_pool_storage_logical_bytes": "for ad-hoc questions: packed size",
        "veloxquant_block_pool_reused_total": "a recording rule's, shown when wanted",
        "veloxquant_block_pool_stream_blocks_in_use": "managed less free, by stream",
        "veloxquant_block_pool_storage_evaluated_bytes": "for ad-hoc questions: lazy buffers",
        "veloxquant_block_pool_storage_written_bytes": "for ad-hoc questions: lazy buffers",
        "veloxquant_block_pool_storage_format_bytes": "for ad-hoc questions: bytes by format",
        "veloxquant_block_pool_lease_lifetime_seconds": "beside the lifetime of blocks",
        "veloxquant_block_pool_pools": "how many pools 'other' stands for",
        "veloxquant_exporter_snapshot_files": "for ad-hoc questions: the sidecar's folder",
        "veloxquant_exporter_removed_files_total": "for ad-hoc questions: the sidecar's folder",
        "veloxquant_build_info": "a label carrier; the job variable reads it",
        "veloxquant_mlx_memory_device_total_bytes": "CUDA only",
        "veloxquant_mlx_memory_device_free_bytes": "CUDA only",
        "veloxquant_program_pool_excess_blocks": "new; its panel is to come",
        "veloxquant_program_pool_uncharged_blocks_total": "new; its panel is to come",
        "veloxquant_program_pool_enforced": "new; its panel is to come",
        "veloxquant_program_caches": "for ad-hoc questions: objects, not bytes",
        "veloxquant_program_cache_slots": "bytes of waste say the same",
        "veloxquant_program_cache_slots_held": "bytes of waste say the same",
        "veloxquant_program_prompt_cache_tokens": "for ad-hoc questions: tokens beside bytes",
        "veloxquant_program_prompt_cache_lookups_total": "tokens that were found say more",
        "veloxquant_program_request_duration_seconds": "first token and pace say why",
        "veloxquant_program_time_per_output_token_seconds": "time between tokens has the tail",
        "veloxquant_program_request_tokens": "for ad-hoc questions: sizes of requests",
    }
    text = "".join(file.read_text() for file in BOARDS)
    text += "".join(f.read_text() for f in (ROOT / "dashboards" / "alerts").glob("[ar]*.yaml"))
    unseen = {m.name for m in CATALOGUE if m.name not in text}
    assert unseen <= set(exceptions)


def test_pictures_are_drawn_only_where_the_tool_is() -> None:
    """Without it the script says what is missing; CI needs neither."""
    environment = {k: v for k, v in os.environ.items() if k != "VELOXQUANT_BOARDS_TOOL"}
    script = ROOT / "scripts" / "shoot-boards"
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "VELOXQUANT_BOARDS_TOOL" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@each_board
def test_each_board_has_a_picture_of_either_theme(file: Path) -> None:
    """Small enough for a page, and shown in the docs."""
    page = (ROOT / "docs" / "dashboards.md").read_text("utf-8")
    for theme in ("dark", "light"):
        picture = ROOT / "docs" / "pictures" / "boards" / f"{file.stem}-{theme}.png"
        assert picture.stat().st_size < 250_000
        assert f"pictures/boards/{picture.name}" in page
