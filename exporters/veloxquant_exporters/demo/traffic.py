"""Serving: requests generated side by side, their caches charged to one pool."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

import mlx.core as mx

from veloxquant_exporters.demo.model import DemoModel
from veloxquant_exporters.demo.workload import Plan, prompt_tokens
from veloxquant_mlx.core.exceptions import BlockPoolExhaustedError
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator
from veloxquant_mlx.memory.pool_backed_cache import PooledCaches, build_pooled_caches

__all__ = ["Progress", "RequestView", "Traffic"]

# Between two parts the screen moves and Ctrl-C is heard; larger parts are faster on a GPU.
PART: Final = 64


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request that is being generated.

    Attributes:
        plan: What it asks for.
        n_read: Tokens of its prompt processed so far.
        n_done: Tokens generated so far.
        n_blocks: Blocks it holds.
    """

    plan: Plan
    n_read: int
    n_done: int
    n_blocks: int


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the traffic is.

    Attributes:
        served: Requests done.
        waiting: Requests that are not being generated.
        refused: Those of them that did not fit and wait for room.
        active: Requests being generated, oldest first.
        prompt_tokens: Prompt tokens processed, those of every attempt.
        output_tokens: Tokens generated, those of every attempt.
    """

    served: int
    waiting: int
    refused: int
    active: tuple[RequestView, ...]
    prompt_tokens: int
    output_tokens: int


class _Generation:
    """One attempt at a request: mlx-lm's generator and the caches that it fills."""

    __slots__ = ("caches", "n_done", "n_read", "plan", "steps")

    def __init__(
        self, plan: Plan, caches: PooledCaches, steps: Callable[[_Generation], Iterator[Any]]
    ) -> None:
        self.plan = plan
        self.caches = caches
        self.n_read = 0  # tokens of the prompt that were processed
        self.n_done = 0
        self.steps: Any = steps(self)

    def end(self) -> None:
        """Give the blocks back, and drop the arrays."""
        self.steps.close()
        self.caches.release()


class Traffic:
    """Serves requests in turn, a token each, as many side by side as told.

    A request that the pool refuses gives back what it holds, goes to the head of the queue, and
    starts again when another one has ended: what servers call preemption by recomputing.

    Used by one thread, the one that made the model: MLX evaluates an array on no other. `progress`
    may be called from any.

    Attributes:
        n_output: Tokens generated, those of every attempt.

    Args:
        served: The model.
        pool: The pool to charge.
        n_at_once: Requests generated side by side.
        seed: Of the prompts.
        step: Tokens by which a cache grows; 256 is mlx-lm's own.
        pulse: Called between the parts of a prompt, which may take long; what it raises ends
            `advance`.
    """

    def __init__(
        self,
        served: DemoModel,
        pool: BlockPoolAllocator,
        *,
        n_at_once: int,
        seed: int = 0,
        step: int = 256,
        pulse: Callable[[], None] = lambda: None,
    ) -> None:
        self._served = served
        self._pool = pool
        self._n_at_once = n_at_once
        self._seed = seed
        self._step = step
        self._pulse = pulse
        self._waiting: deque[Plan] = deque()
        self._active: deque[_Generation] = deque()
        self._refused: set[int] = set()
        self._full = False  # refused lately: nobody is let in before somebody has ended
        self._n_served = self._n_prompt = 0
        self.n_output = 0

    def add(self, plans: Iterable[Plan]) -> None:
        """Queue requests."""
        self._waiting.extend(plans)

    @property
    def busy(self) -> bool:
        """True while a request waits or is being generated."""
        return bool(self._waiting or self._active)

    def advance(self) -> None:
        """Let one request in, if there is room, and generate one token of the next in turn.

        Raises:
            BlockPoolExhaustedError: A request does not fit although it is alone.
        """
        if self._waiting and not self._full and len(self._active) < self._n_at_once:
            self._active.append(self._start(self._waiting.popleft()))
            self._active.rotate(1)  # its prompt is next
        if not self._active:
            return
        turn = self._active[0]
        try:
            next(turn.steps)
        except StopIteration:
            self._end(turn)
            self._n_served += 1
            self._full = False
        except BlockPoolExhaustedError:
            self._end(turn)
            self._waiting.appendleft(turn.plan)
            self._refused.add(turn.plan.number)
            self._full = True
            if not self._active:
                raise
        else:
            self.n_output += 1
            turn.n_done += 1
            self._active.rotate(-1)

    def _start(self, plan: Plan) -> _Generation:
        self._refused.discard(plan.number)
        caches = build_pooled_caches(self._served.model, self._pool, plan.number, self._step)
        return _Generation(plan, caches, self._steps)

    def _steps(self, turn: _Generation) -> Iterator[Any]:
        """mlx-lm's own generator; it reads the prompt in parts and then yields tokens."""
        plan = turn.plan

        def read(n_read: int, _: int) -> None:
            self._n_prompt += n_read - turn.n_read
            turn.n_read = n_read
            self._pulse()

        generate_step: Any = import_module("mlx_lm.generate").generate_step
        steps: Iterator[Any] = generate_step(
            mx.array(prompt_tokens(self._seed, plan, self._served.n_vocab)),
            self._served.model,
            max_tokens=plan.n_output,
            prompt_cache=turn.caches,
            prefill_step_size=_part_of(self._step),
            prompt_progress_callback=read,
        )
        return steps

    def _end(self, turn: _Generation) -> None:
        self._active.popleft()
        turn.end()

    def close(self) -> None:
        """End all requests where they are."""
        self._waiting.clear()
        while self._active:
            self._active.popleft().end()

    def progress(self) -> Progress:
        """Where the traffic is now."""
        active = sorted(self._active.copy(), key=lambda turn: turn.plan.number)
        return Progress(
            served=self._n_served,
            waiting=len(self._waiting),
            refused=len(self._refused),
            active=tuple(
                RequestView(
                    turn.plan,
                    turn.n_read,
                    turn.n_done,
                    len(self._pool.blocks_for(turn.plan.number)),
                )
                for turn in active
            ),
            prompt_tokens=self._n_prompt,
            output_tokens=self.n_output,
        )


def _part_of(step: int) -> int:
    """Tokens of a prompt to process at a time, so that caches still grow by whole steps."""
    return PART if step % PART == 0 else step
