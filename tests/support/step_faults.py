"""Steps that fail: by who is in them, by their size, by who meets whom, or once. And who may pay for it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from quire.core.errors import ExecutionError, OutOfMemoryError
from quire.core.step import StepPlan
from support.shadow import Fault


@dataclass(frozen=True)
class StepFaults:
    """What is wrong with an executor; nothing, as it is made."""

    poison: dict[str, int] = field(default_factory=dict)  # by request, the first position that no step survives
    most_tokens: int | None = None  # memory falls short in a step of more
    rivals: tuple[str, ...] = ()  # no step survives with all of them in it
    step: int | None = None  # the number of the one step that fails whatever is in it

    @classmethod
    def draw(cls, rng: random.Random, names: Sequence[str], longest: int) -> StepFaults:
        """Draw what is wrong; what fails once comes alone, because it may strike a request that is tried alone."""
        if rng.random() < 0.2:
            return cls(step=rng.randrange(40))
        kinds = rng.sample(["poison", "memory", "rivals"], k=rng.choice([1, 2, 3]))
        share = rng.choice([0.2, 0.5, 1.0])
        poison = {name: rng.randrange(longest) for name in names if rng.random() < share}
        return cls(
            poison if "poison" in kinds else {},
            rng.choice([1, 2, 4, 12]) if "memory" in kinds else None,
            tuple(rng.sample(names, k=2)) if "rivals" in kinds and len(names) > 1 else (),
        )

    @property
    def are_there(self) -> bool:
        """Whether anything can fail."""
        return self != StepFaults()

    def may_end(self, name: str, num_beams: int) -> bool:
        """Whether a request may end because of it: beams move together, so their step cannot be made smaller."""
        return name in self.poison or (self.most_tokens is not None and num_beams > max(1, self.most_tokens))

    def most_known(self, name: str, num_prompt_tokens: int) -> int | None:
        """How many tokens a request may know at the most, its prompt included; None where nothing is wrong with it."""
        return max(self.poison[name] + 1, num_prompt_tokens) if name in self.poison else None

    def fault(self) -> Fault:
        """What to tell a `ShadowExecutor`."""
        numbers = count()

        def strike(plan: StepPlan, requests: dict[int, str]) -> ExecutionError | None:
            if next(numbers) == self.step:
                return ExecutionError("once")
            if self.most_tokens is not None and plan.num_tokens > self.most_tokens:
                return OutOfMemoryError(f"{plan.num_tokens} tokens are too many")
            for row, start, num_tokens in zip(plan.rows, plan.starts, plan.counts, strict=True):
                if start + num_tokens > self.poison.get(requests[row], 1 << 30):
                    return ExecutionError(f"{requests[row]} is poison")
            if self.rivals and set(self.rivals) <= set(requests.values()):
                return ExecutionError("they met")
            return None

        return strike
