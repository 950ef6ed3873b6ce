"""Sphinx: the documentation of Fewstep. Nothing is downloaded; the references are generated."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parent))

project = "Fewstep"
author = "The Fewstep authors"
copyright = "The Fewstep authors"
version = release = "0.1.0"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "_generated"]
html_theme = "furo"
html_title = "Fewstep"
html_show_sphinx = False
html_copy_source = False
smartquotes = False

myst_enable_extensions = ["deflist", "colon_fence"]
myst_heading_anchors = 3

# Docstrings put code in single backticks; `escape_docstring` makes them reStructuredText.
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_class_signature = "mixed"
napoleon_use_ivar = True

# References to our own names must resolve. Those to other projects cannot, without a network.
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!fewstep\.).*")]


def escape_docstring(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Make a docstring that was written as plain text with backticks safe as reStructuredText."""
    if what == "property":
        # Napoleon would take the words before a colon for a type.
        lines[:] = [line.replace(": ", ", ") for line in lines]
    escaped, table = [], False
    for line in lines:
        if line.lstrip().startswith("|"):
            if not table:
                escaped += ["::", ""]
            escaped.append(f"    {line}")
            table = True
            continue
        if table:
            escaped.append("")
        table = False
        parts = line.split("`")
        if len(parts) % 2 == 0:
            parts = [line]
        for index, part in enumerate(parts):
            # Stars, bars and trailing underscores are markup in reStructuredText.
            parts[index] = f"``{part}``" if index % 2 else re.sub(r"(\*|\||_(?!\w))", r"\\\1", part)
        escaped.append("".join(parts))
    lines[:] = escaped


def generate(app: Sphinx) -> None:
    """Write the references before anything is read."""
    from generate import write_references

    write_references(HERE / "_generated", HERE.parent)


def setup(app: Sphinx) -> None:
    """Sphinx's hook."""
    app.connect("builder-inited", generate)
    app.connect("autodoc-process-docstring", escape_docstring, priority=400)
