#!/usr/bin/env bash
# From nothing to a trained mixture of experts: makes .venv, builds a corpus from Python's own sources, trains on
# two processes, draws the run and samples from it. Each step is skipped when its output exists; run it
# again after an interruption and the training goes on from its last checkpoint.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

DATA=data/quickstart
RUN=runs/quickstart
CORPUS=$DATA/corpus.jsonl
TOKENIZER=$DATA/tokenizer      # .model and .vocab
TOKENS=$DATA/tokens            # .bin and .idx

started=$SECONDS
prepare cpu
mkdir -p "$DATA" "$RUN"

# step FILE "what" command...: runs the command unless FILE exists.
step() {
    local output="$1" what="$2"
    shift 2
    if [ -e "$output" ]; then
        say "$what: already there ($output)"
    else
        say "$what"
        "$@"
    fi
}

step "$CORPUS" "Corpus: the standard library's sources and documentation" \
    python tools/make_corpus.py --output "$CORPUS"
step "$TOKENIZER.model" "Tokenizer: sentencepiece, 4096 pieces" \
    python tools/train_tokenizer.py --input "$CORPUS" --model-prefix "$TOKENIZER" --vocab-size 4096
step "$TOKENS.idx" "Tokens: $TOKENS.bin and .idx" \
    python tools/preprocess_data.py --input "$CORPUS" --output-prefix "$TOKENS" \
    --tokenizer-type SentencePieceTokenizer --tokenizer-model "$TOKENIZER.model" --append-eod --workers 2

# Two ranks share the experts; a machine with a single GPU gives all of them to one rank.
ranks=2
flags=()
if has_gpu && [ "$(python -c 'import torch; print(torch.cuda.device_count())')" = 1 ]; then
    ranks=1
    flags=(--expert-model-parallel-size 1)
fi
if [ -z "${OMP_NUM_THREADS:-}" ]; then
    OMP_NUM_THREADS=$(($(nproc) / ranks))
    export OMP_NUM_THREADS=$((OMP_NUM_THREADS > 0 ? OMP_NUM_THREADS : 1))
fi
say "Training: $ranks processes, configs/quickstart.yaml, into $RUN"
torchrun --standalone --nproc-per-node "$ranks" pretrain_moe.py --config configs/quickstart.yaml "${flags[@]}"

say "Does it know more than how often each token occurs?"
python tools/unigram_entropy.py "$TOKENS" --run "$RUN" | tee "$RUN/entropy.txt"

say "Picture: $RUN/metrics.png"
entropy="$(awk '/^unigram entropy/ {print $3}' "$RUN/entropy.txt")"
python tools/plot_metrics.py "$RUN" --output "$RUN/metrics.png" \
    --reference-loss "$entropy" --reference-name "unigram entropy"

say "Sample"
python tools/generate.py --load "$RUN" --prompt "def " --max-new-tokens 120 | tee "$RUN/sample.txt"

say "Done in $((SECONDS - started)) s"
cat <<END
  losses         $(tr '\n' ';' <"$RUN/entropy.txt" | sed 's/;$//; s/;/; /g')
  metrics        $RUN/metrics.jsonl
  picture        $RUN/metrics.png
  sample         $RUN/sample.txt
  configuration  $RUN/config.yaml
  checkpoints    $RUN/iter_*
Next: train on your own text, or change configs/quickstart.yaml; README.md says how.
END
