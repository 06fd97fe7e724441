"""Layers of experts in published formats, as a GPU has them after loading."""

import torch
from torch import nn

from engine.layers.quant.packed_experts import stack
from engine.layers.quant.stored import Part, Spec, StoredExperts


def filled(linear, form, writer, matrices):
    """The layer as a GPU has it after loading, and the numbers of its matrices; `matrices` of each expert."""
    rows, inner = linear.out_features // matrices, linear.in_features
    parts, tensors, numbers = [], [], []
    for i in range(linear.num_experts * matrices):
        found, plain = writer((torch.randn(rows, inner) / inner**0.5).numpy())
        specs = {name: Spec(tensor.dtype, tuple(tensor.shape)) for name, tensor in found.items()}
        parts.append(Part(f"part{i}", i * rows, rows, form, specs))
        tensors.append(found)
        numbers.append(torch.tensor(plain.copy()))
    method = StoredExperts(parts, inner, torch.float32)
    linear.use(method)
    for i, found in enumerate(tensors):
        for name, tensor in found.items():
            setattr(linear, f"part{i}_{name}", nn.Parameter(tensor.contiguous(), requires_grad=False))
    assert method.form is not None
    stack(linear, method._parts.take(linear), method.form)
    assert linear.loaded_bytes == sum(p.nbytes for p in linear.parameters())
    return torch.cat(numbers).view(linear.num_experts, linear.out_features, inner)
