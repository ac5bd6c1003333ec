"""The sidecar from end to end: real workers that die in every way, while a client reads."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from tests.sidecar_help import (
    DEADLINE_S,
    INTERVAL_S,
    Client,
    LocalSidecar,
    Page,
    Sidecar,
    Worker,
    a_file,
    environment,
    get,
    put,
    wait_for,
)
from veloxquant_mlx.telemetry.snapshot_json import FILE_SUFFIX

pytest.importorskip("prometheus_client")
pytestmark = pytest.mark.timeout(90)
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
NOBODY = 65534


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that does not exist yet."""
    return tmp_path / "snapshots"


@pytest.fixture
def sidecar(folder: Path) -> Iterator[LocalSidecar]:
    """A sidecar over the folder."""
    with LocalSidecar(folder) as running:
        yield running


def test_E07_what_stopped_is_not_served_as_live(folder: Path, sidecar: LocalSidecar) -> None:
    """After a clean end the series go at once; while a process lives, its age can be seen."""
    with Client(sidecar.port) as client, Worker(folder) as worker:
        worker.do("pool.allocate('kv', 160, 1) and beats()")
        page = sidecar.page()
        assert page.in_use("worker-0") == 10
        name = "veloxquant_exporter_snapshot_timestamp_seconds"
        before = page.value(name, process="worker-0")
        worker.do("beats()")
        now = sidecar.page().value(name, process="worker-0")
        assert before is not None and now is not None and now > before
        worker.leave()
        page = sidecar.page()
        assert page.up("worker-0") is None and page.allocations("worker-0") is None
        assert page.value("veloxquant_exporter_snapshot_files", state="stopped") == 1
    assert ("worker-0", 0.0) not in client.ups, "a clean end raises no alert"


@ROOT_ONLY
def test_E08_a_sidecar_of_another_user_reads_under_any_umask(folder: Path) -> None:
    """The mode is set on purpose; what it may not read is counted and logged once."""
    for parent in takewhile(lambda p: p != Path(tempfile.gettempdir()), folder.parents):
        parent.chmod(parent.stat().st_mode | 0o055)
    folder.mkdir()
    folder.chmod(0o750)
    os.chown(folder, 0, NOBODY)
    folder.chmod(0o2750)  # files take the group of the folder
    with Worker(None) as worker:
        worker.do("os.umask(0o077)")
        worker.do(f"publisher = publish({str(folder)!r}, {INTERVAL_S})")
        worker.do("beats()")
        (path,) = folder.glob(f"[!.]*{FILE_SUFFIX}")
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        with Sidecar(folder, ids=(NOBODY, NOBODY)) as sidecar, Client(sidecar.port):
            assert sidecar.page().up("worker-0") == 1
            secret = put(folder, a_file(process="secret"))
            secret.chmod(0o600)
            for _ in range(3):
                page = sidecar.page()
                assert page.error("permission_denied") == 1
                assert page.up("worker-0") == 1
            denied = [line for line in sidecar.log if "permission_denied" in line["message"]]
            assert len(denied) == 1


def test_E10_two_writers_of_one_name(folder: Path, sidecar: LocalSidecar) -> None:
    """Both write, neither spoils the other's file; the newest counts and the clash is told."""
    with Client(sidecar.port, successors=True), Worker(folder, "api") as one:
        one.do("pool.allocate('kv', 160, 1) and beats()")
        assert sidecar.page().allocations("api") == 10
        with Worker(folder, "api") as two:
            two.do("pool.allocate('kv', 320, 1) and beats()")
            page = sidecar.page()
            assert page.allocations("api") == 20 and page.error("clash") == 1
            assert len(list(folder.glob(f"api.*{FILE_SUFFIX}"))) == 2
            two.leave()
        assert sidecar.page().error("clash") == 1
        one.do("pool.allocate('kv', 320, 1) and beats()")
        assert sidecar.page().allocations("api") == 30


def test_E12_workers_forked_before_the_folder_is_set(folder: Path, sidecar: LocalSidecar) -> None:
    """Each shows under a slot of its own, never under a pid; files stay few."""
    child = f"""
os.environ["VELOXQUANT_SNAPSHOT_DIR"] = {str(folder)!r}
pool = BlockPoolAllocator(PoolConfig(n_blocks=64))
instrument(pool, name="late")
publisher = publish(interval={INTERVAL_S})
while True:
    threading.Event().wait(60)
"""
    with Worker(None) as worker, Client(sidecar.port):
        worker.do(f"child = {child!r}")
        worker.do("children = [os.fork() or exec(child) for _ in range(3)]")
        try:
            ups = {"worker-0", "worker-1", "worker-2"}
            wait_for(lambda: all(sidecar.page().up(name) == 1 for name in ups), "three workers")
            assert len(list(folder.iterdir())) <= 3 * 3
        finally:
            worker.do("[os.kill(child, 9) or os.waitpid(child, 0) for child in children]")
        page = sidecar.page()
        assert {name: page.up(name) for name in ups} == dict.fromkeys(ups, 0.0)


def test_E13_totals_survive_the_sidecar(folder: Path) -> None:
    """Stopped, killed and started again under load: they go on where they were."""
    with ExitStack() as stack:
        worker = stack.enter_context(Worker(folder))
        worker.do("load()")
        first = stack.enter_context(Sidecar(folder))
        port = first.port
        with Client(port, may_fail=True) as client:
            wait_for(lambda: client.n_pages > 3, "pages")
            before = first.page().allocations("worker-0")
            for number in (signal.SIGTERM, signal.SIGKILL):
                assert first.stop(number) == (0 if number == signal.SIGTERM else -number)
                first = stack.enter_context(Sidecar(folder, port=port))
                after = first.page().allocations("worker-0")
                assert before is not None and after is not None and after >= before
                before = after
            seen = client.n_pages
            wait_for(lambda: client.n_pages > seen + 3, "pages after the restarts")


def test_E14_a_scrape_of_many_dead_files(folder: Path) -> None:
    """5,000 of them: the page is served, they are cleaned up, and their number is told."""
    folder.mkdir()
    text = json.dumps("worker-0")
    file = put(folder, a_file(), "first").read_text()
    for n in range(5000):
        (folder / f"{n}{FILE_SUFFIX}").write_text(file.replace(text, f'"worker-{n}"', 1))
    (folder / "first").unlink()
    with Sidecar(folder) as sidecar, Worker(folder, "live") as worker:
        worker.do("beats()")
        page = sidecar.page()
        assert page.up("live") == 1
        assert page.value("veloxquant_exporter_snapshot_files", state="dead") == 64
        assert page.value("veloxquant_exporter_removed_files_total") == 5000 - 64
        assert len(list(folder.glob(f"[!.]*{FILE_SUFFIX}"))) == 65


def test_B18_four_workers_one_busy(folder: Path, sidecar: LocalSidecar) -> None:
    """A stable label each, no pid anywhere, and sums that are right."""
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(folder)) for _ in range(4)]
        workers[2].do("pool.allocate('kv', 160, 1) and beats()")
        page = sidecar.page()
        counts = {f"worker-{n}": page.allocations(f"worker-{n}") for n in range(4)}
        assert counts == {"worker-0": 0, "worker-1": 0, "worker-2": 10, "worker-3": 0}
        assert not [worker for worker in workers if f'"{worker.pid}"' in page.body]


def test_a_killed_worker_shows_and_its_counts_stay(folder: Path, sidecar: LocalSidecar) -> None:
    """SIGKILL: up 0, gauges gone, what it counted there; its last snapshot can be read."""
    with Client(sidecar.port) as client, Worker(folder, "a/b") as worker:
        worker.do("pool.allocate('kv', 160, 1) and beats()")
        assert sidecar.page().in_use("a/b") == 10
        worker.kill()
        page = sidecar.page()
        assert (page.up("a/b"), page.in_use("a/b"), page.allocations("a/b")) == (0, None, 10)
        status, body = sidecar.get(f"/debug/last/{urllib.parse.quote('a/b', safe='')}")
        last = json.loads(body)["files"][0]
        assert (status, last["state"]) == (200, "dead")
        assert last["file"]["snapshot"]["pools"][0]["n_allocations"] == 10
        assert [row["process"] for row in json.loads(sidecar.get("/debug/last")[1])] == ["a/b"]
        assert sidecar.get("/debug/last/nobody")[0] == 404
        assert client.ups >= {("a/b", 1.0)}


def test_a_kill_under_load_loses_at_most_one_interval(folder: Path, sidecar: LocalSidecar) -> None:
    """What was counted before the last beat is served after the death."""
    with Client(sidecar.port), Worker(folder) as worker:
        worker.do("load()")
        count = int(worker.do("pool.stats.n_allocations"))
        worker.do("beats(2)")  # the second one began after the count
        worker.kill()
        page = sidecar.page()
        assert page.up("worker-0") == 0
        served = page.allocations("worker-0")
        assert served is not None and served >= count > 0


def test_a_dead_worker_is_forgotten_in_time(folder: Path) -> None:
    """When its retention ends: no series, no file."""
    with Sidecar(folder, "--retention", "100ms") as sidecar, Worker(folder) as worker:
        worker.kill()
        wait_for(lambda: sidecar.page().up("worker-0") is None, "the end of the retention")
        assert not list(folder.glob(f"[!.]*{FILE_SUFFIX}"))


def test_a_suspended_worker_is_stale_and_comes_back(folder: Path, sidecar: LocalSidecar) -> None:
    """SIGSTOP: alive, so its series stay, with their age; SIGCONT: as if nothing had been."""

    def files(state: str) -> float | None:
        return sidecar.page().value("veloxquant_exporter_snapshot_files", state=state)

    with Client(sidecar.port) as client, Worker(folder) as worker:
        worker.do("pool.allocate('kv', 160, 1) and beats()")
        worker.send(signal.SIGSTOP)
        wait_for(lambda: files("stale") == 1, "stale")
        page = sidecar.page()
        assert (page.up("worker-0"), page.in_use("worker-0")) == (1, 10)
        worker.send(signal.SIGCONT)
        wait_for(lambda: files("live") == 1, "live again")
        worker.leave()
    assert ("worker-0", 0.0) not in client.ups


def test_a_rolling_restart_raises_no_alert(folder: Path, sidecar: LocalSidecar) -> None:
    """New workers come before the old ones go; nobody is seen down at any time."""
    with ExitStack() as stack, Client(sidecar.port, successors=True) as client:
        workers = [stack.enter_context(Worker(folder)) for _ in range(2)]
        for _ in range(2):
            newcomer = stack.enter_context(Worker(folder))
            assert newcomer.do("publisher.process") == "worker-2"
            workers.pop(0).leave()
            workers.append(stack.enter_context(Worker(folder)))  # takes the slot that is free
            newcomer.leave()
        seen = client.n_pages
        wait_for(lambda: client.n_pages > seen + 1, "pages after it")
        for worker in workers:
            worker.leave()
    assert {process for process, _ in client.ups} == {"", "worker-0", "worker-1", "worker-2"}
    assert {value for _, value in client.ups} == {1.0}


def test_a_restart_under_the_same_name_is_up(folder: Path, sidecar: LocalSidecar) -> None:
    """The successor of a killed worker is what the name means from now on."""
    with Worker(folder, "api") as worker:
        worker.kill()
        assert sidecar.page().up("api") == 0
    with Worker(folder, "api"):
        page = sidecar.page()
        assert page.up("api") == 1 and page.error("clash") == 0
        states = [row["state"] for row in json.loads(sidecar.get("/debug/last/api")[1])["files"]]
        assert states == ["live", "dead"]


def test_a_reused_pid_is_not_taken_for_the_dead(folder: Path, sidecar: LocalSidecar) -> None:
    """The same pid, alive, that began at another time: as if the kernel had given it out again."""
    with Worker(folder) as worker:
        (path,) = folder.glob(f"[!.]*{FILE_SUFFIX}")
        raw = path.read_text()
        start = json.loads(raw)["header"]["identity"]["start_time"]
        other = raw.replace(f'"{start}"', '"1"', 1).replace('"worker-0"', '"before"', 1)
        (folder / f"before{FILE_SUFFIX}").write_text(other)
        page = sidecar.page()
        assert (page.up("before"), page.up("worker-0")) == (0, 1)
        worker.leave()


def test_a_full_disk_while_a_client_reads(folder: Path, sidecar: LocalSidecar) -> None:
    """The worker serves on and is stale; when there is room, its failures are told."""
    with Client(sidecar.port), Worker(folder) as worker:
        worker.do("import resource; free = (resource.RLIM_INFINITY,) * 2")
        worker.do("resource.setrlimit(resource.RLIMIT_FSIZE, (100, free[1]))")
        wait_for(lambda: int(worker.do("publisher.errors['disk_full']")) >= 3, "failures")
        assert worker.do("len(pool.allocate('kv', 160, 1))") == "10"
        assert sidecar.page().up("worker-0") == 1
        worker.do("resource.setrlimit(resource.RLIMIT_FSIZE, free)")
        worker.do("beats()")
        page = sidecar.page()
        name = "veloxquant_exporter_collect_errors_total"
        failed = page.value(name, process="worker-0", reason="publish_disk_full")
        assert failed is not None and failed >= 3
        assert page.allocations("worker-0") == 10


def test_a_folder_removed_and_made_anew(folder: Path, sidecar: LocalSidecar) -> None:
    """By whoever: worker and sidecar meet again in the new one, under the same label."""
    with Client(sidecar.port), Worker(folder) as worker:
        worker.do("pool.allocate('kv', 160, 1) and beats()")
        for _ in range(2):
            shutil.rmtree(folder, ignore_errors=True)
            worker.do("beats(3)")
            page = sidecar.page_where(lambda page: page.up("worker-0") == 1, "up again")
            assert page.allocations("worker-0") == 10


def test_files_of_every_bad_kind_while_a_client_reads(folder: Path, sidecar: LocalSidecar) -> None:
    """Nothing blocks, nothing else is lost."""
    with Client(sidecar.port), Worker(folder):
        os.mkfifo(folder / "fifo")
        (folder / "folder").mkdir()
        (folder / "link").symlink_to("/dev/zero")
        (folder / "empty").touch()
        (folder / "garbage").write_bytes(os.urandom(1000))
        page = sidecar.page()
        found = {reason: page.error(reason) for reason in ("not_a_file", "empty", "invalid")}
        assert found == {"not_a_file": 3, "empty": 1, "invalid": 1}
        assert page.up("worker-0") == 1


@ROOT_ONLY
def test_containers_that_both_say_pid_1(folder: Path, sidecar: LocalSidecar) -> None:
    """Each in a PID namespace of its own: live while they beat, dead by their silence."""
    wrap = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    if subprocess.run([*wrap, "true"], check=False, capture_output=True).returncode:
        pytest.skip("may not make a PID namespace here")
    with (
        Client(sidecar.port),
        Worker(folder, wrap=wrap) as one,
        Worker(folder, wrap=wrap) as two,
    ):
        assert [worker.do("os.getpid()") for worker in (one, two)] == ["1", "1"]
        labels = [worker.do("publisher.process") for worker in (one, two)]
        assert labels == ["worker-0", "worker-1"], "the lock reaches across"
        page = sidecar.page()
        assert (page.up("worker-0"), page.up("worker-1")) == (1, 1)
        one.kill()
        wait_for(lambda: sidecar.page().up("worker-0") == 0, "its death")
        two.do("beats()")
        page = sidecar.page_where(lambda page: page.up("worker-1") == 1, "the other")
        assert page.up("worker-0") == 0


# -- the command ---------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_ends_in_order(folder: Path, number: signal.Signals) -> None:
    """Exit code 0, a line of JSON each, the port free again."""
    sidecar = Sidecar(folder)
    assert sidecar.get("/-/ready")[0] == 200
    assert sidecar.stop(number) == 0
    assert [line["message"] for line in sidecar.log][-1] == "stopping"
    with socket.create_server(("127.0.0.1", sidecar.port)):
        pass


def serve(*options: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "veloxquant_exporters.cli", "serve", *options],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_serve_that_cannot_start_says_why(folder: Path, tmp_path: Path) -> None:
    """One line and exit code 1, or 2 for wrong usage."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = serve("--snapshot-dir", str(folder), "--port", port)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and port in done.stderr
    key = str(tmp_path / "key.pem")
    done = serve("--snapshot-dir", str(folder), "--port", "0", "--tls-key", key)
    assert done.returncode == 1 and "--tls-cert" in done.stderr
    assert serve("--port", "0").returncode == 2
    done = serve("--snapshot-dir", str(folder), "--retention", "soon")
    assert done.returncode == 2 and "'soon' is no time" in done.stderr


def test_serve_does_not_publish_itself(folder: Path) -> None:
    """Though the variable that names the folder is set for it."""
    code = (
        "import sys, threading; from veloxquant_exporters.cli import main;"
        "threading.Timer(0.5, lambda: __import__('os').kill(__import__('os').getpid(), 15)).start();"
        "main(['serve', '--port', '0'])"
    )
    env = {**environment(), "VELOXQUANT_SNAPSHOT_DIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", code], env=env, check=False, timeout=60)
    assert done.returncode in (0, -signal.SIGTERM) and not folder.exists()


def test_serve_pushes_over_otlp(folder: Path) -> None:
    """The same numbers, by process, while they live."""
    pytest.importorskip("opentelemetry.sdk")
    from tests.otlp_receiver import OtlpReceiver

    receiver = OtlpReceiver()

    def allocations(_: OtlpReceiver) -> dict[str, float]:
        found = {}
        for batch in receiver.metrics[-1:]:
            for metric in batch.resource_metrics[0].scope_metrics[0].metrics:
                if metric.name == "veloxquant.block_pool.allocations":
                    for point in metric.sum.data_points:
                        labels = {a.key: a.value.string_value for a in point.attributes}
                        found[labels["veloxquant.process"]] = point.as_int or point.as_double
        return found

    push = ("--otlp-endpoint", receiver.url, "--otlp-interval", "100ms")
    try:
        with Sidecar(folder, *push) as sidecar, Worker(folder, "api") as worker:
            worker.do("pool.allocate('kv', 160, 1) and beats()")
            receiver.wait(lambda _: allocations(receiver) == {"api": 10})
            assert sidecar.page().allocations("api") == 10
            worker.leave()
            receiver.wait(lambda _: not allocations(receiver))
    finally:
        receiver.close()


def test_serve_over_tls(folder: Path, tmp_path: Path) -> None:
    """With a certificate, the same page over HTTPS, and nothing over HTTP."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl, which makes the certificate, here")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", str(key), "-out", str(cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    with (
        Sidecar(folder, "--tls-cert", str(cert), "--tls-key", str(key)) as sidecar,
        Worker(folder) as worker,
    ):
        context = ssl.create_default_context(cafile=str(cert))
        url = f"https://127.0.0.1:{sidecar.port}/metrics"
        with urllib.request.urlopen(url, context=context, timeout=DEADLINE_S) as answer:
            assert Page(answer.read().decode()).up("worker-0") == 1
        with pytest.raises((OSError, http.client.HTTPException)):
            sidecar.get()
        worker.leave()


# -- Prometheus ----------------------------------------------------------------------------------


@contextmanager
def prometheus(folder: Path, target: int) -> Iterator[int]:
    """A real Prometheus that scrapes the sidecar; gives its port."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("no prometheus here")
    folder.mkdir()
    config = folder / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 200ms, scrape_timeout: 200ms}\n"
        "scrape_configs:\n"
        "  - job_name: veloxquant\n"
        f"    static_configs: [{{targets: ['127.0.0.1:{target}']}}]\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    running = subprocess.Popen(
        [program, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
         f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_for(lambda: _ready(port), "Prometheus")
        yield port
    finally:
        running.terminate()
        running.wait(DEADLINE_S)


def _ready(port: int) -> bool:
    try:
        return get(port, "/-/ready")[0] == 200
    except OSError:
        return False


def ask(port: int, query: str) -> dict[str, float]:
    """The value by process that Prometheus has for a query now."""
    path = "/api/v1/query?" + urllib.parse.urlencode({"query": query})
    answer: dict[str, Any] = json.loads(get(port, path)[1])
    return {row["metric"].get("process", ""): float(row["value"][1])
            for row in answer["data"]["result"]}  # fmt: skip


def test_a_real_prometheus_sees_a_life_and_a_death(
    folder: Path, sidecar: LocalSidecar, tmp_path: Path
) -> None:
    """It scrapes, sums over workers, sees one die, and keeps what that one counted."""
    with (
        prometheus(tmp_path / "prometheus", sidecar.port) as port,
        Worker(folder) as one,
        Worker(folder) as two,
    ):
        one.do("pool.allocate('kv', 160, 1) and beats()")
        two.do("pool.allocate('kv', 320, 1) and beats()")
        total = "sum(veloxquant_block_pool_allocations_total)"
        wait_for(lambda: ask(port, total).get("") == 30, "both workers' counts")
        assert ask(port, "up") == {"": 1}
        in_use = "veloxquant_block_pool_blocks_in_use"
        assert ask(port, in_use) == {"worker-0": 10, "worker-1": 20}
        one.kill()
        wait_for(
            lambda: ask(port, 'veloxquant_exporter_up{process!=""} == 0') == {"worker-0": 0},
            "the death",
        )
        wait_for(lambda: ask(port, in_use) == {"worker-1": 20}, "its gauges gone")
        assert ask(port, total) == {"": 30}
