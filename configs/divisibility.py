"""Checks that one number of the configuration divides another, with the numbers that would."""

import math

from configs.reading import ConfigError


def check_multiple(name: str, value: int, parts_name: str, parts: int, unit: int) -> None:
    """Raise a ConfigError that proposes multiples of `unit` if the parts do not divide a value."""
    if value % parts:
        raise ConfigError(
            f"{name}={value} is not divisible by {parts_name}={parts}; use "
            f"{name}={multiples(value, unit)}, or another mesh"
        )


def multiples(value: int, parts: int) -> str:
    """Return the two multiples of a number next to a value, such as `8 or 16`."""
    below = value // parts * parts
    return f"{below} or {below + parts}" if below else f"{parts}"


def check_divides(
    name: str,
    value: int,
    divisor_name: str,
    divisor: int,
    or_else: str = "",
    *,
    even: bool = False,
) -> None:
    """Check that one number divides another; even: propose only divisors with an even quotient."""
    if value % divisor == 0:
        return
    small = [n for n in range(1, math.isqrt(value) + 1) if value % n == 0]
    divisors = [*small, *(value // n for n in small)]
    divisors = [n for n in divisors if value // n % 2 == 0 or not even] or divisors
    below = max((n for n in divisors if n < divisor), default=1)
    above = min((n for n in divisors if n > divisor), default=below)
    legal = f"{below} or {above}" if above != below else str(below)
    raise ConfigError(
        f"{name}={value} is not divisible by {divisor_name}={divisor}; use {divisor_name}={legal}"
        + (f", or {or_else}" if or_else else f", or another {name}")
    )
