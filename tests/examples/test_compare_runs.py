from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from examples.compare_runs import compare, main, read_history

Line = tuple[int, int, list[int]]
"""Step, epoch, ids."""

WHOLE: list[Line] = [(1, 0, [5, 3]), (2, 0, [1_000_000, 4]), (3, 1, [3, 5]), (4, 1, [4, 1_000_001])]


def write_log(directory: Path, lines: list[Line]) -> Path:
    directory.mkdir()
    steps = [{"step": step, "epoch": epoch, "ids": ids, "loss": 1 / step} for step, epoch, ids in lines]
    (directory / "steps.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    return directory


def test_steps_done_again_are_those_the_kill_threw_away(tmp_path: Path) -> None:
    history = read_history(write_log(tmp_path / "run", [*WHOLE[:3], *WHOLE[1:]]))
    assert [step.step for step in history.lost] == [2, 3]
    assert [step.step for step in history.kept] == [1, 2, 3, 4]
    assert history.samples[:3] == [(0, 5), (0, 3), (0, 1_000_000)]


@pytest.mark.parametrize(
    ("interrupted", "repeated", "skipped", "same_order"),
    [
        ([*WHOLE[:3], *WHOLE[1:]], 0, 0, True),
        ([*WHOLE[:2], (3, 0, [1_000_000, 4]), WHOLE[3]], 2, 2, False),  # went on a step too early
        (WHOLE[:3], 0, 2, False),  # ended a step too early
        ([(1, 0, [3, 5]), *WHOLE[1:]], 0, 0, False),
        ([WHOLE[0], (2, 1, [1_000_000, 4]), *WHOLE[2:]], 2, 2, False),  # right ids, wrong epoch
    ],
)
def test_every_difference_counts(
    interrupted: list[Line], repeated: int, skipped: int, same_order: bool, tmp_path: Path
) -> None:
    whole = read_history(write_log(tmp_path / "whole", WHOLE))
    result = compare(read_history(write_log(tmp_path / "run", interrupted)), whole)
    assert (result.repeated, result.skipped, result.same_order) == (repeated, skipped, same_order)
    assert result.is_exact is (same_order and repeated == skipped == 0)


@pytest.mark.parametrize(("interrupted", "status", "order"), [(WHOLE, 0, "identical"), (WHOLE[::-1], 1, "DIFFERENT")])
def test_exit_status_and_report_tell_whether_it_is_exact(
    interrupted: list[Line],
    status: int,
    order: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = [str(write_log(tmp_path / "run", interrupted)), str(write_log(tmp_path / "whole", WHOLE))]
    monkeypatch.setattr(sys, "argv", ["compare_runs", *runs, "--plot", str(tmp_path / "losses.png")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == status
    assert order in capsys.readouterr().out
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
