"""The kernels of `take_along_axis`, each with its launch code: copies along lines, and sums of their gradients."""
