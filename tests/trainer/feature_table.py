"""The table of training features in docs/lightning.md, from the tests that ran.

``python -m tests.trainer.feature_table`` runs every case of test_training_features.py, which takes about four minutes,
and writes how many of each cell passed.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "lightning.md"
TESTS = Path(__file__).with_name("test_training_features.py")
START, END = "<!-- table: start -->\n", "<!-- table: end -->\n"


class Outcomes:
    """A plugin of pytest that counts passed cases by feature and position."""

    def __init__(self) -> None:
        self.passed = Counter[tuple[str, str]]()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Function) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Count a case whose call passed."""
        report = yield
        params = getattr(getattr(item, "callspec", None), "params", {})
        if "feature" in params and report.when == "call" and report.passed:
            self.passed[params["feature"], params["position"]] += 1
        return report


def table(passed: Counter[tuple[str, str]]) -> str:
    """Return the table in Markdown: features by positions, each cell how many changes of the world passed."""
    # After the tests: pytest rewrites the assertions of what it imports first.
    from tests.trainer.test_training_features import FEATURES, POSITIONS, WORLDS

    lines = ["| feature | " + " | ".join(POSITIONS) + " |", "|---|" + "--:|" * len(POSITIONS)]
    for feature in FEATURES:
        cells = [f"{passed[feature, position]}/{len(WORLDS)}" for position in POSITIONS]
        lines.append(f"| {feature} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the tests and write the table; return the exit status of pytest."""
    outcomes = Outcomes()
    status = pytest.main(["-q", "--all", str(TESTS)], plugins=[outcomes])
    text = PAGE.read_text()
    before, rest = text.split(START)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{START}\n{table(outcomes.passed)}\n{END}{after}")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
