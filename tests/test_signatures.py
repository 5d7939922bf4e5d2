"""Options written once: the docstring of a class that takes those of a config explains them."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import jsonargparse
import pytest

from lightning_streaming.errors import ConfigError
from lightning_streaming.signatures import explains_options_of, explanations_of


@dataclass(frozen=True, kw_only=True)
class Order:
    """How samples are ordered.

    Args:
        shuffle: Whether to shuffle.
        seed: Seed of
            the order.

    Raises:
        ConfigError: The seed is negative.
    """

    shuffle: bool = False
    seed: int | None = 9

    def __post_init__(self) -> None:
        if self.seed is not None and self.seed < 0:
            raise ConfigError(f"seed must not be negative, but got {self.seed}")


@dataclass(frozen=True, kw_only=True)
class Options(Order):
    """What a dataset is asked for.

    Args:
        remote: Where from.
        shuffle: Whether to shuffle each epoch.
    """

    remote: str


@explains_options_of(Options)
class Data:
    """Samples.

    Read them.

    Raises:
        ConfigError: An option cannot work.
    """

    def __init__(self, *, shuffle: bool = False, seed: int | None = 9, remote: str) -> None:
        self.options = Options(shuffle=shuffle, seed=seed, remote=remote)


def test_the_docstring_explains_each_option() -> None:
    assert inspect.getdoc(Data) == (
        "Samples.\n\nRead them.\n\nArgs:\n"
        "    shuffle: Whether to shuffle each epoch.\n    seed: Seed of\n        the order.\n"
        "    remote: Where from.\n\n"
        "Raises:\n    ConfigError: An option cannot work."
    )


def test_a_config_without_bases_and_a_class_without_words_are_explained_as_they_are() -> None:
    assert list(explanations_of(Options)) == ["shuffle", "seed", "remote"]
    assert explanations_of(int) == {}


def test_a_class_may_say_of_an_option_what_it_means_there() -> None:
    @explains_options_of(Options)
    class Stage(Options):
        """One stage.

        Args:
            seed: Of the stage.

        Raises:
            ConfigError: An option cannot work.
        """

    assert inspect.getdoc(Stage) == (
        "One stage.\n\nArgs:\n"
        "    shuffle: Whether to shuffle each epoch.\n    seed: Of the stage.\n    remote: Where from.\n\n"
        "Raises:\n    ConfigError: An option cannot work."
    )


@pytest.mark.parametrize("made", [Data, Options])
def test_a_command_line_checks_and_explains_each_option(made: type, capsys: pytest.CaptureFixture[str]) -> None:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(made, "data")
    parser.print_help()
    shown = " ".join(capsys.readouterr().out.split())
    assert "--data.seed SEED Seed of the order. (type: int | null, default: 9)" in shown
    assert "Whether to shuffle each epoch. (type: bool, default: False)" in shown
    with pytest.raises(jsonargparse.ArgumentError):
        parser.parse_args(["--data.remote=a", "--data.crop=1", "--data.seed=x"])
