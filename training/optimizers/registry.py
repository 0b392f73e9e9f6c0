"""Registry of optimizers, and what all of them share: clipping, and steps that change nothing.

A new optimizer is one file in this folder, or a plugin module: `@register("name")` before a factory

    def signs(config: OptimizerConfig, schedule: optax.Schedule, *, momentum: float = 0.95): ...

that returns an optax transformation; its keyword arguments are the keys of `optimizer.options`.
Clipping by global norm comes before it, and is not its concern. If it adds weight decay with
`decay_weights`, `decays_by_group=True` allows groups with a weight decay of their own.
"""

import difflib
import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from pydantic import PydanticUserError, TypeAdapter, ValidationError

from registry import Registry
from training.norms import clip_by_global_norm
from training.optimizers.config import OptimizerConfig
from training.optimizers.parameters import scale_groups, width_rates
from training.optimizers.rounded_moments import with_rounded_moments

Factory = Callable[..., optax.GradientTransformation]
GradientPoint = Callable[[Any, Any], Any]
"""(parameters, state of the optimizer) -> parameters at which the gradients are computed."""


_MOMENT_KEYS = ("beta1", "beta2", "eps")


@dataclass(frozen=True)
class _Entry:
    factory: Factory
    obeys_is_good: bool
    moments: int
    matrix_moments: int
    kernel_values: Callable[[OptimizerConfig, int, int], int] | None
    never_negative: tuple[str, ...] | None
    exact: tuple[str, ...]
    decays_by_group: bool
    reads: tuple[str, ...]
    point: Callable[[OptimizerConfig, Any, Any], Any] | None
    width_powers: tuple[float, float] | None
    check: Callable[[OptimizerConfig], None] | None


OPTIMIZERS: Registry[_Entry] = Registry("optimizer")


def register(  # noqa: PLR0913  # a declaration whose arguments are named
    name: str,
    *,
    obeys_is_good: bool = False,
    moments: int = 2,
    matrix_moments: int | None = None,
    kernel_values: Callable[[OptimizerConfig, int, int], int] | None = None,
    never_negative: tuple[str, ...] | None = None,
    exact: tuple[str, ...] = (),
    decays_by_group: bool = False,
    reads: tuple[str, ...] = _MOMENT_KEYS,
    point: Callable[[OptimizerConfig, Any, Any], Any] | None = None,
    width_powers: tuple[float, float] | None = None,
    check: Callable[[OptimizerConfig], None] | None = None,
) -> Callable[[Factory], Factory]:
    """Register an optimizer's factory: (config, schedule, **options) -> transformation.

    Args:
        name: value of the key `optimizer.name`.
        obeys_is_good: its `update` takes a scalar `is_good`, and keeps its state where that is
            false. Otherwise its state is selected afterwards, which may need a second copy of it.
        moments: arrays of the size of a parameter in its state, for estimates of memory.
        matrix_moments: the same for the kernels of layers, if they have another number.
        kernel_values: (config, M, N) -> float32 values in its state for a kernel (M, N) of a layer
            besides these, for estimates of memory.
        never_negative: fields of its state that hold no negative value, such as `nu` of optax's
            AdamW; (): no field. In 8 bits they have the range that divisors need. None:
            `optimizer.moments_dtype=int8` is refused.
        exact: fields of its state that are no moments, and keep their dtype in spite of
            `optimizer.moments_dtype`.
        decays_by_group: weight decay is that of `decay_weights`, which follows `optimizer.groups`.
        reads: those of the keys `beta1`, `beta2` and `eps` that it uses.
        point: (config, parameters, state of the optimizer) -> parameters at which the gradients are
            computed, if these are others. Such an optimizer applies `scale_groups` by itself.
        width_powers: the learning rates of the kernels of layers, and of other kernels, fall with
            these powers of the width under muP. Its update may use the parameters for weight decay
            only: they arrive divided by the factor of the rate. None: `model.mup_base_width` is
            refused.
        check: raises a ValueError that begins with the path of a key if it does not allow a value
            of the configuration.
    """

    def add(factory: Factory) -> Factory:
        OPTIMIZERS[name] = _Entry(
            factory,
            obeys_is_good,
            moments,
            moments if matrix_moments is None else matrix_moments,
            kernel_values,
            never_negative,
            exact,
            decays_by_group,
            reads,
            point,
            width_powers,
            check,
        )
        return factory

    return add


def check_optimizer(config: OptimizerConfig) -> None:
    """Check the name, and the options against the annotations of the factory.

    Raises: ValueError with key path, value and what is known.
    """
    entry = OPTIMIZERS[config.name]
    for kind, group in config.groups.items():
        if group.weight_decay is not None and not entry.decays_by_group:
            raise ValueError(
                f"optimizer.groups.{kind}.weight_decay={group.weight_decay}: optimizer "
                f"{config.name} has one weight decay for all; remove it, or register the optimizer "
                "with decays_by_group=True and decay_weights"
            )
    signature = inspect.signature(entry.factory, eval_str=True)
    try:
        signature.bind(config, None, **config.options)
    except TypeError as error:
        options = list(signature.parameters)[2:]
        unknown = next((name for name in config.options if name not in options), None)
        near = difflib.get_close_matches(unknown or "", options, n=1)
        reason = error if unknown is None else f"unknown option {unknown!r}"
        raise ValueError(
            f"optimizer.options={config.options!r}: {reason}; optimizer {config.name} takes "
            f"{', '.join(options) or 'no options'}{f'; did you mean {near[0]}?' if near else ''}"
        ) from error
    for name, value in config.options.items():
        parameter = signature.parameters.get(name)  # None: among **options
        if parameter is not None and parameter.annotation is not signature.empty:
            _check_option(name, value, parameter.annotation)
    if entry.check is not None:
        entry.check(config)
    if config.moments_dtype == "int8" and entry.never_negative is None:
        raise ValueError(
            f"optimizer.moments_dtype=int8: optimizer {config.name} does not say which of its "
            "moments are never negative; register it with never_negative, or use bfloat16"
        )


def describe_unread_keys(config: OptimizerConfig) -> Iterator[str]:
    """Yield a line for every key that differs from its default and that the optimizer ignores."""
    entry = OPTIMIZERS[config.name]
    options = [*inspect.signature(entry.factory).parameters][2:]
    instead = f"; its options are {', '.join(options)} (optimizer.options)" if options else ""
    for key in _MOMENT_KEYS:
        value = getattr(config, key)
        if key not in entry.reads and value != OptimizerConfig.model_fields[key].default:
            yield f"optimizer.{key}={value} has no effect with optimizer {config.name}{instead}"


def _check_option(name: str, value: Any, annotation: Any) -> None:
    try:
        allowed = TypeAdapter(annotation, config={"allow_inf_nan": False})
    except PydanticUserError:  # a type that no YAML value has; the factory checks it
        return
    try:
        # JSON has lists, and no tuples: a list is accepted for a tuple.
        allowed.validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise ValueError(f"optimizer.options.{name}={value!r}: {reason}") from error


def make_optimizer(
    config: OptimizerConfig, schedule: optax.Schedule, base_width_share: float = 1.0
) -> optax.GradientTransformationExtraArgs:
    """Return the configured optimizer behind clipping by global norm.

    base_width_share: `ModelConfig.base_width_share`.

    `update` takes a scalar `is_good`. Where it is false, the state stays as it was and the updates
    are meaningless.

    Raises:
        ValueError: unknown name or options.
    """
    check_optimizer(config)
    entry = OPTIMIZERS[config.name]
    optimizer = entry.factory(config, schedule, **config.options)
    # identity keeps the structure of the state the same without clipping.
    clip = optax.identity() if config.clip_norm is None else clip_by_global_norm(config.clip_norm)
    optimizer = optimizer if entry.obeys_is_good else keep_if_bad(optimizer)
    if config.moments_dtype is not None:
        optimizer = with_rounded_moments(
            optimizer, config.moments_dtype, entry.never_negative or (), entry.exact
        )
    if base_width_share != 1 and entry.width_powers is not None:
        optimizer = _with_width(base_width_share, entry.width_powers, optimizer)
    if config.groups and entry.point is None:
        optimizer = _with_groups(config, optimizer)
    return optax.chain(clip, optimizer)


def gradient_point(config: OptimizerConfig) -> GradientPoint | None:
    """Return where the optimizer wants its gradients; None: at the parameters that it updates."""
    point = OPTIMIZERS[config.name].point
    return None if point is None else partial(point, config)


def _with_groups(
    config: OptimizerConfig, inner: optax.GradientTransformationExtraArgs
) -> optax.GradientTransformationExtraArgs:
    """Return the same transformation with the learning rates of `optimizer.groups`."""

    def update(*args: Any, **options: Any) -> tuple[Any, Any]:
        updates, state = inner.update(*args, **options)
        return scale_groups(config, updates), state

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _with_width(
    share: float, powers: tuple[float, float], inner: optax.GradientTransformationExtraArgs
) -> optax.GradientTransformationExtraArgs:
    """Return the same transformation with the learning rates of muP; the weight decay stays.

    Source: arXiv 2203.03466, table 3, and arXiv 2310.17813 for Muon, whose steps have a fixed root
    mean square here. Weight decay per step is independent of the width as in arXiv 2505.01618.
    """

    def update(grads: Any, state: Any, params: Any = None, **options: Any) -> tuple[Any, Any]:
        rates = width_rates(params, share, powers)
        # The decay is multiplied by the rate below, as the step is.
        enlarged = jax.tree.map(lambda x, rate: x / rate, params, rates)
        updates, state = inner.update(grads, state, enlarged, **options)
        return jax.tree.map(lambda update, rate: rate * update, updates, rates), state

    return optax.GradientTransformationExtraArgs(inner.init, update)


def keep_if_bad(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Return the same transformation, with its state unchanged where `is_good` is false."""

    def update(
        grads: Any, state: Any, params: Any = None, *, is_good: Any = True, **_: Any
    ) -> tuple[Any, Any]:
        updates, after = inner.update(grads, state, params)
        return updates, tree_where(is_good, after, state)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def tree_where(condition: Any, new: Any, old: Any) -> Any:
    """Return one of two pytrees by a scalar condition."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)
