#!/usr/bin/env python3
"""Check the HTTP API with random requests made from the OpenAPI document that the server itself serves.

A server on a small model with random weights is started in a process of its own; schemathesis makes requests
that fit the document, and some that don't. No reply may be a 5xx (but a 503 with Retry-After) or fail to
come, no stream may break off, and enough of the replies must be 2xx for the check to mean something. Run it
from the project's environment:

    .venv/bin/python scripts/check_api.py [--cases 2000] [--seconds 600] [--families chat messages]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from check_api_cases import FAMILIES, Job, Outcome, run_job, told
from check_api_server import serving

SHARE = 0.3
# Cases of one job: few enough that jobs end together, many enough that making the generator pays.
JOB_CASES = 250


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check; return 0 if it passed, 1 if not."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--cases", type=int, default=2000, help="cases a family (default 2000)")
    parser.add_argument("--seconds", type=float, default=600.0, help="time for all of them (default 600)")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds a reply may take (default 60)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the requests (default 1)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes that ask")
    parser.add_argument("--reasons", type=int, default=0, help="commonest refusals shown a family")
    parser.add_argument("--families", nargs="+", choices=sorted(FAMILIES), default=list(FAMILIES))
    args = parser.parse_args(argv)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="check-api-") as folder, serving(Path(folder)) as url:
        outcomes = ask(url, args.families, args.cases, args.seconds, args.limit, args.seed, args.workers)
    for line in table(outcomes):
        print(line)
    for family, found in outcomes.items() if args.reasons else ():
        print(f"refused, {family}:", *told(found.reasons, args.reasons), sep="\n")
    faults = verdict(outcomes, args.cases)
    for fault in faults:
        print("FAIL", fault)
    print(f"{'FAIL' if faults else 'PASS'}: {time.monotonic() - began:.0f} s in all")
    return 1 if faults else 0


def ask(
    url: str,
    families: Sequence[str],
    cases: int,
    seconds: float,
    limit: float,
    seed: int,
    workers: int,
) -> dict[str, Outcome]:
    """Send `cases` requests a family and gather what came back; what is not sent in time is missing."""
    until = time.time() + seconds
    sizes = [min(JOB_CASES, cases - at) for at in range(0, cases, JOB_CASES)]
    # The families take turns, so that each has had its share when the time is over.
    jobs = [
        Job(url, family, size, seed + number, limit, until)
        for number, size in enumerate(sizes)
        for family in families
    ]
    outcomes = {family: Outcome() for family in families}
    if workers == 1:
        for job in jobs:
            outcomes[job.family].add(run_job(job))
        return outcomes
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        running = {pool.submit(run_job, job): job.family for job in jobs}
        for done in as_completed(running):
            outcomes[running[done]].add(done.result())
    return outcomes


def table(outcomes: dict[str, Outcome]) -> list[str]:
    """One line a family: cases, how they were answered, how long the slowest reply took."""
    lines = [
        f"{'family':<12}{'cases':>7}{'2xx':>7}{'4xx':>7}{'503':>6}{'bad':>6}{'2xx share':>11}{'slowest':>10}"
    ]
    for family, found in outcomes.items():
        lines.append(
            f"{family:<12}{found.cases:>7}{found.good:>7}{found.refused:>7}{found.busy:>6}"
            f"{len(found.faults):>6}{found.share:>10.0%} {found.slowest:>8.1f} s"
        )
    return lines


def verdict(outcomes: dict[str, Outcome], cases: int) -> list[str]:
    """Say what is wrong, nothing if all is well."""
    faults = []
    for family, found in outcomes.items():
        faults += [f"{family}: {fault}" for fault in found.faults[:10]]
        if len(found.faults) > 10:
            faults.append(f"{family}: and {len(found.faults) - 10} more")
        if found.cases < cases:
            faults.append(f"{family}: {found.cases} of {cases} cases in time")
        if found.share < SHARE:
            faults.append(f"{family}: {found.share:.0%} were answered 2xx; at least {SHARE:.0%} should be")
    return faults


if __name__ == "__main__":
    sys.exit(main())
