"""Packs of documents: every token once, the same packs on any ranks and workers, and after every resume."""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from numpy.typing import NDArray
from pyarrow import parquet

from lightning_streaming import (
    MDSWriter,
    PackingConfig,
    Stream,
    StreamingDataLoader,
    StreamingDataset,
    TokenBudget,
)
from lightning_streaming.errors import ConfigError, EncodingError, SampleError, StateMismatchError
from lightning_streaming.formats.shard_format import FlatColumn
from lightning_streaming.reading.packs import documents as cut_documents
from lightning_streaming.resume import order_files
from lightning_streaming.world import World
from tests.helpers import State, json_copy, raises, worlds
from tests.schedules import Phase, schedule
from tests.tiers import some

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

CAPACITY = 64


def document(number: int, length: int) -> NDArray[np.uint16]:
    """Tokens that tell their document, of up to 300, and their place in it, up to 200."""
    return (number * 200 + np.arange(length)).astype(np.uint16)


def write_documents(
    root: Path, lengths: list[int], *, first: int = 0, encoding: str = "ndarray:uint16", **how: Any
) -> Path:
    columns = {"tokens": encoding, "labels": "ndarray:int32", "size": "int"}
    with MDSWriter(out=str(root), columns=columns, size_limit=2000, **how) as writer:
        for number, length in enumerate(lengths, first):
            tokens = document(number, length)
            stored = tokens.tobytes() if encoding == "bytes" else tokens
            writer.write({"tokens": stored, "labels": -tokens.astype(np.int32), "size": length})
    return root


LENGTHS = [int(one) for one in np.minimum(np.random.default_rng(5).lognormal(3, 1, 120).astype(int), 199)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documents(tmp_path_factory.mktemp("documents") / "a", LENGTHS)


def loader(
    root: Path | None, *, batch_size: int = 3, workers: int = 0, packing: Any = None, more: Any = None, **how: Any
) -> StreamingDataLoader:
    told = {"column": "tokens", "capacity": CAPACITY, "window": 32, **(packing or {})}
    settings = {"shuffle": True, "num_canonical_nodes": 2, **how}
    if root is not None:
        settings["remote"] = str(root)
    dataset = StreamingDataset(packing=told, **settings)
    return StreamingDataLoader(dataset, batch_size=batch_size, num_workers=workers, **(more or {}))


def packs(batches: Any) -> Iterator[dict[str, Any]]:
    """The packs of some batches, each with its rows of the batch."""
    for batch in batches:
        for number in range(len(batch["input_ids"])):
            yield {name: of[number].tolist() for name, of in batch.items() if name not in ("cu_seqlens", "max_seqlen")}


def pieces(pack: dict[str, Any]) -> Iterator[list[int]]:
    """The tokens of each document of a pack."""
    for number in range(max(pack["document_ids"]) + 1):
        yield [token for token, of in zip(pack["input_ids"], pack["document_ids"], strict=True) if of == number]


def together(loaders: list[StreamingDataLoader]) -> list[dict[str, Any]]:
    """The packs of all ranks in the order of the epoch."""
    found: list[dict[str, Any]] = []
    for step in zip(*loaders, strict=True):
        of_ranks = [list(packs([batch])) for batch in step]
        found += [rank[number] for number in range(len(of_ranks[0])) for rank in of_ranks if number < len(rank)]
    return found


METHODS = [{"method": "concat"}, {"method": "best_fit"}, {"method": "best_fit", "window": 7}]


@pytest.mark.parametrize("pack", METHODS, ids=str)
@pytest.mark.parametrize("algo", ["py1e", "blockwise", "naive"])
def test_every_token_is_in_one_pack(root: Path, pack: dict[str, Any], algo: str) -> None:
    at = loader(root, packing=pack, shuffle_algo=algo)
    for _ in range(2):
        expected = len(at)
        seen = list(packs(at))
        assert expected == -(-len(seen) // 3)
        tokens = Counter(token for pack in seen for piece in pieces(pack) for token in piece)
        assert tokens == Counter(int(one) for number, size in enumerate(LENGTHS) for one in document(number, size))
        for one in seen:
            for piece in pieces(one):  # of one document, in its order
                assert piece == list(range(piece[0], piece[0] + len(piece)))
                assert piece[0] // 200 == piece[-1] // 200


@pytest.mark.parametrize("method", ["concat", "best_fit"])
def test_with_valid_has_an_entry_for_each_pack(root: Path, method: str) -> None:
    tokens, repeats = Counter[int](), 0
    for rank in range(8):
        world, more = World(ranks_per_node=8, rank=rank), {"return_valid_mask": True, "fixed_epoch": True}
        for batch in loader(root, world=world, more=more, packing={"method": method}, batch_size=3):
            assert batch["valid"].shape == batch["input_ids"].shape[:1]
            for is_valid, pack in zip(batch["valid"].tolist(), packs([batch]), strict=True):
                repeats += not is_valid
                tokens.update(token for piece in pieces(pack) for token in piece if is_valid)
    assert repeats or method == "concat", "ranks have equally many packs; those of concat divide among them"
    assert tokens == Counter(int(one) for number, size in enumerate(LENGTHS) for one in document(number, size))


def test_best_fit_keeps_documents_whole(root: Path) -> None:
    for pack in packs(loader(root)):
        for piece in pieces(pack):
            size = LENGTHS[piece[0] // 200]
            assert len(piece) == size if size <= CAPACITY else len(piece) in (CAPACITY, size % CAPACITY)


def test_what_tells_documents_apart(root: Path) -> None:
    for batch in loader(root, packing={"along": ["labels"], "pad": {"tokens": 7, "labels": -100}}):
        count = len(batch["input_ids"])
        assert batch["input_ids"].shape == batch["labels"].shape == (count, CAPACITY)
        assert batch["input_ids"].dtype == batch["position_ids"].dtype == torch.int64
        assert batch["document_ids"].dtype == batch["cu_seqlens"].dtype == torch.int32
        is_padding = batch["document_ids"] < 0
        assert (batch["labels"] == torch.where(is_padding, -100, -batch["input_ids"])).all()
        assert (batch["input_ids"][is_padding] == 7).all()
        ends = batch["cu_seqlens"].tolist()
        assert (ends[0], ends[-1]) == (0, count * CAPACITY)
        assert batch["max_seqlen"] == max(b - a for a, b in itertools.pairwise(ends))
        flat = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(ends)])
        assert (batch["position_ids"].flatten() == flat).all()
        spans = [set(batch["document_ids"].flatten()[a:b].tolist()) for a, b in itertools.pairwise(ends)]
        assert all(len(span) == 1 for span in spans)


def test_the_last_pack_may_be_short_and_no_other_of_concat(root: Path) -> None:
    fills = [
        CAPACITY - pack["document_ids"].count(-1)
        for pack in packs(loader(root, packing={"method": "concat"}, num_canonical_nodes=1))
    ]
    assert set(fills[:-1]) == {CAPACITY}
    assert sum(fills) == sum(LENGTHS)


@pytest.mark.rotate(1)
@pytest.mark.parametrize("pack", METHODS[:2], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_packs_are_the_same_on_any_ranks_and_workers(root: Path, pack: dict[str, Any], ranks: int) -> None:
    whole = list(packs(loader(root, packing=pack)))
    for batch_size, workers in ((1, 0), (2, 1), (5, 2 if ranks < 3 else 0)):
        how: dict[str, Any] = {"packing": pack, "batch_size": batch_size, "workers": workers}
        read = together([loader(root, **how, world=world) for world in worlds(1, ranks)])
        assert read[: len(whole)] == whole
        assert len(read) - len(whole) < ranks  # so that all have equally many


WAYS: list[dict[str, Any]] = [
    {},
    {"shuffle": False},
    {"selection": {"where": "size % 3 != 1"}},
    {"selection": {"fraction": ":60%"}},
    {"epoch_size": 70},
    {"skip": ["3-4", "9"]},
]


def read_epochs(at: StreamingDataLoader, until: int) -> tuple[list[Any], list[State]]:
    """Batches up to an epoch, and the state before the first and after each."""
    batches, states = list[Any](), [json_copy(at.state_dict())]
    while states[-1]["epoch"] < until:
        for batch in at:
            batches.append(list(packs([batch])))
            states.append(json_copy(at.state_dict()))
    return batches, states


def assert_resumes(make: Any) -> None:
    """Stop after every batch, and go on: with the same packs in the same states, and in packs of other batch sizes."""
    batches, states = read_epochs(make(), 2)
    assert {state["epoch"] for state in states} == {0, 1, 2}
    for place in some(range(0, len(states), 3), 4):
        again = make()
        again.load_state_dict(states[place])
        assert read_epochs(again, 2) == (batches[place:], states[place:])
    flat = [pack for batch in batches for pack in batch]
    for place in (1, 4):
        other = make(batch_size=2)
        other.load_state_dict(states[place])
        read = list(packs(other))
        assert read == flat[3 * place : 3 * place + len(read)]
        assert len(read) > 10


@pytest.mark.rotate(2)
@pytest.mark.parametrize("pack", METHODS[:2], ids=str)
@pytest.mark.parametrize("how", WAYS, ids=str)
def test_resuming_at_every_step(root: Path, pack: dict[str, Any], how: dict[str, Any]) -> None:
    assert_resumes(lambda batch_size=3: loader(root, packing=pack, batch_size=batch_size, **how))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documents(tmp_path_factory.mktemp("documents") / "b", LENGTHS[:50], first=150)


@pytest.mark.rotate(1)
@pytest.mark.parametrize("pack", METHODS[:2], ids=str)
@pytest.mark.parametrize("algo", ["py1e", "blockwise"])
def test_mixtures_and_phases(root: Path, other: Path, pack: dict[str, Any], algo: str) -> None:
    streams = {"a": Stream(remote=str(root)), "b": Stream(remote=str(other))}
    phases = [Phase(name="one", mix={"a": 3.0, "b": 1.0}, end=60), Phase(name="two", mix={"a": (1.0, 2.0), "b": 1.0})]
    how: dict[str, Any] = {"streams": streams, "schedule": schedule(phases), "epoch_size": 150, "shuffle_algo": algo}
    assert_resumes(lambda batch_size=3: loader(None, packing=pack, batch_size=batch_size, **how))
    # What comes after a phase may be another: the packs before stay what they were.
    seen, states = read_epochs(loader(None, packing=pack, **how), 1)
    place = next(number for number, state in enumerate(states) if len(state["fingerprint"]["schedule"]) == 2) - 1
    later = [phases[0], Phase(name="other", mix={"b": 1.0})]
    changed = loader(None, packing=pack, **{**how, "schedule": schedule(later), "epoch_size": 90})
    changed.load_state_dict(states[place])
    rest = list(packs(changed))
    fresh = list(packs(loader(None, packing=pack, **{**how, "schedule": schedule(later), "epoch_size": 90})))
    assert [pack for batch in seen[:place] for pack in batch] + rest == fresh


SOURCES: list[dict[str, Any]] = [
    {"transform": lambda sample: sample},
    {
        "transform": lambda sample: {"tokens": torch.from_numpy(sample["tokens"].astype(np.int32))},
        "packing": {"lengths": "size"},
    },
    {"packing": {"lengths": lambda size: size}},
    {"packing": {"lengths": "size"}},
]


@pytest.mark.rotate(2)
@pytest.mark.parametrize("how", SOURCES, ids=range(len(SOURCES)))
def test_however_documents_and_lengths_come(root: Path, how: dict[str, Any]) -> None:
    expected = [pack["input_ids"] for pack in packs(loader(root))]
    assert [pack["input_ids"] for pack in packs(loader(root, workers=1, **how))] == expected


def test_bytes_are_tokens_of_a_type(root: Path, tmp_path: Path) -> None:
    as_bytes = write_documents(tmp_path / "bytes", LENGTHS, encoding="bytes")
    expected = [pack["input_ids"] for pack in packs(loader(root, num_canonical_nodes=1))]
    found = loader(as_bytes, packing={"dtype": "uint16"}, num_canonical_nodes=1, shuffle_algo="naive")
    expected = [pack["input_ids"] for pack in packs(loader(root, num_canonical_nodes=1, shuffle_algo="naive"))]
    assert [pack["input_ids"] for pack in packs(found)] == expected


def test_a_collate_function_gets_packs(root: Path) -> None:
    def collate(given: list[dict[str, Any]]) -> tuple[int, list[int]]:
        return len(given), [int((one["document_ids"] >= 0).sum()) for one in given]

    sizes = list(loader(root, more={"collate_fn": collate}))
    assert sum(tokens for _, of in sizes for tokens in of) == sum(LENGTHS)
    assert {count for count, _ in sizes[:-1]} == {3}


def test_what_a_collate_function_says_is_told_with_all_documents(root: Path) -> None:
    def collate(given: list[dict[str, Any]]) -> None:
        raise ValueError("no such batch")

    keys = next(iter(loader(root, batch_size=2, shuffle=False, more={"return_keys": True}))).keys
    assert len(keys) > 2
    names = [f'"sample_index": {key.sample_index}' for key in keys]
    with raises(SampleError, "no such batch", *names):
        list(loader(root, batch_size=2, shuffle=False, more={"collate_fn": collate}))


def test_plain_iteration_gives_packs(root: Path) -> None:
    at = loader(root, batch_size=1)
    dataset = StreamingDataset(
        remote=str(root),
        shuffle=True,
        num_canonical_nodes=2,
        batch_size=4,
        packing=PackingConfig(column="tokens", capacity=CAPACITY, window=32),
    )
    assert len(dataset) == len(at)
    assert list(packs(dataset)) == list(packs(at))


def test_keys_name_the_documents_in_packs(root: Path) -> None:
    at = loader(root, more={"return_keys": True})
    for batch, keys in at:
        documents = [piece for pack in packs([batch]) for piece in pieces(pack)]
        assert len(keys) == len(documents)
        for place, piece in enumerate(documents):
            whole = at.dataset.restore_sample(keys[place])["tokens"].tolist()
            assert piece == whole[piece[0] % 200 :][: len(piece)]


def test_longer_documents(root: Path) -> None:
    for longer, kept in (
        ("truncate", [min(size, CAPACITY) for size in LENGTHS]),
        ("drop", [size for size in LENGTHS if size <= CAPACITY]),
    ):
        found = [len(piece) for pack in packs(loader(root, packing={"longer": longer})) for piece in pieces(pack)]
        assert Counter(found) == Counter(size for size in kept if size)
    with raises(ConfigError, "longer"):
        len(loader(root, packing={"longer": "error"}))


def test_a_state_is_of_its_packs(root: Path) -> None:
    at = loader(root)
    next(iter(at))
    state = json_copy(at.state_dict())
    at.close()
    for pack in ({"capacity": 65}, {"method": "concat"}, {"window": 31}, {"lengths": "size"}):
        changed = loader(root, packing=pack)
        changed.load_state_dict(state)
        with raises(StateMismatchError, "packing"):
            len(changed)
    unpacked = StreamingDataLoader(
        StreamingDataset(remote=str(root), shuffle=True, num_canonical_nodes=2), batch_size=3
    )
    unpacked.load_state_dict(state)
    with raises(StateMismatchError, "packing"):
        len(unpacked)


def _counted(shift: int) -> Any:
    """A function that says lengths; what it encloses is no part of its name."""
    return lambda size: max(1, size - shift * (size % 3))


KINDS: list[tuple[type[PackingConfig] | type[TokenBudget], dict[str, Any]]] = [
    (PackingConfig, {"column": "tokens", "capacity": CAPACITY, "longer": "truncate"}),
    (TokenBudget, {"column": "tokens", "tokens": 400, "longer": "truncate"}),
]


@pytest.mark.parametrize(("kind", "told"), KINDS, ids=["pack", "budget"])
@pytest.mark.parametrize("phases", [(), (Phase(name="one", mix={"a": 1.0, "b": 1.0}),)], ids=["epoch", "phases"])
def test_a_state_is_of_its_lengths(root: Path, other: Path, kind: Any, told: dict[str, Any], phases: Any) -> None:
    def at(shift: int) -> StreamingDataLoader:
        streams = {"a": Stream(remote=str(root)), "b": Stream(remote=str(other))}
        more: dict[str, Any] = {"schedule": schedule(phases), "epoch_size": 100} if phases else {}
        counted = kind(**told, lengths=_counted(shift))
        dataset = StreamingDataset(streams=streams, shuffle=True, **{kind.option: counted}, **more)
        return StreamingDataLoader(dataset, collate_fn=len, batch_size=1)

    begun = at(0)
    for _ in zip(range(3), begun, strict=False):
        pass
    state = json_copy(begun.state_dict())
    begun.close()
    changed = at(1)
    changed.load_state_dict(state)
    with raises(StateMismatchError, "streams.a.lengths", "streams.b.lengths", "lengths of documents"):
        len(changed)
    # What was saved before states knew of lengths has the name of the function alone.
    for stream in state["fingerprint"]["streams"].values():
        del stream["lengths"]
    earlier = at(1)
    earlier.load_state_dict(state)
    assert len(earlier)


@pytest.mark.nightly
def test_a_state_of_many_streams_is_of_their_lengths(tmp_path: Path) -> None:
    names = [f"stream-with-a-name-{number:02}" for number in range(30)]
    for number, name in enumerate(names):
        write_documents(tmp_path / name, [5, 6, 7], first=number)

    def at(shift: int) -> StreamingDataLoader:
        streams = {name: Stream(remote=str(tmp_path / name)) for name in names}
        return loader(None, streams=streams, packing={"longer": "truncate", "lengths": _counted(shift)})

    state = json_copy(at(0).state_dict())
    whole = state["fingerprint"]["all_streams"]
    changed, same = at(1), at(0)
    changed.load_state_dict(state)
    with raises(StateMismatchError, "all_streams.lengths"):
        len(changed)
    same.load_state_dict(state)
    assert len(same)
    del whole["lengths"]
    changed = at(1)
    changed.load_state_dict(state)
    assert len(changed)


@pytest.mark.parametrize("shift", [0, 1])
def test_lengths_of_a_stream_that_has_grown_are_compared_as_far_as_it_was_read(tmp_path: Path, shift: int) -> None:
    written = write_documents(tmp_path / "grows", LENGTHS[:40])
    how: dict[str, Any] = {"follow_appends": True}
    at = loader(written, packing={"longer": "truncate", "lengths": _counted(0)}, **how)
    next(iter(at))
    state = json_copy(at.state_dict())
    at.close()
    write_documents(written, LENGTHS[40:60], first=40, mode="append")
    again = loader(written, packing={"longer": "truncate", "lengths": _counted(shift)}, **how)
    again.load_state_dict(state)
    if not shift:
        assert len(again)
        return
    with raises(StateMismatchError, "streams.0.lengths: saved"):
        len(again)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"packing": {"capacity": 0}}, "capacity"),
    ({"packing": {"method": "first_fit"}}, "method"),
    ({"packing": {"column": "token"}}, "token"),
    ({"packing": {"along": ["tokens"]}}, "along"),
    ({"packing": {"pad": {"label": 0}}}, "label"),
    ({"packing": {"without": ["ids"]}}, "without"),
    ({"packing": {"as_dtype": "text"}}, "as_dtype"),
    ({"batching_method": "stratified"}, "batching_method"),
]


@pytest.mark.parametrize(("how", "named"), WRONG, ids=[named for _, named in WRONG])
def test_what_cannot_be_is_refused(root: Path, how: dict[str, Any], named: str) -> None:
    with raises(ConfigError, named):
        len(loader(root, **how))


def test_documents_that_are_not_as_long_as_said_are_refused(root: Path, tmp_path: Path) -> None:
    with (
        raises(SampleError, "labels"),
        MDSWriter(out=str(tmp_path / "x"), columns={"tokens": "ndarray:uint16", "labels": "ndarray:uint16"}) as writer,
    ):
        writer.write({"tokens": document(0, 5), "labels": document(0, 4)})
        writer.finish()
        list(loader(tmp_path / "x", packing={"along": ["labels"]}))
    with raises(SampleError, "packing.lengths"):
        list(loader(root, transform=lambda sample: {"tokens": sample["tokens"][:-1]}))


LONGER: list[dict[str, Any]] = [
    {"packing": {"lengths": lambda size: size - 1}},
    {"packing": {"lengths": lambda size: size - 1, "method": "concat"}},
    {"packing": {"longer": "truncate"}, "transform": lambda sample: {"tokens": np.append(sample["tokens"], [1])}},
    {"transform": lambda sample: {"tokens": np.append(sample["tokens"], [1])}},
]


@pytest.mark.parametrize("how", LONGER, ids=range(len(LONGER)))
def test_documents_that_are_longer_than_said_are_refused(root: Path, how: dict[str, Any]) -> None:
    with raises(SampleError, "was said to have", "packing.lengths"):
        list(loader(root, **how))


def test_batches_are_skipped_by_the_lengths_of_their_own_epochs(root: Path) -> None:
    whole, lengths = [], []
    at = loader(root, batch_size=1)
    for _ in range(6):
        epoch = [batch["input_ids"].tolist() for batch in at]
        whole += epoch
        lengths.append(len(epoch))
    assert len(set(lengths)) > 1
    number = sum(lengths[:5]) + 2
    skipping = loader(root, batch_size=1, skip=[number])
    assert [batch["input_ids"].tolist() for _ in range(6) for batch in skipping] == whole[:number] + whole[number + 1 :]


def test_statistics_count_tokens(root: Path) -> None:
    at = loader(root)
    list(at)
    found = at.statistics()
    assert found.tokens == sum(LENGTHS)
    assert found.token_room == CAPACITY * sum(1 for _ in packs(loader(root)))


def test_a_rank_that_reads_nothing_counts_packs(root: Path) -> None:
    at = loader(root, world=World(is_reader=False))
    assert len(list(at)) == len(loader(root))
    assert at.state_dict()["epoch"] == 1


def test_a_batch_to_skip_is_counted_over_epochs_that_differ(tmp_path: Path) -> None:
    lengths = [int(one) for one in np.random.default_rng(1).integers(20, 60, 70)]
    written = write_documents(tmp_path / "differ", lengths)
    how: dict[str, Any] = {
        "packing": {"capacity": 100, "window": 16},
        "shuffle_seed": 3,
        "num_canonical_nodes": 1,
        "batch_size": 1,
    }
    whole = [pack for batch in read_epochs(loader(written, **how), 6)[0] for pack in batch]
    at = loader(written, **how)
    counts = {len(list(at)) for _ in range(6)}
    assert len(counts) > 1
    for batch in (40, len(whole) - 40, len(whole) - 2):
        kept = [pack for one in read_epochs(loader(written, **how, skip=[batch]), 6)[0] for pack in one]
        assert kept == whole[:batch] + whole[batch + 1 :]


@pytest.mark.rotate(2)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("pack", [{}, {"lengths": "size"}], ids=str)
def test_documents_that_are_appended_are_packed_from_the_next_epoch_on(
    tmp_path: Path, workers: int, pack: dict[str, Any]
) -> None:
    written = write_documents(tmp_path / "grows", LENGTHS[:40])
    how: dict[str, Any] = {
        "follow_appends": True,
        "packing": pack,
        "workers": workers,
        "more": {"persistent_workers": workers > 0},
    }
    whole = list(packs(loader(written, **how)))
    at = loader(written, **how)
    under_way = iter(at)
    begun = list(packs([next(under_way)]))
    write_documents(written, LENGTHS[40:60], first=40, mode="append")
    assert begun + list(packs(under_way)) == whole
    assert at.refresh()
    state = json_copy(at.state_dict())
    grown = list(packs(at))
    tokens = Counter(token for pack in grown for piece in pieces(pack) for token in piece)
    assert tokens == Counter(int(one) for number, size in enumerate(LENGTHS[:60]) for one in document(number, size))
    at.close()
    again = loader(written, follow_appends=True, packing=pack)
    again.load_state_dict(state)
    assert list(packs(again)) == grown


def test_an_epoch_without_tokens_is_refused(tmp_path: Path) -> None:
    with MDSWriter(out=str(tmp_path / "empty"), columns={"tokens": "bytes"}) as writer:
        for _ in range(9):
            writer.write({"tokens": b""})
    longer = write_documents(tmp_path / "longer", [CAPACITY + 1] * 9)
    for at in (loader(tmp_path / "empty", packing={"dtype": "uint16"}), loader(longer, packing={"longer": "drop"})):
        with raises(ConfigError, "no pack", "9 documents"):
            list(at)


@pytest.mark.rotate(1)
@pytest.mark.parametrize("skip", [(), ("1",), ("0-30",)], ids=str)
@pytest.mark.parametrize("drop_last", [False, True])
def test_epochs_of_fewer_packs_than_ranks_or_batches_have(tmp_path: Path, drop_last: bool, skip: Any) -> None:
    few = write_documents(tmp_path / "few", [30] * 3)
    for world in worlds(2, 1) if skip else worlds(2, 4):
        at = loader(few, batch_size=5, more={"drop_last": drop_last}, skip=skip, world=world)
        at.load_state_dict(json_copy(at.state_dict()))
        read = [len(list(packs(at))) for _ in range(2)]
        assert read == ([0, 0] if drop_last else [1, 1])


@pytest.mark.parametrize("damaged", [False, True])
def test_who_plans_many_documents_may_draw_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    monkeypatch.setenv("LIGHTNING_STREAMING_RUNTIME", str(tmp_path / "runtime"))
    monkeypatch.setattr(order_files, "_LOCK_SECONDS", 5.0)
    with MDSWriter(out=str(tmp_path / "many"), columns={"tokens": "ndarray:uint16"}) as writer:
        for number in range((1 << 16) + 1):
            writer.write({"tokens": np.full(3, number % 251, np.uint16)})
    at = loader(tmp_path / "many", packing={"capacity": 2048}, shuffle_algo="naive")
    expected = len(at)  # planned, and then lost to whoever cleans temporary directories
    for path in (tmp_path / "runtime" / "orders").glob("*.*"):
        held = path.read_bytes()
        path.unlink()
        if damaged:  # as when the machine went down
            path.write_bytes(held[:-4096])
    assert len(list(at)) == expected


@pytest.mark.parametrize("how", [{}, {"transform": lambda sample: sample}], ids=["joined", "one by one"])
def test_a_filling_that_does_not_fit_is_refused(root: Path, how: dict[str, Any]) -> None:
    with raises(SampleError, "packing.pad=-100", "uint16"):
        list(loader(root, packing={"pad": -100, "as_dtype": None}, **how))
    with raises(SampleError, "packing.pad=-100", "uint32"):
        list(loader(root, packing={"pad": -100, "as_dtype": "uint32"}, **how))
    with raises(SampleError, "packing.pad=0.5", "int64"):
        list(loader(root, packing={"pad": 0.5}, **how))


@pytest.mark.parametrize("how", [{}, {"transform": lambda sample: sample}], ids=["joined", "one by one"])
def test_weights_of_tokens_stay_as_they_are(tmp_path: Path, how: dict[str, Any]) -> None:
    columns = {"tokens": "ndarray:uint16", "weights": "ndarray:float32"}
    with MDSWriter(out=str(tmp_path / "weighted"), columns=columns) as writer:
        for length in (3, 9, 4):
            writer.write({"tokens": np.arange(length, dtype=np.uint16), "weights": np.full(length, 0.25, np.float32)})
    told = {"along": ["weights"], "pad": {"weights": 0.5, "tokens": -1}, "capacity": 10}
    for batch in loader(tmp_path / "weighted", packing=told, **how):
        is_padding = batch["document_ids"] < 0
        assert (batch["input_ids"].dtype, batch["weights"].dtype) == (torch.int64, torch.float32)
        assert (batch["weights"] == torch.where(is_padding, 0.5, 0.25)).all()
        assert (batch["input_ids"] < 0).equal(is_padding)
    halves = loader(tmp_path / "weighted", packing={**told, "as_dtype": "float16"}, **how)
    assert {batch["weights"].dtype for batch in halves} == {torch.float16}


@pytest.mark.parametrize("how", [{}, {"transform": lambda sample: sample}], ids=["joined", "one by one"])
def test_a_filling_need_fit_only_the_type_that_is_wanted(root: Path, how: dict[str, Any]) -> None:
    zeros = loader(root, **how)
    for batch, filled in zip(zeros, loader(root, packing={"pad": -100}, **how), strict=True):
        is_padding = batch["document_ids"] < 0
        assert (filled["input_ids"] == torch.where(is_padding, -100, batch["input_ids"])).all()


def test_where_values_lie_is_known_of_open_shards_alone(root: Path, tmp_path: Path) -> None:
    def known() -> int:
        return sum(isinstance(one, FlatColumn) for one in gc.get_objects())

    at = loader(
        None,
        streams={"a": Stream(remote=f"file://{root}", local=str(tmp_path / "a"))},
        cache_limit="40kb",
        shuffle=False,
        batch_size=1,
        packing={"window": 2},
        num_canonical_nodes=1,
    )
    gc.collect()
    before = known()
    most = max(known() - before for step, _ in enumerate(at) if step % 16 == 0)  # looking at all objects takes long
    num_shards = len(list(root.glob("shard.*")))
    assert 0 < most < 0.75 * num_shards


def test_columns_that_leave_out_that_of_the_tokens_are_told(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"tokens": [[1, 2]], "id": [1]}), tmp_path / "a.parquet")
    dataset = StreamingDataset(
        remote=str(tmp_path), format="parquet", columns=["id"], packing={"column": "tokens", "capacity": 4}
    )
    with raises(EncodingError, "stream '0'", "a.parquet", "column 'tokens' is needed, but columns= leaves it out"):
        next(iter(StreamingDataLoader(dataset, batch_size=1)))


class _Counting:
    """A transform that counts its calls by document, and draws from a generator that has no key."""

    def __init__(self) -> None:
        self.calls = Counter[int]()

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        self.calls[int(sample["tokens"][0]) // 200] += 1
        drawn = np.random.randint(1 << 20)  # noqa: NPY002
        return {"tokens": sample["tokens"], "labels": np.full(len(sample["tokens"]), drawn)}


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of which most are cut."""
    return write_documents(tmp_path_factory.mktemp("long") / "a", LONG)


LONG = [180, 5, 199, 30, 120, 64, 9, 150]


CUT: list[dict[str, Any]] = [{"method": "best_fit"}, {"method": "concat"}]


@pytest.mark.parametrize("pack", CUT, ids=str)
@pytest.mark.parametrize("threads", [0, 2])
def test_a_document_is_transformed_once_for_all_of_its_pieces(long: Path, pack: dict[str, Any], threads: int) -> None:
    counting = _Counting()
    told = {**pack, "capacity": 8, "along": ["labels"]}
    at = loader(long, packing=told, transform=counting, decode={"threads": threads})
    drawn: dict[int, set[int]] = {}
    for one in packs(at):
        for token, label, of in zip(one["input_ids"], one["labels"], one["document_ids"], strict=True):
            if of >= 0:
                drawn.setdefault(token // 200, set()).add(label)
    assert counting.calls == dict.fromkeys(range(8), 1)
    assert {len(labels) for labels in drawn.values()} == {1}


@pytest.mark.parametrize("pack", CUT, ids=str)
def test_pieces_that_several_ranks_read_are_of_one_document(long: Path, pack: dict[str, Any]) -> None:
    drawn: dict[int, set[int]] = {}
    for world in worlds(1, 3):
        np.random.seed(world.rank)  # noqa: NPY002
        at = loader(
            long, packing={**pack, "capacity": 8, "along": ["labels"]}, transform=_Counting(), world=world, batch_size=1
        )
        for one in packs(at):
            for token, label, of in zip(one["input_ids"], one["labels"], one["document_ids"], strict=True):
                if of >= 0 and LONG[token // 200] > 8:
                    drawn.setdefault(token // 200, set()).add(label)
    assert {len(labels) for labels in drawn.values()} == {1}
    assert len({label for labels in drawn.values() for label in labels}) == len(drawn) > 5


def test_documents_are_kept_up_to_a_number_of_bytes(long: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut_documents, "KEPT_BYTES", 4000)
    counting = _Counting()
    told = {"capacity": 8, "along": ["labels"], "method": "best_fit"}
    expected = [one["input_ids"] for one in packs(loader(long, packing=told))]
    assert [one["input_ids"] for one in packs(loader(long, packing=told, transform=counting))] == expected
    assert max(counting.calls.values()) > 1


class _Subclass(StreamingDataset):
    made = 0

    def __getitem__(self, index: Any) -> Any:
        type(self).made += 1
        return super().__getitem__(index)


def test_a_subclass_makes_a_document_once(long: Path) -> None:
    dataset = _Subclass(remote=str(long), num_canonical_nodes=1, packing={"column": "tokens", "capacity": 8})
    assert len(list(packs(StreamingDataLoader(dataset, batch_size=2)))) > 50
    assert _Subclass.made == 8
