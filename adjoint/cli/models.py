"""`adjoint train` and `adjoint generate`: training a model, and text from a model."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from adjoint.cli.options import device_of, dtype_of, require_present
from adjoint.cli.terminal import make_console, refuse
from adjoint.train.command import as_command


@as_command
def train(**values: Any) -> None:
    """Train a hybrid model: by default a small one, on the Python standard library's source, in a minute or two."""
    import adjoint
    from adjoint.train.command import run
    from adjoint.train.stops import STOPS, Interrupted

    try:
        run(make_console(), values)
    except (adjoint.ArgumentError, adjoint.Unsupported) as error:
        refuse(error)
    except STOPS as error:
        make_console(stderr=True).print(Text(str(error), style="red"), soft_wrap=True)
        raise typer.Exit(1) from None
    except Interrupted as error:
        make_console(stderr=True).print(Text(str(error)), soft_wrap=True)
        raise typer.Exit(130) from None


def generate(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A checkpoint folder: config.json, safetensors.")],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="A text, or token ids with --tokens.")],
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Prompt and output are token ids, and no tokenizer is needed.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", help="The most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="The sampling temperature; 0 takes the most likely token.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(metavar="K", help="Choose among the K most likely tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(metavar="P", help="Choose among the most likely tokens that add up to P.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The seed of the random choices.")] = 0,
    dtype: Annotated[str | None, typer.Option(help="The dtype of the weights; by default the checkpoint's.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default the GPU if there is one.")] = None,
) -> None:
    """Continue a prompt with a checkpoint of Qwen3-Next, Qwen3.5 or Qwen3.5-MoE."""
    import torch

    import adjoint
    from adjoint.models import HybridConfig, HybridLM
    from adjoint.models.text import TokenIds, text_of

    target = require_present(device_of(device))
    kind = dtype_of("generate", dtype)
    if not -(2**63) <= seed < 2**64:
        refuse(f"generate: --seed must have at most 64 bits, got {seed}")
    try:
        prompt.encode()
    except UnicodeEncodeError:  # the command line has bytes that are not UTF-8
        refuse(adjoint.ArgumentError(f"generate: the prompt must be UTF-8 text, got {prompt!r}"))
    try:
        HybridConfig.from_folder(folder)  # first, so that a wrong folder is named before its tokenizer is missed
        language = TokenIds() if tokens else text_of(folder)
        model = HybridLM.from_pretrained(folder, device=target, dtype=kind).eval()
        steps = model.stream(
            [language.encode(prompt)],
            max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            generator=torch.Generator(target).manual_seed(seed),
        )
        for piece in language.decode(token for (token,) in steps if token is not None):
            print(piece, end="", flush=True)
        print()
    except (adjoint.ArgumentError, adjoint.Unsupported) as error:
        refuse(error)
