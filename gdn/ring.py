"""The state ring: one flat buffer of per-sequence states, shared with C and other processes, with exact rollback."""

import numpy as np

from gdn import _ring
from gdn._ring import RingFullError, StateLostError, Step

__all__ = ["RingFullError", "StateLostError", "StateRing", "Step"]


class StateRing(_ring.Ring):
    """Attach to the ring that a buffer holds.

    buffer: any writable, contiguous buffer at a multiple of 4 bytes: bytearray, mmap, shared memory, array, Tensor.
    The ring keeps it alive (and open) until the ring and its views are gone.  ValueError if it holds no ring, is too
    short, damaged, or of another abi.

    Every slot holds one sequence: a recurrent and a convolution state for each layer, in n_planes planes.  A step
    writes each token's state to the next plane, so that `rollback` moves no bytes; see gdn.h for the buffer's layout.

    Methods (errors: KeyError for an unknown sequence; ValueError for one that is already acquired, in a step or being
    copied; StateLostError for a lost one, except in reset, load and release; a refused call changes nothing):

    acquire(seq_id, slot=None) -> slot   a new sequence with zero state; RingFullError, IndexError for no such slot
    release(seq_id)                      give its slot back
    reset(seq_id)                        zero state, position 0, nothing to roll back
    begin(seq_ids, n_tokens) -> Step     rows for a step of n_tokens[i] tokens of sequence seq_ids[i]; or begin(batch)
    rollback(seq_id, n)                  take the last n tokens back; ValueError if n > max_rollback
    max_rollback(seq_id) -> int          after a committed step at least min(n_rollback, its tokens + what a rollback left)
    position(seq_id) -> int              tokens the state has seen
    copy(src_seq, dst_seq) -> slot       an independent sequence with the same states and depth
    save(seq_id) -> bytes                everything of a sequence, with its extents and a checksum
    load(seq_id, data) -> slot           a sequence from save, of a ring with the same layers; ValueError if not
    slot(seq_id), seq_ids, n_free        what is where
    ssm(layer) -> Tensor                 ne (S_k, S_v, H_v, n_planes * n_slots), row = plane * n_slots + slot; zero-copy
    conv(layer) -> Tensor                ne (conv_width - 1, conv_channels, 1, n_planes * n_slots)
    n_slots, n_rollback, n_planes, n_layers, H_v, S_k, S_v, conv_channels, conv_width, nbytes, address
    extents                              of one layer: a dict of H_v, S_k, S_v, conv_channels, conv_width
    """

    @classmethod
    def create(cls, n_slots, n_rollback=0, *, n_layers, H_v, S_k, S_v, conv_channels=0, conv_width=1, spare=None,
               buffer=None):
        """Make a ring, in the given buffer (what it held is gone) or in memory of its own.

        n_slots: sequences.  n_rollback: tokens that can be taken back.  spare: further planes; with 1 (the default if
        n_rollback > 0) a step that fails leaves the committed state intact; with 0 (the default otherwise) a failed
        step of more than n_rollback tokens loses it, at n_rollback 0 because states are updated in place.
        ValueError: extents out of range, or a buffer that is too short, read-only or misaligned.
        """
        extents = _extents(n_slots, n_rollback, n_layers, H_v, S_k, S_v, conv_channels, conv_width, spare)
        if buffer is None:
            nbytes = _ring.nbytes_for(extents)
            memory = np.zeros(nbytes + 64, np.uint8)      # untouched pages cost nothing
            buffer = memory[-memory.ctypes.data % 64:][:nbytes]
        _ring.init(extents, buffer)
        return cls(buffer)

    @staticmethod
    def nbytes_for(n_slots, n_rollback=0, *, n_layers, H_v, S_k, S_v, conv_channels=0, conv_width=1, spare=None):
        """Bytes that `create` needs for the same arguments, wherever the buffer lies."""
        return _ring.nbytes_for(_extents(n_slots, n_rollback, n_layers, H_v, S_k, S_v, conv_channels, conv_width,
                                         spare))

    def __repr__(self):
        return (f"gdn.StateRing(n_slots={self.n_slots}, n_rollback={self.n_rollback}, n_planes={self.n_planes}, "
                f"n_layers={self.n_layers}, H_v={self.H_v}, S_k={self.S_k}, S_v={self.S_v}, "
                f"conv_channels={self.conv_channels}, conv_width={self.conv_width}, nbytes={self.nbytes})")


def _extents(n_slots, n_rollback, n_layers, H_v, S_k, S_v, conv_channels, conv_width, spare):
    return {"n_slots": n_slots, "n_rollback": n_rollback, "n_layers": n_layers, "H_v": H_v, "S_k": S_k, "S_v": S_v,
            "conv_channels": conv_channels, "conv_width": conv_width, "spare": spare}
