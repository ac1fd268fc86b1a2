"""The binding of llama.cpp is right: it gives the logits recorded from transformers, and nodes that fit together."""

import numpy as np
import pytest
from helpers import DATA, assert_close


@pytest.mark.parametrize("name", ["qwen3next", "qwen35"])
def test_recorded_logits(llama, name):
    with np.load(DATA / f"{name}.npz") as file:
        ids, logits, x, y = (file[key][0] for key in ("ids", "logits", "x", "y"))
    context = llama.model(DATA / f"{name}.gguf").context(watch={"attn_norm-1", "linear_attn_out-1"})
    parts = np.split(ids, [70, 71, 72, 73])
    assert_close(np.concatenate([context.decode(part) for part in parts]), logits, "logits")
    for node, ref in (("attn_norm-1", x), ("linear_attn_out-1", y)):
        seen = [part.reshape(-1, ref.shape[1]) for part in context.seen[node]]
        assert [len(part) for part in seen] == [len(part) for part in parts]
        assert_close(np.concatenate(seen), ref, node)


def test_sequences_rollback_and_copies(llama):
    context = llama.model(DATA / "qwen35.gguf").context(n_seq_max=3, n_rs_seq=3)
    alone = context.decode([1, 2, 3, 4, 5])
    both = context.decode([1, 2, 3, 1, 2], pos=[0, 1, 2, 0, 1], seq_id=[1, 1, 1, 2, 2])
    assert_close(both, alone[[0, 1, 2, 0, 1]], "two sequences at once")
    assert context.rollback(0, 3)
    assert_close(context.decode([4, 5]), alone[3:], "after a rollback")
    context.rollback(2, 0)
    context.copy(1, 2)
    assert_close(context.decode([4, 5], seq_id=2), alone[3:], "a copy goes on")


def test_what_llama_refuses_is_an_error(llama, tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"no model")
    with pytest.raises(RuntimeError, match="failed to load"):
        llama.model(tmp_path / "x.gguf")
