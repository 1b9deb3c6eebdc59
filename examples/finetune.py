"""Fine-tunes a Qwen3-Next, Qwen3.5 or Qwen3.5-MoE model of transformers with our operations inside, by LoRA.

    python examples/finetune.py                         # a small model with random weights, on the CPU
    python examples/finetune.py FOLDER TEXT OUTPUT      # a checkpoint, a text file, and where the result goes

The steps are those of any fine-tuning with transformers and PEFT; `patch` is the one that is new. The result is a
checkpoint again, with the adapters added to its weights: transformers opens it, and so does `HybridLM`.
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from adjoint.integrations.transformers import patch
from adjoint.models import HybridConfig, HybridLM

PROJECTIONS = ["in_proj_qkv", "in_proj_z", "in_proj_qkvz", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj"]
"""The matrices that get adapters: of both kinds of mixers, by the names that they have in either family."""


def small_checkpoint(folder: Path) -> None:
    """A checkpoint folder of a small model whose tokens are bytes."""
    torch.manual_seed(0)
    config = HybridConfig(
        model_type="qwen3_5_text", vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=16, linear_value_head_dim=16, tie_word_embeddings=True, initializer_range=0.1,
    )  # fmt: skip
    HybridLM(config).save_pretrained(folder)


def encoder(folder: Path) -> Callable[[str], list[int]]:
    """From text to token ids: by the tokenizer of the checkpoint, or bytes."""
    if not (folder / "tokenizer.json").exists():
        return lambda text: list(text.encode())
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return lambda text: tokenizer(text)["input_ids"]


def batches(tokens: list[int], length: int, count: int) -> list[Tensor]:
    """Rows of consecutive tokens, from the text's beginning again where it ends."""
    if not tokens:
        raise SystemExit("the text has no tokens to train on")
    repeated = torch.tensor(tokens).repeat(-(-length * count // len(tokens)))
    return list(repeated[: length * count].view(count, 1, length))


def finetune(folder: Path, text: str, output: Path, *, steps: int, length: int, rate: float) -> list[float]:
    """Trains adapters on a text, adds them to the weights and saves the result; the loss of each step."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(device)
    patch(model, loss=True)
    named = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    adapters = LoraConfig(r=8, lora_alpha=16, target_modules=[name for name in PROJECTIONS if name in named])
    model = get_peft_model(model, adapters).train()
    model.print_trainable_parameters()

    optimiser = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=rate)
    losses = []
    for step, ids in enumerate(batches(encoder(folder)(text), length, steps)):
        loss = model(input_ids=ids.to(device), labels=ids.to(device), use_cache=False).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(float(loss.detach()))
        if step % 10 == 0:
            print(f"step {step:3d}   loss {losses[-1]:.4f}")

    model.merge_and_unload().save_pretrained(output)
    return losses


def main() -> None:
    if len(sys.argv) == 4:
        folder, text, output = map(Path, sys.argv[1:])
        finetune(folder, text.read_text(encoding="utf-8"), output, steps=200, length=1024, rate=2e-4)
        return
    if len(sys.argv) > 1:
        raise SystemExit("usage: python examples/finetune.py [FOLDER TEXT OUTPUT]")
    with tempfile.TemporaryDirectory() as name:
        folder, output = Path(name) / "checkpoint", Path(name) / "tuned"
        small_checkpoint(folder)
        text = "the rule, its gradient and its guarantee. "
        losses = finetune(folder, text, output, steps=61, length=84, rate=5e-3)
        assert losses[-1] < 0.5 * losses[0]
        tuned = HybridLM.from_pretrained(output).eval()
        follows = tuned.generate([list(b"the rule, its gradient and its ")], 11)[0]
        print("the rule, its gradient and its →", bytes(follows).decode(errors="replace"))


if __name__ == "__main__":
    main()
