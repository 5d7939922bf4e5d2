from __future__ import annotations

from pathlib import Path

from lightning_streaming.tools.unnamed import shown, unnamed_files
from tests.tools.running import contents, run, write_texts


def test_only_what_looks_like_a_shard_and_is_not_named_is_found(tmp_path: Path) -> None:
    index = write_texts(tmp_path / "data", compression="zstd")
    named = list(contents(tmp_path / "data"))
    stray = [
        "shard.00009.mds",
        "shard.00000.mds.zstd.damaged",
        "shard.00000.mds.zstd.damaged.2",
        "shard.00003.mds.node-1-2.part",
        "gone/shard.00000.csv.meta",
    ]
    fine = [
        "README.md",
        "shard.00000.mds",  # decompressed, as in a cache
        "index.json.copying",
        "parts.plan",
        ".writing/shard.00000.mds.zstd",
        "val/index.json",
        "val/shard.00000.mds",
        "val/deeper/shard.00000.mds",
    ]
    assert unnamed_files([*named, *stray, *fine], index) == sorted(stray)
    assert unnamed_files([], index) == []


def test_a_few_are_shown() -> None:
    assert shown(["a"]) == "1 file (a)"
    assert shown(list("abcdefg")) == "7 files (a, b, c, d, e, ...)"


def test_a_dataset_in_parts_names_all(tmp_path: Path) -> None:
    for part in ("one", "two"):
        write_texts(tmp_path / "all" / part)
    run("merge", tmp_path / "all")
    found = run("verify", tmp_path / "all", "--json")
    assert (found.code, found.json["unnamed_files"]) == (0, [])
    (tmp_path / "all" / "shard.00000.mds").write_bytes(b"")
    assert run("verify", tmp_path / "all", "--json").json["unnamed_files"] == ["shard.00000.mds"]
