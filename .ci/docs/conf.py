"""Sphinx's settings for the guides, the reference and the specification, which build.py builds."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
# Quotation marks in docstrings belong to code.
smartquotes = False

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
include_patterns = [
    "index.md",
    "CHANGELOG.md",
    "reference/*.rst",
    "kvpack/guides/*.md",
    "spec/*.md",
    "spec/codecs/*.md",
    "spec/readers/*.md",
    "kernels/README.md",
    "kernels/results.md",
    "kernels/cpu/README.md",
    "kvpack/integrations/*/README.md",
]
# Create anchors for headings, so that links such as container.md#json-header are checked.
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True}


ACCESSIBLE = {
    '<p class="caption" role="heading">': '<p class="caption" role="heading" aria-level="2">',
    "<pre>": '<pre tabindex="0">',
    '<div class="table-wrapper': '<div tabindex="0" class="table-wrapper',
}
"""Replacements in Sphinx's HTML for accessibility: levels of headings, and code and tables that can be scrolled with the keyboard."""


def make_accessible(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Apply ``ACCESSIBLE`` to the HTML of a page and of its navigation."""
    for part in ("body", "furo_navigation_tree"):
        for written, complete in ACCESSIBLE.items():
            context[part] = context.get(part, "").replace(written, complete)


def link_folders(app: Sphinx, page: str, source: list[str]) -> None:
    """Replace links to folders of the repository, which have no pages here, by their URLs."""

    def url(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link[1]))
        return f"](https://github.com/kvpack/kvpack/tree/main/{path})" if Path(app.srcdir, path).is_dir() else link[0]

    source[0] = re.sub(r"\]\(([\w./-]+)\)", url, source[0])


def setup(app: Sphinx) -> None:
    """Register ``example``, the language of code blocks that tests parse, and the functions above. Pages are made accessible after the
    theme has rendered them.
    """
    app.add_lexer("example", TextLexer)
    app.connect("source-read", link_folders)
    app.connect("html-page-context", make_accessible, priority=900)
