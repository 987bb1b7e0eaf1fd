"""Sphinx configuration: `make docs`."""

from importlib.metadata import version as installed

project = "privfed"
author = "The privfed developers"
version = release = installed("privfed")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "privfed"
autodoc_typehints = "description"
napoleon_google_docstring = True
nitpicky = False
