"""Dense layers of flax: their parameters, and the dtype and precision of their matmul."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
from flax import linen, nnx

from parallel.linear.linear import ParallelLinear
from parallel.linear.quantized import Precision


class DenseLayer(NamedTuple):
    """Parameters of a layer `y = factor * (x @ kernel) + bias`, and how it multiplies."""

    kernels: Sequence[jax.Array]
    """One (in, out) per output."""
    biases: Sequence[jax.Array]
    """One (out,) per output, or empty."""
    dtype: Any
    """Dtype in which x and kernels are multiplied."""
    precision: Precision
    factor: float = 1.0
    pack: Callable[[Sequence[jax.Array]], Any] = lambda outputs: outputs[0]
    """Maps the list of outputs to what the layer returns."""

    @classmethod
    def read(cls, owner: str, layer: Any, dtype: Any = None) -> "DenseLayer":
        """Read a layer: a `ParallelLinear` without a config, or a module with `kernel` and `bias`.

        dtype: That of the inputs; None: that of the parameters.

        Raises: ValueError for a layer that may compute something else.
        """
        if isinstance(layer, ParallelLinear) and layer.direction == "none":
            kernels, biases = layer.arrays_of(layer.kernel), layer.arrays_of(layer.bias)
            dtype = layer.compute_dtype(dtype or layer.param_dtype)
            return cls(kernels, biases, dtype, layer.precision, layer.scale_factor(), layer.pack)
        product = _product_of(layer, dtype) if hasattr(layer, "kernel") else None
        if product is None:
            raise ValueError(
                f"{owner}: dense_fn builds a {type(layer).__name__} that may compute something "
                "else than x @ kernel + bias; use nnx.Linear, a ParallelLinear without a config or "
                "another nnx module that does just this, or tp_mode='none'"
            )
        bias = getattr(layer, "bias", None)
        biases = [] if bias is None else [bias[...]]
        dtype, precision = product.invars[0].aval.dtype, product.params["precision"]
        return cls([layer.kernel[...]], biases, dtype, precision)


def refuse_linen(owner: str, dense: Any) -> None:
    """Refuse a flax.linen module, a class of them, or a partial of such a class."""
    while isinstance(dense, partial):
        dense = dense.func
    kind = dense if isinstance(dense, type) else type(dense)
    if issubclass(kind, linen.Module):
        raise ValueError(
            f"{owner}: dense_fn builds a flax.linen {kind.__name__}, which holds no parameters; "
            "use an nnx module with a kernel, e.g. functools.partial(nnx.Linear, in, out)"
        )


def _product_of(layer: Any, dtype: Any) -> Any:
    """Trace a layer and return its matmul; None if it computes more than x @ kernel + bias."""
    kernel, bias = layer.kernel[...], getattr(layer, "bias", None)
    definition, state = nnx.split(layer)
    names = ("kernel",) if bias is None else ("kernel", "bias")

    def program(x: jax.Array, *arrays: jax.Array) -> Any:
        copy = nnx.merge(definition, state)
        for name, array in zip(names, arrays, strict=True):
            setattr(copy, name, nnx.Param(array))
        return copy(x)

    # The layouts of the parameters do not count, and inside shard_map they are blocks.
    shapes = [((1, kernel.shape[0]), dtype or kernel.dtype), (kernel.shape, kernel.dtype)]
    shapes += [] if bias is None else [(kernel.shape[1:], bias[...].dtype)]
    jaxpr = jax.make_jaxpr(program)(*(jax.ShapeDtypeStruct(*shape) for shape in shapes)).jaxpr
    equations = [*_arithmetic(jaxpr)]
    if [e.primitive.name for e in equations] != ["dot_general", "add"][: len(names)]:
        return None
    product = equations[0]
    (lhs, rhs), (out,) = ([v.aval for v in vars] for vars in (product.invars, product.outvars))
    plain = product.params["dimension_numbers"] == (((lhs.ndim - 1,), (0,)), ((), ()))
    return product if plain and rhs.shape == kernel.shape and out.dtype == lhs.dtype else None


def _arithmetic(jaxpr: Any) -> Iterator[Any]:
    """Yield the equations of a program that change more than shapes and dtypes."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in ("jit", "pjit"):
            yield from _arithmetic(equation.params["jaxpr"].jaxpr)
        elif name not in ("broadcast_in_dim", "convert_element_type", "reshape", "squeeze"):
            yield equation
