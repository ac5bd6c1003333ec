"""Draw the pictures of the pages: `python docs/pictures/draw.py`.

Each is written twice, as `<name>-light.svg` and `<name>-dark.svg`. A test compares the files with what
this makes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from canvas import PALETTES, Canvas

__all__ = ["drawings"]

OWNERS = {"7": "blue", "8": "orange", "9": "green", ".": "paper"}


def flow() -> Canvas:
    """How a number gets from a call of the allocator to a dashboard."""
    c = Canvas(820, 330, "A call of the allocator passes a hook; a snapshot of the hooks' counts goes "
               "to exporters in this process, or through a file to a sidecar, and on to Prometheus, "
               "OpenTelemetry and vqmon top.")  # fmt: skip
    c.box(10, 40, 330, 280, fill="none", dash=True, r=10)
    c.text(175, 28, "in the model server", colour="soft", size=13)
    c.label(30, 60, 290, 52, ["allocator, storage and caches", "allocate, free_all, write, read"])
    c.label(30, 150, 290, 52, ["hook", "plain ints, histograms, a ring of events"])
    c.label(30, 240, 290, 60, ["snapshot", "frozen, consistent, taken in constant time"])
    c.line((175, 112), (175, 147), arrow=True)
    c.line((175, 202), (175, 237), arrow=True)
    c.label(400, 228, 150, 40, ["this process"])
    c.label(400, 284, 150, 40, ["snapshot file"])
    c.line((320, 262), (360, 262), (360, 248), (397, 248), arrow=True)
    c.line((320, 280), (360, 280), (360, 304), (397, 304), arrow=True)
    c.label(600, 276, 200, 48, ["sidecar: vqmon serve", "outlives the server"])
    c.line((550, 304), (597, 304), arrow=True)
    c.label(400, 130, 400, 52, ["catalogue", "one table: name, type, unit, how it is read"])
    c.line((475, 228), (475, 185), arrow=True)
    c.line((700, 276), (700, 185), arrow=True)
    for x, w, name in (
        (400, 120, "Prometheus"),
        (535, 135, "OpenTelemetry"),
        (685, 115, "vqmon top"),
    ):
        c.label(x, 45, w, 40, [name])
        c.line((x + w / 2, 130), (x + w / 2, 88), arrow=True)
    c.text(600, 28, "boards, alert rules, runbooks", colour="soft", size=13)
    return c


def _row(c: Canvas, x: float, y: float, owners: str, size: float = 34, first_id: int = 0) -> None:
    """Blocks side by side, coloured by owner, with their ids."""
    for number, owner in enumerate(owners):
        left = x + number * (size + 4)
        c.box(left, y, size, size, fill=OWNERS[owner], dash=owner == ".", r=4)
        c.text(left + size / 2, y + size / 2 + 5, str(first_id + number), size=12)


def blocks() -> Canvas:
    """Blocks, owners and the two streams."""
    c = Canvas(760, 212, "A pool of 24 blocks in two streams. Owners 7, 8 and 9 hold blocks of each, in "
               "any order; the rest is free.")  # fmt: skip
    _row(c, 120, 40, "77788997....")
    _row(c, 120, 100, "77788997....", first_id=12)
    for y, name, what in ((40, "stream k", "keys"), (100, "stream v", "values")):
        c.text(105, y + 16, name, anchor="end", bold=True)
        c.text(105, y + 32, what, anchor="end", size=12, colour="soft")
    c.text(120, 26, "a block: room for block_size tokens", anchor="start", size=12, colour="soft")
    for number, (owner, words) in enumerate(
        (("7", "request-7"), ("8", "request-8"), ("9", "request-9"), (".", "free"))
    ):
        left = 120 + number * 130
        c.box(left, 164, 18, 18, fill=OWNERS[owner], dash=owner == ".", r=3)
        c.text(left + 26, 178, words, anchor="start", size=13)
    c.text(598, 60, "managed = in use + free", anchor="start", size=12, colour="soft")
    c.text(598, 122, "the same, for itself", anchor="start", size=12, colour="soft")
    return c


def fill() -> Canvas:
    """Token slots: filled, asked for and not filled yet, and beyond what was asked for."""
    c = Canvas(760, 250, "Four blocks of eight slots, allocated for 27 tokens, 11 of which are there: 16 "
               "slots wait to be filled, 5 were never asked for.")  # fmt: skip
    for block in range(4):
        left = 30 + block * 180
        c.box(left, 50, 164, 44, fill="none", r=5)
        for slot in range(8):
            number = block * 8 + slot
            fill = "blue" if number < 11 else "line" if number < 27 else "paper"
            c.box(left + 4 + slot * 19.6, 56, 17, 32, fill=fill, r=2, dash=number >= 27)
        c.text(left + 82, 40, f"n_used = {min(8, 27 - 8 * block)}", size=13)
    for left, right, words in (
        (34, 271, "11 slots hold a token"),
        (274, 630, "16 are asked for, not filled yet"),
        (633, 730, "5 left over"),
    ):
        c.line((left, 104), (left, 112), (right, 112), (right, 104))
        c.text((left + right) / 2, 130, words, size=13)
    c.text(30, 168, "token slots: allocated 32, used 11", anchor="start")
    c.text(30, 192, "waste = 1 - used / allocated = 66 %", anchor="start")
    c.text(30, 216, "fragmentation = partial blocks / managed blocks; only the last block is partial here",
           anchor="start")  # fmt: skip
    c.text(30, 238, "(0 < n_used < 8), whatever the waste", anchor="start", size=13, colour="soft")
    return c


def leases() -> Canvas:
    """One block through three holdings, and a handle that outlives the first."""
    c = Canvas(760, 258, "Block 5 is held by request-7, freed, held by request-8, then kept by a prompt "
               "cache. A handle kept by request-7 is refused after its release.")  # fmt: skip
    c.text(20, 72, "block 5", anchor="start", bold=True)
    spans = ((100, 200, "7", "lease of request-7"), (360, 160, "8", "lease of request-8"),
             (520, 150, "8", "the same, cached"))  # fmt: skip
    for left, width, owner, words in spans:
        c.box(left, 48, width, 40, fill=OWNERS[owner], r=3)
        c.text(left + width / 2, 73, words, size=13)
    for left, width in ((300, 60), (670, 60)):
        c.box(left, 48, width, 40, fill="paper", dash=True, r=3)
        c.text(left + width / 2, 73, "free", size=12, colour="soft")
    marks = ((100, "allocate"), (300, "free_all"), (360, "allocate"), (520, "mark_cached"),
             (670, "evicted"))  # fmt: skip
    for x, words in marks:
        c.line((x, 34), (x, 46), arrow=True)
        c.text(x, 28, words, size=12, anchor="end" if words == "free_all" else
               "start" if x == 360 else "middle")  # fmt: skip
    c.line((100, 130), (730, 130), colour="ink", arrow=True)
    c.text(730, 148, "time", anchor="end", size=12, colour="soft")
    c.text(20, 180, "handle of", anchor="start", size=13)
    c.text(20, 196, "request-7", anchor="start", size=13)
    c.line((100, 184), (300, 184), colour="line", width=3)
    c.line((300, 184), (440, 184), colour="red", width=2, dash=True)
    c.text(200, 206, "good", size=12, colour="soft")
    c.line((330, 222), (330, 192), colour="red", arrow=True)
    c.text(330, 238, 'free: refused, "free"', size=12, colour="red")
    c.line((440, 222), (440, 192), colour="red", arrow=True)
    c.text(452, 222, 'free(..., owner="request-7"): refused, "stale"', size=12, colour="red",
           anchor="start")  # fmt: skip
    return c


def growth() -> Canvas:
    """Use that rises, a pool that grows to its limit, a refusal, and a shrink."""
    c = Canvas(760, 286, "Blocks in use rise; the pool grows with them up to max_blocks; a request that "
               "does not fit is refused; later shrink retires free blocks.")  # fmt: skip
    c.line((60, 250), (60, 26), colour="ink", arrow=True)
    c.line((60, 250), (735, 250), colour="ink", arrow=True)
    c.text(735, 268, "time", anchor="end", size=12, colour="soft")
    c.text(52, 40, "blocks", anchor="end", size=12, colour="soft")
    c.line((60, 60), (735, 60), dash=True, colour="red")
    c.text(80, 52, "max_blocks", size=12, colour="red", anchor="start")
    managed = ((60, 190), (190, 190), (190, 150), (270, 150), (270, 100), (340, 100), (340, 60),
               (600, 60), (600, 170), (735, 170))  # fmt: skip
    c.line(*managed, colour="ink", width=2.5)
    used = ((60, 245), (120, 220), (190, 193), (270, 153), (340, 103), (400, 64), (450, 64),
            (500, 140), (560, 205), (735, 215))  # fmt: skip
    c.line(*used, colour="blue", width=3)
    c.text(76, 182, "managed", anchor="start", size=13)
    c.text(100, 240, "in use", anchor="start", size=13, colour="soft")
    c.text(180, 134, "grown", anchor="end", size=12, colour="soft")
    c.line((425, 30), (425, 56), colour="red", arrow=True)
    c.text(433, 34, "refused: BlockPoolExhaustedError, nothing changed", anchor="start", size=12,
           colour="red")  # fmt: skip
    c.text(612, 120, "shrink: retired", anchor="start", size=12, colour="soft")
    return c


def drawings() -> Iterator[tuple[str, str]]:
    """File name and text of every drawing."""
    for draw in (flow, blocks, fill, leases, growth):
        canvas = draw()
        for mode in PALETTES:
            yield f"{draw.__name__}-{mode}.svg", canvas.svg(mode)


if __name__ == "__main__":
    for name, text in drawings():
        (Path(__file__).resolve().parent / name).write_text(text, "utf-8")
