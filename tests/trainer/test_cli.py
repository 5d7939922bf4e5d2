from __future__ import annotations

import json
import re
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import docstring_parser
import jsonargparse
import pytest
import torch
from lightning.pytorch import LightningModule

from examples.every_nth import EveryNth
from lightning_streaming import (
    BadSamplesConfig,
    DebugConfig,
    DecodeConfig,
    JoinConfig,
    MDSWriter,
    MixturePhase,
    PackingConfig,
    SelectionConfig,
    StorageConfig,
    Stream,
    StreamingConfig,
    StreamingDataModule,
    TokenBudget,
    TokenizeConfig,
)
from lightning_streaming.errors import ConfigError
from lightning_streaming.logs import read_step_log
from lightning_streaming.trainer.cli import StreamingCLI, _without_markup, main, read_config_files
from lightning_streaming.trainer.config import shown

pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")

ROOT = Path(__file__).parents[2]
RUN = """
seed_everything: 1
model:
  class_path: tests.trainer.test_cli.TinyModel
data:
  init_args:
    batch_size: 2
    train:
      streams:
        a: {remote: data/a, proportion: 0.5}
        b: {remote: data/b, proportion: 0.5}
trainer:
  accelerator: cpu
  max_steps: 3
  logger: false
  enable_progress_bar: false
  enable_model_summary: false
"""


class TinyModel(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        predicted: torch.Tensor = self.layer(batch["id"].float().unsqueeze(1))
        return predicted.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@dataclass
class Layers:
    width: int = 1


class OwnFields(TinyModel):
    """Has fields with names of ours, and one with a type of ours."""

    def __init__(
        self,
        schedule: Mapping[str, float] | None = None,
        streams: dict[str, int] | None = None,
        config: Layers | None = None,
        phases: Mapping[str, MixturePhase] | None = None,
    ) -> None:
        super().__init__()


class OwnData(StreamingDataModule):
    def __init__(self, batch_size: int = 1, train: StreamingConfig | None = None) -> None:
        super().__init__(train=train, batch_size=batch_size)


@pytest.fixture(autouse=True)
def _own_directory_and_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command line finds and leaves behind: a directory, arguments, paths to modules, the seed's variables."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-streaming"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning's dealings, not ours


@pytest.fixture
def run_yaml(tmp_path: Path) -> str:
    for number, name in enumerate("ab"):
        with MDSWriter(out=tmp_path / "data" / name, columns={"id": "int"}) as writer:
            for index in range(8):
                writer.write({"id": 100 * number + index})
    (tmp_path / "run.yaml").write_text(RUN)
    return "run.yaml"


def output_of(*args: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command prints that does no more than to explain."""
    with pytest.raises(SystemExit) as ended:
        main(args)
    assert ended.value.code == 0
    return capsys.readouterr().out


def error_of(*args: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command prints that is refused."""
    with pytest.raises(SystemExit) as ended:
        main(args)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_help_keeps_the_lines_of_its_examples(capsys: pytest.CaptureFixture[str]) -> None:
    shown = output_of("--help", capsys=capsys)
    assert "\n    lightning-streaming fit --config run.yaml\n    lightning-streaming fit" in shown
    assert "\n    data:" in shown


@pytest.mark.rotate(2)
@pytest.mark.parametrize(
    ("key", "explained"),
    [
        ("data.train", StreamingConfig),
        ("data.test", StreamingConfig),
        ("data.val.streams", Stream),
        ("data.train.schedule", MixturePhase),
        ("data.train.packing", PackingConfig),
        ("data.val.token_budget", TokenBudget),
        ("data.train.join", JoinConfig),
        ("data.train.storage", StorageConfig),
        ("data.train.selection", SelectionConfig),
        ("data.train.bad_samples", BadSamplesConfig),
        ("data.train.decode", DecodeConfig),
        ("data.test.debug", DebugConfig),
        ("data.train.packing.tokenize", TokenizeConfig),
        ("data.val.token_budget.tokenize", TokenizeConfig),
    ],
)
def test_help_of_nested_data_explains_every_field(
    key: str, explained: type[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    shown = " ".join(output_of("fit", f"--{key}.help", capsys=capsys).split())
    assert "Unvalidated" not in shown.replace("Unvalidated<ndarray", "")  # no configuration holds an array
    prefix = f"--{key}.NAME" if explained in (Stream, MixturePhase, JoinConfig) else f"--{key}"
    texts = {param.arg_name: param.description for param in docstring_parser.parse(explained.__doc__ or "").params}
    for field in (field for field in fields(explained) if field.init):
        assert f"{prefix}.{field.name} " in shown
        assert _without_markup(" ".join((texts[field.name] or "undocumented").split())) in shown


@pytest.mark.parametrize("first", ["--data.train.streams.help", pytest.param("--help", marks=pytest.mark.nightly)])
def test_every_help_that_a_help_text_names_exists(first: str, capsys: pytest.CaptureFixture[str]) -> None:
    waiting, seen = [first], set[str]()
    while waiting:
        seen.add(option := waiting.pop())
        with pytest.raises(SystemExit) as ended:
            main(["fit", option])
        shown, error = capsys.readouterr()
        assert ended.value.code == 0, f"{option}: {error}"
        # Not those that need a class, nor those of a trainer's objects, which jsonargparse prints and does not know.
        named = re.findall(r"--(?!trainer\.\w+\.\w+\.help)[\w.]+\.help\b(?! \[?CLASS)", shown)
        waiting += {*named} - seen - {*waiting}
    of_streams = {f"--data.train.streams.NAME.{below}.help" for below in ("storage", "selection", "join")}
    assert {*of_streams, "--data.train.streams.NAME.join.NAME.storage.help"} <= seen


def test_help_of_an_object_has_the_name_that_was_typed(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--data.val.streams.web.storage.options " in output_of(
        "fit", "--data.val.streams.web.storage.help", capsys=capsys
    )
    assert "--data.train.schedule.late.mix " in output_of("fit", "--data.train.schedule.late.help", capsys=capsys)


HELP_OF_FIELDS = re.compile(r"--(?:data|model|trainer)\b[\w.]*\.help\b(?:=[\w.]+)?")
OF_NO_CLASS = "=my_project."
"""What pages call classes that readers are to write."""


def test_every_help_that_a_page_or_a_help_text_names_exists(capsys: pytest.CaptureFixture[str]) -> None:
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("configs/*"), *ROOT.glob("examples/*.*")]
    code = [path for path in ROOT.glob("lightning_streaming/**/*.py") if path.name != "cli.py"]
    named = {option for path in [*pages, *code] for option in HELP_OF_FIELDS.findall(path.read_text())}
    assert {"--data.help", "--data.train.help", "--data.train.packing.help", "--data.train.token_budget.help"} <= named
    listed = output_of("fit", "--help_advanced", capsys=capsys)
    options = {*re.findall(r"--[\w.]+", listed)}
    of_classes = {option for option in named if "=" in option}
    assert named - of_classes <= options
    for option in of_classes:
        if OF_NO_CLASS not in option:
            assert "  --" in output_of("fit", option, capsys=capsys), option


def test_an_argument_overrides_a_field_of_a_group() -> None:
    Path("groups.yaml").write_text("data: {train: {remote: x, debug: {sample_log: logs, watchdog_seconds: 5}}}")
    changes = {"train.debug.watchdog_seconds": 3, "train.storage.on_demand": True}
    train = read_config_files(["groups.yaml"], changes).datamodule.configs["train"]
    assert train is not None
    assert train.debug == DebugConfig(sample_log="logs", watchdog_seconds=3)
    assert train.storage == StorageConfig(on_demand=True)


def test_an_argument_names_a_key_of_a_mapping_in_a_group() -> None:
    Path("groups.yaml").write_text("data: {train: {remote: x, storage: {options: {anon: true, key: a}}}}")
    changes = {"train.storage.options.anon": "false", "train.decode.columns.image": "array"}
    train = read_config_files(["groups.yaml"], changes).datamodule.configs["train"]
    assert train is not None
    assert isinstance(train.storage, StorageConfig)
    assert dict(train.storage.options or {}) == {"anon": False, "key": "a"}
    assert train.decode == DecodeConfig(columns={"image": "array"})


def test_a_text_in_a_group_that_looks_like_a_number_stays_a_text() -> None:
    Path("groups.yaml").write_text("data: {train: {remote: x, selection: {where: 'true', group_by: '5'}}}")
    train = read_config_files(["groups.yaml"], {}).datamodule.configs["train"]
    assert train is not None
    assert train.selection == SelectionConfig(where="true", group_by="5")


def test_an_argument_names_an_entry_of_a_mapping_in_a_named_object() -> None:
    Path("named.yaml").write_text("""
data:
  train:
    streams: {a: {remote: x, join: {names: {remote: y, key: id}}}, b: {remote: z}}
    epoch_size: 12
    schedule: {first: {end: 50%, mix: {a: 1, b: 3}}, second: {mix: {a: 1}, max_repeats: {a: 2}}}
""")
    changes = {
        "train.schedule.first.mix.a": "0.5",
        "train.schedule.second.mix.b": "[0.9,0.5]",
        "train.schedule.second.max_repeats.b": 3,
        "train.streams.a.storage.options.anon": "true",
        "train.streams.a.join.names.prefix": "n_",
        "train.streams.b.join.more.remote": "m",
    }
    train = read_config_files(["named.yaml"], changes).datamodule.configs["train"]
    assert train is not None
    assert train.streams is not None
    assert train.schedule == {
        "first": MixturePhase(end="50%", mix={"a": 0.5, "b": 3}),
        "second": MixturePhase(mix={"a": 1, "b": [0.9, 0.5]}, max_repeats={"a": 2, "b": 3}),
    }
    names = JoinConfig(remote="y", key="id", prefix="n_")
    assert train.streams["a"] == Stream(remote="x", join={"names": names}, storage={"options": {"anon": True}})
    assert train.streams["b"] == Stream(remote="z", join={"more": JoinConfig(remote="m")})


def test_help_fits_a_screen_and_names_options_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    common = output_of("fit", "--help", capsys=capsys)
    assert len(common.splitlines()) < 60
    assert max(map(len, common.splitlines())) <= 120
    every = output_of("fit", "--help_advanced", capsys=capsys)
    assert "--data.train.help, --data.val.help" in every
    for title in ("trainer", "model", "data", "optimizer", "learning rate", "checkpoint"):
        assert f"\n{title}" in every
    for text in (common, every):
        assert not re.search(r"`|:(class|meth|func|paramref):|<class", text)
    every += output_of("fit", "--data.help", capsys=capsys) + output_of("fit", "--data.train.help", capsys=capsys)
    every += output_of("fit", "--data.train.streams.NAME.help", capsys=capsys) + "--model.ARGUMENT"
    assert {*re.findall(r"--[a-z][\w.]*\w", common)} <= {*re.findall(r"--[a-z][\w.]*\w", every)}


def test_help_of_a_class_of_the_user_shows_its_own_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    Path("my_data.py").write_text(
        "from lightning_streaming import StreamingDataModule\n"
        "class MyData(StreamingDataModule):\n"
        "    def __init__(self, crop: int = 7, **kwargs): super().__init__(**kwargs)\n"
    )
    shown = output_of("fit", "--data.help=my_data.MyData", capsys=capsys)
    assert "--data.crop" in shown
    assert "--data.batch_size" in shown


@pytest.mark.rotate(2)
@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["--data.bath_size=2"], "there is no field data.bath_size; did you mean data.batch_size?"),
        (["--data.train.shufle=true"], "there is no field data.train.shufle; did you mean data.train.shuffle?"),
        (
            ["--data.train.streams.b.proporton=1"],
            "there is no field data.train.streams.b.proporton; did you mean data.train.streams.b.proportion?",
        ),
        (["--data.train.where=x > 1"], "there is no field data.train.where: its name is selection.where\n"),
        (["--data.init_args.bath_size=2"], "there is no field data.bath_size; did you mean data.batch_size?"),
        (["--data.train.nothing_like_it=2"], "there is no field data.train.nothing_like_it\n"),
        (["--trainer.mx_steps=2"], "there is no field trainer.mx_steps; did you mean trainer.max_steps?"),
        (["--trainer.max_steps=two"], "trainer.max_steps must be a whole number, but got 'two'"),
        (["--data.batch_size=two"], "data.batch_size must be a whole number, but got 'two'"),
        (["--data.train.shuffle=maybe"], "data.train.shuffle must be true or false, but got 'maybe'"),
        (["--data.train.columns=5"], "data.train.columns must be a list, but got '5'"),
        (
            ["--data.return_keys=[trian]"],
            "data.return_keys must be one of 'train', 'val', 'test', 'predict', but got 'trian'",
        ),
        (["--data.train.streams.b.proportion=big"], "data.train.streams.b.proportion must be a number, but got 'big'"),
        (
            ["--data.train.streams.b.proportion", "null"],
            "error: data.train.streams.b.proportion cannot be null on the command line; leave it out, or set it",
        ),
        (
            ["--data.train.streams.b={remote: data/b, proportion: null}"],
            "error: data.train.streams.b.proportion cannot be null on the command line; leave it out, or set it",
        ),
        (["--data.train.split", "null"], "error: data.train.split cannot be null on the command line"),
        (["--data.train.selection.where=~"], "error: data.train.selection.where cannot be null on the command line"),
        (["--data.train.debug={sample_log: null}"], "error: data.train.debug.sample_log cannot be null on the command"),
        (
            ["--data.train.schedule.x.mix.b=big"],
            "data.train.schedule.x.mix.b must be a number or a list, but got 'big'",
        ),
        (
            ["--data.train.packing={column: a, capacity: 3}", "--data.train.packing.capacity=many"],
            "error: data.train.packing.capacity must be a whole number, but got 'many'",
        ),
        (
            ["--data.train.streams.b.proportion", "-1"],
            "error: data.train.streams.b: proportion must be a finite number that is not negative, but got -1.0",
        ),
        (
            ["--data.train.streams.b.weight=3"],
            "there is no field data.train.streams.b.weight: proportion= is a stream's share of an epoch\n",
        ),
        (
            ["--data.train.streams.b={remote: data/b, weight: 3}"],
            "there is no field data.train.streams.b.weight: proportion= is a stream's share of an epoch\n",
        ),
        (["--data=my_data.Missing"], "my_data"),
    ],
)
def test_wrong_settings_are_named_and_little_else(
    args: list[str], reason: str, run_yaml: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = error_of("fit", "--config", run_yaml, *args, capsys=capsys)
    assert reason in error
    assert len(error.splitlines()) <= 16


@pytest.mark.rotate(2)
@pytest.mark.parametrize(
    ("right", "wrong", "reason"),
    [
        ("batch_size: 2", "bath_size: 2", "there is no field data.bath_size; did you mean data.batch_size?"),
        ("max_steps", "mx_steps", "there is no field trainer.mx_steps; did you mean trainer.max_steps?"),
        ("\ntrainer:", "\ntrainr:", "there is no field trainr; did you mean trainer?"),
        ("max_steps: 3", "max_steps: x", "trainer.max_steps must be a whole number, but got 'x'"),
        (
            "{remote: data/b, proportion: 0.5}",
            "{remote: data/b, propotion: 0.5}",
            "there is no field data.train.streams.b.propotion; did you mean data.train.streams.b.proportion?",
        ),
        (
            "{remote: data/b, proportion: 0.5}",
            "{remote: data/b, proportion: big}",
            "data.train.streams.b.proportion must be a number, but got 'big'",
        ),
        (
            "{remote: data/b, proportion: 0.5}",
            "data/b",
            'data.train.streams.b must be a mapping, like {remote: "s3://corpus/code"}, but is text',
        ),
        (
            "{remote: data/b, proportion: 0.5}",
            "",
            'data.train.streams.b must be a mapping, like {remote: "s3://corpus/code"}, but is empty',
        ),
        (
            "{remote: data/b, proportion: 0.5}",
            "{remote: data/b, join: {names: }}",
            "data.train.streams.b.join.names must be a mapping, like {remote: s3://corpus/captions, key: id}, "
            "but is empty",
        ),
        (
            "init_args:\n",
            "class_path: tests.trainer.test_cli.OwnData\n  init_args:\n    crop: 3\n",
            "there is no field data.crop: tests.trainer.test_cli.OwnData has no such argument",
        ),
        *(
            (
                "TinyModel\n",
                f"OwnFields\n  init_args: {{{field}: text}}\n",
                f"model.{field} must be a mapping, but is text",
            )
            for field in ("schedule", "streams", "config")
        ),
        (
            "TinyModel\n",
            "OwnFields\n  init_args: {phases: text}\n",
            "model.phases must be a mapping, like {broad: {end: 800m, mix: {web: 0.9, code: 0.1}}}, but is text",
        ),
    ],
)
def test_wrong_field_of_a_file_is_named_whole(
    right: str, wrong: str, reason: str, run_yaml: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert right in RUN
    Path(run_yaml).write_text(RUN.replace(right, wrong))
    error = error_of("fit", "--config", run_yaml, capsys=capsys)
    assert error == f"lightning-streaming fit: error: run.yaml: {reason}\n"


def test_of_several_files_the_wrong_one_is_named(run_yaml: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("more.yaml").write_text("data: {bath_size: 2}\n")
    error = error_of("fit", "--config", run_yaml, "--config", "more.yaml", capsys=capsys)
    assert error.startswith("lightning-streaming fit: error: more.yaml: there is no field data.bath_size; ")


def test_a_value_that_cannot_work_is_told_like_a_wrong_field(run_yaml: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(run_yaml).write_text(RUN.replace("proportion: 0.5}", "proportion: -1}"))
    error = error_of("fit", "--config", run_yaml, capsys=capsys)
    reason = "proportion must be a finite number that is not negative, but got -1.0 (the streams are a, b)"
    assert error == f"lightning-streaming fit: error: run.yaml: data.train.streams.a: {reason}\n"


@pytest.mark.parametrize("arg", ["--data.bath_size=2", "--data.batch_size=0"])
def test_debug_shows_where_a_setting_was_refused(arg: str, run_yaml: str) -> None:
    with pytest.raises(ConfigError, match="batch_size") as raised:
        main(["fit", "--config", run_yaml, arg, "--debug"])
    assert any("jsonargparse" in frame.filename for frame in traceback.extract_tb(raised.value.__traceback__))


@pytest.mark.rotate(2)
@pytest.mark.parametrize("arg", ["--data.bath_size=2", "--data.batch_size=two", "--data.batch_size=0"])
def test_debug_shows_no_secret(arg: str, run_yaml: str) -> None:
    stream = "a: {remote: data/a, proportion: 0.5"
    Path(run_yaml).write_text(RUN.replace(stream, f"{stream}, storage: {{options: {{secret: hunter2hunter2}}}}"))
    with pytest.raises(ConfigError, match="_size") as raised:
        main(["fit", "--config", run_yaml, arg, "--debug"])
    assert "hunter2" not in "".join(traceback.format_exception(raised.value))


HIDDEN = "{remote: data/b, storage: {options: {secret: hunter2hunter2}}"


@pytest.mark.rotate(3)
@pytest.mark.parametrize(
    ("arg", "reason"),
    [
        (
            f"--data.train.streams.b={HIDDEN}",  # a brace is missing, so no field of it has a name
            'data.train.streams.b must be a mapping, like {remote: "s3://corpus/code"}, but is text',
        ),
        (
            f"--data.train.streams={{b: {HIDDEN}}}",
            'data.train.streams must be a mapping, like {code: {remote: "s3://corpus/code"}}, but is text',
        ),
        (f"--data.train.join={HIDDEN}", "data.train.join must be a mapping, like {captions: {remote: s3://corpus/cap"),
        (f"--data.train.columns={HIDDEN}", "data.train.columns must be a list, but is text"),
        (f"--data.train.columns={HIDDEN}}}", "data.train.columns must be a list, but is a mapping"),
        (f"--data.batch_size={HIDDEN}", "data.batch_size must be a whole number, but is text"),
        (f"--data.batch_size={HIDDEN}}}", "data.batch_size must be a whole number, but is a mapping"),
        (
            "--data.train.storage={options: {anon: true}",  # also what is like the example
            "data.train.storage must be a mapping, like {options: {anon: true}}, but is text\n",
        ),
        (
            "--data.train.streams={b: }",
            'data.train.streams.b must be a mapping, like {remote: "s3://corpus/code"}, but is empty\n',
        ),
        ("--data.train.streams.b=null", 'data.train.streams.b must be a mapping, like {remote: "s3://corpus/code"}, b'),
    ],
)
def test_errors_do_not_show_the_text_of_a_mapping(
    arg: str, reason: str, run_yaml: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = error_of("fit", "--config", run_yaml, arg, capsys=capsys)
    assert f"error: {reason}" in error
    assert "hunter2" not in error


def test_a_secret_of_a_long_inline_configuration_is_hidden(run_yaml: str, capsys: pytest.CaptureFixture[str]) -> None:
    secret = {"storage": {"options": {"secret": "hunter2hunter2"}}, "split": "x" * 300}
    inline = json.dumps({"data": {"train": secret}})
    wrong = "--data.batch_size=hunter2hunter2"
    error = error_of("fit", "--config", run_yaml, f"--config={inline}", wrong, capsys=capsys)
    assert "data.batch_size must be a whole number" in error
    assert "hunter2" not in error


def test_a_long_class_path_is_an_error(run_yaml: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = error_of("fit", "--config", run_yaml, f"--model=my.{'m' * 300}", capsys=capsys)
    assert "model.class_path: cannot import my: " in error


def test_only_classes_that_fit_the_field_are_suggested(run_yaml: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("suggested.py").write_text(
        "import lightning.pytorch as pl\nclass MyModels: ...\nclass MyModelOfText(pl.LightningModule): ...\n"
    )
    error = error_of("fit", "--config", run_yaml, "--model=suggested.MyModel", capsys=capsys)
    assert error.endswith("the module suggested has no MyModel; did you mean MyModelOfText?\n")


UNFINISHED = {
    "alone": "x = y\n",
    "with a context": "try:\n    x = y\nexcept NameError:\n    raise ValueError('no y')\n",
    "with a cause": "try:\n    x = y\nexcept NameError as error:\n    raise ValueError('no y') from error\n",
    "interrupted": "class Stop(KeyboardInterrupt):\n    exceptions = 5\n"
    "try:\n    x = y\nexcept NameError:\n    raise Stop('no y')\n",
}
"""Modules of the user that cannot be imported, by how their error is linked to others."""


@pytest.mark.parametrize("name", UNFINISHED)
def test_an_error_of_an_imported_module_shows_no_secret(name: str, run_yaml: str) -> None:
    Path("unfinished.py").write_text(UNFINISHED[name])
    stream = "a: {remote: data/a, proportion: 0.5"
    content = RUN.replace(stream, f"{stream}, storage: {{options: {{secret: hunter2hunter2}}}}")
    Path(run_yaml).write_text(content.replace("data:\n", "data:\n  class_path: unfinished.Data\n"))
    with pytest.raises((NameError, ValueError, KeyboardInterrupt)) as raised:
        main(["fit", "--config", run_yaml])
    shown = "".join(traceback.format_exception(raised.value))
    assert "unfinished.py" in shown
    assert "name 'y' is not defined" in shown  # also where it is the context or cause
    assert "hunter2" not in shown
    assert "Given value" not in shown  # jsonargparse repeats the configuration


@pytest.mark.rotate(1)
@pytest.mark.parametrize("flag", ["--print_config", "--print_config=comments", "--print_config=skip_default"])
def test_printed_configuration_explains_its_fields_and_runs(
    flag: str, run_yaml: str, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = output_of("fit", "--config", run_yaml, flag, capsys=capsys)
    lines = [line.strip() for line in printed.splitlines()]
    assert lines[lines.index("batch_size: 2") - 1] == "# Samples per batch on each rank."
    assert lines[lines.index("proportion: 0.5") - 1].startswith("# Share of an epoch drawn from this stream")
    assert lines[lines.index("max_steps: 3") - 1].startswith("#")
    assert "None" not in printed.partition("\ndata:")[2]
    assert max(map(len, printed.splitlines())) <= 120
    Path("printed.yaml").write_text(printed)
    assert StreamingCLI(["fit", "--config", "printed.yaml"]).trainer.global_step == 3


def test_printed_configuration_explains_every_field_of_data_once(
    run_yaml: str, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = output_of("fit", "--config", run_yaml, "--print_config", capsys=capsys)
    words = " ".join(line.strip(" #") for line in printed.splitlines() if line.strip().startswith("#"))
    for documented in (StreamingConfig, Stream, StreamingDataModule):
        for param in docstring_parser.parse(documented.__doc__ or "").params:
            text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"\1", param.description or "")
            text = " ".join(text.replace("``", "").replace("None", "null").split())
            assert text in words, param.arg_name
    text = "Share of an epoch drawn from this stream, relative to the other streams."
    assert words.count(text) == 1


def test_printed_configuration_explains_classes_of_the_user(run_yaml: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("own.py").write_text(
        "from lightning_streaming import StreamingDataModule\n"
        "class Own(StreamingDataModule):\n"
        '    """Mine.\n\n    Args:\n        crop: How many pixels are kept.\n    """\n'
        "    def __init__(self, crop: int = 7, **kwargs): super().__init__(**kwargs)\n"
    )
    printed = output_of("fit", "--config", run_yaml, "--data=own.Own", "--print_config", capsys=capsys)
    assert "    # How many pixels are kept.\n    crop: 7\n" in printed
    assert "    # Samples per batch on each rank.\n" in printed


def test_settings_that_cannot_work_end_with_their_error_alone(
    run_yaml: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = error_of("fit", "--config", run_yaml, "--data.val.shuffle=true", capsys=capsys)
    assert "error: data.val: the data of a stage needs streams=, remote= or local=" in error
    assert "Traceback" not in error


def test_errors_of_a_model_keep_their_traceback(run_yaml: str) -> None:
    Path("my_model.py").write_text(
        "from tests.trainer.test_cli import TinyModel\n"
        "class Broken(TinyModel):\n"
        "    def __init__(self): raise ValueError('no such width')\n"
    )
    with pytest.raises(ValueError, match="no such width"):
        main(["fit", "--config", run_yaml, "--model=my_model.Broken"])


def test_errors_do_not_show_storage_options(run_yaml: str, capsys: pytest.CaptureFixture[str]) -> None:
    secret = '--data.train.streams.a.storage.options={"secret": "open sesame"}'
    error = error_of("fit", "--config", run_yaml, secret, "--data.train.streams.a.proportion=big", capsys=capsys)
    assert "proportion" in error
    assert "sesame" not in error


def test_a_storage_of_the_model_is_not_masked_and_ours_is_masked_there_too() -> None:
    Namespace: Any = jsonargparse.Namespace
    own, ours = {"path": "out", "levels": ["a"]}, {"options": {"secret": "open sesame"}}
    model = Namespace(class_path="M", init_args=Namespace(storage=own, inner=Namespace(storage=Namespace(**own))))
    kept = shown(Namespace(model=model, data=Namespace(train=Namespace(storage=Namespace(**ours)))))
    assert kept.model == model
    assert "sesame" not in str(kept)
    for storage in (ours, Namespace(**ours)):
        assert "sesame" not in str(shown(Namespace(model=Namespace(init_args=Namespace(storage=storage)))))
    assert "sesame" not in str(shown(Namespace(data=Namespace(train={"storage": {"secret": "open sesame"}}))))


def test_configuration_without_class_path_trains_on_a_streaming_data_module(run_yaml: str) -> None:
    cli = StreamingCLI(["fit", "--config", run_yaml, "--data.train.streams.a.proportion=1", "--data.batch_size=4"])
    assert cli.trainer.global_step == 3
    assert cli.datamodule.batch_size == 4
    streams = cli.datamodule.datasets["train"].streams
    assert {name: stream.asked.proportion for name, stream in streams.items()} == {"a": 1.0, "b": 0.5}


def test_classes_are_found_in_the_current_directory(run_yaml: str) -> None:
    Path("here.py").write_text(
        "from lightning_streaming import StreamingDataModule\n"
        "class Negated(StreamingDataModule):\n"
        "    def __init__(self, factor: int, **kwargs):\n"
        "        super().__init__(**kwargs)\n"
        "        self.factor = factor\n"
        "    def transform(self, sample, stage, rng):\n"
        "        return {'id': self.factor * sample['id']}\n"
    )
    cli = StreamingCLI(["fit", "--config", run_yaml, "--data=here.Negated", "--data.factor=-1"])
    batch = next(iter(cli.datamodule.train_dataloader()))
    assert bool((batch["id"] <= 0).all())


def test_saved_configuration_holds_no_secrets_and_runs_again(run_yaml: str) -> None:
    options = '{"secret": "open sesame", "endpoint_url": "http://localhost", "auto_mkdir": false}'
    main(["fit", "--config", run_yaml, f"--data.train.streams.a.storage.options={options}"])
    saved = Path("config.yaml").read_text()
    assert "sesame" not in saved
    cli = StreamingCLI(["fit", "--config", "config.yaml"])
    assert cli.trainer.global_step == 3
    kept = cli.datamodule.datasets["train"].streams["a"].storage.options
    assert kept == {"endpoint_url": "http://localhost", "auto_mkdir": False}


@pytest.fixture
def joining_yaml(run_yaml: str) -> str:
    """Both streams have joins: one by position and one by id."""
    with MDSWriter(out="data/names", columns={"id": "int", "name": "str"}) as writer:
        for number in range(107, -1, -1):
            writer.write({"id": number, "name": f"n{number}"})
    path, written = Path(run_yaml), Path(run_yaml).read_text()
    by_id = "join: {names: {remote: data/names, key: id}}"
    by_position = f"join: {{again: {{remote: data/b, prefix: b_}}, {by_id.removeprefix('join: {')}"
    written = written.replace("{remote: data/a,", f"{{remote: data/a, {by_id},")
    path.write_text(written.replace("{remote: data/b,", f"{{remote: data/b, {by_position},"))
    return run_yaml


@pytest.mark.nightly
def test_joins_are_read_from_yaml_and_saved_without_secrets(joining_yaml: str) -> None:
    written = Path(joining_yaml).read_text()
    secret = "remote: data/names, storage: {options: {auto_mkdir: false, token: open sesame}}"
    Path(joining_yaml).write_text(written.replace("remote: data/names", secret, 1))
    main(["fit", "--config", joining_yaml, "--data.train.columns=[id,name]"])
    assert "sesame" not in Path("config.yaml").read_text()
    cli = StreamingCLI(["fit", "--config", "config.yaml"])
    assert cli.trainer.global_step == 3
    batch = next(iter(cli.datamodule.train_dataloader()))
    assert batch["name"] == [f"n{number}" for number in batch["id"].tolist()]
    streams = cli.datamodule.datasets["train"].streams
    assert [(one.name, one.config.key) for one in streams["b"].joined] == [("again", None), ("names", "id")]


@pytest.mark.rotate(1)
@pytest.mark.parametrize(
    ("right", "wrong", "reason"),
    [
        (
            "prefix: b_",
            "prefixx: b_",
            "data.train.streams.b: join.again: JoinConfig takes no argument 'prefixx': did you mean prefix=?",
        ),
        ("key: id", "key: 3", "join.names.key must be the name of a column of both datasets, but is 3"),
        ("remote: data/b, prefix: b_", "prefix: b_", "join.again: a join needs remote=, local=, or both"),
    ],
)
def test_what_is_wrong_with_a_join_is_told(
    joining_yaml: str, right: str, wrong: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    written = Path(joining_yaml).read_text()
    assert right in written
    Path(joining_yaml).write_text(written.replace(right, wrong))
    error = error_of("fit", "--config", joining_yaml, capsys=capsys)
    assert reason in error
    assert "Traceback" not in error


def test_a_configuration_may_name_modules_within_the_package(run_yaml: str) -> None:
    within = "lightning_streaming.trainer"
    content = RUN.replace("data:\n", f"data:\n  class_path: {within}.datamodule.StreamingDataModule\n")
    callbacks = [f"{within}.state_callback.StreamingStateCallback", f"{within}.monitor.StreamingMonitor"]
    Path("within.yaml").write_text(
        f"{content}  callbacks:\n" + "".join(f"    - class_path: {one}\n" for one in callbacks)
    )
    assert StreamingCLI(["fit", "--config", "within.yaml"]).trainer.global_step == 3


def test_a_log_of_steps_is_asked_for_on_the_command_line(run_yaml: str) -> None:
    log = ["--trainer.callbacks+=lightning_streaming.StepLog", "--trainer.callbacks.dirpath=steps"]
    StreamingCLI(["fit", "--config", run_yaml, *log])
    assert {key.epoch for key in read_step_log("steps")} == {0}


def test_run_goes_on_in_the_same_directory(run_yaml: str) -> None:
    main(["fit", "--config", run_yaml])
    (checkpoint,) = Path("checkpoints").glob("*.ckpt")
    cli = StreamingCLI(["fit", "--config", run_yaml, "--ckpt_path", str(checkpoint), "--trainer.max_steps=5"])
    assert cli.trainer.global_step == 5


PHASED = RUN.replace(", proportion: 0.5", "").replace(
    "trainer:",
    """      epoch_size: 12
      schedule:
        first: {end: 50%, mix: {a: 1, b: 3}}
        second: {mix: {a: [1, 0], b: 1}, steps: 2}
trainer:""",
)


@pytest.fixture
def phased_yaml(run_yaml: str) -> str:
    Path(run_yaml).write_text(PHASED)
    return run_yaml


@pytest.mark.nightly
def test_printed_and_saved_phases_run_again(phased_yaml: str, capsys: pytest.CaptureFixture[str]) -> None:
    printed = output_of("fit", "--config", phased_yaml, "--print_config", capsys=capsys)
    assert "# Mixtures of the streams that follow each other within an epoch" in printed
    assert printed.count("# End of the phase, counted in samples of all r") == 1
    Path("printed.yaml").write_text(printed)
    first = StreamingCLI(["fit", "--config", phased_yaml])
    saved = Path("config.yaml").read_text()
    assert "python" not in saved
    Path("saved.yaml").write_text(saved)
    for file in ("printed.yaml", "saved.yaml"):
        cli = StreamingCLI(["fit", "--config", file, f"--trainer.default_root_dir={file}.d"])
        assert cli.datamodule.configs["train"] == first.datamodule.configs["train"]
        assert cli.trainer.global_step == 3


@pytest.mark.nightly
def test_phases_are_given_on_the_command_line(phased_yaml: str) -> None:
    phases = '{"all": {"mix": {"a": 2, "b": 1}}}'
    cli = StreamingCLI(["fit", "--config", phased_yaml, f"--data.train.schedule={phases}"])
    (stream_a, stream_b) = cli.datamodule.datasets["train"].streams.values()
    assert (stream_a.choose, stream_b.choose) == (8, 4)
    args = ["--data.train.epoch_size=16", "--data.train.schedule.first.end=4", "--data.train.schedule.second.steps=3"]
    train = StreamingCLI(["fit", "--config", phased_yaml, *args]).datamodule.configs["train"]
    assert [(name, one.end, one.steps) for name, one in train.schedule.items()] == [
        ("first", 4, 16),
        ("second", None, 3),
    ]


@pytest.mark.rotate(1)
@pytest.mark.parametrize(
    ("phase", "reason"),
    [
        ("{mix: {a: 1, b: big}}", "schedule.x.mix.b must be a "),
        (
            "{mix: {a: 1, b: -1}}",
            "data.train: schedule.x.mix.b must be a weight above 0, or two for a ramp like [0.9, 0.5], but is -1",
        ),
        ("{mix: {a: 1, b: [1, 2, 3]}}", "data.train: schedule.x.mix.b must be a weight above 0, or two for a r"),
        (
            "{mix: {a: 1, b: 1}, ended: 6}",
            "ended_at",
        ),
        ("{mix: {a: 1, b: 1}, steps: few}", "schedule.x.steps must be a whole number"),
        ("{mix: {a: 1, b: 1}, steps: 0}", "data.train: schedule.x.steps must be a whole number of at least 1"),
        ("{}", "data.train.schedule: the following arguments are required: mix\n"),
        ("{end: soon, mix: {a: 1, b: 1}}", "data.train: schedule.x.end must be a number, or a number follo"),
        ("{mix: {a: 1}}", "data.train: stream 'b' is in the mix of no phase"),
        ("all", "data.train.schedule.x must be a mapping, like {end: 800m, mix: {web: 0.9, code: 0.1}}, bu"),
    ],
)
def test_a_wrong_phase_is_named_with_its_field(
    phase: str, reason: str, phased_yaml: str, capsys: pytest.CaptureFixture[str]
) -> None:
    start, end = PHASED.index("        first: {"), PHASED.index("trainer:")
    Path("wrong.yaml").write_text(f"{PHASED[:start]}        x: {phase}\n{PHASED[end:]}")
    in_file = error_of("fit", "--config", "wrong.yaml", capsys=capsys)
    on_line = error_of("fit", "--config", phased_yaml, f"--data.train.schedule={{x: {phase}}}", capsys=capsys)
    for error in (in_file, on_line):
        assert reason in error
        assert len(error.splitlines()) <= 8


def test_a_configuration_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "error: there is no file nope.yaml for --config" in error_of("fit", "--config", "nope.yaml", capsys=capsys)


def test_a_schedule_must_be_a_mapping(phased_yaml: str, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = "--data.train.schedule=[{mix: {a: 1, b: 1}}]"
    error = error_of("fit", "--config", phased_yaml, wrong, capsys=capsys)
    assert "error: data.train.schedule must be a mapping, like {broad: {end: 800m" in error


def test_phases_that_read_what_is_not_there_end_the_run_with_a_line(
    phased_yaml: str, capsys: pytest.CaptureFixture[str]
) -> None:
    phases = '{"x": {"end": "50%", "mix": {"a": 1, "b": 1, "c": 1}}, "y": {"mix": {"a": 1}}}'
    ended = main(["fit", "--config", phased_yaml, f"--data.train.schedule={phases}"])
    assert ended is not None
    assert "schedule.x.mix reads stream 'c', and the streams are 'a', 'b'" in ended.message


def test_a_configuration_names_the_class_of_a_sequence_step(run_yaml: str) -> None:
    steps = "        b: {remote: data/b, proportion: 0.5}\n"
    Path(run_yaml).write_text(
        RUN.replace(steps, f"{steps}      sequence: [{{class_path: examples.every_nth.EveryNth}}]\n")
    )
    three = "--data.train.sequence=[{class_path: examples.every_nth.EveryNth, init_args: {n: 3}}]"
    cli = StreamingCLI(["fit", "--config", run_yaml, three, "--trainer.max_steps=1"])
    assert cli.datamodule.configs["train"].sequence == (EveryNth(3),)
    cli = StreamingCLI(["fit", "--config", run_yaml, "--trainer.max_steps=1", "--trainer.default_root_dir=two"])
    assert cli.datamodule.configs["train"].sequence == (EveryNth(2),)
    saved = Path("two/config.yaml" if Path("two/config.yaml").exists() else "config.yaml").read_text()
    assert "python" not in saved
    Path("saved.yaml").write_text(saved)
    again = StreamingCLI(["fit", "--config", "saved.yaml", "--trainer.default_root_dir=again"])
    assert again.datamodule.configs["train"] == cli.datamodule.configs["train"]
