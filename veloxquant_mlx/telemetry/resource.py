"""Resource: OpenTelemetry's attributes of this process, for whoever exports it from elsewhere."""

from __future__ import annotations

import os
import socket
from urllib.parse import unquote

__all__ = ["resource_attributes"]


def resource_attributes() -> dict[str, str]:
    """From the variables that OpenTelemetry defines, with the host and the pid."""
    resource = {"host.name": socket.gethostname(), "process.pid": str(os.getpid())}
    for pair in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "").split(","):
        key, equals, value = pair.partition("=")
        if equals and key.strip():
            resource[key.strip()] = unquote(value.strip())
    name = os.environ.get("OTEL_SERVICE_NAME")
    if name:
        resource["service.name"] = name
    return resource
