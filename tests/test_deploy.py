"""The files of deploy/: each checked with its own tool where there is one, and against each other."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
COMPOSE = DEPLOY / "compose"
RULES = ROOT / "dashboards" / "alerts"
pytestmark = pytest.mark.timeout(60)


def load(path: Path) -> Any:
    """The one document of a YAML file."""
    return yaml.safe_load(path.read_text("utf-8"))


def services() -> dict[str, Any]:
    """The services of the compose file."""
    found: dict[str, Any] = load(COMPOSE / "compose.yaml")["services"]
    return found


def worker_pod() -> dict[str, Any]:
    """The pod of the Kubernetes example."""
    pod: dict[str, Any] = load(DEPLOY / "kubernetes" / "worker.yaml")["spec"]["template"]["spec"]
    return pod


def unit() -> list[tuple[str, str]]:
    """The settings of the systemd unit."""
    lines = (DEPLOY / "systemd" / "vqmon.service").read_text("utf-8").splitlines()
    pairs = (line.partition("=") for line in lines if re.match(r"\w+=", line))
    return [(key, value) for key, _, value in pairs]


def command_lines() -> dict[str, list[str]]:
    """What each file passes to `vqmon`."""
    (start,) = [value for key, value in unit() if key == "ExecStart"]
    sidecar = worker_pod()["initContainers"][0]
    return {
        "systemd": shlex.split(start)[1:],
        "kubernetes": [*sidecar["command"][1:], *sidecar["args"]],
        "compose": services()["sidecar"]["command"],
    }


@pytest.mark.parametrize("where", ["systemd", "kubernetes", "compose"])
def test_every_command_line_is_one_the_command_takes(where: str) -> None:
    """Parsed by the command itself: a renamed option fails here."""
    click = pytest.importorskip("click")
    from veloxquant_exporters.cli.serve import command

    name, *options = command_lines()[where]
    assert name == "serve"
    parsed = command.make_context("serve", list(options)).params
    assert (parsed["directory"], parsed["port"]) == ("/run/veloxquant", 9465)
    with pytest.raises(click.NoSuchOption):
        command.make_context("serve", [*options, "--no-such-option"])


def checked(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a checking tool, or skip where it is not installed."""
    if shutil.which(str(command[0])) is None:
        pytest.skip(f"no {command[0]} here")
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)


@pytest.fixture
def prometheus_config(tmp_path: Path) -> Path:
    """The configuration as in its container, with the rules beside it."""
    (tmp_path / "rules").mkdir()
    for path in RULES.glob("*.yaml"):
        shutil.copy(path, tmp_path / "rules")
    return Path(shutil.copy(COMPOSE / "prometheus.yml", tmp_path))


def test_prometheus_takes_its_configuration(prometheus_config: Path) -> None:
    """With the rules that it is to load."""
    done = checked("promtool", "check", "config", prometheus_config)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"SUCCESS: \d+ rules found", done.stdout)) == len(
        list(RULES.glob("*.yaml"))
    )


def test_the_check_of_prometheus_can_fail(prometheus_config: Path) -> None:
    """A key that there is not is refused."""
    text = prometheus_config.read_text("utf-8")
    prometheus_config.write_text(text.replace("scrape_timeout", "scrape_time_out"))
    assert checked("promtool", "check", "config", prometheus_config).returncode != 0


def test_alertmanager_takes_its_configuration(tmp_path: Path) -> None:
    """And refuses one whose receiver is not there."""
    path = COMPOSE / "alertmanager.yml"
    done = checked("amtool", "check-config", path)
    assert done.returncode == 0, done.stdout + done.stderr
    broken = tmp_path / "alertmanager.yml"
    broken.write_text(path.read_text("utf-8").replace("- name: pager", "- name: page"))
    assert checked("amtool", "check-config", broken).returncode != 0


def test_alertmanager_names_alerts_that_exist() -> None:
    """An inhibition of a renamed alert would inhibit nothing."""
    alerts = {
        rule["alert"]
        for path in RULES.glob("*.yaml")
        for group in load(path)["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }
    config = (COMPOSE / "alertmanager.yml").read_text("utf-8")
    named = set(re.findall(r'alertname="(\w+)"', config))
    assert named and named <= alerts


def test_alertmanager_silences_only_the_same_worker() -> None:
    """Of two behind one sidecar, the one's exhausted pool says nothing of the other's."""
    rules = load(COMPOSE / "alertmanager.yml")["inhibit_rules"]
    assert all({"job", "instance"} <= set(rule["equal"]) for rule in rules)
    of_pools = [rule["equal"] for rule in rules if "VeloxQuantPool" in rule["source_matchers"][0]]
    assert of_pools and all({"process", "pool"} <= set(equal) for equal in of_pools)


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """With a program in the place of the one that is installed later."""
    text = (DEPLOY / "systemd" / "vqmon.service").read_text("utf-8")
    path = tmp_path / "vqmon.service"
    path.write_text(text.replace("/opt/veloxquant/bin/vqmon", shutil.which("true") or "/bin/true"))
    done = checked("systemd-analyze", "verify", "--man=no", path)
    said = [line for line in done.stderr.splitlines() if "vqmon.service" in line]
    assert (done.returncode, said) == (0, [])
    path.write_text(path.read_text("utf-8").replace("Restart=on-failure", "Restart=now-and-then"))
    assert "now-and-then" in checked("systemd-analyze", "verify", "--man=no", path).stderr


def test_the_unit_lets_the_sidecar_read_what_workers_write() -> None:
    """Group, setgid folder, and sight of the workers' PIDs."""
    settings = dict(unit())
    assert settings["RuntimeDirectoryMode"] == "2770"
    assert settings["RuntimeDirectoryPreserve"] == "yes"
    assert f"/run/{settings['RuntimeDirectory']}" in settings["ExecStart"]
    assert not {"PrivatePIDs", "ProtectProc"} & set(settings)


def test_pod_workers_publish_where_the_sidecar_reads() -> None:
    """One folder, mounted in both, writable, small, and in the group of both."""
    pod = worker_pod()
    (volume,) = pod["volumes"]
    assert volume["emptyDir"]["medium"] == "Memory" and pod["securityContext"]["fsGroup"]
    containers: list[dict[str, Any]] = pod["initContainers"] + pod["containers"]
    sidecar, workers = containers[0], containers[1:]
    assert sidecar["restartPolicy"] == "Always", "a native sidecar ends after the workers"
    for container in (sidecar, *workers):
        (mount,) = container["volumeMounts"]
        assert mount == {"name": volume["name"], "mountPath": "/run/veloxquant"}
    for worker in workers:
        env = {item["name"]: item["value"] for item in worker["env"]}
        assert env["VELOXQUANT_SNAPSHOT_DIR"] == "/run/veloxquant"


def test_the_pod_monitor_finds_the_port_of_the_pod() -> None:
    """By its name and the labels of the pod; the probes ask for paths that are there."""
    deployment = load(DEPLOY / "kubernetes" / "worker.yaml")
    monitor = load(DEPLOY / "kubernetes" / "podmonitor.yaml")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    sidecar = worker_pod()["initContainers"][0]
    assert endpoint["port"] in [port["name"] for port in sidecar["ports"]]
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    assert wanted <= deployment["spec"]["template"]["metadata"]["labels"].items()
    jobs = [rule["replacement"] for rule in endpoint["relabelings"] if rule["targetLabel"] == "job"]
    assert "veloxquant" in jobs[0]
    probes = [sidecar[name]["httpGet"] for name in ("readinessProbe", "livenessProbe")]
    assert [probe["path"] for probe in probes] == ["/-/ready", "/-/healthy"]


def test_compose_mounts_what_is_there() -> None:
    """Every path of this repository that it names exists."""
    mounted = [volume for service in services().values() for volume in service.get("volumes", [])]
    sources = [volume.split(":")[0] for volume in mounted if volume.startswith(".")]
    assert len(sources) >= 5
    for source in sources:
        assert (COMPOSE / source).exists(), source
    build = services()["sidecar"]["build"]
    assert (COMPOSE / build["context"] / build["dockerfile"]).is_file()


def test_compose_reaches_from_this_machine_only() -> None:
    """Every port is bound to loopback, every image has a version."""
    for service in services().values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        assert re.fullmatch(r".+:v?\d+\.\d+\.\d+", service["image"])


def test_compose_names_and_ports_agree() -> None:
    """Who scrapes, alerts, shows and forwards finds its other side."""
    inner = {name: {port.rsplit(":", 1)[1] for port in service.get("ports", ())}
             for name, service in services().items()}  # fmt: skip
    prometheus = load(COMPOSE / "prometheus.yml")
    targets = [
        target
        for config in [*prometheus["scrape_configs"], *prometheus["alerting"]["alertmanagers"]]
        for static in config["static_configs"]
        for target in static["targets"]
    ]
    grafana = load(COMPOSE / "grafana/provisioning/datasources/prometheus.yaml")
    collector = load(COMPOSE / "otel-collector.yaml")
    urls = [
        grafana["datasources"][0]["url"],
        collector["exporters"]["prometheusremotewrite"]["endpoint"],
    ]
    targets += [url.split("/")[2] for url in urls]
    for target in targets:
        host, port = target.split(":")
        assert port in inner.get("prometheus" if host == "localhost" else host, set()), target
    assert any("veloxquant" in config["job_name"] for config in prometheus["scrape_configs"])


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the service `export` writes, run as it stands in the file: its volumes by name."""
    pytest.importorskip("click", reason="click comes with the extra cli")
    from veloxquant_exporters.cli.group import run

    folder = tmp_path_factory.mktemp("export")
    service = services()["export"]
    found = re.fullmatch(r"\$\{RUNBOOKS:-(.+)\}", service["environment"]["RUNBOOKS"])
    assert found is not None
    places = dict(reversed(volume.split(":")) for volume in service["volumes"])
    (script,) = service["command"]
    lines = script.replace('"$$RUNBOOKS"', found[1]).splitlines()
    assert len(lines) == 2
    for line in lines:
        program, *arguments = shlex.split(line)
        assert program == "vqmon"
        # The folder's place in the container is where a volume is mounted.
        assert run([str(folder / places[one]) if one in places else one for one in arguments]) == 0
    return folder


def mount(service: str, volume: str) -> str:
    """Where a service has a volume, read-only."""
    (found,) = [v.split(":") for v in services()[service]["volumes"] if v.startswith(f"{volume}:")]
    assert found[2] == "ro"
    return str(found[1])


def test_compose_gives_grafana_our_boards(exported: Path) -> None:
    """The folder of the provider is the one that the boards are exported to, and no other."""
    provider = load(COMPOSE / "grafana/provisioning/dashboards/veloxquant.yaml")["providers"][0]
    inside = Path(provider["options"]["path"]).relative_to(mount("grafana", "boards"))
    assert len(list((exported / "boards" / inside).rglob("*.json"))) == 6
    scrape_s = load(COMPOSE / "prometheus.yml")["global"]["scrape_interval"]
    datasource = load(COMPOSE / "grafana/provisioning/datasources/prometheus.yaml")
    assert datasource["datasources"][0]["jsonData"]["timeInterval"] == scrape_s


def test_compose_gives_prometheus_our_rules(exported: Path, tmp_path: Path) -> None:
    """With its own configuration, in the folder that this names."""
    assert mount("prometheus", "rules") == "/etc/prometheus/rules"
    shutil.copytree(exported / "rules", tmp_path / "rules")
    done = checked("promtool", "check", "config", shutil.copy(COMPOSE / "prometheus.yml", tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"SUCCESS: \d+ rules found", done.stdout)) == 3


def test_compose_leads_to_runbooks_that_are_there(exported: Path) -> None:
    """Every link of a rule and a panel is to a file that Grafana serves, at a port that is open."""
    grafana = services()["grafana"]
    assert "127.0.0.1:3000:3000" in grafana["ports"]
    base = "http://localhost:3000/public/runbooks/"
    assert "../../docs/runbooks:/usr/share/grafana/public/runbooks:ro" in grafana["volumes"]
    rules = (exported / "rules" / "alerts.yaml").read_text("utf-8")
    links = re.findall(r"runbook_url: (.+)", rules)
    for path in (exported / "boards" / "dashboards").glob("*.json"):
        board = json.loads(path.read_text("utf-8"))
        (place,) = [v["query"] for v in board["templating"]["list"] if v["name"] == "runbooks"]
        urls = [link["url"] for panel in board["panels"] for link in panel.get("links", ())]
        links += [url.replace("${runbooks}", place) for url in urls]
    assert len(links) > 50
    for link in links:
        assert link.startswith(base)
        assert (ROOT / "docs" / "runbooks" / link.removeprefix(base)).is_file(), link


def test_compose_waits_for_what_is_exported() -> None:
    """Rules and boards are read at the start; a volume that nobody declares is none."""
    compose = load(COMPOSE / "compose.yaml")
    for name in ("prometheus", "grafana"):
        wanted = {"export": {"condition": "service_completed_successfully"}}
        assert compose["services"][name]["depends_on"] == wanted
    named = {
        volume.split(":")[0]
        for service in compose["services"].values()
        for volume in service.get("volumes", ())
        if not volume.startswith((".", "$"))
    }
    assert named == set(compose["volumes"])


def test_the_collector_uses_what_it_defines() -> None:
    """Every part of a pipeline is configured, and every configured part is used."""
    config = load(COMPOSE / "otel-collector.yaml")
    for kind in ("receivers", "processors", "exporters"):
        used = {name for line in config["service"]["pipelines"].values() for name in line[kind]}
        assert used == set(config[kind]), kind


def test_the_page_lists_every_file() -> None:
    """deploy/README.md links all that a person may want to open, and nothing else."""
    linked = set(re.findall(r"\]\((\w+/[\w.-]+)\)", (DEPLOY / "README.md").read_text("utf-8")))
    assert all((DEPLOY / path).is_file() for path in linked)
    there = {str(path.relative_to(DEPLOY)) for path in DEPLOY.glob("*/*") if path.is_file()}
    assert there - linked == {"compose/Dockerfile", "compose/Dockerfile.dockerignore"}
