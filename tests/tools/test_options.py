from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Mapping
from typing import Any

import pytest

from lightning_streaming.tools.options import (
    add_storage_options,
    add_workers,
    not_negative,
    positive,
    storage_options,
    usable_cpus,
)


def parsed(*args: str) -> Mapping[str, Any]:
    parser = ArgumentParser()
    add_storage_options(parser)
    return storage_options(parser.parse_args(args).storage_options)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("true", True),
        ("false", False),
        ("null", None),
        ("3", 3),
        ("-1.5", -1.5),
        ('"3"', "3"),
        ("[1, 2]", [1, 2]),
        ('{"region_name": "eu"}', {"region_name": "eu"}),
        ("http://host:9000", "http://host:9000"),
        ("a=b=", "a=b="),  # as secrets may end
        ("123e45", "123e45"),  # a key, not a huge number
        ("0123", "0123"),
        ("", ""),
        ("True", "True"),
        ("٣", "٣"),
    ],
)
def test_values_are_json_where_that_is_meant(written: str, value: Any) -> None:
    assert parsed("--storage-options", f"x={written}") == {"x": value}


def test_several_options_are_one_mapping() -> None:
    assert parsed() == {}
    given = ["--storage-options", "key=a", "--storage-options", "anon=true", "--storage-options", "key=b"]
    assert parsed(*given) == {"key": "b", "anon": True}


@pytest.mark.parametrize("written", ["opensesame", "=opensesame", 'key={"a": opensesame', "key=[opensesame]"])
def test_a_value_is_not_shown_when_it_is_refused(written: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed("--storage-options", written)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "--storage-options" in error
    assert "opensesame" not in error


@pytest.mark.parametrize("written", ["0", "-1", "two", "1.5", ""])
def test_workers_must_be_a_positive_number(written: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = ArgumentParser()
    add_workers(parser, 4, "threads")
    assert parser.parse_args([]).workers == 4
    with pytest.raises(SystemExit):
        parser.parse_args(["--workers", written])
    assert "at least 1" in capsys.readouterr().err


def test_numbers() -> None:
    assert positive("12") == 12
    assert not_negative("0") == 0
    assert usable_cpus() >= 1
