"""Writes the policy of a run, or of a .pt file, as a folder that transformers, TRL and vLLM open.

    python export.py out/toxicity my-model [--dtype=bfloat16] [--adapter=gpt2]

LoRA is merged into the weights. With --adapter=BASE_MODEL it is left as an adapter that peft opens.
"""
import os

from hub.export import export
from pretrain import load_run
from run.script import BadInput, run_script


def main(argv):
    options = dict(arg[2:].split("=", 1) for arg in argv if arg.startswith("--") and "=" in arg)
    paths = [arg for arg in argv if not arg.startswith("--")]
    known = set(options) <= {"dtype", "adapter"} and all(options.values())
    if len(paths) != 2 or len(argv) != 2 + len(options) or not known:
        raise BadInput("usage: python export.py RUN_OR_PT FOLDER "
                       "[--dtype=float32|bfloat16|float16] [--adapter=BASE_MODEL]")
    model, source = load_run(paths[0])
    export(model, paths[1], source, **options)
    print(f"{paths[1]}: {', '.join(sorted(os.listdir(paths[1])))}")


if __name__ == "__main__":
    run_script(main)
