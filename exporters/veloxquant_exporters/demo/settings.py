"""Settings: what `vqmon demo` was asked to do."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Settings"]


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of the demo, checked by the command line.

    Attributes:
        once: End after the first round of requests.
        n_requests: Requests in a round.
        n_at_once: Requests generated side by side.
        n_blocks: Blocks in the pool; None is room for 2,048 tokens of the model.
        block_size: Token slots of a block.
        step: Tokens by which a cache grows; 256 is mlx-lm's own.
        port: Of the metrics page; 0 takes a free one.
        model_name: A folder or a Hugging Face id; None is the tiny Llama.
        seed: Of requests and random weights.
        plain: Plain lines, also on a terminal.
    """

    once: bool = False
    n_requests: int = 36
    n_at_once: int = 6
    n_blocks: int | None = None
    block_size: int = 16
    step: int = 256
    port: int = 9464
    model_name: str | None = None
    seed: int = 0
    plain: bool = False
