"""Every extension point is a `Registry`; what it refuses is tested here once."""

import pytest

from registry import Registry


def test_a_registry_refuses_a_taken_and_an_unknown_name() -> None:
    colours: Registry[int] = Registry("colour")
    colours["red"] = 1
    assert colours.register("blue")(2) == 2
    assert list(colours.items()) == [("red", 1), ("blue", 2)]
    for add in (lambda: colours.register("red")(3), lambda: colours.__setitem__("red", 3)):
        with pytest.raises(ValueError, match="colour 'red' is registered twice; use another"):
            add()
    with pytest.raises(ValueError, match="unknown colour 'green'; use one of red, blue"):
        colours["green"]
    assert colours["red"] == 1
