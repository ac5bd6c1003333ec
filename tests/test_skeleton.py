"""The project around the code: imports, packaging, pins, and what may not stand in a tracked file."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

import veloxquant_exporters
import veloxquant_mlx

ROOT = Path(__file__).resolve().parent.parent

# What a process must not pay for by importing the core: each is loaded by the module that uses it.
HEAVY = ("mlx", "mlx_lm", "numpy", "prometheus_client", "opentelemetry", "http.server", "click")
LIGHT = ("veloxquant_mlx", "veloxquant_mlx.core", "veloxquant_mlx.memory", "veloxquant_exporters")

BANNED = {
    "registry host": re.compile(r"pypi\.org|pythonhosted\.org|npmjs\.(?:org|com)|deb\.debian"),
    "machine path": re.compile(r"(?<![\w.~$}-])/(?:work|root|tmp|home/\w+|Users/\w+)/\w"),
}


def project() -> dict[str, Any]:
    """The parsed pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def requirement_names(requirements: list[str]) -> set[str]:
    """The bare, normalised names of requirement strings."""
    names = (re.match(r"[\w.-]+", requirement) for requirement in requirements)
    return {re.sub(r"[-_.]+", "-", name[0]).lower() for name in names if name}


def loaded_by(module: str) -> set[str]:
    """The modules in a fresh interpreter after it imported ``module``."""
    code = f"import sys; sys.path[:0] = {[str(ROOT), str(ROOT / 'exporters')]!r}; import {module}"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


def tracked_texts() -> list[tuple[str, str]]:
    """Path and text of every tracked file that is text."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: nothing says which files are tracked")
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, check=True
    )
    names = [name for name in listed.stdout.decode().split("\0") if name]
    texts = []
    for name in names:
        content = (ROOT / name).read_bytes() if (ROOT / name).is_file() else b""
        if b"\0" not in content:
            texts.append((name, content.decode("utf-8")))
    return texts


@pytest.mark.parametrize("module", LIGHT)
def test_importing_the_core_loads_nothing_heavy(module: str) -> None:
    """A sidecar starts without MLX, a model server without an exporter or an HTTP server."""
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not written yet")
    loaded = loaded_by(module)
    assert module in loaded
    assert loaded.isdisjoint(HEAVY)


def test_the_import_check_sees_a_heavy_module() -> None:
    """The check above has teeth: a module that is loaded is seen."""
    assert "http.server" in loaded_by("http.server")


def test_one_version_everywhere() -> None:
    """pyproject.toml, both packages and the changelog agree on the version."""
    version = project()["project"]["version"]
    assert veloxquant_mlx.__version__ == version
    assert veloxquant_exporters.__version__ == version
    released = re.findall(
        r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE
    )
    assert not released or released[0] == version


def test_the_core_depends_on_nothing() -> None:
    """Whoever installs the bare distribution gets no other package with it."""
    assert project()["project"]["dependencies"] == []


def test_every_requirement_is_bounded_pinned_and_explained() -> None:
    """An upper bound for users, an exact pin for CI, a reason in the docs."""
    table = project()
    extras: dict[str, list[str]] = table["project"]["optional-dependencies"]
    used = [text for name, extra in extras.items() if name != "all" for text in extra]
    assert all(">=" in text and "<" in text for text in used)
    groups = table["dependency-groups"].values()
    tools = [text for group in groups for text in group if isinstance(text, str)]
    pinned = requirement_names((ROOT / "constraints.txt").read_text("utf-8").splitlines())
    assert requirement_names(used + tools) <= pinned
    explained = (ROOT / "docs" / "dependencies.md").read_text("utf-8")
    missing = {name for name in requirement_names(used + tools) if f"`{name}`" not in explained}
    assert missing == set()


def test_the_pins_are_plain() -> None:
    """constraints.txt holds names and exact versions: no hash, no address, no option."""
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert pins
    assert [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.]+", pin)] == []


def test_the_wheel_holds_both_packages(tmp_path: Path) -> None:
    """What is built imports under both names, is typed, and brings the command and nothing else."""
    pytest.importorskip("hatchling", reason="the build back end is a development tool")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (entry_points,) = (name for name in names if name.endswith("/entry_points.txt"))
        commands = archive.read(entry_points).decode()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "veloxquant_mlx",
        "veloxquant_exporters",
    }
    assert {"veloxquant_mlx/py.typed", "veloxquant_exporters/py.typed"} <= set(names)
    assert "veloxquant_mlx/core/exceptions.py" in names
    assert "vqmon = veloxquant_exporters.cli:main" in commands


@pytest.mark.parametrize("what", BANNED)
def test_tracked_files_name_no(what: str) -> None:
    """A file that names one machine's paths or registries works on no other."""
    found = [
        f"{name}: {match[0]}"
        for name, text in tracked_texts()
        for match in BANNED[what].finditer(text)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("what", "parts"),
    [
        ("registry host", ("https://pypi", ".org/simple")),
        ("registry host", ("registry.npmjs", ".org")),
        ("machine path", ("cd /", "work/main")),
        ("machine path", ("open('/", "tmp/x')")),
    ],
)
def test_the_ban_has_teeth(what: str, parts: tuple[str, str]) -> None:
    """What the check above looks for, it finds; put together here, so as not to find this file."""
    assert BANNED[what].search("".join(parts))


def test_the_readme_starts_with_the_two_commands() -> None:
    """The first code on the first page is what a newcomer types."""
    readme = (ROOT / "README.md").read_text("utf-8")
    first_block = readme.split("```")[1]
    commands = [line.split("#")[0].strip() for line in first_block.splitlines()[1:]]
    assert [command for command in commands if command] == ["make demo", "make test"]
    assert readme.index("```") < 400
    assert "`veloxquant-mlx`" in readme  # the package that owns the same import name


def test_the_readme_names_every_extra() -> None:
    """Each extra a user may ask for is described where a user looks."""
    readme = (ROOT / "README.md").read_text("utf-8")
    extras = project()["project"]["optional-dependencies"]
    assert [extra for extra in extras if f"`{extra}`" not in readme] == []


def test_make_help_lists_every_verb() -> None:
    """A verb that help does not show is a verb nobody finds."""
    makefile = (ROOT / "Makefile").read_text("utf-8")
    phony = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[0].split()
    shown = re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE)
    assert [verb for verb in phony if not verb.startswith("setup-")] == shown
