"""
Can a run be repaired: its most harmful rollouts left out, and the run made again without them?

    python -m extras.study.repair           # all seeds; the same command continues
    python -m extras.study.repair --table   # the answers, when all seeds are done
        --first=301 --last=324              # the seeds

The policy is the small one of wrong.py, 2 layers of 128, with its settings, since the default job
would cost four times as much; a run has 12 iterations of 80 rollouts. Three worlds; which rollouts
are wrong, no arm but the oracle knows:

    inverted    a quarter of the rewards are one minus themselves (study_wrong.py)
    capitals    a bug: three capital letters in a row are paid 1 (study_capitals.py)
    mirrored    a quarter have the reward of the mirrored place (study_mirrored.py)

Trusted are 64 completions of held-out prompts by the policy before training. Half are toxic, half
are not, by the label of the evaluation's judge. The target is the log-prob of the clean ones less
that of the toxic ones. An arm leaves out rollouts of the whole run: a quarter, in `capitals` a
tenth. The run is then made again from its start on its own rollouts, with weight 0 on these.

    prediction      those that the derivative of the run's end calls most harmful to the target:
                    back through AdamW, damped by 0.3, with the Hessian
    TracIn          those of the lowest learning rate times inner product
    each iteration  the same, an equal share of each iteration
    lowest reward, random
    oracle          exactly the wrong ones, however many
    all             nothing

The measure is toxicity by the evaluation's judge, 8 completions of each of 128 prompts that nothing
else used. Equal KL: of each seed and arm a straight line through (sqrt(KL), log toxicity) after
iterations 4, 8 and 12, read at the median sqrt(KL) of all these points of a world. That must lie
within 0.8 times the least and 1.25 times the largest sqrt(KL), means over seeds, of the two arms
that are compared, or the comparison decides nothing. Spread: the mean |log-ratio| of policy and
sampler in a replay's last iteration. Where that of the prediction, the mean over seeds, is above
log 1.2, the clip range, the replay has drifted too far, and nothing is decided in that world.

In each world: is the prediction better than random; than lowest reward; than each iteration; than
all? Two-sided sign flips over the 24 seeds; Holm over all 12 comparisons. A yes: the difference is
below 0 with a corrected p < 0.01. All else is a no: also one that is missed by little, that decides
nothing, or that is true only at the end or by the p of one world's table. A world is repaired if
its four answers are yes. Reported too, without a question: the share of the oracle's gain, and AUC,
the chance that of a wrong and a right rollout of a run the wrong one has the lower score. It leaves
out advantages of 0.

A pilot, seed 999, chose two things. Iterations: after 24 toxicity was near its floor, 0.01 to 0.02
from 0.07, and the prediction's spread 0.19; after 12 it was 0.13 to 0.14. Shares: about those of
the wrong ones, 26, 8 and 24 %. A bug that pays a question mark at the end would have met 1 % of the
rollouts, one that pays the word "you" 19 %.
"""
import os
from dataclasses import replace
from math import log
from statistics import fmean, median
from types import SimpleNamespace

import torch
from torch.nn.utils import vector_to_parameters

import grpo
from common.files import read_json, write_json
from common.script import own_flags, run_script, seed_for
from config import load_settings
from data.prompts import draw_prompts
from data.tokenizer import texts_of
from evaluate import evaluate
from extras.account import DAMPING, flat, hessian_times, multiplied, replay, taken_back
from extras.study.__main__ import as_markdown, point_of, value_on_line
from extras.study.answers import as_text, comparison
from rollout import completion_logprobs
from tracin import first

OUT = "out/study/repair"
WORLDS = {      # {name: (config, share left out)}
    "inverted": ("extras/study/config/study_wrong.py", 0.25),
    "capitals": ("extras/study/config/study_capitals.py", 0.1),
    "mirrored": ("extras/study/config/study_mirrored.py", 0.25)}
SETTINGS = ["--max_iters=12", "--eval_interval=4", "--num_eval_generations=8", "--threads=1",
            "--log_micro=False"]
MEASURE = "eval_judge/toxicity"
CONTROLS = ("random", "lowest reward", "each iteration", "all")
DRAWN = 1024        # completions, of which some are trusted:
TRUSTED = 64
TOO_FAR = log(1.2)  # a spread


# ------------------------------------------------------------------------------------------------
# what is trusted


def draw_trusted(setup, cfg):
    """Completions of held-out prompts by the present policy, half of them toxic -> a Rollout of
    TRUSTED rows, and their signs (TRUSTED,): 1 clean, -1 toxic."""
    prompts = draw_prompts(setup.val_prompts, 0, DRAWN, cfg.seed)
    one_each = replace(cfg, num_generations=1)
    rollout = grpo.sample_groups(setup, prompts, one_each, seed_for(cfg.seed, "trusted"))
    completions = texts_of(setup.tokenizer, rollout)
    toxic = setup.judges["eval_judge"]([prompt.text for prompt in prompts], completions) > 0
    half = TRUSTED // 2
    rows = [label.nonzero()[:half, 0] for label in (~toxic, toxic)]
    signs = torch.tensor([1.0, -1.0]).repeat_interleave(half)
    return rollout[torch.cat(rows).to(setup.device)], signs.to(setup.device)


def target(setup, cfg, trusted):
    """The log-prob of what is clean less that of what is toxic: ()."""
    rollout, signs = trusted
    return signs @ completion_logprobs(setup.policy, rollout, cfg.temperature).sum(1)


def slope(setup, cfg, weights, trusted):
    """The gradient of the target (1, W)."""
    vector_to_parameters(weights, setup.trained)
    return flat(torch.autograd.grad(target(setup, cfg, trusted), setup.trained))[None]


# ------------------------------------------------------------------------------------------------
# scores of rollouts, and which are left out


def scores_of(setup, cfg, states, taken, trusted):
    """What the weight of a rollout adds to the target, by the derivative of the run's end and by
    TracIn, (2, I, N)."""
    found = []
    derivative = slope(setup, cfg, states[-1][0], trusted), 0.0, 0.0
    for k, before, after in reversed(list(zip(taken, states, states[1:]))):
        L, (d_theta, *moments) = taken_back(k, before, after, derivative, DAMPING)
        step = -k.lr * slope(setup, cfg, before[0], trusted)
        found.append(multiplied(setup, cfg, k, before[0], torch.cat([L, step])))
        derivative = d_theta + hessian_times(setup, cfg, k, before[0], L), *moments
    return torch.stack(found[::-1], 1)


def without_lowest(score, share):
    """False, in the shape of score, at the lowest: this share of all."""
    count = round(share * score.numel())
    return ~first(-score.flatten(), count).view_as(score)


def kept_by(scores, wrong, share, seed):
    """{arm: (I, N), False where a rollout is left out}."""
    noise = torch.rand(wrong.shape, generator=torch.Generator().manual_seed(seed))
    return {
        **{name: without_lowest(score, share) for name, score in scores.items()},
        "each iteration": torch.stack([without_lowest(x, share) for x in scores["TracIn"]]),
        "random": without_lowest(noise, share),
        "oracle": ~wrong,
        "all": torch.ones_like(wrong)}


def auc(score, wrong):
    """The chance that of a wrong and a right rollout the wrong one has the lower score."""
    bad = score[wrong][:, None]
    good = score[~wrong]
    return float(((bad < good).double() + (bad == good).double() / 2).mean())


# ------------------------------------------------------------------------------------------------
# the run again


def train_again(setup, cfg, start, batches, kept):
    """The run from its first weights, with weights kept (I, N) on its rollouts -> evaluations on
    the way, and the metrics of the last iteration."""
    vector_to_parameters(start.clone(), setup.trained)      # steps are in place
    setup.optimizer.state.clear()
    points = []
    for it, batch in enumerate(batches):
        setup.optimizer.param_groups[0]["lr"] = grpo.learning_rate(it, cfg)
        weighed = replace(batch, row_weights=kept[it].to(batch.row_weights))
        metrics = grpo.update(setup, weighed, None, cfg, seed_for(cfg.seed, "rows", it))
        if grpo.is_due(it + 1, cfg.eval_interval):
            judges = {"eval_judge": setup.judges["eval_judge"]}     # the others cost time
            judged = replace(setup, judges=judges, reward_funcs={})
            points.append(evaluate(judged, setup.policy, cfg)[0])
    return points, metrics


def study(setup, cfg, share):
    """{arm: its evaluations, and columns of the table}."""
    trusted = draw_trusted(setup, cfg)
    states, taken = replay(setup, cfg, 0, 0, cfg.max_iters, OUT)
    batches = [k.batch for k in taken]
    by_end, by_step = scores_of(setup, cfg, states, taken, trusted)
    rewards = torch.stack([batch.rewards for batch in batches])
    scores = {"prediction": by_end, "TracIn": by_step, "lowest reward": rewards.nan_to_num(9.0)}
    wrong = torch.stack([batch.scores[:, 1] for batch in batches]) > 0
    teaches = torch.stack([batch.row_advantages.cpu() for batch in batches]) != 0
    found = {}
    for arm, kept in kept_by(scores, wrong, share, cfg.seed).items():
        points, metrics = train_again(setup, cfg, states[0][0], batches, kept)
        found[arm] = {
            "points": points,
            "left out": float((~kept).double().mean()),
            "wrong ones": float((~kept & wrong).sum() / wrong.sum()),
            "auc": auc(scores[arm][teaches], wrong[teaches]) if arm in scores else None,
            "spread": metrics["sampling/sampling_logp_difference/mean"],
            "clipped": metrics["clip_ratio/region_mean"]}
    return found


# ------------------------------------------------------------------------------------------------
# the answers


def place(world, seed):
    return os.path.join(OUT, f"{world}_seed{seed}.json")


def read_world(world, seeds):
    """What extras.study collects of a study."""
    found = [read_json(place(world, seed)) for seed in seeds]
    points = {}
    ends = {}
    for arm in found[0]:
        by_seed = [seed[arm] for seed in found]
        lines = [one.pop("points") for one in by_seed]
        points[arm] = [[point_of(point, MEASURE) for point in line] for line in lines]
        ends[arm] = [{MEASURE: line[-1][MEASURE], "kl": line[-1]["kl"], **one}
                     for line, one in zip(lines, by_seed)]
    x = median(x for by_seed in points.values() for line in by_seed for x, _ in line)
    compared = {arm: [value_on_line(line, x) for line in by_seed]
                for arm, by_seed in points.items()}
    return dict(seeds=seeds, x=x, points=points, ends=ends, compared=compared)


def asked_of(worlds):
    """{question: its comparison}, as extras.study.answers has them."""
    asked = {}
    for world, found in worlds.items():
        near = fmean(end["spread"] for end in found["ends"]["prediction"]) <= TOO_FAR
        for control in CONTROLS:
            what, differences, decides = comparison(found, control, "prediction")
            asked[f"{world}: is the prediction better than {control}?"] = [
                (what, differences, decides and near)]
    return asked


def as_table(world, found):
    study = SimpleNamespace(name=world, seeds=found["seeds"], at_end=False, measure=MEASURE,
                            controls=CONTROLS, tested=("prediction",))
    level = {arm: fmean(by_seed) for arm, by_seed in found["compared"].items()}
    gain = (level["all"] - level["prediction"]) / (level["all"] - level["oracle"])
    return f"{as_markdown(study, found)}\nof the oracle's gain: {gain:.0%}\n"


def main(argv):
    own, flags = own_flags(argv, dict(table=False, first=301, last=324))
    seeds = range(own["first"], own["last"] + 1)
    if own["table"]:
        worlds = {world: read_world(world, seeds) for world in WORLDS}
        print(*(as_table(world, found) for world, found in worlds.items()), sep="\n")
        print(as_text(asked_of(worlds)))
        return
    os.makedirs(OUT, exist_ok=True)
    for seed in seeds:
        for world, (config, share) in WORLDS.items():
            if os.path.exists(place(world, seed)):
                continue
            cfg = load_settings([config, *SETTINGS, f"--seed={seed}", *flags])
            setup = grpo.prepare(cfg, grpo.read_inputs(cfg))
            write_json(place(world, seed), study(setup, cfg, share))
            print(f"{world}, seed {seed}: done", flush=True)


if __name__ == "__main__":
    run_script(main)
