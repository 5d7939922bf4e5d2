"""Groups of whole documents within a budget of tokens: the same on any ranks and workers, and after every resume."""

from __future__ import annotations

import itertools
import pickle
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from lightning_streaming import Stream, StreamingDataLoader, StreamingDataset, TokenBudget
from lightning_streaming.errors import ConfigError, SampleError, StateMismatchError
from lightning_streaming.logs import read_sample_log
from lightning_streaming.world import World
from tests.helpers import State, json_copy, raises, worlds
from tests.reading.test_packing import LENGTHS, write_documents
from tests.schedules import Phase, schedule
from tests.tiers import examples, some

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

TOKENS = 256
Document = tuple[int, ...]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documents(tmp_path_factory.mktemp("documents") / "a", LENGTHS)


def loader(
    root: Path | None, *, workers: int = 0, token_budget: Any = None, more: Any = None, **how: Any
) -> StreamingDataLoader:
    told = {"column": "tokens", "tokens": TOKENS, "buckets": 4, "window": 32, **(token_budget or {})}
    chosen = {"shuffle": True, "num_canonical_nodes": 2, **how}
    if root is not None:
        chosen["remote"] = str(root)
    dataset = StreamingDataset(token_budget=told, **chosen)
    return StreamingDataLoader(dataset, num_workers=workers, **(more or {}))


def documents_in(batch: dict[str, torch.Tensor]) -> list[Document]:
    """The tokens of each document of a batch, without what pads them."""
    sizes = batch["lengths"].tolist()
    return [tuple(row[:size]) for row, size in zip(batch["input_ids"].tolist(), sizes, strict=True)]


def groups(batches: Any) -> list[list[Document]]:
    return [documents_in(batch) for batch in batches]


def together(loaders: list[StreamingDataLoader]) -> list[list[Document]]:
    """The groups of all ranks in the order of the epoch."""
    return list(itertools.chain(*zip(*map(groups, loaders), strict=True)))


def token_counts(found: list[list[Document]]) -> Counter[Document]:
    return Counter(itertools.chain(*found))


def expected(cut: Any = lambda size: size) -> Counter[Document]:
    """All documents that have tokens, each with its first ``cut(size)``."""
    return Counter(
        tuple(range(200 * number, 200 * number + cut(size))) for number, size in enumerate(LENGTHS) if cut(size)
    )


def test_a_batch_is_whole_documents_padded_to_the_longest(root: Path) -> None:
    at = loader(root, token_budget={"along": ["labels"], "pad": {"tokens": 7, "labels": -100}})
    num_documents, num_batches = [], len(at)
    for batch in at:
        count, longest = batch["input_ids"].shape
        assert batch["labels"].shape == (count, longest)
        assert batch["input_ids"].dtype == batch["labels"].dtype == batch["lengths"].dtype == torch.int64
        assert count * longest <= TOKENS
        assert batch["lengths"].shape == (count,)
        assert batch["lengths"].max() == longest
        is_padding = torch.arange(longest) >= batch["lengths"][:, None]
        assert (batch["input_ids"][is_padding] == 7).all()
        assert (batch["labels"] == torch.where(is_padding, -100, -batch["input_ids"])).all()
        num_documents.append(count)
    assert len(set(num_documents)) > 3
    assert len(num_documents) == num_batches


@pytest.mark.parametrize("algo", ["py1e", "blockwise", "naive"])
def test_every_document_is_in_one_group(root: Path, algo: str) -> None:
    at = loader(root, shuffle_algo=algo)
    for _ in range(2):
        count, found = len(at), groups(at)
        assert token_counts(found) == expected()
        assert len(found) == count


def test_documents_of_a_group_are_of_about_one_length(root: Path) -> None:
    tokens, room = sum(LENGTHS), {}
    for buckets in (1, 12):
        at = loader(root, token_budget={"buckets": buckets, "window": 120})
        room[buckets] = sum(batch["input_ids"].numel() for batch in at)
        found = at.statistics()
        assert (found.tokens, found.token_room) == (tokens, room[buckets])
    assert tokens / room[12] > 0.8 > tokens / room[1]


@pytest.mark.rotate(2)
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("ranks", range(1, 9))
def test_groups_are_the_same_on_any_ranks_and_workers(root: Path, ranks: int) -> None:
    whole = groups(loader(root))
    for workers in (0, 1, 2, 3) if ranks == 3 else (0,):
        loaders = [loader(root, world=world, workers=workers) for world in worlds(1, ranks)]
        assert {len(one) for one in loaders} == {-(-len(whole) // ranks)}
        read = together(loaders)
        assert read[: len(whole)] == whole
        assert len(read) - len(whole) < ranks  # so that all have equally many


@given(
    nodes=st.sampled_from([(1, 1), (1, 5), (2, 1), (2, 3), (4, 2)]),
    window=st.integers(1, 60),
    buckets=st.integers(1, 6),
    tokens=st.integers(199, 900),
    longer=st.sampled_from(["truncate", "drop"]),
)
@settings(max_examples=examples(15), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_budget_is_the_same_on_any_nodes(root: Path, nodes: tuple[int, int], **budget: Any) -> None:
    whole = groups(loader(root, token_budget=budget, num_canonical_nodes=4))
    ranks = [groups(loader(root, token_budget=budget, num_canonical_nodes=4, world=one)) for one in worlds(*nodes)]
    for step, read in enumerate(zip(*ranks, strict=True)):
        here = whole[step * len(ranks) : (step + 1) * len(ranks)]
        assert not Counter(map(tuple, here)) - Counter(map(tuple, read))
    assert token_counts(whole) == expected()
    assert all(len(group) * max(map(len, group)) <= budget["tokens"] for group in whole)


WAYS: list[dict[str, Any]] = [
    {},
    {"shuffle": False},
    {"selection": {"where": "size % 3 != 1"}},
    {"epoch_size": 70},
    {"skip": ["3-4", "9"]},
    {"token_budget": {"longer": "truncate", "tokens": 64}},
    {"transform": lambda sample: {"tokens": sample["tokens"] + 1}},
]


def read_epochs(at: StreamingDataLoader, until: int) -> tuple[list[Any], list[State]]:
    """Groups up to an epoch, and the state before the first and after each."""
    found, states = list[Any](), [json_copy(at.state_dict())]
    while states[-1]["epoch"] < until:
        for batch in at:
            found.append(documents_in(batch))
            states.append(json_copy(at.state_dict()))
    return found, states


def assert_resumes(make: Any, every: int = 1) -> None:
    """Stop after every group, or some, and go on: with the same groups in the same states, and on other ranks."""
    found, states = read_epochs(make(), 2)
    assert {state["epoch"] for state in states} == {0, 1, 2}
    for place in some(range(0, len(states), every), 12):
        again = make()
        again.load_state_dict(states[place])
        if place % 7 == 0:
            assert read_epochs(again, 2) == (found[place:], states[place:])
        else:
            for number, batch in zip(range(place, min(place + 2, len(found))), again, strict=False):
                assert documents_in(batch) == found[number]
            again.close()
    first = next(number for number, state in enumerate(states) if state["epoch"] == 1)
    for place in (1, first // 2):
        elsewhere = [make(world=world) for world in worlds(1, 3)]
        for one in elsewhere:
            one.load_state_dict(states[place])
        assert together(elsewhere)[: first - place] == found[place:first]


@pytest.mark.rotate(2)
@pytest.mark.parametrize("how", WAYS, ids=lambda how: ",".join(how) or "plain")
def test_resuming_at_every_group(root: Path, how: dict[str, Any]) -> None:
    assert_resumes(lambda **other: loader(root, **how, **other))


@pytest.mark.nightly
def test_phases_are_grouped_step_by_step(root: Path, tmp_path: Path) -> None:
    other = write_documents(tmp_path / "b", LENGTHS[:50], first=150)
    streams = {"a": Stream(remote=str(root)), "b": Stream(remote=str(other))}
    phases = [Phase(name="one", mix={"a": 3.0, "b": 1.0}, end=60), Phase(name="two", mix={"a": (1.0, 2.0), "b": 1.0})]
    how: dict[str, Any] = {"streams": streams, "schedule": schedule(phases), "epoch_size": 150}
    assert_resumes(lambda **other: loader(None, **how, **other), every=7)


SOURCES: list[dict[str, Any]] = [
    {"transform": lambda sample: sample},
    {
        "transform": lambda sample: {"tokens": torch.from_numpy(sample["tokens"].astype(np.int32))},
        "token_budget": {"lengths": "size"},
    },
    {"token_budget": {"lengths": lambda size: size}},
]


@pytest.mark.rotate(2)
@pytest.mark.parametrize("how", SOURCES, ids=range(len(SOURCES)))
@pytest.mark.parametrize("budget", [{}, {"longer": "truncate", "tokens": 64}], ids=str)
def test_however_documents_and_lengths_come(root: Path, how: dict[str, Any], budget: dict[str, Any]) -> None:
    told = {**how, "token_budget": {**budget, **how.get("token_budget", {}), "pad": -100}}
    found, wanted = loader(root, workers=1, **told), loader(root, token_budget={**budget, "pad": -100})
    for batch, other in zip(found, wanted, strict=True):
        assert batch.keys() == other.keys()
        assert all(torch.equal(batch[name], other[name]) for name in batch)


def test_a_collate_function_gets_the_samples_of_a_group(root: Path) -> None:
    def collate(given: list[dict[str, Any]]) -> list[Document]:
        assert type(given) is list
        assert all({*one} == {"tokens", "labels", "size"} for one in given)
        return [tuple(one["tokens"].tolist()) for one in given]

    whole = groups(loader(root))
    assert list(loader(root, more={"collate_fn": collate})) == whole
    by_lengths = {"column": None, "lengths": "size"}
    assert list(loader(root, token_budget=by_lengths, workers=1, more={"collate_fn": collate})) == whole
    with raises(ConfigError, "collate_fn", "budget"):
        loader(root, token_budget=by_lengths)


def test_what_a_collate_function_says_is_told_with_the_documents(root: Path) -> None:
    def collate(given: list[dict[str, Any]]) -> None:
        raise ValueError("no such frames")

    with raises(SampleError, "no such frames", '"sample_index"'):
        list(loader(root, more={"collate_fn": collate}))


def test_documents_that_are_cut_come_to_a_collate_function_cut(root: Path) -> None:
    at = loader(root, token_budget={"tokens": 40, "longer": "truncate"}, more={"collate_fn": lambda given: given})
    found = [tuple(one["tokens"].tolist()) for group in at for one in group]
    assert Counter(found) == expected(lambda size: min(size, 40))
    renamed = loader(
        root, token_budget={"tokens": 40, "longer": "truncate"}, transform=lambda one: {"ids": one["tokens"]}
    )
    with raises(SampleError, "'tokens'", "budget"):
        list(renamed)


def test_longer_documents(root: Path) -> None:
    for longer, cut in (("truncate", lambda size: min(size, 40)), ("drop", lambda size: size if size <= 40 else 0)):
        assert token_counts(groups(loader(root, token_budget={"tokens": 40, "longer": longer}))) == expected(cut)
    with raises(ConfigError, "tokens=40", "longer"):
        len(loader(root, token_budget={"tokens": 40}))


NOT_AS_SAID: list[dict[str, Any]] = [
    {"token_budget": {"lengths": lambda size: size + 1}},
    {"token_budget": {"lengths": lambda size: size - 1}},
    {"transform": lambda sample: {"tokens": np.repeat(sample["tokens"], 2)}},
    {"transform": lambda sample: {"tokens": sample["tokens"][1:]}},
]


@pytest.mark.parametrize("how", NOT_AS_SAID, ids=range(len(NOT_AS_SAID)))
def test_documents_that_are_not_as_long_as_said_are_refused(root: Path, how: dict[str, Any]) -> None:
    with raises(SampleError, "budget.lengths"):
        list(loader(root, **how))


def test_plain_iteration_gives_groups(root: Path) -> None:
    whole = groups(loader(root))
    dataset = loader(root).dataset
    assert len(dataset) == len(whole)
    found = [[tuple(one["tokens"].tolist()) for one in group] for group in dataset]
    assert found == whole
    plain = DataLoader(loader(root).dataset, batch_size=None)
    assert [[tuple(one["tokens"].tolist()) for one in group] for group in plain] == whole


def test_keys_and_valid_are_of_documents(root: Path) -> None:
    for world in worlds(1, 2):
        at = loader(root, world=world, more={"return_keys": True, "return_valid_mask": True})
        for batch, keys in at:
            assert len(keys) == len(batch["lengths"]) == len(batch["valid"])
            for key, document in zip(keys, documents_in(batch), strict=True):
                assert tuple(at.dataset.restore_sample(key)["tokens"].tolist()) == document


def test_the_log_names_the_documents_that_were_read(root: Path, tmp_path: Path) -> None:
    at = loader(root, debug={"sample_log": str(tmp_path / "log")})
    whole = groups(at)
    lines = read_sample_log(tmp_path / "log" / "rank0-worker0.jsonl")
    logged = [tuple(at.dataset.restore_sample(line.key)["tokens"].tolist()) for line in lines]
    assert logged == list(itertools.chain(*whole))


def test_a_state_is_of_its_groups(root: Path) -> None:
    at = loader(root)
    next(iter(at))
    state = json_copy(at.state_dict())
    at.close()
    for budget in ({"tokens": 257}, {"buckets": 5}, {"window": 31}, {"lengths": "size"}, {"longer": "drop"}):
        changed = loader(root, token_budget=budget)
        changed.load_state_dict(state)
        with raises(StateMismatchError, "token_budget"):
            len(changed)
    packed = StreamingDataset(remote=str(root), shuffle=True, packing={"column": "tokens", "capacity": TOKENS})
    packed.load_state_dict(state)
    with raises(StateMismatchError, "token_budget"):
        len(packed)


WRONG: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"token_budget": {"tokens": 0}}, ("tokens",)),
    ({"token_budget": {"buckets": 0}}, ("buckets",)),
    ({"token_budget": {"window": 1 << 17}}, ("window",)),
    ({"token_budget": {"longer": "split"}}, ("longer",)),
    ({"token_budget": {"column": "token"}}, ("token",)),
    ({"token_budget": {"column": None}}, ("token_budget needs column=", "lengths=")),
    ({"token_budget": {"column": None, "lengths": "size", "along": ["labels"]}}, ("along", "token_budget.column")),
    ({"token_budget": {"along": ["lengths"]}}, ("lengths", "already")),
    ({"token_budget": {"along": 5}}, ("along", "list of names")),
    ({"token_budget": {"pad": "0"}}, ("token_budget.pad",)),
    ({"token_budget": {"pad": {"tokens": None}}}, ("token_budget.pad",)),
    ({"token_budget": {"pad": {"label": 0}}}, ("label",)),
    ({"packing": {"column": "tokens", "capacity": 64}}, ("pack", "budget")),
    ({"batching_method": "stratified"}, ("batching_method", "budget")),
    ({"batch_size": 2}, ("budget", "batch_size", "2")),
    ({"more": {"batch_size": 4}}, ("budget", "batch_size", "4")),
]


@pytest.mark.parametrize(("how", "named"), WRONG, ids=[str(how) for how, _ in WRONG])
def test_what_cannot_be_is_refused(root: Path, how: dict[str, Any], named: tuple[str, ...]) -> None:
    with raises(ConfigError, *named):
        len(loader(root, **how))


def test_what_a_budget_is_may_be_said_in_two_ways(root: Path) -> None:
    budget = TokenBudget(column="tokens", tokens=TOKENS, buckets=4, window=32)
    dataset = StreamingDataset(remote=str(root), shuffle=True, num_canonical_nodes=2, token_budget=budget)
    assert groups(StreamingDataLoader(dataset, batch_size=1)) == groups(loader(root))
    for missing in ({"column": "tokens"}, {"tokens": 5}):
        with pytest.raises(ConfigError, match=r"(token_budget|TokenBudget) needs"):
            StreamingDataset(remote=str(root), token_budget=missing)


def test_an_epoch_without_tokens_is_refused_and_one_of_few_groups_is_read(tmp_path: Path) -> None:
    longer = write_documents(tmp_path / "longer", [65] * 9)
    for world in worlds(1, 2):
        with raises(ConfigError, "no pack", "9 documents", "budget.longer"):
            list(loader(longer, token_budget={"longer": "drop", "tokens": 64}, world=world))
    one = write_documents(tmp_path / "one", [65, 10, 70])
    read = [groups(loader(one, token_budget={"longer": "drop", "tokens": 64}, world=world)) for world in worlds(2, 4)]
    assert read == [[[tuple(range(200, 210))]]] * 8


def test_what_was_asked_for_is_told_as_plain_values(root: Path) -> None:
    told = loader(root, token_budget={"lengths": "size"}).dataset.config()
    assert told["packing"] is None
    assert told["token_budget"] == {
        "column": "tokens",
        "tokenize": None,
        "lengths": "size",
        "lengths_version": None,
        "dtype": None,
        "along": [],
        "concatenate": [],
        "bos": None,
        "eos": None,
        "pad": 0,
        "as_dtype": "int64",
        "tokens": TOKENS,
        "buckets": 4,
        "window": 32,
        "longer": "error",
    }
    budget = TokenBudget(lengths="size", tokens=64)
    assert pickle.loads(pickle.dumps(budget)) == budget


@pytest.mark.parametrize("workers", [0, 1])
def test_documents_that_are_appended_are_grouped_from_the_next_epoch_on(tmp_path: Path, workers: int) -> None:
    written = write_documents(tmp_path / "grows", LENGTHS[:40])
    at = loader(written, follow_appends=True, workers=workers, more={"persistent_workers": workers > 0})
    whole = groups(loader(written))
    under_way = iter(at)
    begun = groups([next(under_way)])
    write_documents(written, LENGTHS[40:60], first=40, mode="append")
    assert begun + groups(under_way) == whole
    assert at.refresh()
    state = json_copy(at.state_dict())
    grown = groups(at)
    assert sorted(len(one) for one in itertools.chain(*grown)) == sorted(size for size in LENGTHS[:60] if size)
    at.close()
    again = loader(written, follow_appends=True)
    again.load_state_dict(state)
    assert groups(again) == grown


def test_a_rank_that_reads_nothing_counts_groups(root: Path) -> None:
    at = loader(root, world=World(is_reader=False))
    assert len(list(at)) == len(loader(root))
    assert at.state_dict()["epoch"] == 1


def test_shards_that_are_fetched_and_let_go_of(root: Path, tmp_path: Path) -> None:
    def kept(**how: Any) -> Iterator[Any]:
        remote = Stream(remote=f"file://{root}", local=str(tmp_path / "cache"))
        return iter(loader(None, streams={"a": remote}, shuffle_algo="naive", **how))

    whole = groups(loader(root, shuffle_algo="naive"))
    assert groups(kept(cache_limit="40kb")) == whole
    assert groups(kept(cache_limit="40kb", workers=2)) == whole
