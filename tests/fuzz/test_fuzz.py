"""Every reader reads or refuses damaged files: a few seeds each, of benchmarks.checks.fuzz."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from jaxpage.errors import CheckpointError
from tests.fuzz import harness
from tests.fuzz.harness import FINE, Attack, Outcome, all_targets, run_all
from tests.fuzz.mutate import mutate
from tests.fuzz.target import Target

SEEDS = range(20)
SLOW = ("formats.converted", "convert.own_config")
"""A read of Orbax takes a tenth of a second."""


@pytest.mark.parametrize("name", sorted(all_targets()))
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax's futures
def test_damaged_files_are_read_or_refused_in_one_line(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    attack = Attack(all_targets()[name], tmp_path)
    outcomes = [attack.run(seed) for seed in (SEEDS[:5] if name in SLOW else SEEDS)]
    assert [outcome for outcome in outcomes if outcome.kind not in FINE] == []


def write_number(directory: Path) -> Path:
    (directory / "number").write_bytes(b"12345678" * 20)
    return directory / "number"


def refuse(_: Path) -> None:
    raise CheckpointError("got a file, wanted another; download it")


def refuse_at_length(_: Path) -> None:
    raise CheckpointError("got\na traceback")


def outcome_of(read: object, tmp_path: Path) -> Outcome:
    whole = True

    def once(path: Path) -> object:
        nonlocal whole
        if whole:  # the files that were written are read without fault
            whole = False
            return None
        return read(path)  # type: ignore[operator]  # a function of any kind

    return Attack(Target("x", write_number, once, ("number",)), tmp_path).run(3)


@pytest.mark.parametrize(
    ("read", "kind"),
    [
        (Path.read_bytes, "read"),
        (refuse, "refused"),
        (refuse_at_length, "traceback"),
        (lambda _: [][0], "traceback"),
        (lambda _: exit(), "traceback"),
    ],
)
def test_outcomes_are_told_apart(read: object, kind: str, tmp_path: Path) -> None:
    outcome = outcome_of(read, tmp_path)
    assert (outcome.kind, outcome.target, outcome.seed) == (kind, "x", 3)


def test_a_slow_read_is_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "MOST_SECONDS", -1.0)
    assert outcome_of(Path.read_bytes, tmp_path).kind == "hang"


def test_a_seed_damages_alike_and_the_file_is_mended(tmp_path: Path) -> None:
    seen: list[bytes] = []
    target = Target("x", write_number, lambda path: seen.append(path.read_bytes()), ("number",))
    attack = Attack(target, tmp_path)
    for seed in (1, 2, 1):
        attack.run(seed)
    whole, first, second, again = seen
    assert first == again != second
    assert first != whole
    assert (tmp_path / "number").read_bytes() == whole


@pytest.mark.parametrize(
    "kind", [b'{"a": [1, {"b": null}], "c": "d"}', bytes(range(256)), b"", b"{"]
)
def test_damage_of_every_kind_can_be_made(kind: bytes) -> None:
    made = {mutate(kind, random.Random(seed)) for seed in range(300)}
    assert len(made) > 50


@pytest.mark.slow
def test_a_process_that_dies_is_replaced() -> None:
    """Whole processes cost seconds; one run shows the death, the memory and the next input."""
    jobs = [("die", 1), ("grow", 1), ("fine", 1)]
    outcomes = list(run_all(jobs, num_workers=1, rooms=("tests.fuzz.targets_faulty",)))
    assert [outcome.kind for outcome in outcomes] == ["crash", "memory", "read"]
