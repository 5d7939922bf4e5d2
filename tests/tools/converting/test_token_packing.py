"""Tokenizers, the dtype of tokens, and blocks of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from lightning_streaming.errors import ConfigError, EncodingError
from lightning_streaming.tools.converting.tokens import Packer, choose_dtype, find_end, fingerprint, load_tokenizer
from tests.tiers import examples
from tests.tools.running import run

WORDS = {"the": 0, "cat": 1, "sat": 2, "[UNK]": 3, "<end>": 9}


def word_tokenizer(path: Path) -> Path:
    """The file of a tokenizer of a few words, which says to cut documents off at 2 tokens and to fill them up."""
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[misc, assignment, unused-ignore]
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(path))
    return path


@given(sizes=st.lists(st.integers(0, 30), max_size=20), length=st.integers(1, 12))
@settings(max_examples=examples(100))
def test_blocks_are_the_documents_end_to_end(sizes: list[int], length: int) -> None:
    stream = np.arange(sum(sizes), dtype=np.uint32)
    documents = np.split(stream, np.cumsum(sizes))[: len(sizes)]
    packer = Packer(length, "uint16")
    blocks = [packer.add(document) for document in documents]
    assert all(block.shape[1:] == (length,) and block.dtype == np.uint16 for block in blocks)
    packed = np.concatenate([block.ravel() for block in blocks]) if blocks else stream
    assert packed.tolist() == stream[: len(stream) - packer.num_pending].tolist()
    assert packer.num_pending == len(stream) % length


def test_blocks_share_no_memory_that_changes(tmp_path: Path) -> None:
    packer = Packer(2, "uint8")
    document = np.array([1, 2, 3], np.uint8)
    first = packer.add(document)
    document[:] = 9
    second = packer.add(np.array([4], np.uint8))
    assert (first.tolist(), second.tolist()) == ([[1, 2]], [[3, 4]])


def test_bytes_are_those_of_utf_8() -> None:
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.encode("aé").tolist() == [97, 195, 169]
    assert tokenizer.num_ids == 256
    with pytest.raises(EncodingError, match="not Unicode"):
        tokenizer.encode("\ud800")


def test_a_file_neither_cuts_documents_off_nor_fills_them_up(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(word_tokenizer(tmp_path / "t.json")))
    assert tokenizer.encode("the cat sat the dog").tolist() == [0, 1, 2, 0, 3]
    assert tokenizer.encode("").tolist() == []
    assert tokenizer.num_ids == 10
    with pytest.raises(EncodingError, match="not Unicode"):
        tokenizer.encode("\ud800")


def test_the_end_is_a_number_or_a_name(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(word_tokenizer(tmp_path / "t.json")))
    assert (find_end(tokenizer, "<end>"), find_end(tokenizer, "7")) == (9, 7)
    for name in ("<eos>", "-1", ""):
        with pytest.raises(ConfigError, match="has no token"):
            find_end(tokenizer, name)
    with pytest.raises(ConfigError, match="has no token 'a'"):
        find_end(load_tokenizer("bytes"), "a")


def test_a_file_that_is_none_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(ConfigError, match="no file of the tokenizers package"):
        load_tokenizer(str(tmp_path / "a.json"))
    with pytest.raises(ConfigError, match="bytes or a JSON file"):
        load_tokenizer(str(tmp_path / "none.json"))


def test_a_tokenizer_that_raises_names_the_row(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"the": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[misc, assignment, unused-ignore]
    tokenizer.save(str(tmp_path / "t.json"))
    with pytest.raises(EncodingError, match="the tokenizer cannot encode 'the cat'"):
        load_tokenizer(str(tmp_path / "t.json")).encode("the cat")
    (tmp_path / "a.jsonl").write_text('{"text": "the"}\n{"text": "the cat"}\n')
    words = ["--tokenize", "--tokenizer", tmp_path / "t.json", "--block-length", 1]
    outcome = run("convert", tmp_path / "a.jsonl", tmp_path / "out", *words)
    assert outcome.code == 1
    assert "a.jsonl, line 2: the tokenizer cannot encode 'the cat'" in outcome.err


@pytest.mark.parametrize("text", ["[]", "3", '{"version": "9.9", "model": 3}', '{"model": {"type": "None"}}'])
def test_json_that_is_no_tokenizer_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ConfigError, match="no file of the tokenizers package"):
        load_tokenizer(str(tmp_path / "a.json"))


def test_a_token_that_no_dtype_holds_is_refused() -> None:
    for asked in (None, "uint64"):
        with pytest.raises(ConfigError, match="tokens must be at most 18446744073709551615"):
            choose_dtype(2**64 + 1, asked)


def test_another_tokenizer_has_another_fingerprint(tmp_path: Path) -> None:
    path = word_tokenizer(tmp_path / "t.json")
    before = fingerprint(str(path))
    path.write_text(path.read_text().replace('"cat"', '"dog"'))
    assert len({before, fingerprint(str(path)), fingerprint("bytes")}) == 3


@pytest.mark.parametrize(
    ("num_ids", "dtype"), [(256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32"), (2**33, "uint64")]
)
def test_the_smallest_dtype_holds_the_vocabulary(num_ids: int, dtype: str) -> None:
    assert choose_dtype(num_ids, None) == dtype
    assert choose_dtype(num_ids, dtype) == dtype


def test_a_dtype_that_is_too_small_is_refused() -> None:
    assert choose_dtype(128, "int8") == "int8"
    with pytest.raises(ConfigError, match="tokens up to 128, but int8 ends at 127; uint8 is enough"):
        choose_dtype(129, "int8")
