"""The simulated traffic: what each request asks for. Needs no MLX."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

__all__ = ["LONGEST", "Plan", "plan_requests", "prompt_tokens"]

# Of ten requests: how many, tokens of the prompt (from, to), tokens generated (from, to).
MIX: Final = (
    (5, (12, 90), (12, 48)),  # chat: short question, short answer
    (3, (250, 700), (8, 32)),  # summary: long text in, short text out
    (2, (40, 150), (90, 180)),  # story: grows while it is generated
)

# The most tokens, prompt and output together, that a request of the mix can have.
LONGEST: Final = max(prompt[1] + output[1] for _, prompt, output in MIX)


@dataclass(frozen=True, slots=True)
class Plan:
    """What one request asks for.

    Attributes:
        number: From 1; also the owner of its blocks.
        n_prompt: Tokens of the prompt.
        n_output: Tokens to generate.
    """

    number: int
    n_prompt: int
    n_output: int


def plan_requests(seed: int, first: int, n: int) -> list[Plan]:
    """The requests number `first` to ``first + n - 1`` of a seed; the same ones every time."""
    return [_plan(seed, number) for number in range(first, first + n)]


def _plan(seed: int, number: int) -> Plan:
    chance = random.Random(f"{seed}:{number}:lengths")  # noqa: S311 - traffic, not a secret
    _, prompt, output = chance.choices(MIX, weights=[kind[0] for kind in MIX])[0]
    return Plan(number, chance.randint(*prompt), chance.randint(*output))


def prompt_tokens(seed: int, plan: Plan, n_vocab: int) -> list[int]:
    """Token ids for the prompt of a request, each in 1..n_vocab-1; the same ones every time."""
    chance = random.Random(f"{seed}:{plan.number}:prompt")  # noqa: S311
    return chance.choices(range(1, n_vocab), k=plan.n_prompt)
