"""How Sphinx makes the documentation site of these Markdown files: ``make docs``."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

project = "lightning_streaming"
author = "lightning_streaming maintainers"
_PACKAGE = (ROOT / "lightning_streaming" / "__init__.py").read_text()
version = release = re.findall(r'^__version__ = "(.+)"$', _PACKAGE, re.MULTILINE)[0]
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "docs._ext.navigation",
    "docs._ext.python_reference",
    "docs._ext.command_reference",
    "docs._ext.tabs",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
smartquotes = False  # which would make one dash of the two before an option

myst_heading_anchors = 4
myst_enable_extensions = ["html_image"]  # images of a width, which Markdown has no words for

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
python_maximum_signature_line_length = 100
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"
napoleon_numpy_docstring = False

nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(?!lightning_streaming).*"),  # names of other packages, whose documentation this build does not ask for
    # Types of arguments that are no public names.
    ("py:class", r".*\.(DatasetIndex|DatasetStreams|EncodingClass|Input|Mesh|Pass|Replacement|Shard(Info|Settings))"),
]

html_theme = "furo"
html_baseurl = "https://lightning-streaming.github.io/lightning-streaming/"
html_title = f"lightning_streaming {release}"
html_static_path = ["_static"]
html_favicon = "_static/favicon.svg"
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {
    "source_repository": "https://github.com/lightning-streaming/lightning-streaming/",
    "source_branch": "main",
    "source_directory": "docs/",
}
