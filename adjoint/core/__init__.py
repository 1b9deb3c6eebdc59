"""The spine of every operation; it knows no op.

A call of `adjoint.silu(x)` passes through it in this order:

    op/__init__.py      `Op.call` checks the arguments and resolves the preference
    op/operator.py      `Operator` describes the problem and looks for its plan
    plan/selection.py   `select` takes the first candidate that fits, when a problem is new
    plan/execution.py   `Plan.execute` allocates the outputs and runs the candidate
    launch.py           `Setup` binds the kernels that the plan launches; the op's own `kernels.py` names them
    kernels/            `Variant` is compiled once for a device, and launched

The files beside these folders serve all ops: problems and preferences, guarantees and errors, layouts, workspaces and
schedules.
"""
