"""Layers in published formats, as a GPU has them after loading."""

import torch
from torch import nn

from engine.layers.quant.packed_experts import stack
from engine.layers.quant.stored import Part, Spec, StoredExperts


def part(number, rows, form, tensors):
    """Matrix `number` of a layer whose matrices have so many rows each."""
    specs = {name: Spec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    return Part(f"part{number}", number * rows, rows, form, specs)


def load(layer, method, tensors):
    """Use the method, and give the layer the tensors of each matrix."""
    layer.use(method)
    for i, found in enumerate(tensors):
        for name, tensor in found.items():
            setattr(layer, f"part{i}_{name}", nn.Parameter(tensor.contiguous(), requires_grad=False))


def filled(linear, form, writer, matrices):
    """Load experts with `matrices` each, and return the numbers that their matrices stand for."""
    rows, inner = linear.out_features // matrices, linear.in_features
    weights = [torch.randn(rows, inner) / inner**0.5 for _ in range(linear.num_experts * matrices)]
    tensors, numbers = zip(*(writer(weight.numpy()) for weight in weights), strict=True)
    method = StoredExperts([part(i, rows, form, found) for i, found in enumerate(tensors)], inner, torch.float32)
    load(linear, method, tensors)
    assert method.form is not None
    stack(linear, method._parts.take(linear), method.form)
    assert linear.loaded_bytes == sum(p.nbytes for p in linear.parameters())
    return torch.cat([torch.tensor(n.copy()) for n in numbers]).view(linear.num_experts, linear.out_features, inner)
