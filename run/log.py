"""What a run prints and logs: a line, warnings and rows of each iteration and evaluation."""
import math
import os
import time

from common.errors import optional, shown
from common.files import read_log
from common.processes import all_gather, rank_and_size
from run.checkpoint import append_rows
from run.flags import problems_of_evaluation, times_the_median
from run.metrics import batch_metrics, num_tokens, rollout_toxicity
from run.report import (
    Warned, print_influence, print_iteration, print_phases, print_warnings)


def sample_row(it, batch, i, cfg):
    """A row of samples.jsonl: completion i of a Batch."""
    # prompt, completion, reward
    prompt = batch.prompts[i]
    row = dict(iteration=it + 1, prompt=prompt.text, completion=batch.completions[i],
               reward=float(batch.rewards[i]))

    # the prompt's columns, and each reward by itself where there are several
    if list(prompt.row.values()) != [prompt.text]:      # there is more than the prompt
        row["row"] = prompt.row
    if len(cfg.reward_funcs) > 1:
        scores = [None if math.isnan(x) else x for x in batch.scores[i].tolist()]
        row["scores"] = dict(zip(cfg.reward_funcs, scores))
    return row


def sample_rows(it, batch, cfg):
    """Rows of samples.jsonl: every completion with its reward and advantage, then those that were
    replaced."""
    # what the step made of each completion
    columns = {"advantage": batch.row_advantages}
    if cfg.tracin != "off":
        columns |= {"influence": batch.influence, "weight": batch.row_weights}
    if cfg.zero_std_groups != "keep":
        columns["learned"] = ~batch.equal_rows(cfg.num_generations)
    columns = {name: x.tolist() for name, x in columns.items()}
    rows = [sample_row(it, batch, i, cfg) | {name: x[i] for name, x in columns.items()}
            for i in range(int((batch.age == 0).sum()))]     # replayed ones follow these

    # completions of groups that taught nothing: the policy wrote them too
    for part in batch.replaced or ():
        rows += [sample_row(it, part, i, cfg) | dict(advantage=None, learned=False)
                 for i in range(len(part.prompts))]
    return rows


class Wandb:
    """Also sends metrics to wandb, if the settings name a project."""

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
    """The log of a run, on disk and on the screen. A line or a warning compares with what came
    before it."""

    def __init__(self, cfg):
        self.cfg = cfg
        self.warned = Warned()
        self.wandb = Wandb(cfg)
        self.began = None               # when the first iteration began
        self.num_tokens = 0
        self.num_unscored = 0           # iterations in a row in which every reward was None
        self.rows = []                  # metrics of the iterations so far that can be compared
        self.first_evaluation = None

    def begin(self, folder, setup, done, num_tokens):
        """Begin at the start of a run (done None), or after an interruption with `done` iterations
        in the log."""
        self.folder = folder
        self.setup = setup
        self.start = done or 0
        self.num_tokens = num_tokens
        if done is not None:
            self.rows = self.comparable("metrics.jsonl")
            evaluations = self.comparable("eval.jsonl")
            self.first_evaluation = evaluations[0] if evaluations else None
        name = os.path.basename(os.path.abspath(folder))
        self.wandb.tell("init", project=self.cfg.wandb_project, name=name, config=self.cfg.public())

    def comparable(self, log):
        """The rows of a log that later ones can be compared with: those since settings or files
        have changed. NaN where a value is missing."""
        last = max((done for done, *_ in self.setup.changes), default=-1)
        return [{name: math.nan if x is None else x for name, x in row.items()}
                for row in read_log(f"{self.folder}/{log}") if row["iteration"] > last]

    def has_evaluation(self, done):
        """True if rank 0's log has the evaluation after so many iterations."""
        logged = [row["iteration"] for row in read_log(f"{self.folder}/eval.jsonl")]
        return all_gather([done in logged])[0]

    def print_all(self, m, batch, clock):
        """Print the lines and the warnings of an iteration, by its metrics, Batch and Clock."""
        # what it did, and where its time went: at first, at last, and where it is slow
        cfg = self.cfg
        done = m["iteration"]
        each = (time.monotonic() - self.began) / (done - self.start)
        print_iteration(m, cfg, clock.num_sampled, each * (cfg.max_iters - done))
        is_slow = times_the_median(m["step_time"], [row["step_time"] for row in self.rows]) > 1.5
        if done in (self.start + 1, cfg.max_iters) or is_slow:
            print_phases(clock.seconds)
        if "tracin/mean_ip" in m:
            print_influence(m, batch)
        if "ref_tensors_differing" in m:
            print(f"reference synced: {m['ref_tensors_differing']} tensors differ from the policy, "
                  f"{100 * m['ref_distance_left']:.0f} % of its distance to the policy remains")

        # what looks wrong in it
        groups = batch.fresh.rewards.view(-1, cfg.num_generations)
        print_warnings(m, cfg, self.warned, self.rows, groups)

    def record(self, it, batch, metrics, clock):
        """Print an iteration, and log its completions -> all of its metrics. clock: its Clock.

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
        self.num_tokens += num_tokens(batch)
        m = {"iteration": it + 1, **metrics, **batch_metrics(batch, cfg),
             "learning_rate": self.setup.optimizer.param_groups[0]["lr"],
             "num_tokens": self.num_tokens,
             **{f"cfg/{name}": getattr(cfg, name) for name in cfg.given},
             "step_time": sum(clock.seconds.values()),
             **rollout_toxicity(batch, self.setup)}
        if "choose" not in cfg.functions:       # all prompts come in turn
            m["epoch"] = (it + 1) * cfg.num_prompts / len(self.setup.prompts)

        # its lines and warnings compare it with earlier ones, later ones with it
        self.began = self.began or clock.start
        self.print_all(m, batch, clock)
        self.rows.append(m)
        self.num_unscored = self.num_unscored + 1 if math.isnan(m["reward"]) else 0
        append_rows(self.folder, "samples.jsonl", sample_rows(it, batch, cfg))
        return m

    def write(self, m):
        """Log the metrics of an iteration."""
        append_rows(self.folder, "metrics.jsonl", [m])
        self.wandb.tell("log", m, step=m["iteration"])

    def evaluation(self, iteration, measures, prompt_rewards, samples):
        """Print and log an evaluation after so many iterations, by what run.evaluation.evaluate
        returns."""
        values = ", ".join(f"{k} {v:.4f}" for k, v in measures.items())
        print(f"eval {iteration}: {values}", flush=True)

        row = dict(iteration=iteration, **measures, prompt_rewards=prompt_rewards,
                   samples=samples)
        append_rows(self.folder, "eval.jsonl", [row])
        self.wandb.tell("log", {f"eval/{k}": v for k, v in measures.items()}, step=iteration)

        # warn of what has fallen since the first one
        before = self.first_evaluation = self.first_evaluation or row
        for kind, text in problems_of_evaluation(before, row, self.cfg, self.rows):
            self.warned.warn(kind, text, iteration)
