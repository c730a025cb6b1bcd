"""
On-policy distillation (Agarwal et al. 2024, arXiv 2306.13649; Lu, Thinking Machines, 2025): the
student writes, and a teacher says how likely each of its tokens should have been.

    from extras.distill import of_teacher
    advantage = of_teacher("out/toxicity")      # in a config file: a run, a .pt file, or a
                                                # published model of the same tokens

The advantage of a sampled token is log p(teacher) - log p(student): minus a one-sample estimate of
the reverse KL. With it, the policy gradient descends KL(student, teacher) at each token.
"""
from dataclasses import replace

import grpo
from common.errors import BadInput
from run.policy import load_policy


def load_teacher(name, setup, cfg):
    """The teacher, frozen, on the student's device. BadInput if it has a different tokenizer."""
    teacher, tokenizer = load_policy(replace(cfg, policy=name, chat_template_kwargs=None))
    sizes = [model.config.vocab_size for model in (teacher, setup.policy)]
    texts = [prompt.text for prompt in setup.prompts[:50]]
    cut = [[t.encode_ordinary(text) for text in texts] for t in (tokenizer, setup.tokenizer)]
    if sizes[0] != sizes[1] or cut[0] != cut[1]:
        raise BadInput(f"teacher {name!r}: cuts text into other tokens than the policy does "
                       f"({sizes[0]} and {sizes[1]} tokens): take one with the same tokenizer")
    return teacher.to(setup.device).eval().requires_grad_(False)


def of_teacher(name, coef=1.0):
    """advantage(batch, setup, cfg) for a config file: coef * (log p(teacher) - log p(student)) of
    every sampled token (N, T). The teacher is loaded at the first call."""
    loaded = []

    def advantage(batch, setup, cfg):
        if not loaded:
            loaded.append(load_teacher(name, setup, cfg))
        with_teacher = replace(setup, reference=loaded[0])
        teacher_logp = grpo.reference_logprobs(with_teacher, batch.rollout, cfg)        # (N, T)
        return coef * (teacher_logp - batch.rollout.logp)

    return advantage
