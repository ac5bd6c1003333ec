"""Every query of every board and rule, over a real Prometheus and against a live scrape."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client")
pytest.importorskip("yaml")

from benchmarks.guard.publish import openmetrics, ratios_of, samples_of
from dashboards.backfill import Server, backfilled
from tests.board_queries import (
    ALERTS,
    BOARDS,
    RECORDS,
    Query,
    board_queries,
    grouped_labels,
    rules_of,
    selectors,
)
from tests.metrics_pages import series_of
from tests.sidecar_help import LocalSidecar, Worker, environment, wait_for
from veloxquant_mlx.telemetry import CATALOGUE

ROOT = Path(__file__).resolve().parent.parent
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="prometheus (Debian's package of that name) is not installed",
)
pytestmark = pytest.mark.timeout(180)

END_S = 1_700_000_000 // 60 * 60
MINUTES = 36
START_S = END_S - MINUTES * 60

# Alerts that the fleet's evening gives no reason for.
QUIET = {
    "VeloxQuantPoolInvariantViolated": "the books add up",
    "VeloxQuantPoolOperationSlow": "no call takes a millisecond",
    "VeloxQuantMlxMemoryNearLimit": "no machine is near its limit",
    "VeloxQuantMlxMemoryDrift": "it takes more than an hour to tell",
    "VeloxQuantMlxCacheGrowing": "the cache comes and goes with the load",
    "VeloxQuantExporterAbsent": "there are exporters",
    "VeloxQuantGenerationThreadDead": "every server's thread lives",
    "VeloxQuantTelemetryOverhead": "watching costs next to nothing",
    "VeloxQuantBenchmarkStale": "the benchmarks ran within the hour",
}
# What no Prometheus on Linux has from us, or what others than the sidecar make.
ELSEWHERE = {
    "veloxquant_process_phys_footprint_bytes": "macOS has it",
    "veloxquant_mlx_memory_limit_bytes": "MLX on a CPU tells none",
    "veloxquant_mlx_memory_account_bytes": "of programs that are watched",
    "scrape_samples_scraped": "Prometheus makes it",
    "up": "Prometheus makes it",
}


@dataclass(frozen=True, slots=True)
class Recorded:
    """A Prometheus over the fleet's evening and a history of benchmarks."""

    server: Server
    interval_s: int

    def data(self, expr: str, *, instant: bool = False) -> list[Any]:
        """What a query gives: at the end, or over the evening at steps of a minute."""
        if instant:
            return list(self.server.api("query", query=expr, time=END_S)["result"])
        window = {"start": START_S, "end": END_S, "step": 60}
        return list(self.server.api("query_range", query=expr, **window)["result"])

    def variables(self, board: dict[str, Any]) -> dict[str, str]:
        """The board's variables at All, each from its own query with those before it filled in."""
        values: dict[str, str] = {}
        for variable in board["templating"]["list"]:
            if variable["type"] != "query":
                continue
            query = variable["query"]["query"]
            for name, value in values.items():
                query = query.replace(f"${name}", value)
            match = re.fullmatch(r"label_values\((.+), (\w+)\)", query)
            assert match is not None, query
            window = {"start": START_S, "end": END_S, "match[]": match[1]}
            found = self.server.api(f"label/{match[2]}/values", **window)
            assert found, f"{variable['name']} has nothing to choose from: {query}"
            either = "|".join(re.escape(one).replace("\\", "\\\\") for one in found)
            values[variable["name"]] = f"({either})"
        return values


@pytest.fixture(scope="module")
def evening(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fleet, scraped each 15 s, in a process of its own: the clock there is a virtual one."""
    page = tmp_path_factory.mktemp("fleet") / "fleet.om"
    command = ["-m", "dashboards.fleet", str(page), f"--minutes={MINUTES}", f"--end={END_S}"]
    done = subprocess.run(
        [sys.executable, *command], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return page


def seldom(page: Path, to: Path) -> Path:
    """The page as scraped once a minute: every fourth sample."""
    with page.open() as lines, to.open("w") as out:
        for line in lines:
            if line.startswith("#") or float(line.rsplit(" ", 1)[1]) % 60 == 0:
                out.write(line)
    return to


def benchmarks(to: Path) -> Path:
    """Three runs, published as the history publishes them, under a scrape's labels."""
    times = {"sizes": [1024, 4096], "target_s": [9e-7, 9.1e-7], "median_s": [1e-6, 1.1e-6]}
    runs = []
    for minutes_ago in (30, 20, 1):
        at_s = END_S - 60 * minutes_ago
        run = {"created_s": at_s, "benchmarks": {"free_all": {"status": "pass", "times": times}}}
        compared = {"ratios": {"free_all": {"ratio": 1.3}}}
        runs.append((float(at_s), [*samples_of(run), *ratios_of(compared)]))
    to.write_text(openmetrics(runs).replace("{benchmark", '{job="ci",instance="runner",benchmark'))
    return to


@pytest.fixture(scope="module", params=[15, 60], ids=["15s", "60s"])
def recorded(
    evening: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Recorded]:
    """The evening, as scraped each 15 s and each 60 s."""
    folder = tmp_path_factory.mktemp("prometheus")
    interval_s: int = request.param
    page = evening if interval_s == 15 else seldom(evening, folder / "seldom.om")
    pages = [page, benchmarks(folder / "bench.om")]
    with backfilled(
        folder / "server", pages, start_s=START_S, end_s=END_S, interval_s=interval_s
    ) as server:
        yield Recorded(server, interval_s)


def load(name: str) -> dict[str, Any]:
    """A board by its file's name."""
    import json

    (file,) = [file for file in BOARDS if file.stem == name]
    board: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return board


@needs_prometheus
def test_F03_every_query_of_every_board_returns_data(recorded: Recorded) -> None:
    """With every variable at All, at both scrape intervals; a query without data is named."""
    empty, variables = [], {}
    queries = list(board_queries())
    assert len(queries) > 80
    for query in queries:
        if query.board not in variables:
            variables[query.board] = recorded.variables(load(query.board))
        expr = query.filled(variables[query.board], MINUTES * 60)
        if not recorded.data(expr, instant=query.instant):
            empty.append((query.board, query.where, query.expr))
    assert empty == []


@needs_prometheus
def test_every_record_and_alert_runs_and_is_heard_where_it_should(recorded: Recorded) -> None:
    """Records give data and were recorded; alerts give data, but those that say why not."""
    records, alerts = rules_of(RECORDS), rules_of(ALERTS)
    assert [name for name, expr in records.items() if not recorded.data(expr)] == []
    assert [name for name in records if not recorded.data(name)] == []
    empty = {name for name, expr in alerts.items() if not recorded.data(expr)}
    assert empty - QUIET.keys() == set()
    assert QUIET.keys() <= alerts.keys()
    for name in empty:  # quiet for its reason, and not for a metric that there is not
        parts = [f"{part.name}{part.matchers}" for part in selectors(alerts[name])]
        assert parts and [part for part in parts if not recorded.data(part)] == [], name


@needs_prometheus
def test_a_query_of_a_name_or_label_that_is_not_there_is_noticed(recorded: Recorded) -> None:
    """It gives no data, and no error."""
    assert recorded.data("sum(veloxquant_block_pool_blocks_in_use)")
    assert recorded.data("sum(veloxquant_block_pool_blocks_used)") == []
    assert recorded.data('sum(veloxquant_block_pool_blocks_in_use{stream="k"})') == []


@needs_prometheus
def test_F10_of_three_instances_one_is_killed(recorded: Recorded) -> None:
    """Its level fades from sums, its end makes no rate negative and no total of rates jump."""
    board = load("pool-overview")
    at_all = recorded.variables(board)
    (panel,) = [p for p in board["panels"] if p["title"] == "Blocks in use by pool"]
    level = Query("", "", panel["targets"][0]["expr"], True)
    in_use = {
        one["metric"]["pool"]: float(one["value"][1])
        for one in recorded.data(level.filled(at_all, 600), instant=True)
    }
    alive = {**at_all, "instance": "studio-.*"}
    assert in_use == {
        one["metric"]["pool"]: float(one["value"][1])
        for one in recorded.data(level.filled(alive, 600), instant=True)
    }
    gone = Query("", "", level.expr, False).filled({**at_all, "instance": "mini.*"}, 600)
    (mini,) = recorded.data(gone)
    assert float(mini["values"][-1][0]) < END_S, "it was there, and faded"
    (panel,) = [p for p in board["panels"] if p["title"] == "Blocks handed out and given back"]
    for target in panel["targets"]:
        (flow,) = recorded.data(Query("", "", target["expr"], False).filled(at_all, 600))
        assert all(float(value) >= 0 for _, value in flow["values"])
    # What the case is about: a total over instances falls when one goes.
    (total,) = recorded.data("sum(veloxquant_block_pool_allocations_total)")
    counts = [float(value) for _, value in total["values"]]
    assert any(after < before for before, after in pairwise(counts))


def test_F10_rates_are_taken_before_sums() -> None:
    """Of each series by itself: a reset or an end shows in no sum."""
    texts = [query.expr for query in board_queries()]
    texts += [*rules_of(ALERTS).values(), *rules_of(RECORDS).values()]
    taken = [
        x for text in texts for x in re.findall(r"\b(?:rate|irate|increase|resets)\(\s*(\S+)", text)
    ]
    assert len(taken) > 40
    assert [argument for argument in taken if not argument.startswith("veloxquant_")] == []


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Labels by name on a sidecar's page over two busy processes, one with MLX."""
    pytest.importorskip("mlx.core")
    folder = tmp_path_factory.mktemp("workers") / "snapshots"
    with LocalSidecar(folder) as sidecar, Worker(folder, "api") as api, Worker(folder) as other:
        api.do("from veloxquant_mlx.memory.mlx_storage import MLXBlockStorage as Storage")
        api.do("storage = Storage(pool, 64)")
        for worker in (api, other):
            worker.do("load()")
            worker.do("beats(2)")
        label = 'veloxquant_block_pool_allocations_total{{pool="main",process="{}"}}'

        def both() -> str | None:
            body = sidecar.get()[1]
            busy = [label.format(name) in body for name in ("api", "worker-0")]
            return body if all(busy) and "storage_bytes{" in body else None

        body = wait_for(both, "two busy processes on the page") or ""
    labels: dict[str, set[str]] = {}
    for name, pairs in series_of(body):
        labels.setdefault(name, {"job", "instance"}).update(key for key, _ in pairs)
    return labels


def labels_of(name: str, page: dict[str, set[str]]) -> set[str]:
    """The labels that a metric has at Prometheus, wherever it comes from."""
    rows = {row.name: set(row.labels) for row in CATALOGUE}
    scraped = {"job", "instance"}
    if name in page:
        return page[name]
    if name.startswith(("pool:", "process:")):
        assert name in rules_of(RECORDS), name
        return scraped | {"process"} | ({"pool"} if name.startswith("pool:") else set())
    if name.startswith("veloxquant_bench_"):
        return scraped | rows[name]  # the guard publishes the catalogue's; see its tests
    if name.startswith("veloxquant_program_"):
        base = name.removesuffix("_bucket")
        return scraped | {"process"} | rows[base] | ({"le"} if base != name else set())
    assert name in ELSEWHERE, f"{name} is on no page"
    return scraped | {"process"} | rows.get(name, set())


def test_every_metric_and_label_of_every_query_is_on_a_live_page(
    page: dict[str, set[str]],
) -> None:
    """Of two busy processes, through the sidecar: matchers and groupings name labels there are."""
    queries = [query.expr for query in board_queries()]
    queries += [*rules_of(ALERTS).values(), *rules_of(RECORDS).values()]
    wrong = []
    for expr in queries:
        found = selectors(expr)
        assert found, expr
        there: set[str] = set()
        for part in found:
            labels = labels_of(part.name, page)
            there |= labels
            wrong += [(expr, label) for label in part.labels - labels]
        wrong += [(expr, label) for label in grouped_labels(expr) - there]
    assert wrong == []


def test_queries_are_taken_apart_rightly() -> None:
    """What the check above stands on."""
    expr = (
        'sum by (le, pool)(rate(a_bucket{job=~"x{}",pool!="b"}[5m])) / on(job) group_left() '
        "(pool:b_c:ratio > 0) and up offset 5m or time() - max by (x)(d_e)"
    )
    assert [(part.name, set(part.labels)) for part in selectors(expr)] == [
        ("a_bucket", {"job", "pool"}),
        ("pool:b_c:ratio", set()),
        ("up", set()),
        ("d_e", set()),
    ]
    assert grouped_labels(expr) == {"le", "pool", "job", "x"}
