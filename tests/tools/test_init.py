"""What ``init`` writes trains as it is, and goes on in the middle of an epoch, whatever the data holds."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml  # type: ignore[import-untyped]
from PIL import Image

import lightning_streaming.trainer.cli  # noqa: F401  what a fork of this process need not import again
from lightning_streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from lightning_streaming.errors import ConfigError
from lightning_streaming.tools.starting.run_files import module_text
from lightning_streaming.tools.starting.tasks import Kind, Task
from tests.golden import golden_path
from tests.servers import http_server
from tests.tools.forked import command_line
from tests.tools.running import Outcome, run

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

SAMPLES = 48


@pytest.fixture(scope="module")
def program() -> Iterator[str]:
    """Shell that defines our command line."""
    with command_line() as defined:
        yield defined


def shell(program: str, command: str, directory: Path) -> Outcome:
    environment = {**os.environ, "PYTHONWARNINGS": "default", "LIGHTNING_STREAMING_CACHE": str(directory / "cache")}
    script = ["bash", "-c", program + command]
    done = subprocess.run(script, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    return Outcome(done.returncode, done.stdout, done.stderr)


def jpeg(number: int, kind: str = "JPEG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB" if number % 2 else "L", (20 + number, 30), 5 * number).save(file, kind)
    return file.getvalue()


def write(out: Path, columns: dict[str, str], make: Callable[[int], dict[str, Any]], samples: int = SAMPLES) -> None:
    with MDSWriter(out=out, columns=columns, size_limit=4000) as writer:
        for number in range(samples):
            writer.write(make(number))


def pixels(number: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.full((8, 8), number, np.uint8)


def tokens(number: int) -> np.ndarray[Any, np.dtype[np.uint16]]:
    return np.arange(number, number + 20 + number % 3, dtype=np.uint16)


NUMBERS = {"id": "int", "x": "float32", "y": "float64", "v": "ndarray:float32:3"}
DATA: dict[str, tuple[dict[str, str], Callable[[int], dict[str, Any]], str]] = {
    "pictures": ({"image": "jpeg", "label": "int"}, lambda n: {"image": jpeg(n), "label": n // 5}, "classes: 10"),
    "unlabelled": ({"photo": "jpeg"}, lambda n: {"photo": jpeg(n)}, "classes: 4"),
    "files": (
        {"image": "bytes", "class": "str", "cls": "int"},
        lambda n: {"image": jpeg(n, "PNG" if n % 3 else "JPEG"), "class": "a", "cls": 0},
        "classes: 1",
    ),
    "pixels": (
        {"digit": "uint8", "pixels": "ndarray:uint8:8,8"},
        lambda n: {"digit": n % 3, "pixels": pixels(n)},
        "classes: 3",
    ),
    "tokens": ({"doc": "int", "tokens": "ndarray:uint16"}, lambda n: {"doc": n, "tokens": tokens(n)}, "vocabulary: 69"),
    "text": ({"id": "int", "text": "str"}, lambda n: {"id": n, "text": f"text {n}, " * (n % 40)}, "vocabulary: 256"),
    "mapping": ({"row": "json"}, lambda n: {"row": {"a": n}}, "vocabulary: 256"),
    "caption": ({"caption": "str", "stars": "int"}, lambda n: {"caption": "a", "stars": n}, "vocabulary: 256"),
    "alone": ({"x": "int"}, lambda n: {"x": n}, "inputs: 1"),
    "numbers": (NUMBERS, lambda n: {"id": n, "x": n / 7, "y": 2.0 * n, "v": np.ones(3, np.float32)}, "inputs: 4"),
}


def fit(program: str, directory: Path, *args: str) -> Any:
    """The checkpoint that a fit leaves."""
    command = " ".join(["lightning-streaming fit --config run.yaml --trainer.accelerator cpu", *args])
    done = shell(program, command, directory)
    assert done.code == 0, done.err
    return torch.load(directory / "checkpoints" / "last.ckpt")


NIGHTLY = ("unlabelled", "files", "pixels", "text", "mapping", "caption", "alone")


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.nightly] * (kind in NIGHTLY)) for kind in DATA])
def test_what_is_written_trains_and_goes_on(kind: str, tmp_path: Path, program: str) -> None:
    columns, make, told = DATA[kind]
    write(tmp_path / "data", columns, make)
    made = run("init", tmp_path / "data", "--out", tmp_path / "run")
    assert (made.code, made.err) == (0, ""), made.err
    assert f"    cd {tmp_path / 'run'} && lightning-streaming fit --config run.yaml --ckpt_path last\n" in made.out
    text = (tmp_path / "run" / "run.yaml").read_text()
    assert f"\n    {told} " in text
    assert "# other data; from 400 samples on, init holds out 5 %\n" in text
    assert fit(program, tmp_path / "run", "--trainer.max_steps", "3")["global_step"] == 3
    resumed = fit(program, tmp_path / "run", "--ckpt_path", "last")
    assert resumed["global_step"] == 8
    assert not any(torch.isnan(one).any() for one in resumed["state_dict"].values())
    if kind == "pictures":  # whose transform draws random numbers
        run("init", tmp_path / "data", "--out", tmp_path / "whole")
        whole = fit(program, tmp_path / "whole")["state_dict"]
        assert all(torch.equal(whole[name], resumed["state_dict"][name]) for name in whole)


@pytest.mark.nightly
def test_tokens_are_packed_once_the_line_of_run_yaml_is_no_comment(tmp_path: Path, program: str) -> None:
    write(tmp_path / "data", {"some tokens": "ndarray:uint16"}, lambda n: {"some tokens": tokens(n)}, samples=400)
    run("init", tmp_path / "data", "--out", tmp_path / "run")
    path = tmp_path / "run" / "run.yaml"
    text = path.read_text()
    assert text.count("# packing: ") == 2
    path.write_text(text.replace("# packing: ", "packing: "))
    assert fit(program, tmp_path / "run")["global_step"] > 0
    assert "val_loss" in (tmp_path / "run" / "logs" / "version_0" / "metrics.csv").read_text()
    train = yaml.safe_load(path.read_text())["data"]["init_args"]["train"]
    batch = next(iter(StreamingDataLoader(StreamingDataset(**{**train, "remote": str(tmp_path / "data")}), 2)))
    assert batch["input_ids"].shape == (2, 129)
    assert len(batch["cu_seqlens"]) > 2 + 2  # several documents in a row


@pytest.mark.nightly
def test_several_datasets_are_mixed_and_some_is_held_out(tmp_path: Path, program: str) -> None:
    columns, make, _ = DATA["text"]
    for number, name in enumerate(("a/code", "b/code", "docs"), 1):
        write(tmp_path / name, columns, make, samples=200 * number)
    made = run("init", tmp_path / "a" / "code", tmp_path / "b" / "code", tmp_path / "docs", "--out", tmp_path / "run")
    assert made.code == 0, made.err
    config = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())
    data = config["data"]["init_args"]
    assert [list(one) for one in data["train"]["streams"].values()] == [["remote"]] * 3, "weights would repeat samples"
    assert "  # an epoch reads all samples of each once\n" in (tmp_path / "run" / "run.yaml").read_text()
    parts = [data[stage]["selection"]["fraction"] for stage in ("train", "val")]
    assert (*parts, data["batch_size"]) == ("0%:95%", "95%:100%", 32)
    assert "code_2" in data["val"]["streams"]
    limits = "--trainer.limit_train_batches 2 --trainer.limit_val_batches 2 --trainer.accelerator cpu"
    done = shell(program, f"lightning-streaming fit --config run.yaml {limits}", tmp_path / "run")
    assert done.code == 0, done.err
    assert "val_loss" in (tmp_path / "run" / "logs" / "version_0" / "metrics.csv").read_text()
    told = json.loads(shell(program, "lightning-streaming inspect --config run.yaml --json", tmp_path / "run").out)
    assert [one["passes"] for one in told["stages"][0]["streams"]] == [1, 1, 1]


def test_of_a_store_only_a_few_shards_are_read(tmp_path: Path) -> None:
    columns, make, _ = DATA["text"]
    write(tmp_path / "data", columns, make, samples=400)
    shards = sorted((tmp_path / "data").glob("*.mds"))
    assert len(shards) > 8
    for shard in set(shards) - {shards[0], shards[len(shards) // 2], shards[-1]}:
        shard.unlink()
    with http_server(tmp_path) as url:
        made = run("init", f"{url}/data", "--out", tmp_path / "run")
    assert made.code == 0, made.err
    config = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())
    assert config["data"]["init_args"]["train"]["remote"] == f"{url}/data"


def test_data_of_other_formats_is_named_so(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    np.save(tmp_path / "data" / "a.npy", np.arange(1000, dtype=np.int32))
    made = run("init", tmp_path / "data", "--format", "npy", "--block-length", 33, "--out", tmp_path / "run")
    assert made.code == 0, made.err
    config = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())
    train = config["data"]["init_args"]["train"]
    assert (train["format"], train["block_length"]) == ("npy", 33)
    assert config["model"]["class_path"] == "module.LanguageModel"


def test_tokens_of_litdata_are_tokens_whatever_their_block_length(tmp_path: Path) -> None:
    data = golden_path("litdata_0_2_76", "tokens")
    made = run("init", data, "--format", "litdata", "--block-length", 5, "--out", tmp_path / "run")
    assert (made.code, made.err) == (0, "")
    config = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())
    train = config["data"]["init_args"]["train"]
    assert (train["format"], train["block_length"]) == ("litdata", 5)
    assert config["model"]["class_path"] == "module.LanguageModel"
    assert config["model"]["init_args"]["vocabulary"] == 120


def _init(tmp_path: Path, url: str, *options: str) -> tuple[Any, dict[str, Any], str]:
    """Have a first run written; gives what was printed, the training data, and the text of the configuration."""
    made = run("init", url, *chain.from_iterable(("--storage-options", one) for one in options), "--out", tmp_path)
    assert made.code == 0, made.err
    text = (tmp_path / "run.yaml").read_text()
    return made, yaml.safe_load(text)["data"]["init_args"]["train"], text


def test_secrets_are_left_to_the_environment(tmp_path: Path) -> None:
    columns, make, _ = DATA["text"]
    write(tmp_path / "data", columns, make)
    with http_server(tmp_path) as url:
        options = ("encoded=true", 'client_kwargs={"headers": {"X": "hush"}}')
        made, train, text = _init(tmp_path / "run", f"{url}/data", *options)
    assert "hush" not in text + made.out
    assert train["storage"]["options"] == {"encoded": True, "client_kwargs": {"headers": {"X": "${X}"}}}
    assert "\nrun.yaml takes secrets from the environment: set X before\n" in made.out


def test_secrets_of_one_name_have_variables_of_their_own(tmp_path: Path) -> None:
    columns, make, _ = DATA["text"]
    write(tmp_path / "data", columns, make)
    with http_server(tmp_path) as url:
        options = ('client_kwargs={"headers": {"X": "hush"}, "cookies": {"X": "hush"}, "trace_configs": []}',)
        made, train, _ = _init(tmp_path / "run", f"{url}/data", *options)
    shown = {"headers": {"X": "${CLIENT_KWARGS_HEADERS_X}"}, "cookies": {"X": "${CLIENT_KWARGS_COOKIES_X}"}}
    assert train["storage"]["options"] == {"client_kwargs": {**shown, "trace_configs": []}}
    assert "set CLIENT_KWARGS_HEADERS_X, CLIENT_KWARGS_COOKIES_X before" in made.out


def test_of_a_url_that_is_cut_one_is_told(tmp_path: Path) -> None:
    columns, make, _ = DATA["text"]
    write(tmp_path / "data", columns, make)
    with http_server(tmp_path) as url:
        made, train, text = _init(tmp_path / "run", f"{url}/data?sig=hush&version=2")
    assert "hush" not in text + made.out
    assert train["remote"] == f"{url}/data"
    assert re.search(r"remote: .*/data\"? +# without its user, password and query: complete it\n", text)
    assert f"run.yaml has {url}/data without its user, password and query, which may be secret" in made.out


@pytest.mark.parametrize("name", ["run.yaml", "module.py"])
def test_nothing_is_overwritten(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    columns, make, _ = DATA["text"]
    write(tmp_path / "data", columns, make)
    (tmp_path / name).write_text("mine")
    monkeypatch.chdir(tmp_path)
    refused = run("init", "data")
    assert refused.code == 2
    assert f"{name} exists and is not overwritten" in refused.err
    assert (tmp_path / name).read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["data", name])


@pytest.mark.parametrize("label", [{}, {"label": "int"}, {"label": "str"}], ids=str)
def test_datasets_of_two_kinds_are_refused_with_what_each_has(tmp_path: Path, label: dict[str, str]) -> None:
    value = {name: {"int": 1, "str": "good"}[encoding] for name, encoding in label.items()}
    write(tmp_path / "texts", {"text": "str", **label}, lambda n: {"text": "a" * 50, **value})
    write(tmp_path / "photos", {"image": "jpeg", **label}, lambda n: {"image": jpeg(n), **value})
    refused = run("init", tmp_path / "texts", tmp_path / "photos", "--out", tmp_path / "run")
    assert refused.code == 2
    named = ", ".join(label)
    assert f"{tmp_path / 'texts'} ({', '.join([*label, 'text'])}) is for a language model of text; " in refused.err
    assert f"{tmp_path / 'photos'} ({', '.join(['image', *label])}) is for a classifier of images. " in refused.err
    assert f"They have {named or 'no column'} in common." in refused.err
    assert "docs/tutorial.md" in refused.err
    assert not (tmp_path / "run").exists()


def test_columns_that_the_model_does_not_read_are_named(tmp_path: Path) -> None:
    write(tmp_path / "data", {"text": "str", "label": "int"}, lambda n: {"text": "a" * 50, "label": n % 2})
    made = run("init", tmp_path / "data", "--out", tmp_path / "run")
    assert ": a language model of text. It reads text, and leaves out label.\n" in made.out


def test_relative_paths_stay_relative_seen_from_where_the_run_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns, make, _ = DATA["text"]
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    write(here / "data", columns, make)
    elsewhere.mkdir()
    (here / "runs").symlink_to(elsewhere)
    monkeypatch.chdir(here)
    for out, remote in ((".", "data"), ("one/two", "../../data"), ("runs/one", "../../here/data")):
        assert run("init", "data", "--out", out).code == 0
        train = yaml.safe_load((here / out / "run.yaml").read_text())["data"]["init_args"]["train"]
        assert train["remote"] == remote
        assert (here / out).resolve().joinpath(remote).samefile(here / "data")
    assert run("init", here / "data", "--out", "three").code == 0
    assert f"remote: {here / 'data'}\n" in (here / "three" / "run.yaml").read_text()


def test_what_is_no_dataset_yet_leads_to_convert(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_bytes(jpeg(1))
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n')
    for name in ("photos", "rows.jsonl"):
        refused = run("init", tmp_path / name, "--out", tmp_path / "run")
        assert refused.code == 2
        assert "lightning-streaming convert" in refused.err


def test_names_of_columns_are_quoted(tmp_path: Path) -> None:
    name = 'a "text": {x}'
    write(tmp_path / "data", {name: "str"}, lambda n: {name: f"{n}"})
    assert run("init", tmp_path / "data", "--out", tmp_path / "run").code == 0
    module = ast.parse((tmp_path / "run" / "module.py").read_text())
    assert name in [node.value for node in ast.walk(module) if isinstance(node, ast.Constant)]
    config = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())
    assert config["data"]["init_args"]["train"]["columns"] == [name]


COMMAND = "+str(__import__('os').system('touch PWNED'))+"
HOSTILE_NAMES = [
    COMMAND,
    "!a@TARGET@b",
    "@LABELLED@@INPUTS@@",
    '\'"""\\',
    "a\nimport os\ntrain: {remote: /}\n# ",
    "a\x85b\u2028c\u2029d\u202ee\x7f\x1b[2J\U0001f600",
    "a: [b], {c}, &d *e !!python/object/apply:os.system [f] # g",
    "${HOME}",
    "null",
]


def _literals_of(module: str) -> list[Any]:
    """The values that a module assigns at its top."""
    return [ast.literal_eval(one.value) for one in ast.parse(module).body if isinstance(one, ast.Assign)]


@pytest.mark.rotate(3)
@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_names_of_columns_stay_literals(name: str, tmp_path: Path) -> None:
    others = [one for one in HOSTILE_NAMES if one != name]
    kinds: dict[str, tuple[dict[str, str], Callable[[int], dict[str, Any]], Any]] = {
        "numbers": (
            {**dict.fromkeys(HOSTILE_NAMES, "float32"), "y": "float32"},
            lambda n: {**dict.fromkeys(HOSTILE_NAMES, n / 7), "y": 2.0 * n},
            [tuple(sorted(HOSTILE_NAMES)), "y"],
        ),
        "target": (
            {name: "float32", "z": "ndarray:float32:3"},
            lambda n: {name: n / 7, "z": np.ones(3, np.float32)},
            [("z",), name],
        ),
        "text": ({name: "str", "id": "int"}, lambda n: {name: "a" * 50, "id": n}, [name, 128, -100]),
        "pictures": (
            {name: "uint8", others[0]: "ndarray:uint8:8,8"},
            lambda n: {name: n % 3, others[0]: pixels(n)},
            [others[0], name, 64],
        ),
    }
    for kind, (columns, make, expected) in kinds.items():
        write(tmp_path / kind, columns, make, samples=2)
        made = run("init", tmp_path / kind, "--out", tmp_path / f"{kind}-run")
        assert made.code == 0, made.err
        assert made.out.replace("\n", "").isprintable()
        assert _literals_of((tmp_path / f"{kind}-run" / "module.py").read_text()) == expected
        text = (tmp_path / f"{kind}-run" / "run.yaml").read_text()
        assert text.replace("\n", "").isprintable()
        config = yaml.safe_load(text)
        assert set(config) == {"seed_everything", "model", "data", "trainer"}
        assert set(config["data"]["init_args"]["train"]["columns"]) <= set(columns)


def test_a_name_of_a_directory_adds_nothing_to_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "a\nmodel: {class_path: os.system}\n#\u2028\x7f"
    write(path, {"x": "int"}, lambda n: {"x": n}, samples=2)
    write(tmp_path / "b", {"x": "int"}, lambda n: {"x": n}, samples=2)
    assert run("init", path, tmp_path / "b", "--out", tmp_path / "run").code == 0
    config = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())
    assert config["model"]["class_path"] == "module.Regression"
    assert config["data"]["init_args"]["train"]["streams"] == {
        path.name: {"remote": str(path)},
        "b": {"remote": str(tmp_path / "b")},
    }


def test_a_module_that_is_not_our_code_and_these_names_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_streaming.tools.starting.run_files.repr", lambda name: f"'{name}'", raising=False)
    task = Task(kind=Kind.NUMBERS, inputs=("x",), target="';import os;'", size=1)
    with pytest.raises(ConfigError, match="cannot be written into a Python module"):
        module_text(task)


@pytest.mark.parametrize(
    ("columns", "make", "told"),
    [
        ({"image": "jpeg", "taken": "int"}, lambda n: {"image": jpeg(n), "taken": 1_700_000_000 + n}, "classes: 4 "),
        (
            {"hashes": "ndarray:uint32:20", "x": "int", "y": "float32"},
            lambda n: {"hashes": np.full(20, 4_000_000_000 + n, np.uint32), "x": n, "y": n / 2},
            "module.Regression ",
        ),
        (
            {"clip": "bytes", "text": "str"},
            lambda n: {"clip": b"RIFF\0\0\0\0WAVE" + bytes(n), "text": "a" * 50},
            "vocabulary: 256 ",
        ),
    ],
)
def test_no_model_has_a_row_for_each_of_a_billion_numbers(
    columns: dict[str, str], make: Callable[[int], dict[str, Any]], told: str, tmp_path: Path
) -> None:
    write(tmp_path / "data", columns, make)
    made = run("init", tmp_path / "data", "--out", tmp_path / "run")
    assert made.code == 0, made.err
    assert told in (tmp_path / "run" / "run.yaml").read_text()


def test_each_stream_has_a_name_of_its_own(tmp_path: Path) -> None:
    places = [tmp_path / name for name in ("a/x_3", "b/x", "c/x", "d/x")]
    for place in places:
        write(place, {"x": "int"}, lambda n: {"x": n})
    assert run("init", *places, "--out", tmp_path / "run").code == 0
    config = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())
    streams = config["data"]["init_args"]["train"]["streams"]
    assert sorted(one["remote"] for one in streams.values()) == sorted(map(str, places))


def test_bytes_that_are_taken_for_text_stay_as_they_are(tmp_path: Path) -> None:
    write(tmp_path / "data", {"body": "bytes"}, lambda n: {"body": b"text"})
    made = run("init", tmp_path / "data", "--out", tmp_path / "run")
    assert made.code == 0, made.err
    assert "isinstance(value := sample[TEXT], bytes)" in (tmp_path / "run" / "module.py").read_text()
