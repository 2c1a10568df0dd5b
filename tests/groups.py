"""Episodes of groups whose prompts are equal, as a rollout has them."""

import numpy as np

from batch import Episode


def grouped(groups: list[tuple[int, list[int]]], seed: int = 0, shuffled: bool = False) -> list[Episode]:
    """Of each group the tokens of its prompt and of its responses; prompts are random, so those of one token may be equal by chance."""
    draw = np.random.RandomState(seed)
    episodes = []
    for index, (prompt, responses) in enumerate(groups):
        asked = draw.randint(3, 17, prompt)
        for sample, response in enumerate(responses):
            guess = draw.uniform(-4.5, -1.0, (2, response)).astype(np.float32)
            episodes.append(
                Episode(
                    token_ids=np.concatenate([asked, draw.randint(3, 17, response)]),
                    num_prompt_tokens=prompt,
                    loss_mask=(draw.rand(response) < 0.8).astype(np.float32),
                    advantages=draw.randn(response).astype(np.float32),
                    gen_logprobs=guess[0],
                    ref_logprobs=guess[1],
                    group=index,
                    sample=sample,
                )
            )
    if shuffled:
        draw.shuffle(episodes)  # type: ignore[arg-type]
    return episodes


def some_groups(seed: int, count: int = 5, longest: int = 14) -> list[tuple[int, list[int]]]:
    """Groups of 1 to 8, prompts and responses of 1 token among them."""
    draw = np.random.RandomState(seed)

    def sizes(n: int) -> list[int]:
        return np.minimum(draw.randint(1, longest + 1, n), draw.randint(1, longest + 1, n)).tolist()

    return [(int(prompt), sizes(draw.randint(1, 9))) for prompt in sizes(count)]
