"""What a forward pass has computed at the same places of the trainer's modules and of vLLM's, by the same names.

transformers and vLLM name a block's modules alike, but vLLM keeps q, k and v (gate and up) in one product, and adds to the residual
stream inside its norms: those take and return (hidden, residual), and may overwrite both.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

BEFORE_MLP = ("pre_feedforward_layernorm", "post_attention_layernorm")  # the norm whose input is the stream after attention
PARTS = {  # place in a block -> its module in transformers, in order, or the one in vLLM
    "self_attn.qkv": (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "self_attn.qkv_proj"),
    "mlp.gate_up": (("mlp.gate_proj", "mlp.up_proj"), "mlp.gate_up_proj"),
}
INPUTS = {"self_attn.heads": "self_attn.o_proj", "mlp.activated": "mlp.down_proj"}  # place -> the module that it is the input of
STREAM = ("embedding", "after_attention", "after_mlp", "final_norm")  # ends of the names of the residual stream's places


@contextmanager
def traced(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """A dictionary that, after the block, holds [n, width] on the CPU of the n tokens that `model` has seen in it, by the place's name.

    In the order of computation. model: a causal LM of transformers or vLLM, run without graphs or compilation. ValueError where its
    blocks are not built as Llama's.
    """
    trace = _Trace(model)
    found: dict[str, Tensor] = {}
    try:
        yield found
    finally:
        for hook in trace.hooks:
            hook.remove()
    found |= trace.whole()


class _Trace:
    def __init__(self, model: nn.Module):
        self.hooks: list[Any] = []
        self._seen: dict[str, dict[int, list[Tensor]]] = defaultdict(lambda: defaultdict(list))  # place -> part -> as it came
        modules = dict(model.named_modules())
        blocks = [name for name in modules if name.removeprefix("model.layers.").isdigit()]
        if not blocks or "model.norm" not in modules or f"{blocks[0]}.input_layernorm" not in modules:
            raise ValueError(f"{type(model).__name__} has no model.layers with an input_layernorm each: the doctor knows only such blocks")
        places = [name.removeprefix("model.") for name in blocks]
        streams = ["embedding", *(f"{place}.after_mlp" for place in places)]  # what the norm at the start of the next block sees
        for block, place, stream in zip(blocks, places, streams, strict=False):
            inner = {name.removeprefix(f"{block}."): m for name, m in modules.items() if name.startswith(f"{block}.")}
            self._norm(inner["input_layernorm"], stream, f"{place}.self_attn.input")
            self._block(place, inner)
        self._norm(modules["model.norm"], streams[-1], "final_norm")

    def _block(self, place: str, inner: dict[str, nn.Module]) -> None:
        for name, (apart, fused) in PARTS.items():
            for part, module in enumerate([fused] if fused in inner else apart):
                if module in inner:  # a mixture of experts has no such MLP
                    self._output(inner[module], f"{place}.{name}", part)
        for name, module in INPUTS.items():
            if module in inner:
                self._input(inner[module], f"{place}.{name}")
        before_mlp = next(name for name in BEFORE_MLP if name in inner)
        self._norm(inner[before_mlp], f"{place}.after_attention", f"{place}.mlp.input")

    def _norm(self, module: nn.Module, stream: str, normed: str) -> None:
        def look(args: tuple, output: Any) -> None:
            self._keep(stream, output[1] if isinstance(output, tuple) else args[0].to(output.dtype))
            self._keep(normed, _first(output))

        self.hooks.append(module.register_forward_hook(lambda _, args, output: look(args, output)))

    def _input(self, module: nn.Module, place: str) -> None:
        self.hooks.append(module.register_forward_pre_hook(lambda _, args: self._keep(place, args[0])))

    def _output(self, module: nn.Module, place: str, part: int) -> None:
        self.hooks.append(module.register_forward_hook(lambda _, args, output: self._keep(place, _first(output), part)))

    def _keep(self, place: str, value: Tensor, part: int = 0) -> None:
        self._seen[place][part].append(value.detach().flatten(0, -2).to("cpu", copy=True))

    def whole(self) -> dict[str, Tensor]:
        return {place: torch.cat([torch.cat(parts[i]) for i in sorted(parts)], -1) for place, parts in self._seen.items()}


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output
