"""OpenTelemetry: the catalogue as instruments, its histograms over OTLP, traces, and zero-code use.

Importing this package imports no OpenTelemetry; using a name of it does. The extra `otel` brings
what it needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from veloxquant_exporters.opentelemetry.buckets import BucketExporter
    from veloxquant_exporters.opentelemetry.instrumentor import BlockPoolInstrumentor
    from veloxquant_exporters.opentelemetry.meter import Instrumentation, instrument_meter
    from veloxquant_exporters.opentelemetry.pipeline import OtlpPipeline
    from veloxquant_exporters.opentelemetry.resource import make_resource, service_instance_id
    from veloxquant_exporters.opentelemetry.spans import SpanEvents

__all__ = [
    "BlockPoolInstrumentor",
    "BucketExporter",
    "Instrumentation",
    "OtlpPipeline",
    "SpanEvents",
    "instrument_meter",
    "make_resource",
    "service_instance_id",
]

_HOME = {
    "BlockPoolInstrumentor": "instrumentor",
    "BucketExporter": "buckets",
    "Instrumentation": "meter",
    "OtlpPipeline": "pipeline",
    "SpanEvents": "spans",
    "instrument_meter": "meter",
    "make_resource": "resource",
    "service_instance_id": "resource",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    try:
        module = importlib.import_module(f"{__name__}.{_HOME[name]}")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        raise ModuleNotFoundError(
            f"{name} needs {error.name}; install the extra: "
            "pip install 'veloxquant-mlx-monitor[otel]'",
            name=error.name,
        ) from error
    return getattr(module, name)
