"""`vqmon export`: boards and rules as a user gets them, from the checkout and from a wheel."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
import venv
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("click", reason="click comes with the extra cli")
pytest.importorskip("yaml")

import yaml

from veloxquant_exporters.cli.group import run as run_group
from veloxquant_exporters.export import checks, shipped
from veloxquant_exporters.export.boards import provider
from veloxquant_exporters.export.errors import ExportError
from veloxquant_exporters.export.files import write_files
from veloxquant_exporters.export.rules import rule_files

ROOT = Path(__file__).resolve().parent.parent
BASE = "https://wiki.example/runbooks"
WIKI = ("--runbook-base", BASE)
promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is missing (Debian package prometheus)"
)
pytestmark = pytest.mark.timeout(120)


def export(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """Exit code, output and errors of `vqmon export`."""
    capsys.readouterr()
    code = run_group(["export", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


def texts(folder: Path) -> dict[str, str]:
    """All files of a folder by path."""
    return {
        path.relative_to(folder).as_posix(): path.read_text("utf-8")
        for path in folder.rglob("*")
        if path.is_file()
    }


def variables(board: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The variables of a board by name."""
    return {variable["name"]: variable for variable in board["templating"]["list"]}


def checked_rules(*files: Path) -> str:
    """What promtool says of rule files that it accepts."""
    done = subprocess.run(
        ["promtool", "check", "rules", *map(str, files)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_F01_both_copies_of_a_board_come_from_one_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The provisioned one asks for nothing; the imported one for the data source and the runbooks."""
    assert export(capsys, "dashboards", tmp_path, *WIKI)[0] == 0
    committed = sorted((ROOT / "dashboards" / "grafana").glob("*.json"))
    assert len(committed) == 6
    for source in committed:
        text = (tmp_path / "dashboards" / source.name).read_text("utf-8")
        assert text == source.read_text("utf-8").replace(
            "https://veloxquant.example/runbooks", BASE
        )
        assert "${DS_" not in text and "__inputs" not in text and "__requires" not in text
        imported = json.loads((tmp_path / "import" / source.name).read_text("utf-8"))
        assert [one["name"] for one in imported.pop("__inputs")] == [
            "DS_PROMETHEUS",
            "VAR_RUNBOOKS",
        ]
        kinds = {one["id"] for one in imported.pop("__requires") if one["type"] == "panel"}
        provisioned = json.loads(text)
        assert kinds == {panel["type"] for panel in provisioned["panels"]} - {"row"}
        found = variables(imported)
        assert found["datasource"]["current"]["value"] == "${DS_PROMETHEUS}"
        assert found["runbooks"]["query"] == "${VAR_RUNBOOKS}"
        # But for what it asks, it is the same board.
        imported["templating"]["list"] = provisioned["templating"]["list"]
        assert {**imported, "editable": False} == provisioned


def test_provisioning_points_at_the_exported_boards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the real path, or by the one that Grafana's container sees; as deploy/compose has it."""
    export(capsys, "dashboards", tmp_path / "here", *WIKI)
    written = tmp_path / "here" / "provisioning" / "dashboards" / "veloxquant.yaml"
    (one,) = yaml.safe_load(written.read_text("utf-8"))["providers"]
    assert Path(one["options"]["path"]) == (tmp_path / "here" / "dashboards").resolve()
    assert len(list(Path(one["options"]["path"]).glob("*.json"))) == 6
    inside = "/etc/grafana/boards/dashboards"
    export(capsys, "dashboards", tmp_path / "there", *WIKI, "--grafana-path", inside)
    at = "provisioning/dashboards/veloxquant.yaml"
    compose = ROOT / "deploy" / "compose" / "grafana" / at
    assert texts(tmp_path / "there")[at] == compose.read_text("utf-8")


@pytest.mark.parametrize(
    "path", ["/a b/c", "/ä: #", 'C:\\x "y"', "/plain/path-1.2", "true", "123", "-", "1.5"]
)
def test_any_path_survives_the_provisioning_file(path: str) -> None:
    """Blanks, colons and quotes are a user's right."""
    (one,) = yaml.safe_load(provider(path))["providers"]
    assert one["options"]["path"] == path


def test_a_path_that_is_no_text_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No YAML file can hold it; nothing is written."""
    code, _, err = export(capsys, "dashboards", tmp_path / "x", "--grafana-path", "/b\udcff")
    assert code == 1
    assert "is not UTF-8" in err and len(err.splitlines()) == 1
    assert not (tmp_path / "x").exists()


@promtool
def test_exported_rules_are_promtools_and_lead_where_they_should(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every link begins with the address, and what was not asked for is as it was."""
    assert export(capsys, "rules", tmp_path, *WIKI)[0] == 0
    assert set(texts(tmp_path)) == {"alerts.yaml", "bridge.yaml", "records.yaml"}
    checked_rules(*tmp_path.glob("*.yaml"))
    for path in tmp_path.glob("*.yaml"):
        source = (ROOT / "dashboards" / "alerts" / path.name).read_text("utf-8")
        assert yaml.safe_load(path.read_text("utf-8")) == yaml.safe_load(
            source.replace("url: RUNBOOKS/", f"url: {BASE}/")
        )
    links = re.findall(r"runbook_url: (.+)", texts(tmp_path)["alerts.yaml"])
    assert len(links) > 15
    assert all(link.startswith(f"{BASE}/") and link.endswith(".md") for link in links)
    assert "RUNBOOKS" not in texts(tmp_path)["alerts.yaml"]


@pytest.mark.parametrize(
    ("jobs", "matcher"),
    [
        (["mlx"], 'job="mlx"'),
        (["models/mlx.server"], 'job="models/mlx.server"'),
        (["a.b", "c"], 'job=~"a[.]b|c"'),
    ],
)
@promtool
def test_the_job_is_put_into_every_matcher_on_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], jobs: list[str], matcher: str
) -> None:
    """And only there: `by (job)` and the rest of each rule stay."""
    options = [part for job in jobs for part in ("--job", job)]
    assert export(capsys, "rules", tmp_path, *WIKI, *options)[0] == 0
    text = texts(tmp_path)["alerts.yaml"]
    source = (ROOT / "dashboards" / "alerts" / "alerts.yaml").read_text("utf-8")
    ours = 'job=~".*veloxquant.*"'
    assert source.count(ours) == 2
    assert f"up{{{matcher}}} == 0" in text
    # One job that is missing is not there because another is.
    absent = " or ".join(f'absent(up{{job="{job}"}})' for job in jobs)
    assert f"expr: {absent}\n" in text
    assert ours not in text
    assert text.count("(job, instance, process)") == source.count("(job, instance, process)")
    checked_rules(*tmp_path.glob("*.yaml"))


@promtool
def test_operator_manifests_hold_the_same_rules(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A PrometheusRule a file, whose spec is what the rule file says."""
    plain, manifests, specs = tmp_path / "p", tmp_path / "m", tmp_path / "s"
    common = (*WIKI, "--job", "mlx")
    assert export(capsys, "rules", plain, *common)[0] == 0
    more = ("--format", "operator", "--namespace", "models", "--label", "release=kube-prometheus")
    assert export(capsys, "rules", manifests, *common, *more)[0] == 0
    specs.mkdir()
    for path in manifests.glob("*.yaml"):
        found = yaml.safe_load(path.read_text("utf-8"))
        assert (found["apiVersion"], found["kind"]) == (
            "monitoring.coreos.com/v1",
            "PrometheusRule",
        )
        assert found["metadata"] == {
            "name": f"veloxquant-{path.stem}",
            "namespace": "models",
            "labels": {
                "app.kubernetes.io/name": "veloxquant-mlx-monitor",
                "release": "kube-prometheus",
            },
        }
        assert found["spec"] == yaml.safe_load((plain / path.name).read_text("utf-8"))
        (specs / path.name).write_text(yaml.safe_dump(found["spec"]))
    assert len(re.findall("SUCCESS", checked_rules(*specs.glob("*.yaml")))) == 3


@promtool
def test_a_job_that_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of two jobs the one that is not scraped, and not a word that its name never had."""
    assert export(capsys, "rules", tmp_path, *WIKI, "--job", "mlx", "--job", "other")[0] == 0
    (tmp_path / "test.yaml").write_text(
        """
rule_files: [alerts.yaml]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {series: 'up{job="mlx"}', values: 1x30}
    alert_rule_test:
      - eval_time: 20m
        alertname: VeloxQuantExporterAbsent
        exp_alerts: []
"""
    )
    done = subprocess.run(
        ["promtool", "test", "rules", tmp_path / "test.yaml"],
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout + done.stderr
    assert 'job="other"' in said and 'job="mlx"' not in said
    assert 'summary="No other target is scraped"' in said
    assert "no target of job other:" in said


@pytest.mark.parametrize("given", ["app.kubernetes.io/name=mine", "true=yes", "1=2", "team=NAME"])
def test_any_label_of_a_manifest_is_as_it_was_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str
) -> None:
    """Once, as text, in place of ours where it has the same key."""
    options = ("--format", "operator", "--label", given)
    assert export(capsys, "rules", tmp_path, *WIKI, *options)[0] == 0
    text = texts(tmp_path)["alerts.yaml"]
    key, _, value = given.partition("=")
    labels = yaml.safe_load(text)["metadata"]["labels"]
    assert labels[key] == value
    assert text.partition("spec:")[0].count(f'"{key}":') == 1


def test_without_an_address_links_lead_to_copies_of_the_runbooks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No link leads to nowhere; a line says how to change it."""
    code, _, err = export(capsys, "rules", tmp_path)
    assert code == 0
    assert "--runbook-base" in err
    links = re.findall(r"runbook_url: (.+)", texts(tmp_path)["alerts.yaml"])
    books = {path.as_uri() for path in (tmp_path.resolve() / "runbooks").glob("*.md")}
    assert set(links) == books
    export(capsys, "dashboards", tmp_path / "boards")
    for path in (tmp_path / "boards" / "dashboards").glob("*.json"):
        board = json.loads(path.read_text("utf-8"))
        base = variables(board)["runbooks"]["query"]
        for panel in board["panels"]:
            for link in panel.get("links", ()):
                assert Path(
                    link["url"].replace("${runbooks}", base).removeprefix("file://")
                ).is_file()


def test_nothing_of_the_users_is_overwritten_unasked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One changed file stops the export before it begins; --force replaces that file alone."""
    export(capsys, "rules", tmp_path, *WIKI)
    mine = tmp_path / "alerts.yaml"
    mine.write_text("# tuned by hand\n")
    (tmp_path / "records.yaml").unlink()
    code, out, err = export(capsys, "rules", tmp_path, *WIKI)
    assert (code, out) == (1, "")
    assert "alerts.yaml" in err and "--force" in err and len(err.splitlines()) == 1
    assert mine.read_text() == "# tuned by hand\n"
    assert not (tmp_path / "records.yaml").exists()
    code, out, _ = export(capsys, "rules", tmp_path, *WIKI, "--force", "--json")
    assert code == 0
    statuses = {Path(one["path"]).name: one["status"] for one in json.loads(out)["files"]}
    assert statuses == {
        "alerts.yaml": "replaced",
        "bridge.yaml": "unchanged",
        "records.yaml": "written",
    }
    assert "tuned" not in mine.read_text()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_files_are_written_together_or_not_at_all(tmp_path: Path) -> None:
    """What cannot be written leaves no half file, and no new one beside old ones."""
    (tmp_path / "b").mkdir()
    with pytest.raises(ExportError, match="is in the way: Is a directory"):
        write_files(tmp_path, {"a": "new", "b": "new"}, force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b"]
    (tmp_path / "a").write_text("old")
    long = "c" * 250  # its temporary name is too long for the file system
    with pytest.raises(ExportError, match="cannot be written: File name too long"):
        write_files(tmp_path, {"a": "new", long: "new"}, force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    assert (tmp_path / "a").read_text() == "old"


def test_a_rename_that_fails_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that came into the way after the look."""
    monkeypatch.setattr("veloxquant_exporters.export.files._state", lambda *_: "written")
    (tmp_path / "b").mkdir()
    with pytest.raises(ExportError, match="b cannot be written: Is a directory"):
        write_files(tmp_path, {"a": "new", "b": "new", "c": "new"}, force=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_killed_in_the_middle_it_leaves_nothing_that_is_loaded(tmp_path: Path) -> None:
    """Killed with half a file written: no `*.yaml` there, nor a changed one, and it can be redone."""
    script = """
import os, signal, sys
from pathlib import Path
from veloxquant_exporters.export import files
class Killing(dict):
    def items(self):
        yield "alerts.yaml", "groups: []"
        yield "records.yaml", Half()
class Half(str):
    def encode(self, *_):
        os.kill(os.getpid(), signal.SIGKILL)
files._state = lambda *_: "written"
texts = Killing({"alerts.yaml": "groups: []", "records.yaml": Half()})
files.write_files(Path(sys.argv[1]), texts, force=False)
"""
    died = subprocess.run([sys.executable, "-c", script, tmp_path], check=False)
    assert died.returncode == -signal.SIGKILL
    left = [path.name for path in tmp_path.iterdir()]
    assert left and list(tmp_path.glob("*.yaml")) == []
    write_files(tmp_path, {"alerts.yaml": "groups: []"}, force=False)
    assert [path.name for path in tmp_path.glob("*.yaml")] == ["alerts.yaml"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rules", "DIR", "--runbook-base", "wiki.example"], "http://"),
        (["rules", "DIR", "--runbook-base", 'https://x/"'], "quotes"),
        (["rules", "DIR", "--job", 'a"} or up{'], "letters"),
        (["rules", "DIR", "--job", "a: b"], "letters"),
        (["rules", "DIR", "--label", "a=b"], "--format operator"),
        (["rules", "DIR", "--format", "operator", "--label", "a"], "KEY=VALUE"),
        (["rules", "DIR", "--format", "operator", "--namespace", "Two Words"], "small letters"),
        (["dashboards"], "DIR"),
        (["nonsense"], "nonsense"),
    ],
)
def test_wrong_usage_says_what_is_allowed_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    """Exit code 2, as of every command."""
    folder = tmp_path / "out"
    given = [str(folder) if part == "DIR" else part for part in arguments]
    code, _, err = export(capsys, *given)
    assert code == 2
    assert said in err
    assert not folder.exists()


def test_a_folder_that_cannot_be_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file in its place."""
    (tmp_path / "file").write_text("")
    code, _, err = export(capsys, "rules", tmp_path / "file", *WIKI)
    assert code == 1
    assert len(err.splitlines()) == 1 and "Not a directory" in err


def test_damaged_rules_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation that lost its files says so, and does not export half."""
    monkeypatch.setattr(shipped, "_HERE", Path("/nowhere/at/all/of/it"))
    with pytest.raises(ExportError, match="Install veloxquant-mlx-monitor anew"):
        rule_files(runbooks=BASE)


@pytest.mark.parametrize("url", ["https://", "https:///x", "ftp://x", "", "javascript:alert(1)"])
def test_addresses_that_lead_nowhere_are_refused(url: str) -> None:
    """A base is an address with a host, or a file."""
    with pytest.raises(ValueError, match="allowed is"):
        checks.runbook_base(url)


def test_the_wheel_takes_its_data_from_where_the_checkout_has_it() -> None:
    """Two tables name the folders: the build's, and that of who looks in a checkout."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    included = table["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert included == {
        folder: f"veloxquant_exporters/export/data/{kind}"
        for kind, (folder, _) in shipped._CHECKOUT.items()
    }


def test_an_installed_wheel_exports_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In an environment of its own that knows nothing of the checkout."""
    pytest.importorskip("hatchling", reason="the build back end is a development tool")
    import click

    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, capture_output=True, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "install", "-q", "--no-deps", "--no-index", str(wheel)],
        capture_output=True,
        check=True,
    )
    # click is the one library that the command needs; from here, so that no index is asked.
    (site,) = (tmp_path / "env").glob("lib/python3*/site-packages")
    assert click.__file__ is not None
    shutil.copytree(Path(click.__file__).parent, site / "click")
    alone = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    for what in ("dashboards", "rules"):
        done = subprocess.run(
            [str(tmp_path / "env" / "bin" / "vqmon"), "export", what, f"out/{what}"],
            cwd=tmp_path,
            env=alone,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    installed = texts(tmp_path / "out")
    shutil.move(tmp_path / "out", tmp_path / "installed")
    for what in ("dashboards", "rules"):
        assert export(capsys, what, tmp_path / "out" / what)[0] == 0
    assert texts(tmp_path / "out") == installed
    assert len(installed) == 6 * 2 + 1 + 15 + 3 + 15
