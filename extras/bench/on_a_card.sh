#!/usr/bin/env bash
# All that is asked of a card, in one go of at most ten minutes, the most important first:
#     bash extras/bench/on_a_card.sh > page.txt 2>&1
# Each part has its own limit, so that a slow one takes nothing from the next. Other settings than
# GPT-2's shape follow the name: on_a_card.sh CONFIG FLAGS ...
cd "$(dirname "$0")/../.." || exit 1
shape=(config/lowercase.py --policy=train --vocab_size=50257 --block_size=1024 --n_layer=12
       --n_head=12 --n_embd=768 --num_prompts=16 --max_completion_length=128)
if (($#)); then shape=("$@"); fi
out=$(mktemp -d)
failed=0

part() {        # seconds, what it is, a command
    echo "--- $2"
    local start=$SECONDS
    timeout "$1" "${@:3}" || { echo "failed or too slow: $2"; failed=1; }
    echo "--- $((SECONDS - start)) s"
}

bench() { part "$1" "$2" python -m extras.bench "${@:3}"; }

git log -1 --format="commit %h"; nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
bench 90 "128 rows, influence beside it" "${shape[@]}" vs --tracin=self --repeat=3
bench 60 "512 rows" "${shape[@]}" --num_prompts=64 --repeat=2
bench 120 "a row for each technique" ladder "${shape[@]}" --compile=True --repeat=3
bench 150 "every part beside the CPU" card
part 60 "a run is killed, goes on, and ends in the same line" bash -c '
    job=(grpo.py config/lowercase.py --max_iters=12 --save_interval=2 --num_prompts=4
         --num_eval_prompts=4 --log_micro=False)
    python "${job[@]}" --out_dir="$0/whole" > "$0/log"
    python "${job[@]}" --out_dir="$0/killed" > "$0/log" & killed=$!
    until [ -e "$0/killed/ckpt_000004.pt" ] || ! kill -0 $killed; do sleep 0.05; done
    kill -9 $killed
    python "${job[@]}" --out_dir="$0/killed" > "$0/log"
    tail -qn 1 "$0"/{whole,killed}/eval.jsonl | cut -c 1-200' "$out"
if python -c "import trl" 2> /dev/null; then
    bench 60 "beside TRL" trl "${shape[@]}" --repeat=3
fi
rm -r "$out"
exit $failed
