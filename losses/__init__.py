"""Objectives, one file per family. They are meant to be edited: each reads like its paper and knows no ranks."""

from losses.contract import PolicyLoss
from losses.grpo import GRPOLoss, SimpleGRPOLoss
from losses.reinforce import ReinforceLoss
from losses.sft import NLLLoss

__all__ = ["GRPOLoss", "NLLLoss", "PolicyLoss", "ReinforceLoss", "SimpleGRPOLoss"]
