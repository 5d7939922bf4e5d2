"""What reading a configuration needs, whoever reads it."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from lightning_streaming.errors import ConfigError


def config_error_behind(error: BaseException | None) -> ConfigError | None:
    """The error of ours that jsonargparse has wrapped into its own; None if there is none."""
    while error is not None and not isinstance(error, ConfigError):
        error = error.__cause__
    return error


def error_of_user_behind(error: BaseException) -> BaseException:
    """The error that jsonargparse has wrapped into its own, whose words repeat the configuration; itself if none."""
    while type(error) is ValueError and error.__cause__ is not None and _raised_by_jsonargparse(error):
        error = error.__cause__
    return error


def _raised_by_jsonargparse(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and "jsonargparse" in Path(frames[-1].filename).parts


def look_for_modules_here() -> None:
    """Find modules of the current directory, too: a configuration names the user's own by class_path.

    A console script does not look for modules where it is called.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
