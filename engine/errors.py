"""Every error that Headwater raises on purpose.

HeadwaterError
├── ConfigError              a setting is bad; the start stops
├── ModelError               a model can't be found, read or served
│   └── UnsupportedModel     its architecture or a feature of it isn't served
├── KernelUnavailable        the CPU kernel can't be compiled or loaded here
├── RequestError             the request can't be served as it is (HTTP 400)
│   └── ContextLengthExceeded    prompt at or over the context limit
├── EngineUnavailable        starting, draining or failed (HTTP 503)
│   └── Overloaded           the queue is full (HTTP 503 with Retry-After)
├── ConstraintFailed         a grammar can't be followed any further (HTTP 400)
└── StepFailed               the step that ran this request failed (HTTP 500)
"""

from __future__ import annotations


class HeadwaterError(Exception):
    """Base of every error that Headwater raises on purpose."""


class ConfigError(HeadwaterError):
    """A setting is bad: the message is one line naming variable, value and range."""


class ModelError(HeadwaterError):
    """A model can't be found, read or served."""


class UnsupportedModel(ModelError):
    """The model's architecture, or a feature it relies on, is not served."""


class KernelUnavailable(HeadwaterError):
    """The CPU kernel can't be compiled or loaded here; another executor serves."""


class RequestError(HeadwaterError):
    """The request can't be served as it is.

    `param` names the request field at fault, or None.
    """

    code: str = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthExceeded(RequestError):
    """The prompt leaves no room for a single token within the context limit."""

    code = "context_length_exceeded"


class EngineUnavailable(HeadwaterError):
    """The engine takes no request now: it is starting, draining or has failed."""


class Overloaded(EngineUnavailable):
    """The queue of waiting requests is full."""


class ConstraintFailed(HeadwaterError):
    """A sequence's grammar has become too complex to follow, or the tokens have left it."""


class StepFailed(HeadwaterError):
    """The step that ran this request raised, or gave a non-finite number."""
