"""Settings: what `--pool blocks=4096,block-size=16,...` means."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from veloxquant_mlx.memory.pool_config import PoolConfig

__all__ = ["PoolSettings"]

_WORDS: Final = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """The pool that a program is charged to.

    Attributes:
        config: Its size and behaviour.
        name: Its label in the metrics; None takes `pool-<lowest free number>`.
    """

    config: PoolConfig = field(default_factory=PoolConfig)
    name: str | None = None

    @classmethod
    def parse(cls, text: str) -> PoolSettings:
        """Read "blocks=...,block-size=...,separate-kv=...,grow=...,max-blocks=...,name=...".

        Raises:
            ValueError: A key is unknown, missing or repeated, or a value is none of its kind; the
                text names the keys that there are.
        """
        given: dict[str, str] = {}
        for part in text.split(","):
            key, equals, value = (word.strip() for word in part.partition("="))
            if key not in KEYS or not equals or not value:
                raise ValueError(
                    f"{part.strip()!r} is none of {', '.join(KEYS)}, with = and a value"
                )
            if key in given:
                raise ValueError(f"{key} is given twice")
            given[key] = value
        if "blocks" not in given:
            raise ValueError("blocks=... must be given: the budget, in blocks")
        if "max-blocks" in given and not _flag("grow", given.setdefault("grow", "yes")):
            raise ValueError(
                "max-blocks=... says how far the pool may grow, and grow=no that it may not"
            )
        values = {key: KEYS[key](key, value) for key, value in given.items()}
        name = values.pop("name", None)
        config = PoolConfig(**{_FIELDS[key]: value for key, value in values.items()})  # type: ignore[arg-type]
        return cls(config, None if name is None else str(name))


def _number(key: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{key} must be a whole number, got {value!r}") from None


def _flag(key: str, value: str) -> bool:
    try:
        return _WORDS[value.lower()]
    except KeyError:
        raise ValueError(f"{key} must be yes or no, got {value!r}") from None


def _text(_key: str, value: str) -> str:
    return value


KEYS: Final = {
    "blocks": _number,
    "block-size": _number,
    "separate-kv": _flag,
    "grow": _flag,
    "max-blocks": _number,
    "name": _text,
}
_FIELDS: Final = {
    "blocks": "n_blocks",
    "block-size": "block_size",
    "separate-kv": "separate_kv",
    "grow": "grow_on_exhaustion",
    "max-blocks": "max_blocks",
}
