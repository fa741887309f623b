"""Run one workload in a real engine of this process and write what happened as JSON.

    python run_engine.py '{"model": FOLDER, "workload": "mixed", "out": FILE, "options": {...}}'

``options`` go to ``vllm.LLM``. One engine a process, because it keeps global state. The drop-in is not
mentioned here: the engine finds it by its entry point, as it would anywhere.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

# The engine in this process, where the scheduler can be watched; its workers in processes of their own, with TP.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
               "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}

from workloads import WORKLOADS, Outputs, Request

COMMON = {"skip_tokenizer_init": True, "enforce_eager": True, "disable_log_stats": False, "max_num_seqs": 4}


def keep_state_dtype() -> None:
    """Keep the state's type: with AVX512-BF16 the engine would store that of a layer with rings in fp32."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def keeping(config: Any) -> None:
        dtype = config.cache_config.mamba_ssm_cache_dtype
        check(config)
        config.cache_config.mamba_ssm_cache_dtype = dtype

    CpuPlatform.check_and_update_config = staticmethod(keeping)


def note_steps(worker: Any) -> None:
    """In a worker: from now on note (write_pos, is_flush) of the live rows of every replay step."""
    from replayssm_cute import dispatch, mamba2

    op = mamba2.selective_state_update_replayssm_output_only
    worker.replay_steps = []

    def noting(*args: Any, **options: Any) -> Any:
        batch, (write_pos, is_flush), (slots, null) = len(args[1]), args[14:16], args[17:19]
        rows = zip(slots[:batch, 0].tolist(), write_pos.tolist(), is_flush.tolist(), strict=False)
        worker.replay_steps.append(sorted((w, f) for slot, w, f in rows if slot != null))
        return op(*args, **options)

    mamba2.selective_state_update_replayssm_output_only = noting
    dispatch.served.clear()


def read_steps(worker: Any) -> dict[str, Any]:
    from replayssm_cute import dispatch

    return {"served": {backend: n for (_, backend), n in dispatch.served.items()}, "steps": worker.replay_steps}


def record_schedule(llm: Any) -> list[list[tuple[int, int, int]]]:
    """From now on record the decode rows of every step: tokens computed, in this step, and when admitted."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    schedule, admitted = scheduler.schedule, {}
    steps: list[list[tuple[int, int, int]]] = []

    def recording(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        cached = output.scheduled_cached_reqs
        computed = {r.req_id: r.num_computed_tokens for r in output.scheduled_new_reqs}
        for name in (*computed, *cached.resumed_req_ids):
            admitted[name] = scheduler.requests[name].num_tokens
        computed |= zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        # One token on top of a state is run as decode, also where it is the end of a prompt.
        steps.append([(computed[name], count, admitted[name])
                      for name, count in output.num_scheduled_tokens.items() if count == 1 and computed[name] > 0])
        return output

    scheduler.schedule = recording
    return steps


def serve(llm: Any, waiting: list[Request]) -> dict[str, Any]:
    """Run the requests of a wave to their ends, greedily."""
    from vllm import SamplingParams

    prompts = {r.name: list(r.prompt) for r in waiting}
    waiting, step, done = sorted(waiting, key=lambda r: r.step), 0, {}
    while waiting or llm.llm_engine.has_unfinished_requests():
        while waiting and waiting[0].step <= step:
            request = waiting.pop(0)
            llm.llm_engine.add_request(request.name, {"prompt_token_ids": prompts[request.name]}, SamplingParams(
                temperature=0, max_tokens=request.output, ignore_eos=True, logprobs=2, detokenize=False))
        done |= {output.request_id: output for output in llm.llm_engine.step() if output.finished}
        step += 1
    return {name: {"prompt": prompts[name], "cached": output.num_cached_tokens,
                   "tokens": list(output.outputs[0].token_ids),
                   "logprobs": [sorted((p.logprob for p in best.values()), reverse=True)[:2]
                                for best in output.outputs[0].logprobs]}
            for name, output in done.items()}


def prefill_logprobs(llm: Any, requests: dict[str, Any]) -> dict[str, list[float]]:
    """Logprobs of the generated tokens when prompt and answer are read as one prompt, in chunks."""
    from vllm import SamplingParams

    texts = {name: r["prompt"] + r["tokens"] for name, r in requests.items()}
    found = llm.generate([{"prompt_token_ids": t} for t in texts.values()],
                         SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False),
                         use_tqdm=False)
    return {name: [best[token].logprob for best, token in zip(out.prompt_logprobs, text, strict=True)
                   if best is not None][len(requests[name]["prompt"]) - 1:]
            for (name, text), out in zip(texts.items(), found, strict=True)}


def main() -> None:
    case = json.loads(sys.argv[1])
    from vllm import LLM

    keep_state_dtype()
    llm = LLM(model=case["model"], **COMMON, **case["options"])
    cache = llm.llm_engine.vllm_config.cache_config
    llm.collective_rpc(note_steps)
    schedule = record_schedule(llm)
    requests: dict[str, Any] = {}
    for wave in WORKLOADS[case["workload"]]:
        outputs: Outputs = {name: r["tokens"] for name, r in requests.items()}
        requests |= serve(llm, wave(cache.block_size, outputs))
    workers, schedule = llm.collective_rpc(read_steps), list(schedule)
    metrics = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    Path(case["out"]).write_text(json.dumps({
        "requests": requests, "workers": workers, "schedule": schedule, "block": cache.block_size,
        "cache_mode": cache.mamba_cache_mode, "preemptions": metrics["vllm:num_preemptions"],
        "prefill": prefill_logprobs(llm, requests)}))


if __name__ == "__main__":
    main()
