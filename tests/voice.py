"""Count the words of ``voice_words.txt`` in each file: a count may fall, but not rise.

    python -m tests.voice            check that no file has more of them than voice_counts.txt allows (make check)
    python -m tests.voice --write    lower the counts that fell (make format); this also resolves a merge conflict
    python -m tests.voice --moved    accept text that moved between files, if the sum does not rise
    python -m tests.voice PATH ...   list the words of these files, with the words to use instead

All text of a Markdown file counts; of a Python file its comments, its strings and the names that it defines.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
WORDS = Path(__file__).with_name("voice_words.txt")
COUNTS = Path(__file__).with_name("voice_counts.txt")
_COUNT = re.compile(r"^ *(\d+) (\S.*)$", re.MULTILINE)
_SPACES = re.compile(r"\s+")


class Word(NamedTuple):
    """A word of the list, where it is used."""

    line: int
    text: str
    instead: str


class WordList:
    """The words to avoid in text and in names, with their replacements."""

    def __init__(self, text: str) -> None:
        of_text, _, of_names = text.partition("\n[names]\n")
        self._in_text, self._in_names = _replacements(of_text), _replacements(of_names)
        # The longest phrase first, so that a word within it is not counted instead.
        phrases = sorted(self._in_text, key=len, reverse=True)
        self._pattern = re.compile(
            rf"\b(?:{'|'.join(map(re.escape, phrases))})\b".replace(r"\ ", r"\s+"), re.IGNORECASE
        )

    def words_in(self, text: str, suffix: str) -> Iterator[Word]:
        """Yield the words of a file in the order of its lines, Markdown or Python by its suffix."""
        if suffix != ".py":
            return self._words_in_text(text, 1)
        tree = ast.parse(text)
        return iter(
            sorted([*self._words_in_comments(text), *self._words_in_strings(tree), *self._words_in_names(tree)])
        )

    def _words_in_text(self, text: str, line: int) -> Iterator[Word]:
        for match in self._pattern.finditer(text):
            word = _SPACES.sub(" ", match[0])
            yield Word(line + text.count("\n", 0, match.start()), word, self._in_text[word.lower()])

    def _words_in_comments(self, text: str) -> Iterator[Word]:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield from self._words_in_text(token.string, token.start[0])

    def _words_in_strings(self, tree: ast.AST) -> Iterator[Word]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from self._words_in_text(node.value, node.lineno)

    def _words_in_names(self, tree: ast.AST) -> Iterator[Word]:
        for node in ast.walk(tree):
            name = _defined_name(node)
            for part in [f"={name}", *re.findall(r"[A-Z]?[a-z]+", name)]:
                if part.lower() in self._in_names:
                    yield Word(getattr(node, "lineno", 1), name, self._in_names[part.lower()])


def _replacements(text: str) -> dict[str, str]:
    lines = [line.split(" | ") for line in text.splitlines() if line and not line.startswith("#")]
    return {word: instead for words, instead in lines for word in words.split(", ")}


def _defined_name(node: ast.AST) -> str:
    """Return the name that a function, class, argument or assignment introduces, else an empty one."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return node.name
    if isinstance(node, ast.arg):
        return node.arg
    return node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else ""


def files_of(root: Path) -> list[Path]:
    """List the Markdown and Python files of a clone, with new ones that are not committed."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md", "*.py"]
    names = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=True).stdout
    return sorted(path for name in {*names.split("\0")} - {""} if (path := root / name).exists())


def frozen(text: str) -> dict[str, int]:
    """Read the counts that are allowed. Of the two sides of a merge the higher one holds, until it is rewritten."""
    counts: dict[str, int] = {}
    for count, name in _COUNT.findall(text):
        counts[name] = max(int(count), counts.get(name, 0))
    return counts


def written(counts: dict[str, int]) -> str:
    """Return the text of ``voice_counts.txt``; a file without such words has no line."""
    return "".join(f"{count:4} {name}\n" for name, count in sorted(counts.items()) if count)


def rises(counts: dict[str, int], allowed: dict[str, int]) -> dict[str, int]:
    """Return the counts that are above the allowed ones; for a new file 0 is allowed."""
    return {name: count for name, count in counts.items() if count > allowed.get(name, 0)}


def lowered(counts: dict[str, int], allowed: dict[str, int]) -> dict[str, int]:
    """Return the allowed counts, less those that fell."""
    return {name: min(count, allowed.get(name, 0)) for name, count in counts.items()}


def main(arguments: list[str]) -> int:
    """Check, write or list; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.voice", description="Count the words to avoid.")
    parser.add_argument("--write", action="store_true", help="lower the counts that fell")
    parser.add_argument("--moved", action="store_true", help="rewrite all counts, if their sum does not rise")
    parser.add_argument("paths", metavar="PATH", nargs="*", type=Path, help="list the words of these files")
    args = parser.parse_args(arguments)
    word_list = WordList(WORDS.read_text(encoding="utf-8"))
    paths = [path.resolve() for path in args.paths] or files_of(ROOT)
    words = {
        path.relative_to(ROOT).as_posix(): [*word_list.words_in(path.read_text(encoding="utf-8"), path.suffix)]
        for path in paths
    }
    if args.paths:
        uses = [f"{name}:{word.line}: {word.text!r}: {word.instead}\n" for name in words for word in words[name]]
        sys.stdout.writelines(uses)
        return 0
    counts = {name: len(uses) for name, uses in words.items()}
    allowed = frozen(COUNTS.read_text(encoding="utf-8") if COUNTS.exists() else "")
    if args.moved and sum(counts.values()) <= sum(allowed.values()):
        allowed = counts
    if args.write or args.moved:
        COUNTS.write_text(written(lowered(counts, allowed)), encoding="utf-8")
    above = rises(counts, allowed)
    if not above:
        return 0
    for name, count in above.items():
        sys.stdout.write(f"{name}: {count} words of voice_words.txt, but at most {allowed.get(name, 0)} are allowed\n")
    sys.stdout.write(f"List them with their replacements: python -m tests.voice {' '.join(above)}\n")
    sys.stdout.write("If text only moved between files: python -m tests.voice --moved\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
