# %% [markdown]
# # Speed, a row at a time
#
# An iteration in plain float32, then the same with one technique after the other. A technique that
# gives nothing on your machine is a line too many there: look for it.
#
# Run `python docs/lesson/speed.py`, some minutes on a CPU, or open this file in VS Code. It has no
# notebook: its numbers are your machine's. Nothing that it samples is printed.
#
# ## 1. An iteration
# The default job, smaller: 8 prompts with 8 completions each.

# %%
flags = []      # to try something: ["--micro_batch_size=64"]

# %%
import inspect
from statistics import median

from classroom import ROOT, picture, plt, settings_of

import fast
import grpo
import loss
import model
import rollout
from common.device import autocast
from extras import graph
from extras.bench import ladder
from extras.bench.phases import in_turns

cfg = settings_of("config/toxicity.py", ["--num_prompts=8", "--expect_rise=0", *flags])
setup = grpo.prepare(cfg, grpo.read_inputs(cfg))
for group in setup.optimizer.param_groups:
    group["lr"] = 1e-9          # it hardly learns, so all rows have the same to do

# %% [markdown]
# ## 2. What each technique does
# The right place to look at is the function: each is short, and none changes what is computed but
# for rounding.

# %%
WHAT = {
    "ended rows leave": (
        "a completion that has ended is read no further", rollout.drop_finished),
    "rows by length": (
        "rows of similar length share a micro-batch, so there is less padding",
        loss.micro_batches),
    "one gradient of the logits": (
        "the logits' gradient, probability less one-hot, is written down and not derived",
        fast.LogProb),
    "logits in one buffer": (
        "logits of a few rows at a time, again in the backward: (M, V) is never in memory at once",
        fast.BufferedLogProb),
    "attention by formula": (
        "for one new token two small products beat torch's kernel", fast.attend_on_cpu),
    "bfloat16": ("half the bytes of each number, where the device multiplies them", autocast),
    "casts kept": (
        "weights that are cast to bfloat16 are cast once for all tokens", fast.casts_kept),
    "TF32": ("float32 products with 10 bits behind the point", None),
    "half head": (
        "the largest product takes bfloat16 and gives float32", fast.half_product),
    "graph": (
        "what a token launches on the GPU is recorded once and then launched as one",
        graph.generate_by_graph),
    "five passes over the logits": (
        "log-probs and their gradient read the logits five times, not twelve",
        fast.LogProbOfHalf),
    "compile": ("torch writes kernels of its own for the model", None)}


def lines_of(function):
    """Where a technique is, and its lines."""
    if function is None:
        return "a setting of torch"
    source, first = inspect.getsourcelines(inspect.unwrap(function))
    path = inspect.getsourcefile(inspect.unwrap(function)).removeprefix(f"{ROOT}/")
    return f"{path}:{first}, {len(source)} lines"


names = [rung.name for rung in ladder.rungs_for(setup, cfg)]
for name in names:
    sentence, function = WHAT[name]
    print(f"{name}: {sentence} ({lines_of(function)})")

# %% [markdown]
# **Try 1** (easy): which of these will give most on your machine, and which nothing? Write it down.
#
# ## 3. The ladder
# All rows take turns, so that what else the machine does hits all of them. A row has the technique
# of its name and all those above it.

# %%
measured = in_turns(ladder.rows_of(setup, cfg), repeat=3)


def milliseconds(row, phase=None):
    """The median of a row's iterations, or of a phase of them."""
    return 1000 * median(timed.seconds[phase] if phase else sum(timed.seconds.values())
                         for timed in measured[row])


gains = {}
rows = ["plain float32", *names]
print(f"plain float32: {milliseconds(rows[0]):.0f} ms an iteration")
for rung, before, row in zip(ladder.rungs_for(setup, cfg), rows, rows[1:]):
    gains[row] = milliseconds(before, rung.phase) / milliseconds(row, rung.phase)
    print(f"{row}: {milliseconds(row):.0f} ms; {rung.phase} is {gains[row]:.2f} times as fast")
print(f"all of them: {milliseconds(rows[0]) / milliseconds(rows[-1]):.2f} times as fast")
plt.figure(figsize=(7, 3))
left = [0, 0]
for phase in measured[rows[0]][0].seconds:
    widths = [milliseconds(row, phase) for row in (rows[0], rows[-1])]
    plt.barh(["plain", "all"], widths, left=left, label=phase)
    left = [x + width for x, width in zip(left, widths)]
picture("s_ladder", "ms of an iteration", "")

# %% [markdown]
# **Try 2** (medium): a number below 1 says that the technique is slower. Run it again. Is it still?
#
# ## 4. Is it the same?
# Fast is worth nothing if it is something else. Did the rows sample the same completions?

# %%
for row in rows:
    alike = [(timed.rollout.tokens == plain.rollout.tokens).all(1).float().mean()
             for timed, plain in zip(measured[row], measured[rows[0]])]
    print(f"{row}: {float(sum(alike) / len(alike)):.0%} of the completions as in plain float32")

# %% [markdown]
# Rounding turns few draws, and from there on a completion goes another way. bfloat16 rounds more.
#
# ## Answers
# **1.** What gives most is for the phase that takes longest (the picture), and nothing is given
# where there is nothing to save: equal lengths, few logits, a device without bfloat16.

# %%
print(f"answer 1: most by {max(gains, key=gains.get)}, least by {min(gains, key=gains.get)}")

# %% [markdown]
# **2.** A difference that changes its sign from run to run is noise. Here is how far apart the
# slowest and the fastest of three equal iterations are: a gain below that says nothing.

# %%
times = [sum(timed.seconds.values()) for timed in measured[rows[0]]]
print(f"answer 2: of {len(times)} plain iterations the slowest takes {max(times) / min(times):.2f} "
      "times as long as the fastest")
