"""Documents that are cut between packs, kept for their other pieces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lightning_streaming.reading.packs import documents as cut_documents
from lightning_streaming.reading.packs.documents import CutDocuments


def test_a_document_that_fails_removes_no_other_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Any:
        documents.made((0, 0, 1, 0), lambda: {"tokens": np.zeros(101, np.uint8)})  # drops the one that is being made
        documents.made((0, 0, 0, 1), lambda: latest)  # as another thread does, which then makes it again
        raise ValueError("damaged")

    monkeypatch.setattr(cut_documents, "KEPT_BYTES", 100)
    documents, latest = CutDocuments(["tokens"], None), {"tokens": np.zeros(10, np.uint8)}
    with pytest.raises(ValueError, match="damaged"):
        documents.made((0, 0, 0, 0), fail)
    assert documents.made((0, 0, 0, 2), dict)["tokens"] is latest["tokens"]
    assert documents._bytes == 10
