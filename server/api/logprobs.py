"""Log-probabilities of tokens in the two forms that clients read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from engine import TokenLogprob
from server.generate import Entry
from server.schema.responses import ContentLogprobs, LegacyLogprobs, TokenLogprobs, TopLogprob

if TYPE_CHECKING:
    from engine import TextCodec

Logprobs = ContentLogprobs | LegacyLogprobs


class LogprobsWriter:
    """Writes entries as chats have them ("chat"), as completions do ("legacy"), or not at all (None).

    `top`: likeliest tokens told beside each, the token itself not counted in the legacy form.
    """

    def __init__(self, codec: TextCodec, form: Literal["chat", "legacy"] | None, top: int) -> None:
        self._codec = codec
        self._form = form
        self._top = top

    def write(self, entries: Sequence[Entry]) -> Logprobs | None:
        """Write the tokens of a choice, or of a piece of one."""
        if self._form is None:
            return None
        if self._form == "chat":
            return ContentLogprobs(tuple(self._chat(entry) for entry in entries))
        top = tuple(self._legacy_top(entry.logprob) for entry in entries) if self._top else None
        return LegacyLogprobs(
            tokens=tuple(self._legacy_text(entry.token_id) for entry in entries),
            token_logprobs=tuple(_number(entry.logprob) for entry in entries),
            top_logprobs=top,
            text_offset=tuple(entry.offset for entry in entries),
            token_ids=tuple(entry.token_id for entry in entries),
        )

    def _chat(self, entry: Entry) -> TokenLogprobs:
        top = () if entry.logprob is None else entry.logprob.top
        return TokenLogprobs(
            token=self._codec.token_text(entry.token_id),
            # Clients have a number here. The very first token of a prompt is given: certain.
            logprob=0.0 if entry.logprob is None else entry.logprob.logprob,
            bytes=self._bytes(entry.token_id),
            top_logprobs=tuple(
                TopLogprob(self._codec.token_text(token_id), value, self._bytes(token_id), token_id)
                for token_id, value in top
            ),
            token_id=entry.token_id,
            text_offset=entry.offset,
        )

    def _bytes(self, token_id: int) -> tuple[int, ...]:
        # Some clients take a list only, never null.
        return () if self._codec.is_control(token_id) else tuple(self._codec.token_bytes(token_id))

    def _legacy_top(self, logprob: TokenLogprob | None) -> dict[str, float] | None:
        if logprob is None:
            return None
        found = {self._legacy_text(token_id): value for token_id, value in logprob.top}
        found.setdefault(self._legacy_text(logprob.token_id), logprob.logprob)
        return found

    def _legacy_text(self, token_id: int) -> str:
        """A token as text, or its bytes spelled out where they are no whole characters."""
        data = self._codec.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _number(logprob: TokenLogprob | None) -> float | None:
    return None if logprob is None else logprob.logprob
