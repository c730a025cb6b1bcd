"""
A page with a slider: the learning curve of a training, and what it would have been without some of
its rollouts. The page asks first what you expect.

    python -m extras.slider                     # out/slider.html, some minutes
    python -m extras.slider --points=5          # of the slider, a training for each and each rule
    python -m extras.slider --max_iters=10      # any --name=value of config/lesson.py

Each point is a training of its own from the same start, with the same prompts and random numbers,
that leaves rollouts out of each iteration by a rule. Nothing is predicted.
"""
import os
from dataclasses import replace

import jinja2
import torch

import grpo
from common.cli import own_flags, run_script
from common.files import ROOT, replacing
from common.seeds import seed_for
from extras.explain.tokens import logprob_changes, pieces_of, token_slopes
from rollout import completion_logprobs
from run.settings import load_settings
from tape import Tape

RULES = {       # which rollouts leave first
    "low influence": "the least helpful",
    "high influence": "the most helpful",
    "low reward": "the worst rewarded",
    "random": "random ones"}
FOR_TARGET = 4  # held-out prompts that say what is helpful; further ones measure
SEEDS = 5       # trainings with all rollouts, which show what chance does


# ------------------------------------------------------------------------------------------------
# one training


def held_out_reward(setup, prompts, cfg):
    """16 completions of each prompt, always with the same random numbers -> their mean reward, and
    a function of the weights that has its slope."""
    how = replace(cfg, num_generations=16)
    samples = grpo.sample_completions(setup, setup.policy, prompts, how, seed_for("slider"))
    scores = grpo.all_scores(setup.reward_funcs, samples.prompts, samples.texts, how)
    r = grpo.total_reward(scores, cfg.reward_weights, 16).view(len(prompts), 16)
    better = (r - r.mean(1, keepdim=True)).flatten() * 16 / 15     # than the prompt's others

    def surrogate():
        logp = completion_logprobs(setup.policy, samples.rollout, cfg.temperature).sum(1)
        return (better * logp).mean()

    return r.mean().item(), surrogate


def influence_of(setup, batch, cfg):
    """By how much a small plain step on each rollout raises the held-out reward (N,), and a
    function that gives the same by token (N, T)."""
    step = next(grpo.optimizer_steps(batch, cfg, seed=0))       # all rows
    _, surrogate = held_out_reward(setup, setup.eval_prompts[:FOR_TARGET], cfg)
    target = dict(zip(setup.trained, torch.autograd.grad(surrogate(), setup.trained)))
    slopes = token_slopes(setup, cfg, batch, step)              # (N, T) of its loss
    mask = batch.rollout.sampled_mask
    with Tape(setup.policy, len(mask)) as tape:
        tape.next_rows(torch.arange(len(mask)), flat={setup.policy.lm_head: mask.nonzero()[:, 0]})
        logp = completion_logprobs(setup.policy, batch.rollout, cfg.temperature)
        (slopes * logp).sum().backward()
    setup.policy.zero_grad(set_to_none=True)

    def by_token():
        return -slopes * logprob_changes(setup.policy, target, batch.rollout, cfg.temperature)

    return -tape.dot(target), by_token


def order_of(rule, influence, rewards, it):
    """The rollouts (N,), those that the rule leaves out first at the front."""
    if rule == "random":
        generator = torch.Generator().manual_seed(seed_for("slider", it))
        return torch.randperm(len(rewards), generator=generator)
    if rule == "low reward":
        return rewards.argsort(stable=True)
    return influence.argsort(stable=True, descending=rule == "high influence")


def shown_rollouts(setup, batch, influence, by_token, it):
    """What the page shows of an iteration: its rollouts, and their order by each rule."""
    rows = []
    for i in range(len(influence)):
        pieces = pieces_of(batch.rollout[[i]], by_token[i], setup.tokenizer)
        rows.append(dict(
            prompt=batch.prompts[i].text, reward=round(float(batch.rewards[i]), 3),
            advantage=round(float(batch.advantages[i]), 2), influence=round(float(influence[i]), 4),
            words=[[piece.text or "[end]", round(piece.influence, 5)] for piece in pieces]))
    orders = {rule: order_of(rule, influence, batch.rewards, it).tolist() for rule in RULES}
    return dict(rollouts=rows, orders=orders)


def train(setup, start, cfg, rule=None, count=0, show=False):
    """A training from the start without `count` rollouts in each iteration -> the held-out reward
    before each step and at the end, three completions, and what the page shows of it."""
    setup.policy.load_state_dict(start)
    setup.optimizer.state.clear()
    measured = setup.eval_prompts[FOR_TARGET:]
    curve, shown = [], []
    for it in range(cfg.max_iters):
        curve.append(held_out_reward(setup, measured, cfg)[0])
        batch = grpo.collect_iteration(setup, it, cfg)
        influence = None
        if show or "influence" in (rule or ""):
            influence, by_token = influence_of(setup, batch, cfg)
        if show:
            shown.append(shown_rollouts(setup, batch, influence, by_token(), it))
        if count:
            batch.row_weights[order_of(rule, influence, batch.rewards, it)[:count]] = 0
        if count < len(batch.rewards):
            grpo.update(setup, batch, None, cfg, seed=it)
    curve.append(held_out_reward(setup, measured, cfg)[0])
    texts = grpo.sample_completions(setup, setup.policy, measured[:3], cfg, seed=2).texts
    return [round(x, 4) for x in curve], texts[::cfg.num_generations], shown


# ------------------------------------------------------------------------------------------------
# the page


def replays(setup, start, cfg, counts):
    """{rule: [(curve, texts) for each count]}. With none or all left out, the rules are the same.
    """
    trainings = {}
    ends = {count: train(setup, start, cfg, "random", count)[:2] for count in (0, counts[-1])}
    for rule in RULES:
        trainings[rule] = [ends.get(count) or train(setup, start, cfg, rule, count)[:2]
                       for count in counts]
        print(f"{rule}: ends at", *(f"{curve[-1]:.3f}" for curve, _ in trainings[rule]), flush=True)
    return trainings


def content_of(setup, cfg, counts):
    """What the page needs, as JSON can hold it."""
    start = {name: x.clone() for name, x in setup.policy.state_dict().items()}
    chance = [train(setup, start, replace(cfg, seed=cfg.seed + i))[0] for i in range(1, SEEDS)]
    *_, shown = train(setup, start, cfg, show=True)
    trainings = replays(setup, start, cfg, counts)
    chance.append(trainings["random"][0][0])
    return dict(
        rules=RULES, counts=counts, size=cfg.num_prompts * cfg.num_generations,
        seeds=SEEDS, low=list(map(min, *chance)), high=list(map(max, *chance)),
        curves={rule: [curve for curve, _ in some] for rule, some in trainings.items()},
        texts={rule: [texts for _, texts in some] for rule, some in trainings.items()},
        iterations=shown)


def write_page(path, content):
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(os.path.dirname(__file__)), autoescape=True)
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": True}      # the rules' order stays
    page = environment.get_template("page.html").render(content=content)
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with replacing(path) as tmp, open(tmp, "w", encoding="utf-8") as f:
        f.write(page)
    print(f"{path}: {len(page.encode()) / 1000:.0f} kB")


def main(argv):
    own, flags = own_flags(argv, dict(points=13, out="out/slider.html"))
    cfg = load_settings([f"{ROOT}/config/lesson.py", "--max_iters=20", *flags])
    size = cfg.num_prompts * cfg.num_generations
    counts = [round(x) for x in torch.linspace(0, size, own["points"]).tolist()]
    setup = grpo.prepare(cfg, grpo.read_inputs(cfg))
    write_page(own["out"], content_of(setup, cfg, counts))


if __name__ == "__main__":
    run_script(main)
