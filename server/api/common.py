"""What the generating endpoints share: from an HTTP request to engine requests."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec
from aiohttp import web

from engine import ContextLengthExceeded, EngineInfo, EngineRequest, Namespace, RequestError, SamplingParams
from server.backend import Backend
from server.config import ServerConfig
from server.errors import ApiError
from server.metrics import Metrics
from server.schema.requests import GenerateRequest, read_stops
from server.schema.strict import clean, shown
from server.workers import Workers

if TYPE_CHECKING:
    from engine import TextCodec

R = TypeVar("R", bound=GenerateRequest)

ISOLATION_HEADER = "x-prompt-cache-isolation-key"


class Services(msgspec.Struct, frozen=True):
    """What handlers work with; one an application."""

    config: ServerConfig
    backend: Backend
    metrics: Metrics
    workers: Workers


SERVICES = web.AppKey("services", Services)


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request: what to run and how to say it."""

    reply_id: str
    created: int
    model: str
    fingerprint: str
    requests: tuple[EngineRequest, ...]
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool | None
    perf_metrics: bool
    token_ids: bool


def model_names(info: EngineInfo, config: ServerConfig) -> tuple[str, ...]:
    """Names that the model answers to; the first is its own."""
    aliases = (name.strip() for name in config.served_model_name.split(","))
    return tuple(dict.fromkeys((info.model, *(name for name in aliases if name))))


async def read_body(request: web.Request, services: Services, read: Callable[[bytes], R]) -> tuple[R, bool]:
    """Read, decode and check the body; say also whether its prompt may be long.

    Raises ApiError (408, 413, 415) and RequestError.
    """
    _check_type(request)
    most = services.config.max_body_mb
    too_large = ApiError(
        413, f"The request's body is larger than {most} MB, the most that is taken", code="request_too_large"
    )
    if request.content_length is not None and request.content_length > most * 1_000_000:
        raise too_large
    try:
        async with asyncio.timeout(services.config.body_timeout):
            body = await request.read()
    except TimeoutError:
        raise ApiError(408, "The request's body did not arrive in time", code="timeout") from None
    except web.HTTPRequestEntityTooLarge:
        raise too_large from None
    heavy = len(body) > services.config.long_body_kb * 1000
    return await services.workers.run(heavy, read, body), len(body) > services.config.long_prompt_bytes


def check_model(name: str, names: Sequence[str]) -> None:
    """Raise ApiError 404 unless the model is served here."""
    if name not in names:
        raise ApiError(
            404,
            f"The model {shown(name)} is not served here; there is: {', '.join(names)}",
            param="model",
            code="model_not_found",
        )


def check_size(texts: Iterable[str], services: Services, field: str) -> None:
    """Raise ContextLengthExceeded for texts so long that tokenizing them would be a waste."""
    engine, _ = services.backend.require()
    if sum(len(text) for text in texts) > services.backend.max_prompt_bytes:
        raise ContextLengthExceeded(
            f"The prompt has far more tokens than the context of {engine.info.context_length} holds",
            param=field,
        )


def build_order(
    http: web.Request,
    services: Services,
    body: GenerateRequest,
    prompts: Sequence[tuple[int, ...]],
    *,
    prefix: str,
    field: str,
) -> Order:
    """Turn tokenized prompts into engine requests.

    `prefix` begins the reply's id; `field` is the request field that holds the prompt, for messages.
    Raises RequestError.
    """
    engine, codec = services.backend.require()
    reply_id = prefix + uuid.uuid4().hex
    namespace = _namespace(http, services.config, body)
    options = body.stream_options
    return Order(
        reply_id=reply_id,
        created=int(time.time()),
        model=body.model,
        fingerprint=engine.info.fingerprint,
        requests=tuple(
            EngineRequest(
                request_id=reply_id if len(prompts) == 1 else f"{reply_id}-{index}",
                prompt=prompt,
                params=_sampling(body, codec, _room(body, services.config, prompt, engine.info, field)),
                namespace=namespace,
                cache_max_len=_cap(body.prompt_cache_max_len, len(prompt)),
                prompt_index=index,
            )
            for index, prompt in enumerate(prompts)
        ),
        stops=read_stops(body.stop, max_chars=services.config.max_stop_chars),
        stream=bool(body.stream),
        include_usage=options.include_usage if options else None,
        perf_metrics=bool(body.perf_metrics_in_response),
        token_ids=bool(body.return_token_ids),
    )


def _check_type(request: web.Request) -> None:
    if not request.headers.get("Content-Type", "").strip():
        raise ApiError(
            415, "The header Content-Type is missing: send application/json", code="unsupported_media_type"
        )
    kind = request.content_type
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(
            415, f"Content-Type must be application/json; it is {shown(kind)}", code="unsupported_media_type"
        )
    charset = request.charset
    if charset is not None and charset.lower() not in ("utf-8", "utf8", "us-ascii"):
        raise ApiError(415, "The body's charset must be utf-8", code="unsupported_media_type")
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise ApiError(415, "Compressed request bodies are not taken", code="unsupported_media_type")


def _room(
    body: GenerateRequest, config: ServerConfig, prompt: tuple[int, ...], info: EngineInfo, field: str
) -> int:
    # How many tokens this prompt may generate.
    if not prompt:
        raise RequestError(f"'{field}' is empty: it has no tokens", param=field)
    room = info.context_length - len(prompt)
    if room <= 0:
        raise ContextLengthExceeded(
            f"The prompt has {len(prompt)} tokens; the context of {info.context_length} tokens has to hold "
            "it and at least one more",
            param=field,
        )
    wanted = body.token_limit
    if wanted is None:
        return min(config.default_max_tokens, room)
    if wanted > room and body.context_length_exceeded_behavior == "error":
        raise ContextLengthExceeded(
            f"The prompt has {len(prompt)} tokens and {wanted} more may be generated; the context holds "
            f"{info.context_length} tokens",
            param="max_tokens" if body.max_tokens is not None else "max_completion_tokens",
        )
    return min(wanted, room)


def _sampling(body: GenerateRequest, codec: TextCodec, max_tokens: int) -> SamplingParams:
    defaults = codec.generation_defaults

    def choose(name: str, neutral: float) -> float:
        given = getattr(body, name)
        return float(given if given is not None else defaults.get(name, neutral))

    top_k = int(choose("top_k", 0))
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=choose("temperature", 1.0),
        top_p=choose("top_p", 1.0),
        top_k=top_k if top_k < codec.vocab_size else 0,
        min_p=choose("min_p", 0.0),
        seed=body.seed,
        stop_token_ids=tuple(codec.eos_ids),
        ignore_eos=bool(body.ignore_eos),
    )


def _cap(limit: int | None, most: int) -> int | None:
    # JSON integers have no bound; the engine's have.
    return None if limit is None else min(limit, most)


def _namespace(http: web.Request, config: ServerConfig, body: GenerateRequest) -> Namespace:
    for name in ("user", "prompt_cache_key", "prompt_cache_isolation_key", "cache_salt"):
        _check_key(name, getattr(body, name), config.max_key_chars)
    header = http.headers.get(ISOLATION_HEADER)
    _check_key(ISOLATION_HEADER, header, config.max_key_chars)
    if len(http.headers.getall(ISOLATION_HEADER, [])) > 1:
        raise RequestError(f"The header {ISOLATION_HEADER} is given more than once", param=ISOLATION_HEADER)
    # An empty key is a namespace of its own; only an absent one means the shared namespace.
    given = {key for key in (header, body.prompt_cache_isolation_key, body.cache_salt) if key is not None}
    if len(given) > 1:
        raise RequestError(
            f"The isolation keys differ: give the same in the header {ISOLATION_HEADER}, "
            "'prompt_cache_isolation_key' and 'cache_salt', or only one of them",
            param="prompt_cache_isolation_key",
        )
    return Namespace(isolation_key=next(iter(given), None))


def _check_key(name: str, key: str | None, max_chars: int) -> None:
    if key is None:
        return
    if len(key) > max_chars:
        raise RequestError(f"'{name}' may have at most {max_chars} characters; given: {len(key)}", param=name)
    if key != clean(key):
        raise RequestError(f"'{name}' is not valid UTF-8", param=name)
