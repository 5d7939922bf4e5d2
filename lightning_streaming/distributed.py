"""Work of all ranks together: gathering the values of samples, and one state for all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_streaming.exports import lazy_exports

if TYPE_CHECKING:
    from lightning_streaming.dataset.sample_key import SampleKeys as SampleKeys
    from lightning_streaming.reading.ranks import all_gather_samples as all_gather_samples
    from lightning_streaming.reading.ranks import restore_state_global as restore_state_global
    from lightning_streaming.reading.ranks import save_state_global as save_state_global
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
