"""What a run prints and logs: a line, warnings and rows of each iteration and evaluation."""
import math
import os
import statistics
import time

from common.files import read_log
from common.processes import all_gather, rank_and_size
from common.script import BadInput, optional, shown
from rollout import Sampling
from run.checkpoint import append_rows
from run.flags import problems_of_evaluation
from run.inputs import makes_another_evaluation, makes_another_iteration, since_change
from run.metrics import batch_metrics, num_tokens, rollout_toxicity
from run.report import (
    StepLog, Warned, print_influence, print_iteration, print_phases, print_warnings, reward_of)


def sample_row(it, batch, i, cfg):
    """A row of samples.jsonl: completion i of a Batch."""
    # what was asked and written, and its reward
    prompt = batch.prompts[i]
    row = dict(iteration=it + 1, prompt=prompt.text, completion=batch.completions[i],
               reward=float(batch.rewards[i]))

    # with the prompt's other columns, and each reward by itself where there are several
    if list(prompt.row.values()) != [prompt.text]:      # it says more than the prompt
        row["row"] = prompt.row
    if len(cfg.reward_funcs) > 1:
        scores = [None if math.isnan(x) else x for x in batch.scores[i].tolist()]
        row["scores"] = dict(zip(cfg.reward_funcs, scores))
    return row


def sample_rows(it, batch, cfg):
    """Rows of samples.jsonl: every completion with its reward and advantage, then those that others
    have replaced."""
    # what the step has made of each completion
    columns = {"advantage": batch.row_advantages}
    if cfg.tracin != "off":
        columns |= {"influence": batch.influence, "weight": batch.row_weights}
    if cfg.zero_std_groups != "keep":
        columns["learned"] = ~batch.equal_rows(cfg.num_generations)
    columns = {name: x.tolist() for name, x in columns.items()}
    rows = [sample_row(it, batch, i, cfg) | {name: x[i] for name, x in columns.items()}
            for i in range(int((batch.age == 0).sum()))]     # behind them stands what is replayed

    # completions of groups that taught nothing: the policy wrote them, too
    for other in batch.replaced or ():
        rows += [sample_row(it, other, i, cfg) | dict(advantage=None, learned=False)
                 for i in range(len(other.prompts))]
    return rows


def logged_rewards(path):
    """{iteration: reward} of a log of metrics; {} where it cannot be read, which resume says."""
    try:
        rows = read_log(path)
    except BadInput:
        return {}
    return {row.get("iteration", 0): row.get("reward") for row in rows}


def noise_between(before, after, std, num_generations):
    """Standard error of how far the mean reward of two evaluations differs; NaN where nothing is
    known. std: of the reward of single completions."""
    # of the completions that there are, as if each stood alone
    pairs = zip(before.get("prompt_rewards", ()), after.get("prompt_rewards", ()))
    changes = [new - old for old, new in pairs if None not in (old, new)]
    if not changes:
        return math.nan
    alone = std * math.sqrt(2 / (len(changes) * num_generations))

    # but training moves the completions of a prompt together: does one prompt change as others do?
    together = statistics.pstdev(changes) / math.sqrt(max(1, len(changes) - 1))
    return max(alone, together)


class Wandb:
    """Also sends what is logged to wandb, where the settings ask for it."""

    def __init__(self, cfg):
        self.wandb = None
        if cfg.wandb_project and rank_and_size()[0] == 0:
            with optional("wandb"):
                import wandb
                self.wandb = wandb

    def tell(self, what, *args, **kwargs):
        """Call a function of wandb. If it fails, the run goes on."""
        if self.wandb is None:
            return
        try:
            getattr(self.wandb, what)(*args, **kwargs)
        except (Exception, SystemExit) as e:    # whatever it raises: no network, no key, ...
            print(f"note: wandb.{what} failed ({type(e).__name__}: {shown(str(e))}): the run goes "
                  "on without wandb; metrics.jsonl has all metrics", flush=True)
            self.wandb = None


class Log:
    """The log of a run, on paper and on the screen. A line or a warning compares with what came
    before it."""

    def __init__(self, cfg):
        self.cfg = cfg
        self.warned = Warned()
        self.wandb = Wandb(cfg)
        self.began = None                       # the first iteration
        self.num_tokens = 0

        # what later lines and warnings compare with
        self.first = None                       # metrics of the run's first iteration
        self.first_evaluation = None
        self.seconds = []                       # of each iteration
        self.norms = []                         # of the gradient of each iteration
        self.kls = []                           # of each iteration, with beta
        self.num_unscored = 0                   # iterations in a row in which no reward was known
        self.earlier = {}                       # {iteration: reward} that a resumed run repeats
        self.gaps = []                          # of the rewards of repeated iterations

    def begin(self, folder, setup, done, num_tokens, rewards):
        """From the start (done None), or behind so many iterations of an interrupted run. rewards:
        {iteration: reward} of its log before that was cut."""
        self.folder = folder
        self.setup = setup
        self.start = done or 0
        self.num_tokens = num_tokens
        if done is not None:
            self.earlier = {it: reward for it, reward in rewards.items() if it > done}
            self.first = self.first_row("metrics.jsonl", makes_another_iteration)
            self.first_evaluation = self.first_row("eval.jsonl", makes_another_evaluation)
        name = os.path.basename(folder)
        self.wandb.tell("init", project=self.cfg.wandb_project, name=name, config=self.cfg.public())

    def first_row(self, log, matters):
        """The first row of a log that later ones can be compared with, NaN where nothing is known;
        None if there is none. matters: of run/inputs.py."""
        rows, _ = since_change(read_log(f"{self.folder}/{log}"), self.setup.changes, matters)
        if not rows:
            return None
        return {name: math.nan if x is None else x for name, x in rows[0].items()}

    def has_evaluation(self, done):
        """Whether the log has it, as rank 0 sees it."""
        found = [row["iteration"] for row in read_log(f"{self.folder}/eval.jsonl")]
        return all_gather([done in found])[0]

    def step_log(self):
        """The StepLog of an iteration that begins."""
        if self.began is None:
            self.began = time.monotonic()
        return StepLog(self.setup.device, self.cfg.log_micro)

    def epoch(self, it):
        """Passes over the prompts, where all come in turn."""
        if "choose" in self.cfg.functions:
            return {}
        return {"epoch": (it + 1) * self.cfg.num_prompts / len(self.setup.prompts)}

    def record(self, it, batch, metrics, log):
        """Print the line and the warnings of an iteration, and log its completions -> all of its
        metrics.

        Metrics:
            iteration: from 1
            learning_rate: of the optimizer's steps; of several groups the first one's
            num_tokens: tokens of prompts and completions so far, without padding
            epoch: passes over the prompts, without further ones of resample. Not with a function
                choose
            step_time: seconds
            cfg/NAME: a setting that the config file's after has changed, as this iteration used it
        """
        cfg = self.cfg

        # all that is known of the iteration
        seconds = sum(log.seconds.values())
        self.num_tokens += num_tokens(batch)
        m = {"iteration": it + 1, **metrics, **batch_metrics(batch, cfg),
             "learning_rate": self.setup.optimizer.param_groups[0]["lr"],
             "num_tokens": self.num_tokens,
             **self.epoch(it),
             **{f"cfg/{name}": getattr(cfg, name) for name in cfg.given},
             "step_time": seconds,
             **rollout_toxicity(batch, self.setup)}

        # its line, and what looks wrong in it
        each = max(0.0, time.monotonic() - self.began) / (it + 1 - self.start)
        print_iteration(m, cfg, log.num_sampled, each * (cfg.max_iters - it - 1))
        is_slow = self.seconds and seconds > 1.5 * statistics.median(self.seconds)
        if it in (self.start, cfg.max_iters - 1) or is_slow:
            print_phases(log.seconds)
        if "tracin/mean_ip" in m:
            print_influence(m, batch)
        if "ref_tensors_differing" in m:
            print(f"reference synced: {m['ref_tensors_differing']} tensors differ from the policy, "
                  f"{m['ref_distance_left']:.2f} of the distance is left")
        self.first = self.first or m
        groups = batch.fresh.rewards.view(-1, cfg.num_generations)
        print_warnings(m, cfg, self.setup.dtype, self.warned, self.first, groups, self.seconds,
                       self.norms)

        # what is kept of it: for later warnings, and a row for each completion
        self.num_unscored = self.num_unscored + 1 if math.isnan(m["reward"]) else 0
        self.seconds.append(seconds)
        self.norms.append(m["grad_norm"])
        self.kls += [m["kl"]] if "kl" in m else []
        append_rows(self.folder, "samples.jsonl", sample_rows(it, batch, cfg))
        return m

    def compare_replay(self, iteration, reward):
        """Say how far the iterations that were done before the interruption, and have now been
        repeated, are from what they were. A GPU adds in no fixed order, so tokens may differ."""
        # remember each repeated one until the last
        was = self.earlier.pop(iteration)
        self.gaps.append(0.0 if was is None else abs(reward - was))
        if self.earlier:
            return

        # then say how much they differ
        text = f"repeated iterations {iteration + 1 - len(self.gaps)} to {iteration}: rewards "
        if max(self.gaps) == 0:
            print(text + "as before the interruption")
            return
        changed = [name for done, name, *_ in self.setup.changes if done == self.start]
        why = ("a GPU adds in no fixed order (docs/gpus.md), or a reward draws random numbers of "
               "its own, or asks something that has changed")
        if changed:
            why = f"{', '.join(changed)} changed"
        print(f"note: {text}differ by at most {max(self.gaps):.2g} from those before the "
              f"interruption: {why}")

    def write(self, m):
        """Log the metrics of an iteration."""
        append_rows(self.folder, "metrics.jsonl", [m])
        self.wandb.tell("log", m, step=m["iteration"])
        if m["iteration"] in self.earlier:
            self.compare_replay(m["iteration"], m["reward"])

    def logged_kl(self):
        """The greatest KL of the iterations so far. NaN: an evaluation's KL is to another model, of
        other distributions, or after so few iterations that it may be far ahead of the log's."""
        cfg = self.cfg
        follows = cfg.door("follow") is not None
        truncates = Sampling(eos=(), **cfg.sampling).truncates
        is_alike = 0.6 < cfg.temperature / cfg.eval_temperature < 1.6
        if follows or truncates or not is_alike or len(self.kls) < 5:
            return math.nan
        return max(self.kls)

    def compare(self, before, after):
        """Warn of what fell between two evaluations."""
        rows = [row | {"reward": reward_of(row, self.cfg)} for row in (before, after)]
        noise = noise_between(
            before, after, self.first["reward_std"], self.cfg.num_eval_generations)
        for kind, text in problems_of_evaluation(*rows, noise, self.logged_kl()):
            self.warned.say("WARNING", kind, text, after["iteration"])

    def evaluation(self, iteration, measures, prompt_rewards, samples):
        """Print and log what run.evaluation.evaluate has found after so many iterations."""
        values = ", ".join(f"{k} {v:.4f}" for k, v in measures.items())
        print(f"eval {iteration}: {values}", flush=True)

        # log it, and warn of what has fallen since the first one
        row = dict(iteration=iteration, **measures, prompt_rewards=prompt_rewards,
                   samples=samples)
        append_rows(self.folder, "eval.jsonl", [row])
        self.first_evaluation = self.first_evaluation or row
        if self.first:
            self.compare(self.first_evaluation, row)
        self.wandb.tell("log", {f"eval/{k}": v for k, v in measures.items()}, step=iteration)
