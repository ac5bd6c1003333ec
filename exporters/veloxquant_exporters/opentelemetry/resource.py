"""Resource: who speaks. One `service.instance.id` a process, stable for its life, new in a fork."""

from __future__ import annotations

import os
import uuid
from typing import Final

from opentelemetry.sdk.resources import OTELResourceDetector, Resource

__all__ = ["make_resource", "service_instance_id"]

INSTANCE: Final = "service.instance.id"
DEFAULT_SERVICE: Final = "veloxquant"

_ids: dict[int, str] = {}


def service_instance_id() -> str:
    """A random id of this process; the same at each call, another one in a forked child."""
    return _ids.setdefault(os.getpid(), str(uuid.uuid4()))


def make_resource(service_instance_id: str | None = None) -> Resource:
    """What the environment says (`OTEL_RESOURCE_ATTRIBUTES`, `OTEL_SERVICE_NAME`), and who we are.

    Args:
        service_instance_id: Takes precedence over the environment; None takes the environment's,
            else the id of the process.
    """
    found = Resource.create({})
    # Newer SDKs make up an id as well, which only `Resource.create` could tell from a chosen one.
    chosen = OTELResourceDetector().detect().attributes.get(INSTANCE)
    own = {INSTANCE: service_instance_id or str(chosen or _own_id())}
    if str(found.attributes.get("service.name", "unknown_service")).startswith("unknown_service"):
        own["service.name"] = DEFAULT_SERVICE
    return found.merge(Resource(own))


def _own_id() -> str:
    return service_instance_id()
