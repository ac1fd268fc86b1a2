"""The example model, end to end: GGUF in, the text and the logits that transformers computes out."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "shakespeare"
EXPECTED = np.load(EXAMPLE / "expected.npz")


@pytest.fixture(scope="module")
def generate():
    spec = importlib.util.spec_from_file_location("generate", EXAMPLE / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def close(logits, expected):
    error = np.abs(logits - expected).max()
    assert error < 1e-3 and error < 1e-4 * np.abs(expected).max(), error


@pytest.mark.parametrize("i", [0, 1, 2])
def test_prompt_logits_and_greedy_bytes(generate, i):
    model = generate.Model()
    logits = model(EXPECTED[f"prompt{i}"])
    close(logits, EXPECTED[f"logits{i}"])
    written, last = bytearray(), logits[-1]
    for _ in EXPECTED[f"greedy{i}"]:
        written.append(generate.pick(last, 0, None))
        last = model([written[-1]])[-1]
    assert bytes(written) == EXPECTED[f"greedy{i}"].tobytes()
    close(last, EXPECTED[f"last_logits{i}"])


def test_prompt_in_pieces_continues(generate):
    """Any split of the prompt gives the logits of one call: chunked pieces, single tokens, nothing."""
    prompt, expected = EXPECTED["prompt2"], EXPECTED["logits2"]
    model = generate.Model()
    for start, stop in [(0, 1), (1, 70), (70, 71), (71, 166)]:
        close(model(prompt[start:stop]), expected[start:stop])


def test_temperature_draws_from_softmax(generate):
    rng, logits = np.random.default_rng(7), np.array([0.0, 1.0, 2.0])
    drawn = np.bincount([generate.pick(logits, 0.5, rng) for _ in range(4000)], minlength=3) / 4000
    weights = np.exp(logits / 0.5)
    assert np.abs(drawn - weights / weights.sum()).max() < 0.03


def run(*arguments):
    return subprocess.run([sys.executable, EXAMPLE / "generate.py", *arguments], capture_output=True, timeout=120)


def test_command_line_greedy():
    prompt = EXPECTED["prompt1"].tobytes()
    result = run("--prompt", prompt.decode(), "--tokens", "100", "--greedy")
    assert result.returncode == 0, result.stderr
    text, _, rates = result.stdout.rpartition(b"\n\nprefill ")
    assert text == prompt + EXPECTED["greedy1"].tobytes()[:100]
    assert rates.startswith(b"40 tokens, ") and b"decode 100 tokens, " in rates


def test_command_line_seed():
    first, again, other = (run("--tokens", "60", "--seed", seed).stdout.rpartition(b"\n\nprefill ")[0]
                           for seed in ("1", "1", "2"))
    assert first == again != other and len(first) == len(other)


def test_command_line_refuses_an_empty_prompt():
    result = run("--prompt", "")
    assert result.returncode == 2 and b"prompt" in result.stderr
