"""Objectives, one file per family. They are meant to be edited: each reads like its paper and knows no ranks."""

from losses.cispo import CISPOLoss
from losses.contract import PolicyLoss
from losses.dapo import DAPOLoss
from losses.dppo import DPPOLoss
from losses.grpo import DrGRPOLoss, GRPOLoss, SimpleGRPOLoss
from losses.gspo import GSPOLoss, GSPOTokenLoss
from losses.reinforce import ReinforceLoss
from losses.reinforce_plus_plus import ReinforcePlusPlusBaselineLoss, ReinforcePlusPlusLoss
from losses.rloo import RLOOLoss
from losses.sapo import SAPOLoss
from losses.sft import NLLLoss

__all__ = [
    "CISPOLoss",
    "DAPOLoss",
    "DPPOLoss",
    "DrGRPOLoss",
    "GRPOLoss",
    "GSPOLoss",
    "GSPOTokenLoss",
    "NLLLoss",
    "PolicyLoss",
    "RLOOLoss",
    "ReinforceLoss",
    "ReinforcePlusPlusBaselineLoss",
    "ReinforcePlusPlusLoss",
    "SAPOLoss",
    "SimpleGRPOLoss",
]
