"""Closing a loader whose workers are in the middle of something."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ids, make_loader, write_dataset
from tests.loading.processes import children, wait_until

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
]

TORCHS_PATIENCE = 10
"""Seconds that torch takes for two workers that do not end by themselves."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "a")


def _stand_still() -> None:
    threading.Event().wait()


def _hold_the_interpreter() -> None:
    ctypes.PyDLL(None).sleep(100)


def _after_two_batches(sample: dict[str, Any], do: Callable[[], None], going: Path) -> dict[str, Any]:
    if sample["id"] >= 8:
        assert wait_until((going / "go").exists)  # or the first batch might never be sent
        (going / str(sample["id"])).touch()
        do()
    return sample


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("do", [_stand_still, _hold_the_interpreter])
def test_workers_in_the_middle_of_a_sample_are_ended_soon(
    root: Path, tmp_path: Path, do: Callable[[], None], persistent: bool
) -> None:
    before = children()
    transform = partial(_after_two_batches, do=do, going=tmp_path)
    options = {"persistent_workers": persistent}
    loader = make_loader(root, workers=2, shuffle=False, transform=transform, loader=options)
    batches = iter(loader)
    assert ids([next(batches), next(batches)]) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    workers = children() - before
    assert len(workers) == 2
    (tmp_path / "go").touch()
    assert wait_until(lambda: {path.name for path in tmp_path.iterdir()} == {"go", "8", "12"})
    closing = threading.Thread(target=loader.close)
    closing.start()
    assert wait_until(lambda: not workers & children(), seconds=0.8 * TORCHS_PATIENCE)
    closing.join()
    assert next(batches, None) is None


def test_a_loader_can_be_closed_again_and_used_again(root: Path) -> None:
    loader = make_loader(root, workers=2, loader={"persistent_workers": True})
    for _ in range(2):
        assert len(ids([next(iter(loader))])) == 1
        loader.close()
        loader.close()
    assert len(ids(loader)) == 8
    loader.close()
