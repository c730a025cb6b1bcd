# Grade-school mathematics (GSM8K, Cobbe et al. 2021), the job that people check a trainer with.
#     pip install -r extras/hub/requirements.txt
#     python grpo.py extras/hub/config/gsm8k.py                                     # LoRA, 24 GB
#     python grpo.py extras/hub/config/gsm8k.py --lora_rank=0 --learning_rate=1e-6 \
#         --micro_batch_size=16                                                     # in full, 80 GB
# train.jsonl is grade_school_math/data/train.jsonl of github.com/openai/grade-school-math.
# Not run with the published files: see extras/hub/README.md.
import itertools as _itertools
import re as _re

from common.files import read_rows as _read_rows

out_dir = "out/gsm8k"
policy = "Qwen/Qwen2.5-0.5B-Instruct"
judge = eval_judge = None
_TRAIN = "train.jsonl"
_SYSTEM = "Think step by step. End with a line that is #### and the number."

reward_funcs = ("right", "form", "pass_at_k")
reward_weights = (1.0, 0.1, 0.0)        # pass_at_k is only watched
num_prompts = 16
num_generations = 8
max_completion_length = 256
micro_batch_size = 4
lora_rank = 16
lora_alpha = 32.0
learning_rate = 5e-5
max_iters = 200
eval_interval = 50
num_eval_prompts = 200
num_eval_generations = 8                # so the evaluation's pass_at_k is pass@8
save_interval = 25
log_micro = False


def questions(n, seed):
    """Each question as a chat, with the number that answers it. Every fifth is held out."""
    rows = _read_rows(_TRAIN)
    return [{"text": [{"role": "system", "content": _SYSTEM},
                      {"role": "user", "content": row["question"]}],
             "answer": row["answer"].rpartition("####")[2]} for row in rows]


def _number(text):
    """The first number of a text as people write them, or None: $1,000.50, 1 000, 18 eggs, 20%."""
    found = _re.search(r"-?\d[\d, ]*(\.\d+)?|-?\.\d+", text.replace("$", ""))
    return float(_re.sub("[, ]", "", found[0])) if found else None


def _answer(text):
    """The number behind the last ####, or in the last \\boxed{}; None where there is neither."""
    _, mark, rest = text.replace("\\boxed{", "####").rpartition("####")
    return _number(_re.split("[\n}]", rest)[0]) if mark else None


def right(completions, answer):
    """1 for the right number, 0 for another one or none."""
    return [float(_answer(text) == _number(asked)) for text, asked in zip(completions, answer)]


def form(completions):
    """1 for one #### with a number behind it, and nothing after that line."""
    ends = [text.count("####") == 1 and _re.search(r"####\s*\S*\d\S*\s*$", text)
            for text in completions]
    return [float(bool(end)) for end in ends]


def pass_at_k(prompts, completions, answer):
    """1 where any of the prompt's completions is right: its mean is pass@k, that of `right`
    pass@1."""
    found = []
    pairs = zip(prompts, right(completions, answer))
    for _, group in _itertools.groupby(pairs, key=lambda pair: pair[0]):
        rights = [score for _, score in group]
        found += [max(rights)] * len(rights)
    return found
