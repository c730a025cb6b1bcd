"""
A run around its loop: its folder, its log, its checkpoints, its evaluations, and what ends it. The
loop is grpo.train.
"""
import contextlib

from common.errors import BadInput
from common.files import read_log
from common.processes import all_gather, rank_and_size
from common.seeds import hash_of
from common.signals import interrupts
from run.checkpoint import begin_logs, resume, write_run_config
from run.evaluation import evaluate
from run.folder import claimed_folder
from run.log import Log
from run.metrics import kl_grad_share
from run.optimizer import check_state
from run.policy import save_base
from run.report import Clock, print_table, print_verdict
from run.saver import Saver


MOST_UNSCORED = 3       # iterations in a row in which every reward is None: then a run ends


def is_due(done, interval):
    """True after every `interval` iterations; interval 0: never."""
    return interval > 0 and done % interval == 0


class Run:
    """A run, as main and train in grpo.py use it. log: its lines, warnings and rows; saver: its
    checkpoints."""

    def __init__(self, cfg):
        self.cfg = cfg
        self.log = Log(cfg)
        self.saver = Saver()
        self.folder = cfg.out_dir
        self.until_end = contextlib.ExitStack()

    def __enter__(self):
        # rank 0 locks the folder for all processes. Does it hold a run to continue?
        cfg = self.cfg
        if not cfg.debug_step:
            is_continued = None
            if rank_and_size()[0] == 0:
                is_continued = self.until_end.enter_context(claimed_folder(cfg))
            self.is_continued = all_gather([is_continued])[0]

        # print which settings differ from the defaults
        print("settings:")
        for name, value in cfg.public().items():
            if value != getattr(type(cfg), name):
                print(f"    {name} = {value!r}")
        return self

    def __exit__(self, kind, error, trace):
        # a failure, or a second Ctrl-C, costs no whole iteration
        with self.until_end:
            if isinstance(error, (Exception, KeyboardInterrupt)) and self.saver.done is not None:
                print(self.saver.keep_last(), flush=True)

    def is_evaluated(self, done):
        """True if an evaluation follows after so many iterations."""
        return done >= self.cfg.max_iters or is_due(done, self.cfg.eval_interval)

    def evaluate(self, iteration):
        """Evaluate the policy after so many iterations."""
        measures = evaluate(self.setup, self.setup.policy, self.cfg, iteration)
        self.log.evaluation(iteration, *measures)

    def begin(self, setup):
        """Begin at the start, or at the last checkpoint of an interrupted run."""
        # from now on a signal waits until the iteration can be saved
        cfg = self.cfg
        self.setup = setup
        self.stopped = self.until_end.enter_context(interrupts())

        # go on from an interrupted run's last checkpoint, and cut its logs there
        done, num_tokens = None, 0
        if self.is_continued:
            done, num_tokens = resume(self.folder, setup, cfg)
            self.saver.saved = done

        # if processes differ now, they would add up gradients of different policies
        everyone = all_gather([(hash_of(setup.base), done, hash_of(setup.policy))])
        if len(set(everyone)) > 1:
            raise BadInput(
                f"the processes begin with different weights: out_dir = {self.folder!r} (and "
                "cache_dir, where models are made) must be the same folder on all machines")

        # config.json says what this run is
        write_run_config(self.folder, cfg, setup.device, setup.changes)
        save_base(self.folder, setup, cfg, is_new=done is None)
        if done is None:
            begin_logs(self.folder, cfg)
        self.log.begin(self.folder, setup, done, num_tokens)
        self.saver.begin(self.folder, setup, cfg, self.log)

        # an evaluation and a checkpoint of the policy before training
        self.start = done or 0
        if done is None:
            self.evaluate(0)
            self.saver.save(0)
        elif self.is_evaluated(done) and not self.log.has_evaluation(done):
            self.evaluate(done)     # it was interrupted
            self.saver.save(done)

        # a later failure saves the last whole iteration
        self.saver.mark_whole(self.start)

    def begin_iteration(self):
        """Begin an iteration -> its Clock. An evaluation may have drawn random numbers since the
        last one, so what a failure would save is marked anew."""
        self.saver.mark_whole(self.saver.done)
        return Clock(self.setup.device, self.cfg.log_micro)

    def kl_share(self, it, batch, steps, clock):
        """Before the steps of iteration `it`, if an evaluation follows them: how much of the
        gradient is the KL's? -> metrics."""
        if not (self.cfg.kl_in_loss and self.is_evaluated(it + 1)):
            return {}
        metrics = kl_grad_share(self.setup, batch, steps, self.cfg)
        clock.end("KL share")
        return metrics

    def end_iteration(self, done):
        """Evaluate and save where that is due. After Ctrl-C save and leave."""
        cfg = self.cfg
        if done == self.start + 1 and "optimizer" in cfg.functions:
            check_state(self.setup.optimizer)
        self.saver.mark_whole(done)

        # did any process receive a signal?
        last = done >= cfg.max_iters       # `after` may have set it to an earlier one
        stopped = any(all_gather([self.stopped()]))
        if self.is_evaluated(done):
            self.evaluate(done)
        is_lost = self.log.num_unscored == MOST_UNSCORED
        if last or stopped or is_lost or is_due(done, cfg.save_interval):
            self.saver.save(done)
        if is_lost:
            raise SystemExit(
                f"stopped after iteration {done}, which is saved: no completion of the last "
                f"{MOST_UNSCORED} iterations got a reward, so nothing was learned; is the "
                "judge down? The same command continues")
        if stopped and not last:
            raise KeyboardInterrupt     # __exit__ says what is saved

    def finish(self):
        """The table of before and after, and the verdict where one is expected."""
        if rank_and_size()[0] > 0:
            return

        # the first evaluation beside the last one: do both measure the same?
        rows = read_log(f"{self.folder}/eval.jsonl")
        print_table(rows)
        changes = [f"{name} (after iteration {done})" for done, name, *_ in self.setup.changes]
        if changes:
            print(f"\nchanged between them: {', '.join(changes)}. Where that changes what is "
                  f"measured, python evaluate.py {self.folder} measures before and after alike")
        self.log.warned.repeat()
        print(f"\n{self.folder}: metrics.jsonl, samples.jsonl, eval.jsonl, config.json, ckpt_*.pt",
              flush=True)
        self.log.wandb.tell("finish")
        if self.cfg.expect_rise:
            print_verdict(rows, self.cfg)
