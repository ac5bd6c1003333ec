"""Compare this allocator with the PyPI package whose API it has.

Both packages are imported as `veloxquant_mlx`, so the peer gets a virtual environment of its own, made
once in a cache folder. The same work (`allocator_work.py`) runs in both environments by turns, and the
median of the ratios is held against the targets.

    python benchmarks/against_peer.py [--pairs 3] [--check] [--plot build/bench/against_peer] [--json FILE]

Exit status: 0, or with `--check` 1 if a target is missed; 2 if there is nothing to compare.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

__all__ = ["ROWS", "Result", "Row", "compare", "main", "render"]

PEER: Final = "veloxquant-mlx==0.94.15"
HERE: Final = Path(__file__).resolve().parent
Times = dict[str, float]


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison.

    Attributes:
        label: What is compared.
        figure: The number of one pair of runs, from our times and the peer's.
        target: What the median has to reach; None for a row that only informs.
        at_most: The target is an upper bound.
        unit: Written after the number.
        name: The work that it is about, for the columns of times; "" if it is about several.
    """

    label: str
    figure: Callable[[Times, Times], float]
    target: float | None
    at_most: bool = False
    unit: str = "x"
    name: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """A row, measured.

    Attributes:
        row: What was compared.
        value: Median over the pairs of runs.
        noise: Spread of the pairs over their median.
        ours: Median of our time in us, None where it makes no sense.
        peer: The same of the peer.
    """

    row: Row
    value: float
    noise: float
    ours: float | None
    peer: float | None

    @property
    def holds(self) -> bool:
        """True when the target is reached, or there is none."""
        target = self.row.target
        if target is None:
            return True
        return self.value <= target if self.row.at_most else self.value >= target


def _ratio(label: str, name: str, target: float | None) -> Row:
    return Row(label, lambda ours, peer: peer[name] / ours[name], target, name=name)


ROWS: Final = (
    _ratio("free_all of 1,024 blocks", "free_all_1024", None),
    _ratio("free_all of 16,384 blocks", "free_all_16384", 500),
    _ratio("free_all of 65,536 blocks", "free_all_65536", None),
    Row(
        "free_all: time at 65,536 over time at 1,024",
        lambda ours, _: ours["free_all_65536"] / ours["free_all_1024"],
        4,
        at_most=True,
    ),
    _ratio("allocate 1,024 blocks", "allocate_1024", None),
    _ratio("allocate 16,384 blocks", "allocate_16384", 12),
    _ratio("allocate 65,536 blocks", "allocate_65536", None),
    _ratio("grow by one block", "grow", 3.5),
    _ratio("grow by one block, in a new pool", "grow_in_a_new_pool", None),
    _ratio("grow by one block, k and v by turns", "grow_k_and_v", None),
    _ratio("allocate one block, then free_all", "cycle", 2.7),
    _ratio("free(list), reversed, 4,096 blocks", "free_reversed_4096", 80),
    Row(
        "mark_used: our time over the peer's",
        lambda ours, peer: ours["mark_used"] / peer["mark_used"],
        1.1,
        at_most=True,
        name="mark_used",
    ),
    _ratio("make a pool of 1,000,000 and hand all out", "construct_1m", 2.5),
    Row(
        "bytes a held block",
        lambda ours, _: ours["held_bytes"],
        110,
        at_most=True,
        unit=" B",
    ),
)


def compare(pairs: Sequence[tuple[Times, Times]]) -> list[Result]:
    """The rows, from pairs of our times and the peer's."""
    results = []
    for row in ROWS:
        values = [row.figure(ours, peer) for ours, peer in pairs]
        middle = median(values)
        results.append(
            Result(
                row,
                middle,
                (max(values) - min(values)) / middle,
                median(ours[row.name] for ours, _ in pairs) if row.name else None,
                median(peer[row.name] for _, peer in pairs) if row.name else None,
            )
        )
    return results


def render(results: Sequence[Result], floor_us: float) -> str:
    """The results as a Markdown table; `floor_us` is the time of an empty method with a lock."""
    lines = [
        "| work | peer, us | ours, us | over the floor | figure | target | noise | verdict |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for result in results:
        row, ours, peer = result.row, result.ours, result.peer
        target, verdict = "", ""
        if row.target is not None:
            target = f"{'<=' if row.at_most else '>='} {row.target:,g}{row.unit}"
            verdict = "holds" if result.holds else "MISSED"
        cells = (
            row.label,
            "" if peer is None else _digits(peer),
            "" if ours is None else _digits(ours),
            "" if ours is None else f"{_digits(ours / floor_us)}x",
            _digits(result.value) + row.unit,
            target,
            f"{result.noise:.0%}",
            verdict,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _digits(number: float) -> str:
    """Three digits, or all of those before the point."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


# -- running --------------------------------------------------------------------------------------


def peer_python(cache: Path) -> Path:
    """The interpreter of the peer's environment, which is made if it is not there.

    Raises:
        subprocess.CalledProcessError: The environment could not be made.
    """
    version = ".".join(map(str, sys.version_info[:3]))
    home = cache / f"{PEER.replace('==', '-')}-py{version}"
    python = home / "bin" / "python"
    done = home / "complete"
    if not done.exists():
        print(f"making an environment with {PEER} in {home}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", home], check=True)
        # On Linux, mlx alone has no backend and cannot be imported.
        packages = [PEER] if sys.platform == "darwin" else [PEER, "mlx[cpu]"]
        pip = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        subprocess.run(pip + packages, check=True, stdout=sys.stderr)
        done.touch()
    return python


def run_work(python: Path | str, import_path: Path | None) -> Times:
    """Times from a fresh process of `python`.

    Raises:
        subprocess.CalledProcessError: The work failed, or did not do what it should.
    """
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment["PYTHONHASHSEED"] = "0"
    if import_path is not None:
        environment["PYTHONPATH"] = str(import_path)
    done = subprocess.run(
        [python, HERE / "allocator_work.py"],
        check=True,
        stdout=subprocess.PIPE,
        cwd=HERE,
        env=environment,
    )
    times: Times = json.loads(done.stdout)
    return times


def draw(results: Sequence[Result], stem: Path) -> list[Path]:
    """Bars of the ratios, as SVG and PNG; nothing without matplotlib."""
    try:
        import matplotlib as mpl
    except ModuleNotFoundError:
        print("no matplotlib: no plot (it is in the dependency group `bench`)", file=sys.stderr)
        return []
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    bars = [result for result in results if result.row.unit == "x" and not result.row.at_most]
    plt.rcParams["svg.hashsalt"] = "against_peer"
    figure, axes = plt.subplots(figsize=(9, 0.42 * len(bars) + 1.4), layout="constrained")
    _draw_bars(axes, bars)
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_suffix(".svg"), stem.with_suffix(".png")]
    figure.savefig(paths[0], metadata={"Date": None})
    figure.savefig(paths[1], dpi=144)
    plt.close(figure)
    return paths


def _draw_bars(axes: Any, bars: Sequence[Result]) -> None:
    places = range(len(bars))
    axes.barh(places, [bar.value for bar in bars], height=0.6, color="#3b6fb6")
    for place, bar in zip(places, bars, strict=True):
        axes.annotate(
            f"{_digits(bar.value)}x",
            (bar.value, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
        )
        if bar.row.target is not None:
            axes.vlines(bar.row.target, place - 0.4, place + 0.4, color="#b03a2e", linewidth=2)
    axes.set_xscale("log")
    axes.set_xlim(1, 4 * max(bar.value for bar in bars))
    axes.set_yticks(places, [bar.row.label for bar in bars])
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel(f"times as fast as {PEER} (red: the target)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=3, help="pairs of runs (default: 3)")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    parser.add_argument(
        "--plot", type=Path, default=HERE.parent / "build" / "bench" / "against_peer"
    )
    parser.add_argument("--json", type=Path, help="write the times of every run there")
    default_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser.add_argument("--cache", type=Path, default=default_cache / "veloxquant-peer")
    options = parser.parse_args(arguments)
    pairs = []
    try:
        python = peer_python(options.cache)
        for turn in range(max(1, options.pairs)):
            print(f"pair {turn + 1} of {options.pairs}", file=sys.stderr)
            pairs.append((run_work(sys.executable, HERE.parent), run_work(python, None)))
    except subprocess.CalledProcessError as error:
        print(f"against_peer: {error}", file=sys.stderr)
        return 2
    results = compare(pairs)
    floor_us = median(ours["floor"] for ours, _ in pairs)
    print(render(results, floor_us))
    print(f"\nfloor (an empty method with one uncontended lock): {floor_us * 1e3:.0f} ns")
    for path in draw(results, options.plot):
        print(f"plot: {path}", file=sys.stderr)
    if options.json:
        options.json.write_text(json.dumps([{"ours": o, "peer": p} for o, p in pairs], indent=1))
    missed = [result.row.label for result in results if not result.holds]
    if missed:
        print(f"missed: {'; '.join(missed)}", file=sys.stderr)
    return 1 if missed and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
