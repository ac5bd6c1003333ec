"""Exemplars: who asked for the blocks that a pool did not have, and within which trace."""

from __future__ import annotations

from typing import Final

from prometheus_client.samples import Exemplar

from veloxquant_exporters.prometheus.labels import label_value
from veloxquant_mlx.telemetry import PoolSnapshot

__all__ = ["EXEMPLARS", "MAX_CHARS", "exhaustion_exemplar"]

# Names and values together; OpenMetrics 1.0 lets a reader refuse the page beyond that.
MAX_CHARS: Final = 128


def exhaustion_exemplar(pool: PoolSnapshot) -> Exemplar | None:
    """The newest failed allocation: `owner`, and `trace_id` if a span was current.

    None until there was one. An owner too long for an exemplar is cut.
    """
    last = pool.last_exhaustion
    if last is None or not pool.n_exhausted:
        return None
    labels = {"trace_id": label_value(last.trace_id)} if last.trace_id else {}
    # The OpenMetrics parser of prometheus-client stumbles over an escaped quote in an exemplar.
    owner = label_value(last.owner).replace('"', "'")
    room = MAX_CHARS - len("owner") - sum(map(len, (*labels, *labels.values())))
    return Exemplar({"owner": owner[: max(0, room)], **labels}, 1, last.wall_s)


# By catalogue row.
EXEMPLARS: Final = {"veloxquant_block_pool_exhausted_total": exhaustion_exemplar}
