"""The compatibility table of docs/serving.md: each mlx-lm is installed apart, watched and used."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.serving_help import write_tiny_model
from veloxquant_mlx.serving import POINTS, TESTED_VERSIONS
from veloxquant_mlx.telemetry.program_values import OUTCOMES

pytest.importorskip("mlx_lm")
pytestmark = pytest.mark.timeout(180)
ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "mlx-lm"

# Generates in every way, with the server's own thread too, and prints what was seen of it.
PROGRAM = """
import json, sys, types
from veloxquant_mlx.serving import watch
from veloxquant_mlx.serving.accounting import PoolSettings, account_for
account = account_for(PoolSettings.parse("blocks=4096,block-size=1"))
watched = watch(accounting=account)
import mlx_lm
from mlx_lm import server
from mlx_lm.generate import BatchGenerator, stream_generate
from mlx_lm.models.cache import LRUPromptCache

model, tokenizer = mlx_lm.load(sys.argv[1])
single = [r.token for r in stream_generate(model, tokenizer, [5, 6, 7], max_tokens=6)]
batch = BatchGenerator(model, max_tokens=6)
batch.insert([[5, 6, 7], [8, 9]])
rows = {}
while responses := batch.next_generated():
    for r in responses:
        rows.setdefault(r.uid, []).append(r.token)
batch.close()

sys.argv[1:] = ["--model", sys.argv[1]]
made = []
server._run_http_server = lambda host, port, generator, *rest, **more: made.append(generator)
server.main()
(generator,) = made
P = server.GenerationArguments
args = P(
    model=server.ModelDescription("default_model", "default_model", None),
    sampling=server.SamplingArguments(0.0, 1.0, 0, 0.0, 0.0, 0.0),
    logits=server.LogitsProcessorArguments(None, 0.0, 20, 0.0, 20, 0.0, 20),
    stop_words=[], max_tokens=6, num_draft_tokens=3, logprobs=False, top_logprobs=0, seed=None,
    chat_template_kwargs=None,
)
for _ in range(2):
    request = server.CompletionRequest("text", "hello there", [], None, None)
    context, answers = generator.generate(request, args)
    served = [answer.token for answer in answers]
account.refresh()
charged = {"blocks": account.pool.stats.blocks_in_use(), "bytes": account.bytes.usage().in_use_bytes}
found = watched.snapshot()
alive = found.generation_thread_alive
generator.stop_and_join()
print(json.dumps({
    "file": mlx_lm.__file__, "version": found.mlx_lm, "hooks": dict(found.hooks),
    "errors": dict(found.hook_errors), "missing": watched.patcher.missing(), "alive": alive,
    "single": single, "rows": rows, "served": served,
    "caches": {kind: one.n_bytes for kind, one in found.caches.items() if one.n_objects},
    "finished": {k: dict(v.finished) for k, v in found.requests.items()},
    "generated": sum(v.generated_tokens for v in found.requests.values()),
    "cached": found.prompt_cache and found.prompt_cache.hit_tokens,
    "entries": found.prompt_cache and sum(found.prompt_cache.entries.values()),
    "weights": found.weights_bytes, "charged": found.account and charged,
}))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny model."""
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def installed(version: str) -> Path:
    """A folder with that mlx-lm alone, which stays for the next time."""
    folder = BUILD / version
    if not (folder / "mlx_lm" / "_version.py").exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
        pip += ["--disable-pip-version-check", "--upgrade", f"--target={folder}"]
        done = subprocess.run(
            [*pip, f"mlx-lm=={version}"], capture_output=True, text=True, check=False, timeout=120
        )
        if done.returncode:
            shutil.rmtree(folder, ignore_errors=True)
            last = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
            pytest.skip(f"mlx-lm {version} cannot be installed here: {last}")
    return folder


def watched(folder: Path, model: Path) -> tuple[dict[str, Any], str]:
    """What is seen of the program with the mlx-lm of that folder, and what it says."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (folder, ROOT, ROOT / "exporters")))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model)],
        capture_output=True, text=True, env=environment, check=False, timeout=120,
    )  # fmt: skip
    assert done.stdout, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert Path(seen["file"]).is_relative_to(folder)
    return seen, done.stderr


def check_generated(seen: dict[str, Any]) -> None:
    """All ways give the same tokens; what is seen of them is what there was."""
    single = seen["single"]
    assert len(single) == 6 and seen["rows"]["0"] == single and len(seen["rows"]["1"]) == 6
    assert len(seen["served"]) == 6


@pytest.mark.parametrize("version", TESTED_VERSIONS)
def test_a_tested_version_is_seen_in_full(version: str, model: Path) -> None:
    """Every hook in place, none failed, and the numbers are those of the program."""
    seen, said = watched(installed(version), model)
    check_generated(seen)
    assert seen["version"] == version
    assert seen["hooks"] == dict.fromkeys((point.hook for point in POINTS), True)
    assert seen["missing"] == [] and set(seen["errors"].values()) == {0}
    assert seen["finished"]["text_completion"] == {
        **dict.fromkeys(OUTCOMES, 0),
        "ok": 5,
    }
    assert seen["generated"] == 6 * 5
    assert seen["cached"] > 0 and seen["entries"] >= 1 and seen["alive"] is True
    assert seen["caches"]["KVCache"] > 0 and seen["weights"] > 900_000
    assert "off:" not in said
    # Charged in blocks of one slot, which are two heads of 64 floats.
    n_bytes = sum(seen["caches"].values())
    assert seen["charged"] == {"blocks": n_bytes // (2 * 64 * 4), "bytes": n_bytes}


def test_a_version_to_come_degrades_with_one_warning(tmp_path: Path, model: Path) -> None:
    """Renamed insides: the program runs as ever, and what does not depend on them is still seen."""
    spec = find_spec("mlx_lm")
    assert spec is not None and spec.submodule_search_locations
    copied = tmp_path / "mlx_lm"
    source = spec.submodule_search_locations[0]
    shutil.copytree(source, copied, ignore=shutil.ignore_patterns("__pycache__"))
    (copied / "_version.py").write_text('__version__ = "0.99.0"\n')
    for file, old, new in (
        ("generate.py", r"\b_copy\b", "_clone"),
        ("models/cache.py", r"\bPromptTrie\b", "PrefixTree"),
        ("models/cache.py", r"\b_BaseCache\b", "AnyCache"),
        ("models/cache.py", r"\b_n_bytes_by_type\b", "_sizes"),
    ):
        text = (copied / file).read_text()
        changed = re.sub(old, new, text)
        assert changed != text
        (copied / file).write_text(changed)
    seen, said = watched(tmp_path, model)
    check_generated(seen)
    off = {hook for hook, ok in seen["hooks"].items() if not ok}
    assert off == {"batches", "prompt_cache", "cache_census"}
    assert seen["generated"] == 6 * 5 and seen["alive"] is True and seen["weights"] > 900_000
    assert seen["finished"]["text_completion"]["ok"] == 5
    assert seen["errors"]["prompt_cache"] > 0, "the entries by type cannot be read"
    assert seen["charged"] is None and said.count("pool accounting is off") == 1
    warnings = [line for line in said.splitlines() if "mlx-lm 0.99.0 is untested" in line]
    assert len(warnings) == 1
    assert all(hook in warnings[0] for hook in off)
    assert "Traceback" not in said or said.count("Traceback") == 1


def test_the_page_lists_the_tested_versions() -> None:
    """And no other."""
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+\.\d+\.\d+) \|", page, re.MULTILINE)
    assert tuple(rows) == TESTED_VERSIONS
