"""vqmon top on its screens, through Textual's own pilot: what is seen, and what keys do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("textual", reason="the extra top")

from textual.pilot import Pilot

from tests.top_help import DEADLINE_S, Scripted, at, exhaust, live, shown, snapshot, watched
from veloxquant_exporters.top.boards import LiveBoards
from veloxquant_exporters.top.history import Moment
from veloxquant_exporters.top.poller import Poller
from veloxquant_exporters.top.screens.app import TopApp

pytestmark = pytest.mark.timeout(60)

Act = Callable[[Pilot[int]], Awaitable[None]]
SMALL = (80, 24)


def play(source: Scripted, act: Act, size: tuple[int, int] = SMALL) -> TopApp:
    """Run `act` on the screens over `source`; the program, ended."""
    poller = Poller(LiveBoards(source), 0.1)
    poller.start()
    assert poller.wait(1, DEADLINE_S).board is not None
    app = TopApp(poller)

    async def run() -> None:
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            await act(pilot)

    try:
        asyncio.run(run())
    finally:
        source.released.set()
        poller.close()
    return app


def screen(pilot: Pilot[int]) -> list[str]:
    """The lines that are seen."""
    return shown(pilot.app.export_screenshot())


async def until(pilot: Pilot[int], condition: Callable[[str], Any], what: str) -> list[str]:
    """The lines once `condition` is true of their text."""
    loop = asyncio.get_running_loop()
    end = loop.time() + DEADLINE_S
    while True:
        lines = screen(pilot)
        if condition("\n".join(lines)):
            return lines
        text = "\n".join(lines)
        assert loop.time() < end, f"waited in vain for: {what}\n{text}"
        await pilot.pause(0.05)


async def press(pilot: Pilot[int], *keys: str) -> None:
    """Press keys, and let the screen follow."""
    await pilot.press(*keys)
    await pilot.pause()


@contextmanager
def two_pools() -> Iterator[tuple[Any, Any]]:
    """A pool that is full by five eighths, and one that is empty."""
    with watched("main", n_blocks=64) as main, watched("draft", n_blocks=32) as draft:
        main.allocate_kv(16 * 20, "one", n_filled=160)
        yield main, draft


# -- what is seen at 80 x 24 ---------------------------------------------------------------------


def test_everything_is_there_at_80_by_24() -> None:
    """Pools, streams, fill, memory, alerts and the keys, in 24 lines of at most 80 columns."""
    found: list[str] = []

    async def act(pilot: Pilot[int]) -> None:
        found.extend(await until(pilot, lambda text: "alloc/s" in text, "the table"))

    with two_pools():
        app = play(Scripted(live("main", "draft", process="worker-0")), act)
    assert app.return_value is None
    assert len(found) <= 24
    assert max(map(len, found)) <= 80
    text = "\n".join(found)
    assert "vqmon top  scripted" in found[0]
    assert "1 up  2 pools  40/96 blocks 42%" in found[1]
    row = next(line for line in found if "▸ main" in line)
    assert row.split()[1:3] == ["main", "worker-0"]
    assert "62%" in row and "40/64" in row and "50%" in row
    assert next(line for line in found if "draft" in line).count("0/32") == 1
    assert "main of worker-0" in text and "blocks of 16 tokens, does not grow" in text
    assert [line for line in found if line.startswith("k ") and "20/32" in line]
    assert "memory of worker-0" in text and "resident" in text
    assert "alerts: none" in text
    assert found[-1].split() == [
        "⏎", "Detail", "s", "Sort", "a", "Alerts", "q", "Quit", "p", "Pause", "?", "Help"
    ]  # fmt: skip


def test_any_size_will_do() -> None:
    """Small terminals lose what is less telling, large ones get more; nothing breaks."""

    async def act(pilot: Pilot[int]) -> None:
        for width, height in ((200, 60), (60, 20), (40, 10), (20, 5), (1, 1), (160, 40), SMALL):
            await pilot.resize_terminal(width, height)
            if width >= 20:
                wide = width >= 160
                lines = await until(
                    pilot,
                    lambda text, n=width, w=wide: (  # type: ignore[misc]
                        "main" in text
                        and any("─ pools" in x and "main of" in x for x in text.splitlines()) == w
                        and max(map(len, text.splitlines())) <= n
                    ),
                    f"{width} x {height}",
                )
                assert len(lines) <= height
        for keys in (("enter",), ("escape", "a"), ("escape", "question_mark")):
            await press(pilot, *keys)
            for size in ((30, 6), (1, 1), SMALL):
                await pilot.resize_terminal(*size)

    with two_pools():
        play(Scripted(live("main", "draft", process="worker-0")), act)


def test_without_pools_it_says_what_to_do() -> None:
    """An empty folder is waited at, and a process without pools is told so."""

    async def nobody(pilot: Pilot[int]) -> None:
        await until(pilot, lambda text: "no process publishes here yet" in text, "nobody")
        await press(pilot, "enter", "down", "s", "a")
        await until(pilot, lambda text: "no condition of the judged" in text, "no alert")

    async def no_pool(pilot: Pilot[int]) -> None:
        await until(pilot, lambda text: "no pool is watched" in text, "no pool")

    play(Scripted(lambda: at(0)), nobody)
    with watched("gone", n_blocks=8):
        bare = replace(snapshot("gone"), pools=())
    play(Scripted(lambda: at(0, bare)), no_pool)


def test_names_cannot_paint() -> None:
    """A pool that is called by an escape sequence or by markup is shown, and no more."""
    with watched("plain", n_blocks=8):
        found = snapshot("plain", process="w")
    evil = replace(found.pools[0], name="[red]x\x1b[2J\n漢字")

    async def act(pilot: Pilot[int]) -> None:
        await until(pilot, lambda text: "[red]x?[2J?" in text, "the name")

    play(Scripted(lambda: at(0, replace(found, pools=(evil,)))), act, (120, 30))


def test_many_pools_scroll() -> None:
    """The marked one is always seen, and how many there are is told."""
    with watched("one", n_blocks=8):
        found = snapshot("one", process="w")
    pools = tuple(replace(found.pools[0], name=f"pool-{n:03}") for n in range(64))
    many = replace(found, pools=pools)

    async def act(pilot: Pilot[int]) -> None:
        await until(pilot, lambda text: "▸ pool-000" in text and "of 64" in text, "the first")
        await press(pilot, *["down"] * 20)
        await until(pilot, lambda text: "▸ pool-020" in text, "the 21st")
        await press(pilot, "G")
        await until(pilot, lambda text: "▸ pool-063" in text, "the last")
        await press(pilot, "g")
        await until(pilot, lambda text: "▸ pool-000" in text, "the first again")

    play(Scripted(lambda: at(0, many)), act)


# -- keys ----------------------------------------------------------------------------------------


def test_arrows_mark_and_enter_opens() -> None:
    """The detail has streams, operations, owners and holders; escape goes back."""

    async def act(pilot: Pilot[int]) -> None:
        await until(pilot, lambda text: "▸ main" in text, "the first pool")
        await press(pilot, "down")
        await until(pilot, lambda text: "▸ draft" in text, "the second pool")
        await press(pilot, "down", "up")
        await until(pilot, lambda text: "▸ main" in text, "the first pool again")
        await press(pilot, "enter")
        lines = await until(pilot, lambda text: "top holders" in text, "the detail")
        text = "\n".join(lines)
        for wanted in ("free_all", "lock wait", "integrity", "owners", "peak 40", "name none"):
            assert wanted in text
        assert "Back" in lines[-1]
        await press(pilot, "n")
        await until(pilot, lambda text: "draft of worker-0" in text, "the next pool")
        await press(pilot, "escape")
        await until(pilot, lambda text: "▸ draft" in text, "the table")

    with two_pools():
        play(Scripted(live("main", "draft", process="worker-0")), act, (100, 30))


def test_s_sorts_by_the_next_order() -> None:
    """By use, name, waste, rate and failures."""

    def tell() -> Moment:
        main.allocate_kv(16, "passing")
        main.free_all("passing")
        exhaust(main)
        return told()

    async def act(pilot: Pilot[int]) -> None:
        await until(pilot, lambda text: "by in use" in text, "the first order")
        for order in ("name", "waste", "alloc/s", "failed", "in use"):
            await press(pilot, "s")
            first, second = ("draft", "main") if order == "name" else ("main", "draft")
            await until(
                pilot,
                lambda text, o=order, a=first, b=second: (  # type: ignore[misc]
                    f"by {o} " in text and text.index(f" {a} ") < text.index(f" {b} ")
                ),
                f"{first} before {second} by {order}",
            )

    with two_pools() as (main, _):
        told = live("main", "draft", process="worker-0")
        play(Scripted(tell), act)


def test_p_holds_the_picture() -> None:
    """Numbers stand still until p is pressed again; then they are those of now."""

    async def act(pilot: Pilot[int]) -> None:
        await until(pilot, lambda text: "40/64" in text, "the pool")
        await press(pilot, "p")
        await until(pilot, lambda text: "PAUSED" in text, "paused")
        main.allocate_kv(16 * 5, "two")
        seen = source.n_reads
        await until(pilot, lambda _: source.n_reads > seen + 2, "more readings")
        assert "40/64" in "\n".join(screen(pilot))
        await press(pilot, "p")
        await until(pilot, lambda text: "50/64" in text and "PAUSED" not in text, "now")

    with two_pools() as (main, _):
        source = Scripted(live("main", "draft", process="worker-0"))
        play(source, act)


def test_help_shows_the_keys_and_goes() -> None:
    """Over the screen that is there; q closes it, and ends nothing."""

    async def act(pilot: Pilot[int]) -> None:
        await press(pilot, "question_mark")
        await until(pilot, lambda text: "Keys" in text and "alerts and runbooks" in text, "help")
        await press(pilot, "q")
        await until(pilot, lambda text: "▸ main" in text and "Keys" not in text, "the table")
        assert pilot.app.is_running

    with two_pools():
        play(Scripted(live("main", "draft")), act)


@pytest.mark.parametrize(("key", "where"), [("q", ()), ("ctrl+c", ("enter",)), ("q", ("a",))])
def test_q_and_ctrl_c_end_it_with_0(key: str, where: tuple[str, ...]) -> None:
    """From any screen."""

    async def act(pilot: Pilot[int]) -> None:
        await press(pilot, *where)
        await pilot.press(key)

    with two_pools():
        app = play(Scripted(live("main", "draft")), act)
    assert app.return_value == 0


def test_the_mouse_marks_and_opens() -> None:
    """A click marks a pool, a second one opens it."""

    async def act(pilot: Pilot[int]) -> None:
        await until(pilot, lambda text: "▸ main" in text, "the table")
        await pilot.click("#pools", offset=(5, 3))
        await until(pilot, lambda text: "▸ draft" in text, "the second pool")
        await pilot.click("#pools", offset=(5, 3))
        await until(pilot, lambda text: "top holders" in text, "its detail")

    with two_pools():
        play(Scripted(live("main", "draft")), act, (100, 30))


# -- alerts --------------------------------------------------------------------------------------


def test_alerts_lead_to_their_runbooks() -> None:
    """The list says which rules are not judged; enter opens the runbook that came along."""

    async def act(pilot: Pilot[int]) -> None:
        await until(pilot, lambda text: "▸ main" in text, "the table")
        exhaust(main)
        await until(pilot, lambda text: "2 pending" in text, "two alerts")
        await press(pilot, "a", "down")
        lines = await until(pilot, lambda text: "not judged here" in text, "the list")
        text = "\n".join(lines)
        assert "▸ △ pending" in text and "VeloxQuantPoolExhausted" in text
        assert "VeloxQuantMlxMemoryDrift looks at a trend over 1 hour" in text
        assert "runbook docs/runbooks/pool-exhausted.md" in text
        await press(pilot, "enter")
        await until(pilot, lambda text: "Pool exhausted" in text and "Meaning" in text, "the text")
        await press(pilot, "escape", "escape")
        await until(pilot, lambda text: "▸ main" in text, "the table again")

    with two_pools() as (main, _):
        play(Scripted(live("main", "draft", process="w")), act, (120, 30))


# -- sources that fail ---------------------------------------------------------------------------


def test_a_source_that_hangs_holds_up_nothing() -> None:
    """The figures stay, their age is told, keys work, and it ends while the read still hangs."""

    async def act(pilot: Pilot[int]) -> None:
        await until(pilot, lambda text: "▸ main" in text, "the table")
        source.hanging.set()
        await until(
            pilot, lambda text: "last seen" in text and "no answer yet" in text, "the trouble"
        )
        assert "40/64" in "\n".join(screen(pilot))
        await press(pilot, "down")
        await until(pilot, lambda text: "▸ draft" in text, "the second pool")
        await pilot.press("q")

    with two_pools():
        source = Scripted(live("main", "draft"))
        app = play(source, act)
    assert app.return_value == 0


def test_a_source_that_fails_says_why_and_comes_back() -> None:
    """In its own words."""

    async def act(pilot: Pilot[int]) -> None:
        await until(pilot, lambda text: "▸ main" in text, "the table")
        source.fault = "the folder is gone"
        lines = await until(pilot, lambda text: "the folder is gone" in text, "the reason")
        assert "last seen" in lines[0] and "ago" in lines[0]
        source.fault = ""
        await until(pilot, lambda text: "last seen" not in text, "its return")

    with two_pools():
        source = Scripted(live("main", "draft"))
        play(source, act)


def test_a_fault_of_our_own_is_shown_not_raised() -> None:
    """What a source should never raise ends neither the thread nor the screens."""
    broken = threading.Event()

    def tell() -> Moment:
        if broken.is_set():
            raise RuntimeError("never to be seen")
        return told()

    async def act(pilot: Pilot[int]) -> None:
        await until(pilot, lambda text: "▸ main" in text, "the table")
        broken.set()
        await until(pilot, lambda text: "RuntimeError: never to be seen" in text, "the fault")
        broken.clear()
        await until(pilot, lambda text: "RuntimeError" not in text, "its return")

    with two_pools():
        told = live("main", "draft")
        play(Scripted(tell), act)


# -- a trace -------------------------------------------------------------------------------------


def test_a_trace_has_a_slider(tmp_path: Path) -> None:
    """Arrows move the place, e goes from event to event, and figures and holders follow."""
    pytest.importorskip("zstandard", reason="the extra trace")
    from veloxquant_exporters.top.trace_boards import TraceBoards
    from veloxquant_mlx.telemetry.recorder import record

    with watched("taped", n_blocks=64) as pool:
        recorder = record(pool, tmp_path / "a.vqtrace", owners=True)
        for n in range(20):
            pool.allocate_kv(16, f"request-{n}")
        exhaust(pool)
        for n in range(10):
            pool.free_all(f"request-{n}")
        recorder.stop()
    boards = TraceBoards(tmp_path / "a.vqtrace")
    poller = Poller(boards, 0.05)
    poller.start()
    assert poller.wait(1, DEADLINE_S).board is not None
    app = TopApp(poller)

    async def act() -> None:
        async with app.run_test(size=(100, 30)) as pilot:
            lines = await until(pilot, lambda text: "20/64" in text, "the end")
            assert "held at" in "\n".join(lines) and "← Back" in lines[-1]
            await press(pilot, "home")
            await until(pilot, lambda text: "2/64" in text, "the beginning")
            await press(pilot, "e")
            await until(pilot, lambda text: "40/64" in text and "exhausted" in text, "the event")
            await press(pilot, "enter")
            await until(pilot, lambda text: "request-0" in text, "the holders")
            await press(pilot, "left")
            here = boards.place.at_ns
            await press(pilot, "right", "right")
            assert boards.place.at_ns > here, "the slider is there in the detail too"
            await press(pilot, "escape", "end", "p")
            await until(pilot, lambda _: not boards.place.playing, "it played to its end")
            await until(pilot, lambda text: "20/64" in text, "the end again")

    try:
        asyncio.run(act())
    finally:
        poller.close()
