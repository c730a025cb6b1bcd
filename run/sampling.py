"""Sample a run's rollouts: completions of its prompts, as ids and as text, by all processes."""
from typing import NamedTuple

import torch

from common.processes import all_gather_rollout, shard
from data.tokenizer import end_tokens, texts_of
from rollout import Rollout, concatenate


class Samples(NamedTuple):
    """N = B * num_generations completions. A prompt's completions stand side by side."""
    rollout: Rollout
    prompts: list       # N of data.prompts.Prompt: each of the B prompts num_generations times
    texts: list         # N texts, with an environment's additions


@torch.no_grad()
def sample_completions(setup, policy, prompts, cfg, seed):
    """Sample num_generations completions of each of B prompts by a policy, as the settings say
    (temperature, top_k, ...) -> Samples."""
    # the prompt of each completion, for the environment
    prompts_of_rows = [prompt for prompt in prompts for _ in range(cfg.num_generations)]
    respond = setup.environment(prompts_of_rows, cfg)

    # each process samples the completions of its share of the prompts
    with setup.autocast():
        share = setup.generate(
            policy, [prompt.ids for prompt in prompts], cfg.num_generations,
            cfg.max_completion_length, seed=seed, eos=end_tokens(setup.tokenizer),
            part=shard(len(prompts)), respond=respond, batch_size=cfg.decode_batch_size,
            **cfg.sampling)
    rollout = concatenate(all_gather_rollout(share))                                # (N, T)
    return Samples(rollout, prompts_of_rows, texts_of(setup.tokenizer, rollout))
