"""A pipeline whose call has the defaults of its model.

Python looks ``__call__`` up on the class, so the instance gets a class of its own: derived from the
class of the pipeline, with its name and module, and one for all pipelines of a model. Whatever
looks at the name, the signature or the base class of a pipeline finds what it expects.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

__all__ = ["bind_defaults"]

# An argument that rules out a default: a pipeline refuses both.
_INSTEAD = {"negative_prompt_embeds": "negative_prompt"}
_KINDS: dict[tuple[type, str], type] = {}


def bind_defaults(pipe: Any, model: str, defaults: Mapping[str, Any]) -> None:
    """Give the call of a pipeline other defaults; an argument that is given always wins.

    Args:
        pipe: the pipeline, changed in place.
        model: whose defaults they are; pipelines of one model share a class.
        defaults: the values by the name of the argument.

    Example:
        >>> class Pipe:
        ...     def __call__(self, prompt, height=1024, width=1024):
        ...         return prompt, height, width
        >>> pipe = Pipe()
        >>> bind_defaults(pipe, "small", {"height": 64, "width": 64})
        >>> pipe("a cat"), pipe("a cat", 96), type(pipe).__name__, isinstance(pipe, Pipe)
        (('a cat', 64, 64), ('a cat', 96, 64), 'Pipe', True)
    """
    base = type(pipe)
    if (base, model) not in _KINDS:
        _KINDS[base, model] = _derive(base, model, dict(defaults))
    pipe.__class__ = _KINDS[base, model]


def _derive(base: type, model: str, defaults: dict[str, Any]) -> type:
    original: Any = base.__call__
    signature = inspect.signature(original)
    names = list(signature.parameters)[1:]

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {*names[: len(args)], *kwargs}
        given |= {_INSTEAD[name] for name in given if name in _INSTEAD}
        missing = {name: value for name, value in defaults.items() if name not in given}
        return base.__call__(self, *args, **missing, **kwargs)

    def reduce(self: Any, _protocol: object) -> tuple[Any, ...]:
        # By its name alone, pickle would find the class of the pipeline, and refuse.
        return _restore, (base, model, defaults), vars(self)

    shown: Any = call
    shown.__signature__ = signature.replace(
        parameters=[
            parameter.replace(default=defaults.get(name, parameter.default))
            for name, parameter in signature.parameters.items()
        ]
    )
    same = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(base.__name__, (base,), {**same, "__call__": call, "__reduce_ex__": reduce})


def _restore(base: type, model: str, defaults: Mapping[str, Any]) -> Any:
    """A pipeline without its parts, which copying and unpickling fill in."""
    pipe: Any = object.__new__(base)
    bind_defaults(pipe, model, defaults)
    return pipe
