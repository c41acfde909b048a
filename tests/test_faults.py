"""docs/faults.md is complete: every known fault once, with exactly the tests whose docstrings name it."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "faults.md"
KNOWN = [f"O{number:03}" for number in range(1, 118)]
KINDS = {"1-CACHE", "2-SCHED", "3-HTTP", "4-OPS", "5-ROUTER", "6-LOAD"}
REASONS = ("Later (", "Cannot apply: ")


class Row(NamedTuple):
    id: str
    kind: str
    fault: str
    cell: str

    @property
    def tests(self) -> set[str]:
        return set(re.findall(r"`(tests/[^`]+::[^`]+)`", self.cell))


def rows() -> list[Row]:
    lines = [line for line in PAGE.read_text().splitlines() if re.match(r"\|\s*O\d+", line)]
    return [Row(*(cell.strip() for cell in line.strip("|").split("|"))) for line in lines]


def named() -> dict[str, set[str]]:
    """Which tests name which row in their docstring: id -> {path::name}."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name, docstring in functions(ast.parse(path.read_text()).body):
            for row in re.findall(r"\bO\d{3}\b", docstring):
                found.setdefault(row, set()).add(f"{path.relative_to(ROOT).as_posix()}::{name}")
    return found


def functions(body: list[ast.stmt], prefix: str = "") -> list[tuple[str, str]]:
    """Test functions and methods, as pytest names them, with their docstrings."""
    found: list[tuple[str, str]] = []
    for node in body:
        if isinstance(node, ast.ClassDef):
            found += functions(node.body, f"{prefix}{node.name}::")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            found.append((prefix + node.name, ast.get_docstring(node) or ""))
    return found


def test_every_known_fault_has_one_row_in_order() -> None:
    assert [row.id for row in rows()] == KNOWN


def test_every_row_has_a_kind_and_says_what_the_fault_is() -> None:
    odd = [row.id for row in rows() if row.kind.removesuffix(" sec") not in KINDS or len(row.fault) < 20]
    assert odd == []


def test_every_row_names_tests_or_gives_a_reason() -> None:
    bare = [f"{row.id} ({row.fault}): {row.cell!r}" for row in rows() if not settled(row)]
    assert not bare, "neither a test nor a reason:\n" + "\n".join(bare)


def settled(row: Row) -> bool:
    return bool(row.tests) or row.cell.startswith(REASONS)


def test_the_tests_of_a_row_are_those_whose_docstrings_name_it() -> None:
    named_by_tests = named()
    wrong = []
    for row in rows():
        there = named_by_tests.get(row.id, set())
        wrong += [f"{row.id}: add `{test}`" for test in sorted(there - row.tests)]
        wrong += [f"{row.id}: no such test, or not in its docstring: {t}" for t in sorted(row.tests - there)]
    assert not wrong, "docs/faults.md does not fit the tests:\n" + "\n".join(wrong)


def test_no_docstring_names_a_row_that_does_not_exist() -> None:
    strangers = {row: sorted(tests) for row, tests in named().items() if row not in KNOWN}
    assert strangers == {}
