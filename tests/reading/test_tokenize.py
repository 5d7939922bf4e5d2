"""Texts and conversations that are tokenized as they are read: the same packs as of tokens that were stored before."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_streaming import MDSWriter, PackingConfig, StreamingDataLoader, StreamingDataset, TokenizeConfig
from lightning_streaming.errors import ConfigError, FormatError, SampleError, StateMismatchError
from lightning_streaming.logs import read_bad_samples
from lightning_streaming.tokenizing import documents
from lightning_streaming.tokenizing.documents import DocumentTokenizer
from lightning_streaming.tokenizing.tokenizer import FileTokenizer
from tests.broken_data import replacing
from tests.helpers import assert_error, json_copy, raises, worlds
from tests.tokenizing.test_chat import CONVERSATION, model_folder

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

CAPACITY = 96
TEXTS = [" ".join(["the cat, é", "sat ☃"][word % 2] for word in range(number * 7 % 40)) for number in range(60)]
CHATS = [CONVERSATION[: 2 * (number % 3) + 3][-5:] for number in range(30)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Datasets of texts, of conversations, and of the tokens of both; and the model's folder."""
    root = tmp_path_factory.mktemp("tokenize")
    model_folder(root / "model", "chatml")
    rows = {"text": [{"text": text, "id": number} for number, text in enumerate(TEXTS)]}
    rows["chat"] = [{"messages": chat, "id": number} for number, chat in enumerate(CHATS)]
    for name, column, encoding in (("text", "text", "str"), ("chat", "messages", "json")):
        with MDSWriter(out=str(root / name), columns={column: encoding, "id": "int"}, size_limit=2000) as writer:
            for row in rows[name]:
                writer.write(row)
        columns = {"tokens": "ndarray:int64", **({"loss_mask": "ndarray:uint8"} if name == "chat" else {})}
        tokenizer = DocumentTokenizer(**how(root, name))
        with MDSWriter(out=str(root / f"{name}-tokens"), columns=columns, size_limit=2000) as writer:
            for row in rows[name]:
                tokenized = tokenizer.tokenized(row)
                writer.write({name: tokenized[name] for name in columns})
    return root


def how(root: Path, name: str) -> dict[str, Any]:
    more = {"text": "text", "eos": "<|im_end|>"} if name == "text" else {"chat": "messages"}
    return {"tokenizer": str(root / "model"), **more}


def loader(
    root: Path, name: str, *, stored: bool = False, workers: int = 0, packing: Any = None, **options: Any
) -> StreamingDataLoader:
    along = {"along": ["loss_mask"]} if name == "chat" else {}
    tokens: dict[str, Any] = {"column": "tokens"} if stored else {"tokenize": how(root, name)}
    settings = {"capacity": CAPACITY, "window": 16, **along, **tokens, **(packing or {})}
    dataset = StreamingDataset(
        remote=str(root / (f"{name}-tokens" if stored else name)),
        shuffle=True,
        shuffle_algo="naive",
        num_canonical_nodes=2,
        packing=settings,
        **options,
    )
    return StreamingDataLoader(dataset, batch_size=2, num_workers=workers)


def as_lists(batches: Any) -> list[dict[str, Any]]:
    return [
        {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
        for batch in batches
    ]


@pytest.mark.parametrize("name", ["text", "chat"])
@pytest.mark.parametrize("packing", [{}, {"method": "concat"}, {"longer": "drop"}], ids=str)
def test_packs_are_those_of_stored_tokens(root: Path, name: str, packing: Any) -> None:
    expected = as_lists(loader(root, name, stored=True, packing=packing))
    assert len(expected) > 3
    assert as_lists(loader(root, name, packing=packing)) == expected


@pytest.mark.parametrize("name", ["text", "chat"])
def test_packs_are_the_same_by_workers_threads_and_ranks(root: Path, name: str) -> None:
    expected = as_lists(loader(root, name, stored=True))
    assert as_lists(loader(root, name, workers=2)) == expected
    assert as_lists(loader(root, name, decode={"threads": 2})) == expected
    ranks = [
        as_lists(loader(root, name, stored=stored, world=world)) for stored in (True, False) for world in worlds(1, 2)
    ]
    assert ranks[:2] == ranks[2:]


def test_groups_of_a_budget_are_those_of_stored_tokens(root: Path) -> None:
    tokenize, budget = how(root, "text"), {"tokens": 400, "window": 16}
    read, stored = (
        as_lists(StreamingDataLoader(StreamingDataset(remote=str(root / name), token_budget={**budget, **tokens})))
        for name, tokens in (("text", {"tokenize": tokenize}), ("text-tokens", {"column": "tokens"}))
    )
    assert read == stored


def test_a_resume_continues_and_another_template_is_refused(root: Path, tmp_path: Path) -> None:
    at = loader(root, "chat")
    batches = iter(at)
    for _ in range(3):
        next(batches)
    state = json_copy(at.state_dict())
    rest = as_lists(batches)
    again = loader(root, "chat", workers=1)
    again.load_state_dict(state)
    assert as_lists(again) == rest
    template = tmp_path / "other.jinja"
    template.write_text((root / "model" / "chat_template.jinja").read_text().replace("You may", "You can"))
    changed = loader(root, "chat", packing={"tokenize": {**how(root, "chat"), "template": str(template)}})
    changed.load_state_dict(state)
    with raises(StateMismatchError, "packing.lengths"):
        next(iter(changed))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("eos", 2**63),
        ("eos", str(2**63)),
        ("bos", "9" * 5000),
        ("bos", -1),
        ("bos", True),
        ("variables", {"a": {1, 2}}),
        ("variables", {"a": {1: 2}}),
        ("variables", [1]),
    ],
)
def test_values_that_cannot_be_are_refused(option: str, value: Any) -> None:
    columns: dict[str, Any] = {"chat": "messages"} if option == "variables" else {}
    with assert_error(ConfigError, option=f"tokenize.{option}"):
        TokenizeConfig(tokenizer="bytes", **columns, **{option: value})
    TokenizeConfig(tokenizer="bytes", bos=2**63 - 1, eos=str(2**63 - 1))


def test_a_stored_column_of_tokens_is_not_replaced() -> None:
    tokenizer = DocumentTokenizer(tokenizer="bytes", text="text")
    with assert_error(ConfigError, option="tokenize"):
        tokenizer.tokenized({"text": "a", "tokens": np.array([1])})
    with assert_error(ConfigError, option="tokenize"):
        tokenizer.joined([{"text": "a"}, {"text": "b", "tokens": 1}])
    assert sorted(tokenizer.tokenized({"text": "a", "loss_mask": 1})) == ["loss_mask", "tokens"]
    of_tokens = DocumentTokenizer(tokenizer="bytes", text="tokens")
    assert of_tokens.tokenized({"tokens": "a"})["tokens"].tolist() == [97]


def test_another_tokenizer_is_refused_where_lengths_are_stored(tmp_path: Path) -> None:
    with MDSWriter(out=str(tmp_path), columns={"text": "str", "size": "int"}) as writer:
        for number in range(40):
            writer.write({"text": "a" * (number % 9 + 1), "size": number % 9 + 2})

    def reading(eos: int) -> StreamingDataLoader:
        tokenize = {"tokenizer": "bytes", "eos": eos}
        packing = {"capacity": 16, "tokenize": tokenize, "lengths": "size"}
        return StreamingDataLoader(StreamingDataset(remote=str(tmp_path), packing=packing), batch_size=2)

    at = reading(256)
    batches = iter(at)
    next(batches)
    state, rest = json_copy(at.state_dict()), as_lists(batches)
    again, changed = reading(256), reading(257)
    again.load_state_dict(state)
    assert as_lists(again) == rest
    changed.load_state_dict(state)
    with raises(StateMismatchError, "packing.tokenize"):
        next(iter(changed))


@pytest.mark.nightly
def test_spawned_workers_refuse_another_tokenizer(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes((root / "model" / "tokenizer.json").read_bytes())
    packing = {"capacity": CAPACITY, "tokenize": {"tokenizer": str(path)}}
    dataset = StreamingDataset(remote=str(root / "text"), packing=packing)
    read = StreamingDataLoader(dataset, batch_size=2, num_workers=1, multiprocessing_context="spawn")
    assert len(read) > 2
    path.write_text(path.read_text().replace("<|im_end|>", "<|im_stop|>"))
    with raises(StateMismatchError, "was replaced after another process"):
        next(iter(read))


def test_lengths_are_counted_once_for_a_tokenizer(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = as_lists(loader(root, "text"))

    def fail(*_: object) -> None:
        raise AssertionError("counted again")

    monkeypatch.setattr(documents.DocumentTokenizer, "lengths", fail)
    assert as_lists(loader(root, "text")) == expected
    with pytest.raises(AssertionError, match="counted again"):
        len(loader(root, "text", packing={"tokenize": {**how(root, "text"), "bos": "<|im_start|>"}}))


def test_an_object_is_as_good_as_a_mapping(root: Path) -> None:
    config = PackingConfig(capacity=8, tokenize=TokenizeConfig(tokenizer="bytes"))
    assert config == PackingConfig(capacity=8, tokenize={"tokenizer": "bytes", "text": "text"}, column="tokens")
    described = StreamingDataset(remote="x", packing=config).config()["packing"]
    assert described["tokenize"] == {"tokenizer": "bytes", "text": "text", **dict.fromkeys(
        ("chat", "tools", "template", "variables", "bos", "eos"))}  # fmt: skip
    assert "tokenizer" not in described


def test_samples_by_id_are_tokenized_and_then_transformed(root: Path) -> None:
    packing = {"capacity": 8, "tokenize": how(root, "chat")}
    dataset = StreamingDataset(
        remote=str(root / "chat"), packing=packing, transform=lambda sample: {**sample, "tokens": sample["tokens"][:3]}
    )
    assert sorted(dataset[4]) == ["id", "loss_mask", "tokens"]
    expected = DocumentTokenizer(**how(root, "chat")).encode({"messages": CHATS[4]})
    assert (dataset[4]["tokens"].tolist(), dataset[4]["tokens"].dtype) == (expected.tokens[:3].tolist(), np.int64)


def test_a_row_that_cannot_be_tokenized_is_named(tmp_path: Path, root: Path) -> None:
    with MDSWriter(out=str(tmp_path / "a"), columns={"messages": "json"}) as writer:
        for messages in (CONVERSATION, [], CONVERSATION):
            writer.write({"messages": messages})
    packing: dict[str, Any] = {"capacity": 8, "tokenize": how(root, "chat")}
    dataset = StreamingDataset(remote=str(tmp_path / "a"), packing=packing)
    with pytest.raises(FormatError, match=r"shard.00000.mds: sample 1: a conversation must be a list") as caught:
        len(dataset)
    assert caught.value.sample == 1
    with pytest.raises(FormatError, match=r"shard.00000.mds: sample 1: a conversation must be a list"):
        dataset[1]


@pytest.mark.parametrize(
    ("column", "words"),
    [
        ("text", "tokenize={'tokenizer': 'tokenizer.json', 'text': 'text'}, and name the column 'tokens'"),
        ("idd", "did you mean 'id'? If transform creates it, set lengths"),
        ("tokens", "If transform creates it, set lengths, a column of numbers"),
    ],
)
def test_hints_name_the_option(root: Path, column: str, words: str) -> None:
    dataset = StreamingDataset(remote=str(root / "text"), packing={"column": column, "capacity": 8})
    with pytest.raises(ConfigError) as caught:
        len(dataset)
    assert words in str(caught.value.hint)


def test_columns_that_are_tokenized_must_be_read(root: Path) -> None:
    with pytest.raises(ConfigError, match="tokenize names 'text', which columns="):
        StreamingDataset(remote="x", columns=["id"], packing={"capacity": 8, "tokenize": how(root, "text")})


def test_streams_of_other_columns_are_packed_without_a_warning(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with MDSWriter(out=str(root / "fewer"), columns={"text": "str"}) as writer:
        writer.write({"text": json.dumps(TEXTS)})
    streams: Any = {name: {"remote": str(root / name)} for name in ("text", "fewer")}
    dataset = StreamingDataset(streams=streams, packing={"capacity": CAPACITY, "tokenize": how(root, "text")})
    assert len(list(StreamingDataLoader(dataset, batch_size=2))) > 2
    assert "different columns" not in caplog.text


@pytest.mark.parametrize("column", ["mesages", "conversations"])
def test_an_unknown_column_of_conversations_is_named_with_its_option(root: Path, column: str) -> None:
    tokenize = {**how(root, "chat"), "chat": column}
    with assert_error(ConfigError, option="packing.tokenize.chat") as caught:
        next(iter(loader(root, "chat", packing={"tokenize": tokenize})))
    words = f"packing.tokenize.chat={column!r}: unknown column {column!r}; the columns are id, messages"
    assert words in str(caught.value)
    assert "lambda" not in str(caught.value)


def encoded_texts(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """The lists of texts that are tokenized from now on."""
    calls, encode_some = list[Sequence[str]](), FileTokenizer.encode_some

    def counted(self: FileTokenizer, texts: Sequence[str]) -> Any:
        calls.append(texts)
        return encode_some(self, texts)

    monkeypatch.setattr(FileTokenizer, "encode_some", counted)
    return calls


@pytest.mark.parametrize("method", ["best_fit", "concat"])
def test_documents_of_packs_are_tokenized_together_and_each_once(
    root: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    read = loader(root, "text", packing={"method": method})
    num_batches = len(read)
    calls = encoded_texts(monkeypatch)
    pieces = sum(int((batch["document_ids"].diff(dim=1) > 0).sum()) + 2 for batch in read)
    texts = [text for some in calls for text in some]
    assert sorted(texts) == sorted(TEXTS)
    assert len(calls) <= num_batches
    assert pieces > len(texts)  # some are in two packs


def damage(root: Path, name: str, local: Path, old: bytes, new: bytes, most: int) -> None:
    """Damage rows of two shards in a cache, after the lengths of all were counted."""
    len(loader(root, name, local=str(local)))
    for path in sorted(local.rglob("*.mds"))[1:3]:
        before = path.stat()
        path.write_bytes(path.read_bytes().replace(old, new, most))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as by a disk: else it is fetched again


@pytest.mark.rotate
@pytest.mark.parametrize("name", ["text", "chat"])
@pytest.mark.parametrize("workers", [0, 2])
def test_bad_documents_are_replaced_as_where_each_is_read_alone(
    root: Path, tmp_path: Path, name: str, workers: int
) -> None:
    old, new = (b"sat", b"\xff\xff\xff") if name == "text" else (b'"user"', b'"user}')
    damage(root, name, tmp_path / "cache", old, new, 9)

    def read(log: str, **options: Any) -> StreamingDataLoader:
        bad = replacing(tmp_path / log)
        return loader(root, name, workers=workers, local=str(tmp_path / "cache"), bad_samples=bad, **options)

    alone = as_lists(read("alone", transform=dict))
    together = read("together")
    assert as_lists(together) == alone
    assert as_lists(read("together")) == alone  # which knows the bad ones from the first time
    logged = [{bad.key for bad in read_bad_samples(tmp_path / log)} for log in ("alone", "together")]
    assert logged[0] == logged[1]
    assert together.statistics().bad_samples >= len(logged[0]) > 1


def test_a_bad_document_among_many_is_named(root: Path, tmp_path: Path) -> None:
    damage(root, "text", tmp_path, b"sat", b"\xff\xff\xff", 9)
    errors, batches = list[str](), list[list[Any]]()
    for transform in (None, dict):
        read = iter(loader(root, "text", local=str(tmp_path), packing={"capacity": 16}, transform=transform))
        batches.append([])
        with pytest.raises(FormatError, match=r"shard.0000[12].mds, sample") as caught:
            batches[-1].extend(read)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]
    assert as_lists(batches[0]) == as_lists(batches[1])


def test_documents_of_other_lengths_than_counted_are_an_error(root: Path, tmp_path: Path) -> None:
    damage(root, "text", tmp_path, b"cat", b"\xe2\x98\x83", 9)
    with pytest.raises(SampleError, match=r"a document has \d+ values in column 'tokens', and was said to have"):
        list(loader(root, "text", local=str(tmp_path)))


def test_workers_tokenize_in_one_thread(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    read = loader(root, "text", workers=1)
    expected = as_lists(loader(root, "text", stored=True))
    len(read)  # by all cores; a forked process has none of these threads, and would wait for them
    assert as_lists(read) == expected
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"
