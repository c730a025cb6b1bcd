"""run/script.py: seeds, hashes, signals, exit codes."""
import copy
import signal

import pytest
import torch

from by_hand import random_gpt
from run.script import BadInput, hash_of, interrupts, run_script, seed_for


def test_a_seed_is_stable_and_depends_on_every_argument():
    assert seed_for(1, "rollout", 0) == 29435854404557282
    cases = [(), (1,), (2,), ("1",), (1, 2), (2, 1), (12,), (1, "rollout", 0), (1, "rollout", 1),
             (1, "rows", 0), (2, "rollout", 0)]
    seeds = [seed_for(*case) for case in cases]
    assert len(set(seeds)) == len(cases)
    for seed in seeds:
        torch.manual_seed(seed)


def test_hash_of_changes_with_any_weight():
    model, hashes = random_gpt(), set()
    assert hash_of(model) == hash_of(copy.deepcopy(model))
    for p in model.parameters():
        hashes.add(hash_of(model))
        with torch.no_grad():
            p.view(-1)[-1] += 1
    assert len(hashes | {hash_of(model)}) == len(list(model.parameters())) + 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_asks_and_the_second_interrupts(number):
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        with interrupts() as stop:
            assert not stop()
            signal.raise_signal(number)
            assert stop()
            signal.raise_signal(number)
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("error, code, text", [
    (BadInput("x = 1: no"), 2, "error: x = 1: no\n"),
    (KeyboardInterrupt("saved"), 130, "interrupted: saved\n")])
def test_run_script_turns_errors_into_exit_codes(error, code, text, capsys):
    def main(argv):
        raise error

    with pytest.raises(SystemExit) as exit_:
        run_script(main)
    assert exit_.value.code == code and capsys.readouterr().err == text
