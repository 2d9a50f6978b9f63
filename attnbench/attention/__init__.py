"""Floor 1: how attention scores become weights, who may look at whom, and the modules that models call."""

from attnbench.attention.catalog import Mechanism, Pattern, build_pattern, build_transform, mechanisms
from attnbench.core.describe import Parameter

__all__ = ["Mechanism", "Parameter", "Pattern", "build_pattern", "build_transform", "mechanisms"]
