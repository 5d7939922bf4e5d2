"""Steps of the user between the shuffle and the batches."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from examples.every_nth import EveryNth
from lightning_streaming.errors import ConfigError, SampleIndexError
from lightning_streaming.sequence import PartContext, SampleSequence, SequenceStep
from lightning_streaming.sequence.batching import BATCHING_CLASSES, batched
from lightning_streaming.sequence.draw import Shuffled
from lightning_streaming.sequence.steps import Stepped, check_steps, with_steps
from tests.helpers import assert_error
from tests.sequence.builders import geometry_of, make_settings, make_shape


class Returns(SampleSequence):
    """A sequence whose ids are computed by a function."""

    def __init__(self, length: int, value: Any) -> None:
        self._length, self._value = length, value

    def __len__(self) -> int:
        return self._length

    def ids(self, entries: NDArray[np.int64]) -> NDArray[np.int64]:
        value: NDArray[np.int64] = self._value(entries)
        return value


@dataclass(frozen=True)
class Reversed(SequenceStep):
    """The same samples from the last to the first."""

    def over(self, parent: SampleSequence, context: PartContext) -> SampleSequence:
        return Returns(len(parent), lambda entries: parent.ids(len(parent) - 1 - entries))


class NoSequence(SequenceStep):
    """A step that is written wrongly."""

    def over(self, parent: SampleSequence, context: PartContext) -> Any:
        return [len(parent), context.epoch]


def ids_of(sequence: SampleSequence) -> list[int]:
    ids: list[int] = sequence.ids(np.arange(len(sequence))).tolist()
    return ids


@given(
    method=st.sampled_from(sorted(BATCHING_CLASSES)),
    sizes=st.lists(st.lists(st.integers(20, 60), min_size=1, max_size=3), min_size=1, max_size=3),
    n=st.integers(1, 4),
    epoch=st.integers(0, 5),
    algo=st.sampled_from(["py1e", "py1s", "naive", "blockwise"]),
    canonical=st.integers(1, 4),
)
def test_a_step_is_applied_to_the_shuffled_order(
    method: str, sizes: list[list[int]], n: int, epoch: int, algo: str, canonical: int
) -> None:
    settings = make_settings(batching_method=method, shuffle_algo=algo, num_canonical_nodes=canonical)
    drawn = Shuffled(settings, make_shape(*sizes), epoch)
    stepped = with_steps(drawn, [EveryNth(n)])
    whole, expected, start = ids_of(drawn), list[int](), 0
    for length in drawn.choose if method != "random" else [len(drawn)]:
        kept = whole[start : start + length][::n][: length // n]
        expected += kept if n == 1 else kept[: len(kept) - len(kept) % canonical]
        start += length
    assert ids_of(stepped) == expected
    assert sum(stepped.choose) == len(stepped)
    shaped = np.asarray([[0, len(stepped) - 1], [1, 0]])
    assert stepped.ids(shaped).tolist() == [[expected[0], expected[-1]], [expected[1], expected[0]]]


@pytest.mark.parametrize("method", sorted(BATCHING_CLASSES))
def test_batches_are_made_of_what_a_step_leaves(method: str) -> None:
    drawn = Shuffled(make_settings(batching_method=method, num_canonical_nodes=2), make_shape([64], [32, 32]), 0)
    stepped = with_steps(drawn, [EveryNth(2)])
    epoch = batched(stepped, geometry_of(1, 2, 4))
    assert len(epoch) == 64
    assert sorted(ids_of(epoch)) == sorted(ids_of(stepped))


def test_steps_follow_each_other() -> None:
    drawn = Shuffled(make_settings(num_canonical_nodes=1), make_shape([30]), 0)
    whole = ids_of(drawn)
    assert ids_of(with_steps(drawn, [EveryNth(2), Reversed()])) == whole[::2][::-1]
    assert ids_of(with_steps(drawn, [Reversed(), EveryNth(2)])) == whole[::-1][::2]
    assert with_steps(drawn, []) is drawn


PROGRAM = """
import sys
from examples.every_nth import EveryNth as Imported
from lightning_streaming.sequence import SequenceStep

class EveryNth(Imported):
    def over(self, parent, context):
        return super().over(parent, context)

if __name__ == "__main__":
    print(EveryNth(n=2).facts["class"])
"""


@pytest.mark.parametrize(("command", "module"), [
    (["train.py"], "train"), (["-m", "package.train"], "package.train"), (["-c", PROGRAM], "__main__"),
    (["-m", "cProfile", "train.py"], "train"),
])  # fmt: skip
def test_a_class_of_the_started_program_is_named_as_it_is_imported(
    command: list[str], module: str, tmp_path: Path
) -> None:
    (tmp_path / "package").mkdir()
    for folder in (tmp_path, tmp_path / "package"):
        (folder / "train.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.run([sys.executable, *command], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, check=True)
    assert run.stdout.decode().splitlines()[0] == f"{module}.EveryNth"


def test_digests_differ_by_class_version_and_arguments() -> None:
    class Newer(EveryNth):
        version = 2

    drawn = Shuffled(make_settings(), make_shape([60]), 0)
    all_steps: tuple[list[SequenceStep], ...] = (
        [],
        [EveryNth(2)],
        [EveryNth(3)],
        [Newer(2)],
        [EveryNth(2), Reversed()],
        [Reversed(), EveryNth(2)],
    )
    assert len({with_steps(drawn, steps).digest for steps in all_steps}) == len(all_steps)
    assert with_steps(drawn, [EveryNth(2)]).digest == with_steps(drawn, [EveryNth(2)]).digest


def test_a_context_draws_the_same_numbers_everywhere() -> None:
    context = PartContext(epoch=3, seed=5, part=1, stream=None)
    again = pickle.loads(pickle.dumps(context))
    assert context.generator(7).random() == again.generator(7).random()
    others = [PartContext(epoch=3, seed=5, part=1, stream=0), PartContext(epoch=4, seed=5, part=1)]
    assert len({other.generator(7).random() for other in (context, *others)}) == 3


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ("EveryNth", "must be a list"),
        (EveryNth(2), "must be a list"),
        ([EveryNth], "but one is the class EveryNth; pass an object, like EveryNth()"),
        ([len], "objects of SequenceStep"),
        ([EveryNth(np.arange(3))], "cannot be saved"),  # type: ignore[arg-type]
        ([EveryNth(float("nan"))], "cannot be saved"),  # type: ignore[arg-type]
        ([{"class_path": "os.system", "init_args": {}}], "no SequenceStep"),
        ([{"class_path": "not_imported.EveryNth"}], "import its module first"),
        ([{}], "no SequenceStep"),
    ],
)
def test_what_is_no_step_is_refused(steps: Any, words: str) -> None:
    with assert_error(ConfigError, option="sequence") as caught:
        check_steps(steps)
    assert words in str(caught.value)


def test_a_mapping_names_a_class_that_is_imported() -> None:
    step = {"class_path": "examples.every_nth.EveryNth", "init_args": {"n": 4}}
    assert check_steps([step, EveryNth(2)]) == (EveryNth(4), EveryNth(2))
    assert check_steps(None) == ()


def test_a_step_that_leaves_too_few_samples_is_named() -> None:
    drawn = Shuffled(make_settings(num_canonical_nodes=12), make_shape([60]), 0)
    with assert_error(ConfigError, option="sequence") as caught:
        with_steps(drawn, [EveryNth(9)])
    assert "examples.every_nth.EveryNth leaves 6 of 60 samples" in str(caught.value)


def test_a_step_that_fails_is_named_with_the_methods_of_its_parent() -> None:
    class Slices(SequenceStep):
        def over(self, parent: Any, context: PartContext) -> SampleSequence:
            sequence: SampleSequence = parent[::2]
            return sequence

    with assert_error(ConfigError, option="sequence", hint="ids(entries)") as caught:
        with_steps(Shuffled(make_settings(), make_shape([60]), 0), [Slices()])
    assert "Slices.over failed: TypeError" in str(caught.value)


def test_a_step_that_returns_no_sequence_is_named() -> None:
    with assert_error(ConfigError, option="sequence") as caught:
        with_steps(Shuffled(make_settings(), make_shape([60]), 0), [NoSequence()])
    assert "NoSequence.over must return a SampleSequence" in str(caught.value)


@pytest.mark.parametrize(
    "value", [lambda entries: entries[:1], lambda entries: entries - 5, lambda entries: list(entries), np.float64]
)
def test_ids_that_are_wrong_are_refused(value: Any) -> None:
    class Wrong(SequenceStep):
        def over(self, parent: SampleSequence, context: PartContext) -> SampleSequence:
            return Returns(len(parent), value)

    stepped = with_steps(Shuffled(make_settings(), make_shape([60]), 0), [Wrong()])
    assert isinstance(stepped, Stepped)
    with pytest.raises(SampleIndexError, match="Wrong must return the ids of its parent"):
        stepped.ids(np.arange(4))
