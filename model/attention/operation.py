"""Attention by name: the registry, and where the words of attention are imported from.

An operation is one name with one form per platform, or a native one that runs anywhere. Asking for
what no form of a name can do is an error, never a silent loss of a feature. Choosing among names is
`model/attention/dispatch.py`.
"""

from collections.abc import Callable

from model.attention.bound import BoundOperation
from model.attention.capabilities import AnyFunction, Capabilities, Feature, Form, FormName
from model.attention.metadata import AttnShardingRules, OperationMetadata

__all__ = [
    "RESULT_NAME",
    "AttnShardingRules",
    "BoundOperation",
    "Capabilities",
    "Feature",
    "Form",
    "OperationMetadata",
    "OperationRegistry",
]

RESULT_NAME = "attention_result"
"""`checkpoint_name` of results and logsumexps that a backward pass had better not compute again."""

_FORMS: dict[str, dict[FormName, Form]] = {}


class OperationRegistry:
    """Names to operations; filled when `model.attention` is imported. The first is the oracle."""

    @staticmethod
    def register(
        *names: str, capabilities: Capabilities, form: FormName = "native"
    ) -> Callable[[AnyFunction], AnyFunction]:
        """Decorator: registers a function as one form of one or several names.

        Raises: ValueError if a name has that form already.
        """

        def decorate(function: AnyFunction) -> AnyFunction:
            for name in names:
                forms = _FORMS.setdefault(name, {})
                if form in forms:
                    raise ValueError(f"attention operation {name!r} ({form}) is registered twice")
                forms[form] = Form(name, form, function, capabilities)
            return function

        return decorate

    @staticmethod
    def get(name: str) -> tuple[Form, ...]:
        """The forms of this name, `native` last. Raises: ValueError listing the names."""
        if name not in _FORMS:
            known = ", ".join(_FORMS)
            raise ValueError(f"unknown attention operation {name!r}; registered: {known}")
        forms = _FORMS[name]
        return tuple(sorted(forms.values(), key=lambda form: form.name == "native"))

    @staticmethod
    def create(name: str, metadata: OperationMetadata) -> BoundOperation:
        """The operation of this name on the mesh of `metadata`. Raises: ValueError as `get`."""
        return BoundOperation(name, OperationRegistry.get(name), metadata)

    @staticmethod
    def list_implementations() -> list[str]:
        """All registered names, the oracle first."""
        return list(_FORMS)
