"""The kernels of the gated delta rule in Gluon, for Hopper, and their launches."""
