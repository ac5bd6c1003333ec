"""Plot: what was held over time under each configuration, and what it came to, as one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from veloxquant_exporters.simulate.advice import Advice
from veloxquant_exporters.simulate.result import Result
from veloxquant_exporters.simulate.table import size_text

if TYPE_CHECKING:
    from veloxquant_mlx.memory.pool_config import PoolConfig

__all__ = ["plot"]

# More lines than this cannot be told apart.
MAX_LINES: Final = 8
RECORDED, BEST, REFUSED = "#555555", "#1f77b4", "#d62728"


def plot(
    results: Sequence[Result],
    advice: Advice,
    duration_ns: int,
    bytes_per_slot: int | None,
    path: Path,
) -> None:
    """Write the picture; the suffix of `path` says in which format (svg, png, pdf).

    Raises:
        ValueError: matplotlib knows no such format.
        OSError: The file cannot be written.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6 + 0.26 * len(results)), layout="constrained")
    ratio = [3.2, 0.5 + 0.26 * len(results)]
    over_time, bars = figure.subplots(2, 1, height_ratios=ratio)
    scale, unit = _scale(results, bytes_per_slot)
    _draw_lines(over_time, results, advice, duration_ns, scale)
    over_time.set_ylabel(f"held, {unit}")
    _draw_bars(bars, results, advice, scale, bytes_per_slot)
    bars.set_xlabel(f"most held, {unit}; red: requests refused")
    with mpl.rc_context({"svg.hashsalt": "veloxquant", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _scale(results: Sequence[Result], bytes_per_slot: int | None) -> tuple[float, str]:
    if bytes_per_slot is None:
        return 1.0, "token slots"
    most = max((result.peak_slots for result in results), default=0) * bytes_per_slot
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if most >= 1024**power:
            return bytes_per_slot / 1024**power, unit
    return float(bytes_per_slot), "bytes"


def _draw_lines(
    axes: Any, results: Sequence[Result], advice: Advice, duration_ns: int, scale: float
) -> None:
    seconds = duration_ns / 1e9
    factor, unit = (1 / 3600, "h") if seconds >= 7200 else (1.0, "s")
    for result in _shown(results, advice):
        line = [slots * scale for slots in result.occupancy]
        at = [seconds * factor * n / len(line) for n in range(len(line))]
        axes.plot(at, line, drawstyle="steps-post", label=_label(result, results, advice),
                  linewidth=2.2 if result is advice.best else 1.2,
                  color=BEST if result is advice.best
                  else RECORDED if result is results[0] else None)  # fmt: skip
    axes.set_xlabel(f"since the beginning of the trace, {unit}")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)


def _shown(results: Sequence[Result], advice: Advice) -> list[Result]:
    others = [result for result in results[1:] if result is not advice.best]
    if advice.best is not results[0]:
        others.insert(0, advice.best)
    return [results[0], *others][:MAX_LINES]


def _draw_bars(
    axes: Any, results: Sequence[Result], advice: Advice, scale: float, bytes_per_slot: int | None
) -> None:
    for n, result in enumerate(results):
        colour = BEST if result is advice.best else "#9ecae1" if n else RECORDED
        axes.barh(n, result.peak_slots * scale, color=REFUSED if result.n_exhausted else colour)
        text = f" {size_text(result.peak_slots, bytes_per_slot)}, {result.rounding:.1%} rounding"
        if result.n_exhausted:
            text += f", {result.n_rejected} of {result.n_owners} requests refused"
        axes.text(result.peak_slots * scale, n, text, va="center", fontsize=8)
    labels = [_label(result, results, advice) for result in results]
    axes.set_yticks(range(len(results)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.35)
    axes.set_xlim(left=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _label(result: Result, results: Sequence[Result], advice: Advice) -> str:
    text = _config_label(result.config)
    if result is results[0]:
        text += " (recorded)"
    return f"{text} *" if result is advice.best else text


def _config_label(config: PoolConfig) -> str:
    streams = "k, v" if config.separate_kv else "kv"
    grow = ""
    if config.grow_on_exhaustion:
        grow = ", grows" if config.max_blocks is None else f", grows to {config.max_blocks}"
    return f"{config.n_blocks} x {config.block_size}, {streams}{grow}"
