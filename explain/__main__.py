"""
Explains a run: which rollouts helped, which hurt, which words, and is the arithmetic right.

    python tracin.py out/toxicity_tracin                    # prints it, writes influence.html there
    python tracin.py out/toxicity --tracin=reward           # a run that was made without influence
    python tracin.py out/toxicity --before                  # from ckpt_prev.pt, before the end
    python tracin.py out/toxicity config/mine.py --tracin=target    # the function in mine.py
    python tracin.py out/toxicity --prompt="You are" --completion=" a good editor"
                                                            # what makes the model say this?

The sentences are about all rollouts that the run has scored. The page is about the iteration that
follows the last checkpoint, which is sampled and scored here and changes nothing. With --prompt so
are the sentences.
"""
import os
from dataclasses import replace
from typing import Any, NamedTuple

import torch

import grpo
import tracin
from config import load_settings
from data.chat import encode_prompt
from data.prompts import draw_prompts
from data.tokenizer import end_tokens
from explain.page import page
from explain.sentences import best_and_worst, own_units, sentences_of
from explain.words import logprob_changes, pieces_of, row_alone
from run.checkpoint import load_checkpoint, read_checkpoint, set_random_state
from common.files import read_rows, replacing, undamaged
from run.loop import sample_rows
from run.metrics import bound_of
from common.script import BadInput, hash_of, own_flags, run_script, seed_for
from tape import inner

CHECKED = 8     # rollouts whose influence is computed by a plain backward, too
SHOWN = 5       # rollouts in a list


class Again(NamedTuple):
    """An optimizer step that is scored and not taken."""
    nets: Any           # run.build.Nets
    tape: Any           # tape.Tape
    batch: Any          # grpo.Batch
    step: Any           # grpo.Step
    found: Any          # tracin.Findings
    rows: list          # as in samples.jsonl


def iteration_after(nets, path, cfg):
    """The iteration that grpo.py would do next from this checkpoint -> Again."""
    content = read_checkpoint(path)
    if content["settings"]["tracin"] != cfg.tracin:
        content["influence"] = None     # the average of other targets
    with undamaged(path):
        load_checkpoint(content, path, nets, cfg, hash_of(nets.base))
    set_random_state(content["random"])
    it = content["iteration"]
    prompts = draw_prompts(nets.prompts, it, cfg.num_prompts, cfg.seed)
    batch = grpo.collect(nets, prompts, cfg, seed_for(cfg.seed, "rollout", it))
    target = None
    if cfg.tracin_val_prompts:
        target = tracin.collect_target(nets, it, cfg, grpo.collect)
    seed = seed_for(cfg.seed, "rows", it)
    step = next(grpo.optimizer_steps(batch, cfg, seed), None)
    if step is None:
        raise BadInput(f"{path}: no rollout of the next iteration carries loss; try --before")
    with nets.influence.start_tape(batch, step, fresh=True) as tape:
        for rows in grpo.micro_batches(batch.lengths, step.rows, cfg):
            nets.influence.forward_backward(rows)
    found = nets.influence.keep_helpful(target, seed_for(seed, "select", 0))
    nets.policy.zero_grad(set_to_none=True)     # no step is taken
    rows = sample_rows(it, prompts, batch, cfg)
    batch.row_weights.fill_(1.0)                    # they would weigh the loss
    scored = [rows[i] for i in step.rows.tolist()]
    return Again(nets, tape, batch, step, found, scored)


def saying(prompt, completion):
    """A target: the mean log-prob of a completion after a prompt."""
    def target(policy, tokenizer, batch):
        _, before = encode_prompt(tokenizer, prompt, "--prompt")
        said = tokenizer.encode_ordinary(completion)
        size = len(before) + len(said)
        most = policy.config.block_size
        if size > most:
            raise BadInput(f"--prompt and --completion have {size} tokens: must be {most} at most")
        ids = torch.tensor([before + said], device=policy.wte.weight.device)
        h = policy(ids[:, :-1])[0, -len(said):]                                 # (T, C)
        logp = policy.lm_head(h).float().log_softmax(-1)                        # (T, V)
        return logp.gather(1, ids[0, -len(said):, None]).mean()

    return target


def scored_against(again, cfg, j):
    """{parameter: tensor}: what the row at position j of the step is scored against."""
    found = again.found
    if not cfg.tracin_leave_one_out or found.target_coef is None:
        return found.G
    i = int(again.step.rows[j])
    own = again.tape.gradient(torch.arange(len(found.target_coef), device=found.scores.device) == i)
    return {p: g - found.target_coef[i] * found.scale.get(p, 1) * own[p]
            for p, g in found.G.items()}


def check(again, cfg):
    """A sentence: the tape's influences beside those by a plain backward for each rollout."""
    if cfg.loss_type == "bnpo":
        return ("With loss_type = 'bnpo' a rollout alone has another loss: nothing is checked, and "
                "its words add up to a multiple of its influence.")
    nets, _, batch, step, found, _ = again
    order = found.scores.argsort()
    chosen = order[::max(1, len(order) // CHECKED)].tolist()
    plain = []
    for j in chosen:
        g = nets.influence.gradient_of(batch, step.rows[[j]], step, "policy")
        plain.append(inner(g, scored_against(again, cfg, j)))
    plain = torch.stack(plain).to(found.scores)
    error = (found.scores[chosen] - plain).abs().max() / plain.abs().max().clamp(min=1e-30)
    verdict = "agrees with" if float(error) < bound_of(nets.dtype) else "CONTRADICTS"
    return (f"Iteration {again.rows[0]['iteration']}: the tape {verdict} a plain backward for each "
            f"of {len(chosen)} rollouts (error {float(error):.0e} of the largest influence).")


def words_of(again, cfg, chosen):
    """{position in the step: the row's Pieces}, influence in standard deviations."""
    nets, _, batch, step, found, _ = again
    unit = float(found.scores.std(correction=0)) or 1.0
    names = {p: name for name, p in nets.policy.named_parameters()}
    ends = end_tokens(nets.tokenizer)
    words = {}
    for j in chosen:
        i = step.rows[[j]]
        loss = grpo.loss_of(nets, nets.policy, batch, i, step, cfg)
        slope, = torch.autograd.grad(loss.policy, loss.logp)                    # (1, T)
        row = row_alone(batch.rollout, int(i), cfg.temperature)
        D = {names[p]: g for p, g in scored_against(again, cfg, j).items()}
        change = logprob_changes(nets.policy, D, row)
        influence = slope[0, :len(change)] * change / unit
        words[j] = pieces_of(row, influence, nets.tokenizer, ends)
    return words


def print_rollouts(rows):
    z = own_units(rows)
    for heading, places in best_and_worst(z, SHOWN).items():
        print(f"\n{heading}")
        for i in places:
            row = rows[i]
            print(f"  {z[i]:+7.2f}  iteration {row['iteration']}, reward {row['reward']:.3f}, "
                  f"advantage {row['advantage']:+.2f}, weight {row['weight']:.2g}: "
                  f"{row['prompt'][:48]!r} -> {row['completion'][:48]!r}")


def write_page(folder, about, sentences, again, cfg):
    z = own_units(again.rows)
    lists = best_and_worst(z, SHOWN)
    words = words_of(again, cfg, sum(lists.values(), []))
    cards = {heading: [(again.rows[j] | {"z": float(z[j])}, words[j]) for j in places]
             for heading, places in lists.items()}
    path = os.path.join(folder, "influence.html")
    with replacing(path) as tmp, open(tmp, "w", encoding="utf-8") as f:
        f.write(page(f"Influence: {folder}", about, sentences, cards))
    print(f"\n{path}: open it in a browser to see the words")


def settings_of(folder, flags, prompt, completion):
    """The run's settings with a target: the run's, or the one that the question asks for."""
    cfg = load_settings([folder, *flags])
    if completion:
        cfg.functions["target"] = saying(prompt, completion)
        cfg = replace(cfg, tracin="target", tracin_val_prompts=0, tracin_target_ema=0.0,
                      tracin_leave_one_out=False)
    elif cfg.tracin == "off":
        cfg.tracin = "reward"
    return cfg


def main(argv):
    own, flags = own_flags(argv[1:], dict(before=False, prompt="", completion=""))
    prompt = own["prompt"]
    asked = own["completion"]
    if not argv or bool(prompt) != bool(asked):
        raise BadInput("usage: python tracin.py RUN [CONFIG.py] [--before] [--prompt=TEXT "
                       "--completion=TEXT] [--setting=value ...]")
    folder = argv[0]
    cfg = settings_of(folder, flags, prompt, asked)
    nets = grpo.prepare(cfg, grpo.read_inputs(cfg), grpo, may_train=False)
    path = os.path.join(folder, "ckpt_prev.pt" if own["before"] else "ckpt.pt")
    again = iteration_after(nets, path, cfg)
    rows = again.rows
    metrics = []
    recorded = [row for row in read_rows(os.path.join(folder, "samples.jsonl"))
                if None not in (row.get("reward"), row.get("influence"))]
    if recorded and not asked:
        rows = recorded
        metrics = read_rows(os.path.join(folder, "metrics.jsonl"))

    target = f"{asked!r} after {prompt!r}" if asked else f"{cfg.tracin!r}"
    about = (f"{folder}: {len(rows)} rollouts, target {target}. Influence is in standard "
             "deviations of its iteration: above 0 helps the target, below 0 harms it.")
    with undamaged(folder):
        sentences = sentences_of(rows, metrics, nets.tokenizer.encode_ordinary)
        sentences.append(check(again, cfg))
        print(about, *sentences, sep="\n- ")
        print_rollouts(rows)
    write_page(folder, about, sentences, again, cfg)


if __name__ == "__main__":
    run_script(main)
