"""Of equal layers one runs in a step; whatever differs between layers, inputs or steps runs by itself."""

import pytest
import torch
from torch import nn

from engine.kernels.attention.reference import AttentionBatch
from engine.layers.attention import Attention
from engine.layers.context import ForwardContext, forward_context
from engine.layers.linear import Linear
from engine.worker.startup.layer_kinds import one_of_each_kind


def parameter(content):
    return nn.Parameter(content, requires_grad=False)


class Ran:
    """Which layers ran. (A list would be compared as a part of each layer.)"""

    def __init__(self):
        self.layers = []


class Layer(nn.Module):
    def __init__(self, ran, size=8):
        super().__init__()
        self.linear = Linear(size, size)
        self.linear.weight = parameter(torch.zeros(size, size))
        self.attention = Attention(2, 1, 4, 1.0, None)
        self.ran = ran

    def forward(self, x, *, is_last=False):
        self.ran.layers.append(self)
        return x + 1


def a_step():
    nothing = torch.zeros(0, dtype=torch.int64)
    return forward_context(ForwardContext(nothing, nothing, AttentionBatch([], [])))


@pytest.fixture
def ran():
    return Ran()


def run(layers, x=None, last=False):
    with a_step():
        for layer in layers:
            layer(torch.zeros(3, 8) if x is None else x, is_last=last and layer is layers[-1])


def test_equal_layers_run_once_in_each_step(ran):
    layers = [Layer(ran) for _ in range(5)]
    with one_of_each_kind(layers):
        run(layers)
        assert ran.layers == layers[:1]
        run(layers)
        assert ran.layers == layers[:1] * 2
        run(layers, torch.zeros(4, 8), last=True)
        assert ran.layers == [*layers[:1] * 3, layers[-1]]
    ran.layers.clear()
    run(layers)
    assert ran.layers == layers, "afterwards all run again"


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer.attention, "window", 128),
        lambda layer: setattr(layer.attention, "k_scale", 0.5),
        lambda layer: setattr(layer.attention, "k_cache", torch.zeros(1, 2, 1, 4)),
        lambda layer: setattr(layer.linear, "gemm", layer.linear.gemm._replace(gemv=lambda *_: None)),
        lambda layer: setattr(layer.linear, "weight", parameter(torch.zeros(8, 8).bfloat16())),
        lambda layer: setattr(layer.linear, "weight", parameter(torch.zeros(8, 8).t())),
        lambda layer: setattr(layer.linear, "weight", parameter(torch.zeros(65)[1:].view(8, 8))),
        lambda layer: setattr(layer.attention, "q_norm", nn.Identity()),
        lambda layer: setattr(layer, "unknown", object()),
    ],
)
def test_a_layer_that_differs_runs_itself(ran, change):
    layers = [Layer(ran) for _ in range(4)]
    change(layers[2])
    with one_of_each_kind(layers):
        run(layers)
    assert ran.layers == [layers[0], layers[2]]


def test_inputs_that_differ_are_run(ran):
    layers = [Layer(ran) for _ in range(2)]
    wide = torch.zeros(3, 9)
    inputs = [torch.zeros(3, 8), wide[:, :8], torch.zeros(3, 8).bfloat16(), torch.zeros(25)[1:].view(3, 8)]
    with one_of_each_kind(layers), a_step():
        for x in inputs:
            for layer in layers:
                layer(x)
    assert ran.layers == [layers[0]] * len(inputs)


def test_layers_that_lend_keys_always_run(ran):
    layers = [Layer(ran) for _ in range(4)]
    layers[3].attention.borrow_from(layers[1].attention)
    layers[2].attention.borrow_from(layers[1].attention)
    with one_of_each_kind(layers):
        run(layers)
        run(layers)
    assert ran.layers == [layers[0], layers[1], layers[2]] * 2
