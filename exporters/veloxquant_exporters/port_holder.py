"""port_holder: who listens on a port of this machine, for a message to a person."""

from __future__ import annotations

import os

__all__ = ["port_holder"]


def port_holder(port: int) -> str:
    """As in " by process 12 (python)", as far as the system and psutil, if it is there, tell."""
    try:
        import psutil

        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr[1:2] == (port,):
                if connection.pid == os.getpid():
                    return " by this process itself"
                if connection.pid:
                    return f" by process {connection.pid} ({psutil.Process(connection.pid).name()})"
    except Exception:  # noqa: BLE001 - a courtesy: most systems tell only root
        return ""
    return ""
