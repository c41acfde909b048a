"""What a request changes about its logits before a token is chosen: bias, penalties, forbidden tokens.

All of it concerns one row alone and is computed for one row at a time.
"""

from __future__ import annotations

import logging

import numpy as np
import numpy.typing as npt

from engine.errors import ConstraintFailed
from engine.plan import Past, SampleRow, needs_tokens
from engine.sampling.ranking import Float32, Float64, Ids
from engine.types import Constraint

logger = logging.getLogger(__name__)

_LARGEST = float(np.finfo(np.float32).max)


def wants_changes(sample: SampleRow) -> bool:
    """Whether anything here concerns the sample."""
    params = sample.params
    return (
        sample.constraint is not None
        or bool(params.logit_bias)
        or sample.position < params.min_tokens
        or needs_tokens(params)
    )


def changed(logits: Float32, sample: SampleRow) -> Float32:
    """The row with bias and penalties (see SamplingParams): finite like `logits` (fp32 [V]), which stay."""
    params = sample.params
    if not params.logit_bias and not needs_tokens(params):
        return logits
    row = logits.copy()
    if params.logit_bias:
        ids, biases = zip(*params.logit_bias, strict=True)
        np.add.at(row, np.array(ids), np.array(biases, np.float32))
    past = sample.past or Past(())
    tokens, counts = past.counted()
    if params.repetition_penalty != 1.0:
        _repeat_less(row, np.concatenate((past.prompt_ids, tokens)), params.repetition_penalty)
    if params.frequency_penalty or params.presence_penalty:
        _put(row, tokens, row[tokens] - (params.frequency_penalty * counts + params.presence_penalty))
    return row


def allowed(sample: SampleRow, vocab_size: int) -> Ids | None:
    """Ids that may be chosen, ascending and at least one, or None where all may.

    Where a grammar allows nothing but stop tokens, min_tokens gives way: the grammar has come to its end.
    Raises ConstraintFailed where no token is left.
    """
    params, constraint = sample.params, sample.constraint
    early = sample.position < params.min_tokens and not params.ignore_eos
    stops = list(params.stop_token_ids) if early else []
    if constraint is None and not stops:
        return None
    free = np.ones(vocab_size, np.bool_) if constraint is None else _mask(constraint, sample, vocab_size)
    if stops:
        going_on = free.copy()
        going_on[stops] = False
        if constraint is None or going_on.any():
            free = going_on
    ids = np.flatnonzero(free)
    if not len(ids):
        raise ConstraintFailed("no token may follow what was generated")
    return None if len(ids) == vocab_size else ids


def _mask(constraint: Constraint, sample: SampleRow, vocab_size: int) -> npt.NDArray[np.bool_]:
    """The constraint's mask as bool [vocab_size]; what it does not name is forbidden."""
    try:
        generated = () if sample.past is None else sample.past.generated
        bits = np.frombuffer(constraint.mask(generated) or b"\0", np.uint8)
    except ConstraintFailed:
        raise
    except Exception as error:  # whatever a grammar runs into is its own sequence's affair
        logger.exception("a constraint failed")
        raise ConstraintFailed(f"the grammar failed: {error}") from error
    return np.unpackbits(bits, count=vocab_size, bitorder="little").view(np.bool_)


def _repeat_less(row: Float32, ids: Ids, penalty: float) -> None:
    """Once for each token, also where `ids` names one twice."""
    values = row[ids].astype(np.float64)
    values[values < 0.0] *= penalty
    # A penalty of 0 sends every positive logit to the top.
    with np.errstate(divide="ignore", over="ignore"):
        np.divide(values, penalty, out=values, where=values > 0.0)
    _put(row, ids, values)


def _put(row: Float32, ids: Ids, values: Float64) -> None:
    row[ids] = np.clip(values, -_LARGEST, _LARGEST)
