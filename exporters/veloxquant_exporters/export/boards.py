"""Grafana boards in two forms from one source: for file provisioning, and for the import dialog.

A provisioned board is loaded as it is, so it may ask for nothing (a board with inputs fails with
"data source ${DS_PROMETHEUS} was not found"), and its data source is a variable. A board for the
import dialog asks: for the data source, and for where the runbooks are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from veloxquant_exporters.export.errors import ExportError
from veloxquant_exporters.export.shipped import shipped

__all__ = ["FOLDER", "board_files", "importable", "provider", "provisioned"]

FOLDER: Final = "VeloxQuant"

_SOURCE: Final = "DS_PROMETHEUS"
_RUNBOOKS: Final = "VAR_RUNBOOKS"
_GRAFANA: Final = "11.0.0"  # the oldest that has all panel options used

Json = dict[str, Any]


def board_files(*, runbooks: str, grafana_path: str) -> dict[str, str]:
    """The files of an export: text by path within the folder.

    Args:
        runbooks: Address that runbook links begin with.
        grafana_path: The folder `dashboards/` of the export, as Grafana sees it.
    """
    files: dict[str, str] = {}
    for name, text in shipped("boards").items():
        try:
            board = json.loads(text)
            files[f"dashboards/{name}"] = _text(provisioned(board, runbooks))
            files[f"import/{name}"] = _text(importable(board, runbooks))
        except (ValueError, KeyError, TypeError) as error:
            raise ExportError(
                f"the board {name} of this installation is damaged: {error}"
            ) from error
    files["provisioning/dashboards/veloxquant.yaml"] = provider(grafana_path)
    return files


def provisioned(board: Json, runbooks: str) -> Json:
    """The board for file provisioning, its runbooks at the given address."""
    constant = {"query": runbooks, "current": {"text": runbooks, "value": runbooks}}
    return _with_variables(board, {"runbooks": constant})


def importable(board: Json, runbooks: str) -> Json:
    """The board for the import dialog: it asks for what depends on the place, and can be edited."""
    chosen = {"selected": False, "text": f"${{{_SOURCE}}}", "value": f"${{{_SOURCE}}}"}
    asked = f"${{{_RUNBOOKS}}}"
    constant = {
        "query": asked,
        "current": {"selected": False, "text": asked, "value": asked},
        "options": [{"selected": False, "text": asked, "value": asked}],
    }
    made = _with_variables(board, {"datasource": {"current": chosen}, "runbooks": constant})
    kinds = sorted({panel["type"] for panel in board["panels"]} - {"row"})
    return {
        **made,
        "editable": True,
        "__inputs": [
            {
                "name": _SOURCE,
                "label": "Prometheus",
                "description": "Where the metrics are.",
                "type": "datasource",
                "pluginId": "prometheus",
                "pluginName": "Prometheus",
            },
            {
                "name": _RUNBOOKS,
                "label": "Runbooks",
                "description": "Address that runbook links begin with.",
                "type": "constant",
                "value": runbooks,
            },
        ],
        "__requires": [
            {"type": "grafana", "id": "grafana", "name": "Grafana", "version": _GRAFANA},
            {"type": "datasource", "id": "prometheus", "name": "Prometheus", "version": "1.0.0"},
            *({"type": "panel", "id": kind, "name": kind, "version": ""} for kind in kinds),
        ],
    }


def provider(path: str) -> str:
    """Grafana's provisioning file that loads boards from a folder of its machine.

    Args:
        path: The folder, absolute, as Grafana sees it.

    Raises:
        ExportError: It is not text, so that no YAML file can name it.
    """
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise ExportError(
            f"{path!r} is not UTF-8, and cannot stand in Grafana's provisioning file: export to "
            "another folder, or say with --grafana-path where Grafana sees it"
        ) from error
    return f"""apiVersion: 1
providers:
  - name: veloxquant
    folder: {FOLDER}
    type: file
    allowUiUpdates: false
    options:
      path: {path if _is_plain(path) else json.dumps(path)}
"""


def _is_plain(path: str) -> bool:
    """Whether it is text in YAML without quotes: `true`, `1` and `-` are not."""
    return (
        path.startswith("/")
        and path.isascii()
        and path.replace("/", "a").replace("-", "a").replace(".", "a").isalnum()
    )


def _with_variables(board: Json, changes: Mapping[str, Json]) -> Json:
    """The board with some entries of its variables replaced; each must be there."""
    variables = board["templating"]["list"]
    if missing := changes.keys() - {variable["name"] for variable in variables}:
        raise KeyError(f"no variable {', '.join(sorted(missing))}")
    changed = [{**variable, **changes.get(variable["name"], {})} for variable in variables]
    return {**board, "templating": {**board["templating"], "list": changed}}


def _text(board: Json) -> str:
    """As dashboards/build.py writes it, so that what is not changed is the same byte for byte."""
    return json.dumps(board, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
