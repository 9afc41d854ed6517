#!/usr/bin/env bash
# Shows on any machine that the numbers are the reference's: checks every recorded result that comes with the tests, takes
# the recorded checkpoint from Hugging Face's layout to ours and back, and plays recorded speech to it as if it were live.
# Its weights are random: what it says means nothing, how it says it is the point. Results: out/quickstart/.
#
#   bash launch/quickstart.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup_env.sh

export JAX_PLATFORMS=cpu  # where the recorded numbers come from; accelerators multiply float32 less exactly
python=.venv/bin/python
golden=tests/golden
out=out/quickstart
rm -rf "$out"
mkdir -p "$out"

step() { printf '\nquickstart: %s\n' "$*"; }

step "our results against the recorded ones in $golden"
"$python" launch/verify.py --golden="$golden" --json="$out/verify.json"

step "checkpoint: Hugging Face -> venus_jax -> Hugging Face"
"$python" launch/convert.py --from="$golden/checkpoint" --to="$out/checkpoint"
"$python" launch/convert.py --from="$out/checkpoint" --to="$out/huggingface"

step "a session: recorded speech, a second at a time"
"$python" - "$golden/audio/speech.npz" "$out/speech.wav" <<'PYTHON'
import sys
import numpy as np
import soundfile
soundfile.write(sys.argv[2], np.load(sys.argv[1])["wave_i16"][:12 * 16000], 16000)
PYTHON
"$python" launch/duplex.py --checkpoint="$out/checkpoint" --input="$out/speech.wav" --output="$out/duplex" --slots=512

step "written:
  $out/verify.json   errors and bounds, one entry a recorded result
  $out/checkpoint    the checkpoint in our layout
  $out/huggingface   the same converted back, tensor for tensor the one we began with
  $out/duplex        transcript.json, trace.jsonl and timeline.png of the session"
