"""Random requests of one family of paths: made, sent a few at a time, and judged."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from threading import BoundedSemaphore, local
from typing import Any, NamedTuple
from urllib.request import urlopen

# What belongs together, and which of its paths are asked.
FAMILIES: dict[str, tuple[tuple[str, str], ...]] = {
    "completions": (("POST", "/v1/completions"),),
    "chat": (("POST", "/v1/chat/completions"),),
    "responses": (("POST", "/v1/responses"),),
    "messages": (("POST", "/v1/messages"), ("POST", "/v1/messages/count_tokens")),
    "tokens": (("POST", "/tokenize"), ("POST", "/detokenize")),
    "models": (("GET", "/v1/models"), ("GET", "/v1/models/{model}")),
}
# Of the cases, those that fit the document; the others break it on purpose.
FITTING = 0.75
IN_FLIGHT = 6


class Job(NamedTuple):
    """`cases` requests of one family to `url`. `limit` is seconds a reply, `until` is when to stop."""

    url: str
    family: str
    cases: int
    seed: int
    limit: float
    until: float


@dataclass
class Outcome:
    """How requests were answered. A fault is a reply that must not be, told in a line."""

    cases: int = 0
    good: int = 0
    refused: int = 0
    busy: int = 0
    slowest: float = 0.0
    faults: list[str] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def share(self) -> float:
        """Share of 2xx replies."""
        return self.good / self.cases if self.cases else 0.0

    def add(self, other: Outcome) -> None:
        """Count another's in."""
        self.cases += other.cases
        self.good += other.good
        self.refused += other.refused
        self.busy += other.busy
        self.slowest = max(self.slowest, other.slowest)
        self.faults += other.faults
        self.reasons += other.reasons


class Reply(NamedTuple):
    """What came back, in `seconds`, to what was `sent`; status 0 where nothing did."""

    status: int
    headers: dict[str, str]
    text: str
    seconds: float
    sent: str


def run_job(job: Job) -> Outcome:
    """Run one job; may be called in a process of its own."""
    import schemathesis
    from schemathesis import GenerationMode

    with urlopen(job.url + "/openapi.json", timeout=60) as reply:
        document = json.load(reply)
    schema = schemathesis.openapi.from_dict(document)
    outcome = Outcome()
    sender = _Sender(job)
    paths = FAMILIES[job.family]
    for number, (mode, cases) in enumerate(shares(job.cases, len(paths))):
        method, path = paths[number % len(paths)]
        fitting = GenerationMode.POSITIVE if mode else GenerationMode.NEGATIVE
        strategy = schema[path][method].as_strategy(generation_mode=fitting)
        for case in _cases(strategy, cases, job):
            sender.send(case)
    for reply in sender.replies():
        judge(outcome, reply, job)
    return outcome


def shares(cases: int, paths: int) -> Iterator[tuple[bool, int]]:
    """For each path its cases that fit the document, then for each those that don't."""
    fitting = round(cases * FITTING)
    for fits, total in ((True, fitting), (False, cases - fitting)):
        for path in range(paths):
            yield fits, total // paths + (path < total % paths)


def _cases(strategy: Any, count: int, job: Job) -> list[Any]:
    from hypothesis import HealthCheck, Phase, given, seed, settings
    from schemathesis.errors import InvalidSchema

    found: list[Any] = []

    def collect(case: Any) -> None:
        if len(found) < count:
            case.body = written(case.body)
            found.append(case)

    quiet = settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    round_ = 0
    # Where there are few different cases, they come again.
    while len(found) < count and time.time() < job.until:
        # There are requests that the generator thinks of and then can't make.
        with suppress(InvalidSchema):
            seed(job.seed * 1000 + round_)(quiet(given(case=strategy)(collect)))()
        round_ += 1
    return found


def written(value: Any) -> Any:
    """A body as clients write it: to a schema 1.0 is an integer, too, but nobody sends one so."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, dict):
        return {name: written(item) for name, item in value.items()}
    return [written(item) for item in value] if isinstance(value, list) else value


class _Sender:
    """Sends cases by a few threads; waits when they have enough to do."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._pool = ThreadPoolExecutor(IN_FLIGHT)
        self._room = BoundedSemaphore(2 * IN_FLIGHT)
        self._sent: list[Future[Reply]] = []
        self._own = local()

    def send(self, case: Any) -> None:
        """Send a case, unless the time is over."""
        if time.time() < self._job.until:
            self._room.acquire()
            self._sent.append(self._pool.submit(self._ask, case))

    def replies(self) -> Iterator[Reply]:
        """Give all replies."""
        for sent in self._sent:
            yield sent.result()
        self._pool.shutdown()

    def _ask(self, case: Any) -> Reply:
        import requests

        try:
            session = getattr(self._own, "session", None)
            if session is None:
                session = self._own.session = requests.Session()
            how = case.as_transport_kwargs(base_url=self._job.url)
            sent = _shown(case)
            began = time.monotonic()
            try:
                reply = session.request(**how, timeout=self._job.limit)
                reply.encoding = "utf-8"
                text, headers = reply.text, {k.lower(): v for k, v in reply.headers.items()}
                return Reply(reply.status_code, headers, text, time.monotonic() - began, sent)
            except requests.RequestException as error:
                return Reply(0, {}, repr(error), time.monotonic() - began, sent)
        finally:
            self._room.release()


def _shown(case: Any) -> str:
    body = case.body if isinstance(case.body, dict | list | str | int | float | None) else repr(case.body)
    headers = f" {dict(case.headers)}" if case.headers else ""
    return f"{case.method} {case.formatted_path}{headers} {json.dumps(body)}"[:2000]


def judge(outcome: Outcome, reply: Reply, job: Job) -> None:
    """Count a reply in."""
    outcome.cases += 1
    outcome.slowest = max(outcome.slowest, reply.seconds)
    if reply.status == 0 or reply.seconds > job.limit:
        outcome.faults.append(f"no reply in {reply.seconds:.1f} s ({reply.text[:200]}) to {reply.sent}")
    elif reply.status == 503 and "retry-after" in reply.headers:
        outcome.busy += 1
    elif reply.status >= 500:
        outcome.faults.append(f"{reply.status} {reply.text[:300]} to {reply.sent}")
    elif reply.status >= 400:
        outcome.refused += 1
        outcome.reasons[_reason(reply.text)] += 1
    elif fault := _broken(reply):
        outcome.faults.append(f"{fault} in the reply to {reply.sent}")
    else:
        outcome.good += 1


def _broken(reply: Reply) -> str | None:
    """Say what is wrong with a reply that should be whole."""
    if reply.headers.get("content-type", "").startswith("application/json"):
        json.loads(reply.text)
        return None
    blocks = [block for block in reply.text.split("\n\n") if block and not block.startswith(":")]
    if not reply.text.endswith("\n\n") or not blocks:
        return "a stream that breaks off"
    for block in blocks:
        data = "".join(line[5:].strip() for line in block.split("\n") if line.startswith("data:"))
        if data == "[DONE]":
            continue
        event = json.loads(data)
        error = event.get("error") if isinstance(event, dict) else None
        if isinstance(error, dict) and error.get("type") in ("server_error", "api_error"):
            return f"the event {data[:300]}"
    return None


def _reason(text: str) -> str:
    try:
        error: Any = json.loads(text)["error"]
        return f"{error.get('param')}: {error['message']}"[:160]
    except (ValueError, KeyError, TypeError):
        return text[:160]


def told(reasons: Counter[str], most: int) -> Sequence[str]:
    """The commonest reasons for which requests were refused."""
    return [f"{count:>6}  {reason}" for reason, count in reasons.most_common(most)]
