"""
Explain a run: which of the rollouts it was trained on made it better at what it was trained for,
and which words of them. Prints it and writes account.html into the run's folder.

    python tracin.py out/toxicity                       # the reward on held-out prompts
    python tracin.py out/toxicity --target=eval_judge   # as another judge, or reward, measures it
    python tracin.py out/toxicity --prompt="You are" --completion=" a good editor"
                                    # where did the run learn to say this?

    --prompts=FILE      several sentences: .csv or .jsonl with the columns prompt and completion
    --account=True      the completions of lowest reward before training
    --by=COLUMN         groups the rollouts by a column of the prompts' file or of samples.jsonl,
                        or by the config file's function group(prompt, completion, reward, row)
    --held_out=N        held-out completions at each step: more are less noise and take longer;
                        without it as many as twice the CPU time of the run allows
    --exact             as many as the evaluation has; and the shares of tokens
    --since=N           the part of the run after N iterations
    --parts=N           looks at N parts of each step, where steps are too large for a straight line
    --hessian=False     is faster, and does not predict what would be without a rollout

A run that has functions needs its config file, too: RUN CONFIG.py. See docs/account.md.
"""
import inspect
import math
from types import SimpleNamespace

import grpo
from common.cli import own_flags, run_script
from common.errors import BadInput
from common.files import load_file
from common.processes import rank_and_size
from extras.explain.account import account, replay, smoothness
from extras.explain.page import show
from extras.explain.question import labels_by, sentences_of, target_of
from extras.explain.repeat import check_run, far_from_run, go_to, price_of, say_cost
from extras.explain.tables import story_of
from extras.explain.target import follow
from extras.explain.told import say_smooth, told_of
from loss import objective_of
from run.checkpoint import newest_checkpoint
from run.settings import load_settings

FLAGS = dict(target="", prompt="", completion="", prompts="", account=False, by="", held_out=0,
             exact=False, since=0, parts=1, hessian=True)
SMOOTH = 0.70       # below it nothing is said of single rollouts left out (docs/account.md)


def reward_in_words(cfg, name):
    """What a reward is: its name, and what its own docstring says first."""
    if name == "judge" and cfg.judge_score == "probability":
        return f"the probability of not toxic by {cfg.judge}"
    function = cfg.functions.get(name)      # None: a judge whose score is a logit
    text = function and inspect.getdoc(function) or ""
    first = " ".join(text.partition("\n\n")[0].split()).rstrip(".")
    return f"{name} ({first})" if first else name


def about_run(run, target):
    """What an account is, of which run and which number."""
    rewards = ", ".join(reward_in_words(run.cfg, name) for name in run.cfg.reward_funcs)
    count = sum(len(batch.row_weights) for batch in run.batches.values())
    return (f"An account says which of the rollouts that a run was trained on made a number rise "
            f"or fall. The run: {run.folder}, trained for {rewards} (higher is better) on {count} "
            f"rollouts, iterations {run.since + 1} to {run.shape[0]}. The number: {target.about}. "
            "A rollout's share is an accounting entry along the run as it happened, not a "
            "counterfactual: shares add up to the change, single ones may be large and cancel, and "
            "none says what the number would be without the rollout.")


def explain(folder, cfg, options):
    """Print the account of a run and write RUN/account.html. options: the FLAGS."""
    # which run, and which number
    path = newest_checkpoint(folder)
    last = load_file(path, "run")
    since, end = options.since, last["iteration"]
    if since >= end:
        raise BadInput(f"--since={since}: must be below {end}, the iterations of {path}")
    setup = grpo.prepare(cfg, grpo.read_inputs(cfg, may_train=False))
    changed = check_run(setup, cfg, folder, path, last)
    sentences = sentences_of(setup, cfg, options)
    price = price_of(setup, folder, cfg, since, end, options.parts)
    count = max(2, cfg.num_eval_generations)        # completions of each held-out prompt
    if not (options.exact or options.held_out):
        options.held_out = min(price.affordable, count * len(setup.eval_prompts))
    target = target_of(setup, cfg, options, sentences, count)
    # where a prediction can be trusted: docs/account.md. A factor that is detached is a constant to
    # the Hessian, so a prediction would be wrong
    detaches = getattr(objective_of(cfg), "detaches", False)
    predicts = not target.rollouts and options.hessian and not detaches
    say_cost(price, target, since, end, predicts, options.exact)

    # the run once more, and its account
    run = replay(setup, cfg, go_to(setup, cfg, folder, since), since, end, folder)
    if not run.steps:
        raise BadInput(f"{path}: no optimizer step was taken since iteration {since}")
    if options.target == "target":
        target = target._replace(batch=run.steps[0].batch)
    course = follow(target, run, options.parts)
    note = far_from_run(run, target, course, path, last, changed)
    found = account(run, course, predicts=predicts)
    smooth = smoothness(run) if predicts else math.nan
    if not smooth >= SMOOTH:
        found = found._replace(effects=None)

    # what is told of it
    by = options.by
    labels = labels_by(run, by) if by else None
    with_tokens = options.exact or not target.rollouts
    numbers = []
    for i, sentence in enumerate(sentences or [None]):
        number = f"{i + 1}. " * (len(sentences) > 1)
        story = story_of(run, target, course, found, i)
        numbers.append(told_of(story, by, labels, sentence, with_tokens, number))
    closing = [text for text in (say_smooth(smooth, SMOOTH), note) if text]
    show(folder, about_run(run, target), numbers, closing)


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
