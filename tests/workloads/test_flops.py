"""FLOPs and parts that torch counts, of models of the catalog and of a user; see `test_contract.py` too."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from harness.worker.cell.model_parts import built_on_meta, count_flops, parts_of
from results.errors import BenchError
from results.parts import ModelParts
from strategies.training.flops import is_free
from workloads.catalog import WORKLOADS, facts


@pytest.mark.parametrize(
    ("text", "first_layer"),
    [
        # Backward is two products for each of the forward's, but the first layer's inputs need no
        # gradient: the stem is 2 * 7*7*3*64 FLOP at each of 112 x 112 positions.
        ("resnet50", 2 * 9408 * 112 * 112),
        ("mlp", 2 * 784 * 512),
        # An embedding is a look-up, so nothing is left out; attention's backward is 2 x its forward.
        ("gpt2-small", 0),
        ("gpt-nano", 0),
        ("llama-nano", 0),
    ],
)
def test_backward_is_twice_forward_less_the_inputs_gradient(text, first_layer) -> None:
    counted = count_flops(text, micro_batch=2)
    assert counted.backward == 2 * counted.forward - 2 * first_layer


def test_counting_leaves_torchs_random_state_alone() -> None:
    before = torch.get_rng_state()
    count_flops("mlp", micro_batch=2)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_users_model_is_counted_too(user_folder, model_source) -> None:
    (user_folder / "counted.py").write_text(model_source)
    # Linear 3 x 2 on 5 samples: 2*3*2*5 = 60 forward, and as much for its weight's gradient.
    assert count_flops("py:counted:build", micro_batch=5, source_folder=user_folder).total == 120
    # Its own samples may be of another shape than its synthetic ones.
    data = "data=[(torch.zeros(4, 3), torch.zeros(4, 2))] * 20, synthetic="
    (user_folder / "longer.py").write_text(model_source.replace("synthetic=", data))
    assert count_flops("py:longer:build", micro_batch=5, source_folder=user_folder, own=True).total == 4 * 120


def test_a_model_that_reads_its_values_is_named_uncountable(user_folder, model_source) -> None:
    source = model_source.replace("nn.functional.mse_loss", "lambda out, y: out.sum() * out.sum().item()")
    (user_folder / "reading.py").write_text(source)
    with pytest.raises(BenchError, match="FLOPs of py:reading:build cannot be counted on the meta device"):
        count_flops("py:reading:build", micro_batch=5, source_folder=user_folder)
    on_cpu = count_flops("py:reading:build", micro_batch=5, source_folder=user_folder, device="cpu")
    assert on_cpu.total == 120


def test_a_stated_model_is_held_to_the_built_one() -> None:
    stated = facts(WORKLOADS.parse("mlp"))
    built = {"parameters": stated.parameters, "forward_flops": stated.forward_flops}
    assert stated.contradicted(**built) == []
    assert stated.contradicted(**built | {"forward_flops": None}) == []
    for doubled in built:
        (sentence,) = stated.contradicted(**built | {doubled: 2 * built[doubled]})
        assert f"{2 * built[doubled]:,}" in sentence


def exactly(parts: ModelParts) -> dict[str, object]:
    """The figures that are counted exactly."""
    return {
        "values": [part.values for part in parts.parts],
        "flops": [part.flops for part in parts.parts],
        "block inputs": [block.input for block in parts.blocks],
        "experts": [(block.experts, block.dispatched) for block in parts.blocks],
        "shared": parts.shared_values,
        "logits": parts.logits,
    }


def test_experts_are_counted_as_the_closed_form_has_them() -> None:
    stated, counted = facts(WORKLOADS.parse("moe-nano")).parts, parts_of(built_on_meta("moe-nano"))
    assert isinstance(stated, ModelParts)
    assert exactly(counted) == exactly(stated)


@pytest.mark.parametrize("workload", ["gpt-nano", "resnet18-32px", "mlp"])
def test_a_model_is_counted_as_its_closed_form_has_it(workload) -> None:
    stated, counted = facts(WORKLOADS.parse(workload)).parts, parts_of(built_on_meta(workload))
    assert isinstance(stated, ModelParts)
    assert exactly(counted) == exactly(stated)
    saved, known = (sum(part.saved.over(1) for part in each.parts) for each in (counted, stated))
    # The meta device has no fused attention: the weights of all pairs of tokens are counted too.
    assert saved == known or (workload == "gpt-nano" and known < saved < 1.2 * known)


UNUSUAL = '''
import ctypes

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from workloads import Workload


class Net(nn.Module):
    def __init__(self, *shape, **parts):
        super().__init__()
        self.w = nn.Parameter(torch.ones(*shape))
        for name, part in parts.items():
            setattr(self, name, part)


def of(compute, *shape, **parts):
    class Computed(Net):
        def forward(self, x):
            return compute(self, x)

    return Workload(
        module=Computed(*shape, **parts),
        loss=lambda out, _: out.float().square().mean(),
        synthetic=lambda generator, n: (torch.ones(n, 16), torch.ones(n)),
    )


def experts():
    def compute(net, x):
        ends = torch.arange(1, 5, dtype=torch.int32, device=x.device) * (len(x) // 4)
        hidden = torch._grouped_mm(x.bfloat16(), net.w.bfloat16(), offs=ends)
        return torch._grouped_mm(hidden.relu(), net.w.bfloat16().transpose(1, 2), offs=ends)

    return of(compute, 4, 16, 32)


def pairs():
    return of(lambda net, x: net.both(x, x) * net.w, 1, 16, both=nn.Bilinear(16, 16, 16))


def vector():
    return of(lambda net, x: (x @ net.w[0]) * torch.dot(net.w[0], net.w[1]), 2, 16)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w.t(), x.t() @ g


def function():
    return of(lambda net, x: Product.apply(x, net.w), 16, 8)


@torch.library.custom_op("bench_tests::product", mutates_args=())
def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w


@product.register_fake
def _(x, w):
    return x.new_empty(len(x), w.shape[1])


@torch.library.custom_op("bench_tests::stated", mutates_args=())
def stated(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w


@stated.register_fake
def _(x, w):
    return x.new_empty(len(x), w.shape[1])


@register_flop_formula(torch.ops.bench_tests.stated)
def _(x, w, out_shape=None, **_):
    return 2 * x[0] * x[1] * w[1]


for each in (product, stated):
    each.register_autograd(lambda ctx, g: (None, ctx.saved_tensors[0].t() @ g),
                           setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]))


def custom():
    return of(lambda net, x: product(x, net.w), 16, 8)


def formula():
    return of(lambda net, x: stated(x, net.w), 16, 8)


class Direct(torch.autograd.Function):
    """A kernel in C would read the addresses of its operands: this one moves bytes."""

    @staticmethod
    def forward(ctx, x, w):
        out, w = torch.empty(len(x), w.shape[0]), w.t().contiguous()
        ctypes.memmove(out.data_ptr(), w.data_ptr(), min(out.nbytes, w.nbytes))
        return out

    @staticmethod
    def backward(ctx, g):
        return None, torch.ones(8, 16)


def direct():
    return of(lambda net, x: Direct.apply(x, net.w), 8, 16)


def by_hand():
    return of(lambda net, x: (x[:, None] * net.w).sum(-1), 8, 16)


def ordinary():
    """Every matrix is read, most of them through other operators; the last ones are added and looked up."""
    def compute(net, x):
        x = net.normed(x[:, None] + net.table(torch.arange(4, device=x.device)))
        x, _ = net.recurrent(x + net.w)
        return net.scale(x).cumsum(1).roll(1, 0).sort(-1).values + net.w

    return of(
        compute, 4, 16,
        normed=nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)),
        table=nn.Embedding(4, 16), recurrent=nn.GRU(16, 16, batch_first=True), scale=nn.LayerNorm((4, 16)),
    )
'''


@pytest.fixture
def unusual(user_folder):
    """Count the FLOPs of a model of UNUSUAL by its name."""
    (user_folder / "rare.py").write_text(UNUSUAL)
    return partial(count_flops, source_folder=user_folder)


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        # Two products of 8 x 16 by 16 x 32 in all; the first one's inputs need no gradient.
        ("experts", 2 * 2 * 8 * 16 * 32, 3 * 2 * 8 * 16 * 32),
        # x W_k for each of 16 results, and then a product of vectors; backward multiplies by elements once.
        ("pairs", 8 * 16 * (2 * 16 * 16 + 2 * 16), 8 * 16 * 2 * 16 * 16),
        ("vector", 2 * 8 * 16 + 2 * 16, 2 * 16 * 8),
        ("function", 2 * 8 * 16 * 8, 2 * 2 * 8 * 16 * 8),
        ("formula", 2 * 8 * 16 * 8, 2 * 8 * 16 * 8),
    ],
)
def test_operators_that_torchs_counter_lacks_are_counted(unusual, name, forward, backward) -> None:
    counted = unusual(f"py:rare:{name}", micro_batch=8)
    assert (counted.forward, counted.backward) == (forward, backward)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("custom", "bench_tests::product"),
        ("direct", "matrix w"),
        ("by_hand", "matrix w"),
    ],
)
def test_flops_that_nothing_counts_are_unknown_with_a_name(unusual, user_folder, name, named) -> None:
    with pytest.raises(BenchError, match=f"{named}.*register_flop_formula"):
        unusual(f"py:rare:{name}", micro_batch=8, device="cpu")
    if name == "direct":
        return
    workload = built_on_meta(f"py:rare:{name}", source_folder=user_folder)
    assert named in parts_of(workload).uncounted


def test_an_ordinary_model_has_no_doubts(unusual) -> None:
    samples, tokens = 8, 8 * 4
    linear, recurrent = 2 * tokens * 16 * 16, 2 * tokens * 16 * 48 * 2
    assert unusual("py:rare:ordinary", micro_batch=samples).forward == linear + recurrent


@pytest.mark.parametrize(
    "name",
    "cudnn_convolution_relu _addmm_activation _cdist_forward _euclidean_dist _fft_c2c linalg_matrix_exp "
    "linalg_inv_ex mkldnn_rnn_layer _weight_int8pack_mm _foreach_mm "
    "_scaled_dot_product_attention_math_for_mps".split(),
)
def test_no_operator_that_multiplies_matrices_counts_0_on_purpose(name) -> None:
    # Some came after torch 2.11.
    packet = getattr(torch.ops.aten, name, None)
    assert packet is None or not any(is_free(getattr(packet, each)) for each in packet.overloads())
