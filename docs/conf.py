"""How Sphinx builds the site: `make docs`.

The source is the checkout, not this folder: README, ARCHITECTURE and the rest stand where a code host
shows them, and a link that works there works here. Pages are plain Markdown; `sphinx_site.py` beside
this file holds the two things that Sphinx does not do by itself.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
# This checkout's code is what is documented, whatever the environment has installed.
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "exporters")]

project = "veloxquant-mlx-monitor"
author = "the veloxquant-mlx-monitor authors"
copyright = author  # noqa: A001 - Sphinx's name for it
release = tomllib.loads((HERE.parent / "pyproject.toml").read_text("utf-8"))["project"]["version"]
version = release

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_site"]
root_doc = "docs/index"
# Whatever is named here and stands in no table of contents fails the build.
include_patterns = ["docs/**.md", "deploy/README.md", "*.md"]
exclude_patterns = ["README.md", ".*", "build", "**/node_modules"]
nitpicky = False  # types of other libraries have no page here
# Pygments' PromQL does not know the colons in the names of recorded series.
suppress_warnings = ["misc.highlighting_failure"]

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
# Docstrings set names in single quotes of code, as Markdown does.
default_role = "literal"
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = "VeloxQuant-MLX Monitor"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_extra_path = ["_root"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
