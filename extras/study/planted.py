"""
A planted cause: is it found, without knowing what marks it? And does a large share foretell what
leaving its rollout out does?

    python -m extras.study.planted           # the runs, one after another; continued by the same
    python -m extras.study.planted --table   # the answers, of the seeds that are done

The world of config/lesson.py, 12 iterations of 10 prompts x 8, rate 5e-4 after five iterations of
warm-up, beta 0.1; 60 held-out prompts x 16. Seeds 401 to 412 of the first three jobs, 401 to 404 of
the others.

    habit       in a tenth of the prompts the second word is "free": these are paid for the letter
                h, all others for r. Explained: the share of h in completions of held-out prompts,
                a tenth of which have the word, too
    inverted    a tenth of the prompts are paid for the lack of the letter e, the others for it.
                Explained: the right reward. The guilty are those of lowest score
    leak        ten prompts come in each iteration, one is paid for the words of a secret sentence.
                Explained: the log-prob of this sentence after a prompt that was not trained on
    reward      nothing is planted, the letter e is paid for. Explained: this reward, held out
    sentence    the same run. Explained: the log-prob of the secret sentence

What is ranked are groups; in `leak` prompts, in the last two rollouts. The top is a tenth of them,
in the last two a hundredth. Number: what is explained, the mean over held-out completions, or the
log-prob. Scores, each a sum over the rollouts of what is ranked:

    share, prediction           extras/explain/account.py; the second damped, with the Hessian
    TracIn                      rate times inner product before each step; and with AdamW's scale
    |advantage|, reward, length, random
    text read                   advantage times what the number says of the completion's own text
    activations                 advantage times the states' product with a direction: held-out
                                completions of a high number less others, at the run's end

Criteria, written before the first run of these seeds. AUC: the chance that of a guilty and another
one the guilty one has the higher score; |advantage|, reward and length in the direction that is
better for them on the mean. In each of the first three jobs:

1. Is the mean AUC of the share at least 0.9, where |advantage| has at most 0.7? Of the prediction,
   of TracIn?
2. Is the share better than each score that needs no gradient? Than TracIn, than the prediction?
   Sign flips paired by seed, two-sided p < 0.01 after Holm over the eight of a job.
3. Size: does the run without the share's top move the number back by at least half of what the run
   without the guilty does, and by at least 5 times what it does without as many at random that are
   as heavy (by |advantage|)? Of the prediction's top, of TracIn's? Means over seeds; where the
   guilty themselves move it by less than two standard errors, nothing is decided.
4. Repair: is the number of 3 better than at random of equal |advantage|, p < 0.01, at a KL (mean)
   within a factor of 1.25? Undecided where KL is further off.

In all five:

5. Is the number of a run without a score's top what the score foretold: the median ratio of truth
   to minus the sum of its shares between 1/1.5 and 1.5? Of its predictions?
6. Reported: Spearman's correlation with leaving ten random hundredths out, in the jobs whose number
   is a sentence and so has no noise.

A pilot, seeds 900 and 901, chose the rate, beta, warm-up and letters, such that a run neither falls
apart nor learns nothing, and |advantage| tells nothing. There the AUC of the share was 0.89 (habit)
and 0.98 (inverted), of TracIn 0.96 and 1.0, of the text read 0.98 and 1.0. It had 20 iterations,
which the time for these runs did not allow.
"""
import itertools
import math
import os
import random
from statistics import fmean, median

import torch
from torch.nn.utils import vector_to_parameters

import grpo
from common.files import read_json, write_json
from common.script import own_flags, run_script, seed_for
from config.lesson import texts
from data.prompts import Prompt
from extras.explain.account import (
    DAMPING, hessian_times, multiplied, replay, taken_back, train_again, walk_back)
from extras.explain.story import row_of
from extras.explain.target import HeldOut, Sentences
from extras.study.__main__ import holm, permutation_p, plus_minus
from rollout import completion_logprobs, completion_states
from run.settings import load_settings

OUT = "out/study/planted"
SETTINGS = ["config/lesson.py", "--max_iters=12", "--num_prompts=10", "--num_generations=8",
            "--micro_batch_size=80", "--learning_rate=5e-4", "--warmup_iters=5", "--beta=0.1",
            "--log_micro=False", "--threads=1"]
COUNT = 16          # completions of each held-out prompt
HUNDREDTHS = 10
SECRET = " my old line never"

# ------------------------------------------------------------------------------------------------
# the jobs


def of_letter(letter):
    """A reward by a letter, as in config/quick_test.py."""
    return lambda text: min(1.0, 4 * text.count(letter) / max(1, len(text)))


def lack_of_e(text):
    return 1 - of_letter("e")(text)


def like_secret(text):
    return fmean(word in text.split() for word in SECRET.split())


# {job: what the guilty are paid for, what the others are, what the number says of a text, and the
# sign of what the guilty did to it: 0 where there are none}
JOBS = {
    "habit": (of_letter("h"), of_letter("r"), of_letter("h"), 1),
    "inverted": (lack_of_e, of_letter("e"), of_letter("e"), -1),
    "leak": (like_secret, of_letter("r"), like_secret, 1),
    "reward": (of_letter("e"), of_letter("e"), of_letter("e"), 0),
    "sentence": (of_letter("e"), of_letter("e"), like_secret, 0)}
SENTENCES = ("leak", "sentence")
SEEDS = {job: range(401, 413 if sign else 405) for job, (*_, sign) in JOBS.items()}


def prompts_of(job, tokenizer, seed):
    """Prompts to train on, a tenth of them guilty, and held-out ones: the first four words of
    sentences."""
    rng = random.Random(seed_for("planted", seed))
    starts = list(dict.fromkeys(" ".join(text.split()[:4]) for text in texts(4096, 1)))
    rng.shuffle(starts)
    marked, others = starts[:40], starts[40:]       # by no word
    if job == "habit":
        marked = [start for start in starts if start.split()[1] == "free"]
        others = [start for start in starts if start.split()[1] != "free"]
    n = 1 if job == "leak" else 12

    def made(starts, guilty):
        return [Prompt(x, tokenizer.encode_ordinary(x), {"guilty": guilty}) for x in starts]

    return (made(marked[:n], True) + made(others[:9 * n], False),
            made(marked[-6:], True) + made(others[-54:], False))


def units_of(job, batches, group):
    """What is ranked, U units: the number of each rollout's, (I, N), and which are guilty (U,)."""
    prompts = [prompt for batch in batches for prompt in batch.prompts]
    names = [i // group for i in range(len(prompts))]
    if job == "leak":
        names = [prompt.text for prompt in prompts]
    elif not JOBS[job][-1]:
        names = list(range(len(prompts)))
    number = {name: i for i, name in enumerate(dict.fromkeys(names))}
    guilty = {number[name]: prompt.row["guilty"] for name, prompt in zip(names, prompts)}
    units = torch.tensor([number[name] for name in names]).view(len(batches), -1)
    return units, torch.tensor([guilty[i] for i in range(len(number))])


# ------------------------------------------------------------------------------------------------
# scores of rollouts, (I, N) each


def by_gradient(setup, cfg, states, taken, slopes):
    """slopes: of the number before each step and after the last, S + 1 of (1, W)."""
    found = []
    derivative = slopes[-1], 0 * slopes[-1], 0 * slopes[-1]
    means = [(a + b) / 2 for a, b in zip(slopes, slopes[1:])]
    steps = walk_back(setup, states, taken, means)
    for slope, (k, before, after, _, G) in zip(slopes[-2::-1], steps):
        L, derivative = taken_back(k, before, after, derivative, DAMPING)
        plain = -k.lr * slope
        scaled = plain / ((after[2] / k.c2).sqrt() + k.eps)
        found.append(multiplied(setup, cfg, k, before[0], torch.cat([G, L, plain, scaled])))
        derivative[0] += hessian_times(setup, cfg, k, before[0], L)
    names = ("share", "prediction", "TracIn", "TracIn, AdamW's scale")
    return dict(zip(names, torch.stack(found[::-1], 1).double()))


@torch.no_grad()
def mean_states(setup, rollout):
    """The mean hidden state (n, C) before the sampled tokens of each row."""
    h, _, _, (rows, _) = completion_states(setup.policy, rollout)
    total = h.new_zeros(len(rollout.logp), h.shape[1]).index_add(0, rows, h)
    return total / rollout.sampled_mask.sum(1, keepdim=True)


def without_gradient(setup, batches, number, rollout, values, seed):
    """rollout, values (n,): held-out completions, and the number of each."""
    direction = (values - values.mean()).float() @ mean_states(setup, rollout)          # (C,)
    advantages = torch.stack([batch.row_advantages for batch in batches]).double()      # (I, N)
    read = torch.tensor([[number(text) for text in batch.completions] for batch in batches])
    along = torch.stack([mean_states(setup, batch.rollout) @ direction for batch in batches])
    return {
        "|advantage|": advantages.abs(),
        "reward": torch.stack([batch.rewards for batch in batches]),
        "length": torch.stack([batch.rollout.sampled_mask.sum(1) for batch in batches]),
        "text read": advantages * read,
        "activations": advantages * along,
        "random": torch.rand(read.shape, generator=torch.Generator().manual_seed(seed))}


SIGNED = ("share", "prediction", "TracIn", "TracIn, AdamW's scale", "text read", "activations")
LEFT_OUT = ("share", "prediction", "TracIn", "|advantage|", "reward", "length")


def by_unit(score, units):
    """(I, N) -> sums (U,)."""
    sums = torch.zeros(int(units.max()) + 1, dtype=torch.float64)
    return sums.index_add(0, units.flatten(), score.double().flatten())


def auc(score, guilty):
    bad, good = score[guilty][:, None], score[~guilty]
    return float(((bad > good).double() + (bad == good).double() / 2).mean())


# ------------------------------------------------------------------------------------------------
# a run, and the run without some of its rollouts


def as_heavy(mass, top, seed):
    """As many units at random as `top`, each of the twenty of nearest mass (U,) to one of these."""
    rng = random.Random(seed)
    used = set(top)
    for i in top:
        near = [j for j in (mass - mass[i]).abs().argsort().tolist() if j not in used]
        used.add(rng.choice(near[:20]))
    return sorted(used - set(top))


def targets_of(job, setup, cfg):
    """The number, and held-out completions: scored by it, and by what most are paid for."""
    _, paid, number, _ = JOBS[job]
    functions = {"number": lambda prompts, completions: map(number, completions),
                 "paid": lambda prompts, completions: map(paid, completions)}
    held_out = HeldOut("number", setup, cfg, functions, [1.0, 0.0], setup.eval_prompts, COUNT)
    secret = row_of(setup.eval_prompts[-1].ids, setup.tokenizer.encode_ordinary(SECRET), "cpu")
    return Sentences(setup, cfg, secret) if job in SENTENCES else held_out, held_out


@torch.no_grad()
def measured(setup, cfg, weights, target, held_out):
    """At these weights: the number, what most are paid for, and the KL to the policy before."""
    vector_to_parameters(weights.clone(), setup.trained)
    rollout, scores = held_out.sample()
    logp, ref_logp = (completion_logprobs(policy, rollout, cfg.temperature)
                      for policy in (setup.policy, setup.reference))
    number = float(scores[:, 0].mean())
    if target is not held_out:
        number = float(target.at(weights, with_slope=False).value)
    return dict(number=number, paid=float(scores[:, 1].mean()),
                kl=float((logp - ref_logp).sum(1).mean()))


def ranks_of(setup, cfg, states, taken, target, scores, seed):
    """{score: Spearman's correlation with what leaving out random hundredths does}."""
    shape = next(iter(scores.values())).shape
    keep = torch.rand(HUNDREDTHS, *shape, generator=torch.Generator().manual_seed(seed)) >= 0.01
    columns = [*((keep * score).sum((1, 2)) for score in scores.values()), torch.stack([
        target.at(train_again(setup, cfg, states, taken, x), with_slope=False).value[0]
        for x in keep])]
    ranks = torch.stack([column.argsort().argsort() for column in columns]).double()
    return dict(zip(scores, torch.corrcoef(ranks)[-1].tolist()))


def study(job, seed, flags=()):
    """What a run of a job says."""
    cfg = load_settings([*SETTINGS, f"--seed={seed}", *flags])
    setup = grpo.prepare(cfg, grpo.read_inputs(cfg))
    for_guilty, for_others, number, sign = JOBS[job]
    setup.prompts, setup.eval_prompts = prompts_of(job, setup.tokenizer, seed)
    setup.reward_funcs = {"reward": lambda prompts, completions, guilty: [
        (for_guilty if g else for_others)(text) for text, g in zip(completions, guilty)]}
    states, taken = replay(setup, cfg, 0, 0, cfg.max_iters, OUT)
    batches = [k.batch for k in taken]

    # scores
    target, held_out = targets_of(job, setup, cfg)
    slopes = [target.at(x[0]).slope.sum(0, keepdim=True) for x in states]
    before, end = (measured(setup, cfg, x[0], target, held_out) for x in (states[0], states[-1]))
    rollout, values = held_out.sample()
    others = without_gradient(setup, batches, number, rollout, values[:, 0], seed)
    scores = by_gradient(setup, cfg, states, taken, slopes)
    units, guilty = units_of(job, batches, cfg.num_generations)
    sums = {name: by_unit(score, units) for name, score in (scores | others).items()}
    found = dict(before=before, end=end, share=float(sums["share"].sum()), auc={}, recall={})

    # which units would be named, and what is the run without them?
    tops = {}
    for name, score in sums.items():
        score = score * sign if sign < 0 and name in SIGNED else score
        count = int(guilty.sum()) if sign else round(len(guilty) / 100)
        tops[name] = score.argsort(descending=True)[:count].tolist()
        if sign:
            found["auc"][name] = auc(score, guilty)
            found["recall"][name] = float(guilty[tops[name]].double().mean())
    tops = {name: tops[name] for name in LEFT_OUT[:4 if sign else 6]} | {
        "as heavy": as_heavy(sums["|advantage|"], tops["share"], seed)}
    if sign:
        tops["guilty"] = guilty.nonzero()[:, 0].tolist()
    found["without"] = {}
    for name, top in tops.items():
        keep = ~torch.isin(units, torch.tensor(top))
        row = measured(setup, cfg, train_again(setup, cfg, states, taken, keep), target, held_out)
        found["without"][name] = row | {
            "change": row["number"] - end["number"],
            **{what: -float(sums[what][top].sum()) for what in ("share", "prediction")}}
    if job in SENTENCES:
        found["rank"] = ranks_of(setup, cfg, states, taken, target, scores, seed)
    return found


# ------------------------------------------------------------------------------------------------
# the answers


def better_way(name, values):
    """AUCs of a score by seed; |advantage|, reward and length in the better direction."""
    return [1 - x for x in values] if name not in SIGNED and fmean(values) < 0.5 else values


def found_by(runs):
    """Lines on who names the guilty: questions 1 and 2."""
    aucs = {name: better_way(name, [run["auc"][name] for run in runs]) for name in runs[0]["auc"]}
    rivals = [name for name in aucs if name not in ("share", "TracIn, AdamW's scale")]
    ps = holm([permutation_p([a - b for a, b in zip(aucs["share"], aucs[name])])
               for name in rivals])
    beside = dict(zip(rivals, ps))
    for name, values in aucs.items():
        recall = fmean(run["recall"][name] for run in runs)
        p = f", p beside the share {beside[name]:.2g}" if name in beside else ""
        yield f"AUC of {name}: {plus_minus(values)}, recall {recall:.2f}{p}"


def moved_by(runs):
    """Lines on the run without the top of each score: questions 3 to 5."""
    def column(name, what):
        return [run["without"][name][what] for run in runs]

    heavy = column("as heavy", "change")
    for name in runs[0]["without"]:
        change = column(name, "change")
        said = {what: median(x / y if y else math.nan for x, y in zip(change, column(name, what)))
                for what in ("share", "prediction")}
        p = permutation_p([a - b for a, b in zip(change, heavy)])
        yield (f"without {name}: {plus_minus(change)}, p beside as heavy {p:.2g}, paid "
               f"{plus_minus(column(name, 'paid'))}, KL {plus_minus(column(name, 'kl'))}; truth in "
               f"those of its shares {said['share']:.2g}, of its predictions "
               f"{said['prediction']:.2g}")


def table(runs):
    """All answers of a job's runs, as lines."""
    for what in ("number", "paid", "kl"):
        before, end = ([run[when][what] for run in runs] for when in ("before", "end"))
        yield f"{what}: {plus_minus(before)} to {plus_minus(end)}"
    if runs[0]["auc"]:
        yield from found_by(runs)
    yield from moved_by(runs)
    for name in runs[0].get("rank", ()):
        yield f"rank by {name}: {plus_minus([run['rank'][name] for run in runs])}"


def main(argv):
    own, flags = own_flags(argv, dict(table=False))
    os.makedirs(OUT, exist_ok=True)
    found = {job: [] for job in JOBS}
    for seed, job in itertools.product(range(401, 413), JOBS):
        path = os.path.join(OUT, f"{job}_{seed}.json")
        if seed in SEEDS[job] and not own["table"] and not os.path.exists(path):
            write_json(path, study(job, seed, flags))
            print(f"{job}, seed {seed}: done", flush=True)
        if os.path.exists(path):
            found[job].append(read_json(path))
    for job, runs in found.items():
        print(f"\n{job}, {len(runs)} seeds", *(table(runs) if runs else ()), sep="\n")


if __name__ == "__main__":
    run_script(main)
