"""Settings: each tunable once, as a field with default, range and help; read from env and command line.

A field `max_step_tokens` is `HEADWATER_MAX_STEP_TOKENS` in the environment and `--max-step-tokens` on
the command line; the command line wins. `settings()` lists them for --help and docs/settings.md.
"""

from __future__ import annotations

import os
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from engine.errors import ConfigError

PREFIX = "HEADWATER_"

S = TypeVar("S", bound=msgspec.Struct)


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the engine: the model, its memory and the scheduler."""

    model: Annotated[
        str,
        Meta(description="Model: smollm2-135m-instruct, a GGUF file, a Hugging Face folder or hub id"),
    ] = "smollm2-135m-instruct"
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32"],
        Meta(description="Arithmetic; auto is bfloat16 where the CPU has it natively, else float32"),
    ] = "auto"
    executor: Annotated[
        Literal["cpu", "compiled", "torch", "reference", "flashinfer"],
        Meta(
            description="What computes: cpu is compiled where there is a C++ compiler, else torch;"
            " flashinfer runs the model on an NVIDIA GPU; reference is flat fp32, slow, for comparison"
        ),
    ] = "cpu"
    deterministic: Annotated[
        bool,
        Meta(
            description="On an NVIDIA GPU: equal bits whatever runs beside a row, by flat attention, fixed"
            " shapes and no graphs, slower; CPU executors give equal bits always"
        ),
    ] = False
    threads: Annotated[
        int, Meta(ge=0, le=1024, description="Compute threads; 0 takes affinity and cgroup quota")
    ] = 0
    kv_gb: Annotated[
        float,
        Meta(ge=0.0, le=4096.0, description="GB of KV cache; 0 takes a quarter of the memory limit"),
    ] = 0.0
    page_size: Annotated[int, Meta(ge=1, le=256, description="Tokens in a KV page; divides tile")] = 16
    tile: Annotated[
        int, Meta(ge=16, le=4096, description="Tokens in an attention tile; a multiple of page_size")
    ] = 256
    max_context: Annotated[
        int, Meta(ge=0, le=10_000_000, description="Context limit in tokens; 0 takes the model's")
    ] = 0
    max_running: Annotated[int, Meta(ge=1, le=4096, description="Sequences that run at once")] = 64
    max_waiting: Annotated[
        int, Meta(ge=1, le=1_000_000, description="Requests that may wait; more are refused with 503")
    ] = 1024
    max_step_tokens: Annotated[
        int, Meta(ge=1, le=65536, description="Rows in one step: decode rows and prefill chunks together")
    ] = 512
    step_ms: Annotated[
        float,
        Meta(
            ge=1.0,
            le=60000.0,
            description="Predicted time of a step in ms while streams are running; cuts prefill chunks",
        ),
    ] = 100.0
    cascade: Annotated[
        Literal["off", "auto", "force"],
        Meta(
            description="Shared-prefix attention: auto reads a shared prefix once for all sequences where it"
            " pays, force wherever it saves KV bytes"
        ),
    ] = "auto"
    cascade_levels: Annotated[
        int,
        Meta(ge=1, le=8, description="Levels of shared-prefix attention, the private one counted; 1 is flat"),
    ] = 4
    cascade_costs: Annotated[
        str,
        Meta(
            description="What auto weighs, as byte_ns=0.02,segment_ns=500,level_ns=0; empty measures it once"
            " and keeps it in the cache folder"
        ),
    ] = ""
    cascade_verify: Annotated[
        float,
        Meta(
            ge=0.0,
            le=1.0,
            description="Share of the steps with shared prefixes that are computed again flat, and compared",
        ),
    ] = 0.0
    max_failed_steps: Annotated[
        int, Meta(ge=1, le=1000, description="Failed steps in a row after which the process ends")
    ] = 3

    @property
    def align(self) -> int:
        """Tokens to which shared spans are cut: whole tiles where grouping must change no bit, else pages."""
        return self.page_size if self.executor == "flashinfer" else self.tile

    @property
    def grouping(self) -> Literal["off", "auto", "force"]:
        """How shared prefixes are used: not, where equal bits are wanted that only flat attention has."""
        flat = self.deterministic and self.executor == "flashinfer" and self.cascade == "auto"
        return "off" if flat else self.cascade


class Setting(NamedTuple):
    """One setting as it is shown: for --help and docs/settings.md."""

    field: str
    env: str
    flag: str
    kind: str
    default: Any
    allowed: str
    help: str


def settings(struct: type[msgspec.Struct]) -> list[Setting]:
    """List the settings of a config struct, in order of declaration."""
    hints = typing.get_type_hints(struct, include_extras=True)
    found = []
    for field in msgspec.structs.fields(struct):
        base, meta = _unwrap(hints[field.name])
        found.append(
            Setting(
                field.name,
                PREFIX + field.name.upper(),
                "--" + field.name.replace("_", "-"),
                _kind(base),
                field.default,
                _allowed(base, meta),
                (meta.description or "") if meta else "",
            )
        )
    return found


def load(
    struct: type[S], env: Mapping[str, str] | None = None, overrides: Mapping[str, str] | None = None
) -> S:
    """Build a config struct from defaults, the environment, then overrides (field name -> text).

    Raises ConfigError with one line that names variable, value and range.
    """
    env = os.environ if env is None else env
    overrides = overrides or {}
    hints = typing.get_type_hints(struct, include_extras=True)
    values: dict[str, Any] = {}
    for setting in settings(struct):
        if setting.field in overrides:
            name, text = setting.flag, overrides[setting.field]
        elif setting.env in env:
            name, text = setting.env, env[setting.env]
        else:
            continue
        base, _ = _unwrap(hints[setting.field])
        try:
            values[setting.field] = msgspec.convert(_parse(base, text), hints[setting.field])
        except (ValueError, msgspec.ValidationError):
            raise ConfigError(f"{name}={text!r} is not allowed: give {setting.allowed}") from None
    return struct(**values)


def _unwrap(hint: Any) -> tuple[Any, Meta | None]:
    if typing.get_origin(hint) is Annotated:
        base, *rest = typing.get_args(hint)
        return base, next((m for m in rest if isinstance(m, Meta)), None)
    return hint, None


def _parse(base: Any, text: str) -> Any:
    text = text.strip()
    if base is bool:
        lowered = text.lower()
        if lowered in ("1", "true", "yes", "on"):
            return True
        if lowered in ("0", "false", "no", "off"):
            return False
        raise ValueError(text)
    if base is int:
        return int(text)
    if base is float:
        return float(text)
    return text


def _kind(base: Any) -> str:
    if typing.get_origin(base) is Literal:
        return "choice"
    return getattr(base, "__name__", str(base))


def _allowed(base: Any, meta: Meta | None) -> str:
    if typing.get_origin(base) is Literal:
        return " | ".join(str(a) for a in typing.get_args(base))
    if base is bool:
        return "true | false"
    if meta is not None and (meta.ge is not None or meta.le is not None):
        word = {int: "an integer", float: "a number"}.get(base, "a value")
        return f"{word} from {meta.ge:.12g} to {meta.le:.12g}"
    if isinstance(base, types.UnionType) or base is str:
        return "any text"
    return _kind(base)
