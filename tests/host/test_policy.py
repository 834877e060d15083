"""Who comes first, and who gives way."""

from __future__ import annotations

from jaxpage.host import policy
from jaxpage.host.sequence import new_sequence
from tests.host.fake import request


def test_first_come_first_served_and_the_last_gives_way() -> None:
    sequences = [new_sequence(request(str(i), [1]), seq_id=i, max_len=9) for i in (3, 1, 2)]
    assert [s.seq_id for s in sorted(sequences, key=policy.rank)] == [1, 2, 3]
    assert policy.choose_victim(sequences).seq_id == 3


def test_everybody_who_runs_has_a_block_to_grow_into() -> None:
    assert [policy.reserved_blocks(num_running) for num_running in (0, 1, 5)] == [0, 2, 6]
