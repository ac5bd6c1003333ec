"""interrupts: Ctrl-C while something loads is noted, held back, and never lost."""

from __future__ import annotations

import signal
import threading

import pytest

from veloxquant_exporters.interrupts import Interrupts, interrupts_held


def test_one_that_is_swallowed_has_come() -> None:
    """What a library did with the exception does not matter; the handler is Python's again after."""
    with Interrupts() as interrupts:
        assert not interrupts.came
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert interrupts.came
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_somebody_else_stays() -> None:
    """One that was there before, and one that was set meanwhile."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with Interrupts():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def strike(done: list[int]) -> None:
    """Ctrl-C, and what comes after it."""
    signal.raise_signal(signal.SIGINT)
    done.append(1)


def test_it_is_held_until_the_end() -> None:
    """The block runs to its end, and then it is raised."""
    done: list[int] = []
    with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts, interrupts_held():
        strike(done)
    assert done == [1]
    assert interrupts.came
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_failure_in_the_block_does_not_lose_it() -> None:
    """It says more than the failure, which it may be the cause of."""

    def fail() -> None:
        strike([])
        raise ImportError("half loaded")

    with pytest.raises(KeyboardInterrupt) as caught, interrupts_held():
        fail()
    assert isinstance(caught.value.__context__, ImportError)


def test_the_second_is_not_held() -> None:
    """Who presses it again is not made to wait."""
    done: list[int] = []

    def twice() -> None:
        strike(done)
        strike(done)

    with pytest.raises(KeyboardInterrupt), interrupts_held():
        twice()
    assert done == [1]


def test_without_one_and_on_other_threads_nothing_happens() -> None:
    """Only the main thread may set handlers."""
    raised: list[BaseException] = []

    def enter() -> None:
        try:
            with Interrupts(), interrupts_held():
                pass
        except BaseException as error:
            raised.append(error)

    enter()
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert raised == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
