"""Trains a small gated feed-forward network on the CPU or a GPU, and says which plans did the work."""

import torch
from torch import Tensor, nn

import adjoint
from adjoint.nn import SwiGLU


class FeedForward(nn.Module):
    """width -> 2·hidden -> swiglu -> hidden -> width"""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.into = nn.Linear(width, 2 * hidden, bias=False)
        self.activation = SwiGLU(order="gate_up")
        self.out = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.activation(self.into(x)))


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    teacher, student = (FeedForward(32, 96).to(device) for _ in range(2))
    optimiser = torch.optim.AdamW(student.parameters(), lr=3e-3)

    x = torch.randn(512, 32, device=device)
    with torch.no_grad():
        target = teacher(x)

    losses = []
    for step in range(201):
        loss = nn.functional.mse_loss(student(x), target)
        losses.append(loss.item())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 50 == 0:
            print(f"step {step:3d}   loss {losses[-1]:.5f}")
    assert losses[-1] < 0.2 * losses[0]

    hidden = student.into(x)
    plan = adjoint.plan(adjoint.swiglu, hidden, order="gate_up")
    assert plan.adjoint is not None
    print(f"\nforward    {plan.sku}\n           {plan.guarantee['y'].error}")
    print(f"backward   {plan.adjoint.sku}\n           {plan.adjoint.guarantee['dpacked'].error}")


if __name__ == "__main__":
    main()
