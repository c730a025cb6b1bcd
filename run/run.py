"""
A run around its loop: its folder, its log, its checkpoints, its evaluations, and what ends it. The
loop is grpo.train.
"""
import contextlib

from common.files import read_log
from common.processes import all_gather, rank_and_size
from common.script import BadInput, hash_of, shown
from common.signals import interrupts
from run.checkpoint import begin_logs, resume, write_run_config
from run.evaluation import evaluate
from run.folder import claimed_folder
from run.inputs import makes_another_evaluation, since_change, what_was_read
from run.log import Log, logged_rewards
from run.policy import keep_base
from run.report import print_table, print_verdict
from run.saver import Saver

MOST_UNSCORED = 3       # iterations in a row in which every reward is None: then a run ends


def is_due(done, interval):
    """Whether it is after every `interval` iterations; 0: never."""
    return interval > 0 and done % interval == 0


def is_failure(error):
    """Whether a block ended by a failure: not by its end, by words that end a run, or by a second
    signal. A KeyboardInterrupt without words is that of another process."""
    if isinstance(error, KeyboardInterrupt):
        return not error.args
    return isinstance(error, Exception)


class Run:
    """A run: see main and train of grpo.py. log: what it prints and logs; saver: its
    checkpoints."""

    def __init__(self, cfg):
        self.cfg = cfg
        self.log = Log(cfg)
        self.saver = Saver()
        self.stopped = lambda: False            # whether a signal was heard

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
            has_begun = self.saver.done is not None or self.stopped()
            if not has_begun or not is_failure(error):
                return
            kept = self.saver.keep_last()
            if not self.stopped():
                print(kept, flush=True)
                return

            # after a signal something failed: a terminal's Ctrl-C ends also the processes that a
            # reward waits for. The signal ends the run; what failed meanwhile is named
            raise KeyboardInterrupt(f"{kept} (meanwhile: {shown(str(error), 120)})") from error

    def is_evaluated(self, done):
        """Whether an evaluation follows after so many iterations."""
        return done == self.cfg.max_iters or is_due(done, self.cfg.eval_interval)

    def evaluate(self, iteration):
        """Evaluate the policy after so many iterations."""
        found = evaluate(self.setup, self.setup.policy, self.cfg, iteration)
        self.log.evaluation(iteration, *found)

    def begin(self, setup):
        """From the start, or from the checkpoint of an interrupted run."""
        # from now on a signal waits until what is at work can be saved
        cfg = self.cfg
        self.setup = setup
        self.stopped = self.until_end.enter_context(interrupts())
        setup.has_read = what_was_read(setup, cfg)

        # new logs, or those of the interrupted run, cut to its last checkpoint
        done, num_tokens, rewards = None, 0, {}
        if cfg.resume:
            rewards = logged_rewards(f"{self.folder}/metrics.jsonl")
            done, num_tokens = resume(self.folder, setup, cfg)          # cuts the log
            self.saver.saved = done
        else:
            begin_logs(self.folder, cfg)

        # processes that differ now would sum gradients of different policies
        everyone = all_gather([(hash_of(setup.base), done, hash_of(setup.policy))])
        if len(set(everyone)) > 1:
            raise BadInput(
                f"the processes begin with different weights: out_dir = {self.folder!r} (and "
                "cache_dir, where models are made) must be the same folder on all machines")

        # what this run is, for whoever finds its folder
        write_run_config(self.folder, cfg, setup.device, setup.changes)
        keep_base(self.folder, setup, cfg, is_new=done is None)
        self.log.begin(self.folder, setup, done, num_tokens, rewards)
        self.saver.begin(self.folder, setup, cfg, self.log)

        # an evaluation and a checkpoint of the policy before training
        self.start = done or 0
        if done is None:
            self.evaluate(0)
            self.saver.save(0)
        elif self.is_evaluated(done) and not self.log.has_evaluation(done):
            self.evaluate(done)     # it failed after a signal
            self.saver.save(done)

        # after a failure in a step, what the last whole iteration left is saved
        self.saver.mark_whole(self.start)

    def step_log(self):
        """An iteration begins -> its StepLog. An evaluation may have drawn random numbers since the
        last one."""
        self.saver.mark_whole(self.saver.done)
        return self.log.step_log()

    def end_iteration(self, done):
        """Evaluate and save, where that is due. After Ctrl-C save and leave."""
        cfg = self.cfg
        self.saver.mark_whole(done)

        # has a signal asked any process to stop?
        last = done == cfg.max_iters
        stopped = any(all_gather([self.stopped()]))
        if self.is_evaluated(done):
            self.evaluate(done)
        is_lost = self.log.num_unscored >= MOST_UNSCORED
        if last or stopped or is_lost or is_due(done, cfg.save_interval):
            self.saver.save(done)
        if is_lost:
            raise SystemExit(
                f"stopped after iteration {done}, which is saved: no completion of the last "
                f"{self.log.num_unscored} iterations got a reward, so nothing was learned; is the "
                "judge down? The same command continues")
        if stopped and not last:
            raise KeyboardInterrupt(f"saved after iteration {done}; the same command continues")

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
        self.log.warned.repeat()
        print(f"\n{self.folder}: metrics.jsonl, samples.jsonl, eval.jsonl, config.json, ckpt_*.pt",
              flush=True)
        self.log.wandb.tell("finish")
        try:
            if self.cfg.expect_rise and len(rows) < 2 and why:
                raise SystemExit("verdict: none, since no two evaluations measure the same")
            if self.cfg.expect_rise:
                print_verdict(rows, self.cfg, read_log(f"{self.folder}/metrics.jsonl"))
        finally:    # a run that was killed before this prints the table when it is started again
            write_run_config(
                self.folder, self.cfg, self.setup.device, self.setup.changes, is_printed=True)
