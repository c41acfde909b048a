"""What the choices of a request have said, gathered into whole replies."""

from __future__ import annotations

from collections.abc import Sequence

from engine.text import GrammarSpec, Part, join_parts
from server.api.common import Services
from server.api.dialect import Call, Reply
from server.api.logprobs import Logprobs, LogprobsWriter
from server.api.order import Order
from server.generate import Choice, Entry, Piece
from server.schema.responses import RawOutput

# Tokens that take as long to write as one with its log-probabilities.
LIGHT_TOKENS = 16


class Gathered:
    """What one choice has said so far."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.token_ids: list[int] = []
        self._parts: list[Part] = []

    def add(self, piece: Piece) -> None:
        """Take the next piece."""
        self.entries += piece.entries
        self.token_ids += piece.token_ids
        self._parts += piece.parts

    @property
    def weight(self) -> int:
        """How long it takes to write, counted in tokens with their log-probabilities."""
        return len(self.entries) + len(self.token_ids) // LIGHT_TOKENS

    @property
    def likelihood(self) -> float:
        """Mean log-probability of the generated tokens."""
        generated = self.entries[len(self.entries) - len(self.token_ids) :]
        found = [entry.logprob.logprob for entry in generated if entry.logprob is not None]
        return sum(found) / len(found) if found else float("-inf")

    def reply(
        self, place: int, choice: Choice, order: Order, writer: LogprobsWriter, services: Services
    ) -> Reply:
        """All of it."""
        assert choice.finish_reason is not None
        ids = tuple(self.token_ids)
        logprobs = writer.write(self.entries)
        parts = tuple(join_parts(self._parts))
        call_ids = choice.call_ids(parts)
        return Reply(
            choice=place,
            content="".join(part.text for part in parts if part.kind == "content"),
            reasoning="".join(part.text for part in parts if part.kind == "reasoning"),
            calls=tuple(
                Call(call_id or "", part.name or "", part.text)
                for part, call_id in zip(parts, call_ids, strict=True)
                if part.kind == "call"
            ),
            finish_reason=choice.finish_reason,
            logprobs=logprobs,
            token_ids=ids if order.token_ids else None,
            prompt_ids=choice.request.prompt if order.token_ids else None,
            stop_text=choice.stop_text,
            raw=raw_output(choice, ids, logprobs, services) if order.raw else None,
            parts=parts,
            call_ids=call_ids,
        )


def raw_output(
    choice: Choice, ids: tuple[int, ...], logprobs: Logprobs | None, services: Services
) -> RawOutput:
    _, codec = services.backend.require()
    request, constraint = choice.request, choice.request.constraint
    # An echoed prompt counts as come out, so that ids and log-probabilities stand side by side.
    ids = choice.echoed_ids + ids
    return RawOutput(
        prompt_fragments=(codec.decode(request.prompt, skip_special=False),),
        prompt_token_ids=request.prompt,
        completion=codec.decode(ids, skip_special=False),
        completion_token_ids=ids,
        completion_logprobs=logprobs,
        grammar=None if constraint is None else GrammarSpec.parse(constraint.source).text or None,
    )


def weight_of_raw(choice: Choice) -> int:
    return (choice.prompt_tokens + choice.completion_tokens) // LIGHT_TOKENS


def best(order: Order, gathered: Sequence[Gathered]) -> list[int]:
    """Which choices are told, the likeliest of each prompt first where more were generated than asked for."""
    if order.generated == order.shown:
        return list(range(len(gathered)))
    told: list[int] = []
    for start in range(0, len(gathered), order.generated):
        ranked = sorted(
            range(start, start + order.generated), key=lambda i: gathered[i].likelihood, reverse=True
        )
        told += ranked[: order.shown]
    return told
