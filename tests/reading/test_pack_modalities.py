"""Packs of documents with images: columns of several values for a token, and columns for a document as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_streaming import MDSWriter, PackingConfig, StreamingDataLoader, StreamingDataset, TokenBudget
from lightning_streaming.errors import ConfigError, SampleError
from tests.helpers import json_copy, raises, worlds
from tests.tiers import examples

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

LENGTHS = [int(length) for length in np.random.default_rng(3).integers(1, 30, 90)]
SHAPES = {"place": [3, -1], "box": [-1, 4], "weight": [-1]}
PADS = {"place": 5, "box": -1, "weight": 9, "tokens": -7}
BOS, EOS = 8_000_001, 8_000_002


def row(number: int) -> dict[str, Any]:
    """A document whose values follow from its tokens, and patches, which follow from its number."""
    tokens = number * 100 + np.arange(LENGTHS[number], dtype=np.int32)
    patches = np.full((number % 4, 2), number, np.float32)
    return {
        "tokens": tokens,
        "place": np.stack([tokens, tokens + 1, tokens + 2]),
        "box": np.stack([tokens * 2 + k for k in range(4)], axis=1).astype(np.float32),
        "weight": (tokens % 250).astype(np.uint8),
        "pixel_values": patches,
        "image_grid_thw": np.array([[1, 1, len(patches)]] if len(patches) else np.zeros((0, 3)), np.int64),
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pack_modalities")
    columns = {name: "ndarray" for name, value in row(1).items() if name not in ("pixel_values", "image_grid_thw")}
    with MDSWriter(out=str(root), columns={**columns, "number": "int"}, size_limit=20_000) as writer:
        for number in range(len(LENGTHS)):
            writer.write({**{name: row(number)[name] for name in columns}, "number": number})
    return root


def with_images(sample: dict[str, Any]) -> dict[str, Any]:
    made = row(int(sample["number"]))
    images = {name: made[name] for name in ("pixel_values", "image_grid_thw")}
    if not len(made["pixel_values"]) and sample["number"] % 8:
        images["image_grid_thw"] = None
    return {**sample, **images, "pixel_values": torch.from_numpy(images["pixel_values"]).to(torch.bfloat16)}


def loader(root: Path, *, batch_size: int = 2, workers: int = 0, **options: Any) -> StreamingDataLoader:
    for group in {"packing", "token_budget"} & options.keys():
        options[group] = {"column": "tokens", "along": SHAPES, "pad": PADS, "window": 16, **options[group]}
    dataset = StreamingDataset(remote=str(root), shuffle=True, num_canonical_nodes=2, **options)
    return StreamingDataLoader(dataset, batch_size=batch_size, num_workers=workers)


def as_lists(batches: Any) -> list[dict[str, Any]]:
    return [
        {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
        for batch in batches
    ]


def check_along(batch: dict[str, torch.Tensor]) -> None:
    """Check the columns of a batch, of this shape in axes of packs and of tokens, by its tokens."""
    tokens = batch["input_ids"]
    is_stored = (tokens != PADS["tokens"]) & (tokens < BOS)
    places = torch.stack([tokens, tokens + 1, tokens + 2])
    boxes = torch.stack([tokens * 2 + k for k in range(4)], dim=2)
    assert torch.equal(batch["place"], torch.where(is_stored[None], places, PADS["place"]))
    assert torch.equal(batch["box"], torch.where(is_stored[..., None], boxes, PADS["box"]).float())
    assert torch.equal(batch["weight"], torch.where(is_stored, tokens % 250, PADS["weight"]))


@given(
    packing=st.fixed_dictionaries(
        {
            "capacity": st.sampled_from([8, 32, 64]),
            "method": st.sampled_from(["best_fit", "concat"]),
            "multiple": st.sampled_from([1, 4]),
            "bos": st.sampled_from([None, BOS]),
            "eos": st.sampled_from([None, EOS]),
        }
    ),
    longer=st.sampled_from(["split", "truncate", "drop"]),
    batch_size=st.integers(1, 3),
)
@settings(max_examples=examples(30), deadline=None)
def test_values_of_several_dimensions_follow_the_tokens(
    root: Path, packing: dict[str, Any], longer: str, batch_size: int
) -> None:
    longer = "split" if packing["method"] == "concat" else longer
    read = list(loader(root, packing={**packing, "longer": longer}, batch_size=batch_size))
    plain = list(loader(root, packing={**packing, "longer": longer, "along": [], "pad": -7}, batch_size=batch_size))
    assert [batch["input_ids"].tolist() for batch in read] == [batch["input_ids"].tolist() for batch in plain]
    for batch in read:
        check_along(batch)


@pytest.mark.parametrize("longer", ["drop", "truncate"])
def test_groups_have_values_of_several_dimensions(root: Path, longer: str) -> None:
    budget = {"tokens": 80, "longer": longer, "bos": BOS}
    groups = list(loader(root, token_budget={**budget, "tokens": 20}, batch_size=1))
    assert len(groups) > 5
    for batch in groups:
        check_along(batch)
    of_user = loader(root, token_budget={**budget, "tokens": 20}, batch_size=1)
    own = list(StreamingDataLoader(of_user.dataset, batch_size=1, collate_fn=list))
    for documents, batch in zip(own, groups, strict=True):
        for place, (document, length) in enumerate(zip(documents, batch["lengths"].tolist(), strict=True)):
            assert document["place"].tolist() == batch["place"][:, place, :length].tolist()
            assert document["box"].tolist() == batch["box"][place, :length].tolist()


IMAGES: dict[str, Any] = {"capacity": 64, "longer": "drop", "concatenate": ["pixel_values", "image_grid_thw"]}


def expected_images(batch: dict[str, Any]) -> dict[str, Any]:
    """The patches and grids of the documents of a batch, by its tokens."""
    numbers = [
        tokens[place] // 100
        for tokens, positions, of in zip(batch["input_ids"], batch["position_ids"], batch["document_ids"], strict=True)
        for place in range(len(tokens))
        if of[place] >= 0 and positions[place] == 0
    ]
    made = [row(number) for number in numbers if number % 4]
    return {name: [line for document in made for line in document[name].tolist()] for name in IMAGES["concatenate"]}


def test_columns_of_whole_documents_are_concatenated_on_any_ranks_and_after_a_resume(root: Path) -> None:
    at = loader(root, packing=IMAGES, transform=with_images)
    batches, whole = iter(at), list[dict[str, Any]]()
    for batch in batches:
        assert batch["pixel_values"].dtype == torch.bfloat16
        whole += as_lists([batch])
        if len(whole) == 4:
            state = json_copy(at.state_dict())
        images = expected_images(whole[-1])
        assert {name: whole[-1][name] for name in images} == images
    assert len(whole) > 8
    assert as_lists(loader(root, packing=IMAGES, transform=with_images, workers=2)) == whole
    ranks = []
    for world in worlds(1, 2):
        again = loader(root, packing=IMAGES, transform=with_images, batch_size=1, world=world)
        again.load_state_dict(state)
        ranks.append(as_lists(again))
    for step, expected in zip(zip(*ranks, strict=True), whole[4:-1], strict=False):
        grids = [line for batch in step for line in batch.get("image_grid_thw", [])]
        assert grids == expected["image_grid_thw"]


def test_groups_concatenate_columns(root: Path) -> None:
    budget = {"tokens": 90, "concatenate": IMAGES["concatenate"]}
    for batch in as_lists(loader(root, token_budget=budget, batch_size=1, transform=with_images)):
        made = [row(tokens[0] // 100) for tokens in batch["input_ids"]]
        grids = [line for document in made for line in document["image_grid_thw"].tolist()]
        assert batch.get("image_grid_thw", []) == grids


def qwen_batch(root: Path) -> dict[str, Any]:
    """A batch of two documents in one pack, the second with an image of 1 x 4 x 4 patches (4 tokens), and one more."""
    image, vision_start, vision_end = 90, 91, 92
    documents: list[dict[str, Any]] = [
        {"tokens": [1, 2, 3], "positions": [[0, 1, 2]] * 3},
        {
            "tokens": [5, vision_start, image, image, image, image, vision_end, 6],
            "positions": [[0, 1, 2, 2, 2, 2, 4, 5], [0, 1, 2, 2, 3, 3, 4, 5], [0, 1, 2, 3, 2, 3, 4, 5]],
            "pixel_values": np.arange(16 * 24, dtype=np.float32).reshape(16, 24) / 384,
            "image_grid_thw": [[1, 4, 4]],
        },
        {"tokens": [7, 8], "positions": [[0, 1]] * 3},
    ]
    with MDSWriter(out=str(root), columns={"number": "int", "size": "int"}) as writer:
        for number, document in enumerate(documents):
            writer.write({"number": number, "size": len(document["tokens"])})

    def made(sample: dict[str, Any]) -> dict[str, Any]:
        document: dict[str, Any] = {"pixel_values": None, "image_grid_thw": None, **documents[int(sample["number"])]}
        return {**document, "position_ids": np.array(document["positions"])}

    packing = {
        "column": "tokens", "lengths": "size", "capacity": 12, "longer": "error", "labels": True,
        "names": "huggingface", "without": ["position_ids", "document_ids"],
        "along": {"position_ids": [3, -1]}, "concatenate": ["pixel_values", "image_grid_thw"],
    }  # fmt: skip
    dataset = StreamingDataset(remote=str(root), shuffle=False, packing=packing, transform=made)
    batch: dict[str, Any] = next(iter(StreamingDataLoader(dataset, batch_size=2)))
    return batch


def test_a_batch_for_qwen2_vl(tmp_path: Path) -> None:
    batch = qwen_batch(tmp_path)
    of_attention = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
    assert {*batch} == {"input_ids", "labels", "position_ids", "pixel_values", "image_grid_thw", *of_attention}
    both, last = [1, 2, 3, 5, 91, 90, 90, 90, 90, 92, 6, 0], [7, 8, *[0] * 10]
    place = batch["input_ids"].tolist().index(both)
    assert batch["input_ids"][1 - place].tolist() == last
    assert batch["position_ids"][:, place].tolist() == [
        [0, 1, 2, 0, 1, 2, 2, 2, 2, 4, 5, 0],
        [0, 1, 2, 0, 1, 2, 2, 3, 3, 4, 5, 0],
        [0, 1, 2, 0, 1, 2, 3, 2, 3, 4, 5, 0],
    ]
    assert batch["position_ids"][:, 1 - place].tolist() == [[0, 1, *[0] * 10]] * 3
    assert batch["cu_seq_lens_q"].tolist() == ([0, 3, 11, 12, 14, 24] if place == 0 else [0, 2, 12, 15, 23, 24])
    assert batch["pixel_values"].tolist() == (np.arange(16 * 24, dtype=np.float32).reshape(16, 24) / 384).tolist()
    assert batch["image_grid_thw"].tolist() == [[1, 4, 4]]
    merged = int(batch["image_grid_thw"].prod(dim=1).sum()) // 4
    assert int((batch["input_ids"] == 90).sum()) == merged
    assert len(batch["pixel_values"]) == merged * 4


@pytest.mark.nightly
def test_qwen2_vl_takes_a_batch(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    text = {
        "vocab_size": 100, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0},
    }  # fmt: skip
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 2, "mlp_ratio": 2}
    config = transformers.Qwen2VLConfig(
        text_config=text, vision_config=vision, image_token_id=90, vision_start_token_id=91, vision_end_token_id=92,
        video_token_id=93,
    )  # fmt: skip
    model = transformers.Qwen2VLForConditionalGeneration(config)
    assert model(**qwen_batch(tmp_path)).loss > 0


def test_a_batch_of_bad_documents_has_the_same_shapes(root: Path, tmp_path: Path) -> None:
    def failing(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["number"] < 60:
            raise ValueError("bad")
        return with_images(sample)

    bad = {"action": "replace", "max": "90%", "log": str(tmp_path)}
    batches = list(loader(root, packing={**IMAGES, "capacity": 32}, transform=failing, bad_samples=bad, batch_size=1))
    assert any((batch["document_ids"] == -1).all() for batch in batches)
    shapes = {(tuple(batch["place"].shape), tuple(batch["box"].shape)) for batch in batches}
    assert shapes == {((3, 1, 32), (1, 32, 4))}


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"place": np.zeros((2, 4))}, "place"),
        ({"box": np.zeros((4, 3))}, "box"),
        ({"pixel_values": np.zeros((2, 3), np.float32)}, "pixel_values"),
        ({"pixel_values": 3}, "pixel_values"),
        ({"pixel_values": np.array(["a"])}, "pixel_values"),
    ],
)
def test_documents_of_another_shape_are_refused(root: Path, changes: dict[str, Any], name: str) -> None:
    def changed(sample: dict[str, Any]) -> dict[str, Any]:
        return {**with_images(sample), **(changes if sample["number"] % 3 else {})}

    with raises(SampleError, f"column {name!r}"):
        list(loader(root, packing=IMAGES, transform=changed))


@pytest.mark.parametrize(
    ("option", "options", "words"),
    [
        ("along", {"along": {"box": [4]}}, "must map columns to shapes with -1"),
        ("along", {"along": {"box": [2, -1, 4]}}, "must map columns to shapes with -1"),
        ("along", {"along": {"box": [-1, 0]}}, "must map columns to shapes with -1"),
        ("along", {"along": {"box": 3}}, "must map columns to shapes with -1"),
        ("along", {"along": ["position_ids"]}, "a batch has already"),
        ("loss_mask", {"along": {"mask": [-1, 2]}, "labels": True, "loss_mask": "mask"}, "one value for a token"),
        ("concatenate", {"concatenate": ["image"]}, "whole documents"),
        ("concatenate", {"concatenate": ["image"], "longer": "truncate"}, "whole documents"),
        ("concatenate", {"concatenate": ["image"], "method": "concat"}, "whole documents"),
        ("concatenate", {"concatenate": ["image", "image"], "longer": "drop"}, "each column once"),
        ("concatenate", {"concatenate": ["tokens"], "longer": "drop"}, "each column once"),
        ("concatenate", {"concatenate": ["labels"], "longer": "drop"}, "each column once"),
        ("concatenate", {"concatenate": ["cu_seq_lens_q"], "longer": "drop", "names": "huggingface"}, "rename"),
        ("along", {"along": ["cu_seqlens_padded"], "multiple": 4}, "rename the column"),
        ("loss_mask", {"concatenate": ["mask"], "longer": "drop", "labels": True, "loss_mask": "mask"}, "each token"),
        ("loss_mask", {"labels": True, "loss_mask": "tokens"}, "is not the column 'tokens'"),
    ],
)
def test_what_cannot_be_is_refused(option: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        PackingConfig(column="tokens", capacity=8, **options)
    assert caught.value.option == f"packing.{option}"


def test_a_budget_without_tokens_concatenates_nothing() -> None:
    with pytest.raises(ConfigError, match=r"needs token_budget.column"):
        TokenBudget(lengths="size", tokens=8, concatenate=["image"])


def test_names_that_begin_like_entries_are_columns_as_others(root: Path) -> None:
    def renamed(sample: dict[str, Any]) -> dict[str, Any]:
        swapped = row(int(sample["number"]))["pixel_values"]
        return {**sample, "max_box": sample["weight"], "cu_seq": sample["weight"], "pixels": swapped.astype(">f4")}

    packing = {"along": ["max_box", "cu_seq", "weight"], "concatenate": ["pixels"], "longer": "drop", "pad": 0}
    batches = list(loader(root, packing={**packing, "capacity": 32}, transform=renamed))
    assert all(torch.equal(batch[name], batch["weight"]) for batch in batches for name in ("max_box", "cu_seq"))
    assert {batch["pixels"].dtype for batch in batches if "pixels" in batch} == {torch.float32}
    assert sum(len(batch["pixels"]) for batch in batches if "pixels" in batch) > 0
