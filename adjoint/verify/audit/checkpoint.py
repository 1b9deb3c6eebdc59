"""The audit of a checkpoint on a text."""

from pathlib import Path

import torch

from adjoint.core.errors import ArgumentError
from adjoint.models import HybridLM
from adjoint.models.text import Text
from adjoint.verify.audit import audit
from adjoint.verify.audit.report import Report

TEXT = Path(__file__).with_name("text.txt")
"""The text that is read if no other is named."""


def audit_checkpoint(
    folder: Path, text: Path | None, max_tokens: int, dtype: torch.dtype | None, device: torch.device
) -> Report:
    """Audits a checkpoint of `HybridLM`, forward and backward, on the beginning of a text.

    Without a tokenizer.json in the folder, the tokens are the bytes of the text, modulo the size of the vocabulary.
    """
    if max_tokens < 2:
        raise ArgumentError(f"audit: --max-tokens must be 2 or more, got {max_tokens}")
    try:
        words = (text or TEXT).read_text(encoding="utf-8")
    except OSError as error:
        raise ArgumentError(f"audit: the text {text} cannot be read: {error.strerror}") from error
    except UnicodeError as error:
        raise ArgumentError(
            f"audit: the file {text} is not UTF-8 text: it is binary, or in another encoding"
        ) from error
    model = HybridLM.from_pretrained(folder, device=device, dtype=dtype)
    if (folder / "tokenizer.json").exists():
        tokens = Text(folder).encode(words)
    else:
        tokens = [byte % model.config.vocab_size for byte in words.encode()]
    if len(tokens) < 2:
        raise ArgumentError(f"audit: the text {text} has {len(tokens)} tokens, and needs 2 or more")
    input_ids = torch.tensor([tokens[:max_tokens]], device=device)
    return audit(model, {"input_ids": input_ids, "labels": input_ids}, max_tokens=max_tokens)
