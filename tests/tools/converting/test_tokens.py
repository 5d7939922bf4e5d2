"""Blocks of tokens, and rows that cannot be tokenized."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from lightning_streaming.tools.converting.tokens import Packer
from tests.tiers import examples
from tests.tools.running import run


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


def test_a_tokenizer_that_raises_names_the_row(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"the": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[misc, assignment, unused-ignore]
    tokenizer.save(str(tmp_path / "t.json"))
    (tmp_path / "a.jsonl").write_text('{"text": "the"}\n{"text": "the cat"}\n')
    words = ["--tokenize", "--tokenizer", tmp_path / "t.json", "--block-length", 1]
    outcome = run("convert", tmp_path / "a.jsonl", tmp_path / "out", *words)
    assert outcome.code == 1
    assert "a.jsonl, line 2: the tokenizer cannot encode 'the cat'" in outcome.err
