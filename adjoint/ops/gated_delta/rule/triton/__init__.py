"""The kernels of the gated delta rule in Triton, for every NVIDIA GPU, and their launches."""
