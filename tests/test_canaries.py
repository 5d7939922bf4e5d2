"""Secrets wherever they can be written, and every output searched for them."""

from __future__ import annotations

import base64
import json
import logging
import pickle
import re
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from copy import deepcopy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pytest
import torch
import yaml  # type: ignore[import-untyped]
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger

from lightning_streaming import (
    MDSWriter,
    StorageConfig,
    Stream,
    StreamingConfig,
    StreamingDataLoader,
    StreamingDataModule,
)
from lightning_streaming.__main__ import main
from lightning_streaming.errors import StreamingError
from lightning_streaming.reading.dataset import StreamingDataset
from tests.trainer.test_cli import TinyModel

pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]

KEY, SECRET, TOKEN, COOKIE = "AKIDCANARY01", "secret/CANARY+02==", "token.CANARY-03", "cookieCANARY04"
USER, PASSWORD, SIGNATURE = "userCANARY05", "passCANARY06", "signatureCANARY07%2Fx"
NESTED, LISTED, HELD, NUMBER = "nested'CANARY08", "listedCANARY09", "heldCANARY10", 8412675309
CANARIES = (KEY, SECRET, TOKEN, COOKIE, USER, PASSWORD, SIGNATURE, NESTED, LISTED, HELD, str(NUMBER))

OPTIONS: dict[str, Any] = {
    "key": KEY,
    "secret": SECRET,
    "password": NUMBER,
    "token": "${CANARY_HELD}",
    "headers": {"Authorization": f"Bearer {TOKEN}", "Cookie": f"sid={COOKIE}; theme=dark", "X-Key": KEY},
    "client_kwargs": {"nested": {"secret": NESTED}, "several": [LISTED, {"secret": SECRET}]},
}
URL = f"s3://{USER}:{PASSWORD}@bucket/data?Signature={SIGNATURE}"


def found_in(output: str | bytes) -> list[str]:
    """The canaries that an output shows: as they are, quoted, unquoted, escaped or in base64."""
    text = output.decode("latin-1") if isinstance(output, bytes) else output
    pairs = [f"{USER}:{PASSWORD}"]
    forms = {
        one: {one, quote(one), quote(one, safe=""), unquote(one), repr(one)[1:-1], json.dumps(one)[1:-1]}
        | {base64.b64encode(one.encode()).decode().rstrip("=")}
        for one in [*CANARIES, *pairs]
    }
    return [one for one, ways in forms.items() if any(way in text for way in ways)]


@pytest.fixture(autouse=True)
def _own_directory_and_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-streaming"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("CANARY_HELD", HELD)
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")


@pytest.fixture(autouse=True)
def _logs_hold_none(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.DEBUG, logger="lightning_streaming")
    yield
    assert found_in("".join(one.getMessage() for one in caplog.records if one.name.startswith("lightning_"))) == []


def output_of(*args: object) -> str:
    """All that a command prints, and the traceback of what it raises."""
    shown = StringIO()
    with redirect_stdout(shown), redirect_stderr(shown), suppress(SystemExit):
        try:
            main([str(arg) for arg in args])
        except Exception:  # noqa: BLE001 - what Python would print of it
            shown.write(traceback.format_exc())
    return shown.getvalue()


# Configurations ---------------------------------------------------------------------------------------------------

STREAM = {"remote": URL, "storage": {"options": OPTIONS}}
SOUND: dict[str, Any] = {
    "a stage": {"train": STREAM},
    "a stream": {"train": {"streams": {"a": STREAM, "b": STREAM}}},
    "every stage": dict.fromkeys(("train", "val", "test", "predict"), STREAM),
}
BROKEN: dict[str, Any] = {
    "a list of stages": [{"train": STREAM}],
    "a list under train": {"train": [STREAM]},
    "a list under streams": {"train": {"streams": [STREAM]}},
    "a list for a stream": {"train": {"streams": {"a": [STREAM]}}},
    "a list under remote": {"train": {**STREAM, "remote": [URL]}},
    "a mapping under remote": {"train": {**STREAM, "remote": {"url": URL}}},
    "a list under local": {"train": {**STREAM, "local": [URL]}},
    "a list of options": {"train": {**STREAM, "storage": {"options": [OPTIONS]}}},
    "options as text": {"train": {**STREAM, "storage": {"options": json.dumps(OPTIONS)}}},
    "an option as text": {"train": {**STREAM, "storage": {"options": f"key={KEY},secret={SECRET}"}}},
    "options misspelt": {"train": {"remote": URL, "storage_option": OPTIONS}},
    "options of a group misspelt": {"train": {"remote": URL, "storage": {"option": OPTIONS}}},
    "options without their field": {"train": {"remote": URL, "storage": OPTIONS}},
    "options without their field in a stream": {"train": {"streams": {"a": {"remote": URL, "storage": OPTIONS}}}},
    "options as a flat field": {"train": {"remote": URL, "storage_options": OPTIONS}},
    "storage as text": {"train": {"remote": URL, "storage": json.dumps(OPTIONS)}},
    "a list as storage": {"train": {"remote": URL, "storage": [OPTIONS]}},
    "options beside a stream": {"train": {"streams": {"a": {"remote": URL, **OPTIONS}}}},
    "options as a stage": {"train": {"storage": {"options": STREAM}}, "val": STREAM},
    "an unknown field of a stage": {"train": {**STREAM, "shufle": True}},
    "an unknown field of a stream": {"train": {"streams": {"a": {**STREAM, "proporton": 1}}}},
    "an unknown field of the data": {"train": STREAM, "bath_size": 2},
    "a wrong type in a stage": {"train": {**STREAM, "shuffle": "maybe"}},
    "a wrong type in a stream": {"train": {"streams": {"a": {**STREAM, "proportion": "big"}}}},
    "a wrong type in the data": {"train": STREAM, "batch_size": "two"},
    "a value that cannot work": {"train": {"streams": {"a": {**STREAM, "proportion": -1}}}},
    "a URL for a number": {"train": {**STREAM, "download_retry": URL}},
}
MODELS = ("tests.trainer.test_cli.TinyModel", "tests.trainer.test_cli.Missing", "pathlib.Path", "no_such.Model")


def write_config(name: str, data: Any, model: str = MODELS[0]) -> str:
    content: dict[str, Any] = {
        "seed_everything": 1,
        "model": {"class_path": model},
        "data": {"init_args": data} if isinstance(data, dict) else data,
    }
    content["trainer"] = {"accelerator": "cpu", "devices": 1, "logger": False, "max_steps": 1}
    Path(name).write_text(yaml.safe_dump(content))
    return name


@pytest.mark.rotate(2)
@pytest.mark.parametrize("place", [*SOUND, *BROKEN])
def test_no_command_shows_what_a_configuration_holds(place: str) -> None:
    config = write_config("run.yaml", {**SOUND, **BROKEN}[place])
    printed = output_of("fit", "--config", config, "--print_config")
    traced = output_of("trace", "--config", config, "--step", 0)
    assert found_in(printed) == []
    assert found_in(traced) == []
    assert "error" in traced
    if place in SOUND:
        assert "'***'" in printed
        assert "${CANARY_HELD}" in printed


@pytest.mark.rotate(2)
@pytest.mark.parametrize(
    "args",
    [
        ["--print_config=comments"],
        ["--print_config=skip_default"],
        ["--data.batch_size=two"],
        ["--data.train.nothing_like_it=1"],
        ["--data=no_such.Data"],
        *(["--model", model] for model in MODELS[1:]),
    ],
)
def test_no_argument_brings_out_what_a_configuration_holds(args: list[str]) -> None:
    shown = output_of("fit", "--config", write_config("run.yaml", SOUND["a stream"]), *args)
    assert shown
    assert found_in(shown) == []


@pytest.mark.rotate(2)
@pytest.mark.parametrize(
    "text", [f"data: {{train: {{secret: '{SECRET}", f"- {{secret: '{SECRET}'}}", f"'{URL}'", f"a: b: {URL}"]
)
def test_no_command_shows_a_file_that_is_no_configuration(text: str) -> None:
    Path("run.yaml").write_text(text)
    for command in ("fit", "trace"):
        assert found_in(output_of(command, "--config", "run.yaml")) == []


@pytest.mark.rotate(2)
@pytest.mark.parametrize(
    ("written", "wrong"),
    [
        ("one by one", "batch_size=two"),
        ("one by one", "train.streams.a.proportion=big"),
        ("as JSON", "train.shufle=1"),
        ("as JSON", "train=[1]"),
        ("in pieces", "bath_size=2"),
        ("one by one", f"train={{a: [{SECRET}"),
        ("one by one", f"val.streams={{a: [{SECRET}"),
    ],
)
def test_no_argument_is_shown(written: str, wrong: str) -> None:
    options = "--data.train.streams.a.storage.options"
    ways = {
        "one by one": [f"{options}.key={KEY}", f"{options}.secret={SECRET}"],
        "as JSON": [f"{options}={json.dumps(OPTIONS)}"],
        "in pieces": [options, json.dumps(OPTIONS)[:-4]],
    }
    url = f"--data.train.streams.a.remote={URL}"
    shown = output_of("fit", "--model", MODELS[0], *ways[written], url, f"--data.{wrong}")
    assert "error" in shown
    assert found_in(shown) == []


def test_what_a_data_module_raises_comes_without_the_configuration() -> None:
    Path("own_data.py").write_text(
        "from lightning_streaming import StreamingDataModule\n"
        "class Own(StreamingDataModule):\n"
        "    def __init__(self, **kwargs): raise ValueError('no such crop')\n"
    )
    shown = output_of("fit", "--config", write_config("run.yaml", SOUND["a stream"]), "--data=own_data.Own")
    assert "ValueError: no such crop" in shown
    assert found_in(shown) == []


# Objects ----------------------------------------------------------------------------------------------------------


def test_nothing_is_shown_by_what_represents_or_describes_an_object() -> None:
    stream = Stream(remote=URL, storage={"options": OPTIONS})
    config = StreamingConfig(remote=URL, storage={"options": OPTIONS})
    module = StreamingDataModule(train=config, val=StreamingConfig(streams={"a": stream}))
    dataset = StreamingDataset(streams={"a": stream}, batch_size=1)
    loader = StreamingDataLoader(dataset, batch_size=1)
    options = [one.storage for one in (stream, config)]
    for one in (stream, config, module, module.configs, dataset, loader, *options):
        assert found_in(f"{one!r} {one} {one:}") == []
    assert found_in(json.dumps(dataset.config())) == []
    assert found_in(yaml.dump([stream, config, *options])) == []
    with pytest.raises(TypeError):
        json.dumps(StorageConfig.options_of(stream.storage))


def test_streams_and_joins_named_like_fields_are_shown() -> None:
    join = {"storage": {"remote": URL, "key": "id", "storage": {"options": OPTIONS}}}
    config = StreamingConfig(
        streams={"storage": Stream(remote="data", join=join)},
        schedule={"storage": {"end": 8, "mix": {"storage": 1}}, "late": {"end": 9, "mix": {"storage": 1}}},
    )
    text = yaml.dump(config)
    assert found_in(text) == []
    written = yaml.safe_load(text)
    assert list(written["schedule"]) == ["storage", "late"]
    assert written["streams"]["storage"]["join"]["storage"]["key"] == "id"
    assert written["schedule"]["storage"]["mix"] == {"storage": 1}


def test_options_reach_filesystems_workers_and_copies_as_they_are() -> None:
    stream = Stream(remote=URL, storage={"options": OPTIONS})
    for one in (stream, deepcopy(stream), pickle.loads(pickle.dumps(stream))):
        assert dict(StorageConfig.options_of(one.storage)) == OPTIONS
        assert one == stream


# A store that answers with what it was asked ----------------------------------------------------------------------

ECHOED = ("Authorization", "Cookie", "X-Key", "query", "all")


class _Echo(BaseHTTPRequestHandler):
    """Serves indexes below /index/, and refuses all else with a body that repeats what the path names."""

    root: Path

    def do_GET(self) -> None:
        _, status, what, *names = unquote(self.path.partition("?")[0]).split("/")
        file = self.root / names[-1]
        if names[0] == "index" and names[-1] == "index.json":
            return self._answer(200, file.read_bytes())
        said = self.path if what == "query" else str(self.headers) if what == "all" else self.headers.get(what, "")
        bodies = {
            "text": f"denied: {said}",
            "xml": f"<Error><Code>Denied</Code><Message>no {said}</Message></Error>",
            "json": json.dumps({"error": {"message": f"no {said}"}}),
        }
        return self._answer(int(status), bodies[names[1]].encode())

    do_PUT = do_POST = do_GET

    def do_HEAD(self) -> None:
        self.do_GET()

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server on loopback, by host and port."""
    root = tmp_path_factory.mktemp("data")
    with MDSWriter(out=root, columns={"id": "int"}) as writer:
        for number in range(8):
            writer.write({"id": number})
    handler = type("Echo", (_Echo,), {"root": root})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


HEADERS = {"headers": OPTIONS["headers"]}


def refusing(echo: str, what: str = "all", kind: str = "text", status: int = 403, which: str = "none") -> str:
    """The URL of a directory whose files are refused; of all but the index with ``which="index"``."""
    return f"http://{USER}:{PASSWORD}@{echo}/{status}/{what}/{which}/{kind}?Signature={SIGNATURE}&set=train"


def shown_by(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)) + repr(error)


@pytest.mark.parametrize("what", ECHOED)
@pytest.mark.parametrize("kind", ["text", "xml", "json"])
@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("with_user", [False, True])
def test_a_refusal_that_repeats_the_request_is_shown_without_it(
    echo: str, what: str, kind: str, status: int, with_user: bool, tmp_path: Path
) -> None:
    url = refusing(echo, what, kind, status)
    options = HEADERS
    if with_user:  # aiohttp takes user and password, or a header that says who asks
        options = {"headers": {name: one for name, one in HEADERS["headers"].items() if name != "Authorization"}}
    else:
        url = url.replace(f"{USER}:{PASSWORD}@", "")
    dataset = StreamingDataset(
        remote=url, local=str(tmp_path / "x"), storage={"options": options}, download_retry=0, batch_size=1
    )
    with pytest.raises(StreamingError) as raised:
        len(dataset)
    assert "***" in str(raised.value) or what == "all"
    assert found_in(shown_by(raised.value)) == []


@pytest.mark.parametrize("workers", [0, 1])
def test_a_refused_shard_is_told_without_secrets_from_a_worker_too(echo: str, workers: int, tmp_path: Path) -> None:
    remote = refusing(echo, "Cookie", which="index").replace(f"{USER}:{PASSWORD}@", "")
    dataset = StreamingDataset(remote=remote, local=str(tmp_path / "x"), storage={"options": HEADERS}, download_retry=0)
    loader = StreamingDataLoader(dataset, batch_size=1, num_workers=workers)
    with pytest.raises(StreamingError) as raised:
        list(loader)
    assert "***" in str(raised.value)
    assert found_in(shown_by(raised.value)) == []
    loader.close()
    assert [path for path in tmp_path.rglob("*") if path.is_file() and found_in(path.read_bytes())] == []


def test_no_tool_shows_what_its_store_was_asked_with(echo: str, tmp_path: Path) -> None:
    url = refusing(echo, "Cookie").replace(f"{USER}:{PASSWORD}@", "")
    given = [f"--storage-options={name}={json.dumps(one)}" for name, one in HEADERS.items()]
    source = [one.replace("--storage", "--source") for one in given]
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"id": 1}\n')
    torch.save({"callbacks": {}}, tmp_path / "x.ckpt")
    config = write_config("run.yaml", {"batch_size": 1, "train": {"remote": url, "storage": {"options": HEADERS}}})
    shown = {
        "inspect": output_of("inspect", url, *given),
        "verify": output_of("verify", url, *given),
        "copy": output_of("copy", url, tmp_path / "copied", *given),
        "copy to it": output_of("copy", tmp_path, url, *given),
        "merge": output_of("merge", url, *given),
        "convert": output_of(
            "convert",
            f"{url}.jsonl",
            tmp_path / "made",
            *source,
        ),
        "convert to it": output_of("convert", rows, url, *given),
        "state": output_of("state", "show", tmp_path / "x.ckpt", "--data", url, *given),
        "state of it": output_of("state", "show", url),
        "trace": output_of("trace", "--config", config, "--step", 0),
        "tune": output_of("tune", "--config", config, "--seconds", 0.05),
        "fit": output_of("fit", "--config", config),
        "cache": output_of("cache", "info", url),
    }
    assert {name: found_in(text) for name, text in shown.items() if found_in(text)} == {}
    assert {name: text for name, text in shown.items() if "error:" not in text} == {}


# A run ------------------------------------------------------------------------------------------------------------


class Own(StreamingDataModule):
    """Saves all that it is given as hyperparameters."""

    def __init__(self, train: StreamingConfig, batch_size: int = 2) -> None:
        super().__init__(train=train, batch_size=batch_size)
        self.save_hyperparameters()


class OwnModel(TinyModel):
    """A model that is told of the data."""

    def __init__(self, data: StreamingConfig) -> None:
        super().__init__()
        self.save_hyperparameters()


@pytest.fixture
def here(tmp_path: Path) -> StreamingConfig:
    with MDSWriter(out=tmp_path / "data", columns={"id": "int"}) as writer:
        for number in range(8):
            writer.write({"id": number})
    options = {"auto_mkdir": True, **OPTIONS}
    return StreamingConfig(
        streams={"a": Stream(remote="data", storage={"options": options})}, debug={"sample_log": "log"}
    )


def holding_canaries(folder: Path) -> list[str]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "run.yaml"]
    return [path.name for path in files if found_in(path.read_bytes())]


def test_no_file_of_a_run_holds_secrets_and_its_checkpoint_loads(here: StreamingConfig, tmp_path: Path) -> None:
    trainer = Trainer(
        max_steps=2,
        logger=CSVLogger(tmp_path),
        accelerator="cpu",
        devices=1,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(OwnModel(here), Own(here))
    trainer.save_checkpoint("last.ckpt")
    written = {path.name for path in tmp_path.rglob("*")}
    assert {"hparams.yaml", "last.ckpt"} <= written
    assert holding_canaries(tmp_path) == []
    held = torch.load("last.ckpt", weights_only=True)["datamodule_hyper_parameters"]["train"]["streams"]["a"]
    assert held["remote"] == "data"
    assert held["storage"]["options"]["auto_mkdir"] is True
    assert held["storage"]["options"]["token"] == "${CANARY_HELD}"
    again = Own.load_from_checkpoint("last.ckpt").configs["train"]
    assert again is not None
    assert again.streams is not None
    assert again.streams["a"].remote == "data"


def test_weights_alone_hold_no_secrets_of_the_data(here: StreamingConfig, tmp_path: Path) -> None:
    trainer = Trainer(
        max_steps=1, logger=False, accelerator="cpu", enable_progress_bar=False, enable_model_summary=False
    )
    trainer.fit(TinyModel(), Own(here))
    trainer.save_checkpoint("weights.ckpt", weights_only=True)
    assert holding_canaries(tmp_path) == []


def test_no_file_of_the_command_line_holds_secrets(here: StreamingConfig, tmp_path: Path) -> None:
    assert here.streams is not None
    options = dict(StorageConfig.options_of(here.streams["a"].storage))
    data = {
        "class_path": "tests.test_canaries.Own",
        "init_args": {"train": {"remote": "data", "storage": {"options": options}}},
    }
    config = {"seed_everything": 1, "model": {"class_path": MODELS[0]}, "data": data}
    settings = {"accelerator": "cpu", "max_steps": 1, "enable_progress_bar": False, "enable_model_summary": False}
    settings["logger"] = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "."}}
    Path("run.yaml").write_text(yaml.safe_dump({**config, "trainer": settings}))
    shown = output_of("fit", "--config", "run.yaml")
    assert found_in(shown) == []
    names = {path.name for path in tmp_path.rglob("*")}
    assert {"config.yaml", "hparams.yaml"} <= names
    assert any(name.endswith(".ckpt") for name in names)
    assert holding_canaries(tmp_path) == []
    (saved,) = tmp_path.rglob("config.yaml")
    assert re.search(r"token: \$\{CANARY_HELD\}", saved.read_text())
