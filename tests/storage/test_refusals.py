from __future__ import annotations

import pytest

from lightning_streaming.storage.refusals import RefusedError, words_of

S3 = """<?xml version="1.0"?><Error><Code>SignatureDoesNotMatch</Code><Message>It does not match</Message>
<AWSAccessKeyId>AKIDEXAMPLE</AWSAccessKeyId><StringToSign>AWS4 secret</StringToSign></Error>"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (S3, "SignatureDoesNotMatch: It does not match"),
        (
            '{"error": {"code": 400, "message": "Bucket is a requester pays bucket"}}',
            "Bucket is a requester pays bucket",
        ),
        ("No such object:\n  bucket/x", "No such object: bucket/x"),
        ("<html><body>sorry</body></html>", "the reason"),
        ('{"error": "odd"}', "the reason"),
        ('["odd"]', "the reason"),
        ("", "the reason"),
        ("long " * 1000, ("long " * 40).strip()),
        ("word " + "0123456789" * 100, "word"),  # half of a secret would be shown, not knowing that it is one
        ("0123456789" * 100, "the reason"),
    ],
)
def test_only_words_for_people_are_taken_from_an_answer(text: str, words: str) -> None:
    assert words_of(text, "the reason") == words


def test_a_refusal_tells_status_and_words() -> None:
    assert str(RefusedError(404, {}, "no such object")) == "status 404, no such object"
    assert str(RefusedError(404, {}, "")) == "status 404"
