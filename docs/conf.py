"""How Sphinx builds the documentation: ``make docs``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

project = "meshwright"
version = release = re.findall(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)[0]
copyright = "the meshwright authors"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
html_theme = "furo"
html_title = f"meshwright {version}"
html_static_path: list[str] = []
nitpicky = False
suppress_warnings: list[str] = []

autodoc_typehints = "signature"
autodoc_member_order = "alphabetical"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
