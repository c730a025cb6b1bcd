"""
The rollouts of others' GRPO runs with a planted cause, as the batches that an account takes apart.

    batches = read_batches("cond-s201/rollouts.jsonl", lambda row: row["group"] in deleted)
    units, guilty = groups_of(batches)          # as planted.units_of: what is ranked

The public "organisms" (huggingface.co/ArthT/tda-rl-organisms-h200, -qwen35-2b) have a row for each
rollout: tokens, loss mask, old log-probs, advantage, reward; the deleted groups are listed in
manifests. Their card names these, not their keys, and nobody here has seen a file: check KEYS
against a row, or give your own. There is no reference, so `kl` cannot be a part of the loss.
"""
import torch

from common.files import each_row
from common.script import BadInput
from data.prompts import Prompt
from loss import Batch
from rollout import Rollout, concatenate

KEYS = dict(step="step", group="group", tokens="tokens", loss_mask="loss_mask",
            old_logprobs="old_logprobs", advantage="advantage", reward="reward")


def read_rollout(tokens, sampled, logprobs, where):
    """A Rollout of one row. tokens (L,): prompt and completion. sampled (L,): True where the policy
    drew. logprobs: of all tokens (L,), or of the sampled ones alone."""
    tokens, logprobs = torch.tensor(tokens), torch.tensor(logprobs, dtype=torch.float32)
    sampled = torch.tensor(sampled).bool()
    if len(sampled) != len(tokens) or len(logprobs) not in (len(tokens), int(sampled.sum())):
        raise BadInput(f"{where}: {len(tokens)} tokens, {len(sampled)} of a mask and "
                       f"{len(logprobs)} log-probs: these must belong together")
    if not sampled.any() or sampled[0]:
        raise BadInput(f"{where}: its loss mask has no prompt before it, or nothing sampled")
    logp = torch.zeros(len(tokens))
    logp[sampled] = logprobs[sampled] if len(logprobs) == len(tokens) else logprobs
    first = int(sampled.long().argmax())        # of the completion
    everything = torch.ones(1, len(tokens), dtype=torch.bool)
    return Rollout(
        tokens[None], everything, everything[:, first:], sampled[None, first:], logp[None, first:],
        entropy=torch.zeros(1, len(tokens) - first), ended=torch.ones(1, dtype=torch.bool))


def batch_of(rows, decode):
    """The Batch of a step's rows: [(where, {name of KEYS: value, and "guilty"})]."""
    rollout = concatenate([read_rollout(row["tokens"], row["loss_mask"], row["old_logprobs"], where)
                           for where, row in rows])
    prompts, texts = [], []
    for _, row in rows:
        first = [bool(x) for x in row["loss_mask"]].index(True)
        prompts.append(Prompt(decode(row["tokens"][:first]), row["tokens"][:first],
                              {"group": row["group"], "guilty": row["guilty"]}))
        texts.append(decode(row["tokens"][first:]))
    rewards = torch.tensor([row["reward"] for _, row in rows], dtype=torch.float64)
    return Batch(
        rollout, torch.tensor([float(row["advantage"]) for _, row in rows]), rollout.sampled_mask,
        rollout.sampled_mask, row_weights=torch.ones(len(rows)), prompts=prompts, completions=texts,
        scores=rewards[:, None], rewards=rewards, kl=torch.zeros_like(rollout.logp))


def read_batches(path, guilty=lambda row: False, keys=KEYS, decode=str):
    """A Batch for each step, in order. guilty: of a row of the file. decode: ids to text."""
    steps = {}
    for number, row in enumerate(each_row(path), 1):
        missing = [key for key in keys.values() if key not in row]
        if missing:
            raise BadInput(f"{path}, row {number}: has no {missing[0]!r}, but {sorted(row)}; give "
                           "your own `keys`")
        named = {name: row[key] for name, key in keys.items()} | {"guilty": bool(guilty(row))}
        steps.setdefault(named["step"], []).append((f"{path}, row {number}", named))
    return [batch_of(steps[step], decode) for step in sorted(steps)]


def groups_of(batches):
    """The number of each rollout's group, a list of (N,), and which groups are guilty (U,)."""
    rows = [[prompt.row for prompt in batch.prompts] for batch in batches]
    guilty = {(it, row["group"]): row["guilty"] for it, some in enumerate(rows) for row in some}
    number = {name: i for i, name in enumerate(guilty)}
    return [torch.tensor([number[it, row["group"]] for row in some])
            for it, some in enumerate(rows)], torch.tensor(list(guilty.values()))
