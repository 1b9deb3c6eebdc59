"""Times generation: a prefill, and decoding from the cache, of `HybridLM` in a CUDA graph and of transformers with FLA.

    PYTHONPATH=.:peers python benchmarks/generation.py --batch 1 64 --prompt 8192 --new 256 --save generation.json

All have the same random parameters, of Qwen3.5-MoE's shape with `--layers` layers, and take the most likely token.
After a warm-up no kernel of ours may be compiled and no step captured: how many are is printed. Transformers runs with
FLA's rule and convolution, of prefill and of decoding, patched, or with its own in torch; what ran is printed. One that
fails has a row that says so. With `--their-new` transformers decodes fewer tokens, as its rows then say: its steps take
equally long.

The logits of some tokens are compared before a time is taken, with those of transformers' own functions and the same
parameters in float32. In float32 `HybridLM` must agree with them. In bfloat16 the eighth and the ninth of 256 experts
are often nearer to each other than a rounding, so that every implementation sends some tokens to other experts, and two
are far from each other though both are right. So what is asked of each is that it is not much farther from float32
than the nearest, transformers in plain torch among them.
"""

import argparse
import copy
import inspect
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from contest import Report, attention_in, compiled_in_parallel, free
from fla_functions import fla_functions, fla_step_functions
from torch import Tensor

from adjoint.core.kernels import compilations
from adjoint.integrations.transformers import patch
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

NAMES = ("FLA", "patched", "torch")
"""Who competes with `HybridLM`: transformers, with the functions of these."""

FARTHEST = 1e-4
"""How far logits in float32 may be from transformers', by the norm of a token's: the median of tokens."""

TIMES_AS_FAR = 1.5
"""How much farther than the nearest logits in bfloat16 may be from those in float32."""

COMPARED = 512
"""So many tokens are compared."""

Generate = Callable[[int], Any]
"""Takes the prompts and generates so many tokens of each."""


class Contest:
    """One model, as ours and as transformers', that continues the same prompts."""

    def __init__(self, model: HybridLM, arguments: argparse.Namespace, report: Report) -> None:
        self._model, self._arguments, self._report = model, arguments, report
        self._right: Tensor | None = None
        self._far: dict[str, float] = {}
        self.wrong: list[str] = []

    @torch.no_grad()
    def compare_ours(self) -> None:
        """Keeps the logits in float32, and says how far ours and those of plain torch are from them."""
        vocabulary, dtype = self._model.config.vocab_size, self._model.dtype
        self._ids = torch.randint(vocabulary, (1, COMPARED), device=self._model.device)
        wide = copy.deepcopy(self._model).float()
        self._right = self._plain_logits(wide)
        far = float(distances(wide(self._ids).logits, self._right).median())
        self._report.say(f"HybridLM in float32: its logits are {far:.1e} from transformers'")
        if not far <= FARTHEST:
            self.wrong.append("HybridLM computes other logits in float32")
        if dtype == torch.float32:
            return
        self._note("HybridLM", self._model(self._ids).logits)
        self._note("plain transformers", self._plain_logits(self._model))

    def _plain_logits(self, model: HybridLM) -> Tensor:
        theirs = their_model(model)
        theirs.set_experts_implementation("eager")
        # cuDNN's convolution would round float32 to TF32.
        with running("torch", theirs, self._arguments.device, set()), torch.backends.cudnn.flags(enabled=False):
            logits: Tensor = theirs(input_ids=self._ids, use_cache=False).logits
        return logits

    def _note(self, name: str, logits: Tensor) -> None:
        """Says and keeps how far the logits of all tokens together are from the right ones."""
        assert self._right is not None
        self._far[name] = float((logits.double() - self._right.double()).norm() / self._right.double().norm())
        self._report.say(f"{name}: its logits are {self._far[name]:.1e} from those in float32")

    def judge(self) -> str:
        """What is wrong, if anything is."""
        if self._right is None:
            self.wrong.append("no logits were compared")
        is_wide = self._model.dtype == torch.float32
        limit = FARTHEST if is_wide else TIMES_AS_FAR * min(self._far.values(), default=0.0)
        self.wrong += [f"{name} computes other logits" for name, far in self._far.items() if not far <= limit]
        return "; ".join(self.wrong)

    def run(self, batch: int) -> None:
        arguments = self._arguments
        self._prompts = torch.randint(self._model.config.vocab_size, (batch, arguments.prompt))
        self._report.say(f"batch {batch}: {arguments.prompt} tokens, {arguments.new} new, {arguments.layers} layers")
        self._report.attempt("HybridLM", self._time_ours, batch=batch)
        for name in (name for name in NAMES if name in arguments.only):
            self._report.attempt(f"transformers, {name}", lambda name=name: self._time_theirs(name), batch=batch)
            free()

    def _time_ours(self) -> None:
        prompts, count = self._prompts.tolist(), self._arguments.new
        cache = self._model.new_cache(len(prompts), len(prompts[0]) + count + 1)
        empty = cache.snapshot()

        def generate(tokens: int) -> None:
            self._model.generate(prompts, tokens, stop_tokens=(), cache=cache)
            cache.rollback(empty)

        def captures() -> int:
            return cache.decoder.captures if cache.decoder is not None else 0

        generate(4)
        compiled, captured = compilations(), captures()
        row = self._time("HybridLM", generate)
        row |= {"compiled_after_warmup": compilations() - compiled, "captured_after_warmup": captures() - captured}
        row |= {"captures": captures(), "ran": sorted(attention_in(lambda: generate(1), self._arguments.device))}
        self._report.add(
            f"{describe(row)}  {row['compiled_after_warmup']} kernels compiled and "
            f"{row['captured_after_warmup']} steps captured after the warm-up, {captured} in it;  "
            f"{', '.join(row['ran'])}",
            row,
        )
        if row["compiled_after_warmup"] or row["captured_after_warmup"]:
            self.wrong.append("HybridLM compiled or captured after the warm-up")
        if self._arguments.device == "cuda" and not captured:
            self.wrong.append("HybridLM captured no step")

    def _time_theirs(self, name: str) -> None:
        theirs = their_model(self._model)
        ran: set[str] = set()
        ids = self._prompts.to(self._model.device)
        options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        if ids.numel() > 65536:  # so many tokens at a time, as ours does it
            options["prefill_chunk_size"] = 65536 // len(ids)
        mask = torch.ones_like(ids)

        def generate(tokens: int) -> None:
            with torch.no_grad():
                theirs.generate(ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, **options)

        with running(name, theirs, self._arguments.device, ran):
            with compiled_in_parallel(self._arguments.threads):
                if f"transformers, {name}" not in self._far and self._right is not None:
                    with torch.no_grad():
                        self._note(f"transformers, {name}", theirs(input_ids=self._ids, use_cache=False).logits)
                generate(3)
            row = self._time(f"transformers, {name}", generate, self._arguments.their_new)
            ran |= attention_in(lambda: generate(2), self._arguments.device)
        row |= {"ran": sorted(ran), "experts": theirs.config._experts_implementation}
        self._report.add(f"{describe(row)}  {', '.join(sorted(ran)) or 'adjoint'}; experts {row['experts']}", row)

    def _time(self, name: str, generate: Generate, new: int | None = None) -> dict[str, Any]:
        """Medians of whole runs, of `new` tokens, and of those that end with the prefill's token."""
        arguments, batch = self._arguments, len(self._prompts)
        if arguments.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if arguments.device == "cuda" else 0
        prefills, wholes, new = [], [], new or arguments.new
        for _ in range(arguments.rounds):
            prefills.append(seconds(lambda: generate(1), arguments.device))
            wholes.append(seconds(lambda: generate(new), arguments.device))
        prefill, decode = statistics.median(prefills), statistics.median(wholes) - statistics.median(prefills)
        steps = new - 1
        row = {"name": name, "batch": batch, "new": new, "prefill_ms": prefill * 1e3, "step_ms": decode / steps * 1e3}
        row |= {"prefill_tokens_per_second": batch * arguments.prompt / prefill}
        row |= {"decode_tokens_per_second": batch * steps / decode}
        row["peak_bytes"] = torch.cuda.max_memory_allocated() - before if arguments.device == "cuda" else 0
        if name in self._far:
            row["logits_from_float32"] = self._far[name]
        return row


def distances(logits: Tensor, right: Tensor) -> Tensor:
    """Of each token, by the norm of its logits."""
    return (logits.double() - right.double()).norm(dim=-1) / right.double().norm(dim=-1)


def seconds(call: Callable[[], Any], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def describe(row: dict[str, Any]) -> str:
    return (
        f"  {row['name']:22s} batch {row['batch']:2d}, {row['new']} new: prefill {row['prefill_ms']:8.1f} ms, "
        f"{row['prefill_tokens_per_second']:9.0f} tokens/s;  decoding {row['step_ms']:7.3f} ms a step, "
        f"{row['decode_tokens_per_second']:8.0f} tokens/s;  {row['peak_bytes'] / 2**30:5.2f} GiB; "
    )


def their_model(model: HybridLM) -> Any:
    """Transformers' model with the parameters of ours: they are one memory."""
    from transformers import Qwen3_5MoeForCausalLM

    with torch.device("meta"):
        theirs = Qwen3_5MoeForCausalLM(Qwen3_5MoeForCausalLM.config_class(**model.config.to_dict()))
    theirs.load_state_dict(model.state_dict(), assign=True)
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(theirs.config).to(model.device)
    return theirs.eval()


@contextmanager
def running(name: str, model: Any, device: str, ran: set[str]) -> Iterator[None]:
    """Inside, transformers calls the functions of `name`, which note that they ran.

    Raises:
        ImportError: FLA is not installed, or there is no GPU for it.
    """
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as modeling

    if name == "FLA" and device != "cuda":
        raise ImportError("FLA needs a GPU")
    names = (
        "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "causal_conv1d_fn", "causal_conv1d_update",
    )  # fmt: skip
    before = {function: getattr(modeling, function) for function in names}
    functions = {function: inspect.unwrap(getattr(modeling, function)) for function in names}
    if name == "FLA":
        functions |= fla_functions() | fla_step_functions()

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            ran.add(function.__qualname__)
            return function(*arguments, **options)

        return call

    for function in names:
        setattr(modeling, function, noted(functions[function]))
    if name == "patched":
        patch(model, verbose=False)
    try:
        yield
    finally:
        for function in names:
            setattr(modeling, function, before[function])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 64])
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--their-new", type=int, help="new tokens of transformers, if not as many")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script on a CPU")
    parser.add_argument("--only", nargs="*", choices=NAMES, default=["FLA"], help="beside HybridLM")
    parser.add_argument("--threads", type=int, default=8, help="that compile a peer's variants")
    parser.add_argument("--limit", type=float, default=300, help="seconds after which it ends with what it has")
    parser.add_argument("--save", type=Path, help="a file for the figures, as JSON")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    dtype = getattr(torch, arguments.dtype or ("bfloat16" if arguments.device == "cuda" else "float32"))
    shape = TINY if arguments.tiny else SHAPE
    facts = {"sizes": shape, "layers": arguments.layers, "prompt": arguments.prompt, "new": arguments.new}
    report = Report(facts, arguments.save, arguments.limit)
    config = HybridConfig(model_type="qwen3_5_moe_text", num_hidden_layers=arguments.layers, **shape)
    contest = Contest(HybridLM(config, device=arguments.device, dtype=dtype).eval(), arguments, report)
    report.attempt("comparison", contest.compare_ours)
    free()
    for batch in arguments.batch:
        contest.run(batch)
    report.finish(contest.judge())


if __name__ == "__main__":
    main()
