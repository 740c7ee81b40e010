"""Groups: sequences that share a prompt.

**Opening.** The leader of a group computes the prompt once. The logits of its last token give one token for each
sequence. Then the others are forked from the leader: they share all its blocks, including the partial tail, and the
first to write into that tail copies it. From then on, samples are independent.

**Beams** stay together: a step computes the last token of every beam, and its result says for each row which beam it
continues (its parent) and with which token. A beam that continues itself just grows; any other is replaced by a fork of
its parent. The blocks of beams without continuation are freed. If one beam fails, the search fails; if beams are
preempted, the search **closes** and starts again from the prompt. Beams that resume one by one would each need their
own copy of the shared blocks; a search that starts again shares them as before, needs no more memory than before, and
finds the same beams.
"""

from __future__ import annotations

from quire.core.errors import InvariantError
from quire.core.request import Request, RequestGroup, RequestStatus
from quire.memory.manager import KVCacheManager
from quire.scheduler.plan_builder import Chunk
from quire.scheduler.running import RunningSet


def is_beam(request: Request) -> bool:
    """Return whether the request is one of several beams that move together."""
    group = request.group
    return group is not None and group.beam_search and group.opened


def moving_together(request: Request) -> list[Request]:
    """Return all beams of the request's search, which can only continue together; otherwise only the request."""
    group = request.group
    if group is None or not is_beam(request):
        return [request]
    return [member for member in group.members if not member.is_finished]


def open_group(leader: Request, memory: KVCacheManager, running: RunningSet) -> list[Request]:
    """Fork the leader, whose prompt is computed, into the sequences of its group.

    Mutates all of them; returns the new ones. The caller appends their tokens.
    """
    group, opened = _group_of(leader), []
    for branch in range(1, group.num_sequences):
        sibling = leader.open_branch(branch)
        group.members.append(sibling)
        memory.fork(leader, sibling)
        running.start_opened(sibling)
        opened.append(sibling)
    group.opened = True
    return opened


def close_group(beams: list[Request], memory: KVCacheManager) -> Request:
    """Reset a search, whose beams no longer hold rows, to its prompt. Mutates; returns the leader."""
    leader, group = beams[0], _group_of(beams[0])
    for beam in beams[1:]:
        memory.free(beam)
        beam.become(RequestStatus.FINISHED)
    del leader.tokens[leader.num_prompt_tokens :]
    leader.logprobs.clear()
    group.members = [leader]
    group.opened = False
    return leader


def choose_beams(
    chunks: list[Chunk], parents: dict[int, int], memory: KVCacheManager, running: RunningSet
) -> dict[int, Request]:
    """Carry out one step of one search: `parents` maps a beam's row to the row that it continues.

    All beams have computed their last token. Mutates; returns the beam of each row, new ones included. The caller
    appends their tokens.
    """
    beams = {chunk.row: chunk.request for chunk in chunks}
    for beam in beams.values():
        memory.commit(beam, beam.num_computed)
    forks: dict[int, Request] = {}
    for row, parent in parents.items():
        if parent not in beams:
            raise InvariantError(f"the beam of row {row} continues row {parent}, which belongs to another search")
        if parent != row:
            forks[row] = beams[parent].open_branch(beams[row].branch)
            memory.fork(beams[parent], forks[row])
    for row, fork in forks.items():
        replaced = beams[row]
        group = _group_of(replaced)
        group.members[group.members.index(replaced)] = fork
        memory.free(replaced)
        running.replace(replaced, fork)
        replaced.become(RequestStatus.FINISHED)
        beams[row] = fork
    return beams


def _group_of(request: Request) -> RequestGroup:
    if request.group is None:
        raise InvariantError(f"request {request.request_id!r} is not in a group")
    return request.group
