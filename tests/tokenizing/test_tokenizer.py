"""Tokenizers, and the dtype of tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from lightning_streaming.errors import ConfigError, EncodingError
from lightning_streaming.tokenizing.tokenizer import (
    choose_dtype,
    find_token,
    fingerprint,
    load_tokenizer,
    read_tokenizer,
    with_ends,
)

WORDS = {"the": 0, "cat": 1, "sat": 2, "[UNK]": 3, "<end>": 9}


def word_tokenizer(path: Path) -> Path:
    """The file of a tokenizer of a few words, which says to cut documents off at 2 tokens and to fill them up."""
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[misc, assignment, unused-ignore]
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(path))
    return path


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
    assert (find_token(tokenizer, "<end>", "--eot"), find_token(tokenizer, "7", "--eot")) == (9, 7)
    for name in ("<eos>", "-1", ""):
        with pytest.raises(ConfigError, match="has no token"):
            find_token(tokenizer, name, "--eot")
    with pytest.raises(ConfigError, match="has no token 'a'"):
        find_token(load_tokenizer("bytes"), "a", "--eot")


def test_a_file_that_is_none_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(ConfigError, match="no file of the tokenizers package"):
        load_tokenizer(str(tmp_path / "a.json"))
    with pytest.raises(ConfigError, match="must be bytes, a JSON file or a folder"):
        load_tokenizer(str(tmp_path / "none.json"))
    with pytest.raises(ConfigError, match="must be bytes, a JSON file or a folder"):
        load_tokenizer("a\0b")


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
    before = fingerprint(read_tokenizer(str(path)))
    path.write_text(path.read_text().replace('"cat"', '"dog"'))
    assert len({before, fingerprint(read_tokenizer(str(path))), fingerprint(read_tokenizer("bytes"))}) == 3


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


def test_a_folder_stands_for_its_tokenizer(tmp_path: Path) -> None:
    word_tokenizer(tmp_path / "tokenizer.json")
    assert load_tokenizer(str(tmp_path)).encode("cat").tolist() == [1]
    assert read_tokenizer(str(tmp_path)) == (tmp_path / "tokenizer.json").read_bytes()


def test_a_word_that_the_tokenizer_lacks_is_an_error(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"the": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[misc, assignment, unused-ignore]
    tokenizer.save(str(tmp_path / "t.json"))
    with pytest.raises(EncodingError, match="the tokenizer cannot encode 'the cat'"):
        load_tokenizer(str(tmp_path / "t.json")).encode("the cat")


def test_ends_are_added_where_they_are_missing() -> None:
    tokens = np.array([1, 5, 2], np.uint8)
    assert with_ends(tokens, 1, 2) is tokens
    assert with_ends(tokens[1:], 1, 300).tolist() == [1, 5, 2, 300]
    assert with_ends(tokens[:0], 2**40, None).tolist() == [2**40]
    assert with_ends(tokens[:1], 1, 1).tolist() == [1]
    assert with_ends(tokens[:0], 1, 2).tolist() == [1, 2]
