"""Tokens that are inserted before and after stored documents: the batches of documents that are stored with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_streaming import MDSWriter, PackingConfig, StreamingDataLoader, StreamingDataset, TokenBudget
from lightning_streaming.errors import ConfigError, SampleError, StateMismatchError
from tests.helpers import json_copy, raises, worlds
from tests.tiers import examples

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

BOS, EOS, PADS = 70001, 70002, {"tokens": 9, "weight": -1, "mask": 0}
"""Numbers that the stored type does not hold."""
LENGTHS = [int(length) for length in np.random.default_rng(5).lognormal(1.8, 1, 110).astype(int).clip(1, 60)]
ENDS = [{"bos": BOS}, {"eos": EOS}, {"bos": BOS, "eos": EOS}]


def row(number: int) -> dict[str, Any]:
    tokens = (number * 100 + np.arange(LENGTHS[number])).astype(np.uint16)
    return {"tokens": tokens, "weight": (tokens % 7).astype(np.uint8), "mask": (tokens % 3 > 0).astype(np.uint8)}


def ended(number: int, bos: int | None = None, eos: int | None = None) -> dict[str, Any]:
    """A document as it would be stored with its tokens."""
    around = {"tokens": (bos, eos), "weight": (PADS["weight"],) * 2, "mask": (0, 1)}
    return {
        name: np.array([*[before] * (bos is not None), *values.tolist(), *[after] * (eos is not None)], np.int32)
        for (name, values), (before, after) in zip(row(number).items(), around.values(), strict=True)
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documents, and for each choice of tokens the documents with them; some of no token are left out."""
    root = tmp_path_factory.mktemp("pack_ends")
    kinds = {"tokens": "ndarray:uint16", "weight": "ndarray:uint8", "mask": "ndarray:uint8"}
    with MDSWriter(out=str(root / "plain"), columns={**kinds, "size": "int"}, size_limit=900) as writer:
        for number in range(len(LENGTHS)):
            writer.write({**row(number), "size": LENGTHS[number]})
    for place, ends in enumerate(ENDS):
        wide = dict.fromkeys(kinds, "ndarray:int32")
        with MDSWriter(out=str(root / str(place)), columns=wide, size_limit=2000) as to:
            for number in range(len(LENGTHS)):
                to.write(ended(number, **ends))
    return root


def loader(where: Path, *, workers: int = 0, batch_size: int = 2, **options: Any) -> StreamingDataLoader:
    for group in {"packing", "token_budget"} & options.keys():
        options[group] = {"column": "tokens", "pad": PADS, "along": ["weight", "mask"], "window": 32, **options[group]}
    if "token_budget" in options:
        batch_size = 1
    order = {"shuffle": True, "shuffle_algo": "naive", "num_canonical_nodes": 2}
    dataset = StreamingDataset(remote=str(where), **{**order, **options})
    return StreamingDataLoader(dataset, batch_size=batch_size, num_workers=workers)


def as_lists(batches: Any) -> list[dict[str, Any]]:
    return [
        {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
        for batch in batches
    ]


def same(sample: Any) -> Any:
    return sample


PACKINGS = st.fixed_dictionaries(
    {
        "capacity": st.sampled_from([4, 16, 48]),
        "method": st.sampled_from(["best_fit", "concat"]),
        "multiple": st.sampled_from([1, 2, 4]),
        "max_documents": st.sampled_from([None, 2]),
        "longer": st.sampled_from(["split", "truncate", "drop"]),
        "continue_positions": st.booleans(),
        "labels": st.booleans(),
        "loss_mask": st.sampled_from([None, "mask"]),
    }
).map(
    lambda options: {
        **options,
        **({"max_documents": None, "longer": "split"} if options["method"] == "concat" else {}),
        "loss_mask": options["loss_mask"] if options["labels"] else None,
    }
)


@given(packing=PACKINGS, place=st.integers(0, 2), transform=st.sampled_from([None, same]), with_lengths=st.booleans())
@settings(max_examples=examples(30), deadline=None)
def test_packs_are_those_of_documents_stored_with_the_tokens(
    root: Path, packing: dict[str, Any], place: int, transform: Any, with_lengths: bool
) -> None:
    if packing["loss_mask"] is None:  # else it is a mask of labels, and 1 at the end
        packing = {**packing, "along": ["weight"], "pad": {"tokens": 9, "weight": -1}}
    lengths = {"lengths": "size"} if with_lengths else {}
    expected = as_lists(loader(root / str(place), packing=packing))
    assert expected
    inserted = {**packing, **ENDS[place], **lengths}
    assert as_lists(loader(root / "plain", packing=inserted, transform=transform)) == expected


@pytest.mark.parametrize("ends", ENDS, ids=lambda ends: "-".join(ends))
@pytest.mark.parametrize("transform", [None, same], ids=["joined", "made"])
def test_groups_are_those_of_documents_stored_with_the_tokens(root: Path, ends: dict[str, int], transform: Any) -> None:
    budget = {"tokens": 40, "longer": "truncate", "buckets": 3, "along": ["weight"], "pad": {"tokens": 9, "weight": -1}}
    expected = as_lists(loader(root / str(ENDS.index(ends)), token_budget=budget))
    made = loader(root / "plain", token_budget={**budget, **ends}, transform=transform)
    assert as_lists(made) == expected
    of_user = loader(root / "plain", token_budget={**budget, **ends})
    own = StreamingDataLoader(of_user.dataset, batch_size=1, collate_fn=list)
    documents = [[document["tokens"].tolist() for document in group] for group in own]
    rows = [zip(batch["input_ids"], batch["lengths"], strict=True) for batch in expected]
    assert documents == [[ids[:length] for ids, length in group] for group in rows]


def test_the_first_and_the_last_token_of_a_document_that_is_cut(tmp_path: Path) -> None:
    with MDSWriter(out=str(tmp_path), columns={"tokens": "ndarray:uint8"}) as writer:
        writer.write({"tokens": np.array([5, 6, 7], np.uint8)})
    packing = {"column": "tokens", "capacity": 2, "method": "concat", "bos": 1, "eos": 2, "labels": True}
    dataset = StreamingDataset(remote=str(tmp_path), shuffle=False, packing=packing)
    batch = next(iter(StreamingDataLoader(dataset, batch_size=3)))
    assert batch["input_ids"].tolist() == [[1, 5], [6, 7], [2, 0]]
    assert batch["labels"].tolist() == [[-100, 5], [-100, 7], [-100, -100]]
    whole = StreamingDataset(remote=str(tmp_path), shuffle=False, packing={**packing, "capacity": 6})
    batch = next(iter(StreamingDataLoader(whole, batch_size=1)))
    assert batch["input_ids"].tolist() == [[1, 5, 6, 7, 2, 0]]
    assert batch["labels"].tolist() == [[-100, 5, 6, 7, 2, -100]]


def test_documents_without_tokens_are_left_out(tmp_path: Path) -> None:
    with MDSWriter(out=str(tmp_path), columns={"tokens": "bytes", "size": "int"}) as writer:
        for length in (0, 3, 0):
            writer.write({"tokens": bytes(range(5, 5 + length)), "size": length})
    for lengths in ({}, {"lengths": "size"}):
        packing = {"column": "tokens", "dtype": "uint8", "capacity": 6, "bos": 1, "eos": 2, **lengths}
        dataset = StreamingDataset(remote=str(tmp_path), packing=packing)
        batches = as_lists(StreamingDataLoader(dataset, batch_size=1))
        assert [batch["input_ids"] for batch in batches] == [[[1, 5, 6, 7, 2, 0]]]


ALL = {"capacity": 16, "bos": BOS, "eos": EOS, "labels": True, "loss_mask": "mask", "multiple": 4}


def test_ranks_and_workers_resume_in_the_middle(root: Path) -> None:
    whole = as_lists(loader(root / "plain", packing=ALL))
    assert as_lists(loader(root / "plain", packing=ALL, workers=2, transform=same)) == whole
    at = loader(root / "plain", packing=ALL)
    batches = iter(at)
    before = as_lists(next(batches) for _ in range(5))
    state = json_copy(at.state_dict())
    ranks = []
    for world in worlds(1, 2):
        again = loader(root / "plain", packing=ALL, batch_size=1, world=world)
        again.load_state_dict(state)
        ranks.append(as_lists(again))
    labels = [batch["labels"][0] for step in zip(*ranks, strict=True) for batch in step]
    expected = [pack for batch in whole for pack in batch["labels"]]
    assert before == whole[:5]
    assert labels[: len(expected) - 10] == expected[10:]
    for changes in ({"bos": 5}, {"eos": None}, {"bos": None, "eos": BOS}):
        changed = loader(root / "plain", packing={**ALL, **changes})
        changed.load_state_dict(state)
        with pytest.raises(StateMismatchError) as caught:
            next(iter(changed))
        assert all(f"packing.{name}" in str(caught.value) for name in changes)


def test_weights_in_tokens_count_them(root: Path) -> None:
    options: dict[str, Any] = {"mixing": {"weights_in": "tokens"}, "epoch_size": 500}
    packing = {"capacity": 16, "along": [], "pad": 9}
    read = as_lists(loader(root / "plain", packing={**packing, **ENDS[2]}, **options))
    assert 480 <= sum(token != 9 for batch in read for pack in batch["input_ids"] for token in pack) <= 560


@pytest.mark.parametrize("transform", [None, same], ids=["joined", "made"])
def test_a_token_that_the_type_of_a_batch_does_not_hold_is_refused(root: Path, transform: Any) -> None:
    packing = {"capacity": 16, "eos": EOS, "as_dtype": {"tokens": "uint16"}}
    with raises(SampleError, "packing.eos"):
        next(iter(loader(root / "plain", packing=packing, transform=transform)))


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (PackingConfig, {"column": "tokens", "capacity": 8, "bos": -1}, "bos must be"),
        (PackingConfig, {"column": "tokens", "capacity": 8, "eos": "</s>"}, "eos must be"),
        (
            PackingConfig,
            {"tokenize": {"tokenizer": "bytes"}, "capacity": 8, "bos": 1},
            "packing.tokenize.bos instead",
        ),
        (TokenBudget, {"lengths": "size", "tokens": 8, "eos": 1}, "set token_budget.column"),
    ],
)
def test_what_cannot_be_is_refused(kind: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        kind(**options)
    assert caught.value.option in ("packing.bos", "packing.eos", "token_budget.eos")
