"""How weights travel: from the ranks that hold a pipeline stage to those that read the policy and do not hold it."""

from dataclasses import dataclass

import torch.distributed as dist

# As many as buckets are on their way at a time (parallel/weights.py): a third sender would only wait for its turn.
MAX_SENDERS = 2


@dataclass(frozen=True)
class Route:
    """Of one pipeline stage. Every rank of the world knows every route and is a member of some of its groups, or of none."""

    ranks: list[int]  # of the stage: they gather its weights together, and the first names them
    senders: list[int]  # those of them that take turns; none where nobody receives
    receivers: list[int]
    groups: list[dist.ProcessGroup]  # for each sender: it and the receivers

    def turn(self, number: int) -> tuple[int, dist.ProcessGroup] | None:
        """Who sends the stage's bucket `number`, and in which group; None where nobody receives."""
        i = number % max(len(self.senders), 1)
        return (self.senders[i], self.groups[i]) if self.senders else None


def make_routes(stages: list[list[int]], readers: list[int], *, max_senders: int = MAX_SENDERS) -> list[Route]:
    """One for each stage, to those of `readers` that are not in it. Collective over the world, which makes the groups.

    Senders are spread over a stage's ranks, so that those of a trainer on several nodes have network cards of their own.
    """
    routes = []
    for ranks in stages:
        receivers = [rank for rank in readers if rank not in ranks]
        senders = ranks[:: -(-len(ranks) // max_senders)] if receivers else []
        routes.append(Route(ranks, senders, receivers, [dist.new_group([sender, *receivers]) for sender in senders]))
    return routes
