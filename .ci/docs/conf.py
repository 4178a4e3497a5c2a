"""The settings of Sphinx for the guides, the reference and the specification (build.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pygments.lexers.special import TextLexer

import kvpack

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "kvpack"
release = kvpack.__version__
html_title = f"kvpack {release}"
html_theme = "furo"
html_copy_source = False
html_show_copyright = False
# Quotation marks in docstrings are those of code.
smartquotes = False

extensions = ["myst_parser", "sphinx.ext.autodoc"]
include_patterns = [
    "index.md",
    "reference/*.rst",
    "kvpack/guides/*.md",
    "spec/*.md",
    "spec/codecs/*.md",
    "kernels/README.md",
    "kernels/cpu/README.md",
    "kvpack/integrations/*/README.md",
]
# Links such as container.md#json-header are to headings, and are checked.
myst_heading_anchors = 4
# Links to folders of the repository lead nowhere here.
nitpick_ignore = [("myst", "codecs"), ("myst", "vectors"), ("myst", "row-vectors")]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True}


def setup(app: Sphinx) -> None:
    """Blocks of the specification that tests parse have a language of their own."""
    app.add_lexer("example", TextLexer)
