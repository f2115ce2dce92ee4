"""The documentation site: ``pip install '.[docs]' && sphinx-build -W docs build/site``.

Sphinx, and not MkDocs: the docstrings refer to one another by ``:func:``, and it refuses references that lead nowhere.
Of the operations nothing is written here: their pages, the figures and the plots are made from the installed package,
its headers and ``benchmarks/results`` each time the site is built.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))

import drawings  # noqa: E402
import plots  # noqa: E402
import reference  # noqa: E402

import pykv  # noqa: E402
from pykv._schema import all_ops  # noqa: E402

project = "pykv"
copyright = "the pykv authors, Apache-2.0"
version = release = pykv.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["log", "results"]
nitpicky = True
nitpick_ignore_regex = [
    ("py:class", r"(np|npt|numpy)\..*|Supports.*|_.*|Salt|Lengths|Sequence|Mapping|Callable|Iterable")
]

autodoc_member_order = "bysource"
maximum_signature_line_length = 90
napoleon_numpy_docstring = False

html_theme = "furo"
html_show_sourcelink = html_copy_source = False
html_title = f"pykv {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
pygments_style, pygments_dark_style = "friendly", "github-dark"


def as_written(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, returned: str | None
) -> tuple[str, str | None] | None:
    """Signatures with the names of the source: ``Array``, not what it stands for."""
    if what not in ("function", "method", "class") or signature is None:
        return None
    own = inspect.signature(obj)
    parameters = list(own.parameters.values())[1 if what == "method" else 0 :]
    returned = f" -> {own.return_annotation}" if isinstance(own.return_annotation, str) and what != "class" else ""
    written = str(own.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
    return re.sub(r"""(: )(['"])(.*?)\2(?=[,)= ])""", r"\1\3", written), returned.removeprefix(" -> ") or None


def link_operations(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Names of operations in tables lead to their pages."""
    for entry in doctree.findall(nodes.entry):
        for literal in list(entry.findall(nodes.literal)):
            name = literal.astext()
            if name in all_ops() and not isinstance(literal.parent, nodes.reference):
                uri = app.builder.get_relative_uri(page, f"reference/{name}")
                literal.replace_self(nodes.reference("", "", literal.deepcopy(), refuri=uri, internal=True))


def setup(app: Sphinx) -> None:
    def write(_: Sphinx) -> None:
        reference.write(DOCS / "reference")
        drawings.write(DOCS / "drawn")
        plots.write(DOCS / "plots")

    app.connect("builder-inited", write)
    app.connect("autodoc-process-signature", as_written)
    app.connect("doctree-resolved", link_operations)
