"""Registry of learning-rate schedules, all behind a linear warm-up.

A new schedule is one function with `@register("name")`: (config, steps, warmup) -> the learning
rate of step 0, 1, ... after warm-up, in a run of `steps` steps of which `warmup` warm up.
"""

import math
from collections.abc import Callable, Iterator

import jax.numpy as jnp
import optax

from registry import Registry
from training.optimizers import OptimizerConfig

Factory = Callable[[OptimizerConfig, int, int], optax.Schedule]
SCHEDULES: Registry[Factory] = Registry("schedule")
register = SCHEDULES.register


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Return the learning rate of optimizer steps 0 to `steps - 1`. Raises: ValueError.

    steps: `training.steps`, unless `optimizer.schedule_steps` overrides it.
    """
    steps = config.schedule_steps or steps
    peak, warmup = config.learning_rate, min(config.warmup_steps, steps)
    after = SCHEDULES[config.schedule](config, steps, warmup)
    # The first step has learning rate peak / warmup, not 0.
    rise = optax.linear_schedule(peak / max(1, warmup), peak, max(1, warmup - 1))
    return optax.join_schedules([rise, after], [warmup])


def describe_schedule_warnings(config: OptimizerConfig, steps: int) -> Iterator[str]:
    """Yield a line if the schedule of a run of `steps` steps is not the one that was asked for."""
    length = config.schedule_steps or steps
    key = "optimizer.schedule_steps" if config.schedule_steps else "training.steps"
    stable = length - config.warmup_steps
    if stable < 0:
        yield (
            f"optimizer.warmup_steps={config.warmup_steps} is more than the {length} steps of the "
            f"schedule, so the rate rises over all of them; lower it, or raise {key}"
        )
    if stable == 0 < steps - length and config.schedule not in ("inverse_sqrt", "constant"):
        yield (
            f"optimizer.warmup_steps={config.warmup_steps} leaves no step of the schedule for a "
            f"decay, so the rate falls at once after step {length}; lower it, or raise {key}"
        )
    if config.schedule in ("cosine", "linear", "inverse_sqrt", "constant") and config.decay_steps:
        yield (
            f"optimizer.decay_steps={config.decay_steps} has no effect with optimizer.schedule="
            f"{config.schedule}; set optimizer.schedule=wsd for a decay at the end"
        )
    default = OptimizerConfig.model_fields["final_fraction"].default
    if config.schedule in ("inverse_sqrt", "constant") and config.final_fraction != default:
        yield (
            f"optimizer.final_fraction={config.final_fraction} has no effect with "
            f"optimizer.schedule={config.schedule}; use cosine, linear or wsd for a decay to it"
        )
    if config.schedule == "wsd" and config.decay_steps > stable:
        yield (
            f"optimizer.decay_steps={config.decay_steps} is more than the {max(0, stable)} steps "
            f"after warm-up, so that all of them decay; lower it, or raise {key}"
        )


def describe_change(
    before: tuple[OptimizerConfig, int],
    now: tuple[OptimizerConfig, int],
    step: int,
    num_skipped: int = 0,
) -> str | None:
    """Return a line on the learning rate after `step`, unless the schedule is the same there.

    Args:
        before: configuration and `training.steps` of the checkpoint of `step`.
        now: those of this run.
        step: number of finished steps.
        num_skipped: those of them that changed nothing, which schedules do not count.
    """
    (old, old_steps), (new, new_steps) = before, now
    if old.schedule not in SCHEDULES:  # of a plugin that is no longer imported
        return f"schedule {old.schedule!r} is no longer registered; learning rates are not compared"
    old_length, new_length = old.schedule_steps or old_steps, new.schedule_steps or new_steps
    schedule = make_schedule(old, old_steps)
    updates = step - num_skipped
    last, kept = (float(schedule(max(0, count))) for count in (updates - 1, updates))
    rate = float(make_schedule(new, new_steps)(updates))
    is_same = math.isclose(rate, kept, rel_tol=1e-6)
    if is_same and old_length == new_length:
        return None
    line = f"learning rate {last:.3g} at step {step}, {rate:.3g} at step {step + 1}"
    if old_length == new_length:
        return line
    if old.schedule != new.schedule:
        change = f"was {old.schedule} over {old_length} steps, and is now {new.schedule} over"
        return f"the schedule {change} {new_length}: {line}"
    lengths = f"covered {old_length} steps and now covers {new_length}"
    line = f"the {new.schedule} schedule {lengths}: {line}"
    if is_same:
        return line
    as_long = new.model_copy(update={"schedule_steps": old_length})
    rate = float(make_schedule(as_long, new_steps)(updates))
    return (
        f"{line}; optimizer.schedule_steps={old_length} keeps the old length, {rate:.3g} at step "
        f"{step + 1}"
    )


@register("constant")
def constant(config: OptimizerConfig, steps: int, warmup: int) -> optax.Schedule:
    """Return the peak at every step."""
    return optax.constant_schedule(config.learning_rate)


@register("cosine")
def cosine(config: OptimizerConfig, steps: int, warmup: int) -> optax.Schedule:
    """Return half a cosine from the peak to `final_fraction` of it."""
    return optax.cosine_decay_schedule(
        config.learning_rate, max(1, steps - warmup), config.final_fraction
    )


@register("linear")
def linear(config: OptimizerConfig, steps: int, warmup: int) -> optax.Schedule:
    """Return a straight line from the peak to `final_fraction` of it."""
    peak = config.learning_rate
    return optax.linear_schedule(peak, peak * config.final_fraction, max(1, steps - warmup))


@register("inverse_sqrt")
def inverse_sqrt(config: OptimizerConfig, steps: int, warmup: int) -> optax.Schedule:
    """Return the peak times sqrt(warmup / step), which does not depend on the end of the run."""
    first = max(1, warmup)
    # Below 0 before the end of the warm-up, where `join_schedules` selects another value.
    return lambda count: config.learning_rate * jnp.sqrt(first / (first + jnp.maximum(count, 0)))


@register("wsd")
def wsd(config: OptimizerConfig, steps: int, warmup: int) -> optax.Schedule:
    """Return the peak, then a linear decay to `final_fraction` of it over `decay_steps`."""
    peak = config.learning_rate
    decay = min(config.decay_steps or max(1, steps // 10), steps - warmup)
    down = optax.linear_schedule(peak, peak * config.final_fraction, max(1, decay))
    return optax.join_schedules([optax.constant_schedule(peak), down], [steps - warmup - decay])
