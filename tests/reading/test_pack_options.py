"""Packs as trainers want them: labels, documents of a multiple, at most n of them, and names of other libraries."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_streaming import MDSWriter, PackingConfig, StreamingDataLoader, StreamingDataset
from lightning_streaming.errors import ConfigError, StateMismatchError
from tests.helpers import json_copy, raises, worlds
from tests.tiers import examples

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

CAPACITY = 48
LENGTHS = [int(length) for length in np.random.default_rng(7).lognormal(2.4, 1, 150).astype(int).clip(1, 190)]
_STRIDE = 200


def tokens_of(number: int) -> NDArray[np.int32]:
    return np.arange(number * _STRIDE, number * _STRIDE + LENGTHS[number], dtype=np.int32)


def mask_of(number: int) -> NDArray[np.uint8]:
    return (tokens_of(number) % 3 > 0).astype(np.uint8)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pack_options")
    columns = {"tokens": "ndarray:int32", "mask": "ndarray:uint8"}
    with MDSWriter(out=str(root), columns=columns, size_limit=4000) as writer:
        for number in range(len(LENGTHS)):
            writer.write({"tokens": tokens_of(number), "mask": mask_of(number)})
    return root


def loader(
    root: Path, packing: dict[str, Any], *, batch_size: int = 2, workers: int = 0, **more: Any
) -> StreamingDataLoader:
    options = {"column": "tokens", "capacity": CAPACITY, "window": 32, "pad": -7, **packing}
    dataset = StreamingDataset(remote=str(root), shuffle=True, num_canonical_nodes=2, packing=options, **more)
    return StreamingDataLoader(dataset, batch_size=batch_size, num_workers=workers)


def as_lists(batches: Any) -> list[dict[str, Any]]:
    return [
        {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
        for batch in batches
    ]


def same(sample: Any) -> Any:
    return sample


OPTIONS = st.fixed_dictionaries(
    {
        "method": st.sampled_from(["best_fit", "concat"]),
        "multiple": st.sampled_from([1, 2, 8, 16]),
        "max_documents": st.sampled_from([None, 1, 2, 5]),
        "longer": st.sampled_from(["split", "truncate", "drop"]),
        "continue_positions": st.booleans(),
        "loss_mask": st.sampled_from([None, "mask"]),
        "names": st.sampled_from(["plain", "huggingface"]),
    }
).map(
    lambda options: {**options, "max_documents": None, "longer": "split"} if options["method"] == "concat" else options
)


def expected_pack(ids: list[int], documents: list[int], options: dict[str, Any]) -> dict[str, list[int]]:
    """What follows from the tokens of a pack, and the number of each token's document."""
    labels, positions, ends, padded_ends, place = [], [], [], [], 0
    while place < len(ids):
        number, first = documents[place], place
        while place < len(ids) and documents[place] == number:
            place += 1
        tokens = ids[first:place]
        origin = tokens[0] % _STRIDE if options["continue_positions"] and number >= 0 else 0
        positions += [origin + position for position in range(len(tokens))]
        if number < 0:
            labels += [-100] * len(tokens)
            ends.append(len(tokens))
            padded_ends.append(len(tokens))
            continue
        assert tokens == list(range(tokens[0], tokens[0] + len(tokens)))
        is_masked = options["loss_mask"] is not None
        labels += [-100, *(-100 if is_masked and token % 3 == 0 else token for token in tokens[1:])]
        padding = -len(tokens) % options["multiple"]
        assert documents[place : place + padding] == [-1] * padding
        positions += range(padding)
        labels += [-100] * padding
        place += padding
        ends.append(len(tokens))
        padded_ends.append(len(tokens) + padding)
    return {"labels": labels, "positions": positions, "lengths": ends, "padded": padded_ends}


@given(options=OPTIONS, batch_size=st.integers(1, 3))
@settings(max_examples=examples(60), deadline=None)
def test_batches_are_as_the_options_say(root: Path, options: dict[str, Any], batch_size: int) -> None:
    packing = {"labels": True, **options}
    batches = as_lists(loader(root, packing, batch_size=batch_size))
    assert as_lists(loader(root, packing, batch_size=batch_size, transform=same)) == batches
    most, seen = options["max_documents"], Counter[int]()
    for batch in batches:
        lengths, padded = list[int](), list[int]()
        for row, ids in enumerate(batch["input_ids"]):
            documents = batch["document_ids"][row]
            pack = expected_pack(ids, documents, options)
            assert (batch["labels"][row], batch["position_ids"][row]) == (pack["labels"], pack["positions"])
            assert most is None or max(documents) < most
            assert sorted({*documents} - {-1}) == list(range(max(documents) + 1))
            filled = [0] * (0 if most is None else most + 1 - len(pack["padded"]))
            lengths += pack["lengths"] + filled
            padded += pack["padded"] + filled
            seen.update(token for token, number in zip(ids, documents, strict=True) if number >= 0)
        longest = max(padded) if most is None else CAPACITY
        if options["names"] == "huggingface":
            assert batch["cu_seq_lens_q"] == batch["cu_seq_lens_k"] == [0, *np.cumsum(padded).tolist()]
            assert batch["max_length_q"] == batch["max_length_k"] == longest
        else:
            assert batch["cu_seqlens"] == [0, *np.cumsum(lengths).tolist()]
            assert batch.get("cu_seqlens_padded") == (
                [0, *np.cumsum(padded).tolist()] if options["multiple"] > 1 else None
            )
            assert batch["max_seqlen"] == longest
        assert "mask" not in batch
    kept = [number for number, length in enumerate(LENGTHS) if options["longer"] != "drop" or length <= CAPACITY]
    stop = CAPACITY if options["longer"] == "truncate" else None
    expected = Counter(token for number in kept for token in tokens_of(number)[:stop].tolist())
    if options["longer"] == "drop" and options["multiple"] > 1:
        assert not seen - expected
    else:
        assert seen == expected


ALL: dict[str, Any] = {"labels": True, "loss_mask": "mask", "multiple": 8, "max_documents": 3}


@pytest.mark.parametrize("options", [ALL, {**ALL, "names": "huggingface", "along": ["mask"]}], ids=["plain", "hf"])
def test_batches_are_the_same_by_workers_and_ranks(root: Path, options: dict[str, Any]) -> None:
    whole = as_lists(loader(root, options))
    assert as_lists(loader(root, options, workers=2)) == whole
    assert ("mask" in whole[0]) == ("along" in options)
    ranks = [as_lists(loader(root, options, batch_size=1, world=world)) for world in worlds(1, 2)]
    packs = [pack for batch in whole for pack in batch["labels"]]
    of_ranks = [batch["labels"][0] for step in zip(*ranks, strict=True) for batch in step]
    assert of_ranks[: len(packs)] == packs


@pytest.mark.parametrize("name", ["multiple", "max_documents"])
def test_a_resume_with_another_value_is_refused(root: Path, name: str) -> None:
    at = loader(root, ALL)
    batches = iter(at)
    next(batches)
    state, rest = json_copy(at.state_dict()), as_lists(batches)
    again = loader(root, ALL, workers=1)
    again.load_state_dict(state)
    assert as_lists(again) == rest
    for value in ({"multiple": 16}, {"multiple": 1}) if name == "multiple" else ({name: 4}, {name: None}):
        changed = loader(root, {**ALL, **value})
        changed.load_state_dict(state)
        with raises(StateMismatchError, f"packing.{name}"):
            next(iter(changed))


def test_shapes_do_not_change_with_max_documents(root: Path) -> None:
    batches = list(loader(root, ALL))[:-1]
    shapes = {tuple((name, getattr(value, "shape", value)) for name, value in batch.items()) for batch in batches}
    assert len(batches) > 10
    assert len(shapes) == 1
    assert batches[0]["cu_seqlens"].shape == (2 * 4 + 1,)
    assert batches[0]["max_seqlen"] == CAPACITY


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"multiple": 5}, "capacity=48 must be a multiple of multiple=5"),
        ({"multiple": 0}, "multiple"),
        ({"max_documents": 0}, "max_documents"),
        ({"max_documents": 3, "method": "concat"}, "max_documents=3 needs method='best_fit'"),
        ({"names": "torch"}, "names"),
        ({"labels": 3}, "labels"),
        ({"loss_mask": "mask"}, "packing.loss_mask must be a column, and needs labels: true"),
        ({"labels": True, "along": ["labels"]}, "packing.labels makes an entry of this name"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        PackingConfig(column="tokens", capacity=CAPACITY, **options)
    assert caught.value.option == f"packing.{next(iter(options))}"


def test_models_of_transformers_take_batches(root: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=len(LENGTHS) * _STRIDE, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, attn_implementation="sdpa",
    )  # fmt: skip
    options = {"labels": True, "names": "huggingface", "without": ["document_ids"], "pad": 0}
    model = transformers.LlamaForCausalLM(config)
    batch = next(iter(loader(root, options)))
    logits, labels = model(**{**batch, "labels": None}).logits, batch["labels"]
    own = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert torch.allclose(model(**batch).loss, own)
