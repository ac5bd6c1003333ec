"""fetch: what is shown of an address never holds its password."""

from __future__ import annotations

import pytest

from veloxquant_exporters.fetch import FetchError, fetch, without_password

# Addresses with a password, good and bad, and what may be shown of them.
ADDRESSES = {
    "http://user:s3cret@127.0.0.1:9/metrics": "http://127.0.0.1:9/metrics",
    "HTTPS://user:s3cret@host/a@b": "https://host/a@b",
    "ftp://user:s3cret@host/metrics": "ftp://host/metrics",
    "http://user:s3cret@/x": "http:///x",
    "http://user:s3cret@host:99999/m": "http://host:99999/m",
    "http://user:s3cret@host/a b": "http://host/a b",
    "http://us[er:s3cret@host/": "http://host/",
    "http://user:x/s3cret@host/": "http://host/",
    "http://user:x#?s3cret@x@host/": "http://host/",
}


@pytest.mark.parametrize(("address", "shown"), ADDRESSES.items())
def test_what_is_shown_has_no_password(address: str, shown: str) -> None:
    """Whatever is wrong with the address; and nothing else is taken from it."""
    assert without_password(address) == shown


@pytest.mark.parametrize("address", ADDRESSES)
def test_a_fault_names_no_password(address: str) -> None:
    """Neither the address nor the part of it that the fault quotes."""
    with pytest.raises(FetchError) as caught:
        fetch(address, timeout_s=0.01)
    assert "s3cret" not in str(caught.value)
    assert "user" not in caught.value.what


@pytest.mark.parametrize("text", ["", "-", "/run/a@b", "http://host/a", "a folder"])
def test_what_has_none_is_shown_as_it_is(text: str) -> None:
    """Paths, too."""
    assert without_password(text) == text
