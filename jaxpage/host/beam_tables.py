"""What a choice of beams does to their tables: forked for a second child, freed without a child.

W = 3, beams 0 1 2; chosen (parent, token): (1, x) (1, y) (0, z)
sequence 1   goes on with x, its own table
sequence 2   was not chosen: its table is freed, and it becomes a fork of 1, with y
sequence 0   goes on with z
best first   1 2 0
"""

from __future__ import annotations

from jaxpage.host.sequence import Sequence, SequenceGroup, Status
from jaxpage.host.state import State


def continue_beams(state: State, group: SequenceGroup) -> None:
    """Chooses from the candidates of all live beams and gives the chosen their tables.

    A parent's first child keeps its table without a copy. A parent that has none, as its group was
    preempted, leaves its children only its tokens.
    """
    assert group.beams is not None, group
    parents, candidates = group.live, []
    for beam in parents:
        assert beam.candidates is not None and beam.status is not Status.SWAPPED, beam
        candidates.append(beam.candidates)
        beam.candidates = None
    outputs = [beam.token_ids[beam.prompt_len :] for beam in parents]
    chosen = group.beams.advance(candidates, outputs)
    if group.beams.is_done:
        return
    untaken = {entry.parent for entry in chosen}  # parents whose table no child has yet
    dropped = [beam for place, beam in enumerate(parents) if place not in untaken]
    for beam in dropped:
        if beam.status is Status.RUNNING:
            state.free(beam)
            beam.status = Status.WAITING
    spare = [*dropped, *(s for s in group.sequences if s not in parents)]
    known = [beam.token_ids for beam in parents]
    group.live = []
    for entry in chosen:
        beam = parents[entry.parent]
        if entry.parent in untaken:
            untaken.remove(entry.parent)
        else:
            beam = _fork(state, beam, spare.pop(0))
        beam.token_ids = [*known[entry.parent], entry.token_id]
        group.live.append(beam)


def _fork(state: State, parent: Sequence, child: Sequence) -> Sequence:
    if parent.status is Status.RUNNING:
        state.blocks.fork(parent.seq_id, child.seq_id)
    child.status = parent.status
    child.num_computed = parent.num_computed
    child.prefill_len = parent.prefill_len
    child.last_step = parent.last_step
    child.prefix_parent = None
    return child
