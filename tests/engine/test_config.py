"""Settings: read from defaults, environment and flags, each value judged before anything starts."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
import pytest
from msgspec import Meta

from engine.config import EngineConfig, Setting, load, settings
from engine.errors import ConfigError


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """A small struct with every kind of field."""

    count: Annotated[int, Meta(ge=1, le=9, description="How many")] = 3
    share: Annotated[float, Meta(ge=0.0, le=1.0, description="How much")] = 0.5
    verbose: Annotated[bool, Meta(description="Whether")] = False
    name: Annotated[str, Meta(description="Who")] = "me"


ENGINE_SETTINGS = settings(EngineConfig)
NUMBERS = [s for s in ENGINE_SETTINGS if s.kind in ("int", "float")]
CHOICES = [s for s in ENGINE_SETTINGS if s.kind == "choice"]


def name_of(setting: Setting) -> str:
    return setting.field


def test_without_environment_and_flags_defaults_hold() -> None:
    assert load(EngineConfig, env={}) == EngineConfig()


def test_a_variable_beats_the_default_and_a_flag_beats_the_variable() -> None:
    env = {"HEADWATER_COUNT": "4", "HEADWATER_NAME": "env"}
    assert load(Sample, env=env) == Sample(count=4, name="env")
    assert load(Sample, env=env, overrides={"count": "5"}) == Sample(count=5, name="env")


def test_without_an_environment_given_the_process_environment_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HEADWATER_COUNT", "7")
    assert load(Sample).count == 7


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("on", True), ("Yes", True), ("false", False), ("off", False)]
)
def test_switches_take_the_usual_words(text: str, value: bool) -> None:
    assert load(Sample, env={"HEADWATER_VERBOSE": text}).verbose is value


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("COUNT", "0"),
        ("COUNT", "10"),
        ("COUNT", "2.5"),
        ("COUNT", "many"),
        ("COUNT", ""),
        ("SHARE", "-0.1"),
        ("SHARE", "1.01"),
        ("SHARE", "nan"),
        ("SHARE", "inf"),
        ("VERBOSE", "maybe"),
    ],
)
def test_a_bad_variable_is_refused_by_name_value_and_range(variable: str, text: str) -> None:
    name = "HEADWATER_" + variable
    allowed = next(s.allowed for s in settings(Sample) if s.env == name)
    with pytest.raises(ConfigError) as refusal:
        load(Sample, env={name: text})
    message = str(refusal.value)
    assert "\n" not in message
    assert name in message
    assert repr(text) in message
    assert allowed in message


def test_a_bad_flag_is_named_as_a_flag() -> None:
    with pytest.raises(ConfigError, match=r"--count='0' .* an integer from 1 to 9"):
        load(Sample, env={}, overrides={"count": "0"})


def test_a_bad_variable_that_a_flag_overrides_does_no_harm() -> None:
    assert load(Sample, env={"HEADWATER_COUNT": "0"}, overrides={"count": "2"}).count == 2


@pytest.mark.parametrize("setting", ENGINE_SETTINGS, ids=name_of)
def test_every_setting_is_documented_and_allows_its_own_default(setting: Setting) -> None:
    assert setting.env == "HEADWATER_" + setting.field.upper()
    assert setting.flag == "--" + setting.field.replace("_", "-")
    assert setting.help
    assert setting.allowed
    loaded = load(EngineConfig, env={setting.env: str(setting.default)})
    assert getattr(loaded, setting.field) == setting.default


@pytest.mark.parametrize("setting", NUMBERS, ids=name_of)
def test_every_number_has_a_range_that_is_enforced_at_both_ends(setting: Setting) -> None:
    shown = re.fullmatch(r"an? (?:integer|number) from (\S+) to (\S+)", setting.allowed)
    assert shown, setting.allowed
    low, high = (float(end) for end in shown.groups())
    number = int if setting.kind == "int" else float
    for end in (low, high):
        assert getattr(load(EngineConfig, env={setting.env: str(number(end))}), setting.field) == end
    for beyond in (low - 1, high + 1):
        with pytest.raises(ConfigError, match=setting.env):
            load(EngineConfig, env={setting.env: str(number(beyond))})


@pytest.mark.parametrize("setting", CHOICES, ids=name_of)
def test_every_choice_takes_what_it_lists_and_nothing_else(setting: Setting) -> None:
    for word in setting.allowed.split(" | "):
        assert getattr(load(EngineConfig, env={setting.env: word}), setting.field) == word
    with pytest.raises(ConfigError, match=setting.env):
        load(EngineConfig, env={setting.env: "nonesuch"})


def test_a_config_cannot_be_changed_afterwards() -> None:
    with pytest.raises(AttributeError):
        EngineConfig().threads = 4  # type: ignore[misc]
