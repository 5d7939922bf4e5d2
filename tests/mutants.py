"""Apply single mistakes to a copy of the package, and report which of them the tests notice.

``make mutants``, or ``python -m tests.mutants [NAME...]`` for those whose names begin so. Each mistake in mutants.json
is a text of one file and its replacement, with the test files that are likely to fail. Only tests of ``make test`` run.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
_SECONDS = 900


class Mutant(NamedTuple):
    """A mistake."""

    name: str
    file: str
    old: str
    new: str
    tests: list[str]

    def apply(self, root: Path) -> None:
        """Write the mistake into a copy of the project.

        Raises:
            ValueError: The text is not in the file once.
        """
        text = (root / self.file).read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.file} has the text {text.count(self.old)} times: {self.old}")
        (root / self.file).write_text(text.replace(self.old, self.new), encoding="utf-8")


def mutants(names: Sequence[str] = ()) -> Iterator[Mutant]:
    """Yield the mistakes whose names begin like one of ``names``; all without names."""
    for entry in json.loads((ROOT / "tests" / "mutants.json").read_text(encoding="utf-8")):
        mutant = Mutant(**entry)
        if not names or mutant.name.startswith(tuple(names)):
            yield mutant


def failing_test(root: Path, tests: Sequence[str]) -> str | None:
    """Return the first test that fails in a copy of the project; None if all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "2", "--dist", "worksteal", "-p", "no:cacheprovider"]
    env = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [*command, *tests], cwd=root, env=env, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no end after {_SECONDS} s"
    if done.returncode == 0:
        return None
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0] if failed else done.stdout[-500:]


def main(names: Sequence[str]) -> int:
    """Try the mistakes, and print how each one ended."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    chosen, survivors = list(mutants(names)), 0
    with TemporaryDirectory(prefix="mutants-") as directory:
        root = Path(directory)
        for name in filter(None, tracked.split("\0")):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, root / name)
        if failed := failing_test(root, sorted({test for mutant in chosen for test in mutant.tests})):
            _say(f"without a mistake: {failed}")
            return 2
        for mutant in chosen:
            mutant.apply(root)
            failed = failing_test(root, mutant.tests)
            shutil.copy2(ROOT / mutant.file, root / mutant.file)
            survivors += failed is None
            _say(f"{mutant.name}: {failed or 'SURVIVED'}")
    _say(f"{len(chosen) - survivors} of {len(chosen)} were noticed")
    return 1 if survivors else 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
