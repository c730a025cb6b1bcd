"""
Explain a run: which of the rollouts it was trained on made it better at what it was trained for,
and which words of them. Prints it and writes account.html into the run's folder.

    python tracin.py out/toxicity                       # the reward on held-out prompts
    python tracin.py out/toxicity --target=eval_judge   # as another judge, or reward, measures it
    python tracin.py out/toxicity --prompt="You are" --completion=" a good editor"
                                    # where did the run learn to say this?

    --prompts=FILE      several sentences: .csv or .jsonl with the columns prompt and completion
    --account=True      the completions of lowest reward before training
    --by=COLUMN         groups the rollouts by a column of the prompts' file or of samples.jsonl,
                        or by the config file's function group(prompt, completion, reward, row)
    --held_out=N        held-out completions at each step: more are less noise and take longer;
                        without it as many as twice the CPU time of the run allows
    --exact             as many as the evaluation has; and the shares of tokens
    --since=N           the part of the run after N iterations
    --parts=N           looks at N parts of each step, where steps are too large for a straight line
    --hessian=False     is faster, and does not predict what would be without a rollout

A run that has functions needs its config file, too: RUN CONFIG.py. See docs/account.md.
"""
from common.cli import run_script
from common.errors import BadInput
from common.processes import rank_and_size
from extras.explain import story


def main(argv):
    if rank_and_size()[1] > 1:
        raise BadInput("one process explains a run: start it without torchrun")
    if not argv or argv[0].startswith("-"):
        raise BadInput("usage: python tracin.py RUN [CONFIG.py] [--target=NAME] [--prompt=TEXT "
                       "--completion=TEXT] [--setting=value ...]; --help says more")
    story.main(argv)


if __name__ == "__main__":
    run_script(main)
