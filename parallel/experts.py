"""A layer's experts: how a rank computes its own, and how a tensor-parallel plan deals them out.

Each rank of "tp" holds consecutive experts, whole, and a part of the tokens, which its router, whole on every rank, has sent to experts.
All ranks are given all tokens and their choices, as at any module that is cut; each computes what is its experts', and the outputs are
summed and dealt out again.
"""

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.func import functional_call
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

NAME = "dealt"  # as transformers' `experts_implementation`


class DealExperts(ParallelStyle):
    """Of a module with parameters [experts, ...] that transformers calls by `dealt_experts`. Equal numbers to all ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            part = distribute_tensor(parameter, device_mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))
        module.num_experts = module.num_experts // device_mesh.size()
        return module


def dealt_experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Sum over each token's chosen experts of their outputs by weight. hidden [T, H]; chosen, weights [T, k] -> [T, H].

    All parameters have a gradient, be it 0: FSDP exchanges what is there, on every rank the same. Collective over the mesh of
    parameters that were dealt out.
    """
    parts = dict(module.named_parameters(recurse=False))
    cut = next((p for p in parts.values() if isinstance(p, DTensor)), None)
    if cut is not None:
        return _own_share(module, {n: p.to_local() for n, p in parts.items()}, cut.device_mesh, hidden, chosen, weights)
    if not len(hidden):  # which the kernel's backward pass does not take
        return hidden + weights.sum() + sum(p.flatten()[:0].sum() for p in parts.values())
    return ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, hidden, chosen, weights)


def _own_share(module: Any, parts: dict[str, Tensor], mesh: DeviceMesh, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """`dealt_experts` where this rank has some of the experts and, as every rank as many, some of the tokens."""
    dealt = (DTensor.from_local(t, mesh, [Shard(0)], run_check=False) for t in (hidden, chosen, weights))
    hidden, chosen, weights = (t.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()]) for t in dealt)
    own = chosen - mesh.get_local_rank() * module.num_experts
    tokens, places = ((own >= 0) & (own < module.num_experts)).nonzero(as_tuple=True)
    routed = (hidden[tokens], own[tokens, places, None], weights[tokens, places, None])
    found = functional_call(module, parts, routed)  # once more through `dealt_experts`, with plain tensors
    count, k = chosen.shape
    # Scattered to places of their own and summed, not added into rows they share, whose order a GPU would leave to chance.
    out = hidden.new_zeros(count * k, hidden.shape[1]).index_copy(0, tokens * k + places, found).view(count, k, -1).sum(1)
    return DTensor.from_local(out, mesh, [Partial()], run_check=False).redistribute(placements=[Shard(0)]).to_local()


ALL_EXPERTS_FUNCTIONS.register(NAME, dealt_experts)
