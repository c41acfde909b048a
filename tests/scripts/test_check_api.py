"""scripts/check_api.py: random requests from the served document find no fault, and faults would be found."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from check_api import table, verdict
from check_api_cases import FAMILIES, Job, Outcome, Reply, judge, shares, written

ROOT = Path(__file__).resolve().parents[2]
CASES = 17
JOB = Job("http://127.0.0.1", "chat", 1, 1, 30.0, 0.0)


def test_a_hundred_random_requests_find_no_fault() -> None:
    """Every family is asked, nothing fails or hangs, and most of what fits the document is answered."""
    command = [sys.executable, "scripts/check_api.py", "--cases", str(CASES), "--workers", "1"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = [line.split() for line in result.stdout.splitlines()[1:] if "PASS" not in line]
    assert [row[0] for row in rows] == list(FAMILIES)
    assert {row[1] for row in rows} == {str(CASES)}
    assert {row[5] for row in rows} == {"0"}
    assert re.search(r"^PASS: \d+ s in all$", result.stdout, re.MULTILINE)


def reply(status: int, text: str = "{}", kind: str = "application/json", **headers: str) -> Reply:
    found = {"content-type": kind} | {name.replace("_", "-"): value for name, value in headers.items()}
    return Reply(status, found, text, 0.1, "POST /x {}")


def judged(*replies: Reply) -> Outcome:
    outcome = Outcome()
    for one in replies:
        judge(outcome, one, JOB)
    return outcome


STREAM = "text/event-stream"
DONE = 'data: {"choices": []}\n\ndata: [DONE]\n\n'


def test_replies_are_sorted_by_what_they_are() -> None:
    found = judged(
        reply(200),
        reply(200, DONE, STREAM),
        reply(200, ": waiting\n\n" + DONE, STREAM),
        reply(400, '{"error": {"message": "no", "param": "n"}}'),
        reply(503, retry_after="2"),
    )
    assert (found.cases, found.good, found.refused, found.busy, found.faults) == (5, 3, 1, 1, [])
    assert dict(found.reasons) == {"n: no": 1}
    assert found.share == 0.6


@pytest.mark.parametrize(
    "bad",
    [
        reply(500, '{"error": {"message": "boom"}}'),
        reply(502),
        reply(503),
        reply(0, "timed out"),
        reply(200)._replace(seconds=31.0),
        reply(200, 'data: {"choices": []}\n\ndata: {"cho', STREAM),
        reply(200, "", STREAM),
        reply(200, 'data: {"error": {"type": "server_error", "message": "boom"}}\n\n', STREAM),
        reply(200, 'event: error\ndata: {"error": {"type": "api_error", "message": "boom"}}\n\n', STREAM),
    ],
)
def test_what_must_not_be_is_a_fault(bad: Reply) -> None:
    found = judged(reply(200), bad)
    assert len(found.faults) == 1
    assert "POST /x {}" in found.faults[0]
    assert (found.cases, found.good) == (2, 1)
    assert any("POST /x {}" in line for line in verdict({"chat": found}, 2))


def test_too_few_cases_and_too_few_good_ones_fail_the_check() -> None:
    few = judged(*[reply(200)] * 3, *[reply(400)] * 7)
    assert verdict({"chat": few}, 10) == []
    assert verdict({"chat": few}, 11) == ["chat: 10 of 11 cases in time"]
    few.add(judged(reply(400)))
    assert verdict({"chat": few}, 11) == ["chat: 27% were answered 2xx; at least 30% should be"]
    assert table({"chat": few})[1].split() == ["chat", "11", "3", "8", "0", "0", "27%", "0.1", "s"]


def test_every_case_is_given_to_a_path_and_most_fit_the_document() -> None:
    for cases in (1, 17, 250):
        for paths in (1, 2):
            given = list(shares(cases, paths))
            assert sum(count for _, count in given) == cases
            assert sum(count for fits, count in given if fits) == round(cases * 0.75)


def test_whole_numbers_are_written_as_clients_write_them() -> None:
    """A generator's 1.0 says the same as 1 to a schema, and is no integer to a server."""
    assert repr(written({"a": [1.0, 0.5, True, None, "x"], "b": 1e300})) == (
        "{'a': [1, 0.5, True, None, 'x'], 'b': 1e+300}"
    )
