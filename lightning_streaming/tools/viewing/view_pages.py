"""The pages of ``lightning-streaming view``: a path and what follows its question mark in, HTML or a file out.

    page            what all pages are made with
    dataset_pages   what is in a dataset: overview, columns, shards
    sample_pages    what is in its samples: a list, one of them
    run_pages       what a run reads, its next steps, its checkpoint
    batch_pages     what is in the batches of a step

What fails is told in the page, in the words of the error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from lightning_streaming.errors import SampleIndexError, StreamingError
from lightning_streaming.tools.drawing.pages import icon, style
from lightning_streaming.tools.viewing import batch_pages, dataset_pages, run_pages, sample_pages
from lightning_streaming.tools.viewing.page import Answer, Frame, Request


class Pages(Frame):
    """All pages of what is viewed."""

    def answer(self, request: Request) -> Answer | None:
        """What to show; None if there is no such page."""
        for pattern, page in _ROUTES:
            match = pattern.fullmatch(request.path)
            if match is None:
                continue
            try:
                return page(self, request, *map(int, match.groups()))
            except SampleIndexError as error:
                return self.failed(request, error, 404)
            except (StreamingError, OSError) as error:
                return self.failed(request, error)
        return None


def _style(_: Frame, __: Request) -> Answer:
    return Answer(data=style().encode(), content_type="text/css")


def _icon(_: Frame, __: Request) -> Answer:
    return Answer(data=icon(), content_type="image/svg+xml")


_Page = Callable[..., Answer | None]
_PATHS: Mapping[str, _Page] = {
    "": run_pages.front,
    r"style\.css": _style,
    r"icon\.svg": _icon,
    "s/#/": dataset_pages.overview,
    "s/#/samples": sample_pages.samples,
    "s/#/sample/#": sample_pages.sample,
    "s/#/file/#/#/#": sample_pages.file,
    "s/#/columns": dataset_pages.columns,
    "s/#/shards": dataset_pages.shards,
    "find": sample_pages.find,
    "order": run_pages.order,
    "batches": batch_pages.batches,
    "checkpoint": run_pages.checkpoint,
}
_ROUTES = [(re.compile(path.replace("#", r"([0-9]{1,18})")), page) for path, page in _PATHS.items()]
