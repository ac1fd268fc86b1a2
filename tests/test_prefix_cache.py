"""The prefix cache example, and trees of drafts, on the trained model: what they give is what plain reading gives."""

import sys
from pathlib import Path

import numpy as np
import pytest

import gdn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from prefix_cache import PrefixCache
from server.model import Model

TEXT = b"ROMEO.\nBut soft, what light through yonder window breaks?\nIt is the east and Juliet is the sun!\n" * 3


@pytest.fixture(scope="module")
def model():
    return Model()


def read_plainly(model, prompt):
    ring = gdn.StateRing.create(1, n_layers=len(model.layers), **model.layers[0].extents)
    ring.acquire(0)
    batch = gdn.Batch([0] * len(prompt))
    with ring.begin(batch) as step:
        return model(np.frombuffer(prompt, np.uint8), batch, step, [-1])[0]


def close(a, b):
    return np.abs(a - b).max() < 1e-3 * np.abs(b).max()


def test_hits_equal_recomputation(model):
    cache = PrefixCache(model, 64 << 20, every=32)
    for prompt in (TEXT[:200], TEXT[:200], TEXT[:201], TEXT[:100], TEXT[:60] + b"Nay", b"R", TEXT[:2], TEXT[:200]):
        known = cache.kept.find(prompt[:-1])[0]
        seq_id, logits = cache.read(prompt)
        assert close(logits, read_plainly(model, prompt))
        assert cache.ring.position(seq_id) == len(prompt)
        cache.ring.release(seq_id)
    assert known == 199                         # a prompt that is cached as a whole: its last token alone is read
    assert sorted(n for n in range(1, 200) if cache.kept.has(TEXT[:n]) and n % 32 == 0) == list(range(32, 200, 32))


def test_the_limit_is_kept(model):
    slot = gdn.StateRing.nbytes_for(4096, n_layers=len(model.layers), **model.layers[0].extents) / 4096
    cache = PrefixCache(model, 3.5 * slot, every=1000)
    assert cache.ring.n_slots == 4 and cache.ring.nbytes <= 4.1 * slot + 4096
    for i, prompt in enumerate((b"abcd", b"efgh", b"ijkl", b"abcz", b"mnop")):
        cache.ring.release(cache.read(prompt)[0])
        assert len(cache.kept) == min(3, i + 1)
    assert cache.kept.has(b"abc") and not cache.kept.has(b"efg") and cache.kept.has(b"mno")      # used since; the oldest
    with pytest.raises(ValueError, match="a state takes"):
        PrefixCache(model, slot / 2)


# ---------------------------------------------------------------- trees

def greedy(model, prompt, n):
    ring = gdn.StateRing.create(1, n_layers=len(model.layers), **model.layers[0].extents)
    ring.acquire(0)
    text, tokens = bytearray(prompt), np.frombuffer(prompt, np.uint8)
    while len(text) < len(prompt) + n:
        batch = gdn.Batch([0] * len(tokens))
        with ring.begin(batch) as step:
            tokens = model(tokens, batch, step, [-1]).argmax(-1)
        text += bytes(tokens.tolist())
    return bytes(text)


def drafts(text, most):
    """A tree of what followed the last bytes of the text before: tokens and parents, the first the text's last byte."""
    tokens, parents, children = [text[-1]], [-1], {}
    for width in (6, 4, 3, 2):
        end, found = len(text) - 1, 0
        while found < 3 and (end := text.rfind(text[-width:], 0, end + width - 1)) >= 0:
            at = 0
            for token in text[end + width:end + width + 5]:
                if (at, token) not in children:
                    if len(tokens) == most:
                        return tokens, parents
                    children[at, token] = len(tokens)
                    tokens.append(token)
                    parents.append(at)
                at = children[at, token]
            found += 1
    return tokens, parents


def test_trees_of_drafts_write_what_greedy_decoding_writes(model):
    n_rollback, n, prompt = 15, 400, TEXT[:150]
    ring = gdn.StateRing.create(1, n_rollback, n_layers=len(model.layers), form="log", log_capacity=32,
                                **model.layers[0].extents)
    ring.acquire(0)
    batch = gdn.Batch([0] * (len(prompt) - 1))
    with ring.begin(batch) as step:
        model(np.frombuffer(prompt, np.uint8)[:-1], batch, step, [-1])
    text, steps, branches = bytearray(prompt), 0, 0
    while len(text) < len(prompt) + n:
        tokens, parents = drafts(bytes(text), n_rollback + 1)
        branches += len(set(parents)) < len(parents)
        batch = gdn.Batch([0] * len(tokens), parents=parents)
        with ring.begin(batch) as step:
            best = model(np.array(tokens), batch, step, slice(None)).argmax(-1)
        path, at = [0], 0
        while (following := [t for t in range(len(tokens)) if parents[t] == at and tokens[t] == best[at]]):
            at = following[0]
            path.append(at)
        ring.accept(0, path)
        text += bytes([tokens[t] for t in path[1:]] + [int(best[at])])
        steps += 1
        assert ring.position(0) == len(text) - 1
    assert bytes(text[:len(prompt) + n]) == greedy(model, prompt, n)
    assert steps < 0.8 * n and branches > 20
