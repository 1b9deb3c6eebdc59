"""Asks which kernel a call would run, what that promises and needs, and why the others were not taken.

Nothing is computed and no GPU is needed: tensors may be on the meta device, and a plan can be asked for another target.
"""

import torch

import adjoint
from adjoint import Preference


def main() -> None:
    time, key_heads, value_heads, size = 16384, 16, 32, 128
    meta = {"device": "meta", "dtype": torch.bfloat16}
    q, k = (torch.empty(1, time, key_heads, size, **meta) for _ in range(2))
    v = torch.empty(1, time, value_heads, size, **meta)
    g, beta = (torch.empty(1, time, value_heads, device="meta") for _ in range(2))

    plan = adjoint.plan(adjoint.gated_delta_rule, q, k, v, g, beta, normalize_qk=True, target="sm_90")
    assert plan.adjoint is not None
    for words, half in (("forward", plan), ("backward", plan.adjoint)):
        print(f"{words}: {half.sku}")
        print(f"  scratch memory: {half.workspace_bytes} bytes")
        for name, promise in half.guarantee.items():
            print(f"  {name}: {promise.error}")
    print("\nWhy this one (print(plan) says all of it):")
    for line in str(plan).splitlines():
        if line.startswith("not taken"):
            print(f"  {line}")

    print("\nThe same call where only plain PyTorch may run:")
    eager = adjoint.plan(
        adjoint.gated_delta_rule, q, k, v, g, beta, normalize_qk=True, preference=Preference(backend="eager")
    )
    print(f"  {eager.sku}")

    print("\nA request that nothing meets is an error that says why, candidate by candidate:")
    try:
        adjoint.plan(
            adjoint.gated_delta_rule, q, k, v, g, beta, target="sm_90", preference=Preference(device_invariant=True)
        )
    except adjoint.Unsupported as reason:
        print(f"  {str(reason)[:400]}")


if __name__ == "__main__":
    main()
