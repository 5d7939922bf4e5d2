from __future__ import annotations

import pytest

from lightning_streaming.errors import ConfigError
from lightning_streaming.storage.variables import expand, expand_known


@pytest.fixture(autouse=True)
def _variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORE_SECRET", "hush")
    monkeypatch.setenv("STORE_HOST", "here")
    monkeypatch.delenv("STORE_MISSING", raising=False)


def test_variables_are_replaced_at_any_depth() -> None:
    options = {
        "secret": "${STORE_SECRET}",
        "client_kwargs": {"endpoint_url": "http://${STORE_HOST}:9000/${STORE_HOST}", "list": ["${STORE_HOST}", 1]},
        "anon": False,
    }
    assert expand(options) == {
        "secret": "hush",
        "client_kwargs": {"endpoint_url": "http://here:9000/here", "list": ["here", 1]},
        "anon": False,
    }
    assert options["secret"] == "${STORE_SECRET}"


@pytest.mark.parametrize("text", ["$STORE_HOST", "${}", "${1A}", "{STORE_HOST}", "a$b", "${oc.env:HOME}"])
def test_other_texts_stay_as_they_are(text: str) -> None:
    assert expand({"x": text}) == {"x": text}


def test_what_a_variable_holds_is_not_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORE_SECRET", "${STORE_HOST}")
    assert expand({"x": "${STORE_SECRET}"}) == {"x": "${STORE_HOST}"}


def test_a_variable_that_is_not_set_is_named() -> None:
    options = {"key": "literal-key", "x": "${STORE_MISSING}"}
    with pytest.raises(ConfigError, match="variable STORE_MISSING, but it is not set") as caught:
        expand(options)
    assert "literal-key" not in str(caught.value)
    assert expand_known(options) == options
