"""`vqmon export`: the options; what is written is made by `veloxquant_exporters.export`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from veloxquant_exporters.cli.completing import folders

if TYPE_CHECKING:
    from veloxquant_exporters.export import Exported, LocalRunbooks

__all__ = ["command"]


@click.group("export")
def command() -> None:
    """Write the Grafana boards or the Prometheus rules into a folder.

    Example: vqmon export dashboards ./grafana --runbook-base https://wiki.example/runbooks
    """


def _checked(name: str) -> Callable[..., Any]:
    """A callback that lets a function of `veloxquant_exporters.export.checks` judge what is given."""

    def callback(_context: click.Context, _option: click.Parameter, given: Any) -> Any:
        from veloxquant_exporters.export import checks

        check: Callable[[str], Any] = getattr(checks, name)
        try:
            return tuple(map(check, given)) if isinstance(given, tuple) else given and check(given)
        except ValueError as error:
            raise click.BadParameter(str(error)) from error

    return callback


def _common(function: Callable[..., None]) -> Callable[..., None]:
    """What both exports take."""
    for decorate in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON: what was written."),
        click.option("--force", is_flag=True, help="Replace files that hold another text."),
        click.option(
            "--runbook-base",
            metavar="URL",
            callback=_checked("runbook_base"),
            help="Where you publish the runbooks. Without it they are written into DIR/runbooks, "
            "and links lead there.",
        ),
        click.argument(
            "directory", metavar="DIR", type=click.Path(path_type=Path), shell_complete=folders
        ),
    ):
        function = decorate(function)
    return function


@command.command("dashboards")
@_common
@click.option(
    "--grafana-path",
    metavar="PATH",
    help="DIR/dashboards as Grafana sees it, if it runs in a container or elsewhere.",
)
def _dashboards(
    directory: Path, runbook_base: str | None, grafana_path: str | None, force: bool, as_json: bool
) -> None:
    """Write the Grafana boards: to provision, and to import by hand.

    DIR/dashboards is for file provisioning, with DIR/provisioning as Grafana's provisioning
    folder; DIR/import is for the import dialog. Exit codes: 0 done, 1 if files that differ are in the way.

    Example: vqmon export dashboards ./grafana --grafana-path /var/lib/grafana/dashboards
    """
    from veloxquant_exporters.export import board_files

    _finish(
        directory,
        runbook_base,
        lambda base: board_files(
            runbooks=base,
            grafana_path=grafana_path or os.path.realpath(directory / "dashboards"),
        ),
        force=force,
        as_json=as_json,
    )


@command.command("rules")
@_common
@click.option(
    "--job",
    "jobs",
    metavar="NAME",
    multiple=True,
    callback=_checked("job"),
    help="The job that scrapes the exporters, if its name lacks 'veloxquant'; repeat for several.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["prometheus", "operator"]),
    default="prometheus",
    show_default=True,
    help="Rule files, or PrometheusRule manifests of the Prometheus operator.",
)
@click.option(
    "--namespace",
    metavar="NAME",
    callback=_checked("namespace"),
    help="Namespace of the manifests.",
)
@click.option(
    "--label",
    "labels",
    metavar="KEY=VALUE",
    multiple=True,
    callback=_checked("label"),
    help="Label of the manifests, as a ruleSelector asks for; repeat for several.",
)
def _rules(
    directory: Path,
    runbook_base: str | None,
    jobs: tuple[str, ...],
    form: str,
    namespace: str | None,
    labels: tuple[tuple[str, str], ...],
    force: bool,
    as_json: bool,
) -> None:
    """Write the Prometheus recording and alert rules.

    Exit codes: 0 done, 1 if files that differ are in the way.

    Example: vqmon export rules ./rules --job mlx --runbook-base https://wiki.example/runbooks
    """
    from veloxquant_exporters.export import operator_files, rule_files

    if form != "operator" and (namespace or labels):
        raise click.UsageError("--namespace and --label go with --format operator")
    _finish(
        directory,
        runbook_base,
        lambda base: (
            operator_files(runbooks=base, jobs=jobs, namespace=namespace, labels=dict(labels))
            if form == "operator"
            else rule_files(runbooks=base, jobs=jobs)
        ),
        force=force,
        as_json=as_json,
    )


def _finish(
    directory: Path,
    base: str | None,
    files: Callable[[str], dict[str, str]],
    *,
    force: bool,
    as_json: bool,
) -> None:
    """Write what `files` makes for a runbook address, and say so."""
    from veloxquant_exporters.export import ExportError, LocalRunbooks, write_files

    local = LocalRunbooks(directory) if base is None else None
    try:
        made = files(local.base if local else base or "")
        done = write_files(directory, made | (local.files() if local else {}), force=force)
    except ExportError as error:
        raise click.ClickException(str(error)) from error
    click.echo(_as_json(directory, done) if as_json else _as_text(done))
    if local is not None and not as_json:
        click.echo(_advice(local), err=True)


def _advice(local: LocalRunbooks) -> str:
    return f"Runbook links lead to {local.base}; --runbook-base says where else they are."


def _as_text(done: list[Exported]) -> str:
    return "\n".join(f"{file.status:9} {file.path}" for file in done)


def _as_json(directory: Path, done: list[Exported]) -> str:
    files = [{"path": str(file.path), "status": file.status} for file in done]
    return json.dumps({"directory": str(directory), "files": files}, indent=1)
