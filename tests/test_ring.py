"""The state ring: one test for each thing that users of other state caches ran into, and for every refusal."""

import mmap
import os
import threading
import zlib

import numpy as np
import pytest
from ring_model import EMPTY, EXTENTS, LAYERS, Lengths, Truth, committed_row, pool, read_rows, run_layers

import gdn


class Run:
    """A ring, sequences by their tokens, and a truth for each."""

    def __init__(self, n_slots=3, n_rollback=4, **options):
        self.ring = gdn.StateRing.create(n_slots, n_rollback, **EXTENTS, **options)
        self.truth, self.keys = Truth(), {}

    def acquire(self, *ids):
        for seq_id in ids:
            self.ring.acquire(seq_id)
            self.keys[seq_id] = []

    def step(self, **sizes):
        """step(s0=2, s1=1): so many tokens of sequences 0 and 1, committed."""
        ids = [int(name[1:]) for name in sizes]
        new = []
        for seq_id, size in zip(ids, sizes.values(), strict=True):
            mine = []
            for _ in range(size):
                mine.append(self.truth.token(([EMPTY, *self.keys[seq_id]] + mine)[-1]))
            new.append(mine)
        with self.ring.begin(ids, list(sizes.values())) as step:
            run_layers(self.ring, self.truth, step, new)
        for seq_id, mine in zip(ids, new, strict=True):
            self.keys[seq_id] += mine
        return step

    def rollback(self, seq_id, n):
        self.ring.rollback(seq_id, n)
        self.keys[seq_id] = self.keys[seq_id][:len(self.keys[seq_id]) - n]

    def check(self, seq_id, keys=None):
        keys = self.keys[seq_id] if keys is None else keys
        assert self.ring.position(seq_id) == len(keys)
        self.truth.check([EMPTY, *keys][-1], *self.rows(seq_id))

    def rows(self, seq_id):
        return read_rows(self.ring, committed_row(self.ring, seq_id))

    def bits(self, seq_id):
        return b"".join(x.tobytes() for part in self.rows(seq_id) for x in part)


@pytest.fixture
def one():
    run = Run()
    run.acquire(0)
    return run


# ---------------------------------------------------------------- rollback

def test_rolling_back_a_whole_batch(one):
    for _ in range(10):
        one.step(s0=1)
    before = one.bits(0)
    one.step(s0=3)
    one.rollback(0, 3)
    one.check(0)
    assert one.bits(0) == before


def test_rollback_across_a_shorter_batch(one):
    one.step(s0=4)
    one.step(s0=1)
    one.rollback(0, 2)
    one.check(0)


def test_old_snapshots_after_fewer_tokens_than_planes(one):
    one.step(s0=2)
    assert one.ring.max_rollback(0) == 2        # to the zero state, which counts
    one.rollback(0, 1)
    one.check(0)
    one.rollback(0, 1)
    one.check(0)
    with pytest.raises(ValueError, match="by 0 tokens, not by 1"):
        one.ring.rollback(0, 1)


def test_conv_window_is_part_of_the_snapshot(one):
    other = Run()
    other.acquire(0)
    other.truth = one.truth
    one.step(s0=3)
    one.rollback(0, 2)
    other.keys[0] = one.keys[0][:]
    with other.ring.begin([0], [1]) as step:
        run_layers(other.ring, other.truth, step, [one.keys[0]])
    assert one.bits(0) == other.bits(0)


def test_sequences_accept_different_counts():
    run = Run()
    run.acquire(0, 1, 2)
    run.step(s0=2, s1=2, s2=2)
    before = run.bits(0)
    run.step(s0=3, s1=3, s2=3)
    for seq_id, accepted in ((0, 0), (1, 1), (2, 3)):
        run.rollback(seq_id, 3 - accepted)
        run.check(seq_id)
    assert run.bits(0) == before                # zero accepted: that row as it was
    run.step(s2=1, s0=2, s1=5)
    for seq_id in range(3):
        run.check(seq_id)


def test_rollback_twice_and_refused_rollback(one):
    one.step(s0=7)
    one.rollback(0, 2)
    one.rollback(0, 1)
    one.check(0)
    depth, before = one.ring.max_rollback(0), one.bits(0)
    with pytest.raises(ValueError, match=f"by {depth} tokens, not by {depth + 1}"):
        one.ring.rollback(0, depth + 1)
    with pytest.raises(ValueError, match="negative"):
        one.ring.rollback(0, -1)
    assert (one.ring.position(0), one.ring.max_rollback(0), one.bits(0)) == (4, depth, before)


def test_verify_accept_decode_equals_sequential(one):
    one.step(s0=4)
    one.rollback(0, 1)
    one.step(s0=1)
    one.check(0)


@pytest.mark.parametrize("n_rollback", [0, 1, 3])
@pytest.mark.parametrize("size", [1, 2, 4, 5, 9, 70])
def test_depth_after_a_step(n_rollback, size):
    run = Run(n_rollback=n_rollback)
    run.acquire(0)
    run.step(s0=size)
    assert run.ring.max_rollback(0) == min(n_rollback, size)
    run.step(s0=1)
    assert run.ring.max_rollback(0) == min(n_rollback, size + 1)
    run.rollback(0, run.ring.max_rollback(0))
    run.check(0)


def test_rollback_moves_no_state_bytes(one):
    one.step(s0=5)
    before = [one.ring.ssm(layer).numpy().tobytes() + one.ring.conv(layer).numpy().tobytes() for layer in range(LAYERS)]
    one.rollback(0, 3)
    assert before == [one.ring.ssm(layer).numpy().tobytes() + one.ring.conv(layer).numpy().tobytes()
                      for layer in range(LAYERS)]


@pytest.mark.parametrize("n_rollback", [0, 3])
@pytest.mark.parametrize("sizes", [[130], [65, 65], [1, 129], [129, 1], [1] * 130], ids=str)
def test_any_split_of_a_prompt(sizes, n_rollback):
    """Outputs of every token (checked in the step) and the last state do not restart anywhere."""
    run = Run(n_rollback=n_rollback)
    run.acquire(0)
    for size in sizes:
        run.step(s0=size)
    run.check(0)


def test_no_tokens_change_nothing(one):
    one.step(s0=2)
    before = one.ring.save(0)
    step = one.step(s0=0)
    assert step.rows_out.tolist() == [[-1]]
    assert one.ring.save(0) == before
    with one.ring.begin([], []) as step:
        assert step.rows_in.shape == (0,) and step.rows_out.shape == (0, 1)


# ---------------------------------------------------------------- freshness

@pytest.mark.parametrize("fill", ["nan", "0x3e"])
@pytest.mark.parametrize("n_rollback", [0, 2])
def test_a_new_sequence_sees_nothing_old(fill, n_rollback):
    ring = gdn.StateRing.create(2, n_rollback, buffer=pool(fill, 2, n_rollback, None), **EXTENTS)
    for seq_id in range(4):
        ring.acquire(seq_id)
        assert not any(x.any() for part in read_rows(ring, committed_row(ring, seq_id)) for x in part)
        assert (ring.position(seq_id), ring.max_rollback(seq_id)) == (0, 0)
        for layer in range(LAYERS):
            ring.ssm(layer).numpy()[:] = np.nan
            ring.conv(layer).numpy()[:] = np.nan
        ring.reset(seq_id)
        assert not any(x.any() for part in read_rows(ring, committed_row(ring, seq_id)) for x in part)
        ring.release(seq_id)


def test_position_zero_starts_afresh(one):
    one.step(s0=6)
    key = [one.truth.token(EMPTY)]
    step = one.ring.begin(Lengths([0], [1], [True]))
    assert step.rows_in.tolist() == [-1]
    run_layers(one.ring, one.truth, step, [key])
    step.abort()
    one.check(0)                                # not committed: as it was
    with one.ring.begin(Lengths([0], [1], [True])) as step:
        run_layers(one.ring, one.truth, step, [key])
    one.keys[0] = key
    one.check(0)
    assert one.ring.max_rollback(0) == 1
    one.rollback(0, 1)
    one.check(0)                                # its start is a snapshot too


def test_a_position_that_does_not_continue(one):
    one.step(s0=2)
    batch = Lengths([0], [1], [False])
    batch.first_positions = np.array([3])
    with pytest.raises(ValueError, match="stands at position 2, the step begins at 3"):
        one.ring.begin(batch)
    batch.first_positions = np.array([2])
    one.ring.begin(batch).abort()


def test_full_ring_names_its_size():
    run = Run(n_slots=3)
    run.acquire(1, 2, 3)
    with pytest.raises(gdn.RingFullError, match="all 3 slots"):
        run.ring.acquire(4)
    run.ring.release(2)
    assert run.ring.acquire(4) == 1
    assert run.ring.seq_ids == [1, 4, 3] and run.ring.n_free == 0


# ---------------------------------------------------------------- steps that fail

class Boom(Exception):
    pass


@pytest.mark.parametrize("size", [1, 3, 5, 9])
def test_a_failed_step_leaves_the_state(one, size):
    one.step(s0=3)
    before = one.bits(0)
    with pytest.raises(Boom), one.ring.begin([0], [size]) as step:
        for layer in range(LAYERS):
            one.ring.ssm(layer).numpy()[step.rows_out[step.rows_out >= 0]] = np.nan
        raise Boom
    assert one.bits(0) == before
    assert one.ring.max_rollback(0) == max(0, min(3, 5 - min(size, 5)))
    one.check(0)
    one.step(s0=2)
    one.check(0)


def test_without_a_spare_plane_a_failed_step_loses_the_sequence():
    run = Run(n_rollback=0)
    assert run.ring.n_planes == 1
    run.acquire(0)
    step = run.step(s0=2)
    assert step.rows_in.tolist() == step.rows_out[:, 0].tolist()      # in place
    saved = run.ring.save(0)
    for repair in (lambda: run.ring.reset(0), lambda: run.ring.load(0, saved), lambda: run.ring.release(0)):
        run.ring.begin([0], [1]).abort()
        for use in (run.ring.position, run.ring.max_rollback, run.ring.save, lambda i: run.ring.rollback(i, 0),
                    lambda i: run.ring.begin([i], [1]), lambda i: run.ring.copy(i, 5)):
            with pytest.raises(gdn.StateLostError, match="sequence 0"):
                use(0)
        assert run.ring.seq_ids == [0] and run.ring.slot(0) == 0
        repair()
        assert run.ring.seq_ids == [0] and run.ring.position(0) in (0, 2) or run.ring.n_free == 3


def test_a_step_ends_once(one):
    step = one.ring.begin([0], [1])
    step.abort()
    for end in (step.commit, step.abort):
        with pytest.raises(ValueError, match="already committed or aborted"):
            end()
    with pytest.raises(TypeError, match="begin"):
        type(step)()


def test_a_dropped_step_is_aborted(one):
    step = one.ring.begin([0], [1])
    with pytest.raises(ValueError, match="in a step"):
        one.ring.begin([0], [1])
    del step
    one.ring.begin([0], [1]).commit()


def test_refused_begin_changes_nothing():
    run = Run()
    run.acquire(0, 1)
    run.step(s0=2, s1=1)
    before = run.ring.save(0), run.ring.save(1)
    for error, ids, sizes in ((KeyError, [0, 9], [1, 1]), (ValueError, [0, 1, 0], [1, 1, 1]),
                              (ValueError, [0, 1], [1, -1]),
                              (ValueError, [0, 1], [1]), (ValueError, [[0]], [1]), (TypeError, [0.0], [1]),
                              (TypeError, [0], ["a"]), (ValueError, [2**64], [1]), (ValueError, [0], [2**63 - 1]),
                              (KeyError, [-1], [1])):
        with pytest.raises(error):
            run.ring.begin(ids, sizes)
    with pytest.raises(TypeError, match="Batch"):
        run.ring.begin([0])
    assert before == (run.ring.save(0), run.ring.save(1))


def test_other_refusals(one):
    one.step(s0=1)
    ring = one.ring
    for error, call in ((KeyError, lambda: ring.position(3)), (KeyError, lambda: ring.release(3)),
                        (KeyError, lambda: ring.slot(3)), (KeyError, lambda: ring.save(3)),
                        (KeyError, lambda: ring.reset(3)), (KeyError, lambda: ring.copy(3, 4)),
                        (ValueError, lambda: ring.copy(0, 0)),
                        (ValueError, lambda: ring.acquire(0)), (ValueError, lambda: ring.acquire(5, 0)),
                        (IndexError, lambda: ring.acquire(5, 3)), (IndexError, lambda: ring.acquire(5, -1)),
                        (ValueError, lambda: ring.acquire(-1)), (ValueError, lambda: ring.acquire(2**63)),
                        (TypeError, lambda: ring.acquire("a")), (TypeError, lambda: ring.acquire(1.0)),
                        (IndexError, lambda: ring.ssm(2)), (IndexError, lambda: ring.conv(-1)),
                        (TypeError, lambda: ring.load(7, 3)), (ValueError, lambda: ring.load(7, b"")),
                        (ValueError, lambda: ring.load(-1, ring.save(0)))):
        with pytest.raises(error):
            call()
    assert ring.seq_ids == [0] and ring.n_free == 2


# ---------------------------------------------------------------- copy, save, load

def test_a_copy_shares_nothing():
    run = Run()
    run.acquire(0)
    run.step(s0=5)
    before = run.ring.save(0)
    run.ring.copy(0, 1)
    run.keys[1] = run.keys[0][:]
    assert run.ring.max_rollback(1) == run.ring.max_rollback(0)
    run.step(s1=3)
    run.check(1)
    assert run.ring.save(0) == before
    run.ring.release(0)
    run.rollback(1, 2)
    run.check(1)


def test_saved_with_pending_rollback_and_continued():
    here, there = Run(), Run(n_slots=1, spare=3)
    here.acquire(0)
    here.step(s0=6)
    there.truth = here.truth
    there.ring.load(7, here.ring.save(0))
    there.keys[7] = here.keys[0][:]
    assert there.ring.max_rollback(7) == here.ring.max_rollback(0) == 4
    for n in (2, 2):
        here.rollback(0, n)
        there.rollback(7, n)
        assert here.bits(0) == there.bits(7)
    for _ in range(20):
        here.step(s0=1)
        with there.ring.begin([7], [1]) as step:
            run_layers(there.ring, there.truth, step, [[here.keys[0][-1]]])
        assert here.bits(0) == there.bits(7)


def test_damaged_bytes_are_refused():
    run = Run()
    run.acquire(0)
    run.step(s0=3)
    data = run.ring.save(0)
    before = run.ring.seq_ids, run.ring.n_free
    assert zlib.crc32(data[16:]) == int.from_bytes(data[12:16], "little")
    for length in [*range(0, 80), len(data) - 1]:
        with pytest.raises(ValueError, match="no intact saved sequence"):
            run.ring.load(1, data[:length])
    with pytest.raises(ValueError, match="no intact"):
        run.ring.load(1, data + b"\0")
    for bit in [*range(64 * 8), *range(64 * 8, len(data) * 8, 131)]:
        bent = bytearray(data)
        bent[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match="no intact saved sequence"):
            run.ring.load(1, bent)
    assert (run.ring.seq_ids, run.ring.n_free) == before


@pytest.mark.parametrize("name", list(EXTENTS))
def test_bytes_of_another_shape_are_refused(one, name):
    one.step(s0=1)
    other = gdn.StateRing.create(3, 4, **{**EXTENTS, name: EXTENTS[name] + 1})
    with pytest.raises(ValueError, match=r"there and .* here"):
        other.load(0, one.ring.save(0))
    one.step(s0=5)
    with pytest.raises(ValueError, match="by 4 tokens, the ring keeps 3"):
        gdn.StateRing.create(3, 3, **EXTENTS).load(0, one.ring.save(0))


# ---------------------------------------------------------------- the buffer

def test_attached_rings_are_one():
    memory = mmap.mmap(-1, gdn.StateRing.nbytes_for(2, 1, **EXTENTS))
    first = gdn.StateRing.create(2, 1, buffer=memory, **EXTENTS)
    second = gdn.StateRing(memory)
    first.acquire(4)
    assert second.seq_ids == [4]
    with first.begin([4], [1]) as step:
        first.ssm(1).numpy()[step.rows_out[0, 0]] = 2.5
        assert second.position(4) == 0
    assert second.position(4) == 1
    assert (read_rows(second, committed_row(second, 4))[0][1] == 2.5).all()


@pytest.mark.parametrize("offset", [0, 4, 12, 60])
def test_any_aligned_address(offset):
    buffer = pool("nan", 2, 1, None, offset)
    ring = gdn.StateRing.create(2, 1, buffer=buffer, **EXTENTS)
    for layer in range(LAYERS):
        for rows in (ring.ssm(layer), ring.conv(layer)):
            assert rows.data % 64 == 0 and rows.nb[3] % 64 == 0 and rows.ne[3] == 6
    moved = np.zeros(len(buffer) + 128, np.uint8)
    start = -moved.ctypes.data % 64 + 20        # attached where its rows are not on 64-byte addresses
    moved[start:start + len(buffer)] = buffer
    run = Run()
    run.ring, run.keys = gdn.StateRing(moved[start:start + len(buffer)]), {3: []}
    run.ring.acquire(3)
    run.step(s3=3)
    run.rollback(3, 1)
    run.check(3)


def test_buffers_that_are_refused():
    need = gdn.StateRing.nbytes_for(2, 1, **EXTENTS)
    with pytest.raises(ValueError, match=f"{need - 1} bytes, this ring needs {need}"):
        gdn.StateRing.create(2, 1, buffer=bytearray(need - 1), **EXTENTS)
    with pytest.raises(ValueError, match="multiple of 4"):
        gdn.StateRing.create(2, 1, buffer=np.zeros(need + 8, np.uint8)[1:], **EXTENTS)
    with pytest.raises(ValueError, match="writable"):
        gdn.StateRing.create(2, 1, buffer=bytes(need), **EXTENTS)
    with pytest.raises(ValueError, match="contiguous"):
        gdn.StateRing.create(2, 1, buffer=np.zeros(2 * need, np.uint8)[::2], **EXTENTS)
    with pytest.raises(TypeError, match="buffer protocol"):
        gdn.StateRing([1, 2])
    with pytest.raises(ValueError, match="no ring"):
        gdn.StateRing(bytearray(need))
    for name, value in (("H_v", 0), ("S_k", -1), ("n_layers", 2**31), ("conv_width", 0), ("conv_channels", -1),
                        ("spare", -1), ("H_v", 2**31 - 1)):
        with pytest.raises(ValueError, match=name):
            gdn.StateRing.nbytes_for(2**20, 1, **{**EXTENTS, "S_k": 2**20, "S_v": 2**20, name: value})
    with pytest.raises(TypeError, match="H_v"):
        gdn.StateRing.nbytes_for(2, 1, **{**EXTENTS, "H_v": 2.0})


def test_damaged_rings_are_refused():
    buffer = bytearray(gdn.StateRing.nbytes_for(2, 1, **EXTENTS))
    ring = gdn.StateRing.create(2, 1, buffer=buffer, **EXTENTS)
    ring.acquire(0)
    whole = bytes(buffer)
    for length in (0, 100, 255, 256, len(whole) - 1):
        with pytest.raises(ValueError, match="no ring"):
            gdn.StateRing(bytearray(whole[:length]))
    for byte in range(144):                     # extents, offsets and strides
        for value in (0, 1, 0x7F, 0xFF):
            bent = bytearray(whole)
            if bent[byte] == value:
                continue
            bent[byte] = value
            with pytest.raises(ValueError, match="no ring"):
                gdn.StateRing(bent)
    rng = np.random.default_rng(5)
    refused = 0
    for _ in range(3000):                       # anything else, several at a time: an answer or an error, never a crash
        bent = bytearray(whole)
        for at in rng.integers(192, 256 + 2 * 64 + 2 * 72 + 64, rng.integers(1, 4)):
            bent[at] = rng.integers(256)
        try:
            other = gdn.StateRing(bent)
            for seq_id in other.seq_ids:
                other.begin([seq_id], [2]).commit()
            other.acquire(12345)
        except (ValueError, gdn.RingFullError, gdn.StateLostError):
            refused += 1
    assert refused > 100


def test_rows_above_four_gigabytes():
    extents = dict(n_layers=3, H_v=32, S_k=128, S_v=128, conv_channels=8192, conv_width=4)
    n = gdn.StateRing.nbytes_for(512, 1, **extents)
    assert n > 9 << 30
    memory = mmap.mmap(-1, n, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0))
    ring = gdn.StateRing.create(512, 1, buffer=memory, **extents)
    ring.acquire(1, slot=511)
    with ring.begin([1], [2]) as step:
        for layer in range(3):
            ring.ssm(layer).numpy()[step.rows_out[0, 0], 31, 127, 127] = layer + 1
            ring.conv(layer).numpy()[step.rows_out[0, 0], 0, 8191, 2] = -layer - 1
    row = committed_row(ring, 1)
    assert row == 2 * 512 + 511
    start, seen = ring.address, np.frombuffer(memory, np.float32)
    for layer in range(3):
        for rows, value in ((ring.ssm(layer), layer + 1), (ring.conv(layer), -layer - 1)):
            at = rows.data - start + row * rows.nb[3] + 4 * rows.ne[0] * rows.ne[1] * rows.ne[2] - 4
            assert seen[at // 4] == value
    assert ring.conv(2).data - start > 4 << 30
    assert gdn.StateRing(memory).position(1) == 2


def test_views_keep_the_memory():
    view = gdn.StateRing.create(1, **EXTENTS).ssm(0)
    view.numpy()[:] = 3
    assert (view.numpy() == 3).all()


def test_without_convolution():
    ring = gdn.StateRing.create(2, 1, n_layers=1, H_v=1, S_k=2, S_v=2)
    assert ring.conv(0).ne == (0, 0, 1, 6)
    ring.acquire(0)
    with ring.begin([0], [1]) as step:
        ring.ssm(0).numpy()[step.rows_out[0]] = 1
    ring.load(1, ring.save(0))
    assert (ring.ssm(0).numpy()[committed_row(ring, 1)] == 1).all()


# ---------------------------------------------------------------- threads

def test_eight_threads_on_one_ring():
    n_steps, threads = 40, 8
    ring = gdn.StateRing.create(threads, 2, **EXTENTS)
    truths, keys = [Truth(seed) for seed in range(threads)], [[] for _ in range(threads)]
    for i in range(threads):
        ring.acquire(i)
        for _ in range(2 * n_steps):
            keys[i].append(truths[i].token(keys[i][-1] if keys[i] else EMPTY))
    errors = []

    def work(i):
        try:
            for t in range(0, 2 * n_steps, 2):
                with ring.begin([i], [3 if t + 3 <= 2 * n_steps else 2]) as step:
                    run_layers(ring, truths[i], step, [keys[i][t:t + step.n_tokens[0]]])
                ring.rollback(i, step.n_tokens[0] - 2)
                ring.position(i)
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not errors
    for i in range(threads):
        assert ring.position(i) == 2 * n_steps
        truths[i].check(keys[i][-1], *read_rows(ring, committed_row(ring, i)))


def test_one_sequence_from_many_threads():
    ring = gdn.StateRing.create(2, 1, **EXTENTS)
    ring.acquire(0)
    counts = {"committed": 0, "refused": 0}
    start, guard = threading.Barrier(4), threading.Lock()

    def work():
        start.wait()
        for _ in range(200):
            try:
                step = ring.begin([0], [1])
                os.sched_yield()
                step.commit()
                outcome = "committed"
            except ValueError as error:
                assert "in a step" in str(error)
                outcome = "refused"
            with guard:
                counts[outcome] += 1

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert counts["committed"] == ring.position(0) and sum(counts.values()) == 800
