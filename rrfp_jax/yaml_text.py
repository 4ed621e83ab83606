"""Read YAML as people mean it: ``10:13`` is text, and no number to the base of 60 as YAML 1.1 has it.

The text may come from anybody, so depth, number and size of its values are bounded, and aliases are refused: with them
a few lines stand for billions of values, which any copy, or a sentence that quotes them, would unfold.
"""

import re
from typing import Any

import yaml

from rrfp_jax.record_files import TEXT_BYTES

_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_WHOLE = re.compile(r"[-+]?(0b[01_]+|0[0-7_]+|0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$")
_REAL = re.compile(
    r"([-+]?[0-9][0-9_]*\.[0-9_]*([eE][-+][0-9]+)?|\.[0-9][0-9_]*([eE][-+][0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"
)
_MOST_DEPTH, _MOST_VALUES = 50, 50_000


class _Loader(yaml.SafeLoader):
    """YAML's own loader, except for numbers and for values without bounds."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - as the base class has it
        first: [(tag, pattern) for tag, pattern in known if tag not in (_INT, _FLOAT)]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    _depth = _num_values = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        if self.check_event(yaml.AliasEvent):
            raise _refused("an alias (*name) stands here: write the value out", mark)
        self._depth, self._num_values = self._depth + 1, self._num_values + 1
        if self._depth > _MOST_DEPTH:
            raise _refused(f"the value is nested more than {_MOST_DEPTH} deep", mark)
        if self._num_values > _MOST_VALUES:
            raise _refused(f"there are more than {_MOST_VALUES} values", mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


_Loader.add_implicit_resolver(_INT, _WHOLE, list("-+0123456789"))
_Loader.add_implicit_resolver(_FLOAT, _REAL, list("-+0123456789."))


def read_yaml(text: str) -> Any:
    """Returns the value of a YAML text.

    Raises yaml.YAMLError if the text is no YAML, or YAML without bounds, and ValueError for dates and numbers that do
    not exist.
    """
    if len(text) > TEXT_BYTES:
        raise yaml.YAMLError(f"it has more than {TEXT_BYTES:,} characters")
    return yaml.load(text, _Loader)


def _refused(why: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(None, None, why, mark)
