"""What the site needs beyond Sphinx: pictures for light and dark, links into the checkout, properties.

On a code host a picture is a `<picture>` with a dark and a light source, and a link to a file or a folder
of the checkout opens it there. On the site a picture follows the theme's own switch, and such links become
the plain path. A link to what does not exist stays, for MyST to complain about.

A property's docstring is read as a sentence. Napoleon takes what stands before a colon for its type.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sphinx.ext.napoleon import GoogleDocstring

if TYPE_CHECKING:
    from sphinx.application import Sphinx

__all__ = ["setup"]

_PICTURE = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="(?P<dark>[^"]+)">\s*'
    r'<img alt="(?P<alt>[^"]+)" src="(?P<light>[^"]+)"[^>]*>\s*</picture>'
)
_LINK = re.compile(r"(?<!!)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<path>[^)#:\s]+)\)")


def _two_images(match: re.Match[str]) -> str:
    """The two images of a picture, of which the theme shows one."""
    image = "```{{image}} {path}\n:alt: {alt}\n:class: only-{mode}\n```\n"
    return "".join(
        image.format(path=match[mode], alt=match["alt"], mode=mode) for mode in ("light", "dark")
    )


def _without_links(text: str, folder: Path, pages: set[Path]) -> str:
    """`text` with links to what exists and is no page turned into code."""

    def plain(match: re.Match[str]) -> str:
        target = (folder / match["path"]).resolve()
        if not target.exists() or target in pages or target.suffix in (".png", ".svg"):
            return match[0]
        label: str = match["text"]
        return label if "`" in label else f"`{label}`"

    return _LINK.sub(plain, text)


def _prepare(app: Sphinx, docname: str, source: list[str]) -> None:
    folder = Path(app.env.doc2path(docname)).parent
    pages = {Path(app.env.doc2path(name)).resolve() for name in app.env.found_docs}
    source[0] = _without_links(_PICTURE.sub(_two_images, source[0]), folder, pages)


def _read_property(
    app: Sphinx, _what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    if isinstance(obj, property):
        text = inspect.getdoc(obj) or ""
        lines[:] = str(GoogleDocstring(text, app.config, app, "method", name, obj, options)).split(
            "\n"
        )


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("source-read", _prepare)
    app.connect("autodoc-process-docstring", _read_property, priority=600)  # after Napoleon's 500
    return {"version": "1", "parallel_read_safe": True}
