"""Settings of Sphinx for `make docs`, which builds the pages that scripts/site_pages gathers."""

import quire

project = "quire"
author = copyright = "the authors of quire"
version = release = quire.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
html_theme = "furo"
html_title = f"quire {release}"
html_favicon = "icon.svg"
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}

myst_heading_anchors = 4  # links to headings, as they are written for the repository
myst_enable_extensions = ["colon_fence"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "separated"

nitpicky = False
suppress_warnings = [
    "myst.header",  # a page of a list may begin below the first level
    "misc.highlighting_failure",  # examples of broken input
]
