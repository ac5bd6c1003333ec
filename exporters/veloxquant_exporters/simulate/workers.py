"""Workers: a process for each core, which simulates one configuration after another."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from veloxquant_exporters.simulate.tally import simulate

if TYPE_CHECKING:
    from veloxquant_exporters.simulate.result import Result
    from veloxquant_mlx.memory.pool_config import PoolConfig
    from veloxquant_mlx.telemetry.trace import Trace

__all__ = ["WorkerError", "simulate_all"]

# Below so many calls in all, starting a process takes longer than doing it here.
WORTH_PROCESSES: Final = 100_000
TOLD_EVERY_S: Final = 0.2


class WorkerError(RuntimeError):
    """A worker process ended before its work did; the message says what may have ended it."""


def simulate_all(
    path: Path,
    trace: Trace,
    configs: Sequence[PoolConfig],
    *,
    jobs: int | None = None,
    progress: Callable[[int], object] = lambda _: None,
) -> list[Result]:
    """The result of each configuration, in their order.

    Args:
        path: The file that `trace` was loaded from; workers load it themselves.
        trace: What it holds.
        configs: What to try.
        jobs: Processes at most; None is a core each.
        progress: Called now and then with the number of calls done, of `n_calls` for each
            configuration.

    Raises:
        TraceError: The trace needs more blocks than can be simulated.
        WorkerError: A worker was killed.
    """
    jobs = min(jobs or os.cpu_count() or 1, len(configs))
    if jobs == 1 or trace.n_calls * len(configs) < WORTH_PROCESSES:
        n_done = 0
        results = []
        for config in configs:
            results.append(simulate(trace, config, lambda n, done=n_done: progress(done + n)))  # type: ignore[misc]
            n_done += trace.n_calls
        return results
    # Not fork: a child of a process with threads may hang on a lock that one of them held.
    context = multiprocessing.get_context("spawn")
    counts = context.Array("q", len(configs), lock=False)
    executor = ProcessPoolExecutor(jobs, context, _begin, (str(path), counts))
    try:
        with _main_hidden():  # processes start as work is submitted
            futures = [executor.submit(_work, n, config) for n, config in enumerate(configs)]
        _await(futures, lambda: progress(sum(counts)))
        return [future.result() for future in futures]
    except BrokenProcessPool as error:
        raise WorkerError(
            "a worker process was ended from outside, perhaps for want of memory; "
            "try --jobs 1, or fewer configurations"
        ) from error
    finally:
        for worker in list((getattr(executor, "_processes", None) or {}).values()):
            worker.terminate()  # a Ctrl-C does not wait for what is under way
        executor.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _main_hidden() -> Iterator[None]:
    """Keep workers from running the program's own file, of which they need nothing.

    It would do its work anew in each, unless it guards against that; and what was read from standard
    input has no file.
    """
    main = sys.modules["__main__"]
    spec, file = main.__spec__, vars(main).pop("__file__", None)
    main.__spec__ = None
    try:
        yield
    finally:
        main.__spec__ = spec
        if file is not None:
            main.__file__ = file


def _await(futures: Sequence[Future[Result]], tell: Callable[[], object]) -> None:
    waiting: set[Future[Result]] = set(futures)
    while waiting:
        done, waiting = wait(waiting, TOLD_EVERY_S, FIRST_COMPLETED)
        tell()
        for future in done:
            future.result()  # the first failure ends it


# Of a worker process: the trace, and where it tells how far it is.
_worker: dict[str, Any] = {}


def _begin(path: str, counts: Any) -> None:
    import signal

    from veloxquant_mlx.telemetry.trace import load_trace

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker.update(trace=load_trace(path), counts=counts)


def _end_with_parent() -> None:
    """A worker waits for work for ever, also where nobody is left to send any."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _work(n: int, config: PoolConfig) -> Result:
    counts = _worker["counts"]

    def tell(n_calls: int) -> None:
        counts[n] = n_calls

    return simulate(_worker["trace"], config, tell)
