"""From a checked body and its tokenized prompts to an order: what the engine runs and how it is told."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
from aiohttp import web

from engine import ContextLengthExceeded, EngineInfo, EngineRequest, Namespace, RequestError, SamplingParams
from server.api.common import Services
from server.generate import MANY, Rules, offsets_of
from server.schema.prompts import read_bias, read_stop_ids, read_stops
from server.schema.requests import CompletionRequest, GenerateRequest
from server.schema.strict import clean
from server.schema.tools import Choice as ToolChoice
from server.tenancy import account_of, namespace_for

if TYPE_CHECKING:
    from engine import TextCodec
    from engine.text import CompiledGrammar

ISOLATION_HEADER = "x-prompt-cache-isolation-key"
LogprobsForm = Literal["chat", "legacy"]


class Prompt(NamedTuple):
    """A tokenized prompt. `text` is what the client wrote, None where it gave ids or a chat; `opened` is what
    the prompt's end has begun of the reply."""

    ids: tuple[int, ...]
    text: str | None = None
    opened: str = ""


class Frame(NamedTuple):
    """What holds for a reply beside its sampling: what it may call, whether it may reason, its grammar."""

    tools: ToolChoice = ToolChoice()
    reasoning: bool = False
    grammar: CompiledGrammar | None = None


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request: what to run and how to say it.

    `requests` has `generated` choices for each prompt in turn, of which `shown` are told. `rules` go with
    the prompts. `logprobs` is the form in which they are told, None for none; `top` is how many likeliest
    tokens stand beside each. `long`: the request is, and so is what repeats it.
    """

    reply_id: str
    created: int
    model: str
    fingerprint: str
    requests: tuple[EngineRequest, ...]
    rules: tuple[Rules, ...]
    shown: int
    generated: int
    stream: bool
    include_usage: bool | None
    perf_metrics: bool
    token_ids: bool
    raw: bool
    logprobs: LogprobsForm | None
    top: int
    service_tier: str | None
    legacy_calls: bool = False
    long: bool = False


async def make_order(
    http: web.Request,
    services: Services,
    body: GenerateRequest,
    prompts: Sequence[Prompt],
    *,
    prefix: str,
    field: str,
    frame: Frame | None = None,
    long: bool,
) -> Order:
    """Turn tokenized prompts into engine requests, in a worker where that may take long.

    `prefix` begins the reply's id; `field` is the request field that holds the prompt, for messages.
    `long` says that the request is. Raises RequestError.
    """
    heavy = long or len(prompts) * _each(body) > MANY
    pool = services.workers if long else services.writers
    return await pool.run(heavy, _build, http, services, body, prompts, prefix, field, frame or Frame(), long)


def _build(
    http: web.Request,
    services: Services,
    body: GenerateRequest,
    prompts: Sequence[Prompt],
    prefix: str,
    field: str,
    frame: Frame,
    long: bool,
) -> Order:
    engine, codec = services.backend.require()
    generated = _generated(services, body, len(prompts), engine.config.max_waiting)
    build = _Builder(services, body, engine.info, codec, frame, field)
    build.check_logprobs(prompts, generated)
    reply_id = prefix + uuid.uuid4().hex
    namespace = _namespace(http, services, body)
    options = body.stream_options
    count = len(prompts) * generated
    return Order(
        reply_id=reply_id,
        created=int(time.time()),
        model=body.model,
        fingerprint=engine.info.fingerprint,
        requests=tuple(
            build.request(
                prompt,
                reply_id if count == 1 else f"{reply_id}-{index * generated + choice}",
                namespace,
                index,
                choice,
            )
            for index, prompt in enumerate(prompts)
            for choice in range(generated)
        ),
        rules=tuple(build.rules(prompt) for prompt in prompts),
        shown=body.choices,
        generated=generated,
        stream=bool(body.stream),
        include_usage=options.include_usage if options else None,
        perf_metrics=bool(body.perf_metrics_in_response),
        token_ids=bool(body.return_token_ids),
        raw=bool(body.raw_output),
        logprobs=build.form,
        top=build.top,
        service_tier=None if body.service_tier is None else _tier(body),
        legacy_calls=frame.tools.legacy,
        long=long,
    )


class _Builder:
    """Builds the engine requests of one body."""

    def __init__(
        self,
        services: Services,
        body: GenerateRequest,
        info: EngineInfo,
        codec: TextCodec,
        frame: Frame,
        field: str,
    ) -> None:
        self._config, self._body, self._info, self._codec = services.config, body, info, codec
        self._frame, self._field = frame, field
        self.form: LogprobsForm | None = None
        self.top = 0
        if body.logprobs is True:
            self.form, self.top = "chat", body.top_logprobs or 0
        elif body.logprobs is not None and body.logprobs is not False:
            self.form, self.top = "legacy", body.logprobs
        # Which choices are best is told by their log-probabilities.
        self._ranked = isinstance(body, CompletionRequest) and (body.best_of or 1) > body.choices
        self._stops = read_stops(body.stop, max_chars=services.config.max_stop_chars)
        self._stop_ids = read_stop_ids(body.stop_token_ids, vocab_size=codec.vocab_size)
        self._bias = read_bias(body.logit_bias, vocab_size=codec.vocab_size)

    def request(
        self, prompt: Prompt, request_id: str, namespace: Namespace, index: int, choice: int
    ) -> EngineRequest:
        """One choice of one prompt."""
        ids, grammar = prompt.ids, self._frame.grammar
        echoed = self._echoed(prompt)
        scored = self.form is not None and echoed > 0
        return EngineRequest(
            request_id=request_id,
            prompt=ids,
            params=self._sampling(self._room(ids)),
            namespace=namespace,
            cache_max_len=_cap(self._body.prompt_cache_max_len, len(ids)),
            prompt_index=index,
            choice_index=choice,
            prompt_logprobs=self.top if scored else None,
            prompt_logprobs_from=len(ids) - echoed if scored else 0,
            priority=1 if _tier(self._body) == "priority" else 0,
            constraint=None if grammar is None else grammar.start(),
        )

    def rules(self, prompt: Prompt) -> Rules:
        """How the choices of a prompt are told."""
        echoed = self._echoed(prompt)
        whole = echoed == len(prompt.ids)
        told = self.form is not None or self._ranked
        echo = ""
        if echoed:
            written = prompt.text if whole else None
            echo = (
                self._codec.decode(prompt.ids[-echoed:], skip_special=False) if written is None else written
            )
        return Rules(
            stops=self._stops,
            calls=bool(self._frame.tools.callable),
            several=self._frame.tools.parallel,
            forced=self._frame.tools.required,
            reasoning=self._frame.reasoning,
            opened=prompt.opened,
            logprobs=told,
            echo=echo,
            echoed=echoed,
            offsets=offsets_of(self._codec, prompt.ids[-echoed:], echo) if told and echoed else (),
        )

    def check_logprobs(self, prompts: Sequence[Prompt], generated: int) -> None:
        """Raise RequestError where the reply might hold more log-probabilities than memory should."""
        if self.form is None:
            return
        tokens = sum(self._echoed(prompt) + self._room(prompt.ids) for prompt in prompts)
        numbers, most = generated * tokens * (1 + self.top), self._config.max_logprobs
        if numbers > most:
            raise RequestError(
                f"'logprobs' asks for up to {numbers} log-probabilities, counting choices, tokens and "
                f"alternatives; at most {most} are given: ask for fewer, or give a lower max_tokens",
                param="logprobs",
            )

    def _echoed(self, prompt: Prompt) -> int:
        if self._body.echo:
            return len(prompt.ids)
        return min(self._body.echo_last or 0, len(prompt.ids))

    def _room(self, prompt: tuple[int, ...]) -> int:
        # How many tokens this prompt may generate.
        field, body, context = self._field, self._body, self._info.context_length
        if not prompt:
            raise RequestError(f"'{field}' is empty: it has no tokens", param=field)
        room = context - len(prompt)
        if room <= 0:
            raise ContextLengthExceeded(
                f"The prompt has {len(prompt)} tokens; the context of {context} tokens has to hold "
                "it and at least one more",
                param=field,
            )
        wanted = body.token_limit
        if wanted is None:
            return min(self._config.default_max_tokens, room)
        if wanted > room and body.context_length_exceeded_behavior == "error":
            raise ContextLengthExceeded(
                f"The prompt has {len(prompt)} tokens and {wanted} more may be generated; the context holds "
                f"{context} tokens",
                param="max_tokens" if body.max_tokens is not None else "max_completion_tokens",
            )
        return min(wanted, room)

    def _sampling(self, max_tokens: int) -> SamplingParams:
        body, vocab_size = self._body, self._codec.vocab_size
        # JSON integers have no bound; floats have.
        top_k = body.top_k if body.top_k is not None else int(self._choose("top_k", 0))
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self._choose("temperature", 1.0),
            top_p=self._choose("top_p", 1.0),
            top_k=top_k if top_k < vocab_size else 0,
            min_p=self._choose("min_p", 0.0),
            typical_p=self._choose("typical_p", 1.0),
            seed=body.seed,
            stop_token_ids=(*self._codec.eos_ids, *self._stop_ids),
            ignore_eos=bool(body.ignore_eos),
            min_tokens=min(body.min_tokens or 0, max_tokens),
            logprobs=self.top if self.form is not None else 0 if self._ranked else None,
            logit_bias=self._bias,
            repetition_penalty=self._choose("repetition_penalty", 1.0),
            frequency_penalty=body.frequency_penalty or 0.0,
            presence_penalty=body.presence_penalty or 0.0,
            mirostat_target=body.mirostat_target or 0.0,
            mirostat_lr=0.1 if body.mirostat_lr is None else body.mirostat_lr,
        )

    def _choose(self, name: str, neutral: float) -> float:
        given = getattr(self._body, name)
        return float(given if given is not None else self._codec.generation_defaults.get(name, neutral))


def _generated(services: Services, body: GenerateRequest, prompts: int, most_waiting: int) -> int:
    """Choices to generate for each prompt. Raises RequestError where all together are too many."""
    generated = _each(body)
    # All choices of a request wait at once before the first one runs.
    most = min(services.config.max_choices, most_waiting)
    if prompts * generated > most:
        name = "best_of" if generated != body.choices else "n"
        raise RequestError(
            f"'{name}' asks for {prompts * generated} choices in all; at most {most} are taken", param=name
        )
    return generated


def _each(body: GenerateRequest) -> int:
    """Choices that a body asks to generate for each prompt."""
    if isinstance(body, CompletionRequest) and body.best_of is not None:
        return body.best_of
    return body.choices


def _tier(body: GenerateRequest) -> Literal["priority", "default"]:
    return "priority" if body.service_tier == "priority" else "default"


def _cap(limit: int | None, most: int) -> int | None:
    # JSON integers have no bound; the engine's have.
    return None if limit is None else min(limit, most)


def _namespace(http: web.Request, services: Services, body: GenerateRequest) -> Namespace:
    config = services.config
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
    return namespace_for(config.mode, account_of(http), next(iter(given), None))


def _check_key(name: str, key: str | None, max_chars: int) -> None:
    if key is None:
        return
    if len(key) > max_chars:
        raise RequestError(f"'{name}' may have at most {max_chars} characters; given: {len(key)}", param=name)
    if key != clean(key):
        raise RequestError(f"'{name}' is not valid UTF-8", param=name)
