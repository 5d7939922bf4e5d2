"""Weights that a run sets: from the next mixture step on, in every state, the same on any machines."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_streaming import Stream, StreamingDataLoader
from lightning_streaming.errors import ConfigError, StateError
from lightning_streaming.reading.dataset import run_state_of
from tests.helpers import State, assert_error, json_copy, make_loader, worlds
from tests.resume.phased import SIZES
from tests.resume.test_token_mixtures import FIRST, loader, read
from tests.resume.test_token_mixtures import root as documents  # noqa: F401  a fixture

NAMES = ("web", "code", "math")
Calls = dict[int, dict[str, float]]
"""Weights by the number of samples after which they are set."""


def mixed(root: Path, *, batch_size: int = 4, **how: Any) -> StreamingDataLoader:
    """A loader over three streams in steps of 24 samples; the ids of a stream begin at a multiple of 1000."""
    streams = {name: Stream(remote=str(root / name), proportion=1) for name in NAMES}
    mixing = {"longest_step": 24}
    return make_loader(
        streams=streams, mixing=mixing, epoch_size=240, num_canonical_nodes=4, batch_size=batch_size, **how
    )


def row(batch: Any) -> list[int]:
    """The ids of a batch of samples, or the first tokens of packs."""
    ids: list[int] = (batch["input_ids"][:, 0] if "input_ids" in batch else batch["id"]).tolist()
    return ids


def run(reader: StreamingDataLoader, calls: Calls, steps: int | None = None) -> tuple[list[int], State]:
    """The samples of the rest of an epoch, or of some steps, with the state then; weights are set on the way."""
    rows, begun = list[int](), reader.state_dict()["sample_in_epoch"]
    for number, batch in enumerate(reader, 1):
        rows += row(batch)
        if (weights := calls.get(begun + len(rows))) is not None:
            reader.set_weights(weights)
        if number == steps:
            break
    return rows, json_copy(reader.state_dict())


def of_streams(ids: list[int]) -> Counter[str]:
    """The number of samples of each stream."""
    return Counter(list(SIZES)[sample // 1000] for sample in ids)


def test_weights_hold_from_the_next_mixture_step_on(root: Path) -> None:
    plain, _ = run(mixed(root), {})
    ids, state = run(mixed(root), {40: {"web": 3, "math": 1}, 100: {"code": 1}})
    assert ids[:48] == plain[:48]
    assert of_streams(ids[48:120]) == {"web": 54, "math": 18}
    assert of_streams(ids[120:]) == {"code": 120}
    assert len(ids) == len(plain) == 240
    saved = state["fingerprint"]["weights_set"]
    assert saved == {"streams": ["code", "math", "web"], "changes": [[0, 2, 0, 1, 3], [0, 5, 1, 0, 0]]}
    later = mixed(root)
    later.load_state_dict(state)
    assert of_streams(run(later, {})[0]) == {"code": 240}  # epochs after it have the latest weights
    # The whole run follows from the state, as from a configuration.
    again = mixed(root)
    again.load_state_dict({**state, "epoch": 0, "sample_in_epoch": 0})
    assert run(again, {})[0] == ids


def test_weights_hold_from_a_later_mixture_step_on(root: Path) -> None:
    plain, _ = run(mixed(root), {})
    reader = mixed(root)
    began = [sample for _, batch in zip(range(4), reader, strict=False) for sample in row(batch)]
    for weights, step in (({"code": 1}, 5), ({"web": 3, "math": 1}, 2), ({"math": 1}, 7)):
        change = reader.set_weights(weights, from_step=step)
        assert (change.epoch, change.step) == (0, step)
    state = json_copy(reader.state_dict())
    # What was set for step 5 was replaced; steps have 24 samples.
    assert state["fingerprint"]["weights_set"]["changes"] == [[0, 2, 1.0, 3.0], [0, 7, 1.0, 0.0]]
    resumed = mixed(root, workers=2, batch_size=7)
    resumed.load_state_dict(state)
    ids = began + run(resumed, {})[0]
    assert ids[:48] == plain[:48]
    assert of_streams(ids[48:168]) == {"web": 90, "math": 30}
    assert of_streams(ids[168:]) == {"math": 72}
    # With batches of 6 after other batches, and on two ranks.
    other = mixed(root, batch_size=6)
    next(iter(other))
    other.set_weights({"web": 3, "math": 1}, from_step=2)
    other.set_weights({"math": 1}, from_step=7)
    assert other.state_dict()["fingerprint"] == state["fingerprint"]
    both = Counter[int]()
    for world in worlds(1, 2):
        of_rank = mixed(root, batch_size=3, world=world)
        of_rank.load_state_dict({**state, "sample_in_epoch": 0})
        both += Counter(sample for batch in of_rank for sample in row(batch))
    assert both == Counter(ids)


@pytest.mark.parametrize("step", [0, 1, 2, 10, 11, -1, 1.5, "3", True])
def test_steps_that_have_begun_or_do_not_exist_are_refused(root: Path, step: Any) -> None:
    reader = mixed(root)
    batches = iter(reader)
    for _ in range(13):  # 52 samples: in the step from 48 to 72
        next(batches)
    with assert_error(ConfigError, option="from_step") as caught:
        reader.set_weights({"web": 1}, from_step=step)
    if step in (0, 1, 2, 10, 11) and step is not True:
        assert "next one to begin is 3" in str(caught.value)
    assert "weights_set" not in reader.state_dict()["fingerprint"]
    assert reader.set_weights({"web": 1}, from_step=9).step == 9


CALLS = st.dictionaries(
    st.sampled_from(range(0, 240, 12)).filter(bool),
    st.dictionaries(st.sampled_from(NAMES), st.floats(0.1, 5), min_size=1),
    max_size=3,
)


@given(calls=CALLS, stop=st.integers(1, 19), change=st.booleans(), data=st.data())
@settings(deadline=None)
def test_a_run_that_is_stopped_anywhere_reads_what_an_uninterrupted_one_reads(
    root: Path, calls: Calls, stop: int, change: bool, data: st.DataObject
) -> None:
    whole, last = run(mixed(root, batch_size=12), calls)
    before = {at: weights for at, weights in calls.items() if at <= 12 * stop}
    began, state = run(mixed(root, batch_size=12), before, stop)
    assert began == whole[: 12 * stop]
    # A resume makes the calls that are left, with another batch size; or none, if there are none left.
    after = {at: weights for at, weights in calls.items() if at > 12 * stop}
    resumed = mixed(root, batch_size=data.draw(st.sampled_from([1, 2, 6] if after else [1, 5, 7, 12])))
    resumed.load_state_dict(state)
    rest, then = run(resumed, after)
    assert began + rest == whole
    assert then == last
    # Several ranks without the calls read what the state says.
    states = [state, {**last, "epoch": 0, "sample_in_epoch": 12 * stop}]
    alone = mixed(root, batch_size=1)
    alone.load_state_dict(states[change])
    expected = Counter(run(alone, {})[0])
    both = Counter[int]()
    for world in worlds(1, 2):
        of_rank = mixed(root, batch_size=3, world=world)
        of_rank.load_state_dict(states[change])
        both += Counter(sample for batch in of_rank for sample in row(batch))
    assert not expected - both
    assert (both - expected).total() <= 1


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_read_what_a_single_process_reads(root: Path, persistent: bool) -> None:
    calls: Calls = {20: {"web": 1}, 100: {"math": 1, "code": 2}, 120: {"web": 1, "code": 1}}
    options: dict[str, Any] = {"loader": {"persistent_workers": persistent, "prefetch_factor": 4}}
    single, many = mixed(root), mixed(root, workers=2, **options)
    for _ in range(2):
        assert run(many, calls) == run(single, calls)
    many.close()


def test_weights_set_before_the_first_batch_and_at_the_end_count(root: Path) -> None:
    reader = mixed(root)
    reader.set_weights({"math": 1})
    reader.set_weights({"code": 1})  # of two for one step, the later ones hold
    assert of_streams(run(reader, {240: {"web": 1}})[0]) == {"code": 240}
    assert of_streams(run(reader, {})[0]) == {"web": 240}


@pytest.mark.parametrize("packed", [True, False])
def test_weights_in_tokens_and_packs_follow(documents: Path, packed: bool) -> None:  # noqa: F811
    mixing: dict[str, Any] = {"weights_in": "tokens", "longest_step": 4000}
    mixing |= {} if packed else {"lengths": "size"}
    whole = loader(documents, packed=packed, mixing=mixing)
    calls: Calls = {40: {"books": 1}, 120: {"code": 1, "web": 1}}
    ids, state = run(whole, calls)
    books = [sample for sample in ids if sample < FIRST["code"]]
    assert len(books) > 20 if packed else len(books) > 5
    for steps in (12, 34):
        began, saved = run(loader(documents, packed=packed, mixing=mixing), calls, steps)
        resumed = loader(documents, packed=packed, mixing=mixing, batch_size=2)
        resumed.load_state_dict(saved)
        rest, then = run(resumed, {at: weights for at, weights in calls.items() if at > len(began)})
        assert began + rest == ids
        assert then == state
    again = loader(documents, packed=packed, mixing=mixing, workers=2)
    again.load_state_dict({**state, "epoch": 0, "sample_in_epoch": 0})
    assert read(again) == ids


@pytest.mark.parametrize(
    "weights",
    [{}, {"web": 0}, {"news": 1}, {"web": -1}, {"web": "1"}, {"web": float("nan")}, {"web": 1e308, "code": 1e308}],
)
def test_weights_that_cannot_be_are_refused_and_change_nothing(root: Path, weights: Any) -> None:
    reader = mixed(root)
    with assert_error(ConfigError, option="weights"):
        reader.set_weights(weights)
    assert run(reader, {}) == run(mixed(root), {})


def test_limits_hold_for_weights_that_are_set(root: Path) -> None:
    streams = {name: Stream(remote=str(root / name), proportion=1) for name in NAMES}
    mixing = {"longest_step": 24, "max_repeats": {"math": 7}}
    reader = make_loader(streams=streams, mixing=mixing, epoch_size=240, num_canonical_nodes=4)
    with assert_error(ConfigError, option="mixing.max_repeats", stream="math"):
        reader.set_weights({"math": 1})
    assert run_state_of(reader.dataset).request.weights_set == ()
    no_mixture = make_loader(streams=streams)
    with assert_error(ConfigError, option="mixing"):
        no_mixture.set_weights({"math": 1})


@pytest.mark.parametrize(
    "damaged",
    [
        {"streams": [3], "changes": []},
        {"streams": ["web"], "changes": [[0, 1]]},
        {"streams": ["web"], "changes": [[0, 1, 0]]},
        {"streams": ["web"], "changes": [[0, 1, -1]]},
        {"streams": ["web"], "changes": [[1, 1, 1], [0, 1, 1]]},
        {"streams": ["web"], "changes": 3},
        {"streams": ["web"]},
    ],
)
def test_damaged_weights_of_a_state_are_refused(root: Path, damaged: Any) -> None:
    _, state = run(mixed(root), {40: {"web": 1}}, 12)
    state["fingerprint"]["weights_set"] = damaged
    with pytest.raises(StateError):
        mixed(root).load_state_dict(state)
