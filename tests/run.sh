#!/usr/bin/env bash
# Runs the tests in two processes; makes the environment first where there is none. Every argument goes to pytest.
#
#   bash tests/run.sh                    # everything but the tests marked slow
#   bash tests/run.sh --slow             # everything
#   bash tests/run.sh -n 0 tests/media   # one folder, one process
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup_env.sh
exec .venv/bin/python -m pytest -n 2 --dist loadfile "$@"
