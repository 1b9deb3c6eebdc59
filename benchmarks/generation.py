"""Times generation: a prefill, and decoding from the cache, of `HybridLM` in a CUDA graph and of transformers with FLA.

    PYTHONPATH=.:peers python benchmarks/generation.py --batch 64 --prompt 8192 --new 256

Both have the same random parameters, of Qwen3.5-MoE's shape with `--layers` layers, and take the most likely token. A
warm-up comes first; how many kernels of ours are compiled after it, and how often a step was captured, is printed.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from adjoint.core.kernels import compilations
from adjoint.models import HybridConfig, HybridLM

SHAPE: dict[str, Any] = {
    "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "vocab_size": 32768,
}  # fmt: skip
TINY: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "num_experts": 4,
    "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "vocab_size": 64,
}  # fmt: skip


def seconds(call: Callable[[], Any], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def show(name: str, batch: int, prompt: int, count: int, prefill: float, whole: float) -> None:
    decode = whole - prefill
    print(
        f"  {name:20s} prefill {prefill * 1e3:8.1f} ms, {batch * prompt / prefill:10.0f} tokens/s;  decoding "
        f"{decode / (count - 1) * 1e3:7.3f} ms a step, {batch * (count - 1) / decode:9.0f} tokens/s",
        flush=True,
    )


def time_ours(model: HybridLM, prompts: list[list[int]], count: int, device: str) -> None:
    batch, prompt = len(prompts), len(prompts[0])
    cache = model.new_cache(batch, prompt + count + 1)
    empty = cache.snapshot()

    def generate(tokens: int) -> None:
        model.generate(prompts, tokens, stop_tokens=(), cache=cache)
        cache.rollback(empty)

    generate(4)
    compiled = compilations()
    prefill = min(seconds(lambda: generate(1), device) for _ in range(2))
    whole = seconds(lambda: generate(count), device)
    show("HybridLM", batch, prompt, count, prefill, whole)
    captures = cache.decoder.captures if cache.decoder is not None else 0
    print(
        f"    kernels compiled after the warm-up: {compilations() - compiled}; steps captured: {captures}", flush=True
    )


def time_theirs(model: HybridLM, prompts: list[list[int]], count: int, device: str) -> None:
    """Transformers' model and its `generate`; FLA's rule where it is installed, and its own convolution."""
    from transformers import Qwen3_5MoeForCausalLM
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as modeling

    batch, prompt = len(prompts), len(prompts[0])
    with torch.device("meta"):
        theirs = Qwen3_5MoeForCausalLM(Qwen3_5MoeForCausalLM.config_class(**model.config.to_dict()))
    theirs = theirs.to_empty(device=device).to(model.dtype).eval()
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(theirs.config).to(device)
    theirs.load_state_dict(model.state_dict())
    ids = torch.tensor(prompts, device=device)
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    if batch * prompt > 65536:  # so many tokens at a time, as ours does it
        options["prefill_chunk_size"] = 65536 // batch
    mask = torch.ones_like(ids)

    def generate(tokens: int) -> None:
        with torch.no_grad():
            theirs.generate(ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, **options)

    generate(3)
    prefill = seconds(lambda: generate(1), device)
    show("transformers", batch, prompt, count, prefill, seconds(lambda: generate(count), device))
    rule = modeling.torch_chunk_gated_delta_rule
    chosen = [cell.cell_contents for cell in rule.__closure__ or () if callable(cell.cell_contents)]
    names = sorted({f"{f.__module__}.{f.__qualname__}" for f in chosen if "gated_delta_rule" in f.__qualname__})
    print(f"    its rule: {', '.join(names)}; experts {theirs.config._experts_implementation}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 64])
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script on a CPU")
    parser.add_argument("--only-ours", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    shape = TINY if arguments.tiny else SHAPE
    config = HybridConfig(model_type="qwen3_5_moe_text", num_hidden_layers=arguments.layers, **shape)
    model = HybridLM(config, device=arguments.device, dtype=dtype).eval()
    for batch in arguments.batch:
        print(f"batch {batch}: {arguments.prompt} tokens, {arguments.new} new, {arguments.layers} layers", flush=True)
        prompts = torch.randint(config.vocab_size, (batch, arguments.prompt)).tolist()
        time_ours(model, prompts, arguments.new, arguments.device)
        if not arguments.only_ours:
            try:
                time_theirs(model, prompts, arguments.new, arguments.device)
            except torch.OutOfMemoryError as error:
                print(f"  transformers: out of memory: {str(error)[:100]}")


if __name__ == "__main__":
    main()
