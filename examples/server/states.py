"""The ring behind the engine: its form, and how one sequence becomes two, each in one place.

It is in log form: a state for each sequence and the entries of its newest tokens, so that a draft costs an entry, not a
state, and a wrong one is taken back by forgetting its entry.
"""

import itertools

import gdn


class States:
    """n_active sequences that run, and n_kept that wait as prefixes, in one ring.

    Only those that run fold their logs, so n_active spare rows do for all.
    """

    def __init__(self, layers, n_active, prefix_bytes, n_rollback):
        extents = {"n_layers": len(layers), **layers[0].extents, "form": "log", "n_spare": n_active}
        nbytes = [gdn.StateRing.nbytes_for(n_active + n, n_rollback, **extents) for n in (0, 1)]
        self.slot_nbytes = nbytes[1] - nbytes[0]
        self.n_active, self.n_kept = n_active, prefix_bytes // self.slot_nbytes
        self.ring = gdn.StateRing.create(n_active + self.n_kept, n_rollback, tag=layers[0].tag, **extents)
        self.new_id = itertools.count(1).__next__

    def acquire(self):
        """A sequence that has seen nothing."""
        seq_id = self.new_id()
        self.ring.acquire(seq_id)
        return seq_id

    def copy(self, seq_id):
        """A sequence that has seen what seq_id has; nothing of it can be taken back."""
        new_id = self.new_id()
        self.ring.copy(seq_id, new_id, depth=False)
        return new_id

    def save(self, seq_id):
        """Bytes that any ring of the same layers loads."""
        return self.ring.save(seq_id, depth=False)

    def load(self, data):
        """(id, tokens it has seen) of a sequence from `save`; ValueError if the bytes are none."""
        seq_id = self.new_id()
        self.ring.load(seq_id, data)
        return seq_id, self.ring.position(seq_id)

    def run(self, model, tokens, batch, rows, forks):
        """One step of `batch`: (logits at `rows`, ids of the forks).

        forks: [(seq_id, n), ...]: a new sequence that has seen the first n of seq_id's tokens in this step.
        """
        forks = [(seq_id, n, self.new_id()) for seq_id, n in forks]
        with self.ring.begin(batch, forks=forks) as step:
            logits = model(tokens, batch, step, rows)
        return logits, [new_id for _, _, new_id in forks]
