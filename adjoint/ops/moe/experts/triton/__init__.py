"""Triton kernels of the expert layer: grouped matrix products that gather their rows themselves.

Rows are the pairs of a token and one of its slots, N = T·k of them, grouped by expert: expert e has the rows from
offsets[e] to offsets[e + 1], in the order of their tokens. A product over rows is cut into tiles of ROWS rows of one
expert. The tiles of expert e have the numbers from offsets[e] // ROWS + e on: at most ⌊N / ROWS⌋ + E numbers in all,
whatever the counts are, so that grids need no waiting for the device. A number without rows ends at once.

    tiles            the token of each row, and the rows of each tile
    products         [g; u] = gate_up[e] · x[token],  h = silu(g) ⊙ u                  reads x by token
                     dgate_up[e] = dguᵀ · x[token], ddown[e] = dy[token]ᵀ · (w ⊙ h)    reads x, dy by token
    token_sums       y[t] = Σ_j weights[t, j] · down[e] · h, or dx[t] = Σ_j gate_up[e]ᵀ · dgu, in the order of slots
    hidden_gradients dh = dy[token] · down[e], then through the gate                   reads dy by token
    layer            both directions of the layer

One element has one writer. What a sum over DEPTH-sized steps adds, and in which order, is fixed by the sizes of the
layer (and, in `moe_experts_outer`, by the expert's own rows), never by where a row stands in its tile. Rows past the
end of an expert repeat its last one, and are not stored; in `moe_experts_outer`, where they would be added, they are
zero on both sides.
"""
