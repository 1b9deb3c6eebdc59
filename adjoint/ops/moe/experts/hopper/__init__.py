"""Kernels of the expert layer for Hopper, in Gluon: persistent, a warpgroup that copies beside two that multiply."""
