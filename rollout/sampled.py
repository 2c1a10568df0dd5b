"""Log-probs of sampled tokens as numbers, where vLLM would make a dict and an object of every token's."""

import inspect
from typing import Any


def keep_numbers(module: Any) -> bool:
    """Let vLLM's `module` for log-probs keep a list of numbers for a request that asks for no more than the sampled token's.

    False, and nothing is changed, where the module is not as it is in vLLM 0.25 and 0.32.
    """
    processor, lists = module.LogprobsProcessor, module.LogprobsLists
    own = vars(processor).get("_update_sample_logprobs")
    if own is None or [*inspect.signature(own).parameters] != ["self", "logprobs_lists"] or lists._fields[1] != "logprobs":
        return False
    if own.__module__ == __name__:
        return True  # for an earlier engine of this process

    def update(self: Any, logprobs_lists: Any) -> None:
        if self.num_logprobs == 0 and isinstance(self.logprobs, list):
            self.logprobs.extend(logprobs_lists.logprobs[:, 0].tolist())  # of the new tokens; the sampled one is the first of each
        else:
            own(self, logprobs_lists)

    processor._update_sample_logprobs = update
    return True


def numbers(logprobs: list[Any], token_ids: list[int]) -> list[float]:
    """Of each token, from a completion's log-probs in either form."""
    return [entry if isinstance(entry, float) else entry[token].logprob for entry, token in zip(logprobs, token_ids, strict=True)]
