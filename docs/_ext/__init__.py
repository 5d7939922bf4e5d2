"""What the documentation site is made with, beside Sphinx: each file is an extension that ``docs/conf.py`` names.

navigation          the sidebar from the lists of links on pages; links to files that are no pages
python_reference    public names and tables of options, from docstrings and signatures
command_reference   the tools, from their parsers
"""
