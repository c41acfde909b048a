#!/usr/bin/env python3
"""Check that the cache, batching, chunking, preemption and cascade change no bit of any result.

Each prompt is run once cold and alone; then variants run it again, and its token ids and log-probabilities
(chosen and top 5; where asked for, the prompt's too) must be equal to the bit. Needs the
default model; run it from the project's environment:

    .venv/bin/python scripts/check_bits.py [--dtype bfloat16 float32] [--prompts 50] [--tokens 12]
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from check_bits_lab import Case, Lab, Output

from engine import machine
from engine.config import EngineConfig
from engine.types import SamplingParams

STEP_ROWS = (1, 2, 3, 5, 9, 10, 11, 17, 33)
HEAD_ROWS = (1, 2, 9)


def warm(lab: Lab) -> None:
    """The same prompt again, alone: n-1 tokens from the cache, which filled with many at once."""
    for batch in lab.batches():
        session = lab.session()
        session.fill(batch)
        for i, case in batch:
            (again,) = session.run_apart([(i, case)])
            lab.check("warm", i, again, len(case.prompt) - 1)
        lab.close(session)


def partly_warm(lab: Lab) -> None:
    """Another prompt went before that parts with this one inside a page, or at a page's edge; then this one
    runs alone in the first case, and with many in the second."""
    size, vocab = lab.runner.info.page_size, lab.runner.info.vocab_size

    def parted(case: Case, k: int) -> Case:
        other = tuple((t + 1) % vocab for t in case.prompt[k : k + 20])
        return case._replace(prompt=case.prompt[:k] + other)

    for batch in lab.batches():
        for alone in (True, False):
            ends = {i: len(c.prompt) // 3 if alone else len(c.prompt) // 2 // size * size for i, c in batch}
            session = lab.session()
            chosen = [(i, case) for i, case in batch if ends[i]]
            session.fill([(i, parted(case, ends[i])) for i, case in chosen])
            for part in [[one] for one in chosen] if alone else [chosen]:
                for (i, _), output in zip(part, session.run_apart(part), strict=True):
                    lab.check("partly warm", i, output, ends[i])
            lab.close(session)


def chunked(lab: Lab) -> None:
    """Prefill in chunks of 1 row (short ones, that end around pages' edges), 16, 17 (of two long ones in turn
    one each) and 512; who fits one chunk runs as ever, and is left out."""
    page = lab.runner.info.page_size
    for rows in (1, 16, 17, 512):
        for i, case in enumerate(lab.cases):
            n = len(case.prompt)
            short = n in (page - 1, page, page + 1, 2 * page + 1)
            if n <= rows or (rows == 1 and not short) or (16 <= rows <= 17 and n > 512 and i % 2 != rows % 2):
                continue
            session = lab.session(max_step_tokens=rows)
            lab.check(f"chunks of {rows}", i, session.run([case])[0], 0)
            lab.close(session)


def batched(lab: Lab) -> None:
    """Sixteen at a time, long and short, prefill beside decode."""
    for batch in lab.batches():
        session = lab.session(max_step_tokens=333)
        for (i, _), output in zip(batch, session.run([case for _, case in batch]), strict=True):
            lab.check("batch of 16", i, output)
        lab.close(session)


def preempted(lab: Lab) -> None:
    """Sixteen at a time are preempted: all at every fourth step, in prefill and in decode, their pages kept;
    and all once, when each has a token or more, their pages evicted. Long ones take part in one of these."""
    for whole in lab.batches():
        for evict in (False, True):
            batch = [(i, case) for i, case in whole if len(case.prompt) <= 512 or i % 2 != evict]
            session = lab.session(max_step_tokens=1000 if evict else 100)
            ids = [session.add(case, i) for i, case in batch]
            steps = 0
            while session.step() is not None:
                steps += 1
                fed = not session.scheduler.waiting and all(session.begun(id) for id in ids)
                if (fed and session.scheduler.counters.preemptions == 0) if evict else steps % 4 == 0:
                    for id in ids:
                        session.scheduler.preempt(id)
                    if evict:
                        session.scheduler.tree.clear()
            for (i, _), id in zip(batch, ids, strict=True):
                lab.check("preempted, evicted" if evict else "preempted, kept", i, session.output(id), 0)
            least = sum(len(lab.solo[i].ids) > 4 for i, _ in batch)
            if session.scheduler.counters.preemptions < least:
                lab.failures.append(f"{session.scheduler.counters.preemptions} of {least} were preempted")
            lab.close(session)


def second_turn(lab: Lab) -> None:
    """Prompt, reply and more, alone: all that has KV is found, and the bits are those of a cold run."""
    for batch in lab.batches():
        following = [
            (i, case._replace(prompt=case.prompt + lab.solo[i].ids + case.prompt[:9])) for i, case in batch
        ]
        cold = lab.session().run_apart(following)
        session = lab.session()
        session.run_apart(batch)
        for (i, case), turn, want in zip(batch, following, cold, strict=True):
            (output,) = session.run_apart([turn])
            known = len(case.prompt) + len(lab.solo[i].ids) - 1
            lab.compare("second turn", i, want, output, known)
        lab.close(session)


def scored_cases(cases: Sequence[Case], page: int) -> list[Case]:
    """Prompts at pages' edges and one of 700 tokens, out of the longest of these cases."""
    text = sum(sorted((case.prompt for case in cases), key=len)[-2:], ())
    text *= -(-700 // len(text))
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, logprobs=5)
    lengths = (page - 1, page, page + 1, 2 * page, 2 * page + 1, 700)
    return [Case(text[n : 2 * n] if n < 100 else text[:n], params) for n in lengths]


def scored(lab: Lab) -> None:
    """The prompt's log-probabilities, at pages' edges and beyond several chunks: again, which computes all of
    it again; from the middle on, with the part before cached; and in company, in chunks and preempted."""
    cases = list(enumerate(scored_cases(lab.cases, lab.runner.info.page_size)))
    session, cold = lab.session(), list[Output]()
    for i, case in cases:
        cold += session.run_apart([(i, case)], prompt_logprobs=5)
        if cold[i].cached or len(cold[i].scores) != len(case.prompt):
            lab.failures.append(f"scored: {len(cold[i].scores)} entries for {len(case.prompt)} tokens")
        (again,) = session.run_apart([(i, case)], prompt_logprobs=5)
        lab.compare("scored, warm", i, cold[i], again, 0)
        middle = len(case.prompt) // 2
        (half,) = session.run_apart([(i, case)], prompt_logprobs=5, prompt_logprobs_from=middle)
        want = cold[i]._replace(scores=cold[i].scores[middle:])
        lab.compare("scored, half of it", i, want, half, middle - 1)
    lab.close(session)
    session = lab.session(max_step_tokens=20)
    ids = [session.add(case, i, prompt_logprobs=5) for i, case in cases[:-1]]
    while (plan := session.step()) is not None:
        if plan.step % 3 == 2:
            for id in ids:
                session.scheduler.preempt(id)
    for (i, _), id in zip(cases, ids, strict=False):
        lab.compare("scored, in company", i, cold[i], session.output(id), 0)
    lab.close(session)


def cascade(lab: Lab) -> None:
    """Forced cascade: groups of five that share whole tiles, next to sequences that share nothing."""
    long = [i for i, c in enumerate(lab.cases) if len(c.prompt) >= 2 * lab.tile + 8][:2]
    short = [i for i, c in enumerate(lab.cases) if len(c.prompt) < lab.tile][:3]
    if not long:
        raise RuntimeError("no prompt is long enough for a cascade")
    session = lab.session(cascade="force")
    session.fill([("bits", lab.cases[i]) for i in long])
    tails = [
        lab.cases[i]._replace(prompt=lab.cases[i].prompt[: 2 * lab.tile + 3 + k])
        for i in long
        for k in range(4)
    ]
    cases = [*(lab.cases[i] for i in long), *tails, *(lab.cases[i] for i in short)]
    outputs = session.run(cases)
    grouped = session.scheduler.counters.cascade_rows
    if grouped < 5 * len(long):
        lab.failures.append(f"cascade: only {grouped} rows were grouped")
    for i, output in zip(long, outputs, strict=False):
        lab.check("cascade", i, output)
    # Each alone and flat, the first of each prompt cold.
    flat = lab.session(cascade="off")
    for want, output in zip([flat.run([case])[0] for case in tails], outputs[len(long) :], strict=False):
        lab.compare("cascade", long[0], want, output, None)
    for i, output in zip(short, outputs[len(long) + len(tails) :], strict=True):
        lab.check("cascade", i, output)
    lab.close(session)


def tree(lab: Lab) -> None:
    """Prefixes within prefixes: groups of three under two tiles, all under one, in one batch with sequences
    that share less; flat, at two levels, and as a tree."""
    tile = lab.tile
    long = [i for i, c in enumerate(lab.cases) if len(c.prompt) >= 2 * tile + 8][:2]
    if not long:
        raise RuntimeError("no prompt is long enough for a tree")
    first, second = lab.cases[long[0]], lab.cases[long[-1]]
    stems = [
        first.prompt[: 2 * tile],
        first.prompt[:tile] + second.prompt[tile : 2 * tile],
        first.prompt[:tile],
    ]
    cases = [
        case._replace(prompt=stem + second.prompt[3 * k + n : 5 * k + n + 2])
        for n, stem in enumerate(stems)
        for k, case in enumerate((first, second, first))
    ]
    # Each alone and flat, the first cold, and the others as far as their prefixes are new.
    flat = lab.session(cascade="off")
    alone = [flat.run([case])[0] for case in cases]
    for mode, levels in (("off", 4), ("force", 2), ("force", 3)):
        session = lab.session(cascade=mode, cascade_levels=levels)
        session.fill([("bits", first._replace(prompt=stem)) for stem in stems])
        for want, output in zip(alone, session.run(cases), strict=True):
            lab.compare(f"tree, {mode}, {levels} levels", long[0], want, output, None)
        counters = session.scheduler.counters
        if (counters.cascade_levels > counters.cascade_steps) != (levels == 3):
            lab.failures.append(f"tree: {mode} with {levels} levels did not plan as many")
        lab.close(session)


def row_counts(lab: Lab) -> None:
    """Steps of 1, 2, 3, 5, 9, 10, 11, 17 and 33 rows, and head calls of 1, 2 and 9 rows."""
    by_length = sorted(range(len(lab.cases)), key=lambda i: len(lab.cases[i].prompt))
    seen_rows, seen_heads = set[int](), set[int]()
    for rows in STEP_ROWS:
        fitting = [i for i in by_length if len(lab.cases[i].prompt) <= max(40, 20 * rows)]
        batch = [*by_length[:2], *fitting[-1:]]
        session = lab.session(max_step_tokens=rows)
        for i, output in zip(batch, session.run([lab.cases[i] for i in batch]), strict=True):
            lab.check("row counts", i, output)
        seen_rows |= session.step_rows
        lab.close(session)
    for count in HEAD_ROWS:
        session = lab.session()
        batch = [by_length[i % min(4, len(by_length))] for i in range(count)]
        for i, output in zip(batch, session.run([lab.cases[i] for i in batch]), strict=True):
            lab.check("row counts", i, output)
        seen_heads |= session.head_rows
        lab.close(session)
    if missing := sorted(set(STEP_ROWS) - seen_rows) or sorted(set(HEAD_ROWS) - seen_heads):
        lab.failures.append(f"steps or head calls of {missing} rows never occurred")


VARIANTS: tuple[Callable[[Lab], None], ...] = (
    warm,
    partly_warm,
    chunked,
    batched,
    preempted,
    second_turn,
    scored,
    cascade,
    tree,
    row_counts,
)


def make_cases(text_ids: Sequence[int], lengths: Sequence[int], tokens: int) -> list[Case]:
    """Slices of a text, greedy and sampled in turn."""
    cases = []
    for i, n in enumerate(lengths):
        at = (i * 131) % max(1, len(text_ids) - n)
        params = SamplingParams(
            max_tokens=tokens,
            temperature=0.0 if i % 2 else 0.8,
            top_p=0.95,
            seed=1000 + i,
            ignore_eos=True,
            logprobs=5,
        )
        cases.append(Case(tuple(text_ids[at : at + n]), params))
    return cases


def lengths_up_to(count: int, most: int) -> list[int]:
    """`count` lengths from 1 to `most`, among them page and tile edges; few of them include the longest."""
    known = (1, 2, 15, 16, 17, 31, 32, 33, 255, 256, 257, 511, 512, 513, 600)
    edges = [*(n for n in known if n < most), most]
    if count < len(edges):
        return [*edges[: max(count - 2, 0)], *edges[-min(count, 2) :]]
    rng = random.Random(count)
    return (edges + [rng.randint(1, most) for _ in range(count)])[:count]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    dtypes = ["bfloat16", "float32"]
    parser.add_argument("--dtype", nargs="+", choices=dtypes, default=dtypes, help="dtypes to check")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=12, help="output tokens a prompt")
    parser.add_argument("--longest", type=int, default=770)
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    least = 2 * EngineConfig().tile + 8
    if args.prompts < 1 or args.longest < least:
        parser.error(f"there must be a prompt, and the longest must have {least} tokens or more")
    machine.calm_openmp()
    from engine.models.store import fetch
    from engine.runner import Runner
    from engine.text import TextCodec

    location = fetch(EngineConfig().model)
    text = (Path(__file__).resolve().parent.parent / "LICENSE").read_text(encoding="utf-8")
    failed = False
    for dtype in args.dtype:
        config = EngineConfig(dtype=dtype, kv_gb=1.0, threads=args.threads)
        runner = Runner.load(config)
        ids = TextCodec.load(location.path).encode_plain(text)
        start = time.monotonic()
        lab = Lab(
            runner, config.tile, make_cases(ids, lengths_up_to(args.prompts, args.longest), args.tokens)
        )
        print(f"{runner.info.dtype}, {runner.info.threads} threads: {args.prompts} cold runs", flush=True)
        for variant in VARIANTS:
            before = len(lab.failures)
            variant(lab)
            print(f"  {variant.__name__:12} {len(lab.failures) - before} differ", flush=True)
        for failure in lab.failures:
            print(f"  FAILED {failure}")
        total = sum(lab.compared.values())
        print(f"{runner.info.dtype}: {total} results compared, {len(lab.failures)} failures,", end=" ")
        print(f"{lab.cascade_rows} rows in cascades, {time.monotonic() - start:.0f} s", flush=True)
        failed = failed or bool(lab.failures)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
