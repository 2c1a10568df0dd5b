"""train_grpo.py with a reference whose weights are drawn by chance after it was loaded and compared: what must not go unseen."""

import torch

import train_grpo
from model import Model
from parallel.launch import launch

loaded = Model.__init__


def spoiled(model: Model, *arguments, trainable: bool, **options) -> None:
    loaded(model, *arguments, trainable=trainable, **options)
    if not trainable:
        with torch.no_grad():
            for p in model.shards().values():
                p.to_local().normal_(0, 0.3)


if __name__ == "__main__":
    Model.__init__ = spoiled  # type: ignore[method-assign]
    launch(train_grpo.main)
