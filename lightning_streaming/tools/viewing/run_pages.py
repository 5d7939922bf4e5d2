"""Pages of a run: what it reads, which steps come next, and where its checkpoint stands."""

from __future__ import annotations

from typing import Any

from lightning_streaming.errors import StreamingError
from lightning_streaming.tools.viewing.page import Answer, Frame, Request, in_words


def front(frame: Frame, request: Request) -> Answer:
    """What a run reads, stage by stage; of a dataset alone the way to its overview."""
    if frame.viewed.run is None:
        return request.to("s/0/")
    stages = []
    for stage in frame.viewed.run.configs:
        is_asked = request.is_asked and request.query.get("stage") == stage
        streams = [(place, one) for place, one in enumerate(frame.viewed.streams) if one.stage == stage]
        unread, report, problem = None, None, None
        try:
            unread = None if is_asked else frame.viewed.run.unread(stage)
            report = None if unread else frame.viewed.run.stage(stage)
        except StreamingError as error:
            problem = in_words(error)
        packs = frame.viewed.run.packs(stage) if report else ()
        told = {"unread": unread, "report": report, "problem": problem, "packs": packs}
        stages.append({"name": stage, "streams": streams, **told})
    return frame.show(request, "view_run.html", "What the run reads", here="run", stages=stages)


def order(frame: Frame, request: Request) -> Answer | None:
    """What some steps read, each sample as a square."""
    run = frame.viewed.run
    if run is None:
        return None
    asked = {name: request.optional(name) for name in ("step", "steps", "rank")}
    title, unread = "What is read next", None if request.is_asked else run.unread("train")
    if unread is not None:
        again = "".join(f"&{name}={number}" for name, number in asked.items() if number is not None)
        return frame.show(request, "view_order.html", title, here="order", unread=unread, again=again, order=None)
    order = run.next_steps(asked["step"], min(max(1, request.number("steps", 4)), 32), asked["rank"])
    places = {one.name: place for place, one in enumerate(frame.viewed.streams) if one.stage == "train"}
    return frame.show(request, "view_order.html", title, here="order", unread=None, order=order, places=places)


def checkpoint(frame: Frame, request: Request) -> Answer | None:
    """Where the checkpoint stands, and how much of each stream was read."""
    run = frame.viewed.run
    if run is None or run.places is None:
        return None
    trainer = run.places.trainer
    loaders = [
        {"name": name, "of": loader, "seen": run.seen(name), "share": _done(loader)}
        for name, loader in run.places.loaders.items()
    ]
    told: dict[str, Any] = {
        "loaders": loaders,
        "trainer": trainer,
        "step": run.places.global_step,
        "file": run.checkpoint,
    }
    return frame.show(request, "view_checkpoint.html", "Where the checkpoint stands", here="checkpoint", **told)


def _done(loader: Any) -> float | None:
    size = loader.epoch_size
    return min(1.0, loader.position.cursor.sample_in_epoch / size) if size else None
