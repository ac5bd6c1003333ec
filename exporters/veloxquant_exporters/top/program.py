"""What a program that `vqmon run` watches says of itself, in a few lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from veloxquant_exporters.top.track import Track
from veloxquant_exporters.top.units import amount, gigabytes, percent, rate
from veloxquant_mlx.telemetry.process import ProcessSnapshot
from veloxquant_mlx.telemetry.program import ProgramSnapshot

__all__ = ["program_lines"]


def program_lines(track: Track[ProcessSnapshot]) -> tuple[str, ...]:
    """Requests, caches, and what is wrong; nothing of a process without a watched program.

    Args:
        track: The process lately, for rates.
    """
    program = track.now.program
    if program is None:
        return ()
    return tuple(
        line
        for line in (
            _requests(program, track),
            "  ".join(_caches(program)),
            "  ".join(_faults(program)),
        )
        if line
    )


def _requests(program: ProgramSnapshot, track: Track[ProcessSnapshot]) -> str:
    if program.requests is None:
        return ""
    states = [f"{n} {state}" for state, n in program.active_requests.items() if n]
    ended: Counter[str] = Counter()
    for requests in program.requests.values():
        ended.update(requests.finished)
    done = [f"{amount(n)} {outcome}" for outcome, n in ended.items() if n]
    parts = [f"requests {', '.join(states) or 'none active'}", f"ended {', '.join(done) or 'none'}"]
    if len(track.points) > 1 and track.seconds > 0:
        parts.append(f"{rate(track.rise(_generated) / track.seconds)} tokens/s")
    return "  ".join(parts)


def _generated(process: ProcessSnapshot) -> int:
    found = process.program.requests if process.program is not None else None
    return sum(requests.generated_tokens for requests in (found or {}).values())


def _caches(program: ProgramSnapshot) -> Iterator[str]:
    for kind, census in (program.caches or {}).items():
        if census.n_objects:
            waste = census.waste_bytes / census.n_bytes if census.n_bytes else 0.0
            yield f"{census.n_objects} {kind} {gigabytes(census.n_bytes)} ({percent(waste)} waste)"
    kept = program.prompt_cache
    if kept is not None:
        hits = kept.hit_tokens / kept.lookup_tokens if kept.lookup_tokens else 0.0
        size = gigabytes(sum(kept.n_bytes.values()))
        n = sum(kept.entries.values())
        yield f"prompt cache {n} entries {size}, {percent(hits)} of tokens hit"


def _faults(program: ProgramSnapshot) -> Iterator[str]:
    if program.generation_thread_alive is False:
        yield "the generation thread is dead: every request fails"
    missing = [hook for hook, ok in program.hooks.items() if not ok]
    if missing:
        yield f"not watched with this mlx-lm: {', '.join(missing)}"
    if program.account is not None and program.account.excess_blocks:
        yield f"caches are {amount(program.account.excess_blocks)} blocks over their pool"
    if errors := sum(program.hook_errors.values()):
        yield f"{errors} hook errors"
