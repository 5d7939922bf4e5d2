from __future__ import annotations

import traceback

import pytest

from lightning_streaming.storage.secrets import redact, secrets_of, shown_cause

OPTIONS = {
    "key": "AKIDEXAMPLE",
    "client_kwargs": {"headers": {"Authorization": "Bearer hunter2"}, "auth": ("user-name", "pass-word")},
    "endpoint_url": "http://store:9000",
    "anon": False,
}


@pytest.mark.parametrize("secret", ["AKIDEXAMPLE", "Bearer hunter2", "pass-word"])
def test_every_text_of_the_options_is_masked(secret: str) -> None:
    assert redact(f"refused {secret}!", OPTIONS) == "refused ***!"


def test_urls_in_a_text_are_masked_however_they_are_quoted() -> None:
    text = "got 403, url='https://me:pw@host/x?sig=a%2Fb', then http://host/y?z"
    assert redact(text, {}) == "got 403, url='https://host/x', then http://host/y"


def test_the_endpoint_stays_readable() -> None:
    assert redact("cannot reach http://store:9000/b", OPTIONS) == "cannot reach http://store:9000/b"


def test_a_chain_without_secrets_is_kept() -> None:
    error = OSError("reset by peer")
    assert shown_cause(error, OPTIONS) is error


def test_a_chain_with_a_secret_is_replaced_by_its_redacted_words() -> None:
    error = OSError("could not sign")
    error.__cause__ = ValueError("AKIDEXAMPLE is odd")
    shown = shown_cause(error, OPTIONS)
    assert str(shown) == "OSError: could not sign"
    assert "AKIDEXAMPLE" not in "".join(traceback.format_exception(shown))


def test_what_options_take_from_the_environment_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORE_SECRET", "hunter2")
    assert redact("refused hunter2", {"secret": "${STORE_SECRET}"}) == "refused ***"


@pytest.mark.parametrize(
    ("url", "secrets"),
    [
        ("s3://bucket/x", set()),
        ("/data/a@b?c=d", set()),
        ("https://me:pass@host/x", {"me:pass", "pass"}),
        ("https://0123456789@host/x", {"0123456789"}),  # a token alone
        ("s3://0123456789:a/b+c@bucket/x", {"0123456789:a/b+c", "0123456789", "a/b+c"}),
        ("https://me:p%40ss@host/a@b", {"me:p%40ss", "me:p@ss", "p%40ss", "p@ss"}),
        ("https://host/x?set=train", {"set=train"}),  # "train" may be elsewhere in an error, and is no secret
        ("https://host/x?sig=0123456789a%2F", {"sig=0123456789a%2F", "sig=0123456789a/", "0123456789a/"}),
    ],
)
def test_the_secrets_of_a_url_are_known_as_written_and_decoded(url: str, secrets: set[str]) -> None:
    assert set(secrets_of(url)) == secrets
    assert redact(" ".join(["a", *secrets]), {}, secrets_of(url)) == " ".join(["a", *["***" for _ in secrets]])
