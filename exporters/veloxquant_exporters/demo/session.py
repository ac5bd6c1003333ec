"""A run of the demo from start to summary, all of it on the one thread that generates."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import deque
from dataclasses import replace
from typing import Final

from click import ClickException, UsageError

from veloxquant_exporters.demo.figures import read_figures
from veloxquant_exporters.demo.metrics_page import metrics_page
from veloxquant_exporters.demo.model import DemoModel, load_model, tiny_llama
from veloxquant_exporters.demo.plain import PlainScreen, print_summary
from veloxquant_exporters.demo.screen import POOL_NAME, Frame, Screen
from veloxquant_exporters.demo.settings import Settings
from veloxquant_exporters.demo.stop import Stop
from veloxquant_exporters.demo.table import LiveScreen
from veloxquant_exporters.demo.traffic import Traffic
from veloxquant_exporters.demo.workload import LONGEST, plan_requests
from veloxquant_mlx.core.exceptions import BlockPoolExhaustedError
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig
from veloxquant_mlx.telemetry import Probe, instrument, uninstrument

__all__ = ["run_session"]

ROOM_TOKENS: Final = 2048  # that the default pool holds, of all layers
REST_S: Final = 2.0  # between rounds: the pool empties, and a watched machine gets some air
SAMPLE_S: Final = 0.05
RATE_SAMPLES: Final = 60  # the rate shown is that of the last three seconds


def run_session(settings: Settings) -> int:
    """Serve the traffic until it is done or a signal ends it, and return the exit code.

    Raises:
        ClickException: The port is taken, the model does not load, or no pool of this size can
            serve the traffic.
    """
    with metrics_page(settings.port) as page:  # first: a taken port shows before a model is loaded
        name = settings.model_name
        served = tiny_llama(settings.seed) if name is None else load_model(name)
        pool = BlockPoolAllocator(pool_config(settings, served.n_layers))
        probe = instrument(pool, name=POOL_NAME)
        try:
            return _Session(settings, served, pool, probe, f"{page.url}/metrics").run()
        finally:
            uninstrument(pool)


def pool_config(settings: Settings, n_layers: int) -> PoolConfig:
    """A pool in which each request of the mix can be served, at least alone.

    Raises:
        UsageError: The pool asked for is too small for that.
    """
    size, step = settings.block_size, settings.step
    capacity = -(-LONGEST // step) * step
    needed = 2 * n_layers * -(-capacity // size)
    n_blocks = settings.n_blocks
    if n_blocks is None:
        n_blocks = max(needed, 2 * n_layers * -(-ROOM_TOKENS // size))
    if n_blocks < needed:
        raise UsageError(
            f"--blocks {n_blocks} is too few: the longest requests need {needed} (keys and values "
            f"of {n_layers} layers x {capacity} tokens, in blocks of {size})"
        )
    return PoolConfig(block_size=size, n_blocks=n_blocks)


class _StoppedError(Exception):
    """A signal asked for the end."""


class _Session:
    """The traffic, what was sampled of it, and the screen."""

    def __init__(
        self,
        settings: Settings,
        served: DemoModel,
        pool: BlockPoolAllocator,
        probe: Probe,
        url: str,
    ) -> None:
        self._settings = settings
        self._served = served
        self._probe = probe
        self._url = url
        self._traffic = Traffic(
            served,
            pool,
            n_at_once=settings.n_at_once,
            seed=settings.seed,
            step=settings.step,
            pulse=self._pulse,
        )
        self._stop = Stop()
        self._round = 0
        self._started_s = time.monotonic()
        self._rested_s = 0.0  # until when to rest
        self._fills = self._n_fills = 0.0
        self._samples: deque[tuple[float, int]] = deque([(self._started_s, 0)], RATE_SAMPLES)
        live = not settings.plain and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._screen: Screen = LiveScreen(self._look) if live else PlainScreen(self._look)

    def run(self) -> int:
        """Serve; a signal ends it between two tokens."""
        try:
            with contextlib.suppress(_StoppedError), self._stop, self._screen:
                while self._turn():
                    self._pulse()
            last = self._look()
        finally:
            self._traffic.close()
        mean_fill = self._fills / max(1, self._n_fills)
        print_summary(replace(last, figures=read_figures(self._probe)), mean_fill)
        number = self._stop.signal
        return 128 + number if number and self._settings.once else 0

    def _pulse(self) -> None:
        """What is done often: sample, show, and hear a signal."""
        self._sample()
        self._screen.tick()
        if self._stop.signal is not None:
            raise _StoppedError

    def _turn(self) -> bool:
        """Generate a token, or rest, or begin a round; False when all is done."""
        if self._traffic.busy:
            self._advance()
            if not self._traffic.busy:
                self._rested_s = time.monotonic() + REST_S
        elif self._settings.once and self._round:
            return False
        elif time.monotonic() >= self._rested_s:
            n = self._settings.n_requests
            self._traffic.add(plan_requests(self._settings.seed, 1 + n * self._round, n))
            self._round += 1
        else:
            time.sleep(SAMPLE_S)
        return True

    def _advance(self) -> None:
        try:
            self._traffic.advance()
        except BlockPoolExhaustedError as error:
            raise ClickException(f"a request does not fit although it is alone: {error}") from error

    def _sample(self) -> None:
        now_s = time.monotonic()
        if now_s - self._samples[-1][0] < SAMPLE_S:
            return
        figures = read_figures(self._probe)
        if figures.in_use:
            self._fills += figures.fill
            self._n_fills += 1
        self._samples.append((now_s, self._traffic.n_output))

    def _look(self) -> Frame:
        (then_s, before), (now_s, now) = self._samples[0], self._samples[-1]
        return Frame(
            title=self._served.title,
            note=self._served.note,
            url=self._url,
            block_size=self._settings.block_size,
            once=self._settings.once,
            round=max(1, self._round),
            n_requests=self._settings.n_requests,
            elapsed_s=time.monotonic() - self._started_s,
            rate=(now - before) / max(now_s - then_s, SAMPLE_S),
            progress=self._traffic.progress(),
            figures=read_figures(self._probe),
        )
