"""access_options: what a command takes that reads a metrics page which does not let everybody in."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from veloxquant_exporters.cli.completing import files

if TYPE_CHECKING:
    from veloxquant_exporters.access import Access

__all__ = ["access_of", "access_options"]


def access_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options; `access_of` makes of their values what `fetch` needs."""
    for decorate in reversed(
        (
            click.option(
                "--tls-ca",
                "ca_file",
                metavar="FILE",
                shell_complete=files,
                help="Trust the authorities in this file, PEM, instead of the system's.",
            ),
            click.option(
                "--tls-cert",
                "cert_file",
                metavar="FILE",
                shell_complete=files,
                help="Show this certificate, PEM.",
            ),
            click.option(
                "--tls-key",
                "key_file",
                metavar="FILE",
                shell_complete=files,
                help="Its key, PEM, without a passphrase.",
            ),
            click.option(
                "--token-file",
                metavar="FILE",
                shell_complete=files,
                help="Send the bearer token in this file. A name and password go into the URL.",
            ),
        )
    ):
        function = decorate(function)
    return function


def access_of(
    ca_file: str | None, cert_file: str | None, key_file: str | None, token_file: str | None
) -> Access:
    """How to get in, from the values of the options.

    Raises:
        click.UsageError: There is a key without a certificate.
    """
    from veloxquant_exporters.access import Access

    if key_file and not cert_file:
        raise click.UsageError("--tls-key needs --tls-cert")
    return Access(ca_file, cert_file, key_file, token_file)
