"""A run to tune: small data and its configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from lightning_streaming import MDSWriter

SAMPLES = {"web": 120, "books": 40}
QUICK = ["--seconds", 0.05, "--num-workers", "0,1"]


def write_data(root: Path, **settings: Any) -> Path:
    for name, samples in SAMPLES.items():
        columns = {"id": "int", "text": "str"}
        with MDSWriter(out=root / name, columns=columns, size_limit=700, hashes=["sha1"], **settings) as writer:
            for number in range(samples):
                writer.write({"id": number, "text": f"{name} {number:020}"})
    return root


def streams(root: object, local: str | None = None) -> dict[str, Any]:
    return {
        name: {"remote": f"{root}/{name}", "proportion": 0.5, **({"local": f"{local}/{name}"} if local else {})}
        for name in SAMPLES
    }


def write_config(path: Path, train: dict[str, Any], class_path: str | None = None, **data: Any) -> Path:
    init_args = {"batch_size": 4, **data, "train": {"shuffle": True, **train}}
    content = {
        "seed_everything": 1,
        "model": {"class_path": "tests.tools.test_tune.Model"},
        "data": {"init_args": init_args, **({"class_path": class_path} if class_path else {})},
        "trainer": {
            "accelerator": "cpu",
            "devices": 1,
            "max_steps": 2,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        },
    }
    path.write_text(yaml.safe_dump(content))
    return path
