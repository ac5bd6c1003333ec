"""Slots: how many calls went by a hook, and which of them is the next to be sampled."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

from veloxquant_mlx.memory.hot_path import FP16

if TYPE_CHECKING:
    from veloxquant_mlx.memory.journal import Entry
    from veloxquant_mlx.telemetry.samples import Sample

__all__ = ["MAX_STRIDE", "HookPair", "HookSlot", "RareSlot", "Slot", "make_hooks", "n_calls"]

# Calls a sample at most, jittered by half: a fixed stride that shares a factor with layers x (k, v)
# would time the same call of each round.
MAX_STRIDE: Final = 2039
RETRY: Final = 16
# Twenty samples a second and slot are what strides aim at, so that a quiet pool is seen as well as a busy one.
# A sample takes some 5 us when its code is in the processor's cache, and five times that otherwise.
NS_A_SAMPLE: Final = 1_000_000_000 // 20


class Slot(ABC):
    """The sampling of one kind of call.

    Every call is stood for by one sample: a sample weighs as many calls as went by since the one
    before, and `pending` is what the newest one has to stand for in a snapshot.

    Args:
        operation: Name of the operation.
    """

    __slots__ = (
        "armed_total",
        "call_ns",
        "last",
        "misses",
        "operation",
        "sampled_calls",
        "sampled_ns",
        "weighed",
    )

    def __init__(self, operation: str) -> None:
        self.operation = operation
        self.weighed = 0  # calls that observations stand for so far
        self.sampled_calls = 0  # calls at the newest sample
        self.sampled_ns = 0
        self.call_ns = 0  # from one call to the next, as of late; at most NS_A_SAMPLE
        self.misses = 0  # armings without a sample since the newest one
        self.armed_total = 0  # calls on all slots at the newest arming
        self.last: Sample | None = None

    @abstractmethod
    def calls(self) -> int:
        """How many calls went by."""

    @abstractmethod
    def schedule(self, after: int) -> None:
        """Make the `after`-th call from now fire."""

    def pending(self, calls: int) -> int:
        """Of the first `calls` calls, those that no observation stood for; from now on one does."""
        pending = calls - self.weighed
        self.weighed = max(self.weighed, calls)
        return pending

    def sampled(self, calls: int, now_ns: int, jitter: float) -> int:
        """Note that call number `calls` was sampled; returns how many it stands for."""
        since = max(1, calls - self.sampled_calls)
        self.schedule(self.stride(calls, now_ns, jitter))
        self.sampled_calls, self.sampled_ns, self.misses = calls, now_ns, 0
        return since

    def stride(self, calls: int, now_ns: int, jitter: float) -> int:
        """After how many calls to sample again: few at first, and while calls are few a second."""
        each_ns = (now_ns - self.sampled_ns) // max(1, calls - self.sampled_calls)
        # Smoothed: two calls in quick succession on a quiet pool would else set a stride of
        # thousands, of which the next comes due in an hour.
        latest_ns = min(NS_A_SAMPLE, each_ns) if self.sampled_calls else 0
        self.call_ns += (latest_ns - self.call_ns) >> 2
        by_rate = NS_A_SAMPLE // (self.call_ns or 1)
        stride = max(1 << min(self.misses, 11), min(calls << 1, by_rate))
        return int(min(MAX_STRIDE, stride) * (0.5 + jitter)) or 1


class HookSlot(Slot):
    """The slot of one hook, which keeps the numbers in its own cells."""

    __slots__ = ("_calls", "_schedule", "redirect")

    def __init__(
        self,
        operation: str,
        calls: Callable[[], int],
        schedule: Callable[[int], None],
        redirect: Callable[[Hook], None],
    ) -> None:
        super().__init__(operation)
        self._calls = calls
        self._schedule = schedule
        self.redirect = redirect  # pass entries on to another journal

    def calls(self) -> int:
        """See `Slot.calls`."""
        return self._calls()

    def schedule(self, after: int) -> None:
        """See `Slot.schedule`."""
        self._schedule(after)


class RareSlot(Slot):
    """The slot of one operation among the calls that come by one hook together."""

    __slots__ = ("left", "n_calls")

    def __init__(self, operation: str) -> None:
        super().__init__(operation)
        self.n_calls = 0
        self.left = 1

    def calls(self) -> int:
        """See `Slot.calls`."""
        return self.n_calls

    def schedule(self, after: int) -> None:
        """See `Slot.schedule`."""
        self.left = after

    def tick(self) -> bool:
        """Count a call; True when it is to be sampled."""
        self.n_calls += 1
        self.left -= 1
        return self.left <= 0


def n_calls(slots: Iterable[Slot]) -> int:
    """Calls on all of the slots."""
    return sum([slot.calls() for slot in slots])


Hook = Callable[["Entry"], None]


class HookPair(NamedTuple):
    """What takes the place of a stream's journal slot.

    Attributes:
        plain: For a pool in which all that is held is fp16.
        telling: The same, which also tells of entries of another format.
        slot: The sampling of either.
    """

    plain: Hook
    telling: Hook
    slot: HookSlot


def make_hooks(
    operation: str,
    forward: Hook,
    fire: Callable[[Slot, Entry], None],
    tally: Hook,
    errors: dict[str, int],
) -> HookPair:
    """Hooks that pass each entry on to `forward`, count it, and call `fire` with the scheduled ones.

    What `fire` and `tally` raise is counted in `errors`. The two hooks are one body written twice:
    this is what every call of a watched pool pays for.
    """
    left = period = 1
    before = 0  # calls until the period began
    fp16 = FP16

    def plain(entry: Entry) -> None:
        nonlocal left, period, before
        forward(entry)
        try:
            left -= 1
            if not left:
                # Until `fire` schedules the next, which a Ctrl-C may keep it from.
                before += period
                left = period = RETRY
                fire(slot, entry)
        except Exception:  # noqa: BLE001 - telemetry never raises into the serving code
            errors["hook"] += 1

    def telling(entry: Entry) -> None:
        nonlocal left, period, before
        forward(entry)
        try:
            left -= 1
            if not left:
                before += period
                left = period = RETRY
                fire(slot, entry)
            # By identity: what is fp16 and fails it is recognised by `tally`.
            if entry[2]._format is not fp16:  # type: ignore[union-attr]
                tally(entry)
        except Exception:  # noqa: BLE001 - telemetry never raises into the serving code
            errors["hook"] += 1

    def calls() -> int:
        return before + period - left

    def schedule(after: int) -> None:
        nonlocal left, period, before
        before += period - left
        left = period = after

    def redirect(to: Hook) -> None:
        nonlocal forward
        forward = to

    slot = HookSlot(operation, calls, schedule, redirect)
    return HookPair(plain, telling, slot)
