"""Options written once: a class that takes those of a config is called, documented and parsed as if it had its own."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, get_type_hints

import jsonargparse
import pytest

from lightning_streaming.errors import ConfigError, UnknownArgumentError
from lightning_streaming.replaced_names import tells_unknown_arguments
from lightning_streaming.signatures import (
    called_with_options_of,
    explains_options_of,
    explanations_of,
    takes_options_of,
)


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


@tells_unknown_arguments
@explains_options_of(Options)
class Data:
    """Samples.

    Read them.

    Raises:
        ConfigError: An option cannot work.
    """

    @takes_options_of(Options)
    def __init__(self, options: Options) -> None:
        self.options = options


class Own(Data):
    def __init__(self, crop: int, **options: Any) -> None:
        super().__init__(**options)
        self.crop = crop


def test_a_class_takes_the_keywords_of_its_config_and_hands_them_on_checked() -> None:
    assert Data(remote="a", seed=3).options == Options(remote="a", seed=3)
    assert Own(4, remote="a").options == Options(remote="a")
    with pytest.raises(ConfigError, match="seed must not be negative"):
        Data(remote="a", seed=-1)


def test_an_unknown_keyword_is_refused_by_the_class_that_was_called() -> None:
    with pytest.raises(UnknownArgumentError, match=r"Data takes no argument 'sed': did you mean seed=\?"):
        Data(remote="a", sed=1)  # type: ignore[call-arg]


@explains_options_of(Options)
@called_with_options_of(Options)
def read(options: Options) -> int | None:
    """Read samples."""
    return options.seed


def test_a_function_is_called_with_what_makes_its_config() -> None:
    assert read(remote="a", seed=3) == 3
    assert list(inspect.signature(read).parameters) == ["shuffle", "seed", "remote"]
    assert get_type_hints(read)["return"] == int | None
    assert inspect.getdoc(read) == (
        "Read samples.\n\nArgs:\n"
        "    shuffle: Whether to shuffle each epoch.\n    seed: Seed of\n        the order.\n    remote: Where from."
    )


def test_what_cannot_be_a_call_is_refused_in_the_name_of_the_function() -> None:
    with pytest.raises(TypeError, match=r"^read\(\) missing a required argument: 'remote'$"):
        read()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^read\(\) got an unexpected keyword argument 'sed'$"):
        read(remote="a", sed=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^read\(\) too many positional arguments$"):
        read("a")  # type: ignore[call-arg, arg-type]


def test_the_signature_and_the_docstring_tell_each_option() -> None:
    assert {name: one.default for name, one in inspect.signature(Data).parameters.items()} == {
        "shuffle": False,
        "seed": 9,
        "remote": inspect.Parameter.empty,
    }
    assert get_type_hints(Data.__init__) == {"shuffle": bool, "seed": int | None, "remote": str, "return": type(None)}
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


@pytest.mark.parametrize("made", [Data, Own, Options])
def test_a_command_line_checks_and_explains_each_option(made: type, capsys: pytest.CaptureFixture[str]) -> None:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(made, "data")
    parser.print_help()
    shown = " ".join(capsys.readouterr().out.split())
    assert "--data.seed SEED Seed of the order. (type: int | null, default: 9)" in shown
    assert "Whether to shuffle each epoch. (type: bool, default: False)" in shown
    with pytest.raises(jsonargparse.ArgumentError):
        parser.parse_args(["--data.remote=a", "--data.crop=1", "--data.seed=x"])
