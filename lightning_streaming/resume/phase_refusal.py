"""Messages for a saved position that is refused because phases that have begun have changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_streaming.resume.differences import Difference
from lightning_streaming.resume.state import SavedPosition
from lightning_streaming.sequence.phases import ResolvedPhase


def ways_out_of_phases(
    found: Sequence[Difference], saved: SavedPosition, phases: Sequence[ResolvedPhase], checkpoint: str
) -> str:
    """Return sentences with the fix, or the command that prints it; empty if no phase differs.

    Args:
        found: What differs.
        saved: The position.
        phases: As they are asked for now.
        checkpoint: Where the position was read from, as messages call it.
    """
    of_phases = [one for one in found if one.setting.startswith("schedule.")]
    if not of_phases:
        return ""
    asked = {phase.name: phase for phase in phases}
    told = [sentence for one in of_phases for sentence in _why(one, saved, asked)]
    told.append(
        f"What follows the phases that have begun may change: `lightning-streaming state branch {checkpoint}` says how "
        "to end the last of them where the checkpoint stands."
    )
    return "".join(f" {sentence}" for sentence in told)


def _why(one: Difference, saved: SavedPosition, asked: dict[str, ResolvedPhase]) -> Iterator[str]:
    """Return the reason of one difference."""
    name, _, field = one.setting.removeprefix("schedule.").rpartition(".")
    phase, (epoch, sample) = asked.get(name), saved.cursor
    if phase is None:
        return
    if field == "end" and phase.written is not None:
        size = next(reversed(asked.values())).planned_stop  # that of the last phase, which ends with the epoch
        yield (
            f"schedule.{name}.end is written as {phase.written} of epoch_size, which is {size} now; to keep it where "
            f"it was, write {one.saved}."
        )
    if field == "ended_at" and one.saved == "'absent'" and phase.cut is not None and not epoch and phase.cut < sample:
        stands = f"sample {sample}, where the checkpoint stands"
        yield f"schedule.{name}.ended_at={phase.cut} lies before {stands}; end it there or later."
