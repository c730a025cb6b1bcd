"""What becomes of groups whose rewards are all equal, beside the core's `keep` and `drop`."""
import itertools

from common.seeds import seed_for
from data.prompts import draw_prompts
from loss import Batch


def resample(setup, it, batch, cfg, sample):
    """Dynamic sampling (DAPO, Yu et al. 2025): groups of further prompts replace those whose
    rewards are all equal, round by round. Those that are left at the end are dropped.

    sample(prompts, seed=...) -> their scored Batch."""
    # prompts that this iteration has not used come first, in random order, then the others
    used = {prompt.text for prompt in batch.prompts}
    order = draw_prompts(setup.prompts, it, len(setup.prompts), seed_for(cfg.seed, "resample"))
    further = itertools.cycle(sorted(order, key=lambda prompt: prompt.text in used))
    replaced = []
    for number in range(cfg.max_resamples):
        # how many groups teach nothing?
        differ = ~batch.equal_rows(cfg.num_generations)                             # (N,)
        missing = int((~differ).sum()) // cfg.num_generations
        if missing == 0:
            break

        # as many new ones go behind those that are kept
        prompts = list(itertools.islice(further, missing))
        fresh = sample(prompts, seed=seed_for(cfg.seed, "resample", it, number))
        rounds = batch.rounds + fresh.rounds
        replaced.append(batch.subset(~differ))
        batch = Batch.joined([batch.subset(differ), fresh])
        batch.rounds = rounds
    batch.replaced = replaced       # for the log: the policy has written them, too
    return batch


def _metrics(batch, cfg):
    """Metrics of groups that were replaced, and of those that are learned from instead.

    Metrics:
        resample/rounds: rounds of further prompts
        resample/used: share of all sampled groups that differ
        resample/reward: as reward, of the completions that are learned from
        resample/mean_length: as completions/mean_length, of these
    """
    learned = ~batch.equal_rows(cfg.num_generations)
    lengths = batch.rollout.sampled_mask.sum(1).float().cpu()
    equal = batch.everything.equal_rows(cfg.num_generations)
    return {
        "resample/rounds": len(batch.rounds) - 1,
        "resample/used": 1 - float(equal.float().mean()),
        "resample/reward": float(batch.rewards[learned].nanmean()),
        "resample/mean_length": float(lengths[learned].mean())}


resample.metrics = _metrics
