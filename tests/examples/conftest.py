"""A directory with the data of the examples, and a process that a command line may change."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from examples.custom_datamodule import write_digits
from examples.imagenet import write_pictures
from examples.joined_columns import write_columns
from examples.packed_documents import write_documents
from examples.pretrain import write_sources
from examples.sft import convert_arguments, write_chats
from examples.write_dataset import FIRST_ID, code_files, document_files, write_blocks
from examples.write_parquet import write_files
from tests.tools.running import run


@pytest.fixture(scope="session")
def example_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the configurations expect their data to be, and as much as they reckon with."""
    root = tmp_path_factory.mktemp("examples") / "demo_output"
    write_blocks(code_files(), root / "data" / "code", most=4000, first_id=FIRST_ID["code"])
    write_blocks(document_files(), root / "data" / "docs", most=4000, first_id=FIRST_ID["docs"])
    write_columns(root / "data")
    write_digits(root / "digits")
    write_documents(root / "documents")
    write_files(root / "parquet")
    write_pictures(root / "pictures", 256)
    write_sources(root / "pretrain")
    write_chats(root / "sft")
    assert run("convert", *convert_arguments(root / "sft")).code == 0
    return root


@pytest.fixture
def in_example_directory(example_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of its own to run a configuration in, with that data below."""
    (tmp_path / "demo_output").mkdir()
    for name in ("data", "digits", "documents", "parquet", "pictures", "pretrain", "sft"):
        (tmp_path / "demo_output" / name).symlink_to(example_data / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-streaming"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning's dealings, not ours
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more would only wait for each other on a busy machine
    yield tmp_path
    torch.set_num_threads(threads)
