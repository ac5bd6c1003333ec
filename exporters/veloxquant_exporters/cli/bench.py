"""`vqmon bench`: the options; what it does is in `veloxquant_exporters.bench`."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

__all__ = ["command"]

OURS = "veloxquant_mlx.memory.block_pool:BlockPoolAllocator"


@click.command("bench")
@click.option(
    "--target",
    default=OURS,
    show_default=True,
    metavar="MODULE:NAME",
    help="What to measure: a function of the number of blocks, or an allocator class.",
)
@click.option(
    "--twin",
    default="reference",
    show_default=True,
    metavar="MODULE:NAME",
    help="What stands beside it in every round; 'reference' is a plain list pool.",
)
@click.option("--only", metavar="NAMES", help="These benchmarks, by comma.")
@click.option(
    "--rounds",
    type=click.IntRange(2, 1000),
    default=5,
    show_default=True,
    help="Rounds of each size, of which the fastest counts.",
)
@click.option("--quick", is_flag=True, help="Leave out the largest sizes.")
@click.option("--counts", is_flag=True, help="Count the work of each call exactly, too.")
@click.option(
    "--check", is_flag=True, help="Exit code 1 when a call is not of the shape it should be."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON: the run with its verdicts.")
@click.option(
    "-o",
    "--output",
    "--out",
    "out",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the same JSON here, too.",
)
def command(
    target: str,
    twin: str,
    only: str | None,
    rounds: int,
    quick: bool,
    counts: bool,
    check: bool,
    as_json: bool,
    out: Path | None,
) -> int:
    """Measure how an allocator's calls scale, in CPU time.

    Any allocator with the methods of this project's pool will do: a subclass, another version,
    another package. Calls it lacks are left out, and named.

    Example: vqmon bench --target mypackage.pool:Allocator --only free_all --check
    """
    from veloxquant_exporters.bench.document import document, write
    from veloxquant_exporters.bench.report import table
    from veloxquant_exporters.bench.run import MeasureError
    from veloxquant_exporters.bench.survey import shape, survey

    began = time.monotonic()
    try:
        verdicts, notes = survey(
            target,
            twin=twin,
            only=[name for name in (only or "").split(",") if name],
            rounds=rounds,
            quick=quick,
            counts=counts,
        )
    except MeasureError as error:
        raise click.ClickException(str(error)) from error
    run = document(verdicts, target, time.monotonic() - began)
    if as_json:
        click.echo(json.dumps(run, indent=1))
    else:
        lines = [table(verdicts), "", *map(shape, verdicts), *notes]
        click.echo("\n".join(lines))
    if out is not None:
        write(run, out)
    return int(check and any(verdict.status == "fail" for verdict in verdicts))
