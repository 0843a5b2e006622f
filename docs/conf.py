"""The guide as a site: `make docs` builds it from the pages in this folder."""

from __future__ import annotations

import importlib.metadata

project = "shardwise"
author = "the shardwise authors"
version = release = importlib.metadata.version("shardwise")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
html_theme = "furo"
html_title = "shardwise"
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
# Signatures as they are written; types stand in them.
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True
suppress_warnings = [
    "myst.xref_missing",  # folders of the repository, which the site does not hold
    "ref.python",  # names of torch, which has its own site
]
