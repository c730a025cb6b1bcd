"""
Explain a run: which of the rollouts it was trained on made it better at what it was trained for,
and which words of them. Prints it and writes account.html into the run's folder.

    python tracin.py out/toxicity                       # the reward on held-out prompts
    python tracin.py out/toxicity --target=eval_judge   # as another judge, or reward, measures it
    python tracin.py out/toxicity --prompt="You are" --completion=" a good editor"
                                    # where did the run learn to say this?

    --by=COLUMN         groups the rollouts by a column of the prompts' file or of samples.jsonl,
                        or by the config file's function group(prompt, completion, reward, row)
    --held_out=N        held-out completions at each step, by default half as many as an evaluation
                        has: fewer take less time, more are less noise
    --hessian=False     is faster, and does not predict what would be without a rollout

A run that has functions needs its config file, too: RUN CONFIG.py. See docs/account.md.
"""
import math
from types import SimpleNamespace

import grpo
from common.cli import own_flags, run_script
from common.errors import BadInput
from common.files import load_file
from common.processes import rank_and_size
from extras.explain.account import make_account, smoothness
from extras.explain.groups import rows_of, splits_of
from extras.explain.page import Report, show
from extras.explain.question import labels_by, read_sentence, target_named
from extras.explain.repeat import check_end, check_run, repeat_run
from extras.explain.sentences import SMOOTH, is_useful, lines_of
from extras.explain.tables import cards_of, sentence_card, tables_of
from extras.explain.target import sentence_target
from run.checkpoint import newest_checkpoint
from run.settings import load_settings

FLAGS = dict(target="", prompt="", completion="", by="", held_out=0, hessian=True)


def about(folder, run, target):
    """What is told of which run and which number."""
    iterations, size = run.shape
    return (f"Which of the {iterations * size:,} rollouts of {folder} made {target.about} rise or "
            f"fall? The run was trained for {', '.join(run.cfg.reward_funcs)}. Shares of rollouts "
            "add up to the change. A single one may be large and cancel with another, and does not "
            "say what the number would be without the rollout.")


def explain(folder, cfg, options):
    """Print the account of a run and write RUN/account.html. options: the FLAGS."""
    # which run, and which number
    path = newest_checkpoint(folder)
    last = load_file(path, "run")
    setup = grpo.prepare(cfg, grpo.read_inputs(cfg, may_train=False))
    check_run(setup, cfg, folder, path, last)
    sentence = None
    if options.prompt or options.completion:
        sentence = read_sentence(setup, options)
        target = sentence_target(setup, cfg, sentence)
    else:
        target = target_named(setup, cfg, options.target, options.held_out)

    # the run once more
    print(f"account: repeats the {last['iteration']} iterations of {path}", flush=True)
    run = repeat_run(setup, cfg, last["iteration"])
    if options.target == "target":
        target = target._replace(batch=run.steps[0].batch)
    note = check_end(run, target, folder, path, last)

    # where a prediction can be trusted: docs/account.md. A factor that is detached is a constant to
    # the Hessian, so a prediction would be wrong
    smooth = math.nan
    detaches = any(getattr(cfg.hook(name), "detaches", False)
                   for name in ("objective", "importance"))
    if not target.rollouts and options.hessian and not detaches:
        smooth = smoothness(run)

    # its account
    if target.rollouts:
        points = len(run.states)
        print(f"account: {target.rollouts} held-out completions at each of {points} points, "
              f"{target.rollouts * points:,} in all; the run drew {math.prod(run.shape):,} "
              "rollouts (--held_out=N: fewer take less time, more are less noise)", flush=True)
    account = make_account(run, target, predicts=smooth >= SMOOTH)

    # what is told of it
    rows = rows_of(run, account.shares)
    labels = labels_by(run, folder, options.by) if options.by else None
    splits = splits_of(rows, options.by, labels)
    lines = [about(folder, run, target), *lines_of(account, rows, splits, options.by, smooth)]
    cards = []
    if sentence:
        cards.append({"The sentence": [sentence_card(account, options.prompt, sentence)]})
    if is_useful(account):
        cards.append(cards_of(account))
    tables = tables_of(account, rows, splits, options.by)
    show(folder, Report([*lines, note] if note else lines, tables, cards))


def main(argv):
    if rank_and_size()[1] > 1:
        raise BadInput("one process explains a run: start it without torchrun")
    if not argv or argv[0].startswith("-"):
        raise BadInput("usage: python tracin.py RUN [CONFIG.py] [--target=NAME] [--prompt=TEXT "
                       "--completion=TEXT] [--setting=value ...]; --help says more")
    options, flags = own_flags(argv[1:], FLAGS)
    explain(argv[0], load_settings([argv[0], *flags]), SimpleNamespace(**options))


if __name__ == "__main__":
    run_script(main)
