"""Conditions on real data: what they select, what a dataset of it reads, and what is refused."""

from __future__ import annotations

import errno
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_streaming import (
    CSVWriter,
    JSONWriter,
    MDSWriter,
    SampleKey,
    Stream,
    StreamingDataLoader,
    StreamingDataset,
    World,
)
from lightning_streaming.cache import shared_files
from lightning_streaming.errors import ConfigError, SampleIndexError, StateError, StorageError, StreamingError
from lightning_streaming.formats.columns import read_columns
from lightning_streaming.formats.index import ShardInfo
from lightning_streaming.selection import scanning
from lightning_streaming.selection.conditions import SqlCondition
from lightning_streaming.sequence.settings import SHUFFLE_ALGOS
from lightning_streaming.writing.merging import merge_recursive
from tests.helpers import (
    assert_error,
    assert_resumes_at_every_step,
    ids,
    json_copy,
    make_dataset,
    make_loader,
    write_dataset,
)
from tests.servers import HttpStore
from tests.tiers import examples

COLUMNS = {
    "id": "int",
    "half": "float16",
    "score": "float32",
    "lang": "str",
    "doc": "uint16",
    "raw": "bytes",
    "meta": "json",
    "big": "str_int",
    "exact": "str_decimal",
    "tokens": "ndarray:uint16",
}
SAMPLES = [
    {
        "id": number,
        "half": np.float16(number / 4),
        "score": np.float32((number * 37 % 100) / 100),
        "lang": ["en", "de", "", "zürich"][number % 4],
        "doc": np.uint16(number // 7),
        "raw": bytes([number % 256]) * (number % 3),
        "meta": {"level": number % 5, "tags": ["x"] * (number % 2)},
        "big": 10**20 + number,
        "exact": Decimal(number) / 8,
        "tokens": np.arange(number % 5 + 1, dtype=np.uint16),
    }
    for number in range(300)
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data") / "rows"
    with MDSWriter(out=str(root), columns=COLUMNS, size_limit=2000, compression="zstd") as writer:
        for sample in SAMPLES:
            writer.write(sample)
    return root


def read(root: Path | str, **asked: Any) -> list[int]:
    """The ids that a dataset has, in the order of the data."""
    dataset = StreamingDataset(remote=str(root), **asked)
    found = [dataset[number]["id"] for number in range(dataset.size)]
    dataset.close()
    return found


def read_or_none(root: Path, **asked: Any) -> set[int]:
    """The same; empty where nothing is selected, which is an error of its own."""
    try:
        return set(read(root, **asked))
    except ConfigError as error:
        if "selects none" not in str(error):
            raise
        return set()


def flat(batches: list[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


def met(condition: Callable[[dict[str, Any]], Any]) -> list[int]:
    """What ought to be selected."""
    return [sample["id"] for sample in SAMPLES if condition(sample)]


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("list_reduce([id, doc, 3], lambda x, y: x + y) > 200", lambda of: of["id"] + int(of["doc"]) + 3 > 200),
        ("len(list_filter(string_split(lang, ''), lambda LANG: lang = 'e')) = 1", lambda of: "e" in of["lang"]),
        ("list_sum(list_transform([1, 2], lambda x: x * doc)) > 100", lambda of: 3 * int(of["doc"]) > 100),
        ("len([x for x in [id, doc] if x > 40]) = 1", lambda of: of["id"] > 40 >= of["doc"]),
        ("(meta->'$.level')::int = 3", lambda of: of["meta"]["level"] == 3),
        ("lang.string_split('').list_filter(lambda x: x = 'e').len() = 1", lambda of: "e" in of["lang"]),
    ],
)
def test_a_lambda_in_sql_has_parameters_that_are_no_columns(data: Path, where: str, expected: Any) -> None:
    assert SqlCondition(where).columns == tuple(name for name in ("id", "doc", "lang", "meta") if name in where)
    assert read(data, selection={"where": where}) == met(expected)


@pytest.mark.rotate(3)
@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("score >= 0.5 and lang == 'en'", lambda of: of["score"] >= 0.5 and of["lang"] == "en"),
        ("doc in (3, 5) or id = 250 -- the odd one", lambda of: of["doc"] in (3, 5) or of["id"] == 250),
        ("lang = ''", lambda of: of["lang"] == ""),
        ("lang like 'zür%'", lambda of: of["lang"].startswith("zür")),
        ("half < 2.25", lambda of: of["half"] < 2.25),
        ("octet_length(raw) = 2", lambda of: len(of["raw"]) == 2),
        ("cast(meta->>'level' as int) = 3", lambda of: of["meta"]["level"] == 3),
        ("nullif(doc, 4) > 3", lambda of: of["doc"] > 4),
        ("exact > 30.5", lambda of: of["exact"] > 30.5),
        ('"score" > 0.25 and length(lang) > 2', lambda of: of["score"] > 0.25 and len(of["lang"]) > 2),
    ],
)
def test_a_condition_in_sql_selects_what_meets_it(data: Path, where: str, expected: Any) -> None:
    assert read(data, selection={"where": where}) == met(expected)


@pytest.mark.parametrize(
    "function",
    [
        lambda score, lang: score >= 0.5 and lang == "en",
        lambda meta: '"level": 3' in meta,
        lambda big: big > 10**20 + 100,
        lambda *, raw: len(raw) == 2,
        lambda exact: exact % 1 == 0,
    ],
)
def test_a_function_selects_what_it_says(data: Path, function: Callable[..., bool]) -> None:
    names = function.__code__.co_varnames
    shown = {"meta": lambda of: f'{{"level": {of["meta"]["level"]}'}
    expected = met(lambda of: function(**{name: shown.get(name, lambda of, name=name: of[name])(of) for name in names}))
    assert read(data, selection={"where": function}) == expected
    assert 0 < len(expected) < len(SAMPLES)


def test_numbers_beyond_64_bits_are_numbers_to_sql_too(data: Path) -> None:
    assert read(data, selection={"where": "big >= 100000000000000000295"}) == [295, 296, 297, 298, 299]
    assert read(data, selection={"where": "big - 100000000000000000000 = 7"}) == [7]


def test_sql_computes_with_numbers_and_dates(data: Path) -> None:
    for where, expected in (
        ("abs(id - doc) < 9 and -id + 3 < 0", lambda of: abs(of["id"] - int(of["doc"])) < 9 and of["id"] > 3),
        (
            "day(date '2024-01-01' + cast(id as int)) = 2",
            lambda of: of["id"] in (1, 32, 61, 92, 122, 153, 183, 214, 245, 275),
        ),
        ("date_diff('day', date '2024-01-01', date '2024-01-01' + cast(id as int)) = 7", lambda of: of["id"] == 7),
        (
            "strftime(make_timestamp(id * 86400000000), '%d') = '03'",
            lambda of: of["id"] in (2, 33, 61, 92, 122, 153, 183, 214, 245, 275),
        ),
        ("age(timestamp '2024-01-03', date '2024-01-01' + cast(id as int)) = interval 1 day", lambda of: of["id"] == 1),
        ("hour(make_timestamptz(2024, 1, 1, id % 24, 0, 0)) = 7", lambda of: of["id"] % 24 == 7),
    ):
        assert read(data, selection={"where": where}) == met(expected), where


def test_sql_does_not_depend_on_time_zone_and_locale_of_the_machine() -> None:
    code = (
        "import numpy as np\n"
        "from lightning_streaming.selection.conditions import SqlCondition\n"
        "for where in ({where!r}, 'year(to_timestamp(id)) = 1971'):\n"
        "    print(SqlCondition(where).met({{'id': np.arange(0, 10**8, 10**6)}}, np.arange(100)).sum())\n"
    ).format(where="to_timestamp(id) > '1971-11-26 10:40:50'")
    asked = os.environ | {"TZ": "Asia/Tokyo", "LC_ALL": "th_TH.UTF-8"}
    told = subprocess.run([sys.executable, "-c", code], env=asked, capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["39", "32"]


def test_numbers_of_several_widths_are_not_rounded(tmp_path: Path) -> None:
    largest, values = 2**64 - 1, {"int64": [1, 2**53 + 1], "uint64": [2**64 - 1, 2**53 + 1]}
    with MDSWriter(out=str(tmp_path / "x" / "a"), columns={"n": "int64"}) as writer:
        for value in values["int64"]:
            writer.write({"n": value})
    with MDSWriter(out=str(tmp_path / "x" / "b"), columns={"n": "uint64"}) as writer:
        for value in values["uint64"]:
            writer.write({"n": value})
    merge_recursive(str(tmp_path / "x"))
    for where in (f"n = {largest}", lambda n: n == largest):
        assert StreamingDataset(local=str(tmp_path / "x"), selection={"where": where}).size == 1
    for where in (f"n = {2**53 + 1}", lambda n: n == 2**53 + 1):
        assert StreamingDataset(local=str(tmp_path / "x"), selection={"where": where}).size == 2
    parts = [f"{at}%:{at + 10}%" for at in range(0, 100, 10)]
    both = []
    for part in parts:
        with suppress(ConfigError):
            dataset = StreamingDataset(local=str(tmp_path / "x"), selection={"fraction": part, "group_by": "n"})
            both.append([dataset[number]["n"] for number in range(dataset.size)])
    assert sum(map(len, both)) == 4
    assert sum(2**53 + 1 in one for one in both) == 1


def test_conditions_hold_together(data: Path) -> None:
    numbers = [5, 7, 8, 9, 250, 251, 299]
    assert read(data, selection={"where": "score > 0.25", "indices": numbers}) == met(
        lambda of: of["score"] > 0.25 and of["id"] in numbers
    )
    parts = [read(data, selection={"where": "score > 0.25", "fraction": part}) for part in (":30%", "30%:")]
    assert sorted(parts[0] + parts[1]) == met(lambda of: of["score"] > 0.25)


def test_numbers_and_truth_values_select_alike_from_memory_or_a_file(data: Path, tmp_path: Path) -> None:
    numbers = [299, 3, 4]
    truth = np.isin(np.arange(300), numbers)
    np.save(tmp_path / "numbers.npy", np.array(numbers, np.int32))
    np.save(tmp_path / "truth.npy", truth)
    files = (str(tmp_path / "numbers.npy"), tmp_path / "numbers.npy", f"file://{tmp_path}/truth.npy")
    for select in (numbers, truth, truth.tolist(), *files):
        assert read(data, selection={"indices": select}) == [3, 4, 299]


@pytest.mark.parametrize("writer", [CSVWriter, JSONWriter])
def test_text_formats_are_looked_at_too(writer: Any, tmp_path: Path) -> None:
    with writer(out=str(tmp_path / "x"), columns={"id": "int", "lang": "str"}, size_limit=100) as written:
        for sample in SAMPLES:
            written.write({name: sample[name] for name in ("id", "lang")})
    assert read(tmp_path / "x", selection={"where": "lang = 'de' and id < 100"}) == list(range(1, 100, 4))


# --- parts by hash ---


@pytest.mark.rotate(4)
@pytest.mark.parametrize("group_by", [None, "id", "doc", "lang", "raw", "big", "meta"])
@pytest.mark.parametrize("seed", [0, -5])
def test_parts_share_nothing_and_make_the_whole(data: Path, group_by: str | None, seed: int) -> None:
    how = {"group_by": group_by, "seed": seed}
    parts = [read_or_none(data, selection={"fraction": part, **how}) for part in (":40%", "40%:60%", "60%:")]
    assert sum(map(len, parts)) == len(SAMPLES)
    assert set().union(*parts) == set(range(len(SAMPLES)))
    if group_by is not None:
        values = [{str(SAMPLES[number][group_by]) for number in part} for part in parts]
        assert sum(map(len, values)) == len(set().union(*values))
    if group_by in (None, "id", "big"):
        assert 0.3 < len(parts[0]) / len(SAMPLES) < 0.5


@pytest.mark.parametrize("writer", [CSVWriter, JSONWriter])
def test_a_number_is_in_the_same_part_whatever_it_is_stored_in(data: Path, writer: Any, tmp_path: Path) -> None:
    with writer(out=str(tmp_path / "x"), columns={"id": "int"}) as written:
        for sample in SAMPLES:
            written.write({"id": sample["id"]})
    selection = {"fraction": ":30%", "group_by": "id"}
    assert read(tmp_path / "x", selection=selection) == read(data, selection=selection)


def test_a_part_stays_what_it_is_when_data_is_appended(tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "x", 200)
    before = {how: read(root, selection={"fraction": "20%:70%", "group_by": how}) for how in (None, "id")}
    with MDSWriter(out=str(root), columns={"id": "int"}, size_limit=230, mode="append") as writer:
        for number in range(200, 300):
            writer.write({"id": number})
    for how, was in before.items():
        now = read(root, selection={"fraction": "20%:70%", "group_by": how})
        assert [number for number in now if number < 200] == was
        assert len(now) > len(was)


def test_parts_are_these_for_ever(data: Path) -> None:
    """A part that changed would leak what was held out: these are facts of the format, as an order is."""
    by_number, by_text = [18, 47, 58, 136, 145, 233, 250, 286], [8, 15, 72, 79, 87, 91, 141, 221, 232, 235, 283, 286]
    assert read(data, selection={"fraction": ":3%"}) == by_number
    assert read(data, selection={"fraction": ":3%", "group_by": "id"}) == by_number  # numbers that are the places
    assert by_number == [number for number in range(300) if _splitmix(number ^ _splitmix(0)) < 3 * 2**64 // 100]
    assert read(data, selection={"fraction": ":5%", "group_by": "big", "seed": -3}) == by_text
    key = (-3).to_bytes(8, "little", signed=True)
    digests = [blake2b(str(10**20 + number).encode(), digest_size=8, key=key).digest() for number in range(300)]
    assert by_text == [number for number, one in enumerate(digests) if int.from_bytes(one, "little") < 2**64 // 20]


def _splitmix(number: int) -> int:
    """SplitMix64 in Python's own numbers."""
    mixed = (number + 0x9E3779B97F4A7C15) % 2**64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
    return mixed ^ (mixed >> 31)


# --- what a dataset makes of it ---


@pytest.mark.parametrize("algo", ["", *(algo for algo in SHUFFLE_ALGOS if algo != "py1b")])  # which warns
def test_an_epoch_reads_each_selected_sample_once_whatever_the_order(tmp_path: Path, algo: str) -> None:
    root = write_dataset(tmp_path / "x", 83)
    numbers = [*range(20, 24), 31, *range(60, 83)]  # whole shards of 5 are left out
    order: dict[str, Any] = {"shuffle": bool(algo), **({"shuffle_algo": algo} if algo else {})}
    loader = make_loader(root, selection={"indices": numbers}, batch_size=3, num_canonical_nodes=1, **order)
    assert len(loader) == 10
    read_ids = flat(ids(loader))
    assert sorted(set(read_ids)) == numbers
    assert len(read_ids) == len(numbers)


@pytest.mark.parametrize("method", ["random", "stratified"])
def test_a_mixture_of_selections_resumes_exactly(tmp_path: Path, method: str) -> None:
    roots = [write_dataset(tmp_path / name, 47, first_id=first) for name, first in (("a", 0), ("b", 100))]
    streams = {
        "a": Stream(remote=str(roots[0]), selection={"where": "id % 3 <> 0"}, proportion=0.6),
        "b": Stream(remote=str(roots[1]), selection={"fraction": ":70%"}, proportion=0.4),
    }
    make = partial(make_loader, streams=streams, batch_size=6, batching_method=method, num_canonical_nodes=2)
    assert_resumes_at_every_step(make)
    assert all(number >= 100 or number % 3 for number in flat(ids(make())))


def test_going_on_with_other_machines_reads_what_is_left(tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "x", 120)
    before = make_loader(root, selection={"where": "id < 96"}, batch_size=4, num_canonical_nodes=2, replication=None)
    batches = iter(before)
    first = [next(batches)["id"].tolist() for _ in range(6)]
    state = json_copy(before.state_dict())
    later = []
    for rank in range(3):
        world = World(num_nodes=1, ranks_per_node=3, rank=rank)
        loader = make_loader(root, selection={"where": "id < 96"}, batch_size=6, num_canonical_nodes=2, world=world)
        loader.load_state_dict(state)
        later += flat(ids(loader))
    assert sorted(flat(first) + later) == list(range(96))


def test_a_state_belongs_to_its_selection(tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "x", 60)
    loader = make_loader(root, selection={"where": "id < 40"})
    next(iter(loader))
    state = json_copy(loader.state_dict())
    same = make_loader(root, selection={"where": lambda id: id < 40})  # noqa: A006  # the same in other words
    same.load_state_dict(state)
    assert len(ids(same)) == len(loader) - 1
    others: list[dict[str, Any]] = [{"selection": {"where": "id >= 20"}}, {}, {"selection": {"where": "id < 39"}}]
    for other in others:
        changed = make_loader(root, **other)
        changed.load_state_dict(state)
        with pytest.raises(StateError, match=r"streams\.0\.(samples|selection)"):
            next(iter(changed))


def test_keys_name_the_stored_sample_and_restore_it(tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "x", 60)
    loader = StreamingDataLoader(make_dataset(root, selection={"where": "id % 4 = 1"}), return_keys=True)
    batch, keys = next(iter(loader))
    assert [5 * key.shard + key.sample_index for key in keys] == batch["id"].tolist()
    dataset, whole = make_dataset(root, selection={"where": "id % 4 = 1"}), make_dataset(root)
    assert [dataset.restore_sample(key)["id"] for key in keys] == batch["id"].tolist()
    assert [whole.restore_sample(key.as_dict())["id"] for key in keys] == batch["id"].tolist()
    left_out = SampleKey(stream="0", shard=0, sample_index=2, epoch=0, position=0, shuffle_seed=9)
    assert whole.restore_sample(left_out)["id"] == 2
    assert not dataset.can_restore_sample(left_out)
    with pytest.raises(SampleIndexError, match="is there, but selection leaves it out"):
        dataset.restore_sample(left_out)


def test_a_subclass_is_asked_for_the_ids_of_the_selection(tmp_path: Path) -> None:
    class Mine(StreamingDataset):
        def __getitem__(self, index: Any) -> Any:
            return {"asked": index, **super().__getitem__(index)}

    dataset = Mine(
        remote=str(write_dataset(tmp_path / "x", 40)), selection={"where": "id >= 15"}, batch_size=4, shuffle=True
    )
    samples = list(dataset)
    assert sorted(sample["asked"] for sample in samples) == list(range(25))
    assert all(sample["id"] == sample["asked"] + 15 for sample in samples)


def test_another_process_reads_what_was_selected_here_whatever_its_function_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_dataset(tmp_path / "x", 60)
    dataset = make_dataset(root, selection={"where": _is_late})
    monkeypatch.setitem(globals(), "LATE", 50)
    assert dataset.size == 10
    sent = pickle.dumps(dataset)
    monkeypatch.undo()
    assert pickle.loads(sent).size == 10
    (kept,) = (dataset.streams["0"].cache_config().cache_directory() / "selections").glob("*.npy")
    kept.unlink()
    with pytest.raises(ConfigError, match=r"stream '0'.*another selection in this process"):
        _ = pickle.loads(sent).size


LATE = 40


def _is_late(id: int) -> bool:  # noqa: A002
    return id >= LATE


def test_shards_of_which_nothing_is_selected_are_never_fetched(http_store: HttpStore, tmp_path: Path) -> None:
    write_dataset(tmp_path / "x", 40)
    shutil.copytree(tmp_path / "x", http_store.root / "x")
    dataset = make_dataset(f"{http_store.url}/x", local=str(tmp_path / "local"), selection={"indices": [0, 3, 17, 39]})
    assert sorted(sample["id"] for sample in dataset) == [0, 3, 17, 39]
    fetched = {name for name in http_store.requests() if name.endswith(".mds")}
    assert fetched == {f"x/shard.{number:05}.mds" for number in (0, 3, 7)}
    dataset.close()


def test_what_was_evaluated_is_not_evaluated_again(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(data, tmp_path / "x")
    expected = read(tmp_path / "x", selection={"where": "score < 0.25"})
    monkeypatch.setattr(scanning, "read_columns", None)
    assert read(tmp_path / "x", selection={"where": "score < 0.25"}) == expected
    with pytest.raises(TypeError):
        read(tmp_path / "x", selection={"where": "score < 0.26"})


def write_sizes(root: Path, sizes: list[int]) -> Path:
    """Write a dataset without hashes; returns its only shard."""
    with MDSWriter(out=str(root), columns={"id": "int", "size": "int"}) as writer:
        for number, size in enumerate(sizes):
            writer.write({"id": number, "size": size})
    return root / "shard.00000.mds"


@pytest.mark.parametrize("changes", ["inode", "time"])
def test_data_rewritten_in_place_is_evaluated_again(tmp_path: Path, changes: str) -> None:
    shard, other = write_sizes(tmp_path / "x", [1, 20, 1, 20]), write_sizes(tmp_path / "other", [20, 1, 20, 1])
    assert shard.stat().st_size == other.stat().st_size
    assert read(tmp_path / "x", selection={"where": "size > 10"}) == [1, 3]
    accessed, modified = shard.stat().st_atime_ns, shard.stat().st_mtime_ns
    if changes == "inode":
        os.replace(other, shard)
        os.utime(shard, ns=(accessed, modified))
    else:
        shard.write_bytes(other.read_bytes())
        os.utime(shard, ns=(accessed, modified + 10**9))
    assert read(tmp_path / "x", selection={"where": "size > 10"}) == [0, 2]


def test_data_with_hashes_is_evaluated_once_whatever_the_times_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_dataset(tmp_path / "x", 20, hashes=["sha1"])
    expected = read(root, selection={"where": "id > 10"})
    for path in root.iterdir():
        os.utime(path, (0, 0))
    monkeypatch.setattr(scanning, "read_columns", None)
    assert read(root, selection={"where": "id > 10"}) == expected


@pytest.mark.rotate(2)
@pytest.mark.parametrize("spoil", [b"", b"no array", b"\x93NUMPY", bytes(8)])
def test_a_kept_outcome_that_is_damaged_is_made_anew(tmp_path: Path, spoil: bytes) -> None:
    root = write_dataset(tmp_path / "x", 60)
    dataset = make_dataset(root, selection={"where": "id > 30"})
    assert dataset.size == 29
    (kept,) = (dataset.streams["0"].cache_config().cache_directory() / "selections").glob("*.npy")
    kept.write_bytes(kept.read_bytes()[:-8] + spoil if spoil == bytes(8) else spoil)
    assert make_dataset(root, selection={"where": "id > 30"}).size == 29


def test_a_bit_that_flips_is_noticed(tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "x", 60)
    dataset = make_dataset(root, selection={"where": "id > 30"})
    assert dataset.size == 29
    (kept,) = (dataset.streams["0"].cache_config().cache_directory() / "selections").glob("*.npy")
    whole = kept.read_bytes()
    for place in (128, 135, len(whole) - 9):
        kept.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        assert read(root, selection={"where": "id > 30"}) == list(range(31, 60))
        assert kept.read_bytes() == whole


def test_a_disk_that_takes_nothing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    root = write_dataset(tmp_path / "x", 60)
    monkeypatch.setattr(np, "save", full)
    with pytest.raises(StorageError, match=r"stream '0': no space left in .*No space left on device"):
        read(root, selection={"where": "id > 30"})
    monkeypatch.undo()
    assert read(root, selection={"where": "id > 30"}) == list(range(31, 60))


def test_evaluation_goes_on_where_it_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanning, "SHARDS_AT_ONCE", 1)
    root = write_dataset(tmp_path / "x", 60, hashes=["sha1"])
    path, whole = root / "shard.00007.mds", (root / "shard.00007.mds").read_bytes()
    path.write_bytes(whole[:-3])
    with pytest.raises(StreamingError, match=r"stream '0'.*shard\.00007\.mds"):
        _ = make_dataset(root, selection={"where": "id > 30"}).size
    path.write_bytes(whole)
    looked_at: list[str] = []

    def watched(info: ShardInfo, *of: Any) -> Any:
        looked_at.append(info.raw_data.basename)
        return read_columns(info, *of)

    monkeypatch.setattr(scanning, "read_columns", watched)
    assert make_dataset(root, selection={"where": "id > 30"}).size == 29
    assert "shard.00007.mds" in looked_at
    assert len(looked_at) < 12


def test_a_shard_that_is_damaged_on_this_node_is_fetched_again(http_store: HttpStore, tmp_path: Path) -> None:
    write_dataset(http_store.root / "x", 40)
    options: dict[str, Any] = {"remote": f"{http_store.url}/x", "local": str(tmp_path / "local")}
    dataset = StreamingDataset(**options)
    assert [dataset[number]["id"] for number in (0, 17)] == [0, 17]
    dataset.close()
    shard = tmp_path / "local" / "shard.00003.mds"
    found = shard.stat()
    shard.write_bytes(b"\xff" * found.st_size)
    os.utime(shard, ns=(found.st_atime_ns, found.st_mtime_ns))
    dataset = StreamingDataset(**options, selection={"where": "id > 12"})
    assert [dataset[number]["id"] for number in range(dataset.size)] == list(range(13, 40))
    dataset.close()
    assert http_store.requests().count("x/shard.00003.mds") == 2


def test_a_part_that_is_damaged_is_evaluated_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanning, "SHARDS_AT_ONCE", 1)
    root = write_dataset(tmp_path / "x", 60, hashes=["sha1"])
    path, whole = root / "shard.00007.mds", (root / "shard.00007.mds").read_bytes()
    path.write_bytes(whole[:-3])
    dataset = make_dataset(root, selection={"where": "id > 3"})
    with pytest.raises(StreamingError, match=r"shard\.00007\.mds"):
        _ = dataset.size
    path.write_bytes(whole)
    parts = sorted((dataset.streams["0"].cache_config().cache_directory() / "selections").glob("*.parts/*.npy"))
    for part in parts:
        held = part.read_bytes()
        assert len(held) == 128 + 1 + 8  # a bit for each of five samples, between header and checksum
        part.write_bytes(held[:128] + bytes([held[128] ^ 1]) + held[129:])
    assert parts
    assert read(root, selection={"where": "id > 3"}) == list(range(4, 60))


def test_bits_that_were_selected_just_now_count_for_the_limit(http_store: HttpStore, tmp_path: Path) -> None:
    write_dataset(http_store.root / "x", 40)
    options: dict[str, Any] = {
        "remote": f"{http_store.url}/x",
        "local": str(tmp_path / "local"),
        "selection": {"where": "id > 3"},
    }
    with pytest.raises(ConfigError) as caught:
        _ = StreamingDataset(**options, cache_limit=1).size
    least = int(str(caught.value).split("at least ")[1].split("b ")[0])
    for _ in range(2):
        with pytest.raises(ConfigError, match=rf"is {least}b; .* Selections .* cache gc --older-than"):
            _ = StreamingDataset(**options, cache_limit=least).size
    assert StreamingDataset(**options, cache_limit=least + 1000).size == 36


def test_what_is_there_of_a_selection_is_for_all_who_share_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scanning, "SHARDS_AT_ONCE", 1)
    root, local = write_dataset(tmp_path / "x", 60), tmp_path / "local"
    (root / "shard.00007.mds").write_bytes(b"")
    local.mkdir()
    local.chmod(0o2775)
    umask = os.umask(0o077)
    try:
        with pytest.raises(StreamingError, match=r"shard\.00007\.mds"):
            read(root, local=str(local), selection={"where": "id > 30"})
    finally:
        os.umask(umask)
    (lock,), (parts,) = (list((local / "selections").glob(f"*.{kind}")) for kind in ("lock", "parts"))
    assert lock.stat().st_mode & 0o777 == 0o664
    assert parts.stat().st_mode & 0o7777 == 0o2775
    assert {part.stat().st_mode & 0o777 for part in parts.iterdir()} == {0o644}


@pytest.mark.parametrize("refused", ["lock", "parts"])
def test_what_another_user_left_and_may_not_be_written_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str, caplog: pytest.LogCaptureFixture
) -> None:
    def denied(*_: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied") if refused == "parts" else StorageError("denied")

    if refused == "lock":
        monkeypatch.setattr(shared_files, "open_shared", denied)
    else:
        monkeypatch.setattr(np, "save", denied)
    root = write_dataset(tmp_path / "x", 60)
    assert read(root, selection={"where": "id > 30"}) == list(range(31, 60))
    assert "is not writable: each process evaluates the selection itself" in caplog.text


def test_without_locks_a_selection_is_evaluated_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: Any, **__: Any) -> bool:
        raise shared_files.LocksUnsupportedError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(shared_files, "try_lock", unsupported)
    root = write_dataset(tmp_path / "x", 60)
    dataset = make_dataset(root, selection={"where": "id > 30"})
    assert dataset.size == 29
    assert list((dataset.streams["0"].cache_config().cache_directory() / "selections").glob("*.npy"))


def test_an_evaluation_that_may_take_long_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    root = write_dataset(tmp_path / "x", 60)
    read(root, selection={"where": "id > 30"})
    assert not caplog.messages
    monkeypatch.setattr(scanning, "SAMPLES_AT_ONCE", 50)
    read(root, selection={"indices": [3]})
    read(root, selection={"where": "id > 30"})
    assert not caplog.messages
    read(root, selection={"where": "id > 31"})
    (told,) = caplog.messages
    assert "evaluating where='id > 31' over 60 samples of stream '0'; `lightning-streaming select`" in told


# --- what is refused ---


def _forgets(score: float) -> None:
    if score > 1:
        return
    _ = score >= 0.5


@pytest.mark.parametrize(
    "function",
    [lambda lang: lang == "en" or None, lambda lang: re.match("e", lang), lambda lang: True if lang == "en" else None],
)
def test_a_function_may_say_none_of_samples_that_are_not_wanted(data: Path, function: Any) -> None:
    assert read(data, selection={"where": function}) == met(lambda row: row["lang"] == "en")


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"selection": {"where": "scor > 1"}}, r"unknown column 'scor'; .*did you mean 'score'\?"),
        ({"selection": {"where": lambda scor: True}}, r"where=.*<lambda>: unknown column 'scor'"),
        (
            {"selection": {"where": lambda sample: True}},
            r"unknown column 'sample'; .*; the parameters of the function must be named like "
            r"columns, as in lambda score, lang: ",
        ),
        (
            {"selection": {"where": "tokens > 3"}},
            r"column 'tokens', which is 'ndarray:uint16'; name columns of numbers",
        ),
        ({"selection": {"where": "score +"}}, r"cannot be read as a condition in SQL"),
        ({"selection": {"where": "1 = 1"}}, "reads no column"),
        ({"selection": {"where": "id > 1; select 1"}}, "cannot be read as a condition in SQL"),
        ({"selection": {"where": "sum(score) > 1"}}, "cannot be evaluated"),
        ({"selection": {"where": "score > 'x'"}}, "cannot be evaluated"),
        ({"selection": {"where": "random() > score"}}, r"uses random\(\), whose result changes between calls"),
        ({"selection": {"where": "id > year(now())"}}, r"uses now\(\), whose result changes between calls"),
        ({"selection": {"where": "year(make_timestamp(id)) = year(today())"}}, r"uses today\(\), whose result"),
        (
            {"selection": {"where": "age(make_timestamp(id)) > interval 1 day"}},
            r"uses age\(\) of one date, whose result",
        ),
        (
            {"selection": {"where": "current_localtimestamp() > make_timestamp(id)"}},
            r"uses current_localtimestamp\(\), whose result",
        ),
        (
            {"selection": {"where": "make_timestamp(id) > pg_conf_load_time()"}},
            r"uses pg_conf_load_time\(\), whose result",
        ),
        (
            {"selection": {"where": "current_setting('memory_limit') > lang"}},
            r"uses current_setting\(\), whose result",
        ),
        ({"selection": {"where": "id in (select 1)"}}, "reads another table"),
        ({"selection": {"where": "lang = getenv('HOME')"}}, "where="),
        (
            {"selection": {"where": "score > 2"}},
            r"has 300 samples, of which where='score > 2' selects none; fix the condition",
        ),
        ({"selection": {"where": lambda score: 1 / 0}}, "failed on sample 0: ZeroDivisionError"),
        ({"selection": {"where": lambda: True}}, "named like the columns"),
        (
            {"selection": {"where": 'lang == "en"'}},
            r"unknown column 'en'; .*text is written in single quotes in SQL: 'en'",
        ),
        ({"selection": {"where": lambda lang: lang}}, r"<lambda> returned the text 'en' for sample 0; return whether"),
        ({"selection": {"where": _forgets}}, "_forgets returns None for every sample; is a return missing"),
        ({"selection": {"where": str.upper}}, "where must be a plain Python function, .* but is a method_descriptor"),
        (
            {"selection": {"where": print}},
            "where must be a plain Python function, .* but is a builtin_function_or_method",
        ),
        ({"selection": {"fraction": ":5%", "group_by": "score"}}, r"group_by='score' is a column of float32"),
        ({"selection": {"fraction": ":5%", "group_by": "exact"}}, r"group_by='exact' is a column of str_decimal"),
        ({"selection": {"fraction": ":5%", "group_by": "dok"}}, r"unknown column 'dok'.*did you mean 'doc'\?"),
        (
            {"selection": {"indices": [1, 300]}},
            "names sample 300, but the stream has samples 0 to 299",
        ),
        ({"selection": {"indices": [-1]}}, "selection.indices names sample -1"),
        (
            {"selection": {"indices": [True, False]}},
            "has 2 truth values, but the stream has 300 samples",
        ),
        ({"selection": {"indices": "nothing.npy"}}, "nothing.npy"),
    ],
)
def test_what_cannot_be_is_told_with_its_stream(data: Path, asked: dict[str, Any], told: str) -> None:
    with pytest.raises(StreamingError, match=told) as caught:
        _ = StreamingDataset(streams={"rows": Stream(remote=str(data), **asked)}).size
    assert str(caught.value).count("stream 'rows'") == 1
    if isinstance(caught.value, ConfigError):
        assert (caught.value.option or "").startswith("selection.")


@pytest.mark.parametrize(
    ("asked", "told"), [({"cache_limit": 100}, "cache_limit is 100b"), ({"columns": ["z"]}, "'z'")]
)
def test_nothing_is_evaluated_for_a_dataset_that_cannot_be(
    http_store: HttpStore, tmp_path: Path, asked: dict[str, Any], told: str
) -> None:
    write_dataset(http_store.root / "x", 40)
    dataset = make_dataset(f"{http_store.url}/x", local=str(tmp_path / "local"), selection={"where": "id > 3"}, **asked)
    with pytest.raises(ConfigError, match=told):
        _ = dataset.size
    assert not [name for name in http_store.requests() if name.endswith(".mds")]


def test_columns_that_are_one_to_sql_are_refused_together(tmp_path: Path) -> None:
    with MDSWriter(out=str(tmp_path / "x"), columns={"id": "int", "Id": "int"}) as writer:
        for number in range(10):
            writer.write({"id": number, "Id": -number})
    assert read(tmp_path / "x", selection={"where": "Id > -3"}) == [0, 1, 2]
    assert read(tmp_path / "x", selection={"where": lambda id, Id: id > 3 and Id > -6}) == [4, 5]  # noqa: A006
    with pytest.raises(ConfigError, match="columns 'id' and 'Id', which are the same name in SQL"):
        read(tmp_path / "x", selection={"where": "id > 3 and Id > -6"})


def test_decimals_that_sql_does_not_have_are_refused(tmp_path: Path) -> None:
    with MDSWriter(out=str(tmp_path / "x"), columns={"id": "int", "n": "str_decimal", "m": "str_int"}) as writer:
        for number in range(50):
            writer.write({"id": number, "n": Decimal(10) ** -number, "m": 10**number})
    for name in "nm":
        with pytest.raises(ConfigError, match=rf"stream '0': where='{name} > 1' .*column '{name}'"):
            read(tmp_path / "x", selection={"where": f"{name} > 1"})
    assert read(tmp_path / "x", selection={"where": lambda n, m: n < Decimal("1e-40") and m < 10**44}) == [41, 42, 43]


def test_a_file_that_holds_no_numbers_is_refused(data: Path, tmp_path: Path) -> None:
    (tmp_path / "x.npy").write_text("not numpy")
    with pytest.raises(ConfigError, match=r"must be a \.npy file of numbers or truth values"):
        read(data, selection={"indices": str(tmp_path / "x.npy")})


@settings(max_examples=examples(25), deadline=None)
@given(bits=st.lists(st.booleans(), min_size=29, max_size=29).filter(any), batch=st.integers(1, 5), data=st.data())
def test_any_bits_give_the_dataset_that_has_these_samples_alone(
    selected_root: Path, bits: list[bool], batch: int, data: st.DataObject
) -> None:
    numbers = [number for number, bit in enumerate(bits) if bit]
    loader = make_loader(selected_root, selection={"indices": bits}, batch_size=batch, num_canonical_nodes=1)
    stop = data.draw(st.integers(0, len(loader)))
    batches = iter(loader)
    first = [next(batches)["id"].tolist() for _ in range(stop)]
    resumed = make_loader(selected_root, selection={"indices": numbers}, batch_size=7, num_canonical_nodes=1)
    resumed.load_state_dict(json_copy(loader.state_dict()))
    later = ids(resumed) if stop < len(loader) else []
    assert sorted(flat(first + later)) == numbers


@pytest.fixture(scope="module")
def selected_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("selected") / "x", 29)


@pytest.mark.parametrize(
    "asked",
    [
        {"remote": "x", "selection": {"group_by": "doc"}},
        {"remote": "x", "split": "train", "selection": {"group_by": "doc"}},
        {
            "streams": {
                "a": Stream(remote="x", selection={"group_by": "doc"}),
                "b": Stream(remote="y", selection={"fraction": ":5%"}),
            }
        },
    ],
)
def test_a_column_that_decides_nothing_is_refused(asked: dict[str, Any]) -> None:
    with assert_error(ConfigError, option="selection.group_by"):
        StreamingDataset(**asked)


def test_a_column_for_all_streams_decides_of_those_that_have_a_part() -> None:
    streams = {"a": Stream(remote="x"), "b": Stream(remote="y", selection={"fraction": ":5%"})}
    dataset = StreamingDataset(streams=streams, selection={"group_by": "doc"})
    assert dataset.streams["b"].selection.in_words() == "fraction=':5%', group_by='doc'"


def test_a_stream_reads_all_where_the_dataset_does_not(tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "x", 20)
    streams = {
        "some": Stream(remote=str(root)),
        "all": Stream(remote=str(root), selection={"where": "", "group_by": ""}),
    }
    dataset = StreamingDataset(streams=streams, selection={"where": "id < 5"})
    assert [dataset.streams[name].num_selected for name in streams] == [5, 20]


def test_what_leaves_nothing_out_is_no_selection(tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "x", 20)
    state = json_copy(make_loader(root, selection={"where": "id >= 0", "fraction": "0%:100%"}).state_dict())
    assert "selection" not in str(state)
    plain = make_loader(root)
    plain.load_state_dict(state)
    assert sorted(flat(ids(plain))) == list(range(20))


class Rules:
    LEAST = 3


def test_a_class_of_the_users_own_may_change(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="encloses a type, which may change without notice"):
        _ = make_dataset(write_dataset(tmp_path / "x", 20), selection={"where": lambda id: id > Rules.LEAST}).size  # noqa: A006
