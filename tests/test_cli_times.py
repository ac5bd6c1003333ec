"""cli.times: a duration, in seconds or with a unit."""

from __future__ import annotations

import pytest

pytest.importorskip("click", reason="click comes with the extra cli")

import click

from veloxquant_exporters.cli.times import Time


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("1.5s", 1.5), (".5", 0.5), ("250ms", 0.25), ("15 m", 900), ("1h", 3600), ("2d", 172800)],
)  # fmt: skip
def test_it_is_read_in_seconds(text: str, seconds: float) -> None:
    """With each unit, and without one."""
    assert Time().convert(text, None, None) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "nan", "inf", "1e3", "31d", "1w", "s", "1s ", "\u0663", "9" * 4000]
)
def test_what_is_none_is_refused_with_what_is_allowed(text: str) -> None:
    """Numbers that Python would take, too; in one message."""
    with pytest.raises(click.BadParameter, match=r"no time as in 90, 1.5s, .* from 1ms to 30d$"):
        Time().convert(text, None, None)


def test_the_bounds_belong_to_it() -> None:
    """Both, and not a bit more."""
    kind = Time(0.05, 3600)
    assert kind.convert("50ms", None, None) == pytest.approx(0.05)
    assert kind.convert("1h", None, None) == 3600
    for text in ("49ms", "3600.1"):
        with pytest.raises(click.BadParameter, match="from 50ms to 1h"):
            kind.convert(text, None, None)
    assert Time(0.0).convert("0", None, None) == 0
