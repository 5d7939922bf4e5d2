"""Tables for people, drawn by rich."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def print_table(
    title: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    head: bool = True,
    right: Sequence[str] = (),
) -> None:
    """Print a table to standard output. Texts are shown as they are, in several lines where they are long.

    Args:
        title: What it is of.
        heads: Name of each column.
        rows: Texts, one for each column.
        head: Whether to show the names.
        right: Columns that are aligned to the right.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    frame = box.SIMPLE_HEAD if head else None
    table = Table(box=frame, show_header=head)
    for one in heads:
        table.add_column(Text(one), justify="right" if one in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # not as markup: [red] in a sample is no colour
    console = Console(highlight=False)
    with console.capture() as drawn:
        console.print(Text(title, style="bold"), soft_wrap=True)  # a path is not cut
        console.print(table)
    print("\n".join(line.rstrip() for line in drawn.get().rstrip().splitlines()) + "\n")
