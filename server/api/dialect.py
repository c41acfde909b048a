"""What an endpoint is told of a reply, and what it makes of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from engine.text import Part
from server.api.logprobs import Logprobs
from server.api.order import Order
from server.errors import ErrorObject
from server.generate import Ending
from server.schema.responses import RawOutput
from server.usage import Tally


class Event(NamedTuple):
    """A server-sent event: one JSON value, and the name of its kind where the dialect has names."""

    payload: Any
    name: str | None = None


class Call(NamedTuple):
    """A whole call; `arguments` is JSON text as the model wrote it, cut short where the reply was."""

    id: str
    name: str
    arguments: str


class Reply(NamedTuple):
    """All that one choice says, by kind, and in order as `parts` with their `call_ids`.

    `token_ids`, `prompt_ids`, `logprobs` and `raw` are None unless asked for; `stop_text` is the stop string
    that ended the choice, or None.
    """

    choice: int
    content: str
    reasoning: str
    calls: tuple[Call, ...]
    finish_reason: Ending
    logprobs: Logprobs | None = None
    token_ids: tuple[int, ...] | None = None
    prompt_ids: tuple[int, ...] | None = None
    stop_text: str | None = None
    raw: RawOutput | None = None
    parts: tuple[Part, ...] = ()
    call_ids: tuple[str | None, ...] = ()


class Update(NamedTuple):
    """What one choice adds in a stream; the fields are a Reply's. `first` marks a choice's first update,
    `call_ids` has an id for each part of a call."""

    choice: int
    parts: tuple[Part, ...]
    call_ids: tuple[str | None, ...]
    finish_reason: Ending | None
    first: bool
    logprobs: Logprobs | None = None
    token_ids: tuple[int, ...] | None = None
    prompt_ids: tuple[int, ...] | None = None
    stop_text: str | None = None
    raw: RawOutput | None = None


class Dialect(Protocol):
    """How an endpoint writes one reply; made anew for each.

    A stream is `begin`, then an `update` for each piece, then `end`, or `failure` instead of what is left.
    `update` gets the tally with the last piece of the last choice. `marks_done`: [DONE] ends the stream.
    `opens_empty`: a choice begins with an update of its own even while it has nothing to show.
    """

    @property
    def marks_done(self) -> bool: ...

    @property
    def opens_empty(self) -> bool: ...

    def whole(self, order: Order, replies: Sequence[Reply], tally: Tally) -> Any:
        """Write a whole reply."""

    def begin(self, order: Order, tally: Tally) -> Iterable[Event]:
        """Write what comes before the first piece."""

    def update(self, order: Order, update: Update, tally: Tally | None) -> Iterable[Event]:
        """Write a piece."""

    def end(self, order: Order, tally: Tally) -> Iterable[Event]:
        """Write what comes after the last piece."""

    def failure(self, order: Order, error: ErrorObject, tally: Tally) -> Event:
        """Write what ends a stream that can't go on."""
