"""Serves several requests from one cache: they join a running batch when a slot is free, and leave it when they end.

A slot of the cache holds the states of one request. A request that joins is prefilled into a free slot while the others
wait; then every step gives one more token to all that run. `Decoder` computes all slots at fixed addresses, so that on
a GPU one CUDA graph serves the batch however it changes. This is the inside of a server, not a server: there is no
network, no fairness and no limit here.
"""

from collections import deque
from dataclasses import dataclass, field

import torch

from adjoint.models import HybridConfig, HybridLM


@dataclass
class Request:
    """A prompt, how many tokens are wanted, and the tokens so far."""

    name: str
    prompt: list[int]
    count: int
    tokens: list[int] = field(default_factory=list)


class Batch:
    """Requests in the slots of a cache, and those that wait for one."""

    def __init__(self, model: HybridLM, slots: int, capacity: int) -> None:
        self.model = model
        self.cache = model.new_cache(slots, capacity)
        self.decoder = model.decoder(self.cache)
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}

    def submit(self, request: Request) -> None:
        self.waiting.append(request)

    @torch.no_grad()
    def step(self) -> list[Request]:
        """Lets requests join, and gives each that runs a token; those that are done."""
        for slot in range(len(self.cache)):
            if slot not in self.running and self.waiting:
                self._join(self.waiting.popleft(), slot)
        done = self._leave()
        if self.running:
            slots = list(self.running)
            logits = self.decoder([self.running[slot].tokens[-1] for slot in slots], slots)
            for slot, token in zip(slots, logits.argmax(-1).tolist(), strict=True):
                self.running[slot].tokens.append(token)
        return done + self._leave()

    def _join(self, request: Request, slot: int) -> None:
        """The prefill of a request; it gives the first of its tokens."""
        self.cache.clear([slot])
        ids = torch.tensor([request.prompt], device=self.model.device)
        logits = self.model(ids, cache=self.cache, slots=[slot], last_only=True).logits
        request.tokens.append(int(logits[0, 0].argmax()))
        self.running[slot] = request
        print(f"  {request.name} joins in slot {slot}")

    def _leave(self) -> list[Request]:
        done = {slot: request for slot, request in self.running.items() if len(request.tokens) >= request.count}
        for slot, request in done.items():
            del self.running[slot]
            print(f"  {request.name} leaves slot {slot} with {len(request.tokens)} tokens")
        return list(done.values())


def small_model() -> HybridLM:
    torch.manual_seed(0)
    config = HybridConfig(
        model_type="qwen3_5_moe_text", vocab_size=100, hidden_size=32, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, initializer_range=0.2,
    )  # fmt: skip
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return HybridLM(config, device=device).eval()


def main() -> None:
    model = small_model()
    batch = Batch(model, slots=2, capacity=32)
    arrivals = {
        0: [Request("a", [1, 2, 3, 4], 6), Request("b", [5], 3)],
        2: [Request("c", [6, 7, 8], 4)],
        4: [Request("d", [9] * 7, 1)],
    }
    requests: list[Request] = []
    for step in range(12):
        for request in arrivals.get(step, ()):
            batch.submit(request)
            requests.append(request)
        print(f"step {step}: {len(batch.running)} run, {len(batch.waiting)} wait")
        batch.step()
    for request in requests:
        alone = model.generate([request.prompt], request.count)[0]
        assert request.tokens == alone, "a request's tokens do not depend on what shares its batch"
        print(f"{request.name}: {request.tokens}")


if __name__ == "__main__":
    main()
