"""Transformers' recorded layers of every family, loaded, and what runs them on a ring."""

import numpy as np
from helpers import DATA

import gdn

FAMILIES = {
    "qwen3next": {"model_type": "qwen3_next", "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                  "linear_key_head_dim": 64, "linear_value_head_dim": 64},
    "qwen35": {"model_type": "qwen3_5_text", "linear_num_key_heads": 2, "linear_num_value_heads": 4,
               "linear_key_head_dim": 32, "linear_value_head_dim": 32},
    "olmo": {"model_type": "olmo_hybrid", "linear_num_key_heads": 3, "linear_num_value_heads": 3,
             "linear_key_head_dim": 24, "linear_value_head_dim": 48, "linear_allow_neg_eigval": True},
    "kimi": {"model_type": "kimi_linear", "linear_num_heads": 3, "linear_head_dim": 32},
}


def family_class(family):
    return gdn.KimiDeltaAttention if family == "kimi" else gdn.GatedDeltaNet


class Case:
    """A family's recorded layer, loaded from its weights."""

    def __init__(self, family):
        self.data = dict(np.load(DATA / f"{family}.npz"))
        self.config = {"hidden_size": 64, "linear_conv_kernel_dim": 4, "rms_norm_eps": float(self.data["eps"]),
                       **FAMILIES[family]}
        self.weights = {name[2:]: w for name, w in self.data.items() if name.startswith("w.")}
        self.layer = family_class(family).from_state_dict(self.weights, "", self.config)
        self.x, self.y = self.data["x"][0], self.data["y"][0]

    def ring(self, n_slots=1, n_rollback=0, **options):
        return gdn.StateRing.create(n_slots, n_rollback, n_layers=1, **self.layer.extents, **options)


def run(layer, ring, x, seq_ids, positions=None, **options):
    batch = gdn.Batch(seq_ids, positions)
    with ring.begin(batch) as step:
        return layer(x, batch, step, 0, **options)


def one_sequence(ring, case, parts, **options):
    ring.acquire(7)
    ends = np.cumsum(parts)
    return np.concatenate([run(case.layer, ring, case.x[end - n:end], [7] * n, **options)
                           for n, end in zip(parts, ends, strict=True)])


def state_of(ring, seq_id):
    """The recurrent state [key][value] and the last width - 1 inputs of the convolution."""
    with ring.begin([seq_id], [0]) as step:
        row = step.rows_in[0]
        return (ring.ssm(0).numpy()[row].swapaxes(-1, -2).copy(), ring.conv(0).numpy()[row].reshape(
            ring.conv_channels, ring.conv_width - 1).copy())
