"""A mismatch names the stream that was removed, added, renamed or changed, also among many streams."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_streaming import Stream, StreamingDataLoader
from lightning_streaming.errors import StateMismatchError
from lightning_streaming.resume.fingerprint import format_mix
from lightning_streaming.resume.mismatch import Difference, differences, format_differences, mismatch_message
from tests.helpers import State, json_copy, make_loader, write_dataset
from tests.sequence.builders import phase

MANY = 120
SHORT, LONG = "s{}", "corpus/common-crawl/2024-{}/deduplicated/filtered"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    for samples in (5, 6, 7):
        write_dataset(root / str(samples), samples)
    for names in ([], ["sha1"], ["md5", "sha1"]):
        write_dataset(root / f"written with {names}", 5, size_limit=1000, hashes=names)
        write_dataset(root / f"with {names}", 5, size_limit=1000)
        index = json.loads((root / f"with {names}" / "index.json").read_text())
        for shard in index["shards"]:
            shard["raw_data"]["hashes"] = dict.fromkeys(names, "0" * 32)
        (root / f"with {names}" / "index.json").write_text(json.dumps(index))
    return root


def loader(streams: Mapping[str, Path], **weights: float) -> StreamingDataLoader:
    return make_loader(
        streams={name: Stream(remote=str(path), repeat=weights.get(name)) for name, path in streams.items()}
    )


def refused(streams: Mapping[str, Path], state: State, **weights: float) -> str:
    """What is said when the state is loaded for these streams."""
    changed = loader(streams, **weights)
    changed.load_state_dict(json_copy(state))
    with pytest.raises(StateMismatchError) as caught:
        len(changed)
    return " ".join(str(caught.value).split())


def many(root: Path, form: str = SHORT, count: int = MANY) -> dict[str, Path]:
    return {form.format(number): root / "567"[number % 3] for number in range(count)}


@pytest.mark.rotate(2)
@pytest.mark.parametrize("form", [SHORT, LONG])
@pytest.mark.parametrize("place", [0, 57, MANY - 1])
def test_a_stream_that_left_is_named(root: Path, form: str, place: int) -> None:
    streams = many(root, form)
    state = loader(streams).state_dict()
    assert len(json.dumps(state)) < 4096
    name = form.format(place)
    message = refused({other: path for other, path in streams.items() if other != name}, state)
    assert f"streams.{name} there 'absent'" in message
    assert message.count("streams.") == 1


@pytest.mark.parametrize("form", [SHORT, LONG])
def test_a_stream_that_was_renamed_is_named_with_its_new_name(root: Path, form: str) -> None:
    streams = many(root, form)
    old = form.format(57)
    renamed = {"another" if name == old else name: path for name, path in streams.items()}
    message = refused(renamed, loader(streams).state_dict())
    assert f"streams.{old}: saved there, now named 'another'" in message


def test_a_stream_that_came_changed_moved_or_is_weighted_otherwise_is_named(root: Path) -> None:
    streams = many(root)
    state = loader(streams).state_dict()
    assert "streams.new 'absent' 5 samples" in refused({**streams, "new": root / "5"}, state)
    assert "streams.s57.digest" in refused({**streams, "s57": root / "6"}, state)
    assert "streams.s57.digest" in refused(streams, state, s57=2.0)
    moved = {"s1": streams["s1"], **streams}
    message = refused(moved, state)
    assert "streams.s0.index 0 1" in message
    assert "streams.s1.index 1 0" in message


def test_where_all_are_others_only_the_first_are_listed(root: Path) -> None:
    message = refused(many(root, "other{}"), loader(many(root)).state_dict())
    assert "streams.s0 there named 'other0'" in message
    assert "and 96 more" in message or "and 97 more" in message


@pytest.mark.nightly
@pytest.mark.parametrize(("count", "tells"), [(700, True), (1000, True), (1500, False)])
def test_of_very_many_streams_the_index_is_reported_if_there_is_room(root: Path, count: int, tells: bool) -> None:
    streams = many(root, LONG, count)
    state = loader(streams).state_dict()
    assert len(json.dumps(state)) < 4096
    missing, before = LONG.format(57), LONG.format(56)
    message = refused({name: path for name, path in streams.items() if name != missing}, state)
    if tells and "names" not in state["stream_list"]:
        assert f"streams[57] a stream, after '{before}' changed, renamed or 'absent'" in message
    elif tells:
        assert f"streams.{missing} there 'absent'" in message
    else:
        assert "all_streams.digest" in message


@pytest.mark.parametrize("names", [1, 40])
@pytest.mark.parametrize(
    ("then", "now", "words"),
    [
        ([], ["sha1"], "none → sha1"),
        (["sha1"], [], "sha1 → none"),
        (["sha1"], ["md5", "sha1"], "sha1 → md5, sha1"),
        (["md5", "sha1"], ["sha1"], "md5, sha1 → sha1"),
    ],
)
def test_what_differs_by_hashes_alone_says_so(
    root: Path, names: int, then: list[str], now: list[str], words: str
) -> None:
    for alone in (True, False):
        kind = "with" if alone else "written with"
        state = loader({f"s{number}": root / f"{kind} {then}" for number in range(names)}).state_dict()
        message = refused({f"s{number}": root / f"{kind} {now}" for number in range(names)}, state)
        assert f"({words})" in message
        assert 'on_mismatch="warn"' in message
        assert ("Only hashes in the indexes differ" in message) == ("digest" not in message) == alone


def test_other_values_of_a_hash_are_other_data(root: Path, tmp_path: Path) -> None:
    other = write_dataset(tmp_path / "other", 5, first_id=50, size_limit=1000, hashes=["sha1"])
    message = refused({"0": other}, loader({"0": root / "written with ['sha1']"}).state_dict())
    assert "streams.0.digest: saved" in message


def of_an_earlier_release(state: State) -> State:
    return {key: value for key, value in state.items() if key != "stream_list"}


@pytest.mark.parametrize("count", [1, 20, MANY])
def test_a_state_of_an_earlier_release_is_as_good(root: Path, count: int) -> None:
    streams = {**many(root, count=count), "s0": root / "6"}
    state = of_an_earlier_release(loader(streams).state_dict())
    resumed = loader(streams)
    resumed.load_state_dict(state)
    assert of_an_earlier_release(resumed.state_dict()) == state
    message = refused({**streams, "s0": root / "5"}, state)
    assert "digest" in message


def test_a_state_of_an_earlier_release_reports_added_hashes(root: Path) -> None:
    state = of_an_earlier_release(loader({"a": root / "with []"}).state_dict())
    assert "streams.a.hashes: saved none, now sha1" in refused({"a": root / "with ['sha1']"}, state)


def test_few_streams_may_become_many_and_are_reported_individually(root: Path) -> None:
    few = many(root, count=20)
    message = refused({**few, **{f"new{number}": root / "5" for number in range(15)}}, loader(few).state_dict())
    assert "streams.new14 'absent' 5 samples" in message


def test_the_stream_list_is_not_compared(root: Path) -> None:
    streams = many(root)
    state: dict[str, Any] = loader(streams).state_dict()
    state["stream_list"]["hashes"] = "sha1"
    resumed = loader(streams)
    resumed.load_state_dict(state)
    assert len(resumed) > 0


@pytest.mark.parametrize(
    ("saved", "now", "expected"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({"a": 1}, {"a": 2}, [("a", "1", "2")]),
        ({"a": {"b": None}}, {"a": {"b": 0}}, [("a.b", "None", "0")]),
        ({"a": 1}, {}, [("a", "1", "'absent'")]),
        ({}, {"a": {"samples": 3}}, [("a", "'absent'", "3 samples")]),
        ({"a": 1, "b": 2}, {"b": 3, "a": 4}, [("a", "1", "4"), ("b", "2", "3")]),
    ],
)
def test_every_difference_is_found(
    saved: dict[str, Any], now: dict[str, Any], expected: list[tuple[str, str, str]]
) -> None:
    assert differences(saved, now) == [Difference(*change) for change in expected]


def test_one_difference_is_a_phrase() -> None:
    assert format_differences([Difference("order.shuffle", "True", "False")]) == "order.shuffle: saved True, now False"


def test_several_differences_are_a_table() -> None:
    changes = [Difference("order.shuffle_algo", "'py1e'", "'naive'"), Difference("streams.0.samples", "29", "30")]
    assert format_differences(changes).splitlines() == [
        "setting             saved   now",
        "order.shuffle_algo  'py1e'  'naive'",
        "streams.0.samples   29      30",
    ]


_LINE = "lightning-streaming fit: all is well"


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize(
    "saved",
    [
        {"streams": {f"a\n{_LINE}": {"digest": "1"}}},
        {"order": {"later": {"samples": f"1\n{_LINE}"}}},
        {"order": {f"\x1b[2J\n{_LINE}": 1}},
    ],
)
def test_names_and_values_of_a_state_add_no_lines_to_a_refusal(saved: dict[str, Any], several: bool) -> None:
    now: dict[str, Any] = {name: {} for name in saved}
    changes = differences({**saved, "more": 1} if several else saved, now)
    for text in (format_differences(changes), mismatch_message(changes)):
        assert f"\\n{_LINE}" in text
        assert f"\n{_LINE}" not in text
        assert "\x1b" not in text


def test_names_of_hashes_and_sentences_on_phases_add_no_lines_to_a_refusal() -> None:
    changes = [Difference("streams.a.hashes", f"sha1\n{_LINE}", "none")]
    text = mismatch_message(changes, phase_hints=f" Run `state branch a\n{_LINE}`.")
    assert text.count(f"\\n{_LINE}") == 3
    assert f"\n{_LINE}" not in text


def test_other_lengths_are_read_by_a_new_epoch_and_with_on_change() -> None:
    text = mismatch_message([Difference("streams.a.lengths", "'1'", "'2'")])
    assert '`lightning-streaming state set CKPT --epoch N --sample 0`, then resume with on_mismatch="warn"' in text


def test_the_mix_of_a_phase_is_one_line() -> None:
    assert format_mix(phase("level", 10, {"web": 1.0})) == "web 1.0"
    assert format_mix(phase("ramp", 10, {"web": (1.0, 2.0), "code": 1.0})) == "code 1.0, web 1.0 to 2.0"


def test_mixes_of_many_streams_are_short_and_distinct() -> None:
    many: dict[str, float | tuple[float, float]] = {f"stream{number}": 1.0 for number in range(100)}
    mixes = [format_mix(phase("one", 10, {**many, "stream7": weight})) for weight in (1.0, 1.5, (1.0, 1.5))]
    assert len(set(mixes)) == 3
    assert all(mix.startswith("of 100 streams, ") and len(mix) < 100 for mix in mixes)


def test_values_that_cannot_be_compared_are_differences() -> None:
    nested: list[Any] = []
    for _ in range(5000):
        nested = [nested]
    for value, words in ((np.arange(3), "array([0, 1, 2])"), (nested, "[[[[[[[...]]]]]]]"), ("x" * 10**6, "'xxx")):
        (difference,) = differences({"order": {"new": value}}, {"order": {}})
        assert difference.saved.startswith(words)
        assert len(format_differences([difference] * 30)) < 30_000
    assert differences({"order": np.arange(3)}, {"order": np.arange(3)})
