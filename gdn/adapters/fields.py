"""Fields of a model's configuration: those a family's own class reads, and those that mean another layer where read."""

import re
from collections.abc import Mapping

SILU = ("silu", "swish")
BOUNDED = 'overrides={"gate": "bounded", "lower_bound": -5.0}'


def _gates(x, c):
    return x in (SILU if c.activation == "silu" else (c.activation,))


# Names of fields; how to say what they do, in overrides of these; whether a value means what the layer does anyway.
MEANINGS = [(re.compile(pattern), said, agrees) for pattern, said, agrees in (
    (r"(lower_bound|decay_min)$", ("gate", "lower_bound"), lambda x, c: x == c.lower_bound),
    (r"safe_(gate|decay)$", ("gate", "lower_bound"), lambda x, c: bool(x) == (c.gate == "bounded")),
    (r"neg(ative)?_?eig", ("beta_factor",), lambda x, c: c.beta_factor == (2 if x else 1)),
    (r"^((linear|kda|gdn)_)?beta_(factor|scale)$", ("beta_factor",), lambda x, c: x == c.beta_factor),
    (r"^((linear|kda|gdn|o|output|norm|attn)_)*gate_(type|act|activation|act_fn|fn|func)$", ("activation",), _gates),
    (r"^((linear|kda|gdn)_)?use_(output_)?gate$|^(linear|kda|gdn)_output_gate$", ("activation",), lambda x, c: bool(x)),
    (r"^((linear|kda|gdn|gated|o|out|output)_)norm_eps$", ("norm_eps",), lambda x, c: x == c.norm_eps),
    (r"^(linear|kda|gdn|gated|o|out|output)_.*zero_?cent", ("norm_offset",), lambda x, c: bool(x) == (c.norm_offset == 1)),
    (r"full_rank", (), lambda x, c: bool(x) == (c.g_rank is None)),
    (r"no_kda_lora$", (), lambda x, c: {c.f_rank is None, c.g_rank is None} == {bool(x)}),
    (r"use_kda_lora$", (), lambda x, c: {c.f_rank is None, c.g_rank is None} == {not x}),
    (r"use_(short_)?conv$", (), lambda x, c: bool(x)),
    (r"conv_(act|activation)$", (), lambda x, c: x in SILU),
    (r"qk_l2_?norm$", (), lambda x, c: bool(x)),
)]


class Fields:
    """Fields of a mapping or an object by name; None counts as absent.  `read` gathers those asked for."""

    def __init__(self, config):
        self.config, self.read = config, set()
        self.is_mapping = isinstance(config, Mapping) or hasattr(config, "keys")

    def get(self, name):
        self.read.add(name)
        if self.is_mapping:
            return self.config[name] if name in self.config.keys() else None
        return getattr(self.config, name, None)

    def __contains__(self, name):
        return name in self.names()

    def names(self):
        return [str(name) for name in (self.config.keys() if self.is_mapping else dir(self.config))]

    def __call__(self, name, *default):
        """The field's value, or the default.  ValueError: it is absent and there is none."""
        value = self.get(name)
        if value is not None:
            return value
        if default:
            return default[0]
        other = self.get("head_dim") if name.endswith("head_dim") else None
        raise ValueError(f"config lacks {name}" + (f"; head_dim, {other!r}, is the other layers'" if other is not None else ""))

    def inner(self, name):
        """The fields of a configuration inside this one, or None."""
        value = self.get(name)
        return None if value is None else Fields(value)


def refuse_unread(groups, c, overrides):
    """ValueError: a field that nobody read, of one of the `Fields` in groups, means another layer than c.

    Fields that ``overrides`` speak of are answered.
    """
    for fields in groups:
        for name in fields.names():
            for pattern, said, agrees in () if name in fields.read else MEANINGS:
                value = fields.get(name) if pattern.search(name) else None
                if value is None or agrees(value, c) or set(said) & set(overrides or ()):
                    continue
                way = BOUNDED if "gate" in said else f"overrides={{{said[0]!r}: ...}}" if said else ""
                raise ValueError(f"config: {name} is {value!r}, which {c.family}'s own class does not read and which would mean "
                                 f"another layer{way and '; if that is meant, say it with ' + way}")
