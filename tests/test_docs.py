"""The pages: commands and code that run, links that lead somewhere, drawings and a site that are built."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.doc_blocks import SHELL, Block, Marks, blocks_of, left_out, run_python, run_shell

markdown_it = pytest.importorskip("markdown_it", reason="comes with rich, in the extra cli")

ROOT = Path(__file__).resolve().parent.parent
RUN_SHELL = (
    "README.md",
    "docs/getting-started.md",
    "docs/howto/grafana.md",
    "docs/howto/bench-an-allocator.md",
    "docs/howto/traces.md",
)
RUN_PYTHON = ("README.md", "docs/concepts.md", "docs/migrating.md", "docs/howto/watch-a-pool.md")


def pages() -> list[Path]:
    """Every Markdown page of the project, with those not yet committed."""
    names = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md")]
    return sorted(names)


def blocks(page: str) -> list[Block]:
    """The blocks of a page of the project."""
    return list(blocks_of((ROOT / page).read_text("utf-8"), page))


# -- what is run ----------------------------------------------------------------------------------


@pytest.mark.timeout(180)
@pytest.mark.parametrize("page", RUN_SHELL)
def test_the_commands_of_a_page_run(page: str, tmp_path: Path) -> None:
    """What a newcomer types works, in an empty folder with an empty HOME."""
    if not (Path(sys.executable).parent / "vqmon").exists() or shutil.which("curl") is None:
        pytest.skip("needs the installed command, and curl")
    found = blocks(page)
    said = run_shell(found, tmp_path, timeout_s=170)
    ran = [b for b in found if b.language in SHELL and left_out(b) is None]
    assert said.count("@@ ") == len(ran) > 0


@pytest.mark.timeout(120)
@pytest.mark.parametrize("page", RUN_PYTHON)
def test_the_code_of_a_page_runs(page: str, tmp_path: Path) -> None:
    """The Python blocks of a page run from top to bottom, and what they assert holds."""
    pytest.importorskip("mlx_lm", reason="an MLX backend")
    pytest.importorskip("prometheus_client", reason="the extra prometheus")
    assert any(block.language == "python" for block in blocks(page))
    run_python(blocks(page), tmp_path, timeout_s=110)


def test_what_is_missing_here_is_said() -> None:
    """Blocks that need a program or a model are not left out in silence."""
    found = [block for page in {*RUN_SHELL, *RUN_PYTHON} for block in blocks(page)]
    needy = [block for block in found if "needs" in block.marks.said]
    assert needy
    missing = sorted(f"{block.where}: {left_out(block)}" for block in needy if left_out(block))
    if missing:
        pytest.skip("; ".join(missing))


def test_every_block_of_any_page_is_well_marked() -> None:
    """Marks are spelt right, and stand before a block, on the pages that are not run too."""
    for page in pages():
        list(blocks_of(page.read_text("utf-8"), page.name))


@pytest.mark.parametrize(
    "text",
    [
        "<!-- docs-test: skp: because of this -->\n```sh\nls\n```",
        "<!-- docs-test: skip: -->\n```sh\nls\n```",
        "<!-- docs-test: retry -->\nprose",
    ],
)
def test_a_bad_mark_is_an_error(text: str) -> None:
    """A block is not left out by a slip of the pen."""
    with pytest.raises(ValueError, match=r"mark|reason|without a block"):
        list(blocks_of(text, "page.md"))


def test_a_command_that_fails_is_seen(tmp_path: Path) -> None:
    """The runner has teeth: in the middle of a block, of a pipe, and in the last of three blocks."""
    for number, text in enumerate(("false\ntrue", "false | cat", "kill %9")):
        folder = tmp_path / str(number)
        folder.mkdir()
        good = Block("page.md:1", "sh", "true\n", Marks({}))
        bad = Block("page.md:9", "sh", text, Marks({}))
        with pytest.raises(AssertionError, match=re.escape("page.md:9")):
            run_shell([good, good, bad], folder, timeout_s=20)


def test_pages_name_only_commands_there_are() -> None:
    """A `vqmon` command in a page is one of the command's own."""
    from veloxquant_exporters.cli.commands import COMMANDS

    named = {
        (name, page.name)
        for page in pages()
        for name in re.findall(
            r"(?:`|bin/|\$ |^)vqmon ([a-z]+)", page.read_text("utf-8"), re.MULTILINE
        )
    }
    assert {(name, page) for name, page in named if name not in COMMANDS} == set()
    assert ("demo", "README.md") in named or ("demo", "getting-started.md") in named


# -- links ----------------------------------------------------------------------------------------


def slug(heading: str) -> str:
    """The anchor that code hosts and MyST give a heading."""
    text = re.sub(r"[^\w\- ]", "", heading.lower().replace("`", ""))
    return text.strip().replace(" ", "-")


def tokens_of(text: str) -> list[Any]:
    """The tokens of a page, with those inside of its lines."""
    parser = markdown_it.MarkdownIt("commonmark").enable("table")
    flat = []
    for token in parser.parse(text):
        flat += [token, *(token.children or [])]
    return flat


def anchors_of(text: str) -> set[str]:
    """Every anchor of a page."""
    found: list[str] = []
    tokens = tokens_of(text)
    for number, token in enumerate(tokens):
        if token.type == "heading_open":
            name = slug(tokens[number + 1].content)
            found.append(f"{name}-{found.count(name)}" if name in found else name)
    return set(found)


def links_of(text: str) -> Iterator[str]:
    """Every target that a page links to or shows."""
    for token in tokens_of(text):
        for name in ("href", "src"):
            if token.attrs.get(name):
                yield str(token.attrs[name])
        if token.type.startswith("html"):
            yield from re.findall(r'(?:src|srcset|href)="([^"]+)"', token.content)


def faults(page: Path) -> list[str]:
    """What is wrong with the links of a page."""
    found = []
    for link in links_of(page.read_text("utf-8")):
        if re.match(r"[a-z]+:", link):
            if not re.fullmatch(r"(?:https?://[\w.:-]+(?:/[^\s<>]*)?|mailto:\S+@\S+)", link):
                found.append(f"{link}: not the form of an address")
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists():
            found.append(f"{link}: no such file")
        elif anchor and anchor not in anchors_of(target.read_text("utf-8")):
            found.append(f"{link}: no such heading")
    return found


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    """Files and headings that a page links to exist; addresses have the form of one."""
    assert faults(page) == []


def test_every_runbook_is_found_by_what_one_sees() -> None:
    """The page on incidents leads to each runbook from a symptom."""
    listed = set(links_of((ROOT / "docs" / "incidents.md").read_text("utf-8")))
    runbooks = {f"runbooks/{page.name}" for page in (ROOT / "docs" / "runbooks").glob("*.md")}
    assert runbooks - listed == set()
    assert len(runbooks) > 10


def test_the_link_check_has_teeth(tmp_path: Path) -> None:
    """A file, a heading or an address that is wrong is found, in prose, in tables and in HTML."""
    (tmp_path / "other.md").write_text("# One `thing`, or two\n\n# Twice\n\n# Twice\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](gone.md) [b](other.md#no) [c](http:/x) <img src='x.png'> <img src=\"y.png\">\n\n"
        "| t |\n| - |\n| [d](gone2.md) |\n\n"
        "[e](other.md#one-thing-or-two) [f](other.md#twice-1) [g](https://example.org/x?y#z)\n"
    )
    assert [fault.split(":")[0] for fault in faults(page)] == [
        "gone.md",
        "other.md#no",
        "http",
        "y.png",
        "gone2.md",
    ]


# -- what is built --------------------------------------------------------------------------------


def drawings() -> dict[str, str]:
    """The drawings as their program makes them now."""
    path = ROOT / "docs" / "pictures" / "draw.py"
    spec = importlib.util.spec_from_file_location("docs_draw", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = before
        sys.modules.pop("canvas", None)
    return dict(module.drawings())


def test_the_drawings_are_those_of_their_program() -> None:
    """A drawing that was changed by hand, or a program that was not run, is seen."""
    made = drawings()
    folder = ROOT / "docs" / "pictures"
    assert {name: (folder / name).read_text("utf-8") for name in made} == made
    assert {name.replace("-dark", "-light") for name in made} <= set(made)


def test_every_drawing_is_shown_in_light_and_dark() -> None:
    """Each is on a page, as a picture that follows the reader's theme."""
    shown = {Path(link).name for page in pages() for link in links_of(page.read_text("utf-8"))}
    assert set(drawings()) - shown == set()


FAULTS = {
    "[x](gone.md)": "gone.md",
    "[x](listed.md#nowhere)": "nowhere",
    "```{image} gone.png\n```": "gone.png",
}


@pytest.mark.timeout(60)
def test_the_site_is_strict(tmp_path: Path) -> None:
    """A broken link, a missing heading, a missing picture and an unlisted page fail the build."""
    pytest.importorskip("myst_parser", reason="the group docs")
    pytest.importorskip("furo", reason="the group docs")
    folder = tmp_path / "source" / "docs"
    folder.mkdir(parents=True)
    home = "# Home\n\n```{toctree}\nlisted\n```\n\n"
    (folder / "index.md").write_text(home + "\n\n".join(FAULTS))
    (folder / "listed.md").write_text("# Listed\n")
    (folder / "unlisted.md").write_text("# Unlisted\n")
    build = ["-q", "-E", "-W", "--keep-going", "-b", "dummy", "-c", str(ROOT / "docs")]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *build, str(folder.parent), str(tmp_path / "site")],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr
    said = [says for says in (*FAULTS.values(), "unlisted.md") if says in done.stderr]
    assert said == [*FAULTS.values(), "unlisted.md"], done.stderr
