"""What influence costs: python bench.py tracin [--repeat=5]

One iteration's update, the same rollouts each way, interleaved in one run, medians; ratios to plain GRPO are what counts.
  plain       forward, backward
  kept        forward, backward under a tape, target, scores, checks, the gradient of the selected rows, as grpo.py does them
              for tracin = "self" (targets that are no multiple of the loss cost one more forward and backward)
  contracted  the same with tracin_memory = 0
  two passes  a tape for the scores only, then forward and backward again for the kept rows
  brute       one backward for every row, then forward and backward of half of them; without the inner products
"""
import statistics
import time

import torch

from config import Settings
from model import GPT, BadInput, GPTConfig, completion_logprobs, generate, pick_device, run_script
from tracin import Tape, filter_rows, select

SHAPES = {  # model, rows = prompts x group, prompt and completion tokens, rows in a micro-batch
    "toxicity, V 1024, 256 rows of 10 + 32": (GPTConfig(1024, 64, 4, 4, 256), 32, 10, 32, 64),
    "6 x 384, V 50257, 16 rows of 32 + 128": (GPTConfig(50257, 160, 6, 6, 384), 2, 32, 128, 8),
}


def tracin(device, repeat):
    for name, (config, num_prompts, P, T, micro) in SHAPES.items():
        torch.manual_seed(0)
        policy = GPT(config).to(device)
        prompts = torch.randint(config.vocab_size - 1, (num_prompts, P)).tolist()
        N = 8 * num_prompts
        coefficients = torch.randn(N, device=device) / (N * T)

        def rollout():
            return generate(policy, prompts, 8, T, eos=config.vocab_size - 1, seed=0)

        r = rollout()

        def backward(rows, tape=None):
            for part in rows.split(micro):
                if tape:
                    tape.rows(len(part), r.mask[part].nonzero()[:, 0])
                (coefficients[part] * completion_logprobs(policy, r[part]).sum(1)).sum().backward()

        everything = torch.arange(N, device=device)

        def one_pass(tape, update=True):
            with tape:
                backward(everything, tape)
            if not update:
                return select(tape.dot(tape.gradient()), "positive")[0].nonzero()[:, 0]
            halves, ones = tape.gradients([(everything * 2 // N == part).float() for part in (0, 1)]), torch.ones(N, device=device)
            total = {p: g + halves[1][p] for p, g in halves[0].items()}
            for p, g in filter_rows(tape, ones, halves, ones, ones, None, Settings(tracin="self"), 0, total)[2].items():
                p.grad = g

        def brute():
            for i in range(N):
                backward(everything[i:i + 1])
                policy.zero_grad(set_to_none=True)
            backward(everything[:N // 2])

        kept, contracted = Tape(policy, memory=4 * 2 ** 30), Tape(policy)
        ways = {"generate": rollout, "plain": lambda: backward(everything), "kept": lambda: one_pass(kept),
                "contracted": lambda: one_pass(contracted),
                "two passes": lambda: backward(one_pass(kept, update=False)), "brute": brute}
        seconds = {way: [] for way in ways}
        for round in range(repeat + 1):  # the first warms up
            for way, run in ways.items():
                if way == "brute" and round > 1:
                    continue
                began = time.time()
                run()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                if round:
                    seconds[way].append(time.time() - began)
                policy.zero_grad(set_to_none=True)
        median = {way: statistics.median(x) for way, x in seconds.items()}
        print(f"\n{name}: {sum(p.numel() for p in policy.parameters()) / 1e6:.1f} M weights, {device}, "
              f"{torch.get_num_threads()} threads, medians of {repeat} (brute: 1)")
        print(f"{'':12}{'seconds':>10}{'min':>8}{'max':>8}{'update':>10}{'update + generate':>20}")
        for way, x in seconds.items():
            if way != "generate":
                print(f"{way:12}{median[way]:10.2f}{min(x):8.2f}{max(x):8.2f}{median[way] / median['plain']:9.2f}x"
                      f"{(median[way] + median['generate']) / (median['plain'] + median['generate']):19.2f}x")


def main(argv):
    flags = dict(arg[2:].partition("=")[::2] for arg in argv[1:] if arg.startswith("--"))
    if argv[:1] != ["tracin"] or set(flags) - {"repeat", "device"} or not flags.get("repeat", "5").isdigit() or flags.get("repeat") == "0":
        raise BadInput("usage: python bench.py tracin [--repeat=5] [--device=auto]")
    tracin(pick_device(flags.get("device", "auto")), int(flags.get("repeat", 5)))


if __name__ == "__main__":
    run_script(main)
