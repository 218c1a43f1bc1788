"""`vector.py`: a module's weights go into a vector and come back, whatever shape, type and sharing
they have.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from archipel.vector import Layout, Slot, integer_buffers, outer_gradient, parameters, statistics


class Everything(nn.Module):
    """One of each kind of tensor that a model may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.norm = nn.BatchNorm1d(2)
        self.frozen = nn.Parameter(torch.full((5,), 7.0), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(2.5))
        self.transposed = nn.Parameter(torch.arange(6.0).reshape(2, 3).t())
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.ones(9), persistent=False)
        self.register_buffer("seen", torch.tensor([True, False]))


PARAMETERS = {
    "frozen": None,
    "embedding.weight": 12,
    "norm.weight": 2,
    "norm.bias": 2,
    "scale": 1,
    "transposed": 6,
}
"""Entries of each parameter of `Everything`; None: not in the vector."""


def flat(module: nn.Module, names: list[str]) -> Tensor:
    """The tensors `names` of `module`, one after the other in row-major order: what a vector should
    hold.
    """
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return torch.cat([tensors[name].detach().float().reshape(-1) for name in names])


def test_a_vector_holds_trainable_parameters_then_float_buffers() -> None:
    layout = Layout.of(Everything())
    assert sorted(slot.name for slot in layout.slots[:5]) == sorted(
        name for name, entries in PARAMETERS.items() if entries
    )
    assert [slot.name for slot in layout.slots[5:]] == ["norm.running_mean", "norm.running_var"]
    assert (layout.parameters, layout.numel) == (12 + 2 + 2 + 1 + 6, 23 + 4)


def test_slots_lie_one_after_the_other() -> None:
    layout = Layout.of(Everything())
    assert [slot.start for slot in layout.slots] == [
        sum(slot.numel for slot in layout.slots[:i]) for i in range(7)
    ]


def test_reading_gives_the_values_in_the_order_of_the_slots() -> None:
    module = Everything()
    layout = Layout.of(module)
    vector = layout.read(module)
    assert (vector.dtype, vector.shape) == (torch.float32, (27,))
    assert torch.equal(vector, flat(module, [slot.name for slot in layout.slots]))


def test_what_is_written_is_read_back_to_the_bit() -> None:
    module = Everything()
    layout = Layout.of(module)
    vector = torch.randn(27, generator=torch.Generator().manual_seed(0))
    layout.write(module, vector)
    assert torch.equal(layout.read(module), vector)
    assert torch.equal(flat(module, [slot.name for slot in layout.slots]), vector)


def test_reading_copies() -> None:
    module = Everything()
    layout = Layout.of(module)
    vector = layout.read(module)
    before = vector.clone()
    layout.write(module, vector + 1)
    assert torch.equal(vector, before)
    assert not vector.requires_grad


def test_a_tied_parameter_stays_tied_when_written() -> None:
    module = Everything()
    layout = Layout.of(module)
    layout.write(module, torch.arange(27.0))
    assert module.head.weight is module.embedding.weight
    assert torch.equal(module.head.weight, layout.named(torch.arange(27.0))["embedding.weight"])


def test_a_frozen_parameter_is_not_written() -> None:
    module = Everything()
    Layout.of(module).write(module, torch.zeros(27))
    assert torch.equal(module.frozen, torch.full((5,), 7.0))


def test_a_transposed_parameter_keeps_its_strides() -> None:
    module = Everything()
    Layout.of(module).write(module, torch.arange(27.0))
    assert module.transposed.stride() == (1, 3)


def test_a_channels_last_weight_lies_in_row_major_order() -> None:
    conv = nn.Conv2d(3, 2, kernel_size=2, bias=False).to(memory_format=torch.channels_last)
    assert not conv.weight.is_contiguous()
    layout = Layout.of(conv)
    layout.write(conv, torch.arange(24.0))
    assert torch.equal(conv.weight, torch.arange(24.0).reshape(2, 3, 2, 2))
    assert torch.equal(layout.read(conv), torch.arange(24.0))
    assert conv.weight.is_contiguous(memory_format=torch.channels_last)


def test_integer_and_boolean_buffers_stay_beside_the_vector() -> None:
    module = Everything()
    assert (
        Layout.of(module).integers
        == tuple(integer_buffers(module))
        == ("seen", "norm.num_batches_tracked")
    )
    Layout.of(module).write(module, torch.zeros(27))
    assert torch.equal(module.seen, torch.tensor([True, False]))


def test_buffers_that_a_state_dict_leaves_out_are_left_out() -> None:
    module = Everything()
    assert "mask" not in statistics(module)
    Layout.of(module).write(module, torch.zeros(27))
    assert torch.equal(module.mask, torch.ones(9))


def test_a_bf16_model_has_an_fp32_vector_of_its_rounded_values() -> None:
    module = nn.Linear(4, 3).bfloat16()
    layout = Layout.of(module)
    vector = torch.full((15,), 1.001)
    layout.write(module, vector)
    assert module.weight.dtype == torch.bfloat16
    assert layout.read(module).dtype == torch.float32
    assert torch.equal(layout.read(module), vector.bfloat16().float())


def test_names_carry_no_trace_of_torch_compile() -> None:
    plain, inner = Everything(), Everything()
    inner.norm = torch.compile(inner.norm, backend="eager")  # wrapped, never called
    assert Layout.of(torch.compile(plain, backend="eager")) == Layout.of(plain)
    names = [slot.name for slot in Layout.of(inner).slots]
    assert sorted(names) == sorted(slot.name for slot in Layout.of(plain).slots)


def test_a_compiled_module_reads_and_writes_as_the_plain_one() -> None:
    plain = Everything()
    compiled = torch.compile(plain, backend="eager")
    layout = Layout.of(compiled)
    layout.write(compiled, torch.arange(27.0))
    assert torch.equal(Layout.of(plain).read(plain), torch.arange(27.0))


def test_named_parts_share_the_memory_of_the_vector() -> None:
    layout = Layout.of(Everything())
    vector = torch.zeros(27)
    named = layout.named(vector)
    assert {name: tensor.shape for name, tensor in named.items()} == {
        slot.name: slot.shape for slot in layout.slots
    }
    for tensor in named.values():
        tensor += 1
    assert torch.equal(vector, torch.ones(27))


def test_a_slot_of_a_single_number_has_no_dimensions() -> None:
    assert Slot("scale", torch.Size([]), 1).view(torch.tensor([1.0, 2.0])).shape == ()


def test_a_model_without_parameters_has_an_empty_vector() -> None:
    layout = Layout.of(nn.ReLU())
    assert (layout.parameters, layout.numel, layout.read(nn.ReLU()).shape) == (0, 0, (0,))


def test_two_parameters_in_one_memory_are_refused() -> None:
    module = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    module["b"].weight = nn.Parameter(module["a"].weight.data)
    text = (
        "parameters 'a.weight' and 'b.weight' share memory but are two objects; "
        "tie them by assigning the same nn.Parameter to both places"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        Layout.of(module)


def test_a_parameter_inside_another_ones_memory_is_refused() -> None:
    whole = torch.zeros(2, 3)
    module = nn.ParameterDict({"whole": nn.Parameter(whole), "row": nn.Parameter(whole[1])})
    with pytest.raises(
        ValueError, match=r"^parameters 'row' and 'whole' share memory but are two objects; "
    ):
        Layout.of(module)


def test_a_complex_parameter_is_refused() -> None:
    module = nn.ParameterDict({"phase": nn.Parameter(torch.zeros(2, dtype=torch.complex64))})
    text = (
        "parameter 'phase' is torch.complex64; only floating-point parameters can be trained here"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        Layout.of(module)


@pytest.mark.parametrize("shape", [(14,), (16,), (1, 15), ()])
def test_a_vector_of_another_length_is_refused(shape: tuple[int, ...]) -> None:
    module = nn.Linear(4, 3)
    text = f"the vector has shape {shape}, this model's weights need (15,)"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        Layout.of(module).write(module, torch.zeros(shape))


def test_a_refused_vector_changes_nothing() -> None:
    module = nn.Linear(4, 3)
    before = Layout.of(module).read(module)
    with pytest.raises(ValueError, match="the vector has shape"):
        Layout.of(module).write(module, torch.zeros(16))
    assert torch.equal(Layout.of(module).read(module), before)


def test_parameters_are_the_trainable_objects_themselves() -> None:
    module = Everything()
    assert parameters(module)["scale"] is module.scale
    assert set(parameters(module)) == {name for name, entries in PARAMETERS.items() if entries}


def test_an_outer_gradient_is_start_minus_end_and_the_new_buffers() -> None:
    start, end = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0.5, 4.0, 30.0, 40.0])
    assert outer_gradient(start, end, 2).tolist() == [0.5, -2.0, 30.0, 40.0]


def test_an_outer_gradient_leaves_its_arguments_alone() -> None:
    start, end = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])
    outer_gradient(start, end, 1).zero_()
    assert (start.tolist(), end.tolist()) == ([1.0, 2.0], [3.0, 5.0])
