"""Extensions of Sphinx for the documentation site, listed in ``docs/conf.py``.

navigation          the sidebar from the lists of links on pages; links to files that are no pages
python_reference    public names and tables of options, from docstrings and signatures
command_reference   the commands, from their parsers
tabs                blocks of code as tabs
"""
