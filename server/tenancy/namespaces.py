"""Whose cached pages a request may share."""

from __future__ import annotations

from typing import Literal

from engine import Namespace


def namespace_for(
    mode: Literal["dedicated", "serverless"], account: str | None, isolation_key: str | None
) -> Namespace:
    """Return the namespace of a request.

    Dedicated: without an isolation key all share one cache; with one (an empty one, too) the caller's
    account stands in front of it, so that another account's key value gets nothing. Serverless: each
    account has a cache of its own, which a key divides further.

    Raises ValueError for a serverless request without an account: the check at the door lets none in.
    """
    if mode == "serverless" and account is None:
        raise ValueError("a serverless request has no account")
    if mode == "dedicated" and isolation_key is None:
        return Namespace()
    return Namespace(account=account, isolation_key=isolation_key)
