"""The causal depthwise convolution of hybrid models: `causal_conv1d` and `causal_conv1d_step`, with their gradients."""

from adjoint.ops.conv.causal_conv1d import causal_conv1d
from adjoint.ops.conv.causal_conv1d_step import causal_conv1d_step

__all__ = ["causal_conv1d", "causal_conv1d_step"]
