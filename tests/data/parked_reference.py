"""train_grpo.py as it runs where a GPU cannot hold the reference beside the rest: it waits in host memory."""

import startup
import train_grpo
from parallel.launch import launch

if __name__ == "__main__":
    startup.parks_reference = lambda _cfg, _place: True
    launch(train_grpo.main)
