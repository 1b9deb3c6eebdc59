"""A step of a run: the loss, the float32 weights, the optimizers, and the processes that share them."""
