"""
A run around its loop: folder, logs, checkpoints, evaluations, signals. The loop is grpo.train.
"""
import contextlib
import copy
import math
import os
import statistics
import time

from common.files import read_log
from common.processes import all_gather, rank_and_size
from common.script import BadInput, hash_of, interrupts, optional, shown
from rollout import Sampling
from run.checkpoint import (
    append_rows, begin_logs, random_state, resume, save_checkpoint, set_random_state,
    write_run_config)
from run.evaluation import evaluate
from run.flags import problems_of_evaluation
from run.folder import claimed_folder
from run.inputs import (
    makes_another_evaluation, makes_another_iteration, since_change, what_was_read)
from run.metrics import batch_metrics, rollout_toxicity
from run.policy import keep_base
from run.report import (
    StepLog, Warned, print_influence, print_iteration, print_phases, print_table, print_verdict,
    print_warnings, reward_of)


MOST_UNSCORED = 3       # iterations in a row in which every reward is None: then a run ends


def is_due(done, interval):
    """Whether it is after every `interval` iterations; 0: never."""
    return interval > 0 and done % interval == 0


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


def is_failure(error):
    """Whether a block ended by a failure: not by its end, by words that end a run, or by a second
    signal. A KeyboardInterrupt without words is that of another process."""
    if isinstance(error, KeyboardInterrupt):
        return not error.args
    return isinstance(error, Exception)


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


class Run:
    """A run: its folder, its logs and what it prints; see main and train of grpo.py."""

    def __init__(self, cfg):
        self.cfg = cfg
        self.warned = Warned()
        self.wandb = None

        # what later lines and warnings compare with
        self.began = None                       # the first iteration
        self.first = None                       # metrics of the run's first iteration
        self.first_evaluation = None
        self.seconds = []                       # of each iteration
        self.norms = []                         # of the gradient of each iteration
        self.kls = []                           # of each iteration, with beta
        self.earlier = {}                       # {iteration: reward} that a resumed run repeats
        self.num_unscored = 0                   # iterations in a row in which no reward was known
        self.gaps = []                          # of the rewards of repeated iterations

        # for a signal, and for what fails
        self.stopped = lambda: False            # whether a signal was heard
        self.done = None                        # iterations, as what is in memory has them
        self.saved = None                       # iterations, as the newest checkpoint has them

        # a package of its own, if it is asked for
        if cfg.wandb_project and rank_and_size()[0] == 0:
            with optional("wandb"):
                import wandb
                self.wandb = wandb

    def __enter__(self):
        # a folder of its own, which rank 0 locks for all
        cfg = self.cfg
        self.until_end = contextlib.ExitStack()
        if not cfg.debug_step:
            claim = (cfg.out_dir, cfg.resume)
            if rank_and_size()[0] == 0:
                claim = self.until_end.enter_context(claimed_folder(cfg))
            cfg.out_dir, cfg.resume = all_gather([claim])[0]
        self.folder = cfg.out_dir

        # say what is not as usual
        print("settings: " + (cfg.named or "none is set, all have their defaults"))
        for name, value in cfg.changed.items():
            print(f"    {name} = {value!r}")
        return self

    def __exit__(self, kind, error, trace):
        with self.until_end:
            has_begun = self.done is not None or self.stopped()
            if not has_begun or not is_failure(error):
                return
            kept = self.keep_last()
            if not self.stopped():
                print(kept, flush=True)
                return

            # after a signal something failed: a terminal's Ctrl-C ends also the processes that a
            # reward waits for. The signal ends the run; what failed meanwhile is named
            raise KeyboardInterrupt(f"{kept} (meanwhile: {shown(str(error), 120)})") from error

    def keep_last(self):
        """Save the last whole iteration, after something failed -> words about it."""
        # unless there is none yet, or a step was taken since
        if self.done is None or self.has_stepped:
            return "what was saved last is kept, and the same command continues"
        set_random_state(self.random)
        self.setup.target_average = self.average
        self.setup.seen = self.seen
        try:
            if self.saved != self.done:
                self.save(self.done)
        except Exception as e:      # what failed first ends the run: a disk, or a GPU, may be why
            return f"iteration {self.done} could not be saved ({shown(str(e), 120)})"
        return f"saved after iteration {self.done}; the same command continues"

    def mark_whole(self):
        """What is in memory is a whole iteration: remember what changes before the next step."""
        self.has_stepped = False
        self.random = random_state()
        self.average = copy.copy(self.setup.target_average)
        self.seen = {i: list(groups) for i, groups in self.setup.seen.items()}

    def step_begins(self, *_):
        """Called by the optimizer."""
        self.has_stepped = True

    def begin(self, setup):
        """From the start, or from the checkpoint of an interrupted run."""
        # from now on a signal waits until what is at work can be saved
        cfg = self.cfg
        self.setup = setup
        self.stopped = self.until_end.enter_context(interrupts())
        self.base_hash = hash_of(setup.base)
        self.num_tokens = 0
        setup.has_read = what_was_read(setup, cfg)

        # new logs, or those of the interrupted run, cut to its last checkpoint
        done = None
        if cfg.resume:
            rewards = logged_rewards(f"{self.folder}/metrics.jsonl")
            done, self.num_tokens = resume(self.folder, setup, cfg)     # cuts the log
            self.saved = done
            self.earlier = {it: reward for it, reward in rewards.items() if it > done}
            self.first = self.first_row("metrics.jsonl", makes_another_iteration)
            self.first_evaluation = self.first_row("eval.jsonl", makes_another_evaluation)
        else:
            begin_logs(self.folder, cfg)

        # processes that differ now would sum gradients of different policies
        everyone = all_gather([(self.base_hash, done, hash_of(setup.policy))])
        if len(set(everyone)) > 1:
            raise BadInput(
                f"the processes begin with different weights: out_dir = {self.folder!r} (and "
                "cache_dir, where models are made) must be the same folder on all machines")

        # what this run is, for whoever finds its folder
        write_run_config(self.folder, cfg, setup.device, setup.changes)
        keep_base(self.folder, setup, cfg, is_new=done is None)
        name = os.path.basename(self.folder)
        self.tell_wandb("init", project=cfg.wandb_project, name=name, config=cfg.public())

        # an evaluation and a checkpoint of the policy before training
        self.start = done or 0
        if done is None:
            self.evaluate(0)
            self.save(0)
        elif self.is_evaluated(done) and not self.has_evaluation(done):
            self.evaluate(done)     # it failed after a signal
            self.save(done)

        # after a failure in a step, what the last whole iteration left is saved
        self.done = self.start
        self.mark_whole()
        setup.optimizer.register_step_pre_hook(self.step_begins)

    def has_evaluation(self, done):
        """Whether the log has it, as rank 0 sees it."""
        found = [row["iteration"] for row in read_log(f"{self.folder}/eval.jsonl")]
        return all_gather([done in found])[0]

    def tell_wandb(self, what, *args, **kwargs):
        """Call a function of wandb, where that is asked for. If it fails, the run goes on."""
        if self.wandb is None:
            return
        try:
            getattr(self.wandb, what)(*args, **kwargs)
        except (Exception, SystemExit) as e:    # whatever it raises: no network, no key, ...
            print(f"note: wandb.{what} failed ({type(e).__name__}: {shown(str(e))}): the run goes "
                  f"on without wandb; {self.folder}/metrics.jsonl has all metrics", flush=True)
            self.wandb = None

    def first_row(self, log, matters):
        """The first row of a log that later ones can be compared with, NaN where nothing is known;
        None if there is none. matters: of run/inputs.py."""
        rows, _ = since_change(read_log(f"{self.folder}/{log}"), self.setup.changes, matters)
        if not rows:
            return None
        return {name: math.nan if x is None else x for name, x in rows[0].items()}

    def step_log(self):
        self.mark_whole()
        if self.began is None:
            self.began = time.monotonic()
        return StepLog(self.setup.device, self.cfg.micro_batch_size, self.cfg.log_micro)

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
        seconds = log.finished()
        self.num_tokens += log.num_tokens
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

    def log(self, it, m):
        """Log the metrics of an iteration."""
        append_rows(self.folder, "metrics.jsonl", [m])
        self.tell_wandb("log", m, step=it + 1)
        if it + 1 in self.earlier:
            self.compare_replay(it + 1, m["reward"])

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

    def is_evaluated(self, done):
        """Whether an evaluation follows after so many iterations."""
        return done == self.cfg.max_iters or is_due(done, self.cfg.eval_interval)

    def end_iteration(self, done):
        """Evaluate and save, where that is due. After Ctrl-C save and leave."""
        cfg = self.cfg
        self.done = done
        self.mark_whole()

        # has a signal asked any process to stop?
        last = done == cfg.max_iters
        stopped = any(all_gather([self.stopped()]))
        if self.is_evaluated(done):
            self.evaluate(done)
        leaves = stopped or self.num_unscored >= MOST_UNSCORED
        if last or leaves or is_due(done, cfg.save_interval):
            self.save(done)
        if self.num_unscored >= MOST_UNSCORED:
            raise SystemExit(
                f"stopped after iteration {done}, which is saved: no completion of the last "
                f"{self.num_unscored} iterations got a reward, so nothing was learned; is the "
                "judge down? The same command continues")
        if stopped and not last:
            raise KeyboardInterrupt(f"saved after iteration {done}; the same command continues")

    def evaluate(self, iteration):
        """Print and log an evaluation of the policy."""
        # the same prompts and noise as before training
        measures, prompt_rewards, samples = evaluate(
            self.setup, self.setup.policy, self.cfg, iteration)
        values = ", ".join(f"{k} {v:.4f}" for k, v in measures.items())
        print(f"eval {iteration}: {values}", flush=True)

        # log it, and warn of what has fallen since the first one
        row = dict(iteration=iteration, **measures, prompt_rewards=prompt_rewards,
                   samples=samples)
        append_rows(self.folder, "eval.jsonl", [row])
        self.first_evaluation = self.first_evaluation or row
        if self.first:
            self.compare(self.first_evaluation, row)
        self.tell_wandb("log", {f"eval/{k}": v for k, v in measures.items()}, step=iteration)

    def compare(self, before, after):
        """Warn of what fell between two evaluations."""
        rows = [row | {"reward": reward_of(row, self.cfg)} for row in (before, after)]
        noise = noise_between(
            before, after, self.first["reward_std"], self.cfg.num_eval_generations)
        for kind, text in problems_of_evaluation(*rows, noise, self.logged_kl()):
            self.warned.say("WARNING", kind, text, after["iteration"])

    def logged_kl(self):
        """The greatest KL of the iterations so far. NaN: an evaluation's KL is to another model, of
        other distributions, or after so few iterations that it may be far ahead of the log's."""
        cfg = self.cfg
        follows = cfg.ref_model_sync_steps > 0
        truncates = Sampling(eos=(), **cfg.sampling).truncates
        is_alike = 0.6 < cfg.temperature / cfg.eval_temperature < 1.6
        if follows or truncates or not is_alike or len(self.kls) < 5:
            return math.nan
        return max(self.kls)

    def save(self, iteration):
        save_checkpoint(
            self.folder, self.setup, self.cfg, iteration, self.num_tokens, self.base_hash)
        self.saved = iteration

    def finish(self):
        """The table of before and after, and the verdict where one is expected."""
        if rank_and_size()[0] > 0:
            return

        # the first evaluation beside the last one, as far as both measure the same
        rows, why = since_change(
            read_log(f"{self.folder}/eval.jsonl"), self.setup.changes, makes_another_evaluation)
        if why:
            print(f"\nnot compared with the evaluations before: {', '.join(why)} changed; python "
                  f"evaluate.py {self.folder} measures before and after alike")
        if len(rows) > 1 or not why:
            print_table(rows)
        self.warned.repeat()
        print(f"\n{self.folder}: metrics.jsonl, samples.jsonl, eval.jsonl, config.json, ckpt_*.pt",
              flush=True)
        self.tell_wandb("finish")
        try:
            if self.cfg.expect_rise and len(rows) < 2 and why:
                raise SystemExit("verdict: none, since no two evaluations measure the same")
            if self.cfg.expect_rise:
                print_verdict(rows, self.cfg, read_log(f"{self.folder}/metrics.jsonl"))
        finally:    # a run that was killed before this prints the table when it is started again
            write_run_config(
                self.folder, self.cfg, self.setup.device, self.setup.changes, is_printed=True)
