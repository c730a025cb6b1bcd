"""
What an account predicts of rollouts that are left out, beside what the run made again without them
does. trust.py and left_out.py ask it of many runs.

K = 4 + 1 columns: the log-probs of four completions of the run's first iteration, one each of its
first four prompts, and the held-out reward. M subsets of the I x N rollouts.
"""
import functools
import json
import os
import tempfile
import time
from dataclasses import replace

import torch
from torch.nn.utils import vector_to_parameters

import grpo
from common.script import seed_for
from extras.explain.account import DRAWS, account, replay, smoothness_by, train_again
from extras.explain.target import Course, HeldOut, Sentences, centred
from judge.rewards import score
from rollout import completion_logprobs
from run.sampling import sample_completions

SENTENCES = 4
DRAWN = 256                         # held-out completions of a prompt
FEWER = (16, 2)                     # what predictions by fewer are worth is asked, too
DAMPINGS = (0.3, 0.1, 0.03, 0.0)
PLAIN = "no Hessian"                # damped by the first of these
LISTED = 3                          # single rollouts at either end of a list
AT_ONCE = 1024                      # completions


# ------------------------------------------------------------------------------------------------
# the truth


class Truth:
    """How much another run has of each column, beside the run itself: exactly of the sentences.

    Of the reward by completions that the run itself drew, weighed by their likelihood ratio: the
    mean of (p' / p - 1) (r - mean of the prompt's others). Where the two runs are near each other
    its noise goes to 0 with their distance, unlike that of the difference of two means. They are
    not the completions that the prediction's slope is made of."""

    def __init__(self, setup, cfg, sentences, end):
        self.setup = setup
        self.sentences = sentences
        how = replace(cfg.untruncated(1.0), num_generations=DRAWN, decode_batch_size=AT_ONCE)
        vector_to_parameters(end.clone(), setup.trained)
        self.rollout, prompts, texts = sample_completions(
            setup, setup.policy, setup.eval_prompts, how, seed_for("truth"))
        scores = score(setup.reward_funcs, prompts, texts)
        self.reward, self.signal = centred(scores, torch.ones(1).double(), DRAWN)   # (n,)
        self.logp = self.logp_at(end)
        self.before = self.logp_of_sentences(end)

    def logp_at(self, weights):
        vector_to_parameters(weights.clone(), self.setup.trained)
        with torch.no_grad():
            return torch.cat([
                completion_logprobs(self.setup.policy, self.rollout[rows], 1.0).sum(1).double()
                for rows in torch.arange(len(self.reward)).split(AT_ONCE)])

    def logp_of_sentences(self, weights):
        return self.sentences.at(weights, with_slope=False).parts.sum(1).double()

    def at(self, weights):
        """Changes (K,), and the standard error of the last, the reward's."""
        changes = self.logp_of_sentences(weights) - self.before
        x = (self.logp_at(weights) - self.logp).expm1() * self.signal
        return [*changes.tolist(), float(x.sum())], float(x.std() * len(x) ** 0.5)


# ------------------------------------------------------------------------------------------------
# a run


def effects_of(setup, cfg, states, taken, slopes, folder, damping, hessian=True):
    """The effects (K, I, N) on columns whose slopes (K, W) at the end are given. No shares."""
    nothing = torch.zeros_like(slopes)
    course = Course(None, None, [nothing] * len(taken), slopes)
    return account(setup, cfg, states, taken, course, folder, hessian, damping).effects


def halves_at(held_out, weights):
    """The slopes (2, W) at these weights of two halves of the prompts, which add up."""
    halves = [held_out._replace(prompts=held_out.prompts[i::2]) for i in range(2)]
    return torch.cat([half.at(weights).slope / 2 for half in halves])


def all_effects(setup, cfg, states, taken, slope, points, folder, dampings):
    """Effects (K, I, N) by damping and for PLAIN, and (1, I, N) on the reward by fewer completions
    of a prompt; and {count: how far the halves agree}. slope: of the sentences. points: {count:
    slopes (2, W) of halves of the reward}. Fewer, and no Hessian, are asked of the first damping
    alone."""
    found = {}
    agreement = {}
    for damping in dampings:
        counts = list(points) if damping == dampings[0] else [DRAWN]
        slopes = torch.cat([slope, *(points[count] for count in counts)])
        effects = effects_of(setup, cfg, states, taken, slopes, folder, damping)
        by_sentence, *by_count = effects.split([SENTENCES, *[2] * len(counts)])
        for count, x in zip(counts, by_count):
            reward = x.sum(0, keepdim=True)
            if damping == dampings[0]:
                agreement[str(count)] = float(torch.corrcoef(x.flatten(1))[0, 1])
            if count == DRAWN:
                found[damping] = torch.cat([by_sentence, reward])
            else:
                found[count] = reward
    slopes = torch.cat([slope, points[DRAWN].sum(0, keepdim=True)])
    found[PLAIN] = effects_of(setup, cfg, states, taken, slopes, folder, dampings[0], hessian=False)
    return found, agreement


def subsets_of(effects, sizes, seed):
    """{size: M lists of rollouts, by their numbers in I x N}. sizes: {name: (share, M)} at random;
    and the single rollouts that a list would begin and end with, by `effects` (K, I, N): of the
    first sentence, and of the reward."""
    generator = torch.Generator().manual_seed(seed)
    n = effects[0].numel()
    found = {name: [(torch.rand(n, generator=generator) < share).nonzero()[:, 0].tolist()
                    for _ in range(count)] for name, (share, count) in sizes.items()}
    for name, i in (("single by sentence", 0), ("single by reward", -1)):
        order = effects[i].flatten().argsort().tolist()
        found[name] = [[j] for j in order[:LISTED] + order[-LISTED:]]
    return found


def predictions(effects, subsets):
    """M lists of K, by effects (K, I, N)."""
    return [(-effects.flatten(1)[:, out].sum(1)).tolist() for out in subsets]


def measure(cfg, inputs, sizes, seed, dampings=DAMPINGS):
    """All numbers of a run of these settings, as plain lists: `truth` and `predicted` by size, M of
    K; `noise`, the standard errors of the rewards; `agreement` by the completions of a prompt, and
    `fewer`, what is predicted of the reward by fewer of them, by size."""
    began = time.process_time()
    setup = grpo.prepare(cfg, inputs)
    with tempfile.TemporaryDirectory() as folder:
        states, taken = replay(setup, cfg, 0, 0, cfg.max_iters, folder)
        start, end = states[0][0], states[-1][0]
        first = taken[0].batch.rollout
        some = torch.arange(0, len(first.ended), cfg.num_generations)[:SENTENCES]
        sentences = Sentences(setup, cfg, first[some])
        truth = Truth(setup, cfg, sentences, end)
        points = {}
        for count in (DRAWN, *FEWER):
            held_out = HeldOut("reward", setup, cfg, setup.reward_funcs, [1.0],
                               setup.eval_prompts, count)
            points[count] = halves_at(held_out, end)
            if count == DRAWN:
                before = held_out.at(start, with_slope=False)

        effects, agreement = all_effects(
            setup, cfg, states, taken, sentences.at(end).slope, points, folder, dampings)
        found = dict(
            reward=[float(before.parts.sum()), float(truth.reward.sum())],
            smoothness=[smoothness_by(setup, cfg, states, taken, seed_for("smoothness", i))
                        for i in range(DRAWS)], agreement=agreement)

        # the truth: the run again
        shape = effects[dampings[0]].shape[1:]
        subsets = subsets_of(effects[dampings[0]], sizes, seed)
        found |= {name: {size: [] for size in subsets} for name in ("truth", "noise")}
        for size, lists in subsets.items():
            for out in lists:
                factors = torch.ones(shape, dtype=torch.float64)
                factors.view(-1)[out] = 0
                change, noise = truth.at(train_again(setup, cfg, states, taken, factors))
                found["truth"][size].append(change)
                found["noise"][size].append(noise)
    for name, keys in (("predicted", [*dampings, PLAIN]), ("fewer", FEWER)):
        found[name] = {str(key): {size: predictions(effects[key], lists)
                                  for size, lists in subsets.items()} for key in keys}
    return found | dict(seconds=time.process_time() - began)


def measured(path, make):
    """The numbers in a file, or those that are made now and written there."""
    if make and not os.path.exists(path):
        found = make()
        with open(path, "w", encoding="utf-8") as f:
            json.dump(found, f)
    if not os.path.exists(path):
        return None
    with open(path, encoding="utf-8") as f:
        return json.load(f)


def all_measured(folder, runs, own, measure_run):
    """The numbers of all runs that are done. First those of this part are made, by
    measure_run(run): own["part"] of own["parts"], or none with own["table"]."""
    os.makedirs(folder, exist_ok=True)
    found = []
    for run in runs:
        is_own = not own["table"] and run["number"] % own["parts"] == own["part"] - 1
        make = functools.partial(measure_run, run) if is_own else None
        found.append(measured(f"{folder}/{run['number']:02}.json", make))
    return [row for row in found if row]


# ------------------------------------------------------------------------------------------------
# statistics


def ranks(x):
    return x.argsort().argsort().double()


def correlation(a, b):
    """Spearman's, of two vectors."""
    return float(torch.corrcoef(torch.stack([ranks(a), ranks(b)]))[0, 1])


def columns(row, size, damping, which):
    """[(predicted (M,), truth (M,))] of the `sentences`, or of the `reward`."""
    predicted, truth = (torch.tensor(x[size], dtype=torch.float64).T
                        for x in (row["predicted"][str(damping)], row["truth"]))
    pairs = list(zip(predicted, truth))
    return pairs[:-1] if which == "sentences" else pairs[-1:]


def order_of(row, size, damping, which):
    """The rank correlation of prediction and truth, mean over columns."""
    found = [correlation(*pair) for pair in columns(row, size, damping, which)]
    return sum(found) / len(found)


def slope_of(pairs):
    """Of the truth on the prediction, least squares through 0, over all pairs."""
    predicted, truth = (torch.cat(x) for x in zip(*pairs))
    return float(predicted @ truth / (predicted @ predicted).clamp(min=1e-30))


def error_of(pairs):
    """How far predictions are off, as a part of the truth (root mean squares)."""
    predicted, truth = (torch.cat(x) for x in zip(*pairs))
    return float((predicted - truth).norm() / truth.norm().clamp(min=1e-30))


def reliability(row, size):
    """The part of the variance of the reward's true changes that is no noise."""
    truth = torch.tensor(row["truth"][size], dtype=torch.float64)[:, -1]
    noise = torch.tensor(row["noise"][size], dtype=torch.float64).square().mean()
    return float(1 - noise / truth.var().clamp(min=1e-30))


def auc(scores, bad):
    """The chance that a bad one has the higher score than a good one."""
    pairs = [(a > b) + 0.5 * (a == b) for a, is_bad in zip(scores, bad) if is_bad
             for b, other in zip(scores, bad) if not other]
    return sum(pairs) / len(pairs) if pairs else float("nan")


def bound_of(scores, bad):
    """The score below which most are bad and above which most are good: the middle, where several
    bounds tell equally many apart."""
    edges = sorted({0.0, 1.0, *scores})
    middles = [(a + b) / 2 for a, b in zip(edges, edges[1:])]
    right = [sum((x < middle) == is_bad for x, is_bad in zip(scores, bad)) for middle in middles]
    best = [x for x, n in zip(middles, right) if n == max(right)]
    return best[len(best) // 2]
