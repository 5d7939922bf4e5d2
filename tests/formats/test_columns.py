from __future__ import annotations

from typing import Any

import pytest

from lightning_streaming.errors import ConfigError
from lightning_streaming.formats.columns import check_columns, check_selection, column_names
from tests.formats.golden_datasets import SERVED, expectations, read_index
from tests.formats.small_shards import shard_info
from tests.golden import golden_path


@pytest.mark.parametrize("name", SERVED)
def test_names_are_those_of_the_columns_whatever_the_format(name: str) -> None:
    for shard in read_index(golden_path("mds", name)).shards:
        assert list(column_names(shard)) == sorted(expectations()[name]["columns"])


@pytest.mark.parametrize(("asked", "found"), [(None, None), (["b", "a", "b"], ("b", "a")), (("a",), ("a",))])
def test_each_column_is_asked_for_once(asked: Any, found: Any) -> None:
    assert check_selection(asked) == found


@pytest.mark.parametrize("asked", [[], (), "text", b"text", {"a"}, {"a": 1}, ["a", 1], [None], 3])
def test_what_is_no_list_of_names_is_refused(asked: Any) -> None:
    with pytest.raises(ConfigError, match="columns must"):
        check_selection(asked)


def test_a_shard_without_a_column_says_what_it_has() -> None:
    check_columns(shard_info(b""), None)
    check_columns(shard_info(b""), ["text"])
    with pytest.raises(ConfigError, match=r"shard\.mds has no column 'é'; it has 'id', 'text'"):
        check_columns(shard_info(b""), ["text", "é"])
