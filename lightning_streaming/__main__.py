"""``lightning-streaming``: the data tools by name, and Lightning's command line for everything else.

A tool starts without importing lightning, which takes seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module

try:
    from lightning_streaming.terminal import open_closed_streams, write_error
    from lightning_streaming.tools.commands import COMMANDS, GROUPS, run_command
    from lightning_streaming.tools.console import BAD, FINE, INTERRUPTED, PROGRAM, UNUSABLE, print_error
    from lightning_streaming.trainer import DESCRIPTION, SUBCOMMANDS
except KeyboardInterrupt:  # Ctrl-C before there is a main() to catch it
    sys.exit(130)

_BEGIN = f"""\
usage: {PROGRAM} {{{",".join(SUBCOMMANDS)}}} [--config FILE] [--FIELD VALUE ...]
       {PROGRAM} TOOL [ARGUMENT ...]
       {PROGRAM} --version

From files to a trained model that resumes after any stop:

    {PROGRAM} convert reviews.jsonl data/reviews
    {PROGRAM} inspect data/reviews
    {PROGRAM} init data/reviews
    {PROGRAM} fit --config run.yaml
    {PROGRAM} fit --config run.yaml --ckpt_path last
"""
_TRAINER = "lightning_streaming.trainer.cli"


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        args: Arguments after the program's name. None: those of this process.

    Returns:
        The exit code of the process.

    Raises:
        SystemExit: The arguments cannot be parsed, or request help; or the process was signalled to end.
    """
    try:
        open_closed_streams()
        return _run(args)
    except KeyboardInterrupt:  # also while something is imported
        return INTERRUPTED


def _run(args: Sequence[str] | None) -> int:
    given = list(sys.argv[1:] if args is None else args)
    if not given:
        write_error(f"{_BEGIN}\nAll commands: {PROGRAM} --help\nOne of them:  {PROGRAM} COMMAND --help\n")
        return UNUSABLE
    if given[0] in ("-h", "--help"):
        sys.stdout.write(help_text())
        return FINE
    if given[0] in ("-V", "--version"):
        from importlib.metadata import version  # slow, and needed for nothing else

        sys.stdout.write(f"{PROGRAM} {version(PROGRAM)}\n")
        return FINE
    if given[0] in COMMANDS:
        return run_command(given[0], given[1:])
    if given[0] not in SUBCOMMANDS and not given[0].startswith("-"):
        known = [*SUBCOMMANDS, *COMMANDS]
        close = "".join(f"did you mean {one}? " for one in get_close_matches(given[0], known, 1))
        print_error(PROGRAM, f"{given[0]!r} is not a command; {close}The commands are {', '.join(known)}")
        return UNUSABLE
    # Not ``given``: Lightning warns of other arguments than those of the process, and shows them with secrets.
    failure = import_module(_TRAINER).main(args)
    if failure is None:
        return FINE
    print_error(" ".join([PROGRAM, *(arg for arg in given[:1] if arg in SUBCOMMANDS)]), failure.message)
    return BAD if failure.is_of_data else UNUSABLE


def help_text() -> str:
    """Return the text of ``--help``: the tools in groups, and how to train."""
    return (
        f"{_BEGIN}\nCommands; `{PROGRAM} COMMAND --help` explains each:\n\n"
        f"{''.join(f'{_group(title, names)}' for title, names in GROUPS.items())}{DESCRIPTION}"
    )


def _group(title: str, names: Sequence[str]) -> str:
    words = {**COMMANDS, **SUBCOMMANDS}
    return f"  {title}\n" + "".join(f"    {name:<12}{words[name]}\n" for name in names) + "\n"


if __name__ == "__main__":
    sys.exit(main())
