"""The modules are torch's, with our lookup: same tables, same state, same results.

Upstream gradients are small integers, so every sum is exact in float64 and equality needs no tolerance,
whatever order torch adds in.
"""

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import adjoint
from adjoint.nn import Embedding, EmbeddingBag

EAGER = adjoint.Preference(backend="eager")
IDS = torch.tensor([[3, 1, 3, 0], [6, 3, 1, 5]])
OFFSETS = torch.tensor([0, 3, 3, 4])

both = pytest.mark.parametrize(("ours", "theirs"), [(Embedding, nn.Embedding), (EmbeddingBag, nn.EmbeddingBag)])
each = pytest.mark.parametrize("ours", [Embedding, EmbeddingBag])


def seeded(module: type[nn.Module], *arguments: Any, **keywords: Any) -> Any:
    torch.manual_seed(0)
    return module(*arguments, **keywords)


def integers(like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(-8, 9, like.shape, generator=generator).to(like.dtype)


def gradient(module: nn.Module, *inputs: Tensor, **keywords: Tensor) -> Tensor:
    """The gradient of the table under an upstream of integers."""
    out = module(*inputs, **keywords)
    module.zero_grad()
    out.backward(integers(out))
    found = module.weight.grad
    assert isinstance(found, Tensor)
    return found


# ------------------------------------------------------------------------------------ torch's modules


@both
def test_the_positional_signature_is_torchs(ours: type[nn.Module], theirs: type[nn.Module]) -> None:
    for method in ("__init__", "from_pretrained", "forward"):
        mine, original = (inspect.signature(getattr(m, method)).parameters.values() for m in (ours, theirs))
        positional = [(p.name, p.default) for p in mine if p.kind is not inspect.Parameter.KEYWORD_ONLY]
        assert positional == [(p.name, p.default) for p in original]


@both
@pytest.mark.parametrize("padding_idx", [None, 0, 3, -1, -7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_one_seed_gives_one_table(
    ours: type[nn.Module], theirs: type[nn.Module], padding_idx: int | None, dtype: torch.dtype
) -> None:
    mine = seeded(ours, 7, 4, padding_idx=padding_idx, dtype=dtype)
    state = torch.get_rng_state()
    original = seeded(theirs, 7, 4, padding_idx=padding_idx, dtype=dtype)
    assert torch.equal(mine.weight, original.weight) and torch.equal(state, torch.get_rng_state())
    for name in theirs.__constants__:  # type: ignore[union-attr]
        assert getattr(mine, name) == getattr(original, name)
    if padding_idx is not None:
        assert not mine.weight[padding_idx].any()
    torch.manual_seed(0)
    with torch.no_grad():
        mine.weight.zero_()
    mine.reset_parameters()
    assert torch.equal(mine.weight, original.weight)


@both
def test_each_loads_the_state_of_the_other(ours: type[nn.Module], theirs: type[nn.Module]) -> None:
    mine, original = ours(7, 4), theirs(7, 4)
    assert not torch.equal(mine.weight, original.weight)
    saved = copy.deepcopy(mine.state_dict())
    assert list(saved) == list(original.state_dict())
    mine.load_state_dict(original.state_dict(), strict=True)
    assert torch.equal(mine.weight, original.weight)
    original.load_state_dict(saved, strict=True)
    assert torch.equal(original.weight, saved["weight"])
    assert isinstance(mine, theirs)


@pytest.mark.parametrize("padding_idx", [None, 3, -4])
def test_lookup_and_gradient_are_torchs(padding_idx: int | None) -> None:
    mine, original = (seeded(m, 7, 4, padding_idx, dtype=torch.float64) for m in (Embedding, nn.Embedding))
    assert torch.equal(mine(IDS), original(IDS))
    assert torch.equal(gradient(mine, IDS), gradient(original, IDS))
    assert mine.weight.grad[2].count_nonzero() == 0  # nobody asked for it
    if padding_idx is not None:
        assert mine.weight.grad[padding_idx].count_nonzero() == 0


@pytest.mark.parametrize("padding_idx", [None, 3])
@pytest.mark.parametrize("mode", ["sum", "max", "mean"])
@pytest.mark.parametrize("given", ["rows", "offsets", "last offset"])
def test_bags_are_torchs(mode: str, given: str, padding_idx: int | None) -> None:
    """Tables of integers make sums exact; bags in which 0, 1, 2 or 4 entries count, means too."""
    ids = torch.tensor([[3, 1, 3, 0], [3, 6, 3, 5]])
    inputs = (ids,) if given == "rows" else (ids.reshape(-1), torch.tensor([0, 4, 4, 5, 6, 8]))
    keywords = {"mode": mode, "padding_idx": padding_idx, "include_last_offset": given == "last offset"}
    modules = [seeded(m, 7, 4, dtype=torch.float64, **keywords) for m in (EmbeddingBag, nn.EmbeddingBag)]
    for module in modules:
        module.weight.data.copy_(integers(module.weight))
    mine, original = modules
    assert torch.equal(mine(*inputs), original(*inputs))
    assert torch.equal(gradient(mine, *inputs), gradient(original, *inputs))


def test_weighted_bags_are_torchs() -> None:
    results = []
    for kind in (EmbeddingBag, nn.EmbeddingBag):
        module = seeded(kind, 7, 4, mode="sum", dtype=torch.float64)
        module.weight.data.copy_(integers(module.weight))
        weights = integers(torch.empty(8, dtype=torch.float64)).requires_grad_()
        table = gradient(module, IDS.reshape(-1), OFFSETS, per_sample_weights=weights)
        results.append((module(IDS.reshape(-1), OFFSETS, weights), table, weights.grad))
    assert all(torch.equal(mine, original) for mine, original in zip(*results, strict=True))


# -------------------------------------------------------------------------------------------- options


@each
@pytest.mark.parametrize("freeze", [True, False])
def test_from_pretrained_shares_the_table(ours: Any, freeze: bool) -> None:
    table = torch.randn(7, 4)
    module = ours.from_pretrained(table, freeze=freeze, padding_idx=-1, preference=EAGER)
    assert module.weight.data_ptr() == table.data_ptr()
    assert module.weight.requires_grad is module(IDS).requires_grad is not freeze
    assert (module.num_embeddings, module.embedding_dim, module.padding_idx) == (7, 4, 6)
    assert module.preference is EAGER
    assert torch.equal(module.weight, table)  # the padding row too


@each
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_norm": 1.0}, ("max_norm=1.0", "renorm_")),
        ({"max_norm": 1.0, "norm_type": 1.0}, ("max_norm=1.0", "norm_type")),
        ({"scale_grad_by_freq": True}, ("scale_grad_by_freq=True", "bincount")),
        ({"padding_idx": 7}, ("padding_idx", "-7 to 6", "got 7")),
        ({"padding_idx": -8}, ("padding_idx", "got -8")),
        ({"padding_idx": 1.5}, ("padding_idx", "1.5")),
        ({"_weight": torch.ones(4, 7)}, ("_weight", "(7, 4)", "(4, 7)")),
    ],
)
def test_what_is_not_supported_is_an_error_by_name(ours: Any, options: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(adjoint.ArgumentError, match=f"^{ours.__name__}: ") as raised:
        ours(7, 4, **options)
    assert all(word in str(raised.value) for word in words)


@pytest.mark.parametrize(
    ("construct", "words"),
    [
        (lambda: Embedding(7, 4, out_of_range="clamp"), ("out_of_range", "'raise', 'zero'", "'clamp'")),
        (lambda: EmbeddingBag(7, 4, mode="min"), ("mode", "'mean', 'sum', 'max'", "'min'")),
        (lambda: EmbeddingBag(7, 4, sparse=True), ("sparse=True",)),
        (lambda: Embedding(-1, 4), ("num_embeddings", "-1")),
        (lambda: EmbeddingBag(7, -4), ("embedding_dim", "-4")),
        (lambda: Embedding.from_pretrained(torch.ones(3)), ("embeddings", "(3,)")),
        (lambda: EmbeddingBag.from_pretrained(torch.ones(3, 2), max_norm=2.0), ("max_norm",)),
    ],
)
def test_what_does_not_fit_is_an_error_by_name(construct: Callable[[], object], words: tuple[str, ...]) -> None:
    with pytest.raises(adjoint.ArgumentError) as raised:
        construct()
    assert all(word in str(raised.value) for word in words)


def test_out_of_range_is_passed_on() -> None:
    ids = torch.tensor([0, 7])
    with pytest.raises(adjoint.ArgumentError, match="got 7 at position 1"):
        Embedding(7, 4)(ids)
    assert not Embedding(7, 4, out_of_range="zero")(ids)[1].any()


@each
def test_preference_is_passed_on(ours: Any) -> None:
    with pytest.raises(adjoint.Unsupported, match="no_such_plan"):
        ours(7, 4, preference=adjoint.Preference(plan="no_such_plan"))(IDS)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (Embedding(7, 4), "Embedding(7, 4)"),
        (Embedding(7, 4, -1, sparse=True), "Embedding(7, 4, padding_idx=6, sparse=True)"),
        (Embedding(7, 4, out_of_range="zero"), "Embedding(7, 4, out_of_range='zero')"),
        (Embedding(7, 4, preference=EAGER), f"Embedding(7, 4, preference={EAGER!r})"),
        (EmbeddingBag(7, 4, padding_idx=2), "EmbeddingBag(7, 4, mode='mean', padding_idx=2)"),
        (EmbeddingBag(7, 4, preference=EAGER), f"EmbeddingBag(7, 4, mode='mean', preference={EAGER!r})"),
    ],
)
def test_representation(module: nn.Module, text: str) -> None:
    assert repr(module) == text


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
@pytest.mark.parametrize(
    "module", [Embedding(7, 4, 3, out_of_range="zero", preference=EAGER), EmbeddingBag(7, 4, mode="max")]
)
def test_copies_keep_every_option(module: Any, copied: Callable[[Any], Any]) -> None:
    twin = copied(module)
    assert repr(twin) == repr(module)
    assert torch.equal(twin(IDS), module(IDS)) and twin.weight is not module.weight
    assert torch.equal(gradient(twin, IDS), gradient(module, IDS))


# ------------------------------------------------------------------------------ the rest of the world


class Model(nn.Module):
    """A table, a bag and a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Embedding(7, 4, padding_idx=0)
        self.bag = EmbeddingBag(7, 4, mode="sum")
        self.project = nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.project(self.table(ids).tanh().sum(1) + self.bag(ids)).logsumexp(-1)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_compiles_whole() -> None:
    model = seeded(Model)
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    for ids in (IDS, IDS[:, :3]):
        expected, out = model(ids), compiled(ids)
        assert torch.equal(out, expected)
        expected.sum().backward()
        out.sum().backward()
    mine, theirs = gradients(twin), gradients(model)
    assert mine.keys() == theirs.keys() and len(mine) == 4
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_sparse_gradients_are_refused_under_compilation() -> None:
    compiled = torch.compile(Embedding(7, 4, sparse=True), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="row-sparse"):
        compiled(IDS)


@pytest.mark.parametrize("padding_idx", [None, 3])
def test_sparse_adam_takes_the_steps_it_takes_with_torch(padding_idx: int | None) -> None:
    modules = [seeded(m, 7, 4, padding_idx, sparse=True, dtype=torch.float64) for m in (Embedding, nn.Embedding)]
    optimizers = [torch.optim.SparseAdam(module.parameters(), lr=0.1) for module in modules]
    start = modules[0].weight.detach().clone()
    for step in range(5):
        ids = (IDS * (step + 1)) % 7
        for module, optimizer in zip(modules, optimizers, strict=True):
            assert gradient(module, ids).is_sparse
            optimizer.step()
    assert torch.equal(modules[0].weight, modules[1].weight)
    assert not torch.equal(modules[0].weight, start)


def test_a_sparse_gradient_names_each_row_once() -> None:
    module = Embedding(7, 4, padding_idx=6, sparse=True, dtype=torch.float64)
    dense = Embedding.from_pretrained(module.weight.detach(), freeze=False, padding_idx=6)
    out = module(IDS)
    (found,) = torch.autograd.grad(out, module.weight, integers(out))
    assert found.is_coalesced()
    assert found.indices().tolist() == [[0, 1, 3, 5]]
    assert torch.equal(found.to_dense(), gradient(dense, IDS))


def test_checkpointing_computes_again_and_gives_the_same_gradient() -> None:
    model, calls = seeded(Model), []
    model.table.register_forward_hook(lambda *_: calls.append(1))
    model(IDS).sum().backward()
    expected = {name: value.clone() for name, value in gradients(model).items()}
    model.zero_grad()
    checkpoint(model, IDS, use_reentrant=False).sum().backward()
    assert len(calls) == 3
    assert all(torch.equal(value, expected[name]) for name, value in gradients(model).items())


@both
def test_on_the_meta_device(ours: type[nn.Module], theirs: type[nn.Module]) -> None:
    module = ours(7, 4, padding_idx=1, device="meta")
    out, expected = (m(IDS.to("meta")) for m in (module, theirs(7, 4, device="meta")))
    assert module.weight.is_meta and out.is_meta and out.shape == expected.shape
    filled = theirs(7, 4)
    module.load_state_dict(filled.state_dict(), assign=True)
    assert torch.equal(module(IDS[:1]), ours.from_pretrained(filled.weight, padding_idx=1)(IDS[:1]))


@each
def test_skip_init_draws_nothing(ours: type[nn.Module]) -> None:
    state = torch.get_rng_state()
    module = torch.nn.utils.skip_init(ours, 7, 4, padding_idx=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert not module.weight.is_meta and module.weight.shape == (7, 4)


@each
def test_under_inference_mode(ours: Any) -> None:
    module = ours(7, 4)
    expected = module(IDS)
    with torch.inference_mode():
        out = module(IDS)
        assert torch.equal(ours(7, 4)(IDS[:0]), expected[:0])
    assert out.is_inference() and not out.requires_grad and torch.equal(out, expected)


def test_accumulates_into_a_buffer_through_the_function() -> None:
    module, buffer = Embedding(7, 4, dtype=torch.bfloat16), torch.zeros(7, 4)
    for _ in range(2):
        out = adjoint.embedding(IDS, module.weight, accumulate_into=buffer)
        out.backward(integers(out))
    assert module.weight.grad is None
    assert torch.equal(buffer, 2 * gradient(module, IDS).float())
